"""A step model trains in JavaScript as it does in Python: 100 steps on onnxruntime-web."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from refgrad.training import AdamW, Cosine, Optimizer, Training, batches, step_model
from refgrad.training.optimizers import SGD

SCRIPT = Path(__file__).parents[2] / "examples" / "training" / "step.mjs"
MODULES = os.environ.get("REFGRAD_NODE_MODULES", "")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not shutil.which("node") or not (Path(MODULES) / "onnxruntime-web").is_dir(),
        reason="it needs node, and REFGRAD_NODE_MODULES with onnxruntime-web (nox -s page)",
    ),
]


def _model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    tensors = [
        numpy_helper.from_array((rng.standard_normal(shape) / 2).astype(np.float32), name)
        for name, shape in (("w", (4, 8)), ("b", (8,)), ("v", (8, 3)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Tanh", ["c"], ["h"]),
        helper.make_node("MatMul", ["h", "v"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "network", [value("x", 1, ["N", 4])], [value("y", 1, ["N", 3])], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def _described(array: Any) -> dict[str, Any]:
    value = np.asarray(array)
    return {"type": str(value.dtype), "dims": list(value.shape), "data": value.ravel().tolist()}


@pytest.mark.parametrize("optimizer", [AdamW(), SGD(momentum=0.9, nesterov=True)], ids=["AdamW", "Nesterov"])
@pytest.mark.parametrize("flat", [True, False])
def test_a_hundred_steps(optimizer: Optimizer, flat: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((995, 4)).astype(np.float32)
    data = {"x": x, "label": np.argmax(x @ rng.standard_normal((4, 3)), axis=1)}
    step = step_model(_model(), "cross_entropy", optimizer, flat=flat)
    training, schedule = Training(step), Cosine(0.02, period=100)
    losses, fed = [], []
    for k, batch in enumerate(batches(data, 10)):
        rate = schedule.value(k)
        losses.append(training.train_on(batch, rate))
        fed.append(
            {name: _described(value) for name, value in batch.items()} | {"learning_rate": _described(np.float32(rate))}
        )
    run = {"state": {name: _described(v) for name, v in step.state.items()}, "next": step.next, "loss": step.loss}
    (tmp_path / "run.json").write_text(json.dumps({**run, "batches": fed}))
    onnx.save(step.model, tmp_path / "step.onnx")
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "node_modules").symlink_to(Path(MODULES).resolve())
    done = subprocess.run(
        ["node", "step.mjs", "step.onnx", "run.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(done.stdout)
    assert len(losses) == 100
    np.testing.assert_allclose(found["losses"], losses, rtol=0, atol=1e-5)
    for name, value in training.state.items():
        np.testing.assert_allclose(found["state"][name], value.ravel(), rtol=0, atol=1e-5)
