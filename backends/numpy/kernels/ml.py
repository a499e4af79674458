"""The operators of ai.onnx.ml except the trees. They compute in float, whatever X is; in double with precision="float64".

Where the specification leaves a choice, they take ONNX Runtime's: the norm MAX divides by the largest element, PROBIT is
Winitzki's approximation, and one score of two classes stands for two (`two_scores`). A map is a dict, a sequence a list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.activation import sigmoid, softmax
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import ML

Array = np.ndarray
Floats = list[float] | None
Ints = list[int] | None
Strings = list[str] | None
_WINITZKI = 0.147


def as_float(X: Array, wide: bool) -> Array:
    """X in the type that is computed in"""
    return X.astype(np.float64 if wide else np.float32)


@kernel("Scaler", domain=ML)
def scaler(X: Array, *, offset: Floats = None, scale: Floats = None, _wide: bool) -> Array:
    x = as_float(X, _wide)
    return np.asarray((x - np.array(offset or 0, x.dtype)) * np.array(scale or 1, x.dtype))


@kernel("Normalizer", domain=ML)
def normalizer(X: Array, *, norm: str, _wide: bool) -> Array:
    """X divided by the largest element, the sum of the sizes or the length of its row; X itself where that is 0"""
    x = as_float(X, _wide)
    match norm:
        case "MAX":
            size = x.max(-1, keepdims=True, initial=-np.inf)
        case "L1":
            size = np.abs(x).sum(-1, keepdims=True)
        case "L2":
            size = np.sqrt(np.square(x).sum(-1, keepdims=True))
        case _:
            raise ValueError(f"norm={norm!r} is not known; there are MAX, L1 and L2")
    return np.asarray(x / np.where(size == 0, x.dtype.type(1), size))


@kernel("Imputer", domain=ML)
def imputer(
    X: Array,
    *,
    imputed_value_floats: Floats = None,
    imputed_value_int64s: Ints = None,
    replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Array:
    """X with its missing elements replaced, column by column"""
    if X.dtype.kind == "f":
        missing = np.isnan(X) if math.isnan(replaced_value_float) else replaced_value_float == X
        return np.where(missing, np.array(imputed_value_floats, X.dtype), X)
    return np.where(replaced_value_int64 == X, np.array(imputed_value_int64s, X.dtype), X)


@kernel("FeatureVectorizer", domain=ML)
def feature_vectorizer(*inputs: Array, inputdimensions: Ints = None, _wide: bool) -> Array:
    """The columns of all inputs side by side, cut or filled up with 0 to the given numbers; a vector is one row"""
    parts = []
    for k, X in enumerate(inputs):
        x = as_rows(as_float(X, _wide))
        count = inputdimensions[k] if inputdimensions else x.shape[1]
        part = np.zeros((x.shape[0], count), x.dtype)
        part[:, : x.shape[1]] = x[:, :count]
        parts.append(part)
    return np.concatenate(parts, 1)


def as_rows(x: Array) -> Array:
    """A vector is one row."""
    return x[None] if x.ndim == 1 else x


@kernel("ArrayFeatureExtractor", domain=ML, fresh=True)
def array_feature_extractor(X: Array, Y: Array) -> Array:
    """The elements of X at the indices Y along the last axis; of a vector in one row"""
    if Y.size and (Y.min() < 0 or Y.max() >= X.shape[-1]):
        raise ValueError(f"the indices {Y.min()} to {Y.max()} are not all within 0 to {X.shape[-1] - 1}")
    return as_rows(X.take(Y.reshape(-1), -1))


@kernel("Binarizer", domain=ML, fresh=True)
def binarizer(X: Array, *, threshold: float) -> Array:
    """1 where X > threshold, 0 elsewhere, NaN included"""
    return (threshold < X).astype(X.dtype)


@kernel("LabelEncoder", domain=ML)
def label_encoder_1(
    X: Array, *, classes_strings: Strings = None, default_int64: int = -1, default_string: str = "_Unused"
) -> Array:
    """The position of a string in the list, or the string at a position"""
    classes = np.array([*(classes_strings or ()), default_string], object)
    if X.dtype.kind == "O":
        found = _find(X, classes[:-1])
        return np.where(found < 0, default_int64, found)
    return np.asarray(classes[np.where((X < 0) | (len(classes) <= X), -1, X)], object)


@kernel("LabelEncoder", domain=ML, since=2)
def label_encoder(
    X: Array,
    *,
    default_float: float = -0.0,
    default_int64: int = -1,
    default_string: str = "_Unused",
    default_tensor: Array | None = None,
    keys_floats: Floats = None,
    keys_int64s: Ints = None,
    keys_strings: Strings = None,
    keys_tensor: Array | None = None,
    values_floats: Floats = None,
    values_int64s: Ints = None,
    values_strings: Strings = None,
    values_tensor: Array | None = None,
    _wide: bool,
) -> Array:
    """The value beside the key that X is, the last of equal keys; NaN is a key too"""
    keys = _the_one("keys_*", keys_floats, keys_int64s, keys_strings, keys_tensor)
    values = _the_one("values_*", values_floats, values_int64s, values_strings, values_tensor)
    if len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys have {len(values)} values")
    default: Any
    if values is values_tensor:
        kind = values_tensor.dtype
        default = {"O": "_Unused", "f": -0.0}.get(kind.kind, -1)
        default = default_tensor.reshape(-1)[0] if default_tensor is not None and default_tensor.size else default
    elif values is values_floats:
        kind, default = np.dtype(np.float64 if _wide else np.float32), default_float
    elif values is values_int64s:
        kind, default = np.dtype(np.int64), default_int64
    else:
        kind, default = np.dtype(object), default_string
    table = np.empty(len(values) + 1, kind)
    table[:-1], table[-1] = values, default
    return np.asarray(table[_find(X, np.asarray(keys, X.dtype))], kind)


def _the_one(name: str, *given: Any) -> Any:
    """The attribute that is given."""
    present = [value for value in given if value is not None and len(value)]
    if len(present) != 1:
        raise ValueError(f"{len(present)} of the attributes {name} are given; give exactly one")
    return present[0]


def _find(X: Array, keys: Array) -> Array:
    """For each element of X the position of the last key that equals it, −1 without one; NaN equals NaN"""
    if not len(keys):
        return np.full(X.shape, -1)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    place = np.maximum(np.searchsorted(ordered, X, "right") - 1, 0)
    same = ordered[place] == X
    if X.dtype.kind == "f":
        same |= np.isnan(ordered[place]) & np.isnan(X)
    return np.where(same, order[place], -1)


@kernel("CategoryMapper", domain=ML)
def category_mapper(
    X: Array,
    *,
    cats_int64s: Ints = None,
    cats_strings: Strings = None,
    default_int64: int = -1,
    default_string: str = "_Unused",
) -> Array:
    """The integer beside a string, or the string beside an integer"""
    ints, strings = np.array(cats_int64s or [], np.int64), np.array(cats_strings or [], object)
    if len(ints) != len(strings):
        raise ValueError(f"there are {len(ints)} integers and {len(strings)} strings; there must be as many of each")
    if X.dtype.kind == "O":
        return np.asarray(np.append(ints, default_int64)[_find(X, strings)])
    return np.asarray(np.append(strings, default_string)[_find(X, ints)])


@kernel("OneHotEncoder", domain=ML)
def one_hot_encoder(
    X: Array, *, cats_int64s: Ints = None, cats_strings: Strings = None, zeros: int, _wide: bool
) -> Array:
    """1 at the position of X in the list, 0 elsewhere, along a new last axis; numbers are truncated to whole ones"""
    strings = X.dtype.kind == "O"
    if (cats_strings if strings else cats_int64s) is None:
        raise ValueError(
            f"an input of {'strings' if strings else 'numbers'} needs {'cats_strings' if strings else 'cats_int64s'}"
        )
    categories = np.array(cats_strings, object) if strings else np.array(cats_int64s, np.int64)
    found = _find(X if strings else X.astype(np.int64), categories)
    if not zeros and (found < 0).any():
        raise ValueError(f"{X[found < 0][0]!r} is not one of the categories, and zeros is 0")
    return np.asarray(found[..., None] == np.arange(len(categories)), np.float64 if _wide else np.float32)


@kernel("DictVectorizer", domain=ML)
def dict_vectorizer(
    X: Mapping[Any, Any],
    *,
    int64_vocabulary: Ints = None,
    string_vocabulary: Strings = None,
    _wide: bool,
    _output_types: tuple[np.dtype[Any] | None, ...] = (None,),
) -> Array:
    """The value of each key of the vocabulary, 0 or "" where the map does not have the key; a vector, as specified"""
    values = np.array([*X.values()], object)
    keys: Any = int64_vocabulary if int64_vocabulary is not None else string_vocabulary
    unknown = [key for key in X if key not in (keys or ())]
    if unknown:
        raise ValueError(f"the key {unknown[0]!r} is not in the vocabulary")
    kind = (None if _wide else _output_types[0]) or _element_type(values, _wide)
    absent = "" if kind.kind == "O" else 0
    return np.array([X.get(key, absent) for key in keys], kind)


def _element_type(values: Array, wide: bool) -> np.dtype[Any]:
    """The type of the values of a map: a Python float is a float32."""
    if len(values) and isinstance(values[0], str):
        return np.dtype(object)
    if len(values) and type(values[0]) is not float:
        return np.asarray(values[0]).dtype
    return np.dtype(np.float64 if wide else np.float32)


@kernel("CastMap", domain=ML)
def cast_map(X: Mapping[int, Any], *, cast_to: str, map_form: str, max_map: int, _wide: bool) -> Array:
    """In one row the values by key: DENSE side by side, SPARSE each at the place of its key among max_map, 0 or "" elsewhere"""
    kinds: dict[str, Any] = {
        "TO_FLOAT": np.dtype(np.float64 if _wide else np.float32),
        "TO_INT64": np.dtype(np.int64),
        "TO_STRING": np.dtype(object),
    }
    if cast_to not in kinds or map_form not in ("DENSE", "SPARSE"):
        raise ValueError(f"cast_to={cast_to!r} with map_form={map_form!r} is not known")
    keys = sorted(X)
    values = _converted(np.array([X[key] for key in keys], object), kinds[cast_to])
    if map_form == "DENSE":
        return values[None]
    if keys and not 0 <= keys[0] <= keys[-1] < max_map:
        raise ValueError(f"the keys {keys[0]} to {keys[-1]} are not all within 0 to {max_map - 1}")
    row = np.full((1, max_map), "" if values.dtype == object else 0, values.dtype)
    row[0, keys] = values
    return row


def _converted(values: Array, kind: np.dtype[Any]) -> Array:
    if kind.kind == "O":
        return values.astype(np.float32).astype(str).astype(object) if not _are_strings(values) else values
    return (values.astype(str).astype(np.float64) if _are_strings(values) else values).astype(kind)


def _are_strings(values: Array) -> bool:
    return bool(len(values)) and isinstance(values[0], str)


@kernel("ZipMap", domain=ML)
def zip_map(
    X: Array, *, classlabels_int64s: Ints = None, classlabels_strings: Strings = None
) -> list[dict[Any, float]]:
    """For each row a map from the labels to the numbers of the columns"""
    labels: Sequence[Any] = _the_one("classlabels_*", classlabels_int64s, classlabels_strings)
    rows = as_rows(X)
    if rows.shape[1] != len(labels):
        raise ValueError(f"{rows.shape[1]} columns have {len(labels)} labels")
    return [dict(zip(labels, row, strict=True)) for row in rows.tolist()]


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
    scores = _linear(as_rows(as_float(X, _wide)), coefficients, intercepts)
    if scores.shape[-1] != targets:
        raise ValueError(f"the coefficients make {scores.shape[-1]} columns, not {targets} targets")
    return transformed(scores, post_transform)


@kernel("LinearClassifier", domain=ML)
def linear_classifier(
    X: Array,
    *,
    classlabels_ints: Ints = None,
    classlabels_strings: Strings = None,
    coefficients: Floats,
    intercepts: Floats = None,
    multi_class: int,
    post_transform: str,
    _wide: bool,
) -> tuple[Array, Array]:
    """The label of the largest score, and the scores; of one score for two classes the second counts from 0 (or 1/2) on"""
    labels = label_array(classlabels_ints, classlabels_strings)
    scores = _linear(as_rows(as_float(X, _wide)), coefficients, intercepts)
    if scores.shape[1] == 1 and len(labels) == 2:
        return labels[(scores[:, 0] > 0).astype(int)], two_scores(scores, post_transform, 1 - scores)
    best = scores.argmax(1)
    return labels[best] if len(labels) else best, transformed(scores, post_transform)


def label_array(ints: Ints, strings: Strings) -> Array:
    """The labels of the classes"""
    return np.array(strings, object) if strings else np.array(ints or [], np.int64)


def two_scores(score: Array, post_transform: str, other: Array) -> Array:
    """Two columns for the one score s of the second class.

    The specification does not say which. Untransformed the first column is `other`. PROBIT, which reads probabilities,
    transforms (1 − s, s), any other transformation (−s, s).
    """
    firsts = {"NONE": other, "PROBIT": 1 - score}
    return transformed(np.concatenate([firsts.get(post_transform, -score), score], 1), post_transform)


def _linear(x: Array, coefficients: Floats, intercepts: Floats) -> Array:
    weights = np.array(coefficients, x.dtype).reshape(-1, x.shape[-1])
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
    x = as_rows(as_float(X, _wide))
    if n_supports:
        x = _kernel(x, np.array(support_vectors, x.dtype).reshape(n_supports, -1), kernel_type, kernel_params)
    y = (x @ np.array(coefficients, x.dtype) + x.dtype.type(rho[0]))[:, None]
    if one_class:
        y = np.where(y > 0, x.dtype.type(1), x.dtype.type(-1))
    return transformed(y, post_transform)


@kernel("SVMClassifier", domain=ML)
def svm_classifier(
    X: Array,
    *,
    classlabels_ints: Ints = None,
    classlabels_strings: Strings = None,
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
    """The class that wins most pairs, and the decision of each pair, or with prob_a and prob_b the probability of each class.

    Without vectors the class of the largest score, and the scores of the classes.
    """
    x, labels = as_rows(as_float(X, _wide)), label_array(classlabels_ints, classlabels_strings)
    if not vectors_per_class or not sum(vectors_per_class):
        scores = _linear(x, coefficients, rho[:1])
        return labels[scores.argmax(1)], transformed(scores, post_transform)
    classes = len(vectors_per_class)
    owner = np.repeat(np.arange(classes), vectors_per_class)
    K = _kernel(x, np.array(support_vectors, x.dtype).reshape(len(owner), -1), kernel_type, kernel_params)
    weights = np.array(coefficients, x.dtype).reshape(-1, len(owner))
    pairs = [(i, j) for i in range(classes) for j in range(i + 1, classes)]
    decisions, votes = [], np.zeros((len(x), classes), int)
    for (i, j), shift in zip(pairs, rho, strict=True):
        of_i, of_j = K[:, owner == i] @ weights[j - 1, owner == i], K[:, owner == j] @ weights[i, owner == j]
        decisions.append(of_i + of_j + x.dtype.type(shift))
        votes[np.arange(len(x)), np.where(decisions[-1] > 0, i, j)] += 1
    scores, label = np.stack(decisions, 1), labels[votes.argmax(1)]
    if prob_a:
        if prob_b is None or len(prob_a) != len(pairs) or len(prob_b) != len(pairs):
            raise ValueError(f"prob_a and prob_b need {len(pairs)} numbers each, one per pair of classes")
        fits = sigmoid(-(scores * np.array(prob_a, x.dtype) + np.array(prob_b, x.dtype)))
        return label, transformed(_coupled(fits, pairs, classes), post_transform)
    return label, two_scores(scores, post_transform, -scores) if len(pairs) == 1 else transformed(
        scores, post_transform
    )


def _coupled(fits: Array, pairs: list[tuple[int, int]], classes: int) -> Array:
    """The class probabilities p from the pair probabilities r(i, j) = P(i | i or j): least Σ (r(j, i)·pᵢ − r(i, j)·pⱼ)².

    Wu, Lin and Weng (2004), algorithm 2, with libsvm's bounds: r within 1e-7 of 0 and 1, at most max(100, classes)
    rounds, and the end where no equation is off by 0.005/classes. Each row ends by itself.
    """
    one = fits.dtype.type(1)
    r = np.zeros((len(fits), classes, classes), fits.dtype)
    for k, (i, j) in enumerate(pairs):
        r[:, i, j] = fits[:, k].clip(1e-7, one - one.dtype.type(1e-7))
        r[:, j, i] = 1 - r[:, i, j]
    Q = -np.swapaxes(r, 1, 2) * r
    diagonal = np.arange(classes)
    Q[:, diagonal, diagonal] = np.square(r).sum(1)
    result = np.full((len(fits), classes), one / classes)
    open_rows = np.arange(len(fits))
    for _ in range(max(100, classes)):
        p, q = result[open_rows], Q[open_rows]
        Qp = np.einsum("nij,nj->ni", q, p)
        pQp = (p * Qp).sum(1)
        going = np.abs(Qp - pQp[:, None]).max(1, initial=0) >= 0.005 / classes
        open_rows, p, q, Qp, pQp = open_rows[going], p[going], q[going], Qp[going], pQp[going]
        if not len(open_rows):
            break
        for t in range(classes):
            step = (pQp - Qp[:, t]) / q[:, t, t]
            p[:, t] += step
            pQp = (pQp + step * (step * q[:, t, t] + 2 * Qp[:, t])) / np.square(1 + step)
            Qp = (Qp + step[:, None] * q[:, t]) / (1 + step)[:, None]
            p /= (1 + step)[:, None]
        result[open_rows] = p
    return result


def _kernel(x: Array, vectors: Array, kernel_type: str, parameters: Floats) -> Array:
    """(samples, vectors)"""
    need(4 * len(x) * len(vectors) * x.itemsize)
    gamma, shift, degree = (*(parameters or ()), 0.0, 0.0, 0.0)[:3]
    match kernel_type:
        case "LINEAR":
            return np.asarray(x @ vectors.T)
        case "POLY":
            return np.asarray((gamma * (x @ vectors.T) + shift) ** np.asarray(degree, x.dtype))
        case "SIGMOID":
            return np.asarray(np.tanh(gamma * (x @ vectors.T) + shift))
        case "RBF":
            distances = [np.square(x - vector).sum(1) for vector in vectors]
            return np.asarray(np.exp(-gamma * np.stack(distances, 1)))
    raise ValueError(f"kernel_type={kernel_type!r} is not supported")


def transformed(scores: Array, post_transform: str) -> Array:
    """post_transform of the scores, row by row"""
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
    """Winitzki's approximation of the inverse of the normal distribution, as ONNX Runtime has it; NaN outside of 0 to 1"""
    x = 2 * p.astype(np.float64) - 1
    log = np.log1p(-np.square(x))
    v = 2 / (math.pi * _WINITZKI) + log / 2
    inner = -log / _WINITZKI / (v + np.sqrt(np.square(v) - log / _WINITZKI))
    return np.asarray(np.where(np.isinf(log), x * np.inf, np.sign(x) * np.sqrt(2 * inner)), p.dtype)
