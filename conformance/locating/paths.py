"""The way of an error through a model: the values from the nodes at fault to each wrong tensor; and the graph around the nodes.

An error of a kernel goes through the gradient model, from a node's results to what is computed of them. An error of a rule goes
backwards through the model, from the cotangents of a node's inputs to the cotangents of the values before it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

from refgrad.backends import Backend
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.case import is_float
from refgrad.conformance.judge.nan.watching import Watching, first_output, label_of
from refgrad.conformance.locating.replay import distance
from refgrad.conformance.locating.values import described, watching_each, without_functions
from refgrad.conformance.problems.observation import Built
from refgrad.conformance.problems.point import largest
from refgrad.errors import RefgradError
from refgrad.protos.traverse import reads_of

_STATIONS = 6  # of a path in a line of text
_PATHS = 12  # wrong tensors that get one
_STEPS = 2  # to each side of a node, in the graph around it
_NODES = 16  # of a graph around nodes
_ELEMENTS = 2**25  # of the values whose errors are computed
_CARRIED = 0.1  # of the largest error of a node's inputs: an input with less is not what the error comes from
_SEEN = (
    0.1  # of the error of a tensor: if less is left of it when the values before it are looked at, they are not shown
)


@dataclass(frozen=True)
class Station:
    """A value on the way of an error.

    `node` makes it, or its rule makes the cotangent. `error` is relative to the largest element of the right value;
    it is None if the value is not known.
    """

    value: str
    node: str
    error: float | None = None

    def __str__(self) -> str:
        return self.node if self.error is None else f"{self.node} ({self.error:.2g})"


@dataclass(frozen=True)
class ErrorPath:
    """The way of an error to the tensor of this name: the values that have it, the first of them from a node at fault."""

    tensor: str
    stations: tuple[Station, ...]
    error: float | None = None

    def __str__(self) -> str:
        shown = list(map(str, self.stations))
        if len(shown) >= _STATIONS:
            left_out = len(shown) - (_STATIONS - 2)
            shown[_STATIONS // 2 : _STATIONS // 2 + left_out] = [f"{left_out} more"]
        tensor = f"tensor {self.tensor!r}"
        return " → ".join([*shown, tensor if self.error is None else f"{tensor} ({self.error:.2g})"])


@dataclass(frozen=True)
class Neighbourhood:
    """The graph around nodes at fault, without weights, with the sizes of values. `nodes` are their names, `marked` what they
    make.
    """

    model: ModelProto
    nodes: tuple[str, ...]
    marked: tuple[str, ...]


@dataclass(frozen=True)
class Wrong:
    """A wrong tensor: its name in the comparison, the value that it is in the model that is run, and its relative error."""

    tensor: str
    value: str
    error: float | None


class TracedGraph:
    """A model at its feeds, without functions: who makes each value, and who reads it."""

    def __init__(self, model: ModelProto, feeds: Mapping[str, Any]) -> None:
        self.model = without_functions(model)
        self.feeds = dict(feeds)
        self.nodes: Sequence[NodeProto] = list(self.model.graph.node)
        self.maker = {name: k for k, node in enumerate(self.nodes) for name in node.output if name}
        self.readers: dict[str, list[int]] = {}
        for k, node in enumerate(self.nodes):
            for name in dict.fromkeys(reads_of(node)):
                self.readers.setdefault(name, []).append(k)
        self.declared: dict[str, ValueInfoProto] = {}
        self.sizes: dict[str, int] = {}

        def look(node: NodeProto, results: tuple[Any, ...]) -> None:
            for name, value in zip(node.output, results, strict=False):
                if name in self.maker and isinstance(value, np.ndarray | np.generic):
                    self.declared[name] = described(name, np.asarray(value))
                    self.sizes[name] = np.size(value) if is_float(value) else 0

        NumpyBackend().prepare(self.model, precision=Watching(watching_each(look))).run(feeds)

    def after(self, start: Iterable[int]) -> dict[int, int]:
        """The nodes that these reach, themselves included, and how many steps away each is."""
        steps = dict.fromkeys(start, 0)
        pending = list(steps)
        for k in pending:
            for reader in (one for name in self.nodes[k].output for one in self.readers.get(name, ())):
                if reader not in steps:
                    steps[reader] = steps[k] + 1
                    pending.append(reader)
        return steps

    def positions(self, labels: Collection[str]) -> list[int]:
        """The positions of the nodes with these names."""
        return [k for k, node in enumerate(self.nodes) if label_of(node) in labels or first_output(node) in labels]

    def title(self, k: int) -> str:
        """The operator and the name of a node."""
        return f"{self.nodes[k].op_type} {label_of(self.nodes[k])!r}"


# The paths


def of_kernels(
    graph: TracedGraph, blamed: Collection[int], wrong: Sequence[Wrong], backend: Backend
) -> tuple[ErrorPath, ...]:
    """The ways of an error of the kernels of nodes.

    :param graph: the gradient model that is run, and its inputs.
    :param blamed: the positions of the nodes at fault.
    :param backend: what runs it.
    """
    steps = graph.after(blamed)
    reached = _worst([one for one in wrong if graph.maker.get(one.value) in steps])
    made = [name for k in sorted(steps) for name in graph.nodes[k].output if name in _before(graph, reached, steps)]
    errors = _errors(graph, made, backend)
    if any(one.error and errors.get(one.value, 0.0) < _SEEN * one.error for one in reached):
        errors = {}  # to look at values changes what is fused
    paths = []
    for one in reached:
        value, way = one.value, [one.value]
        while steps[k := graph.maker[value]]:
            before = [name for name in reads_of(graph.nodes[k]) if graph.maker.get(name) in steps]
            most = max(errors.get(name, 0.0) for name in before)
            carry = [name for name in before if errors.get(name, 0.0) >= _CARRIED * most]
            value = min(carry, key=lambda name: steps[graph.maker[name]])
            way.append(value)
        stations = [Station(name, graph.title(graph.maker[name]), errors.get(name)) for name in reversed(way)]
        paths.append(ErrorPath(one.tensor, tuple(stations), one.error))
    return tuple(paths)


def _worst(wrong: Sequence[Wrong]) -> list[Wrong]:
    """Those that are furthest off, in this order."""
    return sorted(wrong, key=lambda one: -(one.error or 0.0))[:_PATHS]


def _before(graph: TracedGraph, wrong: Iterable[Wrong], steps: Collection[int]) -> set[str]:
    """The values that lead to the wrong ones, of those that these nodes make."""
    found = {one.value for one in wrong}
    pending = list(found)
    for value in pending:
        for name in reads_of(graph.nodes[graph.maker[value]]):
            if name not in found and graph.maker.get(name) in steps:
                found.add(name)
                pending.append(name)
    return found


def _errors(graph: TracedGraph, names: Sequence[str], backend: Backend) -> dict[str, float]:
    """The error of each value on an executor, relative to its largest element; none if it does not show them."""
    floats = [name for name in names if graph.sizes.get(name)]
    if sum(graph.sizes[name] for name in floats) > _ELEMENTS:
        return {}
    shown = ModelProto()
    shown.CopyFrom(graph.model)
    known = {value.name for value in shown.graph.output}
    shown.graph.output.extend(graph.declared[name] for name in floats if name not in known)
    try:
        results = backend.prepare(shown).run(copy.deepcopy(graph.feeds))
        right = NumpyBackend().prepare(graph.model, precision="float64").run(graph.feeds, dict.fromkeys(floats))
    except RefgradError:
        return {}
    return {name: _error(results[name], right[name]) for name in floats if name in results}


def _error(got: Any, due: Any) -> float:
    got, due = np.asarray(got), np.asarray(due)
    if got.shape != due.shape:
        return float("inf")
    return float(np.max(distance(got, due), initial=0.0)) / (largest(due.astype(np.float64)) or 1.0)


def of_rules(
    graph: TracedGraph, blamed: Collection[int], wrong: Sequence[Wrong], errors: Mapping[str, float]
) -> tuple[ErrorPath, ...]:
    """The ways of an error of the rules of nodes, backwards through the model.

    :param graph: the model that is differentiated.
    :param blamed: the positions of the nodes whose rules are at fault.
    :param wrong: the wrong gradients; their values are names of the model.
    :param errors: the errors of the cotangents that are known, by value.
    """
    steps = _to(graph, blamed)
    paths = []
    for one in _worst(wrong):
        value, way = one.value, list[tuple[str, int]]()
        while True:
            through = [k for k in graph.readers.get(value, ()) if k in steps]
            if not through:
                break
            reader = min(through, key=steps.__getitem__)
            way.append((value, reader))
            if not steps[reader]:
                break
            value = max(
                (name for name in graph.nodes[reader].output if any(k in steps for k in graph.readers.get(name, ()))),
                key=lambda name: errors.get(name, -1.0),
            )
        if way and not steps[way[-1][1]]:
            stations = [Station(name, f"the rule of {graph.title(k)}", errors.get(name)) for name, k in reversed(way)]
            paths.append(ErrorPath(one.tensor, tuple(stations), one.error))
    return tuple(paths)


def _to(graph: TracedGraph, blamed: Collection[int]) -> dict[int, int]:
    """The nodes from which these are reached, and in how many steps."""
    steps = dict.fromkeys(blamed, 0)
    pending = list(steps)
    for k in pending:
        for name in reads_of(graph.nodes[k]):
            maker = graph.maker.get(name)
            if maker is not None and maker not in steps:
                steps[maker] = steps[k] + 1
                pending.append(maker)
    return steps


def adjoint_errors(
    graph: TracedGraph, built: Built, feeds: Mapping[str, Any], right: ModelProto, point: Mapping[str, Any]
) -> dict[str, float]:
    """The errors of the cotangents in a gradient model in double, by the values of the model that is differentiated.

    Only cotangents with the name `<value>_grad` in both gradients are known, if both call their results so.

    :param built: the gradient, and `feeds` its inputs.
    :param right: the right gradient, and `point` its inputs.
    """
    if any(made != f"{name}_grad" for name, made in built.gradients.items()):
        return {}
    theirs = {name for node in built.model.graph.node for name in node.output}
    ours = {name for node in right.graph.node for name in node.output}
    values = [name for name in (*graph.maker, *built.gradients) if f"{name}_grad" in theirs & ours]
    if sum(graph.sizes.get(name, 0) for name in values) > _ELEMENTS:
        return {}
    names = [f"{name}_grad" for name in values]
    try:
        got = NumpyBackend().prepare(built.model, precision="float64").run(feeds, dict.fromkeys(names))
        due = NumpyBackend().prepare(right, precision="float64").run(point, dict.fromkeys(names))
    except RefgradError:
        return {}
    return {name: _error(got[f"{name}_grad"], due[f"{name}_grad"]) for name in values}


# The graph around nodes


def around(graph: TracedGraph, blamed: Sequence[int], emitted: ModelProto | None = None) -> Neighbourhood:
    """The nodes at most two steps before and after others, as a model of their own without weights.

    :param emitted: a gradient of the model: the nodes in it that rules of the nodes emitted are added.
    """
    kept = list(blamed)
    edge: list[int] = list(blamed)
    for _ in range(_STEPS):
        near = [graph.maker[name] for k in edge for name in reads_of(graph.nodes[k]) if name in graph.maker]
        near += [reader for k in edge for name in graph.nodes[k].output for reader in graph.readers.get(name, ())]
        edge = [k for k in dict.fromkeys(near) if k not in kept][: max(0, _NODES - len(kept))]
        kept += edge
    source = graph.model
    made = ModelProto(ir_version=source.ir_version)
    made.opset_import.extend(source.opset_import)
    made.graph.name = "around"
    declared = {value.name: value for value in (*source.graph.value_info, *source.graph.input, *source.graph.output)}
    declared |= graph.declared
    weights = {tensor.name: tensor for tensor in source.graph.initializer}
    for k in sorted(kept):
        node = made.graph.node.add()
        node.CopyFrom(graph.nodes[k])
        del node.metadata_props[:]
    if emitted is not None:
        names = {label_of(graph.nodes[k]) for k in blamed}
        weights |= {tensor.name: tensor for tensor in emitted.graph.initializer}
        made.graph.node.extend(node for node in emitted.graph.node if _owner(node) in names)
    outputs = {name for node in made.graph.node for name in node.output if name}
    for name in dict.fromkeys(name for node in made.graph.node for name in reads_of(node) if name not in outputs):
        if name in weights:
            weight = weights[name]
            made.graph.initializer.append(TensorProto(name=name, data_type=weight.data_type, dims=weight.dims))
        else:
            made.graph.input.append(declared.get(name) or ValueInfoProto(name=name))
    results = {value.name for value in source.graph.output}
    made.graph.output.extend(declared[name] for name in declared if name in results & outputs)
    made.graph.value_info.extend(declared[name] for name in declared if name in outputs - results)
    marked = [name for k in blamed for name in graph.nodes[k].output if name]
    return Neighbourhood(made, tuple(label_of(graph.nodes[k]) for k in blamed), tuple(marked))


def _owner(node: NodeProto) -> str:
    """The node whose rule emitted this one, as refgrad notes it; "" if it is not known."""
    return next((prop.value for prop in node.metadata_props if prop.key == "refgrad.node"), "")
