"""Sums of losses: loss and steps equal the weighted sums over the single losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx.parser
import pytest
from compared_artifacts import two_heads

from refgrad.backends import available, get_backend
from refgrad.errors import FeedError, ModelWarning, NoGradientError, OptionError, UnknownNameError
from refgrad.training import SGD, AdamW, LossTerm, Training, step_model, sum_of_losses

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
RNG = np.random.default_rng(5)
FEEDS = {
    "x": RNG.standard_normal((6, 4)).astype(np.float32),
    "classes": RNG.integers(0, 3, 6),
    "target": RNG.standard_normal((6, 2)).astype(np.float32),
    "shares": RNG.uniform(0.5, 2, 6).astype(np.float32),
}
TERMS = [
    LossTerm("cross_entropy", "y", "classes", settings={"label_smoothing": 0.1}),
    LossTerm("squared_error", "z", "target", weight=0.5, sample_weight="shares"),
    LossTerm("huber", "z", "target", weight=-2, reduction="sum", settings={"delta": 0.3}),
]


def step(loss: Any, rate: float = 1.0, backend: str = "numpy", **options: Any) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of a step, and how it moves the weights."""
    model = two_heads()
    trainable = [
        "w1",
        "b1",
        *(["w2"] if options.get("output") == "y" else ["w3"] if "output" in options else ["w2", "w3"]),
    ]
    made = step_model(model, loss, SGD(), trainable=trainable, **options)
    training = Training(made, rate, backend)
    before = training.weights
    named = [*made.data, *options.get("label", "").split()]
    value = training.train_on({name: FEEDS[name] for name in named}, rate)
    return value, {name: after - before[name] for name, after in training.weights.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sum_is_the_sum_of_the_losses(backend: str) -> None:
    loss = sum_of_losses(two_heads(), TERMS)
    onnx.checker.check_model(loss, full_check=True)
    assert [value.name for value in loss.graph.input] == ["y", "classes", "z", "target", "shares"]
    total, moved = step(loss, backend=backend)
    expected, due = 0.0, {name: np.zeros_like(value) for name, value in moved.items()}
    for term in TERMS:
        value, change = step(
            term.loss,
            output=term.output,
            label=term.label,
            reduction=term.reduction,
            sample_weight=term.sample_weight,
            loss_settings=term.settings,
        )
        expected += term.weight * value
        for name, one in change.items():
            due[name] += term.weight * one
    assert total == pytest.approx(expected, rel=1e-5)
    for name, change in moved.items():
        np.testing.assert_allclose(change, due[name], rtol=1e-4, atol=1e-5)
        assert np.abs(change).max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_class_below_0_is_refused(backend: str) -> None:
    """ONNX Runtime would count it from the last one."""
    for settings in ({}, {"ignore_index": -100}):
        term = LossTerm("cross_entropy", "y", "classes", settings=settings)
        with pytest.warns(ModelWarning, match="Not trained, since the output 'y' does not depend on them: 'w3'"):
            step = step_model(two_heads(), sum_of_losses(two_heads(), [term]))
        training = Training(step, 1.0, backend)
        for name in ("epoch", "evaluate"):
            with pytest.raises(FeedError, match=r"'classes' has the class -1 at \[2\], and classes begin at 0"):
                getattr(training, name)([{"x": FEEDS["x"], "classes": np.array([0, 1, -1, 0, 1, 2])}])
    training.epoch([{"x": FEEDS["x"], "classes": np.array([0, 1, -100, 0, 1, 2])}])


def test_weights_that_no_term_needs_are_not_trained() -> None:
    loss = sum_of_losses(two_heads(), [LossTerm("cross_entropy", "y", "classes")])
    with pytest.raises(NoGradientError, match="names weights on which the output 'y' does not depend: 'w3'"):
        step_model(two_heads(), loss, trainable=["w1", "w3"])
    both = sum_of_losses(two_heads(), [LossTerm("cross_entropy", "y", "classes"), LossTerm("huber", "z", "target")])
    assert {"w2", "w3"} <= {*step_model(two_heads(), both).weights}


@pytest.mark.parametrize("penalty", [None, {"w": (0.0, 0.1)}])
@pytest.mark.parametrize("way", [{}, {"all_reduce": dict}], ids=["alone", "together"])
@pytest.mark.parametrize("loss", ["squared_error", "a sum"])
def test_what_the_loss_does_not_read_is_not_trained(loss: str, way: dict[str, Any], penalty: Any) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        heads (float[N, 4] x, float[N, 4] u) => (float[N, 2] y, float[N, 1] z)
        <float[4, 2] w = {1, 0, 0, 1, 0, 0, 1, 1}, float[4, 1] v = {1, -2, 3, 5}> { y = MatMul(x, w)  z = MatMul(u, v) }
    """)
    given: Any = {"loss": loss, "output": "y"}
    if loss == "a sum":
        given = {"loss": sum_of_losses(model, [LossTerm("squared_error", "y", "label")])}
    with pytest.warns(ModelWarning, match="Not trained, since the output 'y' does not depend on them: 'v'"):
        made = step_model(model, optimizer=AdamW(weight_decay=0.5), penalty=penalty, **given)
    training = Training(made, 0.1, **way)
    data = {"x": FEEDS["x"], "u": FEEDS["x"], "label": FEEDS["target"]}
    training.epoch([data])
    assert list(training.weights) == ["w"]
    error = FEEDS["x"] @ training.weights["w"] - FEEDS["target"]
    assert training.evaluate([data]) == pytest.approx(float((error**2).mean()), rel=1e-5)
    with pytest.raises(NoGradientError, match="on which the output 'y' does not depend: 'v'"):
        step_model(model, trainable=["w", "v"], **given)


def test_one_term_is_its_loss() -> None:
    alone = step("squared_error", output="z", label="target")
    model = sum_of_losses(two_heads(), [LossTerm("squared_error", "z", "target")])
    assert model.graph.output[0].type.tensor_type.shape.dim == []
    [value] = get_backend("numpy").prepare(model).run({"z": FEEDS["target"] + 2, "target": FEEDS["target"]}).values()
    assert value == pytest.approx(4)
    made = step_model(two_heads(), model, SGD(), trainable=["w1", "b1", "w3"])
    assert Training(made).train_on({"x": FEEDS["x"], "target": FEEDS["target"]}, 0.1) == pytest.approx(
        alone[0], rel=1e-6
    )


def test_models_of_old_opsets_are_converted() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 7, opset_import: ["": 11]> old (float[6, 3] x) => (float[6, 3] y, float[6, 3] z) '
        "<float[3] w = {1, 2, 3}> { y = Mul(x, w)  z = Add(x, w) }"
    )
    loss = sum_of_losses(model, [LossTerm("squared_error", "z", "b"), LossTerm("cross_entropy", "y", "a")])
    training = Training(step_model(model, loss), 0.1)
    x = RNG.standard_normal((6, 3)).astype(np.float32)
    feeds = {"x": x, "a": FEEDS["classes"], "b": np.zeros((6, 3), np.float32)}
    w = np.float32([1, 2, 3])
    scores = np.exp(x * w)
    due = np.square(x + w).mean() - np.log(scores[np.arange(6), feeds["a"]] / scores.sum(1)).mean()
    assert training.train_on(feeds, 0.1) == pytest.approx(due, rel=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    model = two_heads()
    for terms, error, says in (
        ([], OptionError, "at least one term"),
        ([LossTerm("squared_error", "z", weight=float("nan"))], OptionError, "The weight of a loss is a finite number"),
        ([LossTerm("squared", "z")], OptionError, "There is no loss 'squared'"),
        ([LossTerm("squared_error")], OptionError, "has 2 outputs of floats"),
        ([LossTerm("squared_error", "q")], UnknownNameError, "'q' is no output"),
        ([LossTerm("squared_error", "z", "x")], UnknownNameError, "The label 'x' has the name of an input"),
        ([LossTerm("squared_error", "y"), LossTerm("cross_entropy", "y")], OptionError, "Two losses read 'label'"),
    ):
        with pytest.raises(error, match=says):
            sum_of_losses(model, terms)
