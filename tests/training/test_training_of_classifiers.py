"""Classifiers as skl2onnx and torch's exporters leave them: classes, probabilities, maps, modes, and the shell."""

from __future__ import annotations

import json
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper, numpy_helper
from typer.testing import CliRunner

import refgrad
from refgrad.backends import get_backend
from refgrad.cli import app
from refgrad.errors import FeedError, OptionError, UnknownNameError
from refgrad.training import SGD, Adam, Arrays, Training, batches, lora, merge_adapters, step_model

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not all(map(find_spec, ("sklearn", "skl2onnx"))), reason="scikit-learn is not installed"),
]


@cache
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, the digits on them, and whether these are above 4."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x[:600] / 16).astype(np.float32), y[:600], (y[:600] > 4).astype(np.int64)


def converted(classifier: object, y: np.ndarray, zipmap: bool = False) -> onnx.ModelProto:
    from skl2onnx import to_onnx

    X, _, _ = digits()
    fitted = classifier.fit(X[:80], y[:80])  # type: ignore[attr-defined]
    options = {} if zipmap else {"zipmap": False}
    return to_onnx(fitted, X[:1], options=options, target_opset=18)  # type: ignore[no-any-return]


def probabilities(model: onnx.ModelProto) -> np.ndarray:
    X, _, _ = digits()
    name = next(v.name for v in model.graph.output if v.name.startswith(("probab", "output_prob")))
    return np.asarray(get_backend("numpy").prepare(model).run({"X": X}, [name])[name])


def trained(model: onnx.ModelProto, y: np.ndarray, loss: str = "log_loss", epochs: int = 30) -> Training:
    X, _, _ = digits()
    step = step_model(model, loss, Adam())
    training, rng = Training(step, 0.02), np.random.default_rng(0)
    data = Arrays(step, {"X": X, "label": y})
    for _ in range(epochs):
        training.epoch(data.batches(50, rng))
    return training


def test_numbers_in_trees_are_not_trained() -> None:
    from sklearn.ensemble import RandomForestClassifier

    forest = converted(RandomForestClassifier(2, max_depth=2), digits()[2], zipmap=True)
    with pytest.raises(UnknownNameError, match=r"numbers in TreeEnsembleClassifier \(ai\.onnx\.ml\) are not trained"):
        step_model(forest, "log_loss")


def test_two_classes_of_a_logistic_regression_add_up_to_one() -> None:
    from sklearn.linear_model import LogisticRegression

    _, _, TWO = digits()
    model = converted(LogisticRegression(C=0.01), TWO)
    training = trained(model, TWO)
    made = training.write_to(model)
    p = probabilities(made)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
    assert (p.argmax(1) == TWO).mean() > max(0.88, (probabilities(model).argmax(1) == TWO).mean())
    np.testing.assert_allclose(training.losses[-1], -np.log(p[np.arange(len(TWO)), TWO]).mean(), rtol=0.05)
    [node] = [node for node in made.graph.node if node.op_type == "LinearClassifier"]
    for attribute in node.attribute:
        if attribute.name in ("coefficients", "intercepts"):
            first, second = np.split(np.array(attribute.floats), 2)
            np.testing.assert_array_equal(first, -second)


def test_one_step_of_two_classes_is_that_of_one_score() -> None:
    from sklearn.linear_model import LogisticRegression

    X, _, TWO = digits()
    model = converted(LogisticRegression(), TWO)
    step = step_model(model, "log_loss", SGD())
    [w] = [value for name, value in step.weights.items() if "coef" in name]
    [b] = [value for name, value in step.weights.items() if "inter" in name]
    assert w.shape == (64, 1)
    training = Training(step, 0.1)
    loss = training.train_on({"X": X, "label": TWO}, 0.1)
    p = 1 / (1 + np.exp(-(X.astype(np.float64) @ w + b)))[:, 0]
    np.testing.assert_allclose(loss, -np.log(np.where(TWO == 1, p, 1 - p)).mean(), rtol=1e-5)
    slope = X.T @ (p - TWO)[:, None] / len(X)
    [moved] = [value for name, value in training.weights.items() if "coef" in name]
    np.testing.assert_allclose(moved, w - 0.1 * slope, rtol=1e-4, atol=1e-6)


COLUMNS = """
    <ir_version: 8, opset_import: ["": 18]> columns (float[N, 64] X) => (float[N, {size}] probabilities)
    {{ z = MatMul(X, w)  s = Sigmoid(z)  {last} }}"""


@pytest.mark.parametrize("size", ["10", "M"])
@pytest.mark.parametrize("last", ["probabilities = Identity(s)", "probabilities = Cast<to = 1>(s)"])
def test_columns_that_do_not_add_up_are_each_a_yes_or_no(size: str, last: str) -> None:
    X, DIGITS, _ = digits()
    model = onnx.parser.parse_model(COLUMNS.format(size=size, last=last))
    w = np.random.default_rng(0).standard_normal((64, 10)).astype(np.float32) / 8
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    training = Training(step_model(model, "log_loss", SGD()), 0.1)
    p = 1 / (1 + np.exp(-(X.astype(np.float64) @ w)))
    is_label = np.eye(10)[DIGITS]
    loss = training.train_on({"X": X, "label": DIGITS}, 0.1)
    np.testing.assert_allclose(loss, -np.log(np.where(is_label, p, 1 - p)).sum(1).mean(), rtol=1e-5)
    slope = X.T @ (p - is_label) / len(X)
    np.testing.assert_allclose(training.weights["w"], w - 0.1 * slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "network"])
def test_probabilities_are_no_logits(kind: str) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier

    _, DIGITS, _ = digits()
    classifier = LogisticRegression() if kind == "linear" else MLPClassifier((8,), max_iter=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few iterations
        model = converted(classifier, DIGITS)
    with pytest.raises(
        OptionError, match=r"compares logits, and 'probabilities' is a probability, made by .*: use loss='log_loss'"
    ):
        step_model(model, "cross_entropy")


@pytest.mark.parametrize("opset", [11, 13])
def test_the_logits_are_named_as_in_the_model(opset: int) -> None:
    """Before opset 13 Softmax is written anew where the number of axes is not known, with other names."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 7, opset_import: ["": {opset}]> net (float[N, 4] x, int64[R] s) => (float[N, 2] prob)
        <float[4,2] w = {{1, 0, -1, 2, 1, 0, 1, 1}}>
        {{ a = Reshape(x, s)  z = MatMul(a, w)  prob = Softmax<axis = 1>(z) }}"""
    )
    with pytest.raises(OptionError, match=r"cut the model at the logits, 'z' \("):
        step_model(model, "cross_entropy")


def test_maps_are_left_out_and_the_only_output_of_floats_is_taken() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    X, DIGITS, _ = digits()
    model = converted(make_pipeline(StandardScaler(), LogisticRegression()), DIGITS, zipmap=True)
    training = trained(model, DIGITS, epochs=5)
    made = training.write_to(model)
    assert [value.name for value in made.graph.output] == [value.name for value in model.graph.output]
    assert made.graph.output[1].type == model.graph.output[1].type
    label = get_backend("numpy").prepare(made).run({"X": X}, ["output_label"])["output_label"]
    assert (label == DIGITS).mean() > 0.9


def test_the_label_may_be_called_as_an_output_is() -> None:
    from sklearn.linear_model import LogisticRegression

    X, DIGITS, _ = digits()
    model = converted(LogisticRegression(), DIGITS)
    assert "label" in [value.name for value in model.graph.output]
    step = step_model(model, "squared_error", SGD())
    loss = Training(step, 0.1).train_on({"X": X, "label": np.eye(10, dtype=np.float32)[DIGITS]}, 0.1)
    np.testing.assert_allclose(loss, ((probabilities(model) - np.eye(10)[DIGITS]) ** 2).mean(), rtol=1e-5)


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def refused(why: str, *arguments: object) -> None:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(done.exception, FeedError)
    assert why in str(done.exception)


@pytest.mark.parametrize("names", [[1, 2, 3], ["a", "b", "c"], [0, 1, 2]], ids=str)
def test_the_shell_takes_the_classes_of_the_model(tmp_path: Path, names: list[object]) -> None:
    from sklearn.linear_model import LogisticRegression

    X, DIGITS, _ = digits()
    y = np.array(names)[DIGITS % 3]
    model = converted(LogisticRegression(C=0.001), y)
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=X[DIGITS % 3 < 2], y=y[DIGITS % 3 < 2])
    run(
        "train",
        tmp_path / "m.onnx",
        "--data",
        tmp_path / "d.npz",
        "--loss",
        "log_loss",
        "-o",
        tmp_path / "t.onnx",
        "--rate",
        "0.02",
        "--epochs",
        "30",
        "-q",
    )
    label = get_backend("numpy").prepare(onnx.load(tmp_path / "t.onnx")).run({"X": X}, ["label"])["label"]
    seen = DIGITS % 3 < 2
    assert (label[seen] == y[seen]).mean() > 0.85
    np.savez(tmp_path / "d.npz", x=X[:2], y=np.array([9, 9]) if isinstance(names[0], int) else np.array(["z", "z"]))
    refused(
        "is not one of the model's classes",
        "train",
        tmp_path / "m.onnx",
        "--data",
        tmp_path / "d.npz",
        "--loss",
        "log_loss",
        "-o",
        tmp_path / "u",
    )


NETWORK = """
    <ir_version: 8, opset_import: ["": 18]> network (float[{n}, 64] x) => (float[{n}, 10] logits)
    {{ h = MatMul(x, body)  r = Relu(h)  z = MatMul(r, head)  logits = Add(z, bias) }}"""


def network(n: str = "N") -> onnx.ModelProto:
    model, rng = onnx.parser.parse_model(NETWORK.format(n=n)), np.random.default_rng(0)
    for name, shape in (("body", (64, 16)), ("head", (16, 10)), ("bias", (10,))):
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) / 4, name))
    return model


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def test_adapters_and_other_weights_are_trained_together(tmp_path: Path) -> None:
    X, DIGITS, _ = digits()
    onnx.save(network(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=X, y=DIGITS)
    run(
        "train",
        tmp_path / "m.onnx",
        "--data",
        tmp_path / "d.npz",
        "--loss",
        "cross_entropy",
        "--lora",
        "head",
        "--trainable",
        "bias",
        "-o",
        tmp_path / "t.onnx",
        "--epochs",
        "2",
        "-q",
    )
    before, after = arrays(network()), arrays(onnx.load(tmp_path / "t.onnx"))
    assert {name for name, value in before.items() if (value != after[name]).any()} == {"head", "bias"}


def test_a_training_with_adapters_that_is_resumed_ends_where_it_would_have(tmp_path: Path) -> None:
    X, DIGITS, _ = digits()
    onnx.save(network(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=X, y=DIGITS)
    common = [
        "train",
        tmp_path / "m.onnx",
        "--data",
        tmp_path / "d.npz",
        "--loss",
        "cross_entropy",
        "--lora",
        "*",
        "-q",
    ]
    run(*common, "-o", tmp_path / "whole.onnx", "--epochs", "4")
    run(*common, "-o", tmp_path / "half.onnx", "--epochs", "2", "--checkpoint", tmp_path / "c")
    run(*common, "-o", tmp_path / "rest.onnx", "--epochs", "4", "--checkpoint", tmp_path / "c", "--resume")
    whole, rest = arrays(onnx.load(tmp_path / "whole.onnx")), arrays(onnx.load(tmp_path / "rest.onnx"))
    for name, value in whole.items():
        np.testing.assert_array_equal(rest[name], value)


def test_merged_adapters_are_what_was_trained() -> None:
    X, DIGITS, _ = digits()
    adapted = lora(network(), ["head", "body"], rank=3, alpha=5)
    step = step_model(adapted, "cross_entropy", Adam())
    training = Training(step, 0.01)
    for batch in batches({"x": X, "label": DIGITS}, 100):
        training.train_on(batch, 0.01)
    made = training.write_to(adapted)
    merged = merge_adapters(made)
    for name in ("head", "body"):
        values = arrays(made)
        expected = values[name] + values[f"{name}.lora_A"] @ values[f"{name}.lora_B"] * (5 / 3)
        np.testing.assert_allclose(arrays(merged)[name], expected, rtol=1e-5, atol=1e-6)


def test_batches_of_a_fixed_size(tmp_path: Path) -> None:
    X, DIGITS, _ = digits()
    onnx.save(network("6"), tmp_path / "m.onnx")
    common = [
        "train",
        tmp_path / "m.onnx",
        "--data",
        tmp_path / "d.npz",
        "--loss",
        "cross_entropy",
        "-o",
        tmp_path / "t.onnx",
    ]
    np.savez(tmp_path / "d.npz", x=X, y=DIGITS)
    run(*common, "--epochs", "1")
    np.savez(tmp_path / "d.npz", x=X[:31], y=DIGITS[:31])
    refused("takes batches of 6 samples, and one has 1", *common, "--epochs", "1", "--no-shuffle")


MODES = """
    <ir_version: 8, opset_import: ["": 18]> modes (float[N, 64] x) => (float[N, 10] logits) <float ratio = {0.5}, bool on = {1}>
    { b, m, v = BatchNormalization<training_mode = 1>(x, scale, shift, mean, var)  d, mask = Dropout(b, ratio, on)
      logits = MatMul(d, w) }"""


def test_what_is_written_is_for_inference(tmp_path: Path) -> None:
    X, DIGITS, _ = digits()
    model = onnx.parser.parse_model(MODES)
    start = {
        "scale": np.ones(64),
        "shift": np.zeros(64),
        "mean": np.zeros(64),
        "var": np.ones(64),
        "w": np.eye(64)[:, :10] * 0.1,
    }
    model.graph.initializer.extend(numpy_helper.from_array(v.astype(np.float32), n) for n, v in start.items())
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(OptionError, match="batch_norm='training'"):
        step_model(model, "cross_entropy", dropout="training")
    with pytest.raises(OptionError, match="dropout='training'"):
        step_model(model, "cross_entropy", batch_norm="training")
    step = step_model(tmp_path / "m.onnx", "cross_entropy", Adam(), batch_norm="training", dropout="training")
    training = Training(step, 0.01)
    for _ in range(3):
        training.epoch(batches({"x": X, "label": DIGITS}, 50))
    made = training.write_to(tmp_path / "m.onnx")
    prepared = get_backend("numpy").prepare(made)
    [whole] = prepared.run({"x": X}, ["logits"]).values()
    rows = np.concatenate([prepared.run({"x": X[k : k + 1]}, ["logits"])["logits"] for k in range(20)])
    np.testing.assert_allclose(whole[:20], rows, rtol=1e-5, atol=1e-5)
    loss = -np.log((np.exp(whole) / np.exp(whole).sum(1, keepdims=True))[np.arange(len(X)), DIGITS]).mean()
    np.testing.assert_allclose(training.evaluate(batches({"x": X, "label": DIGITS}, 600)), loss, rtol=1e-4)
    np.savez(tmp_path / "d.npz", x=X, y=DIGITS)
    said = run(
        "train",
        tmp_path / "m.onnx",
        "--data",
        tmp_path / "d.npz",
        "--loss",
        "cross_entropy",
        "-o",
        tmp_path / "t.onnx",
        "--batch-norm",
        "training",
        "--dropout",
        "training",
        "--epochs",
        "3",
        "--validation",
        "0.2",
        "--patience",
        "1",
        "--json",
    )
    assert json.loads(said)["weights_of_epoch"] in (1, 2, 3)
    onnx.checker.check_model(onnx.load(tmp_path / "t.onnx"), full_check=True)


def test_what_is_evaluated_has_no_penalty() -> None:
    X, DIGITS, _ = digits()
    data = {"x": X, "label": DIGITS}
    plain = Training(step_model(network(), "cross_entropy"), 0.1).evaluate(batches(data, 600))
    step = step_model(network(), "cross_entropy", penalty={"*": (0.1, 0.1)})
    penalized = Training(step, 0.1)
    assert penalized.train_on(data, 1e-6) > plain + 1
    np.testing.assert_allclose(Training(step, 0.1).evaluate(batches(data, 600)), plain, rtol=1e-6)


def test_a_lifted_model_of_two_rows_that_are_no_mirror_keeps_both() -> None:
    node = helper.make_node(
        "LinearClassifier",
        ["X"],
        ["l", "y"],
        "linear",
        domain="ai.onnx.ml",
        coefficients=[1.0, 2.0, -1.0, -2.5],
        intercepts=[0.0, 0.0],
        classlabels_ints=[0, 1],
        post_transform="LOGISTIC",
    )
    value = helper.make_tensor_value_info
    graph = helper.make_graph([node], "g", [value("X", 1, ["N", 2])], [value("y", 1, ["N", 2])])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 1)]
    lifted = refgrad.lift_weights(helper.make_model(graph, opset_imports=imports, ir_version=8))
    assert refgrad.weights(lifted)["linear.coefficients"].shape == (2, 2)
