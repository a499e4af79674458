"""Activations. A derivative is written in terms of the result where that spares an evaluation and loses nothing."""

from __future__ import annotations

from refgrad.builder.op import Emitter
from refgrad.errors import RuleError
from refgrad.formulas.masks import mask_cotangent
from refgrad.tables.registry import rule


@rule("Relu")
def relu(op: Emitter, d_Y: str, Y: str) -> str:
    """dx = dy where y > 0, else 0"""
    return op.grad.ReluGrad(d_Y, Y)


@rule("LeakyRelu")
def leaky_relu(op: Emitter, d_Y: str, X: str, Y: str, alpha: float) -> str:
    """dx = dy where x > 0, else α·dy; where α ≥ 0 the sign of y decides as well"""
    return op.grad.LeakyReluGrad(d_Y, Y if alpha >= 0 else X, alpha=alpha)


@rule("PRelu", broadcast=True)
def prelu(op: Emitter, d_Y: str, X: str, slope: str) -> tuple[str, str]:
    """dx = dy where x > 0, else slope·dy; dslope = 0 where x > 0, else x·dy"""
    positive, kind = op.Greater(X, 0.0), op.type(d_Y)
    d_slope = op.Mul(d_Y, op.Clip(X, None, 0.0)) if op.preserves_finite else op.Where(positive, 0.0, op.Mul(d_Y, X))
    factor = op.Add(op.Cast(positive, to=kind), op.Mul(op.Cast(op.Not(positive), to=kind), slope))
    return op.Mul(d_Y, factor), d_slope


@rule("Elu")
def elu(op: Emitter, d_Y: str, X: str, alpha: float) -> str:
    """dx = dy where x > 0, else dy·α·exp x"""
    return op.Mul(d_Y, _exponential(op, X, 1.0, alpha))


@rule("Selu")
def selu(op: Emitter, d_Y: str, X: str, alpha: float, gamma: float) -> str:
    """dx = γ·dy where x > 0, else dy·γ·α·exp x"""
    return op.Mul(d_Y, _exponential(op, X, gamma, gamma * alpha))


@rule("Celu")
def celu(op: Emitter, d_Y: str, X: str, alpha: float) -> str:
    """dx = dy where x > 0, else dy·exp(x/α)"""
    if alpha == 0:
        raise RuleError(
            f"Celu divides by alpha, but node {op.node!r} has alpha=0. Use another alpha, or Relu, the limit for alpha=0."
        )
    below = op.Clip(X, None, 0.0)
    return op.Mul(d_Y, op.Exp(below if alpha == 1 else op.Div(below, alpha)))


def _exponential(op: Emitter, x: str, above: float, below: float) -> str:
    """The slope: `above` where x > 0, else `below`·exp x. The result y + `below` has rounded exp x away far below 0.

    Where x > 0 the exponent is 0: that exponential would overflow.
    """
    slope = op.Exp(op.Clip(x, None, 0.0))
    if above == below:
        return slope if above == 1 else op.Mul(slope, above)
    return op.Mul(slope, op.Where(op.Greater(x, 0.0), op.const(above, like=x), op.const(below, like=x)))


@rule("ThresholdedRelu")
def thresholded_relu(op: Emitter, d_Y: str, X: str, alpha: float) -> str:
    """dx = dy where x > α, else 0"""
    return mask_cotangent(op, op.Greater(X, alpha), d_Y)


@rule("Shrink")
def shrink(op: Emitter, d_output: str, input: str, lambd: float, bias: float) -> str:
    """dx = dy where |x| > λ, else 0; dy for λ = bias = 0, where the operator changes nothing"""
    if lambd == bias == 0:
        return d_output
    return mask_cotangent(op, op.Greater(op.Abs(input), lambd), d_output)


@rule("Sigmoid")
def sigmoid(op: Emitter, d_Y: str, Y: str) -> str:
    """dx = dy·y·(1 − y)"""
    return op.grad.SigmoidGrad(d_Y, Y)


@rule("HardSigmoid")
def hard_sigmoid(op: Emitter, d_Y: str, Y: str, alpha: float) -> str:
    """dx = α·dy where 0 < y < 1, else 0"""
    inside = op.And(op.Greater(Y, 0.0), op.Less(Y, 1.0))
    return mask_cotangent(op, inside, op.Mul(d_Y, alpha))


@rule("HardSwish")
def hard_swish(op: Emitter, d_Y: str, X: str) -> str:
    """dx = dy·(x/3 + 1/2) where |x| < 3, dy where x ≥ 3, 0 where x ≤ −3"""
    sixth = op.Div(op.Clip(X, -3.0, 3.0), 6.0)  # ±1/2 at the ends, in every type
    twice = op.Where(op.Less(op.Abs(X), 3.0), op.const(2.0, like=X), op.const(1.0, like=X))
    return op.Mul(d_Y, op.Add(op.Mul(sixth, twice), 0.5))


@rule("Tanh")
def tanh(op: Emitter, d_output: str, output: str) -> str:
    """dx = dy·(1 − y²)"""
    return op.grad.TanhGrad(d_output, output)


@rule("Softplus")
def softplus(op: Emitter, d_Y: str, X: str) -> str:
    """dx = dy·sigmoid x"""
    return op.Mul(d_Y, op.Sigmoid(X))


@rule("Softsign")
def softsign(op: Emitter, d_output: str, input: str) -> str:
    """dx = dy/(1 + |x|)²"""
    size = op.Add(op.Abs(input), 1.0)
    return op.Div(op.Div(d_output, size), size)


@rule("Gelu")
def gelu(op: Emitter, d_Y: str, X: str, approximate: str) -> str:
    """dx = dy·(Φ(x) + x·φ(x)), or the derivative of the tanh form"""
    return op.grad.GeluGrad(d_Y, X, approximate=approximate)


@rule("Swish")
def swish(op: Emitter, d_Y: str, X: str, Y: str, alpha: float) -> str:
    """dx = dy·(s + αy·(1 − s)) with s = sigmoid αx"""
    s = op.Sigmoid(X if alpha == 1 else op.Mul(X, alpha))
    rest = op.Mul(Y, op.Sub(1.0, s))
    return op.Mul(d_Y, op.Add(s, rest if alpha == 1 else op.Mul(rest, alpha)))


@rule("SwiGLU")
def swi_glu(op: Emitter, d_Y: str, A: str, B: str, alpha: float) -> tuple[str, str]:
    """dA = dY·B·s·(1 + αA·(1 − s)) with s = sigmoid αA, dB = dY·A·s"""
    s, slope = swish_slope(op, A, alpha)
    return op.Mul(op.Mul(d_Y, B), slope), op.Mul(d_Y, op.Mul(A, s))


def swish_slope(op: Emitter, x: str, alpha: float) -> tuple[str, str]:
    """Sigmoid αx, and the derivative of x·sigmoid αx. α comes last: αx may overflow, where the slope is 0 or 1."""
    s = op.Sigmoid(x if alpha == 1 else op.Mul(x, alpha))
    bent = op.Mul(op.Mul(x, s), op.Sub(1.0, s))
    return s, op.Add(s, bent if alpha == 1 else op.Mul(bent, alpha))


@rule("Mish")
def mish(op: Emitter, d_Y: str, X: str) -> str:
    """dx = dy·(t + x·(1 − t²)·sigmoid x) with t = tanh softplus x"""
    t = op.Tanh(op.Softplus(X))
    slope = op.Mul(op.Mul(X, op.Sigmoid(X)), op.Sub(1.0, op.Mul(t, t)))
    return op.Mul(d_Y, op.Add(t, slope))


@rule("Softmax")
def softmax(op: Emitter, d_output: str, output: str, axis: int) -> str:
    """dx = y·(dy − Σ_axis dy·y)"""
    return op.grad.SoftmaxGrad(d_output, _where_kept(op, output), axis=axis)


@rule("LogSoftmax")
def log_softmax(op: Emitter, d_output: str, output: str, axis: int) -> str:
    """dx = dy − exp(y)·Σ_axis dy"""
    return op.grad.LogSoftmaxGrad(d_output, _where_kept(op, output), axis=axis)


def _where_kept(op: Emitter, y: str) -> str:
    """`y`, which is NaN along a row that is all −∞; 0 there if a Where can discard the row.

    A discarded row has the cotangent 0, and 0·NaN has to be 0. Often the forward graph itself has replaced NaN by 0.
    """
    reads, discards = [y], False
    for name in reads:
        for node in op.graph.readers(name):
            if node.key in (("", "Cast"), ("", "Identity"), ("", "CastLike")) and node.inputs[0] == name:
                reads.append(node.outputs[0])
            elif node.key == ("", "Where") and name in node.inputs[1:]:
                asks, other = op.graph.producer.get(node.inputs[0]), op.constant(node.inputs[1])
                zero = other is not None and other.size == 1 and not other.any()
                if zero and node.inputs[2] == y and asks and asks.key == ("", "IsNaN") and asks.inputs[0] == y:
                    return node.outputs[0]
                discards = True
    return op.Where(op.IsNaN(y), 0.0, y) if discards else y
