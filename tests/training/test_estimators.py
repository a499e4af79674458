"""Estimators: scikit-learn's own trainings, its tools around an estimator, labels, conventions, and what is refused."""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from refgrad.backends import available, get_backend
from refgrad.errors import FeedError, OptionError
from refgrad.training import SGD, Constant, InverseScaling, Training, batches, convention, step_model

pytestmark = pytest.mark.slow

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((120, 4)).astype(np.float32)
NUMBERS = X @ np.float32([1, 2, 3, 4]) + RNG.standard_normal(120).astype(np.float32)
TWO = (NUMBERS > 0).astype(int)
THREE = np.array(list("abc"))[np.digitize(NUMBERS, [-2, 2])]
SETTINGS: dict[str, Any] = {
    "max_iter": 20,
    "learning_rate_init": 1e-2,
    "random_state": 0,
    "alpha": 0,
    "batch_size": 30,
}

ESTIMATORS: dict[
    str, tuple[Callable[[Any], Any], np.ndarray]
] = {  # made of scikit-learn, which is imported by the test
    "LinearRegression": (lambda of: of.linear_model.LinearRegression(), NUMBERS),
    "Ridge": (lambda of: of.linear_model.Ridge(), NUMBERS),
    "SGDRegressor": (lambda of: of.linear_model.SGDRegressor(random_state=0), NUMBERS),
    "LogisticRegression": (lambda of: of.linear_model.LogisticRegression(), TWO),
    "LogisticRegression, 3 classes": (lambda of: of.linear_model.LogisticRegression(), THREE),
    "SGDClassifier": (lambda of: of.linear_model.SGDClassifier(loss="log_loss", random_state=0), TWO),
    "SGDClassifier, 3 classes": (lambda of: of.linear_model.SGDClassifier(loss="log_loss", random_state=0), THREE),
    "MLPRegressor": (
        lambda of: of.neural_network.MLPRegressor(hidden_layer_sizes=(5,), max_iter=5, random_state=0),
        NUMBERS,
    ),
    "MLPClassifier": (lambda of: of.neural_network.MLPClassifier((5,), max_iter=5, random_state=0), TWO),
    "MLPClassifier, 3 classes": (lambda of: of.neural_network.MLPClassifier((5,), max_iter=5, random_state=0), THREE),
    "Pipeline": (lambda of: scaled(of, of.linear_model.Ridge()), NUMBERS),
    "Pipeline, 3 classes": (lambda of: scaled(of, of.linear_model.LogisticRegression()), THREE),
}


def scaled(of: Any, estimator: Any) -> Any:
    return of.pipeline.make_pipeline(of.preprocessing.StandardScaler(), estimator)


@pytest.mark.filterwarnings("ignore:The y_prob values do not sum to one")  # to rounding in float32
@pytest.mark.parametrize("opset", [12, 15, 18, 21])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_skl2onnx_writes_is_trained_as_it_is(name: str, opset: int) -> None:
    """The loss ends no higher than where scikit-learn left it, but for what the steps of Adam leave (1e-3)."""
    import sklearn.linear_model
    import sklearn.neural_network
    import sklearn.pipeline
    import sklearn.preprocessing
    from skl2onnx import to_onnx
    from sklearn.metrics import log_loss, mean_squared_error

    from refgrad.training.estimators import OnnxClassifier, OnnxRegressor

    make, y = ESTIMATORS[name]
    estimator = make(sklearn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimator.fit(X, y)
        model = to_onnx(estimator, X, target_opset=opset)
    backend = BACKENDS[opset % len(BACKENDS)]
    trained: Any
    if hasattr(estimator, "predict_proba"):
        trained = OnnxClassifier(model, backend=backend, **SETTINGS).fit(X, y)
        before, after = (log_loss(y, one.predict_proba(X).astype(float)) for one in (estimator, trained))
        assert set(trained.predict(X)) <= set(y)
    else:
        trained = OnnxRegressor(model, backend=backend, **SETTINGS).fit(X, y)
        before, after = mean_squared_error(y, estimator.predict(X)), mean_squared_error(y, trained.predict(X))
    assert after <= before * 1.001
    written = get_backend("numpy").prepare(trained.onnx_model_).run({"X": X})
    assert list(written) == [value.name for value in model.graph.output]
    first = next(iter(written.values()))
    if first.dtype.kind == "f":
        np.testing.assert_allclose(first.ravel(), trained.predict(X), rtol=1e-4, atol=1e-4)
    else:
        assert first.ravel().tolist() == trained.predict(X).tolist()


def test_the_coefficients_of_a_regression_are_found() -> None:
    from skl2onnx import to_onnx
    from sklearn.datasets import make_regression
    from sklearn.linear_model import LinearRegression

    from refgrad.training.estimators import OnnxRegressor

    x, y, coefficients = make_regression(200, 5, noise=0, bias=3, coef=True, random_state=0)
    start = LinearRegression().fit(x, np.zeros(200))
    settings = {"optimizer": "sgd", "learning_rate_init": 0.05, "alpha": 0, "max_iter": 100, "batch_size": 20, "tol": 0}
    model = to_onnx(start, x.astype(np.float32))
    trained = OnnxRegressor(model, random_state=0, **settings).fit(x, y)
    weights = trained.coefs_
    np.testing.assert_allclose(weights["LinearRegressor.coefficients"].ravel(), coefficients, rtol=1e-4)
    np.testing.assert_allclose(weights["LinearRegressor.intercepts"], [3], rtol=1e-3)
    assert trained.score(x, y) > 1 - 1e-6


# The networks of scikit-learn, to the last digits

SOLVERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SGD": ({"solver": "sgd", "momentum": 0.0}, {"optimizer": "sgd"}),
    "momentum": (
        {"solver": "sgd", "nesterovs_momentum": False},
        {"optimizer": convention("sklearn").optimizer("sgd", momentum=0.9)},
    ),
    "Nesterov, invscaling": (
        {"solver": "sgd", "learning_rate": "invscaling"},
        {
            "optimizer": convention("sklearn").optimizer("sgd", momentum=0.9, nesterov=True),
            "schedule": convention("sklearn").schedule("invscaling", 1e-3, power=0.5),
        },
    ),
    "Adam": ({"solver": "adam"}, {"optimizer": "adam"}),
}


@pytest.mark.parametrize("classes", [0, 2, 3])
@pytest.mark.parametrize("solver", SOLVERS)
def test_networks_are_trained_as_scikit_learn_trains_them(solver: str, classes: int) -> None:
    """30 epochs, shuffled, short last batches, a penalty: the weights and the curve of the loss to 1e-12."""
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    from refgrad.training.estimators import OnnxClassifier, OnnxRegressor

    theirs, ours = SOLVERS[solver]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((100, 5))
    y: Any = np.tanh(x[:, 0]) + x[:, 1] * x[:, 2]
    if classes:
        y = np.digitize(y, np.quantile(y, np.arange(1, classes) / classes))
    settings = {"hidden_layer_sizes": (7, 3), "alpha": 1e-2, "batch_size": 16, "n_iter_no_change": 99}
    network = (MLPClassifier if classes else MLPRegressor)(random_state=1, max_iter=30, **settings, **theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network.fit(x, y)
    random = np.random.RandomState(1)
    coefs, intercepts = [], []
    layers = [5, 7, 3, classes if classes > 2 else 1]
    for n, m in itertools.pairwise(layers):
        bound = np.sqrt(6 / (n + m))
        coefs.append(random.uniform(-bound, bound, (n, m)))
        intercepts.append(random.uniform(-bound, bound, m))
    trained = (OnnxClassifier if classes else OnnxRegressor)(
        _network(coefs, intercepts, classes),
        random_state=random,
        max_iter=30,
        tol=-1e9,
        alpha=1e-2,
        batch_size=16,
        **ours,
    ).fit(x, y)
    np.testing.assert_allclose(trained.loss_curve_, network.loss_curve_, rtol=0, atol=1e-12)
    for k, (w, b) in enumerate(zip(network.coefs_, network.intercepts_, strict=True)):
        np.testing.assert_allclose(trained.coefs_[f"w{k}"], w, rtol=0, atol=1e-12)
        np.testing.assert_allclose(trained.coefs_[f"b{k}"], b, rtol=0, atol=1e-12)


def _network(coefs: list[np.ndarray], intercepts: list[np.ndarray], classes: int) -> onnx.ModelProto:
    """A network in double: skl2onnx writes float32."""
    value, text = "x", ""
    for k in range(len(coefs)):
        text += f"m{k} = MatMul({value}, w{k}) s{k} = Add(m{k}, b{k}) "
        last = {0: "Identity", 2: "Sigmoid", 3: "Softmax"}[classes]
        text += f"h{k} = Relu(s{k}) " if k < len(coefs) - 1 else f"y = {last}(s{k}) "
        value = f"h{k}"
    columns = classes if classes > 2 else 1
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> mlp (double[N, 5] x) => (double[N, {columns}] y) {{ {text} }}'
    )
    for k, (w, b) in enumerate(zip(coefs, intercepts, strict=True)):
        model.graph.initializer.extend([numpy_helper.from_array(w, f"w{k}"), numpy_helper.from_array(b, f"b{k}")])
    return model


# scikit-learn's tools


@pytest.fixture(scope="module")
def line() -> onnx.ModelProto:
    from skl2onnx import to_onnx
    from sklearn.linear_model import LinearRegression

    return to_onnx(LinearRegression().fit(X, np.zeros(120)), X)


@pytest.fixture(scope="module")
def classifier() -> onnx.ModelProto:
    from skl2onnx import to_onnx
    from sklearn.linear_model import LogisticRegression

    return to_onnx(LogisticRegression(C=1e-3).fit(X, THREE), X)


def test_clone_pipeline_grid_search_and_pickle(line: onnx.ModelProto) -> None:
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from refgrad.training.estimators import OnnxRegressor

    estimator = OnnxRegressor(line, **SETTINGS | {"learning_rate_init": 0.1})
    assert clone(estimator).get_params()["max_iter"] == 20
    assert estimator.set_params(max_iter=30).max_iter == 30
    pipeline = make_pipeline(StandardScaler(), clone(estimator)).fit(X, NUMBERS)
    assert pipeline.score(X, NUMBERS) > 0.9
    search = GridSearchCV(estimator, {"learning_rate_init": [1e-5, 0.1]}, cv=2).fit(X, NUMBERS)
    assert search.best_params_ == {"learning_rate_init": 0.1}
    estimator.fit(X, NUMBERS)
    read = pickle.loads(pickle.dumps(estimator))
    np.testing.assert_array_equal(read.predict(X), estimator.predict(X))
    estimator.partial_fit(X, NUMBERS)
    read.partial_fit(X, NUMBERS)
    assert read.loss_curve_[-1] == estimator.loss_curve_[-1]


def test_warm_start_goes_on_and_fit_begins_anew(line: onnx.ModelProto) -> None:
    from refgrad.training.estimators import OnnxRegressor

    cold, warm = OnnxRegressor(line, **SETTINGS), OnnxRegressor(line, warm_start=True, **SETTINGS)
    assert cold.fit(X, NUMBERS).loss_curve_ == warm.fit(X, NUMBERS).loss_curve_
    first = list(cold.loss_curve_)
    assert cold.fit(X, NUMBERS).loss_curve_ == first
    assert warm.fit(X, NUMBERS).n_iter_ == 40
    assert warm.loss_curve_[-1] < first[-1]


def test_early_stopping_keeps_the_best_weights(classifier: onnx.ModelProto) -> None:
    from skl2onnx import to_onnx
    from sklearn.linear_model import LinearRegression

    from refgrad.training.estimators import OnnxClassifier, OnnxRegressor

    settings = SETTINGS | {"max_iter": 300, "learning_rate_init": 0.1, "n_iter_no_change": 3}
    trained = OnnxClassifier(classifier, early_stopping=True, validation_fraction=0.2, **settings).fit(X, THREE)
    assert trained.n_iter_ < 300
    scores = trained.validation_scores_
    assert len(scores) == trained.n_iter_
    assert max(scores[:-4]) + 1e-4 > max(scores[-3:])
    stopped = OnnxRegressor(to_onnx(LinearRegression().fit(X, NUMBERS), X), **settings).fit(X, NUMBERS)
    assert stopped.n_iter_ < 300


def test_samples_of_weight_0_do_not_count(classifier: onnx.ModelProto, line: onnx.ModelProto) -> None:
    from sklearn.base import clone

    from refgrad.training.estimators import OnnxClassifier, OnnxRegressor

    weight = np.repeat([1.0, 0.0], 60)
    spoilt = NUMBERS.copy()
    spoilt[60:] = 1e3
    settings = SETTINGS | {"shuffle": False, "tol": 0}
    for estimator, y, wrong in (
        (OnnxRegressor(line, **settings), NUMBERS, spoilt),
        (OnnxClassifier(classifier, **settings), THREE, np.where(weight == 1, THREE, "a")),
    ):
        first = clone(estimator).fit(X, y, sample_weight=weight)
        second = clone(estimator).fit(X, wrong, sample_weight=weight)
        assert first.loss_curve_ == second.loss_curve_


def test_labels_of_any_form_train_alike(line: onnx.ModelProto, classifier: onnx.ModelProto) -> None:
    from skl2onnx import to_onnx
    from sklearn.linear_model import LogisticRegression

    from refgrad.training.estimators import OnnxClassifier, OnnxRegressor

    whole = np.round(NUMBERS)
    curves = [
        OnnxRegressor(line, **SETTINGS).fit(X, y).loss_curve_
        for y in (whole.astype(np.int64), whole.astype(np.float64), whole.astype(np.float32)[:, None])
    ]
    assert curves[0] == curves[1] == curves[2]
    one, two = (OnnxClassifier(classifier, **SETTINGS).fit(X, y).loss_curve_ for y in (THREE, THREE[:, None]))
    assert one == two
    binary = to_onnx(LogisticRegression(C=1e-3).fit(X, TWO), X)
    of = [OnnxClassifier(binary, **SETTINGS).fit(X, TWO.astype(kind)).loss_curve_ for kind in ("i8", "f4", "f8", "?")]
    assert of[0] == of[1] == of[2] == of[3]


@pytest.mark.filterwarnings("ignore:The loss log_loss compares probabilities")
def test_what_does_not_fit_is_named(line: onnx.ModelProto, classifier: onnx.ModelProto) -> None:
    from skl2onnx import to_onnx
    from sklearn.linear_model import LinearRegression

    from refgrad.training.estimators import OnnxClassifier, OnnxRegressor

    with pytest.raises(FeedError, match="The label 'd' is not one of the model's classes: 'a', 'b', 'c'"):
        OnnxClassifier(classifier).fit(X, np.where(THREE == "a", "d", THREE))
    scores = to_onnx(LinearRegression().fit(X, NUMBERS), X)
    with pytest.raises(OptionError, match=r'no probabilities: .* Take loss="cross_entropy"'):
        OnnxClassifier(scores).fit(X, TWO)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        OnnxRegressor(line).fit(X, NUMBERS[:-1])
    with pytest.raises(ValueError, match="Input X contains NaN"):
        OnnxRegressor(line).fit(np.full_like(X, np.nan), NUMBERS)
    with pytest.raises(FeedError, match="has 4 features, and X has the shape"):
        OnnxRegressor(line).fit(X[:, :3], NUMBERS)
    with pytest.raises(OptionError, match="There is no convention 'keras'; there are 'sklearn', 'torch', 'documents'"):
        OnnxRegressor(line, convention="keras").fit(X, NUMBERS)
    with pytest.raises(OptionError, match="There is no optimizer 'lion'"):
        OnnxRegressor(line, optimizer="lion").fit(X, NUMBERS)


def test_conventions_set_what_differs_together() -> None:
    theirs, torchs = convention("sklearn"), convention("torch")
    assert theirs.optimizer("sgd", momentum=0.9) == SGD(momentum=0.9, rate_in_velocity=True)
    assert torchs.optimizer("sgd", momentum=0.9) == SGD(momentum=0.9)
    assert theirs.schedule("invscaling", 0.1) == InverseScaling(0.1, unit="sample", by_epoch=True)
    assert torchs.schedule("constant", 0.1) == Constant(0.1)
    assert (theirs.loss("squared_error"), torchs.loss("squared_error")) == ("half_squared_error", "squared_error")


def test_a_penalty_of_the_samples_is_divided_by_their_number() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> line (double[N, 1] x) => (double[N, 1] y) '
        "<double[1, 1] a = {3}> { y = MatMul(x, a) }"
    )
    zeros = {"x": np.zeros((5, 1)), "label": np.zeros((5, 1))}
    training = Training(step_model(model, penalty={"a": (0.5, 0.25)}, penalty_by="sample"), 0.1)
    assert training.epoch(batches(zeros, 5)) == pytest.approx((0.5 * 3 + 0.25 * 9) / 5, abs=1e-14)
    assert training.weights["a"].item() == pytest.approx(3 - 0.1 * (0.5 + 0.5 * 3) / 5, abs=1e-14)
    with pytest.raises(OptionError, match="penalty_by='batch'"):
        step_model(model, penalty_by="batch")


ANY_FEATURES = """<ir_version: 8, opset_import: ["": 18]> g (float[N, M] x) => (float[N, {size}] y)
    <float[1, {size}] a = {{{a}}}, float[{size}] b = {{{b}}}, int64[1] axes = {{1}}>
    {{ s = ReduceMean<keepdims = 1>(x, axes)  z = MatMul(s, a)  y = Add(z, b) }}"""
OF_THE_MODEL = "the model has a fixed number of classes, or learns from the mean of the features alone"
NOT_DONE = {
    "check_dtype_object": OF_THE_MODEL,
    "check_regressors_train": OF_THE_MODEL,
    "check_classifiers_train": OF_THE_MODEL,
    "check_classifiers_one_label": OF_THE_MODEL,
    "check_classifiers_classes": OF_THE_MODEL,
    "check_supervised_y_2d": "a column of labels is taken without a warning",
    "check_requires_y_none": "the message is of labels",
    "check_classifiers_regression_target": "the message is of labels",
    "check_sample_weight_equivalence_on_dense_data": "samples are shuffled by their position",
    "check_n_features_in_after_fitting": "the message for partial_fit is that of fit",
}


@pytest.mark.parametrize("kind", ["regressor", "classifier"])
@pytest.mark.filterwarnings("ignore")
def test_the_checks_of_scikit_learn(kind: str) -> None:
    """On models that take any number of features; the checks vary it."""
    from sklearn.utils.estimator_checks import check_estimator

    from refgrad.training.estimators import OnnxClassifier, OnnxRegressor

    if kind == "regressor":
        estimator = OnnxRegressor(onnx.parser.parse_model(ANY_FEATURES.format(size=1, a="1", b="0")), max_iter=5)
    else:
        model = onnx.parser.parse_model(ANY_FEATURES.format(size=3, a="1, 0, -1", b="0, 0, 0"))
        estimator = OnnxClassifier(model, loss="cross_entropy", max_iter=5)
    results = check_estimator(estimator, expected_failed_checks=NOT_DONE, on_skip=None, on_fail=None)
    failed = [(one["check_name"], one["exception"]) for one in results if one["status"] == "failed"]
    assert not failed
    assert sum(one["status"] == "passed" for one in results) >= 49


@pytest.mark.parametrize("shape", ["[N, 1]", "[N]"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_logit_is_trained_as_its_sigmoid_is(backend: str, shape: str) -> None:
    pytest.importorskip("sklearn")
    from refgrad.training.estimators import OnnxClassifier

    def made(last: str) -> onnx.ModelProto:
        columns = ", 1" if "1" in shape else ""
        return onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["": 18]> m (float[N, 4] x) => (float{shape} y) '
            f"<float[4{columns}] w = {{0, 0.1, 0, 0}}> {{ z = MatMul(x, w) y = {last}(z) }}"
        )

    logit = OnnxClassifier(made("Identity"), loss="binary_cross_entropy_with_logits", backend=backend, **SETTINGS)
    chance = OnnxClassifier(made("Sigmoid"), backend=backend, **SETTINGS)
    for y in (TWO, TWO.astype(bool), TWO.astype(float)):
        logit.fit(X, y)
        np.testing.assert_allclose(logit.loss_curve_, chance.fit(X, y).loss_curve_, rtol=1e-4)
        np.testing.assert_allclose(logit.predict_proba(X), chance.predict_proba(X), atol=1e-4)
        np.testing.assert_array_equal(logit.predict(X), chance.predict(X))
    assert logit.classes_.tolist() == [0, 1]
    again = pickle.loads(pickle.dumps(logit))
    np.testing.assert_array_equal(again.predict_proba(X), logit.predict_proba(X))
    with pytest.raises(FeedError, match="takes labels from 0 to 1"):
        logit.fit(X, TWO + 1)
    with pytest.raises(
        OptionError, match="'cross_entropy', 'log_loss', 'binary_cross_entropy_with_logits', not 'squared_error'"
    ):
        OnnxClassifier(made("Identity"), loss="squared_error").fit(X, TWO)
