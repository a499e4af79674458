"""Steps of the training API of ONNX Runtime with artifacts: python step_artifacts.py FOLDER; needs onnxruntime-training 1.19.2.

FOLDER/batches.npz has the arrays x and y, a batch in each row, and the rate. steps.npz gets the losses, the loss of the eval
model on the last batch, and the weights; inference.onnx the trained model, and trained.checkpoint its checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from make_artifacts import _training


def main(folder: Path) -> None:
    _, api = _training()
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), module)
    results: dict[str, np.ndarray] = {}
    with np.load(folder / "batches.npz") as data:
        batches, rate = list(zip(data["x"], data["y"], strict=True)), float(data["rate"])
    optimizer.set_learning_rate(rate)
    module.train()
    losses = []
    for x, y in batches:
        losses.append(np.asarray(module(x, y)))
        optimizer.step()
        module.lazy_reset_grad()
    results |= {name: np.array(parameter.data) for name, parameter in state.parameters}
    module.eval()
    loss, *_ = module(*batches[-1])
    results |= {"losses": np.array(losses).ravel(), "eval_loss": np.asarray(loss)}
    module.export_model_for_inferencing(str(folder / "inference.onnx"), ["y"])
    api.CheckpointState.save_checkpoint(state, str(folder / "trained.checkpoint"), True)
    np.savez(folder / "steps.npz", allow_pickle=False, **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
