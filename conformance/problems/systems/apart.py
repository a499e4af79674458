"""An executor in a process of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from onnx import ModelProto

from refgrad.backends import Backend, Prepared
from refgrad.backends.base import ModelLike, graph_inputs, graph_outputs, load_model
from refgrad.conformance.problems.systems import executors
from refgrad.errors import BackendError, WorkerError
from refgrad.worker import SECONDS, Worker


class Apart(Backend):
    """An executor in a process of its own: where it dies or does not end, that is its answer."""

    def __init__(self, name: str, seconds: float = SECONDS) -> None:
        self.name, self._seconds = name, seconds
        self._worker = Worker(seconds)

    def description(self) -> str:
        """The executor's own."""
        return executors.get_executor(self.name).description()

    def prepare(self, model: ModelLike, **options: Any) -> Prepared:
        """Nothing is done before the first run: the executor's options are for that."""
        return _PreparedApart(self, load_model(model), options)

    def run(
        self, model: ModelProto, feeds: Mapping[str, Any], outputs: Iterable[str] | None, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The outputs that the executor computes.

        :raises BackendError: it does not run the model, dies or takes too long.
        """
        return self.in_turn(model, [feeds], outputs, options)[0]

    def in_turn(
        self,
        model: ModelProto,
        feeds: Sequence[Mapping[str, Any]],
        outputs: Iterable[str] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[dict[str, Any]]:
        """The outputs of several runs in one session.

        :raises BackendError: the executor does not run the model, dies or takes too long.
        """
        asked = None if outputs is None else list(outputs)
        fed = [dict(one) for one in feeds]
        self._worker.seconds = self._seconds * len(fed)
        try:
            made: list[dict[str, Any]] = self._worker.call(
                executors.run_in_turn, self.name, model, fed, asked, **options
            )
            return made
        except WorkerError as error:
            raise BackendError(str(error) if error.raised else f"it {error.verdict}: {error}") from error

    def close(self) -> None:
        """End the process."""
        self._worker.close()


class _PreparedApart(Prepared):
    def __init__(self, owner: Apart, model: ModelProto, options: Mapping[str, Any]) -> None:
        self._owner, self._model, self._options = owner, model, options
        self.inputs, self.outputs = graph_inputs(model.graph), graph_outputs(model.graph)

    def run(self, feeds: Mapping[str, Any], outputs: Iterable[str] | None = None) -> dict[str, Any]:
        return self._owner.run(self._model, feeds, outputs, self._options)
