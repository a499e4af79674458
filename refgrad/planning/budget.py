"""A memory budget for a gradient: recompute as little as possible, so that the predicted peak is within the budget.

The forward nodes are cut into segments, as for `recompute=True`, and the first k of them are computed again. The first layers
come first because the backward pass needs their values last. A larger k takes less memory and more operations, so bisection
finds the smallest k that fits. If recomputing all segments does not fit, coarser and finer cuts are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from onnx import ModelProto

from refgrad.errors import InvalidModelError, OptionError
from refgrad.planning import interpreter, onnxruntime
from refgrad.planning.cost import operations
from refgrad.planning.program import program, refuse_unknown
from refgrad.reverse.memory import Budget
from refgrad.reverse.recompute import Segments, cut
from refgrad.reverse.writing import PlannedGradient, WrittenGradient, write_gradient
from refgrad.sizes import readable

_CUTS = (1.0, 0.5, 2.0, 0.25)  # the sizes of segments, in units of √n
# ONNX Runtime's kernels need up to a tenth more than predicted: for workspaces, and because its optimizer changes the graph.
_WORKSPACES = 1.1


@dataclass(frozen=True)
class _Candidate:
    segments: Segments  # the nodes that it computes again
    written: WrittenGradient
    peak: int  # bytes
    operations: int


def peak_and_operations(model: ModelProto, sizes: Mapping[str, int]) -> tuple[int, int]:
    """The bytes that a run of a gradient takes at its peak, on the runtime that takes more, and the run's operations.

    :raises OptionError: a size is not known.
    """
    try:
        planned = program(model, sizes)
        refuse_unknown(planned)
    except InvalidModelError as error:
        raise OptionError(
            f"memory= cannot be used: no memory can be predicted for this gradient. {error} Or name the nodes to recompute."
        ) from error
    except OptionError as error:
        if not error.unknown_size:
            raise
        raise OptionError(
            f"memory= needs known sizes. {error.unknown_size} Give it with the budget: memory='2 GiB for N=32'."
        ) from error
    peak = max(interpreter.usage(planned).peak, round(_WORKSPACES * onnxruntime.usage(planned).peak))
    return peak, operations(planned)


def gradient_within_budget(budget: Budget, planned: PlannedGradient) -> WrittenGradient:
    """The gradient with the fewest operations whose predicted peak is within the budget.

    Segments are chosen for the gradient in ai.onnx operators, whose shapes are known. In another dialect the same nodes are
    computed again.

    :raises OptionError: no choice of segments is within the budget, or a size is not known.
    """
    in_ai_onnx = replace(planned, request=planned.request.plain)
    best = _best(budget, in_ai_onnx)
    return best.written if in_ai_onnx.request is planned.request else write_gradient(planned, best.segments)


def _best(budget: Budget, planned: PlannedGradient) -> _Candidate:
    def candidate_of(segments: Segments) -> _Candidate:
        written = write_gradient(planned, segments)
        return _Candidate(segments, written, *peak_and_operations(written.model, budget.sizes))

    unsegmented = candidate_of(())
    if unsegmented.peak <= budget.limit:
        return unsegmented
    smallest = unsegmented
    for scale in _CUTS:
        segments = cut(planned.graph, scale)
        complete = candidate_of(segments)
        smallest = min(smallest, complete, key=lambda candidate: candidate.peak)
        if complete.peak <= budget.limit:
            return _with_fewest_segments(segments, complete, budget.limit, candidate_of)
    raise OptionError(
        f"memory={readable(budget.limit)!r} is too little. The peak is {readable(smallest.peak)} with recomputation and "
        f"{readable(unsegmented.peak)} without, weights and feeds not counted. "
        f"Allow {readable(smallest.peak * 1.001)}, or feed less at a time."
    )


def _with_fewest_segments(
    segments: Segments,
    complete: _Candidate,
    limit: int,
    candidate_of: Callable[[Segments], _Candidate],
) -> _Candidate:
    """The candidate with the fewest operations that bisection finds among the first k segments.

    :param complete: the candidate that computes all segments again; its peak is within the limit.
    """
    best, too_few, enough = complete, 0, len(segments)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        candidate = candidate_of(segments[:middle])
        if candidate.peak <= limit:
            enough = middle
            best = min(best, candidate, key=lambda each: each.operations)
        else:
            too_few = middle
    return best
