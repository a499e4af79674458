"""Trainings: the updates of scikit-learn's networks, schedules by hand, and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import refgrad
from refgrad.backends import available, backends, get_backend
from refgrad.errors import BackendError, FeedError, ModelWarning, OptionError, TrainingError, UnknownNameError
from refgrad.training import (
    SGD,
    Adam,
    Adaptive,
    Arrays,
    Constant,
    Cosine,
    InverseScaling,
    Optimal,
    Optimizer,
    Progress,
    Schedule,
    Training,
    Warmup,
    batches,
    plot_losses,
    step_model,
)

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
EPOCHS = 30


def _line(kind: str = "double") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> line ({kind}[N, 2] x) => ({kind}[N, 1] y) '
        f"<{kind}[2, 1] a = {{1, 2}}, {kind}[1] b = {{0}}> {{ z = MatMul(x, a) y = Add(z, b) }}"
    )


def _mlp(coefs: list[np.ndarray], intercepts: list[np.ndarray]) -> onnx.ModelProto:
    """The network of scikit-learn in double: its exporter writes float32."""
    text, value = "", "x"
    for k in range(len(coefs)):
        last = k == len(coefs) - 1
        text += f"m{k} = MatMul({value}, w{k}) {'y' if last else f's{k}'} = Add(m{k}, b{k}) "
        if not last:
            text += f"h{k} = Relu(s{k}) "
            value = f"h{k}"
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> mlp (double[N, {len(coefs[0])}] x) => (double[N, 1] y) {{ {text} }}'
    )
    for k, (w, b) in enumerate(zip(coefs, intercepts, strict=True)):
        model.graph.initializer.extend(
            [onnx.numpy_helper.from_array(w, f"w{k}"), onnx.numpy_helper.from_array(b, f"b{k}")]
        )
    return model


NETWORKS: dict[str, tuple[dict[str, Any], Optimizer, Schedule]] = {
    "SGD": ({"solver": "sgd", "momentum": 0.0}, SGD(), Constant(1e-3)),
    "momentum": (
        {"solver": "sgd", "nesterovs_momentum": False},
        SGD(momentum=0.9, rate_in_velocity=True),
        Constant(1e-3),
    ),
    "Nesterov, invscaling": (
        {"solver": "sgd", "learning_rate": "invscaling"},
        SGD(momentum=0.9, nesterov=True, rate_in_velocity=True),
        InverseScaling(1e-3, 0.5, unit="sample", by_epoch=True),
    ),
    "Adam": ({"solver": "adam"}, Adam(epsilon="uncorrected"), Constant(1e-3)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_trained_as_scikit_learn_trains_it(name: str) -> None:
    """Short last batches, and the curve of the loss. Both take the samples in the order in which they are."""
    from sklearn.neural_network import MLPRegressor

    settings, optimizer, schedule = NETWORKS[name]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((100, 5))
    y = np.tanh(x[:, 0]) + x[:, 1] * x[:, 2]
    network = MLPRegressor(
        hidden_layer_sizes=(7, 3),
        alpha=0,
        batch_size=16,
        learning_rate_init=1e-3,
        shuffle=False,
        random_state=1,
        **settings,
    )
    network.partial_fit(x, y)  # it draws the weights, and does one epoch
    start = MLPRegressor(hidden_layer_sizes=(7, 3), random_state=1, max_iter=1, **settings)
    drawn = _first_weights(start, x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(EPOCHS - 1):
            network.partial_fit(x, y)
    step = step_model(_mlp(*drawn), "half_squared_error", optimizer)
    training = Training(step, schedule)
    for _ in range(EPOCHS):
        training.epoch(batches({"x": x, "label": y[:, None]}, 16))
    np.testing.assert_allclose(training.losses, network.loss_curve_, rtol=0, atol=1e-12)
    for k, (w, b) in enumerate(zip(network.coefs_, network.intercepts_, strict=True)):
        np.testing.assert_allclose(training.weights[f"w{k}"], w, rtol=0, atol=1e-12)
        np.testing.assert_allclose(training.weights[f"b{k}"], b, rtol=0, atol=1e-12)


def _first_weights(network: Any, x: np.ndarray, y: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The weights that a network draws before its first step: one step with a rate of almost 0 leaves them."""
    network.set_params(learning_rate_init=1e-300, batch_size=len(x), alpha=0)
    network.partial_fit(x, y)
    return network.coefs_, network.intercepts_


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("flat", [True, False])
def test_a_line_is_found(backend: str, flat: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((90, 2)).astype(np.float32)
    data = {"x": x, "label": x @ np.float32([[-1], [3]]) + np.float32(0.5)}
    model = _line("float")
    training = Training(step_model(model, optimizer=SGD(momentum=0.9), flat=flat), Constant(0.05), backend)
    for _ in range(60):
        training.epoch(batches(data, 20, rng))
    np.testing.assert_allclose(training.weights["a"], [[-1], [3]], atol=1e-4)
    np.testing.assert_allclose(training.weights["b"], [0.5], atol=1e-4)
    trained = training.write_to(model)
    [y] = get_backend(backend).prepare(trained).run({"x": x}).values()
    np.testing.assert_allclose(y, data["label"], atol=1e-3)
    assert onnx.numpy_helper.to_array(model.graph.initializer[0]).tolist() == [[1], [2]]


@pytest.mark.parametrize("flat", [True, False])
def test_weights_stay_on_the_device(flat: bool) -> None:
    """What is fed back lies in memory of CUDA, and the steps are those of the interpreter."""
    if reason := backends()["ort-cuda"]:
        pytest.skip(reason)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((100, 2)).astype(np.float32)
    data = {"x": x, "label": x @ np.float32([[3], [-1]])}
    trainings = [
        Training(step_model(_line("float"), optimizer=SGD(momentum=0.9), flat=flat), 0.02, backend)
        for backend in ("numpy", "ort-cuda")
    ]
    for _ in range(5):
        losses = [training.epoch(batches(data, 10)) for training in trainings]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    held: Any = trainings[1]._run
    assert {value.device_name() for values in held._sets for value in values.values()} == {"cuda"}
    for name, value in trainings[0].weights.items():
        np.testing.assert_allclose(trainings[1].weights[name], value, rtol=1e-4)


def test_penalties_are_in_the_loss_and_in_the_gradient() -> None:
    x, y = np.array([[1.0, -2.0], [0.5, 1.0]]), np.array([[1.0], [-1.0]])
    a, b, rate = np.array([[1.0], [2.0]]), 0.0, 0.1
    for flat in (True, False):
        step = step_model(_line(), penalty={"a": (0.3, 0.2)}, flat=flat)
        training = Training(step, rate)
        d = x @ a + b - y
        expected = np.mean(d**2) + 0.3 * np.abs(a).sum() + 0.2 * (a**2).sum()
        assert training.epoch(batches({"x": x, "label": y}, 2)) == pytest.approx(expected, abs=1e-14)
        slope = x.T @ (2 * d / 2) + 0.3 * np.sign(a) + 0.4 * a
        np.testing.assert_allclose(training.weights["a"], a - rate * slope, rtol=0, atol=1e-14)
        np.testing.assert_allclose(training.weights["b"], [b - rate * np.sum(d)], rtol=0, atol=1e-14)


def test_samples_have_weights() -> None:
    x, y, w = np.array([[1.0, -2.0], [0.5, 1.0]]), np.array([[1.0], [-1.0]]), np.array([2.0, 0.5])
    training = Training(step_model(_line(), sample_weight="w"), 0.1)
    d = x @ [[1.0], [2.0]] - y
    assert training.epoch(batches({"x": x, "label": y, "w": w}, 2)) == pytest.approx(np.mean(w[:, None] * d**2))
    np.testing.assert_allclose(training.weights["a"], [[1.0], [2.0]] - 0.1 * x.T @ (w[:, None] * d), atol=1e-14)


def test_classes_by_cross_entropy() -> None:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (double[N, 2] x) => (double[N, 3] y) '
        "<double[2, 3] w = {0, 0, 0, 0, 0, 0}> { y = MatMul(x, w) }"
    )
    classes = rng.integers(0, 3, 60)
    x = rng.standard_normal((60, 2)) + 4 * np.array([[1, 0], [-1, 1], [0, -1]])[classes]
    training = Training(step_model(model, "cross_entropy", Adam()), 0.05)
    first = training.epoch(batches({"x": x, "label": classes}, 60))
    assert first == pytest.approx(np.log(3))
    for _ in range(40):
        training.epoch(batches({"x": x, "label": classes}, 20))
    assert np.mean(np.argmax(x @ training.weights["w"], axis=1) == classes) > 0.95


@pytest.mark.parametrize(
    ("schedule", "progress", "rate"),
    [
        (InverseScaling(0.1, 0.25), Progress(epoch=99), 0.1 / 100**0.25),
        (InverseScaling(0.1, 0.5, unit="sample", by_epoch=True), Progress(2, 25, 250, 20, 200), 0.1 / 201**0.5),
        (Optimal(0.1, alpha=1e-2, unit="step"), Progress(step=9), 1 / (1e-2 * (1000 + 9))),
        (Cosine(0.1, period=10, minimum=0.01), Progress(epoch=5), 0.055),
        (Cosine(0.1, period=10), Progress(epoch=11), 0.0),
        (Warmup(length=4, after=Constant(0.2)), Progress(epoch=1), 0.1),
        (Adaptive(0.5, patience=1), Progress(epoch=4, losses=(1.0, 2.0, 2.0, 2.0)), 0.1),
    ],
    ids=str,
)
def test_learning_rates(schedule: Schedule, progress: Progress, rate: float) -> None:
    assert schedule(progress) == pytest.approx(rate, abs=1e-15)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"'w' in trainable .* There are: 'a', 'b'"):
        step_model(_line(), trainable=["w"])
    with pytest.raises(UnknownNameError, match="Nothing is trainable"):
        step_model(
            onnx.parser.parse_model(
                '<ir_version: 8, opset_import: ["": 18]> m (float[2] x) => (float[2] y) {y = Exp(x)}'
            )
        )
    with pytest.raises(OptionError, match="There is no loss 'hinge'"):
        step_model(_line(), "hinge")
    with pytest.raises(OptionError, match="momentum of SGD"):
        SGD(momentum=-1)
    with pytest.raises(OptionError, match="epsilon='inside'"):
        Adam(epsilon="inside")
    with pytest.raises(OptionError, match="unit='batch'"):
        Constant(0.1, unit="batch")
    with pytest.raises(FeedError, match="'x' 3, 'label' 2"):
        list(batches({"x": np.zeros((3, 2)), "label": np.zeros((2, 1))}, 2))
    with pytest.raises(OptionError, match="at least one sample"):
        list(batches({"x": np.zeros((3, 2))}, 0))
    with pytest.raises(OptionError, match=r"rng is a generator of NumPy, such as np.random.default_rng\(0\), not 0"):
        list(batches({"x": np.zeros((3, 2))}, 1, 0))
    training = Training(step_model(_line()))
    with pytest.raises(FeedError, match="no batch"):
        training.epoch([])
    data = {"x": np.zeros((3, 2)), "label": np.zeros((3, 1))}
    for wrong in ([tuple(data.values())], data):
        for train in (training.epoch, training.evaluate):
            with pytest.raises(
                FeedError, match=r"A batch is a dict of arrays by the names of the inputs, not a (tuple|str)"
            ):
                train(wrong)
    with pytest.raises(FeedError, match=r"The state is of another step: 'weights' has the shape .* is not there"):
        training.go_on({}, training.progress)
    with pytest.raises(FeedError, match=r"'weights' has the shape \[3\] here, and \[2\] there"):
        training.go_on({"weights": np.zeros(2)}, training.progress)


def test_weights_that_an_exporter_may_have_merged_are_noticed() -> None:
    """A bias of zeros that is a running mean too, behind an Identity, as torch's exporter leaves them. Tied weights differ."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[N, 2] x) => (float[N, 2] y) '
        "<float[2] zeros = {0, 0}, float[2] ones = {1, 1}, float[2] tied = {1, 2}, float[2] var = {1, 2}> "
        "{ mean = Identity(zeros)  z = BatchNormalization(x, ones, zeros, mean, var)  a = Mul(z, tied)  y = Mul(a, tied) }"
    )
    with pytest.warns(ModelWarning, match=r"all its elements are one number: 'zeros \(0\)'\. It is trained as one\."):
        step_model(model)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.float32([0, 1e-3]), "zeros"))
    step_model(model)


@pytest.mark.parametrize("name", ["trainable", "freeze"])
def test_names_are_a_list(name: str) -> None:
    for wrong in (3, True, ["a", 1]):
        with pytest.raises(OptionError, match=rf"{name} is a list of names or patterns, such as \['head.\*'\], not"):
            step_model(_line(), **{name: wrong})


@pytest.mark.parametrize("name", ["penalty", "weight_decay", "loss_settings"])
def test_settings_are_a_dict(name: str) -> None:
    with pytest.raises(OptionError, match=rf"{name} is a dict, such as .*, not 0.1"):
        step_model(_line(), "huber", Adam(), **{name: 0.1})


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(TypeError, match=r"step_model has no parameter 'quantisation'\. Did you mean 'quantization'\?"):
        step_model(_line(), quantisation="zero")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_that_is_not_finite_ends_the_training(backend: str) -> None:
    training = Training(step_model(_line()), 0.1, backend)
    x = np.array([[1.0, np.nan]])
    with pytest.raises(TrainingError, match=r"The loss is nan in step 0 \(epoch 0\)"):
        training.epoch(batches({"x": x, "label": np.zeros((1, 1))}, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_fed_to_the_next_run(backend: str) -> None:
    counter = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[N] x, float total) => (float next, float[N] shown) '
        "{ sum = ReduceSum<keepdims = 0>(x) next = Add(total, sum) shown = Mul(x, next) }"
    )
    runs = get_backend(backend).prepare(counter).recurrence({"total": "next"}, {"total": np.float32(1)})
    for values, total in (([1, 2], 4), ([3], 7), ([1, 1], 9), ([], 9)):
        x = np.array(values, np.float32)
        shown = runs.step({"x": x})
        np.testing.assert_array_equal(shown["shown"], x * total)
        assert runs.values["total"] == total
    with pytest.raises(FeedError):
        runs.step({"x": np.zeros((2, 2), np.float32)})
    assert runs.values["total"] == 9


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_shapes_take_turns(backend: str) -> None:
    """The memory of shapes that have not come for a while is given back."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[N] x, float total) => (float next) '
        "{ sum = ReduceSum<keepdims = 0>(x) next = Add(total, sum) }"
    )
    runs = get_backend(backend).prepare(model).recurrence({"total": "next"}, {"total": np.float32(0)})
    for size in (*range(1, 30), *range(1, 30)):
        runs.step({"x": np.ones(size, np.float32)})
    assert runs.values["total"] == 2 * sum(range(1, 30))


def test_a_loss_may_be_a_model(tmp_path: Path) -> None:
    """The logarithm of cosh of the difference, whose derivative is tanh."""
    loss = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (double[N, 1] y, double[N, 1] label) => (double mean) '
        "{ z = Sub(y, label) c = Cosh(z) l = Log(c) mean = ReduceMean<keepdims = 0>(l) }"
    )
    x, y = np.array([[1.0, -2.0], [0.5, 1.0]]), np.array([[1.0], [-1.0]])
    d = x @ [[1.0], [2.0]] - y
    onnx.save(loss, tmp_path / "loss.onnx")
    for given in (loss, tmp_path / "loss.onnx"):
        training = Training(step_model(_line(), given), 0.1)
        assert training.epoch(batches({"x": x, "label": y}, 2)) == pytest.approx(np.log(np.cosh(d)).mean(), abs=1e-14)
        np.testing.assert_allclose(training.weights["a"], [[1.0], [2.0]] - 0.1 * x.T @ (np.tanh(d) / 2), atol=1e-14)
    for opset in (13, 21):  # one of the two is converted
        text = (
            f'<ir_version: 8, opset_import: ["": {opset}]> m (double[N, 1] p, double[N, 1] label) => (double l) '
            "{ z = Sub(p, label) q = Mul(z, z) l = ReduceMean<keepdims = 0>(q) }"
        )
        training = Training(step_model(_line(), onnx.parser.parse_model(text)), 0.1)
        assert training.epoch(batches({"x": x, "label": y}, 2)) == pytest.approx(np.square(d).mean(), abs=1e-14)
    for changed, says in (
        (text.replace("label", "x"), "The loss has an input 'x', and so has the model. Rename"),
        (
            text.replace("[N, 1] p", "[N] p"),
            r"takes 'p' of the shape \[N\], and the model returns 'y' of the shape \[N, 1\]",
        ),
        (text.replace("[N, 1] p", "[N, 3] p"), r"takes 'p' of the shape \[N, 3\], .* Declare both alike"),
        (
            text.replace("double", "float"),
            "takes 'p' in float32, and the model returns 'y' in float64. Declare both alike",
        ),
    ):
        with pytest.raises(OptionError, match=says):
            step_model(_line(), onnx.parser.parse_model(changed))
    with pytest.raises(OptionError, match="A loss that is a model has no settings, such as 'delta'"):
        step_model(_line(), loss, loss_settings={"delta": 1})
    with pytest.raises(OptionError, match=r"The loss in a file is a Path: loss=Path\('loss.onnx'\)"):
        step_model(_line(), "loss.onnx")
    with pytest.raises(OptionError, match="reduces and weighs by itself"):
        step_model(_line(), loss, reduction="sum")


def test_running_statistics_as_the_specification_has_them() -> None:
    """They are divided by n, unless `unbiased` asks for n − 1; a model without any has no training mode."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> m (double[N, 1] x) => (double[N, 1] y) <double[1] scale = {1}, '
        "double[1] bias = {0}, double[1] mean = {2}, double[1] var = {3}> "
        "{ y = BatchNormalization<momentum = 0.75>(x, scale, bias, mean, var) }"
    )
    x = np.array([[1.0], [2.0], [6.0]])
    for unbiased, divisor in ((False, 3), (True, 2)):
        step = step_model(model, batch_norm="training", unbiased=unbiased)
        assert step.statistics == ("mean", "var")
        training = Training(step, 0.1)
        training.epoch(batches({"x": x, "label": x}, 3))
        np.testing.assert_allclose(training.state["mean"], [0.75 * 2 + 0.25 * 3], atol=1e-14)
        np.testing.assert_allclose(training.state["var"], [0.75 * 3 + 0.25 * 14 / divisor], atol=1e-14)
    with pytest.raises(OptionError, match="has no BatchNormalization"):
        step_model(_line(), batch_norm="training")
    with pytest.raises(OptionError, match="'frozen', 'training'"):
        step_model(model, batch_norm="train")
    model.graph.node[0].input[4] = "mean"
    with pytest.raises(OptionError, match="shares one"):
        step_model(model, batch_norm="training")


@pytest.mark.parametrize("backend", BACKENDS)
def test_running_statistics_of_one_node_behind_another(backend: str) -> None:
    """By hand, in NumPy. ONNX Runtime's kernel writes over the running statistics that it reads."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> m (float[N, 3] x) => (float[N, 3] y) <float[3] s = {1, 2, 3}, '
        "float[3] b = {0, 1, 2}, float[3] m1 = {1, 2, 3}, float[3] v1 = {4, 5, 6}, float[3] m2 = {7, 8, 9}, "
        "float[3] v2 = {3, 2, 1}> { a = BatchNormalization<momentum = 0.9>(x, s, b, m1, v1) "
        "y = BatchNormalization<momentum = 0.9>(a, s, b, m2, v2) }"
    )
    training = Training(step_model(model, batch_norm="training"), 1e-12, backend)  # the weights stay
    expected = {"m1": [1, 2, 3], "v1": [4, 5, 6], "m2": [7, 8, 9], "v2": [3, 2, 1]}
    rng = np.random.default_rng(0)
    for _ in range(3):
        x = rng.standard_normal((6, 3))
        training.epoch(batches({"x": x.astype(np.float32), "label": x.astype(np.float32)}, 6))
        for mean, var in (("m1", "v1"), ("m2", "v2")):
            for name, value in ((mean, x.mean(0)), (var, x.var(0, ddof=1))):
                expected[name] = 0.9 * np.asarray(expected[name]) + 0.1 * value
            x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * [1, 2, 3] + [0, 1, 2]
    for name, value in expected.items():
        np.testing.assert_allclose(training.state[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scalars_keep_the_value_of_their_run(backend: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[N] x, float total) => (float next, float shown, float[N] all) '
        "{ sum = ReduceSum<keepdims = 0>(x) next = Add(total, sum) shown = Add(next, next) all = Mul(x, next) }"
    )
    runs = get_backend(backend).prepare(model).recurrence({"total": "next"}, {"total": np.float32(1)})
    first, second = (runs.step({"x": np.array(values, np.float32)}) for values in ([1, 2], [3]))
    assert (first["shown"], second["shown"]) == (8, 14)
    np.testing.assert_array_equal(first["all"], [4, 8])
    np.testing.assert_array_equal(second["all"], [21])


@pytest.mark.parametrize("flat", [True, False])
def test_a_step_has_no_node_too_many(flat: bool) -> None:
    """Each row is taken from the vector and put back without Reshape; nothing is copied, and every node is read."""
    rng = np.random.default_rng(0)
    coefs = [rng.standard_normal((3, 4)), rng.standard_normal((4, 1))]
    model = _mlp(coefs, [rng.standard_normal(4), rng.standard_normal(1)])
    graph = step_model(model, "half_squared_error", SGD(momentum=0.9), flat=flat).model.graph
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    assert all(read.intersection(node.output) for node in graph.node)
    assert {tensor.name for tensor in graph.initializer} <= read
    kinds = [node.op_type for node in graph.node]
    assert "Identity" not in kinds
    assert kinds.count("Reshape") == (4 if flat else 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_input_that_nothing_needs_keeps_its_default(backend: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[N, 2] x, float[2] offset) => (float[N, 1] y, float[N, 2] z) '
        "<float[2] offset = {1, 2}, float[2, 1] a = {1, 2}> { y = MatMul(x, a) z = Add(x, offset) }"
    )
    training = Training(step_model(model, output="y", trainable=["a"]), 0.1, backend)
    assert training.train_on({"x": np.ones((1, 2), np.float32), "label": np.zeros((1, 1), np.float32)}, 0.1) == 9


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_is_named_and_undone(backend: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (double[N, 1] x) => (double[N, 1] y) <double[1, 1] a = {2}> '
        "{ scaled = MatMul(x, a) y = Exp(scaled) }"
    )
    training = Training(step_model(model), 0.01, backend)
    training.epoch(batches({"x": np.ones((4, 1)), "label": np.ones((4, 1))}, 2))
    before = training.weights["a"]
    with pytest.raises(TrainingError, match=r"in step 2 \(epoch 1\): the first .* is 'y' of Exp, in 1 of 2 elements"):
        training.epoch(batches({"x": np.array([[1e6], [1.0]]), "label": np.ones((2, 1))}, 2))
    np.testing.assert_array_equal(training.weights["a"], before)
    training.epoch(batches({"x": np.ones((4, 1)), "label": np.ones((4, 1))}, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_validation_takes_the_running_statistics(backend: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> m (double[N, 1] x) => (double[N, 1] y) <double[1] scale = {1}, '
        "double[1] bias = {0}, double[1] mean = {2}, double[1] var = {3}> "
        "{ y = BatchNormalization<epsilon = 0.0>(x, scale, bias, mean, var) }"
    )
    x = np.array([[1.0], [2.0], [6.0]])
    training = Training(step_model(model, batch_norm="training"), 0.1, backend)
    training.epoch(batches({"x": x, "label": x}, 3))
    data = {"x": x, "label": np.zeros_like(x)}
    loss = training.evaluate(batches(data, 2))
    [y] = get_backend("numpy").prepare(training.write_to(model)).run({"x": x}).values()
    assert loss == pytest.approx(np.mean(y**2), rel=1e-12)


def test_nodes_in_training_mode_are_refused() -> None:
    norm = (
        '<ir_version: 8, opset_import: ["": 17]> m (double[N, 1] x) => (double[N, 1] y) <double[1] scale = {1}, '
        "double[1] bias = {0}, double[1] mean = {2}, double[1] var = {3}> "
        "{ y, m, v = BatchNormalization<training_mode = 1>(x, scale, bias, mean, var) }"
    )
    with pytest.raises(OptionError, match="batch_norm='training'"):
        step_model(onnx.parser.parse_model(norm))
    assert step_model(onnx.parser.parse_model(norm), batch_norm="training").statistics == ("mean", "var")
    text = (
        '<ir_version: 8, opset_import: ["": 17]> m (double[N, 1] x) => (double[N, 1] y) <double[1, 1] a = {{1}}, '
        "double ratio = {{0.5}}, bool on = {{{}}}> {{ p = MatMul(x, a) y = Dropout(p, ratio, on) }}"
    )
    with pytest.raises(OptionError, match="Dropout node"):
        step_model(onnx.parser.parse_model(text.format(1)))
    step_model(onnx.parser.parse_model(text.format(0)))


# Losses of classes

_OF_Z = """<ir_version: 8, opset_import: ["": 18]> m (double[N, 2] x) => (double[N, {size}] p)
<double[2, 3] w3 = {{0, 0, 0, 0, 0, 0}}, double[2, 1] w1 = {{0, 0}}, int64[1] one = {{1}}, int64[2] column = {{-1, 1}}>
{{ z = MatMul(x, w{size}) {nodes} }}"""


def _of_z(nodes: str, size: int = 3) -> onnx.ModelProto:
    """A model that returns p, which the nodes make of the logits z."""
    return onnx.parser.parse_model(_OF_Z.format(nodes=nodes, size=size))


PROBABILITIES = {
    "Softmax": "p = Softmax(z)",
    "Softmax, Identity, Clip": "s = Softmax(z) i = Identity(s) low = Constant <value_float = 1e-6> () "
    "l = CastLike(low, i) p = Clip(i, l)",
    "Softmax in its parts": "e = Exp(z) s = ReduceSum(e, one) p = Div(e, s)",
    "with Reshape and Expand": "e = Exp(z) s = ReduceSum <keepdims = 0> (e, one) c = Reshape(s, column) k = Shape(e) "
    "b = Expand(c, k) p = Div(e, b)",
    "Exp of LogSoftmax": "l = LogSoftmax(z) p = Exp(l)",
    "Exp of z - ReduceLogSumExp": "m = ReduceLogSumExp(z, one) l = Sub(z, m) p = Exp(l)",
    "Sigmoid": "p = Sigmoid(z)",
    "Softmax, Transpose": "s = Softmax(z) t = Transpose <perm = [1, 0]> (s) p = Transpose <perm = [1, 0]> (t)",
}


@pytest.mark.parametrize("kind", PROBABILITIES)
def test_probabilities_are_no_logits(kind: str) -> None:
    model = _of_z(PROBABILITIES[kind])
    with pytest.raises(
        OptionError, match=r"use loss='log_loss', or cut the model at the logits, '[zl]' \(refgrad\.select"
    ):
        step_model(model, "cross_entropy")
    step_model(model, "log_loss")


@pytest.mark.parametrize("nodes", ["p = Identity(z)", "k = Constant <value_ints = [-1]> () p = Reshape(z, k)"])
def test_one_logit_is_none_for_each_class(nodes: str) -> None:
    model = _of_z(nodes, 1)
    if "Reshape" in nodes:
        del model.graph.output[0].type.tensor_type.shape.dim[1]
    advice = "needs a logit for each class, and 'p' has 1 .* use loss='binary_cross_entropy_with_logits'"
    with pytest.raises(OptionError, match=advice):
        step_model(model, "cross_entropy")
    with pytest.raises(OptionError, match=advice.replace("loss=", "score=")):
        refgrad.recipes.sensitivity(model, score="cross_entropy")
    training = Training(step_model(model, "binary_cross_entropy_with_logits", SGD()), 1.0)
    label = np.ones((model.graph.output[0].type.tensor_type.shape.dim[1:] and (1, 1)) or (1,))
    assert training.train_on({"x": np.array([[1.0, -2.0]]), "label": label}, 1.0) == pytest.approx(np.log(2))
    np.testing.assert_allclose(training.weights["w1"], [[0.5], [-1]], atol=1e-12)


def test_a_logit_is_a_number_and_no_probability() -> None:
    with pytest.raises(OptionError, match="made by Sigmoid: use loss='log_loss', or cut the model before it"):
        step_model(_of_z("p = Sigmoid(z)", 1), "cross_entropy")


@pytest.mark.parametrize("nodes", ["p = LogSoftmax(z)", "s = Softmax(z) p = Log(s)"])
def test_logarithms_of_probabilities_are_no_probabilities(nodes: str) -> None:
    for loss in ("log_loss", "log"):
        with pytest.raises(OptionError, match=r"'p' is the logarithm of one\. Use cross_entropy"):
            step_model(_of_z(nodes), loss)
    step_model(_of_z(nodes), "cross_entropy")


@pytest.mark.parametrize("loss", ["log", "binary_cross_entropy_with_logits"])
def test_labels_of_two_classes_are_0_and_1(loss: str) -> None:
    step = step_model(_of_z("p = Sigmoid(z)" if loss == "log" else "p = Identity(z)", 1), loss)
    x = np.zeros((3, 2))
    Arrays(step, {"x": x, "label": np.array([0, 1, 1])})
    Arrays(step, {"x": x, "label": np.array([0, 0.5, 1])})
    for wrong in (np.array([1, 2, 1]), np.array([-1, 1, 1])):
        for refuse in (step.labels, lambda label: Arrays(step, {"x": x, "label": label})):
            with pytest.raises(FeedError, match="takes labels from 0 to 1"):
                refuse(wrong)


@pytest.mark.parametrize(
    "nodes",
    ["p = Identity(z)", "p = Add(z, z)", "p = Relu(z)", "p = Tanh(z)", "n = Neg(z) p = Concat <axis = 1> (n, z)"],
)
def test_numbers_that_may_be_no_probabilities_are_noticed(nodes: str) -> None:
    if "Add" in nodes:
        nodes = "b = Constant <value_float = 1.0> () c = CastLike(b, z) p = Add(z, c)"
    model = _of_z(nodes)
    if "Concat" in nodes:
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 6
    with pytest.warns(ModelWarning, match="so it may be any number. Outside of 0 to 1 the loss is flat"):
        step_model(model, "log_loss")


EPSILON = {"float16": 2.0**-10, "float": 2.0**-23, "double": 2.0**-52}


@pytest.mark.parametrize("kind", EPSILON)
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("p", [-3.0, -0.5, 0.25, 0.75, 1.5, 3.0])
def test_the_log_loss_is_flat_outside_0_to_1(p: float, label: int, columns: int, kind: str) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> m ({kind}[N, {columns}] x) => ({kind}[N, {columns}] y) {{ y = Mul(x, w) }}'
    )
    values = np.full(columns, 0.5)
    values[label if columns == 2 else 0] = p
    dtype = onnx.helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(dtype), "w"))

    def loss_of(w: np.ndarray) -> float:
        q = w[label] if columns == 2 else w[0] if label else 1 - w[0]
        return float(-np.log(np.clip(q, EPSILON[kind], 1)))

    training = Training(step_model(model, "log_loss", SGD(), trainable=["w"]), 1.0)
    loss = training.train_on({"x": np.ones((1, columns), dtype), "label": np.array([label])}, 1.0)
    assert loss >= 0
    assert loss == pytest.approx(loss_of(values), rel=2e-3 if kind == "float16" else 1e-6)
    expected = [(loss_of(values + h) - loss_of(values - h)) / 2e-6 for h in 1e-6 * np.eye(columns)]
    np.testing.assert_allclose(values - training.weights["w"], expected, atol=5e-3 if kind == "float16" else 1e-6)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_the_score_log_takes_a_probability_in_one_column(label: float) -> None:
    model = _of_z("p = Sigmoid(z)", 1)
    training = Training(step_model(model, "log", SGD()), 1.0)
    training.step.weights["w1"][:] = 0
    loss = training.train_on({"x": np.array([[1.0, -2.0]]), "label": np.array([[label]])}, 1.0)
    assert loss == pytest.approx(np.log(2))
    np.testing.assert_allclose(training.weights["w1"], [[label - 0.5], [1 - 2 * label]], atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", ["squared_error", "half_squared_error", "absolute_error", "elastic", "huber"])
def test_a_label_is_not_broadcast_where_the_number_of_columns_is_unknown(loss: str, backend: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (double[N, 2] x, int64[2] s) => (double[N, C] z) '
        "<double[2, 3] w = {1, -1, 0, 0, 1, 1}> { y = MatMul(x, w) z = Reshape(y, s) }"
    )
    feeds = {"x": np.ones((4, 2)), "s": np.array([-1, 3]), "label": np.zeros((4, 3))}
    assert Training(step_model(model, loss, SGD()), 0.1, backend).train_on(feeds, 0.1) > 0
    with pytest.raises(BackendError, match="Reshape"):
        Training(step_model(model, loss, SGD()), 0.1, backend).train_on(feeds | {"label": np.zeros((4, 1))}, 0.1)


def test_a_loss_is_one_number() -> None:
    with pytest.raises(
        OptionError, match=r"loss=None needs an output that is one number, and 'y' has the shape \[N, 1\]"
    ):
        step_model(_line(), None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), Adam()], ids=["SGD", "Adam"])
def test_steps_that_accumulate_are_one_large_step(optimizer: Optimizer, flat: bool, backend: str) -> None:
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((24, 2)), "label": rng.standard_normal((24, 1))}
    settings: dict[str, Any] = {"optimizer": optimizer, "flat": flat, "clip_norm": 0.5, "penalty": {"a": (0.01, 0.02)}}
    whole = Training(step_model(_line(), **settings), 0.1, backend)
    parts = Training(step_model(_line(), accumulate=3, **settings), 0.1, backend)
    for _ in range(3):
        whole.epoch(batches(data, 12))
        parts.epoch(batches(data, 4))
    for name, value in whole.weights.items():
        np.testing.assert_allclose(parts.weights[name], value, rtol=0, atol=1e-12)
    before = parts.weights["a"].copy()
    parts.train_on({name: array[:4] for name, array in data.items()}, 0.1)
    np.testing.assert_array_equal(parts.weights["a"], before)
    with pytest.raises(OptionError, match="accumulate"):
        step_model(_line(), accumulate=0)


def test_losses_are_drawn() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = plot_losses([3, 2, 1], [4, 3], title="a line")
    assert [list(line.get_ydata()) for line in axes.lines] == [[3, 2, 1], [4, 3]]
    assert axes.get_title() == "a line"
    with pytest.raises(OptionError, match="Train first"):
        plot_losses([])
