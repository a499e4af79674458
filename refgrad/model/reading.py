"""Reading of a model from a file or from memory. External data of weights is checked, but not loaded."""

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
from refgrad.model import native
from refgrad.model.external import (
    ExternalData,
    ModelSource,
    Opened,
    array_of,
    external_tensors,
    is_external,
    refuse_unknown_type,
)
from refgrad.model.places import lifted
from refgrad.model.upgrading.nchwc import filters, in_layout, plain_layout
from refgrad.model.upgrading.upgrade import spell_out_misplaced
from refgrad.notices import notice
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.inputs import is_regular
from refgrad.protos.memory import allowed
from refgrad.protos.traverse import (
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
from refgrad.tables import plugins

_LONG_PATH = 300  # the most characters of a path that a message repeats in full
_LARGE = 1024  # bytes; a larger initializer holds weights, a smaller one may hold the axes or the shape for an operator


def read(model: ModelSource, *, weights: bool = True, sort: bool = True, lift: bool = True) -> ModelProto:
    """The given model, or the model in the given file.

    The external data of initializers is checked, but not loaded.

    :param weights: if True, all external data must exist, and tensors that are not initializers are loaded. If False, files
        of external data may be missing; files that exist are checked.
    :param sort: put the nodes in topological order, with a notice. Functions that show a model pass False, to show the
        order in the file.
    :param lift: weights in Constant nodes and in bodies become initializers (`model/places.py`), if the nodes are sorted and
        all data is there.
    :raises InvalidModelError: there is no model, or its external data cannot be used.
    """
    plugins.load()
    if isinstance(model, ModelProto):
        if not model.HasField("graph"):
            raise InvalidModelError("The model is empty: it has no graph.")
        return _settled(model, sort, lift and weights)
    if isinstance(model, Opened):
        return _settled(model.proto, sort, lift and weights)
    if not isinstance(model, str | os.PathLike):
        raise InvalidModelError(f"A model is a ModelProto or a path, not {type(model).__name__}.")
    path = Path(model)
    try:
        if path.is_dir():
            raise InvalidModelError(f"{path} is a folder: give the path of an .onnx file in it.")
        if path.exists() and not is_regular(path):  # reading a FIFO would not end
            raise InvalidModelError(f"{path} is no regular file: give the path of an .onnx file.")
        size, limit = path.stat().st_size, allowed()
        if limit is not None and size > limit:
            raise InvalidModelError(f"{path} has {size} bytes, and max_memory is {limit}. Give max_memory more.")
        proto = native.load(path)
    except InvalidModelError:
        raise
    except FileNotFoundError as error:
        raise InvalidModelError(f"There is no file {reprlib.repr(str(path))}.") from error
    except OSError as error:
        raise InvalidModelError(f"{_shown(path)} cannot be read: {error.strerror}.") from error
    except (DecodeError, UnicodeDecodeError, ValueError) as error:
        raise InvalidModelError(
            f"{_shown(path)} is not an ONNX model, or it is truncated: {str(error).rstrip('. ')}."
        ) from error
    except Exception as error:  # the parser of each text format raises errors of its own types
        raise InvalidModelError(f"{path} is not an ONNX model: {type(error).__name__}: {error}") from error
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
    return _settled(proto, sort, lift and weights)


def opened(model: ModelSource, data_beside: str | os.PathLike[str] | None = None) -> ModelProto | Opened:
    """The model with its large initializers where they lie, in memory or in files. Small ones, and other tensors, are loaded.

    :param data_beside: the path of a model beside which the external data of `model` lies, if `model` is in memory.
    :raises InvalidModelError: there is no model, or its external data cannot be used.
    """
    if isinstance(model, Opened):
        return model
    proto = read(model, lift=False)
    if isinstance(model, ModelProto):
        if data_beside is None or not any(external_tensors(proto)):
            return proto
        path = Path(data_beside)
        copy = ModelProto()
        copy.CopyFrom(proto)
        proto = copy
    else:
        path = Path(model)
    with ExternalData(path) as data:
        for tensor in filter(is_external, tensors_without_initializers(proto)):
            data.load(tensor)
        for tensor in filter(is_external, proto.graph.initializer):
            data.check(tensor)
            if _is_of_many(tensor):
                data.count(tensor)
            else:
                data.load(tensor)
    return Opened(proto, path) if any(map(is_external, proto.graph.initializer)) else proto


def _settled(model: ModelProto, sort: bool, lift: bool) -> ModelProto:
    """The model itself, or a copy in standard ONNX.

    If a model breaks the specification but ONNX Runtime runs it, the copy has the meaning that ONNX Runtime gives to it.
    """
    model = _with_import(_each_once(model))
    model = _in_order(model) if sort else model
    model = lifted(model) if sort and lift else model
    model = spell_out_misplaced(model)
    return plain_layout(model, array_of) if in_layout(model) else model


def _with_import(model: ModelProto) -> ModelProto:
    """The model itself, or a copy that imports com.microsoft if the model has its operators without the import.

    The copy comes with a notice. ONNX Runtime runs these operators without the import, and its transformer optimizer creates
    models in memory that lack the import.
    """
    if any(one.domain == MICROSOFT for one in model.opset_import):
        return model
    if all(node.domain != MICROSOFT for node in nested(model.graph.node)):
        return model
    notice(
        f"The model has operators of {MICROSOFT} and does not import that domain. ONNX Runtime takes version 1 "
        "then, and so did refgrad."
    )
    copy = ModelProto()
    copy.CopyFrom(model)
    import_domain(copy, MICROSOFT)
    return copy


def _in_order(model: ModelProto) -> ModelProto:
    """The model itself, or a copy whose nodes are in topological order, with a notice.

    ONNX Runtime sorts the nodes of a graph too. Its tool for conversion to float16 appends Casts at the end.
    The bodies of nodes are not sorted, and the nodes of a cycle stay in their order: onnx's checker refuses both.
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
        "The nodes of the model are not in topological order, which the specification requires. refgrad has sorted them, as "
        "ONNX Runtime does."
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
    """The model itself, or a copy without repeated imports and without repeated keys of metadata.

    In the copy, the model and each of its functions import each domain once. Of repeated imports of a domain, and of
    repeated keys, the last one is kept. ONNX Runtime and onnx's checker also take the last import; skl2onnx writes such
    models.

    :raises InvalidModelError: ai.onnx has one version by the name "" and another by the name "ai.onnx", and an operator of the
        model differs between the two versions.
    """
    metadata = {entry.key: entry for entry in model.metadata_props}  # the last entry of each key
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
    # The last import by each name counts. onnx's checker takes the version by the name of the domain that a node has, ONNX
    # Runtime takes the last import for all nodes.
    named = {one.domain: one.version for one in importing.opset_import if one.domain in ("", "ai.onnx")}
    if len(set(named.values())) > 1:
        nodes = importing.graph.node if isinstance(importing, ModelProto) else importing.node
        for node in nested(nodes):
            if node.domain in named and len({_since(node.op_type, version) for version in named.values()}) > 1:
                raise InvalidModelError(
                    f"The model imports ai.onnx twice: version {named['']} by the name '', version {named['ai.onnx']} by the "
                    f"name 'ai.onnx', and {node.op_type} is not the same in both. Remove the wrong import."
                )
        # Every node means the same in both versions. Functions have imports of their own, which are usually of the later
        # version.
        for one in importing.opset_import:
            if one.domain in named:
                one.version = max(named.values())
    once = one_per_domain(importing.opset_import)
    del importing.opset_import[:]
    importing.opset_import.extend(once)


def _since(op_type: str, opset: int) -> int | None:
    """The first opset in which the operator is the same as in `opset`. None if the operator does not exist in `opset`."""
    try:
        return int(onnx.defs.get_schema(op_type, opset).since_version)
    except (onnx.defs.SchemaError, TypeError):  # the name is not a text, or the version does not fit int32
        return None


def _is_repeated(importing: ModelProto | FunctionProto) -> bool:
    """True if a domain is imported twice. The names "" and "ai.onnx" are one domain."""
    return len(importing.opset_import) > len({one.domain or "ai.onnx" for one in importing.opset_import})


def is_large(tensor: TensorProto) -> bool:
    """True if a tensor is large: a large tensor holds weights, a small one may hold the axes or the shape for an operator."""
    return is_external(tensor) or _is_of_many(tensor)


def _is_of_many(tensor: TensorProto) -> bool:
    return math.prod(tensor.dims) * 8 > _LARGE


def skeleton_of(model: ModelProto, apart: dict[str, TensorProto]) -> ModelProto:
    """A copy of the model in which the initializers `apart` are inputs. The data of these initializers is not copied."""
    skeleton = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    source, graph = model.graph, skeleton.graph
    graph.name = source.name or "graph"
    graph.node.extend(source.node)
    graph.output.extend(source.output)
    # ONNX Runtime saves the declared types of constants too, even if they are wrong. The tensors have the right types.
    tensors = {t.name for t in source.initializer}
    graph.value_info.extend([v for v in source.value_info if v.name not in tensors])
    graph.sparse_initializer.extend(source.sparse_initializer)
    # Before IR version 4, every initializer had to be listed as an input too. Here it is a constant, not an input.
    constants = {t.name for t in source.initializer} if model.ir_version < 4 else ()
    graph.input.extend([v for v in source.input if v.name not in constants])
    graph.initializer.extend([t for t in source.initializer if t.name not in apart] if apart else source.initializer)
    listed = {v.name for v in graph.input}
    graph.input.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims))
        for t in apart.values()
        if t.name not in listed
    )
    # Below IR version 8, onnx's checker does not check functions.
    skeleton.ir_version = max(skeleton.ir_version, 8 if model.functions else 4)
    return skeleton
