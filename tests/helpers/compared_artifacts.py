"""Artifacts of `generate_artifacts` and of `write_artifacts` for the same models: python compared_artifacts.py CASE FOLDER.

FOLDER/theirs and FOLDER/ours get the files, and FOLDER/theirs.npz and FOLDER/ours.npz the losses and the weights after 20
steps of the training API. It needs onnxruntime-training 1.19.2, whose builder can end the process.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from make_artifacts import _training
from onnx import TensorProto, numpy_helper

from refgrad.training import SGD, AdamW, LossTerm, Optimizer, sum_of_losses, write_artifacts

STEPS, ROWS = 20, 6
Arrays = Mapping[str, np.ndarray]


def _model(text: str, opset: int = 17, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """A model with weights from N(0, 1/4); a scale is near 1, and running statistics begin with 0 and 1."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> net {text}')
    rng = np.random.default_rng(len(text))
    for name, shape in shapes.items():
        value = 0.5 * rng.standard_normal(shape)
        if name.startswith("scale"):
            value = 1 + 0.2 * value
        elif name.startswith(("mean", "var")):
            value = np.full(shape, float(name.startswith("var")))
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    onnx.checker.check_model(model, full_check=True)
    return model


def perceptron() -> onnx.ModelProto:
    return _model(
        "(float[6, 4] x) => (float[6, 3] y) { h = Gemm(x, w1, b1)  t = Tanh(h)  y = Gemm(t, w2, b2) }",
        w1=(4, 5),
        b1=(5,),
        w2=(5, 3),
        b2=(3,),
    )


def convolution() -> onnx.ModelProto:
    return _model(
        """(float[6, 2, 6, 6] x) => (float[6, 3] y) {
            c = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)  s = Sigmoid(c)
            p = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (s)
            f = Flatten(p)  y = Gemm(f, w2, b2)
        }""",
        w1=(4, 2, 3, 3),
        b1=(4,),
        w2=(36, 3),
        b2=(3,),
    )


def normalized() -> onnx.ModelProto:
    return _model(
        """(float[6, 2, 6, 6] x) => (float[6, 3] y) {
            c = Conv <pads = [1, 1, 1, 1]> (x, w1)  n = BatchNormalization <momentum = 0.8> (c, scale, b, mean, var)
            s = Tanh(n)  f = Flatten(s)  y = Gemm(f, w2, b2)
        }""",
        w1=(4, 2, 3, 3),
        scale=(4,),
        b=(4,),
        mean=(4,),
        var=(4,),
        w2=(144, 3),
        b2=(3,),
    )


def dropped(ratio: float = 0.25) -> onnx.ModelProto:
    model = _model(
        """(float[6, 4] x) => (float[6, 3] y) <bool on = {1}> {
            h = Gemm(x, w1, b1)  t = Tanh(h)  d, mask = Dropout <seed = 7> (t, ratio, on)  y = Gemm(d, w2, b2)
        }""",
        w1=(4, 5),
        b1=(5,),
        ratio=(),
        w2=(5, 3),
        b2=(3,),
    )
    place = next(tensor for tensor in model.graph.initializer if tensor.name == "ratio")
    place.CopyFrom(numpy_helper.from_array(np.float32(ratio), "ratio"))
    return model


def layer_normalized() -> onnx.ModelProto:
    return _model(
        """(float[6, 4] x) => (float[6, 3] y) {
            h = MatMul(x, w1)  n, m, r = LayerNormalization <axis = -1> (h, scale, b)  t = Tanh(n)  y = Gemm(t, w2, b2)
        }""",
        w1=(4, 5),
        scale=(5,),
        b=(5,),
        w2=(5, 3),
        b2=(3,),
    )


def embedding() -> onnx.ModelProto:
    return _model(
        """(int64[6, 4] x) => (float[6, 3] y) {
            e = Gather(table, x)  m = ReduceMean <axes = [1], keepdims = 0> (e)  t = Tanh(m)  y = Gemm(t, w2, b2)
        }""",
        table=(9, 5),
        w2=(5, 3),
        b2=(3,),
    )


def tied() -> onnx.ModelProto:
    return _model(
        """(int64[6, 4] x) => (float[6, 9] y) {
            e = Gather(table, x)  m = ReduceMean <axes = [1], keepdims = 0> (e)  t = Tanh(m)
            turned = Transpose <perm = [1, 0]> (table)  y = MatMul(t, turned)
        }""",
        table=(9, 5),
    )


def two_heads() -> onnx.ModelProto:
    return _model(
        """(float[6, 4] x) => (float[6, 3] y, float[6, 2] z) {
            h = Gemm(x, w1, b1)  t = Tanh(h)  y = Gemm(t, w2, b2)  z = Gemm(t, w3, b3)
        }""",
        w1=(4, 5),
        b1=(5,),
        w2=(5, 3),
        b2=(3,),
        w3=(5, 2),
        b3=(2,),
    )


@dataclass(frozen=True)
class DecayedAfter(AdamW):
    """AdamW of onnxblock: w ← w − η·λ·w after the step; `bias_correction=False` leaves out the corrections"""

    elementwise = True
    eps: float = 1e-6
    epsilon: str = "uncorrected"
    corrects: bool = True

    def update(self, op, w, g, rate, t, states, decay):
        if self.corrects:
            moved, new = super().update(op, w, g, rate, t, states, 0.0)
        else:
            m = op.Add(op.Mul(states["first_moment"], self.beta1), op.Mul(g, 1 - self.beta1))
            s = op.Add(op.Mul(states["second_moment"], self.beta2), op.Mul(op.Mul(g, g), 1 - self.beta2))
            moved = op.Sub(w, op.Mul(rate, op.Div(m, op.Add(op.Sqrt(s), self.eps))))
            new = {"first_moment": m, "second_moment": s}
        return op.Sub(moved, op.Mul(op.Mul(rate, decay), moved)) if decay else moved, new


def weighted(blocks: Any) -> Any:
    """The cross entropy of y plus 0.5 times the squared error of z, as an onnxblock.

    Its constants have an axis. The builder fails at a sum of a scalar and a vector, so both terms have one until the end.
    """
    made = blocks.blocks

    class Sum(blocks.Block):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.losses = blocks.loss.CrossEntropyLoss(), blocks.loss.MSELoss()
            self.weights, self.mul = (made.Constant(1.0), made.Constant(0.5)), (made.Mul(), made.Mul())
            self.add, self.total = made.Add(), made.ReduceSum(keepdims=False)

        def build(self, y: str, z: str) -> str:
            values = self.losses[0](y, "labels"), self.losses[1](z, "target")
            terms = [mul(value, one()) for mul, value, one in zip(self.mul, values, self.weights, strict=True)]
            return str(self.total(self.add(*terms)))

    return Sum()


@dataclass(frozen=True)
class Case:
    """A model, and the options of both; `theirs` may be a function of onnxruntime.training.onnxblock, which gives them.

    :param rate: the learning rate.
    :param tolerance: of the weights after 20 steps.
    """

    build: Callable[[], onnx.ModelProto]
    loss: str
    optimizer: str = "AdamW"
    ours: Mapping[str, Any] = field(default_factory=dict)
    theirs: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    rate: float = 0.02
    tolerance: float = 1e-6

    def value_of(self, name: str) -> np.ndarray:
        """The value of a weight before the training."""
        return numpy_helper.to_array(next(tensor for tensor in self.build().graph.initializer if tensor.name == name))

    def options(self, blocks: Any) -> Mapping[str, Any]:
        return self.theirs(blocks) if callable(self.theirs) else self.theirs


LOSSES = {
    "MSELoss": "squared_error",
    "CrossEntropyLoss": "cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "L1Loss": "absolute_error",
}
RUNNING = {"frozen": ("mean", "var"), "ours": {"batch_norm": "training"}}
CASES = {
    "squared error": Case(perceptron, "MSELoss"),
    "cross entropy": Case(perceptron, "CrossEntropyLoss"),
    "binary cross entropy": Case(perceptron, "BCEWithLogitsLoss"),
    "absolute error": Case(perceptron, "L1Loss"),
    "sgd": Case(perceptron, "CrossEntropyLoss", "SGD", rate=0.1),
    "convolution": Case(convolution, "CrossEntropyLoss"),
    "batch normalization": Case(normalized, "CrossEntropyLoss", **RUNNING),
    "dropout": Case(dropped, "CrossEntropyLoss", ours={"dropout": "training"}, frozen=("ratio",)),
    "layer normalization": Case(layer_normalized, "MSELoss"),
    "embedding": Case(embedding, "CrossEntropyLoss"),
    "tied weights": Case(tied, "CrossEntropyLoss"),
    "frozen parameters": Case(
        perceptron, "CrossEntropyLoss", ours={"frozen_params": ["w1", "b1"]}, frozen=("w1", "b1")
    ),
    "additional outputs": Case(
        perceptron, "MSELoss", ours={"additional_outputs": ["y", "t"]}, theirs={"additional_output_names": ["y", "t"]}
    ),
    "prefix": Case(perceptron, "MSELoss", ours={"prefix": "my_"}, theirs={"prefix": "my_"}),
    "nominal checkpoint": Case(
        perceptron, "MSELoss", ours={"nominal_checkpoint": True}, theirs={"nominal_checkpoint": True}
    ),
    "clipped": Case(
        perceptron,
        "CrossEntropyLoss",
        ours={"clip_norm": 0.05},
        theirs=lambda blocks: {"optimizer": blocks.optim.AdamW(clip_grad=blocks.optim.ClipGradNorm(0.05))},
    ),
    "clipped sgd": Case(
        perceptron,
        "CrossEntropyLoss",
        "SGD",
        ours={"clip_norm": 0.05},
        theirs=lambda blocks: {"optimizer": blocks.optim.SGD(clip_grad=blocks.optim.ClipGradNorm(0.05))},
        rate=0.5,
    ),
    "decayed": Case(
        perceptron,
        "CrossEntropyLoss",
        ours={"optimizer": DecayedAfter(weight_decay=0.5)},
        theirs=lambda blocks: {"optimizer": blocks.optim.AdamW(weight_decay=0.5)},
    ),
    "not corrected": Case(
        perceptron,
        "CrossEntropyLoss",
        ours={"optimizer": DecayedAfter(corrects=False, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.0)},
        theirs=lambda blocks: {
            "optimizer": blocks.optim.AdamW(bias_correction=False, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.0)
        },
    ),
    "one of two outputs": Case(
        two_heads,
        "MSELoss",
        ours={"output": "z", "trainable": ["w1", "b1", "w3", "b3"]},
        theirs={"loss_input_names": ["z"]},
    ),
    "sum of losses": Case(
        two_heads,
        "",
        ours={
            "loss": sum_of_losses(
                two_heads(),
                [LossTerm("cross_entropy", "y", "labels"), LossTerm("squared_error", "z", "target", weight=0.5)],
            )
        },
        theirs=lambda blocks: {"loss": weighted(blocks)},
    ),
}


def batches(model: onnx.ModelProto, case: Case) -> list[list[np.ndarray]]:
    """The inputs of each step: the data and the labels."""
    rng = np.random.default_rng(1)
    [source] = model.graph.input
    shape = [dim.dim_value for dim in source.type.tensor_type.shape.dim]
    compared = next(v for v in model.graph.output if v.name == case.ours.get("output", model.graph.output[0].name))
    rows, classes = (dim.dim_value for dim in compared.type.tensor_type.shape.dim)
    made = []
    for _ in range(STEPS):
        if source.type.tensor_type.elem_type == TensorProto.INT64:
            x = rng.integers(0, 9, shape)
        else:
            x = rng.standard_normal(shape).astype(np.float32)
        target: np.ndarray = rng.standard_normal((rows, classes)).astype(np.float32)
        if case.loss == "CrossEntropyLoss":
            target = rng.integers(0, classes, rows)
        elif case.loss == "BCEWithLogitsLoss":
            target = (target > 0).astype(np.float32)
        both = [rng.integers(0, classes, rows), rng.standard_normal((rows, 2)).astype(np.float32)]
        made.append([x, target] if case.loss else [x, *both])
    return made


def trained_of(model: onnx.ModelProto, case: Case) -> list[str]:
    """The weights that a case trains."""
    if "trainable" in case.ours:
        return list(case.ours["trainable"])
    names = [t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT]
    return [name for name in names if name not in case.frozen]


def tensors(checkpoint: Path) -> dict[tuple[str, str], tuple[int, tuple[int, ...], bytes]]:
    """The type, the shape and the content of each tensor of a checkpoint, by its list and its name."""
    from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs.Checkpoint import Checkpoint

    state = Checkpoint.GetRootAs(checkpoint.read_bytes()).ModuleState()
    assert state.IsNominalState() == ("nominal" in checkpoint.name)
    found = {}
    for part in ("RequiresGradParams", "FrozenParams"):
        for k in range(getattr(state, f"{part}Length")()):
            one = getattr(state, part)(k)
            shape = tuple(one.Dims(j) for j in range(one.DimsLength()))
            content = bytes(one.RawDataAsNumpy()) if one.RawDataLength() else b""
            found[part, one.Name().decode()] = one.DataType(), shape, content
    return found


def write(folder: Path, case: Case, artifacts: Any) -> None:
    """The files of both, in the folders `theirs` and `ours`."""
    model = case.build()
    theirs, ours = folder / "theirs", folder / "ours"
    theirs.mkdir(parents=True)
    asked = {
        **({"loss": artifacts.LossType[case.loss]} if case.loss else {}),
        "optimizer": artifacts.OptimType[case.optimizer],
        **case.options(artifacts.onnxblock),
    }
    artifacts.generate_artifacts(
        model,
        requires_grad=trained_of(model, case),
        frozen_params=list(case.frozen),
        artifact_directory=theirs,
        **asked,
    )
    for file in theirs.glob("*.onnx"):
        made = onnx.load(file)  # the optimizer model is of the newest version of the format, which 1.19 does not read
        made.ir_version = min(made.ir_version, 10)
        onnx.save(made, file)
    optimizer: Optimizer | None = SGD() if case.optimizer == "SGD" else None
    given = {"trainable": trained_of(model, case), **case.ours}
    loss, optimizer = given.pop("loss", None) or LOSSES[case.loss], given.pop("optimizer", optimizer)
    write_artifacts(ours, model, loss, optimizer, **given)


def steps(folder: Path, case: Case, api: Any) -> dict[str, np.ndarray]:
    """The losses, additional outputs and weights of 20 steps with the files of a folder."""
    prefix = str(case.ours.get("prefix", ""))
    state = api.CheckpointState.load_checkpoint(str(folder / f"{prefix}checkpoint"))
    module = api.Module(str(folder / f"{prefix}training_model.onnx"), state, str(folder / f"{prefix}eval_model.onnx"))
    optimizer = api.Optimizer(str(folder / f"{prefix}optimizer_model.onnx"), module)
    optimizer.set_learning_rate(case.rate)
    module.train()
    found: dict[str, list[np.ndarray]] = {}
    data = batches(case.build(), case)
    for batch in data:
        for k, value in enumerate(_outputs(module, batch)):
            found.setdefault(f"output {k}", []).append(value)
        optimizer.step()
        module.lazy_reset_grad()
    module.eval()
    loss, *_ = _outputs(module, data[-1])
    results = {name: np.array(values) for name, values in found.items()} | {"evaluated": loss}
    return results | {f"weight {name}": np.array(value.data) for name, value in state.parameters}


def _outputs(module: Any, batch: list[np.ndarray]) -> list[np.ndarray]:
    """The results of a run. Arrays that `module` returns for arrays have lost their memory, so these are OrtValues."""
    import onnxruntime

    made = module(*(onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in batch))
    return [np.array(value.numpy()) for value in (made if isinstance(made, tuple) else (made,))]


def signatures(artifacts: Any) -> dict[str, list[str]]:
    """The parameters of `generate_artifacts` and of the classes of onnxblock, and the names in onnxblock."""
    block = artifacts.onnxblock
    found = {
        "generate_artifacts": [*inspect.signature(artifacts.generate_artifacts).parameters],
        "onnxblock": dir(block),
    }
    found["LossType"] = [loss.name for loss in artifacts.LossType]
    for place in ("loss", "optim"):
        for name, value in vars(getattr(block, place)).items():
            if inspect.isclass(value):
                found[f"{place}.{name}"] = [*inspect.signature(value.__init__).parameters][1:]
    return found


def main(name: str, folder: Path) -> None:
    artifacts, api = _training()
    if name == "signatures":
        folder.write_text(json.dumps(signatures(artifacts)))
        return
    if name == "ours":  # the files are there
        case = Case(perceptron, "MSELoss", rate=0.05)
        np.savez(folder / "steps", allow_pickle=False, **steps(folder / "files", case, api))
        return
    case = CASES[name]
    write(folder, case, artifacts)
    for part in ("theirs", "ours"):
        np.savez(folder / part, allow_pickle=False, **steps(folder / part, case, api))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
