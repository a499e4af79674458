"""Operators of ONNX Runtime, of ai.onnx.ml and of training that refgrad defines by a function of ai.onnx operators.

`@operator` makes a schema and a function body of a Python function. Its parameters are the inputs (optional where the default
is None, variadic where starred) and, keyword-only, the attributes; the body is what it emits through its first parameter. The
body gives the types and shapes of the operator's results, and its derivative where there is no rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import NodeProto, helper
from onnx.defs import OpSchema

from refgrad.protos.domains import MICROSOFT
from refgrad.tables.once import once, qualified
from refgrad.tables.schemas import DECLARED, wrong_type

F = TypeVar("F", bound=Callable[..., Any])

FLOATS = ("tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)")
_OTHERS = ("tensor(int32)", "tensor(int64)", "tensor(bool)", "tensor(uint8)", "tensor(int8)")


NODE = "_node"  # the parameter of a function that is given the node itself


class UnsupportedFormError(Exception):
    """A form of an operator that its body does not cover; the message says which, and what to do."""


Ints = Sequence[int]
Floats = Sequence[float]
Strings = Sequence[str]
REQUIRED = inspect.Parameter.empty  # the default of an attribute that a node has to have


@dataclass(frozen=True)
class FunctionSignature:
    """The inputs and the attributes of an operator, by the parameters of the function that writes it."""

    inputs: tuple[str, ...]
    required: int  # how many inputs a node has at least
    needed: frozenset[str]  # which of them it does not leave out
    variadic: bool
    defaults: Mapping[str, Any]  # of the attributes

    @classmethod
    def of(cls, function: Callable[..., Any], attributes: Mapping[str, Any] | None = None) -> FunctionSignature:
        """Read it off `function`; `attributes` are the defaults of those that the function takes as `**`."""
        parameters = list(inspect.signature(function).parameters.values())[1:]
        inputs = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        own = {p.name.rstrip("_"): p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != NODE}
        return cls(
            tuple(p.name.rstrip("_") for p in inputs),
            sum(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in inputs),
            frozenset(p.name.rstrip("_") for p in inputs if p.default is p.empty and "None" not in str(p.annotation)),
            any(p.kind is p.VAR_POSITIONAL for p in inputs),
            {**(attributes or {}), **own},
        )

    def misfit(self, attributes: Collection[str], inputs: Sequence[str]) -> str:
        """The reason why a node with these attributes and inputs is not valid, or ""."""
        return self.wrong_attributes(attributes) or self.wrong_inputs(inputs)

    def wrong_attributes(self, given: Collection[str]) -> str:
        """The reason why no node may have these attributes, or ""."""
        known = f"the attributes are {', '.join(self.defaults) or 'none'}"
        if unknown := sorted(set(given) - self.defaults.keys()):
            return f"its attribute {unknown[0]} is not known; {known}"
        if missing := sorted(
            name for name, default in self.defaults.items() if default is REQUIRED and name not in given
        ):
            return f"it lacks the attribute {missing[0]}; {known}"
        return ""

    def wrong_inputs(self, given: Sequence[str]) -> str:
        """The reason why no node may have these inputs, or ""."""
        known, count = f"the inputs are {', '.join(self.inputs)}", len(given)
        if count < self.required or (count > len(self.inputs) and not self.variadic):
            return f"the node has {count} inputs; {known}"
        for name, value in zip(self.inputs, given, strict=False):
            if not value and name in self.needed:
                return f"it lacks the input {name}; {known}"
        return self.wrong_rest(given)

    def wrong_rest(self, given: Sequence[str]) -> str:
        """The reason why no node may have these inputs where there may be any number, or "": onnx's checker does not look."""
        last = len(self.inputs) - 1
        if self.variadic and self.inputs[last] in self.needed and not all(given[last:]):
            return f"it leaves out one of its {self.inputs[last]}"
        return ""


@dataclass(frozen=True)
class Definition:
    """An operator that refgrad defines: its schema, and the function that emits its body.

    `writes` maps the outputs that ONNX Runtime computes in the memory of an input to that input. `settings` are inputs that
    steer the operator, as in a rule.
    """

    schema: OpSchema
    function: Callable[..., Any]
    signature: FunctionSignature
    writes: Mapping[int, str]
    settings: tuple[str, ...] = ()

    @property
    def meaning(self) -> str:
        """The formula of the body: the first line of its docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def rounded(self) -> dict[str, Any]:
        """The defaults as a node would have them: floats are of 32 bits."""
        defaults = self.signature.defaults
        return {n: float(np.float32(v)) if isinstance(v, float) else v for n, v in defaults.items()}

    def misfit(self, node: NodeProto) -> str:
        """The reason why `node` is not a valid node of this operator, or "": onnx.checker does not know the operator."""
        wrong = self.signature.wrong_attributes([a.name for a in node.attribute]) or wrong_type(node, self.schema)
        wrong = wrong or self.signature.wrong_rest(node.input)
        if wrong or onnx.defs.has(node.op_type, node.domain):
            return wrong
        if not self.schema.min_output <= len(node.output) <= self.schema.max_output:
            outputs = ", ".join(p.name for p in self.schema.outputs)
            return f"the node has {len(node.output)} outputs; the outputs are {outputs}"
        return self.signature.wrong_inputs(node.input)


DEFINITIONS: dict[tuple[str, str], Definition] = {}


def operator(
    op_type: str,
    *outputs: str,
    optional: Sequence[str] = (),
    others: Collection[str] = (),
    types: Mapping[str, Collection[str] | str] | None = None,
    writes: Mapping[int, str] | None = None,
    settings: Sequence[str] = (),
    domain: str = MICROSOFT,
    replace: bool = False,
) -> Callable[[F], F]:
    """Define an operator by the decorated function.

    :param outputs: the names of the outputs that every node has.
    :param optional: the names of the outputs after them, which a node may leave out.
    :param others: the inputs and outputs that do not hold floats.
    :param types: inputs and outputs that share their element type with neither the floats nor the others: the types that
        they may have, `FLOATS` and ones like "tensor(uint8)", or the name of one before, which has the same type.
    :param writes: outputs that ONNX Runtime computes in the memory of an input, by their positions, and that input.
    :param settings: inputs that steer the operator. An initializer that nodes read only there is no weight: `gradient`
        differentiates by it only where `wrt` names it.
    :param replace: take the place of a body that the operator has already; without it a second one is refused.
    """

    def register(function: F) -> F:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        options = OpSchema.FormalParameterOption
        apart = types or {}

        def formal(name: str, option: Any) -> OpSchema.FormalParameter:
            kind = apart.get(name)
            variable = "T1" if name in others else "T"
            if kind is not None:
                variable = f"T_{kind if isinstance(kind, str) else name}"
            return OpSchema.FormalParameter(name, variable, param_option=option)

        def option_of(p: inspect.Parameter) -> Any:
            if p.kind is p.VAR_POSITIONAL:
                return options.Variadic
            given = p.default is p.empty and "None" not in str(p.annotation)
            return options.Single if given else options.Optional

        schema = OpSchema(
            op_type,
            domain,
            1,
            inspect.getdoc(function) or "",
            inputs=[formal(p.name.rstrip("_"), option_of(p)) for p in parameters if p.kind is not p.KEYWORD_ONLY],
            outputs=[
                *(formal(name, options.Single) for name in outputs),
                *(formal(name, options.Optional) for name in optional),
            ],
            type_constraints=[
                ("T", FLOATS, "floats"),
                ("T1", _OTHERS, "no floats"),
                *((f"T_{name}", list(kind), name) for name, kind in apart.items() if not isinstance(kind, str)),
            ],
            attributes=[_attribute(p) for p in parameters if p.kind is p.KEYWORD_ONLY],
        )
        before = DEFINITIONS.get((domain, op_type))
        once("function body", qualified(domain, op_type), before and before.function, function, replace)
        DECLARED[domain, op_type] = schema
        signature = FunctionSignature.of(function)
        DEFINITIONS[domain, op_type] = Definition(schema, function, signature, writes or {}, tuple(settings))
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
