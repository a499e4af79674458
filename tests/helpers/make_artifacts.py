"""Training artifacts of ONNX Runtime, and three steps of its training with them: python make_artifacts.py FOLDER.

Needs onnxruntime-training 1.19.2. Its package asks for torch as it is imported, which its artifacts do not: they are imported
past the package. Every loss is made with every optimizer for a small perceptron, and one for a small residual network.
`train` needs stock runtimes alone: it takes the same steps by the lowered models.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper, numpy_helper

import refgrad

LOSSES = ("MSELoss", "CrossEntropyLoss", "BCEWithLogitsLoss", "L1Loss")
OPTIMIZERS = ("AdamW", "SGD")
STEPS = 3

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A model that is trained: what builds it, with which loss and which optimizer, how fast, and on which random batches.

    Where a Relu is nearer to its kink than float32 tells apart, two right gradients differ; and AdamW's first step has the
    length of the rate and the sign of the gradient, which rounding decides where that is 0 but for rounding. So `seed` is one
    whose three steps, taken in double, keep away from both.
    """

    build: Callable[[], onnx.ModelProto]
    loss: str
    optimizer: str
    rate: float = 0.05
    seed: int = 1

    def __str__(self) -> str:
        return f"{self.build.__name__}_{self.loss}_{self.optimizer}"


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


def residual() -> onnx.ModelProto:
    """The operators of ResNet-18, once each: the entry, and a block that halves the image."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        residual (float[6, 3, 16, 16] x) => (float[6, 5] y) <int64[2] axes = {2, 3}> {
            [conv0] c0 = Conv <pads = [1, 1, 1, 1]> (x, w0)
            [norm0] n0 = BatchNormalization (c0, s0, b0, m0, v0)
            [relu0] r0 = Relu (n0)
            [pool] p = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (r0)
            [conv1] c1 = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (p, w1)
            [norm1] n1 = BatchNormalization (c1, s1, b1, m1, v1)
            [relu1] r1 = Relu (n1)
            [conv2] c2 = Conv <pads = [1, 1, 1, 1]> (r1, w2)
            [norm2] n2 = BatchNormalization (c2, s2, b2, m2, v2)
            [conv3] c3 = Conv <strides = [2, 2]> (p, w3)
            [norm3] n3 = BatchNormalization (c3, s3, b3, m3, v3)
            [add] a = Add (n2, n3)
            [relu2] r2 = Relu (a)
            [mean] mean = ReduceMean <keepdims = 0> (r2, axes)
            [last] y = Gemm <transB = 1> (mean, w4, b4)
        }""")
    rng = np.random.default_rng(0)
    shapes = {"w0": (4, 3, 3, 3), "w1": (8, 4, 3, 3), "w2": (8, 8, 3, 3), "w3": (8, 4, 1, 1), "w4": (5, 8), "b4": (5,)}
    values = {name: 0.3 * rng.standard_normal(shape) for name, shape in shapes.items()}
    for k, channels in enumerate((4, 8, 8, 8)):
        values[f"s{k}"], values[f"b{k}"] = rng.uniform(0.5, 1.5, channels), rng.uniform(-0.5, 0.5, channels)
        values[f"m{k}"], values[f"v{k}"] = np.zeros(channels), np.ones(channels)
    for name, value in values.items():
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    return model


CASES = [Case(perceptron, loss, optimizer) for loss in LOSSES for optimizer in OPTIMIZERS]
CASES += [Case(residual, "CrossEntropyLoss", "AdamW", 0.01, 13), Case(residual, "CrossEntropyLoss", "SGD", 0.05, 13)]


def weights(model: onnx.ModelProto) -> tuple[Arrays, Arrays]:
    """The float initializers: those that are trained, and the running statistics."""
    running = {name for node in model.graph.node if node.op_type == "BatchNormalization" for name in node.input[3:]}
    found = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    trained = {name: value for name, value in found.items() if name not in running}
    return trained, {name: found[name] for name in found if name in running}


def batches(model: onnx.ModelProto, loss: str, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """What each step is trained on: inputs and what they should give; six rows where the model leaves that open."""
    ends = model.graph.input[0], model.graph.output[0]
    shape, (rows, classes) = ([d.dim_value or 6 for d in end.type.tensor_type.shape.dim] for end in ends)
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(STEPS):
        x = rng.standard_normal(shape).astype(np.float32)
        target: np.ndarray = rng.standard_normal((rows, classes)).astype(np.float32)
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


def make(folder: Path, case: Case, kept: Sequence[int] = range(STEPS)) -> None:
    """The artifacts in `folder`, and steps.npz: the losses, and the weights after the steps in `kept`."""
    artifacts, api = _training()
    folder.mkdir(parents=True, exist_ok=True)
    model = case.build()
    trained, running = (list(part) for part in weights(model))
    data = batches(model, case.loss, case.seed)
    artifacts.generate_artifacts(
        model,
        requires_grad=trained,
        frozen_params=running,
        loss=artifacts.LossType[case.loss],
        optimizer=artifacts.OptimType[case.optimizer],
        artifact_directory=folder,
    )
    made = onnx.load(folder / "optimizer_model.onnx")  # of the newest version of the format, which it does not read
    made.ir_version = 8
    onnx.save(made, folder / "optimizer_model.onnx")
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    trainer = api.Optimizer(str(folder / "optimizer_model.onnx"), module)
    trainer.set_learning_rate(case.rate)
    module.train()
    results: Arrays = {}
    for k, (x, target) in enumerate(data):
        results[f"loss_{k}"] = np.asarray(module(x, target))
        trainer.step()
        module.lazy_reset_grad()
        if k in kept:
            results |= {f"{name}_{k}": np.array(state.parameters[name].data) for name in (*trained, *running)}
    np.savez(folder / "steps.npz", allow_pickle=False, **results)


@dataclass(frozen=True)
class Step:
    """What one step of training leaves."""

    loss: np.ndarray
    gradients: Arrays
    weights: Arrays
    others: Arrays


def train(
    folder: Path, case: Case, prepare: Callable[[onnx.ModelProto], Any], others: Sequence[str] = ()
) -> Iterator[Step]:
    """The steps that `make` takes, by the lowered models; `others` are values of the training model to return too."""
    lowered = {}
    for part in ("training", "optimizer"):
        source = onnx.load(folder / f"{part}_model.onnx")
        if part == "training":
            source.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in others)
        lowered[part] = refgrad.lower(source)
        assert {node.domain for node in lowered[part].graph.node} == {""}
        onnx.checker.check_model(lowered[part])
    training, optimizer = (prepare(model) for model in lowered.values())
    inputs = [value.name for value in lowered["training"].graph.input]
    read = [value.name for value in lowered["optimizer"].graph.input]
    source = case.build()
    values: Mapping[str, np.ndarray]
    values, running = weights(source)
    buffers = {name: f"{name}_grad.accumulation.buffer" for name in values}
    zeros = [np.zeros_like(value) for value in values.values()]
    moments = {name: list(zeros) for name in ("first_order_moments", "second_order_moments")}
    for k, (x, target) in enumerate(batches(source, case.loss, case.seed)):
        feeds: dict[str, Any] = (
            {inputs[0]: x, inputs[1]: target, "lazy_reset_grad": np.array([True])} | values | running
        )
        feeds |= {buffer: np.full_like(values[name], 7) for name, buffer in buffers.items()}
        made = training.run({name: feeds[name] for name in inputs})
        loss = next(iter(made.values()))
        gradients = {name: made[f"{buffer}_updated"] for name, buffer in buffers.items()}
        running = {name: made[f"{name}_updated"] for name in running}
        found = {name: made[name] for name in others}
        feeds = {"learning_rate": np.array([case.rate], np.float32), "step": np.array([k + 1])}
        feeds |= {"gradients": list(gradients.values()), "params": list(values.values()), **moments}
        made = optimizer.run({name: feeds[name] for name in read})
        assert bool(np.all(next(iter(made.values()))))
        values = dict(zip(values, made["params_updated"], strict=True))
        moments = {name: made.get(f"{name}_updated", value) for name, value in moments.items()}
        assert sum(name.endswith("_updated") for name in made) == len(made) - 1
        yield Step(loss, gradients, {**values, **running}, found)


if __name__ == "__main__":
    for one in CASES:
        make(Path(sys.argv[1]) / str(one), one)
