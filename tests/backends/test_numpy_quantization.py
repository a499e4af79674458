"""The interpreter's kernels of quantization, against onnx's node tests and ONNX Runtime; and its random numbers."""

from __future__ import annotations

import bisect
import re
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from onnx_tests import loaded, names
from runtime import needs_runtime, overflows

from refgrad.backends import get_backend
from refgrad.errors import BackendError

pytestmark = pytest.mark.interpreter

RNG = np.random.default_rng(0)
F32 = np.float32


QUANTIZED = [
    name for name in names()["backend"]["node"] if any(part in name for part in ("quantize", "qlinear", "integer"))
]


def as_array(value: Any) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


@pytest.mark.parametrize("name", QUANTIZED)
def test_node_tests_of_quantization(name: str) -> None:
    test = loaded()[name]
    given, expected = test.data_sets[0]
    feeds = {value.name: as_array(x) for value, x in zip(test.model.graph.input, given, strict=True)}
    results = get_backend("numpy").prepare(test.model).run(feeds)
    for value, array in zip(test.model.graph.output, map(as_array, expected), strict=True):
        assert results[value.name].dtype == array.dtype
        np.testing.assert_array_equal(results[value.name].astype(np.float64), array.astype(np.float64))


def whole(kind: Any, *shape: int) -> np.ndarray:
    info = np.iinfo(kind)
    return RNG.integers(info.min, info.max + 1, shape).astype(kind)


X8, W8, Z8 = whole(np.uint8, 2, 4, 7), whole(np.int8, 6, 2, 3), whole(np.int8, 6)
SCALES = {"s": F32(0.02), "t": (RNG.uniform(0.5, 1.5, 6) * 0.01).astype(F32), "r": F32(1.7)}

# What onnx.reference has not, or has wrong: values beyond int32, convolutions of lines, scales per row.
PRODUCT = {"a": whole(np.uint8, 3, 4), "b": whole(np.int8, 4, 6), "za": np.uint8(3), "zb": Z8}
NODES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("QuantizeLinear", {"x": np.array([1e12, -1e12, np.inf, -np.inf, 254.5, 0.5, 1.5], F32), "s": F32(1)}, {}),
    (
        "QuantizeLinear",
        {"x": RNG.standard_normal((5, 3)).astype(F32), "s": np.full((3, 3), 0.1, F32)},
        {"axis": 0, "block_size": 2},
    ),
    (
        "QLinearConv",
        {"x": X8, "sx": SCALES["s"], "zx": np.uint8(9), "w": W8, "sw": SCALES["t"], "zw": np.zeros(6, np.int8)}
        | {"sy": SCALES["r"], "zy": np.uint8(100)},
        {"group": 2, "pads": [1, 0]},
    ),
    ("ConvInteger", {"x": X8, "w": whole(np.uint8, 6, 4, 3), "zx": np.uint8(9), "zw": np.uint8(7)}, {}),
    ("MatMulInteger", PRODUCT, {}),
    (
        "QLinearMatMul",
        {"a": PRODUCT["a"], "sa": F32(0.02), "za": np.uint8(3), "b": PRODUCT["b"], "sb": SCALES["t"], "zb": Z8}
        | {"sy": F32(0.3), "zy": np.uint8(90)},
        {},
    ),
)


def _more() -> tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]:
    """Every type, axis and form that ONNX Runtime runs; the rest is brute force, or a finding."""
    rows: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 300, -300, 4e4, np.inf, -np.inf], F32)
    grid = RNG.standard_normal((3, 4)).astype(F32)
    blocked: dict[str, Any] = {"axis": 1, "block_size": 3}
    for kind in (np.uint8, np.int8, np.uint16, np.int16):
        info = np.iinfo(kind)
        q, ends = whole(kind, 3, 4), np.array([[info.min, info.max]], kind)
        rows.append(("QuantizeLinear", {"x": x, "s": F32(1), "z": kind(1)}, {"opset": 21}))
        rows.append(
            ("QuantizeLinear", {"x": 9 * grid, "s": F32([0.1, 0.2, 0.3]), "z": q[:, 0]}, {"axis": 0, "opset": 21})
        )
        rows.append(
            ("QuantizeLinear", {"x": 9 * grid, "s": F32([0.1, 0.2, 0.3, 1]), "z": q[0]}, {"axis": -1, "opset": 21})
        )
        rows.append(("QuantizeLinear", {"x": 9 * grid, "s": 0.1 + np.abs(grid[:, :2]), "z": q[:, :2]}, blocked))
        for real in (np.float16, F32):
            values = RNG.standard_normal(300).astype(real)
            # In half precision ONNX Runtime does not round the quotient: here it is exact.
            scale = real(0.013) if real is F32 else real(2**-5)
            rows.append(("QuantizeLinear", {"x": values, "s": scale, "z": kind(3)}, {"opset": 21}))
            rows.append(("DequantizeLinear", {"x": ends, "s": real(0.3), "z": kind(2)}, {"opset": 21}))
            rows.append(("DequantizeLinear", {"x": q, "s": grid[0].astype(real), "z": q[0]}, {"opset": 21}))
            rows.append(("DequantizeLinear", {"x": q, "s": grid[:, :2].astype(real), "z": q[:, :2]}, blocked))
    for real in (np.float16, F32):
        rows.append(("DequantizeLinear", {"x": np.array([2**15 + 1, -5], np.int32), "s": real(0.3)}, {"opset": 21}))
    for values in ([0, 0], [1, 2, 3], [-1, -2], [0.5, -0.25, 1], []):
        rows.append(("DynamicQuantizeLinear", {"x": F32(values)}, {}))
    for left, right in ((np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.int8), (np.int8, np.uint8)):
        a, b = whole(left, 2, 3, 4), whole(right, 4, 5)
        rows.append(("MatMulInteger", {"a": a, "b": b, "za": left(7), "zb": right(100)}, {}))
        rows.append(("MatMulInteger", {"a": a[0, 0], "b": b, "za": left(7)}, {}))
        if (left, right) != (np.int8, np.uint8):
            for kind in (F32, np.float16):
                shared = {"sa": kind(0.02), "za": left(3), "b": b, "sb": kind(0.03), "zb": right(9), "sy": kind(0.3)}
                rows.append(("QLinearMatMul", {"a": a} | shared | {"zy": left(5)}, {"opset": 21}))
                rows.append(("QLinearMatMul", {"a": a[0, 0]} | shared | {"zy": left(5)}, {"opset": 21}))
    ties = {"sa": F32(1), "za": np.uint8(0), "b": np.uint8([[1]]), "sb": F32(1), "zb": np.uint8(0), "sy": F32(2)}
    rows.append(("QLinearMatMul", {"a": np.arange(9, dtype=np.uint8)[:, None]} | ties | {"zy": np.uint8(1)}, {}))
    for axes in (1, 2, 3):
        pixels, weights = whole(np.uint8, 1, 2, *[5] * axes), whole(np.uint8, 3, 2, *[2] * axes)
        signed, bias = whole(np.int8, 3, 2, *[2] * axes), RNG.integers(-99, 99, 3).astype(np.int32)
        rows.append(("ConvInteger", {"x": pixels, "w": weights, "zx": np.uint8(7)}, {"pads": [1] * 2 * axes}))
        shared = {"x": pixels, "sx": F32(0.02), "zx": np.uint8(99), "w": signed, "sw": F32([0.01, 0.02, 0.03])}
        ends = {"zw": np.zeros(3, np.int8), "sy": F32(0.4), "zy": np.uint8(80), "b": bias}
        rows.append(("QLinearConv", shared | ends, {"pads": [1] * 2 * axes}))
    return tuple(rows)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes"), NODES + _more(), ids=lambda value: value if isinstance(value, str) else ""
)
@needs_runtime
def test_kernels_against_onnx_runtime(op_type: str, inputs: dict[str, Any], attributes: dict[str, Any]) -> None:
    if overflows([op_type]):
        pytest.skip("ONNX Runtime's sums of products of 8 bits overflow on this processor")
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    opset = attributes.get("opset", 21 if "block_size" in attributes else 17)
    attributes = {name: value for name, value in attributes.items() if name != "opset"}
    outputs = ["y", "scale", "zero"] if op_type.startswith("Dynamic") else ["y"]
    node = helper.make_node(op_type, list(arrays), outputs, **attributes)
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in arrays.items()
    ]
    graph = helper.make_graph([node], "g", values, [helper.make_empty_tensor_value_info(name) for name in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    model = onnx.shape_inference.infer_shapes(model)
    got, expected = (get_backend(name).prepare(model).run(arrays) for name in ("numpy", "ort-cpu"))
    for name in outputs:
        assert got[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(got[name], expected[name])


# Cast, against the tables of its specification: exponent bits, mantissa bits, bias, and what is beyond the largest number

FORMATS = {
    "float16": (5, 10, 15, "infinity"),
    "bfloat16": (8, 7, 127, "infinity"),
    "float8_e4m3fn": (4, 3, 7, "nan"),
    "float8_e4m3fnuz": (4, 3, 8, "no -0"),
    "float8_e5m2": (5, 2, 15, "infinity"),
    "float8_e5m2fnuz": (5, 2, 16, "no -0"),
    "float4_e2m1fn": (2, 1, 1, "nothing"),
    "float6_e2m3fn": (2, 3, 1, "nothing"),
    "float6_e3m2fn": (3, 2, 3, "nothing"),
}


def element_type(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def numbers_of(name: str) -> list[float]:
    """The finite numbers of a format from 0 on, in order: the mantissa of one is even where its place is."""
    exponents, mantissas, bias, beyond = FORMATS[name]
    found = []
    for bits in range(2 ** (exponents + mantissas)):
        exponent, mantissa = divmod(bits, 2**mantissas)
        if beyond == "infinity" and exponent == 2**exponents - 1:
            break
        if beyond == "nan" and bits == 2 ** (exponents + mantissas) - 1:
            break
        whole = mantissa + (2**mantissas if exponent else 0)
        found.append(float(Fraction(whole) * Fraction(2) ** (max(exponent, 1) - bias - mantissas)))
    return found


def rounded(x: Fraction, name: str, numbers: list[float], saturate: bool) -> float:
    """The number of the format that is nearest to x, of two the even one; or what the tables say of what is too large"""
    largest, step = numbers[-1], Fraction(numbers[-1]) - Fraction(numbers[-2])
    size, sign = abs(x), -1.0 if x < 0 else 1.0
    place = bisect.bisect_left(numbers, size)
    if place < len(numbers) and numbers[place] == size:
        return sign * numbers[place]
    below, above = (
        Fraction(numbers[place - 1]),
        Fraction(numbers[place]) if place < len(numbers) else Fraction(largest) + step,
    )
    even = place % 2 == 1  # the one below
    nearest = below if size - below < above - size or (size - below == above - size and even) else above
    if nearest > largest:
        kept = FORMATS[name][3] == "nothing" or (saturate and name.startswith("float8"))
        return sign * (largest if kept else np.inf if FORMATS[name][3] == "infinity" else np.nan)
    return sign * float(nearest)


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
def test_casts_round_once_to_the_nearest_even(name: str, saturate: int) -> None:
    numbers = numbers_of(name)
    few = [0, 1, len(numbers) - 2, *np.random.default_rng(1).integers(0, len(numbers) - 1, 40).tolist()]
    middles = [(Fraction(numbers[k]) + Fraction(numbers[k + 1])) / 2 for k in few]
    beyond = Fraction(numbers[-1]) + (Fraction(numbers[-1]) - Fraction(numbers[-2])) / 2
    values = [Fraction(numbers[k]) for k in few] + middles + [beyond, beyond * 2]
    values += [
        v * (1 + sign * Fraction(2) ** -power) for v in (*middles, beyond) for sign in (1, -1) for power in (20, 45)
    ]
    floats = np.array([sign * float(v) for v in values for sign in (1, -1)])
    integers = np.array([sign * 2**k + d for k in range(2, 62, 3) for d in (-1, 0, 1) for sign in (1, -1)])
    with np.errstate(over="ignore"):
        sources = [
            floats.astype(kind) for kind in (np.float64, F32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2)
        ]
    sources += [integers, integers[:30].astype(np.int32), np.arange(-8, 8).astype(ml_dtypes.int4)]
    sources += [np.arange(4).astype(ml_dtypes.uint2), np.array([False, True])]
    for x in sources:
        x = x[np.isfinite(x.astype(np.float64))]
        to = helper.np_dtype_to_tensor_dtype(element_type(name))
        options = {"saturate": saturate} if name.startswith("float8") else {}
        exact = [Fraction(int(v)) if x.dtype.kind in "iub" else Fraction(float(v)) for v in x]
        expected = [rounded(v, name, numbers, bool(saturate)) for v in exact]
        got = cast_model(x, to, **options)
        assert got.dtype == element_type(name)
        np.testing.assert_array_equal(got.astype(np.float64), expected, err_msg=str(x.dtype))


def cast_model(x: np.ndarray, to: int, opset: int = 28, **options: Any) -> np.ndarray:
    node = helper.make_node("Cast", ["x"], ["y"], to=to, **options)
    values = [
        helper.make_tensor_value_info(n, k, x.shape)
        for n, k in (("x", helper.np_dtype_to_tensor_dtype(x.dtype)), ("y", to))
    ]
    graph = helper.make_graph([node], "cast", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)
    result: np.ndarray = get_backend("numpy").prepare(model).run({"x": x})["y"]
    return result


def test_casts_of_what_is_no_number_are_as_tabled() -> None:
    x = np.array([0.0, -0.0, np.nan, np.inf, -np.inf], F32)
    zero, less = np.inf, -np.inf
    largest = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 240.0, "float8_e5m2": 57344.0, "float8_e5m2fnuz": 57344.0}
    for name, high in largest.items():
        to = helper.np_dtype_to_tensor_dtype(element_type(name))
        got = cast_model(x, to).astype(np.float64)
        np.testing.assert_array_equal(got, [0, 0, np.nan, high, -high])
        assert bool(np.signbit(got[1])) is not name.endswith("uz")
        beyond = [zero, less] if name == "float8_e5m2" else [np.nan, np.nan]
        np.testing.assert_array_equal(cast_model(x, to, saturate=0).astype(np.float64), [0, 0, np.nan, *beyond])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2.0**-127, np.nan, 2.0**127, 2.0**127, 2.0**-127, 2.0**-127, 2.0, 2.0, 4.0]),
        ({"saturate": 0, "round_mode": "nearest"}, [np.nan, np.nan, np.nan, np.nan, np.nan, 2.0**-127, 1.0, 2.0, 4.0]),
        ({"round_mode": "nearest"}, [2.0**-127, np.nan, 2.0**127, 2.0**127, 2.0**-127, 2.0**-127, 1.0, 2.0, 4.0]),
        ({"round_mode": "down"}, [2.0**-127, np.nan, 2.0**127, 2.0**127, 2.0**-127, 2.0**-127, 1.0, 1.0, 4.0]),
    ],
)
def test_casts_to_powers_of_two(options: dict[str, Any], expected: list[float]) -> None:
    x = np.array([0, np.nan, np.inf, 3.2e38, 2.0**-130, 2.0**-127, 1.25, 1.5, 4])
    for kind in (F32, np.float64):
        got = cast_model(x.astype(kind), TensorProto.FLOAT8E8M0, **options)
        np.testing.assert_array_equal(got.astype(np.float64), expected)


@pytest.mark.parametrize("name", ["int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint32"])
def test_casts_of_integers_keep_the_low_bits(name: str) -> None:
    dtype, bits = element_type(name), int(re.sub(r"\D", "", name))
    x = RNG.integers(-(2**40), 2**40, 50)
    wrapped = x % 2**bits
    expected = np.where((wrapped >= 2 ** (bits - 1)) & (not name.startswith("u")), wrapped - 2**bits, wrapped)
    got = cast_model(x, helper.np_dtype_to_tensor_dtype(dtype))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.int64), expected)


@pytest.mark.parametrize("name", [*list(FORMATS)[2:], "int2", "uint2", "int4", "uint4"])
@pytest.mark.parametrize("zero", [False, True])
def test_small_types_go_there_and_back(name: str, zero: bool) -> None:
    """Quantizing and dequantizing with scales that are powers of two gives back what the type has, per axis and per block."""
    dtype = element_type(name)
    x = np.array([[0, 1, 1, 0.5], [1, 0, 1, 1]]) if "float" in name else np.array([[0, 1, 1, 0], [1, 0, 1, 1]])
    for scale, options in ((F32(0.5), {}), (F32([0.5, 2]), {"axis": 0}), (F32([[0.5, 2], [4, 1]]), {"block_size": 2})):
        wide = np.broadcast_to(scale.reshape(2, 1), x.shape) if scale.ndim == 1 else scale
        wide = np.repeat(scale, 2, 1) if scale.ndim == 2 else wide
        where = f"<axis = {options.get('axis', 1)}, block_size = {options.get('block_size', 0)}>"
        text = f"y = QuantizeLinear{where}(x, s, z) back = DequantizeLinear{where}(y, s, z)"
        z = np.full(scale.shape, zero).astype(F32 if "float" in name else np.int8).astype(dtype)
        feeds = {"x": ((x - z.astype(F32).max()) * wide).astype(F32), "s": np.asarray(scale), "z": z}
        values = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for n, v in feeds.items()
        ]
        nodes = parser.parse_graph(f"g () => () {{ {text} }}").node
        outputs = [helper.make_empty_tensor_value_info(n) for n in ("y", "back")]
        graph = helper.make_graph(nodes, "g", values, outputs)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)], ir_version=11)
        got = get_backend("numpy").prepare(model).run(feeds)
        assert got["y"].dtype == dtype
        np.testing.assert_array_equal(got["y"].astype(np.float64), x)
        np.testing.assert_array_equal(got["back"], feeds["x"])


@pytest.mark.parametrize(
    ("node", "feeds", "said"),
    [
        (
            "y = QuantizeLinear(x, s)",
            {"x": np.zeros((3, 4), F32), "s": F32([1, 2, 3])},
            "has shape (3,), not () or (4,)",
        ),
        (
            "y = QuantizeLinear<axis = 1, block_size = 3>(x, s)",
            {"x": np.zeros((3, 4), F32), "s": F32([[1], [2], [3]])},
            "has shape (3, 1), not () or (3, 2)",
        ),
        (
            "y = DequantizeLinear<axis = 5>(x, s)",
            {"x": np.zeros((3, 4), np.uint8), "s": F32([1, 2, 3])},
            "axis 5 of a tensor of rank 2",
        ),
        (
            "y = QuantizeLinear<output_dtype = 3>(x, s, z)",
            {"x": np.zeros((3, 4), F32), "s": F32(1), "z": np.uint8(0)},
            "output_dtype is int8, the zero point uint8",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(node: str, feeds: dict[str, Any], said: str) -> None:
    arrays = {name: np.asarray(value) for name, value in feeds.items()}
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in arrays.items()
    ]
    graph = helper.make_graph([parser.parse_node(node)], "g", values, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(BackendError, match=re.escape(said)):
        get_backend("numpy").prepare(model).run(arrays)


@needs_runtime
@pytest.mark.parametrize("kind", ["int4", "uint4", "int2", "uint2"])
def test_elements_of_less_than_a_byte_come_out_of_onnx_runtime(kind: str) -> None:
    dtype = getattr(ml_dtypes, kind)
    to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    text = f"g (float[5] x) => ({kind}[5] y) <float s = {{1.0}}> {{ y = QuantizeLinear<output_dtype = {to}>(x, s) }}"
    try:
        opset = 21 if kind.endswith("4") else 25
        model = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')
        prepared = get_backend("ort-cpu").prepare(model)
    except BackendError as error:
        pytest.skip(str(error))
    feeds = {"x": np.array([-9, -1.2, 1.4, 0.6, 3], F32)}
    expected = get_backend("numpy").prepare(model).run(feeds)["y"]
    got = prepared.run(feeds)["y"]
    assert got.dtype == expected.dtype
    assert got.tolist() == expected.tolist()
    back = onnx.ModelProto()
    back.CopyFrom(model)
    back.graph.input[0].type.tensor_type.elem_type = to
    back.graph.node[0].op_type = "DequantizeLinear"
    back.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    del back.graph.node[0].attribute[:]
    with pytest.raises(
        BackendError, match=f"several elements of {kind} share a byte, .* make it an initializer|cannot be fed {kind}"
    ):
        get_backend("ort-cpu").prepare(back).run({"x": expected})


def random_model(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": 22]> {text}')


def test_random_numbers_are_those_of_the_output_that_they_make() -> None:
    """So a function of random numbers can be differentiated: its gradient draws what it drew."""
    body = "a = RandomNormal<shape=[20]>() b = RandomUniformLike(x) c = Bernoulli(x)"
    model = random_model(f"g (float[20] x) => (float[20] a, float[20] b, float[20] c) {{ {body} }}")
    feeds = {"x": np.full(20, 0.5, F32)}
    prepared = get_backend("numpy").prepare(model)
    first, second = prepared.run(feeds), prepared.run(feeds)
    other = get_backend("numpy").prepare(random_model(f"g (float[20] x) => (float[20] y) {{ {body} y = Add(a, b) }}"))
    np.testing.assert_array_equal(other.run(feeds)["y"], first["a"] + first["b"])
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)
    text = "g (float[20] x) => (float[20] a, float[20] b) { a = RandomUniformLike(x) b = RandomUniformLike(x) }"
    results = get_backend("numpy").prepare(random_model(text)).run(feeds)
    assert not np.array_equal(results["a"], results["b"])
