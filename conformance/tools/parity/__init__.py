"""Dialect "ort" compared with ONNX Runtime's own builder: whether the graphs are the same, where they differ and why.

GradientGraphBuilder differentiates a scalar. So every case gets a loss, the sum of its float outputs weighted by fed
cotangents, and both builders differentiate the loss. Only the training wheel has the builder.
"""

from refgrad.conformance.problems.systems.training_form import LOSS, with_loss
from refgrad.conformance.tools.parity.cases import REGISTERED, by_operator
from refgrad.conformance.tools.parity.kept import Kept, Saved
from refgrad.conformance.tools.parity.models import WholeModel, measure_model, whole_models
from refgrad.conformance.tools.parity.pair import Pair, build
from refgrad.conformance.tools.parity.values import compare_values, farthest, run
from refgrad.conformance.tools.parity.verdicts import ParityRow, counts, grounds, measure, reason, survey, unexplained

__all__ = [
    "LOSS",
    "REGISTERED",
    "Kept",
    "Pair",
    "ParityRow",
    "Saved",
    "WholeModel",
    "build",
    "by_operator",
    "compare_values",
    "counts",
    "farthest",
    "grounds",
    "measure",
    "measure_model",
    "reason",
    "run",
    "survey",
    "unexplained",
    "whole_models",
    "with_loss",
]
