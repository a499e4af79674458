"""`refgrad.torch.Module` forward and backward, beside its two sessions alone and beside torch eager for the same module.

    python examples/torch_models.py FOLDER bert gpt2 resnet18 vit
    python benchmarks/torch_module.py FOLDER [MODEL ...]

The gradient is by all float inputs and all parameters, on two threads. "sessions" are the forward and the backward part of the
same gradient on ONNX Runtime, called one after the other with OrtValues (`run_with_ort_values`); "bound" are the same with all
inputs and outputs bound beforehand, so that Python does nothing. Each is measured in a process of its own, in turn. Needs
torch, transformers and onnxruntime.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run_time import THREADS, load, torch_eager
from split import Bound
from timing import alternate_processes, save

import refgrad
from refgrad.torch import Module

NAMES, ROUNDS = ("vit", "bert", "gpt2", "resnet18"), 15
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))


def in_module(folder: Path, name: str) -> Callable[[], Any]:
    """The layer under torch.autograd."""
    torch.set_num_threads(THREADS)
    _, feeds, _ = load(folder, name)
    cotangent = torch.from_numpy(feeds.pop("output_grad"))
    inputs = {key: torch.from_numpy(value) for key, value in feeds.items()}
    layer = Module(folder / f"{name}.onnx")
    leaves = [tensor.requires_grad_() for tensor in inputs.values() if tensor.is_floating_point()]
    leaves += list(layer.parameters())
    return lambda: torch.autograd.grad(layer(**inputs), leaves, cotangent)


def parts_of(folder: Path, name: str) -> tuple[refgrad.Split, dict[str, Any]]:
    """Both parts of the gradient that the layer computes, and what they are fed."""
    import onnxruntime

    model, feeds, _ = load(folder, name)
    layer = Module(folder / f"{name}.onnx")
    wrt = [key for key, value in feeds.items() if value.dtype.kind == "f" and not key.endswith("_grad")]
    parts = refgrad.split(model, [*wrt, *(key for key, _ in layer.named_parameters())], kinks="torch", weights="inputs")
    feeds |= {key: value.detach().numpy() for key, value in layer.named_parameters()}
    return parts, {key: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(v)) for key, v in feeds.items()}


def bound(folder: Path, name: str) -> Callable[[], Any]:
    """Both parts, bound to their inputs and outputs."""
    parts, values = parts_of(folder, name)
    forward = Bound(parts.forward, values, THREADS, spinning=False)
    backward = Bound(parts.backward, values | forward.results, THREADS, spinning=False)
    return lambda: (forward(), backward())


def in_sessions(folder: Path, name: str) -> Callable[[], Any]:
    """Both parts, called with values."""
    parts, values = parts_of(folder, name)
    forward = Bound(parts.forward, values, THREADS, spinning=False).session
    backward = Bound(parts.backward, values | Bound(parts.forward, values).results, THREADS, spinning=False).session
    fed = [value.name for value in forward.get_inputs()]
    made = [value.name for value in forward.get_outputs()]
    read = [value.name for value in backward.get_inputs()]
    gradients = [value.name for value in backward.get_outputs()]

    def both() -> Any:
        known = values | dict(
            zip(made, forward.run_with_ort_values(made, {key: values[key] for key in fed}), strict=True)
        )
        return backward.run_with_ort_values(gradients, {key: known[key] for key in read})

    return both


def main() -> None:
    folder = Path(sys.argv[1])
    names = sys.argv[2:] or NAMES
    rows = []
    for name in names:
        module, sessions, over = alternate_processes(in_module, in_sessions, (folder, name), ROUNDS)
        _, least, over_bound = alternate_processes(in_module, bound, (folder, name), ROUNDS)
        again, eager, of = alternate_processes(in_module, torch_eager, (folder, name), ROUNDS)
        rows.append(
            {
                "model": name,
                "module ms": round(1e3 * module, 2),
                "sessions ms": round(1e3 * sessions, 2),
                "of the sessions": round(over, 2),
                "bound ms": round(1e3 * least, 2),
                "of the bound": round(over_bound, 2),
                "again ms": round(1e3 * again, 2),
                "torch eager ms": round(1e3 * eager, 2),
                "of torch": round(of, 2),
            }
        )
        print(rows[-1], flush=True)
    if not sys.argv[2:]:
        save("torch_module", rows)


if __name__ == "__main__":
    main()
