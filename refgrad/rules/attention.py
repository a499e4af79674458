"""Attention and its surroundings in a transformer: rotary embeddings, caches, and attention as a recurrence."""

from __future__ import annotations

from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.formulas.indexing import END
from refgrad.protos.types import SIXTEEN_BIT
from refgrad.rules.activation import swish_slope
from refgrad.rules.attention_formulas import (
    AttentionWeights,
    ChunkedRecurrence,
    Heads,
    Mask,
    Size,
    add,
    dims,
    inverse_root,
    is_packed,
    matmul,
    over,
    places,
    plus,
    reshape,
    size_of,
    split,
    tensor,
    times,
)
from refgrad.tables.registry import rule


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

    P = softmax S is computed again from S = σ·Q·Kᵀ + mask, or c·tanh(σ·Q·Kᵀ/c) + mask with a soft cap. The cotangents of
    the other outputs are added where those outputs were computed. The query heads that share a key head are taken as one
    long sequence.
    """
    kind, mode, d_qk = op.type(Q), qk_matmul_output_mode, d_qk_matmul_output
    at = Heads(op, Q, K, V, past_key, q_num_heads, kv_num_heads)
    q, k, v = at.apart(Q, at.Q), at.apart(K, at.K), at.apart(V, at.V)
    if past_key is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    v = op.as_type(v, kind)
    upper = 0 if is_causal else right_window_size
    mask = Mask(op, at, attn_mask, nonpad_kv_seqlen, kind, upper, left_window_size)
    factor = inverse_root(op, at.width, kind) if scale is None else scale
    q = at.fold(op.Mul(q if d_qk is not None and mode < 3 else mask.kept(q), factor), at.width)
    scores = at.unfold(matmul(op, q, k, transB=1), at.keys)
    weights = AttentionWeights(op, scores, mask, softcap, softmax_precision or kind)

    d_P = d_v = d_q = d_k = None
    if d_Y is not None:
        d_y = at.fold(mask.kept(at.apart(d_Y, at.Y)), at.V[3])
        d_v = op.as_type(matmul(op, at.fold(weights.P, at.keys), d_y, transA=1), op.type(V))
        d_P = at.unfold(matmul(op, d_y, v, transB=1), at.keys)
    d_S, d_Z = weights.adjoint(d_P, d_qk, mode)
    if d_S is not None:
        d_S = at.fold(d_S, at.keys)
        d_q = op.Mul(at.unfold(matmul(op, d_S, k), at.width), factor)
        d_k = matmul(op, d_S, q, transA=1)
    d_past_key, d_k = split(op, plus(op, d_k, d_present_key), past_key, at.past, at.new)
    d_past_value, d_v = split(op, plus(op, d_v, d_present_value), past_value, at.past, at.new)
    d_Q, d_K, d_V = at.together(d_q, Q), at.together(d_k, K), at.together(d_v, V)
    return d_Q, d_K, d_V, mask.adjoint(d_Z), d_past_key, d_past_value


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
    """Sₜ = e^g·Sₜ₋₁ + k·uᵀ as products of matrices over `chunk_size` tokens at a time, and their gradients

    Where only the run tells the number of tokens, all of them are taken at once.
    """
    kind, shared = op.type(query), q_num_heads // max(kv_num_heads, 1)
    wide = TensorProto.FLOAT if kind in SIXTEEN_BIT else kind

    def apart(x: str, heads: Size = kv_num_heads, group: int = 1, each: Size | None = None) -> str:
        """(batch, tokens, heads·channels) as (batch, key heads, query heads of one, tokens, channels)"""
        batch, tokens, channels = (size_of(op, x, axis) for axis in range(3))
        each = over(op, channels, times(op, heads, group)) if each is None else each
        moved = op.Transpose(op.as_type(reshape(op, x, batch, tokens, heads, group, each), wide), perm=[0, 2, 3, 1, 4])
        first, second, _ = op.shape(x) or (None,) * 3
        op.assume(moved, (first, *dims((heads,)), group, second, *dims((each,))))
        return str(moved)

    def together(d: str | None, x: str | None) -> str | None:
        if d is None or x is None:
            return None
        return op.as_type(op.reshape_like(op.Transpose(d, perm=[0, 3, 1, 2, 4]), x), op.type(x))

    def state(x: str | None) -> str | None:
        return None if x is None else op.Unsqueeze(op.as_type(x, wide), [2])

    inputs = {
        "q": apart(query, group=shared),
        "k": apart(key),
        "v": apart(value),
        "decay": apart(str(decay)) if "gated" in update_rule else None,
        "rate": apart(str(beta), size_of(op, str(beta), 2), each=1) if "delta" in update_rule else None,
    }
    factor = scale or inverse_root(op, over(op, size_of(op, query, 2), q_num_heads), wide)
    d_o = None if d_output is None else op.Mul(apart(d_output, group=shared), factor)
    d = ChunkedRecurrence(op, inputs, state(past_state), chunk_size, shared > 1).adjoint(d_o, state(d_present_state))
    d_past = d["before"]
    if past_state is not None and d_past is not None:
        d_past = op.as_type(op.Squeeze(d_past, [2]), op.type(past_state))
    d_q, d_k, d_v = together(d["q"], query), together(d["k"], key), together(d["v"], value)
    return d_q, d_k, d_v, d_past, together(d["decay"], decay), together(d["rate"], beta)


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

    z_t = Σ_j w_j·x_(t+j) + b. The sums are products with windows: all x_(t+j) of one t in a row. The present state is the
    end of x.
    """
    length, taps = size_of(op, input, 2), size_of(op, weight, 2)
    before = add(op, -1, taps)
    past = past_state
    if past is None:
        batch, channels = size_of(op, input, 0), size_of(op, input, 1)
        past = op.full(tensor(op, batch, channels, before), 0.0, like=input)
    d_x = d_w = d_b = None
    if d_output is not None:
        column, tap = op.Transpose(weight, perm=[0, 2, 1]), places(op, taps)
        windows = op.Gather(op.Concat(past, input, axis=2), op.Add(op.Unsqueeze(places(op, length), [1]), tap), axis=2)
        d_z = d_output
        if activation in ("silu", "swish"):
            z = op.Squeeze(op.MatMul(windows, column), [3])
            d_z = op.Mul(d_z, swish_slope(op, z if bias is None else op.Add(z, op.Unsqueeze(bias, [1])), 1.0)[1])
        padded = op.Pad(d_z, tensor(op, before, before), None, [2])
        reads = op.Sub(op.Unsqueeze(places(op, add(op, before, length)), [1]), op.Sub(tap, tensor(op, before)))
        d_x = op.Squeeze(op.MatMul(op.Gather(padded, reads, axis=2), column), [3])
        d_w = op.ReduceSum(op.MatMul(op.Unsqueeze(d_z, [2]), windows), [0], keepdims=0)
        d_b = op.ReduceSum(d_z, [0, 2], keepdims=0)
    if d_present_state is not None:
        d_x = plus(op, d_x, op.Pad(d_present_state, tensor(op, length, 0), None, [2]))
    d_past, d_input = split(op, d_x, past, before, length)
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
    """dX = dY turned back (sin negated); for each pair, summed over heads: dcos = dY₁·X₁ + dY₂·X₂, dsin = dY₂·X₁ − dY₁·X₂"""
    attributes = {"interleaved": interleaved, "num_heads": num_heads, "rotary_embedding_dim": rotary_embedding_dim}
    d_X = op.RotaryEmbedding(d_Y, cos_cache, op.Neg(sin_cache), position_ids, **attributes)
    packed = is_packed(op, X, num_heads)
    pairs = []
    for x in (X, d_Y):
        if packed:
            each = over(op, size_of(op, x, 2), num_heads or 1)
            x = reshape(op, x, size_of(op, x, 0), size_of(op, x, 1), num_heads or 1, each)
        if rotary_embedding_dim:
            x = op.Slice(x, [0], [rotary_embedding_dim], [-1])
        if interleaved:
            pairs.append([op.Slice(x, [first], [END], [-1], [2]) for first in (0, 1)])
        else:
            pairs.append([*op.Split(x, axis=-1, num_outputs=2, outputs=2)])
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
