"""A training in one file: weights, what the optimizer keeps, the progress, and the state of what shuffles."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from refgrad.errors import FeedError, OptionError
from refgrad.protos.files import replacing
from refgrad.training.schedules import Progress
from refgrad.training.steps import StepModel

_FORMAT = "refgrad.checkpoint.1"
_BEST = "best: "


@dataclass(frozen=True)
class Checkpoint:
    """A training at a moment.

    `shuffle` is the state of the generator of random numbers when its epoch began, `validation` are the losses on validation
    data so far, and `best` is the state with the lowest of them. `settings` are those that have to be the same when it goes on.
    """

    state: dict[str, np.ndarray]
    progress: Progress
    shuffle: dict[str, Any] | None = None
    validation: tuple[float, ...] = ()
    best: dict[str, np.ndarray] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(path: str | os.PathLike[str], step: StepModel, checkpoint: Checkpoint) -> None:
    """Write a checkpoint as a safetensors file, which takes the place of an older one when it is complete.

    :raises OutputFileError: the file cannot be written. An older one stays as it was.
    :raises OptionError: safetensors is not installed.
    """
    metadata = {
        "format": _FORMAT,
        "step": fingerprint_of(step),
        "progress": json.dumps(checkpoint.progress._asdict()),
        "shuffle": json.dumps(checkpoint.shuffle),
        "validation": json.dumps(checkpoint.validation),
        "settings": json.dumps(checkpoint.settings),
    }
    tensors = checkpoint.state | {_BEST + name: value for name, value in (checkpoint.best or {}).items()}
    data = _safetensors().save({n: np.ascontiguousarray(a).reshape(a.shape) for n, a in tensors.items()}, metadata)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def load_checkpoint(path: str | os.PathLike[str], step: StepModel) -> Checkpoint:
    """Read a checkpoint of a training with this step.

    :raises FeedError: there is no such file, it is no checkpoint or not complete, or it is of another step.
    :raises OptionError: safetensors is not installed.
    """
    place = Path(path)
    if not place.is_file():
        raise FeedError(f"There is no checkpoint {str(place)!r}.")
    reader = _safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(place, "numpy") as opened:
            metadata = opened.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise FeedError(f"{str(place)!r} is a safetensors file, and no checkpoint of refgrad.")
        tensors = reader.load_file(place)
        progress, shuffle, validation = (json.loads(metadata[name]) for name in ("progress", "shuffle", "validation"))
        settings = dict(json.loads(metadata["settings"]))
        done = Progress(**{**progress, "losses": tuple(progress["losses"])})
    except FeedError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise FeedError(f"{str(place)!r} is no whole checkpoint: {error}. Take an older one.") from error
    state = {name: value for name, value in tensors.items() if name in step.state}
    best = {name[len(_BEST) :]: value for name, value in tensors.items() if name not in step.state}
    if metadata.get("step") != fingerprint_of(step) or set(state) != set(step.state) or best.keys() - state.keys():
        raise FeedError(
            f"{str(place)!r} is a checkpoint of another training: the model, the loss, the optimizer, what is trained or an "
            "option was not the same. Give what was given then."
        )
    for name, value in (*state.items(), *best.items()):
        due = step.state[name]
        if value.shape != due.shape or value.dtype != due.dtype:
            raise FeedError(f"{str(place)!r} has {name!r} as {value.dtype}{list(value.shape)}. Take an older one.")
    return Checkpoint(state, done, shuffle, tuple(validation), best or None, settings)


def fingerprint_of(step: StepModel) -> str:
    """What tells the step from others: its model, and the names that are fed back."""
    digest = hashlib.sha256(step.model.SerializeToString(deterministic=True))
    digest.update(json.dumps(sorted(step.next.items())).encode())
    return digest.hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise OptionError("Checkpoints are safetensors files. Install it: pip install 'refgrad[train]'.") from error
    return safetensors.numpy
