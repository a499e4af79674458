"""The record of a sweep: the contributions to each cotangent, and the sums over broadcast axes.

Nobody but `refgrad.walk` asks for it. Without a record a sweep does nothing for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from refgrad.model.graph import Graph, Node
from refgrad.tables.registry import RULES


class Given(NamedTuple):
    """The cotangent that a node gave to `primal`, its input at `position`; -1 for a value that its graphs read."""

    node: str
    position: int
    primal: str
    adjoint: str


class Summed(NamedTuple):
    """A cotangent before and after it was summed over the axes along which `primal` was broadcast, in the rule of a node."""

    node: str
    primal: str
    before: str
    after: str


class SweepRecord:
    """The contributions to every cotangent and the sums over broadcasts, in the order in which the sweep met them."""

    def __init__(self) -> None:
        self.given: list[Given] = []
        self.summed: list[Summed] = []

    def watched(
        self, graph: Graph, node: Node, pairs: Iterable[tuple[str, str | None]]
    ) -> Iterator[tuple[str, str | None]]:
        """`pairs`, the names that a node reads and their cotangents, each written down on the way."""
        places = iter(_places(graph, node))
        for name, adjoint in pairs:
            position = next(places, -1)
            if adjoint is not None:
                self.given.append(Given(node.name, position, name, adjoint))
            yield name, adjoint


def _places(graph: Graph, node: Node) -> Iterator[int]:
    """The positions of the inputs that the rule of a node gives cotangents to, in its order."""
    rule = RULES.get(node.key)
    if rule is None or node.key in graph.control_flow:
        return
    for position, variadic in rule.bind(graph.opsets.get(rule.domain, 1))[1]:
        yield from range(position, len(node.inputs) if variadic else min(position + 1, len(node.inputs)))
