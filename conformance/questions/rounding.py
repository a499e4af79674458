"""The effects of rounding and of the range of a type on a gradient.

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
MANY_DRAWS = 32  # how often where a kink may be near

_PIECE = 1 << 13  # numbers that are worked on at once: they stay in the cache
_MAGNITUDE = np.uint64(2**63 - 1)  # every bit except the sign

Limits = tuple[float, float, float]  # the rounding of a type, its smallest normal number and its largest


class Perturbed(Float64):
    """Float64, each result rounded up or down to `bits` significant bits by chance: the nearer number is the likelier.

    A number that fits the narrower type does not move, and within one draw equal values are rounded equally: ties stay ties.
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
        """The loss of a sum on the way: up to one rounding of all its terms together."""
        chances = np.array(result, order="C", ndmin=1).view(np.uint64).reshape(-1)
        lost = np.empty(result.shape)
        numbers = lost.reshape(-1)
        for start in range(0, numbers.size, _PIECE):
            piece = slice(start, start + _PIECE)
            self._mix(chances[piece], 1)
            np.multiply(chances[piece], 2.0 ** (1 - 64 - self.bits), out=numbers[piece])
        lost -= 2.0**-self.bits
        lost *= terms
        return lost

    def _round(self, value: Any) -> Any:
        """The value rounded by chance: a number below the last bit that stays is added, and the bits below it are cut off."""
        if isinstance(value, list):
            return [self._round(item) for item in value]
        if not _is_wide(value):
            return value
        rounded = np.array(value, order="C", ndmin=1)
        numbers = rounded.reshape(-1)
        below = np.uint64(2 ** (53 - self.bits) - 1)
        for start in range(0, numbers.size, _PIECE):
            piece = numbers[start : start + _PIECE]
            held, chances = piece.view(np.uint64), piece.view(np.uint64).copy()
            self._mix(chances, 0)
            chances &= below
            odd = piece[~np.isfinite(piece)]
            held += chances
            held &= ~below
            if odd.size:
                piece[~np.isfinite(value.reshape(-1)[start : start + _PIECE])] = odd
        return rounded.reshape(np.shape(value))

    def _mix(self, bits: np.ndarray, purpose: int) -> None:
        """Turn the bits of numbers into random bits, the same for each magnitude: SplitMix64 (Steele, Lea and Flood 2014)."""
        step = 2 * (self.draw + (self._salt << 8)) + purpose + 1
        bits &= _MAGNITUDE
        bits += np.uint64(step * 0x9E3779B97F4A7C15 % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits ^= bits >> np.uint64(shift)
            bits *= np.uint64(factor)
        bits ^= bits >> np.uint64(31)


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
        self._model, self._precision = model, Perturbed(bits, alike)
        self._off = {name: np.zeros(value.shape, np.float32) for name, value in gradients.items()}

    def until(self, count: int) -> None:
        """Run the gradient with other roundings until there are so many draws."""
        if self.count >= count:
            return
        try:
            prepared = NumpyBackend().prepare(self._model, precision=self._precision)
            while self.count < count:
                self._precision.draw = self.count
                results = prepared.run(self._feeds)
                self.count += 1
                with np.errstate(invalid="ignore", over="ignore"):
                    for name, off in self._off.items():
                        squares = (results[self._names[name]].astype(np.float64) - self._gradients[name]) ** 2
                        squares += np.square(off, dtype=np.float64) * (self.count - 1)
                        self._off[name] = np.sqrt(squares / self.count).astype(np.float32)
        except (BackendError, ValueError):  # rounding leads to no result, or to one of another shape
            self._off = {name: np.full(value.shape, np.inf) for name, value in self._gradients.items()}
            self.count = MANY_DRAWS

    def spread(self, name: str) -> np.ndarray:
        """The root of the mean square of each element's error; infinite where that is NaN."""
        spread = self._off[name].astype(np.float64)
        return np.where(np.isnan(spread), np.inf, spread)


class Confined(Float64):
    """Float64, each result within the range of the type that the model declares for it.

    A result too large becomes infinite. One that is too small becomes 0, or with `gradual` a multiple of the smallest number.
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
    """True if a tensor holds whole numbers: sums of them are exact in every type that can hold them."""
    return not _is_wide(value) or bool(np.all(np.round(value) == value))
