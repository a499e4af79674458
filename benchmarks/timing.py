"""Ratios of two things measured in one run: the machine's own speed cancels."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SETTLE = 0.1  # seconds in which the threads of the process before stop spinning


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


def alternate_processes(
    ours: Callable[..., Callable[[], Any]],
    theirs: Callable[..., Callable[[], Any]],
    arguments: tuple[Any, ...],
    rounds: int,
    calls: int = 7,
) -> tuple[float, float, float]:
    """As `alternate`, for what keeps threads spinning: each runs in a process of its own, `calls` times in turn.

    `ours(*arguments)` and `theirs(*arguments)` make what is called there.
    """
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1, _make, (ours, arguments)) as one, spawn.Pool(1, _make, (theirs, arguments)) as other:
        pairs = [(one.apply(_median, (calls,)), other.apply(_median, (calls,))) for _ in range(rounds + 1)][1:]
    return (
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        statistics.median(pair[0] / pair[1] for pair in pairs),
    )


def _make(maker: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]) -> None:
    global _called
    _called = maker(*arguments)


def _median(calls: int) -> float:
    time.sleep(SETTLE)
    _called()
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        _called()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


_called: Callable[[], Any]


def save(name: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows and write them to `results/<name>.json`, which docs/benchmarks.md is made from."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
