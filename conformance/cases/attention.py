"""Cases of attention, rotary embeddings, caches, and attention as a recurrence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import GraphProto, TensorProto

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.model import native

PREVIEW = "ai.onnx.preview"
BLIND = np.array([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]], bool)  # the second query sees no key

# attributes of LinearAttention, channels of the decay of 2 key heads of 4 channels, channels of β
RECURRENCES: tuple[tuple[dict[str, Any], int, int], ...] = (
    ({"update_rule": "linear"}, 0, 0),
    ({"update_rule": "gated", "scale": 0.7}, 8, 0),
    ({"update_rule": "gated"}, 2, 0),
    ({"update_rule": "delta"}, 0, 2),
    ({"update_rule": "gated_delta"}, 8, 1),
    ({"update_rule": "gated_delta"}, 2, 2),
)


def cases() -> Iterator[Case]:
    """Every attribute, optional input and optional output, on static, symbolic and unknown shapes."""
    for shapes in SHAPES:
        yield from _attention(shapes)
        yield from _rotary(shapes)
        yield from _caches(shapes)
        yield from _recurrences(shapes)
        for x, w, b, past in (((2, 3, 5), 4, True, True), ((2, 3, 2), 4, False, False), ((1, 1, 3), 1, True, False)):
            for activation in ("none", "silu") if b else ("swish",):
                yield node_case(
                    "CausalConvWithState",
                    *(numbers(*x), numbers(x[1], 1, w), numbers(x[1]) if b else None),
                    numbers(*x[:2], w - 1) if past else None,
                    activation=activation,
                    outputs=2,
                    opset=27,
                    shapes=shapes,
                )
    yield from _empty()
    heads = numbers(2, 4, 3, 4), numbers(2, 2, 5, 4), numbers(2, 2, 5, 3)
    yield node_case("FlexAttention", *heads, domain=PREVIEW, opset=1, scale=0.3)
    yield node_case("FlexAttention", *heads, domain=PREVIEW, opset=1, name="FlexAttention-scores", score_mod=_cap())
    yield node_case("FlexAttention", *heads, domain=PREVIEW, opset=1, name="FlexAttention-weights", prob_mod=_cap())


def _attention(shapes: str) -> Iterator[Case]:
    few: dict[str, Any] = {"opset": 23, "shapes": shapes}
    yield attention(**few)
    yield attention(key_heads=1, softcap=1.5, scale=0.6, is_causal=1, **few)
    yield attention(packed=True, **few)
    yield attention(packed=True, key_heads=1, is_causal=1, softmax_precision=TensorProto.DOUBLE, **few)
    for mask in (
        *(numbers(5), numbers(1, 5), numbers(2, 3, 5), numbers(2, 1, 3, 5), numbers(2, 2, 3, 4), numbers(1, 1, 1, 5)),
        *(BLIND, BLIND[2], BLIND[None, None], BLIND[:, :4]),
    ):
        yield attention(mask, **few)
    yield attention(np.where(BLIND, 0.5, -np.inf).astype(np.float32), constant=["attn_mask"], **few)
    for mode in (0, 3):
        yield attention(BLIND, key_heads=1, qk_matmul_output_mode=mode, outputs=4, **few)
    for mode in range(4):
        yield attention(numbers(3, 5), qk_matmul_output_mode=mode, softcap=1.5, outputs=4, **few)
    for packed in (False, True):
        yield attention(None, 2, packed=packed, key_heads=1, is_causal=1, outputs=3, **few)
    yield attention(numbers(3, 7), 2, qk_matmul_output_mode=0, outputs=4, **few)
    few["opset"] = 24
    for valid in ([5, 2], [4, 0]):
        yield attention(valid=valid, **few)
        yield attention(BLIND, valid=valid, is_causal=1, key_heads=1, **few)
    few["opset"] = 25
    yield attention(left_window_size=1, right_window_size=0, **few)
    yield attention(numbers(3, 5), left_window_size=0, right_window_size=2, **few)
    yield attention(None, 2, left_window_size=1, is_causal=1, outputs=3, **few)
    yield attention(valid=[4, 1], left_window_size=1, is_causal=1, **few)
    blind = numbers(1, 1, 4, 3), *[numbers(1, 1, 2, 3)] * 2  # the last query sees no key
    yield node_case("Attention", *blind, left_window_size=1, **few)
    yield node_case("Attention", *blind, None, *[numbers(1, 1, 1, 3)] * 2, left_window_size=0, outputs=3, **few)


def attention(
    mask: np.ndarray | None = None,
    past: int = 0,
    valid: list[int] | None = None,
    key_heads: int = 2,
    packed: bool = False,
    **arguments: Any,
) -> Case:
    """Attention of 3 queries in two heads to 5 keys and `past` more, in a batch of two; `valid` counts the keys used."""
    q, k, v = (numbers(2, heads, n, size) for heads, n, size in ((2, 3, 4), (key_heads, 5, 4), (key_heads, 5, 3)))
    inputs: list[np.ndarray | None] = [q, k, v]
    if packed:
        inputs = [x.swapaxes(1, 2).reshape(2, x.shape[2], -1) for x in (q, k, v)]
        arguments |= {"q_num_heads": 2, "kv_num_heads": key_heads}
    inputs += [mask] if mask is not None or past or valid else []
    inputs += [numbers(2, key_heads, past, 4), numbers(2, key_heads, past, 3)] if past else []
    inputs += [None, None, np.array(valid, np.int64)] if valid else []
    kind = [] if mask is None else [f"{mask.dtype}{'-inf' if np.isinf(mask).any() else ''}"]
    shapes = ",".join("none" if x is None else "x".join(map(str, x.shape)) for x in inputs)
    words = [f"{key}={value}" for key, value in arguments.items()]
    title = "-".join(["Attention", shapes, *kind, *([f"valid={valid}"] if valid else []), *words])
    return node_case("Attention", *inputs, name=title, **arguments)


def _rotary(shapes: str) -> Iterator[Case]:
    few: dict[str, Any] = {"opset": 23, "shapes": shapes}
    places = np.array([[0, 2, 5], [2, 1, 1]], np.int64)
    for interleaved in (0, 1):
        yield node_case(
            "RotaryEmbedding",
            numbers(2, 2, 3, 4),
            numbers(6, 2),
            2 * numbers(6, 2),
            places,
            interleaved=interleaved,
            **few,
        )
        yield node_case(
            "RotaryEmbedding",
            *(numbers(2, 3, 12), numbers(2, 3, 2), 2 * numbers(2, 3, 2)),
            interleaved=interleaved,
            num_heads=2,
            rotary_embedding_dim=4,
            **few,
        )


def _caches(shapes: str) -> Iterator[Case]:
    few: dict[str, Any] = {"opset": 24, "shapes": shapes}
    first = np.array([1, 3], np.int64)
    for axis, cache, update in ((-2, (2, 3, 5, 2), (2, 3, 2, 2)), (1, (2, 5), (2, 2)), (2, (2, 3, 5), (2, 3, 2))):
        yield node_case("TensorScatter", numbers(*cache), numbers(*update), first, axis=axis, **few)
        yield node_case(
            "TensorScatter", numbers(*cache), numbers(*update), first + 1, axis=axis, mode="circular", **few
        )
    yield node_case("TensorScatter", numbers(2, 5, 2), numbers(2, 3, 2), **few)


def _recurrences(shapes: str) -> Iterator[Case]:
    for attributes, gates, rates in RECURRENCES:
        for heads, tokens, past in ((4, 5, True), (2, 1, False)):
            yield recurrence(attributes, gates, rates, heads, tokens, past, shapes=shapes)
        if shapes == "static":
            yield recurrence(attributes, gates, rates, 4, 5, gates == 2, shapes=shapes, chunk_size=2)


def recurrence(
    attributes: dict[str, Any], gates: int, rates: int, heads: int, tokens: int, past: bool, **arguments: Any
) -> Case:
    """LinearAttention with two key heads of 4 and 3 channels."""
    return node_case(
        "LinearAttention",
        *(0.5 * numbers(2, tokens, width) for width in (heads * 4, 8, 6)),
        numbers(2, 2, 4, 3) if past else None,
        -np.abs(numbers(2, tokens, gates)) if gates else None,
        0.5 + 0.1 * numbers(2, tokens, rates) if rates else None,
        q_num_heads=heads,
        kv_num_heads=2,
        outputs=2,
        opset=27,
        **attributes,
        **arguments,
    )


def _empty() -> Iterator[Case]:
    for batch, queries, keys in ((0, 3, 5), (2, 0, 5), (2, 3, 0)):
        q, k, v = numbers(batch, 2, queries, 4), numbers(batch, 2, keys, 4), numbers(batch, 2, keys, 3)
        yield node_case("Attention", q, k, v, np.ones((queries, keys), bool), opset=23)
    yield node_case("RotaryEmbedding", numbers(0, 2, 3, 4), numbers(0, 3, 2), numbers(0, 3, 2), opset=23)
    yield node_case("TensorScatter", numbers(0, 5, 2), numbers(0, 3, 2), np.zeros(0, np.int64), opset=24)
    for shapes in SHAPES:
        nothing = numbers(2, 3, 5), numbers(2, 3, 0), np.array([1, 3], np.int64)
        yield node_case("TensorScatter", *nothing, axis=-1, opset=24, shapes=shapes)
    yield node_case("CausalConvWithState", numbers(0, 3, 5), numbers(3, 1, 2), outputs=2, opset=27)
    yield recurrence({}, 2, 2, 2, 0, True)


def _cap() -> GraphProto:
    return native.parse_graph("cap (float[B, H, L, S] x) => (float[B, H, L, S] y) { t = Tanh(x) y = Mul(t, x) }")


def numbers(*shape: int) -> np.ndarray:
    """Float32 numbers of the given shape, the same in every run."""
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
