"""A model in the form in which it is differentiated: checked, upgraded and inlined."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set

import onnx
from onnx import ModelProto, ValueInfoProto, helper

from refgrad import traits
from refgrad.errors import InvalidModelError
from refgrad.model import native
from refgrad.model.checks.arity import refuse_mismatches
from refgrad.model.checks.attributes import refuse_absurd_attributes
from refgrad.model.checks.recursion import refuse_recursion
from refgrad.model.external import refuse_mismatch
from refgrad.model.graph import MIN_OPSET, Graph, overridable_names, view
from refgrad.model.guards import free_limits
from refgrad.model.inference.infer import infer, ranks
from refgrad.model.inlining.inline import inline_functions
from refgrad.model.inlining.kept import Functions, keep_functions
from refgrad.model.reading import is_large, read, skeleton_of
from refgrad.model.removable import without_singularities
from refgrad.model.upgrading.runtime_models import mend_runtime_model, replace_misplaced
from refgrad.model.upgrading.upgrade import spell_out_deprecated, upgrade
from refgrad.protos.traverse import (
    checkable,
    every_node,
    graphs,
    lacks_shape,
    op_types,
    rename_shadows,
    versions_of,
    with_shapes,
)
from refgrad.protos.types import KNOWN, UNNAMED, element_type, held_by, is_container, unwrapped
from refgrad.tables.signatures import SIGNATURES

_MAP_OPSET = 17  # the first with SequenceMap
_KEPT_OPSET = 17  # a function of this one or later never has to be converted
_POOL_GRADIENTS = ("MaxPoolGrad", "AveragePoolGrad")  # ONNX Runtime has them in the domain of ai.onnx


def normalise(
    model: ModelProto | str | os.PathLike[str],
    opset: int = MIN_OPSET,
    *,
    shapeless: bool = False,
    keep: bool = False,
    functions: Functions | None = None,
    outer: Graph | None = None,
    captures: frozenset[str] = frozenset(),
    removable: bool = False,
    lift: bool = False,
) -> Graph:
    """The view of `model` in `opset`, or in its own if that is later. The caller's model is not modified.

    :param shapeless: outputs may lack a shape, also where none can be inferred.
    :param keep: leave the calls of functions that are called more than once.
    :param functions: those that it calls, of a model that holds none itself.
    :param outer: the graph that a body lies in; `captures` are the values of it that the body reads.
    :param lift: weights in Constant nodes and in bodies become initializers (`model/places.py`).
    :param removable: write quotients with a removable singularity in another way (`model/removable.py`).
    :raises InvalidModelError: the model cannot be read, or onnx refuses it.
    """
    source = read(model, lift=lift)
    overridable = overridable_names(source)
    large = {t.name: t for t in source.graph.initializer if is_large(t) or t.name in overridable}
    for tensor in large.values():  # onnx sees the others
        refuse_mismatch(tensor)
    skeleton = skeleton_of(source, large)
    for value in filter(lacks_shape, skeleton.graph.input):  # of one with a value the shape is known
        for tensor in (t for t in source.graph.initializer if t.name == value.name):
            value.type.CopyFrom(helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))
    used, has_bodies = op_types(skeleton.graph)
    if has_bodies:
        rename_shadows(skeleton.graph)
    spell_out_deprecated(skeleton, used)
    lowest = max(opset, mend_runtime_model(skeleton, used), _MAP_OPSET if _has_sequences(skeleton, used) else 1)
    checked = _check(skeleton, used, shapeless)
    functions = functions or Functions()
    if keep and checked.functions and versions_of(checked).get("", 1) >= max(lowest, _KEPT_OPSET):
        checked, functions = keep_functions(checked)
    upgraded = upgrade(_inlined(checked), lowest)
    free_limits(upgraded, used)
    settled = replace_misplaced(upgraded, lambda model: ranks(infer(functions.inlined(model))))
    if removable:
        without_singularities(settled)
    graph = view(source, settled, large, functions, outer, captures)
    if not shapeless:
        declare_shapes(graph.outputs, graph.inferred_outputs)
    return graph


def _has_sequences(model: ModelProto, used: Set[str]) -> bool:
    if any(unwrapped(value.type).HasField("sequence_type") for value in model.graph.input):
        return True
    if used.isdisjoint(traits.SEQUENCES) and not model.functions:
        return False
    return any(node.op_type in traits.SEQUENCES and not node.domain for node in every_node(model))


def _check(model: ModelProto, used: Set[str], shapeless: bool) -> ModelProto:
    newest = onnx.defs.onnx_opset_version()
    for imported in model.opset_import:
        if imported.domain in ("", "ai.onnx") and imported.version > newest:
            raise InvalidModelError(
                f"The model's opset {imported.version} is newer than onnx {onnx.__version__} knows ({newest}). "
                "Upgrade onnx, or convert the model down with onnx.version_converter."
            )
        if imported.version < 1 and (not imported.domain or imported.domain.startswith("ai.onnx")):
            raise InvalidModelError(
                f"The model imports {imported.domain or 'ai.onnx'} in version {imported.version}. The first version is 1."
            )
    refuse_recursion(model.functions)
    _refuse_unknown_types(model)
    refuse_absurd_attributes(model)
    try:
        native.check_model(checkable(model) if shapeless else with_shapes(model))
    except native.ValidationError as error:
        again = " It is a gradient in dialect 'ort': to differentiate again, make it in dialect 'onnx'."
        hint = again if any(node.op_type in _POOL_GRADIENTS for node in model.graph.node) else ""
        message = " ".join(str(error).split())
        raise InvalidModelError(f"onnx.checker refuses the model: {message}{hint}") from error
    if not shapeless:  # a body was looked at with its model
        refuse_mismatches(model, used)
        _refuse_mismatches_of_signatures(model)
    return model


def declare_shapes(outputs: Mapping[str, ValueInfoProto], inferred: Mapping[str, ValueInfoProto]) -> None:
    """Give outputs that declare no shape the one that was inferred, in place.

    :raises InvalidModelError: onnx infers no shape of an output that declares none.
    """
    for name, value in outputs.items():
        if not lacks_shape(value):
            continue
        if lacks_shape(inferred[name]):
            raise InvalidModelError(
                f"Output {name!r} declares no shape, and onnx.shape_inference infers none. Declare its axes, by names where "
                "the sizes are not known."
            )
        value.type.CopyFrom(inferred[name].type)
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param.startswith(UNNAMED):
                dim.Clear()


def _refuse_unknown_types(model: ModelProto) -> None:
    """Refuse a value of a type that onnx does not know: its checker looks at tensors alone.

    :raises InvalidModelError: there is one.
    """
    declared = [value for graph in graphs(model.graph) for value in (*graph.input, *graph.output, *graph.value_info)]
    declared += [value for function in model.functions for value in function.value_info]
    for value in declared:
        kind = value.type.tensor_type.elem_type or element_type(value.type)
        if not kind and is_container(value.type) and held_by(value.type).WhichOneof("value") == "sparse_tensor_type":
            raise InvalidModelError(
                f"{value.name!r} is declared to hold sparse tensors. No operator makes or reads sparse values."
            )
        if kind and kind not in KNOWN:
            raise InvalidModelError(
                f"{value.name!r} is declared of the type {kind}, which onnx does not know. Export the model again, or upgrade "
                "onnx."
            )


def _refuse_mismatches_of_signatures(model: ModelProto) -> None:
    """Refuse a node that does not fit the signature of its operator, which onnx.checker does not know.

    :raises InvalidModelError: there is one.
    """
    if not SIGNATURES:
        return
    functions = {(f.domain, f.name) for f in model.functions}
    for node in every_node(model):
        signature = SIGNATURES.get((node.domain, node.op_type))
        if signature is None or (node.domain, node.op_type) in functions:
            continue
        if mismatch := signature.mismatch(node):
            name = node.name or next(filter(None, node.output), "")
            raise InvalidModelError(
                f"Node {name!r} is not a valid {node.domain}.{node.op_type}: {mismatch}. "
                f"The operator is {signature}, says {signature.where}."
            )


def _inlined(model: ModelProto) -> ModelProto:
    return inline_functions(model) if model.functions else model
