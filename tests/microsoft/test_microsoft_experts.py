"""Mixtures of experts: what is refused, experts without tokens, what is stored, and second derivatives."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from checking import assert_gradient, assert_second_derivative
from onnx import helper
from runtime import needs_runtime

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.errors import BackendError, NoGradientError
from refgrad.microsoft.cases import array, case, drawer
from refgrad.microsoft.cases.experts import LOGITS
from refgrad.protos.traverse import every_node

pytestmark = [pytest.mark.stock, pytest.mark.slow]

FLOATS = drawer(1)
X, W1, W2 = FLOATS(3, 4), FLOATS(4, 2, 4), FLOATS(4, 4, 2)
W3, BOTH = FLOATS(4, 2, 4), FLOATS(4, 4, 4)


def codes(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(0, 256, shape).astype(np.uint8)


@pytest.mark.parametrize(
    ("attributes", "third", "said"),
    [
        ({"activation_type": "swish"}, None, "its activation_type 'swish' is not known; there are 'relu', 'gelu'"),
        ({"k": 0}, None, "k=0: a token chooses 1 expert or more"),
        (
            {"use_sparse_mixer": 1},
            None,
            "use_sparse_mixer=1 with k=1 has no meaning: the sparse mixer chooses 2 experts",
        ),
        (
            {"use_sparse_mixer": 1, "k": 2, "normalize_routing_weights": 1},
            None,
            "has no meaning with use_sparse_mixer=1",
        ),
        ({"activation_type": "swiglu"}, None, "swiglu with swiglu_fusion=0 needs fc3_experts_weights"),
        ({"activation_type": "swiglu", "swiglu_fusion": 1}, W3, "swiglu_fusion=1 says that FC1 holds FC3"),
        ({"activation_type": "swiglu", "swiglu_fusion": 3}, None, "swiglu_fusion=3 is not known; there are 0, 1 and 2"),
        ({"activation_type": "geglu"}, None, "'geglu' needs swiglu_fusion=1 or 2"),
        ({"swiglu_limit_after_activation": 1}, None, "needs activation_type='swiglu', and not 'relu'"),
    ],
)
def test_what_there_is_not_is_refused_by_name(attributes: dict[str, object], third: object, said: str) -> None:
    wrong = case("MoE", X, LOGITS, W1, None, W2, None, third, **attributes)
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(wrong.model)
    with pytest.raises(BackendError, match=said):
        get_backend("numpy").prepare(wrong.model).run(wrong.feeds)


@pytest.mark.parametrize(
    ("inputs", "attributes", "said"),
    [
        ((X, LOGITS, W1, None, W2), {"k": 5}, "k=5: a token chooses 1 expert or more, up to the 4 experts"),
        ((X, LOGITS[:2], W1, None, W2), {}, r"router_probs has the shape \[2, 4\]; it is \[3, 4\]"),
        (
            (X, LOGITS, W1.transpose(0, 2, 1), None, W2),
            {},
            r"fc1_experts_weights has the shape \[4, 4, 2\]; it is \[4, 2, 4\]",
        ),
        ((X, LOGITS, W1, W1[0], W2), {}, r"fc1_experts_bias has the shape \[2, 4\]; it is \[4, 2\]"),
        ((X, LOGITS, W1, None, W2[:3]), {}, r"fc2_experts_weights has the shape \[3, 4, 2\]; it is \[4, 4, 2\]"),
        ((X, LOGITS, W1, None, W2[:, :, :0]), {}, r"fc1_experts_weights has the shape \[4, 2, 4\]; it is \[4, 0, 4\]"),
        (
            (X, LOGITS, W1, None, W2, None, W3[:, :1]),
            {},
            r"fc3_experts_weights has the shape \[4, 1, 4\]; it is \[4, 2, 4\]",
        ),
        ((X[0], LOGITS, W1, None, W2), {}, r"input has the shape \[4\]; it is \[\?, \?\] or \[\?, \?, \?\]"),
    ],
)
def test_wrong_shapes_are_refused_by_name(
    inputs: tuple[np.ndarray | None, ...], attributes: dict[str, int], said: str
) -> None:
    names = [f"i{k}" if x is not None else "" for k, x in enumerate(inputs)]
    feeds = {name: x for name, x in zip(names, inputs, strict=True) if x is not None}
    with pytest.raises(BackendError, match=said):
        get_backend("numpy").prepare(one_node("MoE", names, feeds, **attributes)).run(feeds)


def one_node(op_type: str, names: list[str], feeds: dict[str, np.ndarray], **attributes: object) -> onnx.ModelProto:
    node = helper.make_node(op_type, names, ["y"], domain="com.microsoft", **attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in feeds.items()
    ]
    graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name="y")])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


Q1, S1, Q2, S2 = codes(4, 2, 2), np.abs(FLOATS(4, 2)), codes(4, 4, 1), np.abs(FLOATS(4, 4))


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"expert_weight_bits": 5}, "fc1_expert_weight_bits is 5; .* 2, 4 and 8"),
        ({"fc2_expert_weight_bits": 1}, "fc2_expert_weight_bits is 1; .* 2, 4 and 8"),
        ({"quant_type": "fp4"}, "quant_type='fp4'"),
        ({"weights_prepacked": 1}, "weights_prepacked=1"),
    ],
)
def test_weights_that_are_not_integers_in_rows_are_refused_by_name(attributes: dict[str, object], said: str) -> None:
    wrong = case("QMoE", X, LOGITS, Q1, S1, None, Q2, S2, **attributes)
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(wrong.model)
    with pytest.raises(BackendError, match=said):
        get_backend("numpy").prepare(wrong.model).run(wrong.feeds)


@pytest.mark.parametrize(
    ("inputs", "attributes", "said"),
    [
        ((Q1, S1, None, Q2, S2), {"block_size": 24}, "block_size is 24; it is a power of 2 from 16 on"),
        (
            (Q1, S1, None, Q2, S2),
            {"block_size": 16},
            "fc2_experts_weights has rows of 2; 4 bits and block_size=16 do not divide them",
        ),
        ((Q1, S1[:, :1], None, Q2, S2), {}, r"fc1_scales has the shape \[4, 1\]; with 4 bits it is \[4, 2\]"),
        ((Q1, None, None, Q2, S2), {}, "it lacks the input fc1_scales, which weights of integers need"),
        (
            (Q1[:, :, :1], S1, None, Q2, S2),
            {},
            r"fc1_experts_weights has the shape \[4, 2, 1\]; with 4 bits it is \[4, 2, 2\]",
        ),
        (
            (Q1, S1, None, Q2, S2, *[None] * 4, Q1[:, 0]),
            {},
            r"fc1_zero_points has the shape \[4, 2\]; with 4 bits it is \[4, 1\]",
        ),
        ((Q1, S1, None, Q2, S2, *[None] * 7, X), {}, None),
    ],
)
def test_wrong_quantizations_are_refused_by_name(
    inputs: tuple[np.ndarray | None, ...], attributes: dict[str, int], said: str | None
) -> None:
    every = (X, LOGITS, *inputs)
    names = [f"i{k}" if x is not None else "" for k, x in enumerate(every)]
    feeds = {name: x for name, x in zip(names, every, strict=True) if x is not None}
    prepared = get_backend("numpy").prepare(one_node("QMoE", names, feeds, **attributes))
    if said is None:  # four experts and four hidden units: these are weights of the experts
        prepared.run(feeds)
        return
    with pytest.raises(BackendError, match=said):
        prepared.run(feeds)


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    """Every token chooses the second expert, and the runtime computes products of no rows."""
    alone = case("MoE", X, array([[0.0, 5.0, 0.0, 1.0]] * 3), W1, FLOATS(4, 2), W2, FLOATS(4, 4))
    assert_gradient(alone)
    model = refgrad.gradient(alone.model)
    feeds = {**alone.feeds, "output_grad": np.ones((3, 4), np.float32)}
    for backend in ("numpy", "ort-cpu"):
        results = get_backend(backend).prepare(model).run(feeds)
        for name in ("fc1_experts_weights_grad", "fc1_experts_bias_grad", "fc2_experts_bias_grad"):
            assert not results[name][[0, 2, 3]].any()
            assert np.isfinite(results[name]).all()


def test_of_equal_logits_the_first_expert_is_chosen() -> None:
    tied = case("MoE", X, np.zeros((3, 4), np.float32), W1, None, W2, activation_type="identity")
    [y] = get_backend("numpy").prepare(tied.model).run(tied.feeds).values()
    np.testing.assert_allclose(y, X @ W1[0].T @ W2[0].T / 4, rtol=1e-5)


def test_weights_that_add_up_to_nothing_stay_nothing() -> None:
    nothing = np.zeros((3, 4), np.float32)
    empty = case(
        *("QMoE", X, LOGITS, Q1, S1, None, Q2, S2, *[None] * 7, nothing),
        k=2,
        normalize_routing_weights=1,
        activation_type="silu",
    )
    model = refgrad.gradient(empty.model)
    feeds = {**empty.feeds, "output_grad": np.ones((3, 4), np.float32)}
    assert not get_backend("numpy").prepare(empty.model).run(empty.feeds)["output"].any()
    for value in get_backend("numpy").prepare(model).run(feeds).values():
        assert np.isfinite(value).all()


def test_the_activations_of_the_experts_are_not_stored() -> None:
    """How many tokens an expert has, differs: so the backward pass computes its hidden units again."""
    model = refgrad.gradient(case("MoE", X, LOGITS, W1, None, W2, k=2).model)
    forward, backward = (node for node in model.graph.node if node.op_type == "Scan")
    assert [value.type.tensor_type.elem_type for value in forward.attribute[0].g.output] == [1, onnx.TensorProto.BOOL]
    assert "Relu" in {node.op_type for node in backward.attribute[0].g.node}
    assert not {"Loop", "If"} & {node.op_type for node in every_node(model)}


@pytest.mark.parametrize("block", [0, 16])
def test_the_dequantized_weights_of_the_experts_are_not_stored(block: int) -> None:
    """All experts together would be as large as the model before it was quantized."""
    first, second = ((4, 16, 2), (4, 32, 1)) if block else ((4, 16), (4, 32))
    inputs = FLOATS(3, 32), LOGITS, codes(4, 16, 16), FLOATS(*first), None, codes(4, 32, 8), FLOATS(*second)
    model = refgrad.gradient(case("QMoE", *inputs, k=2, **{"block_size": 16} if block else {}).model)
    forward, _ = (node for node in model.graph.node if node.op_type == "Scan")
    body = next(attribute.g for attribute in forward.attribute if attribute.name == "body")
    stored = [[dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in body.output[1:]]
    assert all(np.prod(shape) <= 64 for shape in stored), stored


@pytest.mark.parametrize(
    "of",
    [
        case("MoE", X, LOGITS, W1, None, W2, k=2, normalize_routing_weights=1, activation_type="silu"),
        case("MoE", X, LOGITS, BOTH, None, W2, k=3, activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.7),
        case("QMoE", X, LOGITS, Q1, 0.1 * S1, None, Q2, 0.1 * S2, k=2, activation_type="gelu"),
    ],
    ids=str,
)
def test_second_derivatives(of: Case) -> None:
    assert_second_derivative(of, directions=1)


@needs_runtime
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [0, 16])
def test_every_code_is_read_as_onnx_runtime_does(bits: int, block: int) -> None:
    random = np.random.default_rng(bits)
    x, logits = random.standard_normal((5, 32)).astype(np.float16), random.standard_normal((5, 3)).astype(np.float16)
    sizes = (3, 16, 32), (3, 32, 16)
    layers = []
    for experts, rows, columns in sizes:
        groups = (experts, rows, columns // block) if block else (experts, rows)
        scales = (random.uniform(0.5, 1, groups) * 2.0**-bits / 4).astype(np.float16)
        points = random.integers(0, 256, (*groups[:-1], -(-groups[-1] * bits // 8))).astype(np.uint8)
        layers.append((random.integers(0, 256, (experts, rows, columns * bits // 8)).astype(np.uint8), scales, points))
    (q1, s1, z1), (q2, s2, z2) = layers
    options = {"k": 2, "normalize_routing_weights": 1, "activation_type": "silu", "expert_weight_bits": bits}
    options |= {"block_size": block} if block else {}
    model = case("QMoE", x, logits, q1, s1, None, q2, s2, None, None, None, None, z1, z2, **options)
    expected = get_backend("ort-cpu").prepare(model.model).run(model.feeds)["output"]
    got = get_backend("numpy").prepare(model.model).run(model.feeds)["output"]
    assert got.dtype == np.float16
    np.testing.assert_allclose(got.astype(float), expected.astype(float), rtol=4e-3, atol=4e-3)


@needs_runtime
def test_experts_of_float16_have_a_gradient_that_onnx_runtime_runs() -> None:
    """The sum over the experts is in float: ONNX Runtime's ScatterND adds no float16."""
    inputs = [None if x is None else x.astype(np.float16) for x in (X, LOGITS, W1, None, W2)]
    of = case("MoE", *inputs, k=2, activation_type="silu")
    feeds = {**of.feeds, "output_grad": np.ones((3, 4), np.float16)}
    expected, got = (get_backend(b).prepare(refgrad.gradient(of.model)).run(feeds) for b in ("numpy", "ort-cpu"))
    for name, value in expected.items():
        np.testing.assert_allclose(got[name].astype(float), value.astype(float), rtol=5e-3, atol=5e-3)
