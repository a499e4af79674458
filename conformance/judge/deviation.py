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
_STEPS = 32  # so many units of rounding are no deviation in a narrow type either


@dataclass(frozen=True)
class Deviation:
    """A result that an executor computes otherwise, and the reason why its gradient is not at fault, "" if none is known."""

    what: str
    reason: str


def deviation(truth: Truth, backend: str) -> Deviation | None:
    """How an executor computes another function than the model is in float64, far beyond rounding; None where it does not."""
    point, beyond = truth.point, max(_DEVIATES, _STEPS * 2.0 ** (1 - truth.bits))
    try:
        got = get_backend(backend).prepare(point.model).run(point.feeds)
    except BackendError:
        return None
    for name, expected in point.forward.run(point.wide, list(got)).items():
        if not isinstance(expected, np.ndarray) or expected.dtype.kind != "f" or got[name].shape != expected.shape:
            continue
        result = got[name].astype(np.float64)
        with np.errstate(invalid="ignore"):
            error = np.where(result == expected, 0.0, np.abs(result - expected))
        sizes = np.abs(expected[np.isfinite(expected)])
        small = np.sqrt(limits(got[name].dtype)[1])
        lost = np.isfinite(expected) & (
            np.isinf(result) | ((result == 0) & (expected != 0) & (np.abs(expected) < small))
        )
        if sizes.size and (lost.any() or not np.max(error) <= beyond * np.max(sizes)):
            error = np.where(lost, np.inf, error)
            worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
            place = tuple(map(int, worst))
            what = f"element {place} of {name!r} is {got[name][worst]:.6g} on {backend}, and {expected[worst]:.6g} in float64"
            return Deviation(what, _out_of_range(point.model) if lost.any() else _known_faults(point.model, backend))
    return None


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
