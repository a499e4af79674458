"""ONNX Runtime's operators that move elements, and those that make tensors of a shape."""

from __future__ import annotations

import math

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_axis
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("SampleOp", domain=MICROSOFT, fresh=True)
def sample_op(X: Array) -> Array:
    return X.copy()


@kernel("ExpandDims", domain=MICROSOFT)
def expand_dims(X: Array, axis: Array) -> Array:
    """X with an axis of one element at `axis`, counted in the result"""
    place = check_axis(int(_number("axis", axis)), X.ndim + 1)
    return X.reshape(*X.shape[:place], 1, *X.shape[place:])


@kernel("Pad", domain=MICROSOFT, fresh=True)
def pad(data: Array, pads: Array, value: Array | None = None, *, mode: str = "constant") -> Array:
    """Negative pads cut; of the others each new place on an axis is one of the data, or outside"""
    rank = data.ndim
    if pads.shape not in ((2 * rank,), (1, 2 * rank)):
        raise ValueError(f"pads has the shape {list(pads.shape)}; {rank} axes need {2 * rank} numbers")
    if value is not None:
        _number("value", value)
    begin, end = pads.reshape(2, rank).tolist()
    if any(n + min(b, 0) + min(e, 0) < 0 or n + b + e < 0 for n, b, e in zip(data.shape, begin, end, strict=True)):
        raise ValueError(f"pads {pads.tolist()} cut more of the data {list(data.shape)} than there is")
    rows = [
        np.arange(max(-b, 0), n - max(-e, 0))[_places(n + min(b, 0) + min(e, 0), max(b, 0), max(e, 0), mode)]
        for n, b, e in zip(data.shape, begin, end, strict=True)
    ]
    if mode != "constant":
        return data[np.ix_(*rows)] if rank else data.copy()
    filled = np.full([n + b + e for n, b, e in zip(data.shape, begin, end, strict=True)], 0, data.dtype)
    filled[...] = 0 if value is None else value.reshape(())
    inside = tuple(slice(max(b, 0), max(b, 0) + len(row)) for b, row in zip(begin, rows, strict=True))
    filled[inside] = data[np.ix_(*rows)] if rank else data
    return filled


def _places(size: int, before: int, behind: int, mode: str) -> Array:
    """The element that fills each place of an axis padded by `before` and `behind`; with "constant", the elements alone."""
    places = np.arange(-before, size + behind)
    match mode:
        case "constant":
            return np.arange(size)
        case "edge":
            return places.clip(0, max(size - 1, 0))
        case "wrap":
            return places % max(size, 1)
        case "reflect":
            if max(before, behind) >= max(size, 1):
                raise ValueError(
                    f"mode='reflect' pads {size} elements by at most {max(size - 1, 0)}, not {before} and {behind}"
                )
            turn = max(size - 1, 1)
            return np.asarray(turn - abs(places % (2 * turn) - turn)) if size > 1 else places * 0
    raise ValueError(f"mode={mode!r} is not known; there are 'constant', 'edge', 'reflect' and 'wrap'")


@kernel("Range", domain=MICROSOFT, fresh=True)
def range_(start: Array, limit: Array, delta: Array | None = None) -> Array:
    """As many numbers as there are steps before limit"""
    first, last = _number("start", start), _number("limit", limit)
    step = 1 if delta is None else _number("delta", delta)
    if step == 0:
        raise ValueError("delta is 0; the step must not be 0")
    return (first + np.arange(max(math.ceil((last - first) / step), 0)) * step).astype(start.dtype)


def _number(what: str, value: Array) -> int | float:
    if value.shape not in ((), (1,)):
        raise ValueError(f"{what} has the shape {list(value.shape)}; it is one number")
    return value.item()  # type: ignore[no-any-return]


@kernel("UnfoldTensor", domain=MICROSOFT, fresh=True)
def unfold_tensor(input: np.ndarray, *, dim: int = -1, size: int, step: int = 1) -> np.ndarray:
    axis = check_axis(dim, input.ndim)
    if step < 1:
        raise ValueError(f"step={step} is not 1 or more")
    if not 1 <= size <= input.shape[axis]:
        raise ValueError(f"size={size} is not from 1 to {input.shape[axis]}, the size of axis {axis}")
    windows = np.lib.stride_tricks.sliding_window_view(input, size, axis)
    return windows[(slice(None),) * axis + (slice(None, None, step),)].copy()
