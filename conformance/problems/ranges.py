"""Intermediate results that overflow or underflow their types, and the results that change by it.

A number beyond the largest one of its type becomes infinite, and the results may be finite again: x / √mean(x²) is 0 in float16
where x² overflows. A number below the smallest one becomes 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.problems.feeds import widened
from refgrad.conformance.problems.rounding import Confined, Limits, limits
from refgrad.errors import RefgradError, counted
from refgrad.model.normalise import normalise
from refgrad.protos.traverse import reads_of
from refgrad.protos.types import FLOATS
from refgrad.tables.randomness import may_draw, operator_of

OVERFLOW, UNDERFLOW = "overflow", "underflow"
IN_RANGE = "scale before it, compute this part in a wider type, or work with logarithms"
_NO_LEAST = 1e-300  # a smallest number that no value is below
_MOST = 8  # values that are tried one by one
_ROUNDINGS = 64  # of the largest element of a result: what moves less is rounding
_SHOWN = 3  # results in a message


@dataclass(frozen=True)
class Changed:
    """An element of a result that changes because an intermediate result leaves its type: the right number, and the other."""

    name: str
    at: tuple[int, ...]
    right: float
    value: float

    def __str__(self) -> str:
        return f"{self.name!r} is {self.value:.6g} at {list(self.at)} instead of {self.right:.6g}"


@dataclass(frozen=True)
class OutOfRange:
    """A value that its type cannot hold, though it can hold what the value is computed from.

    `kind` is `OVERFLOW` or `UNDERFLOW`; `value` is the number furthest out, in double, and `at` its place in `output`. `count`
    is the number of such elements, `is_all` true if no other is but 0. `changes` are the results that it changes.
    """

    kind: str
    node: str
    operator: str
    output: str
    at: tuple[int, ...]
    value: float
    dtype: str
    limit: float
    count: int
    is_all: bool
    changes: tuple[Changed, ...] = ()

    @property
    def brief(self) -> str:
        """The value, its number and its type."""
        beyond = "more" if self.kind == OVERFLOW else "less"
        return f"{self.output!r} is {abs(self.value):.2g}, {beyond} than {self.dtype} can hold"

    def __str__(self) -> str:
        as_well = counted(self.count - 1, f"more element {self.kind}s", f"more elements {self.kind}")
        more = f"; {as_well}, too" if self.count > 1 else ""
        beyond = "more" if self.kind == OVERFLOW else "less"
        said = f"{self.operator} {self.node!r}: {self.output!r} is {self.value:.6g} at {list(self.at)}"
        told = f"{self.kind} in {said}, {beyond} than {self.dtype} can hold ({self.limit:.6g}){more}"
        if not self.changes:
            return told
        rest = len(self.changes) - _SHOWN
        others = f" and {counted(rest, 'more result')}" if rest > 0 else ""
        return f"{told}; because of it, {', '.join(map(str, self.changes[:_SHOWN]))}{others}"


def leaving(model: ModelProto, feeds: Mapping[str, Any]) -> Iterator[OutOfRange]:
    """The values of a model that leave their types, in the order of its nodes; not those that follow from others.

    :param feeds: the values of its inputs.
    :raises RefgradError: the interpreter does not run the model.
    """
    graph = normalise(model, shapeless=True)
    types = _types(model)
    feeds = widened(dict(feeds))
    values = NumpyBackend().prepare(model, precision="float64").run(feeds, trace=True)
    out: dict[str, set[str]] = {OVERFLOW: set(), UNDERFLOW: set()}
    for node in graph.nodes:
        for output in node.proto.output:
            value = values.get(output)
            if output not in types or not isinstance(value, np.ndarray) or not value.size:
                continue
            for kind, names in out.items():
                found = _found(kind, value, types[output])
                if found is None:
                    continue
                names.add(output)
                if not names.intersection(reads_of(node.proto)):
                    label = node.proto.name or output
                    operator = ".".join(filter(None, operator_of(node.proto)))
                    yield replace(found, node=label, operator=operator, output=output)


def changing(model: ModelProto, feeds: Mapping[str, Any], but: Collection[str] = ()) -> tuple[OutOfRange, ...]:
    """The values that leave their types and change results by it, each with these results; none if no type is narrow.

    Whether a value is the cause is tried: everything is computed in double but for this value, which stays within its type.

    :param but: the nodes to leave out, by name.
    """
    types = _types(model)
    if not types or any(map(may_draw, model.graph.node)):
        return ()
    wide = widened(dict(feeds))
    try:
        exact = NumpyBackend().prepare(model, precision="float64").run(wide)
        if not _changes(model, wide, exact, {name: limits(kind) for name, kind in types.items()}, types):
            return ()
        found: list[OutOfRange] = []
        for one in leaving(model, feeds):
            if one.node not in but and len(found) < _MOST:
                epsilon, tiny, most = limits(types[one.output])
                of_kind = (epsilon, _NO_LEAST, most) if one.kind == OVERFLOW else (epsilon, tiny, np.inf)
                alone = {one.output: of_kind}
                if changes := _changes(model, wide, exact, alone, types):
                    found.append(replace(one, changes=changes))
        return tuple(found)
    except RefgradError:
        return ()


def _types(model: ModelProto) -> dict[str, np.dtype[Any]]:
    """The float types narrower than double of the values of a model."""
    kinds = normalise(model, shapeless=True).types
    types = {name: helper.tensor_dtype_to_np_dtype(kind) for name, kind in kinds.items() if kind in FLOATS}
    return {name: kind for name, kind in types.items() if kind != np.float64}


def _found(kind: str, value: np.ndarray, dtype: np.dtype[Any]) -> OutOfRange | None:
    epsilon, tiny, most = limits(dtype)
    with np.errstate(invalid="ignore"):
        size = np.where(np.isfinite(value), np.abs(value), 0.0)
    told = size > most * (1 + epsilon / 2) if kind == OVERFLOW else (size > 0) & (size < tiny)
    if not told.any():
        return None
    worst = np.argmax(size) if kind == OVERFLOW else np.argmin(np.where(told, size, np.inf))
    at = tuple(map(int, np.unravel_index(int(worst), value.shape)))
    count = int(np.count_nonzero(told))
    limit = most if kind == OVERFLOW else tiny
    is_all = count == np.count_nonzero(size)
    return OutOfRange(kind, "", "", "", at, float(value[at]), str(dtype), limit, count, is_all)


def _changes(
    model: ModelProto,
    feeds: Mapping[str, Any],
    exact: Mapping[str, Any],
    ranges: Mapping[str, Limits],
    types: Mapping[str, np.dtype[Any]],
) -> tuple[Changed, ...]:
    """The results that change where these values stay within their types."""
    confined = NumpyBackend().prepare(model, precision=Confined(ranges, gradual=True)).run(feeds)
    changes = []
    for name, right in exact.items():
        if not isinstance(right, np.ndarray) or right.dtype.kind != "f" or name not in types:
            continue
        got = confined[name]
        finite = np.abs(right[np.isfinite(right)])
        epsilon, tiny, _ = limits(types[name])
        room = _ROUNDINGS * epsilon * float(np.max(finite, initial=0.0)) + tiny
        with np.errstate(invalid="ignore"):
            off = np.where((got == right) | (np.isnan(got) & np.isnan(right)), 0.0, np.abs(got - right))
        off = np.where(np.isnan(off), np.inf, off)
        if off.size and off.max() > room:
            at = tuple(map(int, np.unravel_index(int(np.argmax(off)), off.shape)))
            changes.append(Changed(name, at, float(right[at]), float(got[at])))
    return tuple(changes)
