"""Operators of ONNX Runtime, of ai.onnx.ml and of training that refgrad defines by a function of ai.onnx operators.

`@body` makes a schema and a function body of a Python function. Its parameters are the inputs (optional where the default
is None, variadic where starred) and, keyword-only, the attributes; the body is what it emits through its first parameter. The
body gives the types and shapes of the operator's results, and its derivative where there is no rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import numpy as np
import onnx
from onnx import NodeProto, helper
from onnx.defs import OpSchema

from refgrad.errors import RuleError, choices
from refgrad.tables.annotations import KINDS, attribute_kind, hints, is_optional
from refgrad.tables.once import once, qualified
from refgrad.tables.registry import BODY, RULES
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


def is_needed(p: inspect.Parameter, types_of: Mapping[str, Any]) -> bool:
    """True if an input may not be left out: it has no default, and may not be None."""
    return p.default is p.empty and not is_optional(types_of.get(p.name))


class Arguments(SimpleNamespace):
    """The inputs and attributes of a node, by the names of the parameters of its body.

    An input that is left out is None, a variadic one is a list. An attribute that is not set has its default.
    """


@dataclass(frozen=True)
class FunctionSignature:
    """The inputs and the attributes of an operator, by the parameters of the function that writes it."""

    inputs: tuple[str, ...]
    required: int  # how many inputs a node has at least
    needed: frozenset[str]  # which of them it does not leave out
    variadic: bool
    defaults: Mapping[str, Any]  # of the attributes
    parameters: tuple[inspect.Parameter, ...]  # of the function, without the emitter

    @classmethod
    def of(cls, function: Callable[..., Any], attributes: Mapping[str, Any] | None = None) -> FunctionSignature:
        """Read it off `function`; `attributes` are the defaults of those that the function takes as `**`."""
        parameters = list(inspect.signature(function).parameters.values())[1:]
        types_of = hints(function)
        inputs = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        own = {p.name.rstrip("_"): p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != NODE}
        return cls(
            tuple(p.name.rstrip("_") for p in inputs),
            sum(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in inputs),
            frozenset(p.name.rstrip("_") for p in inputs if is_needed(p, types_of)),
            any(p.kind is p.VAR_POSITIONAL for p in inputs),
            {**(attributes or {}), **own},
            tuple(parameters),
        )

    def arguments(self, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Arguments:
        """The arguments of a node, from its inputs in their order and the attributes that it sets."""
        positional = [p for p in self.parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        padded = [*inputs, *[None] * (len(positional) - len(inputs))]
        values = dict(zip((p.name for p in positional), padded, strict=False))
        for p in self.parameters:
            if p.kind is p.VAR_POSITIONAL:
                values[p.name] = padded[len(positional) :]
            elif p.kind is p.KEYWORD_ONLY:
                values[p.name] = attributes.get(p.name, p.default)
        return Arguments(**values)

    def mismatch(self, attributes: Collection[str], inputs: Sequence[str]) -> str:
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


class Shapes(Protocol):
    """The known facts about the inputs of a node, for its check: declared ones before it runs, or its arrays."""

    def shape(self, value: Any) -> Sequence[int | str | None] | None:
        """The shape of an input, None where it is unknown."""

    def rank(self, value: Any) -> int | None:
        """The rank of an input, None where it is unknown."""

    def type(self, value: Any) -> int:
        """The element type of an input, 0 where it is unknown."""

    def constant(self, value: Any) -> np.ndarray | None:
        """The value of an input, None where it is unknown."""


Check = Callable[[Shapes, Arguments], None]


@dataclass(frozen=True)
class Definition:
    """An operator that refgrad defines: its schema, and the function that emits its body.

    `writes` maps the outputs that ONNX Runtime computes in the memory of an input to that input. `settings` are inputs that
    steer the operator, as in a rule. `check` refuses attributes and shapes that do not fit, by UnsupportedFormError.
    """

    schema: OpSchema
    function: Callable[..., Any]
    signature: FunctionSignature
    writes: Mapping[int, str]
    settings: tuple[str, ...] = ()
    check: Check | None = None

    def arguments(self, shapes: Shapes, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Arguments:
        """The checked arguments of a node, from its inputs in their order and the attributes that it sets.

        :raises UnsupportedFormError: the check refuses them.
        """
        args = self.signature.arguments(inputs, attributes)
        if self.check is not None:
            self.check(shapes, args)
        return args

    @property
    def meaning(self) -> str:
        """The formula of the body: the first line of its docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def rounded(self) -> dict[str, Any]:
        """The defaults as a node would have them: floats are of 32 bits."""
        defaults = self.signature.defaults
        return {n: float(np.float32(v)) if isinstance(v, float) else v for n, v in defaults.items()}

    def mismatch(self, node: NodeProto) -> str:
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


def body(
    op_type: str,
    *outputs: str,
    optional: Sequence[str] = (),
    others: Collection[str] = (),
    types: Mapping[str, Collection[str] | str] | None = None,
    writes: Mapping[int, str] | None = None,
    settings: Sequence[str] = (),
    check: Check | None = None,
    domain: str = "",
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
    :param check: refuses the attributes and shapes that do not fit by UnsupportedFormError. It runs before the body is written,
        and before each run of a kernel (`kernel_of_body`).
    :param replace: take the place of a body that the operator has already; without it a second one is refused.
    """

    def register(function: F) -> F:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        types_of = hints(function)
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
            return options.Single if is_needed(p, types_of) else options.Optional

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
            attributes=[
                _attribute(p, types_of.get(p.name), qualified(domain, op_type))
                for p in parameters
                if p.kind is p.KEYWORD_ONLY
            ],
        )
        before = DEFINITIONS.get((domain, op_type))
        once("function body", qualified(domain, op_type), before and before.function, function, replace)
        DECLARED[domain, op_type] = schema
        signature = FunctionSignature.of(function)
        known = Definition(schema, function, signature, writes or {}, tuple(settings), check)
        DEFINITIONS[domain, op_type] = known
        if (domain, op_type) not in RULES:
            BODY[domain, op_type] = known.meaning
        return function

    return register


def _attribute(p: inspect.Parameter, hint: Any, named: str) -> OpSchema.Attribute:
    """The kind of an attribute is its annotation's; one without a default is required."""
    if p.default is not p.empty and p.default is not None:
        return OpSchema.Attribute(p.name, helper.make_attribute(p.name, p.default))
    kind = attribute_kind(hint)
    if kind is None:
        raise RuleError(
            f"The body of {named} does not say of which kind the attribute {p.name!r} is: give it a default, or one of the "
            f"annotations {choices(KINDS)}."
        )
    return OpSchema.Attribute(p.name, kind, required=p.default is p.empty)
