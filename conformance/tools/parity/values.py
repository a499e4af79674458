"""Compare what both gradients compute on ONNX Runtime, and find who is right where they differ."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import numpy as np
import onnx

from refgrad.backends import get_backend
from refgrad.conformance.oracles.central import directional
from refgrad.conformance.problems.feeds import widened
from refgrad.conformance.problems.systems.training_form import LOSS
from refgrad.conformance.tools.parity.pair import Pair
from refgrad.errors import WorkerError
from refgrad.worker import Worker

EQUAL = 1e-6  # the difference of two results, relative to the largest element: rounding
FACTOR = 10  # how many times farther from float64 one float32 result may be than the other: more is not rounding
WRONG = 1e-5  # a float64 gradient farther from differences than this, relative to its norm, is wrong


def compare_values(pair: Pair, runner: Worker) -> tuple[str, str, dict[str, np.ndarray]]:
    """The verdict on both gradients on ONNX Runtime, the proof of who is right, and the results of ours."""
    results, failures = [], {}
    for whose, model in (("ours", pair.ours), ("theirs", pair.theirs)):
        try:
            results.append(runner.call(run, model.SerializeToString(), dict(pair.feeds)))
        except WorkerError as error:
            failures[whose] = f"{error.verdict}: {error}"
    if failures:
        whose = "both" if len(failures) == 2 else next(iter(failures))
        return f"{whose} fail", failures.get("theirs") or failures["ours"], {}
    if farthest(results[1], results[0]) <= EQUAL:
        return "equal", f"{farthest(results[1], results[0]):.1e}", results[0]
    exact = get_backend("numpy").prepare(pair.ours, precision="float64").run(widened(pair.feeds))
    graph, ours, theirs = _off(pair, exact), farthest(results[0], exact), farthest(results[1], exact)
    proof = f"off from float64 by {ours:.1e} (ours) and {theirs:.1e} (theirs); float64 is off from differences by {graph:.1e}"
    if graph > WRONG or ours > FACTOR * max(theirs, EQUAL):
        return "ours are wrong", proof, {}
    return "theirs are wrong" if theirs > FACTOR * max(ours, EQUAL) else "equal", proof, results[0]


def run(model: bytes, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of a model on ONNX Runtime."""
    return get_backend("ort-cpu").prepare(onnx.load_from_string(model)).run(feeds)


def farthest(results: Mapping[str, np.ndarray], truth: Mapping[str, np.ndarray]) -> float:
    """The largest difference of a result from `truth`, relative to the largest element; infinite where shapes differ."""
    return max((_distance(results[name], value) for name, value in truth.items()), default=0.0)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of two arrays, relative to the largest element; infinite where the shapes differ."""
    if a.shape != b.shape:
        return math.inf
    a, b = a.astype(np.float64), b.astype(np.float64)
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    far = float(np.max(np.abs(a - b))) / max(float(np.max(np.abs(b))), sys.float_info.min)
    return math.inf if math.isnan(far) else far


def _off(pair: Pair, gradients: Mapping[str, np.ndarray]) -> float:
    """How far gradients are from float64 differences along a random direction, relative to their norm."""
    forward = get_backend("numpy").prepare(pair.model, precision="float64")
    feeds = {name: value for name, value in widened(pair.feeds).items() if name != f"{LOSS}_grad"}
    rng = np.random.default_rng(0)
    worst = 0.0
    for name, gradient in gradients.items():
        source = name.removesuffix("_grad")
        if gradient.shape != feeds[source].shape:
            return math.inf
        direction = {source: rng.standard_normal(gradient.shape)}
        expected = directional(lambda x: forward.run(x), feeds, direction, {LOSS: np.ones(())})
        got = float(np.sum(gradient * direction[source]))
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
        size = max(norm, abs(expected.value), sys.float_info.min)
        error = (abs(got - expected.value) - expected.error) / size
        worst = max(worst, math.inf if math.isnan(error) else error)
    return worst
