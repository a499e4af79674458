"""The operators that are scanned, each written in mpmath: forwards alone, no derivative."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import mpmath
import numpy as np
from mpmath import mp, mpf

from refgrad.protos.domains import MICROSOFT

Number: TypeAlias = Any  # an mpf: mpmath has no types


class OutsideError(Exception):
    """The point is not in the domain of the function."""


@dataclass(frozen=True, eq=False)
class ScalarFunction:
    """An operator with its attributes, and the function of `arity` numbers that it computes.

    `row`: the numbers are one row of the operator's only input, which it reduces. Without it each has an input of its own.
    `ends`: numbers around which points are dense, such as the ends of the domain.
    """

    operator: str
    forward: Callable[..., Number]
    arity: int = 1
    attributes: Mapping[str, Any] = field(default_factory=dict)
    row: bool = False
    ends: tuple[float, ...] = ()
    opset: int = 21
    domain: str = ""

    @property
    def name(self) -> str:
        """The operator, with its attributes in brackets."""
        shown = ", ".join(f"{key}={value}" for key, value in self.attributes.items())
        operator = f"{self.domain}.{self.operator}" if self.domain else self.operator
        return f"{operator} ({shown})" if shown else operator


_SETTLED = 2**20  # beyond it, erf differs from ±1 by less than any type holds, and mpmath's overflows


def _single(number: float) -> Number:
    """An attribute, which a model holds in float32."""
    return mpf(float(np.float32(number)))


def _where(condition: bool) -> None:
    if not condition:
        raise OutsideError


def _sqrt(x: Number) -> Number:
    _where(x >= 0)
    return mp.sqrt(x)


def _log(x: Number) -> Number:
    _where(x > 0)
    return mp.log(x)


def _within(function: Callable[[Number], Number], low: float, high: float) -> Callable[[Number], Number]:
    def forward(x: Number) -> Number:
        _where(low <= x <= high)
        return function(x)

    return forward


def _atanh(x: Number) -> Number:
    _where(-1 < x < 1)
    return (mp.log1p(x) - mp.log1p(-x)) / 2


def _reciprocal(x: Number) -> Number:
    _where(x != 0)
    return 1 / x


def _div(a: Number, b: Number) -> Number:
    _where(b != 0)
    return a / b


def _pow(x: Number, y: Number) -> Number:
    _where(x > 0)
    return mp.exp(y * mp.log(x))


def _mod(fmod: bool) -> Callable[[Number, Number], Number]:
    def forward(a: Number, b: Number) -> Number:
        _where(b != 0 and abs(a) < abs(b) * 2**20)  # beyond, the jumps lie closer than the numbers of a type
        quotient = a / b
        whole = mp.floor(abs(quotient)) * mp.sign(quotient) if fmod else mp.floor(quotient)
        return a - b * whole

    return forward


def _sigmoid(x: Number) -> Number:
    return 1 / (1 + mp.exp(-x)) if x > 0 else mp.exp(x) / (1 + mp.exp(x))


def _softplus(x: Number) -> Number:
    return mp.log1p(mp.exp(-abs(x))) + max(x, mpf(0))


def _elu(alpha: float, gamma: float = 1.0) -> Callable[[Number], Number]:
    a, g = _single(alpha), _single(gamma)
    return lambda x: g * x if x > 0 else g * a * mp.expm1(x)


def _celu(alpha: float) -> Callable[[Number], Number]:
    a = _single(alpha)
    return lambda x: max(x, mpf(0)) + min(mpf(0), a * mp.expm1(x / a))


def _clamped(low: Number, x: Number, high: Number) -> Number:
    return min(max(low, x), high)


def _hard_sigmoid(alpha: float, beta: float) -> Callable[[Number], Number]:
    a, b = _single(alpha), _single(beta)
    return lambda x: _clamped(mpf(0), a * x + b, mpf(1))


def _shrink(lambd: float, bias: float) -> Callable[[Number], Number]:
    border, b = _single(lambd), _single(bias)
    return lambda x: x + b if x < -border else x - b if x > border else mpf(0)


def _erfc(x: Number) -> Number:
    return mp.erfc(x) if abs(x) < _SETTLED else mpf(0) if x > 0 else mpf(2)


def _normal(x: Number) -> Number:
    return _erfc(-x / mp.sqrt(2)) / 2


def _gelu(x: Number) -> Number:
    return x * _normal(x)


def _tanh_gelu(x: Number) -> Number:
    return x * _sigmoid(2 * mp.sqrt(2 / mp.pi) * (x + mpf("0.044715") * x**3))


def _swish(alpha: float) -> Callable[[Number], Number]:
    a = _single(alpha)
    return lambda x: x * _sigmoid(a * x)


def _mish(x: Number) -> Number:
    return x * mp.tanh(_softplus(x))


def _product(*row: Number) -> Number:
    return mpmath.fprod(row)


def _log_sum(*row: Number) -> Number:
    return _log(mpmath.fsum(row))


def _log_sum_exp(*row: Number) -> Number:
    top = max(row)
    return top + mp.log(mpmath.fsum(mp.exp(x - top) for x in row))


def _all(operator: str, forward: Callable[..., Number], **more: Any) -> ScalarFunction:
    return ScalarFunction(operator, forward, 3, {"keepdims": 0}, row=True, opset=18, **more)


FUNCTIONS: tuple[ScalarFunction, ...] = (
    # activations
    ScalarFunction("Relu", lambda x: max(x, mpf(0))),
    ScalarFunction("LeakyRelu", lambda x: x if x > 0 else _single(0.01) * x),
    ScalarFunction("PRelu", lambda x, slope: x if x > 0 else slope * x, 2),
    ScalarFunction("Elu", _elu(1.0)),
    ScalarFunction("Elu", _elu(2.5), attributes={"alpha": 2.5}),
    ScalarFunction("Elu", _elu(-0.5), attributes={"alpha": -0.5}),
    ScalarFunction("Selu", _elu(1.67326319217681884765625, 1.05070102214813232421875)),
    ScalarFunction("Celu", _celu(1.0)),
    ScalarFunction("Celu", _celu(2.0), attributes={"alpha": 2.0}),
    ScalarFunction("Celu", _celu(0.1), attributes={"alpha": 0.1}),
    ScalarFunction("ThresholdedRelu", lambda x: x if x > 1 else mpf(0)),
    ScalarFunction("Shrink", _shrink(0.5, 0.0)),
    ScalarFunction("Sigmoid", _sigmoid),
    ScalarFunction("HardSigmoid", _hard_sigmoid(0.2, 0.5)),
    ScalarFunction("HardSwish", lambda x: x * _clamped(mpf(0), x / 6 + mpf(1) / 2, mpf(1)), ends=(-3.0, 3.0)),
    ScalarFunction("Tanh", mp.tanh),
    ScalarFunction("Softplus", _softplus),
    ScalarFunction("Softsign", lambda x: x / (1 + abs(x))),
    ScalarFunction("Gelu", _gelu),
    ScalarFunction("Gelu", _tanh_gelu, attributes={"approximate": "tanh"}),
    ScalarFunction("Swish", _swish(1.0), opset=24),
    ScalarFunction("Swish", _swish(1.5), attributes={"alpha": 1.5}, opset=24),
    ScalarFunction("SwiGLU", lambda a, b: b * _swish(1.0)(a), 2, opset=28),
    ScalarFunction("Mish", _mish),
    # ONNX Runtime's
    ScalarFunction("Gelu", _gelu, domain=MICROSOFT, opset=1),
    ScalarFunction("FastGelu", _tanh_gelu, domain=MICROSOFT, opset=1),
    ScalarFunction("QuickGelu", _swish(1.702), domain=MICROSOFT, opset=1),
    # arithmetic
    ScalarFunction("Add", lambda a, b: a + b, 2),
    ScalarFunction("Sub", lambda a, b: a - b, 2),
    ScalarFunction("Mul", lambda a, b: a * b, 2),
    ScalarFunction("Div", _div, 2),
    ScalarFunction("Mod", _mod(True), 2, {"fmod": 1}),
    ScalarFunction("Sum", lambda a, b: a + b, 2),
    ScalarFunction("Mean", lambda a, b: (a + b) / 2, 2),
    ScalarFunction("Max", lambda a, b: max(a, b), 2),
    ScalarFunction("Min", lambda a, b: min(a, b), 2),
    ScalarFunction("Clip", lambda x, low, high: min(max(x, low), high), 3),
    ScalarFunction("Pow", _pow, 2),
    ScalarFunction("Identity", lambda x: x),
    ScalarFunction("Neg", lambda x: -x),
    ScalarFunction("Abs", abs),
    ScalarFunction("Sqrt", _sqrt),
    ScalarFunction("Exp", mp.exp),
    ScalarFunction("Log", _log),
    ScalarFunction("Reciprocal", _reciprocal),
    ScalarFunction("Sin", mp.sin),
    ScalarFunction("Cos", mp.cos),
    ScalarFunction("Tan", mp.tan),
    ScalarFunction("Asin", _within(mp.asin, -1, 1), ends=(-1.0, 1.0)),
    ScalarFunction("Acos", _within(mp.acos, -1, 1), ends=(-1.0, 1.0)),
    ScalarFunction("Atan", mp.atan),
    ScalarFunction("Sinh", mp.sinh),
    ScalarFunction("Cosh", mp.cosh),
    ScalarFunction("Asinh", lambda x: mp.sign(x) * mp.log1p(abs(x) + x * x / (1 + mp.sqrt(1 + x * x)))),
    ScalarFunction("Acosh", _within(mp.acosh, 1, float("inf")), ends=(1.0,)),
    ScalarFunction("Atanh", _atanh, ends=(-1.0, 1.0)),
    ScalarFunction("Erf", lambda x: 1 - _erfc(x) if x > 0 else _erfc(-x) - 1),
    # rows
    _all("ReduceSum", lambda *row: mpmath.fsum(row)),
    _all("ReduceMean", lambda *row: mpmath.fsum(row) / 3),
    _all("ReduceMax", max),
    _all("ReduceMin", min),
    _all("ReduceProd", _product),
    _all("ReduceL1", lambda *row: mpmath.fsum(map(abs, row))),
    _all("ReduceL2", lambda *row: mp.sqrt(mpmath.fsum(x * x for x in row))),
    _all("ReduceSumSquare", lambda *row: mpmath.fsum(x * x for x in row)),
    _all("ReduceLogSum", _log_sum),
    _all("ReduceLogSumExp", _log_sum_exp),
)
