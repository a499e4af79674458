"""Cases of operators in versions that opsets 7 to 15 have and opset 16 replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case


def numbers(*shape: int) -> np.ndarray:
    """Float32 numbers of the given shape, the same in every run."""
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> np.ndarray:
    """Float32 numbers well above 0."""
    return np.random.default_rng(1).uniform(0.5, 2, shape).astype(np.float32)


def apart(*shape: int) -> np.ndarray:
    """Float32 numbers that are all different and far apart."""
    values = np.random.default_rng(2).permutation(int(np.prod(shape))).reshape(shape)
    return (values * 0.3 + 0.35).astype(np.float32)


def integers(*values: int) -> np.ndarray:
    """An int64 tensor of one axis."""
    return np.array(values, np.int64)


X = numbers(2, 3, 4)
CHANNELS = (numbers(2, 3, 4), numbers(3), numbers(4)[:3], numbers(3), positive(3))
ELEMENTS = (numbers(2, 3, 4), numbers(3, 4), numbers(4, 3).T.copy(), numbers(3, 4), positive(3, 4))
POOL: dict[str, Any] = {"kernel_shape": [3], "strides": [2]}
SEQUENCE = numbers(3, 2, 3)
ENLARGE, SHRINK, BOTH = (np.array(s, np.float32) for s in ((1, 1, 2, 1.5), (1, 1, 0.5, 0.75), (1, 1, 0.5, 1.5)))
IMAGE = numbers(1, 1, 4, 4)
ROI = np.array([], np.float32)
HALF = np.array(0.5, np.float32)

# operator, opsets, inputs, attributes; further arguments of `node_case` among the attributes
VersionRow = tuple[str, tuple[int, ...], tuple[np.ndarray | None, ...], dict[str, Any]]
UNARY = ("Abs", "Ceil", "Exp", "Floor", "Identity", "Neg", "Reciprocal", "Relu", "Sigmoid", "Tanh", "Sqrt", "Log")
REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")

# Rewritten by refgrad.model.upgrading.upgrade: on static, symbolic and unknown shapes.
REWRITTEN: tuple[VersionRow, ...] = (
    *((name, (7, 12), (X,), {"axis": axis}) for name in ("Softmax", "LogSoftmax", "Hardmax") for axis in (0, 1, 2)),
    *((name, (11,), (X,), {"axis": axis}) for name in ("Softmax", "LogSoftmax", "Hardmax") for axis in (-1, -2)),
    ("Softmax", (7,), (numbers(2, 3),), {}),
    ("BatchNormalization", (7, 8), ELEMENTS, {"epsilon": 0.1, "spatial": 0}),
    ("BatchNormalization", (7, 8), CHANNELS, {"epsilon": 0.1, "spatial": 1}),
    ("Dropout", (7,), (X,), {"outputs": 2}),
    ("Upsample", (7, 8), (IMAGE,), {"scales": ENLARGE.tolist(), "mode": "nearest"}),
    ("Upsample", (7, 8), (IMAGE,), {"scales": ENLARGE.tolist(), "mode": "linear"}),
    *(
        ("Upsample", (9,), (IMAGE, ENLARGE), {"mode": m, "constant": c, "wrt": ("X",)})
        for m in ("nearest", "linear")
        for c in ((), ("scales",))
    ),
    *(
        ("Resize", (10,), (IMAGE, s), {"mode": m, "constant": c, "wrt": ("X",)})
        for s in (ENLARGE, SHRINK, BOTH)
        for m in ("nearest", "linear")
        for c in ((), ("scales",))
    ),
)

CONVERTED: tuple[VersionRow, ...] = (
    *((name, (7,), (positive(2, 3),), {}) for name in UNARY),
    *((name, (7,), (positive(2, 3), positive(3)), {}) for name in ("Add", "Sub", "Mul", "Div", "Pow")),
    *((name, (9,), (numbers(2, 3),), {}) for name in ("Erf", "Sign")),
    *((name, (7,), (numbers(2, 3), (numbers(3, 2) / 2).T.copy()), {}) for name in ("Sum", "Max", "Min", "Mean")),
    *((name, (8,), (numbers(2, 3), apart(3)), {}) for name in ("Sum", "Max", "Min", "Mean")),
    *((f"Reduce{name}", (11,), (apart(2, 3, 4),), {"axes": [0, 2]}) for name in REDUCTIONS),
    *((f"Reduce{name}", (7,), (apart(2, 3, 4),), {"keepdims": 0}) for name in REDUCTIONS),
    ("Pow", (12, 14), (positive(2, 3), integers(2, 3, 1)), {}),
    ("LeakyRelu", (7, 15), (X,), {"alpha": 0.3}),
    ("PRelu", (7, 15), (X, positive(3, 1)), {}),
    ("AveragePool", (7, 10), (numbers(2, 3, 7),), {"pads": [1, 1], "count_include_pad": 1, **POOL}),
    ("AveragePool", (10,), (numbers(2, 3, 8),), {"ceil_mode": 1, **POOL}),
    ("MaxPool", (7, 8, 10, 11), (apart(2, 3, 8),), {"pads": [1, 0], **POOL}),
    ("MaxPool", (8,), (apart(2, 3, 8),), {"storage_order": 1, "outputs": 2, **POOL}),
    ("MaxPool", (10,), (apart(2, 3, 8),), {"ceil_mode": 1, "dilations": [2], **POOL}),
    ("LpPool", (7, 10), (numbers(2, 3, 7),), {"auto_pad": "SAME_UPPER", **POOL}),
    ("BatchNormalization", (9, 13), CHANNELS, {"epsilon": 0.1}),
    ("BatchNormalization", (14,), CHANNELS, {"epsilon": 0.1, "training_mode": 1, "outputs": 3}),
    ("Cast", (7, 12), (X,), {"to": 11}),
    ("Clip", (7, 10), (X,), {"min": -0.5, "max": 0.5}),
    ("Clip", (7,), (X.astype(np.float16),), {"min": -0.5}),
    ("Clip", (7,), (X.astype(np.float64),), {"max": 0.5}),
    ("Clip", (11, 12), (X, None, HALF), {}),
    ("Compress", (9,), (numbers(2, 3), np.array([True, False, True])), {"axis": 1}),
    ("Concat", (7, 11), (X, X), {"axis": 1}),
    ("Conv", (7,), (numbers(2, 3, 7), numbers(4, 3, 3), numbers(4)), {"pads": [1, 1]}),
    ("ConvTranspose", (7,), (numbers(2, 3, 5), numbers(3, 4, 3)), {"strides": [2], "output_padding": [1]}),
    ("CumSum", (11,), (X, np.array(1)), {}),
    ("DepthToSpace", (7, 11), (numbers(1, 8, 2, 3),), {"blocksize": 2}),
    ("SpaceToDepth", (7,), (numbers(1, 2, 4, 6),), {"blocksize": 2}),
    ("Dropout", (7, 10), (X,), {"ratio": 0.3}),
    ("Dropout", (12,), (X, HALF, np.array(False)), {}),
    ("Expand", (8,), (numbers(2, 1), integers(2, 3)), {}),
    ("Flatten", (7, 9), (X,), {"axis": 2}),
    ("Flatten", (11,), (X,), {"axis": -1}),
    ("Gather", (7, 11), (X, integers(0, 2)), {"axis": 1}),
    ("GatherElements", (11,), (numbers(3, 3), np.array([[0, 1, 2]])), {}),
    ("GatherND", (11,), (numbers(3, 3), np.array([[0, 1], [2, 2]])), {}),
    ("GatherND", (12,), (numbers(2, 3, 3), np.array([[0], [2]])), {"batch_dims": 1}),
    (
        "Gemm",
        (7, 9, 11),
        (numbers(3, 2), numbers(4, 3), numbers(2, 1)),
        {"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1},
    ),
    ("Gemm", (11,), (numbers(2, 3), numbers(3, 4)), {}),
    ("LRN", (7,), (numbers(2, 5, 3, 2),), {"size": 3}),
    ("MatMul", (7, 9), (numbers(2, 3, 4), numbers(4, 5)), {}),
    ("MeanVarianceNormalization", (9, 12), (numbers(2, 3, 4, 2),), {"axes": [0, 2, 3]}),
    ("Mod", (10,), (positive(3), np.array([0.3, 0.4, 0.6], np.float32)), {"fmod": 1}),
    ("NegativeLogLikelihoodLoss", (12,), (numbers(3, 4), np.array([0, 1, 3])), {}),
    ("SoftmaxCrossEntropyLoss", (12,), (numbers(3, 4), np.array([0, 1, 3]), positive(4)), {"ignore_index": 1}),
    ("OneHot", (9,), (np.array([0, 2]), np.array(3), numbers(2)), {"axis": 0}),
    ("Pad", (7, 10), (numbers(3, 4),), {"pads": [0, 1, 2, 0], "value": 0.5}),
    ("Pad", (7,), (numbers(3, 4).astype(np.float16),), {"pads": [0, 1, 2, 0], "value": 0.5}),
    ("Pad", (7,), (numbers(3, 4),), {"pads": [0, -1, -2, 0]}),
    ("Pad", (7,), (numbers(3, 4).astype(np.float64),), {"pads": [0, 1, 2, 0], "mode": "reflect"}),
    ("Pad", (11,), (numbers(3, 4), integers(0, 1, 2, 0), HALF), {}),
    ("Reshape", (7, 13), (X, integers(0, -1)), {}),
    ("Resize", (11,), (IMAGE, ROI, ENLARGE), {"mode": "linear", "constant": ("roi", "scales"), "wrt": ("X",)}),
    (
        "RoiAlign",
        (10,),
        (numbers(1, 1, 6, 6), np.array([[0, 0, 4, 4]], np.float32), integers(0)),
        {"sampling_ratio": 2, "wrt": ("X",)},
    ),
    ("Scatter", (9, 10), (numbers(3, 3), np.array([[1, 0, 2]]), numbers(1, 3)), {}),
    ("ScatterElements", (11, 13), (numbers(3, 3), np.array([[1, 0, 2]]), numbers(1, 3)), {}),
    ("ScatterND", (11, 13), (numbers(3, 3), np.array([[1], [0]]), numbers(2, 3)), {}),
    ("Slice", (7,), (numbers(4, 5),), {"starts": [1, 0], "ends": [3, -1]}),
    ("Slice", (10, 12), (numbers(4, 5), integers(-1), integers(-9), integers(0), integers(-2)), {}),
    ("Split", (7, 11), (numbers(4, 5),), {"axis": 0, "split": [1, 3], "outputs": 2}),
    ("Split", (7, 12), (numbers(4, 5),), {"axis": 0, "outputs": 2}),
    ("Squeeze", (7, 11), (numbers(1, 3, 1),), {"axes": [0]}),
    ("Squeeze", (7,), (numbers(1, 3, 1),), {}),
    ("Unsqueeze", (7, 11), (X,), {"axes": [0, 2]}),
    ("Tile", (7,), (numbers(2, 3), integers(2, 1)), {}),
    ("TopK", (7,), (apart(2, 5),), {"k": 2, "outputs": 2}),
    ("TopK", (10,), (apart(2, 5), integers(2)), {"outputs": 2}),
    ("TopK", (11,), (apart(2, 5), integers(2)), {"outputs": 2, "largest": 0}),
    ("Transpose", (7,), (X,), {}),
    ("Where", (9,), (np.array([True, False]), numbers(3, 2), numbers(2)), {}),
    ("RNN", (7,), (SEQUENCE, numbers(1, 4, 3), numbers(1, 4, 4)), {"hidden_size": 4}),
    ("GRU", (7,), (SEQUENCE, numbers(1, 12, 3), numbers(1, 12, 4), numbers(1, 24)), {"hidden_size": 4, "outputs": 2}),
    ("LSTM", (7,), (SEQUENCE, numbers(1, 16, 3), numbers(1, 16, 4), numbers(1, 32)), {"hidden_size": 4, "outputs": 2}),
    (
        "MaxUnpool",
        (9,),
        (numbers(1, 1, 2, 2), np.array([[[[5, 7], [13, 15]]]])),
        {"kernel_shape": [2, 2], "strides": [2, 2]},
    ),
    ("DequantizeLinear", (10,), (np.array([1, 2, 3], np.uint8), HALF, np.array(1, np.uint8)), {}),
)


def cases() -> Iterator[Case]:
    """Every row in every opset; on symbolic and unknown shapes too where the nodes are rewritten."""
    for rows, several in ((CONVERTED, SHAPES[:1]), (REWRITTEN, SHAPES)):
        for op_type, opsets, inputs, arguments in rows:
            yield from _cases(op_type, opsets, inputs, arguments, several)


def _cases(
    op_type: str,
    opsets: Sequence[int],
    inputs: Sequence[np.ndarray | None],
    arguments: dict[str, Any],
    several: Sequence[str],
) -> Iterator[Case]:
    for opset in opsets:
        for shapes in several:
            yield node_case(op_type, *inputs, opset=opset, shapes=shapes, **arguments)
