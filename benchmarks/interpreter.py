"""Running time of the interpreter against ONNX Runtime with two threads and against onnx.reference.

    python examples/torch_models.py FOLDER
    python benchmarks/interpreter.py FOLDER

Forward, and forward plus gradient for the input and all weights (dialect "onnx"); what a node costs on a chain of additions
of two numbers. Each side runs in a process of its own, in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from interpreter_memory import light_resnet50
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from run_time import load, runner
from timing import alternate_processes, save

import refgrad
from refgrad.backends import get_backend

ROUNDS = 9
ADDITIONS = 10_000
MICROSECONDS_PER_NODE = 5
# The most that the ratio may be, forward and with the gradient, against ONNX Runtime.
GOALS = {"mlp": 2.0, "resnet18": 8.0, "light_resnet50": 8.0, "bert": 4.0, "gpt2": 4.0}
REFERENCE_GOALS = {"resnet18": 0.1}
NO_REFERENCE = ("bert", "gpt2")  # its GatherElements fails on them


def chain() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """x + c + c + ..., all numbers."""
    nodes = [helper.make_node("Add", [f"x{i}", "c"], [f"x{i + 1}"]) for i in range(ADDITIONS)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in ("x0", f"x{ADDITIONS}")]
    graph = helper.make_graph(
        nodes, "chain", ends[:1], ends[1:], [helper.make_tensor("c", TensorProto.FLOAT, [], [1.0])]
    )
    imports = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), {"x0": np.array(0, np.float32)}


def built(folder: Path, name: str, what: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model or its gradient, and what it is fed."""
    if name == "chain":
        return chain()
    model, feeds, wrt = light_resnet50() if name == "light_resnet50" else load(folder, name)
    if what == "with gradient":
        model = refgrad.gradient(model, wrt=wrt, keep_outputs=True)
    taken = {value.name for value in model.graph.input}
    return model, {key: value for key, value in feeds.items() if key in taken}


def interpreter(folder: Path, name: str, what: str) -> Callable[[], Any]:
    model, feeds = built(folder, name, what)
    prepared = get_backend("numpy").prepare(model)
    return lambda: prepared.run(feeds)


def onnxruntime(folder: Path, name: str, what: str) -> Callable[[], Any]:
    return runner(*built(folder, name, what))


def reference(folder: Path, name: str, what: str) -> Callable[[], Any]:
    model, feeds = built(folder, name, what)
    evaluator = ReferenceEvaluator(model)
    return lambda: evaluator.run(None, feeds)


def row(name: str, what: str, against: str, times: tuple[float, float, float], goal: float | None) -> dict[str, Any]:
    ours, theirs, ratio = times
    return {
        "model": name,
        "what": what,
        "against": against,
        "refgrad ms": round(ours * 1e3, 2),
        "other ms": round(theirs * 1e3, 2),
        "ratio": round(ratio, 3 if ratio < 0.1 else 2),
        "goal": "" if goal is None else f"at most {goal:g}",
        "met": "" if goal is None else "yes" if ratio <= goal else "no",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where examples/torch_models.py wrote the models")
    folder = parser.parse_args().folder
    rows = []
    for what in ("forward", "with gradient"):
        for name, goal in GOALS.items():
            times = alternate_processes(interpreter, onnxruntime, (folder, name, what), ROUNDS)
            rows.append(row(name, what, "onnxruntime", times, goal))
    for name in (name for name in GOALS if name not in NO_REFERENCE):
        times = alternate_processes(interpreter, reference, (folder, name, "forward"), 3, calls=3)
        rows.append(row(name, "forward", "onnx.reference", times, REFERENCE_GOALS.get(name)))
    times = alternate_processes(interpreter, onnxruntime, (folder, "chain", "forward"), ROUNDS)
    per_node = times[0] / ADDITIONS * 1e6
    rows.append(
        row(f"{ADDITIONS} additions of numbers", "forward", "onnxruntime", times, None)
        | {
            "goal": f"at most {MICROSECONDS_PER_NODE} µs a node",
            "met": "yes" if per_node <= MICROSECONDS_PER_NODE else "no",
        }
    )
    save("interpreter", rows)


if __name__ == "__main__":
    main()
