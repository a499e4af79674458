"""Columns for the parallel branches of a graph whose nodes are drawn one below the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_LANES = 12  # columns, at most


def lanes(reads: Sequence[Sequence[int]], held: Collection[int] = ()) -> list[int]:
    """Return the column of each node: a node continues the column of what it reads, if nobody has continued it.

    :param reads: of each node, the positions of the nodes that it reads from, all before its own; others are ignored.
    :param held: the positions of nodes whose column only a reader continues, however many have read them.

    >>> lanes([[], [0], [0], [1, 2]])
    [0, 0, 1, 0]
    """
    left = [0] * len(reads)  # readers to come
    for k, one in enumerate(reads):
        for maker in one:
            if 0 <= maker < k:
                left[maker] += 1
    found: list[int] = []
    tips: dict[int, int] = {}  # the node that a column ends in
    for k, one in enumerate(reads):
        makers = [maker for maker in one if 0 <= maker < k]
        mine = [found[maker] for maker in makers if tips.get(found[maker]) == maker]
        free = next((lane for lane in range(_LANES) if lane not in tips), _LANES - 1)
        found.append(min(mine) if mine else free)
        for maker in makers:
            left[maker] -= 1
            if left[maker] <= 0 and maker not in held and tips.get(found[maker]) == maker:
                del tips[found[maker]]
        tips[found[k]] = k
    return found
