"""Strategies of the activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, strategy

# The points where each operator has no derivative, as a function of its attributes.
KINKS: dict[str, Callable[[dict[str, Any]], tuple[float, ...]]] = {
    "Relu": lambda attributes: (0.0,),
    "LeakyRelu": lambda attributes: (0.0,),
    "Elu": lambda attributes: (0.0,),
    "Selu": lambda attributes: (0.0,),
    "ThresholdedRelu": lambda attributes: (attributes.get("alpha", 1.0),),
    "Shrink": lambda attributes: (attributes.get("lambd", 0.5), -attributes.get("lambd", 0.5)),
    "HardSigmoid": lambda attributes: tuple(
        (level - attributes.get("beta", 0.5)) / attributes.get("alpha", 0.2) for level in (0, 1)
    ),
    "HardSwish": lambda attributes: (-3.0, 3.0),
}
SETTINGS: dict[str, dict[str, tuple[float, ...]]] = {  # the values of each attribute besides its default
    "LeakyRelu": {"alpha": (0.25, 2.0, 0.0, -0.5)},
    "Elu": {"alpha": (2.0, 0.5, -0.5)},
    "Selu": {"alpha": (2.0, 0.5), "gamma": (2.0, 0.5)},
    "ThresholdedRelu": {"alpha": (2.0, 0.0, -0.5)},
    "Shrink": {"lambd": (0.25, 1.0), "bias": (0.25, 1.0, -0.5)},
    "HardSigmoid": {"alpha": (0.25, 0.5), "beta": (0.25, 0.0)},
    "Celu": {"alpha": (2.0, 0.5)},
    "Swish": {"alpha": (2.0, 0.5, -0.5)},
}


@strategy(*KINKS, kinks=True)
def with_kinks(d: Drawing) -> Case:
    """Numbers on both sides of every kink, near and far."""
    attributes = _attributes(d)
    far = d.pick(4, 20)
    return d.case(d.floats(d.shape(), -far, far, avoid=KINKS[d.op_type](attributes)), **attributes)


@strategy("Sigmoid", "Tanh", "Softplus", "Mish", "Swish")
def smooth(d: Drawing) -> Case:
    """Numbers around 0, and so far out that the function is nearly straight."""
    far = d.pick(3, 20)
    return d.case(d.floats(d.shape(), -far, far), **_attributes(d))


@strategy("Celu", "Softsign")
def once_differentiable(d: Drawing) -> Case:
    """Numbers on both sides of 0, where there is no second derivative."""
    return d.case(d.floats(d.shape(), -4, 4, avoid=(0,)), **_attributes(d))


@strategy("Gelu")
def gelu(d: Drawing) -> Case:
    """Exact and approximate."""
    return d.case(d.floats(d.shape(), -4, 4), approximate=d.pick(None, "none", "tanh"))


@strategy("PRelu", kinks=True)
def prelu(d: Drawing) -> Case:
    """A slope that broadcasts to x."""
    shape = d.shape()
    return d.case(d.floats(shape, avoid=(0,)), d.floats(d.broadcast_to(shape)), fixed=["slope"])


@strategy("SwiGLU")
def swiglu(d: Drawing) -> Case:
    """A gate and a value of one shape."""
    shape = d.shape()
    return d.case(d.floats(shape), d.floats(shape), alpha=d.pick(None, 1.5, -0.5))


@strategy("Softmax", "LogSoftmax")
def softmax(d: Drawing) -> Case:
    """Any axis of any rank; the default axis too."""
    shape = d.shape(1)
    far = d.pick(2, 20)
    return d.case(d.floats(shape, -far, far), axis=d.optional(lambda: d.axis(len(shape))))


@strategy("Hardmax", kinks=True)
def hardmax(d: Drawing) -> Case:
    """As Softmax; no two elements tie."""
    shape = d.shape(1, empty=False)
    return d.case(d.distinct(shape), axis=d.optional(lambda: d.axis(len(shape))))


def _attributes(d: Drawing) -> dict[str, Any]:
    """Each attribute of `SETTINGS` absent, or one of its values."""
    options = SETTINGS.get(d.op_type, {})
    return {name: d.pick(*some) for name, some in options.items() if d.flag()}
