"""Cases of every family with rare arguments: unusual attributes, constant integers, empty tensors, the smallest rank."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto

from refgrad.conformance.case import Case, node_case
from refgrad.conformance.cases.degenerate import NEWEST, i, x
from refgrad.protos.domains import MICROSOFT, ML, TRAINING
from refgrad.tables import extensions

_MICROSOFT = {"domain": MICROSOFT, "opset": 1}
_ML = {"domain": ML, "opset": 1}
_PREVIEW = {"domain": "ai.onnx.preview", "opset": 1}
_TRAINING = {"domain": TRAINING, "opset": 1}
_MOMENTUM = {**_TRAINING, "alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.1, "mode": "nesterov", "outputs": 2}
_HEADS = {**_MICROSOFT, "num_heads": 2}
_LOSS = "SoftmaxCrossEntropyLossInternal"
_VECTORS: dict[str, Any] = {
    "kernel_type": "RBF",
    "kernel_params": [0.5, 0.0, 3.0],
    "coefficients": [0.5, -0.25],
    "support_vectors": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
    "vectors_per_class": [1, 1],
    "rho": [0.25],
    "classlabels_ints": [0, 1],
    "outputs": 2,
}


def brief(*shape: int) -> np.ndarray:
    """Positive numbers in bfloat16."""
    return x(*shape).astype(ml_dtypes.bfloat16)


def _number(value: Any, dtype: Any = np.float32) -> np.ndarray:
    return np.array(value, dtype)


_MASK = np.array([[1, 1, 0], [1, 0, 0]], np.int32)
_WORDS = np.array([[0, 3, 1], [4, 4, 2]], np.int32)
_SEGMENTS = np.array([[0, 0, 1], [1, 0, 1]], np.int32)
_EMBEDDED = (x(5, 4), x(6, 4), x(2, 4), x(4), x(4))
_ATTENDED = (x(2, 3, 5), x(5, 24), x(24))
_FEW = np.array([2], np.int32)
_ONE = [x(2, 1, 8)] * 3
_BUFFERS = [x(2, 2, 5, 4) / 8] * 2
_BEAMS = np.array([[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]], np.int32)
_TURNS = (np.array([[0, 2, 4], [1, 1, 3]]), x(5, 2), x(5, 2))

RareRow = tuple[str, tuple[np.ndarray | None, ...], dict[str, Any]]

# Attributes and optional inputs that no other table sets, or leaves out.
ATTRIBUTES: tuple[RareRow, ...] = (
    ("LayerNormalization", (x(2, 3), x(3), x(3)), {"stash_type": TensorProto.BFLOAT16}),
    ("GroupNormalization", (brief(2, 4, 3), brief(4), brief(4)), {"num_groups": 2, "stash_type": TensorProto.BFLOAT16}),
    ("RMSNormalization", (brief(2, 3), brief(3)), {"stash_type": TensorProto.BFLOAT16, "opset": 23}),
    (
        "Range",
        tuple(_number(v, ml_dtypes.bfloat16) for v in (0.5, 3.25, 0.5)),
        {"stash_type": TensorProto.BFLOAT16, "opset": 27},
    ),
    ("Scatter", (x(3, 3), np.array([[2], [0]]), x(2, 1)), {"axis": 1, "opset": 10}),
    (
        "LinearClassifier",
        (x(2, 3),),
        {
            **_ML,
            "coefficients": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
            "multi_class": 1,
            "classlabels_ints": [0, 1],
            "outputs": 2,
        },
    ),
    (
        "FlexAttention",
        (x(1, 2, 3, 4), x(1, 2, 3, 4), x(1, 2, 3, 4)),
        {**_PREVIEW, "softmax_precision": TensorProto.DOUBLE},
    ),
    ("SimplifiedLayerNormalization", (brief(2, 3), brief(3)), {**_MICROSOFT, "stash_type": TensorProto.BFLOAT16}),
    ("BatchNormInternal", (x(2, 3, 4), x(3), x(3), x(3), x(3)), {**_MICROSOFT, "epsilon": 0.5, "outputs": 5}),
    (
        "BiasDropout",
        (x(2, 3), x(3), None, _number(0.5), _number(False, bool)),
        {**_MICROSOFT, "seed": 3, "wrt": ["data", "bias"]},
    ),
    (
        "EmbedLayerNormalization",
        (_WORDS, _SEGMENTS, *_EMBEDDED, _MASK),
        {**_MICROSOFT, "mask_index_type": 1, "outputs": 2},
    ),
    ("FakeQuant", (x(2, 3) - 1, _number(0.3), _number(0.0)), {**_MICROSOFT, "quant_min": -4, "quant_max": 1}),
    ("FusedConv", (x(1, 2, 6, 6), x(3, 2, 3, 3)), {**_MICROSOFT, "kernel_shape": [3, 3], "dilations": [2, 1]}),
    ("FusedConv", (x(1, 2, 6, 6), x(3, 2, 3, 3)), {**_MICROSOFT, "kernel_shape": [3, 3], "auto_pad": "SAME_UPPER"}),
    ("FusedGemm", (x(2, 4), x(4, 3)), {**_MICROSOFT, "activation": "Relu"}),
    ("GemmFastGelu", (x(2, 4), x(4, 3)), _MICROSOFT),
    ("TransposeMatMul", (x(2, 4), x(3, 4)), {**_MICROSOFT, "transB": 1}),
    (
        "SkipGroupNorm",
        (x(2, 3, 2, 4), x(4), x(4), x(2, 3, 2, 4), x(4)),
        {**_MICROSOFT, "groups": 2, "activation": 0, "epsilon": 0.5},
    ),
    (_LOSS, (x(4, 3), i(0, 2, 1, 1)), {**_MICROSOFT, "output_type": TensorProto.DOUBLE, "outputs": 2}),
    ("BatchNormInternal", (x(2, 3, 4), x(3), x(3), x(3), x(3)), {**_MICROSOFT, "training_mode": 0}),
    ("FusedGemm", (x(2, 4), x(4, 3), x(3)), {**_MICROSOFT, "activation": "Relu", "activation_gamma": 0.5}),
    ("Cast", (x(2, 3),), {"to": TensorProto.FLOAT, "saturate": 0}),
    ("Cast", (x(2, 3),), {"to": TensorProto.DOUBLE, "round_mode": "nearest", "opset": 24}),
    ("CastLike", (x(2, 3), x(1)), {"wrt": ["input"], "saturate": 0}),
    ("CastLike", (x(2, 3), x(1)), {"wrt": ["input"], "round_mode": "nearest", "opset": 24}),
    ("Attention", (*_ATTENDED[:2], None), _HEADS),
    ("Attention", (*_ATTENDED, _MASK), {**_HEADS, "mask_filter_value": -2.5}),
)

# Integers and truth values, all of them constants.
CONSTANT: tuple[RareRow, ...] = (
    ("Attention", (*[x(2, 2, 3, 4)] * 3, None, None, None, i(2, 3)), {"opset": 24}),
    ("DequantizeLinear", (np.arange(6, dtype=np.int8).reshape(2, 3), x(3), np.ones(3, np.int8)), {}),
    ("NegativeLogLikelihoodLoss", (x(3, 4), i(0, 3, 1)), {}),
    ("SoftmaxCrossEntropyLoss", (x(3, 4), i(0, 3, 1)), {}),
    ("ReverseSequence", (x(4, 3, 2), i(1, 4, 3)), {}),
    (
        "RoiAlign",
        (x(1, 1, 6, 6), np.array([[0.3, 0.4, 4.2, 4.6]], np.float32), i(0)),
        {"sampling_ratio": 2, "wrt": ["X"], "opset": 22},
    ),
    ("RotaryEmbedding", (x(2, 2, 3, 4), x(5, 2), x(5, 2), np.array([[0, 2, 4], [1, 1, 3]])), {"opset": 23}),
    ("Scatter", (x(3, 3), np.array([[1, 0, 2]]), x(1, 3)), {"opset": 10}),
    *(
        ("ScatterElements", (x(3, 3), np.array([[1, 0, 2]]), x(1, 3)), {"reduction": r, "opset": 18})
        for r in ("none", "add", "mul", "max", "min")
    ),
    *(
        ("ScatterND", (x(3, 3), np.array([[1], [0]]), x(2, 3)), {"reduction": r, "opset": 18})
        for r in ("none", "add", "mul", "max", "min")
    ),
    ("TensorScatter", (x(2, 3, 4), 2 + x(2, 2, 4), i(1, 0)), {"axis": 1, "opset": 24}),
    ("Where", (np.array([True, False, True]), x(2, 3), 2 + x(2, 3)), {}),
    ("ArrayFeatureExtractor", (x(2, 3), i(2, 0)), _ML),
    (
        "Adagrad",
        (_number(0.1), i(1, shape=()), x(2, 3), x(2, 3), x(2, 3)),
        {**_TRAINING, "norm_coefficient": 0.1, "outputs": 2},
    ),
    ("Adam", (_number(0.1), i(1, shape=()), *[x(2, 3)] * 4), {**_TRAINING, "norm_coefficient": 0.1, "outputs": 3}),
    ("Momentum", (_number(0.1), i(1, shape=()), *[x(2, 3)] * 3), _MOMENTUM),
    ("Attention", (*_ATTENDED, _MASK), _HEADS),
    ("BiasDropout", (x(2, 3), x(3), None, _number(0.5), _number(False, bool)), {**_MICROSOFT, "wrt": ["data", "bias"]}),
    ("EmbedLayerNormalization", (_WORDS, _SEGMENTS, *_EMBEDDED, _MASK, _WORDS), {**_MICROSOFT, "outputs": 2}),
    ("FlattenAndUnpad", (x(2, 3, 2), i(4, 0, 3)), {**_MICROSOFT, "outputs": 2}),
    ("PadAndUnflatten", (x(3, 2), i(4, 0, 3), i(2, 3)), _MICROSOFT),
    ("ShrunkenGather", (x(4, 5), i(2, 0, 2)), _MICROSOFT),
    ("MultiHeadAttention", (*[x(2, 3, 8)] * 3, None, _MASK), _HEADS),
    (
        "DecoderMaskedSelfAttention",
        (x(2, 1, 5), x(5, 24) / 4, x(24), _MASK, x(2, 2, 2, 5, 4) / 8, None, _FEW, _FEW, _BEAMS),
        {**_HEADS, "outputs": 2, "past_present_share_buffer": 1},
    ),
    ("RotaryEmbedding", (x(2, 3, 8), *_TURNS), _MICROSOFT),
    (
        "RMSNormRotary",
        (brief(2, 3, 1, 4), x(4), _TURNS[0], brief(5, 2), brief(5, 2), _number(1, np.int32)),
        {**_MICROSOFT, "rotary_embedding_dim": 4, "wrt": ["X"]},
    ),
    (
        "Attention",
        (*_ATTENDED, None, x(2, 2, 2, 5, 4) / 8, None, _FEW),
        {**_HEADS, "past_present_share_buffer": 1, "outputs": 2},
    ),
    ("MultiHeadAttention", (*_ONE, None, None, None, *_BUFFERS, _FEW, _BEAMS), {**_HEADS, "outputs": 3}),
    (
        "DecoderMaskedMultiHeadAttention",
        (*_ONE, _MASK, None, *_BUFFERS, _FEW, _FEW, _BEAMS),
        {**_HEADS, "outputs": 3, "past_present_share_buffer": 1},
    ),
    (_LOSS, (x(4, 3), i(0, 2, 1, -1), None, i(-1, shape=())), {**_MICROSOFT, "outputs": 2}),
    ("SparseSoftmaxCrossEntropy", (x(4, 3), i(0, 2, 1, 2)), {**_MICROSOFT, "outputs": 2}),
    ("Trilu", (x(3, 3), i(1, shape=())), _MICROSOFT),
    *(
        (
            op,
            (x(3, 2, 2), x(1, 3 * n, 2), x(1, 3 * n, 3), None, np.array([3, 1], np.int32)),
            {"hidden_size": 3, "outputs": 2},
        )
        for op, n in (("RNN", 1), ("GRU", 3), ("LSTM", 4))
    ),
)

# Empty tensors where the other tables have elements: no batch, no indices.
EMPTY: tuple[RareRow, ...] = (
    ("DequantizeLinear", (np.zeros((2, 0), np.int8), x(0)), {}),
    ("Scatter", (x(3, 2), i(shape=(0, 2)), x(0, 2)), {"opset": 10}),
    ("Upsample", (x(0, 1, 4, 4), np.array([1, 1, 2, 1.5], np.float32)), {"opset": 9, "wrt": ["X"]}),
    ("SVMClassifier", (x(0, 3),), {**_ML, **_VECTORS}),
    ("FlexAttention", (x(0, 2, 3, 4), x(0, 2, 3, 4), x(0, 2, 3, 4)), _PREVIEW),
    ("Momentum", (_number(0.1), i(1, shape=()), *[x(0, 3)] * 3), _MOMENTUM),
    ("Attention", (x(0, 3, 5), *_ATTENDED[1:]), _HEADS),
    ("MultiHeadAttention", tuple([x(0, 3, 8)] * 3), _HEADS),
    ("DecoderMaskedMultiHeadAttention", (x(0, 1, 8), *[x(0, 2, 3, 4)] * 2), _HEADS),
    ("BiasDropout", (x(0, 3), x(3)), _MICROSOFT),
    ("EmbedLayerNormalization", (_WORDS[:0], _SEGMENTS[:0], *_EMBEDDED), {**_MICROSOFT, "outputs": 2}),
    ("FakeQuant", (x(0, 3), _number(0.5), _number(3.0)), {**_MICROSOFT, "quant_max": 7}),
    ("FlattenAndUnpad", (x(2, 3, 2), i()), {**_MICROSOFT, "outputs": 2}),
    ("FusedConv", (x(0, 2, 5, 5), x(3, 2, 3, 3)), {**_MICROSOFT, "kernel_shape": [3, 3]}),
    ("GemmFastGelu", (x(0, 4), x(4, 3), x(3)), _MICROSOFT),
    ("ShrunkenGather", (x(4, 5), i()), _MICROSOFT),
    ("SkipSimplifiedLayerNormalization", (x(0, 3, 4), x(0, 3, 4), x(4)), _MICROSOFT),
    (_LOSS, (x(0, 3), i()), {**_MICROSOFT, "reduction": "sum"}),
    ("SoftmaxCrossEntropy", (x(0, 3), x(0, 3)), {**_MICROSOFT, "outputs": 2, "reduction": "sum"}),
    ("SparseSoftmaxCrossEntropy", (x(0, 3), i()), {**_MICROSOFT, "outputs": 2, "reduction": "sum"}),
    ("TransposeMatMul", (x(4, 0), x(4, 3)), {**_MICROSOFT, "transA": 1}),
    ("Trilu", (x(0, 3),), _MICROSOFT),
)

# The smallest rank of the first input that the operator allows.
SMALLEST: tuple[RareRow, ...] = (
    ("CumSum", (x(4), i(0, shape=())), {}),
    ("Slice", (x(4), i(1), i(3)), {}),
    ("Split", (x(4), i(1, 3)), {"outputs": 2}),
    ("TopK", (x(4), i(2)), {"outputs": 2}),
    ("GatherElements", (x(4), i(2, 0, 2)), {}),
    ("ScatterElements", (x(4), i(2, 0), x(2)), {}),
    ("Scatter", (x(4), i(2, 0), x(2)), {"opset": 10}),
    ("Compress", (x(3), np.array([True, False, True])), {"axis": 0}),
    ("CenterCropPad", (x(4), i(6)), {}),
    ("LpNormalization", (x(3),), {"axis": 0}),
    ("LayerNormalization", (x(3), x(3), x(3)), {}),
    ("RMSNormalization", (x(3), x(3)), {"opset": 23}),
    ("DFT", (x(4, 1), None, i(0, shape=())), {"opset": 20}),
    ("Concat", (x(2), x(3)), {"axis": 0}),
    ("TensorScatter", (x(2, 3), 2 + x(2, 2), i(1, 0)), {"axis": 1, "opset": 24}),
    ("InstanceNormalization", (x(2, 3, 2), x(3), x(3)), {}),
    ("LRN", (x(2, 3),), {"size": 3}),
    ("GlobalAveragePool", (x(2, 3, 1),), {}),
    ("MeanVarianceNormalization", (x(3),), {"axes": [0]}),
    ("Imputer", (x(3),), {**_ML, "imputed_value_floats": [0.5]}),
    ("Normalizer", (x(3),), {**_ML, "norm": "L2"}),
    ("Scaler", (x(3),), {**_ML, "offset": [0.5], "scale": [2.0]}),
    ("BiasGelu", (x(4), x(4)), _MICROSOFT),
    ("BiasDropout", (x(4), x(4)), _MICROSOFT),
    ("FakeQuant", (x(), _number(0.5), _number(3.0)), {**_MICROSOFT, "quant_max": 7}),
    ("ShrunkenGather", (x(4), i(2, 0, 2)), _MICROSOFT),
    ("SimplifiedLayerNormalization", (x(3), x(3)), _MICROSOFT),
    ("ConcatTraining", (x(2), x(3)), {**_MICROSOFT, "axis": 0, "outputs": 2}),
    ("PadAndUnflatten", (x(3), i(4, 0, 3), i(2, 3)), _MICROSOFT),
    ("FlattenAndUnpad", (x(2, 3), i(4, 0, 3)), {**_MICROSOFT, "outputs": 2}),
    (_LOSS, (x(4, 3), i(0, 2, 1, 1)), _MICROSOFT),
    ("SoftmaxCrossEntropy", (x(3), 2 + x(3)), {**_MICROSOFT, "outputs": 2}),
    ("SparseSoftmaxCrossEntropy", (x(3), i(2, shape=())), {**_MICROSOFT, "outputs": 2}),
    ("Trilu", (x(3, 3),), _MICROSOFT),
)


def cases() -> Iterator[Case]:
    """Every entry of the tables, static."""
    for op_type, inputs, arguments in (*ATTRIBUTES, *EMPTY, *SMALLEST):
        yield node_case(op_type, *inputs, **{"opset": NEWEST, **arguments})
    for op_type, inputs, arguments in CONSTANT:
        made = node_case(op_type, *inputs, **{"opset": NEWEST, **arguments})
        fixed = [name for name, value in made.feeds.items() if value.dtype.kind in "biu"]
        yield node_case(op_type, *inputs, **{"opset": NEWEST, **arguments, "constant": fixed})
    for _, module in extensions.modules("cases"):
        yield from getattr(import_module(module), "rare", tuple)()
