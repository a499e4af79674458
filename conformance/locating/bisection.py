"""Find the wrong rule of a gradient builder: it differentiates parts of the model, at the values that they have in it.

A part is some of the nodes in a row, as a model of its own: what reaches it from before is fed, what it makes for later has
random cotangents, constants stay constants and every size is known. Its gradient runs in double on the interpreter, and is
held against central differences of the part, which know no rule, along a random direction for each input. A part that is wrong,
refused or crashes is halved until one node is left, or until both halves are right and only the two together are not.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.judge.nan.watching import label_of
from refgrad.conformance.known.bugs.builders import builder_bugs
from refgrad.conformance.known.bugs.matching import is_about
from refgrad.conformance.locating.repeating import identity_model
from refgrad.conformance.locating.sides import INTERPRETER, Build, Live
from refgrad.conformance.locating.values import ModelValues, described, kind_of
from refgrad.conformance.oracles.central import one_sided
from refgrad.conformance.oracles.differences import NAME, STEPS, direction_at, forward, settled
from refgrad.conformance.oracles.joint import contradiction
from refgrad.conformance.problems.feeds import widened
from refgrad.conformance.problems.kinked import kinked_among, kinks_of
from refgrad.conformance.problems.observation import Built, Directional
from refgrad.conformance.problems.point import in_float64, rms, without
from refgrad.conformance.problems.problem import Problem
from refgrad.conformance.problems.systems.builders import CrashError
from refgrad.errors import AnswerError, BuilderError, ModelWarning, RefgradError, UnknownNameError, abridged, raised
from refgrad.model.checks.malformed import explained
from refgrad.model.external import array_of
from refgrad.protos.traverse import every_node, nested, reads_of
from refgrad.protos.types import FLOATS
from refgrad.reverse.gradient import gradient as differentiate
from refgrad.reverse.gradient import preflight
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
_NARROWED = 1e3  # of the precision of a gradient's type: an error that a Cast to a narrower one makes
_FEW = 8  # nodes whose contributions are told apart
_MOST_FAULTS = 32  # after which the search ends
Part = tuple[int, ...]  # the positions of nodes, in order
_SIZES: dict[int, int] = {kind: helper.tensor_dtype_to_np_dtype(kind).itemsize for kind in FLOATS}
_TOLD = 1e-3  # of the same: a difference whose error is larger tells nothing


@dataclass(frozen=True)
class Fault:
    """Nodes whose gradient a builder gets wrong, refuses or dies of: one, or those that are wrong together alone.

    `by` is the input by which the derivative is wrong, along a direction in which it is `due` and the builder has `found`.
    `formula` is the derivative that holds, `known` what is known of the builder in this operator, or "". `value` is the value
    whose cotangent lacks a contribution, or has one too often, if the nodes are wrong together for it. A refusal has
    `is_no_gradient` if the builder does not say that it refuses, and its answer is no gradient.
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
    value: str = ""
    is_no_gradient: bool = False

    @property
    def label(self) -> str:
        """The nodes with their operators."""
        return ", ".join(f"{op} {name!r}" for op, name in zip(self.operators, self.nodes, strict=True))

    @property
    def deed(self) -> str:
        """A verb: the builder refuses the nodes, fails on them, or gets them wrong."""
        if self.kind == REFUSED:
            return "makes no gradient of" if self.is_no_gradient else "refuses"
        return "fails on" if self.kind == CRASHED else "gets wrong"

    def __str__(self) -> str:
        if self.kind != WRONG:
            return f"it {self.deed} {self.label}: {self.message}"
        if self.message:
            return f"{self.label}: {self.message}"
        slopes = f"{self.found:.9g} instead of {self.due:.9g}"
        return f"{self.label}: the derivative with respect to {self.by!r} along a direction is {slopes}"


@dataclass(frozen=True)
class Bisected:
    """The result of a bisection: the faults, how many gradients were built, and why some nodes cannot be judged.

    Before the end `is_whole` is false, and `within` are the fewest nodes so far that a fault lies in, none if none are known.
    `nothing` says why the builder makes no gradient at all, not even of one Identity: then no node is at fault.
    """

    faults: tuple[Fault, ...]
    built: int
    silent: Mapping[str, str]
    is_whole: bool = True
    within: tuple[str, ...] = ()
    nothing: str = ""


@explained
def bisect(
    model: ModelProto,
    feeds: Mapping[str, Any],
    builder: str | Build,
    seed: int = 0,
    name: str = "",
    suspects: Collection[str] = (),
    wrt: Collection[str] | None = None,
    right: Collection[str] = (),
    so_far: Callable[[Bisected], None] | None = None,
) -> Bisected:
    """Find the nodes whose gradient a builder gets wrong, refuses or dies of.

    The whole model is asked first: nothing is said of a builder that gets that right.

    :param model: the model that is differentiated. It is not modified.
    :param feeds: the values of its inputs, by name.
    :param builder: the name of a builder of the suite, "package.module:function", or what makes the gradient of a problem.
    :param seed: of cotangents and directions.
    :param name: what the suite calls a builder that is given as a function: known bugs of it are named.
    :param suspects: inputs and initializers whose gradient is known to be wrong: they are looked at first.
    :param wrt: the names to differentiate by, by default as `refgrad.gradient` has them: no part is differentiated by a value
        that does not depend on one of them.
    :param right: names in `wrt` whose gradient is known to be right and not 0. A rule on its way is not accused.
    :param so_far: called with what is known after each gradient that was built.
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
    name = builder if isinstance(builder, str) else name
    search = _Search(ModelValues(model, feeds), side.build, seed, suspects, wrt, right)

    def found(faults: Sequence[Fault], is_whole: bool) -> Bisected:
        told = tuple(_explained(fault, name, search.values.model) for fault in faults)
        within = () if is_whole else search.within
        return Bisected(told, search.built, dict(search.silent), is_whole, within, search.nothing)

    search.tell = lambda: None if so_far is None else so_far(found(search.guilty(), False))
    try:
        return found(search.faults(), True)
    finally:
        side.close()


def _explained(fault: Fault, builder: str, model: ModelProto) -> Fault:
    """The fault with the right formula for its operator, and known faults of the builder in such nodes."""
    if len(fault.operators) > 1 or fault.value:
        return replace(fault, formula="the cotangents of a value that several nodes read are added")
    [operator] = fault.operators
    try:
        formula = " ".join(explain(operator).text.partition("\n\n")[0].split())
    except UnknownNameError:
        formula = ""
    of_operator = [bug for bug in builder_bugs() if bug.operator == operator and builder in bug.builders]
    nodes = [node for node in model.graph.node if label_of(node) in fault.nodes]
    of_kind = [bug for bug in of_operator if isinstance(bug.given, str) == (fault.kind != WRONG)]
    known = dict.fromkeys(bug.fault for bug in of_kind if any(is_about(bug, node, model) for node in nodes))
    return replace(fault, formula=formula, known="; ".join(known))


class _Search:
    """The parts of a model, and what a builder makes of them."""

    def __init__(
        self,
        values: ModelValues,
        build: Build,
        seed: int,
        suspects: Collection[str] = (),
        wrt: Collection[str] | None = None,
        right: Collection[str] = (),
    ) -> None:
        self.values, self.seed, self.suspects, self._right = values, seed, frozenset(suspects), frozenset(right)
        self._moving = _moving(values.model, preflight(values.model).wrt if wrt is None else wrt)
        self.nodes = [node for node in values.model.graph.node if node.op_type != "Constant"]
        self._build = build
        self._outputs = {value.name for value in values.model.graph.output}
        self._readers: dict[str, set[int]] = {}
        for position, node in enumerate(self.nodes):
            for name in reads_of(node):
                self._readers.setdefault(name, set()).add(position)
        graph = values.model.graph
        self._declared = {value.name: value for value in graph.input}
        self._declared |= {v.name: v for v in graph.output if v.type.tensor_type.HasField("shape")}
        self._has_open_sizes = any(map(_has_open_sizes, graph.input))
        self._are_sizes_open = False
        self.built = 0
        self.silent: dict[str, str] = {}
        self.nothing = ""
        self._is_no_answer = False  # the last gradient was none
        self.tell: Callable[[], None] = lambda: None
        self._found: list[Fault] = []
        self._new: list[Fault] = []  # in the nodes that are looked at, not yet sorted out
        self._wrong: Part = ()  # the last part in which a fault is known to be

    @property
    def within(self) -> tuple[str, ...]:
        """The fewest nodes so far that the fault lies in that is looked for, by their labels."""
        return tuple(map(self._label, self._wrong))

    def faults(self) -> list[Fault]:
        """The faults in all nodes: the nodes at fault are left out, and the rest is looked at again until it is right."""
        found = self._found
        rest = tuple(range(len(self.nodes)))
        while len(found) < _MOST_FAULTS:
            fault = self.verdict(rest)
            if fault is None or (found and not isinstance(fault, Fault)):
                break
            if not found and self._is_no_answer and (nothing := self._of_identity()):
                self.nothing = nothing
                return []
            more = self._within(rest, fault)
            if not more:
                break
            named = {one.value for one in found if one.value}
            more = list(
                {one.value or one.nodes: one for one in more if not one.value or one.value not in named}.values()
            )
            at_fault = {name for one in more for name in one.nodes}
            fewer = tuple(k for k in rest if self._label(k) not in at_fault)
            found += more
            self._new = []
            if fewer == rest:
                break
            rest = fewer
        return self.guilty()

    def _of_identity(self) -> str:
        """The reason why the answer for one Identity is no gradient; "" if it is one, or if the builder refuses or crashes."""
        model, feeds = identity_model()
        cotangents = {value.name: np.ones_like(feeds["x"]) for value in model.graph.output}
        try:
            self._build(Problem("identity", model, ("x",), dict(feeds), cotangents, self.seed))
        except AnswerError as error:
            return str(error)
        except Exception:  # a builder that is a function raises anything
            return ""
        return ""

    def guilty(self) -> list[Fault]:
        """The faults so far, in the order of the model."""
        found = list({one.value or one.nodes: one for one in (*self._found, *self._new)}.values())
        guilty = [one for one in found if not self._moving.get(one.by, frozenset()) & self._right]
        return sorted(guilty or found, key=self._place)

    def _place(self, fault: Fault) -> int:
        return next(k for k in range(len(self.nodes)) if self._label(k) == fault.nodes[0])

    def _label(self, position: int) -> str:
        return label_of(self.nodes[position])

    def _within(self, part: Part, fault: Fault | str | None) -> list[Fault]:
        if fault is None:
            return []
        if isinstance(fault, Fault):
            self._wrong = part
        if len(part) == 1:
            return self._noted(fault) if isinstance(fault, Fault) else []
        first, second = part[: len(part) // 2], part[len(part) // 2 :]
        left, right = self.verdict(first), self.verdict(second)
        if left is None and right is None:
            left, right = self.verdict(first, careful=True), self.verdict(second, careful=True)
        if left is None and right is None and self._has_open_sizes and not self._are_sizes_open:
            self._are_sizes_open = True
            left, right = self.verdict(first), self.verdict(second)
        if left is None and right is None:
            return self._noted(self._together(part, fault)) if isinstance(fault, Fault) else []
        return self._within(first, left) + self._within(second, right)

    def _noted(self, fault: Fault) -> list[Fault]:
        """A fault in a list, once it is among those that are known."""
        self._new.append(fault)
        self._wrong = ()
        return [fault]

    def _together(self, part: Part, fault: Fault) -> Fault:
        """The fewest nodes that are wrong together: whatever they do not need is left out, in ever smaller pieces."""
        size = len(part) // 2
        while size and len(part) > 1:
            at = 0
            while at < len(part) and len(part) > 2:
                fewer = part[:at] + part[at + size :]
                smaller = self.verdict(fewer) if len(fewer) > 1 else None
                if isinstance(smaller, Fault):
                    part, fault = fewer, smaller
                else:
                    at += size
            size //= 2
        return (self._of_value(part) if len(part) <= _FEW else None) or fault

    def _of_value(self, part: Part, is_whole: bool = False) -> Fault | None:
        """The fault of a value that nodes of a part read: contributions to its cotangent that are lost or counted too often.

        What the value is computed from has a gradient that is a sum over the readers of the value. Least squares give the
        factor with which the builder has each of them. Unless `is_whole`, all readers of the value are asked next.
        """
        nodes = [self.nodes[k] for k in part]
        try:
            problem = self._problem(part)
            if problem is None:
                return None
            found = _gradients(problem, self._build(problem))
            inside = _moving(problem.model, problem.wrt)
            for value in dict.fromkeys(name for node in nodes for name in reads_of(node) if name in inside):
                terms = _contributions(problem, value)
                sources = [name for name in problem.wrt if name in inside[value]]
                if len(terms) < 2 or any(found[name].shape != problem.at[name].shape for name in sources):
                    continue
                columns = {
                    reader: np.concatenate([one[name].reshape(-1) for name in sources]) for reader, one in terms.items()
                }
                sums = np.concatenate([found[name].reshape(-1) for name in sources])
                odd = _odd_factors(columns, sums)
                if odd:
                    for whole in () if is_whole else self._around(value):
                        if len(whole) <= _FEW and (seen := self._of_value(whole, is_whole=True)):
                            return seen
                    is_output = value in self._outputs and is_whole
                    return self._without(value, odd, is_output)
        except (LookupError, RefgradError, CrashError, ValueError):
            return None
        return None

    def _without(self, value: str, odd: Mapping[tuple[str, ...], float], is_output: bool) -> Fault:
        """The fault of a value whose cotangent has some contributions with these factors, by the labels of readers.

        Readers whose contributions are equal stand together: nobody can tell which of them it is.
        """
        by_label = {label_of(node): node for node in self.nodes}
        maker = next((label_of(node) for node in self.nodes if value in node.output), None)
        named = {maker, *(reader for group in odd for reader in group)}
        labels = tuple(label for label in by_label if label in named)  # in the order of the model
        told = []
        for group, factor in odd.items():
            as_output = "the cotangent of the output" if is_output else "its other readers"
            names = [f"{by_label[reader].op_type} {reader!r}" if reader else as_output for reader in group]
            if len(names) == 1:
                times = "lost" if abs(factor) < _TOLD else f"counted {factor:.4g} times"
                told.append(f"the contribution of {names[0]} to the cotangent of {value!r} is {times}")
            else:
                counted = f"counted {factor:.4g} times instead of {len(group)}"
                told.append(
                    f"the equal contributions of {' and '.join(names)} to the cotangent of {value!r} are {counted}"
                )
        operators = tuple(_operator(by_label[label]) for label in labels)
        return Fault(WRONG, labels, operators, "; ".join(told), value=value)

    def _around(self, value: str) -> tuple[Part, Part]:
        """The nodes that read a value, alone and with the one that makes it."""
        readers = self._readers.get(value, set())
        makers = {k for k, node in enumerate(self.nodes) if value in node.output}
        return tuple(sorted(readers)), tuple(sorted(makers | readers))

    def verdict(self, part: Part, careful: bool = False) -> Fault | str | None:
        """The fault in the builder's gradient of these nodes; None if it is right, or a text that says why it cannot be judged.

        :param careful: move the inputs one by one, and not several at once.
        """
        nodes = [self.nodes[k] for k in part]
        labels = tuple(map(label_of, nodes))
        operators = tuple(map(_operator, nodes))
        try:
            problem = self._problem(part)
        except LookupError as error:
            if len(nodes) == 1:
                self.silent[labels[0]] = str(error.args[0])
            return str(error.args[0])
        if problem is None:
            return None
        self.tell()
        self.built += 1
        self._is_no_answer = False
        try:
            built = self._build(problem)
        except (BuilderError, AnswerError) as error:
            self._is_no_answer = isinstance(error, AnswerError)
            return Fault(REFUSED, labels, operators, str(error), is_no_gradient=self._is_no_answer)
        except CrashError as error:
            return Fault(CRASHED, labels, operators, str(error))
        except RefgradError as error:
            return Fault(REFUSED, labels, operators, str(error))
        except Exception as error:
            return Fault(CRASHED, labels, operators, f"it raised {raised(error)}")
        return self._compared(problem, built, labels, operators, careful)

    def _problem(self, part: Part) -> Problem | None:
        """The problem of the part as a model of its own; None if it has no derivative that can be asked for.

        :raises LookupError: it draws random numbers, or reads or makes something that is no tensor of finite numbers.
        """
        nodes, inner = [self.nodes[k] for k in part], set(part)
        if drawing := next((node for node in nodes if may_draw(node)), None):
            raise LookupError(f"{drawing.name or drawing.output[0]!r} draws random numbers")
        inside = {name for node in nodes for name in node.output if name}
        outputs = {name for name in inside if name in self._outputs or self._readers.get(name, set()) - inner}
        model, feeds = self.values.part(nodes, outputs)
        values = feeds | {tensor.name: array_of(tensor) for tensor in model.graph.initializer}
        results = {value.name: self.values.tensor(value.name) for value in model.graph.output}
        for name, value in (values | results).items():
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise LookupError(f"{name!r} is not finite")
        wrt = [n for n, value in values.items() if value.dtype.kind == "f" and n in self._moving]
        cotangents: dict[str, np.ndarray] = {}
        rng = np.random.default_rng([self.seed, 2, len(inside)])
        for name, value in sorted(results.items()):
            if value.dtype.kind == "f":
                drawn = np.where(np.abs(value) > _MASK, 0.0, rng.standard_normal(value.shape))
                cotangents[name] = drawn.astype(value.dtype)
        if len(nodes) == len(self.nodes):
            self._declare(model.graph, self._declared)
        elif self._are_sizes_open:
            self._declare(model.graph, {name: _open(name, value) for name, value in (feeds | results).items()})
            del model.graph.value_info[:]
        if not wrt or not cotangents:
            return None
        return Problem("part", model, tuple(wrt), feeds, cotangents, self.seed)

    def _declare(self, graph: GraphProto, known: Mapping[str, ValueInfoProto]) -> None:
        for value in (*graph.input, *graph.output):
            if value.name in known:
                value.CopyFrom(known[value.name])

    def _compared(
        self, problem: Problem, built: Built, labels: tuple[str, ...], operators: tuple[str, ...], careful: bool
    ) -> Fault | None:
        try:
            gradients = _gradients(problem, built)
        except RefgradError as error:
            return Fault(CRASHED, labels, operators, f"its gradient does not run: {error}")
        for name, gradient in gradients.items():
            shape = problem.at[name].shape
            if gradient.shape != shape:
                text = f"the gradient by {name!r} has the shape {list(gradient.shape)} instead of {list(shape)}"
                return Fault(WRONG, labels, operators, text, name)
        ask = _Asked(problem, gradients, self.seed)
        order = sorted(problem.wrt, key=lambda name: name not in self.suspects)
        first = sum(name in self.suspects for name in order)
        rest = range(first, len(order), 1 if careful else _AT_ONCE)
        for together in [order[:first], *(order[k : k + rest.step] for k in rest)]:
            if len(together) > 1 and together[0] not in self.suspects and ask.is_right(together):
                continue
            if fault := ask.contradicted(together):
                return Fault(WRONG, labels, operators, "", *fault)
        if found := ask.contradicted_together():
            direction, due, slope = found
            text = f"along {direction} the derivative is {due:.6g}, but its gradients together give {slope:.6g}"
            return Fault(WRONG, labels, operators, text, "", due, slope)
        narrowed = narrowing_casts(built.model, problem.model)
        if narrowed and _rounds(gradients, _gradients(problem, built, None)):
            [kind] = _cast_to(narrowed[0])
            narrower = helper.tensor_dtype_to_np_dtype(kind).name
            casts = abridged([repr(label_of(node)) for node in narrowed])
            text = f"its gradient rounds to {narrower}, and the model does not: Cast {casts}"
            return Fault(WRONG, labels, operators, text)
        return None


def narrowing_casts(made: ModelProto, model: ModelProto) -> list[NodeProto]:
    """The Casts of a gradient to a float type that is narrower than the types of the model: in double they round nothing."""
    values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    held = {value.type.tensor_type.elem_type for value in values} | {one.data_type for one in model.graph.initializer}
    held |= {kind for node in every_node(model) for kind in _cast_to(node)}
    least = min((_SIZES[kind] for kind in held if kind in _SIZES), default=0)
    return [
        node
        for node in every_node(made)
        if any(_SIZES.get(kind, least) < least for kind in _cast_to(node) if kind not in held)
    ]


def _cast_to(node: NodeProto) -> list[int]:
    return [attribute.i for attribute in node.attribute if node.op_type == "Cast" and attribute.name == "to"]


def _odd_factors(columns: Mapping[str, np.ndarray], sums: np.ndarray) -> dict[tuple[str, ...], float]:
    """The factors of contributions in a sum that are not 1, or not their number where some are equal; none if it is no sum."""
    largest = max(float(np.linalg.norm(column)) for column in columns.values())
    groups: dict[tuple[str, ...], np.ndarray] = {}
    for reader, column in columns.items():
        if np.linalg.norm(column) <= _TOLD * largest:
            continue
        same = next((key for key, other in groups.items() if np.linalg.norm(column - other) <= _TOLD * largest), ())
        groups.pop(same, None)
        groups[(*same, reader)] = column
    matrix = np.stack(list(groups.values()), 1)
    factors = np.linalg.lstsq(matrix, sums, rcond=None)[0]
    if np.linalg.norm(matrix @ factors - sums) > _TOLD * np.linalg.norm(sums):
        return {}
    return {key: float(f) for key, f in zip(groups, factors, strict=True) if abs(f - len(key)) > _TOLD}


def _contributions(problem: Problem, value: str) -> dict[str, dict[str, np.ndarray]]:
    """The gradients of a problem by the readers of a value: the part that goes through each. "" is the value as an output.

    :raises RefgradError: refgrad does not differentiate it, or the interpreter does not run it.
    """
    graph = problem.model.graph
    readers = [k for k, node in enumerate(graph.node) if value in reads_of(node)]
    apart = ModelProto()
    apart.CopyFrom(problem.model)
    results = NumpyBackend().prepare(problem.model).run(dict(problem.feeds), trace=True)
    weights = {tensor.name: array_of(tensor) for tensor in graph.initializer}
    held = np.asarray(results[value] if value in results else {**weights, **problem.feeds}[value])
    copies = {f"{value}/{k}": label_of(graph.node[k]) for k in readers}
    for k, name in zip(readers, copies, strict=True):
        for node in nested([apart.graph.node[k]]):
            node.input[:] = [name if read == value else read for read in node.input]
        apart.graph.input.append(described(name, held))
    others = {name: cotangent for name, cotangent in problem.cotangents.items() if name != value}
    seeds: dict[str, np.ndarray] = {} if value not in problem.cotangents else {"": problem.wide_cotangents[value]}
    if others:
        fed = {**problem.feeds, **dict.fromkeys(copies, held)}
        seen = replace(problem, model=apart, wrt=tuple(copies), feeds=fed, cotangents=others)
        seeds |= {copies[name]: adjoint for name, adjoint in _right_gradients(seen).items()}
    if value in problem.wrt:
        return {reader: {value: adjoint} for reader, adjoint in seeds.items()}
    before = ModelProto()
    before.CopyFrom(problem.model)
    del before.graph.output[:]
    before.graph.output.append(described(value, held))
    names = [name for name in problem.wrt if name in _moving(problem.model, problem.wrt)[value]]
    parts = replace(problem, model=before, wrt=tuple(names))
    return {reader: _right_gradients(replace(parts, cotangents={value: seed})) for reader, seed in seeds.items()}


def _right_gradients(problem: Problem) -> dict[str, np.ndarray]:
    """refgrad's gradients of a problem, in double."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)  # some outputs may not depend on all inputs
        return _gradients(problem, Built.of(differentiate(problem.model, list(problem.wrt), list(problem.cotangents))))


def _operator(node: NodeProto) -> str:
    return ".".join(filter(None, operator_of(node)))


def _rounds(in_double: Mapping[str, np.ndarray], in_types: Mapping[str, np.ndarray]) -> bool:
    """True if gradients in the types of a model are far from those in double: a Cast of whole numbers rounds nothing."""
    for name, due in in_double.items():
        got = in_types[name]
        error = np.max(np.abs(got.astype(np.float64) - due), initial=0.0)
        if got.dtype.kind == "f" and error > _NARROWED * np.finfo(got.dtype).eps * np.max(np.abs(due), initial=0.0):
            return True
    return False


def _gradients(problem: Problem, built: Built, precision: str | None = "float64") -> dict[str, np.ndarray]:
    """The gradients of a problem that a builder made, in double on the interpreter, or in its types; 0 where there is none.

    :raises RefgradError: the interpreter does not run it.
    """
    wide = problem.wide_cotangents
    fed = {built.cotangents[name]: value for name, value in wide.items() if name in built.cotangents}
    names = {value.name for value in built.model.graph.input}
    feeds = {**built.constants, **problem.feeds}
    if precision is None:
        fed = {built.cotangents[n]: value for n, value in problem.cotangents.items() if n in built.cotangents}
    else:
        feeds = widened(feeds)
    feeds |= fed
    results = (
        NumpyBackend()
        .prepare(built.model, precision=precision)
        .run({name: value for name, value in feeds.items() if name in names})
    )
    return {
        name: np.asarray(results[built.gradients[name]])
        if name in built.gradients
        else np.zeros(problem.at[name].shape)
        for name in problem.wrt
    }


class _Asked:
    """Central differences of a part, held against a gradient of it."""

    def __init__(self, problem: Problem, gradients: Mapping[str, np.ndarray], seed: int) -> None:
        self._problem, self._gradients = problem, gradients
        self._at, self._cotangents = problem.at, problem.wide_cotangents
        self._evaluate, self._seed = forward(problem), seed

    def contradicted(self, names: Sequence[str]) -> tuple[str, float, float] | None:
        """The first input by which the gradient is wrong, with the expected derivative and the actual one."""
        for name in names:
            for direction in (self._drawn(name), self._suggested(name)):
                if direction is not None and (found := self._contradicted_along(name, direction)):
                    return name, *found
        return None

    def _contradicted_along(self, name: str, direction: np.ndarray) -> tuple[float, float] | None:
        """The derivative along a direction, and the one by the gradient; None if the gradient is right or nobody can tell."""
        told = self._told([self._along(name, direction)])
        if told is None or told.is_right:
            return None
        kinks, are_all = self._kinks(name)
        if kinks.any():
            outside = self._outside(name, kinks)
            if outside is not None:
                return outside
            told = self._told([self._along(name, without(direction, kinks))]) if are_all else None
        return (told.due, told.found) if told is not None and not told.is_right else None

    @cached_property
    def _other(self) -> Mapping[str, np.ndarray]:
        """refgrad's gradients of the part. They judge nobody: where they differ, differences are taken along the difference."""
        try:
            return _right_gradients(self._problem)
        except (RefgradError, ValueError):  # an operator without a rule
            return {}

    def _suggested(self, name: str) -> np.ndarray | None:
        """A direction in which the gradient is furthest from another one; None if they agree. A random one may not show it."""
        gradient, other, x = self._gradients[name], self._other.get(name), self._at[name]
        if other is None or other.shape != gradient.shape:
            return None
        apart = np.where(np.abs(x) <= _MASK, gradient - other, 0.0)
        size = float(np.linalg.norm(apart))
        if not np.isfinite(size) or size <= _ALLOWED * float(np.linalg.norm(gradient)):
            return None
        return np.asarray(apart * ((rms(x) or 1.0) * np.sqrt(x.size) / size))

    def contradicted_together(self) -> tuple[str, float, float] | None:
        """A direction along which the gradients together are no derivative, though each element is one at its kink."""
        if not kinks_of(self._problem.model):
            return None
        rng = np.random.default_rng([self._seed, 6])
        gradients = {name: np.asarray(value, np.float64) for name, value in self._gradients.items()}
        return contradiction(self._evaluate, self._at, self._cotangents, gradients, _ALLOWED, rng)

    def _kinks(self, name: str) -> tuple[np.ndarray, bool]:
        """A mask of the elements at a kink, and whether it has all: of very many, some are looked at, drawn by chance."""
        problem, x = self._problem, self._at[name]
        where = np.zeros(x.shape, bool)
        if not np.isfinite(self._gradients[name]).all() or not kinks_of(problem.model):
            return where, True
        prepared = in_float64(problem.model, problem.wrt)

        def among(places: np.ndarray) -> np.ndarray | None:
            return kinked_among(problem.model, prepared, self._at, name, problem.cotangents, places)

        try:
            kinks = among(np.ones(x.shape, bool))
            if kinks is not None:
                return kinks, True
            where.flat[np.random.default_rng([self._seed, 4]).permutation(x.size)[:_LOOKED]] = True
            kinks = among(where)
            return where if kinks is None else kinks, False
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
            slope = float(gradient.flat[index])
            slack = sum(side.error for side in sides) / length + _TOLD * max(abs(low), abs(high))
            if not low - slack <= slope <= high + slack:
                return (low if slope < low else high), slope
        return None

    def is_right(self, names: Sequence[str]) -> bool:
        """True if differences along one direction for all of these inputs agree; each moves so far that none hides another."""
        if any(self._suggested(name) is not None for name in names):
            return False
        asked = [self._along(name, self._drawn(name)) for name in names]
        sizes = [part.size for part in asked if part.size]
        least = max(min(sizes, default=1.0), _APART * max(sizes, default=1.0))
        told = self._told([part.times(min(1.0, least / part.size)) if part.size else part for part in asked])
        return told is not None and told.is_right

    def _drawn(self, name: str) -> np.ndarray:
        rng = np.random.default_rng([self._seed, 1, zlib.crc32(name.encode())])
        return _direction(self._at[name], self._gradients[name], rng)

    def _along(self, name: str, direction: np.ndarray) -> _Along:
        gradient = self._gradients[name]
        size = float(np.linalg.norm(gradient) * np.linalg.norm(direction))
        return _Along(name, direction, float(np.sum(gradient * direction)), size)

    def _told(self, asked: Sequence[_Along]) -> _Answer | None:
        """The answer of differences about the derivative along the sum of some directions; None if they do not tell."""

        def moved(at: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
            return self._evaluate(
                {**self._at, **{part.name: self._at[part.name] + at[_STEP] * part.direction for part in asked}}
            )

        observation = settled(moved, {_STEP: np.zeros(())}, _STEP, np.ones(()), self._cotangents, NAME)
        if not isinstance(observation, Directional):
            return None
        derivative = sum(part.derivative for part in asked)
        if not np.isfinite(derivative):
            return _Answer(False, observation.value, derivative)
        size = sum(part.size for part in asked) + abs(observation.value)
        if not observation.error <= _TOLD * size:
            return None
        return _Answer(
            abs(derivative - observation.value) <= 4 * observation.error + _ALLOWED * size,
            observation.value,
            derivative,
        )


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


def _moving(model: ModelProto, wrt: Collection[str]) -> dict[str, frozenset[str]]:
    """The values that depend on these inputs and initializers, each with those that it depends on."""
    moving = {name: frozenset([name]) for name in wrt}
    for node in model.graph.node:
        if sources := frozenset().union(*(moving.get(name, ()) for name in reads_of(node))):
            moving |= dict.fromkeys(filter(None, node.output), sources)
    return moving


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
    direction: np.ndarray = drawn + np.where(np.abs(x) <= _MASK, gradient, 0.0) * (
        _ALONG / size * float(np.median(moved))
    )
    return direction
