"""`refgrad.split` on torch's exports: whether both parts give the gradient, what they cost, and how much crosses.

    python examples/torch_models.py FOLDER --all
    python benchmarks/split.py FOLDER [MODEL ...]

The forward and the backward part run one after the other on ONNX Runtime, what crosses stays where it is; beside them the joint
gradient, by all float inputs and weights, which returns the outputs too. "error" is the largest difference of any gradient,
relative to its largest entry, without ONNX Runtime's own rewrites, which fuse other nodes in one model than in two: 0 says that
the parts compute the same. "crosses" are the bytes of what the parts hand over, beside those of all the results of nodes
that a backward part reads where nothing is chosen.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from run_time import load
from timing import alternate, save

import refgrad
from refgrad.protos.traverse import reads_of

THREADS, ROUNDS = 1, 401  # one thread: two sessions that spin would take each other's time
SECONDS = 4.0  # for a model, unless it takes longer to be called 31 times


class Bound:
    """A model on ONNX Runtime, its inputs and outputs bound to values: a call copies nothing, and does little in Python."""

    def __init__(
        self, model: onnx.ModelProto, values: dict[str, Any], threads: int = THREADS, spinning: bool = True
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        fed = {value.name: values[value.name] for value in self.session.get_inputs() if value.name in values}
        names = [value.name for value in self.session.get_outputs()]
        self.results = dict(zip(names, self.session.run_with_ort_values(names, fed), strict=True))
        self._binding = self.session.io_binding()
        for name, value in fed.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in self.results.items():
            self._binding.bind_ortvalue_output(name, value)

    def __call__(self) -> None:
        """Run it."""
        self.session.run_with_iobinding(self._binding)


def as_written(model: onnx.ModelProto, values: dict[str, Any]) -> dict[str, Any]:
    """The outputs by name, where no node is rewritten."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = THREADS, 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    names = [value.name for value in session.get_outputs()]
    fed = {value.name: values[value.name] for value in session.get_inputs() if value.name in values}
    return dict(zip(names, session.run_with_ort_values(names, fed), strict=True))


def unchosen(joint: onnx.ModelProto) -> set[str]:
    """What nodes behind a cotangent read of the others, inputs and constants aside."""
    late = {value.name for value in joint.graph.input if value.name.endswith("_grad")}
    made: dict[str, bool] = {}
    read = set[str]()
    for node in joint.graph.node:
        behind = not late.isdisjoint(reads_of(node))
        made.update(dict.fromkeys(filter(None, node.output), behind))
        if behind:
            late.update(node.output)
            read.update(reads_of(node))
    return {name for name in read if made.get(name) is False}


def measure(folder: Path, name: str) -> dict[str, Any]:
    model, feeds, wrt = load(folder, name)
    joint = refgrad.gradient(model, wrt, keep_outputs=True)
    parts = refgrad.split(model, wrt)
    values = {key: onnxruntime.OrtValue.ortvalue_from_numpy(value) for key, value in feeds.items()}
    whole, forward = Bound(joint, values), Bound(parts.forward, values)
    backward = Bound(parts.backward, values | forward.results)
    errors = []
    plain = as_written(joint, values)
    kept = as_written(parts.forward, values)
    for key, value in as_written(parts.backward, values | kept).items():
        true, got = plain[key].numpy(), value.numpy()
        errors.append(np.abs(got - true).max(initial=0.0) / max(np.abs(true).max(initial=0.0), 1e-30))
    start = time.perf_counter()
    whole()
    rounds = min(ROUNDS, max(31, int(SECONDS / (2 * (time.perf_counter() - start)))))
    ours, theirs, ratio = alternate(lambda: (forward(), backward()), whole, rounds)
    everything = refgrad.select_model_inputs_outputs(joint, sorted(unchosen(joint)))
    nbytes = sum(value.numpy().nbytes for value in Bound(everything, values).results.values())
    crossing = sum(forward.results[key].numpy().nbytes for key in parts.saved)
    return {
        "model": name,
        "nodes": len(joint.graph.node),
        "forward": len(parts.forward.graph.node),
        "backward": len(parts.backward.graph.node),
        "error": f"{max(errors):.1e}",
        "joint ms": round(1e3 * theirs, 2),
        "parts ms": round(1e3 * ours, 2),
        "ratio": round(ratio, 2),
        "values": len(parts.saved),
        "crosses KiB": round(crossing / 1024, 1),
        "of all that is read": round(crossing / max(nbytes, 1), 2),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    names = sys.argv[2:] or sorted(path.stem for path in folder.glob("*.npz"))
    rows = []
    for name in names:
        rows.append(measure(folder, name))
        print(rows[-1], flush=True)
    if not sys.argv[2:]:
        save("split", rows)


if __name__ == "__main__":
    main()
