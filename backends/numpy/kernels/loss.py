"""Losses over class scores and their gradients. Scores are (N, C, d...), labels (N, d...), weights (C,).

The operators of ONNX Runtime without "Loss" in their name have scores (d..., C). Their labels are a number for each
class; in the sparse ones they are classes, with a weight for each label.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import helper

from refgrad.backends.numpy.kernels.activation import log_softmax
from refgrad.backends.numpy.kernels.operands import check_indices, check_shape, widened
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT


def _weights(
    labels: np.ndarray, weights: np.ndarray | None, ignore_index: int | None, scores: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each label the class to read (0 where ignored) and its weight (0 where ignored), both (N, d...)."""
    if scores.ndim < 2:
        raise ValueError(f"the scores have rank {scores.ndim}; expected a batch, the classes and any further axes")
    dtype, count = scores.dtype, scores.shape[1]
    check_shape("the labels", labels.shape, scores.shape[:1] + scores.shape[2:])
    if weights is not None:
        check_shape("the weights", weights.shape, (count,))
    classes, ignored = labels, None
    if ignore_index is not None:
        ignored = labels == ignore_index
        classes = np.where(ignored, 0, labels)
    check_indices(classes if count or ignored is None else classes[~ignored], count, "the labels", lowest=0)
    weight = np.ones(labels.shape, dtype) if weights is None else weights[classes].astype(dtype, copy=False)
    return classes, weight if ignored is None else np.where(ignored, dtype.type(0), weight)


def _read(scores: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """For each label the score of its class, (N, d...)."""
    batch, count = scores.shape[:2]
    each = math.prod(classes.shape[1:])
    rows = scores.reshape(batch, count, each)
    picked = rows[np.arange(batch)[:, np.newaxis], classes.reshape(batch, each), np.arange(each)]
    return np.asarray(picked.reshape(classes.shape))


def _reduced(losses: np.ndarray, weight: np.ndarray, reduction: str) -> np.ndarray:
    if reduction == "none":
        return losses
    total = losses.sum(dtype=losses.dtype)
    return np.asarray(total / weight.sum(dtype=weight.dtype) if reduction == "mean" else total, losses.dtype)


@kernel("NegativeLogLikelihoodLoss", in_float32=True, fresh=True)
def negative_log_likelihood_loss(
    log_prob: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str,
) -> np.ndarray:
    """Loss = −w·log_prob[label]; the mean is over the sum of the weights"""
    classes, weight = _weights(labels, weights, ignore_index, log_prob)
    picked = _read(log_prob, classes)
    plain = weights is None and ignore_index is None
    return _reduced(-picked if plain else np.where(weight == 0, weight, -weight * picked), weight, reduction)


@kernel("SoftmaxCrossEntropyLoss", in_float32=True, fresh=True)
def softmax_cross_entropy_loss(
    scores: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> tuple[np.ndarray, np.ndarray]:
    log_prob = log_softmax(scores, axis=1)
    loss = negative_log_likelihood_loss(log_prob, labels, weights, ignore_index=ignore_index, reduction=reduction)
    return loss, log_prob


@kernel(
    "NegativeLogLikelihoodLossInternal",
    "NegativeLogLikelihoodLossInternal2",
    domain=MICROSOFT,
    in_float32=True,
    fresh=True,
)
def negative_log_likelihood_loss_internal(
    log_prob: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray | None = None,
    ignore_index: np.ndarray | None = None,
    *,
    reduction: str = "mean",
) -> np.ndarray:
    """NegativeLogLikelihoodLoss with the index to ignore as an input"""
    ignored = None if ignore_index is None else int(ignore_index.item())
    return negative_log_likelihood_loss(log_prob, labels, weights, ignore_index=ignored, reduction=reduction)


@kernel("SoftmaxCrossEntropyLossInternal", domain=MICROSOFT, fresh=True)
def softmax_cross_entropy_loss_internal(
    scores: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray | None = None,
    ignore_index: np.ndarray | None = None,
    *,
    reduction: str = "mean",
    output_type: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """SoftmaxCrossEntropyLoss with the index to ignore as an input, and results of `output_type`; the mean of nothing is 0."""
    kind = _result_type(scores, output_type)
    log_prob = log_softmax(widened(scores), axis=1)
    wide = None if weights is None else widened(weights)
    ignored = None if ignore_index is None else int(ignore_index.item())
    if reduction == "mean" and not _weights(labels, wide, ignored, log_prob)[1].any():
        reduction = "sum"
    loss = negative_log_likelihood_loss(log_prob, labels, wide, ignore_index=ignored, reduction=reduction)
    return loss.astype(kind, copy=False), log_prob.astype(kind, copy=False)


@kernel("SoftmaxCrossEntropyLossGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def softmax_cross_entropy_loss_grad(
    dY: np.ndarray,
    log_prob: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> np.ndarray:
    """Dscores = dY·w·(e^log_prob − onehot(label)), divided by Σ w for the mean"""
    classes, weight = _weights(labels, weights, ignore_index, log_prob)
    factor = dY * weight
    if reduction == "mean":
        total = weight.sum(dtype=weight.dtype)
        factor = factor / total if total else np.zeros_like(factor)
    at = np.expand_dims(classes, 1)
    d = np.exp(log_prob)
    np.put_along_axis(d, at, np.take_along_axis(d, at, 1) - 1, 1)
    d *= np.expand_dims(factor, 1)
    return np.asarray(d)


@kernel("SoftmaxCrossEntropyLossInternalGrad", domain=MICROSOFT, fresh=True)
def softmax_cross_entropy_loss_internal_grad(
    dY: np.ndarray,
    log_prob: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray | None = None,
    ignore_index: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    *,
    reduction: str = "mean",
    output_type: int = 0,
) -> np.ndarray:
    """The same with the index to ignore as an input, plus `bias`, of `output_type`"""
    kind = _result_type(log_prob, output_type)
    ignored = None if ignore_index is None else int(ignore_index.item())
    wide = None if weights is None else widened(weights)
    d = softmax_cross_entropy_loss_grad(
        widened(dY), widened(log_prob), labels, wide, ignore_index=ignored, reduction=reduction
    )
    return (d if bias is None else d + widened(bias).reshape(d.shape)).astype(kind, copy=False)


def _result_type(x: np.ndarray, output_type: int) -> np.dtype[Any]:
    return helper.tensor_dtype_to_np_dtype(output_type) if output_type else x.dtype


@kernel("SoftmaxCrossEntropy", since=9, in_float32=True, fresh=True)
@kernel("SoftmaxCrossEntropy", domain=MICROSOFT, in_float32=True, fresh=True)
def softmax_cross_entropy(
    logits: np.ndarray, label: np.ndarray, *, reduction: str = "mean"
) -> tuple[np.ndarray, np.ndarray]:
    """−Σ_C label·log_prob of every row, their sum or their mean; and log_prob"""
    log_prob = log_softmax(logits, axis=-1)
    losses = -(label * log_prob).sum(-1)
    return _reduced(losses, np.ones_like(losses), reduction), log_prob


@kernel("SoftmaxCrossEntropyGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def softmax_cross_entropy_grad(
    dY: np.ndarray, log_prob: np.ndarray, label: np.ndarray, *, reduction: str = "mean"
) -> np.ndarray:
    """dlogits = dY·(e^log_prob·Σ_C label − label), divided by the number of rows for the mean"""
    rows = log_prob.shape[:-1]
    factor = _spread(dY, np.ones(rows, log_prob.dtype), reduction)
    return np.asarray(factor[..., np.newaxis] * (np.exp(log_prob) * label.sum(-1, keepdims=True) - label))


@kernel("SparseSoftmaxCrossEntropy", since=9, in_float32=True, fresh=True)
@kernel("SparseSoftmaxCrossEntropy", domain=MICROSOFT, in_float32=True, fresh=True)
def sparse_softmax_cross_entropy(
    logits: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None, *, reduction: str = "mean"
) -> tuple[np.ndarray, np.ndarray]:
    """−weight·log_prob[label] of every row, their sum, or that divided by the sum of the weights; and log_prob"""
    check_shape("the labels", label.shape, logits.shape[:-1])
    check_indices(label, logits.shape[-1], "the labels", lowest=0)
    log_prob = log_softmax(logits, axis=-1)
    share = np.ones(label.shape, logits.dtype) if weight is None else weight
    picked = np.take_along_axis(log_prob, label[..., np.newaxis], -1).squeeze(-1)
    return _reduced(-share * picked, share, reduction), log_prob


@kernel("SparseSoftmaxCrossEntropyGrad", since=9, in_float32=True, fresh=True)
def sparse_softmax_cross_entropy_grad(
    dY: np.ndarray,
    log_prob: np.ndarray,
    label: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    reduction: str = "mean",
) -> np.ndarray:
    """dlogits = dY·weight·(e^log_prob − onehot(label)), divided by the sum of the weights for the mean"""
    check_shape("the labels", label.shape, log_prob.shape[:-1])
    check_indices(label, log_prob.shape[-1], "the labels", lowest=0)
    share = np.ones(label.shape, log_prob.dtype) if weight is None else weight
    d, at = np.exp(log_prob), label[..., np.newaxis]
    np.put_along_axis(d, at, np.take_along_axis(d, at, -1) - 1, -1)
    d *= _spread(dY, share, reduction)[..., np.newaxis]
    return np.asarray(d)


def _spread(dY: np.ndarray, weight: np.ndarray, reduction: str) -> np.ndarray:
    """The share of dY for each row: its weight, divided by the sum of the weights for the mean"""
    return np.asarray(dY * weight / (weight.sum(dtype=weight.dtype) if reduction == "mean" else 1), weight.dtype)
