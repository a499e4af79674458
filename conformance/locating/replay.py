"""Run every node of a model alone on an executor, fed with the right values, to find the ones that compute something else.

The interpreter runs the model; each node, those in bodies of Loop, Scan and If too, is then run on the executor with the inputs
that it has there, so that an error is the node's own, and none is inherited. The right result is the interpreter's for these
inputs in double. How large an error may be follows from the numbers: how much the result moves when each input moves by a
rounding (the backward error of a sound kernel is of that size: Higham 2002, "Accuracy and Stability of Numerical Algorithms",
section 1.5), and what a sum of so many terms of that size loses (section 4.2). One node is looked at at a time, so that this
takes little more memory than the run itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from refgrad.backends import Backend, Prepared
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.case import is_float
from refgrad.conformance.judge.nan.watching import (
    Compute,
    Watching,
    bodies,
    constants_of,
    first_output,
    label_of,
)
from refgrad.conformance.locating.values import described, is_text, without_functions
from refgrad.conformance.problems.rounding import ADDING_UP
from refgrad.errors import RefgradError, counted
from refgrad.model.external import array_of
from refgrad.tables.randomness import may_draw, operator_of

DRAWS = 3  # of the inputs, each moved by a rounding
_FACTOR = 8.0  # of what moving the inputs by one rounding moves: a kernel rounds more than once
_QUANTIZING = frozenset((("", "QuantizeLinear"), ("", "DynamicQuantizeLinear")))
_QUANTIZED = ("QLinear", "QGemm", "QuantizeWithOrder", "QOrdered")
_STEPS = frozenset(2**k for k in range(32))  # the rounds of a loop in which a node of its body is judged


@dataclass(frozen=True)
class Replayed:
    """The verdict on one node.

    `error` is the largest one of an element, and `allowed` what rounding explains there; `ratio` is the largest ratio of the
    two. `at` is the element with the largest ratio: its output, its place, the right number and the executor's. `why` says
    why the node was not judged; a node that the executor does not run has the reason in `failed`. A node of a body is `within`
    the node of the graph at `position`, and was judged in its round `step`; `inside` are the wrong nodes of a node's bodies.
    """

    position: int
    name: str
    operator: str
    outputs: tuple[str, ...]
    ratio: float = 0.0
    error: float = 0.0
    allowed: float = 0.0
    at: tuple[str, tuple[int, ...], float, float] | None = None
    why: str = ""
    failed: str = ""
    within: str = ""
    step: int = 0
    inside: tuple[Replayed, ...] = ()

    @property
    def is_wrong(self) -> bool:
        """True if the executor computes something else than the node means, or fails."""
        return self.ratio > 1 or bool(self.failed)

    @property
    def label(self) -> str:
        """The operator, the name, and where a node of a body lies."""
        place = f" in {self.within!r}, round {self.step}" if self.within else ""
        return f"{self.operator} {self.name!r}{place}"

    def __str__(self) -> str:
        if self.failed:
            return f"{self.label} fails: {self.failed}"
        if self.why:
            return f"{self.label} is not judged: {self.why}"
        if self.at is None:
            return f"{self.label} is right"
        output, place, due, got = self.at
        verdict = "is wrong" if self.is_wrong else "is right"
        where = f"{output!r} has {got:.9g} at {list(place)} instead of {due:.9g}"
        steps = (
            f", {counted(int(self.error), 'step')} apart"
            if self.allowed == 1 and self.error == round(self.error)
            else ""
        )
        return f"{self.label} {verdict}: {where}{steps}; rounding explains {self.allowed:.2g}"


class Replay:
    """A model and its feeds; `run` looks at its nodes on an executor.

    `repairs` has the right values for the outputs of the nodes that were found wrong, by their position in the graph; `theirs`
    has the executor's, if it runs the node.

    :param model: a model, which is not modified. Functions are written out.
    :param feeds: the values of its inputs, by name.
    :raises InvalidModelError: the model cannot be read.
    """

    def __init__(self, model: ModelProto, feeds: Mapping[str, Any]) -> None:
        self.model = without_functions(model)
        self.feeds = dict(feeds)
        self.nodes = list(self.model.graph.node)
        self.repairs: dict[int, dict[str, np.ndarray]] = {}
        self.theirs: dict[int, dict[str, np.ndarray]] = {}
        self._positions = {first_output(node): position for position, node in enumerate(self.nodes)}
        self._inner = {first_output(node) for body in bodies(self.model) for node in body.node}
        self._constants = constants_of(self.model) - set(feeds)

    def run(self, executor: Backend, seen: Callable[[Replayed], None] | None = None) -> list[Replayed]:
        """Each node that computes something, in the order in which they run; of a node in a body the worst round.

        :param seen: called with each node of the graph that was judged.
        :raises FeedError: the feeds do not fit the model.
        :raises BackendError: the interpreter does not run it.
        """
        watched = _Seen(self, executor, seen)
        NumpyBackend().prepare(self.model, precision=Watching(watched.look)).run(self.feeds)
        return watched.found

    def judged(
        self,
        node: NodeProto,
        values: Mapping[str, Any],
        results: Mapping[str, Any],
        executor: Backend,
        replayed: Replayed,
    ) -> tuple[Replayed, dict[str, np.ndarray]]:
        """The verdict on one node, and its right results; no results if it is not judged.

        :param values: the values that it reads. :param results: the interpreter's results, in the types of the model.
        """
        if may_draw(node):
            return replace(replayed, why="it draws random numbers"), {}
        try:
            model, feeds = self._alone(node, values, results)
            truth = _Truth(model, feeds, node)
        except LookupError as error:
            return replace(replayed, why=f"{error.args[0]}"), {}
        except RefgradError as error:
            return replace(replayed, why=f"the interpreter does not run it alone: {error}"), {}
        right = {name: _like(due, results[name]) for name, due in truth.due.items()}
        try:
            prepared = executor.prepare(model)
            outputs = prepared.run(feeds)
        except RefgradError as error:
            return replace(replayed, failed=str(error)), right
        if typed := wrong_types(prepared, outputs):
            return replace(replayed, failed=next(iter(typed.values()))), right
        worst = replayed
        for output in truth.due:
            compared = _compared(replayed, output, np.asarray(outputs[output]), truth)
            worst = compared if compared.failed or compared.ratio > worst.ratio or worst.at is None else worst
            if worst.failed:
                break
        if worst.is_wrong and not worst.failed and worst.position >= 0:
            self.theirs[worst.position] = {name: np.asarray(outputs[name]) for name in truth.due}
        return worst, right

    def _alone(
        self, node: NodeProto, values: Mapping[str, Any], results: Mapping[str, Any]
    ) -> tuple[ModelProto, dict[str, np.ndarray]]:
        """A model of one node, and what it is fed. What the model has as a constant stays one.

        :raises LookupError: it reads or makes something that is no tensor.
        """
        alone = ModelProto()
        alone.ir_version = self.model.ir_version
        alone.opset_import.extend(self.model.opset_import)
        alone.graph.name = "node"
        alone.graph.node.append(node)
        feeds: dict[str, np.ndarray] = {}
        for name, value in values.items():
            if not isinstance(value, np.ndarray | np.generic):
                raise LookupError(f"{name!r} is no tensor")
            array = np.asarray(value)
            if name in self._constants:
                alone.graph.initializer.append(numpy_helper.from_array(array, name))
            else:
                feeds[name] = array
                alone.graph.input.append(described(name, array))
        for name, value in results.items():
            if not isinstance(value, np.ndarray | np.generic):
                raise LookupError(f"{name!r} is no tensor")
            alone.graph.output.append(described(name, np.asarray(value)))
        return alone, feeds


class _Seen:
    """The verdicts on the nodes of a run, which it collects while the interpreter runs."""

    def __init__(self, replay: Replay, executor: Backend, seen: Callable[[Replayed], None] | None) -> None:
        self._replay, self._executor, self._tell = replay, executor, seen
        self.found: list[Replayed] = []
        self._body: dict[str, Replayed] = {}  # of the node that runs: the worst round of each node in its bodies
        self._rounds: dict[str, int] = {}

    def look(
        self, node: NodeProto, inputs: tuple[Any, ...], outer: Mapping[str, Any], compute: Compute
    ) -> tuple[Any, ...]:
        """Judge one node, and return what the interpreter computes."""
        replay, key = self._replay, first_output(node)
        position = replay._positions.get(key)
        is_inner = position is None and key in replay._inner
        if position is not None:
            self._body, self._rounds = {}, {}
        results = compute()
        if position is None and not is_inner:  # a part of what the interpreter makes of one node
            return results
        step = self._rounds[key] = self._rounds.get(key, 0) + 1
        if is_inner and step not in _STEPS:
            return results
        domain, op_type = operator_of(node)
        operator = f"{domain}.{op_type}" if domain else op_type
        outputs = tuple(filter(None, node.output))
        values = {name: value for name, value in zip(node.input, inputs, strict=False) if name} | dict(outer)
        results_by_name = {name: value for name, value in zip(node.output, results, strict=False) if name}
        replayed = Replayed(-1 if position is None else position, label_of(node), operator, outputs)
        if is_inner:
            replayed = replace(replayed, step=step - 1)
        judged, right = replay.judged(node, values, results_by_name, self._executor, replayed)
        if position is None:
            worst = self._body.get(key)
            if worst is None or (judged.is_wrong and judged.ratio > worst.ratio):
                self._body[key] = judged
            return results
        inner = [
            replace(inner_replayed, within=judged.name, position=position) for inner_replayed in self._body.values()
        ]
        judged = replace(judged, inside=tuple(node for node in inner if node.is_wrong))
        if judged.is_wrong or judged.inside:
            replay.repairs[position] = right or {name: np.asarray(value) for name, value in results_by_name.items()}
        self.found += [judged, *inner]
        if self._tell is not None:
            self._tell(judged)
        return results


class _Truth:
    """The results that a node computes in double of its feeds, and how far a sound kernel may be off."""

    def __init__(self, model: ModelProto, feeds: Mapping[str, np.ndarray], node: NodeProto) -> None:
        self._node = node
        self._types = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
        self._prepared = NumpyBackend().prepare(_with_inputs(model), precision="float64")
        self._feeds = {**feeds, **{t.name: array_of(t) for t in model.graph.initializer}}
        self._eps = max((_eps(value.dtype) for value in self._feeds.values()), default=0.0)
        self.due = self._prepared.run(self._feeds)
        self._moved: dict[str, np.ndarray] | None = None

    def _movements(self) -> dict[str, np.ndarray]:
        """How far the results move when every input moves by a rounding, the largest of some draws."""
        rng = np.random.default_rng(0)
        moved = {name: np.zeros(np.shape(value)) for name, value in self.due.items()}
        for _ in range(DRAWS):
            feeds = {name: _by_a_rounding(value, rng) for name, value in self._feeds.items()}
            try:
                results = self._prepared.run(feeds)
            except RefgradError:
                continue
            for name, value in results.items():
                if name in moved and np.shape(value) == moved[name].shape and is_float(np.asarray(value)):
                    with np.errstate(all="ignore"):
                        distance = np.abs(np.asarray(value, np.float64) - self.due[name])
                    moved[name] = np.fmax(moved[name], np.where(np.isnan(distance), 0, distance))
        return moved

    def _sizes_of_terms(self) -> dict[str, np.ndarray]:
        """The size of the terms that are added up for each element: f(|inputs|) for a node that is linear in each input."""
        if operator_of(self._node) not in ADDING_UP:
            return {}
        feeds = {name: np.abs(value) if is_float(value) else value for name, value in self._feeds.items()}
        try:
            return {name: np.abs(np.asarray(value)) for name, value in self._prepared.run(feeds).items()}
        except RefgradError:
            return {}

    def least(self, output: str) -> np.ndarray:
        """The least error of each element that rounding explains: roundings of the element and of the largest one."""
        due = np.asarray(self.due[output])
        if not is_float(due):
            room = 1.0 if _rounds_to_steps(self._node) else 0.0
            return np.full(due.shape, room)
        kind = helper.tensor_dtype_to_np_dtype(self._types[output])
        eps, tiny = max(self._eps, _eps(kind)), _limits(kind)[1]
        with np.errstate(all="ignore"):
            size = np.abs(due)
            largest = np.max(size, where=np.isfinite(size), initial=0.0)
            least: np.ndarray = _bounded(4 * eps * size + 4 * eps * largest + 2 * tiny)
        return least

    def allowed(self, output: str) -> np.ndarray:
        """The error of each element that rounding explains."""
        due, room = np.asarray(self.due[output]), self.least(output)
        if not is_float(due):
            return room
        if self._moved is None:
            self._moved, self._terms = self._movements(), self._sizes_of_terms()
        eps = max(self._eps, _eps(helper.tensor_dtype_to_np_dtype(self._types[output])))
        count = max((value.size for value in self._feeds.values() if is_float(value)), default=1) / max(due.size, 1)
        with np.errstate(all="ignore"):
            room = room + _FACTOR * self._moved[output]
            if output in self._terms:
                room = room + eps * (4 + math.sqrt(max(count, 1))) * self._terms[output]
        return _bounded(room)


def _rounds_to_steps(node: NodeProto) -> bool:
    """True for operators whose integers are quotients that were rounded: a step up or down is rounding."""
    return operator_of(node) in _QUANTIZING or node.op_type.startswith(_QUANTIZED)


def _bounded(room: np.ndarray) -> np.ndarray:
    bounded: np.ndarray = np.where(np.isfinite(room), room, np.inf)
    return bounded


def _like(due: Any, result: Any) -> np.ndarray:
    """The right result, in the type of the model."""
    right, like = np.asarray(due), np.asarray(result)
    return right.astype(like.dtype) if right.dtype != like.dtype else right


def _compared(replayed: Replayed, output: str, got: np.ndarray, truth: _Truth) -> Replayed:
    due = np.asarray(truth.due[output])
    if got.shape != due.shape:
        return replace(replayed, failed=f"{output!r} has the shape {list(got.shape)} instead of {list(due.shape)}")
    if not got.size:
        return replayed
    error = distance(got, due)
    if is_text(due) or is_text(got):
        place = tuple(int(k) for k in np.unravel_index(int(np.argmax(error)), error.shape))
        told = f"{output!r} has {got[place]!r} at {list(place)} instead of {due[place]!r}"
        return replace(replayed, failed=told if error[place] else "")
    with np.errstate(all="ignore"):
        wide, right = got.astype(np.float64), due.astype(np.float64)
        limit = np.abs(right) > _limits(got.dtype)[2]  # it does not fit the type
        error = np.where(limit & np.isinf(wide), 0.0, error)
        allowed = truth.least(output)
        if not np.all(error <= allowed):
            allowed = truth.allowed(output)
        ratio = np.where(error == 0, 0.0, error / np.maximum(allowed, np.finfo(float).tiny))
    at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    place = tuple(int(k) for k in at)
    return replace(
        replayed, ratio=float(ratio[at]), error=float(error[at]), allowed=float(allowed[at]),
        at=(output, place, float(right[at]), float(wide[at])),
    )  # fmt: skip


def distance(got: np.ndarray, due: np.ndarray) -> np.ndarray:
    """How far each element is from the expected one: infinite where only one of the two is NaN, and for another text."""
    if is_text(got) or is_text(due):
        return np.where(got == due, 0.0, np.inf)
    with np.errstate(all="ignore"):
        wide, right = got.astype(np.float64), due.astype(np.float64)
        same = (wide == right) | (np.isnan(wide) & np.isnan(right))
        error = np.where(same, 0.0, np.abs(wide - right))
        return np.where(np.isnan(error), np.inf, error)


def wrong_types(prepared: Prepared, results: Mapping[str, Any]) -> dict[str, str]:
    """The results that have another type than the one that is declared for them, and what to say of each."""
    reasons = {}
    for value in prepared.outputs:
        result = results.get(value.name)
        if value.dtype is None or not isinstance(result, np.ndarray | np.generic) or is_text(np.asarray(result)):
            continue
        if result.dtype != value.dtype and np.dtype(value.dtype).kind != "O":
            reasons[value.name] = f"{value.name!r} has the type {result.dtype} instead of {value.dtype}"
    return reasons


def _with_inputs(model: ModelProto) -> ModelProto:
    """The model whose constants can be fed."""
    extended = ModelProto()
    extended.CopyFrom(model)
    extended.graph.input.extend(described(t.name, array_of(t)) for t in model.graph.initializer)
    return extended


def _by_a_rounding(value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The numbers in double, each moved by up to one rounding of its type; those that are whole stay."""
    if not is_float(value):
        return value
    wide = value.astype(np.float64)
    if np.array_equal(wide, np.round(wide)):
        return wide
    rounded: np.ndarray = wide * (1 + _eps(value.dtype) * rng.choice((-1.0, 1.0), wide.shape))
    return rounded


def _limits(dtype: np.dtype[Any]) -> tuple[float, float, float]:
    """The rounding of a float type, its smallest normal number and its largest; of others none, none and infinity."""
    if dtype.kind != "f" and dtype != ml_dtypes.bfloat16:
        return 0.0, 0.0, math.inf
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(info.eps), float(info.smallest_normal), float(info.max)


def _eps(dtype: np.dtype[Any]) -> float:
    return _limits(dtype)[0]


def wrong_nodes(replayed: Sequence[Replayed]) -> list[Replayed]:
    """Those that are wrong, the one that is furthest off first."""
    return sorted((node for node in replayed if node.is_wrong), key=lambda node: (not node.failed, -node.ratio))
