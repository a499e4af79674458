"""ONNX Runtime's operators for indexing, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, Emitter, UnsupportedFormError, body, form, rule
from refgrad.protos.domains import MICROSOFT
from refgrad.rewrites.results import shaped
from refgrad.tables.definitions import FLOATS, Shapes


@body("ShrunkenGather", "output", others=("indices",), domain=MICROSOFT)
def shrunken_gather(op: FunctionEmitter, data: str, indices: str, *, axis: int = 0) -> str:
    """Gather with a vector of indices"""
    return op.Gather(data, indices, axis=axis)


@rule("ShrunkenGather", domain=MICROSOFT, wrt=["data"])
def shrunken_gather_rule(op: Emitter, d_output: str, data: str, indices: str, axis: int) -> str:
    """dx = Σ dy at the indices it was taken from"""
    return op.grad.GatherGrad(op.shape_of(data), indices, d_output, axis=axis)


@body("PadAndUnflatten", "output", others=("indices", "unflatten_dims"), domain=MICROSOFT)
def pad_and_unflatten(op: FunctionEmitter, input: str, indices: str, unflatten_dims: str) -> str:
    """Zeros with the rows of input at the indices, their first axis split into unflatten_dims"""
    rest = op.Shape(input, start=1)
    rows = op.Concat(op.ReduceProd(unflatten_dims, keepdims=1), rest, axis=0)
    zeros = op.Expand(op.const(0.0, like=input), rows)
    padded = op.ScatterND(zeros, op.Unsqueeze(indices, [-1]), input)
    return op.Reshape(padded, op.Concat(unflatten_dims, rest, axis=0), allowzero=1)


@body("FlattenAndUnpad", "output", "unflatten_dims", others=("indices", "unflatten_dims"), domain=MICROSOFT)
def flatten_and_unpad(op: FunctionEmitter, input: str, indices: str) -> tuple[str, str]:
    """The rows of input, its first two axes flattened, at the indices; besides, the lengths of those axes"""
    count = op.ReduceProd(op.Shape(input, end=2), keepdims=1)
    rows = op.Reshape(input, op.Concat(count, op.Shape(input, start=2), axis=0), allowzero=1)
    return op.Gather(rows, indices, axis=0), op.Shape(input, end=2)


_ANY = (*FLOATS, "tensor(int32)", "tensor(int64)")
_INDICES = ("tensor(int32)", "tensor(int64)")


@body("GatherND", "output", types={"data": _ANY, "indices": _INDICES, "output": "data"}, domain=MICROSOFT)
def gather_nd(op: FunctionEmitter, data: str, indices: str) -> str:
    """The elements or slices of data at the places that the last axis of indices names"""
    return op.GatherND(data, op.Cast(indices, to=TensorProto.INT64))


@body(
    "Unique",
    "y",
    "idx",
    "counts",
    types={"x": _ANY, "y": "x", "idx": ["tensor(int64)"], "counts": ["tensor(int64)"]},
    domain=MICROSOFT,
)
def unique(op: FunctionEmitter, x: str) -> tuple[str, str, str]:
    """The different elements of x as they first occur; besides, which of them each element is, and how often each occurs"""
    made: Any = op.Unique(x, outputs=4, sorted=0)
    return made[0], made[2], made[3]


_LONGEST = 256  # a node or more compares each token


def _check_ngrams(shapes: Shapes, args: Arguments) -> None:
    if args.ngram_size < 1:
        raise UnsupportedFormError(f"its ngram_size is {args.ngram_size}: it is at least 1")


@body("NGramRepeatBlock", "scores_out", types={"input_ids": ["tensor(int64)"]}, check=_check_ngrams, domain=MICROSOFT)
def ngram_repeat_block(op: FunctionEmitter, input_ids: str, scores: str, *, ngram_size: int) -> str:
    """scores, −∞ for each token that would repeat ngram_size tokens of input_ids at their end"""
    if ngram_size > _LONGEST:
        raise UnsupportedFormError(f"its ngram_size is {ngram_size}: up to {_LONGEST} tokens are compared, one by one")
    first = op.Sub(
        op.Shape(input_ids, start=1), [ngram_size - 1]
    )  # of the tokens at the end, of which the next is asked
    tokens = op.Slice(input_ids, [ngram_size - 1], [_END], [1])
    matches = op.Equal(tokens, tokens)
    for k in range(ngram_size - 1):
        earlier = op.Slice(input_ids, [k], op.Add(op.Max(first, [0]), [k]), [1])
        start = op.Max(op.Add(first, [k]), [0])
        matches = op.And(matches, op.Equal(earlier, op.Slice(input_ids, start, op.Add(start, [1]), [1])))
    zeros = op.Expand(op.const([0]), op.Shape(scores))
    found = op.Cast(matches, to=TensorProto.INT64)
    counts = op.ScatterElements(zeros, op.Where(matches, tokens, op.const([0])), found, axis=1, reduction="add")
    return op.Where(op.Greater(counts, op.const([0])), op.const(-math.inf, like=scores), scores)


_END = 2**31 - 1


@form("SliceGrad", results=[shaped("shape", "dY")])
def slice_grad(
    op: Emitter, dY: str, shape: str, starts: str, ends: str, axes: str | None = None, steps: str | None = None
) -> str:
    return op.grad.SliceGrad(dY, shape, starts, ends, axes, steps)


@form("GatherGrad", results=[shaped("shape", "dY")])
def gather_grad(op: Emitter, shape: str, indices: str, dY: str, *, axis: int = 0) -> str:
    return op.grad.GatherGrad(shape, indices, dY, axis=axis)


@form("GatherElementsGrad", results=[shaped("shape", "dY")])
def gather_elements_grad(op: Emitter, dY: str, shape: str, indices: str, *, axis: int = 0) -> str:
    return op.grad.GatherElementsGrad(dY, shape, indices, axis=axis)


@form("GatherNDGrad", results=[shaped("shape", "dY")])
def gather_nd_grad(op: Emitter, shape: str, indices: str, dY: str, *, batch_dims: int = 0) -> str:
    return op.grad.GatherNDGrad(shape, indices, dY, batch_dims=batch_dims)


@body("TorchEmbedding", "Y", others=("indices", "padding_idx", "scale_grad_by_freq"), domain=MICROSOFT)
def torch_embedding(
    op: FunctionEmitter,
    weight: str,
    indices: str,
    padding_idx: str | None = None,
    scale_grad_by_freq: str | None = None,
) -> str:
    """The rows of weight at the indices"""
    return op.Gather(weight, indices, axis=0)


@rule("TorchEmbedding", domain=MICROSOFT, wrt=["weight"])
def torch_embedding_rule(
    op: Emitter, d_Y: str, weight: str, indices: str, padding_idx: str | None, scale_grad_by_freq: str | None
) -> str:
    """dweight = Σ dY at the indices, but none at padding_idx; with scale_grad_by_freq, over how often the index is there"""
    if padding_idx is not None:
        d_Y = op.Where(op.Unsqueeze(op.Equal(indices, padding_idx), [-1]), 0.0, d_Y)
    if scale_grad_by_freq is not None:
        one = op.const(np.array(1.0, np.float32))
        ones = op.Expand(one, op.shape_of(indices))
        count = op.Gather(op.grad.GatherGrad(op.Shape(weight, end=1), indices, ones, axis=0), indices)
        divisor = op.Unsqueeze(op.Where(scale_grad_by_freq, count, one), [-1])
        d_Y = op.Div(d_Y, op.as_type(divisor, op.type(d_Y)))
    return op.grad.GatherGrad(op.shape_of(weight), indices, d_Y, axis=0)


@body("WordConvEmbedding", "Y", types={"Sequence": ("tensor(int32)",)}, domain=MICROSOFT)
def word_conv_embedding(
    op: FunctionEmitter,
    Sequence: str,
    W: str,
    B: str,
    C: str,
    *,
    char_embedding_size: int | None = None,
    conv_window_size: int | None = None,
    embedding_size: int | None = None,
) -> str:
    """tanh(W·characters + B) of every window of a word, the largest of each filter; 0 for a word that begins with 0

    A word has as many characters as are above 0, and one window at least.
    """
    if op.rank(Sequence) not in (None, 2):
        raise UnsupportedFormError(f"its Sequence is of rank {op.rank(Sequence)}; it has rank 2, words of characters")
    width, length = op.Shape(W, start=2, end=3), op.Shape(Sequence, start=1)
    window = op.up_to(op.Sub(length, op.Sub(width, [1])))
    characters = op.Gather(Sequence, op.Add(op.Unsqueeze(window, [1]), op.up_to(width)), axis=1)
    size = op.Mul(width, op.Shape(W, start=3))
    taken = op.Gather(C, characters, axis=0)
    columns = op.Reshape(taken, op.Concat(op.Shape(taken, end=2), size, axis=0), allowzero=1)
    filters = op.Reshape(W, op.Concat(op.Shape(W, end=1), size, axis=0), allowzero=1)
    y = op.Tanh(op.Add(op.MatMul(columns, op.Transpose(filters, perm=[1, 0])), B))
    there = op.Cast(op.Greater(Sequence, 0), to=TensorProto.INT64)
    last = op.Sub(op.ReduceSum(there, [1]), width)
    seen = op.LessOrEqual(window, op.Max(last, op.const([0])))
    best = op.reduce("ReduceMax", op.Where(op.Unsqueeze(seen, [2]), y, -2.0), [1])  # no tanh is as low as −2
    begun = op.Greater(op.Slice(Sequence, [0], [1], [1]), 0)
    return op.Where(begun, op.Squeeze(best, [1]), 0.0)
