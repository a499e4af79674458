"""The comparison of two gradients of one model, from two systems or recorded: which tensors differ, and which side is wrong.

`compare` also names the nodes at fault, with the proof. This module reads the two sides, the feeds and the cotangents. Each of
the other steps has a module: judge.py computes the right gradient in double, work.py gets the tensors of a side and searches
for its faults, tensors.py puts both sides next to each other, verdicts.py has the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto

from refgrad import interruption
from refgrad.backends.base import ModelLike, Value, check_feeds, load_model
from refgrad.conformance.case import is_float
from refgrad.conformance.locating.judge import Judge
from refgrad.conformance.locating.location import Progress, quietly
from refgrad.conformance.locating.recordings import Recording
from refgrad.conformance.locating.sides import Live, Side, side_of
from refgrad.conformance.locating.tensors import judged_together, settled, tensors_of
from refgrad.conformance.locating.verdicts import Comparison, Tensor, seen_of
from refgrad.conformance.locating.work import Work
from refgrad.conformance.problems.feeds import SIZE
from refgrad.conformance.problems.point import Point, inputs_of, with_values
from refgrad.conformance.problems.systems.surroundings import surroundings
from refgrad.conformance.verdicts import UNDECIDED, WRONG
from refgrad.errors import FeedError, OptionError, choices
from refgrad.model.checks.malformed import explained
from refgrad.reverse.gradient import gradient as differentiate

# The types of an input that a recorded array is cast to: the recording may have been made in double.
COTANGENTS = ("ones", "random")  # that `compare` makes by itself
# What is missing of the verdicts of a comparison that was stopped.
_ONE_BY_ONE = "the tensors that are not listed"
_TOGETHER = "the conventions of all tensors together, and values that leave their types"
_NARROWER = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))


@explained
def compare(
    model: ModelLike,
    a: str | Side | Mapping[str, Any],
    b: str | Side | Mapping[str, Any],
    feeds: Mapping[str, Any] | None = None,
    *,
    wrt: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    cotangent: str | Mapping[str, Any] = "",
    seed: int = 0,
    size: int = SIZE,
    sizes: Mapping[str, int] | None = None,
    search: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two gradients of a model, and find the nodes at fault.

    :param a: a side: "builder@executor" or "builder@executor:precision"; tensors by name, or the path of a file or a folder of
        them; a `Live`. `b` as well.
    :param feeds: the inputs; by default those that a recording has, or random ones.
    :param wrt: the inputs and initializers to differentiate by; by default every float one, or those that a recording has.
    :param cotangent: "ones", "random" or arrays by output; by default what a recording has for the outputs, ones with a
        recording that has nothing, and random ones otherwise.
    :param search: look for the nodes at fault.
    :param progress: called with the step in progress, how far it is, and how far it goes, None if nobody knows.
        If Ctrl-C or --max-seconds stops the comparison once there are verdicts, they are returned, and `stopped` says so.
    :raises OptionError: a side that is none. :raises FeedError: feeds that do not fit.
    :raises RefgradError: what `refgrad.gradient` refuses; a model that the interpreter does not run.

    >>> import numpy as np, onnx.parser
    >>> from refgrad.conformance import compare
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { h = Tanh(x)  y = Mul(h, x) }'
    ... )
    >>> x = np.float32([1, 2])
    >>> recorded = {"x_grad": np.tanh(x) + x * (1 - np.tanh(x) ** 2)}
    >>> found = compare(model, "refgrad@numpy", recorded, {"x": x})
    >>> [(tensor.name, tensor.verdict) for tensor in found.tensors], found.ok
    ([('x', 'they agree')], True)
    """
    if isinstance(cotangent, str) and cotangent not in ("", *COTANGENTS):
        raise OptionError(f"cotangent={cotangent!r} is not known. There are 'ones', 'random' and arrays by output.")
    proto = load_model(model, lift=True)
    sides = [side.for_model(proto) if isinstance(side, Recording) else side for side in (side_of(a), side_of(b))]
    recorded = [side for side in sides if isinstance(side, Recording)]
    given = _feeds_of(proto, feeds, recorded)
    if given is not None:
        proto, given = with_values(proto, given)
    gradient = differentiate(proto, wrt, outputs)
    point = Point.choose(proto, gradient, given, seed, size, sizes)
    point = replace(point, cotangents=_cotangents(point, recorded, cotangent))
    report = progress or quietly
    report("the judge's gradient in double", 0, None)
    judge = Judge(point, gradient, seed, report)
    work = [Work(side, judge, progress) for side in sides]
    tensors: list[Tensor] = []
    stopped, unjudged, is_settled = "", _ONE_BY_ONE, False
    try:
        for one in work:
            one.run()
        tensors.extend(
            tensors_of(judge, work, wrt is not None, report)
        )  # it keeps those that it has if this is stopped
        unjudged = _TOGETHER
        tensors = judged_together(tensors, work)
        unjudged = ""
        for one in work:
            one.forget()
        if search:
            for place, one in enumerate(work):
                one.plan([tensor for tensor in tensors if seen_of(tensor, place).verdict in (WRONG, UNDECIDED)], place)
            for one in work:
                one.search()
            tensors, is_settled = settled(tensors, work), True
            for place, one in enumerate(work):
                one.trace(tensors, place)
    except interruption.STOPS as stop:
        if not tensors:
            raise
        interruption.finish()
        stopped = interruption.why(stop)
    finally:
        for side in sides:
            if isinstance(side, Live):
                side.close()
    if search and not is_settled:
        tensors = settled(tensors, work)
    named = [name for side in sides if isinstance(side, Live) for name in side.names]
    versions = surroundings(named)
    told = [one.told() for one in work]
    return Comparison(tuple(tensors), told[0], told[1], point.described, seed, judge.said, versions, stopped, unjudged)


def _feeds_of(
    model: ModelProto, feeds: Mapping[str, Any] | None, recorded: Sequence[Recording]
) -> dict[str, Any] | None:
    """The feeds that are given, or that a recording has."""
    if feeds is not None:
        return check_feeds(feeds, inputs_of(model))
    declared = {value.name: value for value in inputs_of(model) if not value.has_default}
    needed = list(declared)
    for recording in recorded:
        if needed and all(name in recording.values for name in needed):
            return check_feeds(
                {name: _narrowed(recording.values[name], declared[name]) for name in needed}, inputs_of(model)
            )
    if recorded:
        lacking = [name for name in needed if all(name not in one.values for one in recorded)]
        if lacking:
            taken = [name for name in lacking if any(name in one.gradients for one in recorded)]
            why = (
                f" {choices(taken)} in it was read as a gradient, since no name in it ends in _grad. Rename the gradients, as "
                f"in {taken[0]}_grad, and give the inputs"
                if taken
                else " Give them"
            )
            raise FeedError(
                f"The inputs of the recording are needed, and it does not have {choices(lacking)}.{why}: feeds={{...}}."
            )
    return None


def _narrowed(value: np.ndarray, declared: Value) -> np.ndarray:
    """A recorded input in the model's type: the recording may have been made in double."""
    if is_float(value) and declared.dtype is not None and np.dtype(declared.dtype) in _NARROWER:
        return value.astype(declared.dtype)
    return value


def _cotangents(point: Point, recorded: Sequence[Recording], kind: str | Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The cotangents, in the model's types: those given or recorded, ones or random ones."""
    given = [kind] if isinstance(kind, Mapping) else [] if kind else [one.gradients for one in recorded]
    made = {}
    for output, name in point.seeds_of.items():
        value = point.cotangents[name]
        held = next((np.asarray(one[output]) for one in given if output in one), None)
        if held is not None:
            if held.shape != value.shape:
                which = "" if isinstance(kind, Mapping) else "recorded "
                raise FeedError(
                    f"The {which}cotangent of {output!r} has the shape {held.shape} instead of {value.shape}."
                )
            if not np.isfinite(held.astype(np.float64)).all():
                raise FeedError(
                    f"The cotangent of {output!r} is not finite. Give finite numbers, or cotangent='random'."
                )
            value = held.astype(value.dtype)
        elif kind == "ones" or (recorded and not kind):
            value = np.ones_like(value)
        made[name] = value
    return made
