"""Progress on a terminal from the first second, none in a pipe; an interrupted run says what was kept."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time

import onnx
import onnx.parser
import pytest

from refgrad.cli import output
from refgrad.cli.output import Bar

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

terminal = pytest.mark.skipif(sys.platform == "win32", reason="there is no pty")
# A command whose cases take their time, or that does nothing else than wait: a signal comes in between.
PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
import numpy as np
from refgrad.cli import conformance, main
from refgrad.conformance.case import node_case
from refgrad.conformance.tools.exporting import export
from refgrad.conformance.tools.mutating import survey
def few(*asked):
    for size in range(1, 13):
        time.sleep({seconds})
        yield node_case("Neg", np.full(size, 0.5, np.float32))
def waiting(*asked, progress, **named):
    progress(1, 3, "the next one")
    time.sleep(100)
conformance._cases, export.export_suite, survey.survey = few, waiting, waiting
sys.argv = {argv!r}
sys.exit(main())
"""
RUN = ["refgrad", "conformance", "run", "--backend", "numpy", "--workers", "1"]


def command(*argv, seconds=0.0):
    """A command line that runs `refgrad` as above."""
    return [sys.executable, "-c", PROGRAM.format(argv=list(argv), seconds=seconds)]


def on_a_terminal(command, until="", seconds=300.0, number=0, cwd=None):
    """The exit code, what a terminal shows, and after how many seconds it showed `until`; `number` is a signal sent then."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True, cwd=cwd)
    os.close(theirs)
    text, seen, start = "", 0.0, time.monotonic()
    try:
        while time.monotonic() - start < seconds:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    text += os.read(ours, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
            if until and not seen and re.search(until, text):
                seen = time.monotonic() - start
                if number:
                    process.send_signal(number)
            if process.poll() is not None and not select.select([ours], [], [], 0)[0]:
                break
    finally:
        os.close(ours)
        if process.poll() is None:
            process.kill()
    return process.wait(), text, seen


@terminal
def test_a_run_shows_cases_operators_and_verdicts(tmp_path):
    code, text, _ = on_a_terminal(command(*RUN), cwd=tmp_path)
    assert code == 0, text
    assert re.search(r"Neg; 1 operator; \d+ right", text)
    assert re.search(r"\d+/12", re.sub("\x1b[^m]*m", "", text))


def test_a_run_is_quiet_in_a_pipe(tmp_path):
    done = subprocess.run(command(*RUN), capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


@terminal
def test_cases_are_counted_while_they_are_made(tmp_path):
    code, text, _ = on_a_terminal(
        command(*RUN, seconds=1), until="making cases: Neg", number=signal.SIGINT, cwd=tmp_path
    )
    assert code == 130, text
    assert "Interrupted. Nothing is kept. A run with --journal FILE can be resumed." in text


@terminal
def test_an_interrupted_run_says_how_to_go_on(tmp_path):
    argv = [*RUN, "--journal", "j"]
    code, text, _ = on_a_terminal(command(*argv), until=r"operator; \d+ right", number=signal.SIGINT, cwd=tmp_path)
    assert code == 130, text
    said = re.search(
        r"The journal 'j' has the verdicts on (\d+) cases?: repeat the command with --resume to go on", text
    )
    assert int(said[1]) == (tmp_path / "j").read_text().count("\n") - 1 > 0
    again = subprocess.run(command(*argv, "--resume"), capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "verdicts (12 cases of 1 operator)" in again.stdout


@terminal
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "folder"], "Interrupted. Nothing is kept: 'folder' is written at the end"),
        (["mutants"], "Interrupted. Nothing is kept"),
    ],
)
def test_other_commands_say_so_too(tmp_path, words, message):
    code, text, _ = on_a_terminal(
        command("refgrad", "conformance", *words), until="the next one", number=signal.SIGINT, cwd=tmp_path
    )
    assert code == 130, text
    assert message in text
    assert not list(tmp_path.iterdir())


@terminal
@pytest.mark.parametrize(
    ("words", "step"),
    [
        (["compare", "m.onnx", "--a", "refgrad@numpy", "--b", "slow:build@numpy"], "slow:build@numpy: building the"),
        (["reduce", "m.onnx", "--side", "slow:build@numpy", "-o", "made"], "rules, by gradients of parts"),
    ],
)
def test_a_search_shows_its_steps(tmp_path, words, step):
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[2] x) => (float[2] y) { y = Tanh(x) }'
    )
    onnx.save(model, tmp_path / "m.onnx")
    begun = tmp_path / "begun"
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n\n\n"
        "def build(model, wrt, outputs):\n"
        "    pathlib.Path(__file__).with_name('begun').touch()\n"
        "    time.sleep(100)\n"
    )
    code, text, _ = on_a_terminal(command("refgrad", *words), until=step, number=signal.SIGINT, cwd=tmp_path)
    assert code == 130, text
    assert step in text
    begun.unlink(missing_ok=True)
    quiet = subprocess.Popen(
        command("refgrad", *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    with quiet:
        while not begun.exists() and quiet.poll() is None:
            time.sleep(0.1)
        time.sleep(1)
        quiet.send_signal(signal.SIGINT)
        assert quiet.communicate() == ("", "refgrad: Interrupted. Nothing was written.\n")


def test_a_bar_appears_by_itself_and_is_gone_afterwards(monkeypatch, capsys):
    monkeypatch.setattr(output.sys.stderr, "isatty", lambda: True)
    with Bar("counting sheep", after=0.2):
        time.sleep(1.0)
    assert "counting sheep" in capsys.readouterr().err
    with Bar("counting sheep", after=30):
        pass
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
