"""Training with the gradient: one step is one ONNX model, which any executor runs."""

from refgrad.training.optimizers import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp
from refgrad.training.step import StepModel, step_model

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Optimizer", "RMSProp", "StepModel", "step_model"]
