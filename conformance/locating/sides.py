"""The sides of a comparison: who builds a gradient and what runs it, or tensors that somebody recorded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.backends import Backend, Prepared
from refgrad.backends.base import ModelLike, graph_inputs, graph_outputs, load_model
from refgrad.backends.numpy import NumpyBackend
from refgrad.backends.numpy.backend import NumpyModel
from refgrad.conformance.case import Case
from refgrad.conformance.judge.running.sources import in_dtype
from refgrad.conformance.locating.recordings import Recording, read_recording
from refgrad.conformance.problems.observation import Built
from refgrad.conformance.problems.problem import Problem
from refgrad.conformance.problems.systems import executors
from refgrad.conformance.problems.systems.apart import Apart
from refgrad.conformance.problems.systems.builders import CrashError, attempt, usable_builder
from refgrad.errors import (
    AnswerError,
    BackendError,
    BuilderError,
    OptionError,
    RefgradError,
    WorkerError,
    choices,
    of_type,
    raised,
)
from refgrad.model.external import ModelSource
from refgrad.worker import Worker

PRECISIONS = ("float16", "bfloat16", "float32", "float64")
INTERPRETER = "numpy"
_FORMS = (
    "Give builder@executor, such as refgrad@ort-cpu or package.module:function@numpy:float64. Or give a recording: a .npz or "
    ".safetensors file, or a folder of .pb files"
)
_TYPE = re.compile(r"[a-z]+\d+|double|single|half")  # text that is meant as a precision
Build = Callable[[Problem], Built]


@dataclass(frozen=True)
class Live:
    """A builder, the executor that runs its gradient, and the float type that both compute in, "" for the model's own.

    Both are names of the suite, "package.module:attribute", or objects: a function of a `Problem`, a `Backend`.
    """

    builder: str | Build
    executor: str | Backend
    precision: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.builder, str):
            usable_builder(self.builder)
        if isinstance(self.executor, str):
            executors.get_executor(self.executor)
        if self.precision not in ("", *PRECISIONS):
            raise OptionError(f"{self.precision!r} is not a precision. Give one of {choices(PRECISIONS)}, or none.")

    def __str__(self) -> str:
        builder = self.builder if isinstance(self.builder, str) else getattr(self.builder, "__name__", "a function")
        executor = self.executor if isinstance(self.executor, str) else self.executor.name
        return f"{builder}@{executor}" + (f":{self.precision}" if self.precision else "")

    @property
    def names(self) -> tuple[str, ...]:
        """The builder and the executor, if they have names."""
        return tuple(one for one in (self.builder, self.executor) if isinstance(one, str))

    @cached_property
    def backend(self) -> Backend:
        """The executor that runs models: the interpreter or a given `Backend` here, any other in a process of its own."""
        if isinstance(self.executor, Backend):
            return guarded(self.executor)
        if self.executor != INTERPRETER:
            return Apart(self.executor)
        return _InDouble() if self.precision == "float64" else NumpyBackend()

    @property
    def recast(self) -> str:
        """The float type that the model is written in before it is differentiated; "" where it stays as it is."""
        return "" if self.executor == INTERPRETER and self.precision == "float64" else self.precision

    @cached_property
    def _worker(self) -> Worker:
        return Worker()

    def close(self) -> None:
        """End the processes of the builder and the executor, if there are any; they are started again when they are needed."""
        if isinstance(backend := self.__dict__.get("backend"), Apart):
            backend.close()
        if (worker := self.__dict__.get("_worker")) is not None:
            worker.close()

    def build(self, problem: Problem) -> Built:
        """The gradient that the builder makes.

        :raises BuilderError: it refuses.
        :raises AnswerError: it made something else than a gradient.
        :raises CrashError: it raised, or its process ended.
        """
        if not isinstance(self.builder, str):
            built = self.builder(problem)
            if not isinstance(built, Built):
                raise AnswerError(
                    f"it returned {of_type(built)} and no Built, which a function of a problem must return"
                )
            return built
        if self.builder.startswith("refgrad"):
            return attempt(self.builder, problem)
        try:
            made: Built = self._worker.call(attempt, self.builder, problem)
            return made
        except WorkerError as error:
            kinds: dict[str, type[Exception]] = {"BuilderError": BuilderError, "AnswerError": AnswerError}
            if error.raised == "BuilderError":
                raise BuilderError("refused", str(error)) from error
            raise kinds.get(error.raised, CrashError)(str(error)) from error


Side = Live | Recording


def side_of(given: str | Side | Mapping[str, Any] | Path) -> Side:
    """The side that a text names: `builder@executor[:precision]`, or the path of a recording.

    :raises OptionError: it names none.
    :raises FeedError: the recording cannot be read.
    """
    if isinstance(given, Live | Recording):
        return given
    if isinstance(given, Mapping):
        return Recording.of({name: np.asarray(value) for name, value in given.items()}, "recorded")
    if Path(given).exists():
        return read_recording(given)
    text = str(given)
    builder, at, rest = text.partition("@")
    if not at or not builder or not rest:
        raise OptionError(f"{text!r} is neither a side nor a file. {_FORMS}.")
    executor, _, precision = rest.rpartition(":")
    if precision not in PRECISIONS:
        if ":" in executor or (executor in executors.executor_names() and _TYPE.fullmatch(precision)):
            raise OptionError(
                f"{text!r} ends in {precision!r}, which is not a precision. Give one of {choices(PRECISIONS)}, or none."
            )
        executor, precision = rest, ""
    return Live(builder, executor, precision)


def in_precision(model: ModelProto, feeds: Mapping[str, Any], precision: str) -> tuple[ModelProto, dict[str, Any]]:
    """The model and its feeds in another float type.

    :raises OptionError: the model cannot be written in it, or has no floats that are fed.
    """
    case = Case("model", model, dict(feeds))
    made = case if not precision or case.dtype == precision else in_dtype(case, precision, exact=False)
    if made is None:
        raise OptionError(
            f"The model cannot be computed in {precision}: one of its operators does not support it, or it has no float input."
        )
    return made.model, dict(made.feeds)


def guarded(backend: Backend) -> Backend:
    """The executor, with errors and wrong answers as errors of refgrad: a stranger's object raises and returns anything."""
    is_known = isinstance(backend, NumpyBackend | Apart | _Guarded) or type(backend).__module__.startswith("refgrad.")
    return backend if is_known else _Guarded(backend)


class _Guarded(Backend):
    """A stranger's backend."""

    def __init__(self, backend: Backend) -> None:
        self.name, self._backend = backend.name, backend

    def description(self) -> str:
        """The executor's own."""
        return self._backend.description()

    def prepare(self, model: ModelLike, **options: Any) -> Prepared:
        """Prepare the model.

        :raises BackendError: the executor raises anything.
        """
        proto = load_model(model, lift=True)
        try:
            prepared = executors.runnable(self.name, self._backend.prepare(proto, **options))
            return _PreparedGuarded(prepared, proto, self.name)
        except RefgradError:
            raise
        except Exception as error:
            raise BackendError(f"{self.name} raised {raised(error)} while it prepared the model.") from error


class _PreparedGuarded(Prepared):
    def __init__(self, prepared: Prepared, model: ModelProto, name: str) -> None:
        self._prepared, self._model, self._name = prepared, model, name
        self.inputs, self.outputs = graph_inputs(model.graph), graph_outputs(model.graph)

    def run(self, feeds: Mapping[str, Any], outputs: Iterable[str] | None = None) -> dict[str, Any]:
        return executors.answer(self._name, self._prepared, self._model, feeds, outputs)


class _InDouble(NumpyBackend):
    """The interpreter in double: the model stays as it is."""

    def prepare(self, model: ModelSource, *arguments: Any, **options: Any) -> NumpyModel:
        return super().prepare(model, precision="float64")
