"""Training artifacts of ONNX Runtime, and three steps of its training with them: python make_artifacts.py FOLDER [MODEL].

Needs onnxruntime-training 1.19.2. Its package asks for torch as it is imported, which its artifacts do not: they are imported
past the package. Without MODEL it is a small perceptron, and every loss is made with every optimizer.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, numpy_helper

LOSSES = ("MSELoss", "CrossEntropyLoss", "BCEWithLogitsLoss", "L1Loss")
OPTIMIZERS = ("AdamW", "SGD")
STEPS = 3
RATE = 0.05


def perceptron() -> onnx.ModelProto:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        perceptron (float[N, 4] x) => (float[N, 3] y) <float[4, 5] w1, float[5] b1, float[5, 3] w2, float[3] b2> {
            [first] h = Gemm (x, w1, b1)
            [relu] r = Relu (h)
            [second] y = Gemm (r, w2, b2)
        }""")
    rng = np.random.default_rng(0)
    for name, shape in (("w1", (4, 5)), ("b1", (5,)), ("w2", (5, 3)), ("b2", (3,))):
        value = 0.5 * rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


def batches(loss: str, shape: tuple[int, ...], classes: int, rows: int = 6) -> list[tuple[np.ndarray, np.ndarray]]:
    """What each step is trained on: inputs (rows, shape) and what they should give."""
    rng = np.random.default_rng(1)
    made = []
    for _ in range(STEPS):
        x = rng.standard_normal((rows, *shape)).astype(np.float32)
        target = rng.standard_normal((rows, classes)).astype(np.float32)
        if loss == "CrossEntropyLoss":
            target = rng.integers(0, classes, rows)
        elif loss == "BCEWithLogitsLoss":
            target = (target > 0).astype(np.float32)
        made.append((x, target))
    return made


def _training() -> tuple[Any, Any]:
    import onnxruntime

    package = types.ModuleType("onnxruntime.training")
    package.__path__ = [str(Path(onnxruntime.__file__).parent / "training")]
    sys.modules["onnxruntime.training"] = package
    names = ("onnxruntime.training.artifacts", "onnxruntime.training.api")
    artifacts, api = (importlib.import_module(name) for name in names)
    return artifacts, api


def make(folder: Path, model: onnx.ModelProto, loss: str, optimizer: str, rows: int = 6) -> None:
    """The artifacts in `folder`, and steps.npz: the losses, and the parameters after every step."""
    artifacts, api = _training()
    folder.mkdir(parents=True, exist_ok=True)
    base = onnx.ModelProto()
    base.CopyFrom(model)
    names = [t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT]
    artifacts.generate_artifacts(
        base,
        requires_grad=names,
        loss=artifacts.LossType[loss],
        optimizer=artifacts.OptimType[optimizer],
        artifact_directory=folder,
    )
    made = onnx.load(folder / "optimizer_model.onnx")  # of the newest version of the format, which it does not read
    made.ir_version = 8
    onnx.save(made, folder / "optimizer_model.onnx")
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    trainer = api.Optimizer(str(folder / "optimizer_model.onnx"), module)
    trainer.set_learning_rate(RATE)
    module.train()
    results: dict[str, np.ndarray] = {}
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim][1:]
    classes = model.graph.output[0].type.tensor_type.shape.dim[1].dim_value
    for k, (x, target) in enumerate(batches(loss, tuple(shape), classes, rows)):
        results[f"loss_{k}"] = np.asarray(module(x, target))
        trainer.step()
        module.lazy_reset_grad()
        for name in names:
            results[f"{name}_{k}"] = np.array(state.parameters[name].data)
    np.savez(folder / "steps.npz", **results)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if len(sys.argv) > 2:
        make(target, onnx.load(sys.argv[2]), "CrossEntropyLoss", "AdamW", rows=2)
    else:
        for loss in LOSSES:
            for optimizer in OPTIMIZERS:
                make(target / f"{loss}_{optimizer}", perceptron(), loss, optimizer)
