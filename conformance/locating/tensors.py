"""The tensors of a comparison, one by one: the verdict on each side, and how far the sides are from each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from refgrad.conformance.judge.elementwise import Effects, allowed_error
from refgrad.conformance.locating.judge import Judge, is_far
from refgrad.conformance.locating.pictures import elements_of, maps_of
from refgrad.conformance.locating.recordings import Match, Recording, identity
from refgrad.conformance.locating.verdicts import GRADIENT, OUTPUT, Seen, Tensor, seen_of
from refgrad.conformance.locating.work import Work
from refgrad.conformance.problems.point import largest, rounding
from refgrad.conformance.problems.rounding import Drawn, limits
from refgrad.conformance.verdicts import CONVENTION, RIGHT, UNDECIDED, WRONG
from refgrad.protos.types import FLOATS

_TOGETHER = "at a kink, each operator takes one of its own derivatives, but the whole is not a derivative of the model"
_DECIDES = "To decide, give another seed, or :float64 after the executor"


def tensors_of(
    judge: Judge, work: Sequence[Work], asked: bool, report: Callable[[str, int, int | None], None]
) -> Iterator[Tensor]:
    """Every tensor that both sides have, or that one of them is asked for and has not.

    :param report: called with the tensor that is judged, how many are, and how many there are.
    """
    jobs = _jobs(judge, work, asked)
    for done, (name, judged) in enumerate(jobs):
        report(f"judging {name!r}", done, len(jobs))
        yield judged()


def _jobs(judge: Judge, work: Sequence[Work], asked: bool) -> list[tuple[str, Callable[[], Tensor]]]:
    """The tensors to judge, by name, each with the function that does it."""
    jobs: list[tuple[str, Callable[[], Tensor]]] = []
    recordings = [one for one in work if isinstance(one.side, Recording)]
    floats = {v.name for v in judge.point.model.graph.output if v.type.tensor_type.elem_type in FLOATS}
    for name in (name for name in judge.point.seeds_of if name in floats):
        if all(name in one.outputs for one in work):
            jobs.append((name, partial(_of_output, judge, work, name)))
    if not recordings:
        matches = [identity(name, value.shape) for name, value in judge.truth.gradients.items()]
        return [*jobs, *((match.recorded, partial(_row, judge, work, match)) for match in matches)]
    first = recordings[0]
    matches = [first.matched.found[name] for name in first.gradients if name in first.matched.found]
    jobs += [(match.recorded, partial(_row, judge, work, match)) for match in matches]
    left = [name for name in first.gradients if name in judge.truth.gradients and name in first.matched.left]
    jobs += [(name, partial(_of_unmatched, judge, work, name, first)) for name in left]
    if asked:
        matches = [
            identity(name, judge.truth.gradients[name].shape)
            for name in sorted(first.matched.of(judge.truth.gradients))
        ]
        jobs += [(match.recorded, partial(_row, judge, work, match)) for match in matches]
    return jobs


def _of_output(judge: Judge, work: Sequence[Work], name: str) -> Tensor:
    """A result of the model itself."""
    seen_a, seen_b = (_output(one, name) for one in work)
    held = [one.outputs[name] for one in work]
    return Tensor(name, OUTPUT, (name,), "name", seen_a, seen_b, _difference(held, judge.outputs[name]))


def _of_unmatched(judge: Judge, work: Sequence[Work], name: str, recorded: Work) -> Tensor:
    """A gradient that is recorded under a name of the model, and does not fit it."""
    unsaid = Seen(UNDECIDED, recorded.matched.left[name])
    match = identity(name, judge.truth.gradients[name].shape)
    seen = [unsaid if one is recorded else one.seen(name, one.gradients.get(name), match) for one in work]
    return Tensor(name, GRADIENT, (name,), "", seen[0], seen[1])


def judged_together(tensors: Sequence[Tensor], work: Sequence[Work]) -> list[Tensor]:
    """The tensors, judged beside each other.

    Conventions that are no derivative when all elements move at once are wrong; a value that leaves its type is the cause.
    """
    judged = list(tensors)
    for place, one in enumerate(work):
        if said := one.contradicted(judged, place):
            truth = one.truth_of_side
            for k, tensor in enumerate(judged):
                seen = seen_of(tensor, place)
                is_usual = seen.verdict == RIGHT and tensor.kind == GRADIENT and truth.contradicts_itself
                if seen.verdict == CONVENTION:
                    judged[k] = _with(tensor, place, replace(seen, verdict=WRONG, reason=f"{seen.reason}, but {said}"))
                elif is_usual and all(truth.kinked(name) is not None for name in tensor.of):
                    judged[k] = _with(tensor, place, replace(seen, verdict=WRONG, reason=said, cause=_TOGETHER))
        for k, seen in one.explained(judged, place).items():
            judged[k] = _with(judged[k], place, seen)
    return judged


def settled(tensors: Sequence[Tensor], work: Sequence[Work]) -> list[Tensor]:
    """The tensors after the search: undecided if each node is right, and wrong if nodes are proved to be."""
    judged = list(tensors)
    for place, one in enumerate(work):
        for k, tensor in enumerate(judged):
            seen = seen_of(tensor, place)
            if one.has_no_wrong_node and seen.verdict == WRONG and not seen.cause:
                said = f"{seen.reason}; but each node is right for its inputs, so roundings may add up. {_DECIDES}"
                judged[k] = _with(tensor, place, replace(seen, verdict=UNDECIDED, reason=said))
            elif one.has_proved_node and seen.verdict == UNDECIDED and not one.draws():
                said = f"{seen.reason}; and some nodes are proved to be wrong"
                judged[k] = _with(tensor, place, replace(seen, verdict=WRONG, reason=said))
    return judged


def _with(tensor: Tensor, place: int, seen: Seen) -> Tensor:
    return replace(tensor, a=seen) if place == 0 else replace(tensor, b=seen)


def _row(judge: Judge, work: Sequence[Work], match: Match) -> Tensor:
    held = []
    for one in work:
        if isinstance(one.side, Recording):
            held.append(match.in_recording(one.gradients))
        elif all(name in one.gradients for name in match.names):
            wrong = [n for n in match.names if one.gradients[n].shape != judge.truth.gradients[n].shape]
            held.append(one.gradients[wrong[0]] if wrong else match.made_of(one.gradients))
        else:
            held.append(None)
    due = match.made_of(judge.truth.gradients)
    seen = [
        _shown(one.seen(match.recorded, value, match), value, match.made_of(one.truth_of_side.truth.gradients))
        for one, value in zip(work, held, strict=True)
    ]
    difference = _difference(held, due)
    return Tensor(match.title, GRADIENT, match.names, match.how, seen[0], seen[1], difference)


def _shown(seen: Seen, got: np.ndarray | None, due: np.ndarray) -> Seen:
    """The verdict, with the elements of a wrong tensor that are furthest off, and its picture."""
    if seen.verdict != WRONG or got is None:
        return seen
    value = got.reshape(due.shape) if got.size == due.size else got
    return replace(seen, elements=elements_of(value, due), maps=maps_of(value, due))


def _difference(held: Sequence[np.ndarray | None], due: np.ndarray) -> float | None:
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
    if moved := work.moves([name]):
        return moved
    point, found, due = judge.point, work.outputs[name], judge.outputs[name]
    if found.shape != due.shape:
        return Seen(WRONG, f"it has the shape {list(found.shape)} instead of {list(due.shape)}")
    with np.errstate(all="ignore"):
        wide = found.astype(np.float64)
        error = np.where((wide == due) | (np.isnan(wide) & np.isnan(due)), 0.0, np.abs(wide - due))
    error = np.where(np.isnan(error), np.inf, error)
    size = largest(due[np.isfinite(due)])
    tolerance = max(rounding(len(point.model.graph.node), point), 16 * limits(found.dtype)[0])
    plain = np.full(due.shape, tolerance * size)
    allowed, _ = allowed_error(error, plain, _effects(judge, name), judge.truth.bits, gives_up=is_far)
    worst = np.unravel_index(int(np.argmax(error / np.maximum(allowed, 1e-300))), error.shape) if error.size else ()
    numbers = (float(error[worst] / (size or 1)), float(allowed[worst] / (size or 1))) if error.size else (0.0, 0.0)
    if np.all(error <= allowed):
        return Seen(RIGHT, "", *numbers)
    place = [int(k) for k in worst]
    if drawn := work.draws():
        return Seen(UNDECIDED, drawn, *numbers)
    seen = Seen(WRONG, f"{place} is {float(wide[worst]):.6g} instead of {float(due[worst]):.6g}", *numbers)
    return _shown(seen, found, due)


def _effects(judge: Judge, name: str) -> Effects:
    """How far random rounding moves a result of the model."""
    point, due = judge.point, judge.outputs[name]
    fed = {key: value for key, value in point.wide.items() if key in point.feeds}
    drawn = Drawn(point.model, fed, {name: name}, {name: due}, judge.truth.bits)

    def spread(bits: int, draws: int) -> np.ndarray:
        drawn.until(draws)
        return drawn.spread(name)

    return Effects(lambda bits: np.zeros(due.shape), spread, spread, has_kinks=False)
