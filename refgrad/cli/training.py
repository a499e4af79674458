"""The commands that train, or write what trains."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Unpack

import typer
from onnx import ModelProto
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from refgrad.backends.base import load_model
from refgrad.cli.numbers import number
from refgrad.cli.options import Json, Model, Result, Seed, names, with_conventions
from refgrad.cli.output import AGREES, INTERRUPTED, Files, print_json, say
from refgrad.errors import OptionError, TrainingError, choices
from refgrad.protos.files import replacing, save_gradient
from refgrad.ranges import checked
from refgrad.tables.conventions import ConventionOptions
from refgrad.training.adapters import adapters_of, merge_adapters
from refgrad.training.adapters import lora as add_adapters
from refgrad.training.data import Arrays, Data, open_data
from refgrad.training.runs import Run
from refgrad.training.schedules import Adaptive, Constant, Cosine, InverseScaling, Schedule, Warmup
from refgrad.training.step import step_model
from refgrad.training.steps import StepModel
from refgrad.training.training import Training
from refgrad.training.updates import OPTIMIZERS, Optimizer, optimizer_class

_SAMPLES = 32  # of a step
_WIDTH, _HEIGHT = 60, 10  # of the curve


def _taking(setting: str) -> list[str]:
    """The names of the optimizers that have this setting."""
    return [name for name, kind in OPTIMIZERS.items() if setting in kind.__dataclass_fields__]


def _listed(names: Iterable[str], conjunction: str = "or") -> str:
    *others, last = names
    return f"{', '.join(others)} {conjunction} {last}" if others else last


_Loss = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What the output is compared by: squared_error, half_squared_error, absolute_error, elastic, log (of the "
        "probabilities of two classes), log_loss (of probabilities, with classes), cross_entropy (of logits, with classes); "
        "none: the output is the loss.",
    ),
]
_Label = Annotated[
    str | None, typer.Option(metavar="NAME", help="The array with the expected values. Default: label or y.")
]
_Output = Annotated[str | None, typer.Option("--of", metavar="NAME", help="The output that is compared, or the loss.")]
_Trainable = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help="Weights to train, written like --wrt of grad: names, or patterns such as 'head.*', with commas or repeated. "
        "Default: all.",
    ),
]
_Optimizer = Annotated[str, typer.Option(metavar="NAME", help=f"{_listed(OPTIMIZERS)}.")]
_Momentum = Annotated[
    float | None,
    number("momentum", help=f"Of {_listed(_taking('momentum'), 'and')}. Default: 0.9 for nesterov, else 0."),
]
_Decay = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[PATTERN=]NUMBER",
        help="The weight decay, of all weights or of those that the pattern matches. May be repeated. Default: 0.01 for adamw, "
        "else 0.",
    ),
]
_Penalty = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=L1,L2", help="l1·Σ|w| + l2·Σw² of the weights that the pattern matches. May be repeated."
    ),
]
_ClipNorm = Annotated[float | None, number("clip_norm", help="The largest norm of the whole gradient.")]
_Accumulate = Annotated[
    int, number("accumulate", metavar="STEPS", help="Update after so many steps, by their mean gradient.")
]
_BatchNorm = Annotated[
    str,
    typer.Option(
        metavar="MODE", help="frozen: as the model has it; training: batches by their own statistics, which follow."
    ),
]
_Dropout = Annotated[str, typer.Option(metavar="MODE", help="off; training: each Dropout drops anew in every step.")]
_ClipValue = Annotated[float | None, number("clip_value", help="The largest element of the gradient.")]


@with_conventions
def train(
    model: Model,
    output: Result,
    data: Annotated[
        Path,
        typer.Option(
            metavar="DATA",
            help="A .npz file with the inputs and the expected values by name, or a folder of such files, or of .npy files.",
        ),
        Files.READ,
    ],
    loss: _Loss = "squared_error",
    label: _Label = None,
    of: _Output = None,
    trainable: _Trainable = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Train low-rank adapters of these weights, written like --trainable, and merge them; what --trainable names "
            "is trained too.",
        ),
    ] = None,
    rank: Annotated[int, number("rank", help="The size of the adapters.")] = 8,
    optimizer: _Optimizer = "adamw",
    rate: Annotated[
        float | None, number("rate", help="The learning rate. Default: 0.001; 0.01 for sgd and adagrad.")
    ] = None,
    schedule: Annotated[
        str, typer.Option(metavar="NAME", help="constant, cosine (to 0 at the last epoch), invscaling or adaptive.")
    ] = "constant",
    warmup: Annotated[int, number("warmup", help="Steps in which the learning rate rises.")] = 0,
    momentum: _Momentum = None,
    weight_decay: _Decay = None,
    penalty: _Penalty = None,
    clip_norm: _ClipNorm = None,
    clip_value: _ClipValue = None,
    accumulate: _Accumulate = 1,
    epochs: Annotated[int, number("epochs", help="How often all samples are taken.")] = 10,
    batch_norm: _BatchNorm = "frozen",
    dropout: _Dropout = "off",
    batch_size: Annotated[
        int | None, number("batch_size", help="The samples of a step. Default: 32, or as many as the model says.")
    ] = None,
    validation: Annotated[
        str | None,
        typer.Option(
            metavar="DATA", help="Data to evaluate on after each epoch, or the part to keep back, such as 0.1."
        ),
        Files.READ,
    ] = None,
    patience: Annotated[
        int | None,
        number("patience", help="End after so many epochs without a better validation loss, with the best weights."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the state of the training to a safetensors file after each epoch."),
        Files.JOURNAL,
    ] = None,
    checkpoint_every: Annotated[
        int | None, number("checkpoint_every", metavar="STEPS", help="Write it also after so many steps.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the checkpoint is, if there is one.")] = False,
    shuffle: Annotated[
        bool, typer.Option("--shuffle/--no-shuffle", help="Take the samples in a new order in each epoch.")
    ] = True,
    seed: Seed = 0,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="What runs the steps: numpy, ort-cpu, ort-cuda.")
    ] = "numpy",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    as_json: Json = False,
    **conventions: Unpack[ConventionOptions],
) -> None:
    """Train MODEL on data, and write it with its new weights."""
    if checkpoint is not None and checkpoint.exists() and not resume:
        raise OptionError(f"The checkpoint {str(checkpoint)!r} exists. Go on with --resume, or name another file.")
    kind, part = _optimizer(optimizer, momentum, weight_decay), _part(validation)
    penalties = _penalties(penalty)
    proto = load_model(model)
    chosen = names(trainable)
    if lora:
        proto = add_adapters(proto, names(lora) or (), rank, seed=seed)
        chosen = [*chosen, *adapters_of(proto)] if chosen else None
    step = _step(
        proto, loss, kind, penalties, weight_decay, output=of, trainable=chosen,
        clip_norm=clip_norm, clip_value=clip_value, accumulate=accumulate, batch_norm=batch_norm, dropout=dropout, seed=seed,
        **conventions,
    )  # fmt: skip
    given = open_data(step, data, label)
    held: Data | None = None
    if part is not None:
        if not isinstance(given, Arrays):
            raise OptionError("--validation takes a part of data in arrays. Give a file for shards.")
        given, held = given.split(part, seed)
    elif validation is not None:
        held = open_data(step, validation, label)
    training = Training(step, _schedule(schedule, kind.rate if rate is None else rate, epochs, warmup), backend)
    size = batch_size or next((dims[0] for _, dims in step.inputs.values() if dims and dims[0]), None) or _SAMPLES
    run = Run(
        training, given, epochs, size, seed if shuffle else None, held, patience, checkpoint, checkpoint_every, resume
    )  # fmt: skip
    try:
        _shown(run, quiet or as_json)
    except KeyboardInterrupt:
        say(f"refgrad: Interrupted after step {training.progress.step}. {_left(run)}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except TrainingError as error:
        raise TrainingError(f"{error} {str(output)!r} is not written. {_left(run)}") from error
    trained = training.write_to(proto)
    data_file = save_gradient(merge_adapters(trained) if lora else trained, output, model)
    result: dict[str, Any] = {
        "output": str(output),
        "data": None if data_file is None else str(data_file),
        "epochs": training.progress.epoch,
        "steps": training.progress.step,
        "losses": training.losses,
        "validation_losses": run.validation_losses,
        "weights_of_epoch": run.best_epoch if patience is not None else training.progress.epoch,
    }
    if as_json:
        print_json(result)
    elif not quiet:
        _summary(result)
    raise typer.Exit(AGREES)


@with_conventions
def training_model(
    model: Model,
    output: Result,
    loss: _Loss = "squared_error",
    label: _Label = None,
    of: _Output = None,
    trainable: _Trainable = None,
    optimizer: _Optimizer = "adamw",
    momentum: _Momentum = None,
    weight_decay: _Decay = None,
    penalty: _Penalty = None,
    clip_norm: _ClipNorm = None,
    clip_value: _ClipValue = None,
    accumulate: _Accumulate = 1,
    batch_norm: _BatchNorm = "frozen",
    dropout: _Dropout = "off",
    seed: Seed = 0,
    state: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write what the first step is fed, the weights included, to an .npz file."),
        Files.WRITTEN,
    ] = None,
    as_json: Json = False,
    **conventions: Unpack[ConventionOptions],
) -> None:
    """Write one step of training of MODEL as a model, for any runtime: forward, loss, gradient and update.

    Its metadata say which output is fed to which input of the next step (refgrad.training).
    """
    kind, penalties = _optimizer(optimizer, momentum, weight_decay), _penalties(penalty)
    step = _step(
        load_model(model), loss, kind, penalties, weight_decay, output=of,
        trainable=names(trainable), label="label" if label is None else label, clip_norm=clip_norm, clip_value=clip_value,
        accumulate=accumulate, batch_norm=batch_norm, dropout=dropout, seed=seed,
        **conventions,
    )  # fmt: skip
    save_gradient(step.model, output, model)
    if state is not None:
        from refgrad.conformance.questions.feeds import write_arrays

        with replacing(state) as temporary:
            write_arrays(temporary, step.state)
    if as_json:
        print_json(
            {"output": str(output), "data": step.data, "label": step.label, "loss": step.loss, "next": step.next}
        )
        return
    say(f"{output}: {len(step.model.graph.node)} nodes; the loss is {step.loss}")
    for name, following in step.next.items():
        say(f"{following} is the next {name}")


def _step(
    model: ModelProto,
    loss: str,
    optimizer: Optimizer,
    penalty: dict[str, tuple[float, float]],
    weight_decay: list[str] | None,
    **options: Any,
) -> StepModel:
    decays = {pattern: number for pattern, number in _decays(weight_decay).items() if pattern}
    given = None if loss == "none" else loss
    return step_model(model, given, optimizer, penalty=penalty, weight_decay=decays, **options)


def _optimizer(name: str, momentum: float | None, weight_decay: list[str] | None) -> Optimizer:
    usual = _decays(weight_decay).get("")
    given: dict[str, Any] = {"momentum": momentum, "weight_decay": usual}
    settings = {setting: value for setting, value in given.items() if value is not None}
    kind = optimizer_class(name)
    for setting in settings:
        if name not in (those := _taking(setting)):
            option = setting.replace("_", "-")
            raise OptionError(f"--{option} is not for {name}; it is for {_listed(those, 'and')}.")
    return kind(**settings)


def _part(validation: str | None) -> float | None:
    """The part of the data to keep back; None where nothing is, or where a file is named."""
    if validation == "":
        raise OptionError("--validation '' is neither a part between 0 and 1 nor a file. Leave it out, or give one.")
    try:
        part = None if validation is None else float(validation)
    except ValueError:
        return None
    return None if part is None else float(checked("validation", part, "--validation"))


def _decays(given: list[str] | None) -> dict[str, float]:
    """Weight decays by pattern; the pattern "" stands for all weights."""
    found = {}
    for one in given or ():
        pattern, _, amount = one.rpartition("=")
        try:
            found[pattern] = float(amount)
        except ValueError as error:
            raise OptionError(
                f"--weight-decay {one!r}: give a number, or a pattern and one, as in '*.bias=0'."
            ) from error
        checked("weight_decay", found[pattern], "--weight-decay")
    return found


def _penalties(given: list[str] | None) -> dict[str, tuple[float, float]]:
    found = {}
    for one in given or ():
        pattern, _, amounts = one.rpartition("=")
        try:
            l1, l2 = map(float, amounts.split(","))
        except ValueError as error:
            raise OptionError(f"--penalty {one!r}: give a pattern and two numbers, as in 'head.*=0,1e-4'.") from error
        found[pattern] = tuple(checked("penalty", amount, "--penalty") for amount in (l1, l2))
    return found


def _schedule(name: str, rate: float, epochs: int, warmup: int) -> Schedule:
    kinds: dict[str, Schedule] = {
        "constant": Constant(rate),
        "cosine": Cosine(rate, period=epochs),
        "invscaling": InverseScaling(rate),
        "adaptive": Adaptive(rate),
    }
    if name not in kinds:
        raise OptionError(f"--schedule {name!r}; there are {choices(kinds)}.")
    made = kinds[name]
    return Warmup(length=warmup, after=made, unit="step") if warmup else made


def _left(run: Run) -> str:
    """The remark on what a run keeps that ends early."""
    if run.checkpoint is None:
        return "There is no checkpoint; --checkpoint FILE writes one after each epoch."
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


def _summary(result: dict[str, Any]) -> None:
    losses, held = result["losses"], result["validation_losses"]
    for line in curve(losses):
        say(line)
    say(f"loss {losses[0]:.6g} -> {losses[-1]:.6g} in {result['epochs']} epochs, {result['steps']} steps")
    if held:
        say(
            f"validation loss {held[0]:.6g} -> {held[-1]:.6g}, the lowest {min(held):.6g} in epoch {held.index(min(held)) + 1}"
        )
        say(f"the weights are those after epoch {result['weights_of_epoch']} of {result['epochs']}")
    say(f"{result['output']}" + (f", its weights in {result['data']}" if result["data"] else ""))


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
