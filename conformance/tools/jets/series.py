"""The number class: a function of t > 0 near 0, as a series in powers and logarithms of t, with coefficients of 50 digits.

A series is a sum of c·t^e·(log t)^k with rational e and whole k ≥ 0, up to an error O(t^order). Two series compare as they do
for all small t > 0: by the leading term of their difference. NumPy calls the methods of the elements of an object array, so
that `np.exp(x)`, `x > 0` and `np.maximum(x, y)` work on arrays of these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import wraps
from math import inf
from typing import Any, TypeAlias

import mpmath
import numpy as np

CONTEXT = mpmath.MPContext()
CONTEXT.dps = 50
NOISE = CONTEXT.mpf(10) ** -38  # the rest of a sum after cancellation, relative to its largest term
LENGTH = 6  # how many powers of t beyond its leading one a series keeps, unless `precision` says otherwise

Exponent: TypeAlias = int | Fraction
Terms: TypeAlias = Mapping[Any, Any]  # c by (e, k)

_length = [LENGTH]


class precision:  # noqa: N801 (a context manager is written like a function)
    """Keep `length` powers of t beyond the leading one within the block: more where leading terms cancel."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __enter__(self) -> None:
        _length.append(self.length)

    def __exit__(self, *error: object) -> None:
        _length.pop()


class UndefinedError(ArithmeticError):
    """The function has no real value along the curve, like the root of a negative number."""


class LostError(ArithmeticError):
    """Every known term cancelled: the series has to be longer."""


class UnknownError(ArithmeticError):
    """The result is not a series of this form, like (log t)^½ or t^(log t)."""


def mpf(value: Any) -> Any:
    """A number with 50 digits, exactly the value of a float."""
    return CONTEXT.mpf(float(value)) if not isinstance(value, CONTEXT.mpf) else value


def _rank(key: tuple[Exponent, int]) -> tuple[Exponent, int]:
    """The largest term for small t comes first: the lowest power of t, then the highest power of log t."""
    return key[0], -key[1]


def _whole(exponent: Exponent) -> Exponent:
    return int(exponent) if isinstance(exponent, Fraction) and exponent.denominator == 1 else exponent


def _of_numbers(operation: Callable[[Any, Any], Series]) -> Callable[[Any, Any], Series]:
    """A binary operation that leaves arrays to NumPy, which takes them element by element."""

    @wraps(operation)
    def made(self: Series, other: Any) -> Series:
        return NotImplemented if isinstance(other, np.ndarray) else operation(self, other)

    return made


class Series:
    """A function of t > 0 near 0. `terms` has c by (e, k) for every c·t^e·(log t)^k; the error is O(t^order)."""

    __slots__ = ("order", "terms")

    def __init__(self, terms: Terms, order: Any = inf) -> None:
        if terms and len(terms) > 1:
            cut = min(order, min(e for e, _ in terms) + _length[-1])
            kept = {key: c for key, c in terms.items() if key[0] < cut}
            order = order if len(kept) == len(terms) else cut
        else:
            kept = {key: c for key, c in terms.items() if key[0] < order}
        self.terms = kept
        self.order = order

    @classmethod
    def of(cls, value: Any) -> Series:
        """A constant; a series stays what it is."""
        if isinstance(value, Series):
            return value
        number = mpf(value)
        return cls({(0, 0): number} if number != 0 else {})

    # Properties of a series.

    @property
    def lead(self) -> tuple[Exponent, int] | None:
        """The power of t and of log t of the leading term, None for 0."""
        return min(self.terms, key=_rank) if self.terms else None

    @property
    def sign(self) -> int:
        """The sign for all small t > 0; 0 where no term is known."""
        if not self.terms:
            return 0
        key = min(self.terms, key=_rank)
        sign = 1 if self.terms[key] > 0 else -1
        return sign if key[1] % 2 == 0 else -sign  # log t < 0

    @property
    def infinite(self) -> bool:
        """True if it is the constant ∞ or −∞."""
        return (0, 0) in self.terms and bool(CONTEXT.isinf(self.terms[0, 0]))

    def coefficient(self, exponent: Exponent, logs: int = 0) -> Any:
        """The coefficient of t^exponent·(log t)^logs."""
        return self.terms.get((exponent, logs), CONTEXT.zero)

    def __repr__(self) -> str:
        parts = [
            f"{CONTEXT.nstr(self.terms[e, k], 6)}·t^{e}" + (f"·L^{k}" if k else "")
            for e, k in sorted(self.terms, key=_rank)
        ]
        return " + ".join(parts or ["0"]) + (f" + O(t^{self.order})" if self.order < inf else "")

    # Comparison.

    def _against(self, other: Any) -> int:
        if isinstance(other, Series):
            return 0 if self is other else (self - other).sign
        return self.sign if not other else (self - Series.of(other)).sign

    def __lt__(self, other: Any) -> bool:
        return self._against(other) < 0

    def __le__(self, other: Any) -> bool:
        return self._against(other) <= 0

    def __gt__(self, other: Any) -> bool:
        return self._against(other) > 0

    def __ge__(self, other: Any) -> bool:
        return self._against(other) >= 0

    def __eq__(self, other: object) -> bool:
        return self._against(other) == 0

    def __ne__(self, other: object) -> bool:
        return self._against(other) != 0

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return self.sign != 0

    # Arithmetic.

    def __neg__(self) -> Series:
        return Series({key: -c for key, c in self.terms.items()}, self.order)

    def __pos__(self) -> Series:
        return self

    def __abs__(self) -> Series:
        return -self if self.sign < 0 else self

    @_of_numbers
    def __add__(self, other: Any) -> Series:
        other = Series.of(other)
        if self.infinite or other.infinite:
            return _infinite_sum(self, other)
        terms = dict(self.terms)
        for key, c in other.terms.items():
            if key not in terms:
                terms[key] = c
                continue
            total = terms[key] + c
            if abs(total) <= NOISE * abs(c):
                del terms[key]
            else:
                terms[key] = total
        return Series(terms, min(self.order, other.order))

    __radd__ = __add__

    @_of_numbers
    def __sub__(self, other: Any) -> Series:
        other = Series.of(other)
        if self.infinite and other.infinite and self.sign == other.sign:
            return Series({})  # for comparisons: ∞ = ∞
        difference: Series = self + (-other)
        return difference

    @_of_numbers
    def __rsub__(self, other: Any) -> Series:
        return Series.of(other) - self

    @_of_numbers
    def __mul__(self, other: Any) -> Series:
        other = Series.of(other)
        if (not self.terms and self.order == inf) or (not other.terms and other.order == inf):
            if self.infinite or other.infinite:
                raise UndefinedError
            return Series({})
        if self.infinite or other.infinite:
            return Series({(0, 0): CONTEXT.inf * self.sign * other.sign})
        order = min(self.order + _start(other), other.order + _start(self))
        if self.terms and other.terms:
            order = min(order, _bound(self, other))
        sums: dict[tuple[Exponent, int], Any] = {}
        largest: dict[tuple[Exponent, int], Any] = {}
        for (e, k), c in self.terms.items():
            for (f, m), d in other.terms.items():
                power = e + f
                if power >= order:
                    continue
                key = (_whole(power), k + m)
                part = c * d
                size = abs(part)
                if key in sums:
                    sums[key] += part
                    largest[key] = max(largest[key], size)
                else:
                    sums[key], largest[key] = part, size
        return Series({key: c for key, c in sums.items() if abs(c) > NOISE * largest[key]}, order)

    __rmul__ = __mul__

    def reciprocal(self) -> Series:
        """1/x: t^−e/c·(1 + r)⁻¹."""
        return self._power(-1)

    @_of_numbers
    def __truediv__(self, other: Any) -> Series:
        if not isinstance(other, Series):
            return self * (1 / mpf(other)) if other else self * Series.of(other).reciprocal()
        return self * other.reciprocal()

    @_of_numbers
    def __rtruediv__(self, other: Any) -> Series:
        return Series.of(other) * self.reciprocal()

    def _split(self) -> tuple[tuple[Exponent, int], Any, Series]:
        """The leading term c·t^e·(log t)^k, and r with x = c·t^e·(log t)^k·(1 + r)."""
        key = self.lead
        if key is None:
            raise LostError
        c = self.terms[key]
        rest = {(e - key[0], k - key[1]): d / c for (e, k), d in self.terms.items() if (e, k) != key}
        if any(k < 0 for _, k in rest):
            raise UnknownError("a quotient by log t")
        return key, c, Series(rest, self.order - key[0])

    def _power(self, p: Any) -> Series:
        """x^p for a constant rational p: by the binomial series of (1 + r)^p."""
        if not self.terms:
            if self.order < inf and p != 0:
                if p < 0:
                    raise LostError
                return Series({}, self.order * p)
            return Series({(0, 0): CONTEXT.inf} if p < 0 else {(0, 0): CONTEXT.one} if p == 0 else {})
        if p == 0:
            return Series({(0, 0): CONTEXT.one})
        if self.infinite:
            return Series({}) if p < 0 else Series({(0, 0): CONTEXT.inf})
        (e, k), c, r = self._split()
        whole = p == int(p)
        if not whole and (c < 0) != bool(k % 2):
            raise UndefinedError
        if k and (not whole or p < 0):
            raise UnknownError("a power of log t")
        power = Fraction(p).limit_denominator(10**6)
        head = c ** int(p) if whole else CONTEXT.power(c, mpf(p) if not isinstance(p, Fraction) else _real(p))
        value = _real(power)
        coefficient = CONTEXT.one
        coefficients = []
        for n in range(_needed(r)):
            coefficients.append(coefficient)
            coefficient = coefficient * (value - n) / (n + 1)
        series = _composed(coefficients, r)
        return Series(
            {(_whole(power * e + f), int(p) * k + m if k else m): head * d for (f, m), d in series.terms.items()},
            series.order + power * e,
        )

    @_of_numbers
    def __pow__(self, other: Any) -> Series:
        if isinstance(other, Series):
            if other.terms.keys() - {(0, 0)} or other.order < inf:
                return _moving_power(self, other)
            other = other.coefficient(0)
        return self._power(_rational(other))

    @_of_numbers
    def __rpow__(self, other: Any) -> Series:
        return Series.of(other) ** self

    # The functions that NumPy asks the elements of an object array for.

    def _at(self) -> tuple[Any, Series]:
        """The value c at t = 0, and the rest h of x = c + h, for a function that is analytic at c."""
        if any(e < 0 or (e == 0 and k) for e, k in self.terms) or self.order <= 0:
            raise UnknownError("an analytic function of a series that diverges")
        return self.coefficient(0), Series({key: c for key, c in self.terms.items() if key != (0, 0)}, self.order)

    def exp(self) -> Series:
        """e^x; a term c·log t gives t^c."""
        if self.infinite:
            return Series({(0, 0): CONTEXT.inf}) if self.sign > 0 else Series({})
        lead = self.lead
        if lead is not None and (lead[0] < 0 or (lead[0] == 0 and lead[1] > 1)):
            if self.sign > 0:
                raise UnknownError("e to a power that diverges")
            return Series({}, inf)  # smaller than every power of t
        if self.order <= 0:
            raise LostError
        c = self.coefficient(0)
        shift = _whole(_rational(self.coefficient(0, 1)))
        h = Series({key: d for key, d in self.terms.items() if key not in ((0, 0), (0, 1))}, self.order)
        head = CONTEXT.exp(c)
        coefficients = [head / CONTEXT.factorial(n) for n in range(_needed(h))]
        made = _composed(coefficients, h)
        return Series({(_whole(e + shift), k): d for (e, k), d in made.terms.items()}, made.order + shift)

    def log(self) -> Series:
        """The logarithm."""
        # log(c·t^e·(1 + r)) = log c + e·log t + log(1 + r)
        if not self.terms:
            if self.order < inf:
                raise LostError
            return Series({(0, 0): -CONTEXT.inf})
        if self.sign < 0:
            raise UndefinedError
        if self.infinite:
            return self
        (e, k), c, r = self._split()
        if k:
            raise UnknownError("log log t")
        coefficients = [CONTEXT.zero, *((-1) ** (n + 1) / mpf(n) for n in range(1, max(2, _needed(r))))]
        head = {(0, 0): CONTEXT.log(c), (0, 1): _real(e)}
        return Series({key: d for key, d in head.items() if d != 0}) + _composed(coefficients, r)

    def sqrt(self) -> Series:
        """The root."""
        return self._power(Fraction(1, 2))

    def log1p(self) -> Series:
        """log(1 + x)."""
        return (1 + self).log()

    def expm1(self) -> Series:
        """e^x − 1."""
        return self.exp() - 1

    def sin(self) -> Series:
        """The sine."""
        return self._circular(0)

    def cos(self) -> Series:
        """The cosine."""
        return self._circular(1)

    def _circular(self, quarter: int) -> Series:
        """sin(x + quarter·π/2): its derivatives are sin, cos, −sin and −cos."""
        c, h = self._at()
        sine, cosine = CONTEXT.sin(c), CONTEXT.cos(c)
        turns = (sine, cosine, -sine, -cosine)
        return _composed([turns[(n + quarter) % 4] / CONTEXT.factorial(n) for n in range(_needed(h))], h)

    def tan(self) -> Series:
        """The tangent."""
        return self.sin() / self.cos()

    def sinh(self) -> Series:
        """The hyperbolic sine."""
        return (self.exp() - (-self).exp()) * Fraction(1, 2)

    def cosh(self) -> Series:
        """The hyperbolic cosine."""
        return (self.exp() + (-self).exp()) * Fraction(1, 2)

    def tanh(self) -> Series:
        """The hyperbolic tangent, by an exponential that is at most 1."""
        if self.sign < 0:
            return -(-self).tanh()
        small = (-2 * self).exp()
        return (1 - small) / (1 + small)

    def _integrated(self, function: Callable[[Any], Any], slope: Callable[[Series], Series]) -> Series:
        """f(x(t)) = f(c) + ∫ f'(x)·x' dt, for an f whose derivative is simpler than it is."""
        c, h = self._at()
        if not h.terms and h.order == inf:
            return Series.of(function(c))
        moved = slope(self) * h.derivative()
        return Series.of(function(c)) + moved.integral()

    def derivative(self) -> Series:
        """d/dt, of a series without logarithms."""
        if any(k for _, k in self.terms):
            raise UnknownError("the derivative of a logarithm")
        return Series({(_whole(e - 1), 0): c * _real(e) for (e, _), c in self.terms.items() if e}, self.order - 1)

    def integral(self) -> Series:
        """∫ dt, of a series without logarithms and without t⁻¹."""
        if any(k or e == -1 for e, k in self.terms):
            raise UnknownError("the integral of a logarithm or of 1/t")
        return Series({(_whole(e + 1), 0): c / _real(e + 1) for (e, _), c in self.terms.items()}, self.order + 1)

    def arctan(self) -> Series:
        """The inverse tangent."""
        return self._integrated(CONTEXT.atan, lambda x: (1 + x * x).reciprocal())

    def arcsin(self) -> Series:
        """The inverse sine; (1 − x)(1 + x) has the root of the ends."""
        return self._integrated(_within(CONTEXT.asin), lambda x: ((1 - x) * (1 + x))._power(Fraction(-1, 2)))

    def arccos(self) -> Series:
        """The inverse cosine."""
        found: Series = CONTEXT.pi / 2 - self.arcsin()
        return found

    def arcsinh(self) -> Series:
        """The inverse hyperbolic sine."""
        return self._integrated(CONTEXT.asinh, lambda x: (1 + x * x)._power(Fraction(-1, 2)))

    def arccosh(self) -> Series:
        """The inverse hyperbolic cosine."""
        return (self + ((self - 1) * (self + 1)).sqrt()).log()

    def arctanh(self) -> Series:
        """The inverse hyperbolic tangent."""
        return ((1 + self).log() - (1 - self).log()) * Fraction(1, 2)

    def erf(self) -> Series:
        """The error function."""
        return self._integrated(CONTEXT.erf, lambda x: (-(x * x)).exp() * (2 / CONTEXT.sqrt(CONTEXT.pi)))

    def _stepped(self, whole: Callable[[Any], Any]) -> Series:
        """A function that is constant between whole or half numbers: its value right beside t = 0."""
        c, h = self._at()
        return Series.of(whole(c + h.sign * CONTEXT.mpf(2) ** -60))

    def floor(self) -> Series:
        """The largest whole number that is not larger."""
        return self._stepped(CONTEXT.floor)

    def ceil(self) -> Series:
        """The smallest whole number that is not smaller."""
        return self._stepped(CONTEXT.ceil)

    def trunc(self) -> Series:
        """The whole number next to it, towards 0."""
        return self.floor() if self.sign >= 0 else self.ceil()

    def rint(self) -> Series:
        """The nearest whole number; the even one of two (Python's round)."""
        return self._stepped(lambda value: CONTEXT.nint(value))

    __floor__, __ceil__, __trunc__ = floor, ceil, trunc  # NumPy asks for these by way of `math`

    def conjugate(self) -> Series:
        """Itself: a real number."""
        return self


def _real(exponent: Any) -> Any:
    return mpf(exponent.numerator) / exponent.denominator if isinstance(exponent, Fraction) else mpf(exponent)


def _rational(value: Any) -> Fraction | int:
    """A constant as a fraction: exactly one of small parts where it is within the digits, else the float."""
    if isinstance(value, int | Fraction):
        return value
    near = Fraction(float(value)).limit_denominator(1000)
    exact = near if abs(_real(near) - value) < CONTEXT.mpf(10) ** -30 else Fraction(float(value))
    return int(exact) if exact.denominator == 1 else exact


def _start(x: Series) -> Any:
    """The lowest power of t in it, or of its error."""
    return min((e for e, _ in x.terms), default=x.order)


def _bound(a: Series, b: Series) -> Any:
    """The order at which a product of two is cut."""
    if any(x.order == inf and len(x.terms) == 1 for x in (a, b)):
        return inf
    return _start(a) + _start(b) + _length[-1]


def _infinite_sum(a: Series, b: Series) -> Series:
    if a.infinite and b.infinite and a.sign != b.sign:
        raise UndefinedError
    return Series({(0, 0): (a if a.infinite else b).terms[0, 0]})


def _within(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that is real only on [−1, 1]."""

    def real(c: Any) -> Any:
        if abs(c) > 1:
            raise UndefinedError
        return function(c)

    return real


def _needed(h: Series) -> int:
    """How many powers of h count, for an h that vanishes with t."""
    start = _start(h)
    if start == inf:
        return 1
    if start <= 0:
        raise UnknownError("a power series in what does not vanish")
    return int(min(h.order, start + _length[-1]) / start) + 1


def _composed(coefficients: list[Any], h: Series) -> Series:
    """Σ cₙ·hⁿ, by Horner's rule."""
    made = Series.of(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        made = made * h + c
    if h.terms or h.order < inf:  # the first power that is missing
        made = Series(made.terms, min(made.order, len(coefficients) * _start(h)))
    return made


def _moving_power(x: Series, y: Series) -> Series:
    """x^y with a y that moves."""
    if not x.terms and x.order == inf:
        value = {1: CONTEXT.zero, -1: CONTEXT.inf, 0: CONTEXT.one}[y.sign]
        return Series.of(value)
    return (y * x.log()).exp()
