"""The interpreter's kernels for the ai.onnx operators that no other file is about: tables against ONNX Runtime and
onnx.reference, loops written from the specification, old versions by hand, errors.
"""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, parser
from onnx.reference import ReferenceEvaluator
from runtime import RUNTIME

from refgrad.backends import get_backend
from refgrad.backends.numpy.kernels import indexing
from refgrad.errors import BackendError

pytestmark = pytest.mark.interpreter

NUMPY = get_backend("numpy")
F16, BF16, F32, F64 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)
FLOATS = (F16, BF16, F32, F64)
UNSIGNED = tuple(map(np.dtype, (np.uint8, np.uint16, np.uint32, np.uint64)))
SIGNED = tuple(map(np.dtype, (np.int8, np.int16, np.int32, np.int64)))
INF, NAN = math.inf, math.nan


def build(node: str, inputs: dict[str, np.ndarray], opset: int) -> onnx.ModelProto:
    made = parser.parse_node(node)
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in inputs.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in made.output]
    graph = helper.make_graph([made], "g", values, outputs)
    return onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    )


def run(node: str, opset: int = 21, precision: str | None = None, **inputs: Any) -> Any:
    """The result of one node on the interpreter, or a list of its results."""
    fed = {name: np.asarray(x) for name, x in inputs.items()}
    results = list(NUMPY.prepare(build(node, fed, opset), precision=precision).run(fed).values())
    return results[0] if len(results) == 1 else results


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def f(*values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def i(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def assert_same(actual: Any, expected: Any, loose: float = 1.0) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype not in FLOATS:
        np.testing.assert_array_equal(actual, expected)
        return
    tolerance = loose * {F16: 2e-3, BF16: 2e-2}.get(actual.dtype, 2e-6)
    np.testing.assert_allclose(actual.astype(F64), expected.astype(F64), rtol=tolerance, atol=tolerance / 10)


POINTS = f(-INF, -100, -3, -1, -0.5, -0.0, 0, 0.5, 1, 3, 100, INF, NAN)
BOXES = f([[0, 0, 1, 1], [1, 1.1, 0, 0.1], [0, 2, 1, 3], [0, 2, 1, 2]], [[0, 0, 1, 1]] * 4)
SCORES = f([[0.9, 0.75, 0.6, 0.6]] * 2, [[0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 0.5, 0.5]])

# Node, inputs, opset, and who knows better: "ort", "reference", or both.
CASES: list[tuple[str, dict[str, np.ndarray], int, str]] = [
    *(
        (
            f"y = {op} {attributes} (x)",
            {"x": POINTS.astype(dtype)},
            22,
            "reference" if dtype == BF16 else "ort reference",
        )
        for op, attributes in (
            ("Elu", "<alpha = 0.3>"),
            ("Selu", ""),
            ("Selu", "<alpha = 2.0, gamma = 3.0>"),
            ("Celu", "<alpha = 0.4>"),
            ("HardSigmoid", "<alpha = 0.5, beta = 0.1>"),
            ("ThresholdedRelu", "<alpha = 0.5>"),
            ("Shrink", "<lambd = 1.0, bias = 0.5>"),
            ("IsInf", ""),
            ("IsInf", "<detect_negative = 0>"),
            ("IsInf", "<detect_positive = 0>"),
            ("IsInf", "<detect_positive = 0, detect_negative = 0>"),
        )
        for dtype in ((F32, F64) if op == "IsInf" else (F32,))
    ),
    ("y = Mish (x)", {"x": POINTS}, 18, "reference"),
    ("y = Swish <alpha = 1.5> (x)", {"x": POINTS}, 24, "reference"),
    ("y = SwiGLU <alpha = 1.5> (a, b)", {"a": draw(2, 3), "b": draw(2, 3, seed=1)}, 28, "reference"),
    *((f"y = {op} (x)", {"x": draw()}, 21, "ort reference") for op in ("Elu", "Selu", "Celu", "HardSigmoid", "Shrink")),
    *((f"y = {op} (x)", {"x": draw(0, 3)}, 21, "ort reference") for op in ("Elu", "Selu", "Celu", "HardSigmoid")),
    *(
        ("y = Shrink <lambd = 1.5, bias = 1.0> (x)", {"x": np.arange(5).astype(d)}, 9, "ort reference")
        for d in (*SIGNED, *UNSIGNED)
    ),
    *(
        ("y = PRelu (x, s)", {"x": draw(2, 3), "s": draw(*shape, seed=1)}, 16, "ort reference")
        for shape in ((), (1,), (3,), (2, 1), (2, 3))
    ),
    ("y = PRelu (x, s)", {"x": np.int32([-2, 3]), "s": np.int32([5])}, 16, "ort reference"),
    *(
        (f"y = {op} <axis = {axis}, keepdims = {keep}, select_last_index = {last}> (x)", {"x": x}, 13, by)
        for op in ("ArgMax", "ArgMin")
        for axis, keep, last in itertools.product((0, 1, -1), (0, 1), (0, 1))
        for x, by in (
            (f([3, 1, 3], [1, 2, 3]), "ort reference"),
            (np.uint8([[200, 3, 200], [200, 4, 3]]), "ort reference"),
            (np.zeros((0, 3, 2), np.float32), "reference"),
        )
        if x.shape[axis]
    ),
    *((f"y = {op} (x)", {"x": f(NAN, 1, NAN)}, 13, "ort reference") for op in ("ArgMax", "ArgMin")),
    *(
        (f"y = {op} <axis = 1> (x)", {"x": f([3, 1, 3], [1, 2, 3])}, opset, "ort reference")
        for op in ("ArgMax", "ArgMin")
        for opset in (11, 12)
    ),
    *(
        (f"y = {op} (a, b)", {"a": np.array([[0], [5], [100]], d), "b": np.array([3, 127], d)}, 18, "ort reference")
        for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
        for d in (*SIGNED, *UNSIGNED)
    ),
    *(("y = BitwiseNot (a)", {"a": np.array([0, 5, 100], d)}, 18, "ort reference") for d in (*SIGNED, *UNSIGNED)),
    ("y = Compress <axis = 1> (x, c)", {"x": draw(2, 3), "c": np.array([True, False, True])}, 11, "ort reference"),
    ("y = Compress <axis = -2> (x, c)", {"x": draw(2, 3), "c": np.array([True])}, 11, "ort reference"),
    ("y = Compress (x, c)", {"x": draw(2, 3), "c": np.array([False, True, False, True])}, 9, "ort reference"),
    ("y = Compress (x, c)", {"x": draw(2, 3), "c": np.zeros(0, bool)}, 11, "ort reference"),
    *(
        ("y = NonZero (x)", {"x": np.array([[1, 0], [0, 2]]).astype(d)}, 13, "ort reference")
        for d in (np.float32, np.int64, np.uint8, bool)
    ),
    ("y = NonZero (x)", {"x": f(1)[0]}, 13, "reference"),
    ("y = NonZero (x)", {"x": f(0)[0]}, 13, "reference"),
    ("y = NonZero (x)", {"x": draw(0, 3)}, 13, "ort reference"),
    ("y = NonZero (x)", {"x": f(NAN, -0.0)}, 13, "ort reference"),
    *(
        (f'y = DepthToSpace <blocksize = 2, mode = "{mode}"> (x)', {"x": x}, 13, "ort reference")
        for mode in ("DCR", "CRD")
        for x in (draw(2, 8, 2, 3), draw(0, 4, 1, 1), np.arange(12, dtype=np.uint8).reshape(1, 4, 1, 3))
    ),
    ("y = DepthToSpace <blocksize = 2> (x)", {"x": draw(1, 8, 2, 3)}, 1, "ort reference"),
    ("y = SpaceToDepth <blocksize = 2> (x)", {"x": draw(2, 3, 4, 6)}, 13, "ort reference"),
    ("y = SpaceToDepth <blocksize = 2> (x)", {"x": draw(2, 3, 0, 6)}, 13, "ort reference"),
    *(
        (f'y = SpaceToDepth <blocksize = 2, mode = "{mode}"> (x)', {"x": draw(2, 3, 4, 6)}, 28, "reference")
        for mode in ("DCR", "CRD")
    ),
    *(
        (f"y = CenterCropPad {axes} (x, s)", {"x": draw(3, 4), "s": i(*shape)}, 18, "ort reference")
        for axes in ("", "<axes = [-1, 0]>")
        for shape in ((2, 2), (5, 7), (2, 8), (4, 5), (0, 4), (4, 3), (6, 1))
    ),
    ("y = CenterCropPad <axes = [1]> (x, s)", {"x": draw(3, 4), "s": np.int32([7])}, 18, "reference"),
    *(
        (
            f"y = ReverseSequence <batch_axis = {batch}, time_axis = {1 - batch}> (x, n)",
            {"x": draw(3, 3, *rest), "n": i(1, 3, 0)},
            10,
            "ort reference",
        )
        for batch in (0, 1)
        for rest in ((), (2,))
    ),
    *(
        (
            f'y = Einsum <equation = "{equation}"> (a, b)',
            {"a": draw(*a).astype(np.float64), "b": draw(*b, seed=1).astype(np.float64)},  # sums that cancel
            12,
            "ort reference",
        )
        for equation, a, b in (
            ("ij,jk->ik", (2, 3), (3, 4)),
            ("ij,jk->ik", (2, 0), (0, 4)),
            ("ij,jk->ik", (64, 70), (70, 40)),
            ("bhqd,bhkd->bhqk", (2, 3, 20, 8), (2, 3, 30, 8)),
            ("...ij,...jk->...ik", (2, 2, 3), (2, 3, 4)),
            ("...ij,...jk->...ik", (1, 2, 3), (2, 3, 4)),
            ("i,i->", (3,), (3,)),
            ("ij,jk", (2, 3), (3, 4)),
        )
    ),
    *(
        (f"y = RotaryEmbedding <interleaved = {mixed}{more}> (x, c, s{p})", inputs, 23, "reference")
        for mixed in (0, 1)
        for more, p, inputs in (
            (
                "",
                ", p",
                {"x": draw(2, 3, 2, 4), "c": draw(3, 2, seed=1), "s": draw(3, 2, seed=2), "p": i([0, 2], [1, 0])},
            ),
            ("", "", {"x": draw(2, 3, 2, 4), "c": draw(2, 2, 2, seed=1), "s": draw(2, 2, 2, seed=2)}),
            (", num_heads = 2", "", {"x": draw(2, 2, 8), "c": draw(2, 2, 2, seed=1), "s": draw(2, 2, 2, seed=2)}),
            (
                ", num_heads = 2, rotary_embedding_dim = 4",
                ", p",
                {"x": draw(2, 2, 12), "c": draw(3, 2, seed=1), "s": draw(3, 2, seed=2), "p": i([0, 2], [1, 0])},
            ),
        )
    ),
    *(
        ("y = InstanceNormalization <epsilon = 0.01> (x, s, b)", {"x": x, "s": draw(3), "b": draw(3, seed=1)}, 6, by)
        for x, by in ((draw(2, 3, 4), "ort reference"), (draw(2, 3, 2, 2, 2), "ort reference"), (draw(0, 3, 4), "ort"))
    ),
    *(
        (f"y = MeanVarianceNormalization {axes} (x)", {"x": draw(2, 3, 2, 2)}, opset, "ort reference")
        for axes in ("", "<axes = [0, 1, 2, 3]>", "<axes = [0, 2, 3]>")
        for opset in (9, 13)
    ),
    *(
        (f"y = {kind}Window <periodic = {periodic}, output_datatype = {to}> (n)", {"n": i(n)[0]}, 17, "ort reference")
        for kind in ("Hann", "Hamming")
        for periodic, to, n in itertools.product((0, 1), (TensorProto.FLOAT, TensorProto.INT32), (0, 3, 10))
    ),
    *(
        (f"y = BlackmanWindow <periodic = {periodic}, output_datatype = {to}> (n)", {"n": i(10)[0]}, 17, "reference")
        for periodic, to in itertools.product((0, 1), (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UINT8))
    ),
    *(
        (
            f"y = MelWeightMatrix <output_datatype = {to}> (n, d, r, low, high)",
            {"n": i(n)[0], "d": i(d)[0], "r": i(rate)[0], "low": f(low)[0], "high": f(high)[0]},
            17,
            "ort reference",
        )
        for n, d, rate, low, high in (
            (8, 16, 8192, 0, 4096),
            (5, 32, 16000, 20, 7000),
            (2, 16, 8000, 100, 3000),
            (20, 16, 8192, 0, 4096),
        )
        for to in (TensorProto.FLOAT, TensorProto.DOUBLE)
    ),
    *(
        (f"y = BitCast <to = {to}> (x)", {"x": x}, 26, "reference")
        for x, to in (
            (f(1, -1), TensorProto.INT32),
            (f(1), TensorProto.UINT32),
            (np.int8([-1]), TensorProto.UINT8),
            (np.int32([1065353216]), TensorProto.FLOAT),
            (np.float64([1]), TensorProto.INT64),
            (np.float16([1, -2]), TensorProto.INT16),
            (np.int16([16256]), TensorProto.BFLOAT16),
            (draw(0, 2), TensorProto.INT32),
        )
    ),
    *(
        (
            f"y = NonMaxSuppression <center_point_box = {center}> (b, s, m, i, t)",
            {"b": BOXES, "s": SCORES, "m": i(most)[0], "i": f(iou)[0], "t": f(score)[0]},
            11,
            "ort",
        )
        for center, most, iou, score in (
            (0, 0, 0.5, 0.3),
            (0, 2, 0.5, 0.25),
            (0, 9, 0.0, -1.0),
            (0, 9, 1.0, 0.55),
            (1, 9, 0.5, 0.55),
            (1, 3, 0.1, -1.0),
        )
    ),
    ("y = NonMaxSuppression (b, s, m)", {"b": draw(2, 0, 4), "s": draw(2, 3, 0), "m": i(2)[0]}, 11, "ort"),
]


@pytest.mark.parametrize(("node", "inputs", "opset", "by"), CASES, ids=str)
def test_kernel_is_that_of_others(node: str, inputs: dict[str, np.ndarray], opset: int, by: str) -> None:
    model = build(node, inputs, opset)
    [actual] = NUMPY.prepare(model).run(inputs).values()
    if "reference" in by:
        with np.errstate(all="ignore"):
            [expected] = ReferenceEvaluator(model).run(None, inputs)
        assert_same(actual, expected)
    if "ort" in by and RUNTIME:
        [expected] = get_backend("ort-cpu").prepare(model).run(inputs).values()
        assert_same(actual, expected)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    "node",
    [
        "y = Elu <alpha = 0.3> (a)",
        "y = Selu (a)",
        "y = Celu <alpha = 0.4> (a)",
        "y = HardSigmoid <alpha = 0.3> (a)",
        "y = ThresholdedRelu <alpha = 0.3> (a)",
        "y = Shrink <lambd = 0.3, bias = 0.1> (a)",
        "y = Swish <alpha = 1.3> (a)",
        "y = SwiGLU (a, b)",
        "y = Mish (a)",
        "y = PRelu (a, b)",
        "y = Mod <fmod = 1> (a, b)",
        'y = Einsum <equation = "ij,kj->ik"> (a, b)',
        "y = MeanVarianceNormalization <axes = [1]> (a)",
        "y = ArgMax <axis = 1> (a)",
    ],
)
def test_sixteen_bits_are_computed_in_more_and_rounded_once(node: str, dtype: np.dtype[Any]) -> None:
    values = {"a": draw(3, 4).astype(dtype), "b": draw(3, 4, seed=1).astype(dtype)}
    inputs = {name: x for name, x in values.items() if name in parser.parse_node(node).input}
    wide = run(node, 28, **{name: x.astype(np.float64) for name, x in inputs.items()})
    result = run(node, 28, **inputs)
    assert result.dtype == (np.int64 if "ArgMax" in node else dtype)
    half_unit = {F16: 2**-11, BF16: 2**-8}[dtype]
    np.testing.assert_allclose(result.astype(F64), wide, rtol=1.001 * half_unit, atol=1e-6)


# Operators before opset 7, by hand.
OLD: list[tuple[str, int, dict[str, Any], Any]] = [
    ("y = Add <broadcast = 1, axis = 0> (a, b)", 6, {"a": f([1, 2], [3, 4]), "b": f(10, 20)}, f([11, 12], [23, 24])),
    ("y = Sub <broadcast = 1> (a, b)", 6, {"a": f([1, 2], [3, 4]), "b": f(10, 20)}, f([-9, -18], [-7, -16])),
    ("y = Mul <broadcast = 1, axis = 1> (a, b)", 1, {"a": f([[1], [2]], [[3], [4]]), "b": f([2], [3])}, None),
    ("y = Div <broadcast = 1> (a, b)", 6, {"a": np.int32([-7, 7]), "b": np.int32(2)}, np.int32([-3, 3])),
    ("y = Pow <broadcast = 1> (a, b)", 1, {"a": f(2, 3), "b": f([2])[0]}, f(4, 9)),
    ("y = Add (a, b)", 6, {"a": f(1, 2), "b": f(3, 4)}, f(4, 6)),
    ("y = Greater <broadcast = 1, axis = -2> (a, b)", 1, {"a": f([1, 2], [3, 4]), "b": f(1, 4)}, None),
    ("y = And <broadcast = 1> (a, b)", 1, {"a": np.array([True, False]), "b": np.array([True])}, None),
    ("y = Max (a, b, c)", 6, {"a": f(1, 5), "b": f(3, 4), "c": f(2, 6)}, f(3, 6)),
    ("y = Min (a, b)", 1, {"a": f(1, 5), "b": f(3, 4)}, f(1, 4)),
    ("y = Mean (a, b)", 6, {"a": f(1, 5), "b": f(3, 4)}, f(2, 4.5)),
    ("y = Sum (a)", 1, {"a": f(1, 5)}, f(1, 5)),
    ('y = Cast <to = "INT64"> (a)', 1, {"a": f(1.5, -1.5)}, i(1, -1)),
    ("y = Clip (a)", 1, {"a": f(-INF, 3)}, f(-INF, 3)),
    ("y = Clip <max = 1.0> (a)", 1, {"a": f(-3, 3)}, f(-3, 1)),
    ("y = Clip <min = -1.0> (a)", 6, {"a": f(-3, 3)}, f(-1, 3)),
    ("y = Concat (a, b)", 1, {"a": f([1], [2]), "b": f([3], [4])}, f([1, 3], [2, 4])),
    ("y = Concat <axis = 0> (a, b)", 1, {"a": f(1), "b": f(2)}, f(1, 2)),
    ("y = Dropout <is_test = 1> (a)", 6, {"a": f(1, 2)}, f(1, 2)),
    ("y = LpPool <kernel_shape = [2], p = 3.0> (a)", 1, {"a": f([[2, 2, -1]])}, f([[16 ** (1 / 3), 9 ** (1 / 3)]])),
    ('y = Pad <paddings = [1, 0], mode = "edge"> (a)', 1, {"a": f(1, 2)}, f(1, 1, 2)),
    ("y = Pad <pads = [-1, 1], value = 5.0> (a)", 2, {"a": f(1, 2)}, f(2, 5)),
    ("y = Tile (a, n, axis)", 1, {"a": f([1, 2]), "n": f(2)[0], "axis": f(0)[0]}, f([1, 2], [1, 2])),
    ("y, n = TopK <k = 2, axis = 0> (a)", 1, {"a": f(1, 3, 3)}, [f(3, 3), i(1, 2)]),
    ("y = Upsample <height_scale = 1.0, width_scale = 2.0> (a)", 1, {"a": f([[[1, 2]]])}, f([[[1, 1, 2, 2]]])),
    (
        'y = Upsample <height_scale = 1.0, width_scale = 2.0, mode = "bilinear"> (a)',
        1,
        {"a": f([[[1, 2]]])},
        f([[[1, 1.5, 2, 2]]]),
    ),
    ("y = PRelu (a, s)", 6, {"a": f([[-1, 2], [-3, 4]]), "s": f(10, 100)}, f([[-10, 2], [-300, 4]])),
    ("y = PRelu (a, s)", 1, {"a": f([[-1, 2], [-3, 4]]), "s": f(10)}, f([[-10, 2], [-30, 4]])),
    (
        "y = BatchNormalization <is_test = 1, epsilon = 0.0> (a, s, b, m, v)",
        6,
        {"a": f([3]), "s": f(2), "b": f(1), "m": f(1), "v": f(4)},
        f([3]),
    ),
    (
        "y, m2, v2, bm, bv = BatchNormalization <epsilon = 0.0, momentum = 0.75> (a, s, b, m, v)",
        6,
        {"a": f([2], [4]), "s": f(2), "b": f(1), "m": f(1), "v": f(5)},
        [f([-1], [3]), f(1.5), f(4), f(3), f(1)],
    ),
]
BY_HAND = {
    "y = Mul <broadcast = 1, axis = 1> (a, b)": f([[2], [6]], [[6], [12]]),
    "y = Greater <broadcast = 1, axis = -2> (a, b)": np.array([[False, True], [False, False]]),
    "y = And <broadcast = 1> (a, b)": np.array([True, False]),
}


@pytest.mark.parametrize(("node", "opset", "inputs", "expected"), OLD, ids=str)
def test_old_versions(node: str, opset: int, inputs: dict[str, Any], expected: Any) -> None:
    expected = BY_HAND[node] if expected is None else expected
    results = run(node, opset, **inputs)
    for actual, right in zip(*(x if isinstance(x, list) else [x] for x in (results, expected)), strict=True):
        assert_same(actual, right)


def test_old_dropout_draws_when_it_is_no_test() -> None:
    y, mask = run("y, m = Dropout <ratio = 0.25> (a)", 6, a=np.ones(1000, np.float32))
    np.testing.assert_array_equal(y, mask / F32.type(0.75))
    assert mask.dtype == F32
    assert 700 <= mask.sum() <= 800


def _mod(a: int, b: int, fmod: bool) -> int:
    """A − ⌊A/B⌋·B, or A − trunc(A/B)·B, in Python's integers."""
    return int(math.copysign(abs(a) % abs(b), a)) if fmod else a - (a // b) * b


@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED], ids=str)
@pytest.mark.parametrize("fmod", [0, 1])
def test_mod_of_integers(dtype: np.dtype[Any], fmod: int) -> None:
    a, b = map(np.ravel, np.meshgrid(*(np.array(v, dtype) for v in ([7, 100, 3, 0], [3, 7, 1]))))
    if dtype.kind == "i":
        a, b = np.concatenate([a, -a, a, -a]), np.concatenate([b, b, -b, -b])
    expected = np.array([_mod(m, n, bool(fmod)) for m, n in zip(a.tolist(), b.tolist(), strict=True)], dtype)
    assert_same(run(f"y = Mod <fmod = {fmod}> (a, b)", 13, a=a, b=b), expected)


# a, b, floored, truncated: the special cases of the specification.
MOD = [
    (7.5, 2.0, 1.5, 1.5),
    (-7.5, 2.0, 0.5, -1.5),
    (7.5, -2.0, -0.5, 1.5),
    (-7.5, -2.0, -1.5, -1.5),
    (0.0, -2.0, -0.0, 0.0),
    (-0.0, 2.0, 0.0, -0.0),
    (INF, 2.0, NAN, NAN),
    (-INF, INF, NAN, NAN),
    (1.0, 0.0, NAN, NAN),
    (1.0, -0.0, NAN, NAN),
    (1.0, INF, 1.0, 1.0),
    (-1.0, INF, INF, -1.0),
    (1.0, -INF, -INF, 1.0),
    (-1.0, -INF, -1.0, -1.0),
    (NAN, 1.0, NAN, NAN),
    (1.0, NAN, NAN, NAN),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mod_of_floats(dtype: np.dtype[Any]) -> None:
    a, b, *expected = np.array(MOD).T.astype(dtype)
    for fmod in (0, 1):
        actual = run(f"y = Mod <fmod = {fmod}> (a, b)", 28, a=a, b=b)
        assert actual.dtype == dtype
        np.testing.assert_array_equal(actual.astype(F64), expected[fmod].astype(F64))
        number = ~np.isnan(actual.astype(F64))
        np.testing.assert_array_equal(np.signbit(actual[number]), np.signbit(expected[fmod][number]))


def _shift(x: int, y: int, left: bool, dtype: np.dtype[Any]) -> int:
    """The specification of opset 28, in Python's integers, which have as many bits as it takes."""
    bits = 8 * dtype.itemsize
    if not 0 <= y < bits:
        return -1 if x < 0 and not left else 0
    if not left:
        return x >> y
    low = (x << y) % 2**bits
    return low - 2**bits if dtype.kind == "i" and low >= 2 ** (bits - 1) else low


@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED], ids=str)
@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
def test_bit_shift(dtype: np.dtype[Any], direction: str) -> None:
    info, bits = np.iinfo(dtype), 8 * dtype.itemsize
    by = [0, 1, bits - 1, bits, bits + 1, info.max]
    values = [0, 1, 5, info.max, info.min]
    if dtype.kind == "i":
        by, values = [*by, -1, info.min], [*values, -1, -6]
    x, y = map(np.ravel, np.meshgrid(np.array(values, dtype), np.array(by, dtype)))
    expected = [_shift(m, n, direction == "LEFT", dtype) for m, n in zip(x.tolist(), y.tolist(), strict=True)]
    assert_same(run(f'z = BitShift <direction = "{direction}"> (x, y)', 28, x=x, y=y), np.array(expected, dtype))


def _einsum(equation: str, *operands: np.ndarray) -> np.ndarray:
    """output[output-term] = Σ Π input[term], a number at a time; explicit form, no ellipsis."""
    terms, result = equation.split("->")
    letters = sorted(set(terms) - {","})
    sizes = {
        c: n for term, x in zip(terms.split(","), operands, strict=True) for c, n in zip(term, x.shape, strict=True)
    }
    total = np.zeros([sizes[c] for c in result])
    for values in itertools.product(*(range(sizes[c]) for c in letters)):
        at = dict(zip(letters, values, strict=True))
        product = 1.0
        for term, x in zip(terms.split(","), operands, strict=True):
            product *= x[tuple(at[c] for c in term)]
        total[tuple(at[c] for c in result)] += product
    return total


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij->ji", [(2, 3)]),
        ("ij->", [(2, 3)]),
        ("ii->i", [(3, 3)]),
        ("ii->", [(3, 3)]),
        ("iij,j->ij", [(2, 2, 3), (3,)]),
        ("i,j->ij", [(2,), (3,)]),
        ("bi,b->", [(3, 2), (3,)]),
        ("ijk,jil->kl", [(2, 3, 4), (3, 2, 5)]),
        ("bij,bjk->bik", [(2, 2, 3), (2, 3, 4)]),
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 2)]),
        ("a,b,c->cab", [(2,), (3,), (2,)]),
        ("Aa,aA->A", [(2, 3), (3, 2)]),
        ("ij,ij->ij", [(2, 3), (2, 3)]),
        ("ij,jk->ik", [(2, 0), (0, 3)]),
        ("ij,jk->ki", [(0, 2), (2, 3)]),
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_einsum(equation: str, shapes: list[tuple[int, ...]], large: bool, monkeypatch: Any) -> None:
    """As it is written, with and without a search for the order of the products."""
    monkeypatch.setattr("refgrad.backends.numpy.kernels.linear._MANY", -1 if large else 10**9)
    operands = {f"x{k}": draw(*shape, seed=k).astype(np.float64) for k, shape in enumerate(shapes)}
    result = run(f'y = Einsum <equation = "{equation}"> ({", ".join(operands)})', 12, **operands)
    np.testing.assert_allclose(result, _einsum(equation, *operands.values()), rtol=1e-12, atol=1e-12)
    whole = {name: np.round(3 * x).astype(np.int64) for name, x in operands.items()}
    result = run(f'y = Einsum <equation = "{equation}"> ({", ".join(whole)})', 12, **whole)
    assert_same(result, _einsum(equation, *whole.values()).astype(np.int64))


def _overlap(a: np.ndarray, b: np.ndarray, center: bool) -> float:
    """Intersection over union of two boxes, a number at a time."""
    sides = []
    for box in (a.tolist(), b.tolist()):
        if center:
            x, y, w, h = box
            box = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
        sides.append([(min(box[k], box[k + 2]), max(box[k], box[k + 2])) for k in (0, 1)])
    common = math.prod(max(0.0, min(p[1], q[1]) - max(p[0], q[0])) for p, q in zip(*sides, strict=True))
    union = sum(math.prod(high - low for low, high in side) for side in sides) - common
    return common / union if union else 0.0


def _select(boxes: np.ndarray, scores: np.ndarray, most: int, iou: float, score: float, center: bool) -> np.ndarray:
    """NonMaxSuppression as the specification tells it: one batch, one class, one box after the other."""
    selected = []
    for batch, kind in itertools.product(range(scores.shape[0]), range(scores.shape[1])):
        row = scores[batch, kind].tolist()
        chosen: list[int] = []
        for box in sorted(range(len(row)), key=lambda n: (-row[n], n)):
            free = all(_overlap(boxes[batch, box], boxes[batch, other], center) <= iou for other in chosen)
            if row[box] >= score and free and len(chosen) < most:
                chosen.append(box)
        selected += [[batch, kind, box] for box in chosen]
    return np.array(selected, np.int64).reshape(-1, 3)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(0, 9),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.sampled_from([-1.0, 0.25, 0.5]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_non_max_suppression(
    seed: int, batches: int, classes: int, count: int, most: int, iou: float, score: float, center: bool
) -> None:
    """Corners on a grid of halves and few scores: many ties, shares, touching and empty boxes, without rounding."""
    rng = np.random.default_rng(seed)
    boxes = rng.integers(0, 5, (batches, count, 4)).astype(np.float32) / 2
    scores = rng.integers(0, 5, (batches, classes, count)).astype(np.float32) / 4
    node = f"y = NonMaxSuppression <center_point_box = {int(center)}> (b, s, m, i, t)"
    expected = _select(boxes, scores, most, iou, score, center)
    for pairs in (indexing._PAIRS, -1):  # few boxes, and as if they were many
        with mock.patch.object(indexing, "_PAIRS", pairs):
            assert_same(run(node, 11, b=boxes, s=scores, m=i(most)[0], i=f(iou)[0], t=f(score)[0]), expected)


def test_center_crop_pad_of_strings() -> None:
    result = run("y = CenterCropPad (x, s)", 18, x=np.array(["a", "b"], object), s=i(4))
    assert result.tolist() == ["", "a", "b", ""]


def test_blocks_come_back() -> None:
    x = draw(2, 8, 4, 6)
    for mode in ("DCR", "CRD"):
        there = run(f'y = SpaceToDepth <blocksize = 2, mode = "{mode}"> (x)', 28, x=x)
        np.testing.assert_array_equal(run(f'y = DepthToSpace <blocksize = 2, mode = "{mode}"> (x)', 28, x=there), x)


def test_an_instance_far_from_0_keeps_its_digits() -> None:
    x = 4096 + np.arange(4, dtype=np.float32).reshape(1, 1, 4)
    normal = (np.arange(4) - 1.5) / np.sqrt(1.25)
    for node in ("InstanceNormalization <epsilon = 0.0> (x, s, b)", "MeanVarianceNormalization <axes = [2]> (x)"):
        more = {"s": f(1), "b": f(0)} if "Instance" in node else {}
        np.testing.assert_allclose(run(f"y = {node}", x=x, **more).ravel(), normal, rtol=1e-6)


# Random numbers

RANDOM = [
    ("y = RandomNormal <shape = [{n}], mean = 1.0, scale = 2.0{more}> ()", 1.0, 2.0),
    ("y = RandomUniform <shape = [{n}], low = -1.0, high = 2.0{more}> ()", 0.5, 3 / math.sqrt(12)),
    ("y = RandomNormalLike <mean = 1.0, scale = 2.0{more}> (x)", 1.0, 2.0),
    ("y = RandomUniformLike <low = -1.0, high = 2.0{more}> (x)", 0.5, 3 / math.sqrt(12)),
    ("y = Bernoulli <dtype = 1{more}> (x)", 0.25, math.sqrt(3 / 16)),
]


def _fed(node: str, n: int) -> dict[str, np.ndarray]:
    return {"x": np.full(n, 0.25, np.float32)} if "(x)" in node else {}


@pytest.mark.parametrize(("node", "mean", "deviation"), RANDOM, ids=str)
def test_random_numbers_have_the_distribution_that_is_asked_for(node: str, mean: float, deviation: float) -> None:
    n = 40_000
    y = run(node.format(n=n, more=", seed = 1.0"), **_fed(node, n)).astype(np.float64)
    assert abs(y.mean() - mean) <= 4 * deviation / math.sqrt(n)
    assert abs(y.std() - deviation) <= 0.02 * deviation
    neighbours = np.corrcoef(y[:-1], y[1:])[0, 1]
    assert abs(neighbours) <= 4 / math.sqrt(n)
    if "Uniform" in node:
        assert y.min() >= -1
        assert y.max() < 2


@pytest.mark.parametrize(("node", "mean", "deviation"), RANDOM, ids=str)
def test_random_numbers_follow_from_the_seed(node: str, mean: float, deviation: float) -> None:
    def numbers(more: str, precision: str | None = None) -> np.ndarray:
        return np.asarray(run(node.format(n=50, more=more), precision=precision, **_fed(node, 50)))

    first = numbers(", seed = 1.0")
    np.testing.assert_array_equal(first, numbers(", seed = 1.0"))
    assert (first != numbers(", seed = 1.5")).any()
    assert (first != numbers(", seed = -1.0")).any()
    np.testing.assert_array_equal(numbers(""), numbers(""))
    wide = numbers(", seed = 1.0", "float64")
    assert wide.dtype == F64
    np.testing.assert_array_equal(wide.astype(np.float32), first)


@pytest.mark.parametrize(
    ("node", "dtype"),
    [
        ("y = RandomNormal <shape = [2, 0]> ()", F32),
        ("y = RandomNormal <shape : ints = [], dtype = 11> ()", F64),
        ("y = RandomUniform <shape = [3], dtype = 10> ()", F16),
        ("y = RandomUniform <shape = [3], dtype = 16> ()", BF16),
        ("y = RandomNormalLike (x)", F32),
        ("y = RandomUniformLike <dtype = 11> (x)", F64),
        ("y = Bernoulli (x)", F32),
        ("y = Bernoulli <dtype = 9> (x)", np.dtype(bool)),
        ("y = Bernoulli <dtype = 7> (x)", np.dtype(np.int64)),
        ("y = Bernoulli <dtype = 16> (x)", BF16),
    ],
)
def test_random_numbers_have_the_type_that_is_asked_for(node: str, dtype: np.dtype[Any]) -> None:
    assert run(node, 22, **({"x": f(0, 1)} if "(x)" in node else {})).dtype == dtype


def test_what_is_certain_or_impossible_is_drawn_always_or_never() -> None:
    p = np.repeat(f(0, 1), 1000)
    np.testing.assert_array_equal(run("y = Bernoulli (p)", p=p), p)
    y = run("y = Multinomial <sample_size = 1000> (x)", x=f([-INF, 0, -INF], [5, -INF, -INF], [-INF, -INF, 1]))
    np.testing.assert_array_equal(y, np.repeat(np.int32([[1], [0], [2]]), 1000, 1))


def test_classes_are_drawn_as_often_as_their_logits_say() -> None:
    n = 40_000
    x = np.log(f([1, 2, 5], [6, 1, 1])) + f([100], [-3])
    y = run(f"y = Multinomial <sample_size = {n}, dtype = 7, seed = 2.0> (x)", x=x)
    assert y.dtype == np.int64
    often = np.stack([np.bincount(row, minlength=3) for row in y]) / n
    np.testing.assert_allclose(often, np.array([[1, 2, 5], [6, 1, 1]]) / 8, atol=0.01)
    assert (y[0] != y[1]).any()
    again = run(f"y = Multinomial <sample_size = {n}, dtype = 7, seed = 2.0> (x)", precision="float64", x=x)
    assert (again == y).mean() > 0.999  # a number beside the edge of two classes may fall on the other side


ERRORS: list[tuple[str, int, dict[str, Any], str]] = [
    ("y = ArgMax <axis = 2> (x)", 13, {"x": draw(2, 3)}, "axis 2"),
    ("y = PRelu (x, s)", 16, {"x": draw(2, 3), "s": draw(2)}, r"slope.*\[2\].*\[2, 3\]"),
    ("y = PRelu (x, s)", 16, {"x": draw(3), "s": draw(2, 3)}, r"\[2, 3\].*\[3\]"),
    ("y = SwiGLU (a, b)", 28, {"a": draw(2, 3), "b": draw(3)}, r"\[2, 3\].*\[3\]"),
    ('y = BitShift <direction = "UP"> (a, a)', 11, {"a": np.uint8([1])}, "'UP'"),
    ("y = Add <broadcast = 1, axis = 0> (a, b)", 6, {"a": draw(2, 3), "b": draw(3)}, "from axis 0"),
    ("y = Add (a, b)", 6, {"a": draw(2, 3), "b": draw(3)}, "broadcast is 0"),
    ("y = Add <broadcast = 1> (a, b)", 6, {"a": draw(3), "b": draw(2, 3)}, r"\[2, 3\]"),
    ("y = DepthToSpace <blocksize = 2> (x)", 13, {"x": draw(1, 3, 1, 1)}, "3 channels"),
    ("y = SpaceToDepth <blocksize = 2> (x)", 13, {"x": draw(1, 1, 3, 2)}, "3×2"),
    ("y = ReverseSequence (x, n)", 10, {"x": draw(2, 2), "n": i(1, 3)}, r"\[1, 3\].*0 to 2"),
    ("y = ReverseSequence (x, n)", 10, {"x": draw(2, 2), "n": i(1)}, "2 lengths"),
    ("y = ReverseSequence <batch_axis = 1, time_axis = 1> (x, n)", 10, {"x": draw(2, 2), "n": i(1, 1)}, "time_axis=1"),
    ("y = BitCast <to = 7> (x)", 26, {"x": draw(2)}, "float32 cannot be read as int64"),
    ("y = RandomNormalLike (x)", 22, {"x": i(1)}, "int64"),
    ("y = Multinomial (x)", 22, {"x": draw(2, 0)}, r"no class.*\[2, 0\]"),
    ("y = RotaryEmbedding (x, c, c)", 23, {"x": draw(1, 1, 4), "c": draw(1, 1, 2)}, "num_heads"),
    ("y = RotaryEmbedding (x, c, c)", 23, {"x": draw(1, 1, 1, 4), "c": draw(1, 1, 1)}, "2 columns"),
    ("y = CenterCropPad (x, s)", 18, {"x": draw(2, 2), "s": i(1)}, "shorter|elements"),
]


@pytest.mark.parametrize(("node", "opset", "inputs", "message"), ERRORS, ids=str)
def test_errors_say_what_came_and_what_is_needed(node: str, opset: int, inputs: dict[str, Any], message: str) -> None:
    made = parser.parse_node(node)
    graph = helper.make_graph(
        [made],
        "g",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), [None] * x.ndim)
            for n, x in inputs.items()
        ],
        [helper.make_empty_tensor_value_info("y")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    with pytest.raises(BackendError, match=f"(?s){made.op_type}.*({message})"):
        NUMPY.prepare(model).run(inputs)


def test_a_range_of_large_integers_is_counted_in_integers() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> m (int64 a, int64 b, int64 step) => (int64[N] y) { y = Range(a, b, step) }"""
    )
    prepared = get_backend("numpy").prepare(model)
    for a, b, step in ((0, 2**62 + 1, 2**61), (2**62 + 1, 0, -(2**61)), (5, 0, 1), (0, 7, 3), (0, -7, -3)):
        [found] = prepared.run({name: np.array(x) for name, x in (("a", a), ("b", b), ("step", step))}).values()
        assert found.tolist() == list(range(a, b, step))
