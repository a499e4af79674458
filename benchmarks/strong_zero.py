"""The nodes and the time on ONNX Runtime that the option `strong_zero` adds to a gradient.

    python benchmarks/strong_zero.py FOLDER

FOLDER holds models as `examples/torch_models.py` writes them. The gradient is with respect to the input and all parameters.
Both gradients run in turn with two threads; every result has to be the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from timing import alternate, save

import refgrad
from refgrad.backends import get_backend
from refgrad.protos.traverse import nested

MODELS = ("mlp", "resnet18", "bert", "gpt2", "lstm")
ROUNDS = 40


def measured(folder: Path, name: str) -> dict[str, Any]:
    """The row of one model."""
    model = onnx.load(folder / f"{name}.onnx")
    with np.load(folder / f"{name}.npz") as arrays:
        feeds = {key.partition("/")[2]: arrays[key] for key in arrays if key.startswith(("feed/", "cotangent/"))}
    made = [refgrad.gradient(model, strong_zero=strong) for strong in (False, True)]
    runs = [get_backend("ort-cpu").prepare(one, threads=2).run for one in made]
    plain, strong = (run(feeds) for run in runs)
    for key, value in plain.items():
        np.testing.assert_allclose(strong[key], value, rtol=1e-4, atol=1e-5 * np.abs(value).max(initial=0), err_msg=key)
    ours, theirs, ratio = alternate(lambda: runs[1](feeds), lambda: runs[0](feeds), ROUNDS)
    count = [sum(1 for _ in nested(one.graph.node)) for one in made]
    outer = [len(one.graph.node) for one in made]
    return {
        "model": name,
        "nodes": outer[0],
        "nodes with strong_zero": outer[1],
        "guard nodes in bodies": count[1] - outer[1] - (count[0] - outer[0]),
        "ms": round(theirs * 1e3, 3),
        "ms with strong_zero": round(ours * 1e3, 3),
        "ratio": round(ratio, 3),
    }


if __name__ == "__main__":
    save("strong_zero", [measured(Path(sys.argv[1]), name) for name in MODELS])
