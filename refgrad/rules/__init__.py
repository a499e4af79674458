"""The rules, one short function per operator, a file per family. Importing this package registers them all."""

from refgrad.lowering import onnx, ort
from refgrad.rules import (
    activation,
    arithmetic,
    attention,
    call,
    contrib,
    control_flow,
    convolution,
    indexing,
    linear,
    loss,
    ml,
    nondifferentiable,
    normalization,
    optimizer,
    pooling,
    quantization,
    recurrent,
    reduction,
    resize,
    sampling,
    sequence,
    shape,
    signal,
)
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.registry import BODY, RULES

__all__ = [
    "activation",
    "arithmetic",
    "attention",
    "call",
    "contrib",
    "control_flow",
    "convolution",
    "indexing",
    "linear",
    "loss",
    "ml",
    "nondifferentiable",
    "normalization",
    "onnx",
    "optimizer",
    "ort",
    "pooling",
    "quantization",
    "recurrent",
    "reduction",
    "resize",
    "sampling",
    "sequence",
    "shape",
    "signal",
]

BODY.update({key: known.meaning for key, known in DEFINITIONS.items() if key not in RULES})
