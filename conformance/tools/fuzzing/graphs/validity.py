"""Checks of a model that refgrad made, by onnx's checker and strict inference, and the refusals that are expected."""

from __future__ import annotations

import re

from onnx import ModelProto

from refgrad.errors import InvalidModelError
from refgrad.model import native

EXPECTED = {  # why refgrad refuses a valid graph, by what its message says
    "an input or output declares no shape": re.compile(r"declares no shape, and onnx\.checker refuses"),
    "the shape of a state changes from step to step": re.compile(
        r"its state .* before a step and .* after it|its shape is not the same in every step"
    ),
}

# onnx takes every vector of known size, of floats too, for a shape that it may compute with: it refuses a Mul of Unsqueeze(a),
# a [3], and b [2], though both broadcast.
_ONNX_IS_WRONG = re.compile(r"Invalid rank for \w+ broadcasting: \(\d+\) vs \(\d+\)")


def invalid(model: ModelProto, strict: bool = True) -> str:
    """The reason why the full check or, if `strict`, strict inference with the values of shapes refuses `model`, or ""."""
    try:
        native.check_model(model, full_check=True)
    except (native.ValidationError, native.InferenceError, InvalidModelError) as error:
        return f"the full check: {' '.join(str(error).split())}"
    if strict:
        try:
            native.infer_shapes(model, strict_mode=True, data_prop=True)
        except (native.InferenceError, InvalidModelError) as error:
            if not _ONNX_IS_WRONG.search(str(error)):
                return f"strict inference: {' '.join(str(error).split())}"
    return ""


def expected(message: str) -> str:
    """The name of the reason that a refusal gives, or "" where no graph should meet it."""
    return next((name for name, pattern in EXPECTED.items() if pattern.search(message)), "")
