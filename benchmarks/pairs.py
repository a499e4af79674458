"""Real systems beside refgrad on exported models: what `refgrad compare` says of their differences, a sentence each.

    python benchmarks/pairs.py MODELS ENVIRONMENTS [--pair NAME ...] [--model NAME ...] [--update]

MODELS holds exports of examples/torch_models.py, <name>.onnx. ENVIRONMENTS holds a virtual environment for each system that
is not installed here, by the names in `PAIRS`; `nox -s pairs` makes them. Each comparison is a process of its own. Writes
reports/results/pairs.json; with --update it keeps the rows that are not measured anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import elsewhere_program as program
import numpy as np
from elsewhere import SECONDS, Elsewhere
from onnx import ModelProto
from timing import RESULTS, save

import refgrad
from refgrad.backends.base import graph_inputs, load_model
from refgrad.conformance import compare, locate
from refgrad.conformance.locating.recordings import Recording
from refgrad.conformance.locating.sides import Live, Side
from refgrad.conformance.locating.verdicts import GRADIENT, Comparison, Sided
from refgrad.conformance.problems.feeds import random_feeds
from refgrad.conformance.reports.comparisons import lines_of, sentence
from refgrad.errors import BackendError, abridged

MODELS = ("lstm", "vit", "unet", "mamba", "convnext", "segformer", "mlp", "bert", "gpt2", "resnet18")
VERDICTS = ("right", "wrong", "convention", "undecided", "missing")
COLUMNS = ("verdict", *VERDICTS, "sentence", "named", "s")


@dataclass(frozen=True)
class Pair:
    """Two sides. `b` is a side of `compare`; or it is run by `runtime` in `environment`: a gradient model of refgrad's, or,
    if `is_recorded`, the runtime's own gradients. With `environment` alone the comparison itself runs there. A runtime that
    does not read the models' IR version or opset gets them with the numbers `ir` and `opset`.
    """

    b: str = ""
    runtime: str = ""
    environment: str = ""
    is_recorded: bool = False
    ir: int = 0
    opset: int = 0
    a: str = "refgrad@ort-cpu"


PAIRS = {
    "ONNX Runtime 1.17": Pair(runtime="onnxruntime", environment="onnxruntime-1.17", ir=9),
    "onnx.reference": Pair("refgrad@onnx.reference"),
    "training wheel, dialect ort": Pair("refgrad:ort@ort-cpu", environment="training", a="refgrad@numpy"),
    "training wheel, its builder": Pair("onnxruntime:raw@ort-cpu", environment="training", a="refgrad@numpy"),
    "training wheel, its module builder": Pair("onnxruntime:module@ort-cpu", environment="training", a="refgrad@numpy"),
    "onnx-ad": Pair("onnx-ad@ort-cpu"),
    "onnx2torch, autograd": Pair(runtime="onnx2torch", environment="onnx2torch", is_recorded=True, opset=17),
    "tinygrad, autograd": Pair(runtime="tinygrad", environment="tinygrad", is_recorded=True),
    "tinygrad": Pair(runtime="tinygrad", environment="tinygrad"),
    "OpenVINO": Pair(runtime="openvino", environment="openvino"),
}


def recorded(runtime: Elsewhere, model: ModelProto, feeds: dict[str, np.ndarray]) -> Side:
    """The runtime's own gradients of a model, for random cotangents, as a recording.

    :raises BackendError: the runtime does not make them.
    """
    rng = np.random.default_rng(1)
    made = refgrad.backends.get_backend("numpy").prepare(model).run(feeds)
    cotangents = {
        name: rng.standard_normal(value.shape).astype(value.dtype)
        for name, value in made.items()
        if value.dtype.kind == "f"
    }
    files = {key: runtime.path(".npz") for key in ("feeds", "cotangents", "results")}
    program.write(files["feeds"], feeds)
    program.write(files["cotangents"], cotangents)
    path = Path(runtime.path(".onnx"))
    path.write_bytes(runtime.older(model).SerializeToString())
    runtime.ask({"model": str(path), **files})
    tensors = program.read(files["results"]) | feeds | {f"{name}_grad": value for name, value in cotangents.items()}
    return Recording.of(tensors, runtime.name, model)


def compared(pair: Pair, path: Path, environments: Path) -> dict[str, Any]:
    """The row of one comparison, except for its pair and its model."""
    start = time.perf_counter()
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    model = load_model(path)
    b: str | Side = pair.b
    if pair.runtime:
        runtime = Elsewhere(pair.runtime, python_in(environments, pair.environment), pair.ir, pair.opset)
        b = Live("refgrad", runtime)
        feeds = {name: np.asarray(value) for name, value in random_feeds(graph_inputs(model.graph), seed=0).items()}
        try:
            b = recorded(runtime, model, feeds) if pair.is_recorded else b
        except BackendError as error:
            failing = [one.found for one in locate(model, feeds, runtime).culprits if one.found.failed]
            why = f"it does not run {abridged(one.label for one in failing)}: {failing[0].failed}" if failing else error
            row |= {"verdict": "no gradient", "sentence": f"{runtime.name} makes no gradient: {why}"}
            names = [f"{one.operator} {one.name}" for one in failing]
            return row | {"named": _listed(names), "s": round(time.perf_counter() - start, 1)}
    found = compare(model, pair.a, b)
    counts: Counter[str] = Counter(tensor.b.verdict for tensor in found.tensors if tensor.kind == GRADIENT)
    row["verdict"] = "ok" if found.ok else "different"
    row |= {verdict: counts[verdict] for verdict in VERDICTS}
    row |= {"sentence": sentence(found), "named": _listed(named(found)), "s": round(time.perf_counter() - start, 1)}
    for side in (found.a, found.b):
        for line in lines_of(side):
            print(f"    {side.label}: {line}", file=sys.stderr)
    return row


def _listed(names: list[str]) -> str:
    return abridged(names, 6) if names else ""


def named(found: Comparison) -> list[str]:
    """The nodes that a comparison blames, on both sides."""
    return [name for side in (found.a, found.b) for name in _named(side)]


def _named(side: Sided) -> list[str]:
    names = [name for fault in side.rules.faults for name in fault.nodes] if side.rules else []
    if side.kernels is not None:
        names += [f"{one.found.operator} {one.found.name}" for one in side.kernels.culprits]
        names += [name for group in side.kernels.groups for name in group.nodes]
    return names + ([side.unsteady.node] if side.unsteady and side.unsteady.node else [])


def python_in(environments: Path, name: str) -> Path:
    """The Python of an environment."""
    return environments / name / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def measured(title: str, model: str, models: Path, environments: Path) -> dict[str, Any]:
    """The row of one comparison, which runs in a process of its own."""
    pair, row = PAIRS[title], {"pair": title, "model": model, **dict.fromkeys(COLUMNS, "")}
    python = python_in(environments, pair.environment)
    if pair.environment and not python.exists():
        return row | {"verdict": "not measured", "sentence": f"There is no environment {pair.environment!r}."}
    own = str(python) if pair.environment and not pair.runtime else sys.executable
    command = [own, __file__, str(models), str(environments), "--pair", title, "--model", model, "--one"]
    try:
        made = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=2 * SECONDS)
    except subprocess.TimeoutExpired:
        return row | {"verdict": "not finished", "sentence": f"There is no result after {2 * SECONDS:g} s."}
    if made.returncode:
        return row | {"verdict": "failed", "sentence": f"The comparison ended with the code {made.returncode}."}
    return row | json.loads(made.stdout.splitlines()[-1])


def main() -> None:
    """Compare, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("environments", type=Path)
    parser.add_argument("--pair", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--model", nargs="+", default=list(MODELS))
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        row = compared(PAIRS[given.pair[0]], given.models / f"{given.model[0]}.onnx", given.environments)
        print(json.dumps(row))
        return
    held = RESULTS / "pairs.json"
    known = json.loads(held.read_text(encoding="utf-8")) if given.update and held.is_file() else []
    rows = {(row["pair"], row["model"]): row for row in known}
    for title in given.pair:
        for model in given.model:
            rows[title, model] = measured(title, model, given.models, given.environments)
            print(json.dumps(rows[title, model], ensure_ascii=False), flush=True)
    order = list(PAIRS)
    save("pairs", sorted(rows.values(), key=lambda row: (order.index(row["pair"]), row["model"])))


if __name__ == "__main__":
    main()
