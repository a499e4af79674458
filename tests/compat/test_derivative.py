"""onnx_derivative and random_feed: the graphs that were documented, ONNX Runtime's, the numbers, and every bad input."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper

import refgrad
from refgrad import DerivativeOptions, onnx_derivative, random_feed
from refgrad.backends import get_backend
from refgrad.conformance.tools.parity.structure import compare
from refgrad.derivatives import ortbuilder
from refgrad.errors import (
    BuilderError,
    FeedError,
    InvalidModelError,
    NoGradientError,
    OptionError,
    OptionTypeError,
    OutputFileError,
    RefgradError,
    UnknownNameError,
)
from refgrad.show import demo

Zero = DerivativeOptions.Zero
KeepYieldOp, KeepOutputs, FillGrad, Loss = DerivativeOptions
FILLED = KeepOutputs | FillGrad
needs_training = pytest.mark.skipif(not ortbuilder.available(), reason="needs onnxruntime-training")


def model(text: str) -> ModelProto:
    return onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 15, "com.microsoft" : 1]> g ' + text)


ADD = model("(float[?, 10] X) => (float[?, 10] Y) <float[1] Ad_Addcst = {2}> { [Ad_Add] Y = Add(X, Ad_Addcst) }")

# Six nodes of the documented graph, in all of its forms.
BACKWARD = """
    Ad_Add_Grad_Shape_Ad_Addcst = Shape(Ad_Addcst)
    Ad_Add_Grad_Shape_X = Shape(X)
    Ad_Add_Grad_ReduceAxes_X, Ad_Add_Grad_ReduceAxes_Ad_Addcst =
        com.microsoft.BroadcastGradientArgs(Ad_Add_Grad_Shape_X, Ad_Add_Grad_Shape_Ad_Addcst)
    Ad_Add_Grad_ReduceSum_Y_grad_for_Ad_Addcst =
        ReduceSum <keepdims = 1, noop_with_empty_axes = 1> (Y_grad, Ad_Add_Grad_ReduceAxes_Ad_Addcst)
    Ad_Addcst_grad =
        Reshape <allowzero = 0> (Ad_Add_Grad_ReduceSum_Y_grad_for_Ad_Addcst, Ad_Add_Grad_Shape_Ad_Addcst)
    Ad_Add_Grad_ReduceSum_Y_grad_for_X =
        ReduceSum <keepdims = 1, noop_with_empty_axes = 1> (Y_grad, Ad_Add_Grad_ReduceAxes_X)
    X_grad = Reshape <allowzero = 0> (Ad_Add_Grad_ReduceSum_Y_grad_for_X, Ad_Add_Grad_Shape_X)
"""
FORWARD = "Y = Add(X, Ad_Addcst)\n"
YIELD = "Y_grad = com.microsoft.YieldOp <full_shape_outputs = [0]> (Y)\n"
ONES = "Y_shape = Shape(Y)\n Y_grad = ConstantOfShape <value = float[1] {1}> (Y_shape)\n"
INPUTS, COTANGENT = "float[?, 10] X, float[1] Ad_Addcst", ", float[?, 10] Y_grad"
OUTPUTS, KEPT = "float[?, 10] X_grad, float[1] Ad_Addcst_grad", ", float[?, 10] Y"
DOCUMENTED = {
    KeepYieldOp: model(f"({INPUTS}) => ({OUTPUTS}) {{ {FORWARD}{YIELD}{BACKWARD} }}"),
    Zero: model(f"({INPUTS}{COTANGENT}) => ({OUTPUTS}) {{ {BACKWARD} }}"),
    KeepOutputs: model(f"({INPUTS}{COTANGENT}) => ({OUTPUTS}{KEPT}) {{ {FORWARD}{BACKWARD} }}"),
    FILLED: model(f"({INPUTS}) => ({OUTPUTS}{KEPT}) {{ {FORWARD}{ONES}{BACKWARD} }}"),
}


def declared(made):
    """Names, types and shapes, in order."""
    values = (made.graph.input, made.graph.output)
    return [[(v.name, v.type.SerializeToString()) for v in side] for side in values]


def names(made):
    return [v.name for v in made.graph.input], [v.name for v in made.graph.output]


def run(made, feeds):
    return get_backend("numpy").prepare(made).run(feeds)


@pytest.mark.parametrize("builder", ["refgrad", pytest.param("onnxruntime", marks=needs_training)])
@pytest.mark.parametrize("options", DOCUMENTED, ids=str)
def test_the_graphs_are_the_documented_ones(options, builder):
    made = onnx_derivative(ADD, options=options, builder=builder)
    expected = DOCUMENTED[options]
    assert declared(made) == declared(expected)
    assert not made.graph.initializer
    found = compare(made, expected, apart_from=["allowzero"])
    assert found.isomorphic, str(found)
    assert found.same_names
    assert sorted(n.op_type for n in made.graph.node) == sorted(n.op_type for n in expected.graph.node)


@pytest.mark.parametrize("dialect", ["ort", "onnx"])
@pytest.mark.parametrize("options", [Zero, KeepOutputs, FILLED], ids=str)
def test_the_numbers_of_the_sum(options, dialect):
    X = np.arange(30, dtype=np.float32).reshape(3, 10)
    feeds = {"X": X, "Ad_Addcst": np.float32([7])}
    cotangent = np.ones_like(X)
    if not options & FillGrad:
        cotangent = np.random.default_rng(0).normal(size=X.shape).astype(np.float32)
        feeds["Y_grad"] = cotangent
    results = run(onnx_derivative(ADD, options=options, dialect=dialect), feeds)
    np.testing.assert_array_equal(results.pop("X_grad"), cotangent)
    np.testing.assert_allclose(results.pop("Ad_Addcst_grad"), [cotangent.astype(np.float64).sum()], rtol=1e-5)
    if options & KeepOutputs:
        np.testing.assert_array_equal(results.pop("Y"), X + 7)
    assert not results


def test_dialect_onnx_has_no_training_operators():
    made = onnx_derivative(ADD, dialect="onnx")
    assert {node.domain for node in made.graph.node} == {""}


@pytest.mark.parametrize("builder", ["refgrad", pytest.param("onnxruntime", marks=needs_training)])
def test_inputs_and_outputs_are_those_of_the_notebook(builder):
    plain = onnx_derivative(demo.regression(loss=False), builder=builder)
    loss = refgrad.select_model_inputs_outputs(demo.regression(), outputs=["loss"])
    made = onnx_derivative(loss, options=FILLED, builder=builder)
    assert names(plain)[0] == ["x", "init", "init_1", "init_b10", "y_grad"]
    assert names(plain)[1] == ["x_grad", "init_grad", "init_1_grad", "init_b10_grad"]
    assert names(made)[0] == ["x", "label", "init", "init_1", "init_b10"]
    assert names(made)[1] == ["x_grad", "label_grad", "init_grad", "init_1_grad", "init_b10_grad", "loss"]


# y and z are floats, k is none; y is read on; z does not depend on w.
SEVERAL = model("""(float[N, 3] x, float[N, 3] u, int64[N] i) => (float[N, 3] y, int64[2] k, float[N, 3] z)
    <float[3] w = {1, 2, 3}, float[3] v = {4, 5, 6}, float[3] idle = {7, 8, 9}>
    { [a] t = Mul(x, w) [b] y = Mul(t, v) [c] k = Shape(y) [d] s = Mul(u, v) [e] r = Mul(s, u) [f] z = Add(r, u) }""")


class TestSeveralOutputs:
    def test_every_float_output_has_a_cotangent(self):
        made = onnx_derivative(SEVERAL)
        assert names(made)[0] == ["x", "u", "i", "w", "v", "y_grad", "z_grad"]
        assert names(made)[1] == ["x_grad", "u_grad", "w_grad", "v_grad"]

    @pytest.mark.parametrize("options", [KeepOutputs, FILLED], ids=str)
    def test_every_output_is_kept(self, options):
        assert names(onnx_derivative(SEVERAL, options=options))[1][-3:] == ["y", "k", "z"]

    def test_yield_returns_every_output(self):
        made = onnx_derivative(SEVERAL, options=KeepYieldOp)
        [node] = [node for node in made.graph.node if node.op_type == "YieldOp"]
        assert list(node.input) == ["y", "k", "z"]
        assert list(node.output) == ["y_grad", "z_grad"]
        attributes = {a.name: list(a.ints) for a in node.attribute}
        assert attributes == {"full_shape_outputs": [0, 1, 2], "non_differentiable_outputs": [1]}

    def test_inputs_and_weights_are_chosen(self):
        made = onnx_derivative(SEVERAL, ["v", "w"], ["x"])
        assert names(made)[0] == ["x", "u", "i", "v", "w", "y_grad", "z_grad"]
        assert names(made)[1] == ["x_grad", "v_grad", "w_grad"]
        assert names(onnx_derivative(SEVERAL, weights=["w"]))[1] == ["x_grad", "u_grad", "w_grad"]
        assert names(onnx_derivative(SEVERAL, inputs=["u"]))[1] == ["u_grad", "w_grad", "v_grad"]
        assert names(onnx_derivative(SEVERAL, weights=[]))[1] == ["x_grad", "u_grad"]
        assert names(onnx_derivative(SEVERAL, inputs=["u", "x"], weights=[]))[1] == ["x_grad", "u_grad"]

    def test_what_is_chosen_has_no_default_and_the_rest_has(self):
        made = onnx_derivative(SEVERAL, weights=["w"], options=KeepOutputs)
        assert {"w", "v"} & {t.name for t in made.graph.initializer} == {"v"}

    def test_what_no_output_depends_on_has_the_gradient_zero(self):
        made = onnx_derivative(SEVERAL, weights=["idle"], inputs=[], options=FILLED)
        feeds = random_feed(made.graph.input)
        np.testing.assert_array_equal(run(made, feeds)["idle_grad"], np.zeros(3, np.float32), strict=True)

    def test_the_numbers(self):
        made = onnx_derivative(SEVERAL, options=KeepOutputs)
        rng = np.random.default_rng(3)
        feeds = {
            v.name: rng.normal(size=(4, 3) if v.name not in "wv" else 3).astype(np.float32) for v in made.graph.input
        }
        feeds["i"] = np.arange(4)
        x, u, w, v, dy, dz = (feeds[name].astype(np.float64) for name in ("x", "u", "w", "v", "y_grad", "z_grad"))
        results = run(made, feeds)
        expected = {
            "y": x * w * v,
            "z": u * v * u + u,
            "x_grad": dy * w * v,
            "u_grad": dz * (2 * u * v + 1),
            "w_grad": (dy * x * v).sum(0),
            "v_grad": (dy * x * w + dz * u * u).sum(0),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(results[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        assert results["k"].tolist() == [4, 3]


# Models on which both builders are compared, and what is differentiated by.
SHARED = {
    "several outputs": (SEVERAL, ["w", "v"], ["x", "u"]),
    "an output that is read on": (
        model("(float[4, 3] x) => (float[4, 3] y, float[4, 3] z) <float[3] w = {1, 2, 3}> { [a] y = Mul(x, w) z = Exp(y) }"),
        ["w"],
        ["x"],
    ),
    "nodes without a name": (
        model("(float[2, 3] x) => (float[2, 3] z) <float[3] w = {1, 2, 3}> { y = Mul(x, w) v = Mul(y, w) z = Mul(v, y) }"),
        ["w"],
        ["x"],
    ),
    "regression": (demo.regression(loss=False), None, None),
    "regression with its loss": (demo.regression(), None, None),
    "elastic loss with penalties": (
        refgrad.add_loss_output(demo.regression(loss=False), "elastic", weight_name="w", penalty={"init": {"l1": 1, "l2": 2}}),
        None,
        None,
    ),
    "log loss": (
        refgrad.add_loss_output(
            model("(float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 4, 5}> { p = MatMul(x, w) y = Softmax(p) }"),
            "log",
        ),
        None,
        ["x"],
    ),
}  # fmt: skip


@needs_training
@pytest.mark.parametrize("options", [Zero, KeepOutputs, FILLED], ids=str)
@pytest.mark.parametrize("name", SHARED)
def test_both_builders_compute_the_same(name, options):
    forward, weights, inputs = SHARED[name]
    ours, theirs = (onnx_derivative(forward, weights, inputs, options, builder=b) for b in ("refgrad", "onnxruntime"))
    assert declared(ours) == declared(theirs)
    np.random.seed(0)
    feeds = random_feed(ours.graph.input, batch=4)
    runtime = get_backend("ort-cpu")
    expected = runtime.prepare(theirs).run(feeds)
    results = runtime.prepare(ours).run(feeds)
    assert list(results) == list(expected)
    for output, value in expected.items():
        np.testing.assert_allclose(results[output], value, rtol=1e-4, atol=1e-4, err_msg=output)


class TestLoss:
    def test_inputs_outputs_and_file(self, tmp_path):
        made = onnx_derivative(
            demo.regression(), options=Loss, loss="loss", label="label", path_name=tmp_path / "loss.onnx"
        )
        assert names(made)[0] == ["x", "label", "init", "init_1", "init_b10"]
        assert names(made)[1] == ["x_grad", "init_grad", "init_1_grad", "init_b10_grad", "loss"]
        assert onnx.load(tmp_path / "loss.onnx") == made

    @pytest.mark.parametrize("builder", ["refgrad", pytest.param("onnxruntime", marks=needs_training)])
    def test_the_numbers_are_those_of_the_notebook(self, tmp_path, builder):
        path = str(tmp_path / "loss.onnx")
        made = onnx_derivative(
            demo.regression(), options=Loss, loss="loss", label=["label"], path_name=path, builder=builder
        )
        results = run(made, demo.feeds())
        printed = {
            "init_grad": [[193.33316, 186.66649]],
            "init_1_grad": [[109.333244, 102.666565]],
            "init_b10_grad": [76.6666],
            "loss": [[532.5546]],
        }
        for name, value in printed.items():
            np.testing.assert_allclose(results[name], value, rtol=3e-7)

    def test_of_a_model_made_by_add_loss_output(self, tmp_path):
        forward = model("(float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }")
        with_loss = refgrad.add_loss_output(forward, "elastic", penalty={"w": {"l1": 0.5, "l2": 0.25}})
        made = onnx_derivative(
            with_loss, inputs=[], options=Loss, loss="loss", label="label", path_name=tmp_path / "loss.onnx"
        )
        assert names(made) == (["x", "label", "w"], ["w_grad", "loss"])
        feeds = {"x": np.float32([[1, 2], [3, 4]]), "label": np.float32([[0], [1]]), "w": np.float32([[1], [-2]])}
        difference = np.array([-3.0, -6.0])
        results = run(made, feeds)
        loss = np.sum(np.abs(difference) + difference**2) / 2 + 0.5 * 3 + 0.25 * 5
        np.testing.assert_allclose(results["loss"], [[loss]])
        slope = np.sign(difference) / 2 + difference
        expected = feeds["x"].T @ slope[:, None] + 0.5 * np.sign(feeds["w"]) + 0.5 * feeds["w"]
        np.testing.assert_allclose(results["w_grad"], expected)

    @pytest.mark.parametrize("builder", ["refgrad", pytest.param("onnxruntime", marks=needs_training)])
    def test_a_file_with_external_data(self, tmp_path, builder):
        path = tmp_path / "model.onnx"
        large = model(
            "(float[N, 300] x, float[N, 1] label) => (float[1, 1] loss) { "
            "y = MatMul(x, w) d = Sub(y, label) e = Mul(d, d) f = Mul(e, c) loss = ReduceSum(f) }"
        )
        for name in "wc":
            value = np.full((300, 1) if name == "w" else (1, 1), 2, np.float32)
            large.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
        onnx.save(large, path, save_as_external_data=True, location="weights", size_threshold=0)
        target = tmp_path / "grad.onnx"
        made = onnx_derivative(path, options=Loss, loss="loss", label="label", path_name=target, builder=builder)
        assert names(made)[1] == ["x_grad", "w_grad", "c_grad", "loss"]
        feeds = {"x": np.zeros((1, 300)), "label": np.ones((1, 1)), "w": np.ones((300, 1)), "c": np.full((1, 1), 3)}
        results = run(target, {name: value.astype(np.float32) for name, value in feeds.items()})
        assert results["loss"].item() == 3

    def test_loss_is_no_sum_of_other_options(self):
        assert not Loss & (KeepYieldOp | KeepOutputs | FillGrad)


def test_weights_are_in_the_order_of_the_model_whatever_their_sizes():
    forward = model(
        "(float[N, 300] x) => (float[N, 1] y) <float[1] b = {1}> { p = MatMul(x, w) q = Add(p, b) y = Mul(q, a) }"
    )
    for name, shape in (("w", (300, 1)), ("a", (1,))):
        forward.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    assert names(onnx_derivative(forward))[1] == ["x_grad", "b_grad", "w_grad", "a_grad"]


def test_local_functions():
    text = """<ir_version: 8, opset_import: ["" : 15, "mine" : 1]> g (float[N, 3] x) => (float[N, 3] y)
        <float[3] w = {1, 2, 3}> { y = mine.scaled(x, w) }
        <domain: "mine", opset_import: ["" : 15]> scaled (x, w) => (y) { y = Mul(x, w) }"""
    forward = onnx.parser.parse_model(text)
    before = forward.SerializeToString()
    made = onnx_derivative(forward, options=FILLED)
    assert forward.SerializeToString() == before
    results = run(made, {"x": np.ones((2, 3), np.float32), "w": np.float32([1, 2, 3])})
    np.testing.assert_array_equal(results["w_grad"], [2, 2, 2])


def test_verbose_says_what_is_done(capsys):
    onnx_derivative(ADD)
    assert not capsys.readouterr().out
    onnx_derivative(ADD, verbose=1)
    assert capsys.readouterr().out == "[onnx_derivative] refgrad: 1 nodes by X, Ad_Addcst: 7 nodes\n"


@pytest.mark.skipif(ortbuilder.available(), reason="needs an onnxruntime without builders")
def test_a_builder_that_is_not_installed(tmp_path):
    """It is asked for before weights are read."""
    onnx.save(ADD, tmp_path / "add.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").write_bytes(b"")
    for given in (ADD, tmp_path / "add.onnx"):
        with pytest.raises(BuilderError, match=r"Install onnxruntime-training-cpu==1\.19\.2"):
            onnx_derivative(given, builder="onnxruntime")


LOSS = {"options": Loss, "loss": "loss", "label": "label", "path_name": "/nowhere/loss.onnx"}
BAD = {
    "FillGrad alone": (ADD, {"options": FillGrad}, OptionError, "FillGrad needs KeepOutputs"),
    "KeepYieldOp with outputs": (ADD, {"options": KeepYieldOp | KeepOutputs}, OptionError, "KeepYieldOp stands alone"),
    "KeepYieldOp with ones": (ADD, {"options": KeepYieldOp | FillGrad}, OptionError, "KeepYieldOp stands alone"),
    "an integer": (ADD, {"options": 2}, OptionTypeError, "options are DerivativeOptions, not int"),
    "no options": (ADD, {"options": None}, OptionTypeError, "options are DerivativeOptions, not NoneType"),
    "Loss without loss": (ADD, LOSS | {"loss": None}, OptionError, "Loss needs loss"),
    "Loss without label": (ADD, LOSS | {"label": None}, OptionError, "Loss needs label"),
    "Loss without path_name": (ADD, LOSS | {"path_name": None}, OptionError, "Loss needs path_name"),
    "Loss with weights": (ADD, LOSS | {"weights": ["Ad_Addcst"]}, OptionError, "leave weights out"),
    "Loss with more": (ADD, LOSS | {"options": Loss | KeepOutputs}, OptionError, "Loss stands alone"),
    "loss that is none": (demo.regression(), LOSS | {"loss": "y2"}, UnknownNameError, "not an output. Did you mean 'y'"),
    "loss within": (demo.regression(), LOSS | {"loss": "loss_diff"}, UnknownNameError, "'loss_diff' is not an output"),
    "label that is none": (demo.regression(), LOSS | {"label": "lable"}, UnknownNameError, "Did you mean 'label'"),
    "gradient of the label": (demo.regression(), LOSS | {"inputs": ["label"]}, UnknownNameError, "is not a float input"),
    "nowhere to save": (demo.regression(), LOSS, OutputFileError, "no folder '/nowhere'"),
    "loss without Loss": (ADD, {"loss": "Y"}, OptionError, "loss is for options=DerivativeOptions.Loss"),
    "label without Loss": (ADD, {"label": "X"}, OptionError, "label is for"),
    "path_name without Loss": (ADD, {"path_name": "x.onnx"}, OptionError, "path_name is for"),
    "unknown weight": (ADD, {"weights": ["Ad_Add"]}, UnknownNameError, "not a float initializer. Did you mean 'Ad_Addcst'"),
    "input as weight": (ADD, {"weights": ["X"]}, UnknownNameError, "'X' is not a float initializer"),
    "integer as weight": (
        model("(float[N] x) => (float[N] y) <int64[1] shape = {-1}> { y = Reshape(x, shape) }"), {"weights": ["shape"]},
        NoGradientError, "'shape' in weights is INT64, and only floats have gradients",
    ),
    "weight as input": (ADD, {"inputs": ["Ad_Addcst"]}, UnknownNameError, "'Ad_Addcst' is not a float input .* has: 'X'"),
    "integers": (SEVERAL, {"inputs": ["i"]}, UnknownNameError, "'i' is not a float input"),
    "a name twice": (ADD, {"inputs": ["X", "X"]}, UnknownNameError, "a name twice"),
    "a string": (ADD, {"weights": "Ad_Addcst"}, OptionError, "weights is a list of names, not 'Ad_Addcst'"),
    "nothing": (ADD, {"weights": [], "inputs": []}, OptionError, "wrt is empty"),
    "unknown builder": (ADD, {"builder": "ort"}, OptionError, "no builder 'ort'; there are 'refgrad', 'onnxruntime'"),
    "unknown dialect": (ADD, {"dialect": "torch"}, OptionError, "no dialect 'torch'"),
    "YieldOp in ai.onnx": (ADD, {"options": KeepYieldOp, "dialect": "onnx"}, OptionError, "needs dialect='ort'"),
    "dialect of a builder": (ADD, {"builder": "onnxruntime", "dialect": "onnx"}, OptionError, "has no dialect 'onnx'"),
    "no derivative": (
        model("(float[N] x) => (float[N] y) { s = Cast <to = 8> (x) y = Cast <to = 1> (s) }"), {}, NoGradientError, "Cast",
    ),
    "no model": ("nowhere.onnx", {}, InvalidModelError, "There is no file 'nowhere.onnx'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error(name):
    given, arguments, error, message = BAD[name]
    with pytest.raises(error, match=message) as raised:
        onnx_derivative(given, **arguments)
    assert isinstance(raised.value, RefgradError)


def test_errors_are_of_the_builtin_kinds_too():
    assert issubclass(OptionError, ValueError)
    assert issubclass(OptionTypeError, TypeError)


# Feeds.

DTYPES = {
    kind: helper.tensor_dtype_to_np_dtype(kind)
    for kind in TensorProto.DataType.values()
    if kind not in (TensorProto.UNDEFINED, TensorProto.STRING)
}


@pytest.mark.parametrize("kind", DTYPES)
def test_feeds_have_the_declared_type(kind):
    value = random_feed([helper.make_tensor_value_info("x", kind, [None, 40])])["x"]
    assert value.dtype == DTYPES[kind]
    assert value.shape == (10, 40)
    if kind not in (TensorProto.FLOAT8E8M0, TensorProto.BOOL):
        assert len(np.unique(value.astype(np.complex128))) > 1


def test_feeds_of_strings():
    value = random_feed([helper.make_tensor_value_info("x", TensorProto.STRING, [3])])["x"]
    assert value.dtype == object
    assert all(isinstance(v, str) for v in value)


@pytest.mark.parametrize(
    ("dims", "options", "shape"),
    [
        ([], {}, ()),
        ([4], {}, (4,)),
        ([None], {}, (10,)),
        (["N", 3], {"batch": 5}, (5, 3)),
        ([None, None, 2], {"empty_dimension": 4}, (10, 4, 2)),
        ([0, 2], {"empty_dimension": 4}, (4, 2)),
        ([0, 0], {}, (1, 1)),
        (["N", "N"], {"batch": 3}, (3, 3)),
    ],
)
def test_feeds_have_the_declared_shape(dims, options, shape):
    assert random_feed([helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)], **options)["x"].shape == shape


def test_a_named_dimension_has_one_size():
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in (("a", "NM"), ("b", "MN"))]
    feeds = random_feed(inputs, batch=7, empty_dimension=2)
    assert {name: value.shape for name, value in feeds.items()} == {"a": (7, 2), "b": (2, 7)}


def test_feeds_can_be_repeated():
    inputs = ADD.graph.input
    np.random.seed(5)
    first = random_feed(inputs)["X"]
    np.random.seed(5)
    np.testing.assert_array_equal(random_feed(inputs)["X"], first)


@pytest.mark.parametrize(
    "value",
    [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, None),
        helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, [2]),
    ],
)
def test_feeds_that_cannot_be_drawn(value):
    with pytest.raises(FeedError, match="'x' is not declared as a tensor of known rank"):
        random_feed([value])


def described(kind, dims):
    """An input as onnxruntime's sessions describe it."""
    return SimpleNamespace(name="x", type=kind, shape=dims)


@pytest.mark.parametrize("kind", [*DTYPES, TensorProto.STRING])
def test_feeds_of_what_a_session_describes(kind):
    np.random.seed(0)
    [expected] = random_feed([helper.make_tensor_value_info("x", kind, ["N", None, 2])], batch=3).values()
    np.random.seed(0)
    name = TensorProto.DataType.Name(kind).lower()
    [value] = random_feed([described(f"tensor({name})", ["N", None, 2])], batch=3).values()
    assert value.tolist() == expected.tolist() or kind == TensorProto.FLOAT8E8M0  # it has no negative numbers, but nan
    assert (value.dtype, value.shape) == (expected.dtype, expected.shape)


@pytest.mark.parametrize(
    "kind", ["seq(tensor(float))", "optional(tensor(float))", "sparse_tensor(float)", "tensor(no)"]
)
def test_feeds_of_what_no_session_takes_as_an_array(kind):
    with pytest.raises(FeedError, match="'x' is not declared as a tensor of known rank: make its value yourself"):
        random_feed([described(kind, [2])])


def test_feeds_of_what_describes_no_input():
    with pytest.raises(
        FeedError, match=r"'x' does not describe an input: give model\.graph\.input, or session\.get_inputs\(\)"
    ):
        random_feed(["x"])


def test_feeds_of_a_session():
    onnxruntime = pytest.importorskip("onnxruntime")
    made = onnx_derivative(ADD, dialect="onnx", options=DerivativeOptions.KeepOutputs)
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = random_feed(session.get_inputs(), batch=4)
    assert {name: value.shape for name, value in feeds.items()} == {
        name: value.shape for name, value in random_feed(made.graph.input, batch=4).items()
    }
    assert len(session.run(None, feeds)) == len(made.graph.output)


def test_the_names_of_the_documents_are_public():
    for name in ("DerivativeOptions", "onnx_derivative", "random_feed", "add_loss_output", "penalty_loss_onnx"):
        assert name in refgrad.__all__
