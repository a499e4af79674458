"""Models of older opsets: `onnx.version_converter` converts all nodes except those that it would get wrong.

Those are rewritten here, in operators of the target opset. On the way they are in a domain that the converter leaves alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from refgrad.errors import InvalidModelError
from refgrad.model import native
from refgrad.model.external import array_of
from refgrad.model.inlining.inline import inline_functions
from refgrad.protos.traverse import checkable, forget_domain, graphs, import_domain, op_types, versions_of

_REWRITTEN = "refgrad.rewritten"


@dataclass(frozen=True)
class Fix:
    """The rewriting of an operator of the opsets from `since` to `until`, and why the converter does not get it."""

    op_type: str
    since: int
    until: int
    why: str
    rewrite: Callable[[_Node], None]


FIXES: list[Fix] = []
_ROW = "the axes from `axis` on were one row"
_ASYMMETRIC = "the coordinates were those that Resize calls asymmetric, and the converter takes another kind"


def _fix(
    op_type: str, since: int, until: int, why: str
) -> Callable[[Callable[[_Node], None]], Callable[[_Node], None]]:
    def register(rewrite: Callable[[_Node], None]) -> Callable[[_Node], None]:
        FIXES.append(Fix(op_type, since, until, why, rewrite))
        return rewrite

    return register


class _Node:
    """A node to rewrite: its inputs, outputs and attributes, the model around it, and the nodes that replace it.

    Where a rewriting adds no node, the converter gets the node.
    """

    def __init__(self, proto: NodeProto, opset: int, model: _Model) -> None:
        self.proto, self.opset, self.model = proto, opset, model
        self.attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute}
        self.made: list[NodeProto] = []

    def input(self, position: int) -> str:
        """The input at `position`, or ""."""
        return self.proto.input[position] if position < len(self.proto.input) else ""

    def output(self, position: int) -> str:
        """The output at `position`, or ""."""
        return self.proto.output[position] if position < len(self.proto.output) else ""

    def __call__(self, op_type: str, *inputs: str, to: str | list[str] | None = None, **attributes: Any) -> str:
        """Add a node; the name of its first output."""
        outputs = [to or self.model.fresh(self.output(0))] if not isinstance(to, list) else to
        node = helper.make_node(op_type, inputs, outputs, domain=_REWRITTEN, **attributes)
        node.name = f"{self.proto.name or self.output(0)}_{len(self.made)}"
        self.made.append(node)
        return outputs[0]

    def constant(self, value: Any, like: str = "") -> str:
        """`value` as a constant: an array, or a number of the type of `like`."""
        if not like:
            return self("Constant", value=numpy_helper.from_array(np.asarray(value)))
        kind = self.model.types.get(like)
        if not kind:
            return self("CastLike", self.constant(np.float32(value)), like)
        return self.constant(np.asarray(value, helper.tensor_dtype_to_np_dtype(kind)))

    def refuse(self, why: str) -> InvalidModelError:
        """The error for a node that cannot be converted."""
        return InvalidModelError(
            f"Node {self.proto.name or self.output(0)!r} ({self.proto.op_type} of opset {self.opset}) cannot be converted "
            f"to a newer opset: {why}."
        )


class _Model:
    """The facts of the whole model that rewritings use: taken names, names that are read, constants, element types, ranks."""

    def __init__(self, model: ModelProto) -> None:
        self.taken: set[str] = set()
        self.read: set[str] = set()
        self.constants: dict[str, np.ndarray] = {}
        self.types: dict[str, int] = {}
        self.ranks: dict[str, int] = {}
        for graph in graphs(native.infer_shapes(model).graph):
            for value in (*graph.input, *graph.value_info, *graph.output):
                tensor_type = value.type.tensor_type
                self.types[value.name] = tensor_type.elem_type
                if tensor_type.HasField("shape"):
                    self.ranks[value.name] = len(tensor_type.shape.dim)
            self.read.update(value.name for value in graph.output)
            for tensor in graph.initializer:
                self.constants[tensor.name] = array_of(tensor)
                self.types[tensor.name], self.ranks[tensor.name] = tensor.data_type, len(tensor.dims)
            for node in graph.node:
                self.read.update(node.input)
                self.taken.update((*node.input, *node.output))
                if node.op_type == "Constant" and node.attribute[0].name == "value":
                    self.constants[node.output[0]] = array_of(node.attribute[0].t)
        self.taken.update(self.types)

    def fresh(self, name: str) -> str:
        """A name that is free in the model; it is taken from now on."""
        k = 0
        while f"{name}_{k}" in self.taken:
            k += 1
        self.taken.add(f"{name}_{k}")
        return f"{name}_{k}"


def upgrade(model: ModelProto, target: int) -> ModelProto:
    """The model in opset `target`, or the model itself where its opset is that or a newer one.

    :raises InvalidModelError: a node that no newer operator can stand for.
    """
    opset = versions_of(model).get("", target)
    if opset >= target:
        return model
    if any(graph.sparse_initializer for graph in graphs(model.graph)):
        raise InvalidModelError(
            f"The model has opset {opset} and sparse initializers, which onnx cannot convert to a newer one. Make them dense, "
            f"or export the model anew with opset {target} or later."
        )
    if model.functions:  # they stay in their opset, and are then no functions of this model
        whole = ModelProto()
        whole.CopyFrom(model)
        model = inline_functions(whole)
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    fixes = {fix.op_type: fix for fix in reversed(FIXES) if fix.since <= opset <= fix.until}
    if any(node.op_type in fixes for graph in graphs(model.graph) for node in graph.node):
        known = _Model(model)
        for graph in graphs(rewritten.graph):
            _rewrite(graph, fixes, opset, known)
        import_domain(rewritten, _REWRITTEN)
    try:
        converted = native.convert_version(rewritten, target)
    except native.ConvertError as error:
        raise InvalidModelError(
            f"The model has opset {opset}; gradients are emitted from opset {target} on, and onnx cannot convert it: "
            f"{_culprit(rewritten, target) or error}. Export it anew with opset {target} or later."
        ) from error
    forget_domain(converted, _REWRITTEN)
    for graph in graphs(converted.graph):
        del graph.value_info[:]  # the converter gives values that it adds the shape of a scalar
        for node in graph.node:
            if node.domain == _REWRITTEN:
                node.domain = ""
    converted.graph.value_info.extend(model.graph.value_info)
    marks = {tensor.name: tensor.metadata_props for tensor in model.graph.initializer}
    for tensor in converted.graph.initializer:  # the converter forgets what they say of a tensor
        if not tensor.metadata_props:
            tensor.metadata_props.extend(marks.get(tensor.name, ()))
    for value, declared in zip(converted.graph.output, model.graph.output, strict=True):
        value.CopyFrom(declared)  # the converter names dimensions that nobody named
    try:
        native.check_model(checkable(converted))
    except native.ValidationError as error:
        raise InvalidModelError(
            f"The model has opset {opset}, and what onnx converts it to is no valid model: {error}. "
            f"Export it anew with opset {target} or later."
        ) from error
    return converted


def spell_out_deprecated(model: ModelProto, used: Set[str]) -> None:
    """Replace the nodes that onnx's checker refuses as deprecated by nodes that compute the same; in place.

    :param used: the operators of the model.
    """
    _spell_out(model, (_DEPRECATED,), used)


def spell_out_misplaced(model: ModelProto) -> ModelProto:
    """The model, or a copy where the operators that ONNX Runtime alone has in the domain of ai.onnx are written in others.

    It knows them up to opset 9.

    :raises InvalidModelError: one lacks an attribute that it has to have.
    """
    opset = versions_of(model).get("", 0)
    if not any(fix.since <= opset <= fix.until for fix in _MISPLACED):
        return model
    used, _ = op_types(model.graph)
    if all(fix.op_type not in used or opset > fix.until for fix in _MISPLACED):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    _spell_out(copy, _MISPLACED, used)
    return copy


def _spell_out(model: ModelProto, fixes: Sequence[Fix], used: Set[str]) -> None:
    opset = versions_of(model).get("", 0)
    chosen = {fix.op_type: fix for fix in fixes if fix.op_type in used and fix.since <= opset <= fix.until}
    if not chosen:
        return
    known = _Model(model)
    for graph in graphs(model.graph):
        if any(node.op_type in chosen and not node.domain for node in graph.node):
            _rewrite(graph, chosen, opset, known)
            for node in graph.node:
                if node.domain == _REWRITTEN:
                    node.domain = ""


def _rewrite(graph: GraphProto, fixes: dict[str, Fix], opset: int, known: _Model) -> None:
    nodes: list[NodeProto] = []
    for proto in graph.node:
        fix = None if proto.domain else fixes.get(proto.op_type)
        made: list[NodeProto] = []
        if fix is not None:
            node = _Node(proto, opset, known)
            fix.rewrite(node)
            made = node.made
        nodes += made or [proto]
    copies = [NodeProto() for _ in nodes]
    for copy, proto in zip(copies, nodes, strict=True):
        copy.CopyFrom(proto)
    del graph.node[:]
    graph.node.extend(copies)


def _culprit(model: ModelProto, target: int) -> str:
    """The first node that the converter refuses by itself."""
    for graph in graphs(model.graph):
        for node in graph.node:
            if node.domain:
                continue
            alone = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
            alone.graph.name = "node"
            alone.graph.node.append(node)
            try:
                native.convert_version(alone, target)
            except native.ConvertError as error:
                name = node.name or next(filter(None, node.output), "")
                return f"node {name!r} ({node.op_type}) stands in the way ({error})"
    return ""


@_fix("Softmax", 1, 12, _ROW)
@_fix("LogSoftmax", 1, 12, _ROW)
@_fix("Hardmax", 1, 12, f"{_ROW}, which the converter forgets")
def _over_rows(node: _Node) -> None:
    x, axis, rank = node.input(0), node.attributes.get("axis", 1), node.model.ranks.get(node.input(0))
    if rank is not None and axis in (-1, rank - 1):
        node(node.proto.op_type, x, to=node.output(0), axis=-1)
    else:
        rows = node(node.proto.op_type, node("Flatten", x, axis=axis), axis=-1)
        node("Reshape", rows, node("Shape", x), to=node.output(0), allowzero=1)


@_fix(
    "BatchNormalization",
    7,
    13,
    "`spatial=0`, a mean and a variance per element, and training, five outputs, are beyond the converter",
)
def _batch_normalization(node: _Node) -> None:
    attributes = {name: node.attributes[name] for name in ("epsilon", "momentum") if name in node.attributes}
    by_element = node.attributes.get("spatial", 1) == 0
    if any(node.output(k) in node.model.read for k in (3, 4) if node.output(k)):
        raise node.refuse("saved_mean and saved_var, which newer ones do not have, are read")
    training = any(node.output(k) for k in (1, 2, 3, 4))
    if by_element and training:
        raise node.refuse("no newer one trains a mean and a variance per element (spatial=0)")
    if by_element:
        x, *parameters = node.proto.input
        everything = node.constant(np.array([-1]))
        read = [node("Flatten", x, axis=1), *(node("Reshape", p, everything) for p in parameters)]
        node(
            "Reshape", node("BatchNormalization", *read, **attributes), node("Shape", x), to=node.output(0), allowzero=1
        )
    elif training:
        outputs = [node.output(k) or node.model.fresh(node.output(0)) for k in range(3)]
        node("BatchNormalization", *node.proto.input, to=outputs, training_mode=1, **attributes)


@_fix("Dropout", 7, 9, "its mask had the type of the data, 1 where nothing is dropped")
def _dropout(node: _Node) -> None:
    if node.output(1):
        mask = node.model.fresh(node.output(1))
        node("Dropout", node.input(0), to=[node.output(0), mask])
        node("CastLike", mask, node.input(0), to=node.output(1))


@_fix("Clip", 6, 10, "the bounds become constants of float32, whatever the type of the data")
def _clip(node: _Node) -> None:
    x = node.input(0)
    if node.model.types.get(x) != TensorProto.FLOAT:
        # Both, also where one is left out: ONNX Runtime 1.19 takes 0 for a bound of float16 that is not there.
        bounds = (node.constant(node.attributes.get(k, end), x) for k, end in (("min", -math.inf), ("max", math.inf)))
        node("Clip", x, *bounds, to=node.output(0))


@_fix("Pad", 2, 10, "the padding becomes a constant of float32, whatever the type of the data")
def _pad(node: _Node) -> None:
    x = node.input(0)
    if node.model.types.get(x) != TensorProto.FLOAT:
        pads = node.constant(np.array(node.attributes["pads"], np.int64))
        value = node.constant(node.attributes.get("value", 0.0), x)
        node("Pad", x, pads, value, to=node.output(0), mode=node.attributes.get("mode", b"constant"))


@_fix("Upsample", 7, 9, _ASYMMETRIC)
def _upsample(node: _Node) -> None:
    given = node.attributes.get("scales")
    scales = node.input(1) if given is None else node.constant(np.array(given, np.float32))
    _resize(node, node.input(0), scales, "floor", node.output(0))


@_fix("Resize", 10, 10, f"{_ASYMMETRIC}; the nearest element was the next one in shrinking, the last one in enlarging")
def _resize_10(node: _Node) -> None:
    x, scales = node.input(0), node.input(1)
    known = node.model.constants.get(scales)
    enlarges, shrinks = (True, True) if known is None else (bool((known >= 1).all()), bool((known <= 1).all()))
    if node.attributes.get("mode", b"nearest") != b"nearest" or (enlarges and known is not None):
        _resize(node, x, scales, "floor", node.output(0))
    elif shrinks and known is not None:
        _resize(node, x, scales, "ceil", node.output(0))
    else:
        one = node.constant(np.float32(1))
        small = _resize(node, x, node("Min", scales, one), "ceil", None)
        _resize(node, small, node("Max", scales, one), "floor", node.output(0))


def _resize(node: _Node, x: str, scales: str, nearest: str, to: str | None) -> str:
    mode = node.attributes.get("mode", b"nearest")
    asymmetric: dict[str, Any] = {"coordinate_transformation_mode": "asymmetric"}
    if mode == b"nearest":
        asymmetric["nearest_mode"] = nearest
    return node("Resize", x, "", scales, to=to, mode=mode, **asymmetric)


@_fix(
    "Scan", 8, 8, "it scanned every element of a batch by itself, as a Scan over the batch with a Scan in its body does"
)
def _scan(node: _Node) -> None:
    if node.input(0):
        raise node.refuse("it has sequence_lens, which no newer one has; export the model anew with opset 9 or later")
    body, count = node.attributes["body"], node.attributes["num_scan_inputs"]
    read, states = list(node.proto.input)[1:], len(node.proto.input) - 1 - count
    within = [node.model.fresh(name) for name in read]
    made = [node.model.fresh(value.name) for value in body.output]
    one = GraphProto(name=f"{body.name}_of_one")
    for name, outer, declared in zip(within, read, body.input, strict=True):
        kind = node.model.types.get(outer) or declared.type.tensor_type.elem_type
        one.input.append(helper.make_tensor_value_info(name, kind, None))
    for k, (name, declared) in enumerate(zip(made, body.output, strict=True)):
        value = one.output.add(name=name, type=declared.type)
        if k >= states and value.type.tensor_type.HasField("shape"):
            sizes = [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim]
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(name, kind, [None, *sizes]))
    directions = {"scan_input_directions": node.attributes["directions"]} if "directions" in node.attributes else {}
    inner = helper.make_node("Scan", within, made, domain=_REWRITTEN, body=body, num_scan_inputs=count, **directions)
    inner.name = node.model.fresh(node.proto.name or node.output(0))
    one.node.append(inner)
    outputs = [node.output(k) or node.model.fresh(name) for k, name in enumerate(made)]
    node("Scan", *read, to=outputs, body=one, num_scan_inputs=len(read))


def _group_normalization(node: _Node) -> None:
    x, attributes = node.input(0), {name: value for name, value in node.attributes.items() if name == "epsilon"}
    groups = node("Reshape", x, node.constant(np.array([0, node.attributes["num_groups"], -1])))
    y = node("InstanceNormalization", groups, node.input(1), node.input(2), **attributes)
    node("Reshape", y, node("Shape", x), to=node.output(0))


_DEPRECATED = Fix(
    "GroupNormalization", 18, 20, "its scale and bias had an element per group, not per channel", _group_normalization
)


def _number(node: _Node, name: str, default: float | None = None) -> str:
    """An attribute as a constant of the type of the input, of float32 where that is not known."""
    value = node.attributes.get(name, default)
    if value is None:
        raise node.refuse(f"it lacks the attribute {name}")
    kind = node.model.types.get(node.input(0)) or TensorProto.FLOAT
    return node.constant(np.asarray(value, helper.tensor_dtype_to_np_dtype(kind)))


def _affine(node: _Node) -> None:
    scaled = node("Mul", node.input(0), _number(node, "alpha", 1.0))
    node("Add", scaled, _number(node, "beta", 0.0), to=node.output(0))


def _scale(node: _Node) -> None:
    node("Mul", node.input(0), _number(node, "scale", 1.0), to=node.output(0))


def _parametric_softplus(node: _Node) -> None:
    y = node("Softplus", node("Mul", node.input(0), _number(node, "beta")))
    node("Mul", y, _number(node, "alpha"), to=node.output(0))


def _scaled_tanh(node: _Node) -> None:
    y = node("Tanh", node("Mul", node.input(0), _number(node, "beta")))
    node("Mul", y, _number(node, "alpha"), to=node.output(0))


def _thresholded_relu(node: _Node) -> None:
    x = node.input(0)
    above = node("Greater", x, _number(node, "alpha", 1.0))
    kept = node("Cast", above)
    node.made[-1].attribute.append(helper.make_attribute("to", node.model.types.get(x) or TensorProto.FLOAT))
    node("Mul", x, kept, to=node.output(0))


def _image_scaler(node: _Node) -> None:
    bias = node.attributes.get("bias")
    if not bias:
        raise node.refuse("it lacks the attribute bias")
    node.attributes["bias"] = np.reshape(bias, (-1, 1, 1))
    scaled = node("Mul", node.input(0), _number(node, "scale", 1.0))
    node("Add", scaled, _number(node, "bias"), to=node.output(0))


def _crop(node: _Node) -> None:
    border, size = node.attributes.get("border", ()), node.attributes.get("scale", ())
    if len(border) != 4 or len(size) not in (0, 2) or min(border) < 0:
        raise node.refuse("its border has four numbers, from left to bottom, and its scale two or none")
    left, top, right, bottom = border
    ends = [top + size[0], left + size[1]] if size else [-bottom or _LAST, -right or _LAST]
    node("Slice", node.input(0), axes=[2, 3], starts=[top, left], ends=ends, to=node.output(0))


def _mean_variance_normalization(node: _Node) -> None:
    axes = [0, 1, 2, 3] if node.attributes.get("across_channels", 0) else [0, 2, 3]
    centred = node("Sub", node.input(0), node("ReduceMean", node.input(0), axes=axes))
    if not node.attributes.get("normalize_variance", 1):
        node("Identity", centred, to=node.output(0))
        return
    deviation = node("Sqrt", node("ReduceMean", node("Mul", centred, centred), axes=axes))
    node.attributes["epsilon"] = 1e-9  # the epsilon of the operator of opset 9
    node("Div", centred, node("Add", deviation, _number(node, "epsilon")), to=node.output(0))


_LAST = 2**31 - 1
_OWN = "ONNX Runtime has it in the domain of ai.onnx"
_MISPLACED = (
    Fix("Affine", 7, 9, _OWN, _affine),
    Fix("Crop", 7, 9, _OWN, _crop),
    Fix("ImageScaler", 7, 9, _OWN, _image_scaler),
    Fix("MeanVarianceNormalization", 7, 8, _OWN, _mean_variance_normalization),
    Fix("ParametricSoftplus", 7, 9, _OWN, _parametric_softplus),
    Fix("Scale", 7, 9, _OWN, _scale),
    Fix("ScaledTanh", 7, 9, _OWN, _scaled_tanh),
    Fix("ThresholdedRelu", 7, 9, _OWN, _thresholded_relu),
)
