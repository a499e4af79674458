"""A tool that reads code and does not run it finds every module in a checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    (os.name == "nt" or not (ROOT / ".git").exists()) and not (ROOT / "refgrad" / "backends").is_dir(),
    reason="Git on Windows may make no links, and a source distribution has none",
)
def test_mypy_finds_the_folders_beside_the_package():
    pytest.importorskip("mypy")
    code = "import refgrad.backends.numpy.plan, refgrad.conformance.judge.judge, refgrad.walks.walk"
    options = (f"--config-file={os.devnull}", f"--cache-dir={os.devnull}", "--follow-imports=skip")
    command = (sys.executable, "-m", "mypy", *options, "-c", code)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_no_module_is_loaded_through_a_link():
    code = (
        "import refgrad.backends.numpy.plan as plan, refgrad.conformance as suite; print(plan.__file__, suite.__file__)"
    )
    result = subprocess.run((sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [
        str(ROOT / "backends" / "numpy" / "plan.py"),
        str(ROOT / "conformance" / "__init__.py"),
    ]
