"""The steps of training algorithms, ONNX's and ONNX Runtime's (com.microsoft), and what a training loop has around them.

They take each tensor that is trained, its gradient and what has been accumulated. ONNX Runtime's may write into their
inputs; here nothing does. m and v are the running averages of the gradient and of its square.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from onnx import helper

from refgrad.backends.numpy.kernels.operands import widened
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT, TRAINING

Array = np.ndarray


def _columns(arrays: tuple[Array, ...], parts: int) -> Iterator[tuple[Array, ...]]:
    """All tensors, all gradients, ... to (tensor, gradient, ...) for each tensor"""
    count = len(arrays) // parts
    return zip(*(arrays[k * count : (k + 1) * count] for k in range(parts)), strict=True)


def _rows(results: Sequence[tuple[Array, ...]], inputs: tuple[Array, ...]) -> tuple[Array, ...]:
    """The results of all tensors: first the new tensors, then the accumulated ones; each has the type of its tensor"""
    kinds = [x.dtype for x in inputs[: len(results)]]
    return tuple(
        np.asarray(value, kind) for row in zip(*results, strict=True) for value, kind in zip(row, kinds, strict=True)
    )


@kernel("Adagrad", domain=TRAINING)
def adagrad(
    R: Array, T: Array, *inputs: Array, decay_factor: float, epsilon: float, norm_coefficient: float
) -> tuple[Array, ...]:
    results = []
    for X, G, H in _columns(inputs, 3):
        g = G + norm_coefficient * X
        h = H + np.square(g)
        results.append((X - R / (1 + T * decay_factor) * g / (np.sqrt(h) + epsilon), h))
    return _rows(results, inputs)


@kernel("Adam", domain=TRAINING)
def adam(
    R: Array,
    T: Array,
    *inputs: Array,
    alpha: float,
    beta: float,
    epsilon: float,
    norm_coefficient: float,
    norm_coefficient_post: float,
) -> tuple[Array, ...]:
    steps = int(T.item())
    rate = R * np.sqrt(1 - beta**steps) / (1 - alpha**steps) if steps > 0 else R
    results = []
    for X, G, V, H in _columns(inputs, 4):
        g = G + norm_coefficient * X
        v = alpha * V + (1 - alpha) * g
        h = beta * H + (1 - beta) * np.square(g)
        results.append(((1 - norm_coefficient_post) * (X - rate * v / (np.sqrt(h) + epsilon)), v, h))
    return _rows(results, inputs)


@kernel("Momentum", domain=TRAINING)
def momentum(
    R: Array, T: Array, *inputs: Array, alpha: float, beta: float, mode: str, norm_coefficient: float
) -> tuple[Array, ...]:
    if mode not in ("standard", "nesterov"):
        raise ValueError(f"mode={mode!r} is not known; there are 'standard' and 'nesterov'")
    results = []
    for X, G, V in _columns(inputs, 3):
        g = G + norm_coefficient * X
        v = alpha * V + (beta if T.item() > 0 else 1.0) * g
        results.append((X - R * (g + alpha * v if mode == "nesterov" else v), v))
    return _rows(results, inputs)


@kernel("SGDOptimizer", domain=MICROSOFT, in_float32=True)
def sgd_optimizer(rate: Array, W: Array, G: Array) -> tuple[Array, Array]:
    """W − rate·G, and the step −rate·G"""
    step = -rate.reshape(()) * G
    return W + step, step


@kernel("SGDOptimizerV2", domain=MICROSOFT)
def sgd_optimizer_v2(
    rate: Array, weights: list[Array], gradients: list[Array], update: Array | None = None
) -> tuple[Array, list[Array]]:
    """W − rate·G for every tensor of a sequence, or nothing where `update` is false; whether it was done"""
    if not _is_set(update, True):
        return np.array(False), weights
    return np.array(True), [
        _like(widened(W) - widened(rate).reshape(()) * widened(G), W) for W, G in _paired(weights, gradients)
    ]


@kernel("AdamOptimizer", domain=MICROSOFT)
def adam_optimizer(
    rate: Array,
    step: Array,
    W: Array,
    G: Array,
    m: Array,
    v: Array,
    narrow: Array | None = None,
    loss_scale: Array | None = None,
    norm: Array | None = None,
    update: Array | None = None,
    *,
    alpha: float = 0.9,
    beta: float = 0.999,
    lambda_: float = 0.0,
    epsilon: float = 1e-8,
    max_norm_clip: float = 1.0,
    do_bias_correction: int = 1,
    weight_decay_mode: int = 0,
) -> tuple[Array | None, ...]:
    """The next step number, m, v, W, the step that W took, and W in the 16-bit type of `narrow` (Kingma and Ba 2015).

    The step is −rate·(m̂/(√v̂ + ε) + λ·W). With weight_decay_mode=1 it is −rate·√v_correction·m̂/(√v + ε), and then
    W − rate·λ·W. The gradient is divided by the loss scale, and by its norm where that is above `max_norm_clip`.
    """
    if not _is_set(update, True):
        return step, m, v, W, G, narrow
    g = widened(G) / _divisor(loss_scale, norm, max_norm_clip, W.dtype)
    r, w = widened(rate).reshape(()), widened(W)
    next_m, next_v = _moments(g, m, v, alpha, beta)
    m_correction, v_correction = _corrections(step, alpha, beta, do_bias_correction)
    if weight_decay_mode:
        move = r * (np.sqrt(v_correction) / m_correction) * next_m / (np.sqrt(next_v) + epsilon)
        move = move + r * lambda_ * (w - move)
    else:
        move = r * (next_m / m_correction / (np.sqrt(next_v / v_correction) + epsilon) + lambda_ * w)
    new = w - move
    half = None if narrow is None else new.astype(narrow.dtype)
    return step + 1, _like(next_m, m), _like(next_v, v), _like(new, W), _like(-move, G), half


@kernel("AdamWOptimizer", domain=MICROSOFT)
def adamw_optimizer(
    rate: Array,
    step: Array,
    weights: list[Array],
    gradients: list[Array],
    averages: list[Array],
    squares: list[Array],
    update: Array | None = None,
    *,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 1e-2,
    correct_bias: int = 1,
    adam_mode: int = 0,
) -> tuple[Array, list[Array], list[Array], list[Array]]:
    """True if it was done, and every W, m and v after a step of AdamW (Loshchilov and Hutter 2019).

    adam_mode=0: W·(1 − rate·decay), then − rate/m_correction·m/(√v/√v_correction + ε), as in torch. adam_mode=1: first
    − rate·√v_correction/m_correction·m/(√v + ε), then ·(1 − rate·decay), as in transformers.
    """
    if not _is_set(update, True):
        return np.array(False), weights, averages, squares
    m_correction, v_correction = _corrections(step, alpha, beta, correct_bias)
    r = widened(rate).reshape(())
    results: tuple[list[Array], list[Array], list[Array]] = ([], [], [])
    for W, G, m, v in _paired(weights, gradients, averages, squares):
        w = widened(W)
        next_m, next_v = _moments(widened(G), m, v, alpha, beta)
        if adam_mode:
            w = w - r * (np.sqrt(v_correction) / m_correction) * next_m / (np.sqrt(next_v) + epsilon)
            w = w - r * weight_decay * w
        else:
            w = w - r * weight_decay * w
            w = w - r / m_correction * next_m / (np.sqrt(next_v) / np.sqrt(v_correction) + epsilon)
        for result, value, like in zip(results, (w, next_m, next_v), (W, m, v), strict=True):
            result.append(_like(value, like))
    return np.array(True), *results


@kernel("LambOptimizer", domain=MICROSOFT)
def lamb_optimizer(
    update: Array | None = None,
    loss_scale: Array | None = None,
    norm: Array | None = None,
    rate: Array | None = None,
    step: Array | None = None,
    *groups: Array | None,
    alpha: Sequence[float] = (),
    beta: Sequence[float] = (),
    lambda_: Sequence[float] = (),
    epsilon: Sequence[float] = (),
    max_norm_clip: Sequence[float] = (),
    ratio_min: float = -np.inf,
    ratio_max: float = np.inf,
    do_bias_correction: int = 1,
) -> tuple[Array | None, ...]:
    """The next step number, and for each group of (W, G, m, v, W in 16 bits) the same after a step (You et al. 2020).

    The direction is d = m̂/(√v̂ + ε) + λ·W; W takes the step −rate·ratio·d, the ratio ‖W‖/‖d‖ held within
    ratio_min..ratio_max, and 1 where a norm is 0. Each group has its element of an attribute.
    """
    if not _is_set(update, True):
        return step, *groups
    if rate is None:
        raise ValueError("it needs the learning rate, the fourth input")
    r = widened(rate).reshape(())
    results: list[Array | None] = [None if step is None else step + 1]
    padded = (*groups, *[None] * (-len(groups) % 5))
    for i in range(0, len(padded), 5):
        W, G, m, v, narrow = padded[i : i + 5]
        if W is None or G is None or m is None or v is None:
            raise ValueError(f"group {i // 5} of its inputs lacks the weights, the gradient or a moment")
        a, b = _element(alpha, i // 5, 0.9), _element(beta, i // 5, 0.999)
        w = widened(W)
        g = widened(G) / _divisor(loss_scale, norm, _element(max_norm_clip, i // 5, 1.0), W.dtype)
        next_m, next_v = _moments(g, m, v, a, b)
        m_correction, v_correction = _corrections(step, a, b, do_bias_correction and step is not None)
        d = next_m / m_correction / (np.sqrt(next_v / v_correction) + _element(epsilon, i // 5, 1e-6))
        d = d + _element(lambda_, i // 5, 0.0) * w
        w_norm, d_norm = _length([w]), _length([d])
        ratio = np.clip(w_norm / d_norm, ratio_min, ratio_max) if w_norm and d_norm else 1.0
        new = w - r * ratio * d
        half = None if narrow is None else new.astype(narrow.dtype)
        results += [_like(new, W), _like(new - w, G), _like(next_m, m), _like(next_v, v), half]
    return tuple(results)


@kernel("InPlaceAccumulator", domain=MICROSOFT)
def in_place_accumulator(total: Array, value: Array, update: Array | None = None) -> Array:
    """Total + value, or the total where `update` is false"""
    return _like(widened(total) + widened(value), total) if _is_set(update, True) else total


@kernel("InPlaceAccumulatorV2", domain=MICROSOFT)
def in_place_accumulator_v2(total: Array, value: Array, overwrite: Array | None = None) -> tuple[Array, Array]:
    """True, and total + value, or the value alone where `overwrite` is true"""
    if _is_set(overwrite, False):
        return np.array([True]), np.broadcast_to(value, total.shape).astype(total.dtype)
    return np.array([True]), _like(widened(total) + widened(value), total)


@kernel("InplaceClipGradNorm", domain=MICROSOFT)
def inplace_clip_grad_norm(
    gradients: list[Array], *, max_norm: float = 1.0, norm_type: str = "fro"
) -> tuple[list[Array], ...]:
    """Every gradient times min(1, max_norm/(norm + 1e-6)), the norm over all of them"""
    if norm_type != "fro":
        raise ValueError(f"norm_type {norm_type!r} is not supported; there is 'fro'")
    factor = min(max_norm / (_length(gradients) + 1e-6), 1.0)
    return ([_like(widened(G) * factor, G) for G in gradients],)


@kernel("ReduceAllL2", domain=MICROSOFT, in_float32=True)
def reduce_all_l2(*xs: Array) -> Array:
    """√Σx² over every element of every input"""
    return np.asarray(_length(xs), xs[0].dtype)


@kernel("IsFinite", domain=MICROSOFT)
def is_finite(X: Array) -> Array:
    return np.asarray(np.isfinite(X))


@kernel("IsAllFinite", domain=MICROSOFT)
def is_all_finite(*xs: Array, isinf_only: int = 0, isnan_only: int = 0) -> Array:
    """True if every element of every input is finite; with an attribute only infinities or only NaN count"""
    if isinf_only and isnan_only:
        raise ValueError("isinf_only and isnan_only cannot both be 1")
    wrong = np.isinf if isinf_only else np.isnan if isnan_only else lambda x: ~np.isfinite(x)
    return np.array(not any(wrong(x).any() for x in xs))


@kernel("All", domain=MICROSOFT)
def all_(X: Array) -> Array:
    return np.array(X.all())


@kernel("MixedPrecisionScale", domain=MICROSOFT)
def mixed_precision_scale(scale: Array, *xs: Array, to: int, fuse_outputs: int = 0) -> tuple[Array, ...]:
    """scale·x of type `to` for every x, or all of them in one vector"""
    scaled = [(widened(x) * widened(scale).reshape(())).astype(helper.tensor_dtype_to_np_dtype(to)) for x in xs]
    return (np.concatenate([y.reshape(-1) for y in scaled]),) if fuse_outputs else tuple(scaled)


@kernel("Group", domain=MICROSOFT)
def group(*xs: object) -> Array:
    """True, once every input is there"""
    return np.array(True)


@kernel("PassThrough", domain=MICROSOFT)
def pass_through(*xs: Array) -> tuple[Array, ...]:
    """The inputs, once all are there"""
    return xs


@kernel("View", domain=MICROSOFT)
def view(x: Array, *shapes: Array) -> tuple[Array, ...]:
    """The elements of x in order, cut into tensors of the given shapes"""
    sizes = [int(np.prod(shape)) for shape in shapes]
    if sum(sizes) != x.size:
        raise ValueError(f"shapes of {sum(sizes)} elements do not view an input of {x.size}")
    parts = np.split(x.reshape(-1), np.cumsum(sizes)[:-1])
    return tuple(part.reshape(shape.tolist()) for part, shape in zip(parts, shapes, strict=True))


def _is_set(flag: Array | None, default: bool) -> bool:
    return default if flag is None else bool(flag.item())


def _like(value: Array, x: Array) -> Array:
    return np.asarray(value, x.dtype)


def _element(values: Sequence[float], i: int, default: float) -> float:
    return values[i] if i < len(values) else default


def _paired(*sequences: list[Array]) -> Iterator[tuple[Array, ...]]:
    lengths = [len(sequence) for sequence in sequences]
    if len(set(lengths)) > 1:
        raise ValueError(f"its sequences have {lengths} tensors; they need one for each that is trained")
    return zip(*sequences, strict=True)


def _moments(g: Array, m: Array, v: Array, alpha: float, beta: float) -> tuple[Array, Array]:
    return alpha * widened(m) + (1 - alpha) * g, beta * widened(v) + (1 - beta) * np.square(g)


def _corrections(step: Array | None, alpha: float, beta: float, wanted: int | bool) -> tuple[float, float]:
    """The divisors of m and v: the sums of the weights in their averages after `step` steps"""
    if step is None or not wanted:
        return 1.0, 1.0
    n = int(step.item())
    return 1 - alpha**n, 1 - beta**n


def _divisor(loss_scale: Array | None, norm: Array | None, limit: float, kind: np.dtype) -> Array:
    """The divisor of a gradient: the loss scale, times how far the norm without that scale is above `limit`"""
    scale = 1.0 if loss_scale is None else float(loss_scale.item())
    if norm is not None and float(norm.item()) / scale > limit:
        scale *= float(norm.item()) / scale / limit
    return np.asarray(scale, kind)


def _length(xs: Sequence[Array]) -> float:
    return float(np.sqrt(sum(float(np.sum(np.square(x.astype(np.float64)))) for x in xs)))
