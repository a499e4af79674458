"""The steps of training, in ai.onnx operators: optimizers, accumulators, norms, checks for infinities.

What ONNX Runtime's operators write into their inputs are results here.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from refgrad.builder.op import for_each
from refgrad.extend import Emitter, UnsupportedFormError, form
from refgrad.formulas.types import as_scalar, wide_type, widened
from refgrad.model.graph import Node
from refgrad.rewrites.results import PASSED, elements, like, typed


def _flag(op: Emitter, node: Node, value: str | None, rank: int) -> str:
    """`value`, true where there is none, with the declared number of axes, or `rank`."""
    declared = op.rank(node.outputs[0]) if node.outputs and node.outputs[0] else None
    if declared is not None:
        rank = declared
    if value is None:
        return op.const(np.ones([1] * rank, bool))
    return op.Reshape(value, [1] if rank else np.zeros(0, np.int64))


def _kept(op: Emitter, update: str | None, new: str, old: str) -> str:
    """`new`, of the type of `old`; `old` where there is no update."""
    new = op.as_type(new, op.type(old))
    return new if update is None else op.Where(as_scalar(op, update, TensorProto.BOOL), new, old)


def _after(op: Emitter, step: str, base: float, kind: int) -> str:
    """1 − baseⁿ after n steps, in double: in float, 0.999¹ has three digits left"""
    double = TensorProto.DOUBLE
    power = op.Pow(op.const(np.array(base)), as_scalar(op, step, double))
    return op.as_type(op.Sub(op.const(np.array(1.0)), power), kind)


def _moments(op: Emitter, g: str, m: str, v: str, alpha: float, beta: float) -> tuple[str, str]:
    """The running averages of the gradient and of its square"""
    next_m = op.Add(op.Mul(m, alpha), op.Mul(g, 1 - alpha))
    return next_m, op.Add(op.Mul(v, beta), op.Mul(op.Mul(g, g), 1 - beta))


@form("SGDOptimizer", results=[like("W"), like("W")])
def sgd_optimizer(op: Emitter, R: str, W: str, G: str) -> tuple[str, str]:
    """W − R·G, and −R·G"""
    step = op.Mul(op.Neg(as_scalar(op, R, op.type(G))), G)
    return op.Add(W, step), step


@form("SGDOptimizerV2", results=[elements(TensorProto.BOOL), like("weights")], writes={1: "weights"})
def sgd_optimizer_v2(
    op: Emitter, R: str, weights: str, gradients: str, update: str | None = None, *, _node: Node
) -> tuple[str, str]:
    """W − R·G for every tensor of a sequence, or W where `update` is false"""
    rate = as_scalar(op, R, wide_type(op, weights))

    def step(W: str, G: str) -> list[str]:
        w, g = widened(op, W, G)
        return [_kept(op, update, op.Sub(w, op.Mul(g, rate)), W)]

    return _flag(op, _node, update, 0), for_each(op, (weights, gradients), [op.type(weights)], step)[0]


@form(
    "AdamWOptimizer",
    results=[elements(TensorProto.BOOL), like("weights"), like("momentums_1"), like("momentums_2")],
    writes={1: "weights", 2: "momentums_1", 3: "momentums_2"},
)
def adamw_optimizer(
    op: Emitter,
    R: str,
    step: str,
    weights: str,
    gradients: str,
    momentums_1: str,
    momentums_2: str,
    update: str | None = None,
    *,
    adam_mode: int = 0,
    alpha: float = 0.9,
    beta: float = 0.999,
    correct_bias: int = 1,
    epsilon: float = 1e-8,
    weight_decay: float = 1e-2,
    _node: Node,
) -> tuple[str, ...]:
    """Every W, m and v after a step of AdamW (Loshchilov and Hutter 2019), or as they were where `update` is false

    adam_mode=0: W·(1 − R·decay), then − R/c₁·m/(√v/√c₂ + ε), as in torch. adam_mode=1: first − R·√c₂/c₁·m/(√v + ε), then
    ·(1 − R·decay), as in transformers. c = 1 − baseⁿ corrects an average after n steps, with correct_bias.
    """
    kind = wide_type(op, weights)
    rate, root_correction = as_scalar(op, R, kind), None
    size, shrunk = rate, op.Mul(rate, weight_decay)
    if correct_bias:
        first, second = (_after(op, step, base, kind) for base in (alpha, beta))
        root_correction = op.Sqrt(second)
        size = op.Div(op.Mul(rate, root_correction) if adam_mode else rate, first)

    def new(W: str, G: str, m: str, v: str) -> list[str]:
        w, g, old_m, old_v = widened(op, W, G, m, v)
        next_m, next_v = _moments(op, g, old_m, old_v, alpha, beta)
        root = op.Sqrt(next_v)
        if root_correction is not None and not adam_mode:
            root = op.Div(root, root_correction)
        if not adam_mode:
            w = op.Sub(w, op.Mul(w, shrunk))
        w = op.Sub(w, op.Mul(size, op.Div(next_m, op.Add(root, epsilon))))
        if adam_mode:
            w = op.Sub(w, op.Mul(w, shrunk))
        return [_kept(op, update, n, o) for n, o in ((w, W), (next_m, m), (next_v, v))]

    kinds = [op.type(sequence) for sequence in (weights, momentums_1, momentums_2)]
    sequences = weights, gradients, momentums_1, momentums_2
    return _flag(op, _node, update, 0), *for_each(op, sequences, kinds, new)


@form("AdamOptimizer", results=[like("step"), like("m"), like("v"), like("W"), like("G"), typed("half")])
def adam_optimizer(
    op: Emitter,
    R: str,
    step: str,
    W: str,
    G: str,
    m: str,
    v: str,
    half: str | None = None,
    loss_scale: str | None = None,
    norm: str | None = None,
    update: str | None = None,
    *,
    alpha: float = 0.9,
    beta: float = 0.999,
    do_bias_correction: int = 1,
    epsilon: float = 1e-8,
    lambda_: float = 0.0,
    max_norm_clip: float = 1.0,
    weight_decay_mode: int = 0,
) -> tuple[str | None, ...]:
    """The next step number, m, v, W, the step that W took, and W in the type of `half` (Kingma and Ba 2015)

    The gradient is divided by the loss scale, and by its norm where that is above `max_norm_clip`. The step is
    −R·(m̂/(√v̂ + ε) + λ·W); with weight_decay_mode=1 −R·√c₂·m̂/(√v + ε), and then W − R·λ·W.
    """
    w, g, old_m, old_v = widened(op, W, G, m, v)
    kind = op.type(w)
    if loss_scale is not None:
        g = op.Div(g, as_scalar(op, loss_scale, kind))
    if norm is not None:
        length = as_scalar(op, norm, kind)
        if loss_scale is not None:
            length = op.Div(length, as_scalar(op, loss_scale, kind))
        g = op.Div(g, op.Max(op.Div(length, max_norm_clip), op.const(1.0, like=length)))
    rate = as_scalar(op, R, kind)
    next_m, next_v = _moments(op, g, old_m, old_v, alpha, beta)
    corrected, square, size = next_m, next_v, rate
    if do_bias_correction:
        first, second = (_after(op, step, base, kind) for base in (alpha, beta))
        corrected = op.Div(next_m, first)
        if weight_decay_mode:
            size = op.Mul(rate, op.Sqrt(second))
        else:
            square = op.Div(next_v, second)
    direction, shrunk = op.Div(corrected, op.Add(op.Sqrt(square), epsilon)), op.Mul(rate, lambda_)
    move = op.Mul(size, direction)
    move = op.Add(move, op.Mul(shrunk, op.Sub(w, move) if weight_decay_mode else w))
    new = op.Sub(w, move)
    kept = [(op.Add(step, 1), step), (next_m, m), (next_v, v), (new, W), (op.Neg(move), G)]
    results = [_kept(op, update, n, o) for n, o in kept]
    return *results, None if half is None else _kept(op, update, new, half)


@form("InPlaceAccumulator", results=[like("total")])
def in_place_accumulator(op: Emitter, total: str, value: str, update: str | None = None) -> str:
    """Total + value, or the total where `update` is false"""
    return _kept(op, update, op.Add(*widened(op, total, value)), total)


@form("InPlaceAccumulatorV2", results=[elements(TensorProto.BOOL), like("total")], writes={1: "total"})
def in_place_accumulator_v2(
    op: Emitter, total: str, value: str, overwrite: str | None = None, *, _node: Node
) -> tuple[str, str]:
    """True, and total + value, or the value alone where `overwrite` is true"""
    new = op.as_type(op.Add(*widened(op, total, value)), op.type(total))
    if overwrite is not None:
        new = op.Where(as_scalar(op, overwrite, TensorProto.BOOL), op.as_type(value, op.type(total)), new)
    return _flag(op, _node, None, 1), new


@form("InplaceClipGradNorm", results=[like("gradients")])
def inplace_clip_grad_norm(op: Emitter, gradients: str, *, max_norm: float = 1.0, norm_type: str = "fro") -> str:
    """Every gradient times min(1, max_norm/(norm + 1e-6)), the norm over all of them"""
    if norm_type != "fro":
        raise UnsupportedFormError(f"norm_type={norm_type!r} is not known; there is 'fro'")

    kind, wide = op.type(gradients), wide_type(op, gradients)

    def square(G: str) -> list[str]:
        g = op.as_type(G, wide)
        return [op.ReduceSum(op.Mul(g, g), keepdims=0)]

    (squares,) = for_each(op, (gradients,), [wide], square)
    norm = op.Sqrt(op.ReduceSum(op.ConcatFromSequence(squares, axis=0, new_axis=1), keepdims=0))
    factor = op.Min(op.Div(op.const(max_norm, like=norm), op.Add(norm, 1e-6)), op.const(1.0, like=norm))
    clipped = for_each(op, (gradients,), [kind], lambda G: [op.as_type(op.Mul(op.as_type(G, wide), factor), kind)])
    return str(clipped[0])


@form("ReduceAllL2", results=[typed("xs")])
def reduce_all_l2(op: Emitter, *xs: str) -> str:
    """√Σx² over every element of every input"""
    sums = [op.ReduceSum(op.Mul(x, x), keepdims=0) for x in widened(op, *xs)]
    return op.as_type(op.Sqrt(op.Sum(*sums)), op.type(xs[0]))


@form("IsFinite", results=[elements(TensorProto.BOOL)])
def is_finite(op: Emitter, X: str) -> str:
    """True if each element is neither infinite nor NaN"""
    (x,) = widened(op, X)
    return op.Not(op.Or(op.IsInf(x), op.IsNaN(x)))


@form("IsAllFinite", results=[elements(TensorProto.BOOL)])
def is_all_finite(op: Emitter, *xs: str, isinf_only: int = 0, isnan_only: int = 0) -> str:
    """True if no element of any input is infinite or NaN; with an attribute only one of the two counts"""
    if isinf_only and isnan_only:
        raise UnsupportedFormError("isinf_only and isnan_only exclude each other")
    wrong = []
    for x in widened(op, *xs):
        found = ([] if isnan_only else [op.IsInf(x)]) + ([] if isinf_only else [op.IsNaN(x)])
        wrong += [op.ReduceSum(op.Cast(one, to=TensorProto.INT64), keepdims=0) for one in found]
    total = wrong[0]
    for more in wrong[1:]:
        total = op.Add(total, more)
    return op.Equal(total, 0)


@form("All", results=[elements(TensorProto.BOOL)])
def all_(op: Emitter, X: str) -> str:
    """True if every element is true"""
    return op.Equal(op.ReduceSum(op.Cast(op.Not(X), to=TensorProto.INT64), keepdims=0), 0)


@form("MixedPrecisionScale", rest=typed("scale", cast="to"))
def mixed_precision_scale(op: Emitter, scale: str, *xs: str, fuse_outputs: int = 0, to: int) -> tuple[str, ...]:
    """scale·x of type `to` for every x, or all of them in one vector"""
    scaled = [op.as_type(op.Mul(x, as_scalar(op, scale, op.type(x))), to) for x in widened(op, *xs)]
    return (op.Concat(*(op.Reshape(y, [-1]) for y in scaled), axis=0),) if fuse_outputs else tuple(scaled)


@form("Group", results=[elements(TensorProto.BOOL)])
def group(op: Emitter, *xs: str) -> str:
    """True"""
    return op.const(np.array(True))


@form("PassThrough", rest=PASSED)
def pass_through(op: Emitter, *xs: str) -> tuple[str, ...]:
    """The inputs"""
    return xs
