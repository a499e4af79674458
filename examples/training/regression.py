"""Gradients of f(x, y) = a + b·x + c·y + d·x² + e·y², and stochastic gradient descent with nothing but graphs.

The function, its gradient for a given cotangent, the squared error as loss, the gradient of the loss, and the coefficients
that come out of it. The steps are those of the notebook "Stochastic Gradient Descent on simple function" of onnxcustom.
"""

from __future__ import annotations

import numpy as np

import refgrad
from refgrad import DerivativeOptions
from refgrad.backends import get_backend
from refgrad.show import demo


def main() -> None:
    """Print every graph on the way and the numbers."""
    function = demo.regression(loss=False)
    points = demo.feeds()["x"]
    values = get_backend("numpy").prepare(function).run({"x": points})["y"]
    print("The function, with the coefficients -1, -2, 3, 1/2 and -1/3:")
    print(refgrad.onnx_simple_text_plot(function))
    print("at five points:", values.ravel())

    gradient = refgrad.onnx_derivative(function)
    print("\nIts gradient takes the cotangent y_grad, as a layer of a network would:")
    print(refgrad.onnx_text_plot_io(gradient))
    print(refgrad.onnx_simple_text_plot(refgrad.onnx_rename_names(gradient)))
    print("operators:", *sorted({node.op_type for node in gradient.graph.node}))

    with_loss = refgrad.add_loss_output(function)
    print("\nThe squared error against a label is one more output. It comes first:")
    print([value.name for value in with_loss.graph.output])
    loss_only = refgrad.select_model_inputs_outputs(with_loss, outputs=["loss"])
    options = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
    gradient = refgrad.onnx_derivative(loss_only, options=options)
    print("\nThe gradient of the loss needs no cotangent, it is 1:")
    print(refgrad.onnx_simple_text_plot(refgrad.onnx_rename_names(gradient)))

    run = get_backend("numpy").prepare(gradient).run
    weights = {name: demo.feeds()[name] for name in ("init", "init_1", "init_b10")}
    print("\nAt the five points, from other coefficients:")
    for name, value in run({"x": points, "label": values} | weights).items():
        print(f"{name} = {value.tolist()}")

    rng = np.random.default_rng(0)
    for _ in range(400):
        x = rng.normal(size=(20, 2)).astype(np.float32)
        label = get_backend("numpy").prepare(function).run({"x": x})["y"]
        results = run({"x": x, "label": label} | weights)
        weights = {name: value - np.float32(0.002) * results[f"{name}_grad"] for name, value in weights.items()}
    print("\nAfter 400 steps of stochastic gradient descent:")
    for name, value in weights.items():
        print(f"{name} = {np.round(value.astype(float), 3).tolist()}")


if __name__ == "__main__":
    main()
