"""Reverse-mode differentiation of ONNX models: a model goes in, a model of its gradient comes out."""

from pathlib import Path

# In a source checkout `backends/` and `conformance/` lie beside this folder; an install maps them in by itself.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "backends").is_dir() and str(_checkout) not in __path__:
    __path__.append(str(_checkout))
del _checkout, Path

import refgrad.rules  # noqa: E402, F401  (it registers every rule)
from refgrad.backward import gradient, preflight  # noqa: E402
from refgrad.derivative import DerivativeOptions, onnx_derivative, random_feed  # noqa: E402
from refgrad.losses import add_loss_output, get_train_initializer, penalty_loss_onnx  # noqa: E402

__all__ = [
    "DerivativeOptions",
    "add_loss_output",
    "get_train_initializer",
    "gradient",
    "onnx_derivative",
    "penalty_loss_onnx",
    "preflight",
    "random_feed",
]
