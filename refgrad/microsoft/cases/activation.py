"""Cases of ONNX Runtime's activations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.conformance.cases.special import Special, gate
from refgrad.microsoft.cases import array, case, drawer, scalar
from refgrad.protos.domains import MICROSOFT

SPECIAL = (
    gate("Gelu", domain=MICROSOFT, opset=1),
    gate("FastGelu", domain=MICROSOFT, opset=1),
    gate("QuickGelu", domain=MICROSOFT, opset=1),
    Special(
        "BiasGelu",
        "far-out",
        ((-1e30, -800.0, 800.0, 1e30), (0.0,) * 4),
        ((0.0, 0.0, 1.0, 1.0), (0.0, 0.0, 1.0, 1.0)),
        domain=MICROSOFT,
        opset=1,
    ),
)  # fmt: skip


ACTIVATIONS: tuple[tuple[str | None, list[float] | None], ...] = (
    (None, None),
    ("Relu", None),
    ("Tanh", None),
    ("Sigmoid", None),
    ("LeakyRelu", [0.2]),
    ("LeakyRelu", None),
    *(("Softplus", None), ("Softsign", None), ("HardSwish", None), ("Gelu", None)),
    *(("QuickGelu", [0.9]), ("QuickGelu", None)),
    *(("Elu", [0.7]), ("Elu", None), ("Celu", [0.7]), ("Selu", None)),
    *(("ThresholdedRelu", [0.3]), ("ThresholdedRelu", None)),
    *(("HardSigmoid", [0.3, 0.4]), ("HardSigmoid", None)),
    *(("Clip", [-0.4, 0.6]), ("Clip", [-0.4])),
)


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    floats = drawer()
    for shapes in SHAPES:
        x = floats(2, 3, 4)
        yield case("Gelu", x, shapes=shapes)
        yield case("FastGelu", x, shapes=shapes)
        yield case("FastGelu", x, floats(4), shapes=shapes)
        yield case("BiasGelu", x, floats(4), shapes=shapes)
        yield case("QuickGelu", x, shapes=shapes)
        yield case("QuickGelu", x, shapes=shapes, alpha=-0.7)
        for axis in (1, 2, -1):
            yield case("BiasSoftmax", x, floats(2, 1, 4), shapes=shapes, axis=axis, is_inner_broadcast=1)
        yield case("BiasSoftmax", x, floats(1, 3, 4), shapes=shapes, axis=2, is_inner_broadcast=0)
        yield case("BiasSoftmax", floats(2, 3, 0), floats(2, 3, 0), shapes=shapes, is_inner_broadcast=1)
        yield case("BiasDropout", x, floats(4), shapes=shapes)
        yield case("BiasDropout", x, floats(4), floats(2, 3, 4), scalar(0.3), shapes=shapes)
        yield case("BiasSplitGelu", floats(2, 3, 8), floats(8), shapes=shapes)
        yield case("BiasSplitGelu", floats(0, 3, 2), floats(2), shapes=shapes)
        yield case("ScaledSiLU", x, shapes=shapes)
        yield case("ScaledSiLU", x, scalar(-1.5), shapes=shapes)
        yield case("ScaledSiLU", scalar(0.7), array([2.0]), shapes=shapes)
        yield case("ScaledSiLU", floats(0, 3), shapes=shapes, alpha=1.7)
        yield case("ScaledSiLU", x, shapes=shapes, alpha=-0.7)
        yield from _bitmask_dropouts(shapes)


def _bitmask_dropouts(shapes: str) -> Iterator[Case]:
    """Outside of training: two runtimes draw different numbers."""
    floats = drawer(10)
    ratio, training = scalar(0.3), np.array(False)
    for constant in ({}, {"constant": ["training_mode"]}):
        wrt = {"wrt": ["data"]}  # the ratio does not count
        given = [floats(5, 9), ratio, training]
        yield case("BitmaskDropout", *given, shapes=shapes, outputs=2, seed=3, **wrt, **constant)
        given = [floats(5, 9), floats(9), floats(5, 9), ratio, training]
        yield case("BitmaskBiasDropout", *given, shapes=shapes, outputs=2, seed=3, **wrt, **constant)
    for shape in ((), (2, 0), (2, 4, 4)):
        yield case("BitmaskDropout", floats(*shape), shapes=shapes, outputs=2)
        if shape:
            yield case("BitmaskBiasDropout", floats(*shape), floats(*shape[-1:]), shapes=shapes, outputs=2)
    yield case("BitmaskBiasDropout", floats(4), floats(4), shapes=shapes)
