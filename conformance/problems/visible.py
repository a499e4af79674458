"""Feeds at which rounding does not hide the gradient.

A model that answers random numbers with 0 or 1 has gradients there that are smaller than what its type can tell apart. With
smaller numbers it is often less sure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.case import is_float
from refgrad.conformance.problems.feeds import widened
from refgrad.errors import BackendError

_SCALES = (0.1, 0.03, 0.01)  # of random feeds
_HIDDEN = 1e-2  # the error of a gradient, relative to its norm, that leaves nothing to compare
_MANY = 0.5  # of the gradients


def visible(
    gradient: ModelProto, names: Collection[str], feeds: Mapping[str, Any], cotangents: Mapping[str, np.ndarray]
) -> tuple[dict[str, Any], float]:
    """The feeds, times a number if rounding hides most gradients otherwise; and the number.

    :param gradient: a gradient model. :param names: of the gradients that it returns.
    """
    try:
        narrow, wide = NumpyBackend().prepare(gradient), NumpyBackend().prepare(gradient, precision="float64")
    except BackendError:  # the interpreter does not know an operator
        return dict(feeds), 1.0

    def hidden(fed: Mapping[str, Any]) -> float:
        """The share of the gradients that rounding hides, of those that are not 0; 1 if none is known."""
        try:
            results = narrow.run({**fed, **cotangents}, names)
            expected = wide.run(widened({**fed, **cotangents}), names)
        except BackendError:
            return 1.0
        if not all(np.all(np.isfinite(expected[name])) for name in names):
            return 1.0
        norms = {name: float(np.linalg.norm(expected[name])) for name in names}
        known = [name for name, norm in norms.items() if norm]
        lost = [name for name in known if not _error(results[name], expected[name]) <= _HIDDEN * norms[name]]
        return len(lost) / len(known) if known else 1.0

    floats = [name for name, feed in feeds.items() if is_float(feed)]
    best, scale_of_best = dict(feeds), 1.0
    share = hidden(best) if floats else 0.0
    for scale in _SCALES:
        if share <= _MANY:
            break
        smaller = dict(feeds) | {name: np.asarray(feeds[name] * scale, feeds[name].dtype) for name in floats}
        if (other := hidden(smaller)) < share:
            best, scale_of_best, share = smaller, scale, other
    return best, scale_of_best


def _error(result: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(result - expected)) if result.shape == expected.shape else np.inf
