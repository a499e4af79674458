"""Any `onnx.backend.base.Backend` as a backend of refgrad."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from onnx import ModelProto

from refgrad.backends.base import (
    Backend,
    Local,
    ModelLike,
    Prepared,
    check_feeds,
    check_outputs,
    graph_inputs,
    graph_outputs,
    load_model,
)
from refgrad.errors import AnswerError, BackendError, choices, of_type, raised


def wrap(onnx_backend: Any, name: str | None = None, device: str = "CPU") -> Backend:
    """Make a backend of `onnx_backend`: a subclass of `onnx.backend.base.Backend`, or a module like one.

    It is called `name`, by default the class's own name.
    """
    if not callable(getattr(onnx_backend, "prepare", None)):
        raise BackendError(
            f"{name or reprlib.repr(onnx_backend)} has no method prepare(model, device). Give a subclass of "
            "onnx.backend.base.Backend or of refgrad.backends.Backend."
        )
    return _Wrapped(onnx_backend, name or str(getattr(onnx_backend, "__name__", "wrapped")), device)


class _Wrapped(Backend):
    def __init__(self, onnx_backend: Any, name: str, device: str) -> None:
        self.name = name
        self._backend = onnx_backend
        self._device = device

    def description(self) -> str:
        module = getattr(self._backend, "__module__", None)
        return f"{module + '.' if module else ''}{self.name} through onnx.backend, device {self._device}"

    def prepare(self, model: ModelLike, **options: Any) -> Prepared:
        return _WrappedModel(self.name, load_model(model), partial(self._represent, options))

    def _represent(self, options: Mapping[str, Any], model: ModelProto) -> Any:
        try:
            representation = self._backend.prepare(model, self._device, **options)
        except Exception as error:
            # A foreign class may raise anything: that means that it cannot run this model.
            raise BackendError(
                f"{self.name} cannot prepare the model: {raised(error)}. Try another executor."
            ) from error
        if representation is None:
            raise BackendError(f"{self.name}.prepare returned None: it only checks models. Try another executor.")
        return representation


class _WrappedModel(Local):
    """A model as an onnx.backend runs it: by position.

    The interface does not say at which positions inputs with a default stand. So the backend gets a model without such
    inputs, one for each choice of fed inputs: a fed input loses its default, any other becomes a plain initializer.
    """

    def __init__(self, name: str, model: ModelProto, represent: Callable[[ModelProto], Any]) -> None:
        self.inputs = graph_inputs(model.graph)
        self.outputs = graph_outputs(model.graph)
        self._name = name
        self._model = model
        self._represent = represent
        self._representations = {frozenset[str](): represent(without_defaults(model, ()))}

    def run(self, feeds: Mapping[str, Any], outputs: Iterable[str] | None = None) -> dict[str, Any]:
        asked = check_outputs(outputs, self.outputs)
        checked = check_feeds(feeds, self.inputs)
        replaced = frozenset(value.name for value in self.inputs if value.has_default and value.name in checked)
        if replaced not in self._representations:
            self._representations[replaced] = self._represent(without_defaults(self._model, replaced))
        arrays = [checked[value.name] for value in self.inputs if value.name in checked]
        try:
            results = self._representations[replaced].run(arrays)
        except Exception as error:
            raise BackendError(f"{self._name} failed on the model: {raised(error)}. Try another executor.") from error
        if not isinstance(results, Iterable):
            raise AnswerError(f"{self._name} returned {of_type(results)} and no list of results: run must return one.")
        values = list(results)
        if len(values) != len(self.outputs):
            due = choices(value.name for value in self.outputs)
            raise AnswerError(f"{self._name} returned {len(values)} results; the model has the outputs {due}.")
        named = dict(zip((value.name for value in self.outputs), values, strict=True))
        return {name: named[name] for name in asked}


def without_defaults(model: ModelProto, fed: Collection[str]) -> ModelProto:
    """Return the model without inputs that have a default: those in `fed` lose it, the others become plain initializers."""
    defaults = {value.name for value in graph_inputs(model.graph) if value.has_default}
    if not defaults:
        return model
    made = ModelProto()
    made.CopyFrom(model)
    made.ir_version = max(made.ir_version, 4)  # before, each initializer was an input
    graph, replaced = made.graph, defaults.intersection(fed)
    for field in (graph.input, graph.initializer, graph.sparse_initializer):
        del field[:]
    graph.input.extend(value for value in model.graph.input if value.name not in defaults - replaced)
    graph.initializer.extend(t for t in model.graph.initializer if t.name not in replaced)
    graph.sparse_initializer.extend(t for t in model.graph.sparse_initializer if t.values.name not in replaced)
    return made
