"""Progress on a terminal from the first second, none in a pipe; an interrupted run says what was kept."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from refgrad.cli import main, output
from refgrad.cli.output import Bar

pytestmark = pytest.mark.suite

terminal = pytest.mark.skipif(sys.platform == "win32", reason="there is no pty")
REFGRAD = [sys.executable, "-m", "refgrad"]
# Cases that take their time: a run is somewhere among them when a signal comes.
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
from refgrad.cli import conformance, main
true = conformance._cases
def slowly(*asked):
    for case in true(*asked):
        time.sleep({})
        yield case
conformance._cases = slowly
sys.argv = {!r}
sys.exit(main())
"""


def on_a_terminal(command, until="", seconds=90.0, number=0, cwd=None):
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
    words = ["conformance", "run", "--ops", "Neg", "--backend", "numpy", "--workers", "1"]
    code, text, _ = on_a_terminal([*REFGRAD, *words], cwd=tmp_path)
    assert code == 0, text
    assert re.search(r"Neg; 1 operators; \d+ agreed", text)
    assert re.search(r"\d+/\d+", text)


def test_a_run_is_quiet_in_a_pipe(tmp_path):
    words = ["conformance", "run", "--ops", "Neg", "--backend", "numpy", "--workers", "1"]
    done = subprocess.run([*REFGRAD, *words], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


@terminal
def test_cases_are_counted_while_they_are_made(tmp_path):
    argv = ["refgrad", "conformance", "run", "--ops", "Neg", "--backend", "numpy"]
    program = SLOW.format(0.5, argv)
    code, text, _ = on_a_terminal(
        [sys.executable, "-c", program], until=r"[2-9]/\? .*making cases: Neg", number=signal.SIGINT, cwd=tmp_path
    )
    assert code == 130, text
    assert "Interrupted. Nothing is kept: with --journal FILE a run can be resumed." in text


@terminal
def test_an_interrupted_run_says_how_to_go_on(tmp_path):
    argv = [
        "refgrad",
        "conformance",
        "run",
        "--ops",
        "Neg,Abs",
        "--backend",
        "numpy",
        "--workers",
        "1",
        "--journal",
        "j",
    ]
    code, text, _ = on_a_terminal(
        [sys.executable, "-c", SLOW.format(0, argv)], until=r"operators; \d+ agreed", number=signal.SIGINT, cwd=tmp_path
    )
    assert code == 130, text
    assert re.search(
        r"The journal 'j' has the verdicts on [1-9]\d* cases: repeat the command with --resume to go on", text
    )
    assert main(["conformance", *argv[2:-1], str(tmp_path / "j"), "--resume"]) == 0


@terminal
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "folder", "--ops", "Neg"], "'folder' is made when every test is"),
        (["mutants", "--ops", "Softmax"], "Nothing is kept"),
    ],
)
def test_other_commands_say_so_too(tmp_path, words, message):
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += (
        f"import sys; sys.argv = {['refgrad', 'conformance', *words]!r}\nfrom refgrad.cli import main; sys.exit(main())"
    )
    code, text, _ = on_a_terminal(
        [sys.executable, "-c", program], until="making cases|Softmax; ", number=signal.SIGINT, cwd=tmp_path
    )
    assert code == 130, text
    assert message in text
    assert not list(tmp_path.iterdir())


def test_a_bar_appears_by_itself_and_is_gone_afterwards(monkeypatch, capsys):
    monkeypatch.setattr(output.sys.stderr, "isatty", lambda: True)
    with Bar("counting sheep", after=0.2):
        time.sleep(1.0)
    assert "counting sheep" in capsys.readouterr().err
    with Bar("counting sheep", after=30):
        pass
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
