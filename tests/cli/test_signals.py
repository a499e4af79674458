"""SIGINT and SIGTERM end a command soon, with their exit code, whatever it does. No half-written file is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
from onnx import parser

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a command has no process of its own")
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals are not POSIX")

SQUARE = parser.parse_model('<ir_version: 8, opset_import: ["": 18]> m (float[N] x) => (float[N] y) { y = Mul(x, x) }')
_PROGRAM = """import signal; signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
import refgrad, sys, time
true = refgrad.gradient
def instead(*a, **k):
    print('begun', flush=True)
    {}
refgrad.gradient = instead
sys.argv = 'refgrad grad m.onnx -o g.onnx'.split()
from refgrad import cli; sys.exit(cli.main())
"""


def _signalled(folder: Path, body: str, number: int, *, group: bool = False) -> tuple[int, float, str]:
    """The exit code, the time and the output of `refgrad grad` that gets a signal while it runs `body`."""
    onnx.save(SQUARE, folder / "m.onnx")
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(body)], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(0.3)
        start = time.monotonic()
        (os.killpg if group else os.kill)(process.pid, number)
        try:
            said = process.communicate(timeout=20)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert first == "begun\n", said
    return process.returncode, time.monotonic() - start, said


_DEAF = {  # native code that looks at no signal
    "with the lock": "import collections, itertools; collections.deque(itertools.repeat(0), maxlen=0)",
    "without it": "import ctypes; mutex = ctypes.create_string_buffer(64); "
    "[ctypes.CDLL(None).pthread_mutex_lock(mutex) for _ in range(2)]",
}


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", _DEAF)
def test_a_signal_ends_a_command_in_native_code(kind, number, tmp_path):
    body = f"from refgrad.model import writing\n    with writing.replacing('g.onnx') as t: t.write_text('half'); {_DEAF[kind]}"
    code, seconds, said = _signalled(tmp_path, body, number)
    assert code == 128 + number
    assert seconds < 5
    assert said.startswith(f"refgrad: {signal.Signals(number).name} ended this")
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]  # the temporary file is gone


_CALLBACKS = {  # each sleeps while the signal comes
    "a finalizer": "type('Held', (), {'__del__': lambda self: time.sleep(1)})()",
    "a weak reference": "import weakref; x = type('X', (), {})(); held = weakref.ref(x, lambda _: time.sleep(1)); del x",
    "the collector": "import gc; gc.callbacks.append(lambda *_: time.sleep(0.5)); gc.collect(); gc.callbacks.pop()",
}


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", _CALLBACKS)
def test_an_interruption_that_a_callback_swallows_comes_again(kind, number, tmp_path):
    code, seconds, said = _signalled(tmp_path, f"{_CALLBACKS[kind]}\n    time.sleep(60)", number)
    assert code == 128 + number
    assert seconds < 2.5  # the process that waits kills it after 3
    assert said == "refgrad: Interrupted. Nothing was written.\n"


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_is_one(number, tmp_path):
    body = "try: time.sleep(60)\n    finally: time.sleep(0.5); print('tidy', file=sys.stderr)"
    code, _, said = _signalled(tmp_path, body, number, group=True)
    assert (code, said) == (128 + number, "tidy\nrefgrad: Interrupted. Nothing was written.\n")


@linux
def test_a_foreign_handler_that_swallows_an_interruption_does_not_keep_the_command(tmp_path):
    code, seconds, _ = _signalled(
        tmp_path, "while True:\n        try: time.sleep(60)\n        except BaseException: pass", signal.SIGTERM
    )
    assert code == 143
    assert seconds < 5


@posix
def test_what_was_made_by_an_interrupted_command_that_did_not_notice_has_its_code(tmp_path):
    body = "made = true(*a, **k)\n    try: time.sleep(60)\n    except KeyboardInterrupt: return made"
    code, _, said = _signalled(tmp_path, body, signal.SIGINT)
    assert (code, said) == (130, "")
    onnx.checker.check_model(tmp_path / "g.onnx")


@linux
def test_commands_that_are_interrupted_at_random_times_leave_nothing(monkeypatch):
    """Few of them: benchmarks/interrupts.py does it hundreds of times, under load."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    interrupts = pytest.importorskip("interrupts")
    assert [one.faults for one in interrupts.survey(4, seed=int(time.time()))] == [[]] * 4
