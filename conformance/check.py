"""Is a gradient right? Every dialect on every backend, against differences and against the gradient in float64.

Two questions are asked apart. Whether the mathematics is right: each dialect's gradient, run in float64 on the NumPy
interpreter, against central differences along random directions, which know nothing of any rule. Whether a backend computes
it: its gradient in the model's own types, element by element, against the float64 one. No error is judged by its size alone,
but against what explains it: the error estimate of the differences, the rounding of the type, and how far the float64
gradient itself moves when each intermediate result is rounded (which cancellation and kinks can make large).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto, helper, numpy_helper

from refgrad.backends import Prepared, available, get_backend
from refgrad.backends.base import ModelLike, Value, check_feeds, describe, graph_inputs, load_model
from refgrad.backward import gradient as differentiate
from refgrad.conformance import builders
from refgrad.conformance.differences import Difference, directional, one_sided
from refgrad.conformance.feeds import DOMAINS, SIZE, random_feeds, widened
from refgrad.conformance.weights import randomize
from refgrad.errors import BackendError, FeedError, OptionError, RefgradError, choices
from refgrad.graph import FLOATS, Graph
from refgrad.registry import DIALECTS

AGREED, DISAGREED, FAILED = "agreed", "disagreed", "failed"
KINK, INCONCLUSIVE, UNSUPPORTED = "kink", "inconclusive", "not supported"
WRONG_BUILDER = "onnxruntime is wrong"
DIFFERENCES, FLOAT64 = "differences", "float64"

_FAULTS = (DISAGREED, FAILED)
_STEPS = (1e-3, 1e-5, 1e-7)  # tried in this order until the differences are settled
_SETTLED = 1e-6  # the error of a difference, relative to the gradient, that needs no smaller step
_TELLING = 1e-2  # a larger error tells nothing
_EXACT = 1e-6  # what float64 explains of a gradient against settled differences
_ROUNDINGS = 16  # how many roundings of the result each node may cost
_SENSITIVE = 10  # how many times the change under rounded intermediate results is explained
_FLOAT64_BITS = 50  # of 53: a rounding that can be told from the float64 gradient
_COARSER = 4  # bits less, when rounding alone does not explain an error: is there a kink near?
_NONE = (None, None, None)
_NO_KERNEL = re.compile("no kernel|not a registered|NOT_IMPLEMENTED|NotImplemented|no schema|opset|IR version", re.I)


@dataclass(frozen=True)
class Row:
    """One gradient as one witness computed it, against one oracle.

    `absolute` and `relative` are the largest error over the elements (or the directions) and that error relative to the
    largest element (or the norm); `allowed` is the largest relative error that rounding and the oracle explain. They are
    None where nothing was compared.
    """

    gradient: str
    dialect: str
    backend: str
    oracle: str
    verdict: str
    absolute: float | None = None
    relative: float | None = None
    allowed: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Check:
    """What `check` found."""

    wrt: tuple[str, ...]
    outputs: tuple[str, ...]
    seed: int
    feeds: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing disagrees. What is not supported, a kink or inconclusive is no disagreement."""
        return not self.faults

    @property
    def faults(self) -> tuple[Row, ...]:
        """The rows that show something wrong with refgrad or a backend."""
        return tuple(row for row in self.rows if row.verdict in _FAULTS)


def check(
    model: ModelLike,
    feeds: Mapping[str, Any] | None = None,
    *,
    wrt: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    dialects: Sequence[str] = DIALECTS,
    seed: int = 0,
    size: int = SIZE,
    sizes: Mapping[str, int] | None = None,
    directions: int = 2,
    tolerance: float | None = None,
    random_weights: int | None = None,
    seconds: float = builders.SECONDS,
) -> Check:
    """Differentiate `model` and compare its gradient with every oracle there is, on every backend.

    :param feeds: the point, random by default; for an initializer, a value in place of its own.
    :param size: the number of elements of random feeds along symbolic and unknown dimensions; `sizes` has it by symbol.
    :param backends: by default all that are available.
    :param directions: how many random directions differences are taken along, for each gradient.
    :param tolerance: the relative error that needs no explanation; by default what the type and the number of nodes explain.
    :param random_weights: a seed; weights that are constant fills become random numbers first (`weights.randomize`).
    :param seconds: the time limit of ONNX Runtime's own builder, where it is installed.
    :raises RefgradError: what `refgrad.gradient` refuses; feeds that do not fit; an unknown backend.
    """
    if directions < 1:
        raise OptionError(f"directions={directions}: at least one direction is needed.")
    if tolerance is not None and not tolerance > 0:
        raise OptionError(f"tolerance={tolerance}: a tolerance is a positive number, relative to the gradient.")
    names = list(backends) if backends is not None else available()
    for name in names:
        get_backend(name)
    proto = load_model(model)
    if random_weights is not None:
        proto = randomize(proto, random_weights)[0]
    if feeds is not None:
        feeds = check_feeds(feeds, inputs_of(proto))
        proto, feeds = _with_values(proto, feeds)
    gradients = {dialect: differentiate(proto, wrt, outputs, dialect=dialect) for dialect in dialects}
    point = _Point.choose(proto, next(iter(gradients.values())), feeds, seed, size, sizes)
    rows: list[Row] = []
    truths: dict[str, dict[str, np.ndarray]] = {}
    for dialect, made in gradients.items():
        try:
            prepared = get_backend("numpy").prepare(made, precision="float64")
            truths[dialect] = _by_name(prepared.run(point.wide | point.seeds), point.names)
        except BackendError as error:
            rows += _without_result(point, dialect, "numpy float64", DIFFERENCES, error)
    if not truths:
        return Check(tuple(point.names), tuple(point.seeds_of), seed, point.described, tuple(rows))
    first = next(iter(truths))
    truth = _Truth(point, gradients[first], truths[first])
    estimates = _differences(point, truth.gradients, np.random.default_rng([seed, 1]), directions)
    for dialect, got in truths.items():
        rows += [
            _against_differences(truth, name, dialect, "numpy float64", got[name], estimates[name], tolerance or _EXACT)
            for name in point.names
        ]
    for dialect, made in gradients.items():
        allowed = tolerance or _rounding(made, point)
        for name in names:
            rows += _on_backend(truth, made, dialect, name, allowed)
    if "ort-cpu" in names and builders.available():
        settled = {row.gradient: row.verdict for row in reversed(rows) if row.oracle == DIFFERENCES}
        allowed = tolerance or _rounding(gradients[first], point)
        rows += _of_builder(truth, estimates, settled, allowed, seconds)
    return Check(tuple(point.names), tuple(point.seeds_of), seed, point.described, tuple(rows))


@dataclass
class _Point:
    """Where the gradient is checked: the feeds and cotangents in the model's types and in float64, and the model there."""

    model: ModelProto
    forward: Prepared
    names: dict[str, str]  # wrt: its gradient's name
    seeds_of: dict[str, str]  # output: its cotangent's name
    feeds: dict[str, Any]
    cotangents: dict[str, np.ndarray]  # by the cotangent's name, in the model's types
    wide: dict[str, Any]
    described: str

    @classmethod
    def choose(
        cls,
        model: ModelProto,
        gradient: ModelProto,
        feeds: Mapping[str, Any] | None,
        seed: int,
        size: int,
        sizes: Mapping[str, int] | None,
    ) -> _Point:
        """Take the given feeds, or the first random ones at which every output is finite."""
        metadata = {entry.key: entry.value for entry in gradient.metadata_props}
        names = json.loads(metadata["refgrad.gradients"])
        seeds_of = json.loads(metadata["refgrad.cotangents"])
        prepared = get_backend("numpy").prepare(_with_inputs(model, list(names)), precision="float64")
        inputs = graph_inputs(model.graph)
        if feeds is not None:
            given = dict(feeds)
            results, described = prepared.run(widened(given), seeds_of), "given"
        else:
            for domain in DOMAINS:
                given = dict(random_feeds(inputs, seed=seed, size=size, sizes=sizes, domain=domain))
                results, described = prepared.run(widened(given), seeds_of), f"random, {domain}"
                if all(np.all(np.isfinite(value)) for value in results.values()):
                    break
        _require_finite(results, described)
        rng = np.random.default_rng([seed, 0])
        declared = {value.name: describe(value).dtype for value in gradient.graph.input}
        cotangents = {}
        for output, seed_name in seeds_of.items():
            cotangent = np.asarray(rng.standard_normal(results[output].shape))
            cotangents[seed_name] = cotangent.astype(declared[seed_name] or np.float32)
        wide = widened(given) | {
            t.name: numpy_helper.to_array(t).astype(np.float64)
            for t in model.graph.initializer
            if t.name in names and t.name not in given
        }
        return cls(model, prepared, names, seeds_of, given, cotangents, wide, described)

    @property
    def seeds(self) -> dict[str, np.ndarray]:
        """The cotangents in float64, by their own names."""
        return widened(self.cotangents)

    @property
    def cotangent_of(self) -> dict[str, np.ndarray]:
        """The cotangents in float64, by the outputs that they belong to."""
        wide = self.seeds
        return {output: wide[name] for output, name in self.seeds_of.items()}

    def evaluate(self, moved: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The differentiated outputs at another point; one whose shape changes on the way has no derivative there."""
        results = self.forward.run(moved, self.seeds_of)
        for output, value in self.cotangent_of.items():
            if results[output].shape != value.shape:
                raise _ShapeMovedError(f"the shape of {output!r} changes along this direction")
        return results


@dataclass
class _Truth:
    """The gradients in float64, and how far rounding moves them."""

    point: _Point
    model: ModelProto
    gradients: Mapping[str, np.ndarray]
    bits: int = 24
    _moved: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bits = 1 - round(np.log2(_epsilon(self.point.model)))

    def moved(self, name: str, bits: int) -> np.ndarray:
        """By how much the gradient of `name` changes when every intermediate result is rounded to `bits` bits."""
        if bits not in self._moved:
            try:
                prepared = get_backend("numpy").prepare(self.model, precision="float64", bits=max(bits, 2))
                rounded = _by_name(prepared.run(self.point.wide | self.point.seeds), self.point.names)
            except BackendError:
                rounded = {}
            self._moved[bits] = {
                name: rounded[name] - value
                if name in rounded and rounded[name].shape == value.shape
                else np.full(value.shape, np.inf)
                for name, value in self.gradients.items()
            }
        return self._moved[bits][name]


class _ShapeMovedError(Exception):
    """Differences cannot be taken."""


def _require_finite(results: Mapping[str, np.ndarray], described: str) -> None:
    bad = [name for name, value in results.items() if not np.all(np.isfinite(value))]
    if bad:
        raise FeedError(
            f"With {described} feeds the outputs {choices(bad)} are not finite in float64, so they have no derivative "
            "there. Give feeds inside the model's domain (--feeds, a .npz file)."
        )


def _with_inputs(model: ModelProto, names: Sequence[str]) -> ModelProto:
    """The model with the initializers among `names` as inputs too, so that they can be moved."""
    listed = {value.name for value in model.graph.input}
    tensors = [t for t in model.graph.initializer if t.name in names and t.name not in listed]
    if not tensors:
        return model
    made = ModelProto()
    made.CopyFrom(model)
    made.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in tensors)
    return made


def inputs_of(model: ModelProto) -> tuple[Value, ...]:
    """What may be fed to a check: the inputs, and the initializers."""
    inputs = graph_inputs(model.graph)
    listed = {value.name for value in inputs}
    return inputs + tuple(
        Value(t.name, helper.tensor_dtype_to_np_dtype(t.data_type), tuple(t.dims), has_default=True)
        for t in model.graph.initializer
        if t.name not in listed
    )


def _with_values(model: ModelProto, feeds: Mapping[str, Any]) -> tuple[ModelProto, dict[str, Any]]:
    """The model with the feeds of its initializers in their place, and the feeds that are left."""
    inputs = {value.name for value in model.graph.input}
    moved = {name: value for name, value in feeds.items() if name not in inputs}
    if not moved:
        return model, dict(feeds)
    made = ModelProto()
    made.CopyFrom(model)
    for tensor in made.graph.initializer:
        if tensor.name in moved:
            tensor.CopyFrom(numpy_helper.from_array(moved[tensor.name], tensor.name))
    return made, {name: value for name, value in feeds.items() if name in inputs}


def _by_name(results: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, np.ndarray]:
    return {name: np.asarray(results[gradient]) for name, gradient in names.items()}


def _epsilon(model: ModelProto) -> float:
    """The coarsest rounding among the float types of the model's values."""
    types = {kind for kind in Graph(model).types.values() if kind in FLOATS}
    return max((_limits(helper.tensor_dtype_to_np_dtype(kind))[0] for kind in types), default=1.2e-7)


def _limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    """The rounding of a float type, and its smallest normal number. NumPy does not know bfloat16."""
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(limits.eps), float(limits.tiny)


def _rounding(gradient: ModelProto, point: _Point) -> float:
    """The relative error that the roundings of the gradient's n nodes explain: they add up like √n."""
    return float(_ROUNDINGS * _epsilon(point.model) * np.sqrt(max(len(gradient.graph.node), 1)))


def _largest(array: np.ndarray) -> float:
    return float(np.max(np.abs(array), initial=0.0))


# Against differences


@dataclass(frozen=True)
class _Estimate:
    """A difference along a direction, or why there is none. `size` is the norm of what it should be measured against."""

    direction: np.ndarray
    difference: Difference | None
    size: float
    step: float = 0.0
    why: str = ""


def _differences(
    point: _Point, truth: Mapping[str, np.ndarray], rng: np.random.Generator, directions: int
) -> dict[str, list[_Estimate]]:
    """Differences along random directions, moving one input at a time, each element relative to the input's size."""
    estimates: dict[str, list[_Estimate]] = {}
    for name in point.names:
        at = point.wide[name]
        estimates[name] = [
            _estimate(point, name, rng.standard_normal(at.shape) * (_rms(at) or 1.0), truth[name])
            for _ in range(directions)
        ]
    return estimates


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(array**2))) if array.size else 0.0


def _estimate(point: _Point, name: str, direction: np.ndarray, gradient: np.ndarray) -> _Estimate:
    """The difference by the first step that settles it, or that with the smallest error.

    Where none does, because kinks are crossed, the nearest of the other estimates says how far off it may be.
    """
    size = float(np.linalg.norm(gradient)) * _rms(direction) if gradient.shape == direction.shape else 0.0
    found: list[tuple[Difference, float]] = []
    for step in _STEPS:
        try:
            difference = directional(point.evaluate, point.wide, {name: direction}, point.cotangent_of, step)
        except (_ShapeMovedError, BackendError) as error:
            if not found:
                return _Estimate(direction, None, size, why=str(error))
            break
        if np.isfinite(difference.value):
            found.append((difference, step))
            if difference.error <= _SETTLED * max(size, abs(difference.value)):
                return _Estimate(direction, difference, size, step)
    if not found:
        return _Estimate(direction, None, size, why="the model is not finite near this point")
    best, step = min(found, key=lambda pair: pair[0].error)
    spread = min((abs(other.value - best.value) for other, _ in found if other is not best), default=0.0)
    return _Estimate(direction, Difference(best.value, max(best.error, spread)), size, step)


def _against_differences(
    truth: _Truth,
    name: str,
    dialect: str,
    backend: str,
    got: np.ndarray,
    estimates: Sequence[_Estimate],
    tolerance: float,
) -> Row:
    """The worst of the directions."""

    def row(verdict: str, note: str = "", numbers: tuple[float | None, float | None, float | None] = _NONE) -> Row:
        return Row(name, dialect, backend, DIFFERENCES, verdict, *numbers, note)

    point = truth.point
    expected = point.wide[name].shape
    if got.shape != expected:
        return row(DISAGREED, f"shape {got.shape}, {name!r} has {expected}")
    if not np.all(np.isfinite(got)):
        return row(DISAGREED, f"{np.count_nonzero(~np.isfinite(got))} elements are not finite")
    worst = row(AGREED, "both are zero", (0.0, 0.0, tolerance))
    for estimate in estimates:
        if estimate.difference is None:
            worst = _worse(worst, row(INCONCLUSIVE, estimate.why))
            continue
        value, method = estimate.difference.value, estimate.difference.error
        derivative = float(np.sum(got * estimate.direction))
        error, size = abs(derivative - value), max(estimate.size, abs(value))
        if not np.any(got) and abs(value) <= method:
            continue
        slack = tolerance * size + method
        if error > slack:
            moved = np.linalg.norm(truth.moved(name, _FLOAT64_BITS)) * _rms(estimate.direction)
            slack += _SENSITIVE * float(moved)
        numbers = (error, error / size, slack / size) if size else (0.0, 0.0, tolerance)
        if error > slack:
            verdict, note = _at_a_kink(point, name, estimate, derivative, tolerance * size)
        elif slack > size and abs(value) <= method:
            verdict, note = AGREED, "both are zero up to rounding"
        elif slack > _TELLING * size:
            verdict, note = INCONCLUSIVE, "rounding or a kink hides more than 1% of it"
        else:
            verdict, note = AGREED, ""
        worst = _worse(worst, row(verdict, note, numbers))
    return worst


def _worse(one: Row, other: Row) -> Row:
    """The row with the graver verdict; of the same, the one with the larger part of the allowed error."""
    order = (AGREED, INCONCLUSIVE, KINK, DISAGREED)

    def gravity(row: Row) -> tuple[int, float]:
        return order.index(row.verdict), (row.relative or 0.0) / (row.allowed or 1.0)

    return other if gravity(other) >= gravity(one) else one


def _at_a_kink(point: _Point, name: str, estimate: _Estimate, derivative: float, slack: float) -> tuple[str, str]:
    """Whether an error is a kink's: the one-sided derivatives differ there and bracket the answer."""
    try:
        left, right = one_sided(
            point.evaluate, point.wide, {name: estimate.direction}, point.cotangent_of, estimate.step
        )
    except (_ShapeMovedError, BackendError) as error:
        return INCONCLUSIVE, str(error)
    low, high = sorted((left.value, right.value))
    slack += left.error + right.error
    if high - low > 2 * slack and low - slack <= derivative <= high + slack:
        return KINK, f"the derivative is {left.value:.4g} from the left, {right.value:.4g} from the right"
    return DISAGREED, f"{derivative:.6g} along a direction, differences give {_value(estimate)}"


def _value(estimate: _Estimate) -> str:
    assert estimate.difference is not None
    return f"{estimate.difference.value:.6g} ± {estimate.difference.error:.1g}"


# On a backend


def _on_backend(truth: _Truth, gradient: ModelProto, dialect: str, backend: str, tolerance: float) -> list[Row]:
    point = truth.point
    try:
        results = get_backend(backend).prepare(gradient).run(point.feeds | point.cotangents)
    except BackendError as error:
        return _without_result(point, dialect, backend, FLOAT64, error)
    got = _by_name(results, point.names)
    return [_against_float64(truth, name, dialect, backend, got[name], tolerance) for name in point.names]


def _without_result(point: _Point, dialect: str, backend: str, oracle: str, error: BackendError) -> list[Row]:
    """A backend without the kernels, or of another opset, is not at fault; one that fails to run what it accepted is."""
    verdict = UNSUPPORTED if _NO_KERNEL.search(str(error)) else FAILED
    return [Row(name, dialect, backend, oracle, verdict, note=str(error)) for name in point.names]


def _against_float64(truth: _Truth, name: str, dialect: str, backend: str, got: np.ndarray, tolerance: float) -> Row:
    """Element by element, relative to the largest element of the float64 gradient."""

    def row(verdict: str, note: str = "", numbers: tuple[float | None, float | None, float | None] = _NONE) -> Row:
        return Row(name, dialect, backend, FLOAT64, verdict, *numbers, note)

    point, expected = truth.point, truth.gradients[name]
    if got.shape != expected.shape:
        return row(DISAGREED, f"shape {got.shape}, the float64 gradient has {expected.shape}")
    kind = point.feeds[name].dtype if name in point.feeds else _declared(point.model, name)
    if got.dtype != kind:
        return row(DISAGREED, f"dtype {got.dtype}, {name!r} has {kind}")
    if not np.all(np.isfinite(expected)):
        return row(INCONCLUSIVE, "the float64 gradient is not finite")
    error, size = _largest(got.astype(np.float64) - expected), _largest(expected)
    # Below the smallest normal number of the type nothing is computed accurately.
    underflow = _limits(kind)[1] * max(got.size, 1) ** 0.5
    if error <= max(tolerance * size, underflow):
        return row(AGREED, "" if size else "both are zero", (error, error / size if size else 0.0, tolerance))
    explained = tolerance * size + _SENSITIVE * _largest(truth.moved(name, truth.bits))
    verdict, note = AGREED, ""
    if explained < error:
        explained += _largest(truth.moved(name, truth.bits - _COARSER))
        note = "a kink is near: rounding moves single elements far"
    elif explained > _TELLING * size:
        note = "rounding hides more than 1% of it"
    if not error <= explained:
        verdict, note = DISAGREED, ""
    elif size <= _SENSITIVE * _largest(truth.moved(name, _FLOAT64_BITS)):
        note = "both are zero up to rounding"
    elif note and np.linalg.norm(got.astype(np.float64) - expected) > _TELLING * np.linalg.norm(expected):
        verdict = INCONCLUSIVE
    return row(verdict, note, (error, error / size if size else float("inf"), explained / size if size else 0.0))


def _declared(model: ModelProto, name: str) -> np.dtype[Any]:
    tensor = next(t for t in model.graph.initializer if t.name == name)
    return helper.tensor_dtype_to_np_dtype(tensor.data_type)


# ONNX Runtime's own builder


def _of_builder(
    truth: _Truth,
    estimates: Mapping[str, Sequence[_Estimate]],
    settled: Mapping[str, str],
    tolerance: float,
    seconds: float,
) -> list[Row]:
    """The gradient that ONNX Runtime builds itself, output by output. Where it is wrong, that is no fault of refgrad."""
    point = truth.point
    total: dict[str, np.ndarray] = {}
    try:
        for output, seed in point.seeds_of.items():
            needed = builders.depends_on(point.model, output)
            names = [name for name in point.names if name in needed]
            if not names:
                continue
            made = builders.build(point.model, names, output, seconds)
            prepared = get_backend("ort-cpu").prepare(made)
            known = {value.name for value in prepared.inputs}
            feeds = point.feeds | {f"{output}_grad": point.cotangents[seed]}
            results = prepared.run(
                {name: value for name, value in feeds.items() if name in known}, [f"{name}_grad" for name in names]
            )
            for name in names:
                part = results[f"{name}_grad"]
                total[name] = total[name] + part if name in total else part
    except builders.BuilderError as error:
        return [_builder_row(name, error.verdict, str(error)) for name in point.names]
    except RefgradError as error:
        return [_builder_row(name, "refused", f"its graph does not run: {error}") for name in point.names]
    rows = []
    for name in point.names:
        if name not in total:
            rows.append(_builder_row(name, UNSUPPORTED, "no output depends on it"))
            continue
        row = _against_float64(truth, name, "onnxruntime", "ort-cpu", total[name], tolerance)
        if row.verdict == DISAGREED:
            wide = total[name].astype(np.float64)
            measured = _against_differences(
                truth, name, row.dialect, row.backend, wide, estimates[name], row.allowed or tolerance
            )
            if settled.get(name) == AGREED:
                note = "; ".join(filter(None, (row.note, measured.note))) or "refgrad agrees with differences"
                row = replace(row, verdict=WRONG_BUILDER, note=note)
            else:
                row = replace(row, verdict=INCONCLUSIVE, note="differences do not settle who is right")
        rows.append(row)
    return rows


def _builder_row(name: str, verdict: str, note: str) -> Row:
    return Row(name, "onnxruntime", "ort-cpu", FLOAT64, verdict, note=note)
