"""Attributes that onnx takes without a look: where they are absurd, its inference reads foreign memory, or does not end.

Windows without an element, or with more than any tensor has, are refused with them: nothing after this has to expect one.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping

from onnx import AttributeProto, ModelProto, NodeProto

from refgrad.errors import InvalidModelError
from refgrad.protos.domains import MICROSOFT, ML
from refgrad.protos.traverse import every_node, nested

_HIGHEST = 1024  # rank: onnx infers no tensor of a higher one
_AXES = (-_HIGHEST, _HIGHEST)
_LARGEST = 2**31 - 1  # of a window: ONNX Runtime has no larger one
_WINDOW, _COUNT, _PADS = (1, _LARGEST), (0, _LARGEST), (-_LARGEST, _LARGEST)
BOUNDS = {
    **dict.fromkeys(("axis", "axes", "batch_axis", "new_axis", "time_axis"), _AXES),
    **dict.fromkeys(("scan_input_axes", "scan_output_axes"), _AXES),
    **dict.fromkeys(("batch_dims", "perm"), (0, _HIGHEST)),
    **dict.fromkeys(("blocksize", "dilations", "kernel_shape", "pooled_shape", "size", "strides"), _WINDOW),
    **dict.fromkeys(("output_height", "output_padding", "output_shape", "output_width", "sampling_ratio"), _COUNT),
    "pads": _PADS,
    "group": _WINDOW,
}
_SEARCHED = BOUNDS.keys() | {"auto_pad", "equation", "num_outputs"}
_TERM = r"[A-Za-z]*(\.\.\.)?[A-Za-z]*"
_EQUATION = re.compile(rf"{_TERM}(,{_TERM})*(->{_TERM})?".encode())  # another one keeps onnx in a loop without end
_PADDINGS = (b"NOTSET", b"SAME_UPPER", b"SAME_LOWER", b"VALID", b"")  # "" is NOTSET to ONNX Runtime
_DOMAINS = ("", "ai.onnx", ML, MICROSOFT)  # some of ai.onnx's were ONNX Runtime's before


def refuse_absurd_attributes(model: ModelProto) -> None:
    """Refuse a node with an axis that no tensor has, a window that nothing slides, an equation that is none, or other outputs.

    :raises InvalidModelError: there is one.
    """
    passed = passed_on(model)
    for node in every_node(model):
        refuse_absurd_attributes_of(node, passed.get((node.domain, node.op_type)))


def refuse_absurd_attributes_of(node: NodeProto, passed: Mapping[str, tuple[int, int]] | None = None) -> None:
    """Refuse a node as `refuse_absurd_attributes` does.

    :param passed: if the node is a call, the bounds of the attributes that it passes on to operators.
    :raises InvalidModelError: `refuse_absurd_attributes` refuses an attribute of the node.
    """
    for attribute in node.attribute:
        if passed is None and attribute.name not in _SEARCHED:
            continue
        bounds = _bounds(node, attribute.name)
        if bounds is None and passed is not None:
            bounds = passed.get(attribute.name)
        if node.op_type == "Einsum" and attribute.name == "equation":
            _refuse_no_equation(node, attribute.s)
        if node.domain in _DOMAINS and attribute.name == "auto_pad" and not attribute.ref_attr_name:
            _refuse_no_padding(node, attribute.s)
        if bounds is None or (attribute.ref_attr_name and not attribute.HasField("i")):
            continue  # a reference has the value that the call gives
        alone = attribute.type == AttributeProto.INT or attribute.HasField("i")  # onnx reads it, whatever the type says
        for value in (*attribute.ints, attribute.i) if alone else attribute.ints:
            if not bounds[0] <= value <= bounds[1]:
                reason = _reason(attribute.name, *bounds)
                raise InvalidModelError(
                    f"Node {_called(node)!r} ({node.op_type}) has {attribute.name} {value}, and {reason}. "
                    "Export the model again."
                )


def _bounds(node: NodeProto, name: str) -> tuple[int, int] | None:
    if node.domain not in _DOMAINS:
        return None
    if name == "num_outputs" and node.op_type == "Split":
        return len(node.output), len(node.output)
    return BOUNDS.get(name)


def _reason(name: str, low: int, high: int) -> str:
    if low == high:
        return f"the Split has {low} outputs"
    why = "no tensor has this axis" if high == _HIGHEST else "no window is like that"
    if name == "group":
        why = "no convolution has as many"
    return f"{why}: it is a number from {low} to {high}"


def passed_on(model: ModelProto) -> dict[tuple[str, str], dict[str, tuple[int, int]]]:
    """For each function the attributes that become one of these of an operator, by way of other functions too."""
    found: dict[tuple[str, str], dict[str, tuple[int, int]]] = {(f.domain, f.name): {} for f in model.functions}
    references = [
        (found[function.domain, function.name], node, attribute)
        for function in model.functions
        for node in nested(function.node)
        for attribute in node.attribute
        if attribute.ref_attr_name
    ]
    size = -1
    while size != (size := sum(map(len, found.values()))):
        for own, node, attribute in references:
            called = found.get((node.domain, node.op_type))
            bounds = called.get(attribute.name) if called is not None else _bounds(node, attribute.name)
            if bounds is not None:
                own[attribute.ref_attr_name] = bounds
    return found


def _refuse_no_equation(node: NodeProto, equation: bytes) -> None:
    if not _EQUATION.fullmatch(equation.replace(b" ", b"")):
        said = reprlib.repr(equation.decode(errors="replace"))
        raise InvalidModelError(
            f"Node {_called(node)!r} (Einsum) has the equation {said}: it is made of letters and '...', with ',' between "
            "operands and '->' before the result. Export the model again."
        )


def _refuse_no_padding(node: NodeProto, auto_pad: bytes) -> None:
    if auto_pad not in _PADDINGS:
        said, known = (
            reprlib.repr(auto_pad.decode(errors="replace")),
            ", ".join(name.decode() for name in _PADDINGS if name),
        )
        raise InvalidModelError(
            f"Node {_called(node)!r} ({node.op_type}) has the auto_pad {said}; there are {known}. Export the model again."
        )


def _called(node: NodeProto) -> str:
    return node.name or next(filter(None, node.output), "")
