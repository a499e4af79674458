"""The steps of training algorithms (ai.onnx.preview.training), differentiable through their bodies: for learned learning rates.

A step is a function of what it starts from, of the gradient and of the learning rate. Where an accumulated square is 0,
its root counts as constant: the step itself is finite there, and so is its derivative.
"""

from __future__ import annotations

from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.protos.domains import TRAINING
from refgrad.tables.definitions import UnsupportedFormError, body
from refgrad.tables.registry import NO_DERIVATIVE

NO_DERIVATIVE[TRAINING, "Gradient"] = (
    "it stands for a derivative of the graph around it: write that out with refgrad.expand_gradients first"
)


@body("Adagrad", "outputs", domain=TRAINING, others=("T",))
def adagrad(
    op: FunctionEmitter,
    R: str,
    T: str,
    *inputs: str,
    decay_factor: float = 0.0,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
) -> tuple[str, ...]:
    """X − r·g/(√H' + ε) and H' = H + g², with g = G + norm_coefficient·X and r = R/(1 + T·decay_factor)"""
    tensors, squares = [], []
    for X, G, H in _groups(inputs, 3):
        g = _regularized(op, X, G, norm_coefficient)
        h = op.Add(H, op.Mul(g, g))
        rate = _like(op, R, X)
        if decay_factor:
            rate = op.Div(
                rate, op.Add(op.Mul(op.CastLike(T, X), op.const(decay_factor, like=X)), op.const(1.0, like=X))
            )
        tensors.append(op.Sub(X, op.Mul(rate, op.Div(g, op.Add(_root(op, h, X), op.const(epsilon, like=X))))))
        squares.append(h)
    return (*tensors, *squares)


@body("Adam", "outputs", domain=TRAINING, others=("T",))
def adam(
    op: FunctionEmitter,
    R: str,
    T: str,
    *inputs: str,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> tuple[str, ...]:
    """(1 − norm_coefficient_post)·(X − r·V'/(√H' + ε)), V' = α·V + (1 − α)·g and H' = β·H + (1 − β)·g²

    g = G + norm_coefficient·X; r = R·√(1 − βᵀ)/(1 − αᵀ) after the first step (T > 0), R in the first.
    """
    tensors, momenta, squares = [], [], []
    for X, G, V, H in _groups(inputs, 4):
        g = _regularized(op, X, G, norm_coefficient)
        v = op.Add(op.Mul(V, op.const(alpha, like=X)), op.Mul(g, op.const(1 - alpha, like=X)))
        h = op.Add(op.Mul(H, op.const(beta, like=X)), op.Mul(op.Mul(g, g), op.const(1 - beta, like=X)))
        one = op.const(1.0, like=X)
        count = op.Max(op.CastLike(T, X), one)  # where T is 0 the correction is not taken, and would be 0/0
        remains = [op.Sub(one, op.Pow(op.const(base, like=X), count)) for base in (beta, alpha)]
        correction = op.Where(op.Greater(T, 0), op.Div(op.Sqrt(remains[0]), remains[1]), one)
        rate = op.Mul(_like(op, R, X), correction)
        x = op.Sub(X, op.Mul(rate, op.Div(v, op.Add(_root(op, h, X), op.const(epsilon, like=X)))))
        tensors.append(op.Mul(x, op.const(1 - norm_coefficient_post, like=X)) if norm_coefficient_post else x)
        momenta.append(v)
        squares.append(h)
    return (*tensors, *momenta, *squares)


@body("Momentum", "outputs", domain=TRAINING, others=("T",))
def momentum(
    op: FunctionEmitter, R: str, T: str, *inputs: str, alpha: float, beta: float, mode: str, norm_coefficient: float
) -> tuple[str, ...]:
    """X − R·V', V' = α·V + β·g (β is 1 in the first step), g = G + norm_coefficient·X; X − R·(g + α·V') in mode nesterov"""
    if mode not in ("standard", "nesterov"):
        raise UnsupportedFormError(f"its mode {mode!r} is not known; there are standard and nesterov")
    tensors, momenta = [], []
    for X, G, V in _groups(inputs, 3):
        g = _regularized(op, X, G, norm_coefficient)
        weight = op.Where(op.Greater(T, 0), op.const(beta, like=X), op.const(1.0, like=X))
        v = op.Add(op.Mul(V, op.const(alpha, like=X)), op.Mul(g, weight))
        step = op.Add(g, op.Mul(v, op.const(alpha, like=X))) if mode == "nesterov" else v
        tensors.append(op.Sub(X, op.Mul(_like(op, R, X), step)))
        momenta.append(v)
    return (*tensors, *momenta)


def _groups(inputs: tuple[str, ...], parts: int) -> list[tuple[str, ...]]:
    """All tensors, all gradients, ... to (tensor, gradient, ...) for each tensor."""
    if len(inputs) % parts:
        raise UnsupportedFormError(
            f"it has {len(inputs)} tensors after R and T; there are {parts} for each that is trained"
        )
    count = len(inputs) // parts
    return [inputs[k::count] for k in range(count)]


def _regularized(op: FunctionEmitter, X: str, G: str, norm_coefficient: float) -> str:
    return op.Add(op.Mul(X, op.const(norm_coefficient, like=X)), G) if norm_coefficient else G


def _root(op: FunctionEmitter, square: str, like: str) -> str:
    zero = op.Equal(square, op.const(0.0, like=like))
    return op.Where(zero, op.const(0.0, like=like), op.Sqrt(op.Where(zero, op.const(1.0, like=like), square)))


def _like(op: FunctionEmitter, R: str, X: str) -> str:
    known = op.type(R) == op.type(X) != TensorProto.UNDEFINED
    return R if known else op.CastLike(R, X)
