"""Export PyTorch models to ONNX, differentiate them with refgrad, and compare with torch's autograd.

    python examples/torch_models.py FOLDER [MODEL ...]

writes `MODEL.onnx` and `MODEL.npz` for models of `architectures.ARCHITECTURES`: the named ones, with --all all of them, by
default those that every change is tested with. The npz holds what a runtime without torch needs: `feed/<input>`,
`output/<output>`, `cotangent/<output>_grad`, and autograd's gradients for every float input and every parameter,
`float32/<name>_grad` and `float64/<name>_grad`. Then it prints how far refgrad's gradients are from autograd's in float64.

Needs torch, onnxscript and transformers.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from architectures import ARCHITECTURES
from torch import Tensor, nn

import refgrad
from refgrad.backends import get_backend

OUTPUT = "output"
BACKENDS = ("ort-cpu", "numpy")

Gradients = dict[str, np.ndarray]


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build one of `ARCHITECTURES` in evaluation mode, and its inputs by name; the same at every call."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(architecture.seed)
    model, inputs = architecture.build()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(architecture.noise * torch.randn_like(tensor))
    return model.eval(), inputs


def export(name: str) -> onnx.ModelProto:
    """Export one of `ARCHITECTURES`; its initializers have the names and the layout of torch's parameters.

    The exporter's optimizer folds a BatchNormalization into the convolution before it, and a transposed weight into a
    copy with another name. So it runs while the parameters are inputs, which it leaves alone; then they become
    initializers again.
    """
    model, inputs = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in ("torch.onnx", "onnxscript"):
            logging.getLogger(logger).setLevel(logging.ERROR)
        program = torch.onnx.export(
            model,
            kwargs=inputs,
            output_names=[OUTPUT],
            opset_version=ARCHITECTURES[name].opset,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
        assert program is not None
        graph = program.model.graph
        weights = {key: graph.initializers.pop(key) for key in model.state_dict() if key in graph.initializers}
        values = {key: weight.const_value for key, weight in weights.items()}
        for weight in weights.values():
            weight.const_value = None
        graph.inputs.extend(weights.values())
        program.optimize()
        del graph.inputs[len(inputs) :]
        for key, weight in weights.items():
            weight.const_value = values[key]
            graph.register_initializer(weight)
    return program.model_proto


def torch_gradients(name: str, cotangent: Tensor) -> dict[str, dict[str, Tensor]]:
    """Return autograd's gradients for every float input and every parameter that is used: dtype -> name -> gradient.

    Tied parameters are one, under the last of their names, as in the exported model.
    """
    gradients = {}
    for dtype in (torch.float32, torch.float64):
        model, inputs = build(name)
        model = model.to(dtype)
        inputs = {key: x.to(dtype).requires_grad_() if x.is_floating_point() else x for key, x in inputs.items()}
        names = {parameter: key for key, parameter in model.named_parameters(remove_duplicate=False)}
        wrt = {x: key for x, key in ({x: key for key, x in inputs.items()} | names).items() if x.requires_grad}
        result = torch.autograd.grad(model(**inputs), list(wrt), cotangent.to(dtype), allow_unused=True)
        found = {key: x for key, x in zip(wrt.values(), result, strict=True) if x is not None}
        gradients[str(dtype).removeprefix("torch.")] = found
    return gradients


def write(name: str, folder: Path) -> None:
    """Write `name`.onnx and `name`.npz to `folder`."""
    onnx.save(export(name), folder / f"{name}.onnx")
    model, inputs = build(name)
    with torch.no_grad():
        output = model(**inputs)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    arrays = {f"feed/{key}": x for key, x in inputs.items()}
    arrays |= {f"output/{OUTPUT}": output, f"cotangent/{OUTPUT}_grad": cotangent}
    for dtype, gradients in torch_gradients(name, cotangent).items():
        arrays |= {f"{dtype}/{key}_grad": gradient for key, gradient in gradients.items()}
    np.savez(folder / f"{name}.npz", allow_pickle=False, **{key: x.numpy() for key, x in arrays.items()})


def vanishing(truth: Gradients) -> set[str]:
    """Return the gradients that are 0 in exact arithmetic, such as the one of the bias of attention's keys.

    Autograd's are not 0 in float64 where transformers computes a softmax in float32, whatever the model's type is.
    """
    largest = max(float(np.abs(value).max()) for value in truth.values())
    return {key for key, value in truth.items() if np.abs(value).max() < 1e-6 * largest}


def errors(result: Gradients, truth: Gradients) -> dict[str, float]:
    """Return the largest error of each gradient, relative to the largest entry of the tensor.

    No tensor counts as smaller than a ten-thousandth of the largest one. A gradient that is all 0 where autograd's is not
    has an infinite error.
    """
    size = {key: float(np.abs(value).max()) for key, value in truth.items()}
    largest, noise = max(size.values()), vanishing(truth)
    found = {}
    for key, value in truth.items():
        error = float(np.abs(result[key] - (0 if key in noise else value)).max()) / max(size[key], 1e-4 * largest)
        found[key] = error if key in noise or result[key].any() else np.inf
    return found


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Differentiate what `write` wrote, and return how far each executor is from autograd in float64.

    There is a column for the float inputs and one for the weights, and the error of autograd itself in float32. A gradient that
    is 0 in exact arithmetic shows only rounding in float32: only the run in float64, which leaves nothing out, includes it.
    """
    arrays = dict(np.load(folder / f"{name}.npz"))
    truth = _below(arrays, "float64/")
    feeds = _below(arrays, "feed/") | _below(arrays, "cotangent/")
    start = time.perf_counter()
    gradient = refgrad.gradient(folder / f"{name}.onnx", [key.removesuffix("_grad") for key in truth])
    results = {backend: get_backend(backend).prepare(gradient).run(feeds) for backend in BACKENDS}
    seconds = time.perf_counter() - start
    row: dict[str, Any] = {
        "model": name,
        "session": "torch" if ARCHITECTURES[name].quick else "models",
        "opset": ARCHITECTURES[name].opset,
        "parameters": sum(value.size for key, value in truth.items() if key.removesuffix("_grad") not in feeds),
        "nodes": len(onnx.load(folder / f"{name}.onnx", load_external_data=False).graph.node),
        "nodes of the gradient": len(gradient.graph.node),
    }
    noise = vanishing(truth)
    for title, result in (results | {"torch float32": _below(arrays, "float32/")}).items():
        found = {key: error for key, error in errors(result, truth).items() if key not in noise}
        inputs = [error for key, error in found.items() if key.removesuffix("_grad") in feeds]
        weights = [error for key, error in found.items() if key.removesuffix("_grad") not in feeds]
        row |= {f"{title}: input": f"{max(inputs):.1e}", f"{title}: weights": f"{max(weights):.1e}"}
    exact = get_backend("numpy").prepare(gradient, precision="float64").run(feeds)
    row |= {"numpy float64: all": f"{max(errors(exact, truth).values()):.1e}", "0 in exact arithmetic": len(noise)}
    return row | {"seconds": round(seconds, 2)}


def _below(arrays: dict[str, np.ndarray], prefix: str) -> Gradients:
    return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}


def main() -> None:
    """Write models with autograd's gradients, and print how far refgrad's are from them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(ARCHITECTURES))
    parser.add_argument("--all", action="store_true", help="every model")
    parser.add_argument("--save", type=Path, help="a JSON file for the results")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.models if name not in ARCHITECTURES]
    if unknown:
        parser.error(f"there is no model {', '.join(unknown)}; there are {', '.join(ARCHITECTURES)}")
    names = arguments.models or [name for name, model in ARCHITECTURES.items() if model.quick or arguments.all]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        write(name, arguments.folder)
        rows.append(measure(name, arguments.folder))
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if arguments.save:
        arguments.save.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
