"""The values of a model in complex numbers, and how close they come to where its operators have no derivative."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import FunctionProto, ModelProto

from refgrad.conformance.oracles.analytic import FORWARDS, KNOWN, STEADY, KinkError, NotAnalyticError, call, measured
from refgrad.conformance.oracles.evaluator import Evaluator, initializers
from refgrad.conformance.oracles.widening import DOUBLE
from refgrad.errors import BackendError
from refgrad.protos.traverse import versions_of

UNKNOWN = (BackendError, KinkError, NotAnalyticError)  # why there is no value, or no derivative
_OF_ALL = FORWARDS.keys() | STEADY  # what does not move has a forward and borders too
_MOST_STEPS = 64


class Forward:
    """Computes nodes, all by the forwards of the complex step, whether they move or not.

    `margin` is the smallest distance of any value so far to where an operator has no derivative, or jumps.
    """

    def __init__(self, versions: Mapping[str, int], functions: Sequence[FunctionProto] = ()) -> None:
        self.margin = math.inf
        self._evaluator = Evaluator(versions, functions, self._call, KNOWN, _MOST_STEPS)
        self.node, self.compute = self._evaluator.node, self._evaluator.compute

    def _call(self, node: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        _refuse_wrong(node, inputs)
        still = node.op_type in _OF_ALL and not any(map(_is_complex, inputs))
        with measured() as distances:
            results = call(node, [_complex(x) for x in inputs] if still else inputs)
        self.margin = min(self.margin, *distances, math.inf)
        return [real(result) for result in results] if still else results


def _refuse_wrong(node: Any, inputs: Sequence[Any]) -> None:
    """Refuse what onnx.reference computes although the specification does not allow it, or computes otherwise."""
    if node.op_type == "GridSample" and "cubic" in node.mode and node.padding_mode != "zeros":
        raise BackendError("onnx.reference pads GridSample by other elements.")
    if node.op_type == "AveragePool" and "SAME" in node.auto_pad and {*(getattr(node, "dilations", None) or ())} - {1}:
        raise BackendError("onnx.reference pads a dilated AveragePool as one that is not.")
    if node.op_type == "LayerNormalization" and np.broadcast_shapes(*map(np.shape, inputs[:2])) != inputs[0].shape:
        raise BackendError("LayerNormalization has a scale that is larger than its input.")
    if node.op_type == "Gemm" and any(np.ndim(x) != 2 for x in inputs[:2]):
        raise BackendError("Gemm has an operand that is not a matrix.")
    if (
        node.op_type.startswith("Reduce")
        and not np.ndim(inputs[0])
        and any(np.size(x) for x in inputs[1:] if x is not None)
    ):
        raise BackendError(f"{node.op_type} has a scalar and an axis.")


def _is_complex(x: Any) -> bool:
    return any(map(_is_complex, x)) if isinstance(x, list) else getattr(x, "dtype", None) == np.complex128


def _complex(x: Any) -> Any:
    return x.astype(np.complex128) if getattr(x, "dtype", None) == np.float64 else x


def real(x: Any) -> Any:
    """The real part of a value, of each element of a sequence."""
    return [real(item) for item in x] if isinstance(x, list) else x.real if _is_complex(x) else x


def wide(value: Any) -> Any:
    """A value with every narrower float a double."""
    return DOUBLE.array(value)


def tangent(
    model: ModelProto, at: Mapping[str, Any], direction: Mapping[str, np.ndarray], step: float
) -> tuple[dict[str, Any], dict[str, np.ndarray], float]:
    """The values of a model at a point, the derivatives of its outputs along a direction, and the margin.

    :raises BackendError: the model cannot be computed.
    :raises NotAnalyticError: an operator on the way has no complex forward.
    :raises KinkError: there is no derivative.
    """
    forward = Forward(versions_of(model), model.functions)
    known = {**initializers(model.graph), **wide_feeds(at)}
    for name, u in direction.items():
        moved = np.empty(u.shape, np.complex128)
        moved.real, moved.imag = known[name], step * u
        known[name] = moved
    with np.errstate(all="ignore"):
        values = forward.compute(model.graph.node, known)
    results = {value.name: values[value.name] for value in model.graph.output}
    moves = {name: np.imag(y) / step for name, y in results.items() if not isinstance(y, list) and y.dtype.kind in "cf"}
    return {name: real(y) for name, y in results.items()}, moves, forward.margin


def wide_feeds(feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Feeds with every float a double."""
    return {name: wide(value) for name, value in feeds.items()}
