"""A model as a function of tensors that autograd differentiates, to any order: its derivative is a model, and so on."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from onnx import ModelProto
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from refgrad.backends import Backend, Prepared
from refgrad.backends.base import graph_inputs, graph_outputs
from refgrad.errors import OptionError
from refgrad.notices import quiet
from refgrad.protos.traverse import every_node
from refgrad.protos.types import FLOAT_DTYPES
from refgrad.reverse.assembly import names_in
from refgrad.reverse.gradient import gradient
from refgrad.reverse.ranks import of_any_rank
from refgrad.rewrites.split import split
from refgrad.tables.conventions import Conventions
from refgrad.tables.randomness import may_draw

# The types that NumPy does not know, each with one of torch of the same width.
_OF_ML_DTYPES: dict[torch.dtype, tuple[torch.dtype, Any]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
}
_TO_TORCH = {np.dtype(narrow): (bits, kind) for kind, (bits, narrow) in _OF_ML_DTYPES.items()}


OF_TORCH = Conventions(kinks="torch")


@dataclass(frozen=True)
class ModuleSettings:
    """How gradients are made, and by whom everything is run."""

    backend: Backend
    options: Mapping[str, Any] = field(default_factory=dict)
    recompute: bool | tuple[str, ...] = False
    memory: str | None = None
    conventions: Conventions = OF_TORCH


class _Fed(NamedTuple):
    """The weights of a call, how they lay in memory, and what an executor holds of them."""

    tensors: Sequence[Tensor]
    places: list[Any]
    held: list[Any]


class _Parts(NamedTuple):
    """Both parts of a gradient, prepared, and what goes from one to the other."""

    forward: Prepared
    backward: Prepared
    results: list[str]  # the outputs, and whatever else crosses
    read: list[int]  # the inputs that the backward part reads too, by their positions
    crossing: list[int]  # what crosses, by its positions in `results`
    names: list[str]  # what the backward part is fed: these two, and the cotangents
    gradients: list[str]


class ModelFunction:
    """A model whose inputs and outputs are tensors of numbers.

    `outputs` are the names that a call returns, `targets` the outputs that carry a derivative. The inputs in the slice
    `weights` are fed the same memory again and again. Models are prepared to run when a call needs them; a pickled function
    does not contain them.
    """

    def __init__(
        self,
        model: ModelProto,
        settings: ModuleSettings,
        targets: Sequence[str] | None = None,
        weights: slice = slice(0),
        is_derivative: bool = False,
    ) -> None:
        self._is_derivative = is_derivative
        self.model, self.settings, self.weights = model, settings, weights
        self.inputs = graph_inputs(model.graph)
        self.names = [value.name for value in self.inputs]
        self.outputs = [value.name for value in graph_outputs(model.graph)]
        self.targets = self.outputs if targets is None else list(targets)
        self._forget()

    def _forget(self) -> None:
        self._plain: Prepared | None = None
        self._parts: dict[tuple[str, ...], _Parts] = {}
        self._derivatives: dict[tuple[str, ...], ModelFunction] = {}
        self._last = _Fed((), [], [])

    def __getstate__(self) -> dict[str, Any]:
        made = ("_plain", "_parts", "_derivatives", "_last")
        return {key: value for key, value in self.__dict__.items() if key not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __call__(self, tensors: Sequence[Tensor], known: _Fed | None = None) -> tuple[Tensor, ...]:
        """The outputs. `tensors` are fed to the inputs; `known` has the weights as the last call left them, or is None."""
        if torch._C._are_functorch_transforms_active():  # they hide the tensors, and whether they require a gradient
            wrt = [value.name for value in self.inputs if value.dtype in FLOAT_DTYPES and self.targets]
        elif self.targets and torch.is_grad_enabled():
            wrt = [name for name, tensor in zip(self.names, tensors, strict=True) if tensor.requires_grad]
            if not wrt:
                return self.run(tensors, known)
        else:
            return self.run(tensors, known)
        found: tuple[Tensor, ...] = _Call.apply(self, tuple(wrt), _Kept(known), *tensors)
        return found

    def run(self, tensors: Sequence[Tensor], known: _Fed | None = None) -> tuple[Tensor, ...]:
        """The outputs, without a derivative."""
        if self._plain is None:
            self._plain = self._prepared(self.model)
        results = self._plain.run_held(self.names, self.held(self._plain, tensors, known), self.outputs)
        return tuple(self._plain.lent(results, _taken))

    def held(self, prepared: Prepared, tensors: Sequence[Tensor], known: _Fed | None) -> list[Any]:
        """The tensors that the inputs are fed, as an executor holds them."""
        if known is None:
            fed = tensors[self.weights]
            known = _Fed(fed, [*map(_place, fed)], [_held(prepared, tensor) for tensor in fed])
            if all(tensor.is_leaf and tensor.is_contiguous() for tensor in fed):  # else copies are held, or results
                self._last = known
        before, behind = tensors[: self.weights.start or 0], tensors[self.weights.stop :]
        return [*(_held(prepared, t) for t in before), *known.held, *(_held(prepared, t) for t in behind)]

    def known(self, tensors: Sequence[Tensor]) -> _Fed | None:
        """The weights as the last call left them, if they are the same tensors in the same memory; else None."""
        fed, last = tensors[self.weights], self._last
        if len(fed) != len(last.tensors) or not all(map(operator.is_, fed, last.tensors)):
            return None
        return last if [*map(_place, fed)] == last.places else None

    def parts(self, wrt: tuple[str, ...]) -> _Parts:
        """The gradient by `wrt` in two parts."""
        if wrt not in self._parts:
            with quiet() if self._is_derivative else nullcontext(), of_any_rank():
                found = split(self.model, wrt, self.targets, **self._how)
            cotangents, gradients = names_in(found.backward)
            taken = {value.name for value in found.backward.graph.input}
            results = [*dict.fromkeys((*self.outputs, *found.saved))]
            read = [k for k, name in enumerate(self.names) if name in taken]
            self._parts[wrt] = _Parts(
                self._prepared(found.forward),
                self._prepared(found.backward),
                results,
                read,
                [results.index(name) for name in found.saved],
                [*(self.names[k] for k in read), *found.saved, *(cotangents[name] for name in self.targets)],
                [gradients[name] for name in wrt],
            )
        return self._parts[wrt]

    def derivative(self, wrt: tuple[str, ...]) -> ModelFunction:
        """The gradients by `wrt` as a function of the inputs and then of the cotangents of the targets."""
        if wrt not in self._derivatives:
            if any(map(may_draw, every_node(self.model))):
                raise OptionError(
                    "The model draws random numbers, and a further derivative would draw others. Take autograd.grad without "
                    "create_graph and without torch.func, or let torch draw them, as an input of the model."
                )
            with quiet(), of_any_rank():  # it was said of the first gradient
                model = gradient(self.model, wrt, self.targets, **self._how)
            self._derivatives[wrt] = ModelFunction(model, self.settings, is_derivative=True)
        return self._derivatives[wrt]

    @property
    def _how(self) -> dict[str, Any]:
        return {
            "recompute": self.settings.recompute,
            "memory": self.settings.memory,
            **self.settings.conventions.options,
        }

    def _prepared(self, model: ModelProto) -> Prepared:
        return self.settings.backend.prepare(model, **self.settings.options)


class _Kept:
    """The `values` that the backward part of a call reads beside cotangents, held by the executor; None without this part."""

    def __init__(self, known: _Fed | None = None) -> None:
        self.known = known  # of the weights, before the call
        self.values: list[Any] | None = None


class _Call(torch.autograd.Function):
    """A call of a `ModelFunction` that is differentiated."""

    @staticmethod
    def forward(function: ModelFunction, wrt: tuple[str, ...], kept: _Kept, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not wrt:
            return function.run(tensors, kept.known)
        parts = function.parts(wrt)
        values = function.held(parts.forward, tensors, kept.known)
        results = parts.forward.run_held(function.names, values, parts.results)
        kept.values = [*map(values.__getitem__, parts.read), *map(results.__getitem__, parts.crossing)]
        return tuple(parts.forward.lent([results[k] for k in range(len(function.outputs))], _taken))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        function, wrt, kept, *tensors = inputs
        ctx.function, ctx.wrt = function, wrt
        results = dict(zip(function.outputs, output, strict=True))
        ctx.mark_non_differentiable(*(tensor for name, tensor in results.items() if name not in function.targets))
        ctx.set_materialize_grads(False)
        ctx.like = [(t.shape, t.dtype, t.device) for t in (results[name] for name in function.targets)]
        crossing = [] if kept.values is None else function.parts(wrt).crossing
        # Autograd gives up what it saved as soon as it can. What the executor kept goes with it.
        token = torch.empty(0)
        token.kept = kept.values
        ctx.save_for_backward(token, *tensors, *(output[k] for k in crossing if k < len(output)))

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        function, wrt = ctx.function, ctx.wrt
        token, *saved = ctx.saved_tensors
        of_outputs = dict(zip(function.outputs, given, strict=True))
        cotangents = [
            torch.zeros(shape, dtype=dtype, device=device) if of_outputs[name] is None else of_outputs[name]
            for name, (shape, dtype, device) in zip(function.targets, ctx.like, strict=True)
        ]
        kept = getattr(token, "kept", None)  # a hook of saved tensors may return another tensor
        if kept is None or torch.is_grad_enabled():  # a derivative of this derivative may be asked for
            results = function.derivative(wrt)([*saved[: len(function.names)], *cotangents])
        else:
            parts = function.parts(wrt)
            values = [*kept, *(_held(parts.backward, cotangent) for cotangent in cotangents)]
            made = parts.backward.run_held(parts.names, values, parts.gradients)
            results = parts.backward.lent(made, _taken)
        found = dict(zip(wrt, results, strict=True))
        return None, None, None, *map(found.get, function.names)

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: ModelFunction, wrt: tuple[str, ...], _: _Kept, *tensors: Tensor) -> Any:
        """One call after the other: a model says nothing of what a further axis would do to it."""
        rows = [
            [t if axis is None else t.select(axis, k) for t, axis in zip(tensors, in_dims[3:], strict=True)]
            for k in range(info.batch_size)
        ]
        results = [function(row) for row in rows]
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(function.outputs)


# torch asks for it in every call, and Python would work it out each time.
_Call.forward.__signature__ = inspect.signature(_Call.forward)  # type: ignore[attr-defined]


def _held(prepared: Prepared, tensor: Tensor) -> Any:
    """A tensor as an executor holds it."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.dtype in _OF_ML_DTYPES and tensor.device.type == "cpu":
        return prepared.held(array_in(tensor))
    return prepared.held(tensor)


def _taken(value: Any) -> Tensor:
    """The tensor in the memory of what an executor lends: an array, or a capsule."""
    if isinstance(value, np.ndarray):
        return from_array(value.copy())  # on the interpreter two results may be one array
    return from_dlpack(value)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """The address of a tensor in memory, its type and shape, and whether it is contiguous."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.is_contiguous()


def array_in(tensor: Tensor) -> np.ndarray:
    """The array in the memory of a tensor, of any type that ONNX has; a copy where it is not on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in _OF_ML_DTYPES:
        bits, narrow = _OF_ML_DTYPES[tensor.dtype]
        found: np.ndarray = tensor.view(bits).numpy().view(narrow)
    else:
        found = tensor.numpy()
    return found


def from_array(value: np.ndarray) -> Tensor:
    """The tensor in the memory of an array, of any type that torch has."""
    value = np.ascontiguousarray(value).reshape(value.shape)
    if value.dtype in _TO_TORCH:
        bits, kind = _TO_TORCH[value.dtype]
        return torch.from_numpy(value.view(f"i{value.itemsize}" if bits == torch.int16 else "u1")).view(kind)
    return torch.from_numpy(value if value.flags.writeable else value.copy())


@cache
def torch_type(dtype: np.dtype[Any] | None) -> torch.dtype | None:
    """The type in torch of the same name; None where it has none."""
    if dtype is None or dtype == np.dtype(object):
        return None
    try:
        return from_array(np.zeros(1, dtype)).dtype
    except TypeError:
        return None
