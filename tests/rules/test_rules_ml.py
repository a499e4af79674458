"""The smooth operators of ai.onnx.ml, alone and in the models that skl2onnx makes of scikit-learn's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from checking import assert_gradient
from onnx import ModelProto, parser

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.conformance.cases.ml import cases
from refgrad.errors import BackendError, NoGradientError
from refgrad.protos.domains import ML
from refgrad.tables.registry import BODY

CASES = list(cases())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_agrees_with_differences(case: Case) -> None:
    # Of a double, what passes through the float result is no more than float.
    assert_gradient(case, directions=1, runtime=all(array.dtype != np.float64 for array in case.feeds.values()))


@pytest.mark.parametrize("case", [case for case in CASES if case.static], ids=str)
def test_the_interpreter_computes_what_onnx_runtime_does(case: Case) -> None:
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in case.node.attribute}
    if case.node.op_type in ("LinearRegressor", "SVMRegressor") and attributes.get("post_transform") == b"LOGISTIC":
        pytest.skip("ONNX Runtime leaves a single column as it is")
    try:
        expected = get_backend("ort-cpu").prepare(case.model).run(case.feeds)
    except BackendError as error:
        pytest.skip(str(error))  # no kernel for this type
    got = get_backend("numpy").prepare(case.model).run(case.feeds)
    for name in expected:
        if got[name].dtype.kind == "f":
            np.testing.assert_allclose(got[name], expected[name], rtol=2e-5, atol=2e-5, err_msg=name)
            assert got[name].dtype == expected[name].dtype
        else:
            np.testing.assert_array_equal(got[name], expected[name])


def test_every_operator_has_a_case() -> None:
    assert {f"{ML}.{name}" for domain, name in BODY if domain == ML} == {case.operator for case in CASES}


def one(text: str, inputs: str = "float[2,3] x", output: str = "float[a,b] y") -> ModelProto:
    imports = f'["" : 17, "{ML}" : 3]'
    return parser.parse_model(f"<ir_version: 8, opset_import: {imports}> g ({inputs}) => ({output}) {{ {text} }}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "l, y = ai.onnx.ml.LinearClassifier <classlabels_ints = [0, 1], coefficients = [1.0, 2.0, 3.0], "
            'intercepts = [0.5], post_transform = "SOFTMAX"> (x)',
            "runtimes disagree on post_transform=SOFTMAX of one score for two classes; compute both scores",
        ),
        (
            "l, y = ai.onnx.ml.SVMClassifier <classlabels_ints = [0, 1], coefficients = [1.0, 2.0], rho = [0.5], "
            "support_vectors = [1.0, 2.0, 3.0, 1.0, 2.0, 3.0], vectors_per_class = [1, 1], prob_a = [1.0], prob_b = [0.0]> (x)",
            "its probabilities come out of an iteration that stops at a tolerance",
        ),
        (
            "y = ai.onnx.ml.LinearRegressor <coefficients = [1.0, 2.0, 3.0], targets = 2> (x)",
            "3 coefficients are not 2 rows",
        ),
        ('y = ai.onnx.ml.Normalizer <norm = "L3"> (x)', "its norm 'L3' is not known; there are MAX, L1 and L2"),
    ],
)
def test_what_has_no_derivative_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(one(text))


@pytest.mark.parametrize("text", ["y = ai.onnx.ml.Binarizer <threshold = 0.5> (x)"])
def test_a_derivative_of_zero_is_announced(text: str) -> None:
    model = one(text)
    assert [row.verdict for row in refgrad.preflight(model).rows] == ["zero"]
    [gradient] = (
        get_backend("numpy")
        .prepare(refgrad.gradient(model))
        .run({"x": np.ones((2, 3), np.float32), "y_grad": np.ones((2, 3), np.float32)})
        .values()
    )
    assert not gradient.any()


def test_a_model_that_imports_no_opset_of_onnx() -> None:
    body = f"{{ y = {ML}.Scaler <scale = [2.0]> (x) }}"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["{ML}" : 1]> g (float[2,3] x) => (float[2,3] y) {body}')
    gradient = refgrad.gradient(model)
    onnx.checker.check_model(gradient, full_check=True)
    assert_gradient(Case("scaler", model, {"x": np.ones((2, 3), np.float32)}))


@pytest.mark.parametrize("imports", [(14, 14), (9, 14), (21, 21)], ids=str)
@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_a_domain_that_is_imported_twice_is_imported_once_by_the_gradient(
    imports: tuple[int, int], domain: str
) -> None:
    # skl2onnx writes such models, and onnx converts the first import alone. The last one counts, as it does for runtimes.
    first, last = imports
    body = f"{{ y = {ML}.Scaler <offset = [1.0], scale = [2.0]> (x) }}"
    opsets = f'["{ML}" : 1, "" : {first}, "{domain}" : {last}]'
    model = parser.parse_model(f"<ir_version: 7, opset_import: {opsets}> g (float[2,3] x) => (float[2,3] y) {body}")
    gradient = refgrad.gradient(model)
    assert [o.version for o in gradient.opset_import if o.domain in ("", "ai.onnx")] == [max(last, 16)]
    assert {row.verdict for row in refgrad.preflight(model).rows} == {"rule"}
    assert_gradient(Case("scaler", model, {"x": np.ones((2, 3), np.float32)}))


# scikit-learn


RNG = np.random.default_rng(0)
SAMPLES = RNG.standard_normal((30, 4))
CLASSES = {2: (SAMPLES[:, 0] > 0).astype(int), 3: np.digitize(SAMPLES[:, 0] + SAMPLES[:, 1], (-0.6, 0.6))}
TARGET = SAMPLES @ [1.0, -2.0, 0.5, 0.0] + 0.1


def estimators() -> dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]]:
    """Estimators with what they are fitted to and the options of their conversion."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    from sklearn import decomposition, impute, neural_network, pipeline, preprocessing, svm

    scores = {"zipmap": False}
    raw = {"zipmap": False, "raw_scores": True}

    def after(*steps: Any) -> Any:
        return pipeline.make_pipeline(*steps)

    made: dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]] = {
        "logistic 2": lambda: (linear_model.LogisticRegression(), CLASSES[2], scores),
        "logistic 3": lambda: (linear_model.LogisticRegression(), CLASSES[3], scores),
        "logistic raw": lambda: (linear_model.LogisticRegression(), CLASSES[3], raw),
        "linear svc": lambda: (svm.LinearSVC(), CLASSES[3], {"raw_scores": True}),
        "scaled svc": lambda: (after(preprocessing.StandardScaler(), svm.SVC()), CLASSES[2], raw),
        "regression": lambda: (linear_model.LinearRegression(), np.stack([TARGET, -TARGET], 1), {}),
        "ridge": lambda: (after(preprocessing.MinMaxScaler(), linear_model.Ridge()), TARGET, {}),
        "normalized": lambda: (after(preprocessing.Normalizer("l2"), linear_model.Ridge()), TARGET, {}),
        "imputed": lambda: (after(impute.SimpleImputer(), linear_model.Ridge()), TARGET, {}),
        "pca": lambda: (after(decomposition.PCA(2), linear_model.Ridge()), TARGET, {}),
        "mlp": lambda: (
            neural_network.MLPRegressor(hidden_layer_sizes=(5,), activation="tanh", max_iter=20),
            TARGET,
            {},
        ),
        "mlp 2": lambda: (neural_network.MLPClassifier((5,), activation="tanh", max_iter=20), CLASSES[2], scores),
        "mlp 3": lambda: (neural_network.MLPClassifier((5,), activation="tanh", max_iter=20), CLASSES[3], scores),
    }
    for kernel in ("linear", "poly", "rbf", "sigmoid"):
        made[f"svr {kernel}"] = lambda kernel=kernel: (svm.SVR(kernel=kernel), TARGET, {})  # type: ignore[misc]
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        *("logistic 2", "logistic 3", "logistic raw", "linear svc", "scaled svc", "regression", "ridge", "normalized"),
        *("imputed", "pca", "mlp", "svr linear", "svr poly", "svr rbf", "svr sigmoid"),
    ],
)
def test_models_of_scikit_learn(name: str) -> None:
    skl2onnx = pytest.importorskip("skl2onnx")
    estimator, target, options = estimators()[name]()
    estimator.fit(SAMPLES, target)
    kinds = [("x", skl2onnx.common.data_types.FloatTensorType([None, 4]))]
    settings = {"options": {id(estimator): options}} if options else {}
    model = skl2onnx.convert_sklearn(estimator, initial_types=kinds, target_opset={"": 17, ML: 3}, **settings)
    assert any(node.domain == ML for node in model.graph.node) or name in ("pca", "mlp")
    feeds = {"x": RNG.standard_normal((5, 4)).astype(np.float32)}
    # The value that StandardScaler divides by is written in float: nothing is lost where it is read in double.
    assert_gradient(Case(name, model, feeds), directions=1, tolerance=1e-5)


LINEAR = ("logistic 2", "logistic 3", "linear svc", "regression", "ridge", "mlp", "mlp 2", "mlp 3")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [9, 12, 15, 18, 21])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_models_of_scikit_learn_in_old_and_new_opsets(name: str, opset: int) -> None:
    skl2onnx = pytest.importorskip("skl2onnx")
    estimator, target, options = estimators()[name]()
    estimator.fit(SAMPLES, target)
    kinds = [("x", skl2onnx.common.data_types.FloatTensorType([None, 4]))]
    settings = {"options": {id(estimator): options}} if options else {}
    feeds = {"x": np.random.default_rng(opset).standard_normal((5, 4)).astype(np.float32)}
    for version in (1, 3):
        model = skl2onnx.convert_sklearn(
            estimator, initial_types=kinds, target_opset={"": opset, ML: version}, **settings
        )
        assert_gradient(Case(name, model, feeds), directions=1, tolerance=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [12, 18])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_models_of_scikit_learn_whose_input_has_no_shape(name: str, opset: int) -> None:
    skl2onnx = pytest.importorskip("skl2onnx")
    estimator, target, options = estimators()[name]()
    estimator.fit(SAMPLES, target)
    settings = {"options": {id(estimator): options}} if options else {}
    kind = skl2onnx.common.data_types.FloatTensorType
    bare, shaped = (
        skl2onnx.convert_sklearn(estimator, initial_types=[("x", k)], target_opset={"": opset, ML: 1}, **settings)
        for k in (kind(), kind([None, 4]))
    )
    assert not bare.graph.input[0].type.tensor_type.HasField("shape")
    assert shaped.graph.input[0].type.tensor_type.HasField("shape")
    # Differences vouch for the second model above.
    feeds = {"x": np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)}
    expected, got = (
        dict(get_backend("numpy").prepare(refgrad.gradient(m, ["x"], cotangent="ones")).run(feeds))
        for m in (shaped, bare)
    )
    np.testing.assert_allclose(got["x_grad"], expected["x_grad"], rtol=1e-6, atol=1e-7)
