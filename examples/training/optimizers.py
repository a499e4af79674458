"""Train a small regression with the two optimizers of the onnxcustom notebooks, and a network with momentum.

The first optimizer is given a model that returns its loss, the second one a model and a loss. Both redraw the weights from
N(0, 1).
"""

from __future__ import annotations

import tempfile

import numpy as np
import onnx.parser

import refgrad
from refgrad.backends import get_backend
from refgrad.compat.training.optimizers import OrtGradientOptimizer
from refgrad.compat.training.optimizers_partial import OrtGradientForwardBackwardOptimizer
from refgrad.compat.training.sgd_learning_rate import LearningRateSGDNesterov
from refgrad.compat.utils.onnx_helper import onnx_rename_weights
from refgrad.show.demo import regression

WEIGHTS = ["init", "init_1", "init_b10"]
NETWORK = """
<ir_version: 8, opset_import: ["" : 15]>
network (float[N, 10] X) => (float[N, 1] Y) {
    a = MatMul(X, coefficient) b = Add(a, intercepts) c = Relu(b) d = MatMul(c, coefficient1) Y = Add(d, intercepts1)
}
"""


def main() -> None:
    """Print what the notebooks print: the optimizers with their rates, and the trained weights."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((100, 2)) / 10).astype(np.float32)
    x0, x1 = x[:, :1], x[:, 1:]
    y = -2 * x0 + 3 * x1 + 0.5 * x0**2 - 0.33333 * x1**2 - 1 + (rng.standard_normal((100, 1)) / 1000).astype(np.float32)

    session = OrtGradientOptimizer(
        regression(), WEIGHTS, learning_rate=1e-1, batch_size=5, max_iter=100, random_state=0
    )
    print(session.fit(x, y))
    print(f"The loss falls: {session.train_losses_[-1] < session.train_losses_[0] / 5}")

    forward = OrtGradientForwardBackwardOptimizer(
        regression(loss=False), WEIGHTS, learning_rate=1e-1, batch_size=2, max_iter=100, random_state=0
    )
    print(forward.fit(x, y))
    print(f"Expected a bias of {-1.0}, got {forward.trained_coef_['init_b10'].numpy().round(1).tolist()}.")
    [predicted] = get_backend("numpy").prepare(forward.get_trained_onnx()).run({"x": x}).values()
    error = np.mean((predicted - y) ** 2 / 2)
    print(f"The score is minus the mean error of the trained model: {np.isclose(-forward.score(x, y), error)}")

    network = onnx.parser.parse_model(NETWORK)
    for name, shape in (
        ("coefficient", (10, 8)),
        ("intercepts", (8,)),
        ("coefficient1", (8, 1)),
        ("intercepts1", (1,)),
    ):
        weight = (rng.standard_normal(shape) / 3).astype(np.float32)
        network.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    inputs = rng.standard_normal((300, 10)).astype(np.float32)
    expected = inputs @ rng.standard_normal(10).astype(np.float32)
    rate = LearningRateSGDNesterov(1e-2, nesterov=True, momentum=0.9)
    nesterov = OrtGradientForwardBackwardOptimizer(
        onnx_rename_weights(network), learning_rate=rate, max_iter=50, batch_size=15, start="model", random_state=0
    )
    print(nesterov.fit(inputs, expected))
    print(f"Nesterov: the loss falls: {nesterov.train_losses_[-1] < nesterov.train_losses_[0] / 20}")
    print(refgrad.onnx_simple_text_plot(nesterov.learning_rate.axpyw_onnx_))
    with tempfile.TemporaryDirectory() as folder:
        print(f"The graphs: {sorted(nesterov.save_onnx_graph(folder))}")


if __name__ == "__main__":
    main()
