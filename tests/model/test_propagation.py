"""What onnx learns of computed shapes costs no more than the shapes: tensors of data are hidden from it."""

from __future__ import annotations

import onnx
import pytest
from onnx import ModelProto, parser

import refgrad
from refgrad.errors import RefgradError
from refgrad.model.inference.propagation import infer_shapes
from refgrad.protos.traverse import graphs
from refgrad.protos.types import is_unnamed, type_of
from refgrad.worker import Worker

pytestmark = pytest.mark.interpreter

MEMORY = 3 << 29  # bytes of address space, most of which Python and its libraries reserve


def _model(text: str) -> ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')


def _doubled(first: str) -> str:
    doubling = " ".join(f"v{k + 1} = Concat<axis=0>(v{k}, v{k})" for k in range(33))
    return f"{first} {doubling} i = Constant<value_ints=[0]>() u = Gather(v33, i) z = Expand(x, u)"


HOSTILE = {
    "operands": "m (float[100000000] x, float[100000000] y) => (float[100000000] z) { z = Mul(x, y) }",
    "operands beside a shape": """m (float[68719476736] x, float[a, b] w) => (float[r, s] z) {
        y = Mul(x, x)  t = ReduceSum(y)  n = Shape(w)  e = Expand(t, n)  z = Mul(e, w) }""",
    "Range": """m (float[N] x) => (float[a, b] z) {
        a = Constant<value_int=0>()  b = Constant<value_int=8589934592>()  c = Constant<value_int=1>()
        r = Range(a, b, c)  d = Add(r, r)  i = Constant<value_ints=[0, 1]>()  s = Gather(d, i)  z = Reshape(x, s) }""",
    "a size that is computed": """m (float[1000000000] x, float[N] w) => (float[N] z) {
        s = Shape(x)  k = ConstantOfShape(s)  t = Add(k, k)  u = Mul(t, t)  y = ReduceMax<keepdims=0>(u)  z = Mul(w, y) }""",
    "Concat": f"m (float[N] x, int64[4] v) => (float[a] z) {{ {_doubled('v0 = Identity(v)')} }}",
    "Concat of a shape": f"m (float[N] x) => (float[a] z) {{ {_doubled('v0 = Shape(x)')} }}",
    "a body": """m (float[1000000000] x, float[N] w) => (float[N] z) {
        s = Shape(w)  e = Expand(w, s)  n = Constant<value_int=3>()  c = Constant<value=bool {1}>()
        y = Loop(n, c, x) <body = b (int64 i, bool go, float[1000000000] t) => (bool on, float[1000000000] u) {
            on = Identity(go)  u = Mul(t, t) }>
        m = ReduceMax<keepdims=0>(y)  z = Mul(e, m) }""",
}
IN_FUNCTIONS = {  # each result and each number of a shape in a function that is kept
    "Concat": _doubled("v0 = Shape(x)"),
    "ConstantOfShape": """a = Constant<value_ints=[2147483647]>()  k = ConstantOfShape(a)  l = Concat<axis=0>(k, k)
        z = Expand(x, l)""",
}


def _nodes(model: ModelProto) -> int:
    return len(refgrad.gradient(model).graph.node)


def test_no_size_takes_memory():
    with Worker(seconds=30, memory=MEMORY) as worker:
        for text in HOSTILE.values():
            assert worker.call(_nodes, _model(text))


def _of_function(body: str, declared: str = "float", node: str = "ReduceSum<keepdims=0>") -> ModelProto:
    return parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18, "own": 1]>
        m (float[N] x) => ({declared} y) {{ w = own.f(x)  y = {node}(w) }}
        <domain: "own", opset_import: ["": 18]> f (x) => (z) {{ {body} }}"""
    )


def test_no_size_in_a_function_takes_memory():
    with Worker(seconds=30, memory=MEMORY) as worker:
        for body in IN_FUNCTIONS.values():
            assert [value.name for value in worker.call(infer_shapes, _of_function(body)).output] == ["y"]


def test_a_function_of_shapes_is_propagated_through():
    body = """s = Shape(x)  a = Constant<value_ints=[2]>()  k = ConstantOfShape<value=int64[1] {3}>(a)
        l = Concat<axis=0>(k, s)  z = Expand(x, l)"""
    model = _of_function(body, "float[a, b, c]", "Neg")
    expected = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    assert _known(infer_shapes(model)) == _known(expected)


ORDINARY = {
    "a shape that is computed": """m (float[N, 300] x, float[300] b, int64[300] t) => (float[p, q] z) {
        y = Add(x, b)  c = Cast<to=1>(t)  d = Mul(y, c)  s = Shape(x)  i = Constant<value_ints=[1]>()  n = Gather(s, i)
        m = Constant<value_ints=[-1]>()  r = Concat<axis=0>(m, n)  z = Reshape(d, r) }""",
    "vectors": """m (float[300] x, float[N, 300] w) => (float[p] z) {
        y = Mul(x, x)  s = Shape(w)  a = Constant<value_ints=[1]>()  b = Constant<value_ints=[2]>()  n = Slice(s, a, b)
        e = Reshape(y, n)  z = Add(e, x) }""",
    "a rank that is computed": """m (float[N] x, float[M, 4] w) => (float[p, q] z) {
        s = Shape(w)  e = Expand(x, s)  f = Add(e, w)  t = Shape(f)  i = Constant<value_int=1>()  n = Gather(t, i)
        a = Constant<value_ints=[0]>()  u = Unsqueeze(n, a)  k = ConstantOfShape(u)  l = Concat<axis=0>(k, k)  v = Shape(l)
        z = Expand(f, s) }""",
    "a body": """m (float[300] x, float[N, 3] w, bool c) => (float[p, q] z) {
        y = If (c) <then_branch = t () => (float[p, q] u) { s = Shape(w)  v = Mul(x, x)  r = ReduceSum(v)  u = Expand(r, s) },
                    else_branch = e () => (float[p, q] k) { k = Identity(w) }>
        z = Mul(y, w) }""",
}


def _known(graph: onnx.GraphProto) -> dict[tuple[int, str], object]:
    found = {}
    for number, one in enumerate(graphs(graph)):
        for value in (*one.value_info, *one.output, *one.input):
            kind, shape = type_of(value)
            named = None if shape is None else tuple(None if is_unnamed(dim) else dim for dim in shape)
            found[number, value.name] = kind, named
    return found


@pytest.mark.parametrize("name", ORDINARY)
def test_as_much_is_known_as_without_bounds(name):
    model = _model(ORDINARY[name])
    expected = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    assert _known(infer_shapes(model)) == _known(expected)
    assert [value.name for value in infer_shapes(model).input] == [value.name for value in model.graph.input]


@pytest.mark.parametrize("op_type", ["Constant", "ConstantOfShape", "Concat", "Add", "Slice"])
def test_nodes_of_a_function_without_inputs_or_outputs_are_an_error_of_the_model(op_type):
    model = _of_function("s = Shape(x)  z = Expand(x, s)")
    model.functions[0].node.add(op_type=op_type)
    with pytest.raises(RefgradError):
        refgrad.gradient(model)


def test_no_size_in_a_body_of_a_function_takes_memory():
    body = f"""c = Constant<value=bool {{1}}>()
        z = If (c) <then_branch = t () => (u) {{ {IN_FUNCTIONS["ConstantOfShape"].replace("z =", "u =")} }},
                    else_branch = e () => (v) {{ v = Identity(x) }}>"""
    with Worker(seconds=30, memory=MEMORY) as worker:
        assert [value.name for value in worker.call(infer_shapes, _of_function(body)).output] == ["y"]
