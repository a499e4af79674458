"""Does an executor compute the model itself, or another function? Then it has the gradient of the other function."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from refgrad.backends import get_backend
from refgrad.conformance.known.bugs import known_bugs
from refgrad.conformance.known.bugs.bug import ORT
from refgrad.conformance.problems.point import Truth
from refgrad.conformance.problems.rounding import limits
from refgrad.errors import BackendError, abridged
from refgrad.protos.traverse import every_node

_DEVIATES = 0.02  # relative to the largest element of a result: by less than that two executors round differently
_CARRIED = 8  # times the relative error of a result: the error that its gradient may have of it
_STEPS = 32  # so many units of rounding are no deviation in a narrow type either


@dataclass(frozen=True)
class Deviation:
    """A result that an executor computes otherwise, and the reason why its gradient is not at fault, "" if none is known."""

    what: str
    reason: str


def deviation(truth: Truth, backend: str, error: float = 0.0) -> Deviation | None:
    """How an executor computes another function than the model is in float64, far beyond rounding; None where it does not.

    :param error: the largest relative error of a gradient. If an operator of the model has a known fault, a smaller deviation
        counts too: it is of this size, and far beyond the rounding of the interpreter in the model's own types.
    """
    point, beyond = truth.point, max(_DEVIATES, _STEPS * 2.0 ** (1 - truth.bits))
    try:
        got = get_backend(backend).prepare(point.model).run(point.feeds)
    except BackendError:
        return None
    imprecise = None
    for name, expected in point.forward.run(point.wide, list(got)).items():
        if not isinstance(expected, np.ndarray) or expected.dtype.kind != "f" or got[name].shape != expected.shape:
            continue
        off = _off(got[name], expected)
        sizes = np.abs(expected[np.isfinite(expected)])
        small = np.sqrt(limits(got[name].dtype)[1])
        lost = np.isfinite(expected) & (
            np.isinf(got[name]) | ((got[name] == 0) & (expected != 0) & (np.abs(expected) < small))
        )
        if sizes.size and (lost.any() or not np.max(off) <= beyond * np.max(sizes)):
            reason = _out_of_range(point.model) if lost.any() else _known_faults(point.model, backend)
            return Deviation(_worst(name, got[name], expected, np.where(lost, np.inf, off), backend), reason)
        if sizes.size and np.max(off) >= max(error / _CARRIED, _STEPS * 2.0**-truth.bits) * np.max(sizes):
            imprecise = imprecise or (name, got[name], expected, off)
    if imprecise is None or not error or not (reason := _known_faults(point.model, backend)):
        return None
    name, result, expected, off = imprecise
    rounded = get_backend("numpy").prepare(point.model).run(point.feeds, [name])[name]
    if _CARRIED * np.max(_off(rounded, expected)) > np.max(off):
        return None
    return Deviation(_worst(name, result, expected, off, backend), reason)


def _off(result: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The error of each element of a result."""
    wide = result.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.where(wide == expected, 0.0, np.abs(wide - expected))


def _worst(name: str, result: np.ndarray, expected: np.ndarray, off: np.ndarray, backend: str) -> str:
    """The element of a result that is off by the most, in words."""
    worst = np.unravel_index(np.argmax(np.where(np.isnan(off), np.inf, off)), off.shape)
    place = tuple(map(int, worst))
    return f"element {place} of {name!r} is {result[worst]:.6g} on {backend}, and {expected[worst]:.6g} in float64"


def _out_of_range(model: ModelProto) -> str:
    operators = sorted({node.op_type for node in every_node(model)})
    return f"a result within {abridged(operators)} leaves the range of its type"


def _known_faults(model: ModelProto, backend: str) -> str:
    """The known faults (docs/findings.md) of an executor in the operators of `model`, in words; "" if there are none."""
    operators = {node.op_type for node in every_node(model)}
    system = ORT if backend.startswith("ort-") else backend
    known = [
        f"{bug.operator} {bug.fault}" for bug in known_bugs() if bug.system == system and bug.operator in operators
    ]
    return f"known of it: {'; '.join(dict.fromkeys(known))}" if known else ""
