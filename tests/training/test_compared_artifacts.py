"""The options of `generate_artifacts` (onnxruntime-training 1.19.2) and of `write_artifacts`: the same steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import compared_artifacts
import numpy as np
import onnx
import pytest
from compared_artifacts import CASES, STEPS
from training_operators import trains

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
            names = [
                {"labels": "label", "target": "label"}.get(value.name, value.name) for value in models[0].graph.input
            ]
            assert set(names) >= {value.name for value in models[1].graph.input}
        elif file.endswith("checkpoint"):
            contents = [compared_artifacts.tensors(tmp_path / part / file) for part in ("theirs", "ours")]
            assert {key: value for key, value in contents[0].items() if key[1] != "ratio"} == contents[1]
