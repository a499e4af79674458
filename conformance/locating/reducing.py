"""The smallest model that still shows a failure, as a test and a bug report.

The nodes at fault are cut out with their inputs (`compare`); then dimensions shrink and values become simple as long as the
failure stays the same: its kind, its operators and the beginning of its message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper

from refgrad import interruption
from refgrad.backends import Backend
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.judge.nan.watching import label_of
from refgrad.conformance.locating.bisection import WRONG, Fault, bisect
from refgrad.conformance.locating.location import Located, locate
from refgrad.conformance.locating.repair import RepairTrial
from refgrad.conformance.locating.replay import Replay
from refgrad.conformance.locating.scripts import building, rebuilding, running
from refgrad.conformance.locating.sides import Live, in_precision
from refgrad.conformance.locating.values import ModelValues, described
from refgrad.conformance.problems.feeds import widened
from refgrad.conformance.problems.observation import Built
from refgrad.conformance.problems.point import in_float64
from refgrad.conformance.problems.problem import Problem
from refgrad.conformance.problems.systems.builders import CrashError
from refgrad.conformance.problems.systems.surroundings import surroundings
from refgrad.errors import FeedError, RefgradError, raised
from refgrad.escaping import code, markdown
from refgrad.model.checks.malformed import explained
from refgrad.model.external import array_of
from refgrad.model.printing import onnx_text
from refgrad.model.writing import new_folder
from refgrad.protos.traverse import reads_of
from refgrad.reverse.gradient import gradient as differentiate

_TRIES = 200  # smaller models that are tried
_WORDS = 6  # of a message that have to stay
RULE, KERNEL = "rule", "kernel"


@dataclass(frozen=True)
class Failure:
    """A model and feeds that fail: what fails, how, the operators at fault, and where they are in the original model."""

    kind: str  # of `RULE` or `KERNEL`
    how: str  # wrong, refused, crashed
    operators: tuple[str, ...]
    nodes: tuple[str, ...]
    message: str
    model: ModelProto
    feeds: Mapping[str, np.ndarray]

    @property
    def signature(self) -> tuple[str, str, tuple[str, ...], str]:
        """The features of the failure that have to stay the same."""
        return self.kind, self.how, tuple(sorted(self.operators)), _skeleton(self.message)


@dataclass
class Reduced:
    """The smallest failure that was reached, what it should give and what it gives, and how many models were tried."""

    failure: Failure
    side: str
    tried: int
    interrupted: bool = False
    wrt: tuple[str, ...] = ()
    due: dict[str, np.ndarray] = field(default_factory=dict)
    found: dict[str, np.ndarray] = field(default_factory=dict)
    gradient: ModelProto | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    fed: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def runs(self) -> ModelProto:
        """The model that is run: the gradient that the builder made, or the model of the kernel."""
        return self.failure.model if self.gradient is None else self.gradient


def _skeleton(message: str) -> str:
    """The beginning of a message without what differs from model to model: names, numbers and places."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "", message)
    return " ".join(bare.split()[:_WORDS])


@explained
def reduce(
    model: ModelProto,
    side: Live,
    feeds: Mapping[str, Any],
    *,
    wrt: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Reduced:
    """Find a failure of a side, and reduce it.

    :param side: who builds the gradient and what runs it.
    :param feeds: the inputs of the model.
    :raises FeedError: nothing fails.
    :raises RefgradError: the model cannot be read, differentiated or run on the interpreter.
    """
    model, feeds = in_precision(model, feeds, side.recast)
    search = _Search(side, seed, progress)
    failure = search.first(model, feeds, wrt, outputs)
    reduced = Reduced(failure, str(side), 0, versions=surroundings(side.names))
    try:
        for smaller in search.smaller(failure):
            reduced.failure = smaller
    except KeyboardInterrupt:
        interruption.finish()
        reduced.interrupted = True
    reduced.tried = search.tried
    search.measure(reduced)
    side.close()
    return reduced


class _Search:
    """Smaller and smaller failures."""

    def __init__(self, side: Live, seed: int, progress: Callable[[str, int, int], None] | None) -> None:
        self._side, self._seed, self._progress = side, seed, progress
        self.tried = 0

    def first(
        self,
        model: ModelProto,
        feeds: Mapping[str, Any],
        wrt: Sequence[str] | None,
        outputs: Sequence[str] | None,
    ) -> Failure:
        """The first failure of the side, cut out of the model."""
        bisected = bisect(model, feeds, self._side.build, self._seed, wrt=wrt)
        if bisected.faults:
            return self._of_rule(self._of_whole(bisected.faults, model, feeds, wrt, outputs), model, feeds)
        refused: RefgradError | None = None
        try:
            problem = _problem(model, feeds, wrt, outputs, self._seed)
            built = self._side.build(problem)
            fed = built.feeds(problem.feeds, problem.cotangents)
            located = locate(built.model, fed, self._side.backend)
            if not located.is_right:
                return self._of_kernel(located, built.model, fed)
        except RefgradError as error:  # it has no gradient, and its results may be wrong all the same
            refused = error
        located = locate(model, feeds, self._side.backend)
        if not located.is_right:
            return self._of_kernel(located, model, feeds)
        raise refused or FeedError(
            f"Nothing fails: {self._side} gets the results of the model and their gradient right for these feeds. Give those "
            "with which it fails: feeds={...}."
        )

    def _of_whole(
        self,
        faults: Sequence[Fault],
        model: ModelProto,
        feeds: Mapping[str, Any],
        wrt: Sequence[str] | None,
        outputs: Sequence[str] | None,
    ) -> Fault:
        """The fault that the whole model shows: the one with its message, or else the first."""
        try:
            self._side.build(_problem(model, feeds, wrt, outputs, self._seed))
        except (RefgradError, CrashError) as error:
            whole = _skeleton(str(error))
            return next((fault for fault in faults if _skeleton(fault.message) == whole), faults[0])
        except Exception as error:  # a builder that is a function raises anything
            whole = _skeleton(f"it raised {raised(error)}")
            return next((fault for fault in faults if _skeleton(fault.message) == whole), faults[0])
        return faults[0]

    def _of_rule(self, fault: Fault, model: ModelProto, feeds: Mapping[str, Any]) -> Failure:
        values = ModelValues(model, feeds)
        part, fed = _cut(values, [n for n in values.model.graph.node if label_of(n) in fault.nodes])
        return Failure(RULE, fault.kind, fault.operators, fault.nodes, fault.message, part, fed)

    def _of_kernel(self, located: Located, model: ModelProto, feeds: Mapping[str, Any]) -> Failure:
        if located.unsteady is not None:
            raise FeedError(
                f"Nothing can be reduced: {self._side.backend.name} is not the same in every run, so a smaller model may be "
                f"right by chance. {located.unsteady}."
            )
        values = ModelValues(model, feeds)
        nodes = list(values.model.graph.node)
        message = located.failed
        if located.culprits:
            chosen = [nodes[located.culprits[0].found.position]]
            message = located.culprits[0].found.failed
        elif located.groups:
            chosen = [nodes[k] for k in located.groups[0].positions]
        else:
            chosen = nodes
        part, fed = _cut(values, chosen)
        how = "crashed" if message else WRONG
        operators = tuple(node.op_type for node in chosen)
        return Failure(KERNEL, how, operators, tuple(map(label_of, chosen)), message, part, fed)

    # Smaller

    def smaller(self, failure: Failure) -> Iterator[Failure]:
        """Each smaller failure that has the same signature: the last one is the smallest."""
        again = True
        while again and self.tried < _TRIES:
            again = False
            for model, feeds in _variants(failure.model, failure.feeds):
                if self.tried >= _TRIES:
                    return
                self.tried += 1
                if self._progress is not None:
                    self._progress("reduce", self.tried, _TRIES)
                smaller_failure = self._failing(failure, model, feeds)
                if smaller_failure is not None:
                    failure, again = smaller_failure, True
                    yield failure
                    break

    def _failing(self, failure: Failure, model: ModelProto, feeds: Mapping[str, np.ndarray]) -> Failure | None:
        """The failure of a smaller model, if it is the same one."""
        try:
            if failure.kind == RULE:
                faults = bisect(model, feeds, self._side.build, self._seed).faults
                if not faults:
                    return None
                how, operators, message = faults[0].kind, faults[0].operators, faults[0].message
            else:
                how, message = _outcome(model, feeds, self._side.backend)
                operators = failure.operators
        except (RefgradError, ValueError):
            return None
        smaller_failure = Failure(failure.kind, how, operators, failure.nodes, message, model, feeds)
        return smaller_failure if how and smaller_failure.signature == failure.signature else None

    def measure(self, reduced: Reduced) -> None:
        """Compute the results that the smallest model should give, and the ones that it gives."""
        failure = reduced.failure
        if failure.kind == KERNEL:
            reduced.fed = dict(failure.feeds)
            due = NumpyBackend().prepare(failure.model, precision="float64").run(failure.feeds)
            _declare(failure.model, due)
            like = NumpyBackend().prepare(failure.model).run(failure.feeds)
            reduced.due = {name: np.asarray(value).astype(np.asarray(like[name]).dtype) for name, value in due.items()}
            try:
                outputs = self._side.backend.prepare(failure.model).run(failure.feeds)
                reduced.found = {name: np.asarray(value) for name, value in outputs.items()}
            except RefgradError:
                pass
            return
        _declare(failure.model, NumpyBackend().prepare(failure.model).run(failure.feeds))
        problem = _problem(failure.model, failure.feeds, None, None, self._seed)
        reduced.wrt = problem.wrt
        try:
            right = Built.of(differentiate(failure.model, problem.wrt, list(problem.cotangents)))
            wide = NumpyBackend().prepare(right.model, precision="float64")
            due = right.named(wide.run(widened(right.feeds(problem.feeds, problem.cotangents))))
            reduced.due = {name: value.astype(problem.at[name].dtype) for name, value in due.items()}
        except RefgradError:  # refgrad refuses it too
            pass
        try:
            built = self._side.build(problem)
            reduced.fed = built.feeds(problem.feeds, problem.cotangents)
            reduced.found = built.named(NumpyBackend().prepare(built.model).run(reduced.fed))
            reduced.gradient = built.model
        except (RefgradError, CrashError):
            reduced.fed = dict(problem.feeds)


def _declare(model: ModelProto, results: Mapping[str, Any]) -> None:
    """Declare the sizes of the outputs."""
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
        for size in np.shape(results[value.name]):
            value.type.tensor_type.shape.dim.add().dim_value = size
        if not np.shape(results[value.name]):
            value.type.tensor_type.shape.SetInParent()


def _outcome(model: ModelProto, feeds: Mapping[str, Any], backend: Backend) -> tuple[str, str]:
    """How an executor fails on a model, and its message; two empty texts where it does not."""
    trial = RepairTrial(Replay(model, feeds), backend)
    errors, failed = trial.run(())
    if failed:
        return "crashed", failed
    return ("" if errors.is_rounding else WRONG), ""


def _problem(
    model: ModelProto,
    feeds: Mapping[str, Any],
    wrt: Sequence[str] | None,
    outputs: Sequence[str] | None,
    seed: int,
) -> Problem:
    """The gradient by every float, with random cotangents."""
    floats = {t.name for t in model.graph.initializer if array_of(t).dtype.kind == "f"}
    named = [*(n for n, v in feeds.items() if np.asarray(v).dtype.kind == "f"), *sorted(floats)]
    results = in_float64(model).run(widened(feeds))
    plain = NumpyBackend().prepare(model).run(feeds)
    rng = np.random.default_rng([seed, 0])
    names = outputs or [n for n, v in plain.items() if np.asarray(v).dtype.kind == "f"]
    cotangents = {n: np.asarray(rng.standard_normal(results[n].shape)).astype(plain[n].dtype) for n in names}
    return Problem("reduced", model, tuple(wrt or named), dict(feeds), cotangents, seed)


def _cut(values: ModelValues, nodes: Sequence[NodeProto]) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """These nodes as a model of its own, fed with what they read."""
    graph = values.model.graph
    inside = {id(node) for node in nodes}
    read = {name for node in graph.node if id(node) not in inside for name in reads_of(node)}
    return values.part(nodes, read | {value.name for value in graph.output})


# Smaller models


def _variants(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> Iterator[tuple[ModelProto, dict[str, np.ndarray]]]:
    """Models that are a step smaller or simpler, those that are much smaller first."""
    held = {t.name: array_of(t) for t in model.graph.initializer}
    arrays = {**feeds, **held}
    sizes = sorted({size for a in arrays.values() for size in a.shape if size > 1}, reverse=True)
    for size in sizes:
        for smaller in dict.fromkeys((1, 2, size // 2)):
            if 0 < smaller < size:
                cut = {name: _of_size(array, size, smaller) for name, array in arrays.items()}
                yield _with(model, feeds, cut)
                yield _with(model, feeds, {name: _renamed(array, size, smaller) for name, array in cut.items()})
    for name, array in arrays.items():
        for axis, size in enumerate(array.shape):
            if size > 1:
                yield _with(model, feeds, {**arrays, name: np.take(array, range(1), axis)})
    for name, array in arrays.items():
        if array.dtype.kind == "f" and array.size:
            for simple in (np.zeros_like(array), np.ones_like(array), np.round(array), np.round(array, 1)):
                if not np.array_equal(simple, array) and _simplicity(simple) < _simplicity(array):
                    yield _with(model, feeds, {**arrays, name: simple})


def _simplicity(array: np.ndarray) -> tuple[int, int]:
    """The fewer different numbers, and the fewer digits, the simpler."""
    numbers = np.unique(array[np.isfinite(array)])
    return len(numbers), sum(len(f"{number:g}") for number in numbers[:64])


def _of_size(array: np.ndarray, size: int, smaller: int) -> np.ndarray:
    cut: np.ndarray = array[tuple(slice(smaller) if n == size else slice(None) for n in array.shape)]
    return cut


def _renamed(array: np.ndarray, size: int, smaller: int) -> np.ndarray:
    """Integers that say the size, as the shape of a Reshape does, say the smaller one."""
    return np.where(array == size, smaller, array).astype(array.dtype) if array.dtype.kind == "i" else array


def _with(
    model: ModelProto, feeds: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray]
) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """The model with other feeds and initializers."""
    changed = ModelProto()
    changed.CopyFrom(model)
    del changed.graph.initializer[:], changed.graph.input[:], changed.graph.value_info[:]  # of other sizes
    for value in changed.graph.output:
        value.type.tensor_type.ClearField("shape")
    changed.graph.input.extend(described(name, arrays[name]) for name in feeds)
    changed.graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(arrays[t.name]).reshape(arrays[t.name].shape), t.name)
        for t in model.graph.initializer
    )
    return changed, {name: arrays[name] for name in feeds}


# The files that are written


def write(reduced: Reduced, folder: Path) -> None:
    """Write the failure as a backend test of onnx, with a script that reproduces it and the text of a report.

    The folder has model.onnx, test_data_set_0 with inputs, outputs (the expected ones) and actual_*.pb (the actual ones),
    reproduce.py and REPORT.md; for a builder also forward.onnx, the model that is differentiated.

    :raises OutputFileError: the folder exists, or cannot be written.
    """
    with new_folder(folder) as written_folder:
        (written_folder / "model.onnx").write_bytes(reduced.runs.SerializeToString())
        if reduced.failure.kind == RULE:
            (written_folder / "forward.onnx").write_bytes(reduced.failure.model.SerializeToString())
        data = written_folder / "test_data_set_0"
        data.mkdir()
        inputs = [v.name for v in reduced.runs.graph.input if v.name in reduced.fed]
        for k, name in enumerate(inputs):
            _write_tensor(data / f"input_{k}.pb", name, reduced.fed[name])
        for k, (name, shown) in enumerate(_outputs(reduced).items()):
            if name in reduced.due:
                _write_tensor(data / f"output_{k}.pb", shown, reduced.due[name])
            if name in reduced.found:
                _write_tensor(data / f"actual_{k}.pb", shown, reduced.found[name])
        if reduced.failure.kind == RULE and reduced.gradient is None:
            outputs = [value.name for value in reduced.failure.model.graph.output]
            script = building(reduced.side, reduced.wrt, outputs)
        else:
            outputs = [value.name for value in reduced.failure.model.graph.output]
            is_rule = reduced.failure.kind == RULE
            script = rebuilding(reduced.side, reduced.wrt, outputs) if is_rule else ""
            script = script or running(reduced.side, is_rule)
        (written_folder / "reproduce.py").write_text(script, encoding="utf-8")
        (written_folder / "REPORT.md").write_text(report(reduced), encoding="utf-8")


def _outputs(reduced: Reduced) -> dict[str, str]:
    """The names of the outputs, by the names of the expected results."""
    if reduced.gradient is None:
        return {name: name for name in reduced.due}
    outputs = [value.name for value in reduced.gradient.graph.output]
    return {name: next((o for o in outputs if o.endswith(f"{name}_grad")), f"{name}_grad") for name in reduced.due}


def _write_tensor(path: Path, name: str, value: np.ndarray) -> None:
    path.write_bytes(numpy_helper.from_array(np.asarray(value), name).SerializeToString())


def report(reduced: Reduced, written: Callable[[str], str] = markdown) -> str:
    """The text of a bug report.

    :param written: the function of `refgrad.escaping` for the medium that shows the text.
    """
    failure = reduced.failure
    what = "gradient" if failure.kind == RULE else "result"
    how = f"a wrong {what}" if failure.how == WRONG else failure.how
    parts = [
        f"# {written(', '.join(failure.operators))}: {how} ({written(reduced.side)})",
        written(failure.message or f"The {what} is wrong."),
        f"In the original model: {written(', '.join(map(repr, failure.nodes)))}. Reduced in {reduced.tried} steps"
        + (", interrupted." if reduced.interrupted else "."),
        f"```\n{onnx_text(failure.model, code).strip()}\n```",
    ]
    versions = ", ".join(f"{name} {version}" for name, version in reduced.versions.items())
    rows = []
    for name, due in reduced.due.items():
        got = reduced.found.get(name)
        rows.append(f"- {written(name)}: expected {_numbers(due)}, found {'nothing' if got is None else _numbers(got)}")
    shows = "`python reproduce.py` shows it, and exits with 1 as long as it is there."
    return "\n\n".join([*parts, "\n".join(rows), shows, written(f"Versions: {versions}.")]) + "\n"


def _numbers(value: np.ndarray) -> str:
    flat = value.reshape(-1)
    told = ", ".join(f"{float(number):.6g}" for number in flat[:6])
    return f"[{told}{', ...' if flat.size > 6 else ''}]"
