"""The tensors of a comparison, one by one: the verdict on each side, and how far the sides are from each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from refgrad.conformance.locating.judge import MORE_DRAWS, Judge, is_far
from refgrad.conformance.locating.recordings import Match, Recording, identity
from refgrad.conformance.locating.verdicts import GRADIENT, OUTPUT, RIGHT, UNDECIDED, WRONG, Seen, Tensor
from refgrad.conformance.locating.work import Work
from refgrad.conformance.oracles.comparison import SENSITIVE
from refgrad.conformance.questions.point import largest, limits, rounding
from refgrad.conformance.questions.rounding import Drawn
from refgrad.protos.types import FLOATS


def tensors_of(judge: Judge, work: Sequence[Work], asked: bool) -> Iterator[Tensor]:
    """Every tensor that both sides have, or that one of them is asked for and has not."""
    recordings = [one for one in work if isinstance(one.side, Recording)]
    floats = {v.name for v in judge.point.model.graph.output if v.type.tensor_type.elem_type in FLOATS}
    for name in (name for name in judge.point.seeds_of if name in floats):
        held = [one.outputs.get(name) for one in work]
        if any(value is None for value in held):
            continue
        seen_a, seen_b = (_output(one, name) for one in work)
        yield Tensor(name, OUTPUT, (name,), "name", seen_a, seen_b, _apart(held, judge.outputs[name]))
    if not recordings:
        for name in judge.truth.gradients:
            yield _row(judge, work, identity(name, judge.truth.gradients[name].shape))
        return
    first = recordings[0]
    for name in first.gradients:
        if name in first.matched.found:
            yield _row(judge, work, first.matched.found[name])
    for name in first.gradients:
        if name in judge.truth.gradients and name in first.matched.left:
            unsaid = Seen(UNDECIDED, first.matched.left[name])
            match = identity(name, judge.truth.gradients[name].shape)
            seen = [unsaid if one is first else one.seen(name, one.gradients.get(name), match) for one in work]
            yield Tensor(name, GRADIENT, (name,), "", seen[0], seen[1])
    if asked:
        for name in sorted(first.matched.of(judge.truth.gradients)):
            yield _row(judge, work, identity(name, judge.truth.gradients[name].shape))


def _row(judge: Judge, work: Sequence[Work], match: Match) -> Tensor:
    held = []
    for one in work:
        if isinstance(one.side, Recording):
            held.append(one.gradients.get(match.recorded))
        elif all(name in one.gradients for name in match.names):
            wrong = [n for n in match.names if one.gradients[n].shape != judge.truth.gradients[n].shape]
            held.append(one.gradients[wrong[0]] if wrong else match.made_of(one.gradients))
        else:
            held.append(None)
    seen = [one.seen(match.recorded, value, match) for one, value in zip(work, held, strict=True)]
    apart = _apart(held, match.made_of(judge.truth.gradients))
    return Tensor(match.recorded, GRADIENT, match.names, match.how, seen[0], seen[1], apart)


def _apart(held: Sequence[np.ndarray | None], due: np.ndarray) -> float | None:
    """The largest difference of the two, relative to the largest finite element of `due`; None if their sizes differ."""
    first, second = held
    if first is None or second is None or first.size != second.size or not first.size:
        return None
    with np.errstate(all="ignore"):
        left, right = first.astype(np.float64).reshape(-1), second.astype(np.float64).reshape(-1)
        off = np.where((left == right) | (np.isnan(left) & np.isnan(right)), 0.0, np.abs(left - right))
    most = float(np.max(np.where(np.isnan(off), np.inf, off), initial=0.0))
    return most / (largest(due[np.isfinite(due)]) or 1.0)


def _output(work: Work, name: str) -> Seen:
    """The verdict on a result of the model itself."""
    judge = work.truth_of_side
    point, found, due = judge.point, work.outputs[name], judge.outputs[name]
    if found.shape != due.shape:
        return Seen(WRONG, f"it has the shape {list(found.shape)} instead of {list(due.shape)}")
    with np.errstate(all="ignore"):
        wide = found.astype(np.float64)
        error = np.where((wide == due) | (np.isnan(wide) & np.isnan(due)), 0.0, np.abs(wide - due))
    error = np.where(np.isnan(error), np.inf, error)
    size = largest(due[np.isfinite(due)])
    tolerance = max(rounding(len(point.model.graph.node), point), 16 * limits(found.dtype)[0])
    allowed = np.full(due.shape, tolerance * size)
    if not np.all(error <= allowed):
        plain = allowed
        for spread in _spreads(judge, name):
            allowed = plain + SENSITIVE * spread
            if np.all(error <= allowed) or is_far(error - plain, allowed - plain):
                break
    worst = np.unravel_index(int(np.argmax(error / np.maximum(allowed, 1e-300))), error.shape) if error.size else ()
    numbers = (float(error[worst] / (size or 1)), float(allowed[worst] / (size or 1))) if error.size else (0.0, 0.0)
    if np.all(error <= allowed):
        return Seen(RIGHT, "", *numbers)
    place = [int(k) for k in worst]
    return Seen(WRONG, f"{place} is {float(wide[worst]):.6g} instead of {float(due[worst]):.6g}", *numbers)


def _spreads(judge: Judge, name: str) -> Iterator[np.ndarray]:
    """How far rounding moves a result of the model, by ever more draws."""
    point = judge.point
    model = point.model
    fed = {key: value for key, value in point.wide.items() if key in point.feeds}
    drawn = Drawn(model, fed, {name: name}, {name: judge.outputs[name]}, judge.truth.bits)
    for draws in MORE_DRAWS:
        drawn.until(draws)
        yield drawn.spread(name)
