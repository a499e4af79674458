"""Training of 16-bit weights: float32 master weights, and the loss scaling that float16 needs.

Micikevicius et al., "Mixed Precision Training" (2018).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from refgrad.builder.function import FunctionEmitter
from refgrad.errors import OptionError
from refgrad.protos.types import SIXTEEN_BIT
from refgrad.ranges import checked

SCALE, GOOD_STEPS, UPDATES = "loss_scale", "loss_scale.good_steps", "loss_scale.updates"
FINITE = "gradient_is_finite"
DYNAMIC = "dynamic"
LEAST = 1.0  # a gradient that overflows at a smaller scale overflows by itself
_FIRST, _MOST = 2.0**10, 2.0**24  # the paper needs 8 to 128; a larger one overflows in the first steps
_GROWTH = 2000  # good steps until the scale is doubled


def is_narrow(value: np.ndarray) -> bool:
    """True for float16 and bfloat16."""
    return helper.np_dtype_to_tensor_dtype(value.dtype) in SIXTEEN_BIT


def master(value: np.ndarray) -> np.ndarray:
    """The weight as it is trained: in float32 if it has 16 bits."""
    return value.astype(np.float32) if is_narrow(value) else value


def chosen_scale(given: float | str | None, weights: Mapping[str, np.ndarray]) -> float | str | None:
    """The loss scale: `given`, or by default "dynamic" if a weight is float16. None: gradients are not scaled.

    :raises OptionError: it is neither a positive number nor "dynamic".
    """
    if given is None:
        return DYNAMIC if any(value.dtype == np.float16 for value in weights.values()) else None
    if given == DYNAMIC:
        return DYNAMIC
    if isinstance(given, str):
        raise OptionError(f"loss_scale is 'dynamic' or a number above 0, not {given!r}.")
    return float(checked(SCALE, given))


def first_states(scale: float | str) -> dict[str, np.ndarray]:
    """The states of a dynamic scale: the scale, the good steps since the last overflow, and the updates."""
    if scale != DYNAMIC:
        return {}
    return {SCALE: np.array(_FIRST, np.float32), GOOD_STEPS: np.array(0), UPDATES: np.array(0)}


def unscaled(op: FunctionEmitter, slopes: Mapping[str, str]) -> dict[str, str]:
    """g / s of each gradient, where s is the loss scale."""
    return {name: op.Div(g, op.Cast(SCALE, to=op.type(g))) for name, g in slopes.items()}


def all_finite(op: FunctionEmitter, slopes: Mapping[str, str]) -> str:
    """A bool: Σ 0·g = 0. The product is NaN if g is not finite."""
    sums = [op.Cast(op.ReduceSum(op.Mul(g, 0.0), keepdims=0), to=TensorProto.FLOAT) for g in slopes.values()]
    return str(op.Equal(op.Sum(*sums) if len(sums) > 1 else sums[0], 0.0))


def next_states(op: FunctionEmitter, finite: str) -> dict[str, str]:
    """The scale and the count of good steps after a step whose gradients are finite, or not.

    The scale is halved if they are not, and doubled after 2000 good steps one after the other.
    """
    good = op.Where(finite, op.Add(GOOD_STEPS, 1), op.const(0))
    grows = op.Equal(op.Mod(op.Add(GOOD_STEPS, 1), _GROWTH), 0)
    grown = op.Where(grows, op.Min(op.Mul(SCALE, 2.0), _MOST), SCALE)
    return {SCALE: op.Where(finite, grown, op.Mul(SCALE, 0.5)), GOOD_STEPS: good}


def refuse_vanishing(optimizer: Any, weights: Mapping[str, np.ndarray]) -> None:
    """Refuse an ε that is 0 in the type of the weights: the update would divide by 0.

    :raises OptionError: ε is 0.
    """
    eps = getattr(optimizer, "eps", 0.0)
    for value in map(master, weights.values()):
        if eps and not np.asarray(eps, value.dtype):
            raise OptionError(
                f"eps={eps!r} of {type(optimizer).__name__} is 0 in {value.dtype}, the type of its states. Give a larger one."
            )
