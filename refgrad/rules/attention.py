"""Attention and what stands around it in a transformer: rotary embeddings, caches, and attention as a recurrence."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto, helper

from refgrad.emit import Emitter
from refgrad.graph import SIXTEEN_BIT
from refgrad.lowering.onnx.attention import Tokens, plus
from refgrad.lowering.onnx.indexing import END
from refgrad.registry import rule
from refgrad.rules.activation import swish_slope

Size = int | str  # a dimension: a number, or a tensor of one integer


@rule("Attention")
def attention(
    op: Emitter,
    d_Y: str | None,
    d_present_key: str | None,
    d_present_value: str | None,
    d_qk_matmul_output: str | None,
    Q: str,
    K: str,
    V: str,
    attn_mask: str | None,
    past_key: str | None,
    past_value: str | None,
    nonpad_kv_seqlen: str | None,
    is_causal: int,
    kv_num_heads: int | None,
    left_window_size: int,
    q_num_heads: int | None,
    qk_matmul_output_mode: int,
    right_window_size: int,
    scale: float | None,
    softcap: float,
    softmax_precision: int | None,
) -> tuple[str | None, ...]:
    """dV = PᵀdY, dmask = dS = P·(dP − Σ dP·P), dP = dY·Vᵀ, dQ = σ·dS·K, dK = σ·dSᵀ·Q; 0 in a row that is masked

    P = softmax S is computed anew from S = σ·Q·Kᵀ + mask, or c·tanh(σ·Q·Kᵀ/c) + mask with a soft cap. The cotangents of
    the other outputs join where those are. The query heads that share a key head are taken as one long sequence.
    """
    kind, mode, d_qk = op.type(Q), qk_matmul_output_mode, d_qk_matmul_output
    q, (batch, heads, length, width) = _by_heads(op, Q, q_num_heads)
    k, (_, key_heads, new, _) = _by_heads(op, K, kv_num_heads)
    v, (*_, v_width) = _by_heads(op, V, kv_num_heads)
    past: Size = 0
    if past_key is not None:
        past = _size(op, past_key, 2)
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    total = _add(op, past, new)
    k, v = _matrices(op, k), _matrices(op, op.as_type(v, kind))
    alone = heads == key_heads or _same(op, Q, K, 1)
    rows = length if alone else _times(op, length, _over(op, heads, key_heads))

    def fold(x: str, last: Size) -> str:
        """(batch, heads, length, last) as (batch, key heads, the length of all that share one, last)"""
        return _matrices(op, x if alone else _reshape(op, x, batch, key_heads, rows, last))

    def unfold(x: str, last: Size) -> str:
        return _matrices(op, x if alone else _reshape(op, x, batch, heads, length, last))

    mask = _additive(op, attn_mask, kind, total)
    upper = 0 if is_causal else right_window_size
    bias, lonely = _bias(op, mask, kind, length, total, past, nonpad_kv_seqlen, upper, left_window_size)
    masked = None
    if bias is not None and lonely:
        # A query that sees no key takes no part, whatever its row of Q holds: its scores are made finite, its dY 0.
        masked = op.Equal(op.ReduceMax(bias, [-1], keepdims=1), -math.inf)
        bias = op.Where(masked, 0, bias)

    def kept(x: str) -> str:
        return x if masked is None else op.Where(masked, 0, x)

    factor = _inverse_root(op, width, kind) if scale is None else scale
    scaled = op.Mul(q if d_qk is not None and mode < 3 else kept(q), factor)
    score = unfold(op.grad.FusedMatMul(fold(scaled, width), k, transA=0, transB=1), total)
    tanh = op.Tanh(op.Mul(score, 1 / softcap)) if softcap > 0 else None
    capped = score if tanh is None else op.Mul(tanh, softcap)
    precision = softmax_precision or kind
    wide = op.Softmax(op.as_type(capped if bias is None else op.Add(capped, bias), precision), axis=-1)
    p = op.as_type(_matrices(op, wide), kind)

    d_p = d_v = d_z = None
    if d_Y is not None:
        if _is_packed(op, Q, q_num_heads):
            d_Y = op.Transpose(_reshape(op, d_Y, batch, length, heads, v_width), perm=[0, 2, 1, 3])
        d_y = fold(kept(_matrices(op, d_Y)), v_width)
        d_v = op.as_type(op.grad.FusedMatMul(fold(p, total), d_y, transA=1, transB=0), op.type(V))
        d_p = unfold(op.grad.FusedMatMul(d_y, v, transA=0, transB=1), total)
    if d_qk is not None and mode == 3:
        d_p = plus(op, d_p, kept(d_qk))
    if d_p is not None:
        d_z = op.as_type(op.grad.SoftmaxGrad(op.as_type(d_p, precision), wide, axis=-1), kind)
    if mode == 2:
        d_z = plus(op, d_z, d_qk)
    d_s = plus(op, d_z, d_qk) if mode == 1 else d_z
    if d_s is not None and tanh is not None:
        d_s = op.grad.TanhGrad(d_s, tanh)
    if mode == 0:
        d_s = plus(op, d_s, d_qk)
    d_q = d_k = None
    if d_s is not None:
        d_s = fold(d_s, total)
        d_q = op.Mul(unfold(op.grad.FusedMatMul(d_s, k, transA=0, transB=0), width), factor)
        d_k = op.grad.FusedMatMul(d_s, fold(scaled, width), transA=1, transB=0)
    d_mask = None
    if d_z is not None and mask is not None and op.graph.is_float(str(attn_mask)):
        op.assume(d_z, tuple(map(_dim, (batch, heads, length, total))))
        d_mask = op.grad.BroadcastGradient(d_z, mask, (mask, d_z))
        if mask != attn_mask:
            d_mask = op.as_type(op.Slice(d_mask, [0], op.Shape(attn_mask, start=-1), [-1]), op.type(str(attn_mask)))
    d_past_key, d_k = _split(op, plus(op, d_k, d_present_key), past_key, past, new)
    d_past_value, d_v = _split(op, plus(op, d_v, d_present_value), past_value, past, new)
    d_Q, d_K, d_V = (
        d if d is None else _from_heads(op, d, X, count)
        for d, X, count in ((d_q, Q, q_num_heads), (d_k, K, kv_num_heads), (d_v, V, kv_num_heads))
    )
    return d_Q, d_K, d_V, d_mask, d_past_key, d_past_value


def _by_heads(op: Emitter, X: str, heads: int | None) -> tuple[str, tuple[Size, ...]]:
    """`X` as (batch, heads, sequence, size), and these sizes; with three axes it is (batch, sequence, heads·size)."""
    if not _is_packed(op, X, heads):
        return _matrices(op, X), tuple(_size(op, X, axis) for axis in range(4))
    batch, length = _size(op, X, 0), _size(op, X, 1)
    each = _over(op, _size(op, X, 2), heads or 1)
    parts = op.Transpose(_reshape(op, X, batch, length, heads or 1, each), perm=[0, 2, 1, 3])
    return _matrices(op, parts), (batch, heads or 1, length, each)


def _from_heads(op: Emitter, d: str, X: str, heads: int | None) -> str:
    return op.reshape_like(op.Transpose(d, perm=[0, 2, 1, 3]), X) if _is_packed(op, X, heads) else d


def _is_packed(op: Emitter, X: str, heads: int | None) -> bool:
    """Where the rank is unknown, the number of heads is given for three axes alone."""
    rank = op.rank(X)
    return rank == 3 if rank is not None else bool(heads)


def _additive(op: Emitter, mask: str | None, kind: int, total: Size) -> str | None:
    """What `mask` adds to the scores: −∞ where a truth value is false, and behind its end."""
    if mask is None:
        return None
    shape, low = op.shape(mask), _number(op, -math.inf, kind)
    truth = op.type(mask) == TensorProto.BOOL
    bias = op.Where(mask, _number(op, 0, kind), low) if truth else op.as_type(mask, kind)
    if shape is None or shape[-1] != total or total is None:
        missing = op.Sub(_tensor(op, total), op.Shape(mask, start=-1))
        bias = op.Pad(bias, op.Concat([0], missing, axis=0), low, [-1])
    if shape is not None:
        op.assume(bias, (*shape[:-1], _dim(total)))
    return bias


def _bias(
    op: Emitter,
    mask: str | None,
    kind: int,
    length: Size,
    total: Size,
    past: Size,
    valid: str | None,
    upper: int,
    left: int,
) -> tuple[str | None, bool]:
    """`mask`, and −∞ where the positions forbid it; and whether a query may be left without a key.

    A query at p = i + offset sees the keys from p − left to p + upper, each bound only where it is not negative.
    """
    lonely = mask is not None or valid is not None
    if valid is None and left >= 0:
        sizes = (length, total, past)
        known = [size for size in sizes if isinstance(size, int)]
        lonely = lonely or len(known) < 3 or known[0] + known[2] > known[1] + left
    allowed = []
    if upper >= 0 or left >= 0:
        p = op.Unsqueeze(_range(op, length), [1])
        if valid is not None:
            p = op.Add(p, op.Sub(op.Reshape(valid, [-1, 1, 1, 1]), _tensor(op, length)))
        elif past != 0:
            p = op.Add(p, _tensor(op, past))
        if upper >= 0:
            allowed.append(op.LessOrEqual(_range(op, total), op.Add(p, upper) if upper else p))
        if left >= 0:
            allowed.append(op.GreaterOrEqual(_range(op, total), op.Sub(p, left) if left else p))
    if valid is not None:
        allowed.append(op.Less(_range(op, total), op.Reshape(valid, [-1, 1, 1, 1])))
    if not allowed:
        return mask, lonely
    seen = allowed[0]
    for other in allowed[1:]:
        seen = op.And(seen, other)
    return op.Where(seen, mask or _number(op, 0, kind), _number(op, -math.inf, kind)), lonely


def _range(op: Emitter, size: Size) -> str:
    if isinstance(size, int):
        return op.const(np.arange(size))
    return str(op.Range(0, op.Squeeze(size, [0]), 1))


def _inverse_root(op: Emitter, size: Size, kind: int) -> Size | float:
    if isinstance(size, int):
        return 1 / math.sqrt(max(size, 1))
    return op.as_type(op.Reciprocal(op.Sqrt(op.Cast(size, to=TensorProto.FLOAT))), kind)


def _split(op: Emitter, d: str | None, past: str | None, before: Size, new: Size) -> tuple[str | None, str | None]:
    """The adjoints of what was there and of what was appended, of that of both."""
    if d is None or past is None:
        return None, d
    known = [size for size in (before, new) if isinstance(size, int)]
    sizes = known if len(known) == 2 else op.Concat(_tensor(op, before), _tensor(op, new), axis=0)
    d_past, d_new = op.Split(d, sizes, axis=2, outputs=2)
    return d_past, d_new


def _matrices(op: Emitter, x: str) -> str:
    """`x`, known to have four axes."""
    if op.rank(x) is None:
        op.assume(x, (None,) * 4)
    return x


def _number(op: Emitter, value: float, kind: int) -> str:
    return op.const(np.asarray(value, helper.tensor_dtype_to_np_dtype(kind)))


def _same(op: Emitter, A: str, B: str, axis: int) -> bool:
    """Whether an axis of both is known to have one size."""
    a, b = (op.shape(x) or (None,) * 4 for x in (A, B))
    return len(a) == len(b) == 4 and a[axis] == b[axis] is not None


def _size(op: Emitter, x: str, axis: int) -> Size:
    dim = (op.shape(x) or (None,) * 4)[axis]
    return dim if isinstance(dim, int) else str(op.Shape(x, start=axis, end=axis + 1))


def _dim(size: Size) -> int | None:
    return size if isinstance(size, int) else None


def _tensor(op: Emitter, size: Size) -> str:
    return op.const([size]) if isinstance(size, int) else size


def _add(op: Emitter, a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return b if a == 0 else str(op.Add(_tensor(op, a), _tensor(op, b)))


def _times(op: Emitter, a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    return str(op.Mul(_tensor(op, a), _tensor(op, b)))


def _over(op: Emitter, a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return a // max(b, 1)
    return str(op.Div(_tensor(op, a), _tensor(op, b)))


def _reshape(op: Emitter, x: str, *sizes: Size) -> str:
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) == len(sizes):
        return str(op.Reshape(x, known, allowzero=1 if 0 in known else None))
    if len(known) == len(sizes) - 1 and 0 not in known:
        return str(op.Reshape(x, [size if isinstance(size, int) else -1 for size in sizes]))
    return str(op.Reshape(x, op.Concat(*(_tensor(op, size) for size in sizes), axis=0), allowzero=1))


@rule("LinearAttention")
def linear_attention(
    op: Emitter,
    d_output: str | None,
    d_present_state: str | None,
    query: str,
    key: str,
    value: str,
    past_state: str | None,
    decay: str | None,
    beta: str | None,
    chunk_size: int,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float,
    update_rule: str,
) -> tuple[str | None, ...]:
    """Sₜ = e^g·Sₜ₋₁ + k·uᵀ as products of matrices over `chunk_size` tokens at a time, and the adjoints of these

    Where only the run tells the number of tokens all of them are taken at once.
    """
    kind, shared = op.type(query), q_num_heads // max(kv_num_heads, 1)
    wide = TensorProto.FLOAT if kind in SIXTEEN_BIT else kind

    def apart(x: str, heads: Size, each: Size | None = None, group: int = 1) -> str:
        """(batch, tokens, heads·channels) as (batch, key heads, query heads of one, tokens, channels)"""
        each = _over(op, _size(op, x, 2), _times(op, heads, group)) if each is None else each
        parts = _reshape(op, x, _size(op, x, 0), _size(op, x, 1), heads, group, each)
        moved = op.Transpose(op.as_type(parts, wide), perm=[0, 2, 3, 1, 4])
        batch, tokens, _ = op.shape(x) or (None,) * 3
        op.assume(moved, (batch, _dim(heads), group, tokens, _dim(each)))
        return str(moved)

    gated, delta = "gated" in update_rule, "delta" in update_rule
    count = (op.shape(query) or (None,) * 3)[1]
    width = _over(op, _size(op, query, 2), q_num_heads)
    factor = scale or _inverse_root(op, width, wide)
    whole = {
        "q": apart(query, kv_num_heads, group=shared),
        "k": apart(key, kv_num_heads),
        "v": apart(value, kv_num_heads),
    }
    whole |= {"decay": apart(str(decay), kv_num_heads)} if gated else {}
    whole |= {"rate": apart(str(beta), _size(op, str(beta), 2), 1)} if delta else {}
    d_o = None if d_output is None else op.Mul(apart(d_output, kv_num_heads, group=shared), factor)
    sizes = [0]
    if isinstance(count, int):
        sizes = [min(chunk_size, count - start) for start in range(0, count, max(chunk_size, 1))] or [0]

    def chunks(x: str) -> list[str]:
        return list(op.Split(x, sizes, axis=3, outputs=len(sizes))) if len(sizes) > 1 else [x]

    pieces = {name: chunks(x) for name, x in whole.items()}
    d_pieces = [None] * len(sizes) if d_o is None else chunks(d_o)
    per_head = gated and (op.shape(whole["decay"]) or (None,))[-1] == 1
    state = None if past_state is None else op.Unsqueeze(op.as_type(past_state, wide), [2])
    passed = []
    for position, size in enumerate(sizes):
        parts = {name: each[position] for name, each in pieces.items()}
        known = size if isinstance(count, int) else None
        tokens = Tokens(
            op,
            parts["q"],
            parts["k"],
            parts["v"],
            parts.get("decay"),
            parts.get("rate"),
            state,
            known,
            per_head,
            shared > 1,
        )
        passed.append(tokens)
        state = tokens.after
    d_state = None if d_present_state is None else op.Unsqueeze(op.as_type(d_present_state, wide), [2])
    found = []
    for tokens, piece in zip(reversed(passed), reversed(d_pieces), strict=True):
        found.append(tokens.adjoint(piece, d_state))
        d_state = found[-1]["before"]

    def together(name: str, x: str | None) -> str | None:
        """The adjoint of an input by those of its parts."""
        ds = [part[name] for part in reversed(found)]
        if x is None or None in ds:
            return None
        d = op.Concat(*ds, axis=3) if len(ds) > 1 else ds[0]
        d = op.grad.BroadcastGradient(d, whole[name], (whole[name], d))
        return op.as_type(op.reshape_like(op.Transpose(d, perm=[0, 3, 1, 2, 4]), x), op.type(x))

    d_past = (
        d_state if past_state is None or d_state is None else op.as_type(op.Squeeze(d_state, [2]), op.type(past_state))
    )
    return (
        together("q", query),
        together("k", key),
        together("v", value),
        d_past,
        together("decay", decay if gated else None),
        together("rate", beta if delta else None),
    )


@rule("CausalConvWithState")
def causal_conv_with_state(
    op: Emitter,
    d_output: str | None,
    d_present_state: str | None,
    input: str,
    weight: str,
    bias: str | None,
    past_state: str | None,
    activation: str,
) -> tuple[str | None, ...]:
    """dx_s = Σ_j w_j·dz_(s−j), dw_j = Σ_t dz_t·x_(t+j), db = Σ dz with x = (past, input) and dz = dy·activation′(z)

    z_t = Σ_j w_j·x_(t+j) + b. The sums are products with windows: every x_(t+j) of a t in a row. The present state is the
    end of x.
    """
    length, taps = _size(op, input, 2), _size(op, weight, 2)
    before = _add(op, -1, taps)
    past = past_state
    if past is None:
        batch, channels = _size(op, input, 0), _size(op, input, 1)
        past = op.full(op.Concat(*(_tensor(op, size) for size in (batch, channels, before)), axis=0), 0.0, like=input)
    d_x = d_w = d_b = None
    if d_output is not None:
        column, tap = op.Transpose(weight, perm=[0, 2, 1]), _range(op, taps)
        windows = op.Gather(op.Concat(past, input, axis=2), op.Add(op.Unsqueeze(_range(op, length), [1]), tap), axis=2)
        d_z = d_output
        if activation in ("silu", "swish"):
            z = op.Squeeze(op.MatMul(windows, column), [3])
            d_z = op.Mul(d_z, swish_slope(op, z if bias is None else op.Add(z, op.Unsqueeze(bias, [1])), 1.0)[1])
        padded = op.Pad(d_z, op.Concat(_tensor(op, before), _tensor(op, before), axis=0), None, [2])
        places = op.Sub(op.Unsqueeze(_range(op, _add(op, before, length)), [1]), op.Sub(tap, _tensor(op, before)))
        d_x = op.Squeeze(op.MatMul(op.Gather(padded, places, axis=2), column), [3])
        d_w = op.ReduceSum(op.MatMul(op.Unsqueeze(d_z, [2]), windows), [0], keepdims=0)
        d_b = op.ReduceSum(d_z, [0, 2], keepdims=0)
    if d_present_state is not None:
        ends = op.Concat(_tensor(op, length), [0], axis=0)
        d_x = plus(op, d_x, op.Pad(d_present_state, ends, None, [2]))
    d_past, d_input = _split(op, d_x, past, before, length)
    return d_input, d_w, d_b, d_past


@rule("RotaryEmbedding")
def rotary_embedding(
    op: Emitter,
    d_Y: str,
    X: str,
    cos_cache: str,
    sin_cache: str,
    position_ids: str | None,
    interleaved: int,
    num_heads: int | None,
    rotary_embedding_dim: int,
) -> tuple[str, str, str]:
    """dX = dY turned back (sin negated); of each pair, summed over heads: dcos = dY₁·X₁ + dY₂·X₂, dsin = dY₂·X₁ − dY₁·X₂"""
    attributes = {"interleaved": interleaved, "num_heads": num_heads, "rotary_embedding_dim": rotary_embedding_dim}
    d_X = op.RotaryEmbedding(d_Y, cos_cache, op.Neg(sin_cache), position_ids, **attributes)
    packed = _is_packed(op, X, num_heads)
    pairs = []
    for x in (X, d_Y):
        if packed:
            each = _over(op, _size(op, x, 2), num_heads or 1)
            x = _reshape(op, x, _size(op, x, 0), _size(op, x, 1), num_heads or 1, each)
        if rotary_embedding_dim:
            x = op.Slice(x, [0], [rotary_embedding_dim], [-1])
        if interleaved:
            pairs.append([op.Slice(x, [first], [END], [-1], [2]) for first in (0, 1)])
        else:
            pairs.append(op.Split(x, axis=-1, num_outputs=2, outputs=2))
    (x1, x2), (y1, y2) = pairs
    d_cos, d_sin = op.Add(op.Mul(y1, x1), op.Mul(y2, x2)), op.Sub(op.Mul(y2, x1), op.Mul(y1, x2))
    shape, adjoints = op.shape(X), []
    for d, cache in ((d_cos, cos_cache), (d_sin, sin_cache)):
        d = op.ReduceSum(d, [2 if packed else 1], keepdims=0)
        if position_ids is not None:
            adjoints.append(op.grad.GatherGrad(op.shape_of(cache), position_ids, d, axis=0))
            continue
        angles = op.shape(cache)
        if shape is not None and angles is not None:
            op.assume(d, (shape[0], shape[1 if packed else 2], angles[-1]))
        adjoints.append(op.grad.BroadcastGradient(d, cache, (cache, d)))
    return d_X, adjoints[0], adjoints[1]


@rule("TensorScatter", wrt=["past_cache", "update"])
def tensor_scatter(
    op: Emitter, d_present_cache: str, update: str, write_indices: str | None, axis: int, mode: str
) -> tuple[str, str]:
    """dpast = dy, 0 where it was overwritten; dupdate = dy where it was written"""
    d_past = op.TensorScatter(d_present_cache, op.zeros_like(update), write_indices, axis=axis, mode=mode)
    length = op.Shape(update, start=axis, end=axis + 1 or None)
    if write_indices is None:
        return d_past, op.Slice(d_present_cache, [0], length, [axis])
    places = op.Add(op.Unsqueeze(write_indices, [1]), op.Range(0, op.Squeeze(length, [0]), 1))
    if mode == "circular":
        places = op.Mod(places, op.Shape(d_present_cache, start=axis, end=axis + 1 or None))
    # (batch, sequence), and an axis of size 1 for every other one of the update
    rank = op.rank(update)
    if rank is None:
        ones = op.full(op.Sub(op.Shape(op.Shape(update)), [axis + 1 if axis >= 0 else 1 - axis]), 1, like=length)
    else:
        axis %= rank
        ones = op.const([1] * (rank - axis - 1))
    known = op.const([1] * (axis - 1 if axis >= 0 else -axis - 1))
    between, after = (known, ones) if axis >= 0 else (ones, known)
    sizes = op.Concat(op.Shape(update, end=1), between, length, after, axis=0)
    places = op.Expand(op.Reshape(places, sizes, allowzero=1), op.shape_of(update))
    return d_past, op.GatherElements(d_present_cache, places, axis=axis)
