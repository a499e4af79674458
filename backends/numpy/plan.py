"""A graph that is planned once and run many times.

A plan orders the nodes, binds their kernels, folds constants, and knows which step reads each value last.
"""

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
from refgrad.backends.numpy.memory import ARRAYS, WATCH, Progress, nbytes, owner, summary
from refgrad.backends.numpy.precision import Declared
from refgrad.backends.numpy.registry import Call, in_tuple
from refgrad.errors import BackendError, InvalidModelError, RefgradError
from refgrad.model.external import ExternalData, array_of, is_external
from refgrad.protos.memory import allowed
from refgrad.protos.traverse import ReadsAndWrites, positions_needed, topological_positions

_LARGEST_DENSE = 2**28  # elements: a larger sparse tensor is refused
_LARGEST_FOLDED = 2**20  # bytes: a larger result is not folded, unless its inputs are as large
_COPIED_BELOW = 4  # a view is copied if it would keep an array alive that is more than this many times its size


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
    """A step of a schedule. Values are positions in the schedule's list of values."""

    step: PlanStep
    call: Call
    inputs: tuple[int, ...]
    read: Callable[[list[Any]], Sequence[Any]]  # takes the list of values and returns the inputs
    captures: tuple[tuple[str, int], ...]  # the outer values that subgraphs read: name and position
    outputs: tuple[int, ...]
    may_outlive: tuple[int, ...]  # outputs that may be views of values that are dropped before them
    dead: tuple[int, ...]  # values that nothing reads after this step


@dataclass(frozen=True, slots=True)
class _Schedule:
    """The steps that some outputs need, and the list of values that a run begins with."""

    instructions: list[_Instruction]
    positions: dict[str, int]  # of values, by name
    values: list[Any]  # the constants; None in the other positions
    inputs: tuple[int, ...]  # the positions of the graph's inputs
    read_outputs: Callable[[list[Any]], Sequence[Any]]  # takes the list of values and returns the outputs
    computed: tuple[int, ...]  # the positions of the values that steps compute


class PlannedGraph:
    """A graph, a subgraph or the body of a function, ready to run on arrays, with data or without."""

    def __init__(
        self,
        steps: Sequence[PlanStep],
        inputs: Sequence[str],
        outputs: Sequence[str],
        constants: dict[str, Any],
        initializers: frozenset[str] = frozenset(),
        nested: bool = False,
    ) -> None:
        """Order the steps and fold constants.

        :param constants: the initializers and the values of Constant nodes. Folded results are added.
        :param initializers: the constants that a traced run does not return.
        :param nested: the steps may read values of the graphs around this one.
        """
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.declared: tuple[Value, ...] = ()  # the outputs, as the graph declares them
        self.constants = constants
        self.initializers = initializers
        produced = {name for step in steps for name in step.outputs if name}
        known = produced | set(constants) | set(inputs)
        reads = {name: None for step in steps for name in step.reads if name} | dict.fromkeys(outputs)
        self.captures = tuple(name for name in reads if name not in known)  # values of the graphs around this one
        if self.captures and not nested:
            _refuse_undefined(steps, self.captures)
        self.steps = self._fold(_ordered(steps))
        self.names = known | set(constants)
        self._schedules: dict[tuple[tuple[str, ...], bool], _Schedule] = {}

    def __call__(self, *inputs: Any, outer: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """Compute the outputs of a subgraph or of a function's body. Inputs that are left out at the end are None."""
        schedule = self._schedule(self.outputs, False)
        values, positions = schedule.values.copy(), schedule.positions
        for position, value in zip_longest(schedule.inputs, inputs[: len(self.inputs)]):
            values[position] = value
        if outer:
            for name, value in outer.items():
                if name in positions:
                    values[positions[name]] = value
        self._execute(schedule, values)
        return tuple(schedule.read_outputs(values))

    def run(
        self,
        feeds: Mapping[str, Any],
        outputs: tuple[str, ...] | None = None,
        trace: bool = False,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Compute the values called `outputs`, by default the graph's outputs.

        :param feeds: the values of `inputs` and `captures`.
        :param trace: return every value except initializers.
        """
        wanted = self.outputs if outputs is None else outputs
        schedule = self._schedule(wanted, trace)
        values = schedule.values.copy()
        positions = schedule.positions
        for name, value in feeds.items():
            if name in positions:
                values[positions[name]] = value
        self._execute(schedule, values, progress)
        if trace:
            return {name: values[position] for name, position in positions.items() if name not in self.initializers}
        return {name: values[positions[name]] for name in wanted}

    def _execute(self, schedule: _Schedule, values: list[Any], progress: Progress | None = None) -> None:
        """Run the steps of `schedule` on `values`, its list of values with the feeds filled in."""
        watch, number = WATCH.get(), 0
        try:
            for step, call, inputs, read, captures, outputs, may_outlive, dead in schedule.instructions:
                if progress is not None:
                    progress(number, len(schedule.instructions), step.label)
                    number += 1
                if watch is not None:
                    watch.reserve(step.label, step.bound.predict, [values[position] for position in inputs])
                results = (
                    call(*read(values), _outer={name: values[position] for name, position in captures})
                    if captures
                    else call(*read(values))
                )
                if len(outputs) == 1 and not isinstance(results, tuple):
                    values[outputs[0]] = results
                else:
                    results = in_tuple(results)
                    if len(results) < len(outputs):
                        raise ValueError(f"it has {len(results)} outputs, and the node names {len(outputs)}")
                    for position, result in zip(outputs, results, strict=False):
                        values[position] = result
                    result = None  # this variable would keep the array alive until the next node with several outputs
                if may_outlive:
                    results, result = None, None  # these variables would keep the views alive
                    for position in may_outlive:
                        values[position] = _copied_if_small(values[position])
                if watch is not None:
                    watch.replace(step.label, [values[i] for i in {*outputs}], [values[i] for i in dead])
                for position in dead:
                    values[position] = None
        except RefgradError:
            raise
        except Exception as error:
            # Any error inside a kernel becomes an error that names the node.
            raise BackendError(
                f"{step.label} failed on inputs {', '.join(summary(values[position]) for position in inputs)}: "
                f"{type(error).__name__}: {error}. If its shapes do not fit, "
                "onnx.shape_inference.infer_shapes(model, strict_mode=True) shows where."
            ) from error
        if watch is not None:
            watch.release(values[position] for position in schedule.computed)

    def _fold(self, steps: list[PlanStep]) -> list[PlanStep]:
        """Compute the small results that depend on constants only, add them to `constants`, and return the other steps.

        A step that fails is not folded: the runs that need it raise its error.
        """
        remaining = []
        known = {**self.constants, "": None}
        for name in self.inputs:
            known.pop(name, None)  # a default that a feed may override
        for step in steps:
            if not step.bound.pure or not all(name in known for name in step.reads):
                remaining.append(step)
                continue
            inputs = [known[name] for name in step.inputs]
            limit = max(_LARGEST_FOLDED, sum(getattr(x, "nbytes", 0) for x in inputs))
            try:
                if nbytes(step.bound.predict(inputs)) > limit:
                    remaining.append(step)
                    continue
                with np.errstate(all="ignore"):
                    results = in_tuple(step.bound.call(*inputs))
            except Exception:
                remaining.append(step)
                continue
            folded = {name: _frozen(value) for name, value in zip(step.outputs, results, strict=False) if name}
            known |= folded
            self.constants.update(folded)
        return remaining

    def _schedule(self, wanted: tuple[str, ...], trace: bool) -> _Schedule:
        """The schedule that computes `wanted`, made once. With `trace` it computes all values, and drops none."""
        schedule = self._schedules.get((wanted, trace))
        if schedule is None:
            steps = self.steps if trace else _needed(self.steps, wanted)
            names = {name: None for step in steps for name in (*step.reads, *step.outputs) if name} | dict.fromkeys(
                wanted
            )
            if trace:
                names |= dict.fromkeys(self.inputs) | dict.fromkeys(self.constants)
            positions = {name: position for position, name in enumerate(names)}
            values = [self.constants.get(name) for name in names]
            absent = len(values)  # the position of absent inputs, and of outputs without a name
            unread = absent + 1  # the position of graph inputs that no step reads
            values += [None, None]
            at = {**positions, "": absent}
            external = self.constants.keys() | set(self.inputs) | set(self.captures)
            lives = _Lives(steps, external, names if trace else wanted)
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
                        tuple(at[name] for name in lives.may_outlive(index)),
                        tuple(at[name] for name in lives.dead(index)) + ((absent,) if "" in step.outputs else ()),
                    )
                )
            graph_inputs = tuple(positions.get(name, unread) for name in self.inputs)
            read_outputs = _reader(tuple(positions[name] for name in wanted))
            computed = tuple(position for name, position in positions.items() if name not in external)
            schedule = _Schedule(instructions, positions, values, graph_inputs, read_outputs, computed)
            self._schedules[wanted, trace] = schedule
        return schedule


_NOT_OWNED = frozenset((0,))  # the number of all memory that the run must not change


class _Lives:
    """The step that reads each value of a schedule last, and the memory that the value may share.

    Memory has numbers. A step with a `fresh` kernel makes new memory. The results of any other step may be views of its
    inputs. The run does not own the memory of feeds, constants and outer values. Nor does it own the results of a step that
    neither makes new memory nor promises `views_inputs`: a kernel may return a table of its own.
    """

    def __init__(self, steps: Sequence[PlanStep], external: Iterable[str], wanted: Iterable[str]) -> None:
        """Follow the values through the steps.

        :param external: the names of feeds, constants and outer values.
        :param wanted: the values that are read after the last step.
        """
        self._steps = steps
        self._last_read: dict[str, int] = {}  # the step that reads or makes a value last, by name
        for index, step in enumerate(steps):
            self._last_read |= dict.fromkeys((*step.outputs, *step.reads), index)
        self._last_read |= dict.fromkeys(wanted, len(steps))
        self._external = frozenset(external)
        self._memory: dict[str, frozenset[int]] = dict.fromkeys(self._external, _NOT_OWNED)
        numbers = count(1)
        for step in steps:
            shared = frozenset().union(*(self._memory[name] for name in step.reads if name)) or _NOT_OWNED
            if not step.bound.views_inputs:
                shared |= _NOT_OWNED
            for name in step.outputs:
                self._memory[name] = frozenset((next(numbers),)) if step.bound.fresh else shared
        self._memory_last_read: dict[int, int] = {}  # likewise for memory, by its number
        for name, memory in self._memory.items():
            for number in memory:
                last = max(self._memory_last_read.get(number, 0), self._last_read.get(name, 0))
                self._memory_last_read[number] = last

    def free(self, index: int) -> tuple[bool, ...]:
        """For each input of step `index`, true if the run owns its memory, and nothing else reads it in or after this step."""
        step = self._steps[index]
        memory_read = [number for name in step.reads if name for number in self._memory[name]]

        def is_free(name: str) -> bool:
            memory = self._memory[name]
            return len(memory) == 1 and all(
                number and self._memory_last_read[number] == index and memory_read.count(number) == 1
                for number in memory
            )

        return tuple(bool(name) and is_free(name) for name in step.inputs)

    def may_outlive(self, index: int) -> tuple[str, ...]:
        """The outputs of step `index` that may be views of an input that is dropped before them."""
        step = self._steps[index]
        if step.bound.fresh:
            return ()
        owned = [name for name in step.reads if name and self._memory[name] != _NOT_OWNED]
        return tuple(y for y in step.outputs if y and any(self._last_read[x] < self._last_read[y] for x in owned))

    def dead(self, index: int) -> tuple[str, ...]:
        """The values that steps computed and that nothing reads after step `index`."""
        step = self._steps[index]
        names = dict.fromkeys(name for name in (*step.reads, *step.outputs) if name and name not in self._external)
        return tuple(name for name in names if self._last_read[name] == index)


def plan_graph(
    graph: onnx.GraphProto, scope: Scope, nested: bool = True, data: ExternalData | None = None
) -> PlannedGraph:
    """Plan a graph. A nested graph may read values of the graphs around it. `data` maps initializers that lie in files."""

    def value(tensor: onnx.TensorProto) -> Any:
        if data is not None and is_external(tensor):
            return scope.precision.array(data.mapped(tensor))
        return scope.precision.tensor(tensor)

    constants = {tensor.name: _frozen(value(tensor)) for tensor in graph.initializer}
    for sparse in graph.sparse_initializer:
        constants[sparse.values.name] = _frozen(scope.precision.array(_dense(sparse)))
    inputs, outputs = [i.name for i in graph.input], [o.name for o in graph.output]
    scope = replace(scope, values={v.name: v for v in (*graph.value_info, *graph.output)})
    plan = _planned(graph.node, inputs, outputs, constants, scope, nested)
    plan.declared = tuple(map(scope.precision.value, graph_outputs(graph)))
    return plan


def plan_function(function: onnx.FunctionProto, scope: Scope) -> PlannedGraph:
    """Plan the body of a function, whose attributes have been filled in."""
    return _planned(function.node, function.input, function.output, {}, scope)


def _planned(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[str],
    outputs: Sequence[str],
    constants: dict[str, Any],
    scope: Scope,
    nested: bool = False,
) -> PlannedGraph:
    """Bind the nodes, and plan them.

    :param constants: the initializers. The values of Constant nodes are added.
    """
    initializers = frozenset(constants)
    steps = []
    for node in nodes:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            constants[node.output[0]] = _frozen(scope.precision.array(constant(node, scope.precision)))
        else:
            steps.append(PlanStep(label(node), bind(node, scope), tuple(node.input), tuple(node.output)))
    _refuse_duplicates([*initializers.union(inputs), *(name for node in nodes for name in node.output if name)])
    plan = PlannedGraph(steps, inputs, outputs, constants, initializers, nested)
    if scope.limit is None:  # without `max_memory`, no run asks for the sizes of results
        for step in steps:
            step.bound.forget()
    return plan


def _needed(steps: Sequence[PlanStep], wanted: Iterable[str]) -> list[PlanStep]:
    """The steps that the values `wanted` need."""
    return [steps[position] for position in positions_needed(_signatures(steps), wanted)]


def _signatures(steps: Sequence[PlanStep]) -> list[ReadsAndWrites]:
    return [(step.reads, step.outputs) for step in steps]


def _refuse_undefined(steps: Sequence[PlanStep], undefined: Sequence[str]) -> None:
    for step in steps:
        for name in step.reads:
            if name in undefined:
                raise BackendError(f"{step.label} reads {name!r}, which nothing produces. Check the model.")
    raise BackendError(f"Nothing produces the graph's output {undefined[0]!r}. Check the model.")


def _refuse_duplicates(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BackendError(
                f"{name!r} is produced twice: by two nodes, or by a node and as an input. Check the model."
            )
        seen.add(name)


def _ordered(steps: Sequence[PlanStep]) -> list[PlanStep]:
    """The steps in an order that computes each value before it is read. It is their own order, if that is possible."""
    positions = topological_positions(_signatures(steps))
    if len(positions) < len(steps):
        blocked = steps[min(set(range(len(steps))).difference(positions))]
        raise BackendError(f"The graph has a cycle: {blocked.label} needs its own output. Check the model.")
    return [steps[position] for position in positions]


_CONSTANTS = {  # the attributes of Constant, and their types
    "value": onnx.AttributeProto.TENSOR,
    "sparse_value": onnx.AttributeProto.SPARSE_TENSOR,
    "value_float": onnx.AttributeProto.FLOAT,
    "value_floats": onnx.AttributeProto.FLOATS,
    "value_int": onnx.AttributeProto.INT,
    "value_ints": onnx.AttributeProto.INTS,
    "value_string": onnx.AttributeProto.STRING,
    "value_strings": onnx.AttributeProto.STRINGS,
}


def constant(node: onnx.NodeProto, precision: Declared) -> Any:
    """The value of a Constant node.

    :raises BackendError: the node has no value, or its attribute has the wrong type.
    """
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
    ends = [math.prod(sparse.dims)] if indices.ndim == 1 else list(sparse.dims)  # 1-D indices count all elements
    if ends != [n for n in ends if n >= 0] or np.any(indices < 0) or np.any(indices >= ends):
        raise InvalidModelError(
            f"The indices of the sparse tensor {sparse.values.name!r} do not fit its dims {list(sparse.dims)}. Correct them."
        )
    if ends and math.prod(sparse.dims) > _LARGEST_DENSE:
        raise BackendError(
            f"The sparse tensor {sparse.values.name!r} of dims {list(sparse.dims)} has over {_LARGEST_DENSE} elements, and the "
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


def _reader(positions: tuple[int, ...]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that reads these positions of a list. It is fast, since reading takes as long as a small node."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return itemgetter(slice(positions[0], positions[0] + 1) if positions else slice(0))


def _frozen(value: Any) -> Any:
    """`value` with read-only arrays."""
    if isinstance(value, list):
        return [_frozen(item) for item in value]
    if not isinstance(value, np.ndarray):
        return value
    view = value.view()
    view.flags.writeable = False
    return view


def _copied_if_small(value: Any) -> Any:
    """`value`, copied if it is a view that would keep a much larger array in memory."""
    if isinstance(value, ARRAYS) and value.base is not None and owner(value).nbytes > _COPIED_BELOW * value.nbytes:
        return value.copy()
    return value
