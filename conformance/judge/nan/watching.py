"""A run of the interpreter in which somebody watches every node, those within bodies of Loop, Scan and If too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onnx import GraphProto, ModelProto, NodeProto

from refgrad.backends.numpy.precision import Declared, Float64
from refgrad.backends.numpy.registry import Call, in_tuple
from refgrad.protos.traverse import graphs

Compute = Callable[[], tuple[Any, ...]]
Watcher = Callable[[NodeProto, tuple[Any, ...], Mapping[str, Any], Compute], tuple[Any, ...]]


class Watching(Declared):
    """The types of the model. `watcher` is called for every node and returns its results.

    It gets the node, its inputs, the outer values that its bodies read, and what computes the results.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def call(self, call: Call, node: NodeProto) -> Call:
        """Return what shows the node to the watcher."""

        def watched(*inputs: Any, **options: Any) -> tuple[Any, ...]:
            options.pop("_free", None)  # the inputs are needed after the call
            outer = options.get("_outer") or {}
            return self._watcher(node, inputs, outer, lambda: in_tuple(call(*inputs, **options)))

        return watched


class WatchingInDouble(Float64, Watching):
    """The same in double."""

    call = Watching.call


def first_output(node: NodeProto) -> str:
    """The name of the first output that has one."""
    return next(filter(None, node.output), "")


def label_of(node: NodeProto) -> str:
    """The name of a node in a report: its own name, or its first output."""
    return node.name or first_output(node)


def bodies(model: ModelProto) -> list[GraphProto]:
    """The subgraphs of a model, at any depth."""
    return list(graphs(model.graph))[1:]


def constants_of(model: ModelProto) -> set[str]:
    """The names of the initializers and of what Constant nodes make, in bodies too."""
    held = list(graphs(model.graph))
    computed = {name for graph in held for node in graph.node if node.op_type == "Constant" for name in node.output}
    return computed | {tensor.name for graph in held for tensor in graph.initializer}
