"""The traits that cases with a verdict share and others lack: an attribute, a negative axis, an empty input."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np
from onnx import NodeProto

from refgrad.conformance.case import Case, is_float
from refgrad.errors import counted
from refgrad.model.external import array_of
from refgrad.protos.traverse import attribute_value, versions_of
from refgrad.tables.schemas import find_schema

_LONGEST = 40  # characters of an attribute that is told
_NOT_EMPTY = "non-empty inputs"
_AXES = ("axis", "axes", "batch_axis", "time_axis", "batch_dims")


def common(some: Collection[Case], others: Collection[Case]) -> str:
    """The words for what separates some cases from others: "in every case with negative axes and in no other".

    "only in cases with negative axes, but not in all of them" if all of `some` have them, and no more than half of `others`.
    "" where nothing separates them.
    """
    if not some or not others:
        return ""
    shared = _shared(some)
    of_others = [frozenset(traits(case)) for case in others]
    for count in (1, 2):
        for chosen in combinations(shared, count):
            if not any(set(chosen) <= known for known in of_others):
                return f"in every case with {' and '.join(chosen)} and in no other"
    among = {trait: sum(trait in known for known in of_others) for trait in shared if trait != _NOT_EMPTY}
    rarest = min(among, key=lambda trait: among[trait], default="")
    is_rare = rarest and 2 * among[rarest] <= len(of_others)
    return f"only in cases with {rarest}, but not in all of them" if is_rare else ""


def _shared(cases: Collection[Case]) -> list[str]:
    """The traits that all of these cases have, the more telling ones first."""
    first, *rest = (list(traits(case)) for case in cases)
    for one in rest:
        known = frozenset(one)
        first = [trait for trait in first if trait in known]
    return first


def traits(case: Case) -> Iterator[str]:
    """The traits of a case, as words that follow "with": the more telling traits first."""
    node = case.subject
    feeds: Mapping[str, Any] = case.feeds  # among them sequences
    known = {tensor.name: array_of(tensor) for tensor in case.model.graph.initializer}
    known |= {name: np.asarray(value) for name, value in feeds.items() if isinstance(value, np.ndarray | np.generic)}
    given = {} if node is None else {a.name: attribute_value(a) for a in node.attribute}
    attributes = (_defaults(case, node) if node is not None else {}) | given
    read = _inputs(case, node, known)
    if any(_is_negative(attributes.get(name)) for name in _AXES) or any(map(_is_negative, _axes_in(read))):
        yield "negative axes"
    if any(value.size == 0 for value in read.values()):
        yield "empty inputs"
    if node is not None:
        yield from _of_attributes(attributes)
        yield from (f"the attribute {name}" for name in given)
        yield from _left_out(node)
    shapes = [value.shape for value in read.values()]
    if any(shape == () for shape in shapes):
        yield "scalar inputs"
    floats = [value for value in read.values() if is_float(value) and value.ndim]
    if len({value.shape for value in floats}) > 1:
        yield "inputs of different shapes"
    if any(1 in value.shape for value in floats):
        yield "inputs with an axis of size 1"
    if any(np.any(value < 0) for value in floats):
        yield "negative inputs"
    if case.dtype:
        yield case.dtype
    if shapes:
        yield f"inputs of rank {max(map(len, shapes))}"
    if case.values != "smooth":
        yield f"{case.values} values"
    yield _declared(case)
    if any(tensor.name in read for tensor in case.model.graph.initializer):
        yield "constant inputs"
    yield f"opset {case.opset}"
    if not any(value.size == 0 for value in read.values()):
        yield _NOT_EMPTY


def _of_attributes(attributes: Mapping[str, Any]) -> Iterator[str]:
    for name, value in attributes.items():
        if isinstance(value, str | int | float | list | tuple) and len(str(value)) <= _LONGEST:
            yield f"{name}={value}"


def _defaults(case: Case, node: NodeProto) -> dict[str, Any]:
    """The attributes of a node that it leaves out, with the values that they have then."""
    schema = find_schema(node.op_type, node.domain, versions_of(case.model).get(node.domain, 1))
    if schema is None:
        return {}
    defaults = {name: attribute.default_value for name, attribute in schema.attributes.items()}
    return {name: attribute_value(value) for name, value in defaults.items() if value.type}


def _inputs(case: Case, node: NodeProto | None, known: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors that the node reads, as far as they are fed or constant; of several nodes, all that are."""
    if node is None:
        return dict(known)
    behind = {output: inner.input[0] for inner in case.model.graph.node if inner.input for output in inner.output}
    names = [name if name in known else behind.get(name, "") for name in node.input]
    return {name: known[name] for name in names if name in known}


def _axes_in(read: Mapping[str, np.ndarray]) -> Iterable[np.ndarray]:
    return [value for name, value in read.items() if name in _AXES]


def _is_negative(value: Any) -> bool:
    if value is None:
        return False
    numbers = np.asarray(value)
    return numbers.dtype.kind in "if" and bool(np.any(numbers < 0))


def _left_out(node: NodeProto) -> Iterator[str]:
    for place, name in enumerate(node.input):
        if not name:
            yield f"input {place} left out"
    yield counted(len([name for name in node.input if name]), "input")


def _declared(case: Case) -> str:
    """The trait that says how the inputs are declared."""
    if case.static:
        return "static shapes"
    return "unknown shapes" if any(name.endswith("_shape") for name in case.feeds) else "symbolic shapes"
