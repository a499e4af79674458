"""Cases of ai.onnx.ml, the operators of exported scikit-learn models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.protos.domains import ML

X = np.array([[0.31, -1.2, 0.74], [1.45, 0.52, -0.83], [-0.46, 0.67, 1.93], [0.12, 2.1, -1.4]], np.float32)
_NUMBERS = np.random.default_rng(0).standard_normal(40).round(3)
POST_TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")
KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")


def cases() -> Iterator[Case]:
    """Every attribute and post-transformation, in float and double, on static, symbolic and unknown shapes."""
    for shapes in SHAPES:
        yield _case("Scaler", X, shapes=shapes, offset=[0.5], scale=[2.0])
        yield _case("Scaler", X, shapes=shapes, offset=[0.5, 1.0, -1.0], scale=[2.0, -1.0, 0.3])
        yield _case("Scaler", X.astype(np.float64), shapes=shapes, scale=[2.0])
        for norm in ("MAX", "L1", "L2"):
            yield _case("Normalizer", X, shapes=shapes, norm=norm)
            yield _case("Normalizer", X.astype(np.float64), shapes=shapes, norm=norm)
        lacking = X.copy()
        lacking[1, 1] = lacking[2, 0] = np.nan
        for x, missing in (
            (lacking, float("nan")),
            (X, 7.0),
        ):  # differences do not work next to a number that is replaced
            filled: dict[str, Any] = {"replaced_value_float": missing}
            yield _case("Imputer", x, shapes=shapes, imputed_value_floats=[0.7, -0.2, 0.1], **filled)
            yield _case("Imputer", x.astype(np.float64), shapes=shapes, imputed_value_floats=[0.7], **filled)
        if shapes != "unknown":
            yield _case("FeatureVectorizer", X, X[:, :2], shapes=shapes, inputdimensions=[2, 3])
            yield _case("FeatureVectorizer", X.astype(np.float64), shapes=shapes, inputdimensions=[3])
            yield _case("ArrayFeatureExtractor", X, np.array([2, 0, 2]), shapes=shapes)
            yield _case("ArrayFeatureExtractor", X[0], np.array([[1, 2]]), shapes=shapes)
        yield from _linear(shapes)
        yield from _vectors(shapes)


def _linear(shapes: str) -> Iterator[Case]:
    weights, shift = _NUMBERS[:6].tolist(), _NUMBERS[6:8].tolist()
    for post in POST_TRANSFORMS:
        settings: dict[str, Any] = {"coefficients": weights, "intercepts": shift, "post_transform": post}
        yield _case("LinearRegressor", X, shapes=shapes, targets=2, **settings)
        yield _labelled("LinearClassifier", X, shapes=shapes, classlabels_ints=[3, 5], **settings)
    narrow: dict[str, Any] = {"coefficients": [0.05, -0.04, 0.06], "intercepts": [0.45], "post_transform": "PROBIT"}
    yield _case("LinearRegressor", X, shapes=shapes, **narrow)
    yield _case("LinearRegressor", X.astype(np.float64), shapes=shapes, coefficients=weights, targets=2)
    for post in ("NONE", "LOGISTIC"):
        settings = {"coefficients": weights[:3], "intercepts": shift[:1], "post_transform": post}
        yield _labelled("LinearClassifier", X, shapes=shapes, classlabels_strings=["no", "yes"], **settings)


def _vectors(shapes: str) -> Iterator[Case]:
    vectors = _NUMBERS[:15].tolist()
    for kernel_type in KERNELS:
        shared: dict[str, Any] = {
            "kernel_type": kernel_type,
            "kernel_params": [0.4, 0.2, 3.0],
            "support_vectors": vectors,
        }
        weights = _NUMBERS[15:20].tolist()
        yield _case("SVMRegressor", X, shapes=shapes, coefficients=weights, n_supports=5, rho=[0.3], **shared)
        two: dict[str, Any] = {"coefficients": weights, "vectors_per_class": [2, 3], "classlabels_ints": [0, 1]}
        yield _labelled("SVMClassifier", X, shapes=shapes, rho=[0.3], **two, **shared)
        more = _NUMBERS[15:25].tolist()
        three: dict[str, Any] = {"coefficients": more, "vectors_per_class": [2, 1, 2], "classlabels_ints": [0, 1, 2]}
        rho = [0.3, -0.1, 0.2]
        yield _labelled("SVMClassifier", X, shapes=shapes, rho=rho, post_transform="SOFTMAX", **three, **shared)
    yield _labelled("SVMClassifier", X, shapes=shapes, rho=[0.3], post_transform="LOGISTIC", **two, **shared)
    yield _case("SVMRegressor", X, shapes=shapes, coefficients=weights[:3], rho=[0.3], post_transform="LOGISTIC")
    yield _case("SVMRegressor", X, shapes=shapes, coefficients=weights[:3], rho=[0.3], one_class=1)
    several: dict[str, Any] = {"coefficients": _NUMBERS[:9].tolist(), "classlabels_strings": ["a", "b", "c"]}
    yield _labelled("SVMClassifier", X, shapes=shapes, rho=[0.3], **several)


def _case(op_type: str, *inputs: np.ndarray, **options: Any) -> Case:
    return node_case(op_type, *inputs, domain=ML, **{"opset": 1} | options)


def _labelled(op_type: str, *inputs: np.ndarray, **options: Any) -> Case:
    """The case of a classifier, whose first output is a label and whose second the scores."""
    return _case(op_type, *inputs, outputs=2, **options)
