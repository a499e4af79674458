"""The models of a function and of its derivatives, each made when it is first run. Nothing here knows JAX."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from onnx import ModelProto, helper

from refgrad.backends import get_backend
from refgrad.backends.base import Prepared, Value, graph_outputs
from refgrad.derivatives.higher import jvp
from refgrad.errors import BackendError, InvalidModelError
from refgrad.model.normalise import normalise
from refgrad.model.reading import is_large, skeleton_of
from refgrad.protos.types import FLOAT_DTYPES
from refgrad.reverse.assembly import names_in, noted
from refgrad.reverse.gradient import gradient
from refgrad.reverse.ranks import of_any_rank
from refgrad.tables.conventions import Conventions

Sizes: TypeAlias = tuple[int, ...]
Places: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class FunctionSettings:
    """How models are differentiated and run."""

    backend: str
    options: Mapping[str, Any]
    conventions: Conventions
    batch_axis: int | None


@dataclass(frozen=True)
class Slot:
    """An input or an output of a program: its dtype in the model, and whether it has one row per sample."""

    dtype: np.dtype[Any]
    has_samples: bool

    @property
    def is_float(self) -> bool:
        """True if it can carry a derivative."""
        return self.dtype in FLOAT_DTYPES


class JaxProgram(ABC):
    """A model whose inputs and outputs are in a fixed order. Places count them."""

    compiled: Any = None  # what runs it outside of jit; JAX's part keeps it here

    def __init__(self, settings: FunctionSettings, inputs: tuple[Slot, ...], outputs: tuple[Slot, ...]) -> None:
        self.settings, self.inputs, self.outputs = settings, inputs, outputs
        self._derivatives: dict[tuple[bool, Places, Places], Derivative] = {}
        self._lock = threading.Lock()

    @property
    @abstractmethod
    def model(self) -> ModelProto:
        """The model that is run."""

    @property
    @abstractmethod
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the inputs and of the outputs in the model."""

    @abstractmethod
    def shapes(self, inputs: Sequence[Sizes]) -> tuple[Sizes, ...]:
        """The shapes of the outputs for inputs of these shapes."""

    def derivative(self, is_forward: bool, seeds: Places, results: Places) -> Derivative:
        """The program of a derivative; the same one whenever the same is asked.

        Forward, `seeds` are the inputs that have a tangent, and `results` the outputs of which the tangent is returned. In
        reverse, `seeds` are the outputs that have a cotangent, and `results` the inputs of which the gradient is returned.
        """
        key = (is_forward, seeds, results)
        with self._lock:
            if key not in self._derivatives:
                self._derivatives[key] = Derivative(self, is_forward, seeds, results)
            return self._derivatives[key]

    def prepare(self) -> Prepared:
        """The model, ready to run.

        :raises NoGradientError: an operator on the way has no derivative.
        :raises BackendError: the executor cannot run the model.
        """
        with self._lock:
            return self._prepared

    @cached_property
    def _prepared(self) -> Prepared:
        return get_backend(self.settings.backend).prepare(self.model, **self.settings.options)

    def run(self, promised: Sequence[tuple[Sizes, np.dtype[Any]]], *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        """Compute the outputs. Integers are widened to the dtypes of the model, and narrowed to the promised ones.

        :raises BackendError: the executor fails, or an output has another shape than `promised`, or does not fit into the type.
        """
        prepared, (fed, returned) = self.prepare(), self.names
        feeds = {
            name: array if array.dtype == slot.dtype else array.astype(slot.dtype)
            for name, slot, array in zip(fed, self.inputs, arrays, strict=True)
        }
        results = prepared.run(feeds, returned)
        return tuple([_kept(name, results[name], *kept) for name, kept in zip(returned, promised, strict=True)])


class Root(JaxProgram):
    """The model itself. `fed` are its inputs, in the order of the program; those in `sampled` have one row per sample."""

    def __init__(
        self, model: ModelProto, fed: Sequence[Value], sampled: Collection[str], settings: FunctionSettings
    ) -> None:
        self._model, self._returned = model, graph_outputs(model.graph)
        self._names = tuple(value.name for value in fed), tuple(value.name for value in self._returned)
        inputs = tuple(Slot(_dtype(value), value.name in sampled) for value in fed)
        super().__init__(settings, inputs, tuple(Slot(_dtype(value), bool(sampled)) for value in self._returned))
        self._shapes: dict[tuple[Sizes, ...], tuple[Sizes, ...]] = {}

    @property
    def model(self) -> ModelProto:
        """The caller's model, with the weights that are arguments as inputs."""
        return self._model

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the inputs and of the outputs in the model."""
        return self._names

    def shapes(self, inputs: Sequence[Sizes]) -> tuple[Sizes, ...]:
        """Infer the shapes; where that is not possible, run the model.

        :raises InvalidModelError: they depend on more than the shapes of the inputs.
        """
        key = tuple(inputs)
        if key not in self._shapes:
            self._shapes[key] = self._shapes_for(key)
        return self._shapes[key]

    def _shapes_for(self, inputs: tuple[Sizes, ...]) -> tuple[Sizes, ...]:
        known = {value.name: _static(value.shape) for value in self._returned}
        if None in known.values():
            inferred = normalise(self._of_shapes(inputs), shapeless=True).shapes
            known = {name: _static(inferred.get(name)) for name in known}
        unknown = [name for name, shape in known.items() if shape is None]
        if unknown:
            known |= self._tried(inputs, unknown)
        return tuple(shape for shape in known.values() if shape is not None)

    def _tried(self, inputs: tuple[Sizes, ...], outputs: Sequence[str]) -> dict[str, Sizes]:
        """The shapes of outputs in two runs, whose floats and booleans are 0, then 1.

        :raises InvalidModelError: a run fails, they differ, or an output is empty: XLA does not run what returns nothing.
        """
        model = get_backend("numpy").prepare(self._model)  # in others a division of integers by zero ends the process
        runs = []
        for make in (np.zeros, np.ones):
            arrays = [
                (np.zeros if slot.dtype.kind in "iu" else make)(shape, slot.dtype)  # 1 may be no index
                for slot, shape in zip(self.inputs, inputs, strict=True)
            ]
            with suppress(BackendError):
                results = model.run(dict(zip(self._names[0], arrays, strict=True)), outputs)
                runs.append({name: np.shape(results[name]) for name in outputs})
        for name in outputs:
            shapes = {run[name] for run in runs}
            if len(runs) < 2 or len(shapes) > 1 or 0 in runs[0][name]:
                raise InvalidModelError(
                    f"The shape of output {name!r} depends on the values of the inputs, and JAX needs to know it before "
                    "anything runs. Leave that output out with refgrad.select_model_inputs_outputs."
                )
        return runs[0]

    def _of_shapes(self, inputs: tuple[Sizes, ...]) -> ModelProto:
        """The model without its weights, for inputs of these shapes."""
        large = {tensor.name: tensor for tensor in self._model.graph.initializer if is_large(tensor)}
        skeleton = skeleton_of(self._model, large)
        shapes = dict(zip(self._names[0], inputs, strict=True))
        for value in skeleton.graph.input:
            if value.name in shapes:
                kind = value.type.tensor_type.elem_type
                value.CopyFrom(helper.make_tensor_value_info(value.name, kind, list(shapes[value.name])))
        return skeleton


class Derivative(JaxProgram):
    """A product with the Jacobian of another program, or with its transpose: linear in the seeds, inputs from `linear` on."""

    def __init__(self, parent: JaxProgram, is_forward: bool, seeds: Places, results: Places) -> None:
        seeded, returned = (parent.inputs, parent.outputs)[:: 1 if is_forward else -1]
        inputs = (*parent.inputs, *(seeded[k] for k in seeds))
        super().__init__(parent.settings, inputs, tuple(returned[k] for k in results))
        self._parent, self._is_forward, self._seeds, self._results = parent, is_forward, seeds, results
        self.linear = len(parent.inputs)

    def part(self, seeds: Sequence[int]) -> Derivative:
        """The same with some of the seeds alone; the others are zero."""
        return self._parent.derivative(self._is_forward, tuple(self._seeds[k] for k in seeds), self._results)

    def transposed(self, results: Sequence[int]) -> Derivative:
        """The transpose, fed a cotangent of some of the results; the cotangents of the others are zero."""
        return self._parent.derivative(not self._is_forward, tuple(self._results[k] for k in results), self._seeds)

    @cached_property
    def model(self) -> ModelProto:
        """Made by `refgrad.jvp` or by `refgrad.gradient`."""
        wrt, outputs = (self._seeds, self._results) if self._is_forward else (self._results, self._seeds)
        inputs, returned = self._parent.names
        names = [inputs[k] for k in wrt], [returned[k] for k in outputs]
        make, settings = jvp if self._is_forward else gradient, self.settings
        with of_any_rank():
            return make(self._parent.model, *names, **settings.conventions.options)

    @cached_property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the other program's inputs and of the seeds, and the names of the derivatives."""
        inputs, outputs = self._parent.names
        if self._is_forward:
            seeds, results = noted(self.model, "directions"), noted(self.model, "derivatives")
            seeded, returned = inputs, outputs
        else:
            seeds, results = names_in(self.model)
            seeded, returned = outputs, inputs
        return (*inputs, *(seeds[seeded[k]] for k in self._seeds)), tuple(results[returned[k]] for k in self._results)

    def shapes(self, inputs: Sequence[Sizes]) -> tuple[Sizes, ...]:
        """The shapes of the derivatives: they are the shapes of the outputs (forward) or of the inputs (reverse)."""
        primal = inputs[: self.linear]
        of = self._parent.shapes(primal) if self._is_forward else primal
        return tuple(of[k] for k in self._results)


def _dtype(value: Value) -> np.dtype[Any]:
    assert value.dtype is not None
    return value.dtype


def _static(shape: Sequence[Any] | None) -> Sizes | None:
    if shape is None or not all(isinstance(size, int) for size in shape):
        return None
    return tuple(shape)


def _kept(name: str, array: np.ndarray, shape: Sizes, dtype: np.dtype[Any]) -> np.ndarray:
    if array.shape != shape:
        raise BackendError(
            f"Output {name!r} has shape {array.shape}, where {shape} was inferred from the shapes of the inputs: it depends on "
            "their values. JAX needs to know shapes before anything runs; leave that output out with "
            "refgrad.select_model_inputs_outputs."
        )
    if array.dtype == dtype:
        return array
    kept = array.astype(dtype)
    if not np.array_equal(kept, array):
        raise BackendError(
            f"Output {name!r} has values that {dtype} cannot hold, in {array.dtype}. Set jax_enable_x64: without it JAX has "
            f"no {array.dtype}."
        )
    return kept
