/* Run the tests of a folder on ONNX Runtime by its C API. It needs a POSIX system and the header of ONNX Runtime, nothing else.
 *
 *   cc -std=c11 -O2 -I INCLUDE run.c -o run -ldl -lm     (INCLUDE has onnxruntime_c_api.h)
 *   ./run LIBRARY FOLDER [--only TEXT] [--seconds 60] [--skip N]
 *   ./run /usr/lib/libonnxruntime.so ../gradients
 *
 * A release of ONNX Runtime has both, in include/ and lib/. So has Debian: apt-get install libonnxruntime-dev, with the header
 * in /usr/include/onnxruntime. The library may be newer than the header; the one of the Python package is onnxruntime/capi/
 * libonnxruntime.so.* (.dylib on macOS).
 *
 * A line of JSON for each test: {"test": ..., "verdict": ..., "why": ...}. The verdicts:
 *
 *   right           each output has the right shape and type, and no element is off by more than the tolerance of the test
 *   wrong           an output is off by more, or has another shape or type
 *   not supported   the runtime says that it does not support something in the model
 *   crashed         any other error, a process that ended, or a file of the test that is missing or damaged
 *   timed out       no answer in time
 *
 * The last line is the summary, with the number of tests of each verdict. The tests run in a process of their own. When it ends
 * or hangs, the test that it was at has crashed or timed out, and the next process goes on behind it. The exit code is 0 where
 * every test is right or not supported, 1 where one is not, and 2 where there was none to run.
 */
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <onnxruntime_c_api.h>

enum { WHY = 400, LINE = 1 << 16, MOST = 256, MOST_AXES = 64 };
enum { RIGHT, WRONG, UNSUPPORTED, CRASHED, TIMED_OUT, N_VERDICTS };

static const char *const VERDICTS[N_VERDICTS] = {"right", "wrong", "not supported", "crashed", "timed out"};
static size_t counts[N_VERDICTS];

typedef struct {
    char *name, *dtype, *file;
} Tensor;

typedef struct {
    char *name, *model;
    double tolerance;
    Tensor inputs[MOST], outputs[MOST];
    size_t n_inputs, n_outputs;
} Test;

typedef struct {
    unsigned char *memory, *data;
    int64_t dims[MOST_AXES];
    size_t rank, count, bytes;
} Array;

/* The types that this program reads. Of 4 bits there are two numbers in a byte of the runtime, and one in a byte of a file. */
static const struct Type {
    const char *name;
    ONNXTensorElementDataType type;
    size_t size;
} TYPES[] = {
    {"float32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4},   {"float64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8},
    {"float16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2}, {"bfloat16", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, 2},
    {"int64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8},     {"uint64", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64, 8},
    {"int32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4},     {"uint32", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32, 4},
    {"int16", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16, 2},     {"uint16", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16, 2},
    {"int8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, 1},       {"uint8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, 1},
    {"bool", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, 1},       {"int4", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT4, 1},
    {"uint4", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT4, 1},
};

static const OrtApi *ort;
static OrtEnv *env;
static OrtMemoryInfo *memory;
static char why[WHY];

static void say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    for (char *c = why; *c; c++)
        if ((unsigned char)*c < ' ') *c = ' ';
}

static void *owned(void *pointer) {
    if (!pointer) {
        fprintf(stderr, "out of memory\n");
        exit(2);
    }
    return pointer;
}

/* What runtimes say of something that they do not support. */
static const char *const PHRASES[] = {
    "not implemented",
    "not_implemented",
    "notimplemented",
    "unimplemented",
    "not supported",
    "not support ",
    "unsupported",
    "only support",
    "are supported",
    "is supported",
    "registered or supported",
    "no kernel",
    "could not find an implementation",
    "no implementation for",
    "no registered implementation",
    "not a registered",
    "no schema",
    "no opset",
    "guarantees* support for",
    "ir version",
    "no conversion rule",
    "of input parameter (",
    "invalid tensor type",
    "cannot be fed",
    "_inlfunc_",
};
static int unsupported; /* whether the last error says so: `why` may be cut */

static int says_unsupported(const char *text) {
    for (; *text; text++)
        for (size_t k = 0; k < sizeof PHRASES / sizeof *PHRASES; k++)
            if (!strncasecmp(text, PHRASES[k], strlen(PHRASES[k]))) return 1;
    return 0;
}

/* Whether a call of the runtime worked; if not, `why` has its words. */
static int fine(OrtStatus *status) {
    if (!status) return 1;
    unsupported = says_unsupported(ort->GetErrorMessage(status));
    say("%s", ort->GetErrorMessage(status));
    ort->ReleaseStatus(status);
    return 0;
}

/* The verdict where something did not work. */
static int failure(void) {
    return unsupported ? UNSUPPORTED : CRASHED;
}

static const struct Type *type_of(const char *name) {
    for (size_t k = 0; k < sizeof TYPES / sizeof *TYPES; k++)
        if (!strcmp(TYPES[k].name, name)) return &TYPES[k];
    unsupported = 1;
    say("the type %s is not supported by this program", name);
    return NULL;
}

static char *path_in(const char *folder, const char *file) {
    size_t size = strlen(folder) + strlen(file) + 2;
    char *path = owned(malloc(size));
    snprintf(path, size, "%s/%s", folder, file);
    return path;
}

/* Read a .npy file; 0 where it is not one, or not of the size that its shape says. */
static int read_array(const char *folder, const Tensor *tensor, Array *array) {
    memset(array, 0, sizeof *array);
    const struct Type *type = type_of(tensor->dtype);
    if (!type) return 0;
    char *path = path_in(folder, tensor->file);
    FILE *file = fopen(path, "rb");
    free(path);
    say("damaged file: %s cannot be read", tensor->file);
    if (!file) return 0;
    long size = fseek(file, 0, SEEK_END) ? -1 : ftell(file);
    rewind(file);
    array->memory = size < 10 ? NULL : owned(calloc((size_t)size + 1, 1));
    size_t got = array->memory ? fread(array->memory, 1, (size_t)size, file) : 0;
    fclose(file);
    if (got < 10 || got != (size_t)size || memcmp(array->memory, "\x93NUMPY", 6)) return 0;
    size_t start = 10 + array->memory[8] + 256u * array->memory[9];
    if (start > got) return 0;
    char *header = owned(calloc(start - 9, 1));
    memcpy(header, array->memory + 10, start - 10);
    const char *shape = strstr(header, "'shape': (");
    array->count = 1;
    for (const char *c = shape ? shape + 10 : ""; *c && *c != ')';) {
        char *end;
        long long dim = strtoll(c, &end, 10);
        if (end != c) {
            if (array->rank == MOST_AXES || dim < 0 || (dim && array->count > SIZE_MAX / 8 / (size_t)dim)) {
                shape = NULL;
                break;
            }
            array->dims[array->rank++] = dim;
            array->count *= (size_t)dim;
            c = end;
        } else {
            c++;
        }
    }
    int is_c = strstr(header, "'fortran_order': False") != NULL || array->rank < 2;
    free(header);
    array->data = array->memory + start;
    array->bytes = array->count * type->size;
    if (!shape || !is_c || array->bytes != got - start) return 0;
    if (strstr(tensor->dtype, "int4")) {
        for (size_t k = 0; k < array->count; k++) {
            unsigned char low = array->data[k] & 15;
            array->data[k / 2] = k % 2 ? (unsigned char)(array->data[k / 2] | low << 4) : low;
        }
        array->bytes = (array->count + 1) / 2;
    }
    why[0] = 0;
    return 1;
}

static double half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double sign = bits >> 15 ? -1 : 1;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24));
}

static double element(const void *data, ONNXTensorElementDataType type, size_t k) {
    uint32_t wide;
    float number;
    switch (type) {
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: return ((const float *)data)[k];
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE: return ((const double *)data)[k];
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16: return half(((const uint16_t *)data)[k]);
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
            wide = (uint32_t)((const uint16_t *)data)[k] << 16;
            memcpy(&number, &wide, sizeof number);
            return number;
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64: return (double)((const int64_t *)data)[k];
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64: return (double)((const uint64_t *)data)[k];
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32: return ((const int32_t *)data)[k];
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32: return ((const uint32_t *)data)[k];
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16: return ((const int16_t *)data)[k];
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16: return ((const uint16_t *)data)[k];
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8: return ((const int8_t *)data)[k];
        default: return ((const uint8_t *)data)[k];
    }
}

/* What becomes of an output; `why` has the reason. */
static int judged(const char *folder, const Test *test, const Tensor *output, const OrtValue *value) {
    Array right;
    OrtTensorTypeAndShapeInfo *info = NULL;
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    int64_t dims[MOST_AXES];
    size_t rank = 0;
    void *data = NULL;
    int ok = read_array(folder, output, &right) && fine(ort->GetTensorTypeAndShape(value, &info)) &&
             fine(ort->GetTensorElementType(info, &type)) && fine(ort->GetDimensionsCount(info, &rank)) &&
             fine(ort->GetDimensions(info, dims, rank < MOST_AXES ? rank : MOST_AXES)) &&
             fine(ort->GetTensorMutableData((OrtValue *)value, &data));
    if (info) ort->ReleaseTensorTypeAndShapeInfo(info);
    int found = WRONG;
    if (!ok) {
        found = failure();
    } else if (type != type_of(output->dtype)->type) {
        say("%s has another type than %s", output->name, output->dtype);
    } else if (rank != right.rank || memcmp(dims, right.dims, rank * sizeof *dims)) {
        say("%s has another shape", output->name);
    } else {
        double most = 0;
        for (size_t k = 0; k < right.count && !isnan(most); k++) {
            double off = fabs(element(data, type, k) - element(right.data, type, k));
            if (!(off <= most)) most = off;
        }
        if (most <= test->tolerance) found = RIGHT;
        else say("%s is off by %.2g, where %.2g is allowed", output->name, most, test->tolerance);
    }
    free(right.memory);
    return found;
}

/* What becomes of a test; `why` has the reason. */
static int verdict(const char *folder, const Test *test) {
    Array arrays[MOST];
    OrtValue *inputs[MOST] = {NULL}, *outputs[MOST] = {NULL};
    const char *read[MOST], *asked[MOST];
    OrtSessionOptions *options = NULL;
    OrtSession *session = NULL;
    size_t k, given = 0;
    int found = RIGHT;
    why[0] = 0;
    unsupported = 0;
    char *model = path_in(folder, test->model);
    if (!test->n_outputs) {
        say("damaged file: tests.tsv lists no output");
        free(model);
        return CRASHED;
    }
    if (access(model, R_OK)) {
        say("damaged file: %s cannot be read", test->model);
        free(model);
        return CRASHED;
    }
    int ok = fine(ort->CreateSessionOptions(&options)) && fine(ort->SetSessionLogSeverityLevel(options, 4)) &&
             fine(ort->SetIntraOpNumThreads(options, 1));
    for (; ok && given < test->n_inputs; given++) {
        const Tensor *input = &test->inputs[given];
        Array *array = &arrays[given];
        ok = read_array(folder, input, array) &&
             fine(ort->CreateTensorWithDataAsOrtValue(memory, array->data, array->bytes, array->dims, array->rank,
                                                      type_of(input->dtype)->type, &inputs[given]));
        read[given] = input->name;
    }
    for (k = 0; k < test->n_outputs; k++) asked[k] = test->outputs[k].name;
    ok = ok && fine(ort->CreateSession(env, model, options, &session)) &&
         fine(ort->Run(session, NULL, read, (const OrtValue *const *)inputs, given, asked, test->n_outputs, outputs));
    free(model);
    if (!ok) found = failure();
    for (k = 0; found == RIGHT && k < test->n_outputs; k++) found = judged(folder, test, &test->outputs[k], outputs[k]);
    for (k = 0; k < given; k++) {
        if (inputs[k]) ort->ReleaseValue(inputs[k]);
        free(arrays[k].memory);
    }
    for (k = 0; k < test->n_outputs; k++)
        if (outputs[k]) ort->ReleaseValue(outputs[k]);
    if (session) ort->ReleaseSession(session);
    if (options) ort->ReleaseSessionOptions(options);
    return found;
}

/* Print text as JSON of ASCII: a message may have names in it that a terminal obeys. */
static void print_json(const char *text) {
    putchar('"');
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') putchar('\\');
        if ((unsigned char)*text >= ' ') putchar((unsigned char)*text < 0x7f ? *text : '?');
    }
    putchar('"');
}

/* Print the line of a test, and count it. */
static void report(const char *test, const char *found, const char *reason) {
    for (size_t k = 0; k < N_VERDICTS; k++) counts[k] += !strcmp(found, VERDICTS[k]);
    printf("{\"test\": ");
    print_json(test);
    printf(", \"verdict\": ");
    print_json(found);
    printf(", \"why\": ");
    print_json(reason);
    printf("}\n");
}

/* The tests of a folder: the rows of tests.tsv, with tabs between the words. */
static Test *read_tests(const char *folder, const char *only, size_t *count) {
    char *path = path_in(folder, "tests.tsv"), *line = owned(malloc(LINE));
    FILE *file = fopen(path, "r");
    free(path);
    Test *tests = NULL;
    int taken = 0;
    *count = 0;
    while (file && fgets(line, LINE, file)) {
        char *rest = line, *words[4] = {"", "", "", ""};
        line[strcspn(line, "\n")] = 0;
        for (size_t k = 0; k < 4 && rest; k++) {
            words[k] = rest;
            rest = strchr(rest, '\t');
            if (rest) *rest++ = 0;
        }
        if (!strcmp(words[0], "test")) {
            taken = strstr(words[1], only) != NULL;
            if (!taken) continue;
            tests = owned(realloc(tests, (*count + 1) * sizeof *tests));
            memset(&tests[*count], 0, sizeof *tests);
            tests[*count].name = owned(strdup(words[1]));
            tests[*count].model = owned(strdup(words[2]));
            tests[(*count)++].tolerance = strtod(words[3], NULL);
        } else if (taken) {
            Test *test = &tests[*count - 1];
            int is_input = !strcmp(words[0], "input");
            size_t *place = is_input ? &test->n_inputs : &test->n_outputs;
            if (*place == MOST) continue;
            Tensor *tensor = &(is_input ? test->inputs : test->outputs)[(*place)++];
            tensor->name = owned(strdup(words[1]));
            tensor->dtype = owned(strdup(words[2]));
            tensor->file = owned(strdup(words[3]));
        }
    }
    free(line);
    if (!file) return NULL;
    fclose(file);
    return tests ? tests : owned(calloc(1, sizeof *tests));
}

/* The API of a library; a file of this folder comes before a library of the system with its name. */
static const OrtApi *load(const char *library, const char **version) {
    char *here = path_in(".", library);
    void *handle = dlopen(strchr(library, '/') || access(here, R_OK) ? library : here, RTLD_NOW | RTLD_LOCAL);
    free(here);
    const OrtApiBase *(*base)(void) = NULL;
    if (handle) *(void **)&base = dlsym(handle, "OrtGetApiBase");
    if (!base) {
        fprintf(stderr, "%s is not a library of ONNX Runtime: %s\n", library, dlerror());
        fprintf(stderr, "Give its path. The Python package has it: onnxruntime/capi/libonnxruntime.so.*\n");
        return NULL;
    }
    *version = base()->GetVersionString();
    const OrtApi *found = base()->GetApi(ORT_API_VERSION);
    if (!found) fprintf(stderr, "ONNX Runtime %s is older than the header, which has API %d\n", *version, ORT_API_VERSION);
    return found;
}

/* Run the tests from `done` on, and write what becomes of each to `out`. */
static int child(const char *library, const char *folder, const Test *tests, size_t done, size_t count, FILE *out) {
    const char *version = "";
    ort = load(library, &version);
    if (!ort || !fine(ort->CreateEnv(ORT_LOGGING_LEVEL_FATAL, "run", &env)) ||
        !fine(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory)))
        return 2;
    fprintf(out, "%s\n", version);
    fflush(out);
    for (; done < count; done++) {
        int found = verdict(folder, &tests[done]);
        fprintf(out, "%s\t%s\n", VERDICTS[found], why);
        fflush(out);
    }
    return 0;
}

/* A line of the child, without its end: 1; none in time: 0; none any more: -1. */
static int next_line(int from, char *line, size_t size, double seconds) {
    for (size_t length = 0; length + 1 < size;) {
        struct pollfd ready = {.fd = from, .events = POLLIN};
        int found = poll(&ready, 1, (int)(1000 * seconds));
        if (found < 0 && errno == EINTR) continue;
        if (found <= 0) return 0;
        if (read(from, line + length, 1) != 1) return -1;
        if (line[length] == '\n') {
            line[length] = 0;
            return 1;
        }
        length++;
    }
    return -1;
}

int main(int count, char **words) {
    const char *only = "", *places[2] = {NULL, NULL};
    double seconds = 60;
    size_t done = 0, n_tests, n_places = 0;
    for (int k = 1; k < count; k++) {
        int has_value = k + 1 < count;
        if (!strcmp(words[k], "--only") && has_value) only = words[++k];
        else if (!strcmp(words[k], "--seconds") && has_value) seconds = strtod(words[++k], NULL);
        else if (!strcmp(words[k], "--skip") && has_value) done = strtoul(words[++k], NULL, 10);
        else if (n_places < 2 && words[k][0] != '-') places[n_places++] = words[k];
        else n_places = 3;
    }
    if (n_places != 2 || !(seconds > 0)) {
        fprintf(stderr, "run LIBRARY FOLDER [--only TEXT] [--seconds 60] [--skip N], where LIBRARY is libonnxruntime.so\n");
        return 2;
    }
    Test *tests = read_tests(places[1], only, &n_tests);
    if (!tests) {
        fprintf(stderr, "there is no tests.tsv in '%s': give a folder of tests, such as gradients\n", places[1]);
        return 2;
    }
    if (done >= n_tests) {
        fprintf(stderr, "there is no test to run: %zu match --only '%s'\n", n_tests, only);
        return 2;
    }
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    char *line = owned(malloc(LINE)), *told = owned(strdup(""));
    do { /* the parent does not load the runtime, whose threads a fork would lose */
        int ends[2], status = 0, late = 0;
        fflush(NULL);
        if (pipe(ends)) return perror("pipe"), 2;
        pid_t running = fork();
        if (running < 0) return perror("fork"), 2;
        if (running == 0) {
            close(ends[0]);
            FILE *out = owned(fdopen(ends[1], "w"));
            _exit(freopen("/dev/null", "w", stdout) ? child(places[0], places[1], tests, done, n_tests, out) : 2);
        }
        close(ends[1]);
        int found = next_line(ends[0], line, LINE, seconds);
        if (found == 1) {
            free(told);
            told = owned(strdup(line));
        }
        const char *loaded = found == 1 ? told : NULL;
        while (loaded && done < n_tests && (found = next_line(ends[0], line, LINE, seconds)) == 1) {
            char *reason = strchr(line, '\t');
            if (!reason) break;
            *reason++ = 0;
            report(tests[done++].name, line, reason);
        }
        late = found == 0;
        if (late) kill(running, SIGKILL);
        close(ends[0]);
        waitpid(running, &status, 0);
        if (!loaded) return 2; /* the child said why */
        if (done < n_tests) {
            if (late) say("no answer in %g s", seconds);
            else if (WIFSIGNALED(status)) say("the process ended with signal %d", WTERMSIG(status));
            else say("the process ended with code %d", WEXITSTATUS(status));
            report(tests[done++].name, VERDICTS[late ? TIMED_OUT : CRASHED], why);
        }
    } while (done < n_tests);
    clock_gettime(CLOCK_MONOTONIC, &end);
    double took = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    printf("{\"runtime\": \"onnxruntime-c\", \"version\": ");
    print_json(told);
    for (size_t k = 0; k < N_VERDICTS; k++) printf(", \"%s\": %zu", VERDICTS[k], counts[k]);
    printf(", \"seconds\": %.1f}\n", took);
    return counts[WRONG] || counts[CRASHED] || counts[TIMED_OUT];
}
