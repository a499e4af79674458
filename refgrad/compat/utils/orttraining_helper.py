"""Names of `onnxcustom.utils.orttraining_helper`."""

from __future__ import annotations

import os
from typing import Any

from onnx import ModelProto

from refgrad.rewrites.losses import add_loss_output as with_loss_output
from refgrad.rewrites.losses import get_train_initializer, penalty_loss_onnx

__all__ = ["add_loss_output", "get_train_initializer", "penalty_loss_onnx"]


def add_loss_output(
    onx: ModelProto | str | os.PathLike[str], score_name: str = "squared_error", *arguments: Any, **options: Any
) -> ModelProto:
    """`refgrad.add_loss_output`, except that the label of the score "log" is INT64, as in onnxcustom."""
    if score_name == "log":
        options = {"label_type": "int64", **options}
    return with_loss_output(onx, score_name, *arguments, **options)
