"""Cases of the activations, away from their kinks."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.arithmetic import FORMS
from refgrad.conformance.cases.shape import NEWEST, numbers
from refgrad.conformance.cases.special import TINY, Special, gate

SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "Relu": ({},),
    "LeakyRelu": ({}, {"alpha": -0.5}, {"alpha": 0.0}),
    "Elu": ({}, {"alpha": 2.5}, {"alpha": -0.5}),
    "Selu": ({}, {"alpha": 2.0, "gamma": 0.5}),
    "Celu": ({}, {"alpha": 2.0}, {"alpha": -2.0}),
    "ThresholdedRelu": ({}, {"alpha": -0.5}),
    "Shrink": ({}, {"lambd": 0.75, "bias": 0.25}),
    "Sigmoid": ({},),
    "HardSigmoid": ({}, {"alpha": 0.3, "beta": 0.4}),
    "HardSwish": ({},),
    "Tanh": ({},),
    "Softplus": ({},),
    "Softsign": ({},),
    "Gelu": ({}, {"approximate": "tanh"}),
    "Mish": ({},),
    "Swish": ({}, {"alpha": 1.5}),
}
SINCE = {"Gelu": 20, "Mish": 18, "Swish": 24}


SPECIAL = (
    # Functions that are flat or straight far out: the exponentials in their derivatives overflow.
    Special("Sigmoid", "far-out", ((-inf, -1e30, -800.0, -0.0, 800.0, 1e30, inf),), ((0.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.0),)),
    Special("Tanh", "far-out", ((-inf, -1e30, -800.0, 800.0, 1e30, inf),), ((0.0,) * 6,)),
    Special("Tanh", "next-to-zero", ((-0.0, TINY, -TINY, 1e-30),), ((1.0,) * 4,)),
    Special("Softplus", "far-out", ((-inf, -1e30, -800.0, -0.0, 800.0, 1e30, inf),), ((0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0),)),
    Special("Elu", "far-out", ((-inf, -1e30, -800.0, 800.0, 1e30, inf),), ((0.0,) * 3 + (1.0,) * 3,)),
    Special("Celu", "far-out", ((-inf, -1e30, -800.0, 800.0, 1e30, inf),), ((0.0,) * 3 + (1.0,) * 3,)),
    Special("Selu", "far-out", ((-inf, -1e30, 1e30, inf),), ((0.0, 0.0, 1.05070102, 1.05070102),)),
    # e^−30 and e^−60, which are nothing beside the result −α.
    Special("Elu", "tail", ((-30.0, -60.0),), ((9.3576229688e-14, 8.7565107627e-27),)),
    Special("Elu", "tail", ((-30.0, 1.0),), ((-4.6788114844e-14, 1.0),), attributes={"alpha": -0.5}),
    Special("Selu", "tail", ((-30.0, -60.0),), ((1.6451630825e-13, 1.5394815848e-26),)),
    Special("Celu", "tail", ((-60.0, -120.0),), ((9.3576229688e-14, 8.7565107627e-27),), attributes={"alpha": 2.0}),
    Special("Celu", "tail", ((-60.0, 60.0),), ((1.0686474582e13, 1.0),), attributes={"alpha": -2.0}),
    Special("Relu", "far-out", ((-inf, -1e30, -TINY, TINY, 1e30, inf),), ((0.0,) * 3 + (1.0,) * 3,)),
    Special("LeakyRelu", "far-out", ((-inf, -1e30, 1e30, inf),), ((0.25, 0.25, 1.0, 1.0),), attributes={"alpha": 0.25}),
    Special("HardSigmoid", "far-out", ((-inf, -1e30, 1e30, inf),), ((0.0,) * 4,)),
    Special("HardSwish", "far-out", ((-1e30, -800.0, 800.0, 1e30),), ((0.0, 0.0, 1.0, 1.0),)),
    Special("Softsign", "far-out", ((-1e30, -1e15, -0.0, 1e15, 1e30),), ((0.0, 1e-30, 1.0, 1e-30, 0.0),)),
    gate("Gelu"),
    gate("Gelu", attributes={"approximate": "tanh"}),
    gate("Mish"),
    gate("Swish", opset=24),
    Special("ThresholdedRelu", "far-out", ((-inf, -1e30, 1e30, inf),), ((0.0, 0.0, 1.0, 1.0),)),
    Special("Shrink", "far-out", ((-inf, -1e30, 1e30, inf),), ((1.0,) * 4,)),
    Special("PRelu", "far-out", ((-inf, inf), (0.25, 0.25)), ((0.25, 1.0), (-inf, 0.0))),
    Special("Softmax", "overflow", ((1e30, 1e30, -1e30),), ((0.25, -0.25, 0.0),), (1.0, 0.0, 0.0)),
    Special("Softmax", "settled", ((1000.0, 0.0, -inf),), ((0.0,) * 3,), (1.0, 1.0, 1.0)),
    Special("LogSoftmax", "overflow", ((1e30, 1e30, -1e30),), ((0.5, -0.5, 0.0),), (1.0, 0.0, 0.0)),
    Special("LogSoftmax", "settled", ((1000.0, 0.0, -inf),), ((-1.0, 1.0, 0.0),), (0.0, 1.0, 0.0)),
    Special(
        "SwiGLU",
        "far-out",
        ((-1e30, -800.0, 800.0, 1e30), (1.0,) * 4),
        ((0.0, 0.0, 1.0, 1.0), (0.0, 0.0, 800.0, 1e30)),
        opset=28,
    ),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Every attribute, on a matrix, a scalar and an empty tensor; both sides of every kink, and far out."""
    for shapes in SHAPES:
        for op_type, settings in SETTINGS.items():
            opsets = sorted({max(16, SINCE.get(op_type, 0)), max(NEWEST, SINCE.get(op_type, 0))})
            for attributes in settings:
                for form in FORMS:
                    yield node_case(op_type, 2 * numbers(*form), opset=opsets[0], shapes=shapes, **attributes)
                far = np.array([-100, -20, -4, 4, 20, 100], np.float32)
                yield node_case(op_type, far, opset=opsets[-1], shapes=shapes, **attributes)
        for form in FORMS:
            for alpha in (1.0, 1.5):
                gate, value = 2 * numbers(*form), 1 - numbers(*form)
                yield node_case("SwiGLU", gate, value, alpha=alpha, opset=28, shapes=shapes)
        for slope in (numbers(2, 3), numbers(3), numbers(1, 1), numbers()):
            yield node_case("PRelu", 0.2 - numbers(2, 3), slope, opset=NEWEST, shapes=shapes)
        for op_type in ("Softmax", "LogSoftmax"):
            for axis in (-1, 0, 1):
                for x in (numbers(2, 3, 4), 30 * numbers(2, 3), np.zeros((2, 0), np.float32)):
                    yield node_case(op_type, x, axis=axis, opset=NEWEST, shapes=shapes)
            yield node_case(op_type, numbers(4), opset=16, shapes=shapes)
