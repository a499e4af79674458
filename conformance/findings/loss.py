"""Findings about losses."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32, gradient, training

F32 = np.float32

_EMPTY = np.zeros((0, 3), F32)
_LOSSES = (("SoftmaxCrossEntropyLoss", ""), ("SoftmaxCrossEntropyLossInternal", "com.microsoft."))

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "fails on an empty batch",
        'Y = NegativeLogLikelihoodLoss <reduction = "sum"> (X, t)',
        {"X": np.zeros((0, 2), F32), "t": np.zeros(0, np.int64)},
        {"Y": f32(0)},
        "the sum of nothing",
    ),
    *(
        about(
            system,
            "fails on an empty batch",
            'Y = SoftmaxCrossEntropyLoss <reduction = "sum"> (X, t)',
            {"X": np.zeros((0, 2), F32), "t": np.zeros(0, np.int64)},
            {"Y": f32(0)},
            "the sum of nothing",
        )
        for system in (REFERENCE, ORT)
    ),
    about(
        REFERENCE,
        "takes the logarithm of a softmax that is 0",
        "Y = SoftmaxCrossEntropyLoss (X, t)",
        {"X": f32([[200, 0]]), "t": np.array([1])},
        {"Y": f32(200)},
        "log Σ eˣ − 0 is 200",
    ),
    *(
        gradient(
            "ends the process on an empty batch",
            f'Y, log_prob = {domain}{op} <reduction = "sum"> (X, label)',
            f'X_grad = com.microsoft.{op}Grad <reduction = "sum"> (Y_grad, P, label)',
            {"X": _EMPTY, "P": _EMPTY, "label": np.zeros(0, np.int64), "Y_grad": np.array(1, F32)},
            {"X_grad": _EMPTY},
            crashes=True,
        )
        for op, domain in _LOSSES
    ),
    *(
        training(
            "ends the process on an empty batch",
            f'Y, log_prob = {domain}{op} <reduction = "sum"> (X, label)',
            {"X": _EMPTY, "label": np.zeros(0, np.int64)},
            {"Y": np.array(0, F32), "log_prob": _EMPTY},
            "the sum of no losses is 0",
            crashes=True,
        )
        for op, domain in _LOSSES
    ),
    gradient(
        "fails in double before opset 15, whose CastLike its body calls",
        'Y, log_prob = SoftmaxCrossEntropyLoss <reduction = "sum"> (X, label)',
        'X_grad = com.microsoft.SoftmaxCrossEntropyLossGrad <reduction = "sum"> (Y_grad, log_prob, label)',
        {"X": np.zeros((1, 2)), "label": np.array([0]), "Y_grad": np.array(1.0)},
        {"X_grad": np.array([[-0.5, 0.5]])},
        13,
    ),
    gradient(
        "does not scale each row by its own cotangent without a reduction",
        'Y, log_prob = com.microsoft.SoftmaxCrossEntropy <reduction = "none"> (X, label)',
        'X_grad = com.microsoft.SoftmaxCrossEntropyGrad <reduction = "none"> (Y_grad, log_prob, label)',
        {"X": np.zeros((2, 2), F32), "label": np.eye(2, dtype=F32), "Y_grad": f32([1, 2])},
        {"X_grad": f32([[-0.5, 0.5], [1, -1]])},
    ),
    gradient(
        "does not scale each row by its own cotangent without a reduction",
        'Y, log_prob = SparseSoftmaxCrossEntropy <reduction = "none"> (X, label)',
        'X_grad = SparseSoftmaxCrossEntropyGrad <reduction = "none"> (Y_grad, log_prob, label)',
        {"X": np.zeros((2, 2), F32), "label": np.array([0, 1]), "Y_grad": f32([1, 2])},
        {"X_grad": f32([[-0.5, 0.5], [1, -1]])},
    ),
    *(
        training(
            "adds the losses up where none is to be reduced",
            f'Y, log_prob = {op} <reduction = "none"> (X, label)',
            {"X": np.zeros((2, 2), F32), "label": label},
            {"Y": np.full(2, np.log(2), F32)},
            "'none': the output is the loss for each sample in the batch; −log(1/2) for both",
        )
        for op, label in (
            ("com.microsoft.SoftmaxCrossEntropy", np.eye(2, dtype=F32)),
            ("SparseSoftmaxCrossEntropy", np.array([0, 1])),
        )
    ),
    training(
        "fails from opset 13 on, whose Unsqueeze its body does not call",
        'Y = com.microsoft.NegativeLogLikelihoodLossInternal <reduction = "sum"> (X, label)',
        {"X": f32([[-1, -2]]), "label": np.array([1])},
        {"Y": np.array(2, F32)},
        "−X[0, label]",
    ),
)
