"""Executors that fail while they prepare or run a model, or that compute an operator wrongly."""

from __future__ import annotations

import numpy as np
import toys
from foreign import _Prepared, _Spoiling
from onnx.backend.base import Backend as OnnxBackend

from refgrad.backends.base import Backend


class _Failing(Backend):
    """It raises while it prepares a model."""

    name = "failing"

    def description(self) -> str:
        return "fails"

    def prepare(self, model, **options):
        raise self.error


class Keyed(_Failing):
    error = KeyError("Exp")


class Refusing(_Failing):
    error = NotImplementedError("Exp")


class OddError(NotImplementedError):
    pass


class Subclass(_Failing):
    error = OddError("Exp")


class SilentError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Silent(_Failing):
    error = SilentError()


class Saying(_Failing):
    error = RuntimeError("There is no kernel for Exp")


class Slowly(Backend):
    """It raises while it runs a gradient, and computes the model itself."""

    name = "slowly"

    def description(self) -> str:
        return "fails on gradients"

    def prepare(self, model, **options):
        real = toys.get_backend("numpy").prepare(model)

        def act(prepared, feeds):
            if any(name.endswith("_grad") for name in feeds):
                raise ZeroDivisionError("of a gradient")
            return real.run(feeds)

        return _Prepared(model, act)


class Halved(_Spoiling):
    """Half of every gradient; the model itself is right."""

    def spoil(self, results, feeds):
        if not any(name.endswith("_grad") for name in feeds):
            return results
        return {name: value / 2 for name, value in results.items()}


class Shifted(_Spoiling):
    """Another result of the model itself; the gradient is right."""

    def spoil(self, results, feeds):
        if any(name.endswith("_grad") for name in feeds):
            return results
        return {name: value + np.float32(1) for name, value in results.items()}


def broken(*arguments):
    """A comparison that never answers."""
    raise TypeError("this always fails")


class Masked(_Spoiling):
    """Every element is masked."""

    def spoil(self, results, feeds):
        return {name: np.ma.masked_array(value, mask=True) for name, value in results.items()}


class _Foreign(OnnxBackend):
    """A class of onnx.backend that raises while it prepares a model."""

    @classmethod
    def prepare(cls, model, device="CPU", **options):
        raise cls.error


class ForeignSubclass(_Foreign):
    error = OddError("Exp")


class ForeignSilent(_Foreign):
    error = SilentError()
