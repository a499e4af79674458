"""The regression that `refgrad demo` shows: a model with its feeds.

y = a·x₁ + b·x₂ + c·x₁² + d·x₂² + e with the squared error as loss, as in the notebook "Stochastic Gradient Descent on simple
function" of onnxcustom (Xavier Dupré), whose names and numbers these are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.model import native
from refgrad.rewrites.losses import add_loss_output

_REGRESSION = """
<ir_version: 8, opset_import: ["" : 14]>
regression (float[?, 2] x) => (float[?, 1] y)
<
    float[1, 2] init = {0.5, -0.33333},
    float[1, 2] init_1 = {-2, 3},
    int64[1] init_2 = {1},
    int64[1] init_3 = {2},
    int64[1] init_5 = {0},
    float[1] init_b10 = {-1},
    int64[2] init_b11 = {-1, 1}
>
{
    out_mul_0 = Mul(x, x)
    out_mul_0_1 = Mul(out_mul_0, init)
    out_mul_0_2 = Mul(x, init_1)
    out_add_0 = Add(out_mul_0_2, out_mul_0_1)
    out_sli_0 = Slice(out_add_0, init_2, init_3, init_2)
    out_squ_0 = Squeeze(out_sli_0, init_2)
    out_sli_0_1 = Slice(out_add_0, init_5, init_2, init_2)
    out_squ_0_1 = Squeeze(out_sli_0_1, init_2)
    out_add_0_1 = Add(out_squ_0_1, out_squ_0)
    out_add_0_2 = Add(out_add_0_1, init_b10)
    y = Reshape(out_add_0_2, init_b11)
}
"""


def regression(loss: bool = True) -> ModelProto:
    """Return the model. With `loss` its first output is the squared error against a new input label."""
    model = native.parse_model(_REGRESSION)
    return add_loss_output(model) if loss else model


def feeds() -> dict[str, Any]:
    """Return the five points of the notebook with their labels, and its first weights."""
    return {
        name: np.array(value, dtype=np.float32)
        for name, value in {
            "x": [[0, 0], [1, 0], [0, 1], [1, 1], [2, 2]],
            "label": [[-1], [-2.5], [1.6666701], [0.16667008], [1.6666799]],
            "init": [[2, 3]],
            "init_1": [[0.5, 0.33333]],
            "init_b10": [1],
        }.items()
    }
