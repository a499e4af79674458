"""Strategies of ai.onnx.preview.training. Accumulated squares are above 0."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, Shape, strategy
from refgrad.protos.domains import TRAINING


@strategy(f"{TRAINING}.Adagrad")
def adagrad(d: Drawing) -> Case:
    """One tensor or two, in the first step and later."""
    return _step(d, 0, 1, decay_factor=d.pick(None, 0.1), epsilon=d.pick(None, 0.01))


@strategy(f"{TRAINING}.Adam")
def adam(d: Drawing) -> Case:
    """One tensor or two, in the first step and later."""
    rates = {"alpha": d.pick(None, 0.7), "beta": d.pick(None, 0.8), "epsilon": d.pick(None, 0.01)}
    return _step(d, 1, 1, norm_coefficient_post=d.pick(None, 0.1), **rates)


@strategy(f"{TRAINING}.Momentum")
def momentum(d: Drawing) -> Case:
    """One tensor or two, in the first step and later."""
    return _step(d, 1, 0, mode=d.pick("standard", "nesterov"), alpha=d.pick(0.8, 0.0), beta=d.pick(0.6, 1.0))


def _step(d: Drawing, momenta: int, squares: int, **attributes: Any) -> Case:
    """A step on one or two tensors, each with `momenta` sums of its gradients and `squares` sums of their squares."""
    sizes: list[Shape] = [d.shape(0, 2, size=3) for _ in range(d.integer(1, 2))]
    tensors = [d.floats(size) for _ in range(2 + momenta) for size in sizes]
    tensors += [d.floats(size, 0.5, 2) for _ in range(squares) for size in sizes]
    rate, step = d.scalar(0.25), np.array(d.pick(0, 1, 3), np.int64)
    norm = d.pick(0.0, 0.2) if d.op_type == "Momentum" else d.pick(None, 0.2)
    count = len(sizes) * (1 + momenta + squares)
    return d.case(rate, step, *tensors, outputs=count, norm_coefficient=norm, **attributes)
