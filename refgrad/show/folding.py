"""Find the nodes of a graph that repeat others, layer for layer: a layer that occurs many times is shown once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LONGEST = 512  # nodes of a layer
_FEWEST = 3  # copies that are worth folding


@dataclass(frozen=True)
class Fold:
    """`copies` runs of `length` nodes from `start` on, which compute the same of other values."""

    start: int
    length: int
    copies: int

    @property
    def shown(self) -> range:
        """The positions of the copy that stands for all: the second, as the first may be fed something else."""
        return range(self.start + self.length, self.start + 2 * self.length)

    @property
    def hidden(self) -> int:
        """How many nodes are not shown."""
        return (self.copies - 1) * self.length


def folds(operators: Sequence[object], reads: Sequence[Sequence[int]]) -> list[Fold]:
    """The layers that repeat one after the other, none of which overlap, in their order.

    :param operators: of each node, something that is equal where nodes compute the same.
    :param reads: of each node, the positions of the nodes that it reads from; -1 for anything else.
    """
    numbers: dict[object, int] = {}
    kinds = np.array([numbers.setdefault(operator, len(numbers)) for operator in operators], np.int64)
    found: list[Fold] = []
    _search(kinds, reads, 0, len(kinds), found)
    return sorted(found, key=lambda fold: fold.start)


def _search(kinds: np.ndarray, reads: Sequence[Sequence[int]], start: int, end: int, found: list[Fold]) -> None:
    """Find the folds between two positions: the one that hides most, then those on both sides of it."""
    pending = [(start, end)]
    while pending:
        start, end = pending.pop()
        best = _best(kinds, reads, start, end)
        if best is not None:
            found.append(best)
            pending += [(start, best.start), (best.start + best.length * best.copies, end)]


def _best(kinds: np.ndarray, reads: Sequence[Sequence[int]], start: int, end: int) -> Fold | None:
    best: Fold | None = None
    part = kinds[start:end]
    for length in range(2, min(_LONGEST, len(part) // _FEWEST) + 1):
        same = part[:-length] == part[length:]
        for first, last in _runs(same, (_FEWEST - 1) * length):
            for begin, stop in _alike(reads, start + first, start + last, length):
                fold = Fold(begin, length, (stop - begin) // length + 1)
                is_layer = fold.copies >= _FEWEST and len(set(kinds[begin : begin + length])) > 1
                if is_layer and (best is None or fold.hidden > best.hidden):
                    best = fold
    return best if best is not None and best.hidden > _FEWEST else None


def _runs(same: np.ndarray, least: int) -> list[tuple[int, int]]:
    """The stretches in which all are true, of at least this length."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a >= least]


def _alike(reads: Sequence[Sequence[int]], first: int, last: int, length: int) -> list[tuple[int, int]]:
    """The parts of a stretch in which each node reads as the one a layer later does; the first layer reads from elsewhere."""
    found, begin = [], None
    for k in range(first, last + 1):
        fits = k < last and _fits(reads[k], reads[k + length], length, begin if begin is not None else k)
        if fits and begin is None:
            begin = k
        elif not fits and begin is not None:
            found.append((begin, k))
            begin = None
    return found


def _fits(mine: Sequence[int], later: Sequence[int], length: int, begin: int) -> bool:
    if len(mine) != len(later):
        return False
    return all(
        there - here == length or there == here or (here < begin and there < begin + length)
        for here, there in zip(mine, later, strict=True)
    )
