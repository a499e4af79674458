"""Cases of numbers that overflow, underflow, are infinite or missing, where the derivative still has a limit.

The limits were worked out by hand, from the definition of each operator. What they are in a type that cannot hold one is
infinite or 0. Where the limit depends on the way that leads there, there is no case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import Any

import numpy as np

from refgrad.conformance.case import Case, node_case
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.kinks import Point

NEWEST = 21  # the last opset that every runtime under test knows
TINY = 2.0**-134  # subnormal in float32


@dataclass(frozen=True)
class Special:
    """An operator at special numbers: `inputs` in the order of the schema, and the gradient of each for the cotangent.

    `limits` has None for an input that gets no gradient. `cotangent` is that of the first output.
    """

    operator: str
    what: str
    inputs: Point
    limits: Point
    cotangent: Any = 1.0
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""
    opset: int = NEWEST


def _gate(operator: str, **more: Any) -> Special:
    """x times a gate that is 0 far below and 1 far above."""
    return Special(
        operator, "far-out", ((-1e30, -1e15, -800.0, 800.0, 1e15, 1e30),), ((0.0,) * 3 + (1.0,) * 3,), **more
    )


SPECIAL: tuple[Special, ...] = (
    # Functions that are flat or straight far out: the exponentials in their derivatives overflow.
    Special("Sigmoid", "far-out", ((-inf, -1e30, -800.0, -0.0, 800.0, 1e30, inf),), ((0.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.0),)),
    Special("Tanh", "far-out", ((-inf, -1e30, -800.0, 800.0, 1e30, inf),), ((0.0,) * 6,)),
    Special("Tanh", "next-to-zero", ((-0.0, TINY, -TINY, 1e-30),), ((1.0,) * 4,)),
    Special("Softplus", "far-out", ((-inf, -1e30, -800.0, -0.0, 800.0, 1e30, inf),), ((0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0),)),
    Special("Elu", "far-out", ((-inf, -1e30, -800.0, 800.0, 1e30, inf),), ((0.0,) * 3 + (1.0,) * 3,)),
    Special("Celu", "far-out", ((-inf, -1e30, -800.0, 800.0, 1e30, inf),), ((0.0,) * 3 + (1.0,) * 3,)),
    Special("Selu", "far-out", ((-inf, -1e30, 1e30, inf),), ((0.0, 0.0, 1.05070102, 1.05070102),)),
    Special("Relu", "far-out", ((-inf, -1e30, -TINY, TINY, 1e30, inf),), ((0.0,) * 3 + (1.0,) * 3,)),
    Special("LeakyRelu", "far-out", ((-inf, -1e30, 1e30, inf),), ((0.25, 0.25, 1.0, 1.0),), attributes={"alpha": 0.25}),
    Special("HardSigmoid", "far-out", ((-inf, -1e30, 1e30, inf),), ((0.0,) * 4,)),
    Special("HardSwish", "far-out", ((-1e30, -800.0, 800.0, 1e30),), ((0.0, 0.0, 1.0, 1.0),)),
    Special("Softsign", "far-out", ((-1e30, -1e15, -0.0, 1e15, 1e30),), ((0.0, 1e-30, 1.0, 1e-30, 0.0),)),
    Special("Erf", "far-out", ((-inf, -1e30, -800.0, 800.0, 1e30, inf),), ((0.0,) * 6,)),
    Special("Atan", "far-out", ((-inf, -1e30, -1e15, 1e15, 1e30, inf),), ((0.0, 0.0, 1e-30, 1e-30, 0.0, 0.0),)),
    Special("Asinh", "far-out", ((-inf, -1e30, -0.0, 1e30, inf),), ((0.0, 1e-30, 1.0, 1e-30, 0.0),)),
    Special("Acosh", "far-out", ((1e30, inf),), ((1e-30, 0.0),)),
    _gate("Gelu"),
    _gate("Gelu", attributes={"approximate": "tanh"}),
    _gate("Mish"),
    _gate("Swish", opset=24),
    _gate("Gelu", domain=MICROSOFT, opset=1),
    _gate("FastGelu", domain=MICROSOFT, opset=1),
    _gate("QuickGelu", domain=MICROSOFT, opset=1),
    Special("ThresholdedRelu", "far-out", ((-inf, -1e30, 1e30, inf),), ((0.0, 0.0, 1.0, 1.0),)),
    Special("Shrink", "far-out", ((-inf, -1e30, 1e30, inf),), ((1.0,) * 4,)),
    Special("PRelu", "far-out", ((-inf, inf), (0.25, 0.25)), ((0.25, 1.0), (-inf, 0.0))),
    # Exponentials, logarithms and powers: the derivative is infinite where the function overflows or begins.
    Special("Exp", "overflow", ((-inf, -800.0, -0.0, 80.0, 800.0, inf),), ((0.0, 0.0, 1.0, 5.540622e34, inf, inf),)),
    Special("Sinh", "overflow", ((-800.0, -0.0, 80.0, 800.0),), ((inf, 1.0, 2.770311e34, inf),)),
    Special("Cosh", "overflow", ((-800.0, -80.0, 80.0, 800.0),), ((-inf, -2.770311e34, 2.770311e34, inf),)),
    Special("Log", "next-to-zero", ((1e-30, 1e30, inf),), ((1e30, 1e-30, 0.0),)),
    Special("Sqrt", "next-to-zero", ((0.0, TINY, 1e-30, 1e30, inf),), ((inf, 2.0**66, 5e14, 5e-16, 0.0),)),
    Special("Reciprocal", "far-out", ((-inf, -1e15, 1e-15, 1e15, inf),), ((0.0, -1e-30, -1e30, -1e-30, 0.0),)),
    Special("Pow", "far-out", ((1e30, 1e-30), (0.5, 0.5)), ((5e-16, 5e14), (6.907755e16, -6.907755e-14))),
    # Arithmetic: the derivative by one operand is the other, whatever that is.
    Special("Add", "infinite", ((inf, -inf, nan), (1.0, inf, 0.0)), ((1.0,) * 3, (1.0,) * 3)),
    Special("Sub", "infinite", ((inf, inf, 1.0), (1.0, inf, nan)), ((1.0,) * 3, (-1.0,) * 3)),
    Special("Mul", "infinite", ((inf, 1e30, 0.0, -0.0), (2.0, 1e30, inf, 3.0)), ((2.0, 1e30, inf, 3.0), (inf, 1e30, 0.0, 0.0))),
    Special("Div", "overflow", ((1e30, 1.0, 1.0), (1e30, 1e15, inf)), ((1e-30, 1e-15, 0.0), (-1e-30, -1e-30, 0.0))),
    Special("Div", "underflow", ((1e-30, 1.0), (1e-30, 1e-15)), ((1e30, 1e15), (-1e30, -1e30))),
    Special("Neg", "missing", ((nan, inf, -inf),), ((-1.0,) * 3,)),
    Special("Identity", "missing", ((nan, inf, -inf),), ((1.0,) * 3,)),
    Special("Abs", "far-out", ((-inf, -TINY, TINY, inf),), ((-1.0, -1.0, 1.0, 1.0),)),
    Special("Max", "infinite", ((inf, -inf, 1e30), (1.0, 1.0, -1e30)), ((1.0, 0.0, 1.0), (0.0, 1.0, 0.0))),
    Special("Min", "infinite", ((inf, -inf, 1e30), (1.0, 1.0, -1e30)), ((0.0, 1.0, 0.0), (1.0, 0.0, 1.0))),
    Special("Sum", "infinite", ((inf, nan), (1.0, inf)), ((1.0, 1.0), (1.0, 1.0))),
    Special("Mean", "overflow", ((3e38, inf), (3e38, 1.0)), ((0.5, 0.5), (0.5, 0.5))),
    Special("Clip", "infinite", ((-inf, 0.5, inf), -1.0, 1.0), ((0.0, 1.0, 0.0), 1.0, 1.0)),
    Special("Where", "missing", ((True, False), (inf, nan), (nan, inf)), (None, (1.0, 0.0), (0.0, 1.0))),
    Special("CumSum", "infinite", ((1.0, inf, nan), 0), ((3.0, 2.0, 1.0), None)),
    # Reductions.
    Special("ReduceSum", "infinite", ((inf, nan, 1e30),), ((1.0,) * 3,)),
    Special("ReduceMean", "overflow", ((3e38, 3e38, inf, nan),), ((0.25,) * 4,)),
    Special("ReduceMax", "infinite", ((inf, 1.0, -inf),), ((1.0, 0.0, 0.0),)),
    Special("ReduceMin", "infinite", ((inf, 1.0, -inf),), ((0.0, 0.0, 1.0),)),
    Special("ReduceSumSquare", "overflow", ((1e30, -1e30),), ((2e30, -2e30),)),
    Special("ReduceL1", "overflow", ((3e38, -3e38, inf),), ((1.0, -1.0, 1.0),)),
    Special("ReduceL2", "overflow", ((3e30, 4e30),), ((0.6, 0.8),)),
    Special("ReduceL2", "underflow", ((3e-30, 4e-30),), ((0.6, 0.8),)),
    Special("ReduceLogSum", "overflow", ((3e38, 3e38),), ((1 / 6e38, 1 / 6e38),)),
    Special("ReduceLogSumExp", "overflow", ((1000.0, 1000.0, -1000.0),), ((0.5, 0.5, 0.0),)),
    Special("ReduceLogSumExp", "underflow", ((-1e30, -1e30, -inf),), ((0.5, 0.5, 0.0),)),
    Special("Softmax", "overflow", ((1e30, 1e30, -1e30),), ((0.25, -0.25, 0.0),), (1.0, 0.0, 0.0)),
    Special("Softmax", "settled", ((1000.0, 0.0, -inf),), ((0.0,) * 3,), (1.0, 1.0, 1.0)),
    Special("LogSoftmax", "overflow", ((1e30, 1e30, -1e30),), ((0.5, -0.5, 0.0),), (1.0, 0.0, 0.0)),
    Special("LogSoftmax", "settled", ((1000.0, 0.0, -inf),), ((-1.0, 1.0, 0.0),), (0.0, 1.0, 0.0)),
    Special(
        "SoftmaxCrossEntropyLoss",
        "settled",
        (((1000.0, 0.0, -1000.0), (0.0, 0.0, -inf)), (1, 0)),
        (((1.0, -1.0, 0.0), (-0.5, 0.5, 0.0)), None),
        attributes={"reduction": "sum"},
    ),
    Special(
        "NegativeLogLikelihoodLoss",
        "infinite",
        (((-inf, 0.0), (0.0, -inf)), (0, 0)),
        (((-1.0, 0.0), (-1.0, 0.0)), None),
        attributes={"reduction": "sum"},
    ),
    # Windows.
    Special(
        "MaxPool",
        "infinite",
        ((((-inf, 1.0, -inf, inf),),),),
        ((((0.0, 1.0, 0.0, 1.0),),),),
        attributes={"kernel_shape": [2], "strides": [2]},
    ),
    Special("AveragePool", "overflow", ((((3e38, 3e38),),),), ((((0.5, 0.5),),),), attributes={"kernel_shape": [2]}),
    Special("GlobalAveragePool", "overflow", ((((3e38, 3e38),),),), ((((0.5, 0.5),),),)),
    Special("GlobalMaxPool", "infinite", ((((-inf, 1.0, inf),),),), ((((0.0, 0.0, 1.0),),),)),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Each row of the table (values="special")."""
    for special in SPECIAL:
        yield case(special)


def case(special: Special, dtype: Any = np.float32) -> Case:
    """The operator at the special numbers."""
    inputs = [array if (array := np.array(x)).dtype.kind in "bi" else array.astype(dtype) for x in special.inputs]
    name = "-".join([special.operator, special.what, *map(str, special.attributes.values())])
    made = node_case(
        special.operator, *inputs, domain=special.domain, opset=special.opset, name=name, **special.attributes
    )
    return replace(made, values="special")
