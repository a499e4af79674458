"""The gradient that a request asks for: plan it (find the path through the model), then write it (sweep and assemble)."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from onnx import ModelProto

from refgrad.builder.op import Emitter
from refgrad.builder.values import Values
from refgrad.errors import NoGradientError, RuleError
from refgrad.model.graph import Graph, taken_names
from refgrad.model.normalise import normalise
from refgrad.reverse.assembly import assemble
from refgrad.reverse.chunked_attention import split_into_blocks
from refgrad.reverse.leaks import leaks
from refgrad.reverse.path import Path, find_requested_path
from refgrad.reverse.recompute import Segments, segments, with_bodies
from refgrad.reverse.refusal import refuse
from refgrad.reverse.report import LeakedGradient, ZeroGradient
from refgrad.reverse.request import Request
from refgrad.reverse.strong_zero import with_strong_zeros
from refgrad.reverse.sweep import SweepResults, sweep
from refgrad.reverse.zeros import zeros


@dataclass(frozen=True)
class PlannedGradient:
    """A gradient before it is written: the request, resolved in one graph."""

    request: Request
    graph: Graph
    wrt: list[str]  # the names in the request, or the defaults
    outputs: list[str]  # likewise
    path: Path  # the nodes between `wrt` and `outputs`

    @classmethod
    def of(cls, graph: Graph, request: Request) -> PlannedGradient:
        """The gradient of `graph` that `request` describes.

        :raises UnknownNameError: a name that the model does not have, that is given twice, or that is no float.
        """
        wrt, outputs, path = find_requested_path(graph, request.wrt, request.outputs, request.conventions.quantization)
        return cls(request, graph, wrt, outputs, path)

    @property
    def is_blocked(self) -> bool:
        """True if a node on the path has no derivative."""
        return bool(self.path.blocked or self.path.blocked_within)

    @property
    def zeros(self) -> tuple[ZeroGradient, ...]:
        """The gradients that are zero for every feed."""
        return zeros(self.path, self.wrt, self.outputs, self.request.conventions.quantization)

    @property
    def leaks(self) -> tuple[LeakedGradient, ...]:
        """The gradients that would be zero in exact arithmetic, and are not because an operator rounds."""
        return leaks(self.path, self.graph, self.wrt, self.outputs, self.request.conventions.quantization)


@dataclass(frozen=True)
class WrittenGradient:
    """The model of a gradient, and how it came about."""

    model: ModelProto
    sweep_results: SweepResults
    planned: PlannedGradient


def plan_gradient(model: ModelProto | str | os.PathLike[str], request: Request) -> PlannedGradient:
    """The gradient of a model that `request` describes. Functions are inlined if a node on the path has no derivative.

    :raises InvalidModelError: the model cannot be read, or onnx refuses it.
    :raises UnknownNameError: a name that the model does not have, that is given twice, or that is no float.
    """
    graph = normalise(model, keep=request.keeps_functions, removable=request.conventions.strong_zero, lift=True)
    planned = PlannedGradient.of(graph, request)
    if graph.functions and planned.is_blocked:
        return _plan_inlined(model, request)
    return planned


def differentiate(
    model: ModelProto | str | os.PathLike[str], request: Request, emitter: type[Emitter] = Emitter
) -> WrittenGradient:
    """The gradient of a model. It keeps the model's functions if their derivatives can be functions too.

    :raises RefgradError: what `refgrad.gradient` refuses.
    """
    planned = plan_gradient(model, request)
    if planned.graph.functions:
        written = _write_with_functions(planned, emitter)
        if written is not None:
            return written
        planned = _plan_inlined(model, request)  # inlined, a shape that was an argument may be known
    return write_gradient(planned, emitter=emitter)


def _plan_inlined(model: ModelProto | str | os.PathLike[str], request: Request) -> PlannedGradient:
    return PlannedGradient.of(normalise(model, lift=True), request)


def _write_with_functions(planned: PlannedGradient, emitter: type[Emitter]) -> WrittenGradient | None:
    """The gradient with functions; None if a rule needs to know more of a value than is known inside a function.

    Only the sweep can find out. The path knows which operators have a rule, but not what a rule asks for: types, ranks and
    constants, also of values that it emitted itself. A loop asks for the shapes of the values that its sweep reads.
    """
    with suppress(NoGradientError, RuleError):
        return write_gradient(planned, emitter=emitter)
    return None


def write_gradient(
    planned: PlannedGradient, recomputed: Segments | None = None, emitter: type[Emitter] = Emitter
) -> WrittenGradient:
    """The model of a planned gradient.

    :param recomputed: the nodes that are computed again, by default the nodes that the request names.
    :param emitter: the class of the emitter that rules see.
    :raises NoGradientError: an operator on the path has no rule or no derivative.
    :raises UnknownNameError: an entry of `recompute` that no node matches.
    """
    if planned.is_blocked:
        raise refuse(planned.path)
    request, swept = planned.request, planned
    if recomputed is None:
        recomputed = segments(planned.path.graph, request.recompute)
    if recomputed and (in_blocks := split_into_blocks(planned.path.graph, recomputed)):
        graph, recomputed = in_blocks
        swept = PlannedGradient.of(graph, request)
    path = swept.path
    op = emitter(
        Values(path.graph, path.adjoint_types, inputs=frozenset(swept.wrt)),
        request.target,
        taken_names(path.graph),
        conventions=request.conventions,
        needed=path.needed,
        repeated=with_bodies(path, recomputed),
    )
    results = sweep(path, op, swept.wrt, swept.outputs, request.cotangent)
    model = assemble(results, recomputed, request.keep_outputs, request.weights)
    if request.conventions.strong_zero and request.guarded:
        with_strong_zeros(model, results.seeds)
    return WrittenGradient(model, results, planned)
