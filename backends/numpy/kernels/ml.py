"""The smooth operators of ai.onnx.ml. Their results are float, whatever X is; with precision="float64" all is double."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.activation import sigmoid, softmax
from refgrad.backends.numpy.registry import kernel

ML = "ai.onnx.ml"
Array = np.ndarray
Floats = list[float] | None
Ints = list[int] | None
_WINITZKI = 0.147


def _float(X: Array, wide: bool) -> Array:
    return X.astype(np.float64 if wide else np.float32)


@kernel("Scaler", domain=ML)
def scaler(X: Array, *, offset: Floats = None, scale: Floats = None, _wide: bool) -> Array:
    x = _float(X, _wide)
    return np.asarray((x - np.array(offset or 0, x.dtype)) * np.array(scale or 1, x.dtype))


@kernel("Normalizer", domain=ML)
def normalizer(X: Array, *, norm: str, _wide: bool) -> Array:
    """X divided by the largest element, the sum of the sizes or the length of its row; 0 where that is 0"""
    x = _float(X, _wide)
    sizes = {"MAX": x, "L1": np.abs(x), "L2": np.square(x)}
    if norm not in sizes:
        raise ValueError(f"norm={norm!r} is not supported")
    size = sizes[norm].max(-1, keepdims=True) if norm == "MAX" else sizes[norm].sum(-1, keepdims=True)
    size = np.sqrt(size) if norm == "L2" else size
    return np.asarray(np.where(size == 0, x.dtype.type(0), x / np.where(size == 0, x.dtype.type(1), size)))


@kernel("Imputer", domain=ML)
def imputer(
    X: Array,
    *,
    imputed_value_floats: Floats = None,
    imputed_value_int64s: Ints = None,
    replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Array:
    """X with what is missing put in, column by column"""
    if X.dtype.kind == "f":
        missing = np.isnan(X) if math.isnan(replaced_value_float) else replaced_value_float == X
        return np.where(missing, np.array(imputed_value_floats, X.dtype), X)
    return np.where(replaced_value_int64 == X, np.array(imputed_value_int64s, X.dtype), X)


@kernel("FeatureVectorizer", domain=ML)
def feature_vectorizer(*inputs: Array, inputdimensions: Ints = None, _wide: bool) -> Array:
    """The columns of all inputs side by side, cut or filled up with 0 to the given numbers"""
    parts = []
    for k, X in enumerate(inputs):
        x = _float(X, _wide)
        count = inputdimensions[k] if inputdimensions else x.shape[1]
        part = np.zeros((x.shape[0], count), x.dtype)
        part[:, : x.shape[1]] = x[:, :count]
        parts.append(part)
    return np.concatenate(parts, 1)


@kernel("LinearRegressor", domain=ML)
def linear_regressor(
    X: Array,
    *,
    coefficients: Floats = None,
    intercepts: Floats = None,
    post_transform: str,
    targets: int,
    _wide: bool,
) -> Array:
    return _transformed(_linear(_float(X, _wide), coefficients, intercepts, targets), post_transform)


@kernel("LinearClassifier", domain=ML)
def linear_classifier(
    X: Array,
    *,
    classlabels_ints: Ints = None,
    classlabels_strings: list[str] | None = None,
    coefficients: Floats,
    intercepts: Floats = None,
    multi_class: int,
    post_transform: str,
    _wide: bool,
) -> tuple[Array, Array]:
    """The label of the largest score, and the scores; of one score for two classes the second counts from 0 (or 1/2) on"""
    labels = _labels(classlabels_ints, classlabels_strings)
    rows = len(intercepts or ()) or len(labels)
    scores = _linear(_float(X, _wide), coefficients, intercepts, rows)
    if rows == 1 and len(labels) == 2:
        return labels[(scores[:, 0] > 0).astype(int)], _of_two(scores, post_transform, 1 - scores)
    best = scores.argmax(1)
    return labels[best] if len(labels) else best, _transformed(scores, post_transform)


def _labels(ints: Ints, strings: list[str] | None) -> Array:
    return np.array(strings, object) if strings else np.array(ints or [], np.int64)


def _of_two(score: Array, post_transform: str, other: Array) -> Array:
    if post_transform == "LOGISTIC":
        return sigmoid(np.concatenate([-score, score], 1))
    if post_transform != "NONE":
        raise ValueError(f"post_transform={post_transform!r} of one score for two classes is not supported")
    return np.concatenate([other, score], 1)


def _linear(x: Array, coefficients: Floats, intercepts: Floats, rows: int) -> Array:
    weights = np.array(coefficients, x.dtype).reshape(rows, -1)
    return np.asarray(x @ weights.T + np.array(intercepts or [0.0], x.dtype))


@kernel("SVMRegressor", domain=ML)
def svm_regressor(
    X: Array,
    *,
    coefficients: list[float],
    kernel_params: Floats = None,
    kernel_type: str,
    n_supports: int,
    one_class: int,
    post_transform: str,
    rho: list[float],
    support_vectors: Floats = None,
    _wide: bool,
) -> Array:
    x = _float(X, _wide)
    if n_supports:
        x = _kernel(x, np.array(support_vectors, x.dtype).reshape(n_supports, -1), kernel_type, kernel_params)
    y = (x @ np.array(coefficients, x.dtype) + x.dtype.type(rho[0]))[:, None]
    if one_class:
        y = np.where(y > 0, x.dtype.type(1), x.dtype.type(-1))
    return _transformed(y, post_transform)


@kernel("SVMClassifier", domain=ML)
def svm_classifier(
    X: Array,
    *,
    classlabels_ints: Ints = None,
    classlabels_strings: list[str] | None = None,
    coefficients: list[float],
    kernel_params: Floats = None,
    kernel_type: str,
    post_transform: str,
    prob_a: Floats = None,
    prob_b: Floats = None,
    rho: list[float],
    support_vectors: Floats = None,
    vectors_per_class: Ints = None,
    _wide: bool,
) -> tuple[Array, Array]:
    """The class that wins most pairs, and the decision of each pair; without vectors the largest score of the classes"""
    x, labels = _float(X, _wide), _labels(classlabels_ints, classlabels_strings)
    if not sum(vectors_per_class or ()):
        scores = _linear(x, coefficients, rho[:1], max(len(labels), 1))
        return labels[scores.argmax(1)], _transformed(scores, post_transform)
    if prob_a:
        raise ValueError("probabilities (prob_a, prob_b) are not supported")
    assert vectors_per_class is not None
    owner = np.repeat(np.arange(len(vectors_per_class)), vectors_per_class)
    K = _kernel(x, np.array(support_vectors, x.dtype).reshape(len(owner), -1), kernel_type, kernel_params)
    weights = np.array(coefficients, x.dtype).reshape(-1, len(owner))
    pairs = [(i, j) for i in range(len(vectors_per_class)) for j in range(i + 1, len(vectors_per_class))]
    decisions, votes = [], np.zeros((len(x), len(vectors_per_class)), int)
    for (i, j), shift in zip(pairs, rho, strict=True):
        of_i, of_j = K[:, owner == i] @ weights[j - 1, owner == i], K[:, owner == j] @ weights[i, owner == j]
        decisions.append(of_i + of_j + x.dtype.type(shift))
        votes[np.arange(len(x)), np.where(decisions[-1] > 0, i, j)] += 1
    scores = np.stack(decisions, 1)
    label = labels[votes.argmax(1)]
    return label, _of_two(scores, post_transform, -scores) if len(pairs) == 1 else _transformed(scores, post_transform)


def _kernel(x: Array, vectors: Array, kernel_type: str, parameters: Floats) -> Array:
    """(samples, vectors)"""
    gamma, shift, degree = (*(parameters or ()), 0.0, 0.0, 0.0)[:3]
    match kernel_type:
        case "LINEAR":
            return np.asarray(x @ vectors.T)
        case "POLY":
            return np.asarray((gamma * (x @ vectors.T) + shift) ** int(degree))
        case "SIGMOID":
            return np.asarray(np.tanh(gamma * (x @ vectors.T) + shift))
        case "RBF":
            distances = [np.square(x - vector).sum(1) for vector in vectors]
            return np.asarray(np.exp(-gamma * np.stack(distances, 1)))
    raise ValueError(f"kernel_type={kernel_type!r} is not supported")


def _transformed(scores: Array, post_transform: str) -> Array:
    match post_transform:
        case "NONE":
            return scores
        case "LOGISTIC":
            return sigmoid(scores)
        case "SOFTMAX":
            return softmax(scores, axis=1)
        case "SOFTMAX_ZERO":
            return _softmax_zero(scores)
        case "PROBIT":
            return _probit(scores)
    raise ValueError(f"post_transform={post_transform!r} is not supported")


def _softmax_zero(scores: Array) -> Array:
    """Softmax in which a score of 0, to 1e-7, stays about 0"""
    top = scores.max(1, keepdims=True)
    powers = np.where(np.abs(scores) > 1e-7, np.exp(scores - top), scores * np.exp(-top))
    size = powers.sum(1, keepdims=True)
    return np.asarray(np.where(size == 0, scores.dtype.type(0.5), powers / np.where(size == 0, 1, size)))


def _probit(p: Array) -> Array:
    """Winitzki's approximation of the inverse of the normal distribution, as ONNX Runtime has it"""
    x = 2 * p - 1
    log = np.log1p(-np.square(x))
    v = 2 / (math.pi * _WINITZKI) + log / 2
    inner: Any = -log / _WINITZKI / (v + np.sqrt(np.square(v) - log / _WINITZKI))
    return np.asarray(np.sign(x) * np.sqrt(2 * inner), p.dtype)
