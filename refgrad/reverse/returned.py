"""The cotangents that a rule returned, paired with the inputs of the node, or an error that says what is wrong."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from refgrad.errors import BrokenRuleError, choices, did_you_mean
from refgrad.tables.registry import Rule

_PAIRS = "differentiate gives pairs: the name of a value that the node reads, and the cotangent of that value or None"


def adjoints_of(
    rule: Rule,
    places: Sequence[tuple[int, bool]],
    result: Any,
    node: str,
    inputs: Sequence[str],
    known: Container[str],
) -> Iterator[tuple[str, str | None]]:
    """The inputs of a node and the cotangents that its rule returned for them.

    :param places: position and whether it is variadic, of each input that is differentiable.
    :param node: the name of the node, for messages.
    :param inputs: the inputs of the node.
    :param known: the names of all values there are.
    :raises BrokenRuleError: `result` has another number of cotangents, or one that is neither the name of a value nor None.
    """
    if len(places) == 1 and not (isinstance(result, tuple) and len(result) == 1):
        result = (result,)
    if not isinstance(result, tuple) or len(result) != len(places):
        what = f"{len(result)} cotangents" if isinstance(result, tuple) else _described(result)
        raise BrokenRuleError(
            f"The rule for {rule.op_type} returned {what} for node {node!r}; "
            f"{_due(rule, places)}: return a tuple of {len(places)}, with None where one is zero."
        )
    for name, (position, variadic), adjoint in zip(rule.wrt, places, result, strict=False):
        if not variadic:
            if position < len(inputs):
                if adjoint is not None and not (adjoint.__class__ is str and adjoint in known):
                    raise _wrong(f"rule for {rule.op_type}", f"input {name}", node, adjoint, known)
                yield inputs[position], adjoint
            continue
        rest = inputs[position:]
        if not isinstance(adjoint, list | tuple) or len(adjoint) != len(rest):
            what = f"a list of {len(adjoint)}" if isinstance(adjoint, list | tuple) else _described(adjoint)
            raise BrokenRuleError(
                f"The rule for {rule.op_type} returned {what} for the variadic input {name} of node {node!r}; "
                f"return a list of {len(rest)} cotangents, with None where one is zero."
            )
        for k, each in enumerate(adjoint):
            if each is not None and not (each.__class__ is str and each in known):
                raise _wrong(f"rule for {rule.op_type}", f"input {name}[{k}]", node, each, known)
            yield rest[k], each


def adjoints_by_control_flow_rule(
    rule: str, result: Any, node: str, reads: Sequence[str], known: Container[str]
) -> Iterator[tuple[str, str | None]]:
    """The inputs of a node, each with the cotangent that its control-flow rule gave.

    :param rule: the name of the control-flow rule's class, for messages.
    :param reads: what the node reads, in its graphs too.
    :param known: the names of all values there are.
    :raises BrokenRuleError: `result` is not a series of pairs, each the name of a value that the node reads and the name of a
        value or None.
    """
    if isinstance(result, str) or not isinstance(result, Iterable):
        raise BrokenRuleError(
            f"The control-flow rule {rule} returned {_described(result)} for node {node!r}; {_PAIRS}."
        )
    for pair in result:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise BrokenRuleError(
                f"The control-flow rule {rule} returned {_described(pair)} as a pair for node {node!r}; {_PAIRS}."
            )
        name, adjoint = pair
        if name.__class__ is not str or name not in reads:
            raise BrokenRuleError(
                f"The control-flow rule {rule} returned a cotangent of {_described(name)} for node {node!r}, which reads "
                f"{choices(dict.fromkeys(reads))}; {_PAIRS}."
            )
        if adjoint is not None and not (adjoint.__class__ is str and adjoint in known):
            raise _wrong(f"control-flow rule {rule}", f"value {name!r}", node, adjoint, known)
        yield name, adjoint


def _due(rule: Rule, places: Sequence[tuple[int, bool]]) -> str:
    return f"expected one each for {', '.join(rule.wrt)}" if places else "expected none"


def _wrong(giver: str, place: str, node: str, adjoint: Any, known: Container[str]) -> BrokenRuleError:
    said = f"The {giver} returned {_described(adjoint)} for {place} of node {node!r}{_hint(adjoint, known)}"
    return BrokenRuleError(
        f"{said}{'' if said.endswith('?') else '.'} "
        "A cotangent is the name of a value that a method of op returned, or None where it is zero."
    )


def _described(value: Any) -> str:
    match value:
        case None:
            return "None"
        case str():
            return f"the name {value!r}"
        case bool() | int() | float():
            return f"the number {value!r}"
        case tuple() | list():
            kind = "a tuple" if isinstance(value, tuple) else "a list"
            return f"{kind} of {len(value)}"
    shape = getattr(value, "shape", None)
    return f"an array of shape {shape}" if isinstance(shape, tuple) else f"an object of type {type(value).__name__}"


def _hint(value: Any, known: Container[str]) -> str:
    match value:
        case str():
            close = did_you_mean(value, known) if isinstance(known, set | frozenset | dict) else ""
            return f", which no node, input or constant is called.{close}".removesuffix(".")
        case tuple():
            return ": take one of them"
        case list():
            return ", which is not variadic"
        case bool() | int() | float():
            return ": a number is emitted with op.full_like"
    return ": an array is emitted with op.const" if hasattr(value, "shape") else ""
