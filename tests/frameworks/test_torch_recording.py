"""What torch computes, recorded, against refgrad's gradients of the export: parameters are found, and a wrong one is named."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch import nn  # noqa: E402

from refgrad.cli import main  # noqa: E402
from refgrad.conformance import compare  # noqa: E402
from refgrad.conformance.locating.recording_torch import record  # noqa: E402
from refgrad.errors import OptionError  # noqa: E402


class Recurrent(nn.Module):
    """An LSTM, whose gates the exporter reorders, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    """q, k and v in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


def normed() -> nn.Module:
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    module[1].running_mean.normal_()
    module[1].running_var.uniform_(0.5, 2)
    nn.init.normal_(module[1].weight)
    return module.eval()


MODULES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), (5, 4)),
    "lstm": (Recurrent, (2, 5, 3)),
    "attention": (Attention, (2, 5, 8)),
    "normed": (normed, (2, 2, 4, 4)),
}


def exported(name: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    make, shape = MODULES[name]
    module, x = make(), torch.randn(*shape)
    for parameter in module.parameters():  # the exporter merges equal tensors
        nn.init.normal_(parameter, std=0.3) if parameter.ndim < 2 else None
    for logger in ("torch.onnx", "onnxscript"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module.eval(), (x,), dynamo=True, verbose=False)
    return module, x, program.model_proto


@pytest.mark.parametrize("name", MODULES)
def test_every_parameter_is_found_and_right(name: str) -> None:
    module, x, model = exported(name)
    made = record(module, (x,), model=model)
    found = compare(model, "refgrad@numpy", made)
    assert found.ok, [(tensor.name, tensor.verdict, tensor.b.reason) for tensor in found.tensors if not tensor.ok]
    compared = {tensor.name for tensor in found.tensors if tensor.kind == "gradient"}
    assert compared >= {key for key, _ in module.named_parameters()}
    assert not found.b.unmatched


@pytest.mark.parametrize("name", MODULES)
def test_a_wrong_parameter_is_named(name: str) -> None:
    module, x, model = exported(name)
    made = record(module, (x,), model=model)
    key = next(key for key, _ in module.named_parameters())
    made[f"{key}_grad"] = 1.001 * made[f"{key}_grad"]
    found = compare(model, "refgrad@numpy", made)
    assert [(tensor.name, tensor.verdict) for tensor in found.tensors if not tensor.ok] == [(key, "b is wrong")]


@pytest.mark.parametrize("name", ["mlp", "lstm", "attention"])
def test_gradients_alone_are_enough(name: str) -> None:
    module, x, model = exported(name)
    made = record(module, (x,), model=model)
    inputs = {value.name for value in model.graph.input}
    alone = {key: value for key, value in made.items() if key.endswith("_grad") or key in inputs}
    found = compare(model, "refgrad@numpy", alone)
    assert found.ok, [(tensor.name, tensor.b.reason) for tensor in found.tensors if not tensor.ok]
    assert not found.b.unmatched


def test_the_command_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recorded_module.py").write_text(
        "import torch\n\n\ndef make():\n    torch.manual_seed(0)\n"
        "    return torch.nn.Linear(3, 2), (torch.randn(4, 3),)\n\n\ndef nothing():\n    return 1\n"
    )
    assert main(["record", "recorded_module:make", "-o", "r.npz"]) == 0
    with np.load("r.npz") as made:
        assert {"weight", "weight_grad", "bias_grad", "input_0", "input_0_grad", "output", "output_grad"} <= set(
            made.files
        )
    assert main(["record", "recorded_module:nothing", "-o", "s.npz"]) == 2
    assert main(["record", "recorded_module:absent", "-o", "s.npz"]) == 2
    with pytest.raises(OptionError, match="Expected tensors, got"):
        record(nn.Identity(), ("text",))
