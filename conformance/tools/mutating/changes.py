"""A change is one small mistake in an emission, or in a cotangent that a rule returns.

`CHANGES` and `BODY_CHANGES` have the changes of an emission by operator. `RETURNED` has the changes of a cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from refgrad import traits
from refgrad.builder.function import FunctionEmitter
from refgrad.builder.op import Emitter
from refgrad.model.external import array_of

_ENDLESS = 2**31 - 1  # from here a bound means "to the end"

# Changes of an emission


Emits = Emitter | FunctionEmitter  # of a rule, of a body


def emit_unchanged(op: Emits, *arguments: Any, **options: Any) -> Any:
    """Emit without another change."""
    kind = FunctionEmitter if isinstance(op, FunctionEmitter) else Emitter
    return kind.emit(op, *arguments, **options)  # type: ignore[arg-type]


@dataclass
class EmittedCall:
    """A call of `Emitter.emit` before it is made. `ranks` has the ranks of its operands, if a run has shown them."""

    op: Emits
    op_type: str
    domain: str
    inputs: list[Any]
    outputs: int
    attributes: dict[str, Any]
    optional_outputs: bool
    ranks: Sequence[int | None]

    def emit(self) -> Any:
        """Make the call without another change."""
        return emit_unchanged(
            self.op, self.op_type, self.domain, self.inputs, self.outputs, self.attributes, self.optional_outputs
        )

    def named(self, position: int) -> str:
        """A copy of an operand, under its own name."""
        value = self.inputs[position]
        if isinstance(value, int | float):
            value = self.op.const(value, like=next(v for v in self.inputs if isinstance(v, str)))
        value = value if isinstance(value, str) else self.op.const(value)
        return str(self.op.Identity(value)) if isinstance(self.op, FunctionEmitter) else self.op.copy(value)


Change = Callable[[EmittedCall], Any]  # emits something else; None where the change does not apply


def _swapped(first: int, second: int) -> Change:
    def change(it: EmittedCall) -> Any:
        it.inputs[first], it.inputs[second] = it.inputs[second], it.inputs[first]
        return it.emit()

    return change


def _kept(position: int) -> Change:
    return lambda it: it.named(position) if len(it.inputs) > position else None


def _branch(position: int) -> Change:
    def change(it: EmittedCall) -> Any:
        it.inputs[1] = it.inputs[2] = it.inputs[position]
        return it.emit() if any(isinstance(value, str) for value in it.inputs[1:]) else None

    return change


def _instead(op_type: str) -> Change:
    def change(it: EmittedCall) -> Any:
        it.op_type = op_type
        return it.emit()

    return change


def _other_axis(it: EmittedCall) -> Any:
    """The next axis, in an attribute or in a constant operand (of a reduction, Slice, Pad or Squeeze)."""
    rank = it.ranks[0] if it.ranks else None
    if rank is not None and it.op_type == "Unsqueeze" and (added := _constant(it, 1)) is not None:
        rank += added.size
    if rank is None or rank < 2:
        return None
    for name in ("axis", "axes"):
        if it.attributes.get(name) is not None:
            it.attributes[name] = ((np.asarray(it.attributes[name]) + 1) % rank).tolist()
            return it.emit()
    place = 3 if it.op_type in ("Slice", "Pad") else 1
    axes = _constant(it, place)
    if axes is None or axes.dtype != np.int64 or axes.size >= rank:
        return None
    it.inputs[place] = (axes + 1) % rank
    return it.emit()


def _rotated(it: EmittedCall) -> Any:
    perm = it.attributes.get("perm")
    if perm is None:
        return None
    it.attributes["perm"] = [*perm[1:], perm[0]]
    return it.emit()


def _flipped(name: str) -> Change:
    def change(it: EmittedCall) -> Any:
        it.attributes[name] = 1 - (it.attributes.get(name) or 0)
        return it.emit()

    return change


def _stepped(name: str, by: int) -> Change:
    """The first integer of an attribute, changed by `by`."""

    def change(it: EmittedCall) -> Any:
        values = it.attributes.get(name)
        least = 0 if name in ("pads", "output_padding") else 1
        if not values or values[0] + by < least:
            return None
        it.attributes[name] = [values[0] + by, *values[1:]]
        return it.emit()

    return change


def _moved(by: int, *positions: int) -> Change:
    """The first element of each of these operands, changed by `by`: bounds, steps, sizes of padding."""

    def change(it: EmittedCall) -> Any:
        for position in positions:
            value = it.inputs[position] if position < len(it.inputs) else None
            if value is None:
                return None
            known = _constant(it, position)
            if known is None:
                it.inputs[position] = it.op.Add(value, by)
            elif not known.size or abs(int(known.flat[0])) >= _ENDLESS or (known.flat[0] + by == 0 and position == 4):
                return None
            else:
                moved = known.copy()
                moved.flat[0] += by
                it.inputs[position] = moved
        return it.emit()

    return change


def _constant(it: EmittedCall, position: int) -> np.ndarray | None:
    """The array of an operand, if it is a known constant."""
    value = it.inputs[position] if position < len(it.inputs) else None
    if isinstance(it.op, FunctionEmitter) and isinstance(value, str):
        makers = (node for node in it.op.nodes if node.op_type == "Constant" and value in node.outputs)
        return next((array_of(node.attributes["value"]) for node in makers), None)
    if isinstance(value, str) or value is None:
        return it.op.constant(value) if isinstance(it.op, Emitter) else None
    kind = None if isinstance(value, np.ndarray) else np.int64
    return np.asarray(value, kind)


SWAPPED = {"swapped operands": _swapped(0, 1)}
TERMS = {"only the first operand": _kept(0), "only the second operand": _kept(1)}
AXIS: dict[str, Change] = {"next axis": _other_axis}
WINDOW = {
    f"{name} {by:+d}": _stepped(name, by) for name in ("kernel_shape", "pads", "strides", "dilations") for by in (1, -1)
}
DROPPED = {"dropped": _kept(0)}

_ALONG = (
    traits.REDUCTIONS
    | traits.SOFTMAXES
    | {"ArgMax", "ArgMin", "Concat", "Flatten", "GatherElements", "OneHot"}
    | {"ScatterElements", "Split", "Squeeze", "TopK", "Unsqueeze"}
)
CHANGES: dict[str, dict[str, Change]] = {
    **dict.fromkeys(_ALONG, AXIS),
    "Sub": SWAPPED | TERMS,
    "Div": SWAPPED | TERMS,
    "Pow": SWAPPED | TERMS,
    "MatMul": SWAPPED,
    "Add": TERMS,
    "Mul": TERMS,
    "Sum": TERMS,
    "Where": {
        "swapped branches": _swapped(1, 2),
        "only the first branch": _branch(1),
        "only the second branch": _branch(2),
    },
    **dict.fromkeys(("Neg", "Not", "Abs", "Sign", "Floor", "Ceil", "Sqrt", "Exp", "Log", "Reciprocal"), DROPPED),
    "Transpose": {"dropped": _kept(0), "rotated perm": _rotated},
    "ReduceSum": AXIS | {"ReduceMean": _instead("ReduceMean"), "ReduceMax": _instead("ReduceMax")},
    "ReduceMean": AXIS | {"ReduceSum": _instead("ReduceSum")},
    "ReduceMax": AXIS | {"ReduceMin": _instead("ReduceMin")},
    "ReduceMin": AXIS | {"ReduceMax": _instead("ReduceMax")},
    "Max": {"Min": _instead("Min")},
    "Min": {"Max": _instead("Max")},
    "And": {"Or": _instead("Or")},
    "Or": {"And": _instead("And")},
    "Greater": {"GreaterOrEqual": _instead("GreaterOrEqual"), "Less": _instead("Less")},
    "GreaterOrEqual": {"Greater": _instead("Greater"), "LessOrEqual": _instead("LessOrEqual")},
    "Less": {"LessOrEqual": _instead("LessOrEqual"), "Greater": _instead("Greater")},
    "LessOrEqual": {"Less": _instead("Less"), "GreaterOrEqual": _instead("GreaterOrEqual")},
    "CumSum": AXIS | {f"{name} flipped": _flipped(name) for name in ("exclusive", "reverse")},
    "Gemm": SWAPPED | {f"{name} flipped": _flipped(name) for name in ("transA", "transB")},
    "Trilu": {"upper flipped": lambda it: _upper(it)},
    "Slice": AXIS
    | {
        "starts +1": _moved(1, 1),
        "ends -1": _moved(-1, 2),
        "window +1": _moved(1, 1, 2),
        "window -1": _moved(-1, 1, 2),
        "steps +1": _moved(1, 4),
    },
    "Pad": AXIS | {"pads +1": _moved(1, 1), "pads -1": _moved(-1, 1)},
    "Range": {"start +1": _moved(1, 0), "limit -1": _moved(-1, 1), "both +1": _moved(1, 0, 1)},
    "Gather": AXIS | {"indices +1": _moved(1, 1)},
    **dict.fromkeys(("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"), WINDOW),
}


def _upper(it: EmittedCall) -> Any:
    it.attributes["upper"] = 1 - it.attributes.get("upper", 1)
    return it.emit()


def _scaled(it: EmittedCall) -> Any:
    """A constant of floats, 1% larger."""
    value = array_of(it.attributes["value"])
    if it.attributes["value"].data_type not in (TensorProto.FLOAT, TensorProto.DOUBLE):
        return None
    it.attributes["value"] = numpy_helper.from_array(np.asarray(1.01 * value, value.dtype))
    return it.emit()


def _with(changes: dict[str, Change], *op_types: str) -> dict[str, dict[str, Change]]:
    return {op_type: CHANGES.get(op_type, {}) | changes for op_type in op_types}


# Further changes in a body: it has the operator's own arithmetic and its constants.
BODY_CHANGES = CHANGES | {
    **_with({"Sub": _instead("Sub")}, "Add"),
    **_with({"Add": _instead("Add")}, "Sub"),
    **_with({"Div": _instead("Div")}, "Mul"),
    **_with({"Mul": _instead("Mul")}, "Div"),
    **_with({"Greater": _instead("Greater")}, "Equal"),
    **_with(DROPPED, "Tanh", "Sigmoid", "Erf", "Relu", "Softplus", "Clip", "Round", "Cos", "Sin"),
    **_with({"1% larger": _scaled}, "Constant"),
}


# Changes of the result of a rule


def _flat(op: Emits, value: str, rearranged: Callable[[str], str]) -> str:
    """`value` with its elements rearranged as one row."""
    return str(op.Reshape(rearranged(op.Reshape(value, [-1])), op.Shape(value), allowzero=1))


def _rolled(op: Emits, value: str) -> str:
    return _flat(op, value, lambda row: op.Concat(op.Slice(row, [-1], [_ENDLESS]), op.Slice(row, [0], [-1]), axis=0))


def _reversed(op: Emits, value: str) -> str:
    return _flat(op, value, lambda row: op.Slice(row, [-1], [-_ENDLESS], [0], [-1]))


# By name: the function, and the number of axes along which a gradient needs two elements for the function to change it.
RETURNED: dict[str, tuple[Callable[[Any, str], str | None], int]] = {
    "1% too large": (lambda op, value: op.Mul(value, 1.01), 0),
    "twice as large": (lambda op, value: op.Mul(value, 2.0), 0),
    "other sign": (lambda op, value: op.Neg(value), 0),
    "zero": (lambda op, value: None, 0),
    "transposed": (lambda op, value: op.Reshape(op.Transpose(value), op.Shape(value), allowzero=1), 2),
    "reversed": (_reversed, 1),
    "rolled by one": (_rolled, 1),
}
EXCHANGED = "exchanged with the next"


def has_axes(shape: tuple[int, ...] | None, axes: int) -> bool:
    """True if a gradient of this shape has two elements along at least `axes` axes; true where the shape is unknown."""
    return shape is None or sum(size > 1 for size in shape) >= axes
