"""What rounding and the range of a type do to a gradient.

Monte Carlo arithmetic (Parker 1997): in float64, each result loses by chance what a narrower type would lose, and the spread of
several runs tells how far each element may be off. A sum loses as much as the size of its terms allows, however small it is
itself (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 4.2).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import onnx

from refgrad.backends.numpy import NumpyBackend
from refgrad.backends.numpy.precision import Declared, Float64
from refgrad.backends.numpy.registry import Call, in_tuple
from refgrad.errors import BackendError
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.randomness import operator_of

# The operators that add up their inputs, or products of them. They are linear in each: with |inputs| they add up |terms|.
ADDING_UP = frozenset(
    {
        *(
            ("", name)
            for name in ("AveragePool", "Conv", "ConvTranspose", "CumSum", "Einsum", "Gemm", "GlobalAveragePool")
        ),
        *(("", name) for name in ("MatMul", "Mean", "NegativeLogLikelihoodLoss", "ReduceMean", "ReduceSum", "Sum")),
        *((MICROSOFT, name) for name in ("ConvGrad", "FusedMatMul")),
    }
)

DRAWS = 8  # how often a gradient is rounded by chance
FEW_DRAWS = 2  # how often at first: a large model takes its time

Limits = tuple[float, float, float]  # the rounding of a type, its smallest normal number and its largest


class Perturbed(Float64):
    """Float64, each result rounded up or down to `bits` significant bits by chance: the nearer number is the likelier.

    What the narrower type can hold does not move, and within one draw equal values are rounded alike, so that ties stay ties.
    `draw` is the number of the draw; it may be changed between two runs.

    :param alike: the values that are rounded so; by default all. Each node that makes another one rounds by chances of its
        own: terms that cancel each other exactly, being equal, do not where each is rounded for itself.
    """

    tensor = Declared.tensor

    def __init__(self, bits: int, alike: Set[str] | None = None) -> None:
        self.bits, self.draw, self._alike, self._salt = bits, 0, alike, 0

    def call(self, call: Call, node: onnx.NodeProto) -> Call:
        """Round what `call` returns."""
        adds_up = operator_of(node) in ADDING_UP
        own = self._alike is not None and self._alike.isdisjoint(node.output)
        salt = zlib.crc32(node.output[0].encode()) if own else 0

        def perturbed(*inputs: Any, **options: Any) -> tuple[Any, ...]:
            self._salt = salt
            results = in_tuple(call(*inputs, **options))
            if adds_up and not all(map(_is_whole, inputs)):
                terms = in_tuple(call(*(abs(x) if _is_wide(x) else x for x in inputs), **options))
                results = tuple(
                    y + self._lost(y, np.abs(t)) if _is_wide(y) else y for y, t in zip(results, terms, strict=True)
                )
            return tuple(map(self._round, results))

        return perturbed

    def _lost(self, result: np.ndarray, terms: np.ndarray) -> np.ndarray:
        """What a sum loses on the way: up to one rounding of all its terms together."""
        lost: np.ndarray = terms * (2.0**-self.bits * (2 * self._chance(result, 1) - 1))
        return lost

    def _round(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._round(item) for item in value]
        if not _is_wide(value):
            return value
        exponent = np.frexp(value)[1]
        scaled = np.ldexp(np.abs(value), self.bits - exponent)
        below = np.floor(scaled)
        rounded = np.ldexp(below + (self._chance(value, 0) < scaled - below), exponent - self.bits)
        return np.where(np.isfinite(value), np.copysign(rounded, value), value)

    def _chance(self, value: np.ndarray, purpose: int) -> np.ndarray:
        """A number from 0 to 1 for each magnitude, by the mixing of SplitMix64 (Steele, Lea and Flood 2014)."""
        step = 2 * (self.draw + (self._salt << 8)) + purpose + 1
        mixed = np.abs(value).view(np.uint64) + np.uint64(step * 0x9E3779B97F4A7C15 % 2**64)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        chance: np.ndarray = (mixed ^ (mixed >> np.uint64(31))) * 2.0**-64
        return chance


class Drawn:
    """How far a gradient is off in several draws of its rounding."""

    def __init__(
        self,
        model: onnx.ModelProto,
        feeds: Mapping[str, Any],
        names: Mapping[str, str],
        gradients: Mapping[str, np.ndarray],
        bits: int,
        alike: Set[str] | None = None,
    ) -> None:
        self.count = 0
        self._feeds, self._names, self._gradients = feeds, names, gradients
        self._precision = Perturbed(bits, alike)
        self._squares = {name: np.zeros(value.shape) for name, value in gradients.items()}
        try:
            self._prepared = NumpyBackend().prepare(model, precision=self._precision)
        except BackendError:
            self._fail()

    def draw(self) -> None:
        """Run the gradient with another rounding."""
        self._precision.draw = self.count
        self.count += 1
        try:
            results = self._prepared.run(self._feeds)
            with np.errstate(invalid="ignore", over="ignore"):
                for name, total in self._squares.items():
                    total += (results[self._names[name]] - self._gradients[name]) ** 2
        except (BackendError, ValueError):  # rounding leads to no result, or to one of another shape
            self._fail()

    def _fail(self) -> None:
        self._squares = {name: np.full(value.shape, np.inf) for name, value in self._gradients.items()}
        self.count = DRAWS

    def spread(self, name: str) -> np.ndarray:
        """The root of the mean square of each element's error; infinite where that is NaN."""
        spread = np.sqrt(self._squares[name] / max(self.count, 1))
        return np.where(np.isnan(spread), np.inf, spread)


class Confined(Float64):
    """Float64, each result within the range of the type that the model declares for it.

    What is too large becomes infinite. What is too small becomes 0, or with `gradual` a multiple of the smallest number.
    """

    tensor = Declared.tensor

    def __init__(self, limits: Mapping[str, Limits], gradual: bool) -> None:
        self._limits, self._gradual = limits, gradual

    def call(self, call: Call, node: onnx.NodeProto) -> Call:
        """Confine what `call` returns."""
        limits = [self._limits.get(name) for name in node.output]

        def confined(*inputs: Any, **options: Any) -> tuple[Any, ...]:
            results = in_tuple(call(*inputs, **options))
            known = [*limits, *[None] * (len(results) - len(limits))]
            return tuple(self._confine(y, one) if one else y for y, one in zip(results, known, strict=False))

        return confined

    def _confine(self, value: Any, limits: Limits) -> Any:
        if not _is_wide(value):
            return value
        epsilon, tiny, most = limits
        smallest = tiny * epsilon
        small = np.round(value / smallest) * smallest if self._gradual else np.zeros_like(value)
        made = np.where(np.abs(value) < tiny, small, value)
        return np.where(np.abs(made) > most * (1 + epsilon / 2), np.copysign(np.inf, made), made)


def _is_wide(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) and value.dtype == np.float64


def _is_whole(value: Any) -> bool:
    """Whether a tensor holds whole numbers: sums of them are exact in every type that can hold them."""
    return not _is_wide(value) or bool(np.all(np.round(value) == value))
