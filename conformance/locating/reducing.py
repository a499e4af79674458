"""The smallest model that still shows a failure, as a test and a bug report.

The nodes at fault are cut out with their inputs (`compare`); then dimensions shrink and values become simple as long as the
failure stays the same: its kind, its operators and the beginning of its message.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto, numpy_helper

from refgrad import interruption
from refgrad.backends import Backend
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.judge.nan.watching import label_of
from refgrad.conformance.locating.bisection import CRASHED, WRONG, Fault, bisect
from refgrad.conformance.locating.location import Located, Progress, locate, quietly
from refgrad.conformance.locating.pictures import elements_of
from refgrad.conformance.locating.repair import RepairTrial
from refgrad.conformance.locating.replay import Replay, distance
from refgrad.conformance.locating.scripts import (
    DATA,
    RUNNERS,
    Shown,
    executor_of,
    is_callable,
    of_error,
    packages,
    program,
)
from refgrad.conformance.locating.sides import INTERPRETER, Live, in_precision
from refgrad.conformance.locating.values import ModelValues, described, is_text
from refgrad.conformance.problems.feeds import widened
from refgrad.conformance.problems.observation import Built
from refgrad.conformance.problems.point import in_float64
from refgrad.conformance.problems.problem import Problem
from refgrad.conformance.problems.systems.builders import CrashError
from refgrad.conformance.problems.systems.executors import REFERENCE, executors, get_executor
from refgrad.conformance.problems.systems.surroundings import surroundings, version_of
from refgrad.errors import AnswerError, FeedError, RefgradError, raised
from refgrad.escaping import code, markdown, printable
from refgrad.model.checks.malformed import explained
from refgrad.model.external import array_of
from refgrad.model.printing import onnx_text
from refgrad.model.writing import new_folder
from refgrad.protos.traverse import lacks_shape, reads_of
from refgrad.reverse.gradient import gradient as differentiate

_TRIES = 200  # smaller models that are tried
_WORDS = 6  # of a message that have to stay
_FEW = 6  # elements of a tensor that a report lists
_CLOSE = 1e-5  # how far two results may be apart that are called the same
_WRONG_TOO = 0.1  # of the worst relative error: a result that is off by less may be so for rounding alone
_SECONDS, _LINES = 60, 30  # for a program to end, and of what it prints
_PATH = re.compile(r'(?<=^  )File "([^"\n]+)"', re.M)  # in a traceback
_REFERENCE = "onnx's reference implementation"
_COMPUTES = f"{_REFERENCE} computes the"
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
    formula: str = ""  # the derivative that holds
    known: str = ""  # the known bug that it is
    disputed: str = ""  # the dispute about the specification that it is
    whole: str = ""  # what is said of the whole model, if it is something else

    @property
    def signature(self) -> tuple[str, str, tuple[str, ...], str]:
        """The features of the failure that have to stay the same."""
        return self.kind, self.how, tuple(sorted(self.operators)), _skeleton(self.message)


@dataclass
class Reduced:
    """The smallest failure that was reached, what it should give and what it gives, and how many models were tried.

    `built` is the gradient that the builder made, `fed` its inputs. `versions` has every version here, and `system`
    the name and the version of the builder or executor at fault, "" where neither is known. `exit_code` and `printed` are
    the exit code and the output of the program that shows the failure.
    """

    failure: Failure
    side: str
    tried: int
    stopped: str = ""  # why, if it was
    wrt: tuple[str, ...] = ()
    cotangents: dict[str, np.ndarray] = field(default_factory=dict)
    due: dict[str, np.ndarray] = field(default_factory=dict)
    found: dict[str, np.ndarray] = field(default_factory=dict)
    built: Built | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    system: str = ""
    fed: dict[str, np.ndarray] = field(default_factory=dict)
    exit_code: int | None = None
    printed: str = ""
    reference: str = ""  # a sentence about what onnx's reference implementation computes of the model

    @property
    def runs(self) -> ModelProto:
        """The model that is run: the gradient that the builder made, or the model of the kernel."""
        return self.failure.model if self.built is None else self.built.model

    @property
    def is_rule(self) -> bool:
        """True if the builder is at fault, and not the executor."""
        return self.failure.kind == RULE


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
    progress: Progress | None = None,
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
    at_fault = side.builder if failure.kind == RULE else side.executor
    reduced.system = version_of(at_fault) if isinstance(at_fault, str) else ""
    try:
        for smaller in search.smaller(failure):
            reduced.failure = smaller
    except interruption.STOPS as stop:
        interruption.finish()
        reduced.stopped = interruption.why(stop)
    reduced.tried = search.tried
    search.measure(reduced)
    side.close()
    return reduced


class _Search:
    """Smaller and smaller failures."""

    def __init__(self, side: Live, seed: int, progress: Progress | None) -> None:
        self._side, self._seed, self._report = side, seed, progress or quietly
        self.tried = 0

    def first(
        self,
        model: ModelProto,
        feeds: Mapping[str, Any],
        wrt: Sequence[str] | None,
        outputs: Sequence[str] | None,
    ) -> Failure:
        """The first failure of the side, cut out of the model."""
        name = self._side.builder if isinstance(self._side.builder, str) else ""
        self._report("rules, by gradients of parts", 0, None)
        refused: RefgradError | None = None
        try:
            bisected = bisect(
                model,
                feeds,
                self._side.build,
                self._seed,
                name,
                wrt=wrt,
                so_far=lambda known: self._report("rules, by gradients of parts", known.built, None),
            )
            if bisected.faults:
                return self._of_rule(*self._of_whole(bisected.faults, model, feeds, wrt, outputs), model, feeds)
            problem = _problem(model, feeds, wrt, outputs, self._seed)
            built = self._side.build(problem)
            fed = built.feeds(problem.feeds, problem.cotangents)
            located = locate(built.model, fed, self._side.backend, self._report)
            if not located.is_right:
                return self._of_kernel(located, built.model, fed)
        except FeedError:
            raise
        except RefgradError as error:  # it has no gradient, and its results may be wrong all the same
            refused = (
                AnswerError(f"{self._side} makes no gradient: {error}") if isinstance(error, AnswerError) else error
            )
        located = locate(model, feeds, self._side.backend, self._report)
        if not located.is_right:
            return self._of_kernel(located, model, feeds)
        raise refused or FeedError(
            f"{self._side} is right for these feeds, in the results of the model and in their gradient: there is nothing "
            "to reduce. Give feeds that show the fault: feeds={...}."
        )

    def _of_whole(
        self,
        faults: Sequence[Fault],
        model: ModelProto,
        feeds: Mapping[str, Any],
        wrt: Sequence[str] | None,
        outputs: Sequence[str] | None,
    ) -> tuple[Fault, str]:
        """The fault that the whole model shows: the one with its message, or else the first, and that message."""
        try:
            self._side.build(_problem(model, feeds, wrt, outputs, self._seed))
        except (RefgradError, CrashError) as error:
            whole = str(error)
        except Exception as error:  # a builder that is a function raises anything
            whole = f"it raised {raised(error)}"
        else:
            return faults[0], ""
        for fault in faults:
            if _skeleton(fault.message) == _skeleton(whole):
                return fault, ""
        return faults[0], whole

    def _of_rule(self, fault: Fault, whole: str, model: ModelProto, feeds: Mapping[str, Any]) -> Failure:
        values = ModelValues(model, feeds)
        part, fed = _cut(values, [n for n in values.model.graph.node if label_of(n) in fault.nodes])
        return Failure(
            RULE,
            fault.kind,
            fault.operators,
            fault.nodes,
            fault.message,
            part,
            fed,
            fault.formula,
            fault.known,
            whole=whole,
        )

    def _of_kernel(self, located: Located, model: ModelProto, feeds: Mapping[str, Any]) -> Failure:
        if located.unsteady is not None:
            raise FeedError(
                f"Nothing can be reduced: {self._side.backend.name} is not the same in every run, so a smaller model may be "
                f"right by chance. {located.unsteady}."
            )
        values = ModelValues(model, feeds)
        nodes = list(values.model.graph.node)
        message, known, disputed = located.failed, "", ""
        if located.culprits:
            worst = max(located.culprits, key=lambda one: (bool(one.found.failed), one.found.ratio))
            chosen, message = [nodes[worst.found.position]], worst.found.failed
            known, disputed = worst.known, worst.disputed
        elif located.groups:
            chosen = [nodes[k] for k in located.groups[0].positions]
        else:
            chosen = nodes
        part, fed = _cut(values, chosen)
        how = CRASHED if message else WRONG
        operators = tuple(node.op_type for node in chosen)
        labels = tuple(map(label_of, chosen))
        return Failure(KERNEL, how, operators, labels, message, part, fed, known=known, disputed=disputed)

    # Smaller

    def smaller(self, failure: Failure) -> Iterator[Failure]:
        """Each smaller failure that has the same signature: the last one is the smallest."""
        again = True
        while again and self.tried < _TRIES:
            again = False
            for model, feeds in _variants(failure.model, failure.feeds, failure.how != WRONG):
                if self.tried >= _TRIES:
                    return
                self.tried += 1
                self._report("smaller models", self.tried, _TRIES)
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
        smaller_failure = replace(failure, how=how, operators=operators, message=message, model=model, feeds=feeds)
        return smaller_failure if how and smaller_failure.signature == failure.signature else None

    def measure(self, reduced: Reduced) -> None:
        """Compute the results that the smallest model should give, and the ones that it gives."""
        failure = reduced.failure
        if failure.kind == KERNEL:
            reduced.fed = dict(failure.feeds)
            due = NumpyBackend().prepare(failure.model, precision="float64").run(failure.feeds)
            _declare(failure.model.graph.output, due)
            like = NumpyBackend().prepare(failure.model).run(failure.feeds)
            reduced.due = {name: np.asarray(value).astype(np.asarray(like[name]).dtype) for name, value in due.items()}
            try:
                outputs = self._side.backend.prepare(failure.model).run(failure.feeds)
                reduced.found = {name: np.asarray(value) for name, value in outputs.items()}
            except RefgradError:
                pass
            reduced.reference = self._by_reference(reduced)
            return
        _declare(failure.model.graph.output, NumpyBackend().prepare(failure.model).run(failure.feeds))
        problem = _problem(failure.model, failure.feeds, None, None, self._seed)
        reduced.wrt, reduced.cotangents = problem.wrt, dict(problem.cotangents)
        reduced.fed = dict(problem.feeds)
        try:
            right = Built.of(differentiate(failure.model, problem.wrt, list(problem.cotangents)))
            wide = NumpyBackend().prepare(right.model, precision="float64")
            due = right.named(wide.run(widened(right.feeds(problem.feeds, problem.cotangents))))
            given = {**problem.feeds, **{t.name: array_of(t) for t in failure.model.graph.initializer}}
            reduced.due = {name: value.astype(given[name].dtype) for name, value in due.items()}
        except RefgradError:  # refgrad refuses it too
            pass
        try:
            built = self._side.build(problem)
        except Exception:  # a builder that is a function raises anything
            return
        reduced.built, reduced.fed = built, built.feeds(problem.feeds, problem.cotangents)
        sizes = {built.gradients[name]: problem.at[name] for name in built.gradients}
        _declare([v for v in built.model.graph.input if lacks_shape(v)], reduced.fed)
        _declare([v for v in built.model.graph.output if lacks_shape(v)], sizes)
        with suppress(RefgradError):  # its gradient may not run
            reduced.found = built.named(NumpyBackend().prepare(built.model).run(reduced.fed))

    def _by_reference(self, reduced: Reduced) -> str:
        """A sentence about the results of onnx's reference implementation."""
        if self._side.backend.name == REFERENCE:
            return ""
        try:
            results = get_executor(REFERENCE).prepare(reduced.failure.model).run(reduced.failure.feeds)
        except RefgradError:
            return f"{_REFERENCE} does not run it."
        wrong = _errors(reduced.due, reduced.found) or dict.fromkeys(reduced.due, 0.0)
        got = {name: np.asarray(results[name]) for name in wrong}
        for what, values in (("expected", reduced.due), ("wrong", reduced.found)):
            far = [_worst(got[key], values[key]) if key in values else np.inf for key in wrong]
            if all(error <= max(seen / 100, _CLOSE) for error, seen in zip(far, wrong.values(), strict=True)):
                return f"{_COMPUTES} {what} result."
        return f"{_REFERENCE} computes something else again."


def _worst(got: np.ndarray, due: np.ndarray) -> float:
    """The largest distance of two arrays, infinite if their shapes differ."""
    return float(np.max(distance(got, due), initial=0.0)) if got.shape == due.shape else np.inf


def _declare(values: Iterable[ValueInfoProto], arrays: Mapping[str, Any]) -> None:
    """Declare the sizes of values."""
    for value in values:
        if value.name in arrays:
            value.type.tensor_type.ClearField("shape")
            value.type.tensor_type.shape.SetInParent()
            for size in np.shape(arrays[value.name]):
                value.type.tensor_type.shape.dim.add().dim_value = size


def _outcome(model: ModelProto, feeds: Mapping[str, Any], backend: Backend) -> tuple[str, str]:
    """How an executor fails on a model, and its message; two empty texts where it does not."""
    trial = RepairTrial(Replay(model, feeds), backend)
    errors, failed = trial.run(())
    if failed:
        return CRASHED, failed
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


def _variants(
    model: ModelProto, feeds: Mapping[str, np.ndarray], are_any_right: bool
) -> Iterator[tuple[ModelProto, dict[str, np.ndarray]]]:
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
        for simple in _simpler(array, are_any_right):
            yield _with(model, feeds, {**arrays, name: simple})


def _simpler(array: np.ndarray, are_any_right: bool) -> Iterator[np.ndarray]:
    """Simpler floats, the best first: zeros hide what a kernel or a rule does to them, and come late.

    :param are_any_right: the failure is an error, so that any numbers will do: different ones show what comes in its place.
    """
    if array.dtype.kind != "f" or not array.size:
        return
    whole = np.sign(array) * np.maximum(np.round(np.abs(array)), 1)
    best = [np.resize(np.arange(1, 10), array.shape)] if are_any_right else []
    for numbers in (*best, np.ones_like(array), whole, np.zeros_like(array), np.round(array, 1)):
        simple = numbers.astype(array.dtype)
        if np.array_equal(simple, array, equal_nan=True):
            return
        if (array > 0).all() and not (simple > 0).all():
            continue  # it may be a scale, or a variance
        yield simple


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
    """Write the failure as a backend test of onnx, with a program that shows it and the text of a report.

    The folder has model.onnx, test_data_set_0 with inputs, outputs (the expected ones) and actual_*.pb (the actual ones),
    reproduce.py and REPORT.md; for a builder also forward.onnx, the model that is differentiated. The program is run once, and
    the report has what it prints.

    :raises OutputFileError: the folder exists, or cannot be written.
    """
    with new_folder(folder) as written_folder:
        (written_folder / "model.onnx").write_bytes(reduced.runs.SerializeToString())
        if reduced.is_rule:
            (written_folder / "forward.onnx").write_bytes(reduced.failure.model.SerializeToString())
        data = written_folder / "test_data_set_0"
        data.mkdir()
        inputs = [v.name for v in reduced.runs.graph.input if v.name in reduced.fed]
        for k, name in enumerate(inputs):
            _write_tensor(data / f"input_{k}.pb", name, reduced.fed[name])
        for k, (name, output) in enumerate(_outputs(reduced).items()):
            if name in reduced.due:
                _write_tensor(data / f"output_{k}.pb", output, reduced.due[name])
            if name in reduced.found:
                _write_tensor(data / f"actual_{k}.pb", output, reduced.found[name])
        for executor in _executors(reduced):
            shown = _shown(reduced, executor)
            text, beside = _write_program(written_folder, shown)
            if not reduced.stopped:
                try:
                    reduced.exit_code, reduced.printed = _run(written_folder / "reproduce.py")
                    if reduced.exit_code == 1 and shown.raises is not None:
                        shown = of_error(shown, reduced.printed)
                        text, beside = _write_program(written_folder, shown)
                        reduced.exit_code, reduced.printed = _run(written_folder / "reproduce.py")
                except KeyboardInterrupt:  # what was reached is kept
                    interruption.finish()
                    reduced.stopped = interruption.INTERRUPTED
            if reduced.stopped or reduced.exit_code == 1:
                break
        reduced.versions = {
            **reduced.versions,
            **surroundings([executor] if shown.is_made and executor in RUNNERS else []),
        }
        (written_folder / "REPORT.md").write_text(
            report(reduced) + _to_reproduce(reduced, shown, "" if beside else text), encoding="utf-8"
        )


def _write_program(folder: Path, shown: Shown) -> tuple[str, str]:
    """Write the program, and the data beside it if there are any; both are returned."""
    text, beside = program(shown)
    (folder / "reproduce.py").write_text(text, encoding="utf-8")
    if beside:
        (folder / DATA).write_text(beside, encoding="utf-8")
    return text, beside


def _executors(reduced: Reduced) -> list[str]:
    """The executors for the program, the best first: one with a fault of its own may make a wrong gradient right."""
    own = executor_of(reduced.side)
    if not reduced.is_rule or reduced.built is None:
        return [own]
    known = [name for name, why in executors().items() if why is None and name in ("ort-cpu", INTERPRETER)]
    first = [own] if own in RUNNERS and own != INTERPRETER else []  # others have onnx's, too
    return list(dict.fromkeys([*first, REFERENCE, *sorted(known, reverse=True)]))


def _outputs(reduced: Reduced) -> dict[str, str]:
    """The names of the outputs, by the names of the expected results."""
    names = {} if reduced.built is None else reduced.built.gradients
    return {name: names.get(name, name) for name in reduced.due}


def _write_tensor(path: Path, name: str, value: np.ndarray) -> None:
    path.write_bytes(numpy_helper.from_array(np.asarray(value), name).SerializeToString())


def _shown(reduced: Reduced, executor: str) -> Shown:
    """The failure for a program to show. A builder that no program can ask is shown by the gradient that it made.

    The exception of an error is any one: a first run of the program tells which.
    """
    failure, outputs = reduced.failure, _outputs(reduced)
    may_end, raises = failure.how == CRASHED, ("Exception", "") if failure.how != WRONG else None
    if not reduced.is_rule or (reduced.built is not None and not is_callable(reduced.side.partition("@")[0])):
        due = {outputs[name]: value for name, value in reduced.due.items()}
        found = {outputs[name]: value for name, value in reduced.found.items() if name in outputs}
        errors = _errors(due, found)
        return Shown("", executor, False, True, may_end, reduced.runs, reduced.fed, due, errors, raises=raises)
    return Shown(
        reduced.side.partition("@")[0], executor, True, reduced.built is not None, may_end, failure.model, failure.feeds,
        reduced.due, _errors(reduced.due, reduced.found), reduced.wrt, reduced.cotangents, raises,
    )  # fmt: skip


def _errors(due: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The largest error of each result that is wrong: others than the worst may be off by rounding alone."""
    sizes, errors = {}, {}
    for name, value in due.items():
        if name not in found or is_text(value) or found[name].shape != value.shape or not value.size:
            continue
        errors[name] = _worst(found[name], value)
        wide = np.abs(value.astype(np.float64))
        sizes[name] = errors[name] / (float(np.max(wide, where=np.isfinite(wide), initial=0.0)) or 1.0)
    worst = max(sizes.values(), default=0.0)
    return {name: error for name, error in errors.items() if sizes[name] >= _WRONG_TOO * worst and sizes[name] > 0}


def _run(file: Path) -> tuple[int | None, str]:
    """The exit code of a program, None if it does not end in time, and its output, with the paths of this machine shortened."""
    here = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, file.name], cwd=file.parent, env=os.environ | {"PYTHONPATH": here}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, ""
    printed = done.stdout.decode(errors="replace").rstrip()
    return done.returncode, _PATH.sub(lambda found: f'File "{_shortened(Path(found[1]), file.parent)}"', printed)


def _shortened(path: Path, folder: Path) -> str:
    """The path of a file in a traceback, from the folder of the packages on, from `folder` or one that Python imports from."""
    packages_at = [k for k, part in enumerate(path.parts) if part in ("site-packages", "dist-packages")]
    if packages_at:
        return Path(*path.parts[packages_at[-1] :]).as_posix()
    importable = [folder, *map(Path, filter(None, sys.path))]
    within = [path.relative_to(one).as_posix() for one in importable if path.is_relative_to(one)]
    return min(within, key=len, default=path.name)


def report(reduced: Reduced, written: Callable[[str], str] = markdown) -> str:
    """The text of a bug report: what is wrong, the model, what is expected, and the versions.

    :param written: the function of `refgrad.escaping` for the medium that shows the text.
    """
    failure = reduced.failure
    what = "gradient" if reduced.is_rule else "result"
    how = {WRONG: f"a wrong {what}", CRASHED: f"an error in place of a {what}"}.get(
        failure.how, f"the {what} is {failure.how}"
    )
    operators = ", ".join(dict.fromkeys(failure.operators))
    at_fault = reduced.side.partition("@")[0 if reduced.is_rule else 2]
    which = "it is node" if len(failure.nodes) == 1 else "these are the nodes"
    is_native = executor_of(reduced.side) not in (REFERENCE, INTERPRETER)
    told = {name: version for name, version in reduced.versions.items() if is_native or name != "processor"}
    versions = ", ".join(f"{name} {version}" for name, version in told.items())
    system = written(reduced.system or at_fault)
    title = f"{how} ({system})"
    known = f"A known bug of {system} in {written(operators)}: {written(failure.known)}" if failure.known else ""
    if failure.disputed:
        title = f"{system} and {written(_other(reduced))} disagree"
        known = f"A dispute about the specification: {written(failure.disputed)}."
    parts = [
        f"# {written(operators)}: {title}",
        written(failure.message or _said(reduced, reduced.system or at_fault)),
        f"The derivative of {written(operators)}: {written(failure.formula)}" if failure.formula else "",
        known,
        f"The whole model fails for another reason: {written(failure.whole)}" if failure.whole else "",
        "\n".join(_rows(reduced, written)),
        "" if failure.disputed else written(reduced.reference),
        f"```\n{onnx_text(failure.model, code).strip()}\n```",
        f"Cut out of a larger model, in which {which} {written(', '.join(map(repr, failure.nodes)))}.",
        f"A smaller model may show it too: the search was stopped ({reduced.stopped})." if reduced.stopped else "",
        written(f"Found by refgrad, a differentiator of ONNX models. Versions: {versions}."),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _said(reduced: Reduced, system: str) -> str:
    """A sentence about a wrong number: how the expected one is known."""
    if reduced.is_rule:
        return f"The gradient that {system} makes of this model is wrong: central differences contradict it."
    if reduced.failure.disputed:
        return f"{system} and {_other(reduced)} compute different results. Rounding does not explain the difference."
    return (
        f"{system} differs from the formula of the operator in ONNX's specification, computed in double. "
        "Rounding does not explain the difference."
    )


def _other(reduced: Reduced) -> str:
    """The system that computes the other result of a dispute: the reference implementation, if it does."""
    return _REFERENCE if reduced.reference == f"{_COMPUTES} expected result." else "refgrad"


def _rows(reduced: Reduced, written: Callable[[str], str]) -> Iterator[str]:
    """The inputs, and each result with the expected numbers and the actual ones."""
    for kind, arrays in (("input", reduced.failure.feeds), ("cotangent of", reduced.cotangents)):
        for name, value in arrays.items():
            yield f"- {kind} {written(name)}: {_numbers(value, written)}"
    of = "gradient by" if reduced.is_rule else "result"
    expected, actual = "expected", "found"
    if reduced.failure.disputed:
        expected, actual = f"{written(_other(reduced))} computes", f"{written(reduced.system)}"
    for name, due in reduced.due.items():
        got = reduced.found.get(name)
        told = "and it fails" if got is None else f"{actual} {_numbers(got, written)}"
        yield f"- {of} {written(name)}: {expected} {_numbers(due, written)}, {told}"
        if got is not None and due.size > _FEW and not is_text(due):
            for one in elements_of(got, due)[:1]:
                yield f"- {of} {written(name)} at {list(one.at)}: {expected} {one.expected:.9g}, {actual} {one.found:.9g}"


def _numbers(value: np.ndarray, written: Callable[[str], str]) -> str:
    """The type, the sizes, and the first elements of a tensor."""
    flat = value.reshape(-1)
    told = ", ".join(written(repr(str(one))) if is_text(value) else f"{one:.6g}" for one in flat[:_FEW].tolist())
    return f"{value.dtype}{list(value.shape)} [{told}{', ...' if flat.size > _FEW else ''}]"


def how_it_shows(reduced: Reduced) -> str:
    """A sentence about the program that was written: whether it shows the failure here."""
    if reduced.exit_code == 1:
        return "reproduce.py shows the fault."
    if reduced.exit_code is None:
        return f"reproduce.py was not run to its end: {reduced.stopped or f'{_SECONDS} seconds'}."
    return f"reproduce.py does not show it here: it exits with {reduced.exit_code}."


def _to_reproduce(reduced: Reduced, shown: Shown, text: str) -> str:
    """The program as a part of the report, and its output."""
    needed = [name for name in ("onnx", "numpy", *packages(shown)) if name in reduced.versions]
    pinned = " ".join(f"{name}=={reduced.versions[name]}" for name in dict.fromkeys(needed))
    at_fault = reduced.side.partition("@")[0 if reduced.is_rule else 2]
    there = "the fault is there, with 0 once it is gone"
    if reduced.failure.disputed:
        there = "they disagree, with 0 once they agree"
    exits = f"It exits with 1 as long as {there}, and with 2 if it cannot run."
    parts = ["## To reproduce", f"`pip install {pinned}`, then run this program:", f"```python\n{text.strip()}\n```"]
    parts.append(f"Save it as reproduce.py and run `python reproduce.py`. {exits}")
    if not text:
        parts[1:] = [
            f"`pip install {pinned}`, and run `python reproduce.py` with {DATA} beside it: they are too large for this text. "
            + exits
        ]
    if ":" in at_fault and not at_fault.startswith(("refgrad:", "onnxruntime:", "ort-")):
        module, _, name = at_fault.partition(":")
        parts.append(
            f"The program imports {markdown(name)} of the module {markdown(module)}, which is at fault: put the module "
            "beside it, and install what the module needs."
        )
    if reduced.exit_code != 1:
        parts.append(how_it_shows(reduced))
    if reduced.printed:
        lines = reduced.printed.split("\n")[-_LINES:]
        parts += ["It prints:", "\n".join(f"    {printable(line)}" for line in lines)]
    return "\n" + "\n\n".join(parts) + "\n"
