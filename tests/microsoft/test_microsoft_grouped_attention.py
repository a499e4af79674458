"""ONNX Runtime's attentions with shared keys and values: what is refused, padding, 16 bits, and caches of integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from checking import assert_second_derivative
from grouped_attention import NUMPY, floats, grouped, int32, node_model, prompt
from runtime import needs_runtime

import refgrad
from refgrad.backends import get_backend
from refgrad.errors import BackendError, NoGradientError
from refgrad.microsoft.cases import case, drawer

pytestmark = [pytest.mark.stock, pytest.mark.slow]


CACHE = {"past_key": floats(2, 2, 4, 8), "past_value": floats(2, 2, 4, 8), "length": 1}
HELD = np.zeros((2, 2, 4, 8), np.int8)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_heads": 3}, "kv_num_heads=2 does not divide num_heads=3"),
    ({"query": floats(2, 3, 30)}, "num_heads=4 does not divide query, which has 30 columns"),
    ({"value": None}, "it needs key and value, or neither of them"),
    ({"key": floats(2, 3, 8)}, r"key has the shape \[2, 3, 8\]; it is \[2, 3, 16\]"),
    ({"key": floats(2, 2, 16), "value": floats(2, 2, 16)}, "key has 2 rows and query 3; they have as many"),
    ({"past": 2, "past_value": None}, "it needs past_key and past_value, or neither of them"),
    ({"past": 2, "past_value": floats(2, 2, 3, 8)}, r"past_value has the shape .*; it is \[2, 2, 2, 8\]"),
    ({"past": 2, "past_key": floats(2, 4, 2, 8)}, r"past_key has the shape .*; it is \[2, 2, 2, 8\]"),
    ({"past": 2}, "2 samples bring 3 queries each to a past, and total_sequence_length is 5; give query_seqlens"),
    ({"seqlens_k": int32(2)}, r"seqlens_k has the shape \[1\]; it is \[2\]"),
    ({"seqlens_k": int32(2, 3)}, r"seqlens_k is \[2, 3\]; each number is in 0..2"),
    ({"seqlens_k": int32(2, -1)}, r"seqlens_k is \[2, -1\]; each number is in 0..2"),
    ({"total_sequence_length": np.array(4, np.int32)}, "total_sequence_length is 4; the past has 0 rows"),
    ({"total_sequence_length": np.array(2, np.int32), "seqlens_k": int32(1, 1)}, "less than the 3 queries"),
    ({**CACHE, "total_sequence_length": np.array(9, np.int32), "seqlens_k": int32(8, 8)}, "the past has 4 rows"),
    ({"total_sequence_length": int32(3, 3)}, r"total_sequence_length has the shape \[2\]; it is one number"),
    ({"attention_bias": floats(1, 1, 3, 4)}, r"attention_bias has the shape .*; it is .*, 3, 3\]"),
    ({"attention_bias": floats(1, 3, 3, 3)}, r"it is \[1 or 2, 1 or 4, 3, 3\]"),
    ({"head_sink": floats(2)}, r"head_sink has the shape \[2\]; it is \[4\]"),
    ({"cos_cache": floats(2, 4), "sin_cache": floats(2, 4), "do_rotary": 1}, "the positions contain 2"),
    ({"cos_cache": floats(3, 5), "sin_cache": floats(3, 5), "do_rotary": 1}, "cos_cache has 5 columns"),
    (
        {"cos_cache": floats(3, 4), "sin_cache": floats(3, 4), "position_ids": np.array([[0], [1]]), "do_rotary": 1},
        r"position_ids has the shape \[2, 1\]; it is \[2, 3\]",
    ),
    (
        {**CACHE, "sliding_window_cache": 1, "local_window_size": 5},
        "local_window_size is 5; .* from 1 to 4, the rows",
    ),
    ({**CACHE, "query_seqlens": int32(1, 2)}, r"query_seqlens is \[1, 2\]; each number is in 0..1"),
    ({"query_seqlens": int32(1, 2)}, "query_seqlens needs causal=1, past_key and past_value"),
    ({"q_norm_weight": floats(8), "k_norm_weight": floats(4)}, r"k_norm_weight has the shape \[4\]; it is \[8\]"),
    (
        {**CACHE, "past_key": HELD, "past_value": HELD, "k_scale": floats(3), "v_scale": floats(3)}
        | {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8},
        r"k_scale has the shape \[3\]; PER_TENSOR needs 1 numbers",
    ),
    (
        {**CACHE, "k_scale": floats(1), "v_scale": floats(1)}
        | {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8},
        "past_key holds float32; a cache of 8 bits holds int8",
    ),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[said[:60] for _, said in REFUSED])
def test_bad_input_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    bad = grouped(prompt(**given))
    with pytest.raises(BackendError, match=said):
        NUMPY.prepare(bad.model).run(bad.feeds)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"local_window_size": 0}, "local_window_size=0 lets no query see a key"),
        ({"do_rotary": 1}, "do_rotary=1 needs the inputs cos_cache and sin_cache"),
        ({"sliding_window_cache": 1, "local_window_size": 2}, "sliding_window_cache=1 needs past_key"),
        (
            {**CACHE, **dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_TOKEN")},
            "'PER_TOKEN' is not known; there are 'NONE', 'PER_TENSOR', 'PER_CHANNEL'",
        ),
        (
            {**CACHE, "k_quant_type": "PER_TENSOR"},
            "k_quant_type is PER_TENSOR and v_quant_type NONE; they are the same",
        ),
        (
            {**CACHE, **dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_TENSOR")},
            "kv_cache_bit_width=0 is not known; there are 4 and 8",
        ),
        (
            {**CACHE, **dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_TENSOR"), "kv_cache_bit_width": 8},
            "PER_TENSOR needs the input k_scale",
        ),
        (
            dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_TENSOR") | {"kv_cache_bit_width": 8},
            "a quantised cache needs past_key, which says its type",
        ),
        ({"num_heads": 3}, "kv_num_heads=2 does not divide num_heads=3"),
        ({"kv_num_heads": 0}, "kv_num_heads is 0; it is from 1 to 2147483647"),
        ({"num_heads": 2**62}, "num_heads is 4611686018427387904; it is from 1 to 2147483647"),
        ({"causal": 2}, "causal is 2; there are 0 and 1"),
        ({"rotary_interleaved": -1}, "rotary_interleaved is -1; there are 0 and 1"),
        ({"qk_output": 3}, "qk_output is 3; there are 0, 1 and 2"),
        ({"causal": 0, "local_window_size": 2}, "local_window_size is 2; with causal=0 it is -1"),
        ({"key": None}, "it needs key and value, or neither of them"),
        ({**CACHE, "past_key": None}, "it needs past_key and past_value, or neither of them"),
        ({"q_norm_weight": floats(8)}, "it needs q_norm_weight and k_norm_weight, or neither of them"),
    ],
)
def test_a_form_that_is_not_covered_is_refused_with_the_reason(given: dict[str, Any], said: str) -> None:
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(grouped(prompt(**given)).model)


@pytest.mark.parametrize(
    "other",
    [
        {"key": floats(1, 3, 16), "value": floats(1, 3, 16)},
        {"query": floats(1, 3, 32), "seqlens_k": int32(2)},
        {"seqlens_k": int32(2)},
    ],
)
def test_a_gradient_does_not_broadcast_one_sample(other: dict[str, Any]) -> None:
    """The operator refuses it when it runs, and so does the gradient, which is refused at once where the shapes are known."""
    with pytest.raises(NoGradientError, match=r"its input (key|seqlens_k) has the shape"):
        refgrad.gradient(grouped(prompt(**other), 1).model)
    bad = grouped(prompt(**other), 1, static=False)
    gradient = refgrad.gradient(bad.model)
    with pytest.raises(BackendError, match=r"Reshape|query_grad|output_grad"):
        NUMPY.prepare(gradient).run({**bad.feeds, "output_grad": floats(*bad.feeds["query"].shape)})


@pytest.mark.parametrize("with_sink", [False, True])
def test_a_query_whose_scores_are_all_lowered_to_minus_infinity(with_sink: bool) -> None:
    """Without a sink it has no probabilities, here as in ONNX Runtime; with one it has the result 0 and no gradient."""
    bias = np.where(np.arange(3) > np.arange(3)[:, None] - 1, -np.inf, 0).astype(np.float32)[None, None]
    made = grouped(prompt(attention_bias=bias, head_sink=floats(4) if with_sink else None), 1)
    lowered = refgrad.lower(made.model)
    for model in (made.model, lowered):
        [y] = NUMPY.prepare(model).run(made.feeds).values()
        assert np.all(y[:, 0] == 0 if with_sink else np.isnan(y[:, 0]))
        assert np.isfinite(y[:, 1:]).all()
    if with_sink:
        gradient = refgrad.gradient(made.model)
        results = NUMPY.prepare(gradient).run({**made.feeds, "output_grad": floats(2, 3, 32)})
        assert all(np.isfinite(x).all() for x in results.values())
        np.testing.assert_array_equal(results["query_grad"][:, 0], 0)


def test_a_window_that_many_tokens_have_left_is_found_at_once() -> None:
    """`seqlens_k` comes from a stranger: 2 milliards of tokens take no loop over them."""
    many = 2**31 - 2
    given = {"sliding_window_cache": 1, "local_window_size": 4, "seqlens_k": int32(many, 2)}
    made = grouped(prompt(**CACHE, **given, total_sequence_length=np.array(many + 1, np.int32)))
    results = NUMPY.prepare(made.model).run(made.feeds)
    assert results["present_key"].shape == (2, 2, 4, 8)


STEPS: dict[str, dict[str, Any]] = {
    "a padded prompt": {"seqlens_k": int32(2, 0)},
    "a padded prompt in a buffer": {
        "past": 5,
        "seqlens_k": int32(1, 2),
        "total_sequence_length": np.array(3, np.int32),
    },
    "tokens after pasts of several lengths": {**CACHE, "past": 4, "seqlens_k": int32(4, 1)},
    "tokens in a buffer": {
        **CACHE,
        "past": 4,
        "seqlens_k": int32(2, 0),
        "total_sequence_length": np.array(3, np.int32),
    },
    "padded chunks": {"past": 6, "seqlens_k": int32(3, 2), "query_seqlens": int32(2, 1), "local_window_size": 2},
    "chunks in a cache of a window": {"past": 3, "seqlens_k": int32(8, 2), "query_seqlens": int32(3, 1)}
    | {"total_sequence_length": np.array(9, np.int32), "sliding_window_cache": 1, "local_window_size": 3},
}


@needs_runtime
@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("step", STEPS)
def test_the_rows_of_tokens_are_those_of_onnx_runtime(step: str, kind: type) -> None:
    """Which is free to write anything into the others."""
    one = grouped(prompt(**STEPS[step]))
    feeds = {name: x.astype(kind) if x.dtype == np.float32 else x for name, x in one.feeds.items()}
    model = grouped({**prompt(**STEPS[step]), **feeds}).model
    expected = get_backend("ort-cpu").prepare(model).run(feeds)
    results = NUMPY.prepare(model).run(feeds)
    tokens = feeds["seqlens_k"] + 1
    counts = feeds.get("query_seqlens", np.minimum(tokens, feeds["query"].shape[1]))
    near = 1e-5 if kind is np.float32 else 2e-3
    for b, (count, held) in enumerate(zip(counts, tokens, strict=True)):
        for name, rows in (
            ("output", np.s_[b, :count]),
            ("present_key", np.s_[b, :, :held]),
            ("present_value", np.s_[b, :, :held]),
        ):
            np.testing.assert_allclose(results[name][rows], expected[name][rows], rtol=near, atol=near, err_msg=name)


@pytest.mark.parametrize("step", STEPS)
def test_padding_has_no_gradient(step: str) -> None:
    one = grouped(prompt(**STEPS[step]))
    gradient = NUMPY.prepare(refgrad.gradient(one.model, outputs=["output"]))
    feeds = {**one.feeds, "output_grad": np.ones_like(one.feeds["query"])}
    grads = gradient.run(feeds)
    counts = feeds.get("query_seqlens", np.minimum(feeds["seqlens_k"] + 1, feeds["query"].shape[1]))
    for b, count in enumerate(counts):
        for name in ("query", "key", "value"):
            assert not grads[f"{name}_grad"][b, count:].any()
            assert grads["value_grad"][b, :count].all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("channels", [False, True])
def test_straight_through_a_quantised_cache(bits: int, channels: bool) -> None:
    """The gradient is that of the attention to what the cache holds."""
    scale = np.abs(floats(1, 2, 1, 8)) + np.float32(0.5) if channels else np.full(1, 0.5, np.float32)
    held = np.arange(128).reshape(2, 2, 4, 8) * 5 % 16 - 8
    past = held.astype(np.int8) if bits == 8 else ((held[..., ::2] + 8) | (held[..., 1::2] + 8) << 4).astype(np.uint8)
    kind = "PER_CHANNEL" if channels else "PER_TENSOR"
    given = prompt(
        length=1, past=4, past_key=past, past_value=past, k_scale=scale, v_scale=scale,
        k_quant_type=kind, v_quant_type=kind, kv_cache_bit_width=bits,
    )  # fmt: skip
    through = refgrad.gradient(grouped(given).model, outputs=["output"], quantization="straight-through")
    seed = floats(2, 1, 32)
    got = NUMPY.prepare(through).run({**grouped(given).feeds, "output_grad": seed})
    rows = scale if channels else scale[0]
    floated = {name: (held * rows).astype(np.float32) for name in ("past_key", "past_value")}
    for name in ("key", "value"):
        new = given[name].reshape(2, 1, 2, 8).swapaxes(1, 2)
        floated[name] = (np.rint(new / rows) * rows).swapaxes(1, 2).reshape(2, 1, 16).astype(np.float32)
    plain = grouped({**prompt(length=1, past=4), **floated})
    expected = NUMPY.prepare(refgrad.gradient(plain.model, outputs=["output"])).run(
        {**plain.feeds, "output_grad": seed}
    )
    for name in ("query_grad", "key_grad", "value_grad"):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "given", [{"batch": 0}, {"batch": 1, "length": 1}, {"batch": 0, "past": 2, "length": 1}], ids=str
)
def test_no_samples_and_one_token(given: dict[str, Any]) -> None:
    one = grouped(prompt(**given))
    results = NUMPY.prepare(one.model).run(one.feeds)
    seeds = {f"{name}_grad": np.ones_like(x) for name, x in results.items()}
    grads = NUMPY.prepare(refgrad.gradient(one.model)).run({**one.feeds, **seeds})
    assert grads["query_grad"].shape == one.feeds["query"].shape
    assert all(np.isfinite(x).all() for x in grads.values())


def test_the_second_derivative_of_a_token_after_a_past() -> None:
    none = [None] * 3
    inputs = [floats(1, 1, 16), floats(1, 1, 8), floats(1, 1, 8), floats(1, 1, 2, 8), floats(1, 1, 2, 8)]
    tokens = [int32(2), np.array(3, np.int32), *none, floats(1, 2, 1, 3), floats(2)]
    assert_second_derivative(
        case("GroupQueryAttention", *inputs, *tokens, num_heads=2, kv_num_heads=1, softcap=0.9, outputs=3)
    )


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_other_floats(kind: type) -> None:
    """A gradient of 16 bits is near that of doubles, and a double is a double."""
    given = prompt(length=1, past=4, cos_cache=floats(6, 4), sin_cache=floats(6, 4), head_sink=floats(4), do_rotary=1)
    wide = {name: x.astype(np.float64) for name, x in given.items() if getattr(x, "dtype", None) == np.float32}
    narrow = {name: x.astype(kind) for name, x in wide.items()}
    results = []
    for floated in (wide, narrow):
        one = grouped({**given, **floated})
        seed = floats(2, 1, 32).astype(floated["query"].dtype)
        results.append(
            NUMPY.prepare(refgrad.gradient(one.model, outputs=["output"])).run({**one.feeds, "output_grad": seed})
        )
    for name, expected in results[0].items():
        assert results[1][name].dtype == kind
        near = 2e-2 if kind is np.float16 else 1e-12
        np.testing.assert_allclose(
            results[1][name], expected, rtol=near, atol=near * np.abs(expected).max(), err_msg=name
        )


def sparse(**given: Any) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A SparseAttention of blocks of 16 keys, `given` in the place of its inputs and attributes."""
    draw = drawer()
    every: dict[str, Any] = {
        "query": draw(2, 3, 64),
        "key": draw(2, 3, 32),
        "value": draw(2, 3, 32),
        "past_key": draw(2, 2, 48, 16),
        "past_value": draw(2, 2, 48, 16),
        "block_row_indices": np.array([[0, 1, 3, 5], [0, 1, 2, 4]], np.int32),
        "block_col_indices": np.array([[0, 0, 1, 0, 2], [0, 1, 1, 2, -1]], np.int32),
        "total_sequence_length": np.array(40, np.int32),
        "key_total_sequence_lengths": int32(40, 40),
        "num_heads": 4,
        "kv_num_heads": 2,
        "sparse_block_size": 16,
    }
    return node_model("SparseAttention", every | given, {"output": 3, "present_key": 4, "present_value": 4})


TURNED = {"cos_cache": floats(48, 8), "sin_cache": floats(48, 8), "do_rotary": 1}


@needs_runtime
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"key_total_sequence_lengths": int32(40, 18)},
        {"total_sequence_length": np.array(3, np.int32), "key_total_sequence_lengths": int32(3, 2), "scale": 0.4},
        TURNED,
        {**TURNED, "rotary_interleaved": 1, "query": floats(2, 1, 128), "key": None, "value": None},
    ],
    ids=["later", "shorter", "prompt", "turned", "packed"],
)
def test_sparse_attention_is_that_of_onnx_runtime_in_its_own_caches(given: dict[str, Any]) -> None:
    """It writes into the memory of the caches, and refuses others."""
    ort = pytest.importorskip("onnxruntime")
    model, feeds = sparse(**given)
    results = NUMPY.prepare(model).run(feeds)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    own = {name: x.copy() for name, x in feeds.items()}  # OrtValue borrows their memory
    values = {name: ort.OrtValue.ortvalue_from_numpy(x) for name, x in own.items()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("output")
    for name in ("present_key", "present_value"):
        binding.bind_ortvalue_output(name, values[name.replace("present", "past")])
    session.run_with_iobinding(binding)
    expected = dict(zip(results, (value.numpy() for value in binding.get_outputs()), strict=True))
    lengths = feeds["key_total_sequence_lengths"]
    for b, tokens in enumerate(lengths):
        if tokens == lengths.max():  # of a shorter one, not even the first row of a prompt is its v₀
            np.testing.assert_allclose(results["output"][b], expected["output"][b], rtol=1e-5, atol=1e-5)
        for name in ("present_key", "present_value"):
            np.testing.assert_allclose(
                results[name][b, :, :tokens], expected[name][b, :, :tokens], rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_heads": 3}, "kv_num_heads=2 does not divide num_heads=3"),
        ({"past_key": floats(2, 2, 40, 16)}, r"past_value has the shape .*; it is \[2, 2, 40, 16\]"),
        ({"total_sequence_length": np.array(49, np.int32)}, "total_sequence_length is 49; .* have room for 48"),
        (
            {"key_total_sequence_lengths": int32(40, 2)},
            r"key_total_sequence_lengths is \[40, 2\]; each number is in 3..40",
        ),
        ({"key_total_sequence_lengths": int32(40)}, r"key_total_sequence_lengths has the shape \[1\]; it is \[2\]"),
        ({"block_row_indices": np.array([[0, 1, 3, 5]] * 3, np.int32)}, "masks divide 4 heads"),
        ({"block_row_indices": np.array([[0, 1, 3, 6]] * 2, np.int32)}, "rises to at most 5"),
        ({"block_col_indices": np.array([[0, 0, 3, 0, 2]] * 2, np.int32)}, "block_col_indices contain 3"),
        ({**TURNED, "cos_cache": floats(8, 8), "sin_cache": floats(8, 8)}, "the positions contain 39"),
    ],
)
def test_bad_input_of_sparse_attention_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    model, feeds = sparse(**given)
    with pytest.raises(BackendError, match=said):
        NUMPY.prepare(model).run(feeds)


def test_a_query_without_a_block_has_a_result_of_zero_and_no_gradient() -> None:
    lengths = int32(40, 18)
    model, feeds = sparse(
        key_total_sequence_lengths=lengths,
        block_row_indices=np.array([[0, 1, 2, 2]], np.int32),
        block_col_indices=np.array([[0, 1]], np.int32),
    )
    results = NUMPY.prepare(model).run(feeds)
    assert not results["output"][0].any()  # its queries are in the last block
    assert results["output"][1].all()
    seed = {"output_grad": np.ones_like(feeds["query"])}
    grads = NUMPY.prepare(refgrad.gradient(model, outputs=["output"])).run({**feeds, **seed})
    assert all(np.isfinite(x).all() and not x[0].any() for x in grads.values())


def test_a_long_prompt_needs_the_scores_of_one_head_at_a_time() -> None:
    one = grouped(prompt(1, 700, size=8), outputs=1)
    plan = NUMPY.prepare(one.model, max_memory=16 * 2**20)
    assert plan.run(one.feeds)["output"].shape == (1, 700, 32)
    with pytest.raises(BackendError, match="max_memory"):
        NUMPY.prepare(one.model, max_memory=8 * 2**20).run(one.feeds)
