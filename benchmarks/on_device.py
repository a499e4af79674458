"""What the benchmarks on a GPU share: ONNX Runtime and torch on a device, in processes that take turns.

Each gradient is written to a file first, with its feeds and its results, so that every system computes the same and is checked.
What torch compiles is compiled beforehand, in as many processes as there are cores; nothing is timed meanwhile.

ONNX Runtime reads and writes memory of the device that is bound once. Nothing waits for the device but the end of a round.
Both compute in float32 without TF32. On the device "cpu" the same code runs, as a rehearsal.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
import types
from argparse import ArgumentParser, Namespace
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from timing import Process, write

RUNTIMES = ("onnxruntime", "graph")  # without and with a CUDA graph
SECONDS, ROUNDS = 0.08, 5  # of one system in all its rounds of a row; the rounds
CPU = "CPUExecutionProvider"


@dataclass(frozen=True)
class Job:
    """A gradient model, or its path, with a value for each of its inputs and outputs; `more` is for torch."""

    gradient: bytes | str
    feeds: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    more: Any = None


class Call(NamedTuple):
    """`run` starts a call, `results` are its arrays, and `notes` are entered in the row."""

    run: Callable[[], Any]
    results: Callable[[], dict[str, np.ndarray]]
    notes: dict[str, Any]


Write = Callable[[str], Job]
# The names of the results, and what computes them: of a key, its job, a device, and whether it is compiled.
MakeTorch = Callable[[str, Job, str, bool], tuple[Sequence[str], Callable[[], Sequence[Any]]]]


def onnxruntime_call(job: Job, device: str, graph: bool) -> Call:
    """A call of ONNX Runtime, whose inputs and outputs lie on the device."""
    import onnxruntime

    providers: list[Any] = [CPU]
    if device == "cuda":
        settings = {"use_tf32": "0"} | ({"enable_cuda_graph": "1"} if graph else {})
        providers = [("CUDAExecutionProvider", settings), CPU]

    def session_of(optimized: str) -> Any:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        options.optimized_model_filepath = optimized
        return onnxruntime.InferenceSession(job.gradient, options, providers=providers)

    copies: Any = ""
    with tempfile.TemporaryDirectory() as folder:
        optimized = "" if graph else str(Path(folder, "optimized.onnx"))
        try:
            session = session_of(optimized)
        except Exception:  # a graph that can run may still be one that cannot be saved
            if graph:
                raise
            session = session_of("")
        if optimized and Path(optimized).exists():
            nodes = onnx.load(optimized, load_external_data=False).graph.node
            copies = sum(node.op_type.startswith("Memcpy") for node in nodes)
    if device == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
        raise RuntimeError("ONNX Runtime does not load its CUDA provider")
    assigned = session.get_provider_graph_assignment_info()
    on_cpu = Counter(node.op_type for part in assigned if part.ep_name == CPU for node in part.get_nodes())
    binding = session.io_binding()
    of = onnxruntime.OrtValue.ortvalue_from_numpy
    for value in session.get_inputs():
        binding.bind_ortvalue_input(value.name, of(np.ascontiguousarray(job.feeds[value.name]), device, 0))
    written = {}
    for value in session.get_outputs():
        due = job.expected[value.name]
        unwritten = np.full_like(due, np.nan if due.dtype.kind == "f" else 1)
        written[value.name] = of(unwritten, device, 0)
        binding.bind_ortvalue_output(value.name, written[value.name])
    how = onnxruntime.RunOptions()
    how.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def results() -> dict[str, np.ndarray]:
        return {name: value.numpy() for name, value in written.items()}

    notes = {} if graph else {"on the CPU": ", ".join(f"{n} {name}" for name, n in on_cpu.items()), "copies": copies}
    return Call(lambda: session.run_with_iobinding(binding, how), results, notes)


def torch_call(make: MakeTorch, key: str, job: Job, device: str, compiled: bool) -> Call:
    names, run = make(key, job, device, compiled)

    def results() -> dict[str, np.ndarray]:
        return {name: value.detach().cpu().numpy() for name, value in zip(names, run(), strict=True)}

    return Call(run, results, {})


def compile_alone(function: Callable[..., Any], key: str) -> Callable[..., Any]:
    """torch.compile of a function with code of its own: torch looks through all that it compiled for the same code."""
    import torch

    torch._dynamo.config.recompile_limit = 256
    code = function.__code__.replace(co_name=f"row_{key}")
    alone = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return torch.compile(alone, dynamic=False)


def error(results: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest difference of what both have, relative to the largest entry of its array; infinite with a NaN.

    No array counts as smaller than a thousandth of the largest one: some gradients are 0 but for rounding.
    """
    size = {name: float(np.abs(value).max(initial=0)) for name, value in expected.items()}
    least = 1e-3 * max(size.values())
    found = [
        float(np.abs(np.asarray(value, np.float64) - expected[name].reshape(value.shape)).max(initial=0))
        / max(size[name], least)
        for name, value in results.items()
        if name in expected
    ]
    return max(found) if np.isfinite(found).all() else float("inf")


# A process for each system


def serve(system: str, make: MakeTorch, device: str, folder: Path, pipe: Connection) -> None:
    """Make calls, check their results, and time them."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    settle = torch.cuda.synchronize if device == "cuda" else lambda: None
    calls: dict[str, Call] = {}

    def job_of(key: str) -> Job:
        with (folder / key).open("rb") as file:
            job: Job = pickle.load(file)
        return job

    def made(key: str, runs: int) -> dict[str, Any]:
        gc.collect()
        job = job_of(key)
        if system in RUNTIMES:
            call = onnxruntime_call(job, device, system == "graph")
        else:
            call = torch_call(make, key, job, device, system == "compiled")
        for _ in range(runs):
            call.run()
        settle()
        calls[key] = call
        return call.notes

    def checked(key: str) -> dict[str, Any]:
        return {"error": error(calls[key].results(), job_of(key).expected)}

    def timed(key: str, count: int) -> float:
        run = calls[key].run
        start = time.perf_counter()
        for _ in range(count):
            run()
        settle()
        return (time.perf_counter() - start) / count

    for asked, key, count in iter(pipe.recv, None):
        try:
            if asked == "make":
                pipe.send(made(key, count))
            elif asked == "time":
                pipe.send(timed(key, count))
            elif asked == "check":
                pipe.send(checked(key))
            elif asked == "drop":
                pipe.send(calls.pop(key, None) is None)
            else:
                pipe.send({"place": described(device)})
        except Exception as failure:  # of whatever class: the figure is left empty, and the row says why
            pipe.send(f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}")
            calls.pop(key, None)
            settle()  # where the error left the device unusable, this ends the process, and a new one starts


def described(device: str) -> str:
    """The card, and the versions of what runs on it."""
    import onnxruntime
    import torch

    card = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    return f"{card}, onnxruntime {onnxruntime.__version__}, torch {torch.__version__}"


def compile_all(processes: Sequence[Process], keys: Sequence[str], seconds: float) -> dict[str, Any]:
    """Compile in all processes: for each key the process that has it and its notes, or why none has.

    A process that compiles a key for too long is ended; the other keys that it had are compiled again, from torch's cache.
    """
    limit, end = seconds / min(3, -(-len(keys) // max(1, len(processes)))), time.monotonic() + seconds
    pending, again = deque(keys), set[str]()
    idle, busy = list(processes), dict[Any, tuple[Process, str, float]]()
    found: dict[str, Any] = {}
    while True:
        if time.monotonic() > end:
            pending = deque(key for key in pending if key in again)
        while idle and pending:
            process, key = idle.pop(), pending.popleft()
            process.send("make", key, 3)  # torch compiles in the first run
            busy[process.pipe] = process, key, time.monotonic()
        if not busy:
            return found
        for pipe in wait(list(busy), timeout=1):
            process, key, _ = busy.pop(pipe)
            answer = process.receive()
            found[key] = answer if isinstance(answer, str) else (process, answer)
            idle.append(process)
        for process, key, begun in list(busy.values()):
            if time.monotonic() - begun > limit:
                del busy[process.pipe]
                lost = [other for other, had in found.items() if had[0] is process]
                found = {other: had for other, had in found.items() if other not in lost}
                found[key] = f"not compiled within {limit:g} s"
                process.end()
                process.start()
                idle.append(process)
                pending.extendleft(lost)
                again.update(lost)


# The table


def rows_on_device(
    keys: Sequence[str], write: Write, make: MakeTorch, device: str, jobs: int, compile_seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each key with its row."""
    if not keys:
        return
    jobs = min(jobs, len(keys))
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # of each of the processes
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        systems = {name: Process(serve, name, make, device, folder) for name in (*RUNTIMES, "torch")}
        compilers = [Process(serve, "compiled", make, device, folder) for _ in range(jobs if compile_seconds else 0)]
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            pool.starmap(_dump, [(write, key, folder) for key in keys], chunksize=1)
        print(f"{time.monotonic() - start:.0f} s: written", flush=True)
        compiled = compile_all(compilers, keys, compile_seconds)
        right = sum(not isinstance(one, str) for one in compiled.values())
        print(f"{time.monotonic() - start:.0f} s: compiled {right} of {len(keys)}", flush=True)
        place = systems["torch"].ask("describe", "", 0)
        for key in keys:
            yield key, {**measure(key, systems, compiled.get(key, "not reached")), **place}
        print(f"{time.monotonic() - start:.0f} s: measured", flush=True)
        for process in (*systems.values(), *compilers):
            process.end()


def _dump(write: Write, key: str, folder: Path) -> None:
    with (folder / key).open("wb") as file:
        pickle.dump(write(key), file)


def measure(key: str, systems: dict[str, Process], compiled: Any) -> dict[str, Any]:
    """The row of a key: the systems that can compute it, in turn."""
    turns, failures = dict(systems), dict[str, str]()
    notes: dict[str, dict[str, Any]] = {name: {} for name in (*systems, "compiled")}

    def kept(answers: dict[str, Any]) -> dict[str, Any]:
        """The answers; the systems that gave a reason instead are left out from here on."""
        for name, answer in answers.items():
            if isinstance(answer, str):
                failures[name] = answer
                turns.pop(name, None)
        return {name: answer for name, answer in answers.items() if name in turns}

    def together(what: str) -> dict[str, Any]:
        for process in turns.values():
            process.send(what, key, 0)
        return kept({name: process.receive() for name, process in turns.items()})

    def in_turn(counts: dict[str, int]) -> dict[str, float]:
        return kept({name: turns[name].ask("time", key, counts[name]) for name in list(turns)})

    for name, note in together("make").items():
        notes[name] |= note
    if isinstance(compiled, str):
        failures["compiled"] = compiled
    else:
        turns["compiled"] = compiled[0]
    few = dict.fromkeys(notes, 3)
    in_turn(few)  # the first time cuDNN tries its algorithms: nothing else may run then
    for name, note in together("check").items():
        notes[name] |= note
    counts = {name: max(1, int(SECONDS / ROUNDS / seconds)) for name, seconds in in_turn(few).items()}
    rounds = [in_turn(counts) for _ in range(ROUNDS)]
    times = {name: [one[name] for one in rounds] for name in turns}
    together("drop")
    return row(times, notes, failures)


def row(times: dict[str, list[float]], notes: dict[str, dict[str, Any]], failures: dict[str, str]) -> dict[str, Any]:
    """The figures of a row. What failed is empty, and `failures` says why."""

    def ratio(ours: str, theirs: str) -> Any:
        if not {ours, theirs} <= times.keys():
            return ""
        return round(statistics.median(a / b for a, b in zip(times[ours], times[theirs], strict=True)), 2)

    def milliseconds(name: str) -> Any:
        return round(1e3 * statistics.median(times[name]), 4) if name in times else ""

    def worst(*names: str) -> str:
        found = [notes[name]["error"] for name in names if "error" in notes[name]]
        return f"{max(found):.0e}" if found else ""

    return {
        "onnxruntime ms": milliseconds("onnxruntime"),
        "graph ms": milliseconds("graph"),
        "torch ms": milliseconds("torch"),
        "compiled ms": milliseconds("compiled"),
        "ratio": ratio("onnxruntime", "torch"),
        "graph ratio": ratio("graph", "torch"),
        "compiled ratio": ratio("onnxruntime", "compiled"),
        "on the CPU": notes["onnxruntime"].get("on the CPU", ""),
        "copies": notes["onnxruntime"].get("copies", ""),
        "error": worst(*RUNTIMES),
        "torch error": worst("torch", "compiled"),
        "failures": failures,
    }


def save_so_far(found: Sequence[dict[str, Any]], output: Path | None) -> None:
    """Print the last row, and write all rows: what was measured stays when the run is cut off."""
    print("  ".join(f"{name}={value}" for name, value in found[-1].items()), flush=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write(output.resolve(), found)


def means(found: Sequence[dict[str, Any]]) -> str:
    """The geometric mean of each kind of ratio."""
    parts = []
    for name in ("ratio", "graph ratio", "compiled ratio"):
        ratios = [row[name] for row in found if row[name] != ""]
        if ratios:
            parts.append(f"{name} {np.exp(np.mean(np.log(ratios))):.3f} of {len(ratios)} rows")
    return "geometric means: " + ", ".join(parts)


def add_arguments(parser: ArgumentParser) -> None:
    """The options of a benchmark on a GPU."""
    parser.add_argument("--cuda", action="store_true", help="on a GPU: ONNX Runtime, torch eager and torch.compile")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="with --cuda: cpu rehearses the run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="with --cuda: processes that compile")
    parser.add_argument(
        "--compile-seconds", type=float, default=120, help="with --cuda: what is not compiled then is not"
    )
    parser.add_argument("--output", type=Path, help="with --cuda: where the results go, row by row")


def settings(arguments: Namespace) -> tuple[str, int, float]:
    return arguments.device, arguments.jobs, arguments.compile_seconds
