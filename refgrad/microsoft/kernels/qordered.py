"""ONNX Runtime's operators of matrices of int8 in the orders of cublasLt: read, computed in double, and rounded once.

A result y becomes round(y/scale), held within int8.
"""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.kernels.activation import gelu, softmax
from refgrad.backends.numpy.kernels.operands import check_axis, check_shape
from refgrad.backends.numpy.registry import broadcasts
from refgrad.extend import Arguments, kernel_of_body
from refgrad.microsoft.kernels.attention import windowed
from refgrad.microsoft.kernels.qlinear import for_columns, read, written
from refgrad.microsoft.kernels.quantization import in_order
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
Maybe = np.ndarray | None


@kernel_of_body("QOrderedMatMul", domain=MICROSOFT, fresh=True)
def qordered_matmul(args: Arguments) -> Array:
    """A·B + bias + C of matrices A, C and Y in rows and B in columns"""
    if min(args.A.ndim, args.B.ndim) < 2:
        raise ValueError(f"A has rank {args.A.ndim} and B {args.B.ndim}; they are matrices")
    columns = args.B.shape[-1]
    right = in_order(args.B, args.order_B, back=True) * for_columns("scale_B", args.scale_B, columns)
    y = read(args.A, args.scale_A) @ right
    if args.bias is not None:
        y = y + args.bias
    if args.C is not None and args.scale_C is not None:
        if not broadcasts(args.C.shape, y.shape):
            raise ValueError(f"C has the shape {list(args.C.shape)}, which does not broadcast to {list(y.shape)}")
        y = y + read(args.C, args.scale_C)
    return written(y, args.scale_Y, None, args.A)


@kernel_of_body("QOrderedGelu", domain=MICROSOFT, fresh=True)
def qordered_gelu(args: Arguments) -> Array:
    """In any order: it is elementwise"""
    return written(gelu(read(args.X, args.scale_X), approximate="none"), args.scale_Y, None, args.X)


@kernel_of_body("QOrderedLayerNormalization", domain=MICROSOFT, fresh=True)
def qordered_layer_normalization(args: Arguments) -> Array:
    """In double, over the axes from `axis` on"""
    over = tuple(range(check_axis(args.axis, args.X.ndim), args.X.ndim))
    for name, given in (("scale", args.scale), ("B", args.B)):
        if given is not None:
            check_shape(name, given.shape, args.X.shape[over[0] :])
    x = read(in_order(args.X, args.order_X, back=True), args.scale_X)
    centre = x - x.mean(over, keepdims=True)
    y = centre / np.sqrt((centre**2).mean(over, keepdims=True) + args.epsilon) * args.scale.astype(np.float64)
    return in_order(
        written(y if args.B is None else y + args.B.astype(np.float64), args.scale_Y, None, args.X), args.order_Y
    )


@kernel_of_body("QOrderedAttention", domain=MICROSOFT, fresh=True)
def qordered_attention(args: Arguments) -> Array:
    """Head by head, with each step quantized that has a scale"""
    x, projected = read(args.input, args.scale_input), []
    for name, weight, scale, bias, gemm in (
        ("Q", args.Q_weight, args.scale_Q_weight, args.Q_bias, args.scale_Q_gemm),
        ("K", args.K_weight, args.scale_K_weight, args.K_bias, args.scale_K_gemm),
        ("V", args.V_weight, args.scale_V_weight, args.V_bias, args.scale_V_gemm),
    ):
        width = weight.shape[-1]
        y = (
            x @ (in_order(weight, args.order_weight, back=True) * for_columns(f"scale_{name}_weight", scale, width))
            + bias
        )
        projected.append(_through_int8(y, gemm))
    batch, length, width = projected[0].shape
    size = width // args.num_heads
    result = np.empty(projected[2].shape)
    for b in range(batch):
        for h in range(args.num_heads):
            q, k, v = (
                p[b, :, p.shape[2] // args.num_heads * h :][:, : p.shape[2] // args.num_heads] for p in projected
            )
            scores = _through_int8(q @ k.T, args.scale_QKT_gemm) / np.sqrt(size)
            if args.mask_index is not None:
                scores = scores + np.where(args.mask_index[b] > 0, 0.0, -10000.0)
            if args.unidirectional:
                scores[np.triu_indices(length, 1)] = -np.inf
            shares = _through_int8(softmax(scores, axis=-1), args.scale_QKT_softmax)
            result[b, :, v.shape[1] * h : v.shape[1] * (h + 1)] = shares @ v
    return written(result, args.scale_values_gemm, None, args.input)


@kernel_of_body("QOrderedLongformerAttention", domain=MICROSOFT, fresh=True)
def qordered_longformer_attention(args: Arguments) -> Array:
    """Token by token, of projections that are quantized"""
    x, width, thirds = read(args.input, args.scale_input), args.input.shape[2], []
    for name, matrix, scale, added, gemm in (
        ("", args.weight, args.scale_weight, args.bias, args.scale_qkv_gemm),
        ("global_", args.global_weight, args.scale_global_weight, args.global_bias, args.scale_global_gemm),
    ):
        factors = for_columns(f"scale_{name}weight", scale, 3 * width)
        y = x @ (in_order(matrix, args.order_weight, back=True) * factors) + added
        thirds.append(np.split(_through_int8(y, gemm), 3, -1))
    y = windowed(thirds[0], thirds[1], args.mask.astype(np.float64), args.global_, args.num_heads, args.window)
    return written(y, args.scale_output, None, args.input)


def _through_int8(y: Array, scale: Maybe) -> Array:
    return y if scale is None else read(written(y, scale, None, np.zeros((), np.int8)), scale)
