"""Training with the gradient: one step is one ONNX model, which any executor runs."""

from refgrad.errors import ConvergenceError
from refgrad.show.plot import plot_losses
from refgrad.training.adapters import lora, merge_adapters
from refgrad.training.artifacts import write_artifacts
from refgrad.training.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from refgrad.training.conventions import Convention, convention
from refgrad.training.data import Arrays, Batches, Data, Shards, open_data
from refgrad.training.optimizers import OrtGradientOptimizer
from refgrad.training.optimizers_partial import OrtGradientForwardBackwardOptimizer
from refgrad.training.runs import Run
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
from refgrad.training.sgd_learning_loss import (
    AbsoluteLearningLoss,
    ElasticLearningLoss,
    NegLogLearningLoss,
    SquareLearningLoss,
)
from refgrad.training.sgd_learning_penalty import ElasticLearningPenalty, NoLearningPenalty
from refgrad.training.sgd_learning_rate import LearningRateSGD, LearningRateSGDNesterov
from refgrad.training.step import step_model
from refgrad.training.steps import StepModel
from refgrad.training.training import Training, batches
from refgrad.training.training_info import from_training_info, with_training_info
from refgrad.training.updates import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp

__all__ = [
    "SGD",
    "AbsoluteLearningLoss",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adaptive",
    "Arrays",
    "Batches",
    "Checkpoint",
    "Constant",
    "Convention",
    "ConvergenceError",
    "Cosine",
    "Data",
    "ElasticLearningLoss",
    "ElasticLearningPenalty",
    "InverseScaling",
    "LearningRateSGD",
    "LearningRateSGDNesterov",
    "NegLogLearningLoss",
    "NoLearningPenalty",
    "Optimal",
    "Optimizer",
    "OrtGradientForwardBackwardOptimizer",
    "OrtGradientOptimizer",
    "Progress",
    "RMSProp",
    "Run",
    "Schedule",
    "Shards",
    "SquareLearningLoss",
    "StepModel",
    "Training",
    "Warmup",
    "batches",
    "convention",
    "from_training_info",
    "load_checkpoint",
    "lora",
    "merge_adapters",
    "open_data",
    "plot_losses",
    "save_checkpoint",
    "step_model",
    "with_training_info",
    "write_artifacts",
]
