"""The commands that train, or write what trains."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Unpack

import typer
from onnx import ModelProto
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from refgrad.cli.commands import choice
from refgrad.cli.numbers import number
from refgrad.cli.options import Backend, Json, Model, Result, Seed, names, with_conventions, with_groups
from refgrad.cli.output import AGREES, INTERRUPTED, Files, is_quiet, print_json, say
from refgrad.conformance.problems.systems.executors import get_executor
from refgrad.errors import FeedError, OptionError, TrainingError, counted
from refgrad.interruption import OutOfTime
from refgrad.model.reading import read
from refgrad.model.writing import replacing, save_gradient
from refgrad.protos.traverse import fresh
from refgrad.ranges import checked
from refgrad.tables.conventions import ConventionOptions
from refgrad.training.adapters import adapters_of
from refgrad.training.adapters import lora as add_adapters
from refgrad.training.data import Arrays, Data
from refgrad.training.losses import LOSSES
from refgrad.training.optimizers import OPTIMIZERS, Optimizer, optimizer_class
from refgrad.training.precision import DYNAMIC
from refgrad.training.runs import Run
from refgrad.training.saving import save_trained
from refgrad.training.schedules import Adaptive, Constant, Cosine, InverseScaling, Schedule, Warmup
from refgrad.training.sources import open_data
from refgrad.training.step import BATCH_NORMS, DROPOUTS, step_model
from refgrad.training.steps import StepModel
from refgrad.training.training import Training

_SAMPLES = 32  # of a step
_RANK = 8  # of adapters
_WIDTH, _HEIGHT = 60, 10  # of the curve
_SCHEDULES: dict[str, Callable[[float, int], Schedule]] = {  # of a rate, and the number of epochs
    "constant": lambda rate, epochs: Constant(rate),
    "cosine": lambda rate, epochs: Cosine(rate, period=epochs),
    "invscaling": lambda rate, epochs: InverseScaling(rate),
    "adaptive": lambda rate, epochs: Adaptive(rate),
}


def _taking(setting: str) -> list[str]:
    """The names of the optimizers that have this setting."""
    return [name for name, kind in OPTIMIZERS.items() if setting in kind.__dataclass_fields__]


def _listed(names: Iterable[str], conjunction: str = "or") -> str:
    *others, last = names
    return f"{', '.join(others)} {conjunction} {last}" if others else last


_Trainable = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help="Weights to train: names, or patterns such as 'head.*', separated by commas. May be repeated.",
        show_default="every parameter that `refgrad weights` lists",
    ),
]
_Freeze = Annotated[
    list[str] | None,
    typer.Option(metavar="NAMES", help="Weights that are not trained, written like --trainable.", show_default="none"),
]
_Optimizer = Annotated[str, choice(OPTIMIZERS, help="The optimizer.", hint="One of your own needs --import MODULE.")]


@dataclass(frozen=True)
class ObjectiveOptions:
    """The options that say what is minimised."""

    loss: Annotated[
        str,
        choice(
            (*LOSSES, "none"),
            help="The loss, which compares the output with the label. cross_entropy takes logits and class numbers. log_loss "
            "takes probabilities and class numbers. log takes the probability of the second of two classes, and labels 0 or "
            "1. binary_cross_entropy_with_logits takes its raw score, before a sigmoid, and the same labels. l1 and l2 are "
            "short names of absolute_error and squared_error, and elastic is the mean of both. huber is half of the square up "
            "to a difference of 1, and linear beyond. none: the output is the loss.",
        ),
    ] = "squared_error"
    loss_setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBERS",
            help="A setting of the loss: class_weights (a number per class, separated by commas), ignore_index and "
            "label_smoothing of cross_entropy; delta of huber; l1_weight and l2_weight of elastic; eps of log. May be "
            "repeated.",
            show_default="none",
        ),
    ] = None
    label: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The array of --data with the expected values.", show_default="label or y"),
    ] = None
    of: Annotated[
        str | None,
        typer.Option(
            "--of",
            metavar="NAME",
            help="The output to compare with the label. With --loss none, the output that is the loss.",
        ),
    ] = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the loss by name.

        :raises OptionError: one has no name or no number.
        """
        found: dict[str, Any] = {}
        for one in self.loss_setting or ():
            name, _, text = one.partition("=")
            try:
                numbers = [float(part) if set(part) & set(".e") else int(part) for part in text.split(",")]
            except ValueError as error:
                raise OptionError(
                    f"--loss-setting {one!r}: give a name and numbers, as in 'ignore_index=-100'."
                ) from error
            found[name] = numbers if name == "class_weights" or len(numbers) > 1 else numbers[0]
        return found


@dataclass(frozen=True)
class StepObjectiveOptions(ObjectiveOptions):
    """The same options for a model of one step, whose label is an input."""

    label: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The input of the new model for the expected values.", show_default="label"),
    ] = None


@dataclass(frozen=True)
class WeightOptions:
    """The options that say what is trained."""

    trainable: _Trainable = None
    freeze: _Freeze = None
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Train low-rank adapters of these weights, written like --trainable, and merge them at the end. Other weights "
            "are trained only if --trainable names them.",
        ),
    ] = None
    rank: Annotated[int | None, number("rank", help="The rank of the adapters.", show_default=f"{_RANK}")] = None

    def __post_init__(self) -> None:
        if self.rank is not None and not self.lora:
            raise OptionError(
                f"--rank {self.rank} needs --lora NAMES: it is the rank of the adapters. Give both, or leave it out."
            )


@dataclass(frozen=True)
class RateOptions:
    """The options of the learning rate."""

    rate: Annotated[
        float | None, number("rate", help="The learning rate.", show_default="0.001; 0.01 for sgd and adagrad")
    ] = None
    schedule: Annotated[
        str,
        choice(
            _SCHEDULES,
            help="How the rate changes. cosine: falls to 0 at the last epoch. "
            "invscaling: rate / (epoch + 1)^0.25. adaptive: divided by 5 when the loss no longer falls.",
        ),
    ] = "constant"
    warmup: Annotated[
        int, number("warmup", help="The number of steps at the start in which the learning rate rises.")
    ] = 0

    def of(self, optimizer: Optimizer, epochs: int) -> Schedule:
        """The schedule of a training of so many epochs."""
        rate = optimizer.rate if self.rate is None else self.rate
        schedule = _SCHEDULES[self.schedule](rate, epochs)
        return Warmup(length=self.warmup, after=schedule, unit="step") if self.warmup else schedule


@dataclass(frozen=True)
class UpdateOptions:
    """The options that say how a gradient changes the weights."""

    momentum: Annotated[
        float | None,
        number(
            "momentum",
            help=f"The momentum, for {_listed(_taking('momentum'), 'and')}.",
            show_default="0.9 for nesterov, else 0",
        ),
    ] = None
    eps: Annotated[
        float | None,
        number(
            "eps",
            "--eps",
            "--epsilon",
            help=f"The number that keeps the divisor of an update above 0, for {_listed(_taking('eps'), 'and')}.",
            show_default="1e-8; 1e-10 for adagrad",
        ),
    ] = None
    weight_decay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[PATTERN=]NUMBER",
            help="The weight decay, of all weights or of those that the pattern matches. May be repeated.",
            show_default="0.01 for adamw, else 0",
        ),
    ] = None
    penalty: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=L1,L2",
            help="Add L1·Σ|w| + L2·Σw² to the loss, for the weights w that the pattern matches. May be repeated.",
        ),
    ] = None
    clip_norm: Annotated[
        float | None, number("clip_norm", help="Scale the gradient down to this norm if its norm is larger.")
    ] = None
    clip_value: Annotated[
        float | None, number("clip_value", help="Clip each element of the gradient to between -NUMBER and NUMBER.")
    ] = None
    accumulate: Annotated[
        int,
        number(
            "accumulate",
            metavar="STEPS",
            help="Update the weights once per STEPS batches, by the mean of their gradients.",
        ),
    ] = 1
    loss_scale: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|dynamic",
            help="Compute the gradient of the loss times this number, so that small gradients do not become 0 in float16. "
            "dynamic: half of it after a gradient that is not finite, which updates nothing, and twice as much after 2000 "
            "other steps.",
            show_default="dynamic for float16 weights, else none",
        ),
    ] = None

    def by(self, name: str) -> Optimizer:
        """The optimizer of this name, with its momentum, its ε and the weight decay of all weights.

        :raises OptionError: there is no such optimizer, or it has no such setting.
        """
        given = {"momentum": self.momentum, "eps": self.eps, "weight_decay": self.decays.get("")}
        settings: dict[str, Any] = {setting: value for setting, value in given.items() if value is not None}
        kind = optimizer_class(name)
        for setting in settings:
            if name not in (those := _taking(setting)):
                option = setting.replace("_", "-")
                raise OptionError(f"--{option} does not work with {name}, only with {_listed(those, 'and')}.")
        return kind(**settings)

    @property
    def scale(self) -> float | str | None:
        """The loss scale.

        :raises OptionError: it is neither a number in its range nor "dynamic".
        """
        if self.loss_scale in (None, DYNAMIC):
            return self.loss_scale
        try:
            scale = float(self.loss_scale or "")
        except ValueError as error:
            raise OptionError(f"--loss-scale {self.loss_scale!r}: give a number above 0, or {DYNAMIC}.") from error
        return float(checked("loss_scale", scale, "--loss-scale"))

    @property
    def decays(self) -> dict[str, float]:
        """Weight decays by pattern; the pattern "" stands for all weights.

        :raises OptionError: one has no number, or one out of range.
        """
        found = {}
        for one in self.weight_decay or ():
            pattern, _, amount = one.rpartition("=")
            try:
                found[pattern] = float(amount)
            except ValueError as error:
                raise OptionError(
                    f"--weight-decay {one!r}: give a number, or a pattern and a number, as in '*.bias=0'."
                ) from error
            checked("weight_decay", found[pattern], "--weight-decay")
        return found

    @property
    def penalties(self) -> dict[str, tuple[float, float]]:
        """The factors l1 and l2 by pattern.

        :raises OptionError: one has no two numbers, or one out of range.
        """
        found = {}
        for one in self.penalty or ():
            pattern, _, amounts = one.rpartition("=")
            try:
                l1, l2 = map(float, amounts.split(","))
            except ValueError as error:
                raise OptionError(
                    f"--penalty {one!r}: give a pattern and two numbers, as in 'head.*=0,1e-4'."
                ) from error
            found[pattern] = checked("penalty", l1, "--penalty"), checked("penalty", l2, "--penalty")
        return found


@dataclass(frozen=True)
class LayerOptions:
    """The options of layers that compute something else in a training."""

    batch_norm: Annotated[
        str,
        choice(
            BATCH_NORMS,
            help="frozen: normalize by the running statistics. training: normalize by the batch, "
            "and update the running statistics.",
        ),
    ] = "frozen"
    dropout: Annotated[
        str, choice(DROPOUTS, help="off: nothing is dropped. training: each step drops different elements.")
    ] = "off"


@dataclass(frozen=True)
class ValidationOptions:
    """The options of an evaluation after each epoch."""

    validation: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Evaluate on these data after each epoch: files as for --data, or the part of --data to set aside, such as "
            "0.1.",
        ),
        Files.READ,
    ] = None
    patience: Annotated[
        int | None,
        number("patience", help="Stop after N epochs without a better validation loss, and keep the best weights."),
    ] = None

    def __post_init__(self) -> None:
        if self.validation == "":
            raise OptionError(
                "--validation '' is neither a part between 0 and 1 nor a file. Leave it out, or give one."
            )
        if self.part is not None:
            checked("validation", self.part, "--validation")

    @property
    def part(self) -> float | None:
        """The part of the data to keep back; None where nothing is, or where a file is named."""
        try:
            return None if self.validation is None else float(self.validation)
        except ValueError:
            return None

    def split(self, step: StepModel, given: Data, label: str | None, seed: int) -> tuple[Data, Data | None]:
        """The data to train on, and the data to evaluate on."""
        if self.part is None:
            return given, None if self.validation is None else _validation_data(step, self.validation, label)
        if not isinstance(given, Arrays):
            raise OptionError(
                f"--validation {self.validation} keeps back a part of an .npz file or of a folder of .npy files, and --data is "
                "something else. Give a file or a folder of validation data."
            )
        return given.split(self.part, seed)


def _validation_data(step: StepModel, path: str, label: str | None) -> Data:
    try:
        return open_data(step, path, label)
    except FeedError as error:
        raise FeedError(f"Validation data: {error}") from error


@dataclass(frozen=True)
class CheckpointOptions:
    """The options of the file with the state of a training."""

    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the state of the training to a safetensors file after each epoch."),
        Files.JOURNAL,
    ] = None
    checkpoint_every: Annotated[
        int | None,
        number("checkpoint_every", metavar="STEPS", help="Also write the checkpoint after every STEPS steps."),
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint, if there is one.")] = False

    def __post_init__(self) -> None:
        if self.checkpoint is not None and self.checkpoint.exists() and not self.resume:
            raise OptionError(
                f"The checkpoint {str(self.checkpoint)!r} exists. Continue from it with --resume, or name another file."
            )


@with_conventions
@with_groups
def train(
    model: Model,
    output: Result,
    data: Annotated[
        Path,
        typer.Option(
            metavar="DATA",
            help="The inputs and the expected values by name: a .npz, .parquet or .arrow file, or a folder of such files or "
            "of .npy files.",
        ),
        Files.READ,
    ],
    *,
    objective: ObjectiveOptions,
    weights: WeightOptions,
    optimizer: _Optimizer = "adamw",
    rate: RateOptions,
    update: UpdateOptions,
    epochs: Annotated[int, number("epochs", help="The number of passes over the data.")] = 10,
    layers: LayerOptions,
    batch_size: Annotated[
        int | None,
        number("batch_size", help="Samples per step.", show_default=f"{_SAMPLES}, or the model's fixed batch size"),
    ] = None,
    processes: Annotated[
        int,
        number(
            "processes",
            help="The number of processes that share each batch. Dropout and BatchNormalization in training mode give other "
            "weights than one process.",
        ),
    ] = 1,
    validation: ValidationOptions,
    checkpoint: CheckpointOptions,
    shuffle: Annotated[bool, typer.Option("--shuffle/--no-shuffle", help="Shuffle the samples in each epoch.")] = True,
    seed: Seed = 0,
    backend: Backend = "numpy",
    as_json: Json = False,
    **conventions: Unpack[ConventionOptions],
) -> None:
    """Train MODEL on data, and write it with its new weights."""
    chosen = update.by(optimizer)
    proto, trainable = _with_adapters(read(model, lift=False), weights, seed)
    step = _step(
        proto,
        objective,
        chosen,
        update,
        layers,
        trainable=trainable,
        freeze=names(weights.freeze),
        label=fresh("label", {value.name for value in proto.graph.input}),
        seed=seed,
        data_beside=model,
        **conventions,
    )
    given, held = validation.split(step, open_data(step, data, objective.label), objective.label, seed)
    training = Training(step, rate.of(chosen, epochs), get_executor(backend), processes=processes)
    size = batch_size or step.fixed_size or _SAMPLES
    run = Run(
        training, given, epochs, size, seed if shuffle else None, held, validation.patience, checkpoint.checkpoint,
        checkpoint.checkpoint_every, checkpoint.resume,
    )  # fmt: skip
    try:
        with contextlib.closing(training):
            _shown(run, is_quiet() or as_json)
    except KeyboardInterrupt:
        say(f"refgrad: Interrupted after step {training.progress.step}. {_left(run)}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except OutOfTime as over:
        said = (
            f"--max-seconds stopped the training after step {training.progress.step}. {str(output)!r} is not written."
        )
        raise OutOfTime(f"{said} {_left(run)}") from over
    except TrainingError as error:
        raise TrainingError(f"{error} {str(output)!r} is not written. {_left(run)}") from error
    data_file = save_trained(training, proto, output, model, merge=bool(weights.lora))
    result = _result(run, output, data, data_file)
    if as_json:
        print_json(result)
    else:
        _summary(result)
    raise typer.Exit(AGREES)


@with_conventions
@with_groups
def training_model(
    model: Model,
    output: Result,
    *,
    objective: StepObjectiveOptions,
    trainable: _Trainable = None,
    freeze: _Freeze = None,
    optimizer: _Optimizer = "adamw",
    update: UpdateOptions,
    layers: LayerOptions,
    seed: Seed = 0,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the feeds of the first step, an .npz file: the weights and the state of the optimizer.",
        ),
        Files.WRITTEN,
    ] = None,
    as_json: Json = False,
    **conventions: Unpack[ConventionOptions],
) -> None:
    """Write one step of training as a model, for any runtime. It computes the loss, the gradient and the new weights.

    Feed its outputs to the inputs of the next step. The metadata key `refgrad.training` says which output goes to which input.
    """
    label = "label" if objective.label is None else objective.label
    step = _step(
        model, objective, update.by(optimizer), update, layers, trainable=names(trainable),
        freeze=names(freeze), label=label, seed=seed, **conventions,
    )  # fmt: skip
    save_gradient(step.model, output, model)
    if state is not None:
        from refgrad.conformance.problems.feeds import write_arrays

        with replacing(state) as temporary:
            write_arrays(temporary, step.state)
    if as_json:
        print_json(
            {"output": str(output), "data": step.data, "label": step.label, "loss": step.loss, "next": step.next}
        )
        return
    say(f"{output}: {counted(len(step.model.graph.node), 'node')}; the output {step.loss!r} is the loss")
    for name, following in step.next.items():
        say(f"{following!r} is {name!r} of the next step")


def _with_adapters(model: ModelProto, weights: WeightOptions, seed: int) -> tuple[ModelProto, list[str] | None]:
    """The model with the adapters that are asked for, and the names of the weights to train; None stands for all."""
    trainable = names(weights.trainable)
    if not weights.lora:
        return model, trainable
    model = add_adapters(model, names(weights.lora) or (), weights.rank or _RANK, seed=seed)
    return model, [*trainable, *adapters_of(model)] if trainable else None


def _step(
    model: ModelProto | Path,
    objective: ObjectiveOptions,
    optimizer: Optimizer,
    update: UpdateOptions,
    layers: LayerOptions,
    **options: Any,
) -> StepModel:
    loss = None if objective.loss == "none" else objective.loss
    return step_model(
        model, loss, optimizer, output=objective.of, loss_settings=objective.settings, penalty=update.penalties,
        weight_decay={pattern: number for pattern, number in update.decays.items() if pattern},
        clip_norm=update.clip_norm, clip_value=update.clip_value, accumulate=update.accumulate,
        loss_scale=update.scale, batch_norm=layers.batch_norm, dropout=layers.dropout, **options,
    )  # fmt: skip


def _left(run: Run) -> str:
    """The remark on what a run keeps that ends early."""
    if run.checkpoint is None:
        return "There is no checkpoint. --checkpoint FILE writes one after each epoch."
    if not Path(run.checkpoint).exists():
        return f"The checkpoint {str(run.checkpoint)!r} was not written yet."
    return f"The checkpoint {str(run.checkpoint)!r} has the last good weights; --resume goes on with them."


def _shown(run: Run, quiet: bool) -> None:
    """Run with a bar of the epochs and the loss, where a terminal shows it."""
    if quiet or not sys.stderr.isatty():
        run.run()
        return
    from rich.console import Console

    columns = (
        TextColumn("epoch"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=run.epochs, loss="")

        def shown(run: Run) -> None:
            done = run.training.progress
            count = done.sample - done.epoch_sample
            progress.update(task, completed=done.epoch, loss=f"loss {done.total / max(count, 1):.6g}")

        run.notify = shown
        run.run()


def _result(run: Run, output: Path, data: Path, data_file: Path | None) -> dict[str, Any]:
    training = run.training
    return {
        "output": str(output),
        "external_data": None if data_file is None else str(data_file),
        "data": str(data),
        "epochs": training.progress.epoch,
        "steps": training.progress.step,
        "updates": run.updates,
        "losses": training.losses,
        "validation_losses": run.validation_losses,
        "weights_of_epoch": training.progress.epoch if run.patience is None else run.best_epoch,
    }


def _summary(result: dict[str, Any]) -> None:
    losses, held = result["losses"], result["validation_losses"]
    for line in curve(losses):
        say(line)
    steps = f"{counted(result['epochs'], 'epoch')}, {counted(result['steps'], 'step')}"
    if result["updates"] != result["steps"]:
        steps = f"{steps}, {counted(result['updates'], 'update')}"
    say(f"loss {_course(losses)} in {steps}")
    if held:
        say(f"validation loss {_course(held)}, the lowest {min(held):.6g} in epoch {held.index(min(held)) + 1}")
        say(f"the weights are those after epoch {result['weights_of_epoch']} of {result['epochs']}")
    say(f"{result['output']}" + (f", its weights in {result['external_data']}" if result["external_data"] else ""))


def _course(values: list[float]) -> str:
    """The first value and the last one, or the only one."""
    return " -> ".join(f"{value:.6g}" for value in (values[:1] + values[1:][-1:]))


def curve(values: list[float]) -> list[str]:
    """Numbers as a picture of text lines; none for fewer than two."""
    if len(values) < 2:
        return []
    width = min(_WIDTH, len(values))
    taken = [values[k * (len(values) - 1) // (width - 1)] for k in range(width)]
    low, high = min(taken), max(taken)
    rows = [round((_HEIGHT - 1) * ((high - value) / (high - low) if high > low else 0.5)) for value in taken]
    labels = {0: f"{high:.4g}", _HEIGHT - 1: f"{low:.4g}"}
    return [
        f"{labels.get(row, ''):>10} |" + "".join("*" if at == row else " " for at in rows).rstrip()
        for row in range(_HEIGHT)
    ]
