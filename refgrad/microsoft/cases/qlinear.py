"""Cases of ONNX Runtime's operators of quantized tensors: models that quantize before them and read floats behind them.

The scales are large and have simple ratios, so that no number comes near the middle between two others when one of them
moves by a thousandth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from refgrad.conformance.case import NODE, SHAPES, Case, Feeds, Recipe, is_float
from refgrad.microsoft.cases import array, case, scalar
from refgrad.protos.types import FLOATS

Array = np.ndarray


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    for shapes in SHAPES:
        every = [*_products(shapes), *_elementwise(shapes), *_pooling(shapes), *_convolutions(shapes)]
        every += [*_sums(shapes), *_embeddings(shapes)]
        yield from every
        if shapes == "static":
            yield from with_constants(every)


def rare() -> Iterator[Case]:
    """Tensors of nothing, and of the smallest rank."""
    whole = Drawer(4)
    u, s = np.uint8, np.int8
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    x: tuple[Any, ...]
    one, two, back = (scalar(10.0), u(8)), (scalar(20.0), u(11)), (scalar(30.0), u(12))
    for a, b in (((0, 3), (3,)), ((), ())):
        for name in ("QLinearAdd", "QLinearMul"):
            yield rounding(name, whole(u, *a), *one, whole(u, *b), *two, *back)
        yield rounding("QLinearWhere", np.ones(a, np.bool_), whole(u, *a), *one, whole(u, *b), *two, *back)
        for name in ("QLinearSigmoid", "QLinearLeakyRelu"):
            yield rounding(name, np.full(a, 12, u), *one, *back)
    for shape in ((0, 3), (3,)):
        yield rounding("QLinearSoftmax", whole(u, *shape), scalar(0.3), u(9), scalar(0.25), u(4), opset_=13)
    yield rounding("QLinearConcat", *back, whole(u, 0, 3), *one, whole(u, 2, 3), *two, axis=0)
    for shape in ((0, 1, 3), (1, 1, 3)):
        x = whole(u, *shape), scalar(12.0), u(9)
        yield rounding("QLinearAveragePool", *x, scalar(3.0), u(50), kernel_shape=[2])
        yield rounding("QLinearGlobalAveragePool", *x, scalar(4.0), u(50))
    for shape in ((0, 3), (3,)):
        yield rounding("QLinearReduceMean", whole(u, *shape), *one, *two, axes=[-1], keepdims=0)
    for batch in (0, 1):
        x, w = (whole(u, batch, 1, 3), scalar(11.0), u(9)), (whole(s, 1, 1, 2), scalar(9.0), s(1))
        yield rounding("QLinearConv", *x, *w, scalar(297.0), u(12))
    vector = array([-200.0, -105.0, 30.0])
    for rows in ((0, 3), (3,)):
        given = vector if len(rows) == 1 else vector[np.newaxis][:0]
        yield rounding("DynamicQuantizeMatMul", given, whole(s, 3, 2), whole.scales())
        yield rounding("MatMulIntegerToFloat", whole(u, *rows), whole(s, 3, 2), whole.scales(), whole.scales())
    yield rounding("QGemm", whole(u, 0, 3), *one, whole(u, 3, 2), *two, None, *back)
    for rows in ((0, 3), (3,)):
        yield rounding("MatMulInteger16", whole(np.int16, *rows), whole(np.int16, 3, 2))
        yield rounding("ReduceSumInteger", whole(u, *rows), axes=[-1], keepdims=0)
    for shape in ((0, 3), ()):
        yield rounding("MulInteger", whole(u, *shape), u(9), whole(u, *shape), u(8))
    tables = [whole(s, *sizes) for sizes in ((5, 4), (3, 4), (4,), (4,))]
    scales, zeros = [scalar(0.3)] * 4, [np.array(0, s)] * 4
    parts = [*tables[:2], None, *tables[2:], None, *scales[:2], None, *scales[2:], *zeros[:2], None, *zeros[2:]]
    yield rounding("QEmbedLayerNormalization", np.zeros((0, 3), np.int32), None, *parts, outputs=2, epsilon=1e-3)
    weights = whole(s, 2, 6), whole.floats(6), scalar(0.05), scalar(0.05)
    yield rounding("QAttention", whole(u, 0, 3, 2), *weights, num_heads=2)


def with_constants(every: list[Case]) -> Iterator[Case]:
    """The cases again whose inputs that hold no floats can be initializers, one for each set of such inputs."""
    seen = set()
    for one in every:
        names = _of_integers(one)
        key = one.operator, *names
        if not names or key in seen:
            continue
        seen.add(key)
        recipe = Recipe(partial(_with_constants, one, tuple(names)), one.operator, one.opset, one.dtype, one.static)
        yield recipe.case(f"{one}-constant={','.join(names)}", wrt=one.wrt)


def _of_integers(one: Case) -> list[str]:
    """The inputs that hold no floats. The inputs of `rounding` are known before the model is made."""
    rounds = one.recipe.make if one.recipe is not None else None
    feeds = rounds.whole if isinstance(rounds, _Rounding) else one.feeds
    return [n for n, a in feeds.items() if a.dtype.kind in "iub" and not n.endswith("_shape")]


def _with_constants(one: Case, names: Sequence[str]) -> tuple[ModelProto, Feeds]:
    """The model with initializers of these names, and the other feeds."""
    model = ModelProto()
    model.CopyFrom(one.model)
    kept = [value for value in model.graph.input if value.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.extend(numpy_helper.from_array(one.feeds[name], name) for name in names)
    return model, {name: array for name, array in one.feeds.items() if name not in names}


class Drawer:
    """Draws whole numbers: the same ones in every process."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, kind: Any, *shape: int, low: int = -6, high: int = 7) -> Array:
        """Numbers from `low` to `high`, of an unsigned type around 10."""
        middle = 10 if np.iinfo(kind).min == 0 else 0
        return np.asarray(self._random.integers(low, high, shape) + middle).astype(kind)

    def scales(self, *shape: int) -> Array:
        """Numbers from 0.8 to 1.2."""
        return np.asarray(self._random.uniform(0.8, 1.2, shape), np.float32)

    def floats(self, *shape: int) -> Array:
        """Normally distributed numbers."""
        return np.asarray(self._random.standard_normal(shape), np.float32)


def rounding(op_type: str, *inputs: Any, quantize: Sequence[str] = (), shapes: str = "static", **options: Any) -> Case:
    """A case whose model makes the inputs in `quantize` of floats, a quarter of a step away from them, and reads floats.

    Where what comes behind the operator is no float, or of a type that no input has, these floats are t times that.
    """
    arrays = [None if value is None else np.asarray(value) for value in inputs]
    made = case(op_type, *arrays, shapes=shapes, **options)
    name = "-".join(filter(None, (made.name, ",".join(quantize))))
    first = next((n for n, array in made.feeds.items() if n in quantize or is_float(array)), "")
    dtype = "float32" if first in ("", *quantize) else made.feeds[first].dtype.name
    recipe = Recipe(_Rounding(made, tuple(quantize)), made.operator, made.opset, dtype, made.static)
    return recipe.case(name)


@dataclass(frozen=True)
class _Rounding:
    """The model of `made` with floats in place of the inputs in `quantize`, and its feeds."""

    made: Case
    quantize: tuple[str, ...]

    @property
    def whole(self) -> Feeds:
        """The feeds that stay as they are."""
        return {name: array for name, array in self.made.feeds.items() if name not in self.quantize}

    def __call__(self) -> tuple[ModelProto, Feeds]:
        model = ModelProto()
        model.CopyFrom(self.made.model)
        feeds = dict(self.made.feeds)
        for name in self.quantize:
            feeds[name] = _quantized_of_floats(model, name, feeds[name])
        names = [value.name for value in model.graph.output if "mask_index" not in value.name]
        if any(_read_back(model, name) for name in names):
            feeds["t"] = np.array(0.7, np.float32)
        return model, feeds


def _quantized_of_floats(model: ModelProto, name: str, whole: Array) -> Array:
    """Let QuantizeLinear make that input; the floats to feed in its place."""
    graph = model.graph
    step = 0.5  # of which no sum of floats loses anything
    node = next(node for node in graph.node if node.name == NODE)
    read = name if name in node.input else f"{name}_"  # through a Reshape
    node.input[:] = [f"{name}_quantized" if n == read else n for n in node.input]
    next(v for v in graph.input if v.name == name).type.tensor_type.elem_type = TensorProto.FLOAT
    graph.initializer.append(numpy_helper.from_array(np.array(step, np.float32), f"{name}_step"))
    graph.initializer.append(numpy_helper.from_array(np.zeros((), whole.dtype), f"{name}_zero"))
    before = helper.make_node(
        "QuantizeLinear", [read, f"{name}_step", f"{name}_zero"], [f"{name}_quantized"], name=f"quantize_{name}"
    )
    graph.node.insert(list(graph.node).index(node), before)
    quarter = np.where(np.arange(whole.size).reshape(whole.shape) % 2, 0.25, -0.25)
    return np.asarray((whole.astype(np.float64) + quarter) * step, np.float32)


def _read_back(model: ModelProto, name: str) -> bool:
    """Make an output t times what it is, where it is not of the type of a float that is fed; whether it was not."""
    graph = model.graph
    value = next(v for v in graph.output if v.name == name)
    fed = {v.type.tensor_type.elem_type for v in graph.input}
    if value.type.tensor_type.elem_type in fed.intersection(FLOATS):
        return False
    if all(v.name != "t" for v in graph.input):
        graph.input.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, []))
    graph.node.append(helper.make_node("Cast", [name], [f"{name}_float"], name=f"read_{name}", to=TensorProto.FLOAT))
    graph.node.append(helper.make_node("Mul", [f"{name}_float", "t"], [f"{name}_read"], name=f"scale_{name}"))
    value.name, value.type.tensor_type.elem_type = f"{name}_read", TensorProto.FLOAT
    return True


def _products(shapes: str) -> Iterator[Case]:
    whole = Drawer()
    u, s = np.uint8, np.int8
    a = array([[-200.0, -105.0, 30.0], [62.0, 131.0, 198.0]])
    for kind in (u, s):
        yield case("DynamicQuantizeMatMul", a, whole(kind, 3, 4), whole.scales(), shapes=shapes)
    columns = (whole.scales(4), whole(s, 4), whole.floats(4))
    yield case("DynamicQuantizeMatMul", a[None], whole(s, 3, 4), *columns, shapes=shapes)
    yield case("DynamicQuantizeMatMul", a, whole(s, 3, 4), whole.scales(1), None, whole.floats(4), shapes=shapes)
    name = "MatMulIntegerToFloat"
    for left, right in ((u, u), (u, s), (s, s)):
        both = whole(left, 2, 3), whole(right, 3, 4)
        yield rounding(name, *both, whole.scales(), whole.scales(), shapes=shapes, quantize=("A", "B"))
    scales = whole.scales(), whole.scales(4)
    yield rounding(name, whole(u, 2, 2, 3), whole(s, 3, 4), *scales, u(9), whole(s, 4), whole.floats(4), shapes=shapes)
    yield rounding(name, whole(u, 2, 3), whole(s, 2, 3, 4), *scales, shapes=shapes)
    yield case(name, whole(u, 2, 3), whole(s, 3, 4), whole.scales(3), whole.scales(), whole(u, 3), shapes=shapes)
    half = [np.asarray(value, np.float16) for value in (whole.scales(), whole.scales(4), whole.floats(4))]
    if shapes == "static":
        yield case(name, whole(u, 2, 3), whole(s, 3, 4), *half[:2], np.array(9, u), whole(s, 4), half[2], shapes=shapes)
    name = "QGemm"
    one: tuple[Any, ...]
    two: tuple[Any, ...]
    for left, right, to in ((u, u, u), (u, s, u), (s, s, s)):
        one, two = (whole(left, 2, 3), scalar(9.0), left(8)), (whole(right, 3, 4), scalar(11.0), right(2))
        wide = np.array([[5, -3, 2, 1]], np.int32)
        yield rounding(name, *one, *two, wide, scalar(297.0), to(9), shapes=shapes, quantize=("A", "B"))
    per_column = array([10.0, 15.0, 20.0, 5.0])
    one, two = (whole(u, 3, 2), scalar(9.0), u(8)), (whole(s, 4, 3), per_column, whole(s, 4))
    turned: dict[str, Any] = {"transA": 1, "transB": 1, "alpha": 0.6, "shapes": shapes}
    yield rounding(name, *one, *two, None, scalar(81.0), u(9), **turned)
    yield rounding(name, *one, *two, wide, quantize=("A", "B"), **turned)
    yield rounding(name, *one, *two, **turned)
    yield rounding(name, *one, *two, np.array(4, np.int32), array([81.0]), u(9), **turned)
    if shapes != "unknown":
        yield from _attentions(whole, shapes)


def _attentions(whole: Drawer, shapes: str) -> Iterator[Case]:
    """Of a kernel that knows uint8 only for its input."""
    name, heads, size = "QAttention", 2, 3
    width = heads * size
    x, w, bias = whole(np.uint8, 2, 3, 4), whole(np.int8, 4, 3 * width), whole.floats(3 * width)
    scales = scalar(0.05), scalar(0.05)
    settings: dict[str, Any] = {"num_heads": heads, "shapes": shapes}
    yield rounding(name, x, w, bias, *scales, quantize=("input", "weight"), **settings)
    mask, zeros = np.array([[1, 1, 0], [1, 0, 0]], np.int32), (np.uint8(9), np.int8(2))
    fine = scalar(0.05), np.asarray(whole.scales(3 * width) * np.float32(0.05))
    per_column = np.uint8(9), whole(np.int8, 3 * width)
    yield rounding(name, x, w, bias, *fine, mask, *per_column, mask_filter_value=-1.5, scale=0.4, **settings)
    past = whole.floats(2, 2, heads, 2, size)
    yield rounding(name, x, w, bias, *scales, None, *zeros, past, outputs=2, unidirectional=1, **settings)


def _elementwise(shapes: str) -> Iterator[Case]:
    whole = Drawer(1)
    for kind in (np.uint8, np.int8):
        given: dict[str, Any] = {"shapes": shapes}
        for name, scale in (("QLinearAdd", 30.0), ("QLinearMul", 600.0)):
            a, b = (whole(kind, 2, 3), scalar(10.0), kind(8)), (whole(kind, 3), scalar(20.0), kind(11))
            yield rounding(name, *a, *b, scalar(scale), kind(12), quantize=("A", "B"), **given)
            yield rounding(name, *a[:2], None, *b[:2], None, scalar(scale * 3), shapes=shapes)
        far = np.array([[1, 60, -50], [-1, 60, 1]]) + (65 if kind is np.uint8 else 0)  # beyond both ends of the range
        a = far.astype(kind), scalar(10.0), kind(65 if kind is np.uint8 else 0)
        yield rounding("QLinearAdd", *a, *b, scalar(3.0), kind(12), quantize=("A", "B"), **given)
        x = whole(kind, 2, 3, 2)
        x[x == 9] += kind(2)  # which stands for 0, where LeakyRelu has a kink
        for name, there, back in (("QLinearSigmoid", 0.9, 0.31), ("QLinearLeakyRelu", 9.0, 13.5)):
            more: dict[str, Any] = {"alpha": 0.3} if name == "QLinearLeakyRelu" else {}
            yield rounding(name, x, scalar(there), kind(9), scalar(back), kind(12), quantize=("X",), **more, **given)
            yield rounding(name, x, array([there]), None, array([back]), kind(12), **given)
        finer = rounding("QLinearSigmoid", x, scalar(0.5), kind(9), scalar(0.02), kind(12), **given)
        yield finer.changed(wrt=("t",))  # a thousandth of a scale moves some numbers to the next step
        for opset, axis in ((13, -1), (13, 1), (12, 1), (12, -2)):
            more = {"opset_": opset, "axis": axis}
            yield rounding(
                "QLinearSoftmax", x, scalar(0.3), kind(9), scalar(0.25), kind(4), quantize=("X",), **more, **given
            )
        yield rounding("QLinearSoftmax", x, scalar(0.3), None, scalar(0.25), kind(4), opset_=13, **given)
        left, right = (whole(kind, 2, 3), scalar(10.0), kind(8)), (whole(kind, 2, 1), scalar(20.0), kind(11))
        z = scalar(30.0), kind(9)
        yield rounding("QLinearConcat", *z, *left, *right, axis=1, quantize=("inputs_0", "inputs_3"), **given)
        yield rounding("QLinearConcat", *z, *left, axis=-2, **given)
        chosen = np.array([[True, False, True], [False, False, True]])
        yield rounding("QLinearWhere", chosen, *left, *right, *z, quantize=("X", "Y"), **given)
        yield rounding("QLinearWhere", chosen, *left, *right, *z, **given)


def _pooling(shapes: str) -> Iterator[Case]:
    whole = Drawer(2)
    for kind in (np.uint8, np.int8):
        given: dict[str, Any] = {"shapes": shapes}
        image, last = whole(kind, 2, 2, 4, 3), whole(kind, 2, 4, 3, 2)
        there, back = (scalar(12.0), kind(9)), (scalar(3.0), kind(50))
        for x, channels_last in ((image, 0), (last, 1)):
            more: dict[str, Any] = {"quantize": ("X",), "channels_last": channels_last, **given}
            yield rounding("QLinearGlobalAveragePool", x, *there, *back, **more)
            yield rounding("QLinearGlobalAveragePool", x, *there, *back, channels_last=channels_last, **given)
            yield rounding("QLinearAveragePool", x, *there, *back, kernel_shape=[2, 3], **more)
            paddings: dict[str, Any] = {
                "pads": [1, 0, 1, 1],
                "strides": [2, 1],
                "count_include_pad": 1,
                "kernel_shape": [2, 2],
            }
            yield rounding("QLinearAveragePool", x, scalar(12.0), None, scalar(3.0), **paddings, **more)
        more = {"auto_pad": "SAME_LOWER", "kernel_shape": [3, 2], "strides": [2, 2]}
        yield rounding("QLinearAveragePool", image, *there, *back, **more, **given)
        more = {"ceil_mode": 1, "kernel_shape": [3, 2], "strides": [2, 2]}
        yield rounding("QLinearAveragePool", image, *there, *back, **more, **given)
        name = "QLinearReduceMean"
        yield rounding(name, image, *there, *back, axes=[1, -1], keepdims=1, quantize=("data",), **given)
        yield rounding(name, image, scalar(12.0), None, scalar(3.0), axes=[-2], keepdims=0, **given)


def _convolutions(shapes: str) -> Iterator[Case]:
    whole, name, (u, s) = Drawer(3), "QLinearConv", (np.uint8, np.int8)
    w: tuple[Any, ...]
    for left, right in ((u, u), (u, s), (s, s)):
        x, w = (whole(left, 1, 2, 3, 4), scalar(11.0), left(9)), (whole(right, 3, 2, 2, 2), scalar(9.0), right(2))
        bias, back = np.array([5, -3, 2], np.int32), (scalar(495.0), left(12))
        window: dict[str, Any] = {"pads": [1, 0, 0, 1], "strides": [2, 1], "shapes": shapes}
        yield rounding(name, *x, *w, *back, bias, quantize=("x", "w"), **window)
        yield rounding(name, *x, *w, *back, bias, **window)
        if shapes != "unknown":
            last = (whole(left, 1, 3, 4, 2), *x[1:])
            yield rounding(name, *last, *w, *back, bias, channels_last=1, quantize=("x", "w"), **window)
    x, w = (whole(u, 2, 4, 5), scalar(11.0), u(9)), (whole(s, 2, 2, 3), array([10.0, 30.0]), whole(s, 2))
    for more in ({"dilations": [2]}, {"kernel_shape": [3], "auto_pad": "SAME_UPPER"}):
        yield rounding(name, *x, *w, scalar(550.0), u(50), quantize=("x", "w"), shapes=shapes, group=2, **more)


def _sums(shapes: str) -> Iterator[Case]:
    """Of whole numbers, with 32 bits."""
    whole = Drawer(5)
    given: dict[str, Any] = {"shapes": shapes}
    for left, right in ((np.int16, np.int16), (np.uint16, np.int16), (np.uint16, np.uint16)):
        yield rounding("MatMulInteger16", whole(left, 2, 3), whole(right, 3, 4), quantize=("A", "B"), **given)
        yield rounding("MatMulInteger16", whole(left, 2, 2, 3), whole(right, 3), **given)
    for kind in (np.uint8, np.int8):
        a, b = whole(kind, 2, 3), whole(kind, 3)
        yield rounding("MulInteger", a, kind(9), b, kind(8), quantize=("A", "B"), **given)
        yield rounding("MulInteger", b, None, a, None, quantize=("A", "B"), **given)
        for rows, columns in (((2, 3), (2, 1)), ((2, 1), (2, 3)), ((3,), (2, 3)), ((2, 3), (3,))):
            factors = whole(kind, *rows), None, whole(kind, *columns)
            yield rounding("MulInteger", *factors, **given)
            if len(rows) == len(columns):
                yield rounding("MulInteger", *factors, quantize=("A", "B"), **given)
        x = whole(kind, 2, 3, 2)
        yield rounding("ReduceSumInteger", x, axes=[0, -1], keepdims=1, quantize=("data",), **given)
        yield rounding("ReduceSumInteger", x, axes=[-2], keepdims=0, quantize=("data",), **given)
        yield rounding("ReduceSumInteger", x, axes=[1], keepdims=0, **given)


def _embeddings(shapes: str) -> Iterator[Case]:
    """With and without segments and a mask."""
    whole, name = Drawer(6), "QEmbedLayerNormalization"
    words, pairs = np.array([[1, 0, 4], [2, 2, 3]], np.int32), np.array([[0, 0, 1], [1, 0, 1]], np.int32)
    mask = np.array([[1, 1, 0], [1, 0, 0]], np.int32)
    for kind in (np.uint8, np.int8):
        tables = [whole(kind, *shape) for shape in ((5, 4), (3, 4), (2, 4), (4,), (4,))]
        scales = [scalar(value) for value in (0.3, 0.2, 0.25, 0.4, 0.1)]
        zeros = [np.array(value, kind) for value in (9, 10, 11, 8, 7)]
        yield rounding(name, words, pairs, *tables, mask, *scales, *zeros, outputs=2, shapes=shapes, epsilon=1e-3)
        left = [
            part for of in (tables, scales, zeros) for part in (*of[:2], None, *of[3:])
        ]  # without the segments' entries
        quantize = ("word_embedding_quant", "gamma_quant")
        yield rounding(name, words, None, *left[:5], None, *left[5:], outputs=2, shapes=shapes, quantize=quantize)
