"""Strategies of ONNX Runtime's forward operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.cases.contrib import ACTIVATIONS
from refgrad.conformance.strategies.convolution import group_or_absent, groups
from refgrad.conformance.strategies.drawing import Drawing, Shape, strategy
from refgrad.conformance.strategies.windows import windows
from refgrad.protos.domains import MICROSOFT


def _named(*operators: str) -> list[str]:
    return [f"{MICROSOFT}.{operator}" for operator in operators]


# Activations


@strategy(*_named("Gelu", "QuickGelu"))
def gelu(d: Drawing) -> Case:
    """Of any shape; QuickGelu with any factor."""
    alpha = d.optional(d.factor) if d.op_type == "QuickGelu" else None
    return d.case(d.floats(d.shape()), alpha=alpha)


@strategy(*_named("FastGelu", "BiasGelu"))
def gelu_of_sum(d: Drawing) -> Case:
    """With a bias as long as the last axis; FastGelu without one too."""
    shape = d.shape(1)
    bias = d.floats(shape[-1:]) if d.op_type == "BiasGelu" or d.flag() else None
    return d.case(d.floats(shape), bias)


@strategy(*_named("GemmFastGelu"))
def gemm_fast_gelu(d: Drawing) -> Case:
    """With and without a bias."""
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    return d.case(d.floats((rows, inner)), d.floats((inner, columns)), d.optional(lambda: d.floats((columns,))))


@strategy(*_named("BiasSoftmax"))
def bias_softmax(d: Drawing) -> Case:
    """A bias that broadcasts along the last of the axes before `axis`, or along the first."""
    shape = d.shape(2, 4, size=3, empty=False)
    axis = d.pick(*range(1, len(shape)))
    inner = d.flag()
    ones = (1,) * d.integer(1, axis)  # the axes before `axis` along which the bias is repeated
    left = (*shape[: axis - len(ones)], *ones) if inner else ones
    bias = d.floats((*left, *shape[len(left) :]))
    return d.case(d.floats(shape), bias, axis=axis if axis != 1 or d.flag() else None, is_inner_broadcast=int(inner))


@strategy(*_named("BiasDropout"))
def bias_dropout(d: Drawing) -> Case:
    """Outside of training, so nothing is random; with and without a residual and a ratio."""
    shape = d.shape(1)
    residual = d.optional(lambda: d.floats(shape))
    ratio = d.optional(lambda: d.scalar(0.25))
    fixed = [] if ratio is None else ["ratio"]
    return d.case(d.floats(shape), d.floats(shape[-1:]), residual, ratio, fixed=fixed, outputs=d.integer(1, 2))


# Products and convolutions


@strategy(*_named("FusedMatMul"))
def fused_matmul(d: Drawing) -> Case:
    """Matrices and stacks of them, each transposed or not, the axis of the stack first or in the middle."""
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    trans_a, trans_b = d.integer(0, 1), d.integer(0, 1)
    a, b = _turned((rows, inner), trans_a), _turned((inner, columns), trans_b)
    if d.shapes != "unknown" and d.flag():
        stack = d.integer(1, 3)
        batch_a, batch_b = d.integer(0, 1), d.integer(0, 1)
        a, b = ((m[0], stack, m[1]) if first else (stack, *m) for m, first in ((a, batch_a), (b, batch_b)))
        moved: dict[str, Any] = {"transBatchA": batch_a, "transBatchB": batch_b}
    else:
        stacks = d.broadcasting(2, 2)
        a, b, moved = (*stacks[0], *a), (*stacks[1], *b), {}
    settings: dict[str, Any] = {"transA": trans_a or d.pick(None, 0), "transB": trans_b or d.pick(None, 0)}
    return d.case(d.floats(a), d.floats(b), alpha=d.optional(d.factor), **settings, **moved)


@strategy(*_named("TransposeMatMul"))
def transpose_matmul(d: Drawing) -> Case:
    """Matrices and stacks of them, each transposed or not."""
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    trans_a, trans_b = d.integer(0, 1), d.integer(0, 1)
    stacks = d.broadcasting(2, 2)
    a, b = (*stacks[0], *_turned((rows, inner), trans_a)), (*stacks[1], *_turned((inner, columns), trans_b))
    return d.case(d.floats(a), d.floats(b), alpha=d.optional(d.factor), transA=trans_a, transB=trans_b)


def _turned(matrix: Shape, transposed: int) -> Shape:
    return matrix[::-1] if transposed else matrix


@strategy(*_named("FusedGemm"))
def fused_gemm(d: Drawing) -> Case:
    """Every attribute and activation."""
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    trans_a, trans_b = d.integer(0, 1), d.integer(0, 1)
    a, b = d.normal(_turned((rows, inner), trans_a)), d.normal(_turned((inner, columns), trans_b))
    c = d.optional(lambda: d.normal(d.broadcast_to((rows, columns))))
    activation, parameters = d.pick(*ACTIVATIONS)
    named: dict[str, Any] = dict(zip(("activation_alpha", "activation_beta"), parameters or (), strict=False))
    factors: dict[str, Any] = {"alpha": d.pick(None, 0.5, -2.0), "beta": d.pick(None, 0.5, -2.0)}
    return d.case(a, b, c, activation=activation, transA=trans_a, transB=trans_b, **factors, **named)


@strategy(*_named("FusedConv"))
def fused_conv(d: Drawing) -> Case:
    """As Conv of two axes, with and without an addend, with every activation."""
    over = windows(d, 2)
    group, channels, filters = groups(d)
    batch = d.integer(1, 2)
    activation, parameters = d.pick(*ACTIVATIONS)
    return d.case(
        d.normal((batch, group * channels, *over.image)),
        d.normal((group * filters, channels, *over.kernel)),
        d.optional(lambda: d.normal((group * filters,))),
        d.optional(lambda: d.normal((batch, group * filters, *over.counts))),
        group=group_or_absent(d, group),
        activation=activation,
        activation_params=parameters,
        **over.attributes(d, d.shapes == "unknown" or d.flag()),
    )


# Normalizations. Each epsilon is so large that differences converge even where all numbers are the same.


@strategy(*_named("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"))
def skip_layer_normalization(d: Drawing) -> Case:
    """Every optional input; a skip that broadcasts; the sum as a further output."""
    shape = _tokens(d)
    simple = d.op_type == "SkipSimplifiedLayerNormalization"
    skip = d.pick(shape, shape[1:], (1, *shape[1:]))
    gamma = d.floats(shape[-1:])
    beta = [] if simple else [d.optional(lambda: d.floats(shape[-1:]))]
    bias = d.optional(lambda: d.floats(shape[-1:]))
    outputs = d.pick(1, 4) if not simple else 1
    return d.case(d.floats(shape), d.floats(skip), gamma, *beta, bias, outputs=outputs, epsilon=_epsilon(d))


@strategy(*_named("SimplifiedLayerNormalization"))
def simplified_layer_normalization(d: Drawing) -> Case:
    """Over any of the last axes, with the factor as a further output."""
    shape = d.shape(1, 3, size=3, empty=False)
    axis = d.optional(lambda: d.axis(len(shape)))
    scale = shape[-1:] if axis is None else shape[axis % len(shape) :]
    return d.case(d.floats(shape), d.floats(scale), axis=axis, outputs=d.integer(1, 2), epsilon=_epsilon(d))


def group_norm(d: Drawing) -> Case:
    """Channels first or last, with swish and without; a skip as large as the image, or one number per channel."""
    count, each = d.integer(1, 2), d.integer(1, 2)
    batch, channels, image = d.integer(1, 2), count * each, (d.integer(1, 3), d.integer(1, 2))
    skipped = d.op_type == "SkipGroupNorm"
    last = d.pick(None, 1, *(() if skipped else (0,)))
    shape = (batch, channels, *image) if last == 0 else (batch, *image, channels)
    further: list[np.ndarray | None] = []
    if skipped:
        skips = [shape, (batch, channels), (batch, 1, 1, channels)]
        further = [d.floats(d.pick(*skips)), d.optional(lambda: d.floats((channels,)))]
    x, gamma, beta = (d.floats(of) for of in (shape, (channels,), (channels,)))
    outputs = d.integer(1, 2) if skipped else 1
    settings: dict[str, Any] = {
        "activation": d.integer(0, 1),
        "groups": count,
        "channels_last": last,
        "epsilon": _epsilon(d),
    }
    return d.case(x, gamma, beta, *further, outputs=outputs, **settings)


strategy(*_named("GroupNorm"))(group_norm)
strategy(*_named("SkipGroupNorm"), ranked=True)(group_norm)


@strategy(*_named("BatchNormInternal"))
def batch_norm_internal(d: Drawing) -> Case:
    """With the statistics of the batch, and with given ones."""
    shape = (d.integer(1, 3), d.integer(1, 3), *d.shape(0, 2, size=3, empty=False))
    training = d.pick(None, 1, 0)
    parts = [d.floats(of) for of in (shape, *[shape[1:2]] * 3)]
    outputs = 1 if training == 0 else d.pick(1, 5)
    settings: dict[str, Any] = {"training_mode": training, "momentum": d.pick(None, 0.7), "epsilon": _epsilon(d)}
    return d.case(*parts, d.floats(shape[1:2], 0.5, 2), outputs=outputs, **settings)


def _tokens(d: Drawing) -> Shape:
    """Sequences of vectors."""
    return d.integer(1, 2), d.integer(1, 3), d.integer(1, 4)


def _epsilon(d: Drawing) -> float:
    return float(np.float32(d.pick(0.1, 1.0, 0.01)))


# Training


@strategy(*_named("ConcatTraining"))
def concat_training(d: Drawing) -> Case:
    """One to three tensors along any axis, with their lengths as a further output."""
    shape = d.shape(1, 3, size=3, empty=False)
    axis = d.axis(len(shape))
    place = axis % len(shape)
    parts = [(*shape[:place], d.integer(0, 2), *shape[place + 1 :]) for _ in range(d.integer(1, 3))]
    return d.case(*(d.floats(part) for part in parts), axis=axis, outputs=d.integer(1, 2))


@strategy(*_named("ShrunkenGather"))
def shrunken_gather(d: Drawing) -> Case:
    """A vector of indices, some of them more than once."""
    shape = d.shape(1, 3, size=3, empty=False)
    axis = d.integer(0, len(shape) - 1)
    indices = d.integers((d.integer(1, 3),), 0, shape[axis] - 1)
    return d.case(d.floats(shape), indices, axis=axis if axis or d.flag() else None)


@strategy(*_named("ScaledSum"))
def scaled_sum(d: Drawing) -> Case:
    """Two or three terms; the factor of the third may be absent."""
    shape = d.shape()
    scales: dict[str, Any] = {"scale_0": d.factor(), "scale_1": d.factor()}
    count = d.integer(2, 3)
    third = d.optional(d.factor) if count == 3 else None
    return d.case(*(d.floats(shape) for _ in range(count)), scale_2=third, **scales)


@strategy(*_named("PadAndUnflatten", "FlattenAndUnpad"))
def padding(d: Drawing) -> Case:
    """Rows at different positions along two merged axes."""
    sizes = d.integer(1, 3), d.integer(1, 3)
    rest = d.shape(1, 2, size=2)
    places = np.array(d.permutation(sizes[0] * sizes[1])[: d.integer(1, sizes[0] * sizes[1])], np.int64)
    if d.op_type == "PadAndUnflatten":
        return d.case(d.floats((len(places), *rest)), places, np.array(sizes, np.int64))
    return d.case(d.floats((*sizes, *rest)), places, outputs=2)


@strategy(*_named("FakeQuant"))
def fake_quant(d: Drawing) -> Case:
    """Numbers an eighth or a quarter of a step from what they round to, clipped at either end or not.

    The zero point is not a whole number, so no number rounds to the point where clipping starts.
    """
    scale, zero_point = d.pick(0.5, 2.0), d.integer(0, 3) + 0.25
    steps = d.integers(d.shape(), -9, 12) + np.float32(0.125) * d.pick(1, -1, 2)
    shape = d.pick((), (1,))
    offset = np.full(shape, zero_point, d.dtype)
    low, high = d.pick((None, None), (0, 7), (-4, 3))
    x = np.asarray(steps * scale).astype(d.dtype)
    return d.case(x, np.full(shape, scale, d.dtype), offset, quant_min=low, quant_max=high, outputs=d.integer(1, 2))


@strategy(*_named("SoftmaxCrossEntropyLossInternal"))
def softmax_cross_entropy_loss_internal(d: Drawing) -> Case:
    """Every reduction; weights, a label that is ignored, and the log probabilities as a further output."""
    batch, classes, rest = d.integer(1, 3), d.integer(1, 3), d.shape(0, 2, size=2, empty=False)
    ignored = d.optional(lambda: d.pick(-1, 0, 9))
    labels = d.integers((batch, *rest), 0, classes - 1)
    if ignored is not None and d.flag():
        labels.flat[d.integer(0, labels.size - 1)] = ignored
    weights = d.optional(lambda: d.floats((classes,), 0.25, 2))
    index = None if ignored is None else np.array(ignored, np.int64)
    fixed = [] if index is None else ["ignore_index"]
    reduction = d.pick(None, "mean", "sum", "none")
    outputs = d.integer(1, 2)
    return d.case(
        d.floats((batch, classes, *rest)), labels, weights, index, fixed=fixed, outputs=outputs, reduction=reduction
    )


# Transformers


@strategy(*_named("EmbedLayerNormalization"))
def embed_layer_normalization(d: Drawing) -> Case:
    """With and without segments, a mask and positions; the sum as a further output."""
    batch, length, width = _tokens(d)
    sizes = d.integer(1, 4), d.integer(length, 5), d.integer(1, 2)
    tables = [d.floats((rows, width)) for rows in sizes]
    words, places, segments = (d.integers((batch, length), 0, rows - 1, np.int32) for rows in sizes)
    segmented = d.flag()
    return d.case(
        words,
        segments if segmented else None,
        *tables[:2],
        tables[2] if segmented else None,
        *(d.floats((width,)), d.floats((width,))),
        d.optional(lambda: d.integers((batch, length), 0, 1, np.int32)),
        places if d.flag() else None,
        outputs=d.integer(2, 3),
        epsilon=_epsilon(d),
    )


@strategy(*_named("MultiHeadAttention"), ranked=True)
def multi_head_attention(d: Drawing) -> Case:
    """Keys and values apart, already projected, and packed; a bias, a mask, an addend and a past."""
    batch, heads, queries, width = d.integer(1, 2), d.integer(1, 2), d.integer(1, 3), d.integer(1, 3)
    form = d.pick("apart", "projected", "two", "three")
    keys = queries if form == "three" else d.integer(1, 3)
    value_width = d.integer(1, 3) if form == "apart" else width
    past = d.integer(1, 2) if form == "apart" and d.flag() else 0
    inputs: list[np.ndarray | None] = [d.floats((batch, queries, heads * width)), None, None]
    if form == "apart":
        inputs[1:] = (d.floats((batch, keys, heads * size)) for size in (width, value_width))
    elif form == "projected":
        inputs[1:] = (d.floats((batch, heads, keys, width)) for _ in range(2))
    elif form == "two":
        inputs[1] = d.floats((batch, keys, heads, 2, width))
    else:
        inputs[0] = d.floats((batch, queries, heads, 3, width))
    size = heads * (2 * width + value_width)
    inputs.append(d.floats((size,)) if form != "projected" and d.flag() else None)
    inputs += _hidden(d, batch, heads, queries, past + keys)
    if past:
        inputs += [d.floats((batch, heads, past, of)) for of in (width, value_width)]
    outputs = 3 if past or (form == "apart" and d.flag()) else 1
    return d.case(*inputs, num_heads=heads, outputs=outputs, **_settings(d, past + keys >= queries))


@strategy(*_named("Attention"), ranked=True)
def attention(d: Drawing) -> Case:
    """Values as wide as the keys or not, with and without a bias, a mask, an addend and a past."""
    batch, heads, length, width = d.integer(1, 2), d.integer(1, 2), d.integer(1, 3), d.integer(1, 2)
    past = d.optional(lambda: d.integer(1, 2)) or 0
    value_width = width if past else d.integer(1, 2)
    sizes = [heads * width, heads * width, heads * value_width]
    taken = d.integer(1, 3)
    mask, addend = _hidden(d, batch, heads, length, past + length)
    return d.case(
        d.floats((batch, length, taken)),
        d.floats((taken, sum(sizes))),
        d.optional(lambda: d.floats((sum(sizes),))),
        mask,
        d.floats((2, batch, heads, past, width)) if past else None,
        addend,
        num_heads=heads,
        qkv_hidden_sizes=sizes if value_width != width or d.flag() else None,
        outputs=2 if past or (value_width == width and d.flag()) else 1,
        **_settings(d, True),
    )


def _hidden(d: Drawing, batch: int, heads: int, queries: int, keys: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """A mask of keys, one for all queries or one for each, and an addend of the scores; either may be absent."""
    shape = d.pick((batch, keys), (batch, queries, keys))
    mask = d.optional(lambda: d.integers(shape, 0, 1, np.int32))
    return mask, d.optional(lambda: d.floats((d.pick(batch, 1), d.pick(heads, 1), queries, keys)))


def _settings(d: Drawing, ordered: bool) -> dict[str, Any]:
    """The attributes of both attentions. `ordered`: there are at least as many keys as queries, so each query sees a key."""
    return {
        "scale": d.pick(None, 0.5),
        "mask_filter_value": d.pick(None, -1.5),
        "unidirectional": d.pick(None, 0, 1) if ordered else None,
    }


@strategy(*_named("SoftmaxCrossEntropy", "SparseSoftmaxCrossEntropy"))
def softmax_cross_entropy(d: Drawing) -> Case:
    """Every reduction; the sparse operator with and without a weight for each label."""
    rows, classes = d.shape(1, 3, size=3, empty=False), d.integer(1, 4)
    scores, reduction = d.floats((*rows, classes)), d.pick(None, "mean", "sum", "none")
    if d.op_type == "SoftmaxCrossEntropy":
        return d.case(scores, d.floats((*rows, classes)), outputs=2, reduction=reduction)
    weights = d.optional(lambda: d.floats(rows, 0.25, 2))
    return d.case(scores, d.integers(rows, 0, classes - 1), weights, outputs=2, reduction=reduction)
