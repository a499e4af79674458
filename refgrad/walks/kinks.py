"""The elements that a node reads at which its operator has no derivative, and the choice that the gradient makes there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.problems.kinked import kinked
from refgrad.errors import RefgradError
from refgrad.tables.kinks import KINKS
from refgrad.tables.kinks import KinkRow as Row
from refgrad.tables.torch_functions import FOLLOWED, exported_function
from refgrad.walks.records import Kink

_LISTED = 64  # elements that one kink names
_SEARCHED = 256  # elements of an input that is searched for kinks where no condition tells
Inputs = Sequence[Any]
Condition = Callable[[Inputs, Mapping[str, Any]], Mapping[int, np.ndarray]]


def kinks_at(
    node: NodeProto,
    names: Sequence[str],
    inputs: Inputs,
    attributes: Mapping[str, Any],
    asked: Sequence[int],
    opsets: ModelProto,
    convention: str = "refgrad",
) -> Iterator[tuple[Kink, np.ndarray]]:
    """The kinks among what a node reads: each with an array of bool that says where.

    :param names: what the inputs are called, `inputs` their arrays in float64.
    :param asked: the positions of the inputs that get a contribution.
    :param opsets: a model that imports the domains that the node needs.
    :param convention: whose choice the gradient takes.
    """
    rows = _rows().get(f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type, ())
    known = {
        row.where: _CONDITIONS[row.operator, row.where] for row in rows if (row.operator, row.where) in _CONDITIONS
    }
    if not rows:
        return
    if known:
        for row in rows:
            if row.where not in known:
                continue
            for position, mask in known[row.where](inputs, attributes).items():
                if position in asked and mask.any():
                    yield _kink(row.operator, row.where, _choice(row, node, convention), names[position], mask)
        return
    where = ", or ".join(dict.fromkeys(row.where for row in rows))
    reason = "; ".join(dict.fromkeys(_reason(row, node, convention) for row in rows))
    for position in asked:
        found = _searched(node, names, inputs, position, opsets)
        if found is not None and found.any():
            yield _kink(node.op_type, where, reason, names[position], found)


def _kink(operator: str, where: str, choice: str, name: str, mask: np.ndarray) -> tuple[Kink, np.ndarray]:
    found = np.argwhere(mask)
    more = f" ({len(found)} elements)" if len(found) > _LISTED else ""
    elements = tuple(tuple(int(k) for k in at) for at in found[:_LISTED])
    return Kink(name, elements, f"{operator} at {where}{more}: {choice}"), mask


def _reason(row: Row, node: NodeProto, convention: str) -> str:
    function = exported_function(node) if convention == "torch" else ""
    for name, _, followed in FOLLOWED:
        if name == function and followed.operator == row.operator:
            return f"as torch's {name}: {followed.reason}"
    return row.reason if repr(row.choice(convention)) == repr(row.ours) else f"as {convention} has it"


def _choice(row: Row, node: NodeProto, convention: str) -> str:
    """The reason for the choice, and the derivative that is taken if attributes and other inputs do not decide about it."""
    reason = _reason(row, node, convention)
    if reason != row.reason:
        return reason
    first = row.ours[0]
    if row.attributes or not isinstance(first, float) or len(row.ours) > 1:
        return row.reason
    return f"the derivative {first:g} is taken: {row.reason}"


@cache
def _rows() -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in KINKS:
        found.setdefault(row.operator, []).append(row)
    return found


def _searched(
    node: NodeProto, names: Sequence[str], inputs: Inputs, position: int, opsets: ModelProto
) -> np.ndarray | None:
    """The mask of elements where the node alone has different derivatives on the two sides; None where that cannot be told."""
    array = inputs[position]
    if not isinstance(array, np.ndarray) or not 0 < array.size <= _SEARCHED:
        return None
    model = ModelProto(ir_version=opsets.ir_version)
    model.opset_import.extend(opsets.opset_import)
    made = model.graph
    made.name = "node"
    made.node.append(node)
    at: dict[str, Any] = {}
    for name, value in zip(names, inputs, strict=True):
        if not name or name in at:
            continue
        if not isinstance(value, np.ndarray):
            return None
        at[name] = value
        made.input.append(
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        )
    outputs = list(filter(None, node.output))[:1]
    made.output.append(helper.make_tensor_value_info(outputs[0], TensorProto.DOUBLE, None))
    try:
        prepared = NumpyBackend().prepare(model, precision="float64")
        return kinked(model, prepared, at, [names[position]], outputs).get(names[position])
    except RefgradError:
        return None


_CONDITIONS: dict[tuple[str, str], Condition] = {}


def _condition(operators: str, where: str) -> Callable[[Condition], Condition]:
    def add(function: Condition) -> Condition:
        _CONDITIONS.update({(operator, where): function for operator in operators.split()})
        return function

    return add


def _of_element(operators: str, where: str, test: Callable[[np.ndarray, Mapping[str, Any]], np.ndarray]) -> None:
    """A kink of an operator that computes each element by itself."""
    _condition(operators, where)(lambda inputs, attributes: {0: np.asarray(test(inputs[0], attributes))})


_of_element("Relu Abs Sqrt Log Reciprocal Selu", "x = 0", lambda x, a: x == 0)
_of_element("LeakyRelu", "x = 0", lambda x, a: (x == 0) & (a.get("alpha", 0.01) != 1))
_of_element("Elu", "x = 0", lambda x, a: (x == 0) & (a.get("alpha", 1.0) != 1))
_of_element("ThresholdedRelu", "x = α", lambda x, a: x == a.get("alpha", 1.0))
_of_element("Shrink", "|x| = λ", lambda x, a: np.abs(x) == a.get("lambd", 0.5))
_of_element("HardSwish", "|x| = 3", lambda x, a: np.abs(x) == 3)
_of_element("Asin Acos Atanh", "|x| = 1", lambda x, a: np.abs(x) == 1)
_of_element("Acosh", "x = 1", lambda x, a: x == 1)
_of_element("ReduceL1", "an element is 0", lambda x, a: x == 0)


@_condition("HardSigmoid", "the ends of the slope")
def _hard_sigmoid(inputs: Inputs, attributes: Mapping[str, Any]) -> Mapping[int, np.ndarray]:
    line = inputs[0] * attributes.get("alpha", 0.2) + attributes.get("beta", 0.5)
    return {0: (line == 0) | (line == 1)}


@_condition("PRelu", "x = 0")
def _prelu(inputs: Inputs, attributes: Mapping[str, Any]) -> Mapping[int, np.ndarray]:
    return {0: (inputs[0] == 0) & np.broadcast_to(inputs[1] != 1, inputs[0].shape)}


@_condition("Pow", "x = 0")
def _pow(inputs: Inputs, attributes: Mapping[str, Any]) -> Mapping[int, np.ndarray]:
    x, y = np.broadcast_arrays(inputs[0], inputs[1])
    bent = (x == 0) & ~((y == np.floor(y)) & (y >= 0))
    return {0: _back(bent, inputs[0]), 1: _back((x == 0) & (y <= 0), inputs[1])}


@_condition("Pow", "x < 0, y whole")
def _pow_of_negative(inputs: Inputs, attributes: Mapping[str, Any]) -> Mapping[int, np.ndarray]:
    return {1: _back((inputs[0] < 0) & (inputs[1] == np.floor(inputs[1])), inputs[1])}


@_condition("Mod", "x = 2·y")
def _mod(inputs: Inputs, attributes: Mapping[str, Any]) -> Mapping[int, np.ndarray]:
    x, y = np.broadcast_arrays(inputs[0], inputs[1])
    bent = (np.fmod(x, y) == 0) & ((x != 0) | (not attributes.get("fmod", 0)))
    return {0: _back(bent, inputs[0]), 1: _back(bent, inputs[1])}


def _ties(pick: Any) -> Condition:
    def condition(inputs: Inputs, attributes: Mapping[str, Any]) -> Mapping[int, np.ndarray]:
        spread = np.broadcast_arrays(*inputs)
        chosen = pick.reduce(spread)
        found = {}
        for k, mine in enumerate(spread):
            others = [other for other, given in zip(spread, inputs, strict=True) if given is not inputs[k]]
            tied = np.logical_or.reduce([other == mine for other in others]) if others else np.zeros(mine.shape, bool)
            found[k] = _back((mine == chosen) & tied, inputs[k])
        return found

    return condition


_condition("Max", "x = y")(_ties(np.maximum))
_condition("Min", "x = y")(_ties(np.minimum))


def _axes(inputs: Inputs, attributes: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The axes along which a node reduces: None for all, () for none."""
    given = attributes.get("axes") if len(inputs) < 2 or inputs[1] is None else inputs[1]
    if given is not None and len(given):
        return tuple(int(axis) for axis in given)
    return () if attributes.get("noop_with_empty_axes") else None


def _extreme(kind: Any) -> Condition:
    def condition(inputs: Inputs, attributes: Mapping[str, Any]) -> Mapping[int, np.ndarray]:
        x = inputs[0]
        axes = _axes(inputs, attributes)
        if axes == () or not x.size:
            return {}
        at_most = x == kind(x, axis=axes, keepdims=True)
        return {0: at_most & (at_most.sum(axis=axes, keepdims=True) > 1)}

    return condition


_condition("ReduceMax", "two elements are the largest")(_extreme(np.max))
_condition("ReduceMin", "two elements are the smallest")(_extreme(np.min))


@_condition("ReduceLogSum", "the sum is 0")
def _empty_sum(inputs: Inputs, attributes: Mapping[str, Any]) -> Mapping[int, np.ndarray]:
    axes = _axes(inputs, attributes)
    return {} if axes == () else {0: np.broadcast_to(inputs[0].sum(axis=axes, keepdims=True) == 0, inputs[0].shape)}


@_condition("LpNormalization", "x = 0")
def _no_direction(inputs: Inputs, attributes: Mapping[str, Any]) -> Mapping[int, np.ndarray]:
    flat = ~inputs[0].any(axis=attributes.get("axis", -1), keepdims=True)
    return {0: np.broadcast_to(flat, inputs[0].shape)}


@_condition("LpNormalization", "p = 1, an element is 0")
def _edge_of_direction(inputs: Inputs, attributes: Mapping[str, Any]) -> Mapping[int, np.ndarray]:
    if attributes.get("p", 2) != 1:
        return {}
    return {0: (inputs[0] == 0) & inputs[0].any(axis=attributes.get("axis", -1), keepdims=True)}


@_condition("Clip", "x = min, x = max")
def _clip(inputs: Inputs, attributes: Mapping[str, Any]) -> Mapping[int, np.ndarray]:
    at = {k: inputs[0] == inputs[k] for k in (1, 2) if k < len(inputs) and inputs[k] is not None}
    found = {k: np.full(np.shape(inputs[k]), mask.any()) for k, mask in at.items()}
    return found | {0: np.logical_or.reduce([np.zeros(inputs[0].shape, bool), *at.values()])}


def _back(mask: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The mask of the elements of a broadcast operand that are used at a True element of `mask`."""
    lead = mask.ndim - like.ndim
    axes = tuple(range(lead)) + tuple(k + lead for k, size in enumerate(like.shape) if size == 1)
    return np.asarray(mask.any(axis=axes, keepdims=True)).reshape(like.shape)
