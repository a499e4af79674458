"""Operators through which a finite cotangent stays finite: a forward value that is finite has a finite derivative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Overflow aside. An operator that is not here may have an infinite slope (Sqrt and Log at 0), or a graph.
_TAME = frozenset(
    ("", name)
    for name in (
        # element by element
        *("Abs", "Add", "And", "Atan", "BitwiseNot", "Cast", "CastLike", "Ceil", "Celu"),
        *("Clip", "Cos", "Dropout", "Elu", "Equal", "Erf", "Floor", "Gelu", "Greater"),
        *(
            "GreaterOrEqual",
            "HardSigmoid",
            "HardSwish",
            "Identity",
            "IsInf",
            "IsNaN",
            "LeakyRelu",
            "Less",
            "LessOrEqual",
        ),
        *("Max", "Mean", "Min", "Mish", "Mul", "Neg", "Not", "Or", "PRelu"),
        *("Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sub", "Sum", "Swish"),
        *("Tanh", "ThresholdedRelu", "Where", "Xor"),
        # products, convolutions, pooling
        *("Attention", "AveragePool", "Col2Im", "Conv", "ConvTranspose", "Einsum", "Gemm", "GlobalAveragePool"),
        *("GlobalMaxPool", "GRU", "LSTM", "MatMul", "MaxPool", "RNN", "Resize", "RotaryEmbedding"),
        # normalizations and losses
        *("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LRN"),
        *("LogSoftmax", "NegativeLogLikelihoodLoss", "RMSNormalization", "Softmax", "SoftmaxCrossEntropyLoss"),
        # reductions, shapes and indices
        *("ArgMax", "ArgMin", "Concat", "CumSum", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements"),
        *("GatherND", "NonZero", "Pad", "ReduceL1", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
        *("ReduceSum", "ReduceSumSquare", "Reshape", "Shape", "Size", "Slice", "SpaceToDepth", "Split", "Squeeze"),
        *("Tile", "TopK", "Transpose", "Trilu", "Unsqueeze"),
    )
)
_NORMALIZATIONS = (
    "BatchNormalization",
    "GroupNormalization",
    "InstanceNormalization",
    "LayerNormalization",
    "RMSNormalization",
)
_DIVISORS = {**dict.fromkeys(_NORMALIZATIONS, "epsilon"), "LRN": "bias"}  # not tame where it is set to 0


def is_tame(key: tuple[str, str], attributes: Mapping[str, Any]) -> bool:
    """Whether an operator, by its domain and name, is tame with the attributes that a node sets."""
    return key in _TAME and attributes.get(_DIVISORS.get(key[1], ""), 1) > 0
