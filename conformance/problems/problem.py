"""A problem: the gradient that every builder and every oracle is asked for."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.backends.base import describe, graph_inputs
from refgrad.conformance.case import Case, is_float
from refgrad.conformance.problems.feeds import widened
from refgrad.conformance.problems.kinked import kinked
from refgrad.conformance.problems.point import in_float64
from refgrad.errors import FeedError, choices
from refgrad.model.external import array_of
from refgrad.protos.types import FLOATS


@dataclass(frozen=True)
class Problem:
    """The gradient of Σ <cotangent, output> by each input or initializer in `wrt`, where the model is fed `feeds`.

    `feeds` and `cotangents` (by output) are in the model's types. What an oracle draws, it draws from `seed`. `kinked` says
    which elements of an input are at a kink: oracles leave them where they are, and the judge judges them apart.
    """

    case: str
    model: ModelProto
    wrt: tuple[str, ...]
    feeds: Mapping[str, Any]
    cotangents: Mapping[str, np.ndarray]
    seed: int
    tolerance: float | None = None
    kinked: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def at(self) -> dict[str, Any]:
        """The point of the gradient, in float64: the feeds, and the values of the initializers in `wrt`."""
        weights = {t.name: array_of(t) for t in self.model.graph.initializer if t.name in self.wrt}
        return widened(weights | dict(self.feeds))

    @property
    def wide_cotangents(self) -> dict[str, np.ndarray]:
        """The cotangents in float64, by output."""
        return widened(self.cotangents)


def ask(case: Case, seed: int = 0) -> Problem:
    """The problem of a case: its cotangents are drawn from `seed` and its name, so they are the same wherever it is asked.

    By default the gradient is by every float input, of every float output.

    :raises FeedError: nothing to differentiate; an output is not finite where the values are smooth.
    :raises RefgradError: the interpreter does not run the model.
    """
    fed = [value.name for value in graph_inputs(case.model.graph) if is_float(case.feeds.get(value.name))]
    wrt = case.wrt if case.wrt is not None else tuple(fed)
    floats = [v.name for v in case.model.graph.output if v.type.tensor_type.elem_type in FLOATS]
    outputs = case.outputs if case.outputs is not None else tuple(floats)
    if not wrt or not outputs:
        raise FeedError(f"{case}: no float input is fed, or no output is float, so there is nothing to differentiate.")
    prepared = in_float64(case.model, wrt)
    results = prepared.run(widened(case.feeds), outputs)
    bad = [name for name, value in results.items() if not np.all(np.isfinite(value))]
    if bad and case.values == "smooth":
        raise FeedError(f"{case}: the outputs {choices(bad)} are not finite, so they have no derivative.")
    drawn = zlib.crc32(f"{case.name}|{seed}".encode())
    rng = np.random.default_rng([drawn, 0])
    declared = {value.name: describe(value).dtype for value in case.model.graph.output}
    cotangents = {
        name: np.asarray(rng.standard_normal(results[name].shape)).astype(declared[name] or np.float32)
        for name in outputs
    }
    problem = Problem(case.name, case.model, wrt, dict(case.feeds), cotangents, drawn, case.tolerance)
    return replace(problem, kinked=kinked(case.model, prepared, problem.at, wrt, outputs))
