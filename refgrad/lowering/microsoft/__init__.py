"""The table of primitives read the other way: ONNX Runtime's training operators in ai.onnx operators, for `refgrad.lower`.

The forward operators of com.microsoft have function bodies in refgrad.rules.contrib.
"""

from refgrad.lowering.microsoft import (
    activation,
    arithmetic,
    convolution,
    indexing,
    loss,
    normalization,
    pooling,
    quantization,
    recurrent,
    reduction,
    resize,
    shape,
    training,
)
from refgrad.lowering.microsoft.forms import FORMS, Form, form

__all__ = [
    "FORMS",
    "Form",
    "activation",
    "arithmetic",
    "convolution",
    "form",
    "indexing",
    "loss",
    "normalization",
    "pooling",
    "quantization",
    "recurrent",
    "reduction",
    "resize",
    "shape",
    "training",
]
