"""A walk through models as torch's exporter writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from walk_checking import check, one_element

from refgrad.walks.walk import walk

pytestmark = [pytest.mark.torch, pytest.mark.interpreter]

FOLDER = os.environ.get("REFGRAD_TORCH_MODELS", "")  # what examples/torch_models.py wrote
RESULTS = json.loads((Path(__file__).parents[2] / "reports" / "results" / "models.json").read_text())


@pytest.mark.skipif(not (FOLDER and Path(FOLDER).is_dir()), reason="REFGRAD_TORCH_MODELS is no folder of exports")
@pytest.mark.parametrize(
    "name",
    [pytest.param(row["model"], marks=[pytest.mark.models] * (row["session"] == "models")) for row in RESULTS],
)
def test_every_architecture(name):
    model = onnx.load(f"{FOLDER}/{name}.onnx")
    arrays = np.load(f"{FOLDER}/{name}.npz")
    feeds = {key.removeprefix("feed/"): arrays[key] for key in arrays.files if key.startswith("feed/")}
    found = walk(model, feeds, of=one_element(model, feeds), differences=False)
    check(found)
    assert {step.node for step in found.steps}
