"""Verdicts on refgrad's results for a random graph: gradient, jvp, hvp and lower against complex steps; ONNX Runtime."""

from __future__ import annotations

import contextlib
import json
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.oracles.analytic import STEP
from refgrad.conformance.problems.rounding import Perturbed
from refgrad.conformance.tools.fuzzing.graphs.evaluation import UNKNOWN, tangent, wide, wide_feeds
from refgrad.conformance.tools.fuzzing.graphs.growing import Sample
from refgrad.conformance.tools.fuzzing.graphs.slopes import SkippedError, Slope, slopes
from refgrad.conformance.tools.fuzzing.graphs.validity import expected, invalid
from refgrad.conformance.tools.fuzzing.journey import place_of
from refgrad.errors import RefgradError
from refgrad.model.external import array_of
from refgrad.protos.traverse import captures_of, every_node
from refgrad.reverse.assembly import names_in

EXACT = 1e-8
_DIRECTIONS = 2
_DRAWS = 4
_DOUBLE, _SINGLE, _HALF = 48, 19, 7  # bits that may be right: four or so less than a type has
ORT = "ort-cpu"
WRONG, REFUSED, RAISED, INVALID = "wrong", "refused", "raised", "invalid"
NOT_RUN, FOREIGN = "cannot run", "of ONNX Runtime"
STEPS = ("gradient", "ort dialect", "jvp", "hvp", "again", "onnxruntime")
_CONSTANTS = {_DOUBLE: EXACT, _SINGLE: 1e-6, _HALF: 1e-2}  # two models that hold rounded constants differ by so much
_AGAIN = 4  # of so many graphs, one gradient is differentiated again


@dataclass(frozen=True)
class GraphVerdict:
    """A fault that a step showed. `place` is the innermost line of refgrad that an exception went through."""

    step: str
    kind: str
    message: str
    place: str = ""


@dataclass
class Found:
    """The verdicts on a graph, and the steps that were compared or skipped."""

    verdicts: list[GraphVerdict] = field(default_factory=list)
    compared: set[str] = field(default_factory=set)  # the steps that were
    note: str = ""  # why nothing was compared
    skipped: list[str] = field(default_factory=list)  # the steps that had nothing to compare, with the reason


def judge(sample: Sample, steps: Sequence[str] = STEPS) -> Found:
    """Take a graph through `steps`."""
    found = Found()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            problem = _Problem(sample)
        except UNKNOWN as error:
            found.note = str(error)
            return found
        gradient: ModelProto | None = None
        for step in steps:
            try:
                if step == "gradient":
                    gradient = problem.gradient()
                elif step == "onnxruntime":
                    problem.onnxruntime(gradient or problem.gradient())
                else:
                    _COMPARED[step](problem)
                found.compared.add(step)
            except SkippedError as error:
                found.skipped.append(f"{step}: {error}")
            except _FaultError as error:
                if error.verdict.kind == REFUSED and (reason := expected(error.verdict.message)):
                    found.note = f"refused: {reason}"
                    break
                found.verdicts.append(error.verdict)
                if step == "gradient":
                    break
    return found


class _FaultError(Exception):
    def __init__(self, step: str, kind: str, message: str, place: str = "") -> None:
        super().__init__(message)
        self.verdict = GraphVerdict(step, kind, message[:600], place)


class _Problem:
    """A sample with its values, and derivatives along directions."""

    def __init__(self, sample: Sample) -> None:
        self.sample, self.model = sample, sample.model
        self._strict = not invalid(sample.model)
        self.rng = np.random.default_rng([sample.seed, 7])
        weights = {t.name: array_of(t) for t in self.model.graph.initializer}
        self.feeds = dict(sample.feeds)
        self.moving = {name: np.asarray((self.feeds | weights)[name]) for name in sample.wrt}
        self.at = wide_feeds(self.feeds)
        self.directions = [
            {name: self.rng.standard_normal(x.shape) for name, x in self.moving.items()} for _ in range(_DIRECTIONS)
        ]
        if len(self.moving) > 1:
            for name, u in list(self.directions[0].items()):
                self.directions.append({name: u})
        self.bits = _bits(self.model)
        self.slopes = []
        for direction in self.directions:
            self.values, moves, self.margin = tangent(self.model, self.at, direction, STEP)
            self.slopes.append(moves)
        self.cotangents = {name: self.rng.standard_normal(np.shape(self.values[name])) for name in sample.outputs}

    def _made(self, step: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except RefgradError as error:
            raise _FaultError(step, REFUSED, f"{type(error).__name__}: {error}", place_of(error)) from error
        except Exception as error:
            text = "".join(traceback.format_exception_only(error)).strip()
            raise _FaultError(step, RAISED, text, place_of(error)) from error

    def _valid(self, step: str, make: Callable[[], ModelProto]) -> ModelProto:
        """The model that `make` returns, if it passes onnx's full check, and strict inference if the sample passes that.

        :raises _FaultError: it does not.
        """
        made: ModelProto = self._made(step, make)
        if reason := invalid(made, self._strict):
            raise _FaultError(step, INVALID, reason)
        return made

    def _run(self, step: str, model: ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any]:
        def run() -> dict[str, Any]:
            return dict(get_backend("numpy").prepare(model, precision="float64").run(feeds))

        results: dict[str, Any] = self._made(step, run)
        return results

    def gradient(self) -> ModelProto:
        """The gradient, compared with complex steps.

        :raises _FaultError: it is wrong, refused, or cannot run.
        """
        step, sample = "gradient", self.sample
        forward = self._run("forward", self.model, self.at)
        for name, value in forward.items():
            size = np.max(np.abs(self.values[name]), initial=1.0)
            self._compare("forward", name, value, self.values[name], size, self._lost(self.model, self.at, name))
        # A part of the graphs is differentiated with options that change the form of the gradient, not its value.
        how: dict[str, Any] = {3: {"recompute": True}, 5: {"keep_outputs": True}}.get(sample.seed % 8, {})
        made: ModelProto = self._valid(step, lambda: refgrad.gradient(self.model, sample.wrt, sample.outputs, **how))
        self._against_steps(step, made, names_in(made))
        return made

    def _against_steps(self, step: str, made: ModelProto, names: tuple[dict[str, str], dict[str, str]]) -> None:
        (cotangents, returned), known = names, {v.name for v in made.graph.input}
        feeds = {name: x for name, x in self.at.items() if name in known}
        feeds |= {cotangents[name]: v for name, v in self.cotangents.items() if name in cotangents}
        results = self._run(step, made, feeds)
        gradients = {name: np.asarray(results[returned[name]]) for name in returned}
        for name, x in self.moving.items():
            if name in gradients and gradients[name].shape != x.shape:
                raise _FaultError(
                    step, WRONG, f"the gradient by {name} has the shape {gradients[name].shape}, not {x.shape}"
                )
        for u, moves in zip(self.directions, self.slopes, strict=True):
            wanted = sum(float(np.sum(self.cotangents[name] * moves.get(name, 0.0))) for name in self.cotangents)
            scale = sum(float(np.sum(np.abs(self.cotangents[name] * moves.get(name, 0.0)))) for name in self.cotangents)
            terms = [gradients[name] * direction for name, direction in u.items() if name in gradients]
            got = sum(float(np.sum(term)) for term in terms)
            scale += sum(float(np.sum(np.abs(term))) for term in terms)
            apart, allowed = abs(got - wanted), EXACT * max(scale, 1e-6)
            if not apart <= allowed:  # terms may cancel each other on the way
                lost = [
                    float(np.sum(np.abs(u[name]))) * self._lost(made, feeds, returned[name])()
                    for name in gradients
                    if name in u
                ]
                allowed += sum(lost)
            if not apart <= allowed:
                by = ", ".join(u)
                raise _FaultError(
                    step, WRONG, f"along {by}: {got!r}, and complex steps say {wanted!r} (terms of {scale:.3g})"
                )

    def _lost(self, model: ModelProto, feeds: Mapping[str, Any], name: str, bits: int = _DOUBLE) -> Callable[[], float]:
        """How far rounding to `bits` moves a result of `model`, where somebody asks."""

        def spread() -> float:
            perturbed = Perturbed(bits)
            prepared = get_backend("numpy").prepare(model, precision=perturbed)
            found = []
            for draw in range(_DRAWS):
                perturbed.draw = draw
                found.append(np.asarray(prepared.run(feeds)[name], np.float64))
            exact = np.asarray(get_backend("numpy").prepare(model, precision="float64").run(feeds)[name])
            return max(float(np.max(np.abs(one - exact), initial=0.0)) for one in found)

        return spread

    def _compare(
        self,
        step: str,
        name: str,
        got: Any,
        wanted: Any,
        scale: float,
        lost: Callable[[], float],
        tolerance: float = EXACT,
    ) -> None:
        got, wanted = np.asarray(got), np.asarray(wanted)
        if got.shape != wanted.shape:
            raise _FaultError(step, WRONG, f"{name} has the shape {got.shape}, not {wanted.shape}")
        if got.dtype.kind not in "fc":
            if not np.array_equal(got, wanted):
                raise _FaultError(step, WRONG, f"{name} has other elements")
            return
        apart = float(np.max(np.abs(got - wanted), initial=0.0)) if np.all(np.isfinite(got)) else np.inf
        allowed = tolerance * max(scale, 1e-6)
        if not (apart <= allowed or apart <= allowed + lost()):
            raise _FaultError(step, WRONG, f"{name} is {apart:.3g} apart, of values of {scale:.3g}")

    def lowered(self) -> None:
        """The gradient in the dialect "ort", lowered."""
        step, sample = "ort dialect", self.sample
        made = self._made(step, lambda: refgrad.gradient(self.model, sample.wrt, sample.outputs, dialect="ort"))
        lowered = self._valid("lower", lambda: refgrad.lower(made))
        self._against_steps("lower", lowered, names_in(made))

    def jvp(self) -> None:
        """J·u, element by element."""
        step, sample = "jvp", self.sample
        made = self._valid(step, lambda: refgrad.jvp(self.model, sample.wrt, sample.outputs))
        directions, derivatives = _named(made, "directions"), _named(made, "derivatives")
        u, moves = self.directions[0], self.slopes[0]
        inputs = {v.name for v in made.graph.input}
        feeds = {name: x for name, x in self.at.items() if name in inputs}
        feeds |= {directions[name]: x for name, x in u.items() if name in directions}
        results = self._run(step, made, feeds)
        for name in sample.outputs:
            if name not in derivatives:
                raise _FaultError(step, WRONG, f"there is no tangent of {name}")
            wanted = moves.get(name, np.zeros(np.shape(self.values[name])))
            scale = float(np.max(np.abs(wanted), initial=0.0)) + self._steepness(name)
            lost = self._lost(made, feeds, derivatives[name])
            self._compare(step, name, results[derivatives[name]], wanted, scale, lost)

    def _steepness(self, name: str) -> float:
        return max(float(np.max(np.abs(moves.get(name, 0.0)), initial=0.0)) for moves in self.slopes)

    def hvp(self) -> None:
        """H·u of an output, against complex steps through its gradient."""
        step, sample = "hvp", self.sample
        output = sample.outputs[sample.seed % len(sample.outputs)]
        first = self._made(step, lambda: refgrad.gradient(self.model, sample.wrt, [output]))
        made = self._valid(step, lambda: refgrad.hvp(self.model, sample.wrt, output))
        vectors, products = _named(made, "directions"), _named(made, "derivatives")
        u = self.directions[0]
        inputs = {v.name for v in made.graph.input}
        feeds = {name: x for name, x in self.at.items() if name in inputs}
        feeds |= {vectors[name]: x for name, x in u.items() if name in vectors}
        results = self._run(step, made, feeds)
        cotangents, gradients = names_in(first)
        ones = {seed: np.ones(np.shape(self.values[name])) for name, seed in cotangents.items()}
        for name, slope in self._moved(first, ones, gradients).items():

            def lost(name: str = name, slope: Slope = slope) -> float:
                return slope.lost() + self._lost(made, feeds, products[name])()

            got = np.asarray(results[products[name]])
            self._compare(step, name, got, slope.value, slope.size, lost, slope.tolerance)

    def again(self) -> None:
        """The gradient of the gradient by every name, against complex steps through the gradient."""
        step, sample = "again", self.sample
        if sample.seed % _AGAIN:
            raise SkippedError(f"one gradient in {_AGAIN} is differentiated again")
        first = self._made(step, lambda: refgrad.gradient(self.model, sample.wrt, sample.outputs))
        cotangents, gradients = names_in(first)
        seeds = {cotangents[name]: v for name, v in self.cotangents.items() if name in cotangents}
        names = [name for name in sample.wrt if name in gradients]
        chosen = [gradients[name] for name in names]
        made = self._valid(step, lambda: refgrad.gradient(first, names, chosen))
        again, returned = names_in(made)
        known = {v.name for v in made.graph.input}
        weights = {name: wide(x) for name, x in self.moving.items()}
        ways = {gradients[name]: self.rng.standard_normal(self.moving[name].shape) for name in names}
        feeds = {n: x for n, x in {**self.at, **weights, **seeds}.items() if n in known}
        feeds |= {again[name]: w for name, w in ways.items() if name in again}
        results = self._run(step, made, feeds)
        u, moved = self.directions[0], self._moved(first, seeds, gradients)
        wanted = sum(float(np.sum(ways[gradients[name]] * moved[name].value)) for name in names)
        terms = [np.asarray(results[returned[name]]) * u[name] for name in names if name in returned]
        got = sum(float(np.sum(term)) for term in terms)
        size = sum(float(np.sum(np.abs(term))) for term in terms)
        size += sum(float(np.sum(np.abs(ways[gradients[name]]))) * moved[name].size for name in names)

        def lost() -> float:
            found = sum(float(np.sum(np.abs(ways[gradients[name]]))) * moved[name].lost() for name in names)
            for name in names:
                if name in returned:
                    found += float(np.sum(np.abs(u[name]))) * self._lost(made, feeds, returned[name])()
            return found

        self._compare(
            step, "the second derivative", got, wanted, size, lost, max(moved[name].tolerance for name in names)
        )

    def _moved(
        self, first: ModelProto, seeds: Mapping[str, np.ndarray], gradients: Mapping[str, str]
    ) -> dict[str, Slope]:
        """The derivative of each gradient in the model `first` along the first direction."""
        weights = {name: wide(x) for name, x in self.moving.items() if name not in self.at}

        def lost(fed: Mapping[str, Any], output: str) -> float:
            return self._lost(first, fed, output)()

        point = {**self.at, **weights, **seeds}
        return slopes(first, point, self.directions[0], gradients, _CONSTANTS[self.bits], lost)

    def onnxruntime(self, gradient: ModelProto) -> None:
        """ONNX Runtime runs the gradient if it runs the model, and both compute what the interpreter does."""
        if ORT not in available():
            raise SkippedError("it is not installed")
        backend = get_backend(ORT)
        try:
            results = backend.prepare(self.model).run(self.feeds)
        except Exception as error:
            raise SkippedError("it does not run the graph itself") from error
        for name in self.sample.outputs:
            self._near("forward", FOREIGN, name, results[name], self.values[name], self.model, self.feeds)
        cotangents, gradients = names_in(gradient)
        kinds = {v.name: v for v in gradient.graph.input}
        feeds: dict[str, Any] = {name: x for name, x in self.feeds.items() if name in kinds}
        for name, seed in cotangents.items():
            dtype = np.asarray(results[name]).dtype
            feeds[seed] = self.cotangents[name].astype(dtype)
        optimizer = ""
        try:
            got = backend.prepare(gradient).run(feeds)
        except Exception as error:
            if self._folds():
                raise SkippedError("it does not run the graph itself") from error
            try:
                got = backend.prepare(gradient, optimization="disabled").run(feeds)
            except Exception:
                raise _FaultError("onnxruntime", NOT_RUN, str(error)) from error
            optimizer = f"its optimizer fails: {error}"
        exact = self._run("onnxruntime", gradient, wide_feeds(feeds))
        for output in gradients.values():
            self._near("onnxruntime", WRONG, output, got[output], exact[output], gradient, feeds)
        if optimizer:
            raise _FaultError("onnxruntime", FOREIGN, optimizer)

    def _folds(self) -> bool:
        """True if ONNX Runtime runs the model only because it folds the weights that are inputs of the gradient."""
        unfolded = ModelProto()
        unfolded.CopyFrom(self.model)
        inputs = {value.name for value in unfolded.graph.input}
        unfolded.graph.input.extend(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            for tensor in unfolded.graph.initializer
            if tensor.name in self.moving and tensor.name not in inputs
        )
        try:
            get_backend(ORT).prepare(unfolded).run(self.feeds)
        except Exception:
            return True
        return False

    def _near(
        self, step: str, kind: str, name: str, got: Any, wanted: Any, model: ModelProto, feeds: Mapping[str, Any]
    ) -> None:
        got, wanted = np.asarray(got), np.asarray(wanted)
        if got.shape != wanted.shape:
            raise _FaultError(step, kind, f"{name} has the shape {got.shape}, not {wanted.shape}")
        if got.dtype.kind != "f":
            return
        size = float(np.max(np.abs(wanted), initial=1e-3))
        got = got.astype(np.float64)
        worst = float(np.max(np.abs(got - wanted), initial=0.0)) if np.all(np.isfinite(got)) else np.inf
        bits = self.bits
        if worst <= 2.0 ** (2 - bits) * size:
            return
        allowed = self._lost(model, wide_feeds(feeds), name, bits)()
        if not worst <= 2.0 ** (4 - bits) * size + 4 * allowed:
            if kind == FOREIGN and self.bits == _DOUBLE and worst <= 2.0 ** (4 - _SINGLE) * size:
                self.bits = _SINGLE  # ONNX Runtime works in float32 here, as a schema's body says
                return
            apart = f"{worst:.3g} apart, of values of {size:.3g}; rounding makes {allowed:.3g}"
            if kind == WRONG and (inexact := self._inexact(model, feeds)):
                kind, apart = FOREIGN, f"{apart}; {inexact} alone is as far off"
            raise _FaultError(step, kind, f"{name} on ONNX Runtime is {apart}")

    def _inexact(self, model: ModelProto, feeds: Mapping[str, Any]) -> str:
        """The operator of a node whose result on ONNX Runtime is beyond rounding for the very numbers that it read, or ""."""
        shown = ModelProto()
        shown.CopyFrom(model)
        known = {value.name for value in model.graph.output}
        names = [name for node in model.graph.node for name in node.output if name]
        shown.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in known)
        values: dict[str, Any] = {**feeds, **{t.name: array_of(t) for t in model.graph.initializer}}
        values |= get_backend(ORT).prepare(shown).run(feeds)
        for node in model.graph.node:
            if any(captures_of(node)) or not all(isinstance(values[name], np.ndarray) for name in node.input if name):
                continue
            read = {name: values[name] for name in node.input if name}
            inputs = [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
                for name, x in read.items()
            ]
            outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
            alone = helper.make_model(
                helper.make_graph([node], "alone", inputs, outputs),
                opset_imports=model.opset_import,
                ir_version=model.ir_version,
            )
            exact = get_backend("numpy").prepare(alone, precision="float64").run(wide_feeds(read))
            for name, value in exact.items():
                if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
                    continue
                size = float(np.max(np.abs(value), initial=0.0))
                apart = float(np.max(np.abs(values[name] - value), initial=0.0))
                if not apart <= 2.0 ** (4 - self.bits) * size + self._lost(alone, wide_feeds(read), name, self.bits)():
                    return str(node.op_type)
        return ""


def run_on_onnxruntime(sample: Sample) -> None:
    """Run the model alone on ONNX Runtime, which may end the process."""
    with contextlib.suppress(Exception):
        get_backend(ORT).prepare(sample.model).run(sample.feeds)


def _named(model: ModelProto, which: str) -> dict[str, str]:
    """The names that `jvp` and `hvp` give to directions or derivatives (`which`), from the metadata of their model."""
    [text] = [prop.value for prop in model.metadata_props if prop.key == f"refgrad.{which}"]
    return dict(json.loads(text))


def _bits(model: ModelProto) -> int:
    """How many bits may be right where a model is computed in the types that it declares: four less than the narrowest has."""
    kinds = {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    kinds |= {tensor.data_type for tensor in model.graph.initializer}
    for node in every_node(model):
        kinds |= {a.i for a in node.attribute if a.name == "to"}
        kinds |= {a.t.data_type for a in node.attribute if a.HasField("t")}
    return _HALF if TensorProto.FLOAT16 in kinds else _SINGLE if TensorProto.FLOAT in kinds else _DOUBLE


_COMPARED: dict[str, Callable[[_Problem], None]] = {
    "ort dialect": _Problem.lowered,
    "jvp": _Problem.jvp,
    "hvp": _Problem.hvp,
    "again": _Problem.again,
}
