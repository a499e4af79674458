"""Builders and executors that misbehave, for tests of the runner: named as `foreign:function`."""

from __future__ import annotations

import os
import time

import numpy as np
from onnx import ModelProto, helper

import refgrad
from refgrad.backends import get_backend
from refgrad.backends.base import Backend, Prepared, graph_inputs, graph_outputs


def right(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto:
    return refgrad.gradient(model, wrt, outputs)


def doubled(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto:
    """Every gradient times two."""
    made = refgrad.gradient(model, wrt, outputs)
    for value in made.graph.output:
        half = f"{value.name}_half"
        for node in made.graph.node:
            node.output[:] = [half if name == value.name else name for name in node.output]
        made.graph.node.append(helper.make_node("Add", [half, half], [value.name]))
    return made


def inventing(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto:
    """Its last operator does not exist."""
    made = refgrad.gradient(model, wrt, outputs)
    made.graph.node[-1].op_type = "Nonsense"
    return made


def nothing(model: ModelProto, wrt: list[str], outputs: list[str]) -> None:
    """It forgets to return."""


def unfinished(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto:
    made = refgrad.gradient(model, wrt, outputs)
    del made.graph.output[:]
    return made


def refusing(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto:
    raise ValueError("I do not know this operator")


class UnsupportedError(Exception):
    """How a builder of its own refuses."""


def refusing_in_its_own_way(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto:
    raise UnsupportedError("I do not know this operator")


refusing_in_its_own_way.refusals = (UnsupportedError,)


def asserting(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto:
    assert len(wrt) > len(outputs) + 1, "never so many"
    return model


def misspelling(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto:
    return model.grph


def undocumented(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto:
    raise UnsupportedError("I do not know this operator")


def silent(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto:
    raise NotImplementedError


def aborting(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto:
    os.abort()


def hanging(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto:
    time.sleep(600)
    return model


def greedy(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto:
    bytearray(64 << 30)
    return model


class _Prepared(Prepared):
    def __init__(self, model: ModelProto, act) -> None:
        self.inputs, self.outputs, self.act = graph_inputs(model.graph), graph_outputs(model.graph), act

    def run(self, feeds, outputs=None):
        return self.act(self, feeds)


class Aborting(Backend):
    """It ends the process."""

    name = "aborting"

    def description(self) -> str:
        return "aborts"

    def prepare(self, model, **options):
        return _Prepared(model, lambda prepared, feeds: os.abort())


class Zeros(Backend):
    """It computes nothing but zeros, in the shapes of the inputs."""

    name = "zeros"

    def description(self) -> str:
        return "zeros"

    def prepare(self, model, **options):
        return _Prepared(
            model,
            lambda prepared, feeds: {
                o.name: np.zeros_like(feeds[o.name.removesuffix("_grad")]) for o in prepared.outputs
            },
        )


class _Spoiling(Backend):
    """The interpreter's results, spoilt: those of a gradient, as the answer to a model itself would be its own."""

    name = "spoiling"

    def description(self) -> str:
        return "spoils"

    def prepare(self, model, **options):
        real = get_backend("numpy").prepare(model)
        return _Prepared(model, lambda prepared, feeds: self.spoil(real.run(feeds), feeds))

    def spoil(self, results, feeds):
        raise NotImplementedError


class Fewer(_Spoiling):
    def spoil(self, results, feeds):
        return dict(list(results.items())[1:])


class Listed(_Spoiling):
    def spoil(self, results, feeds):
        return {name: value.tolist() for name, value in results.items()}


class Unnamed(_Spoiling):
    def spoil(self, results, feeds):
        return list(results.values())


class InPlace(_Spoiling):
    def spoil(self, results, feeds):
        for value in feeds.values():
            value[...] = 0
        return results


class More(_Spoiling):
    def spoil(self, results, feeds):
        return results | {"more": np.ones(3)}


class Leaving(_Spoiling):
    def spoil(self, results, feeds):
        raise SystemExit(3)


class Unsteady(_Spoiling):
    """Memory that nobody has written."""

    def spoil(self, results, feeds):
        drawn = np.float32(np.frombuffer(os.urandom(4), np.uint32)[0])
        return {name: value + drawn for name, value in results.items()}


class Wider(_Spoiling):
    """All results in float64."""

    def spoil(self, results, feeds):
        return {name: value.astype(np.float64) for name, value in results.items()}


class Emptying(_Spoiling):
    def spoil(self, results, feeds):
        feeds.clear()
        return results


class Addressed(_Spoiling):
    """An error whose message is another each time."""

    def spoil(self, results, feeds):
        raise RuntimeError(f"failed at {os.urandom(4).hex()}")


class NeedingMore(_Spoiling):
    def __init__(self, device):
        self.device = device


class Absent(_Spoiling):
    def unavailable(self):
        return "there is no such device"


class Exiting(_Spoiling):
    def __init__(self):
        raise SystemExit(0)


class OfOnnx:
    """A backend like `onnx.backend.base.Backend`, with a bug."""

    @staticmethod
    def prepare(model, device):
        return OfOnnx()

    def run(self, arrays):
        raise TypeError("unsupported operand type(s) for +: 'int' and 'str'")


class OfOnnxWithMore(OfOnnx):
    @staticmethod
    def prepare(model, device):
        return OfOnnxWithMore()

    def run(self, arrays):
        return [arrays[0], arrays[0]]
