"""The name of an exported test tells what its case has: `test_grad_conv_opset22_group2_empty_batch_0x4x5x5_4x2x3x3`."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, helper

from refgrad.conformance.case import Case, is_float
from refgrad.tables.registry import RULES
from refgrad.tables.schemas import find_schema

_LONGEST = 100  # letters in the name of a test
_LISTED = 4  # numbers of an attribute that a name spells out
_TYPES = ("to", "dtype", "output_dtype", "stash_type")  # attributes that name a type of element
_NO_TITLE = re.compile(r"static|symbolic|unknown|opset\d+|b?float\d+|double")
_WORD = re.compile(r"(?!none$|scalar$|true$|false$)[a-z][a-z_ ]*", re.IGNORECASE)  # and no shape, number or type


def named_tests(cases: Iterable[Case]) -> dict[str, Case]:
    """The cases by a name for a test: the operator, the opset of the model, the features of the case, the shapes of its inputs.

    The features are its title where it has one; else attributes that are not the default, whether tensors are empty or
    broadcast, optional inputs that are given, and inputs that are constant. Shapes that make a name too long give way to
    the rank. A name with a title has them only where another case has the name without. A checksum tells the others apart. A
    name depends on the cases before, so it stays when others are added behind.
    """
    found: dict[str, Case] = {}
    for case in cases:
        plain = f"test_grad_{'_'.join(_parts(case))}"
        shapes = "_".join("x".join(map(str, np.shape(v))) or "scalar" for v in case.feeds.values())
        rank = f"{max((np.ndim(v) for v in case.feeds.values()), default=0)}d"
        titled = case.subject is None or bool(_title(case))
        endings = ("", rank, shapes) if titled else (shapes, rank, "")
        longer = ("_".join(filter(None, (plain, ending))) for ending in endings)
        last = f"{plain[: _LONGEST - 9]}_{zlib.crc32(case.name.encode()):08x}"
        found[next((name for name in longer if name not in found and len(name) <= _LONGEST), last)] = case
    return found


def _parts(case: Case) -> Iterator[str]:
    node = case.subject
    if node is None:
        first, _, rest = case.name.partition("-")
        yield from filter(None, (safe(first), f"opset{case.opset}", safe(rest)))
        return
    yield safe(case.operator)
    yield f"opset{case.opset}"
    title = _title(case)
    if title:
        yield title
    else:
        schema = find_schema(node.op_type, node.domain, case.opset)
        for attribute in sorted(node.attribute, key=lambda attribute: attribute.name):
            formal = schema.attributes.get(attribute.name) if schema else None
            value = helper.get_attribute_value(attribute)
            if not (formal and formal.default_value.name and value == helper.get_attribute_value(formal.default_value)):
                yield _valued(attribute, value)
        yield from _sizes(case)
        yield from _inputs(case, node, schema)
    if case.dtype != "float32":
        yield case.dtype
    if not case.static:
        yield "symbolic"


def _title(case: Case) -> str:
    """The author's title of a case: "Loop-states-that-change-places-static-opset21" has "states_that_change_places"."""
    _, *segments = case.name.split("-")
    if not segments or not _WORD.fullmatch(segments[0]) or _NO_TITLE.fullmatch(segments[0]):
        return ""
    return safe("_".join(segment for segment in segments if not _NO_TITLE.fullmatch(segment)))


def _valued(attribute: AttributeProto, value: Any) -> str:
    """An attribute with its value: group2, pads1, strides2x1; a word alone, and a graph or a long list by its name."""
    name = safe(attribute.name)
    if name in _TYPES and isinstance(value, int):
        return f"{name}_{safe(helper.tensor_dtype_to_np_dtype(value).name)}"
    if isinstance(value, bytes):
        return safe(value.decode(errors="replace")) or name
    if isinstance(value, int | float):
        return f"{name}{_number(value)}"
    if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS):
        numbers = list(value)
        if numbers and len(set(numbers)) == 1:
            return f"{name}{_number(numbers[0])}"
        if 0 < len(numbers) <= _LISTED:
            return f"{name}{'x'.join(map(_number, numbers))}"
    return name


def _number(value: float) -> str:
    return safe(f"{value:g}".replace("-", "minus"))


def _inputs(case: Case, node: onnx.NodeProto, schema: onnx.defs.OpSchema | None) -> Iterator[str]:
    """The optional inputs that the node has, and those that are constant."""
    constants = {tensor.name for tensor in case.model.graph.initializer}
    for name, formal in zip(node.input, schema.inputs if schema else (), strict=False):
        optional = formal.option == onnx.defs.OpSchema.FormalParameterOption.Optional
        if name in constants:
            yield f"constant_{safe(formal.name)}"
        elif name and optional:
            yield f"with_{safe(formal.name)}"


def _sizes(case: Case) -> Iterator[str]:
    shapes = [np.shape(array) for array in case.feeds.values() if is_float(array)]
    if not shapes:
        return
    if any(0 in shape for shape in shapes):
        first = shapes[0]
        yield "empty_batch" if len(first) > 1 and first[0] == 0 and 0 not in first[1:] else "empty"
    if len(set(shapes)) > 1 and (rule := RULES.get(_key(case))) and rule.broadcast:
        yield "broadcast"


def _key(case: Case) -> tuple[str, str]:
    domain, _, name = case.operator.rpartition(".")
    return domain, name


def safe(text: str) -> str:
    """The text in small letters, digits and underscores."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
