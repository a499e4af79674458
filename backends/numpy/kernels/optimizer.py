"""The steps of training algorithms: each tensor that is trained with its gradient and what has been accumulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from refgrad.backends.numpy.registry import kernel

TRAINING = "ai.onnx.preview.training"
Array = np.ndarray


def _columns(arrays: tuple[Array, ...], parts: int) -> Iterator[tuple[Array, ...]]:
    """All tensors, all gradients, ... to (tensor, gradient, ...) for each tensor"""
    count = len(arrays) // parts
    return zip(*(arrays[k * count : (k + 1) * count] for k in range(parts)), strict=True)


def _rows(results: Sequence[tuple[Array, ...]], inputs: tuple[Array, ...]) -> tuple[Array, ...]:
    """The results of all tensors: first what they became, then what is accumulated; each of its tensor's type"""
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
    results = []
    for X, G, V in _columns(inputs, 3):
        g = G + norm_coefficient * X
        v = alpha * V + (beta if T.item() > 0 else 1.0) * g
        results.append((X - R * (g + alpha * v if mode == "nesterov" else v), v))
    return _rows(results, inputs)
