"""Losses over class scores and their gradients. Scores are (N, C, d...), labels (N, d...), weights (C,)."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.kernels.activation import log_softmax
from refgrad.backends.numpy.registry import MICROSOFT, kernel


def _weights(
    labels: np.ndarray, weights: np.ndarray | None, ignore_index: int | None, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """For each label the class to read (0 where ignored) and its weight (0 where ignored), both (N, d...)."""
    ignored = np.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index
    classes = np.where(ignored, 0, labels)
    weight = np.ones(labels.shape, dtype) if weights is None else weights[classes].astype(dtype, copy=False)
    return classes, np.where(ignored, dtype.type(0), weight)


def _reduced(losses: np.ndarray, weight: np.ndarray, reduction: str) -> np.ndarray:
    if reduction == "none":
        return losses
    total = losses.sum(dtype=losses.dtype)
    return np.asarray(total / weight.sum(dtype=weight.dtype) if reduction == "mean" else total, losses.dtype)


@kernel("NegativeLogLikelihoodLoss", in_float32=True)
def negative_log_likelihood_loss(
    log_prob: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str,
) -> np.ndarray:
    """Loss = −w·log_prob[label]; the mean is over the sum of the weights"""
    classes, weight = _weights(labels, weights, ignore_index, log_prob.dtype)
    picked = np.take_along_axis(log_prob, np.expand_dims(classes, 1), 1).squeeze(1)
    return _reduced(np.where(weight == 0, weight, -weight * picked), weight, reduction)


@kernel("SoftmaxCrossEntropyLoss", in_float32=True)
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


@kernel("SoftmaxCrossEntropyLossInternal", domain=MICROSOFT, in_float32=True)
def softmax_cross_entropy_loss_internal(
    scores: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray | None = None,
    ignore_index: np.ndarray | None = None,
    *,
    reduction: str = "mean",
    output_type: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """SoftmaxCrossEntropyLoss with the index to ignore as an input; the mean of nothing is 0."""
    ignored = None if ignore_index is None else int(ignore_index.item())
    if reduction == "mean" and not _weights(labels, weights, ignored, scores.dtype)[1].any():
        reduction = "sum"
    return softmax_cross_entropy_loss(scores, labels, weights, ignore_index=ignored, reduction=reduction)


@kernel("SoftmaxCrossEntropyLossGrad", domain=MICROSOFT, in_float32=True)
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
    classes, weight = _weights(labels, weights, ignore_index, log_prob.dtype)
    factor = dY * weight
    if reduction == "mean":
        total = weight.sum(dtype=weight.dtype)
        factor = factor / total if total else np.zeros_like(factor)
    at = np.expand_dims(classes, 1)
    d = np.exp(log_prob)
    np.put_along_axis(d, at, np.take_along_axis(d, at, 1) - 1, 1)
    d *= np.expand_dims(factor, 1)
    return np.asarray(d)


@kernel("SoftmaxCrossEntropyLossInternalGrad", domain=MICROSOFT, in_float32=True)
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
    """The same with the index to ignore as an input, plus `bias`"""
    ignored = None if ignore_index is None else int(ignore_index.item())
    d = softmax_cross_entropy_loss_grad(dY, log_prob, labels, weights, ignore_index=ignored, reduction=reduction)
    return d if bias is None else d + bias.reshape(d.shape)
