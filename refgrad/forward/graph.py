"""The model as the sweep sees it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TypeProto,
    helper,
    numpy_helper,
)

from refgrad.errors import InvalidModelError
from refgrad.forward.calls import Functions, keep_functions
from refgrad.forward.inference import infer, ranks
from refgrad.forward.normalise import (
    _KEPT_OPSET,
    _MAP_OPSET,
    MIN_OPSET,
    _check,
    _has_sequences,
    _inlined,
    declare_shapes,
)
from refgrad.forward.runtime_models import mend_runtime_model, replace_misplaced
from refgrad.protos.reading import is_large, is_number, read, skeleton_of
from refgrad.protos.types import FLOATS, Shape, element_type, type_of
from refgrad.protos.upgrade import spell_out_deprecated, upgrade
from refgrad.protos.walk import (
    attribute_value,
    captured,
    names_of,
    rename_shadows,
    subgraphs,
    versions_of,
)
from refgrad.tables import plugins
from refgrad.tables.registry import CALLS, STRUCTURES, Structure

_MAYBE = FLOATS | {0}  # element types of what may carry a derivative: 0 is unknown
_FILLERS = frozenset((("", "SequenceConstruct"), ("", "SequenceInsert")))


@dataclass(slots=True)
class Node:
    """A forward node read once: reaching into a protobuf costs more than the rest of the sweep.

    `key` is its domain and operator, as the tables of rules have it; `reads` are its inputs and what its subgraphs take from
    outside, `attributes` those that it sets.
    """

    proto: NodeProto
    key: tuple[str, str]
    name: str
    inputs: list[str]
    outputs: list[str]
    reads: list[str]
    attributes: dict[str, Any]

    @property
    def domain(self) -> str:
        """The operator's domain, "" for ai.onnx."""
        return self.key[0]

    @property
    def op_type(self) -> str:
        """The operator."""
        return self.key[1]

    def add_output(self, position: int, name: str) -> None:
        """Give the optional output at `position`, which the node leaves out, a name."""
        self.outputs.extend([""] * (position + 1 - len(self.outputs)))
        self.outputs[position] = name
        self._write_outputs()

    def add_input(self, name: str) -> None:
        """Read one value more."""
        self.proto.input.append(name)
        self.inputs.append(name)
        if self.reads is not self.inputs:
            self.reads.append(name)

    def drop_outputs(self, count: int) -> None:
        """Take the last `count` outputs away, and what the node leaves out before them."""
        del self.outputs[-count:]
        while not self.outputs[-1]:
            del self.outputs[-1]
        self._write_outputs()

    def change(self, graphs: Mapping[str, GraphProto], outputs: Iterable[str]) -> None:
        """Give the node other graphs, by the name of the attribute, and let it return `outputs`."""
        for attribute in self.proto.attribute:
            if attribute.name in graphs:
                attribute.g.CopyFrom(graphs[attribute.name])
                self.attributes[attribute.name] = attribute.g
        self.outputs[:] = outputs
        self._write_outputs()

    def _write_outputs(self) -> None:
        del self.proto.output[:]
        self.proto.output.extend(self.outputs)

    def become(self, op_type: str, domain: str, attributes: Mapping[str, Any] | None) -> None:
        """Make the node that is written another operator; where `attributes` is None it keeps those that it has."""
        self.proto.op_type, self.proto.domain = op_type, domain
        if attributes is None:
            return
        del self.proto.attribute[:]
        self.proto.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())


class Graph:
    """A checked model of opset >= 16, with types and shapes by name. Local functions are inlined, but for those in `functions`.

    `nodes` are in topological order, uniquely named. `types` maps a tensor to its element type, `shapes` to its
    dimensions (an int, a symbol, or None), `containers` a sequence or an optional to its type; a value missing from all
    is unknown.
    """

    def __init__(
        self,
        model: ModelProto | str | os.PathLike[str],
        opset: int = MIN_OPSET,
        *,
        shapeless: bool = False,
        keep: bool = False,
        functions: Functions | None = None,
    ) -> None:
        """Read `model` in `opset`, or in its own if that is later.

        :param shapeless: outputs may lack a shape, also where none can be inferred.
        :param keep: leave the calls of functions that are called more than once.
        :param functions: those that it calls, of a model that holds none itself.
        """
        plugins.load()
        self.source = read(model)
        self._open: frozenset[str] = frozenset()
        self.apart = {t.name: t for t in self.source.graph.initializer if is_large(t) or t.name in self._overridable}
        skeleton = skeleton_of(self.source, self.apart)
        rename_shadows(skeleton.graph)
        spell_out_deprecated(skeleton)
        lowest = max(opset, mend_runtime_model(skeleton), _MAP_OPSET if _has_sequences(skeleton) else 1)
        checked = _check(skeleton, shapeless)
        self.functions = functions or Functions()
        self.structures = STRUCTURES  # and the functions
        if keep and checked.functions and versions_of(checked).get("", 1) >= max(lowest, _KEPT_OPSET):
            checked, self.functions = keep_functions(checked)
        if self.functions:
            self.structures = STRUCTURES | dict.fromkeys(self.functions.protos, CALLS[0])
        upgraded = upgrade(_inlined(checked), lowest)
        self.model = replace_misplaced(upgraded, lambda model: ranks(infer(self.functions.inlined(model))))
        self.refusals: dict[tuple[str, str], str] = {}  # operators whose function body does not cover a node: why not
        self.index()
        if not shapeless:
            declare_shapes(self.outputs, self._results)

    def index(self) -> None:
        """Read nodes, types and shapes off `self.model` (anew, after its nodes changed)."""
        graph = self.model.graph
        self.opsets = versions_of(self.model)
        self.opset = self.opsets.get("", MIN_OPSET)
        tensors = {t.name: t for t in graph.initializer} | self.apart
        order = (t.name for t in self.source.graph.initializer if t.name in tensors)
        self.initializers = {name: tensors[name] for name in order} | tensors
        self.inputs = {v.name: v for v in graph.input if v.name not in self.apart or v.name in self._overridable}
        self.outputs = {v.name: v for v in graph.output}
        self.nodes = read_nodes(graph)
        self.producer = {name: node for node in self.nodes for name in node.outputs if name}
        inferred = infer(self.functions.inlined(self.model))
        self.types: dict[str, int] = {}
        # of quantised values that carry a derivative: the float type of their adjoints
        self.adjoint_types: dict[str, int] = {}
        self.shapes: dict[str, Shape] = {}
        self.containers: dict[str, TypeProto] = {}
        self.values = {value.name: value for value in inferred.value_info}
        self._results = {value.name: value for value in inferred.output}
        if self.functions:
            self.values = {name: value for name, value in self.values.items() if name in self.producer}
        known: dict[bytes, tuple[int, Shape | None]] = {}  # few types recur many times
        for name, value in (*self.values.items(), *((v.name, v) for v in (*inferred.output, *inferred.input))):
            if not value.type.HasField("tensor_type"):
                if element_type(value.type):
                    self.containers[name] = value.type
                continue
            text = value.type.SerializeToString()
            if text not in known:
                known[text] = type_of(value)
            kind, shape = known[text]
            if kind:
                self.types[name] = kind
            if shape is not None:
                self.shapes[name] = shape
        for name, tensor in self.initializers.items():
            self.types[name] = tensor.data_type
            if name not in self.inputs:
                self.shapes[name] = tuple(tensor.dims)
        for node in self.nodes:
            if node.key == ("", "Attention"):
                self._mend(node)
            elif node.key in _FILLERS:
                self._check_elements(node)
        self.forget()

    def forget(self) -> None:
        """Forget constants and readers that were looked up: the nodes are others now."""
        self._constants: dict[str, np.ndarray | None] = {}
        self._readers: dict[str, list[Node]] = {}
        self._structures: dict[str, Structure] = {}

    @cached_property
    def names(self) -> set[str]:
        """Every name of a value, in the model and in its subgraphs."""
        return names_of(self.model.graph)

    def insert(self, proto: NodeProto, before: Node) -> None:
        """Put a node before another."""
        [node] = read_nodes(GraphProto(node=[proto]))
        self.nodes.insert(next(k for k, one in enumerate(self.nodes) if one is before), node)
        self.producer.update(dict.fromkeys(node.outputs, node))

    def structure(self, node: Node, quantization: str) -> Structure:
        """The graphs of `node`, read once."""
        if node.name not in self._structures:
            self._structures[node.name] = self.structures[node.key](self, node, quantization)
        return self._structures[node.name]

    def type_of(self, name: str) -> TypeProto | None:
        """The declared or inferred type of a value, None where nothing is known."""
        if name in self.containers:
            return self.containers[name]
        value = self.values.get(name) or self.inputs.get(name) or self._results.get(name)
        if value is not None:
            return value.type
        tensor = self.initializers.get(name)
        return None if tensor is None else helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))

    def _mend(self, attention: Node) -> None:
        """onnx infers a scalar for the scores of inputs of unknown rank, and no channels where those of V are not known."""
        names, v = attention.outputs, self.shapes.get(attention.inputs[2])
        y = self.shapes.get(names[0])
        if y and y[-1] == 0 and (v is None or v[-1] != 0):
            self.shapes[names[0]] = (*y[:-1], None)
        if len(names) > 3 and self.shapes.get(names[3]) == ():
            del self.shapes[names[3]]

    def _check_elements(self, node: Node) -> None:
        """A sequence holds tensors of one type; onnx finds others, and says nothing."""
        kinds = {name: self.element_type(name) for name in node.inputs[:2] if node.op_type == "SequenceInsert"}
        kinds = kinds or {name: self.element_type(name) for name in node.inputs}
        named = [f"{n!r} of type {helper.tensor_dtype_to_string(k)[12:].lower()}" for n, k in kinds.items() if k]
        if len(set(kinds.values()) - {0}) > 1:
            raise InvalidModelError(
                f"{node.op_type} {node.name!r} makes a sequence of mixed element types: {', '.join(named)}. "
                "Cast them to one type."
            )

    def readers(self, name: str) -> list[Node]:
        """The nodes that read a value, in order."""
        if not self._readers:
            for node in self.nodes:
                for read in dict.fromkeys(node.reads):
                    self._readers.setdefault(read, []).append(node)
        return self._readers.get(name, [])

    @cached_property
    def _overridable(self) -> frozenset[str]:
        """The initializers that are graph inputs too: since IR version 4 the caller may then feed another value."""
        return frozenset(v.name for v in self.source.graph.input if self.source.ir_version >= 4)

    def is_float(self, name: str) -> bool:
        """Whether `name` may carry a derivative: it is a float, or holds some. A value of unknown type may."""
        return self.element_type(name) in _MAYBE

    def element_type(self, name: str) -> int:
        """The element type of a tensor, or of the tensors that a container holds; 0 where it is not known."""
        container = self.containers.get(name)
        return self.types.get(name, 0) if container is None else element_type(container)

    def is_weight(self, name: str) -> bool:
        """Whether a float initializer is the model's own, and not a number that refgrad wrote: a rule, or a loss."""
        return not is_number(self.initializers[name])

    def open(self, names: Iterable[str]) -> None:
        """Take no initializer in `names` for a constant: the result has it as an input."""
        self._open = frozenset(names)
        self._constants.clear()

    def constant(self, name: str) -> np.ndarray | None:
        """The value of a small initializer or Constant node that no caller can override, else None."""
        if name not in self._constants:
            self._constants[name] = self._constant(name)
        return self._constants[name]

    def _constant(self, name: str) -> np.ndarray | None:
        if name in self.initializers and name not in self.apart and name not in self._open:
            return numpy_helper.to_array(self.initializers[name])
        node = self.producer.get(name)
        if node is None or node.key != ("", "Constant"):
            return None
        attribute = node.proto.attribute[0]
        if attribute.name == "value":
            return numpy_helper.to_array(attribute.t)
        if attribute.name in ("value_float", "value_int", "value_floats", "value_ints"):
            kind = np.float32 if "float" in attribute.name else np.int64
            return np.array(onnx.helper.get_attribute_value(attribute), dtype=kind)
        return None


def read_nodes(graph: GraphProto) -> list[Node]:
    """The nodes, each with a name of its own: gradient nodes are named after the node that they belong to."""
    taken: set[str] = set()
    nodes = []
    for position, proto in enumerate(graph.node):
        op_type, name, domain = proto.op_type, proto.name, proto.domain
        if not name or name in taken:
            name = f"{name or op_type}_{position}"
            while name in taken:
                name += "_"
            proto.name = name
        taken.add(name)
        inputs = list(proto.input)
        settings, inner = {}, []
        if attributes := proto.attribute:
            settings = {a.name: attribute_value(a) for a in attributes}
            inner = [name for attribute in attributes for g in subgraphs(attribute) for name in captured(g)]
        key = "" if domain == "ai.onnx" else domain, op_type
        reads = inputs + inner if inner else inputs
        nodes.append(Node(proto, key, name, inputs, list(proto.output), reads, settings))
    return nodes
