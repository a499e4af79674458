"""Collecting the tests computes nothing: names are known before models are made, and a test imports what it alone needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
FEW = 100  # models that a file may make: a millisecond each
HEAVY = ("dask", "distributed", "jax", "matplotlib", "onnxscript", "pandas", "skl2onnx", "sklearn", "transformers")
COLLECT = f"""
import collections, json, sys, pytest
from refgrad.conformance.case import Recipe

sys.path[:0] = ["tests", "tests/helpers"]
import onnx.backend.test.loader as loader

made = collections.Counter()

class Watch:
    at = ""

    def pytest_collectstart(self, collector):
        Watch.at = collector.name

def counted(what, function):
    def call(*arguments, **options):
        made[f"{{Watch.at}}: {{what}}"] += 1
        return function(*arguments, **options)
    return call

make = Recipe.__dict__["made"]
make.func = counted("a model of a case", make.func)
loader.load_model_tests = counted("the node tests of onnx", loader.load_model_tests)
rewritten = "ignore::pytest.PytestAssertRewriteWarning"  # refgrad is imported before
options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-W", rewritten, "--ignore=tests/frameworks"]
code = pytest.main([*options, "tests"], plugins=[Watch()])
print(json.dumps([int(code), made, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


def test_nothing_is_made_while_tests_are_collected() -> None:
    run = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=False)
    code, made, imported = json.loads(run.stdout.splitlines()[-1])
    assert code == 0, run.stdout[-2000:] + run.stderr[-2000:]
    many = {what: count for what, count in made.items() if count > FEW or "model of a case" not in what}
    assert many == {}, "make it within the test, and choose it by its name, operator, opset or type"
    assert imported == [], "import it within the test"
