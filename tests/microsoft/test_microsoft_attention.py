"""ONNX Runtime's attentions: bad inputs, the scores that they return, short types, second derivatives."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from checking import assert_gradient, assert_second_derivative
from numpy_graphs import undeclared
from onnx import TensorProto, helper

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.errors import BackendError, NoGradientError
from refgrad.microsoft.cases import attention
from refgrad.protos.domains import MICROSOFT

pytestmark = [pytest.mark.stock, pytest.mark.slow]

NUMPY = get_backend("numpy")
RNG = np.random.default_rng(0)
CASES = list(attention.cases())


def f(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def n(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def node(body: str, inputs: dict[str, np.ndarray]) -> onnx.ModelProto:
    """A model of one node of com.microsoft with three results, of which the last two may have no name."""
    outputs = ["y", "k", "v"] if body.startswith("y, k, v") else ["y", "k"] if body.startswith("y, k") else ["y"]
    return undeclared(body.replace("= ", "= com.microsoft.", 1), inputs, outputs, 21)


STATES = {"q": f(2, 3, 8), "k_": f(2, 3, 8), "v_": f(2, 3, 8)}
BUFFERS = {"a": f(2, 2, 6, 4), "b": f(2, 2, 6, 4)}
ONE = {"q": f(2, 1, 8), "k_": f(2, 1, 8), "v_": f(2, 1, 8)}
SELF = {"x": f(2, 3, 5), "w": f(5, 24)}
MULTI = "MultiHeadAttention <num_heads = 2> (q, k_, v_, "
DECODER = "DecoderMaskedMultiHeadAttention <num_heads = 2, past_present_share_buffer = 1> (q, k_, v_, "
SHARED = "Attention <num_heads = 2, past_present_share_buffer = 1> (x, w, , , p, , n)"
INPUT_OF_ONE = {"x": f(2, 1, 5), "w": f(5, 48), "c": f(48)}

BAD: list[tuple[str, dict[str, np.ndarray], str]] = [
    (
        f"y, k, v = {MULTI}, , , a, b, n)",
        STATES | BUFFERS | {"n": n(4)},
        "past_sequence_length is 4; it is 0 to 3, for the buffer holds the new tokens too",
    ),
    (f"y, k, v = {MULTI}, , , a, b, n)", STATES | BUFFERS | {"n": n(-1)}, "past_sequence_length is -1"),
    (f"y, k, v = {MULTI}, , , a, b, n)", STATES | BUFFERS | {"n": n(1, 1)}, r"has the shape \[2\]; it is one number"),
    (
        f"y, k, v = {MULTI}, , , a, b)",
        STATES | BUFFERS | {"a": f(2, 2, 6, 3)},
        r"past_key has the shape \[2, 2, 6, 3\]",
    ),
    (f"y = {MULTI}, , , a)", STATES | {"a": f(2, 2, 1, 4)}, "it needs past_key and past_value, or neither of them"),
    (f"y = {MULTI}, m)", STATES | {"m": n(1, 2, 3, 1)}, r"key_padding_mask has the shape \[4\]; it is \[2\] or \[8\]"),
    (
        f"y = {MULTI}, m)",
        STATES | {"m": n(*[1] * 8).reshape(2, 4)},
        r"key_padding_mask has the shape \[2, 4\]; it is \[2, 3\]",
    ),
    (
        f"y = {MULTI}, m)",
        STATES | {"m": np.ones((2, 3, 4), np.int32)},
        r"key_padding_mask has the shape \[2, 3, 4\]; it is \[2, 3, 3\]",
    ),
    (f"y = {MULTI}, , o)", STATES | {"o": f(1, 2, 3, 4)}, r"attention_bias has the shape \[1, 2, 3, 4\]"),
    (f"y = {MULTI}c)", STATES | {"c": f(20)}, r"bias has the shape \[20\]; it is \[24\]"),
    ("y = MultiHeadAttention <num_heads = 3> (q, k_, v_)", STATES, "num_heads=3 does not divide query"),
    (
        "y = MultiHeadAttention <num_heads = 2> (q)",
        {"q": f(2, 3, 2, 2, 4)},
        r"query has the shape \[2, 3, 2, 2, 4\]; it is \[\?, \?, 2, 3, \?\]",
    ),
    (
        f"y, k, v = {MULTI}, , , a, b, n, i)",
        ONE | BUFFERS | {"n": n(2), "i": np.full((1, 2, 6), 2, np.int32)},
        "cache_indirection contain 2, which is out of bounds for 2 elements",
    ),
    (
        f"y, k, v = {MULTI}, , , a, b, n, i)",
        ONE | BUFFERS | {"n": n(2), "i": np.zeros((2, 2, 6), np.int32)},
        r"cache_indirection has the shape \[2, 2, 6\]",
    ),
    (f"y, k = {SHARED}", SELF | {"p": f(2, 2, 2, 6, 4), "n": n(5)}, "past_sequence_length is 5; it is 0 to 3"),
    ("y = Attention <num_heads = 2> (x, w, , , p)", SELF | {"p": f(2, 2, 6, 4)}, r"past has the shape \[2, 2, 6, 4\]"),
    (
        "y = Attention <num_heads = 2> (x, w, , m)",
        SELF | {"m": n(1, 2, 3)},
        r"mask_index has the shape \[3\]; it is \[2\] or \[4\] or \[8\]",
    ),
    (
        "y = Attention <num_heads = 2> (x, w, , m)",
        SELF | {"m": np.ones((2, 1, 2, 2), np.int32)},
        "its input mask_index is for 2 tokens; there are 3",
    ),
    (
        "y = Attention <num_heads = 2, qkv_hidden_sizes = [8, 6, 10]> (x, w)",
        SELF,
        "qkv_hidden_sizes is .*the first two equal",
    ),
    ("y = Attention <num_heads = 2> (x, w)", SELF | {"w": f(5, 25)}, "25 columns, which are not three parts"),
    ("y = Attention <num_heads = 3> (x, w)", SELF, "num_heads=3 does not divide a part of weights"),
    ("y = Attention <num_heads = 8, do_rotary = 1> (x, w)", SELF, "it turns an even number, at most 1"),
    (
        "y = Attention <num_heads = 2, do_rotary = 1, rotary_embedding_dim = 2> (x, w)",
        SELF,
        "rotary_embedding_dim is 2; it is 0, 32, 64 or 128",
    ),
    (
        f"y, k, v = {DECODER}, , a, b, n)",
        STATES | BUFFERS | {"n": n(1)},
        r"query has the shape .*; it is \[\?, 1, \?\]",
    ),
    (f"y, k, v = {DECODER}, , a, b, n)", ONE | BUFFERS | {"n": n(6)}, "past_sequence_length is 6; it is 0 to 5"),
    (f"y, k, v = {DECODER}, , a, b)", ONE | BUFFERS, "needs a past and past_sequence_length; add them"),
    (
        f"y, k, v = {DECODER}, , a, b, n, w)",
        ONE | BUFFERS | {"n": n(2), "w": n(2)},
        "beam_width is 2, and cache_indirection",
    ),
    (f"y, k, v = {DECODER}m, , a, b, n)", ONE | BUFFERS | {"n": n(2), "m": n(1, 1)}, "mask_index has the shape"),
    (
        "y, k = DecoderMaskedSelfAttention <num_heads = 2, past_present_share_buffer = 1> (x, w, c, , p, , n)",
        INPUT_OF_ONE | {"w": f(5, 36), "c": f(36), "p": f(2, 2, 2, 6, 6), "n": n(2)},
        "heads of 6 elements are no multiple of 4",
    ),
    (
        "y, k = DecoderMaskedSelfAttention <num_heads = 2, past_present_share_buffer = 1> (x, w, c, , p, , n)",
        INPUT_OF_ONE | {"p": f(2, 2, 2, 6, 8), "n": n(6)},
        "past_sequence_length is 6",
    ),
    (
        "y = LongformerAttention <num_heads = 2, window = 2> (x, w, c, m, w, c, g)",
        {"x": f(1, 6, 4), "w": f(4, 12), "c": f(12), "m": f(1, 6), "g": np.zeros((1, 6), np.int32)},
        r"its length is a multiple of 2·2, twice the window",
    ),
    (
        "y = DecoderAttention <num_heads = 2> (x, x, w, u, c, , , , t, t, t, t)",
        {"x": f(3, 2, 4), "w": f(4, 4), "u": f(4, 8), "c": f(12), "t": np.array([True])},
        "key_cache or value_cache is left out",
    ),
]


@pytest.mark.parametrize(("body", "feeds", "said"), BAD, ids=[f"{body}-{said}"[:110] for body, _, said in BAD])
def test_a_bad_input_is_refused_by_name(body: str, feeds: dict[str, np.ndarray], said: str) -> None:
    with pytest.raises(BackendError, match=said):
        NUMPY.prepare(node(body, feeds)).run(feeds)


@pytest.mark.parametrize(
    ("body", "feeds", "said"),
    [
        ("y = MultiHeadAttention <num_heads = 0> (q, k_, v_)", STATES, "num_heads is 0; it is from 1"),
        ("y = Attention <num_heads = -1> (x, w)", SELF, "num_heads is -1; it is from 1"),
        ("y = MultiHeadAttention <num_heads = 2> (q, k_)", STATES, "it needs key and value, or neither of them"),
        (
            "y = MultiHeadAttention <num_heads = 2> (q)",
            STATES,
            r"query has the shape \[2, 3, 8\]; it is \[\?, \?, 2, 3, \?\]",
        ),
        ("y = DecoderMaskedMultiHeadAttention <num_heads = 2> (q, k_)", ONE, "it needs key and value, or neither"),
    ],
)
def test_a_form_that_is_not_covered_is_refused_by_name(body: str, feeds: dict[str, np.ndarray], said: str) -> None:
    model = node(body, feeds)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 3))
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(model)


def test_a_gradient_does_not_broadcast_one_sequence() -> None:
    """The operator refuses it when it runs, and so does the gradient."""
    case = node_case(
        "MultiHeadAttention",
        f(2, 3, 8),
        f(1, 3, 8),
        f(1, 3, 8),
        domain=MICROSOFT,
        opset=1,
        num_heads=2,
        shapes="symbolic",
    )
    gradient = refgrad.gradient(case.model)
    with pytest.raises(BackendError, match="Reshape"):
        NUMPY.prepare(gradient).run({**case.feeds, "output_grad": f(2, 3, 8)})


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("filter_value", [-np.inf, float(np.finfo(np.float32).min)])
def test_a_mask_takes_a_key_away_whatever_it_adds(filter_value: float, dtype: type) -> None:
    """No -∞ is multiplied by 0. float16 has no number as low as the lowest float32, which exporters write."""
    three = [f(2, 3, 8).astype(dtype) for _ in range(3)]
    mask = n(*[1, 1, 0, 1, 0, 1]).reshape(2, 3)
    case = node_case(
        *("MultiHeadAttention", *three, None, mask),
        domain=MICROSOFT,
        opset=1,
        num_heads=2,
        mask_filter_value=filter_value,
    )
    [expected] = NUMPY.prepare(case.model).run(case.feeds).values()
    [got] = NUMPY.prepare(refgrad.lower(case.model)).run(case.feeds).values()
    np.testing.assert_allclose(got, expected, rtol=1e-2 if dtype == np.float16 else 1e-5, atol=1e-3)
    assert_gradient(case, tolerance=1e-5, runtime=False)


def runtime() -> None:
    if "ort-cpu" not in available():
        pytest.skip("onnxruntime is not installed")


@pytest.mark.parametrize("name", ["MultiHeadAttention", "DecoderMaskedMultiHeadAttention"])
@pytest.mark.parametrize("ordered", [0, 1])
def test_the_scores_are_those_that_onnx_runtime_returns(name: str, ordered: int) -> None:
    """Before softmax, with the mask; a key that comes later than the query has the lowest number."""
    runtime()
    if name == "MultiHeadAttention":
        case = node_case(
            *(name, *STATES.values(), None, n(2, 3)),
            domain=MICROSOFT,
            opset=1,
            outputs=4,
            num_heads=2,
            unidirectional=ordered,
        )
    else:
        arguments = [*ONE.values(), n(*[1, 0, 1] * 2).reshape(2, 3), None, *BUFFERS.values(), n(2)]
        settings = {"num_heads": 2, "past_present_share_buffer": 1, "output_qk": 1}
        case = node_case(name, *arguments, domain=MICROSOFT, opset=1, outputs=4, **settings)
    got, expected = (get_backend(b).prepare(case.model).run(case.feeds)["qk"] for b in ("numpy", "ort-cpu"))
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def few(name: str) -> list[Case]:
    """Every third case of an operator, of known shapes and fed as a whole."""
    found = [case for case in CASES if case.operator == f"com.microsoft.{name}" and case.static]
    whole = [case for case in found if not case.model.graph.initializer]
    return [case for case in whole if all(array.size for array in case.feeds.values())][::3]


@pytest.mark.parametrize("name", sorted({case.operator.removeprefix("com.microsoft.") for case in CASES}))
def test_the_second_derivative(name: str) -> None:
    assert_second_derivative(few(name)[-1], directions=1)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("name", sorted({case.operator.removeprefix("com.microsoft.") for case in CASES}))
def test_in_another_type(name: str, dtype: type) -> None:
    """Against float: in double to its last digits; in float16 as far as it goes."""
    for case in few(name):
        if name == "DecoderMaskedSelfAttention" and "share_buffer" in str(case):
            continue  # keys lie by the size of their type
        other = {key: a.astype(dtype) if a.dtype == np.float32 else a for key, a in case.feeds.items()}
        given = [other.get(key) for key in case.node.input]
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in case.node.attribute}
        outputs = len(case.node.output)
        model = node_case(name, *given, domain=MICROSOFT, opset=1, outputs=outputs, **attributes).model
        got = NUMPY.prepare(model).run(other)
        for key, expected in NUMPY.prepare(case.model).run(case.feeds).items():
            assert got[key].dtype == dtype
            bound = 1e-2 if dtype == np.float16 else 1e-5
            np.testing.assert_allclose(got[key], expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 3, 8)])
def test_without_tokens_or_sequences(shape: tuple[int, ...]) -> None:
    three = [np.zeros(shape, np.float32)] * 3
    assert_gradient(node_case("MultiHeadAttention", *three, domain=MICROSOFT, opset=1, num_heads=2), runtime=False)


def test_queries_see_themselves_and_what_is_before_whatever_the_number_of_keys() -> None:
    """Query i is the i-th token after the past: with more keys than queries it sees as many as with fewer."""
    q, k, v = f(1, 2, 4), f(1, 4, 4), f(1, 4, 4)
    settings = {"domain": MICROSOFT, "opset": 1, "num_heads": 1, "unidirectional": 1}
    results = [
        NUMPY.prepare(case.model).run(case.feeds)["output"]
        for case in (node_case("MultiHeadAttention", q, k[:, :count], v[:, :count], **settings) for count in (2, 4))
    ]
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)
    np.testing.assert_allclose(results[0][:, 0], v[:, 0], rtol=1e-6)


@pytest.mark.parametrize("dim", [0, 32])
def test_do_rotary_is_rotary_embedding(dim: int) -> None:
    """Of the queries and keys, by their positions behind the past, with the base 10000."""
    size, past, length = 34, 2, 3
    turned = dim or size
    x, w, old = f(1, length, 5), f(5, 3 * size), f(2, 1, 1, past, size)
    attributes = {"rotary_embedding_dim": dim} if dim else {}
    settings = {"domain": MICROSOFT, "opset": 1, "num_heads": 1}
    whole = node_case("Attention", x, w, None, None, old, do_rotary=1, outputs=2, **attributes, **settings)
    angles = np.outer(np.arange(8), 10000.0 ** (-np.arange(0, turned, 2) / turned)).astype(np.float32)
    q, k, v = np.split(x @ w, 3, 2)
    rotated = []
    for state in (q, k):
        given = (state, np.array([past]), np.cos(angles), np.sin(angles))
        case = node_case("RotaryEmbedding", *given, domain=MICROSOFT, opset=1, num_heads=1, rotary_embedding_dim=turned)
        rotated.append(NUMPY.prepare(case.model).run(case.feeds)["output"])
    parts = node_case("MultiHeadAttention", *rotated, v, None, None, None, *old, outputs=3, **settings)
    got, expected = (NUMPY.prepare(case.model).run(case.feeds) for case in (whole, parts))
    np.testing.assert_allclose(got["output"], expected["output"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["present"][0], expected["present_key"], rtol=1e-5, atol=1e-5)
