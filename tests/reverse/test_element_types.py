"""Element types that no onnx inference finds follow from the schemas, and what needs them has its derivative."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from checking import assert_gradient
from onnx import helper
from onnx.backend.test.case.node import collect_testcases

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.model.inference.completion import infer_completely
from refgrad.model.inference.infer import infer
from refgrad.protos.traverse import attribute_value, versions_of
from refgrad.protos.types import element_type
from refgrad.tables import plugins
from refgrad.tables.element_types import element_types
from refgrad.tables.registry import BODY, RULES, ZERO

HEAD = '<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 3]> g (float[N,4,3] x, float[4] s, float[4] b, bool c)'
RNG = np.random.default_rng(5)
FEEDS = {
    "x": RNG.uniform(-2.0, 2.0, (2, 4, 3)).astype(np.float32),
    "s": RNG.uniform(0.5, 1.5, 4).astype(np.float32),
    "b": RNG.uniform(2.0, 3.0, 4).astype(np.float32),
    "c": np.array(True),
}
READERS = {
    "Gelu": "y = Gelu(h)",
    "Elu": "y = Elu(h)",
    "Softsign": "y = Softsign(h)",
    "Pow": "two = Constant<value_float=2.0>() y = Pow(h, two)",
    "Split": "u, v = Split<num_outputs=2, axis=1>(h) y = Mul(u, v)",
    "If": "y = If(c)<then_branch = t () => (float[N,4,3] u) { u = Gelu(h) }, "
    "else_branch = e () => (float[N,4,3] v) { v = Softsign(h) }>",
    "Scan": "z = Constant<value = float[1] {0.5}>() t, y = Scan<num_scan_inputs=1, body = b (float[1] a, r) => "
    "(float[1] n, float[P,Q] o) { n = Identity(a) o = Elu(r) }>(z, h)",
    "a sequence": "q = SplitToSequence<axis=1>(h) i = Constant<value_int=1>() r = SequenceAt(q, i) y = Gelu(r)",
}


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize(
    "norm", ["GroupNormalization<num_groups=2>(x, s, b)", "ai.onnx.ml.Scaler<offset=[0.5], scale=[2.0]>(x)"]
)
def test_what_reads_an_operator_that_onnx_does_not_infer(what: str, norm: str) -> None:
    if "Scaler" in norm and what == "Scan":
        pytest.skip("no Scan runs without the rank of what it slices")
    model = onnx.parser.parse_model(f"{HEAD} => (float[A,B,C] y) {{ h = {norm} {READERS[what]} }}")
    assert_gradient(Case(what, model, FEEDS, wrt=("x",)), directions=1)


def test_the_operators_with_a_body_that_onnx_does_not_infer() -> None:
    """`infer` stands in for each of them."""
    found = {
        schema.name
        for schema in onnx.defs.get_all_schemas()
        if schema.has_context_dependent_function
        and not schema.has_function
        and not schema.has_type_and_shape_inference_function
        and schema.domain == ""
    }
    assert found == {"GroupNormalization"}


def test_group_normalization_keeps_the_shape() -> None:
    model = onnx.parser.parse_model(
        f"{HEAD} => (float[A,B,C] y) {{ h = GroupNormalization<num_groups=2>(x, s, b) y = Gelu(h) }}"
    )
    [known] = [value for value in infer(model).value_info if value.name == "h"]
    assert [dim.dim_param or dim.dim_value for dim in known.type.tensor_type.shape.dim] == ["N", 4, 3]


@pytest.mark.filterwarnings("ignore")  # of the numbers that the node tests are made of
def test_types_agree_with_those_that_onnx_infers() -> None:
    """Every operator of onnx's node tests."""
    found, operators = 0, set()
    for case in collect_testcases(None):
        try:
            model = onnx.shape_inference.infer_shapes(case.model)
        except onnx.shape_inference.InferenceError:
            continue
        known = {
            v.name: element_type(v.type) for v in (*model.graph.value_info, *model.graph.input, *model.graph.output)
        }
        known |= {t.name: t.data_type for t in model.graph.initializer}
        versions = versions_of(model)
        for node in model.graph.node:
            made = element_types(
                node.op_type,
                node.domain,
                versions.get(node.domain),
                [known.get(name, 0) for name in node.input],
                {a.name: attribute_value(a) for a in node.attribute},
                len(node.output),
            )
            for name, kind in zip(node.output, made, strict=True):
                if kind and known.get(name):
                    assert kind == known[name], (case.name, node.op_type, name)
                    found += 1
                    operators.add((node.domain, node.op_type))
    assert found > 5_000
    assert len(operators) > 180


def test_every_operator_with_a_derivative_has_a_type() -> None:
    """By the schema, for inputs of type float. Bodies have types of their own."""
    without = set()
    for schema in onnx.defs.get_all_schemas():
        key = schema.domain, schema.name
        if not schema.domain and (key in RULES or key in BODY or key in ZERO):
            kinds = [1] * len(schema.inputs)
            given = {"to": 1, "dtype": 1, "value_float": 1.0}
            if not element_types(schema.name, schema.domain, None, kinds, given, 1)[0]:
                without.add(schema.name)
    assert without <= {"If", "Loop", "Scan", "SequenceMap"}


BODIES = {
    "a Loop in an If in a Scan": (
        "t, y = Scan<num_scan_inputs=1, body = b (a, r) => (n, o) { u = Unknown(r) k = If(c)<then_branch = t () => (v) "
        "{ q = Constant<value_int=2>() v = Loop<body = l (i, d, m) => (e, w) { e = Identity(d) w = Exp(u) }>(q, c, u) }, "
        "else_branch = e () => (z) { z = Neg(u) }> n = Identity(a) o = Add(k, u) }>(s, x)",
        {"t": 1, "y": 0},
    ),
    "types of several kinds": (
        "p = Unknown(x) u = Shape(p) v, w = TopK(x, u) y = Cast<to=11>(w) z = Equal(y, y)",
        {"u": 7, "v": 1, "w": 7, "y": 11, "z": 9},
    ),
}


@pytest.mark.parametrize("what", BODIES)
def test_types_through_bodies(what: str) -> None:
    """With an operator that nobody knows: what does not depend on it has a type."""
    text, expected = BODIES[what]
    model = onnx.parser.parse_model(f"{HEAD} => (y) {{ {text} }}")
    for node in model.graph.node:
        for graph in [model.graph, *(a.g for a in node.attribute if a.type == a.GRAPH)]:
            for inner in graph.node:
                inner.domain = "nobody" if inner.op_type == "Unknown" else inner.domain
    model.opset_import.append(helper.make_opsetid("nobody", 1))
    inferred = infer_completely(model)
    found = {v.name: element_type(v.type) for v in (*inferred.value_info, *inferred.output)}
    assert {name: found.get(name, 0) for name in expected} == expected


RANKS = {
    "a vector": ((4,), "MatMul(u, w)"),
    "a matrix": ((6, 4), "MatMul(u, w)"),
    "matrices": ((2, 3, 4), "MatMul(u, w)"),
    "matrices behind": ((2, 5, 3), "MatMul(w, u)"),
}


@pytest.mark.parametrize("what", RANKS)
def test_a_product_of_unknown_rank_in_dialect_ort(what: str) -> None:
    sizes, product = RANKS[what]
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (double[N] x, int64[K] sh, double[4,5] w) => (double t) '
        f"{{ u = Reshape(x, sh) y = {product} q = Mul(y, y) t = ReduceSum<keepdims=0>(q) }}"
    )
    rng = np.random.default_rng(1)
    feeds = {"x": rng.normal(size=int(np.prod(sizes))), "sh": np.array(sizes), "w": rng.normal(size=(4, 5))}
    assert_gradient(Case(what, model, feeds), "ort")
    made = refgrad.gradient(model, dialect="ort")
    if {node.domain for node in made.graph.node} == {""}:
        expected = get_backend("numpy").prepare(refgrad.gradient(model)).run(feeds | {"t_grad": np.array(1.0)})
        got = get_backend("ort-cpu").prepare(made).run(feeds | {"t_grad": np.array(1.0)})
        for name, value in expected.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-12)


@pytest.mark.parametrize(
    ("op_type", "attributes", "expected"),
    [("DequantizeWithOrder", {"to": 10}, 10), ("GemmFloat8", {"dtype": 10}, 10), ("GemmFloat8", {}, 1)],
)
def test_an_attribute_tells_the_type_of_an_operator_of_onnx_runtime(
    op_type: str, attributes: dict[str, int], expected: int
) -> None:
    plugins.load()
    assert element_types(op_type, "com.microsoft", 1, [3, 1], attributes, 1) == (expected,)
