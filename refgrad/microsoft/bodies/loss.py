"""ONNX Runtime's losses, and their gradients."""

from __future__ import annotations

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Emitter, UnsupportedFormError, body, form
from refgrad.formulas.loss import read_labels
from refgrad.formulas.types import as_scalar, wide_type, widened, widest
from refgrad.protos.domains import MICROSOFT
from refgrad.rewrites.results import like, typed


@body(
    "SoftmaxCrossEntropyLossInternal",
    "output",
    optional=["log_prob"],
    others=("labels", "ignore_index"),
    domain=MICROSOFT,
)
def softmax_cross_entropy_loss_internal(
    op: FunctionEmitter,
    scores: str,
    labels: str,
    weights: str | None = None,
    ignore_index: str | None = None,
    *,
    output_type: int | None = None,
    reduction: str = "mean",
) -> tuple[str, str]:
    """−w·log softmax(scores) at the label, reduced; 0 where the label is ignore_index"""
    log_prob = op.LogSoftmax(scores, axis=1)
    classes, kept = labels, None
    if ignore_index is not None:
        ignored = op.Equal(labels, op.CastLike(ignore_index, labels))
        kept = op.CastLike(op.Not(ignored), scores)
        classes = op.Where(ignored, op.const(0, like=labels), labels)
    weight = kept if weights is None else op.Gather(weights, classes)
    if weights is not None and kept is not None:
        weight = op.Mul(weight, kept)
    loss = op.Neg(op.Squeeze(op.GatherElements(log_prob, op.Unsqueeze(classes, [1]), axis=1), [1]))
    if weight is not None:
        loss = op.Mul(loss, weight)
    if reduction == "sum" or (reduction == "mean" and weight is not None):
        total = op.ReduceSum(loss, keepdims=0)
        if reduction == "mean":
            size = op.ReduceSum(weight, keepdims=0)
            total = op.Div(total, op.Where(op.Equal(size, op.const(0.0, like=size)), op.const(1.0, like=size), size))
        loss = total
    elif reduction == "mean":
        loss = op.ReduceMean(loss, keepdims=0)
    if output_type:
        loss, log_prob = (op.Cast(value, to=output_type) for value in (loss, log_prob))
    return loss, log_prob


@form("SoftmaxCrossEntropyLossGrad", results=[like("log_prob")])
def softmax_cross_entropy_loss_grad(
    op: Emitter,
    dY: str,
    log_prob: str,
    label: str,
    weight: str | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> str:
    return _class_gradient(op, dY, log_prob, label, weight, reduction, ignore_index, op.type(log_prob))


def _class_gradient(
    op: Emitter,
    dY: str,
    log_prob: str,
    label: str,
    weight: str | None,
    reduction: str,
    ignore_index: int | str | None,
    kind: int,
) -> str:
    """SoftmaxCrossEntropyLossGrad of type `kind`, never computed in 16 bits: ONNX Runtime scatters none on the CPU"""
    wide = widest(op, *widened(op, *(value for value in (dY, log_prob, weight) if value is not None)))
    dY, log_prob = op.as_type(dY, wide), op.as_type(log_prob, wide)
    weight = weight and op.as_type(weight, wide)
    d = op.grad.SoftmaxCrossEntropyLossGrad(dY, log_prob, label, weight, reduction=reduction, ignore_index=ignore_index)
    return op.as_type(d, kind)


@form("SoftmaxCrossEntropyLossInternalGrad", results=[like("log_prob", cast="output_type")])
def softmax_cross_entropy_loss_internal_grad(
    op: Emitter,
    dY: str,
    log_prob: str,
    label: str,
    weight: str | None = None,
    ignore_index: str | None = None,
    bias: str | None = None,
    *,
    output_type: int = 0,
    reduction: str = "mean",
) -> str:
    """SoftmaxCrossEntropyLossGrad with the index to ignore as an input, plus `bias`, of `output_type`"""
    kind = output_type or op.type(log_prob)
    ignored = None if ignore_index is None else as_scalar(op, ignore_index, op.type(label))
    wide = wide_type(op, log_prob)
    d = _class_gradient(op, dY, log_prob, label, weight, reduction, ignored, kind if bias is None else wide)
    if bias is None:
        return d
    return op.as_type(op.Add(d, op.reshape_like(op.as_type(bias, wide), log_prob)), kind)


@form("NegativeLogLikelihoodLossInternal", "NegativeLogLikelihoodLossInternal2", results=[typed("log_prob")])
def negative_log_likelihood_loss_internal(
    op: Emitter,
    log_prob: str,
    label: str,
    weight: str | None = None,
    ignore_index: str | None = None,
    *,
    reduction: str = "mean",
) -> str:
    """NegativeLogLikelihoodLoss with the index to ignore as an input: −w·log_prob at the label, for the mean over Σw"""
    if ignore_index is not None:
        ignore_index = as_scalar(op, ignore_index, op.type(label))
    read = read_labels(op, op.const(1.0, like=log_prob), label, weight, ignore_index, "sum")
    picked = op.Squeeze(op.GatherElements(log_prob, op.Unsqueeze(read.classes, [1]), axis=1), [1])
    losses = op.Where(op.Equal(read.share, 0.0), 0.0, op.Neg(op.Mul(read.share, picked)))
    if reduction == "none":
        return str(losses)
    total = op.ReduceSum(losses, keepdims=0)
    return str(op.Div(total, op.ReduceSum(read.share, keepdims=0)) if reduction == "mean" else total)


@body("SoftmaxCrossEntropy", "Y", optional=["log_prob"], domain=MICROSOFT)
def softmax_cross_entropy(op: FunctionEmitter, logits: str, label: str, *, reduction: str = "mean") -> tuple[str, str]:
    """−Σ label·log_prob along the last axis, of every row, their sum or their mean; and log_prob"""
    log_prob = op.LogSoftmax(logits, axis=-1)
    losses = op.Neg(op.ReduceSum(op.Mul(label, log_prob), [-1], keepdims=0))
    return _reduced(op, losses, None, reduction), log_prob


@body("SparseSoftmaxCrossEntropy", "Y", optional=["log_prob"], others=["label"], domain=MICROSOFT)
def sparse_softmax_cross_entropy(
    op: FunctionEmitter, logits: str, label: str, weight: str | None = None, *, reduction: str = "mean"
) -> tuple[str, str]:
    """−weight·log_prob at the label along the last axis, of every row, their sum, or that over Σ weight; and log_prob"""
    log_prob = op.LogSoftmax(logits, axis=-1)
    axis = (op.rank(logits) or 0) - 1  # from the front where that is known: onnx.reference fails with −1
    losses = op.Neg(op.Squeeze(op.GatherElements(log_prob, op.Unsqueeze(label, [-1]), axis=axis), [-1]))
    if weight is not None:
        losses = op.Mul(losses, weight)
    return _reduced(op, losses, weight, reduction), log_prob


def _reduced(op: FunctionEmitter, losses: str, weight: str | None, reduction: str) -> str:
    """The loss of every row, their sum, or that over the sum of the weights."""
    if reduction not in ("mean", "sum", "none"):
        raise UnsupportedFormError(f"its reduction {reduction!r} is not known; there are mean, sum and none")
    if reduction == "none":
        return losses
    if reduction == "mean" and weight is None:
        return op.ReduceMean(losses, keepdims=0)
    total = op.ReduceSum(losses, keepdims=0)
    return str(op.Div(total, op.ReduceSum(weight, keepdims=0)) if reduction == "mean" else total)


def _per_row(op: Emitter, scores: str) -> str:
    """1 over the number of rows"""
    rows = op.ReduceProd(op.Shape(scores, end=-1), keepdims=0)
    return op.Reciprocal(op.Cast(rows, to=op.type(scores)))


@form("SoftmaxCrossEntropyGrad", results=[like("log_prob")])
def softmax_cross_entropy_grad(op: Emitter, dY: str, log_prob: str, label: str, *, reduction: str = "mean") -> str:
    """dY·(exp(log_prob)·Σ label − label), divided by the number of rows for the mean"""
    if reduction == "mean":
        dY = op.Mul(dY, _per_row(op, log_prob))
    elif reduction == "none":
        dY = op.Unsqueeze(dY, [-1])
    total = op.ReduceSum(label, [-1], keepdims=1)
    return op.Mul(dY, op.Sub(op.Mul(op.Exp(log_prob), total), label))


def _total(op: Emitter, weight: str) -> str:
    return op.ReduceSum(weight, keepdims=0)


@form("SparseSoftmaxCrossEntropyGrad", results=[like("log_prob")], domains=("", MICROSOFT))
def sparse_softmax_cross_entropy_grad(
    op: Emitter, dY: str, log_prob: str, label: str, weight: str | None = None, *, reduction: str = "mean"
) -> str:
    """dY·weight·(exp(log_prob) − onehot(label)), for the mean divided by Σ weight"""
    kind = op.type(log_prob)
    dY, log_prob = widened(op, dY, log_prob)
    weight = weight and op.as_type(weight, op.type(log_prob))
    if reduction == "mean":
        dY = op.Mul(dY, _per_row(op, log_prob)) if weight is None else op.Div(dY, _total(op, weight))
    share = op.Expand(dY, op.shape_of(label)) if weight is None else op.Mul(dY, weight)
    share = op.Unsqueeze(share, [-1])
    soft = op.Mul(op.Exp(log_prob), share)
    d = op.ScatterElements(soft, op.Unsqueeze(label, [-1]), op.Neg(share), axis=-1, reduction="add")
    return op.as_type(d, kind)
