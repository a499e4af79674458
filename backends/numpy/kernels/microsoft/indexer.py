"""ONNX Runtime's indexers: query by query, window by window, and for packed requests token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from refgrad.backends.numpy.kernels.microsoft.paged_attention import rising
from refgrad.backends.numpy.kernels.operands import check_shape, widened
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
    _check_policy(policy_mode, ratio, token_budget, index_topk, head_weight_scale)
    if query.ndim != 3 or past_key.ndim != 3 or query_norm_weight.ndim != 1:
        raise ValueError("query and past_key have three axes, and query_norm_weight has one")
    (batch, length, _), (size,) = query.shape, query_norm_weight.shape
    given = {"gate": gate, "position_bias": position_bias, "head_weights": head_weights, "position_ids": position_ids}
    given["past_proj_buffer"] = past_proj_buffer
    _check_given(policy_mode, given, mask=mask)
    query, key = _apart(policy_mode, query, key, size)
    room, heads = past_key.shape[1], query.shape[2] // size
    check_shape("past_key", past_key.shape, (batch, room, size))
    check_shape("key", key.shape, (batch, length, size if policy_mode == "qsa" else 2 * size))
    check_shape("key_norm_weight", key_norm_weight.shape, (size,))
    tables = _tables(policy_mode, cos_cache, sin_cache, batch, size)
    valid = room
    if past_sequence_length is not None:
        if past_sequence_length.size != 1:
            raise ValueError(f"past_sequence_length has {past_sequence_length.size} elements; it is one number")
        valid = int(past_sequence_length.reshape(-1)[0])
        if not 0 <= valid <= room:
            raise ValueError(f"past_sequence_length is {valid}; it is from 0 to {room}, the rows of past_key")
    scale = 1 / math.sqrt(size) if scale is None else scale
    queries = [_norm(query[b].reshape(length, heads, size), query_norm_weight, epsilon) for b in range(batch)]

    if policy_mode == "qsa":
        assert token_budget is not None
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
                chosen = [t for j in _highest(q, pooled, scale)[: token_budget // ratio] for t in blocks[j]]
                chosen += visible[len(blocks) * ratio :]
                selected[b, s, : len(chosen)] = chosen
        return selected, _kept(past_key, key, valid, past_sequence_length)

    assert index_topk is not None
    assert gate is not None
    assert position_bias is not None
    assert head_weights is not None
    assert position_ids is not None
    assert past_proj_buffer is not None
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
            seen = max(int(position_ids[b, s]) + 1, 0) // ratio
            best = _highest(q, keys[:seen], weight * scale, head_weights[b, s])[:index_topk]
            selected[b, s, : len(best)] = best
    after = held + length if not count else ratio + (held - overlap + length) % ratio
    buffer = np.stack(rest, 1) if rest else np.zeros((2, 0, after, 2 * size), past_proj_buffer.dtype)
    return selected, _kept(past_key, new, valid, past_sequence_length), buffer


@kernel("PackedSparseAttentionIndexer", domain=MICROSOFT, fresh=True)
def packed_sparse_attention_indexer(
    query: Array,
    key: Maybe,
    query_norm_weight: Array,
    key_norm_weight: Array,
    cos_cache: Array,
    sin_cache: Array,
    cumulative_sequence_lengths: Array,
    past_sequence_lengths: Array,
    gate: Maybe,
    position_bias: Maybe,
    head_weights: Maybe,
    position_ids: Maybe,
    past_key_state: Array,
    past_kv_buffer: Array,
    past_gate_buffer: Maybe,
    past_state_lengths: Array,
    state_update_capture_count: Maybe = None,
    state_update_active: Maybe = None,
    indexshare_mode: Maybe = None,
    merged_indices: Maybe = None,
    merged_counts: Maybe = None,
    merged_status: Maybe = None,
    *,
    compress_ratio: int,
    epsilon: float = 1e-6,
    head_weight_scale: float | None = None,
    index_topk: int | None = None,
    indexshare_state_policy: str = "default",
    max_output_entries: int = 0,
    policy_mode: str,
    scale: float | None = None,
    state_capacity: int,
    state_update_capacity: int = 0,
    token_budget: int | None = None,
) -> tuple[Maybe, ...]:
    """Each request takes its tokens one after the other; as many as `ratio` of them become an entry of its state"""
    ratio, qsa = compress_ratio, policy_mode == "qsa"
    _check_policy(policy_mode, ratio, token_budget, index_topk, head_weight_scale)
    if max_output_entries or any(
        x is not None for x in (indexshare_mode, merged_indices, merged_counts, merged_status)
    ):
        raise ValueError(
            "a selection that is shared (indexshare_mode, max_output_entries, merged inputs) is not covered"
        )
    if indexshare_state_policy not in ("default", "hold", "advance"):
        raise ValueError(
            f"indexshare_state_policy is {indexshare_state_policy!r}; it is 'default', 'hold' or 'advance'"
        )
    if state_capacity < 1:
        raise ValueError(f"state_capacity is {state_capacity}; it is positive")
    given = {"gate": gate, "position_bias": position_bias, "head_weights": head_weights, "position_ids": position_ids}
    given["past_gate_buffer"] = past_gate_buffer
    _check_given(
        policy_mode,
        given,
        state_update_capture_count=state_update_capture_count,
        state_update_active=state_update_active,
        state_update_capacity=state_update_capacity or None,
    )
    if not 0 <= state_update_capacity <= 8 or (state_update_capacity and state_update_capture_count is None):
        raise ValueError(
            f"state_update_capacity is {state_update_capacity}; it is from 0 to 8, and needs state_update_capture_count"
        )
    if query.ndim != 2 or query_norm_weight.ndim != 1:
        raise ValueError("query has two axes, and query_norm_weight has one")
    (tokens, _), (size,) = query.shape, query_norm_weight.shape
    bounds = rising("cumulative_sequence_lengths", cumulative_sequence_lengths, tokens)
    batch, width, room = len(bounds) - 1, size if qsa else 2 * size, 2 * ratio - 1
    query, key = _apart(policy_mode, widened(query), None if key is None else widened(key), size)
    heads = query.shape[1] // size
    for name, x, shape in (
        ("key", key, (tokens, width)),
        ("key_norm_weight", key_norm_weight, (size,)),
        ("past_sequence_lengths", past_sequence_lengths, (batch,)),
        ("gate", gate, (tokens, width)),
        ("position_bias", position_bias, (ratio, width)),
        ("head_weights", head_weights, (tokens, heads)),
        ("position_ids", position_ids, (tokens,)),
        ("past_key_state", past_key_state, (batch, state_capacity, size)),
        ("past_kv_buffer", past_kv_buffer, (batch, room, width)),
        ("past_gate_buffer", past_gate_buffer, (batch, room, width)),
        ("past_state_lengths", past_state_lengths, (batch, 2)),
        ("state_update_capture_count", state_update_capture_count, (batch,)),
        ("state_update_active", state_update_active, (1,)),
    ):
        if x is not None:
            check_shape(name, x.shape, shape)
    tables = _tables(policy_mode, widened(cos_cache), widened(sin_cache), batch, size)
    turn, most = _in_halves if qsa else _in_pairs, room if not qsa else ratio - 1
    norm = [widened(x) for x in (query_norm_weight, key_norm_weight)]
    queries = _norm(query.reshape(tokens, heads, size), norm[0], epsilon)
    scale = 1 / math.sqrt(size) if scale is None else scale
    scale *= 1 if qsa else 1 / math.sqrt(heads) if head_weight_scale is None else head_weight_scale
    rows = key if gate is None else np.concatenate((key, widened(gate)), 1)  # the gate of a token stands beside its key
    bias = None if position_bias is None else widened(position_bias)

    state, lengths = past_key_state.copy(), past_state_lengths.copy()
    buffer = widened(past_kv_buffer)
    if past_gate_buffer is not None:
        buffer = np.concatenate((buffer, widened(past_gate_buffer)), 2)
    buffer, status = buffer.copy(), np.zeros(batch, np.int32)
    update = np.zeros((batch, state_update_capacity, size), query.dtype)
    capacity = (token_budget + ratio - 1) if token_budget is not None else index_topk
    assert capacity is not None
    selected, counts = np.full((tokens, capacity), -1, np.int32), np.zeros(tokens, np.int32)
    for b in range(batch):
        past, (entries, held) = int(past_sequence_lengths[b]), map(int, past_state_lengths[b])
        lengths[b] = min(max(entries, 0), state_capacity), min(max(held, 0), most)
        fits = past == entries * ratio + held if qsa else past >= 0
        if not fits or [entries, held] != lengths[b].tolist():
            status[b] = 1
            continue
        pending, before = list(buffer[b, :held]), []
        if held >= ratio:
            before, pending = pending[:ratio], pending[ratio:]
        made: list[Array] = []
        transitions: list[Array] = []
        for row in rows[bounds[b] : bounds[b + 1]]:
            pending.append(row)
            transitions.append(row[:size])
            if len(pending) == ratio:
                mean = np.mean(pending, 0) if bias is None else _of_window(before, pending, bias, size)
                entry = _norm(mean, norm[1], epsilon)
                made.append(turn(entry[None], tables[b], (entries + len(made)) * ratio)[0])
                transitions[-1] = made[-1]
                before, pending = ([] if qsa else pending), []
        if entries + len(made) > state_capacity:
            status[b] = 2
            continue
        kept = before + pending
        lengths[b] = entries + len(made), len(kept)
        for n, entry in enumerate(made):
            state[b, entries + n] = entry.astype(state.dtype)
        for n, row in enumerate(kept):
            buffer[b, n] = row
        if state_update_capture_count is not None and (state_update_active is None or state_update_active[0]):
            for n, row in enumerate(transitions[: max(int(state_update_capture_count[b]), 0)][:state_update_capacity]):
                update[b, n] = row
        keys = widened(state[b, : lengths[b, 0]])
        for n, t in enumerate(range(bounds[b], bounds[b + 1])):
            place = past + n if position_ids is None else max(int(position_ids[t]), -1)
            visible = keys[: (place + 1) // ratio]
            weights = None if head_weights is None else widened(head_weights)[t]
            best = _highest(turn(queries[t], tables[b], place), visible, scale, weights)
            if token_budget is not None:
                best = [j * ratio + s for j in best[: token_budget // ratio] for s in range(ratio)]
                best += range(len(visible) * ratio, place + 1)
            chosen = best[:capacity]
            selected[t, : len(chosen)], counts[t] = chosen, len(chosen)
    held_keys, held_gates = buffer[..., :width], None if past_gate_buffer is None else buffer[..., width:]
    return (
        selected,
        counts,
        state,
        held_keys.astype(past_kv_buffer.dtype),
        None if held_gates is None or past_gate_buffer is None else held_gates.astype(past_gate_buffer.dtype),
        lengths,
        None if state_update_capture_count is None else update.astype(past_kv_buffer.dtype),
        None,
        status,
    )


def _of_window(before: list[Array], own: list[Array], bias: Array, size: int) -> Array:
    """The entry of a window and the one before it, of rows that have two series of keys and then two of gates."""
    slots = [(row[:size], row[2 * size : 3 * size] + b[:size]) for row, b in zip(before, bias, strict=False)]
    slots += [(row[size : 2 * size], row[3 * size :] + b[size:]) for row, b in zip(own, bias, strict=True)]
    return _pooled(np.stack([value for value, _ in slots]), np.stack([gate for _, gate in slots]))


def _check_policy(
    mode: str, ratio: int, token_budget: int | None, index_topk: int | None, head_weight_scale: float | None
) -> None:
    """Raise ValueError where a policy is not known, lacks the number that it chooses, or has one of another policy."""
    if mode not in ("qsa", "csa"):
        raise ValueError(f"policy_mode is {mode!r}; it is 'qsa' or 'csa'")
    if ratio < 1:
        raise ValueError(f"compress_ratio is {ratio}; it is positive")
    number = {"token_budget": token_budget, "index_topk": index_topk}
    needed = "token_budget" if mode == "qsa" else "index_topk"
    value = number.pop(needed)
    if value is None or value < 1:
        raise ValueError(f"{needed} is {value}; it is positive")
    for other, given in (*number.items(), ("head_weight_scale", head_weight_scale if mode == "qsa" else None)):
        if given is not None:
            raise ValueError(f"{other} is given, and has no meaning beside {needed}")
    if token_budget is not None and token_budget % ratio:
        raise ValueError(f"token_budget is {token_budget}, which compress_ratio {ratio} does not divide")


def _check_given(mode: str, of_csa: dict[str, Maybe], **of_qsa: Array | int | None) -> None:
    """Raise ValueError for what another policy has, and where "csa" lacks something."""
    absent = of_csa if mode == "qsa" else of_qsa
    if foreign := [name for name, value in absent.items() if value is not None]:
        raise ValueError(f"{foreign[0]} is given, and policy_mode {mode!r} has none")
    if mode == "csa" and any(value is None for value in of_csa.values()):
        raise ValueError(f"policy_mode 'csa' needs {', '.join(of_csa)}")


def _apart(mode: str, query: Array, key: Maybe, size: int) -> tuple[Array, Array]:
    """Query and key; without a key the last channels of the query are the key."""
    if key is None and mode == "csa":
        raise ValueError("key is missing; policy_mode 'csa' needs it")
    if key is None:
        query, key = query[..., :-size], query[..., -size:]
    if not size or query.shape[-1] % size:
        raise ValueError(
            f"query has {query.shape[-1]} channels; heads of {size} channels, as query_norm_weight has, are needed"
        )
    return query, key


def _tables(mode: str, cos_cache: Array, sin_cache: Array, batch: int, size: int) -> list[Caches]:
    """The rotary cache of each sample."""
    check_shape("sin_cache", sin_cache.shape, cos_cache.shape)
    if cos_cache.ndim not in (2, 3) or (cos_cache.ndim == 3 and len(cos_cache) != batch):
        raise ValueError(
            f"cos_cache has the shape {list(cos_cache.shape)}; it is a table, or one for each of {batch} samples"
        )
    turned = cos_cache.shape[-1] * (1 if mode == "qsa" else 2)
    if turned > size or (mode == "qsa" and turned % 2) or not cos_cache.shape[-2]:
        raise ValueError(
            f"cos_cache has the shape {list(cos_cache.shape)}, which does not fit heads of {size} channels"
        )
    return [(cos_cache, sin_cache) if cos_cache.ndim == 2 else (cos_cache[b], sin_cache[b]) for b in range(batch)]


def _highest(q: Array, keys: Sequence[Array] | Array, scale: float, weights: Maybe = None) -> list[int]:
    """The places of the keys by scale·Σ ReLU(q·k) over the heads, which may be weighted: the highest first."""
    scores = [np.maximum(q @ k, 0) for k in keys]
    return _order([scale * float(s.sum() if weights is None else weights @ s) for s in scores])


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
