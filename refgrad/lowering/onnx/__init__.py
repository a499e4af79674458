"""Every primitive in ai.onnx operators: the total table, on which the "onnx" dialect and every fallback rest."""

from refgrad.lowering.onnx import (
    activation,
    arithmetic,
    convolution,
    indexing,
    linear,
    loss,
    normalization,
    pooling,
    quantization,
    recurrent,
    reduction,
    sampling,
    shape,
)

__all__ = [
    "activation",
    "arithmetic",
    "convolution",
    "indexing",
    "linear",
    "loss",
    "normalization",
    "pooling",
    "quantization",
    "recurrent",
    "reduction",
    "sampling",
    "shape",
]
