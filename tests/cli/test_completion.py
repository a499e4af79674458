"""Completion in a shell: the words that refgrad proposes, and the scripts of bash and zsh that ask it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("refgrad")

pytestmark = pytest.mark.skipif(not COMMAND.exists(), reason="refgrad is not installed as a command")


def asked(**environment):
    done = subprocess.run(
        [COMMAND], env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def completed(*words):
    """What bash gets for the last of these words."""
    place = str(len(words))
    given = {"_REFGRAD_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["refgrad", *words]), "COMP_CWORD": place}
    return asked(**given).split()


def test_words_are_proposed():
    assert {"check", "compare", "conformance"} <= set(completed("c"))
    assert completed("grad", "m.onnx", "--dialect", "o") == ["onnx", "ort"]
    assert completed("conformance", "cases", "--values", "smooth,k") == ["smooth,kink"]
    assert "--backend" in completed("check", "--back")
    assert "--backends" not in completed("check", "--back")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    source = asked(_REFGRAD_COMPLETE=f"source_{shell}")
    if shell == "bash":
        program = (
            f"{source}\n"
            "COMP_WORDS=(refgrad grad m.onnx --kinks t) COMP_CWORD=4\n"
            "_refgrad_completion refgrad\n"
            'echo "${COMPREPLY[@]}"'
        )
    else:  # its functions of completion run in an interactive shell alone: they are replaced by what they would be given
        program = (
            "compdef() { :; }\n"
            '_arguments() { print -r -- "$*"; }\n'
            '_describe() { print -r -- "${(P)2}"; }\n'
            f"{source}\n"
            "words=(refgrad grad m.onnx --kinks t) CURRENT=5\n"
            "_refgrad_completion"
        )
    path = f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [shell, "-c", program],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "torch" in done.stdout, done.stderr
    assert "refgrad" not in done.stdout
