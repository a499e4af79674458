"""What a form is, the table of them, and what several of them need.

A form is a function. Its first parameter is the emitter, then come the operator's inputs (None by default: optional;
starred: variadic) and, keyword-only, its attributes; `_node`, which is no attribute, is the node itself. Attributes that are
passed on are double-starred, and listed where the form is registered. Where the operator is a primitive the form emits that;
else what is left of it in ai.onnx operators.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refgrad.forward.graph import Node
from refgrad.forward.normalise import MIN_OPSET
from refgrad.protos.domains import MICROSOFT
from refgrad.reverse.emit import Emitter
from refgrad.tables.once import once, qualified

Ints = Sequence[int] | None
Floats = Sequence[float] | None
REQUIRED = inspect.Parameter.empty  # the default of an attribute that has none
_SPECIAL = "_node"


@dataclass(frozen=True)
class Form:
    """How an operator is lowered.

    `results` say of each output what its type and shape are: `X`, those of the input X; `:X`, the type of X; `shape:X`, the
    type of X and the shape that the input `shape` holds; `int64` or `bool`; `*`, those of the input at its place; `X!to`,
    those of X but for the type, which the attribute `to` has where it is given. Three dots repeat what is before them.
    `writes` maps the outputs that ONNX Runtime computes in the memory of an input to that input. `opset` is the lowest that
    the form needs, by the attributes.
    """

    function: Callable[..., Any]
    results: tuple[str, ...]
    writes: Mapping[int, str]
    opset: Callable[[Mapping[str, Any]], int]
    inputs: tuple[str, ...]
    required: int  # how many inputs a node has at least
    needed: frozenset[str]  # which of them it does not leave out
    variadic: bool
    attributes: Mapping[str, Any]

    def misfit(self, node: Node) -> str:
        """Why `node` is none of this operator, "" where it is one."""
        given = node.attributes
        attributes = f"the attributes are {', '.join(self.attributes) or 'none'}"
        if unknown := sorted(given.keys() - self.attributes.keys()):
            return f"its attribute {unknown[0]} is not known; {attributes}"
        required = (name for name, default in self.attributes.items() if default is REQUIRED)
        if missing := sorted(set(required) - given.keys()):
            return f"it lacks the attribute {missing[0]}; {attributes}"
        count, inputs = len(node.inputs), f"the inputs are {', '.join(self.inputs)}"
        if count < self.required or (count > len(self.inputs) and not self.variadic):
            return f"it has {count} inputs; {inputs}"
        places = zip(self.inputs, node.inputs, strict=False)
        absent = [name for name, value in places if not value and name in self.needed]
        if absent:
            return f"it lacks the input {absent[0]}; {inputs}"
        if len(node.outputs) > len(self.results) and self.results[-1] not in ("...", "*"):
            return f"it has {len(node.outputs)} outputs, of {len(self.results)}"
        return ""

    def result(self, position: int) -> str:
        """What is known of the output at `position`."""
        listed = [result for result in self.results if result != "..."]
        return listed[min(position, len(listed) - 1)]

    def lower(self, op: Emitter, node: Node) -> tuple[str | None, ...]:
        """Emit what `node` computes; the values of its outputs."""
        inputs: list[str | None] = [name or None for name in node.inputs]
        names = inspect.signature(self.function).parameters
        keywords: dict[str, Any] = {}
        for name, default in self.attributes.items():
            keywords[f"{name}_" if f"{name}_" in names else name] = node.attributes.get(name, default)
        if _SPECIAL in names:
            keywords[_SPECIAL] = node
        made = self.function(op, *inputs, **keywords)
        return made if isinstance(made, tuple) else (made,)


FORMS: dict[tuple[str, str], Form] = {}


def form(
    *op_types: str,
    results: str,
    writes: Mapping[int, str] | None = None,
    domain: str = MICROSOFT,
    opset: Callable[[Mapping[str, Any]], int] = lambda attributes: MIN_OPSET,
    attributes: Mapping[str, Any] | None = None,
    replace: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the form of these operators; `results` are separated by spaces.

    `attributes` are those that the function takes as `**`, with their defaults; the others are its keyword-only parameters.
    With `replace` it takes the place of a form that an operator has already; without it a second one is refused.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        inputs = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        own = {p.name.rstrip("_"): p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != _SPECIAL}
        known = {**(attributes or {}), **own}
        required = sum(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in inputs)
        variadic = any(p.kind is p.VAR_POSITIONAL for p in inputs)
        names = tuple(p.name for p in inputs)
        needed = frozenset(p.name for p in inputs if p.default is p.empty and "None" not in str(p.annotation))
        for op_type in op_types:
            before = FORMS.get((domain, op_type))
            once("form", qualified(domain, op_type), before and before.function, function, replace)
            FORMS[domain, op_type] = Form(
                function, tuple(results.split()), writes or {}, opset, names, required, needed, variadic, known
            )
        return function

    return register
