"""Errors for a rule or a lowering that asks `op` for something that it cannot give: they name the rule and the node."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Protocol

import numpy as np
import onnx

from refgrad.errors import BrokenRuleError, InvalidModelError, RuleError, UnknownOperatorError, choices, did_you_mean
from refgrad.protos.traverse import attribute_of
from refgrad.tables.dialects import DIALECTS
from refgrad.tables.schemas import find_schema, type_name


class ErrorContext(Protocol):
    """The part of an emitter that the errors read."""

    @property
    def rule(self) -> str:
        """The operator whose rule emits."""

    @property
    def node(self) -> str:
        """The node whose derivative is emitted."""


def no_such_method(op: ErrorContext, name: str) -> Exception:
    """The error for `op.<name>`, which is neither an operator of ai.onnx nor a method of the emitter."""
    if name.startswith("_"):  # Python looks for such names itself
        return AttributeError(f"the emitter has no attribute {name!r}")
    operators = {schema.name for schema in onnx.defs.get_all_schemas()}
    methods = {method for method in dir(type(op)) if not method.startswith("_")}
    return UnknownOperatorError(
        f"{_place(op)} uses op.{name}, which is neither an operator of ai.onnx nor a method of op."
        f"{_nearest(name, operators | methods)}"
    )


def no_such_node(
    op: ErrorContext, op_type: str, opset: int, inputs: Sequence[object], outputs: int, attributes: Collection[str]
) -> BrokenRuleError | None:
    """The error for a node that the operator's schema in this opset does not allow; None where it does."""
    try:
        schema = onnx.defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        history = onnx.defs.get_all_schemas_with_history()
        first = min(one.since_version for one in history if one.name == op_type and not one.domain)
        return BrokenRuleError(
            f"{_place(op)} uses op.{op_type}, which ai.onnx has from opset {first} on: here it is opset {opset}."
        )
    count = max((k for k, value in enumerate(inputs, 1) if value is not None), default=0)
    takes = ", ".join(part.name for part in schema.inputs) or "nothing"
    if unknown := sorted(set(attributes) - set(schema.attributes)):
        what = f"the attribute {unknown[0]!r}"
    elif not schema.min_input <= count <= schema.max_input:
        what = f"{count} inputs"
    elif outputs > schema.max_output:
        what = f"{outputs} outputs"
    else:
        return None
    near = did_you_mean(unknown[0], sorted(schema.attributes)) if unknown else ""
    return BrokenRuleError(
        f"{_place(op)} gives op.{op_type} {what}. In opset {opset} it takes {takes}, has the attributes "
        f"{choices(sorted(schema.attributes))}, and returns {', '.join(part.name for part in schema.outputs)}.{near}"
    )


def no_such_setting(op: ErrorContext, op_type: str, domain: str, name: str, value: object) -> BrokenRuleError | None:
    """The error for an attribute that cannot be written, or is of another type than the operator's; None where it is right."""
    due = _types_of(op_type, domain).get(name, "")
    if _WRITTEN.get(value.__class__) == due or (
        due == "INTS" and isinstance(value, list) and {*map(type, value)} <= {int}
    ):
        return None
    try:
        given = onnx.AttributeProto.AttributeType.Name(attribute_of(name, value).type)
    except (TypeError, ValueError):
        takes = (
            f"which takes {due}"
            if due
            else "and an attribute is a number, a string, a tensor, a graph, or a list of them"
        )
        return BrokenRuleError(f"{_place(op)} gives op.{op_type} {name}={value!r}, {takes}.")
    if not due or given == due or (isinstance(value, list | tuple) and not value and due.endswith("S")):
        return None
    return BrokenRuleError(f"{_place(op)} gives op.{op_type} {name}={value!r}, which is {given}: it takes {due}.")


_WRITTEN = {
    int: "INT",
    float: "FLOAT",
    str: "STRING",
    onnx.TensorProto: "TENSOR",
    onnx.GraphProto: "GRAPH",
}  # what the attributes of most nodes are


@cache
def _types_of(op_type: str, domain: str) -> dict[str, str]:
    """The types of an operator's attributes, by their names; none where it has no schema."""
    schema = find_schema(op_type, domain)
    return {} if schema is None else {name: type_name(each) for name, each in schema.attributes.items()}


def no_such_primitive(op: ErrorContext, name: str) -> Exception:
    """The error for `op.grad.<name>`, which is no gradient primitive."""
    if name.startswith("_"):
        return AttributeError(f"op.grad has no attribute {name!r}")
    known = sorted(DIALECTS["onnx"].lowerings)
    return UnknownOperatorError(
        f"{_place(op)} uses op.grad.{name}, which is no gradient primitive.{_nearest(name, known)} "
        f"There are {', '.join(known)}."
    )


def not_a_value(op: ErrorContext, name: str, taken: Collection[str]) -> BrokenRuleError:
    """The error for an argument that is a string but names no value."""
    return BrokenRuleError(
        f"{_place(op)} reads {name!r}, which no node, input or constant is called.{did_you_mean(name, sorted(taken))}"
    )


def refuse_parts(op: ErrorContext, argument: Sequence[object]) -> None:
    """Nothing, where a list that is to be a constant holds numbers, or lists of numbers.

    :raises BrokenRuleError: it holds names of values, or arrays.
    """
    for part in argument:
        if part.__class__ is int or part.__class__ is float:
            continue
        if isinstance(part, str):
            names = choices([str(one) for one in argument], limit=3)
            raise BrokenRuleError(
                f"{_place(op)} gives several values as one argument: {names}. "
                "An operator with several outputs returns a tuple: take one of them, or unpack it with *."
            )
        if isinstance(part, np.ndarray):
            raise BrokenRuleError(
                f"{_place(op)} makes a constant of a list with an array of shape {part.shape}: put it together with NumPy."
            )
        if isinstance(part, list | tuple):
            refuse_parts(op, part)


def no_type(op: ErrorContext, value: object) -> BrokenRuleError:
    """The error for a constant of Python floats that is to have the type of no other value."""
    return BrokenRuleError(
        f"{_place(op)} makes a constant of {value!r}, which could be of any float type: "
        "give it the type of a value with op.const(..., like=...), or a type of its own as a NumPy array."
    )


def numbers_alone(op: ErrorContext, op_type: str, inputs: Sequence[object]) -> RuleError:
    """The error for a number that gets its type from no operand."""
    number = next(part for part in inputs if isinstance(part, int | float) and not isinstance(part, bool))
    return RuleError(
        f"{_place(op)} gives op.{op_type} the number {number!r}, and no operand says of which type it is. "
        f"Write op.const({number!r}, like=x), where x is a value that has the type."
    )


def numbers(op: ErrorContext, value: float | Sequence[int] | np.ndarray | np.generic, dtype: np.dtype) -> np.ndarray:
    """The numbers that a rule wrote, as an array of type `dtype`.

    :raises BrokenRuleError: they would lose their fractions, or are no numbers.
    """
    if value is None:
        raise BrokenRuleError(f"{_place(op)} gives None; expected a number.")
    if isinstance(value, list | tuple):
        refuse_parts(op, value)
    given = np.asarray(value)
    if given.dtype.kind == "f" and dtype.kind in "iub" and not all(map(float.is_integer, given.ravel().tolist())):
        raise not_integers(op, value, dtype)
    try:
        return np.asarray(value, dtype=dtype)
    except OverflowError as error:
        raise InvalidModelError(
            f"{_place(op)} needs the number {reprlib.repr(value)}, which {dtype.name} cannot hold: the sizes that the model "
            "declares are too large."
        ) from error


def not_integers(op: ErrorContext, value: object, dtype: np.dtype) -> BrokenRuleError:
    """The error for numbers that would lose their fraction."""
    return BrokenRuleError(
        f"{_place(op)} gives {value!r}; expected {dtype.name}, the type of the value beside it. Its fraction would be "
        "lost: cast that value first, with op.as_type or op.Cast."
    )


def _place(op: ErrorContext) -> str:
    return f"The rule for {op.rule} of node {op.node!r}"


def _nearest(name: str, names: Iterable[str]) -> str:
    """The names that are close to `name`, as a question; nothing where there are none."""
    known: Collection[str] = sorted(names)
    close = difflib.get_close_matches(name, known, n=3) or [k for k in known if k.lower() == name.lower()]
    return f" Did you mean {' or '.join(close)}?" if close else ""
