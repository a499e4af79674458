"""Low-rank adapters beside weights of 4 bits, on a language model of more than 100 million parameters with random weights.

    python benchmarks/qlora.py

Ten steps of SGD on one batch, on ONNX Runtime, each training in a process of its own: with the weights in blocks of 4 bits
(MatMulNBits and GatherBlockQuantized), with the same numbers in float32, and the same formulas in torch. Needs torch.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper
from timing import save

LAYERS, WIDTH, HEADS, WORDS, BLOCK = 12, 768, 12, 32000, 32
SAMPLES, LENGTH, RANK, RATE, STEPS = 4, 32, 8, 0.01, 10
ADAPTED = ("q", "v", "up")  # the products of each layer that get adapters
PRODUCTS = {"q": (1, 1), "k": (1, 1), "v": (1, 1), "o": (1, 1), "up": (1, 4), "down": (4, 1)}  # in and out, in widths
MIB = 2**20

Arrays = dict[str, np.ndarray]


def quantized() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each weight [out, in] as numbers from 0 to 15, which stand for (number - 8) * scale, and the scales of its blocks."""
    draw = np.random.default_rng(0)
    shapes = {"table": (WORDS, WIDTH), "head": (WORDS, WIDTH)}
    shapes |= {f"{k}.{n}": (o * WIDTH, i * WIDTH) for k in range(LAYERS) for n, (i, o) in PRODUCTS.items()}
    found = {}
    for name, (rows, columns) in shapes.items():
        size = 0.3 if name == "table" else columns**-0.5 / 4
        scales = draw.uniform(0.5 * size, size, (rows, columns // BLOCK)).astype(np.float32)
        found[name] = draw.integers(0, 16, (rows, columns), np.uint8), scales
    return found


def wide(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The weight in float32."""
    return np.asarray((numbers.astype(np.float32) - 8) * scales.repeat(BLOCK, 1))


def data() -> Arrays:
    """Tokens, and the tokens that follow."""
    tokens = np.random.default_rng(1).integers(0, WORDS, (SAMPLES, LENGTH + 1))
    return {"tokens": tokens[:, :-1], "label": tokens[:, 1:]}


class Writer:
    """A language model in nodes of ONNX, with weights of 4 bits or in float32."""

    def __init__(self, bits: int) -> None:
        self._bits, self._weights = bits, quantized()
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: list[TensorProto] = []

    def model(self) -> ModelProto:
        """The model: tokens [N, LENGTH] to logits [N, WORDS, LENGTH]."""
        x, mask = self._rows("tokens"), self._constant("mask", np.triu(np.full((LENGTH, LENGTH), -1e9, np.float32), 1))
        for k in range(LAYERS):
            h = self._normalized(x)
            q, key, v = (self._split(self._product(f"{k}.{name}", h)) for name in "qkv")
            scores = self._node("MatMul", q, self._node("Transpose", key, perm=[0, 1, 3, 2]))
            scores = self._node("Mul", scores, self._constant("scale", np.float32((WIDTH // HEADS) ** -0.5)))
            weights = self._node("Softmax", self._node("Add", scores, mask), axis=-1)
            mixed = self._node("Transpose", self._node("MatMul", weights, v), perm=[0, 2, 1, 3])
            mixed = self._node("Reshape", mixed, self._constant("joined", np.array([0, 0, WIDTH])))
            x = self._node("Add", x, self._product(f"{k}.o", mixed))
            up = self._node("Relu", self._product(f"{k}.up", self._normalized(x)))
            x = self._node("Add", x, self._product(f"{k}.down", up))
        self._nodes.append(
            helper.make_node("Transpose", [self._product("head", self._normalized(x))], ["logits"], perm=[0, 2, 1])
        )
        graph = helper.make_graph(
            self._nodes,
            "language_model",
            [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["N", LENGTH])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", WORDS, LENGTH])],
            self._tensors,
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def _node(self, op_type: str, *inputs: str, **settings: Any) -> str:
        name = f"{op_type}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op_type, inputs, [name], **settings))
        return name

    def _constant(self, name: str, value: Any) -> str:
        if all(tensor.name != name for tensor in self._tensors):
            self._tensors.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def _normalized(self, x: str) -> str:
        return self._node("LayerNormalization", x, self._constant("ones", np.ones(WIDTH, np.float32)))

    def _split(self, x: str) -> str:
        shape = self._constant("split", np.array([0, 0, HEADS, WIDTH // HEADS]))
        return self._node("Transpose", self._node("Reshape", x, shape), perm=[0, 2, 1, 3])

    def _product(self, name: str, x: str) -> str:
        numbers, scales = self._weights.pop(name)
        if self._bits == 32:
            return self._node("MatMul", x, self._constant(name, wide(numbers, scales).T.copy()))
        rows, columns = numbers.shape
        packed = (numbers[:, ::2] | numbers[:, 1::2] << 4).reshape(rows, columns // BLOCK, BLOCK // 2)
        held = self._constant(name, packed), self._constant(f"{name}.scales", scales)
        settings = {"K": columns, "N": rows, "bits": 4, "block_size": BLOCK}
        return self._node("MatMulNBits", x, *held, domain="com.microsoft", **settings)

    def _rows(self, tokens: str) -> str:
        numbers, scales = self._weights.pop("table")
        if self._bits == 32:
            return self._node("Gather", self._constant("table", wide(numbers, scales)), tokens)
        held = self._constant("table", numbers[:, ::2] | numbers[:, 1::2] << 4)
        settings = {"bits": 4, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
        scales_name = self._constant("table.scales", scales)
        return self._node("GatherBlockQuantized", held, tokens, scales_name, domain="com.microsoft", **settings)


def write(path: str, bits: int) -> None:
    """Write the model, with its weights in a file beside it."""
    onnx.save(Writer(bits).model(), path, save_as_external_data=True, location="weights")


def adapters(path: str) -> ModelProto:
    """The model with its adapters."""
    from refgrad.training import lora

    return lora(path, [f"{k}.{name}" for k in range(LAYERS) for name in ADAPTED], rank=RANK, seed=2)


def in_refgrad(path: str) -> list[float]:
    """The losses of the steps of a model."""
    from refgrad.training import SGD, Training, step_model

    step = step_model(adapters(path), "cross_entropy", SGD(), data_beside=path)
    training = Training(step, RATE, "ort-cpu")
    return [training.train_on(data(), RATE) for _ in range(STEPS)]


def in_torch(path: str) -> list[float]:
    """The losses of the same steps in torch, with the weights in float32 and the adapters of the model."""
    import torch
    from torch.nn import functional

    weights = {name: torch.from_numpy(wide(*one)) for name, one in quantized().items()}
    first = {t.name: numpy_helper.to_array(t) for t in adapters(path).graph.initializer if ".lora_" in t.name}
    lows = {name: torch.from_numpy(array.copy()).requires_grad_() for name, array in first.items()}
    fed = {name: torch.from_numpy(array) for name, array in data().items()}
    mask = torch.full((LENGTH, LENGTH), -1e9).triu(1)

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ weights[name].T
        return y + x @ lows[f"{name}.lora_A"] @ lows[f"{name}.lora_B"] if f"{name}.lora_A" in lows else y

    def normalized(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (WIDTH,))

    losses = []
    for _ in range(STEPS):
        x = weights["table"][fed["tokens"]]
        for k in range(LAYERS):
            h = normalized(x)
            q, key, v = (product(f"{k}.{n}", h).unflatten(2, (HEADS, -1)).transpose(1, 2) for n in "qkv")
            scores = q @ key.transpose(2, 3) * (WIDTH // HEADS) ** -0.5 + mask
            x = x + product(f"{k}.o", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + product(f"{k}.down", product(f"{k}.up", normalized(x)).relu())
        loss = functional.cross_entropy(product("head", normalized(x)).transpose(1, 2), fed["label"])
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for low in lows.values():
                low -= RATE * low.grad
                low.grad = None
    return losses


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a process of its own, and return its result."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def measured(run: Callable[[str], list[float]], path: str) -> tuple[list[float], float, float]:
    """The losses, the peak of the process in MiB, and its seconds."""
    start = time.perf_counter()
    losses = run(path)
    return losses, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.perf_counter() - start


def main() -> None:
    """Train three times, and compare the losses."""
    count = sum(numbers.size for numbers, _ in quantized().values())
    trainings = {
        "torch, float32": (in_torch, 4),
        "refgrad, float32": (in_refgrad, 32),
        "refgrad, 4 bits": (in_refgrad, 4),
    }
    rows: list[dict[str, Any]] = []
    expected: list[float] = []
    for name, (run, bits) in trainings.items():
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/model.onnx"
            apart(write, path, bits)
            losses, peak, seconds = apart(measured, run, path)
        expected = expected or losses
        off = max(abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True))
        rows.append(
            {
                "training": name,
                "parameters": count,
                "first loss": round(losses[0], 5),
                "last loss": round(losses[-1], 5),
                "largest difference to torch": float(f"{off:.1g}"),
                "peak MiB": round(peak),
                "seconds": round(seconds, 1),
            }
        )
        print(rows[-1], flush=True)
    save("qlora", rows)


if __name__ == "__main__":
    main()
