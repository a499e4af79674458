"""Planted faults of kernels are found by replaying each node alone, and proved by repair; sound executors are not blamed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, NodeProto, helper, numpy_helper
from planting import BACKENDS, NETWORK, Elsewhere, Fault, Planted, builder_with, network, of, scaled

import refgrad
from refgrad.backends import Backend, Prepared, get_backend
from refgrad.backends.base import graph_inputs, graph_outputs, load_model
from refgrad.conformance.locating import bisection
from refgrad.conformance.locating.bisection import bisect
from refgrad.conformance.locating.comparing import compare
from refgrad.conformance.locating.location import Located, locate
from refgrad.conformance.locating.replay import Replay, wrong_nodes
from refgrad.conformance.locating.sides import Live
from refgrad.conformance.locating.windows import groups
from refgrad.conformance.problems.observation import Built
from refgrad.conformance.problems.problem import Problem
from refgrad.errors import BackendError, BuilderError
from refgrad.tables.registry import RULES


class Broken(Backend):
    """An executor that runs node by node, and gets some of them wrong."""

    name = "broken"

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults

    def description(self) -> str:
        return "the interpreter with planted faults"

    def prepare(self, model: Any, **options: Any) -> Prepared:
        return _Broken(load_model(model), self.faults)


class _Broken(Prepared):
    def __init__(self, model: ModelProto, faults: tuple[Fault, ...]) -> None:
        self.model, self.faults = model, faults
        self.inputs, self.outputs = graph_inputs(model.graph), graph_outputs(model.graph)

    def run(self, feeds: Mapping[str, Any], outputs: Iterable[str] | None = None) -> dict[str, Any]:
        values = {t.name: numpy_helper.to_array(t) for t in self.model.graph.initializer} | dict(feeds)
        for node in self.model.graph.node:
            made = ModelProto()
            made.CopyFrom(self.model)
            del made.graph.node[:], made.graph.output[:], made.graph.input[:], made.graph.initializer[:]
            made.graph.node.append(node)
            read = [name for name in dict.fromkeys(node.input) if name]
            made.graph.input.extend(
                helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(values[n].dtype), values[n].shape)
                for n in read
            )
            made.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in node.output if name)
            results = get_backend("numpy").prepare(made).run({name: values[name] for name in read})
            for fault in self.faults:
                inputs = [values.get(name) for name in node.input]
                wrong = fault(node, [*inputs, *(results[name] for name in node.output if name)])
                if wrong is not None:
                    results = dict(zip(results, wrong, strict=True))
            values |= results
        return {value.name: values[value.name] for value in self.model.graph.output}


def gradient_of(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> tuple[ModelProto, dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    made = refgrad.gradient(model)
    outputs = get_backend("numpy").prepare(model).run(feeds)
    cotangents = {f"{n}_grad": rng.standard_normal(v.shape).astype(v.dtype) for n, v in outputs.items()}
    names = {value.name for value in made.graph.input}
    return made, {name: value for name, value in {**feeds, **cotangents}.items() if name in names}


def culprits(found: Located) -> set[str]:
    return {one.found.operator for one in found.culprits}


@pytest.mark.parametrize("executor", BACKENDS)
def test_a_sound_executor_is_not_blamed(executor: str) -> None:
    model, feeds = gradient_of(*network())
    found = locate(model, feeds, executor)
    assert found.is_right
    assert not found.culprits
    assert not found.acquitted
    assert found.judged > 20
    assert not found.unjudged


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a wrong axis": ("Softmax", lambda x, y: np.exp(x) / np.exp(x).sum(0)),
    "a factor of 1.001": ("Tanh", lambda x, y: 1.001 * y),
    "a sign": ("ReduceSum", lambda x, axes, y: -y),
    "float16 on the way": ("MatMul", lambda a, b, y: (a.astype(np.float16) @ b.astype(np.float16)).astype(np.float32)),
    "one element": ("Mul", lambda a, b, y: np.where(np.arange(y.size).reshape(y.shape) == y.size - 1, y * 1.01, y)),
    "another epsilon": ("LayerNormalization", lambda x, s, y: y * (1 - 1e-4)),
}


@pytest.mark.parametrize("which", FAULTS)
def test_a_planted_fault_is_named_and_proved(which: str) -> None:
    op_type, change = FAULTS[which]
    model, feeds = gradient_of(*network())
    found = locate(model, feeds, Broken(of(op_type, change)))
    assert not found.is_right
    assert culprits(found) == {op_type}
    assert {one.operator for one in found.acquitted} <= {op_type}
    assert not found.unexplained
    assert found.left < 1e-5 < found.error


def test_two_culprits_have_their_shares() -> None:
    model, feeds = gradient_of(*network())
    faults = (of("Softmax", lambda x, y: y + 0.01 * x, 1), of("Softmax", lambda x, y: 1.001 * y, 2))
    found = locate(model, feeds, Broken(*faults))
    assert [one.found.name for one in found.culprits] == ["Softmax_1", "Softmax_2"]
    first, second = (one.left for one in found.culprits)
    assert found.error > 2 * first > 100 * second
    assert not found.unexplained


def test_a_node_that_fails_is_a_culprit() -> None:
    def raises(node: NodeProto, values: list[Any]) -> None:
        if node.op_type == "Tanh":
            raise BackendError("no kernel of Tanh")

    model, feeds = gradient_of(*network())
    found = locate(model, feeds, Broken(raises))
    assert "no kernel of Tanh" in found.failed
    assert culprits(found) == {"Tanh"}
    assert not found.unexplained


def test_nodes_that_fail_are_repaired_together() -> None:
    def raises(node: NodeProto, values: list[Any]) -> None:
        if node.op_type in ("Tanh", "Softmax"):
            raise BackendError(f"no kernel of {node.op_type}")

    model, feeds = gradient_of(*network())
    found = locate(model, feeds, Broken(raises))
    assert [one.found.name for one in found.culprits] == ["Softmax_1", "Tanh_1", "Softmax_2"]
    assert all(one.left < 1e-5 for one in found.culprits)
    assert not found.unexplained


def test_a_wrong_node_before_a_node_that_is_repaired_is_a_culprit() -> None:
    model = parsed("(float[3] x) => (float[3] y) { [e] a = Exp(x)  [t] b = Tanh(a)  [s] y = Sin(b) }")
    feeds = {"x": np.float32([0.1, 0.2, 0.3])}

    def fails(node: NodeProto, values: list[Any]) -> None:
        if node.op_type == "Tanh":
            raise BackendError("no kernel")

    wrong = of("Tanh", lambda x, y: 1.1 * y)
    for other in (wrong, fails):
        found = locate(model, feeds, Broken(of("Exp", lambda x, y: 1.1 * y), other))
        assert culprits(found) == {"Exp", "Tanh"}
        assert not found.acquitted


@pytest.mark.parametrize("what", ["ir", "opset"])
def test_a_version_that_an_executor_does_not_read_is_no_fault_of_nodes(what: str) -> None:
    class Old(Broken):
        def prepare(self, model: Any, **options: Any) -> Prepared:
            proto = load_model(model)
            if (proto.ir_version > 9) if what == "ir" else (proto.opset_import[0].version > 17):
                raise BackendError("too new")
            return super().prepare(model)

    model, feeds = gradient_of(*network())
    model.ir_version = 10
    found = locate(model, feeds, Old())
    assert "one Identity" in found.failed
    assert "too new" in found.failed
    assert not found.culprits


def test_a_wrong_node_without_influence_is_acquitted() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> g (float[3] x) => (float[3] y) <float[1] zero = {0}>
        { [e] a = Exp (x)  [z] b = Mul (a, zero)  [s] y = Add (x, b) }""")
    found = locate(model, {"x": np.float32([1, 2, 3])}, Broken(of("Exp", lambda x, y: 2 * y)))
    assert found.is_right
    assert [one.operator for one in found.acquitted] == ["Exp"]


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "double"])
def test_rounding_of_other_types_is_no_fault(kind: str) -> None:
    text = NETWORK.replace("float[N", f"{kind}[N")
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype({"float16": 10, "bfloat16": 16, "double": 11}[kind])
    for name, shape in {"w1": (6, 8), "b1": (8,), "w2": (8, 4), "scale": (8,)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(dtype), name))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axes"))
    feeds = {"x": rng.standard_normal((5, 6)).astype(dtype)}
    for executor in BACKENDS if kind == "double" else ["numpy"]:
        found = list(Replay(model, feeds).run(get_backend(executor)))
        assert not wrong_nodes(found), [str(one) for one in wrong_nodes(found)]


IF = """
    <ir_version: 8, opset_import: ["": 18]> g (float[3] x, bool c) => (float[3] y) <float[3] w = {1, 2, 3}> {
        [if] h = If (c) <then_branch = t () => (float[3] u) { [mul] u = Mul (x, w) },
                         else_branch = e () => (float[3] v) { [exp] v = Exp (x) }>
        [neg] y = Neg (h) }"""
SCAN = """
    <ir_version: 8, opset_import: ["": 18]> g (float[3] x, float[5, 3] s) => (float[3] y) {
        [scan] y = Scan <num_scan_inputs = 1, body = b (float[3] c, float[3] e) => (float[3] n) {
            [add] a = Add (c, e)  [tanh] n = Tanh (a) }> (x, s) }"""


@pytest.mark.parametrize(("text", "nodes"), [(IF, ["if", "mul", "neg"]), (SCAN, ["scan", "add", "tanh"])])
def test_nodes_of_bodies_are_replayed(text: str, nodes: list[str]) -> None:
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    feeds = {v.name: rng.standard_normal((5, 3) if v.name == "s" else 3).astype(np.float32) for v in model.graph.input}
    if "c" in feeds:
        feeds["c"] = np.array(True)
    for executor in BACKENDS:
        found = list(Replay(model, feeds).run(get_backend(executor)))
        assert [one.name for one in found] == nodes
        assert not any(one.is_wrong or one.why for one in found)


def test_a_fault_in_a_body_is_named_with_its_round() -> None:
    model, rng = onnx.parser.parse_model(SCAN), np.random.default_rng(0)
    feeds = {"x": np.zeros(3, np.float32), "s": rng.standard_normal((5, 3)).astype(np.float32)}
    found = locate(model, feeds, Planted("tanh", lambda y: 1.01 * y))
    [culprit] = found.culprits
    assert culprit.found.name == "scan"
    assert [one.name for one in culprit.found.inside] == ["tanh"]
    assert "'scan', round" in str(culprit.found.inside[0])
    assert not found.unexplained


class Fusing(Backend):
    """The interpreter after a pass that fuses MatMul and Add, and gets the product wrong. What is an output is not fused."""

    name = "fusing"

    def description(self) -> str:
        return "the interpreter with a bad fusion"

    def prepare(self, model: Any, **options: Any) -> Prepared:
        made = ModelProto()
        made.CopyFrom(load_model(model))
        graph, outputs = made.graph, {value.name for value in made.graph.output}
        products = {node.output[0] for node in graph.node if node.op_type == "MatMul"} - outputs
        graph.initializer.append(numpy_helper.from_array(np.float32(1.001), "fused_factor"))
        for node in list(graph.node):
            if node.op_type == "Add" and node.input[0] in products:
                at = list(graph.node).index(node)
                graph.node.insert(
                    at, helper.make_node("Mul", [node.input[0], "fused_factor"], [f"{node.input[0]}_fused"])
                )
                graph.node[at + 1].input[0] += "_fused"
        return get_backend("numpy").prepare(made)


def test_nodes_that_are_wrong_together_alone_are_named_together() -> None:
    model, feeds = gradient_of(*network())
    found = locate(model, feeds, Fusing())
    assert not found.culprits
    assert [one.nodes for one in found.groups] == [("MatMul_1", "Add_1")]
    assert found.left < 1e-5 < found.error
    assert not found.unexplained


class FusingConstants(Fusing):
    """So too, and only where the Add reads a Constant of the model."""

    name = "fusing constants"

    def prepare(self, model: Any, **options: Any) -> Prepared:
        nodes = load_model(model).graph.node
        constants = {node.output[0] for node in nodes if node.op_type == "Constant"}
        fused = any(node.op_type == "Add" and constants & set(node.input) for node in nodes)
        return super().prepare(model) if fused else get_backend("numpy").prepare(model)


def test_nodes_that_are_wrong_together_beside_a_constant_are_named() -> None:
    model, feeds = network()
    (bias,) = (tensor for tensor in model.graph.initializer if tensor.name == "b1")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["b1"], "bias", value=bias))
    model.graph.initializer.remove(bias)
    [found] = groups(model, feeds, FusingConstants())
    assert found.nodes == ("MatMul_1", "Add_1")
    assert found.is_proved


class Caching(Broken):
    """The interpreter with a cache: the second node of a session that reads a matrix gets it in reverse."""

    def prepare(self, model: Any, **options: Any) -> Prepared:
        made = ModelProto()
        made.CopyFrom(load_model(model))
        matrices = {tensor.name: tensor for tensor in made.graph.initializer if len(tensor.dims) == 2}
        read: set[str] = set()
        for node in made.graph.node:
            for k, name in enumerate(node.input):
                if name in read:
                    reversed_ = numpy_helper.to_array(matrices[name])[::-1].copy()
                    made.graph.initializer.append(numpy_helper.from_array(reversed_, f"{name}/{node.name}"))
                    node.input[k] = f"{name}/{node.name}"
            read |= {name for name in node.input if name in matrices}
        return super().prepare(made)


def test_every_group_is_named() -> None:
    """The nodes of a group lie in both halves of the model, as a node and its gradient do."""
    model, feeds = gradient_of(*network())
    found = locate(model, feeds, Caching())
    assert not found.culprits
    readers = [[node.name for node in model.graph.node if name in node.input] for name in ("w1", "w2")]
    assert sorted(sorted(one.nodes) for one in found.groups) == sorted(map(sorted, readers))
    assert found.left < 1e-5 < found.error
    assert not found.unexplained


def test_groups_beside_a_wrong_node_are_proved() -> None:
    model, feeds = gradient_of(*network())
    found = locate(model, feeds, Caching(of("Softmax", lambda x, y: 1.01 * y, 2)))
    assert [one.found.name for one in found.culprits] == ["Softmax_2"]
    assert len(found.groups) == 2
    assert not found.unexplained


@pytest.mark.parametrize("factor", [-1.0, 1.001, 0.0])
@pytest.mark.parametrize("name", ["MatMul_1", "Tanh_1", "Softmax_2", "Mul_1", "LN"])
def test_a_wrong_rule_is_named(name: str, factor: float) -> None:
    model, feeds = network()
    found = bisect(model, feeds, builder_with(scaled(name, factor)))
    assert [one.nodes for one in found.faults] == [(name,)]
    assert found.faults[0].kind == "wrong"
    assert found.built <= 20


def test_two_wrong_rules_are_both_named() -> None:
    model, feeds = network()

    def fault(made: ModelProto) -> None:
        scaled("MatMul_1", 2.0)(made)
        scaled("Softmax_2", 1.01)(made)

    found = bisect(model, feeds, builder_with(fault))
    assert [one.nodes for one in found.faults] == [("MatMul_1",), ("Softmax_2",)]


@pytest.mark.parametrize("builder", ["refgrad", "refgrad:ort"])
def test_a_sound_builder_is_not_blamed(builder: str) -> None:
    model, feeds = network()
    found = bisect(model, feeds, builder)
    assert not found.faults
    assert not found.silent
    assert found.built == 1


def test_a_rule_that_is_refused_or_crashes_is_named() -> None:
    model, feeds = network()

    def refuses(problem: Problem) -> Built:
        if any(node.op_type == "LayerNormalization" for node in problem.model.graph.node):
            raise BuilderError("refused", "no LayerNormalization here")
        if any(node.op_type == "ReduceMean" for node in problem.model.graph.node):
            raise KeyError("axes")
        return Built.of(refgrad.gradient(problem.model, problem.wrt, list(problem.cotangents)))

    found = bisect(model, feeds, refuses)
    assert [(one.kind, one.nodes) for one in found.faults] == [("refused", ("LN",)), ("crashed", ("ReduceMean_1",))]
    assert "no LayerNormalization here" in found.faults[0].message


@pytest.mark.parametrize("operator", [op for domain, op in RULES if not domain])
def test_a_formula_is_one_line(operator: str) -> None:
    fault = bisection.Fault("crashed", ("node",), (operator,))
    formula = bisection._explained(fault, "mine", network()[0]).formula
    assert formula
    assert "\n" not in formula


def test_what_is_wrong_together_alone_is_named_together() -> None:
    """A value that two nodes read: its fan-out is dropped."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> g (float[3] x) => (float[3] y)
        { [a] a = Sin (x)  [e] b = Exp (a)  [t] c = Tanh (b)  [m] d = Mul (c, b)  [n] y = Neg (d) }""")

    def fault(made: ModelProto) -> None:
        for node in list(made.graph.node):  # the sum of the cotangents of b loses a term
            if node.op_type in ("Add", "Sum") and len(made.graph.node) > 6:
                del node.input[1:]
                node.op_type = "Identity"

    found = bisect(model, {"x": np.float32([0.1, 0.4, 0.9])}, builder_with(fault))
    [one] = found.faults
    assert (one.kind, one.value, one.nodes) == ("wrong", "b", ("e", "m"))
    assert one.message == "the contribution of Mul 'm' to the cotangent of 'b' is lost"


FANS = """
    (float[4, 6] x) => (float[4, 6] y)
    { [t] d = Tanh(x)  [s] e = Sin(d)  [r] f = Add(e, d)  [q] g = Mul(f, d)  [c] h = Cos(g)  [n] y = Neg(h) }
"""


def summing(value: str, change: Callable[[NodeProto], None]) -> Callable[[ModelProto], None]:
    """A change of the node that adds up the cotangents of a value."""

    def fault(made: ModelProto) -> None:
        for node in made.graph.node:
            if node.name.startswith(f"{value}_Grad/") and node.op_type in ("Add", "Sum"):
                change(node)

    return fault


def keep_first(node: NodeProto) -> None:
    node.op_type = "Identity"
    del node.input[1:]


def twice_the_last(node: NodeProto) -> None:
    node.op_type = "Sum"
    node.input.append(node.input[-1])


@pytest.mark.parametrize(("change", "word"), [(keep_first, "is lost"), (twice_the_last, "is counted 2 times")])
def test_a_value_is_named_whose_adjoint_lacks_a_term_or_has_one_twice(change: Any, word: str) -> None:
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)}
    found = bisect(parsed(FANS), feeds, builder_with(summing("d", change)))
    [one] = found.faults
    assert one.value == "d"
    assert one.nodes[0] == "t"
    assert set(one.nodes[1:]) < {"s", "r", "q"}
    assert word in one.message


def test_equal_contributions_are_named_together() -> None:
    """The cotangent of v in u·v·v has two equal contributions: nobody can tell which of them is lost."""
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)}
    text = "(float[4, 3] x) => (float[4, 3] y) { [t] v = Tanh(x)  [q] p = Mul(c, v)  [o] y = Mul(p, v) }"
    model = parsed(text.replace("=> (float[4, 3] y)", "=> (float[4, 3] y) <float[3] c = {1, 2, 3}>"))
    [one] = bisect(model, feeds, builder_with(summing("v", keep_first)), wrt=["x"]).faults
    assert one.value == "v"
    assert one.message == (
        "the equal contributions of Mul 'q' and Mul 'o' to the cotangent of 'v' are counted 1 times instead of 2"
    )


def test_several_faults_are_all_found_also_where_one_lies_across_others() -> None:
    """The fan-out of `d` is read before and behind the rules that are wrong for themselves."""

    def fault(made: ModelProto) -> None:
        summing("d", keep_first)(made)
        scaled("s", 1.01)(made)
        scaled("c", 0.9)(made)

    feeds = {"x": np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)}
    found = bisect(parsed(FANS), feeds, builder_with(fault))
    alone = {one.nodes for one in found.faults if not one.value}
    assert alone == {("s",), ("c",)}
    assert [one.value for one in found.faults if one.value] == ["d"]


def test_a_rule_through_which_a_right_gradient_goes_is_not_accused() -> None:
    """The rule of `a` is wrong by itself, in a part; the gradient by `b`, which goes through it in the whole, is right."""
    model = parsed("""(float[3, 4] x, float[4] b, float[3, 4] w) => (float[3, 4] y)
        { [a] s = Add(x, b)  [t] c = Tanh(s)  [m] y = Mul(c, w) }""")
    feeds = {"x": np.ones((3, 4), np.float32), "b": np.float32([1, 2, 3, 4]), "w": np.ones((3, 4), np.float32)}

    def fault(made: ModelProto) -> None:
        of_w = next((node for node in made.graph.node if "w_grad" in node.output), None)
        if of_w is None:  # of a part
            scaled("a", 2.0)(made)
        else:
            of_w.op_type = "Div"

    assert {one.nodes for one in bisect(model, feeds, builder_with(fault)).faults} == {("a",), ("m",)}
    found = bisect(model, feeds, builder_with(fault), right=["x", "b"])
    assert [one.nodes for one in found.faults] == [("m",)]
    compared = compare(model, "refgrad@numpy", Live(builder_with(fault), "numpy"), feeds)
    assert compared.b.rules is not None
    assert [one.nodes for one in compared.b.rules.faults] == [("m",)]


def test_nodes_that_draw_are_not_judged() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> g (float[3] x) => (float[3] y)
        { [r] r = RandomNormalLike (x)  [m] y = Mul (x, r) }""")
    found = bisect(model, {"x": np.float32([1, 2, 3])}, "refgrad")
    assert not found.faults
    assert found.silent == {"r": "'r' draws random numbers"}


def parsed(text: str) -> ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g {text}')


@pytest.mark.parametrize("wrong", ["NaN", "another shape", "one element"])
def test_what_a_builder_returns_is_judged_whatever_it_is(wrong: str) -> None:
    model = parsed("(float[1] x) => (float[1] y) { h = Tanh(x)  y = Neg(h) }")

    def fault(made: ModelProto) -> None:
        output = made.graph.output[-1].name
        node = next(one for one in made.graph.node if output in one.output)
        node.output[0] = f"{output}_right"
        number = {"NaN": np.nan, "another shape": np.ones((2, 1)), "one element": 4.0}[wrong]
        made.graph.initializer.append(numpy_helper.from_array(np.asarray(number, np.float32), "number"))
        made.graph.node.append(helper.make_node("Mul", [node.output[0], "number"], [output], "planted"))
        made.graph.output[-1].type.tensor_type.ClearField("shape")

    found = bisect(model, {"x": np.float32([-2])}, builder_with(fault))
    assert found.faults
    assert ("has the shape" in str(found.faults[0])) == (wrong == "another shape")


def test_sizes_that_are_not_declared_stay_so() -> None:
    """A rule that takes different names of axes for different sizes, and never sums: only where sizes are open."""
    model = parsed(
        "(float[A, B] x, float[C, D] y) => (float[E, F] z) { [first] h = Tanh(x)  [sum] s = Add(h, y)  [last] z = Neg(s) }"
    )

    def build(problem: Problem) -> Built:
        made = refgrad.gradient(problem.model, problem.wrt, list(problem.cotangents))
        is_open = any(dim.dim_param for value in problem.model.graph.input for dim in value.type.tensor_type.shape.dim)
        for node in made.graph.node:
            if is_open and node.op_type == "ReduceSum" and node.name.startswith("sum_Grad/"):
                node.op_type = "ReduceMax"
        return Built.of(made)

    found = bisect(model, {"x": np.float32([[0.1, 0.2]]), "y": np.float32([[1], [2]])}, build)
    assert [fault.nodes for fault in found.faults] == [("sum",)]


def test_a_convention_at_a_kink_is_no_fault_of_a_builder() -> None:
    model = parsed("(float[4] x) => (float[4] y) { [abs] h = Abs(x)  [tanh] y = Tanh(h) }")
    feeds = {"x": np.float32([0, -1, 0, 2])}

    def sloped(slope: float) -> Callable[[ModelProto], None]:
        def edit(made: ModelProto) -> None:
            sign = next((one for one in made.graph.node if one.op_type == "Sign"), None)
            if sign is None:
                return
            name, sign.output[0] = sign.output[0], "sign"
            made.graph.initializer.append(numpy_helper.from_array(np.float32(slope), "slope"))
            made.graph.initializer.append(numpy_helper.from_array(np.float32(0), "zero"))
            at = next(k for k, one in enumerate(made.graph.node) if one.output[0] == "sign") + 1
            made.graph.node.insert(at, helper.make_node("Where", ["flat", "slope", "sign"], [name], "planted"))
            made.graph.node.insert(at, helper.make_node("Equal", ["sign", "zero"], ["flat"], "at_kink"))

        return edit

    assert not bisect(model, feeds, "refgrad").faults
    assert not bisect(model, feeds, builder_with(sloped(0.5))).faults
    assert [fault.nodes for fault in bisect(model, feeds, builder_with(sloped(3.0))).faults] == [("abs",)]


def test_results_of_another_type_and_texts_are_compared() -> None:
    model = parsed("(float[2] x) => (float[2] y) { [tanh] h = Tanh(x)  [neg] y = Neg(h) }")
    feeds = {"x": np.float32([1, 2])}
    found = locate(model, feeds, Elsewhere(lambda name, value: value.astype(np.float64)))
    assert not found.is_right
    assert "has the type float64 instead of float32" in found.failed
    model = parsed("(string[2] x) => (string[2] y) { [same] h = Identity(x)  [again] y = Identity(h) }")
    other = np.array(["a", "c"], object)
    changed = Elsewhere(lambda name, value: other if value.dtype == object else value)
    found = locate(model, {"x": np.array(["a", "b"], object)}, changed)
    assert not found.is_right
    assert "'c'" in found.culprits[0].found.failed


def test_a_fault_of_bfloat16_is_seen() -> None:
    model = parsed("(bfloat16[3] x) => (bfloat16[3] y) { [tanh] h = Tanh(x)  [neg] y = Neg(h) }")
    feeds = {"x": np.array([0.5, 1, 2], ml_dtypes.bfloat16)}
    assert locate(model, feeds, "numpy").is_right
    found = locate(model, feeds, Planted("tanh", lambda y: 1.1 * y))
    assert [one.found.name for one in found.culprits] == ["tanh"]


def test_an_executor_that_runs_nothing_is_said_to() -> None:
    def fails(name: str, value: Any) -> Any:
        raise BackendError("no")

    model, feeds = network()
    found = locate(model, feeds, Elsewhere(fails))
    assert "one Identity" in found.failed
    assert not found.culprits


def test_a_refusal_is_not_told_as_a_known_wrong_gradient() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> g (float[2, 1, 3] x, float[1, 16, 3] w, float[1, 16, 4] r,
        float[1, 1, 4] c, float[1, 12] p) => (float[2, 1, 1, 4] y)
        { [lstm] y = LSTM <hidden_size = 4> (x, w, r, , , , c, p) }""")
    rng = np.random.default_rng(0)
    feeds = {value.name: rng.standard_normal(value.shape).astype(np.float32) for value in graph_inputs(model.graph)}

    def refuses(problem: Problem) -> Built:
        raise BuilderError("refused", "no")

    def wrong(problem: Problem) -> Built:
        made = refgrad.gradient(problem.model, problem.wrt, list(problem.cotangents))
        made.graph.initializer.append(numpy_helper.from_array(np.float32(2), "two"))
        output = made.graph.output[0].name
        node = next(node for node in made.graph.node if output in node.output)
        node.output[list(node.output).index(output)] = "half"
        made.graph.node.append(helper.make_node("Mul", ["half", "two"], [output], "planted"))
        return Built.of(made)

    [fault] = bisect(model, feeds, refuses, name="onnxruntime:raw").faults
    assert (fault.kind, fault.known) == ("refused", "")
    [fault] = bisect(model, feeds, wrong, name="onnxruntime:raw").faults
    assert (fault.kind, fault.known) == ("wrong", "leaves out the peepholes")
    model.graph.node[0].input[:] = ["x", "w", "r", "", "", "", "c"]
    [fault] = bisect(model, feeds, wrong, name="onnxruntime:raw").faults
    assert (fault.kind, fault.known) == ("wrong", "")
