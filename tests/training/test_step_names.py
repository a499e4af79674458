"""Values of the model may have the names of the states of a step: the numbers stay the same, or the name is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx.parser
import pytest

from refgrad.errors import UnknownNameError
from refgrad.training import SGD, Optimizer, Training, batches, step_model


@dataclass(frozen=True)
class Odd(Optimizer):
    """Momentum in a state that is called as the sum of gradients is, beside states with other names of a step."""

    elementwise = True

    @property
    def states(self) -> dict[str, float]:
        return {"gradient": 0.0, "weights": 0.0, "step": 0.0}

    def update(self, op, w, g, rate, t, states, decay):
        m = op.Add(op.Mul(states["gradient"], 0.9), g)
        return op.Sub(w, op.Mul(rate, m)), {**states, "gradient": m}


def network(w: str = "w", b: str = "b", k: str = "k", s: str = "s", a: str = "a") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 18]>
        m (float[N, 3] x) => (float[N, 2] y)
        <float[3, 2] {w} = {{1, 0, 0.5, 1, 0, 3}}, float[2] {b} = {{1, 7}}, float[2] {k} = {{2, 3}}>
        {{ {s} = MatMul(x, {w})  {a} = Add({s}, {b})  y = Mul({a}, {k}) }}
    """)


@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), Odd()], ids=["sgd", "odd"])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("scale", [None, 64.0, "dynamic"])
def test_names_of_states_are_free_in_the_model(optimizer: Optimizer, flat: bool, scale: Any) -> None:
    rng, trained = np.random.default_rng(0), []
    data = {name: rng.standard_normal((12, size)).astype(np.float32) for name, size in (("x", 3), ("label", 2))}
    for w, b, *others in ("wbksa", ("weights", "velocity", "learning_rate", "step", "loss_scale")):
        model = network(w, b, *others)
        step = step_model(
            model, "huber", optimizer, trainable=[w, b], accumulate=2, flat=flat, loss_scale=scale, clip_norm=1.0
        )
        onnx.checker.check_model(step.model, full_check=True)
        training = Training(step, 0.1)
        training.epoch(batches(data, 3))
        trained.append([training.weights[name] for name in (w, b)])
        assert [t.name for t in training.write_to(model).graph.initializer] == [w, b, others[0]]
    for first, second in zip(*trained, strict=True):
        np.testing.assert_array_equal(first, second)


def test_the_vector_of_the_weights_has_another_name_beside_a_weight_of_its_name() -> None:
    step = step_model(network("weights"), trainable=["weights"])
    assert list(step.state) == ["weights_1"]
    [noted] = [entry.value for entry in step.model.metadata_props if entry.key == "refgrad.training"]
    assert '"vector": "weights_1"' in noted
    np.testing.assert_array_equal(step.state_with({"weights": np.ones((3, 2), np.float32)})["weights_1"], np.ones(6))


@pytest.mark.parametrize("name", ["step", "learning_rate", "loss_scale"])
def test_names_that_a_caller_feeds_are_refused(name: str) -> None:
    for of in ("label", "sample_weight"):
        with pytest.raises(UnknownNameError, match=f"The step needs the name {name!r}. Choose another one"):
            step_model(network(), **{of: name}, loss_scale=64.0)
    with pytest.raises(UnknownNameError, match=f"has a weight {name!r}, a name that the step needs. Rename the weight"):
        step_model(network(name), trainable=[name], loss_scale=64.0)
    output = network()
    output.graph.output[0].name = output.graph.node[2].output[0] = name
    with pytest.raises(UnknownNameError, match=f"has an output {name!r}"):
        step_model(output, loss_scale=64.0)
