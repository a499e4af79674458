"""ONNX Runtime's products with weights that are quantised in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
from onnx import TensorProto

from refgrad.errors import RuleError
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
from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.microsoft.activation import plus
from refgrad.microsoft.declared import Op, Size, check_shape, misshapen, product, sizes
from refgrad.microsoft.normalization import simplified_layer_normalization, skip_simplified_layer_normalization
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.types import Shape
from refgrad.reverse.emit import Emitter
from refgrad.tables.definitions import FLOATS, UnsupportedFormError, operator
from refgrad.tables.registry import rule

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


@operator(
    "MatMulNBits",
    "Y",
    types={"B": _BYTES, "zero_points": (*_BYTES, *FLOATS), "g_idx": ("tensor(int32)",)},
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
    refusal = layout.refusal or _prepacked(weight_prepacked)
    if refusal := refusal or _misshapen(op, layout, A, B, scales, zero_points, g_idx, bias):
        raise UnsupportedFormError(refusal)
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


@operator(
    "GatherBlockQuantized",
    "output",
    others=("indices",),
    types={"data": _CODES, "scales": FLOATS, "zero_points": "data", "output": "scales"},
    settings=["scales"],
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
    small = kind not in _INTEGERS
    if small and zero_points is not None:
        raise UnsupportedFormError("data in floats has no zero_points; leave them out")
    if not (is_block_size(block_size) or (small and block_size == 0)):
        raise UnsupportedFormError(f"block_size is {block_size}; {BLOCKS}")
    if kind == TensorProto.UINT8:
        if bits not in BITS:
            raise UnsupportedFormError(f"bits is {bits}; there are 2, 4 and 8")
        rank = op.rank(data)
        if gather_axis or quantize_axis not in (-1, rank - 1 if rank else quantize_axis):
            raise UnsupportedFormError("data of uint8 has gather_axis 0, and quantize_axis is the last axis")
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
    _check_gathered(op, data, scales, zero_points, bits, block_size, gather_axis, quantize_axis)
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


def _check_gathered(
    op: FunctionEmitter,
    data: str,
    scales: str,
    zero_points: str | None,
    bits: int,
    block_size: int,
    gather_axis: int,
    quantize_axis: int,
) -> None:
    """Refuse axes that data does not have, and scales and zero points that are not one for each block."""
    rank, packed, small = op.rank(data), op.type(data) == TensorProto.UINT8, op.type(data) not in _INTEGERS
    if rank is None:
        return
    for name, axis in (("gather_axis", gather_axis), ("quantize_axis", quantize_axis)):
        if not -rank <= axis < rank:
            raise UnsupportedFormError(f"{name} is {axis}; data has {rank} axes")
    due: list[Size] = list(sizes(op, data, rank))
    if packed:
        due[-1] = product(due[-1], 8 // bits)
    last = due[quantize_axis]
    due[quantize_axis] = None if last is None else -(-last // block_size) if block_size else 1
    given = f"block_size={block_size}"
    check_shape(op, "scales", scales, [(size, 1) if small else size for size in due], given=given)
    if packed and due[-1] is not None:
        due[-1] = -(-due[-1] * bits // 8)
    check_shape(op, "zero_points", zero_points, due, given=given)


def _along_last(op: FunctionEmitter, packed: str, bits: int) -> str:
    """The numbers in bytes, in the place of the last axis."""
    parts = planes(op, packed, bits)
    if len(parts) == 1:
        return packed
    apart = op.Concat(*(op.Unsqueeze(part, [-1]) for part in parts), axis=-1)
    sizes = op.Concat(op.Shape(packed, end=-1), op.Mul(op.Shape(packed, start=-1), [len(parts)]), axis=0)
    return op.Reshape(apart, sizes, allowzero=1)


@operator(
    "MatMulNBitsMlp",
    "Y",
    optional=["input_skip_bias_sum"],
    types={"gate_B": _BYTES, "up_B": _BYTES},
    settings=["gate_scales", "up_scales"],
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
    if activation not in _GATES:
        raise UnsupportedFormError(f"its activation {activation!r} is not known here; there are {' and '.join(_GATES)}")
    x, total = _normalized(op, A, skip, norm_scale, epsilon)
    project = _projection(op, x, K, accuracy_level, bits, block_size)
    gate, up = project(gate_B, gate_scales, gate_bias, N), project(up_B, up_scales, up_bias, N)
    return op.Mul(op.Relu(gate) if activation == "relu" else op.Mul(gate, op.Sigmoid(gate)), up), total


@operator(
    "MatMulNBitsQkv",
    *("Q", "K", "V"),
    optional=["input_skip_bias_sum"],
    types={"q_B": _BYTES, "k_B": _BYTES, "v_B": _BYTES},
    settings=["q_scales", "k_scales", "v_scales"],
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


_GATES = ("relu", "silu")


def _normalized(
    op: FunctionEmitter, A: str, skip: str | None, norm_scale: str | None, epsilon: float
) -> tuple[str, str | None]:
    """The operand of the projection, and the sum of A and skip where there is one."""
    if norm_scale is None:
        if skip is not None:
            raise UnsupportedFormError("it has a skip without a norm_scale; give both, or neither")
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


@operator(
    "MatMulNBitsQLoRA",
    "Y",
    types={"W": _BYTES, "lora_A": _BYTES, "lora_B": _BYTES},
    settings=["scales", "lora_A_scales", "lora_B_scales"],
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
    if layout.refusal:
        raise UnsupportedFormError(f"of the adapters {layout.refusal}")
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


@operator("MatMulFpQ4", "Y", types={"B": _BYTES, "B_shape": ("tensor(int64)",)})
def matmul_fpq4(op: FunctionEmitter, A: str, B: str, B_shape: str, *, blk_quant_type: int = 1) -> str:
    """A·W; a column of W is in blocks of 32, each a scale, for type 1 a zero point (else 8), and 16 bytes with the numbers"""
    if blk_quant_type not in (0, 1):
        raise UnsupportedFormError(
            f"blk_quant_type is {blk_quant_type}; only 0 and 1 are covered, for ONNX Runtime reads every other as 1"
        )
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


@operator(
    "MatMulBlockQuantizedFp4Weight",
    "Y",
    types={"B": _BYTES, "weight_scale": _BYTES, "weight_scale_2": _FLOAT, "input_scale": _FLOAT},
    settings=["weight_scale_2", "input_scale"],
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
    if block_size < 1:
        raise UnsupportedFormError(f"block_size is {block_size}; it is 1 or more")
    codes = _along_last(op, wide(op, B, A), 4)
    floats, scales = (
        op.Gather(wide(op, op.const(table), A), op.Cast(of, to=TensorProto.INT32), axis=0)
        for table, of in ((_E2M1, codes), (_E4M3, weight_scale))
    )
    whole = op.Mul(wide(op, weight_scale_2, A), _each_of_row(op, scales, floats, block_size))
    return _times(op, A, op.Mul(floats, whole), bias)


@operator(
    "MatMulBlockQuantizedFp8Weight",
    "Y",
    types={"B": ("tensor(float8e4m3fn)",), "b_scale": _FLOAT, "a_scale": _FLOAT},
    settings=["b_scale", "a_scale"],
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
    if block_size < 1:
        raise UnsupportedFormError(f"block_size is {block_size}; it is 1 or more")
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


@operator(
    "GemmFloat8",
    "Y",
    types={
        "A": (*FLOATS, *_FLOATS_OF_8),
        "B": (*FLOATS, *_FLOATS_OF_8),
        "C": FLOATS,
        **dict.fromkeys(("scaleA", "scaleB", "scaleY"), _FLOAT),
        "Y": (*FLOATS, *_FLOATS_OF_8),
    },
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
    if any(scale is not None for scale in (scaleA, scaleB, scaleY)) or op.type(A) in _SINCE or op.type(B) in _SINCE:
        raise UnsupportedFormError(
            "of floats of 8 bits and their scales it is not covered; use Gemm of what they stand for"
        )
    if dtype not in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
        raise UnsupportedFormError(f"its dtype is {dtype}; there are 1 (float), 10 (float16) and 16 (bfloat16)")
    named = (activation or "NONE").upper()
    if named not in ("NONE", "RELU", "GELU"):
        raise UnsupportedFormError(f"its activation {activation!r} is not known; there are RELU, GELU and NONE")
    c = None if C is None or beta == 0 else wide(op, C, A)
    y = op.Gemm(wide(op, A, A), wide(op, B, A), c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    if named == "RELU":
        y = op.Relu(y)
    if named == "GELU":  # as the library that it calls has it
        y = op.com_microsoft("FastGelu", y)
    return str(op.Cast(y, to=dtype))


def _misshapen(
    op: Op,
    layout: BlockLayout,
    A: str,
    B: str,
    scales: str,
    zero_points: str | None,
    g_idx: str | None,
    bias: str | None,
) -> str:
    """The reason why the known shapes do not fit, or ""."""
    sizes = f"N={layout.N}, K={layout.K}, bits={layout.bits} and block_size={layout.block_size}"
    wrong = misshapen(op, "bias", bias, (layout.N,), given=sizes) or _wide_of(op, A, layout.K)
    stored = op.shape(B)
    if stored is not None and _is_omitted(stored, layout.shape):
        return wrong
    per_block, row = (layout.N, layout.blocks), (layout.N * layout.blocks,)
    packed = zero_points is not None and op.type(zero_points) == TensorProto.UINT8
    zeros = (layout.N, layout.zero_bytes) if packed else per_block
    return (
        wrong
        or misshapen(op, "B", B, layout.shape, given=sizes)
        or misshapen(op, "scales", scales, per_block, row, given=sizes)
        or misshapen(op, "zero_points", zero_points, zeros, (math.prod(zeros),), given=sizes)
        or misshapen(op, "g_idx", g_idx, (layout.K,), (layout.columns,), given=sizes)
    )


def _wide_of(op: Op, A: str, K: int) -> str:
    """The reason why the last axis of A does not fit, or ""."""
    shape = op.shape(A)
    return "" if shape is None else misshapen(op, "A", A, (*[None] * (len(shape) - 1), K), given=f"K={K}")


def _is_omitted(shape: Shape, due: tuple[int, ...]) -> bool:
    """True if these are the bytes of a projection that is left out: one or more sizes are 0."""
    return 0 in shape and len(shape) == len(due) and all(n in (0, size) for n, size in zip(shape, due, strict=True))


@operator("MatMulBnb4", "Y", types={"B": _BYTES})
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
    if refusal := weights.refusal or _miscoded(op, weights, transB):
        raise UnsupportedFormError(refusal)
    W = weights.rows(op, op.const([0]), op.const([N]))
    return op.CastLike(op.MatMul(wide(op, A, A), op.Transpose(W, perm=[1, 0]) if transB else W), A)


def _miscoded(op: Op, weights: Coded, transB: int) -> str:
    """The reason why the known shapes do not fit, or ""."""
    sizes = f"N={weights.N}, K={weights.K} and block_size={weights.block_size}"
    return (
        misshapen(op, "B", weights.B, ((weights.N * weights.K + 1) // 2,), given=sizes)
        or misshapen(op, "absmax", weights.absmax, (weights.blocks,), given=sizes)
        or _wide_of(op, weights.like, weights.K if transB else weights.N)
    )


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
