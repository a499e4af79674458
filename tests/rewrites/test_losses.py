"""Losses against formulas in NumPy, their gradients against differences and torch, their graphs against what was documented."""

from __future__ import annotations

import itertools
import re

import numpy as np
import onnx
import onnx.parser
import pytest
from checking import assert_gradient
from onnx import TensorProto, helper, numpy_helper

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance import directional
from refgrad.conformance.case import Case
from refgrad.errors import InvalidModelError, OptionError, RefgradError, UnknownNameError

ROWS = 6
LINEAR = """<ir_version: 8, opset_import: ["" : 15]>
linear (TYPE[N, 3] X) => (TYPE[N, 1] y) <TYPE[3, 1] coef = {0.5, -2, 3}, TYPE[1] intercept = {0.25}>
{ product = MatMul(X, coef) y = Add(product, intercept) }"""
CLASSES = """<ir_version: 8, opset_import: ["" : 15]>
classes (TYPE[N, 3] X) => (TYPE[N, 2] y) <TYPE[3, 2] coef = {0.5, -2, 3, 1, 0, 1}>
{ product = MatMul(X, coef) y = Softmax(product) }"""
TYPES = {"float": np.float32, "double": np.float64}


def model(text, kind="float"):
    return onnx.parser.parse_model(text.replace("TYPE", kind))


def draw(kind="float", binary=False, weighted=False):
    rng = np.random.default_rng(0)
    feeds = {"X": rng.normal(size=(ROWS, 3))}
    feeds["label"] = rng.integers(0, 2, (ROWS, 1)) if binary else rng.normal(size=(ROWS, 1))
    if weighted:
        feeds["weight"] = rng.uniform(0.1, 2, ROWS)
    return {name: value.astype(TYPES[kind]) for name, value in feeds.items()}


def run(made, feeds, backend="numpy", **options):
    return get_backend(backend).prepare(made, **options).run(feeds)


def weights(made):
    return {t.name: numpy_helper.to_array(t).astype(np.float64) for t in made.graph.initializer}


def listing(nodes):
    return [f"{n.op_type}({', '.join(n.input)}) -> {', '.join(n.output)}" for n in nodes]


def lines(text):
    return [line.strip() for line in text.strip().splitlines()]


# What each score is, row by row, from the text of its definition.
SCORES = {
    "squared_error": lambda f, y: (f - y) ** 2,
    "l2": lambda f, y: (f - y) ** 2,
    "absolute_error": lambda f, y: np.abs(f - y),
    "l1": lambda f, y: np.abs(f - y),
    "half_squared_error": lambda f, y: (f - y) ** 2 / 2,
    "elastic": lambda f, y: 0.5 * np.abs(f - y) + 0.5 * (f - y) ** 2,
    "huber": lambda f, y: np.where(np.abs(f - y) <= 1, (f - y) ** 2 / 2, np.abs(f - y) - 0.5),
    "log": lambda f, y: np.where(y == 1, -np.log(f[:, 1:]), -np.log1p(-f[:, 1:])),
    "binary_cross_entropy_with_logits": lambda f, y: np.logaddexp(0, np.where(y == 1, -f, f)),
}
BINARY = ("log", "binary_cross_entropy_with_logits")
PENALTIES = {
    "none": (None, lambda w: 0.0),
    "number": ({"coef": 0.3}, lambda w: 0.3 * np.sum(w["coef"] ** 2)),
    "l1": ({"coef": {"l1": 0.3}}, lambda w: 0.3 * np.sum(np.abs(w["coef"]))),
    "both": (
        {"coef": {"l1": 0.3, "l2": 0.7}},
        lambda w: 0.3 * np.sum(np.abs(w["coef"])) + 0.7 * np.sum(w["coef"] ** 2),
    ),
}
COMBINATIONS = list(itertools.product(SCORES, PENALTIES, (False, True), TYPES))


def case(score, penalty, weighted, kind):
    forward = model(CLASSES if score == "log" else LINEAR, kind)
    made = refgrad.add_loss_output(
        forward, score, weight_name="weight" if weighted else None, penalty=PENALTIES[penalty][0]
    )
    return forward, made, draw(kind, score in BINARY, weighted)


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize(("score", "penalty", "weighted", "kind"), COMBINATIONS)
def test_the_loss_is_what_its_definition_says(score, penalty, weighted, kind, backend):
    forward, made, feeds = case(score, penalty, weighted, kind)
    onnx.checker.check_model(made, full_check=True)
    y = run(forward, {"X": feeds["X"]})["y"]
    rows = SCORES[score](y.astype(np.float64), feeds["label"].astype(np.float64))
    expected = sum(rows[i, 0] * (feeds["weight"][i] if weighted else 1) for i in range(ROWS))
    expected += PENALTIES[penalty][1](weights(forward))
    results = run(made, feeds, backend)
    assert list(results) == ["loss", "y"]
    assert results["loss"].shape == (1, 1)
    assert results["loss"].dtype == TYPES[kind]
    np.testing.assert_allclose(results["loss"].item(), expected, rtol=50 * np.finfo(TYPES[kind]).eps)
    np.testing.assert_allclose(results["y"], y, rtol=1e-5 if kind == "float" else 1e-14)


@pytest.mark.parametrize(("score", "penalty", "weighted"), list(itertools.product(SCORES, PENALTIES, (False, True))))
def test_the_gradient_is_that_of_differences(score, penalty, weighted):
    forward, made, feeds = case(score, penalty, weighted, "double")
    names = [tensor.name for tensor in forward.graph.initializer]
    gradient = run(refgrad.gradient(made, wrt=names, outputs=["loss"], cotangent="ones"), feeds)
    trained = refgrad.gradient(made, wrt=names, outputs=["loss"], keep_outputs=True)  # its weights can be fed
    prepared = get_backend("numpy").prepare(trained)
    ones = {"loss": np.ones((1, 1))}

    def loss(at):
        return {"loss": prepared.run(feeds | at | {"loss_grad": ones["loss"]}, ["loss"])["loss"]}

    rng = np.random.default_rng(1)
    at = {name: value for name, value in weights(forward).items() if name in names}
    direction = {name: rng.normal(size=value.shape) for name, value in at.items()}
    expected = directional(loss, at, direction, ones)
    got = sum(np.sum(gradient[f"{name}_grad"] * direction[name]) for name in names)
    assert abs(got - expected.value) <= max(expected.error, 1e-9 * abs(expected.value))


@pytest.mark.torch
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_the_gradient_is_that_of_torch(score, weighted):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    forward, made, feeds = case(score, "both", weighted, "double")
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in weights(forward).items()}
    X, label = (torch.tensor(feeds[name]) for name in ("X", "label"))
    y = X @ tensors["coef"]
    if score == "log":
        rows = functional.binary_cross_entropy(torch.softmax(y, 1)[:, 1:], label, reduction="none")
    else:
        y = y + tensors["intercept"]
        square, absolute = (
            functional.mse_loss(y, label, reduction="none"),
            functional.l1_loss(y, label, reduction="none"),
        )
        rows = {
            "elastic": (square + absolute) / 2,
            "half_squared_error": square / 2,
            "huber": functional.huber_loss(y, label, reduction="none"),
            "binary_cross_entropy_with_logits": functional.binary_cross_entropy_with_logits(y, label, reduction="none"),
            **dict.fromkeys(("l2", "squared_error"), square),
            **dict.fromkeys(("l1", "absolute_error"), absolute),
        }[score]
    if weighted:
        rows = rows * torch.tensor(feeds["weight"])[:, None]
    loss = rows.sum() + 0.3 * tensors["coef"].abs().sum() + 0.7 * tensors["coef"].square().sum()
    loss.backward()
    results = run(refgrad.gradient(made, outputs=["loss"], cotangent="ones", keep_outputs=True), feeds)
    np.testing.assert_allclose(results["loss"].item(), loss.item(), rtol=1e-13)
    for name, tensor in tensors.items():
        np.testing.assert_allclose(results[f"{name}_grad"], tensor.grad.numpy(), rtol=1e-12, atol=1e-12)


def test_a_wrong_loss_is_noticed():
    made = refgrad.add_loss_output(model(LINEAR, "double"))
    made.graph.node[-2].op_type = "Add"  # the difference with itself, instead of times itself
    feeds = draw("double")
    y = run(model(LINEAR, "double"), {"X": feeds["X"]})["y"]
    assert abs(run(made, feeds)["loss"].item() - np.sum((y - feeds["label"]) ** 2)) > 0.1


# The graphs as documented, and where this one differs.

DOCUMENTED = """<ir_version: 8, opset_import: ["" : 15]>
linear (float[?, 10] X) => (float[?, 1] variable) <
    float[10, 1] coef = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, float[1] intercept = {2}, int64[2] shape_tensor = {-1, 1}>
{ multiplied = MatMul(X, coef) resh = Add(multiplied, intercept) variable = Reshape(resh, shape_tensor) }"""
FORWARD = """
    MatMul(X, coef) -> multiplied
    Add(multiplied, intercept) -> resh
    Reshape(resh, shape_tensor) -> variable
"""
ELASTIC = """
    Sub(variable, label) -> loss_diff
    Mul(loss_diff, loss_diff) -> loss_l2
    Abs(loss_diff) -> loss_l1
    Mul(loss_l1, l1_name) -> loss_l1_2
    Mul(loss_l2, l2_name) -> loss_l2_2
    Add(loss_l1_2, loss_l2_2) -> final_loss
    Mul(final_loss, weight) -> loss_diff_weight
"""
PENALTY = """
    Reshape(W, shape_W) -> reshaped_W
    Mul(reshaped_W, reshaped_W) -> reducedm_W
    ReduceSum(reducedm_W) -> reduced2_W
    Mul(reduced2_W, l2_weight_W) -> penalty2_W
    Abs(reshaped_W) -> absolute_W
    ReduceSum(absolute_W) -> reduced1_W
    Mul(reduced1_W, l1_weight_W) -> penalty1_W
    Add(penalty1_W, penalty2_W) -> penalty_W
"""
END = """
    ReduceSum(loss_diff_weight) -> loss_diff_2
    Add(penalty_coef, penalty_intercept) -> sumop
    Reshape(sumop, shapevect) -> penalty_reshape
    Reshape(loss_diff_2, shapevect) -> loss_reshape
    Add(penalty_reshape, loss_reshape) -> loss
"""
IN_A_COLUMN = "Reshape(weight, shape_weight) -> reshaped_weight"


def as_documented(made):
    """The nodes but the one that puts the weights of the rows in a column."""
    nodes = listing(made.graph.node)
    nodes.remove(IN_A_COLUMN)
    return sorted(line.replace("reshaped_weight", "weight") for line in nodes)


def test_the_graph_of_two_losses_is_the_documented_one():
    made = refgrad.add_loss_output(model(DOCUMENTED), "elastic", weight_name="weight", l1_weight=0.1, l2_weight=0.9)
    assert as_documented(made) == sorted(lines(FORWARD) + lines(ELASTIC) + ["ReduceSum(loss_diff_weight) -> loss"])
    assert [v.name for v in made.graph.input] == ["X", "label", "weight"]
    assert [v.name for v in made.graph.output] == ["loss", "variable"]
    shapes = {
        v.name: [d.dim_value or d.dim_param for d in v.type.tensor_type.shape.dim]
        for v in (*made.graph.input, *made.graph.output)
    }
    assert shapes == {"X": ["", 10], "label": ["", 1], "weight": [""], "loss": [1, 1], "variable": ["", 1]}
    found = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    assert found.keys() == {"coef", "intercept", "shape_tensor", "l1_name", "l2_name", "shape_weight"}
    for name, value in (("l1_name", 0.1), ("l2_name", 0.9)):
        np.testing.assert_array_equal(found[name], np.float32([value]), strict=True)


def test_the_graph_with_penalties_is_the_documented_one():
    both = {"l1": 0.5, "l2": 0.5}
    made = refgrad.add_loss_output(
        model(DOCUMENTED), "elastic", weight_name="weight", penalty={"coef": both, "intercept": both}
    )
    penalties = [line.replace("W", name) for name in ("coef", "intercept") for line in lines(PENALTY)]
    assert as_documented(made) == sorted(lines(FORWARD) + lines(ELASTIC) + penalties + lines(END))
    found = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    new = {"l1_name", "l2_name", "shape_coef", "shape_intercept", "shapevect", "shape_weight"}
    new |= {f"l{k}_weight_{name}" for k in (1, 2) for name in ("coef", "intercept")}
    assert found.keys() == {"coef", "intercept", "shape_tensor"} | new
    np.testing.assert_array_equal(found["shape_coef"], np.int64([-1]), strict=True)
    np.testing.assert_array_equal(found["shapevect"], np.int64([-1, 1]), strict=True)


def test_the_graph_of_the_notebook():
    made = refgrad.add_loss_output(model(LINEAR))
    assert listing(made.graph.node)[2:] == lines("""
        Sub(y, label) -> loss_diff
        Mul(loss_diff, loss_diff) -> loss_diff_2
        ReduceSum(loss_diff_2) -> loss
    """)


def test_the_documented_graph_weighs_every_row_with_every_weight():
    """Why the weights are put in a column: [N, 1] · [N] is [N, N]."""
    made = refgrad.add_loss_output(model(LINEAR, "double"), weight_name="weight")
    [column] = [k for k, node in enumerate(made.graph.node) if node.output[0] == "reshaped_weight"]
    del made.graph.node[column]
    made.graph.node[column].input[1] = "weight"
    feeds = draw("double", weighted=True)
    y = run(model(LINEAR, "double"), {"X": feeds["X"]})["y"]
    wrong = np.sum(feeds["weight"]) * np.sum((y - feeds["label"]) ** 2)
    assert run(made, feeds)["loss"].item() == pytest.approx(wrong, rel=1e-12)


# Shapes, types and names.


@pytest.mark.parametrize("dims", ["", "[N]", "[N, 2]", "[N, 2, 3]"])
@pytest.mark.parametrize("penalty", [None, {"w": 0.5}])
def test_an_output_of_any_rank(dims, penalty):
    made = refgrad.add_loss_output(
        model(
            f"<ir_version: 8, opset_import: ['' : 15]> g (double{dims} X) => (double{dims} y) "
            "<double w = {3}> { y = Mul(X, w) }".replace("'", '"')
        ),
        weight_name="weight",
        penalty=penalty,
    )
    onnx.checker.check_model(made, full_check=True)
    shape = [4 if d == "N" else int(d) for d in re.findall(r"\w+", dims)]
    rng = np.random.default_rng(2)
    feeds = {"X": rng.normal(size=shape), "label": rng.normal(size=shape), "weight": rng.normal(size=shape[:1])}
    expected = 4.5 if penalty else 0.0
    for index in np.ndindex(*shape):
        weight = feeds["weight"][index[:1]]
        expected += weight * (3 * feeds["X"][index] - feeds["label"][index]) ** 2
    loss = run(made, feeds)["loss"]
    assert loss.shape == (1, 1)
    np.testing.assert_allclose(loss.item(), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float", "double"])
@pytest.mark.parametrize("score", SCORES)
def test_everything_has_the_type_of_the_output(score, kind):
    text = '<ir_version: 8, opset_import: ["" : 15]> g (TYPE[N, 2] X, TYPE[1] w) => (TYPE[N, 2] y) { y = Mul(X, w) }'
    made = refgrad.add_loss_output(model(text, kind), score, penalty={"w": 0.5})
    onnx.checker.check_model(made, full_check=True)
    expected = made.graph.input[0].type.tensor_type.elem_type
    assert {v.type.tensor_type.elem_type for v in (*made.graph.input, *made.graph.output)} == {expected}


@pytest.mark.parametrize(
    ("kind", "bound"), [("float", 1e-6), ("double", 1e-6), ("float16", 2.0**-10), ("bfloat16", 2.0**-7)]
)
@pytest.mark.parametrize("label", [0, 1])
def test_the_log_loss_is_finite_where_the_model_is_certain(kind, bound, label):
    text = '<ir_version: 8, opset_import: ["" : 15]> g (TYPE[N, 2] p) => (TYPE[N, 2] y) { y = Identity(p) }'
    made = refgrad.add_loss_output(model(text, kind), "log")
    dtype = helper.tensor_dtype_to_np_dtype(made.graph.input[0].type.tensor_type.elem_type)
    wrong = np.array([[label, 1 - label]]).astype(dtype)  # certain of the other class
    feeds = {"p": wrong, "label": np.array([[label]]).astype(dtype)}
    assert float(run(made, feeds)["loss"].item()) == pytest.approx(-np.log(bound), rel=0.02)
    gradient = run(refgrad.gradient(made, outputs=["loss"], cotangent="ones"), feeds)
    assert np.all(np.isfinite(gradient["p_grad"].astype(np.float64)))


SCORE = '<ir_version: 8, opset_import: ["" : 15]> g (TYPE[N, 1] z) => (TYPE[N, 1] y) { y = Identity(z) }'


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("label", [0, 0.25, 1])
def test_the_loss_of_raw_scores_is_right_at_zero_and_far_away(label, backend, kind):
    """Weights often begin at 0, so the scores do; and a sigmoid in the type of the scores is 0 or 1 far away."""
    scores = np.array([[-1e4], [-200], [-20], [0], [20], [200], [1e4]])
    feeds = {"z": scores.astype(TYPES[kind]), "label": np.full_like(scores, label, TYPES[kind])}
    made = refgrad.add_loss_output(model(SCORE, kind), "binary_cross_entropy_with_logits")
    gradient = refgrad.gradient(made, ["z"], ["loss"], cotangent="ones", keep_outputs=True)
    results = run(gradient, feeds, backend)
    rtol = 20 * np.finfo(TYPES[kind]).eps
    expected = (1 - label) * np.logaddexp(0, scores) + label * np.logaddexp(0, -scores)
    np.testing.assert_allclose(results["loss"].item(), expected.sum(), rtol=rtol)
    sigmoid = np.exp(-np.logaddexp(0, -scores))
    np.testing.assert_allclose(results["z_grad"], sigmoid - label, rtol=rtol, atol=rtol)


def test_the_loss_of_raw_scores_has_a_second_derivative_at_zero():
    made = refgrad.add_loss_output(model(SCORE, "double"), "binary_cross_entropy_with_logits")
    scores = np.array([[0.0], [1.0], [-2.0]])
    feeds = {"z": scores, "label": np.array([[1.0], [0.0], [1.0]])}
    product = run(refgrad.hvp(made, ["z"], "loss"), feeds | {"z_vector": np.ones((3, 1))})
    sigmoid = 1 / (1 + np.exp(-scores))
    np.testing.assert_allclose(next(iter(product.values())), sigmoid * (1 - sigmoid), rtol=1e-12)


@pytest.mark.parametrize("operator", ["Sigmoid", "Softmax"])
def test_raw_scores_are_no_probabilities(operator):
    forward = model(SCORE.replace("Identity", operator))
    with pytest.raises(
        OptionError, match=f"compares logits, and 'y' is a probability, made by {operator}: use loss='log'"
    ):
        refgrad.add_loss_output(forward, "binary_cross_entropy_with_logits")


@pytest.mark.parametrize("backend", available())
def test_the_log_loss_takes_a_probability_without_columns(backend):
    made = refgrad.add_loss_output(model(SCORE.replace("[N, 1]", "[N]")), "log", weight_name="weight")
    onnx.checker.check_model(made, full_check=True)
    assert [len(value.type.tensor_type.shape.dim) for value in made.graph.input] == [1, 1, 1]
    feeds = {"z": np.float32([0.3, 0.8]), "label": np.float32([1, 0]), "weight": np.float32([2, 1])}
    gradient = refgrad.gradient(made, ["z"], ["loss"], cotangent="ones", keep_outputs=True)
    results = run(gradient, feeds, backend)
    assert results["loss"].item() == pytest.approx(-2 * np.log(0.3) - np.log(0.2), rel=1e-6)
    np.testing.assert_allclose(results["z_grad"], [-2 / 0.3, 1 / 0.2], rtol=1e-5)


@pytest.mark.parametrize("columns", [1, 2])
def test_the_log_loss_finds_the_column_if_the_number_of_columns_is_unknown(columns):
    declared, unknown = (SCORE.replace("[N, 1]", f"[N, {size}]") for size in (columns, "C"))
    p = np.array([[0.7, 0.3], [0.2, 0.8]])[:, -columns:]
    feeds = {"z": p, "label": np.array([[1.0], [0.0]])}
    losses = [run(refgrad.add_loss_output(model(text, "double"), "log"), feeds)["loss"] for text in (declared, unknown)]
    np.testing.assert_array_equal(*losses)
    np.testing.assert_allclose(losses[0], [[-np.log(0.3) - np.log(0.2)]], rtol=1e-12)


def test_eps_of_the_log_loss():
    made = refgrad.add_loss_output(model(CLASSES, "double"), "log", eps=0.25)
    feeds = {"X": np.array([[100.0, -100, 0]]), "label": np.ones((1, 1))}
    assert run(made, feeds)["loss"].item() == pytest.approx(-np.log(0.25), rel=1e-12)


def test_names_that_are_taken_by_others_are_passed_over():
    text = LINEAR.replace("product", "loss_diff").replace("intercept", "shapevect")
    made = refgrad.add_loss_output(model(text), penalty={"coef": {"l1": 1.0}, "shapevect": 1.0})
    onnx.checker.check_model(made, full_check=True)
    names = [name for node in made.graph.node for name in node.output]
    assert len(set(names)) == len(names)
    assert {"loss_diff", "loss_diff_2", "penalty_coef", "sumop", "loss"} <= set(names)


def test_penalties_of_two_types():
    text = """<ir_version: 8, opset_import: ["" : 15]> g (float[N, 1] X, float16[1] w, double[2] theta) => (float[N, 1] y)
        { v = Cast <to = 1> (w) y = Mul(X, v) }"""
    made = refgrad.add_loss_output(model(text), penalty={"w": 0.5, "theta": {"l1": 1.0}})
    onnx.checker.check_model(made, full_check=True)
    feeds = {"X": np.float32([[1]]), "label": np.float32([[2]]), "w": np.float16([2]), "theta": np.array([-3.0, 4.0])}
    assert run(made, feeds)["loss"].item() == 9.0


def test_several_outputs():
    two = model("""<ir_version: 8, opset_import: ["" : 15]> g (float[N, 1] X) => (float[N, 1] a, int64[2] s, float[N, 1] b)
        { a = Exp(X) s = Shape(X) b = Neg(X) }""")
    feeds = {"X": np.float32([[2]]), "label": np.float32([[1]])}
    for index in (2, "b"):
        made = refgrad.add_loss_output(two, output_index=index)
        assert [v.name for v in made.graph.output] == ["loss", "b"]
        assert [node.op_type for node in made.graph.node] == ["Neg", "Sub", "Mul", "ReduceSum"]
        assert run(made, feeds)["loss"].item() == 9.0


CLASSIFIER = """<ir_version: 8, opset_import: ["" : 15]>
classifier (float[N, 3] X, bool c) => (int64[N] label, float[N, 2] y) <float[3, 2] coef = {0.5, -2, 3, 1, 0, 1}>
{ product = MatMul(X, coef) y = Softmax(product) label = ArgMax <axis = 1, keepdims = 0> (y)
  loss = Identity(label) unused = If(c) <then_branch = t () => (int64[N] weight) { weight = Neg(label) },
    else_branch = e () => (int64[N] also) { also = Abs(loss) }> }"""


@pytest.mark.parametrize("needed", [False, True], ids=["left out", "kept"])
def test_results_that_are_called_as_the_label_get_another_name(needed):
    """The first output of a classifier of skl2onnx is called `label`."""
    source = model(CLASSIFIER)
    plain = model(CLASSES)
    if needed:  # the compared output needs the results whose names are taken, also within the subgraphs
        plain = model(
            CLASSIFIER.replace("y = Soft", "p = Soft")
            .replace("(y)", "(p)")
            .replace(
                "}> }",
                "}> "
                "zero = Sub(unused, unused) column = Unsqueeze(zero, axes) none = Cast <to = 1> (column) y = Add(p, none) }",
            )
            .replace("<float[3, 2]", "<int64[1] axes = {1}, float[3, 2]")
        )
        source.CopyFrom(plain)
        plain = model(CLASSES)
    made = refgrad.add_loss_output(source, "log", output_index=1, weight_name="weight")
    onnx.checker.check_model(made, full_check=True)
    assert [value.name for value in made.graph.input] == ["X", "c", "label", "weight"]
    assert [value.name for value in made.graph.output] == ["loss", "y"]
    assert any(node.op_type == "If" for node in made.graph.node) is needed
    expected = refgrad.add_loss_output(plain, "log", weight_name="weight")
    feeds = draw(binary=True, weighted=True)
    for backend in available():
        got = run(made, feeds | {"c": np.array(True)}, backend)["loss"]
        np.testing.assert_allclose(got, run(expected, feeds)["loss"], rtol=1e-6)
    options = refgrad.DerivativeOptions.KeepOutputs | refgrad.DerivativeOptions.FillGrad
    gradient, other = (
        run(refgrad.onnx_derivative(m, options=options, dialect="onnx"), feeds | extra | weights_of(m))
        for m, extra in ((made, {"c": np.array(True)}), (expected, {}))
    )
    np.testing.assert_allclose(gradient["coef_grad"], other["coef_grad"], rtol=1e-5, atol=1e-6)


def weights_of(made):
    return {"coef": numpy_helper.to_array(next(t for t in made.graph.initializer if t.name == "coef"))}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [12, 15, 18])
@pytest.mark.parametrize("name", ["LogisticRegression", "SGDClassifier", "MLPClassifier"])
def test_classifiers_of_scikit_learn(name, opset):
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn import linear_model, metrics, neural_network

    settings = {
        "SGDClassifier": {"loss": "log_loss", "alpha": 1.0},
        "MLPClassifier": {"hidden_layer_sizes": (4,), "max_iter": 20},
    }
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 3)).astype(np.float32)
    y = (x[:, 0] + rng.normal(size=30) > 0).astype(np.int64)
    kind = getattr(neural_network if name == "MLPClassifier" else linear_model, name)
    classifier = kind(**settings.get(name, {}), random_state=0).fit(x, y)
    made = skl2onnx.to_onnx(classifier, x[:1], target_opset={"": opset, "ai.onnx.ml": 1}, options={"zipmap": False})
    assert made.graph.output[0].name == "label"
    loss = refgrad.add_loss_output(made, "log", output_index=1, reduction="mean", label_type=np.int64)
    feeds = {"X": x, "label": y[:, None]}
    for backend in available():
        got = run(loss, feeds, backend)["loss"].item()
        assert got == pytest.approx(metrics.log_loss(y, classifier.predict_proba(x)), rel=1e-5)
    assert_gradient(Case(name, loss, feeds, wrt=("X",), outputs=("loss",)), tolerance=1e-5)
    gradient = refgrad.onnx_derivative(loss, inputs=["X"], options=refgrad.DerivativeOptions.Zero, dialect="onnx")
    assert gradient.graph.output[0].name == "X_grad"


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("score", SCORES)
def test_the_mean_divides_the_sum_of_the_scores_by_their_number(score, penalty, weighted):
    forward, made, feeds = case(score, penalty, weighted, "double")
    settings = {"weight_name": "weight" if weighted else None, "penalty": PENALTIES[penalty][0]}
    mean = refgrad.add_loss_output(forward, score, reduction="mean", **settings)
    onnx.checker.check_model(mean, full_check=True)
    extra = PENALTIES[penalty][1](weights(forward))
    expected = (run(made, feeds)["loss"].item() - extra) / ROWS + extra
    for backend in available():
        assert run(mean, feeds, backend)["loss"].item() == pytest.approx(expected, rel=1e-12)
    assert_gradient(Case("mean", mean, feeds, outputs=("loss",)))


@pytest.mark.parametrize("opset", [8, 13, 18])
def test_the_mean_of_scores_of_any_rank(opset):
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[N, 2, 3] x) => (float[N, 2, 3] y) {{ y = Neg(x) }}'
    made = refgrad.add_loss_output(model(text), reduction="mean")
    x, y = (np.random.default_rng(k).normal(size=(4, 2, 3)).astype(np.float32) for k in (0, 1))
    for backend in available():
        loss = run(made, {"x": x, "label": y}, backend)["loss"]
        assert loss.shape == (1, 1)
        assert loss.item() == pytest.approx(np.mean((-x - y) ** 2), rel=1e-5)


@pytest.mark.parametrize("kind", ["int64", np.int32, np.uint8, bool, "float16", np.double])
@pytest.mark.parametrize("score", ["log", "squared_error"])
def test_the_label_may_have_another_type(score, kind):
    forward = model(CLASSES if score == "log" else LINEAR)
    made = refgrad.add_loss_output(forward, score, label_type=kind)
    onnx.checker.check_model(made, full_check=True)
    label = made.graph.input[1].type.tensor_type
    assert helper.tensor_dtype_to_np_dtype(label.elem_type) == np.dtype(kind)
    assert len(label.shape.dim) == 2
    feeds = draw(binary=True)
    expected = run(refgrad.add_loss_output(forward, score), feeds)["loss"]
    for backend in available():
        got = run(made, feeds | {"label": feeds["label"].astype(kind)}, backend)["loss"]
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    names = [value.name for value in refgrad.gradient(made, outputs=["loss"]).graph.output]
    assert ("label_grad" in names) is (np.dtype(kind).kind == "f")


def test_the_model_of_the_caller_stays_as_it_is():
    forward = model(LINEAR)
    before = forward.SerializeToString()
    refgrad.add_loss_output(forward, "elastic", weight_name="weight", penalty={"coef": 1.0})
    assert forward.SerializeToString() == before


def test_local_functions_survive():
    text = """<ir_version: 8, opset_import: ["" : 15, "mine" : 1]> g (float[N, 1] X) => (float[N, 1] y) { y = mine.twice(X) }
        <domain: "mine", opset_import: ["" : 15]> twice (x) => (y) { y = Add(x, x) }"""
    made = refgrad.add_loss_output(model(text))
    onnx.checker.check_model(made, full_check=True)
    assert [f.name for f in made.functions] == ["twice"]
    assert run(made, {"X": np.float32([[2]]), "label": np.float32([[1]])})["loss"].item() == 9.0


def test_external_data_survives(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(model(LINEAR), path, save_as_external_data=True, location="weights", size_threshold=0)
    assert [v[0].tolist() for v in refgrad.get_train_initializer(path).values()] == [[[0.5], [-2], [3]], [0.25]]
    onnx.save(refgrad.add_loss_output(path, penalty={"coef": 1.0}), tmp_path / "loss.onnx")
    feeds = draw()
    expected = run(refgrad.add_loss_output(model(LINEAR), penalty={"coef": 1.0}), feeds)["loss"]
    np.testing.assert_array_equal(run(tmp_path / "loss.onnx", feeds)["loss"], expected)


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("score", ["squared_error", "log"])
def test_nodes_are_of_the_opset_of_the_functions_where_the_graph_has_no_node_of_onnx(score, opset):
    text = f"""<ir_version: 8, opset_import: ["mine" : 1]> g (float[N, 2] X) => (float[N, 2] y) {{ y = mine.minus(X) }}
        <domain: "mine", opset_import: ["" : {opset}]> minus (x) => (y) {{ y = Neg(x) }}"""
    made = refgrad.add_loss_output(model(text), score)
    onnx.checker.check_model(made)
    assert {one.domain: one.version for one in made.opset_import}[""] == opset


def test_a_function_of_an_opset_that_is_too_old():
    text = """<ir_version: 8, opset_import: ["mine" : 1]> g (float[N, 1] X) => (float[N, 1] y) { y = mine.minus(X) }
        <domain: "mine", opset_import: ["" : 1]> minus (x) => (y) { y = Neg(x) }"""
    with pytest.raises(InvalidModelError, match="opset 1; a loss needs 8 or newer"):
        refgrad.add_loss_output(model(text))


def test_old_models():
    old = model(
        '<ir_version: 3, opset_import: ["" : 8]> g (float[N, 1] X, float[1] w) => (float[N, 1] y) { y = Mul(X, w) }'
    )
    old.graph.initializer.append(numpy_helper.from_array(np.float32([3]), "w"))
    made = refgrad.add_loss_output(old, "elastic", penalty={"w": 0.5})
    onnx.checker.check_model(made)
    assert run(made, {"X": np.float32([[1]]), "label": np.float32([[1]])})["loss"].item() == 0.5 * 2 + 0.5 * 4 + 4.5


# What is trained.


def test_the_initializers_to_train_are_the_floats():
    text = LINEAR.replace("intercept = {0.25}", "intercept = {0.25}, int64[2] shape = {-1, 1}, double[1] d = {2}")
    found = refgrad.get_train_initializer(model(text))
    assert list(found) == ["coef", "intercept", "d"]
    value, tensor = found["d"]
    np.testing.assert_array_equal(value, np.array([2.0]), strict=True)
    assert tensor.data_type == TensorProto.DOUBLE


def test_the_numbers_of_a_loss_are_not_trained():
    made = refgrad.add_loss_output(model(LINEAR), "elastic", penalty={"coef": {"l1": 1.0, "l2": 1.0}})
    assert list(refgrad.get_train_initializer(made)) == ["coef", "intercept"]
    outputs = [v.name for v in refgrad.gradient(made).graph.output]
    assert outputs == ["X_grad", "label_grad", "coef_grad", "intercept_grad"]


@pytest.mark.parametrize("opset", [13, 18])
def test_the_numbers_of_a_loss_are_exact_in_double_precision(opset):
    """In float16 they are rounded; a conversion to a newer opset does not forget what they were."""
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g (float16[2] x) => (float16[2] y) {{ y = Sigmoid(x) }}'
    made = refgrad.add_loss_output(model(text), "elastic", l1_weight=0.3, l2_weight=0.6)
    feeds = {"x": np.float16([0.5, -1]), "label": np.float16([2, 0])}
    assert_gradient(Case("elastic", made, feeds, outputs=("loss",)))


def test_external_data_that_is_missing():
    tensor = TensorProto(name="coef", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="nowhere")
    forward = model(LINEAR)
    forward.graph.initializer[0].CopyFrom(tensor)
    with pytest.raises(InvalidModelError, match="external data of 'coef' at 'nowhere' cannot be used"):
        refgrad.get_train_initializer(forward)


# A penalty by itself.


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, "float64"])
@pytest.mark.parametrize(("l1", "l2"), [(0.5, None), (None, 0.25), (0.5, 0.25), (0, 0.25), (0.5, 0)])
def test_a_penalty_by_itself(l1, l2, dtype):
    constants, nodes = refgrad.penalty_loss_onnx("w", dtype, l1, l2)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "penalty",
        [helper.make_tensor_value_info("w", kind, [2, 3])],
        [helper.make_tensor_value_info("penalty_w", kind, [1])],
        constants,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)
    onnx.checker.check_model(made, full_check=True)
    w = np.array([[1, -2, 3], [0, 1, -1]], dtype)
    assert run(made, {"w": w})["penalty_w"].tolist() == [(l1 or 0) * 8 + (l2 or 0) * 16]


@pytest.mark.parametrize("kind", [list, set])
def test_the_names_of_a_penalty_are_added_to_those_that_exist(kind):
    names = kind(["w", "shape_w"])
    first = refgrad.penalty_loss_onnx("w", np.float32, 1.0, existing_names=names)[1]
    second = refgrad.penalty_loss_onnx("w", np.float32, 1.0, existing_names=names)[1]
    assert first[0].input[1] == "shape_w_2"
    assert not {n for node in first for n in node.output} & {n for node in second for n in node.output}
    assert {n for node in (*first, *second) for n in node.output} < set(names)


def test_the_names_that_exist_are_a_list_or_a_set():
    assert refgrad.penalty_loss_onnx("w", np.float32, 1.0, existing_names=set())[1][-1].output[0] == "penalty_w"
    with pytest.raises(OptionError, match="existing_names is a list or a set of names, not str"):
        refgrad.penalty_loss_onnx("w", np.float32, 1.0, existing_names="w")


# Bad input.

ONE = """<ir_version: 8, opset_import: ["" : 15]> g (INPUT) => (OUTPUT) <float w = {1}, int64 k = {1}> { NODES }"""


def small(inputs="float[N, 1] x", outputs="float[N, 1] y", nodes="y = Mul(x, w)"):
    return model(ONE.replace("INPUT", inputs).replace("OUTPUT", outputs).replace("NODES", nodes))


TWO = small(outputs="float[N, 1] y, float[N, 1] z", nodes="y = Mul(x, w) z = Neg(x)")
BAD = {
    "unknown score": (small(), {"score_name": "hinge"}, OptionError, "no score 'hinge'; there are 'squared_error', 'l2'"),
    "unknown setting": (small(), {"l1_weight": 1.0}, OptionError, "'squared_error' has no setting 'l1_weight'; it has none"),
    "misspelt setting": (
        small(), {"score_name": "elastic", "l1": 1.0}, OptionError, "no setting 'l1'; it has 'l1_weight', 'l2_weight'",
    ),
    "setting is text": (
        small(), {"score_name": "elastic", "l1_weight": "1"}, OptionError, "l1_weight of the score .elastic. is a finite",
    ),
    "eps too large": (
        small("float[N, 2] x", "float[N, 2] y"), {"score_name": "log", "eps": 0.5}, OptionError, "between 0 and 0.5",
    ),
    "penalty of nothing": (small(), {"penalty": {"wx": 1.0}}, UnknownNameError, "'wx' in penalty .* Did you mean 'x'"),
    "penalty of integers": (small(), {"penalty": {"k": 1.0}}, UnknownNameError, "'k' in penalty is not a float"),
    "penalty zero": (small(), {"penalty": {"w": 0}}, OptionError, "penalty of 'w' is zero"),
    "penalty empty": (small(), {"penalty": {"w": {}}}, OptionError, "penalty of 'w' is zero"),
    "penalty l3": (small(), {"penalty": {"w": {"l3": 1.0}}}, OptionError, "has 'l3'; there are 'l1' and 'l2'"),
    "penalty infinite": (small(), {"penalty": {"w": np.inf}}, OptionError, "l2 of the penalty of 'w' is a finite number"),
    "which output": (TWO, {}, OptionError, "several outputs: choose one with output_index, of 'y', 'z'"),
    "output too far": (TWO, {"output_index": 2}, OptionError, "outputs 0 to 1, 'y', 'z'"),
    "output before the first": (TWO, {"output_index": -1}, OptionError, "outputs 0 to 1"),
    "output unknown": (TWO, {"output_index": "x"}, UnknownNameError, "'x' is not an output of the model"),
    "output is true": (TWO, {"output_index": True}, OptionError, "output_index=True"),
    "integers": (small(outputs="int64[K] y", nodes="y = Shape(x)"), {}, OptionError, "output 'y' is not declared"),
    "no tensor": (
        small(outputs="seq(float[N, 1]) y", nodes="y = SequenceConstruct(x)"), {}, OptionError, "output 'y' is not declared",
    ),
    "three columns": (
        small("float[N, 3] x", "float[N, 3] y"), {"score_name": "log"}, OptionError,
        r"\[N, 2\], \[N, 1\] or \[N\]; .*\['N', 3\].* use log_loss",
    ),
    "loss is taken": (small(), {"loss_name": "w"}, UnknownNameError, "'w' is taken"),
    "label is taken": (small(), {"label_name": "x"}, UnknownNameError, "'x' is taken"),
    "weight is taken": (small(), {"weight_name": "y"}, UnknownNameError, "'y' is taken"),
    "loss of classes": (
        small(), {"score_name": "cross_entropy"}, OptionError, "cross_entropy is a loss of refgrad.training.step_model, and a",
    ),
    "reduction": (small(), {"reduction": "median"}, OptionError, "no reduction 'median'; there are 'sum', 'mean'"),
    "reduction is a list": (small(), {"reduction": ["sum"]}, OptionError, r"no reduction \['sum'\]"),
    "label of strings": (small(), {"label_type": str}, OptionError, "A label has a float or an integer type, not str"),
    "label of no type": (small(), {"label_type": "colour"}, OptionError, "integer type, not 'colour'"),
    "twice the same": (small(), {"weight_name": "label"}, UnknownNameError, "'label' is taken"),
    "no name": (small(), {"loss_name": ""}, OptionError, "is a string, not ''"),
    "label is a list": (small(), {"label_name": ["label"]}, OptionError, r"is a string, not \['label'\]"),
    "weight is a list": (small(), {"weight_name": ["w"]}, OptionError, r"is a string, not \['w'\]"),
    "score is a list": (small(), {"score_name": ["l1"]}, OptionError, r"no score \['l1'\]"),
    "no model": (3, {}, InvalidModelError, "A model is a ModelProto or a path"),
    "too old": (
        model('<ir_version: 3, opset_import: ["" : 6]> g (float[N] x) => (float[N] y) { y = Neg(x) }'),
        {}, InvalidModelError, "opset 6; a loss needs 8 or newer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error(name):
    given, arguments, error, message = BAD[name]
    with pytest.raises(error, match=message) as raised:
        refgrad.add_loss_output(given, **arguments)
    assert isinstance(raised.value, RefgradError)


def test_no_model_has_no_weights():
    with pytest.raises(InvalidModelError, match="A model is a ModelProto or a path, not NoneType"):
        refgrad.get_train_initializer(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("w", np.float32), "penalty of 'w' is zero"),
        (("w", np.int64, 1.0), "a float type, not int64"),
        (("w", "colour", 1.0), "a float type, not 'colour'"),
        (("w", None, 1.0), "a float type, not None"),
        (("w", np.float32, "1"), "l1 of the penalty of 'w' is a finite number, not '1'"),
    ],
)
def test_a_bad_penalty_is_one_clear_error(arguments, message):
    with pytest.raises(OptionError, match=message):
        refgrad.penalty_loss_onnx(*arguments)
