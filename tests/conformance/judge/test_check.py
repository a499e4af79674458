"""The checker: right gradients agree, wrong ones do not, and what cannot be told is said."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

import refgrad
from refgrad.conformance import check, compare
from refgrad.conformance.oracles.central import directional, one_sided
from refgrad.conformance.problems.weights import randomize
from refgrad.derivatives import ortbuilder
from refgrad.errors import BackendError, FeedError, OptionError
from refgrad.tables import registry
from refgrad.tables.dialects import DIALECTS


def model(body, inputs="float[N, 3] x", outputs="float[N, 3] y", opset=18):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> g ({inputs}) => ({outputs}) {body}')


SMOOTH = model("<float[3] w = {1, -2, 3}> { a = Mul(x, w) b = Mul(a, a) y = Add(b, x) }")


def verdicts(found, oracle=None):
    return {row.verdict for row in found.rows if oracle in (None, row.oracle)}


@pytest.fixture
def planted(monkeypatch):
    """Replace the rule of an operator for one test."""

    def plant(op_type, function):
        right = registry.RULES["", op_type]
        wrong = registry.Rule(op_type, "", function, right.wrt, right.broadcast, right.parameters)
        monkeypatch.setitem(registry.RULES, ("", op_type), wrong)

    return plant


def test_a_right_gradient_agrees_everywhere():
    found = check(SMOOTH)
    assert found.ok
    assert verdicts(found) <= {"right", "not supported"}
    assert {row.gradient for row in found.rows} == {"x", "w"}
    assert {(row.dialect, row.backend) for row in found.rows} >= {
        ("onnx", "numpy float64"),
        ("ort", "numpy float64"),
        ("onnx", "numpy"),
    }
    assert all(row.relative <= row.allowed for row in found.rows if row.verdict == "right")


def test_a_wrong_rule_within_a_graph_disagrees_with_differences(planted):
    steps = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[N] x, float[N] w) => (float[N] y) <int64 n = {3}> '
        '{ y = Loop (n, "", x) <body = b (int64 i, bool k, float[N] s) => (bool l, float[N] t) '
        "{ l = Identity(k) u = Mul(s, w) t = Sin(u) }> }"
    )
    assert check(steps, backends=["numpy"]).ok
    planted("Sin", lambda op, d_output, input: op.Mul(d_output, op.Cos(op.Mul(input, 1.001))))
    found = check(steps, backends=["numpy"])
    assert not found.ok
    assert "wrong" in verdicts(found, "differences")


def test_the_same_seed_gives_the_same_report():
    assert check(SMOOTH, backends=["numpy"], seed=3) == check(SMOOTH, backends=["numpy"], seed=3)
    assert check(SMOOTH, backends=["numpy"], seed=3) != check(SMOOTH, backends=["numpy"], seed=4)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda op, d_C, A, B: (op.Mul(op.Mul(d_C, B), 1.0005), op.Mul(d_C, A)),
        lambda op, d_C, A, B: (op.Mul(d_C, A), op.Mul(d_C, A)),
        lambda op, d_C, A, B: (None, op.Mul(d_C, A)),
    ],
    ids=["factor", "operand", "forgotten"],
)
def test_a_wrong_rule_disagrees_with_differences(wrong, planted):
    planted("Mul", wrong)
    found = check(SMOOTH, backends=["numpy"])
    assert not found.ok
    assert "wrong" in verdicts(found, "differences")


def test_a_backend_that_computes_something_else_disagrees(monkeypatch):
    from refgrad.backends import get_backend
    from refgrad.backends.numpy.backend import NumpyModel

    run = NumpyModel.run

    def slightly_off(self, feeds, outputs=None, **options):
        results = run(self, feeds, outputs, **options)
        return {
            name: np.multiply(v, 1.001, dtype=v.dtype) if v.dtype == np.float32 else v for name, v in results.items()
        }

    assert get_backend("numpy").name == "numpy"
    monkeypatch.setattr(NumpyModel, "run", slightly_off)
    found = check(SMOOTH, backends=["numpy"])
    assert verdicts(found, "differences") == {"right"}
    assert verdicts(found, "float64") == {"wrong"}


def test_a_backend_that_computes_another_model_disagrees_and_says_so(monkeypatch):
    from refgrad.backends.numpy.backend import NumpyModel

    run = NumpyModel.run

    def doubled(self, feeds, outputs=None, **options):
        results = run(self, feeds, outputs, **options)
        return {name: 2 * value if value.dtype == np.float32 else value for name, value in results.items()}

    monkeypatch.setattr(NumpyModel, "run", doubled)
    found = check(SMOOTH, backends=["numpy"])
    assert verdicts(found, "float64") == {"wrong"}
    assert all("of 'y' is" in row.note for row in found.faults)


def test_a_fault_of_a_backend_that_is_known_is_not_held_against_the_gradient():
    pytest.importorskip("onnxruntime")
    corners = model(
        '{ y = Resize <mode = "linear", coordinate_transformation_mode = "align_corners"> (x, , scales) }',
        "float[1, 4] x, float[2] scales",
        "float[1, M] y",
    )
    found = check(corners, {"x": np.float32([[1, 5, 2, 8]]), "scales": np.float32([1, 0.6])}, wrt=["x"])
    assert found.ok
    [row] = {(r.verdict, r.note) for r in found.rows if r.backend == "ort-cpu" and r.dialect == "onnx"}
    assert row[0] == "undecided"
    assert "known of it: Resize" in row[1]
    assert "aligns corners by the rounded length" in row[1]


def test_a_size_that_the_model_declares_and_does_not_compute_is_unknown():
    """As an exporter writes it: the output has 2 elements for a sample, and is declared to have one for each sample."""
    squeezed = model(
        "<float[3, 2] w = {0.1, 0.2, -0.3, 0.4, 0.5, 0.6}> { a = MatMul(x, w)  b = Squeeze(a)  y = Tanh(b) }",
        outputs="float[N] y",
    )
    found = check(squeezed, {"x": np.float32([[1, 2, 3]])}, backends=["numpy"])
    assert verdicts(found) == {"right"}


def test_feeds_are_drawn_where_the_executors_run_the_model(monkeypatch):
    """At sizes that a model is not made for, an executor may refuse what the interpreter runs."""
    pytest.importorskip("onnxruntime")
    from refgrad.backends.onnxruntime import _Session

    run = _Session.run

    def of_eight(self, feeds, outputs=None):
        if feeds["x"].shape[1] < 8:
            raise BackendError("ort-cpu failed: Shape mismatch attempting to re-use buffer.")
        return run(self, feeds, outputs)

    monkeypatch.setattr(_Session, "run", of_eight)
    found = check(model("{ y = Tanh(x) }", "float[N, C] x", "float[N, C] y"))
    assert found.ok
    assert "C=8" in found.feeds


def test_an_imprecise_kernel_that_is_known_is_not_held_against_the_gradient(monkeypatch):
    """ONNX Runtime's Sigmoid is off by 4e-8, so the gradient of a classifier that is sure of its answer is off too."""
    pytest.importorskip("onnxruntime")
    from refgrad.backends.onnxruntime import _Session

    sure = model("{ a = Add(x, b)  y = Sigmoid(a) }", "float[4] x, float[4] b", "float[4] y")
    feeds = {"x": np.float32([0.1, -0.2, 0.6, 0.3]), "b": np.float32([-10, -10, -10, -10])}
    found = check(sure, feeds, wrt=["x"], backends=["ort-cpu"])
    assert found.ok
    [row] = {(r.verdict, r.note) for r in found.rows if r.backend == "ort-cpu" and r.dialect == "onnx"}
    assert row[0] == "undecided"
    assert "known of it: Sigmoid is off by 4e-8" in row[1]

    run = _Session.run

    def off(self, feeds, outputs=None):
        results = run(self, feeds, outputs)
        return {name: value * np.float32(1.01) if name == "x_grad" else value for name, value in results.items()}

    monkeypatch.setattr(_Session, "run", off)
    assert verdicts(check(sure, feeds, wrt=["x"], backends=["ort-cpu"]), "float64") == {"wrong"}


def test_an_imprecise_kernel_is_seen_in_small_elements_beside_large_ones():
    """As of a detector: the scores of the classes stand beside coordinates."""
    pytest.importorskip("onnxruntime")
    detector = model(
        "{ a = Add(x, b)  s = Sigmoid(a)  c = Mul(x, k)  y = Concat<axis = 0>(c, c, c, s) }",
        "float[4] x, float[4] b, float[4] k",
        "float[16] y",
    )
    feeds = {"x": np.float32([0.1, -0.2, 0.6, 0.3]), "b": np.float32([-10] * 4), "k": np.float32([50, -40, 30, 20])}
    found = check(detector, feeds, wrt=["b"], backends=["ort-cpu"])
    assert found.ok
    assert "known of it: Sigmoid is off by 4e-8" in " ".join(row.note for row in found.rows)


@pytest.mark.parametrize(
    ("body", "inputs", "feeds", "message"),
    [
        (
            "{ y = ScatterElements <axis = 1> (x, i, u) }",
            "float[2, 3] x, int64[2, 2] i, float[2, 2] u",
            {"i": np.int64([[0, -3], [1, 2]])},
            "'y' (ScatterElements) is not defined here: its indices name an element twice",
        ),
        (
            "{ y = ScatterND (x, i, u) }",
            "float[2, 3] x, int64[2, 1] i, float[2, 3] u",
            {"i": np.int64([[1], [-1]])},
            "'y' (ScatterND) is not defined here: its indices name an element twice",
        ),
        (
            "{ y = BatchNormalization (x, s, s, m, v) }",
            "float[0, 3] x, float[3] s, float[3] m, float[3] v",
            {"v": np.float32([1, -2, 1]), "m": np.ones(3, np.float32), "s": np.ones(3, np.float32)},
            "'y' (BatchNormalization) is not defined here: its variance is -2",
        ),
    ],
)
def test_what_the_specification_leaves_open_is_no_fault(body, inputs, feeds, message):
    found = check(model(body, inputs), {**_drawn(inputs, feeds), **feeds})
    assert found.ok
    assert any(message in row.note for row in found.rows if row.verdict == "undecided")


def _drawn(inputs, given):
    """Random numbers for the inputs that are not given."""
    rng = np.random.default_rng(0)
    declared = onnx.parser.parse_graph(f"g ({inputs}) => (float y) {{ y = Constant <value_float = 1.0> () }}").input
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in declared}
    return {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items() if n not in given}


@pytest.mark.parametrize("where", ["updates of a Scatter", "a backend"])
def test_a_fault_where_the_specification_leaves_nothing_open_is_found(where, planted, tampered):
    scattered = model("{ y = ScatterND (x, i, u) }", "float[2, 3] x, int64[2, 1] i, float[2, 3] u")
    if where == "a backend":
        tampered(lambda value: 2 * value)
    else:
        planted("ScatterND", lambda op, d_output, *inputs, **attributes: (d_output, d_output))
    assert not check(scattered, {**_drawn("float[2, 3] x, float[2, 3] u", {}), "i": np.int64([[1], [0]])}).ok


@pytest.mark.parametrize("size", [1e25, 1e-25])
def test_squares_that_leave_the_range_of_their_type_are_no_fault(size):
    norm = model("<int64[1] axes = {1}> { y = ReduceL2 <keepdims = 0> (x, axes) }", "float[2, 3] x", "float[2] y")
    feeds = {"x": np.float32([[3, 4, 0], [1, 2, 2]]) * np.float32([[size], [1]])}
    found = check(norm, feeds)
    assert found.ok
    assert any("leaves the range of its type" in row.note for row in found.rows)


def test_a_kink_is_no_disagreement():
    found = check(model("{ y = Relu(x) }"), {"x": np.zeros((1, 3), np.float32)}, backends=["numpy"])
    assert found.ok
    assert verdicts(found, "differences") == {"convention"}
    assert "from the left" in found.rows[0].note


def test_kinks_that_one_sided_derivatives_do_not_bracket_are_told_by_the_neighbour():
    body = "{ y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) }"
    tied = model(body, "float[1, 1, 4, 4] x", "float[1, 1, M, M] y")
    found = check(tied, {"x": np.zeros((1, 1, 4, 4), np.float32)}, backends=["numpy"])
    assert found.ok
    assert verdicts(found, "differences") == {"convention"}
    assert "right beside this point" in found.rows[0].note


def test_kinks_that_cancel_are_no_excuse():
    body = "{ a = Relu(x) n = Neg(x) b = Relu(n) y = Sub(a, b) }"
    found = check(model(body), {"x": np.zeros((1, 3), np.float32)}, backends=["numpy"])
    assert verdicts(found, "differences") == {"wrong"}
    assert all("no derivative together: along (1, …, 1) the derivative is" in row.note for row in found.faults)


@pytest.mark.parametrize("seed", range(4))
def test_a_slight_kink_beside_a_sharp_one_is_no_disagreement(seed):
    """The slopes of one side and the other are too much alike for the search for elements at a kink."""
    body = """{ slight, sharp = Split <axis = 1, num_outputs = 2> (x)
        a = LeakyRelu <alpha = 0.9995> (slight) b = Abs(sharp) y = Add(a, b) }"""
    found = check(model(body, "float[2, 2] x", "float[2, 1] y"), {"x": np.zeros((2, 2), np.float32)}, seed=seed)
    assert verdicts(found, "differences") == {"convention"}


def test_a_rule_that_is_wrong_everywhere_is_no_kink(planted):
    planted("Relu", lambda op, d_Y, X: op.Mul(d_Y, 0.5))
    found = check(model("{ y = Relu(x) }"), {"x": np.float32([[0, 1, -1]])}, backends=["numpy"])
    assert not found.ok


AT_A_KINK = {
    "Relu": ("{ y = Relu(x) }", [0, 1, 2, 3, -4], 3),
    "Abs": ("{ y = Abs(x) }", [0, 1, 2, 3, -4], 3),
    "Max": ("<float[5] z = {1, 5, 1, 2, 9}> { y = Max(x, z) }", [1, 2, 3, 7, -4], 7),
    "two kinks": ("{ a = Abs(x) b = Neg(a) c = Relu(b) d = Abs(x) y = Sub(d, c) }", [0, 1, 2, 3, -4], 3),
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kink", AT_A_KINK)
def test_a_kink_in_one_element_hides_no_fault_in_another(kink, seed, planted):
    body, point, at = AT_A_KINK[kink]
    ends = {"inputs": "float[5] x", "outputs": "float[5] y"}
    kinked, feeds = model(body, **ends), {"x": np.array(point, np.float32)}
    assert check(kinked, feeds, wrt=["x"], backends=["numpy"], seed=seed).ok
    operator = next(node.op_type for node in kinked.graph.node)
    right = registry.RULES["", operator].function

    def wrong(op, *values, **attributes):
        found = right(op, *values, **attributes)
        first, *others = found if isinstance(found, tuple | list) else (found,)
        one, more = (op.const(np.array(factor, np.float32)) for factor in (1, 1.05))
        spoilt = op.Mul(first, op.Where(op.Equal("x", float(at)), more, one))
        return (spoilt, *others) if others else spoilt

    planted(operator, wrong)
    found = check(kinked, feeds, wrt=["x"], backends=["numpy"], seed=seed)
    assert "wrong" in verdicts(found, "differences")


def test_a_dialect_that_is_wrong_is_not_held_against_the_other(monkeypatch):
    monkeypatch.setitem(DIALECTS["onnx"].lowerings, "TanhGrad", lambda op, dY, Y: op.Mul(dY, Y))
    found = check(model("{ y = Tanh(x) }"), backends=["numpy"])
    assert {row.verdict for row in found.rows if row.dialect == "onnx"} == {"wrong"}
    assert {row.verdict for row in found.rows if row.dialect == "ort"} == {"right"}


def test_an_infinite_derivative_is_undecided():
    found = check(model("{ y = Sqrt(x) }"), {"x": np.float32([[0, 1, 2]])}, backends=["numpy"])
    assert found.ok
    assert verdicts(found) == {"undecided"}


def test_a_gradient_that_is_not_finite_where_the_derivative_is_disagrees(planted):
    planted("Relu", lambda op, d_Y, X: op.Div(op.Mul(d_Y, X), X))
    found = check(model("{ y = Relu(x) }"), {"x": np.float32([[0, 1, 2]])}, backends=["numpy"])
    assert not found.ok
    assert "not finite" in found.faults[0].note


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_results_outside_the_range_of_the_type_are_undecided(scale):
    body = f"<float s = {{{scale}}}, float t = {{{1 / scale}}}> {{ a = Mul(x, s) b = Mul(a, a) c = Mul(b, t) y = Mul(c, t) }}"
    found = check(model(body), wrt=["x"], backends=["numpy"])
    assert found.ok
    assert verdicts(found, "differences") == {"right"}
    assert verdicts(found, "float64") == {"undecided"}
    assert "than float32 can hold" in found.rows[-1].note


def test_random_numbers_without_a_seed_are_the_same_in_the_model_and_in_its_gradient():
    found = check(model("{ a = RandomNormalLike(x) y = Mul(a, x) }"), backends=["numpy"])
    assert found.ok
    assert verdicts(found) == {"right"}


def test_backends_draw_random_numbers_of_their_own():
    pytest.importorskip("onnxruntime")
    body = "<float r = {0.5}, bool t = {1}> { y = Dropout <seed = 1> (x, r, t) }"
    found = check(model(body, "float[40] x", "float[40] y"), wrt=["x"])
    assert found.ok
    assert verdicts(found, "differences") == {"right"}
    assert "Dropout: the executor draws random numbers of its own" in {row.note for row in found.rows}


def test_differences_that_are_all_noise_settle_nothing(planted):
    planted("Relu", lambda op, d_Y, X: op.Mul(d_Y, 0.0))
    jumps = model("{ f = Floor(x) r = Relu(x) y = Add(f, r) }")
    assert "right" not in verdicts(check(jumps, {"x": np.ones((1, 3), np.float32)}, backends=["numpy"]), "differences")


def test_a_normalization_may_compute_in_less_than_double():
    norm = model("{ y = LayerNormalization(x, s) }", "double[2, 8] x, double[8] s", "double[2, 8] y")
    assert check(norm).ok


def test_a_backend_that_does_not_run_the_model_is_not_at_fault(monkeypatch):
    from refgrad.backends import get_backend
    from refgrad.backends.numpy.backend import NumpyBackend
    from refgrad.errors import BackendError

    prepare = NumpyBackend.prepare

    def refuse(self, proto, precision=None, **options):
        if precision is None:
            raise BackendError("Tanh is not supported")
        return prepare(self, proto, precision, **options)

    assert get_backend("numpy").name == "numpy"
    monkeypatch.setattr(NumpyBackend, "prepare", refuse)
    found = check(SMOOTH, backends=["numpy"])
    assert found.ok
    assert verdicts(found, "float64") == {"not supported"}


EXECUTORS = """
import os
from refgrad.backends.base import Backend, Prepared, graph_inputs, graph_outputs
class Failing(Backend):
    name = "failing"
    in_prepare = None
    def description(self): return ""
    def fail(self): raise RuntimeError("boom")
    def prepare(self, model, **options):
        return Model(self, model)
class Model(Prepared):
    def __init__(self, owner, model):
        self.owner = owner
        self.inputs, self.outputs = graph_inputs(model.graph), graph_outputs(model.graph)
    def run(self, feeds, outputs=None):
        return self.owner.fail()
class InPrepare(Failing):
    def prepare(self, model, **options): self.fail()
class Bug(Failing):
    def fail(self): raise TypeError("'<' not supported between instances of 'list' and 'int'")
class Lacking(Failing):
    def fail(self): raise NotImplementedError("Mul")
class Saying(Failing):
    def fail(self): raise RuntimeError("the operator Mul is not supported")
class Large(Failing):
    def fail(self): raise MemoryError
class Aborting(Failing):
    def fail(self): os.abort()
class Silent(Failing):
    def fail(self): return None
class Hanging(Failing):
    def fail(self):
        while True: pass
"""


@pytest.mark.parametrize(
    ("executor", "verdict", "said"),
    [
        ("Failing", "crashed", "boom; nor does it run the model itself"),
        ("InPrepare", "crashed", "boom; nor does it run the model itself"),
        ("Bug", "crashed", "'<' not supported"),
        ("Lacking", "not supported", "nor does it run the model itself: Mul"),
        ("Saying", "not supported", "nor does it run the model itself: the operator Mul is not supported"),
        ("Large", "out of memory", "MemoryError"),
        ("Aborting", "crashed", "its process ended with -6"),
        ("Silent", "wrong", "returned None and no outputs by name"),
        ("Hanging", "timed out", "nothing came back after 8 s"),
    ],
)
def test_an_executor_that_fails_on_the_model_too_is_at_fault_unless_it_says_that_it_lacks_something(
    executor, verdict, said, tmp_path, monkeypatch
):
    (tmp_path / "failing_executors.py").write_text(EXECUTORS)
    monkeypatch.syspath_prepend(tmp_path)
    found = check(SMOOTH, backends=[f"failing_executors:{executor}"], dialects=["onnx"], seconds=8)
    assert verdicts(found, "float64") == {verdict}
    assert all(said in row.note for row in found.rows if row.oracle == "float64")
    assert found.ok == (verdict == "not supported")
    assert found.answer[0] == ("right" if found.ok else verdict)


def test_an_executor_that_does_not_exist_is_refused_in_the_words_of_compare():
    with pytest.raises(OptionError) as refused:
        check(SMOOTH, backends=["nunpy"])
    with pytest.raises(OptionError) as refused_by_compare:
        compare(SMOOTH, "refgrad@nunpy", "refgrad@numpy")
    assert str(refused.value) == str(refused_by_compare.value)
    assert "There is no executor 'nunpy'. Did you mean 'numpy'?" in str(refused.value)
    assert "onnx.reference" in str(refused.value)
    assert check(SMOOTH, backends=["onnx.reference"], dialects=["onnx"]).ok


def test_zero_gradients_agree_and_say_so():
    found = check(model("{ f = Floor(x) y = Mul(f, f) }"), backends=["numpy"])
    assert found.ok
    assert {row.note for row in found.rows} == {"this gradient and the expected one are zero"}


def test_a_gradient_that_cancels_to_zero_agrees_up_to_rounding():
    body = "{ y = Softmax(x) s = ReduceSum <keepdims = 1> (y, axes) c = Mul(s, s) z = Mul(c, t) }"
    cancels = model(body.replace("{", "<int64[1] axes = {1}, float[1, 3] t = {1, 2, 3}> {", 1), outputs="float[N, 3] z")
    found = check(cancels, wrt=["x"], backends=["numpy"])
    assert found.ok
    assert verdicts(found) == {"right"}


def attention(seed, tokens=2, size=2, scores="Softmax <axis = -1>"):
    """A block whose key bias has the gradient 0: Softmax does not see what is added to all scores of a query."""
    made = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
        attention (float[{tokens}, {size}] x) => (float[{tokens}, {size}] y) {{
        q0 = MatMul(x, wq) q = Add(q0, bq) k0 = MatMul(x, wk) k = Add(k0, bk) v0 = MatMul(x, wv) v = Add(v0, bv)
        kt = Transpose <perm = [1, 0]> (k) s = MatMul(q, kt) root = Constant <value_float = {size**0.5}> ()
        z = Div(s, root) p = {scores} (z) y = MatMul(p, v) }}""")
    rng = np.random.default_rng([seed, 7])
    shapes = {"wq": (size, size), "wk": (size, size), "wv": (size, size), "bq": size, "bk": size, "bv": size}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return made


@pytest.mark.parametrize(
    ("seed", "tokens", "size"),
    [(4, 2, 2), (84, 2, 2), (139, 2, 2), (40, 4, 1), (122, 4, 1), *((seed, 3, 2) for seed in range(6))],
)
def test_a_gradient_that_is_zero_but_for_rounding_is_no_fault(seed, tokens, size):
    found = check(attention(seed, tokens, size), wrt=["bk"], seed=seed)
    assert found.ok, found.faults


ONES = "l = LogSoftmax <axis = 1> (x) e = Exp(l) s = ReduceSum <keepdims = 0> (e, axes)"  # the sum of probabilities


def test_a_gradient_that_cancels_term_by_term_is_no_fault():
    found = check(model(f"<int64[1] axes = {{1}}> {{ {ONES} }}", "float[3, 4] x", "float[3] s"), seed=11)
    assert found.ok, found.faults


@pytest.mark.parametrize("seed", [104, 115])
def test_differences_that_fit_the_period_of_a_function_are_no_fault(seed):
    found = check(model("{ y = Mod <fmod = 1> (x, w) }", "float[3] x, float[3] w", "float[3] y"), seed=seed)
    assert found.ok, found.faults


@pytest.fixture
def tampered(monkeypatch):
    """Change the gradients that the interpreter computes in float32."""
    from refgrad.backends.numpy.backend import NumpyModel

    run = NumpyModel.run

    def tamper(change):
        def wrong(self, feeds, outputs=None, **options):
            results = run(self, feeds, outputs, **options)
            return {
                name: change(value) if value.dtype == np.float32 and name.endswith("_grad") else value
                for name, value in results.items()
            }

        monkeypatch.setattr(NumpyModel, "run", wrong)

    return tamper


@pytest.mark.parametrize(
    ("name", "scores", "change"),
    [
        ("bk", "Sigmoid", lambda g: 2 * g),
        ("bk", "Sigmoid", lambda g: g * np.float32([1, 1.01])),
        ("bk", "Softmax <axis = -1>", lambda g: g + np.float32([0, 1e-4])),
        ("bq", "Softmax <axis = -1>", lambda g: -g),
        ("wk", "Softmax <axis = -1>", lambda g: g * np.float32([[1, 1], [1, -1]])),
        ("wk", "Softmax <axis = -1>", lambda g: g * np.float32(1.001)),
    ],
)
@pytest.mark.parametrize("seed", [4, 84, 139])
def test_an_error_beside_a_gradient_that_is_zero_is_a_fault(name, scores, change, seed, tampered):
    block = attention(seed, scores=scores)
    assert check(block, wrt=[name], seed=seed, backends=["numpy"]).ok
    tampered(change)
    found = check(block, wrt=[name], seed=seed, backends=["numpy"])
    assert {row.oracle for row in found.faults} == {"float64"}
    assert all("in float64 it is" in row.note for row in found.faults)


@pytest.mark.parametrize("seed", [3, 11, 12])
def test_an_error_of_a_thousandth_beside_elements_that_cancel_to_zero_is_a_fault(seed, tampered):
    beside = model(
        f"<int64[1] axes = {{1}}> {{ {ONES} t = Mul(x, x) r = ReduceSum <keepdims = 0> (t, axes) "
        "h = Mul(r, c) y = Add(s, h) }",
        "float[3, 4] x, float[3] c",
        "float[3] y",
    )
    feeds = {
        "x": np.random.default_rng(seed).standard_normal((3, 4)).astype(np.float32),
        "c": np.float32([0, 0, 1]),
    }
    assert check(beside, feeds, wrt=["x"], seed=seed, backends=["numpy"]).ok
    tampered(lambda g: g * np.float32(1.001))
    faults = check(beside, feeds, wrt=["x"], seed=seed, backends=["numpy"]).faults
    assert {row.oracle for row in faults} == {"float64"}


UNDERFLOWS = model(
    """<float c = {-60.0}> { m = Mul(x, w) t = Greater(m, c) e = Exp(m) two = Add(e, e) l = Log(two) y = Where(t, l, m) }""",
    "float[4] x, float[4] w",
    "float[4] y",
)
FAR = {"x": np.float32([1, -150, 0.5, 2]), "w": np.float32([1, 1, -1, 0.5])}


def test_an_underflow_in_the_branch_that_is_not_taken_is_no_fault():
    found = check(UNDERFLOWS, FAR)
    assert found.ok, found.faults
    assert "less than float32 can hold" in next(row.note for row in found.rows if row.verdict == "undecided")


def test_an_underflow_in_one_element_explains_no_other(tampered):
    tampered(lambda g: g * np.float32([1, 1, 1, 1.01]))
    found = check(UNDERFLOWS, FAR, backends=["numpy"])
    assert {row.verdict for row in found.rows if row.oracle == "float64"} == {"wrong"}


def test_feeds_are_drawn_where_the_model_is_defined():
    found = check(model("{ a = Log(x) b = Sqrt(x) y = Add(a, b) }"), backends=["numpy"])
    assert found.ok
    assert found.feeds == "random (between 0 and 1)"
    assert check(model("{ y = Acosh(x) }"), backends=["numpy"]).feeds == "random (above 1)"
    with pytest.raises(FeedError, match="not finite"):
        check(model("{ n = Neg(x) m = Mul(n, n) k = Neg(m) y = Log(k) }"), backends=["numpy"])


def test_feeds_may_move_initializers():
    feeds = {"x": np.ones((1, 3), np.float32), "w": np.zeros(3, np.float32)}
    found = check(SMOOTH, feeds, wrt=["x"], backends=["numpy"])
    assert found.ok
    assert found.feeds == "your own"


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
def test_every_float_type(kind):
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("Exp", ["x"], ["e"]), helper.make_node("Mul", ["e", "x"], ["y"])]
    graph = helper.make_graph(nodes, "g", [value("x", kind, [2, 3])], [value("y", kind, [2, 3])])
    found = check(
        helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]), backends=["numpy"]
    )
    assert found.ok
    assert verdicts(found) == {"right"}


def test_outputs_that_change_their_shape_are_undecided():
    expand = model("{ shape = Cast <to = 7> (size) y = Expand(x, shape) }", "float[1] x, float[1] size", "float[M] y")
    found = check(expand, {"x": np.ones(1, np.float32), "size": np.float32([2])}, wrt=["size"], backends=["numpy"])
    assert found.ok
    assert verdicts(found, "differences") == {"undecided"}
    assert "shape" in found.rows[0].note


def test_random_weights_replace_constant_fills():
    value = helper.make_tensor_value_info
    fill = helper.make_tensor("fill", TensorProto.FLOAT, [1], [0.02])
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["w"], value=fill),
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["n"]),
        helper.make_node("Relu", ["n"], ["y"]),
    ]
    fills = {name: np.full(4, 0.02, np.float32) for name in ("b", "scale", "bias", "mean", "var")}
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [value("y", TensorProto.FLOAT, [1, 4, 8, 8])],
        [
            numpy_helper.from_array(np.array([4, 3, 3, 3]), "shape"),
            *(numpy_helper.from_array(v, k) for k, v in fills.items()),
        ],
    )
    filled = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    made, count = randomize(filled, seed=0)
    assert count == 6
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    assert all(np.unique(arrays[name]).size > 1 for name in (*fills, "w"))
    assert np.all(arrays["var"] > 0)
    found = check(filled, wrt=["x"], random_weights=0, backends=["numpy"])
    assert found.ok
    assert "right" in verdicts(found, "differences")


def test_random_weights_of_every_layer():
    filled = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 23]> g (float[4, 3] x) => (float[5, 3] y) {
            a = Gemm(w, x) b = Einsum <equation = "ij,jk->ik"> (a, v) c = RMSNormalization(b, scale)
            d = Unsqueeze(c, one) e = GroupNormalization <num_groups = 1> (d, gamma, beta) y = Squeeze(e, one) }"""
    )
    fills = {"w": (5, 4), "v": (3, 3), "scale": (3,), "gamma": (3,), "beta": (3,)}
    filled.graph.initializer.extend(numpy_helper.from_array(np.full(s, 0.02, np.float32), n) for n, s in fills.items())
    filled.graph.initializer.append(numpy_helper.from_array(np.array([2]), "one"))
    made, count = randomize(filled, seed=0)
    assert count == 5
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    assert all(np.unique(arrays[name]).size > 1 for name in fills)
    assert np.all(arrays["scale"] > 0)


LIGHT = sorted((Path(onnx.__file__).parent / "backend" / "test" / "data" / "light").glob("light_*.onnx"))


QUICK = ("light_shufflenet",)


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=() if p.stem in QUICK else (pytest.mark.models,)) for p in LIGHT],
)
def test_whole_models(path):
    graph = onnx.load(path).graph
    image = next(v.name for v in graph.input if v.name not in {t.name for t in graph.initializer})
    found = check(path, wrt=[image], directions=1, random_weights=0)
    assert found.ok, found.faults
    assert verdicts(found, "differences") == {"right"}
    assert not any("zero" in row.note for row in found.rows)


def test_an_mlp_regressor_converted_by_skl2onnx():
    neural_network = pytest.importorskip("sklearn.neural_network")
    skl2onnx = pytest.importorskip("skl2onnx")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 4)).astype(np.float32)
    regressor = neural_network.MLPRegressor(
        hidden_layer_sizes=(8, 5), activation="tanh", solver="lbfgs", max_iter=20, random_state=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it need not converge
        regressor.fit(x, x.sum(axis=1))
    found = check(skl2onnx.to_onnx(regressor, x[:1], target_opset=18))
    assert found.ok, found.faults
    assert verdicts(found, "differences") == {"right"}
    assert {"coefficient", "coefficient1", "coefficient2"} <= {row.gradient.removesuffix("_grad") for row in found.rows}


def test_an_input_without_a_shape_has_to_be_fed():
    text = '<ir_version: 10, opset_import: ["": 21]> g (float x, float[3, 2] w) => (float[N, 2] y) { y = MatMul(x, w) }'
    model = onnx.parser.parse_model(text)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(FeedError, match=r"Input 'x' declares no shape, .* feed it"):
        check(model)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((4, 3)), "w": rng.standard_normal((3, 2))}
    found = check(model, feeds={name: value.astype(np.float32) for name, value in feeds.items()})
    assert found.ok, found.faults
    assert verdicts(found, "differences") == {"right"}


def test_arguments_are_checked():
    with pytest.raises(OptionError, match="directions"):
        check(SMOOTH, directions=0)
    with pytest.raises(OptionError, match="tolerance"):
        check(SMOOTH, tolerance=0.0)
    with pytest.raises(OptionError, match="backends is empty; there are 'numpy'"):
        check(SMOOTH, backends=[])
    with pytest.raises(OptionError, match="constant fills"):
        check(SMOOTH, random_weights=0)


def test_one_sided_derivatives_differ_at_a_kink_only():
    ones = {"y": np.ones(1)}
    for function, expected in ((np.abs, (-1.0, 1.0)), (np.exp, (1.0, 1.0))):
        sides = one_sided(lambda feeds, f=function: {"y": f(feeds["x"])}, {"x": np.zeros(1)}, {"x": np.ones(1)}, ones)
        assert [side.value for side in sides] == pytest.approx(expected, abs=1e-6)
    smooth = directional(lambda feeds: {"y": np.exp(feeds["x"])}, {"x": np.zeros(1)}, {"x": np.ones(1)}, ones)
    assert abs(smooth.value - 1) <= smooth.error


@pytest.mark.skipif(not ortbuilder.available(), reason="needs onnxruntime-training")
class TestBuilder:
    def test_agrees(self):
        rows = [row for row in check(SMOOTH).rows if row.dialect == "onnxruntime"]
        assert {row.verdict for row in rows} == {"right"}

    def test_several_outputs_are_added_up(self):
        two = model("{ y = Sin(x) z = Exp(x) }", outputs="float[N, 3] y, float[N, 3] z")
        rows = [row for row in check(two).rows if row.dialect == "onnxruntime"]
        assert {row.verdict for row in rows} == {"right"}

    def test_refusing_is_no_disagreement(self):
        found = check(model("{ y = Softplus(x) }"))
        assert found.ok
        assert "refused" in verdicts(found)

    def test_being_wrong_is_no_disagreement_of_refgrad(self):
        where = model("{ y = Where(c, x, z) }", "bool[2, 3] c, float[1, 3] x, float[2, 3] z", "float[2, 3] y")
        found = check(where)
        assert found.ok
        assert "wrong" in {row.verdict for row in found.rows if row.dialect == "onnxruntime"}

    def test_running_for_too_long_is_told(self):
        assert "timed out" in verdicts(check(SMOOTH, seconds=0.01))


def test_gradient_itself_is_not_imported_with_its_checker():
    assert not hasattr(refgrad, "check")


def test_a_loop_that_never_ends_with_random_feeds_says_so(monkeypatch):

    monkeypatch.setattr(sys.modules[check.__module__], "_ENOUGH", 50)
    endless = model(
        """{
            go = Constant <value = bool {1}> ()
            y = Loop ("", go, x) <body = b (int64 i, bool c, float[3] s) => (bool d, float[3] t) {
                d = Identity(c) t = Tanh(s) }>
        }""",
        "float[3] x",
        "float[3] y",
    )
    with pytest.raises(FeedError, match=r"still goes on after \d+ iterations.*feeds=\{\.\.\.\}"):
        check(endless, backends=["numpy"])
