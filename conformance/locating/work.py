"""One side of a comparison at work: its tensors, the verdicts on its gradients, and the nodes at fault.

A gradient is right if rounding explains its distance from the judge's. Where a side is wrong, the search leads to the node: to
the rule, if the side's own gradient model is wrong in double too (`bisect`); to the kernel, if that model is right and the
executor is not (`locate`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.judge.elementwise import BEYOND, HIDDEN, ZERO, within_rounding
from refgrad.conformance.judge.nan.nonfinite import Origin, origins
from refgrad.conformance.locating import paths
from refgrad.conformance.locating.between import between
from refgrad.conformance.locating.bisection import Bisected, bisect, narrowing_casts
from refgrad.conformance.locating.causes import cause_of
from refgrad.conformance.locating.judge import LOOKED, Judge, by_output, is_exact, is_far, recast
from refgrad.conformance.locating.location import Located, Progress, computes_right, locate
from refgrad.conformance.locating.paths import ErrorPath, Neighbourhood, Wrong
from refgrad.conformance.locating.recordings import Match, Matched, Recording, identity, match
from refgrad.conformance.locating.repeating import Unsteady, run_steadily
from refgrad.conformance.locating.sides import Live, Side, in_precision
from refgrad.conformance.locating.verdicts import GRADIENT, OUTPUT, Seen, Sided, Tensor, seen_of
from refgrad.conformance.oracles.comparison import EXACT
from refgrad.conformance.problems.feeds import widened
from refgrad.conformance.problems.observation import Built
from refgrad.conformance.problems.point import largest, rounding
from refgrad.conformance.problems.problem import Problem
from refgrad.conformance.problems.ranges import OutOfRange, changing
from refgrad.conformance.problems.rounding import limits
from refgrad.conformance.problems.systems.builders import CrashError
from refgrad.conformance.verdicts import CONVENTION, MISSING, RIGHT, UNDECIDED, WRONG
from refgrad.errors import OptionError, RefgradError, choices, counted, raised


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
        self._not_zero: list[str] = []
        self.unsteady: Unsteady | None = None
        self._moving: dict[str, float] = {}
        self.ranges: tuple[OutOfRange, ...] = ()
        self._built: Built | None = None
        self._feeds: dict[str, Any] = {}
        self._bisected: Bisected | None = None
        self._located: Located | None = None
        self._origins: tuple[Origin, ...] = ()
        self._steps: Mapping[str, Callable[[], None]] = {}
        self.unsearched: dict[str, str] = {}
        self._paths: tuple[ErrorPath, ...] = ()
        self._around: tuple[Neighbourhood, ...] = ()
        self._between: tuple[str, ...] = ()

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
            self._not_zero = [name for name, value in self.judge.truth.gradients.items() if np.any(value)]
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
        problem = Problem("model", model, tuple(point.names), feeds, by_output(point), judge.seed)
        self.tell("building the gradient")
        self._built = built = side.build(problem)
        self._feeds = built.feeds(feeds, problem.cotangents)
        self.tell("the gradient in double")
        in_double = built.named(NumpyBackend().prepare(built.model, precision="float64").run(widened(self._feeds)))
        self.wrong_in_double = [
            name for name, value in judge.truth.gradients.items() if not is_exact(judge, name, in_double.get(name))
        ]
        self._not_zero = [name for name, value in judge.truth.gradients.items() if np.any(value)]
        if not self.wrong_in_double and judge.contradicted(in_double, EXACT):
            self.wrong_in_double = judge.differing(in_double)
        self.tell("running the gradient, and again")
        results, self.unsteady = run_steadily(side.backend, built.model, self._feeds)
        made = built.named(results)
        zero = {name: np.zeros_like(point.wide[name]) for name in point.names if name not in built.gradients}
        self.gradients = made | zero
        self.tell("running the model, and again")
        results, unsteady = run_steadily(side.backend, model, feeds)
        self.outputs = {n: np.asarray(v) for n, v in results.items()}
        if self.unsteady is not None:
            moved = self.unsteady.results
            self._moving |= {name: moved[made] for name, made in built.gradients.items() if made in moved}
        if unsteady is not None:
            self._moving |= unsteady.results
        self.unsteady = self.unsteady or unsteady

    # What it is worth

    def seen(self, name: str, theirs: np.ndarray | None, match: Match) -> Seen:
        """The verdict on a gradient."""
        judge = self.truth_of_side
        if theirs is None:
            return Seen(MISSING, self.failed or "it has no such tensor")
        if moved := self.moves(match.names):
            return moved
        due = match.made_of(judge.truth.gradients)
        if theirs.shape != due.shape:
            is_recorded = isinstance(self.side, Recording)  # many leave out axes of size 1
            if not is_recorded or np.squeeze(theirs).shape != np.squeeze(due).shape:
                said = f"it has the shape {list(theirs.shape)} instead of {list(due.shape)}"
                return Seen(WRONG, said, cause=self._cause(theirs, due, match))
            theirs = theirs.reshape(due.shape)
        open_ = ~np.isfinite(due)
        bad = ~np.isfinite(theirs.astype(np.float64)) & ~open_
        if bad.any():
            first = tuple(map(int, np.argwhere(bad)[0]))
            said = (
                f"{np.count_nonzero(bad)} of {counted(bad.size, 'element')} are not finite; in double they are finite"
            )
            return Seen(WRONG, f"{said}; {list(first)} is {theirs[first]} instead of {due[first]:.6g}")
        seen = self._judged(np.where(open_, 0, theirs), np.where(open_, 0.0, due), match, open_)
        if open_.any():
            part = f"{np.count_nonzero(open_)} of {counted(open_.size, 'element')}"
            said = f"{part} are not finite in double: they are not judged"
            return replace(seen, reason=f"{seen.reason}; {said}" if seen.reason else said)
        return seen

    def contradicted(self, tensors: Sequence[Tensor], place: int) -> str:
        """A text about the gradients that are no derivative all together, by conventions at kinks; "" if they are one."""
        judge = self.truth_of_side
        got: dict[str, np.ndarray] = {}
        for tensor in tensors:
            value = self.gradients.get(tensor.name)
            is_whole = tensor.kind == GRADIENT and tensor.of == (tensor.name,) and value is not None
            if is_whole and seen_of(tensor, place).verdict in (RIGHT, CONVENTION):
                got[tensor.name] = np.asarray(value, np.float64)
        kinds = {seen_of(tensor, place).verdict for tensor in tensors if tensor.name in got and tensor.kind == GRADIENT}
        if CONVENTION not in kinds and not judge.contradicts_itself:
            return ""
        self.tell("conventions together, along directions")
        return judge.contradicted(got, rounding(len(judge.gradient.graph.node), judge.point))

    def moves(self, names: Iterable[str]) -> Seen | None:
        """The verdict on a tensor of these names, if runs with the same inputs differ in it."""
        apart = max((self._moving[name] for name in names if name in self._moving), default=None)
        if self.unsteady is None or apart is None:
            return None
        told = (
            f"two runs with the same inputs differ by {apart:.2g}"
            if np.isfinite(apart)
            else "a later run gives something else"
        )
        return Seen(self.unsteady.kind, told, apart)

    def _judged(self, theirs: np.ndarray, due: np.ndarray, match: Match, open_: np.ndarray) -> Seen:
        judge = self.truth_of_side
        wide = theirs.astype(np.float64)
        error, size = np.abs(wide - due), largest(due)
        bits = max(min(1 - round(float(np.log2(limits(theirs.dtype)[0]))), judge.truth.bits), 2)
        tolerance = max(rounding(len(judge.gradient.graph.node), judge.point), 16 * limits(theirs.dtype)[0])
        found = within_rounding(
            error,
            due,
            judge.effects(match, open_),
            judge.tolerated(match, tolerance),
            bits,
            coarser=judge.has_kinks,
            gives_up=lambda left, drawn: self._is_exactly_wrong(match) or (not judge.has_kinks and is_far(left, drawn)),
        )
        if found.outcome == BEYOND:
            return self._disputed(wide, due, error, found.allowed, match, tolerance)
        most = float(error.max(initial=0.0))
        numbers = most / size if size else 0.0, largest(found.allowed) / size if size else tolerance
        if self._is_exactly_wrong(match):
            return Seen(
                WRONG, "rounding could hide it, but in double this side's own gradient model is wrong", *numbers
            )
        if found.outcome == HIDDEN:
            return Seen(UNDECIDED, found.note, *numbers)
        return Seen(RIGHT, f"it is {ZERO}" if found.outcome == ZERO else "", *numbers)

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
        beyond = (error > judge.tolerated(match, tolerance)) & ~((error <= explained) & np.isfinite(explained))
        beyond |= ~(error < np.inf)
        if not beyond.any():
            beyond = ~((error <= explained) & np.isfinite(explained))
        with np.errstate(all="ignore"):
            worst = np.unravel_index(int(np.argmax(np.where(beyond, error / explained, -1.0))), error.shape)
        place = [int(k) for k in worst]
        numbers = (
            float(error[worst] / size) if size else float("inf"),
            float(explained[worst] / size) if size else tolerance,
        )
        off = f"{np.count_nonzero(beyond)} of {counted(beyond.size, 'element')} are off"
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
                    told = (
                        f"{counted(int(count), 'element is', 'elements are')} at a kink, between both derivatives{part}"
                    )
                    return Seen(CONVENTION, told, *numbers)
                if apart and not (beyond & ~mask).any():
                    return Seen(WRONG, f"at a kink, but not between the derivatives from both sides: {apart}", *numbers)
                skipped = counted(int(np.count_nonzero(mask)), "element at a kink is", "elements at a kink are")
                said += f"; {skipped} not counted" if not apart else f"; {apart}"
        if drawn := self.draws():
            return Seen(UNDECIDED, f"{said}; {drawn}", *numbers)
        verdicts = {judge.confirmed(name) for name in match.names if name in judge.point.wide}
        if WRONG in verdicts:
            return Seen(UNDECIDED, f"{said}; but central differences contradict the judge's gradient too", *numbers)
        if verdicts == {CONVENTION}:
            return Seen(UNDECIDED, f"{said}; the point is at a kink", *numbers)
        if computed := self.matched.computed:
            why = (
                f"the exporter may have computed {choices(computed, 3)} from weights, which then have no gradient here"
            )
            return Seen(UNDECIDED, f"{said}; {why}", *numbers)
        return Seen(WRONG, said, *numbers, self._cause(wide, due, match))

    def draws(self) -> str:
        """A text about random numbers in the model, which another system draws otherwise; "" if there are none."""
        operators = self.truth_of_side.point.draws
        is_judge = isinstance(self.side, Live) and type(self.side.backend).__module__ == NumpyBackend.__module__
        if not operators or is_judge:
            return ""
        told = f"no two systems draw the same random numbers ({choices(operators)})"
        return f"{told}. Turn them off to compare: training_mode=False"

    def _cause(self, got: np.ndarray, due: np.ndarray, match: Match) -> str:
        """The change that makes the right gradient this one, if it is a usual one."""
        point, gradients = self.truth_of_side.point, self.truth_of_side.truth.gradients
        shapes = [np.shape(array) for array in (*point.feeds.values(), *self.truth_of_side.outputs.values())]
        return cause_of(got, due, match.recorded if match.added else match.names[0], gradients, shapes)

    def forget(self) -> None:
        """Give back what the verdicts needed: the search needs memory too."""
        self.outputs, self.gradients = {}, {}
        self.truth_of_side.forget()
        self.judge.forget()

    def explained(self, tensors: Sequence[Tensor], place: int) -> dict[int, Seen]:
        """The verdicts on what is not right because a value leaves its type, by the positions of the tensors."""
        doubtful = {
            k: seen_of(t, place) for k, t in enumerate(tensors) if seen_of(t, place).verdict in (WRONG, UNDECIDED)
        }
        if not doubtful:
            return {}
        self.tell("values that leave their types")
        point = self.truth_of_side.point
        if self._built is None:
            model, feeds, names = self.judge.gradient, {**point.feeds, **point.cotangents}, point.names
        else:
            model, feeds, names = self._built.model, self._feeds, self._built.gradients
        left = {(one.output, one.kind): one for one in changing(model, feeds)}
        for one in changing(point.model, point.feeds):
            before = left.get((one.output, one.kind), replace(one, changes=()))
            changes = {changed.name: changed for changed in (*before.changes, *one.changes)}
            left[one.output, one.kind] = replace(before, changes=tuple(changes.values()))
        self.ranges = tuple(left.values())
        found = {}
        for k, seen in doubtful.items():
            of = {names.get(name, name) for name in tensors[k].of}
            for cause in self.ranges:
                if of & {changed.name for changed in cause.changes}:
                    found[k] = replace(seen, cause=f"{cause.kind} of {cause.output!r}")
                    break
        return found

    # Where it goes wrong

    def plan(self, disputed: Sequence[Tensor], place: int) -> None:
        """Decide where the search looks for the faults in some tensors: at rules, at kernels."""
        side, built = self.side, self._built
        if not isinstance(side, Live) or not (disputed or self.failed):
            return
        steps: dict[str, Callable[[], None]] = {}
        if built is None or self.wrong_in_double or narrowing_casts(built.model, self.truth_of_side.point.model):
            steps["the rules"] = partial(self._look_at_rules, side)
        wrong = [tensor for tensor in disputed if not set(tensor.of) <= set(self.wrong_in_double)]
        # To look at one run of an executor whose runs differ would blame what happened to be wrong in it.
        if built is not None and not self.draws() and self.unsteady is None:
            kinds = {tensor.kind for tensor in wrong}
            if self.failed or GRADIENT in kinds or self.wrong_in_double or not wrong:
                # Where a rule explains each wrong gradient, kernels may be wrong beside it.
                explained = not self.failed and GRADIENT not in kinds and bool(self.wrong_in_double)
                steps["the kernels of the gradient"] = partial(
                    self._look_at_kernels, side, built.model, self._feeds, unless_right=explained
                )
            if OUTPUT in kinds:  # a node may be needed by outputs alone
                point = self.truth_of_side.point
                steps["the kernels of the model"] = partial(self._look_at_kernels, side, point.model, point.feeds)
            open_ = [tensor for tensor in disputed if "not finite" in seen_of(tensor, place).reason]
            if open_:  # what is not finite in double either is nobody's fault
                results = {built.gradients.get(name, name) for tensor in open_ for name in tensor.of}
                steps["the origins of NaN"] = partial(self._look_for_origins, side, built, results)
        self._steps = steps
        self.unsearched = dict.fromkeys(steps, "")

    def search(self) -> None:
        """Look for the rules and kernels at fault. What is known if it is stopped is kept, and `unsearched` has the rest."""
        for name, look in self._steps.items():
            try:
                look()
            except (RefgradError, MemoryError) as error:
                self.unsearched[name] = str(error) or "there is not enough memory"
            else:
                del self.unsearched[name]

    def _look_at_rules(self, side: Live) -> None:
        judge = self.truth_of_side
        point = judge.point
        name = str(side).partition("@")[0]
        wrong_names = self.wrong_in_double
        right = [name for name in self._not_zero if name not in wrong_names]

        def so_far(bisected: Bisected) -> None:
            self._bisected = bisected
            self.tell("rules, by gradients of parts", bisected.built)

        names = list(point.names)
        self._bisected = bisect(
            point.model, point.feeds, side.build, judge.seed, name, wrong_names, names, right, so_far
        )

    def _look_at_kernels(
        self, side: Live, model: ModelProto, feeds: Mapping[str, Any], unless_right: bool = False
    ) -> None:
        if unless_right and computes_right(model, feeds, side.backend):
            return
        before = self._located

        def so_far(located: Located) -> None:
            self._located = located if before is None else before.beside(located, model)

        so_far(locate(model, feeds, side.backend, self.tell, so_far))

    def _look_for_origins(self, side: Live, built: Built, results: Collection[str]) -> None:
        self.tell("the origins of NaN")
        of = self.truth_of_side.point.model
        self._origins = origins(built.model, self._feeds, side.backend, of, results=results)

    def trace(self, tensors: Sequence[Tensor], place: int) -> None:
        """Follow the errors from the nodes at fault to the wrong tensors, and keep the graphs around these nodes."""
        wrong = [tensor for tensor in tensors if seen_of(tensor, place).verdict == WRONG and len(tensor.of) == 1]
        try:
            if isinstance(self.side, Recording):
                self._between = self._explaining(tensors, wrong, place)
            self._paths, self._around = self._traced(wrong, place)
        except (RefgradError, LookupError):  # a value is no tensor: the nodes are named all the same
            return

    def _explaining(self, tensors: Sequence[Tensor], wrong: Sequence[Tensor], place: int) -> tuple[str, ...]:
        """The nodes that explain which of the recorded gradients are wrong; none where that has another cause."""
        point = self.judge.point
        names = {tensor.of[0] for tensor in wrong if tensor.kind == GRADIENT and not seen_of(tensor, place).cause}
        right = {
            name
            for tensor in tensors
            if tensor.kind == GRADIENT and seen_of(tensor, place).verdict == RIGHT
            for name in tensor.of
            if name in self._not_zero
        }
        return between(paths.TracedGraph(point.model, point.feeds), names, right) if names else ()

    def _traced(self, wrong: Sequence[Tensor], place: int) -> tuple[tuple[ErrorPath, ...], tuple[Neighbourhood, ...]]:
        judge, built = self.truth_of_side, self._built
        point, located = judge.point, self._located
        traced, around = list[ErrorPath](), list[Neighbourhood]()
        faults = () if self._bisected is None else self._bisected.faults
        if faults:
            graph = paths.TracedGraph(point.model, point.feeds)
            blamed = [graph.positions(fault.nodes) for fault in faults]
            errors = {}
            if built is not None:
                fed = {**point.feeds, **point.cotangents}
                errors = paths.adjoint_errors(graph, built, self._feeds, judge.gradient, fed)
            of_rules = [
                Wrong(t.name, t.of[0], seen_of(t, place).error)
                for t in wrong if t.kind == GRADIENT and t.of[0] in self.wrong_in_double
            ]  # fmt: skip
            traced += paths.of_rules(graph, [k for nodes in blamed for k in nodes], of_rules, errors)
            around += [paths.around(graph, nodes, None if built is None else built.model) for nodes in blamed if nodes]
        if located is None or not isinstance(self.side, Live):
            return tuple(traced), tuple(around)
        blamed_names = [one.found.outputs[:1] for one in located.culprits] + [group.nodes for group in located.groups]
        models = [(point.model, point.feeds, OUTPUT, dict[str, str]())]
        if built is not None:
            models.insert(0, (built.model, self._feeds, GRADIENT, built.gradients))
        drawn = set[tuple[str, ...]]()
        for model, feeds, kind, names in models:
            of_kind = [
                Wrong(t.name, names.get(t.of[0], t.of[0]), seen_of(t, place).error) for t in wrong if t.kind == kind
            ]
            if not blamed_names or not (of_kind or self.failed):
                continue
            graph = paths.TracedGraph(model, feeds)
            found = {named: graph.positions(named) for named in blamed_names}
            traced += paths.of_kernels(
                graph, [k for nodes in found.values() for k in nodes], of_kind, self.side.backend
            )
            around += [paths.around(graph, nodes) for named, nodes in found.items() if nodes and named not in drawn]
            drawn |= {named for named, nodes in found.items() if nodes}
        return tuple(traced), tuple(around)

    @property
    def has_proved_node(self) -> bool:
        """True if the repair of nodes takes the whole error away, or a rule is wrong."""
        if self._bisected is not None and self._bisected.faults:
            return True
        return self._located is not None and bool(self._located.culprits) and not self._located.unexplained

    @property
    def has_no_wrong_node(self) -> bool:
        """True if the search looked at each node, and found nothing that explains what is off."""
        located = self._located
        if (
            located is None
            or not located.is_right
            or located.acquitted
            or located.unjudged
            or self.ranges
            or self._origins
        ):
            return False
        is_rule = self._bisected is not None and bool(self._bisected.faults)
        return not self.wrong_in_double and not is_rule and self.unsteady is None and not self.unsearched

    def told(self) -> Sided:
        """The findings about this side."""
        return Sided(
            str(self.side),
            self.failed,
            self._bisected,
            self._located,
            self._origins,
            self.matched.left,
            len(self.matched.found),
            self.unsteady,
            self.ranges,
            dict(self.unsearched),
            self._paths,
            self._around,
            isinstance(self.side, Recording),
            self._between,
        )

    def tell(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Say what is being done, how far it is, and how far it goes."""
        if self._progress is not None:
            self._progress(f"{self.side}: {what}", done, total)
