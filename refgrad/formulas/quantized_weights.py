"""Weights that are quantised in blocks: what their bytes stand for, and products with them, some rows at a time.

A matrix of N rows and K columns is stored in rows of blocks, whose last one is filled up. A block has a scale s and a zero
point z, and its numbers q stand for (q − z)·s. A byte holds 8/bits numbers, the first in its lowest bits. The floats are
made plane by plane: the first number of every byte, then the second one. Whoever multiplies with them brings the other
matrix, which is smaller, into that order, or the result out of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.builder.op import Emitter
from refgrad.protos.types import SIXTEEN_BIT

BITS = (2, 4, 8)
LEAST_BLOCK = 16
BLOCKS = f"it is a power of 2 from {LEAST_BLOCK} on, up to {2**30}"
_AT_ONCE = 2**18  # weights that are made floats together
_TOGETHER = 2**20  # of more weights: how many in a step

Op = Emitter | FunctionEmitter
Take = Callable[[str, int], str]  # the rows of a step: of a value, along an axis


@dataclass(frozen=True)
class BlockLayout:
    """How MatMulNBits stores its weights."""

    N: int
    K: int
    bits: int
    block_size: int

    @property
    def refusal(self) -> str:
        """The reason why there are no such weights, or ""."""
        if self.bits not in BITS:
            return f"bits is {self.bits}; there are 2, 4 and 8"
        if not is_block_size(self.block_size):
            return f"block_size is {self.block_size}; {BLOCKS}"
        return _uncounted(self.N, self.K)

    @property
    def blocks(self) -> int:
        """The number of blocks of a row."""
        return -(-self.K // self.block_size)

    @property
    def columns(self) -> int:
        """The number of columns of the stored matrix: K, rounded up to whole blocks."""
        return self.blocks * self.block_size

    @property
    def planes(self) -> int:
        """How many numbers a byte holds."""
        return 8 // self.bits

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the bytes: rows, blocks, and the bytes of a block."""
        return self.N, self.blocks, self.block_size // self.planes

    @property
    def zero_bytes(self) -> int:
        """The bytes with the zero points of a row."""
        return -(-self.blocks // self.planes)


def is_block_size(size: int) -> bool:
    """True if it is a power of 2, not too small, and of 32 bits."""
    return LEAST_BLOCK <= size < 2**31 and not size & (size - 1)


def _uncounted(N: int, K: int) -> str:
    """The reason why no matrix has N rows and K columns, or "": so many that numbers of 64 bits count them."""
    return "" if 1 <= min(N, K) <= max(N, K) < 2**31 else f"N is {N} and K is {K}; both are from 1 to {2**31 - 1}"


def wide(op: Op, value: str, like: str) -> str:
    """`value` in the type of `like`, but in float where that is of 16 bits."""
    kind = op.type(like)
    if not kind:
        return op.CastLike(value, like)
    kind = int(TensorProto.FLOAT) if kind in SIXTEEN_BIT else kind
    return value if op.type(value) == kind else op.Cast(value, to=kind)


def planes(op: Op, packed: str, bits: int) -> list[str]:
    """The numbers in bytes that are given as floats: the first one of every byte, the second one, and so on."""
    found = []
    for _ in range(8 // bits - 1):
        rest = op.Floor(op.Mul(packed, 2.0**-bits))
        found.append(op.Sub(packed, op.Mul(rest, 2.0**bits)))
        packed = rest
    return [*found, packed]


def to_planes(op: Op, rows: str, layout: BlockLayout) -> str:
    """A matrix of K columns, padded to the columns of the stored matrix and ordered plane by plane."""
    if layout.columns > layout.K:
        rows = op.Pad(rows, [0, 0, 0, layout.columns - layout.K])
    if layout.planes == 1:
        return rows
    apart = op.Reshape(rows, [0, layout.columns // layout.planes, layout.planes])
    return op.Reshape(op.Transpose(apart, perm=[0, 2, 1]), [0, layout.columns])


def from_planes(op: Op, rows: str, layout: BlockLayout) -> str:
    """The inverse of `to_planes`."""
    if layout.planes > 1:
        apart = op.Reshape(rows, [0, layout.planes, layout.columns // layout.planes])
        rows = op.Reshape(op.Transpose(apart, perm=[0, 2, 1]), [0, layout.columns])
    return op.Slice(rows, [0], [layout.K], [1]) if layout.columns > layout.K else rows


@dataclass(frozen=True)
class BlockWeights:
    """The inputs of MatMulNBits that its weights are made of; `like` has the type of A."""

    layout: BlockLayout
    like: str
    B: str
    scales: str
    zero_points: str | None
    g_idx: str | None

    def centred(self, op: Op, take: Take) -> str:
        """q − z of some rows, plane by plane: (rows, planes, blocks, bytes of a block), or with g_idx (rows, planes, bytes)."""
        layout = self.layout
        bytes_ = wide(op, take(self.B, 0), self.like)
        q = op.Concat(*(op.Unsqueeze(plane, [1]) for plane in planes(op, bytes_, layout.bits)), axis=1)
        if self.g_idx is not None:
            q = op.Reshape(q, [0, layout.planes, layout.columns // layout.planes])
        if self.zero_points is None:
            return op.Sub(q, 2.0 ** (layout.bits - 1))
        return op.Sub(q, self.laid(op, self._zeros(op, take)))

    def scale(self, op: Op, take: Take) -> str:
        """s of some rows: (rows, blocks)."""
        return wide(op, take(_matrix(op, self.scales, self.layout.N, self.layout.blocks), 0), self.like)

    def laid(self, op: Op, parameter: str) -> str:
        """A number per row and block in a shape that broadcasts with `centred`."""
        return op.Unsqueeze(parameter, [1, 3]) if self.g_idx is None else op.Gather(parameter, self.groups(op), axis=1)

    def rows(self, op: Op, take: Take) -> str:
        """(q − z)·s of some rows, plane by plane: a matrix."""
        made = op.Mul(self.centred(op, take), self.laid(op, self.scale(op, take)))
        return op.Reshape(made, [0, self.layout.columns])

    def groups(self, op: Op) -> str:
        """The block whose scale each number has, in the order of the numbers: (planes, bytes)."""
        layout = self.layout
        assert self.g_idx is not None
        filled = op.Slice(self.g_idx, [0], [layout.K], [0])
        if layout.columns > layout.K:
            filled = op.Pad(filled, [0, layout.columns - layout.K])
        apart = op.Reshape(filled, [layout.columns // layout.planes, layout.planes])
        return op.Transpose(apart, perm=[1, 0])

    def _zeros(self, op: Op, take: Take) -> str:
        """z of some rows: (rows, blocks)."""
        layout = self.layout
        assert self.zero_points is not None
        if op.type(self.zero_points) != TensorProto.UINT8:
            return wide(op, take(_matrix(op, self.zero_points, layout.N, layout.blocks), 0), self.like)
        bytes_ = wide(op, take(_matrix(op, self.zero_points, layout.N, layout.zero_bytes), 0), self.like)
        apart = op.Concat(*(op.Unsqueeze(plane, [2]) for plane in planes(op, bytes_, layout.bits)), axis=2)
        numbers = op.Reshape(apart, [0, layout.zero_bytes * layout.planes])
        return op.Slice(numbers, [0], [layout.blocks], [1])


FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)  # behind them their negatives
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
CODES = {0: (*FP4, *(-x for x in FP4)), 1: NF4}  # by quant_type


@dataclass(frozen=True)
class Coded:
    """The inputs of MatMulBnb4 that its weights are made of: N·K numbers of 4 bits in a row, the first in the high bits.

    Each stands for one of 16 floats, times the scale of its block. `like` has the type of A.
    """

    N: int
    K: int
    block_size: int
    quant_type: int
    like: str
    B: str
    absmax: str

    @property
    def refusal(self) -> str:
        """The reason why there are no such weights, or ""."""
        if self.quant_type not in CODES:
            return f"quant_type is {self.quant_type}; there are 0 (FP4) and 1 (NF4)"
        if not is_block_size(self.block_size):
            return f"block_size is {self.block_size}; {BLOCKS}"
        return _uncounted(self.N, self.K)

    @property
    def blocks(self) -> int:
        """The number of blocks of all rows together; a block goes on in the next row."""
        return -(-self.N * self.K // self.block_size)

    @property
    def multiple(self) -> int:
        """How many rows end with a block."""
        return self.block_size // math.gcd(self.K, self.block_size)

    def coded(self, op: Op, begin: str, end: str) -> str:
        """The values of some rows without the scales: (blocks, block size), the last block filled up."""
        first, last = (op.Div(op.Add(op.Mul(row, [self.K]), [1]), [2]) for row in (begin, end))
        high, low = planes(op, wide(op, op.Slice(self.B, first, last, [0]), self.like), 4)[::-1]
        numbers = op.Reshape(op.Concat(op.Unsqueeze(high, [1]), op.Unsqueeze(low, [1]), axis=1), [-1])
        table = wide(op, op.const(np.array(CODES[self.quant_type])), self.like)
        floats = op.Gather(table, op.Cast(numbers, to=TensorProto.INT32), axis=0)
        missing = op.Sub([self.block_size], op.Mod(op.Shape(floats), [self.block_size]))
        filled = op.Pad(floats, op.Concat([0], op.Mod(missing, [self.block_size]), axis=0))
        return op.Reshape(filled, [-1, self.block_size])

    def scale(self, op: Op, begin: str, end: str) -> str:
        """The scales of some rows: (blocks, 1)."""
        first, last = (self.block_of(op, row) for row in (begin, end))
        return op.Unsqueeze(wide(op, op.Slice(self.absmax, first, last, [0]), self.like), [1])

    def block_of(self, op: Op, row: str) -> str:
        """How many blocks there are before a row; one that begins before it counts."""
        return op.Div(op.Add(op.Mul(row, [self.K]), [self.block_size - 1]), [self.block_size])

    def rows(self, op: Op, begin: str, end: str) -> str:
        """Some rows: a matrix of K columns."""
        flat = op.Reshape(op.Mul(self.coded(op, begin, end), self.scale(op, begin, end)), [-1])
        count = op.Mul(op.Sub(op.Min(end, [self.N]), begin), [self.K])
        return op.Reshape(op.Slice(flat, [0], count, [0]), [-1, self.K])


def _matrix(op: Op, parameter: str, rows: int, columns: int) -> str:
    """A parameter that may be given in one row."""
    return parameter if op.rank(parameter) == 2 else op.Reshape(parameter, [rows, columns])


def every_row(value: str, _: int) -> str:
    """The rows of the only step."""
    return value


def over_rows(
    op: Emitter, count: int, width: int, d: str, start: str, term: Callable[[Take, str, str], str], multiple: int = 1
) -> str:
    """The sum of `term` over blocks of `count` rows of `width` weights: what it takes is not there as a whole, nor ever stored.

    A runtime computes when it loads a model what depends on constants alone, and keeps it. So each step takes its rows from
    where only the run tells: from its own number, or without a Loop from a 0 that it makes of `d`, a matrix.

    :param start: zeros of the shape of the sum.
    :param term: of what takes its rows, the number of the first one, and the number behind the last one or a larger one.
    :param multiple: what the number of rows of a step is a multiple of.
    """
    if count * width <= _AT_ONCE:
        first = op.Slice(d, [0, 0], [1, 1], [0, 1])
        flag = op.Cast(op.Cast(first, to=TensorProto.BOOL), to=TensorProto.INT64)
        zero = op.Min(op.ReduceSum(flag, [0, 1], keepdims=0), [0])
        return term(lambda value, axis: op.Slice(value, zero, [count], [axis]), zero, op.const([count]))
    rows = max(_TOGETHER // width // multiple, 1) * multiple

    def body(number: str, going: str, total: str) -> list[str]:
        begin = op.Mul(number, [rows])
        end = op.Add(begin, [rows])
        more = op.Add(total, term(lambda value, axis: op.Slice(value, begin, end, [axis]), begin, end))
        if (shape := op.shape(start)) is not None:
            op.assume(more, shape)
        return [op.Identity(going), more]

    going = op.const(np.array(True))
    graph = op.subgraph(body, op.const(np.array(0)), going, start)
    for value_info in (*graph.input[:2], *graph.output[:1]):
        value_info.type.tensor_type.shape.SetInParent()  # scalars
    steps = op.const(np.array(-(-count // rows)))
    return op.values.record(op.emit_all("Loop", "", (steps, going, start), 1, {"body": graph})[0], op.type(start))


def among(op: Emitter, part: str, axis: int, rank: int, begin: str, size: int) -> str:
    """`part` between zeros, so that along an axis of `size` it begins at `begin`."""
    behind = op.Sub(op.Sub([size], begin), op.Shape(part, start=axis, end=axis + 1))
    pads: list[str | list[int]] = [[0] * axis, begin, [0] * (rank - 1), behind, [0] * (rank - axis - 1)]
    return op.Pad(part, op.Concat(*(pad for pad in pads if pad), axis=0))
