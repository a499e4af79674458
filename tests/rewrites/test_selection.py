"""Models with short names and parts of models compute what the model computes; what cannot be selected is refused by name."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import refgrad
from refgrad.backends import available, get_backend
from refgrad.cli import main
from refgrad.conformance.problems.feeds import random_feeds
from refgrad.errors import InvalidModelError, OptionError, RefgradError, UnknownNameError
from refgrad.protos.traverse import graphs
from refgrad.show import demo


def _parse(text: str, ir_version: int = 10) -> ModelProto:
    head = f'<ir_version: {ir_version}, opset_import: ["": 18, "local": 1, "other": 1]>'
    return onnx.parser.parse_model(f"{head} {text}")


MODELS = {
    "regression": demo.regression(),
    "gradient": refgrad.gradient(demo.regression(), outputs=["loss"], cotangent="ones"),
    "constants": _parse("g (float[N] x) => (float[N] y) <float two = {2}> { c = Constant<value_float = 3.0>() "
                        "a = Mul(x, two)  y = Add(a, c) }"),
    "taken names": _parse("g (float[N] r1, float[1] i0) => (float[N] r0) <float[1] a = {2}, float[1] b = {3}> "
                          "{ r2 = Mul(r1, a)  r3 = Add(r2, b)  r0 = Mul(r3, i0) }"),
    "default": _parse("g (float[N] x, float w = {4}) => (float[N] y) { a = Mul(x, w)  y = Neg(a) }"),
    "optional": _parse("g (float[2, N] x) => (float[2, M] y, int64[2, M] k) <int64[1] one = {1}> "
                       "{ y, k = TopK(x, one)  a, , b = Dropout(y) }".replace(", , b = Dropout(y)", " = Dropout(y)")),
    "branches": _parse(
        "g (float[N] x, bool c) => (float[N] y) <float w = {2}> { a = Exp(x)  b = Mul(a, w)  y = If(c) <"
        "then_branch = t () => (float[N] u) <float w1 = {3}> { p = Neg(a)  u = Mul(p, w1) }, "
        "else_branch = e () => (float[N] u) { p = Mul(b, w)  u = Identity(p) }> }"
    ),
    "nested": _parse(
        "g (float[N] x, bool c) => (float[N] y) { a = Exp(x)  y = If(c) <"
        "then_branch = t () => (float[N] u) { p = Neg(a)  u = If(c) <"
        "then_branch = tt () => (float[N] v) { v = Add(p, a) }, else_branch = te () => (float[N] v) { v = Sub(p, x) }> }, "
        "else_branch = e () => (float[N] u) { u = Identity(a) }> }"
    ),
    "loop": _parse(
        "g (float[3] x) => (float[3] y, float[K, 3] all) <int64 trips = {4}, bool go = {1}> { s = Tanh(x)  "
        "y, all = Loop(trips, go, x) <body = b (int64 i, bool c, float[3] v) => (bool d, float[3] w, float[3] scan) "
        "{ d = Identity(c)  w = Add(v, s)  scan = Mul(w, x) }> }"
    ),
    "scan": _parse(
        "g (float[2] h, float[4, 2] xs) => (float[2] last, float[4, 2] ys) { k = Exp(h)  last, ys = Scan(h, xs) "
        "<num_scan_inputs = 1, body = b (float[2] s, float[2] e) => (float[2] t, float[2] o) "
        "{ m = Mul(e, k)  t = Add(s, m)  o = Neg(t) }> }"
    ),
    "function": _parse(
        "g (float[N] x) => (float[N] y) { a = local.f<alpha = 2.0>(x)  y = local.f(a) } "
        '<domain: "local", opset_import: ["": 18]> f <alpha: float = 1.0> (s) => (t) '
        "{ u = Elu<alpha: float = @alpha>(s)  t = Neg(u) }"
    ),
}  # fmt: skip


def _run(model: ModelProto, feeds: dict[str, np.ndarray], backend: str = "numpy") -> dict[str, np.ndarray]:
    return dict(get_backend(backend).prepare(model).run(feeds))


def _feeds(model: ModelProto, backend: str = "numpy") -> dict[str, np.ndarray]:
    return random_feeds(get_backend(backend).prepare(model).inputs, seed=0, size=3)


def _defined(model: ModelProto) -> list[str]:
    """The name of every value that a graph of the model defines, in its subgraphs too."""
    found = []
    for graph in graphs(model.graph):
        found += [value.name for value in graph.input]
        found += [t.name for t in graph.initializer if t.name not in {value.name for value in graph.input}]
        found += [name for node in graph.node for name in node.output if name]
    return found


# Short names


@pytest.mark.parametrize("backend", [name for name in available() if name != "ort-cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_a_renamed_model_computes_the_same(name, backend):
    model = MODELS[name]
    before = model.SerializeToString()
    renamed = refgrad.onnx_rename_names(model)
    assert model.SerializeToString() == before
    onnx.checker.check_model(renamed, full_check=True)
    feeds = _feeds(model)
    if "c" in feeds:
        feeds["c"] = np.array(True)
    expected, results = _run(model, feeds, backend), _run(renamed, feeds, backend)
    assert list(results) == list(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(results[key], value)


@pytest.mark.parametrize("name", MODELS)
def test_every_value_has_a_short_name_of_its_own(name):
    renamed = refgrad.onnx_rename_names(MODELS[name])
    ends = [value.name for value in (*MODELS[name].graph.input, *MODELS[name].graph.output)]
    assert [value.name for value in (*renamed.graph.input, *renamed.graph.output)] == ends
    defined = _defined(renamed)
    assert len(defined) == len(set(defined))
    assert all(re.fullmatch(r"[ir]\d+", found) for found in set(defined) - set(ends))
    nodes = [node.name for graph in graphs(renamed.graph) for node in graph.node]
    assert sorted(nodes) == sorted(f"n{k}" for k in range(len(nodes)))
    assert renamed.functions == MODELS[name].functions
    again = refgrad.onnx_rename_names(renamed)
    assert again == renamed


def test_results_are_numbered_in_the_order_of_the_nodes():
    listing = refgrad.onnx_simple_text_plot(refgrad.onnx_rename_names(demo.regression()))
    assert [line.strip() for line in listing.splitlines() if " -> " in line][:4] == [
        "Mul(x, x) -> r0",
        "Mul(r0, i0) -> r1",
        "Mul(x, i1) -> r2",
        "Add(r2, r1) -> r3",
    ]


def _annotated() -> ModelProto:
    """A model with everything that refers to a value by its name."""
    model = _parse("g (float[N] x) => (float[N] y) <float scale = {2}, float zero = {0}> "
                   "{ a = Mul(x, scale)  b = Add(a, zero)  c = Add(b, dense)  y = Neg(c) }")  # fmt: skip
    graph = model.graph
    values = helper.make_tensor("dense", TensorProto.FLOAT, [1], [5])
    graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, helper.make_tensor("", TensorProto.INT64, [1], [0]), [1])
    )
    graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, ["N"]))
    annotation = graph.quantization_annotation.add(tensor_name="a")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="scale")
    graph.node[1].device_configurations.add(configuration_id="two").sharding_spec.add(tensor_name="a")
    graph.node[1].metadata_props.add(key="refgrad.node", value="b")
    model.metadata_props.add(key="where", value="a")
    return model


def test_what_refers_to_a_value_follows_it():
    model = refgrad.onnx_rename_names(_annotated())
    graph = model.graph
    assert [tensor.name for tensor in graph.initializer] == ["i0", "i1"]
    assert graph.sparse_initializer[0].values.name == "i2"
    assert [list(node.input) for node in graph.node] == [["x", "i0"], ["r0", "i1"], ["r1", "i2"], ["r2"]]
    assert [value.name for value in graph.value_info] == ["r0"]
    (annotation,) = graph.quantization_annotation
    assert annotation.tensor_name == "r0"
    assert [entry.value for entry in annotation.quant_parameter_tensor_names] == ["i0"]
    assert graph.node[1].device_configurations[0].sharding_spec[0].tensor_name == "r0"
    assert graph.node[1].metadata_props[0].value == "b"
    assert model.metadata_props[0].value == "a"


def test_names_that_training_needs_stay():
    model = demo.regression()
    training = model.training_info.add()
    training.update_binding.add(key="init", value="new_init")
    training.algorithm.node.append(helper.make_node("Add", ["init", "loss"], ["new_init"]))
    names = {tensor.name for tensor in refgrad.onnx_rename_names(model).graph.initializer}
    assert "init" in names
    assert "init_1" not in names


def test_what_nothing_defines_has_one_name_everywhere():
    model = _parse("g (float[N] x, bool c) => (float[N] y) { y = If(c) <"
                   "then_branch = t () => (float[N] u) { u = Neg(lost) }, "
                   "else_branch = e () => (float[N] u) { u = Exp(lost) }> }")  # fmt: skip
    renamed = refgrad.onnx_rename_names(model)
    read = {name for graph in graphs(renamed.graph) for node in graph.node for name in node.input} - {"c"}
    assert len(read) == 1
    assert read.isdisjoint(_defined(renamed))


def test_a_wrong_renaming_is_noticed(monkeypatch):
    """A subgraph that keeps its names: what it captures has another one."""
    monkeypatch.setattr(refgrad.rewrites.selection, "subgraphs", lambda attribute: ())
    with pytest.raises(onnx.checker.ValidationError):
        test_a_renamed_model_computes_the_same("branches", "numpy")


# Parts of models


def test_the_loss_alone_as_in_the_notebook():
    selected = refgrad.select_model_inputs_outputs(demo.regression(), outputs=["loss"])
    expected = demo.regression()
    del expected.graph.output[1]
    assert selected.graph == expected.graph


def test_by_default_the_inputs_are_those_that_are_needed():
    selected = refgrad.select_model_inputs_outputs(demo.regression(), ["y"])
    assert [value.name for value in selected.graph.input] == ["x"]
    assert [node.output[0] for node in selected.graph.node][-1] == "y"
    assert refgrad.select_model_inputs_outputs(demo.regression()).graph == demo.regression().graph


def test_inputs_that_are_still_needed_stay_on_request(tmp_path, capsys):
    model = _parse(
        "g (int64[N] ids, float[N, 2] mask) => (int64[N] y) <float[2, 2] table = {1, 2, 3, 4}> "
        "{ rows = Gather(table, ids)  masked = Mul(rows, mask)  y = ArgMax<axis = 1, keepdims = 0>(masked) }"
    )
    with pytest.raises(UnknownNameError, match="'mask'"):
        refgrad.select_model_inputs_outputs(model, ["masked"], ["rows"])
    part = refgrad.select_model_inputs_outputs(model, ["masked"], ["rows"], keep_inputs=True)
    assert [value.name for value in part.graph.input] == ["rows", "mask"]
    assert [node.op_type for node in part.graph.node] == ["Mul"]
    assert refgrad.select_model_inputs_outputs(model, ["rows"], keep_inputs=True).graph.input[0].name == "ids"
    written, cut = tmp_path / "whole.onnx", tmp_path / "part.onnx"
    onnx.save(model, written)
    assert main(["grad", str(written), "-o", str(cut)]) == 2
    assert "refgrad cut MODEL --outputs masked -o PART.onnx" in capsys.readouterr().err
    assert main(["cut", str(written), "--outputs", "masked", "--inputs", "rows", "-o", str(cut)]) == 0
    assert onnx.load(cut).graph == part.graph


CUTS = {
    "regression": [
        (["loss"], ["y", "label"]),
        (["out_add_0", "y"], ["x"]),
        (["out_add_0_1"], ["out_squ_0", "out_add_0"]),
        (["y", "loss"], ["out_squ_0", "out_squ_0_1", "label"]),
        (["y"], ["init_b10", "x"]),
        (["init", "y"], ["label", "x"]),
        (["x", "out_mul_0"], ["x"]),
    ],
    "optional": [(["a"], ["y"]), (["a", "k"], ["y", "x"]), (["k"], None), (["a", "y"], ["x"])],
    "default": [(["a"], None), (["a"], ["x"]), (["y"], ["w", "x"]), (["y"], ["a"])],
    "branches": [(["y"], ["a", "c"]), (["y"], ["a", "b", "c"]), (["b"], None), (["y"], ["c", "x", "w"])],
    "nested": [(["y"], ["a", "c", "x"]), (["a"], None)],
    "loop": [(["all"], ["s", "x"]), (["y"], None), (["y"], ["x", "s", "trips"]), (["s"], ["x"])],
    "scan": [(["ys"], ["k", "h", "xs"]), (["k"], None)],
    "function": [(["a"], None), (["y"], ["a"])],
    "constants": [(["y"], ["a"]), (["c"], []), (["two"], None)],
}


def _every_value(model: ModelProto) -> ModelProto:
    """The same model with every result of its main graph as an output too."""
    whole = ModelProto()
    whole.CopyFrom(model)
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    known = {value.name for value in model.graph.output}
    whole.graph.output.extend(value for value in inferred.value_info if value.name not in known)
    return whole


@pytest.mark.parametrize("backend", [name for name in available() if name != "ort-cuda"])
@pytest.mark.parametrize(
    ("name", "outputs", "inputs"), [(name, *cut) for name, cuts in CUTS.items() for cut in cuts], ids=str
)
def test_a_part_computes_what_the_model_computes_there(name, outputs, inputs, backend):
    model = MODELS[name]
    before = model.SerializeToString()
    selected = refgrad.select_model_inputs_outputs(model, outputs, inputs)
    assert model.SerializeToString() == before
    onnx.checker.check_model(selected, full_check=True)
    feeds = _feeds(model) | ({"c": np.array(False)} if name in ("branches", "nested") else {})
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    values = constants | feeds | _run(_every_value(model), feeds)
    given = [value.name for value in selected.graph.input]
    assert given == inputs or inputs is None
    assert [value.name for value in selected.graph.output] == outputs
    results = _run(selected, {key: values[key] for key in given}, backend)
    for key in outputs:
        np.testing.assert_allclose(results[key], values[key], rtol=1e-6, atol=0)
    read = {key for graph in graphs(selected.graph) for node in graph.node for key in node.input}
    assert {tensor.name for tensor in selected.graph.initializer} <= read | {*outputs, *given}


def _random_model(rng: np.random.Generator) -> ModelProto:
    nodes, names = [], ["x0", "x1", "w"]
    for k in range(12):
        a, b = (str(name) for name in rng.choice(names, 2))
        if k % 4 == 3:
            nodes.append(helper.make_node("Split", [a], [f"v{k}", f"u{k}"], num_outputs=2, axis=0))
            nodes.append(helper.make_node("Concat", [f"u{k}", f"v{k}"], [f"t{k}"], axis=0))
            names.append(f"t{k}")
        else:
            nodes.append(helper.make_node(str(rng.choice(["Add", "Sub", "Max"])), [a, b], [f"v{k}"]))
            names.append(f"v{k}")
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x0", "x1")]
    weight = numpy_helper.from_array(np.float32([1, -2, 3, -4]), "w")
    output = helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, [4])
    return helper.make_model(
        helper.make_graph(nodes, "g", inputs, [output], [weight]),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )


def _needs(model: ModelProto, name: str, cut: list[str]) -> set[str]:
    """The inputs of the model that `name` needs below the cut, found by following every edge from it."""
    if name in cut:
        return set()
    makers = [node for node in model.graph.node if name in node.output]
    if not makers:
        return {name} & {value.name for value in model.graph.input}
    return set().union(*(_needs(model, read, cut) for read in makers[0].input))


@pytest.mark.parametrize("seed", range(40))
def test_any_part_of_a_random_model(seed):
    rng = np.random.default_rng(seed)
    model = _random_model(rng)
    results = [name for node in model.graph.node for name in node.output]
    outputs = [str(name) for name in rng.choice(results, 2, replace=False)]
    inputs = [str(name) for name in rng.choice(["x0", "x1", "w", *results], 4, replace=False)]
    missing = set().union(*(_needs(model, name, inputs) for name in outputs))
    if missing:
        with pytest.raises(UnknownNameError, match="needs more than inputs has: 'x"):
            refgrad.select_model_inputs_outputs(model, outputs, inputs)
        inputs += sorted(missing)
    selected = refgrad.select_model_inputs_outputs(model, outputs, inputs)
    onnx.checker.check_model(selected, full_check=True)
    feeds = {name: rng.standard_normal(4).astype(np.float32) for name in ("x0", "x1")}
    values = feeds | _run(_every_value(model), feeds) | {"w": numpy_helper.to_array(model.graph.initializer[0])}
    for name, value in _run(selected, {name: values[name] for name in inputs}).items():
        np.testing.assert_array_equal(value, values[name])


def test_a_node_that_is_kept_for_its_other_result_does_not_compute_an_input():
    selected = refgrad.select_model_inputs_outputs(MODELS["optional"], ["a", "k"], ["y", "x"])
    assert [list(node.output) for node in selected.graph.node] == [["y_unused", "k"], ["a"]]


def test_types_are_inferred_where_none_is_declared():
    selected = refgrad.select_model_inputs_outputs(demo.regression(), ["loss_diff"], ["out_add_0_2", "label"])
    x, label = (value.type.tensor_type for value in selected.graph.input)
    assert x.elem_type == TensorProto.FLOAT
    assert [dim.WhichOneof("value") for dim in x.shape.dim] == [None]
    assert [dim.dim_value for dim in label.shape.dim] == [0, 1]


def test_declared_types_are_not_inferred_anew():
    model = _parse("g (float[N] x) => (float[N] y) <float[M] a> { a = other.Op(x)  y = Neg(a) }")
    selected = refgrad.select_model_inputs_outputs(model, ["y"], ["a"])
    assert selected.graph.input[0] == model.graph.value_info[0]
    assert not selected.graph.value_info


def test_annotations_and_sparse_initializers_stay_where_their_values_do():
    model = _annotated()
    whole = refgrad.select_model_inputs_outputs(model)
    assert whole.graph == model.graph
    assert whole.metadata_props == model.metadata_props
    upper = refgrad.select_model_inputs_outputs(model, ["y"], ["b"]).graph
    assert not upper.quantization_annotation
    assert not upper.initializer
    assert [tensor.values.name for tensor in upper.sparse_initializer] == ["dense"]
    lower = refgrad.select_model_inputs_outputs(model, ["b"]).graph
    assert lower.quantization_annotation == model.graph.quantization_annotation
    assert not lower.sparse_initializer


def test_before_version_4_an_initializer_stays_an_input():
    model = _parse("g (float[N] x, float[1] w, float[1] v) => (float[N] y) <float[1] w = {2}, float[1] v = {1}> "
                   "{ a = Mul(x, w)  y = Add(a, v) }", ir_version=3)  # fmt: skip
    selected = refgrad.select_model_inputs_outputs(model, ["a"], ["x"])
    onnx.checker.check_model(selected)
    assert [value.name for value in selected.graph.input] == ["x", "w"]
    assert [tensor.name for tensor in selected.graph.initializer] == ["w"]


def test_external_data_is_neither_read_nor_copied(tmp_path):
    model = _parse("g (float[1, 5] x) => (float[1, 3] y) { a = MatMul(x, w)  y = Add(a, v) }")
    for name, rows in (("w", 5), ("v", 1)):
        model.graph.initializer.append(numpy_helper.from_array(np.full((rows, 3), 2, np.float32), name))
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="m.bin", size_threshold=0)
    for made in (refgrad.select_model_inputs_outputs(path, ["a"]), refgrad.onnx_rename_names(path)):
        for tensor in made.graph.initializer:
            assert tensor.data_location == TensorProto.EXTERNAL
            assert not tensor.raw_data
        onnx.save(made, tmp_path / "made.onnx")
        (result,) = _run(tmp_path / "made.onnx", {"x": np.ones((1, 5), np.float32)}).values()
        assert result[0, 0] in (10, 12)


def test_weights_of_any_size_are_only_referred_to():
    """4 TB that are nowhere: the model itself holds none of them."""
    model = _parse(
        "g (float[1, 1000000] x) => (float[1, 1000000] y) { a = MatMul(x, w)  b = Neg(a)  y = MatMul(b, w) }"
    )
    weight = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[10**6, 10**6])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.bin")
    selected = refgrad.select_model_inputs_outputs(model, ["b"], ["a"])
    assert not selected.graph.initializer
    assert [dim.dim_value for dim in selected.graph.input[0].type.tensor_type.shape.dim] == [1, 10**6]
    assert refgrad.onnx_rename_names(model).graph.initializer[0].external_data == weight.external_data


TWO = _parse("g (float[N] x, float[N] z) => (float[N] y) <float w = {1}> { a = Exp(x)  b = Mul(a, z)  y = Mul(b, w) }")
BAD = {
    "not a model": (3, {}, InvalidModelError, "A model is a ModelProto or a path, not int."),
    "unknown output": (TWO, {"outputs": ["yy"]}, UnknownNameError, "'yy' in outputs is not a value of the model. Did"),
    "unknown input": (TWO, {"inputs": ["q"]}, UnknownNameError, "'q' in inputs is not a value of the model. It has: 'x'"),
    "inner name": (MODELS["branches"], {"outputs": ["p"]}, UnknownNameError, "'p' in outputs is not a value of the model."),
    "output twice": (TWO, {"outputs": ["y", "a", "y"]}, UnknownNameError, "outputs has 'y' twice."),
    "input twice": (TWO, {"inputs": ["x", "x"]}, UnknownNameError, "inputs has 'x' twice."),
    "no outputs": (TWO, {"outputs": []}, OptionError, "outputs is empty; the model has: 'x', 'z', 'w', 'a', 'b', 'y'."),
    "no inputs": (TWO, {"inputs": []}, UnknownNameError, "Output 'y' needs more than inputs has: 'x', 'z'. Add"),
    "an input missing": (TWO, {"inputs": ["a"]}, UnknownNameError, "Output 'y' needs more than inputs has: 'z'."),
    "another input": (TWO, {"outputs": ["a"], "inputs": ["z"]}, UnknownNameError, "Output 'a' needs more than inputs has: 'x'"),
    "a string": (TWO, {"outputs": "y"}, OptionError, "outputs is a list of names, not 'y'; the model has: 'x'"),
    "a number": (TWO, {"inputs": 3}, OptionError, "inputs is a list of names, not 3"),
    "numbers": (TWO, {"inputs": [3]}, OptionError, "inputs is a list of names, not [3]"),
    "sparse": (_annotated(), {"inputs": ["dense"]}, UnknownNameError, "'dense' in inputs is a sparse initializer"),
    "unknown type": (
        _parse("g (float[N] x) => (float[N] y) { a = other.Op(x)  y = other.Op(a) }"),
        {"outputs": ["a"]},
        InvalidModelError,
        "The type of 'a' is not declared, and shape inference does not find it.",
    ),
    "read from nowhere": (
        _parse("g (float[N] x) => (float[N] y) { y = Add(x, lost) }"),
        {},
        InvalidModelError,
        "Nothing gives 'lost', and node 'Add' needs it.",
    ),
    "output from nowhere": (_parse("g (float[N] x) => (float[N] y) {}"), {}, InvalidModelError, "Nothing gives 'y', and it is"),
    "computed twice": (
        _parse("g (float[N] x) => (float[N] y) { y = Neg(x)  y = Exp(x) }"),
        {},
        InvalidModelError,
        "Two nodes compute 'y'.",
    ),
    "empty graph": (_parse("g () => () {}"), {}, OptionError, "outputs is empty; the model has: none."),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_selected_is_refused(name):
    model, arguments, error, message = BAD[name]
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        refgrad.select_model_inputs_outputs(model, **arguments)


def test_only_models_are_renamed():
    with pytest.raises(InvalidModelError, match=r"^A model is a ModelProto or a path, not NoneType\.$"):
        refgrad.onnx_rename_names(None)


def test_a_wrong_selection_is_noticed(monkeypatch):
    """Without what subgraphs capture, a node that they need is missing."""
    monkeypatch.setattr(refgrad.rewrites.selection, "reads_of", lambda node: node.input)
    with pytest.raises((RefgradError, onnx.checker.ValidationError)):
        test_a_part_computes_what_the_model_computes_there("branches", ["y"], ["c", "x", "w"], "numpy")
