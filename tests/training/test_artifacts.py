"""The training artifacts of ONNX Runtime, lowered: three steps of training give what its training API gives.

tests/data/artifacts holds what make_artifacts.py wrote, so that a runtime without training can be held to it too; where the
training build is installed they are made anew.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import make_artifacts
import numpy as np
import onnx
import pytest
from make_artifacts import CASES, STEPS, Case, batches, perceptron, train, weights
from training_operators import trains

import refgrad
from refgrad.backends import available, get_backend

STORED = Path(__file__).parents[1] / "data" / "artifacts"
NAMES = [str(case) for case in CASES]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]


def assert_trained(folder: Path, case: Case, backend: str) -> None:
    before = weights(case.build())
    start = before[0] | before[1]
    steps = list(train(folder, case, get_backend(backend).prepare))
    with np.load(folder / "steps.npz") as expected:
        assert len(expected) == STEPS * (1 + len(start))
        for k, step in enumerate(steps):
            np.testing.assert_allclose(step.loss, expected[f"loss_{k}"], **TOLERANCE)
            for name, value in step.weights.items():
                np.testing.assert_allclose(value, expected[f"{name}_{k}"], **TOLERANCE)
    moved = [np.abs(steps[-1].weights[name] - value).max() for name, value in start.items()]
    assert min(moved) > 1e-3, "nothing was learned"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_training_by_lowered_models(case: Case, backend: str):
    assert_trained(STORED / str(case), case, backend)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    script = Path(make_artifacts.__file__)
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@trains
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_training_by_lowered_models_made_anew(made: Path, case: Case, backend: str):
    assert_trained(made / str(case), case, backend)


@trains
def test_stored_artifacts_are_those_that_are_made(made: Path):
    """But for rounding: ONNX Runtime has other kernels for other processors."""
    for case in CASES:
        file = Path(str(case), "steps.npz")
        with np.load(STORED / file) as stored, np.load(made / file) as new:
            assert set(stored) == set(new)
            for name in new:
                np.testing.assert_allclose(new[name], stored[name], **TOLERANCE, err_msg=f"{case}: {name}")


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_evaluation_has_nothing_to_lower(case: Case):
    path = STORED / str(case) / "eval_model.onnx"
    model = onnx.load(path)
    assert refgrad.lower(path) == model == refgrad.lower(model)
    assert refgrad.lower(model) is not model


def test_accumulation_adds_to_the_buffer():
    """Without lazy_reset_grad two batches leave the sum of their gradients."""
    model = refgrad.lower(STORED / "perceptron_MSELoss_SGD" / "training_model.onnx")
    parameters, _ = weights(perceptron())
    inputs = [value.name for value in model.graph.input]
    (x, target), *_ = batches(perceptron(), "MSELoss", 1)
    feeds = {inputs[0]: x, inputs[1]: target} | parameters
    buffers = {f"{name}_grad.accumulation.buffer": np.zeros_like(value) for name, value in parameters.items()}
    prepared = get_backend("numpy").prepare(model)
    first = prepared.run(feeds | buffers | {"lazy_reset_grad": np.array([True])})
    buffers = {name: first[f"{name}_updated"] for name in buffers}
    second = prepared.run(feeds | buffers | {"lazy_reset_grad": np.array([False])})
    for name, value in buffers.items():
        np.testing.assert_allclose(second[f"{name}_updated"], 2 * value, rtol=1e-6)
