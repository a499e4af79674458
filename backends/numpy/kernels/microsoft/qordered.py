"""ONNX Runtime's operators of matrices of int8 in the orders of cublasLt: read, computed in double, and rounded once.

A result y becomes round(y/scale), held within int8.
"""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.kernels.activation import gelu, softmax
from refgrad.backends.numpy.kernels.microsoft.attention import windowed
from refgrad.backends.numpy.kernels.microsoft.qlinear import for_columns, read, written
from refgrad.backends.numpy.kernels.microsoft.quantization import in_order
from refgrad.backends.numpy.kernels.operands import check_axis, check_shape
from refgrad.backends.numpy.registry import broadcasts, kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
Maybe = np.ndarray | None


@kernel("QOrderedMatMul", domain=MICROSOFT, fresh=True)
def qordered_matmul(
    A: Array,
    scale_A: Array,
    B: Array,
    scale_B: Array,
    scale_Y: Array,
    bias: Maybe = None,
    C: Maybe = None,
    scale_C: Maybe = None,
    *,
    order_A: int,
    order_B: int,
    order_Y: int,
) -> Array:
    """A·B + bias + C of matrices A, C and Y in rows and B in columns"""
    if (order_A, order_B, order_Y) != (1, 0, 1):
        raise ValueError(
            f"order_A, order_B and order_Y are {order_A}, {order_B} and {order_Y}; ORDER_ROW (1), ORDER_COL (0) and "
            "ORDER_ROW are supported"
        )
    if (C is None) != (scale_C is None):
        raise ValueError("C and scale_C are given together, or none of them")
    if min(A.ndim, B.ndim) < 2:
        raise ValueError(f"A has rank {A.ndim} and B {B.ndim}; they are matrices")
    columns = B.shape[-1]
    right = in_order(B, order_B, back=True) * for_columns("scale_B", scale_B, columns)
    y = read(A, scale_A) @ right
    if bias is not None:
        check_shape("bias", bias.shape, (columns,))
        y = y + bias
    if C is not None and scale_C is not None:
        if not broadcasts(C.shape, y.shape):
            raise ValueError(f"C has the shape {list(C.shape)}, which does not broadcast to {list(y.shape)}")
        y = y + read(C, scale_C)
    return written(y, scale_Y, None, A)


@kernel("QOrderedGelu", domain=MICROSOFT, fresh=True)
def qordered_gelu(
    X: Array, scale_X: Array, scale_Y: Array, *, order_X: int | None = None, order_Y: int | None = None
) -> Array:
    """In any order: it is elementwise"""
    _check_orders(order_X, order_Y)
    return written(gelu(read(X, scale_X), approximate="none"), scale_Y, None, X)


@kernel("QOrderedLayerNormalization", domain=MICROSOFT, fresh=True)
def qordered_layer_normalization(
    X: Array,
    scale_X: Array,
    scale: Array,
    B: Maybe,
    scale_Y: Array,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    order_X: int = 1,
    order_Y: int = 1,
) -> Array:
    """In double, over the axes from `axis` on"""
    _check_orders(order_X, order_Y)
    over = tuple(range(check_axis(axis, X.ndim), X.ndim))
    for name, given in (("scale", scale), ("B", B)):
        if given is not None:
            check_shape(name, given.shape, X.shape[over[0] :])
    x = read(in_order(X, order_X, back=True), scale_X)
    centre = x - x.mean(over, keepdims=True)
    y = centre / np.sqrt((centre**2).mean(over, keepdims=True) + epsilon) * scale.astype(np.float64)
    return in_order(written(y if B is None else y + B.astype(np.float64), scale_Y, None, X), order_Y)


def _check_orders(order_X: int | None, order_Y: int | None) -> None:
    if order_X is not None and order_Y is not None and order_X != order_Y:
        raise ValueError(f"order_X is {order_X} and order_Y {order_Y}; they are the same")


@kernel("QOrderedAttention", domain=MICROSOFT, fresh=True)
def qordered_attention(
    input: Array,
    scale_input: Array,
    scale_Q_gemm: Array,
    scale_K_gemm: Array,
    scale_V_gemm: Array,
    Q_weight: Array,
    K_weight: Array,
    V_weight: Array,
    scale_Q_weight: Array,
    scale_K_weight: Array,
    scale_V_weight: Array,
    Q_bias: Array,
    K_bias: Array,
    V_bias: Array,
    scale_QKT_gemm: Maybe,
    scale_QKT_softmax: Maybe,
    scale_values_gemm: Array,
    mask_index: Maybe = None,
    past: Maybe = None,
    attention_bias: Maybe = None,
    *,
    num_heads: int,
    order_input: int,
    order_output: int,
    order_weight: int,
    qkv_hidden_sizes: list[int] | None = None,
    unidirectional: int = 0,
) -> Array:
    """Head by head, with each step quantized that has a scale"""
    if (order_input, order_weight, order_output) != (1, 0, 1):
        raise ValueError(
            f"order_input, order_weight and order_output are {order_input}, {order_weight} and {order_output}; ORDER_ROW (1), "
            "ORDER_COL (0) and ORDER_ROW are supported"
        )
    if past is not None or attention_bias is not None or qkv_hidden_sizes is not None:
        raise ValueError("past, attention_bias and qkv_hidden_sizes are not supported")
    if input.ndim != 3:
        raise ValueError(f"input has the shape {list(input.shape)}; it is (batch, sequence, hidden)")
    x, projected = read(input, scale_input), []
    for name, weight, scale, bias, gemm in (
        ("Q", Q_weight, scale_Q_weight, Q_bias, scale_Q_gemm),
        ("K", K_weight, scale_K_weight, K_bias, scale_K_gemm),
        ("V", V_weight, scale_V_weight, V_bias, scale_V_gemm),
    ):
        width = weight.shape[-1]
        if width % num_heads:
            raise ValueError(f"{name}_weight has {width} columns, which {num_heads} heads do not divide")
        check_shape(f"{name}_bias", bias.shape, (width,))
        y = x @ (in_order(weight, order_weight, back=True) * for_columns(f"scale_{name}_weight", scale, width)) + bias
        projected.append(_through_int8(y, gemm))
    batch, length, width = projected[0].shape
    size = width // num_heads
    if mask_index is not None:
        if mask_index.ndim not in (2, 3):
            raise ValueError(f"a mask of shape {list(mask_index.shape)} is not supported")
        check_shape("mask_index", mask_index.shape, (*(batch, length)[: mask_index.ndim - 1], length))
    result = np.empty(projected[2].shape)
    for b in range(batch):
        for h in range(num_heads):
            q, k, v = (p[b, :, p.shape[2] // num_heads * h :][:, : p.shape[2] // num_heads] for p in projected)
            scores = _through_int8(q @ k.T, scale_QKT_gemm) / np.sqrt(size)
            if mask_index is not None:
                scores = scores + np.where(mask_index[b] > 0, 0.0, -10000.0)
            if unidirectional:
                scores[np.triu_indices(length, 1)] = -np.inf
            shares = _through_int8(softmax(scores, axis=-1), scale_QKT_softmax)
            result[b, :, v.shape[1] * h : v.shape[1] * (h + 1)] = shares @ v
    return written(result, scale_values_gemm, None, input)


@kernel("QOrderedLongformerAttention", domain=MICROSOFT, fresh=True)
def qordered_longformer_attention(
    input: Array,
    scale_input: Array,
    weight: Array,
    scale_weight: Array,
    bias: Array,
    scale_bias: Array,
    scale_qkv_gemm: Array,
    mask: Array,
    global_weight: Array,
    scale_global_weight: Array,
    global_bias: Array,
    scale_global_gemm: Array,
    global_: Array,
    scale_output: Array,
    *,
    num_heads: int,
    order_global_weight: int,
    order_input: int,
    order_output: int,
    order_weight: int,
    window: int,
) -> Array:
    """Token by token, of projections that are quantized"""
    orders = order_input, order_weight, order_global_weight, order_output
    if orders != (1, 0, 0, 1):
        raise ValueError(
            f"order_input, order_weight, order_global_weight and order_output are {orders}; ORDER_ROW (1), ORDER_COL (0), "
            "ORDER_COL and ORDER_ROW are supported"
        )
    if input.ndim != 3:
        raise ValueError(f"input has the shape {list(input.shape)}; it is (batch, sequence, hidden)")
    x, width, thirds = read(input, scale_input), input.shape[2], []
    for name, matrix, scale, added, gemm in (
        ("", weight, scale_weight, bias, scale_qkv_gemm),
        ("global_", global_weight, scale_global_weight, global_bias, scale_global_gemm),
    ):
        check_shape(f"{name}weight", matrix.shape, (width, 3 * width))
        check_shape(f"{name}bias", added.shape, (3 * width,))
        factors = for_columns(f"scale_{name}weight", scale, 3 * width)
        y = x @ (in_order(matrix, order_weight, back=True) * factors) + added
        thirds.append(np.split(_through_int8(y, gemm), 3, -1))
    if width % num_heads:
        raise ValueError(f"input has {width} channels, which {num_heads} heads do not divide")
    y = windowed(thirds[0], thirds[1], mask.astype(np.float64), global_, num_heads, window)
    return written(y, scale_output, None, input)


def _through_int8(y: Array, scale: Maybe) -> Array:
    return y if scale is None else read(written(y, scale, None, np.zeros((), np.int8)), scale)
