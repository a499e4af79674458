"""The names of onnxcustom that its notebooks do not show: parameters, functions and batches."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import refgrad
from refgrad.backends import available, get_backend
from refgrad.compat.training.data_loader import OrtDataLoader
from refgrad.compat.training.grad_helper import DerivativeOptions, onnx_derivative
from refgrad.compat.training.optimizers import OrtGradientOptimizer
from refgrad.compat.training.optimizers_partial import OrtGradientForwardBackwardOptimizer
from refgrad.compat.training.ortgradient import OrtGradientForwardBackward
from refgrad.compat.training.sgd_learning_loss import BaseLearningLoss, ElasticLearningLoss, NegLogLearningLoss
from refgrad.compat.training.sgd_learning_penalty import BaseLearningPenalty, ElasticLearningPenalty, NoLearningPenalty
from refgrad.compat.training.sgd_learning_rate import BaseLearningRate, LearningRateSGD, LearningRateSGDNesterov
from refgrad.compat.utils.orttraining_helper import add_loss_output
from refgrad.errors import FeedError, NotTrainedError, OptionError, TrainingError, UnknownNameError

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
LINE = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 15]> line (float[N, 2] X) => (float[N, 1] y) '
    "<float[2, 1] a = {1, -2}, float[1] b = {0.5}> { p = MatMul(X, a) y = Add(p, b) }"
)
CHANCE = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 15]> line (float[N, 2] X) => (float[N, 1] y) '
    "<float[2, 1] a = {1, -2}> { p = MatMul(X, a) y = Sigmoid(p) }"
)
BOTH = [OrtGradientForwardBackwardOptimizer, OrtGradientOptimizer]


def optimizer(kind: type, weighted: bool = False, **settings: Any) -> Any:
    """An optimizer of either kind, of the line and its squared error."""
    settings = {"max_iter": 3, "learning_rate": 0.1, "start": "model", "random_state": 0, "backend": "numpy"} | settings
    if kind is OrtGradientForwardBackwardOptimizer:
        return kind(LINE, **settings, **({"weight_name": "weight"} if weighted else {}))
    return kind(add_loss_output(LINE, weight_name="weight" if weighted else None), ["a", "b"], **settings)


def points(count: int = 20) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((count, 2)).astype(np.float32)
    return x, x @ np.float32([[2], [1]])


@pytest.mark.parametrize("kind", BOTH)
def test_weights_of_samples_may_be_a_column(kind: type) -> None:
    x, y = points()
    weights = np.linspace(0.5, 2, 20)
    row, column = (optimizer(kind, True).fit(x, y, w) for w in (weights, weights[:, None]))
    assert row.train_losses_ == column.train_losses_
    np.testing.assert_array_equal(row.losses(x, y, weights), column.losses(x, y, weights[:, None]))


@pytest.mark.parametrize("kind", BOTH)
def test_results_are_attributes_from_fit_on(kind: type) -> None:
    session = optimizer(kind)
    for name in ("trained_coef_", "train_losses_"):
        assert not hasattr(session, name)
    for error in (AttributeError, TrainingError, NotTrainedError):
        with pytest.raises(error, match="Call fit first"):
            session.get_state()
    session.fit(*points())
    assert hasattr(session, "trained_coef_")
    assert len(session.get_state()) == 2


@pytest.mark.parametrize("kind", BOTH)
def test_scikit_learn_clones_and_searches(kind: type) -> None:
    base = pytest.importorskip("sklearn.base")
    selection = pytest.importorskip("sklearn.model_selection")
    session = optimizer(kind, kinks="torch", batch_size=5)
    assert repr(base.clone(session)) == repr(session)
    again = base.clone(session.fit(*points()))
    assert not hasattr(again, "trained_coef_")
    assert again.get_params()["kinks"] == "torch"
    assert again.fit(*points()).train_losses_ == session.train_losses_
    rates = [LearningRateSGD(1e-6), LearningRateSGD(0.1)]
    search = selection.GridSearchCV(optimizer(kind), {"learning_rate": rates}, cv=2).fit(*points())
    assert search.best_params_["learning_rate"].eta0 == 0.1


def test_arguments_are_replaced() -> None:
    session = optimizer(OrtGradientForwardBackwardOptimizer).fit(*points())
    assert session.set_params(max_iter=5, learning_loss="absolute", quantization="straight-through") is session
    assert (session.max_iter, repr(session.learning_loss)) == (5, "AbsoluteLearningLoss()")
    assert not hasattr(session, "trained_coef_")
    assert len(session.fit(*points()).train_losses_) == 5
    for wrong, said in (
        ({"rate": 1}, "There is no argument 'rate'; there are 'model_onnx'"),
        ({"max_iter": 0}, "above 0"),
    ):
        with pytest.raises(OptionError, match=said):
            session.set_params(**wrong)
    assert session.max_iter == 5


def test_names_choose_losses_rates_and_penalties() -> None:
    for name, expected in {
        "square": "SquareLearningLoss()", "square_error": "SquareLearningLoss()", "absolute": "AbsoluteLearningLoss()",
        "elastic": "ElasticLearningLoss(l1_weight=0.5, l2_weight=0.5)",
        "logloss": "NegLogLearningLoss(eps=1e-05, probability_function='sigmoid')",
        "NegLogLearningLoss": "NegLogLearningLoss(eps=1e-05, probability_function='sigmoid')",
    }.items():  # fmt: skip
        assert repr(BaseLearningLoss.select(name)) == expected
    assert BaseLearningLoss.select("elastic", l1_weight=0.1).settings == {"l1_weight": 0.1, "l2_weight": 0.5}
    for given in (ElasticLearningLoss(), NegLogLearningLoss()):
        assert BaseLearningLoss.select(given) is given
    assert repr(BaseLearningRate.select("Nesterov", eta0=0.5)) == repr(LearningRateSGDNesterov(0.5))
    assert repr(BaseLearningRate.select(0.5, power_t=0.1)) == repr(LearningRateSGD(0.5, power_t=0.1))
    assert isinstance(BaseLearningPenalty.select(None), NoLearningPenalty)
    assert BaseLearningPenalty.select("elastic", l1=0.1).amounts == (0.1, 0.5)
    penalty = ElasticLearningPenalty()
    assert BaseLearningPenalty.select(penalty) is penalty
    for select, wrong, arguments, said in (
        (BaseLearningLoss.select, "hinge", {}, "'square_error'"),
        (BaseLearningLoss.select, "square", {"l1": 1}, "does not take these arguments"),
        (BaseLearningRate.select, "fast", {}, "'SGD'"),
        (BaseLearningRate.select, "SGD", {"momentum": 1}, "does not take these arguments"),
        (BaseLearningPenalty.select, "large", {}, "ElasticLearningPenalty"),
        (BaseLearningPenalty.select, "elastic", {"l3": 1}, "does not take these arguments"),
    ):
        with pytest.raises(OptionError, match=said):
            select(wrong, **arguments)


@pytest.mark.parametrize("name", ["constant", "invscaling", "optimal"])
def test_a_loop_has_the_rates_of_the_epochs(name: str) -> None:
    rate = LearningRateSGD(0.1, learning_rate=name)
    expected = [LearningRateSGD(0.1, learning_rate=name).update_learning_rate(t).value for t in range(4)]
    assert list(rate.loop(4)) == expected
    assert rate.value == expected[-1]
    assert list(rate.loop(4)) == expected


@pytest.mark.parametrize("kind", BOTH)
def test_graphs_are_returned_as_bytes(kind: type, tmp_path: Any) -> None:
    session = optimizer(kind)
    graphs, files = session.save_onnx_graph(bytes), session.save_onnx_graph(tmp_path)
    assert graphs.keys() == files.keys() >= {"model_onnx", "learning_rate", "zero_onnx_"}
    assert graphs["learning_rate"].keys() == {"axpy_onnx_"}
    assert graphs["model_onnx"] == session.model_onnx.SerializeToString()
    zero = onnx.load_from_string(graphs["zero_onnx_"])
    onnx.checker.check_model(zero, full_check=True)
    assert onnx.load(files["zero_onnx_"]) == zero == session.zero_onnx_
    [value] = get_backend("numpy").prepare(zero).run({"X": np.float32([1, -2])}).values()
    assert value.tolist() == [0, 0]


def test_the_log_loss_is_a_mean_and_its_label_is_int64() -> None:
    made = add_loss_output(CHANCE, "log", reduction="sum")
    assert made.graph.input[1].type.tensor_type.elem_type == onnx.TensorProto.INT64
    assert add_loss_output(CHANCE) == refgrad.add_loss_output(CHANCE)
    mean = refgrad.add_loss_output(CHANCE, "log", reduction="mean")
    assert add_loss_output(CHANCE, "log", label_type="float32") == mean
    x, y = points()
    label = (y > 0).astype(np.int64)
    settings: dict[str, Any] = {"max_iter": 3, "learning_rate": 0.1, "start": "model", "random_state": 0}
    within = OrtGradientOptimizer(made, ["a"], **settings)
    chances = NegLogLearningLoss(probability_function=None)
    beside = OrtGradientForwardBackwardOptimizer(CHANCE, ["a"], learning_loss=chances, **settings)
    for given in (label, label.ravel()):
        np.testing.assert_allclose(within.fit(x, given).train_losses_, beside.fit(x, given).train_losses_, rtol=1e-4)


def test_an_output_without_a_shape_has_the_probabilities_of_two_classes() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 15]> same (double[] X) => (double[] y) { y = Identity(X) }'
    )
    made = get_backend("numpy").prepare(add_loss_output(model, "log", eps=1e-6))
    p, label = np.array([0, 0.2, 0.5, 1, 1]), np.array([[1], [0], [1], [1], [0]])
    loss = made.run({"X": np.stack([1 - p, p], 1), "label": label})["loss"]
    clipped = np.clip(np.where(label.ravel() == 1, p, 1 - p), 1e-6, 1 - 1e-6)
    np.testing.assert_allclose(loss, [[-np.log(clipped).mean()]], rtol=1e-9)


def test_the_label_may_be_the_output_that_is_compared(tmp_path: Any) -> None:
    made = onnx_derivative(
        add_loss_output(LINE), options=DerivativeOptions.Loss, label="y", loss="loss", path_name=tmp_path / "grad.onnx"
    )
    assert [value.name for value in made.graph.output] == ["X_grad", "label_grad", "a_grad", "b_grad", "loss"]
    x, y = points(3)
    feeds = {"X": x, "label": y, "a": np.float32([[1], [-2]]), "b": np.float32([0.5])}
    results = get_backend("numpy").prepare(refgrad.lower(made)).run(feeds)
    error = x @ feeds["a"] + feeds["b"] - y
    np.testing.assert_allclose(results["label_grad"], -2 * error, rtol=1e-5)
    np.testing.assert_allclose(results["a_grad"], 2 * x.T @ error, rtol=1e-5)
    with pytest.raises(UnknownNameError, match="'z' is not an input or an output"):
        onnx_derivative(
            add_loss_output(LINE), options=DerivativeOptions.Loss, label="z", loss="loss", path_name="g.onnx"
        )


def test_a_model_without_its_loss_takes_the_cotangent_of_the_label(tmp_path: Any) -> None:
    path = tmp_path / "grad.onnx"
    made = onnx_derivative(LINE, options=DerivativeOptions.Loss, label="y", loss="loss", path_name=path)
    assert [value.name for value in made.graph.input] == ["X", "a", "b", "y_grad"]
    assert [value.name for value in made.graph.output] == ["X_grad", "a_grad", "b_grad", "y"]
    assert onnx.load(path) == made
    x, _ = points(3)
    d_y = np.float32([[1], [-2], [3]])
    feeds = {"X": x, "a": np.float32([[1], [-2]]), "b": np.float32([0.5]), "y_grad": d_y}
    np.testing.assert_allclose(
        get_backend("numpy").prepare(refgrad.lower(made)).run(feeds)["a_grad"], x.T @ d_y, rtol=1e-5
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_backward(backend: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 15]> m (float[N, 2] X, int64[N] k) => (float[N, 3] y, float[N, 3] z) '
        "<float[2, 3] a = {1, 2, 3, 4, 5, 6}, float[4, 3] t = {1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2}> "
        "{ p = MatMul(X, a) s = Tanh(p) e = Gather(t, k) y = Mul(s, e) z = Add(p, e) }"
    )
    made = OrtGradientForwardBackward(model, backend=backend)
    names = made.cls_type_
    assert (names._input_names, names._weights_to_train) == (["X", "k"], ["a", "t"])
    assert (names._grad_input_names, names._output_names) == (["X", "k", "a", "t"], ["y", "z"])
    assert names._bw_fetches_names == ["X_grad", "a_grad", "t_grad"]
    rng = np.random.default_rng(0)
    x, k = rng.standard_normal((5, 2)).astype(np.float32), rng.integers(0, 4, 5)
    a, t = made.get_initializer("a"), made.get_initializer("t")
    function = made.new_instance()
    y, z = function.forward([x, k, a, t])
    expected = get_backend("numpy").prepare(model).run({"X": x, "k": k})
    np.testing.assert_allclose(y.numpy(), expected["y"], rtol=1e-5)
    np.testing.assert_allclose(z, expected["z"], rtol=1e-5)
    with pytest.raises(NotTrainedError, match="training=True"):
        function.backward([y, z])
    d_y, d_z = (rng.standard_normal((5, 3)).astype(np.float32) for _ in range(2))
    feeds = {"X": x, "k": k, "y_grad": d_y, "z_grad": d_z}
    gradient = refgrad.gradient(model, ["X", "a", "t"])
    slopes = get_backend("numpy").prepare(gradient).run(feeds)
    function.forward([x * 2, k, a, t], training=True)
    function.forward([x, k, a, t], training=True)  # the last one is the first to have its backward
    for name, value in zip(("X_grad", "a_grad", "t_grad"), function.backward([d_y, d_z]), strict=True):
        np.testing.assert_allclose(value, slopes[name], rtol=1e-4, atol=1e-5)
    slopes = get_backend("numpy").prepare(gradient).run(feeds | {"X": x * 2})
    np.testing.assert_allclose(function.backward([d_y, d_z])[1], slopes["a_grad"], rtol=1e-4, atol=1e-5)
    onnx.checker.check_model(names._optimized_pre_grad_model, full_check=True)
    [y_again, _] = get_backend(backend).prepare(names._optimized_pre_grad_model).run(
        {"X": x, "k": k, "a": 2 * a, "t": t}
    ).values()  # fmt: skip
    np.testing.assert_allclose(y_again, function.forward([x, k, 2 * a, t])[0], rtol=1e-6)


def test_a_step_by_hand() -> None:
    session = optimizer(OrtGradientForwardBackwardOptimizer).fit(*points())
    x, y = points(3)
    function = session.train_function_
    assert function is session.train_function_
    assert "train_function_" not in vars(pickle.loads(pickle.dumps(session)))
    [predicted] = function.forward([x, *session.get_state()], training=True)
    loss, slope = session.learning_loss.loss_gradient(session.device, y, predicted)
    np.testing.assert_allclose(loss.numpy(), [[0.5 * np.sum((predicted - y) ** 2)]], rtol=1e-6)
    np.testing.assert_allclose(slope, predicted - y, rtol=1e-6)
    _, d_a, d_b = function.backward([slope])
    np.testing.assert_allclose(d_a, x.T @ (predicted - y), rtol=1e-5)
    np.testing.assert_allclose(d_b, [np.sum(predicted - y)], rtol=1e-5)


@pytest.mark.skipif("ort-cpu" not in available(), reason="without ONNX Runtime")
@pytest.mark.parametrize("kind", BOTH)
def test_the_device_is_one_of_onnxruntime(kind: type) -> None:
    from onnxruntime.capi._pybind_state import OrtValue

    session = optimizer(kind)
    x, _ = points(3)
    np.testing.assert_array_equal(OrtValue.ortvalue_from_numpy(x, session.device).numpy(), x)
    assert session.get_params()["device"] == "cpu"
    assert "device='cpu'" in repr(session)


def test_what_a_function_does_not_take() -> None:
    made = pickle.loads(pickle.dumps(OrtGradientForwardBackward(LINE, ["a"], backend="numpy", class_name="Line")))
    assert repr(made) == "OrtGradientForwardBackward(...)"
    assert made.cls_type_.__name__ == "Line"
    assert made.get_initializer("c", exc=False) is None
    function = made.new_instance()
    x, a = np.float32([[3, 4]]), np.float32([[1], [2]])
    assert function.forward([x, a], training=True)[0].tolist() == [[11.5]]
    for call, said in (
        (lambda: function.forward([x]), "for 'X', 'a', got 1"),
        (lambda: function.backward([]), "got 0"),
    ):
        with pytest.raises(FeedError, match=said):
            call()
    for wrong, error, said in (
        ({"providers": ["NONE"]}, ValueError, "no provider 'NONE'"),
        ({"weights_to_train": ["c"]}, UnknownNameError, "'c' in weights_to_train"),
        ({"output_names": ["z"]}, UnknownNameError, "'z' in output_names"),
        ({"input_names": []}, OptionError, "input_names is empty"),
    ):
        with pytest.raises(error, match=said):
            OrtGradientForwardBackward(LINE, backend="numpy", **wrong)
    with pytest.raises(UnknownNameError, match="'c' is no float initializer"):
        made.get_initializer("c")


def test_batches_are_consecutive_samples() -> None:
    x, y, w = np.arange(22.0).reshape(11, 2), np.arange(11), np.linspace(1, 2, 11)[:, None]
    loader = OrtDataLoader(x, y, w, batch_size=4, random_iter=False)
    assert [batch[1].ravel().tolist() for batch in loader.iter_numpy()] == [[0, 1, 2, 3], [4, 5, 6, 7], [7, 8, 9, 10]]
    assert len(loader) == 11
    assert repr(loader) == "OrtDataLoader(..., ..., batch_size=4, device='cpu')"
    assert [array.shape for array in loader.data_np] == [(11, 2), (11, 1), (11,)]
    assert loader.desc == [((11, 2), np.float64), ((11, 1), np.int64), ((11,), np.float64)]
    for array, value in zip(loader.data_np, loader.data_ort, strict=True):
        np.testing.assert_array_equal(value.numpy(), array)
    np.random.seed(0)
    starts = set()
    for _ in range(50):
        for part, targets, weights in OrtDataLoader(x, y, w, batch_size=4).iter_ortvalue():
            first = int(targets.numpy()[0, 0])
            starts.add(first)
            np.testing.assert_array_equal(part.numpy(), x[first : first + 4])
            np.testing.assert_array_equal(targets.numpy(), y[first : first + 4, None])
            np.testing.assert_array_equal(weights.numpy(), w[first : first + 4, 0])
    assert starts == set(range(8))
    [batch] = OrtDataLoader(x, y, batch_size=100).iter_numpy()
    np.testing.assert_array_equal(batch[0], x)
    with pytest.raises(FeedError, match="X has 11 samples, and y has 10"):
        OrtDataLoader(x, y[1:])
    with pytest.raises(OptionError, match="batch_size"):
        OrtDataLoader(x, y, batch_size=0)
    for device in ("cpu", "cuda", "cuda:1"):
        assert OrtDataLoader(x, y, device=device).device == device
    with pytest.raises(OptionError, match="device='cpu2'; there are 'cpu' and 'cuda'"):
        OrtDataLoader(x, y, device="cpu2")
