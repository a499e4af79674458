"""Linear attention over some tokens at once, and its adjoint: products of matrices, no loop.

For one head with the decays g, G_t = Σ_{r≤t} g_r and E_ts = exp(G_t − G_s) for s ≤ t, 0 otherwise (per channel, or one for
all of them), the recurrence S ← e^g·S + k·uᵀ, o = Sᵀq from the state S₀ is

    A_ts = Σ q_t·k_s·E_ts, N_ts = Σ k_t·k_s·E_ts (s < t), e_t = exp(G_t), f_s = exp(G_T − G_s)
    o = (q·e)S₀ + A·u        S_T = e_T·S₀ + (k·f)ᵀu
    u = v, or for the delta rules u = β·(v − (k·e)S₀ − N·u) = W·β·(v − (k·e)S₀), W = (1 + β·N)⁻¹

The exponents are sums of the g between two tokens, never differences of two sums: a decay of −∞ is exact. The tensors
have the axes (batch, key heads, query heads of one key head, tokens, channels).
"""

from __future__ import annotations

import numpy as np

from refgrad.emit import Emitter

_LEVELS = 16  # of a triangle whose size only the run tells: up to 65,536 tokens, whose matrix would not fit


def plus(op: Emitter, a: str | None, b: str | None) -> str | None:
    """a + b, where None is zero."""
    return a or b if a is None or b is None else str(op.Add(a, b))


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
        place = op.const(np.arange(count)) if count is not None else self._places()
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
        """The adjoints of q, k, v, decay, rate and before, by those of o and after."""
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
            return str(self.op.Mul(self._product(x, self.k, transB=1), self.weights))
        return str(self.op.Squeeze(self.op.MatMul(self.keys, self.op.Unsqueeze(x, [5])), [5]))

    def _rows(self, d: str) -> str:
        """Σ_s d_ts·k_s·E_ts"""
        if self.keys is None:
            return str(self.op.MatMul(self.op.Mul(d, self.weights), self.k))
        return str(self.op.Squeeze(self.op.MatMul(self.op.Unsqueeze(d, [4]), self.keys), [4]))

    def _columns(self, d: str, x: str) -> str:
        """Σ_t d_ts·x_t·E_ts"""
        if self.keys is None:
            return self._product(self.op.Mul(d, self.weights), x, transA=1)
        read = self.op.Mul(self.op.Unsqueeze(d, [5]), self.op.Unsqueeze(x, [4]))
        return str(self.op.ReduceSum(self.op.Mul(self.weights, read), [3], keepdims=0))

    def _product(self, a: str, b: str, transA: int = 0, transB: int = 0) -> str:
        for x in (a, b):
            if self.op.rank(x) is None:
                self.op.assume(x, (None,) * 5)
        return str(self.op.grad.FusedMatMul(a, b, transA=transA, transB=transB))

    def _times(self, x: str, factor: str | None) -> str:
        return x if factor is None else str(self.op.Mul(x, factor))

    def _all_heads(self, x: str) -> str:
        """The sum over the query heads of a key head."""
        return str(self.op.ReduceSum(x, [2], keepdims=1)) if self.grouped else x

    def _places(self) -> str:
        return str(self.op.Range(0, self.op.Squeeze(self.op.Shape(self.q, start=3, end=4), [0]), 1))

    def _inverse(self, N: str, place: str, count: int | None) -> str:
        """(1 + N)⁻¹ of a strictly lower triangle, from blocks of one row: that of two neighbours, by theirs.

        ((A, 0), (C, B))⁻¹ = ((A⁻¹, 0), (−B⁻¹CA⁻¹, B⁻¹)); a sum of powers of N would cancel.
        """
        op = self.op
        row, column = op.Unsqueeze(place, [1]), op.Unsqueeze(place, [0])

        def blocks(size: int) -> str:
            """`N` where it connects a block of that size with the one before, of two that make one."""
            i, j = op.Div(row, size), op.Div(column, size)
            return str(op.Where(op.And(op.Equal(i, op.Add(j, 1)), op.Equal(op.Mod(j, 2), 0)), N, 0.0))

        X = op.Where(op.Equal(row, column), 1.0, op.Neg(blocks(1)))
        for level in range(1, _LEVELS if count is None else max(count - 1, 0).bit_length()):
            X = op.Sub(X, op.MatMul(op.MatMul(X, blocks(2**level)), X))
        return str(X)
