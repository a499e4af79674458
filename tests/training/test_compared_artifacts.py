"""The options of `generate_artifacts` (onnxruntime-training 1.19.2) and of `write_artifacts`: the same steps."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import compared_artifacts
import numpy as np
import onnx
import pytest
from compared_artifacts import CASES, STEPS, dropped, perceptron
from training_operators import trains

import refgrad
from refgrad.backends import get_backend
from refgrad.training import SGD, Training, step_model, write_artifacts

pytestmark = [pytest.mark.training, trains]


@pytest.mark.parametrize("name", CASES)
def test_both_take_the_same_steps(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    helper(name, tmp_path)
    theirs, ours = (dict(np.load(tmp_path / f"{part}.npz")) for part in ("theirs", "ours"))
    for constant in set(theirs) - set(ours):  # a ratio of Dropout stays in the models here
        np.testing.assert_array_equal(theirs.pop(constant), case.value_of(constant.removeprefix("weight ")))
    assert theirs.keys() == ours.keys()
    assert len(ours["output 0"]) == STEPS
    for key, value in ours.items():
        assert value.shape == theirs[key].shape, key
        np.testing.assert_allclose(value, theirs[key], rtol=1e-6, atol=1e-6, err_msg=key)
    for key in set(ours) - {f"weight {frozen}" for frozen in case.ours.get("frozen_params", ())}:
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


def test_what_only_write_artifacts_has(tmp_path: Path) -> None:
    """Gradients of inputs are returned, and elements of gradients are clipped, by plain operators before AdamWOptimizer."""
    model, optimizer, rate = perceptron(), SGD(momentum=0.5, nesterov=True), 0.05
    options: dict[str, Any] = {"clip_value": 0.02, "clip_norm": 0.03}
    write_artifacts(
        tmp_path / "files",
        model,
        "squared_error",
        optimizer,
        additional_outputs=["t"],
        input_gradients=["x"],
        **options,
    )
    helper("ours", tmp_path)
    training = Training(step_model(model, "squared_error", optimizer, **options), rate)
    with np.load(tmp_path / "steps.npz") as found:
        for k, (x, label) in enumerate(
            compared_artifacts.batches(model, compared_artifacts.Case(perceptron, "MSELoss"))
        ):
            current = refgrad.gradient(refgrad.write_back(model, training.weights), ["x"], keep_outputs=True)
            gradient = get_backend("numpy").prepare(current)
            loss = training.train_on({"x": x, "label": label}, rate)
            np.testing.assert_allclose(found["output 0"][k], loss, rtol=1e-5)
            y = gradient.run({"x": x, "y_grad": np.zeros_like(label)})["y"]
            made = gradient.run({"x": x, "y_grad": 2 * (y - label) / y.size})
            assert found["output 1"][k].shape == (6, 5)
            np.testing.assert_allclose(found["output 2"][k], made["x_grad"], rtol=1e-4, atol=1e-6)
        for name, value in training.weights.items():
            np.testing.assert_allclose(found[f"weight {name}"], value, rtol=1e-5, atol=1e-6)


def test_dropout_without_a_seed_trains_by_the_masks_that_it_draws(tmp_path: Path) -> None:
    """Each process draws other masks, so the steps are compared with steps by the masks that the training model returns."""
    model = dropped()
    [node] = [node for node in model.graph.node if node.op_type == "Dropout"]
    del node.attribute[:]
    drawn = []
    for place in (tmp_path / "first", tmp_path / "second"):
        write_artifacts(place / "files", model, "squared_error", SGD(), dropout="training", additional_outputs=["mask"])
        helper("ours", place)
        with np.load(place / "steps.npz") as found:
            drawn.append({name: found[name] for name in found})
    masks = [one["output 1"] for one in drawn]
    assert masks[0].dtype == bool
    assert 0.15 < 1 - masks[0].mean() < 0.35
    assert (masks[0] != masks[1]).any()
    assert (masks[0][0] != masks[0][1]).any()
    masked = dropped()
    masked.graph.input.append(onnx.helper.make_tensor_value_info("factor", onnx.TensorProto.FLOAT, [6, 5]))
    place = next(k for k, one in enumerate(masked.graph.node) if one.op_type == "Dropout")
    masked.graph.node[place].CopyFrom(onnx.helper.make_node("Mul", ["t", "factor"], ["d"]))
    training = Training(step_model(masked, "squared_error", SGD(), trainable=["w1", "b1", "w2", "b2"]), 0.05)
    for k, (x, label) in enumerate(
        compared_artifacts.batches(perceptron(), compared_artifacts.Case(perceptron, "MSELoss"))
    ):
        factor = (masks[0][k] / 0.75).astype(np.float32)
        loss = training.train_on({"x": x, "label": label, "factor": factor}, 0.05)
        np.testing.assert_allclose(drawn[0]["output 0"][k], loss, rtol=1e-5)
    for name, value in training.weights.items():
        np.testing.assert_allclose(drawn[0][f"weight {name}"], value, rtol=1e-5, atol=1e-6)


def test_the_page_has_every_argument(tmp_path: Path) -> None:
    """The first columns of the two tables have the arguments of the functions and classes of onnxruntime-training."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    section = page.split("## Artifacts of onnxruntime-training")[1].split("\n## ")[0]
    helper("signatures", tmp_path / "signatures.json")
    signatures = json.loads((tmp_path / "signatures.json").read_text())
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    said = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(signatures["generate_artifacts"]) <= said
    blocks = {
        name: arguments.split(", ") for row in rows for name, arguments in re.findall(r"`(\w+\.\w+)\(([^)]*)\)`", row)
    }
    assert len(blocks) == 7
    for name, arguments in blocks.items():
        assert signatures[name] == arguments
    names = {"Block", "ForwardBlock", "TrainingBlock", "blocks", "save_checkpoint", "load_checkpoint_to_model"}
    assert names <= said & set(signatures["onnxblock"])
    assert set(signatures["LossType"]) <= {*said, *re.findall(r"LossType\.(\w+)", section)}
    ours = inspect.signature(write_artifacts).parameters
    named = re.findall(r"`(\w+)(?:=[^`]*)?`", " ".join(line.split(" | ", 1)[-1] for line in section.splitlines()))
    assert {*ours} - {*named} <= {"label", "unbiased", "conventions", "model"}


def helper(*words: object) -> None:
    """Run the script that imports the training API, in a process of its own."""
    script = [sys.executable, str(compared_artifacts.__file__), *map(str, words)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
