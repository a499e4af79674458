"""Reading a model from a file or from memory: its external data is checked, its weights are not read."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto

from refgrad.errors import InvalidModelError
from refgrad.notices import notice
from refgrad.protos import native
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.external import ExternalData, array_of, is_external, refuse_unknown_type
from refgrad.protos.inputs import is_regular
from refgrad.protos.layout import filters, in_layout, plain_layout
from refgrad.protos.memory import allowed
from refgrad.protos.upgrade import spell_out_misplaced
from refgrad.protos.walk import (
    every_node,
    import_domain,
    nested,
    one_per_domain,
    reads_of,
    refill,
    signatures,
    tensors_without_initializers,
    topological_positions,
)

# Metadata of a constant that refgrad wrote: it may be a float, but it is not a weight. The value is the number before it was
# rounded to the type of the tensor, or "" where rounding changed nothing.
CONSTANT = "refgrad.constant"
_LONG_PATH = 300  # characters that a message repeats
_LARGE = 1024  # bytes; above it an initializer is weights, not the axes or shape of some operator


def read(model: ModelProto | str | os.PathLike[str], *, weights: bool = True, sort: bool = True) -> ModelProto:
    """The model itself, or the model in a file. The external data of initializers is checked, and stays where it is.

    :param weights: the external data is needed: it must be there, and the data of other tensors is read. Without `weights`
        files may be missing; existing files are checked all the same.
    :param sort: put the nodes in topological order, with a notice. What shows a model shows it as it is.
    :raises InvalidModelError: there is no model, or its external data cannot be used.
    """
    if isinstance(model, ModelProto):
        if not model.HasField("graph"):
            raise InvalidModelError("The model is empty: it has no graph.")
        return _settled(model, sort)
    if not isinstance(model, str | os.PathLike):
        raise InvalidModelError(f"A model is a ModelProto or a path, not {type(model).__name__}.")
    path = Path(model)
    try:
        if path.is_dir():
            raise InvalidModelError(f"{path} is a folder: give the path of an .onnx file in it.")
        if path.exists() and not is_regular(path):  # a FIFO has no end
            raise InvalidModelError(f"{path} is no regular file: give the path of an .onnx file.")
        size, limit = path.stat().st_size, allowed()
        if limit is not None and size > limit:
            raise InvalidModelError(f"{path} has {size} bytes, and max_memory is {limit}. Give it more.")
        proto = native.load(path)
    except InvalidModelError:
        raise
    except OSError as error:
        raise InvalidModelError(f"{_shown(path)} cannot be read: {error.strerror}.") from error
    except (DecodeError, UnicodeDecodeError, ValueError) as error:
        raise InvalidModelError(f"{_shown(path)} is no ONNX model, or a truncated one: {error}.") from error
    except Exception as error:  # the text formats each raise their own
        raise InvalidModelError(f"{path} is no ONNX model: {type(error).__name__}: {error}") from error
    if not proto.HasField("graph"):
        raise InvalidModelError(f"{path} holds no graph: the file is empty or truncated.")
    with ExternalData(path) as data:
        for tensor in proto.graph.initializer:
            if is_external(tensor):
                data.check(tensor, missing=not weights)
            else:
                refuse_unknown_type(tensor)
        for tensor in filter(is_external, tensors_without_initializers(proto)):
            data.load(tensor) if weights else data.check(tensor, missing=True)
        if in_layout(proto):
            for tensor in filter(is_external, filters(proto)):
                data.load(tensor)
    return _settled(proto, sort)


def _settled(model: ModelProto, sort: bool) -> ModelProto:
    """The model itself, or a copy in which it is written what ONNX Runtime reads."""
    model = spell_out_misplaced(_with_import(_each_once(model)))
    model = _in_order(model) if sort else model
    return plain_layout(model, array_of) if in_layout(model) else model


def _with_import(model: ModelProto) -> ModelProto:
    """The model itself, or a copy that imports com.microsoft, with a notice: ONNX Runtime knows its operators all the same.

    Its transformer optimizer leaves such models in memory.
    """
    if any(one.domain == MICROSOFT for one in model.opset_import):
        return model
    if all(node.domain != MICROSOFT for node in nested(model.graph.node)):
        return model
    notice(
        f"The model has operators of {MICROSOFT} and does not import that domain. ONNX Runtime reads it as version 1, and so "
        "it was read here."
    )
    copy = ModelProto()
    copy.CopyFrom(model)
    import_domain(copy, MICROSOFT)
    return copy


def _in_order(model: ModelProto) -> ModelProto:
    """The model itself, or a copy whose nodes stand behind those that they read, with a notice: ONNX Runtime sorts them too.

    Its conversion to float16 appends the casts that it adds. It does not sort bodies, and a cycle is left as it is: onnx's
    checker refuses both.
    """
    nodes = list(model.graph.node)
    if _is_ordered(nodes):
        return model
    order = topological_positions(signatures(nodes))
    if len(order) < len(nodes):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    refill(copy.graph.node, [nodes[position] for position in order])
    notice(
        "The nodes of the model are not in topological order, as the specification asks for. ONNX Runtime sorts them, and so "
        "they were sorted here."
    )
    return copy


def _is_ordered(nodes: Sequence[NodeProto]) -> bool:
    """True if no node reads what a later one writes."""
    numbered = list(enumerate(nodes))
    first = {name: position for position, node in reversed(numbered) for name in node.output if name}
    return all(first.get(name, -1) < position for position, node in numbered for name in reads_of(node))


def _shown(path: Path) -> str:
    return str(path) if len(str(path)) <= _LONG_PATH else reprlib.repr(str(path))


def _each_once(model: ModelProto) -> ModelProto:
    """The model itself, or a copy in which it and its functions import each domain once, and no metadata have one key.

    The last of each counts. Imports of other versions are read so by ONNX Runtime and onnx's checker: skl2onnx writes them.

    :raises InvalidModelError: ai.onnx has one version by the name "" and another by the name "ai.onnx", and an operator of the
        model is not the same in both: the model does not say which is meant.
    """
    metadata = {entry.key: entry for entry in model.metadata_props}  # the last of each
    if len(metadata) == len(model.metadata_props) and not any(map(_is_repeated, _importing(model))):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    for importing in _importing(copy):
        _merge_imports(importing)
    for node in every_node(copy):
        if node.domain == "ai.onnx":
            node.domain = ""
    del copy.metadata_props[:]
    copy.metadata_props.extend(metadata.values())
    return copy


def _importing(model: ModelProto) -> list[ModelProto | FunctionProto]:
    return [model, *model.functions]


def _merge_imports(importing: ModelProto | FunctionProto) -> None:
    # The last of each: onnx's checker reads a node by the name that it has, ONNX Runtime all nodes by the last import.
    named = {one.domain: one.version for one in importing.opset_import if one.domain in ("", "ai.onnx")}
    if len(set(named.values())) > 1:
        nodes = importing.graph.node if isinstance(importing, ModelProto) else importing.node
        for node in nested(nodes):
            if node.domain in named and len({_since(node.op_type, version) for version in named.values()}) > 1:
                raise InvalidModelError(
                    f"The model imports ai.onnx twice: version {named['']} by the name '', version {named['ai.onnx']} by the "
                    f"name 'ai.onnx', and {node.op_type} is not the same in both. Remove the one that is not meant."
                )
        # Every node means the same in both. Functions, with imports of their own, are rather written in the later one.
        for one in importing.opset_import:
            if one.domain in named:
                one.version = max(named.values())
    once = one_per_domain(importing.opset_import)
    del importing.opset_import[:]
    importing.opset_import.extend(once)


def _since(op_type: str, opset: int) -> int | None:
    """Since which opset the operator is as it is in this one; None where it does not exist."""
    try:
        return int(onnx.defs.get_schema(op_type, opset).since_version)
    except (onnx.defs.SchemaError, TypeError):  # a name that is no text, a version beyond int32
        return None


def _is_repeated(importing: ModelProto | FunctionProto) -> bool:
    """True if a domain is imported twice, by whichever of its names."""
    return len(importing.opset_import) > len({one.domain or "ai.onnx" for one in importing.opset_import})


def is_large(tensor: TensorProto) -> bool:
    """True if a tensor is large: then it is weights, and not the axes or the shape of an operator."""
    return is_external(tensor) or math.prod(tensor.dims) * 8 > _LARGE


def is_number(tensor: TensorProto) -> bool:
    """True if refgrad wrote the tensor: a number of a rule or of a loss, which is not trained."""
    marks = tensor.metadata_props
    return bool(marks) and any(entry.key == CONSTANT for entry in marks)


def skeleton_of(model: ModelProto, apart: dict[str, TensorProto]) -> ModelProto:
    """A copy of the model in which the initializers `apart` are inputs: nothing large is copied."""
    skeleton = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    source, graph = model.graph, skeleton.graph
    graph.name = source.name or "graph"
    graph.node.extend(source.node)
    graph.output.extend(source.output)
    # ONNX Runtime saves what a model declared of a constant, too, be it wrong: the tensor says it better.
    tensors = {t.name for t in source.initializer}
    graph.value_info.extend([v for v in source.value_info if v.name not in tensors])
    graph.sparse_initializer.extend(source.sparse_initializer)
    # Before IR version 4 every initializer had to be listed as an input as well; it was a constant all the same.
    constants = {t.name for t in source.initializer} if model.ir_version < 4 else ()
    graph.input.extend([v for v in source.input if v.name not in constants])
    graph.initializer.extend([t for t in source.initializer if t.name not in apart] if apart else source.initializer)
    listed = {v.name for v in graph.input}
    graph.input.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims))
        for t in apart.values()
        if t.name not in listed
    )
    # Below 8 onnx's checker does not look into functions.
    skeleton.ir_version = max(skeleton.ir_version, 8 if model.functions else 4)
    return skeleton
