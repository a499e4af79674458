"""A graph planned once and run many times: order, bound kernels, folded constants, when each value dies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper

from refgrad.backends.base import Value, graph_outputs
from refgrad.backends.numpy.binding import Bound, Scope, bind, label
from refgrad.backends.numpy.memory import WATCH, Progress, nbytes, owner, summary
from refgrad.backends.numpy.precision import Declared
from refgrad.backends.numpy.registry import Call, in_tuple
from refgrad.errors import BackendError, InvalidModelError
from refgrad.protos.external import array_of
from refgrad.protos.memory import allowed
from refgrad.protos.walk import ReadsAndWrites, positions_needed, topological_positions

_LARGEST = 2**28  # elements of a sparse tensor that is made dense
_FOLDED = 2**20  # bytes: a folded result is at most as large as this, or as its inputs
_VIEWED = 4  # a view that outlives an array this many times its size is copied


@dataclass(frozen=True, slots=True)
class PlanStep:
    """A bound node."""

    label: str
    bound: Bound
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """Every value that the step needs, its subgraphs included."""
        return self.inputs + self.bound.captures


class _Instruction(NamedTuple):
    """A step of a schedule. Every value is a number: its place in the list of values."""

    step: PlanStep
    call: Call
    inputs: tuple[int, ...]
    read: Callable[[list[Any]], Sequence[Any]]  # the values of the inputs
    outer: tuple[tuple[str, int], ...]
    outputs: tuple[int, ...]
    views: tuple[int, ...]  # outputs that may be views of what dies before them
    dead: tuple[int, ...]  # what nobody reads after this step


@dataclass(frozen=True, slots=True)
class _Schedule:
    """The steps that some outputs need. `values` has the constants in their places, None elsewhere."""

    instructions: list[_Instruction]
    places: dict[str, int]
    values: list[Any]
    entries: tuple[int, ...]  # the places of the graph's inputs
    results: Callable[[list[Any]], Sequence[Any]]  # the values of the outputs
    own: tuple[int, ...]  # the places of what the steps make: neither given nor constant


class PlannedGraph:
    """The nodes of a graph, a subgraph or a function's body, ready to run."""

    def __init__(
        self,
        nodes: Sequence[onnx.NodeProto],
        inputs: Sequence[str],
        outputs: Sequence[str],
        constants: dict[str, Any],
        scope: Scope,
        nested: bool = False,
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.declared: tuple[Value, ...] = ()
        self.constants = constants
        self.initializers = frozenset(constants)
        steps = []
        for node in nodes:
            if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
                constants[node.output[0]] = _frozen(scope.precision.array(_constant(node, scope.precision)))
            else:
                steps.append(PlanStep(label(node), bind(node, scope), tuple(node.input), tuple(node.output)))
        produced = {name for step in steps for name in step.outputs if name}
        _refuse_twice([*self.initializers.union(inputs), *(name for node in nodes for name in node.output if name)])
        known = produced | set(constants) | set(inputs)
        reads = {name: None for step in steps for name in step.reads if name} | dict.fromkeys(outputs)
        self.captures = tuple(name for name in reads if name not in known)
        if self.captures and not nested:
            _refuse_undefined(steps, self.captures)
        self.steps = self._folded(_ordered(steps))
        self.names = known | set(constants)
        self._schedules: dict[tuple[tuple[str, ...], bool], _Schedule] = {}
        if scope.limit is None:
            for step in steps:
                step.bound.forget()

    def __call__(self, *inputs: Any, outer: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """Compute the outputs of a subgraph or a function's body. Inputs left out at the end are None."""
        schedule = self._schedule(self.outputs, False)
        values, places = schedule.values.copy(), schedule.places
        for place, value in zip_longest(schedule.entries, inputs[: len(self.inputs)]):
            values[place] = value
        if outer:
            for name, value in outer.items():
                if name in places:
                    values[places[name]] = value
        self._execute(schedule, values)
        return tuple(schedule.results(values))

    def run(
        self,
        feeds: Mapping[str, Any],
        outputs: tuple[str, ...] | None = None,
        trace: bool = False,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Compute the values named in `outputs` (default: the graph's); with `trace` every intermediate as well.

        `feeds` has the values of `inputs` and `captures`.
        """
        wanted = self.outputs if outputs is None else outputs
        schedule = self._schedule(wanted, trace)
        values = schedule.values.copy()
        places = schedule.places
        for name, value in feeds.items():
            if name in places:
                values[places[name]] = value
        self._execute(schedule, values, progress)
        if trace:
            return {name: values[place] for name, place in places.items() if name not in self.initializers}
        return {name: values[places[name]] for name in wanted}

    def _execute(self, schedule: _Schedule, values: list[Any], progress: Progress | None = None) -> None:
        """Run the steps of `schedule` on its `values`, which hold the given values and the constants in their places."""
        watch, number = WATCH.get(), 0
        try:
            for step, call, inputs, read, outer, made, views, dead in schedule.instructions:
                if progress is not None:
                    progress(number, len(schedule.instructions), step.label)
                    number += 1
                if watch is not None:
                    watch.reserve(step.label, step.bound.predict, [values[place] for place in inputs])
                results = (
                    call(*read(values), _outer={name: values[i] for name, i in outer}) if outer else call(*read(values))
                )
                if len(made) == 1 and not isinstance(results, tuple):
                    values[made[0]] = results
                else:
                    results = in_tuple(results)
                    if len(results) < len(made):
                        raise ValueError(f"it has {len(results)} outputs, and the node names {len(made)}")
                    for place, result in zip(made, results, strict=False):
                        values[place] = result
                    result = None  # it would hold that array until the next node of several results
                if views:
                    results, result = None, None  # they hold the views
                    for place in views:
                        values[place] = _own_where_small(values[place])
                if watch is not None:
                    watch.replace(step.label, [values[i] for i in {*made}], [values[i] for i in dead])
                for place in dead:
                    values[place] = None
        except BackendError:
            raise
        except Exception as error:
            # Whatever goes wrong inside a kernel is reported on the node that it belongs to.
            raise BackendError(
                f"{step.label} failed on inputs {', '.join(summary(values[place]) for place in inputs)}: "
                f"{type(error).__name__}: {error}. Check the shapes with onnx.shape_inference, or run the model with "
                "outputs= set to a value before this node."
            ) from error
        if watch is not None:
            watch.release(values[place] for place in schedule.own)

    def _folded(self, steps: list[PlanStep]) -> list[PlanStep]:
        """Compute the small results that depend on constants only; return the other steps.

        An error is left to the run, which may not need that step.
        """
        kept = []
        fixed = {**self.constants, "": None}
        for name in self.inputs:
            fixed.pop(name, None)  # a default, which a feed may replace
        for step in steps:
            if not step.bound.pure or not all(name in fixed for name in step.reads):
                kept.append(step)
                continue
            inputs = [fixed[name] for name in step.inputs]
            room = max(_FOLDED, sum(getattr(x, "nbytes", 0) for x in inputs))
            try:
                if nbytes(step.bound.predict(inputs)) > room:
                    kept.append(step)
                    continue
                with np.errstate(all="ignore"):
                    results = in_tuple(step.bound.call(*inputs))
            except Exception:
                kept.append(step)
                continue
            found = {name: _frozen(value) for name, value in zip(step.outputs, results, strict=False) if name}
            fixed |= found
            self.constants.update(found)
        return kept

    def _schedule(self, wanted: tuple[str, ...], trace: bool) -> _Schedule:
        """Number the values that `wanted` needs, and say where each dies. With `trace` all values are wanted, and none dies."""
        schedule = self._schedules.get((wanted, trace))
        if schedule is None:
            steps = self.steps if trace else _needed(self.steps, wanted)
            names = {name: None for step in steps for name in (*step.reads, *step.outputs) if name} | dict.fromkeys(
                wanted
            )
            if trace:
                names |= dict.fromkeys(self.inputs) | dict.fromkeys(self.constants)
            places = {name: place for place, name in enumerate(names)}
            values = [self.constants.get(name) for name in names]
            nothing = len(values)  # the place of outputs without a name and of absent inputs
            unread = nothing + 1  # the place of what no step needs
            values += [None, None]
            at = {**places, "": nothing}
            foreign = self.constants.keys() | set(self.inputs) | set(self.captures)
            lives = _Lives(steps, foreign, names if trace else wanted)
            instructions = []
            for index, step in enumerate(steps):
                free = lives.free(index) if step.bound.reuses else ()
                instructions.append(
                    _Instruction(
                        step,
                        partial(step.bound.call, _free=free) if any(free) else step.bound.call,
                        inputs := tuple(at[name] for name in step.inputs),
                        _reader(inputs),
                        tuple((name, at[name]) for name in step.bound.captures),
                        tuple(at[name] for name in step.outputs),
                        tuple(at[name] for name in lives.views(index)),
                        tuple(at[name] for name in lives.dead(index)) + ((nothing,) if "" in step.outputs else ()),
                    )
                )
            entries = tuple(places.get(name, unread) for name in self.inputs)
            results = _reader(tuple(places[name] for name in wanted))
            own = tuple(place for name, place in places.items() if name not in foreign)
            schedule = self._schedules[wanted, trace] = _Schedule(instructions, places, values, entries, results, own)
        return schedule


_FOREIGN = frozenset((0,))


class _Lives:
    """When each value of a schedule is read last, and whose memory it may share.

    A step with a `fresh` kernel makes new memory. The results of any other step may be views of what it reads. Memory
    that the run does not own has the number 0: feeds, constants, outer values, and what a step may return that does not
    promise `views` alone.
    """

    def __init__(self, steps: Sequence[PlanStep], foreign: Iterable[str], wanted: Iterable[str]) -> None:
        self._steps = steps
        self._end: dict[str, int] = {}
        for index, step in enumerate(steps):
            self._end |= dict.fromkeys((*step.outputs, *step.reads), index)
        self._end |= dict.fromkeys(wanted, len(steps))
        self._foreign = frozenset(foreign)
        self._memory: dict[str, frozenset[int]] = dict.fromkeys(self._foreign, _FOREIGN)
        new = count(1)
        for step in steps:
            shared = frozenset().union(*(self._memory[name] for name in step.reads if name)) or _FOREIGN
            if not step.bound.views:
                shared |= _FOREIGN
            for name in step.outputs:
                self._memory[name] = frozenset((next(new),)) if step.bound.fresh else shared
        self._last: dict[int, int] = {}
        for name, memory in self._memory.items():
            for part in memory:
                self._last[part] = max(self._last.get(part, 0), self._end.get(name, 0))

    def free(self, index: int) -> tuple[bool, ...]:
        """For each input of that step, whether the run owns its memory and nobody reads it afterwards."""
        step = self._steps[index]
        held = [part for name in step.reads if name for part in self._memory[name]]

        def is_free(name: str) -> bool:
            memory = self._memory[name]
            return len(memory) == 1 and all(p and self._last[p] == index and held.count(p) == 1 for p in memory)

        return tuple(bool(name) and is_free(name) for name in step.inputs)

    def views(self, index: int) -> tuple[str, ...]:
        """Outputs of that step that may be views of an input that dies before them."""
        step = self._steps[index]
        if step.bound.fresh:
            return ()
        own = [name for name in step.reads if name and self._memory[name] != _FOREIGN]
        return tuple(y for y in step.outputs if y and any(self._end[x] < self._end[y] for x in own))

    def dead(self, index: int) -> tuple[str, ...]:
        """The values that the run owns and that nobody reads after that step."""
        step = self._steps[index]
        names = dict.fromkeys(name for name in (*step.reads, *step.outputs) if name and name not in self._foreign)
        return tuple(name for name in names if self._end[name] == index)


def plan_graph(graph: onnx.GraphProto, scope: Scope, nested: bool = True) -> PlannedGraph:
    """Plan a graph. A nested one may read values of the graphs around it."""
    constants = {t.name: _frozen(scope.precision.tensor(t)) for t in graph.initializer}
    for sparse in graph.sparse_initializer:
        constants[sparse.values.name] = _frozen(scope.precision.array(_dense(sparse)))
    inputs, outputs = [i.name for i in graph.input], [o.name for o in graph.output]
    scope = replace(scope, values={v.name: v for v in (*graph.value_info, *graph.output)})
    plan = PlannedGraph(graph.node, inputs, outputs, constants, scope, nested)
    plan.declared = tuple(map(scope.precision.value, graph_outputs(graph)))
    return plan


def plan_function(function: onnx.FunctionProto, scope: Scope) -> PlannedGraph:
    """Plan the body of a function, whose attributes have been filled in."""
    return PlannedGraph(function.node, function.input, function.output, {}, scope)


def _needed(steps: Sequence[PlanStep], wanted: Iterable[str]) -> list[PlanStep]:
    """Return the steps that the values `wanted` need."""
    return [steps[position] for position in positions_needed(_signatures(steps), wanted)]


def _signatures(steps: Sequence[PlanStep]) -> list[ReadsAndWrites]:
    return [(step.reads, step.outputs) for step in steps]


def _refuse_undefined(steps: Sequence[PlanStep], undefined: Sequence[str]) -> None:
    for step in steps:
        for name in step.reads:
            if name in undefined:
                raise BackendError(f"{step.label} reads {name!r}, which nothing produces. Check the model.")
    raise BackendError(f"Nothing produces the graph's output {undefined[0]!r}. Check the model.")


def _refuse_twice(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BackendError(
                f"{name!r} is produced twice: by two nodes, or by a node and as an input. Check the model."
            )
        seen.add(name)


def _ordered(steps: Sequence[PlanStep]) -> list[PlanStep]:
    """Return the steps in an order that computes each value before it is read: the given order if it does."""
    positions = topological_positions(_signatures(steps))
    if len(positions) < len(steps):
        blocked = steps[min(set(range(len(steps))).difference(positions))]
        raise BackendError(f"The graph has a cycle: {blocked.label} needs its own output. Check the model.")
    return [steps[position] for position in positions]


_CONSTANTS = {
    "value": onnx.AttributeProto.TENSOR,
    "sparse_value": onnx.AttributeProto.SPARSE_TENSOR,
    "value_float": onnx.AttributeProto.FLOAT,
    "value_floats": onnx.AttributeProto.FLOATS,
    "value_int": onnx.AttributeProto.INT,
    "value_ints": onnx.AttributeProto.INTS,
    "value_string": onnx.AttributeProto.STRING,
    "value_strings": onnx.AttributeProto.STRINGS,
}


def _constant(node: onnx.NodeProto, precision: Declared) -> Any:
    if not node.attribute:
        raise BackendError(f"{label(node)} is a Constant without a value. Check the model.")
    attribute = node.attribute[0]
    if attribute.name in _CONSTANTS and attribute.type != _CONSTANTS[attribute.name]:
        kinds = onnx.AttributeProto.AttributeType
        raise BackendError(
            f"{label(node)} has {attribute.name!r} of type {kinds.Name(attribute.type)}, not "
            f"{kinds.Name(_CONSTANTS[attribute.name])}. Check the model."
        )
    value = helper.get_attribute_value(attribute)
    match attribute.name:
        case "value":
            return precision.tensor(value)
        case "sparse_value":
            return _dense(value)
        case "value_float" | "value_floats":
            return np.array(value, np.float32)
        case "value_int" | "value_ints":
            return np.array(value, np.int64)
        case "value_string":
            return np.array(value.decode(), object)
        case "value_strings":
            return np.array([item.decode() for item in value], object)
    raise BackendError(f"{label(node)} has an unknown attribute {attribute.name!r}. Check the model.")


def _dense(sparse: onnx.SparseTensorProto) -> np.ndarray:
    values, indices = array_of(sparse.values), array_of(sparse.indices)
    limits = [math.prod(sparse.dims)] if indices.ndim == 1 else list(sparse.dims)
    if limits != [n for n in limits if n >= 0] or np.any(indices < 0) or np.any(indices >= limits):
        raise InvalidModelError(
            f"The indices of the sparse tensor {sparse.values.name!r} do not fit its dims {list(sparse.dims)}. Correct them."
        )
    if limits and math.prod(sparse.dims) > _LARGEST:
        raise BackendError(
            f"The sparse tensor {sparse.values.name!r} of dims {list(sparse.dims)} has over {_LARGEST} elements, and the "
            "interpreter computes with dense ones. Store a smaller one."
        )
    limit, size = allowed(), math.prod(sparse.dims) * values.itemsize
    if limit is not None and size > limit:
        raise BackendError(
            f"The sparse tensor {sparse.values.name!r} of dims {list(sparse.dims)} takes {size} bytes when it is dense, and "
            f"max_memory is {limit}. Give it more."
        )
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return dense


def _reader(places: tuple[int, ...]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that reads these places of a list, as fast as Python can: small nodes take no longer than this."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def _frozen(value: Any) -> Any:
    """Return `value` so that nobody can change it; a scalar as it is."""
    if isinstance(value, list):
        return [_frozen(item) for item in value]
    if not isinstance(value, np.ndarray):
        return value
    view = value.view()
    view.flags.writeable = False
    return view


def _own_where_small(value: Any) -> Any:
    """Return `value`, copied if it is a view of a much larger array, which it would keep in memory."""
    if isinstance(value, np.ndarray) and value.base is not None and owner(value).nbytes > _VIEWED * value.nbytes:
        return value.copy()
    return value
