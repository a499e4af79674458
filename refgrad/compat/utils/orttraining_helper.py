"""Names of `onnxcustom.utils.orttraining_helper`."""

from __future__ import annotations

import os
from typing import Any

from onnx import ModelProto

from refgrad.compat.utils.onnx_rewriter import onnx_rewrite_operator
from refgrad.model import native
from refgrad.rewrites.losses import add_loss_output as with_loss_output
from refgrad.rewrites.losses import get_train_initializer, penalty_loss_onnx

__all__ = ["add_loss_output", "get_train_initializer", "penalty_loss_onnx"]

_RECIPROCAL = """
<ir_version: 8, opset_import: ["" : 15]>
reciprocal (float[] X) => (float[] Y) { number = Constant <value_float = 1.0> () one = CastLike(number, X) Y = Div(one, X) }
"""


def add_loss_output(
    onx: ModelProto | str | os.PathLike[str], score_name: str = "squared_error", *arguments: Any, **options: Any
) -> ModelProto:
    """`refgrad.add_loss_output`, except that the label of the score "log" is INT64, as in onnxcustom."""
    if score_name == "log":
        options = {"label_type": "int64", **options}
    return with_loss_output(onx, score_name, *arguments, **options)


def _rewrite_op_no_grad(onx: ModelProto) -> ModelProto:
    """A copy of a model with divisions in place of Reciprocal, which old versions of ONNX Runtime cannot differentiate."""
    return onnx_rewrite_operator(onx, "Reciprocal", native.parse_model(_RECIPROCAL))
