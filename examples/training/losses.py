"""The losses of add_loss_output on a linear regression: each with and without penalties, its graph and its value."""

from __future__ import annotations

import numpy as np
import onnx.parser

import refgrad
from refgrad.backends import get_backend

LINEAR = """
<ir_version: 8, opset_import: ["" : 15]>
linear (float[?, 10] X) => (float[?, 1] variable)
<float[10, 1] coef = {77, 1, 34, 61, 18, 24, 5, 90, 41, 7}, float[1] intercept = {2}, int64[2] shape_tensor = {-1, 1}>
{
    multiplied = MatMul(X, coef)
    resh = Add(multiplied, intercept)
    variable = Reshape(resh, shape_tensor)
}
"""
LOGISTIC = """
<ir_version: 8, opset_import: ["" : 15]>
logistic (float[?, 10] X) => (float[?, 2] probabilities) <float[10, 2] coef>
{
    scores = MatMul(X, coef)
    probabilities = Softmax(scores)
}
"""


def main() -> None:
    """Print two graphs, and the value of every loss."""
    linear = onnx.parser.parse_model(LINEAR)
    trained = refgrad.get_train_initializer(linear)
    print("What is trained:", {name: value.shape for name, (value, _) in trained.items()})

    elastic = {"score_name": "elastic", "l1_weight": 0.1, "l2_weight": 0.9}
    with_loss = refgrad.add_loss_output(linear, weight_name="weight", **elastic)
    print("\nA mixture of both losses, with a weight per row:")
    print(refgrad.onnx_simple_text_plot(with_loss))

    both = {"l1": 0.5, "l2": 0.5}
    penalty = {"coef": both, "intercept": both}
    with_penalty = refgrad.add_loss_output(linear, "elastic", weight_name="weight", penalty=penalty)
    print("\nWith penalties on both weights:")
    print(refgrad.onnx_simple_text_plot(with_penalty))

    constants, nodes = refgrad.penalty_loss_onnx("coef", np.float32, l1=0.5)
    print("\nThe nodes of one penalty:", *(node.op_type for node in nodes), "and its constants:", len(constants))

    rng = np.random.default_rng(0)
    feeds = {"X": rng.normal(size=(5, 10)), "label": rng.normal(size=(5, 1)), "weight": rng.uniform(size=5)}
    feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
    print("\nThe losses of five rows:")
    for settings in (
        {"score_name": "squared_error"},
        {"score_name": "absolute_error"},
        {"score_name": "half_squared_error"},
        {"score_name": "huber", "delta": 2.0},
        elastic,
        {"penalty": {"coef": 0.1}},
    ):
        model = refgrad.add_loss_output(linear, weight_name="weight", **settings)
        print(f"{settings}: {get_backend('numpy').prepare(model).run(feeds)['loss'].item():.6g}")

    logistic = onnx.parser.parse_model(LOGISTIC.replace("coef>", f"coef = {{{', '.join(['0.5', '-0.5'] * 10)}}}>"))
    binary = {"X": feeds["X"], "label": np.float32([[0], [1], [1], [0], [1]])}
    loss = get_backend("numpy").prepare(refgrad.add_loss_output(logistic, "log")).run(binary)["loss"]
    print(f"the log loss of a classifier: {loss.item():.6g}")


if __name__ == "__main__":
    main()
