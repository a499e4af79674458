"""Exports of torch: parameters are identified, and a state_dict that was trained in torch is written into the export."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

# A fold, gates, tied embeddings, x + 1, constant embeddings: the exports that take a few seconds each.
MODELS = ("mobilenet", "lstm", "t5", "gemma", "vit")


@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_is_identified_and_follows_torch(name, monkeypatch):
    for module in ("torch", "onnxscript", "transformers", "onnxruntime"):
        pytest.importorskip(module)
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    from weights import measure

    found = measure(name)
    assert found["identified"] == found["parameters"] > 0
    assert found["exact"] == found["sources"]
    assert found["round trip"]
    assert found["scalars or masks"] == 0
    assert found["without a source"] == found["by role alone, no parameter"] == []
    assert found["error"] < 2e-5
