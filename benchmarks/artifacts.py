"""Training artifacts of ResNet-18, lowered: three steps of training against ONNX Runtime's training API.

python examples/torch_models.py MODELS resnet18     # exports MODELS/resnet18.onnx; needs torch
python benchmarks/artifacts.py write MODELS FOLDER  # artifacts, and what three steps give; needs onnxruntime-training
python benchmarks/artifacts.py compare MODELS FOLDER   # reports/results/artifacts.json; stock onnxruntime, and the interpreter

Training in float32 can be reproduced where rounding decides nothing, so these conditions are chosen:

- The shift of BatchNormalization is -2.5 in every fourth channel, 2.5 in the others: a channel is mostly shut or mostly open.
  With shifts near 0 most of the 750,000 arguments of Relu are near its kink; float32 computes them to 1e-6 to 2e-5 of
  their standard deviation, one or two fall on the other side of 0 at every step, and then the gradients of two right executors
  differ by 1e-3 to 1e-1. `SEED` names batches on which, by the run in double, none comes nearer than 2e-6 in any step.
- The weights of the last layer are a tenth of what they were: BCEWithLogitsLoss of the artifacts takes log(1 - sigmoid(x)),
  which float32 rounds to log(0) from 17 on.
- AdamW divides the gradient by its own size: where it is 0 but for rounding the step is as long as anywhere, in either
  direction. Weights are compared one by one where the gradient in double is exactly 0, or at least `CLEAR` times the largest of
  its tensor, at every step; and all of them by the norm of the tensor.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from timing import write

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from make_artifacts import LOSSES, OPTIMIZERS, STEPS, Case, Step, make, train, weights

from refgrad.backends import Prepared, get_backend

SHIFT = 2.5
RATES = {"SGD": 0.01, "AdamW": 0.0001}
SEED = 4
CLEAR = 1e-4
BACKENDS = ("ort-cpu", "numpy")


def cases(models: Path) -> list[Case]:
    """ResNet-18 with every loss and every optimizer."""

    def resnet18() -> onnx.ModelProto:
        model = onnx.load(models / "resnet18.onnx")
        named = {(node.op_type, k): name for node in model.graph.node for k, name in enumerate(node.input)}
        shifts = {node.input[2] for node in model.graph.node if node.op_type == "BatchNormalization"}
        for tensor in model.graph.initializer:
            value = numpy_helper.to_array(tensor)
            if tensor.name in shifts:
                value = np.full(tensor.dims[0], SHIFT, np.float32)
                value[::4] = -SHIFT
            elif tensor.name == named["Gemm", 1]:
                value = value / np.float32(10)
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
        return model

    return [Case(resnet18, loss, optimizer, RATES[optimizer], SEED) for loss in LOSSES for optimizer in OPTIMIZERS]


def exact(folder: Path, case: Case) -> tuple[list[Step], float]:
    """The steps in double, and how near a Relu comes to its kink, in standard deviations of its argument."""

    def prepare(model: onnx.ModelProto) -> Prepared:
        return get_backend("numpy").prepare(model, precision="float64")

    relus = [node.input[0] for node in case.build().graph.node if node.op_type == "Relu"]
    steps, nearest = [], np.inf
    for step in train(folder, case, prepare, relus):
        nearest = min(nearest, *(float(np.abs(x).min() / x.std()) for x in step.others.values()))
        steps.append(Step(step.loss, step.gradients, step.weights, {}))
    return steps, nearest


def measure(folder: Path, case: Case) -> dict[str, Any]:
    """How far the lowered models are from the training API after the last step, and in the losses."""
    truth, nearest = exact(folder, case)
    trained, running = weights(case.build())
    start = trained | running
    clear = {name: np.ones(value.shape, bool) for name, value in start.items()}
    if case.optimizer == "AdamW":
        for name in trained:
            sizes = [np.abs(step.gradients[name]) for step in truth]
            clear[name] = np.logical_and.reduce([(size == 0) | (size >= CLEAR * size.max()) for size in sizes])
    file = np.load(folder / "steps.npz")
    row: dict[str, Any] = {"model": case.build.__name__, "loss": case.loss, "optimizer": case.optimizer}
    row |= {"rate": case.rate, "seed": case.seed, "nearest kink": f"{nearest:.0e}"}
    compared = sum(int(clear[name].sum()) for name in trained) / sum(value.size for value in trained.values())
    row |= {"compared one by one": f"{compared:.1%}"}
    last = {name: file[f"{name}_{STEPS - 1}"] for name in start}
    row |= {"moved": f"{max(_norm(last[name] - value, value) for name, value in trained.items()):.0e}"}
    runs = {backend: list(train(folder, case, get_backend(backend).prepare)) for backend in BACKENDS}
    for title, steps in (runs | {"double": truth}).items():
        losses = [abs(float(step.loss) / float(file[f"loss_{k}"]) - 1) for k, step in enumerate(steps)]
        errors = {name: np.abs(value - last[name]) for name, value in steps[-1].weights.items()}
        single = [error[clear[name]].max(initial=0) / np.abs(last[name]).max() for name, error in errors.items()]
        whole = [_norm(error, last[name]) for name, error in errors.items()]
        found = {"losses": losses, "weights": single, "norm": whole}
        row |= {f"{title}: {what}": f"{np.max(values):.1e}" for what, values in found.items()}
    return row


def _norm(difference: np.ndarray, value: np.ndarray) -> float:
    return float(np.linalg.norm(difference) / np.linalg.norm(value))


def main(command: str, models: str, target: str, *chosen: str) -> None:
    """Write artifacts, or compare what they give; of the cases that have one of `chosen` in their name, or of all."""
    rows = []
    for case in cases(Path(models)):
        if chosen and not any(part in str(case) for part in chosen):
            continue
        folder = Path(target) / str(case)
        if command == "write":
            make(folder, case, kept=[STEPS - 1])
            (folder / "checkpoint").unlink()
        else:
            rows.append(measure(folder, case))
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if rows and not chosen:
        write("artifacts.json", rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
