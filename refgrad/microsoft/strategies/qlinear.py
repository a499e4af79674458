"""Strategies of ONNX Runtime's operators of quantized tensors.

The numbers are small and the scales are large and have simple ratios: no result lies near the middle between two others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.convolution import groups
from refgrad.conformance.strategies.drawing import Drawing, Shape
from refgrad.conformance.strategies.windows import windows
from refgrad.extend import strategy
from refgrad.microsoft.cases import scalar
from refgrad.microsoft.cases.qlinear import rounding
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
Quantized = tuple[Array, Array, Array]  # numbers, their scale and their zero point


@strategy("QLinearAdd", "QLinearMul", domain=MICROSOFT)
def binary(d: Drawing) -> Case:
    """Broadcast operands, made of floats or not."""
    kind, (left, right) = _kind(d), d.broadcasting()
    scale = 30.0 if d.op_type == "QLinearAdd" else 600.0
    a, b = _tensor(d, kind, left, 10.0), _tensor(d, kind, right, 20.0)
    return case(d, *a, *b, scalar(scale), kind(12), quantize=some(d, "A", "B"))


@strategy("QLinearSigmoid", "QLinearLeakyRelu", domain=MICROSOFT)
def unary(d: Drawing) -> Case:
    """Numbers of which none stands for 0, where LeakyRelu has a kink."""
    kind, shape = _kind(d), d.shape()
    x = (2 * d.integers(shape, -4, 3) + 1 + middle(kind)).astype(kind)
    scale = 1.0 if d.op_type == "QLinearSigmoid" else 3.0
    alpha = d.pick(None, 0.25, -2.0) if d.op_type == "QLinearLeakyRelu" else None
    there, back = (scalar(scale), kind(middle(kind))), (scalar(0.31 if scale == 1.0 else 2.0 * scale / 3), kind(50))
    return case(d, x, *there, *back, quantize=some(d, "X"), alpha=alpha)


@strategy("QLinearSoftmax", domain=MICROSOFT)
def softmax(d: Drawing) -> Case:
    """Along an axis, or over the axes from there on as one; the numbers are so far apart that one has all the weight."""
    kind, shape = _kind(d), d.shape(1, 3, empty=False)
    order = np.array(d.permutation(int(np.prod(shape)))).reshape(shape) % 12
    x = (order - 6 + middle(kind)).astype(kind)
    back = scalar(1 / 3), kind(9)
    settings = {"axis": d.optional(lambda: d.axis(len(shape))), "opset_": d.pick(13, 12)}
    return case(d, x, scalar(40.0), kind(8), *back, quantize=some(d, "X"), **settings)


@strategy("QLinearConcat", domain=MICROSOFT)
def concat(d: Drawing) -> Case:
    """One tensor or several."""
    kind, shape = _kind(d), d.shape(1, 3, empty=False)
    axis = d.axis(len(shape))
    place = axis % len(shape)
    parts: list[np.ndarray] = []
    for _ in range(d.integer(1, 3)):
        part = (*shape[:place], d.integer(1, 3), *shape[place + 1 :])
        parts += _tensor(d, kind, part, d.pick(10.0, 20.0))
    return case(d, scalar(30.0), kind(9), *parts, quantize=some(d, "inputs_0"), axis=axis)


@strategy("QLinearWhere", domain=MICROSOFT)
def where(d: Drawing) -> Case:
    """Conditions and operands that broadcast."""
    kind, (condition, left, right) = _kind(d), d.broadcasting(3)
    x, y = _tensor(d, kind, left, 10.0), _tensor(d, kind, right, 20.0)
    return case(d, d.bools(condition), *x, *y, scalar(30.0), kind(9), quantize=some(d, "X", "Y"))


@strategy("QLinearAveragePool", domain=MICROSOFT)
def average_pool(d: Drawing) -> Case:
    """Windows as of AveragePool, the channels in front or behind."""
    kind, over, channels_last = _kind(d), windows(d, d.pick(2, 1), dilated=False, pooling=True), d.flag()
    x, back = _image(d, kind, over.image, channels_last), (scalar(0.5), kind(100))
    more = {name: value for name, value in over.attributes(d).items() if name != "dilations"}
    return case(
        d,
        *(*x, *back),
        quantize=some(d, "X"),
        channels_last=int(channels_last) or None,
        count_include_pad=d.pick(None, 1),
        **more,
    )


@strategy("QLinearGlobalAveragePool", domain=MICROSOFT)
def global_average_pool(d: Drawing) -> Case:
    """Images of one to three axes, the channels in front or behind."""
    kind, channels_last = _kind(d), d.flag()
    x = _image(d, kind, d.shape(1, 3, size=3, empty=False), channels_last)
    return case(d, *x, scalar(0.5), kind(100), quantize=some(d, "X"), channels_last=int(channels_last) or None)


@strategy("QLinearReduceMean", domain=MICROSOFT)
def reduce_mean(d: Drawing) -> Case:
    """Over one axis or several, which are kept or not."""
    kind, shape = _kind(d), d.shape(1, 3, size=3, empty=False)
    x = _tensor(d, kind, shape, 30.0, zero=middle(kind))
    axes, keepdims = d.axes(len(shape), least=1), int(d.flag())
    return case(d, *x, scalar(0.5), kind(100), quantize=some(d, "data"), axes=axes, keepdims=keepdims)


def _image(d: Drawing, kind: Any, pixels: Shape, channels_last: bool) -> Quantized:
    """Of two batches or one; a mean of these numbers is not near a middle between two multiples of 1/60."""
    batch, channels = d.integer(1, 2), d.integer(1, 2)
    return _tensor(d, kind, (batch, *pixels, channels) if channels_last else (batch, channels, *pixels), 30.0)


@strategy("QLinearConv", domain=MICROSOFT)
def convolution(d: Drawing) -> Case:
    """Windows and groups as of Conv; one scale for all filters or one for each; the channels in front or behind."""
    left, right = d.pick((np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.int8))
    over = windows(d, d.pick(2, 1))
    group, channels, filters = groups(d)
    channels_last = d.shapes != "unknown" and d.flag()
    pixels = over.image
    shape = (1, *pixels, group * channels) if channels_last else (1, group * channels, *pixels)
    w = d.integers((group * filters, channels, *over.kernel), -3, 3) + middle(right)
    per_filter = (group * filters,) if d.flag() else ()
    kernel = w.astype(right), np.full(per_filter, 11.0, np.float32), np.full(per_filter, right(middle(right)))
    bias = d.optional(lambda: d.integers((group * filters,), -9, 9, np.int32))
    return case(
        d,
        *_tensor(d, left, shape, 9.0),
        *kernel,
        *(scalar(297.0), left(90), bias),
        quantize=some(d, "x", "w"),
        channels_last=int(channels_last) or None,
        group=group,
        **over.attributes(d, d.flag()),
    )


@strategy("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_matmul(d: Drawing) -> Case:
    """A scale for all columns or one for each; a zero point and a bias, or none."""
    kind = d.pick(np.int8, np.uint8)
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    # The numbers range over 255·4 and are a quarter of a step from what they round to.
    steps = d.integers((rows, inner), 0, 255) + np.float32(0.25)
    steps.flat[0], steps.flat[-1] = 0.0, 255.0
    a = np.asarray((steps - 80) * 4, np.float32)
    per_column = (columns,) if d.flag() else d.pick((), (1,))
    b = (d.integers((inner, columns), -6, 6) + middle(kind)).astype(kind)
    zero = d.optional(lambda: np.full(per_column, kind(8)))
    return d.case(a, b, d.floats(per_column, 0.25, 2), zero, d.optional(lambda: d.floats((columns,))))


@strategy("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_integer_to_float(d: Drawing) -> Case:
    """Matrices and stacks of them; scales and zero points for all columns or for each."""
    left, right = d.pick((np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.int8))
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    stack = d.shape(0, 1, size=2, empty=False)
    a, b = (*stack, rows, inner), (*(stack if d.flag() else ()), inner, columns)
    numbers = [(d.integers(s, -6, 6) + middle(k)).astype(k) for s, k in ((a, left), (b, right))]
    of_a, of_b = ((n,) if d.flag() else () for n in (inner, columns))
    zeros = (np.full(s, k(8)) if d.flag() else None for s, k in ((of_a, left), (of_b, right)))
    return case(
        d,
        *numbers,
        *(d.floats(s, 0.25, 2) for s in (of_a, of_b)),
        *zeros,
        d.optional(lambda: d.floats((columns,))),
        quantize=some(d, "A", "B"),
    )


@strategy("QGemm", domain=MICROSOFT)
def qgemm(d: Drawing) -> Case:
    """Transposed or not, with a bias of any shape that broadcasts; a result in floats or a quantized one."""
    left, right = d.pick((np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.int8))
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    turned = d.flag(), d.flag()
    a = _tensor(d, left, (inner, rows) if turned[0] else (rows, inner), 9.0)
    shape = (columns, inner) if turned[1] else (inner, columns)
    per_column = (columns,) if d.flag() else ()
    b = (d.integers(shape, -6, 6) + middle(right)).astype(right)
    bias = d.optional(lambda: d.integers(d.broadcast_to((rows, columns)), -9, 9, np.int32))
    back = d.pick((scalar(297.0), left(100)), (None, None))
    return case(
        d,
        *a,
        *(b, np.full(per_column, 11.0, np.float32), np.full(per_column, right(7)), bias, *back),
        quantize=some(d, "A", "B"),
        transA=int(turned[0]) or None,
        transB=int(turned[1]) or None,
        alpha=d.pick(None, 1.0, -2.0),
    )


@strategy("QAttention", domain=MICROSOFT, ranked=True)
def qattention(d: Drawing) -> Case:
    """With and without zero points, a mask, a past and an order."""
    heads, size, length, taken, batch = (d.integer(1, 2) for _ in range(5))
    width, kind = 3 * heads * size, d.pick(np.int8, np.uint8)
    past = d.optional(lambda: d.integer(1, 2)) or 0
    per_column = (width,) if d.flag() else ()
    x = (d.integers((batch, length, taken), -6, 6) + 10).astype(np.uint8)
    w = (d.integers((taken, width), -6, 6) + middle(kind)).astype(kind)
    zeros = d.flag()
    return case(
        d,
        *(x, w, d.floats((width,)), scalar(0.1), d.floats(per_column, 0.125, 0.25)),
        d.optional(lambda: d.integers((batch, past + length), 0, 1, np.int32)),
        *((np.uint8(9), np.full(per_column, kind(8))) if zeros else (None, None)),
        d.floats((2, batch, heads, past, size)) if past else None,
        quantize=some(d, "input", "weight"),
        num_heads=heads,
        scale=d.pick(None, 0.5),
        mask_filter_value=d.pick(None, -1.5),
        unidirectional=d.pick(None, 0, 1),
        outputs=2 if past else d.integer(1, 2),
    )


@strategy("MatMulInteger16", domain=MICROSOFT)
def matmul_integer16(d: Drawing) -> Case:
    """Matrices, vectors and stacks of them, with a sign or without."""
    inner, stack = d.integer(1, 3), d.shape(0, 1, size=2, empty=False)
    a, b = d.pick((inner,), (*stack, 2, inner)), d.pick((inner,), (inner, 2), (*stack, inner, 2))
    kinds = [d.pick(np.int16, np.uint16) for _ in range(2)]
    numbers = [(d.integers(s, -6, 6) + middle(k)).astype(k) for s, k in zip((a, b), kinds, strict=True)]
    return case(d, *numbers, quantize=some(d, "A", "B"))


@strategy("MulInteger", domain=MICROSOFT)
def mul_integer(d: Drawing) -> Case:
    """Operands that broadcast, with and without zero points."""
    kind, shapes = _kind(d), d.broadcasting()
    a, b = ((d.integers(shape, -6, 6) + middle(kind)).astype(kind) for shape in shapes)
    zeros = (d.optional(lambda: np.array(9, kind)) for _ in range(2))
    return case(d, a, next(zeros), b, next(zeros), quantize=some(d, "A", "B"))


@strategy("ReduceSumInteger", domain=MICROSOFT)
def reduce_sum_integer(d: Drawing) -> Case:
    """Over one axis or several, which are kept or not."""
    kind, shape = _kind(d), d.shape(1, 3, size=3)
    axes = d.axes(len(shape), least=1)
    x = (d.integers(shape, -6, 6) + middle(kind)).astype(kind)
    return case(d, x, quantize=some(d, "data"), axes=axes, keepdims=int(d.flag()))


@strategy("QEmbedLayerNormalization", domain=MICROSOFT)
def qembed_layer_normalization(d: Drawing) -> Case:
    """With and without segments and a mask."""
    kind, ids = _kind(d), (d.integer(1, 2), d.integer(1, 3))
    width, has_segments = d.integer(2, 4), d.flag()
    shapes = ((3, width), (3, width), (2, width), (width,), (width,))
    tables = [(d.integers(shape, -6, 6) + middle(kind)).astype(kind) for shape in shapes]
    tables[0][:] += np.arange(width, dtype=kind)  # so that no row has the variance 0
    inputs = [
        d.integers(ids, 0, 2, np.int32),
        d.integers(ids, 0, 1, np.int32) if has_segments else None,
        *tables,
        d.optional(lambda: d.integers(ids, 0, 1, np.int32)),
        *(d.floats((), 0.125, 0.5) for _ in range(5)),
        *(np.array(8, kind) for _ in range(5)),
    ]
    if not has_segments:
        for position in (4, 10, 15):
            inputs[position] = None
    return case(d, *inputs, quantize=some(d, "word_embedding_quant"), outputs=2, epsilon=d.pick(0.125, 1.0))


def _kind(d: Drawing) -> Any:
    return d.pick(np.uint8, np.int8)


def middle(kind: Any) -> int:
    """The number around which the numbers of a type are drawn."""
    return 0 if kind is np.int8 else 10


def _tensor(d: Drawing, kind: Any, shape: Shape, scale: float, zero: int = 8) -> Quantized:
    numbers = d.integers(shape, -6, 6) + middle(kind)
    return numbers.astype(kind), scalar(scale), np.array(zero, kind)


def some(d: Drawing, *names: str) -> tuple[str, ...]:
    """The inputs that are made of floats: all of them or none."""
    return names if d.flag() else ()


def case(d: Drawing, *inputs: Any, **options: Any) -> Case:
    """See `rounding`; an option that is None is absent, as is an input that is None behind the others."""
    given = {name: value for name, value in options.items() if value is not None}
    arrays = list(inputs)
    while arrays[-1] is None:
        arrays.pop()
    return d.finished(rounding(d.op_type, *arrays, shapes=d.shapes, **given))
