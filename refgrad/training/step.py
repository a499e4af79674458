"""One step of training as one model: forward, loss, gradient and update. Weights and states go in and come out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
from onnx import ModelProto, helper

from refgrad.errors import OptionError, UnknownNameError, choices, did_you_mean
from refgrad.notices import quiet
from refgrad.protos.malformed import explained
from refgrad.protos.reading import read
from refgrad.ranges import checked
from refgrad.reverse.requested import matching
from refgrad.tables.conventions import ConventionOptions
from refgrad.training.adapters import adapters_of
from refgrad.training.assembly import Assembly, StepRequest
from refgrad.training.dropout import with_masks
from refgrad.training.labels import classes_of
from refgrad.training.losses import OF_CLASSES, count_of_classes, differentiated
from refgrad.training.normalization import Statistic, in_inference_mode, in_training_mode, refuse_training_mode
from refgrad.training.outputs import compared_output, without_maps
from refgrad.training.steps import STEP, StepModel
from refgrad.training.updates import SGD, Optimizer
from refgrad.transforms.lifting import holds_weights, lift_weights
from refgrad.transforms.losses import get_train_initializer
from refgrad.transforms.selection import select_model_inputs_outputs
from refgrad.transforms.weights import weights

BATCH_NORMS = ("frozen", "training")
DROPOUTS = ("off", "training")
_FLAT = 2**16  # elements of weights, up to which one vector of all of them is faster than a tensor for each
_CLIP_EPSILON = 1e-6
PENALTIES_BY = ("step", "sample")


@explained
def step_model(
    model: ModelProto | str | os.PathLike[str],
    loss: str | ModelProto | os.PathLike[str] | None = "squared_error",
    optimizer: Optimizer | None = None,
    *,
    trainable: Sequence[str] | None = None,
    output: str | None = None,
    label: str = "label",
    sample_weight: str | None = None,
    reduction: str = "mean",
    penalty: Mapping[str, tuple[float, float]] | None = None,
    penalty_by: str = "step",
    weight_decay: Mapping[str, float] | None = None,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    accumulate: Any = 1,
    flat: bool | None = None,
    loss_settings: Mapping[str, Any] | None = None,
    batch_norm: str = "frozen",
    unbiased: bool = True,
    dropout: str = "off",
    seed: int = 0,
    **conventions: Unpack[ConventionOptions],
) -> StepModel:
    """The model of one step of training.

    :param model: a model, or the path of one. It is not modified. `refgrad.lift_weights` is applied to it.
    :param loss: what `output` is compared by with the label: "squared_error", "absolute_error", "elastic", "log" as in
        `refgrad.add_loss_output`, "half_squared_error", or "cross_entropy" of logits [N, C, ...] with classes [N, ...] in
        int64, or "log_loss" of probabilities [N, C, ...], or of the second of two classes [N, 1], with such classes. None:
        `output` is the loss already. Or a model of the same opset, or a `pathlib.Path`: its inputs that are called as outputs
        of the model get these (or its first input gets `output`), the others are fed, and it returns a scalar.
    :param optimizer: the update; SGD without momentum by default.
    :param trainable: names of float initializers, or patterns of parameters (`head.*`); by default the
        adapters that `lora` added, or else all that `refgrad.weights` calls parameters.
    :param output: the output that is compared, or the loss; needed where there are several of floats. What ZipMap makes maps
        of counts as the output.
    :param sample_weight: name of an input to add, one weight per sample.
    :param reduction: "mean" or "sum" of the losses of the samples.
    :param penalty: {name or pattern: (l1, l2)}: l1·Σ|w| + l2·Σw² is added to the loss.
    :param penalty_by: "step", or "sample": the penalty is divided by the number of samples of the step, as for the networks of
        scikit-learn.
    :param weight_decay: {name or pattern: λ} in place of the optimizer's; of several patterns that match the last counts.
    :param clip_value: each element of the gradient is clipped to [−c, c].
    :param clip_norm: the gradient is scaled by min(1, c / (‖g‖ + 1e-6)), where ‖g‖ is the norm of all of it.
    :param accumulate: the update is made in every so many steps, with the mean of their gradients, which are kept as a state.
        Clipping comes after; learning rates that count steps count all of them.
    :param flat: keep the weights, and each kind of state, in one vector; by default if they are of one type and few, and the
        optimizer is elementwise.
    :param loss_settings: what the loss is told besides: l1_weight and l2_weight of "elastic", eps of "log".
    :param batch_norm: "frozen": BatchNormalization is as the model has it, with its running statistics. "training": batches are
        normalised by their own statistics, and the running ones become states that follow them with the node's momentum.
    :param unbiased: the running variance follows the variance of a batch of n numbers that is divided by n − 1, as torch's
        does; ONNX divides by n.
    :param dropout: "off": nothing is dropped. "training": each Dropout draws anew in every step, the same on every executor,
        from `seed` and the number of the step, which is a state then.
    :param conventions: `kinks`, `quantization` and the other conventions of `refgrad.gradient`.
    :raises OptionError: an option does not fit.
    :raises UnknownNameError: a name that does not exist, or nothing is trainable.

    >>> import onnx.parser
    >>> from refgrad.training import SGD, step_model
    >>> line = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> line (float[N, 2] x) => (float[N, 1] y) '
    ...     '<float[2, 1] a = {1, 2}> { y = MatMul(x, a) }'
    ... )
    >>> step = step_model(line, optimizer=SGD(momentum=0.9))
    >>> [value.name for value in step.model.graph.input]
    ['x', 'label', 'learning_rate', 'weights', 'velocity']
    >>> [value.name for value in step.model.graph.output]
    ['loss', 'weights_next', 'velocity_next']
    """
    optimizer = SGD() if optimizer is None else optimizer
    checked("accumulate", accumulate)
    checked("seed", seed)
    for name, bound in (("clip_value", clip_value), ("clip_norm", clip_norm)):
        if bound is not None:
            checked(name, bound)
    if not isinstance(optimizer, Optimizer):
        raise OptionError(f"optimizer is one of refgrad.training's, such as SGD(), not {optimizer!r}.")
    model, chosen = trained(model, trainable)
    if output is not None or not isinstance(loss, ModelProto | os.PathLike):
        output = compared_output(read(model), output)
    kinds = {helper.np_dtype_to_tensor_dtype(value.dtype) for value in chosen.values()}
    if flat is None:
        is_small = len(kinds) == 1 and sum(value.size for value in chosen.values()) <= _FLAT
        flat = is_small and optimizer.elementwise
    if flat and not optimizer.elementwise:
        raise OptionError(
            f"flat=True updates all weights as one vector, and {type(optimizer).__name__} is not elementwise. Leave flat out."
        )
    if flat and len(kinds) > 1:
        raise OptionError("flat=True needs weights of one type; these have several. Leave flat at False.")
    if batch_norm not in BATCH_NORMS:
        raise OptionError(f"batch_norm={batch_norm!r}; there are {choices(BATCH_NORMS)}.")
    statistics: list[Statistic] = []
    source: ModelProto | str | os.PathLike[str] = model
    still: ModelProto | str | os.PathLike[str] = model
    if batch_norm == "training":
        source, still, statistics = in_training_mode(model)
        chosen = {name: value for name, value in chosen.items() if name not in {s.name for s in statistics}}
    if dropout not in DROPOUTS:
        raise OptionError(f"dropout={dropout!r}; there are {choices(DROPOUTS)}.")
    refuse_training_mode(model, batch_norm != "training", dropout != "training")
    if dropout == "training":
        source, still = with_masks(source, STEP, int(seed)), in_inference_mode(still)
    made, loss_name = differentiated(
        source, list(chosen), loss, output, label, sample_weight, reduction, loss_settings, conventions
    )
    clip = (clip_value, clip_norm)
    if penalty_by not in PENALTIES_BY:
        raise OptionError(f"penalty_by={penalty_by!r}; there are {choices(PENALTIES_BY)}.")
    decays, shared = _decays(penalty, chosen), penalty_by == "sample"
    held = get_train_initializer(model) if statistics else {}
    running = {statistic: held[statistic.name][0] for statistic in statistics}
    draws = dropout == "training"
    amounts = _weight_decays(weight_decay, chosen, optimizer)
    asked = StepRequest(optimizer, loss_name, label, decays, shared, amounts, clip, flat, unbiased, accumulate, draws)
    made_step = Assembly(made, chosen, running, asked).step()
    evaluation = None
    if statistics or decays or draws:  # the loss of a step is of other statistics, penalized, or of a part
        with quiet():  # it was said of the step
            whole, name = differentiated(
                still, list(chosen), loss, output, label, sample_weight, reduction, loss_settings, conventions
            )
        evaluation = select_model_inputs_outputs(whole, outputs=[name])
    if loss not in OF_CLASSES:
        return replace(made_step, evaluation=evaluation)
    count, names = count_of_classes(model, output), classes_of(read(model))
    known = names if names is not None and count in (None, len(names)) else None
    return replace(made_step, classes=count, class_names=None if known is None else tuple(known), evaluation=evaluation)


def trained(
    model: ModelProto | str | os.PathLike[str], trainable: Sequence[str] | None
) -> tuple[ModelProto | str | os.PathLike[str], dict[str, np.ndarray]]:
    """The model with its weights as initializers, and those that `trainable` chooses.

    :raises UnknownNameError: a name that does not exist, or nothing is trainable.
    """
    source = read(model)
    if (plain := without_maps(source)) is not source:
        model = plain
    if any(map(holds_weights, read(model).graph.node)):
        model = lift_weights(model)
    held = {name: value for name, (value, _) in get_train_initializer(model).items()}
    return model, {name: held[name] for name in _trained(trainable, model, list(held))}


def _trained(
    trainable: Sequence[str] | None, model: ModelProto | str | os.PathLike[str], floats: Sequence[str]
) -> list[str]:
    """The weights to train: initializers that are named, and parameters that a pattern matches; all parameters by default."""
    found = weights(model)
    adapters = adapters_of(read(model))
    parameters = [name for name in adapters or found.trainable if name in floats]
    if trainable is not None:
        return _chosen(trainable, floats, "trainable", parameters)
    if parameters:
        return parameters
    if not floats:
        raise UnknownNameError("Nothing is trainable: the model has no float initializer.")
    held = ", ".join(f"{name!r} ({found[name].kind})" for name in floats[:12])
    raise UnknownNameError(
        f"Nothing is trainable: no initializer of the model is a parameter of a layer. It has {held}"
        f"{', …' if len(floats) > 12 else ''}. Name those to train in trainable."
    )


def _chosen(patterns: Sequence[str], known: Sequence[str], what: str, usual: Sequence[str] | None = None) -> list[str]:
    """The names that are given, and the names in `usual` that a pattern matches, in the order of `known`."""
    given = [patterns] if isinstance(patterns, str) else list(patterns)
    found = matching(given, known, known if usual is None else usual, what)
    if unknown := [name for name in found if name not in known]:
        raise UnknownNameError(
            f"{unknown[0]!r} in {what} is no float initializer.{did_you_mean(unknown[0], known)} There are: {choices(known)}."
        )
    return [name for name in known if name in found]


def _decays(penalty: Mapping[str, Any] | None, weights: Mapping[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    found = {}
    for pattern, amounts in (penalty or {}).items():
        if not isinstance(amounts, tuple | list) or len(amounts) != 2:
            raise OptionError(f"The penalty of {pattern!r} is a pair (l1, l2), not {amounts!r}.")
        for amount in amounts:
            checked("penalty", amount, f"The penalty of {pattern!r}")
        for name in _chosen([pattern], list(weights), "penalty"):
            found[name] = (float(amounts[0]), float(amounts[1]))
    return found


def _weight_decays(
    given: Mapping[str, Any] | None, weights: Mapping[str, np.ndarray], optimizer: Optimizer
) -> dict[str, float]:
    if given and not hasattr(optimizer, "weight_decay"):
        raise OptionError(f"{optimizer!r} has no weight_decay.")
    found: dict[str, float] = {}
    for pattern, amount in (given or {}).items():
        checked("weight_decay", amount, f"The weight decay of {pattern!r}")
        found |= dict.fromkeys(_chosen([pattern], list(weights), "weight_decay"), float(amount))
    return found
