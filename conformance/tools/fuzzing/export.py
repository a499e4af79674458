"""`python -m refgrad.conformance.tools.fuzzing.export`: write the small models of PyTorch that are fuzzed.

Needs torch and onnxscript. The models are small and checked in, so that fuzzing needs neither.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

FOLDER = Path(__file__).with_name("exported")


class Attention(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Attention as torch writes it, with a mask, after an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens [batch, time]."""
        x = self.embedding(tokens)
        batch, time, size = x.shape
        q, k, v = self.project(self.norm(x)).reshape(batch, time, 3, 2, size // 2).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, size)) @ self.embedding.weight.T


class Indexing(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Reads, writes, rolls, sorts and sums by index."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        """Return a matrix of rows of x."""
        picked = x[index].masked_fill(x[index] > 1, 0.5)
        top, _ = picked.topk(2, dim=-1)
        padded = nn.functional.pad(picked, (1, 0, 0, 1), mode="constant", value=0.25)
        scattered = torch.zeros_like(x).index_add(0, index, picked)
        einsum = torch.einsum("ij,kj->ik", picked, x).cumsum(1)
        joined = torch.cat([top, padded[:-1], einsum, scattered[: index.shape[0]]], dim=1)
        return torch.where(joined > 0, joined.flip(1), torch.roll(joined, 1, 0))


class Branch(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Two branches."""

    def forward(self, x: Tensor) -> Tensor:
        """Return sin or cos, by the sum of x."""
        return torch.cond(x.sum() > 0, lambda x: x.sin() * x, lambda x: x.cos() - x.exp(), (x,))


def models() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """The models by name, and their inputs."""
    image = torch.randn(1, 3, 8, 8)
    convolution = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, padding=1),
        nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 2, 2, stride=2), nn.Upsample(scale_factor=2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3), nn.LogSoftmax(dim=1),
    )  # fmt: skip
    return {
        "convolution": (convolution, (image,)),
        "attention": (Attention(), (torch.tensor([[1, 2, 3], [4, 5, 6]]),)),
        "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu"), (torch.randn(2, 3, 8),)),
        "lstm": (nn.LSTM(3, 2, bidirectional=True), (torch.randn(4, 2, 3),)),
        "gru": (nn.GRU(3, 2), (torch.randn(4, 2, 3),)),
        "indexing": (Indexing(), (torch.randn(4, 4), torch.tensor([0, 2, 3]))),
        "branch": (Branch(), (torch.randn(3),)),
    }


def export(model: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> onnx.ModelProto:
    """The model as torch writes it, without what tells where its nodes come from."""
    program = torch.onnx.export(model.eval(), inputs, dynamo=True, verbose=False, **options)
    assert program is not None
    made: onnx.ModelProto = program.model_proto
    for node in made.graph.node:
        del node.metadata_props[:]
    return made


def main() -> None:
    """Write every model."""
    warnings.simplefilter("ignore")
    for logger in ("torch.onnx", "onnxscript"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    torch.manual_seed(0)
    for name, (model, inputs) in models().items():
        dynamic = [{0: torch.export.Dim.DYNAMIC}] if name in ("attention", "encoder") else None
        made = export(model, inputs, optimize=name != "indexing", dynamic_shapes=dynamic)
        onnx.save(made, FOLDER / f"{name}.onnx")


if __name__ == "__main__":
    main()
