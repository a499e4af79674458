"""Caches of keys and values, whose numbers may be quantised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper

from refgrad.builder.function import FunctionEmitter
from refgrad.errors import choices
from refgrad.extend import Arguments, UnsupportedFormError
from refgrad.formulas.indexing import END
from refgrad.protos.types import SIXTEEN_BIT
from refgrad.tables.definitions import FLOATS, Shapes

CACHE = (*FLOATS, "tensor(int8)", "tensor(uint8)")
QUANTIZATIONS = ("NONE", "PER_TENSOR", "PER_CHANNEL")
_HELD = {4: TensorProto.UINT8, 8: TensorProto.INT8}  # by the bits of a number


def check_cache(shapes: Shapes, args: Arguments, cache: str, kind: str, scale: str, bits: int) -> None:
    """Refuse a quantization that is not known, and a cache and a scale, called so, that do not fit it."""
    if kind not in QUANTIZATIONS:
        raise UnsupportedFormError(f"its quantization {kind!r} is not known; there are {choices(QUANTIZATIONS)}")
    past, number = getattr(args, cache), getattr(args, scale)
    held = 0 if past is None else shapes.type(past)
    if kind == "NONE":
        if held in _HELD.values():
            raise UnsupportedFormError(
                f"its input {cache} holds {_name(held)}; a cache that is not quantised holds floats"
            )
        return
    if bits not in _HELD:
        raise UnsupportedFormError(f"kv_cache_bit_width={bits} is not known; there are 4 and 8")
    if past is None:
        raise UnsupportedFormError(f"a quantised cache needs {cache}, which says its type")
    if number is None:
        raise UnsupportedFormError(f"{kind} needs the input {scale}")
    if held not in (0, _HELD[bits]):
        raise UnsupportedFormError(
            f"its input {cache} holds {_name(held)}; a cache of {bits} bits holds {_name(_HELD[bits])}"
        )


def _name(kind: int) -> str:
    return str(helper.tensor_dtype_to_np_dtype(kind))


@dataclass
class Cache:
    """How keys or values (B, rows, heads, H) are held: as floats, or q = round(x/scale) in 8 bits, or two in a byte."""

    bits: int
    by_channel: bool
    scale: str
    empty: str  # the value that is held where there is no token

    def __init__(self, op: FunctionEmitter, kind: str, width: int, scale: str | None, past: str) -> None:
        self.bits, self.by_channel, self.scale = 0 if kind == "NONE" else width, kind == "PER_CHANNEL", scale or ""
        if self.bits == 8:
            self.empty = op.const(np.int8(0))
        elif self.bits == 4:
            self.empty = op.const(-8.0, like=self.scale)
        else:
            self.empty = op.const(0, like=past)

    def _flat(self, op: FunctionEmitter, x: str) -> str:
        """(B, rows, heads, H) to (B, rows, heads·H)"""
        width = op.Mul(op.Shape(x, start=2, end=3), op.Shape(x, start=3, end=4))
        return op.Reshape(x, op.Concat([0, 0], width, axis=0))

    def unpacked(self, op: FunctionEmitter, rows: str) -> str:
        """Rows of a cache as they are here: two in a byte are two numbers, in floats."""
        if self.bits != 4:
            return rows
        low, high = (f(rows, op.const(np.uint8(16))) for f in (op.Mod, op.Div))
        pairs = op.Concat(op.Unsqueeze(low, [4]), op.Unsqueeze(high, [4]), axis=4)
        width = op.Mul(op.Shape(rows, start=3, end=4), [2])
        numbers = op.CastLike(op.Reshape(pairs, op.Concat([0, 0, 0], width, axis=0)), self.scale)
        return op.Sub(numbers, 8.0)

    def written(self, op: FunctionEmitter, x: str, past: str) -> str:
        """New rows as the cache holds them."""
        if not self.bits:
            return op.CastLike(x, past)
        x, shape = op.CastLike(x, self.scale), op.Shape(x)
        if self.bits == 4:
            one = op.const(1.0, like=self.scale)
            nibbles = op.Clip(op.Div(x, self._laid(op, shape)), op.const(-8.0, like=x), op.const(7.0, like=x))
            zero = op.const(np.int8(0))
            return op.DequantizeLinear(op.QuantizeLinear(nibbles, one, zero), one, zero)
        scale, zero, axis = self._parameters(op)
        q = op.QuantizeLinear(self._flat(op, x), scale, zero, axis=axis)
        return op.Reshape(q, shape)

    def gathered(self, op: FunctionEmitter, rows: str, capacity: str, held: str, wanted: str, end: str) -> str:
        """The rows at `wanted`: rows of the past up to `held`, then the rows after `capacity`; empty ones from `end` on."""
        places = op.Where(op.Less(wanted, held), wanted, op.Add(op.Sub(wanted, held), capacity))
        last = op.Sub(op.Shape(rows, start=1, end=2), [1])
        taken = op.GatherND(rows, op.Unsqueeze(op.Min(places, last), [2]), batch_dims=1)
        return op.Where(op.Unsqueeze(op.Less(wanted, end), [2, 3]), taken, self.empty)

    def packed(self, op: FunctionEmitter, rows: str) -> str:
        """Rows as a cache holds them."""
        if self.bits == 4:
            low, high = (op.Add(op.Slice(rows, [n], [END], [3], [2]), 8.0) for n in (0, 1))
            rows = op.Cast(op.Add(low, op.Mul(high, 16.0)), to=TensorProto.UINT8)
        return rows

    def read(self, op: FunctionEmitter, rows: str, query: str) -> str:
        """Rows as floats, in the type to compute in."""
        if self.bits == 4:
            rows = op.Mul(rows, self._laid(op, op.Shape(rows)))
        elif self.bits == 8:
            scale, zero, axis = self._parameters(op)
            rows = op.Reshape(op.DequantizeLinear(self._flat(op, rows), scale, zero, axis=axis), op.Shape(rows))
        return op.Cast(rows, to=TensorProto.FLOAT) if op.type(query) in SIXTEEN_BIT else op.CastLike(rows, query)

    def _laid(self, op: FunctionEmitter, shape: str) -> str:
        """The scale, so that it broadcasts to rows of that shape."""
        if not self.by_channel:
            return op.Reshape(self.scale, [1])
        return op.Reshape(self.scale, op.Slice(shape, [2], [4], [0]))

    def _parameters(self, op: FunctionEmitter) -> tuple[str, str, int | None]:
        """Scale, zero point and axis of QuantizeLinear."""
        zero = op.const(np.int8(0))
        if not self.by_channel:
            return op.Reshape(self.scale, np.zeros(0, np.int64)), zero, None
        scale = op.Reshape(self.scale, [-1])
        return scale, op.Expand(zero, op.Shape(scale)), 2
