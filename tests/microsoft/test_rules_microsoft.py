"""ONNX Runtime's forward operators: their gradients, and those of models that its optimizer has rewritten."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from checking import assert_gradient
from onnx import ModelProto, TensorProto, numpy_helper, parser

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.conformance.cases import of_operators
from refgrad.errors import BackendError, InvalidModelError, NoGradientError
from refgrad.model.inference.infer import ranks
from refgrad.model.inlining.defined import call_functions
from refgrad.model.inlining.inline import inline_functions
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.types import Type
from refgrad.show.explain import explain
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.dialects import DIALECTS
from refgrad.tables.schemas import find_schema

pytestmark = [pytest.mark.stock, pytest.mark.slow]

CASES = [case for family, case in of_operators() if family == "microsoft"]
RNG = np.random.default_rng(0)
ort = pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_agrees_with_differences(case: Case) -> None:
    for dialect in DIALECTS if case.static else ("onnx",):
        assert_gradient(case, dialect, directions=1)


def test_a_fused_dropout_without_a_seed_draws_the_same_in_every_run() -> None:
    """Its gradient is that of the body, so it has to draw what Dropout does."""
    x, ratio, training = np.ones((4, 5), np.float32), np.array(0.4, np.float32), np.array(True)
    case = node_case("BiasDropout", x, x[0], None, ratio, training, domain=MICROSOFT, opset=1, wrt=("data", "bias"))
    assert_gradient(case, runtime=False)


LOSSES = ("SoftmaxCrossEntropy", "SparseSoftmaxCrossEntropy")

# What ONNX Runtime leaves out on the CPU, see conformance/known/bugs: operators, what is in the name of a case, and why.
UNHEEDED = [
    (("MoE", "QMoE"), "use_sparse_mixer=1", "ONNX Runtime has no sparse mixer on the CPU"),
]


@pytest.mark.matrix
@pytest.mark.parametrize("case", [case for case in CASES if case.static], ids=str)
def test_the_interpreter_computes_what_onnx_runtime_does(case: Case) -> None:
    if case.node.op_type in LOSSES and "reduction=none" in str(case):
        pytest.skip("ONNX Runtime adds up the losses where it should not, with the wrong sign or without")
    if case.node.op_type == "MatMulBnb4" and "transB=0" in str(case):
        pytest.skip("ONNX Runtime multiplies with the weights in another order")
    for operators, form, reason in UNHEEDED:
        if case.node.op_type in operators and form in str(case):
            pytest.skip(reason)
    try:  # one thread: each quantizes the states of its own sequences by their range
        expected = get_backend("ort-cpu").prepare(case.model, threads=1).run(case.feeds)
    except BackendError as error:
        pytest.skip(str(error))  # no kernel on the CPU, or only in the training build
    for name, got in get_backend("numpy").prepare(case.model).run(case.feeds).items():
        if expected[name] is not None:  # 1.19 computes no mean where it can do without
            np.testing.assert_allclose(got, expected[name], rtol=2e-5, atol=2e-5, err_msg=name)


_ENDS = [np.array(v, np.float32) for v in ([-1.5, -1.0, 2.0], 0.5, 3.0)]  # rounded to 0, 1 and 7
ENDS = node_case("FakeQuant", *_ENDS, domain=MICROSOFT, opset=1, outputs=2, quant_max=7)


@pytest.mark.parametrize("case", [*CASES, ENDS], ids=str)
def test_a_body_computes_what_the_operator_does(case: Case) -> None:
    """An operator with a rule too, and in an opset that lacks Gelu and the axes of ReduceMean as an input."""
    in_opset(case, 21)
    if case.static and case.node.op_type != "MatMulBlockQuantizedFp8Weight":  # opset 17 has no floats of 8 bits
        in_opset(case, 17)


def in_opset(case: Case, opset: int) -> None:
    """Fail unless the body computes what the operator does."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    next(o for o in model.opset_import if not o.domain).version = opset
    types: dict[str, Type] = {
        v.name: (v.type.tensor_type.elem_type, len(v.type.tensor_type.shape.dim)) for v in model.graph.input
    }
    types |= {t.name: (t.data_type, len(t.dims)) for t in model.graph.initializer}
    types |= {f"{name}_": (kind, None) for name, (kind, _) in types.items()}  # read through a Reshape
    assert call_functions(model, types) == 0
    results = get_backend("numpy").prepare(inline_functions(model)).run(case.feeds)
    for name, expected in get_backend("numpy").prepare(case.model).run(case.feeds).items():
        assert results[name].dtype == expected.dtype
        atol = 8 * float(np.finfo(expected.dtype).eps) if expected.dtype.kind == "f" else 0
        np.testing.assert_allclose(results[name], expected, rtol=atol, atol=atol, err_msg=f"{name} in opset {opset}")


def test_every_operator_is_explained_and_has_a_case() -> None:
    names = {name for domain, name in DEFINITIONS if domain == MICROSOFT}
    assert {f"{MICROSOFT}.{name}" for name in names} == {case.operator for case in CASES}
    for name in names:
        assert explain(f"{MICROSOFT}.{name}").verdict in ("rule", "function")
        assert find_schema(name, MICROSOFT).name == name
        assert not onnx.defs.has(name, MICROSOFT)


def test_an_operator_in_the_domain_of_onnx_is_refused_by_name() -> None:
    model = parse("[norm] y = SimplifiedLayerNormalization <future = 1> (x, w)", inputs="float[2,3,8] x, float[8] w")
    with pytest.raises(InvalidModelError, match=r"Node 'norm' .* its attribute future is not known"):
        refgrad.preflight(model)


@pytest.mark.parametrize(("axis", "scale"), [(0, (3, 4)), (1, (4,)), (-2, (1, 4))])
@pytest.mark.parametrize("shapes", ["static", "unknown"])
def test_a_scale_may_broadcast(shapes: str, axis: int, scale: tuple[int, ...]) -> None:
    x, scales = (RNG.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 4), scale))
    options = {"domain": MICROSOFT, "opset": 1, "axis": axis, "shapes": shapes}
    assert_gradient(node_case("SimplifiedLayerNormalization", x, scales, **options))


def test_a_scale_of_16_bits_in_the_model_gives_gradients_of_16_bits() -> None:
    x, scale = RNG.standard_normal((2, 3, 4)).astype(np.float16), RNG.standard_normal(4).astype(np.float16)
    case = node_case("SimplifiedLayerNormalization", x, scale, domain=MICROSOFT, opset=1, constant=["scale"])
    assert ranks(case.model.graph)["scale"] == (TensorProto.FLOAT16, 1)  # bodies are told while types are inferred
    gradient = refgrad.gradient(case.model)
    for backend in ("numpy", "ort-cpu"):
        found = get_backend(backend).prepare(gradient).run({**case.feeds, "Y_grad": np.ones_like(x)})
        assert {value.dtype for value in found.values()} == {x.dtype}


def test_the_checker_of_onnx_is_left_alone() -> None:
    """An attribute that a newer ONNX Runtime brings is no error before refgrad is asked for a derivative."""
    model = parse("y = com.microsoft.QuickGelu <future = 1> (x)")
    onnx.checker.check_model(model, full_check=True)
    with pytest.raises(NoGradientError, match="its attribute future is not known; the attributes are alpha"):
        refgrad.gradient(model)


def parse(body: str, opset: int = 21, inputs: str = "float[2,3,8] x") -> ModelProto:
    """A model of one output y."""
    imports = f'["" : {opset}, "com.microsoft" : 1]'
    return parser.parse_model(f"<ir_version: 8, opset_import: {imports}> g ({inputs}) => (float[a,b,c] y) {{ {body} }}")


@pytest.mark.parametrize(
    ("body", "inputs", "said"),
    [
        (
            "y = com.microsoft.MultiHeadAttention <num_heads = 2> (x, x, x, , mask)",
            "float[2,3,8] x, int32[2,1,3,3] mask",
            "key_padding_mask is of rank 4; it has 1 to 3 axes",
        ),
        (
            "y = com.microsoft.Attention <num_heads = 2, past_present_share_buffer = 1> (x, w)",
            "float[2,3,8] x, float[8,24] w",
            "past_present_share_buffer=1 needs a past and past_sequence_length; add them",
        ),
        (
            "y = com.microsoft.Attention <num_heads = 2, do_rotary = 1, rotary_embedding_dim = 2> (x, w)",
            "float[2,3,8] x, float[8,24] w",
            "rotary_embedding_dim is 2; it is 0, 32, 64 or 128",
        ),
        (
            'y = com.microsoft.FusedConv <activation = "Mish"> (x, w)',
            "float[2,3,8] x, float[8,3,1] w",
            "its activation 'Mish' is not known here",
        ),
        (
            "y = com.microsoft.FusedMatMul <half = 1> (x, w)",
            "float[2,3,8] x, float[8,8] w",
            "its attribute half is not known; the attributes are alpha, transA",
        ),
        ("y = com.microsoft.BiasSoftmax (x, x)", "float[2,3,8] x", "it lacks the attribute is_inner_broadcast"),
        ("y = com.microsoft.BiasGelu (x)", "float[2,3,8] x", "the node has 1 inputs; the inputs are A, B"),
        ("y = com.microsoft.FastGelu (x, x, x)", "float[2,3,8] x", "the node has 3 inputs; the inputs are X, bias"),
        ("y, z = com.microsoft.FastGelu (x)", "float[2,3,8] x", "the node has 2 outputs; the outputs are Y"),
        ("y = com.microsoft.FastGeluGrad (x, x)", "float[2,3,8] x", "make that gradient in dialect 'onnx'"),
        (
            "y, mean = com.microsoft.SkipSimplifiedLayerNormalization (x, x, w)",
            "float[2,3,8] x, float[8] w",
            "its output mean is not computed; leave it out",
        ),
    ],
)
def test_a_form_that_is_not_covered_is_refused_with_the_reason(body: str, inputs: str, said: str) -> None:
    model = parse(body, inputs=inputs)
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(model)
    report = refgrad.preflight(model)
    assert not report.ok
    assert said.replace("\\", "")[:20] in report.refused[0].reason


@pytest.mark.parametrize("opset", [13, 16, 18, 21])
def test_normalizations_that_onnx_runtime_has_in_the_domain_of_onnx(opset: int) -> None:
    """Its fusions write LayerNormalization into models of opset 13, and SimplifiedLayerNormalization into any."""
    model = parse(
        "z, m, r = LayerNormalization <axis = -1> (x, w, b)  y = SimplifiedLayerNormalization <epsilon = 0.01> (z, w)",
        opset,
        "float[2,3,8] x, float[8] w, float[8] b",
    )
    feeds = {n: RNG.standard_normal(s).astype(np.float32) for n, s in (("x", (2, 3, 8)), ("w", (8,)), ("b", (8,)))}
    assert_gradient(Case("normalizations", model, feeds))
    gradient = refgrad.gradient(model)
    assert all(onnx.defs.has(node.op_type, node.domain) for node in gradient.graph.node)


@pytest.mark.parametrize("domain", ["", MICROSOFT])
@pytest.mark.parametrize("opset", [9, 13, 21])
@pytest.mark.parametrize(
    ("op_type", "label"),
    [
        ("SoftmaxCrossEntropy", np.abs(RNG.standard_normal((2, 3, 4)))),
        ("SparseSoftmaxCrossEntropy", [[0, 3, 1], [2, 2, 0]]),
    ],
)
def test_losses_that_onnx_runtime_has_in_the_domain_of_onnx(
    op_type: str, label: object, opset: int, domain: str
) -> None:
    """Its own tests write them there, in opset 9. The gradient runs anywhere: it is in ai.onnx operators."""
    labels = np.array(label)
    kind = "int64[2,3]" if labels.dtype == np.int64 else "float[2,3,4]"
    model = parse(f"y, p = {op_type} (x, t)", opset, f"float[2,3,4] x, {kind} t")
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.node[0].domain = domain
    feeds = {"x": RNG.standard_normal((2, 3, 4)), "t": labels}
    feeds = {n: v if v.dtype == np.int64 else v.astype(np.float32) for n, v in feeds.items()}
    gradient = refgrad.gradient(model)
    assert all(onnx.defs.has(node.op_type, node.domain) for node in gradient.graph.node)
    numbers = get_backend("numpy").prepare(model).run(feeds)["y"]
    results = get_backend("ort-cpu").prepare(gradient).run(feeds | {"y_grad": np.array(1, np.float32)})
    log_prob = feeds["x"] - np.log(np.exp(feeds["x"]).sum(-1, keepdims=True))
    shares = np.eye(4)[labels] if labels.dtype == np.int64 else feeds["t"]
    np.testing.assert_allclose(numbers, -(shares * log_prob).sum() / 6, rtol=1e-5)
    expected = (np.exp(log_prob) * shares.sum(-1, keepdims=True) - shares) / 6
    np.testing.assert_allclose(results["x_grad"], expected, rtol=1e-4, atol=1e-6)


def test_an_unknown_reduction_is_refused_with_those_there_are() -> None:
    model = parse('y, p = com.microsoft.SoftmaxCrossEntropy <reduction = "total"> (x, x)')
    with pytest.raises(NoGradientError, match="its reduction 'total' is not known; there are mean, sum and none"):
        refgrad.gradient(model)


# Whole models, saved by ONNX Runtime after its optimizations

GELU = """
    {0}_r = Div ({0}, root)  {0}_e = Erf ({0}_r)  {0}_p = Add ({0}_e, one)
    {0}_m = Mul ({0}, {0}_p)  {1} = Mul ({0}_m, half)
"""
NORMALIZE = """
    {0}_mean = ReduceMean <axes = [-1]> ({0})  {0}_c = Sub ({0}, {0}_mean)  {0}_s = Pow ({0}_c, two)
    {0}_v = ReduceMean <axes = [-1]> ({0}_s)  {0}_ve = Add ({0}_v, epsilon)  {0}_d = Sqrt ({0}_ve)
    {0}_n = Div ({0}_c, {0}_d)  {0}_g = Mul ({0}_n, {2})  {1} = Add ({0}_g, {3})
"""
HEADS = """
    {0}_l = MatMul (x, w{0})  {0}_b = Add ({0}_l, b{0})
    {0}_h = Reshape ({0}_b, heads)  {0} = Transpose <perm = {1}> ({0}_h)
"""
BERT = (
    HEADS.format("q", "[0,2,1,3]") + HEADS.format("k", "[0,2,3,1]") + HEADS.format("v", "[0,2,1,3]")
    + """
    scores = MatMul (q, k)  scaled = Div (scores, root)  p = Softmax <axis = -1> (scaled)
    mixed = MatMul (p, v)  turned = Transpose <perm = [0,2,1,3]> (mixed)  flat = Reshape (turned, whole)
    o_l = MatMul (flat, wo)  o_b = Add (o_l, bo)  first = Add (o_b, x)
    """
    + NORMALIZE.format("first", "n1", "g1", "s1")
    + "u_l = MatMul (n1, wu)  u = Add (u_l, bu)" + GELU.format("u", "a")
    + "d_l = MatMul (a, wd)  d = Add (d_l, bd)  second = Add (d, n1)"
    + NORMALIZE.format("second", "y", "g2", "s2")
)  # fmt: skip
WEIGHTS = {f"w{k}": (8, 8) for k in "qkvo"} | {"wu": (8, 16), "wd": (16, 8)}
WEIGHTS |= {f"b{k}": (8,) for k in "qkvod"} | {"bu": (16,)} | dict.fromkeys(("g1", "s1", "g2", "s2"), (8,))
NUMBERS = {"root": 2**0.5, "one": 1.0, "half": 0.5, "two": 2.0, "epsilon": 1e-5}


def bert(opset: int) -> ModelProto:
    """One layer of a BERT as exporters wrote them: Gelu and normalizations in their parts."""
    model = parse(BERT, opset)
    for name, shape in WEIGHTS.items():
        value = 0.5 * RNG.standard_normal(shape) + (name[0] == "g")
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    for name, number in NUMBERS.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(number, np.float32), name))
    for name, shape in (("heads", [0, 0, 2, 4]), ("whole", [0, 0, 8])):
        model.graph.initializer.append(numpy_helper.from_array(np.array(shape), name))
    return model


def mlp(opset: int) -> ModelProto:
    """Two layers: Gelu of a sum, swish, a scaled product with a transposed matrix, and a normalization."""
    model = parse(
        "u_l = MatMul (x, w)  u_t = Tanh (u_l)  u = Add (u_t, b)" + GELU.format("u", "a")
        + "s = Sigmoid (a)  t = Mul (a, s)  vt = Transpose <perm = [1,0]> (v)  m_l = MatMul (t, vt)  m = Mul (m_l, half)"
        + NORMALIZE.format("m", "y", "g", "bg"),
        opset,
    )  # fmt: skip
    for name, shape in (("w", (8, 16)), ("b", (16,)), ("v", (5, 16)), ("g", (5,)), ("bg", (5,))):
        value = RNG.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    for name, number in NUMBERS.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(number, np.float32), name))
    return model


def convolutions(opset: int) -> ModelProto:
    """Convolutions with BatchNormalization, Relu, LeakyRelu and Clip, a shortcut, and a product with an activation."""
    model = parse(
        """
        c = Conv <pads = [1,1,1,1]> (x, w1)  n = BatchNormalization (c, g, s, mean, var)  r = Relu (n)
        d = Conv <pads = [1,1,1,1]> (r, w2, s)  l = LeakyRelu <alpha = 0.2> (d)  z = Add (l, r)
        e = Conv (z, w3)  k = Clip (e, low, high)  p = GlobalAveragePool (k)  f = Flatten (p)
        h = Gemm (f, w4, b4)  t = Relu (h)  y = Unsqueeze (t, last)
        """,
        opset,
        "float[2,3,6,6] x",
    )
    shapes = {"w1": (4, 3, 3, 3), "w2": (4, 4, 3, 3), "w3": (5, 4, 2, 2), "w4": (5, 6), "b4": (6,), "mean": (4,)}
    for name, shape in (shapes | dict.fromkeys(("g", "s", "var"), (4,))).items():
        value = RNG.standard_normal(shape) * 0.5
        value = np.abs(value) + 0.5 if name in ("g", "var") else value
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    constants = {"low": np.float32(-0.9), "high": np.float32(1.1), "last": np.array([-1])}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items())
    return model


NETWORKS = [(bert, 13), (bert, 17), (mlp, 13), (mlp, 17), (convolutions, 15), (convolutions, 17)]


def optimized(model: ModelProto, level: str, folder: Path) -> ModelProto:
    """What ONNX Runtime saves after the optimizations of `level`."""
    path = folder / "optimized.onnx"
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.log_severity_level = 3
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(path)


@pytest.mark.parametrize("level", ["BASIC", "EXTENDED"])
@pytest.mark.parametrize(("network", "opset"), NETWORKS, ids=lambda p: getattr(p, "__name__", str(p)))
def test_the_gradient_of_an_optimized_model_is_that_of_the_model(
    network: object, opset: int, level: str, tmp_path: Path
) -> None:
    model = network(opset)  # type: ignore[operator]
    rewritten = optimized(model, level, tmp_path)
    kinds = {node.op_type for node in rewritten.graph.node if node.domain == MICROSOFT}
    assert bool(kinds) == (level == "EXTENDED")
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    feeds = {"x": RNG.standard_normal(shape)}
    seed = RNG.standard_normal(get_backend("numpy").prepare(model, precision="float64").run(feeds)["y"].shape)
    results = [
        get_backend("numpy").prepare(refgrad.gradient(m, wrt=["x"]), precision="float64").run(feeds | {"y_grad": seed})
        for m in (model, rewritten)
    ]
    np.testing.assert_allclose(results[1]["x_grad"], results[0]["x_grad"], rtol=1e-5, atol=1e-6)
    single = {name: value.astype(np.float32) for name, value in (feeds | {"y_grad": seed}).items()}
    got = get_backend("ort-cpu").prepare(refgrad.gradient(rewritten, wrt=["x"])).run(single)
    np.testing.assert_allclose(got["x_grad"], results[0]["x_grad"], rtol=1e-3, atol=1e-4)


def test_the_optimizer_writes_the_operators_that_are_tested(tmp_path: Path) -> None:
    found = set()
    for network, opset in NETWORKS:
        found |= {node.op_type for node in optimized(network(opset), "EXTENDED", tmp_path).graph.node}
    written = {"BiasGelu", "QuickGelu", "FusedMatMul", "FusedGemm", "FusedConv", "SkipLayerNormalization"}
    assert written | {"LayerNormalization"} <= found


@pytest.mark.parametrize("quantization", ["straight-through", "clipped"])
@pytest.mark.parametrize("case", [case for case in CASES if "FakeQuant" in str(case)], ids=str)
def test_fake_quantization_agrees_with_differences_of_a_surrogate(case: Case, quantization: str) -> None:
    """Nearby, rounding adds what it adds at the point; and so does clipping, or it clips."""
    low, high = 0, next(a.i for a in case.node.attribute if a.name == "quant_max")
    names = ("input_tensor", "scale", "zero_point")
    x, s, z = point = [case.feeds[name].astype(np.float64) for name in names]
    added = np.rint(x / s) - x / s
    clipped = np.clip(x / s + z + added, low, high)
    cotangent = np.random.default_rng(1).standard_normal(x.shape)

    def surrogate(x: np.ndarray, s: np.ndarray, z: np.ndarray) -> float:
        q = x / s + z + added
        nearby = (
            np.clip(q, low, high)
            if quantization == "clipped"
            else q + clipped - np.rint(point[0] / point[1]) - point[2]
        )
        return float(np.sum(cotangent * (nearby - z) * s))

    model = refgrad.gradient(case.model, outputs=[case.model.graph.output[0].name], quantization=quantization)
    [seed] = (v.name for v in model.graph.input if v.name not in case.feeds)
    given = cotangent.reshape(-1) if "unknown" in str(case) else cotangent
    run = get_backend("numpy").prepare(model, precision="float64").run
    gradients = run({n: v.astype(np.float64) if n in names else v for n, v in case.feeds.items()} | {seed: given})
    for k, name in enumerate(names):
        direction = np.random.default_rng(k).standard_normal(point[k].shape)
        ahead, behind = (surrogate(*(v + t * direction * (j == k) for j, v in enumerate(point))) for t in (1e-5, -1e-5))
        got = np.sum(gradients[f"{name}_grad"] * direction)
        np.testing.assert_allclose(got, (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("domain", ["", MICROSOFT])
def test_simplified_layer_normalization_squares_16_bits_in_float(domain: str) -> None:
    """300² is beyond float16."""
    graph = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]>
        g (float16[2,4] X, float16[4] scale) => (float16[2,4] Y) { Y = com.microsoft.SimplifiedLayerNormalization(X, scale) }
        """
    )
    graph.graph.node[0].domain = domain
    gradient = get_backend("numpy").prepare(refgrad.gradient(graph))
    exact = get_backend("numpy").prepare(refgrad.gradient(graph), precision="float64")
    rng = np.random.default_rng(0)
    feeds = {
        "X": 300 * rng.standard_normal((2, 4)),
        "scale": rng.standard_normal(4),
        "Y_grad": rng.standard_normal((2, 4)),
    }
    feeds = {name: value.astype(np.float16) for name, value in feeds.items()}
    truth = exact.run({name: value.astype(np.float64) for name, value in feeds.items()})
    for name, value in gradient.run(feeds).items():
        np.testing.assert_allclose(value, truth[name], rtol=2e-2, atol=1e-2 * np.abs(truth[name]).max(), err_msg=name)
