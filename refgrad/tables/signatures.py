"""The signature of a rule is the schema of an operator that has no other.

After `op`, the positional parameters are read by their names:

- `d_y` is the cotangent of an output `y`. It makes `y` an output; several are in the order in which they stand.
- `y`, where there is a `d_y`, is that output.
- Every other one is an input. With the default None it is optional; starred, it is variadic.

Keyword-only parameters are attributes. One without a default is required. The default tells its kind, or the annotation
where the default is None or missing.

An author who needs more declares the outputs: `outputs=("y", "mask?:bool")`. Then only these are outputs, `?` makes one
optional, and `:bool` says its element type. Without that an output has the element type of the first differentiable input.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
from onnx import NodeProto, helper
from onnx.defs import OpSchema

from refgrad.errors import RuleError, choices, did_you_mean
from refgrad.tables.annotations import KINDS, attribute_kind, hints
from refgrad.tables.once import place, qualified
from refgrad.tables.schemas import DECLARED, wrong_type


def _type_name(kind: int) -> str:
    return str(helper.tensor_dtype_to_string(kind)).removeprefix("TensorProto.").lower()


_FLOATS = ("tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)")
_TENSORS = tuple(f"tensor({_type_name(kind)})" for kind in helper.get_all_tensor_dtypes() if kind)


@dataclass(frozen=True)
class Signature:
    """The description of an operator by the signature of its rule, or by a declaration.

    `types` has the element type of each output. 0 stands for the element type of the first input at one of the places `floats`.
    `where` says who declared it, for messages.
    """

    schema: OpSchema
    floats: tuple[int, ...]
    types: tuple[int, ...]
    any_attribute: bool
    where: str

    def __str__(self) -> str:
        """As in "SquaredHinge(scores, labels, *, margin=1.0) -> loss"."""
        options = OpSchema.FormalParameterOption

        def shown(parameter: OpSchema.FormalParameter) -> str:
            star = "*" if parameter.option == options.Variadic else ""
            return f"{star}{parameter.name}" + ("=None" if parameter.option == options.Optional else "")

        inputs = [shown(p) for p in self.schema.inputs]
        attributes = []
        for name, attribute in self.schema.attributes.items():
            default = attribute.default_value
            attributes.append(f"{name}={helper.get_attribute_value(default)!r}" if default.name else name)
        if attributes and not any(p.startswith("*") for p in inputs):
            attributes.insert(0, "*")
        given = [*inputs, *attributes, *(["**"] if self.any_attribute else [])]
        return f"{self.schema.name}({', '.join(given)}) -> {', '.join(p.name for p in self.schema.outputs)}"

    def mismatch(self, node: NodeProto) -> str:
        """The reason why `node` is not a valid node of this operator, or ""."""
        schema, options = self.schema, OpSchema.FormalParameterOption
        for what, names, parameters, least, most in (
            ("input", node.input, schema.inputs, schema.min_input, schema.max_input),
            ("output", node.output, schema.outputs, schema.min_output, schema.max_output),
        ):
            if not least <= len(names) <= most:
                due = choices((p.name for p in parameters), limit=len(parameters))
                return f"it has {len(names)} {what}s; the {what}s are {due}"
            for name, parameter in zip(names, parameters, strict=False):
                if not name and what == "input" and parameter.option == options.Single:
                    return f"it leaves out the input {parameter.name!r}, which is required"
        for attribute in node.attribute:
            declared = schema.attributes.get(attribute.name)
            if declared is None and not self.any_attribute:
                close = did_you_mean(attribute.name, schema.attributes)
                return f"it has no attribute {attribute.name!r}.{close} Its attributes are {choices(schema.attributes)}"
        if wrong := wrong_type(node, schema):
            return wrong
        given_names = {attribute.name for attribute in node.attribute}
        for name, declared in schema.attributes.items():
            if declared.required and name not in given_names:
                return f"it lacks the attribute {name!r}, which is required"
        return ""


SIGNATURES: dict[tuple[str, str], Signature] = {}  # by domain and operator


def read_signature(
    op_type: str,
    domain: str,
    function: Callable[..., Any],
    wrt: Sequence[str] | None,
    outputs: Sequence[str] | None,
) -> Signature:
    """The signature of an operator that has no schema, read from the signature of its rule.

    :param wrt: the differentiable inputs; None for all.
    :param outputs: the outputs, where the rule declares them.
    :raises RuleError: the rule does not say what its outputs are, or of which kind an attribute is.
    """
    named = qualified(domain, op_type)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise RuleError(f"{named} has no schema: name its attributes in the rule, **attributes does not say which.")
    positional = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    if outputs is None:
        outputs = [p.name.removeprefix("d_") for p in positional if p.name.startswith("d_")]
        if not outputs:
            raise RuleError(
                f"{named} has no schema, and its rule names no output: give it a parameter d_<output>, the cotangent of "
                'that output, or declare the outputs: rule(..., outputs=("y",)).'
            )
    results = [_output(text) for text in outputs]
    taken = {name for result in results for name in (result.name, f"d_{result.name}")}
    inputs = [p for p in positional if p.name not in taken]
    attributes = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    known = hints(function)
    return _signature(
        op_type,
        domain,
        [_Input(p.name, p.default is None, p.kind is p.VAR_POSITIONAL) for p in inputs],
        results,
        wrt,
        [_attribute(p, known.get(p.name), named) for p in attributes],
        False,
        f"its rule {place(function)}",
        inspect.getdoc(function) or "",
    )


def declared_signature(
    op_type: str, domain: str, inputs: Sequence[str], outputs: Sequence[str], where: str, reason: str
) -> Signature:
    """The signature of an operator without a schema and without a rule, as its author declares it."""
    read = [_Input(name.rstrip("?").lstrip("*"), name.endswith("?"), name.startswith("*")) for name in inputs]
    return _signature(op_type, domain, read, [_output(text) for text in outputs], None, [], True, where, reason)


def declare(signature: Signature) -> None:
    """Let the operator be known by this signature."""
    key = signature.schema.domain, signature.schema.name
    SIGNATURES[key] = signature
    DECLARED[key] = signature.schema


def with_list(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as the sweep calls it: a variadic input is one argument, a list, and not starred."""
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        return function
    at = kinds.index(inspect.Parameter.VAR_POSITIONAL)

    @wraps(function)
    def unpacking(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments[:at], *arguments[at], **keywords)

    return unpacking


@dataclass(frozen=True)
class _Input:
    name: str
    optional: bool
    variadic: bool


@dataclass(frozen=True)
class _Output:
    name: str
    optional: bool
    kind: int


def _output(text: str) -> _Output:
    name, _, kind = text.partition(":")
    optional = name.endswith("?")
    name = name.removesuffix("?")
    if not name.isidentifier():
        raise RuleError(
            f"{text!r} is not the name of an output. Write y, y? where it is optional, y:int64 for its type."
        )
    try:
        return _Output(name, optional, int(helper.np_dtype_to_tensor_dtype(np.dtype(kind.strip()))) if kind else 0)
    except (TypeError, ValueError) as error:
        raise RuleError(
            f"The output {text!r} has an unknown type {kind!r}. Write one of NumPy: bool, int64."
        ) from error


def _signature(
    op_type: str,
    domain: str,
    inputs: Sequence[_Input],
    outputs: Sequence[_Output],
    wrt: Sequence[str] | None,
    attributes: Iterable[OpSchema.Attribute],
    any_attribute: bool,
    where: str,
    text: str,
) -> Signature:
    options = OpSchema.FormalParameterOption
    floats = tuple(k for k, p in enumerate(inputs) if wrt is None or p.name in wrt)
    constraints: list[tuple[str, Sequence[str], str]] = [("T", _FLOATS, "the differentiable inputs")]
    formal = []
    for k, p in enumerate(inputs):
        if k not in floats:
            constraints.append((f"T{k}", _TENSORS, p.name))
        option = options.Variadic if p.variadic else options.Optional if p.optional else options.Single
        formal.append(OpSchema.FormalParameter(p.name, "T" if k in floats else f"T{k}", param_option=option))
    results = []
    for result in outputs:
        kind = f"tensor({_type_name(result.kind)})" if result.kind else "T"
        option = options.Optional if result.optional else options.Single
        results.append(OpSchema.FormalParameter(result.name, kind, param_option=option))
    schema = OpSchema(
        op_type,
        domain,
        1,
        text,
        inputs=formal,
        outputs=results,
        type_constraints=constraints,
        attributes=list(attributes),
    )
    return Signature(schema, floats, tuple(result.kind for result in outputs), any_attribute, where)


def _attribute(p: inspect.Parameter, hint: Any, named: str) -> OpSchema.Attribute:
    if p.default is not p.empty and p.default is not None and p.default not in ((), []):
        value = list(p.default) if isinstance(p.default, tuple) else p.default
        return OpSchema.Attribute(p.name, helper.make_attribute(p.name, value))
    kind = attribute_kind(hint)
    if kind is None:
        raise RuleError(
            f"The rule for {named} does not say of which kind the attribute {p.name!r} is: give it a default, or one of "
            f"the annotations {choices(KINDS)}."
        )
    return OpSchema.Attribute(p.name, kind, required=p.default is p.empty)
