"""Listings: against what the source documents print, and on models that are hard to list."""

from __future__ import annotations

import re
import time

import numpy as np
import onnx
import onnx.parser
import pytest
from listings import BRANCHES, GRADIENT, GRADIENT_OF_LOSS, REGRESSION, assert_dot, initialized, nodes_of, parse
from onnx import ModelProto, TensorProto, helper, numpy_helper

import refgrad
from refgrad.errors import InvalidModelError
from refgrad.show import demo, text

pytestmark = pytest.mark.interpreter


def _node(line: str) -> onnx.NodeProto:
    """The node that a line of a listing shows."""
    op_type, arguments, outputs = re.fullmatch(r" *(\w+)\((.*)\) -> (.*)", line).groups()
    names = [word for word in arguments.split(", ") if "=" not in word]
    settings = dict(word.split("=") for word in arguments.split(", ") if "=" in word)
    return helper.make_node(op_type, names, outputs.split(", "), **{key: int(value) for key, value in settings.items()})


def _printed(listing: str) -> ModelProto:
    """A model with the nodes of a listing in the order of their results: r0, r1, ... are numbered along the original."""

    def place(node: onnx.NodeProto) -> tuple[int, bool]:
        numbers = [int(name[1:]) for name in (*node.input, *node.output) if re.fullmatch(r"r\d+", name)]
        return max(numbers), not re.fullmatch(r"r\d+", node.output[0])

    nodes = sorted(map(_node, nodes_of(listing)), key=place)
    return helper.make_model(helper.make_graph(nodes, "printed", [], []))


def test_a_regression_is_listed_as_the_notebook_lists_it():
    listing = refgrad.onnx_simple_text_plot(demo.regression())
    assert re.sub(r" shape=\([^)]*\)", "", listing) == REGRESSION.rstrip()


@pytest.mark.parametrize("printed", [GRADIENT, GRADIENT_OF_LOSS], ids=["gradient", "with loss"])
def test_a_gradient_is_listed_as_the_notebook_lists_it(printed):
    assert nodes_of(refgrad.onnx_simple_text_plot(_printed(printed))) == nodes_of(printed)


@pytest.mark.parametrize("printed", [GRADIENT, GRADIENT_OF_LOSS], ids=["gradient", "with loss"])
def test_another_order_of_the_nodes_is_noticed(printed, monkeypatch):
    monkeypatch.setattr(text, "_along_chains", lambda nodes: ((node, list(node.input)) for node in nodes))
    assert nodes_of(refgrad.onnx_simple_text_plot(_printed(printed))) != nodes_of(printed)


def test_shapes_are_true_and_a_dimension_without_a_size_is_no_zero():
    listing = refgrad.onnx_text_plot_io(demo.regression())
    assert "input: name='x' type=dtype('float32') shape=(?, 2)" in listing
    assert "init: name='init' type=dtype('float32') shape=(1, 2)\n" in listing
    assert "init: name='init_b10' type=dtype('float32') shape=(1,)\n" in listing
    assert " -> " not in listing
    named = parse("y = Exp(x)", "float[N, 3] x, float s", "float[N, 3] y")
    assert "name='x' type=dtype('float32') shape=(N, 3)\n" in refgrad.onnx_text_plot_io(named)
    assert "name='s' type=dtype('float32') shape=()\n" in refgrad.onnx_text_plot_io(named)


def test_subgraphs_and_functions_are_listed_below():
    assert refgrad.onnx_simple_text_plot(BRANCHES).splitlines()[6:] == [
        "Exp(x) -> a",
        "  If(c, else_branch=G2, then_branch=G1) -> y",
        "output: name='y' type=dtype('float32') shape=(N,)",
        "subgraph: G1, then_branch of If -> y",
        "  Neg(a) -> u",
        "  output: name='u' type=dtype('float32') shape=(N,)",
        "subgraph: G2, else_branch of If -> y",
        "  local.f(a, alpha=2.0) -> p",
        "    com.microsoft.Gelu(p) -> v",
        "  output: name='v' type=dtype('float32') shape=(N,)",
        "function: local.f(s, alpha=1.0) -> t",
        "  opset: domain='' version=18",
        "  Elu(s, alpha=@alpha) -> t",
    ]


def test_siblings_stand_on_one_level():
    """A node that reads what the node above it reads is beside that node, as it is where a longer branch lies between them."""
    model = parse("a = Exp(x) b = Neg(a) c = Neg(a) d = Abs(c) e = Mul(a, x) f = Max(b, d) y = Add(e, f)")
    assert nodes_of(refgrad.onnx_simple_text_plot(model)) == [
        "Exp(x) -> a",
        "  Neg(a) -> b",
        "  Neg(a) -> c",
        "    Abs(c) -> d",
        "    Max(b, d) -> f",
        "  Mul(a, x) -> e",
        "    Add(e, f) -> y",
    ]
    branches = parse("s = Add(x, x) a = Exp(s) b = Log(s) c = Neg(s) p = Exp(x) q = Abs(p) y = Sum(a, b, c, q)")
    assert nodes_of(refgrad.onnx_simple_text_plot(branches)) == [
        "Add(x, x) -> s",
        "  Exp(s) -> a",
        "  Log(s) -> b",
        "  Neg(s) -> c",
        "Exp(x) -> p",
        "  Abs(p) -> q",
        "    Sum(a, b, c, q) -> y",
    ]


ATTRIBUTES = {
    "alpha=0.1": {"alpha": 0.1},
    "n=[]": {"n": onnx.helper.make_attribute("n", [], attr_type=onnx.AttributeProto.INTS)},
    "n=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ... 12 in all]": {"n": list(range(12))},
    "w=[0.5, 1.0]": {"w": [0.5, 1.0]},
    "mode='a\\nb'": {"mode": "a\nb"},
    f"mode={'z' * 60!r}...": {"mode": "z" * 100},
    "names=['a', 'b']": {"names": ["a", "b"]},
    "value=[[1, 2], [3, 4]]": {"value": numpy_helper.from_array(np.array([[1, 2], [3, 4]]))},
    "value=float32(3, 4)": {"value": numpy_helper.from_array(np.zeros((3, 4), np.float32))},
    "value=['s']": {"value": helper.make_tensor("", TensorProto.STRING, [1], ["s"])},
    "value=3": {"value": numpy_helper.from_array(np.array(3))},
    "a=1, b=2": {"b": 2, "a": 1},
}


@pytest.mark.parametrize("expected", ATTRIBUTES)
def test_attributes(expected):
    node = helper.make_node("Op", ["x", "", "z"], ["", "y"], domain="other")
    for name, value in ATTRIBUTES[expected].items():
        node.attribute.append(value if isinstance(value, onnx.AttributeProto) else helper.make_attribute(name, value))
    listing = refgrad.onnx_simple_text_plot(helper.make_model(helper.make_graph([node], "g", [], [])))
    assert listing.splitlines()[-1] == f"other.Op(x, -, z, {expected}) -> -, y"


def _tensor_type(kind: int = TensorProto.FLOAT) -> onnx.TypeProto:
    return helper.make_tensor_type_proto(kind, ["N"])


TYPES = {
    "dtype('bfloat16') shape=(N,)": _tensor_type(TensorProto.BFLOAT16),
    "dtype('string') shape=(N,)": _tensor_type(TensorProto.STRING),
    "dtype('int4') shape=(N,)": _tensor_type(TensorProto.INT4),
    "dtype('float32') shape=?": helper.make_tensor_type_proto(TensorProto.FLOAT, None),
    "sparse dtype('float32') shape=(N,)": helper.make_sparse_tensor_type_proto(TensorProto.FLOAT, ["N"]),
    "sequence of dtype('float32') shape=(N,)": helper.make_sequence_type_proto(_tensor_type()),
    "optional sequence of dtype('float32') shape=(N,)": helper.make_optional_type_proto(
        helper.make_sequence_type_proto(_tensor_type())
    ),
    "map from int64 to dtype('float32') shape=(N,)": helper.make_map_type_proto(TensorProto.INT64, _tensor_type()),
    "?": onnx.TypeProto(),
}


@pytest.mark.parametrize("expected", TYPES)
def test_types(expected):
    value = helper.make_value_info("x", TYPES[expected])
    model = helper.make_model(helper.make_graph([], "g", [value], []))
    assert refgrad.onnx_simple_text_plot(model).splitlines()[-1] == f"input: name='x' type={expected}"
    assert refgrad.onnx_text_plot_io(model) == refgrad.onnx_simple_text_plot(model)
    assert_dot(refgrad.to_dot(model))


def _external(dims: list[int]) -> TensorProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    return tensor


INITIALIZERS = {
    "name='w' type=dtype('int8') shape=(0,) -- array([], dtype=int8)": helper.make_tensor(
        "w", TensorProto.INT8, [0], []
    ),
    "name='w' type=dtype('float32') shape=(11,)": helper.make_tensor("w", TensorProto.FLOAT, [11], [0] * 11),
    "name='w' type=dtype('bfloat16') shape=() -- array([2], dtype=bfloat16)": helper.make_tensor(
        "w", TensorProto.BFLOAT16, [], [2]
    ),
    "name='w' type=dtype('string') shape=(1,) -- array(['s'], dtype=string)": helper.make_tensor(
        "w", TensorProto.STRING, [1], ["s"]
    ),
    "name='w' type=dtype('float32') shape=(2,)": _external([2]),
    "name='w' type=dtype('float32') shape=(4000000000,)": _external([4_000_000_000]),
}


@pytest.mark.parametrize("expected", INITIALIZERS)
def test_initializers(expected):
    model = initialized(INITIALIZERS[expected])
    assert refgrad.onnx_simple_text_plot(model).splitlines()[-1] == f"init: {expected}"
    assert_dot(refgrad.to_dot(model))


@pytest.mark.parametrize("kind", sorted(set(helper.get_all_tensor_dtypes()) - {TensorProto.STRING}))
def test_every_element_type_can_be_listed(kind):
    model = initialized(helper.make_tensor("w", kind, [2], [1, 0]))
    name = helper.tensor_dtype_to_np_dtype(kind).name
    line = refgrad.onnx_simple_text_plot(model).splitlines()[-1]
    assert re.fullmatch(rf"init: name='w' type=dtype\('{name}'\) shape=\(2,\) -- array\(\[.*\], dtype={name}\)", line)
    assert_dot(refgrad.to_dot(model))


def test_a_sparse_initializer_is_one_of_the_initializers():
    model = initialized(sparse=True)
    assert refgrad.onnx_simple_text_plot(model).endswith("init: name='s' type=sparse dtype('float32') shape=(100,)")
    assert 'label="s\\nsparse float32((100,))"' in refgrad.to_dot(model)


def test_an_empty_graph_is_a_list_of_operator_sets():
    model = helper.make_model(helper.make_graph([], "g", [], []), opset_imports=[helper.make_opsetid("", 18)])
    assert refgrad.onnx_simple_text_plot(model) == "opset: domain='' version=18"
    assert_dot(refgrad.to_dot(model))


def test_nodes_out_of_order_are_listed_in_order():
    nodes = [helper.make_node("Neg", ["a"], ["y"]), helper.make_node("Exp", ["x"], ["a"])]
    listing = refgrad.onnx_simple_text_plot(helper.make_model(helper.make_graph(nodes, "g", [], [])))
    assert listing.splitlines()[-2:] == ["Exp(x) -> a", "  Neg(a) -> y"]


def test_a_chain_of_nodes_takes_linear_time_and_space():
    count = 10_000
    nodes = [helper.make_node("Exp", [f"x{k}"], [f"x{k + 1}"]) for k in range(count)]
    model = helper.make_model(helper.make_graph(nodes, "chain", [], []))
    start = time.process_time()
    listing = refgrad.onnx_simple_text_plot(model)
    picture = refgrad.to_dot(model)
    assert time.process_time() - start < 3  # seconds of the processor: it takes 0.3
    assert picture.count(" -> ") == 2 * count
    lines = nodes_of(listing)
    assert [line.strip() for line in lines] == [f"Exp(x{k}) -> x{k + 1}" for k in range(count)]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    assert indents[:3] == [0, 2, 4]
    assert max(indents) == 64


CYCLE = helper.make_model(
    helper.make_graph(
        [helper.make_node("Neg", ["b"], ["a"], name="first"), helper.make_node("Neg", ["a"], ["b"])], "g", [], []
    )
)


@pytest.mark.parametrize(
    "function", [refgrad.onnx_simple_text_plot, refgrad.onnx_text_plot_io, refgrad.to_dot, refgrad.to_svg]
)
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (3, "A model is a ModelProto or a path, not int."),
        (onnx.GraphProto(), "A model is a ModelProto or a path, not GraphProto."),
        (ModelProto(), "The model is empty: it has no graph."),
        ("no such file.onnx", "There is no file 'no such file.onnx'."),
    ],
    ids=["number", "graph", "empty", "missing"],
)
def test_what_is_no_model_is_refused(function, model, message):
    with pytest.raises(InvalidModelError, match=f"^{re.escape(message)}"):
        function(model)


def test_a_node_that_needs_itself_cannot_be_listed():
    with pytest.raises(InvalidModelError, match=r"Node 'first' \(Neg\) cannot be computed: .* its own result"):
        refgrad.onnx_simple_text_plot(CYCLE)


def test_a_constant_whose_data_does_not_fit_is_refused():
    broken = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], raw_data=b"123")
    for function in (refgrad.onnx_simple_text_plot, refgrad.to_dot):
        with pytest.raises(InvalidModelError, match=r"Tensor 'w' cannot be read: .* Export the model again"):
            function(initialized(broken))
