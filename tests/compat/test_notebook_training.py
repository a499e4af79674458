"""The trainings of the onnxcustom notebooks, under their names, on stock ONNX Runtime and the interpreter."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import refgrad
from refgrad.backends import available, get_backend
from refgrad.compat.plotting.plotting_onnx import plot_onnxs
from refgrad.compat.training.excs import ConvergenceWarning
from refgrad.compat.training.grad_helper import DerivativeOptions, onnx_derivative
from refgrad.compat.training.optimizers import OrtGradientOptimizer
from refgrad.compat.training.optimizers_partial import OrtGradientForwardBackwardOptimizer
from refgrad.compat.training.sgd_learning_loss import (
    AbsoluteLearningLoss,
    BaseLearningLoss,
    ElasticLearningLoss,
    NegLogLearningLoss,
    SquareLearningLoss,
)
from refgrad.compat.training.sgd_learning_penalty import ElasticLearningPenalty
from refgrad.compat.training.sgd_learning_rate import LearningRateSGD, LearningRateSGDNesterov
from refgrad.compat.utils.onnx_helper import onnx_rename_weights
from refgrad.compat.utils.orttraining_helper import add_loss_output, get_train_initializer
from refgrad.errors import (
    BackendError,
    ConvergenceError,
    FeedError,
    ModelWarning,
    OptionError,
    TrainingError,
    UnknownNameError,
)
from refgrad.show.demo import regression

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
WEIGHTS = ["init", "init_1", "init_b10"]
ARGUMENTS = (
    "model_onnx='ir_version...', weights_to_train=['init', 'init_1', 'init_b10'], loss_output_name='loss', max_iter=100, "
    "training_optimizer_name='SGDOptimizer', batch_size={}, learning_rate=LearningRateSGD(eta0=0.1, alpha=0.0001, "
    "power_t=0.25, learning_rate='invscaling'), value=0.03162277660168379, device='cpu', warm_start=False, verbose=0, "
    "validation_every=10, "
)


def line(a: str = "{0, 0}") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 15]> line (float[N, 2] X) => (float[N, 1] variable) '
        f"<float[2, 1] coefficient = {a}, "
        "float[1, 1] intercepts = {0}, int64[2] shape_tensor = {-1, 1}> "
        "{ p = MatMul(X, coefficient) s = Add(p, intercepts) variable = Reshape(s, shape_tensor) }"
    )


def points() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((100, 2)) / 10).astype(np.float32)
    noise = (rng.standard_normal((100, 1)) / 1000).astype(np.float32)
    return x, x @ [[-2], [3]] + x**2 @ [[0.5], [-0.33333]] - 1 + noise


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_is_in_the_graph(backend: str) -> None:
    x, y = points()
    session = OrtGradientOptimizer(
        regression(), WEIGHTS, learning_rate=1e-1, batch_size=5, max_iter=100, backend=backend, random_state=0
    )
    assert session.fit(x, y) is session
    assert repr(session) == (
        f"OrtGradientOptimizer({ARGUMENTS.format(5)}saved_gradient=None, sample_weight_name='weight')"
    )
    assert len(session.train_losses_) == 100
    assert session.train_losses_[-1] < session.train_losses_[0] / 5
    np.testing.assert_allclose(session.trained_coef_["init_b10"], [-1], atol=0.05)
    np.testing.assert_allclose(session.losses(x, y).mean(), -session.score(x, y), rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_is_given(backend: str) -> None:
    x, y = points()
    session = OrtGradientForwardBackwardOptimizer(
        regression(loss=False), WEIGHTS, learning_rate=1e-1, batch_size=2, max_iter=100, backend=backend, random_state=1
    )
    session.fit(x, y, X_val=x[:20], y_val=y[:20])
    assert repr(session) == (
        f"OrtGradientForwardBackwardOptimizer({ARGUMENTS.format(2)}learning_loss=SquareLearningLoss(), enable_logging=False, "
        "weight_name=None, learning_penalty=NoLearningPenalty(), exc=True)"
    )
    assert len(session.validation_losses_) == 10
    weights = {name: value.numpy() for name, value in session.trained_coef_.items()}
    np.testing.assert_allclose(weights["init_b10"], [-1], atol=0.02)
    [predicted] = get_backend("numpy").prepare(session.get_trained_onnx()).run({"x": x}).values()
    np.testing.assert_allclose(session.score(x, y), -np.mean((predicted - y) ** 2) / 2, rtol=1e-4)
    np.testing.assert_allclose(session.losses(x, y), np.ravel((predicted - y) ** 2) / 2, rtol=1e-4, atol=1e-9)


def test_the_rates_that_the_notebooks_print() -> None:
    for eta0, epochs, printed in ((0.1, 100, 0.03162277660168379), (0.01, 200, 0.0026591479484724943)):
        assert LearningRateSGD(eta0).update_learning_rate(epochs - 1).value == printed
    assert LearningRateSGD(5e-5).update_learning_rate(99).value == 1.5811388300841898e-05
    assert LearningRateSGDNesterov(1e-5).update_learning_rate(99).value == 3.162277660168379e-06
    assert LearningRateSGD(0.5, learning_rate="constant").update_learning_rate(9).value == 0.5
    assert LearningRateSGD(0.1, alpha=0.01, learning_rate="optimal").update_learning_rate(9).value == 1 / (0.01 * 1009)


def test_a_step_is_what_the_graphs_say() -> None:
    """Forward, the derivative of the loss, the backward model and the update, one by one, make the step that is one graph."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((7, 2)).astype(np.float32), rng.standard_normal((7, 1)).astype(np.float32)
    run = get_backend("numpy").prepare
    for loss in (SquareLearningLoss(), AbsoluteLearningLoss(), ElasticLearningLoss(0.3, 0.8)):
        for rate in (LearningRateSGD(0.1), LearningRateSGDNesterov(0.1), LearningRateSGDNesterov(0.1, nesterov=False)):
            session = OrtGradientForwardBackwardOptimizer(
                line("{1, -2}"), max_iter=2, batch_size=7, learning_rate=rate, learning_loss=loss, start="model"
            ).fit(x, y)
            weights = {name: value for name, (value, _) in get_train_initializer(line("{1, -2}")).items()}
            graphs = session.train_session_.cls_type_
            velocity = {name: np.zeros_like(value) for name, value in weights.items()}
            for epoch in range(2):
                eta = -rate.update_learning_rate(epoch).value / 7
                [predicted] = run(graphs._optimized_pre_grad_model).run({"X": x, **weights}).values()
                slope = run(loss.loss_grad_onnx_).run({"X1": y, "X2": predicted})
                if epoch == 1:
                    np.testing.assert_allclose(slope["loss"] / 7, session.train_losses_[1], rtol=1e-5)
                slopes = run(graphs._trained_onnx).run({"X": x, **weights, "variable_grad": slope["X2_grad"]})
                for name, value in weights.items():
                    flat = {"X1": slopes[f"{name}_grad"].ravel(), "X2": value.ravel(), "alpha": np.float32([eta])}
                    if isinstance(rate, LearningRateSGD):
                        moved = run(rate.axpy_onnx_).run(flat)
                    else:
                        kept = {"G": velocity[name].ravel(), "beta": np.float32([rate.momentum])}
                        moved = run(rate.axpyw_onnx_).run(flat | kept)
                        velocity[name] = moved["Z"].reshape(value.shape)
                    weights[name] = moved["Y"].reshape(value.shape)
            for name, value in weights.items():
                np.testing.assert_allclose(session.trained_coef_[name], value, rtol=1e-5, atol=1e-6)


LEARNING_LOSSES = [
    SquareLearningLoss(),
    AbsoluteLearningLoss(),
    ElasticLearningLoss(0.3, 0.8),
    NegLogLearningLoss(),
    NegLogLearningLoss(probability_function=None),
]


@pytest.mark.parametrize("loss", LEARNING_LOSSES, ids=repr)
def test_a_step_descends_the_loss_that_is_reported(loss: BaseLearningLoss) -> None:
    """The step is the rate times the slope of `train_losses_`, `losses` and `score`, by differences in double precision."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((7, 2)), rng.integers(0, 2, (7, 1))
    last = "Sigmoid" if loss.score == "log" else "Identity"

    def session(shift: np.ndarray) -> OrtGradientForwardBackwardOptimizer:
        w = np.array([1.0, -2.0]) + shift
        model = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 15]> m (double[N, 2] X) => (double[N, 1] y) '
            f"<double[2, 1] w = {{{w[0]}, {w[1]}}}> {{ s = MatMul(X, w) y = {last}(s) }}"
        )
        rate = LearningRateSGD(1.0, learning_rate="constant")
        return OrtGradientForwardBackwardOptimizer(
            model, max_iter=1, batch_size=7, learning_rate=rate, learning_loss=loss, start="model", backend="numpy"
        )

    def losses_at(shift: np.ndarray) -> list[float]:
        made = session(shift)
        return [-made.score(x, y), made.losses(x, y).mean(), made.fit(x, y).train_losses_[0]]

    step = np.array([1.0, -2.0]) - session(np.zeros(2)).fit(x, y).trained_coef_["w"].ravel()
    for k in range(2):
        shift = 1e-5 * np.eye(2)[k]
        slopes = (np.array(losses_at(shift)) - losses_at(-shift)) / 2e-5
        np.testing.assert_allclose(slopes, np.full(3, step[k]), rtol=1e-7, atol=1e-9)


def test_half_of_the_square_is_the_loss_and_the_step() -> None:
    session = OrtGradientForwardBackwardOptimizer(
        line(), ["intercepts"], max_iter=1, batch_size=1, start="model",
        learning_rate=LearningRateSGD(1.0, learning_rate="constant"),
    )  # fmt: skip
    session.fit(np.zeros((1, 2)), [10.0])
    assert session.train_losses_ == [50]
    assert session.trained_coef_["intercepts"].item() == 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_negative_log_loss_takes_a_raw_score_or_probabilities(backend: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 2)).astype(np.float32)
    y = (x @ [2, -1] > 0).astype(np.int64)
    score, probability, both = (
        onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["": 15]> m (float[N, 2] X) => (float[N, {columns}] y) '
            f"<float[2, 1] w = {{0, 0}}, float one = {{1}}> {{ s = MatMul(X, w) {nodes} }}"
        )
        for columns, nodes in (
            (1, "y = Identity(s)"),
            (1, "y = Sigmoid(s)"),
            (2, "p = Sigmoid(s) q = Sub(one, p) y = Concat <axis = 1> (q, p)"),
        )
    )
    settings: dict[str, Any] = {"learning_rate": 0.5, "max_iter": 5, "start": "model", "random_state": 0}
    settings |= {"weights_to_train": ["w"], "backend": backend}
    chances = NegLogLearningLoss(probability_function=None)
    reached = []
    for model, loss in ((score, NegLogLearningLoss()), (score, "log"), (probability, chances), (both, chances)):
        session = OrtGradientForwardBackwardOptimizer(model, learning_loss=loss, **settings).fit(x, y)
        reached.append([*session.train_losses_, *session.trained_coef_["w"].ravel(), session.score(x, y)])
    assert reached[0][4] < reached[0][0] * 0.6
    for other in reached[1:]:
        np.testing.assert_allclose(other, reached[0], rtol=1e-3)
    for model, origin, expected in ((probability, "Sigmoid", reached[2]), (both, "1 - p beside p", reached[3])):
        session = OrtGradientForwardBackwardOptimizer(model, learning_loss="log", **settings)
        with pytest.warns(ModelWarning, match=f"'y' is a probability, made by {origin}.*probability_function=None"):
            session.fit(x, y)
        assert [*session.train_losses_, *session.trained_coef_["w"].ravel(), session.score(x, y)] == expected
        assert repr(session.learning_loss) == repr(NegLogLearningLoss())
        graphs = session.save_onnx_graph(bytes)["learning_loss"]
        assert graphs["loss_score_onnx_"] == chances.loss_score_onnx_.SerializeToString()
    wide = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 15]> m (float[N, 2] X) => (float[N, 2] Y) <float[2] w = {1, 2}> '
        "{ Y = Mul(X, w) }"
    )
    with pytest.raises(OptionError, match="'Y' has 2 columns"):
        OrtGradientForwardBackwardOptimizer(wide, learning_loss="log").fit(x, y)
    with pytest.raises(FeedError, match="takes labels from 0 to 1"):
        OrtGradientForwardBackwardOptimizer(score, learning_loss="log", **settings).fit(x, y + 1)
    with pytest.raises(OptionError, match="probability_function is 'sigmoid'"):
        NegLogLearningLoss(probability_function="softmax")


def test_losses_are_those_of_their_formulas() -> None:
    y, p = np.float32([[1.0], [-2.0]]), np.float32([[0.5], [1.0]])
    run = get_backend("numpy").prepare
    d = np.abs(y - p)
    for loss, expected in (
        (SquareLearningLoss(), (d**2).sum() / 2),
        (AbsoluteLearningLoss(), d.sum()),
        (ElasticLearningLoss(0.3, 0.7), (0.3 * d + 0.7 * d**2).sum()),
    ):
        [value] = run(loss.loss_score_onnx_).run({"X1": y, "X2": p}).values()
        np.testing.assert_allclose(value, [[expected]], rtol=1e-6)
    both = np.float32([[0.2, 0.8], [0.9, 0.1]])
    scores = np.log(both[:, 1:] / both[:, :1])
    for loss, given in ((NegLogLearningLoss(probability_function=None), both), (NegLogLearningLoss(), scores)):
        [value] = run(loss.loss_score_onnx_).run({"X1": np.float32([[1], [0]]), "X2": given}).values()
        np.testing.assert_allclose(value, [[-np.log(0.8) - np.log(0.9)]], rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_linear_regression_of_scikit_learn(backend: str) -> None:
    """The code of the example "Train a linear regression with forward backward", with another package name."""
    from skl2onnx import to_onnx
    from sklearn.datasets import make_regression
    from sklearn.neural_network import MLPRegressor

    X, y, coef = make_regression(n_features=2, bias=2, coef=True, random_state=0)
    X, y = X.astype(np.float32), y.astype(np.float32)
    lr = MLPRegressor(
        hidden_layer_sizes=(), activation="identity", max_iter=50, batch_size=10, solver="sgd", alpha=0,
        learning_rate_init=1e-2, n_iter_no_change=200, momentum=0, nesterovs_momentum=False, random_state=0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lr.fit(X, y)
    onx = to_onnx(lr, X[:1], target_opset=15, black_op={"LinearRegressor"})
    weights = {k: v for k, v in get_train_initializer(onx).items() if k != "shape_tensor"}
    assert sorted((k, v[0].shape) for k, v in weights.items()) == [("coefficient", (2, 1)), ("intercepts", (1, 1))]
    session = OrtGradientForwardBackwardOptimizer(
        onx, list(weights), device="cpu", learning_rate=1e-2, warm_start=False, max_iter=200, batch_size=10,
        backend=backend, random_state=0,
    ).fit(X, y)  # fmt: skip
    [coefficient, intercepts] = session.get_state()
    np.testing.assert_allclose(coefficient.ravel(), coef, atol=0.5)
    np.testing.assert_allclose(intercepts.ravel(), [2], atol=0.5)
    assert session.value == 0.0026591479484724943
    assert session.train_losses_[-1] < 0.1


def test_the_network_of_scikit_learn() -> None:
    from skl2onnx import to_onnx
    from sklearn.datasets import make_regression
    from sklearn.neural_network import MLPRegressor

    X, y = make_regression(200, n_features=10, bias=2, random_state=0)
    X, y = X.astype(np.float32), y.astype(np.float32)
    nn = MLPRegressor(hidden_layer_sizes=(8, 4), max_iter=2, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.fit(X, y)
    onx = onnx_rename_weights(to_onnx(nn, X[:1], target_opset=15))
    session = OrtGradientForwardBackwardOptimizer(
        onx, learning_rate=LearningRateSGDNesterov(1e-4, nesterov=True, momentum=0.9), max_iter=30, batch_size=15,
        start="model", random_state=0,
    )  # fmt: skip
    session.fit(X, y)
    assert session.weights_to_train is not None
    assert all(name.startswith("I") and not name.endswith("shape_tensor") for name in session.weights_to_train)
    assert len(session.weights_to_train) == 6
    assert session.train_losses_[-1] < session.train_losses_[0] / 5


def test_state_and_pickles() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 2)), rng.standard_normal(30)
    session = OrtGradientForwardBackwardOptimizer(line(), learning_rate=LearningRateSGDNesterov(0.01), random_state=0)
    with pytest.raises(TrainingError, match="Call fit first"):
        session.get_state()
    session.max_iter = 3
    session.fit(x, y)
    for again in (pickle.loads(pickle.dumps(session)), copy.deepcopy(session)):
        assert again.score(x, y) == session.score(x, y)
        for one, other in zip(again.get_state(), session.get_state(), strict=True):
            np.testing.assert_array_equal(one, other)
    given = [np.full_like(value, 2) for value in session.get_state()]
    session.set_state(given)
    assert session.trained_coef_["coefficient"].numpy().tolist() == [[2], [2]]
    with pytest.raises(FeedError, match=r"'coefficient' has the shape \(2, 1\)"):
        session.set_state([np.zeros(2), np.zeros((1, 1))])
    with pytest.raises(FeedError, match="'coefficient', 'intercepts'"):
        session.set_state(given[:1])


def test_states_are_in_the_order_of_the_initializers() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 2)), rng.standard_normal(30)
    order = ["coefficient", "intercepts"]
    with pytest.raises(OptionError, match=r"another order.*: 'coefficient', 'intercepts'"):
        OrtGradientForwardBackwardOptimizer(line(), order[::-1]).fit(x, y)
    session = OrtGradientForwardBackwardOptimizer(line(), order, max_iter=1).fit(x, y)
    assert list(session.trained_coef_) == session.weights_to_train == order
    assert [value.shape for value in session.get_state()] == [(2, 1), (1, 1)]
    session.set_state([np.full((2, 1), 3), np.full((1, 1), 4)])
    assert session.trained_coef_["coefficient"].numpy().tolist() == [[3], [3]]
    assert session.trained_coef_["intercepts"].numpy().tolist() == [[4]]
    named = OrtGradientOptimizer(add_loss_output(line()), order[::-1], max_iter=1).fit(x, y)
    state = named.get_state()
    assert list(state) == order
    named.set_state({name: state[name] for name in order[::-1]})
    for name in order:
        np.testing.assert_array_equal(named.trained_coef_[name], state[name])


def test_warm_start_goes_on() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 2))
    y = x @ [1, -1]
    settings: dict[str, Any] = {"learning_rate": 0.1, "max_iter": 5, "warm_start": True}
    session = OrtGradientForwardBackwardOptimizer(line(), **settings).fit(x, y)
    first = session.train_losses_[-1]
    assert session.fit(x, y).train_losses_[0] < first * 1.5
    cold = OrtGradientForwardBackwardOptimizer(line(), learning_rate=0.1, max_iter=1, random_state=3)
    assert cold.fit(x, y).train_losses_ == cold.fit(x, y).train_losses_


def test_samples_have_weights() -> None:
    x, y = np.ones((2, 2)), np.array([1.0, 3.0])
    settings: dict[str, Any] = {"max_iter": 1, "batch_size": 2, "start": "model", "learning_rate": 0.1}
    session = OrtGradientForwardBackwardOptimizer(line(), weight_name="weight", **settings)
    assert session.fit(x, y, sample_weight=[1, 0.5]).train_losses_ == [pytest.approx((1 + 4.5) / 2 / 2)]
    graph = add_loss_output(line(), weight_name="weight")
    within = OrtGradientOptimizer(graph, ["coefficient"], **settings)
    assert within.fit(x, y, sample_weight=[1, 0.5]).train_losses_ == [pytest.approx((1 + 4.5) / 2)]
    with pytest.raises(OptionError, match="weight_name='weight'"):
        OrtGradientForwardBackwardOptimizer(line(), **settings).fit(x, y, sample_weight=[1, 1])


def test_a_penalty_keeps_weights_small() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 2))
    sizes = []
    for penalty in (None, ElasticLearningPenalty(0.1, 1.0)):
        session = OrtGradientForwardBackwardOptimizer(
            line(), learning_rate=0.1, learning_penalty=penalty, random_state=0
        )
        sizes.append(np.abs(session.fit(x, x @ [2, -2]).trained_coef_["coefficient"]).sum())
    assert sizes[1] < sizes[0] - 0.2


def test_a_loss_that_is_not_finite() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((50, 2)), rng.standard_normal(50)
    settings: dict[str, Any] = {"learning_rate": 1e30, "random_state": 0}
    with pytest.raises(ConvergenceError, match="of epoch 0"):
        OrtGradientForwardBackwardOptimizer(line(), **settings).fit(x, y)
    with pytest.warns(ConvergenceWarning, match="The loss is"):
        OrtGradientForwardBackwardOptimizer(line(), exc=False, **settings).fit(x, y)


def test_what_does_not_fit_is_refused() -> None:
    x, y = points()
    for session, message in (
        (OrtGradientOptimizer(line()), "no output 'loss'"),
        (OrtGradientForwardBackwardOptimizer(line(), ["coeff"]), "'coeff' in trainable"),
    ):
        for error in (UnknownNameError, ValueError):
            with pytest.raises(error, match=message):
                session.fit(x, y)
    for wrong, message in (
        ({"device": "tpu"}, "'cpu', 'cuda'"),
        ({"learning_rate": "fast"}, "'SGD', 'Nesterov'"),
        ({"learning_loss": "hinge"}, "'square_error'"),
        ({"training_optimizer_name": "Adam"}, "'SGDOptimizer'"),
        ({"batch_size": 0}, "batch_size is an integer above 0"),
        ({"start": "zero"}, "'normal', 'model'"),
        ({"learning_penalty": 0.1}, "ElasticLearningPenalty"),
    ):
        with pytest.raises(OptionError, match=message):
            OrtGradientForwardBackwardOptimizer(line(), **wrong)
    given = OrtGradientForwardBackwardOptimizer(line())
    with pytest.raises(FeedError, match="'X' 3, 'expected' 2"):
        given.fit(np.zeros((3, 2)), np.zeros(2))
    with pytest.raises(FeedError, match="Expected float32, got"):
        given.fit(np.zeros((3, 2)), np.array(["a", "b", "c"]))
    if "ort-cuda" not in available():
        with pytest.raises(BackendError):
            OrtGradientForwardBackwardOptimizer(line(), device="cuda")


def test_the_graphs_of_a_penalty_are_in_a_step() -> None:
    x, y = points()
    penalty = ElasticLearningPenalty(0.3, 0.2)
    settings: dict[str, Any] = {"max_iter": 1, "batch_size": 100, "start": "model"}
    settings["learning_rate"] = LearningRateSGD(1.0, learning_rate="constant")
    free, held = (
        OrtGradientForwardBackwardOptimizer(line("{1, -2}"), learning_penalty=one, **settings).fit(x, y)
        for one in (None, penalty)
    )
    run = get_backend("numpy").prepare
    total = 0.0
    for name, (value, _) in get_train_initializer(line("{1, -2}")).items():
        [amount] = run(penalty.penalty_onnx_).run({"X": value.ravel()}).values()
        again, slope = run(penalty.penalty_grad_onnx_).run({"X": value.ravel()}).values()
        np.testing.assert_allclose(amount, [0.3 * np.abs(value).sum() + 0.2 * (value**2).sum()], rtol=1e-6)
        np.testing.assert_array_equal(again, amount)
        moved = free.trained_coef_[name].ravel() - held.trained_coef_[name].ravel()
        np.testing.assert_allclose(moved, slope / 100, rtol=1e-4, atol=1e-6)
        total += amount.item() / 100
    np.testing.assert_allclose(held.train_losses_[0] - free.train_losses_[0], total, rtol=1e-4)
    assert free.save_onnx_graph(bytes)["learning_penalty"] == {}
    assert {name: onnx.load_from_string(made) for name, made in held.save_onnx_graph(bytes)["learning_penalty"].items()} == {
        "penalty_onnx_": penalty.penalty_onnx_, "penalty_grad_onnx_": penalty.penalty_grad_onnx_
    }  # fmt: skip


def test_epochs_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    x, y = points()
    for enabled in (False, True):
        caplog.clear()
        session = OrtGradientForwardBackwardOptimizer(line(), max_iter=2, enable_logging=enabled, random_state=0)
        with caplog.at_level("DEBUG", logger="onnxcustom"):
            session.fit(x, y)
        expected = [
            f"[OrtGradientForwardBackwardOptimizer._iteration] epoch {t}, rate {0.01 / (t + 1) ** 0.25:g}: "
            f"loss {session.train_losses_[t]:g}"
            for t in range(2)
        ]
        assert [record.getMessage() for record in caplog.records if record.name == "onnxcustom"] == expected * enabled


def test_a_search_goes_on_after_arguments_that_do_not_fit() -> None:
    selection = pytest.importorskip("sklearn.model_selection")
    session = OrtGradientForwardBackwardOptimizer(line(), max_iter=1, random_state=0)
    search = selection.GridSearchCV(session, {"weights_to_train": [["coeff"], ["coefficient"]]}, cv=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns of the fits that fail
        search.fit(*points())
    assert search.best_params_ == {"weights_to_train": ["coefficient"]}


def test_graphs_are_written_and_drawn(tmp_path) -> None:  # type: ignore[no-untyped-def]
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    session = OrtGradientForwardBackwardOptimizer(line(), learning_rate=LearningRateSGDNesterov(0.1))
    names = session.save_onnx_graph(tmp_path)
    assert {"model_onnx", "learning_rate", "learning_loss", "learning_penalty", "train_function_"} <= names.keys()
    for name in (names["model_onnx"], *names["train_function_"].values(), *names["learning_loss"].values()):
        onnx.checker.check_model(onnx.load(name), full_check=True)
    with pytest.raises(OptionError, match="Make it first"):
        session.save_onnx_graph(tmp_path / "absent")
    axes = plot_onnxs(line(), session.learning_loss.loss_grad_onnx_, title=["regression", "loss"])
    assert [one.get_title() for one in axes] == ["regression", "loss"]
    assert {text.get_text() for text in axes[0].texts} >= {"X", "MatMul", "Add", "Reshape", "coefficient", "variable"}
    assert plot_onnxs(line()).get_title() == ""
    with pytest.raises(OptionError, match="Expected 1 titles"):
        plot_onnxs(line(), title=["a", "b"])
    session = OrtGradientOptimizer(add_loss_output(line()), ["coefficient"], saved_gradient=tmp_path / "step.onnx")
    assert onnx.load(tmp_path / "step.onnx") == session._step.model


def test_the_helpers_have_their_names() -> None:
    assert onnx_derivative is refgrad.onnx_derivative
    assert DerivativeOptions is refgrad.DerivativeOptions
    assert onnx_rename_weights is refgrad.onnx_rename_weights
    body = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[2] x, bool c) => (float[2] y) <float[2] w = {1, 2}> '
        "{ y = If(c) <then_branch = t () => (float[2] a) { a = Mul(x, w) }, "
        "else_branch = e () => (float[2] b) { b = Add(x, w) }> }"
    )
    renamed = onnx_rename_weights(body)
    assert renamed.graph.initializer[0].name == "I0_w"
    for c in (True, False):
        feeds = {"x": np.float32([3, 4]), "c": np.array(c)}
        np.testing.assert_array_equal(*(get_backend("numpy").prepare(m).run(feeds)["y"] for m in (body, renamed)))
