"""Operators that refgrad defines by a function of ai.onnx operators: those of ONNX Runtime, of ai.onnx.ml and of training.

`@operator` makes a schema and a function body of a Python function. Its parameters are the inputs (optional where the default
is None, variadic where starred) and, keyword-only, the attributes; the body is what it emits through its first parameter. The
body gives the types and shapes of the operator's results, and its derivative where there is no rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper
from onnx.defs import OpSchema

from refgrad.protos.domains import MICROSOFT
from refgrad.tables.once import once, qualified
from refgrad.tables.schemas import DECLARED

_FLOATS = ("tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)")
_OTHERS = ("tensor(int32)", "tensor(int64)", "tensor(bool)", "tensor(uint8)", "tensor(int8)")


class UnsupportedFormError(Exception):
    """A form of an operator that its body does not cover; the message says which, and what to do."""


@dataclass(frozen=True)
class Definition:
    """An operator that refgrad defines: its schema, and the function that emits its body."""

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
        """The reason why `node` is not a valid node of this operator, or "": onnx.checker does not know the operator."""
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


DEFINITIONS: dict[tuple[str, str], Definition] = {}


def operator(
    op_type: str, *outputs: str, others: Iterable[str] = (), domain: str = MICROSOFT, replace: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define an operator by the decorated function.

    :param outputs: their names; a question mark behind one makes it optional.
    :param others: the inputs and outputs that do not hold floats.
    :param replace: take the place of a body that the operator has already; without it a second one is refused.
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
        before = DEFINITIONS.get((domain, op_type))
        once("function body", qualified(domain, op_type), before and before.function, function, replace)
        DECLARED[domain, op_type] = schema
        DEFINITIONS[domain, op_type] = Definition(
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
