"""Every operator at its kinks, listed in `refgrad.tables.kinks`, and right beside them, where it has a derivative."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import Case, node_case
from refgrad.tables.kinks import KINKS, KinkRow

BESIDE = 0.125
INWARD = ("Asin", "Acos", "Atanh")  # defined only between the kinks
ABOVE = ("Sqrt", "Log", "Acosh", "ReduceLogSum")  # defined only above the kink
SINGLE = {"Resize": 2}  # the scales are float32, whatever the type of the others
STILL = {"MaxRoiPool": 1}  # the input that is not moved: the rois contain the index of an image
# Kinks without a side: x⁰·⁵ needs x ≥ 0; for x < 0, xʸ has no derivative with respect to y; −∞ has no neighbours.
ONLY_AT = (("Pow", "x = 0"), ("Pow", "x < 0, y whole"), ("ReduceLogSumExp", "every element is −∞"))


def cases() -> Iterator[Case]:
    """Each row of the table (values="kink"), and the same a little below and above, each element by its own step."""
    for kink in KINKS:
        yield at(kink)
        if (kink.operator, kink.where) in ONLY_AT:
            continue
        if kink.operator not in ABOVE:
            yield _beside(kink, "below", -1)
        if kink.operator not in INWARD:
            yield _beside(kink, "above", 1)


def at(kink: KinkRow, dtype: Any = np.float32) -> Case:
    """The operator at its kink."""
    inputs = [_array(x, np.float32 if SINGLE.get(kink.operator) == k else dtype) for k, x in enumerate(kink.inputs)]
    return _case(kink, inputs, "at").changed(values="kink")


def _beside(kink: KinkRow, side: str, sign: int) -> Case:
    """The floats moved by different steps, so that those equal at the kink differ; where required, they stay in [−1, 1]."""
    rng = np.random.default_rng(0)
    inputs = []
    for k, x in enumerate(_array(x, np.float32) for x in kink.inputs):
        step = np.float32(sign * BESIDE) * rng.uniform(0.5, 1, x.shape).astype(np.float32)
        moved = x * (1 + step) if kink.operator in INWARD else x + step
        still = x.dtype.kind == "i" or STILL.get(kink.operator) == k
        inputs.append(x if still else moved.astype(x.dtype))
    return _case(kink, inputs, side)


def _array(x: Any, dtype: Any) -> np.ndarray:
    array = np.array(x)
    return array if array.dtype.kind == "i" else array.astype(dtype)


def _case(kink: KinkRow, inputs: list[np.ndarray], side: str) -> Case:
    opset = 18 if "reduction" in kink.attributes else 17
    outputs = 2 if kink.operator == "TopK" else 1
    name = f"{kink.operator}-{side}-{kink.where.replace(' = ', '=').replace(' ', '_')}"
    case = node_case(kink.operator, *inputs, opset=opset, outputs=outputs, name=name, **kink.attributes)
    if kink.operator not in STILL:
        return case
    return case.changed(wrt=tuple(name for k, name in enumerate(case.feeds) if k != STILL[kink.operator]))
