"""Attention: the layout of its heads, its mask, its probabilities; and linear attention over some tokens at once.

With B batches, H query heads on H' key heads, L queries of width D, T keys (past keys, then new ones), values
of width E, the scale σ, the soft cap c and the additive mask M (a row of it that is −∞ throughout is blind):

    Q: (B, H, L, D)    K: (B, H', T, D)    V: (B, H', T, E)    Y: (B, H, L, E)    S, C, Z, P and theirs: (B, H, L, T)
    S = σ·Q·Kᵀ         C = c·tanh(S/c)     Z = C + M           P = softmax Z      Y = P·V

    dP = dY·Vᵀ         dZ = P·(dP − Σ dP·P)        dC = dZ         dS = dC·(1 − tanh²(S/c))
    dQ = σ·dS·K        dK = dSᵀ·(σ·Q)              dV = Pᵀ·dY      dM = dZ, summed where M was broadcast

The fourth output is one of S, C, Z, P, as qk_matmul_output_mode is 0, 1, 2, 3; its cotangent joins dS, dC, dZ or dP. For
the products the H/H' query heads that share a key head are folded into one of L·H/H' queries, (B, H', L·H/H', ·).

For one head of linear attention with the decays g, G_t = Σ_{r≤t} g_r and E_ts = exp(G_t − G_s) for s ≤ t, 0 otherwise
(per channel, or one for all of them), the recurrence S ← e^g·S + k·uᵀ, o = Sᵀq from the state S₀ is

    A_ts = Σ q_t·k_s·E_ts, N_ts = Σ k_t·k_s·E_ts (s < t), e_t = exp(G_t), f_s = exp(G_T − G_s)
    o = (q·e)S₀ + A·u        S_T = e_T·S₀ + (k·f)ᵀu
    u = v, or for the delta rules u = β·(v − (k·e)S₀ − N·u) = W·β·(v − (k·e)S₀), W = (1 + β·N)⁻¹

The exponents are sums of the g between two tokens, never differences of two sums: a decay of −∞ is exact. The tensors
have the axes (batch, key heads, query heads of one key head, tokens, channels).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np
from onnx import TensorProto, helper

from refgrad.builder.op import Emitter
from refgrad.formulas.indexing import join, up_to

Size = int | str  # a dimension: a number, or a tensor of one integer

_MOST_CHUNKS = 4096  # that are written out; of more tokens only the run tells the number
_LEVELS = 16  # of a triangle whose size only the run tells: up to 65,536 tokens, whose matrix would not fit


def plus(op: Emitter, a: str | None, b: str | None) -> str | None:
    """a + b, where None is zero."""
    return a or b if a is None or b is None else op.Add(a, b)


def size_of(op: Emitter, x: str, axis: int) -> Size:
    """One of the four sizes of `x`, or of the first ones."""
    known = (op.shape(x) or (None,) * 4)[axis]
    return known if isinstance(known, int) else op.Shape(x, start=axis, end=axis + 1)


def tensor(op: Emitter, *sizes: Size) -> str:
    """Sizes one after the other."""
    return join(op, *(op.const([size]) if isinstance(size, int) else size for size in sizes))


def dims(sizes: Sequence[Size]) -> tuple[int | None, ...]:
    """The sizes as integers, None for those that are not known."""
    return tuple(size if isinstance(size, int) else None for size in sizes)


def add(op: Emitter, a: Size, b: Size) -> Size:
    """The sum of two sizes."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return b if a == 0 else op.Add(tensor(op, a), tensor(op, b))


def times(op: Emitter, a: Size, b: Size) -> Size:
    """The product of two sizes."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    return op.Mul(tensor(op, a), tensor(op, b))


def over(op: Emitter, a: Size, b: Size) -> Size:
    """a/b rounded down; a where b is 0."""
    if isinstance(a, int) and isinstance(b, int):
        return a // max(b, 1)
    return op.Div(tensor(op, a), tensor(op, b))


def inverse_root(op: Emitter, size: Size, kind: int) -> Size | float:
    """1/√size, of element type `kind` where only the run tells the size."""
    if isinstance(size, int):
        return 1 / math.sqrt(max(size, 1))
    wide = TensorProto.DOUBLE if kind == TensorProto.DOUBLE else TensorProto.FLOAT
    return op.as_type(op.Reciprocal(op.Sqrt(op.Cast(size, to=wide))), kind)


def places(op: Emitter, size: Size) -> str:
    """0, 1, ... up to `size`."""
    return up_to(op, size) if isinstance(size, int) else op.Range(0, op.Squeeze(size, [0]), 1)


def reshape(op: Emitter, x: str, *sizes: Size) -> str:
    """The elements of `x` in the shape of these sizes."""
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) == len(sizes):
        return op.Reshape(x, known, allowzero=1 if 0 in known else None)
    if len(known) == len(sizes) - 1 and 0 not in known:
        return op.Reshape(x, [size if isinstance(size, int) else -1 for size in sizes])
    return op.Reshape(x, tensor(op, *sizes), allowzero=1)


def split(op: Emitter, d: str | None, past: str | None, before: Size, new: Size) -> tuple[str | None, str | None]:
    """The cotangents of `past` and of the appended part, split from `d`, the cotangent of their concatenation."""
    if d is None or past is None:
        return None, d
    d_past, d_new = op.Split(d, tensor(op, before, new), axis=2, outputs=2)
    return d_past, d_new


def is_packed(op: Emitter, X: str, heads: int | None) -> bool:
    """True if the inputs have three axes: if the rank is unknown, the attributes with the numbers of heads tell."""
    rank = op.rank(X)
    return rank == 3 if rank is not None else bool(heads)


def matmul(op: Emitter, a: str, b: str, transA: int = 0, transB: int = 0, rank: int = 4) -> str:
    """a·b of tensors that are known to have `rank` axes, each of the last two transposed or not."""
    return op.grad.FusedMatMul(_known(op, a, rank), _known(op, b, rank), transA=transA, transB=transB)


def _known(op: Emitter, x: str, rank: int = 4) -> str:
    if op.rank(x) is None:
        op.assume(x, (None,) * rank)
    return x


def _number(op: Emitter, value: float, kind: int) -> str:
    return op.const(np.asarray(value, helper.tensor_dtype_to_np_dtype(kind)))


class Heads:
    """The sizes (batch, heads, sequence, channels) of Q, K, V and Y, given so or packed: (batch, sequence, heads·channels)."""

    def __init__(
        self, op: Emitter, Q: str, K: str, V: str, past_key: str | None, heads: int | None, key_heads: int | None
    ) -> None:
        self.op, self.packed = op, is_packed(op, Q, heads)
        self.Q, self.K, self.V = self._sizes(Q, heads), self._sizes(K, key_heads), self._sizes(V, key_heads)
        self.batch, self.heads, self.queries, self.width = self.Q
        self.Y = (*self.Q[:3], self.V[3])
        self.past: Size = 0 if past_key is None else size_of(op, past_key, 2)
        self.new = self.K[2]
        self.keys = add(op, self.past, self.new)
        self.scores = (*self.Q[:3], self.keys)
        q, k = (op.shape(x) or () for x in (Q, K))
        same = len(q) == len(k) == 4 and q[1] == k[1] is not None
        self.alone = same or self.heads == self.K[1]  # no two query heads share a key head
        self.folded = self.queries if self.alone else times(op, self.queries, over(op, self.heads, self.K[1]))

    def apart(self, x: str, sizes: Sequence[Size]) -> str:
        """`x` with its heads as an axis, of these sizes."""
        if self.packed:
            batch, heads, length, each = sizes
            x = self.op.Transpose(reshape(self.op, x, batch, length, heads, each), perm=[0, 2, 1, 3])
        return _known(self.op, x)

    def together(self, d: str | None, X: str) -> str | None:
        """The cotangent of `X`, from `d`, which has the heads as an axis."""
        if d is None or not self.packed:
            return d
        return self.op.reshape_like(self.op.Transpose(d, perm=[0, 2, 1, 3]), X)

    def fold(self, x: str, last: Size) -> str:
        """(batch, heads, queries, last) as (batch, key heads, the queries of all that share one, last)"""
        return x if self.alone else reshape(self.op, x, self.batch, self.K[1], self.folded, last)

    def unfold(self, x: str, last: Size) -> str:
        """The inverse of `fold`."""
        return _known(self.op, x if self.alone else reshape(self.op, x, self.batch, self.heads, self.queries, last))

    def _sizes(self, X: str, heads: int | None) -> tuple[Size, ...]:
        if not self.packed:
            return tuple(size_of(self.op, X, axis) for axis in range(4))
        batch, length, channels = (size_of(self.op, X, axis) for axis in range(3))
        return batch, heads or 1, length, over(self.op, channels, heads or 1)


class Mask:
    """The bias that is added to the scores, or None, and its `blind` rows: they are −∞ throughout, and are taken for 0.

    A blind query takes no part, whatever its row of Q holds: its scores are made finite, its dY 0. The query at
    p = i + offset sees the keys from p − left to p + upper, each bound only where it is not negative, and before `valid`.
    """

    def __init__(
        self, op: Emitter, at: Heads, given: str | None, valid: str | None, kind: int, upper: int, left: int
    ) -> None:
        self.op, self.at, self.given, self.kind = op, at, given, kind
        self.additive = self._additive()
        self.added, self.blind = self.additive, None
        seen = self._seen(valid, upper, left)
        if seen is not None:
            self.added = op.Where(seen, self.additive or _number(op, 0, kind), _number(op, -math.inf, kind))
        if self.added is not None and (given is not None or valid is not None or self._may_leave_all(left)):
            # Not by the maximum: in ONNX Runtime's CUDA kernel that of infinities alone is not −∞.
            hidden = op.Cast(op.Equal(self.added, -math.inf), to=TensorProto.FLOAT)
            self.blind = op.Greater(op.ReduceMin(hidden, [-1], keepdims=1), np.float32(0))
            self.added = op.Where(self.blind, 0, self.added)

    def kept(self, x: str) -> str:
        """`x`, 0 in a row that is blind."""
        return x if self.blind is None else self.op.Where(self.blind, 0, x)

    def adjoint(self, d: str | None) -> str | None:
        """The cotangent of the given mask, from `d`, the cotangent of the masked scores; None without a float mask."""
        op, given = self.op, self.given
        if d is None or given is None or self.additive is None or not op.graph.is_float(given):
            return None
        op.assume(d, dims(self.at.scores))
        d = op.grad.BroadcastGradient(d, self.additive, (self.additive, d))
        if self.additive == given:
            return d
        return op.as_type(op.Slice(d, [0], op.Shape(given, start=-1), [-1]), op.type(given))

    def _additive(self) -> str | None:
        """The given mask as numbers: −∞ where a truth value is false, and behind its end."""
        op, mask, keys = self.op, self.given, self.at.keys
        if mask is None:
            return None
        known, low = op.shape(mask), _number(op, -math.inf, self.kind)
        truth = op.type(mask) == TensorProto.BOOL
        added = op.Where(mask, _number(op, 0, self.kind), low) if truth else op.as_type(mask, self.kind)
        if known is None or known[-1] != keys:
            missing = op.Sub(tensor(op, keys), op.Shape(mask, start=-1))
            added = op.Pad(added, op.Concat([0], missing, axis=0), low, [-1])
        if known is not None:
            op.assume(added, (*known[:-1], *dims([keys])))
        return added

    def _seen(self, valid: str | None, upper: int, left: int) -> str | None:
        """The condition under which the positions let a query see a key; None: always."""
        op, at, allowed = self.op, self.at, []
        end = None if valid is None else op.Reshape(valid, [-1, 1, 1, 1])
        if upper >= 0 or left >= 0:
            p, keys = op.Unsqueeze(places(op, at.queries), [1]), places(op, at.keys)
            if end is not None:
                p = op.Add(p, op.Sub(end, tensor(op, at.queries)))
            elif at.past != 0:
                p = op.Add(p, tensor(op, at.past))
            if upper >= 0:
                allowed.append(op.LessOrEqual(keys, op.Add(p, upper) if upper else p))
            if left >= 0:
                allowed.append(op.GreaterOrEqual(keys, op.Sub(p, left) if left else p))
        if end is not None:
            allowed.append(op.Less(places(op, at.keys), end))
        return reduce(op.And, allowed) if allowed else None

    def _may_leave_all(self, left: int) -> bool:
        """True if the window of the last query may lie behind the last key."""
        queries, keys, past = dims((self.at.queries, self.at.keys, self.at.past))
        return left >= 0 and (queries is None or keys is None or past is None or queries + past > keys + left)


class AttentionWeights:
    """P = softmax (c·tanh(S/c) + mask) of the scores S, computed in the type `precision`; without a soft cap c, of S + mask."""

    def __init__(self, op: Emitter, scores: str, mask: Mask, softcap: float, precision: int) -> None:
        self.op, self.mask, self.precision = op, mask, precision
        self.tanh = op.Tanh(op.Mul(scores, 1 / softcap)) if softcap > 0 else None
        capped = scores if self.tanh is None else op.Mul(self.tanh, softcap)
        masked = capped if mask.added is None else op.Add(capped, mask.added)
        self.softmax = op.Softmax(op.as_type(masked, precision), axis=-1)
        self.P = op.as_type(_known(op, self.softmax), mask.kind)

    def adjoint(self, d_P: str | None, d_qk: str | None, mode: int) -> tuple[str | None, str | None]:
        """The cotangents of the scores and of the masked scores, from the cotangents of P and the output that `mode` chose."""
        op, d_Z = self.op, None
        joins = [d_qk if mode == place else None for place in range(4)]  # S, C, Z, P
        if joins[3] is not None:
            d_P = plus(op, d_P, self.mask.kept(joins[3]))
        if d_P is not None:
            d_Z = op.grad.SoftmaxGrad(op.as_type(d_P, self.precision), self.softmax, axis=-1)
            d_Z = op.as_type(d_Z, self.mask.kind)
        d_Z = plus(op, d_Z, joins[2])
        d_S = plus(op, d_Z, joins[1])
        if d_S is not None and self.tanh is not None:
            d_S = op.grad.TanhGrad(d_S, self.tanh)
        return plus(op, d_S, joins[0]), d_Z


class ChunkedRecurrence:
    """LinearAttention of `inputs` (q, k, v, and decay and rate or None) over chunks of that many tokens, one after the other.

    Where only the run tells the number of tokens, all of them are taken at once.
    """

    def __init__(
        self, op: Emitter, inputs: Mapping[str, str | None], before: str | None, chunk: int, grouped: bool
    ) -> None:
        self.op, self.inputs = op, inputs
        count = (op.shape(str(inputs["q"])) or (None,) * 4)[3]
        self.lengths = [0]
        if isinstance(count, int) and count > _MOST_CHUNKS * max(chunk, 1):
            count = None
        if isinstance(count, int):
            self.lengths = [min(chunk, count - start) for start in range(0, count, max(chunk, 1))] or [0]
        q, k, v, decay, rate = (self._cut(inputs[name]) for name in ("q", "k", "v", "decay", "rate"))
        gate = inputs["decay"]
        per_head = gate is not None and (op.shape(gate) or (None,))[-1] == 1
        self.chunks: list[Tokens] = []
        for i, length in enumerate(self.lengths):
            known = length if isinstance(count, int) else None
            parts = str(q[i]), str(k[i]), str(v[i]), decay[i], rate[i]
            tokens = Tokens(op, *parts, before, known, per_head, grouped)
            self.chunks.append(tokens)
            before = tokens.after

    def adjoint(self, d_o: str | None, d_after: str | None) -> dict[str, str | None]:
        """The cotangents of the inputs and of the state `before`, from the cotangents of o and of the state `after`."""
        op, found = self.op, []
        for tokens, part in zip(reversed(self.chunks), reversed(self._cut(d_o)), strict=True):
            found.append(tokens.adjoint(part, d_after))
            d_after = found[-1]["before"]
        adjoints = {"before": d_after}
        for name, x in self.inputs.items():
            parts = [d for each in reversed(found) if (d := each[name]) is not None]
            adjoints[name] = None
            if x is not None and len(parts) == len(found):
                d = op.Concat(*parts, axis=3) if len(parts) > 1 else parts[0]
                adjoints[name] = op.grad.BroadcastGradient(d, x, (x, d))
        return adjoints

    def _cut(self, x: str | None) -> list[str | None]:
        if x is None or len(self.lengths) == 1:
            return [x] * len(self.lengths)
        return list(self.op.Split(x, self.lengths, axis=3, outputs=len(self.lengths)))


class Tokens:
    """Some consecutive tokens, and the state `before` them (None: zeros); `after` is the one behind them.

    `decay` is None, or has one channel (`per_head`) or as many as the keys; `rate` is the β of the delta rules.
    """

    def __init__(
        self,
        op: Emitter,
        q: str,
        k: str,
        v: str,
        decay: str | None,
        rate: str | None,
        before: str | None,
        count: int | None,
        per_head: bool,
        grouped: bool,
    ) -> None:
        self.op, self.q, self.k, self.v, self.decay, self.rate, self.before = op, q, k, v, decay, rate, before
        self.per_head, self.grouped = per_head or decay is None, grouped
        place = up_to(op, count) if count is not None else self._places()
        row, column = op.Unsqueeze(place, [1]), op.Unsqueeze(place, [0])
        past, present = op.Greater(row, column), op.GreaterOrEqual(row, column)
        from_start = to_end = through = None
        if decay is None:
            self.weights = op.Where(present, op.const(1.0, like=q), 0.0)
        else:
            axis = op.const(np.array(3))
            steps = decay if per_head else op.Unsqueeze(decay, [4])
            mask, kept = (past, present) if per_head else (op.Unsqueeze(past, [2]), op.Unsqueeze(present, [2]))
            sums = op.CumSum(op.Where(mask, steps, 0.0), axis)
            self.weights = op.Where(kept, op.Exp(sums), 0.0)
            from_start = op.Exp(op.CumSum(decay, axis))
            to_end = op.Exp(op.CumSum(decay, axis, exclusive=1, reverse=1))
            through = op.Exp(op.Transpose(op.ReduceSum(decay, [3], keepdims=1), perm=[0, 1, 2, 4, 3]))
        self.from_start, self.to_end, self.through = from_start, to_end, through
        self.keys = None if self.per_head else op.Mul(self.weights, op.Unsqueeze(k, [3]))
        self.A = self._pair(q)
        self.u, self.rest = v, v
        if rate is not None:
            self.past = past
            self.N = op.Where(past, self._pair(k), 0.0)
            held = v if before is None else op.Sub(v, op.MatMul(self._times(k, from_start), before))
            self.W = self._inverse(op.Mul(rate, self.N), place, count)
            self.u = op.MatMul(self.W, op.Mul(rate, held))
            self.rest = op.Sub(held, op.MatMul(self.N, self.u))
        written = self._product(self._times(k, to_end), self.u, transA=1)
        self.after = written if before is None else op.Add(self._times(before, through), written)

    def adjoint(self, d_o: str | None, d_after: str | None) -> dict[str, str | None]:
        """The cotangents of q, k, v, decay, rate and before, from the cotangents of o and after."""
        op = self.op
        d_u = d_q = d_rows = d_columns = d_before = d_gate = d_rate = None
        if d_o is not None:
            d_A = self._product(d_o, self.u, transB=1)
            d_u = self._all_heads(self._product(self.A, d_o, transA=1))
            d_q = self._rows(d_A)
            d_columns = self._all_heads(self._columns(d_A, self.q))
            if self.before is not None:
                d_q = op.Add(d_q, self._times(self._product(d_o, self.before, transB=1), self.from_start))
                d_before = self._all_heads(self._product(self._times(self.q, self.from_start), d_o, transA=1))
        if d_after is not None:
            d_u = plus(op, d_u, op.MatMul(self._times(self.k, self.to_end), d_after))
            d_columns = plus(op, d_columns, self._times(self._product(self.u, d_after, transB=1), self.to_end))
            if self.before is not None:
                d_before = plus(op, d_before, self._times(d_after, self.through))
        d_v = d_u
        if self.rate is not None:
            d_r = self._product(self.W, str(d_u), transA=1)
            d_v = op.Mul(self.rate, d_r)
            d_rate = op.ReduceSum(op.Mul(d_r, self.rest), [4], keepdims=1)
            d_N = op.Where(self.past, op.Neg(self._product(d_v, self.u, transB=1)), 0.0)
            d_rows = self._rows(d_N)
            d_columns = plus(op, d_columns, self._columns(d_N, self.k))
            if self.before is not None:
                d_rows = op.Sub(d_rows, self._times(self._product(d_v, self.before, transB=1), self.from_start))
                read = self._product(self._times(self.k, self.from_start), d_v, transA=1)
                d_before = op.Sub(d_before, read) if d_before is not None else op.Neg(read)
        if self.decay is not None:
            # G_t grows what row t reads and shrinks what column t wrote; dg is the sum of dG from t on.
            d_gate = op.Neg(op.Mul(self.k, d_columns))
            if d_q is not None:
                d_gate = op.Add(d_gate, self._all_heads(op.Mul(self.q, d_q)))
            if d_rows is not None:
                d_gate = op.Add(d_gate, op.Mul(self.k, d_rows))
            d_gate = op.CumSum(d_gate, op.const(np.array(3)), reverse=1)
            if d_after is not None:
                last = op.ReduceSum(op.Mul(self.after, d_after), [4], keepdims=1)
                d_gate = op.Add(d_gate, op.Transpose(last, perm=[0, 1, 2, 4, 3]))
            if self.per_head:
                d_gate = op.ReduceSum(d_gate, [4], keepdims=1)
        d_k = plus(op, d_rows, d_columns)
        return {"q": d_q, "k": d_k, "v": d_v, "decay": d_gate, "rate": d_rate, "before": d_before}

    def _pair(self, x: str) -> str:
        """Σ_d x_t·k_s·E_ts"""
        if self.keys is None:
            return self.op.Mul(self._product(x, self.k, transB=1), self.weights)
        return self.op.Squeeze(self.op.MatMul(self.keys, self.op.Unsqueeze(x, [5])), [5])

    def _rows(self, d: str) -> str:
        """Σ_s d_ts·k_s·E_ts"""
        if self.keys is None:
            return self.op.MatMul(self.op.Mul(d, self.weights), self.k)
        return self.op.Squeeze(self.op.MatMul(self.op.Unsqueeze(d, [4]), self.keys), [4])

    def _columns(self, d: str, x: str) -> str:
        """Σ_t d_ts·x_t·E_ts"""
        if self.keys is None:
            return self._product(self.op.Mul(d, self.weights), x, transA=1)
        read = self.op.Mul(self.op.Unsqueeze(d, [5]), self.op.Unsqueeze(x, [4]))
        return self.op.ReduceSum(self.op.Mul(self.weights, read), [3], keepdims=0)

    def _product(self, a: str, b: str, transA: int = 0, transB: int = 0) -> str:
        return matmul(self.op, a, b, transA, transB, rank=5)

    def _times(self, x: str, factor: str | None) -> str:
        return x if factor is None else self.op.Mul(x, factor)

    def _all_heads(self, x: str) -> str:
        """The sum over the query heads of a key head."""
        return self.op.ReduceSum(x, [2], keepdims=1) if self.grouped else x

    def _places(self) -> str:
        return self.op.Range(0, self.op.Squeeze(self.op.Shape(self.q, start=3, end=4), [0]), 1)

    def _inverse(self, N: str, place: str, count: int | None) -> str:
        """(1 + N)⁻¹ of a strictly lower triangle, from blocks of one row: two inverted neighbours give one block.

        ((A, 0), (C, B))⁻¹ = ((A⁻¹, 0), (−B⁻¹CA⁻¹, B⁻¹)); a sum of powers of N would cancel.
        """
        op = self.op
        row, column = op.Unsqueeze(place, [1]), op.Unsqueeze(place, [0])

        def blocks(size: int) -> str:
            """`N` where it connects a block of that size with the one before, of two that make one."""
            i, j = op.Div(row, size), op.Div(column, size)
            return op.Where(op.And(op.Equal(i, op.Add(j, 1)), op.Equal(op.Mod(j, 2), 0)), N, 0.0)

        X = op.Where(op.Equal(row, column), 1.0, op.Neg(blocks(1)))
        for level in range(1, _LEVELS if count is None else max(count - 1, 0).bit_length()):
            X = op.Sub(X, op.MatMul(op.MatMul(X, blocks(2**level)), X))
        return str(X)
