"""ONNX Runtime's indexers: query by query, window by window."""

from __future__ import annotations

import math

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_shape
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
Maybe = np.ndarray | None
Caches = tuple[Array, Array]


@kernel("SparseAttentionIndexer", domain=MICROSOFT, in_float32=True, fresh=True)
def sparse_attention_indexer(
    query: Array,
    key: Maybe,
    query_norm_weight: Array,
    key_norm_weight: Array,
    cos_cache: Array,
    sin_cache: Array,
    mask: Maybe,
    past_key: Array,
    gate: Maybe = None,
    position_bias: Maybe = None,
    head_weights: Maybe = None,
    position_ids: Maybe = None,
    past_sequence_length: Maybe = None,
    past_proj_buffer: Maybe = None,
    *,
    compress_ratio: int,
    epsilon: float = 1e-6,
    head_weight_scale: float | None = None,
    index_topk: int | None = None,
    policy_mode: str,
    scale: float | None = None,
    token_budget: int | None = None,
) -> tuple[Array, ...]:
    """Of "qsa" blocks of the tokens that a query sees, of "csa" windows of the tokens that there are"""
    ratio = compress_ratio
    if policy_mode not in ("qsa", "csa"):
        raise ValueError(f"policy_mode is {policy_mode!r}; it is 'qsa' or 'csa'")
    if ratio < 1:
        raise ValueError(f"compress_ratio is {ratio}; it is positive")
    if query.ndim != 3 or past_key.ndim != 3 or query_norm_weight.ndim != 1:
        raise ValueError("query and past_key have three axes, and query_norm_weight has one")
    (batch, length, _), (size,) = query.shape, query_norm_weight.shape
    given = {"gate": gate, "position_bias": position_bias, "head_weights": head_weights, "position_ids": position_ids}
    given["past_proj_buffer"] = past_proj_buffer
    absent = given if policy_mode == "qsa" else {"mask": mask}
    if foreign := [name for name, value in absent.items() if value is not None]:
        raise ValueError(f"{foreign[0]} is given, and policy_mode {policy_mode!r} has none")
    if policy_mode == "qsa" and key is None:
        query, key = query[..., :-size], query[..., -size:]
    if not size or query.shape[2] % size:
        raise ValueError(
            f"query has {query.shape[2]} channels; heads of {size} channels, as query_norm_weight has, are needed"
        )
    if key is None:
        raise ValueError("key is missing; policy_mode 'csa' needs it")
    room, heads = past_key.shape[1], query.shape[2] // size
    check_shape("past_key", past_key.shape, (batch, room, size))
    check_shape("key", key.shape, (batch, length, size if policy_mode == "qsa" else 2 * size))
    check_shape("key_norm_weight", key_norm_weight.shape, (size,))
    check_shape("sin_cache", sin_cache.shape, cos_cache.shape)
    if cos_cache.ndim not in (2, 3) or (cos_cache.ndim == 3 and len(cos_cache) != batch):
        raise ValueError(
            f"cos_cache has the shape {list(cos_cache.shape)}; it is a table, or one for each of {batch} samples"
        )
    turned = cos_cache.shape[-1] * (1 if policy_mode == "qsa" else 2)
    if turned > size or (policy_mode == "qsa" and turned % 2) or not cos_cache.shape[-2]:
        raise ValueError(
            f"cos_cache has the shape {list(cos_cache.shape)}, which does not fit heads of {size} channels"
        )
    valid = room
    if past_sequence_length is not None:
        if past_sequence_length.size != 1:
            raise ValueError(f"past_sequence_length has {past_sequence_length.size} elements; it is one number")
        valid = int(past_sequence_length.reshape(-1)[0])
        if not 0 <= valid <= room:
            raise ValueError(f"past_sequence_length is {valid}; it is from 0 to {room}, the rows of past_key")
    scale = 1 / math.sqrt(size) if scale is None else scale
    tables = [(cos_cache, sin_cache) if cos_cache.ndim == 2 else (cos_cache[b], sin_cache[b]) for b in range(batch)]
    queries = [_norm(query[b].reshape(length, heads, size), query_norm_weight, epsilon) for b in range(batch)]

    if policy_mode == "qsa":
        _number("token_budget", token_budget, ("index_topk", index_topk), ("head_weight_scale", head_weight_scale))
        assert token_budget is not None
        if token_budget % ratio:
            raise ValueError(f"token_budget is {token_budget}, which compress_ratio {ratio} does not divide")
        if mask is not None:
            check_shape("mask", mask.shape, (batch, valid + length))
        selected = np.full((batch, length, token_budget + ratio - 1), -1, np.int32)
        for b in range(batch):
            keys = np.concatenate((past_key[b, :valid], key[b]))
            for s in range(length):
                visible = [t for t in range(valid + s + 1) if mask is None or mask[b, t] != 0]
                blocks = [visible[j : j + ratio] for j in range(0, len(visible) // ratio * ratio, ratio)]
                means = [_norm(keys[block].mean(0), key_norm_weight, epsilon) for block in blocks]
                pooled = [_in_halves(k, tables[b], block[0]) for k, block in zip(means, blocks, strict=True)]
                q = _in_halves(queries[b][s], tables[b], valid + s)
                scores = [scale * float(np.maximum(q @ k, 0).sum()) for k in pooled]
                chosen = [t for j in _order(scores)[: token_budget // ratio] for t in blocks[j]]
                chosen += visible[len(blocks) * ratio :]
                selected[b, s, : len(chosen)] = chosen
        return selected, _kept(past_key, key, valid, past_sequence_length)

    _number("index_topk", index_topk, ("token_budget", token_budget))
    assert index_topk is not None
    if (
        gate is None
        or position_bias is None
        or head_weights is None
        or position_ids is None
        or past_proj_buffer is None
    ):
        raise ValueError(f"policy_mode 'csa' needs {', '.join(given)}")
    check_shape("gate", gate.shape, key.shape)
    check_shape("position_bias", position_bias.shape, (ratio, 2 * size))
    check_shape("head_weights", head_weights.shape, (batch, length, heads))
    check_shape("position_ids", position_ids.shape, (batch, length))
    held = past_proj_buffer.shape[2] if past_proj_buffer.ndim == 4 else -1
    check_shape("past_proj_buffer", past_proj_buffer.shape, (2, batch, held, 2 * size))
    if held >= 2 * ratio:
        raise ValueError(f"past_proj_buffer has {held} tokens; it has fewer than {2 * ratio}, twice compress_ratio")
    weight = 1 / math.sqrt(heads) if head_weight_scale is None else head_weight_scale
    overlap = ratio if held >= ratio else 0
    count = (held - overlap + length) // ratio
    new = np.empty((batch, count, size), key.dtype)
    selected = np.full((batch, length, index_topk), -1, np.int32)
    rest = []
    for b in range(batch):
        tokens, gates = (np.concatenate(pair) for pair in zip(past_proj_buffer[:, b], (key[b], gate[b]), strict=True))
        for w in range(count):
            own = overlap + w * ratio
            slots = [(t, slice(size, None), t - own) for t in range(own, own + ratio)]
            slots += [(t, slice(size), t - own + ratio) for t in range(own - ratio, own) if t >= 0]
            values = np.stack([tokens[t, d] for t, d, _ in slots])
            mixed = _pooled(values, np.stack([gates[t, d] + position_bias[at, d] for t, d, at in slots]))
            new[b, w] = _in_pairs(_norm(mixed, key_norm_weight, epsilon), tables[b], (valid + w) * ratio)
        rest.append(np.stack([x[max(overlap + (count - 1) * ratio, 0) if count else 0 :] for x in (tokens, gates)]))
        keys = np.concatenate((past_key[b, :valid], new[b]))
        for s in range(length):
            q = _in_pairs(queries[b][s], tables[b], int(position_ids[b, s]))
            seen = min((int(position_ids[b, s]) + 1) // ratio, len(keys))
            scores = [weight * scale * float(head_weights[b, s] @ np.maximum(q @ k, 0)) for k in keys[:seen]]
            best = _order(scores)[:index_topk]
            selected[b, s, : len(best)] = best
    after = held + length if not count else ratio + (held - overlap + length) % ratio
    buffer = np.stack(rest, 1) if rest else np.zeros((2, 0, after, 2 * size), past_proj_buffer.dtype)
    return selected, _kept(past_key, new, valid, past_sequence_length), buffer


def _number(name: str, value: int | None, *others: tuple[str, float | None]) -> None:
    if value is None or value < 1:
        raise ValueError(f"{name} is {value}; it is positive")
    for other, number in others:
        if number is not None:
            raise ValueError(f"{other} is given, and has no meaning beside {name}")


def _kept(past: Array, new: Array, valid: int, given: Maybe) -> Array:
    """The past keys and the new ones after them; in the rows that there are where the number of the valid ones is given."""
    if given is None:
        return np.concatenate((past, new), 1)
    if valid + new.shape[1] > past.shape[1]:
        raise ValueError(
            f"past_key has {past.shape[1]} rows; {valid} by past_sequence_length and {new.shape[1]} new ones are more"
        )
    present = past.copy()
    present[:, valid : valid + new.shape[1]] = new
    return present


def _order(scores: list[float]) -> list[int]:
    """The places of the scores, the highest first, of equal ones the earliest."""
    return sorted(range(len(scores)), key=lambda j: -scores[j])


def _norm(x: Array, weight: Array, epsilon: float) -> Array:
    return np.asarray(x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon) * weight, x.dtype)


def _pooled(values: Array, gates: Array) -> Array:
    """The values of the slots, weighted by the softmax of their gates, channel by channel; 0 where there is none."""
    result = np.zeros(values.shape[1], values.dtype)
    for d in range(values.shape[1]):
        most = gates[:, d].max()
        if np.isfinite(most):
            shares = np.exp(gates[:, d] - most)
            result[d] = shares @ values[:, d] / shares.sum()
    return result


def _in_halves(x: Array, caches: Caches, position: int) -> Array:
    """The first channels turned, channel k with channel k + R/2."""
    cos, sin = (cache[min(max(position, 0), len(cache) - 1)] for cache in caches)
    y, half = x.copy(), len(cos) // 2
    for k in range(half):
        a, b = x[..., k], x[..., k + half]
        y[..., k] = a * cos[k] - b * sin[k]
        y[..., k + half] = b * cos[k + half] + a * sin[k + half]
    return y


def _in_pairs(x: Array, caches: Caches, position: int) -> Array:
    """The last channels turned, in pairs of neighbours."""
    cos, sin = (cache[min(max(position, 0), len(cache) - 1)] for cache in caches)
    y, first = x.copy(), x.shape[-1] - 2 * len(cos)
    for k in range(len(cos)):
        a, b = x[..., first + 2 * k], x[..., first + 2 * k + 1]
        y[..., first + 2 * k] = a * cos[k] - b * sin[k]
        y[..., first + 2 * k + 1] = b * cos[k] + a * sin[k]
    return y
