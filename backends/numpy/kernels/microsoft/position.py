"""ONNX Runtime's rotary embeddings and position biases."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from refgrad.backends.numpy.kernels.activation import sigmoid
from refgrad.backends.numpy.kernels.operands import check_indices, check_shape
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("RotaryEmbedding", domain=MICROSOFT, in_float32=True, fresh=True)
def rotary_embedding(
    input: Array,
    position_ids: Array,
    cos_cache: Array,
    sin_cache: Array,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Array:
    """Complex numbers, a pair each, times those on the unit circle that their positions name"""
    batch, length = _tokens(input)
    if position_ids.size == 1 and position_ids.ndim < 2:
        positions = np.broadcast_to(position_ids.reshape(()) + np.arange(length), (batch, length))
    else:
        check_shape("position_ids", position_ids.shape, (batch, length))
        positions = position_ids
    circle = _circle(cos_cache, sin_cache)
    if length > len(circle) and not is_packed_batching:
        raise ValueError(f"a sequence of {length} is longer than the caches, which have {len(circle)} positions")
    check_indices(positions, len(circle), "position_ids", lowest=0)
    return _turned(input, circle[positions], num_heads, rotary_embedding_dim, interleaved)


@kernel("MRotaryEmbedding", domain=MICROSOFT, in_float32=True, fresh=True)
def multimodal_rotary_embedding(
    input: Array,
    position_ids: Array,
    cos_cache: Array,
    sin_cache: Array,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    mrope_layout: int = 0,
    mrope_section: list[int],
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Array:
    """As RotaryEmbedding, where position_ids has three positions of each token, and each pair reads one of them"""
    batch, length = _tokens(input)
    check_shape("position_ids", position_ids.shape, (3, batch, length))
    circle = _circle(cos_cache, sin_cache)
    pairs = circle.shape[1]
    if len(mrope_section) != 3 or min(mrope_section) < 0 or sum(mrope_section) != pairs:
        raise ValueError(
            f"mrope_section is {list(mrope_section)}; three numbers from 0 on that add up to {pairs} are needed"
        )
    if mrope_layout not in (0, 1):
        raise ValueError(f"mrope_layout is {mrope_layout}; it is 0 (in sections) or 1 (interleaved)")
    if input.ndim == 3 and num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}; an input of 3 axes needs a positive one")
    if length > len(circle) and not is_packed_batching:
        raise ValueError(f"a sequence of {length} is longer than the caches, which have {len(circle)} positions")
    check_indices(position_ids, len(circle), "position_ids", lowest=0)
    reads = []
    for pair in range(pairs):
        section = next(k for k in range(3) if pair < sum(mrope_section[: k + 1]))
        if mrope_layout:
            section = pair % 3 if pair < 3 * mrope_section[pair % 3] else 0
        reads.append(circle[position_ids[section], pair])
    turns = scale * (np.stack(reads, 2) if reads else circle[position_ids[0]])
    return _turned(input, turns, num_heads, rotary_embedding_dim, interleaved)


@kernel("GemmaRotaryEmbedding", domain=MICROSOFT, in_float32=True, fresh=True)
def gemma_rotary_embedding(emb: Array, q: Array, q_rot: Array, k: Array, k_rot: Array) -> tuple[Array, Array]:
    """The same angles for every head"""
    if q.ndim != 4:
        raise ValueError(f"q has the shape {list(q.shape)}; (batch, heads, sequence, size) is needed")
    check_shape("emb", emb.shape, (q.shape[0], *q.shape[2:]))
    check_shape("q_rot", q_rot.shape, q.shape)
    check_shape("k", k.shape, q.shape)
    check_shape("k_rot", k_rot.shape, k.shape)
    cos, sin = np.cos(emb).astype(q.dtype), np.sin(emb).astype(q.dtype)
    one, two = (
        np.einsum("bnsd,bsd->bnsd", x, cos) + np.einsum("bnsd,bsd->bnsd", rotated, sin)
        for x, rotated in ((q, q_rot), (k, k_rot))
    )
    return one, two


def _tokens(x: Array) -> tuple[int, int]:
    """The batch and the length of an input that is split into heads already, or is not."""
    if x.ndim not in (3, 4):
        raise ValueError(
            f"input has the shape {list(x.shape)}; (batch, sequence, heads·size) or (batch, heads, sequence, size) is needed"
        )
    return x.shape[0], x.shape[x.ndim - 2]


def _circle(cos: Array, sin: Array) -> Array:
    """cos + i·sin"""
    if cos.ndim != 2:
        raise ValueError(f"cos_cache has the shape {list(cos.shape)}; (positions, pairs) is needed")
    check_shape("sin_cache", sin.shape, cos.shape)
    return np.asarray(cos + 1j * sin)


def _turned(x: Array, turns: Array, num_heads: int, rotary_embedding_dim: int, interleaved: int) -> Array:
    """Each head of `x` by `turns` (batch, sequence, pairs)"""
    width = 2 * turns.shape[2]
    if rotary_embedding_dim and num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}; with rotary_embedding_dim it is positive")
    if rotary_embedding_dim % 2 or rotary_embedding_dim < 0:
        raise ValueError(f"rotary_embedding_dim is {rotary_embedding_dim}; pairs need an even number from 0 on")
    if x.ndim == 3 and (num_heads < 0 or x.shape[2] % (num_heads or width or 1)):
        raise ValueError(
            f"num_heads={num_heads}, or heads of {width}, do not divide the {x.shape[2]} features of input"
        )
    size = x.shape[3] if x.ndim == 4 else x.shape[2] // num_heads if num_heads else width
    due = rotary_embedding_dim or size
    if due != width or due > size:
        raise ValueError(
            f"caches of {turns.shape[2]} pairs turn {width} elements, and {due} of {size} are to be turned"
        )
    y = np.array(x)
    heads = y if x.ndim == 4 else y.reshape(*x.shape[:2], -1 if y.size else 0, size).swapaxes(1, 2)
    first = slice(0, width, 2) if interleaved else slice(0, width // 2)
    second = slice(1, width, 2) if interleaved else slice(width // 2, width)
    product = (heads[..., first] + 1j * heads[..., second]) * turns[:, None]
    heads[..., first], heads[..., second] = product.real, product.imag
    return y


@kernel("RelativePositionBias", domain=MICROSOFT, fresh=True)
def relative_position_bias(
    bias_table: Array, query_length: Array, key_length: Array, *, is_bidirectional: int = 0, max_distance: int
) -> Array:
    """A number of the table for each head, query and key: near distances have their own, far ones share by logarithm"""
    if bias_table.ndim != 2:
        raise ValueError(f"bias_table has the shape {list(bias_table.shape)}; (buckets, heads) is needed")
    for what, given in (("query_length", query_length), ("key_length", key_length)):
        if given.size != 1 or given.reshape(()) < 0:
            raise ValueError(f"{what} is {given.tolist()}; one number from 0 on is needed")
    queries, keys = int(query_length.reshape(())), int(key_length.reshape(()))
    if queries != keys:
        raise ValueError(f"query_length is {queries} and key_length {keys}; they are equal")
    buckets = bias_table.shape[0] // 2 if is_bidirectional else bias_table.shape[0]
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"{len(bias_table)} buckets and max_distance={max_distance}: at least 1 distance, and fewer than that, are exact"
        )
    rows = bias_table.reshape(bias_table.shape[1], bias_table.shape[0])
    y = np.empty((1, len(rows), queries, keys), bias_table.dtype)
    for query in range(queries):
        for key in range(keys):
            distance = query - key if not is_bidirectional else abs(query - key)
            bucket = max(distance, 0)
            if bucket >= exact:
                share = np.log(np.float32(bucket) / np.float32(exact)) / np.log(
                    np.float32(max_distance) / np.float32(exact)
                )
                bucket = min(exact + int(share * np.float32(buckets - exact)), buckets - 1)
            y[0, :, query, key] = rows[:, bucket + (buckets if is_bidirectional and key > query else 0)]
    return y


@kernel("GatedRelativePositionBias", domain=MICROSOFT, in_float32=True, fresh=True)
def gated_relative_position_bias(
    query_layer: Array,
    query_bias: Array,
    rel_pos: Array,
    weight: Array,
    bias: Array,
    eco_a: Array,
    token_offset: Array | None = None,
    *,
    num_heads: int,
) -> Array:
    """A bias of positions times a gate of each head and query, which its own features open"""
    query = query_layer if token_offset is None else padded(query_layer, token_offset)
    if query.ndim != 3 or num_heads < 1 or query.shape[2] % num_heads:
        raise ValueError(f"query_layer has the shape {list(query_layer.shape)}; its features are of {num_heads} heads")
    batch, length, width = query.shape
    if weight.ndim != 2 or weight.shape[1] % 2:
        raise ValueError(f"weight has the shape {list(weight.shape)}; it has an even number of columns")
    check_shape("query_bias", query_bias.shape, (width,))
    check_shape("rel_pos", rel_pos.shape, (1, num_heads, length, length))
    check_shape("weight", weight.shape, (width // num_heads, weight.shape[1]))
    check_shape("bias", bias.shape, weight.shape[1:])
    check_shape("eco_a", eco_a.shape, (1, num_heads, 1, 1))
    heads = (query + query_bias).reshape(batch, length, num_heads, width // num_heads)
    halves = (np.arange(weight.shape[1]) >= weight.shape[1] // 2).astype(weight.dtype)
    opened = [sigmoid(np.einsum("bsnh,hd,d->bns", heads, weight, half) + bias @ half) for half in (1 - halves, halves)]
    gate = opened[0] * (opened[1] * eco_a.reshape(1, num_heads, 1) - 1) + 2
    return np.asarray(np.einsum("bns,nst->bnst", gate, rel_pos[0]))


def padded(tokens: Array, token_offset: Array) -> Array:
    """(tokens, width) as (batch, sequence, width), with 0 where there is no token."""
    if tokens.ndim != 2 or token_offset.ndim != 2 or len(tokens) > token_offset.size:
        raise ValueError(
            f"token_offset has the shape {list(token_offset.shape)} and the tokens {list(tokens.shape)}; "
            "(batch, sequence) and (tokens, width) are needed, of no more tokens than places"
        )
    check_indices(token_offset, token_offset.size, "token_offset", lowest=0)
    y = np.zeros((token_offset.size, tokens.shape[1]), tokens.dtype)
    for token, place in enumerate(token_offset.reshape(-1)[: len(tokens)]):
        y[place] = tokens[token]
    return y.reshape(*token_offset.shape, tokens.shape[1])


@kernel("RMSNormRotary", domain=MICROSOFT, fresh=True)
def rms_norm_rotary(
    X: Array,
    scale: Array,
    position_ids: Array,
    cosine: Array,
    sine: Array,
    prefill_numerics: Array | None = None,
    *,
    epsilon: float = 1e-6,
    flatten_batch: int = 0,
    input_start: int = 0,
    input_width: int = 0,
    output_fp16: int = 0,
    rotary_embedding_dim: int,
    use_fp32_arithmetic: int = 1,
    _wide: bool,
) -> tuple[Array, Array]:
    """A part of each head is normalized and turned, in float32 or with rounding to bfloat16 between the steps"""
    if X.ndim != 4:
        raise ValueError(f"X has the shape {list(X.shape)}; (batch, sequence, heads, stride) is needed")
    width = input_width or X.shape[3]
    if input_start < 0 or input_width < 0 or input_start + width > X.shape[3]:
        raise ValueError(f"input_start={input_start} and a width of {width}: a head of X has {X.shape[3]} elements")
    if rotary_embedding_dim < 2 or rotary_embedding_dim % 2 or rotary_embedding_dim > width:
        raise ValueError(f"rotary_embedding_dim is {rotary_embedding_dim}; it is even, and from 2 to {width}")
    if not 0 <= epsilon < np.inf:
        raise ValueError(f"epsilon is {epsilon}; it is finite and not negative")
    check_shape("scale", scale.shape, (width,))
    check_shape("cosine", cosine.shape, (len(cosine), rotary_embedding_dim // 2))
    check_shape("sine", sine.shape, cosine.shape)
    prefill = 0 if prefill_numerics is None else int(prefill_numerics.reshape(()))
    if prefill not in (0, 1):
        raise ValueError(f"prefill_numerics is {prefill}; it is 0 or 1")
    batch, length, heads, _ = X.shape
    count = (1, batch * length) if flatten_batch else (batch, length)
    if position_ids.size == 1 and position_ids.ndim < 2:
        positions = np.broadcast_to(position_ids.reshape(()) + np.arange(count[1]), count)
    else:
        check_shape("position_ids", position_ids.shape, (batch, length))
        positions = position_ids.reshape(count)
    check_indices(positions, len(cosine), "position_ids", lowest=0)
    short = np.dtype(ml_dtypes.bfloat16)
    rounds = not output_fp16 and X.dtype == short and cosine.dtype == short
    wide = np.dtype(np.float64 if _wide else np.float32)
    x = X[..., input_start : input_start + width].astype(wide)
    normalized = x * scale / np.sqrt(np.mean(np.square(x), 3, keepdims=True) + wide.type(epsilon))
    if rounds:
        normalized = normalized.astype(short).astype(wide)
    y = normalized.reshape(*count, heads, width).copy()
    half = rotary_embedding_dim // 2
    cos, sin = (cache[positions][:, :, None].astype(wide) for cache in (cosine, sine))
    a, b = y[..., :half].copy(), y[..., half:rotary_embedding_dim].copy()
    products = [a * cos, b * sin, b * cos, a * sin]
    if rounds and (prefill or not use_fp32_arithmetic):
        products = [product.astype(short).astype(wide) for product in products]
    y[..., :half], y[..., half:rotary_embedding_dim] = products[0] - products[1], products[2] + products[3]
    kind = wide if _wide else np.dtype(np.float16) if output_fp16 else short
    return y.reshape(*count, heads * width).astype(kind), normalized
