"""refgrad.jax: functions of JAX against the same networks written in jax.numpy, and against JAX's own differences."""

from __future__ import annotations

import doctest
import gc
import importlib
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from refgrad.backends import available
from refgrad.errors import (
    BackendError,
    FeedError,
    InvalidModelError,
    NoGradientError,
    OptionError,
    OptionTypeError,
    UnknownNameError,
)

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import refgrad.jax  # noqa: E402
from refgrad.jax.programs import Derivative, JaxProgram  # noqa: E402

pytestmark = pytest.mark.jax

ROOT = Path(__file__).parents[2]
BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
MODELS = Path(os.environ.get("REFGRAD_TORCH_MODELS", os.devnull))
ERROR = {"float32": 1e-5, "float64": 1e-10}  # relative to the largest element
HEAD = '<ir_version: 10, opset_import: ["" : 21]>'
NET = """net ({kind}[N, 3] x, int64[N] i) => ({kind}[N, 2] y, int64[N] twice) {{
    a = MatMul(x, w)
    e = Gather(table, i)
    s = Add(a, e)
    h = Tanh(s)
    z = MatMul(h, v)
    y = Sigmoid(z)
    twice = Add(i, i)
}}"""
SHAPES = {"w": (3, 4), "table": (5, 4), "v": (4, 2)}


def parsed(text, **initializers):
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in initializers.items())
    return model


def weights(kind="float32"):
    rng = np.random.default_rng(0)
    return {name: (rng.normal(size=shape) / 2).astype(kind) for name, shape in SHAPES.items()}


def net(kind="float32"):
    return parsed(NET.format(kind={"float32": "float", "float64": "double"}[kind]), **weights(kind))


def ours(kind="float32", backend=None, **arguments):
    return refgrad.jax.function(net(kind), trainable=list(SHAPES), backend=backend or BACKENDS[-1], **arguments)


def theirs(params, x, i):
    h = jnp.tanh(x @ params["w"] + params["table"][i])
    return jax.nn.sigmoid(h @ params["v"]), i + i


def data(kind="float32"):
    rng = np.random.default_rng(1)
    return (
        {k: jnp.asarray(v) for k, v in weights(kind).items()},
        jnp.asarray(rng.normal(size=(2, 3)), kind),
        jnp.array([1, 4]),
    )


def cube(kind="float", size="N"):
    return parsed(f"cube ({kind}[{size}] x) => ({kind}[{size}] y) {{ s = Mul(x, x) y = Mul(s, x) }}")


def function(model, **arguments):
    return refgrad.jax.function(model, backend=arguments.pop("backend", BACKENDS[-1]), **arguments)


def assert_same(found, expected, error=1e-5):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=error * max(1e-30, float(np.abs(b).max(initial=0))))


@pytest.fixture(params=ERROR)
def kind(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


@pytest.fixture
def runs(monkeypatch):
    """How many models were run."""
    seen, run = [], JaxProgram.run

    def counted(self, *arguments):
        seen.append(self)
        return run(self, *arguments)

    monkeypatch.setattr(JaxProgram, "run", counted)
    return seen


def loss(f):
    return lambda params, x, i: (f(params, x, i)[0] ** 2).sum()


# What is done to a function of weights, an input and integers.
TRANSFORMED = {
    "called": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(loss(f), argnums=(0, 1)),
    "grad of the input": lambda f: jax.grad(loss(f), argnums=1),
    "value_and_grad": lambda f: jax.jit(jax.value_and_grad(loss(f), argnums=(0, 1))),
    "grad with aux": lambda f: jax.grad(lambda p, x, i: (f(p, x, i)[0].sum(), f(p, x, i)[1]), has_aux=True),
    "jvp": lambda f: lambda p, x, i: jax.jvp(lambda p, x: f(p, x, i)[0], (p, x), (p, 2 * x)),
    "jvp of weights": lambda f: lambda p, x, i: jax.jvp(lambda p: f(p, x, i)[0], (p,), (p,)),
    "jacfwd": lambda f: lambda p, x, i: jax.jacfwd(lambda x: f(p, x, i)[0])(x),
    "jacrev": lambda f: jax.jacrev(lambda p, x, i: f(p, x, i)[0], argnums=(0, 1)),
    "hessian": lambda f: jax.jit(jax.hessian(loss(f), argnums=(0, 1))),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(loss(f), argnums=1), argnums=1),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(loss(f), argnums=1), argnums=1),
    "product with the Hessian": lambda f: lambda p, x, i: jax.jvp(jax.grad(lambda x: loss(f)(p, x, i)), (x,), (2 * x,)),
    "vmap": lambda f: lambda p, x, i: jax.vmap(f, (None, 0, None))(p, jnp.stack([x, 2 * x, -x]), i),
    "vmap along axes": lambda f: (
        lambda p, x, i: jax.vmap(f, (None, 2, 0), 1)(p, jnp.stack([x, 2 * x], 2), jnp.stack([i, i - 1]))
    ),
    "vmap of grad": lambda f: (
        lambda p, x, i: jax.vmap(jax.grad(loss(f), argnums=(0, 1)), (None, 0, None))(p, x[:, None], i[:1])
    ),
    "vmap of weights": lambda f: (
        lambda p, x, i: jax.vmap(f, (0, None, None))(jax.tree.map(lambda w: jnp.stack([w, -w]), p), x, i)
    ),
    "grad of vmap": lambda f: jax.grad(
        lambda p, x, i: (jax.vmap(f, (None, 0, None))(p, x[:, None], i[:1])[0] ** 3).sum()
    ),
    "scan": lambda f: jax.grad(
        lambda p, x, i: jax.lax.scan(lambda x, _: (jnp.pad(f(p, x, i)[0], ((0, 0), (0, 1))), None), x, None, 3)[
            0
        ].sum(),
        argnums=1,
    ),
    "cond": lambda f: jax.grad(
        lambda p, x, i: jax.lax.cond(x[0, 0] < 9, lambda: f(p, x, i)[0].sum(), lambda: 0.0), argnums=1
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(loss(f)), argnums=(0, 1)),
    "linearize": lambda f: lambda p, x, i: jax.linearize(lambda x: f(p, x, i)[0], x)[1](3 * x),
}


@pytest.mark.parametrize("how", TRANSFORMED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_transformation_gives_what_it_gives_of_the_network_in_jax(kind, how, backend):
    f = ours(kind, backend)
    transform = TRANSFORMED[how]
    assert_same(
        transform(f)(*data(kind)), transform(theirs)(*data(kind)), ERROR[kind] * (10 if how == "hessian" else 1)
    )


@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_derivatives_agree_with_differences_to_the_third_order(mode):
    with jax.enable_x64(True):
        f = ours("float64", "numpy")
        params, x, i = data("float64")
        check_grads(lambda params, x: f(params, x, i)[0], (params, x), order=3, modes=[mode])


def test_reverse_mode_makes_no_forward_model_and_each_model_once(runs):
    f = ours()
    gradient = jax.jit(jax.value_and_grad(loss(f), argnums=(0, 1)))
    for _ in range(3):
        gradient(*data())
    assert len(runs) == 6
    [derivative] = {program for program in runs if isinstance(program, Derivative)}
    assert not derivative._is_forward
    forward = [program for program in f._root._derivatives.values() if program._is_forward]
    assert forward
    assert not any("model" in vars(program) for program in forward)


def test_the_transpose_of_a_linear_function_is_the_gradient_model():
    f, x = function(cube()), jnp.array([1.0, 2.0])
    y, moved = jax.linearize(f, x)
    _, back = jax.vjp(f, x)
    for transposed in (jax.linear_transpose(moved, x), back):
        np.testing.assert_array_equal(transposed(y)[0], 3 * x**2 * y)
    np.testing.assert_array_equal(jax.linear_transpose(lambda ct: back(ct)[0], y)(x)[0], 3 * x**2 * x)
    with pytest.raises(NoGradientError, match=r"Only a derivative can be transposed"):
        jax.linear_transpose(f, x)(x)


OF_BATCHES = [how for how in TRANSFORMED if how.startswith(("vmap", "jac", "hessian", "grad of vmap"))]


@pytest.mark.parametrize("how", OF_BATCHES)
def test_a_batch_axis_gives_what_one_call_per_element_gives(how):
    transform = TRANSFORMED[how]
    assert_same(transform(ours(batch_axis=0))(*data()), transform(theirs)(*data()), 1e-4 if how == "hessian" else 1e-5)


def test_a_batch_axis_makes_one_call_of_many(runs):
    f = ours(batch_axis=0)
    params, x, i = data()
    xs = jnp.stack([x, 2 * x, 3 * x])
    jax.block_until_ready(jax.vmap(f, (None, 0, None))(params, xs, i))
    assert len(runs) == 1
    jax.block_until_ready(jax.vmap(jax.grad(loss(f), argnums=1), (None, 0, None))(params, xs, i))
    assert len(runs) == 3
    jax.block_until_ready(
        jax.vmap(jax.grad(loss(f)), (None, 0, None))(params, xs, i)
    )  # a gradient of weights per sample
    assert len(runs) == 3 + 1 + 3


def test_a_batch_axis_that_is_not_the_first():
    text = "f (float[2, N] x, float[1, N] z) => (float[2, N] y) { y = Mul(x, z) }"
    xs = jnp.arange(24.0).reshape(3, 4, 2).transpose(0, 2, 1)
    z = jnp.arange(4.0)[None]
    f = function(parsed(text), batch_axis=1)
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(xs, z), xs * z)
    np.testing.assert_array_equal(
        jax.vmap(f, (None, 2), 2)(xs[0], jnp.stack([z, -z], 2)), jnp.stack([xs[0] * z, -xs[0] * z], 2)
    )


@pytest.mark.parametrize(
    ("text", "axis", "said"),
    [
        ("f (float[4] x) => (float[4] y) { y = Tanh(x) }", 0, "x: float32[4] has no batch of any size there"),
        ("f (float[N] x) => (float[N] y) { y = Tanh(x) }", 1, "x: float32[N] has no batch of any size there"),
        (
            "f (float[N] x) => (float y) { y = ReduceSum<keepdims = 0>(x) }",
            0,
            "y: float32[] has no batch of any size there",
        ),
        (
            "f (float[N] x, float[M] z) => (float[K] y) { y = Add(x, z) }",
            0,
            "the inputs have batches of different sizes there",
        ),
        ("f (float[N] x) => (float[N] y) { y = Tanh(x) }", True, "batch_axis=True is not an axis"),
        ("f (float[N] x) => (float[N] y) { y = Tanh(x) }", -1, "batch_axis=-1 is not an axis"),
    ],
)
def test_a_batch_axis_that_is_none_is_refused(text, axis, said):
    with pytest.raises(OptionError, match=re.escape(said)):
        function(parsed(text), batch_axis=axis)


def test_a_batch_axis_of_a_model_that_mixes_its_samples_is_refused_where_it_shows():
    f = function(parsed("f (float[N] x) => (float[M] y) { y = Concat<axis = 0>(x, x) }"), batch_axis=0)
    with pytest.raises(OptionError, match=r"batch_axis=0: of 6 samples the model makes 12 rows of an output"):
        jax.vmap(f)(jnp.ones((2, 3)))


def test_a_batch_axis_of_inputs_with_different_numbers_of_samples_is_refused():
    model = parsed("f (float[N] x, float[N] z) => (float[N] y) { y = Add(x, z) }")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].Clear()
    f = function(model, batch_axis=0)
    with pytest.raises(OptionError, match=r"batch_axis=0: the inputs have 1, 3 samples"):
        jax.vmap(f, (0, None))(jnp.ones((2, 3)), jnp.ones(1))


def test_weights_in_attributes_are_arguments_too():
    text = """<ir_version: 8, opset_import: ["": 15, "ai.onnx.ml": 1]> line (float[N, 2] x) => (float[N, 1] y) {
        y = ai.onnx.ml.LinearRegressor <coefficients = [1.0, 2.0], intercepts = [3.0]> (x) }"""
    f = function(onnx.parser.parse_model(text), trainable=True)
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    slopes = jax.grad(lambda params: f(params, x).sum())(f.params)
    assert f(f.params, x).tolist() == [[8], [14]]
    assert {name: slope.ravel().tolist() for name, slope in slopes.items()} == {
        "LinearRegressor.coefficients": [4, 6],
        "LinearRegressor.intercepts": [2],
    }


def test_weights_are_arguments_by_name_or_constants():
    f = function(net(), trainable=["w", "t*"])
    params, x, i = data()
    assert list(f.params) == ["w", "table"]
    assert str(f) == ("<net: (2 weights, x: float32[N, 3], i: int64[N]) -> y: float32[N, 2], twice: int64[N]>")
    assert [value.name for value in (*f.inputs, *f.outputs)] == ["x", "i", "y", "twice"]
    del params["v"]
    np.testing.assert_array_equal(f(params, x, i)[0], function(net())(x, i=i)[0])
    assert f({name: 2 * value for name, value in params.items()}, x, i)[0].shape == (2, 2)
    assert list(refgrad.jax.function(net(), trainable=True, backend="numpy").params) == ["w", "table", "v"]
    with pytest.raises(UnknownNameError, match=r"'z' in trainable is no float initializer"):
        function(net(), trainable=["z"])
    with pytest.raises(OptionTypeError, match=r"trainable is a bool or a list of names, not 3\."):
        function(net(), trainable=3)
    with pytest.raises(UnknownNameError, match=r"Nothing is trainable"):
        function(cube(), trainable=True)


def test_weights_in_constants_are_arguments():
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 1] y) '
        "{ w = Constant<value = float[2, 1] {1, 2}>() y = MatMul(x, w) }"
    )
    f = function(model, trainable=True)
    gradient = jax.grad(lambda params: f(params, jnp.ones((3, 2))).sum())(f.params)
    assert {name: value.tolist() for name, value in gradient.items()} == {"w": [[3], [3]]}


def test_weights_that_are_listed_as_inputs_are_weights():
    model = net()
    for tensor in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    before = model.SerializeToString()
    f = function(model, trainable=["w"])
    params, x, i = data()
    gradient = jax.grad(loss(f))({"w": params["w"]}, x, i)
    assert model.SerializeToString() == before
    assert_same(gradient["w"], jax.grad(loss(theirs))(params, x, i)["w"])


def test_a_model_in_a_file_with_its_weights_beside_it(tmp_path):
    onnx.save(net(), tmp_path / "net.onnx", save_as_external_data=True, location="net.bin", size_threshold=0)
    params, x, i = data()
    for trainable in (False, ["w", "table", "v"]):
        f = function(tmp_path / "net.onnx", trainable=trainable)
        given = (x, i) if f.params is None else (f.params, x, i)
        np.testing.assert_allclose(f(*given)[0], theirs(params, x, i)[0], rtol=1e-5)
    with pytest.raises(InvalidModelError, match="There is no file"):
        function(tmp_path / "nowhere.onnx")


@pytest.mark.parametrize("trainable", [False, True])
def test_the_model_may_be_changed_afterwards(trainable):
    model = net()
    f = function(model, trainable=trainable)
    params, x, i = data()
    given = (f.params, x, i) if trainable else (x, i)
    model.graph.node[-2].op_type = "Sigmoid"
    np.testing.assert_allclose(f(*given)[0], theirs(params, x, i)[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "named", "said"),
    [
        ((), {}, "No feed for x: float32[2, N], i: int32[N]"),
        ((np.ones((2, 3), "f4"),), {}, "No feed for i: int32[N]"),
        ((np.ones((2, 3), "f4"), np.ones(3, "i4"), 1), {}, "The model has 2 inputs, 'x', 'i', and 3 are given."),
        ((np.ones((2, 3), "f4"),), {"x": 1.0}, "Input 'x' is given twice, by position and by name."),
        (
            (np.ones((2, 3), "f4"),),
            {"j": 1.0, "i": np.ones(3, "i4")},
            "The feeds have 'j', but the model has no such input. Its inputs are 'x', 'i'.",
        ),
        (
            (np.ones((2, 3), "i4"), np.ones(3, "i4")),
            {},
            "Input 'x' has dtype float32, the feed int32. Feeds are not cast",
        ),
        (
            (np.ones((2, 3), "f4"), np.ones(3, "f4")),
            {},
            "Input 'i' has dtype int32, the feed float32. Feeds are not cast",
        ),
        ((np.ones((2, 3), "f4"), 2.5), {}, "Input 'i' has dtype int32, the feed float32"),
        (
            (np.ones((2, 3, 1), "f4"), np.ones(3, "i4")),
            {},
            "Input x: float32[2, N] has rank 2, the feed has shape (2, 3, 1)",
        ),
        ((np.ones((3, 3), "f4"), np.ones(3, "i4")), {}, "Input x: float32[2, N] has 2 elements on axis 0"),
        ((np.ones((2, 3), "f4"), np.ones(4, "i4")), {}, "Dimension 'N' is 3 on axis 1 of 'x' and 4 on axis 0 of 'i'"),
        (("text", np.ones(3, "i4")), {}, "Input 'x' is given as str, which is not an array of numbers."),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_what_does_not_fit_is_refused_before_anything_runs(given, named, said, jit, runs):
    f = function(parsed("f (float[2, N] x, int32[N] i) => (float[2, N] y) { c = Cast<to = 1>(i) y = Add(x, c) }"))
    if jit and any(isinstance(array, str) for array in given):
        pytest.skip("jit itself refuses a string")
    with pytest.raises(FeedError, match=re.escape(said)):
        (jax.jit(f) if jit else f)(*given, **named)
    assert not runs


def test_weights_that_do_not_fit_are_refused():
    f = ours()
    params, x, i = data()
    for given, said in (
        ((x, i), "The first argument is the dict of weights: f(f.params, ...)"),
        ((), "The first argument is the dict of weights"),
        (({**params, "u": x}, x, i), "'u' is no weight of this function. It has 'w', 'table', 'v'."),
        (({"w": params["w"]}, x, i), "No feed for table: float32[5, 4], v: float32[4, 2]"),
        (({**params, "w": x}, x, i), "Input w: float32[3, 4] has 3 elements on axis 0"),
        (({**params, "w": params["w"].astype("float16")}, x, i), "Input 'w' has dtype float32, the feed float16"),
    ):
        with pytest.raises(FeedError, match=re.escape(said)):
            f(*given)
    with pytest.raises(FeedError, match=r"'w' is a weight: put it into the dict that is the first argument\."):
        f(params, x, i, w=params["w"])


def test_python_numbers_take_the_type_of_the_input():
    f = function(
        parsed("f (float x, float16 h, int64 k) => (float y, float16 g, int64 m) { y = Neg(x) g = Neg(h) m = Neg(k) }")
    )
    y, g, m = f(2, 0.5, 3)
    assert (y, g, m) == (-2, -0.5, -3)
    assert (y.dtype, g.dtype, m.dtype) == (jnp.float32, jnp.float16, jnp.int32)
    np.testing.assert_array_equal(function(cube())([1.0, 2.0]), [1, 8])


def test_names_that_python_uses_itself():
    f = function(parsed("f (float[N] self, float[N] program) => (float[N] y) { y = Sub(self, program) }"))
    np.testing.assert_array_equal(f(program=jnp.ones(1), self=jnp.zeros(1)), [-1])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "f (string[N] x) => (string[N] y) { y = Identity(x) }",
            "Input 'x' is of strings, and JAX has arrays of numbers",
        ),
        ("f (seq(float[N]) x) => (float[M] y) { y = ConcatFromSequence<axis = 0>(x) }", "Input 'x' is a sequence"),
        ("f (float[N] x) => (seq(float[N]) y) { y = SequenceConstruct(x) }", "Output 'y' is a sequence"),
        ("f (complex64[N] x) => (complex64[N] y) { y = Identity(x) }", "Input 'x' is complex64"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(text, said):
    with pytest.raises(InvalidModelError, match=re.escape(said)):
        function(parsed(text))


def test_a_label_of_text_is_left_out_as_the_error_says():
    model = parsed("f (float[N] x) => (string[N] name, float[N] y) { name = Cast<to = 8>(x) y = Neg(x) }")
    with pytest.raises(InvalidModelError, match=r"Output 'name' is of strings.*refgrad\.select_model_inputs_outputs"):
        function(model)
    f = function(refgrad.select_model_inputs_outputs(model, outputs=["y"]))
    np.testing.assert_array_equal(f(jnp.ones(2)), [-1, -1])


@pytest.mark.parametrize(
    "text",
    [
        "f (float[N] x) => (float[N] y) { y = RandomNormalLike(x) }",
        "f (float[N] x, bool t) => (float[N] y) <float r = {0.5}> { y = Dropout(x, r, t) }",
        "f (float[N] x, bool t) => (float[N] y) { y = If(t) <then_branch = g () => (float[N] a) { a = Bernoulli(x) }, "
        "else_branch = h () => (float[N] b) { b = Neg(x) }> }",
    ],
)
def test_random_numbers_are_refused(text):
    with pytest.raises(OptionError, match=r"draws random numbers, and a function of JAX does not"):
        function(parsed(text))


def test_dropout_that_does_not_train_is_not_random():
    for text in (
        "f (float[N] x) => (float[N] y) { y = Dropout(x) }",
        "f (float[N] x) => (float[N] y) <float r = {0.5}, bool t = {0}> { y = Dropout(x, r, t) }",
    ):
        np.testing.assert_array_equal(function(parsed(text))(jnp.ones(3)), [1, 1, 1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kinks": "jax"}, "There is no choice of kinks 'jax'; there are 'refgrad', 'torch', 'onnxruntime'."),
        ({"quantization": "none"}, "There is no quantization 'none'"),
    ],
)
def test_options_are_checked(arguments, said):
    with pytest.raises(OptionError, match=re.escape(said)):
        function(cube(), **arguments)


def test_a_backend_that_is_not_there_is_named():
    with pytest.raises(BackendError, match=r"There is no executor 'xla'"):
        refgrad.jax.function(cube(), backend="xla")
    f = refgrad.jax.function(cube(), backend="numpy", options={"threads": 1})
    with pytest.raises(OptionError, match=r"Executor 'numpy' has no option \['threads'\]"):
        f(jnp.ones(2))


@pytest.mark.parametrize(("kinks", "slope"), [("refgrad", 0), ("torch", np.nan)])
def test_kinks_are_those_that_are_chosen(kinks, slope):
    f = function(parsed("f (float[N] x) => (float[1] y) { y = ReduceLogSumExp(x) }"), kinks=kinks, backend="numpy")
    np.testing.assert_array_equal(jax.grad(lambda x: f(x)[0])(jnp.full(2, -jnp.inf)), [slope, slope])


def test_double_needs_the_64_bit_mode():
    for text in (
        "f (double[N] x) => (double[N] y) { y = Neg(x) }",
        "f (float[N] x) => (double[N] y) { y = Cast<to = 11>(x) }",
    ):
        with pytest.raises(OptionError, match=r"is float64, which JAX has in its 64-bit mode alone.*jax_enable_x64"):
            function(parsed(text))(jnp.ones(2))
    with pytest.raises(OptionError, match=r"'w' is float64"):
        ours("float64")
    with jax.enable_x64(True):
        assert function(cube("double"))(jnp.arange(3.0)).dtype == jnp.float64
        with pytest.raises(FeedError, match=r"Input 'x' has dtype float32, the feed float64"):
            function(cube())(jnp.arange(3.0))


def test_the_64_bit_mode_of_a_thread_is_that_of_its_calls():
    """JAX may call the executor in another thread, which does not have the mode of this one."""
    with jax.enable_x64(True):
        f = function(parsed("f (double[N] x, int64[N] i) => (double[N] y, int64[N] j) { y = Neg(x) j = Neg(i) }"))
        called = jax.jit(lambda x, i: [f(jnp.sin(x + k), i + k) for k in range(20)])
        for _ in range(20):
            results = called(jnp.arange(5.0), jnp.array([2**40] * 5))
            jax.block_until_ready(results)
        y, j = results[3]
        np.testing.assert_allclose(y, -np.sin(np.arange(5.0) + 3), rtol=1e-15)
        assert j.tolist() == [-(2**40) - 3] * 5


def test_integers_are_64_bits_wide_in_the_model_alone():
    f = function(parsed("f (int64[N] i, uint64[N] u) => (int64[N] a, uint64[N] b) { a = Mul(i, i) b = Mul(u, u) }"))
    a, b = f(jnp.array([-3, 4]), jnp.array([5, 6], jnp.uint32))
    assert (a.tolist(), b.tolist()) == ([9, 16], [25, 36])
    assert (a.dtype, b.dtype) == (jnp.int32, jnp.uint32)
    with pytest.raises(Exception, match=r"Output 'a' has values that int32 cannot hold, in int64\. Set jax_enable_x64"):
        jax.block_until_ready(f(jnp.array([2**20]), jnp.array([0], jnp.uint32)))
    with jax.enable_x64(True):
        assert f(jnp.array([2**20]), jnp.array([0], jnp.uint64))[0] == 2**40


# Models whose outputs depend on less than one might think, or in bodies, and the same in jax.numpy.
PARTIAL = {
    "an input that nothing reads": ("f (float[N] x, float[N] z) => (float[N] y) { y = Mul(x, x) }", lambda x, z: x * x),
    "an output that is an input": (
        "f (float[N] x, float[N] z) => (float[N] x, float[N] y) { y = Mul(x, z) }",
        lambda x, z: (x, x * z),
    ),
    "an output that is constant": (
        "f (float[N] x, float[N] z) => (float[2] c, float[N] y) { c = Constant<value_floats = [1.0, 2.0]>() y = Mul(x, z) }",
        lambda x, z: (jnp.array([1.0, 2.0]), x * z),
    ),
    "outputs that share a part": (
        "f (float[N] x, float[N] z) => (float[N] y, float[N] w) { y = Mul(x, z) w = Mul(y, x) }",
        lambda x, z: (x * z, x * x * z),
    ),
    "a Loop": (
        "f (float[N] x, float[N] z) => (float[N] y) <int64 n = {3}, bool t = {1}> { y = Loop(n, t, x) <body = b "
        "(int64 k, bool c, float[N] s) => (bool d, float[N] r) { d = Identity(c) r = Mul(s, z) }> }",
        lambda x, z: x * z**3,
    ),
    "an If": (
        "f (float[N] x, float[N] z) => (float[N] y) <float o = {0}, int64[1] a = {0}> { s = ReduceSum<keepdims = 0>(x, a) "
        "c = Less(o, s) y = If(c) <then_branch = g () => (float[N] u) { u = Mul(x, z) }, "
        "else_branch = h () => (float[N] v) { v = Neg(z) }> }",
        lambda x, z: jax.lax.cond(x.sum() > 0, lambda: x * z, lambda: -z),
    ),
}


@pytest.mark.parametrize("what", PARTIAL)
@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives_of_what_depends_on_less(what, backend):
    text, g = PARTIAL[what]
    f = function(parsed(text), backend=backend)
    x, z = jnp.array([1.0, -2.0, 3.0]), jnp.array([0.5, 1.0, 2.0])

    def square(h):
        return lambda *arrays: sum((y**2).sum() for y in jax.tree.leaves(h(*arrays)))

    assert_same(f(x, z), g(x, z))
    for derivative in (
        lambda h: jax.grad(square(h), argnums=(0, 1)),
        lambda h: jax.jacfwd(h, argnums=(0, 1)),
        lambda h: jax.hessian(square(h), argnums=(0, 1)),
    ):
        assert_same(derivative(f)(x, z), derivative(g)(x, z))


def test_an_output_that_is_a_weight():
    model = parsed("f (float[2] x) => (float[2] y, float[2] w) <float[2] w = {1, 2}> { y = Mul(x, w) }")
    f = function(model, trainable=["w"])
    slopes = jax.grad(lambda params, x: sum(y.sum() for y in f(params, x)))(f.params, jnp.array([3.0, 4.0]))
    np.testing.assert_array_equal(slopes["w"], [4, 5])


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_sixteen_bits(kind):
    f = function(cube(kind), backend="numpy")
    x = jnp.arange(3.0).astype(kind)
    for found, expected in zip(jax.jvp(f, (x,), (x,)), ([0, 1, 8], [0, 3, 24]), strict=True):
        assert found.dtype == kind
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(x), [0, 3, 12])


def test_integers_and_booleans_have_no_gradient():
    f = function(
        parsed("f (bool[N] b, int32[N] i) => (float[N] y, bool[N] c) { s = Cast<to = 1>(i) y = Neg(s) c = Not(b) }")
    )
    b, i = jnp.array([True]), jnp.array([3])
    assert jax.grad(lambda i: f(b, i)[0].sum(), allow_int=True)(i).dtype == jax.dtypes.float0
    (y, c), (dy, dc) = jax.jvp(f, (b, i), (np.zeros(1, jax.dtypes.float0), np.zeros(1, jax.dtypes.float0)))
    assert (y, c, dy, dc.dtype) == (-3, False, 0, jax.dtypes.float0)


def test_an_output_without_a_derivative_leaves_the_others_theirs():
    f = function(parsed("f (float[2, 2] x) => (float y, float[2, 2] z) { d = Neg(x) y = Det(d) z = Mul(x, x) }"))
    x = jnp.eye(2)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x)[1].sum())(x), 2 * x)


def test_an_operator_without_a_derivative_is_named():
    text = (
        '<ir_version: 10, opset_import: ["": 21, "other": 1]> f (float[N] x) => (float[N] y) { y = other.Mystery(x) }'
    )
    f = function(onnx.parser.parse_model(text))
    with pytest.raises((NoGradientError, BackendError), match="Mystery"):
        jax.grad(lambda x: f(x).sum())(jnp.ones(2))


def test_shapes_are_inferred_or_tried():
    text = """f (float[N, 4] x) => (float[A, B] y) {
        s = Shape(x)  i = Constant<value_ints = [1, 0]>()  r = Gather(s, i)  y = Reshape(x, r) }"""
    f = function(parsed(text))
    assert jax.eval_shape(f, jnp.ones((3, 4))).shape == (4, 3)
    assert jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))(jnp.ones((2, 4))).shape == (2, 4)
    hidden = """f (float[N] x) => (float[M] y) {
        n = Shape(x)  c = Cast<to = 1>(n)  q = Mul(c, c)  k = Cast<to = 7>(q)  y = Expand(one, k) }"""
    f = function(parsed(hidden, one=np.ones(1, "f4")))
    assert jax.eval_shape(f, jnp.ones(3)).shape == (9,)


@pytest.mark.parametrize(
    "text",
    [
        "f (float[N] x) => (int64[1, M] y) { y = NonZero(x) }",
        "f (float[N] x, int64 n) => (float[M] y) <int64 o = {1}, int64 z = {0}> { r = Range(z, n, o) y = Cast<to = 1>(r) }",
        "f (float[N] x, int64 n) => (float[M] y) <int64 z = {0}> { r = Range(z, n, n) y = Cast<to = 1>(r) }",
    ],
)
def test_shapes_that_depend_on_values_are_refused_before_anything_runs(text, runs):
    f = function(parsed(text))
    with pytest.raises(InvalidModelError, match=r"The shape of output 'y' depends on the values of the inputs"):
        f(*[jnp.ones(3), 2][: len(f.inputs)])
    assert not runs


def test_a_shape_that_the_model_declares_wrongly_is_told():
    f = function(parsed("f (float[N] x) => (float[4] y) { y = Neg(x) }"), backend="numpy")
    with pytest.raises(Exception, match=r"Output 'y' has shape \(3,\), where \(4,\) was inferred"):
        jax.block_until_ready(f(jnp.ones(3)))


def test_inputs_of_any_rank():
    model = parsed("f (float[N] x) => (float y) { s = Mul(x, x) y = ReduceSum<keepdims = 0>(s) }")
    model.graph.input[0].type.tensor_type.ClearField("shape")
    f = function(model)
    x = jnp.arange(4.0).reshape(2, 2)
    assert f(x) == 14
    np.testing.assert_array_equal(jax.grad(f)(x), 2 * x)


def test_empty_arrays():
    f = function(cube())
    assert f(jnp.zeros(0)).shape == (0,)
    for g in (f, function(cube(), batch_axis=0)):
        assert jax.vmap(g)(jnp.zeros((0, 3))).shape == (0, 3)
        assert jax.vmap(g)(jnp.zeros((3, 0))).shape == (3, 0)
    assert jax.grad(lambda x: f(x).sum())(jnp.zeros(0)).shape == (0,)


def test_large_arrays_do_not_wait_for_each_other():
    f = function(cube())
    x = jnp.ones(5_000_000)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: f(f(x)).sum()))(x)[:2], [9, 9])


def test_a_function_ends_when_nobody_needs_it():
    f = function(cube())
    jax.hessian(lambda x, f=f: f(x).sum())(jnp.ones(2))
    root = weakref.ref(f._root)
    del f
    jax.clear_caches()
    gc.collect()
    assert root() is None


def run(code, folder, **env):
    """The output of a program in a process of its own, in an empty folder."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=os.environ | env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_arrays_on_several_devices(tmp_path):
    code = f"""
import jax, jax.numpy as jnp, onnx.parser, refgrad.jax
model = onnx.parser.parse_model('''{HEAD} f (float[N] x) => (float[N] y) {{ y = Mul(x, x) }}''')
f = refgrad.jax.function(model, backend="numpy")
mesh = jax.make_mesh((2,), ("a",))
x = jax.device_put(jnp.arange(4.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a")))
print(len(x.devices()), jax.jit(f)(x).tolist(), jax.jit(jax.grad(lambda x: f(x).sum()))(x).tolist())
mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
specs = jax.sharding.PartitionSpec("a")
g = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
print(jax.jit(jax.grad(lambda x: g(x).sum()))(jnp.arange(4.0)).tolist())
"""
    said = run(code, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert said == "2 [0.0, 1.0, 4.0, 9.0] [0.0, 2.0, 4.0, 6.0]\n[0.0, 2.0, 4.0, 6.0]\n"


def test_derivatives_in_shard_map_are_those_of_a_function_of_jax_numpy(tmp_path):
    """With check_vma JAX adds up the gradients of replicated arguments over the axes along which the results vary."""
    code = f"""
import jax, jax.numpy as jnp, numpy as np, onnx.parser, refgrad.jax
from jax.sharding import PartitionSpec as P
text = '''{HEAD} f (float[N, 4] x, float[4, 3] w) => (float[N, 3] y) {{ a = MatMul(x, w)  y = Tanh(a) }}'''
model, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
x, w, v = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((6, 4), (4, 3), (4, 3)))
mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
specs = dict(mesh=mesh, in_specs=(P(), P("a")), out_specs=P())
ours, theirs = refgrad.jax.function(model, backend="numpy"), lambda x, w: jnp.tanh(x @ w)
for check in (True, False):
    found = []
    for f in (ours, theirs):
        loss = lambda w, x: (f(x, w) ** 2).mean()
        mean = jax.shard_map(lambda w, x: jax.lax.pmean(loss(w, x), "a"), check_vma=check, **specs)
        inner = jax.shard_map(lambda w, x: jax.lax.pmean(jax.grad(loss)(w, x), "a"), check_vma=check, **specs)
        slope = jax.jit(jax.grad(mean))
        found.append([mean(w, x), slope(w, x), inner(w, x), jax.jvp(lambda w: slope(w, x), (w,), (v,))[1]])
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, atol=1e-6)
    np.testing.assert_allclose(slope(w, x), jax.grad(loss)(w, x), atol=1e-6)
"""
    run(code, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=2")


def test_without_jax_the_error_says_what_to_install(tmp_path):
    code = """
import sys
sys.modules["jax"] = None
try:
    import refgrad.jax
except ImportError as error:
    print(error)
"""
    assert run(code, tmp_path) == "refgrad.jax needs JAX. Install it: pip install '.[jax]' in a checkout of refgrad.\n"


@pytest.mark.parametrize("arrays", sorted(MODELS.glob("*.npz")), ids=lambda file: file.stem)
def test_exports_have_the_gradients_of_autograd(arrays, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    row = importlib.import_module("jax_exports").measured(arrays.with_suffix(".onnx"))
    assert max(float(row["input"]), float(row["weights"])) <= 1e-5


def test_the_examples_of_docstrings_run():
    failed, count = doctest.testmod(importlib.import_module("refgrad.jax.function"))
    assert count > 4
    assert not failed


def test_the_page_runs_from_an_empty_folder(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    failed, count = doctest.testfile(str(ROOT / "docs" / "jax.md"), module_relative=False)
    assert count > 30
    assert not failed
    assert (tmp_path / "saliency.png").read_bytes().startswith(b"\x89PNG")


def test_quantization_is_taken() -> None:
    rounded = parsed(
        "g (float[N] x) => (float[N] y) <float s = {0.5}, int8 z = {0}> "
        "{ q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Mul(d, d) }"
    )
    f = function(rounded, quantization="straight-through", backend="numpy")
    x = np.array([0.3, 1.1, -2.0], np.float32)
    assert jax.grad(lambda x: f(x).sum())(x).tolist() == (2 * np.round(x / 0.5) * 0.5).tolist()
    with pytest.raises(OptionError, match="no quantization 'ste'; there are 'zero'"):
        function(rounded, quantization="ste")
