"""Every node of a model for itself, on an executor, fed with what is right: which one computes something else.

What a node is fed is what the interpreter has for it in double, rounded to the node's types; so an error is the node's own, and
none is inherited. How large it may be follows from the numbers: how much the result moves when each input moves by a rounding
(the backward error of a sound kernel is of that size: Higham 2002, "Accuracy and Stability of Numerical Algorithms", section
1.5), and what a sum of so many terms of that size loses (section 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from refgrad.backends import Backend
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.questions.rounding import ADDING_UP
from refgrad.errors import RefgradError
from refgrad.protos.external import array_of
from refgrad.protos.inlining import inline_functions
from refgrad.protos.walk import reads_of
from refgrad.tables.randomness import may_draw, operator_of

Progress = Callable[[int, int], None]
DRAWS = 3  # of the inputs, each moved by a rounding
_FACTOR = 8.0  # of what moving the inputs by one rounding moves: a kernel rounds more than once
_QUANTIZING = frozenset((("", "QuantizeLinear"), ("", "DynamicQuantizeLinear")))


@dataclass(frozen=True)
class Replayed:
    """What came of one node.

    `error` is the largest one of an element, and `allowed` what rounding explains there; `ratio` is the largest ratio of the
    two. `at` is the element with the largest ratio: its output, its place, what is right and what the executor has. `why` says
    why the node was not judged; a node that the executor does not run has the reason in `failed`.
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

    @property
    def is_wrong(self) -> bool:
        """Whether the executor computes something else than the node means, or fails."""
        return self.ratio > 1 or bool(self.failed)

    def __str__(self) -> str:
        label = f"{self.operator} {self.name!r}"
        if self.failed:
            return f"{label} fails: {self.failed}"
        if self.why:
            return f"{label} is not judged: {self.why}"
        if self.at is None:
            return f"{label} is right"
        output, place, due, found = self.at
        said = "is wrong" if self.is_wrong else "is right"
        where = f"{output!r} has {found:.9g} at {list(place)} and {due:.9g} is due"
        return f"{label} {said}: {where}; rounding explains {self.allowed:.2g}"


class Replay:
    """A model, the values that are right for it, and one model for each of its nodes.

    :param model: a model, which is not modified. Functions are written out; the body of a control-flow node belongs to it.
    :param feeds: the values of its inputs, by name.
    :raises InvalidModelError: the model cannot be read.
    :raises FeedError: the feeds do not fit the model.
    :raises BackendError: the interpreter does not run it.
    """

    def __init__(self, model: ModelProto, feeds: Mapping[str, Any]) -> None:
        self.model = ModelProto()
        self.model.CopyFrom(model)
        if self.model.functions:
            self.model = inline_functions(self.model)
        self.nodes = list(self.model.graph.node)
        interpreter = NumpyBackend()
        held = {tensor.name: array_of(tensor) for tensor in self.model.graph.initializer}
        declared = interpreter.prepare(self.model).run(feeds, trace=True)
        wide = interpreter.prepare(self.model, precision="float64").run(feeds, trace=True)
        self.constants = set(held) - set(feeds)
        for node in self.nodes:
            if node.op_type == "Constant":
                self.constants.update(node.output)
        self._declared: dict[str, Any] = {**held, **declared, **feeds}
        self._wide: dict[str, Any] = {**held, **wide, **{name: _widened(value) for name, value in feeds.items()}}

    def right(self, name: str) -> Any:
        """What is right for a value: that in double, rounded to its type."""
        due, like = self._wide.get(name), self._declared.get(name)
        if not isinstance(due, np.ndarray) or not isinstance(like, np.ndarray):
            return like
        return due.astype(like.dtype) if due.dtype != like.dtype else due

    def exact(self, name: str) -> Any:
        """What is right for a value, in double."""
        return self._wide.get(name)

    def alone(self, node: NodeProto) -> tuple[ModelProto, dict[str, np.ndarray]]:
        """A model of one node, and what it is fed. What the model has as a constant stays one.

        :raises LookupError: it reads something that is no tensor.
        """
        made = ModelProto()
        made.ir_version = self.model.ir_version
        made.opset_import.extend(self.model.opset_import)
        made.graph.name = "node"
        made.graph.node.append(node)
        feeds: dict[str, np.ndarray] = {}
        for name in dict.fromkeys(reads_of(node)):
            value = self.right(name)
            if not isinstance(value, np.ndarray):
                raise LookupError(f"{name!r} is no tensor")
            if name in self.constants:
                made.graph.initializer.append(numpy_helper.from_array(value, name))
            else:
                feeds[name] = value
                made.graph.input.append(_described(name, value))
        for name in filter(None, node.output):
            value = self._declared.get(name)
            if not isinstance(value, np.ndarray):
                raise LookupError(f"{name!r} is no tensor")
            made.graph.output.append(helper.make_tensor_value_info(name, _kind(value), None))
        return made, feeds

    def run(self, executor: Backend, progress: Progress | None = None) -> Iterator[Replayed]:
        """Each node that computes something, in the order of the model.

        :param progress: called with how many nodes are done, and how many there are.
        """
        for position, node in enumerate(self.nodes):
            if progress is not None:
                progress(position, len(self.nodes))
            if node.op_type != "Constant":
                yield self._judged(position, node, executor)

    def _judged(self, position: int, node: NodeProto, executor: Backend) -> Replayed:
        domain, op_type = operator_of(node)
        name = node.name or next(filter(None, node.output), "")
        operator = f"{domain}.{op_type}" if domain else op_type
        said = Replayed(position, name, operator, tuple(filter(None, node.output)))
        if may_draw(node):
            return _with(said, why="it draws random numbers")
        try:
            model, feeds = self.alone(node)
            truth = _Truth(model, feeds, node)
        except LookupError as error:
            return _with(said, why=f"{error.args[0]}")
        except RefgradError as error:
            return _with(said, why=f"the interpreter does not run it alone: {error}")
        try:
            found = executor.prepare(model).run(feeds)
        except RefgradError as error:
            return _with(said, failed=str(error))
        worst = said
        for output, due in truth.due.items():
            one = _compared(said, output, np.asarray(found[output]), due, truth.allowed(output))
            worst = one if one.ratio > worst.ratio or worst.at is None else worst
        return worst


class _Truth:
    """What a node computes in double of what it is fed, and how far a sound kernel may be off."""

    def __init__(self, model: ModelProto, feeds: Mapping[str, np.ndarray], node: NodeProto) -> None:
        self._node = node
        self._types = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
        self._prepared = NumpyBackend().prepare(_with_inputs(model), precision="float64")
        self._feeds = {**feeds, **{t.name: array_of(t) for t in model.graph.initializer}}
        self._eps = max((_eps(value.dtype) for value in self._feeds.values()), default=0.0)
        self.due = self._prepared.run(self._feeds)
        self._moved = self._movements()
        self._terms = self._sizes_of_terms()

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
                if name in moved and np.shape(value) == moved[name].shape and _is_float(np.asarray(value)):
                    with np.errstate(all="ignore"):
                        distance = np.abs(np.asarray(value, np.float64) - self.due[name])
                    moved[name] = np.fmax(moved[name], np.where(np.isnan(distance), 0, distance))
        return moved

    def _sizes_of_terms(self) -> dict[str, np.ndarray]:
        """What is added up for each element, in size: f(|inputs|) for what is linear in each input."""
        if operator_of(self._node) not in ADDING_UP:
            return {}
        feeds = {name: np.abs(value) if _is_float(value) else value for name, value in self._feeds.items()}
        try:
            return {name: np.abs(np.asarray(value)) for name, value in self._prepared.run(feeds).items()}
        except RefgradError:
            return {}

    def allowed(self, output: str) -> np.ndarray:
        """What rounding explains of the error of each element."""
        due = np.asarray(self.due[output])
        if not _is_float(due):
            room = 1.0 if operator_of(self._node) in _QUANTIZING else 0.0
            return np.full(due.shape, room)
        kind = helper.tensor_dtype_to_np_dtype(self._types[output])
        eps, tiny = max(self._eps, _eps(kind)), _limits(kind)[1]
        terms = max((value.size for value in self._feeds.values() if _is_float(value)), default=1) / max(due.size, 1)
        with np.errstate(all="ignore"):
            size = np.abs(due)
            largest = np.max(size, where=np.isfinite(size), initial=0.0)
            room = _FACTOR * self._moved[output] + 4 * eps * size + 2 * tiny
            if output in self._terms:
                room = room + eps * (4 + math.sqrt(max(terms, 1))) * self._terms[output]
            else:  # approximations of functions are within a rounding of the largest result
                room = room + 4 * eps * largest
        made: np.ndarray = np.where(np.isfinite(room), room, np.inf)
        return made


def _compared(said: Replayed, output: str, found: np.ndarray, due: Any, allowed: np.ndarray) -> Replayed:
    due = np.asarray(due)
    if found.shape != due.shape:
        return _with(said, failed=f"{output!r} has the shape {list(found.shape)}, and {list(due.shape)} is due")
    if found.dtype == object or not found.size:
        same = bool((found == due).all()) if found.size else True
        return _with(said, failed="" if same else f"{output!r} has other texts")
    with np.errstate(all="ignore"):
        wide, right = found.astype(np.float64), due.astype(np.float64)
        limit = np.abs(right) > _limits(found.dtype)[2]  # it does not fit the type
        same = (wide == right) | (np.isnan(wide) & np.isnan(right)) | (limit & np.isinf(wide))
        error = np.where(same, 0.0, np.abs(wide - right))
        error = np.where(np.isnan(error), np.inf, error)
        ratio = np.where(error == 0, 0.0, error / np.maximum(allowed, np.finfo(float).tiny))
    at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    place = tuple(int(k) for k in at)
    return Replayed(
        said.position, said.name, said.operator, said.outputs, float(ratio[at]), float(error[at]), float(allowed[at]),
        (output, place, float(right[at]), float(wide[at])),
    )  # fmt: skip


def _with(said: Replayed, **changes: Any) -> Replayed:
    return Replayed(said.position, said.name, said.operator, said.outputs, **changes)


def _with_inputs(model: ModelProto) -> ModelProto:
    """The model whose constants can be fed."""
    made = ModelProto()
    made.CopyFrom(model)
    made.graph.input.extend(_described(t.name, array_of(t)) for t in model.graph.initializer)
    return made


def _by_a_rounding(value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The numbers in double, each moved by up to one rounding of its type; those that are whole stay."""
    if not _is_float(value):
        return value
    wide = value.astype(np.float64)
    if np.array_equal(wide, np.round(wide)):
        return wide
    made: np.ndarray = wide * (1 + _eps(value.dtype) * rng.choice((-1.0, 1.0), wide.shape))
    return made


def _described(name: str, value: np.ndarray) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, _kind(value), value.shape)


def _kind(value: np.ndarray) -> int:
    return TensorProto.STRING if value.dtype == object else int(helper.np_dtype_to_tensor_dtype(value.dtype))


def _is_float(value: np.ndarray) -> bool:
    return value.dtype.kind == "f" or value.dtype == ml_dtypes.bfloat16


def _limits(dtype: np.dtype[Any]) -> tuple[float, float, float]:
    """The rounding of a float type, its smallest normal number and its largest; of others none, none and infinity."""
    if dtype.kind != "f" and dtype != ml_dtypes.bfloat16:
        return 0.0, 0.0, math.inf
    found: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(found.eps), float(found.smallest_normal), float(found.max)


def _eps(dtype: np.dtype[Any]) -> float:
    return _limits(dtype)[0]


def _widened(value: Any) -> Any:
    return value.astype(np.float64) if isinstance(value, np.ndarray) and _is_float(value) else value


def wrong_nodes(found: Sequence[Replayed]) -> list[Replayed]:
    """Those that are wrong, the one that is furthest off first."""
    return sorted((one for one in found if one.is_wrong), key=lambda one: (not one.failed, -one.ratio))
