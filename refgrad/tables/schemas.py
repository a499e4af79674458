"""Operators that onnx has no schema for: those of ONNX Runtime, each with a schema and a function body of ours.

`@operator` turns a Python function into both. Its parameters are the inputs (None by default: optional; starred:
variadic) and, keyword-only, the attributes; what it emits through `op` is the body. Nothing is registered with onnx: what
its checker says of a model does not change. A body gives the types and shapes of the operator's results, and its
derivative where there is no rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.defs import OpSchema

from refgrad.errors import InvalidModelError
from refgrad.protos.inlining import INLINED, inline_functions
from refgrad.protos.reading import CONSTANT
from refgrad.protos.walk import attribute_value, graphs, import_domain, versions_of

MICROSOFT = "com.microsoft"
LOWEST = 16  # the opset of ai.onnx where a model imports none

_FLOATS = ("tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)")
_OTHERS = ("tensor(int32)", "tensor(int64)", "tensor(bool)", "tensor(uint8)", "tensor(int8)")

Type = tuple[int, int | None]  # an element type and a rank
Argument = str | float | Sequence[int] | None


class UnsupportedFormError(Exception):
    """A form of an operator that its body does not cover; the message says which, and what to do."""


@dataclass(frozen=True)
class Operator:
    """An operator of ours: its schema, and the function that emits its body."""

    schema: OpSchema
    function: Callable[..., Any]
    parameters: tuple[str, ...]  # of the inputs
    variadic: bool
    defaults: Mapping[str, Any]  # of the attributes

    @property
    def meaning(self) -> str:
        """What the body computes: the first line of its docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def rounded(self) -> dict[str, Any]:
        """The defaults as a node would have them: floats are of 32 bits."""
        return {n: float(np.float32(v)) if isinstance(v, float) else v for n, v in self.defaults.items()}

    def misfit(self, node: NodeProto) -> str:
        """Why `node` is none of this operator, "" where it is one: onnx's checker knows none of ONNX Runtime."""
        given = {a.name for a in node.attribute}
        required = {n for n, default in self.defaults.items() if default is inspect.Parameter.empty}
        attributes = f"the attributes are {', '.join(self.defaults) or 'none'}"
        if unknown := sorted(given - self.defaults.keys()):
            return f"its attribute {unknown[0]} is not known; {attributes}"
        if missing := sorted(required - given):
            return f"it lacks the attribute {missing[0]}; {attributes}"
        if onnx.defs.has(node.op_type, node.domain):
            return ""
        if not self.schema.min_input <= len(node.input) <= self.schema.max_input:
            return f"the node has {len(node.input)} inputs; the inputs are {', '.join(self.parameters)}"
        if not self.schema.min_output <= len(node.output) <= self.schema.max_output:
            outputs = ", ".join(p.name for p in self.schema.outputs)
            return f"the node has {len(node.output)} outputs; the outputs are {outputs}"
        return ""


OPERATORS: dict[tuple[str, str], Operator] = {}


def operator(
    op_type: str, *outputs: str, others: Iterable[str] = (), domain: str = MICROSOFT
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define an operator by the decorated function.

    :param outputs: their names; a question mark behind one makes it optional.
    :param others: the inputs and outputs that are no floats.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        attributes = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        inputs = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        options = OpSchema.FormalParameterOption
        other = frozenset(others)

        def formal(name: str, option: Any) -> OpSchema.FormalParameter:
            return OpSchema.FormalParameter(name, "T1" if name in other else "T", param_option=option)

        def option_of(p: inspect.Parameter) -> Any:
            if p.kind is p.VAR_POSITIONAL:
                return options.Variadic
            return options.Single if p.default is p.empty else options.Optional

        schema = OpSchema(
            op_type,
            domain,
            1,
            inspect.getdoc(function) or "",
            inputs=[formal(p.name, option_of(p)) for p in inputs],
            outputs=[formal(o.rstrip("?"), options.Optional if o[-1] == "?" else options.Single) for o in outputs],
            type_constraints=[("T", _FLOATS, "floats"), ("T1", _OTHERS, "no floats")],
            attributes=[_attribute(p) for p in attributes],
        )
        variadic = any(p.kind is p.VAR_POSITIONAL for p in inputs)
        OPERATORS[domain, op_type] = Operator(
            schema, function, tuple(p.name for p in inputs), variadic, {p.name: p.default for p in attributes}
        )
        return function

    return register


_KINDS = {
    "int": OpSchema.AttrType.INT,
    "float": OpSchema.AttrType.FLOAT,
    "str": OpSchema.AttrType.STRING,
    "Ints": OpSchema.AttrType.INTS,
    "Floats": OpSchema.AttrType.FLOATS,
    "Strings": OpSchema.AttrType.STRINGS,
}


def _attribute(p: inspect.Parameter) -> OpSchema.Attribute:
    """The kind of an attribute is its annotation's; one without a default is required."""
    if p.default is not p.empty and p.default is not None:
        return OpSchema.Attribute(p.name, helper.make_attribute(p.name, p.default))
    kind = _KINDS[str(p.annotation).removesuffix(" | None")]
    return OpSchema.Attribute(p.name, kind, required=p.default is p.empty)


def find_schema(op_type: str, domain: str, opset: int | None = None) -> Any:
    """The schema of an operator in that version of its domain (None: the newest), onnx's or ours; None without one."""
    if onnx.defs.has(op_type, domain):
        return onnx.defs.get_schema(op_type, domain) if opset is None else onnx.defs.get_schema(op_type, opset, domain)
    known = OPERATORS.get((domain, op_type))
    return None if known is None else known.schema


def schemas() -> list[Any]:
    """Every operator that has a schema, onnx's and ours."""
    return [*onnx.defs.get_all_schemas(), *(known.schema for known in OPERATORS.values())]


def make_function(
    node: NodeProto, opsets: Mapping[str, int], types: Mapping[str, Type], name: str
) -> FunctionProto | None:
    """The body of `node` as a function called `name`; None for an operator that is not ours.

    :param opsets: the versions of the domains that the model imports.
    :param types: what is known of the node's inputs.
    :raises UnsupportedFormError: the body does not cover the attributes or the inputs of `node`.
    """
    known = OPERATORS.get((node.domain, node.op_type))
    if known is None:
        return None
    given = {a.name: attribute_value(a) for a in node.attribute}
    if misfit := known.misfit(node):
        raise UnsupportedFormError(misfit)
    body = Body(opsets.get("", LOWEST))
    count = len(node.input)
    formal = [f"in_{k}" for k in range(count)]
    actual: list[Any] = []
    for called, value in zip(formal, node.input, strict=True):
        actual.append(called if value else None)
        if value in types:
            body.types[called] = types[value]
    if not known.variadic:
        actual += [None] * (len(known.parameters) - count)
    results = known.function(body, *actual, **{**known.rounded, **given})
    results = results if isinstance(results, tuple) else (results,)
    outputs = []
    for k, value in enumerate(node.output):
        outputs.append(f"out_{k}")
        if not value:
            continue
        if k >= len(results) or results[k] is None:
            raise UnsupportedFormError(f"its output {known.schema.outputs[k].name} is not computed; leave it out")
        body.nodes.append(helper.make_node("Identity", [results[k]], [f"out_{k}"]))
    _name_first(body, outputs, results[0])
    versions = {"": body.opset, MICROSOFT: 1, node.domain: opsets.get(node.domain, 1)}
    imports = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    return helper.make_function(INLINED, name, formal, outputs, body.nodes, imports)


def _name_first(body: Body, outputs: Sequence[str], result: str | None) -> None:
    """Give the first output, which has the type of the first input, its name without an Identity."""
    last = next((k for k, inner in enumerate(body.nodes) if inner.output[0] == outputs[0]), None)
    if last is None or all(result not in inner.output for inner in body.nodes):
        return
    del body.nodes[last]
    for inner in body.nodes:
        inner.input[:] = [outputs[0] if name == result else name for name in inner.input]
        inner.output[:] = [outputs[0] if name == result else name for name in inner.output]


def call_functions(model: ModelProto, types: Mapping[str, Type]) -> int:
    """Turn the nodes of operators of ours into calls of their bodies, which `model` gets; how many are left.

    A node whose body does not cover its form, or not before more is known of its inputs, stays as it is.
    """
    opsets = versions_of(model)
    made = left = 0
    for node in model.graph.node:
        if (node.domain, node.op_type) in OPERATORS:
            try:
                function = make_function(node, opsets, types, f"{node.op_type}_{made}")
            except UnsupportedFormError:
                left += 1
                continue
            assert function is not None
            call(model, node, function)
            made += 1
    return left


def call(model: ModelProto, node: NodeProto, function: FunctionProto) -> None:
    """Make `node` a call of `function`, whose body has the node's attributes in it, and give `model` that function."""
    model.functions.append(function)
    import_domain(model, function.domain)
    node.domain, node.op_type = function.domain, function.name
    del node.attribute[:]


# ONNX Runtime has two of its operators in the domain of ai.onnx, where onnx does not know them, or not in that opset.
_IN_ONNX = {"SimplifiedLayerNormalization": None, "LayerNormalization": 17}
# What ONNX Runtime's fusion of MatMul and Add calls the constants that it makes. It does so again, without looking whether
# the names are taken, when it optimizes the gradient of a model that it has optimized before.
_CLASHING = ("gemm_input_shape", "gemm_output_shape")
_NEEDS_17 = ("SkipLayerNormalization", "EmbedLayerNormalization")  # their bodies have LayerNormalization


# What its optimizer makes of LSTM and GRU before it differentiates them, and how many results those have.
_TRAINING_FORMS = {"LSTMTraining": ("LSTM", 3), "GRUTraining": ("GRU", 2)}


def adopt(model: ModelProto) -> int:
    """Move ONNX Runtime's own operators out of the domain of ai.onnx, in place; the opset that the model needs at least.

    Those that only return more than an operator of ai.onnx become that one where nobody reads the rest. Constants whose
    names would make ONNX Runtime fail get others.
    """
    _leave_training(model)
    renamed = {t.name: f"saved_{t.name}" for t in model.graph.initializer if t.name.startswith(_CLASHING)}
    taken = {v.name for v in (*model.graph.input, *model.graph.output)}
    for tensor in model.graph.initializer:
        if tensor.name in renamed and tensor.name not in taken:
            tensor.name = renamed[tensor.name]
        else:
            renamed.pop(tensor.name, None)
    opset = versions_of(model).get("", 1)
    found, needed = False, 1
    for node in (node for graph in graphs(model.graph) for node in graph.node):
        if renamed and not renamed.keys().isdisjoint(node.input):
            node.input[:] = [renamed.get(name, name) for name in node.input]
        op_type = node.op_type
        if op_type in _IN_ONNX and node.domain in ("", "ai.onnx"):
            since = _IN_ONNX[op_type]
            if since is None or opset < since:
                node.domain, found, needed = MICROSOFT, True, max(needed, since or 1)
        elif op_type in _NEEDS_17 and node.domain == MICROSOFT:
            needed = 17
    if found:
        import_domain(model, MICROSOFT)
    return needed


def _leave_training(model: ModelProto) -> None:
    every = list(graphs(model.graph))
    if all(node.op_type not in _TRAINING_FORMS for graph in every for node in graph.node):
        return
    read = {name for graph in every for node in graph.node for name in node.input}
    read |= {value.name for graph in every for value in graph.output}
    for node in (node for graph in every for node in graph.node):
        if node.domain != MICROSOFT or node.op_type not in _TRAINING_FORMS:
            continue
        op_type, count = _TRAINING_FORMS[node.op_type]
        if not read.isdisjoint(filter(None, node.output[count:])):
            continue
        node.domain, node.op_type = "", op_type
        kept = list(node.output[:count])
        while kept and not kept[-1]:
            kept.pop()
        node.output[:] = kept
        attributes = [a for a in node.attribute if a.name != "output_sequence"]  # of opset 1
        del node.attribute[:]
        node.attribute.extend(attributes)


def settle(model: ModelProto, infer: Callable[[ModelProto], Mapping[str, Type]]) -> ModelProto:
    """`model`, now of the opset that `adopt` asked for, without the operators that `adopt` moved: no runtime has them there.

    :param infer: gives the types of a model's values; asked where a body has to know them.
    :raises InvalidModelError: one of them has a form that its body does not cover.
    """
    if all(o.domain != MICROSOFT for o in model.opset_import):
        return model
    made, types = 0, None
    for node in (node for graph in graphs(model.graph) for node in graph.node):
        if node.domain != MICROSOFT or node.op_type not in _IN_ONNX:
            continue
        if _IN_ONNX[node.op_type] is not None:
            node.domain = ""
            continue
        types = infer(model) if types is None else types
        try:
            function = make_function(node, versions_of(model), types, f"{node.op_type}_{made}")
        except UnsupportedFormError as error:
            called = node.name or next(iter(node.output), "")
            raise InvalidModelError(f"Node {called!r} is no {node.op_type} of ONNX Runtime: {error}.") from error
        assert function is not None
        call(model, node, function)
        made += 1
    return inline_functions(model) if made else model


_TYPED = dict.fromkeys(("Shape", "Size"), int(TensorProto.INT64)) | dict.fromkeys(
    ("Equal", "Less", "Greater", "GreaterOrEqual", "LessOrEqual", "Not", "And", "Or"), int(TensorProto.BOOL)
)


class Body:
    """Collects the nodes of a function body: `op.Add(x, y)` adds one of ai.onnx and returns the name of its result.

    An argument is a value's name, a number (of the type of the first float input), a list of integers, or None. `types`
    has what is known of the operator's inputs.
    """

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.types: dict[str, Type] = {}

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        return lambda *inputs, **attributes: self.emit(op_type, "", inputs, **attributes)

    def microsoft(self, op_type: str, *inputs: Argument, **attributes: Any) -> Any:
        """Add a node of com.microsoft."""
        return self.emit(op_type, MICROSOFT, inputs, **attributes)

    def emit(self, op_type: str, domain: str, inputs: Sequence[Argument], outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; its result's name, or a tuple of names where it has several."""
        like = next((x for x in inputs if isinstance(x, str)), None)
        names = [self._name(x, like) for x in inputs]
        while names and not names[-1]:
            names.pop()
        made = tuple(f"v_{len(self.nodes)}_{k}" for k in range(outputs))
        attributes = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(op_type, names, list(made), domain=domain, **attributes))
        kind = self._result_type(op_type, names, attributes)
        if kind:
            self.types.update(dict.fromkeys(made, (kind, None)))
        return made[0] if outputs == 1 else made

    def _result_type(self, op_type: str, names: list[str], attributes: Mapping[str, Any]) -> int:
        """The element type of a result, 0 where it is unknown."""
        if op_type == "Constant":
            return int(attributes["value"].data_type)
        if op_type == "Cast":
            return int(attributes["to"])
        if op_type in _TYPED:
            return _TYPED[op_type]
        typed = names[1:] if op_type in ("Where", "CastLike") else names
        return self.type(typed[0]) if typed else 0

    def _name(self, value: Argument, like: str | None) -> str:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if isinstance(value, int | float):
            assert like is not None
            return self.number(value, like)
        return self.constant(np.array(value, np.int64))

    def constant(self, array: np.ndarray) -> str:
        """A constant."""
        return str(self.emit("Constant", "", (), value=numpy_helper.from_array(array)))

    def number(self, value: float, like: str) -> str:
        """A scalar of the type of `like`."""
        kind = self.type(like) or TensorProto.FLOAT
        tensor = numpy_helper.from_array(np.array(value, helper.tensor_dtype_to_np_dtype(kind)))
        if float(numpy_helper.to_array(tensor)) != value:
            tensor.metadata_props.add(key=CONSTANT, value=repr(float(value)))
        constant = str(self.emit("Constant", "", (), value=tensor))
        return constant if self.type(like) else str(self.CastLike(constant, like))

    def rank(self, value: str) -> int | None:
        """The rank of an input, None where it is unknown."""
        return self.types.get(value, (0, None))[1]

    def type(self, value: str) -> int:
        """The element type of an input, 0 where it is unknown."""
        return self.types.get(value, (0, None))[0]

    def mean(self, value: str, axes: list[int]) -> str:
        """The mean over `axes`, which stay as 1: before opset 18 they are an attribute."""
        if self.opset >= 18:
            return str(self.ReduceMean(value, axes))
        return str(self.ReduceMean(value, axes=axes))
