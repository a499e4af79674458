"""Findings about strings."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, model

_HEAD = '<ir_version: 10, opset_import: ["" : 21]>'


def _strings(*values: Any) -> np.ndarray:
    return np.array(values, object)


def _normalizer(attributes: str) -> Any:
    return model(f"{_HEAD} normalize (string[C] X) => (string[D] Y) {{ Y = StringNormalizer <{attributes}> (X) }}")


def _split(attributes: str) -> Any:
    return model(
        f"{_HEAD} split (string[N] X) => (string[N, K] Y, int64[N] Z) {{ Y, Z = StringSplit {attributes} (X) }}"
    )


def _match(pattern: str) -> Any:
    return model(f'{_HEAD} match (string[N] X) => (bool[N] Y) {{ Y = RegexFullMatch <pattern = "{pattern}"> (X) }}')


def _tf_idf(weights: str, shape: str) -> Any:
    return model(f"""{_HEAD}
        count (int64{shape} X) => (float[K] Y) {{
            Y = TfIdfVectorizer <mode = "TFIDF", min_gram_length = 1, max_gram_length = 1, max_skip_count = 0,
                ngram_counts = [0], ngram_indexes = [1, 0], pool_int64s = [5, 6], weights = {weights}> (X)
        }}
    """)


_ELEMENTS = "it examines the elements in X, and removes elements specified in the attribute stopwords"

FINDINGS = (
    Finding(
        REFERENCE,
        "StringNormalizer",
        "takes off accents",
        _normalizer('case_change_action = "NONE"'),
        {"X": _strings("Été")},
        {"Y": _strings("Été")},
        proof="without stop words and without a change of case nothing is changed",
    ),
    Finding(
        REFERENCE,
        "StringNormalizer",
        "removes words inside of elements",
        _normalizer('stopwords = ["b"]'),
        {"X": _strings("a b", "b")},
        {"Y": _strings("a b")},
        proof=_ELEMENTS,
    ),
    Finding(
        REFERENCE,
        "StringNormalizer",
        "removes empty strings, which are no stop words",
        _normalizer('stopwords = ["b"]'),
        {"X": _strings("a", "", "b")},
        {"Y": _strings("a", "")},
        proof=_ELEMENTS,
    ),
    Finding(
        REFERENCE,
        "StringNormalizer",
        "heeds case in stop words unless the case is changed",
        _normalizer('is_case_sensitive = 0, stopwords = ["monday"]'),
        {"X": _strings("Monday", "friday")},
        {"Y": _strings("friday")},
        proof="is_case_sensitive says whether the identification of stop words is case-sensitive; here it is 0",
    ),
    Finding(
        REFERENCE,
        "StringSplit",
        "fails on a scalar",
        model(f'{_HEAD} split (string X) => (string[K] Y, int64 Z) {{ Y, Z = StringSplit <delimiter = "."> (X) }}'),
        {"X": np.array("a.b", object)},
        {"Y": _strings("a", "b"), "Z": np.array(2)},
        proof="Y has one axis more than X",
    ),
    Finding(
        REFERENCE,
        "StringSplit",
        "leaves white space at the end where maxsplit is reached",
        _split("<maxsplit = 1>"),
        {"X": _strings(" a  b  c ")},
        {"Y": _strings(["a", "b  c"]), "Z": np.array([2])},
        proof="without a delimiter leading or trailing whitespace is removed in the output",
    ),
    Finding(
        REFERENCE,
        "StringConcat",
        "loses characters of value 0 at the end of a string",
        model(f"{_HEAD} concat (string[N] X, string[N] Y) => (string[N] Z) {{ Z = StringConcat (X, Y) }}"),
        {"X": _strings("a\0"), "Y": _strings("b\0")},
        {"Z": _strings("a\0b\0")},
        proof="the concatenation has all characters of both",
    ),
    Finding(
        REFERENCE,
        "RegexFullMatch",
        "takes the digits of other scripts for \\d",
        _match(r"\\d"),
        {"X": _strings("3", "٣")},
        {"Y": np.array([True, False])},
        proof=r"the syntax is that of RE2, where \d is [0-9]",
    ),
    Finding(
        REFERENCE,
        "RegexFullMatch",
        "knows no [[:alpha:]]",
        _match("[[:alpha:]]+"),
        {"X": _strings("ab", "a1")},
        {"Y": np.array([True, False])},
        proof="the syntax is that of RE2, where [[:alpha:]] is [A-Za-z]",
    ),
    Finding(
        REFERENCE,
        "TfIdfVectorizer",
        "takes the weights in the order of the outputs, not of the pool",
        _tf_idf("[10.0, 20.0]", "[N]"),
        {"X": np.array([5, 5, 6])},
        {"Y": np.array([20, 20], np.float32)},
        proof="weights[i] and ngram_indexes[i] belong to the i-th n-gram: Y[1] is 2·10 for the token 5, Y[0] is 1·20 for 6",
    ),
    Finding(
        ORT,
        "StringSplit",
        "splits at spaces only",
        _split(""),
        {"X": _strings("a\tb c")},
        {"Y": _strings(["a", "b", "c"]), "Z": np.array([3])},
        proof="without a delimiter the input is split on consecutive whitespace, and a tab is that",
    ),
)
