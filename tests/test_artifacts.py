"""The training artifacts of ONNX Runtime, lowered: three steps of training give what its training API gives.

tests/data/artifacts holds what make_artifacts.py wrote, so that a runtime without training can be held to it too; where the
training build is installed they are made anew.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from make_artifacts import LOSSES, OPTIMIZERS, RATE, STEPS, batches, perceptron
from onnx import numpy_helper
from test_numpy_gradients import trains

import refgrad
from refgrad.backends import available, get_backend

STORED = Path(__file__).parent / "data" / "artifacts"
BOTH = [(loss, optimizer) for loss in LOSSES for optimizer in OPTIMIZERS]
BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]


def train(
    folder: Path,
    parameters: Mapping[str, np.ndarray],
    data: list[tuple[np.ndarray, np.ndarray]],
    prepare: Callable[[onnx.ModelProto], Any],
) -> dict[str, np.ndarray]:
    """What `make` in make_artifacts saves, by the lowered models."""
    lowered = {}
    for part in ("training", "optimizer"):
        lowered[part] = refgrad.lower(folder / f"{part}_model.onnx")
        assert {node.domain for node in lowered[part].graph.node} == {""}
        onnx.checker.check_model(lowered[part])
    training, optimizer = (prepare(model) for model in lowered.values())
    inputs = [value.name for value in lowered["training"].graph.input]
    updates = [value.name for value in lowered["optimizer"].graph.output][1:]
    values = dict(parameters)
    zeros = [np.zeros_like(value) for value in values.values()]
    moments = {name: list(zeros) for name in ("first_order_moments", "second_order_moments")}
    results: dict[str, np.ndarray] = {}
    for k, (x, target) in enumerate(data):
        feeds = {inputs[0]: x, inputs[1]: target, "lazy_reset_grad": np.array([True])} | values
        buffers = [f"{name}_grad.accumulation.buffer" for name in values]
        feeds |= {name: np.full_like(value, 7) for name, value in zip(buffers, values.values(), strict=True)}
        made = training.run({name: feeds[name] for name in inputs})
        loss = next(iter(made.values()))
        gradients = [made[f"{name}_updated"] for name in buffers]
        feeds = {"learning_rate": np.array([RATE], np.float32), "step": np.array([k + 1]), "gradients": gradients}
        feeds |= {"params": list(values.values()), **moments}
        read = [value.name for value in lowered["optimizer"].graph.input]
        made = optimizer.run({name: feeds[name] for name in read})
        assert bool(np.all(next(iter(made.values()))))
        values = dict(zip(values, made["params_updated"], strict=True))
        moments = {name: made.get(f"{name}_updated", value) for name, value in moments.items()}
        assert updates == [name for name in made if name.endswith("_updated")]
        results |= {f"loss_{k}": loss} | {f"{name}_{k}": value for name, value in values.items()}
    return results


def assert_trained(folder: Path, loss: str, backend: str) -> None:
    model = perceptron()
    parameters = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    results = train(folder, parameters, batches(loss, (4,), 3), get_backend(backend).prepare)
    with np.load(folder / "steps.npz") as expected:
        assert len(expected) == STEPS * 5
        for name in expected:
            np.testing.assert_allclose(results[name], expected[name], rtol=1e-5, atol=1e-6)
    moved = np.abs(results[f"w1_{STEPS - 1}"] - parameters["w1"]).max()
    assert moved > 1e-3, "nothing was learned"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("loss", "optimizer"), BOTH)
def test_training_by_lowered_models(loss: str, optimizer: str, backend: str):
    assert_trained(STORED / f"{loss}_{optimizer}", loss, backend)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    script = Path(__file__).with_name("make_artifacts.py")
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@trains
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("loss", "optimizer"), BOTH)
def test_training_by_lowered_models_made_anew(made: Path, loss: str, optimizer: str, backend: str):
    assert_trained(made / f"{loss}_{optimizer}", loss, backend)


@trains
def test_stored_artifacts_are_those_that_are_made(made: Path):
    for loss, optimizer in BOTH:
        file = Path(f"{loss}_{optimizer}", "steps.npz")
        with np.load(STORED / file) as stored, np.load(made / file) as new:
            assert all(np.array_equal(stored[name], new[name]) for name in new)


@pytest.mark.parametrize(("loss", "optimizer"), BOTH)
def test_evaluation_has_nothing_to_lower(loss: str, optimizer: str):
    path = STORED / f"{loss}_{optimizer}" / "eval_model.onnx"
    model = onnx.load(path)
    assert refgrad.lower(path) == model == refgrad.lower(model)
    assert refgrad.lower(model) is not model


def test_accumulation_adds_to_the_buffer():
    """Without lazy_reset_grad two batches leave the sum of their gradients."""
    model = refgrad.lower(STORED / "MSELoss_SGD" / "training_model.onnx")
    parameters = {t.name: numpy_helper.to_array(t) for t in perceptron().graph.initializer}
    inputs = [value.name for value in model.graph.input]
    (x, target), *_ = batches("MSELoss", (4,), 3)
    feeds = {inputs[0]: x, inputs[1]: target} | parameters
    buffers = {f"{name}_grad.accumulation.buffer": np.zeros_like(value) for name, value in parameters.items()}
    prepared = get_backend("numpy").prepare(model)
    first = prepared.run(feeds | buffers | {"lazy_reset_grad": np.array([True])})
    buffers = {name: first[f"{name}_updated"] for name in buffers}
    second = prepared.run(feeds | buffers | {"lazy_reset_grad": np.array([False])})
    for name, value in buffers.items():
        np.testing.assert_allclose(second[f"{name}_updated"], 2 * value, rtol=1e-6)
