"""The examples of the projects that refgrad follows, executed, with what they print and pictures of what they compute."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from text import fence

import refgrad
from refgrad.backends import get_backend
from refgrad.show import demo

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "training"
SECONDS = 120


@dataclass(frozen=True)
class Picture:
    """A picture as SVG, with what it shows."""

    name: str
    shows: str
    svg: str


def printed(script: Path) -> str:
    """Return what a script prints.

    :raises RuntimeError: it fails, or takes longer than `SECONDS`.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{script.name} fails: {error.stderr.strip()[-500:]}") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{script.name} takes longer than {SECONDS} s.") from error
    return done.stdout


def _plot(draw: Callable[[Any], None]) -> str:
    """A figure as SVG, the same bytes whenever it is drawn."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "refgrad", "svg.fonttype": "path"}):
        figure, axes = pyplot.subplots(figsize=(6.5, 3.4), layout="constrained")
        draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    text = file.getvalue()
    return text[text.index("<svg") :]


def _curve(title: str, losses: Mapping[str, Any]) -> str:
    def draw(axes: Any) -> None:
        for name, values in losses.items():
            axes.semilogy(np.arange(len(values)), values, label=name)
        axes.set(xlabel="step", ylabel="loss", title=title)
        if len(losses) > 1:
            axes.legend()
        axes.grid(alpha=0.3)

    return _plot(draw)


def _points(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of the function of the notebook, with a little noise."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((count, 2)) / 10).astype(np.float32)
    y = x @ np.float32([[-2], [3]]) + (x**2) @ np.float32([[0.5], [-0.33333]]) - 1
    return x, (y + rng.standard_normal(y.shape) / 1000).astype(np.float32)


def _regression() -> list[Picture]:
    function = demo.regression(loss=False)
    with_loss = refgrad.select_model_inputs_outputs(refgrad.add_loss_output(function), outputs=["loss"])
    options = refgrad.DerivativeOptions.FillGrad | refgrad.DerivativeOptions.KeepOutputs
    gradient = refgrad.onnx_derivative(with_loss, options=options)
    run = get_backend("numpy").prepare(gradient).run
    forward = get_backend("numpy").prepare(function).run
    weights = {name: demo.feeds()[name] for name in ("init", "init_1", "init_b10")}
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(400):
        x = rng.normal(size=(20, 2)).astype(np.float32)
        results = run({"x": x, "label": forward({"x": x})["y"]} | weights)
        losses.append(results["loss"].item())
        weights = {name: value - np.float32(0.002) * results[f"{name}_grad"] for name, value in weights.items()}
    return [
        Picture("function", "The function, as ONNX", refgrad.to_svg(function)),
        Picture("gradient", "Its gradient for a given cotangent", refgrad.to_svg(refgrad.onnx_derivative(function))),
        Picture("gradient_of_loss", "The gradient of the loss", refgrad.to_svg(gradient)),
        Picture("loss", "The loss over 400 steps", _curve("Stochastic gradient descent", {"loss": losses})),
    ]


def _optimizers() -> list[Picture]:
    from refgrad.compat.training.optimizers import OrtGradientOptimizer
    from refgrad.compat.training.optimizers_partial import OrtGradientForwardBackwardOptimizer

    x, y = _points(100)
    names = ["init", "init_1", "init_b10"]
    settings: dict[str, Any] = {"learning_rate": 1e-1, "max_iter": 100, "random_state": 0}
    whole = OrtGradientOptimizer(demo.regression(), names, batch_size=5, **settings).fit(x, y)
    partial = OrtGradientForwardBackwardOptimizer(demo.regression(loss=False), names, batch_size=5, **settings)
    losses = {
        "a model with its loss": whole.train_losses_,
        "forward and backward apart": partial.fit(x, y).train_losses_,
    }
    return [Picture("loss", "The loss of each iteration, from random weights", _curve("Both optimizers", losses))]


def _forward_backward() -> list[Picture]:
    from refgrad.compat.training.optimizers_partial import OrtGradientForwardBackwardOptimizer

    model = onnx.parser.parse_model(_constant("forward_backward", "REGRESSION"))
    gradient = refgrad.onnx_derivative(model, inputs=[], options=refgrad.DerivativeOptions.KeepOutputs)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 2)).astype(np.float32)
    y = (x @ np.float32([[51], [81]]) + 2).astype(np.float32)
    trained = OrtGradientForwardBackwardOptimizer(
        model, ["coefficient", "intercepts"], learning_rate=1e-2, batch_size=10, max_iter=40, random_state=0
    ).fit(x, y)
    return [
        Picture("forward", "The linear regression", refgrad.to_svg(model)),
        Picture("backward", "The gradient of its weights for a given cotangent", refgrad.to_svg(gradient)),
        Picture("loss", "The loss of each iteration", _curve("Forward and backward", {"loss": trained.train_losses_})),
    ]


def _derivative_options() -> list[Picture]:
    from refgrad import DerivativeOptions as Options

    add = onnx.parser.parse_model(_constant("derivative_options", "ADD"))
    forms = {
        "zero": ("Zero: the cotangent is an input", Options.Zero),
        "keep_yield_op": ("KeepYieldOp: YieldOp returns Y and takes its cotangent", Options.KeepYieldOp),
        "keep_outputs": ("KeepOutputs: Y is an output too", Options.KeepOutputs),
        "fill_grad": ("FillGrad and KeepOutputs: the cotangent is 1", Options.FillGrad | Options.KeepOutputs),
    }
    return [
        Picture(name, shows, refgrad.to_svg(refgrad.onnx_derivative(add, options=options)))
        for name, (shows, options) in forms.items()
    ]


def _losses() -> list[Picture]:
    linear = onnx.parser.parse_model(_constant("losses", "LINEAR"))
    penalty = {"coef": {"l1": 0.5, "l2": 0.5}}
    settings: dict[str, dict[str, Any]] = {
        "squared_error": {"score_name": "squared_error"},
        "absolute_error": {"score_name": "absolute_error"},
        "elastic": {"score_name": "elastic", "l1_weight": 0.1, "l2_weight": 0.9},
    }

    def draw(axes: Any) -> None:
        errors = np.linspace(-2, 2, 81, dtype=np.float32)
        identity = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["" : 15]> g (float[?, 1] x) => (float[?, 1] y) { y = Identity(x) }'
        )
        for name, options in settings.items():
            run = get_backend("numpy").prepare(refgrad.add_loss_output(identity, **options)).run
            values = [
                run({"x": error.reshape(1, 1), "label": np.zeros((1, 1), np.float32)})["loss"].item()
                for error in errors
            ]
            axes.plot(errors, values, label=name)
        axes.set(xlabel="prediction − label", ylabel="loss")
        axes.legend()
        axes.grid(alpha=0.3)

    return [
        Picture("values", "The losses of one prediction", _plot(draw)),
        Picture("squared", "A linear model with the squared error", refgrad.to_svg(refgrad.add_loss_output(linear))),
        Picture(
            "penalty",
            "With a penalty on its coefficients",
            refgrad.to_svg(refgrad.add_loss_output(linear, "elastic", penalty=penalty)),
        ),
    ]


def _constant(script: str, name: str) -> str:
    """A text that a script names."""
    import runpy

    return str(runpy.run_path(str(FOLDER / f"{script}.py"))[name])


EXAMPLES = {  # a script of examples/training: its title, the document it answers to, and its pictures
    "regression": (
        "The notebook: gradients of a simple function",
        'It follows the notebook of onnxcustom "Stochastic Gradient Descent on simple function", and prints its numbers.',
        _regression,
    ),
    "optimizers": (
        "The notebook: its optimizers",
        "The classes with which the notebooks of onnxcustom train, under the same names.",
        _optimizers,
    ),
    "forward_backward": (
        "Linear regression, forward and backward",
        'It does what the example of onnxcustom "Train a linear regression with forward backward" does.',
        _forward_backward,
    ),
    "derivative_options": (
        "The gradient helper reference: every form of a gradient",
        "The functions of `experimental_experiment.gradient.grad_helper`, under the same names.",
        _derivative_options,
    ),
    "losses": (
        "The gradient helper reference: losses and penalties",
        "`add_loss_output` and `penalty_loss_onnx` of the same reference, each loss with its graph and its value.",
        _losses,
    ),
}


def pages() -> tuple[dict[str, str], dict[str, str]]:
    """Return the pages of the examples and their pictures, both by their path in the site.

    :raises RuntimeError: an example fails.
    """
    texts, pictures = {}, {}
    for name, (title, whence, draw) in EXAMPLES.items():
        parts = [f"# {title}\n\n{whence}\n"]
        drawn = draw()
        for picture in drawn:
            path = f"pictures/{name}.{picture.name}.svg"
            pictures[f"examples/{path}"] = picture.svg
            parts.append(f"## {picture.shows}\n\n![{picture.shows}]({path})\n")
        script = FOLDER / f"{name}.py"
        parts.append(
            f"## The script\n\n`examples/training/{name}.py`\n\n{fence(script.read_text(encoding='utf-8'), 'python')}"
        )
        parts.append(f"## What it prints\n\n{fence(printed(script))}")
        texts[f"examples/{name}.md"] = "\n".join(parts)
    return texts, pictures
