"""The causes of a NaN or an infinity from finite numbers, or of a NaN from infinities: operator by operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper

from refgrad import traits
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.problems.rounding import limits
from refgrad.errors import RefgradError
from refgrad.tables.randomness import operator_of

_DOMAINS = {
    "Acos": "[−1, 1]",
    "Asin": "[−1, 1]",
    "Acosh": "[1, ∞)",
    "Atanh": "(−1, 1)",
    "Log": "(0, ∞)",
    "Sqrt": "[0, ∞)",
}
_MOVING = traits.MOVING | {"ScatterElements", "ScatterND"}
_SOFTMAX = frozenset(("Softmax", "LogSoftmax", "ReduceLogSumExp"))
_REMEDIES = {
    "0 · ∞": "keep the infinity away: use a large finite number for a mask, or a Where instead of a product",
    "∞ − ∞": "use large finite numbers in place of infinities, or subtract the maximum first",
    "log 0": "add a small number, clip the input, or use an operator that takes logarithms, such as LogSoftmax",
    "log of a negative number": "clip the input from below",
    "root of a negative number": "clip the input at 0; compute a variance about the mean",
    "0/0": "add an epsilon to the denominator",
    "division by 0": "add an epsilon to the denominator, or inside of the root",
    "∞/∞": "divide before the numbers grow, or work with logarithms",
    "overflow": "scale, subtract the maximum before Exp, or compute this part in a wider type",
    "outside of the domain": "clip the input to the domain of the operator",
    "a row of −∞": "leave one element unmasked in each row, or use a large finite number for the mask",
    "power": "keep the base above 0, or the exponent whole",
}


@dataclass(frozen=True)
class Cause:
    """Why an element is not finite: `kind` is a key of the remedies; `operands` are the numbers it is made of, by name."""

    kind: str
    text: str
    at: tuple[int, ...]
    count: int
    operands: Mapping[str, float]

    @property
    def remedy(self) -> str:
        """The usual remedy."""
        return _REMEDIES.get(self.kind, "look at the operands")


def cause_of(node: NodeProto, values: Mapping[str, Any], result: np.ndarray, model: ModelProto) -> Cause | None:
    """Why a node makes something that is not finite of what it reads; None where it only passes it on."""
    domain, op_type = operator_of(node)
    wide = _wide(result)
    floats = {name: _wide(np.asarray(v)) for name, v in values.items() if _is_float(v)}
    if not domain and op_type in _MOVING:
        return None
    if not domain and op_type in traits.ELEMENTWISE:
        return _of_elements(node, op_type, floats, wide, result, values)
    has_nan = any(np.isnan(v).any() for v in floats.values())
    has_inf = any(np.isinf(v).any() for v in floats.values())
    if has_nan or (has_inf and not np.isnan(wide).any()):
        return None
    bad = np.isnan(wide) if has_inf else ~np.isfinite(wide)
    at = _first(bad)
    count = int(bad.sum())
    told = {name: _worst_of(value) for name, value in floats.items() if value.size}
    if has_inf:
        return _of_infinities(op_type, floats, at, count, told)
    exact = _in_double(node, values, model, result)
    if exact is not None and exact.shape == wide.shape and np.isfinite(exact[at]):
        most = limits(result.dtype)[2]
        if abs(exact[at]) > most:
            text = f"overflow: it is {exact[at]:.4g}, and {result.dtype.name} ends at {most:.4g}"
        else:
            text = f"overflow on the way: in double it is {exact[at]:.4g}"
        return Cause("overflow", text, at, count, told)
    zeros = any(v.size and (v == 0).any() for v in floats.values())
    kind = "0/0" if np.isnan(wide[at]) and zeros else "division by 0" if zeros else "outside of the domain"
    return Cause(kind, f"{op_type} has no finite result of these numbers", at, count, told)


def _of_infinities(
    op_type: str, floats: Mapping[str, np.ndarray], at: tuple[int, ...], count: int, told: Mapping[str, float]
) -> Cause:
    first = next(iter(floats.values()))
    if op_type in _SOFTMAX and np.isneginf(first).any():
        return Cause("a row of −∞", "every element that is normalised is −∞", at, count, told)
    zero = any((value == 0).any() for value in floats.values())
    both = [np.isposinf(v).any() and np.isneginf(v).any() for v in floats.values()]
    if len(floats) > 1 and zero:
        return Cause("0 · ∞", "a term of the sum is 0 · ∞", at, count, told)
    if any(both) or op_type not in traits.PRODUCTS:
        return Cause("∞ − ∞", "the sum has ∞ and −∞ in it", at, count, told)
    return Cause("0 · ∞", "a term of the sum is 0 · ∞, or ∞ and −∞ meet", at, count, told)


def _of_elements(
    node: NodeProto,
    op_type: str,
    floats: Mapping[str, np.ndarray],
    wide: np.ndarray,
    result: np.ndarray,
    values: Mapping[str, Any],
) -> Cause | None:
    """The operands of each element are known, by broadcasting."""
    spread: dict[str, np.ndarray] = {}
    for name, value in values.items():
        array = np.asarray(value)
        if array.dtype.kind in "fiub" or name in floats:
            try:
                spread[name] = np.broadcast_to(_wide(array), wide.shape)
            except ValueError:
                return None
    if op_type == "Where":  # it passes on the chosen elements
        return None
    held = [spread[name] for name in floats if name in spread]
    nan = np.logical_or.reduce([np.isnan(v) for v in held], axis=0) if held else np.zeros(wide.shape, bool)
    inf = np.logical_or.reduce([np.isinf(v) for v in held], axis=0) if held else np.zeros(wide.shape, bool)
    bad = (np.isnan(wide) & ~nan) | (np.isinf(wide) & ~nan & ~inf)
    if not bad.any():
        return None
    at = _first(bad)
    operands = {name: float(spread[name][at]) for name in node.input if name in spread}
    numbers = [float(spread[name][at]) for name in node.input if name in spread]  # one name may be read twice
    kind, text = _kind(op_type, numbers, float(wide[at]), result.dtype)
    return Cause(kind, text, at, int(bad.sum()), operands)


def _kind(op_type: str, x: list[float], value: float, dtype: np.dtype[Any]) -> tuple[str, str]:
    infinite = any(np.isinf(v) for v in x)
    zero = any(v == 0 for v in x)
    if op_type == "Mul" and infinite and zero:
        return "0 · ∞", "0 · ∞ is NaN"
    if op_type in traits.SUMS and infinite:
        return "∞ − ∞", "∞ − ∞ is NaN"
    if op_type == "Div" and len(x) == 2:
        if x == [0, 0]:
            return "0/0", "0/0 is NaN"
        if x[1] == 0:
            return "division by 0", f"{x[0]:.4g}/0"
        if infinite:
            return "∞/∞", "∞/∞ is NaN"
    if op_type == "Reciprocal" and x[0] == 0:
        return "division by 0", "1/0"
    if op_type == "Log":
        return (
            ("log 0", "log 0 = −∞") if x[0] == 0 else ("log of a negative number", f"log {x[0]:.4g} is no real number")
        )
    if op_type == "Sqrt":
        return "root of a negative number", f"√{x[0]:.4g} is no real number"
    if op_type == "Pow" and len(x) == 2 and np.isnan(value):
        return "power", f"{x[0]:.4g} to the power of {x[1]:.4g} is no real number"
    if op_type == "Pow" and len(x) == 2 and x[0] == 0:
        return "division by 0", f"0 to the power of {x[1]:.4g}"
    if op_type in _DOMAINS:
        return "outside of the domain", f"{op_type} is defined on {_DOMAINS[op_type]}"
    if np.isinf(value):
        most = limits(dtype)[2]
        return "overflow", f"overflow: {dtype.name} ends at {most:.4g}"
    if infinite:
        return "∞ − ∞", f"{op_type} has no limit there"
    return "outside of the domain", f"{op_type} has no finite result of these numbers"


def _in_double(node: NodeProto, values: Mapping[str, Any], model: ModelProto, result: np.ndarray) -> np.ndarray | None:
    """The result that the node computes of the same numbers in double; None if it cannot."""
    one_node_model = ModelProto(ir_version=model.ir_version)
    one_node_model.opset_import.extend(model.opset_import)
    one_node_model.graph.name = "node"
    one_node_model.graph.node.append(node)
    arrays = {name: np.asarray(value) for name, value in values.items()}
    try:
        for name, value in arrays.items():
            one_node_model.graph.input.append(
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            )
        output = next(filter(None, node.output))
        one_node_model.graph.output.append(
            helper.make_tensor_value_info(output, helper.np_dtype_to_tensor_dtype(result.dtype), None)
        )
        return np.asarray(NumpyBackend().prepare(one_node_model, precision="float64").run(arrays)[output])
    except (RefgradError, KeyError, TypeError, ValueError):
        return None


def _first(bad: np.ndarray) -> tuple[int, ...]:
    return tuple(int(k) for k in np.unravel_index(int(np.argmax(bad)), bad.shape))


def _worst_of(value: np.ndarray) -> float:
    """The element of an operand that tells most: an infinity, a 0, or the largest."""
    flat = value.reshape(-1)
    for bad in (np.isinf(flat), flat == 0):
        if bad.any():
            return float(flat[int(np.argmax(bad))])
    return float(flat[int(np.argmax(np.abs(flat)))])


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) and (
        np.asarray(value).dtype.kind == "f" or np.asarray(value).dtype.name == "bfloat16"
    )


def _wide(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float64)
