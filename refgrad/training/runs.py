"""A whole training: epochs with shuffled batches, validation, checkpoints, and an end before the last epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from refgrad.errors import FeedError, OptionError, OutputFileError, TrainingError, counted, of_type
from refgrad.notices import notice
from refgrad.ranges import checked
from refgrad.training.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from refgrad.training.data import Data, ahead
from refgrad.training.precision import SCALE, UPDATES
from refgrad.training.settings import settings_of
from refgrad.training.training import Training

_RANGES = {
    "epochs": "epochs",
    "size": "batch_size",
    "patience": "patience",
    "every": "checkpoint_every",
    "seed": "seed",
}  # the rows of refgrad.ranges


@dataclass
class Run:
    """A training with its data.

    :param epochs: the number of epochs, including those that a checkpoint has done.
    :param seed: the seed of the order of the samples; None: they are not shuffled.
    :param validation: samples to evaluate on after each epoch.
    :param patience: end when this many epochs have not lowered the loss on `validation`, with the weights of the best epoch.
    :param checkpoint: a file that is written after each epoch, and every `every` steps.
    :param resume: go on from the checkpoint, if there is one.
    :param notify: called after each step with the run.
    :raises OptionError: an option does not fit.
    :raises FeedError: the checkpoint is one of another training.
    :raises OutputFileError: the checkpoint lies in the folder of the data.
    """

    training: Training
    data: Data
    epochs: int = 10
    size: int = 32
    seed: int | None = 0
    validation: Data | None = None
    patience: int | None = None
    checkpoint: str | os.PathLike[str] | None = None
    every: int | None = None
    resume: bool = False
    notify: Callable[[Run], None] | None = None
    validation_losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, row in _RANGES.items():
            if (value := getattr(self, name)) is not None:
                checked(row, value, name)
        if self.patience is not None and self.validation is None:
            raise OptionError(f"patience={self.patience} needs validation=[...].")
        if (self.every is not None or self.resume) and self.checkpoint is None:
            what = "resume=True" if self.resume else "Writing the state every few steps"
            raise OptionError(f"{what} needs checkpoint='FILE'.")
        if not isinstance(self.training, Training):
            raise OptionError(f"training is a Training, such as Training(step, 0.01), not {of_type(self.training)}.")
        for name in ("data", "validation"):
            given = getattr(self, name)
            if not isinstance(given, Data) and (name == "data" or given is not None):
                raise OptionError(f"{name} is what open_data(step, source) returns, not {of_type(given)}.")
        for place in (self.data.folder, None if self.validation is None else self.validation.folder):
            if self.checkpoint is not None and place is not None and _is_within(Path(self.checkpoint), place):
                raise OutputFileError(
                    f"The checkpoint {os.fspath(self.checkpoint)!r} lies in the folder of the data, {str(place)!r}. Name a "
                    "file elsewhere."
                )
        self._rng = None if self.seed is None else np.random.default_rng(self.seed)
        self._begun: dict[str, Any] | None = None
        self._best: tuple[float, dict[str, np.ndarray]] | None = None
        if self.resume and self.checkpoint is not None and Path(self.checkpoint).exists():
            self._go_on(self.checkpoint)

    def _go_on(self, path: str | os.PathLike[str]) -> None:
        found = load_checkpoint(path, self.training.step, self._settings)
        if found.progress.epoch > self.epochs:
            raise OptionError(
                f"The checkpoint {os.fspath(path)!r} has done {counted(found.progress.epoch, 'epoch')}. Give "
                f"epochs={found.progress.epoch} to write its model, or more to go on."
            )
        if (self._rng is None) != (found.shuffle is None):
            raise FeedError(f"{os.fspath(path)!r} is no whole checkpoint: its order of samples is not known.")
        if self._rng is not None and found.shuffle is not None:
            self._rng.bit_generator.state = found.shuffle
        self.training.go_on(found.state, found.progress)
        self.validation_losses += found.validation
        if found.best is not None and self.patience is not None:
            self._best = min(self.validation_losses), found.best

    def run(self) -> list[float]:
        """Train: the mean loss of each epoch.

        :raises FeedError: the data does not fit.
        :raises TrainingError: a loss is not finite, or there are fewer steps than an update accumulates. The last
            checkpoint stays as it was.
        :raises OutputFileError: a checkpoint cannot be written.
        """
        training = self.training
        while training.progress.epoch < self.epochs and not self._is_over():
            self._begun = None if self._rng is None else dict(self._rng.bit_generator.state)
            chosen = self.data.batches(self.size, self._rng)
            self._skip(chosen, training.progress.step - training.progress.epoch_step)
            training.epoch(ahead(chosen), self._after_step)
            if self.validation is not None:
                loss = self._validated(self.validation)
                self.validation_losses.append(loss)
                if self._best is None or loss < self._best[0]:
                    self._best = loss, training.state
            self._begun = None if self._rng is None else dict(self._rng.bit_generator.state)
            self._save()
        if not self.updates:
            if training.progress.step >= training.step.accumulate:
                raise TrainingError(
                    f"No weight has changed: a gradient was not finite in each of {training.progress.step} updates, and the "
                    f"loss scale fell to {float(training.state[SCALE]):g}. Give more epochs, or a smaller loss scale."
                )
            raise TrainingError(
                f"No weight has changed: accumulate={training.step.accumulate} updates once in so many steps, and there were "
                f"{training.progress.step}. Accumulate fewer steps, or give more epochs."
            )
        now, losses = training.weights, training.losses
        if self.patience is not None and self._best is not None:
            training.go_on(self._best[1], training.progress)
        if all(np.array_equal(now[name], value) for name, value in training.step.weights.items()):
            notice(
                f"No weight has changed in {counted(training.progress.step, 'step')}: the gradients were 0, or the changes "
                "were smaller than the rounding of the weights. Take a larger learning rate, or look for layers that are "
                "saturated."
            )
        elif losses[-1] > losses[0]:
            notice(
                f"The loss rose from {losses[0]:.6g} in the first epoch to {losses[-1]:.6g} in the last. Take a smaller "
                "learning rate, or clip the gradient."
            )
        return losses

    def _validated(self, data: Data) -> float:
        """The loss on the validation data."""
        try:
            return self.training.evaluate(data.batches(self.size))
        except FeedError as error:
            raise FeedError(f"Validation data: {error}") from error

    def _skip(self, batches: Iterator[Any], count: int) -> None:
        """Leave out the batches of this epoch that were done before the checkpoint.

        :raises FeedError: the data has fewer.
        """
        for done in range(count):
            if next(batches, None) is None:
                raise FeedError(
                    f"The checkpoint {str(self.checkpoint)!r} has done {count} steps of its epoch, and the data has {done} "
                    "batches. Give the data that was given then, or take another checkpoint."
                )

    @property
    def best_epoch(self) -> int:
        """The epoch, from 1, with the lowest loss on validation data; the last one without such losses."""
        return int(np.argmin(self.validation_losses)) + 1 if self.validation_losses else self.training.progress.epoch

    def _is_over(self) -> bool:
        if self.patience is None or not self.validation_losses:
            return False
        best = int(np.argmin(self.validation_losses))
        return len(self.validation_losses) - 1 - best >= self.patience

    def _after_step(self) -> None:
        if self.every is not None and self.training.progress.step % self.every == 0:
            self._save()
        if self.notify is not None:
            self.notify(self)

    def _save(self) -> None:
        if self.checkpoint is None:
            return
        training, best = self.training, self._best
        state = training.state
        if broken := next((name for name, value in state.items() if not np.isfinite(value).all()), ""):
            raise TrainingError(
                f"{broken!r} is not finite after step {training.progress.step}. Take a smaller learning rate, or clip the "
                "gradient."
            )
        kept = Checkpoint(
            state,
            training.progress,
            self._begun,
            tuple(self.validation_losses),
            best[1] if best and self.patience is not None else None,
            self._settings,
        )
        save_checkpoint(self.checkpoint, training.step, kept)

    @property
    def updates(self) -> int:
        """How many times the weights were changed: once per step, or once per `accumulate` steps.

        Steps with an overflow change nothing.
        """
        if UPDATES in self.training.step.state:
            return int(self.training.state[UPDATES])
        return self.training.progress.step // self.training.step.accumulate

    @cached_property
    def _data_settings(self) -> dict[str, str]:
        held = self.validation
        return {
            "validation": "no validation data" if held is None else f"validation data of {held.description}",
            "data": f"training data of {self.data.description}",
        }

    @property
    def _settings(self) -> dict[str, str]:
        """The settings that have to be the same for a training to go on as if it had not stopped."""
        return {
            "size": f"size={self.size}",
            "seed": "samples in their order" if self.seed is None else f"seed={self.seed}",
            **self._data_settings,
            **settings_of("schedule", self.training.schedule),
        }


def _is_within(path: Path, folder: Path) -> bool:
    """True if the file at `path` lies in `folder`, or in a folder within, whatever names lead there."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
