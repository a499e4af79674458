"""The model as the sweep sees it: a thin read-only view over the protobuf.

A value is its name, a node is a `NodeProto`. Large initializers stay in the caller's model: everything that is
checked, converted, inlined or inferred here is a skeleton in which they are mere graph inputs, so nothing large
is copied or serialised, and a model with external data is never read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TensorShapeProto,
    TypeProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)
from onnx.external_data_helper import load_external_data_for_tensor

from refgrad.errors import InvalidModelError
from refgrad.protos.fitting import refuse_misfits
from refgrad.protos.inlining import inline_functions, refuse_recursion
from refgrad.protos.upgrade import spell_out_deprecated, upgrade
from refgrad.protos.walk import (
    attribute_value,
    checkable,
    every_node,
    graphs,
    names_of,
    rename_shadows,
    subgraphs,
    tensors_within,
    versions_of,
)
from refgrad.reverse.calls import Functions, keep_functions
from refgrad.tables.registry import CALLS, STRUCTURES, Structure
from refgrad.tables.schemas import CONSTANT, OPERATORS, Type, adopt, call_functions, settle

SIXTEEN_BIT = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FLOATS = frozenset((*SIXTEEN_BIT, TensorProto.FLOAT, TensorProto.DOUBLE))
_MAYBE = FLOATS | {0}  # element types of what may carry a derivative: 0 is unknown
_MAP_OPSET = 17  # the first with SequenceMap
_KEPT_OPSET = 17  # a function of this one or later never has to be converted
MIN_OPSET = 16  # ScatterND and ScatterElements add duplicates from this one on
_POOL_GRADIENTS = ("MaxPoolGrad", "AveragePoolGrad")  # ONNX Runtime has them in the domain of ai.onnx
_FILLERS = frozenset((("", "SequenceConstruct"), ("", "SequenceInsert")))
_CUT = "/made"  # what is added to the name of a sequence where a node makes it, for inference
UNNAMED = "unk__"  # how shape inference names a dimension that it knows nothing of
_SEQUENCES = frozenset(("SequenceConstruct", "SequenceEmpty", "SplitToSequence"))  # what makes one of other things
_LARGE = 1024  # bytes; above it an initializer is weights, not the axes or shape of some operator

Dim = int | str | None
Shape = tuple[Dim, ...]


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

        :param shapeless: inputs and outputs may lack a shape.
        :param keep: leave the calls of functions that are called more than once.
        :param functions: those that it calls, of a model that holds none itself.
        """
        self.source = read(model)
        self._open: frozenset[str] = frozenset()
        self.apart = {t.name: t for t in self.source.graph.initializer if is_large(t) or t.name in self._overridable}
        skeleton = skeleton_of(self.source, self.apart)
        rename_shadows(skeleton.graph)
        spell_out_deprecated(skeleton)
        lowest = max(opset, adopt(skeleton), _MAP_OPSET if _has_sequences(skeleton) else 1)
        checked = _check(skeleton, shapeless)
        self.functions = functions or Functions()
        self.structures = STRUCTURES  # and the functions
        if keep and checked.functions and versions_of(checked).get("", 1) >= max(lowest, _KEPT_OPSET):
            checked, self.functions = keep_functions(checked)
        if self.functions:
            self.structures = STRUCTURES | dict.fromkeys(self.functions.protos, CALLS[0])
        upgraded = upgrade(_inlined(checked), lowest)
        self.model = settle(upgraded, lambda model: _ranks(infer(self.functions.inlined(model))))
        self.refusals: dict[tuple[str, str], str] = {}  # operators whose function body does not cover a node: why not
        self.index()

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


def is_container(kind: TypeProto) -> bool:
    """Whether it is the type of a sequence or of an optional."""
    return kind.HasField("sequence_type") or kind.HasField("optional_type")


def opened(kind: TypeProto) -> TypeProto:
    """The type of what an optional holds; of anything else its own."""
    return opened(kind.optional_type.elem_type) if kind.HasField("optional_type") else kind


def adjoint_of(kind: TypeProto) -> TypeProto:
    """The type of the adjoint of a value: of an optional tensor, which may be empty, the rank alone is known."""
    if not kind.HasField("optional_type"):
        return kind
    elements, shape = type_of(ValueInfoProto(type=opened(kind)))
    if not elements:
        return unname(opened(kind))
    return helper.make_tensor_type_proto(elements, None if shape is None else [None] * len(shape))


def held_by(kind: TypeProto) -> TypeProto:
    """The type of the tensors that a container holds; of anything else its own."""
    kind = opened(kind)
    return held_by(kind.sequence_type.elem_type) if kind.HasField("sequence_type") else kind


def element_type(kind: TypeProto) -> int:
    """The element type of a tensor, or of the tensors that a container holds; 0 where there are none."""
    return int(held_by(kind).tensor_type.elem_type)


def _has_sequences(model: ModelProto) -> bool:
    if any(opened(value.type).HasField("sequence_type") for value in model.graph.input):
        return True
    return any(node.op_type in _SEQUENCES and not node.domain for graph in graphs(model.graph) for node in graph.node)


def is_number(tensor: TensorProto) -> bool:
    """Whether refgrad wrote the tensor and marked it as no weight."""
    return any(entry.key == CONSTANT for entry in tensor.metadata_props)


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


def is_unnamed(dim: Dim) -> bool:
    """Whether nothing is known of a dimension but, at most, that it equals others."""
    return dim is None or (isinstance(dim, str) and dim.startswith(UNNAMED))


def captured(graph: GraphProto) -> Iterator[str]:
    """The outer values that `graph`, a subgraph, reads."""
    inner = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    inner.update(tensor.values.name for tensor in graph.sparse_initializer)
    for node in graph.node:
        nested = (name for attribute in node.attribute for g in subgraphs(attribute) for name in captured(g))
        yield from (name for name in (*node.input, *nested) if name and name not in inner)
        inner.update(node.output)
    yield from (v.name for v in graph.output if v.name not in inner)


def read(model: ModelProto | str | os.PathLike[str], *, weights: bool = True) -> ModelProto:
    """The model itself, or the file's content without its external data, which with `weights` is looked for."""
    if isinstance(model, ModelProto):
        if not model.HasField("graph"):
            raise InvalidModelError("The model is empty: it has no graph.")
        return model
    if not isinstance(model, str | os.PathLike):
        raise InvalidModelError(f"A model is a ModelProto or a path, not {type(model).__name__}.")
    path = Path(model)
    if path.is_dir():
        raise InvalidModelError(f"{path} is a folder: give the path of an .onnx file in it.")
    try:
        proto = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise InvalidModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (DecodeError, UnicodeDecodeError, ValueError) as error:
        raise InvalidModelError(f"{path} is no ONNX model, or a truncated one: {error}.") from error
    except Exception as error:  # the text formats each raise their own
        raise InvalidModelError(f"{path} is no ONNX model: {type(error).__name__}: {error}") from error
    if not proto.HasField("graph"):
        raise InvalidModelError(f"{path} holds no graph: the file is empty or truncated.")
    if weights:
        _find_external_data(proto, path.parent)
    return proto


def _find_external_data(model: ModelProto, folder: Path) -> None:
    """Look for the external data of the initializers, and read that of the tensors within nodes, which are copied anyway."""
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            _find(tensor, folder)
    for tensor in tensors_within(every_node(model)):
        if tensor.data_location == TensorProto.EXTERNAL:
            _find(tensor, folder)
            load_external_data_for_tensor(tensor, str(folder))
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")


def _find(tensor: TensorProto, folder: Path) -> None:
    entry = {e.key: e.value for e in tensor.external_data}
    file = folder / entry.get("location", "")
    try:
        need = int(entry.get("offset", 0)) + int(entry.get("length", 0))
    except ValueError as error:
        raise InvalidModelError(
            f"The offset or the length of the data of initializer {tensor.name!r} is no number: {error}. "
            "Export the model again."
        ) from error
    if not file.is_file():
        raise InvalidModelError(
            f"The data of initializer {tensor.name!r} is missing: there is no file {str(file)!r}. "
            "Put the data file back beside the model."
        )
    if file.stat().st_size < need:
        raise InvalidModelError(
            f"The data of initializer {tensor.name!r} is truncated: {str(file)!r} has {file.stat().st_size} bytes, "
            f"{need} are needed."
        )


def is_large(tensor: TensorProto) -> bool:
    """Whether a tensor is weights, and not the axes or the shape of some operator."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return True
    return math.prod(tensor.dims) * 8 > _LARGE


def skeleton_of(model: ModelProto, apart: dict[str, TensorProto]) -> ModelProto:
    """The model with the initializers in `apart` as mere inputs: nothing large is copied."""
    skeleton = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    source, graph = model.graph, skeleton.graph
    graph.name = source.name or "graph"
    graph.node.extend(source.node)
    graph.output.extend(source.output)
    graph.value_info.extend(source.value_info)
    graph.sparse_initializer.extend(source.sparse_initializer)
    initialized = {t.name for t in source.initializer}
    # Before IR version 4 every initializer had to be listed as an input as well; it was a constant all the same.
    graph.input.extend(v for v in source.input if model.ir_version >= 4 or v.name not in initialized)
    graph.initializer.extend(t for t in source.initializer if t.name not in apart)
    listed = {v.name for v in graph.input}
    graph.input.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims))
        for t in apart.values()
        if t.name not in listed
    )
    skeleton.ir_version = max(skeleton.ir_version, 4)
    return skeleton


def _check(model: ModelProto, shapeless: bool = False) -> ModelProto:
    newest = onnx.defs.onnx_opset_version()
    for imported in model.opset_import:
        if imported.domain in ("", "ai.onnx") and imported.version > newest:
            raise InvalidModelError(
                f"The model's opset {imported.version} is newer than onnx {onnx.__version__} knows ({newest}). "
                "Upgrade onnx, or convert the model down with onnx.version_converter."
            )
    refuse_recursion(model.functions)
    try:
        onnx.checker.check_model(checkable(model) if shapeless else model)
    except onnx.checker.ValidationError as error:
        again = " It is a gradient in dialect 'ort': to differentiate again, make it in dialect 'onnx'."
        hint = again if any(node.op_type in _POOL_GRADIENTS for node in model.graph.node) else ""
        for value in (*model.graph.input, *model.graph.output) if "'shape'" in str(error) else ():
            if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
                hint = (
                    f" {value.name!r} declares no shape: save what onnx.shape_inference.infer_shapes(model) returns, "
                    "or declare its axes, by names where the sizes are not known."
                )
        said = " ".join(str(error).split())
        raise InvalidModelError(f"onnx.checker refuses the model: {said}{hint}") from error
    if not shapeless:  # a body was looked at with its model
        refuse_misfits(model)
    return model


def _inlined(model: ModelProto) -> ModelProto:
    return inline_functions(model) if model.functions else model


def infer(model: ModelProto) -> GraphProto:
    """The graph with inferred types and shapes.

    An input's dimension without a name gets one first: two values whose shapes were inferred from it are then known to agree.
    """
    anonymous = ModelProto()
    anonymous.CopyFrom(model)
    for value in anonymous.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if _dim(dim) is None:
                dim.dim_param = f"{UNNAMED}{value.name}_{axis}"
    for value in (*anonymous.graph.input, *anonymous.graph.output, *anonymous.graph.value_info):
        if is_container(value.type):
            value.type.CopyFrom(unname(value.type))  # the elements may differ in the size
    for graph in graphs(anonymous.graph):
        for node in graph.node:  # where the attribute is absent onnx infers the shape of the two-sided transform
            if (node.domain, node.op_type) == ("", "STFT") and all(a.name != "onesided" for a in node.attribute):
                node.attribute.append(helper.make_attribute("onesided", 1))
    try:
        inferred = _infer_through_bodies(anonymous)
        cut: set[str] = set()
        for looped in (True, False):  # what a Loop makes first: the others follow from it
            if found := _cut_sequences(anonymous.graph, inferred, looped):
                inferred = _infer_through_bodies(anonymous)
                cut |= found
        return _joined_again(inferred, cut) if cut else inferred
    except onnx.shape_inference.InferenceError as error:
        raise InvalidModelError(f"Shape inference refuses the model: {error}") from error


def _joined_again(graph: GraphProto, cut: Set[str]) -> GraphProto:
    """The graph with the sequences in `cut` where nodes make them."""
    for node in graph.node:
        node.output[:] = [name.removesuffix(_CUT) for name in node.output]
    values = [value for value in graph.value_info if not value.name.endswith(_CUT)]
    values += [value for value in graph.input if value.name in cut]
    inputs = [value for value in graph.input if value.name not in cut]
    del graph.value_info[:], graph.input[:]
    graph.value_info.extend(values)
    graph.input.extend(inputs)
    return graph


def unname(kind: TypeProto) -> TypeProto:
    """A type without names of sizes."""
    plain = TypeProto()
    plain.CopyFrom(kind)
    for dim in held_by(plain).tensor_type.shape.dim:
        dim.ClearField("dim_param")
    return plain


def _cut_sequences(graph: GraphProto, inferred: GraphProto, looped: bool) -> set[str]:
    """Make inputs of the sequences that nodes make, with what is known of all elements; their names.

    onnx gives all elements one name for a size that it does not know, and those that Loop adds the shape of the first ones.
    """
    kinds = {v.name: v.type for v in (*inferred.value_info, *inferred.output) if is_container(v.type)}
    found = set()
    for node in graph.node if kinds else ():
        inner = (g for attribute in node.attribute for sub in subgraphs(attribute) for g in graphs(sub))
        if looped and node.op_type != "Loop" and all(n.op_type != "Loop" for g in inner for n in g.node):
            continue
        for position, name in enumerate(node.output):
            if name not in kinds or name.endswith(_CUT):
                continue
            found.add(name)
            node.output[position] = f"{name}{_CUT}"
            value = graph.input.add(name=name, type=unname(kinds[name]))
            if looped:
                held_by(value.type).tensor_type.ClearField("shape")
    return found


def _infer_through_bodies(model: ModelProto) -> GraphProto:
    """Operators that only we know are inferred through their bodies, some of which need to know what the others give."""
    known, before = _ranks(model.graph), -1
    ours = {domain for domain, _ in OPERATORS}.intersection(o.domain for o in model.opset_import)
    waiting = sum((node.domain, node.op_type) in OPERATORS for node in model.graph.node) if ours else 0
    while True:
        called, left = model, 0
        if waiting:
            called = ModelProto()
            called.CopyFrom(model)
            left = call_functions(called, known)
        inferred: GraphProto = onnx.shape_inference.infer_shapes(called, data_prop=True).graph
        if left in (0, before):
            return inferred
        before, known = left, _ranks(inferred)


def _ranks(graph: GraphProto) -> dict[str, Type]:
    """The element types and ranks that a graph declares."""
    found = {}
    for value in (*graph.value_info, *graph.input, *graph.output):
        kind, shape = type_of(value)
        found[value.name] = kind, None if shape is None else len(shape)
    return found


def type_of(value: ValueInfoProto) -> tuple[int, Shape | None]:
    """The element type, 0 where there is none, and the shape, None where not even the rank is known."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return tensor.elem_type, None
    return tensor.elem_type, tuple([_dim(dim) for dim in tensor.shape.dim])


def _dim(dim: TensorShapeProto.Dimension) -> Dim:
    """Below 0 it is unknown: so ONNX Runtime reads it, and so some exporters write it."""
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    return dim.dim_param or None
