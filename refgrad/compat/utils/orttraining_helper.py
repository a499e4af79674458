"""Names of `onnxcustom.utils.orttraining_helper`."""

from __future__ import annotations

import os
from typing import Any

from onnx import ModelProto, helper

from refgrad.compat.utils.onnx_rewriter import onnx_rewrite_operator
from refgrad.model import native
from refgrad.model.reading import read
from refgrad.protos.types import FLOATS
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
    """`refgrad.add_loss_output`, except that the score "log" is as in onnxcustom.

    It is the mean over the samples, the label is INT64, and an output without a shape has two columns.
    """
    if score_name != "log":
        return with_loss_output(onx, score_name, *arguments, **options)
    options = {"label_type": "int64", "reduction": "mean", **options}
    return with_loss_output(_with_columns(onx), score_name, *arguments, **options)


def _with_columns(onx: ModelProto | str | os.PathLike[str]) -> ModelProto | str | os.PathLike[str]:
    """The model, in which outputs of floats without a shape have the shape [N, 2]."""
    model = read(onx)
    lacking = [
        k
        for k, value in enumerate(model.graph.output)
        if value.type.tensor_type.elem_type in FLOATS and not value.type.tensor_type.HasField("shape")
    ]
    if not lacking:
        return onx
    made = ModelProto()
    made.CopyFrom(model)
    for k in lacking:
        output = made.graph.output[k]
        output.CopyFrom(helper.make_tensor_value_info(output.name, output.type.tensor_type.elem_type, ["N", 2]))
    return made


def _rewrite_op_no_grad(onx: ModelProto) -> ModelProto:
    """A copy of a model with divisions in place of Reciprocal, which old versions of ONNX Runtime cannot differentiate."""
    return onnx_rewrite_operator(onx, "Reciprocal", native.parse_model(_RECIPROCAL))
