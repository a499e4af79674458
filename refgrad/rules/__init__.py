"""The rules, one short function per operator, a file per family. Importing this package registers them all."""

from refgrad.lowering import onnx, ort
from refgrad.rules import (
    activation,
    arithmetic,
    attention,
    contrib,
    convolution,
    indexing,
    linear,
    loss,
    nondifferentiable,
    normalization,
    pooling,
    quantization,
    reduction,
    resize,
    sampling,
    shape,
    signal,
)

__all__ = [
    "activation",
    "arithmetic",
    "attention",
    "contrib",
    "convolution",
    "indexing",
    "linear",
    "loss",
    "nondifferentiable",
    "normalization",
    "onnx",
    "ort",
    "pooling",
    "quantization",
    "reduction",
    "resize",
    "sampling",
    "shape",
    "signal",
]
