"""Cases of ONNX Runtime's forward operators (com.microsoft), a file per family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from refgrad.conformance.case import Case, node_case
from refgrad.protos.domains import MICROSOFT


def case(op_type: str, *inputs: np.ndarray | None, **options: Any) -> Case:
    """A node of com.microsoft, see `node_case`."""
    return node_case(op_type, *inputs, domain=MICROSOFT, **{"opset": 1} | options)


def drawer(seed: int = 0) -> Callable[..., np.ndarray]:
    """A function that draws float32 arrays of the shape it is given, the same ones in every process.

    No number is near 0, where the activations have kinks.
    """
    random = np.random.default_rng(seed)

    def floats(*shape: int) -> np.ndarray:
        values = random.standard_normal(shape) * 0.7
        return np.where(np.abs(values) < 0.02, 0.1, values).astype(np.float32)

    return floats


def array(values: list[Any]) -> np.ndarray:
    """As float32."""
    return np.array(values, np.float32)


def scalar(value: float) -> np.ndarray:
    """As float32, without axes."""
    return np.array(value, np.float32)
