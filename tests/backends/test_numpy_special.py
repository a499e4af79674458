"""NaN, infinities, −0, subnormal and huge numbers, as ONNX Runtime or IEEE 754 has them; warnings are errors."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import reuse
from numpy_graphs import undeclared
from numpy_nodes import ONNXRUNTIME
from onnx import parser
from runtime import needs_runtime

from refgrad.backends import get_backend

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]
at_every_size = reuse.at_every_size

NUMPY = get_backend("numpy")
KINDS = [np.dtype(name) for name in ("float16", "float32", "float64")]
NAN, INF = np.nan, np.inf
TINY, SMALLEST, HUGE = 1e-45, 1.1754944e-38, 3.4028235e38  # of float32: subnormal, the smallest normal, the largest

ORDINARY = (1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 100.0, -100.0, 88.8, -104.0, 1e-10)
NUMBERS = (INF, -INF, 0.0, -0.0, TINY, -TINY, SMALLEST, HUGE, -HUGE, *ORDINARY)
ALL = (NAN, *NUMBERS)
MODERATE = tuple(x for x in ALL if abs(x) != HUGE)
ROWS = [
    NUMBERS[:6],
    [1.0, NAN, 2.0, -1.0, 0.5, 3.0],
    [NAN] * 6,
    [-INF] * 6,
    [INF] * 6,
    [INF, 1.0, 2.0, 3.0, -4.0, 5.0],
    [-INF, 1.0, 2.0, 3.0, -4.0, 5.0],
    [0.0, -0.0, TINY, -TINY, 0.0, 0.0],
    [-0.0] * 6,
    ORDINARY[:6],
]
ORDERED = [row for row in ROWS if not np.isnan(row).any()]  # what becomes of NaN is worked out by hand below
HIGHER = [row for row in ORDERED if max(row) > -INF]

UNARY = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp"),
    *("Floor", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg"),
    *("Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt"),
    *("Tan", "Tanh", "ThresholdedRelu", "Not", "Trilu", "NonZero", "Size"),
)
BINARY = (
    *("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "PRelu"),
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mod <fmod = 1>"),
)
REDUCE = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")

# Body, and the numbers that it reads as x, a, b, ...: one row each for an elementwise operator.
CASES: list[tuple[str, dict[str, Any]]] = [
    *((f"y = {op}(x)", {"x": ALL}) for op in UNARY if op not in ("Not", "Trilu")),
    # Between −4 and −2 the tail of the normal distribution is what is left of 1 + erf, which cancels there.
    *(
        (f"y = Gelu {attributes} (x)", {"x": [x for x in ALL if not -4 < x < -2]})
        for attributes in ("", '<approximate = "tanh">')
    ),
    ("b = IsNaN(x) y = Not(b)", {"x": ALL}),
    ("y = Trilu(x)", {"x": ROWS}),
    ("y = IsInf <detect_negative = 0> (x)", {"x": ALL}),
    ("y = IsInf <detect_positive = 0> (x)", {"x": ALL}),
    ("y = Shrink <lambd = 1.0, bias = 0.5> (x)", {"x": ALL}),
    ("y = Sign(x)", {"x": NUMBERS}),
    *((f"y = {op}(a, b)", {"a": np.repeat(ALL, len(ALL)), "b": ALL * len(ALL)}) for op in BINARY),
    ("y = Mean(a, b)", {"a": np.repeat(MODERATE, len(MODERATE)), "b": MODERATE * len(MODERATE)}),
    ("y = Max(a, b, c)", {"a": ALL, "b": ALL[::-1], "c": ALL[1:] + ALL[:1]}),
    ("y = Clip(x, l, h)", {"x": ALL, "l": -1.0, "h": 1.0}),
    ("y = Clip(x, l, h)", {"x": ALL, "l": 3.0, "h": 1.0}),
    ("y = Clip(x, l, h)", {"x": ALL, "l": NAN, "h": 1.0}),
    ("y = Clip(x, l, h)", {"x": ALL, "l": -1.0, "h": NAN}),
    ("y = Clip(x, l, h)", {"x": ALL, "l": -INF, "h": INF}),
    *(
        (
            f"i = Constant <value_ints = [1]> () y = Reduce{op} <keepdims = 0> (x, i)",
            {"x": ORDERED if op in ("Max", "Min") else ROWS},
        )
        for op in REDUCE
    ),
    ("i = Constant <value_int = 1> () y = CumSum(x, i)", {"x": ROWS}),
    ("i = Constant <value_int = 1> () y = CumSum <exclusive = 1, reverse = 1> (x, i)", {"x": ROWS}),
    ("y = Softmax(x)", {"x": ROWS}),
    ("y = LogSoftmax(x)", {"x": [row for row in ORDERED if INF not in row]}),
    ("y = Hardmax(x)", {"x": ORDERED}),
    *((f"y = Arg{op} <axis = 1> (x)", {"x": ORDERED}) for op in ("Max", "Min")),
    *((f"y = Arg{op} <axis = 1, select_last_index = 1> (x)", {"x": ORDERED}) for op in ("Max", "Min")),
    *(
        (f"k = Constant <value_ints = [6]> () {y} = TopK <largest = {largest}> (x, k)", {"x": ORDERED})
        for largest in (0, 1)
        for y in ("y, z", "z, y")
    ),
    ("y = Unique(x)", {"x": NUMBERS}),
    ("y = Unique <sorted = 0> (x)", {"x": NUMBERS}),
    *((f"y = {op} <kernel_shape = [2]> (x)", {"x": [ROWS]}) for op in ("AveragePool", "LpPool")),
    *((f"y = Global{op}Pool(x)", {"x": [ROWS]}) for op in ("Average", "Lp")),
    ("y = MaxPool <kernel_shape = [2]> (x)", {"x": [HIGHER]}),
    ("z, y = MaxPool <kernel_shape = [2]> (x)", {"x": [HIGHER]}),
    ("y = GlobalMaxPool(x)", {"x": [HIGHER]}),
    *((f"y = Cast <to = {to}> (x)", {"x": ALL}) for to in (1, 9, 10, 11)),
    ("b = Cast <to = 16> (x) y = Cast <to = 1> (b)", {"x": ALL}),
    *(
        (f"y = Cast <to = {to}> (x)", {"x": (0.0, -0.0, 1.5, -1.5, 2.5, 100.7, -100.7, 0.49, -0.49, TINY, -TINY)})
        for to in (3, 5, 6, 7)
    ),
    *((f"y = Cast <to = {to}> (x)", {"x": (0.0, -0.0, 1.5, 2.5, 200.7, 0.49, TINY)}) for to in (2, 4, 12, 13)),
]

# Where one of two zeros is as good as the other: a maximum of both, a sum that begins with 0 or not, formulas of one value.
ANY_ZERO = (
    *(
        "Max",
        "Min",
        "Clip",
        "Relu",
        "Selu",
        "Celu",
        "ReduceMax",
        "ReduceMin",
        "MaxPool",
        "GlobalMaxPool",
        "TopK",
        "Gelu",
    ),
    *("ReduceSum", "ReduceMean", "AveragePool", "GlobalAveragePool"),
)


def arrays(numbers: Mapping[str, Any], kind: np.dtype[Any]) -> dict[str, np.ndarray]:
    """The numbers in `kind`: infinite or 0 where they are too large or too small."""
    with np.errstate(all="ignore"):
        return {name: np.asarray(v, np.float32).astype(kind) for name, v in numbers.items()}


def differing(got: np.ndarray, expected: np.ndarray, eps: float, tiny: float, zeros: bool) -> np.ndarray:
    """Where two results are not the same: NaN for NaN, infinities and zeros of the same sign, numbers but for rounding.

    What is subnormal may be 0, as processors can be told. With `zeros` the sign of a zero counts.
    """
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    same = (np.isnan(got) & np.isnan(expected)) | np.isclose(got, expected, 8 * eps, tiny)
    exact_zeros = (got == 0) & (expected == 0)
    signs = (np.signbit(got) == np.signbit(expected)) | ~exact_zeros | (not zeros)
    return ~(same & (signs | np.isnan(got)))


@pytest.mark.matrix
@needs_runtime
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("body", "numbers"), CASES, ids=[f"{body}-{len(numbers)}" for body, numbers in CASES])
def test_special_values_are_those_of_onnx_runtime(body, numbers, kind):
    """Where it has no kernel for a type, its float32 kernel decides what becomes of the same numbers."""
    inputs = arrays(numbers, kind)
    model = undeclared(body, inputs)
    got = NUMPY.prepare(model).run(inputs)["y"]
    expected = ONNXRUNTIME.run(model, inputs)
    if isinstance(expected, str):
        inputs = {name: x.astype(np.float32) for name, x in inputs.items()}
        expected = ONNXRUNTIME.run(undeclared(body, inputs), inputs)
        assert not isinstance(expected, str), expected
        with np.errstate(all="ignore"):
            expected = [expected[0].astype(got.dtype)]
            got = got.astype(np.float32).astype(got.dtype) if got.dtype.kind == "f" else got
    [expected] = expected
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    info = np.finfo(np.float32 if kind == np.float64 else kind)
    operator = model.graph.node[-1].op_type
    wrong = differing(got, expected, float(info.eps), float(info.smallest_normal), operator not in ANY_ZERO)
    assert not wrong.any(), f"{got[wrong][:5]} for {expected[wrong][:5]} at {np.argwhere(wrong)[:5].tolist()}"


# Body, x, y: what ONNX Runtime gets wrong, cannot run or leaves open, worked out by hand.
BY_HAND: list[tuple[str, Any, Any]] = [
    ("y = Sign(x)", [NAN, -0.0, INF, -INF], [NAN, 0, 1, -1]),
    ("y = Swish(x)", [NAN, INF, -0.0, 0.0], [NAN, INF, -0.0, 0.0]),
    ("y = LogSoftmax(x)", [[1, INF, 2], [NAN, 1, 2]], [[NAN] * 3, [NAN] * 3]),
    ("y = LogSoftmax(x)", [[1, -INF, 1]], [[-np.log(2), -INF, -np.log(2)]]),
    ("y = Hardmax(x)", [[1, NAN, INF]], [[0, 1, 0]]),
    ("y = ArgMax <axis = 1, select_last_index = 1> (x)", [[1, NAN, INF], [3, 3, 1]], [[1], [1]]),
    ("y = ArgMin <axis = 1, select_last_index = 1> (x)", [[1, NAN, -INF], [1, 3, 1]], [[1], [2]]),
    ("k = Constant <value_ints = [3]> () y, z = TopK(x, k)", [1, NAN, INF, -INF], [NAN, INF, 1]),
    ("k = Constant <value_ints = [3]> () z, y = TopK <largest = 0> (x, k)", [1, NAN, INF, -INF], [3, 0, 2]),
    ("y = Unique(x)", [NAN, 2, 1, NAN, -INF], [-INF, 1, 2, NAN]),
    *(
        (f"i = Constant <value_ints = [1]> () y = Reduce{op}(x, i)", [[1, NAN, 2], [NAN, 1, INF]], [[NAN], [NAN]])
        for op in ("Max", "Min")
    ),
    *((f"y = Arg{op} <axis = 1> (x)", [[1, NAN, 2], [2, 2, 2]], [[1], [0]]) for op in ("Max", "Min")),
    ("y = MaxPool <kernel_shape = [2]> (x)", [[[NAN, 1, 2, -INF, -INF]]], [[[NAN, 2, 2, -INF]]]),
    ("z, y = MaxPool <kernel_shape = [2]> (x)", [[[1, NAN, 2, -INF, -INF]]], [[[1, 1, 2, 3]]]),
    ("y = MaxPool <kernel_shape = [2], pads = [1, 1]> (x)", [[[-INF, -INF]]], [[[-INF] * 3]]),
    ("y = GlobalMaxPool(x)", [[[1, NAN, 2], [-INF, -INF, -INF]]], [[[NAN], [-INF]]]),
    (
        "c = IsNaN(x) z = Constant <value_float = -0.0> () w = CastLike(z, x) y = Where(c, w, x)",
        [NAN, -0.0],
        [-0.0] * 2,
    ),
    ("z = Constant <value_float = 0.0> () w = CastLike(z, x) y = Clip(x, w)", [INF, -INF, NAN, 1], [INF, 0, NAN, 1]),
    ('y = Einsum <equation = "i,i->i"> (x, x)', [INF, -0.0, NAN], [INF, 0, NAN]),
    ("y = MatMul(x, x)", [[INF, 0], [0, 1]], [[INF, NAN], [NAN, 1]]),
    ("y = Cast <to = 8> (x)", [NAN, INF, -INF, -0.0], ["nan", "inf", "-inf", "-0.0"]),
    ("s = Cast <to = 8> (x) y = Cast <to = 1> (s)", [NAN, INF, -INF, -0.0], [NAN, INF, -INF, -0.0]),
    ("b = Cast <to = 17> (x) y = Cast <to = 1> (b)", [NAN, INF, -INF, -0.0, 1e4], [NAN, 448, -448, -0.0, 448]),
    ("b = Cast <to = 17, saturate = 0> (x) y = Cast <to = 1> (b)", [INF, -INF, -0.0, 1e4], [NAN, NAN, -0.0, NAN]),
    ("b = Cast <to = 18> (x) y = Cast <to = 1> (b)", [NAN, INF, -INF, -0.0], [NAN, 240, -240, 0.0]),
    ("b = Cast <to = 19> (x) y = Cast <to = 1> (b)", [NAN, INF, -INF, -0.0], [NAN, 57344, -57344, -0.0]),
    ("b = Cast <to = 19, saturate = 0> (x) y = Cast <to = 1> (b)", [NAN, INF, -INF, -0.0], [NAN, INF, -INF, -0.0]),
    ("b = Cast <to = 20> (x) y = Cast <to = 1> (b)", [NAN, INF, -INF, -0.0], [NAN, 57344, -57344, 0.0]),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("body", "x", "y"), BY_HAND, ids=[body for body, _, _ in BY_HAND])
def test_special_values_are_those_worked_out_by_hand(body, x, y, kind):
    inputs = {"x": np.array(x, kind)}
    got = NUMPY.prepare(undeclared(body, inputs, opset=24)).run(inputs)["y"]
    if got.dtype == object:
        assert got.tolist() == y
    else:
        assert got.shape == np.shape(y)
        assert not differing(got, np.array(y, np.float64), float(np.finfo(kind).eps), 0, True).any(), got


def test_a_wrong_special_value_is_caught():
    good = np.array([NAN, INF, -0.0, 1, 0])
    for place, bad in ((0, 0), (1, -INF), (1, HUGE), (2, 0), (3, NAN), (3, 1.1), (4, 1e-30)):
        planted = good.copy()
        planted[place] = bad
        wrong = differing(planted, good, 1e-7, 1e-38, True)
        assert np.flatnonzero(wrong).tolist() == [place]


THREADS, RUNS = 8, 20


def test_one_prepared_model_runs_in_many_threads_at_once():
    """Elementwise operators over memory that is reused, a loop, a recurrent network and a function body, on special values."""
    elementwise = " ".join(f"y{i + 1} = {op}(y{i})" for i, op in enumerate(("Neg", "Exp", "Sqrt", "Log", "Tanh") * 8))
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 4] y0) => (y, Y, Z, W)
        <float[1, 3, 4] w = {{{", ".join(["0.5"] * 12)}}}, float[1, 3, 1] r = {{0.25, 0.5, 1.0}}, int64 five = {{5}}> {{
            {elementwise}
            y = Softmax(y40)
            one = Constant <value_ints = [1]> ()
            x = Unsqueeze(y0, one)
            Y = LSTM <hidden_size = 1> (x, w4, r4)
            w4 = Concat <axis = 1> (w, w_one)  w_one = Slice(w, zero, one, one)  zero = Constant <value_ints = [0]> ()
            r4 = Concat <axis = 1> (r, r_one)  r_one = Slice(r, zero, one, one)
            Z = Loop <body = step (int64 i, bool going, float[n, 4] s) => (bool on, float[n, 4] t) {{
                on = Identity(going)  t = Div(s, y0)
            }}> (five, , y0)
            W = MeanVarianceNormalization <axes = [0]> (y0)
        }}""")
    prepared = NUMPY.prepare(model)
    feeds = [{"y0": np.roll(np.array(NUMBERS[:20], np.float32), k).reshape(5, 4)} for k in range(THREADS)]
    feeds.append({"y0": np.array([[NAN, INF, -INF, 0]], np.float32)})
    expected = [prepared.run(fed) for fed in feeds]
    start = Barrier(THREADS)

    def run(thread: int) -> list[str]:
        start.wait()
        wrong = []
        for turn in range(RUNS):
            number = (thread + turn) % len(feeds)
            results = prepared.run(feeds[number])
            same = [np.array_equal(results[name], y, equal_nan=True) for name, y in expected[number].items()]
            wrong += [] if all(same) else [f"thread {thread}, run {turn}"]
        return wrong

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(run, range(THREADS))) == [[]] * THREADS
