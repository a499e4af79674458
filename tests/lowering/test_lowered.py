"""What ONNX Runtime's training kernels computed for both builders' gradients, computed without them: lowered."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.problems.feeds import widened
from refgrad.conformance.tools import parity
from refgrad.derivatives import ortbuilder

KEPT = os.environ.get("REFGRAD_PARITY")  # written by tests/conformance/judge/test_parity.py with the training wheel
HERE = bool(KEPT) and not ortbuilder.available()  # where the training wheel is installed, the folder is being written
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HERE, reason="there is nothing of the training wheel to compare"),
]

TOLERANCE = 1e-6  # of float32, relative to the largest element
WIDER = {"float64": 1e-12, "float16": 2e-3}


def test_every_operator_was_kept_whose_gradients_can_be_compared():
    """Otherwise a run of tests/conformance/judge/test_parity.py that ended early would leave nothing to fail here."""
    counts = json.loads((Path(__file__).parents[2] / "reports" / "results" / "parity.json").read_text())["operators"]
    right = {operator for operator, column in counts.items() if column["right"]} - {"Dropout"}  # it draws at random
    assert right <= {path.stem for path in Path(KEPT or ".").glob("*.npz")}


@pytest.mark.parametrize("path", sorted(Path(KEPT or ".").glob("*.npz")) if HERE else [], ids=lambda path: path.stem)
def test_lowered_gradients_compute_what_the_training_kernels_did(path):
    wrong = []
    for saved in parity.Kept.load(path):
        tolerance = max(WIDER.get(value.dtype.name, TOLERANCE) for value in saved.results.values())
        for whose, model in (("ours", saved.ours), ("theirs", saved.theirs)):
            lowered = refgrad.lower(model)
            assert {node.domain for node in lowered.graph.node} <= {""}
            for backend in ("numpy", *({"ort-cpu"} & set(available()))):
                results = (
                    get_backend(backend).prepare(lowered).run(dict(saved.feeds))
                )  # and what is written into inputs
                shapes = {name: results[name].shape for name in saved.results}
                assert shapes == {name: value.shape for name, value in saved.results.items()}
                distance = parity.farthest(results, saved.results)
                if distance > tolerance:
                    # Where the function itself loses digits, neither may be farther from the float64 result than the other.
                    exact = get_backend("numpy").prepare(lowered, precision="float64").run(widened(saved.feeds))
                    if parity.farthest(results, exact) > 2 * max(parity.farthest(saved.results, exact), tolerance):
                        wrong.append(f"{saved.case} ({whose}, {backend}): {distance:.1e}")
    assert not wrong
