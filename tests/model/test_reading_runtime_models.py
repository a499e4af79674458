"""Models that ONNX Runtime loads and onnx refuses, and models in the layout of a processor, are read as ONNX Runtime does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checking import assert_gradient
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.errors import InvalidModelError, ModelWarning
from refgrad.model.reading import read
from refgrad.model.upgrading import nchwc as layout
from refgrad.protos.domains import NCHWC
from refgrad.tables.registry import BODY

pytestmark = pytest.mark.stock

ort = pytest.importorskip("onnxruntime")
RNG = np.random.default_rng(0)


# Operators of ONNX Runtime where onnx does not expect them


def _one(op_type: str, domain: str, imports: dict[str, int], **attributes: Any) -> ModelProto:
    nodes = [
        helper.make_node(op_type, ["x"], ["z"], domain=domain, **attributes),
        helper.make_node("Tanh", ["z"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3, *size]) for name, size in SIZES.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    opsets = [helper.make_opsetid(*entry) for entry in imports.items()]
    return helper.make_model(graph, ir_version=4, opset_imports=opsets)


SIZES: dict[str, list[int | None]] = {"x": [5, 6], "y": [None, None]}
X = RNG.standard_normal((2, 3, 5, 6)).astype(np.float32)


def test_an_absent_import_is_added_with_a_notice() -> None:
    model = _one("Gelu", "com.microsoft", {"": 17})
    before = model.SerializeToString()
    with pytest.warns(ModelWarning, match=r"operators of com\.microsoft and does not import that domain"):
        gradient = refgrad.gradient(model)
    assert model.SerializeToString() == before
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert gradient.SerializeToString() == refgrad.gradient(model).SerializeToString()


def test_nodes_in_another_order_are_sorted_with_a_notice() -> None:
    """As ONNX Runtime's conversion to float16 leaves them. What reads a later result may be in a body, which is in order."""
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[2,3] x, bool c) => (float[2,3] y) {{
        {} }}"""
    branch = "z = If <then_branch = t () => (float[2,3] a) {{ {} }}, else_branch = e () => (float[2,3] d) {{ d = Neg(w) }}> (c)"
    first, second, last = "w = Tanh(x)", branch.format("b = Exp(w) a = Sin(b)"), "y = Mul(z, x)"
    sorted_model = parser.parse_model(text.format(f"{first} {second} {last}"))
    expected = refgrad.gradient(sorted_model)
    for nodes in ((last, second, first), (first, last, second), (second, last, first)):
        model = parser.parse_model(text.format(" ".join(nodes)))
        before = model.SerializeToString()
        with pytest.warns(ModelWarning, match="not in topological order"):
            gradient = refgrad.gradient(model)
        assert model.SerializeToString() == before
        assert gradient.SerializeToString() == expected.SerializeToString()
        feeds = {"x": X[0, :, :2, 0].T.copy(), "c": np.array(True)}
        result = get_backend("numpy").prepare(model).run(feeds)
        np.testing.assert_allclose(result["y"], get_backend("ort-cpu").prepare(model).run(feeds)["y"], rtol=1e-6)


def test_a_cycle_a_body_in_another_order_and_a_name_that_is_written_twice_are_refused() -> None:
    in_body = (
        "z = If <then_branch = t () => (float[2] a) {{ a = Sin(b) b = Exp(x) }}, else_branch = e () => (float[2] d) "
    )
    in_body += "{{ d = Neg(x) }}> (c) y = Neg(z)"
    for nodes, said in ((in_body, "sorted"), ("z = Add(x, y) y = Neg(z)", "sorted"), ("y = Neg(x) y = Abs(y)", "SSA")):
        text = f'<ir_version: 8, opset_import: ["": 18]> g (float[2] x, bool c) => (float[2] y) {{{{ {nodes} }}}}'
        with pytest.raises(InvalidModelError, match=said):
            refgrad.gradient(parser.parse_model(text.replace("{{", "{").replace("}}", "}")))


def test_a_function_of_that_domain_needs_no_import_either() -> None:
    body = [helper.make_node("Relu", ["a"], ["b"])]
    function = helper.make_function("com.microsoft", "Own", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    model = _one("Own", "com.microsoft", {"": 17})
    model.functions.append(function)
    model.ir_version = 8
    with pytest.warns(ModelWarning):
        assert refgrad.preflight(model).ok


@pytest.mark.parametrize("domain", ["ai.onnx.ml", "unknown"])
def test_other_domains_are_not_guessed(domain: str) -> None:
    with pytest.raises(InvalidModelError, match=f"No opset import for domain '{domain}'"):
        refgrad.gradient(_one("Binarizer", domain, {"": 17}))


@pytest.mark.parametrize("inner", ["", "com.microsoft"])
def test_a_function_without_an_import_that_it_needs_is_refused_as_by_onnx_runtime(inner: str) -> None:
    body = [helper.make_node("Gelu" if inner else "Relu", ["a"], ["b"], domain=inner)]
    imports = [helper.make_opsetid("", 17)] if inner else []
    model = _one("Own", "local", {"": 17, "local": 1, "com.microsoft": 1})
    model.functions.append(helper.make_function("local", "Own", ["a"], ["b"], body, imports))
    model.ir_version = 8
    with pytest.raises(InvalidModelError, match="No Opset registered for domain"):
        refgrad.gradient(model)


LEGACY: list[tuple[str, int, dict[str, Any]]] = [
    *(("Affine", opset, {"alpha": 2.0, "beta": -0.25}) for opset in (7, 9)),
    ("Affine", 9, {}),
    ("ParametricSoftplus", 7, {"alpha": 2.0, "beta": -1.5}),
    ("ScaledTanh", 9, {"alpha": 2.0, "beta": 0.7}),
    ("Scale", 8, {"scale": 3.0}),
    ("Scale", 8, {}),
    ("ThresholdedRelu", 7, {"alpha": -0.25}),
    ("ThresholdedRelu", 9, {}),
    *(
        ("MeanVarianceNormalization", 8, {"across_channels": across, "normalize_variance": scaled})
        for across in (0, 1)
        for scaled in (0, 1)
    ),
    ("ImageScaler", 9, {"scale": 2.0, "bias": [1.0, -2.0, 0.5]}),
    ("Crop", 9, {"border": [1, 0, 2, 1]}),
    ("Crop", 7, {"border": [1, 2, 0, 0], "scale": [2, 3]}),
]


@pytest.mark.parametrize(("op_type", "opset", "attributes"), LEGACY, ids=str)
def test_what_onnx_runtime_has_in_the_domain_of_onnx(op_type: str, opset: int, attributes: dict[str, Any]) -> None:
    model = _one(op_type, "", {"": opset}, **attributes)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": X})[0]
    for one in (model, refgrad.lower(model)):
        np.testing.assert_allclose(get_backend("numpy").prepare(one).run({"x": X})["y"], expected, rtol=1e-5, atol=1e-6)
    assert_gradient(Case(op_type, model, {"x": X}), runtime=False)


@pytest.mark.parametrize(
    ("op_type", "attributes", "said"),
    [
        ("ParametricSoftplus", {"alpha": 1.0}, "it lacks the attribute beta"),
        ("ImageScaler", {}, "it lacks the attribute bias"),
        ("Crop", {"border": [1, 2]}, "its border has four numbers"),
    ],
)
def test_a_malformed_one_is_refused(op_type: str, attributes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidModelError, match=said):
        refgrad.gradient(_one(op_type, "", {"": 9}, **attributes))


# The layout of a processor

NETWORKS = {
    "padded": (
        "c = Conv <pads=[1,1,1,1]> (x,w1,b1) r = Relu(c) d = Conv(r,w2,b2) y = Sigmoid(d)",
        {"w1": (20, 3, 3, 3), "b1": (20,), "w2": (12, 20, 3, 3), "b2": (12,)},
    ),
    "depthwise": (
        """c = Conv <pads=[1,1,1,1]> (x,w1,b1) r = MaxPool <kernel_shape=[2,2], strides=[2,2]> (c)
        d = Conv <group=24> (r,w2) e = Conv(d,w3) f = Add(e,d) g = GlobalAveragePool(f) y = Flatten(g)""",
        {"w1": (24, 3, 3, 3), "b1": (24,), "w2": (24, 1, 1, 1), "w3": (24, 24, 1, 1)},
    ),
    "groups and parts": (
        """a = Conv <pads=[1,1,1,1]> (x,w0) c = Conv <group=2> (a,w1) d = Conv(c,w2) z = Concat <axis=1> (c,d) e = Conv(z,w3)
        y = AveragePool <kernel_shape=[2,2]> (e)""",
        {"w0": (32, 3, 3, 3), "w1": (32, 16, 1, 1), "w2": (16, 32, 1, 1), "w3": (10, 48, 1, 1)},
    ),
    "a gate": (
        """c = Conv <pads=[1,1,1,1]> (x,w1) d = MaxPool <kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]> (c)
        s = GlobalAveragePool(d) t = Conv(s,w2) u = Sigmoid(t) v = Mul(u,d) y = Conv(v,w3)""",
        {"w1": (20, 3, 3, 3), "w2": (20, 20, 1, 1), "w3": (7, 20, 1, 1)},
    ),
    "sizes": (
        """sc = Constant <value_floats=[1.0,1.0,2.0,2.0]> () c = Conv <pads=[1,1,1,1]> (x,w1)
        d = Resize <mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"> (c,,sc)
        e = Resize <mode="linear", coordinate_transformation_mode="half_pixel"> (d,,sc) y = Conv(e,w2)""",
        {"w1": (16, 3, 3, 3), "w2": (32, 16, 1, 1)},
    ),
    "channels last": (
        "c = Conv <pads=[1,1,1,1]> (x,w1) r = Relu(c) y = Transpose <perm=[0,2,3,1]> (r)",
        {"w1": (20, 3, 3, 3)},
    ),
}


def _network(name: str) -> ModelProto:
    text, shapes = NETWORKS[name]
    head = '<ir_version: 10, opset_import: ["": 17]>'
    model = parser.parse_model(f"{head} g (float[2,3,8,8] x) => (float[A] y) {{ {text} }}")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    for one, shape in shapes.items():
        model.graph.initializer.append(
            numpy_helper.from_array((RNG.standard_normal(shape) / 2).astype(np.float32), one)
        )
    return model


def _saved(model: ModelProto, path: Path) -> ModelProto:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    saved = onnx.load(path)
    if not layout.in_layout(saved):
        pytest.skip("this processor has no such layout")
    return saved


def _values(gradient: ModelProto, source: ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    weights = {t.name: numpy_helper.to_array(t) for t in source.graph.initializer}
    given = {v.name: feeds[v.name] if v.name in feeds else weights[v.name] for v in gradient.graph.input}
    return get_backend("numpy").prepare(gradient).run(given)


@pytest.mark.filterwarnings("ignore::refgrad.errors.ModelWarning")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_in_the_layout_of_a_processor_has_the_gradients_of_the_model(name: str, tmp_path: Path) -> None:
    model = _network(name)
    saved = _saved(model, tmp_path / "saved.onnx")
    before = saved.SerializeToString()
    plain = read(saved)
    assert saved.SerializeToString() == before
    assert all(node.domain != NCHWC for node in plain.graph.node)
    filters = {k: v for k, v in NETWORKS[name][1].items() if len(v) == 4}
    assert sorted(tuple(t.dims) for t in plain.graph.initializer if len(t.dims) == 4) == sorted(filters.values())
    x = RNG.standard_normal((2, 3, 8, 8)).astype(np.float32)
    forward = get_backend("numpy").prepare(model).run({"x": x})
    np.testing.assert_allclose(
        get_backend("numpy").prepare(plain).run({"x": x})["y"], forward["y"], rtol=1e-5, atol=1e-6
    )
    feeds = {"x": x, "y_grad": RNG.standard_normal(forward["y"].shape).astype(np.float32)}
    expected = _values(refgrad.gradient(model), model, feeds)
    found = _values(refgrad.gradient(saved), plain, feeds)
    np.testing.assert_allclose(found["x_grad"], expected["x_grad"], rtol=1e-4, atol=1e-6)
    weights = {t.name: numpy_helper.to_array(t) for t in (*plain.graph.initializer, *model.graph.initializer)}
    for new, gradient in found.items():
        here = weights.get(new.removesuffix("_grad"))
        if here is not None:
            old = next(k for k in NETWORKS[name][1] if weights[k].shape == here.shape and (weights[k] == here).all())
            np.testing.assert_allclose(gradient, expected[f"{old}_grad"], rtol=1e-4, atol=1e-5)
    assert refgrad.gradient(tmp_path / "saved.onnx", wrt=["x"]).graph.output[0].name == "x_grad"


# What ONNX Runtime makes of convolutional networks: the nodes behind the first convolution, their filters, and an operator that
# it writes for them. An operator that activates has the name of that behind it; "Sum" is one that adds.
Behind = tuple[str, dict[str, tuple[int, ...]], str]
_POOL = [
    *("kernel_shape=[3,3], strides=[2,2], ceil_mode=1", "kernel_shape=[3,2], strides=[2,3], pads=[1,0,1,1]"),
    *('kernel_shape=[2,2], strides=[3,3], auto_pad="SAME_UPPER"', 'kernel_shape=[2,2], auto_pad="SAME_LOWER"'),
    *('kernel_shape=[2,2], strides=[2,2], auto_pad="VALID"', "kernel_shape=[3,3], pads=[1,1,1,1], ceil_mode=1"),
    "kernel_shape=[2,2], strides=[2,2], pads=[1,1,0,0], dilations=[2,3], ceil_mode=1",
]
_LIMITS = "low = Constant <value_float = -0.4> () high = Constant <value_float = 0.6> ()"
_ACTIVATING = {
    **{name: f"r = {name}(c)" for name in ("Relu", "Sigmoid", "Tanh", "HardSwish")},
    "LeakyRelu": "r = LeakyRelu <alpha = 0.3> (c)",
    "HardSigmoid": "r = HardSigmoid <alpha = 0.3, beta = 0.4> (c)",
    "Clip": f"{_LIMITS} r = Clip(c, low, high)",
}
_GIVEN = "u1 = Conv <pads = [1,1,1,1]> (a, u)"
WRITTEN: dict[str, Behind] = {
    **{
        f"{k} {n}": (f"c = Identity(a) {text}", {"v": (10, n, 3, 3)}, f"Conv {k}")
        for k, text in _ACTIVATING.items()
        for n in (20, 32)
    },
    **{
        f"{k} of a sum": (
            f"{_GIVEN} c = Add(u1, a) {text}",
            {"u": (20, 20, 3, 3), "v": (10, 20, 3, 3)},
            f"Conv Sum {k}",
        )
        for k, text in _ACTIVATING.items()
        if k not in ("LeakyRelu", "Clip")  # ONNX Runtime leaves them where they are
    },
    "sum": (f"{_GIVEN} r = Add(u1, a)", {"u": (20, 20, 3, 3), "v": (10, 20, 3, 3)}, "Conv Sum"),
    **{f"MaxPool {p}": (f"r = MaxPool <{p}> (a)", {"v": (9, 32, 1, 1)}, "MaxPool") for p in _POOL},
    **{
        f"AveragePool {p} {count}": (
            f"r = AveragePool <{p}, count_include_pad = {count}> (a)",
            {"v": (9, 32, 1, 1)},
            "AveragePool",
        )
        for p in _POOL[:-1]
        for count in ((0,) if "ceil_mode" in p else (0, 1))  # with both ONNX Runtime leaves it
    },
    "global maximum": ("r = GlobalMaxPool(a)", {"v": (9, 32, 1, 1)}, "GlobalMaxPool"),
    "global mean": ("r = GlobalAveragePool(a)", {"v": (9, 32, 1, 1)}, "GlobalAveragePool"),
    **{
        f"{mode} {scales}": (
            f"s = Constant <value_floats = [1.0, 1.0, {scales}]> () r = Resize <{mode}> (a, , s)",
            {"v": (9, 20, 1, 1)},
            "Upsample",
        )
        for scales in ("2.0, 2.0", "3.0, 1.0", "2.0, 3.0")
        for mode in (
            'mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"',
            *(
                f'mode = "linear", coordinate_transformation_mode = "{where}"'
                for where in ("asymmetric", "half_pixel", "align_corners")
            ),
        )
    },
    "each channel by itself": (
        "d = Conv <group = 20, pads = [1,1,1,1], strides = [2,1], dilations = [1,2]> (a, u) r = Relu(d)",
        {"u": (20, 1, 3, 3), "v": (9, 20, 1, 1)},
        "Conv Relu",
    ),
    "groups of blocks": ("r = Conv <group = 2> (a, u)", {"u": (64, 16, 3, 3), "v": (9, 64, 1, 1)}, "Conv"),
    "groups of parts of blocks": (
        "r = Conv <group = 2> (a, u)",
        {"u": (20, 10, 3, 3), "v": (9, 20, 1, 1)},
        "ReorderInput",
    ),
    "two filters for each channel": (
        "r = Conv <group = 16> (a, u)",
        {"u": (32, 1, 3, 3), "v": (9, 32, 1, 1)},
        "ReorderInput",
    ),
    "blocks side by side": (
        "d = Conv <pads = [1,1,1,1]> (a, u) e = Concat <axis = 1> (a, d) r = Relu(e)",
        {"u": (16, 32, 3, 3), "v": (9, 48, 1, 1)},
        "Conv",
    ),
    "parts of blocks side by side": (
        "d = Conv <pads = [1,1,1,1]> (a, u) e = Concat <axis = 1> (a, d) r = Relu(e)",
        {"u": (12, 20, 3, 3), "v": (9, 32, 1, 1)},
        "ReorderInput",
    ),
    "what a group makes, side by side": (
        "g = Conv <group = 2, pads = [1,1,1,1]> (a, u) p = MaxPool <kernel_shape = [2,2]> (g) e = Relu(p) "
        "r = Concat <axis = 1> (e, p)",
        {"u": (16, 8, 3, 3), "v": (9, 32, 1, 1)},
        "MaxPool",
    ),
    "a function that is inlined, and as an activation": (
        "p = MaxPool <kernel_shape = [2,2]> (a) h = HardSwish(p) d = Conv(h, u) r = HardSwish(d)",
        {"u": (20, 32, 3, 3), "v": (9, 20, 1, 1)},
        "Conv HardSwish",
    ),
    "a gate": (
        "m = GlobalAveragePool(a) d = Conv(m, u) e = Relu(d) f = Conv(e, t) h = HardSigmoid(f) r = Mul(a, h)",
        {"u": (8, 32, 1, 1), "t": (32, 8, 1, 1), "v": (9, 32, 1, 1)},
        "Conv HardSigmoid",
    ),
    "filters that several read": (
        "d = Conv <pads = [1,1,1,1]> (a, u) e = Relu(d) r = Conv <pads = [1,1,1,1]> (e, u)",
        {"u": (20, 20, 3, 3), "v": (9, 20, 1, 1)},
        "Conv Relu",
    ),
    "down and up again": (
        """p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (a) d = Conv <pads = [1,1,1,1]> (p, u) e = Relu(d)
        s = Constant <value_floats = [1.0, 1.0, 2.0, 2.0]> ()
        f = Resize <mode = "linear", coordinate_transformation_mode = "half_pixel"> (e, , s) r = Concat <axis = 1> (f, a)""",
        {"u": (64, 32, 3, 3), "v": (3, 96, 1, 1)},
        "Upsample",
    ),
}


def _convolutional(name: str) -> ModelProto:
    """The network between a convolution of the input, with as many channels as what follows reads, and a last one."""
    text, shapes, _ = WRITTEN[name]
    other = shapes.get("u", (0,) * 4)
    group = int(match[1]) if (match := re.search(r"group = (\d+)", text)) else 1
    channels = other[1] * group if other[1] else shapes["v"][1]
    opset = 22 if "dilations=" in text else 17
    head = f'<ir_version: 10, opset_import: ["" : {opset}]>'
    model = parser.parse_model(
        f"{head} g (float[2,3,8,8] x) => (float[A,B,C,D] y) {{ a = Conv <pads = [1,1,1,1]> (x, w, b) {text} y = Conv(r, v) }}"
    )
    for one, shape in (shapes | {"w": (channels, 3, 3, 3), "b": (channels,)}).items():
        array = (RNG.standard_normal(shape) / 2).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, one))
    return model


def _named(node: onnx.NodeProto) -> str:
    """An operator of the layout, whether it adds, and what it activates with."""
    activation = next((a.s.decode() for a in node.attribute if a.name == "activation"), "")
    return " ".join(filter(None, [node.op_type, "Sum" if "".join(node.input[3:]) else "", activation]))


@pytest.mark.filterwarnings("ignore::refgrad.errors.ModelWarning")
@pytest.mark.parametrize("name", WRITTEN)
def test_what_onnx_runtime_writes_in_the_layout_has_the_gradient_of_the_model(name: str, tmp_path: Path) -> None:
    model = _convolutional(name)
    saved = _saved(model, tmp_path / "saved.onnx")
    assert WRITTEN[name][2] in {_named(node) for node in saved.graph.node if node.domain == NCHWC}
    exact = 1e-6 if "inlined" in name else 1e-9  # a sixth is an attribute then, a float
    feeds = {"x": RNG.standard_normal((2, 3, 8, 8))}
    double = [get_backend("numpy").prepare(one, precision="float64") for one in (model, read(saved))]
    expected, found = (one.run(feeds)["y"] for one in double)
    np.testing.assert_allclose(found, expected, rtol=exact, atol=exact * np.abs(expected).max())
    feeds["y_grad"] = RNG.standard_normal(expected.shape)
    gradients = [refgrad.gradient(one, wrt=["x"]) for one in (model, saved)]
    expected, found = (get_backend("numpy").prepare(one, precision="float64").run(feeds)["x_grad"] for one in gradients)
    np.testing.assert_allclose(found, expected, rtol=exact, atol=exact * np.abs(expected).max())
    narrow = {k: value.astype(np.float32) for k, value in feeds.items()}
    found = get_backend("ort-cpu").prepare(gradients[1]).run(narrow)["x_grad"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_every_operator_of_the_layout_is_among_them() -> None:
    operators = {written.partition(" ")[0] for _, _, written in WRITTEN.values()} | {"ReorderOutput"}
    assert operators == {name for domain, name in BODY if domain == NCHWC}


@pytest.mark.filterwarnings("ignore::refgrad.errors.ModelWarning")
def test_weights_beside_a_model_in_the_layout_of_a_processor_are_read(tmp_path: Path) -> None:
    saved = _saved(_network("padded"), tmp_path / "saved.onnx")
    expected = read(saved)
    onnx.save(saved, tmp_path / "apart.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    found = read(tmp_path / "apart.onnx")
    kept = {t.name: numpy_helper.to_array(t) for t in expected.graph.initializer}
    for tensor in layout.filters(saved):
        one = next(t for t in found.graph.initializer if t.name == tensor.name)
        np.testing.assert_array_equal(numpy_helper.to_array(one), kept[tensor.name])


def _in_blocks(size: int, count: int = 32, **changed: Any) -> ModelProto:
    """Two convolutions of 3 and 32 channels in blocks of `size`, as ONNX Runtime writes them for another processor."""
    w1, w2 = (RNG.standard_normal(shape).astype(np.float32) for shape in ((count, 3, 3, 3), (count, count, 1, 1)))
    b = count // size
    one = w1.reshape(b, size, 3, 3, 3).transpose(0, 2, 3, 4, 1).reshape(w1.shape)
    two = w2.reshape(b, size, b, size, 1, 1).transpose(0, 2, 4, 5, 3, 1).reshape(w2.shape)
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], domain=NCHWC, group=1),
        helper.make_node("Conv", ["a", "w2"], ["b"], domain=NCHWC, group=1, activation="Relu"),
        helper.make_node("ReorderOutput", ["b"], ["y"], domain=NCHWC, channels=changed.get("channels", count)),
    ]
    values = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", c, "H", "W"]) for n, c in (("x", 3), ("y", None))
    ]
    initializers = [numpy_helper.from_array(w, n) for n, w in (("w1", one), ("w2", two))]
    graph = helper.make_graph([*nodes, *changed.get("more", ())], "g", values[:1], values[1:], initializers)
    for name, array in (("w1", w1), ("w2", w2)):
        graph.doc_string += f"{name} {array.sum()} "
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(NCHWC, 1)]
    made = helper.make_model(graph, ir_version=8, opset_imports=opsets)
    made.metadata_props.add(key="w1", value=repr(w1[1].ravel().tolist()))
    return made


def test_the_blocks_of_another_processor_are_recognized_by_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, count in ((8, 24), (16, 32)):
        model = _in_blocks(size, count, channels=count if size == 8 else 17)
        monkeypatch.setattr(layout, "_of_this_machine", lambda: 0)
        plain = read(model)
        w1 = next(numpy_helper.to_array(t) for t in plain.graph.initializer if t.name == "w1")
        assert repr(w1[1].ravel().tolist()) == model.metadata_props[0].value


def test_what_the_model_does_not_say_is_as_on_this_machine_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (8, 16):
        model = _in_blocks(size)
        monkeypatch.setattr(layout, "_of_this_machine", lambda size=size: size)
        with pytest.warns(ModelWarning, match=f"in blocks of {size} channels"):
            plain = read(model)
        w1 = next(numpy_helper.to_array(t) for t in plain.graph.initializer if t.name == "w1")
        assert repr(w1[1].ravel().tolist()) == model.metadata_props[0].value
    monkeypatch.setattr(layout, "_of_this_machine", lambda: 0)
    with pytest.raises(InvalidModelError, match="does not say in which layout it is"):
        read(model)


@pytest.mark.filterwarnings("ignore::refgrad.errors.ModelWarning")
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"channels": 40}, "has 40 channels, where there are 24"),
        ({"channels": 9}, "do not fit any layout"),
        ({"more": [helper.make_node("Softmax", ["a"], ["s"], axis=1)]}, "may mix its channels"),
        ({"more": [helper.make_node("Conv", ["a", "q"], ["s"], domain=NCHWC)]}, "that are no initializer"),
        ({"more": [helper.make_node("Conv", ["y", "w2"], ["s"], domain=NCHWC)]}, "do not fit any layout"),
        ({"more": [helper.make_node("ReorderInput", ["a"], ["s"], domain=NCHWC)]}, "in the layout already"),
        ({"more": [helper.make_node("ReorderOutput", ["x"], ["s"], domain=NCHWC, channels=3)]}, "is not in the layout"),
        ({"more": [helper.make_node("LpPool", ["a"], ["s"], domain=NCHWC)]}, "has no operator LpPool"),
        ({"more": [helper.make_node("Concat", ["a", "b"], ["s"], axis=2)]}, "does not join channels"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_layout_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidModelError, match=said):
        read(_in_blocks(8, 24, **changed))


def test_what_a_model_declares_of_an_initializer_is_not_believed() -> None:
    """ONNX Runtime saves constants as initializers, with the shapes that the model declared of them."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18]> g (float[2,3] x) => (float[n] y)
        <int64[1] axes = {0}, int64[1] axes2 = {1}> { z = ReduceSum <keepdims = 0> (x, axes) y = Tanh(z) }""")
    expected = refgrad.gradient(model)
    model.graph.value_info.append(helper.make_tensor_value_info("axes", TensorProto.INT64, []))
    assert refgrad.gradient(model).SerializeToString() == expected.SerializeToString()
