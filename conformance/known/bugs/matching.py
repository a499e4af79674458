"""The known bugs that a fault in a node may be: the operator, the attributes and the inputs are the same."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, helper

from refgrad.conformance.known.bugs import known_bugs
from refgrad.conformance.known.bugs.bug import ORT, REFERENCE, RELEASES, TRAINING, KnownBug
from refgrad.conformance.known.bugs.builders.bug import BuilderBug
from refgrad.conformance.problems.systems import executors
from refgrad.errors import RefgradError
from refgrad.model import native
from refgrad.protos.traverse import versions_of
from refgrad.protos.types import Shape, type_of
from refgrad.tables.schemas import find_schema

_SIZES = ("hidden_size", "kernel_shape", "kv_num_heads", "num_heads", "num_outputs", "q_num_heads")  # of no consequence
_BIASES = ("B", "bias")  # inputs that a node may have in addition
_NEUTRAL = {"dilations": 1, "pads": 0, "strides": 1}  # the elements of lists that a schema has no default for
_PLAIN = (AttributeProto.FLOAT, AttributeProto.INT, AttributeProto.STRING, AttributeProto.FLOATS, AttributeProto.INTS,
          AttributeProto.STRINGS)  # fmt: skip


def bugs_of(executor: str, node: NodeProto, model: ModelProto, is_error: bool) -> list[KnownBug]:
    """The known bugs that the fault of an executor in a node of `model` may be.

    :param executor: a name of the suite, such as "ort-cpu"; others have none.
    :param is_error: it fails on the node, or its process ends; else its result is wrong.
    """
    system, release = _release(executor)
    if release not in RELEASES.get(system, ()):
        return []
    of_kind = (b for b in known_bugs() if (b.system, b.operator, b.is_error) == (system, node.op_type, is_error))
    found = (bug for bug in of_kind if bug.is_in(release) and not bug.optimized)
    return [bug for bug in found if is_about(bug, node, model) and _is_fed_alike(bug, node, model)]


def _release(executor: str) -> tuple[str, str]:
    """The system of `RELEASES` that an executor belongs to, and its version."""
    if executor != REFERENCE and not executor.startswith("ort-"):
        return "", ""
    distribution, _, release = executors.version(executor).partition(" ")
    return REFERENCE if executor == REFERENCE else TRAINING if "training" in distribution else ORT, release


def is_about(bug: KnownBug | BuilderBug, node: NodeProto, model: ModelProto) -> bool:
    """True if a known bug is about a node of `model`: it is shown with the same attributes and inputs."""
    shown = _shown(bug)
    schema, of_bug = _schema(node, model), _schema(shown, bug.model)
    given, needed = ({k for k, name in enumerate(one.input) if name} for one in (node, shown))
    biases = {k for k, one in enumerate(schema.inputs if schema else ()) if one.name in _BIASES}
    if _domain(shown) != _domain(node) or not needed <= given <= needed | biases:
        return False
    return _attributes(shown, of_bug) == _attributes(node, schema)


def _is_fed_alike(bug: KnownBug, node: NodeProto, model: ModelProto) -> bool:
    """True if the inputs of a node have the types that they have in a known bug, and are as empty as there.

    An error may also come with the number of axes. Types and shapes that are not known may be any.
    """
    ours, theirs = _tensors(model), _tensors(bug.model)
    for mine, its in zip(node.input, _shown(bug).input, strict=False):
        if mine not in ours or its not in theirs:
            continue
        (kind, sizes), (other_kind, other_sizes) = ours[mine], theirs[its]
        if its in bug.feeds:
            other_sizes = np.shape(bug.feeds[its])
        if kind and other_kind and kind != other_kind:
            return False
        if sizes is None or other_sizes is None:
            continue
        if (0 in sizes) != (0 in other_sizes) or (bug.is_error and len(sizes) != len(other_sizes)):
            return False
    return True


def _shown(bug: KnownBug | BuilderBug) -> NodeProto:
    return next(node for node in bug.model.graph.node if node.op_type == bug.operator)


def _domain(node: NodeProto) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _schema(node: NodeProto, model: ModelProto) -> Any:
    return find_schema(node.op_type, _domain(node), versions_of(model).get(_domain(node)))


def _attributes(node: NodeProto, schema: Any) -> dict[str, Any]:
    """The attributes that are not the default, except for sizes. Of a list, the different elements: it may have more axes."""
    declared = schema.attributes if schema else {}
    found: dict[str, Any] = {}
    for attribute in node.attribute:
        if attribute.name in _SIZES or attribute.type not in _PLAIN:
            continue
        value = helper.get_attribute_value(attribute)
        default = declared[attribute.name].default_value if attribute.name in declared else AttributeProto()
        if default.type and value == helper.get_attribute_value(default):
            continue
        if not isinstance(value, float | int | bytes):
            if set(value) == {_NEUTRAL.get(attribute.name)}:
                continue
            value = sorted(set(map(repr, value)))
        found[attribute.name] = value > 1 if attribute.name == "group" else value
    return found


def _tensors(model: ModelProto) -> dict[str, tuple[int, Shape | None]]:
    """The element types and the shapes of the tensors of a model, as far as onnx infers them."""
    with suppress(RefgradError):  # what is declared is enough
        model = native.infer_shapes(model)
    graph = model.graph
    declared = {value.name: type_of(value) for value in (*graph.input, *graph.value_info, *graph.output)}
    return declared | {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer}
