"""The gradients of torch's exports by `jax.grad`, of inputs and weights, against those of torch.autograd.

    python benchmarks/jax_exports.py FOLDER [MODEL ...]

FOLDER is what `examples/torch_models.py FOLDER --all` writes: the models with autograd's gradients. Each model is a function of
JAX whose weights are arguments, and jax.grad differentiates its product with a random cotangent under jit, in float32, on
ONNX Runtime. "input" and "weights" are the largest error of a gradient, relative to the largest entry of the tensor, beside
autograd in double; "torch float32" is that of autograd itself in single precision. Gradients that are 0 in exact
arithmetic are left out, and no tensor counts as smaller than a ten-thousandth of the largest one. Needs jax and onnxruntime.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import save

import refgrad.jax

Arrays = dict[str, np.ndarray]
GOAL = 1e-5


def gradients(model: Path, arrays: Arrays, names: list[str]) -> Arrays:
    """The gradients by `names`, as jax.grad computes them."""
    feeds = below(arrays, "feed/")
    weights = [name for name in names if name not in feeds]
    f = refgrad.jax.function(model, trainable=weights)
    [cotangent] = below(arrays, "cotangent/").values()

    def loss(params: dict[str, jax.Array], floats: dict[str, jax.Array]) -> jax.Array:
        return jnp.vdot(f(params, **(feeds | floats)), cotangent)

    moving = {name: jnp.asarray(feeds[name]) for name in names if name in feeds}
    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(f.params, moving)
    return {name: np.asarray(value) for part in found for name, value in part.items()}


def below(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def errors(result: Arrays, truth: Arrays) -> dict[str, float]:
    """The error of each gradient, but of those that are 0 in exact arithmetic."""
    sizes = {name: float(np.abs(value).max()) for name, value in truth.items()}
    largest = max(sizes.values())
    return {
        name: float(np.abs(result[name] - value).max()) / max(sizes[name], 1e-4 * largest)
        for name, value in truth.items()
        if sizes[name] >= 1e-6 * largest
    }


def measured(model: Path) -> dict[str, Any]:
    """How far the gradients of a model are from autograd's."""
    arrays = dict(np.load(model.with_suffix(".npz")))
    truth = {name.removesuffix("_grad"): value for name, value in below(arrays, "float64/").items()}
    single = {name.removesuffix("_grad"): value for name, value in below(arrays, "float32/").items()}
    start = time.perf_counter()
    found, theirs = errors(gradients(model, arrays, list(truth)), truth), errors(single, truth)
    seconds = time.perf_counter() - start
    feeds = below(arrays, "feed/")
    by_weights = [error for name, error in found.items() if name not in feeds]
    return {
        "model": model.stem,
        "weights of": len(truth) - len(feeds.keys() & truth.keys()),
        "input": f"{max(error for name, error in found.items() if name in feeds):.1e}",
        "weights": f"{max(by_weights):.1e}",
        "torch float32": f"{max(theirs.values()):.1e}",
        "seconds": round(seconds, 1),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    rows = []
    for model in [folder / f"{name}.onnx" for name in sys.argv[2:]] or sorted(folder.glob("*.onnx")):
        rows.append(measured(model))
        print(rows[-1], flush=True)
    if not sys.argv[2:]:
        save("jax_exports", rows)
    worst = max(float(row[key]) for row in rows for key in ("input", "weights"))
    print(f"{len(rows)} models, at most {worst:.1e} off; the goal is {GOAL:.0e}")


if __name__ == "__main__":
    main()
