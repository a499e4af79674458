"""Forms: ONNX Runtime's training operators written in ai.onnx operators, for `refgrad.lower`.

A form is a function. Its first parameter is the emitter, then come the operator's inputs (None by default: optional;
starred: variadic) and, keyword-only, its attributes; `_node`, which is not an attribute, is the node itself. Attributes that
are passed on are double-starred, and listed where the form is registered. Where the operator is a primitive the form emits
that; otherwise it emits ai.onnx operators.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from refgrad.builder.op import Emitter
from refgrad.model.graph import MIN_OPSET, Node
from refgrad.protos.domains import MICROSOFT
from refgrad.rewrites.results import Result
from refgrad.tables.definitions import NODE, FunctionSignature
from refgrad.tables.once import once, qualified
from refgrad.tables.schemas import wrong_kind

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Form:
    """How an operator is lowered.

    `results` are the known types and shapes of the outputs, `rest` is for any number of outputs after them. `writes` maps
    the outputs that ONNX Runtime computes in the memory of an input to that input. `opset` is the lowest that the form
    needs, by the attributes.
    """

    function: Callable[..., Any]
    signature: FunctionSignature
    results: tuple[Result, ...]
    rest: Result | None
    writes: Mapping[int, str]
    opset: Callable[[Mapping[str, Any]], int]

    def mismatch(self, node: Node) -> str:
        """The reason why `node` is not a valid node of this operator, or ""."""
        if wrong := self.signature.mismatch(node.attributes, node.inputs):
            return wrong
        if wrong := wrong_kind(node.proto.attribute, self.signature.defaults):
            return wrong
        if len(node.outputs) > len(self.results) and self.rest is None:
            return f"the node has {len(node.outputs)} outputs, of {len(self.results)}"
        return ""

    def result(self, position: int) -> Result | None:
        """The known type and shape of the output at `position`, or None."""
        return self.results[position] if position < len(self.results) else self.rest

    def lower(self, op: Emitter, node: Node) -> tuple[str | None, ...]:
        """Emit what `node` computes; the values of its outputs."""
        inputs: list[str | None] = [name or None for name in node.inputs]
        names = inspect.signature(self.function).parameters
        keywords: dict[str, Any] = {}
        for name, default in self.signature.defaults.items():
            keywords[f"{name}_" if f"{name}_" in names else name] = node.attributes.get(name, default)
        if NODE in names:
            keywords[NODE] = node
        made = self.function(op, *inputs, **keywords)
        return made if isinstance(made, tuple) else (made,)


FORMS: dict[tuple[str, str], Form] = {}


def form(
    *op_types: str,
    results: Sequence[Result] = (),
    rest: Result | None = None,
    writes: Mapping[int, str] | None = None,
    domains: Sequence[str] = (MICROSOFT,),
    opset: Callable[[Mapping[str, Any]], int] = lambda attributes: MIN_OPSET,
    attributes: Mapping[str, Any] | None = None,
    replace: bool = False,
) -> Callable[[F], F]:
    """Register the decorated function as the form of these operators.

    :param results: the type and shape of each output, as far as they are known before the operator is lowered.
    :param rest: the same for any number of outputs after these.
    :param attributes: those that the function takes as `**`, with their defaults; the others are its keyword-only parameters.
    :param replace: take the place of a form that an operator has already; without it a second one is refused.
    """

    def register(function: F) -> F:
        made = Form(function, FunctionSignature.of(function, attributes), tuple(results), rest, writes or {}, opset)
        for domain in domains:
            for op_type in op_types:
                before = FORMS.get((domain, op_type))
                once("form", qualified(domain, op_type), before and before.function, function, replace)
                FORMS[domain, op_type] = made
        return function

    return register
