"""The interpreter's plan: order, lifetimes, subsets, subgraphs, functions, and its messages."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, parser

from refgrad import gradient
from refgrad.backends import get_backend
from refgrad.backends.numpy import registry
from refgrad.errors import BackendError, FeedError, InvalidModelError, OptionError

pytestmark = pytest.mark.interpreter

NUMPY = get_backend("numpy")


def parse(text: str, opset: int = 17) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1, "local" : 1]> {text}')


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def test_nodes_may_come_in_any_order():
    model = parse("g (float[2] x) => (float[2] y) { a = Neg(x) b = Exp(a) y = Add(a, b) }")
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    np.testing.assert_allclose(NUMPY.prepare(model).run({"x": ones(2)})["y"], np.exp(-1) - 1, rtol=1e-6)


def test_a_cycle_is_refused():
    model = parse("g (float[2] x) => (float[2] y) { a = Add(x, b) b = Neg(a) y = Exp(b) }")
    with pytest.raises(BackendError, match="has a cycle"):
        NUMPY.prepare(model)


def test_a_value_from_nowhere_is_refused():
    with pytest.raises(BackendError, match="reads 'nothing', which nothing produces"):
        NUMPY.prepare(parse("g (float[2] x) => (float[2] y) { y = Add(x, nothing) }"))
    with pytest.raises(BackendError, match="Nothing produces the graph's output 'z'"):
        NUMPY.prepare(parse("g (float[2] x) => (float[2] z) { y = Neg(x) }"))


def test_only_the_nodes_asked_for_are_run():
    text = "g (float[2] x, int64[1] i) => (float[2] y, float[1] z) { y = Neg(x) z = Gather(x, i) }"
    prepared = NUMPY.prepare(parse(text))
    feeds = {"x": ones(2), "i": np.array([7])}
    assert list(prepared.run(feeds, outputs=["y"])) == ["y"]
    with pytest.raises(BackendError, match="out of bounds"):
        prepared.run(feeds)


def test_trace_returns_every_value():
    text = "g (float[2] x) => (float[2] y) { a = Neg(x) y = Exp(a) }"
    values = NUMPY.prepare(parse(text)).run({"x": ones(2)}, trace=True)
    assert set(values) == {"x", "a", "y"}
    np.testing.assert_array_equal(values["a"], -ones(2))


def test_results_are_the_callers_own():
    model = parse(
        "g (float[2] x) => (float[2] y, float[2] z) { y = Identity(x) z = Constant<value_floats = [1.0, 2.0]>() }"
    )
    prepared = NUMPY.prepare(model)
    feed = ones(2)
    first = prepared.run({"x": feed})
    first["y"][0], first["z"][0] = 5, 5
    assert feed[0] == 1
    np.testing.assert_array_equal(prepared.run({"x": feed})["z"], [1, 2])


def test_if_reads_outer_values():
    text = """g (float[2] x, bool c) => (float[2] y) {
        t = Neg(x)
        y = If (c) <
            then_branch = a () => (float[2] u) { u = Add(t, x) },
            else_branch = b () => (float[2] v) { v = Identity(t) }>
    }"""
    prepared = NUMPY.prepare(parse(text))
    np.testing.assert_array_equal(prepared.run({"x": ones(2), "c": np.array(True)})["y"], [0, 0])
    np.testing.assert_array_equal(prepared.run({"x": ones(2), "c": np.array(False)})["y"], [-1, -1])


LOOP = """g (float[2] x, int64 n) => (float[2] last, float[k, 2] all) {
    go = Constant<value = bool {1}>()
    last, all = Loop (n, go, x) <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t, float[2] r) {
        d = Identity(c) t = Add(s, x) r = Neg(t)
    }>
}"""


@pytest.mark.parametrize("tail", ["ScatterElements(y, i, u)", "ScatterND(y, j, u)", "Add(y, x)"])
def test_constants_of_a_branch_are_not_overwritten(tail):
    """The If reads only its condition, which dies there; its result is not the run's."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": 20]>
        g (float[2000] x, int64[1] i, int64[1, 1] j, float[1] u) => (float[2000] z) {{
            total = ReduceSum<keepdims = 0>(x)
            twice = Add(total, total)
            c = Greater(twice, total)
            y = If (c) <then_branch = t () => (float[2000] a) {{
                n = Constant<value_ints = [2000]>()
                a = ConstantOfShape<value = float[1] {{1}}>(n)
            }}, else_branch = e () => (float[2000] b) {{
                m = Constant<value_ints = [2000]>()
                b = ConstantOfShape<value = float[1] {{2}}>(m)
            }}>
            z = {tail}
        }}""")
    feeds = {"x": np.ones(2000, np.float32), "i": np.array([3]), "j": np.array([[3]]), "u": np.float32([7])}
    prepared = get_backend("numpy").prepare(model)
    expected = np.full(2000, 2 if tail.startswith("Add") else 1, np.float32)
    expected[3] = 2 if tail.startswith("Add") else 7
    for _ in range(2):
        np.testing.assert_array_equal(prepared.run(feeds)["z"], expected)


def test_loop_carries_and_collects():
    prepared = NUMPY.prepare(parse(LOOP))
    result = prepared.run({"x": ones(2), "n": np.array(3)})
    np.testing.assert_array_equal(result["last"], [4, 4])
    np.testing.assert_array_equal(result["all"], [[-2, -2], [-3, -3], [-4, -4]])


def test_loop_without_iterations_has_empty_outputs_of_the_declared_type():
    result = NUMPY.prepare(parse(LOOP)).run({"x": ones(2), "n": np.array(0)})
    np.testing.assert_array_equal(result["last"], [1, 1])
    assert result["all"].shape == (0, 2)
    assert result["all"].dtype == np.float32
    widened = NUMPY.prepare(parse(LOOP), precision="float64").run({"x": ones(2), "n": np.array(0)})
    assert widened["all"].dtype == np.float64


def test_scan_goes_backwards_along_other_axes():
    text = """g (float[2] s, float[2, 3] x) => (float[2] last, float[2, 3] all) {
        last, all = Scan<num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1], scan_output_axes = [1],
            scan_output_directions = [1],
            body = b (float[2] a, float[2] e) => (float[2] t, float[2] r) { t = Add(a, e) r = Identity(t) }>(s, x)
    }"""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    result = NUMPY.prepare(parse(text)).run({"s": np.zeros(2, np.float32), "x": x})
    np.testing.assert_array_equal(result["last"], x.sum(1))
    np.testing.assert_array_equal(result["all"], x[:, ::-1].cumsum(1)[:, ::-1])


def test_local_functions_are_inlined():
    text = """g (float[2] x) => (float[2] y) { y = local.twice<by = 3.0>(x) }
    <domain: "local", opset_import: ["" : 17]> twice <by> (a) => (b) {
        k = Constant<value_float: float = @by>() c = Mul(a, k) b = Add(c, c)
    }"""
    result = NUMPY.prepare(parse(text)).run({"x": ones(2)})
    np.testing.assert_array_equal(result["y"], [6, 6])


def test_functions_of_the_schema_run_with_their_attributes():
    text = "g (float[3] x) => (float[3] y) { y = ThresholdedRelu<alpha = 2.0>(x) }"
    np.testing.assert_array_equal(NUMPY.prepare(parse(text, 22)).run({"x": np.float32([1, 2, 3])})["y"], [0, 0, 3])
    text = """g (float[1, 4, 2] x, float[4] s, float[4] b) => (float[1, 4, 2] y) {
        y = GroupNormalization<num_groups = 2>(x, s, b)
    }"""
    x = np.random.default_rng(0).standard_normal((1, 4, 2)).astype(np.float32)
    rows = x.reshape(2, 4)
    expected = ((rows - rows.mean(1, keepdims=True)) / rows.std(1, keepdims=True)).reshape(1, 4, 2)
    result = NUMPY.prepare(parse(text, 21)).run({"x": x, "s": ones(4), "b": 0 * ones(4)})["y"]
    np.testing.assert_allclose(result, expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "g (float[2] x) => (float[2] y) { y = com.microsoft.MurmurHash3(x) }",
            "no kernel for 'MurmurHash3' of domain 'com.microsoft' at opset 1",
        ),
        (
            "g (float[2] x) => (float[2] y) { y = other.Op(x) }",
            "imports no opset of domain 'other'. Add it to opset_import",
        ),
        (
            "g (float[2] x) => (float[2] y) { y = com.microsoft.YieldOp<non_differentiable_outputs = [0]>(x) }",
            "YieldOp.*cotangent='input'",
        ),
        (
            "g (float[2] x) => (float[2] y) { y = com.microsoft.ReluGrad<slope = 2>(x, x) }",
            r"attribute \['slope'\] is not supported",
        ),
        (
            "g (float[1, 1, 2] x) => (float[1, 1, n] y) { y = AveragePoolGrad<kernel_shape = [2]>(x) }",
            "declare the static shape of 'y' in value_info",
        ),
    ],
)
def test_what_cannot_be_bound_is_refused_at_prepare(text, message):
    with pytest.raises(BackendError, match=message):
        NUMPY.prepare(parse(text))


def test_a_failing_node_is_named_with_its_inputs():
    model = parse("g (float[2] x, float[3] y) => (float[n] z) { z = Concat<axis = 1>(x, y) }")
    model.graph.node[0].name = "joined"
    with pytest.raises(BackendError, match=r"node 'joined' \(Concat\) failed on inputs float32\[2\], float32\[3\]"):
        NUMPY.prepare(model).run({"x": ones(2), "y": ones(3)})


def test_an_unknown_precision_is_refused():
    with pytest.raises(OptionError, match=r"precision='float8' is not known. Give None"):
        NUMPY.prepare(parse("g (float[2] x) => (float[2] y) { y = Neg(x) }"), precision="float8")


def test_sparse_and_string_constants():
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("values", 1, [2], [3.0, 4.0]), helper.make_tensor("indices", 7, [2, 2], [0, 1, 1, 0]), [2, 2]
    )
    nodes = [
        helper.make_node("Constant", [], ["s"], sparse_value=sparse),
        helper.make_node("Constant", [], ["t"], value_strings=["a", "b"]),
    ]
    outputs = [helper.make_tensor_value_info("s", 1, [2, 2]), helper.make_tensor_value_info("t", 8, [2])]
    model = helper.make_model(helper.make_graph(nodes, "g", [], outputs), opset_imports=[helper.make_opsetid("", 17)])
    result = NUMPY.prepare(model).run({})
    np.testing.assert_array_equal(result["s"], [[0, 3], [4, 0]])
    assert list(result["t"]) == ["a", "b"]


def test_a_function_of_another_opset_runs():
    text = """<ir_version: 10, opset_import: ["": 21, "f": 1]>
    g (float[3] x) => (float[3] y) { y = f.twice(x) }
    <domain: "f", opset_import: ["": 18]> twice (x) => (y) { y = Add(x, x) }"""
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(get_backend("numpy").prepare(parser.parse_model(text)).run({"x": x})["y"], 2 * x)


def test_a_function_of_an_opset_with_another_meaning_is_refused():
    text = """<ir_version: 10, opset_import: ["": 21, "f": 1]>
    g (float[1, 2, 2] x) => (float[1, 2, 2] y) { y = f.soft(x) }
    <domain: "f", opset_import: ["": 11]> soft (x) => (y) { y = Softmax(x) }"""
    with pytest.raises(
        InvalidModelError, match=r"'soft' is written in opset 11 of 'ai.onnx', the model in 21.*Softmax"
    ):
        NUMPY.prepare(parser.parse_model(text))


def test_a_function_imports_what_the_model_does_not():
    text = """<ir_version: 10, opset_import: ["": 21, "f": 1]>
    g (float[3] x) => (float[3] y) { y = f.over(x) }
    <domain: "f", opset_import: ["": 21, "ai.onnx.ml": 3]> over (x) => (y) { y = ai.onnx.ml.Binarizer<threshold = 1.0>(x) }"""
    assert NUMPY.prepare(parser.parse_model(text)).run({"x": np.float32([0, 1, 2])})["y"].tolist() == [0, 0, 1]


DEFAULTS = {
    "of a constant": "scale <by: float = 4.0> (a) => (b) { k = Constant<value_float: float = @by>() b = Mul(a, k) }",
    "of an attribute with a default of its own": "scale <by: float = 4.0> (a) => (b) { b = Elu<alpha: float = @by>(a) }",
    "of a call in a function": """outer <with: float = 4.0> (a) => (b) { b = local.scale<by: float = @with>(a) }
        <domain: "local", opset_import: ["": 17]> scale <by: float = 5.0> (a) => (b) { b = Elu<alpha: float = @by>(a) }""",
    "of a call in a subgraph": """outer (a) => (b) {
            t = Constant<value = bool {1}>()
            b = If (t) <then_branch = c () => (u) { u = local.scale(a) }, else_branch = d () => (v) { v = Neg(a) }>
        }
        <domain: "local", opset_import: ["": 17]> scale <by: float = 4.0> (a) => (b) { b = Elu<alpha: float = @by>(a) }""",
}


@pytest.mark.parametrize("where", DEFAULTS)
def test_default_values_of_a_functions_attributes(where):
    function = DEFAULTS[where]
    called = function.split()[0]
    text = f"g (float[1] x) => (float[1] y) {{ y = local.{called}(x) }}"
    model = parse(f'{text} <domain: "local", opset_import: ["": 17, "local": 1]> {function}')
    before = model.SerializeToString(deterministic=True)
    x = np.float32([-1])
    session = get_backend("ort-cpu").prepare(model)
    expected = -4 if where == "of a constant" else 4 * np.expm1(-1)
    for result in (session.run({"x": x}), NUMPY.prepare(model).run({"x": x})):
        np.testing.assert_allclose(result["y"], [expected], rtol=1e-6)
    if "subgraph" not in where:  # If has no derivative
        slope = NUMPY.prepare(gradient(model, cotangent="ones")).run({"x": x})["x_grad"]
        np.testing.assert_allclose(slope, [4 if where == "of a constant" else 4 * np.exp(-1)], rtol=1e-6)
    assert model.SerializeToString(deterministic=True) == before


def test_every_operator_of_onnx_has_a_kernel_at_every_version():
    missing = {
        f"{schema.domain}.{schema.name} of opset {schema.since_version}"
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.name != "Constant"
        and schema.domain.partition(".")[0] in ("", "ai")
        and registry.find(schema.domain, schema.name, schema.since_version) is None
    }
    # It stands for a gradient, which is to be built, not run.
    assert missing == {"ai.onnx.preview.training.Gradient of opset 1"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "g (float[2] x) => (float[2] y) { y = Add(x) }",
            r"Add node that makes 'y' has 1 inputs .* the operator has 2",
        ),
        ("g (float[2] x) => (float[2] y) { y = Neg(x, x) }", r"has 2 inputs \['x', 'x'\]; the operator has 1"),
        ("g (float[2] x) => (float[2] y) { y, z = Relu(x) }", r"has 2 outputs \['y', 'z'\]; the operator has 1"),
        ('g (bool[2] x) => (bool[2] y) { y = And("", x) }', "leaves out its input 'A', which the operator requires"),
        ("g (float[2] x) => (float[2] y) { y = Elu<alpha = 1>(x) }", "attribute 'alpha' of type INT, not FLOAT"),
        ("g (float[2] x) => (float[2] y) { y = Elu<beta = 1.0>(x) }", r"attribute \['beta'\] is not supported"),
    ],
)
def test_a_node_that_is_not_as_its_operator_says_is_refused(text, message):
    with pytest.raises(BackendError, match=message):
        NUMPY.prepare(parse(text))


@pytest.mark.parametrize(
    ("domain", "op_type", "reason"),
    [
        ("com.microsoft", "YieldOp", "Ask for the gradient with cotangent='input'"),
        ("com.microsoft", "NcclAllReduce", "exchanges tensors with other processes"),
        ("com.microsoft", "GistPack8Decoder", "CUDA kernels alone"),
        ("org.pytorch.aten", "ATen", "calls code outside the model"),
    ],
)
def test_what_no_interpreter_can_run_has_a_reason(domain, op_type, reason):
    model = parse("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    model.graph.node[0].op_type, model.graph.node[0].domain = op_type, domain
    with pytest.raises(BackendError, match=reason):
        NUMPY.prepare(model)


def test_an_attribute_named_as_a_keyword_of_python():
    node = helper.make_node(
        "AdamOptimizer",
        ["r", "t", "w", "g", "m", "v"],
        ["nt", "nm", "nv", "nw"],
        domain="com.microsoft",
        **{"lambda": 0.5},
    )
    assert registry.find("com.microsoft", "AdamOptimizer", 1).attributes >= {"lambda", "alpha", "beta"}
    feeds = {name: np.ones(1, np.float32) for name in "rwgmv"} | {"t": np.ones(1, np.int64)}
    values = [helper.make_tensor_value_info(n, 7 if n == "t" else 1, [1]) for n in feeds]
    result = [helper.make_tensor_value_info("nw", 1, [1])]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    plain, decayed = (
        NUMPY.prepare(
            helper.make_model(helper.make_graph([n], "g", values, result), opset_imports=imports, ir_version=8)
        ).run(feeds)["nw"]
        for n in (helper.make_node("AdamOptimizer", node.input, node.output, domain=node.domain), node)
    )
    np.testing.assert_allclose(plain - decayed, 0.5, rtol=1e-6)


def test_an_attribute_without_meaning_is_passed_over():
    model = parse("g (float[2] x) => (float[2] y) { y = Relu<consumed_inputs = [0]>(x) }", opset=1)
    assert NUMPY.prepare(model).run({"x": ones(2)})["y"].tolist() == [1, 1]


def test_results_in_sequences_are_the_callers_own():
    model = parse("g (float[2] x) => (seq(float[2]) y) { y = SequenceConstruct(x, x) }")
    feed = ones(2)
    result = NUMPY.prepare(model).run({"x": feed})["y"]
    result[0][0] = 5
    assert feed[0] == 1


@pytest.mark.parametrize("op", ["Identity(s)", "SequenceErase(s)", "SequenceInsert(s, x)", "SequenceConstruct(x, x)"])
def test_results_in_sequences_are_not_the_feeds(op):
    model = parse(
        f"""g (seq(float[2]) s, float[2] x) => (seq(float[2]) y, float[2] z) {{
            y = {op} i = Constant<value_int = 0>() z = SequenceAt(y, i)
        }}"""
    )
    feeds = {"s": [ones(2), ones(2)], "x": ones(2)}
    result = NUMPY.prepare(model).run(feeds)
    for array in (*result["y"], result["z"]):
        array[:] = 5
    for array in (*feeds["s"], feeds["x"]):
        np.testing.assert_array_equal(array, ones(2))


@pytest.mark.parametrize(
    "text",
    [
        "g (float[2] x) => (float[2] y) { y = Neg(x) y = Exp(x) }",
        "g (float[2] x) => (float[2] y) { x = Neg(x) y = Exp(x) }",
        "g (float[2] x) => (float[2] y) <float[2] x = {1, 2}> { x = Neg(x) y = Exp(x) }",
        "g (float[2] x) => (float[2] y) { z = Constant<value_float = 1.0>() z = Neg(x) y = Exp(z) }",
    ],
)
def test_a_value_made_twice_is_refused(text):
    with pytest.raises(BackendError, match="is produced twice"):
        NUMPY.prepare(parse(text))


def test_subclasses_of_arrays_are_fed_as_arrays():
    model = parse(
        "g (float[2, 2] x) => (float[4] y, float[2, 2] z) { s = Constant<value_ints = [-1]>() y = Reshape(x, s) z = Mul(x, x) }"
    )
    x = np.float32([[1, 2], [3, 4]])
    result = NUMPY.prepare(model).run({"x": x.view(np.matrix)})
    assert all(type(y) is np.ndarray for y in result.values())
    np.testing.assert_array_equal(result["y"], [1, 2, 3, 4])
    np.testing.assert_array_equal(result["z"], x * x)
    with pytest.raises(FeedError, match="is a masked array"):
        NUMPY.prepare(model).run({"x": np.ma.masked_array(x, x > 3)})


def test_strings_fed_as_bytes_are_text():
    model = parse("g (string[n] x) => (string[n] y) { y = Identity(x) }")
    for prepared in (NUMPY.prepare(model), get_backend("ort-cpu").prepare(model)):
        assert list(prepared.run({"x": np.array(["a", "ü"]).astype(object)})["y"]) == ["a", "ü"]
        assert list(prepared.run({"x": np.array([b"a", "ü".encode()])})["y"]) == ["a", "ü"]


def test_a_map_is_vectorized_in_the_declared_type():
    node = helper.make_node("DictVectorizer", ["x"], ["y"], domain="ai.onnx.ml", string_vocabulary=["a", "b"])
    kind = helper.make_map_type_proto(8, helper.make_tensor_type_proto(11, []))
    graph = helper.make_graph(
        [node], "g", [helper.make_value_info("x", kind)], [helper.make_tensor_value_info("y", 11, [2])]
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    result = NUMPY.prepare(helper.make_model(graph, opset_imports=imports, ir_version=8)).run({"x": {"b": 0.1}})["y"]
    assert result.tolist() == [0, 0.1]


SQUARE = np.array([["a", "b"], ["c", "d"]], object)


@pytest.mark.parametrize(
    ("text", "feeds", "expected"),
    [
        (
            "(string[N] x, int64 i) => (string y) { y = Gather(x, i) }",
            {"x": np.array(["a", "bb"], object), "i": np.array(1)},
            "bb",
        ),
        (
            "(int64[N] x, string[2] v) => (string[N, 2] y) { d = Constant<value_int = 2>() y = OneHot(x, d, v) }",
            {"x": np.array([1, 0]), "v": np.array(["off", "on"], object)},
            [["off", "on"], ["on", "off"]],
        ),
        ("(string[2, 2] x) => (string[2, 2] y) { y = Trilu(x) }", {"x": SQUARE}, [["a", "b"], ["", "d"]]),
        ("(string[2, 2] x) => (string[2, 2] y) { y = Trilu<upper = 0>(x) }", {"x": SQUARE}, [["a", ""], ["c", "d"]]),
        (
            '(string x) => (string y) { y = ai.onnx.ml.LabelEncoder<keys_strings = ["a"], values_strings = ["b"]>(x) }',
            {"x": "a"},
            "b",
        ),
        (
            """(string[N] x) => (string[N] y) {
                y = Scan<num_scan_inputs = 1, body = b (string e) => (string r) { r = Identity(e) }>(x)
            }""",
            {"x": np.array(["a", "bb"], object)},
            ["a", "bb"],
        ),
    ],
    ids=["Gather", "OneHot", "Trilu", "Trilu lower", "LabelEncoder", "Scan"],
)
def test_strings_stay_strings(text, feeds, expected):
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 4]> g {text}')
    result = NUMPY.prepare(model).run(feeds)["y"]
    assert result.dtype == object
    assert all(type(string) is str for string in result.ravel())
    assert result.tolist() == expected
