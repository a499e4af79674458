"""Find the elements of an input that are at a kink: the model has another derivative on each side of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from refgrad.backends.numpy.backend import NumpyModel
from refgrad.errors import BackendError
from refgrad.protos.traverse import graphs, nested
from refgrad.tables.kinks import KINKS

STEP = 1e-7  # relative to an element: a kink that is farther away is another point
_TESTS = 512  # for one input: more elements at kinks than these tests find are not told apart
_NOISE = 16 * float(np.finfo(np.float64).eps)  # the rounding of a value that is subtracted, relative to its size
_APART = 1e-3  # between the derivatives of both sides, relative to the larger

OPERATORS = frozenset(kink.operator for kink in KINKS)


def kinks_of(model: ModelProto) -> list[str]:
    """The operators of a model, and of the graphs in it, that have points without a derivative."""
    return sorted({node.op_type for graph in graphs(model.graph) for node in graph.node} & OPERATORS)


def kinked(
    model: ModelProto, prepared: NumpyModel, at: Mapping[str, Any], names: Iterable[str], outputs: Iterable[str]
) -> dict[str, np.ndarray]:
    """For each of the inputs `names` that has elements at a kink, where they are: an array of bool.

    An element is at a kink where one of the operators with kinks, or an output, has another derivative on each side when this
    element alone moves. An input with too many such elements is missing: nobody can tell them apart in reasonable time.

    :param prepared: the model in float64, with `names` as inputs.
    :param at: the point, in float64.
    """
    watched = [*_watched(model), *outputs]
    if len(watched) == len(list(outputs)):
        return {}
    at_kinks = {}
    for name in names:
        try:
            mask = _Search(prepared, at, name, watched).mask(None)
        except (BackendError, ValueError):  # the model does not run beside the point
            continue
        if mask is not None and mask.any():
            at_kinks[name] = mask
    return at_kinks


def is_at_kink(
    model: ModelProto, prepared: NumpyModel, at: Mapping[str, Any], name: str, outputs: Iterable[str]
) -> bool:
    """True if an element of an input is at a kink, or may be: all are moved at once.

    The parameters are the same as for `kinked`.
    """
    watched = [*_watched(model), *outputs]
    try:
        return _Search(prepared, at, name, watched).bends()
    except (BackendError, ValueError):  # the model does not run beside the point
        return False


def kinked_among(
    model: ModelProto, prepared: NumpyModel, at: Mapping[str, Any], name: str, outputs: Iterable[str], where: np.ndarray
) -> np.ndarray | None:
    """A mask of the elements of an input, among those in `where`, that are at a kink; None if they are too many to tell apart.

    :raises BackendError: the model does not run beside the point.
    """
    watched = [*_watched(model), *outputs]
    return _Search(prepared, at, name, watched).mask(where)


def _watched(model: ModelProto) -> Iterator[str]:
    """The names of the results of the operators with kinks, and of the nodes with graphs or functions that have them inside."""
    local = {
        (function.domain, function.name)
        for function in model.functions
        if any(node.op_type in OPERATORS for node in nested(function.node))
    }

    def bends(node: NodeProto) -> bool:
        return any(inner.op_type in OPERATORS or (inner.domain, inner.op_type) in local for inner in nested([node]))

    for node in model.graph.node:
        if bends(node):
            yield from filter(None, node.output)


class _Search:
    """Halve the elements of an input until those at a kink are found."""

    def __init__(self, prepared: NumpyModel, at: Mapping[str, Any], name: str, watched: Collection[str]) -> None:
        self._prepared, self._at, self._name, self._watched = prepared, at, name, set(watched)
        x = at[name]
        size = np.sqrt(np.mean(x[np.isfinite(x)] ** 2)) if np.isfinite(x).any() else 0.0
        lengths = np.where(x == 0, size or 1.0, np.abs(x))
        drawn = np.random.default_rng(x.size).uniform(0.5, 1.0, x.shape)  # so that nothing cancels
        self._direction = np.where(np.isfinite(x), lengths * drawn, 0.0)
        self._here = self._values(at)
        self._tests = 0

    def bends(self) -> bool:
        """True if the model bends where all elements move."""
        return self._direction.size > 0 and self._bends(np.arange(self._direction.size))

    def mask(self, where: np.ndarray | None) -> np.ndarray | None:
        """A mask of the elements at a kink, among some or all; None if there are too many."""
        mask = np.zeros(self._direction.shape, bool)
        places = np.arange(mask.size) if where is None else np.flatnonzero(where)
        left = [places] if places.size else []
        while left:
            places = left.pop()
            if self._tests == _TESTS:
                return None
            self._tests += 1
            if not self._bends(places):
                continue
            if len(places) == 1:
                mask.flat[places] = True
            else:
                left += np.array_split(places, 2)
        return mask

    def _values(self, at: Mapping[str, Any]) -> dict[str, np.ndarray]:
        values = self._prepared.run(at, trace=True)
        return {
            name: value
            for name, value in values.items()
            if name in self._watched and isinstance(value, np.ndarray) and value.dtype == np.float64
        }

    def _bends(self, places: np.ndarray) -> bool:
        """True if a value that is watched has another derivative on each side when these elements move."""
        direction = np.zeros(self._direction.shape)
        direction.flat[places] = self._direction.flat[places]
        if not direction.any():
            return False
        ends = {t: self._values({**self._at, self._name: self._at[self._name] + t * direction}) for t in _ENDS}
        with np.errstate(all="ignore"):
            return any(self._is_bent(here, [ends[t].get(name) for t in _ENDS]) for name, here in self._here.items())

    @staticmethod
    def _is_bent(here: np.ndarray, ends: list[np.ndarray | None]) -> bool:
        moved = [end for end in ends if end is not None and end.shape == here.shape]
        if len(moved) < len(ends):
            return False
        noise = _NOISE * np.max(np.abs(here), initial=0.0, where=np.isfinite(here)) / STEP
        sides, errors = [], []
        for far, near, t in ((moved[0], moved[1], -STEP), (moved[3], moved[2], STEP)):
            coarse, fine = (far - here) / t, (near - here) / (t / 2)
            sides.append(2 * fine - coarse)
            errors.append(np.abs(fine - coarse) + noise)
        left, right = sides
        apart = np.abs(right - left)
        told = apart > np.maximum(2 * (errors[0] + errors[1]), _APART * np.maximum(np.abs(left), np.abs(right)))
        return bool(np.any(np.isfinite(here) & (told | ~np.isfinite(apart))))


_ENDS = (-STEP, -STEP / 2, STEP / 2, STEP)
