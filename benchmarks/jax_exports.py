"""The gradients of torch's exports by `jax.grad`, of inputs and weights, against those of torch.autograd.

    python benchmarks/jax_exports.py FOLDER [MODEL ...]

FOLDER is what `examples/torch_models.py FOLDER --all` writes: the models with autograd's gradients. Each model is a function of
JAX whose weights are arguments, and jax.grad differentiates its product with a random cotangent under jit, in float32, on
ONNX Runtime. "input" and "weights" are the largest error of a gradient, relative to the largest entry of the tensor, beside
autograd in double; "torch float32" is that of autograd itself in single precision. Gradients that are 0 in exact
arithmetic are left out, and no tensor counts as smaller than a ten-thousandth of the largest one. Then second derivatives
of a small network are compared with those of the same network written in jax.numpy. Needs jax and onnxruntime.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
from onnx import numpy_helper
from timing import save

import refgrad.jax

Arrays = dict[str, np.ndarray]
GOAL = 1e-5
NETWORK = """<ir_version: 10, opset_import: ["": 21]> net (float[N, 6] x) => (float[N, 3] y) {
    a = MatMul(x, v)  h = Tanh(a)  b = MatMul(h, w)  y = Tanh(b) }"""


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
    found, theirs = errors(gradients(model, arrays, list(truth)), truth), errors(single, truth)
    feeds = below(arrays, "feed/")
    by_weights = [error for name, error in found.items() if name not in feeds]
    return {
        "model": model.stem,
        "weights of": len(truth) - len(feeds.keys() & truth.keys()),
        "input": f"{max(error for name, error in found.items() if name in feeds):.1e}",
        "weights": f"{max(by_weights):.1e}",
        "torch float32": f"{max(theirs.values()):.1e}",
    }


def second() -> list[dict[str, Any]]:
    """How far second derivatives of a model are from those of the same network in jax.numpy."""
    rows = []
    for kind, goal in (("float", 1e-5), ("double", 1e-10)):
        with jax.enable_x64(kind == "double"):
            model = onnx.parser.parse_model(NETWORK.replace("float", kind))
            dtype = {"float": np.float32, "double": np.float64}[kind]
            rng = np.random.default_rng(0)
            for name, shape in (("v", (6, 10)), ("w", (10, 3))):
                model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(dtype), name))
            f = refgrad.jax.function(model, trainable=True)
            x, u = (jnp.asarray(rng.normal(size=(4, 6)), dtype) for _ in range(2))
            networks = f, lambda params, x: jnp.tanh(jnp.tanh(x @ params["v"]) @ params["w"])
            products: dict[str, Callable[[Callable[..., Any]], Any]] = {
                "H·u, forward over reverse": lambda slope, x, u: jax.jvp(slope, (x,), (u,))[1],
                "H·u, reverse over reverse": lambda slope, x, u: jax.vjp(slope, x)[1](u)[0],
                "Hessian": lambda slope, x, u: jax.jacfwd(slope)(x),
            }
            for what, product in products.items():
                slopes = [jax.grad(lambda x, g=g, params=f.params: (g(params, x) ** 2).sum()) for g in networks]
                ours, theirs = (np.asarray(product(slope, x, u)) for slope in slopes)
                error = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
                rows.append(
                    {"derivative": what, "type": dtype.__name__, "error": f"{error:.1e}", "goal": f"{goal:.0e}"}
                )
    return rows


def main() -> None:
    folder = Path(sys.argv[1])
    rows = []
    for model in [folder / f"{name}.onnx" for name in sys.argv[2:]] or sorted(folder.glob("*.onnx")):
        rows.append(measured(model))
        print(rows[-1], flush=True)
    if not sys.argv[2:]:
        save("jax_exports", rows)
        save("jax_second", second())
    worst = max(float(row[key]) for row in rows for key in ("input", "weights"))
    print(f"{len(rows)} models, at most {worst:.1e} off; the goal is {GOAL:.0e}")


if __name__ == "__main__":
    main()
