"""The usual causes of a wrong gradient that its numbers tell: a factor, a sign, other axes, another parameter's, zeros.

Each is a change that makes the right gradient the wrong one. It is named if it leaves next to nothing of the error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from refgrad.errors import counted

_LEFT = 2e-2  # of the error, relative: a change that leaves more explains nothing
_WHOLE = 1e-4  # how far a factor is from a whole number that counts as one
_MOST_AXES = 5  # of a tensor whose axes are exchanged
_PARTS = (2, 3, 4)  # into which rows are cut: directions, q, k and v, gates
_MOST_STEPS = 32  # whose gradients are added up by mistake
_MOST_FACTOR = 2.0**32  # of a scale of the loss


def cause_of(
    got: np.ndarray, due: np.ndarray, name: str, others: Mapping[str, np.ndarray], shapes: Collection[tuple[int, ...]]
) -> str:
    """The change that makes `got` of `due`, in words; "" if none is known.

    :param others: the right gradients by name, of which `got` may be one.
    :param shapes: the shapes of inputs and outputs: a factor may be the size of an axis.
    """
    wide, right = got.astype(np.float64), due.astype(np.float64)
    if not wide.size or not np.isfinite(wide).all() or not np.isfinite(right).all():
        return ""
    if not wide.any():
        is_frozen = right.any() and wide.shape == right.shape
        return "it is all zeros, as for a frozen or detached parameter" if is_frozen else ""
    if not right.any():
        return ""
    return next(filter(None, _tried(wide, right, name, others, shapes)), "")


def _tried(
    got: np.ndarray, due: np.ndarray, name: str, others: Mapping[str, np.ndarray], shapes: Collection[tuple[int, ...]]
) -> Iterator[str]:
    """The causes that explain it, simple ones first, each with a factor where it needs one."""
    if got.shape == due.shape and (factor := _factor(got, due, got - due)) is not None:
        yield _of_factor(factor, shapes)
    error = got - due if got.shape == due.shape else got
    for text, changed in _moved(got, due):
        if (factor := _factor(got, changed, error)) is not None:
            yield text + _times(factor, shapes)
    for other, value in others.items():
        if other != name and value.shape == got.shape and (factor := _factor(got, value, error)) is not None:
            yield f"it is the gradient of {other!r}{_times(factor, shapes)}"
    for other, value in others.items():
        for text, changed in _turned(got, value) if other != name else ():
            if (factor := _factor(got, changed, error)) is not None:
                yield f"it is the gradient of {other!r}, and {text}{_times(factor, shapes)}"
    if got.shape == due.shape and got.ndim > 1 and len(got) > 1:
        rows, right = got.reshape(len(got), -1), due.reshape(len(due), -1)
        factors = (rows * right).sum(1, keepdims=True) / np.maximum((right * right).sum(1, keepdims=True), 1e-300)
        if np.linalg.norm(rows - factors * right) <= _LEFT * np.linalg.norm(error):
            low, high = float(factors.min()), float(factors.max())
            yield f"each row has a factor of its own, from {low:.4g} to {high:.4g}, as of a layer that is folded"


def _moved(got: np.ndarray, due: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The right gradient with its elements at other places, in the shape of the wrong one."""
    axes = range(due.ndim)
    if due.ndim > _MOST_AXES or got.size != due.size:
        return
    yield from _turned(got, due)
    for order in itertools.permutations(axes):
        if order != tuple(axes):
            told = f"its memory has the axes {list(order)}{_layout(order)}, and is read as {list(axes)}"
            yield told, due.transpose(order).reshape(got.shape)
    if got.shape != due.shape:
        yield "it has another shape", due.reshape(got.shape)
        return
    for count in axes:
        for flipped in itertools.combinations(axes, count + 1):
            yield f"it is in reverse along axis {', '.join(map(str, flipped))}", np.flip(due, flipped)
    for count in _PARTS:
        if due.ndim and len(due) % count == 0:
            parts = np.split(due, count)
            for places in itertools.permutations(range(count)):
                if places != tuple(range(count)):
                    told = f"its rows are {counted(count, 'part')} in the order {list(places)}"
                    yield told, np.concatenate([parts[place] for place in places])
    for axis in axes:
        for step in (1, -1):
            yield f"it is shifted by {step} along axis {axis}", np.roll(due, step, axis)


def _turned(got: np.ndarray, due: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The right gradient with its axes in another order, in the shape of the wrong one."""
    axes = tuple(range(due.ndim))
    if due.ndim > _MOST_AXES or got.size != due.size:
        return
    for order in itertools.permutations(axes):
        turned = due.transpose(order)
        if turned.shape == got.shape and order != axes:
            yield f"its axes are in the order {list(order)}{_layout(order)}", turned


def _layout(order: tuple[int, ...]) -> str:
    """The name of a usual order of axes, in brackets."""
    rank = len(order)
    last = (0, *range(2, rank), 1)
    first = (0, rank - 1, *range(1, rank - 1))
    if rank == 2:
        return " (transposed)"
    if rank < 3:
        return ""
    return " (channels last)" if order == last else " (channels first)" if order == first else ""


def _factor(got: np.ndarray, like: np.ndarray, error: np.ndarray) -> float | None:
    """The factor with which `like` explains `got`; None if it explains too little of the error."""
    size = float(np.vdot(like, like))
    if not size or not math.isfinite(size):
        return None
    factor = float(np.vdot(like, got)) / size
    if not factor or np.linalg.norm(got - factor * like) > _LEFT * np.linalg.norm(error):
        return None
    return factor


def _times(factor: float, shapes: Collection[tuple[int, ...]]) -> str:
    return "" if abs(factor - 1) <= _WHOLE else f", and {_of_factor(factor, shapes)}"


def _of_factor(factor: float, shapes: Collection[tuple[int, ...]]) -> str:
    """A factor, with its usual reason."""
    if abs(factor + 1) <= _WHOLE:
        return "it has the other sign"
    told = f"it is {factor:.6g} times the right one"
    size = abs(factor)
    whole, parts = _whole(size), _whole(1 / size)
    reasons: list[str] = []
    if parts is not None and parts > 1:
        told = f"{told} ({'-' if factor < 0 else ''}1/{parts})"
        if _is_size(parts, shapes):
            reasons.append(f"a mean over {parts} instead of a sum")
        if _is_scale(parts):
            reasons.append("a loss scale that is undone twice")
    if whole is not None and whole > 1:
        is_size = _is_size(whole, shapes)
        if is_size:
            reasons.append(f"a sum over {whole} instead of a mean")
        if whole <= _MOST_STEPS:
            reasons.append(f"{counted(whole, 'step')} without zero_grad")
            reasons += [] if is_size else [f"a value that is counted {whole} times"]
        if _is_scale(whole):
            reasons.append("a loss scale that is not undone")
    return f"{told}, as from {' or '.join(reasons)}" if reasons else told


def _is_scale(number: int) -> bool:
    """True for a power of two that is larger than steps are likely to be."""
    return number & (number - 1) == 0 and _MOST_STEPS < number <= _MOST_FACTOR


def _whole(number: float) -> int | None:
    nearest = round(number) if math.isfinite(number) and abs(number) < _MOST_FACTOR else 0
    return nearest if nearest and abs(number - nearest) <= _WHOLE * abs(nearest) else None


def _is_size(number: int, shapes: Collection[tuple[int, ...]]) -> bool:
    """True for the size of an axis, and for the product of the sizes of some axes of one tensor."""
    return any(
        number == math.prod(some)
        for shape in shapes
        for count in range(1, min(len(shape), _MOST_AXES) + 1)
        for some in itertools.combinations(shape[:_MOST_AXES], count)
    )
