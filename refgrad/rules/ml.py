"""The smooth operators of ai.onnx.ml, each through a function body in ai.onnx operators: results are float, whatever X is.

Where the specification leaves a choice, the body follows ONNX Runtime: the norm MAX divides by the largest element
instead of the largest absolute one, and PROBIT is Winitzki's approximation of the inverse of the normal distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.protos.domains import ML
from refgrad.tables.definitions import UnsupportedFormError, body
from refgrad.tables.registry import NO_DERIVATIVE

Ints = Sequence[int]
Floats = Sequence[float]
Strings = Sequence[str]
_WINITZKI = 0.147

for _name, _reason in {
    "CastMap": "its input is a map, which is no tensor",
    "DictVectorizer": "its input is a map, which is no tensor",
    "ZipMap": "its results are maps, which are no tensors: save the model without it",
}.items():
    NO_DERIVATIVE[ML, _name] = _reason


@body("Scaler", "Y", domain=ML)
def scaler(op: FunctionEmitter, X: str, *, offset: Floats | None = None, scale: Floats | None = None) -> str:
    """(X − offset)·scale"""
    y = _float(op, X)
    if offset:
        y = op.Sub(y, _constant(op, offset))
    return op.Mul(y, _constant(op, scale)) if scale else y


@body("Normalizer", "Y", domain=ML)
def normalizer(op: FunctionEmitter, X: str, *, norm: str = "MAX") -> str:
    """X divided by the norm of its row: max X, Σ|X| or √ΣX²; X itself where that is 0"""
    x = _float(op, X)
    if norm == "MAX":
        size = _largest(op, x, -1)
    elif norm in ("L1", "L2"):
        size = op.ReduceSum(op.Abs(x) if norm == "L1" else op.Mul(x, x), [-1], keepdims=1)
    else:
        raise UnsupportedFormError(f"its norm {norm!r} is not known; there are MAX, L1 and L2")
    size = op.Where(op.Equal(size, op.const(0.0, like=x)), op.const(1.0, like=x), size)
    return op.Div(x, op.Sqrt(size) if norm == "L2" else size)


@body("Imputer", "Y", domain=ML)
def imputer(
    op: FunctionEmitter,
    X: str,
    *,
    imputed_value_floats: Floats | None = None,
    imputed_value_int64s: Ints | None = None,
    replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> str:
    """X where it is not the value to replace, which may be NaN; a constant elsewhere"""
    if not imputed_value_floats:
        raise UnsupportedFormError("it has no imputed_value_floats, which an input of floats needs")
    missing = op.IsNaN(X) if math.isnan(replaced_value_float) else op.Equal(X, op.const(replaced_value_float, like=X))
    return op.Where(missing, op.CastLike(_constant(op, imputed_value_floats), X), X)


@body("FeatureVectorizer", "Y", domain=ML)
def feature_vectorizer(op: FunctionEmitter, *X: str, inputdimensions: Ints | None = None) -> str:
    """The columns of all inputs side by side, each input cut or filled up with 0 to its number in inputdimensions"""
    parts = []
    for k, x in enumerate(X):
        _matrix(op, x)
        part = _float(op, x)
        if inputdimensions:
            part = op.Slice(part, [0], [inputdimensions[k]], [1])
            lacking = op.Sub([inputdimensions[k]], op.Shape(part, start=1, end=2))
            part = op.Pad(part, op.Concat(op.const(np.zeros(3, np.int64)), lacking, axis=0))
        parts.append(part)
    return op.Concat(*parts, axis=1)


@body("ArrayFeatureExtractor", "Z", domain=ML, others=("Y",))
def array_feature_extractor(op: FunctionEmitter, X: str, Y: str) -> str:
    """The elements of X at the indices Y along the last axis"""
    rank = op.rank(X)
    if rank is None:
        raise UnsupportedFormError("the rank of its input X is unknown; add it to value_info")
    taken = op.Gather(X, op.Reshape(Y, [-1]), axis=-1)
    return str(op.Unsqueeze(taken, [0]) if rank == 1 else taken)


@body("LinearRegressor", "Y", domain=ML)
def linear_regressor(
    op: FunctionEmitter,
    X: str,
    *,
    coefficients: Floats | None = None,
    intercepts: Floats | None = None,
    post_transform: str = "NONE",
    targets: int = 1,
) -> str:
    """post_transform(X·Wᵀ + b), one column per target"""
    return _transformed(op, _linear(op, X, coefficients, intercepts, targets), post_transform, targets)


@body("LinearClassifier", "Y", "Z", domain=ML, others=("Y",))
def linear_classifier(
    op: FunctionEmitter,
    X: str,
    *,
    classlabels_ints: Ints | None = None,
    classlabels_strings: Strings | None = None,
    coefficients: Floats,
    intercepts: Floats | None = None,
    multi_class: int = 0,
    post_transform: str = "NONE",
) -> tuple[str, str]:
    """Z = post_transform(X·Wᵀ + b), one column per class; for one row s and two classes (1 − s, s), or σ(∓s) for LOGISTIC"""
    settings = {
        "classlabels_ints": classlabels_ints,
        "classlabels_strings": classlabels_strings,
        "coefficients": coefficients,
        "intercepts": intercepts,
        "multi_class": multi_class,
        "post_transform": post_transform,
    }
    label = op.emit("LinearClassifier", ML, (X,), 2, settings)[0]
    classes = len(classlabels_ints or classlabels_strings or ())
    rows = len(intercepts or ()) or classes
    scores = _linear(op, X, coefficients, intercepts, rows)
    if rows == 1 and classes == 2:
        return label, _of_two(op, scores, post_transform, op.Sub(op.const(1.0, like=scores), scores))
    return label, _transformed(op, scores, post_transform, rows)


def _of_two(op: FunctionEmitter, score: str, post_transform: str, other: str) -> str:
    """The scores of two classes, where only the score of the second is computed."""
    if post_transform == "LOGISTIC":
        return op.Sigmoid(op.Concat(op.Neg(score), score, axis=1))
    if post_transform != "NONE":
        raise UnsupportedFormError(
            f"runtimes disagree on post_transform={post_transform} of one score for two classes; compute both scores"
        )
    return op.Concat(other, score, axis=1)


def _linear(op: FunctionEmitter, X: str, coefficients: Floats | None, intercepts: Floats | None, rows: int) -> str:
    _matrix(op, X)
    if not coefficients or not rows or len(coefficients) % rows:
        raise UnsupportedFormError(f"its {len(coefficients or ())} coefficients are not {rows} rows of equal length")
    weights = np.array(coefficients, np.float32).reshape(rows, -1).T
    scores = op.MatMul(_float(op, X), op.const(np.ascontiguousarray(weights)))
    return op.Add(scores, _constant(op, intercepts)) if intercepts else str(scores)


@body("SVMRegressor", "Y", domain=ML)
def svm_regressor(
    op: FunctionEmitter,
    X: str,
    *,
    coefficients: Floats,
    kernel_params: Floats | None = None,
    kernel_type: str = "LINEAR",
    n_supports: int = 0,
    one_class: int = 0,
    post_transform: str = "NONE",
    rho: Floats,
    support_vectors: Floats | None = None,
) -> str:
    """Σₖ cₖ·K(X, sₖ) + ρ over the support vectors, X·c + ρ without any; with one_class its sign, whose derivative is 0"""
    x = _float(op, X)
    _matrix(op, X)
    if n_supports:
        x = _kernel(op, x, support_vectors or (), n_supports, kernel_type, kernel_params)
    column = op.const(np.array(coefficients, np.float32).reshape(-1, 1))
    y = op.Add(op.MatMul(x, column), _constant(op, rho[:1]))
    if one_class:
        y = op.Where(op.Greater(y, op.const(0.0, like=x)), op.const(1.0, like=x), op.const(-1.0, like=x))
    return _transformed(op, y, post_transform, 1)


@body("SVMClassifier", "Y", "Z", domain=ML, others=("Y",))
def svm_classifier(
    op: FunctionEmitter,
    X: str,
    *,
    classlabels_ints: Ints | None = None,
    classlabels_strings: Strings | None = None,
    coefficients: Floats,
    kernel_params: Floats | None = None,
    kernel_type: str = "LINEAR",
    post_transform: str = "NONE",
    prob_a: Floats | None = None,
    prob_b: Floats | None = None,
    rho: Floats,
    support_vectors: Floats | None = None,
    vectors_per_class: Ints | None = None,
) -> tuple[str, str]:
    """Z = post_transform of the decision d of each pair of classes, (−d, d) for one pair; d = Σₖ cₖ·K(X, sₖ) + ρ"""
    settings = {
        "classlabels_ints": classlabels_ints,
        "classlabels_strings": classlabels_strings,
        "coefficients": coefficients,
        "kernel_params": kernel_params,
        "kernel_type": kernel_type,
        "post_transform": post_transform,
        "prob_a": prob_a,
        "prob_b": prob_b,
        "rho": rho,
        "support_vectors": support_vectors,
        "vectors_per_class": vectors_per_class,
    }
    label = op.emit("SVMClassifier", ML, (X,), 2, settings)[0]
    _matrix(op, X)
    x = _float(op, X)
    total = sum(vectors_per_class or ())
    if not total:
        classes = max(len(classlabels_ints or classlabels_strings or ()), 1)
        return label, _transformed(op, _linear(op, X, coefficients, list(rho[:1]), classes), post_transform, classes)
    if prob_a:
        raise UnsupportedFormError(
            "its probabilities come out of an iteration that stops at a tolerance, so they are not smooth; "
            "differentiate the decision values: export SVC(probability=False), which has no prob_a and prob_b"
        )
    assert vectors_per_class is not None
    weights = _pairs(np.array(coefficients, np.float32).reshape(-1, total), vectors_per_class)
    K = _kernel(op, x, support_vectors or (), total, kernel_type, kernel_params)
    scores = op.Add(op.MatMul(K, op.const(weights)), _constant(op, rho))
    if weights.shape[1] == 1:
        return label, _of_two(op, scores, post_transform, op.Neg(scores))
    return label, _transformed(op, scores, post_transform, weights.shape[1])


def _pairs(coefficients: np.ndarray, sizes: Ints) -> np.ndarray:
    """(classes − 1, vectors) to (vectors, pairs): for a pair i < j the vectors of i have row j − 1, the vectors of j row i."""
    ends = np.cumsum(sizes)
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    columns = []
    for i in range(len(sizes)):
        for j in range(i + 1, len(sizes)):
            column = np.zeros(coefficients.shape[1], np.float32)
            column[parts[i]] = coefficients[j - 1, parts[i]]
            column[parts[j]] = coefficients[i, parts[j]]
            columns.append(column)
    return np.stack(columns, 1)


def _kernel(
    op: FunctionEmitter, x: str, vectors: Floats, count: int, kernel_type: str, parameters: Floats | None
) -> str:
    """K(x, s) of every row of x and every support vector s; the parameters are γ, c and the degree."""
    gamma, shift, degree = (*(parameters or ()), 0.0, 0.0, 0.0)[:3]
    s = np.array(vectors, np.float32).reshape(count, -1)
    if kernel_type == "RBF":
        difference = op.Sub(op.Unsqueeze(x, [1]), op.const(s))
        square = op.ReduceSum(op.Mul(difference, difference), [2], keepdims=0)
        return op.Exp(op.Mul(square, -gamma))
    product = op.MatMul(x, op.const(np.ascontiguousarray(s.T)))
    if kernel_type == "LINEAR":
        return str(product)
    affine = op.Add(op.Mul(product, gamma), op.const(shift, like=x))
    if kernel_type == "POLY":
        return op.Pow(affine, op.const(degree, like=x))
    if kernel_type == "SIGMOID":
        return op.Tanh(affine)
    raise UnsupportedFormError(f"its kernel_type {kernel_type!r} is not known; there are LINEAR, POLY, RBF and SIGMOID")


def _transformed(op: FunctionEmitter, scores: str, post_transform: str, columns: int) -> str:
    match post_transform:
        case "NONE":
            return scores
        case "LOGISTIC":
            return op.Sigmoid(scores)
        case "SOFTMAX":
            return op.Softmax(scores, axis=1)
        case "SOFTMAX_ZERO":  # a score of 0, to 1e-7, stays about 0 and does not count
            zero = op.Not(op.Greater(op.Abs(scores), op.const(1e-7, like=scores)))
            largest = _largest(op, scores, 1)
            powers = op.Where(zero, op.Mul(scores, op.Exp(op.Neg(largest))), op.Exp(op.Sub(scores, largest)))
            size = op.ReduceSum(powers, [1], keepdims=1)
            none = op.Equal(size, op.const(0.0, like=scores))
            shares = op.Div(powers, op.Where(none, op.const(1.0, like=scores), size))
            return op.Where(none, op.const(0.5, like=scores), shares)
        case "PROBIT":
            return _probit(op, scores)
    raise UnsupportedFormError(
        f"its post_transform {post_transform!r} is not known; there are NONE, SOFTMAX, LOGISTIC, SOFTMAX_ZERO and PROBIT"
    )


def _probit(op: FunctionEmitter, p: str) -> str:
    """√2·erf⁻¹(x) at x = 2p − 1: with L = log(1 − x²) and v = 2/(0.147π) + L/2, erf⁻¹² = √(v² − L/0.147) − v.

    It is written as x²·q/(0.147·(v + √...)) with q = −L/x², which is 1 + x²/2 near 0: smooth there, and without a
    difference.
    """
    x = op.Sub(op.Mul(p, 2.0), op.const(1.0, like=p))
    square = op.Mul(x, x)
    small = op.Less(square, op.const(1e-6, like=p))
    guarded = op.Where(small, op.const(0.25, like=p), square)
    log = op.Log(op.Sub(op.const(1.0, like=p), guarded))
    ratio = op.Where(small, op.Add(op.Mul(square, 0.5), op.const(1.0, like=p)), op.Neg(op.Div(log, guarded)))
    log = op.Neg(op.Mul(square, ratio))
    v = op.Add(op.Mul(log, 0.5), op.const(2 / (math.pi * _WINITZKI), like=p))
    root = op.Sqrt(op.Sub(op.Mul(v, v), op.Mul(log, 1 / _WINITZKI)))
    scaled = op.Sqrt(op.Div(ratio, op.Mul(op.Add(v, root), _WINITZKI)))
    return op.Mul(op.Mul(x, scaled), math.sqrt(2))


def _largest(op: FunctionEmitter, x: str, axis: int) -> str:
    return op.ReduceMax(x, [axis]) if op.opset >= 18 else op.ReduceMax(x, axes=[axis])


def _float(op: FunctionEmitter, X: str) -> str:
    return X if op.type(X) == TensorProto.FLOAT else op.Cast(X, to=TensorProto.FLOAT)


def _constant(op: FunctionEmitter, values: Floats) -> str:
    return op.const(np.array(values, np.float32))


def _matrix(op: FunctionEmitter, X: str) -> None:
    if op.rank(X) not in (None, 2):
        raise UnsupportedFormError(f"its input has rank {op.rank(X)}; only matrices are covered, one row per sample")
