"""Reductions. The axes are an attribute in older versions and an input in newer ones; one kernel takes both."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_axes, check_axis, squares_summed, summed
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Axes = tuple[int, ...] | None


def _lowest(x: np.ndarray) -> Any:
    return False if x.dtype == bool else np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf


def _highest(x: np.ndarray) -> Any:
    return True if x.dtype == bool else np.iinfo(x.dtype).max if x.dtype.kind in "iu" else np.inf


def _sum(x: np.ndarray, axes: Axes, keep: bool) -> Any:
    return summed(x, axes, keep)


def _mean(x: np.ndarray, axes: Axes, keep: bool) -> Any:
    total = _sum(x, axes, keep)
    return total / (x.size / max(total.size, 1))


def _prod(x: np.ndarray, axes: Axes, keep: bool) -> Any:
    return x.prod(axes, dtype=x.dtype, keepdims=keep)


def _max(x: np.ndarray, axes: Axes, keep: bool) -> Any:
    return x.max(axes, keepdims=keep) if x.size else x.max(axes, keepdims=keep, initial=_lowest(x))


def _min(x: np.ndarray, axes: Axes, keep: bool) -> Any:
    return x.min(axes, keepdims=keep) if x.size else x.min(axes, keepdims=keep, initial=_highest(x))


def _l1(x: np.ndarray, axes: Axes, keep: bool) -> Any:
    return _sum(np.abs(x), axes, keep)


def _l2(x: np.ndarray, axes: Axes, keep: bool) -> Any:
    return np.sqrt(_sum_square(x, axes, keep))


def _sum_square(x: np.ndarray, axes: Axes, keep: bool) -> Any:
    return squares_summed(x, axes, keep)


def _log_sum(x: np.ndarray, axes: Axes, keep: bool) -> Any:
    return np.log(_sum(x, axes, keep))


def _log_sum_exp(x: np.ndarray, axes: Axes, keep: bool) -> Any:
    """Log Σ e^(x − m) + m, with m the maximum where that is finite; of integers in double"""
    x = x.astype(np.float64) if x.dtype.kind in "iu" else x
    m = _max(x, axes, True)
    m = np.where(np.isfinite(m), m, 0)
    total = np.log(_sum(np.exp(x - m), axes, True)) + m
    return total if keep else total.squeeze(axes)


_REDUCTIONS: dict[str, Callable[[np.ndarray, Axes, bool], Any]] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceProd": _prod,
    "ReduceMax": _max,
    "ReduceMin": _min,
    "ReduceL1": _l1,
    "ReduceL2": _l2,
    "ReduceSumSquare": _sum_square,
    "ReduceLogSum": _log_sum,
    "ReduceLogSumExp": _log_sum_exp,
}


def _powers_memory(data: np.ndarray, *_: Any, **__: Any) -> None:
    """The absolute values, or the squares where BLAS does not sum them."""
    need(data.nbytes)


_OF_POWERS = ("ReduceL1", "ReduceL2", "ReduceSumSquare")


def _register(op_type: str, reduction: Callable[[np.ndarray, Axes, bool], Any], domain: str = "") -> None:
    memory = _powers_memory if op_type in _OF_POWERS else None

    @kernel(op_type, domain=domain, in_float32=True, fresh=True, abstract=memory)
    def reduce_(
        data: np.ndarray,
        axes_input: np.ndarray | None = None,
        *,
        axes: list[int] | None = None,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> np.ndarray:
        if axes_input is not None and axes_input.ndim != 1:
            given = axes_input.tolist()
            shown, how = (given, "") if axes_input.ndim else (f"{given:g}", f": write [{given:g}]")
            raise ValueError(f"the axes are {shown}; they must be a list{how}")
        over = check_axes((axes if axes_input is None else axes_input.tolist()) or (), data.ndim)
        if not over and noop_with_empty_axes:
            return np.asarray(reduction(data, (), True), data.dtype)
        return np.asarray(reduction(data, over or None, bool(keepdims)), data.dtype)


for _op_type, _reduction in _REDUCTIONS.items():
    _register(_op_type, _reduction)
_register("ReduceSumTraining", _sum, MICROSOFT)


def _register_arg(op_type: str, position: Callable[..., Any]) -> None:
    @kernel(op_type, fresh=True)
    def arg_(data: np.ndarray, *, axis: int, keepdims: int, select_last_index: int = 0) -> np.ndarray:
        """The position of the largest or smallest element along `axis`: the first one, or the last. NaN counts as both."""
        n = data.shape[check_axis(axis, data.ndim)]
        if not n:
            raise ValueError(f"axis {axis} of {list(data.shape)} has no elements to choose from")
        first = position(np.flip(data, axis) if select_last_index else data, axis, keepdims=bool(keepdims))
        return np.asarray(n - 1 - first if select_last_index else first, np.int64)


_register_arg("ArgMax", np.argmax)
_register_arg("ArgMin", np.argmin)


@kernel("CumSum", in_float32=True, fresh=True)
def cumsum(x: np.ndarray, axis: np.ndarray, *, exclusive: int, reverse: int) -> np.ndarray:
    """Running sums along `axis`, of the elements before each one with `exclusive`, from the end with `reverse`."""
    along = check_axis(int(axis.item()), x.ndim)
    turned = (slice(None),) * along + (slice(None, None, -1 if reverse else 1),)
    flipped = x[turned]
    total = _accumulated(np.add, _before(flipped, along, 0) if exclusive else flipped, along)
    return np.asarray(total[turned])


@kernel("CumProd", in_float32=True, fresh=True)
def cumprod(x: np.ndarray, axis: np.ndarray, *, exclusive: int = 0, reverse: int = 0) -> np.ndarray:
    """Running products along `axis`, of the elements before each one with `exclusive`, from the end with `reverse`."""
    along = check_axis(int(axis.item()), x.ndim)
    turned = (slice(None),) * along + (slice(None, None, -1 if reverse else 1),)
    flipped = x[turned]
    total = _accumulated(np.multiply, _before(flipped, along, 1) if exclusive else flipped, along)
    return np.asarray(total[turned])


def _accumulated(merge: np.ufunc, x: np.ndarray, axis: int) -> np.ndarray:
    """`merge.accumulate`, slice by slice where slices are long: NumPy goes through memory along the axis."""
    if x.size < _LONG * x.shape[axis] or axis == x.ndim - 1:
        return np.asarray(merge.accumulate(x, axis, dtype=x.dtype))
    total = x.copy()
    slices = np.moveaxis(total, axis, 0)
    for before, here in pairwise(slices):
        merge(before, here, out=here)
    return total


_LONG = 256  # elements of a slice that take longer than a call


def _before(x: np.ndarray, axis: int, first: int) -> np.ndarray:
    """`x` moved on by one element along the axis, which begins with `first`."""
    moved, front = np.empty_like(x), (slice(None),) * axis
    moved[(*front, slice(0, 1))] = first
    moved[(*front, slice(1, None))] = x[(*front, slice(0, -1))]
    return moved
