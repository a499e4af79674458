"""Whole models: the nine skeletons that onnx ships, whose weights are filled in by the graph itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from refgrad.backends import available, get_backend

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
QUICK = ("light_shufflenet", "light_squeezenet")


def models() -> list[object]:
    paths = sorted(LIGHT.glob("light_*.onnx"))
    return [pytest.param(p, id=p.stem, marks=() if p.stem in QUICK else (pytest.mark.models,)) for p in paths]


@pytest.mark.parametrize("path", models())
def test_model_in_double_is_that_of_onnx_runtime(path: Path):
    if "ort-cpu" not in available():
        pytest.skip("onnxruntime is not installed")
    prepared = get_backend("numpy").prepare(path, precision="float64")
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.random(v.shape).astype(np.float32) for v in prepared.inputs if not v.has_default}
    expected = get_backend("ort-cpu").prepare(path).run(feeds)
    for name, value in prepared.run(feeds).items():
        assert value.dtype == np.float64
        np.testing.assert_allclose(value, expected[name], rtol=1e-5)
