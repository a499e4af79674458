"""Send SIGINT or SIGTERM to commands at random times, on a busy machine, and report each interrupt that is lost.

Each command must end within 5 seconds with the code of the signal, or by itself before it noticed the signal. It must leave
no process, and no file that is half written.

python benchmarks/interrupts.py COUNT [--load PROCESSES] [--seed SEED] [--only NAME] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import parser

WITHIN = 5.0  # seconds that a command has to end
_GIVEN_UP = 30.0
_EARLY = 0.2  # the part of the commands that get their signal while they start
_MARK = "REFGRAD_INTERRUPTED"  # an environment variable in every process of a command, to find those that it leaves
_RUN = ("conformance", "run", "--workers", "2", "--ops", "Softmax,Conv", "--every", "5")
_CASES = (*_RUN[:4], "--source", "tables", "--source", "node-tests", "--every", "40")
_BEGUN = "begun"  # a file that exists once native code is about to run
_NATIVE = {  # it never returns, and looks at no signal
    "native code that keeps the interpreter's lock": "collections.deque(itertools.repeat(0), maxlen=0)",
    "native code that does not": "[ctypes.CDLL(None).pthread_mutex_lock(mutex) for _ in range(2)]",
}
_IMPORTS = "import collections, ctypes, itertools; mutex = ctypes.create_string_buffer(64)"


@dataclass(frozen=True)
class Command:
    """A command, the number of seconds in which its signal comes, and the files that it may leave."""

    name: str
    words: tuple[str, ...]
    seconds: float
    files: tuple[str, ...] = ()
    program: str = ""  # runs before the command


def commands() -> list[Command]:
    """The commands to interrupt, in a folder that `prepare` filled."""
    journal = ("--journal", "j.jsonl", "--resume", "-o", "r.json", "-o", "r.html")
    reports = ("j.jsonl", "r.json", "r.html")
    data = ("line.onnx", "--data", "line.npz", "-o", "t.onnx")
    looped = f"{_IMPORTS}; refgrad.gradient = lambda *a, **k: (open({_BEGUN!r}, 'w'), "
    return [
        Command("conformance run, cases being made", (*_CASES, *journal), 10.0, reports),
        Command("conformance run", (*_RUN, *journal), 15.0, reports),
        Command("conformance export", ("conformance", "export", "suite", "--ops", "Softmax,Conv"), 8.0, ("suite",)),
        Command("grad", ("grad", "long.onnx", "-o", "g.onnx"), 6.0, ("g.onnx",)),
        Command("check", ("check", "long.onnx", "--backend", "ort-cpu"), 8.0),
        Command("train", ("train", *data, "--epochs", "1000000", "--quiet"), 6.0, ("t.onnx",)),
        *(
            Command(what, ("grad", "m.onnx", "-o", "g.onnx"), 1.0, program=f"{looped}{text})")
            for what, text in _NATIVE.items()
        ),
    ]


def prepare(folder: Path) -> None:
    """Write the models and the data of the commands."""
    chain = " ".join(f"v{k} = Tanh({f'v{k - 1}' if k else 'x'})" for k in range(4000))
    texts = {
        "long.onnx": f"m (float[N] x) => (float[N] y) {{ {chain} y = Mul(v3999, x) }}",
        "line.onnx": "m (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {0.5, 0.5}> { y = MatMul(x, w) }",
        "m.onnx": "m (float[2] x) => (float[2] y) { y = Tanh(x) }",
    }
    for name, text in texts.items():
        model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')
        onnx.save(model, folder / name)
    drawn = np.random.default_rng(0)
    np.savez(folder / "line.npz", x=drawn.normal(size=(64, 2)).astype(np.float32), label=np.ones((64, 1), np.float32))


@dataclass
class Outcome:
    """The result of one interrupted command."""

    command: str
    signal: str
    after: float
    code: int | None
    seconds: float
    faults: list[str]


def interrupt(command: Command, folder: Path, number: int, after: float, early: bool) -> Outcome:
    """Start `command` in `folder`, send it a signal after so many seconds, and look at what it leaves.

    With `early` the seconds count from its start, otherwise from the end of its imports.
    """
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    before = {path.name for path in folder.iterdir()} - set(command.files)
    start = f"import sys; sys.argv = {['refgrad', *command.words]!r}; import refgrad\n{command.program}\n"
    start += "from refgrad.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", start], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {_MARK: mark}, start_new_session=True,
    )  # fmt: skip
    faults: list[str] = []
    said = ""
    copies = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        has_begun = (folder / _BEGUN).exists() if command.program else bool(early or copies.read_text())
        if has_begun:
            break
        time.sleep(0.01)
    try:
        process.wait(after)
        is_late = True
    except subprocess.TimeoutExpired:
        is_late = False
        process.send_signal(number)
    asked = time.monotonic()
    try:
        _, said = process.communicate(timeout=_GIVEN_UP)
    except subprocess.TimeoutExpired:
        faults.append("lost")
        os.killpg(process.pid, signal.SIGKILL)
        _, said = process.communicate()
    seconds = time.monotonic() - asked
    expected = {128 + number, -number}
    if seconds > WITHIN and not faults:
        faults.append("late")
    if not is_late and process.returncode not in expected and not _finished(process.returncode, command, folder):
        faults.append(f"code {process.returncode}: {said[-400:]}")
    if "Traceback" in said or "Exception ignored" in said:
        faults.append(f"a traceback: {said[-800:]}")
    faults += [f"left: {text}" for text in _left(mark)]
    faults += [
        f"half written: {name}"
        for name in sorted({path.name for path in folder.iterdir()} - set(command.files) - before - {_BEGUN})
    ]
    faults += _damaged(folder)
    return Outcome(
        command.name, signal.Signals(number).name, round(after, 3), process.returncode, round(seconds, 3), faults
    )


def _finished(code: int, command: Command, folder: Path) -> bool:
    """True if the command came to its own end before it noticed the signal."""
    return code in (0, 1) and all((folder / name).exists() for name in command.files if not name.endswith(".data"))


def _left(mark: str) -> list[str]:
    """End the processes with this mark in their environment that live on for a second, and return a line for each."""
    found: dict[int, str] = {}
    for _ in range(5):
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if f"{_MARK}={mark}".encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = (
                        (path / "cmdline").read_bytes().replace(b"\0", b" ")[:120].decode(errors="replace")
                    )
            except OSError:  # it has ended, or is another user's
                continue
        if not found:
            break
        time.sleep(0.2)
    for number in found:
        os.kill(number, signal.SIGKILL)
    return [f"{number} {text}" for number, text in found.items()]


def _damaged(folder: Path) -> list[str]:
    """The files that are not whole."""
    faults = []
    for path in folder.iterdir():
        try:
            if path.suffix == ".onnx":
                onnx.checker.check_model(path)
            elif path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".html" and not path.read_text().rstrip().endswith("</html>"):
                raise ValueError("it has no end")
            elif path.suffix == ".jsonl":
                [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        except (ValueError, OSError, onnx.checker.ValidationError) as error:
            faults.append(f"damaged: {path.name}: {error}")
    return faults


def survey(count: int, seed: int = 0, only: str = "") -> list[Outcome]:
    """Interrupt the commands in turn, and return the result of each."""
    drawn = random.Random(seed)
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # this runs in the background, and the commands would ignore it, too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = [command for command in commands() if only in command.name]
    outcomes = []
    with tempfile.TemporaryDirectory() as made:
        for k in range(count):
            here = Path(made) / str(k)
            here.mkdir()
            prepare(here)
            command = chosen[k % len(chosen)]
            number = drawn.choice((signal.SIGINT, signal.SIGTERM))
            early = drawn.random() < _EARLY
            outcomes.append(interrupt(command, here, number, drawn.uniform(0, command.seconds), early))
            print(k, json.dumps(asdict(outcomes[-1])), flush=True)
    return outcomes


def main() -> int:
    """Print the result of each command, and the sums. The exit code is 1 if there is a fault."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("count", type=int)
    asked.add_argument("--load", type=int, default=0, help="processes that keep the cores busy meanwhile")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--only", default="", help="a part of a command's name")
    asked.add_argument("--output", type=Path)
    given = asked.parse_args()
    until_orphaned = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # also if this is killed
    busy = [subprocess.Popen([sys.executable, "-c", until_orphaned]) for _ in range(given.load)]
    try:
        outcomes = survey(given.count, given.seed, given.only)
    finally:
        for process in busy:
            process.kill()
    faulty = [one for one in outcomes if one.faults]
    codes = Counter(str(one.code) for one in outcomes)
    slowest = max(one.seconds for one in outcomes)
    print(
        f"{len(outcomes)} interrupts, {len(faulty)} with faults; codes {dict(codes)}; the slowest end took {slowest:.2f} s"
    )
    if given.output is not None:
        sums = {
            "interrupts": len(outcomes),
            "faults": len(faulty),
            "codes": codes,
            "slowest": slowest,
            "load": given.load,
        }
        given.output.write_text(json.dumps(sums, indent=1) + "\n")
    return bool(faulty)


if __name__ == "__main__":
    sys.exit(main())
