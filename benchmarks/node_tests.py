"""Every node test of onnx: the interpreter against `onnx.reference`, both prepared beforehand, in turn in one process.

python benchmarks/node_tests.py                # all, and reports/results/node_tests.json
python benchmarks/node_tests.py Resize Loop    # the tests with such a name or operator, printed only
"""

from __future__ import annotations

import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test import loader
from onnx.reference import ReferenceEvaluator
from timing import save

from refgrad.backends import get_backend

ROUNDS = 9  # of which the median counts
SECONDS = 5e-5  # one sample repeats its call until it takes about so long
AGAIN = 0.9  # what comes out above this is measured anew, with more rounds: noise goes both ways


def sample(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def ratio(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """The median seconds of both, and the median of the ratios of neighbouring samples."""
    ours(), theirs()
    times = [max(1, round(SECONDS / sample(call, 1))) for call in (ours, theirs)]
    pairs = [(sample(ours, times[0]), sample(theirs, times[1])) for _ in range(rounds)]
    mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    return mine, other, statistics.median(a / b for a, b in pairs)


def calls(test: Any) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """A run of the interpreter and one of `onnx.reference`; None where the latter cannot."""
    inputs = [numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x for x in test.data_sets[0][0]]
    feeds: Mapping[str, Any] = dict(zip((v.name for v in test.model.graph.input), inputs, strict=False))
    arrays = {k: np.asarray(v) if isinstance(v, np.generic) else v for k, v in feeds.items()}
    prepared = get_backend("numpy").prepare(test.model)
    try:
        evaluator = ReferenceEvaluator(test.model)
        evaluator.run(None, arrays)
    except Exception:
        return None  # it raises whatever it likes
    return lambda: prepared.run(arrays), lambda: evaluator.run(None, arrays)


def main() -> None:
    warnings.simplefilter("ignore")  # of onnx.reference, and of the tests that onnx makes
    chosen = sys.argv[1:]
    rows, failed = [], []
    for test in loader.load_model_tests(kind="node"):
        operators = {node.op_type for node in test.model.graph.node}
        if chosen and not any(word in operators or word in test.name for word in chosen):
            continue
        pair = calls(test)
        if pair is None:
            failed.append(test.name)
            continue
        found = ratio(*pair, ROUNDS)
        if found[2] > AGAIN:
            found = ratio(*pair, 3 * ROUNDS)
        rows.append((found[2], test.name, found[0] * 1e6, found[1] * 1e6))
    rows.sort(reverse=True)
    for value, name, ours, theirs in rows[:40]:
        print(f"{value:6.2f}  {ours:9.1f} µs {theirs:9.1f} µs  {name}")
    slower = [row for row in rows if row[0] > 1]
    if chosen:
        return
    save(
        "node_tests",
        [
            {
                "node tests": len(rows),
                "slower than onnx.reference": len(slower),
                "worst ratio": round(rows[0][0], 2),
                "geometric mean": round(math.exp(statistics.fmean(math.log(row[0]) for row in rows)), 3),
                "slower": {name: round(value, 2) for value, name, *_ in slower},
                "onnx.reference fails on": failed,
            }
        ],
    )


if __name__ == "__main__":
    main()
