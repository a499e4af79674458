"""The files that the training API of ONNX Runtime 1.19 reads: three models and a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from refgrad.errors import OptionError, UnknownNameError, choices, did_you_mean
from refgrad.model.checks.malformed import explained
from refgrad.model.external import load
from refgrad.model.reading import read
from refgrad.model.upgrading.upgrade import upgrade
from refgrad.model.writing import new_folder, refuse_replacing, replacing
from refgrad.notices import quiet
from refgrad.parameters.weights import weights
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.messages import is_too_large
from refgrad.protos.traverse import fresh, names_of, reads_of, refill, versions_of
from refgrad.ranges import checked
from refgrad.reverse.assembly import names_in
from refgrad.reverse.requested import matching
from refgrad.rewrites.losses import get_train_initializer, rename_everywhere
from refgrad.rewrites.selection import select_model_inputs_outputs
from refgrad.tables.conventions import ConventionOptions, Conventions
from refgrad.training.adapters import adapters_of
from refgrad.training.arguments import by_pattern, listed
from refgrad.training.artifact_optimizers import optimizer_model
from refgrad.training.dropout import in_training_mode as dropping
from refgrad.training.flatbuffer_files import checkpoint
from refgrad.training.losses import compared_outputs, differentiated
from refgrad.training.normalization import (
    Statistic,
    in_inference_mode,
    in_training_mode,
    refuse_training_mode,
    with_following,
)
from refgrad.training.optimizers import AdamW, Optimizer
from refgrad.training.outputs import reaching
from refgrad.training.step import BATCH_NORMS, DROPOUTS, trained

TRAINING, EVAL, OPTIMIZER = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
CHECKPOINT, NOMINAL = "checkpoint", "nominal_checkpoint"
_RESET = "lazy_reset_grad"
_OPSET, _IR = 21, 10  # the newest ones that 1.19 reads
_ADAMW = AdamW(eps=1e-6, weight_decay=0.0, epsilon="uncorrected")  # the one that generate_artifacts writes
_Model = ModelProto | str | os.PathLike[str]


@dataclass(frozen=True)
class _Wanted:
    """The weights to train, and the outputs of the models besides the loss and the gradients."""

    trainable: Sequence[str] | None
    frozen: Sequence[str]
    outputs: Sequence[str] | None
    input_gradients: Sequence[str]
    batch_norm: str
    unbiased: bool
    dropout: str


def write_artifacts(
    folder: str | os.PathLike[str],
    model: _Model,
    loss: str | ModelProto | os.PathLike[str] | None = "squared_error",
    optimizer: Optimizer | None = None,
    *,
    trainable: Sequence[str] | None = None,
    frozen_params: Sequence[str] = (),
    output: str | None = None,
    label: str = "label",
    sample_weight: str | None = None,
    reduction: str = "mean",
    loss_settings: Mapping[str, Any] | None = None,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    batch_norm: str = "frozen",
    unbiased: bool = False,
    dropout: str = "off",
    additional_outputs: Sequence[str] | None = None,
    input_gradients: Sequence[str] = (),
    prefix: str = "",
    nominal_checkpoint: bool = False,
    overwrite: bool = False,
    **conventions: Unpack[ConventionOptions],
) -> None:
    """Write training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint for onnxruntime 1.19's training API.

    The training model returns the loss and adds the gradients to buffers; the eval model returns the loss and the outputs of
    the model; both take the data, the label and the weights, which the checkpoint holds. Learning rates and batches are the
    API's. The files have the form that `onnxruntime.training.artifacts.generate_artifacts` writes; docs/training.md lists the
    differences.

    :param folder: a new folder.
    :param optimizer: an optimizer with at most two states, which start at 0. The default is
        AdamW(eps=1e-6, weight_decay=0.0, epsilon="uncorrected"), as `generate_artifacts` writes it.
    :param trainable: as the other options, see `step_model`. Weights are float32.
    :param frozen_params: names or patterns of weights that are not trained, and that the checkpoint holds. Other weights that
        are not trained stay in the models. A pattern passes over weights that `trainable` names or matches, and over adapters:
        with "*" the checkpoint holds all parameters.
    :param clip_value: as clip_norm, see `step_model`.
    :param batch_norm: see `step_model`. With "training" the checkpoint has the running statistics, which every run of the
        training model moves.
    :param unbiased: see `step_model`. `generate_artifacts` divides by n.
    :param dropout: "off": nothing is dropped. "training": ONNX Runtime draws a mask in every run of the training model. The
        attribute `seed` of a Dropout counts. The eval model drops nothing.
    :param additional_outputs: values of the model that the training model and the eval model return after the loss, instead
        of the outputs of the model.
    :param input_gradients: inputs whose gradients the training model returns after the additional outputs, as `x.gradient`.
    :param prefix: the beginning of the names of the files.
    :param nominal_checkpoint: write nominal_checkpoint too, with the names of the weights and without their numbers.
    :param overwrite: write into `folder` if it exists, and replace the files of these names.
    :param conventions: `kinks`, `quantization` and the other conventions of `refgrad.gradient`.
    :raises NoGradientError: no weight gets a gradient.
    :raises OptionError: an option does not fit, or flatbuffers, which onnxruntime installs, is not there.
    :raises UnknownNameError: a name that does not exist, or nothing is trainable.
    :raises OutputFileError: the folder exists, or cannot be written, or a file would replace the model.

    >>> import onnx.parser, tempfile
    >>> from refgrad.training import AdamW, write_artifacts
    >>> line = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> line (float[N, 2] x) => (float[N, 1] y) '
    ...     '<float[2, 1] a = {1, 2}> { y = MatMul(x, a) }'
    ... )
    >>> with tempfile.TemporaryDirectory() as place:
    ...     write_artifacts(f"{place}/line", line, "squared_error", AdamW())
    ...     sorted(os.listdir(f"{place}/line"))
    ['checkpoint', 'eval_model.onnx', 'optimizer_model.onnx', 'training_model.onnx']
    """
    if "\0" in prefix or Path(f"{prefix}{CHECKPOINT}").name != f"{prefix}{CHECKPOINT}":
        raise OptionError(f"prefix is the beginning of a file name, not {prefix!r}.")
    for name, bound in (("clip_value", clip_value), ("clip_norm", clip_norm)):
        if bound is not None:
            checked(name, bound)
    optimizer = _ADAMW if optimizer is None else optimizer
    if not isinstance(optimizer, Optimizer):
        raise OptionError(f"optimizer is an optimizer of refgrad.training, such as SGD(), not {optimizer!r}.")
    files = _artifacts(
        model,
        (optimizer, clip_value, clip_norm),
        _Wanted(trainable, frozen_params, additional_outputs, input_gradients, batch_norm, unbiased, dropout),
        (loss, output),
        (
            label,
            sample_weight,
            reduction,
            by_pattern(loss_settings, "loss_settings", "{'ignore_index': -100}"),
            Conventions.of("write_artifacts", conventions),
        ),
        nominal_checkpoint,
    )
    if overwrite and Path(folder).is_dir():
        paths = {Path(folder, f"{prefix}{name}"): content for name, content in files.items()}
        refuse_replacing(paths, models=[one for one in (model, loss) if isinstance(one, str | os.PathLike)])
        with ExitStack() as stack:  # no file is replaced before all are written
            for path, content in paths.items():
                stack.enter_context(replacing(path)).write_bytes(content)
        return
    with new_folder(folder) as place:
        for name, content in files.items():
            Path(place, f"{prefix}{name}").write_bytes(content)


@explained
def _artifacts(
    model: _Model,
    update: tuple[Optimizer, float | None, float | None],
    wanted: _Wanted,
    compared: tuple[Any, str | None],
    settings: tuple[Any, ...],
    nominal: bool,
) -> dict[str, bytes]:
    """The files by name."""
    model, values, frozen = _trained_and_frozen(model, wanted)
    training_source, eval_source, statistics = _sources(model, wanted)
    values = {name: value for name, value in values.items() if name not in {one.name for one in statistics}}
    if statistics:
        held = get_train_initializer(model)
        frozen = {**frozen, **{one.name: held[one.name][0] for one in statistics}}
    if wrong := next((name for name, value in values.items() if value.dtype != np.float32), ""):
        raise OptionError(
            f"The optimizers of onnxruntime 1.19 train float32, and {wrong!r} is {values[wrong].dtype}. Leave it out of "
            "trainable."
        )
    loss, output = compared
    output, outputs = compared_outputs(read(model), loss, output)
    if outputs:
        values = reaching(read(model), values, outputs, wanted.trainable)
    fed = listed(wanted.input_gradients, "input_gradients")
    wrt = [*values, *fed]
    made, compared_loss = differentiated(training_source, wrt, loss, output, *settings)
    if newest := next((version for version in versions_of(made).values() if version > _OPSET), 0):
        raise OptionError(
            f"The model is of opset {newest}, and onnxruntime 1.19 reads {_OPSET} at most. Convert it with "
            "onnx.version_converter first."
        )
    gradients = names_in(made)[1]
    still, eval_loss = made, compared_loss
    if eval_source is not training_source:
        with quiet():  # the same notices were given for the training model
            still, eval_loss = differentiated(eval_source, wrt, loss, output, *settings)
    shaped = compared_loss, eval_loss
    loss_name = _add_scalar(made, compared_loss)
    eval_loss = loss_name if still is made else _add_scalar(still, eval_loss)
    if wanted.outputs is None:
        additional: list[str] = []
        computed = {name for node in still.graph.node for name in node.output} - {eval_loss, *shaped}
        results = [value.name for value in read(model).graph.output if value.name in computed]
    else:
        additional = results = [
            name
            for name in dict.fromkeys(listed(wanted.outputs, "additional_outputs"))
            if name not in (loss_name, *shaped)
        ]
        if hidden := [name for name in additional if name.endswith("_grad")]:
            raise OptionError(f"The training API hides {hidden[0]!r}, an output whose name ends with _grad. Rename it.")
        made = _with_values(made, read(training_source), additional)
        still = made if eval_source is training_source else _with_values(still, read(eval_source), additional)
    evaluation = select_model_inputs_outputs(still, [eval_loss, *results])
    slopes = _add_slopes(made, {name: gradients[name] for name in fed})
    returned = [loss_name, *additional, *slopes]
    training = _training_model(made, returned, values, gradients)
    _move_statistics(training, statistics, wanted.unbiased)
    optimizing = optimizer_model(update[0], values, *update[1:])
    parts = {TRAINING: training, EVAL: evaluation, OPTIMIZER: optimizing}
    for part in parts.values():
        part.ir_version = min(part.ir_version, _IR)
    for part in (training, evaluation):
        _with_weights_last(part, values | frozen)
        load(part, "" if isinstance(model, ModelProto) else model)
        if is_too_large(part):
            raise OptionError(
                "The models hold the weights that are not trained, and a file holds 2 GB. Name them in frozen_params, so that "
                "the checkpoint has them."
            )
    data = [value.name for value in training.graph.input if value.name not in values | frozen]
    if hidden := [name for name in data if "_grad" in name]:
        raise OptionError(
            f"The training API takes {hidden[0]!r}, an input with _grad in its name, for a gradient. Rename it."
        )
    _add_buffers(training, values)
    files = {name: part.SerializeToString() for name, part in parts.items()} | {CHECKPOINT: checkpoint(values, frozen)}
    return files | ({NOMINAL: checkpoint(values, frozen, nominal=True)} if nominal else {})


def _trained_and_frozen(model: _Model, wanted: _Wanted) -> tuple[_Model, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The model with its weights as initializers, the weights to train, and those that the checkpoint holds besides.

    :raises OptionError: a name is in both lists, or nothing is left to train.
    :raises UnknownNameError: a name that does not exist.
    """
    if wanted.trainable is not None and not listed(wanted.trainable, "trainable"):
        raise OptionError("trainable=[] trains nothing. Leave it out to train every parameter.")
    model, values = trained(model, wanted.trainable)
    if not wanted.frozen:
        return model, values, {}
    names = listed(wanted.frozen, "frozen_params")
    held = {name: value for name, (value, _) in get_train_initializer(model).items()}
    asked = listed(wanted.trainable or (), "trainable")
    if twice := [name for name in names if name in values and name in asked]:
        raise OptionError(f"{twice[0]!r} is in trainable and in frozen_params. Leave it out of one of them.")
    is_chosen = wanted.trainable is not None or adapters_of(read(model))
    found = weights(model)
    others = [name for name in found.trainable if name in held and not (is_chosen and name in values)]
    chosen = matching(names, list(held), others, "frozen_params")
    if unknown := [name for name in chosen if name not in held]:
        raise UnknownNameError(
            f"{unknown[0]!r} in frozen_params is no float initializer.{did_you_mean(unknown[0], held)} There are: "
            f"{choices(held)}."
        )
    left = {name: value for name, value in values.items() if name not in chosen}
    if not left:
        raise OptionError(f"frozen_params={names!r} leaves nothing to train. Without it these are: {choices(values)}.")
    return model, left, {name: held[name] for name in held if name in chosen}


def _sources(model: _Model, wanted: _Wanted) -> tuple[_Model, _Model, list[Statistic]]:
    """The model to train and the model to evaluate, which are one if they do the same, and the running statistics."""
    for name, mode, modes in (
        ("batch_norm", wanted.batch_norm, BATCH_NORMS),
        ("dropout", wanted.dropout, DROPOUTS),
    ):
        if mode not in modes:
            raise OptionError(f"{name}={mode!r}; there are {choices(modes)}.")
    refuse_training_mode(model, wanted.batch_norm != "training", wanted.dropout != "training")
    training = still = model
    statistics: list[Statistic] = []
    if wanted.batch_norm == "training":
        training, still, statistics = in_training_mode(model)
    if wanted.dropout == "training":
        training, still = dropping(training), in_inference_mode(still)
    return training, still, statistics


def _add_scalar(model: ModelProto, loss: str) -> str:
    """The output that is the loss without axes, which is added in place if the loss has some."""
    graph = model.graph
    declared = next(value for value in graph.output if value.name == loss).type.tensor_type
    if declared.HasField("shape") and not declared.shape.dim:
        return loss
    taken = names_of(graph) | {node.name for node in graph.node}
    scalar, shape = fresh("loss", taken), fresh("loss_shape", taken)
    graph.initializer.append(numpy_helper.from_array(np.zeros(0, np.int64), shape))
    graph.node.append(helper.make_node("Reshape", [loss, shape], [scalar], scalar))
    graph.output.append(helper.make_tensor_value_info(scalar, declared.elem_type, []))
    return scalar


def _add_slopes(model: ModelProto, gradients: Mapping[str, str]) -> list[str]:
    """Outputs `<input>.gradient`, which are added in place: the training API hides an output whose name ends with _grad."""
    graph = model.graph
    taken = names_of(graph) | {node.name for node in graph.node}
    declared = {value.name: value for value in graph.output}
    found = []
    for name, gradient in gradients.items():
        found.append(fresh(f"{name}.gradient", taken))
        graph.node.append(helper.make_node("Identity", [gradient], [found[-1]], found[-1]))
        graph.output.add(name=found[-1], type=declared[gradient].type)
    return found


def _with_values(made: ModelProto, source: ModelProto, names: Sequence[str]) -> ModelProto:
    """`made`, a model with nodes of `source`, with those that compute other values of `source` too.

    :raises UnknownNameError: `source` computes no value of a name.
    """
    makers = {name: node for node in source.graph.node for name in node.output if name}
    if unknown := [name for name in names if name not in makers]:
        outputs = [value.name for value in source.graph.output]
        raise UnknownNameError(
            f"{unknown[0]!r} in additional_outputs is no value that the model computes.{did_you_mean(unknown[0], makers)} "
            f"Its outputs are {choices(outputs)}."
        )
    there = {name: node for node in made.graph.node for name in node.output}
    if all(name in there and _is_same(there[name], makers[name]) for name in names):
        return made
    newest = versions_of(made)[""]
    if versions_of(source)[""] != newest:
        source = upgrade(source, newest)
        makers = {name: node for node in source.graph.node for name in node.output if name}
    taken, wanted = names_of(made.graph), list(names)
    missing: dict[str, NodeProto] = {}  # by the first output
    while wanted:
        name = wanted.pop()
        node = makers.get(name)
        if node is None or (name in there and _is_same(there[name], node)) or node.output[0] in missing:
            continue
        if clash := [own for own in node.output if own in taken]:
            raise UnknownNameError(f"The training has a value {clash[0]!r}, and so has the model. Rename the value.")
        missing[node.output[0]] = node
        wanted += reads_of(node)
    result = ModelProto()
    result.CopyFrom(made)
    result.graph.node.extend(node for node in source.graph.node if node.output and node.output[0] in missing)
    held = {tensor.name for tensor in made.graph.initializer} | {value.name for value in made.graph.input}
    reads = {name for node in missing.values() for name in reads_of(node)} - held
    result.graph.initializer.extend(tensor for tensor in source.graph.initializer if tensor.name in reads)
    result.graph.input.extend(value for value in source.graph.input if value.name in reads)
    declared = {value.name for value in result.graph.output} | {value.name for value in result.graph.value_info}
    known = (*source.graph.output, *source.graph.value_info)
    result.graph.value_info.extend(value for value in known if value.name in names and value.name not in declared)
    return result


def _is_same(one: NodeProto, other: NodeProto) -> bool:
    """True if both compute the first outputs of `other` of the same values."""
    count = len(other.output)
    return (one.op_type, one.domain, list(one.input), list(one.output[:count])) == (
        other.op_type,
        other.domain,
        list(other.input),
        list(other.output),
    )


def _training_model(
    made: ModelProto, returned: Sequence[str], values: Mapping[str, np.ndarray], gradients: Mapping[str, str]
) -> ModelProto:
    """The values to return, and the gradients, which are added to buffers."""
    training = select_model_inputs_outputs(
        made, list(dict.fromkeys([*returned, *(gradients[name] for name in values)]))
    )
    graph = training.graph
    refill(graph.output, [value for value in graph.output if value.name in returned])
    _make_room_for_buffers(graph, values)
    for name in values:
        buffer, out = _buffer_of(name)
        graph.node.append(
            helper.make_node(
                "InPlaceAccumulatorV2", [buffer, gradients[name], _RESET], [out], f"{name}/accumulate", domain=MICROSOFT
            )
        )
    if MICROSOFT not in versions_of(training):
        training.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return training


def _make_room_for_buffers(graph: GraphProto, values: Iterable[str]) -> None:
    """Give results that have the name of a buffer of a gradient, or of the switch that empties them, another one; in place.

    :raises UnknownNameError: an input, an output or an initializer has one.
    """
    taken, made = names_of(graph), {name for node in graph.node for name in node.output}
    clashes = sorted(taken & {_RESET, *(name for value in values for name in _buffer_of(value))})
    made -= {value.name for value in graph.output}
    if fixed := [name for name in clashes if name not in made]:
        raise UnknownNameError(f"The training has a value {fixed[0]!r}, and so has the model. Rename the value.")
    rename_everywhere(graph, {name: fresh(name, taken) for name in clashes})


def _buffer_of(name: str) -> tuple[str, str]:
    """The input that adds up the gradients of a weight, and the output that says that it has."""
    return f"{name}_grad.accumulation.buffer", f"{name}_grad.accumulation.out"


def _add_buffers(training: ModelProto, values: Mapping[str, np.ndarray]) -> None:
    """Declare the buffers and the switch that empties them, after all other inputs and outputs."""
    graph = training.graph
    for name, value in values.items():
        buffer, out = _buffer_of(name)
        graph.input.append(helper.make_tensor_value_info(buffer, TensorProto.FLOAT, value.shape))
        graph.output.append(helper.make_tensor_value_info(out, TensorProto.BOOL, [1]))
    graph.input.append(helper.make_tensor_value_info(_RESET, TensorProto.BOOL, [1]))


def _move_statistics(training: ModelProto, statistics: Sequence[Statistic], unbiased: bool) -> None:
    """Overwrite the running statistics of the checkpoint in every run, with the values of the next step."""
    if not statistics:
        return
    graph = training.graph
    outputs = len(graph.output)
    following = with_following(training, statistics, unbiased)
    del graph.output[outputs:]
    taken = names_of(graph)
    always = fresh("always", taken)
    graph.initializer.append(numpy_helper.from_array(np.array([True]), always))
    for name, moved in following.items():
        graph.node.append(
            helper.make_node(
                "InPlaceAccumulatorV2",
                [name, moved, always],
                [fresh(f"{name}.moved", taken)],
                f"{name}/move",
                domain=MICROSOFT,
            )
        )


def _with_weights_last(model: ModelProto, values: Mapping[str, np.ndarray]) -> None:
    """Data come first, then the weights, none of them as an initializer."""
    graph = model.graph
    inputs = [value for value in graph.input if value.name not in values]
    inputs += [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in values.items()
    ]
    kept = [tensor for tensor in graph.initializer if tensor.name not in values]
    for field, entries in (("input", inputs), ("initializer", kept)):
        refill(getattr(graph, field), entries)
