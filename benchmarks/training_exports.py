"""Training of torch's exports: the losses of torch itself, and the time of a step against torch eager and onnxsim.

    python benchmarks/training_exports.py [MODEL ...]

Every architecture of `examples/architectures.py` is exported and trained for ten steps of gradient descent on ONNX Runtime,
all parameters, as is the module in torch: the mean of (output − target)², with a rate at which a step takes about 0.5 % off
it. "error" is the largest relative difference of the losses. The nine that every change is tested with, and the head of
resnet18 alone, are timed with momentum, beside torch.optim's and, where onnxsim can differentiate the model, the loop of
`onnxsim.compile_training_loop`; so are all others that onnxsim can. Each runs in a process of its own, in turn. Needs torch,
transformers, onnxscript, onnxruntime and onnxsim 0.8.1.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, TensorProto, helper, version_converter
from timing import alternate_processes, save

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from architectures import ARCHITECTURES
from torch_models import build, export

from refgrad.training import SGD, Training, step_model

STEPS, ROUNDS, MOMENTUM, LABEL, LOSS = 10, 7, 0.9, "desired_output", "loss_of_output"
HEAD = "resnet18, its head"  # all else frozen
TIMED = [*(name for name, architecture in ARCHITECTURES.items() if architecture.quick), HEAD]


def with_loss(model: ModelProto) -> ModelProto:
    """The model with the mean of (output − target)² as its result, in plain operators, for both builders."""
    output, made = model.graph.output[0], ModelProto()
    made.CopyFrom(model)
    target = helper.make_tensor_value_info(
        LABEL, TensorProto.FLOAT, [dim.dim_value for dim in output.type.tensor_type.shape.dim]
    )
    made.graph.input.append(target)
    made.graph.node.extend(
        [
            helper.make_node("Sub", [output.name, LABEL], ["loss_difference"], name="loss_difference"),
            helper.make_node("Mul", ["loss_difference", "loss_difference"], ["loss_square"], name="loss_square"),
            helper.make_node("ReduceMean", ["loss_square"], [LOSS], name=LOSS, keepdims=0),
        ]
    )
    del made.graph.output[:]
    made.graph.output.append(helper.make_tensor_value_info(LOSS, TensorProto.FLOAT, []))
    return made


class Task:
    """An architecture, what it is fed, and what of it is trained."""

    def __init__(self, name: str) -> None:
        self.name, self.head = name.partition(",")[0], name == HEAD
        self.module, inputs = build(self.name)
        self.inputs = {key: value.detach() for key, value in inputs.items()}
        for key, parameter in self.module.named_parameters():
            parameter.requires_grad_(not self.head or key.startswith("fc."))
        with torch.no_grad():
            output = self.module(**self.inputs)
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
        self.target = (output + output.std() * noise).detach()
        gradients = self._gradients()
        self.used = [key for key, gradient in gradients.items() if gradient is not None]
        square = sum(float((gradient**2).sum()) for gradient in gradients.values() if gradient is not None)
        self.rate = 0.005 * float(self.loss().detach()) / square

    def _gradients(self) -> dict[str, torch.Tensor | None]:
        names = {p: key for key, p in self.module.named_parameters(remove_duplicate=False) if p.requires_grad}
        found = torch.autograd.grad(self.loss(), list(names), allow_unused=True)
        return dict(zip(names.values(), found, strict=True))

    def loss(self) -> torch.Tensor:
        """The loss in torch."""
        return ((self.module(**self.inputs) - self.target) ** 2).mean()

    def exported(self) -> tuple[ModelProto, list[str], dict[str, np.ndarray]]:
        """The model with its loss, the parameters that are trained, and the feeds."""
        model = with_loss(export(self.name))
        held = {tensor.name for tensor in model.graph.initializer}
        feeds = {key: value.numpy() for key, value in self.inputs.items()} | {LABEL: self.target.numpy()}
        return model, [key for key in self.used if key in held], feeds


def in_torch(name: str) -> Callable[[], float]:
    """Steps of torch eager."""
    task = Task(name)
    optimizer = torch.optim.SGD([p for p in task.module.parameters() if p.requires_grad], task.rate, MOMENTUM)

    def step() -> float:
        optimizer.zero_grad()
        loss = task.loss()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def on_onnxruntime(name: str) -> Callable[[], float]:
    """Steps of refgrad's."""
    task = Task(name)
    model, trainable, feeds = task.exported()
    training = Training(step_model(model, None, SGD(momentum=MOMENTUM), trainable=trainable), task.rate, "ort-cpu")
    return lambda: training.train_on(feeds, task.rate)


def by_onnxsim(name: str) -> Callable[[], float]:
    """Steps of onnxsim's; an error where it cannot differentiate the model.

    Its steps are models of opset 17, so the model is exported at 18, the lowest, and brought down by onnx.
    """
    import onnxsim

    key = name.partition(",")[0]
    ARCHITECTURES[key] = replace(ARCHITECTURES[key], opset=18)
    task = Task(name)
    model, trainable, feeds = task.exported()
    for node in model.graph.node:  # onnx keeps an attribute that opset 17 does not have
        kept = [attribute for attribute in node.attribute if attribute.name != "noop_with_empty_axes" or attribute.i]
        del node.attribute[:]
        node.attribute.extend(kept)
    model = version_converter.convert_version(model, 17)
    loop = onnxsim.compile_training_loop(model, LOSS, trainable, "sgd_momentum")
    loop(feeds, lr=task.rate)
    return lambda: float(loop(feeds, lr=task.rate))


def trained(name: str) -> dict[str, Any]:
    """How an architecture trains, beside torch."""
    task = Task(name)
    model, trainable, feeds = task.exported()
    step = step_model(model, None, SGD(), trainable=trainable)
    training = Training(step, task.rate, "ort-cpu")
    ours = [training.train_on(feeds, task.rate) for _ in range(STEPS)]
    optimizer, theirs = torch.optim.SGD(task.module.parameters(), task.rate), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = task.loss()
        theirs.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    return {
        "model": name,
        "parameters": len(trainable),
        "in torch": len(task.used),
        "loss": round(ours[0], 4),
        "after 9 steps": round(ours[-1], 4),
        "torch's": round(theirs[-1], 4),
        "error": f"{max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)):.1e}",
    }


def can_onnxsim(name: str) -> bool:
    """True if onnxsim trains it; in a process of its own, which it may end."""
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply_async(_trained_by_onnxsim, (name,)).get(120)
    except Exception:
        return False
    return True


def _trained_by_onnxsim(name: str) -> None:
    by_onnxsim(name)()


def timed(name: str) -> dict[str, Any]:
    """The time of a step, beside the others'."""
    ours, theirs, ratio = alternate_processes(on_onnxruntime, in_torch, (name,), ROUNDS)
    found = {"model": name, "ms": round(1e3 * ours, 2), "torch ms": round(1e3 * theirs, 2), "of torch": round(ratio, 2)}
    if not can_onnxsim(name):
        return found | {"onnxsim ms": "cannot", "of onnxsim": ""}
    _, theirs, ratio = alternate_processes(on_onnxruntime, by_onnxsim, (name,), ROUNDS)
    return found | {"onnxsim ms": round(1e3 * theirs, 2), "of onnxsim": round(ratio, 2)}


def main() -> None:
    names = sys.argv[1:] or [*ARCHITECTURES, HEAD]
    rows = []
    for name in names:
        if name != HEAD:
            rows.append(trained(name))
            print(rows[-1], flush=True)
    times = []
    for name in names:
        if name in TIMED or can_onnxsim(name):
            times.append(timed(name))
            print(times[-1], flush=True)
    if not sys.argv[1:]:
        save("training_exports", rows)
        save("training_exports_time", times)


if __name__ == "__main__":
    main()
