"""Reverse-mode differentiation of ONNX models: a model goes in, a model of its gradient comes out."""

from typing import TYPE_CHECKING, Any

from refgrad import checkout, interruption

checkout.find_neighbours()
interruption.end_quietly()
del checkout, interruption

import refgrad.rules  # noqa: E402, F401  (it registers every rule)
from refgrad import recipes  # noqa: E402
from refgrad.compat.derivative import DerivativeOptions, onnx_derivative, random_feed  # noqa: E402
from refgrad.derivatives.expansion import expand_gradients  # noqa: E402
from refgrad.derivatives.higher import hessian, hvp, jacobian, jvp  # noqa: E402
from refgrad.links import data_in  # noqa: E402
from refgrad.parameters.weights import weights, write_back  # noqa: E402
from refgrad.reverse.gradient import gradient, preflight  # noqa: E402
from refgrad.rewrites.lifting import lift_weights  # noqa: E402
from refgrad.rewrites.losses import add_loss_output, get_train_initializer, penalty_loss_onnx  # noqa: E402
from refgrad.rewrites.lower import lower  # noqa: E402
from refgrad.rewrites.selection import onnx_rename_names, onnx_rename_weights, select_model_inputs_outputs  # noqa: E402
from refgrad.rewrites.split import Split, split  # noqa: E402
from refgrad.show.dot import to_dot  # noqa: E402
from refgrad.show.plot import plot_onnxs  # noqa: E402
from refgrad.show.svg import to_svg  # noqa: E402
from refgrad.show.text import onnx_simple_text_plot, onnx_text_plot_io  # noqa: E402

if TYPE_CHECKING:
    from refgrad.planning.cost import cost
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


_LATE = {"cost": "refgrad.planning.cost", "walk": "refgrad.walks.walk"}


def __getattr__(name: str) -> Any:
    """`refgrad.cost` and `refgrad.walk` know executors: they are imported when they are asked for, as refgrad imports none."""
    if name in _LATE:
        from importlib import import_module

        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module 'refgrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
