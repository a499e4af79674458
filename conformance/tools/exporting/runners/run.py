"""Run the tests of a folder on a runtime that Python can call. It needs NumPy and the runtime, nothing else.

    python run.py RUNTIME FOLDER [--only TEXT] [--seconds 60] [--skip N]
    python run.py tract ../gradients
    python run.py mine:load ../gradients        the function `load` of mine.py in the current folder

A line of JSON for each test: {"test": ..., "verdict": ..., "why": ...}. The verdicts:

    right           each output has the right shape and type, and no element is off by more than the tolerance of the test
    wrong           an output is off by more, or has another shape or type
    not supported   the runtime says that it does not support something in the model
    crashed         any other error, a process that ended, or a file of the test that is missing or damaged
    timed out       no answer in time

The last line is the summary, with the number of tests of each verdict. The tests run in a process of their own. When it ends
or hangs, the test that it was at has crashed or timed out, and the next process goes on behind it. The exit code is 0 where
every test is right or not supported, 1 where one is not, and 2 where there was none to run.

A runtime of yours is one function. It takes the path of a model and the names of its inputs and outputs, and returns a function
from the arrays of the inputs to the arrays of the outputs. runtimes.py has examples.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO


def _set_aside() -> TextIO:
    """The stdout of this program, for it alone. From now on what a runtime prints, also one in C, goes to stderr."""
    own = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return own


OUT = _set_aside() if __name__ == "__main__" else sys.stdout  # before a runtime is imported

import numpy as np  # noqa: E402
import runtimes  # noqa: E402

VERDICTS = ("right", "wrong", "not supported", "crashed", "timed out")
_BUGS = (AttributeError, LookupError, NameError, RecursionError, TypeError, ZeroDivisionError)
_UNSUPPORTED = (  # what runtimes say of something that they do not support
    "not implemented",
    "not_implemented",
    "notimplemented",
    "unimplemented",
    "not supported",
    "not support ",
    "unsupported",
    "only support",
    "are supported",
    "is supported",
    "registered or supported",
    "no kernel",
    "could not find an implementation",
    "no implementation for",
    "no registered implementation",
    "not a registered",
    "no schema",
    "no opset",
    "guarantees* support for",
    "ir version",
    "no conversion rule",
    "of input parameter (",
    "invalid tensor type",
    "cannot be fed",
    "_inlfunc_",
)
_WORDS = 300  # letters of a message that are kept
_ROWS, _COLUMNS = ("test", "input", "output"), 4


@dataclass
class Test:
    """A row of tests.tsv: the model, how far an element may be off, and the tensors by their names."""

    name: str
    model: Path
    tolerance: float
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: dict[str, np.ndarray] = field(default_factory=dict)


def read_tests(folder: Path) -> list[tuple[str, list[list[str]]]]:
    """The rows of each test in `folder`, by its name.

    :raises ValueError: a row describes no test, input or output, or stands before the first test.
    """
    tests: list[tuple[str, list[list[str]]]] = []
    for number, line in enumerate((folder / "tests.tsv").read_text(encoding="utf-8").rstrip().split("\n"), 1):
        row = line.split("\t")
        if len(row) != _COLUMNS or row[0] not in _ROWS or (row[0] != "test" and not tests):
            raise ValueError(f"line {number} is not a row of a test, an input or an output")
        if row[0] == "test":
            tests.append((row[1], []))
        tests[-1][1].append(row)
    return tests


def load(folder: Path, rows: list[list[str]]) -> Test:
    """The test with its tensors.

    :raises NotImplementedError: this program does not read a type without a package.
    :raises ValueError: a file is not what the list says, or OSError: there is none.
    """
    (_, name, model, tolerance), *tensors = rows
    test = Test(name, folder / model, float(tolerance))
    test.model.open("rb").close()
    for kind, tensor, dtype, file in tensors:
        array = np.load(folder / file, allow_pickle=False)
        (test.inputs if kind == "input" else test.outputs)[tensor] = runtimes.of_type(array, dtype)
    if not test.outputs:
        raise ValueError("tests.tsv lists no output")
    return test


def difference(test: Test, outputs: Any) -> str:
    """The reason why these outputs are wrong, or ""."""
    if not isinstance(outputs, list | tuple):
        return f"it returned {_kind(outputs)}, not a list of arrays"
    if len(outputs) != len(test.outputs):
        return f"{len(outputs)} outputs instead of {len(test.outputs)}"
    for (name, right), output in zip(test.outputs.items(), outputs, strict=True):
        try:
            got = np.asarray(output)
        except Exception as error:
            return f"{name} is {_kind(output)}, not an array: {_told(error)}"
        if output is None:
            return f"{name} is None, not an array"
        if np.ma.is_masked(output):
            return f"{name} has masked elements"
        if got.shape != right.shape:
            return f"{name} has the shape {list(got.shape)} instead of {list(right.shape)}"
        if got.dtype != right.dtype:
            return f"{name} has the type {got.dtype} instead of {right.dtype}"
        wide, wanted = got.astype(np.float64), right.astype(np.float64)
        off = np.abs(wide - wanted)
        if not np.all(off <= test.tolerance):  # NaN is not
            return f"{name} is off by {np.max(off):.2g}, where {test.tolerance:.2g} is allowed of {np.max(np.abs(wanted)):.2g}"
    return ""


def verdict(runtime: Any, folder: Path, rows: list[list[str]]) -> tuple[str, str]:
    """The verdict on a test, and the reason, which is "" if it is right."""
    try:
        test = load(folder, rows)
    except NotImplementedError as error:
        return "not supported", _told(error)
    except Exception as error:
        return "crashed", f"damaged file: {_told(error)}"
    try:
        run = runtime(test.model, list(test.inputs), list(test.outputs))
        wrong = difference(test, run(list(test.inputs.values())))
    except BaseException as error:  # a runtime raises anything
        return "not supported" if _says_unsupported(error) else "crashed", _told(error)
    return "wrong" if wrong else "right", wrong


def _says_unsupported(error: BaseException) -> bool:
    """True if the runtime says that it does not support something. Python's exceptions for bugs never do."""
    if isinstance(error, _BUGS) or not isinstance(error, Exception):
        return False
    said = _said(error).lower()
    return isinstance(error, NotImplementedError) or any(phrase in said for phrase in _UNSUPPORTED)


def _said(error: BaseException) -> str:
    name = type(error).__name__
    try:
        words = str(error).split()
    except Exception:
        return name
    return " ".join([f"{name}:", *words]) if words else name


def _told(error: BaseException) -> str:
    return _said(error)[:_WORDS]


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def child(name: str, folder: Path, tests: list[tuple[str, list[list[str]]]], skip: int) -> None:
    """Run the tests from `skip` on, and write a line for each: its place, its verdict and why."""
    runtime = runtimes.get(name)
    for place, (_, rows) in enumerate(tests[skip:], skip):
        print(json.dumps([place, *verdict(runtime, folder, rows)]), file=OUT)


def parent(arguments: argparse.Namespace, tests: list[tuple[str, list[list[str]]]]) -> bool:
    """Run the tests in processes that may end; print what became of each. Whether every one is right or not supported."""
    counts = dict.fromkeys(VERDICTS, 0)
    start, done = time.perf_counter(), arguments.skip
    process: subprocess.Popen[bytes] | None = None
    lines: queue.Queue[bytes] = queue.Queue()
    again = [sys.executable, __file__, arguments.runtime, str(arguments.folder), "--only", arguments.only, "--child"]
    late = 0.0
    while done < len(tests):
        late = late or time.perf_counter() + arguments.seconds
        if process is None:
            process = subprocess.Popen(
                [*again, "--skip", str(done)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            lines = queue.Queue()
            threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        code = 0
        try:
            line = lines.get(timeout=max(0.0, late - time.perf_counter()))
            found = _verdict_in(line, done)
            if found is None and line:
                continue  # it is no answer to this test
        except queue.Empty:
            found, line = ("timed out", f"no answer in {arguments.seconds:g} s"), b""
        if not line:
            process.kill()
            code, process = process.wait(), None
        what, why = found or ("crashed", f"the process ended with code {code}")
        counts[what] += 1
        print(json.dumps({"test": tests[done][0], "verdict": what, "why": why}), file=OUT)
        done, late = done + 1, 0.0
    if process is not None:
        process.wait()
    seconds = round(time.perf_counter() - start, 1)
    summary = {
        "runtime": arguments.runtime,
        "version": runtimes.version(arguments.runtime),
        **counts,
        "seconds": seconds,
    }
    print(json.dumps(summary), file=OUT)
    return not (counts["wrong"] or counts["crashed"] or counts["timed out"])


def _verdict_in(line: bytes, place: int) -> tuple[str, str] | None:
    """The verdict on the test at `place` that a process wrote, and why; None for anything else."""
    try:
        at, what, why = json.loads(line)
    except (ValueError, TypeError):
        return None
    return (what, why) if at == place and what in VERDICTS and isinstance(why, str) else None


def _read(process: subprocess.Popen[bytes], lines: queue.Queue[bytes]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(b"")


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runtime", help=f"{', '.join(runtimes.RUNTIMES)}, or a function of yours as MODULE:FUNCTION")
    parser.add_argument("folder", type=Path, help="a folder with tests.tsv")
    parser.add_argument("--only", default="*", help="the tests with this text in their name; * stands for any letters")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long a test may take")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first tests")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    with contextlib.redirect_stdout(OUT):  # for --help
        arguments = parser.parse_args()
    if not (arguments.folder / "tests.tsv").is_file():
        parser.error(f"there is no tests.tsv in {str(arguments.folder)!r}: give a folder of tests, such as gradients")
    if not 0 < arguments.seconds < threading.TIMEOUT_MAX or arguments.skip < 0:
        parser.error("--seconds takes a number above 0, and --skip a number of tests")
    try:
        listed = read_tests(arguments.folder)
    except ValueError as error:
        parser.error(f"tests.tsv in {str(arguments.folder)!r} is damaged: {error}")
    tests = [(name, rows) for name, rows in listed if fnmatch.fnmatchcase(name, f"*{arguments.only}*")]
    if not tests[arguments.skip :]:
        parser.error(
            f"there is no test to run: {len(listed)} are listed, {len(tests)} have {arguments.only!r} in their name"
        )
    if arguments.child:
        child(arguments.runtime, arguments.folder, tests, arguments.skip)
        return 0
    try:
        runtimes.get(arguments.runtime)
    except Exception as error:  # a module of the caller's raises anything
        parser.error(str(error) if isinstance(error, ImportError | ValueError) else _told(error))
    return 0 if parent(arguments, tests) else 1


if __name__ == "__main__":
    sys.exit(main())
