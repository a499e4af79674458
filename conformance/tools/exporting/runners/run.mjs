// Run the tests of a folder on ONNX Runtime in Node: onnxruntime-node, or onnxruntime-web (WebAssembly).
//
//   npm install onnxruntime-web        (or onnxruntime-node)
//   node run.mjs RUNTIME FOLDER [--only TEXT] [--seconds 60] [--skip N] [--modules FOLDER]
//   node run.mjs onnxruntime-web ../gradients
//
// A line of JSON for each test: {"test": ..., "verdict": ..., "why": ...}. The verdicts:
//
//   right           each output has the right shape and type, and no element is off by more than the tolerance of the test
//   wrong           an output is off by more, or has another shape or type
//   not supported   the runtime says that it does not support something in the model
//   crashed         any other error, a process that ended, or a file of the test that is missing or damaged
//   timed out       no answer in time
//
// The last line is the summary, with the number of tests of each verdict. The tests run in a process of their own. When it ends
// or hangs, the test that it was at has crashed or timed out, and the next process goes on behind it. The exit code is 0 where
// every test is right or not supported, 1 where one is not, and 2 where there was none to run. The runtime is looked for above
// this file and above the current folder; --modules names another folder that has node_modules.

import { spawn } from 'node:child_process';
import { existsSync, readFileSync, writeSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join, resolve } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';

const VERDICTS = ['right', 'wrong', 'not supported', 'crashed', 'timed out'];
const ANSWERS = 3; // the pipe of the verdicts, which a runtime does not print to
const RUNTIMES = ['onnxruntime-node', 'onnxruntime-web'];
const PHRASES = [ // what runtimes say of something that they do not support
  'not implemented',
  'not_implemented',
  'notimplemented',
  'unimplemented',
  'not supported',
  'not support ',
  'unsupported',
  'only support',
  'are supported',
  'is supported',
  'registered or supported',
  'no kernel',
  'could not find an implementation',
  'no implementation for',
  'no registered implementation',
  'not a registered',
  'no schema',
  'no opset',
  'guarantees* support for',
  'ir version',
  'no conversion rule',
  'of input parameter (',
  'invalid tensor type',
  'cannot be fed',
  '_inlfunc_',
];
const unsupported = (text) => PHRASES.some((phrase) => text.toLowerCase().includes(phrase));
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: Uint16Array,
  int64: BigInt64Array, uint64: BigUint64Array, int32: Int32Array, uint32: Uint32Array,
  int16: Int16Array, uint16: Uint16Array, int8: Int8Array, uint8: Uint8Array, bool: Uint8Array,
  int4: Uint8Array, uint4: Uint8Array,
};

/** The rows of each test in a folder; an error where a row is neither that of a test nor that of a tensor of one. */
function readTests(folder) {
  const tests = [];
  readFileSync(join(folder, 'tests.tsv'), 'utf8').trimEnd().split(/\r?\n/).forEach((line, k) => {
    const row = line.split('\t');
    if (row.length !== 4 || !['test', 'input', 'output'].includes(row[0]) || (row[0] !== 'test' && !tests.length)) {
      throw new Error(`line ${k + 1} is not a row of a test, an input or an output`);
    }
    if (row[0] === 'test') {
      tests.push({ name: row[1], model: row[2], tolerance: Number(row[3]), inputs: [], outputs: [] });
    } else {
      tests.at(-1)[row[0] === 'input' ? 'inputs' : 'outputs'].push({ name: row[1], dtype: row[2], file: row[3] });
    }
  });
  return tests;
}

/** The numbers and the shape in a .npy file; of a type that JavaScript does not have, its bits. */
function readArray(folder, { dtype, file }) {
  const bytes = readFileSync(join(folder, file));
  const start = 10 + bytes.readUInt16LE(8);
  const header = bytes.toString('latin1', 10, start);
  const dims = /'shape': \(([^)]*)\)/.exec(header)[1].split(',').map((size) => size.trim()).filter(Boolean).map(Number);
  if (!ARRAYS[dtype]) throw new Error(`the type ${dtype} is not supported by this program`);
  const size = dims.reduce((product, dim) => product * dim, ARRAYS[dtype].BYTES_PER_ELEMENT);
  if (bytes.length - start !== size || !/'fortran_order': False/.test(header) || /'>/.test(header)) {
    throw new Error(`${file} does not hold [${dims}] numbers of the type ${dtype}, row by row`);
  }
  return { data: new ARRAYS[dtype](new Uint8Array(bytes.subarray(start)).buffer), dims };
}

/** Numbers of 4 bits, two in a byte, the first in the lower half. */
function packed(data) {
  const bytes = new data.constructor(Math.ceil(data.length / 2));
  data.forEach((value, k) => { bytes[k >> 1] |= (value & 15) << (k % 2 ? 4 : 0); });
  return bytes;
}

/** The value of a float16 that has these bits. */
function half(bits) {
  const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : (2 ** -14 * fraction) / 1024);
}

/** What is wrong with the outputs; empty where nothing is. */
function difference(test, expected, results) {
  for (const [place, output] of test.outputs.entries()) {
    const right = expected[place];
    const got = results[output.name];
    if (got.dims.join() !== right.dims.join()) {
      return `${output.name} has the shape [${got.dims}] instead of [${right.dims}]`;
    }
    if (got.type !== output.dtype) return `${output.name} has the type ${got.type} instead of ${output.dtype}`;
    const wide = output.dtype === 'float16' ? (value) => (typeof value === 'number' && got.data instanceof Uint16Array ? half(value) : Number(value)) : Number;
    const wanted = output.dtype === 'float16' ? half : Number;
    let most = 0;
    for (let k = 0; k < right.data.length; k++) {
      const off = Math.abs(wide(got.data[k]) - wanted(right.data[k]));
      if (!(off <= most)) most = off;
      if (Number.isNaN(off)) break;
    }
    if (!(most <= test.tolerance)) {
      return `${output.name} is off by ${most.toPrecision(2)}, where ${test.tolerance.toPrecision(2)} is allowed`;
    }
  }
  return '';
}

/** What becomes of a test. */
async function verdict(ort, folder, test) {
  let session, inputs, expected, model;
  try {
    inputs = test.inputs.map((input) => readArray(folder, input));
    expected = test.outputs.map((output) => readArray(folder, output));
    model = readFileSync(join(folder, test.model));
    if (Number.isNaN(test.tolerance)) throw new Error('tests.tsv has a tolerance that is not a number');
    if (!expected.length) throw new Error('tests.tsv lists no output');
  } catch (error) {
    const told = String(error.message);
    return unsupported(told) ? ['not supported', told] : ['crashed', `damaged file: ${told}`];
  }
  try {
    const feeds = {};
    for (const [place, input] of test.inputs.entries()) {
      const { data, dims } = inputs[place];
      feeds[input.name] = new ort.Tensor(input.dtype, input.dtype.endsWith('int4') ? packed(data) : data, dims);
    }
    session = await ort.InferenceSession.create(model, { logSeverityLevel: 4 });
    const results = await session.run(feeds);
    const wrong = difference(test, expected, results);
    return [wrong ? 'wrong' : 'right', wrong];
  } catch (error) {
    const said = String(error?.message ?? error).replace(/\s+/g, ' ');
    return [unsupported(said) ? 'not supported' : 'crashed', said.slice(0, 300)];
  } finally {
    await session?.release?.();
  }
}

/** Run the tests from `skip` on, and write a line for each to a pipe of its own: its place, its verdict and why. */
async function child(runtime, require, folder, tests, skip) {
  const loaded = await import(pathToFileURL(require.resolve(runtime)));
  const ort = loaded.default ?? loaded;
  if (runtime === 'onnxruntime-web') ort.env.wasm.numThreads = 1;
  ort.env.logLevel = 'fatal';
  for (const [place, test] of tests.entries()) {
    if (place < skip) continue;
    const found = await verdict(ort, folder, test);
    if (found[1].includes('Aborted(')) process.exit(134); // WebAssembly does not recover
    writeSync(ANSWERS, `${JSON.stringify([place, ...found])}\n`);
  }
  process.exit(0);
}

/** Run the tests from `done` on in one process, and hand each verdict over; how many were done. */
function generation(again, seconds, done, count, told) {
  return new Promise((finish) => {
    const running = spawn(process.execPath, [...again, '--skip', String(done)], { stdio: ['ignore', 'ignore', 'ignore', 'pipe'] });
    let late = false;
    const limit = () => setTimeout(() => { late = true; running.kill('SIGKILL'); }, seconds * 1000);
    let timer = limit();
    const lines = createInterface({ input: running.stdio[ANSWERS] });
    lines.on('line', (line) => {
      let found;
      try { found = JSON.parse(line); } catch { return; }
      if (!Array.isArray(found) || found[0] !== done || !VERDICTS.includes(found[1])) return; // no answer to this test
      clearTimeout(timer);
      timer = limit();
      told(done++, found.slice(1));
    });
    const ended = Promise.all([
      new Promise((closed) => lines.on('close', closed)),
      new Promise((exited) => running.on('exit', (code, signal) => exited(signal ?? code))),
    ]);
    ended.then(([, code]) => {
      clearTimeout(timer);
      if (done < count) {
        told(done++, late ? ['timed out', `no answer in ${seconds} s`] : ['crashed', `the process ended with ${code}`]);
      }
      finish(done);
    });
  });
}

/** End with what is wrong with the use of this program. */
function refuse(told) {
  console.error(told);
  process.exit(2);
}

/** What the command line says. */
function options() {
  try {
    return parseArgs({
      allowPositionals: true,
      options: {
        only: { type: 'string', default: '' }, seconds: { type: 'string', default: '60' }, skip: { type: 'string', default: '0' },
        modules: { type: 'string', default: '' }, child: { type: 'boolean', default: false },
      },
    });
  } catch (error) {
    return refuse(error.message);
  }
}

const { values, positionals } = options();
const [runtime, folder] = positionals;
if (!RUNTIMES.includes(runtime) || positionals.length !== 2) {
  refuse(`node run.mjs RUNTIME FOLDER, where RUNTIME is ${RUNTIMES.join(' or ')}`);
}
if (!(Number(values.seconds) > 0) || !/^\d+$/.test(values.skip)) {
  refuse('--seconds takes a number above 0, and --skip a number of tests');
}
/** What resolves a runtime: from the folder of --modules, else from this file upwards, else from the current folder upwards. */
function resolving() {
  if (values.modules) return createRequire(join(resolve(values.modules), 'node_modules', '_'));
  const above = createRequire(import.meta.url);
  try {
    above.resolve(runtime);
    return above;
  } catch {
    return createRequire(join(process.cwd(), '_'));
  }
}
const require = resolving();
let version;
try {
  require.resolve(runtime);
  version = JSON.parse(readFileSync(join(require.resolve(runtime).split(runtime)[0], runtime, 'package.json'))).version;
} catch {
  refuse(`${runtime} is not installed: npm install ${runtime}`);
}
if (!existsSync(join(folder, 'tests.tsv'))) {
  refuse(`there is no tests.tsv in '${folder}': give a folder of tests, such as gradients`);
}
let listed;
try {
  listed = readTests(folder);
} catch (error) {
  refuse(`tests.tsv in '${folder}' is damaged: ${error.message}`);
}
const tests = listed.filter((test) => test.name.includes(values.only));
if (Number(values.skip) >= tests.length) {
  refuse(`there is no test to run: ${listed.length} are listed, ${tests.length} have '${values.only}' in their name`);
}
if (values.child) {
  await child(runtime, require, folder, tests, Number(values.skip));
}
const counts = Object.fromEntries(VERDICTS.map((word) => [word, 0]));
// A runtime's message may have names in it that a terminal obeys: JSON with escapes for all but ASCII.
const json = (value) => JSON.stringify(value).replace(/[\u007f-\uffff]/g, (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, '0')}`);
const start = performance.now();
const again = [fileURLToPath(import.meta.url), runtime, folder, '--only', values.only, '--modules', values.modules, '--child'];
let done = Number(values.skip);
while (done < tests.length) {
  done = await generation(again, Number(values.seconds), done, tests.length, (place, [found, why]) => {
    counts[found] += 1;
    console.log(json({ test: tests[place].name, verdict: found, why }));
  });
}
const seconds = Number(((performance.now() - start) / 1000).toFixed(1));
console.log(json({ runtime, version, ...counts, seconds }));
process.exit(counts.wrong || counts.crashed || counts['timed out'] ? 1 : 0);
