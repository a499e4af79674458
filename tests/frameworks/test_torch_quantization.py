"""Models of ONNX Runtime's quantizer are trained with the losses of `refgrad.torch.Module` and of torch.

The exports keep their weights in float32, in front of QuantizeLinear. Here torch rounds by u + (round(u) - u).detach(), where
u is x/scale + zero_point, clipped for "clipped".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

from refgrad.backends import available
from refgrad.training import Adam, Training, step_model

torch = pytest.importorskip("torch")
quantization = pytest.importorskip("onnxruntime.quantization")

from refgrad.torch import Module  # noqa: E402

pytestmark = pytest.mark.torch

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
WEIGHTS = {"w1": (4, 2, 3, 3), "b1": (4,), "w2": (16, 4), "b2": (4,)}
SAMPLES, BATCH, EPOCHS, RATE = 64, 8, 8, 0.02
ALIKE = 4  # steps whose losses agree to rounding: in none of them a value comes nearer than CLEAR to the middle of two levels
CLEAR = 1e-4
EXPORTS = [(13, "QUInt8"), (21, "QInt8")]
SEED = 2
RNG = np.random.default_rng(SEED)
X = RNG.standard_normal((SAMPLES, 2, 4, 4)).astype(np.float32)
CLASSES = (X.mean((2, 3)) > 0) @ [2, 1]
INDICES = [RNG.permutation(SAMPLES)[k : k + BATCH] for _ in range(EPOCHS) for k in range(0, SAMPLES, BATCH)]
VALUES = {name: (0.2 * RNG.standard_normal(shape)).astype(np.float32) for name, shape in WEIGHTS.items()}


def exported(folder: Path, opset: int, kind: str) -> ModelProto:
    """A convolutional network, its weights and activations rounded to 8 bits."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {opset}]> net (float[N, 2, 4, 4] x) => (float[N, 4] logits) {{
            c = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
            r = Relu (c)
            p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
            f = Flatten (p)
            logits = Gemm (f, w2, b2)
        }}"""
    )
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in VALUES.items())
    onnx.save(model, folder / "float.onnx")

    class Samples(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left: Iterator[dict[str, np.ndarray]] = iter([{"x": X}])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self._left, None)

    quantization.quantize_static(
        folder / "float.onnx",
        folder / "rounded.onnx",
        Samples(),
        quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=getattr(quantization.QuantType, kind),
        weight_type=quantization.QuantType.QInt8,
        extra_options={"AddQDQPairToWeight": True, "QuantizeBias": False},
    )
    return onnx.load(folder / "rounded.onnx")


class InTorch(torch.nn.Module):  # type: ignore[misc]
    """The network in torch, which rounds what the export rounds."""

    def __init__(self, model: ModelProto, convention: str) -> None:
        super().__init__()
        self.held = torch.nn.ParameterDict({name: torch.tensor(value) for name, value in VALUES.items()})
        self._rounded = {node.input[0]: node for node in model.graph.node if node.op_type == "QuantizeLinear"}
        self._arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self._has_relu = any(node.op_type == "Relu" for node in model.graph.node)  # left out if rounding clips at 0
        self._convention = convention
        self.nearest = 0.5  # to the middle of two levels

    def forward(self, x: Any) -> Any:
        w1, b1, w2, b2 = (self._round(name, self.held[name]) for name in WEIGHTS)
        c = torch.nn.functional.conv2d(self._round("x", x), w1, b1, padding=1)
        c = self._round("c", c)
        r = self._round("r", torch.relu(c) if self._has_relu else c)
        p = self._round("p", torch.nn.functional.max_pool2d(r, 2))
        logits = self._round("f", p.flatten(1)) @ w2 + b2
        return self._round("logits_QuantizeLinear_Input", logits)

    def _round(self, name: str, x: Any) -> Any:
        if name not in self._rounded:
            return x
        node = self._rounded[name]
        (axis,) = [attribute.i for attribute in node.attribute if attribute.name == "axis"] or [0]
        scale, zero = (self._arrays[part] for part in node.input[1:])
        limits = np.iinfo(zero.dtype)
        shape = [-1 if k == axis and scale.ndim else 1 for k in range(x.ndim)]
        by, start = (torch.tensor(part.astype(np.float32)).reshape(shape) for part in (scale, zero))
        u = x / by + start
        self.nearest = min(self.nearest, (u - u.floor() - 0.5).abs().min().item())
        inside = u.clamp(int(limits.min), int(limits.max))
        u = inside if self._convention == "clipped" else u
        return (u + (inside.round() - u).detach() - start) * by


def trained(model: Any, parameters: Any, steps: int = len(INDICES)) -> list[float]:
    """The losses of each step of torch's Adam."""
    optimizer, losses = torch.optim.Adam(parameters, lr=RATE), []
    for chosen in INDICES[:steps]:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(torch.tensor(X[chosen])), torch.tensor(CLASSES[chosen]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(losses: list[float], expected: list[float], who: str) -> None:
    np.testing.assert_allclose(losses[:ALIKE], expected[:ALIKE], rtol=1e-5, err_msg=who)
    np.testing.assert_allclose(losses, expected, rtol=0.02, err_msg=who)  # after another level in one value


@pytest.mark.parametrize(("opset", "kind"), EXPORTS)
@pytest.mark.parametrize("convention", ["straight-through", "clipped"])
def test_the_loss_falls_as_in_torch(convention: str, opset: int, kind: str, tmp_path: Path) -> None:
    model = exported(tmp_path, opset, kind)
    own = InTorch(model, convention)
    trained(own, own.parameters(), ALIKE)
    assert own.nearest > CLEAR
    own = InTorch(model, convention)
    expected = trained(own, own.parameters())
    assert np.mean(expected[-8:]) < 0.7 * expected[0]
    step = step_model(model, "cross_entropy", Adam(), trainable=list(WEIGHTS), quantization=convention)
    for backend in BACKENDS:
        layer = Module(model, quantization=convention, backend=backend)
        parameters = dict(layer.named_parameters())
        compare(trained(layer, [parameters[name] for name in WEIGHTS]), expected, f"Module on {backend}")
        training = Training(step, RATE, backend)
        for chosen in INDICES:
            training.epoch([{"x": X[chosen], "label": CLASSES[chosen]}])
        compare(training.losses, expected, f"Training on {backend}")
