"""From a node to a callable: a kernel, or the function body of the operator."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import onnx
from onnx import helper

from refgrad.backends.numpy import registry
from refgrad.backends.numpy.memory import TensorType, inferred
from refgrad.backends.numpy.precision import Declared
from refgrad.backends.numpy.registry import Call, decode, default_attributes
from refgrad.errors import BackendError, choices
from refgrad.model import native
from refgrad.protos.domains import MICROSOFT, TRAINING
from refgrad.tables.randomness import ALWAYS, operator_of
from refgrad.tables.schemas import DECLARED

# The stubs of OpSchema lack its function bodies.
OpSchema: TypeAlias = Any

_REFUSED = {
    (MICROSOFT, "YieldOp"): (
        "it hands its inputs to the caller and waits for their gradients, so a run alone cannot compute its outputs. "
        "Ask for the gradient with cotangent='input' and feed the gradients."
    ),
    (TRAINING, "Gradient"): (
        "it stands for a derivative of the graph around it. Write that out with refgrad.expand_gradients."
    ),
}
_REASONS = {
    "it exchanges tensors with other processes": (
        *("Send", "Recv", "NcclAllReduce", "NcclAllGather", "NcclReduceScatter"),
        *("AdasumAllReduce", "MegatronF", "MegatronG"),
    ),
    "it waits for other threads": ("RecordEvent", "WaitEvent"),
    "it calls code outside the model": ("PythonOp", "PythonOpGrad"),
    "it writes records of TensorBoard": ("SummaryScalar", "SummaryHistogram", "SummaryMerge", "SummaryText"),
    "its packed form is defined by ONNX Runtime's CUDA kernels alone": (
        f"Gist{form}{way}"
        for form in ("Binarize", "Pack1", "Pack8", "Pack16", "PackMsfp15")
        for way in ("Encoder", "Decoder")
    ),
}
_REFUSED |= {
    (MICROSOFT, name): f"{reason}. Run the model on ONNX Runtime."
    for reason, names in _REASONS.items()
    for name in names
}
_REFUSED["org.pytorch.aten", "ATen"] = "it calls code outside the model. Run the model on ONNX Runtime."


_HELP = (
    "Run the model on another executor, give the operator a body as a model-local function, or register a kernel with "
    "refgrad.extend.kernel, in a module that is imported."
)


def _nothing(_: Sequence[Any]) -> list[TensorType]:
    return []


class Planned(Protocol):
    """A subgraph or the body of a function, ready to run: a kernel calls it. `captures` are the outer values that it reads."""

    captures: tuple[str, ...]

    def __call__(self, *inputs: Any, outer: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """Compute the outputs. Inputs left out at the end are None."""


@dataclass(frozen=True)
class Scope:
    """The context of binding a node: opset versions, the precision, and the values that the graph declares.

    `plan` plans a subgraph, `plan_function` the body of a function. `values` has the declared values, `limit` is the
    `max_memory` of the runs.
    """

    opsets: Mapping[str, int]
    precision: Declared
    plan: Callable[[onnx.GraphProto, Scope], Planned] = field(repr=False)
    plan_function: Callable[[onnx.FunctionProto, Scope], Planned] = field(repr=False)
    values: Mapping[str, onnx.ValueInfoProto] = field(default_factory=dict)
    limit: int | None = None


@dataclass(slots=True)
class Bound:
    """A node that is ready to run."""

    call: Call  # takes the inputs, and returns the output or a tuple of several
    captures: tuple[str, ...] = ()  # the outer values that its subgraphs read; `call` takes them as `_outer`
    fresh: bool = False  # the results never share memory with the inputs
    # The results share memory with nothing except the inputs. If neither `fresh` nor this is true, a subgraph may return its
    # constants, or the kernel of another package its tables.
    views_inputs: bool = False
    reuses: bool = False  # the results may take the memory of the inputs that `_free` marks
    pure: bool = True  # if its inputs are constants, the node may be computed once
    # Takes the inputs and returns the types of the outputs. It returns nothing for a node with subgraphs: the nodes within
    # predict their own outputs.
    predict: Callable[[Sequence[Any]], list[TensorType]] = _nothing

    def forget(self) -> None:
        """Release the node: `predict` will not be called again."""
        self.predict = _nothing


def bound_by(
    kernel: registry.Kernel | None, call: Call, has_inputs: bool, has_graphs: bool, captures: tuple[str, ...] = ()
) -> Bound:
    """`call` as a bound node of that kernel, None for the body of a function."""
    pure = has_inputs and not captures and not has_graphs
    if kernel is None:
        return Bound(call, captures, pure=pure)
    return Bound(call, captures, kernel.fresh, kernel.is_ours and not has_graphs, "_free" in kernel.keywords, pure)


def label(node: onnx.NodeProto) -> str:
    """Return what messages call a node: its name, or what it produces."""
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"node {node.name!r} ({operator})" if node.name else f"the {operator} node that makes {choices(node.output)}"


@cache
def _schema(op_type: str, opset: int, domain: str) -> OpSchema | None:
    """Return the schema of an operator at that version, None where onnx has none."""
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


def bind(node: onnx.NodeProto, scope: Scope) -> Bound:
    """Find what computes `node`.

    :raises BackendError: an operator that nobody knows, or attributes that it does not have.
    """
    domain = "" if node.domain == "ai.onnx" else node.domain
    if (domain, node.op_type) in _REFUSED:
        raise BackendError(f"{label(node)} cannot be run: {_REFUSED[domain, node.op_type]}")
    opset = scope.opsets.get(domain, 1 if domain == MICROSOFT else None)
    if opset is None:
        raise BackendError(f"{label(node)}: the model imports no opset of domain {domain!r}. Add it to opset_import.")
    schema = _schema(node.op_type, opset, domain)
    node = _seeded(scope.precision.node(node, schema))
    kernel = registry.find(domain, node.op_type, opset)
    if schema is not None:
        _check(node, schema, kernel)
    try:
        if kernel is not None:
            bound = _bind_kernel(kernel, node, opset, scope)
        elif schema is not None and (schema.has_function or schema.has_context_dependent_function):
            bound = bound_by(None, _bind_function(node, opset, schema, scope), bool(node.input), _has_graph(node))
        else:
            raise BackendError(
                f"{label(node)}: the NumPy interpreter has no kernel for {node.op_type!r} of domain {domain!r} at opset "
                f"{opset}. {_HELP}"
            )
    except (ValueError, TypeError) as error:
        raise BackendError(f"{label(node)} cannot be bound: {error}. Run the model on another executor.") from error
    bound.call = scope.precision.call(bound.call, node)
    if not _has_graph(node):
        if scope.limit is not None:  # a copy: a node of the model would keep the whole model in memory
            whole, node = node, onnx.NodeProto()
            node.CopyFrom(whole)
        bound.predict = partial(_predicted, node, schema, scope.opsets, kernel)
    return bound


def _check(node: onnx.NodeProto, schema: OpSchema, kernel: registry.Kernel | None) -> None:
    """Refuse a number of inputs or outputs, or a type of an attribute, that the operator does not allow."""
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    for place, (name, parameter) in enumerate(zip(node.input, schema.inputs, strict=False)):
        # Models leave out some inputs that a version requires; the kernel says which it can do without.
        if not name and parameter.option == single and (kernel is None or place < kernel.required):
            raise BackendError(f"{label(node)} leaves out its input {parameter.name!r}, which the operator requires.")
    for what, names, least, most in (
        ("inputs", node.input, schema.min_input, schema.max_input),
        ("outputs", node.output, schema.min_output, schema.max_output),
    ):
        if not least <= len(names) <= most:
            expected = (
                str(least) if least == most else f"{least} to {most}" if most < 2**31 - 1 else f"at least {least}"
            )
            raise BackendError(f"{label(node)} has {len(names)} {what} {list(names)}; the operator has {expected}.")
    given_names = {attribute.name for attribute in node.attribute}
    for name, declared in schema.attributes.items():
        if declared.required and name not in given_names:
            raise BackendError(f"{label(node)} leaves out its attribute {name!r}, which the operator requires.")
    for attribute in node.attribute:
        declared = schema.attributes.get(attribute.name)
        if declared is not None and attribute.type not in (0, declared.type.value):
            given = onnx.AttributeProto.AttributeType.Name(attribute.type)
            raise BackendError(
                f"{label(node)} has attribute {attribute.name!r} of type {given}, not {declared.type.name}."
            )


def _has_graph(node: onnx.NodeProto) -> bool:
    return any(attribute.type == onnx.AttributeProto.GRAPH for attribute in node.attribute)


def _predicted(
    node: onnx.NodeProto,
    schema: OpSchema | None,
    opsets: Mapping[str, int],
    kernel: registry.Kernel | None,
    inputs: Sequence[Any],
) -> list[TensorType]:
    """Predict the outputs. Without a schema each is as large as an input called `shape` says, or as the largest input."""
    types = inferred(node, schema, opsets, inputs)
    if types is not None:
        return types
    arrays = [x for x in inputs if isinstance(x, np.ndarray)]
    floats = [x for x in arrays if x.dtype.kind not in "biuOUS"] or arrays
    if not floats:
        return []
    model = max(floats, key=lambda x: x.nbytes)
    shape = model.shape
    place = None if kernel is None else kernel.shape_input
    if place is not None and place < len(inputs) and isinstance(inputs[place], np.ndarray):
        shape = tuple(inputs[place].tolist())
    return [(model.dtype, shape) for name in node.output if name]


def _seeded(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return `node` with a seed if it draws random numbers and has none. The seed depends on the name of its output only.

    So every run draws the same numbers, and so does every model that keeps the name, such as a gradient.
    """
    if (
        operator_of(node) not in ALWAYS
        or node.domain == MICROSOFT
        or any(attribute.name == "seed" for attribute in node.attribute)
    ):
        return node
    seeded = onnx.NodeProto()
    seeded.CopyFrom(node)
    number = zlib.crc32(node.output[0].encode()) % 2**24  # a whole number that float32 holds
    seeded.attribute.append(helper.make_attribute("seed", float(number)))
    return seeded


@cache
def _defaults(op_type: str, opset: int, domain: str) -> dict[str, Any]:
    schema = _schema(op_type, opset, domain)
    return {} if schema is None else {name: decode(value) for name, value in default_attributes(schema).items()}


def _bind_kernel(kernel: registry.Kernel, node: onnx.NodeProto, opset: int, scope: Scope) -> Bound:
    attributes = _defaults(node.op_type, opset, kernel.domain) | {"_wide": scope.precision.widens}
    declared = DECLARED.get((kernel.domain, node.op_type))  # what refgrad differentiates and onnx does not know
    if declared is not None:
        defaults = default_attributes(declared).items()
        attributes |= {name: decode(value) for name, value in defaults if kernel.requires(name)}
    captures: dict[str, None] = {}
    for attribute in node.attribute:
        value = decode(attribute)
        if attribute.type == onnx.AttributeProto.GRAPH:
            value = scope.plan(value, scope)
            captures |= dict.fromkeys(value.captures)
        attributes[attribute.name] = value
    return bound_by(
        kernel, kernel.bind(node, opset, attributes, scope.values), bool(node.input), _has_graph(node), tuple(captures)
    )


def _bind_function(node: onnx.NodeProto, opset: int, schema: OpSchema, scope: Scope) -> Call:
    if schema.has_function:
        body = schema.function_body if schema.since_version == opset else _body_at(schema, opset)
        return _call_function(body, node, schema, scope)
    # The body depends on the types of the inputs, which are known when the node runs.
    bodies: dict[tuple[Any, ...], Call] = {}

    def call(*inputs: Any) -> Any:
        key = tuple(getattr(x, "dtype", None) for x in inputs)
        if key not in bodies:
            body = native.function_of(schema, node, [_type_of(x) for x in inputs])
            bodies[key] = _call_function(body, node, schema, scope)
        return bodies[key](*inputs)

    return call


def _body_at(schema: OpSchema, opset: int) -> onnx.FunctionProto:
    """Return the body written for the newest opset up to `opset`."""
    versions = [v for v in schema.function_opset_versions if v <= opset]
    if not versions:
        raise BackendError(
            f"The NumPy interpreter has no kernel for {schema.name!r}, and the operator's function body needs opset "
            f"{min(schema.function_opset_versions)}: the model has {opset}. {_HELP}"
        )
    body = onnx.FunctionProto()
    body.ParseFromString(schema.get_function_with_opset_version(max(versions)))
    return body


def _type_of(value: Any) -> onnx.TypeProto:
    if value is None:
        return onnx.TypeProto()
    if isinstance(value, list):
        return helper.make_sequence_type_proto(_type_of(value[0]) if value else onnx.TypeProto())
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


def _call_function(function: onnx.FunctionProto, node: onnx.NodeProto, schema: OpSchema, scope: Scope) -> Planned:
    given = default_attributes(schema) | {attribute.name: attribute for attribute in node.attribute}
    body = onnx.FunctionProto()
    body.CopyFrom(function)
    for inner in body.node:
        _substitute(inner, given)
    opsets = dict(scope.opsets) | {o.domain: o.version for o in body.opset_import}
    return scope.plan_function(body, replace(scope, opsets=opsets, values={}))


def _substitute(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto]) -> None:
    """Put the values of the call into the attributes of a body's node, subgraphs included."""
    kept = []
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name not in given:
                continue
            value = onnx.AttributeProto()
            value.CopyFrom(given[attribute.ref_attr_name])
            value.name = attribute.name
            kept.append(value)
            continue
        if attribute.type == onnx.AttributeProto.GRAPH:
            for inner in attribute.g.node:
                _substitute(inner, given)
        kept.append(attribute)
    copies = [onnx.AttributeProto() for _ in kept]
    for copy, attribute in zip(copies, kept, strict=True):
        copy.CopyFrom(attribute)
    del node.attribute[:]
    node.attribute.extend(copies)
