"""Any `onnx.backend.base.Backend` as a backend of refgrad."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from refgrad.backends.base import (
    Backend,
    ModelLike,
    Prepared,
    check_feeds,
    check_outputs,
    graph_inputs,
    graph_outputs,
    load_model,
)
from refgrad.errors import BackendError


def wrap(onnx_backend: Any, name: str | None = None, device: str = "CPU") -> Backend:
    """Make a backend of `onnx_backend`: a subclass of `onnx.backend.base.Backend`, or a module like one.

    It is called `name`, by default the class's own name.
    """
    if not callable(getattr(onnx_backend, "prepare", None)):
        raise BackendError(
            f"{onnx_backend!r} has no prepare(model, device). Give a subclass of onnx.backend.base.Backend."
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
        proto = load_model(model)
        try:
            representation = self._backend.prepare(proto, self._device, **options)
        except Exception as error:
            # The class is a stranger: anything it raises means that it cannot run this model.
            raise BackendError(
                f"{self.name} cannot prepare the model: {type(error).__name__}: {error}. Try another backend."
            ) from error
        if representation is None:
            raise BackendError(f"{self.name}.prepare returned None: it only checks models. Try another backend.")
        return _WrappedModel(self.name, representation, proto)


class _WrappedModel(Prepared):
    def __init__(self, name: str, representation: Any, model: Any) -> None:
        self.inputs = graph_inputs(model.graph)
        self.outputs = graph_outputs(model.graph)
        self._name = name
        self._representation = representation

    def run(self, feeds: Mapping[str, Any], outputs: Iterable[str] | None = None) -> dict[str, Any]:
        asked = check_outputs(outputs, self.outputs)
        checked = check_feeds(feeds, self.inputs)
        # onnx.backend feeds by position; only a tail of inputs with defaults can be left out.
        given = [value.name in checked for value in self.inputs]
        positions = sum(given)
        if not all(given[:positions]):
            left_out = self.inputs[given.index(False)].name
            raise BackendError(
                f"{self._name} takes feeds by position, so {left_out!r} cannot be left to its default "
                "while a later input is fed. Feed it too."
            )
        try:
            results = self._representation.run([checked[value.name] for value in self.inputs[:positions]])
        except Exception as error:
            raise BackendError(
                f"{self._name} failed on the model: {type(error).__name__}: {error}. Try another backend."
            ) from error
        named = dict(zip((value.name for value in self.outputs), results, strict=True))
        return {name: named[name] for name in asked}
