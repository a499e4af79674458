"""The rules, one short function per operator, a file per family. Importing this package registers them all."""

from refgrad.lowering import onnx, ort
from refgrad.rules import (
    activation,
    arithmetic,
    convolution,
    indexing,
    linear,
    loss,
    nondifferentiable,
    normalization,
    pooling,
    reduction,
    shape,
)

__all__ = [
    signal,
    "activation",
    "arithmetic",
    "convolution",
    "indexing",
    "linear",
    "loss",
    "nondifferentiable",
    "normalization",
    "onnx",
    "ort",
    "pooling",
    "reduction",
    "shape",
]
    "signal",
