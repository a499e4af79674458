"""Strategies of ai.onnx.ml, the operators of exported scikit-learn models."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.cases.ml import KERNELS, POST_TRANSFORMS
from refgrad.conformance.strategies.drawing import STEP, Drawing, strategy
from refgrad.protos.domains import ML


def _named(*operators: str) -> list[str]:
    return [f"{ML}.{operator}" for operator in operators]


@strategy(*_named("Scaler"))
def scaler(d: Drawing) -> Case:
    """One offset and factor for all columns, or one for each; either may be absent."""
    x = d.floats(_samples(d))
    offset, scale = (d.optional(lambda: _numbers(d, d.pick(1, x.shape[1]))) for _ in range(2))
    return d.case(x, offset=offset, scale=scale if offset else scale or [2.0])


@strategy(*_named("Normalizer"))
def normalizer(d: Drawing) -> Case:
    """Every norm. No element is 0, and no two have the same magnitude."""
    shape = _samples(d)
    rows = d.distinct(shape) + d.scalar(STEP / 4)
    return d.case(rows, norm=d.pick(None, "MAX", "L1", "L2"))


@strategy(*_named("Imputer"))
def imputer(d: Drawing) -> Case:
    """One value for all columns, or one for each, in place of NaN."""
    x = d.floats(_samples(d))
    x[d.bools(x.shape)] = np.nan
    values = _numbers(d, d.pick(1, x.shape[1]))
    return d.case(x, imputed_value_floats=values, replaced_value_float=float("nan"))


@strategy(*_named("FeatureVectorizer"))
def feature_vectorizer(d: Drawing) -> Case:
    """Columns of one to three inputs, cut off or filled up to the asked number."""
    rows, columns = d.integer(1, 3), [d.integer(1, 3) for _ in range(d.integer(1, 3))]
    asked = d.optional(lambda: [d.integer(1, 4) for _ in columns])
    return d.case(*(d.floats((rows, count)) for count in columns), inputdimensions=asked)


@strategy(*_named("ArrayFeatureExtractor"), ranked=True)
def array_feature_extractor(d: Drawing) -> Case:
    """Elements of the last axis, some of them more than once."""
    shape = d.shape(1, 3, size=3, empty=False)
    count = d.integer(1, 3)
    indices = d.integers(d.pick((count,), (1, count)), 0, shape[-1] - 1)
    return d.case(d.floats(shape), indices)


@strategy(*_named("LinearRegressor"))
def linear_regressor(d: Drawing) -> Case:
    """One target or more, with and without intercepts, with every post-transformation that has a derivative."""
    x, targets = d.normal(_samples(d)), d.integer(1, 3)
    return d.case(
        x,
        coefficients=_numbers(d, targets * x.shape[1]),
        intercepts=d.optional(lambda: _numbers(d, targets)),
        targets=targets if targets > 1 or d.flag() else None,
        post_transform=_post_transform(d),
    )


@strategy(*_named("LinearClassifier"))
def linear_classifier(d: Drawing) -> Case:
    """A score for each class, or a single one for two classes; labels that are numbers or words."""
    x, classes = d.normal(_samples(d)), d.integer(2, 3)
    rows = d.pick(classes, 1) if classes == 2 else classes
    post = d.pick(None, "NONE", "LOGISTIC") if rows == 1 else _post_transform(d)
    intercepts = _numbers(d, rows) if rows == 1 else d.optional(lambda: _numbers(d, rows))
    settings: dict[str, Any] = {
        "coefficients": _numbers(d, rows * x.shape[1]),
        "intercepts": intercepts,
        "post_transform": post,
    }
    return d.case(x, outputs=2, **settings, **_labels(d, classes))


@strategy(*_named("SVMRegressor"))
def svm_regressor(d: Drawing) -> Case:
    """Every kernel, and none: no support vectors; one class or a number."""
    x = d.normal(_samples(d))
    settings: dict[str, Any] = {"rho": _numbers(d, 1), "one_class": d.pick(None, 0, 1)}
    if d.flag():
        count = d.integer(1, 3)
        settings |= _vectors(d, count, x.shape[1]) | {"coefficients": _numbers(d, count), "n_supports": count}
    else:
        settings["coefficients"] = _numbers(d, x.shape[1])
    return d.case(x, post_transform=d.pick(None, "NONE", "LOGISTIC"), **settings)


@strategy(*_named("SVMClassifier"))
def svm_classifier(d: Drawing) -> Case:
    """Every kernel, and none: no support vectors; two classes or three."""
    x, classes = d.normal(_samples(d)), d.integer(2, 3)
    if d.flag():
        sizes = [d.integer(1, 2) for _ in range(classes)]
        total, pairs = sum(sizes), classes * (classes - 1) // 2
        settings = _vectors(d, total, x.shape[1]) | {"vectors_per_class": sizes, "rho": _numbers(d, pairs)}
        settings["coefficients"] = _numbers(d, (classes - 1) * total)
        post = d.pick(None, "NONE", "LOGISTIC", *(() if pairs == 1 else ("SOFTMAX", "SOFTMAX_ZERO")))
    else:
        settings = {"coefficients": _numbers(d, classes * x.shape[1]), "rho": _numbers(d, 1)}
        post = d.pick(None, "NONE", "LOGISTIC", "SOFTMAX")
    return d.case(x, outputs=2, post_transform=post, **settings, **_labels(d, classes))


def _vectors(d: Drawing, count: int, columns: int) -> dict[str, Any]:
    """Support vectors and a kernel; the degree is whole because the base of the power may be negative."""
    kernel = d.pick(*KERNELS)
    parameters = [d.pick(0.5, 0.25), d.pick(0.0, 0.5), float(d.integer(1, 3))]
    vectors = _numbers(d, count * columns)
    return {"kernel_type": kernel, "kernel_params": parameters, "support_vectors": vectors}


def _samples(d: Drawing) -> tuple[int, int]:
    """One to three rows of one to three numbers."""
    return d.integer(1, 3), d.integer(1, 3)


def _numbers(d: Drawing, count: int) -> list[float]:
    """Random numbers, so that their sums are not 0."""
    numbers = np.random.default_rng(d.integer(0, 999)).standard_normal(count)
    return [float(x) for x in numbers.astype(np.float32)]


def _post_transform(d: Drawing) -> str | None:
    return d.pick(None, *POST_TRANSFORMS)


def _labels(d: Drawing, classes: int) -> dict[str, Any]:
    if d.flag():
        return {"classlabels_strings": [f"class {k}" for k in range(classes)]}
    return {"classlabels_ints": [3 * k - 1 for k in range(classes)]}
