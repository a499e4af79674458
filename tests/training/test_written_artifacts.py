"""The artifacts that `write_artifacts` writes, stepped by the training API of ONNX Runtime 1.19, and by the lowered models."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import make_artifacts
import numpy as np
import onnx
import onnx.checker
import onnx.parser
import pytest
from make_artifacts import perceptron
from onnx import TensorProto, numpy_helper
from training_operators import trains

import refgrad
from refgrad.backends import available, get_backend
from refgrad.errors import OptionError, OutputFileError, UnknownNameError
from refgrad.training import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp, Training, step_model, write_artifacts

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
STEPS, ROWS = 6, 5
RNG = np.random.default_rng(0)
X = RNG.standard_normal((STEPS, ROWS, 4)).astype(np.float32)
LABELS = {
    "squared_error": RNG.standard_normal((STEPS, ROWS, 3)).astype(np.float32),
    "cross_entropy": RNG.integers(0, 3, (STEPS, ROWS)),
}
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(),
    "adamw": AdamW(weight_decay=0.1, eps=1e-6),
    "other betas": AdamW(beta1=0.8, beta2=0.95),
    "uncorrected": AdamW(eps=1e-3, weight_decay=0.0, epsilon="uncorrected"),
}


@dataclass(frozen=True)
class Delayed(Optimizer):
    """w ← w − η·m·t and m ← g: the update reads the state of before, and the new state does not"""

    @property
    def states(self) -> dict[str, float]:
        return {"gradient": 0.0}

    def update(self, op, w, g, rate, t, states, decay):
        return op.Sub(w, op.Mul(op.Mul(states["gradient"], rate), op.CastLike(t, w))), {"gradient": g}


WRITTEN: dict[str, Optimizer] = {  # in operators of ai.onnx, for which onnxruntime 1.19 has none
    "momentum": SGD(momentum=0.9),
    "dampening": SGD(momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nesterov": SGD(momentum=0.9, nesterov=True),
    "decay of sgd": SGD(weight_decay=0.1),
    "decay of adam": Adam(weight_decay=0.1),
    "uncorrected decay": AdamW(epsilon="uncorrected", weight_decay=0.1),
    "adagrad": Adagrad(rate_decay=0.1),
    "rmsprop": RMSProp(momentum=0.5, eps=1e-3),
    "centered": RMSProp(centered=True, eps=1e-3),
    "delayed": Delayed(),
}


def steps(loss: str, optimizer: Optimizer, rate: float, trainable: list[str] | None = None) -> tuple[list[float], Any]:
    training = Training(step_model(perceptron(), loss, optimizer, trainable=trainable), rate, BACKENDS[-1])
    losses = [training.train_on({"x": x, "label": y}, rate) for x, y in zip(X, LABELS[loss], strict=True)]
    return losses, training.weights


CASES = [(loss, which, head) for loss in LABELS for which in OPTIMIZERS for head in (None, ["*2"])]
CASES += [("cross_entropy", which, None) for which in WRITTEN]


@trains
@pytest.mark.parametrize(("loss", "which", "trainable"), CASES)
def test_the_training_api_takes_the_same_steps(
    tmp_path: Path, loss: str, which: str, trainable: list[str] | None
) -> None:
    folder, rate = tmp_path / "artifacts", 0.05
    optimizer = (OPTIMIZERS | WRITTEN)[which]
    write_artifacts(folder, perceptron(), loss, optimizer, trainable=trainable)
    np.savez(folder / "batches.npz", x=X, y=LABELS[loss], rate=rate)
    script = Path(make_artifacts.__file__).with_name("step_artifacts.py")
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    losses, weights = steps(loss, optimizer, rate, trainable)
    with np.load(folder / "steps.npz") as found:
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
        assert set(found) == {"losses", "eval_loss", *weights}
        for name, value in weights.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6)
        assert found["eval_loss"] < 1.5 * losses[0]
    model = onnx.load(folder / "inference.onnx")
    expected = refgrad.write_back(perceptron(), weights)
    for x in X:
        [y] = get_backend(BACKENDS[-1]).prepare(model).run({"x": x}).values()
        [due] = get_backend(BACKENDS[-1]).prepare(expected).run({"x": x}).values()
        np.testing.assert_allclose(y, due, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", OPTIMIZERS | WRITTEN)
def test_the_lowered_artifacts_take_the_same_steps(tmp_path: Path, which: str, backend: str) -> None:
    optimizer = (OPTIMIZERS | WRITTEN)[which]
    write_artifacts(tmp_path / "a", perceptron(), "cross_entropy", optimizer)
    parts = {name: onnx.load(tmp_path / "a" / f"{name}_model.onnx") for name in ("training", "optimizer", "eval")}
    assert all(part.ir_version <= 10 and part.opset_import[0].version <= 21 for part in parts.values())
    training, update, evaluation = (get_backend(backend).prepare(refgrad.lower(part)) for part in parts.values())
    values = {t.name: numpy_helper.to_array(t) for t in perceptron().graph.initializer}
    moments = {
        name: [np.zeros_like(v) for v in values.values()] for name in ("first_order_moments", "second_order_moments")
    }
    losses, weights = steps("cross_entropy", optimizer, 0.05)
    for k, (x, y) in enumerate(zip(X, LABELS["cross_entropy"], strict=True)):
        feeds = {"x": x, "label": y, "lazy_reset_grad": np.array([True]), **values}
        buffers = {f"{name}_grad.accumulation.buffer": np.ones_like(value) for name, value in values.items()}
        made = training.run(feeds | buffers)
        loss, *_ = made.values()
        np.testing.assert_allclose(loss, losses[k], rtol=1e-5)
        first, *rest = evaluation.run({name: feeds[name] for name in ("x", "label", *values)}).values()
        np.testing.assert_allclose(first, loss, rtol=1e-6)
        assert [value.shape for value in rest] == [(ROWS, 3)]
        gradients = [made[f"{buffer}_updated"] for buffer in buffers]
        lists = {"params": list(values.values()), "gradients": gradients, **moments}
        given = {"learning_rate": np.float32([0.05]), "step": np.array([k + 1]), **lists}
        new = update.run({value.name: given[value.name] for value in update.inputs})
        values = dict(zip(values, new["params_updated"], strict=True))
        moments = {name: new.get(f"{name}_updated", value) for name, value in moments.items()}
    for name, value in weights.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-4, atol=1e-6)


def test_the_default_is_the_optimizer_of_generate_artifacts(tmp_path: Path) -> None:
    write_artifacts(tmp_path / "a", perceptron())
    [node] = onnx.load(tmp_path / "a" / "optimizer_model.onnx").graph.node
    found = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    due = {"adam_mode": 1, "alpha": 0.9, "beta": 0.999, "correct_bias": 1, "epsilon": 1e-6, "weight_decay": 0.0}
    assert found == pytest.approx(due)


def test_the_checkpoint_has_the_weights(tmp_path: Path) -> None:
    tables = pytest.importorskip("onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs.Checkpoint")
    model = perceptron()
    model.graph.initializer.append(numpy_helper.from_array(np.float32(2.5), "s"))
    model.graph.node.append(onnx.helper.make_node("Mul", ["y", "s"], ["z"], "scale"))
    model.graph.output[0].name = "z"
    write_artifacts(tmp_path / "a", model, trainable=["s", "w1"])
    data = (tmp_path / "a" / "checkpoint").read_bytes()
    assert tables.Checkpoint.CheckpointBufferHasIdentifier(data, 0)
    state = tables.Checkpoint.GetRootAs(data).ModuleState()
    found = [state.RequiresGradParams(k) for k in range(state.RequiresGradParamsLength())]
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    assert [tensor.Name().decode() for tensor in found] == ["w1", "s"]
    for tensor in found:
        value = values[tensor.Name().decode()]
        assert tensor.DataType() == TensorProto.FLOAT
        assert tuple(tensor.Dims(k) for k in range(tensor.DimsLength())) == value.shape
        assert bytes(tensor.RawDataAsNumpy()) == value.tobytes()


def test_only_what_1_19_can_do_is_written(tmp_path: Path) -> None:
    for optimizer, says in (
        (RMSProp(momentum=0.9, centered=True), "keeps two states per weight, and RMSProp"),
        (Adagrad(initial=0.5), "'sum_of_squares' of Adagrad starts at 0.5. Let it start at 0"),
        ("sgd", "optimizer is an optimizer of refgrad.training"),
    ):
        with pytest.raises(OptionError, match=says):
            write_artifacts(tmp_path / "a", perceptron(), optimizer=optimizer)  # type: ignore[arg-type]
    wide = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (double[N, 2] x) => (double[N, 1] y) '
        "<double[2, 1] a = {1, 2}> { y = MatMul(x, a) }"
    )
    with pytest.raises(OptionError, match="train float32, and 'a' is float64"):
        write_artifacts(tmp_path / "a", wide)
    new = perceptron()
    new.opset_import[0].version = 23
    with pytest.raises(OptionError, match=r"opset 23, and onnxruntime 1\.19 reads 21"):
        write_artifacts(tmp_path / "a", new)
    with pytest.raises(UnknownNameError, match="w9"):
        write_artifacts(tmp_path / "a", perceptron(), trainable=["w9"])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("mine")
    with pytest.raises(OutputFileError, match="exists"):
        write_artifacts(tmp_path, perceptron())
    assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]
