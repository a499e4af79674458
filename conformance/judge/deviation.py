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
_MORE = 8  # times the rounding error of the interpreter: what is off by more is imprecise
_STEPS = 32  # so many units of rounding are no deviation in a narrow type either


@dataclass(frozen=True)
class Deviation:
    """A result that an executor computes otherwise, and the reason why its gradient is not at fault, "" if none is known."""

    what: str
    reason: str


def deviation(truth: Truth, backend: str, error: float = 0.0, excess: float = np.inf) -> Deviation | None:
    """How an executor computes another function than the model is in float64, far beyond rounding; None where it does not.

    If an operator of the model has a known fault, a smaller deviation counts too, if it is far beyond the rounding of the
    interpreter in the model's own types, and either of the size of the error, or the error hardly beyond rounding.

    :param error: the largest relative error of a gradient. :param excess: how many times the allowed error it is at most.
    """
    point, beyond = truth.point, max(_DEVIATES, _STEPS * 2.0 ** (1 - truth.bits))
    try:
        got = get_backend(backend).prepare(point.model).run(point.feeds)
    except BackendError:
        return None
    results = {}
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
        results[name] = expected
    if not error or not (reason := _known_faults(point.model, backend)):
        return None
    rounded = get_backend("numpy").prepare(point.model).run(point.feeds, list(results))
    for name, expected in results.items():
        here, usual = (_relative(result[name], expected) for result in (got, rounded))
        least = max(error / _CARRIED, _STEPS * 2.0**-truth.bits)
        if any(h > _MORE * u and (h >= least or excess <= _MORE) for h, u in zip(here, usual, strict=True)):
            return Deviation(_worst(name, got[name], expected, _off(got[name], expected), backend), reason)
    return None


def _relative(result: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """The largest error of a result relative to its largest element, and the relative error that a tenth of its elements reach.

    Small elements beside large ones have a part in the second number alone: scores of classes beside coordinates.
    """
    off, size = _off(result, expected), np.abs(expected)
    known = np.isfinite(off) & (size > 0) & np.isfinite(size)
    if not known.any():
        return 0.0, 0.0
    return float(np.max(off[known]) / np.max(size[known])), float(np.quantile(off[known] / size[known], 0.9))


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
