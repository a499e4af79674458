"""A memory budget for a gradient: the least recomputation whose predicted peak is within it.

The forward nodes are cut into segments, as for `recompute=True`, and the first k of them are computed again: the first layers
are needed last, when the backward pass has given back what the others kept. Each further segment takes less memory and more
operations, so k is found by bisection. Where all segments do not fit, coarser and finer cuts are tried.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from onnx import ModelProto

from refgrad.costs import interpreter, onnxruntime
from refgrad.costs.cost import operations, readable
from refgrad.costs.program import program, refuse_unknown
from refgrad.errors import InvalidModelError, OptionError
from refgrad.notices import notice
from refgrad.ranges import RANGES

Made = TypeVar("Made")
Segments = Sequence[frozenset[str]]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_CUTS = (1.0, 0.5, 2.0, 0.25)  # the sizes of segments, in units of √n
# ONNX Runtime's kernels take memory for themselves, and its optimizer changes more than the prediction knows: up to a tenth.
_WORKSPACES = 1.1


@dataclass(frozen=True)
class Budget:
    """So many bytes, for models of these sizes."""

    limit: int
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class _Candidate(Generic[Made]):
    segments: Segments
    made: Made
    peak: int
    operations: int


def budget_of(recompute: bool | str | Sequence[str], memory: str | None) -> tuple[bool | Sequence[str], Budget | None]:
    """The options `recompute` and `memory` of `gradient`; a budget as `recompute`, the old spelling, is taken for `memory`.

    :raises OptionError: both are given, or `memory` is no budget.
    """
    if isinstance(recompute, str):
        try:
            old = budget(recompute)
        except OptionError as error:
            raise OptionError(
                f"recompute={reprlib.repr(recompute)} is neither a bool nor a list: write a list for names or patterns, "
                "and memory='2 GiB' for a memory budget."
            ) from error
        if memory is None:
            notice(FutureWarning(f"recompute={reprlib.repr(recompute)} is a memory budget: write memory= instead."))
            return False, old
    if memory is None:
        return recompute, None
    if not isinstance(memory, str):
        raise OptionError(f"memory={reprlib.repr(memory)} is no memory budget: write a string such as '2 GiB'.")
    if recompute is not False:
        raise OptionError("A memory budget chooses the nodes to compute again: give memory, or recompute.")
    return False, budget(memory)


def budget(text: str) -> Budget:
    """The budget in "2 GiB", "1.5GB" or "800 MiB for N=32, T=128".

    :raises OptionError: it says nothing of the kind.
    """
    amount, separator, rest = text.partition(" for ")
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(?:([kKmMgGtT]i?)?[bB]|[bB]ytes)?\s*", amount)
    sizes: dict[str, int] = {}
    for part in rest.split(",") if separator else ():
        symbol, _, number = part.strip().rpartition("=")
        if not symbol or not number.isdecimal() or len(number) > 18:
            found = None
            break
        sizes[symbol.strip()] = int(number)
    size = 0 if found is None else int(float(found[1]) * _UNITS[(found[2] or "").lower()])
    if found is None or RANGES["max_memory"].why_not(size):
        raise OptionError(
            f"memory={reprlib.repr(text)} is no memory budget. Write a number and a unit, '2 GiB' or '800 MB', and the "
            "sizes of dimensions that the model does not know: '2 GiB for N=32, T=128'."
        )
    return Budget(size, sizes)


def peak(model: ModelProto, sizes: Mapping[str, int]) -> tuple[int, int]:
    """The bytes that a run of a gradient takes at its peak, on whichever runtime takes more, and its operations.

    :raises OptionError: a size is not known.
    """
    try:
        found = program(model, sizes)
        refuse_unknown(found)
    except InvalidModelError as error:
        raise OptionError(
            f"memory: no memory can be predicted for this gradient. {error} Or choose nodes by name."
        ) from error
    most = max(interpreter.usage(found).peak, round(_WORKSPACES * onnxruntime.usage(found).peak))
    return most, operations(found)


def within(
    asked: Budget,
    cut: Callable[[float], Segments],
    make: Callable[[Segments], tuple[ModelProto, Made]],
) -> tuple[Segments, tuple[ModelProto, Made]]:
    """The gradient with the fewest operations that keeps the budget, and the segments that it computes again.

    :param cut: cuts the forward nodes into segments of that many √n nodes.
    :param make: writes the gradient that computes these segments again.
    :raises OptionError: none keeps it, or a size is not known.
    """

    def tried(segments: Segments) -> _Candidate[tuple[ModelProto, Made]]:
        made = make(segments)
        return _Candidate(segments, made, *_known(made[0], asked.sizes))

    plain = tried(())
    if plain.peak <= asked.limit:
        return plain.segments, plain.made
    least = plain
    for scale in _CUTS:
        segments = cut(scale)
        whole = tried(segments)
        least = min(least, whole, key=lambda candidate: candidate.peak)
        if whole.peak <= asked.limit:
            best = _fewest(segments, whole, asked.limit, tried)
            return best.segments, best.made
    raise OptionError(
        f"memory: no choice of nodes keeps the peak within {readable(asked.limit)}. The least that was found is "
        f"{readable(least.peak)}, and {readable(plain.peak)} without recomputation; weights and feeds come on top. Give it "
        f"{readable(least.peak * 1.001)}, or feed less at a time."
    )


def _known(model: ModelProto, sizes: Mapping[str, int]) -> tuple[int, int]:
    try:
        return peak(model, sizes)
    except OptionError as error:
        if "sizes={" not in str(error):
            raise
        said = str(error).partition(" Give a number")[0]
        raise OptionError(
            f"memory: a budget is for known sizes. {said} Say for which size it is: '2 GiB for N=32'."
        ) from error


def _fewest(
    segments: Segments,
    whole: _Candidate[Made],
    limit: int,
    tried: Callable[[Segments], _Candidate[Made]],
) -> _Candidate[Made]:
    """The candidate that repeats the fewest of the first segments and fits."""
    best, low, high = whole, 0, len(segments)
    while high - low > 1:
        middle = (low + high) // 2
        candidate = tried(segments[:middle])
        if candidate.peak <= limit:
            high = middle
            best = min(best, candidate, key=lambda one: one.operations)
        else:
            low = middle
    return best
