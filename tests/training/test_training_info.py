"""training_info: a step goes into the model that it trains and comes out again, to the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.checker
import onnx.parser
import pytest
from make_artifacts import perceptron
from onnx import numpy_helper

from refgrad.backends import available, get_backend
from refgrad.errors import InvalidModelError, OptionError, UnknownNameError
from refgrad.training import SGD, AdamW, Training, from_training_info, step_model, with_training_info

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
RNG = np.random.default_rng(0)
BATCHES = [
    {"x": RNG.standard_normal((5, 4)).astype(np.float32), "label": RNG.integers(0, 3, 5)} for _ in range(4)
]  # fmt: skip


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), AdamW()], ids=["momentum", "adamw"])
def test_a_step_comes_out_as_it_went_in(optimizer, backend: str, opset: int, tmp_path: Path) -> None:
    model = perceptron()
    model.opset_import[0].version = opset
    step = step_model(model, "cross_entropy", optimizer, trainable=["*2"], flat=False, clip_norm=1.0)
    onnx.save(with_training_info(model, step), tmp_path / "m.onnx")
    assert not model.training_info
    made = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(made)
    [info] = made.training_info
    held = {tensor.name for tensor in made.graph.initializer}
    assert held.isdisjoint(tensor.name for tensor in info.algorithm.initializer)
    feed = {"x": BATCHES[0]["x"]}
    [before] = get_backend(backend).prepare(model).run(feed).values()
    [after] = get_backend(backend).prepare(made).run(feed).values()
    np.testing.assert_array_equal(before, after)
    again = from_training_info(tmp_path / "m.onnx")
    onnx.checker.check_model(again.model, full_check=True)
    assert list(again.weights) == ["w2", "b2"]
    assert (again.data, again.label, again.loss) == (step.data, step.label, step.loss)
    trainings = [Training(one, 0.05, backend) for one in (step, again)]
    for batch in BATCHES:
        first, second = (training.train_on(batch, 0.05) for training in trainings)
        assert first == second
    for name, value in trainings[0].weights.items():
        np.testing.assert_array_equal(value, trainings[1].weights[name])


def _by_hand() -> onnx.ModelProto:
    """w ← w − rate·(w·x − y)·x, with what another program may write: a rate in float32 [1], and no number of the step."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[1] x) => (float[1] y) <float[1] w = {3}> { y = Mul(w, x) }'
    )
    body = onnx.parser.parse_graph("""
        algorithm (float[1] x, float[1] t, float[1] learning_rate) => (float[1] loss, float[1] new) {
            p = Mul(w, x)
            d = Sub(p, t)
            loss = Mul(d, d)
            g = Mul(d, x)
            u = Mul(learning_rate, g)
            new = Sub(w, u)
        }""")
    info = model.training_info.add()
    info.algorithm.CopyFrom(body)
    info.update_binding.add(key="w", value="new")
    return model


def test_one_that_was_written_by_hand() -> None:
    training = Training(from_training_info(_by_hand(), label="t"), 0.1)
    loss = training.train_on({"x": np.float32([2]), "t": np.float32([4])}, 0.1)
    assert loss == 4
    np.testing.assert_allclose(training.weights["w"], [3 - 0.1 * 2 * 2], rtol=1e-6)


def test_what_does_not_fit_is_named() -> None:
    model = perceptron()
    with pytest.raises(OptionError, match="flat=False"):
        with_training_info(model, step_model(model))
    step = step_model(model, flat=False)
    other = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 17]> g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul(w, x) }'
    )
    with pytest.raises(UnknownNameError, match="'w1', which is no initializer"):
        with_training_info(other, step)
    with pytest.raises(InvalidModelError, match="Expected one entry of training_info, got 0"):
        from_training_info(model)
    with pytest.raises(UnknownNameError, match="no input 'label'"):
        from_training_info(_by_hand())
    for key, value, message in (
        ("v", "new", "updates 'v', which is no initializer"),
        ("w", "old", "by 'old', which is no output"),
    ):
        wrong = _by_hand()
        wrong.training_info[0].update_binding[0].CopyFrom(onnx.StringStringEntryProto(key=key, value=value))
        with pytest.raises(InvalidModelError, match=message):
            from_training_info(wrong, label="t")
    nothing = _by_hand()
    del nothing.training_info[0].update_binding[:]
    with pytest.raises(InvalidModelError, match="updates nothing"):
        from_training_info(nothing, label="t")
    clash = perceptron()
    clash.graph.initializer.append(numpy_helper.from_array(np.float32(1), "w1.velocity"))
    with pytest.raises(OptionError, match=r"both have an initializer 'w1\.velocity'"):
        with_training_info(clash, step_model(perceptron(), optimizer=SGD(momentum=0.9), flat=False))


@pytest.mark.parametrize("kind", ["float", "float16"])
def test_running_statistics_are_bound(kind: str) -> None:
    dtype = {"float": np.float32, "float16": np.float16}[kind]
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 18]>
        m ({kind}[N, 2] x) => ({kind}[N, 2] y) {{ n = BatchNormalization(x, scale, bias, mean, var)  y = MatMul(n, w) }}
    """)
    for name, value in {"scale": [1, 2], "bias": [0, 1], "mean": [0, 0], "var": [1, 1], "w": [[1, 2], [3, 4]]}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(value, dtype), name))
    step = step_model(model, flat=False, batch_norm="training")
    made = with_training_info(model, step)
    onnx.checker.check_model(made)
    again = from_training_info(made)
    trainings = [Training(one, 0.05) for one in (step, again)]
    for batch in BATCHES:
        feeds = {"x": batch["x"][:, :2].astype(dtype), "label": batch["x"][:, 2:].astype(dtype)}
        first, second = (training.train_on(feeds, 0.05) for training in trainings)
        assert first == second
    written = [training.write_to(model).graph.initializer for training in trainings]
    assert written[0] == written[1]
    assert not np.array_equal(numpy_helper.to_array(written[0][3]), [1, 1])
