"""ONNX Runtime's operators that take elements by their indices."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_indices, check_shape
from refgrad.extend import Arguments, kernel_of_body
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("GatherND", domain=MICROSOFT, fresh=True)
def gather_nd(args: Arguments) -> Array:
    """The slice of `data` that NumPy takes with each row of `indices`"""
    if not args.indices.ndim or not args.data.ndim or args.indices.shape[-1] > args.data.ndim:
        raise ValueError(
            f"indices {list(args.indices.shape)} do not fit data {list(args.data.shape)}: their last axis names axes of it"
        )
    columns = [check_indices(args.indices[..., k], n) for k, n in enumerate(args.data.shape[: args.indices.shape[-1]])]
    return np.array(
        args.data[tuple(columns)]
        if columns
        else np.broadcast_to(args.data, (*args.indices.shape[:-1], *args.data.shape))
    )


@kernel_of_body("Unique", domain=MICROSOFT, fresh=True)
def unique(args: Arguments) -> tuple[Array, Array, Array]:
    """The elements in a dictionary, which keeps them as they came"""
    if args.x.ndim != 1:
        raise ValueError(f"x has rank {args.x.ndim}; it has one axis")
    number: dict[object, int] = {}
    idx = np.array([number.setdefault(value, len(number)) for value in args.x.tolist()], np.int64)
    counts = np.bincount(idx, minlength=len(number))
    first = np.array([int(np.flatnonzero(idx == k)[0]) for k in range(len(number))], np.int64)
    return args.x[first], idx, counts.astype(np.int64)


@kernel_of_body("NGramRepeatBlock", domain=MICROSOFT, fresh=True)
def ngram_repeat_block(args: Arguments) -> Array:
    """Row by row, and n-gram by n-gram"""
    if args.input_ids.ndim != 2 or args.scores.ndim != 2 or len(args.input_ids) != len(args.scores):
        raise ValueError(
            f"input_ids {list(args.input_ids.shape)} and scores {list(args.scores.shape)} are no matrices "
            f"with a row for each sample"
        )
    out = np.array(args.scores)
    for row, tokens in enumerate(args.input_ids.tolist()):
        end = len(tokens) - args.ngram_size + 1
        for k in range(end):
            if tokens[k : k + args.ngram_size - 1] == tokens[end:]:
                banned = np.array([tokens[k + args.ngram_size - 1]])
                out[row, check_indices(banned, args.scores.shape[1], "input_ids", lowest=0)] = -np.inf
    return out


@kernel_of_body("TorchEmbedding", domain=MICROSOFT, fresh=True)
def torch_embedding(args: Arguments) -> Array:
    """The rows; padding_idx and scale_grad_by_freq are about the gradient alone."""
    if args.weight.ndim != 2:
        raise ValueError(f"weight has rank {args.weight.ndim}; rank 2 is needed")
    for name, given in (("padding_idx", args.padding_idx), ("scale_grad_by_freq", args.scale_grad_by_freq)):
        if given is not None:
            check_shape(name, given.shape, ())
    check_indices(args.indices, len(args.weight), lowest=0)
    return np.asarray(args.weight[args.indices])


@kernel_of_body("WordConvEmbedding", domain=MICROSOFT, in_float32=True, fresh=True)
def word_conv_embedding(args: Arguments) -> Array:
    """One word after the other"""
    if args.Sequence.ndim != 2 or args.W.ndim != 4 or args.C.ndim != 2:
        ranks = f"Sequence {args.Sequence.ndim}, W {args.W.ndim}, C {args.C.ndim}"
        raise ValueError(f"the ranks are {ranks}; Sequence has rank 2, W rank 4 and C rank 2")
    filters, _, width, size = args.W.shape
    check_shape("W", args.W.shape, (filters, 1, width, args.C.shape[1]))
    check_shape("B", args.B.shape, (filters,))
    for name, given, found in (
        ("char_embedding_size", args.char_embedding_size, size),
        ("conv_window_size", args.conv_window_size, width),
        ("embedding_size", args.embedding_size, filters),
    ):
        if given is not None and given != found:
            raise ValueError(f"{name} is {given}, and W {list(args.W.shape)} has {found}")
    if not 1 <= width <= args.Sequence.shape[1]:
        raise ValueError(f"windows of {width} characters do not fit words of {args.Sequence.shape[1]}")
    check_indices(args.Sequence, len(args.C), "Sequence", lowest=0)
    Y = np.zeros((len(args.Sequence), filters), args.W.dtype)
    for word, characters in enumerate(args.Sequence):
        if characters[0]:
            count = max(np.count_nonzero(characters), width)
            windows = [args.C[characters[start : start + width]] for start in range(count - width + 1)]
            Y[word] = np.tanh(np.einsum("nwc,fwc->nf", np.stack(windows), args.W[:, 0]) + args.B).max(0)
    return Y
