"""Training with the gradient: one step is one ONNX model, which any executor runs."""

from refgrad.training.schedules import (
    Adaptive,
    Constant,
    Cosine,
    InverseScaling,
    Optimal,
    Progress,
    Schedule,
    Warmup,
)
from refgrad.training.step import StepModel, step_model
from refgrad.training.training import Training, batches
from refgrad.training.updates import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adaptive",
    "Constant",
    "Cosine",
    "InverseScaling",
    "Optimal",
    "Optimizer",
    "Progress",
    "RMSProp",
    "Schedule",
    "StepModel",
    "Training",
    "Warmup",
    "batches",
    "step_model",
]
