"""Random numbers: the same for the same seed and in every precision, since they are drawn in double and then rounded."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from refgrad.backends.numpy.registry import kernel


def _generator(seed: float | None) -> np.random.Generator:
    """A generator for any seed: its bits are a number. A node without one is given a seed when it is bound."""
    return np.random.Generator(np.random.PCG64(int(np.float64(seed or 0).view(np.uint64))))


def _type(dtype: int | None, like: np.dtype) -> np.dtype:
    """The type of the result, a float."""
    found = like if dtype is None else helper.tensor_dtype_to_np_dtype(dtype)
    if found.kind in "biuOc":
        raise ValueError(f"random numbers cannot be {found}; dtype is float16, bfloat16, float or double")
    return found


@kernel("RandomNormal", fresh=True)
def random_normal(*, shape: list[int], dtype: int, mean: float, scale: float, seed: float | None = None) -> np.ndarray:
    values = mean + scale * _generator(seed).standard_normal(shape)
    return np.asarray(values).astype(_type(dtype, np.dtype(np.float32)), copy=False)


@kernel("RandomNormalLike", fresh=True)
def random_normal_like(
    x: np.ndarray, *, dtype: int | None = None, mean: float, scale: float, seed: float | None = None
) -> np.ndarray:
    values = mean + scale * _generator(seed).standard_normal(x.shape)
    return np.asarray(values).astype(_type(dtype, x.dtype), copy=False)


@kernel("RandomUniform", fresh=True)
def random_uniform(*, shape: list[int], dtype: int, low: float, high: float, seed: float | None = None) -> np.ndarray:
    values = low + (high - low) * _generator(seed).random(shape)
    return np.asarray(values).astype(_type(dtype, np.dtype(np.float32)), copy=False)


@kernel("RandomUniformLike", fresh=True)
def random_uniform_like(
    x: np.ndarray, *, dtype: int | None = None, low: float, high: float, seed: float | None = None
) -> np.ndarray:
    values = low + (high - low) * _generator(seed).random(x.shape)
    return np.asarray(values).astype(_type(dtype, x.dtype), copy=False)


@kernel("Bernoulli", fresh=True)
def bernoulli(p: np.ndarray, *, dtype: int | None = None, seed: float | None = None) -> np.ndarray:
    """1 with probability p, else 0. (The body in onnx draws 1 with probability 1 − p.)"""
    result = p.dtype if dtype is None else helper.tensor_dtype_to_np_dtype(dtype)
    return np.asarray(_generator(seed).random(p.shape) < p).astype(result)


@kernel("Multinomial", fresh=True)
def multinomial(
    logits: np.ndarray, *, dtype: int = TensorProto.INT32, sample_size: int, seed: float | None = None
) -> np.ndarray:
    """Classes (batch, sample_size), class c of a row drawn with probability softmax(row)[c]: where u meets the running sum."""
    rows, classes = logits.shape
    if not classes:
        raise ValueError(f"there is no class to draw: the input has the shape {list(logits.shape)}")
    wide = logits.astype(np.float64)
    total = np.cumsum(np.exp(wide - wide.max(1, keepdims=True)), 1)
    total /= total[:, -1:]
    number = np.arange(rows)[:, np.newaxis]
    u = _generator(seed).random((rows, sample_size)) + number
    # One search for all rows: row r has the values from r to r + 1, which u, rounded, must not reach.
    flat = np.searchsorted((total + number).reshape(-1), np.minimum(u, np.nextafter(number + 1.0, 0)), side="right")
    return np.asarray(flat.reshape(u.shape) - number * classes).astype(helper.tensor_dtype_to_np_dtype(dtype))
