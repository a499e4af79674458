"""The option `strong_zero`: what a cotangent of 0 is multiplied by does not count, and all derivatives that exist survive."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import refgrad
from refgrad.backends import get_backend
from refgrad.cli import main
from refgrad.conformance import nonfinite
from refgrad.errors import OptionError
from refgrad.reverse.assembly import names_in

INF, NAN = np.inf, np.nan
BACKENDS = "numpy", "ort-cpu"


def model(graph: str, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {graph}')


def run(made: onnx.ModelProto, feeds: dict[str, Any], backend: str) -> dict[str, np.ndarray]:
    onnx.checker.check_model(made, full_check=True)
    read = {value.name for value in made.graph.input}
    return get_backend(backend).prepare(made).run({name: v for name, v in feeds.items() if name in read})


def expected(plain: onnx.ModelProto, feeds: dict[str, np.ndarray], planted: str, result: str, seed: str) -> np.ndarray:
    """The gradient of an operator that is linear in `planted`, summed over the cotangents that are not 0 alone.

    A gradient is linear in its cotangent and here in `planted`: what one element of `planted` adds to it is the gradient for
    a `planted` that is 1 there and 0 elsewhere, and it meets the cotangent if that of absolute values is not 0.
    """

    def at(value: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
        return run(plain, {**feeds, planted: value, seed: cotangent}, "numpy")[result]

    whole, cotangent = feeds[planted], feeds[seed]
    found = at(np.where(np.isfinite(whole), whole, 0), cotangent)
    added = np.zeros_like(found)
    for place in np.argwhere(~np.isfinite(whole)):
        one = np.zeros_like(whole)
        one[tuple(place)] = 1
        signed = [at(one, np.where(cotangent * sign > 0, cotangent, 0)) for sign in (1, -1)]
        for part in signed:
            with np.errstate(invalid="ignore"):
                added = np.where(part != 0, added + part * whole[tuple(place)], added)
    return found + added


LINEAR = {
    "Mul": ("(float[3,4] x, float[3,4] w) => (float[3,4] y) { y = Mul(x, w) }", (3, 4)),
    "Mul broadcast": ("(float[3,4] x, float[4] w) => (float[3,4] y) { y = Mul(x, w) }", (3, 4)),
    "MatMul": ("(float[3,4] x, float[4,5] w) => (float[3,5] y) { y = MatMul(x, w) }", (3, 5)),
    "MatMul on the left": ("(float[4,5] x, float[3,4] w) => (float[3,5] y) { y = MatMul(w, x) }", (3, 5)),
    "MatMul in batches": ("(float[2,3,4] x, float[4,5] w) => (float[2,3,5] y) { y = MatMul(x, w) }", (2, 3, 5)),
    "MatMul of vectors": ("(float[4] x, float[4] w) => (float y) { y = MatMul(x, w) }", ()),
    "Gemm": (
        "(float[4,3] x, float[5,4] w, float[5] b) => (float[3,5] y) "
        "{ y = Gemm<alpha = -0.5, beta = 2., transA = 1, transB = 1>(x, w, b) }",
        (3, 5),
    ),
    "Conv": (
        "(float[1,2,6] x, float[4,1,3] w) => (float[1,4,4] y) { y = Conv<group = 2, pads = [1, 1], dilations = [2]>(x, w) }",
        (1, 4, 4),
    ),
    "ConvTranspose": (
        "(float[1,2,3] x, float[2,2,3] w) => (float[1,2,7] y) { y = ConvTranspose<strides = [2]>(x, w) }",
        (1, 2, 7),
    ),
    "Einsum": (
        '(float[3,4] x, float[4,5] w) => (float[5,3] y) { y = Einsum<equation = "ij,jk->ki">(x, w) }',
        (5, 3),
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LINEAR)
def test_a_product_with_a_cotangent_of_zero_is_no_summand(name: str, backend: str) -> None:
    graph, shape = LINEAR[name]
    source = model(graph)
    plain = refgrad.gradient(source, ["x"], ["y"])
    strong = refgrad.gradient(source, ["x"], ["y"], strong_zero=True)
    sizes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in source.graph.input}
    rng = np.random.default_rng(0)
    for _ in range(20):
        feeds = {key: np.round(rng.normal(size=size), 2).astype(np.float32) for key, size in sizes.items()}
        w = feeds["w"].reshape(-1)
        places = rng.choice(w.size, rng.integers(1, 4), replace=False)
        w[places] = rng.choice([INF, -INF, NAN], len(places))
        feeds["y_grad"] = (np.round(rng.normal(size=shape), 2) * (rng.random(shape) < 0.4)).astype(np.float32)
        found = run(strong, feeds, backend)["x_grad"]
        np.testing.assert_allclose(found, expected(plain, feeds, "w", "x_grad", "y_grad"), rtol=1e-5, atol=1e-6)


# Guards in a forward graph: the graph, the point, the gradient and the diagonal of the Hessian.
GUARDED: dict[str, tuple[str, list[float], list[float], list[float]]] = {
    "sqrt": (
        "(double[N] x) => (double[N] y) <double zero = {0}> { c = Greater(x, zero) s = Sqrt(x) y = Where(c, s, zero) }",
        [0, -1, 4],
        [0, 0, 0.25],
        [0, 0, -1 / 32],
    ),
    "division": (
        "(double[N] x) => (double[N] y) <double zero = {0}, double one = {1}> "
        "{ c = Equal(x, zero) q = Div(one, x) y = Where(c, zero, q) }",
        [0, 2],
        [0, -0.25],
        [0, 0.25],
    ),
    "log": (
        "(double[N] x) => (double[N] y) <double zero = {0}> "
        "{ c = Greater(x, zero) l = Log(x) p = Mul(x, l) y = Where(c, p, zero) }",
        [0, -3, 1],
        [0, 0, 1],
        [0, 0, 1],
    ),
    "norm": (
        "(double[N] x) => (double[N] y) <double zero = {0}> "
        "{ c = Equal(x, zero) q = Mul(x, x) r = Abs(x) s = Add(q, r) n = Sqrt(s) y = Where(c, zero, n) }",
        [0, 1],
        [0, 3 / (2 * 2**0.5)],
        [0, 1 / 2**0.5 - 9 / (4 * 2**1.5)],
    ),
    "power": (
        "(double[N] x) => (double[N] y) <double zero = {0}, double half = {-0.5}> "
        "{ c = Greater(x, zero) p = Pow(x, half) y = Where(c, p, zero) }",
        [0, -1, 4],
        [0, 0, -1 / 16],
        [0, 0, 3 / 128],
    ),
    "a square of what is 0": (  # the cotangent of the inner square is 0, and its derivative is needed
        "(double[N] x) => (double[N] y) <double four = {4}> { q = Mul(x, x) d = Sub(q, four) y = Mul(d, d) }",
        [2, 1],
        [0, -12],
        [32, -4],
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GUARDED)
def test_a_guard_in_the_model_hides_derivatives_too(name: str, backend: str) -> None:
    graph, x, first, second = GUARDED[name]
    source, feeds = model(graph), {"x": np.array(x, float)}
    ones = np.ones(len(x))
    slope = run(refgrad.gradient(source, ["x"], strong_zero=True), {**feeds, "y_grad": ones}, backend)["x_grad"]
    np.testing.assert_allclose(slope, first, rtol=1e-12)
    filled = refgrad.gradient(source, ["x"], cotangent="ones", strong_zero=True)
    np.testing.assert_array_equal(run(filled, feeds, backend)["x_grad"], slope)
    [moved] = run(refgrad.jvp(source, ["x"], strong_zero=True), {**feeds, "x_tangent": ones}, backend).values()
    np.testing.assert_allclose(moved, first, rtol=1e-12)
    [jacobian] = run(refgrad.jacobian(source, ["x"], strong_zero=True), feeds, backend).values()
    np.testing.assert_allclose(jacobian, np.diag(first), rtol=1e-12)
    [hessian] = run(refgrad.hessian(source, ["x"], strong_zero=True), feeds, backend).values()
    np.testing.assert_allclose(hessian, np.diag(second), rtol=1e-12)
    [product] = run(refgrad.hvp(source, ["x"], strong_zero=True), {**feeds, "x_vector": ones}, backend).values()
    np.testing.assert_allclose(product, second, rtol=1e-12)


def test_an_infinite_slope_stays_where_the_cotangent_is_not_zero() -> None:
    root = model("(double[N] x) => (double[N] y) { y = Sqrt(x) }")
    feeds = {"x": np.array([0.0, -1.0, 0.0]), "y_grad": np.array([2.0, 1.0, 0.0])}
    [slope] = run(refgrad.gradient(root, strong_zero=True), feeds, "numpy").values()
    np.testing.assert_array_equal(slope, [INF, NAN, 0])
    moved = refgrad.jvp(root, strong_zero=True)
    [tangent] = run(moved, {"x": feeds["x"], "x_tangent": feeds["y_grad"]}, "numpy").values()
    np.testing.assert_array_equal(tangent, [INF, NAN, 0])


def test_a_factor_of_zero_within_a_rule_is_no_cotangent_of_zero() -> None:
    """∂(a/b)/∂b is −dy/b·(a/b): at a = b = ∞ the first quotient is 0, and the cotangent is not."""
    quotient = model("(double[N] a, double[N] b) => (double[N] y) { y = Div(a, b) }")
    feeds = {"a": np.array([INF, INF]), "b": np.array([INF, INF]), "y_grad": np.array([1.0, 0.0])}
    found = run(refgrad.gradient(quotient, strong_zero=True), feeds, "numpy")
    np.testing.assert_array_equal(found["b_grad"], [NAN, 0])


BODIES = {
    "If": (
        "(double[N] x, bool c) => (double[N] y) <double zero = {0}> { y = If(c)<then_branch = a () => (double[N] p) "
        "{ g = Greater(x, zero) s = Sqrt(x) p = Where(g, s, zero) }, else_branch = b () => (double[N] q) { q = Exp(x) }> }"
    ),
    "Loop": (
        "(double[N] x, bool c) => (double[N] y) <double zero = {0}, int64 n = {2}> { y = Loop(n, c, x)<body = b (int64 i, "
        "bool a, double[N] h) => (bool d, double[N] k) { d = Identity(a) g = Greater(h, zero) s = Sqrt(h) "
        "k = Where(g, s, zero) }> }"
    ),
    "Scan": (
        "(double[N] x, bool c) => (double[N] y) <double zero = {0}> { s, y = Scan<num_scan_inputs = 1, body = b (double h, "
        "double v) => (double k, double o) { k = Identity(h) g = Greater(v, zero) s = Sqrt(v) "
        "o = Where(g, s, zero) }>(zero, x) }"
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BODIES)
def test_bodies_are_guarded(name: str, backend: str) -> None:
    source = model(BODIES[name])
    feeds = {"x": np.array([0.0, -2.0, 16.0]), "c": np.array(True), "y_grad": np.ones(3)}
    order = 0.25 if name == "Loop" else 0.5  # it takes the root of the root
    slope, bend = order * 16 ** (order - 1), order * (order - 1) * 16 ** (order - 2)
    assert np.isnan(run(refgrad.gradient(source, ["x"]), feeds, backend)["x_grad"]).any()
    found = run(refgrad.gradient(source, ["x"], strong_zero=True), feeds, backend)["x_grad"]
    np.testing.assert_allclose(found, [0, 0, slope], rtol=1e-12)
    [hessian] = run(refgrad.hessian(source, ["x"], strong_zero=True), feeds, backend).values()
    np.testing.assert_allclose(hessian, np.diag([0, 0, bend]), rtol=1e-12)


def test_functions_are_inlined() -> None:
    source = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18, "own": 1]> g (float[N] x) => (float[N] y) { a = own.f(x) y = own.f(a) } '
        '<domain: "own", opset_import: ["": 18]> f (v) => (w) { e = Constant<value_int = 0>() z = CastLike(e, v) '
        "g = Greater(v, z) s = Sqrt(v) w = Where(g, s, z) }"
    )
    made = refgrad.gradient(source, strong_zero=True)
    assert not made.functions
    [found] = run(made, {"x": np.array([0, 16], np.float32), "y_grad": np.ones(2, np.float32)}, "numpy").values()
    np.testing.assert_allclose(found, [0, 1 / 32])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_root_of_a_sum_of_squares_has_slope_zero_at_zero(backend: str) -> None:
    """As torch.std and torch.var(...).sqrt() are exported: the means of squares, times n/(n − 1)."""
    rows = "(double[R,4] x) => (double[R] y) <int64[1] axes = {1}, double n = {4}, double m = {3}> { a = ReduceMean(x, axes) "
    source = model(
        f"{rows} d = Sub(x, a) q = Mul(d, d) v = ReduceMean<keepdims = 0>(q, axes) w = Mul(v, n) u = Div(w, m) y = Sqrt(u) }}"
    )
    x = np.array([[3.0, 3, 3, 3], [1, 2, 3, 6]])
    for graph in (
        source,
        model(
            f"{rows} d = Sub(x, a) two = Constant<value_float = 2.>() q = Pow(d, two) "
            "v = ReduceSum<keepdims = 0>(q, axes) u = Div(v, m) h = Constant<value_float = 0.5>() y = Pow(u, h) }"
        ),
    ):
        found = run(refgrad.gradient(graph, ["x"], strong_zero=True), {"x": x, "y_grad": np.ones(2)}, backend)["x_grad"]
        centred = x[1] - x[1].mean()
        np.testing.assert_allclose(found, [np.zeros(4), centred / (3 * x[1].std(ddof=1))], rtol=1e-12, atol=1e-15)
    [hessian] = run(refgrad.hessian(source, ["x"], strong_zero=True), {"x": x}, backend).values()
    assert np.isfinite(hessian).all()


def test_the_root_of_what_is_no_sum_of_squares_keeps_its_infinite_slope() -> None:
    for inner in ("Mul(x, k)", "Abs(x)", "Sub(q, q)", "Add(q, x)"):
        source = model(f"(double[N] x, double[N] k) => (double[N] y) {{ q = Mul(x, x) s = {inner} y = Sqrt(s) }}")
        feeds = {"x": np.zeros(1), "k": np.ones(1), "y_grad": np.ones(1)}
        assert not np.isfinite(run(refgrad.gradient(source, ["x"], strong_zero=True), feeds, "numpy")["x_grad"]).any()


def test_it_contradicts_the_dialect_of_onnxruntime() -> None:
    source = model("(double[N] x) => (double[N] y) { y = Sqrt(x) }")
    with pytest.raises(OptionError, match="use dialect='onnx'"):
        refgrad.gradient(source, dialect="ort", strong_zero=True)
    with pytest.raises(OptionError, match="strong_zero is True or False, not 'yes'"):
        refgrad.gradient(source, strong_zero="yes")  # type: ignore[arg-type]


def test_finite_constants_and_masks_need_no_guard() -> None:
    source = model("(float[N] x) => (float[N] y) <float two = {2}> { a = Mul(x, two) b = Relu(a) y = Div(b, two) }")
    plain, strong = (refgrad.gradient(source, ["x"], strong_zero=on) for on in (False, True))
    assert [node.op_type for node in strong.graph.node] == [node.op_type for node in plain.graph.node]


UNNAMED = "(float[N] x) => (float[N] y) <float zero = {0}> { c = Greater(x, zero) s = Sqrt(x) y = Where(c, s, zero) }"


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_runs_the_cure(backend: str) -> None:
    found = nonfinite(model(UNNAMED), {"x": np.array([0, -1, 4], np.float32)}, executor=backend)
    [root] = [origin for origin in found.origins if origin.kind == "a dead branch"]
    assert "strong_zero=True" in root.remedy
    assert (
        "With the option, 2 elements that were not finite are finite in x_grad, and the others are the same."
        in found.cure
    )


def test_nan_says_where_the_option_does_not_help() -> None:
    found = nonfinite(model("(float[N] x) => (float[N] y) { y = Sqrt(x) }"), {"x": np.zeros(1, np.float32)})
    assert found.cure.startswith("strong_zero=True (--strong-zero) does not help. With the option, x_grad is as before")


def test_nan_says_what_remains() -> None:
    source = model(UNNAMED.replace("y = Where(c, s, zero)", "t = Where(c, s, zero) o = Sqrt(x) y = Add(t, o)"))
    found = nonfinite(source, {"x": np.array([0, 4], np.float32)})
    assert "does not help" in found.cure  # the other root has an infinite slope
    both = nonfinite(
        model(
            "(float[N] x, float[N] z) => (float[N] y) <float zero = {0}> { c = Greater(x, zero) s = Sqrt(x) "
            "t = Where(c, s, zero) o = Sqrt(z) y = Add(t, o) }"
        ),
        {"x": np.zeros(1, np.float32), "z": np.zeros(1, np.float32)},
    )
    assert "cures a part. With the option, 1 of 2 elements of x_grad, z_grad" in both.cure
    assert "z_grad is still not finite everywhere" in both.cure


def test_nan_looks_at_a_gradient_alone() -> None:
    made = refgrad.gradient(model(UNNAMED), ["x"])
    found = nonfinite(made, {"x": np.zeros(1, np.float32), "y_grad": np.ones(1, np.float32)}, forward=True)
    assert found.results == ("x_grad",)
    assert not found.cure


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "nan_in_a_gradient.md").read_text()
    names: dict[str, Any] = {}
    said = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1]
    for language, block in re.findall(r"```(python|console)\n(.*?)```", page, re.DOTALL):
        capsys.readouterr()
        if language == "python":
            exec(block, names)
            assert capsys.readouterr().out.split() == " ".join(re.findall(r"  # (.*)", block)).split()
            continue
        for line in re.findall(r"^\$ refgrad (.*)", block, re.MULTILINE):
            code = main(shlex.split(line))
            printed = capsys.readouterr().out
            assert code == ("nan" in line.split())
            if code:
                assert all(" ".join(part.split()) in " ".join(printed.split()) for part in said.splitlines())
    assert onnx.load("gradient.onnx").graph.output[0].name == "x_grad"


SINGULAR = {  # unary operators, and where they are not finite or have no finite slope
    "Sqrt": [0, -1, INF],
    "Log": [0, -2, INF],
    "Reciprocal": [0, -0.0],
    "Acos": [1, -1, 2],
    "Atanh": [1, -1, 3],
    "Acosh": [1, 0.5],
    "Exp": [INF, NAN],
    "Tan": [INF],
    "Erf": [NAN],
    "Softplus": [NAN],
}


@pytest.mark.parametrize("seed", range(24))
def test_hidden_elements_count_as_if_they_were_harmless(seed: int) -> None:
    """Random elementwise graphs behind a mask: the same as with other numbers at the elements that it hides."""
    rng = np.random.default_rng(seed)
    operators = [rng.choice(list(SINGULAR)), *rng.choice([name for name in SINGULAR if name != "Acosh"], 2)]
    lines = [f"a{k} = {operator}({'x' if k == 0 else f's{k - 1}'})" for k, operator in enumerate(operators)]
    lines = [
        f"{line} m{k} = Mul(a{k}, a{k}) n{k} = Add(m{k}, q) r{k} = Reciprocal(n{k}) s{k} = Mul(r{k}, half)"
        for k, line in enumerate(lines)
    ]
    source = model(
        "(double[N,3] x, bool[N,3] mask, double[3,4] w) => (double[N,4] y) <double zero = {0}, double q = {0.25}, "
        f"double half = {{0.2}}> {{ {' '.join(lines)} h = Where(mask, s2, zero) p = MatMul(h, w) y = Sin(p) }}"
    )
    mask = rng.random((5, 3)) < 0.6
    harmless = rng.uniform(1.1, 1.9, (5, 3)) if operators[0] == "Acosh" else rng.uniform(0.1, 0.8, (5, 3))
    bad = rng.choice(SINGULAR[operators[0]], (5, 3))
    w = rng.normal(size=(3, 4))
    feeds = {"mask": mask, "w": w}
    masked = np.where(mask, harmless, bad)
    ends = {"y_grad": rng.normal(size=(5, 4))}
    plain, strong = (refgrad.gradient(source, ["x", "w"], strong_zero=on) for on in (False, True))
    expected = run(plain, {**feeds, **ends, "x": harmless}, "numpy")
    found = run(strong, {**feeds, **ends, "x": masked}, "numpy")
    for name, value in expected.items():
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(found[name], value)
    [second] = run(
        refgrad.hvp(source, ["x"], strong_zero=True), {**feeds, "x": masked, "x_vector": np.ones((5, 3))}, "numpy"
    ).values()
    [due] = run(refgrad.hvp(source, ["x"]), {**feeds, "x": harmless, "x_vector": mask * 1.0}, "numpy").values()
    np.testing.assert_array_equal(second, due)


def test_a_cotangent_that_a_rule_casts_keeps_its_type() -> None:
    """Normalizations of 16-bit floats are computed in float32: the cotangent that is compared with 0 has 16 bits."""
    source = model(
        "(float16[2,4] x, float16[4] s) => (float16[2,4] y) { n = LayerNormalization<epsilon = 0.>(x, s) y = Identity(n) }"
    )
    rows = np.array([[1, 2, 3, 5], [2, 2, 2, 2]], np.float16)
    feeds = {"x": rows, "s": np.ones(4, np.float16), "y_grad": np.array([[1, 0, 0, 0], [0, 0, 0, 0]], np.float16)}
    plain, strong = (refgrad.gradient(source, ["x", "s"], strong_zero=on) for on in (False, True))
    before, after = (run(made, feeds, "numpy") for made in (plain, strong))
    np.testing.assert_array_equal(after["x_grad"][0], before["x_grad"][0])
    assert np.isnan(before["x_grad"][1]).all()
    np.testing.assert_array_equal(after["x_grad"][1], 0)
    assert np.isnan(before["s_grad"]).all()
    assert np.isfinite(after["s_grad"]).all()


def test_what_the_guards_read_is_no_weight() -> None:
    """Differentiated again by all that is a weight, a gradient has no more weights than before."""
    source = model("(float[N] x) => (float[N] y) <float[1] w = {2}> { p = Mul(x, w) y = Sqrt(p) }")
    made = refgrad.gradient(source, strong_zero=True)
    again = refgrad.gradient(made, strong_zero=True)
    assert names_in(again)[1].keys() == {"x", "w", "y_grad"}


def test_nan_does_not_call_a_wrong_number_a_cure() -> None:
    """cos √x has the derivative −½ at 0, a limit of 0·∞ that the option takes for 0."""
    source = model("(float[N] x) => (float[N] y) { r = Sqrt(x) y = Cos(r) }")
    found = nonfinite(source, {"x": np.array([0, 4], np.float32)})
    assert "does not cure it" in found.cure
    assert "the difference quotient is" in found.cure
