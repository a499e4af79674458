"""One question about one model of the gallery, in a process of its own: benchmarks/gallery.py asks it.

    python benchmarks/gallery_questions.py QUESTION MODEL [--dim N] [--seconds N]

prints {question: {"answer": ..., "reason": ...}} as JSON, for `check` one entry for each kind of gradient and executor too. The
random feeds are the same in every question.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from interpreter_memory import peak

import refgrad
from refgrad.backends import get_backend
from refgrad.backends.base import graph_inputs, graph_outputs
from refgrad.conformance.problems.feeds import SIZE
from refgrad.conformance.problems.fitting import fitting_feeds
from refgrad.conformance.verdicts import CONVENTION, FAULTS, RIGHT, UNDECIDED, UNSUPPORTED
from refgrad.errors import RefgradError
from refgrad.protos.traverse import every_node
from refgrad.training import Adam, Training, step_model
from refgrad.training.step import trained

Arrays = dict[str, np.ndarray]
Answer = dict[str, str]

EXECUTORS = ("numpy", "ort-cpu")
REFUSED, NONE, ZERO = "refused", "does not apply", "zero"
STEPS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # steps of the differences, relative to the size of the moved tensor
NOISE = 16 * float(np.finfo(np.float32).eps)  # of a result of ONNX Runtime, relative to its largest element
AGREED = 0.02  # relative error of a difference in float32 that counts as right
OF_WALK = 1e-3  # relative error of a difference of a walk in float64, beside a gradient in float32
OF_COST, OBJECTS = (
    0.1,
    20_000,
)  # of the peak that was measured; and bytes of Python's own objects, which are not predicted
OF_SALIENCY = 1e-2  # of the largest element, between two executors in float32
NOTE = 300  # characters of a note
UPDATES, RATES, LAYERS = 10, (1e-3, 1e-5), 4  # of a training; the last layers that are tried


def answer(word: str, reason: str = "") -> Answer:
    return {"answer": word, "reason": reason}


def names(given: Sequence[str]) -> str:
    """Names for --wrt: no comma and no pattern of theirs has a meaning."""
    return ",".join(name.replace("\\", "\\\\").replace(",", "\\,") for name in given)


class Subject:
    """A model of the gallery with random feeds: the ones of `refgrad check` without --feeds."""

    def __init__(self, path: Path, dim: int | None) -> None:
        self.path, self.dim = path, dim
        self.model = onnx.load(path)
        self.floats = [v.name for v in graph_inputs(self.model.graph) if v.dtype is not None and v.dtype.kind == "f"]
        self.outputs = [v.name for v in graph_outputs(self.model.graph) if v.dtype is not None and v.dtype.kind == "f"]

    @property
    def feeds(self) -> Arrays:
        """Feeds with which both executors run the model and give finite numbers."""
        interpreter = get_backend("numpy").prepare(str(self.path))

        def run(feeds: Arrays) -> list[Arrays]:
            return [interpreter.run(feeds), _run(self.model, feeds)]

        return fitting_feeds(
            self.model,
            run,
            lambda ran: all(
                np.all(np.isfinite(x)) for one in ran for x in one.values() if np.asarray(x).dtype.kind == "f"
            ),
            size=SIZE if self.dim is None else self.dim,
        ).feeds

    @property
    def parameters(self) -> Arrays:
        """The values of the weights that `refgrad weights` calls parameters."""
        return {} if not refgrad.weights(self.model).trainable else trained(self.model, None)[1]

    @property
    def layers(self) -> list[list[str]]:
        """The parameters of each node that reads some, the last node first."""
        found = set(refgrad.weights(self.model).trainable)
        for nodes in (self.model.graph.node, every_node(self.model)):
            read = [tuple(name for name in node.input if name in found) for node in nodes]
            if layers := [list(one) for one in dict.fromkeys(reversed(read)) if one]:
                return layers
        return [sorted(found)]


def command(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """The exit code of a command of refgrad, its JSON, and its complaint."""
    done = subprocess.run(
        [sys.executable, "-m", "refgrad", *arguments, "--json"], capture_output=True, text=True, check=False
    )
    try:
        document = json.loads(done.stdout)
    except ValueError:
        document = {}
    lines = [line.removeprefix("refgrad: ") for line in done.stderr.splitlines()]
    return done.returncode, document, " ".join(line for line in lines if not line.startswith("notice: "))


def preflight(subject: Subject, seconds: float) -> dict[str, Answer]:
    """The operators that `refgrad preflight` refuses."""
    code, found, complaint = command("preflight", str(subject.path))
    if code == 0:
        operators = sum(len(row["nodes"]) for row in found["rows"])
        return {"preflight": answer(RIGHT, f"{operators} nodes between inputs, weights and outputs")}
    refused = [f"{row['operator']}: {row['reason']}" for row in found.get("rows", ()) if row["verdict"] == REFUSED]
    return {"preflight": answer(REFUSED, "; ".join(refused) or complaint)}


def check(subject: Subject, seconds: float) -> dict[str, Answer]:
    """The answer of `refgrad check MODEL` without options, and its verdicts for inputs and weights on each executor."""
    found, rows = _checked(subject, seconds)
    if not rows:
        return {"check": found}
    return {"check": found} | _by_executor(subject, rows)


def inputs(subject: Subject, seconds: float) -> dict[str, Answer]:
    """The gradient by the float inputs alone."""
    return _alone(subject, seconds, "inputs", subject.floats)


def weights(subject: Subject, seconds: float) -> dict[str, Answer]:
    """The gradient by the weights of the last layer alone."""
    return _alone(subject, seconds, "weights", subject.layers[0])


def _alone(subject: Subject, seconds: float, kind: str, wrt: Sequence[str]) -> dict[str, Answer]:
    found, rows = _checked(subject, seconds, "--wrt", names(wrt))
    return {f"{kind} on {executor}": found for executor in EXECUTORS} | _by_executor(subject, rows, kind)


def _checked(subject: Subject, seconds: float, *options: str) -> tuple[Answer, list[dict[str, Any]]]:
    """The verdict of `refgrad check`, and its rows."""
    _, found, complaint = command("check", str(subject.path), "--max-seconds", str(int(seconds)), *options)
    if not found:
        return answer("stopped" if "--max-seconds" in complaint else REFUSED, complaint), []
    word = "stopped" if found["stopped"] else found["answer"].partition(":")[0]
    return answer(word, found["stopped"] or found["answer"]), found["rows"]


def _by_executor(subject: Subject, rows: Sequence[Mapping[str, Any]], kind: str = "") -> dict[str, Answer]:
    """The verdict on the gradients by the inputs, and by the weights, on each executor: wrong if a single one is."""
    found = {}
    for one in (kind,) if kind else ("inputs", "weights"):
        mine = [row for row in rows if (row["gradient"] in subject.floats) == (one == "inputs")]
        for executor in EXECUTORS:
            told = [row for row in mine if row["backend"] in (executor, f"{executor} float64", "numpy float64")]
            if any(row["backend"] == executor for row in told):
                found[f"{one} on {executor}"] = _verdict(told)
    return found


def _verdict(rows: Sequence[Mapping[str, Any]]) -> Answer:
    """One verdict on several gradients: the gravest, and else right if any is."""
    words = [ZERO if row["note"].startswith("both are zero") else row["verdict"] for row in rows]
    for word in (*FAULTS, RIGHT, CONVENTION, UNDECIDED, UNSUPPORTED, ZERO):
        if word in words:
            first = rows[words.index(word)]
            others = {other: words.count(other) for other in words if other != RIGHT}
            errors = [
                row["relative"]
                for row in rows
                if row["verdict"] == RIGHT and row["relative"] is not None and row["relative"] <= row["allowed"]
            ]
            largest = [f"largest error {max(errors):.1e}"] if errors else []
            told = [f"{count} {other}" for other, count in others.items()]
            note = [] if word == RIGHT else [f"{first['gradient']}: {first['note'][:NOTE]}"]
            return answer(word, "; ".join([f"{words.count(RIGHT)} of {len(words)} right", *largest, *told, *note]))
    return answer(UNDECIDED, "no gradient was compared")


def onnxruntime(subject: Subject, seconds: float) -> dict[str, Answer]:
    """ONNX Runtime's gradient against differences of ONNX Runtime's forward model, which knows neither rule nor interpreter.

    Its results are float32, so a difference is right within a few percent. All inputs, or all parameters, are moved at once.
    """
    feeds, parameters, found = subject.feeds, subject.parameters, {}
    rng = np.random.default_rng(0)
    for kind, moved in (("inputs", {n: feeds[n] for n in subject.floats}), ("weights", parameters)):
        key = f"{kind} against ONNX Runtime"
        if not moved:
            found[key] = answer(NONE, f"the model has no float {kind}")
            continue
        gradient = refgrad.gradient(subject.model, wrt=list(moved), outputs=subject.outputs)
        plain = _run(subject.model, feeds)
        cotangents = {name: rng.standard_normal(plain[name].shape) for name in subject.outputs}
        seeds = {f"{name}_grad": x.astype(plain[name].dtype) for name, x in cotangents.items()}
        slopes = _run(_of_any_size(gradient), feeds | seeds)
        told, direction = _direction({n: slopes[f"{n}_grad"].astype(np.float64) for n in moved}, moved, rng)
        found[key] = _compared(told, partial(_forward, subject, feeds, direction, kind, cotangents))
    return found


def _direction(slopes: Arrays, moved: Arrays, rng: np.random.Generator) -> tuple[float, Arrays]:
    """The gradient along a direction, and the direction: a random one and the gradient's own, half and half.

    The second half is the steepest, so that rounding hides little; the first half moves what the gradient calls flat.
    """
    random = {n: rng.standard_normal(x.shape) * _size(x) for n, x in moved.items()}
    length, steepness = (np.sqrt(sum(float(np.vdot(x, x)) for x in one.values())) for one in (random, slopes))
    direction = {n: x + slopes[n] * (length / steepness if steepness else 0.0) for n, x in random.items()}
    return sum(float(np.vdot(slopes[n], d)) for n, d in direction.items()), direction


def _size(x: np.ndarray) -> float:
    """The root of the mean square of the elements, or 1 if all are 0."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) or 1.0


def _run(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> Arrays:
    taken = {value.name for value in model.graph.input}
    results: Arrays = get_backend("ort-cpu").prepare(model).run({n: x for n, x in feeds.items() if n in taken})
    return results


def _forward(
    subject: Subject, feeds: Arrays, direction: Arrays, kind: str, cotangents: Arrays, step: float
) -> tuple[float, float]:
    """The outputs times their cotangents at a step along the direction, and the rounding error of this number."""
    if kind == "inputs":
        model, fed = subject.model, feeds | {n: _moved(feeds[n], step * d) for n, d in direction.items()}
    else:
        values = subject.parameters
        model, fed = (
            refgrad.write_back(subject.model, {n: _moved(values[n], step * d) for n, d in direction.items()}),
            feeds,
        )
    results = _run(model, fed)
    value = sum(float(np.vdot(c, results[n].astype(np.float64))) for n, c in cotangents.items())
    noise = sum(NOISE * float(np.linalg.norm(c)) * _size(results[n]) for n, c in cotangents.items())
    return value, noise


def _moved(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    return (x + by).astype(x.dtype)


def _compared(told: float, forward: Callable[[float], tuple[float, float]]) -> Answer:
    """The gradient along a direction against central differences, two steps of which are combined (Richardson)."""
    seen = []
    for step in STEPS:
        (coarse, _), (fine, doubt) = (_slope(forward, size) for size in (step, step / 2))
        difference, doubt = (4 * fine - coarse) / 3, 2 * doubt
        seen.append((difference, doubt))
        size = max(abs(told), abs(difference))
        if abs(difference - told) <= AGREED * size and doubt <= AGREED * size:
            return answer(
                RIGHT, f"{told:.4g} along the direction, the difference is {difference:.4g} with steps of {step:g}"
            )
    numbers = ", ".join(f"{difference:.4g} ± {doubt:.1g}" for difference, doubt in seen)
    if not told and not any(difference for difference, _ in seen):
        return answer(ZERO, "the gradient and every difference are 0")
    settled = any(  # two differences agree with each other, and not with the gradient
        abs(one - other) + doubt + more <= AGREED * max(abs(one), abs(other)) and abs(told - other) > 0.1 * abs(other)
        for (one, doubt), (other, more) in itertools.pairwise(seen)
    )
    return answer("wrong" if settled else UNDECIDED, f"the gradient says {told:.4g}, the differences {numbers}")


def _slope(forward: Callable[[float], tuple[float, float]], step: float) -> tuple[float, float]:
    """A central difference, and how far rounding moves it."""
    (after, noise), (before, _) = forward(step), forward(-step)
    return (after - before) / (2 * step), noise / step


def walk(subject: Subject, seconds: float) -> dict[str, Answer]:
    """A walk by the float inputs, or without any by the last weights, with a difference beside each step."""
    feeds = subject.feeds
    result = get_backend("ort-cpu").prepare(str(subject.path)).run(feeds)
    of = subject.outputs[0]
    at = np.unravel_index(int(np.argmax(result[of])), np.shape(result[of]))
    chosen = f"{of}[{', '.join(map(str, at))}]" if at else of
    wrt = subject.floats or sorted(_moving(subject, feeds, of, np.ones_like(result[of])))
    walked = refgrad.walk(subject.model, feeds, of=chosen, wrt=wrt)
    seen = [(step, step.difference) for step in walked.steps if step.difference is not None]
    scale = max((abs(d.gradient) for _, d in seen), default=1.0)
    rounding = NOISE * max(scale, 1.0)  # a walk begins with the gradient 1, and is computed in float32
    off = [(step, d) for step, d in seen if d.error > OF_WALK * max(abs(d.gradient), abs(d.difference)) + rounding]
    at_kinks = [step for step, _ in off if step.kinks]
    summary = f"{len(walked.steps)} steps, {len(seen)} differences"
    if len(off) > len(at_kinks):
        step, d = next(pair for pair in off if not pair[0].kinks)
        text = f"{step.node}: {d.of} has {d.gradient:g}, the difference is {d.difference:g}"
        if any(node.op_type.startswith("DynamicQuantize") for node in every_node(subject.model)):
            return {"walk": answer(UNDECIDED, f"the model rounds, and the difference crosses its steps; {text}")}
        return {"walk": answer("wrong", text)}
    if not seen:
        return {"walk": answer(UNDECIDED, f"{summary}: each of them would take long")}
    return {"walk": answer(RIGHT, f"{summary}, {len(at_kinks)} of steps at kinks" if at_kinks else summary)}


def cost(subject: Subject, seconds: float) -> dict[str, Answer]:
    """The predicted peak of the interpreter's memory against the measured one."""
    feeds = subject.feeds
    sizes: dict[str, int] = {}
    for value in graph_inputs(subject.model.graph):
        if value.name in feeds and value.shape is not None:
            found = enumerate(zip(value.shape, np.shape(feeds[value.name]), strict=True))
            sizes |= {f"{value.name}[{axis}]": size for axis, (dim, size) in found if not isinstance(dim, int)}
    predicted = refgrad.cost(subject.model, sizes)
    measured = peak(subject.model, feeds)
    off = abs(predicted.peak - measured)
    text = f"{predicted.flops:,} FLOPs; {predicted.peak:,} bytes at the peak, {measured:,} were measured"
    return {"cost": answer(RIGHT if off <= OF_COST * measured + OBJECTS else "wrong", text)}


def train(subject: Subject, seconds: float) -> dict[str, Answer]:
    """Ten updates of the last layer that moves the output: does the squared error to half of the output fall?"""
    feeds = subject.feeds
    results = get_backend("ort-cpu").prepare(str(subject.path)).run(feeds)
    of = subject.outputs[0]
    data = feeds | {"label": (results[of] / 2).astype(results[of].dtype)}
    tried = []
    moving = _moving(subject, feeds, of, results[of])
    layers = [layer for layer in subject.layers if not moving.isdisjoint(layer)]
    if not layers:
        return {"train": answer(ZERO, f"no weight moves {of!r} at these feeds")}
    for layer, rate in itertools.product(layers[:LAYERS], RATES):
        step = step_model(subject.model, "squared_error", Adam(), trainable=layer, output=of)
        training = Training(step, rate)
        taken = {value.name: data[value.name] for value in step.model.graph.input if value.name in data}
        curve = [training.train_on(taken, rate) for _ in range(UPDATES + 1)]
        tried.append(f"{', '.join(layer)}: {curve[0]:.6g} -> {curve[-1]:.6g} at a rate of {rate:g}")
        if curve[-1] < curve[0]:
            return {"train": answer(RIGHT, tried[-1])}
    return {"train": answer("wrong", "; ".join(tried)[:NOTE])}


def _moving(subject: Subject, feeds: Arrays, of: str, cotangent: np.ndarray) -> set[str]:
    """The parameters by which an output has a gradient that is not 0: a branch that is not taken has none."""
    gradient = refgrad.gradient(subject.model, wrt=list(subject.parameters), outputs=[of])
    slopes = _run(_of_any_size(gradient), feeds | {f"{of}_grad": cotangent})
    return {name for name in subject.parameters if np.any(slopes[f"{name}_grad"])}


def _of_any_size(gradient: onnx.ModelProto) -> onnx.ModelProto:
    """The gradient, which takes cotangents of any shape: a model may declare another shape than it computes."""
    for value in gradient.graph.input:
        if value.name.endswith("_grad"):
            value.type.tensor_type.ClearField("shape")
    return gradient


def saliency(subject: Subject, seconds: float) -> dict[str, Answer]:
    """A saliency map of the largest float input, the same on both executors."""
    feeds = subject.feeds
    wrt = max(subject.floats, key=lambda name: feeds[name].size)
    result = get_backend("ort-cpu").prepare(str(subject.path)).run(feeds)[subject.outputs[0]]
    of = None
    if len(subject.outputs) > 1:
        at = np.unravel_index(int(np.argmax(result)), np.shape(result))
        of = f"{subject.outputs[0]}[{', '.join(map(str, at))}]"
    written = refgrad.recipes.saliency(subject.model, wrt=wrt, of=of)
    maps = [get_backend(name).prepare(written).run(feeds)[f"{wrt}_saliency"] for name in EXECUTORS]
    largest = float(np.max(np.abs(maps[0])))
    off = float(np.max(np.abs(maps[0] - maps[1])))
    text = f"largest {largest:.3g} of {maps[0].size} elements, the executors differ by {off:.1e}"
    if not largest and off <= np.finfo(np.float32).eps:  # a Sigmoid that is sure: ONNX Runtime's is off by 4e-8
        return {"saliency": answer(ZERO, text)}
    if not all(np.all(np.isfinite(one)) for one in maps) or off > OF_SALIENCY * max(largest, 1e-30):
        return {"saliency": answer("wrong", text)}
    return {"saliency": answer(RIGHT if largest else ZERO, text)}


QUESTIONS: dict[str, Callable[[Subject, float], dict[str, Answer]]] = {
    "preflight": preflight,
    "check": check,
    "inputs": inputs,
    "weights": weights,
    "onnxruntime": onnxruntime,
    "walk": walk,
    "cost": cost,
    "train": train,
    "saliency": saliency,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dim", type=int)
    parser.add_argument("--seconds", type=float, default=120.0)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        found = QUESTIONS[asked.question](Subject(asked.model, asked.dim), asked.seconds)
    except RefgradError as error:
        found = {asked.question: answer(REFUSED, str(error))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
