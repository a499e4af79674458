"""Cases of ONNX Runtime's forward operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.special import Special, gate
from refgrad.protos.domains import MICROSOFT

BATCH, LENGTH, HEADS, SIZE = 2, 3, 2, 4  # of the attentions
WIDTH = HEADS * SIZE
_RANDOM = np.random.default_rng(0)
_START = _RANDOM.bit_generator.state


SPECIAL = (
    gate("Gelu", domain=MICROSOFT, opset=1),
    gate("FastGelu", domain=MICROSOFT, opset=1),
    gate("QuickGelu", domain=MICROSOFT, opset=1),
    Special(
        "BiasGelu",
        "far-out",
        ((-1e30, -800.0, 800.0, 1e30), (0.0,) * 4),
        ((0.0, 0.0, 1.0, 1.0), (0.0, 0.0, 1.0, 1.0)),
        domain=MICROSOFT,
        opset=1,
    ),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    _RANDOM.bit_generator.state = _START
    for shapes in SHAPES:
        x = _floats(2, 3, 4)
        yield _case("Gelu", x, shapes=shapes)
        yield _case("FastGelu", x, shapes=shapes)
        yield _case("FastGelu", x, _floats(4), shapes=shapes)
        yield _case("BiasGelu", x, _floats(4), shapes=shapes)
        yield _case("QuickGelu", x, shapes=shapes)
        yield _case("QuickGelu", x, shapes=shapes, alpha=-0.7)
        yield _case("GemmFastGelu", _floats(2, 4), _floats(4, 3), _floats(3), shapes=shapes)
        for axis in (1, 2, -1):
            yield _case("BiasSoftmax", x, _floats(2, 1, 4), shapes=shapes, axis=axis, is_inner_broadcast=1)
        yield _case("BiasSoftmax", x, _floats(1, 3, 4), shapes=shapes, axis=2, is_inner_broadcast=0)
        yield _case("BiasSoftmax", _floats(2, 3, 0), _floats(2, 3, 0), shapes=shapes, is_inner_broadcast=1)
        yield _case("BiasDropout", x, _floats(4), shapes=shapes)
        yield _case("BiasDropout", x, _floats(4), _floats(2, 3, 4), _scalar(0.3), shapes=shapes)
        yield from _products(shapes)
        for activation, parameters in ACTIVATIONS if shapes == "static" else ACTIVATIONS[:2]:
            named = {} if activation is None else {"activation": activation}
            given = {} if parameters is None else {"activation_params": parameters}
            image, filters = _floats(1, 2, 5, 5), _floats(3, 2, 3, 3)
            size = {"kernel_shape": [3, 3]}  # without it the rank has to be known
            yield _case("FusedConv", image, filters, _floats(3), shapes=shapes, **size, **named, **given)
            each = dict(zip(("activation_alpha", "activation_beta"), parameters or [], strict=False))
            yield _case("FusedGemm", _floats(2, 4), _floats(4, 3), _floats(3), shapes=shapes, **named, **each)
        window = {"strides": [2, 1], "pads": [1, 0, 1, 0], "group": 2, "activation": "Relu", "kernel_shape": [3, 2]}
        image, filters = _floats(1, 4, 5, 4), _floats(2, 2, 3, 2)
        yield _case("FusedConv", image, filters, None, _floats(1, 2, 3, 3), shapes=shapes, **window)
        options = {"alpha": 0.5, "beta": -1.5, "transA": 1, "transB": 1, "activation": "Tanh"}
        yield _case("FusedGemm", _floats(4, 2), _floats(3, 4), _floats(2, 1), shapes=shapes, **options)
        yield from _normalizations(shapes)
        yield from _training(shapes)
        yield from _transformers(shapes)
    for shapes in SHAPES:
        yield from _losses(shapes)
        for diagonal in (None, 1, -2):
            k = None if diagonal is None else np.array(diagonal)
            for upper in (1, 0):
                yield _case("Trilu", _floats(2, 3, 4), k, shapes=shapes, upper=upper)


ACTIVATIONS: tuple[tuple[str | None, list[float] | None], ...] = (
    (None, None),
    ("Relu", None),
    ("Tanh", None),
    ("Sigmoid", None),
    ("LeakyRelu", [0.2]),
    ("LeakyRelu", None),
    *(("Softplus", None), ("Softsign", None), ("HardSwish", None), ("Gelu", None)),
    *(("QuickGelu", [0.9]), ("QuickGelu", None)),
    *(("Elu", [0.7]), ("Elu", None)),
    *(("ThresholdedRelu", [0.3]), ("ThresholdedRelu", None)),
    *(("HardSigmoid", [0.3, 0.4]), ("HardSigmoid", None)),
    *(("Clip", [-0.4, 0.6]), ("Clip", [-0.4])),
)


def _products(shapes: str) -> Iterator[Case]:
    for trans_a, trans_b in ((0, 0), (1, 0), (0, 1), (1, 1)):
        for batch in ((), (2,), (2, 3)) if shapes == "static" else ((2,),):
            a = _floats(*batch, *((5, 4) if trans_a else (4, 5)))
            b = _floats(*((3, 5) if trans_b else (5, 3)))
            yield _case("FusedMatMul", a, b, shapes=shapes, transA=trans_a, transB=trans_b, alpha=0.5)
        if shapes != "unknown":
            a, b = _floats(*((5, 2, 4) if trans_a else (4, 2, 5))), _floats(*((3, 2, 5) if trans_b else (5, 2, 3)))
            options = {"transBatchA": 1, "transBatchB": 1}
            yield _case("FusedMatMul", a, b, shapes=shapes, transA=trans_a, transB=trans_b, **options)
    yield _case("FusedMatMul", _floats(5), _floats(2, 5, 3), shapes=shapes)
    yield _case("FusedMatMul", _floats(2, 0, 5, 4), _floats(5, 3), shapes=shapes, transA=1)
    yield _case("TransposeMatMul", _floats(5, 4), _floats(5, 3), shapes=shapes, transA=1, alpha=2.0)


def _normalizations(shapes: str) -> Iterator[Case]:
    x = _floats(2, 3, 4)
    scale, shift, bias = _floats(4) + np.float32(1), _floats(4), _floats(4)
    skip = "SkipLayerNormalization"
    yield _case(skip, x, _floats(2, 3, 4), scale, shapes=shapes, epsilon=1e-3)
    yield _case(skip, x, _floats(2, 3, 4), scale, shift, bias, shapes=shapes, outputs=4)
    yield _case(skip, x, _floats(3, 4), scale, None, bias, shapes=shapes)
    skip = "SkipSimplifiedLayerNormalization"
    yield _case(skip, x, _floats(2, 3, 4), scale, shapes=shapes, epsilon=1e-3)
    yield _case(skip, x, _floats(1, 3, 4), scale, bias, shapes=shapes)
    simple = "SimplifiedLayerNormalization"
    yield _case(simple, x, scale, shapes=shapes, epsilon=1e-3, outputs=2)
    for axis in (1, -2):
        yield _case(simple, x, _floats(3, 4), shapes=shapes, axis=axis, outputs=2)
    yield _case(simple, x, _floats(2, 3, 4), shapes=shapes, axis=0, outputs=2)
    yield _case(simple, _floats(2, 0, 4), scale, shapes=shapes, axis=2, outputs=2)
    for dtype in (np.float64, np.float16):  # the squares overflow in float16
        yield _case(simple, (300 * x).astype(dtype), scale.astype(dtype), shapes=shapes)
    image = _floats(2, 4, 3, 2)
    last = np.moveaxis(image, 1, -1)
    for activation in (0, 1):
        options: dict[str, Any] = {"activation": activation, "groups": 2}
        yield _case("GroupNorm", last, scale, shift, shapes=shapes, epsilon=1e-2, **options)
        yield _case("GroupNorm", image, scale, shift, shapes=shapes, channels_last=0, **options)
    if shapes != "unknown":
        yield _case("SkipGroupNorm", last, scale, shift, _floats(2, 3, 2, 4), bias, shapes=shapes, outputs=2, **options)
        yield _case("SkipGroupNorm", last, scale, shift, _floats(2, 4), shapes=shapes, **options)
        statistics = _floats(4), np.abs(_floats(4)) + np.float32(0.5)
        for outputs in (1, 5):
            yield _case(
                "BatchNormInternal", image, scale, shift, *statistics, shapes=shapes, outputs=outputs, momentum=0.7
            )


def _training(shapes: str) -> Iterator[Case]:
    for axis in (0, 1, -1):
        parts = [_floats(*(size if k == axis % 3 else n for k, n in enumerate((2, 3, 4)))) for size in (1, 2)]
        yield _case("ConcatTraining", *parts, shapes=shapes, axis=axis, outputs=2)
    for axis in (0, 1):
        yield _case("ShrunkenGather", _floats(4, 5), np.array([2, 0, 2]), shapes=shapes, axis=axis)
    yield _case("ShrunkenGather", _floats(2, 4, 3), np.array([2, 0, 2]), shapes=shapes, axis=1)
    x = _floats(2, 3)
    yield _case("ScaledSum", x, _floats(2, 3), shapes=shapes, scale_0=0.5, scale_1=-2.0)
    yield _case("ScaledSum", x, _floats(2, 3), _floats(2, 3), shapes=shapes, scale_0=0.5, scale_1=-2.0, scale_2=3.0)
    yield _case("ScaledSum", x, _floats(2, 3), _floats(2, 3), shapes=shapes, scale_0=0.5, scale_1=-2.0)
    indices = np.array([4, 0, 3])
    for width in (2, 0):
        yield _case("PadAndUnflatten", _floats(3, width), indices, np.array([2, 3]), shapes=shapes)
    yield _case("FlattenAndUnpad", _floats(2, 3, 2), indices, shapes=shapes, outputs=2)
    x = _array([[-4.1, -0.62, 0.31], [0.87, 1.44, 9.3]])  # clipped at both ends, never halfway between two steps
    scale, zero_point = _scalar(0.5), _scalar(3.0)
    yield _case("FakeQuant", x, scale, zero_point, shapes=shapes, quant_min=0, quant_max=7, outputs=2)
    yield _case("FakeQuant", x, _array([0.5]), _array([3.0]), shapes=shapes, quant_max=15)
    scores, labels = _floats(4, 3, 2), np.array([[0, 2], [1, -1], [2, 0], [-1, 1]])
    ignored = np.array(-1)
    for reduction in ("mean", "sum", "none"):
        for weights in (None, _array([0.5, 1.0, 2.0])):
            loss = "SoftmaxCrossEntropyLossInternal"
            yield _case(loss, scores, labels, weights, ignored, shapes=shapes, outputs=2, reduction=reduction)
            yield _case(loss, scores, np.abs(labels), weights, shapes=shapes, reduction=reduction)
        far = np.where(labels < 0, 9, labels), np.full_like(labels, 9)
        for each in far:  # ignored labels outside the classes, then no others
            yield _case(loss, scores, each, None, np.array(9), shapes=shapes, outputs=2, reduction=reduction)


def _losses(shapes: str) -> Iterator[Case]:
    """With log_prob as an output: ONNX Runtime's kernels write to it, and end the process where it is left out."""
    scores = _floats(2, 3, 4)
    shares = np.abs(_floats(2, 3, 4))
    labels, weights = np.array([[0, 3, 1], [2, 2, 0]]), np.abs(_floats(2, 3))
    for reduction in ("mean", "sum", "none"):
        options: dict[str, Any] = {"shapes": shapes, "outputs": 2, "reduction": reduction}
        yield _case("SoftmaxCrossEntropy", scores, shares, **options)
        yield _case("SoftmaxCrossEntropy", scores[0], shares[0] / shares[0].sum(-1, keepdims=True), **options)
        for weight in (None, weights):
            yield _case("SparseSoftmaxCrossEntropy", scores, labels, weight, **options)


def _transformers(shapes: str) -> Iterator[Case]:
    words, segments = np.array([[0, 3, 1], [4, 4, 2]], np.int32), np.array([[0, 0, 1], [1, 0, 1]], np.int32)
    tables = _floats(5, 4), _floats(6, 4), _floats(2, 4)
    scale, shift = _floats(4) + np.float32(1), _floats(4)
    embed = "EmbedLayerNormalization"
    mask = np.array([[1, 1, 0], [1, 0, 0]], np.int32)
    yield _case(embed, words, segments, *tables, scale, shift, mask, shapes=shapes, outputs=3)
    positions = np.array([[5, 0, 1], [2, 2, 3]], np.int32)
    yield _case(
        embed, words, None, *tables[:2], None, scale, shift, None, positions, shapes=shapes, epsilon=1e-3, outputs=2
    )
    if shapes == "unknown":
        return
    heads: dict[str, Any] = {"shapes": shapes, "num_heads": HEADS}
    q, k, v = _floats(BATCH, LENGTH, WIDTH), _floats(BATCH, LENGTH + 1, WIDTH), _floats(BATCH, LENGTH + 1, 2 * HEADS)
    name = "MultiHeadAttention"
    yield _case(name, q, k, v, **heads)
    yield _case(name, q, k, v, _floats(2 * WIDTH + 2 * HEADS), scale=0.3, **heads)
    hidden = np.array([[1, 0, 1, 1], [1, 1, 1, 0]], np.int32)
    offset = _floats(1, HEADS, LENGTH, LENGTH + 1)
    yield _case(name, q, k, v, None, hidden, offset, **heads)
    per_query = (np.arange(BATCH * LENGTH * (LENGTH + 1)) % 3 > 0).astype(np.int32).reshape(BATCH, LENGTH, LENGTH + 1)
    yield _case(name, q, k, v, None, per_query, mask_filter_value=-1.5, **heads)
    past = [_floats(BATCH, HEADS, 2, SIZE) for _ in range(2)]
    same = [_floats(BATCH, LENGTH, WIDTH) for _ in range(2)]
    yield _case(name, q, *same, None, None, None, *past, outputs=3, unidirectional=1, **heads)
    yield _case(name, q, *(_floats(BATCH, HEADS, LENGTH + 1, SIZE) for _ in range(2)), **heads)
    yield _case(name, q, _floats(BATCH, LENGTH + 1, HEADS, 2, SIZE), **heads)
    yield _case(name, _floats(BATCH, LENGTH, HEADS, 3, SIZE), **heads)
    x, weights, bias = _floats(BATCH, LENGTH, 5), _floats(5, 3 * WIDTH), _floats(3 * WIDTH)
    name = "Attention"
    yield _case(name, x, weights, bias, outputs=2, **heads)
    yield _case(name, x, weights, bias, mask, scale=0.3, **heads)
    yield _case(name, x, weights, bias, unidirectional=1, **heads)
    sizes = [WIDTH, WIDTH, 2 * HEADS]
    uneven = _floats(5, sum(sizes)), _floats(sum(sizes))
    yield _case(name, x, *uneven, None, None, _floats(BATCH, HEADS, LENGTH, LENGTH), qkv_hidden_sizes=sizes, **heads)
    yield _case(name, x, weights, bias, None, _floats(2, BATCH, HEADS, 2, SIZE), outputs=2, unidirectional=1, **heads)


def _case(op_type: str, *inputs: np.ndarray | None, **options: Any) -> Case:
    return node_case(op_type, *inputs, domain=MICROSOFT, **{"opset": 1} | options)


def _floats(*shape: int) -> np.ndarray:
    """Numbers that are not near 0, where the activations have kinks."""
    values = _RANDOM.standard_normal(shape) * 0.7
    return np.where(np.abs(values) < 0.02, 0.1, values).astype(np.float32)


def _array(values: list[Any]) -> np.ndarray:
    return np.array(values, np.float32)


def _scalar(value: float) -> np.ndarray:
    return np.array(value, np.float32)
