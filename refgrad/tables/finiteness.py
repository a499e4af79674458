"""Operators through which a finite cotangent stays finite: their derivative is finite for all finite inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refgrad import traits

_STEEP = traits.FUNCTIONS - {"Atan", "Cos", "Erf", "Sin"} | {"Div", "Mod"}  # an infinite slope, or one that overflows
_ZERO_DIVISORS = {"LpNormalization", "MeanVarianceNormalization"}  # they may divide by 0
_NORMALIZATIONS = traits.NORMALIZATIONS - _ZERO_DIVISORS
# Other operators may have an infinite slope (Sqrt and Log at 0), or a graph.
_PRESERVING = (
    (traits.ELEMENTWISE - _STEEP)
    | traits.MOVING
    | traits.SIZES
    | traits.INDICES
    | traits.PRODUCTS
    | traits.RESAMPLING
    | traits.SOFTMAXES
    | traits.LOSSES
    | traits.RECURRENT
    | _NORMALIZATIONS
    | (traits.POOLS - {"GlobalLpPool", "LpPool"})  # roots
    | (traits.REDUCTIONS - {"ReduceL2", "ReduceLogSum", "ReduceProd"})  # a root, a logarithm, what overflows
    | {"Attention", "CumSum", "Dropout", "RotaryEmbedding"}
)
_DIVISORS = dict.fromkeys(_NORMALIZATIONS, "epsilon") | {"LRN": "bias"}  # not where it is set to 0


def preserves_finite(key: tuple[str, str], attributes: Mapping[str, Any]) -> bool:
    """True if finite cotangents of an operator's outputs imply finite ones of its inputs, except for overflow.

    :param key: the domain and the name of the operator.
    :param attributes: the attributes that a node sets.
    """
    return not key[0] and key[1] in _PRESERVING and attributes.get(_DIVISORS.get(key[1], ""), 1) > 0
