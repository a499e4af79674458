"""One step of training as one model: forward, loss, gradient and update. Weights and states are inputs and outputs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar, Unpack, cast

import numpy as np
from onnx import ModelProto, helper

from refgrad.errors import OptionError, UnknownNameError, abridged, choices, counted, did_you_mean
from refgrad.model.checks.malformed import explained
from refgrad.model.external import (
    PLACE_OF_DATA,
    ExternalData,
    ModelSource,
    Opened,
    external_tensors,
    place_of,
    refuse_external,
    values_of,
)
from refgrad.model.reading import opened, read
from refgrad.notices import notice, quiet
from refgrad.parameters.weights import weights_of
from refgrad.protos.domains import ML
from refgrad.protos.traverse import every_node, fresh, names_of
from refgrad.ranges import checked
from refgrad.reverse.requested import matching
from refgrad.rewrites.lifting import holds_weights, lift_weights
from refgrad.rewrites.losses import rename_everywhere, train_tensors
from refgrad.rewrites.scores import OF_CHANCES, OF_CLASSES, loss_of_classes
from refgrad.rewrites.selection import select_model_inputs_outputs
from refgrad.tables.conventions import ConventionOptions, Conventions
from refgrad.training.adapters import adapters_of
from refgrad.training.arguments import by_pattern, listed
from refgrad.training.assembly import Assembly, StepRequest
from refgrad.training.class_losses import count_of_classes
from refgrad.training.dropout import with_masks
from refgrad.training.labels import classes_of
from refgrad.training.loss_terms import mean_over
from refgrad.training.losses import compared_outputs, differentiated
from refgrad.training.normalization import Statistic, in_inference_mode, in_training_mode, refuse_training_mode
from refgrad.training.optimizers import SGD, Optimizer
from refgrad.training.outputs import reaching, without_maps
from refgrad.training.precision import DYNAMIC, GOOD_STEPS, SCALE, UPDATES, chosen_scale, refuse_vanishing
from refgrad.training.settings import settings_of
from refgrad.training.steps import RATE, STEP, StepModel

BATCH_NORMS = ("frozen", "training")
DROPOUTS = ("off", "training")
_FLAT = 2**16  # the most elements of all weights together for which one vector is faster than one tensor per weight
_CLIP_EPSILON = 1e-6
PENALTIES_BY = ("step", "sample")
M = TypeVar("M", bound=ModelSource)


@explained
def step_model(
    model: ModelProto | str | os.PathLike[str],
    loss: str | ModelProto | os.PathLike[str] | None = "squared_error",
    optimizer: Optimizer | None = None,
    *,
    trainable: Sequence[str] | None = None,
    freeze: Sequence[str] | None = None,
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
    loss_scale: float | str | None = None,
    flat: bool | None = None,
    loss_settings: Mapping[str, Any] | None = None,
    batch_norm: str = "frozen",
    unbiased: bool = True,
    dropout: str = "off",
    seed: int = 0,
    data_beside: str | os.PathLike[str] | None = None,
    **conventions: Unpack[ConventionOptions],
) -> StepModel:
    """The model of one step of training.

    :param model: a model, or the path of one. It is not modified. `refgrad.lift_weights` is applied to it.
    :param loss: the loss of `output` and the label: a score of `refgrad.add_loss_output`, such as "squared_error", or
        "binary_cross_entropy_with_logits" of raw scores and labels 0 and 1. "cross_entropy" takes logits [N, C, ...] and
        classes [N, ...] in int64. "log_loss" takes the same classes and probabilities [N, C, ...], or the probabilities of
        the second of two classes [N, 1]. None: `output` is the loss already. A model, or its
        `pathlib.Path`: the model returns the loss, a scalar. Its inputs with the names of outputs of `model` get these
        outputs; if there are none, its first input gets `output`. Its other inputs are fed.
    :param optimizer: the update; SGD without momentum by default.
    :param trainable: names of float initializers, or patterns of parameters (`head.*`). By default, the adapters that `lora`
        added, or without adapters all initializers that `refgrad.weights` calls parameters.
    :param freeze: names or patterns of weights that are not trained, out of those that `trainable` chooses.
    :param output: the output that is compared with the label, or that is the loss; needed if the model has several outputs of
        floats. Instead of the maps that a ZipMap returns, the input of the ZipMap is the output.
    :param sample_weight: the name of an input to add. The input has one weight per sample.
    :param reduction: "mean" or "sum" of the losses of the samples: the loss of a step.
    :param penalty: {name or pattern: (l1, l2)}: l1·Σ|w| + l2·Σw² is added to the loss.
    :param penalty_by: "step": the penalty is added as it is. "sample": the penalty is divided by the number of samples of the
        step, as in scikit-learn's neural networks.
    :param weight_decay: {name or pattern: λ}, which replaces the optimizer's weight decay. If several patterns match, the last
        one counts.
    :param clip_value: each element of the gradient is clipped to [−c, c].
    :param clip_norm: the gradient is scaled by min(1, c / (‖g‖ + 1e-6)), where ‖g‖ is the norm of the gradients of all weights
        together.
    :param accumulate: the number of steps per update. An update uses the mean of the gradients of these steps, which a state
        of the step model accumulates. The mean is clipped. Learning-rate schedules count every step, not every update.
    :param loss_scale: the gradients are computed of the loss times this number, and divided by it in float32, so that small
        ones do not become 0 in float16. If a gradient is not finite, the step updates nothing. "dynamic", the default if a
        weight is float16: the scale begins with 2¹⁰, is halved if a gradient is not finite, and is doubled after 2000 other
        steps in a row. A number: `Training` ends at a gradient that is not finite. Weights of 16 bits, and their states, are
        kept in float32 in any case.
    :param flat: keep all weights in one vector, and each kind of state too. This is the default if the weights have one type
        and few elements, and the optimizer is elementwise.
    :param loss_settings: the parameters of the loss by name: l1_weight and l2_weight of "elastic", eps of "log", delta of
        "huber", and of "cross_entropy" class_weights, ignore_index and label_smoothing, as in torch.nn.CrossEntropyLoss.
    :param batch_norm: "frozen": each BatchNormalization uses its running statistics, and training does not change them.
        "training": batches are normalised by their own statistics. The running statistics become states, which are updated
        from the batch's statistics with the node's momentum.
    :param unbiased: if True, the running variance is updated from a batch variance that is divided by n − 1, as in torch; if
        False, from one that is divided by n, as in ONNX. n is the number of elements per channel.
    :param dropout: "off": nothing is dropped. "training": each Dropout draws a new mask in every step. The masks depend on
        `seed` and the number of the step, which becomes a state, and are the same on every executor.
    :param data_beside: the path of a model beside which the external data of `model` lies, if `model` is in memory, such as
        `lora("model.onnx")`. Weights that are not trained stay in their files. Save `StepModel.model` in the folder of the
        model.
    :param conventions: `kinks`, `quantization` and the other conventions of `refgrad.gradient`.
    :raises OptionError: an option does not fit.
    :raises NoGradientError: no weight gets a gradient, or an operator on the way has no derivative.
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
        raise OptionError(f"optimizer is an optimizer of refgrad.training, such as SGD(), not {optimizer!r}.")
    if trainable is not None and not listed(trainable, "trainable"):
        raise OptionError("trainable=[] trains nothing. Leave it out to train every parameter.")
    loss_settings = by_pattern(loss_settings, "loss_settings", "{'ignore_index': -100}")
    whole = opened(model, data_beside)
    for tensor in external_tensors(whole) if isinstance(whole, ModelProto) else ():
        refuse_external(tensor, PLACE_OF_DATA)
    whole, chosen = trained(whole, trainable, freeze)
    model = read(whole)
    output, compared = compared_outputs(model, loss, output)
    if compared:
        chosen = reaching(model, chosen, compared, trainable)
    _notice_merged(model, chosen)
    refuse_vanishing(optimizer, chosen)
    scale = chosen_scale(loss_scale, chosen)
    reserved = [RATE, STEP, *([] if scale is None else [SCALE, GOOD_STEPS, UPDATES])]
    if clash := next((name for name in reserved if name in (label, sample_weight)), ""):
        raise UnknownNameError(
            f"The step needs the name {clash!r}. Choose another one for the label or the weights of samples."
        )
    model = _with_room(model, reserved, chosen)
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
    source = still = model
    if batch_norm == "training":
        source, still, statistics = in_training_mode(model)
        chosen = {name: value for name, value in chosen.items() if name not in {s.name for s in statistics}}
    if dropout not in DROPOUTS:
        raise OptionError(f"dropout={dropout!r}; there are {choices(DROPOUTS)}.")
    refuse_training_mode(model, batch_norm != "training", dropout != "training")
    if dropout == "training":
        source, still = with_masks(source, STEP, int(seed)), in_inference_mode(still)
    rules = Conventions.of("step_model", conventions)
    made, loss_name = differentiated(
        source,
        list(chosen),
        loss,
        output,
        label,
        sample_weight,
        reduction,
        loss_settings,
        rules,
        "" if scale is None else SCALE,
    )
    clip = (clip_value, clip_norm)
    if penalty_by not in PENALTIES_BY:
        raise OptionError(f"penalty_by={penalty_by!r}; there are {choices(PENALTIES_BY)}.")
    decays, shared = _decays(penalty, chosen), penalty_by == "sample"
    held = _values_of(whole, [statistic.name for statistic in statistics])
    running = {statistic: held[statistic.name] for statistic in statistics}
    draws = dropout == "training"
    amounts = _weight_decays(weight_decay, chosen, optimizer)
    asked = StepRequest(
        optimizer, loss_name, label, decays, shared, amounts, clip, flat, unbiased, accumulate, draws, scale
    )
    settings = {
        "loss": f"loss={loss!r}" if loss is None or isinstance(loss, str) else "a model as the loss",
        **({"loss_settings": f"loss_settings={loss_settings}"} if loss_settings else {}),
        "output": f"output={output!r}",
        "reduction": f"reduction={reduction!r}",
        "trainable": f"{counted(sum(value.size for value in chosen.values()), 'number')} in {choices(chosen)} to train",
        **settings_of("optimizer", optimizer),
        "weight_decay": f"weight_decay={amounts}",
        "penalty": f"penalty={decays}",
        "clip_norm": f"clip_norm={clip_norm}",
        "clip_value": f"clip_value={clip_value}",
        "accumulate": f"accumulate={accumulate}",
        "batch_norm": f"batch_norm={batch_norm!r}",
        "dropout": f"dropout={dropout!r}",
        **({} if scale is None else {SCALE: f"{SCALE}={scale!r}" if scale == DYNAMIC else f"{SCALE}={scale:g}"}),
        **{name: f"{name}={value!r}" for name, value in conventions.items()},
    }
    made_step = replace(
        Assembly(made, chosen, running, asked).step(),
        accumulate=int(accumulate),
        settings=settings,
        data_beside=whole.path if isinstance(whole, Opened) else None,
        mean_over=mean_over(loss, reduction),
    )
    evaluation = None
    if statistics or decays or draws:  # then the loss of a step is not the plain loss of the model
        with quiet():  # the same notices were given for the step model
            all_of_it, name = differentiated(
                still, list(chosen), loss, output, label, sample_weight, reduction, loss_settings, rules
            )
        evaluation = select_model_inputs_outputs(all_of_it, outputs=[name])
    if loss not in OF_CLASSES:
        label_range = (0, 1) if loss in OF_CHANCES else None
        class_loss = "" if output is None else loss_of_classes(read(model), output, ("N", None))
        return replace(made_step, evaluation=evaluation, label_range=label_range, class_loss=class_loss)
    count, names = count_of_classes(model, output), classes_of(read(model))
    known = names if names is not None and count in (None, len(names)) else None
    ignored = loss_settings.get("ignore_index")
    class_names = None if known is None else tuple(known)
    amounts_of = loss_settings.get("class_weights")
    return replace(
        made_step,
        classes=count,
        class_names=class_names,
        ignored=ignored,
        evaluation=evaluation,
        class_weights=None if amounts_of is None else tuple(amounts_of),
    )


def trained(
    model: M, trainable: Sequence[str] | None, freeze: Sequence[str] | None = None
) -> tuple[M, dict[str, np.ndarray]]:
    """The model with its weights as initializers, and the values of the weights to train, by name.

    :param trainable: names and patterns of weights; None chooses all.
    :param freeze: names and patterns of weights to leave out.
    :raises OptionError: `freeze` leaves nothing.
    :raises UnknownNameError: a name that does not exist, or nothing is trainable.
    """
    source = read(model)
    plain = without_maps(source)
    if any(map(holds_weights, plain.graph.node)):
        plain = lift_weights(plain)
    if plain is not source:
        model = cast("M", Opened(plain, model.path) if isinstance(model, Opened) else plain)
    floats = list(train_tensors(plain))
    chosen = _trained(trainable, model, floats)
    if freeze:
        frozen = _chosen(freeze, floats, "freeze")
        if not set(chosen) - set(frozen):
            raise OptionError(
                f"freeze={listed(freeze, 'freeze')!r} leaves nothing to train. Without it these are: {choices(chosen)}."
            )
        chosen = [name for name in chosen if name not in frozen]
    return model, _values_of(model, chosen)


def _notice_merged(model: ModelSource, weights: Mapping[str, np.ndarray]) -> None:
    """Notice weights that an exporter may have merged: several nodes read one, and its elements are one number.

    torch.onnx.export merges tensors of equal values, such as the zeros of new biases and running means. They are then trained
    as one.
    """
    equal = {name: value for name, value in weights.items() if value.size > 1 and value.flat[0] == value.flat[-1]}
    origins = {name: name for name, value in equal.items() if (value == value.flat[0]).all()}
    reads = Counter[str]()
    for node in read(model).graph.node:
        if node.op_type == "Identity" and not node.domain and node.input[0] in origins:
            origins[node.output[0]] = origins[node.input[0]]
        else:
            reads.update(origins[name] for name in node.input if name in origins)
    if merged := [name for name, count in reads.items() if count > 1]:
        names = choices((f"{name} ({weights[name].flat[0]:g})" for name in merged), limit=3)
        notice(
            f"Several nodes read the same weight, and all its elements are one number: {names}. It is trained as one. If the "
            "exporter has merged weights with equal values, export them apart: docs/fine_tuning.md, Exporting from torch."
        )


def _with_room(model: ModelProto, names: Sequence[str], weights: Container[str]) -> ModelProto:
    """The model in which no value has one of `names`; the model itself if none has.

    :raises UnknownNameError: an input, an output, one of `weights` or a parameter of BatchNormalization has one of the names.
    """
    graph = model.graph
    clashes = [name for name in names if name in names_of(graph)]
    if not clashes:
        return model
    kinds = {name: "parameter" for n in graph.node if n.op_type == "BatchNormalization" for name in n.input[1:]}
    kinds |= {tensor.name: "weight" for tensor in graph.initializer if tensor.name in weights}
    kinds |= {value.name: "output" for value in graph.output} | {value.name: "input" for value in graph.input}
    for name in clashes:
        if kind := kinds.get(name):
            article = "an" if kind in ("input", "output") else "a"
            raise UnknownNameError(
                f"The model has {article} {kind} {name!r}, a name that the step needs. Rename the {kind}."
            )
    made = ModelProto()
    made.CopyFrom(model)
    taken = names_of(graph) | {node.name for node in every_node(model)}
    rename_everywhere(made.graph, {name: fresh(name, taken) for name in clashes})
    return made


def _values_of(model: ModelSource, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The values of these initializers. No other is read."""
    tensors = {tensor.name: tensor for tensor in read(model).graph.initializer}
    with ExternalData(place_of(model)) as data:
        return {name: values_of(tensors[name], data) for name in names}


def _trained(trainable: Sequence[str] | None, model: ModelSource, floats: Sequence[str]) -> list[str]:
    """The names of the weights to train.

    These are the initializers that `trainable` names and the parameters that its patterns match. If `trainable` is None,
    these are the adapters that `lora` added, or all parameters. A pattern that matches an adapter stands for adapters alone.
    """
    found = weights_of(model)
    adapters = adapters_of(read(model))
    parameters = [name for name in adapters or found.trainable if name in floats]
    if trainable is not None:
        others = [name for name in found.trainable if name in floats and name not in parameters]
        asked = listed(trainable, "trainable")
        of_others = [one for one in asked if not any(fnmatchcase(name, one) for name in parameters)]
        of_these = [one for one in asked if one not in of_others]
        names = {*_chosen(of_these, floats, "trainable", parameters)}
        names.update(_chosen(of_others, floats, "trainable", others or parameters))
        return [name for name in floats if name in names]
    quantized = [name for name, weight in found.items() if weight.kind == "quantized"]
    beside = "Adapters beside them can be trained: refgrad.training.lora, --lora in the shell."
    if parameters:
        if quantized and not adapters:
            notice(f"Quantized weights stay as they are: {choices(quantized, limit=3)}. {beside}")
        return parameters
    others = [f"{name!r} ({weight.kind})" for name, weight in found.items() if weight.kind != "shape"]
    nodes = [node for node in read(model).graph.node if node.domain == ML]
    kinds = sorted({node.op_type for node in nodes if any(len(a.floats) > 1 for a in node.attribute)})
    inside = f" The numbers in {abridged(kinds)} (ai.onnx.ml) are not trained." if kinds else ""
    if not others:
        raise UnknownNameError(f"Nothing is trainable: the model has no weights.{inside}")
    if quantized:
        raise UnknownNameError(
            f"Nothing is trainable: the weights are quantized ({choices(quantized, limit=3)}). {beside} Or export the model "
            "with float weights in front of QuantizeLinear."
        )
    advice = " Name the initializers to train: trainable=[...]." if floats else ""
    raise UnknownNameError(
        f"Nothing is trainable: no tensor of the model is a float parameter of a layer. It has {', '.join(others[:12])}"
        f"{', …' if len(others) > 12 else ''}.{inside}{advice}"
    )


def _chosen(patterns: Sequence[str], known: Sequence[str], what: str, usual: Sequence[str] | None = None) -> list[str]:
    """The names in `known` that `patterns` choose, in the order of `known`.

    A name chooses itself. A pattern chooses the names in `usual` that it matches, or the names in `known` if `usual` is None.
    """
    found = matching(listed(patterns, what), known, known if usual is None else usual, what)
    if unknown := [name for name in found if name not in known]:
        raise UnknownNameError(
            f"{unknown[0]!r} in {what} is no float initializer.{did_you_mean(unknown[0], known)} There are: {choices(known)}."
        )
    return [name for name in known if name in found]


def _decays(penalty: Mapping[str, Any] | None, weights: Mapping[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    found = {}
    for pattern, amounts in by_pattern(penalty, "penalty", "{'head.*': (0, 1e-4)}").items():
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
    for pattern, amount in by_pattern(given, "weight_decay", "{'head.*': 1e-4}").items():
        checked("weight_decay", amount, f"The weight decay of {pattern!r}")
        found |= dict.fromkeys(_chosen([pattern], list(weights), "weight_decay"), float(amount))
    return found
