"""ONNX Runtime's products with weights that are quantised in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.errors import RuleError
from refgrad.extend import Arguments, Emitter, UnsupportedFormError, body, rule
from refgrad.formulas.quantized_weights import (
    BITS,
    BLOCKS,
    BlockLayout,
    BlockWeights,
    Coded,
    every_row,
    from_planes,
    is_block_size,
    planes,
    wide,
)
from refgrad.microsoft.bodies.activation import plus
from refgrad.microsoft.bodies.normalization import simplified_layer_normalization, skip_simplified_layer_normalization
from refgrad.microsoft.declared import Size, check_known, check_one, check_shape, misshapen, product, sizes
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.definitions import FLOATS, Shapes

_BYTES = ("tensor(uint8)",)
_SINCE: dict[int, int] = {
    TensorProto.INT4: 21,
    TensorProto.UINT4: 21,
    TensorProto.FLOAT4E2M1: 23,
}  # the opset that casts a small type
_SINCE |= dict.fromkeys(
    (getattr(TensorProto, f"FLOAT8{name}") for name in ("E4M3FN", "E4M3FNUZ", "E5M2", "E5M2FNUZ")), 19
)
_FLOATS_OF_8 = ("tensor(float8e4m3fn)", "tensor(float8e5m2)")
_INTEGERS = (TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4)
_CODES = tuple(f"tensor({TensorProto.DataType.Name(kind).lower()})" for kind in (TensorProto.UINT8, *_SINCE))


def _check_matmul_nbits(shapes: Shapes, args: Arguments) -> None:
    layout = BlockLayout(args.N, args.K, args.bits, args.block_size)
    inputs = (args.A, args.B, args.scales, args.zero_points, args.g_idx, args.bias)
    refusal = layout.refusal or _prepacked(args.weight_prepacked) or _misshapen(shapes, layout, *inputs)
    if refusal:
        raise UnsupportedFormError(refusal)


@body(
    "MatMulNBits",
    "Y",
    types={"B": _BYTES, "zero_points": (*_BYTES, *FLOATS), "g_idx": ("tensor(int32)",)},
    check=_check_matmul_nbits,
    domain=MICROSOFT,
)
def matmul_nbits_body(
    op: FunctionEmitter,
    A: str,
    B: str,
    scales: str,
    zero_points: str | None = None,
    g_idx: str | None = None,
    bias: str | None = None,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int,
    weight_prepacked: int = 0,
) -> str:
    """A·Wᵀ + bias, W = (q − zero_points)·scales, block by block of the numbers q in the bytes of B"""
    layout = BlockLayout(N, K, bits, block_size)
    weights = BlockWeights(layout, A, B, scales, zero_points, g_idx)
    W = from_planes(op, weights.rows(op, every_row), layout)
    y = op.MatMul(wide(op, A, A), op.Transpose(W, perm=[1, 0]))
    return plus(op, op.CastLike(y, A), bias)


@rule("MatMulNBits", domain=MICROSOFT, wrt=["A", "scales", "zero_points", "bias"], settings=["scales", "zero_points"])
def matmul_nbits(
    op: Emitter,
    d_Y: str,
    A: str,
    B: str,
    scales: str,
    zero_points: str | None,
    g_idx: str | None,
    bias: str | None,
    K: int,
    N: int,
    bits: int,
    block_size: int,
    weight_prepacked: int,
) -> tuple[str | None, ...]:
    """dA = dY·W, dbias = Σ dY; with dW = dYᵀ·A dscales = Σ dW·(q − z) and dzero_points = −Σ dW·scales over each block

    The weights stay quantised: W is made some rows at a time.
    """
    layout, given = BlockLayout(N, K, bits, block_size), (d_Y, A, B, scales, zero_points, g_idx)
    if refusal := layout.refusal or _prepacked(weight_prepacked) or _misshapen(op, layout, *given[1:], bias):
        raise RuleError(f"Node {op.node!r}: {refusal}.")
    d_bias = None if bias is None else op.grad.BroadcastGradient(d_Y, bias, (bias, d_Y))
    if 0 in (op.shape(B) or ()):  # a projection that is omitted
        return None, None, None, d_bias
    sizes = {"K": K, "N": N, "bits": bits, "block_size": block_size}
    d_scales, d_zero_points = op.grad.MatMulNBitsScaleGrad(*given, **sizes)
    return op.grad.MatMulNBitsGrad(*given, **sizes), d_scales, d_zero_points, d_bias


def _prepacked(weight_prepacked: int) -> str:
    if not weight_prepacked:
        return ""
    return f"weight_prepacked is {weight_prepacked}: only a CUDA kernel reads that layout; save the weights with 0"


def _check_gather_block_quantized(shapes: Shapes, args: Arguments) -> None:
    kind, rank, block_size = shapes.type(args.data), shapes.rank(args.data), args.block_size
    small, packed = kind not in (0, *_INTEGERS), kind == TensorProto.UINT8
    if small and args.zero_points is not None:
        raise UnsupportedFormError("data in floats has no zero_points; leave them out")
    if not (is_block_size(block_size) or (kind not in _INTEGERS and block_size == 0)):
        raise UnsupportedFormError(f"block_size is {block_size}; {BLOCKS}")
    if packed and args.bits not in BITS:
        raise UnsupportedFormError(f"bits is {args.bits}; there are 2, 4 and 8")
    for name in ("gather_axis", "quantize_axis"):
        if rank is not None and not -rank <= getattr(args, name) < rank:
            raise UnsupportedFormError(f"{name} is {getattr(args, name)}; data has {rank} axes")
    gathered, quantized = (axis % rank if rank else axis for axis in (args.gather_axis, args.quantize_axis))
    if packed and (gathered or rank == 1 or quantized not in (-1, rank - 1 if rank else quantized)):
        raise UnsupportedFormError("data of uint8 has gather_axis 0, and quantize_axis is the last axis, another one")
    if rank is None or not kind:
        return
    due: list[Size] = list(sizes(shapes, args.data, rank))
    if packed:
        due[-1] = product(due[-1], 8 // args.bits)
    last = due[quantized]
    due[quantized] = None if last is None else -(-last // block_size) if block_size else 1
    given = f"block_size={block_size}"
    check_shape(shapes, "scales", args.scales, [(size, 1) if small else size for size in due], given=given)
    if packed and due[-1] is not None:
        due[-1] = -(-due[-1] * args.bits // 8)
    check_shape(shapes, "zero_points", args.zero_points, due, given=given)


@body(
    "GatherBlockQuantized",
    "output",
    others=("indices",),
    types={"data": _CODES, "scales": FLOATS, "zero_points": "data", "output": "scales"},
    settings=["scales"],
    check=_check_gather_block_quantized,
    domain=MICROSOFT,
)
def gather_block_quantized(
    op: FunctionEmitter,
    data: str,
    indices: str,
    scales: str,
    zero_points: str | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> str:
    """Gather((data − zero_points)·scales, indices), block by block along quantize_axis, 0 where an index is out of range"""
    kind = op.type(data)
    if not kind:
        raise UnsupportedFormError("the element type of its input data is unknown; add it to value_info")
    if kind == TensorProto.UINT8:
        values = _along_last(op, wide(op, data, scales), bits)
        zeros: str | float = 2.0 ** (bits - 1)
        if zero_points is not None:
            whole = _along_last(op, wide(op, zero_points, scales), bits)
            zeros = op.Slice(whole, [0], op.Shape(scales, start=-1), [-1])
    else:
        if op.opset < _SINCE.get(kind, 21):
            raise UnsupportedFormError(
                f"data of that type needs opset {_SINCE.get(kind, 21)} of ai.onnx; upgrade the model"
            )
        values = wide(op, data, scales)
        zeros = 0.0 if zero_points is None else wide(op, zero_points, scales)
    size = op.Shape(values, start=quantize_axis, end=quantize_axis + 1 or None)
    numbers = op.up_to(size)

    def each(parameter: str) -> str:
        """A number for each element, from a number per block."""
        if not block_size:
            return parameter
        return op.Gather(parameter, op.Div(numbers, [block_size]), axis=quantize_axis)

    centred = op.Sub(values, each(zeros) if isinstance(zeros, str) else zeros)
    floats = op.Mul(centred, each(wide(op, scales, scales)))
    length = op.Squeeze(op.Shape(floats, start=gather_axis, end=gather_axis + 1 or None), [0])
    index = op.Cast(indices, to=TensorProto.INT64)
    index = op.Where(op.Less(index, 0), op.Add(index, length), index)
    inside = op.And(op.GreaterOrEqual(index, 0), op.Less(index, length))
    first = op.Slice(floats, [0], [1], [gather_axis])
    none = op.Expand(op.const(0.0, like=floats), op.Shape(first))
    taken = op.Gather(op.Concat(floats, none, axis=gather_axis), op.Where(inside, index, length), axis=gather_axis)
    return op.CastLike(taken, scales)


def _along_last(op: FunctionEmitter, packed: str, bits: int) -> str:
    """The numbers in bytes, in the place of the last axis."""
    parts = planes(op, packed, bits)
    if len(parts) == 1:
        return packed
    apart = op.Concat(*(op.Unsqueeze(part, [-1]) for part in parts), axis=-1)
    sizes = op.Concat(op.Shape(packed, end=-1), op.Mul(op.Shape(packed, start=-1), [len(parts)]), axis=0)
    return op.Reshape(apart, sizes, allowzero=1)


def _check_operand(shapes: Shapes, args: Arguments) -> None:
    """Refuse a skip without a norm, and sizes of them that do not fit."""
    if args.norm_scale is None and args.skip is not None:
        raise UnsupportedFormError("it has a skip without a norm_scale; give both, or neither")
    if (rank := shapes.rank(args.A)) is not None:
        A = sizes(shapes, args.A, rank)
        check_shape(shapes, "norm_scale", args.norm_scale, A[-1:])
        check_shape(shapes, "skip", args.skip, A)


def _check_mlp(shapes: Shapes, args: Arguments) -> None:
    check_known(args, "activation", "relu", "silu")
    _check_operand(shapes, args)


@body(
    "MatMulNBitsMlp",
    "Y",
    optional=["input_skip_bias_sum"],
    types={"gate_B": _BYTES, "up_B": _BYTES},
    settings=["gate_scales", "up_scales"],
    check=_check_mlp,
    domain=MICROSOFT,
)
def matmul_nbits_mlp(
    op: FunctionEmitter,
    A: str,
    skip: str | None,
    norm_scale: str | None,
    gate_B: str,
    gate_scales: str,
    gate_bias: str | None,
    up_B: str,
    up_scales: str,
    up_bias: str | None = None,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    activation: str,
    bits: int = 4,
    block_size: int,
    epsilon: float = 1e-5,
) -> tuple[str | None, ...]:
    """activation(MatMulNBits(x, gate))·MatMulNBits(x, up), with biases; x = A, or s/√(mean s² + ε)·norm_scale, s = A + skip"""
    x, total = _normalized(op, A, skip, norm_scale, epsilon)
    project = _projection(op, x, K, accuracy_level, bits, block_size)
    gate, up = project(gate_B, gate_scales, gate_bias, N), project(up_B, up_scales, up_bias, N)
    return op.Mul(op.Relu(gate) if activation == "relu" else op.Mul(gate, op.Sigmoid(gate)), up), total


@body(
    "MatMulNBitsQkv",
    *("Q", "K", "V"),
    optional=["input_skip_bias_sum"],
    types={"q_B": _BYTES, "k_B": _BYTES, "v_B": _BYTES},
    settings=["q_scales", "k_scales", "v_scales"],
    check=_check_operand,
    domain=MICROSOFT,
)
def matmul_nbits_qkv(
    op: FunctionEmitter,
    A: str,
    skip: str | None,
    norm_scale: str,
    q_B: str,
    q_scales: str,
    q_bias: str | None,
    k_B: str,
    k_scales: str,
    k_bias: str | None,
    v_B: str,
    v_scales: str,
    v_bias: str | None = None,
    *,
    K: int,
    Nkv: int,
    Nq: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int,
    epsilon: float = 1e-6,
) -> tuple[str | None, ...]:
    """MatMulNBits of x with each of q, k and v, and with biases; x = s/√(mean s² + ε)·norm_scale, s = A + skip"""
    x, total = _normalized(op, A, skip, norm_scale, epsilon)
    project = _projection(op, x, K, accuracy_level, bits, block_size)
    q = project(q_B, q_scales, q_bias, Nq)
    return q, project(k_B, k_scales, k_bias, Nkv), project(v_B, v_scales, v_bias, Nkv), total


def _normalized(
    op: FunctionEmitter, A: str, skip: str | None, norm_scale: str | None, epsilon: float
) -> tuple[str, str | None]:
    """The operand of the projection, and the sum of A and skip where there is one."""
    if norm_scale is None:
        return A, None
    if skip is None:
        return simplified_layer_normalization(op, A, norm_scale, epsilon=epsilon)[0], None
    y, *_, total = skip_simplified_layer_normalization(op, A, skip, norm_scale, epsilon=epsilon)
    assert y is not None
    return y, total


def _projection(
    op: FunctionEmitter, x: str, K: int, accuracy_level: int, bits: int, block_size: int
) -> Callable[[str, str, str | None, int], str]:
    """The product of `x` with quantised weights, which keeps them quantised in a gradient too."""
    sizes = {"K": K, "accuracy_level": accuracy_level, "bits": bits, "block_size": block_size}

    def project(B: str, scales: str, bias: str | None, N: int) -> str:
        return str(op.com_microsoft("MatMulNBits", x, B, scales, None, None, bias, N=N, **sizes))

    return project


def _check_qlora(shapes: Shapes, args: Arguments) -> None:
    if refusal := BlockLayout(args.N, args.K, args.lora_bits, args.lora_block_size).refusal:
        raise UnsupportedFormError(f"of the adapters {refusal}")
    check_shape(shapes, "lora_A_scales", args.lora_A_scales, (None, None))


@body(
    "MatMulNBitsQLoRA",
    "Y",
    types={"W": _BYTES, "lora_A": _BYTES, "lora_B": _BYTES},
    settings=["scales", "lora_A_scales", "lora_B_scales"],
    check=_check_qlora,
    domain=MICROSOFT,
)
def matmul_nbits_qlora(
    op: FunctionEmitter,
    X: str,
    W: str,
    scales: str,
    lora_A: str,
    lora_A_scales: str,
    lora_B: str,
    lora_B_scales: str,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int = 32,
    lora_bits: int = 8,
    lora_block_size: int = 32,
) -> str:
    """MatMulNBits(X, W) + MatMulNBits(MatMulNBits(X, lora_A), lora_B), without the second term where an adapter is empty"""
    layout = BlockLayout(N, K, lora_bits, lora_block_size)
    base = _projection(op, X, K, accuracy_level, bits, block_size)(W, scales, None, N)
    down = _rows_of_blocks(op, lora_A, lora_A_scales, layout, X)
    up = _rows_of_blocks(op, lora_B, lora_B_scales, layout, X)
    columns = op.Min(op.Shape(down, end=1), op.Shape(up, start=1))  # 0 of an empty adapter
    down = op.Slice(op.Slice(down, [0], [K], [1]), [0], columns, [0])
    inner = op.CastLike(op.MatMul(wide(op, X, X), op.Transpose(down, perm=[1, 0])), X)
    up = op.Slice(up, [0], columns, [1])
    return op.Add(base, op.CastLike(op.MatMul(wide(op, inner, X), op.Transpose(up, perm=[1, 0])), X))


def _rows_of_blocks(op: FunctionEmitter, B: str, scales: str, layout: BlockLayout, like: str) -> str:
    """The weights of as many rows and blocks as the bytes have, by zero points in the middle."""
    rows, blocks = op.Shape(B, end=1), op.Shape(B, start=1, end=2)
    parts = planes(op, wide(op, B, like), layout.bits)
    apart = op.Concat(*(op.Unsqueeze(part, [3]) for part in parts), axis=3)
    sizes = op.Concat(rows, blocks, [layout.block_size], axis=0)
    centred = op.Sub(op.Reshape(apart, sizes, allowzero=1), 2.0 ** (layout.bits - 1))
    each = op.Unsqueeze(wide(op, op.Slice(scales, [0, 0], op.Concat(rows, blocks, axis=0), [0, 1]), like), [2])
    whole = op.Concat(rows, op.Mul(blocks, [layout.block_size]), axis=0)
    return op.Reshape(op.Mul(centred, each), whole, allowzero=1)


def _check_fpq4(shapes: Shapes, args: Arguments) -> None:
    if args.blk_quant_type not in (0, 1):
        raise UnsupportedFormError(
            f"blk_quant_type is {args.blk_quant_type}; only 0 and 1 are covered, for ONNX Runtime reads every other as 1"
        )
    check_shape(shapes, "B_shape", args.B_shape, (2,))
    given = shapes.constant(args.B_shape)
    if given is None:
        return
    if (given < 1).any():
        raise UnsupportedFormError(f"B_shape is {given.tolist()}; it has the two sizes of a matrix")
    K, N = map(int, given)
    check_shape(shapes, "B", args.B, (N * -(-K // 32) * (20 + args.blk_quant_type),))
    _check_columns(shapes, args.A, K)


@body("MatMulFpQ4", "Y", types={"B": _BYTES, "B_shape": ("tensor(int64)",)}, check=_check_fpq4, domain=MICROSOFT)
def matmul_fpq4(op: FunctionEmitter, A: str, B: str, B_shape: str, *, blk_quant_type: int = 1) -> str:
    """A·W; a column of W is in blocks of 32, each a scale, for type 1 a zero point (else 8), and 16 bytes with the numbers"""
    zero_byte = 4 + blk_quant_type
    rows = wide(op, op.Reshape(B, [-1, zero_byte + 16]), A)
    low, high = planes(op, op.Slice(rows, [zero_byte], [zero_byte + 16], [1]), 4)[:2]
    zero: str | float = op.Slice(rows, [4], [5], [1]) if blk_quant_type else 8.0
    floats = op.Mul(op.Sub(op.Concat(low, high, axis=1), zero), _float_of_bytes(op, op.Slice(rows, [0], [4], [1])))
    K, N = op.Slice(B_shape, [0], [1], [0]), op.Slice(B_shape, [1], [2], [0])
    columns = op.Mul(op.Div(op.Add(K, [31]), [32]), [32])
    W = op.Slice(op.Reshape(floats, op.Concat(N, columns, axis=0)), [0], K, [1])
    return op.CastLike(op.MatMul(wide(op, A, A), op.Transpose(W, perm=[1, 0])), A)


def _float_of_bytes(op: FunctionEmitter, rows: str) -> str:
    """The number of 32 bits in the four columns of each row, the lowest byte first."""
    b0, b1, b2, b3 = (op.Slice(op.Cast(rows, to=TensorProto.DOUBLE), [k], [k + 1], [1]) for k in range(4))
    negative, last = op.Floor(op.Mul(b3, 1 / 128)), op.Floor(op.Mul(b2, 1 / 128))
    exponent = op.Add(op.Mul(op.Sub(b3, op.Mul(negative, 128.0)), 2.0), last)
    mantissa = op.Add(op.Mul(op.Sub(b2, op.Mul(last, 128.0)), 2.0**16), op.Add(op.Mul(b1, 256.0), b0))
    normal = op.CastLike(op.Greater(exponent, 0.0), mantissa)  # else the leading 1 is missing
    two = op.const(2.0, like=mantissa)
    power = op.Pow(two, op.Sub(op.Max(exponent, op.const(1.0, like=mantissa)), 127.0))
    size = op.Mul(op.Add(normal, op.Mul(mantissa, 2.0**-23)), power)
    return op.CastLike(op.Mul(size, op.Sub(1.0, op.Mul(negative, 2.0))), rows)


_FLOAT = ("tensor(float)",)
_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = np.array((*_HALVES, *(-x for x in _HALVES)))
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _check_scaled(shapes: Shapes, args: Arguments, scales: str, packs: int, *numbers: str) -> None:
    """Refuse weights, `packs` of them in an element of B, and scales of their blocks and of all that do not fit."""
    if args.block_size < 1:
        raise UnsupportedFormError(f"block_size is {args.block_size}; it is 1 or more")
    check_shape(shapes, "B", args.B, (None, None))
    N, columns = sizes(shapes, args.B, 2)
    blocks = None if columns is None else -(-columns * packs // args.block_size)
    check_shape(shapes, scales, getattr(args, scales), (N, blocks), given=f"block_size={args.block_size}")
    _check_columns(shapes, args.A, product(columns, packs))
    check_shape(shapes, "bias", args.bias, (N,))
    for name in numbers:
        check_one(shapes, name, getattr(args, name))


def _check_fp4_weight(shapes: Shapes, args: Arguments) -> None:
    _check_scaled(shapes, args, "weight_scale", 2, "weight_scale_2", "input_scale")


def _check_fp8_weight(shapes: Shapes, args: Arguments) -> None:
    _check_scaled(shapes, args, "b_scale", 1, "a_scale")


@body(
    "MatMulBlockQuantizedFp4Weight",
    "Y",
    types={"B": _BYTES, "weight_scale": _BYTES, "weight_scale_2": _FLOAT, "input_scale": _FLOAT},
    settings=["weight_scale_2", "input_scale"],
    check=_check_fp4_weight,
    domain=MICROSOFT,
)
def matmul_fp4_weight(
    op: FunctionEmitter,
    A: str,
    B: str,
    weight_scale: str,
    weight_scale_2: str,
    input_scale: str | None = None,
    bias: str | None = None,
    *,
    block_size: int = 16,
) -> str:
    """A·Wᵀ + bias, W = e2m1(B)·e4m3(weight_scale)·weight_scale_2, a weight_scale for each block of a row"""
    codes = _along_last(op, wide(op, B, A), 4)
    floats, scales = (
        op.Gather(wide(op, op.const(table), A), op.Cast(of, to=TensorProto.INT32), axis=0)
        for table, of in ((_E2M1, codes), (_E4M3, weight_scale))
    )
    whole = op.Mul(wide(op, weight_scale_2, A), _each_of_row(op, scales, floats, block_size))
    return _times(op, A, op.Mul(floats, whole), bias)


@body(
    "MatMulBlockQuantizedFp8Weight",
    "Y",
    types={"B": ("tensor(float8e4m3fn)",), "b_scale": _FLOAT, "a_scale": _FLOAT},
    settings=["b_scale", "a_scale"],
    check=_check_fp8_weight,
    domain=MICROSOFT,
)
def matmul_fp8_weight(
    op: FunctionEmitter,
    A: str,
    B: str,
    b_scale: str,
    a_scale: str | None = None,
    bias: str | None = None,
    *,
    block_size: int = 128,
) -> str:
    """A'·Wᵀ + bias, W = B·b_scale block by block of each row; A' = e4m3(A/a_scale)·a_scale, or A without a_scale"""
    if op.opset < _SINCE[TensorProto.FLOAT8E4M3FN]:
        raise UnsupportedFormError("floats of 8 bits need opset 19 of ai.onnx; upgrade the model")
    floats = wide(op, B, A)
    W = op.Mul(floats, _each_of_row(op, wide(op, b_scale, A), floats, block_size))
    if a_scale is None:
        return _times(op, A, W, bias)
    step = wide(op, a_scale, A)
    rounded = op.Cast(op.Div(wide(op, A, A), step), to=TensorProto.FLOAT8E4M3FN)
    return _times(op, op.CastLike(op.Mul(op.CastLike(rounded, step), step), A), W, bias)


def _each_of_row(op: FunctionEmitter, scales: str, like: str, block_size: int) -> str:
    """The scale of each number of a row of `like`."""
    numbers = op.up_to(op.Shape(like, start=1, end=2))
    return op.Gather(scales, op.Div(numbers, [block_size]), axis=1)


def _times(op: FunctionEmitter, A: str, W: str, bias: str | None) -> str:
    """A·Wᵀ + bias"""
    return plus(op, op.CastLike(op.MatMul(wide(op, A, A), op.Transpose(W, perm=[1, 0])), A), bias)


def _check_gemm_float8(shapes: Shapes, args: Arguments) -> None:
    kinds = {shapes.type(args.A), shapes.type(args.B)}
    if any(scale is not None for scale in (args.scaleA, args.scaleB, args.scaleY)) or kinds & _SINCE.keys():
        raise UnsupportedFormError(
            "of floats of 8 bits and their scales it is not covered; use Gemm of what they stand for"
        )
    # where all is computed in double, a model says 11 in the place of 1
    wide = (TensorProto.DOUBLE,) if TensorProto.DOUBLE in kinds else ()
    if args.dtype not in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, *wide):
        raise UnsupportedFormError(f"its dtype is {args.dtype}; there are 1 (float), 10 (float16) and 16 (bfloat16)")
    if (args.activation or "NONE").upper() not in ("NONE", "RELU", "GELU"):
        raise UnsupportedFormError(f"its activation {args.activation!r} is not known; there are RELU, GELU and NONE")
    for name in ("A", "B"):
        check_shape(shapes, name, getattr(args, name), (None, None))


@body(
    "GemmFloat8",
    "Y",
    types={
        "A": (*FLOATS, *_FLOATS_OF_8),
        "B": (*FLOATS, *_FLOATS_OF_8),
        "C": FLOATS,
        **dict.fromkeys(("scaleA", "scaleB", "scaleY"), _FLOAT),
        "Y": (*FLOATS, *_FLOATS_OF_8),
    },
    check=_check_gemm_float8,
    domain=MICROSOFT,
)
def gemm_float8(
    op: FunctionEmitter,
    A: str,
    B: str,
    C: str | None = None,
    scaleA: str | None = None,
    scaleB: str | None = None,
    scaleY: str | None = None,
    *,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    dtype: int = 1,
    transA: int = 0,
    transB: int = 0,
) -> str:
    """activation(α·A'·B' + β·C) as elements of type dtype"""
    named = (activation or "NONE").upper()
    c = None if C is None or beta == 0 else wide(op, C, A)
    y = op.Gemm(wide(op, A, A), wide(op, B, A), c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    if named == "RELU":
        y = op.Relu(y)
    if named == "GELU":  # as the library that it calls has it
        y = op.com_microsoft("FastGelu", y)
    return str(op.Cast(y, to=dtype))


def _misshapen(
    shapes: Shapes, layout: BlockLayout, A: Any, B: Any, scales: Any, zero_points: Any, g_idx: Any, bias: Any
) -> str:
    """The reason why the known shapes do not fit, or ""."""
    sizes = f"N={layout.N}, K={layout.K}, bits={layout.bits} and block_size={layout.block_size}"
    wrong = misshapen(shapes, "bias", bias, (layout.N,), given=sizes) or _wide_of(shapes, A, layout.K)
    stored = shapes.shape(B)
    if stored is not None and _is_omitted(tuple(stored), layout.shape):
        return wrong
    per_block, row = (layout.N, layout.blocks), (layout.N * layout.blocks,)
    packed = zero_points is not None and shapes.type(zero_points) == TensorProto.UINT8
    zeros = (layout.N, layout.zero_bytes) if packed else per_block
    return (
        wrong
        or misshapen(shapes, "B", B, layout.shape, given=sizes)
        or misshapen(shapes, "scales", scales, per_block, row, given=sizes)
        or misshapen(shapes, "zero_points", zero_points, zeros, (math.prod(zeros),), given=sizes)
        or misshapen(shapes, "g_idx", g_idx, (layout.K,), (layout.columns,), given=sizes)
    )


def _wide_of(shapes: Shapes, A: Any, K: int) -> str:
    """The reason why the last axis of A does not fit, or ""."""
    shape = shapes.shape(A)
    return "" if shape is None else misshapen(shapes, "A", A, (*[None] * (len(shape) - 1), K), given=f"K={K}")


def _check_columns(shapes: Shapes, A: Any, K: Size) -> None:
    """Refuse an A whose rows do not have K elements."""
    if K is not None and (wrong := _wide_of(shapes, A, K)):
        raise UnsupportedFormError(wrong)


def _is_omitted(shape: Sequence[int | str | None], due: tuple[int, ...]) -> bool:
    """True if these are the bytes of a projection that is left out: one or more sizes are 0."""
    return 0 in shape and len(shape) == len(due) and all(n in (0, size) for n, size in zip(shape, due, strict=True))


def _miscoded(shapes: Shapes, weights: Coded, transB: int) -> str:
    """The reason why the known shapes do not fit, or ""."""
    sizes = f"N={weights.N}, K={weights.K} and block_size={weights.block_size}"
    return (
        misshapen(shapes, "B", weights.B, ((weights.N * weights.K + 1) // 2,), given=sizes)
        or misshapen(shapes, "absmax", weights.absmax, (weights.blocks,), given=sizes)
        or _wide_of(shapes, weights.like, weights.K if transB else weights.N)
    )


def _check_matmul_bnb4(shapes: Shapes, args: Arguments) -> None:
    weights = Coded(args.N, args.K, args.block_size, args.quant_type, args.A, args.B, args.absmax)
    if refusal := weights.refusal or _miscoded(shapes, weights, args.transB):
        raise UnsupportedFormError(refusal)


@body("MatMulBnb4", "Y", types={"B": _BYTES}, check=_check_matmul_bnb4, domain=MICROSOFT)
def matmul_bnb4_body(
    op: FunctionEmitter,
    A: str,
    B: str,
    absmax: str,
    *,
    K: int,
    N: int,
    block_size: int,
    quant_type: int,
    training_mode: int = 0,
    transB: int = 1,
) -> str:
    """A·Wᵀ, or A·W for transB = 0; W has the numbers in B, each one of the 16 of FP4 or NF4, times the absmax of its block"""
    weights = Coded(N, K, block_size, quant_type, A, B, absmax)
    W = weights.rows(op, op.const([0]), op.const([N]))
    return op.CastLike(op.MatMul(wide(op, A, A), op.Transpose(W, perm=[1, 0]) if transB else W), A)


@rule("MatMulBnb4", domain=MICROSOFT, settings=["absmax"])
def matmul_bnb4(
    op: Emitter, d_Y: str, A: str, B: str, absmax: str, K: int, N: int, block_size: int, quant_type: int, transB: int
) -> tuple[str, str]:
    """dA = dY·W, or dY·Wᵀ for transB = 0; dabsmax = Σ dW·W/absmax over each block

    The weights stay quantised: W is made some rows at a time.
    """
    weights = Coded(N, K, block_size, quant_type, A, B, absmax)
    if refusal := weights.refusal or _miscoded(op, weights, transB):
        raise RuleError(f"Node {op.node!r}: {refusal}.")
    sizes = {"K": K, "N": N, "block_size": block_size, "quant_type": quant_type, "transB": transB}
    given = d_Y, A, B, absmax
    return op.grad.MatMulBnb4Grad(*given, **sizes), op.grad.MatMulBnb4ScaleGrad(*given, **sizes)
