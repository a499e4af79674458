"""One side of a comparison at work: its tensors, the verdicts on its gradients, and the nodes at fault.

A gradient is right if rounding explains its distance from the judge's. Where a side is wrong, the search leads to the node: to
the rule, if the side's own gradient model is wrong in double too (`bisect`); to the kernel, if that model is right and the
executor is not (`locate`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.locating.bisection import Bisected, bisect
from refgrad.conformance.locating.judge import LOOKED, Judge, by_output, is_exact, is_far, recast
from refgrad.conformance.locating.location import Located, locate
from refgrad.conformance.locating.recordings import Match, Matched, Recording, identity, match
from refgrad.conformance.locating.sides import Live, Side, in_precision
from refgrad.conformance.locating.verdicts import (
    CONVENTION,
    GRADIENT,
    MISSING,
    OUTPUT,
    RIGHT,
    UNDECIDED,
    WRONG,
    Seen,
    Sided,
    Tensor,
    seen_of,
)
from refgrad.conformance.oracles.comparison import DISAGREED, KINK
from refgrad.conformance.questions.evidence import Built
from refgrad.conformance.questions.feeds import widened
from refgrad.conformance.questions.point import largest, limits, rounding
from refgrad.conformance.questions.question import Question
from refgrad.conformance.systems.builders import CrashError
from refgrad.conformance.tracing.nonfinite import Birth, births
from refgrad.errors import OptionError, RefgradError, choices, raised

Progress = Callable[[str, int, int], None]

# The verdict is "undecided" if rounding explains more than this part of the largest element, and the norm of the error is more
# than this part of the norm of the gradient. docs/locating.md names this limit, docs/check.md the same one of `refgrad check`.
_FEW = 1e-2
# The place in `Judge.explanations` of the first one with random roundings.
_FEW_DRAWN = 2


class Work:
    """One side at work."""

    def __init__(self, side: Side, judge: Judge, progress: Progress | None) -> None:
        self.side, self.judge, self._progress = side, judge, progress
        self.failed = ""
        self.outputs: dict[str, np.ndarray] = {}
        self.gradients: dict[str, np.ndarray] = {}
        self.matched = Matched({}, {})
        self.truth_of_side: Judge = judge
        self.wrong_in_double: list[str] = []
        self._built: Built | None = None
        self._feeds: dict[str, Any] = {}
        self._bisected: Bisected | None = None
        self._located: Located | None = None
        self._born: tuple[Birth, ...] = ()

    # What it has

    def run(self) -> None:
        """Get the tensors of the side."""
        if isinstance(self.side, Recording):
            self.outputs = {n: v for n, v in self.side.values.items() if n in self.judge.outputs}
            outputs = self.judge.outputs.keys() - self.judge.truth.gradients.keys()
            held = {n: v for n, v in self.side.gradients.items() if n not in outputs}
            self.gradients = held
            recording = Recording(self.side.label, self.side.values, held)
            self.matched = match(self.judge.point.model, recording, self.judge.truth.gradients)
            return
        try:
            self._run(self.side)
        except OptionError:  # what was asked for, and no fault
            raise
        except (CrashError, RefgradError) as error:
            self.failed = str(error)
        except Exception as error:  # a builder that is a function raises anything
            self.failed = f"it raised {raised(error)}"

    def _run(self, side: Live) -> None:
        judge = self.judge
        point = judge.point
        self.matched = Matched({n: identity(n, v.shape) for n, v in judge.truth.gradients.items()}, {})
        model, feeds = in_precision(point.model, point.feeds, side.recast)
        if model is not point.model:
            self.truth_of_side = judge = recast(judge, model, feeds)
            point = judge.point
        question = Question("model", model, tuple(point.names), feeds, by_output(point), judge.seed)
        self._tell("build", 0, 1)
        self._built = built = side.build(question)
        self._feeds = built.feeds(feeds, question.cotangents)
        in_double = built.named(NumpyBackend().prepare(built.model, precision="float64").run(widened(self._feeds)))
        self.wrong_in_double = [
            name for name, value in judge.truth.gradients.items() if not is_exact(judge, name, in_double.get(name))
        ]
        self._tell("run", 0, 1)
        made = built.named(side.backend.prepare(built.model).run(self._feeds))
        zero = {name: np.zeros_like(point.wide[name]) for name in point.names if name not in built.gradients}
        self.gradients = made | zero
        self.outputs = {n: np.asarray(v) for n, v in side.backend.prepare(model).run(feeds).items()}

    # What it is worth

    def seen(self, name: str, theirs: np.ndarray | None, match: Match) -> Seen:
        """The verdict on a gradient."""
        judge = self.truth_of_side
        if theirs is None:
            return Seen(MISSING, self.failed or "it has no such tensor")
        due = match.made_of(judge.truth.gradients)
        if theirs.shape != due.shape:
            is_recorded = isinstance(self.side, Recording)  # many leave out axes of size 1
            if not is_recorded or np.squeeze(theirs).shape != np.squeeze(due).shape:
                return Seen(WRONG, f"it has the shape {list(theirs.shape)} instead of {list(due.shape)}")
            theirs = theirs.reshape(due.shape)
        open_ = ~np.isfinite(due)
        bad = ~np.isfinite(theirs.astype(np.float64)) & ~open_
        if bad.any():
            return Seen(WRONG, f"{np.count_nonzero(bad)} of {bad.size} elements are not finite, and are in double")
        seen = self._judged(np.where(open_, 0, theirs), np.where(open_, 0.0, due), match, open_)
        if open_.any():
            said = f"{np.count_nonzero(open_)} of {open_.size} elements are not finite in double: they are not judged"
            return replace(seen, reason=f"{seen.reason}; {said}" if seen.reason else said)
        return seen

    def _judged(self, theirs: np.ndarray, due: np.ndarray, match: Match, open_: np.ndarray) -> Seen:
        judge = self.truth_of_side
        wide = theirs.astype(np.float64)
        error, size = np.abs(wide - due), largest(due)
        bits = max(min(1 - round(float(np.log2(limits(theirs.dtype)[0]))), judge.truth.bits), 2)
        tolerance = max(rounding(len(judge.gradient.graph.node), judge.point), 16 * limits(theirs.dtype)[0])
        explained, plain, note = np.zeros(0), np.zeros(0), ""
        for level, (room, why) in enumerate(judge.explanations(match, tolerance, bits)):
            explained, note = np.where(open_, 0.0, room), why
            if np.all((error <= explained) & np.isfinite(explained)):
                break
            if level < _FEW_DRAWN:
                plain = explained
            elif self._is_exactly_wrong(match) or (not judge.has_kinks and is_far(error - plain, explained - plain)):
                return self._disputed(wide, due, error, explained, match, tolerance)
        else:
            return self._disputed(wide, due, error, explained, match, tolerance)
        most = float(error.max(initial=0.0))
        numbers = most / size if size else 0.0, largest(explained) / size if size else tolerance
        if self._is_exactly_wrong(match):
            return Seen(
                WRONG, "rounding could hide it, but in double this side's own gradient model is wrong", *numbers
            )
        if size <= largest(explained) and judge.is_noise(match, size):
            return Seen(RIGHT, "it is zero up to rounding", *numbers)
        hidden = largest(explained) > _FEW * size and float(np.linalg.norm(error)) > _FEW * float(np.linalg.norm(due))
        if hidden:
            return Seen(UNDECIDED, note or "rounding hides more than 1 % of it", *numbers)
        return Seen(RIGHT, "", *numbers)

    def _is_exactly_wrong(self, match: Match) -> bool:
        return isinstance(self.side, Live) and any(name in self.wrong_in_double for name in match.names)

    def _disputed(
        self,
        wide: np.ndarray,
        due: np.ndarray,
        error: np.ndarray,
        explained: np.ndarray,
        match: Match,
        tolerance: float,
    ) -> Seen:
        """An error that rounding does not explain: a fault, a kink's convention in some elements, or nobody can tell."""
        judge, size = self.truth_of_side, largest(due)
        beyond = ~((error <= explained) & np.isfinite(explained))
        with np.errstate(all="ignore"):
            worst = np.unravel_index(int(np.argmax(np.where(beyond, error / explained, -1.0))), error.shape)
        place = [int(k) for k in worst]
        numbers = (
            float(error[worst] / size) if size else float("inf"),
            float(explained[worst] / size) if size else tolerance,
        )
        off = f"{np.count_nonzero(beyond)} of {beyond.size} elements are off"
        said = f"{off}; {place} is {wide[worst]:.6g} instead of {due[worst]:.6g}"
        if not size:
            said = f"it is {wide[worst]:.3g} at {place} instead of 0"
        if len(match.names) == 1 and judge.has_kinks and due.shape == judge.point.wide[match.names[0]].shape:
            name = match.names[0]
            mask = judge.at_kinks(name, beyond)
            if mask.any():
                apart = judge.outside(name, wide, tolerance, mask)
                if not (beyond & ~mask).any() and not apart:
                    count = np.count_nonzero(beyond)
                    part = f"; {LOOKED} of them were looked at" if count > LOOKED else ""
                    told = f"{count} elements are at a kink, between both derivatives{part}"
                    return Seen(CONVENTION, told, *numbers)
                if apart and not (beyond & ~mask).any():
                    return Seen(WRONG, f"at a kink, but outside of the derivatives of both sides: {apart}", *numbers)
                said += f"; {np.count_nonzero(mask)} elements at a kink are not counted" if not apart else f"; {apart}"
        verdicts = {judge.confirmed(name) for name in match.names if name in judge.point.wide}
        if DISAGREED in verdicts:
            return Seen(UNDECIDED, f"{said}; but central differences contradict the judge's gradient too", *numbers)
        if verdicts == {KINK}:
            return Seen(UNDECIDED, f"{said}; the point is at a kink", *numbers)
        if computed := self.matched.computed:
            why = "the exporter computed of weights, which get no gradient through them here"
            return Seen(
                UNDECIDED, f"{said}; there are initializers that perhaps {why}: {choices(computed, 3)}", *numbers
            )
        return Seen(WRONG, said, *numbers)

    def forget(self) -> None:
        """Give back what the verdicts needed: the search needs memory too."""
        self.outputs, self.gradients = {}, {}
        self.truth_of_side.forget()
        self.judge.forget()

    # Where it goes wrong

    def search(self, disputed: Sequence[Tensor], place: int) -> None:
        """Look for the rules and kernels at fault."""
        side, judge = self.side, self.truth_of_side
        if not isinstance(side, Live) or not (disputed or self.failed):
            return
        point = judge.point
        if self._built is None or self.wrong_in_double:
            self._tell("rules", 0, 1)
            name = str(side).partition("@")[0]
            self._bisected = bisect(point.model, point.feeds, side.build, judge.seed, name, self.wrong_in_double)
        if self._built is None:
            return
        wrong = [tensor for tensor in disputed if not set(tensor.of) <= set(self.wrong_in_double)]
        if wrong or not self.wrong_in_double or self.failed:
            model = self._built.model
            feeds = self._feeds
            if self.failed or any(tensor.kind == GRADIENT for tensor in wrong) or not wrong:
                self._located = locate(model, feeds, side.backend, lambda k, n: self._tell("kernels", k, n))
            if wrong and (self._located is None or self._located.is_right) and any(t.kind == OUTPUT for t in wrong):
                self._located = locate(point.model, point.feeds, side.backend, lambda k, n: self._tell("kernels", k, n))
        if any("not finite" in seen_of(tensor, place).reason for tensor in disputed):
            self._born = births(self._built.model, self._feeds, side.backend, point.model)

    def told(self) -> Sided:
        """The findings about this side."""
        return Sided(
            str(self.side), self.failed, self._bisected, self._located, self._born, self.matched.left, len(self.matched.found)
        )  # fmt: skip

    def _tell(self, what: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(f"{self.side}: {what}", done, total)
