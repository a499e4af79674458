"""All special points, in several processes, and their results as data."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Sequence
from typing import Any

from refgrad.conformance.tools.jets.judging import JetVerdict, judged
from refgrad.conformance.tools.jets.planes import EXISTS
from refgrad.conformance.tools.jets.point import SpecialPoint
from refgrad.conformance.tools.jets.zeros import every_point

_POINTS: list[SpecialPoint] = []  # of this process


def judge_all(operators: Sequence[str] = (), jobs: int = 2) -> list[JetVerdict]:
    """The verdicts on every point, or on the points of some operators, in the order of the table."""
    _POINTS[:] = every_point()
    chosen = [k for k, point in enumerate(_POINTS) if not operators or point.operator in operators]
    if jobs == 1:
        return [verdict for k in chosen for verdict in judged(_POINTS[k])]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return [verdict for found in pool.imap(_judge, chosen, chunksize=4) for verdict in found]


def _judge(k: int) -> list[JetVerdict]:
    if not _POINTS:
        _POINTS[:] = every_point()
    try:
        return list(judged(_POINTS[k]))
    except Exception as error:
        error.add_note(f"at {_POINTS[k].operator} [{_POINTS[k].where}]")
        raise


def results(verdicts: Sequence[JetVerdict]) -> dict[str, Any]:
    """The counts per operator, and the kind of number that refgrad returns at each point without a derivative."""
    counts: dict[str, Counter[str]] = {}
    choices: dict[str, dict[tuple[str, str, str], list[int]]] = {}
    for v in verdicts:
        counts.setdefault(v.operator, Counter())[f"{v.order} {v.status}"] += 1
        if v.status != EXISTS:
            point = choices.setdefault(f"{v.operator} | {v.where}", {})
            point.setdefault(("×".join(v.inputs), v.status, v.says), []).append(v.order)
    return {
        "counts": {operator: dict(sorted(found.items())) for operator, found in sorted(counts.items())},
        "choices": {
            point: [
                f"{by} {','.join(map(str, orders))} {status}: {says}" for (by, status, says), orders in found.items()
            ]
            for point, found in choices.items()
        },
    }
