"""Each operator, forward and backward, at sizes that models have, against torch eager.

    python benchmarks/operators.py [PATTERN ...]                # ONNX Runtime; needs onnxruntime and torch
    python benchmarks/operators.py --interpreter [PATTERN ...]  # the interpreter; needs torch
    python benchmarks/operators.py --ort [PATTERN ...]          # dialect "ort" against "onnx"; needs onnxruntime-training-cpu
    python benchmarks/operators.py --cuda [PATTERN ...]         # on a GPU; needs onnxruntime-gpu and torch

Two threads each, every system in a process of its own, which take turns; the medians of the ratios of neighbours. A call has
the inputs and a cotangent, and leaves the outputs and the gradients by all float inputs. Weights are inputs, so nothing is
folded. "forward ms" is the model alone on the same system: what no backward pass can be faster than. "MiB" is what the first
call adds to the process at its peak, the results included.

"moved MB" is what all nodes read and write (`refgrad.cost`, without views), "least MB" the inputs and results once. "bound ms"
is how long the nodes must take: each the longer of its bytes at the rate of an Add and its operations at the rate of a MatMul,
both measured in the same run, the Add at the size nearest to the node's.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import onnx.defs
from on_device import Job, add_arguments, compile_alone, means, rows_on_device, save_so_far, settings
from onnx import helper, numpy_helper
from operator_cases import ROWS, Row, fused_torch, opset
from timing import RESULTS, Process, save

import refgrad
from refgrad.errors import RefgradError
from refgrad.protos.traverse import versions_of

THREADS = 2
SECONDS, ROUNDS = 0.25, 9  # of one system in all its rounds of a row; at least so many rounds
MIB = 2**20
DISABLE_HUGE_PAGES = 41  # PR_SET_THP_DISABLE of Linux's prctl


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
    """The model that computes the outputs and the gradients, or the outputs alone (dialect ""), and its feeds."""
    model, feeds, wrt = model_of(row)
    made = refgrad.gradient(model, wrt, keep_outputs=True, dialect=dialect) if dialect else model
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

    torch.set_num_threads(THREADS)
    model, feeds, wrt = model_of(row)
    constants = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
    forward, moved, seeds = torch_parts(model, feeds, wrt, constants)
    return lambda: torch_step(forward, moved, seeds)


def torch_parts(
    model: Any, feeds: dict[str, np.ndarray], wrt: list[str], constants: dict[str, Any], device: str = "cpu"
) -> tuple[Callable[[], Any], list[Any], list[Any]]:
    """The function that computes the float outputs in torch, the tensors to differentiate by, and the cotangents."""
    import torch

    from refgrad.conformance.oracles.tables.torch_table import TABLE
    from refgrad.conformance.oracles.torch import _attributes

    [node] = model.graph.node
    tensors = {name: torch.from_numpy(np.array(value)).to(device) for name, value in feeds.items()}
    moved = [tensors[name].requires_grad_() for name in wrt]
    seeds = [tensors[f"{name}_grad"] for name in node.output if f"{name}_grad" in tensors]
    result = next(value for name, value in feeds.items() if name.endswith("_grad"))
    attributes = _attributes(node, versions_of(model)[""], result)
    arguments = [constants[name] if name in constants else tensors[name] if name else None for name in node.input]
    fused, composed = fused_torch().get(node.op_type, lambda *_: None), TABLE.get(node.op_type)

    def forward() -> list[Any]:
        made = fused(attributes, *arguments)
        made = composed(attributes, *arguments) if made is None else made
        return list(made[: len(seeds)]) if isinstance(made, tuple | list) else [made]

    return forward, moved, seeds


def torch_step(forward: Callable[[], Any], moved: list[Any], seeds: list[Any]) -> list[Any]:
    """The outputs and the gradients."""
    import torch

    made = forward()
    shaped = [seed.reshape(y.shape) for y, seed in zip(made, seeds, strict=False)]
    gradients = torch.autograd.grad(made, moved, shaped)
    return [x.contiguous() for x in (*made, *gradients)]  # a runtime returns no views


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
    """The MiB that it adds to the process at its peak. Linux alone.

    NumPy asks for huge pages, and whatever gets its memory later is then resident by 2 MiB at a time: this call has none.
    """
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    libc.prctl(DISABLE_HUGE_PAGES, 1, 0, 0, 0)
    before = memory("VmRSS")
    try:
        call()
        return (memory("VmHWM") - before) / 1024
    finally:
        libc.prctl(DISABLE_HUGE_PAGES, 0, 0, 0, 0)


def memory(what: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1])


VIEWS = ("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")  # ONNX Runtime copies results alone
PRODUCTS = ("Attention", "Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN")
SIZES = [2**k for k in range(15, 27)]  # the bytes that an Add moves


def rates() -> tuple[dict[int, float], float]:
    """Bytes a second of Add, by what it moves, and operations a second of MatMul, on ONNX Runtime with two threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS

    def seconds(operator: str, *shape: int) -> float:
        value = functools.partial(helper.make_tensor_value_info, elem_type=1)
        node = helper.make_node(operator, ["a", "b"], ["y"])
        graph = helper.make_graph(
            [node], "rate", [value("a", shape=shape), value("b", shape=shape)], [value("y", shape=shape)]
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        fed = {name: onnxruntime.OrtValue.ortvalue_from_numpy(np.ones(shape, np.float32)) for name in "ab"}
        found = []
        for _ in range(30):
            start = time.perf_counter()
            session.run_with_ort_values(["y"], fed)
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    return {size: size / seconds("Add", size // 12) for size in SIZES}, 2 * 1024**3 / seconds("MatMul", 1024, 1024)


def bound(made: Any, rate: tuple[dict[int, float], float]) -> dict[str, float]:
    """What the nodes of a graph move, the least that a single one could, and the milliseconds that both rates allow."""
    try:
        cost = refgrad.cost(made, {"*": 1}, runtime="onnxruntime")
    except RefgradError:  # a shape that values decide
        return {}
    results = {value.name for value in made.graph.output}
    copied = {node.name for node in made.graph.node if node.op_type not in VIEWS or results & set(node.output)}
    nodes = [node for node in cost.nodes if node.alive and (node.name in copied or node.operator not in VIEWS)]
    milliseconds = 0.0
    for node in nodes:
        moved = node.read + node.written
        nearest = min(SIZES, key=lambda size: abs(np.log(size / max(moved, 1))))
        computing = node.flops / rate[1] if node.operator in PRODUCTS else 0.0
        milliseconds += 1e3 * max(moved / rate[0][nearest], computing)
    moved = sum(node.read + node.written for node in nodes)
    return {
        "moved MB": round(moved / 1e6, 2),
        "least MB": round((cost.feeds + cost.weights + cost.results) / 1e6, 2),
        "bound ms": round(milliseconds, 3),
    }


class System(Process):
    """A system in a process of its own; what it cannot do is raised."""

    def __init__(self, system: str, dialect: str) -> None:
        super().__init__(serve, system, dialect, patience=600)

    def ask(self, *asked: Any) -> Any:
        """Have it prepare a row, or run it so many times."""
        found = super().ask(*asked)
        if isinstance(found, str):
            raise RuntimeError(f"{' '.join(self.arguments)}: {found}")
        return found


def kernels(row: Row) -> list[str]:
    """The operators of ONNX Runtime's training that dialect "ort" emits for a row."""
    made, _ = gradient_of(row, "ort")
    return sorted({node.op_type for node in made.graph.node if node.domain or not onnx.defs.has(node.op_type)})


def measure(row: Row, processes: dict[str, System], forward: System | None, rate: Any) -> dict[str, Any]:
    """A row of the table: the first process against the other."""
    place = ROWS.index(row)
    peak = {name: process.ask("prepare", place) for name, process in processes.items()}
    calls = {}
    for name, process in processes.items():
        process.ask("run", 2)
        calls[name] = max(1, int(SECONDS / ROUNDS / process.ask("run", 3)))
    rounds: dict[str, list[float]] = {name: [] for name in processes}
    for _ in range(ROUNDS):
        for name, process in processes.items():
            rounds[name].append(process.ask("run", calls[name]))
    first, other = processes
    found: dict[str, Any] = {"row": row.label}
    for name in processes:
        found[f"{name} ms"] = round(1e3 * statistics.median(rounds[name]), 3)
    found["ratio"] = round(statistics.median(a / b for a, b in zip(rounds[first], rounds[other], strict=True)), 2)
    if forward is not None:
        forward.ask("prepare", place)
        forward.ask("run", 2)
        found["forward ms"] = round(1e3 * min(forward.ask("run", calls[first]) for _ in range(3)), 3)
    made, _ = gradient_of(row, "onnx")
    found["nodes"] = len(made.graph.node)
    if first == "ort":
        found["its kernels"] = ", ".join(kernels(row))
    if rate is not None:
        found |= bound(made, rate)
        if found.get("bound ms"):
            found["of bound"] = round(found[f"{first} ms"] / found["bound ms"], 2)
    return found | {f"{name} MiB": round(value, 1) for name, value in peak.items()}


# On a GPU


class Numbers(list[Any]):
    """What is constant in a row, where a program has Python's own numbers instead of a tensor."""

    def tolist(self) -> list[Any]:
        """The numbers, as of a tensor."""
        return list(self)

    def __int__(self) -> int:
        [number] = self
        return int(number)


def gradient_job(key: str) -> Job:
    """The gradient of a row with what the interpreter computes in double precision."""
    from refgrad.backends import get_backend

    model, feeds, wrt = model_of(ROWS[int(key)])
    made = refgrad.gradient(model, wrt, keep_outputs=True)
    fed = {value.name: feeds[value.name] for value in made.graph.input}
    kinds = {
        value.name: helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type) for value in made.graph.output
    }
    exact = get_backend("numpy").prepare(made, precision="float64").run(fed)
    expected = {name: np.asarray(value).astype(kinds[name]) for name, value in exact.items()}
    return Job(made.SerializeToString(), fed, expected, (model, feeds, wrt))


def torch_on_device(key: str, job: Job, device: str, compiled: bool) -> tuple[list[str], Callable[[], Any]]:
    model, feeds, wrt = job.more
    constants: dict[str, Any] = {}
    for tensor in model.graph.initializer:
        value = numpy_helper.to_array(tensor).tolist()
        constants[tensor.name] = Numbers(value) if isinstance(value, list) else value
    forward, moved, seeds = torch_parts(model, feeds, wrt, constants, device)
    outputs = [name for name in model.graph.node[0].output if f"{name}_grad" in feeds][: len(forward())]
    if compiled and model.graph.node[0].op_type in ("RNN", "GRU", "LSTM"):
        raise NotImplementedError("torch.compile writes out all steps, which takes it minutes")
    if compiled:
        forward = compile_alone(forward, key)
    return [*outputs, *(f"{name}_grad" for name in wrt)], lambda: torch_step(forward, moved, seeds)


def on_gpu(rows: list[Row], arguments: argparse.Namespace) -> None:
    """The table of operators on a GPU, saved row by row."""
    output = arguments.output
    if output is None and not arguments.patterns and arguments.device == "cuda":
        output = RESULTS / "operators_cuda.json"
    found: list[dict[str, Any]] = []
    keys = [str(ROWS.index(row)) for row in rows]
    for key, figures in rows_on_device(keys, gradient_job, torch_on_device, *settings(arguments)):
        found.append({"row": ROWS[int(key)].label, **figures})
        save_so_far(found, output)
    print(means(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", help="rows, such as 'Conv*'")
    parser.add_argument("--interpreter", action="store_true", help="the interpreter instead of ONNX Runtime")
    parser.add_argument("--ort", action="store_true", help='dialect "ort" against dialect "onnx"')
    add_arguments(parser)
    arguments = parser.parse_args()
    rows = [r for r in ROWS if not arguments.patterns or any(fnmatchcase(r.label, p) for p in arguments.patterns)]
    if arguments.cuda:
        on_gpu(rows, arguments)
        return
    forward = rate = None
    if arguments.ort:
        name, processes = "operators_ort", {d: System("onnxruntime", d) for d in ("ort", "onnx")}
    elif arguments.interpreter:
        name, processes = "operators_interpreter", {s: System(s, "onnx") for s in ("interpreter", "torch")}
    else:
        name, processes = "operators", {s: System(s, "onnx") for s in ("onnxruntime", "torch")}
        forward = System("onnxruntime", "")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rate = pool.apply(rates)
    found = []
    for row in rows:
        try:
            found.append(measure(row, processes, forward, rate))
        except RuntimeError as error:
            print(row.label, error, flush=True)
            continue
        print(found[-1], flush=True)
    for process in (*processes.values(), *filter(None, [forward])):
        process.end()
    ratios = [r["ratio"] for r in found]
    print(f"geometric mean {np.exp(np.mean(np.log(ratios))):.3f} of {len(ratios)} rows")
    if not arguments.patterns:
        save(name, found)


if __name__ == "__main__":
    main()
