"""ONNX Runtime's operators that take elements by their indices."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_indices
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("GatherND", domain=MICROSOFT, fresh=True)
def gather_nd(data: Array, indices: Array) -> Array:
    """What NumPy indexes with each row of indices"""
    if not indices.ndim or not data.ndim or indices.shape[-1] > data.ndim:
        raise ValueError(
            f"indices {list(indices.shape)} do not fit data {list(data.shape)}: their last axis names axes of it"
        )
    columns = [check_indices(indices[..., k], n) for k, n in enumerate(data.shape[: indices.shape[-1]])]
    return np.array(data[tuple(columns)] if columns else np.broadcast_to(data, (*indices.shape[:-1], *data.shape)))


@kernel("Unique", domain=MICROSOFT, fresh=True)
def unique(x: Array) -> tuple[Array, Array, Array]:
    """The elements in a dictionary, which keeps them as they came"""
    if x.ndim != 1:
        raise ValueError(f"x has rank {x.ndim}; it has one axis")
    number: dict[object, int] = {}
    idx = np.array([number.setdefault(value, len(number)) for value in x.tolist()], np.int64)
    counts = np.bincount(idx, minlength=len(number))
    first = np.array([int(np.flatnonzero(idx == k)[0]) for k in range(len(number))], np.int64)
    return x[first], idx, counts.astype(np.int64)
