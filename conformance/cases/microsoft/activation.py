"""Cases of ONNX Runtime's activations."""

from __future__ import annotations

from collections.abc import Iterator

from refgrad.conformance.case import SHAPES, Case
from refgrad.conformance.cases.microsoft import array, case, drawer, scalar
from refgrad.conformance.cases.special import Special, gate
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
    *(("Elu", [0.7]), ("Elu", None)),
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
