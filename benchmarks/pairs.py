"""Real systems beside refgrad on exported models: what `refgrad compare` says of their differences, a sentence each.

    python benchmarks/pairs.py MODELS ENVIRONMENTS [--pair NAME ...] [--model NAME ...] [--update]

MODELS holds exports of examples/torch_models.py, <name>.onnx. ENVIRONMENTS holds a virtual environment for each of the systems that
is not installed here, by the names in `PAIRS`; `nox -s pairs` makes them. Each comparison is a process of its own. Writes
reports/results/pairs.json; with --update it keeps the rows that are not measured anew.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import elsewhere
import numpy as np
from onnx import ModelProto
from timing import RESULTS, save

import refgrad
from refgrad.backends import Backend, Prepared
from refgrad.backends.base import ModelLike, check_outputs, graph_inputs, graph_outputs, load_model
from refgrad.conformance import compare
from refgrad.conformance.locating.recordings import Recording
from refgrad.conformance.locating.sides import Live, Side
from refgrad.conformance.locating.verdicts import GRADIENT, Comparison, Sided
from refgrad.conformance.problems.feeds import random_feeds
from refgrad.conformance.reports.comparisons import lines_of, sentence
from refgrad.errors import BackendError

MODELS = ("lstm", "vit", "unet", "mamba", "convnext", "segformer", "mlp", "bert", "gpt2", "resnet18")
SECONDS = 600.0  # for an answer of a runtime, and twice so long for a comparison
VERDICTS = ("right", "wrong", "a convention", "undecided", "missing")


@dataclass(frozen=True)
class Pair:
    """Two sides. `b` is a side of `compare`; or it is run by `runtime` in `environment`: a gradient model of refgrad's, or,
    if `is_recorded`, the runtime's own gradients. With `environment` alone the comparison itself runs there. Models get an IR
    version of at most `ir`, if the runtime is older than theirs.
    """

    b: str = ""
    runtime: str = ""
    environment: str = ""
    is_recorded: bool = False
    ir: int = 0
    a: str = "refgrad@ort-cpu"


PAIRS = {
    "ONNX Runtime 1.17": Pair(runtime="onnxruntime", environment="onnxruntime-1.17", ir=9),
    "onnx.reference": Pair("refgrad@onnx.reference"),
    "training wheel, dialect ort": Pair("refgrad:ort@ort-cpu", environment="training", a="refgrad@numpy"),
    "training wheel, its builder": Pair("onnxruntime:raw@ort-cpu", environment="training", a="refgrad@numpy"),
    "training wheel, its module builder": Pair("onnxruntime:module@ort-cpu", environment="training", a="refgrad@numpy"),
    "onnx-ad": Pair("onnx-ad@ort-cpu"),
    "onnx2torch, autograd": Pair(runtime="onnx2torch", environment="onnx2torch", is_recorded=True),
    "tinygrad, autograd": Pair(runtime="tinygrad", environment="tinygrad", is_recorded=True),
    "tinygrad": Pair(runtime="tinygrad", environment="tinygrad"),
    "OpenVINO": Pair(runtime="openvino", environment="openvino"),
}


class Elsewhere(Backend):
    """A runtime in an environment of its own; the process is started again where it died."""

    def __init__(self, runtime: str, python: Path, ir: int = 0) -> None:
        self._runtime, self._python, self._ir = runtime, python, ir
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0
        self.name = runtime
        self.name = f"{runtime} {self.ask({})['version']}"

    def description(self) -> str:
        """The runtime with its version."""
        return self.name

    def path(self, suffix: str) -> str:
        """The path of a new file."""
        self._count += 1
        return f"{self._folder.name}/{self._count}{suffix}"

    def prepare(self, model: ModelLike, **options: Any) -> Prepared:
        """Let the runtime read the model.

        :raises BackendError: it does not, or an option is given.
        """
        if options:
            raise BackendError(f"{self.name} has no options")
        proto = load_model(model)
        if 0 < self._ir < proto.ir_version:
            older = ModelProto()
            older.CopyFrom(proto)
            older.ir_version = self._ir
            proto = older
        return _PreparedElsewhere(self, proto)

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request; to an empty one, what the process says when it starts.

        :raises BackendError: an error, no answer in time, or the process died.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [str(self._python), elsewhere.__file__, self._runtime],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            started = self._answer()
            if not asked:
                return started
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], SECONDS)
        line = process.stdout.readline() if ready else ""
        if not line:
            process.kill()
            code = process.wait()
            said = f"its process ended with {code}" if ready else f"nothing came back after {SECONDS:g} s"
            raise BackendError(said)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BackendError(answer["error"])
        return answer


class _PreparedElsewhere(Prepared):
    def __init__(self, owner: Elsewhere, model: ModelProto) -> None:
        self.inputs, self.outputs = graph_inputs(model.graph), graph_outputs(model.graph)
        self._owner, self._path = owner, Path(owner.path(".onnx"))
        self._path.write_bytes(model.SerializeToString())
        self._names = {
            "inputs": [value.name for value in self.inputs if not value.has_default],
            "outputs": [value.name for value in self.outputs],
        }
        owner.ask({"model": str(self._path), **self._names})

    def __del__(self) -> None:
        self._path.unlink(missing_ok=True)

    def run(self, feeds: Mapping[str, Any], outputs: Iterable[str] | None = None) -> dict[str, Any]:
        given, made = self._owner.path(".npz"), self._owner.path(".npz")
        elsewhere.write(given, {name: feeds[name] for name in self._names["inputs"]})
        self._owner.ask({"model": str(self._path), "feeds": given, "results": made, **self._names})
        results = elsewhere.read(made)
        for file in (given, made):
            Path(file).unlink()
        return {name: results[name] for name in check_outputs(outputs, self.outputs)}


def recorded(runtime: Elsewhere, path: Path, model: ModelProto) -> Side:
    """The runtime's own gradients of a model, for random feeds and cotangents, as a recording.

    :raises BackendError: the runtime does not make them.
    """
    feeds = {name: np.asarray(value) for name, value in random_feeds(graph_inputs(model.graph), seed=0).items()}
    rng = np.random.default_rng(1)
    made = refgrad.backends.get_backend("numpy").prepare(model).run(feeds)
    cotangents = {
        name: rng.standard_normal(value.shape).astype(value.dtype)
        for name, value in made.items()
        if value.dtype.kind == "f"
    }
    files = {key: runtime.path(".npz") for key in ("feeds", "cotangents", "results")}
    elsewhere.write(files["feeds"], feeds)
    elsewhere.write(files["cotangents"], cotangents)
    runtime.ask({"model": str(path.resolve()), **files})
    tensors = elsewhere.read(files["results"]) | feeds | {f"{name}_grad": value for name, value in cotangents.items()}
    return Recording.of(tensors, runtime.name, model)


def compared(pair: Pair, path: Path, environments: Path) -> dict[str, Any]:
    """The row of one comparison, except for its pair and its model."""
    start = time.perf_counter()
    row: dict[str, Any] = {"verdict": ""}
    model = load_model(path)
    try:
        runtime = Elsewhere(pair.runtime, python_in(environments, pair.environment), pair.ir) if pair.runtime else None
        b: str | Side = pair.b
        if runtime is not None:
            b = recorded(runtime, path, model) if pair.is_recorded else Live("refgrad", runtime)
    except BackendError as error:
        row |= {"verdict": "no gradient", "sentence": f"{pair.runtime} makes no gradient: {error}"}
        return row | {"s": round(time.perf_counter() - start, 1)}
    found = compare(model, pair.a, b)
    counts = Counter(tensor.b.verdict for tensor in found.tensors if tensor.kind == GRADIENT)
    row["verdict"] = "ok" if found.ok else "different"
    row |= {verdict: counts[verdict] for verdict in VERDICTS}
    row |= {"sentence": sentence(found), "named": ", ".join(named(found)), "s": round(time.perf_counter() - start, 1)}
    for side in (found.a, found.b):
        for line in lines_of(side):
            print(f"    {side.label}: {line}", file=sys.stderr)
    for tensor in found.tensors:
        if not tensor.ok:
            print(
                f"    {tensor.name}: a {tensor.a.verdict} {tensor.a.reason}; b {tensor.b.verdict} {tensor.b.reason}",
                file=sys.stderr,
            )
    return row


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
    pair, row = PAIRS[title], {"pair": title, "model": model}
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
