"""The recipes against NumPy's indexing, float64 differences, closed forms and torch.autograd."""

from __future__ import annotations

import doctest
import json
import re
import shlex
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

import refgrad
from refgrad import recipes
from refgrad.backends import available, get_backend
from refgrad.cli import main
from refgrad.errors import InvalidModelError, NoGradientError, OptionError, UnknownNameError
from refgrad.reverse.assembly import names_in

pytestmark = pytest.mark.interpreter

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
TYPES = {"float": np.float32, "double": np.float64, "float16": np.float16}
ERROR = {"float": 1e-5, "double": 1e-10, "float16": 1e-2}  # relative to the largest element

NET = """<ir_version: 10, opset_import: ["" : {opset}]>
net ({kind}[{shape}] image) => ({kind}[{rows}, 5] logits) {{
    c = MatMul(image, w)
    t = Tanh(c)
    f = Flatten(t)
    logits = Gemm <transB = 1> (f, v, b)
}}"""


def parsed(text, **initializers):
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in initializers.items())
    return model


def weights(kind="double"):
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 4), "v": (5, 48), "b": (5,)}
    return {name: (rng.normal(size=shape) * 0.3).astype(TYPES[kind]) for name, shape in shapes.items()}


def net(kind="double", opset=21, shape="N, 3, 4, 4", rows="N"):
    return parsed(NET.format(kind=kind, opset=opset, shape=shape, rows=rows), **weights(kind))


def image(kind="double", batch=2):
    return np.random.default_rng(1).normal(size=(batch, 3, 4, 4)).astype(TYPES[kind])


def run(model, feeds, backend="numpy"):
    onnx.checker.check_model(model, full_check=True)
    return get_backend(backend).prepare(model).run(feeds)


def logits(x, **given):
    """What the network computes, in float64."""
    w, v, b = (array.astype(np.float64) for array in (weights() | given).values())
    return np.tanh(x @ w).reshape(len(x), -1) @ v.T + b


def slopes(function, x, step=1e-6):
    """Central differences of a function of one array, element by element."""
    x, result = x.astype(np.float64), np.zeros(x.shape)
    for index in np.ndindex(*x.shape):
        moved = [x.copy(), x.copy()]
        moved[0][index] -= step
        moved[1][index] += step
        result[index] = (function(moved[1]) - function(moved[0])) / (2 * step)
    return result


def assert_close(actual, expected, tolerance):
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * max(np.abs(expected).max(), 1e-30)


# A selection is NumPy's

CUBE = '<ir_version: 8, opset_import: ["": {opset}]> g (double[{shape}] x) => (double[{shape}] y) {{ y = Identity(x) }}'
SELECTIONS = [
    "",
    "[2]",
    "[-1]",
    "[:, 3]",
    "[0, 3]",
    "[1, -2, 3]",
    "[:, -1]",
    "[..., 0]",
    "[1, ...]",
    "[1, ..., 2]",
    "[..., 1, :, :]",
    "[1:]",
    "[:-1, 2]",
    "[::2, ::-1]",
    "[::-2, 3:0:-2]",
    "[5:0:-1]",
    "[-2:-1, 1:9, -3]",
    "[ 0 , 1:3 ]",
    "[+1]",
]


@pytest.mark.parametrize("shape", ["3, 4, 5", "A, B, C"])
@pytest.mark.parametrize("opset", [7, 13, 18, 21])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_selection_is_the_sum_of_numpys(backend, opset, shape):
    x = np.random.default_rng(0).normal(size=(3, 4, 5))
    model = onnx.parser.parse_model(CUBE.format(opset=opset, shape=shape))
    for brackets in SELECTIONS:
        picked = recipes.select(model, f"y{brackets}")
        assert picked.ir_version >= 10  # its nodes have metadata
        results = run(picked, {"x": x}, backend)
        assert list(results) == ["y_selected", "y"]
        expected = eval(f"x{brackets}", {"x": x}).sum()  # the same text, read by Python
        assert results["y_selected"].shape == ()
        assert results["y_selected"] == pytest.approx(expected, abs=1e-12), brackets
        made = refgrad.gradient(picked, ["x"], ["y_selected"], cotangent="ones")
        mask = np.zeros_like(x)
        exec(f"mask{brackets or '[...]'} = 1", {"mask": mask})
        np.testing.assert_array_equal(run(made, {"x": x}, backend)["x_grad"], mask)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_index_is_given_when_the_model_runs(backend):
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2, 3] x, int32 k) => (float[2, 3] y) { y = Mul(x, x) }'
    )
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    picked = recipes.select(model, "y[k, target]")
    assert [(v.name, v.type.tensor_type.elem_type) for v in picked.graph.input[1:]] == [("k", 6), ("target", 7)]
    for k, target in ((0, 2), (1, -1), (-1, 0)):
        feeds = {"x": x, "k": np.array(k, np.int32), "target": np.array(target)}
        assert run(picked, feeds, backend)["y_selected"] == x[k, target] ** 2
    assert len(recipes.select(model, "y[target, target]").graph.input) == 3


def test_an_output_may_have_brackets_in_its_name():
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y[0]"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y[0]", TensorProto.FLOAT, [2])],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    x = np.array([1, 2], np.float32)
    for of, expected in (("y[0]", -3), ("y[0][1]", -2), (None, -3)):
        assert run(recipes.select(model, of), {"x": x})["y[0]_selected"] == expected


TWO = """<ir_version: 10, opset_import: ["" : 21]>
g (float[1, 4] x, float[3] z, int64[2] i) => (float[1, 4] logits, float[3] boxes, int64[2] ids)
{ logits = Neg(x) boxes = Neg(z) ids = Neg(i) }"""


@pytest.mark.parametrize(
    ("of", "error", "message"),
    [
        (None, OptionError, "Choose an output: of='logits'. The float outputs are: 'logits', 'boxes'."),
        ("logit[3]", UnknownNameError, "'logit' is not a float output of the model. Did you mean 'logits'?"),
        ("ids[0]", UnknownNameError, "'ids' is not a float output"),
        ("x", UnknownNameError, "There are: 'logits', 'boxes'."),
        ("logits[3]", OptionError, "axis 0 of 'logits', [1, 4], has no element 3. Along axis 1 it is logits[:, 3]."),
        ("logits[0, 4]", OptionError, "axis 1 of 'logits', [1, 4], has no element 4."),
        ("logits[0, -5]", OptionError, "axis 1 of 'logits', [1, 4], has no element -5."),
        ("logits[0, 1, 2]", OptionError, "has 2 axes, [1, 4], fewer than there are indices"),
        ("logits[:, 5:]", OptionError, "the slice of axis 1 of 'logits', [1, 4], is empty"),
        ("logits[::0]", OptionError, "the step of a slice is not 0"),
        ("logits[1.5]", OptionError, "'1.5' is not an index. There are integers"),
        ("logits[]", OptionError, "'' is not an index"),
        ("logits[0", UnknownNameError, "'logits[0' is not a float output"),
        ("logits[..., ...]", OptionError, "'...' may stand once"),
        ("logits[0, ..., 1, 2]", OptionError, "fewer than there are indices"),
        ("logits[boxes]", UnknownNameError, "the name of another value of the model"),
        ("logits[i]", UnknownNameError, "'i' is an input of the model, but not an int64 or int32 scalar"),
    ],
)
def test_a_wrong_selection_says_what_there_is(of, error, message):
    with pytest.raises(error, match=re.escape(message)):
        recipes.select(onnx.parser.parse_model(TWO), of)


# Saliency


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", ["N, 3, 4, 4", "2, 3, 4, 4"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_saliency_is_the_size_of_the_slope(backend, shape, kind):
    x = image(kind)
    top = logits(x.astype(np.float64)).argmax(axis=1)
    functions = {
        None: lambda x: logits(x)[[0, 1], top].sum(),
        "logits[:, 3]": lambda x: logits(x)[:, 3].sum(),
        "logits[1, 3]": lambda x: logits(x)[1, 3],
        "logits": lambda x: logits(x).sum(),
    }
    model = net(kind, shape=shape, rows=shape[0])
    for of, function in functions.items():
        expected = np.abs(slopes(function, x))
        results = run(recipes.saliency(model, of=of), {"image": x}, backend)
        assert list(results) == ["image_saliency"]
        assert results["image_saliency"].dtype == x.dtype
        assert_close(results["image_saliency"], expected, max(ERROR[kind], 1e-7))
        for axis in (1, -3):
            results = run(recipes.saliency(model, of=of, axis=axis), {"image": x}, backend)
            assert_close(results["image_saliency"], expected.max(axis=1), max(ERROR[kind], 1e-7))


def test_every_sample_has_its_own_largest_element():
    x = image()
    made = recipes.saliency(net())
    together = run(made, {"image": x})["image_saliency"]
    alone = [run(made, {"image": x[k : k + 1]})["image_saliency"] for k in range(2)]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-12)


@pytest.mark.parametrize(
    ("shape", "x"), [("", 2.0), ("3", [1.0, -4.0, 3.0]), ("2, 2, 2", np.arange(8.0).reshape(2, 2, 2))]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_of_fewer_and_of_more_axes(backend, shape, x):
    x = np.array(x)
    kind = f"double[{shape}]" if shape else "double"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({kind} x) => ({kind} y) {{ y = Mul(x, x) }}'
    )
    rows = (x * x).reshape((len(x), -1) if x.ndim > 1 else (1, -1))
    wins = np.zeros_like(rows)
    wins[range(len(rows)), rows.argmax(axis=1)] = 1
    expected = np.abs(2 * x * wins.reshape(x.shape))
    np.testing.assert_array_equal(run(recipes.saliency(model), {"x": x}, backend)["x_saliency"], expected)


# Integrated gradients

CUBIC = """<ir_version: 10, opset_import: ["" : 21]>
g ({kind}[N, 3] x) => ({kind}[N, 3] y) {{ s = Mul(x, x) c = Mul(s, x) y = Mul(c, w) }}"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_attribution_of_a_cubic_is_known(backend):
    w, x, x0 = np.array([1.0, -2.0, 3.0]), np.array([[1.0, 2, -1], [0.5, 0, 4]]), np.array([[0.5, -1, 2]])
    for steps in (1, 4, 32):
        made = recipes.integrated_gradients(parsed(CUBIC.format(kind="double"), w=w), of="y", steps=steps)
        assert [value.name for value in made.graph.input] == ["x", "x_baseline"]
        got = run(made, {"x": x, "x_baseline": x0}, backend)["x_attribution"]
        # The midpoint rule on f' = 3w(x0 + t·d)²: its error is f'''·d³/(24k²), exactly.
        np.testing.assert_allclose(got, w * (x**3 - x0**3) - 6 * w * (x - x0) ** 3 / (24 * steps**2), rtol=1e-12)
        got = run(made, {"x": x}, backend)["x_attribution"]
        np.testing.assert_allclose(got, w * x**3 * (1 - 6 / (24 * steps**2)), rtol=1e-12)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_attributions_sum_to_the_difference(backend, kind):
    x, x0 = image(kind), 0.3 * image(kind)[::-1]
    change = logits(x.astype(np.float64))[:, 3] - logits(x0.astype(np.float64))[:, 3]
    gaps = []
    for steps in (8, 16, 32):
        made = recipes.integrated_gradients(net(kind), of="logits[:, 3]", steps=steps)
        got = run(made, {"image": x, "image_baseline": x0}, backend)["image_attribution"]
        assert got.dtype == x.dtype
        assert got.shape == x.shape
        gaps.append(np.abs(got.astype(np.float64).sum(axis=(1, 2, 3)) - change).max())
    assert gaps[-1] <= {"double": 1e-3, "float": 1e-3, "float16": 1e-2}[kind] * np.abs(change).max()
    if kind == "double":  # the error falls with the square of the steps
        assert gaps[0] / gaps[1] == pytest.approx(4, rel=0.1)
        assert gaps[1] / gaps[2] == pytest.approx(4, rel=0.1)


def test_attributions_are_those_of_the_sum_written_out():
    x, steps = image(), 5
    got = run(
        recipes.integrated_gradients(net(), of="logits[:, target]", steps=steps), {"image": x, "target": np.array(2)}
    )
    points = [(k + 0.5) / steps * x for k in range(steps)]
    mean = sum(slopes(lambda x: logits(x)[:, 2].sum(), point) for point in points) / steps
    assert_close(got["image_attribution"], x * mean, 1e-7)


def test_many_steps_of_16_bits_are_summed_in_float32():
    x = np.ones((1, 3), np.float16)
    made = recipes.integrated_gradients(
        parsed(CUBIC.format(kind="float16"), w=np.ones(3, np.float16)), of="y", steps=4096
    )
    for backend in BACKENDS:
        np.testing.assert_allclose(run(made, {"x": x}, backend)["x_attribution"], 1, atol=1e-3)


def test_the_graph_does_not_grow_with_the_steps():
    few, many = (recipes.integrated_gradients(net(), of="logits[0, 0]", steps=k) for k in (2, 1000))
    assert [n.op_type for n in few.graph.node] == [n.op_type for n in many.graph.node]


BRANCHED = """<ir_version: 10, opset_import: ["" : 21]>
g (double[4] x, double[4] z, bool flag) => (double[1] y) {{
    square = Mul(x, x)
    index = If (flag) <
        then_branch = t () => (int64[1] i) {{ i = ArgMax(x) }},
        else_branch = e () => (int64[1] i) {{ i = ArgMin(x) }}
    >
    other = Exp(z)
    product = Mul(square, other)
    y = Gather(product, index)
}}"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_subgraphs_read_the_point_on_the_line(backend):
    made = recipes.integrated_gradients(onnx.parser.parse_model(BRANCHED.format()), wrt="x", steps=4)
    # What depends on z alone is computed once, before the Scan.
    assert "Exp" in [node.op_type for node in made.graph.node]
    x, z = np.array([1.0, 3, 2, -1]), np.array([0.0, 1, 2, 3])
    feeds = {"x": x, "z": z, "x_baseline": np.array([5.0, 0, 0, 0])}
    for flag, pick in ((True, np.argmax), (False, np.argmin)):
        line = x - feeds["x_baseline"]
        slope = np.zeros(4)
        for k in range(4):
            point = feeds["x_baseline"] + (k + 0.5) / 4 * line
            best = pick(point)
            slope[best] += 2 * point[best] * np.exp(z[best]) / 4
        got = run(made, feeds | {"flag": np.array(flag)}, backend)["x_attribution"]
        np.testing.assert_allclose(got, line * slope, rtol=1e-12)


LOOPED = """<ir_version: 10, opset_import: ["" : 21]>
g (double[2] x, bool flag) => (double[2] y) {
    count = Constant <value = int64 {3}> ()
    power = Loop (count, , x) <body = b (int64 i, bool go, double[2] p) => (bool on, double[2] q) {
        on = Identity(go)
        q = If (flag) <
            then_branch = t () => (double[2] m) { m = Mul(p, x) },
            else_branch = e () => (double[2] n) { n = Neg(p) }
        >
    }>
    y = Identity(power)
}"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_bodies_of_the_gradient_read_the_point_on_the_line(backend):
    made = recipes.integrated_gradients(onnx.parser.parse_model(LOOPED), of="y", steps=100)
    x, x0 = np.array([1.0, -2]), np.array([0.5, 1])
    for flag, function in ((True, lambda x: x**4), (False, lambda x: -x)):
        got = run(made, {"x": x, "x_baseline": x0, "flag": np.array(flag)}, backend)["x_attribution"]
        np.testing.assert_allclose(got, function(x) - function(x0), rtol=2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_that_does_not_depend_on_the_input_attributes_nothing(backend):
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N] x, float[2] z) => (float[2] y) { y = Neg(z) }'
    )
    feeds = {"x": np.ones(3, np.float32), "z": np.ones(2, np.float32)}
    assert not run(recipes.integrated_gradients(model, "x", "y"), feeds, backend)["x_attribution"].any()


@pytest.mark.parametrize("shape", ["N", "N, 1", "1", "N, 1, 1"])
def test_without_a_target_one_element_of_each_sample_is_attributed(shape):
    x = np.ones([3 if dim == "N" else int(dim) for dim in re.findall(r"\w+", shape)])
    made = recipes.integrated_gradients(parsed(CUBE.format(opset=21, shape=shape)))
    np.testing.assert_allclose(run(made, {"x": x})["x_attribution"], x)


# The fast gradient sign method


def cross_entropy(x, label, **given):
    rows = logits(x, **given)
    return (np.log(np.exp(rows).sum(axis=1)) - rows[range(len(label)), label]).sum()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fgsm_goes_up_the_cross_entropy(backend, kind):
    x, label = image(kind), np.array([4, 1])
    made = recipes.fgsm(net(kind), score="cross_entropy", eps=0.25)
    assert [value.name for value in made.graph.input] == ["image", "label", "eps"]
    signs = np.sign(slopes(lambda x: cross_entropy(x, label), x))
    for given in ({}, {"eps": np.array(0.125, x.dtype)}):
        got = run(made, {"image": x, "label": label} | given, backend)["image_adversarial"]
        np.testing.assert_array_equal(got, x + (given.get("eps", 0.25) * signs).astype(x.dtype))
    assert cross_entropy(got.astype(np.float64), label) > cross_entropy(x.astype(np.float64), label)


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("p", [-0.5, 0.25, 0.75, 1.5])
def test_the_log_loss_is_flat_outside_0_to_1(p, label, columns):
    text = f"m (double[N, {columns}] x) => (double[N, {columns}] y) {{ y = Mul(x, w) }}"
    model = parsed('<ir_version: 10, opset_import: ["": 21]> ' + text, w=np.full(columns, p))

    def loss(w):
        q = w[label] if columns == 2 else w[0] if label else 1 - w[0]
        return -np.log(np.clip(q, np.finfo(float).eps, 1))

    made = recipes.sensitivity(model, score="log_loss")
    norm = run(made, {"x": np.ones((1, columns)), "label": np.array([label])})["w_norm"]
    assert norm == pytest.approx(np.linalg.norm(slopes(loss, np.full(columns, p))), rel=1e-6)


def test_fgsm_stays_in_the_range_of_the_image():
    x, label = np.clip(image(), 0, 1), np.array([4, 1])
    free, clipped = (
        run(recipes.fgsm(net(), score="cross_entropy", eps=0.3, clip=clip), {"image": x, "label": label})
        for clip in (None, (0.0, 1.0))
    )
    np.testing.assert_array_equal(clipped["image_adversarial"], np.clip(free["image_adversarial"], 0, 1))
    assert free["image_adversarial"].min() < 0


def test_fgsm_of_a_loss_that_the_model_has_or_gets():
    x, label = image(), np.random.default_rng(2).normal(size=(2, 5))
    with_loss = refgrad.add_loss_output(net())
    signs = np.sign(slopes(lambda x: ((logits(x) - label) ** 2).sum(), x))
    for made in (
        recipes.fgsm(net(), score="squared_error"),
        recipes.fgsm(net(), of="logits", score="squared_error"),
        recipes.fgsm(with_loss, "image", "loss"),
    ):
        got = run(made, {"image": x, "label": label})["image_adversarial"]
        np.testing.assert_allclose(got, x + 0.007 * signs, rtol=1e-15)


# Forces

SPRING = """<ir_version: 10, opset_import: ["" : 21]>
g (double[B, 2, 3] positions) => (double[B] energy) {
    first, second = Split <axis = 1, num_outputs = 2> (positions)
    bond = Sub(first, second)
    square = Mul(bond, bond)
    length2 = ReduceSum <keepdims = 0> (square, both)
    length = Sqrt(length2)
    stretch = Sub(length, rest)
    energy = Mul(stretch, stretch)
}"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_forces_of_springs(backend):
    model = parsed(SPRING, both=np.array([1, 2]), rest=np.array(1.5))
    x = np.random.default_rng(3).normal(size=(4, 2, 3))
    results = run(recipes.forces(model), {"positions": x}, backend)
    assert list(results) == ["forces", "energy"]
    bond = x[:, 0] - x[:, 1]
    length = np.linalg.norm(bond, axis=1, keepdims=True)
    pull = -2 * (length - 1.5) * bond / length  # of each molecule alone
    np.testing.assert_allclose(results["forces"], np.stack([pull, -pull], axis=1), rtol=1e-12)
    np.testing.assert_allclose(results["energy"], (length[:, 0] - 1.5) ** 2, rtol=1e-12)
    first = run(recipes.forces(model, of="energy[0]"), {"positions": x}, backend)["forces"]
    np.testing.assert_allclose(first[0], results["forces"][0], rtol=1e-12)
    assert not first[1:].any()


# Sensitivity


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sensitivity_measures_every_weight(backend, kind):
    x, label, given = image(kind), np.array([4, 1]), weights(kind)

    made = recipes.sensitivity(net(kind), score="cross_entropy")
    results = run(made, {"image": x, "label": label}, backend)
    assert {value.dtype for value in results.values()} == {np.dtype(np.float64 if kind == "double" else np.float32)}
    assert list(recipes.sensitivities_in(made)) == list(given)
    for name, outputs in recipes.sensitivities_in(made).items():
        assert outputs == {"norm": f"{name}_norm", "effect": f"{name}_effect"}
        slope = slopes(lambda value, name=name: cross_entropy(x, label, **given | {name: value}), given[name])
        expected = np.linalg.norm(slope), np.abs(slope * given[name]).mean()
        for key, value in zip(("norm", "effect"), expected, strict=True):
            assert results[outputs[key]] == pytest.approx(value, rel=max(ERROR[kind], 1e-7))


def test_only_weights_that_the_loss_depends_on_are_ranked():
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[N] x) => (float loss, float[N] side) {
        y = Mul(x, w) loss = ReduceSum <keepdims = 0> (y) z = Mul(x, unused) side = Mul(z, empty)
    }"""
    half = np.array([0.5], np.float32)
    model = parsed(text, w=half, unused=half, empty=half)
    made = recipes.sensitivity(model, "loss")
    assert list(recipes.sensitivities_in(made)) == ["w"]
    assert run(made, {"x": np.array([1, 2], np.float32)})["w_effect"] == 1.5
    assert recipes.sensitivities_in(model) == {}
    with pytest.raises(UnknownNameError, match="there is no weight to rank"):
        recipes.sensitivity(onnx.parser.parse_model(CUBE.format(opset=21, shape="1")))


# What all of them share

RECIPES = {
    "saliency": (recipes.saliency, {}),
    "integrated_gradients": (
        lambda model, **options: recipes.integrated_gradients(model, of=model.graph.output[0].name, **options),
        {"steps": 2},
    ),
    "fgsm": (recipes.fgsm, {"score": "squared_error"}),
    "forces": (recipes.forces, {}),
    "sensitivity": (recipes.sensitivity, {"score": "squared_error"}),
}


@pytest.mark.filterwarnings("ignore:The model has a result 'label'")
@pytest.mark.parametrize("name", RECIPES)
def test_a_name_that_is_taken_becomes_the_next_free_one(name):
    recipe, options = RECIPES[name]
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[N, 2] x, float[N, 2] forces) => (float[N, 2] x_saliency) {
        label = Mul(x, w) eps = Neg(label) loss = Neg(eps) x_attribution = Neg(loss) x_adversarial = Neg(x_attribution)
        x_baseline = Mul(x_adversarial, forces) w_norm = Neg(x_baseline) w_effect = Neg(w_norm)
        x_saliency_selected = Neg(w_effect) x_saliency = Neg(x_saliency_selected)
    }"""
    model = parsed(text, w=np.ones(2, np.float32))
    before = model.SerializeToString()
    made = recipe(model, **({} if name == "sensitivity" else {"wrt": "x"}), **options)
    assert model.SerializeToString() == before
    feeds = {
        value.name: np.ones((3, 2), np.float32)
        for value in made.graph.input
        if value.name in ("x", "forces", "label_1")
    }
    for backend in BACKENDS:
        assert all(np.isfinite(value).all() for value in run(made, feeds, backend).values())
    expected = {
        "saliency": ["x_saliency_1"],
        "integrated_gradients": ["x_attribution_1"],
        "fgsm": ["x_adversarial_1"],
        "forces": ["forces_1", "x_saliency"],
        "sensitivity": ["w_norm_1", "w_effect_1"],
    }
    assert [value.name for value in made.graph.output] == expected[name]


@pytest.mark.parametrize("name", RECIPES)
def test_only_the_result_holds_large_weights(name, monkeypatch):
    recipe, options = RECIPES[name]
    w = np.random.default_rng(0).normal(size=(500, 500)).astype(np.float32)
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[N, 500] x) => (float[N, 500] y) { y = MatMul(x, w) }'
    given = []

    def gradient(model, *arguments, **options):
        given.append(model.ByteSize())
        return refgrad.gradient(model, *arguments, **options)

    monkeypatch.setattr("refgrad.recipes.gradient", gradient)
    made = recipe(parsed(text, w=w), **options)
    assert len(given) == 1
    assert given[0] < 10_000
    assert names_in(made) == ({}, {})  # what `refgrad.gradient` wrote down is not true of the result
    [kept] = [tensor for tensor in made.graph.initializer if tensor.name == "w"]
    np.testing.assert_array_equal(numpy_helper.to_array(kept), w)
    assert not kept.external_data
    assert kept.data_location == TensorProto.DEFAULT


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("opset", [8, 15, 16, 18, 23])
def test_every_opset_gives_the_same(name, opset):
    recipe, options = RECIPES[name]
    feeds = {"image": image(), "label": np.zeros((2, 5))}
    results = []
    for version in (opset, 21):
        made = recipe(net(opset=version), **options)
        results.append(run(made, {value.name: feeds[value.name] for value in made.graph.input if value.name in feeds}))
    assert list(results[0]) == list(results[1])
    for key, value in results[0].items():
        np.testing.assert_allclose(value, results[1][key], rtol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: recipes.saliency(m), OptionError, "Choose an output: of="),
        (
            lambda m: recipes.saliency(m, of="logits"),
            OptionError,
            "Choose the input: wrt='x'. The float inputs are: 'x', 'z'.",
        ),
        (lambda m: recipes.forces(m, "y", "logits"), UnknownNameError, "wrt='y' is not a float input of the model."),
        (lambda m: recipes.forces(m, "i", "logits"), UnknownNameError, "There are: 'x', 'z'."),
        (lambda m: recipes.saliency(m, "x", "logits", axis=2), OptionError, "axis=2: 'x' has the axes -2 to 1."),
        (lambda m: recipes.saliency(m, "x", "logits", axis=-3), OptionError, "axis=-3"),
        (lambda m: recipes.integrated_gradients(m, "x", "logits", steps=0), OptionError, "at least one step"),
        (lambda m: recipes.fgsm(m, "x", "logits", eps=float("inf")), OptionError, "give a finite number"),
        (lambda m: recipes.fgsm(m, "x", "logits", clip=(1, 0)), OptionError, "the lowest value and the highest"),
        (lambda m: recipes.fgsm(m, "x", "logits", score="hinge"), OptionError, "'hinge'; there are 'cross_entropy'"),
        (
            lambda m: recipes.fgsm(m, "x", "boxes", score="cross_entropy"),
            OptionError,
            "'boxes' has 1 for each sample, as for two classes: use score='binary_cross_entropy_with_logits'",
        ),
        (
            lambda m: recipes.fgsm(m, "x", "boxes", score="log_loss"),
            OptionError,
            "output 'boxes' has the shape [3]",
        ),
        (lambda m: recipes.fgsm(m, "x", "logits[0]", score="l2"), OptionError, "Give of='logits'."),
        (lambda m: recipes.sensitivity(net()), OptionError, "Output 'logits' of shape [N, 5] is not a loss"),
        (
            lambda m: recipes.integrated_gradients(net()),
            OptionError,
            "give one of them, such as of='logits[:, 1]' or of='logits[:, target]', or of='logits' to take their sum",
        ),
        (
            lambda m: recipes.integrated_gradients(parsed(CUBE.format(opset=21, shape="3"))),
            OptionError,
            "Output 'y' of shape [3] has several elements for each sample: give one of them, such as of='y[1]'",
        ),
        (
            lambda m: recipes.integrated_gradients(parsed(CUBE.format(opset=21, shape="N, 1, 3"))),
            OptionError,
            "such as of='y[:, :, 1]'",
        ),
        (
            lambda m: recipes.fgsm(parsed(CUBE.format(opset=21, shape="N, 3").replace("Identity", "Softmax"))),
            OptionError,
            "Output 'y' of shape [N, 3] is not a loss: give score='log_loss' or another",
        ),
        (lambda m: recipes.forces("nowhere.onnx"), InvalidModelError, "There is no file 'nowhere.onnx'"),
    ],
)
def test_an_error_says_what_there_is(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(onnx.parser.parse_model(TWO))


def test_an_input_with_a_default_value_is_not_what_is_differentiated_by():
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[2] x, float[2] scale) => (float[2] y) { y = Mul(x, scale) }"""
    model = parsed(text, scale=np.array([2, 3], np.float32))
    x = np.ones(2, np.float32)
    np.testing.assert_array_equal(run(recipes.forces(model), {"x": x})["forces"], [-2, -3])
    np.testing.assert_array_equal(run(recipes.forces(model, "scale"), {"x": 5 * x})["forces"], [-5, -5])


def test_an_operator_without_a_derivative_is_named():
    text = """<ir_version: 10, opset_import: ["" : 26]>
    g (float[4] x) => (float[4] y) { h = BitCast <to = 6> (x) y = BitCast <to = 1> (h) }"""
    with pytest.raises(NoGradientError, match="BitCast"):
        recipes.forces(onnx.parser.parse_model(text))


# Torch


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_recipes_equal_autograds(backend, kind):
    torch = pytest.importorskip("torch")
    given = {name: torch.tensor(value, requires_grad=True) for name, value in weights(kind).items()}
    x, label = torch.tensor(image(kind), requires_grad=True), torch.tensor([4, 1])

    def forward(x):
        hidden = torch.tanh(x @ given["w"]).flatten(1)
        return hidden @ given["v"].T + given["b"]

    def slope(x):
        return torch.autograd.grad(forward(x)[:, 3].sum(), x)[0]

    def loss():
        return torch.nn.functional.cross_entropy(forward(x), label, reduction="sum")

    [ascent] = torch.autograd.grad(loss(), x)
    expected = {
        "saliency": {"image_saliency": torch.autograd.grad(forward(x).max(dim=1)[0].sum(), x)[0].abs().amax(dim=1)},
        "integrated": {"image_attribution": x * sum(slope(x * (k + 0.5) / 10) for k in range(10)) / 10},
        "fgsm": {"image_adversarial": (x + 0.1 * ascent.sign()).clamp(-1, 1)},
        "forces": {"forces": -slope(x), "logits": forward(x)},
        "sensitivity": {},
    }
    for (name, value), found in zip(given.items(), torch.autograd.grad(loss(), list(given.values())), strict=True):
        expected["sensitivity"] |= {f"{name}_norm": found.norm(), f"{name}_effect": (found * value).abs().mean()}
    model = net(kind)
    made = {
        "saliency": recipes.saliency(model, axis=1),
        "integrated": recipes.integrated_gradients(model, of="logits[:, 3]", steps=10),
        "fgsm": recipes.fgsm(model, score="cross_entropy", eps=0.1, clip=(-1, 1)),
        "forces": recipes.forces(model, of="logits[:, 3]"),
        "sensitivity": recipes.sensitivity(model, score="cross_entropy"),
    }
    for name, outputs in expected.items():
        feeds = {"image": image(kind)} | ({"label": label.numpy()} if name in ("fgsm", "sensitivity") else {})
        results = run(made[name], feeds, backend)
        assert list(results) == list(outputs)
        for key, value in outputs.items():
            assert_close(results[key], value.detach().numpy(), ERROR[kind])


# The command line


@pytest.fixture
def files(tmp_path):
    model, feeds = tmp_path / "net.onnx", tmp_path / "feeds.npz"
    onnx.save(net("float"), model, save_as_external_data=True, location="net.data", size_threshold=0)
    np.savez(feeds, image=image("float"), label=np.array([4, 1]))
    return model, feeds, tmp_path / "result.onnx"


COMMANDS = {
    "saliency": (["--axis", "1"], lambda m: recipes.saliency(m, axis=1)),
    "integrated-gradients": (
        ["--of", "logits[:, 3]", "--steps", "5"],
        lambda m: recipes.integrated_gradients(m, of="logits[:, 3]", steps=5),
    ),
    "fgsm": (
        ["--score", "cross_entropy", "--eps", "0.5", "--clip", "-1", "1"],
        lambda m: recipes.fgsm(m, score="cross_entropy", eps=0.5, clip=(-1, 1)),
    ),
    "forces": (["--wrt", "image", "--of", "logits[0]"], lambda m: recipes.forces(m, "image", "logits[0]")),
    "sensitivity": (["--score", "cross_entropy"], lambda m: recipes.sensitivity(m, score="cross_entropy")),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_the_recipe(name, files, tmp_path, capsys):
    words, call = COMMANDS[name]
    model, _, output = files
    assert main(["recipe", name, str(model), "-o", str(output), *words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    expected = call(net("float"))
    assert summary["outputs"] == [value.name for value in expected.graph.output]
    assert summary["inputs"] == [value.name for value in expected.graph.input]
    feeds = {"image": image("float")} | ({"label": np.array([4, 1])} if "label" in summary["inputs"] else {})
    got, due = get_backend("numpy").prepare(str(output)).run(feeds), run(expected, feeds)
    for key, value in due.items():
        np.testing.assert_array_equal(got[key], value)
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    assert main(["recipe", name, str(model), "-o", str(elsewhere / "r.onnx"), *words]) == 0
    assert "outputs" in capsys.readouterr().out
    np.testing.assert_array_equal(get_backend("numpy").prepare(str(elsewhere / "r.onnx")).run(feeds)[key], due[key])


def test_one_logits_gradient(files, capsys):
    model, _, output = files
    assert main(["grad", str(model), "-o", str(output), "--wrt", "image", "--of", "logits[:, 3]", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["inputs"], summary["outputs"]) == (["image"], ["image_grad"])
    x = image("float")
    got = get_backend("numpy").prepare(str(output)).run({"image": x})["image_grad"]
    assert_close(got, slopes(lambda x: logits(x)[:, 3].sum(), x), 1e-5)
    words = ["grad", str(model), "-o", str(output), "--of", "logits[:, 3]", "--cotangent", "input", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["inputs"][-1] == "logits_selected_grad"


def test_the_ranking_is_printed(files, capsys):
    model, feeds, _ = files
    words = ["recipe", "sensitivity", str(model), "--feeds", str(feeds), "--score", "cross_entropy"]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    due = run(
        recipes.sensitivity(net("float"), score="cross_entropy"), {"image": image("float"), "label": np.array([4, 1])}
    )
    assert [row["effect"] for row in rows] == sorted((float(due[f"{name}_effect"]) for name in "wvb"), reverse=True)
    assert {row["weight"]: row["norm"] for row in rows} == {name: float(due[f"{name}_norm"]) for name in "wvb"}
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["weight", "norm", "effect"]
    assert [line.split()[0] for line in lines[1:]] == [row["weight"] for row in rows]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["grad", "MODEL", "-o", "OUT", "--of", "logit[3]"],
            "'logit' is not a float output of the model. Did you mean 'logits'?",
        ),
        (
            ["grad", "MODEL", "-o", "OUT", "--of", "logits[0]", "--outputs", "logits"],
            "--of and --outputs exclude each other",
        ),
        (["recipe", "forces", "MODEL", "-o", "OUT", "--of", "logits[0, 5]"], "has no element 5"),
        (["recipe", "saliency", "MODEL", "-o", "OUT", "--wrt", "w"], "--wrt w is not a float input"),
        (["recipe", "fgsm", "MODEL", "-o", "OUT"], "is not a loss: give --score cross_entropy or"),
        (["recipe", "integrated-gradients", "MODEL", "-o", "OUT"], "give one of them, such as --of 'logits[:, 1]'"),
        (["recipe", "sensitivity", "MODEL", "--score", "cross_entropy"], "Give --output"),
        (["recipe", "sensitivity", "MODEL", "--of", "logits", "-o", "OUT", "--feeds", "F"], "exclude each other"),
        (["recipe", "sensitivity", "MODEL", "--of", "logits", "--feeds", "F"], "There is no file 'F'"),
        (["recipe", "saliency", "MODEL", "-o", "MODEL"], "is the model itself"),
    ],
)
def test_a_wrong_command_writes_nothing(words, message, files, capsys):
    model, _, output = files
    before = model.read_bytes()
    assert main([{"MODEL": str(model), "OUT": str(output)}.get(word, word) for word in words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not output.exists()
    assert model.read_bytes() == before


def test_the_examples_of_the_page_print_what_it_says():
    failed, count = doctest.testfile(str(PAGE), module_relative=False)
    assert count > 20
    assert not failed


@pytest.mark.parametrize("line", re.findall(r"^\$ refgrad (.*)", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
def test_the_commands_of_the_page_run(line, files, monkeypatch):
    model, feeds, _ = files
    model.rename(model.with_name("model.onnx"))
    monkeypatch.chdir(feeds.parent)
    assert main(shlex.split(line)) == 0
