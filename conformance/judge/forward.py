"""The check of an executor on the model itself. If it is wrong there, a wrong gradient is not the builder's fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.problems.feeds import widened
from refgrad.conformance.problems.point import coarsest, in_float64
from refgrad.conformance.problems.problem import Problem
from refgrad.errors import RefgradError
from refgrad.protos.traverse import every_node
from refgrad.tables.randomness import may_draw

_LEAST = 1e-3  # allowed error, relative to the largest element of a result
_STEPS = 32  # allowed error in units of rounding, if larger: for narrow types
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_NARROW = 0.25  # as _LEAST, for floats of 8 bits


def forward_fault(problem: Problem, got: Mapping[str, Any]) -> str:
    """The first error in an executor's results of the model itself, or "".

    They are right if they agree, except for rounding, with the interpreter in the model's own types or in float64.

    :param got: the results by output.
    """
    model, feeds = problem.model, dict(problem.feeds)
    if any(map(may_draw, every_node(model))):
        return ""  # no two executors draw the same numbers
    allowed = max(_LEAST, _STEPS * coarsest(model))
    note = ""
    for expected in _expected(model, feeds):
        note = next(filter(None, (_difference(name, got[name], expected[name], allowed) for name in got)), "")
        if not note:
            return ""
    return note


def _expected(model: ModelProto, feeds: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The results of the interpreter, in float64 and in the model's own types."""
    for prepare, fed in ((in_float64, widened(feeds)), (NumpyBackend().prepare, feeds)):
        try:
            yield prepare(model).run(fed)
        except RefgradError:
            continue


def _difference(name: str, got: Any, expected: Any, allowed: float) -> str:
    """The difference from the expected result, or "" if it is within rounding or not numeric."""
    if not isinstance(expected, np.ndarray) or not isinstance(got, np.ndarray):
        return ""
    if got.shape != expected.shape:
        return f"{name!r} has the shape {got.shape} instead of {expected.shape}"
    if not expected.size or expected.dtype.kind in "OUSMmc" or got.dtype.kind in "OUSMmc":
        return ""
    result, wanted = got.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.asarray(np.abs(result - wanted))
        error[(result == wanted) | (np.isnan(result) & np.isnan(wanted))] = 0.0
    error[np.isnan(error)] = np.inf
    finite = np.abs(wanted[np.isfinite(wanted)])
    most = _allowed(got.dtype.name, allowed, float(np.max(finite, initial=0.0)))
    if np.max(error) <= most:
        return ""
    worst = tuple(map(int, np.unravel_index(int(np.argmax(error)), error.shape)))
    return f"element {worst} of {name!r} is {result[worst]:.6g} instead of {wanted[worst]:.6g}"


def _allowed(dtype: str, relative: float, largest: float) -> float:
    """How far an element of a result may be off."""
    if dtype in _FLOATS:
        return relative * largest
    if dtype.startswith("float"):  # of 8 bits or fewer
        return _NARROW * largest
    return (
        0.0 if dtype in ("bool", "int32", "int64", "uint32", "uint64") else 1.0
    )  # small integers may be rounded to a neighbour
