"""Central differences of ONNX Runtime's own forward kernels, which share nothing with the interpreter and the rules.

The model itself is run, not a gradient of it: in double where ONNX Runtime has the operators in double, else in the model's own
types. Along a direction u, D(h) = (8·(φ(h) − φ(−h)) − (φ(2h) − φ(−2h)))/12h is the derivative of φ(t) = <v, f(x + t·u)> up to
an error of order h⁴ (Fornberg 1988). In float32 rounding asks for large steps, so rounding, curvature and kinks are told apart:

- the rounding of φ is measured, not assumed, by values that lie close together (after Moré and Wild 2011, "Estimating
  computational noise"): this includes what a kernel loses inside;
- the truncation is |D(h) − D(h/2)|;
- a kink near the point is seen as a jump between the derivatives of both sides, which central differences alone do not see;
- a kernel that computes in another way than the interpreter, with constants in float32 or an approximation of tanh, has
  another derivative, too;
- an estimate has to agree with the estimates of every smaller step: larger steps may cross a kink or stairs.

Where an input is rounded on the way, large steps see the slope of stairs; nothing is said of it. The interpreter only tells
whether ONNX Runtime computes the same function at the point, and which elements are at a kink. A kernel can end its process:
the runner calls oracles in another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from refgrad import traits
from refgrad.backends.onnxruntime import CpuBackend
from refgrad.conformance.case import is_float
from refgrad.conformance.oracles.central import FiniteDifference
from refgrad.conformance.oracles.differences import DIRECTIONS, KINKED, STILL, direction_at, tied
from refgrad.conformance.oracles.program import distance_from_interpreter, in_bodies, truth_of
from refgrad.conformance.oracles.widening import widen
from refgrad.conformance.problems.observation import Directional, NotApplicable, Observation, Oracle
from refgrad.conformance.problems.point import ShapeMovedError, coarsest, with_defaults, without
from refgrad.conformance.problems.problem import Problem
from refgrad.errors import BackendError, RefgradError
from refgrad.protos.traverse import nested, reads_of, versions_of
from refgrad.protos.types import FLOATS

NAME = "runtime-differences"

_STEPS = (2.0**-11, 2.0**-8, 2.0**-5, 2.0**-3)  # in a float of 32 bits or fewer
_STEPS_IN_DOUBLE = (2.0**-17, 2.0**-13, 2.0**-9, 2.0**-5)
_CLOSE = 2.0**-15  # how far the values are that tell the noise
_PLACES = (
    2 * np.modf(np.arange(12) * (np.sqrt(5) - 1) / 2)[0] - 1
)  # of these: on a regular grid, roundings may be equal
_PARABOLAS = np.linalg.qr(np.vander(_PLACES, 3))[0]  # an orthonormal basis of their values
_NOISY = 2.0**-20  # relative to the terms: more noise comes from a rounding to fewer digits than float32 has
_ROUNDINGS = 16  # how often the noise, or half a unit of each term, is explained
_TELLING = 1e-2  # with a larger error, relative to the derivative, the answer is not known
_DRAWN = 6  # directions of an input: along some the derivative is near 0
_ROUNDING = (traits.STEPS - {"Sign"}) | traits.INTEGER_PRODUCTS | (traits.QUANTIZERS - {"BitCast", "DequantizeLinear"})
_UNROUNDED = FLOATS | {TensorProto.BOOL}
_SHIFTED = 16  # how many times the distance of two forwards their derivatives may differ, relative to the terms
_NEAR = 2e-5  # two forwards of one function: by how much they may differ, relative to the largest element
_NEAR_IN_DOUBLE = 1e-6
_ALIKE = 1e-12  # the same where both work in double throughout


class _Forward:
    """The outputs of a problem on ONNX Runtime's CPU kernels.

    :param in_double: whether every float becomes a double.
    :raises BackendError: ONNX Runtime does not take the model.
    """

    def __init__(self, problem: Problem, in_double: bool) -> None:
        model = ModelProto()
        model.CopyFrom(with_defaults(problem.model, problem.wrt))
        if in_double:
            widen(model.graph, versions_of(model))
        self._shapes = {name: cotangent.shape for name, cotangent in problem.cotangents.items()}
        # The operators themselves, and not what they are fused to.
        self._prepared = CpuBackend().prepare(model, threads=1, optimization="disabled")
        self._types = {value.name: value.dtype for value in self._prepared.inputs}
        self.steps = _STEPS_IN_DOUBLE if in_double else _STEPS
        self.off_by = 0.0  # from the interpreter, relative to the largest element
        self.epsilon = float(np.finfo(np.float64).eps) if in_double else coarsest(model)

    def __call__(self, at: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The outputs in float64.

        :raises ShapeMovedError: one of them has another shape there.
        :raises BackendError: ONNX Runtime fails there.
        """
        feeds = {name: _cast(value, self._types[name]) for name, value in at.items() if name in self._types}
        results = {
            name: np.asarray(value).astype(np.float64)
            for name, value in self._prepared.run(feeds, tuple(self._shapes)).items()
        }
        for name, value in results.items():
            if value.shape != self._shapes[name]:
                raise ShapeMovedError(f"the shape of {name!r} changes along this direction")
        return results


def _cast(value: Any, kind: np.dtype[Any] | None) -> Any:
    """A feed in the type that the model declares; sequences element by element."""
    if isinstance(value, list):
        return [_cast(item, kind) for item in value]
    return value.astype(kind) if is_float(value) and kind is not None else value


def _forward(problem: Problem) -> _Forward:
    """The outputs in double where ONNX Runtime has them so, else in the types of the model.

    :raises BackendError: ONNX Runtime does not take the model, fails, or computes another function than the interpreter.
    """
    truth = truth_of(problem)
    with suppress(BackendError, ShapeMovedError):  # there are few kernels in double
        return _same(_Forward(problem, in_double=True), problem, truth, _NEAR_IN_DOUBLE)
    return _same(_Forward(problem, in_double=False), problem, truth, _NEAR)


def _same(forward: _Forward, problem: Problem, truth: Mapping[str, np.ndarray], most: float) -> _Forward:
    """`forward`, with its distance from the interpreter.

    :raises BackendError: it is more than `most`.
    """
    off_by, why = distance_from_interpreter(problem, forward(problem.at), truth)
    if off_by > most:
        raise BackendError(why)
    # Where something is in float32, a constant or a kernel inside, outputs may be nearer by chance.
    forward.off_by = off_by if off_by <= _ALIKE else max(off_by, float(np.finfo(np.float32).eps))
    return forward


class _Path:
    """φ(t) = Σ <cotangent, output> at point + t·direction, each value computed once."""

    def __init__(self, forward: _Forward, problem: Problem, name: str, direction: np.ndarray) -> None:
        self.forward, self._at, self._name, self._direction = forward, problem.at, name, direction
        self._cotangents = problem.wide_cotangents
        self._known: dict[float, float] = {}
        self.size = 0.0  # the largest sum of |terms| of a total

    def __call__(self, t: float) -> float:
        if t not in self._known:
            results = self.forward({**self._at, self._name: self._at[self._name] + t * self._direction})
            # A value that is not finite has no part in the sum where its cotangent is 0.
            terms = [v * np.where(v == 0, 0.0, results[name]) for name, v in self._cotangents.items()]
            self.size = max(self.size, sum(float(np.sum(np.abs(term))) for term in terms))
            self._known[t] = float(sum(np.sum(term) for term in terms))
        return self._known[t]

    def noise(self) -> float:
        """How far a value is off by rounding: the part of values close together that a parabola does not explain."""
        values = np.array([self(_CLOSE * t) for t in _PLACES])
        left = values - _PARABOLAS @ (_PARABOLAS.T @ values)
        return float(np.linalg.norm(left) / np.sqrt(len(_PLACES) - 3))

    def difference(self, step: float, noise: float) -> FiniteDifference:
        """The derivative by one step, and what may be wrong with it."""
        coarse, fine = ((8 * (self(h) - self(-h)) - (self(2 * h) - self(-2 * h))) / (12 * h) for h in (step, step / 2))
        near, far = ((self(h) - 2 * self(0.0) + self(-h)) / h for h in (step / 2, step))
        jump = 2 * near - far  # between the derivatives of both sides: what shrinks with the step is gone
        rounding = _ROUNDINGS * max(noise, self.forward.epsilon / 2 * self.size) / step
        shifted = _SHIFTED * self.forward.off_by * self.size
        return FiniteDifference(fine, abs(fine - coarse) + abs(jump) + rounding + shifted, self.size)


def _along(path: _Path) -> tuple[FiniteDifference, float] | str:
    """The estimate with the smallest error of those that agree with every smaller step, and its step; or why there is none."""
    found: list[tuple[FiniteDifference, float]] = []
    try:
        noise = path.noise()
    except (ShapeMovedError, BackendError) as error:
        return str(error)
    if noise > _NOISY * path.size:
        return f"its values jump by {noise / path.size:.1g} of their terms: it rounds inside, or draws random numbers"
    for step in path.forward.steps:
        try:
            one = path.difference(step, noise)
        except (ShapeMovedError, BackendError) as error:
            if not found:
                return str(error)
            break
        if not np.isfinite(one.value):
            break
        if all(abs(one.value - finer.value) <= one.error + finer.error for finer, _ in found):
            found.append((one, step))
    if not found:
        return "the model is not finite near this point"
    return min(found, key=lambda pair: pair[0].error)


def _along_random_directions(problem: Problem, forward: _Forward, name: str) -> Iterator[Observation]:
    """The observations about one input."""
    x, still = problem.at[name], problem.kinked.get(name)
    if not x.size:
        yield Directional(NAME, name, np.zeros(x.shape), 0.0, 0.0, 0.0)
        return
    rng = np.random.default_rng([problem.seed, 6])
    count = 0
    reason = ""
    for _ in range(_DRAWN):
        direction = without(direction_at(x, rng), still)
        if not np.any(direction):
            yield NotApplicable(NAME, STILL if still is None else KINKED, name)
            return
        estimate = _along(_Path(forward, problem, name, direction))
        if isinstance(estimate, str):  # where the shape depends on which elements are equal, they stay so
            direction = without(tied(x, direction), still)
            estimate = _along(_Path(forward, problem, name, direction))
        if isinstance(estimate, str):
            reason = estimate
            continue
        difference, step = estimate
        if difference.error > _TELLING * abs(difference.value):
            value = f"{difference.value:.3g} ± {difference.error:.1g}"
            reason = f"rounding, or a kink within its steps, hides the derivative: {value}"
            continue
        yield Directional(NAME, name, direction, difference.value, difference.error, difference.scale, step)
        count += 1
        if count == DIRECTIONS:
            return
    if not count:
        yield NotApplicable(NAME, reason, name)


def _rounded(model: ModelProto, names: Iterable[str]) -> dict[str, str]:
    """By the input: which operator rounds what comes from it, in the model with the bodies of its operators."""
    nodes = in_bodies(model).graph.node
    rounding: dict[str, str] = {}
    for name in names:
        moved = {name}
        for node in nodes:
            if moved.isdisjoint(reads_of(node)) or node.op_type in traits.SIZES:
                continue
            moved.update(node.output)
            if (rounds := next(filter(_is_rounding, nested([node])), None)) is not None:
                rounding.setdefault(name, rounds.op_type)
    return rounding


def _is_rounding(node: NodeProto) -> bool:
    if node.op_type != "Cast":
        return node.op_type in _ROUNDING
    return any(attribute.name == "to" and attribute.i not in _UNROUNDED for attribute in node.attribute)


@np.errstate(all="ignore")
def _observe(problem: Problem) -> Sequence[Observation]:
    try:
        rounded = _rounded(problem.model, problem.wrt)
        forward = _forward(problem)
    except (RefgradError, ShapeMovedError) as error:
        return [NotApplicable(NAME, str(error))]
    observations: list[Observation] = []
    for name in problem.wrt:
        if name in rounded:
            observations.append(
                NotApplicable(NAME, f"{rounded[name]} rounds: large steps see the slope of its stairs", name)
            )
        else:
            observations += _along_random_directions(problem, forward, name)
    return observations


ORACLE = Oracle(
    NAME,
    "central differences of ONNX Runtime's own forward kernels on the CPU, in double where it has them, else in the model's "
    "types; trusted up to the error that truncation and the measured rounding leave, where the outputs are the interpreter's",
    observe=_observe,
    missing=lambda: CpuBackend.unavailable() or "",
)
