"""`@rule` and `@lowering`: functions are bound to the ONNX schema, or to the primitive, whose parameters they name.

The binding is checked when the module is imported, so a misspelt parameter never waits for a model to be found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from typing import Any, TypeVar

import onnx
from onnx.defs import OpSchema

from refgrad.errors import RuleError, did_you_mean
from refgrad.protos.traverse import attribute_value
from refgrad.tables.dialects import DIALECTS
from refgrad.tables.once import once, place, qualified
from refgrad.tables.primitives import PRIMITIVES
from refgrad.tables.schemas import find_schema
from refgrad.tables.signatures import SIGNATURES, declare, read_signature, with_list

_FLOAT_TYPES = frozenset(("tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)"))
_STARRED, _DOUBLE_STARRED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


@dataclass(frozen=True)
class BoundParameter:
    """One parameter of a rule: what it is (input, output, cotangent, attribute, keyword) and where the schema has it."""

    kind: str
    name: str
    position: int = 0
    variadic: bool = False
    default: Any = None


def in_one_line(formula: str) -> str:
    """The first paragraph of a formula, in one line."""
    return " ".join(formula.partition("\n\n")[0].split())


@dataclass(frozen=True)
class Rule:
    """The reverse-mode rule of one operator: `function`, and how its parameters are bound to a node."""

    op_type: str
    domain: str
    function: Function
    wrt: tuple[str, ...]
    broadcast: bool
    parameters: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    by_name: frozenset[str] = frozenset()  # the parameters that are keyword-only
    settings: tuple[str, ...] = ()
    _refuses: dict[int, dict[int, str]] = field(default_factory=dict, repr=False)
    _bound: dict[int, tuple[tuple[BoundParameter, ...], tuple[tuple[int, bool], ...]]] = field(
        default_factory=dict, repr=False
    )

    @property
    def formula(self) -> str:
        """The rule's docstring: the formula that `refgrad explain` and the documentation print."""
        return inspect.getdoc(self.function) or ""

    def refuses(self, opset: int) -> dict[int, str]:
        """The positions of the inputs in `refused`, in the operator's version in `opset`, and why."""
        if opset not in self._refuses:
            schema = find_schema(self.op_type, self.domain, opset)
            named = {k: self.refused[p.name] for k, p in enumerate(schema.inputs) if p.name in self.refused}
            self._refuses[opset] = named
        return self._refuses[opset]

    def bind(self, opset: int) -> tuple[tuple[BoundParameter, ...], tuple[tuple[int, bool], ...]]:
        """For the operator's version in `opset`: what each parameter reads, and (position, variadic) per entry of `wrt`."""
        if opset not in self._bound:
            newest = find_schema(self.op_type, self.domain)
            schema = find_schema(self.op_type, self.domain, opset)
            reads = tuple(_bind(self, name, schema, newest) for name in self.parameters if name != "**")
            if "**" in self.parameters:
                others = (name for name in newest.attributes if name not in self.parameters)
                reads += tuple(with_fields(_bind(self, name, schema, newest), kind="keyword") for name in others)
            places = {p.name: (k, _is_variadic(p)) for k, p in enumerate(schema.inputs)}
            self._bound[opset] = (reads, tuple(places[name] for name in self.wrt if name in places))
        return self._bound[opset]


@dataclass
class VaryingValues:
    """The values that depend on `wrt` so far, and the float types of the cotangents of the quantised ones."""

    names: set[str]
    adjoint_types: dict[str, int] = field(default_factory=dict)


class ControlFlowRule:
    """A node with graphs of its own (bodies.py), or a call of a function; the docstring is the formula.

    The path asks first for the outputs that vary, then for a route: the values that it reads for the outputs that are
    needed. The sweep asks for the cotangents of these.
    """

    @classmethod
    def read(cls, control_flow: Any, node: Any) -> ControlFlowRule:
        """The rule for `node`, a node of the graph of `control_flow`."""
        raise NotImplementedError

    @classmethod
    def formula(cls) -> str:
        """The docstring, which `refgrad explain` and the documentation print."""
        return inspect.getdoc(cls) or ""

    def outputs_of(self, varying: VaryingValues) -> frozenset[str]:
        """The outputs of the node that depend on a value that varies."""
        raise NotImplementedError

    def route(self, varying: VaryingValues, needed: Set[str]) -> Route:
        """The route from the values that vary to the outputs in `needed`."""
        raise NotImplementedError

    def differentiate(self, op: Any, route: Route, cotangents: Mapping[str, str]) -> Iterable[tuple[str, str | None]]:
        """The values that the node reads, each with its cotangent, from the cotangents of its outputs by name."""
        raise NotImplementedError


@dataclass(frozen=True)
class Route:
    """A route through a node: the values that it reads, vary and are needed, and the paths through its graphs.

    `refusal` says why no derivative passes, whatever these find.
    """

    rule: ControlFlowRule
    reads: frozenset[str]
    paths: tuple[Any, ...]
    refusal: str = ""


def control_flow_rule(
    op_type: str | None, domain: str = "", *, replace: bool = False
) -> Callable[[type[ControlFlowRule]], type[ControlFlowRule]]:
    """Register the decorated class as the derivative of an operator that has graphs of its own; None: of every function.

    :raises RuleError: the operator has another one, and `replace` is false.
    """

    def register(rule_class: type[ControlFlowRule]) -> type[ControlFlowRule]:
        if op_type is None:
            once("control-flow rule", "a call of a function", next(iter(CALLS), None), rule_class, replace)
            CALLS[:] = [rule_class]
        else:
            once(
                "control-flow rule",
                qualified(domain, op_type),
                CONTROL_FLOW_RULES.get((domain, op_type)),
                rule_class,
                replace,
            )
            CONTROL_FLOW_RULES[domain, op_type] = rule_class
        return rule_class

    return register


RULES: dict[tuple[str, str], Rule] = {}
CONTROL_FLOW_RULES: dict[
    tuple[str, str], type[ControlFlowRule]
] = {}  # operator with graphs of its own: their derivative
CALLS: list[type[ControlFlowRule]] = []  # of one: the derivative of a call of a function of a model
ZERO: dict[tuple[str, str], str] = {}  # operator: why its derivative is zero
NO_DERIVATIVE: dict[tuple[str, str], str] = {}  # operator: why it has none
BODY: dict[tuple[str, str], str] = {}  # operator without a rule: what its function body computes
QUANTIZERS: dict[tuple[str, str], frozenset[int]] = {}  # operator that rounds floats: to which element types
QUANTIZED: set[tuple[str, str]] = set()  # operators whose rule holds for values of such a type too


def _left_out(inputs: Iterable[str], wrt: Collection[str]) -> dict[str, str]:
    """The inputs that a rule without a schema leaves out, and why a path through one is refused."""
    why = (
        f"its rule gives the derivative by {', '.join(wrt)} alone. Leave the value out of what is differentiated, or add the "
        "input to wrt of the rule, which returns None where the derivative is zero"
    )
    return {name: why for name in inputs if name not in wrt}


def rule(
    op_type: str,
    *,
    domain: str = "",
    wrt: Sequence[str] | None = None,
    broadcast: bool = False,
    refused: Mapping[str, str] | None = None,
    outputs: Sequence[str] | None = None,
    settings: Sequence[str] = (),
    quantized: bool = False,
    replace: bool = False,
) -> Callable[[F], F]:
    """Register the decorated function as the reverse-mode rule of an operator.

    Its first parameter is the emitter `op`. The others are bound by name to the operator's schema: inputs and outputs by
    their names (None where an optional input is absent; an optional output that the node leaves out is added to it;
    variadic ones are lists), `d_<output>` for the cotangent of an output (None where nothing depends on that output and
    the operator has several), attributes with the schema's default, and `**attributes` for all that no parameter names.
    It returns one cotangent per name in `wrt`, or None for a zero one. Attributes may be keyword-only.

    An operator of a domain of your own needs no schema: the signature of its rule is the schema (refgrad.tables.signatures).

    :param wrt: the differentiable inputs; by default those whose type may be float, in the schema's order. Without a schema
        all inputs are.
    :param broadcast: each cotangent has the shape of the broadcast output; the sweep sums it down to the input's.
    :param refused: inputs with a derivative that the rule does not give, and why: a path through one is refused. The
        derivative by any other input that is not in `wrt` is zero; without a schema, which tells floats, it is refused as well.
    :param outputs: the outputs of an operator without a schema, as ("y", "mask?:bool"), where the parameters d_<output> do
        not say all. A question mark makes one optional, a type follows a colon.
    :param settings: inputs that steer the operator. An initializer that nodes read only there is no weight: `gradient`
        differentiates by it only where `wrt` names it.
    :param quantized: the rule holds for values of quantized types too, whose cotangents are floats.
    :param replace: take the place of a rule that the operator has already; without it a second one is refused.
    :raises RuleError: the operator has no schema, a parameter or a name in `wrt`, `refused` or `settings` is not in it, or
        the operator has a rule.
    """
    if not isinstance(op_type, str):
        raise RuleError(f"@rule needs the name of the operator: @rule({getattr(op_type, '__name__', 'Name')!r}).")

    def register(function: F) -> F:
        schema, known = find_schema(op_type, domain), None
        if schema is None or (domain, op_type) in SIGNATURES:
            _refuse_unknown(op_type, domain)
            known = read_signature(op_type, domain, function, wrt, outputs)
            schema = known.schema
        elif outputs is not None:
            raise RuleError(
                f"{op_type} has a schema, which says what its outputs are: leave out `outputs` of the rule."
            )
        signature = list(inspect.signature(function).parameters.values())
        names = tuple("**" if p.kind is p.VAR_KEYWORD else p.name for p in signature[1:])
        by_name = frozenset(p.name for p in signature[1:] if p.kind is p.KEYWORD_ONLY)
        inputs = {p.name: p for p in schema.inputs}
        for argument, listed in (("wrt", wrt or ()), ("refused", refused or ()), ("settings", settings)):
            for name in listed:
                if name not in inputs:
                    raise RuleError(
                        f"The rule for {op_type} has {name!r} in {argument}; the inputs are {', '.join(inputs)}."
                    )
        differentiable = tuple(wrt or (p.name for p in schema.inputs if _FLOAT_TYPES & _types(schema, p.type_str)))
        called, others = (function, {}) if known is None else (with_list(function), _left_out(inputs, differentiable))
        reasons = others | dict(refused or {})
        registered = Rule(op_type, domain, called, differentiable, broadcast, names, reasons, by_name, tuple(settings))
        for name in names:
            if name != "**":
                _bind(registered, name, schema, schema)
        before = RULES.get((domain, op_type))
        once("rule", qualified(domain, op_type), before and before.function, function, replace)
        for kind, table in (("zero", ZERO), ("no", NO_DERIVATIVE)):
            if not replace and (domain, op_type) in table:
                raise RuleError(
                    f"{qualified(domain, op_type)} is declared to have {kind} derivative: {table[domain, op_type]}. Say with "
                    f"replace=True that {place(function)} takes its place."
                )
            table.pop((domain, op_type), None)
        BODY.pop((domain, op_type), None)
        if known is not None:
            declare(known)
        RULES[domain, op_type] = registered
        if quantized:
            QUANTIZED.add((domain, op_type))
        return function

    return register


def lowering(primitive: str, dialect: str = "onnx", *, replace: bool = False) -> Callable[[F], F]:
    """Register the decorated function as the meaning of a gradient primitive in a dialect.

    In "onnx" it emits ai.onnx operators only. In another dialect it may return None: then the "onnx" one is used.

    :param replace: take the place of a lowering that the primitive has already in this dialect.
    :raises RuleError: the dialect or the primitive does not exist, the parameters are not the primitive's, or it has a
        lowering in this dialect.
    """
    if dialect not in DIALECTS:
        raise RuleError(f"There is no dialect {dialect!r}; there are {', '.join(DIALECTS)}.")
    lowerings = DIALECTS[dialect].lowerings

    def register(function: F) -> F:
        if primitive not in PRIMITIVES:
            raise RuleError(f"{primitive!r} is no primitive; there are {', '.join(PRIMITIVES)}.")
        known = PRIMITIVES[primitive]
        parameters = list(inspect.signature(function).parameters.values())[1:]
        names = tuple(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        starred, passed = (any(p.kind is kind for p in parameters) for kind in (_STARRED, _DOUBLE_STARRED))
        count = (
            sum(p.kind is not p.KEYWORD_ONLY for p in parameters) - starred - passed if starred else len(known.inputs)
        )
        inputs, attributes = names[:count], names[count:]
        fits = inputs == known.inputs[:count] if starred else inputs == known.inputs
        whole = set(attributes) <= set(known.attributes) if passed else attributes == known.attributes
        if not fits or not whole:
            raise RuleError(
                f"The lowering of {primitive} has the parameters {', '.join(names)}; the primitive has "
                f"{', '.join(known.inputs + known.attributes)}."
            )
        once(f"lowering to {dialect!r}", primitive, lowerings.get(primitive), function, replace)
        lowerings[primitive] = function
        return function

    return register


def _refuse_unknown(op_type: str, domain: str) -> None:
    """Refuse an operator of ai.onnx that onnx does not know: its name is misspelt, or it belongs elsewhere."""
    if domain and not f"{domain}.".startswith("ai.onnx."):
        return
    known = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == domain}
    raise RuleError(
        f"{domain or 'ai.onnx'} has no operator {op_type!r}.{did_you_mean(op_type, known)} "
        'An operator of your own belongs in a domain of your own: rule(..., domain="my.domain").'
    )


def _types(schema: OpSchema, type_str: str) -> frozenset[str]:
    for constraint in schema.type_constraints:
        if constraint.type_param_str == type_str:
            return frozenset(constraint.allowed_type_strs)
    return frozenset((type_str,))


def _is_variadic(parameter: OpSchema.FormalParameter) -> bool:
    return bool(parameter.option == OpSchema.FormalParameterOption.Variadic)


def _bind(owner: Rule, name: str, schema: OpSchema, newest: OpSchema) -> BoundParameter:
    """The part of `schema` that the parameter `name` means; a name that only `newest` has is bound as absent.

    An attribute that later became an input (the axes of reductions) is bound as that input in every opset.
    """
    for kind, prefix, parameters in (
        ("input", "", schema.inputs),
        ("cotangent", "d_", schema.outputs),
        ("output", "", schema.outputs),
    ):
        for position, parameter in enumerate(parameters):
            if name == prefix + parameter.name:
                if name in owner.by_name:
                    raise RuleError(
                        f"The rule for {owner.op_type} has the {kind} {name!r} as a keyword-only parameter: only attributes "
                        "may be that. Move it before the star."
                    )
                return BoundParameter(kind, parameter.name, position, _is_variadic(parameter))
    by_name = name in owner.by_name
    if name in schema.attributes:
        default = schema.attributes[name].default_value
        value = attribute_value(default) if default.name else None
        was_attribute = any(name == p.name for p in newest.inputs)
        return BoundParameter(
            "keyword" if by_name else "constant" if was_attribute else "attribute", name, default=value
        )
    if any(name == p.name for p in newest.inputs):
        return BoundParameter("absent", name)
    if name in newest.attributes:
        default = newest.attributes[name].default_value
        return BoundParameter(
            "keyword" if by_name else "absent", name, default=attribute_value(default) if default.name else None
        )
    raise RuleError(
        f"The rule for {owner.op_type} has a parameter {name!r}, which its schema does not know. Inputs: "
        f"{', '.join(p.name for p in newest.inputs)}; outputs (cotangents with d_): "
        f"{', '.join(p.name for p in newest.outputs)}; attributes: {', '.join(newest.attributes) or 'none'}."
    )
