"""The cotangents of the weights of Loop and Scan are products over the stacked steps; they agree with differences."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import onnx.parser
import pytest

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from tests.helpers.checking import assert_gradient, assert_second_derivative

STEPS = 4
PRODUCTS: dict[str, tuple[str, str, dict[str, tuple[int, ...]], str]] = {
    # a step: the shape of a slice and of its result, the nodes from slice x to z, the weights, those left in the backward node
    "rows by a matrix": ("2,5", "z = MatMul(x, W)", {"W": (5, 3)}, ""),
    "a vector by a matrix": ("5", "z = MatMul(x, W)", {"W": (5, 3)}, ""),
    "a batch by a matrix": ("2,2,5", "z = MatMul(x, W)", {"W": (5, 3)}, ""),
    "a matrix by a vector": ("5", "z = MatMul(W, x)", {"W": (3, 5)}, ""),
    "a matrix by columns": ("5,2", "z = MatMul(W, x)", {"W": (3, 5)}, ""),
    "a matrix by a batch of columns": ("2,5,2", "z = MatMul(W, x)", {"W": (3, 5)}, ""),
    "a bias": ("2,5", "p = MatMul(x, W) z = Add(b, p)", {"W": (5, 3), "b": (3,)}, ""),
    "a bias of rank 2": ("2,5", "p = MatMul(x, W) z = Add(p, b)", {"W": (5, 3), "b": (1, 3)}, ""),
    "a bias per row": ("2,5", "p = MatMul(x, W) z = Add(p, b)", {"W": (5, 3), "b": (2, 1)}, "b"),
    "a scalar bias": ("2,5", "p = MatMul(x, W) z = Add(p, b)", {"W": (5, 3), "b": ()}, "b"),
    "a bias of a matrix by columns": ("5,3", "p = MatMul(W, x) z = Add(p, b)", {"W": (3, 5), "b": (3,)}, ""),
    "two products in a sum": (
        "2,5",
        "p = MatMul(x, W) q = MatMul(x, V) r = Add(p, q) s = Add(r, b) z = Add(s, c)",
        {"W": (5, 3), "V": (5, 3), "b": (3,), "c": (1, 3)},
        "",
    ),
    "a sum that is read twice": (
        "2,5",
        "p = MatMul(x, W) s = Add(p, b) t = Tanh(p) z = Mul(s, t)",
        {"W": (5, 3), "b": (3,)},
        "b",
    ),
    "a sum that is broadcast": (
        "1,5",
        "p = MatMul(x, W) s = Add(p, b) z = Tanh(s)",
        {"W": (5, 3), "b": (2, 3)},
        "b",
    ),
    "Gemm": ("2,5", "z = Gemm(x, W, b)", {"W": (5, 3), "b": (3,)}, ""),
    "Gemm with factors": (
        "2,5",
        "z = Gemm<alpha = 0.5, beta = -1.5>(x, W, b)",
        {"W": (5, 3), "b": (1, 3)},
        "",
    ),
    "Gemm without a bias": ("2,5", "z = Gemm<transB = 1>(x, W)", {"W": (3, 5)}, ""),
    "Gemm with beta 0": ("2,5", "z = Gemm<beta = 0.0>(x, W, b)", {"W": (5, 3), "b": (3,)}, ""),
    "Gemm of a scalar": ("2,5", "z = Gemm(x, W, b)", {"W": (5, 3), "b": ()}, "b"),
    "Gemm, x transposed": ("5,2", "z = Gemm<transA = 1>(x, W, b)", {"W": (5, 3), "b": (3,)}, ""),
    "Gemm, both transposed": ("5,2", "z = Gemm<transA = 1, transB = 1>(x, W, b)", {"W": (3, 5), "b": (3,)}, ""),
    "Gemm, W on the left": ("5,3", "z = Gemm(W, x, b)", {"W": (2, 5), "b": (3,)}, ""),
    "Gemm, W on the left and transposed": ("5,3", "z = Gemm<transA = 1>(W, x)", {"W": (5, 2)}, ""),
    "Gemm, W on the left, x transposed": ("3,5", "z = Gemm<transB = 1, alpha = 2.0>(W, x)", {"W": (2, 5)}, ""),
    "Gemm, W on the left, both transposed": ("3,5", "z = Gemm<transA = 1, transB = 1>(W, x)", {"W": (5, 2)}, ""),
    "a transposed weight": ("2,5", "V = Transpose<perm = [1, 0]>(W) z = MatMul(x, V)", {"W": (3, 5)}, ""),
    "a weight transposed by default, on the left": ("5,2", "V = Transpose(W) z = MatMul(V, x)", {"W": (5, 3)}, ""),
    "a weight transposed three times": (
        "2,5",
        "V = Transpose(W) U = Transpose(V) I = Identity(U) T = Transpose(I) z = MatMul(x, T)",
        {"W": (3, 5)},
        "",
    ),
    "one weight in two products": (
        "2,3",
        "p = MatMul(x, W) t = Tanh(p) z = Gemm<transB = 1>(t, W)",
        {"W": (3, 3)},
        "",
    ),
    "one weight in a product and in a sum": ("3,3", "p = MatMul(x, W) z = Add(p, W)", {"W": (3, 3)}, "W"),
    "one weight in a product and elsewhere": (
        "2,3",
        "p = MatMul(x, W) d = Tanh(W) e = MatMul(p, d) z = Tanh(e)",
        {"W": (3, 3)},
        "W",
    ),
    "a product of weights": ("2,3", "p = MatMul(W, V) z = MatMul(x, p)", {"W": (3, 3), "V": (3, 3)}, "W V"),
    "one layer behind another": (
        "2,5",
        "p = MatMul(x, W) s = Add(p, b) t = Tanh(s) q = MatMul(t, V) z = Add(q, c)",
        {"W": (5, 4), "b": (4,), "V": (4, 3), "c": (3,)},
        "",
    ),
    "a slice of no rows": ("0,5", "z = MatMul(x, W)", {"W": (5, 3)}, ""),
    "a weight of no rows": ("2,0", "z = MatMul(x, W)", {"W": (0, 3)}, "W"),
}


def runs_products_of_nothing() -> bool:
    """False for ONNX Runtime before 1.20: it refuses a Gemm over no rows, and its MatMul returns what is in memory."""
    try:
        import onnxruntime
    except ImportError:
        return False
    return tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 20)


def typed(kind: str, shape: tuple[int, ...]) -> str:
    """The type of a tensor in ONNX's text format, where a scalar has no brackets."""
    return f"{kind}[{','.join(map(str, shape))}]" if shape else kind


def model_of(
    name: str,
    operator: str,
    *,
    longest: int = STEPS,
    axis: int = 0,
    backward: int = 0,
    kind: str = "float",
    carried: bool = False,
) -> onnx.ModelProto:
    """A Loop or a Scan over slices of X, whose state becomes (1 + state)·tanh(Σ tanh(z)); x is a slice times (1 + state)."""
    sizes, nodes, weights, _ = PRODUCTS[name]
    dims = [int(size) for size in sizes.split(",")]
    whole = ",".join(map(str, [*dims[:axis], longest, *dims[axis:]]))
    declared = ", ".join(f"{typed(kind, shape)} {w}" for w, shape in weights.items())
    tail = (
        "squashed = Tanh(z) total = ReduceSum<keepdims = 0>(squashed) n = Tanh(total) "
        "by_state = Mul(n, state) state_new = Add(by_state, n)"
    )
    head = "scaled = Mul(part, state) x = Add(scaled, part)"
    states = {"state": "start", **({f"{w}_in": w for w in weights} if carried else {})}
    formals = ", ".join(f"{typed(kind, weights.get(n[:-3], ()))} {n}" for n in states)
    if carried:
        head += " " + " ".join(f"{w}_c = Identity({w}_in)" for w in weights)
        nodes = " ".join(nodes.replace(f"{w})", f"{w}_in)").replace(f"{w},", f"{w}_in,") for w in ["W"])
    results = [f"{kind} state_new", *(f"{typed(kind, weights[w])} {w}_c" for w in weights if carried)]
    outer = ", ".join(["y", *(f"{w}_end" for w in weights if carried)])
    if operator == "Scan":
        body = (
            f"b ({formals}, {kind}[{sizes}] part) => ({', '.join(results)}, {kind} res) "
            f"{{ {head} {nodes} {tail} res = Tanh(n) }}"
        )
        main = (
            f"{outer}, ys = Scan<num_scan_inputs = 1, scan_input_axes = [{axis}], scan_input_directions = [{backward}], "
            f"body = {body}>({', '.join(states.values())}, X)"
        )
    else:
        body = (
            f"b (int64 i, bool on, {formals}) => (bool go, {', '.join(results)}, {kind} res) "
            f"{{ go = Identity(on) part = Gather<axis = {axis}>(X, i) {head} {nodes} {tail} res = Tanh(n) }}"
        )
        main = f'{outer}, ys = Loop(M, "", {", ".join(states.values())})<body = {body}>'
    text = (
        f'<ir_version: 10, opset_import: ["": 21]> g ({kind}[{whole}] X, {kind} start, int64 M, {declared}) => '
        f"({kind} y, {kind}[T] ys) {{ {main} }}"
    )
    return onnx.parser.parse_model(text)


def case_of(name: str, operator: str, steps: int = STEPS, longest: int = STEPS, **options) -> Case:
    model = model_of(name, operator, longest=longest, **options)
    rng = np.random.default_rng(3)
    dtype = np.dtype({"float": "f4", "double": "f8", "float16": "f2"}[options.get("kind", "float")])
    feeds = {}
    for value in model.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = np.asarray(rng.normal(size=shape) * 0.5, dtype)
    feeds["M"] = np.array(steps)
    weights = PRODUCTS[name][2]
    return Case(f"{operator}, {name}", model, feeds, ("X", "start", *weights))


def backward_body(gradient: onnx.ModelProto) -> onnx.GraphProto:
    """The body of the last loop of a gradient."""
    [*_, last] = [node for node in gradient.graph.node if node.op_type in ("Loop", "Scan")]
    return next(a.g for a in last.attribute if a.name == "body")


@pytest.mark.parametrize("operator", ["Loop", "Scan"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_weights_of_a_loop_agree_with_differences(name: str, operator: str) -> None:
    case = case_of(name, operator)
    assert_gradient(case, runtime="no rows" not in name or runs_products_of_nothing())
    left = PRODUCTS[name][3].split()
    summed = {value.name.removesuffix("_grad_before") for value in backward_body(refgrad.gradient(case.model)).input}
    assert summed & PRODUCTS[name][2].keys() == set(left)


@pytest.mark.parametrize("operator", ["Loop", "Scan"])
@pytest.mark.parametrize("name", ["a bias", "a matrix by columns", "Gemm, x transposed", "one layer behind another"])
def test_slices_along_other_axes_in_either_direction(name: str, operator: str) -> None:
    for backward in (0, 1) if operator == "Scan" else (0,):
        assert_gradient(case_of(name, operator, axis=1, backward=backward))


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("name", ["a bias", "a matrix by columns", "one layer behind another"])
def test_a_loop_that_reads_fewer_slices_than_there_are(name: str, steps: int) -> None:
    assert_gradient(case_of(name, "Loop", steps=steps), runtime=steps > 0 or runs_products_of_nothing())


@pytest.mark.parametrize("operator", ["Loop", "Scan"])
@pytest.mark.parametrize("name", ["a bias", "one layer behind another"])
def test_a_loop_without_steps(name: str, operator: str) -> None:
    assert_gradient(case_of(name, operator, steps=0, longest=0), runtime=runs_products_of_nothing())


@pytest.mark.parametrize("operator", ["Loop", "Scan"])
@pytest.mark.parametrize("name", ["a bias", "rows by a matrix", "Gemm with factors"])
def test_a_weight_that_is_carried_as_a_state(name: str, operator: str) -> None:
    case = case_of(name, operator, carried=True)
    assert_gradient(case)
    body = backward_body(refgrad.gradient(case.model, ["W"]))
    assert len([node for node in body.node if node.op_type == "Gemm"]) == 1  # the cotangent of x


@pytest.mark.parametrize("kind", ["double", "float16"])
def test_other_element_types(kind: str) -> None:
    assert_gradient(case_of("one layer behind another", "Scan", kind=kind))
    assert_gradient(case_of("Gemm, W on the left", "Loop", kind=kind))


@pytest.mark.parametrize("operator", ["Loop", "Scan"])
@pytest.mark.parametrize("name", ["a bias", "a matrix by columns", "one weight in two products"])
def test_the_second_derivative(name: str, operator: str) -> None:
    assert_second_derivative(case_of(name, operator))


@pytest.mark.parametrize(
    ("operator", "options"),
    [
        *product(["Loop", "Scan"], [{"recompute": True}, {"strong_zero": True}, {"dialect": "ort"}]),
        ("Scan", {"memory": "1 MiB for T=4"}),  # of the Loop the number of steps is fed, so no memory can be predicted
    ],
)
def test_options_of_the_gradient_change_no_value(operator: str, options: dict[str, object]) -> None:
    case = case_of("one layer behind another", operator)
    rng = np.random.default_rng(4)
    feeds = {**case.feeds, "y_grad": np.float32(0.7), "ys_grad": rng.normal(size=STEPS).astype("f4")}
    plain, other = (refgrad.gradient(case.model, case.wrt, **how) for how in ({}, options))
    expected = get_backend("numpy").prepare(plain).run(feeds)
    for name, value in get_backend("numpy").prepare(other).run(feeds).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)


def test_a_recomputed_loop_stacks_no_cotangents() -> None:
    """With `recompute` a loop stores its states alone, so the products stay in the steps."""
    case = case_of("rows by a matrix", "Scan")
    body = backward_body(refgrad.gradient(case.model, case.wrt, recompute=True))
    assert "W_grad_before" in {value.name for value in body.input}


def test_a_loop_that_its_condition_ends() -> None:
    """The number of steps is known only when the model runs; sizes have names."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[T,N,2] X, float[N,3] h, float[2,3] W, float[3,3] R, float[3] b)
        => (float[N,3] y, float[K,N,3] ys) {
          on = Constant<value = bool {1}>() M = Constant<value = int64 {9}>()
          y, ys = Loop(M, on, h)<body = step (int64 i, bool go, float[N,3] s) => (bool more, float[N,3] t, float[N,3] r) {
            x = Gather<axis = 0>(X, i) p = MatMul(x, W) q = MatMul(s, R) z = Add(p, q) a = Add(z, b) t = Tanh(a) r = Tanh(t)
            last = Constant<value = int64 {2}>() more = Less(i, last)
          }>
        }"""
    )
    rng = np.random.default_rng(5)
    for count in (1, 2):
        shapes = {"X": (5, count, 2), "h": (count, 3), "W": (2, 3), "R": (3, 3), "b": (3,)}
        feeds = {name: rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}
        assert_gradient(Case("a condition", model, feeds, tuple(shapes)))


HEAD = '<ir_version: 10, opset_import: ["": 21]> g '
SCAN_SUM = (
    "q = Scan<num_scan_inputs = 1, body = p (float[2] xj) => (float[2] r) "
    "{ k = MatMul(xj, w) k1 = Add(k, b) r = Tanh(k1) }>"
)
READ_TWICE = {
    # the same value as weight and as C, or as the other factor; the scanned tensor as weight; a state that a Scan within reads
    "Gemm(a, w, w)": (
        '(float[2,2] s, float[2,2] w, int64 n) => (float[2,2] y) { y = Loop(n, "", s)<body = q (int64 i, bool c, float[2,2] a) '
        "=> (bool d, float[2,2] e) { d = Identity(c) g = Gemm(a, w, w) e = Tanh(g) }> }"
    ),
    "Gemm(w, a, w)": (
        '(float[2,2] s, float[2,2] w, int64 n) => (float[2,2] y) { y = Loop(n, "", s)<body = q (int64 i, bool c, float[2,2] a) '
        "=> (bool d, float[2,2] e) { d = Identity(c) g = Gemm<transA = 1>(w, a, w) e = Tanh(g) }> }"
    ),
    "Gemm with a row as weight and C": (
        "(float[3,3,1] x, float[1,2] w) => (float[3,3,2] y) { y = Scan<num_scan_inputs = 1, body = q (float[3,1] a) => "
        "(float[3,2] e) { g = Gemm(a, w, w) e = Tanh(g) }>(x) }"
    ),
    "the scanned tensor is the weight": (
        "(float[3,2] x) => (float[3,3] y) { y = Scan<num_scan_inputs = 1, body = q (float[2] xi) => (float[3] r) "
        "{ xt = Transpose(x) r = MatMul(xi, xt) }>(x) }"
    ),
    "a Scan in a Loop": (
        '(float[3,2] s, float[2,2] w, float[2] b, int64 n) => (float[3,2] y) { y = Loop(n, "", s)<body = o (int64 i, bool c, '
        f"float[3,2] a) => (bool d, float[3,2] e) {{ d = Identity(c) {SCAN_SUM}(a) t = MatMul(a, w) "
        "u = Add(t, q) e = Tanh(u) }> }"
    ),
    "a Scan over a computed value in a Loop": (
        '(float[3,2] s, float[2,2] w, float[2] b, int64 n) => (float[3,2] y) { y = Loop(n, "", s)<body = o (int64 i, bool c, '
        f"float[3,2] a) => (bool d, float[3,2] e) {{ d = Identity(c) v = Sin(a) {SCAN_SUM}(v) m = Mul(q, v) e = Tanh(m) }}> }}"
    ),
    "a size that a body names": (
        "(float[3,A,2] x, float[size_xi_0,2] f, float[2,2] w) => (float[3,B,2] z, float[3,A,2] y) { z = Mul(x, f) "
        "y = Scan<num_scan_inputs = 1, body = q (float[C,2] xi) => (float[C,2] r) { r = MatMul(xi, w) }>(x) }"
    ),
    "a state's size that a body names": (
        '(float[A,2] s, float[size_a_0,2] f, int64 n) => (float[A,2] y) { y = Loop(n, "", s)<body = q (int64 i, bool c, '
        "float[?,2] a) => (bool d, float[?,2] e) { d = Identity(c) t = Mul(a, f) zero = Constant<value_ints = [0]>() "
        "u = ReduceSum<keepdims = 1>(t, zero) e = Tanh(u) }> }"
    ),
}


@pytest.mark.parametrize("name", READ_TWICE)
def test_values_that_are_read_in_two_ways(name: str) -> None:
    model = onnx.parser.parse_model(HEAD + READ_TWICE[name])
    rng = np.random.default_rng(6)
    sizes = {"A": 1, "size_xi_0": 4, "size_a_0": 4}
    feeds = {}
    for value in model.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = np.asarray(rng.normal(size=shape) * 0.5, np.float32)
    feeds |= {"n": np.array(3)} if "n" in feeds else {}
    wrt = tuple(name for name in feeds if name != "n")
    assert_gradient(Case(name, model, feeds, wrt))


def test_a_scanned_tensor_keeps_its_shape() -> None:
    """Its gradient outside of the Scan is summed along the axes that are known, not at run time."""
    model = onnx.parser.parse_model(
        HEAD + "(float[3,1,2] x, float[3,4,2] f, float[2,2] w) => (float[3,4,2] z, float[3,1,2] y) { z = Mul(x, f) "
        "y = Scan<num_scan_inputs = 1, body = q (float[1,2] xi) => (float[1,2] r) { r = MatMul(xi, w) }>(x) }"
    )
    assert not {"Equal", "NonZero"} & {node.op_type for node in refgrad.gradient(model).graph.node}
