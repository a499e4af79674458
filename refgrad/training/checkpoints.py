"""A training in one file: weights, what the optimizer keeps, the progress, and the state of what shuffles."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from refgrad.errors import FeedError, OptionError
from refgrad.installing import install
from refgrad.model.writing import replacing
from refgrad.protos.documents import parse_json, record_of, typed
from refgrad.protos.safetensors import read_safetensors
from refgrad.training.schedules import Progress
from refgrad.training.settings import difference
from refgrad.training.steps import StepModel

_FORMAT = "refgrad.checkpoint.2"
_BEST = "best: "
_MOST = 2**53  # epochs, steps and samples: more than anybody trains


@dataclass(frozen=True)
class Checkpoint:
    """A training at a moment.

    `shuffle` is the state of the generator of random numbers when its epoch began, `validation` are the losses on validation
    data so far, and `best` is the state with the lowest of them. `settings` are those that have to be the same when it goes on,
    besides the settings of the step.
    """

    state: dict[str, np.ndarray]
    progress: Progress
    shuffle: dict[str, Any] | None = None
    validation: tuple[float, ...] = ()
    best: dict[str, np.ndarray] | None = None
    settings: dict[str, str] = field(default_factory=dict)


def save_checkpoint(path: str | os.PathLike[str], step: StepModel, checkpoint: Checkpoint) -> None:
    """Write a checkpoint as a safetensors file, which takes the place of an older one when it is complete.

    :raises OutputFileError: the file cannot be written. An older one stays as it was.
    :raises OptionError: safetensors is not installed.
    """
    metadata = {
        "format": _FORMAT,
        "step": step.fingerprint,
        "progress": json.dumps(checkpoint.progress._asdict()),
        "shuffle": json.dumps(checkpoint.shuffle),
        "validation": json.dumps(checkpoint.validation),
        "settings": json.dumps(checkpoint.settings | dict(step.settings)),
    }
    tensors = checkpoint.state | {_BEST + name: value for name, value in (checkpoint.best or {}).items()}
    data = _safetensors().save({n: np.ascontiguousarray(a).reshape(a.shape) for n, a in tensors.items()}, metadata)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def load_checkpoint(
    path: str | os.PathLike[str], step: StepModel, settings: Mapping[str, str] | None = None
) -> Checkpoint:
    """Read a checkpoint of a training with this step.

    :param settings: those that have to be the same, besides the settings of the step.
    :raises FeedError: there is no such file, it is no checkpoint, it is not complete, no training can have written it, or it
        is of another step.
    """
    shown = repr(str(path))
    if not os.path.exists(path):
        raise FeedError(f"There is no checkpoint {shown}.")
    tensors, metadata = read_safetensors(path, FeedError, "is no whole checkpoint", "Take an older one.")
    kind, version = metadata.get("format", "").rpartition(".")[::2]
    if kind == _FORMAT.rpartition(".")[0] and version != _FORMAT.rpartition(".")[2]:
        raise FeedError(f"{shown} is a checkpoint of another version of refgrad. Train anew with another file.")
    if metadata.get("format") != _FORMAT:
        raise FeedError(f"{shown} is a safetensors file, and no checkpoint of refgrad.")
    try:
        progress = record_of(Progress, parse_json(metadata["progress"]), "progress", whole=True)
        _refuse_impossible(progress)
        shuffle = _generator_state(parse_json(metadata["shuffle"]))
        validation = typed(parse_json(metadata["validation"], nonfinite=True), tuple[float, ...], "validation")
        saved = typed(parse_json(metadata["settings"]), dict[str, str], "settings")
        if len(validation) > progress.epoch:
            raise ValueError(f"it has {len(validation)} validation losses in {progress.epoch} epochs")
    except KeyError as error:
        raise FeedError(f"{shown} is no whole checkpoint: it has no {error}. Take an older one.") from error
    except ValueError as error:
        raise FeedError(f"{shown} is no whole checkpoint: {error}. Take an older one.") from error
    if differing := difference(saved, dict(settings or {}) | dict(step.settings)):
        raise FeedError(f"{shown} is a checkpoint of another training: {differing} Give what was given then.")
    state = {name: value for name, value in tensors.items() if name in step.state}
    best = {name[len(_BEST) :]: value for name, value in tensors.items() if name not in step.state}
    if (
        metadata.get("step") != step.fingerprint
        or set(state) != set(step.state)
        or set(best) not in (set(), set(state))
    ):
        raise FeedError(
            f"{shown} is a checkpoint of another training: the model has other nodes or other weights now. Give the model "
            "that was given then."
        )
    if best and not validation:
        raise FeedError(f"{shown} is no whole checkpoint: it has no loss of its best weights. Take an older one.")
    for name, value in (*state.items(), *best.items()):
        due = step.state[name]
        if value.shape != due.shape or value.dtype != due.dtype:
            raise FeedError(f"{shown} has {name!r} as {value.dtype}{list(value.shape)}. Take an older one.")
        if not np.isfinite(value).all():
            raise FeedError(f"{shown} has numbers in {name!r} that are not finite. Take an older one.")
    return Checkpoint(state, progress, shuffle, validation, best or None, saved)


def _refuse_impossible(done: Progress) -> None:
    """Refuse progress that no training can have.

    :raises ValueError: counts are below 0, too large, or do not fit each other.
    """
    counts = {name: value for name, value in done._asdict().items() if isinstance(value, int)}
    for name, value in counts.items():
        if not 0 <= value <= _MOST:
            raise ValueError(f"{name} is {value}")
    if len(done.losses) != done.epoch:
        raise ValueError(f"it has {len(done.losses)} losses of {done.epoch} epochs")
    if not done.epoch <= done.epoch_step <= done.step or not done.epoch_sample <= done.sample:
        raise ValueError(
            f"it has done {done.epoch} epochs, {done.step} steps, {done.epoch_step} of them when this epoch began, and "
            f"{done.sample} samples, {done.epoch_sample} of them when this epoch began"
        )


class _Generator(NamedTuple):
    """The state of a generator of random numbers, as NumPy writes it down."""

    bit_generator: str
    state: dict[str, int]
    has_uint32: int
    uinteger: int


def _generator_state(document: Any) -> dict[str, Any] | None:
    """The state of the generator that shuffles.

    :raises ValueError: it is no such state. With an even increment the generator could give the same number for ever.
    """
    if document is None:
        return None
    found = record_of(_Generator, document, "shuffle")
    inner = found.state
    fits = (
        found.bit_generator == "PCG64"
        and inner.keys() == {"state", "inc"}
        and all(0 <= number < 2**128 for number in inner.values())
        and inner["inc"] % 2 == 1
        and found.has_uint32 in (0, 1)
        and 0 <= found.uinteger < 2**32
    )
    if not fits:
        raise ValueError("shuffle is no state of the generator of random numbers")
    return found._asdict()


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise OptionError(f"Checkpoints are safetensors files. Install safetensors: {install('train')}.") from error
    return safetensors.numpy
