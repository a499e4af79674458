"""The proof that a node is to blame: with the right value in place of its own the results are right except for rounding."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from refgrad.backends import Backend
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.case import is_float
from refgrad.conformance.locating.replay import Replay, Replayed, distance, wrong_types
from refgrad.conformance.locating.values import described, is_text
from refgrad.conformance.problems.rounding import Perturbed, limits
from refgrad.errors import RefgradError
from refgrad.protos.traverse import nested, refill

_ROUNDINGS = 8.0  # how much further off than rounding by chance results may be that count as right
_DRAWS = 2  # of rounding by chance
_PART = 1e-4  # of the largest element of all results: a result that is smaller throughout counts as so large
_FLOOR = 1e-7  # of the largest element: a result that is closer is right, except in double


def repaired_model(
    model: ModelProto, blamed: Mapping[int, Mapping[str, np.ndarray]]
) -> tuple[ModelProto, dict[str, Any]]:
    """The model without the nodes at these positions, whose outputs become inputs; and the right values of these."""
    if not blamed:
        return model, {}
    made = ModelProto()
    made.CopyFrom(model)
    values = {name: value for outputs in blamed.values() for name, value in outputs.items()}
    refill(made.graph.node, [node for k, node in enumerate(model.graph.node) if k not in blamed])
    outputs = {value.name for value in made.graph.output}
    fed: dict[str, Any] = {}
    for name, value in values.items():
        given = f"{name}/repaired" if name in outputs else name
        if name in outputs:  # an output is not an input too
            for node in nested(made.graph.node):
                node.input[:] = [given if read == name else read for read in node.input]
            made.graph.node.append(helper.make_node("Identity", [given], [name], given))
        made.graph.input.append(described(given, value))
        fed[given] = value
    return made, fed


@dataclass(frozen=True)
class Errors:
    """The error of each result, relative to its largest element, and what rounding explains of it."""

    of: Mapping[str, float]
    allowed: Mapping[str, float]

    @property
    def worst(self) -> str:
        """The result that is furthest beyond what rounding explains."""
        return max(self.of, key=lambda name: self.of[name] / self.allowed_of(name), default="")

    def allowed_of(self, name: str) -> float:
        """The error of a result that rounding explains."""
        return self.allowed.get(name, _FLOOR)

    @property
    def largest(self) -> float:
        """The error of that result."""
        return self.of.get(self.worst, 0.0)

    @property
    def total(self) -> float:
        """The sum of the errors in units of rounding: what a repair has to lessen."""
        return float(sum(error / self.allowed_of(name) for name, error in self.of.items()))

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains all of them."""
        return all(error <= self.allowed_of(name) for name, error in self.of.items())


class RepairTrial:
    """Runs of a model on an executor with some nodes repaired, and how far off the results are."""

    def __init__(self, replay: Replay, backend: Backend) -> None:
        self._replay, self._backend = replay, backend
        model, feeds = replay.model, replay.feeds
        self._exact = dict(_tensors(NumpyBackend().prepare(model, precision="float64").run(feeds)))
        plain = NumpyBackend().prepare(model).run(feeds)
        eps = [limits(value.dtype)[0] for _, value in _tensors(plain) if is_float(value)]
        self._bits = 1 - round(math.log2(max(eps, default=2.0**-23)))
        most = max(eps, default=0.0)
        is_double = 0 < most < _FLOOR**2  # which no draw can round
        floor = 16 * most * math.sqrt(len(replay.nodes)) if is_double else max(_FLOOR, 8 * most)
        self._draws = 0
        self.allowed = {name: max(_ROUNDINGS * off, floor) for name, off in self._off(plain).items()}

    def _draw(self) -> None:
        """See what rounding by chance does to the results, where nothing less explains an error."""
        precision = Perturbed(self._bits)
        drawn = NumpyBackend().prepare(self._replay.model, precision=precision)
        while self._draws < _DRAWS:
            precision.draw = self._draws
            self._draws += 1
            for name, off in self._off(drawn.run(self._replay.feeds)).items():
                self.allowed[name] = max(self.allowed[name], _ROUNDINGS * off)

    def run(self, blamed: Sequence[Replayed]) -> tuple[Errors, str]:
        """The errors of the results with these nodes repaired, and why there are none."""
        repairs = {one.position: self._replay.repairs[one.position] for one in blamed}
        return self.with_values(repairs)

    def with_values(self, repairs: Mapping[int, Mapping[str, np.ndarray]]) -> tuple[Errors, str]:
        """The same, with these values in the place of the nodes at these positions."""
        model, values = repaired_model(self._replay.model, repairs)
        feeds = copy.deepcopy({**self._replay.feeds, **values})  # an executor may write over what it is given
        try:
            prepared = self._backend.prepare(model)
            results = prepared.run(feeds)
        except RefgradError as error:
            return Errors({"": math.inf}, self.allowed), str(error)
        off = self._off(results) | dict.fromkeys(wrong_types(prepared, results), math.inf)
        if not self._draws and not Errors(off, self.allowed).is_rounding:
            self._draw()
        return Errors(off, self.allowed), ""

    def has_influence(self, node: Replayed) -> bool:
        """True if the results are wrong where this node alone has the executor's values, and all others the right ones.

        A repair does not show it where a later node is repaired as well: its right value takes the error away.
        """
        model, values = repaired_model(self._replay.model, {node.position: self._replay.theirs[node.position]})
        try:
            results = NumpyBackend().prepare(model, precision="float64").run({**self._replay.feeds, **values})
        except RefgradError:  # such values are no indices, no shape
            return True
        off = self._off(results)
        return not Errors(off, self.allowed).is_rounding

    def _off(self, results: Mapping[str, Any]) -> dict[str, float]:
        """The largest error of each result, relative to its largest element; none counts as smaller than a part of all."""
        found = dict(_tensors(results))
        sizes = {name: _size(due) for name, due in self._exact.items()}
        smallest = _PART * max(sizes.values(), default=0.0)
        off = dict.fromkeys(found.keys() - sizes.keys(), math.inf)
        for name, due in self._exact.items():
            value = found.get(name)
            if value is None or value.shape != due.shape:
                off[name] = math.inf
            else:
                off[name] = float(np.max(distance(value, due), initial=0.0)) / (max(sizes[name], smallest) or 1.0)
        return off


def _tensors(results: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors among results; the tensors of a sequence are named by their place."""
    for name, value in results.items():
        if isinstance(value, list | tuple):
            yield from _tensors({f"{name}[{place}]": item for place, item in enumerate(value)})
        elif isinstance(value, np.ndarray | np.generic):
            yield name, np.asarray(value)


def _size(value: np.ndarray) -> float:
    if is_text(value):
        return 0.0
    wide = np.abs(value.astype(np.float64))
    return float(np.max(wide, where=np.isfinite(wide), initial=0.0))
