"""Cases of quantization. No value lies near the middle between two quantised ones, or near the end of the range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from refgrad.conformance.case import SHAPES, Case, node_case

# Element types, and the opset from which QuantizeLinear makes them.
KINDS: tuple[tuple[Any, int], ...] = (
    (np.int8, 16),
    (np.uint8, 16),
    (ml_dtypes.float8_e4m3fn, 19),
    (ml_dtypes.float8_e4m3fnuz, 19),
    (ml_dtypes.float8_e5m2, 19),
    (ml_dtypes.float8_e5m2fnuz, 19),
    (np.int16, 21),
    (np.uint16, 21),
    (ml_dtypes.int4, 21),
    (ml_dtypes.uint4, 21),
    (ml_dtypes.float4_e2m1fn, 23),
    (ml_dtypes.int2, 25),
    (ml_dtypes.uint2, 25),
    (ml_dtypes.float6_e2m3fn, 28),
    (ml_dtypes.float6_e3m2fn, 28),
)

# The shape of x, the shape of the scale, the axis, the size of a block.
GRAINS: tuple[tuple[tuple[int, ...], tuple[int, ...], int, int], ...] = (
    ((2, 3, 4), (), 1, 0),
    ((2, 3, 4), (1,), 1, 0),
    ((2, 3, 4), (3,), 1, 0),
    ((2, 3, 4), (2,), 0, 0),
    ((2, 3, 4), (4,), -1, 0),
    ((3,), (3,), 0, 0),
    ((), (), 1, 0),
    ((0, 3), (3,), 1, 0),
    ((4, 6), (4, 2), 1, 3),
    ((5, 2), (3, 2), 0, 2),
    ((2, 5, 3), (2, 2, 3), -2, 3),
    ((2, 4), (1, 4), 0, 2),
    ((2, 4, 3), (2, 2, 3), 1, 2),
)

# Operators that may stand between QuantizeLinear and DequantizeLinear: name, inputs after the first, attributes.
MOVES: tuple[tuple[str, tuple[np.ndarray, ...], dict[str, Any]], ...] = (
    ("Identity", (), {}),
    ("Reshape", (np.array([4, -1]),), {}),
    ("Flatten", (), {}),
    ("Squeeze", (), {}),
    ("Unsqueeze", (np.array([0]),), {}),
    ("Transpose", (), {}),
    ("Expand", (np.array([2, 2, 4, 4, 1]),), {}),
    ("Tile", (np.array([1, 2, 1, 3]),), {}),
    ("Slice", (np.array([1]), np.array([4]), np.array([2]), np.array([2])), {}),
    ("Pad", (np.array([0, 1, 0, 0, 0, 0, 2, 0]),), {}),
    ("Pad", (np.array([0, 1, 0, 0, 0, 0, 1, 0]),), {"mode": "reflect"}),
    ("Gather", (np.array([1, 0, 1]),), {"axis": 1}),
    ("GatherElements", (np.array([[[[0], [3], [0]]]]),), {"axis": 2}),
    ("GatherND", (np.array([[0, 1], [0, 1]]),), {}),
    ("Compress", (np.array([True, False, True, True]),), {"axis": 2}),
    ("Trilu", (), {}),
    ("ReverseSequence", (np.array([4]),), {"time_axis": 1, "batch_axis": 0}),
    ("CenterCropPad", (np.array([2, 2]),), {"axes": [1, 2]}),
    ("DepthToSpace", (), {"blocksize": 2}),
    ("SpaceToDepth", (), {"blocksize": 1}),
    ("MaxPool", (), {"kernel_shape": [2, 1], "strides": [2, 1]}),
    ("Relu", (), {}),
    ("Clip", (np.array(-20, np.int8), np.array(30, np.int8)), {}),
    ("Max", (np.array(5, np.int8),), {}),
    ("Min", (np.array(5, np.int8),), {}),
    ("Resize", (np.zeros(0, np.float32), np.array([1, 1, 2, 1], np.float32)), {"mode": "nearest"}),
    ("Concat", (), {"axis": 1}),
    ("Split", (), {"axis": 2, "num_outputs": 2}),
    ("Where", (), {}),
    ("Cast", (), {"to": TensorProto.INT32}),
    ("CastLike", (np.array(0, np.int32),), {}),
)


def cases() -> Iterator[Case]:
    """DequantizeLinear, whose scale gets a gradient without any rounding: every type, grain and kind of shape."""
    for kind, opset in KINDS:
        yield _dequantize(kind, (2, 3), (3,), opset, zero=is_integer(kind))
    yield _dequantize(np.int32, (2, 3), (3,), 16, zero=False)
    yield _dequantize(np.int8, (2, 3), (3,), 23, dtype=np.float16)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        yield _dequantize(np.int8, (2, 3), (3,), 21, dtype=dtype)
    yield _dequantize(np.int8, (4, 6), (4, 2), 21, dtype=np.float16, axis=1, block_size=3)
    yield _dequantize(np.int8, (2, 3), (3,), 23, output_dtype=TensorProto.FLOAT16)
    for shapes in SHAPES:
        for x, scale, axis, block in GRAINS:
            opset = 21 if block else 16
            yield _dequantize(np.int8, x, scale, opset, shapes=shapes, axis=axis, block_size=block or None)


def rounded() -> Iterator[Case]:
    """Models that round: their derivatives are zero, or as quantization="straight-through" and "clipped" define them."""
    for kind, opset in KINDS:
        yield chain(kind, (4, 5), (), opset)
        yield chain(kind, (4, 5), (5,), max(opset, 23), saturate=0, precision=TensorProto.FLOAT)
    for shapes in SHAPES:
        for x, scale, axis, block in GRAINS:
            yield chain(np.int8, x, scale, 21 if block else 16, shapes=shapes, axis=axis, block_size=block or None)
            if x and shapes != "symbolic":
                yield chain(np.uint8, x, scale, 21, zero=False, shapes=shapes, axis=axis, block_size=block or None)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        yield chain(np.uint8, (4, 5), (5,), 19, dtype=dtype)
    for op_type, inputs, attributes in MOVES:
        yield chain(np.int8, (1, 4, 4, 1), (), 28, move=(op_type, inputs, attributes))
    yield chain(ml_dtypes.float8_e4m3fn, (1, 4, 4, 1), (), 28, zero=False, move=MOVES[5])
    for shapes in SHAPES:
        yield from _products(shapes)
    for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn):
        yield _casts(kind)
    yield _dynamic()


def chain(
    kind: Any,
    x: tuple[int, ...],
    scale: tuple[int, ...],
    opset: int,
    *,
    shapes: str = "static",
    zero: bool = True,
    dtype: Any = np.float32,
    move: tuple[str, Sequence[np.ndarray], dict[str, Any]] | None = None,
    axis: int = 1,
    block_size: int | None = None,
    saturate: int | None = None,
    precision: int | None = None,
    far: float = 0.2,
) -> Case:
    """y = DequantizeLinear(QuantizeLinear(x, s), t), where t has the shape of s, or is a scalar behind a `move`.

    `far` is the share of x that lies outside the range; it is 0 where `saturate` is given.
    """
    low, high = limits(kind)
    rng = np.random.default_rng(0)
    zeros = (
        np.asarray(rng.integers(max(int(low), -3), min(int(high), 4) + 1, scale), np.float64)
        if is_integer(kind)
        else 0.0
    )
    zeros = np.broadcast_to(zeros if zero else 0.0, scale)
    s = rng.uniform(0.5, 1.5, scale) * 0.1
    laid = np.repeat(s, block_size or 1, axis) if block_size else s.reshape(_along(scale, x, axis))
    offset = np.repeat(zeros, block_size or 1, axis) if block_size else zeros.reshape(_along(scale, x, axis))
    if block_size:
        laid, offset = (v.take(range(x[axis]), axis) for v in (laid, offset))
    steps = rng.uniform(max(low, -60), min(high, 60), x)
    steps = np.rint(steps) + rng.uniform(-0.3, 0.3, x)  # in units of the scale
    outside = rng.random(x) < (far if saturate is None else 0)
    steps = np.where(outside, 1.2 * np.where(rng.random(x) < 0.5, low - 9.3, high + 9.3), steps)
    if is_integer(kind):
        steps = np.where(~outside, np.clip(steps, low + 0.2, high - 0.2), steps)
    feeds: dict[str, np.ndarray] = {"x": ((steps - offset) * laid).astype(dtype), "s": s.astype(dtype)}
    feeds["t"] = (s if move is None else np.asarray(0.07)).astype(dtype) * np.asarray(1.5, dtype)
    initializers = [numpy_helper.from_array(zeros.astype(kind), "zero")]
    if move is not None:
        initializers.append(numpy_helper.from_array(np.zeros((), kind) if scale else zeros.astype(kind), "zero_t"))
    grain = {"axis": axis, "block_size": block_size}
    target = {} if zero or kind is np.uint8 else {"output_dtype": helper.np_dtype_to_tensor_dtype(np.dtype(kind))}
    nodes: list[NodeProto] = []
    read = {name: _declared(name, shapes, nodes) for name in ("x", "s", "t")}
    given = ["zero"] if zero else []
    options = {"saturate": saturate, "precision": precision} | grain | target
    nodes.append(_node("QuantizeLinear", [read["x"], read["s"], *given], ["q"], **options))
    moved = "q"
    if move is not None:
        moved = _moved(move, nodes, initializers, x, kind)
    name = "zero" if move is None else "zero_t"
    if move is not None and move[0].startswith("Cast"):  # DequantizeLinear of int32 has no zero point
        given = []
    nodes.append(_node("DequantizeLinear", [moved, read["t"], *([name] if given else [])], ["y"], **grain))
    title = f"chain-{np.dtype(kind).name}-{x}-{scale}-{axis}-{block_size}-{shapes}-zero={zero}-{saturate}-{opset}"
    title += f"-{np.dtype(dtype).name}" + (f"-{move[0]}{len(move[2])}" if move else "")
    return _case(title, nodes, feeds, initializers, opset, shapes)


def _moved(
    move: tuple[str, Sequence[np.ndarray], dict[str, Any]],
    nodes: list[NodeProto],
    initializers: list[TensorProto],
    x: tuple[int, ...],
    kind: Any,
) -> str:
    op_type, inputs, attributes = move
    names = [f"given_{k}" for k in range(len(inputs))]
    initializers += [numpy_helper.from_array(array, name) for array, name in zip(inputs, names, strict=True)]
    if op_type == "Concat":
        names = ["q"]
    if op_type == "Where":
        mask = np.arange(np.prod(x)).reshape(x) % 3 == 0
        initializers.append(numpy_helper.from_array(mask, "mask"))
        initializers.append(numpy_helper.from_array(np.array(3, kind), "other"))
        nodes.append(_node("Where", ["mask", "q", "other"], ["moved"]))
        return "moved"
    outputs = ["left", "moved"] if op_type == "Split" else ["moved"]
    nodes.append(_node(op_type, ["q", *names], outputs, **attributes))
    return "moved"


def _products(shapes: str) -> Iterator[Case]:
    """QLinearConv, QLinearMatMul, ConvInteger and MatMulInteger between QuantizeLinear and floats."""
    rng = np.random.default_rng(1)
    for x, w, per_channel, attributes in (
        ((2, 3, 5, 5), (4, 3, 3, 3), True, {"pads": [1, 1, 1, 1], "strides": [2, 1]}),
        ((2, 4, 6), (2, 2, 3), False, {"group": 2, "dilations": [2]}),
        ((2, 3, 5, 5), (4, 3, 3, 3), True, {"auto_pad": "SAME_UPPER", "kernel_shape": [3, 3]}),
    ):
        draws = {"x": rng.standard_normal(x), "w": rng.standard_normal(w)}
        feeds: dict[str, Any] = draws | {"sx": 0.02, "sy": 0.017, "t": 0.05}
        feeds["sw"] = rng.uniform(0.02, 0.04, w[:1]) if per_channel else 0.03
        constants: dict[str, np.ndarray] = {"zx": np.array(5, np.uint8), "zy": np.array(3, np.int8)}
        constants["zw"] = rng.integers(-3, 4, np.shape(feeds["sw"])).astype(np.int8)
        constants["B"] = rng.integers(-400, 400, w[:1]).astype(np.int32)
        inputs = [*("x", "sx", "zx", "w", "sw", "zw", "sy", "zy"), *([] if "auto_pad" in attributes else ["B"])]
        yield product("QLinearConv", shapes, feeds, constants, inputs, (1, 0), **attributes)
        yield product("ConvInteger", shapes, feeds, constants, ["x", "w", "zx", "zw"], (1, 0), **attributes)
        yield product("ConvInteger", shapes, feeds, constants, ["x", "w"], (1, 0), **attributes)
        if "B" in inputs:  # a bias that is quantised from floats
            made = feeds | {"b": np.linspace(-2, 2, w[0]), "sb": 0.021}
            yield product("QLinearConv", shapes, made, constants, [*inputs[:-1], "b"], (1, 0), **attributes)
    for a, b, rows in (((3, 4), (4, 5), True), ((2, 3, 4), (4, 5), False), ((2, 1, 3, 4), (2, 4, 5), False)):
        feeds = {"x": rng.standard_normal(a), "w": rng.standard_normal(b), "sy": 0.02, "t": 0.05}
        feeds |= {"sx": np.array([0.02, 0.03, 0.025]) if rows else 0.02, "sw": np.full(5 if rows else 1, 0.025)}
        constants = {"zx": np.array([5, 4, 3] if rows else 5, np.uint8), "zy": np.array([3], np.uint8)}
        constants["zw"] = rng.integers(-3, 4, np.shape(feeds["sw"])).astype(np.int8)
        inputs = ["x", "sx", "zx", "w", "sw", "zw", "sy", "zy"]
        yield product("QLinearMatMul", shapes, feeds, constants, inputs, (0, len(b) - 1))
        yield product("MatMulInteger", shapes, feeds, constants, ["x", "w", "zx", "zw"], (0, len(b) - 1))
        yield product("MatMulInteger", shapes, feeds, constants, ["x", "w"], (0, len(b) - 1))
        if rows:
            for op_type, given in (("QLinearMatMul", inputs), ("MatMulInteger", ["x", "w", "zx", "zw"])):
                yield product(op_type, shapes, feeds, constants, given, (0, len(b) - 1), np.float16)


def product(
    op_type: str,
    shapes: str,
    feeds: dict[str, Any],
    constants: dict[str, np.ndarray],
    inputs: Sequence[str],
    axes: tuple[int, int],
    dtype: Any = np.float32,
    opset: int = 21,
    **attributes: Any,
) -> Case:
    """y = t times the product of x and w, which are quantised with the scales sx and sw along `axes`."""
    used = {*inputs, "x", "w", "sx", "sw", "t", "zx", "zw"} | ({"sb"} if "b" in inputs else set())
    fed = {name: np.asarray(value, dtype) for name, value in feeds.items() if name in used}
    nodes: list[NodeProto] = []
    read = {name: _declared(name, shapes, nodes) for name in fed}
    for name, axis in zip("xw", axes, strict=True):
        nodes.append(_node("QuantizeLinear", [read[name], read[f"s{name}"], f"z{name}"], [f"q{name}"], axis=axis))
    if "b" in inputs:
        nodes.append(_node("QuantizeLinear", [read["b"], read["sb"], "zy"], ["qb"]))
        nodes.append(_node("Cast", ["qb"], ["B"], to=TensorProto.INT32))
        read["b"] = "B"
    read |= {"x": "qx", "w": "qw"}
    nodes.append(_node(op_type, [read.get(name, name) for name in inputs], ["q"], **attributes))
    if op_type.startswith("QLinear"):
        nodes.append(_node("DequantizeLinear", ["q", read["t"], "zy"], ["y"]))
    else:
        nodes.append(_node("Cast", ["q"], ["f"], to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype))))
        nodes.append(_node("Mul", ["f", read["t"]], ["y"]))
    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items() if name in used]
    title = f"{op_type}-{fed['x'].shape}-{fed['w'].shape}-{'-'.join(attributes)}-{shapes}"
    title += f"-{len(inputs)}-{inputs[-1]}-{np.dtype(dtype).name}"
    return _case(title, nodes, fed, initializers, opset, shapes)


def _casts(kind: Any) -> Case:
    """Cast to a small float and back."""
    x = np.array([[0.3, -1.1, 2.7], [1e5, -1e6, 0.9]], np.float32)
    target = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    nodes = [_node("Cast", ["x"], ["q"], to=target), _node("Cast", ["q"], ["f"], to=TensorProto.FLOAT)]
    nodes.append(_node("Mul", ["f", "t"], ["y"]))
    return _case(f"Cast-{np.dtype(kind).name}", nodes, {"x": x, "t": np.array(1.5, np.float32)}, [], 23, "static")


def _dynamic() -> Case:
    """DynamicQuantizeLinear, MatMulInteger and Cast, as ONNX Runtime quantises a product dynamically."""
    rng = np.random.default_rng(2)
    feeds = {"x": rng.standard_normal((3, 4)).astype(np.float32), "sw": np.array(0.02, np.float32)}
    weights = numpy_helper.from_array(rng.integers(-90, 90, (4, 5)).astype(np.int8), "w")
    nodes = [
        _node("DynamicQuantizeLinear", ["x"], ["q", "s", "zero"]),
        _node("MatMulInteger", ["q", "w", "zero"], ["i"]),
        _node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        _node("Mul", ["s", "sw"], ["scale"]),
        _node("Mul", ["f", "scale"], ["y"]),
    ]
    return _case("dynamic", nodes, feeds, [weights], 21, "static")


def _dequantize(
    kind: Any,
    x: tuple[int, ...],
    scale: tuple[int, ...],
    opset: int,
    *,
    zero: bool = True,
    dtype: Any = np.float32,
    shapes: str = "static",
    **attributes: Any,
) -> Case:
    low, high = limits(kind)
    rng = np.random.default_rng(0)
    values = np.asarray(rng.uniform(low, high, x)).astype(np.int64 if is_integer(kind) else np.float32).astype(kind)
    zeros = np.asarray(rng.integers(max(int(low), -3), min(int(high), 4) + 1, scale)).astype(kind) if zero else None
    s = np.asarray(rng.uniform(0.5, 1.5, scale) / high, dtype)
    title = f"DequantizeLinear-{np.dtype(kind).name}-{x}-{scale}-{attributes}-{np.dtype(dtype).name}-{shapes}-{opset}"
    return node_case("DequantizeLinear", values, s, zeros, opset=opset, shapes=shapes, name=title, **attributes)


def is_integer(kind: Any) -> bool:
    """True if an element type holds whole numbers."""
    return "int" in np.dtype(kind).name


def limits(kind: Any) -> tuple[float, float]:
    """The least and the largest number of an element type."""
    info = (ml_dtypes.iinfo if is_integer(kind) else ml_dtypes.finfo)(kind)
    return float(info.min), float(info.max)


def _along(scale: tuple[int, ...], x: tuple[int, ...], axis: int) -> list[int]:
    """The shape in which a scale, a single one or one per index of the axis, broadcasts to x."""
    count = int(np.prod(scale))
    return [] if count == 1 else [count if k == axis % len(x) else 1 for k in range(len(x))]


def _node(op_type: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> NodeProto:
    kept = {k: v for k, v in attributes.items() if v is not None}
    return helper.make_node(op_type, inputs, outputs, name=f"{op_type}_{outputs[0]}", **kept)


def _declared(name: str, shapes: str, nodes: list[NodeProto]) -> str:
    """The name that nodes read for an input: with "unknown" shapes, the result of a Reshape to a shape fed at run time."""
    if shapes != "unknown":
        return name
    nodes.append(_node("Reshape", [name, f"{name}_shape"], [f"{name}_"], allowzero=1))
    return f"{name}_"


def _case(
    title: str,
    nodes: Sequence[NodeProto],
    feeds: dict[str, np.ndarray],
    initializers: Sequence[TensorProto],
    opset: int,
    shapes: str,
) -> Case:
    read = {name for node in nodes for name in node.input}
    fed = {name: array for name, array in feeds.items() if name in read}
    values = []
    for name, array in fed.items():
        dims = list(array.shape) if shapes == "static" else [f"{name}_{axis}" for axis in range(array.ndim)]
        values.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), dims))
    wrt = tuple(fed)
    if shapes == "unknown":
        fed |= {f"{name}_shape": np.array(array.shape, np.int64) for name, array in fed.items()}
        values += [
            helper.make_tensor_value_info(name, TensorProto.INT64, [f"{name}_rank"]) for name in fed if name not in wrt
        ]
    kind = helper.np_dtype_to_tensor_dtype(fed["t"].dtype) if "t" in fed else TensorProto.FLOAT
    row = [_node("Reshape", ["y", "one_row"], ["y_row"])]
    output = helper.make_tensor_value_info("y_row", kind, ["n"])
    one = numpy_helper.from_array(np.array([-1]), "one_row")
    graph = helper.make_graph([*nodes, *row], "quantized", values, [output], [*initializers, one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return Case(title, model, fed, wrt)
