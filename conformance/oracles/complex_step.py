"""Complex step: f′(x)·u is the imaginary part of f(x + i·h·u)/h, up to O(h²). No difference cancels (Squire & Trapp 1998)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from refgrad.conformance.oracles.analytic import KNOWN, STEP, KinkError, NotAnalyticError, OtherForwardError, call
from refgrad.conformance.oracles.differences import DIRECTIONS, KINKED, STILL, direction_at
from refgrad.conformance.oracles.program import ROUNDED, SAME, ComplexProgram, distance_from_interpreter, truth_of
from refgrad.conformance.problems.observation import COMPLEX_STEP, Directional, NotApplicable, Observation, Oracle
from refgrad.conformance.problems.point import ShapeMovedError, without
from refgrad.conformance.problems.problem import Problem
from refgrad.errors import RefgradError

NAME = COMPLEX_STEP
REFUSALS = (KinkError, NotAnalyticError)  # the model has no complex step at this point
_ROUNDINGS = 16  # rounding errors per node, in units of the machine epsilon


class Tangent:
    """Derivatives of the outputs of a problem along a direction, J·u, by complex step.

    :raises BackendError: the interpreter does not run the model.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, self._at, self._outputs = problem, problem.at, truth_of(problem)
        self._programs: dict[bool, ComplexProgram] = {}  # in the model's opset, and upgraded to a newer one
        self._upgraded = False  # the program that worked last
        self._distance = 0.0  # the largest distance of a program's outputs from the interpreter's

    @property
    def rounding(self) -> float:
        """The relative rounding error of a directional derivative's terms."""
        size = sum(v.size for v in self._problem.cotangents.values())
        size += sum(self._at[name].size for name in self._problem.wrt)
        nodes = max((program.length for program in self._programs.values()), default=1)
        return float(np.finfo(np.float64).eps * (_ROUNDINGS * nodes + np.sqrt(size)) + _ROUNDINGS * self._distance)

    def along(self, direction: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The derivative of every output.

        :param direction: the directions u of the inputs that move, by name.
        :raises KinkError: the point is at a kink.
        :raises NotAnalyticError: no program has a complex step, because an operator has no complex forward or fails.
        :raises OtherForwardError: likewise, and a program computes another function than the interpreter.
        """
        errors: list[Exception] = []
        for upgraded in (self._upgraded, not self._upgraded):
            try:
                derivatives = self._along(direction, upgraded)
            except (RefgradError, ShapeMovedError, NotAnalyticError) as error:
                errors.append(error)
                continue
            self._upgraded = upgraded
            return derivatives
        is_other = any(isinstance(error, OtherForwardError) for error in errors)
        raise (OtherForwardError if is_other else NotAnalyticError)("; ".join(dict.fromkeys(map(str, errors))))

    def _along(self, direction: Mapping[str, np.ndarray], upgraded: bool) -> dict[str, np.ndarray]:
        if upgraded not in self._programs:
            self._programs[upgraded] = ComplexProgram(self._problem, KNOWN, call, upgraded)
        at = dict(self._at)
        for name, u in direction.items():
            shifted = np.empty(u.shape, np.complex128)
            shifted.real, shifted.imag = at[name], STEP * u
            at[name] = shifted
        results = self._programs[upgraded].run(at)
        real_parts = {name: np.real(y) for name, y in results.items()}
        distance, difference = distance_from_interpreter(self._problem, real_parts, self._outputs)
        if distance > ROUNDED:
            raise OtherForwardError(difference)
        self._distance = max(self._distance, distance if distance > SAME else 0.0)
        return {name: np.imag(y) / STEP for name, y in results.items()}


def _observe(problem: Problem) -> Sequence[Observation]:
    rng = np.random.default_rng([problem.seed, 3])
    observations: list[Observation] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx.reference makes NumPy warn
        try:
            tangent = Tangent(problem)
        except (RefgradError, ShapeMovedError) as error:
            return [NotApplicable(NAME, str(error))]
        at, cotangents = problem.at, problem.wide_cotangents
        for name in problem.wrt:
            for _ in range(DIRECTIONS if at[name].size else 1):
                kinked = problem.kinked.get(name)
                u = without(direction_at(at[name], rng), kinked)
                if u.size and not np.any(u):
                    observations.append(NotApplicable(NAME, STILL if kinked is None else KINKED, name))
                    break
                try:
                    derivatives = tangent.along({name: u})
                except (RefgradError, ShapeMovedError, *REFUSALS) as error:
                    observations.append(NotApplicable(NAME, str(error), name))
                    break
                terms = [np.where(v == 0, 0.0, v * derivatives[output]) for output, v in cotangents.items()]
                value = float(sum(np.sum(term) for term in terms))
                if not np.isfinite(value):
                    observations.append(NotApplicable(NAME, "the derivative is not finite", name))
                    break
                scale = float(sum(np.sum(np.abs(term)) for term in terms))
                observations.append(Directional(NAME, name, u, value, tangent.rounding * scale, scale))
    return observations


ORACLE = Oracle(
    NAME,
    "the imaginary part of a forward in complex numbers, without any difference; forwards of its own, or onnx.reference's for "
    "linear operators; exact up to rounding if every operator is analytic or decides by the real part",
    observe=_observe,
)
