"""Ratios of two things measured in one run: the machine's own speed cancels."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def alternate(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """Call both in turn after a warm-up; the median seconds of each and the median of the ratios ours/theirs."""
    ours(), theirs()
    pairs = []
    for _ in range(rounds):
        start = time.perf_counter()
        ours()
        middle = time.perf_counter()
        theirs()
        pairs.append((middle - start, time.perf_counter() - middle))
    return (
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        statistics.median(pair[0] / pair[1] for pair in pairs),
    )


def save(name: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows and write them to `results/<name>.json`, which the README's table is made from."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
