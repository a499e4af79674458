"""Gradients that are 0 whatever is fed: who says so, where, and what it advises."""

from __future__ import annotations

import json
import re
import sys
import warnings

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, helper

import refgrad
from refgrad import recipes
from refgrad.cli import main
from refgrad.errors import ModelWarning, UnknownNameError
from refgrad.notices import quiet
from refgrad.training import SGD, step_model

pytestmark = pytest.mark.interpreter


def _model(body: str, inputs: str = "float[N, 3] x", outputs: str = "float[N, 3] y", weights: str = "") -> ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 3]> g ({inputs}) => ({outputs}) {weights} {{ {body} }}'
    )


def _trees() -> ModelProto:
    """One tree of one split behind a Mul."""
    model = _model("two = Mul(x, x)", outputs="float[N, 1] y")
    tree = helper.make_node(
        "TreeEnsembleRegressor", ["two"], ["y"], "forest", domain="ai.onnx.ml",
        nodes_featureids=[0, 0, 0], nodes_values=[0.5, 0.0, 0.0], nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
        nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2], nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0],
        target_ids=[0, 0], target_nodeids=[1, 2], target_treeids=[0, 0], target_weights=[1.0, 2.0], n_targets=1,
    )  # fmt: skip
    model.graph.node.append(tree)
    return model


PLAIN = _model("y = Mul(x, w)", weights="<float[3] w = {1, 2, 3}>")
ARGMAX = _model("s = MatMul(x, w)  k = ArgMax <axis = 1> (s)  y = Cast <to = 1> (k)",
                outputs="float[N, 1] y", weights="<float[3, 2] w = {1, 2, 3, 4, 5, 6}>")  # fmt: skip
TOP = _model("k = Constant <value_ints = [1]> ()  best, place = TopK(x, k)  y = Cast <to = 1> (place)",
             outputs="float[N, 1] y")  # fmt: skip


def _said(function, *arguments, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        function(*arguments, **options)
    assert all(issubclass(one.category, ModelWarning) and one.filename == __file__ for one in met)
    return [str(one.message) for one in met]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            _trees(),
            "The gradient of 'x' is always 0: no derivative passes through ai.onnx.ml.TreeEnsembleRegressor (node "
            "'forest': piecewise constant: zero wherever it has a derivative). Take differences over a distance that crosses "
            "thresholds of the trees, or train a smooth model on their results and differentiate that one.",
        ),
        (
            ARGMAX,
            "The gradient of 'x' is always 0: no derivative passes through ArgMax (node 'ArgMax_1': the result is an index). "
            "Differentiate what it reads, 's': refgrad.select_model_inputs_outputs(model, ['s']) makes an output of it.",
        ),
        (
            TOP,
            "The gradient of 'x' is always 0: no derivative passes through TopK (node 'TopK_1': its result 'place' is "
            "no float). Choose other inputs or outputs: wrt=[...] or outputs=[...].",
        ),
        (
            _model("s = Constant <value_float = 0.1> ()  z = Constant <value = int8 {0}> ()  q = QuantizeLinear(x, s, z)"
                   "  y = DequantizeLinear(q, s, z)"),
            "The gradient of 'x' is always 0: no derivative passes through QuantizeLinear (node 'QuantizeLinear_2': "
            "rounding is piecewise constant). Use quantization='straight-through' or quantization='clipped'.",
        ),
    ],
    ids=["trees", "ArgMax", "TopK", "quantization"],
)  # fmt: skip
def test_the_operator_that_stops_a_derivative_is_named(model: ModelProto, expected: str) -> None:
    said = _said(refgrad.gradient, model)
    assert said == [expected]
    assert [str(zero) for zero in refgrad.preflight(model).zeros] == said


def test_a_derivative_that_passes_says_nothing() -> None:
    assert _said(refgrad.gradient, PLAIN) == []
    assert refgrad.preflight(PLAIN).zeros == ()


def test_a_name_that_no_output_depends_on_is_said_where_it_was_asked_for() -> None:
    model = _model("y = Mul(x, x)", inputs="float[N, 3] x, float[N, 3] idle, float[M] alike")
    assert _said(refgrad.gradient, model) == []
    assert _said(refgrad.gradient, model, ["x", "idle", "alike"]) == [
        "The gradients of 'idle', 'alike' are 0: no output that is differentiated depends on their values. Choose other "
        "inputs or outputs: wrt=[...] or outputs=[...]."
    ]


def test_a_size_is_no_value() -> None:
    model = _model("s = Shape(like)  y = Expand(x, s)", inputs="float[3] x, float[N, 3] like")
    assert _said(refgrad.gradient, model) == []
    [said] = _said(refgrad.gradient, model, ["like"])
    assert "depends on its values" in said


def test_names_with_different_reasons_are_told_apart() -> None:
    model = _model("a = Floor(x)  b = Ceil(z)  y = Add(a, b)", inputs="float[N, 3] x, float[N, 3] z, float[N, 3] idle")
    said = _said(refgrad.gradient, model, ["x", "z", "idle"])
    assert [(re.split(" is (?:always )?0", text)[0], "Floor" in text, "Ceil" in text) for text in said] == [
        ("The gradient of 'idle'", False, False),
        ("The gradient of 'x'", True, False),
        ("The gradient of 'z'", False, True),
    ]


def test_one_name_of_several() -> None:
    model = _model("m = Greater(mask, x)  y = Where(m, x, x)", inputs="float[N, 3] x, float[N, 3] mask")
    [said] = _said(refgrad.gradient, model)
    assert said.startswith("The gradient of 'mask' is always 0: no derivative passes through Greater")


def test_a_node_whose_graphs_stop_it() -> None:
    branches = _model(
        "c = Constant <value = bool {1}> ()"
        "  y = If(c) <then_branch = t () => (float[N, 3] a) { a = Floor(x) }, else_branch = e () => (float[N, 3] b)"
        " { b = Ceil(x) }>"
    )
    [said] = _said(refgrad.gradient, branches)
    assert "no derivative passes through If (node 'If_1': no derivative passes; in its graphs are Floor, Ceil)" in said


@pytest.mark.parametrize(
    "recipe",
    [
        lambda model: recipes.saliency(model),
        lambda model: recipes.integrated_gradients(model, of="y"),
        lambda model: recipes.fgsm(model, of="y"),
        lambda model: recipes.forces(model),
        lambda model: refgrad.jvp(model),
        lambda model: refgrad.hvp(model),
        lambda model: refgrad.jacobian(model),
        lambda model: refgrad.hessian(model),
        lambda model: refgrad.gradient(model, max_seconds=60),
        lambda model: refgrad.onnx_derivative(model),
    ],
    ids=["saliency", "integrated", "fgsm", "forces", "jvp", "hvp", "jacobian", "hessian", "limited", "onnx_derivative"],
)
def test_what_is_built_on_a_gradient_says_it_once(recipe) -> None:
    assert _said(recipe, _trees()) == _said(refgrad.gradient, _trees())


def test_a_ranking_leaves_out_what_has_no_gradient() -> None:
    model = _model("a = Mul(x, w)  b = Floor(v)  c = Add(a, b)  y = ReduceSum <keepdims = 0> (c)",
                   outputs="float y", weights="<float[3] w = {1, 2, 3}, float[3] v = {1, 2, 3}>")  # fmt: skip
    assert list(recipes.sensitivities_in(recipes.sensitivity(model))) == ["w"]


def test_a_training_says_it_once() -> None:
    model = _model("a = MatMul(x, w)  k = ArgMax <axis = 1> (a)  b = Cast <to = 1> (k)  y = Add(b, c)",
                   outputs="float[N, 1] y", weights="<float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[1] c = {1}>")  # fmt: skip
    said = _said(step_model, model, optimizer=SGD(), trainable=["w", "c"], penalty={"c": (0.0, 0.1)})
    assert len(said) == 1
    assert said[0].startswith("The gradient of 'w' is always 0: no derivative passes through ArgMax")


def test_the_line_of_the_caller_is_named_and_filters_work() -> None:
    line = sys._getframe().f_lineno + 2
    with pytest.warns(ModelWarning) as met:
        refgrad.gradient(ARGMAX)
    assert (met[0].filename, met[0].lineno) == (__file__, line)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        with pytest.raises(ModelWarning, match="ArgMax"):
            refgrad.gradient(ARGMAX)
    with quiet():
        assert _said(refgrad.gradient, ARGMAX) == []


def test_the_command_line(tmp_path, capsys) -> None:
    path, out = tmp_path / "trees.onnx", str(tmp_path / "out.onnx")
    onnx.save(_trees(), path)
    for words in (["grad"], ["recipe", "saliency"], ["recipe", "forces"], ["jvp"]):
        assert main([*words, str(path), "-o", out]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("refgrad: notice: The gradient of 'x' is always 0: no derivative passes")
    assert main(["preflight", str(path)]) == 0
    assert "The gradient of 'x' is always 0" in " ".join(capsys.readouterr().out.split())
    assert main(["preflight", str(path), "--json"]) == 0
    [zero] = json.loads(capsys.readouterr().out)["zeros"]
    assert (zero["names"], zero["stops"][0]["nodes"]) == (["x"], ["forest"])


def test_maps_are_refused_with_the_option_of_the_exporter() -> None:
    model = _model("y = Identity(x)")
    model.graph.node.append(
        helper.make_node("ZipMap", ["y"], ["maps"], "zip", domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2])
    )
    del model.graph.output[:]
    kind = helper.make_sequence_type_proto(helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, [])))
    model.graph.output.add(name="maps", type=kind)
    for ask in (refgrad.gradient, recipes.saliency, lambda m: recipes.fgsm(m, score="cross_entropy")):
        with pytest.raises(
            refgrad.errors.UnknownNameError, match=r"ZipMap made maps of the numbers 'y'.*'zipmap': False"
        ):
            ask(model)
    with pytest.raises(refgrad.errors.UnknownNameError, match=r"'zipmap': False"):
        refgrad.gradient(model, outputs=["maps"])


# Losses of the other kind of scores

LOGITS = "logits = MatMul(x, w)"
W = "<float[3, 2] w = {1, 2, 3, 4, 5, 6}>"
PROBABILITIES = {
    "Softmax": "y = Softmax(logits)",
    "Sigmoid": "s = Sigmoid(logits)  y = Identity(s)",
    "Div by the sum": "e = Exp(logits)  t = ReduceSum <keepdims = 1> (e)  y = Div(e, t)",
    "Exp of log-probabilities": "l = ReduceLogSumExp <keepdims = 1> (logits)  d = Sub(logits, l)  y = Exp(d)",
}


def _classifier(last: str) -> ModelProto:
    return _model(f"{LOGITS}  {last}", outputs="float[N, 2] y", weights=W)


@pytest.mark.parametrize("maker", PROBABILITIES)
def test_probabilities_are_no_logits(maker: str) -> None:
    model = _classifier(PROBABILITIES[maker])
    for ask, option in (
        (lambda: step_model(model, "cross_entropy"), "loss"),
        (lambda: recipes.fgsm(model, score="cross_entropy"), "score"),
        (lambda: recipes.sensitivity(model, score="cross_entropy"), "score"),
    ):
        said = f"compares logits.* made by {maker}: use {option}='log_loss'"
        with pytest.raises(refgrad.errors.OptionError, match=said):
            ask()
    assert _said(step_model, model, "log_loss") == []
    assert _said(refgrad.add_loss_output, model, "log") == []
    step_model(_classifier("y = LogSoftmax(logits)"), "cross_entropy")  # of which the LogSoftmax is the same


@pytest.mark.parametrize(
    ("last", "maker"),
    [
        ("y = Identity(logits)", "MatMul"),
        ("b = Constant <value_floats = [1.0, 2.0]> ()  y = Add(logits, b)", "MatMul"),
        ('y = Einsum <equation = "ni,nj->ni"> (logits, logits)', "Einsum"),
    ],
)
def test_logits_are_no_probabilities(last: str, maker: str) -> None:
    model = _classifier(last)
    for ask, loss in (
        (lambda: step_model(model, "log_loss"), "log_loss"),
        (lambda: step_model(model, "log"), "log"),
        (lambda: refgrad.add_loss_output(model, "log"), "log"),
        (lambda: recipes.fgsm(model, score="log_loss"), "log_loss"),
    ):
        said = _said(ask)
        assert len(said) == 1
        assert said[0].startswith(f"The loss {loss} compares probabilities, and 'y' is made by {maker}")


def test_the_log_loss_of_a_recipe_is_that_of_the_logits() -> None:
    x, label = np.array([[0.5, -1.0, 2.0], [1.0, 0.0, -1.0]], np.float32), np.array([1, 0])
    from refgrad.backends import get_backend

    found = []
    for last, score in (("y = Identity(logits)", "cross_entropy"), ("y = Softmax(logits)", "log_loss")):
        made = get_backend("numpy").prepare(recipes.fgsm(_classifier(last), score=score, eps=0.25))
        found.append(made.run({"x": x, "label": label})["x_adversarial"])
    assert np.array_equal(*found)
    assert not np.array_equal(found[0], x)


def test_an_input_that_is_not_called_label_is_said() -> None:
    model = _model(f"{LOGITS}  label = ArgMax(logits)  y = Softmax(logits)", outputs="float[N, 2] y, int64[1, 2] label",
                   weights=W)  # fmt: skip
    assert _said(recipes.fgsm, model, of="y", score="log_loss") == [
        "The model has a result 'label' of its own: the input for the expected values is called 'label_1'."
    ]


def test_the_floats_behind_token_ids_and_before_an_index_are_named() -> None:
    ids = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> g (float[N,T] ids) => (float[N,T,2] y) <float[2,2] table = {1, 2, 3, 5}>
        { i = Cast<to=7>(ids) one = Clip(i) rows = Gather(table, one) y = Tanh(rows) }"""
    )
    with pytest.warns(
        ModelWarning, match=r"by 'rows', .*select_model_inputs_outputs\(model, None, \['rows'\], keep_inputs"
    ):
        refgrad.gradient(ids, wrt=["ids"])
    label = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> g (float[N,3] x) => (int64[N] y)
        { s = Softmax(x) k = ArgMax<axis=1, keepdims=0>(s) y = Identity(k) }"""
    )
    tokens = refgrad.select_model_inputs_outputs(ids, None, ["one"])
    with pytest.raises(UnknownNameError, match=r"computed from it are 'rows': .*\['rows'\], keep_inputs=True\)"):
        refgrad.gradient(tokens, wrt=["one"])
    with pytest.raises(UnknownNameError, match=r"'rows' is not a float input .* \['rows'\], keep_inputs=True\) makes"):
        recipes.saliency(ids, wrt="rows")
    with pytest.raises(
        UnknownNameError, match=r"computed from 's'\. Make .*select_model_inputs_outputs\(model, \['s'\]\)"
    ):
        refgrad.gradient(label)
