"""A graph planned once and run many times: order, bound kernels, decoded constants, when each value dies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from refgrad.backends.base import Value, describe, graph_outputs
from refgrad.backends.numpy.binding import Scope, bind, label
from refgrad.backends.numpy.precision import Declared
from refgrad.errors import BackendError

Schedule = list[tuple["Step", tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Step:
    """A bound node. `captures` are the outer values that its subgraphs read."""

    label: str
    call: Callable[..., tuple[Any, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    captures: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """Every value that the step needs."""
        return self.inputs + self.captures


class Plan:
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
        self.steps: list[Step] = []
        for node in nodes:
            if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
                constants[node.output[0]] = _frozen(scope.precision.array(_constant(node, scope.precision)))
            else:
                call, captures = bind(node, scope)
                call = scope.precision.call(call)
                self.steps.append(Step(label(node), call, tuple(node.input), tuple(node.output), captures))
        produced = {name for step in self.steps for name in step.outputs if name}
        known = produced | set(constants) | set(inputs)
        reads = {name: None for step in self.steps for name in step.reads if name} | dict.fromkeys(outputs)
        self.captures = tuple(name for name in reads if name not in known)
        if self.captures and not nested:
            self._refuse_undefined()
        self.steps = _sorted(self.steps, set(constants) | set(inputs) | set(self.captures))
        self._schedules: dict[tuple[str, ...], Schedule] = {}

    def run(
        self,
        feeds: Mapping[str, Any],
        outputs: tuple[str, ...] | None = None,
        outer: Mapping[str, Any] | None = None,
        trace: bool = False,
    ) -> dict[str, Any]:
        """Compute the values named in `outputs` (default: the graph's); with `trace` every intermediate as well.

        `outer` has the values of `captures`.
        """
        wanted = self.outputs if outputs is None else outputs
        values: dict[str, Any] = {"": None, **self.constants, **(outer or {}), **feeds}
        for step, dead in self._schedule(wanted):
            inputs = [values[name] for name in step.inputs]
            try:
                if step.captures:
                    results = step.call(*inputs, _outer={name: values[name] for name in step.captures})
                else:
                    results = step.call(*inputs)
            except BackendError:
                raise
            except Exception as error:
                # Whatever goes wrong inside a kernel is reported on the node that it belongs to.
                raise BackendError(
                    f"{step.label} failed on inputs {', '.join(map(_summary, inputs))}: "
                    f"{type(error).__name__}: {error}. Check the shapes with onnx.shape_inference, or run the model "
                    "with outputs= set to a value before this node."
                ) from error
            for name, result in zip(step.outputs, results, strict=False):
                if name:
                    values[name] = result
            if not trace:
                for name in dead:
                    del values[name]
        if trace:
            return {name: value for name, value in values.items() if name and name not in self.constants}
        return {name: values[name] for name in wanted}

    def _schedule(self, wanted: tuple[str, ...]) -> Schedule:
        """List the steps that `wanted` needs, each with the values that nobody reads after it."""
        schedule = self._schedules.get(wanted)
        if schedule is None:
            needed = set(wanted)
            steps = []
            for step in reversed(self.steps):
                if needed.intersection(step.outputs):
                    needed.update(step.reads)
                    steps.append(step)
            schedule = []
            alive = {*wanted, *self.constants, ""}
            for step in steps:
                dead = dict.fromkeys(name for name in (*step.reads, *step.outputs) if name not in alive)
                alive.update(dead)
                schedule.append((step, tuple(dead)))
            schedule.reverse()
            self._schedules[wanted] = schedule
        return schedule

    def _refuse_undefined(self) -> None:
        for step in self.steps:
            for name in step.reads:
                if name in self.captures:
                    raise BackendError(f"{step.label} reads {name!r}, which nothing produces. Check the model.")
        raise BackendError(f"The graph's output {self.captures[0]!r} is produced by nothing. Check the model.")


def plan_graph(graph: onnx.GraphProto, scope: Scope, nested: bool = True) -> Plan:
    """Plan a graph. A nested one may read values of the graphs around it."""
    constants = {t.name: _frozen(scope.precision.tensor(t)) for t in graph.initializer}
    for sparse in graph.sparse_initializer:
        constants[sparse.values.name] = _frozen(scope.precision.array(_dense(sparse)))
    inputs, outputs = [i.name for i in graph.input], [o.name for o in graph.output]
    scope = replace(scope, values={v.name: describe(v) for v in (*graph.value_info, *graph.output)})
    plan = Plan(graph.node, inputs, outputs, constants, scope, nested)
    plan.declared = tuple(map(scope.precision.value, graph_outputs(graph)))
    return plan


def plan_function(function: onnx.FunctionProto, scope: Scope) -> Plan:
    """Plan a function's body, whose attributes have been filled in."""
    return Plan(function.node, function.input, function.output, {}, scope)


def _sorted(steps: list[Step], known: Collection[str]) -> list[Step]:
    """Put `steps` in an order that computes before it reads; the given order where that is one already."""
    ready = {*known, ""}
    waiting: dict[str, list[int]] = {}
    missing = []
    for number, step in enumerate(steps):
        unknown = {name for name in step.reads if name not in ready}
        missing.append(len(unknown))
        for name in unknown:
            waiting.setdefault(name, []).append(number)
    queue = [number for number, count in enumerate(missing) if not count]
    ordered = []
    while queue:
        step = steps[heappop(queue)]
        ordered.append(step)
        for name in step.outputs:
            for number in waiting.pop(name, ()):
                missing[number] -= 1
                if not missing[number]:
                    heappush(queue, number)
    if len(ordered) < len(steps):
        blocked = next(step for step, count in zip(steps, missing, strict=True) if count)
        raise BackendError(f"The graph has a cycle: {blocked.label} needs its own output. Check the model.")
    return ordered


def _constant(node: onnx.NodeProto, precision: Declared) -> Any:
    if not node.attribute:
        raise BackendError(f"{label(node)} has no value. Check the model.")
    attribute = node.attribute[0]
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
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return dense


def _frozen(array: np.ndarray) -> np.ndarray:
    array = array.view()
    array.flags.writeable = False
    return array


def _summary(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return "none" if value is None else type(value).__name__
