"""ONNX Runtime's operators that take elements by their indices."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_indices, check_shape
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("GatherND", domain=MICROSOFT, fresh=True)
def gather_nd(data: Array, indices: Array) -> Array:
    """The slice of `data` that NumPy takes with each row of `indices`"""
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


@kernel("TorchEmbedding", domain=MICROSOFT, fresh=True)
def torch_embedding(
    weight: Array, indices: Array, padding_idx: Array | None = None, scale_grad_by_freq: Array | None = None
) -> Array:
    """The rows; padding_idx and scale_grad_by_freq are about the gradient alone."""
    if weight.ndim != 2:
        raise ValueError(f"weight has rank {weight.ndim}; rank 2 is needed")
    for name, given in (("padding_idx", padding_idx), ("scale_grad_by_freq", scale_grad_by_freq)):
        if given is not None:
            check_shape(name, given.shape, ())
    check_indices(indices, len(weight), lowest=0)
    return np.take(weight, indices, axis=0)


@kernel("WordConvEmbedding", domain=MICROSOFT, in_float32=True, fresh=True)
def word_conv_embedding(
    Sequence: Array,
    W: Array,
    B: Array,
    C: Array,
    *,
    char_embedding_size: int | None = None,
    conv_window_size: int | None = None,
    embedding_size: int | None = None,
) -> Array:
    """One word after the other"""
    if Sequence.ndim != 2 or W.ndim != 4 or C.ndim != 2:
        ranks = f"Sequence {Sequence.ndim}, W {W.ndim}, C {C.ndim}"
        raise ValueError(f"the ranks are {ranks}; Sequence has rank 2, W rank 4 and C rank 2")
    filters, _, width, size = W.shape
    check_shape("W", W.shape, (filters, 1, width, C.shape[1]))
    check_shape("B", B.shape, (filters,))
    for name, given, found in (
        ("char_embedding_size", char_embedding_size, size),
        ("conv_window_size", conv_window_size, width),
        ("embedding_size", embedding_size, filters),
    ):
        if given is not None and given != found:
            raise ValueError(f"{name} is {given}, and W {list(W.shape)} has {found}")
    if not 1 <= width <= Sequence.shape[1]:
        raise ValueError(f"windows of {width} characters do not fit words of {Sequence.shape[1]}")
    check_indices(Sequence, len(C), "Sequence", lowest=0)
    Y = np.zeros((len(Sequence), filters), W.dtype)
    for word, characters in enumerate(Sequence):
        if characters[0]:
            count = max(np.count_nonzero(characters), width)
            windows = [C[characters[start : start + width]] for start in range(count - width + 1)]
            Y[word] = np.tanh(np.einsum("nwc,fwc->nf", np.stack(windows), W[:, 0]) + B).max(0)
    return Y
