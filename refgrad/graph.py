"""The model as the sweep sees it: a thin read-only view over the protobuf.

A value is its name, a node is a `NodeProto`. Large initializers stay in the caller's model: everything that is
checked, converted, inlined or inferred here is a skeleton in which they are mere graph inputs, so nothing large
is copied or serialised, and a model with external data is never read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from refgrad.errors import InvalidModelError

FLOATS = frozenset((TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE))
MIN_OPSET = 16  # ScatterND and ScatterElements add duplicates from this one on
UNNAMED = "unk__"  # how shape inference names a dimension that it knows nothing of
_LARGE = 1024  # bytes; above it an initializer is weights, not the axes or shape of some operator

Dim = int | str | None
Shape = tuple[Dim, ...]


class Graph:
    """A checked model of opset >= 16 without local functions, with types and shapes by name.

    `nodes` are in topological order, uniquely named. `types` maps a tensor to its element type, `shapes` to its
    dimensions (an int, a symbol, or None); a value missing from them is unknown.
    """

    def __init__(self, model: ModelProto | str | os.PathLike[str]) -> None:
        self.source = read(model)
        self.large = {t.name: t for t in self.source.graph.initializer if _is_large(t)}
        self.model = _inline(_upgrade(_check(_skeleton(self.source, self.large))))
        self.index()

    def index(self) -> None:
        """Read types, shapes and producers off `self.model` (anew, after its nodes changed)."""
        graph = self.model.graph
        self.opsets = {o.domain if o.domain != "ai.onnx" else "": o.version for o in self.model.opset_import}
        self.opset = self.opsets.get("", onnx.defs.onnx_opset_version())
        self.nodes: list[NodeProto] = list(graph.node)
        self.initializers = {t.name: t for t in graph.initializer} | self.large
        self.inputs = {v.name: v for v in graph.input if v.name not in self.large or self._overridable(v.name)}
        self.outputs = {v.name: v for v in graph.output}
        self.producer = {name: node for node in self.nodes for name in node.output if name}
        inferred = _infer(self.model)
        self.types: dict[str, int] = {}
        self.shapes: dict[str, Shape] = {}
        for value in (*inferred.value_info, *inferred.output, *inferred.input):
            tensor = value.type.tensor_type
            if tensor.elem_type:
                self.types[value.name] = tensor.elem_type
            if tensor.HasField("shape"):
                self.shapes[value.name] = _dims(value)
        for name, tensor_proto in self.initializers.items():
            self.types[name] = tensor_proto.data_type
            self.shapes[name] = tuple(tensor_proto.dims)
        self.values: dict[str, ValueInfoProto] = {v.name: v for v in inferred.value_info}
        self._constants: dict[str, np.ndarray | None] = {}
        _name_nodes(self.nodes)

    def _overridable(self, name: str) -> bool:
        """Whether an initializer is also a graph input: since IR version 4 the caller may then feed another value."""
        return self.source.ir_version >= 4 and name in {v.name for v in self.source.graph.input}

    def is_float(self, name: str) -> bool:
        """Whether `name` may carry a derivative. A value of unknown type may."""
        return self.types.get(name, TensorProto.FLOAT) in FLOATS

    def constant(self, name: str) -> np.ndarray | None:
        """The value of a small initializer or Constant node that no caller can override, else None."""
        if name not in self._constants:
            self._constants[name] = self._constant(name)
        return self._constants[name]

    def _constant(self, name: str) -> np.ndarray | None:
        if name in self.initializers and name not in self.inputs and name not in self.large:
            return numpy_helper.to_array(self.initializers[name])
        node = self.producer.get(name)
        if node is None or node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
            return None
        attribute = node.attribute[0]
        if attribute.name == "value":
            return numpy_helper.to_array(attribute.t)
        if attribute.name in ("value_float", "value_int", "value_floats", "value_ints"):
            kind = np.float32 if "float" in attribute.name else np.int64
            return np.array(onnx.helper.get_attribute_value(attribute), dtype=kind)
        return None


def reads(node: NodeProto) -> Iterator[str]:
    """Every value that `node` reads: its inputs and what its subgraphs take from outside."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from _captured(graph)


def _captured(graph: GraphProto) -> Iterator[str]:
    inner = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    for node in graph.node:
        yield from (name for name in reads(node) if name not in inner)
        inner.update(node.output)
    yield from (v.name for v in graph.output if v.name not in inner)


def read(model: ModelProto | str | os.PathLike[str]) -> ModelProto:
    """The model itself, or the file's content without its external data, which is only looked for."""
    if isinstance(model, ModelProto):
        if not model.HasField("graph"):
            raise InvalidModelError("The model is empty: it has no graph.")
        return model
    if not isinstance(model, str | os.PathLike):
        raise InvalidModelError(f"A model is a ModelProto or a path, not {type(model).__name__}.")
    path = Path(model)
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            raise InvalidModelError(f"{path} is a folder: give the path of an .onnx file in it.")
        proto = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise InvalidModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (DecodeError, UnicodeDecodeError, ValueError) as error:
        raise InvalidModelError(f"{path} is no ONNX model, or a truncated one: {error}.") from error
    except Exception as error:  # the text formats each raise their own
        raise InvalidModelError(f"{path} is no ONNX model: {type(error).__name__}: {error}") from error
    if not proto.HasField("graph"):
        raise InvalidModelError(f"{path} holds no graph: the file is empty or truncated.")
    _find_external_data(proto, path.parent)
    return proto


def _find_external_data(model: ModelProto, folder: Path) -> None:
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entry = {e.key: e.value for e in tensor.external_data}
        file = folder / entry.get("location", "")
        need = int(entry.get("offset", 0)) + int(entry.get("length", 0))
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


def _is_large(tensor: TensorProto) -> bool:
    if tensor.data_location == TensorProto.EXTERNAL:
        return True
    return int(np.prod(tensor.dims, dtype=np.int64)) * 8 > _LARGE


def _skeleton(model: ModelProto, large: dict[str, TensorProto]) -> ModelProto:
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
    graph.initializer.extend(t for t in source.initializer if t.name not in large)
    listed = {v.name for v in graph.input}
    graph.input.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims))
        for t in large.values()
        if t.name not in listed
    )
    skeleton.ir_version = max(skeleton.ir_version, 4)
    return skeleton


def _check(model: ModelProto) -> ModelProto:
    newest = onnx.defs.onnx_opset_version()
    for imported in model.opset_import:
        if imported.domain in ("", "ai.onnx") and imported.version > newest:
            raise InvalidModelError(
                f"The model's opset {imported.version} is newer than onnx {onnx.__version__} knows ({newest}). "
                "Upgrade onnx, or convert the model down."
            )
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise InvalidModelError(f"onnx.checker refuses the model: {error}") from error
    return model


def _upgrade(model: ModelProto) -> ModelProto:
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), MIN_OPSET)
    if opset >= MIN_OPSET:
        return model
    try:
        return onnx.version_converter.convert_version(model, MIN_OPSET)
    except RuntimeError as error:
        raise InvalidModelError(
            f"The model has opset {opset}; gradients are emitted from opset {MIN_OPSET} on, and onnx cannot convert it: "
            f"{error}. Export it anew with opset {MIN_OPSET} or later."
        ) from error


def _inline(model: ModelProto) -> ModelProto:
    return onnx.inliner.inline_local_functions(model) if model.functions else model


def _infer(model: ModelProto) -> GraphProto:
    """The graph with inferred types and shapes.

    An input's dimension without a name gets one first: two values whose shapes were inferred from it are then known to agree.
    """
    anonymous = ModelProto()
    anonymous.CopyFrom(model)
    for value in anonymous.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value") and not dim.dim_param:
                dim.dim_param = f"{UNNAMED}{value.name}_{axis}"
    try:
        return onnx.shape_inference.infer_shapes(anonymous, data_prop=True).graph
    except onnx.shape_inference.InferenceError as error:
        raise InvalidModelError(f"Shape inference refuses the model: {error}") from error


def _name_nodes(nodes: list[NodeProto]) -> None:
    """Give every node a name of its own: gradient nodes are named after the node that they belong to."""
    taken: set[str] = set()
    for position, node in enumerate(nodes):
        if not node.name or node.name in taken:
            stem = node.name or node.op_type
            name = f"{stem}_{position}"
            while name in taken:
                name += "_"
            node.name = name
        taken.add(node.name)


def _dims(value: ValueInfoProto) -> Shape:
    return tuple(
        d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in value.type.tensor_type.shape.dim
    )
