"""Two gradients of one model: who is wrong in which tensor, at which node, and what a recording says."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, NodeProto, helper, numpy_helper
from planting import BACKENDS, Elsewhere, Planted, builder_with, network, scaled

import refgrad
from refgrad.backends import Prepared, get_backend
from refgrad.backends.base import load_model
from refgrad.backends.numpy import NumpyBackend
from refgrad.cli import main
from refgrad.conformance import Case, compare, select, tables
from refgrad.conformance.judge.elementwise import against_float64
from refgrad.conformance.judge.judge import GradientCheck
from refgrad.conformance.judge.nan.watching import Watching
from refgrad.conformance.judge.running.runner import Plan
from refgrad.conformance.judge.running.suite import require
from refgrad.conformance.locating import paths
from refgrad.conformance.locating.bisection import Bisected, Fault
from refgrad.conformance.locating.location import Located
from refgrad.conformance.locating.paths import ErrorPath, Station
from refgrad.conformance.locating.pictures import elements_of, maps_of
from refgrad.conformance.locating.recordings import Recording, match, read_recording
from refgrad.conformance.locating.sides import Live, side_of
from refgrad.conformance.locating.verdicts import Comparison, Seen, Sided, Tensor
from refgrad.conformance.locating.windows import NodeGroup
from refgrad.conformance.problems.observation import Built
from refgrad.conformance.problems.point import rounding
from refgrad.conformance.problems.problem import Problem, ask
from refgrad.conformance.problems.systems.builders import BUILDERS, CrashError
from refgrad.conformance.reports import comparison_page, comparisons
from refgrad.errors import BackendError, BuilderError, FeedError, OptionError

pytestmark = pytest.mark.interpreter

RELU = """
    <ir_version: 8, opset_import: ["": 18]> g (float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}>
    { [mul] h = Mul (x, w)  [relu] r = Relu (h)  [tanh] y = Tanh (r) }"""


def verdicts(found: Comparison) -> dict[str, str]:
    return {f"{tensor.name} {tensor.kind}": tensor.verdict for tensor in found.tensors}


def recorded(model: ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a right framework records, with cotangents of its own."""
    made = refgrad.gradient(model, keep_outputs=True)
    outputs = get_backend("numpy").prepare(model).run(feeds)
    rng = np.random.default_rng(5)
    cotangents = {f"{n}_grad": rng.standard_normal(v.shape).astype(np.float32) for n, v in outputs.items()}
    return {**feeds, **cotangents, **get_backend("numpy").prepare(made).run({**feeds, **cotangents})}


@pytest.mark.parametrize("executor", BACKENDS)
def test_sound_sides_agree(executor: str) -> None:
    model, feeds = network()
    found = compare(model, "refgrad@numpy:float64", f"refgrad@{executor}", feeds)
    assert found.ok
    assert set(verdicts(found).values()) == {"they agree"}
    assert {tensor.name for tensor in found.tensors} == {"x", "w1", "b1", "w2", "scale", "y"}


def test_the_suite_and_compare_allow_the_same_rounding() -> None:
    """In a model with a kink: without one the suite allows coarser rounding, and `compare` does not."""
    model, feeds = onnx.parser.parse_model(RELU), {"x": np.float32([1, -2, 0.3, 1e-7])}
    problem = ask(Case("relu", model, feeds, wrt=("x", "w")))
    truth = GradientCheck(problem, ()).own_gradient
    tolerance = rounding(len(truth.model.graph.node), model)
    rng, seen = np.random.default_rng(6), set()
    for size in 10.0 ** np.linspace(-7, -3, 17):
        off = {
            name: (value + size * np.max(np.abs(value)) * rng.standard_normal(value.shape)).astype(np.float32)
            for name, value in truth.gradients.items()
        }
        tensors = {f"{name}_grad": value for name, value in off.items()}
        found = compare(model, "refgrad@numpy", tensors, feeds, cotangent=problem.cotangents, search=False)
        by_compare = {tensor.name: tensor.b.verdict == "right" for tensor in found.tensors}
        assert by_compare == {
            name: against_float64(truth, name, value, tolerance).verdict == "right" for name, value in off.items()
        }
        seen |= set(by_compare.values())
    assert seen == {True, False}


@pytest.mark.parametrize(("last", "verdict"), [(0.5 / 2**0.5, "right"), (0.6, "wrong")])
def test_elements_that_are_infinite_in_double_do_not_judge_others(last: float, verdict: str) -> None:
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[3] x) => (float[3] y) { y = Sqrt (x) }'
    model, feeds = onnx.parser.parse_model(text), {"x": np.float32([0, 1, 2])}
    tensors = {"x_grad": np.float32([np.inf, 0.5, last])}
    [tensor] = compare(model, "refgrad@numpy", tensors, feeds, cotangent="ones", search=False).tensors
    assert (tensor.a.verdict, tensor.b.verdict) == ("right", verdict)
    assert "1 of 3 elements are not finite in double: they are not judged" in tensor.b.reason


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_another_precision_is_no_fault(precision: str) -> None:
    model, feeds = network()
    found = compare(model, "refgrad@numpy", f"refgrad@numpy:{precision}", feeds)
    assert not [tensor for tensor in found.tensors if "wrong" in tensor.verdict]
    assert found.b.kernels is None or not found.b.kernels.culprits


def test_a_wrong_kernel_is_told_from_a_wrong_rule() -> None:
    model, feeds = network()
    kernel = compare(model, "refgrad@numpy", Live("refgrad", Planted("Tanh_1", lambda y: 1.001 * y)), feeds)
    assert not kernel.ok
    assert kernel.a.kernels is None
    assert kernel.b.rules is None
    assert kernel.b.kernels is not None
    assert [one.found.name for one in kernel.b.kernels.culprits] == ["Tanh_1"]
    rule = compare(model, "refgrad@numpy", Live(builder_with(scaled("Tanh_1", 1.001)), "numpy"), feeds)
    assert rule.b.rules is not None
    assert [fault.nodes for fault in rule.b.rules.faults] == [("Tanh_1",)]
    assert "1 − y²" in rule.b.rules.faults[0].formula
    assert rule.b.kernels is None
    assert "central differences confirm" in rule.judge


def test_both_are_found_where_both_are_wrong() -> None:
    model, feeds = network()
    wrong = Live(builder_with(scaled("MatMul_1", 1.01)), Planted("Softmax_2", lambda y: 1.001 * y))
    found = compare(model, wrong, "refgrad@numpy", feeds)
    assert found.a.rules is not None
    assert found.a.kernels is not None
    assert [fault.nodes for fault in found.a.rules.faults] == [("MatMul_1",)]
    assert [one.found.name for one in found.a.kernels.culprits] == ["Softmax_2"]


class Spoilt(NumpyBackend):
    """The interpreter, some of whose nodes are off by factors of their own."""

    name = "spoilt"

    def __init__(self, factors: dict[str, float]) -> None:
        self.factors = factors

    def prepare(self, model: Any, *arguments: Any, **options: Any) -> Any:
        def watch(node: NodeProto, inputs: Any, outer: Any, compute: Any) -> Any:
            results = compute()
            return tuple(np.asarray(one * np.float32(self.factors.get(node.name, 1.0)), one.dtype) for one in results)

        return super().prepare(model, precision=Watching(watch))


def test_nodes_at_fault_are_in_the_order_of_the_model() -> None:
    """Not in the order of what they do to the results: here the later the node, the more."""
    model, feeds = network()
    order = ["MatMul_1", "Softmax_1", "Tanh_1", "Mul_1"]
    kernels = Spoilt({name: 1 + 0.01 * 5**k for k, name in enumerate(order)})

    def fault(made: ModelProto) -> None:
        for k, name in enumerate(("MatMul_1", "MatMul_2", "Tanh_1")):
            scaled(name, 1 + 0.01 * 5**k)(made)

    found = compare(model, "refgrad@numpy", Live(builder_with(fault), kernels), feeds)
    assert found.b.rules is not None
    assert found.b.kernels is not None
    assert [one.nodes for one in found.b.rules.faults] == [("MatMul_1",), ("MatMul_2",), ("Tanh_1",)]
    named = [one.found.name for one in found.b.kernels.culprits]
    assert named == order
    document = comparisons.document(found)["b"]
    assert [one["found"]["name"] for one in document["kernels"]["culprits"]] == named
    page = comparison_page.page(found)
    for text in ("\n".join(comparisons.lines_of(found.b)), html.unescape(page)):
        places = [text.index(f"the kernel is at fault: {one.found.label}") for one in found.b.kernels.culprits]
        assert places == sorted(places)
    lefts = [one.left for one in found.b.kernels.culprits]
    assert lefts[-1] < 1e-5


def test_an_adjoint_is_named_at_its_place_among_rules() -> None:
    faults = [
        Fault("wrong", ("a", "b"), ("Tanh", "Mul"), value="v"),
        Fault("wrong", ("c",), ("Sin",)),
    ]
    side = Sided("x", rules=Bisected(tuple(faults), 3, {}))
    tensor = Tensor("t", "gradient", ("t",), "", Seen("right"), Seen("wrong"))
    found = Comparison((tensor,), Sided("y"), side, "given", 0, "judge")
    assert comparisons.sentence(found).endswith("because of the cotangent of 'v', the rule of c.")


def test_a_side_that_fails_says_where() -> None:
    model, feeds = network()

    def build(problem: Any) -> Any:
        if any(node.op_type == "LayerNormalization" for node in problem.model.graph.node):
            raise KeyError("axis")
        return builder_with(lambda made: None)(problem)

    found = compare(model, "refgrad@numpy", Live(build, "numpy"), feeds)
    assert not found.ok
    assert found.b.rules is not None
    assert [(fault.kind, fault.nodes) for fault in found.b.rules.faults] == [("crashed", ("LN",))]


def test_nodes_that_only_outputs_need_are_named_beside_those_of_the_gradient() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        g (float[3, 4] x) => (float[3] y, float z) <float[4] w = {1, 2, 3, 4}, int64[1] last = {1}>
        { s = Mul(x, w)  [sum] y = ReduceSum <keepdims = 0> (s, last)  q = Mul(s, s)  [mean] z = ReduceMean <keepdims = 0> (q) }
    """)
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}

    class Summing(NumpyBackend):
        """The interpreter with sums and means that are 1 % too large."""

        def prepare(self, model: Any, *arguments: Any, **options: Any) -> Any:
            def watch(node: NodeProto, inputs: Any, outer: Any, compute: Any) -> Any:
                results = compute()
                return (np.float32(1.01) * results[0],) if node.op_type in ("ReduceSum", "ReduceMean") else results

            return super().prepare(model, precision=Watching(watch))

    found = compare(model, "refgrad@numpy", Live("refgrad", Summing()), feeds)
    assert found.b.kernels is not None
    named = {one.found.name for one in found.b.kernels.culprits}
    assert named >= {"sum", "mean"}


def test_a_builder_is_not_asked_for_derivatives_that_the_comparison_is_not_about() -> None:
    """The scales of a Resize are no parameter: the builder, which refuses them, is not asked for them."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        g (float[1, 1, 4, 4] x) => (float[1, 1, 8, 8] y) <float[4] scales = {1, 1, 2, 2}>
        { h = Tanh(x)  [up] u = Resize <mode = "linear"> (h, "", scales)  [sine] y = Sin(u) }
    """)

    def build(problem: Any) -> Any:
        if "scales" in problem.wrt:
            raise BuilderError("refused", "scales are not differentiated")
        return builder_with(scaled("sine", 1.1))(problem)

    found = compare(model, "refgrad@numpy", Live(build, "numpy"), {"x": np.ones((1, 1, 4, 4), np.float32)}, wrt=["x"])
    assert found.b.rules is not None
    assert [(fault.kind, fault.nodes) for fault in found.b.rules.faults] == [("wrong", ("sine",))]


@pytest.mark.skipif("ort-cpu" not in BACKENDS, reason="needs ONNX Runtime")
def test_random_numbers_of_another_system_are_no_fault() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> g (float[4, 6] x) => (float[4, 6] y) <float ratio = {0.5}, bool train = {1}>
        { h = Tanh(x)  d, mask = Dropout(h, ratio, train)  y = Sin(d) }
    """)
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)}
    found = compare(model, "refgrad@numpy", "refgrad@ort-cpu", feeds, wrt=["x"])
    assert {tensor.a.verdict for tensor in found.tensors} == {"right"}
    assert {tensor.b.verdict for tensor in found.tensors} == {"undecided"}
    assert all("('Dropout')" in tensor.b.reason for tensor in found.tensors)
    assert found.b.kernels is None


# At a kink


def with_slope(at_zero: float) -> Any:
    """refgrad whose Relu has this slope at 0, and another fault in one element."""

    def fault(made: ModelProto) -> None:
        for node in list(made.graph.node):
            if node.name.startswith("relu_Grad/") and node.op_type in ("Cast", "Where", "Sign", "Mul"):
                last = [one for one in made.graph.node if one.name.startswith("relu_Grad/")][-1]
                if node.name != last.name:
                    continue
                output, node.output[0] = node.output[0], f"{node.output[0]}_right"
                constants = {"kink_zero": 0.0, "kink_slope": at_zero}
                made.graph.initializer.extend(numpy_helper.from_array(np.float32(v), n) for n, v in constants.items())
                at = next(k for k, one in enumerate(made.graph.node) if one.name == node.name) + 1
                parts = [
                    helper.make_node("Equal", ["h", "kink_zero"], ["kink_is"], "kink_equal"),
                    helper.make_node("Mul", ["y_grad", "kink_slope"], ["kink_value"], "kink_mul"),
                    helper.make_node("Where", ["kink_is", "kink_value", node.output[0]], [output], "kink_where"),
                ]
                for part in reversed(parts):
                    made.graph.node.insert(at, part)
                return

    return builder_with(fault)


@pytest.mark.parametrize(("slope", "verdict"), [(1.0, "convention"), (0.5, "convention"), (3.0, "wrong")])
def test_a_kink_is_told_from_a_fault_at_it(slope: float, verdict: str) -> None:
    model = onnx.parser.parse_model(RELU)
    feeds = {"x": np.float32([0.5, 0.0, -1.0, 2.0])}
    found = compare(model, "refgrad@numpy", Live(with_slope(slope), "numpy"), feeds, wrt=["x"])
    [tensor] = [one for one in found.tensors if one.kind == "gradient"]
    assert tensor.b.verdict == verdict, tensor.b.reason
    assert found.ok is (verdict != "wrong")


def test_a_kink_in_one_element_hides_no_fault_in_another() -> None:
    model = onnx.parser.parse_model(RELU)
    feeds = {"x": np.float32([0.5, 0.0, -1.0, 2.0])}
    value = recorded(model, feeds)
    value["x_grad"] = value["x_grad"] + np.float32([0, 0.0, 0, 0.01])
    found = compare(model, "refgrad@numpy", {n: v for n, v in value.items() if n in ("x", "x_grad", "y_grad")})
    [tensor] = [one for one in found.tensors if one.name == "x"]
    assert tensor.verdict == "b is wrong"
    assert "[3] is" in tensor.b.reason


def test_a_fault_among_many_kinks_is_seen() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[600] x) => (float[600] y) { y = Abs(x) }'
    )
    feeds = {"x": np.zeros(600, np.float32)}
    gradient = np.full(600, 0.5, np.float32)
    assert compare(model, "refgrad@numpy", {"x_grad": gradient, **feeds}).ok
    gradient[417] = 1.5
    found = compare(model, "refgrad@numpy", {"x_grad": gradient, **feeds})
    assert not found.ok
    assert "417" in found.tensors[0].b.reason


def at_ties(share: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
    """The gradient of MaxPool for windows with ties, where `share` has the weights of the elements of a window."""
    x = np.float32([[1, 1, 0, 0], [0, 1, 0, 0], [2, 0, -1, -1], [2, 2, -1, -1]])
    cotangent = np.float32([[1.5, -0.7], [0.4, 2.1]])
    gradient = np.zeros_like(x)
    for k, n in np.ndindex(2, 2):
        place = (slice(2 * k, 2 * k + 2), slice(2 * n, 2 * n + 2))
        window = x[place].reshape(-1)
        gradient[place] = (cotangent[k, n] * share((window == window.max()).astype(np.float32))).reshape(2, 2)
    return {"x": x[None, None], "y_grad": cotangent[None, None], "x_grad": gradient[None, None]}


POOL = """
    <ir_version: 8, opset_import: ["": 18]>
    pool (float[1, 1, 4, 4] x) => (float[1, 1, 2, 2] y) { y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) }
"""


@pytest.mark.parametrize(
    ("share", "is_right"),
    [
        (lambda ties: np.eye(4)[np.argmax(ties)], True),
        (lambda ties: np.eye(4)[3 - np.argmax(ties[::-1])], True),
        (lambda ties: ties / ties.sum(), True),
        (lambda ties: ties, False),
        (lambda ties: ties * (ties.sum() < 2), False),
        (lambda ties: 0.5 * ties, False),
    ],
    ids=["first", "last", "even", "all", "none", "half"],
)
def test_a_convention_is_judged_as_a_whole(share: Any, is_right: bool) -> None:
    [tensor] = compare(onnx.parser.parse_model(POOL), "refgrad@numpy", at_ties(share)).tensors
    assert tensor.ok is is_right, tensor.b.reason
    assert ("along (1, …, 1) the derivative is 3.3" in tensor.b.reason) is not is_right


@pytest.mark.parametrize(("of_a", "of_b"), [(1, 0), (0, 1), (0.5, 0.5), (0.3, 0.7), (1, 1), (0, 0), (0.3, 0.3)])
def test_operands_that_tie_are_judged_together(of_a: float, of_b: float) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[3] a, float[3] b) => (float[3] y) { y = Max(a, b) }'
    )
    a, b, dy = np.float32([1, 2, 3]), np.float32([0, 2, 3]), np.float32([1, -2, 0.5])
    gradients = {"a_grad": dy * np.float32([1, of_a, of_a]), "b_grad": dy * np.float32([0, of_b, of_b])}
    found = compare(model, "refgrad@numpy", {"a": a, "b": b, "y_grad": dy, **gradients})
    assert found.ok is (of_a + of_b == 1), [(tensor.name, tensor.b.reason) for tensor in found.tensors]


@pytest.mark.parametrize("slopes", [(1, 0), (1, -1), (0.5, 1), (0, 0)])
def test_conventions_of_unlike_operators_may_differ(slopes: tuple[float, float]) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        g (float[30] a, float[30] b) => (float[30] y) { r = Relu(a)  n = Abs(b)  y = Sub(r, n) }
    """)
    zeros, ones = np.zeros(30, np.float32), np.ones(30, np.float32)
    recording = {"a": zeros, "b": zeros, "a_grad": slopes[0] * ones, "b_grad": -slopes[1] * ones, "y_grad": ones}
    assert compare(model, "refgrad@numpy", recording).ok


def test_a_rule_that_is_no_derivative_at_a_tie_is_located() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        g (float[3, 4] a, float[3, 4] b) => (float[3, 4] y) { t = Tanh(a)  [tie] p = Max(t, b)  q = Exp(p)  y = Sin(q) }
    """)
    zeros = np.zeros((3, 4), np.float32)

    def whole(made: ModelProto) -> None:
        for node in made.graph.node:
            if node.name.startswith("tie_Grad/") and node.op_type == "Sum":
                node.op_type = "Max"

    found = compare(model, "refgrad@numpy", Live(builder_with(whole), "numpy"), {"a": zeros, "b": zeros})
    assert not found.ok
    assert found.b.rules is not None
    assert [fault.nodes for fault in found.b.rules.faults] == [("tie",)]


# Recordings


def test_cotangents_are_given_by_output() -> None:
    model, feeds = network()
    held = recorded(model, feeds)
    gradients = {name: value for name, value in held.items() if name not in feeds and name != "y_grad"}
    given = {"y": held["y_grad"]}
    assert compare(model, "refgrad@numpy", gradients, feeds, cotangent=given).ok
    assert not compare(model, "refgrad@numpy", gradients, feeds, cotangent="random").ok
    with pytest.raises(FeedError, match=r"The cotangent of 'y' has the shape \(3,\)"):
        compare(model, "refgrad@numpy", gradients, feeds, cotangent={"y": np.ones(3)})


def test_a_case_is_compared_at_the_cotangents_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("refgrad.cli.debugging.comparing.compare", lambda *_, **given: seen.append(given["cotangent"]))
    sides = ("--a", "refgrad@numpy", "--b", "refgrad:ort@numpy")
    main(["compare", "--case", "Tanh-scalar-static-opset16-float32", *sides])  # there is nothing to print
    [case] = select(tables(["Tanh"]), names="Tanh-scalar-static-opset16-float32")
    assert seen == [ask(case).cotangents]


def test_a_recording_brings_its_inputs_and_cotangents() -> None:
    model, feeds = network()
    found = compare(model, "refgrad@numpy", recorded(model, feeds))
    assert found.ok
    assert found.feeds == "your own"
    assert {tensor.name for tensor in found.tensors} == {"x", "w1", "b1", "w2", "scale", "y"}


def test_a_wrong_tensor_of_a_recording_is_named() -> None:
    model, feeds = network()
    values = recorded(model, feeds)
    values["w2_grad"] = 1.001 * values["w2_grad"]
    found = compare(model, values, "refgrad@numpy")
    assert [tensor.name for tensor in found.tensors if not tensor.ok] == ["w2"]
    assert verdicts(found)["w2 gradient"] == "a is wrong"


def test_what_a_recording_lacks_is_said() -> None:
    model, feeds = network()
    values = {name: value for name, value in recorded(model, feeds).items() if name not in ("w2_grad", "b1_grad")}
    assert compare(model, "refgrad@numpy", values).ok  # what is there can be decided
    found = compare(model, "refgrad@numpy", values, wrt=["x", "w2"])
    assert not found.ok
    assert verdicts(found)["w2 gradient"] == "b: missing"
    with pytest.raises(FeedError, match="it does not have 'x'"):
        compare(model, "refgrad@numpy", {"w1_grad": values["w1_grad"]})


def test_names_of_another_framework_are_told_by_values() -> None:
    model, feeds = network()
    ours = recorded(model, feeds)
    held = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    theirs = {
        "fc1.weight": held["w1"].T,
        "fc1.bias": held["b1"],
        "fc2.weight": held["w2"].T,
        "norm.weight": held["scale"],
    }
    gradients = {"fc1.weight": ours["w1_grad"].T, "fc1.bias": ours["b1_grad"], "fc2.weight": ours["w2_grad"].T}
    recording = {**feeds, "y_grad": ours["y_grad"], **theirs, **{f"{n}_grad": v for n, v in gradients.items()}}
    found = compare(model, "refgrad@numpy", recording)
    assert found.ok
    assert {t.name: t.of for t in found.tensors if t.kind == "gradient"} == {
        "fc1.weight": ("w1",), "fc1.bias": ("b1",), "fc2.weight": ("w2",)
    }  # fmt: skip
    wrong = {**recording, "fc1.weight_grad": 1.01 * recording["fc1.weight_grad"]}
    assert verdicts(compare(model, "refgrad@numpy", wrong))["fc1.weight gradient"] == "b is wrong"


def test_gradients_alone_are_told_by_their_content() -> None:
    rng = np.random.default_rng(0)
    ours = {"w": rng.standard_normal((1, 12, 5)), "r": rng.standard_normal((3, 4)), "b": rng.standard_normal(6)}
    q, k, v = np.split(ours["w"][0], 3)
    theirs = {"stacked": np.concatenate([v, q, k]), "turned": ours["r"].T, "flat": ours["b"].reshape(2, 3)}
    found = match(network()[0], Recording("test", {}, theirs), ours)
    assert not found.left
    for name, value in theirs.items():
        np.testing.assert_allclose(found.found[name].made_of(ours), value)


def test_two_that_fit_are_not_guessed() -> None:
    same = np.arange(6.0).reshape(2, 3)
    found = match(network()[0], Recording("test", {}, {"theirs": same}), {"one": same, "two": same.copy()})
    assert not found.found
    assert "theirs" in found.left


def test_recordings_are_read_from_files_and_folders(tmp_path: Path) -> None:
    model, feeds = network()
    values = recorded(model, feeds)
    np.savez(tmp_path / "r.npz", **values)
    folder = tmp_path / "r"
    folder.mkdir()
    for k, (name, value) in enumerate(values.items()):
        (folder / f"{k}.pb").write_bytes(numpy_helper.from_array(value, name).SerializeToString())
    for path in (tmp_path / "r.npz", folder):
        assert compare(model, "refgrad@numpy", str(path)).ok
    (folder / "0.pb").write_bytes(b"\xff" * 9)
    with pytest.raises(FeedError, match="is no Tensor"):
        read_recording(folder)
    with pytest.raises(FeedError, match=r"has no \.pb files"):
        read_recording(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nobody", "neither a side nor a file"),
        ("@numpy", "neither a side nor a file"),
        ("nobody@numpy", "There is no builder 'nobody'"),
        ("refgrad@nobody", "There is no executor 'nobody'"),
        ("refgrad@numpy:int8", "ends in 'int8', which is not a precision. Give one of 'float16', 'bfloat16'"),
        ("refgrad@mine:Class:double", "ends in 'double', which is not a precision"),
    ],
)
def test_a_side_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        side_of(text)


def test_a_side_is_read() -> None:
    side = side_of("refgrad:ort@numpy:float64")
    assert isinstance(side, Live)
    assert (side.builder, side.executor, side.precision) == ("refgrad:ort", "numpy", "float64")
    assert str(side) == "refgrad:ort@numpy:float64"


# The command


def test_the_command_prints_and_writes_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, feeds = network()
    onnx.save(model, "m.onnx")
    values = recorded(model, feeds)
    values["w2_grad"] = -values["w2_grad"]
    np.savez("r.npz", **values)
    words = ["compare", "m.onnx", "--a", "refgrad@numpy"]
    assert main([*words, "--b", "r.npz", "-o", "r.html", "-o", "r.json"]) == 1
    assert "b is wrong" in capsys.readouterr().out
    told = json.loads(Path("r.json").read_text())
    assert [tensor["name"] for tensor in told["tensors"] if tensor["b"]["verdict"] == "wrong"] == ["w2"]
    page = Path("r.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "http" not in page
    assert main([*words, "--b", "refgrad@numpy:float64"]) == 0
    for wrong in (["--b", "nobody"], ["--b", "r.npz", "-o", "r.npz"], ["--b", "r.npz", "-o", "r.txt"]):
        before = Path("r.npz").read_bytes()
        assert main([*words, *wrong]) == 2
        assert Path("r.npz").read_bytes() == before


def test_the_page_shows_the_nodes_at_fault() -> None:
    model, feeds = network()
    found = compare(model, "refgrad@numpy", Live("refgrad", Planted("Tanh_1", lambda y: 1.01 * y)), feeds)
    page = comparison_page.page(found)
    assert "Tanh: at fault" in page
    assert "t float32[5,4]" in page.replace('<tspan class="q">', "")
    wrong = sum(tensor.b.verdict == "wrong" for tensor in found.tensors)
    assert page.count("<figcaption>") == 3 * wrong
    assert page.count("<details") == min(wrong, 4)
    assert "is wrong in" in page
    assert "the kernel of Tanh &#x27;Tanh_1&#x27;" in page
    assert f"numpy {np.__version__}" in page
    assert "<script" not in page


def test_the_way_of_a_kernels_error_is_shown_with_its_size() -> None:
    model, feeds = network()
    found = compare(model, "refgrad@numpy", Live("refgrad", Planted("Tanh_1", lambda y: 1.01 * y)), feeds)
    assert {path.tensor for path in found.b.paths} == {t.name for t in found.tensors if t.b.verdict == "wrong"}
    [to_w2] = [path for path in found.b.paths if path.tensor == "w2"]
    assert (to_w2.stations[0].value, to_w2.stations[-1].value) == ("t", "w2_grad")
    assert to_w2.stations[0].error == pytest.approx(0.01, rel=1e-3)
    assert all(station.error and station.error > 1e-4 for station in to_w2.stations)
    assert to_w2.stations[-1].error == pytest.approx(to_w2.error, rel=0.5)
    [line] = comparisons.ways_of(found.b)
    assert line.startswith("the error spreads: Tanh 'Tanh_1' (0.01) → ")
    assert line.count("→") <= 5
    assert not found.a.paths
    assert not found.a.around
    told = json.loads(comparisons.text_of(found))
    assert told["b"]["paths"][0]["stations"][0]["node"] == "Tanh 'Tanh_1'"


def test_the_way_of_a_rules_error_goes_backwards() -> None:
    model, feeds = network()
    found = compare(model, "refgrad@numpy", Live(builder_with(scaled("Tanh_1", 1.5)), "numpy"), feeds)
    [to_w1] = [path for path in found.b.paths if path.tensor == "w1"]
    assert [station.value for station in to_w1.stations] == ["c", "n", "s", "b", "a", "w1"]
    assert [station.node for station in to_w1.stations][:2] == [
        "the rule of Tanh 'Tanh_1'",
        "the rule of MatMul 'MatMul_2'",
    ]
    assert to_w1.stations[0].error is not None
    [around] = found.b.around
    assert around.nodes == ("Tanh_1",)
    operators = [node.name for node in around.model.graph.node]
    assert "MatMul_2" in operators
    assert "Tanh_1_Grad/Sub_1" in operators
    assert "MatMul_1" not in operators
    assert not any(tensor.raw_data for tensor in around.model.graph.initializer)
    assert "Mul" in comparison_page.page(found)


def test_a_way_in_a_line_has_six_stations_at_most() -> None:
    stations = tuple(Station(f"v{k}", f"N{k}", 0.5) for k in range(9))
    shown = str(ErrorPath("w", stations, 0.25))
    assert shown == "N0 (0.5) → N1 (0.5) → N2 (0.5) → 5 more → N8 (0.5) → tensor 'w' (0.25)"
    assert str(ErrorPath("w", stations[:5], None)).count("→") == 5
    assert "more" not in str(ErrorPath("w", stations[:5], None))


def test_errors_that_vanish_when_they_are_looked_at_are_not_shown() -> None:
    """An executor that is wrong only where it does not show the values between."""
    model, feeds = network()

    class Fusing(Planted):
        def prepare(self, model: Any, **options: Any) -> Any:
            if any(value.name == "c" for value in load_model(model).graph.output):
                return get_backend("numpy").prepare(model)
            return super().prepare(model, **options)

    graph = paths.TracedGraph(model, feeds)
    [tanh] = graph.positions(["Tanh_1"])
    for backend, known in ((Planted("Tanh_1", lambda y: 1.5 * y), True), (Fusing("Tanh_1", lambda y: 1.5 * y), False)):
        [matmul] = graph.positions(["MatMul_2"])
        [path] = paths.of_kernels(graph, [matmul], [paths.Wrong("y", "y", 0.3)], backend)
        assert [station.value for station in path.stations][:2] == ["c", "t"]
        assert all((station.error is not None) == known for station in path.stations)
    assert tanh > matmul


def test_a_report_in_markdown_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, feeds = network()
    onnx.save(model, "m.onnx")
    values = recorded(model, feeds)
    values["w2_grad"] = -values["w2_grad"]
    np.savez("r.npz", **values)
    assert main(["compare", "m.onnx", "--a", "refgrad@numpy", "--b", "r.npz", "-o", "r.md"]) == 1
    text = Path("r.md").read_text(encoding="utf-8")
    assert text.startswith("# The two differ: refgrad@numpy and r.npz\n")
    assert "| w2 | gradient | right | wrong |" in text
    assert "expected" in text
    assert f"numpy {np.__version__}" in text


def test_a_report_has_the_verdict_in_a_sentence_the_elements_and_the_versions() -> None:
    model, feeds = network()
    values = recorded(model, feeds)
    values["w2_grad"] = np.array(values["w2_grad"])
    values["w2_grad"].flat[3] += 1
    found = compare(model, values, "refgrad@ort-cpu" if "ort-cpu" in BACKENDS else "refgrad@numpy")
    told = json.loads(comparisons.text_of(found))
    [wrong] = [tensor for tensor in told["tensors"] if tensor["a"]["verdict"] == "wrong"]
    assert told["sentence"] == f"recorded (a) is wrong in 1 of {len(found.tensors)} tensors."
    [element] = wrong["a"]["elements"][:1]
    assert element["found"] == pytest.approx(element["expected"] + 1)
    assert set(told["versions"]) >= {"refgrad", "onnx", "numpy", "Python", "processor"}
    assert "maps" not in wrong["a"]


def test_pictures_show_what_is_furthest_off() -> None:
    due = np.zeros((100, 3, 200))
    got = np.array(due)
    got[57, 1, 123] = 2.0
    got[3, 0, 5] = np.nan
    maps = maps_of(got, due)
    assert maps is not None
    flat = [value for row in maps.found for value in row]
    assert max(value for value in flat if np.isfinite(value)) == 2.0
    assert any(np.isnan(value) for value in flat)
    assert [one.at for one in elements_of(got, due)] == [(3, 0, 5), (57, 1, 123)]
    assert maps_of(np.zeros((0, 3)), np.zeros((0, 3))) is None
    assert maps_of(np.zeros(3), np.zeros(4)) is None
    scalar = maps_of(np.array(1.0), np.array(2.0))
    assert scalar is not None
    assert scalar.difference == ((-1.0,),)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda g: g.sum(0), "it has the shape [3]"),
        (lambda g: g[:1], "it has the shape [1, 3]"),
        (lambda g: g.sum(), "it has the shape []"),
        (lambda g: g * np.float32([[1], [2]]), "elements are off"),
        (lambda g: g[::-1], "elements are off"),
    ],
    ids=["summed", "truncated", "scalar", "a factor for each row", "reversed"],
)
def test_a_recorded_gradient_of_an_input_is_wrong_whatever_its_shape(change: Any, said: str) -> None:
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[2, 3] x) => (float[2, 3] y) { y = Tanh(x) }'
    model = onnx.parser.parse_model(text)
    feeds = {"x": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3) + np.float32(0.1)}
    tensors = recorded(model, feeds)
    tensors["x_grad"] = np.asarray(change(tensors["x_grad"]), np.float32)
    found = compare(model, "refgrad@numpy", tensors)
    [tensor] = [one for one in found.tensors if one.name == "x"]
    assert tensor.b.verdict == "wrong"
    assert said in tensor.b.reason


def test_nothing_to_compare_is_not_right() -> None:
    model, feeds = network()
    found = compare(model, "refgrad@numpy", {"other_grad": np.ones((17, 5), np.float32)}, feeds)
    assert not found.ok
    assert "there is nothing to compare" in json.dumps(comparisons.document(found)) or not found.tensors


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"x_grad": np.ones(2, np.int64)}, "type int64"),
        ({"x_grad": np.ones(2, np.complex64)}, "type complex64"),
        ({"x_grad": np.array(["a", "b"])}, "'x_grad'"),
        ({"x_grad": np.ones(2, np.float32), "x.grad": np.zeros(2, np.float32)}, "two gradients of 'x'"),
    ],
    ids=["integers", "complex", "texts", "twice"],
)
def test_a_recorded_gradient_that_is_none_is_refused(tensors: dict[str, np.ndarray], said: str) -> None:
    with pytest.raises(FeedError, match=said):
        Recording.of(tensors, "recorded", network()[0])


def test_a_recording_in_double_is_compared() -> None:
    model, feeds = network()
    tensors = {name: np.asarray(value, np.float64) for name, value in recorded(model, feeds).items()}
    assert compare(model, "refgrad@numpy", tensors).ok


def test_an_axis_too_many_is_wrong_on_an_executor() -> None:
    model, feeds = network()
    found = compare(
        model, "refgrad@numpy", Live("refgrad", Elsewhere(lambda name, value: np.asarray(value)[None])), feeds
    )
    assert {tensor.b.verdict for tensor in found.tensors} == {"wrong"}


class Failing(Planted):
    """The interpreter, which does not run some operators: whole models neither."""

    def __init__(self, *operators: str, of: str = "", change: Any = None) -> None:
        super().__init__(of, change)
        self.operators = operators

    def prepare(self, model: Any, **options: Any) -> Prepared:
        if failing := {node.op_type for node in model.graph.node} & {*self.operators}:
            raise BackendError(f"long {'words ' * 100} no kernel of {sorted(failing)[0]}")
        return super().prepare(model)


def test_the_sentence_says_which_nodes_a_runtime_does_not_run_and_why() -> None:
    model, feeds = network()
    executor = Failing("Tanh", of="Softmax_2", change=lambda y: 1.01 * y)
    found = compare(model, "refgrad@numpy", Live("refgrad", executor), feeds)
    told = comparisons.sentence(found)
    assert "has no gradient: it gets Softmax 'Softmax_2' wrong, and it does not run Tanh 'Tanh_1': " in told
    assert told.endswith("no kernel of Tanh.")
    assert len(told) < 500
    lines = list(comparisons.lines_of(found.b))
    assert sum("no kernel of Tanh" in line for line in lines) == 2  # the model, and the node
    assert not any("inf" in line for line in lines)


def test_the_sentence_says_which_nodes_a_builder_refuses() -> None:
    def refuses(problem: Problem) -> Built:
        if any(node.op_type == "Tanh" for node in problem.model.graph.node):
            raise BuilderError("refused", "no rule for Tanh")
        return Built.of(refgrad.gradient(problem.model, problem.wrt, list(problem.cotangents)))

    model, feeds = network()
    found = compare(model, "refgrad@numpy", Live(refuses, "numpy"), feeds)
    assert "has no gradient: it refuses Tanh 'Tanh_1': no rule for Tanh." in comparisons.sentence(found)
    lines = list(comparisons.lines_of(found.b))
    assert "it refuses Tanh 'Tanh_1': no rule for Tanh" in lines
    assert not any("at fault" in line or "formula" in line for line in lines)


@pytest.mark.parametrize("error", [BuilderError("refused", "opset 21: no"), CrashError("opset 21: no")])
def test_what_a_builder_says_of_every_node_is_said_once(error: Exception) -> None:
    def fails(problem: Problem) -> Built:
        raise error

    model, feeds = network()
    found = compare(model, "refgrad@numpy", Live(fails, "numpy"), feeds)
    deed = "refuses" if isinstance(error, BuilderError) else "fails on"
    [line] = [line for line in comparisons.lines_of(found.b) if "opset 21" in line]
    assert re.fullmatch(rf"it {deed} \w+ '\w+' and \d+ more nodes: opset 21: no", line)
    assert comparisons.sentence(found).endswith(f"(b) has no gradient: {line}.")
    short = comparisons.sentence(found, with_messages=False)
    assert short.endswith(f"(b) has no gradient: {line.partition(':')[0]}.")


def test_a_long_reason_is_cut_between_words() -> None:
    reason = " ".join(f"word{k}" for k in range(200))
    shown = comparisons._shortened(reason).split()
    assert "…" in shown
    assert {*shown} - {"…"} <= {*reason.split()}


@pytest.mark.parametrize("builder", ["onnx-ad", "onnxruntime:raw", "onnxruntime:module"])
def test_a_builder_that_is_not_installed_is_wrong_use(builder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = replace(BUILDERS[builder], missing=lambda: "it is not installed (pip install it)")
    monkeypatch.setitem(BUILDERS, builder, missing)
    said = f"The builder '{builder}' cannot be used here: it is not installed \\(pip install it\\)"
    for use in (side_of, lambda side: compare(*network()[:1], "refgrad@numpy", side)):
        with pytest.raises(OptionError, match=said):
            use(f"{builder}@numpy")
    with pytest.raises(OptionError, match=said):
        require(Plan(builders=(builder,)))


def test_groups_of_the_same_operators_are_told_together() -> None:
    groups = [NodeGroup((k, k + 1), (f"a{k}", f"b{k}"), ("MatMul", "Gemm"), 0.1) for k in range(3)]
    located = Located(0.1, 1e-6, groups=tuple(groups), is_right=False)
    seen = Seen("wrong", "off")
    tensor = Tensor("x", "gradient", ("x",), "name", Seen("right"), seen)
    found = Comparison((tensor,), Sided("a"), Sided("b", kernels=located), "random", 0, "refgrad in double")
    assert comparisons.sentence(found).endswith("because of MatMul 'a0', Gemm 'b0' together (and 2 more such groups).")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_gradients_that_are_not_finite_are_compared(bad: float) -> None:
    """Also where a sum of recorded gradients may be the gradient of an initializer that an exporter merged."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> g (float[4] x) => (float[4] y) <float[4] one = {1, 1, 1, 1}>
        { [a] h = Mul(x, one)  [t] s = Sin(h)  [b] y = Mul(s, one) }""")
    x = np.float32([0.1, 0.2, 0.3, 0.4])
    grads = {"scale.a_grad": np.full(4, bad, np.float32), "scale.b_grad": np.sin(x), "x_grad": np.cos(x)}
    values = {"scale.a": np.ones(4, np.float32), "scale.b": np.ones(4, np.float32)}
    found = compare(model, "refgrad@numpy", {"x": x, **values, **grads})
    assert not found.ok
    assert [tensor.b.verdict for tensor in found.tensors if tensor.name == "x"] == ["right"]
