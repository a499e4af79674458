"""Time and memory of `gradient()` as a model gets deeper, and of running the gradient as a loop makes more steps.

    python benchmarks/depth.py

A chain of nodes, a Scan and a Loop whose steps read a slice and a weight of 64 by 64. Each row comes from a process of its own.
What is linear takes ten times as much from one row to the next: "growth" is the time of a row over that of the row before it,
of the run of the gradient where there is one, else of `gradient()`.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from memory import current, peak_since
from onnx import TensorProto, helper, numpy_helper
from timing import save

WIDTH = 64
SIZES = (1_000, 10_000, 100_000)


def value(name: str, shape: tuple[int, ...], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model_of(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def chain(count: int) -> onnx.ModelProto:
    """`count` nodes, each of which reads the one before it."""
    operators = ("Sin", "Tanh")
    nodes = [helper.make_node(operators[k % 2], [f"v{k}"], [f"v{k + 1}"]) for k in range(count)]
    return model_of(helper.make_graph(nodes, "chain", [value("v0", (3,))], [value(f"v{count}", (3,))]))


def iteration(operator: str, steps: int) -> onnx.ModelProto:
    """s = tanh(s W + q) for every row q of Q, as a Scan or as a Loop."""
    step = [
        helper.make_node("MatMul", ["s", "W"], ["p"]),
        helper.make_node("Add", ["p", "q"], ["r"]),
        helper.make_node("Tanh", ["r"], ["t"]),
    ]
    s, q, t = (value(name, (WIDTH,)) for name in "sqt")
    weights = [numpy_helper.from_array((np.eye(WIDTH) * 0.9).astype(np.float32), "W")]
    if operator == "Scan":
        body = helper.make_graph(step, "step", [s, q], [t])
        node = helper.make_node("Scan", ["x", "Q"], ["y"], body=body, num_scan_inputs=1)
    else:
        slice_of = helper.make_node("Gather", ["Q", "i"], ["q"])
        goes_on = helper.make_node("Identity", ["on"], ["still_on"])
        number, on, still_on = (
            value("i", (), TensorProto.INT64),
            *(value(name, (), TensorProto.BOOL) for name in ("on", "still_on")),
        )
        body = helper.make_graph([slice_of, *step, goes_on], "step", [number, on, s], [still_on, t])
        node = helper.make_node("Loop", ["steps", "", "x"], ["y"], body=body)
        weights.append(numpy_helper.from_array(np.array(steps), "steps"))
    inputs = [value("x", (WIDTH,)), value("Q", (steps, WIDTH))]
    return model_of(helper.make_graph([node], operator, inputs, [value("y", (WIDTH,))], weights))


def fastest(call: Callable[[], Any], rounds: int = 2) -> float:
    """The seconds of a call: what else the machine does only adds to them."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(what: str, count: int) -> dict[str, Any]:
    import refgrad
    from refgrad.backends import get_backend

    refgrad.gradient(chain(10))
    model = chain(count) if what == "chain" else iteration(what, count)
    before = current()
    gradient = refgrad.gradient(model)
    memory = peak_since(before)
    seconds = fastest(lambda: refgrad.gradient(model))
    row = {
        "model": "a chain of nodes" if what == "chain" else f"the steps of a {what}",
        "n": f"{count:,}",
        "gradient() s": round(seconds, 3),
        "memory MiB": round(memory, 1),
        "time": seconds,
    }
    if what != "chain":
        rng = np.random.default_rng(0)
        shapes = {"x": (WIDTH,), "Q": (count, WIDTH), "y_grad": (WIDTH,)}
        feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        prepared = get_backend("numpy").prepare(gradient)
        before = current()
        prepared.run(feeds)
        row["memory of the run MiB"] = round(peak_since(before), 1)
        row["time"] = fastest(lambda: prepared.run(feeds))
        row["run s"] = round(row["time"], 3)
    return row


def main() -> None:
    rows = []
    spawn = multiprocessing.get_context("spawn")
    for what in ("chain", "Scan", "Loop"):
        previous = None
        for count in SIZES:
            with spawn.Pool(1) as pool:
                row = pool.apply(measure, (what, count))
            seconds = row.pop("time")
            row["growth"] = "" if previous is None else round(seconds / previous, 1)
            previous = seconds
            rows.append(row)
    save("depth", rows)


if __name__ == "__main__":
    main()
