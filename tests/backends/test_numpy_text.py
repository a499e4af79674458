"""Strings, patterns, n-grams and pictures: against ONNX Runtime, counts by hand, and what the specification says."""

from __future__ import annotations

import io
import sys
from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from numpy_graphs import parsed
from onnx import helper
from runtime import RUNTIME, WITHOUT, needs_runtime

from refgrad.backends import get_backend
from refgrad.backends.numpy.kernels.re2 import compiled
from refgrad.errors import BackendError

pytestmark = pytest.mark.interpreter

NUMPY = get_backend("numpy")


def equal(got: Any, expected: Any) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if got.dtype == object:
        assert all(type(text) is str for text in got.ravel())
    np.testing.assert_array_equal(got, expected)


def texts(*values: Any) -> np.ndarray:
    return np.array(values, object)


def normalizer(attributes: str, shape: str = "C") -> str:
    """The locale is one that every machine has; none of these texts needs another."""
    head = f"(string[{shape}] X) => (string[{shape.replace('C', 'D')}] y)"
    return f'{head} {{ y = StringNormalizer<locale = "C"{attributes}>(X) }}'


def split(attributes: str, shape: str = "N") -> str:
    last = f"{shape}, K" if shape else "K"
    return f"(string[{shape}] X) => (string[{last}] y, int64[{shape}] z) {{ y, z = StringSplit{attributes}(X) }}"


CONCAT = "(string[N] X, string[M] Y) => (string[K] y) { y = StringConcat(X, Y) }"
DAYS = texts("Monday", "monday", "", "two words", "MONDAY ", "words")

# The graph, its feeds, and the outputs by the words of the specification where ONNX Runtime has others or none.
CASES: list[tuple[str, dict[str, Any], tuple[Any, ...] | None]] = [
    (normalizer(""), {"X": DAYS}, None),
    *(
        (
            normalizer(
                f', is_case_sensitive = {heed}, case_change_action = "{change}", stopwords = ["monday", "words"]'
            ),
            {"X": DAYS},
            None,
        )
        for heed in (0, 1)
        for change in ("NONE", "LOWER", "UPPER")
    ),
    (normalizer(', stopwords = ["MONDAY"]'), {"X": DAYS}, None),
    (normalizer(', stopwords = ["a"]', "1, C"), {"X": texts(["b", "a", "c"])}, None),
    (normalizer(', stopwords = ["a"]', "1, C"), {"X": texts(["a", "a"])}, None),
    (normalizer(', stopwords = ["a"]'), {"X": texts("a")}, None),
    (normalizer(""), {"X": texts("\u00c9t\u00e9", "\u4e2d")}, None),
    # beyond ASCII, case is Unicode's; the locale C of ONNX Runtime has none
    (
        normalizer(', case_change_action = "UPPER"'),
        {"X": texts("\u00e9", "stra\u00dfe")},
        (texts("\u00c9", "STRASSE"),),
    ),
    (normalizer(', stopwords = ["\u00c9"]'), {"X": texts("\u00e9", "e")}, (texts("e"),)),
    (normalizer(""), {"X": texts()}, (texts(""),)),
    (split('<delimiter = ",">'), {"X": texts("a,b,,c", " x ", ",", ",a")}, None),
    (split('<delimiter = ",", maxsplit = 1>'), {"X": texts("a,b,,c", " x ", ",", ",a,")}, None),
    (split('<delimiter = ",", maxsplit = 0>'), {"X": texts("a,b", "c")}, None),
    (split('<delimiter = "XX">'), {"X": texts("aXXbXXXc")}, None),
    (split(""), {"X": texts(" a  b  c ", "", " ")}, None),
    (split('<delimiter = "">'), {"X": texts(" a  b  c ", "d")}, None),
    *((split(f"<maxsplit = {most}>"), {"X": texts(" a  b  c ", "", " ", "a b")}, None) for most in (0, 1, 2, 3)),
    (split("", ""), {"X": np.array("a b", object)}, None),
    (split("", "2, N"), {"X": np.empty((2, 0), object)}, None),
    (split("", "2, 2"), {"X": texts(["a b c", "d"], ["", "e f"])}, None),
    (split(""), {"X": texts("", "")}, None),
    (split(""), {"X": texts("a\tb\nc")}, (texts(["a", "b", "c"]), np.array([3]))),
    (CONCAT, {"X": texts("a", "b"), "Y": texts("c", "")}, None),
    (CONCAT, {"X": texts("a", "b"), "Y": texts("c")}, None),
    (CONCAT, {"X": texts(), "Y": texts("c")}, None),
    (CONCAT, {"X": texts("a\0"), "Y": texts("\0b\0")}, (texts("a\0\0b\0"),)),
    (
        CONCAT.replace("[N]", "").replace("[M]", "").replace("[K]", ""),
        {"X": np.array("a", object), "Y": np.array("b", object)},
        None,
    ),
    ('(string[N] X) => (bool[N] y) { y = RegexFullMatch<pattern = "a+">(X) }', {"X": texts("a", "ab", "")}, None),
    ('(string X) => (bool y) { y = RegexFullMatch<pattern = "a+">(X) }', {"X": np.array("aa", object)}, None),
    (
        '(string[0, 2] X) => (bool[0, 2] y) { y = RegexFullMatch<pattern = "a+">(X) }',
        {"X": np.empty((0, 2), object)},
        None,
    ),
]


@pytest.mark.parametrize(
    ("text", "feeds", "expected"), CASES, ids=lambda x: x.partition("{")[2] if isinstance(x, str) else ""
)
def test_results(text: str, feeds: dict[str, Any], expected: tuple[Any, ...] | None) -> None:
    made = parsed(text)
    got = NUMPY.prepare(made).run(feeds)
    if expected is None:
        if not RUNTIME:
            pytest.skip(WITHOUT)
        expected = tuple(get_backend("ort-cpu").prepare(made).run(feeds).values())
    for one, other in zip(got.values(), expected, strict=True):
        equal(one, other)


# n-grams

POOL = [5, 6, 7, 5, 6, 6, 7, 7, 5, 5, 6, 7, 7, 6, 5]  # three of one token, three of two, two of three
COUNTS, INDEXES = [0, 3, 9], [3, 1, 0, 2, 7, 5, 6, 3]  # two n-grams share place 3, none has place 4


def vectorizer(
    mode: str, shortest: int, longest: int, skips: int, weights: list[float] | None, kind: str, shape: str
) -> str:
    pool = str([f"t{token}" for token in POOL]).replace("'", '"') if kind == "string" else str(POOL)
    name = "pool_strings" if kind == "string" else "pool_int64s"
    weighted = f", weights = {weights}" if weights else ""
    return (
        f'({kind}{shape} X) => (float{"[N, K]" if "," in shape else "[K]"} y) {{ y = TfIdfVectorizer<mode = "{mode}", '
        f"min_gram_length = {shortest}, max_gram_length = {longest}, max_skip_count = {skips}, ngram_counts = {COUNTS}, "
        f"ngram_indexes = {INDEXES}, {name} = {pool}{weighted}>(X) }}"
    )


def counted(
    row: list[Any], mode: str, shortest: int, longest: int, skips: int, weights: list[float] | None
) -> list[float]:
    """By hand: every n-gram of the row in turn, looked up in the pool."""
    grams = [
        (n, tuple(POOL[a : a + n]))
        for n, (a, b) in enumerate(zip(COUNTS, [*COUNTS[1:], len(POOL)], strict=True), 1)
        for a in range(a, b, n)
    ]
    found = Counter(
        tuple(row[start : start + n * step : step])
        for n in range(shortest, longest + 1)
        for step in range(1, (skips if n > 1 else 0) + 2)
        for start in range(len(row) - step * (n - 1))
    )
    result = [0.0] * (max(INDEXES) + 1)
    for number, (n, gram) in enumerate(grams):
        if shortest <= n <= longest:
            count = min(found[gram], 1) if mode == "IDF" else found[gram]
            result[INDEXES[number]] += count * (1 if weights is None or mode == "TF" else weights[number])
    return result


@pytest.mark.parametrize("kind", ["int64", "int32", "string"])
@pytest.mark.parametrize("skips", [0, 1, 5])
@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 2), (2, 2), (1, 3), (3, 3)])
@pytest.mark.parametrize(
    ("mode", "weighted"), [("TF", True), ("IDF", False), ("IDF", True), ("TFIDF", True), ("TFIDF", False)]
)
def test_n_grams(kind: str, skips: int, shortest: int, longest: int, mode: str, weighted: bool) -> None:
    weights = [1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0] if weighted else None
    rng = np.random.default_rng(0)
    for shape in ((12,), (3, 9), (2, 0), (2, 1)):
        tokens = rng.integers(4, 9, shape)
        X = (
            np.array([f"t{x}" for x in tokens.ravel()], object).reshape(shape)
            if kind == "string"
            else tokens.astype(kind)
        )
        made = parsed(vectorizer(mode, shortest, longest, skips, weights, kind, "[C]" if len(shape) == 1 else "[N, C]"))
        [got] = NUMPY.prepare(made).run({"X": X}).values()
        rows = tokens.reshape(1, -1) if len(shape) == 1 else tokens
        expected = np.array(
            [counted(row.tolist(), mode, shortest, longest, skips, weights) for row in rows], np.float32
        )
        equal(got, expected[0] if len(shape) == 1 else expected)
        if RUNTIME:
            theirs = get_backend("ort-cpu").prepare(made).run({"X": X})["y"]
            if mode == "IDF":  # of two n-grams that share a place, 3, ONNX Runtime takes the first; TFIDF adds both
                got[..., 3] = theirs[..., 3]
            equal(got, theirs)


def test_n_grams_of_a_scalar_of_no_row_and_in_double() -> None:
    text = vectorizer("TFIDF", 1, 2, 1, [0.1] * 8, "int64", "")
    [got] = NUMPY.prepare(parsed(text)).run({"X": np.array(6)}).values()
    equal(got, np.array([0, 0.1, 0, 0, 0, 0, 0, 0], np.float32))
    [got] = NUMPY.prepare(parsed(text), precision="float64").run({"X": np.array(6)}).values()
    assert got.dtype == np.float64
    [got] = (
        NUMPY.prepare(parsed(vectorizer("TF", 1, 2, 1, None, "int64", "[N, C]")))
        .run({"X": np.empty((0, 3), np.int64)})
        .values()
    )
    assert got.shape == (0, 8)


# Patterns

# fmt: off
PATTERNS = (
    r"a*", r"\w+", r"\W", r"\d", r"\D", r"\s", r"\S", r"[\w]+", r"[^\w]", r"[\W]", r"[\s\d]", r"[^\S]", r"a$",
    r"a$\n", r"(?m)a$\nb", r"(?m)^a$(?s:.)^b$", r"^a$", r"a\z", r"\Aa", r".", r"(?s).", r"(?i)a", r"(?i)é", r"(?i)ß",
    r"(?i)s", r"(?i)k", r"(?i)[k]", r"a(?i)b", r"a(?i)b|c", r"(?:a(?i)b|c)", r"(a(?i)b)c", r"(?i)a(?-i)b", r"(?i:a)b",
    r"a{2}", r"a{2,}", r"a{,2}", r"a{1,3}", r"{,2}", r"{", r"a{", r"[]a]+", r"[^]a]", r"[a-]+", r"[a\-z]+", r"[\]]",
    r"[[]", r"[[:alpha:]]+", r"[[:^alpha:]]", r"[^[:alpha:]]", r"[[:word:]]+", r"[[:punct:]]", r"[[:space:]]",
    r"[[:graph:]]", r"\pL", r"\PL", r"\p{Lu}", r"\p{^Lu}", r"\P{^Lu}", r"[\pL]+", r"[\p{L}\d]+", r"[^\pL]", r"\x61",
    r"\x{1F600}", r"\141", r"\01", r"\0", r"\Qa.b\E", r"\Qa.b", r"\Qa\Eb", r"\Qa\E*", r"\Qab\E*", '\\\\', r"a\\b",
    r"\bab\b", r"a\b", r"\B", r"a\B", r"\ba\b \bb\b", r"a|b", r"|", r"a|", r"(a|b)*", r"(?P<x>a)b", r"(?<x>a)b",
    r"(?:a)b", r"a*?", r"a+?b", r"(?U)a+", r"(?U)a+?b", r"www\.[\w.-]+\.\bcom\b",
    r"(\W|^)[\w.\-]{0,25}@(yahoo|gmail)\.com(\W|$)", r"\.", r"a\.b", r"\-", r"[\^]", r"\^", r"\t", r"[\t]", r"\v",
    r"\a", r"é", r"[é-ü]", r"(?i)[é-ü]", r"α|中", r"(a)(b)", r"((a))", r"(?i)(?:A|b)c?", r"[^a]", r"[^\n]", r"(?i)ſ",
    r"(?i)\x61", r"(?i)[^a]", r"\pN", r"\d+|\pN", r"()", r"(|a)", r"()*", r"a(|b)", r"(?i)", r"(?i)|a", r"^*",
    r"(?is)a.b", r"(?i-s)A", r"x*", r"[a-c]{2}", r"\pZ", r"\p{Any}", r"[[:ascii:]]", r"[[:blank:]]", r"\x{e9}", r"$",
    r"^", r"^$", r"(?m)^$", r"\n", r"(?i)\Qab\E", r"a\Q\Eb", r"(?i)(?-i:a)b", r"((?i)a)b", r"(?m)(?-m)a$\n", r"-",
    r"\z", r"a{0}", r"(ab){2}", r"(?:){2}", r"a|b|(?i)c", r"(?s)a.b(?-s).", r"[a-zA-Z_]\w*", r"#", r"a#b",
    r"(?i)[α-ω]", r"[\x{4e00}-\x{9fff}]", r"[a\d-z]", r"[\d-z]", r"[--a]", r"a{1000}", r"(?P<x>a)(?P<x>b)",
    r"(?P<1>a)", r"[[.a.]]", r"[[=a=]]", r"(?ii)a", r"^+", r"\b*", r"$?", r"\Q*\E*", r"\(*", r"\|+", r"[(]*",
    r"\Q(\E*",
)

NO_PATTERNS = (
    r"a**", r"[\Qa\E]", r"[a-\d]", r"a{1001}", r"a{2,1}", r"a++", r"a?+", r"a{2}{3}", r"a{2}+", r"*a", r"(*a)",
    r"a|*", r"(?=a)a", r"(?!a)", r"(?<=a)b", r"(a)\1", r"\Z", r"\y", r"\8", r"\1", r"[z-a]", r"[a", r"(a", r"a)",
    r"[[:foo:]]", r"\pX", r"\p{Foo}", r"(?z)a", r"(?P=x)", r"\x{110000}", r"\x6", r"\u0061", r"a\E", r"(?#c)a",
    r"(?>a)", r"[]", r"[^]", r"\é", 'a\\', r"(?", r"(?i", r"(?P<x", r"(?--i)a", r"(?-)a", r"(?i-)a", r"\p", r"\p{L",
    r"a*{2}", r"a*?*", r"a{2}??", r"(?:*a)", r"(?i)*", r"\C",
)

TEXTS = (
    "", "a", "A", "ab", "aB", "b", "abc", "aaa", "aaaa", 'a\n', '\n', 'a\nb', '\xe9', '\xc9', "1", '\u0663', "a1_",
    "_", " ", '\t', '\x0b', "a b", "a.b", "[", "]", "-", "^", "{", "a{,2}", "aa", "{,2}", '\\', '\u03b1', '\xdf',
    "ss", '\u017f', "s", "K", "K", "a-z", "]a", "www.google.com", "a|b", "(a)", '\x00', '\U0001f600', '\u4e2d',
    'a\\b', "x@yahoo.com", "ba", "aab", "abab", "Aa", "ac", "c",
)
# fmt: on


def matcher(pattern: str) -> onnx.ModelProto:
    node = helper.make_node("RegexFullMatch", ["x"], ["y"], pattern=pattern)
    x, y = (helper.make_tensor_value_info(name, kind, [None]) for name, kind in (("x", 8), ("y", 9)))
    graph = helper.make_graph([node], "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@needs_runtime
@pytest.mark.parametrize("pattern", PATTERNS, ids=ascii)
def test_a_pattern_matches_what_re2_matches(pattern: str) -> None:
    feeds = {"x": np.array(TEXTS, object)}
    [expected] = get_backend("ort-cpu").prepare(matcher(pattern)).run(feeds).values()
    [got] = NUMPY.prepare(matcher(pattern)).run(feeds).values()
    assert [text for text, match in zip(TEXTS, got, strict=True) if match] == [
        text for text, match in zip(TEXTS, expected, strict=True) if match
    ]


@pytest.mark.parametrize("pattern", NO_PATTERNS, ids=ascii)
def test_what_is_no_pattern_of_re2_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not a valid pattern of RE2"):
        compiled(pattern)
    if RUNTIME and pattern != r"\C":  # one byte of UTF-8: here texts have none
        with pytest.raises(BackendError):
            get_backend("ort-cpu").prepare(matcher(pattern))


# Pictures


def decoder(pixel_format: str) -> onnx.ModelProto:
    return parsed(f'(uint8[N] x) => (uint8[H, W, C] y) {{ y = ImageDecoder<pixel_format = "{pixel_format}">(x) }}')


def encoded(pixels: np.ndarray, form: str = "PNG", mode: str | None = None) -> np.ndarray:
    image = pytest.importorskip("PIL.Image").fromarray(pixels)
    with io.BytesIO() as file:
        (image if mode is None else image.convert(mode)).save(file, form)
        return np.frombuffer(file.getvalue(), np.uint8)


PIXELS = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[0, 0, 0], [255, 255, 255], [255, 0, 0]]], np.uint8)


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("mode", [None, "P", "RGBA"])
def test_a_picture_is_decoded_whatever_its_colours_are_stored_as(form: str, mode: str | None) -> None:
    if (form, mode) == ("PPM", "P"):
        pytest.skip("PPM has no palettes")
    stream = encoded(PIXELS, form, mode)
    for pixel_format, expected in (("RGB", PIXELS), ("BGR", PIXELS[..., ::-1])):
        [got] = NUMPY.prepare(decoder(pixel_format)).run({"x": stream}).values()
        equal(got, expected)


def test_a_grey_picture() -> None:
    grey = np.array([[0, 100, 255]], np.uint8)
    equal(NUMPY.prepare(decoder("Grayscale")).run({"x": encoded(grey)})["y"], grey[..., None])
    equal(NUMPY.prepare(decoder("RGB")).run({"x": encoded(grey)})["y"], np.repeat(grey[..., None], 3, 2))


@pytest.mark.parametrize("cut", [0, 4, 20, 50])
@pytest.mark.parametrize(("pixel_format", "channels"), [("RGB", 3), ("Grayscale", 1)])
def test_what_is_no_picture_is_empty(cut: int, pixel_format: str, channels: int) -> None:
    stream = encoded(PIXELS)[:cut]
    assert NUMPY.prepare(decoder(pixel_format)).run({"x": stream})["y"].shape == (0, 0, channels)


def test_pillow_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BackendError, match=r"ImageDecoder.* Pillow reads the pictures and is not installed"):
        NUMPY.prepare(decoder("RGB")).run({"x": np.zeros(1, np.uint8)})


def tf_idf(attributes: str, shape: str = "[C]") -> str:
    return f"(int64{shape} X) => (float[K] y) {{ y = TfIdfVectorizer<max_skip_count = 0, {attributes}>(X) }}"


ONE = "min_gram_length = 1, max_gram_length = 1, ngram_counts = [0]"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        normalizer("", "2, C"),
        {"X": texts(["a"], ["b"])},
        r"StringNormalizer .* X has shape \(2, 1\), not \[C\] or \[1, C\]",
    ),
    (normalizer(', case_change_action = "TITLE"'), {"X": DAYS}, "case_change_action 'TITLE' is not one of"),
    (
        '(string[N] X) => (bool[N] y) { y = RegexFullMatch<pattern = "(">(X) }',
        {"X": DAYS},
        "RegexFullMatch .* missing \\)",
    ),
    (
        tf_idf(f'{ONE}, mode = "X", ngram_indexes = [0], pool_int64s = [1]'),
        {"X": np.zeros(1, int)},
        "mode 'X' is not one of",
    ),
    (
        tf_idf(f'{ONE}, mode = "TF", ngram_indexes = [0]'),
        {"X": np.zeros(1, int)},
        "one of pool_int64s and pool_strings",
    ),
    (
        tf_idf(f'{ONE}, mode = "TF", ngram_indexes = [0], pool_int64s = [1]', "[A, B, C]"),
        {"X": np.zeros((1, 1, 1), int)},
        "not .C. or .N, C.",
    ),
    (
        tf_idf(f'{ONE}, mode = "TF", ngram_indexes = [0], pool_int64s = [1, 2]'),
        {"X": np.zeros(1, int)},
        "the pool holds 2 n-grams",
    ),
    (
        tf_idf(f'{ONE}, mode = "TF", ngram_indexes = [0, 1], pool_int64s = [1, 1]'),
        {"X": np.zeros(1, int)},
        "has the same 1-gram twice",
    ),
    (
        tf_idf(f'{ONE}, mode = "IDF", weights = [1.0], ngram_indexes = [0, 1], pool_int64s = [1, 2]'),
        {"X": np.zeros(1, int)},
        "so do weights if they are given",
    ),
    (
        tf_idf(
            'min_gram_length = 1, max_gram_length = 2, ngram_counts = [0, 2], mode = "TF", '
            "ngram_indexes = [0], pool_int64s = [1, 2, 3]"
        ),
        {"X": np.zeros(1, int)},
        r"ngram_counts \[0, 2\] does not divide the pool of 3",
    ),
    (
        tf_idf(
            ONE.replace("max_gram_length = 1", "max_gram_length = 2")
            + ', mode = "TF", ngram_indexes = [0], pool_int64s = [1]'
        ),
        {"X": np.zeros(1, int)},
        "lengths 1 to 2 do not fit the 1 entries",
    ),
    (
        '(uint8[N] X) => (uint8[H, W, C] y) { y = ImageDecoder<pixel_format = "CMYK">(X) }',
        {"X": np.zeros(1, np.uint8)},
        "pixel_format 'CMYK' is not one of",
    ),
]


@pytest.mark.parametrize(
    ("text", "feeds", "message"), WRONG, ids=lambda x: x if isinstance(x, str) and "{" not in x else ""
)
def test_errors(text: str, feeds: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        NUMPY.prepare(parsed(text)).run(feeds)
