"""ONNX Runtime's operators that move elements, and those that make tensors of a shape."""

from __future__ import annotations

import math

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_axis
from refgrad.extend import Arguments, kernel_of_body
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("SampleOp", domain=MICROSOFT, fresh=True)
def sample_op(args: Arguments) -> Array:
    return np.array(args.X)


@kernel_of_body("ExpandDims", domain=MICROSOFT)
def expand_dims(args: Arguments) -> Array:
    """X with an axis of one element at `axis`, counted in the result"""
    place = check_axis(int(_number("axis", args.axis)), args.X.ndim + 1)
    return np.expand_dims(args.X, place)


@kernel_of_body("Pad", domain=MICROSOFT, fresh=True)
def pad(args: Arguments) -> Array:
    """Negative pads cut; of the others each new place on an axis is one of the data, or outside"""
    rank = args.data.ndim
    if args.pads.shape not in ((2 * rank,), (1, 2 * rank)):
        raise ValueError(f"pads has the shape {list(args.pads.shape)}; {rank} axes need {2 * rank} numbers")
    if args.value is not None:
        _number("value", args.value)
    begin, end = args.pads.reshape(2, rank).tolist()
    if any(n + min(b, 0) + min(e, 0) < 0 or n + b + e < 0 for n, b, e in zip(args.data.shape, begin, end, strict=True)):
        raise ValueError(f"pads {args.pads.tolist()} cut more of the data {list(args.data.shape)} than there is")
    rows = [
        np.arange(max(-b, 0), n - max(-e, 0))[_places(n + min(b, 0) + min(e, 0), max(b, 0), max(e, 0), args.mode)]
        for n, b, e in zip(args.data.shape, begin, end, strict=True)
    ]
    if args.mode != "constant":
        return np.asarray(args.data[np.ix_(*rows)] if rank else args.data.copy())
    filled = np.full([n + b + e for n, b, e in zip(args.data.shape, begin, end, strict=True)], 0, args.data.dtype)
    filled[...] = 0 if args.value is None else args.value.reshape(())
    inside = tuple(slice(max(b, 0), max(b, 0) + len(row)) for b, row in zip(begin, rows, strict=True))
    filled[inside] = args.data[np.ix_(*rows)] if rank else args.data
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
    raise AssertionError(mode)  # the check knows the others


@kernel_of_body("Range", domain=MICROSOFT, fresh=True)
def range_(args: Arguments) -> Array:
    """As many numbers as there are steps before limit"""
    first, last = _number("start", args.start), _number("limit", args.limit)
    step = 1 if args.delta is None else _number("delta", args.delta)
    if step == 0:
        raise ValueError("delta is 0; the step must not be 0")
    return (first + np.arange(max(math.ceil((last - first) / step), 0)) * step).astype(args.start.dtype)


def _number(what: str, value: Array) -> int | float:
    if value.shape not in ((), (1,)):
        raise ValueError(f"{what} has the shape {list(value.shape)}; it is one number")
    return value.item()  # type: ignore[no-any-return]


@kernel_of_body("UnfoldTensor", domain=MICROSOFT, fresh=True)
def unfold_tensor(args: Arguments) -> np.ndarray:
    axis = args.dim % args.input.ndim
    windows = np.lib.stride_tricks.sliding_window_view(args.input, args.size, axis)
    return np.array(windows[(slice(None),) * axis + (slice(None, None, args.step),)])
