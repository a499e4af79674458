"""Run the command line on a model that is fuzzed: each command in a copy of a process, as if somebody typed it."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from refgrad.conformance.tools.fuzzing.journey import Journey, JourneyFault
from refgrad.model import native
from refgrad.model.checks.malformed import fault_of

MODEL, DATA = "m.onnx", "weights.bin"
_MADE = {"made.onnx", "made.onnx.data", "made.npz", "made.svg", "made.html", "made.json", "made.folder"}
_SMALL = '<ir_version: 8, opset_import: ["": 18]> small (float[2] x) => (float[2] y) { y = Tanh(x) }'
_WORDS = """
grad MODEL -o made.onnx
grad MODEL -o made.onnx --dialect ort --recompute --json
grad MODEL -o made.onnx --of y --keep-outputs -v
grad MODEL -o made.onnx --weights constants
jvp MODEL -o made.onnx
hvp MODEL -o made.onnx
jacobian MODEL -o made.onnx
hessian MODEL -o made.onnx
lower MODEL -o made.onnx
expand MODEL -o made.onnx
cut MODEL -o made.onnx --inputs x
preflight MODEL
preflight MODEL --json
weights MODEL
train MODEL -o made.onnx --data weights.bin
training-model MODEL -o made.onnx
show MODEL
show MODEL --dot
show MODEL --cost --dim 2
show MODEL --svg -o made.svg
run MODEL --max-memory 64M
run MODEL --max-memory 64M --trace -v -o made.npz
run MODEL --max-memory 64M --precision float64 --json
recipe saliency MODEL -o made.onnx
recipe integrated-gradients MODEL -o made.onnx
recipe fgsm MODEL -o made.onnx
recipe forces MODEL -o made.onnx
recipe sensitivity MODEL -o made.onnx
conformance cases --source MODEL --show
run MODEL --backend ort-cpu
check MODEL --backends numpy
walk MODEL
walk MODEL --html made.html
compare MODEL --a refgrad@numpy --b refgrad@numpy:float64 -o made.json
nan MODEL --json
reduce MODEL --side refgrad@numpy -o made.folder
record os:getcwd --model MODEL -o made.npz
conformance run --source MODEL --workers 1 --oracle differences
"""
COMMANDS = tuple(line.replace("MODEL", MODEL) for line in _WORDS.strip().splitlines())
TURNS = COMMANDS[::3], COMMANDS[1::3], COMMANDS[2::3]  # a mutant goes through a third of them
SECONDS = 20.0
_CODES = (0, 1, 2)
_ANSWERED = (0, 1)  # a report of what disagrees is a result, too
_END_ON_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_PAUSE = 0.002  # seconds


def typed(written: bytes, steps: tuple[str, ...] = COMMANDS) -> Journey:
    """Write the model to a file and type `steps`, one after the other. Linux alone copies processes so."""
    _prepare()
    faults: list[JourneyFault] = []
    start = time.monotonic()
    longest, slowest, peak, largest, differentiated = 0.0, "", 0, "", False
    for words in steps:
        with tempfile.TemporaryDirectory(prefix="refgrad-") as name:
            folder = Path(name)
            (folder / MODEL).write_bytes(written)
            (folder / DATA).write_bytes(bytes(16))
            begun = time.monotonic()
            code, size = _type(words.split(), folder)
            spent = time.monotonic() - begun
            faults += [JourneyFault(words, kind, "", what[:200]) for kind, what in _found(words, written, folder, code)]
            differentiated |= words == COMMANDS[0] and code == 0
        if spent > longest:
            longest, slowest = spent, words
        if size > peak:
            peak, largest = size, words
    return Journey(differentiated, tuple(faults), time.monotonic() - start, slowest, peak, largest)


@cache
def _prepare() -> None:
    """Import all that commands need, and type some, so that the copies have everything that the first call makes."""
    warnings.simplefilter("ignore")
    main = runpy.run_module("refgrad", run_name="prepared")["main"]
    model = native.parse_model(_SMALL).SerializeToString()
    with tempfile.TemporaryDirectory(prefix="refgrad-") as folder, contextlib.redirect_stdout(io.StringIO()):
        Path(folder, MODEL).write_bytes(model)
        for words in ("hvp MODEL -o made.onnx", "preflight MODEL", "show MODEL --svg", "run MODEL"):
            main(
                [word.replace("MODEL", f"{folder}/{MODEL}").replace("made", f"{folder}/made") for word in words.split()]
            )


def _type(words: list[str], folder: Path) -> tuple[int | None, int]:
    """The exit code, None where the time was over, and the largest size of the command in bytes."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if not child:
        code = 70
        try:
            ctypes.CDLL(None).prctl(_END_ON_DEATH_OF_PARENT, signal.SIGKILL)
            if os.getppid() == parent:
                code = _in_copy(words, folder)
        finally:
            os._exit(code)
    end = time.monotonic() + SECONDS
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), usage.ru_maxrss << 10
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            return None, os.wait4(child, 0)[2].ru_maxrss << 10
        time.sleep(_PAUSE)


def _in_copy(words: list[str], folder: Path) -> int:
    os.chdir(folder)
    for stream, name, mode in ((0, os.devnull, os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "err", os.O_WRONLY)):
        file = os.open(name if stream == 0 else f"{folder}.{name}", mode | os.O_CREAT * bool(stream), 0o600)
        os.dup2(file, stream)
        os.close(file)
    sys.argv = ["refgrad", *words]
    code: Any = 0
    try:
        runpy.run_module("refgrad", run_name="__main__")
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 0


def _found(words: str, written: bytes, folder: Path, code: int | None) -> list[tuple[str, str]]:
    """The faults of a command, each with its kind and a detail."""
    said = b""
    out = b""
    for name in ("out", "err"):
        file = Path(f"{folder}.{name}")
        if file.exists():
            text = file.read_bytes()
            file.unlink()
            said += text
            out = text if name == "out" else out
    shown = said.decode(errors="replace")
    last = ascii(shown.strip()[-200:])[1:-1]
    if code is None:
        return [("timed out", last)]
    found = []
    if code not in _CODES:
        found.append((f"exit code {code}", last))
    for word in ("Traceback", "refgrad: unexpected", "process of this command"):
        if word in shown:
            found.append((word, ascii(shown[shown.index(word) :][:200])[1:-1]))
    odd = {letter for letter in shown if not letter.isprintable() and letter != "\n"}
    if odd or "\ufffd" in said.decode(errors="surrogateescape").replace("\ufffd", ""):
        found.append(("control characters", ascii(odd)))
    if "--json" in words and code == 0 and not _is_json(out):
        found.append(("no JSON", ascii(out[:100])))
    if (folder / MODEL).read_bytes() != written or (folder / DATA).read_bytes() != bytes(16):
        found.append(("changed input", ""))
    files = {file.name for file in folder.iterdir()} - {MODEL, DATA}
    if files - _MADE or (files and code not in _ANSWERED):
        found.append(("left a file", f"exit code {code}: {sorted(files)}"))
    if code == 0 and (named := words.partition("-o ")[2].split(" ")[0]):
        if named not in files:
            found.append(("wrote nothing", last))
        elif named.endswith(".onnx") and "--dialect ort" not in words:
            kept = words.startswith(("lower", "expand", "cut"))  # which may have nothing to change
            if (why := _fault_of(folder / named)) and not (kept and _fault_of(folder / MODEL)):
                found.append(("invalid result", why))
    return found


def _fault_of(file: Path) -> str:
    with contextlib.chdir(file.parent):  # where the checker looks for external data
        return fault_of(native.load(file))


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
