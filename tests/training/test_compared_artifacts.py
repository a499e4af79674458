"""The options of `generate_artifacts` (onnxruntime-training 1.19.2) and of `write_artifacts`: the same steps."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import compared_artifacts
import make_artifacts
import numpy as np
import onnx
import pytest
from compared_artifacts import CASES, STEPS
from training_operators import trains

from refgrad.training import write_artifacts

pytestmark = [pytest.mark.training, trains]


@pytest.mark.parametrize("name", CASES)
def test_both_take_the_same_steps(tmp_path: Path, name: str) -> None:
    case, script = CASES[name], compared_artifacts.__file__
    done = subprocess.run(
        [sys.executable, str(script), name, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs, ours = (dict(np.load(tmp_path / f"{part}.npz")) for part in ("theirs", "ours"))
    for constant in set(theirs) - set(ours):  # a ratio of Dropout stays in the models here
        np.testing.assert_array_equal(theirs.pop(constant), case.value_of(constant.removeprefix("weight ")))
    assert theirs.keys() == ours.keys()
    assert len(ours["output 0"]) == STEPS
    for key, value in ours.items():
        assert value.shape == theirs[key].shape, key
        np.testing.assert_allclose(value, theirs[key], rtol=1e-6, atol=1e-6, err_msg=key)
    for key in set(ours) - {f"weight {frozen}" for frozen in case.ours.get("freeze", ())}:
        if key.startswith("weight"):
            assert np.abs(ours[key] - case.value_of(key.removeprefix("weight "))).max() > 1e-3, "nothing was learned"
    files = [sorted(file.name for file in (tmp_path / part).iterdir()) for part in ("theirs", "ours")]
    assert files[0] == files[1]
    for file in files[0]:
        if file.endswith(("training_model.onnx", "eval_model.onnx")):
            models = [onnx.load(tmp_path / part / file) for part in ("theirs", "ours")]
            theirs_read, ours_read = ({value.name for value in one.graph.input} for one in models)
            labels = {"label", "labels", "target"}  # the names that onnxblock gives
            assert theirs_read - labels >= ours_read - labels
        elif file.endswith("checkpoint"):
            contents = [compared_artifacts.tensors(tmp_path / part / file) for part in ("theirs", "ours")]
            assert {key: value for key, value in contents[0].items() if key[1] != "ratio"} == contents[1]


def test_the_page_has_every_argument() -> None:
    """The first columns of the two tables have the arguments of the functions and classes of onnxruntime-training."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    section = page.split("## Artifacts of onnxruntime-training")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    artifacts, _ = make_artifacts._training()
    block = artifacts.onnxblock
    said = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(inspect.signature(artifacts.generate_artifacts).parameters) <= said
    for row in rows:
        for place, name, arguments in re.findall(r"`(?:(\w+)\.)?(\w+)\(([^)]*)\)`", row):
            signature = inspect.signature(getattr(getattr(block, place), name).__init__)
            assert [*signature.parameters][1:] == arguments.split(", ")
    for name in ("Block", "ForwardBlock", "TrainingBlock", "blocks", "save_checkpoint", "load_checkpoint_to_model"):
        assert hasattr(block, name)
        assert name in said
    assert {loss.name for loss in artifacts.LossType} <= {*said, *re.findall(r"LossType\.(\w+)", section)}
    ours = inspect.signature(write_artifacts).parameters
    named = re.findall(r"`(\w+)(?:=[^`]*)?`", " ".join(line.split(" | ", 1)[-1] for line in section.splitlines()))
    assert {*ours} - {*named} <= {"label", "unbiased", "conventions", "model"}
