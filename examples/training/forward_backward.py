"""Train a linear regression forward and backward, each step a graph: loss, gradient, update of the weights.

The model is not changed for training. One graph maps the prediction and the label to the loss and its derivative with respect
to the prediction, one maps this cotangent to the gradient of the weights, one moves the weights. The example "Train a linear
regression with forward backward" of onnxcustom does the same.
"""

from __future__ import annotations

import numpy as np
import onnx.parser
from onnx import ModelProto

import refgrad
from refgrad.backends import get_backend

REGRESSION = """
<ir_version: 8, opset_import: ["" : 15]>
regression (float[?, 2] X) => (float[?, 1] variable)
<float[2, 1] coefficient = {0, 0}, float[1, 1] intercepts = {0}, int64[2] shape_tensor = {-1, 1}>
{
    product = MatMul(X, coefficient)
    sum = Add(product, intercepts)
    variable = Reshape(sum, shape_tensor)
}
"""
PREDICTION = """
<ir_version: 8, opset_import: ["" : 15]>
prediction (float[?, 1] predicted) => (float[?, 1] y) { y = Identity(predicted) }
"""
UPDATE = """
<ir_version: 8, opset_import: ["" : 15]>
update (float[] gradient, float[] weight, float[1] rate) => (float[] moved)
{ step = Mul(gradient, rate) moved = Sub(weight, step) }
"""
RATE, STEPS, BATCH = 0.01, 200, 10


def loss_graph() -> ModelProto:
    """The squared error of a prediction against a label, and its derivative with respect to the prediction."""
    loss = refgrad.select_model_inputs_outputs(
        refgrad.add_loss_output(onnx.parser.parse_model(PREDICTION)), outputs=["loss"]
    )
    options = refgrad.DerivativeOptions.FillGrad | refgrad.DerivativeOptions.KeepOutputs
    return refgrad.onnx_derivative(loss, inputs=["predicted"], weights=[], options=options)


def main() -> None:
    """Print the graphs, train, print the weights."""
    model = onnx.parser.parse_model(REGRESSION)
    weights = {name: value for name, (value, _) in refgrad.get_train_initializer(model).items()}
    print("The weights:", {name: value.shape for name, value in weights.items()})
    gradient = refgrad.onnx_derivative(model, inputs=[], options=refgrad.DerivativeOptions.KeepOutputs)
    graphs = {
        "prediction": refgrad.select_model_inputs_outputs(gradient, outputs=["variable"]),
        "loss and its derivative": loss_graph(),
        "gradient": gradient,
        "update": onnx.parser.parse_model(UPDATE),
    }
    for title, graph in graphs.items():
        print(f"\nThe graph of the {title}:\n{refgrad.onnx_simple_text_plot(graph)}")

    forward, error, backward, move = (get_backend("numpy").prepare(graph).run for graph in graphs.values())
    rng = np.random.default_rng(0)
    truth = np.array([[51.0], [81.0]])
    X = rng.normal(size=(100, 2)).astype(np.float32)
    y = (X @ truth + 2).astype(np.float32)
    losses = []
    for step in range(STEPS):
        rows = np.arange(step * BATCH, (step + 1) * BATCH) % len(X)
        feeds = {"X": X[rows]} | weights
        errors = error({"predicted": forward(feeds)["variable"], "label": y[rows]})
        losses.append(errors["loss"].item())
        gradients = backward(feeds | {"variable_grad": errors["predicted_grad"]})
        for name, value in weights.items():
            feeds = {"gradient": gradients[f"{name}_grad"], "weight": value, "rate": np.float32([RATE])}
            weights[name] = move(feeds)["moved"]
    print(f"\nThe loss of the first batch: {losses[0]:.6g}, of the last: {losses[-1]:.3g}")
    print("The weights:", {name: np.round(value.astype(float), 3).ravel().tolist() for name, value in weights.items()})


if __name__ == "__main__":
    main()
