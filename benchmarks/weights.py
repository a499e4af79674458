"""How many parameters of torch's exports `refgrad.weights` identifies, and whether trained ones get back.

    python benchmarks/weights.py [MODEL ...]

exports `examples/architectures.py` as users do, with the exporter's optimizer, which renames, transposes, folds and merges. A
parameter is identified where an initializer is made of it, bit for bit. Then every parameter gets another value in torch,
`refgrad.write_back` writes the new state_dict into the old export, and ONNX Runtime has to compute what torch does.
Needs torch, onnxscript, transformers and onnxruntime.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, numpy_helper

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from architectures import ARCHITECTURES
from torch_models import OUTPUT, build

import refgrad
from refgrad.backends import get_backend


def export(module: torch.nn.Module, inputs: dict[str, torch.Tensor], opset: int) -> ModelProto:
    """The model as torch's exporter writes it by default."""
    for logger in ("torch.onnx", "onnxscript"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, kwargs=inputs, output_names=[OUTPUT], opset_version=opset, dynamo=True, verbose=False
        )
    assert program is not None
    return program.model_proto


def measure(name: str) -> dict[str, Any]:
    """The counts of one architecture."""
    module, inputs = build(name)
    model = export(module, inputs, ARCHITECTURES[name].opset)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    found = refgrad.weights(model, state)
    parameters = [key for key, _ in module.named_parameters(remove_duplicate=False)]
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    sources = [weight.source for weight in found.values() if weight.source is not None]
    exact = sum(
        weight.source.make({key: value.numpy() for key, value in state.items()}).tobytes() == arrays[key].tobytes()
        for key, weight in found.items()
        if weight.source is not None and weight.how != "ambiguous"
    )
    default = set(refgrad.preflight(model).wrt) & arrays.keys()
    alone = set(refgrad.weights(model).trainable)
    same = refgrad.write_back(model, state, found) == model
    return {
        "model": name,
        "parameters": len(parameters),
        "identified": sum(key not in found.missing for key in parameters),
        "names kept": sum(key in arrays for key in parameters),
        "missing": [key for key in parameters if key in found.missing],
        "sources": len(sources),
        "exact": exact,
        "round trip": same,
        "trainable": len(found.trainable),
        "without a source": [key for key in found.trainable if found[key].source is None],
        "by role alone, no parameter": sorted(alone - set(found.trainable)),
        "of wrt's default, no parameter": len(default - set(found.trainable)),
        "scalars or masks": sum(arrays[key].size == 1 and found[key].source is None for key in found.trainable),
        "how": Counter(weight.how for weight in found.values() if weight.how),
        "error": retrained(module, inputs, model, state, found),
    }


def retrained(
    module: torch.nn.Module, inputs: dict[str, torch.Tensor], model: ModelProto, state: Any, found: refgrad.Weights
) -> float | str:
    """How far the export with another state_dict is from torch with it, relative to the largest output."""
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, value in module.named_parameters():
            if key not in found.missing:
                value.mul_(1 + 0.1 * torch.rand(value.shape, generator=random))
        expected = module(**inputs).numpy()
    new = dict(module.state_dict())
    try:
        written = refgrad.write_back(model, new, found)
        result = get_backend("ort-cpu").prepare(written).run({key: value.numpy() for key, value in inputs.items()})
    except refgrad.errors.RefgradError as error:
        return str(error)
    before = get_backend("ort-cpu").prepare(model).run({key: value.numpy() for key, value in inputs.items()})
    size = np.abs(expected).max()
    assert np.abs(before[OUTPUT] - expected).max() > 1e-3 * size, "the new values change nothing"
    return float(np.abs(result[OUTPUT] - expected).max() / size)


def main() -> None:
    """Print a line per architecture, and the sums."""
    rows = []
    for name in sys.argv[1:] or ARCHITECTURES:
        rows.append(measure(name))
        print(
            ", ".join(
                f"{key} {dict(value) if isinstance(value, Counter) else value}" for key, value in rows[-1].items()
            ),
            flush=True,
        )
    sums = {
        key: sum(row[key] for row in rows)
        for key in (
            "parameters",
            "identified",
            "names kept",
            "sources",
            "exact",
            "trainable",
            "scalars or masks",
            "of wrt's default, no parameter",
        )
    }
    print(f"{len(rows)} exports:", sums, dict(sum((row["how"] for row in rows), Counter())))


if __name__ == "__main__":
    main()
