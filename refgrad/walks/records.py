"""The records of a walk: its steps, and the cotangents, contributions and differences in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from refgrad.markup import html_table
from refgrad.walks.numbers import as_json, inline, number, plain

_FIRST = 200  # steps that a notebook lists

Element = tuple[int, ...]


@dataclass(frozen=True)
class Emitted:
    """A node of the gradient model. `is_shape`: it computes sizes and indices, not the numbers of a cotangent."""

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    is_shape: bool = False


@dataclass(frozen=True)
class Contribution:
    """The contribution of one reader of a forward value to its cotangent.

    `of` is the forward value, `value` the name of the contribution in the gradient model. `step` is the number of the step
    that made it, None for the seed. `position` is the place of the operand among the inputs of the step's node, -1 for the
    seed and for what a body reads. `before` is what was summed over `axes` because the operand was broadcast, and `summed` the
    sum: `value`, or what it is made of, as Sub negates it. Both are "" where nothing was summed.
    """

    of: str
    step: int | None
    position: int
    value: str
    before: str = ""
    axes: tuple[int, ...] = ()
    summed: str = ""


@dataclass(frozen=True)
class Cotangent:
    """The cotangent of a forward value: `value` is its name in the gradient model, the sum of its `contributions`.

    `alias` is the forward value that has the same cotangent: the first operand of an Add has the cotangent of the result.
    It is "" where there is none. `emitted` are the nodes that sum the contributions, or copy the only one into an output.
    Without any contribution the gradient is zero.
    """

    of: str
    value: str
    contributions: tuple[Contribution, ...]
    alias: str = ""
    emitted: tuple[Emitted, ...] = ()


@dataclass(frozen=True)
class Kink:
    """A choice that was made where the operator has no derivative: at these `elements` of `input`."""

    input: str
    elements: tuple[Element, ...]
    text: str


@dataclass(frozen=True)
class Difference:
    """The central difference of the differentiated output by one element of `of`, in float64.

    `gradient` is that element of the cotangent of `of`, the sum of all contributions; `error` is how far the two are apart.
    """

    of: str
    element: Element
    difference: float
    gradient: float
    error: float


@dataclass(frozen=True)
class Step:
    """One forward node on the way back. `number` is 0 for the last one.

    `read` are the forward values that the emitted nodes read, `incoming` the cotangents of the outputs of the node,
    `outgoing` its contributions to the cotangents of its inputs.
    """

    number: int
    node: str
    operator: str
    domain: str
    formula: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    read: tuple[str, ...]
    incoming: tuple[Cotangent, ...]
    outgoing: tuple[Contribution, ...]
    kinks: tuple[Kink, ...]
    emitted: tuple[Emitted, ...]
    difference: Difference | None = None
    values: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)  # the values of the walk

    def table(self) -> list[dict[str, Any]]:
        """A row for each cotangent that comes in, each value that is read, and each contribution that goes out."""
        rows = [_row(f"cotangent of {one.of}", one.value, self.values, came_from(one)) for one in self.incoming]
        rows += [_row("read", name, self.values, "") for name in self.read]
        for part in self.outgoing:
            if part.before:
                rows.append(_row("before its sum", part.before, self.values, ""))
            rows.append(_row(f"contribution to {part.of}", part.value, self.values, said_of(part)))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The step for JSON, with the values that it names."""
        named = [one.value for one in self.incoming] + [*self.read, *filter(None, (*self.inputs, *self.outputs))]
        named += [name for part in self.outgoing for name in (part.value, part.before, part.summed) if name]
        values = {name: as_json(self.values[name]) for name in dict.fromkeys(named) if name in self.values}
        return {**as_dict(self), "values": values}

    def _repr_html_(self) -> str:
        """The numbers of the step, for a notebook."""
        notes = [self.formula, *(f"{kink.input!r}: {kink.text}" for kink in self.kinks)]
        if self.difference is not None:
            notes.append(said_of_difference(self.difference))
        notes += [
            f"emitted: {one.operator}({', '.join(one.inputs)}) -> {', '.join(filter(None, one.outputs))}"
            f"{' (sizes)' if one.is_shape else ''}"
            for one in self.emitted
        ]
        return html_table(self.table(), f"Step {self.number}: {self.operator} {self.node}", notes)


@dataclass(frozen=True)
class Walk:
    """The backward pass of a model with its numbers: `steps` in backward order, `values` by their name in `gradient`.

    `of` is the differentiated output or element, `wrt` the names that it is differentiated by. `cotangents` are by forward
    value, `forward` are the nodes of the model in their order. `more` are nodes that `gradient` does without, for
    contributions between zeros that it puts side by side and does not add. `notes` say what the reader must know: which feeds
    are random, which gradients are zero and why.
    """

    model: ModelProto
    gradient: ModelProto
    feeds: dict[str, np.ndarray]
    values: dict[str, np.ndarray]
    of: str
    wrt: tuple[str, ...]
    steps: tuple[Step, ...]
    cotangents: dict[str, Cotangent]
    forward: tuple[Emitted, ...]
    more: tuple[NodeProto, ...] = ()
    notes: tuple[str, ...] = ()

    def table(self) -> list[dict[str, Any]]:
        """A row for each step: what it is, what it contributes to, and the difference beside the gradient."""
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
        """All of it for JSON, without the two models: small arrays as nested lists, larger ones as statistics.

        An infinity or NaN is text.
        """
        made: dict[str, Any] = {"of": self.of, "wrt": list(self.wrt), "notes": list(self.notes)}
        made["feeds"] = {name: as_json(value) for name, value in self.feeds.items()}
        made["steps"] = [as_dict(step) for step in self.steps]
        made["cotangents"] = {name: as_dict(one) for name, one in self.cotangents.items()}
        made["forward"] = [as_dict(node) for node in self.forward]
        made["values"] = {name: as_json(value) for name, value in self.values.items()}
        return made


def as_dict(record: Any) -> Any:
    """A record, or a value in one, as dictionaries and lists; attributes that are arrays as nested lists."""
    if isinstance(record, Step | Cotangent | Contribution | Emitted | Kink | Difference):
        return {one.name: as_dict(getattr(record, one.name)) for one in fields(record) if one.name != "values"}
    return [as_dict(item) for item in record] if isinstance(record, tuple) else plain(record)


def element_of(difference: Difference) -> str:
    """The element by which a difference is taken, "x[0, 3]"."""
    return difference.of + (f"[{', '.join(map(str, difference.element))}]" if difference.element else "")


def said_of_difference(difference: Difference) -> str:
    """A difference beside the gradient, as a line of text."""
    return (
        f"by {element_of(difference)}: gradient {number(difference.gradient)}, central difference "
        f"{number(difference.difference)}, apart by {difference.error:.1e}"
    )


def said_of(part: Contribution) -> str:
    """The text that names the value summed to get a contribution, and the axes; "" where nothing was summed."""
    if not part.before:
        return ""
    axes = f"ax{'i' if len(part.axes) == 1 else 'e'}s {', '.join(map(str, part.axes))}"
    made = "" if part.summed == part.value else f": {part.summed}, of which it is made"
    return f"{part.before} summed over {axes}{made}"


def came_from(cotangent: Cotangent) -> str:
    """The text that names the origin of a cotangent: the seed, another one, a sum; "" where its step alone makes it."""
    if cotangent.alias:
        return f"that of {cotangent.alias}, unchanged"
    parts = cotangent.contributions
    if len(parts) == 1 and parts[0].step is None:
        return "the seed"
    if len(parts) > 1:
        return f"the sum of {' + '.join(part.value for part in parts)}"
    return "" if parts else "zero: nothing contributes"


def _row(what: str, name: str, values: Mapping[str, Any], said: str) -> dict[str, Any]:
    return {"what": what, "name": name, "value": inline(values.get(name)), "": said}
