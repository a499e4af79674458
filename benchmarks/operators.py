"""Each operator, forward and backward, on ONNX Runtime, on the interpreter and in torch eager, at sizes that models have.

    python benchmarks/operators.py [PATTERN ...]

Two threads each, every system in a process of its own, which take turns; the medians of the ratios of neighbours. A call has
the inputs and a cotangent, and leaves the outputs and the gradients by all float inputs. Weights are inputs, so nothing is
folded.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper
from operator_cases import ROWS, Row, fused_torch, opset
from timing import save

import refgrad

THREADS = 2
SECONDS, ROUNDS = 0.25, 9  # of one system in all its rounds of a row; at least so many rounds
MIB = 2**20


def model_of(row: Row) -> tuple[Any, dict[str, np.ndarray], list[str]]:
    """The model, its feeds with cotangents of its float outputs, and what to differentiate by."""
    from refgrad.backends import get_backend
    from refgrad.conformance.case import node_case

    rng = np.random.default_rng(0)
    arrays = [None if make is None else make(rng) for make in row.inputs]
    case = node_case(
        row.op_type,
        *arrays,
        opset=opset(row.op_type),
        outputs=row.outputs,
        constant=row.constant,
        wrt=row.wrt,
        **row.attributes,
    )
    model = case.model
    node = next(node for node in model.graph.node if node.op_type == row.op_type)
    values = get_backend("numpy").prepare(model).run(case.feeds, trace=True)
    results = {name: np.asarray(values[name]) for name in node.output}
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in results.items()}
    outputs = [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in results.items()]
    graph = helper.make_graph([node], row.op_type, model.graph.input, outputs, model.graph.initializer)
    model = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    floats = {name: array for name, array in results.items() if array.dtype.kind == "f"}
    seeds = {f"{name}_grad": rng.standard_normal(array.shape).astype(array.dtype) for name, array in floats.items()}
    wrt = row.wrt or [name for name, array in case.feeds.items() if array.dtype.kind == "f"]
    return model, {**case.feeds, **seeds}, list(wrt)


def gradient_of(row: Row, dialect: str) -> tuple[Any, dict[str, np.ndarray]]:
    """The model that computes the outputs and the gradients, and its feeds."""
    model, feeds, wrt = model_of(row)
    made = refgrad.gradient(model, wrt, keep_outputs=True, dialect=dialect)
    taken = {value.name for value in made.graph.input}
    return made, {name: value for name, value in feeds.items() if name in taken}


def onnxruntime_call(row: Row, dialect: str) -> Callable[[], Any]:
    import onnxruntime

    made, feeds = gradient_of(row, dialect)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = THREADS, 4
    session = onnxruntime.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    fed = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()}
    names = [value.name for value in session.get_outputs()]
    return lambda: session.run_with_ort_values(names, fed)


def numpy_call(row: Row, dialect: str) -> Callable[[], Any]:
    from refgrad.backends import get_backend

    made, feeds = gradient_of(row, dialect)
    prepared = get_backend("numpy").prepare(made)
    return lambda: prepared.run(feeds)


def torch_call(row: Row, dialect: str) -> Callable[[], Any]:
    import torch

    from refgrad.conformance.oracles.tables.torch_table import TABLE
    from refgrad.conformance.oracles.torch import _attributes

    torch.set_num_threads(THREADS)
    model, feeds, wrt = model_of(row)
    [node] = model.graph.node
    constants = {t.name: refgrad_array(t) for t in model.graph.initializer}
    given = {**constants, **feeds}
    inputs = {n: torch.from_numpy(np.array(given[n])) for n in node.input if n}
    moved = [inputs[name].requires_grad_() for name in wrt]
    seeds = [torch.from_numpy(given[f"{n}_grad"]) for n in node.output if f"{n}_grad" in given]
    results = {name[:-5]: value for name, value in feeds.items() if name.endswith("_grad")}
    attributes = _attributes(node, opset(row.op_type), next(iter(results.values())))
    arguments = [inputs[n] if n else None for n in node.input]
    function = fused_torch().get(row.op_type)
    if function is None or function(attributes, *arguments) is None:
        function = TABLE[row.op_type]

    def call() -> Any:
        made = function(attributes, *arguments)
        made = list(made[: len(seeds)]) if isinstance(made, tuple | list) else [made]
        shaped = [seed.reshape(y.shape) for y, seed in zip(made, seeds, strict=True)]
        gradients = torch.autograd.grad(made, moved, shaped)
        return [x.contiguous() for x in (*made, *gradients)]  # a runtime returns no views

    return call


def refgrad_array(tensor: Any) -> np.ndarray:
    from onnx import numpy_helper

    return np.array(numpy_helper.to_array(tensor))


SYSTEMS = {"onnxruntime": onnxruntime_call, "interpreter": numpy_call, "torch": torch_call}


def serve(system: str, dialect: str, pipe: Any) -> None:
    """A process that makes calls of rows and times them."""
    call: Callable[[], Any] | None = None
    for asked, argument in iter(pipe.recv, None):
        try:
            if asked == "prepare":
                call = None
                gc.collect()
                call = SYSTEMS[system](ROWS[argument], dialect)
                gc.collect()
                found = first_call(call)
            else:
                assert call is not None
                start = time.perf_counter()
                for _ in range(argument):
                    call()
                found = (time.perf_counter() - start) / argument
        except Exception as error:
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        pipe.send(found)


def first_call(call: Callable[[], Any]) -> float:
    """The MiB that it adds to the process at its peak."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        call()
        return 0.0
    before = memory("VmRSS")
    call()
    return (memory("VmHWM") - before) / 1024


def memory(what: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1])


class Process:
    """A system in a process."""

    def __init__(self, system: str, dialect: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(system, dialect, other), daemon=True)
        self.process.start()

    def ask(self, what: str, argument: int) -> Any:
        """Have it prepare a row, or run it so many times."""
        self.pipe.send((what, argument))
        found = self.pipe.recv()
        if isinstance(found, str):
            raise RuntimeError(found)
        return found


def measure(row: Row, processes: dict[str, Process]) -> dict[str, Any]:
    place = ROWS.index(row)
    peak = {name: process.ask("prepare", place) for name, process in processes.items()}
    once = {}
    for name, process in processes.items():
        process.ask("run", 2)
        once[name] = process.ask("run", 3)
    calls = {name: max(1, int(SECONDS / ROUNDS / seconds)) for name, seconds in once.items()}
    rounds: dict[str, list[float]] = {name: [] for name in processes}
    for _ in range(ROUNDS):
        for name, process in processes.items():
            rounds[name].append(process.ask("run", calls[name]))
    first, *others = processes
    found: dict[str, Any] = {"operator": row.op_type, "row": row.label}
    for name in processes:
        found[f"{name} ms"] = round(1e3 * statistics.median(rounds[name]), 3)
    for name in others:
        ratios = [a / b for a, b in zip(rounds[first], rounds[name], strict=True)]
        found[f"of {name}"] = round(statistics.median(ratios), 2)
    return found | {f"{name} MiB": round(value, 1) for name, value in peak.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", help="rows, such as 'Conv*'")
    parser.add_argument("--interpreter", action="store_true")
    arguments = parser.parse_args()
    rows = [r for r in ROWS if not arguments.patterns or any(fnmatchcase(r.label, p) for p in arguments.patterns)]
    processes = {
        name: Process(name, "onnx")
        for name in (("interpreter", "torch") if arguments.interpreter else ("onnxruntime", "torch"))
    }
    found = []
    for row in rows:
        try:
            found.append(measure(row, processes))
        except RuntimeError as error:
            found.append({"operator": row.op_type, "row": row.label, "error": str(error)})
        print(found[-1], flush=True)
    ratios = [r["of torch"] for r in found if "of torch" in r]
    print("geometric mean", round(float(np.exp(np.mean(np.log(ratios)))), 3), "of", len(ratios))
    if not arguments.patterns:
        save("operators", found)


if __name__ == "__main__":
    main()
