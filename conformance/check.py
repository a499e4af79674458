"""Is a gradient right? Every dialect on every backend, against differences and against the gradient in float64.

Two questions are asked apart. Whether the mathematics is right: each dialect's gradient, run in float64 on the NumPy
interpreter, against central differences along random directions, which know nothing of any rule. Whether a backend computes
it: its gradient in the model's own types, element by element, against the float64 one. No error is judged by its size alone,
but against what explains it: the error estimate of the differences, the rounding of the type, and how far the float64
gradient itself moves when each intermediate result is rounded (which cancellation and kinks can make large).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad import ortbuilder
from refgrad.backends import available, get_backend
from refgrad.backends.base import ModelLike, check_feeds, load_model
from refgrad.backward import gradient as differentiate
from refgrad.conformance.differences import Difference, directional, one_sided
from refgrad.conformance.feeds import SIZE
from refgrad.conformance.point import (
    Point,
    ShapeMovedError,
    Truth,
    by_name,
    inputs_of,
    largest,
    limits,
    rms,
    rounding,
    with_values,
)
from refgrad.conformance.weights import randomize
from refgrad.errors import BackendError, BuilderError, OptionError, RefgradError, choices
from refgrad.kinks import KINKS
from refgrad.registry import DIALECTS
from refgrad.worker import SECONDS

AGREED, DISAGREED, FAILED = "agreed", "disagreed", "failed"
KINK, INCONCLUSIVE, UNSUPPORTED = "kink", "inconclusive", "not supported"
WRONG_BUILDER = "onnxruntime is wrong"
DIFFERENCES, FLOAT64 = "differences", "float64"

_FAULTS = (DISAGREED, FAILED)
_STEPS = (1e-3, 1e-5, 1e-7)  # tried in this order until the differences are settled
_SETTLED = 1e-6  # the error of a difference, relative to the gradient, that needs no smaller step
_TELLING = 1e-2  # a larger error tells nothing
_EXACT = 1e-6  # what float64 explains of a gradient against settled differences
_SENSITIVE = 10  # how many times the change under rounded intermediate results is explained
_FLOAT64_BITS = 50  # of 53: a rounding that can be told from the float64 gradient
_COARSER = 4  # bits less, when rounding alone does not explain an error: is there a kink near?
_NONE = (None, None, None)
_NO_KERNEL = re.compile(
    "no kernel|not a registered|NOT_IMPLEMENTED|NotImplemented|no schema|opset|IR version|_inlfunc_|data type is not supported",
    re.I,
)


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
    seconds: float = SECONDS,
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
    if not names:
        raise OptionError(f"backends is empty; there are {choices(available())}.")
    for name in names:
        get_backend(name)
    proto = load_model(model)
    if random_weights is not None:
        proto = randomize(proto, random_weights)[0]
    if feeds is not None:
        feeds = check_feeds(feeds, inputs_of(proto))
        proto, feeds = with_values(proto, feeds)
    gradients = {dialect: differentiate(proto, wrt, outputs, dialect=dialect) for dialect in dialects}
    point = Point.choose(proto, next(iter(gradients.values())), feeds, seed, size, sizes)
    rows: list[Row] = []
    truths: dict[str, dict[str, np.ndarray]] = {}
    for dialect, made in gradients.items():
        try:
            prepared = get_backend("numpy").prepare(made, precision="float64")
            truths[dialect] = by_name(prepared.run(point.wide | point.seeds), point.names)
        except BackendError as error:
            rows += _without_result(point, dialect, "numpy float64", DIFFERENCES, error)
    if not truths:
        return Check(tuple(point.names), tuple(point.seeds_of), seed, point.described, tuple(rows))
    first = next(iter(truths))
    truth = Truth(point, gradients[first], truths[first])
    estimates = _differences(point, truth.gradients, np.random.default_rng([seed, 1]), directions)
    for dialect, got in truths.items():
        judged = [
            _against_differences(truth, name, dialect, "numpy float64", got[name], estimates[name], tolerance or _EXACT)
            for name in point.names
        ]
        rows += _told_by_the_neighbour(judged, point, gradients[dialect], got, seed, tolerance or _EXACT)
    wrong = {row.dialect for row in rows if row.verdict == DISAGREED}
    sound = next((dialect for dialect in truths if dialect not in wrong), first)
    if sound != first:
        truth = Truth(point, gradients[sound], truths[sound])
    for dialect, made in gradients.items():
        allowed = tolerance or rounding(len(made.graph.node), point)
        for name in names:
            rows += _on_backend(truth, made, dialect, name, allowed)
    if "ort-cpu" in names and ortbuilder.available():
        settled = {row.gradient: row.verdict for row in rows if row.oracle == DIFFERENCES and row.dialect == sound}
        allowed = tolerance or rounding(len(gradients[sound].graph.node), point)
        rows += _of_builder(truth, estimates, settled, allowed, seconds)
    return Check(tuple(point.names), tuple(point.seeds_of), seed, point.described, tuple(rows))


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
    point: Point, truth: Mapping[str, np.ndarray], rng: np.random.Generator, directions: int
) -> dict[str, list[_Estimate]]:
    """Differences along random directions, moving one input at a time, each element relative to the input's size."""
    estimates: dict[str, list[_Estimate]] = {}
    for name in point.names:
        at = point.wide[name]
        estimates[name] = [
            _estimate(point, name, rng.standard_normal(at.shape) * (rms(at) or 1.0), truth[name])
            for _ in range(directions)
        ]
    return estimates


def _estimate(point: Point, name: str, direction: np.ndarray, gradient: np.ndarray) -> _Estimate:
    """The difference by the first step that settles it, or that with the smallest error.

    Where none does, because kinks are crossed, the nearest of the other estimates says how far off it may be.
    """
    size = float(np.linalg.norm(gradient)) * rms(direction) if gradient.shape == direction.shape else 0.0
    found: list[tuple[Difference, float]] = []
    for step in _STEPS:
        try:
            difference = directional(point.evaluate, point.wide, {name: direction}, point.cotangent_of, step)
        except (ShapeMovedError, BackendError) as error:
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
    return _Estimate(direction, replace(best, error=max(best.error, spread)), size, step)


def _against_differences(
    truth: Truth,
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
        if all(estimate.difference is None for estimate in estimates):
            return row(INCONCLUSIVE, f"neither the gradient nor a difference is finite: {estimates[0].why}")
        return row(DISAGREED, f"{np.count_nonzero(~np.isfinite(got))} elements are not finite")
    worst = row(AGREED, "both are zero", (0.0, 0.0, tolerance))
    for estimate in estimates:
        if estimate.difference is None:
            worst = _worse(worst, row(INCONCLUSIVE, estimate.why))
            continue
        value, method = estimate.difference.value, estimate.difference.error
        if abs(value) <= method and method > _SETTLED * estimate.difference.scale:
            worst = _worse(worst, row(INCONCLUSIVE, "the differences are no more than their error"))
            continue
        derivative = float(np.sum(got * estimate.direction))
        error, size = abs(derivative - value), max(estimate.size, abs(value))
        if not np.any(got) and abs(value) <= method:
            continue
        slack = tolerance * size + method
        if error > slack:
            moved = np.linalg.norm(truth.moved(name, _FLOAT64_BITS)) * rms(estimate.direction)
            slack += _SENSITIVE * float(moved)
        numbers = (error, error / size, slack / size) if size else (0.0, 0.0, tolerance)
        if not error <= slack < np.inf:
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


def _at_a_kink(point: Point, name: str, estimate: _Estimate, derivative: float, slack: float) -> tuple[str, str]:
    """Whether an error is a kink's: the one-sided derivatives differ there and bracket the answer."""
    try:
        left, right = one_sided(
            point.evaluate, point.wide, {name: estimate.direction}, point.cotangent_of, estimate.step
        )
    except (ShapeMovedError, BackendError) as error:
        return INCONCLUSIVE, str(error)
    low, high = sorted((left.value, right.value))
    slack += left.error + right.error
    if high - low > 2 * slack and low - slack <= derivative <= high + slack:
        return KINK, f"the derivative is {left.value:.4g} from the left, {right.value:.4g} from the right"
    return DISAGREED, f"{derivative:.6g} along a direction, differences give {_value(estimate)}"


def _told_by_the_neighbour(
    rows: Sequence[Row], point: Point, gradient: ModelProto, got: Mapping[str, np.ndarray], seed: int, tolerance: float
) -> list[Row]:
    """The rows; a kink where a finite gradient disagrees here, and agrees at a point right beside this one.

    A sum of kinks need not lie between its one-sided derivatives, and Relu(x) − Relu(−x) has none at 0, where each convention
    of its parts is kept.
    """
    kinks = {kink.operator for kink in KINKS} & {node.op_type for node in point.model.graph.node}
    doubtful = [row.gradient for row in rows if row.verdict == DISAGREED and np.all(np.isfinite(got[row.gradient]))]
    if not kinks or not doubtful:
        return list(rows)
    rng = np.random.default_rng([seed, 2])
    beside = point.beside(rng)
    try:
        prepared = get_backend("numpy").prepare(gradient, precision="float64")
        there = by_name(prepared.run(beside.wide | beside.seeds), point.names)
    except BackendError:
        return list(rows)
    truth = Truth(beside, gradient, there)
    estimates = _differences(beside, there, rng, 1)
    told = []
    for row in rows:
        name = row.gradient
        if name in doubtful:
            again = _against_differences(truth, name, row.dialect, row.backend, there[name], estimates[name], tolerance)
            if again.verdict == AGREED and not again.note:
                row = replace(row, verdict=KINK, note=f"it agrees right beside this point: {choices(sorted(kinks))}")
        told.append(row)
    return told


def _value(estimate: _Estimate) -> str:
    assert estimate.difference is not None
    return f"{estimate.difference.value:.6g} ± {estimate.difference.error:.1g}"


# On a backend


def _on_backend(truth: Truth, gradient: ModelProto, dialect: str, backend: str, tolerance: float) -> list[Row]:
    point = truth.point
    try:
        results = get_backend(backend).prepare(gradient).run(point.feeds | point.cotangents)
    except BackendError as error:
        return _without_result(point, dialect, backend, FLOAT64, _refusal(point, backend) or error)
    got = by_name(results, point.names)
    return [_against_float64(truth, name, dialect, backend, got[name], tolerance) for name in point.names]


class _RefusalError(BackendError):
    """A backend does not run the model itself."""


def _refusal(point: Point, backend: str) -> _RefusalError | None:
    """Why a backend does not run the model itself, so that its gradient is no question; None where it does."""
    try:
        get_backend(backend).prepare(point.model).run(point.feeds)
    except BackendError as error:
        return _RefusalError(f"nor does it run the model itself: {error}")
    return None


def _without_result(point: Point, dialect: str, backend: str, oracle: str, error: BackendError) -> list[Row]:
    """A backend without the kernels, of another opset, or for another model is not at fault; else one that fails is."""
    verdict = UNSUPPORTED if _NO_KERNEL.search(str(error)) or isinstance(error, _RefusalError) else FAILED
    return [Row(name, dialect, backend, oracle, verdict, note=str(error)) for name in point.names]


def _against_float64(truth: Truth, name: str, dialect: str, backend: str, got: np.ndarray, tolerance: float) -> Row:
    """Element by element, relative to the largest element of the float64 gradient."""

    def row(verdict: str, note: str = "", numbers: tuple[float | None, float | None, float | None] = _NONE) -> Row:
        return Row(name, dialect, backend, FLOAT64, verdict, *numbers, note)

    point, expected = truth.point, truth.gradients[name]
    if got.shape != expected.shape:
        return row(DISAGREED, f"shape {got.shape}, the float64 gradient has {expected.shape}")
    kind = point.dtype(name)
    if got.dtype != kind:
        return row(DISAGREED, f"dtype {got.dtype}, {name!r} has {kind}")
    if not np.all(np.isfinite(expected)):
        return row(INCONCLUSIVE, "the float64 gradient is not finite")
    error, size = largest(got.astype(np.float64) - expected), largest(expected)
    # Below the smallest normal number of the type nothing is computed accurately.
    underflow = limits(kind)[1] * max(got.size, 1) ** 0.5
    if error <= max(tolerance * size, underflow):
        return row(AGREED, "" if size else "both are zero", (error, error / size if size else 0.0, tolerance))
    explained = tolerance * size + _SENSITIVE * largest(truth.moved(name, truth.bits))
    verdict, note = AGREED, ""
    if explained < error:
        explained += largest(truth.moved(name, truth.bits - _COARSER))
        note = "a kink is near: rounding moves single elements far"
    elif explained > _TELLING * size:
        note = "rounding hides more than 1% of it"
    if not error <= explained:
        verdict, note = DISAGREED, ""
        if point.draws and backend != "numpy":
            verdict, note = INCONCLUSIVE, f"{', '.join(point.draws)}: the backend draws random numbers of its own"
        elif truth.out_of_range:
            verdict, note = INCONCLUSIVE, truth.out_of_range
    elif size <= _SENSITIVE * largest(truth.moved(name, _FLOAT64_BITS)):
        note = "both are zero up to rounding"
    elif note and np.linalg.norm(got.astype(np.float64) - expected) > _TELLING * np.linalg.norm(expected):
        verdict = INCONCLUSIVE
    return row(verdict, note, (error, error / size if size else float("inf"), explained / size if size else 0.0))


# ONNX Runtime's own builder


def _of_builder(
    truth: Truth,
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
            needed = ortbuilder.depends_on(point.model, output)
            names = [name for name in point.names if name in needed]
            if not names:
                continue
            made = ortbuilder.build_raw(point.model, names, output, seconds)
            prepared = get_backend("ort-cpu").prepare(made)
            known = {value.name for value in prepared.inputs}
            feeds = point.feeds | {f"{output}_grad": point.cotangents[seed]}
            results = prepared.run(
                {name: value for name, value in feeds.items() if name in known}, [f"{name}_grad" for name in names]
            )
            for name in names:
                part = results[f"{name}_grad"]
                total[name] = total[name] + part if name in total else part
    except BuilderError as error:
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
            if settled.get(name) == AGREED and measured.verdict == DISAGREED:
                note = "; ".join(filter(None, (row.note, measured.note))) or "refgrad agrees with differences"
                row = replace(row, verdict=WRONG_BUILDER, note=note)
            else:
                row = replace(row, verdict=INCONCLUSIVE, note="differences do not settle who is right")
        rows.append(row)
    return rows


def _builder_row(name: str, verdict: str, note: str) -> Row:
    return Row(name, "onnxruntime", "ort-cpu", FLOAT64, verdict, note=note)
