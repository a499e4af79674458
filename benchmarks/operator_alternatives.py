"""The operators that lose to torch by more than 2.5, with other ways to write their gradient, measured in turn.

    python benchmarks/operator_alternatives.py [PATTERN ...]    # needs onnxruntime; after benchmarks/operators.py

Each alternative is the whole graph, forward and backward, and is compared with what refgrad emits before it is measured, on
ONNX Runtime with two threads. "of refgrad's" below 1 is an alternative that is faster, and "why not" says why it is not taken.
An alternative that writes the forward node anew shows how much of the loss is that kernel's: a model's own nodes stay as they
are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx
import onnx.parser
from operator_cases import ROWS, opset
from operators import THREADS, gradient_of
from timing import RESULTS, alternate, save

ROUNDS = 25
LOSING = 2.5


@dataclass(frozen=True)
class Alternative:
    """Another graph for a row, in ONNX's text, and why refgrad does not emit it."""

    row: str
    name: str
    constants: str
    nodes: str
    why_not: str


FORWARD = "writes the model's own node anew"
VIEW = "torch returns a view; the copies are the two results, which a runtime keeps apart from its feeds"
UNITS, TURNED = (", ".join(map(str, units.ravel())) for units in (np.eye(6), np.eye(2)[::-1]))
DEPTHWISE_CONSTANTS = (
    f"int64[5] images = {{-1, 1, 1, 56, 56}}, float[6, 1, 1, 2, 3] units = {{{UNITS}}}, int64[4] lines = {{-1, 1, 6, 784}}, "
    f"int64[5] small = {{-1, 1, 1, 28, 28}}, float[2, 1, 1, 2, 1] shifts = {{{TURNED}}}, int64[4] column = {{-1, 2, 784, 1}}, "
    "int64[2] each = {-1, 1152}, int64[1] first = {0}, int64[3] maps = {96, 1, 12}, "
    "int64[9] places = {3, 4, 5, 6, 7, 8, 9, 10, 11}, int64[4] weights = {96, 1, 3, 3}"
)
DEPTHWISE_WEIGHT = (
    "i = Reshape(X, images)  u = Conv<pads = [0, 0, 1, 0, 0, 0], strides = [1, 2, 2]>(i, units)  w = Reshape(u, lines)  "
    "j = Reshape(Y_grad, small)  v = Conv<pads = [0, 0, 0, 0, 1, 0]>(j, shifts)  d = Reshape(v, column)  p = MatMul(w, d)  "
    "e = Reshape(p, each)  s = ReduceSum<keepdims = 0>(e, first)  f = Reshape(s, maps)  g = Gather<axis = 2>(f, places)  "
    "W_grad = Reshape(g, weights)"
)
ALTERNATIVES = [
    Alternative(
        "Softplus, 8×128×768",
        "1 − exp(−y) instead of Sigmoid",
        "float one = {1}",
        "Y = Softplus(X)  n = Neg(Y)  e = Exp(n)  s = Sub(one, e)  X_grad = Mul(Y_grad, s)",
        "cancels where y is small",
    ),
    Alternative(
        "Softplus, 8×128×768",
        "forward max(x, 0) + log(1 + exp(−|x|))",
        "float one = {1}",
        "a = Abs(X)  n = Neg(a)  e = Exp(n)  p = Add(e, one)  l = Log(p)  r = Relu(X)  Y = Add(r, l)  s = Sigmoid(X)  "
        "X_grad = Mul(Y_grad, s)",
        FORWARD,
    ),
    Alternative(
        "Sinh, 8×128×768",
        "(e^x + e^−x)/2 instead of Cosh",
        "float half = {0.5}",
        "output = Sinh(input)  n = Neg(input)  p = Exp(input)  m = Exp(n)  s = Add(p, m)  h = Mul(half, s)  "
        "input_grad = Mul(output_grad, h)",
        "infinite from 88.7 on, where cosh is not; five nodes for one; the forward kernel alone loses",
    ),
    Alternative(
        "Sinh, 8×128×768",
        "forward and backward by Exp",
        "float half = {0.5}",
        "n = Neg(input)  p = Exp(input)  m = Exp(n)  d = Sub(p, m)  output = Mul(half, d)  s = Add(p, m)  h = Mul(half, s)  "
        "input_grad = Mul(output_grad, h)",
        FORWARD,
    ),
    Alternative(
        "Cosh, 8×128×768",
        "(e^x − e^−x)/2 instead of Sinh",
        "float half = {0.5}",
        "output = Cosh(input)  e = Exp(input)  n = Neg(input)  f = Exp(n)  d = Sub(e, f)  s = Mul(d, half)  "
        "input_grad = Mul(output_grad, s)",
        "cancels where x is small; infinite from 88.7 on, where sinh is not",
    ),
    Alternative(
        "SpaceToDepth, 2, 4×16×56×56",
        "a transposition instead of DepthToSpace",
        "int64[6] blocks = {4, 2, 2, 16, 28, 28}, int64[4] back = {4, 16, 56, 56}",
        "output = SpaceToDepth<blocksize = 2>(input)  a = Reshape(output_grad, blocks)  "
        "b = Transpose<perm = [0, 3, 4, 1, 5, 2]>(a)  input_grad = Reshape(b, back)",
        "slower",
    ),
    Alternative(
        "HardSwish, 8×128×768",
        "the mask as a product",
        "float three = {3}, float minus = {-3}, float sixth = {0.16666667}, float half = {0.5}",
        "Y = HardSwish(X)  a = Abs(X)  l = Less(a, three)  m = Cast<to = 1>(l)  f = Mul(m, sixth)  w = Add(f, sixth)  "
        "c = Clip(X, minus, three)  p = Mul(c, w)  s = Add(p, half)  X_grad = Mul(Y_grad, s)",
        "one pass more",
    ),
    Alternative(
        "LeakyRelu, 8×128×768",
        "the mask as a product",
        "float zero = {0}, float rest = {0.99}, float alpha = {0.01}",
        "Y = LeakyRelu(X)  g = Greater(Y, zero)  m = Cast<to = 1>(g)  r = Mul(m, rest)  s = Add(r, alpha)  "
        "X_grad = Mul(Y_grad, s)",
        "two passes more, and 0.99 + 0.01 need not be 1",
    ),
    Alternative(
        "Where, 8×128×768",
        "the mask as a product",
        "float one = {1}",
        "output = Where(condition, X, Y)  m = Cast<to = 1>(condition)  X_grad = Mul(output_grad, m)  n = Sub(one, m)  "
        "Y_grad = Mul(output_grad, n)",
        "lets through the NaN of what a mask hides; the forward kernel alone loses",
    ),
    Alternative(
        "Conv, 3×3 depthwise by 2, 8×96×56×56",
        "dX as a Conv by 1 of the cotangent with zeros between",
        "int64[6] between = {8, 96, 28, 1, 28, 1}, int64[12] zeros = {0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1}, "
        "int64[4] laid = {8, 96, 56, 56}, int64[2] rows = {96, 9}, int64[9] turned = {8, 7, 6, 5, 4, 3, 2, 1, 0}, "
        f"int64[4] kernel = {{96, 1, 3, 3}}, {DEPTHWISE_CONSTANTS}",
        "Y = Conv<group = 96, pads = [1, 1, 1, 1], strides = [2, 2]>(X, W)  a = Reshape(Y_grad, between)  b = Pad(a, zeros)  "
        "c = Reshape(b, laid)  r = Reshape(W, rows)  t = Gather<axis = 1>(r, turned)  k = Reshape(t, kernel)  "
        f"X_grad = Conv<group = 96, pads = [1, 1, 1, 1]>(c, k)  {DEPTHWISE_WEIGHT}",
        "slower: four times the products",
    ),
    Alternative(
        "DepthToSpace, 2, 4×64×28×28",
        "the same rows of two, transposed in two steps",
        "int64[5] five = {0, 0, 28, 2, 56}, int64[6] six = {0, 0, 2, 28, 28, 2}, int64[4] back = {4, 64, 28, 28}",
        'output = DepthToSpace<blocksize = 2, mode = "CRD">(input)  a = Reshape(output_grad, five)  '
        "b = Transpose<perm = [0, 1, 3, 2, 4]>(a)  c = Reshape(b, six)  d = Transpose<perm = [0, 1, 2, 5, 3, 4]>(c)  "
        "input_grad = Reshape(d, back)",
        "one pass more",
    ),
    Alternative(
        "Gather, 1024 rows of 10000×768",
        "ScatterND",
        "int64[2] shape = {10000, 768}, int64[3] column = {8, 128, 1}",
        "output = Gather(data, indices)  z = ConstantOfShape(shape)  i = Reshape(indices, column)  "
        'data_grad = ScatterND<reduction = "add">(z, i, output_grad)',
        "ONNX Runtime adds in parallel and loses some of what goes to the same row",
    ),
    Alternative(
        "Atanh, 8×128×768",
        "1 − x² instead of (1 − x)·(1 + x)",
        "float one = {1}",
        "output = Atanh(input)  q = Mul(input, input)  d = Sub(one, q)  input_grad = Div(output_grad, d)",
        "cancels near 1; the forward kernel alone loses",
    ),
    Alternative(
        "Tan, 8×128×768",
        "1/cos² instead of 1 + tan²",
        "",
        "output = Tan(input)  c = Cos(input)  q = Mul(c, c)  input_grad = Div(output_grad, q)",
        "slower; the forward kernel alone loses",
    ),
    Alternative(
        "Mod, 8×128×768",
        "the quotient truncated",
        "",
        "C = Mod<fmod = 1>(A, B)  d = Div(A, B)  s = Sign(d)  a = Abs(d)  f = Floor(a)  q = Mul(s, f)  p = Mul(C_grad, q)  "
        "B_grad = Neg(p)  A_grad = Identity(C_grad)",
        "wrong where the rounded quotient reaches the next integer, and where B is infinite",
    ),
    Alternative(
        "Sum, 8×128×768, three",
        "one node that copies three times",
        "int64[3] ones = {1, 1, 1}, int64[1] zero = {0}, int64 three = {3}, float[3] each = {1, 1, 1}",
        "sum = Sum(data_0_0, data_0_1, data_0_2)  u = Unsqueeze(sum_grad, zero)  c = Concat<axis = 0>(u, u, u)  "
        "x, y, z = Split<axis = 0>(c, ones)  data_0_0_grad = Squeeze(x, zero)  data_0_1_grad = Squeeze(y, zero)  "
        "data_0_2_grad = Squeeze(z, zero)",
        "slower; torch returns the cotangent itself three times",
    ),
    Alternative(
        "LayerNormalization, 8×512×768",
        "means by ReduceMean",
        "float[768] ones_ = {ONES}, int64[1] last = {-1}, int64[2] rows = {0, 1}",
        "Y, mean, inv = LayerNormalization<axis = AXIS, epsilon = EPS>(X, Scale, B)  c = Sub(X, mean)  h = Mul(c, inv)  "
        "g = Mul(Y_grad, Scale)  gm = ReduceMean<keepdims = 1>(g, last)  gh = Mul(g, h)  "
        "ghm = ReduceMean<keepdims = 1>(gh, last)  t = Mul(h, ghm)  d = Sub(g, gm)  e = Sub(d, t)  X_grad = Mul(e, inv)  "
        "ds = Mul(Y_grad, h)  "
        "Scale_grad = ReduceSum<keepdims = 0>(ds, rows)  B_grad = ReduceSum<keepdims = 0>(Y_grad, rows)",
        "slower",
    ),
    Alternative(
        "LayerNormalization, 8×512×768",
        "64 rows at a time in a Scan",
        "float[768] zeros = {ZEROS}, float[768, 1] mean_of = {MEAN}, int64[3] tiles = {64, 64, 768}, "
        "int64[3] each = {64, 64, 1}, int64[3] back = {8, 512, 768}, int64[1] first = {0}",
        "Y, mean, inv = LayerNormalization<axis = AXIS, epsilon = EPS>(X, Scale, B)  x = Reshape(X, tiles)  "
        "d = Reshape(Y_grad, tiles)  m = Reshape(mean, each)  i = Reshape(inv, each)  Scale_grad, B_grad, dx = Scan<"
        "num_scan_inputs = 4, body = rows (float[768] s, float[768] b, float[64, 768] xt, float[64, 768] dt, float[64, 1] mt, "
        "float[64, 1] it) => (float[768] s2, float[768] b2, float[64, 768] dxt) {c = Sub(xt, mt)  h = Mul(c, it)  "
        "ds = Mul(dt, h)  s1 = ReduceSum<keepdims = 0>(ds, first)  s2 = Add(s, s1)  b1 = ReduceSum<keepdims = 0>(dt, first)  "
        "b2 = Add(b, b1)  g = Mul(dt, Scale)  gm = MatMul(g, mean_of)  gh = Mul(g, h)  ghm = MatMul(gh, mean_of)  "
        "t = Mul(h, ghm)  u = Sub(g, gm)  e = Sub(u, t)  dxt = Mul(e, it)}>(zeros, zeros, x, d, m, i)  "
        "X_grad = Reshape(dx, back)",
        "no faster, and a Scan keeps a gradient off a GPU's graph",
    ),
    Alternative(
        "Slice, 8×512×768, every second row",
        "rows of the cotangent and of zeros, taken by Gather",
        "int64[1] starts = {0}, int64[1] ends = {512}, int64[1] axes = {1}, int64[1] steps = {2}, "
        "int64[6] row = {0, 0, 0, 0, 1, 0}, int64[512] places = {PLACES}",
        "output = Slice(data, starts, ends, axes, steps)  p = Pad(output_grad, row)  data_grad = Gather<axis = 1>(p, places)",
        "faster only where the gradient is a result: elsewhere the Reshape behind the Pad copies nothing",
    ),
    Alternative(
        "GroupNormalization, 8 groups, 8×64×56×56",
        "means by ReduceMean",
        "int64[3] groups = {8, 8, 25088}, int64[4] parts = {8, 8, 8, 3136}, int64[4] back = {8, 64, 56, 56}, "
        "int64[1] last = {-1}, int64[2] over = {0, 3}, int64[2] within = {2, 3}, int64[4] one = {1, 8, 8, 1}, "
        "int64[1] flat = {-1}, float epsilon = {0.00001}",
        "Y = GroupNormalization<num_groups = 8>(X, scale, bias)  x = Reshape(X, groups)  "
        "mean = ReduceMean<keepdims = 1>(x, last)  c = Sub(x, mean)  q = Mul(c, c)  v = ReduceMean<keepdims = 1>(q, last)  "
        "w = Add(v, epsilon)  s = Sqrt(w)  h = Div(c, s)  dy = Reshape(Y_grad, parts)  hat = Reshape(h, parts)  "
        "weight = Reshape(scale, one)  g = Mul(dy, weight)  gh = Mul(g, hat)  a = ReduceMean<keepdims = 1>(g, within)  "
        "b = ReduceMean<keepdims = 1>(gh, within)  t = Mul(hat, b)  d = Sub(g, a)  e = Sub(d, t)  f = Reshape(e, groups)  "
        "dx = Div(f, s)  X_grad = Reshape(dx, back)  p = Mul(dy, hat)  m = ReduceSum<keepdims = 0>(p, over)  "
        "scale_grad = Reshape(m, flat)  n = ReduceSum<keepdims = 0>(dy, over)  bias_grad = Reshape(n, flat)",
        "slower",
    ),
    Alternative(
        "Softmax, 8×21×64×64, axis 1",
        "forward along the last axis, between exchanges",
        "int64[1] one = {1}",
        "t = Transpose<perm = [0, 2, 3, 1]>(input)  s = Softmax<axis = -1>(t)  output = Transpose<perm = [0, 3, 1, 2]>(s)  "
        "m = Mul(output_grad, output)  r = ReduceSum<keepdims = 1>(m, one)  d = Sub(output_grad, r)  "
        "input_grad = Mul(output, d)",
        FORWARD,
    ),
    Alternative(
        "ReduceProd, 8×128×768, last axis",
        "the product over each element",
        "int64[1] axes = {-1}",
        "reduced = ReduceProd<keepdims = 0>(data, axes)  k = ReduceProd<keepdims = 1>(data, axes)  "
        "g = Unsqueeze(reduced_grad, axes)  p = Mul(g, k)  data_grad = Div(p, data)",
        "NaN where an element is 0, which only the run tells",
    ),
    Alternative(
        "DFT, 32×512, real",
        "the inverse transform, times its length",
        "int64 axis = {1}, float n = {512}, int64[6] cut = {0, 0, 0, 0, 0, -1}",
        "output = DFT(input, , axis)  i = DFT<inverse = 1>(output_grad, , axis)  s = Mul(i, n)  input_grad = Pad(s, cut)",
        "the division by its length loses small numbers in float16",
    ),
    Alternative(
        "DFT, 32×256, complex",
        "the inverse transform, times its length",
        "int64 axis = {1}, float n = {256}",
        "output = DFT(input, , axis)  i = DFT<inverse = 1>(output_grad, , axis)  input_grad = Mul(i, n)",
        "the division by its length loses small numbers in float16",
    ),
]
WITHOUT = {  # rows that lose and have no other form
    "Dropout, 8×128×768, not in training": VIEW,
    "Reshape, 8×128×768 to heads": VIEW,
    "Flatten, 8×64×56×56": VIEW,
    "Squeeze, 8×1×128×768": VIEW,
    "Unsqueeze, 8×128×768": VIEW,
    "GridSample, 4×32×32×32": "the gradient by the grid needs all four neighbours of every point, and ONNX has no such kernel",
    "Det, 64×8×8": "ONNX has neither a factorization nor an inverse: the cofactors are determinants, each of O(n³)",
}


def written(alternative: Alternative, made: Any, attributes: dict[str, Any]) -> Any:
    """The alternative as a model with the inputs and outputs of what refgrad made."""
    constants = {tensor.name for tensor in made.graph.initializer}
    inputs = ", ".join(typed(value) for value in made.graph.input if value.name not in constants)
    outputs = ", ".join(typed(value) for value in made.graph.output)
    text = (
        f'<ir_version: 10, opset_import: ["": {made.opset_import[0].version}]>\n'
        f"agraph ({inputs}) => ({outputs}) <{alternative.constants}> {{ {alternative.nodes} }}"
    )
    for name, number in (("ONES", "1"), ("ZEROS", "0"), ("MEAN", str(1 / 768))):
        text = text.replace(name, ", ".join([number] * 768))
    text = text.replace("PLACES", ", ".join(f"{k}, 256" for k in range(256)))
    text = text.replace("AXIS", str(attributes.get("axis", -1)))
    return onnx.parser.parse_model(text.replace("EPS", str(attributes.get("epsilon", 1e-5))).replace("<>", ""))


def typed(value: Any) -> str:
    """A value as ONNX's text declares it."""
    kind = value.type.tensor_type
    dims = ", ".join(str(dim.dim_value) for dim in kind.shape.dim)
    name = onnx.helper.tensor_dtype_to_string(kind.elem_type).partition(".")[2].lower()
    return f"{name}[{dims}] {value.name}" if dims else f"{name} {value.name}"


def call(model: Any, feeds: dict[str, np.ndarray]) -> Callable[[], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = THREADS, 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    taken = {value.name for value in session.get_inputs()}
    fed = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items() if name in taken}
    names = sorted(value.name for value in session.get_outputs())
    return lambda: dict(zip(names, session.run_with_ort_values(names, fed), strict=True))


def measure(alternative: Alternative) -> dict[str, Any]:
    [row] = [row for row in ROWS if row.label == alternative.row]
    made, feeds = gradient_of(row, "onnx")
    assert made.opset_import[0].version == opset(row.op_type)
    other = call(written(alternative, made, row.attributes), feeds)
    ours = call(made, feeds)
    error = 0.0
    for name, value in other().items():
        expected = ours()[name].numpy()
        error = max(error, float(np.abs(value.numpy() - expected).max() / np.abs(expected).max()))
    seconds = alternate(other, ours, ROUNDS)
    return {
        "row": alternative.row,
        "alternative": alternative.name,
        "ms": round(1e3 * seconds[0], 3),
        "refgrad's ms": round(1e3 * seconds[1], 3),
        "of refgrad's": round(seconds[2], 2),
        "differs by": f"{error:.0e}",
        "why not": alternative.why_not,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", help="rows, such as 'DFT*'")
    patterns = parser.parse_args().patterns
    chosen = [a for a in ALTERNATIVES if not patterns or any(fnmatchcase(a.row, p) for p in patterns)]
    found = [measure(alternative) for alternative in chosen]
    if patterns:
        for row in found:
            print(row)
        return
    save("operators_alternatives", [*found, *({"row": row, "why not": why} for row, why in WITHOUT.items())])
    table = json.loads((RESULTS / "operators.json").read_text())
    losing = {row["row"] for row in table if row["ratio"] > LOSING}
    if missing := losing - {row["row"] for row in found} - set(WITHOUT):
        print(f"Without an alternative: {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
