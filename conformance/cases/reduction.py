"""Cases of the reductions."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.arithmetic import positive
from refgrad.conformance.cases.shape import NEWEST, ints
from refgrad.conformance.cases.special import Special

REDUCTIONS = (
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceSumSquare",
    "ReduceLogSum",
    "ReduceLogSumExp",
)
AXES = (None, (0, -1), ())


SPECIAL = (
    Special("ReduceSum", "infinite", ((inf, nan, 1e30),), ((1.0,) * 3,)),
    Special("ReduceMean", "overflow", ((3e38, 3e38, inf, nan),), ((0.25,) * 4,)),
    Special("ReduceMax", "infinite", ((inf, 1.0, -inf),), ((1.0, 0.0, 0.0),)),
    Special("ReduceMin", "infinite", ((inf, 1.0, -inf),), ((0.0, 0.0, 1.0),)),
    Special("ReduceSumSquare", "overflow", ((1e30, -1e30),), ((2e30, -2e30),)),
    Special("ReduceProd", "zero", ((0.0, 2.0, 3.0),), ((6.0, 0.0, 0.0),)),
    Special("ReduceProd", "overflow", ((1e30, 1e20),), ((1e20, 1e30),)),
    Special("ReduceProd", "underflow", ((1e-30, 1e-20),), ((1e-20, 1e-30),)),
    Special("ReduceProd", "overflow-beside-zero", ((1e30, 1e30, 3.0, 0.0),), ((0.0, 0.0, 0.0, inf),), 1e-20),
    Special("ReduceL1", "overflow", ((3e38, -3e38, inf),), ((1.0, -1.0, 1.0),)),
    Special("ReduceL2", "overflow", ((3e30, 4e30),), ((0.6, 0.8),)),
    Special("ReduceL2", "underflow", ((3e-30, 4e-30),), ((0.6, 0.8),)),
    Special("ReduceLogSum", "overflow", ((3e38, 3e38),), ((1 / 6e38, 1 / 6e38),)),
    Special("ReduceLogSumExp", "overflow", ((1000.0, 1000.0, -1000.0),), ((0.5, 0.5, 0.0),)),
    Special("ReduceLogSumExp", "underflow", ((-1e30, -1e30, -inf),), ((0.5, 0.5, 0.0),)),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Axes absent, empty, negative, as an attribute, constant and fed; with and without keepdims; empty tensors and scalars."""
    for shapes in SHAPES:
        for op_type in REDUCTIONS:
            for keepdims in (0, 1):
                yield from _axes(op_type, keepdims, shapes)
            yield node_case(op_type, positive(), opset=NEWEST, shapes=shapes)
            yield node_case(op_type, positive(2, 0), ints(0), opset=NEWEST, constant=["axes"], shapes=shapes)
        for zeros in ((0.0, 2.0, 3.0), (0.0, 0.0, 3.0), (0.0, 0.0, 0.0)):
            x = np.array([zeros, (1.0, -2.0, 3.0)], np.float32)
            title = f"ReduceProd-{zeros}-{shapes}"
            yield node_case("ReduceProd", x, ints(1), opset=NEWEST, shapes=shapes, name=title)
            yield node_case("ReduceProd", x, opset=17, axes=[-1], shapes=shapes, name=f"{title}-attribute")


def _axes(op_type: str, keepdims: int, shapes: str) -> Iterator[Case]:
    x = np.random.default_rng(0).permutation(np.linspace(0.5, 2, 12, dtype=np.float32)).reshape(2, 3, 2)  # no near ties
    for axes in AXES:
        if op_type != "ReduceSum" and axes != ():
            attribute: dict[str, Any] = {} if axes is None else {"axes": list(axes)}
            yield node_case(op_type, x, opset=16, keepdims=keepdims, shapes=shapes, **attribute)
        for noop in (0, 1) if not axes else (0,):
            for constant in ((), ("axes",)) if axes is not None else ((),):
                where = f"{axes}-keepdims={keepdims}-noop={noop}-{'constant' if constant else 'fed'}-{shapes}"
                yield node_case(
                    op_type,
                    x,
                    None if axes is None else np.array(axes, np.int64),
                    opset=NEWEST,
                    keepdims=keepdims,
                    noop_with_empty_axes=noop,
                    constant=constant,
                    shapes=shapes,
                    name=f"{op_type}-{where}",
                )
