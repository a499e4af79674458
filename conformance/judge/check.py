"""Is a gradient right? Every dialect on every backend, against differences and against the gradient in float64.

Two questions are asked. Is the mathematics right? Each dialect's gradient, run in float64 on the NumPy interpreter, is
compared with central differences along random directions, which do not know any rule. Does a backend compute it? The gradient
in the model's own types is compared with the float64 one, element by element. An error is compared with its explanations: the
error estimate of the differences, the rounding of the type, and how far the float64 gradient itself moves when each
intermediate result is rounded (cancellation and kinks can move it far).
"""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad import interruption
from refgrad.backends import Backend, available, get_backend
from refgrad.backends.base import ModelLike, check_feeds, load_model
from refgrad.backends.discovery import BUILT_IN
from refgrad.backends.numpy.kernels.control_flow import bounded_loops
from refgrad.conformance.judge.deviation import deviation
from refgrad.conformance.judge.elementwise import against_float64
from refgrad.conformance.judge.found import BUILDER, ENDED, FLOAT64, Check, Row
from refgrad.conformance.judge.nan.nonfinite import Origin, origins
from refgrad.conformance.judge.rows import says_unsupported
from refgrad.conformance.oracles.comparison import (
    EXACT,
    NOT_FINITE,
    Judged,
    against_directions,
    bent,
    gravest,
    told_by_the_neighbour,
)
from refgrad.conformance.oracles.differences import NAME as DIFFERENCES
from refgrad.conformance.oracles.differences import estimates
from refgrad.conformance.oracles.grouped import FEWEST, grouped_estimates
from refgrad.conformance.oracles.joint import contradicted
from refgrad.conformance.problems.feeds import SIZE
from refgrad.conformance.problems.kinked import OPERATORS as KINKED
from refgrad.conformance.problems.kinked import kinked as elements_at_kinks
from refgrad.conformance.problems.kinked import kinks_of
from refgrad.conformance.problems.observation import Directional, NotApplicable, Observation
from refgrad.conformance.problems.point import (
    Point,
    Truth,
    by_name,
    in_float64,
    inputs_of,
    rounding,
    with_computed_sizes,
    with_values,
    without,
)
from refgrad.conformance.problems.systems.apart import Apart
from refgrad.conformance.problems.systems.executors import REFERENCE, get_executor
from refgrad.conformance.problems.undefined import undefined
from refgrad.conformance.problems.weights import randomize
from refgrad.conformance.verdicts import (
    CONVENTION,
    CRASHED,
    OUT_OF_MEMORY,
    RIGHT,
    UNDECIDED,
    UNSUPPORTED,
    WRONG,
)
from refgrad.derivatives import ortbuilder
from refgrad.errors import (
    AnswerError,
    BackendError,
    BuilderError,
    FeedError,
    OptionError,
    RefgradError,
    WorkerError,
    choices,
)
from refgrad.model.checks.malformed import explained
from refgrad.protos.traverse import every_node
from refgrad.ranges import RANGES, checked
from refgrad.reverse.gradient import gradient as differentiate
from refgrad.reverse.ranks import of_any_rank
from refgrad.worker import SECONDS

Progress = Callable[[int, int, str], None]  # how many steps are done, of how many, and the next step
DIALECTS = ("onnx", "ort")

_OF_RANGE = ("overflow", "underflow")  # kinds of origins
_OF_KINKS = ("a dead branch",)
_HALVINGS = 2  # of groups of gradients, before executors are asked
_NEITHER = "nor does it run the model itself"
_OPERATOR = re.compile(r"(\w[\w.]*:\w+)\(-?\d+\) is not a registered")  # in an error of ONNX Runtime
_ENOUGH = 100_000  # iterations of a loop whose inputs are random


@explained
def check(
    model: ModelLike,
    feeds: Mapping[str, Any] | None = None,
    *,
    wrt: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    dialects: Sequence[str] | None = None,
    seed: int = 0,
    size: int = SIZE,
    sizes: Mapping[str, int] | None = None,
    directions: int = 2,
    tolerance: float | None = None,
    random_weights: int | None = None,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> Check:
    """Differentiate `model` and compare its gradient with every oracle there is, on every backend.

    :param feeds: the point, random by default; for an initializer, a value in place of its own.
    :param size: the number of elements of random feeds along symbolic and unknown dimensions; `sizes` has it by symbol.
    :param backends: the executors: names, or "package.module:Class". By default all available executors.
    :param dialects: by default onnx, and ort on the executors that have its kernels.
    :param directions: how many random directions differences are taken along, for each gradient.
    :param tolerance: the relative error that needs no explanation; by default what the type and the number of nodes explain.
    :param random_weights: a seed; weights that are constant fills become random numbers first (`weights.randomize`).
    :param seconds: the time limit of ONNX Runtime's own builder, where it is installed, and of each run of an executor from
        another package, which runs in a process of its own.
    :param progress: called with the number of steps that are done, the number of all, and the next step.
    :raises RefgradError: what `refgrad.gradient` refuses; feeds that do not fit; an unknown backend.
    """
    if due := RANGES["directions"].why_not(directions):
        raise OptionError(f"directions={reprlib.repr(directions)}: at least one direction is needed; give {due}.")
    if tolerance is not None:
        checked("tolerance", tolerance)
    checked("seed", seed)
    if random_weights is not None:
        checked("random_weights", random_weights)
    names = list(backends) if backends is not None else available()
    if not names:
        raise OptionError(f"backends is empty; there are {choices(available())}.")
    executors = {name: _executor(name, seconds) for name in names}
    proto = load_model(model, lift=True)
    if random_weights is not None:
        proto = randomize(proto, random_weights)[0]
    if feeds is not None:
        feeds = check_feeds(feeds, inputs_of(proto))
        proto, feeds = with_values(proto, feeds)
    with of_any_rank():  # the feeds have one
        gradients = {dialect: differentiate(proto, wrt, outputs, dialect=dialect) for dialect in dialects or DIALECTS}
    # A loop that goes on while a condition holds need not end at random feeds.
    with ExitStack() as stack:
        stack.enter_context(bounded_loops(_ENOUGH) if feeds is None else nullcontext())
        for executor in executors.values():
            if isinstance(executor, Apart):
                stack.callback(executor.close)
        try:
            trusted = [one for name, one in executors.items() if name in BUILT_IN and name != "numpy"]
            point = Point.choose(proto, next(iter(gradients.values())), feeds, seed, size, sizes, trusted)
        except BackendError as error:
            if "the loop still goes on" not in str(error):
                raise
            raise FeedError(f"With random feeds {error} Give feeds with which it ends: feeds={{...}}.") from error
        gradients = {dialect: with_computed_sizes(written, point) for dialect, written in gradients.items()}
        found = _checked(point, gradients, executors, seed, directions, tolerance, seconds, progress or _quietly)
        return found if dialects else _without_skipped(found)


def _executor(name: str, seconds: float) -> Backend:
    """The executor; in a process of its own unless it is one of refgrad's or onnx's: a stranger's may end the process."""
    executor = get_executor(name)
    return executor if name in BUILT_IN or name == REFERENCE else Apart(name, seconds)


def _without_skipped(found: Check) -> Check:
    """The result without what nobody asked for: a dialect on an executor that has no kernels for it."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found.rows:
        if row.dialect in DIALECTS[1:] and row.oracle == FLOAT64:
            groups.setdefault((row.dialect, row.backend), []).append(row)
    skipped = {key: rows for key, rows in groups.items() if all(row.verdict == UNSUPPORTED for row in rows)}
    said = tuple(
        f"dialect {dialect} on {backend}, {_lacking(rows[0].note)}" for (dialect, backend), rows in skipped.items()
    )
    rows = tuple(row for row in found.rows if row.oracle != FLOAT64 or (row.dialect, row.backend) not in skipped)
    return replace(found, rows=rows, skipped=(*said, *found.skipped))


def _lacking(note: str) -> str:
    """Why an executor does not run a dialect, from its error."""
    if note.startswith(_NEITHER):
        return "which does not run the model itself"
    operator = _OPERATOR.search(note)
    return f"which has no kernel for {operator[1]}" if operator else "which has no kernels for it"


def _quietly(done: int, steps: int, what: str) -> None:
    """Nobody asks for the progress."""


def _checked(
    point: Point,
    gradients: Mapping[str, ModelProto],
    executors: Mapping[str, Backend],
    seed: int,
    directions: int,
    tolerance: float | None,
    seconds: float,
    progress: Progress,
) -> Check:
    """Compare the gradients at a point with every oracle, on every backend."""
    done, steps = count(), 3 + len(gradients) * (1 + len(executors))

    def tell(what: str) -> None:
        progress(next(done), steps, what)

    failed: list[Row] = []
    truths: dict[str, Truth] = {}
    for dialect, written in gradients.items():
        tell(f"{dialect} in float64")
        try:
            named = point.named_by(written)
            got = by_name(in_float64(written).run(named.wide | named.seeds), named.names)
        except BackendError as error:
            failed += _without_result(point, dialect, "numpy float64", DIFFERENCES, _verdict_on(error), str(error))
        else:
            truths[dialect] = Truth(named, written, got)
    if not truths:
        return Check(tuple(point.names), tuple(point.seeds_of), seed, point.described, tuple(failed))
    work = _Comparison(truths, gradients, executors, seed, directions, tolerance, tell)
    sound, stopped, of_builder = next(iter(truths)), "", []
    try:  # small groups and single gradients take long and come last: when the time is over, the others are known
        work.observe_groups(_HALVINGS)
        work.run(truths[sound])
        work.observe_groups()
        work.observe_the_rest()
        if (other := work.sound) != sound:
            sound = other
            work.run(truths[sound])
        if "ort-cpu" in executors and ortbuilder.available():
            of_builder = work.of_builder(sound, seconds)
    except interruption.STOPS as stop:
        interruption.finish()
        stopped = interruption.why(stop)
    rows = (*failed, *work.by_differences(stopped), *work.by_executors, *of_builder)
    skipped = tuple(f"dialect {dialect} on {name}, {stopped}" for dialect, name in work.left)
    return Check(tuple(point.names), tuple(point.seeds_of), seed, point.described, rows, skipped, tolerance, stopped)


class _Comparison:
    """The comparison of the gradients in float64 with differences, and of each executor with them, as far as it got."""

    def __init__(
        self,
        truths: Mapping[str, Truth],
        gradients: Mapping[str, ModelProto],
        executors: Mapping[str, Backend],
        seed: int,
        directions: int,
        tolerance: float | None,
        tell: Callable[[str], None],
    ) -> None:
        self._truths, self._gradients, self._executors = truths, gradients, executors
        self._seed, self._directions, self._tolerance, self._tell = seed, directions, tolerance, tell
        self._exact = tolerance or EXACT
        self._first = next(iter(truths.values()))
        self._point = self._first.point
        self._observations: list[Observation] = []
        self._judged: dict[tuple[str, str], Row] = {}  # by dialect and gradient
        self.by_executors: list[Row] = []
        self.left: list[tuple[str, str]] = [*itertools.product(gradients, executors)]

    def observe_groups(self, halvings: int | None = None) -> None:
        """Judge the gradients that agree with differences which move many inputs at once.

        :param halvings: how often a group is halved that does not agree; by default as long as it has several gradients.
        """
        self._tell("differences of many gradients at once")
        point, rng = self._point, np.random.default_rng([self._seed, 8, len(self._judged)])
        left = {name: self._first.gradients[name] for name in self._unjudged}
        for found in grouped_estimates(
            point.evaluate,
            point.wide,
            left,
            point.cotangent_of,
            rng,
            tolerance=self._exact,
            directions=self._directions,
            fewest=FEWEST if halvings is None else max(FEWEST, len(left) >> halvings),
        ):
            self._observations += found
            told = {one.name for one in found}
            self._judge([name for name in point.names if name in told])

    @property
    def _unjudged(self) -> list[str]:
        dialect = next(iter(self._truths))
        return [name for name in self._point.names if (dialect, name) not in self._judged]

    def observe_the_rest(self) -> None:
        """Judge every other gradient, one by one."""
        self._tell("differences of single gradients")
        point, rng = self._point, np.random.default_rng([self._seed, 1])
        names = self._unjudged
        self._observations += estimates(
            point.evaluate, point.wide, names, point.cotangent_of, rng, directions=self._directions
        )
        self._judge(names)

    def _judge(self, names: Sequence[str]) -> None:
        for dialect, truth in self._truths.items():
            rows = _against_observations(truth, dialect, names, self._observations, self._seed, self._exact)
            self._judged |= {(dialect, row.gradient): row for row in rows}

    def by_differences(self, stopped: str = "") -> list[Row]:
        """A row for each gradient in float64. Those that were not judged are undecided, because it was `stopped`."""
        pairs = itertools.product(self._truths, self._point.names)
        return [
            self._judged.get((dialect, name))
            or Row(name, dialect, "numpy float64", DIFFERENCES, UNDECIDED, note=stopped)
            for dialect, name in pairs
        ]

    @property
    def sound(self) -> str:
        """The first dialect whose gradients in float64 no difference contradicts; the first of all if there is none."""
        wrong = {row.dialect for row in self._judged.values() if row.verdict == WRONG}
        return next((dialect for dialect in self._truths if dialect not in wrong), next(iter(self._truths)))

    def run(self, truth: Truth) -> None:
        """Compare every executor with the gradients in float64."""
        self.by_executors = []
        self.left = [*itertools.product(self._gradients, self._executors)]
        while self.left:
            dialect, name = self.left[0]
            self._tell(f"{dialect} on {name}")
            gradient = self._gradients[dialect]
            self.by_executors += _on_backend(
                truth, gradient, dialect, name, self._executors[name], self._allowed(gradient)
            )
            del self.left[0]

    def of_builder(self, sound: str, seconds: float) -> list[Row]:
        """The rows of ONNX Runtime's own builder."""
        settled = {name: row.verdict for (dialect, name), row in self._judged.items() if dialect == sound}
        allowed = self._allowed(self._gradients[sound])
        return _of_builder(self._truths[sound], self._observations, settled, allowed, seconds)

    def _allowed(self, gradient: ModelProto) -> float:
        return self._tolerance or rounding(len(gradient.graph.node), self._point)


# Against differences


def _against_observations(
    truth: Truth, dialect: str, names: Sequence[str], observations: Sequence[Observation], seed: int, tolerance: float
) -> list[Row]:
    """The gradients by `names` against differences: the rows are wrong only where no kink explains it."""
    got, point = truth.gradients, truth.point
    rows = [
        _row(
            name,
            dialect,
            "numpy float64",
            DIFFERENCES,
            _against_differences(truth, name, got[name], observations, tolerance),
        )
        for name in names
    ]
    doubtful = {row.gradient for row in rows if row.verdict == WRONG and np.all(np.isfinite(got[row.gradient]))}
    kinks = told_by_the_neighbour(truth, doubtful, seed, tolerance) if doubtful else set()
    note = f"it agrees right beside this point: {choices(kinks_of(point.model))}"
    rows = [replace(row, verdict=CONVENTION, note=note) if row.gradient in kinks else row for row in rows]
    rows = _by_origins(rows, truth.model, point, get_backend("numpy"), in_double=True)
    rows = [_apart(row, truth, seed, tolerance) if row.verdict == CONVENTION else row for row in rows]
    rows = _together(rows, truth, seed, tolerance)
    open_at = undefined(point.model, point.forward, point.wide) if any(row.verdict == WRONG for row in rows) else ""
    return [_settled(row, open_at) for row in rows]


def _against_differences(
    truth: Truth, name: str, got: np.ndarray, observations: Sequence[Observation], tolerance: float, exact: bool = True
) -> Judged:
    """The worst of the directions along which there is a difference; undecided where there is none along some."""
    differences = [item for item in observations if isinstance(item, Directional) and item.name == name]
    silent = [item.why for item in observations if isinstance(item, NotApplicable) and item.name in (name, "")]
    if silent and not differences and not np.all(np.isfinite(got)):
        return Judged(UNDECIDED, note=f"neither the gradient nor a difference is finite: {silent[0]}")
    judged = against_directions(truth, name, got, differences, tolerance, exact=exact)
    return gravest([judged, *(Judged(UNDECIDED, note=why) for why in silent)])


def _apart(row: Row, truth: Truth, seed: int, tolerance: float) -> Row:
    """The verdict on a gradient with some elements at a kink: a convention, unless an error is left without these elements."""
    point, name = truth.point, row.gradient
    kinked = elements_at_kinks(point.model, point.forward, point.wide, [name], point.seeds_of).get(name)
    if kinked is None or kinked.all():
        return row
    rest = without(truth.gradients[name], kinked)
    around = Truth(point, truth.model, {name: rest}, kinked={name: kinked})
    rng = np.random.default_rng([seed, 6])
    observations = estimates(point.evaluate, point.wide, [name], point.cotangent_of, rng, still={name: kinked})
    judged = _against_differences(around, name, rest, observations, tolerance)
    if judged.verdict != WRONG or bent(point, name, rng, still=kinked):  # or some slight kink was not found
        return row
    note = f"{judged.note}; elements at a kink do not move: {np.count_nonzero(kinked)} of {kinked.size}"
    return _row(name, row.dialect, row.backend, row.oracle, replace(judged, note=note))


def _together(rows: list[Row], truth: Truth, seed: int, tolerance: float) -> list[Row]:
    """The rows; wrong where gradients with a convention are no derivative all together."""
    if all(row.verdict != CONVENTION for row in rows):
        return rows
    got = {row.gradient: truth.gradients[row.gradient] for row in rows if row.verdict in (RIGHT, CONVENTION)}
    note = contradicted(truth, got, tolerance, np.random.default_rng([seed, 7]))
    return [replace(row, verdict=WRONG, note=note) if note and row.verdict == CONVENTION else row for row in rows]


def _row(name: str, dialect: str, backend: str, oracle: str, judged: Judged) -> Row:
    return Row(
        name, dialect, backend, oracle, judged.verdict, judged.absolute, judged.relative, judged.allowed, judged.note
    )


# On a backend


def _on_backend(
    truth: Truth, gradient: ModelProto, dialect: str, backend: str, executor: Backend, tolerance: float
) -> list[Row]:
    point = truth.point.named_by(gradient)
    try:
        results = executor.prepare(gradient).run(point.feeds | point.cotangents)
    except BackendError as error:
        return _without_result(point, dialect, backend, FLOAT64, *_told_by_the_model(point, executor, error))
    got = by_name(results, point.names)
    own = backend != "numpy"
    rows = [
        _row(name, dialect, backend, FLOAT64, against_float64(truth, name, got[name], tolerance, own))
        for name in point.names
    ]
    rows = _by_origins(rows, gradient, point, executor)
    if all(row.verdict != WRONG for row in rows):
        return rows
    if why := undefined(point.model, point.forward, point.wide):
        return [_settled(row, why) for row in rows]
    wrong = [row for row in rows if row.verdict == WRONG]
    largest_error = max(row.relative or 0.0 for row in wrong)
    excess = max(row.relative / row.allowed if row.relative and row.allowed else np.inf for row in wrong)
    if known_deviation := deviation(truth, backend, largest_error, excess):
        why = f"{known_deviation.what}; {known_deviation.reason}"
        return [_settled(row, why) if known_deviation.reason else _noted(row, known_deviation.what) for row in rows]
    return rows


def _by_origins(
    rows: list[Row], gradient: ModelProto, point: Point, executor: Backend, in_double: bool = False
) -> list[Row]:
    """The rows; where a gradient that disagrees is not finite, with the node at which that begins.

    It is nobody's fault where the derivative of an operator does not exist there, or a number leaves the range of its type.
    """
    bad = [row for row in rows if row.verdict == WRONG and NOT_FINITE in row.note]
    if not bad:
        return rows
    feeds = (point.wide | point.seeds) if in_double else (point.feeds | point.cotangents)
    names = {value.name for value in gradient.graph.input}
    fed = {name: value for name, value in feeds.items() if name in names}
    roots = [origin for origin in origins(gradient, fed, executor, point.model, in_double) if not origin.of]
    if not roots:
        return rows
    begins_at = f"it begins at {roots[0]}"
    explain = _settled if _explained_by(roots, point.model) else _noted
    return [explain(row, begins_at) if row in bad else row for row in rows]


def _explained_by(roots: Sequence[Origin], model: ModelProto) -> bool:
    """True if each origin leaves the range of its type, or if at each there is no derivative."""
    operators = {node.name or node.output[0]: node.op_type for node in every_node(model) if node.output}
    if all(origin.kind in _OF_RANGE for origin in roots):
        return True
    at_kinks = (operators.get(origin.forward or origin.node) in KINKED or origin.kind in _OF_KINKS for origin in roots)
    return all(at_kinks)


def _settled(row: Row, why: str) -> Row:
    """The row; undecided where it is wrong and there is a reason that is not the gradient's."""
    return replace(_noted(row, why), verdict=UNDECIDED) if why and row.verdict == WRONG else row


def _noted(row: Row, why: str) -> Row:
    return replace(row, note=f"{why}; {row.note}") if row.verdict == WRONG else row


def _told_by_the_model(point: Point, executor: Backend, error: BackendError) -> tuple[str, str]:
    """The verdict on an executor that does not run a gradient, and the reason; it may not support the model itself."""
    verdict = _verdict_on(error)
    if verdict not in (UNSUPPORTED, CRASHED) or _is_death(error):
        return verdict, str(error)
    try:
        executor.prepare(point.model).run(point.feeds)
    except BackendError as of_model:
        if UNSUPPORTED in (verdict, _verdict_on(of_model)):
            return UNSUPPORTED, f"{_NEITHER}: {of_model}"
        return verdict, f"{error}; {_NEITHER}"
    return verdict, str(error)


def _is_death(error: BackendError) -> bool:
    """True if the process of an executor ended."""
    return isinstance(error.__cause__, WorkerError) and error.__cause__.verdict != "raised"


def _verdict_on(error: BackendError) -> str:
    """The verdict on an executor that fails: it is at fault unless it says that it does not support something."""
    cause = error.__cause__
    if isinstance(cause, WorkerError):
        if cause.raised == AnswerError.__name__:
            return WRONG
        if cause.verdict in ENDED:
            return cause.verdict
        return UNSUPPORTED if says_unsupported(str(error), cause.classes) else CRASHED
    if isinstance(cause, MemoryError):
        return OUT_OF_MEMORY
    is_unsupported = isinstance(cause, NotImplementedError) or says_unsupported(str(error))
    return UNSUPPORTED if is_unsupported else CRASHED


def _without_result(point: Point, dialect: str, backend: str, oracle: str, verdict: str, note: str) -> list[Row]:
    return [Row(name, dialect, backend, oracle, verdict, note=note) for name in point.names]


# ONNX Runtime's own builder


def _of_builder(
    truth: Truth,
    observations: Sequence[Observation],
    settled: Mapping[str, str],
    tolerance: float,
    seconds: float,
) -> list[Row]:
    """The gradient that ONNX Runtime builds itself, output by output. refgrad is not at fault where that is wrong."""
    point = truth.point
    total: dict[str, np.ndarray] = {}
    try:
        for output, seed in point.seeds_of.items():
            needed = ortbuilder.depends_on(point.model, output)
            names = [name for name in point.names if name in needed]
            if not names:
                continue
            built = ortbuilder.build_raw(point.model, names, output, seconds)
            prepared = get_backend("ort-cpu").prepare(built)
            known = {value.name for value in prepared.inputs}
            feeds = point.feeds | {f"{output}_grad": point.cotangents[seed]}
            results = prepared.run(
                {name: value for name, value in feeds.items() if name in known}, [f"{name}_grad" for name in names]
            )
            for name in names:
                part = results[f"{name}_grad"]
                total[name] = total[name] + part if name in total else part
    except BuilderError as error:
        return [_builder_row(name, error.verdict, str(error)) for name in point.names]
    except RefgradError as error:
        return [_builder_row(name, "refused", f"its graph does not run: {error}") for name in point.names]
    rows = []
    for name in point.names:
        if name not in total:
            rows.append(_builder_row(name, UNSUPPORTED, "no output depends on it"))
            continue
        judged = against_float64(truth, name, total[name], tolerance, own_draws=True)
        row = _row(name, BUILDER, "ort-cpu", FLOAT64, judged)
        if row.verdict == WRONG:
            wide = total[name].astype(np.float64)
            measured = _against_differences(truth, name, wide, observations, row.allowed or tolerance)
            if settled.get(name) == RIGHT and measured.verdict == WRONG:
                note = "; ".join(filter(None, (row.note, measured.note))) or "refgrad agrees with differences"
                row = replace(row, note=note)
            else:
                row = replace(row, verdict=UNDECIDED, note="differences do not settle who is right")
        rows.append(row)
    return rows


def _builder_row(name: str, verdict: str, note: str) -> Row:
    return Row(name, BUILDER, "ort-cpu", FLOAT64, verdict, note=note)
