"""Models as torch's exporter writes them: every gradient equals autograd's, in both dialects, on every executor.

`examples/torch_models.py FOLDER` writes the models with autograd's gradients; the folder is given by REFGRAD_TORCH_MODELS, so
that an environment without torch can check them as well. The models of every change are those whose session is `torch`.
"""

import ast
import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest

import refgrad
from refgrad.backends import available, get_backend
from refgrad.errors import BackendError

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
FOLDER = os.environ.get("REFGRAD_TORCH_MODELS", "")
RESULTS = json.loads((ROOT / "reports" / "results" / "models.json").read_text())
TOLERANCE = 2e-5

needs_models = pytest.mark.skipif(
    not (FOLDER and Path(FOLDER).is_dir()),
    reason="REFGRAD_TORCH_MODELS is no folder that examples/torch_models.py wrote",
)
MODELS = [
    pytest.param(row["model"], marks=[needs_models] + [pytest.mark.models] * (row["session"] == "models"))
    for row in RESULTS
]


def part(arrays, prefix):
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}


@pytest.mark.parametrize("dialect", ["onnx", "ort"])
@pytest.mark.parametrize("backend", ["numpy", "ort-cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_autograds(name, backend, dialect):
    if backend not in available():
        pytest.skip(f"{backend} is not available")
    arrays = dict(np.load(f"{FOLDER}/{name}.npz"))
    exact, single = part(arrays, "float64/"), part(arrays, "float32/")
    wrt = [key.removesuffix("_grad") for key in exact]
    gradient = refgrad.gradient(f"{FOLDER}/{name}.onnx", wrt=wrt, dialect=dialect)
    try:
        prepared = get_backend(backend).prepare(gradient)
    except BackendError as error:
        if backend == "ort-cpu" and "is under development and support for this is limited" in str(error):
            pytest.skip("the model's opset is newer than this onnxruntime")
        if dialect == "onnx" or "com.microsoft" not in str(error):
            raise
        pytest.skip("this onnxruntime has no training operators")
    results = prepared.run(part(arrays, "feed/") | part(arrays, "cotangent/"))
    assert list(results) == list(exact)
    largest = max(np.abs(value).max() for value in exact.values())
    for key, value in exact.items():
        # What is 0 in exact arithmetic, as the gradient of the bias of BERT's keys, has only rounding to show: autograd's own
        # float32 result says how much is due.
        vanishes = np.abs(value).max() < 1e-6 * largest
        rounding = 4 * np.abs(single[key] - value).max() if vanishes else 0
        error = np.abs(results[key] - value).max()
        assert error <= TOLERANCE * max(np.abs(value).max(), 1e-4 * largest) + rounding, key
        assert vanishes or results[key].any(), f"{key} is 0"


@pytest.mark.parametrize("name", MODELS)
def test_in_double_every_error_counts(name):
    arrays = dict(np.load(f"{FOLDER}/{name}.npz"))
    exact = part(arrays, "float64/")
    gradient = refgrad.gradient(f"{FOLDER}/{name}.onnx", wrt=[key.removesuffix("_grad") for key in exact])
    prepared = get_backend("numpy").prepare(gradient, precision="float64")
    results = prepared.run(part(arrays, "feed/") | part(arrays, "cotangent/"))
    largest = max(np.abs(value).max() for value in exact.values())
    for key, value in exact.items():
        # Autograd's is not 0 where it should be: transformers computes a softmax in float32 whatever the model's type is.
        expected = value if np.abs(value).max() >= 1e-6 * largest else 0
        assert np.abs(results[key] - expected).max() <= TOLERANCE * max(np.abs(value).max(), 1e-4 * largest), key


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_an_initializer(name):
    graph = onnx.load(f"{FOLDER}/{name}.onnx").graph
    parameters = {key.removesuffix("_grad") for key in part(np.load(f"{FOLDER}/{name}.npz"), "float32/")}
    inputs = {value.name for value in graph.input}
    assert parameters - inputs <= {tensor.name for tensor in graph.initializer}


def test_the_results_are_those_of_every_architecture():
    table = next(
        node.value
        for node in ast.parse((ROOT / "examples" / "architectures.py").read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "ARCHITECTURES"
    )
    sessions = {
        key.value: "torch" if any(k.arg == "quick" for k in value.keywords) else "models"
        for key, value in zip(table.keys, table.values, strict=True)
    }
    assert {row["model"]: row["session"] for row in RESULTS} == sessions, "run nox -s models"
