"""The options of `write_artifacts`, by the files that it writes and by the lowered models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.checker
import pytest
from compared_artifacts import dropped, normalized, perceptron, tensors, two_heads
from onnx import numpy_helper

import refgrad
from refgrad.backends import available, get_backend
from refgrad.errors import ModelWarning, NoGradientError, OptionError, OutputFileError, UnknownNameError
from refgrad.training import SGD, AdamW, Training, lora, step_model, write_artifacts

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
RNG = np.random.default_rng(3)
X, Y, Z = (RNG.standard_normal((6, k)).astype(np.float32) for k in (4, 3, 2))
FILES = ["checkpoint", "eval_model.onnx", "optimizer_model.onnx", "training_model.onnx"]


def values_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def run(file: Path, feeds: dict[str, Any], backend: str = BACKENDS[-1]) -> dict[str, Any]:
    """The results of a model of the files, in operators of ai.onnx; its inputs are looked up in `feeds`."""
    model = refgrad.lower(onnx.load(file))
    onnx.checker.check_model(model, full_check=True)
    zeros = {
        value.name: np.zeros([dim.dim_value for dim in value.type.tensor_type.shape.dim], np.float32)
        for value in model.graph.input
        if value.name.endswith(".buffer")
    }
    given = {**zeros, "lazy_reset_grad": np.array([True]), **feeds}
    return get_backend(backend).prepare(model).run({value.name: given[value.name] for value in model.graph.input})


def test_the_names_of_the_files_begin_with_the_prefix(tmp_path: Path) -> None:
    write_artifacts(tmp_path / "a", perceptron(), prefix="mine_", nominal_checkpoint=True)
    found = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert found == sorted(f"mine_{name}" for name in (*FILES, "nominal_checkpoint"))
    for prefix in ("sub/", "../"):
        with pytest.raises(OptionError, match="prefix is the beginning of a file name"):
            write_artifacts(tmp_path / "b", perceptron(), prefix=prefix)
    assert not (tmp_path / "b").exists()


def test_a_folder_is_written_into_if_asked(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "checkpoint").write_text("old")
    write_artifacts(tmp_path, perceptron(), overwrite=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*FILES, "notes"])
    assert (tmp_path / "notes").read_text() == "mine"
    before = {file: (tmp_path / file).read_bytes() for file in FILES}
    write_artifacts(tmp_path, perceptron(), overwrite=True, trainable=["w1"])
    changed = [file for file in FILES if (tmp_path / file).read_bytes() != before[file]]
    assert changed == ["checkpoint", "eval_model.onnx", "training_model.onnx"]
    write_artifacts(tmp_path / "part", perceptron())
    (tmp_path / "part" / "checkpoint").unlink()
    (tmp_path / "part" / "checkpoint").mkdir()
    before = {file: (tmp_path / "part" / file).read_bytes() for file in FILES if file != "checkpoint"}
    with pytest.raises(OutputFileError, match="is no regular file"):
        write_artifacts(tmp_path / "part", perceptron(), overwrite=True, trainable=["w1"])
    assert before == {file: (tmp_path / "part" / file).read_bytes() for file in before}
    write_artifacts(tmp_path / "new", perceptron(), overwrite=True)
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == FILES


@pytest.mark.parametrize("role", ["model", "weights", "loss"])
def test_no_input_is_overwritten(tmp_path: Path, role: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> m (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}> '
        "{ y = MatMul(x, w) }"
    )
    loss = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> l (float[N, 1] y) => (float total) { total = ReduceMean<keepdims = 0>(y) }'
    )
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.float32([[1], [2]]), "w"))
    place, loss_place = tmp_path / "model.onnx", tmp_path / "loss.onnx"
    if role == "model":
        place = tmp_path / "eval_model.onnx"
    elif role == "loss":
        loss_place = tmp_path / "optimizer_model.onnx"
    external = (
        {"save_as_external_data": True, "location": "checkpoint", "size_threshold": 0} if role == "weights" else {}
    )
    onnx.save(model, place, **external)
    onnx.save(loss, loss_place)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(OutputFileError, match="Write to another file"):
        write_artifacts(tmp_path, place, "squared_error" if role == "weights" else loss_place, overwrite=True)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_external_data_moves_into_the_models(tmp_path: Path) -> None:
    model = perceptron()
    place = tmp_path / "model.onnx"
    onnx.save(perceptron(), place, save_as_external_data=True, location="model.data", size_threshold=0)
    write_artifacts(tmp_path / "a", place, trainable=["w2"], frozen_params=["b2"])
    feeds = {"x": X, "label": Y, **{name: values_of(model)[name] for name in ("w2", "b2")}}
    for name in ("training", "eval"):
        made = onnx.load(tmp_path / "a" / f"{name}_model.onnx", load_external_data=False)
        assert not any(tensor.external_data for tensor in made.graph.initializer)
        [y] = get_backend("numpy").prepare(model).run({"x": X}).values()
        loss = next(iter(run(tmp_path / "a" / f"{name}_model.onnx", feeds).values()))
        np.testing.assert_allclose(loss, np.square(y - Y).mean(), rtol=1e-5)


def test_a_nominal_checkpoint_has_names_alone(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime.tools.ort_format_model")
    write_artifacts(tmp_path / "a", perceptron(), frozen_params=["w2"], nominal_checkpoint=True)
    full, nominal = (tensors(tmp_path / "a" / name) for name in ("checkpoint", "nominal_checkpoint"))
    names = [("RequiresGradParams", name) for name in ("w1", "b1", "b2")] + [("FrozenParams", "w2")]
    assert list(full) == list(nominal) == names
    assert all(content == (1, (), b"") for content in nominal.values())
    for (_, name), (_, shape, content) in full.items():
        value = values_of(perceptron())[name]
        assert (shape, content) == (value.shape, value.tobytes())


def test_frozen_weights_are_inputs(tmp_path: Path) -> None:
    write_artifacts(tmp_path / "a", perceptron(), trainable=["w1", "b1"], frozen_params=["w2"])
    for file, data in (("training_model.onnx", ["x", "label"]), ("eval_model.onnx", ["x", "label"])):
        graph = onnx.load(tmp_path / "a" / file).graph
        assert [value.name for value in graph.input][:5] == [*data, "w1", "b1", "w2"]
        assert {"w2", "w1"}.isdisjoint(tensor.name for tensor in graph.initializer)
        assert "b2" in {tensor.name for tensor in graph.initializer}
    with pytest.raises(OptionError, match="'w1' is in trainable and in frozen_params"):
        write_artifacts(tmp_path / "b", perceptron(), trainable=["w1"], frozen_params=["w1"])
    with pytest.raises(OptionError, match="leaves nothing to train"):
        write_artifacts(tmp_path / "b", perceptron(), frozen_params=["*"])
    with pytest.raises(OptionError, match="trains nothing"):
        write_artifacts(tmp_path / "b", perceptron(), trainable=[])
    with pytest.raises(UnknownNameError, match=r"The pattern 'q\*' in frozen_params matches no float"):
        write_artifacts(tmp_path / "b", perceptron(), frozen_params=["q*"])
    with pytest.raises(UnknownNameError, match="w9"):
        write_artifacts(tmp_path / "b", perceptron(), frozen_params=["w9"])


@pytest.mark.parametrize("adapted", [True, False])
def test_the_checkpoint_holds_every_weight_if_asked(tmp_path: Path, adapted: bool) -> None:
    """With adapters, they are trained; else what `trainable` names."""
    model = lora(perceptron(), rank=1) if adapted else perceptron()
    write_artifacts(tmp_path / "a", model, trainable=None if adapted else ["*2"], frozen_params=["*"])
    trained = [f"{name}.lora_{end}" for name in ("w1", "w2") for end in "AB"] if adapted else ["w2", "b2"]
    frozen = [name for name in ("w1", "b1", "w2", "b2") if name not in trained]
    graph = onnx.load(tmp_path / "a" / "training_model.onnx").graph
    assert [value.name for value in graph.input][2 : 2 + len(trained + frozen)] == trained + frozen
    assert not {tensor.name for tensor in graph.initializer} & {*trained, *frozen}
    [y] = get_backend("numpy").prepare(perceptron()).run({"x": X}).values()
    loss, *_ = run(tmp_path / "a" / "eval_model.onnx", {"x": X, "label": Y, **values_of(model)}).values()
    np.testing.assert_allclose(loss, np.square(y - Y).mean(), rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unbiased", [True, False])
def test_running_statistics_move(tmp_path: Path, unbiased: bool, backend: str) -> None:
    model, options = normalized(), {"batch_norm": "training", "unbiased": unbiased}
    write_artifacts(tmp_path / "a", model, "squared_error", SGD(), **options)  # type: ignore[arg-type]
    x = RNG.standard_normal((6, 2, 6, 6)).astype(np.float32)
    values = values_of(model)
    training = Training(step_model(model, "squared_error", SGD(), **options), 0.1, backend)  # type: ignore[arg-type]
    loss = training.train_on({"x": x, "label": Y}, 0.1)
    made = run(tmp_path / "a" / "training_model.onnx", {"x": x, "label": Y, **values}, backend)
    np.testing.assert_allclose(next(iter(made.values())), loss, rtol=1e-6)
    for name in ("mean", "var"):
        np.testing.assert_allclose(made[f"{name}_updated"], training.state[name], rtol=1e-5)
        assert np.abs(made[f"{name}_updated"] - values[name]).min() > 1e-4
    for name in ("w1", "scale"):
        moved = values[name] - 0.1 * made[f"{name}_grad.accumulation.buffer_updated"]
        np.testing.assert_allclose(moved, training.weights[name], rtol=1e-4, atol=1e-5)
    evaluated = run(
        tmp_path / "a" / "eval_model.onnx", {"x": x, "label": Y, **training.state, **training.weights}, backend
    )
    np.testing.assert_allclose(next(iter(evaluated.values())), training.evaluate([{"x": x, "label": Y}]), rtol=1e-5)


def test_dropout_draws_in_training_alone(tmp_path: Path) -> None:
    write_artifacts(tmp_path / "a", dropped(), dropout="training")
    training, evaluation = (onnx.load(tmp_path / "a" / f"{name}_model.onnx") for name in ("training", "eval"))
    [node] = [node for node in training.graph.node if node.op_type == "Dropout"]
    assert numpy_helper.to_array({t.name: t for t in training.graph.initializer}[node.input[2]]).all()
    assert all(len(node.input) < 3 for node in evaluation.graph.node if node.op_type == "Dropout")
    feeds = {"x": X, "label": Y, **values_of(dropped())}
    [expected] = get_backend("numpy").prepare(dropped(0)).run({"x": X}).values()
    loss, y = run(tmp_path / "a" / "eval_model.onnx", feeds).values()
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, np.square(expected - Y).mean(), rtol=1e-5)
    drawn = next(iter(run(tmp_path / "a" / "training_model.onnx", feeds).values()))
    assert abs(drawn - loss) > 1e-3


def test_a_training_mode_is_not_chosen_for_the_user(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Take dropout='training'"):
        write_artifacts(tmp_path / "a", dropped())
    with pytest.raises(OptionError, match=r"dropout='on'; there are 'off', 'training'|dropout='on'; there are"):
        write_artifacts(tmp_path / "a", dropped(), dropout="on")
    with pytest.raises(OptionError, match="The model has no Dropout"):
        write_artifacts(tmp_path / "a", perceptron(), dropout="training")
    with pytest.raises(OptionError, match="The model has no BatchNormalization"):
        write_artifacts(tmp_path / "a", perceptron(), batch_norm="training")
    old = dropped()
    old.opset_import[0].version = 11
    del old.graph.node[2].input[1:]
    with pytest.raises(OptionError, match="training mode from opset 12"):
        write_artifacts(tmp_path / "a", old, dropout="training")


@pytest.mark.parametrize("backend", BACKENDS)
def test_additional_outputs_follow_the_loss(tmp_path: Path, backend: str) -> None:
    model = two_heads()
    write_artifacts(tmp_path / "a", model, output="y", trainable=["w1", "w2"], additional_outputs=["z", "t", "z"])
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    whole.graph.output.add(name="t")
    expected = get_backend("numpy").prepare(whole).run({"x": X})
    for file in ("training_model.onnx", "eval_model.onnx"):
        made = run(tmp_path / "a" / file, {"x": X, "label": Y, **values_of(model)}, backend)
        loss, z, t = list(made.values())[:3]
        np.testing.assert_allclose(loss, np.square(expected["y"] - Y).mean(), rtol=1e-5)
        np.testing.assert_allclose(z, expected["z"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(t, expected["t"], rtol=1e-5, atol=1e-6)
    with pytest.raises(UnknownNameError, match=r"'q' in additional_outputs is no value.*Its outputs are 'y', 'z'"):
        write_artifacts(tmp_path / "b", model, output="y", trainable=["w1"], additional_outputs=["q"])
    model.graph.node[3].output[0] = model.graph.output[1].name = "z_grad"
    with pytest.raises(OptionError, match="The training API hides 'z_grad'"):
        write_artifacts(tmp_path / "b", model, output="y", trainable=["w1"], additional_outputs=["z_grad"])
    model.graph.node[3].output[0] = model.graph.output[1].name = "label"
    with pytest.raises(UnknownNameError, match="The training has a value 'label', and so has the model"):
        write_artifacts(tmp_path / "b", model, output="y", trainable=["w1"], additional_outputs=["label"])


def test_values_have_other_names_than_the_buffers_of_gradients(tmp_path: Path) -> None:
    names = ("lazy_reset_grad", "w1_grad.accumulation.buffer", "w1_grad.accumulation.out")
    model = two_heads()
    for k, name in enumerate(names[:2]):
        inner = model.graph.node[k].output[0]
        for node in model.graph.node:
            node.input[:] = [name if value == inner else value for value in node.input]
        model.graph.node[k].output[0] = name
    write_artifacts(tmp_path / "a", model, output="y", trainable=["w1"])
    graph = onnx.load(tmp_path / "a" / "training_model.onnx").graph
    made = [name for node in graph.node for name in node.output] + [value.name for value in graph.input]
    assert [made.count(name) for name in names] == [1, 1, 1]
    for name in names:
        with pytest.raises(UnknownNameError, match=f"The training has a value {name!r}, and so has the model"):
            write_artifacts(tmp_path / "b", two_heads(), output="y", label=name, trainable=["w1"])
    with pytest.raises(OptionError, match="takes 'y_grad', an input with _grad in its name, for a gradient"):
        write_artifacts(tmp_path / "b", two_heads(), output="y", label="y_grad", trainable=["w1"])


def test_weights_of_another_output_are_not_trained(tmp_path: Path) -> None:
    with pytest.warns(ModelWarning, match="Not trained, since the output 'z' does not depend on them: 'w2', 'b2'"):
        write_artifacts(tmp_path / "a", two_heads(), output="z")
    graph = onnx.load(tmp_path / "a" / "training_model.onnx").graph
    assert [value.name for value in graph.input][:6] == ["x", "label", "w1", "b1", "w3", "b3"]
    with pytest.warns(ModelWarning, match="does not depend on them: 'w2', 'b2'"):
        step = step_model(two_heads(), "squared_error", output="z")
    assert set(step.layout) == {"w1", "b1", "w3", "b3"}
    with pytest.raises(NoGradientError, match="trainable names weights on which the output 'z' does not depend: 'w2'"):
        step_model(two_heads(), output="z", trainable=["w2", "w3"])
    with pytest.raises(NoGradientError, match="does not depend on the weights 'w2', 'b2'"):
        step_model(two_heads(), output="z", trainable=["*2"])


@pytest.mark.parametrize("loss", ["squared_error", "binary_cross_entropy_with_logits"])
def test_gradients_of_inputs_are_returned(tmp_path: Path, loss: str) -> None:
    model = perceptron()
    write_artifacts(
        tmp_path / "a", model, loss, reduction="sum", input_gradients=["x"], additional_outputs=["y"], trainable=["w2"]
    )
    label = (Y > 0).astype(np.float32)
    made = run(tmp_path / "a" / "training_model.onnx", {"x": X, "label": label, **values_of(model)})
    assert [np.shape(value) for value in made.values()][:3] == [(), (6, 3), (6, 4)]
    slope = 2 * (made["y"] - label) if loss == "squared_error" else 1 / (1 + np.exp(-made["y"])) - label
    gradient = refgrad.gradient(model, ["x"])
    [expected] = get_backend("numpy").prepare(gradient).run({"x": X, "y_grad": slope}).values()
    np.testing.assert_allclose(list(made.values())[2], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UnknownNameError, match="q"):
        write_artifacts(tmp_path / "b", model, input_gradients=["q"])


@pytest.mark.parametrize("optimizer", [SGD(), AdamW(), SGD(momentum=0.9)], ids=["sgd", "adamw", "momentum"])
@pytest.mark.parametrize(
    "clip", [{"clip_norm": 0.05}, {"clip_value": 0.01}, {"clip_norm": 0.05, "clip_value": 0.01}], ids=str
)
def test_gradients_are_clipped(tmp_path: Path, clip: dict[str, float], optimizer: Any) -> None:
    model = perceptron()
    write_artifacts(tmp_path / "a", model, "squared_error", optimizer, **clip)  # type: ignore[arg-type]
    training = Training(step_model(model, "squared_error", optimizer, **clip), 0.1)  # type: ignore[arg-type]
    training.train_on({"x": X, "label": Y}, 0.1)
    values = values_of(model)
    made = run(tmp_path / "a" / "training_model.onnx", {"x": X, "label": Y, **values})
    zeros = [np.zeros_like(value) for value in values.values()]
    feeds = {
        "learning_rate": np.float32([0.1]),
        "step": np.array([1]),
        "params": list(values.values()),
        "gradients": [made[f"{name}_grad.accumulation.buffer_updated"] for name in values],
        "first_order_moments": zeros,
        "second_order_moments": zeros,
    }
    moved = run(tmp_path / "a" / "optimizer_model.onnx", feeds)["params_updated"]
    for (name, value), new in zip(values.items(), moved, strict=True):
        np.testing.assert_allclose(new, training.weights[name], rtol=1e-5, atol=1e-6)
        assert np.abs(new - value).max() > 1e-5
    with pytest.raises(OptionError, match="clip_norm"):
        write_artifacts(tmp_path / "b", model, clip_norm=-1)
