"""Reverse-mode differentiation of ONNX models: a model goes in, a model of its gradient comes out."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a source checkout `backends/` and `conformance/` lie beside this folder; an install maps them in by itself.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "backends").is_dir() and str(_checkout) not in __path__:
    __path__.append(str(_checkout))
del _checkout, Path

from refgrad import interruption  # noqa: E402

interruption.end_quietly()
del interruption

import refgrad.rules  # noqa: E402, F401  (it registers every rule)
from refgrad import recipes  # noqa: E402
from refgrad.costs.cost import cost  # noqa: E402
from refgrad.links import data_in  # noqa: E402
from refgrad.reverse.gradient import gradient, preflight  # noqa: E402
from refgrad.show.dot import to_dot  # noqa: E402
from refgrad.show.plot import plot_onnxs  # noqa: E402
from refgrad.show.svg import to_svg  # noqa: E402
from refgrad.show.text import onnx_simple_text_plot, onnx_text_plot_io  # noqa: E402
from refgrad.transforms.derivative import DerivativeOptions, onnx_derivative, random_feed  # noqa: E402
from refgrad.transforms.expansion import expand_gradients  # noqa: E402
from refgrad.transforms.higher import hessian, hvp, jacobian, jvp  # noqa: E402
from refgrad.transforms.lifting import lift_weights  # noqa: E402
from refgrad.transforms.losses import add_loss_output, get_train_initializer, penalty_loss_onnx  # noqa: E402
from refgrad.transforms.lower import lower  # noqa: E402
from refgrad.transforms.selection import onnx_rename_names, onnx_rename_weights, select_model_inputs_outputs  # noqa: E402
from refgrad.transforms.split import Split, split  # noqa: E402
from refgrad.transforms.weights import weights, write_back  # noqa: E402

if TYPE_CHECKING:
    from refgrad.walks.walk import walk

__all__ = [
    "DerivativeOptions",
    "Split",
    "add_loss_output",
    "cost",
    "data_in",
    "expand_gradients",
    "get_train_initializer",
    "gradient",
    "hessian",
    "hvp",
    "jacobian",
    "jvp",
    "lift_weights",
    "lower",
    "onnx_derivative",
    "onnx_rename_names",
    "onnx_rename_weights",
    "onnx_simple_text_plot",
    "onnx_text_plot_io",
    "penalty_loss_onnx",
    "plot_onnxs",
    "preflight",
    "random_feed",
    "recipes",
    "select_model_inputs_outputs",
    "split",
    "to_dot",
    "to_svg",
    "walk",
    "weights",
    "write_back",
]


def __getattr__(name: str) -> Any:
    """`refgrad.walk` runs gradients: it is imported when it is asked for, since refgrad imports no executor."""
    if name == "walk":
        from importlib import import_module

        return import_module("refgrad.walks.walk").walk
    raise AttributeError(f"module 'refgrad' has no attribute {name!r}")
