"""The primitives that ONNX Runtime has a kernel for, each with the condition under which that kernel is right.

A lowering that returns None leaves the case to the ai.onnx one.
"""

from refgrad.lowering.ort import (
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
    "shape",
]
