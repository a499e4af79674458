"""The settings of the cross entropy, and the Huber loss, against torch's formulas written out in NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from refgrad.backends import available
from refgrad.errors import FeedError, OptionError
from refgrad.training import SGD, Arrays, LossTerm, Training, step_model, sum_of_losses

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
WEIGHTS = [0.5, 2.0, 0.0, 1.5]
CASES = [
    {
        name: value
        for name, value in zip(("class_weights", "ignore_index", "label_smoothing"), values, strict=True)
        if value
    }
    for values in itertools.product((None, WEIGHTS), (None, -100, 1), (0.0, 0.3, 1.0))
]


def model(opset: int = 18, extra: str = "") -> onnx.ModelProto:
    """Logits [N, 4], or [N, 4, 5], of x [N, 3] or [N, 3, 5]."""
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> m (double[N, 3{extra}] x) => (double[N, 4{extra}] z) '
        "<double[4, 3] w = {1, -2, 0.5, 0.3, 0.7, -1, 2, 1, 0, -0.4, 0.1, 1.2}> "
        "{ z = " + ("MatMul(w, x)" if extra else "Gemm<transB = 1>(x, w)") + " }"
    )


def data(extra: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, (7, *extra))
    w = np.array([1, -2, 0.5, 0.3, 0.7, -1, 2, 1, 0, -0.4, 0.1, 1.2]).reshape(4, 3)
    return rng.standard_normal((7, 3, *extra)), labels, w


def cross_entropy(
    z: np.ndarray,
    label: np.ndarray,
    reduction: str = "mean",
    sample_weight: np.ndarray | None = None,
    class_weights: Any = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> float:
    """The formula in the documentation of torch.nn.CrossEntropyLoss, label by label."""
    weights = np.ones(z.shape[1]) if class_weights is None else np.asarray(class_weights)
    total = count = 0.0
    for place in np.ndindex(label.shape):
        y = label[place]
        if y == ignore_index:
            continue
        scores = z[(place[0], slice(None), *place[1:])]
        logs = scores - np.logaddexp.reduce(scores)
        smooth = (1 - label_smoothing) * np.eye(len(scores))[y] + label_smoothing / len(scores)
        total -= (1.0 if sample_weight is None else sample_weight[place[0]]) * np.sum(weights * logs * smooth)
        count += weights[y]
    return float(total / count if reduction == "mean" else total)


def differences(function: Any, at: np.ndarray) -> np.ndarray:
    """The derivative of a function by central differences."""
    slope = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[place] = 1e-5
        slope[place] = (function(at + step) - function(at - step)) / 2e-5
    return slope


def one_step(step: Any, feeds: dict[str, np.ndarray], backend: str = "numpy") -> tuple[float, np.ndarray]:
    """The loss, and the derivative by w."""
    training = Training(step, backend=backend)
    before = training.weights["w"].copy()
    loss = training.train_on(feeds, 1.0)
    return loss, before - training.weights["w"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_the_cross_entropy_is_the_one_of_torch(settings: dict[str, Any], reduction: str, backend: str) -> None:
    x, label, w = data()
    if settings.get("ignore_index") == -100:
        label[[0, 4]] = -100
    step = step_model(model(), "cross_entropy", SGD(), reduction=reduction, loss_settings=settings)
    loss, slope = one_step(step, {"x": x, "label": label}, backend)
    assert loss == pytest.approx(cross_entropy(x @ w.T, label, reduction, **settings), rel=1e-10)
    expected = differences(lambda v: cross_entropy(x @ v.T, label, reduction, **settings), w)
    np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("opset", [13, 18, 21])
def test_the_cross_entropy_of_more_axes_and_weighted_samples(opset: int) -> None:
    settings: dict[str, Any] = {"class_weights": WEIGHTS, "ignore_index": 3, "label_smoothing": 0.2}
    x, label, w = data((5,))
    weight = np.linspace(0.5, 2, 7)
    step = step_model(model(opset, ", 5"), "cross_entropy", SGD(), sample_weight="weight", loss_settings=settings)
    loss, slope = one_step(step, {"x": x, "label": label, "weight": weight})

    def formula(v: np.ndarray) -> float:
        return cross_entropy(np.einsum("ck,nkm->ncm", v, x), label, "mean", weight, **settings)

    assert loss == pytest.approx(formula(w), rel=1e-10)
    np.testing.assert_allclose(slope, differences(formula, w), rtol=1e-6, atol=1e-8)


@pytest.mark.torch
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_the_formula_is_the_one_of_torch(settings: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    x, label, w = data()
    names = {"class_weights": "weight"}
    given = {
        names.get(k, k): torch.tensor(v, dtype=torch.float64) if k == "class_weights" else v
        for k, v in settings.items()
    }
    loss = torch.nn.functional.cross_entropy(torch.tensor(x @ w.T), torch.tensor(label), **given)
    assert cross_entropy(x @ w.T, label, **settings) == pytest.approx(loss.item(), rel=1e-12)


def test_a_batch_without_a_label_that_counts_changes_nothing() -> None:
    x, label, _ = data()
    step = step_model(model(), "cross_entropy", SGD(), loss_settings={"ignore_index": -1, "label_smoothing": 0.1})
    loss, slope = one_step(step, {"x": x, "label": np.full_like(label, -1)})
    assert loss == 0
    assert not slope.any()


def test_labels_that_are_ignored_are_no_classes() -> None:
    x, label, _ = data()
    label[2] = -100
    step = step_model(model(), "cross_entropy", SGD(), loss_settings={"ignore_index": -100})
    Arrays(step, {"x": x, "label": label})
    for wrong in (-1, 4):
        with pytest.raises(FeedError, match=f"has the class {wrong} at"):
            Arrays(step, {"x": x, "label": np.where(label == -100, wrong, label)})
    with pytest.raises(FeedError, match="has the class -100 at"):
        Arrays(step_model(model(), "cross_entropy", SGD()), {"x": x, "label": label})
    named = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]> m (float[N, 2] x) => (int64[N] l, float[N, 2] z) '
        "{ l, z = ai.onnx.ml.LinearClassifier <coefficients = [1.0, 2.0, 3.0, 4.0], intercepts = [0.0, 1.0], "
        'classlabels_ints = [5, 7], post_transform = "NONE"> (x) }'
    )
    step = step_model(named, "cross_entropy", SGD(), loss_settings={"ignore_index": -100})
    assert step.labels([5, -100, 7]).tolist() == [0, -100, 1]
    assert step.labels([5, 7]).tolist() == [0, 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1}, {"class_weights": WEIGHTS}, {"ignore_index": -1}])
def test_a_step_refuses_labels_that_are_no_classes(settings: dict[str, Any], backend: str) -> None:
    """ONNX Runtime would count the class −2 from the last one, and train on it."""
    x, label, _ = data()
    training = Training(step_model(model(), "cross_entropy", SGD(), loss_settings=settings), 0.1, backend)
    loss = training.evaluate([{"x": x, "label": label}])
    for wrong in (-2, 4):
        for train in (training.epoch, training.evaluate):
            with pytest.raises(
                FeedError, match=f"'label' has the class {wrong} at .* classes of the model are 0 to 3"
            ) as no:
                train([{"x": x, "label": np.where(label == label[0], wrong, label)}])
        hinted = wrong < 0 and "ignore_index" not in settings
        assert hinted == ("means that a label does not count, give it as ignore_index" in str(no.value))
    assert training.evaluate([{"x": x, "label": label}]) == loss  # the weights are as they were


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weight": [1]}, "no setting 'weight'; it has 'class_weights', 'ignore_index', 'label_smoothing'"),
        ({"class_weights": [1, 2]}, "class_weights has 2 numbers, and the output 4 classes"),
        ({"class_weights": [1, -2, 1, 1]}, "class_weights are finite numbers from 0 on"),
        ({"class_weights": [[1, 2, 1, 1]]}, "class_weights are finite numbers from 0 on"),
        ({"class_weights": "even"}, "class_weights are finite numbers from 0 on"),
        ({"ignore_index": 0.5}, "ignore_index is an integer"),
        ({"label_smoothing": 1.5}, "label_smoothing is a number from 0 to 1"),
        ({"label_smoothing": -0.1}, "label_smoothing is a number from 0 to 1"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        step_model(model(), "cross_entropy", loss_settings=settings)


def test_other_losses_of_classes_have_no_settings() -> None:
    with pytest.raises(OptionError, match="loss='log_loss' has no settings, such as 'ignore_index'"):
        step_model(model(), "log_loss", loss_settings={"ignore_index": 1})
    with pytest.raises(OptionError, match="The score 'huber' has no setting 'beta'; it has 'delta'"):
        step_model(model(), "huber", loss_settings={"beta": 1})
    with pytest.raises(OptionError, match="delta of the score 'huber' is a number above 0, not 0"):
        step_model(model(), "huber", loss_settings={"delta": 0})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("delta", [None, 0.25, 3.0])
def test_the_huber_loss_is_the_one_of_torch(delta: float | None, backend: str) -> None:
    x, _, w = data()
    label = np.random.default_rng(1).standard_normal((7, 4))
    label[0] = (x @ w.T)[0]  # the difference 0
    d = 1.0 if delta is None else delta

    def formula(v: np.ndarray) -> float:
        gap = np.abs(x @ v.T - label)
        return float(np.mean(np.where(gap <= d, gap**2 / 2, d * (gap - d / 2))))

    settings = {} if delta is None else {"delta": delta}
    loss, slope = one_step(
        step_model(model(), "huber", SGD(), loss_settings=settings), {"x": x, "label": label}, backend
    )
    assert loss == pytest.approx(formula(w), rel=1e-12)
    np.testing.assert_allclose(slope, differences(formula, w), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16])
@pytest.mark.parametrize("loss", ["cross_entropy", "huber", "binary_cross_entropy_with_logits"])
def test_losses_of_16_bits_are_computed_in_float32(loss: str, kind: int) -> None:
    x, label, w = data()
    narrow, dtype = model(), onnx.helper.tensor_dtype_to_np_dtype(kind)
    for value in (narrow.graph.input[0], narrow.graph.output[0]):
        value.type.tensor_type.elem_type = kind
    narrow.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(w.astype(dtype), "w"))
    settings: dict[str, Any] = {"class_weights": WEIGHTS, "ignore_index": 3, "label_smoothing": 0.2}
    settings = settings if loss == "cross_entropy" else {}
    given = label if loss == "cross_entropy" else np.eye(4)[label]
    feeds = {"x": x.astype(dtype), "label": given if given.dtype == np.int64 else given.astype(dtype)}
    found, slope = one_step(step_model(narrow, loss, SGD(), loss_settings=settings), feeds)
    expected, wide = one_step(step_model(model(), loss, SGD(), loss_settings=settings), {"x": x, "label": given})
    assert found == pytest.approx(expected, rel=2e-2)
    np.testing.assert_allclose(slope, wide, atol=3e-2)


def test_functions_of_an_older_opset_are_converted_with_the_model() -> None:
    plain = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 13]>
        m (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 0, 0.5, -1, 2, 3}> { h = MatMul(x, w)  y = Tanh(h) }
    """)
    called = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 13, "local" : 1]>
        m (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 0, 0.5, -1, 2, 3}> { y = local.layer(x, w) }
        <domain: "local", opset_import: ["" : 13]> layer (x, w) => (y) { h = MatMul(x, w)  y = Tanh(h) }
    """)
    before = called.SerializeToString()
    data = {"x": np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32), "label": np.arange(6) % 2}
    found = []
    for model in (plain, called):
        for loss in ("cross_entropy", sum_of_losses(model, [LossTerm("cross_entropy")])):
            training = Training(step_model(model, loss), 0.1)
            found.append(training.train_on(data, 0.1))
            found.append(training.write_to(model).graph.initializer[0].raw_data)
    assert found[:2] * 4 == found
    assert called.SerializeToString() == before
