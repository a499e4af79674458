"""Cases of every family with empty tensors and with scalars, which are rare in the other tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.protos.domains import ML, TRAINING

NEWEST = 21  # the last opset that every runtime under test knows


def x(*shape: int) -> np.ndarray:
    """Positive floats, all different."""
    return (0.5 + 0.1 * np.random.default_rng(3).permutation(int(np.prod(shape))).reshape(shape)).astype(np.float32)


def i(*values: int, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Indices."""
    return np.array(values, np.int64).reshape(shape if shape is not None else (len(values),))


def _number(value: float) -> np.ndarray:
    return np.array(value, np.float32)


_NO_INDEX = i(shape=(0, 2))
_FALSE = np.array(False)

_ML = {"domain": ML, "opset": 1}
_TRAINING = {"domain": TRAINING, "opset": 1, "norm_coefficient": 0.1, "wrt": None}
_MICROSOFT = {"domain": "com.microsoft", "opset": 1}

EMPTY: tuple[tuple[str, tuple[np.ndarray | None, ...], dict[str, Any]], ...] = (
    ("PRelu", (x(0, 3), x(3)), {}),
    ("Cast", (x(0, 3),), {"to": TensorProto.DOUBLE}),
    ("CastLike", (x(0, 3), np.ones(1, np.float64)), {"wrt": ["input"]}),
    ("CumSum", (x(0, 3), i(1, shape=())), {}),
    ("CumSum", (x(2, 0), i(1, shape=())), {"exclusive": 1}),
    ("Dropout", (x(0, 3), _number(0.5), _FALSE), {"wrt": ["data"]}),
    ("Softmax", (x(2, 0),), {}),
    ("LogSoftmax", (x(2, 0),), {}),
    ("Conv", (x(0, 2, 5), x(3, 2, 3), x(3)), {"kernel_shape": [3]}),
    ("ConvTranspose", (x(0, 2, 4), x(2, 3, 3), x(3)), {"strides": [2], "kernel_shape": [3]}),
    ("Gather", (x(0, 3), i(0, 2)), {"axis": 1}),
    ("Gather", (x(3, 2), i(shape=(0,))), {}),
    ("GatherElements", (x(3, 2), _NO_INDEX), {}),
    ("GatherElements", (x(0, 2), _NO_INDEX), {}),
    ("GatherND", (x(3, 2), i(shape=(0, 1))), {}),
    *(
        ("ScatterElements", (x(3, 2), _NO_INDEX, x(0, 2)), {"reduction": r})
        for r in ("none", "add", "mul", "max", "min")
    ),
    *(
        ("ScatterND", (x(3, 2), i(shape=(0, 1)), x(0, 2)), {"reduction": r})
        for r in ("none", "add", "mul", "max", "min")
    ),
    ("Compress", (x(0, 3), np.array([True, False, True])), {"axis": 1}),
    ("Compress", (x(3, 2), np.zeros(3, bool)), {"axis": 0}),
    ("Compress", (x(3, 2), np.zeros(6, bool)), {}),
    ("TopK", (x(0, 3), i(2)), {"outputs": 2}),
    ("TopK", (x(2, 3), i(0)), {"outputs": 2}),
    ("OneHot", (i(shape=(0,)), i(3, shape=()), x(2)), {}),
    ("Einsum", (x(0, 3), x(3, 2)), {"equation": "ij,jk->ik"}),
    ("Einsum", (x(2, 0), x(0, 3)), {"equation": "ij,jk->ik"}),
    ("MatMul", (x(2, 0), x(0, 3)), {}),
    ("MatMul", (x(0, 2, 3), x(3, 2)), {}),
    ("Gemm", (x(0, 3), x(3, 2), x(2)), {}),
    ("SoftmaxCrossEntropyLoss", (x(0, 3), i(shape=(0,))), {"reduction": "none"}),
    ("SoftmaxCrossEntropyLoss", (x(0, 3), i(shape=(0,))), {"reduction": "sum"}),
    ("NegativeLogLikelihoodLoss", (x(0, 3), i(shape=(0,))), {"reduction": "sum"}),
    ("NegativeLogLikelihoodLoss", (x(0, 3), i(shape=(0,)), x(3)), {"reduction": "none"}),
    ("InstanceNormalization", (x(0, 3, 4), x(3), x(3)), {}),
    ("LayerNormalization", (x(0, 3), x(3), x(3)), {"axis": -1}),
    ("BatchNormalization", (x(0, 3, 2), x(3), x(3), x(3), x(3)), {}),
    ("LpNormalization", (x(0, 3),), {}),
    ("LRN", (x(0, 3, 4),), {"size": 3}),
    ("LpPool", (x(0, 2, 5),), {"kernel_shape": [2], "opset": 22}),
    ("GlobalLpPool", (x(0, 2, 5),), {}),
    ("Flatten", (x(0, 3, 2),), {"axis": 1}),
    ("Squeeze", (x(0, 1, 3), i(1)), {}),
    ("Unsqueeze", (x(0, 3), i(1)), {}),
    ("Transpose", (x(0, 3, 2),), {"perm": [2, 0, 1]}),
    ("Concat", (x(0, 3), x(2, 3)), {"axis": 0}),
    ("Split", (x(0, 4), i(1, 3)), {"outputs": 2, "axis": 1}),
    ("Split", (x(4, 2), i(4, 0)), {"outputs": 2}),
    ("Expand", (x(0, 1), i(0, 3)), {}),
    ("Slice", (x(4, 2), i(3), i(1)), {}),
    ("Trilu", (x(2, 0, 3),), {}),
    ("ReverseSequence", (x(4, 0, 2), i(shape=(0,))), {}),
    ("SpaceToDepth", (x(0, 1, 4, 4),), {"blocksize": 2}),
    ("DepthToSpace", (x(0, 4, 2, 2),), {"blocksize": 2}),
    ("Range", (_number(1.5), _number(1), _number(0.5)), {"wrt": ["start", "delta"]}),
    ("CenterCropPad", (x(0, 4), i(0, 2)), {}),
    ("CenterCropPad", (x(3, 4), i(0, 2)), {}),
    ("DFT", (x(0, 4, 1),), {"opset": 20}),
    ("STFT", (x(0, 8, 1), i(2, shape=()), x(4)), {}),
    ("Unique", (x(0),), {}),
    ("MeanVarianceNormalization", (x(0, 3, 4),), {"axes": [2]}),
    ("DequantizeLinear", (np.zeros((0, 3), np.int8), _number(0.5)), {"wrt": ["x_scale"]}),
    ("Scaler", (x(0, 3),), {**_ML, "offset": [0.5], "scale": [2.0]}),
    *(("Normalizer", (x(0, 3),), {**_ML, "norm": norm}) for norm in ("MAX", "L1", "L2")),
    ("Imputer", (x(0, 3),), {**_ML, "imputed_value_floats": [0.5]}),
    ("FeatureVectorizer", (x(0, 3), x(0, 2)), {**_ML, "inputdimensions": [3, 2]}),
    ("LinearRegressor", (x(0, 3),), {**_ML, "coefficients": [1.0, 2.0, 3.0], "intercepts": [0.5]}),
    ("LinearClassifier", (x(0, 3),), {**_ML, "coefficients": [1.0] * 6, "classlabels_ints": [0, 1], "outputs": 2}),
    ("SVMRegressor", (x(0, 3),), {**_ML, "coefficients": [1.0] * 3, "rho": [0.5]}),
    ("Adagrad", (_number(0.1), i(1, shape=()), *[x(0, 3)] * 3), {**_TRAINING, "outputs": 2}),
    ("Adam", (_number(0.1), i(1, shape=()), *[x(0, 3)] * 4), {**_TRAINING, "outputs": 3}),
    ("Gelu", (x(0, 3),), _MICROSOFT),
    ("QuickGelu", (x(0, 3),), _MICROSOFT),
    ("FastGelu", (x(0, 3), x(3)), _MICROSOFT),
    ("BiasGelu", (x(0, 3), x(3)), _MICROSOFT),
    ("FusedMatMul", (x(0, 3, 2), x(0, 3, 4)), {**_MICROSOFT, "transA": 1}),
    ("FusedMatMul", (x(2, 0), x(0, 3)), _MICROSOFT),
    ("FusedGemm", (x(0, 3), x(3, 2), x(2)), {**_MICROSOFT, "activation": "Relu"}),
    ("SimplifiedLayerNormalization", (x(0, 3), x(3)), _MICROSOFT),
    ("SkipLayerNormalization", (x(0, 2, 3), x(0, 2, 3), x(3)), _MICROSOFT),
    ("ScaledSum", (x(0, 3), x(0, 3)), {**_MICROSOFT, "scale_0": 0.5, "scale_1": 2.0}),
    ("ConcatTraining", (x(0, 3), x(2, 3)), {**_MICROSOFT, "axis": 0, "outputs": 2}),
)

SCALARS: tuple[tuple[str, tuple[np.ndarray | None, ...], dict[str, Any]], ...] = (
    ("PRelu", (_number(-0.5), _number(0.25)), {}),
    ("Cast", (_number(0.5),), {"to": TensorProto.DOUBLE}),
    ("CastLike", (_number(0.5), np.ones(1, np.float64)), {"wrt": ["input"]}),
    ("Dropout", (_number(0.5), _number(0.5), _FALSE), {"wrt": ["data"]}),
    ("Gather", (x(3), i(1, shape=())), {}),
    ("GatherND", (x(3), i(2)), {}),
    ("ScatterND", (x(3), i(1), _number(2.5)), {}),
    ("ScatterND", (x(3), i(1), _number(2.5)), {"reduction": "mul"}),
    ("Einsum", (x(3), x(3)), {"equation": "i,i->"}),
    ("Einsum", (_number(0.5), x(3)), {"equation": ",i->i"}),
    ("MatMul", (x(3), x(3)), {}),
    ("Reshape", (_number(0.5), i(1, 1)), {}),
    ("Reshape", (x(1), i(shape=(0,))), {}),
    ("Squeeze", (x(1), i(0)), {}),
    ("Unsqueeze", (_number(0.5), i(0)), {}),
    ("Transpose", (_number(0.5),), {}),
    ("Expand", (_number(0.5), i(2, 3)), {}),
    ("Flatten", (_number(0.5),), {"axis": 0}),
    ("Tile", (_number(0.5), i(shape=(0,))), {}),
    *((name, (_number(0.5),), _MICROSOFT) for name in ("Gelu", "QuickGelu", "FastGelu")),
    ("ScaledSum", (_number(0.5), _number(1.5)), {**_MICROSOFT, "scale_0": 0.5, "scale_1": 2.0}),
    ("FusedMatMul", (x(3), x(3)), _MICROSOFT),
    ("Unique", (_number(0.5),), {}),
)


def cases() -> Iterator[Case]:
    """Every entry of both tables, on static, symbolic and unknown shapes."""
    for op_type, inputs, arguments in (*EMPTY, *SCALARS):
        for shapes in SHAPES:
            yield node_case(op_type, *inputs, shapes=shapes, **{"opset": NEWEST, **arguments})
    for shapes in SHAPES[:2]:  # its rank has to be known
        yield node_case("ArrayFeatureExtractor", x(0, 3), i(2, 0), shapes=shapes, domain=ML, opset=1)
