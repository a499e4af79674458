"""What it costs to find a fault in a large model: seconds and peak memory, beside one run of its gradient.

    python benchmarks/locating_scale.py MODEL NODE [-o reports/results/locating_scale.json]

MODEL is an export, such as the BERT of examples/architectures.py with twelve layers; NODE is the node of it whose kernel and
whose rule are planted to be off by 0.1 %. Each line is a process of its own, one after the other.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from locating import Planted, _in_node, builder, names_of, scaled, times
from onnx import ModelProto

import refgrad
from refgrad.backends.base import graph_inputs
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance import compare, locate
from refgrad.conformance.locating.sides import Live
from refgrad.conformance.problems.feeds import random_feeds

RUN = "one run of the gradient, float32"


def _gradient(model: ModelProto, feeds: dict[str, Any]) -> tuple[ModelProto, dict[str, Any]]:
    made = refgrad.gradient(model, cotangent="ones")
    return made, feeds


def _run(model: ModelProto, feeds: dict[str, Any], precision: str | None) -> str:
    made, fed = _gradient(model, feeds)
    NumpyBackend().prepare(made, precision=precision).run(fed)
    return ""


def _located(model: ModelProto, feeds: dict[str, Any]) -> str:
    made, fed = _gradient(model, feeds)
    return "right" if locate(made, fed, "numpy").is_right else "wrong"


def _compared(model: ModelProto, feeds: dict[str, Any], side: Any) -> str:
    found = compare(model, "refgrad@numpy", side, feeds)
    return ", ".join(names_of(found)) or ("right" if found.ok else "wrong")


def jobs(node: str) -> dict[str, Callable[[ModelProto, dict[str, Any]], str]]:
    """What is measured, by its title."""
    kernel = Live("refgrad", Planted(_in_node((node, scaled(1.001)))))
    rule = Live(builder(times(1.001), node), "numpy")
    return {
        RUN: lambda m, f: _run(m, f, None),
        "one run of the gradient, double": lambda m, f: _run(m, f, "float64"),
        "locate, nothing is wrong": _located,
        "compare, nothing is wrong": lambda m, f: _compared(m, f, "refgrad@numpy"),
        "compare, a wrong kernel": lambda m, f: _compared(m, f, kernel),
        "compare, a wrong rule": lambda m, f: _compared(m, f, rule),
    }


def measured(path: Path, node: str, title: str) -> dict[str, Any]:
    """One line, in this process."""
    model = onnx.load(path)
    feeds = {k: np.asarray(v) for k, v in random_feeds(graph_inputs(model.graph), seed=0).items()}
    start = time.perf_counter()
    named = jobs(node)[title](model, feeds)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"what": title, "named": named, "s": round(seconds, 1), "MiB": round(peak)}


def main() -> None:
    """Measure each line in a process of its own, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("node")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measured(given.model, given.node, given.only)))
        return
    rows: list[dict[str, Any]] = []
    for title in jobs(given.node):
        command = [sys.executable, __file__, str(given.model), given.node, "--only", title]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
        row = json.loads(made.stdout.splitlines()[-1])
        first = rows[0] if rows else row
        rows.append(row | {"memory of one run": round(row["MiB"] / first["MiB"], 2)})
        print(json.dumps(rows[-1]), flush=True)
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
