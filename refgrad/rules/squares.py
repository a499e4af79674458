"""Values that are sums of squares by the way they are computed, as a variance is."""

from __future__ import annotations

from refgrad import traits
from refgrad.model.graph import Graph

_DEEPEST = 64  # nodes from a root back to its squares
# Sums of squares where their operands are: sums, and what moves elements.
_SUMS = (traits.SUMS - {"Sub"}) | (
    {"AveragePool", "Concat", "CumSum", "GlobalAveragePool", "Max", "Min", "Mul"}
    | {"ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"}
)
_MOVES = traits.MOVING - {"Pad"} | traits.CASTS | {"Clip", "Div", "Relu"}  # what Pad fills in may be negative
_ROOTS = frozenset(("Sqrt", "Acos", "Acosh", "Asin"))  # infinite slopes where they are finite
_SIZES = frozenset(  # what computes a number of elements
    (
        *("Shape", "Size", "Constant", "Cast", "CastLike", "Gather", "Slice", "ReduceProd", "Squeeze", "Unsqueeze"),
        *("Reshape", "Concat", "Add", "Sub", "Mul", "Div", "Max", "Identity"),
    )
)


def is_sum_of_squares(graph: Graph, name: str) -> bool:
    """True if a value is a sum or a mean of squares, times positive numbers: it is 0 only where all squares are.

    Its root has a kink there, and is defined on every side.
    """
    return _holds(graph, name, _DEEPEST)


def _holds(graph: Graph, name: str, depth: int) -> bool:
    node = graph.producer.get(name)
    if node is None or node.domain or not depth:
        return False
    op_type, inputs = node.op_type, [one for one in node.inputs if one]
    if op_type == "ReduceSumSquare" or (op_type == "Mul" and inputs[0] == inputs[1]):
        return not _is_root(graph, inputs[0], depth)
    if op_type == "Pow":
        exponent = graph.constant(inputs[1])
        even = exponent is not None and bool(((exponent % 2 == 0) & (exponent > 0)).all())
        return even and not _is_root(graph, inputs[0], depth)
    summands = inputs if op_type in ("Add", "Sum", "Mean", "Max", "Min", "Mul", "Concat") else inputs[:1]
    if op_type == "Div" and not _is_size(graph, inputs[1], depth):
        return False
    if op_type in _MOVES or op_type in _SUMS:
        known = [_holds(graph, one, depth - 1) for one in summands]
        numbers = op_type in ("Mul", "Max") and any(known)  # times a positive number, or no less than 0
        return all(
            found or (numbers and _is_number(graph, one, op_type, depth))
            for found, one in zip(known, summands, strict=True)
        )
    return False


def _is_root(graph: Graph, name: str, depth: int) -> bool:
    """True if a value has an infinite slope where a root in it is 0: its square does not have the slope 0 there."""
    node = graph.producer.get(name)
    if node is None or node.domain or not depth:
        return False
    if node.op_type == "Pow":
        exponent = graph.constant(node.inputs[1])
        return exponent is None or bool((exponent < 1).any())
    if node.op_type in _ROOTS:
        return True
    reads = node.inputs[:1] if node.op_type == "Div" else node.inputs
    passes = node.op_type in _SUMS or node.op_type in _MOVES or node.op_type in ("Sub", "Neg", "Where")
    return passes and any(_is_root(graph, one, depth - 1) for one in reads if one)


def _is_number(graph: Graph, name: str, op_type: str, depth: int) -> bool:
    array = graph.constant(name)
    if op_type == "Max":
        return array is not None and bool((array <= 0).all())
    return _is_size(graph, name, depth)


def _is_size(graph: Graph, name: str, depth: int) -> bool:
    """True if a value is a positive constant, or computed from sizes."""
    array = graph.constant(name)
    if array is not None:
        return bool((array > 0).all())
    node = graph.producer.get(name)
    if node is None or node.domain or not depth or node.op_type not in _SIZES:
        return False
    if node.op_type in traits.SIZES:
        return True
    return all(graph.constant(one) is not None or _is_size(graph, one, depth - 1) for one in node.inputs if one)
