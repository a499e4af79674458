"""The known types, shapes and constants of values, of the forward graph and of the backward pass."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from onnx import TypeProto, helper

from refgrad.errors import RuleError
from refgrad.protos.types import Shape, adjoint_of, element_type, unname, unwrapped

if TYPE_CHECKING:
    from refgrad.model.graph import Graph


class Padded(NamedTuple):
    """A tensor that is `value` between zeros: so many `before` and `behind` it along one axis."""

    axis: int
    before: int
    behind: int
    value: str


@dataclass
class Sparse:
    """Emitted values, by name, that are known to be zero in places: their sum needs no zeros."""

    padded: dict[str, Padded] = field(default_factory=dict)
    # Sequences that are zero but in one place: the place, and what is there.
    placed: dict[str, tuple[str, str]] = field(default_factory=dict)
    # Those that are zero in one place: the place, the rest, and where SequenceInsert puts an element into the rest.
    widened: dict[str, tuple[str, str, str | None]] = field(default_factory=dict)


class Values:
    """The types, the shapes and the contents of values, as far as they are known before the model runs.

    `types` maps a tensor, or a container, to its element type, `shapes` a tensor to its dimensions (an int, a symbol, or
    None), `containers` a sequence or an optional to its type. `adjoint_types` has the quantised values that carry a
    derivative, and the float type of their cotangents. `inputs` are values that the caller feeds, whatever the model holds.
    """

    def __init__(
        self, graph: Graph, adjoint_types: Mapping[str, int] | None = None, inputs: Container[str] = ()
    ) -> None:
        self.graph = graph
        self.adjoint_types = adjoint_types or {}
        self.inputs = inputs
        self.types: dict[str, int] = dict(graph.types)
        self.types.update((name, element_type(kind)) for name, kind in graph.containers.items())
        self.containers: dict[str, TypeProto] = dict(graph.containers)
        self.shapes: dict[str, Shape] = dict(graph.shapes)
        self.added: set[str] = set()  # values that nodes of the model get in the gradient model
        self.sparse = Sparse()
        self.arrays: dict[str, np.ndarray] = {}  # emitted constants, and shapes that are known
        self.sizes: dict[str, Shape] = {}  # emitted shape tensors: the dimensions that they hold

    def record(self, value: str, kind: int | TypeProto | None = None, shape: Shape | None = None) -> str:
        """Record the element type of a tensor or the type of a container, and a shape; `value`."""
        if isinstance(kind, TypeProto):
            self.types[value], self.containers[value] = element_type(kind), kind
        elif kind is not None:
            self.types[value] = kind
        if shape is not None:
            self.shapes[value] = shape
        return value

    def add(self, value: str, kind: int | TypeProto, shape: Shape | None = None) -> str:
        """Record the type and the shape of an output that a forward node gets in the gradient model; `value`."""
        self.added.add(value)
        return self.record(value, kind, shape)

    def record_like(self, adjoint: str, primal: str) -> None:
        """Record that `adjoint` has the type and the shape of a cotangent of `primal`."""
        kind = self.types.get(primal)
        if kind is None and primal not in self.shapes:
            return
        if kind is not None:
            self.types[adjoint] = self.adjoint_types.get(primal) or kind
        if primal in self.shapes:
            self.shapes[adjoint] = self.shapes[primal]
        if self.containers and self.is_sequence(primal):
            self.containers[adjoint] = adjoint_of(self.containers[primal])

    def copy(self, value: str, other: Values) -> None:
        """Record what `other` knows of a value, and the type of its cotangent."""
        self.record(value, other.containers.get(value) or other.types.get(value), other.shapes.get(value))
        if value in other.adjoint_types:  # in a copy: a path has them too
            self.adjoint_types = {**self.adjoint_types, value: other.adjoint_types[value]}

    def type(self, value: str) -> int:
        """The element type of `value`.

        :raises RuleError: it is unknown.
        """
        kind = self.types.get(value)
        if kind is None:
            raise RuleError(f"The element type of {value!r} is unknown: add it to the model's value_info.")
        return kind

    def adjoint_type(self, value: str) -> int:
        """The element type of the cotangent of `value`: its own, but a float for a quantised one."""
        return self.adjoint_types.get(value) or self.type(value)

    def adjoint_proto(self, value: str) -> TypeProto:
        """The type of the cotangent of `value`, without the names of sizes: they hold in one graph."""
        if value in self.containers:
            return unname(adjoint_of(self.containers[value]))
        return tensor_type(self.adjoint_type(value), self.shapes.get(value))

    def type_of(self, value: str) -> TypeProto | None:
        """The type of a forward value, None where nothing is known."""
        return self.containers.get(value) or self.graph.type_of(value)

    def is_tensor(self, value: str) -> bool:
        """True if `value` is known to be a tensor."""
        return value in self.types and value not in self.containers

    def is_sequence(self, value: str) -> bool:
        """True if the cotangent of `value` is a sequence."""
        return value in self.containers and unwrapped(self.containers[value]).HasField("sequence_type")

    def static(self, value: str) -> tuple[int, ...] | None:
        """The shape of `value` where every dimension is known, else None."""
        shape = self.shapes.get(value)
        if shape is None:
            return None
        for dim in shape:
            if not isinstance(dim, int):
                return None
        return shape  # type: ignore[return-value]  # every one is an int

    def constant(self, value: str | None) -> np.ndarray | None:
        """The array behind `value` where it is known before the model runs, else None."""
        if value is None:
            return None
        if value in self.arrays:
            return self.arrays[value]
        return None if value in self.inputs else self.graph.constant(value)

    def dims(self, shape: str) -> Shape | None:
        """The dimensions that the shape tensor `shape` holds, as far as they are known."""
        known = self.constant(shape)
        if known is not None:
            return tuple(int(d) for d in known)
        node = self.graph.producer.get(shape)  # where the model measures a tensor itself
        if node is not None and node.key == ("", "Shape"):
            whole = self.shapes.get(node.inputs[0])
            return whole if whole is None else whole[node.attributes.get("start") : node.attributes.get("end")]
        return self.sizes.get(shape)


def tensor_type(kind: int, shape: Shape | None) -> TypeProto:
    """A tensor of which only the sizes that are numbers are declared."""
    sizes = None if shape is None else [dim if isinstance(dim, int) else None for dim in shape]
    return helper.make_tensor_type_proto(kind, sizes)
