"""The program of a runtime in an environment of its own, for `elsewhere.Elsewhere`: it runs models, and makes gradients.

It needs NumPy, the runtime and the exporter's `runtimes.py`. It reads requests as lines of JSON with the paths of a model and
of .npz files, and answers each with a line: `{}`, or the reason why there is no result.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

RUNNERS = Path(__file__).resolve().parent.parent / "conformance" / "tools" / "exporting" / "runners"
Arrays = dict[str, np.ndarray]


def read(path: str) -> Arrays:
    """The arrays of a file that `write` wrote."""
    with np.load(path, allow_pickle=False) as held:
        return {str(name): held[f"arr_{k}"] for k, name in enumerate(held["names"])}


def write(path: str, arrays: Arrays) -> None:
    """Write arrays by name. The names of a model may be any text: they are an array too."""
    values = [np.asarray(value) for value in arrays.values()]
    np.savez(path, *values, names=np.array(list(arrays), dtype=np.str_))


def torch_gradients(path: str, feeds: Arrays, cotangents: Arrays) -> Arrays:
    """The outputs and gradients of the torch module that onnx2torch makes of a model, with its parameters' own names."""
    import onnx
    import torch

    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # it was built for another torch
        sys.modules["runtimes"]._without_torchvision()
    from onnx2torch import convert

    model = onnx.load(path)
    module = convert(model)
    names = [value.name for value in model.graph.input]
    leaves = {name: torch.from_numpy(feeds[name].copy()) for name in names}
    leaves |= dict(module.named_parameters()) | dict(module.named_buffers())
    floats = {name: leaf.requires_grad_() for name, leaf in leaves.items() if leaf.is_floating_point()}
    results = module(*(leaves[name] for name in names))
    results = results if isinstance(results, tuple | list) else [results]
    outputs = dict(zip([value.name for value in model.graph.output], results, strict=True))
    asked = {name: torch.from_numpy(value) for name, value in cotangents.items()}
    torch.autograd.backward([outputs[name] for name in asked], list(asked.values()))
    found = {name: leaf.detach().numpy() for name, leaf in (*leaves.items(), *outputs.items())}
    return found | {f"{name}_grad": leaf.grad.numpy() for name, leaf in floats.items() if leaf.grad is not None}


def tinygrad_gradients(path: str, feeds: Arrays, cotangents: Arrays) -> Arrays:
    """The outputs and gradients of a model by tinygrad's own reverse mode, by the model's names."""
    from tinygrad import Tensor
    from tinygrad.nn.onnx import OnnxRunner

    runner = OnnxRunner(path)
    leaves = {name: Tensor(value) for name, value in feeds.items()}
    weights = {name: value for name, value in runner.graph_values.items() if isinstance(value, Tensor)}
    outputs = runner(leaves)
    loss = sum((outputs[name] * Tensor(value)).sum() for name, value in cotangents.items())
    floats = {name: leaf for name, leaf in (leaves | weights).items() if leaf.is_floating_point()}
    gradients = loss.gradient(*floats.values())
    found = {name: value.numpy() for name, value in outputs.items()}
    return found | {f"{name}_grad": value.numpy() for name, value in zip(floats, gradients, strict=True)}


GRADIENTS: dict[str, Callable[[str, Arrays, Arrays], Arrays]] = {
    "onnx2torch": torch_gradients,
    "tinygrad": tinygrad_gradients,
}


def serve(name: str) -> None:
    """Answer requests until there are no more. What a runtime prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path.insert(0, str(RUNNERS))
    import runtimes

    runtime = runtimes.get(name)
    print(json.dumps({"version": runtimes.version(name)}), file=answers)
    held, run = "", None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            feeds = read(asked["feeds"]) if "feeds" in asked else {}
            if "cotangents" in asked:
                write(asked["results"], GRADIENTS[name](asked["model"], feeds, read(asked["cotangents"])))
            else:
                if held != asked["model"]:
                    held, run = "", None
                    run = runtime(Path(asked["model"]), asked["inputs"], asked["outputs"])
                    held = asked["model"]
                if "results" in asked:
                    results = run([feeds[key] for key in asked["inputs"]])
                    write(asked["results"], dict(zip(asked["outputs"], results, strict=True)))
            answer = {}
        except BaseException as error:  # a runtime raises anything
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:2000]}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    serve(sys.argv[1])
