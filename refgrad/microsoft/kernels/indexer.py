"""ONNX Runtime's indexers: query by query, window by window, and for packed requests token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from refgrad.backends.numpy.kernels.operands import widened
from refgrad.extend import Arguments, kernel_of_body
from refgrad.microsoft.kernels.paged_attention import rising
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
Maybe = np.ndarray | None
Caches = tuple[Array, Array]


@kernel_of_body("SparseAttentionIndexer", domain=MICROSOFT, in_float32=True, fresh=True)
def sparse_attention_indexer(args: Arguments) -> tuple[Array, ...]:
    """Of "qsa" blocks of the tokens that a query sees, of "csa" windows of the tokens that there are"""
    valid, room = args.past_key.shape[1], args.past_key.shape[1]
    if args.past_sequence_length is not None:
        valid = args.past_sequence_length.item()
        if not 0 <= valid <= room:
            raise ValueError(f"past_sequence_length is {valid}; it is from 0 to {room}, the rows of past_key")
    return _of_tokens(args, valid) if args.policy_mode == "qsa" else _of_windows(args, valid)


def _of_tokens(args: Arguments, valid: int) -> tuple[Array, ...]:
    """The tokens of the best blocks that each query sees, and then of the block that is not complete."""
    ratio, (queries, key, tables, scale) = args.compress_ratio, _operands(args)
    batch, length = queries.shape[:2]
    selected = np.full((batch, length, args.token_budget + ratio - 1), -1, np.int32)
    for b in range(batch):
        keys = np.concatenate((args.past_key[b, :valid], key[b]))
        for s in range(length):
            visible = [t for t in range(valid + s + 1) if args.mask is None or args.mask[b, t] != 0]
            blocks = [visible[j : j + ratio] for j in range(0, len(visible) // ratio * ratio, ratio)]
            means = [_norm(keys[block].mean(0), args.key_norm_weight, args.epsilon) for block in blocks]
            pooled = [_in_halves(k, tables[b], block[0]) for k, block in zip(means, blocks, strict=True)]
            q = _in_halves(queries[b, s], tables[b], valid + s)
            chosen = [t for j in _highest(q, pooled, scale)[: args.token_budget // ratio] for t in blocks[j]]
            chosen += visible[len(blocks) * ratio :]
            selected[b, s, : len(chosen)] = chosen
    return selected, _kept(args.past_key, key, valid, args.past_sequence_length)


def _of_windows(args: Arguments, valid: int) -> tuple[Array, ...]:
    """The best windows that each query sees."""
    ratio, (queries, key, tables, scale) = args.compress_ratio, _operands(args)
    (batch, length), held, size = queries.shape[:2], args.past_proj_buffer.shape[2], queries.shape[3]
    overlap = ratio if held >= ratio else 0
    count = (held - overlap + length) // ratio
    new = np.empty((batch, count, size), key.dtype)
    selected = np.full((batch, length, args.index_topk), -1, np.int32)
    rest = []
    for b in range(batch):
        tokens, gates = (
            np.concatenate(pair) for pair in zip(args.past_proj_buffer[:, b], (key[b], args.gate[b]), strict=True)
        )
        for w in range(count):
            own = overlap + w * ratio
            slots = [(t, slice(size, None), t - own) for t in range(own, own + ratio)]
            slots += [(t, slice(size), t - own + ratio) for t in range(own - ratio, own) if t >= 0]
            values = np.stack([tokens[t, d] for t, d, _ in slots])
            mixed = _pooled(values, np.stack([gates[t, d] + args.position_bias[at, d] for t, d, at in slots]))
            new[b, w] = _in_pairs(_norm(mixed, args.key_norm_weight, args.epsilon), tables[b], (valid + w) * ratio)
        rest.append(np.stack([x[max(overlap + (count - 1) * ratio, 0) if count else 0 :] for x in (tokens, gates)]))
        keys = np.concatenate((args.past_key[b, :valid], new[b]))
        for s in range(length):
            q = _in_pairs(queries[b, s], tables[b], int(args.position_ids[b, s]))
            seen = max(int(args.position_ids[b, s]) + 1, 0) // ratio
            best = _highest(q, keys[:seen], scale, args.head_weights[b, s])[: args.index_topk]
            selected[b, s, : len(best)] = best
    after = held + length if not count else ratio + (held - overlap + length) % ratio
    buffer = np.stack(rest, 1) if rest else np.zeros((2, 0, after, 2 * size), args.past_proj_buffer.dtype)
    return selected, _kept(args.past_key, new, valid, args.past_sequence_length), buffer


@kernel_of_body("PackedSparseAttentionIndexer", domain=MICROSOFT, fresh=True)
def packed_sparse_attention_indexer(args: Arguments) -> tuple[Maybe, ...]:
    """Each request takes its tokens one after the other; as many as `ratio` of them become an entry of its state"""
    bounds = rising("cumulative_sequence_lengths", args.cumulative_sequence_lengths, len(args.query))
    names = ("query", "key", "query_norm_weight", "key_norm_weight", "cos_cache", "sin_cache", "gate", "head_weights")
    wide = Arguments(**vars(args) | {name: widened(x) for name in names if (x := getattr(args, name)) is not None})
    queries, key, tables, scale = _operands(wide, len(bounds) - 1)
    # the gate of a token stands beside its key
    rows, buffer = key, widened(args.past_kv_buffer)
    if args.gate is not None:
        rows = np.concatenate((key, wide.gate), 1)
        buffer = np.concatenate((buffer, widened(args.past_gate_buffer)), 2)
    (batch, _, size), width = args.past_key_state.shape, args.past_kv_buffer.shape[2]
    state, lengths = args.past_key_state.copy(), args.past_state_lengths.copy()
    buffer, status = buffer.copy(), np.zeros(batch, np.int32)
    update = np.zeros((batch, args.state_update_capacity, size), queries.dtype)
    captures = args.state_update_active is None or bool(args.state_update_active[0])
    capacity = args.index_topk if args.token_budget is None else args.token_budget + args.compress_ratio - 1
    selected, counts = np.full((len(queries), capacity), -1, np.int32), np.zeros(len(queries), np.int32)
    for b in range(batch):
        lengths[b], status[b] = _begun(args, b)
        if status[b]:
            continue
        tokens, entries = slice(bounds[b], bounds[b + 1]), int(lengths[b, 0])
        made, kept, transitions = _taken(wide, rows[tokens], list(buffer[b, : lengths[b, 1]]), entries, tables[b])
        if entries + len(made) > args.state_capacity:
            status[b] = 2
            continue
        lengths[b] = entries + len(made), len(kept)
        for n, entry in enumerate(made):
            state[b, entries + n] = entry.astype(state.dtype)
        for n, row in enumerate(kept):
            buffer[b, n] = row
        if args.state_update_capture_count is not None and captures:
            count = min(max(int(args.state_update_capture_count[b]), 0), args.state_update_capacity)
            for n, row in enumerate(transitions[:count]):
                update[b, n] = row
        keys = widened(state[b, : lengths[b, 0]])
        for n, t in enumerate(range(bounds[b], bounds[b + 1])):
            place = int(args.past_sequence_lengths[b]) + n
            if args.position_ids is not None:
                place = max(int(args.position_ids[t]), -1)
            weights = None if args.head_weights is None else wide.head_weights[t]
            chosen = _chosen(args, queries[t], keys, place, tables[b], scale, weights)[:capacity]
            selected[t, : len(chosen)], counts[t] = chosen, len(chosen)
    gates = None if args.past_gate_buffer is None else buffer[..., width:].astype(args.past_gate_buffer.dtype)
    kind = args.past_kv_buffer.dtype
    update_ = None if args.state_update_capture_count is None else update.astype(kind)
    return selected, counts, state, buffer[..., :width].astype(kind), gates, lengths, update_, None, status


def _begun(args: Arguments, b: int) -> tuple[list[int], int]:
    """The entries and the tokens of a request, in their bounds; and 1 if they are others, or do not fit its past, else 0."""
    qsa, ratio = args.policy_mode == "qsa", args.compress_ratio
    past, (entries, held) = int(args.past_sequence_lengths[b]), map(int, args.past_state_lengths[b])
    most = ratio - 1 if qsa else 2 * ratio - 1
    bounded = [min(max(entries, 0), args.state_capacity), min(max(held, 0), most)]
    fits = past == entries * ratio + held if qsa else past >= 0
    return bounded, int(not fits or [entries, held] != bounded)


def _taken(
    args: Arguments, rows: Array, held: list[Array], entries: int, table: Caches
) -> tuple[list[Array], list[Array], list[Array]]:
    """The new entries, the tokens that stay in the buffer, and for each token its entry or its key."""
    ratio, qsa, size = args.compress_ratio, args.policy_mode == "qsa", len(args.query_norm_weight)
    turn = _in_halves if qsa else _in_pairs
    bias = None if args.position_bias is None else widened(args.position_bias)
    before, pending = (held[:ratio], held[ratio:]) if len(held) >= ratio else ([], held)
    made: list[Array] = []
    transitions: list[Array] = []
    for row in rows:
        pending.append(row)
        transitions.append(row[:size])
        if len(pending) == ratio:
            mean = np.mean(pending, 0) if bias is None else _of_window(before, pending, bias, size)
            entry = _norm(mean, args.key_norm_weight, args.epsilon)
            made.append(turn(entry[None], table, (entries + len(made)) * ratio)[0])
            transitions[-1] = made[-1]
            before, pending = ([] if qsa else pending), []
    return made, before + pending, transitions


def _chosen(
    args: Arguments, query: Array, keys: Array, place: int, table: Caches, scale: float, weights: Maybe
) -> list[int]:
    """The entries, or the tokens of those and then of the block that is not complete, that a query at a place chooses."""
    ratio, turn = args.compress_ratio, _in_halves if args.policy_mode == "qsa" else _in_pairs
    visible = keys[: (place + 1) // ratio]
    best = _highest(turn(query, table, place), visible, scale, weights)
    if args.token_budget is None:
        return best
    tokens = [j * ratio + s for j in best[: args.token_budget // ratio] for s in range(ratio)]
    return [*tokens, *range(len(visible) * ratio, place + 1)]


def _of_window(before: list[Array], own: list[Array], bias: Array, size: int) -> Array:
    """The entry of a window and the one before it, of rows that have two series of keys and then two of gates."""
    slots = [(row[:size], row[2 * size : 3 * size] + b[:size]) for row, b in zip(before, bias, strict=False)]
    slots += [(row[size : 2 * size], row[3 * size :] + b[size:]) for row, b in zip(own, bias, strict=True)]
    return _pooled(np.stack([value for value, _ in slots]), np.stack([gate for _, gate in slots]))


def _operands(args: Arguments, samples: int | None = None) -> tuple[Array, Array, list[Caches], float]:
    """The normalized queries (..., heads, size), the keys, the rotary caches of each sample, and the factor of the scores."""
    query, key, size = args.query, args.key, len(args.query_norm_weight)
    if key is None:  # it is the last channels of the query
        query, key = query[..., :-size], query[..., -size:]
    queries = query.reshape(*query.shape[:-1], query.shape[-1] // size, size)
    caches = args.cos_cache, args.sin_cache
    tables = [
        caches if args.cos_cache.ndim == 2 else tuple(x[b] for x in caches)
        for b in range(len(query) if samples is None else samples)
    ]
    scale = 1 / math.sqrt(size) if args.scale is None else args.scale
    if args.policy_mode == "csa":
        scale *= 1 / math.sqrt(queries.shape[-2]) if args.head_weight_scale is None else args.head_weight_scale
    return _norm(queries, args.query_norm_weight, args.epsilon), key, tables, scale


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
