"""ONNX Runtime's kernels for losses, each with the condition under which it is right."""

from __future__ import annotations

from refgrad.builder.op import Emitter
from refgrad.tables.registry import lowering


@lowering("SoftmaxCrossEntropyLossGrad", dialect="ort")
def softmax_cross_entropy_loss_grad(
    op: Emitter,
    d_output: str,
    log_prob: str,
    labels: str,
    weights: str | None,
    reduction: str,
    ignore_index: int | None,
) -> str | None:
    """If there are no labels, the process ends."""
    if 0 in (op.shape(log_prob) or ()):
        return None
    return op.com_microsoft(
        "SoftmaxCrossEntropyLossGrad",
        d_output,
        log_prob,
        labels,
        weights,
        reduction=reduction,
        ignore_index=ignore_index,
    )
