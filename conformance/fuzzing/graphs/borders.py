"""How far a node is from where its operator has no derivative, or jumps: there float32 may decide otherwise than float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from refgrad.conformance.oracles.analytic import windows


def distance(node: Any, inputs: Sequence[Any]) -> float:
    """The smallest distance of any element of `node`, one of onnx.reference; infinite where the operator is smooth."""
    found = _BORDERS.get(node.op_type)
    if found is None or not any(getattr(x, "dtype", None) == np.float64 and x.size for x in inputs):
        return math.inf
    apart = np.asarray(found(node, *inputs))
    return float(np.min(apart)) if apart.size else math.inf


def _from(*borders: float) -> Callable[..., Any]:
    def apart(node: Any, x: np.ndarray, *rest: Any) -> Any:
        return np.min([np.abs(x - border) for border in borders], axis=0)

    return apart


def _by_attribute(name: str, *factors: float) -> Callable[..., Any]:
    def apart(node: Any, x: np.ndarray, *rest: Any) -> Any:
        return np.min([np.abs(x - factor * getattr(node, name)) for factor in factors], axis=0)

    return apart


def _clip(node: Any, x: np.ndarray, low: Any = None, high: Any = None) -> Any:
    low = getattr(node, "min", None) if low is None else low
    high = getattr(node, "max", None) if high is None else high
    bounds = [bound for bound in (low, high) if bound is not None]
    return np.min([np.abs(x - bound) for bound in bounds], axis=0) if bounds else math.inf


def _hard_sigmoid(node: Any, x: np.ndarray) -> Any:
    y = node.alpha * x + node.beta
    return np.minimum(np.abs(y), np.abs(y - 1))


def _compared(node: Any, a: np.ndarray, b: np.ndarray) -> Any:
    return np.abs(a - b) if a.dtype == np.float64 else math.inf


def _rounded(node: Any, x: np.ndarray) -> Any:
    return np.abs(x - np.round(x))


def _halves(node: Any, x: np.ndarray) -> Any:
    return np.abs(x - np.floor(x) - 0.5)


def _modulo(node: Any, x: np.ndarray, y: np.ndarray) -> Any:
    quotient = x / y
    return np.abs(quotient - np.round(quotient))


def _gap(x: np.ndarray, sign: int = 1) -> Any:
    """Between the largest and the second along the last axis."""
    if x.shape[-1] < 2 or not x.size:
        return math.inf
    ordered = np.sort(sign * x, axis=-1)
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(ordered[..., -1] - ordered[..., -2], nan=0.0)


def _extreme(sign: int) -> Callable[..., Any]:
    def apart(node: Any, *inputs: np.ndarray) -> Any:
        return _gap(np.stack(np.broadcast_arrays(*inputs), axis=-1), sign)

    return apart


def _reduced(sign: int) -> Callable[..., Any]:
    def apart(node: Any, x: np.ndarray, axes: Any = None) -> Any:
        axes = getattr(node, "axes", None) if axes is None else axes
        if axes is None or np.size(axes) == 0:
            if getattr(node, "noop_with_empty_axes", 0):
                return math.inf
            return _gap(x.reshape(-1), sign)
        chosen = sorted(int(axis) % x.ndim for axis in np.reshape(axes, -1))
        kept = [axis for axis in range(x.ndim) if axis not in chosen]
        moved = np.transpose(x, (*kept, *chosen))
        return _gap(moved.reshape(*moved.shape[: len(kept)], -1), sign) if x.size else math.inf

    return apart


def _ordered(node: Any, x: np.ndarray, *rest: Any) -> Any:
    axis = getattr(node, "axis", -1)
    flat = x.reshape(-1) if axis is None else np.moveaxis(x, axis, -1) if x.ndim else x.reshape(1)
    return np.diff(np.sort(flat, axis=-1), axis=-1)


def _best(sign: int) -> Callable[..., Any]:
    def apart(node: Any, x: np.ndarray, *rest: Any) -> Any:
        return _gap(np.moveaxis(x, getattr(node, "axis", 0), -1), sign) if x.ndim else math.inf

    return apart


def _pooled(node: Any, x: np.ndarray) -> Any:
    seen = windows(node, x, -1e300)
    return _gap(seen.reshape(*seen.shape[: x.ndim], -1))


def _spatial(node: Any, x: np.ndarray) -> Any:
    return _gap(x.reshape(*x.shape[:2], -1))


def _odd(node: Any, x: np.ndarray, *rest: Any) -> Any:
    return np.abs(x) if node.p % 2 else math.inf


_ZERO = _from(0.0)
_BORDERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        [
            "Relu",
            "LeakyRelu",
            "PRelu",
            "Elu",
            "Celu",
            "Selu",
            "Abs",
            "Sign",
            "Softsign",
            "Sqrt",
            "ReduceL1",
            "Log",
            "Reciprocal",
        ],
        _ZERO,
    ),
    "ThresholdedRelu": _by_attribute("alpha", 1),
    "Shrink": _by_attribute("lambd", 1, -1),
    "HardSwish": _from(3, -3),
    "HardSigmoid": _hard_sigmoid,
    "Clip": _clip,
    **dict.fromkeys(["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"], _compared),
    **dict.fromkeys(["Floor", "Ceil"], _rounded),
    "Round": _halves,
    "Mod": _modulo,
    "Max": _extreme(1),
    "Min": _extreme(-1),
    "ReduceMax": _reduced(1),
    "ReduceMin": _reduced(-1),
    "ArgMax": _best(1),
    "ArgMin": _best(-1),
    "Hardmax": _best(1),
    "TopK": _ordered,
    "Unique": _ordered,
    "MaxPool": _pooled,
    "GlobalMaxPool": _spatial,
    "LpPool": _odd,
    "GlobalLpPool": _odd,
    "LpNormalization": _odd,
}
