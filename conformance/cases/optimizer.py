"""Cases of ai.onnx.preview.training: one and two tensors, in the first step and later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.protos.domains import TRAINING

SETTINGS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("Adagrad", 1, {}),
    ("Adagrad", 1, {"decay_factor": 0.1, "epsilon": 0.01, "norm_coefficient": 0.2}),
    ("Adam", 2, {}),
    ("Adam", 2, {"alpha": 0.7, "beta": 0.8, "epsilon": 0.01, "norm_coefficient": 0.2, "norm_coefficient_post": 0.1}),
    ("Momentum", 1, {"alpha": 0.8, "beta": 0.6, "mode": "standard", "norm_coefficient": 0.2}),
    ("Momentum", 1, {"alpha": 0.8, "beta": 0.6, "mode": "nesterov", "norm_coefficient": 0.0}),
)


def cases() -> Iterator[Case]:
    """Every operator and attribute; accumulated squares are above 0."""
    for shapes in SHAPES:
        for op_type, accumulated, attributes in SETTINGS:
            for step, sizes in ((0, [(2, 3)]), (3, [(2,), (3, 1)])):
                rng = np.random.default_rng(step)
                tensors = [rng.standard_normal(size) for _ in range(1 + accumulated) for size in sizes]
                squares = [rng.uniform(0.5, 1.5, size) for size in sizes]
                if op_type == "Momentum":
                    squares = [rng.standard_normal(size) for size in sizes]
                arrays = [np.asarray(x, np.float32) for x in (*tensors, *squares)]
                rate = np.array(0.3, np.float32), np.array(step)
                count = len(sizes) * (1 + accumulated)
                case = node_case(
                    op_type, *rate, *arrays, domain=TRAINING, opset=1, outputs=count, shapes=shapes, **attributes
                )
                yield case
