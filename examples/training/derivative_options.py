"""The gradient of Y = X + c in every form that DerivativeOptions give it.

The forms are those of experimental_experiment.gradient.grad_helper, whose functions refgrad has under the same names.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx.parser

import refgrad
from refgrad import DerivativeOptions

ADD = """
<ir_version: 8, opset_import: ["" : 15]>
add (float[?, 10] X) => (float[?, 10] Y) <float[1] Ad_Addcst = {1}> { [Ad_Add] Y = Add(X, Ad_Addcst) }
"""
FORMS = {
    "KeepYieldOp: YieldOp returns Y to the caller and takes its cotangent": DerivativeOptions.KeepYieldOp,
    "Zero: the cotangent is an input": DerivativeOptions.Zero,
    "KeepOutputs: Y is an output too": DerivativeOptions.KeepOutputs,
    "FillGrad | KeepOutputs: the cotangent is 1": DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs,
}


def main() -> None:
    """Print the gradient in every form."""
    add = onnx.parser.parse_model(ADD)
    for title, options in FORMS.items():
        gradient = refgrad.onnx_derivative(add, options=options)
        print(f"{title}\n{refgrad.onnx_simple_text_plot(gradient)}\n")

    print("By the weights alone, in ai.onnx operators alone, and as a graph for graphviz")
    gradient = refgrad.onnx_derivative(add, inputs=[], dialect="onnx")
    print(refgrad.to_dot(gradient), "\n")

    print("Loss: the gradient of an output that is a loss, saved to a file")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gradient.onnx")
        refgrad.onnx_derivative(
            refgrad.add_loss_output(add), options=DerivativeOptions.Loss, loss="loss", label="label", path_name=path
        )
        print(refgrad.onnx_text_plot_io(path))

    feeds = refgrad.random_feed(gradient.graph.input, batch=3)
    print("\nRandom feeds:", {name: value.shape for name, value in feeds.items()})


if __name__ == "__main__":
    main()
