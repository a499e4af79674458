"""What a walk is made of: its steps, and the cotangents, contributions and differences in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto

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
    """What one reader of a forward value adds to its cotangent.

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

    `alias` is the forward value whose cotangent it is, unchanged, as the first operand of an Add has that of the result;
    "" where it is not. `emitted` are the nodes that sum the contributions, or copy the only one into an output. Without any
    contribution the gradient is zero.
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
    """The central difference of the differentiated output by one element of `of`, and the `gradient` of that element."""

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


@dataclass(frozen=True)
class Walk:
    """The backward pass of a model with its numbers: `steps` in backward order, `values` by their name in `gradient`.

    `of` is what is differentiated, `wrt` by what, `cotangents` are by forward value, `forward` are the nodes of the model in
    their order. `notes` say what the reader must know: which feeds are random, which gradients are zero and why.
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
    notes: tuple[str, ...] = ()
