"""The records of a walk: its steps, and their cotangents, contributions and differences.

The names of fields are keys of the JSON that `refgrad walk` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from refgrad.markup import html_table
from refgrad.walks.numbers import as_json, inline, number, plain

_FIRST = 200  # steps that a notebook lists
_LISTED = 12  # elements of an attribute

Element = tuple[int, ...]


@dataclass(frozen=True)
class Emitted:
    """A node of the gradient model."""

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    is_shape: bool = False  # it computes sizes or indices, not elements of a cotangent


@dataclass(frozen=True)
class Contribution:
    """The contribution of one reader of a forward value to the value's cotangent."""

    of: str  # the forward value
    step: int | None  # the number of the step that computes the contribution; None for the seed
    position: (
        int  # the forward value's position among the inputs of the step's node; -1 for the seed, and if a body reads it
    )
    value: str  # the name of the contribution in the gradient model
    before: str = ""  # the value before it is summed over `axes`, because the operand was broadcast; "" without a sum
    axes: tuple[int, ...] = ()
    summed: str = ""  # the sum: `value` itself, or the value that `value` is computed from (Sub negates it)


@dataclass(frozen=True)
class Cotangent:
    """The cotangent of a forward value: the sum of its contributions, and zero without any."""

    of: str  # the forward value
    value: str  # the name of the cotangent in the gradient model
    contributions: tuple[Contribution, ...]
    alias: str = ""  # a forward value with the same cotangent, such as the result of an Add for its first operand
    emitted: tuple[Emitted, ...] = ()  # the nodes that sum the contributions, or copy the only one to an output

    @property
    def complete(self) -> int:
        """The number of the step that makes the last contribution; 0 if only the seed contributes."""
        return max((part.step or 0 for part in self.contributions), default=0)


@dataclass(frozen=True)
class Kink:
    """A convention that was applied where the operator has no derivative."""

    input: str
    elements: tuple[Element, ...]  # of `input`, at the kink
    text: str  # the convention


@dataclass(frozen=True)
class Difference:
    """The derivative of the differentiated output by one element of a forward value, as a central difference in float64."""

    of: str  # the forward value
    element: Element
    difference: float  # the central difference
    gradient: float  # the same element of the cotangent of the forward value
    error: float  # the distance between `difference` and `gradient`


@dataclass(frozen=True)
class Step:
    """A step back over one forward node."""

    number: int  # from 1, for the last node
    node: str
    operator: str
    domain: str
    formula: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    read: tuple[str, ...]  # the forward values that the emitted nodes read
    incoming: tuple[Cotangent, ...]  # of the node's outputs
    outgoing: tuple[Contribution, ...]  # to the cotangents of the node's inputs
    kinks: tuple[Kink, ...]
    emitted: tuple[Emitted, ...]
    difference: Difference | None = None
    values: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)  # the values of the walk

    def table(self) -> list[dict[str, Any]]:
        """A row for each incoming cotangent, each value that is read, and each outgoing contribution."""
        rows = [
            _row(f"cotangent of {cotangent.of}", cotangent.value, self.values, origin_text(cotangent))
            for cotangent in self.incoming
        ]
        rows += [_row("read", name, self.values, "") for name in self.read]
        for part in self.outgoing:
            if part.before:
                rows.append(_row("before its sum", part.before, self.values, ""))
            rows.append(_row(f"contribution to {part.of}", part.value, self.values, sum_text(part)))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The step for JSON, with the values that it names."""
        named = [cotangent.value for cotangent in self.incoming] + [
            *self.read,
            *filter(None, (*self.inputs, *self.outputs)),
        ]
        named += [name for part in self.outgoing for name in (part.value, part.before, part.summed) if name]
        values = {name: as_json(self.values[name]) for name in dict.fromkeys(named) if name in self.values}
        return {**as_dict(self), "values": values}

    def _repr_html_(self) -> str:
        """The numbers of the step, for a notebook."""
        notes = [" ".join(self.formula.split()), *(f"{kink.input!r}: {kink.text}" for kink in self.kinks)]
        if self.difference is not None:
            notes.append(difference_text(self.difference))
        notes += [f"emitted: {emitted_text(node)}{' (sizes)' if node.is_shape else ''}" for node in self.emitted]
        return html_table(self.table(), f"Step {self.number}: {self.operator} {self.node}", notes)


@dataclass(frozen=True)
class Walk:
    """The backward pass of a model, with its numbers."""

    model: ModelProto
    gradient: ModelProto
    feeds: dict[str, np.ndarray]
    values: dict[str, np.ndarray]  # by their names in `gradient`
    of: str  # the differentiated output, or one element of it
    wrt: tuple[str, ...]  # the names that the output is differentiated by
    steps: tuple[Step, ...]  # in backward order
    cotangents: dict[str, Cotangent]  # by forward value
    forward: tuple[Emitted, ...]  # the nodes of the model, in order
    # Nodes that compute contributions which `gradient` itself does not need: slices between zeros, which it concatenates
    # instead of padding and adding them.
    more: tuple[NodeProto, ...] = ()
    notes: tuple[str, ...] = ()  # facts that the reader must know: the random feeds, and the gradients that are zero

    def table(self) -> list[dict[str, Any]]:
        """A row for each step: its node, the values that it contributes to, and its difference beside the gradient."""
        return [
            {
                "step": step.number,
                "operator": step.operator,
                "node": step.node,
                "formula": step.formula.partition("\n")[0],
                "contributes to": ", ".join(dict.fromkeys(part.of for part in step.outgoing)),
                "of": "" if step.difference is None else element_of(step.difference),
                "gradient": None if step.difference is None else step.difference.gradient,
                "difference": None if step.difference is None else step.difference.difference,
            }
            for step in self.steps
        ]

    def _repr_html_(self) -> str:
        """The steps, the gradients and the notes, for a notebook."""
        notes = [f"d {self.of} / d {name} = {inline(self.values[self.cotangents[name].value])}" for name in self.wrt]
        title = f"{self.of}, backwards in {len(self.steps)} steps"
        return html_table(self.table(), title, (*notes, *self.notes), most=_FIRST)

    def to_dict(self) -> dict[str, Any]:
        """The walk for JSON, without the two models.

        Small arrays become nested lists, larger ones statistics. An infinity or NaN becomes text.
        """
        document: dict[str, Any] = {"of": self.of, "wrt": list(self.wrt), "notes": list(self.notes)}
        document["feeds"] = {name: as_json(value) for name, value in self.feeds.items()}
        document["steps"] = [as_dict(step) for step in self.steps]
        document["cotangents"] = {name: as_dict(cotangent) for name, cotangent in self.cotangents.items()}
        document["forward"] = [as_dict(node) for node in self.forward]
        document["values"] = {name: as_json(value) for name, value in self.values.items()}
        return document


def as_dict(record: Any) -> Any:
    """A record, or the value of a field, as dictionaries and lists. Arrays become nested lists."""
    if isinstance(record, Step | Cotangent | Contribution | Emitted | Kink | Difference):
        return {each.name: as_dict(getattr(record, each.name)) for each in fields(record) if each.name != "values"}
    return [as_dict(item) for item in record] if isinstance(record, tuple) else plain(record)


def element_of(difference: Difference) -> str:
    """The element that a difference moves, such as "x[0, 3]"."""
    return difference.of + (f"[{', '.join(map(str, difference.element))}]" if difference.element else "")


def difference_text(difference: Difference) -> str:
    """A line of text with a difference beside the gradient."""
    return (
        f"by {element_of(difference)}: gradient {number(difference.gradient)}, central difference "
        f"{number(difference.difference)}, error {difference.error:.1e}"
    )


def emitted_text(node: Emitted) -> str:
    """A node as text: `g = Gemm(d, a) with transA = 1`."""
    made = f"{', '.join(filter(None, node.outputs))} = {node.operator}({', '.join(node.inputs)})"
    return made + attributes_text(node.operator, node.attributes)


def attributes_text(operator: str, attributes: Mapping[str, Any]) -> str:
    """The attributes of a node, ` with transA = 1, alpha = 0.5`; "" without any. Bodies and large tensors are left out."""
    texts = {name: _attribute_text(operator, name, value) for name, value in attributes.items()}
    listed = ", ".join(f"{name} = {text}" for name, text in texts.items() if text)
    return f" with {listed}" if listed else ""


def _attribute_text(operator: str, name: str, value: Any) -> str:
    if operator == "Cast" and name == "to":
        return TensorProto.DataType.Name(value).lower()
    value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    if isinstance(value, np.ndarray):
        return inline(value) if value.size <= _LISTED else ""
    if isinstance(value, list | tuple):
        return str([item.item() if isinstance(item, np.generic) else item for item in value])
    if isinstance(value, str) and "\n" in value:
        return ""
    return value if isinstance(value, str) else number(value)


def sum_text(part: Contribution) -> str:
    """A text about the sum in a contribution, if its operand was broadcast, else ""."""
    if not part.before:
        return ""
    axes = f"ax{'i' if len(part.axes) == 1 else 'e'}s {', '.join(map(str, part.axes))}"
    source = "" if part.summed == part.value else f": {part.summed}, from which it is computed"
    return f"{part.before} summed over {axes}{source}"


def origin_text(cotangent: Cotangent) -> str:
    """A text about the origin of a cotangent: the seed, another cotangent, or a sum; "" if it is one contribution of a step."""
    if cotangent.alias:
        return f"the cotangent of {cotangent.alias}, unchanged"
    parts = cotangent.contributions
    if len(parts) == 1 and parts[0].step is None:
        return "the seed"
    if len(parts) > 1:
        return f"the sum of {' + '.join(part.value for part in parts)}"
    return "" if parts else "zero: nothing contributes"


def _row(what: str, name: str, values: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"what": what, "name": name, "value": inline(values.get(name)), "": text}
