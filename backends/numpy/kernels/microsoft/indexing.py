"""ONNX Runtime's operators that take elements by their indices."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_indices
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("GatherND", domain=MICROSOFT, fresh=True)
def gather_nd(data: Array, indices: Array) -> Array:
    """What NumPy indexes with each row of indices"""
    if not indices.ndim or not data.ndim or indices.shape[-1] > data.ndim:
        raise ValueError(
            f"indices {list(indices.shape)} do not fit data {list(data.shape)}: their last axis names axes of it"
        )
    columns = [check_indices(indices[..., k], n) for k, n in enumerate(data.shape[: indices.shape[-1]])]
    return np.array(data[tuple(columns)] if columns else np.broadcast_to(data, (*indices.shape[:-1], *data.shape)))


@kernel("Unique", domain=MICROSOFT, fresh=True)
def unique(x: Array) -> tuple[Array, Array, Array]:
    """The elements in a dictionary, which keeps them as they came"""
    if x.ndim != 1:
        raise ValueError(f"x has rank {x.ndim}; it has one axis")
    number: dict[object, int] = {}
    idx = np.array([number.setdefault(value, len(number)) for value in x.tolist()], np.int64)
    counts = np.bincount(idx, minlength=len(number))
    first = np.array([int(np.flatnonzero(idx == k)[0]) for k in range(len(number))], np.int64)
    return x[first], idx, counts.astype(np.int64)


@kernel("NGramRepeatBlock", domain=MICROSOFT, fresh=True)
def ngram_repeat_block(input_ids: Array, scores: Array, *, ngram_size: int) -> Array:
    """Row by row, and n-gram by n-gram"""
    if ngram_size < 1:
        raise ValueError(f"ngram_size is {ngram_size}; it is at least 1")
    if input_ids.ndim != 2 or scores.ndim != 2 or len(input_ids) != len(scores):
        raise ValueError(
            f"input_ids {list(input_ids.shape)} and scores {list(scores.shape)} are no matrices with a row for each sample"
        )
    out = scores.copy()
    for row, tokens in enumerate(input_ids.tolist()):
        end = len(tokens) - ngram_size + 1
        for k in range(end):
            if tokens[k : k + ngram_size - 1] == tokens[end:]:
                banned = np.array([tokens[k + ngram_size - 1]])
                out[row, check_indices(banned, scores.shape[1], "input_ids", lowest=0)] = -np.inf
    return out
