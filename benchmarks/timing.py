"""Ratios of two things measured in one run: the machine's own speed cancels."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "reports" / "results"
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


class Process:
    """A process that answers one request after the other, and is started again where it ends.

    It runs `serve(*arguments, pipe)`, which reads tuples from the pipe and sends an answer for each: a string says why there is
    none. `patience` are the seconds that one may take.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any, patience: float = 60.0) -> None:
        self.serve, self.arguments, self.patience = serve, arguments, patience
        self.start()

    def start(self) -> None:
        """Start the process, again where it ended."""
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other = spawn.Pipe()
        self.process = spawn.Process(target=self.serve, args=(*self.arguments, other), daemon=True)
        self.process.start()
        other.close()  # so that a process that ends is seen

    def send(self, *asked: Any) -> None:
        """Ask for something, without waiting for the answer."""
        try:
            self.pipe.send(asked)
        except OSError:  # it ended after its last answer
            self.end()
            self.start()
            self.pipe.send(asked)

    def receive(self) -> Any:
        """The answer, or the reason why there is none as a string."""
        try:
            if self.pipe.poll(self.patience):
                return self.pipe.recv()
            found = f"no answer in {self.patience:g} s"
        except (EOFError, OSError):
            found = "the process ended"
        self.end()
        self.start()
        return found

    def ask(self, *asked: Any) -> Any:
        """Ask for something, and wait for the answer."""
        self.send(*asked)
        return self.receive()

    def end(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.join()


def write(path: str | Path, document: Any, depth: int = 1) -> None:
    """Write JSON to a path in `reports/results`. The outer `depth` levels of `document` have a line for each entry."""
    (RESULTS / path).write_text(_lines(document, depth) + "\n", encoding="utf-8")


def _lines(value: Any, depth: int) -> str:
    if not depth or not value or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(one, depth - 1)}" for key, one in value.items()) + "\n}"
    return "[\n" + ",\n".join(_lines(one, depth - 1) for one in value) + "\n]"


def save(name: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows and write them to `reports/results/<name>.json`, which reports/benchmarks.md is made from."""
    write(f"{name}.json", rows)
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
