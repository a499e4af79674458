"""Operators on strings, which are Python's, in arrays of objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from sys import getsizeof
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.re2 import compiled
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel


def _array(texts: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    result = np.empty(len(texts), object)
    result[:] = texts
    return result.reshape(shape)


@kernel("StringConcat", fresh=True)
def string_concat(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    size = np.broadcast_shapes(X.shape, Y.shape)
    copies = [math.prod(size) / max(x.size, 1) for x in (X, Y)]
    need(sum(times * sum(map(getsizeof, x.flat)) for times, x in zip(copies, (X, Y), strict=True)))
    return np.asarray(X + Y, object)


@kernel("StringNormalizer", fresh=True)
def string_normalizer(
    X: np.ndarray,
    *,
    case_change_action: str,
    is_case_sensitive: int,
    locale: str = "",
    stopwords: Sequence[str] = (),
) -> np.ndarray:
    """Drop the elements that are stop words, then change case as Unicode does it, whatever the `locale`."""
    if X.ndim not in (1, 2) or (X.ndim == 2 and len(X) != 1):
        raise ValueError(f"X has shape {X.shape}, not [C] or [1, C]")
    changes: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}
    if case_change_action not in changes:
        raise ValueError(f"case_change_action {case_change_action!r} is not one of {list(changes)}")
    change = changes[case_change_action]
    seen: Callable[[str], str] = str if is_case_sensitive else str.lower
    stops = set(map(seen, stopwords))
    texts = X.ravel().tolist()
    kept = [change(text) for text in texts if seen(text) not in stops] if stops else list(map(change, texts))
    kept = kept or [""]
    return _array(kept, (1, len(kept)) if X.ndim == 2 else (len(kept),))


@kernel("StringSplit", fresh=True)
def string_split(X: np.ndarray, *, delimiter: str = "", maxsplit: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """Y: the pieces along a last axis, filled up with empty strings; Z: how many. Without `delimiter`, split at white space."""
    texts = X.ravel().tolist()
    if delimiter:
        pieces = [text.split(delimiter, maxsplit) for text in texts]
    else:
        pieces = [text.strip().split(None, maxsplit) for text in texts]
    counts = list(map(len, pieces))
    most = max(counts, default=0)
    need(2 * most * len(texts) * 8)
    padded = [piece for row in pieces for piece in row + [""] * (most - len(row))]
    return _array(padded, (*X.shape, most)), np.array(counts, np.int64).reshape(X.shape)


@kernel("RegexFullMatch", fresh=True)
def regex_full_match(X: np.ndarray, *, pattern: str) -> np.ndarray:
    match = compiled(pattern).fullmatch
    return np.array([match(text) is not None for text in X.ravel().tolist()], bool).reshape(X.shape)


@kernel("TfIdfVectorizer", fresh=True)
def tf_idf_vectorizer(
    X: np.ndarray,
    *,
    mode: str,
    min_gram_length: int,
    max_gram_length: int,
    max_skip_count: int,
    ngram_counts: list[int],
    ngram_indexes: list[int],
    weights: list[float] | None = None,
    pool_int64s: list[int] | None = None,
    pool_strings: list[str] | None = None,
    _wide: bool = False,
) -> np.ndarray:
    """Y[ngram_indexes[i]] = Σ weights[i]·(how often, or in mode IDF whether, the i-th n-gram of the pool is in the row)."""
    if mode not in ("TF", "IDF", "TFIDF"):
        raise ValueError(f"mode {mode!r} is not one of 'TF', 'IDF', 'TFIDF'")
    if X.ndim > 2:
        raise ValueError(f"X has shape {X.shape}, not [C] or [N, C]")
    if (pool_int64s is None) == (pool_strings is None):
        raise ValueError("give exactly one of pool_int64s and pool_strings")
    pool = tuple[Any, ...](pool_int64s or pool_strings or ())
    grams = _grams(pool, tuple(ngram_counts), min_gram_length, max_gram_length)
    if len(ngram_indexes) != grams.size or (weights and len(weights) != grams.size):
        raise ValueError(
            f"the pool holds {grams.size} n-grams: ngram_indexes needs as many numbers, and so do weights if they are given"
        )
    rows = X if X.ndim == 2 else X.reshape(1, -1)
    tokens = np.searchsorted(grams.tokens, rows)
    known = grams.tokens.take(tokens, mode="clip") == rows if len(grams.tokens) else np.zeros(rows.shape, bool)
    tokens = np.where(known, tokens, len(grams.tokens))
    found = [np.zeros(0, np.int64)]
    for n, (first, levels, order) in grams.tables.items():
        windows = _windows(rows.shape[1], n, max_skip_count)
        row, code = np.arange(len(rows))[:, None], np.zeros((len(rows), len(windows)), np.int64)
        here = np.ones(code.shape, bool)
        for level, column in zip(levels, windows.T, strict=True):
            key = code * (len(grams.tokens) + 1) + tokens[:, column]
            code = np.searchsorted(level, key)
            here &= level.take(code, mode="clip") == key
        found.append((row * grams.size + first + order.take(code, mode="clip"))[here])
    counts = np.bincount(np.concatenate(found), minlength=len(rows) * grams.size).reshape(len(rows), grams.size)
    values = np.minimum(counts, 1) if mode == "IDF" else counts
    if weights and mode != "TF":
        values = values * np.array(weights)
    need(3 * len(rows) * (max(ngram_indexes) + 1) * 8)
    Y = np.zeros((len(rows), max(ngram_indexes) + 1))
    np.add.at(Y.T, np.array(ngram_indexes), values.T)
    return (Y if X.ndim == 2 else Y[0]).astype(np.float64 if _wide else np.float32)


@dataclass(frozen=True)
class _Grams:
    """The pool of TfIdfVectorizer: its tokens in order, and a table for each length of n-gram.

    A table has the number of its first n-gram in the pool. It has the sorted codes of all beginnings up to each place of
    the n-gram, and the n-gram of each of the last codes.
    """

    size: int
    tokens: np.ndarray
    tables: dict[int, tuple[int, list[np.ndarray], np.ndarray]]


@lru_cache(maxsize=16)
def _grams(pool: tuple[Any, ...], starts: tuple[int, ...], shortest: int, longest: int) -> _Grams:
    if not 1 <= shortest <= longest <= len(starts):
        raise ValueError(f"lengths {shortest} to {longest} do not fit the {len(starts)} entries of ngram_counts")
    tokens, ids = np.unique(
        np.array(pool, object if pool and isinstance(pool[0], str) else np.int64), return_inverse=True
    )
    tables, size = {}, 0
    for n, (start, end) in enumerate(zip(starts, (*starts[1:], len(pool)), strict=True), 1):
        if not 0 <= start <= end <= len(pool) or (end - start) % n:
            raise ValueError(f"ngram_counts {list(starts)} does not divide the pool of {len(pool)} into n-grams")
        count = (end - start) // n
        if count and shortest <= n <= longest:
            levels, code = [], np.zeros(count, np.int64)
            for column in ids[start:end].reshape(count, n).T:
                level, code = np.unique(code * (len(tokens) + 1) + column, return_inverse=True)
                levels.append(level)
            if len(levels[-1]) < count:
                raise ValueError(f"the pool has the same {n}-gram twice")
            tables[n] = (size, levels, np.argsort(code))
        size += count
    return _Grams(size, tokens, tables)


@lru_cache(maxsize=64)
def _windows(length: int, n: int, skips: int) -> np.ndarray:
    """List the places of all n-grams in a row: [windows, n], with 0 to `skips` tokens left out between two."""
    steps = range(1, (skips if n > 1 else 0) + 2)
    places = [np.arange(max(length - step * (n - 1), 0))[:, None] + step * np.arange(n) for step in steps]
    return np.concatenate(places)
