"""Processes on this machine that compute the gradients of parts of a batch for a training in this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from refgrad.backends import Backend, get_backend
from refgrad.backends.onnxruntime import SLEEPING, CpuBackend
from refgrad.errors import FeedError, OptionError, TrainingError, WorkerError
from refgrad.training.many_processes import PartGradient, Sums, added, part_of
from refgrad.training.steps import StepModel
from refgrad.worker import Worker

_THREADS = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
)  # what NumPy's libraries read as they are loaded
_gradient: PartGradient | None = None  # of a process that computes for another one


def sharing(backend: str | Backend, options: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The options of an executor with which so many processes share the cores of this machine.

    Unless `options` say otherwise, ONNX Runtime takes its share of threads, and they sleep between two runs.
    """
    executor = get_backend(backend) if isinstance(backend, str) else backend
    if count == 1 or not isinstance(executor, CpuBackend):
        return dict(options)
    config = SLEEPING | dict(options.get("config") or {})
    return {"threads": _threads(count), **options, "config": config}


def _threads(count: int) -> int:
    """The threads of each of so many processes."""
    return max(1, (os.cpu_count() or 1) // count)


class Workers:
    """The processes that share each batch. The one that makes the object is number 0 of `count`; the others are started.

    :param own: the gradient of this process's part.
    :param backend: an executor, or its name.
    :raises OptionError: the model takes batches of a fixed size, or the executor cannot be pickled.
    """

    def __init__(
        self, step: StepModel, own: PartGradient, backend: str | Backend, options: Mapping[str, Any], count: int
    ) -> None:
        for name, (_, dims) in step.inputs.items():
            if dims and step.sample_axes[name] == 0 and dims[0] is not None:
                raise OptionError(
                    f"The model takes batches of {dims[0]} samples ({name!r}), which {count} processes cannot share. Take one "
                    "process, or export the model with a dynamic first axis (dynamic_shapes of torch.onnx.export)."
                )
        self._own, self._count, self._axes = own, count, step.sample_axes
        self._is_over = False
        threads = str(_threads(count))
        own_threads = {name: os.environ.get(name, threads) for name in _THREADS}
        self._workers = [Worker(threading.TIMEOUT_MAX, environment=own_threads) for _ in range(1, count)]
        self._threads = ThreadPoolExecutor(count - 1)
        started = [
            self._threads.submit(worker.call, _start, step, backend, (rank, count), dict(options))
            for rank, worker in enumerate(self._workers, 1)
        ]
        try:
            for rank, future in enumerate(started, 1):
                self._result(future, rank)
        except BaseException:
            self.close()
            raise

    def sums(self, batch: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> Sums:
        """The sums of `PartGradient.sums` over all parts of a batch.

        :raises FeedError: the batch does not fit the model.
        :raises TrainingError: a process has ended.
        """
        if self._is_over:
            raise TrainingError(
                "The processes of this training have ended. Begin a new one, or resume from a checkpoint."
            )
        read = {name: state[name] for name in self._own.reads}
        parts = [part_of(batch, (rank, self._count), self._axes) for rank in range(self._count)]
        asked = [
            self._threads.submit(_ask, worker, part, read)
            for worker, part in zip(self._workers, parts[1:], strict=True)
        ]
        own = self._own.sums(parts[0], read)
        return added([own, *(self._result(future, rank) for rank, future in enumerate(asked, 1))])

    def _result(self, future: Future[Any], rank: int) -> Any:
        try:
            return future.result()
        except WorkerError as error:
            if error.verdict == "raised" and "FeedError" in error.classes:
                raise FeedError(str(error)) from error
            self._is_over = error.verdict != "raised"
            who = f"Process {rank} (of 0 to {self._count - 1})"
            if error.verdict == "raised":
                raise TrainingError(f"{who} failed: {error}") from error
            raise TrainingError(
                f"{who} failed, so the training stopped: {error}. If memory ran out, take smaller batches or fewer processes."
            ) from error

    def close(self) -> None:
        """End the processes."""
        self._is_over = True
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()


def _ask(worker: Worker, part: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> Sums:
    """The sums of the process, which is not started again: a new one would have no model."""
    if ended := worker.ended:
        raise WorkerError("crashed", ended)
    found: Sums = worker.call(_sums, part, state)
    return found


def _start(step: StepModel, backend: str | Backend, place: tuple[int, int], options: dict[str, Any]) -> None:
    global _gradient
    _gradient = PartGradient(step, backend, place, **options)


def _sums(part: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> Sums:
    assert _gradient is not None
    return _gradient.sums(part, state)
