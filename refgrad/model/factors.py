"""Division of a product by one of its factors, without dividing: right where the factor is 0, with every derivative."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

_DEEPEST = 6  # operators between a product and its factor; each doubles what is looked at
_HIGHEST = 8  # power of which a factor is taken

RESHAPES = ("Squeeze", "Unsqueeze", "Reshape")  # they keep the elements and their order
Expression = str | tuple["str | Expression", ...]  # a value's name, or an operator and its operands


class Operation(Protocol):
    """A node, as far as this looks at it."""

    @property
    def op_type(self) -> str:
        """The operator."""

    @property
    def inputs(self) -> Sequence[str]:
        """The values that it reads."""

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Its attributes."""


def cofactor(
    value: str,
    is_factor: Callable[[str], bool],
    producer: Callable[[str], Operation | None],
    constant: Callable[[str], np.ndarray | None],
    reshapes: Collection[str] = (),
    depth: int = _DEEPEST,
) -> Expression | None:
    """The other factors of `value`, if its nodes show it as a product with a given factor; else None.

    The result may have a smaller shape, which broadcasts to the shape of `value`.

    :param is_factor: True for the names of the factor.
    :param reshapes: operators of `RESHAPES` that the product may have gone through, where each element of `value` is known to
        face the element of the factor at the same place in their order.
    :param producer: the node that computes a value, None for an input.
    :param constant: the array behind a value that is known before the model runs.
    """
    node = producer(value) if depth else None
    if node is None:
        return None

    def within(name: str) -> Expression | None:
        return cofactor(name, is_factor, producer, constant, reshapes, depth - 1)

    reads = node.inputs
    match node.op_type:
        case "Identity":
            return within(reads[0])
        case op_type if op_type in reshapes and not node.attributes:
            inner = within(reads[0])
            return None if inner is None else (op_type, ("Expand", inner, ("Shape", reads[0])), *reads[1:])
        case "Neg":
            inner = within(reads[0])
            return None if inner is None else ("Neg", inner)
        case "Mul":
            for one, other in (reads, reads[::-1]):
                if is_factor(one):
                    return other
            for one, other in (reads, reads[::-1]):
                inner = within(one)
                if inner is not None:
                    return "Mul", inner, other
            return None
        case "Where":  # 0 where it masks
            for place in (1, 2):
                masked = constant(reads[place])
                if masked is not None and not masked.any():
                    inner = within(reads[3 - place])
                    parts = (reads[1], inner) if place == 1 else (inner, reads[2])
                    return None if inner is None else ("Where", reads[0], *parts)
            return None
        case "Div":
            inner = within(reads[0])
            return None if inner is None else ("Div", inner, reads[1])
        case "Add" | "Sum":
            terms = [within(name) for name in reads]
            found = [term for term in terms if term is not None]
            return None if len(found) < len(terms) or len(terms) < 2 else (node.op_type, *found)
        case "Pow":
            exponent = constant(reads[1])
            power = exponent.item() if exponent is not None and exponent.size == 1 else 0
            if not is_factor(reads[0]) or power not in range(2, _HIGHEST + 1):
                return None
            rest: Expression = reads[0]
            for _ in range(int(power) - 2):
                rest = "Mul", rest, reads[0]
            return rest
    return None


def viewed(value: str, producer: Callable[[str], Operation | None]) -> str:
    """The value whose elements `value` has, in the same order, behind operators that give them another shape."""
    while (node := producer(value)) is not None and node.op_type in ("Identity", *RESHAPES):
        value = node.inputs[0]
    return value


def written(expression: Expression, emit: Callable[..., str]) -> str:
    """The value of an expression: `emit(operator, *operands)` adds a node and returns the name of its result."""
    if isinstance(expression, str):
        return expression
    operator, *operands = expression
    return emit(operator, *(written(operand, emit) for operand in operands))
