"""Models as torch's exporter writes them: every gradient equals autograd's, in both dialects, on every executor.

`examples/torch_models.py FOLDER` writes the models with autograd's gradients; the folder is given by REFGRAD_TORCH_MODELS, so
that an environment without torch can check them as well.
"""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

import refgrad
from refgrad.backends import available, get_backend
from refgrad.errors import BackendError

FOLDER = os.environ.get("REFGRAD_TORCH_MODELS", "")
MODELS = ("mlp", "resnet18", "bert", "gpt2")
TOLERANCE = 1e-5

pytestmark = pytest.mark.skipif(
    not all(Path(FOLDER, f"{name}.npz").is_file() for name in MODELS),
    reason="REFGRAD_TORCH_MODELS is no folder that examples/torch_models.py wrote",
)


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
        if dialect == "onnx" or "com.microsoft" not in str(error):
            raise
        pytest.skip("this onnxruntime has no training operators")
    results = prepared.run(part(arrays, "feed/") | part(arrays, "cotangent/"))
    assert list(results) == list(exact)
    largest = max(np.abs(value).max() for value in exact.values())
    for key, value in exact.items():
        # The bias of BERT's keys has gradient 0: autograd's own float32 result is rounding, and says how much is due.
        rounding = 4 * np.abs(single[key] - value).max() if np.abs(value).max() < 1e-9 * largest else 0
        error = np.abs(results[key] - value).max()
        assert error <= TOLERANCE * np.abs(value).max() + rounding, f"{key}: {error} of {np.abs(value).max()}"


@pytest.mark.parametrize("name", MODELS)
def test_every_float_initializer_is_a_parameter(name):
    model = onnx.load(f"{FOLDER}/{name}.onnx")
    wrt = {
        key.removeprefix("float32/").removesuffix("_grad")
        for key in np.load(f"{FOLDER}/{name}.npz")
        if "float32" in key
    }
    inputs = {value.name for value in model.graph.input}
    assert {n for n in wrt if n not in inputs} <= {tensor.name for tensor in model.graph.initializer}
