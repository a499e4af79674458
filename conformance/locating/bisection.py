"""Find the wrong rule of a gradient builder: it differentiates parts of the model, at the values that they have in it.

A part is some of the nodes in a row, as a model of its own: what reaches it from before is fed, what it makes for later has
random cotangents, constants stay constants and every size is known. Its gradient runs in double on the interpreter, and is
held against central differences of the part, which know no rule, along a random direction for each input. A part that is wrong,
refused or crashes is halved until one node is left, or until both halves are right and only the two together are not.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.findings.builders import builder_findings
from refgrad.conformance.locating.sides import INTERPRETER, Build, Live
from refgrad.conformance.locating.values import ModelValues, kind_of
from refgrad.conformance.oracles.central import one_sided
from refgrad.conformance.oracles.differences import NAME, STEPS, direction_at, forward, settled
from refgrad.conformance.questions.evidence import Built, Directional
from refgrad.conformance.questions.feeds import widened
from refgrad.conformance.questions.kinked import kinked_among, kinks_of
from refgrad.conformance.questions.point import in_float64, rms, without
from refgrad.conformance.questions.question import Question
from refgrad.conformance.systems.builders import CrashError
from refgrad.errors import AnswerError, BuilderError, RefgradError, UnknownNameError, raised
from refgrad.protos.external import array_of
from refgrad.protos.malformed import explained
from refgrad.protos.walk import reads_of
from refgrad.show.explain import explain
from refgrad.tables.randomness import may_draw, operator_of

WRONG, REFUSED, CRASHED = "wrong", "refused", "crashed"
_ALLOWED = 1e-6  # of |gradient|·|direction|: the gradient is in double
_MASK = 1e18  # a larger number is a mask
_ALONG = 0.6  # of a direction lies along the gradient; with 1 few elements may not move at all
_LOOKED = 64  # elements at kinks that are looked at one by one
_AT_ONCE = 16  # inputs that move together
_APART = 1e-3  # between the parts that they have in the derivative
_STEP = "step"
_TOLD = 1e-3  # of the same: a difference whose error is larger tells nothing


@dataclass(frozen=True)
class Fault:
    """Nodes whose gradient a builder gets wrong, refuses or dies of: one, or those that are wrong together alone.

    `by` is the input by which the derivative is wrong, along a direction in which it is `due` and the builder has `found`.
    `formula` is the derivative that holds, and `known` the finding that has this fault, "" where there is none.
    """

    kind: str
    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    message: str = ""
    by: str = ""
    due: float = 0.0
    found: float = 0.0
    formula: str = ""
    known: str = ""

    def __str__(self) -> str:
        label = ", ".join(f"{op} {name!r}" for op, name in zip(self.operators, self.nodes, strict=True))
        if self.kind != WRONG or self.message:
            return f"{label}: {self.kind}: {self.message}"
        return f"{label}: the derivative by {self.by!r} along a direction is {self.found:.9g} instead of {self.due:.9g}"


@dataclass(frozen=True)
class Bisected:
    """The result of a bisection: the faults, how many gradients were built, and why some nodes cannot be judged."""

    faults: tuple[Fault, ...]
    built: int
    silent: Mapping[str, str]


@explained
def bisect(
    model: ModelProto,
    feeds: Mapping[str, Any],
    builder: str | Build,
    seed: int = 0,
    name: str = "",
    suspects: Collection[str] = (),
) -> Bisected:
    """Find the nodes whose gradient a builder gets wrong, refuses or dies of.

    The whole model is asked first: nothing is said of a builder that gets that right.

    :param model: the model that is differentiated. It is not modified.
    :param feeds: the values of its inputs, by name.
    :param builder: the name of a builder of the suite, "package.module:function", or what makes the gradient of a question.
    :param seed: of cotangents and directions.
    :param name: what the suite calls a builder that is given as a function: findings about it are named.
    :param suspects: inputs and initializers whose gradient is known to be wrong: they are looked at first.
    :raises InvalidModelError: the model cannot be read.
    :raises FeedError: the feeds do not fit the model.
    :raises BackendError: the interpreter does not run the model.
    :raises OptionError: there is no such builder.

    >>> import numpy as np, onnx.parser
    >>> from refgrad.conformance import bisect
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { h = Tanh(x)  y = Mul(h, x) }'
    ... )
    >>> found = bisect(model, {"x": np.float32([1, 2])}, "refgrad")
    >>> found.faults, found.built
    ((), 1)
    """
    side = Live(builder, INTERPRETER)
    search = _Search(ModelValues(model, feeds), side.build, seed, suspects)
    name = builder if isinstance(builder, str) else name
    try:
        faults = [_explained(fault, name) for fault in search.faults(0, len(search.nodes))]
    finally:
        side.close()
    return Bisected(tuple(faults), search.built, search.silent)


def _explained(fault: Fault, builder: str) -> Fault:
    """The fault with the formula that holds for its operator, and the known faults of the builder in that operator."""
    if len(fault.operators) > 1:
        return replace(fault, formula="the adjoints of a value that several nodes read are added")
    [operator] = fault.operators
    try:
        formula = explain(operator).text
    except UnknownNameError:
        formula = ""
    known = [one.fault for one in builder_findings() if one.operator == operator and builder in one.builders]
    return replace(fault, formula=formula, known="; ".join(known))


class _Search:
    """The parts of a model, and what a builder makes of them."""

    def __init__(self, values: ModelValues, build: Build, seed: int, suspects: Collection[str] = ()) -> None:
        self.values, self.seed, self.suspects = values, seed, frozenset(suspects)
        self.nodes = [node for node in values.model.graph.node if node.op_type != "Constant"]
        self._build = build
        self._outputs = {value.name for value in values.model.graph.output}
        self._readers: dict[str, int] = {}  # the last node that reads a value
        for position, node in enumerate(self.nodes):
            self._readers.update(dict.fromkeys(reads_of(node), position))
        graph = values.model.graph
        self._declared = {value.name: value for value in graph.input}
        self._declared |= {v.name: v for v in graph.output if v.type.tensor_type.HasField("shape")}
        self._has_open_sizes = any(map(_has_open_sizes, graph.input))
        self._are_sizes_open = False
        self.built = 0
        self.silent: dict[str, str] = {}

    def faults(self, first: int, last: int) -> list[Fault]:
        """The faults among the nodes from `first` to before `last`."""
        return self._within(first, last, self.verdict(first, last))

    def _within(self, first: int, last: int, found: Fault | str | None) -> list[Fault]:
        if found is None:
            return []
        if last - first == 1:
            return [found] if isinstance(found, Fault) else []
        middle = (first + last) // 2
        left, right = self.verdict(first, middle), self.verdict(middle, last)
        if left is None and right is None:
            left, right = self.verdict(first, middle, careful=True), self.verdict(middle, last, careful=True)
        if left is None and right is None and self._has_open_sizes and not self._are_sizes_open:
            self._are_sizes_open = True
            left, right = self.verdict(first, middle), self.verdict(middle, last)
        if left is None and right is None:
            return [self._together(first, last, found)] if isinstance(found, Fault) else []
        return self._within(first, middle, left) + self._within(middle, last, right)

    def _together(self, first: int, last: int, found: Fault) -> Fault:
        """The fewest nodes in a row that are wrong together: the ends are moved inwards as long as the fault stays."""
        for is_left in (True, False):
            step = (last - first) // 2
            while step:
                ends = (first + step, last) if is_left else (first, last - step)
                smaller = self.verdict(*ends) if ends[1] - ends[0] > 1 else None
                if isinstance(smaller, Fault):
                    (first, last), found = ends, smaller
                step //= 2
        return found

    def verdict(self, first: int, last: int, careful: bool = False) -> Fault | str | None:
        """The fault in the builder's gradient of these nodes; None if it is right, or a text that says why it cannot be judged.

        :param careful: move the inputs one by one, and not several at once.
        """
        nodes = self.nodes[first:last]
        labels = tuple(node.name or next(filter(None, node.output), "") for node in nodes)
        operators = tuple(".".join(filter(None, operator_of(node))) for node in nodes)
        try:
            question = self._question(nodes, last)
        except LookupError as error:
            if len(nodes) == 1:
                self.silent[labels[0]] = str(error.args[0])
            return str(error.args[0])
        if question is None:
            return None
        self.built += 1
        try:
            built = self._build(question)
        except (BuilderError, AnswerError) as error:
            return Fault(REFUSED, labels, operators, str(error))
        except CrashError as error:
            return Fault(CRASHED, labels, operators, str(error))
        except RefgradError as error:
            return Fault(REFUSED, labels, operators, str(error))
        except Exception as error:
            return Fault(CRASHED, labels, operators, f"it raised {raised(error)}")
        return self._compared(question, built, labels, operators, careful)

    def _question(self, nodes: Sequence[NodeProto], last: int) -> Question | None:
        """The question about the part as a model of its own; None if it has no derivative that can be asked for.

        :raises LookupError: it draws random numbers, or reads or makes something that is no tensor of finite numbers.
        """
        if drawing := next((node for node in nodes if may_draw(node)), None):
            raise LookupError(f"{drawing.name or drawing.output[0]!r} draws random numbers")
        inside = {name for node in nodes for name in node.output if name}
        outputs = {name for name in inside if name in self._outputs or self._readers.get(name, -1) >= last}
        made, feeds = self.values.part(nodes, outputs)
        given = feeds | {tensor.name: array_of(tensor) for tensor in made.graph.initializer}
        results = {value.name: self.values.tensor(value.name) for value in made.graph.output}
        for name, value in (given | results).items():
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise LookupError(f"{name!r} is not finite")
        wrt = [n for n, value in given.items() if value.dtype.kind == "f" and (value.ndim or n in feeds)]
        cotangents: dict[str, np.ndarray] = {}
        rng = np.random.default_rng([self.seed, 2, len(inside)])
        for name, value in sorted(results.items()):
            if value.dtype.kind == "f":
                drawn = np.where(np.abs(value) > _MASK, 0.0, rng.standard_normal(value.shape))
                cotangents[name] = drawn.astype(value.dtype)
        if len(nodes) == len(self.nodes):
            self._declare(made.graph, self._declared)
        elif self._are_sizes_open:
            self._declare(made.graph, {name: _open(name, value) for name, value in (feeds | results).items()})
            del made.graph.value_info[:]
        if not wrt or not cotangents:
            return None
        return Question("part", made, tuple(wrt), feeds, cotangents, self.seed)

    def _declare(self, graph: GraphProto, known: Mapping[str, ValueInfoProto]) -> None:
        for value in (*graph.input, *graph.output):
            if value.name in known:
                value.CopyFrom(known[value.name])

    def _compared(
        self, question: Question, built: Built, labels: tuple[str, ...], operators: tuple[str, ...], careful: bool
    ) -> Fault | None:
        interpreter = NumpyBackend()
        fed = {
            built.cotangents[name]: value
            for name, value in question.wide_cotangents.items()
            if name in built.cotangents
        }
        names = {value.name for value in built.model.graph.input}
        feeds = widened({**built.constants, **question.feeds}) | fed
        try:
            results = interpreter.prepare(built.model, precision="float64").run(
                {name: value for name, value in feeds.items() if name in names}
            )
        except RefgradError as error:
            return Fault(CRASHED, labels, operators, f"its gradient does not run: {error}")
        gradients = {
            name: np.asarray(results[built.gradients[name]])
            if name in built.gradients
            else np.zeros(question.at[name].shape)
            for name in question.wrt
        }
        for name, gradient in gradients.items():
            shape = question.at[name].shape
            if gradient.shape != shape:
                text = f"the gradient by {name!r} has the shape {list(gradient.shape)} instead of {list(shape)}"
                return Fault(WRONG, labels, operators, text, name)
        ask = _Asked(question, gradients, self.seed)
        order = sorted(question.wrt, key=lambda name: name not in self.suspects)
        first = sum(name in self.suspects for name in order)
        rest = range(first, len(order), 1 if careful else _AT_ONCE)
        for together in [order[:first], *(order[k : k + rest.step] for k in rest)]:
            if len(together) > 1 and together[0] not in self.suspects and ask.is_right(together):
                continue
            if found := ask.contradicted(together):
                return Fault(WRONG, labels, operators, "", *found)
        return None


class _Asked:
    """Central differences of a part, held against a gradient of it."""

    def __init__(self, question: Question, gradients: Mapping[str, np.ndarray], seed: int) -> None:
        self._question, self._gradients = question, gradients
        self._at, self._cotangents = question.at, question.wide_cotangents
        self._evaluate, self._seed = forward(question), seed

    def contradicted(self, names: Sequence[str]) -> tuple[str, float, float] | None:
        """The first input by which the gradient is wrong, with the expected derivative and the actual one."""
        for name in names:
            asked = self._asked(name)
            told = self._told([asked])
            if told is None or told.is_right:
                continue
            kinks, are_all = self._kinks(name)
            if kinks.any():
                outside = self._outside(name, kinks)
                if outside is not None:
                    return name, *outside
                told = self._told([self._asked(name, kinks)]) if are_all else None
            if told is not None and not told.is_right:
                return name, told.due, told.found
        return None

    def _kinks(self, name: str) -> tuple[np.ndarray, bool]:
        """A mask of the elements at a kink, and whether it has all: of very many, some are looked at, drawn by chance."""
        question, x = self._question, self._at[name]
        where = np.zeros(x.shape, bool)
        if not np.isfinite(self._gradients[name]).all() or not kinks_of(question.model):
            return where, True
        prepared = in_float64(question.model, question.wrt)

        def among(places: np.ndarray) -> np.ndarray | None:
            return kinked_among(question.model, prepared, self._at, name, question.cotangents, places)

        try:
            found = among(np.ones(x.shape, bool))
            if found is not None:
                return found, True
            where.flat[np.random.default_rng([self._seed, 4]).permutation(x.size)[:_LOOKED]] = True
            found = among(where)
            return where if found is None else found, False
        except (RefgradError, ValueError):  # it does not run beside the point
            return np.zeros(x.shape, bool), True

    def _outside(self, name: str, kinks: np.ndarray) -> tuple[float, float] | None:
        """An element at a kink that is not between the derivatives of both sides: the nearer one of them, and the element."""
        gradient, x = self._gradients[name], self._at[name]
        for index in np.flatnonzero(kinks)[:_LOOKED]:
            direction = np.zeros(x.shape)
            direction.flat[index] = length = rms(x) or 1.0
            sides = one_sided(self._evaluate, self._at, {name: direction}, self._cotangents, STEPS[1])
            low, high = sorted(side.value / length for side in sides)
            found = float(gradient.flat[index])
            slack = sum(side.error for side in sides) / length + _TOLD * max(abs(low), abs(high))
            if not low - slack <= found <= high + slack:
                return (low if found < low else high), found
        return None

    def is_right(self, names: Sequence[str]) -> bool:
        """True if differences along one direction for all of these inputs agree; each moves so far that none hides another."""
        asked = [self._asked(name) for name in names]
        sizes = [one.size for one in asked if one.size]
        least = max(min(sizes, default=1.0), _APART * max(sizes, default=1.0))
        told = self._told([one.times(min(1.0, least / one.size)) if one.size else one for one in asked])
        return told is not None and told.is_right

    def _asked(self, name: str, still: np.ndarray | None = None) -> _Along:
        gradient = self._gradients[name]
        rng = np.random.default_rng([self._seed, 1, zlib.crc32(name.encode())])
        direction = without(_direction(self._at[name], gradient, rng), still)
        size = float(np.linalg.norm(gradient) * np.linalg.norm(direction))
        return _Along(name, direction, float(np.sum(gradient * direction)), size)

    def _told(self, asked: Sequence[_Along]) -> _Answer | None:
        """The answer of differences about the derivative along the sum of some directions; None if they do not tell."""

        def moved(at: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
            return self._evaluate(
                {**self._at, **{one.name: self._at[one.name] + at[_STEP] * one.direction for one in asked}}
            )

        said = settled(moved, {_STEP: np.zeros(())}, _STEP, np.ones(()), self._cotangents, NAME)
        if not isinstance(said, Directional):
            return None
        found = sum(one.derivative for one in asked)
        if not np.isfinite(found):
            return _Answer(False, said.value, found)
        size = sum(one.size for one in asked) + abs(said.value)
        if not said.error <= _TOLD * size:
            return None
        return _Answer(abs(found - said.value) <= 4 * said.error + _ALLOWED * size, said.value, found)


@dataclass(frozen=True)
class _Along:
    """A direction in which an input moves, the derivative along it by a gradient, and the size of the terms of that."""

    name: str
    direction: np.ndarray
    derivative: float
    size: float

    def times(self, factor: float) -> _Along:
        return _Along(self.name, factor * self.direction, factor * self.derivative, factor * self.size)


@dataclass(frozen=True)
class _Answer:
    is_right: bool
    due: float
    found: float


def _has_open_sizes(value: ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return not tensor.HasField("shape") or any(not dim.HasField("dim_value") for dim in tensor.shape.dim)


def _open(name: str, value: np.ndarray) -> ValueInfoProto:
    """The declaration of a value whose sizes are not known, nor whether other values have the same sizes."""
    sizes = [f"{name}_{axis}" for axis in range(value.ndim)]
    return helper.make_tensor_value_info(name, kind_of(value), sizes)


def _direction(x: np.ndarray, gradient: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random direction of the size of `x`, a part of it along the gradient: a wrong factor shows."""
    drawn = direction_at(np.where(np.abs(x) > _MASK, np.inf, x), rng)  # what hides others does not move
    size, moved = rms(gradient), np.abs(drawn[np.isfinite(gradient) & (gradient != 0)])
    if not size or not moved.size or not np.isfinite(gradient).all():
        return drawn
    made: np.ndarray = drawn + np.where(np.abs(x) <= _MASK, gradient, 0.0) * (_ALONG / size * float(np.median(moved)))
    return made
