"""Training with the gradient: one step is one ONNX model, which any executor runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from refgrad.errors import ConvergenceError
from refgrad.show.plot import plot_losses
from refgrad.training.adapter_files import save_adapter, with_adapter_inputs
from refgrad.training.adapters import lora, merge_adapters
from refgrad.training.artifacts import write_artifacts
from refgrad.training.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from refgrad.training.conventions import Convention, convention
from refgrad.training.data import Arrays, Batches, Data, Shards
from refgrad.training.loss_terms import sum_of_losses
from refgrad.training.many_processes import PartGradient, part_of
from refgrad.training.optimizers import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp
from refgrad.training.runs import Run
from refgrad.training.saving import save_trained
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
from refgrad.training.sources import open_data
from refgrad.training.step import step_model
from refgrad.training.steps import StepModel
from refgrad.training.term import LossTerm
from refgrad.training.training import Training, batches
from refgrad.training.training_info import from_training_info, with_training_info
from refgrad.training.two_models import gradient_model, update_model

if TYPE_CHECKING:
    from refgrad.compat.training.optimizers import OrtGradientOptimizer
    from refgrad.compat.training.optimizers_partial import OrtGradientForwardBackwardOptimizer
    from refgrad.compat.training.sgd_learning_loss import (
        AbsoluteLearningLoss,
        ElasticLearningLoss,
        NegLogLearningLoss,
        SquareLearningLoss,
    )
    from refgrad.compat.training.sgd_learning_penalty import ElasticLearningPenalty, NoLearningPenalty
    from refgrad.compat.training.sgd_learning_rate import LearningRateSGD, LearningRateSGDNesterov

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
    "LossTerm",
    "NegLogLearningLoss",
    "NoLearningPenalty",
    "Optimal",
    "Optimizer",
    "OrtGradientForwardBackwardOptimizer",
    "OrtGradientOptimizer",
    "PartGradient",
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
    "gradient_model",
    "load_checkpoint",
    "lora",
    "merge_adapters",
    "open_data",
    "part_of",
    "plot_losses",
    "save_adapter",
    "save_checkpoint",
    "save_trained",
    "step_model",
    "sum_of_losses",
    "update_model",
    "with_adapter_inputs",
    "with_training_info",
    "write_artifacts",
]

_COMPAT = {
    "optimizers": ("OrtGradientOptimizer",),
    "optimizers_partial": ("OrtGradientForwardBackwardOptimizer",),
    "sgd_learning_loss": ("AbsoluteLearningLoss", "ElasticLearningLoss", "NegLogLearningLoss", "SquareLearningLoss"),
    "sgd_learning_penalty": ("ElasticLearningPenalty", "NoLearningPenalty"),
    "sgd_learning_rate": ("LearningRateSGD", "LearningRateSGDNesterov"),
}


def __getattr__(name: str) -> Any:
    """The classes of onnxcustom, which are built on this package: they are imported when they are asked for."""
    for module, names in _COMPAT.items():
        if name in names:
            return getattr(import_module(f"refgrad.compat.training.{module}"), name)
    raise AttributeError(f"module 'refgrad.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
