"""The effects of rounding, and of the range of a type, on a gradient.

Monte Carlo arithmetic (Parker 1997): the gradient runs in float64 several times, and each run rounds each result randomly, as
coarsely as a narrower type. The spread of the runs is the error that rounding explains. The error of a sum is relative to its
terms, not to the sum, which may be much smaller (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 4.2).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Set
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from refgrad import traits
from refgrad.backends.numpy import NumpyBackend
from refgrad.backends.numpy.precision import Declared, Float64
from refgrad.backends.numpy.registry import Call, in_tuple
from refgrad.errors import BackendError
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.randomness import operator_of

# The operators that sum their inputs, or products of them. They are linear in each input, so with |inputs| they sum |terms|.
ADDING_UP = frozenset(
    {
        *(("", name) for name in traits.PRODUCTS - {"CausalConvWithState", "DeformConv"}),  # not linear in each input
        *(("", name) for name in ("AveragePool", "CumSum", "GlobalAveragePool", "Mean", "NegativeLogLikelihoodLoss")),
        *(("", name) for name in ("ReduceMean", "ReduceSum", "Sum")),
        *((MICROSOFT, name) for name in ("ConvGrad", "FusedMatMul")),
    }
)

DRAWS = 8  # runs of a gradient with random rounding
FEW_DRAWS = 2  # runs at first, since a large model takes long
MANY_DRAWS = 32  # runs if a kink may be near

_PIECE = 1 << 13  # numbers that are rounded at once: so many fit in the cache
_ROUNDING, _SUMMING = 0, 1  # independent streams of random bits
_MAGNITUDE = np.uint64(2**63 - 1)  # every bit except the sign

Limits = tuple[float, float, float]  # of a type: its epsilon, its smallest normal number, its largest number


def limits(dtype: np.dtype[Any]) -> tuple[float, float, float]:
    """The rounding of a float type, its smallest normal number and its largest; for integers, the limits of float64.

    NumPy does not know bfloat16.
    """
    info = ml_dtypes.finfo(np.float64 if np.dtype(dtype).kind in "biu" else dtype)  # type: ignore[no-untyped-call]
    return float(info.eps), float(info.tiny), float(info.max)


class Perturbed(Float64):
    """Float64, with each result randomly rounded up or down to `bits` significant bits. The nearer number is likelier.

    A number that fits in `bits` stays as it is. Within one draw, equal numbers are rounded equally, so that ties stay ties.

    :param rounded_equally: the values to which this applies, by default all. In another value, the rounding also depends on the
        node that computes it. So equal terms of different nodes do not cancel exactly.
    """

    tensor = Declared.tensor

    def __init__(self, bits: int, rounded_equally: Set[str] | None = None) -> None:
        self.bits = bits
        self.draw = 0  # the number of the draw; it may be changed between two runs
        self._rounded_equally = rounded_equally
        self._salt = 0  # of the node that runs: another salt gives other random bits

    def call(self, call: Call, node: onnx.NodeProto) -> Call:
        """Round what `call` returns."""
        adds_up = operator_of(node) in ADDING_UP
        depends_on_node = self._rounded_equally is not None and self._rounded_equally.isdisjoint(node.output)
        salt = zlib.crc32(node.output[0].encode()) if depends_on_node else 0

        def perturbed(*inputs: Any, **options: Any) -> tuple[Any, ...]:
            self._salt = salt
            results = in_tuple(call(*inputs, **options))
            if adds_up and not all(map(_is_whole, inputs)):
                terms = in_tuple(call(*(abs(x) if _is_wide(x) else x for x in inputs), **options))
                results = tuple(
                    y + self._error_of_sum(y, np.abs(t)) if _is_wide(y) else y
                    for y, t in zip(results, terms, strict=True)
                )
            return tuple(map(self._round, results))

        return perturbed

    def _error_of_sum(self, result: np.ndarray, terms: np.ndarray) -> np.ndarray:
        """A random error of a sum, up to one rounding of the sum of `terms`, its absolute terms."""
        random_bits = np.array(result, order="C", ndmin=1).view(np.uint64).reshape(-1)
        error = np.empty(result.shape)
        numbers = error.reshape(-1)
        for start in range(0, numbers.size, _PIECE):
            piece = slice(start, start + _PIECE)
            self._mix(random_bits[piece], _SUMMING)
            np.multiply(random_bits[piece], 2.0 ** (1 - 64 - self.bits), out=numbers[piece])
        error -= 2.0**-self.bits
        error *= terms
        return error

    def _round(self, value: Any) -> Any:
        """The value rounded randomly: add random bits below the last bit that remains, then cut all bits below it off."""
        if isinstance(value, list):
            return [self._round(item) for item in value]
        if not _is_wide(value):
            return value
        rounded = np.array(value, order="C", ndmin=1)
        numbers = rounded.reshape(-1)
        cut_bits = np.uint64(2 ** (53 - self.bits) - 1)
        for start in range(0, numbers.size, _PIECE):
            piece = numbers[start : start + _PIECE]
            bits, random_bits = piece.view(np.uint64), piece.view(np.uint64).copy()
            self._mix(random_bits, _ROUNDING)
            random_bits &= cut_bits
            not_finite = piece[~np.isfinite(piece)]
            bits += random_bits
            bits &= ~cut_bits
            if not_finite.size:  # they stay as they are
                piece[~np.isfinite(value.reshape(-1)[start : start + _PIECE])] = not_finite
        return rounded.reshape(np.shape(value))

    def _mix(self, bits: np.ndarray, stream: int) -> None:
        """Replace the bits of numbers by random bits, by SplitMix64 (Steele, Lea and Flood 2014).

        x and -x get the same random bits. They depend on the draw, the salt and `stream`.
        """
        step = 2 * (self.draw + (self._salt << 8)) + stream + 1
        bits &= _MAGNITUDE
        bits += np.uint64(step * 0x9E3779B97F4A7C15 % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits ^= bits >> np.uint64(shift)
            bits *= np.uint64(factor)
        bits ^= bits >> np.uint64(31)


class Drawn:
    """The errors of a gradient in several draws, each with other random rounding."""

    def __init__(
        self,
        model: onnx.ModelProto,
        feeds: Mapping[str, Any],
        names: Mapping[str, str],
        gradients: Mapping[str, np.ndarray],
        bits: int,
        rounded_equally: Set[str] | None = None,
    ) -> None:
        """Begin without draws.

        :param model: the gradient model.
        :param names: the outputs of `model`, by the names in `gradients`.
        :param gradients: the exact gradients.
        :param bits: and `rounded_equally`: as in `Perturbed`.
        """
        self.count = 0
        self._feeds, self._names, self._gradients = feeds, names, gradients
        self._model, self._precision = model, Perturbed(bits, rounded_equally)
        self._errors = {name: np.zeros(value.shape, np.float32) for name, value in gradients.items()}  # rms

    def until(self, count: int) -> None:
        """Run the gradient with random rounding until there are `count` draws."""
        if self.count >= count:
            return
        try:
            prepared = NumpyBackend().prepare(self._model, precision=self._precision)
            while self.count < count:
                self._precision.draw = self.count
                results = prepared.run(self._feeds)
                self.count += 1
                with np.errstate(invalid="ignore", over="ignore"):
                    for name, rms in self._errors.items():
                        squares = (results[self._names[name]].astype(np.float64) - self._gradients[name]) ** 2
                        squares += np.square(rms, dtype=np.float64) * (self.count - 1)
                        self._errors[name] = np.sqrt(squares / self.count).astype(np.float32)
        except (BackendError, ValueError):  # with rounding, the run fails or a gradient has another shape
            self._errors = {name: np.full(value.shape, np.inf) for name, value in self._gradients.items()}
            self.count = MANY_DRAWS

    def spread(self, name: str) -> np.ndarray:
        """The root mean square of each element's error. NaN counts as infinite."""
        rms = self._errors[name].astype(np.float64)
        return np.where(np.isnan(rms), np.inf, rms)


class Confined(Float64):
    """Float64, with each result in the range of the type that the model declares for it. A larger result becomes infinite."""

    tensor = Declared.tensor

    def __init__(self, limits: Mapping[str, Limits], gradual: bool) -> None:
        """Confine values.

        :param limits: by the names of values.
        :param gradual: a number below the smallest normal number becomes a multiple of the smallest subnormal, otherwise 0.
        """
        self._limits, self._gradual = limits, gradual

    def call(self, call: Call, node: onnx.NodeProto) -> Call:
        """Confine what `call` returns."""
        limits = [self._limits.get(name) for name in node.output]

        def confined(*inputs: Any, **options: Any) -> tuple[Any, ...]:
            results = in_tuple(call(*inputs, **options))
            of_results = [*limits, *[None] * (len(results) - len(limits))]
            return tuple(self._confine(y, each) if each else y for y, each in zip(results, of_results, strict=False))

        return confined

    def _confine(self, value: Any, limits: Limits) -> Any:
        if not _is_wide(value):
            return value
        epsilon, smallest_normal, largest = limits
        subnormal = smallest_normal * epsilon
        small = np.round(value / subnormal) * subnormal if self._gradual else np.zeros_like(value)
        confined = np.where(np.abs(value) < smallest_normal, small, value)
        return np.where(np.abs(confined) > largest * (1 + epsilon / 2), np.copysign(np.inf, confined), confined)


def _is_wide(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) and value.dtype == np.float64


def _is_whole(value: Any) -> bool:
    """True if a tensor has only whole numbers, whose sums are exact in every type that is large enough."""
    return not _is_wide(value) or bool(np.all(np.round(value) == value))
