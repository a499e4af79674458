"""The files that the training API of ONNX Runtime 1.19 reads: three models and a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from refgrad.errors import OptionError
from refgrad.installing import install
from refgrad.model.checks.malformed import explained
from refgrad.model.reading import read
from refgrad.model.writing import new_folder
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.traverse import refill, versions_of
from refgrad.reverse.assembly import names_in
from refgrad.rewrites.selection import select_model_inputs_outputs
from refgrad.tables.conventions import ConventionOptions, Conventions
from refgrad.training.losses import differentiated
from refgrad.training.normalization import refuse_training_mode
from refgrad.training.optimizers import SGD, AdamW, Optimizer
from refgrad.training.outputs import compared_output
from refgrad.training.step import trained

TRAINING, EVAL, OPTIMIZER, CHECKPOINT = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"
_RESET = "lazy_reset_grad"
_OPSET, _IR = 21, 10  # the newest ones that 1.19 reads
_VERSION = 2  # of the checkpoint
_ADAMW = AdamW(eps=1e-6, weight_decay=0.0, epsilon="uncorrected")  # the one that generate_artifacts writes
_LARGEST = 2**31 - 2**16  # bytes of a checkpoint, whose offsets are signed


def write_artifacts(
    folder: str | os.PathLike[str],
    model: ModelProto | str | os.PathLike[str],
    loss: str | ModelProto | os.PathLike[str] | None = "squared_error",
    optimizer: Optimizer | None = None,
    *,
    trainable: Sequence[str] | None = None,
    output: str | None = None,
    label: str = "label",
    sample_weight: str | None = None,
    reduction: str = "mean",
    loss_settings: Mapping[str, Any] | None = None,
    **conventions: Unpack[ConventionOptions],
) -> None:
    """Write training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint for onnxruntime 1.19's training API.

    The training model returns the loss and adds the gradients to buffers; the eval model returns the loss and the outputs of
    the model; both take the data, the label and the weights, which the checkpoint holds. Learning rates and batches are the
    API's. BatchNormalization is as the model has it. Everything except the model, which is in plain operators, is
    as `onnxruntime.training.artifacts.generate_artifacts` writes it.

    :param folder: a new folder.
    :param optimizer: `SGD()` without momentum, or `AdamW`, with epsilon="uncorrected" only without weight decay. 1.19 has no
        others. The default is AdamW(eps=1e-6, weight_decay=0.0, epsilon="uncorrected"), as `generate_artifacts` writes it.
    :param trainable: as the other options, see `step_model`. Weights are float32.
    :param conventions: `kinks`, `quantization` and the other conventions of `refgrad.gradient`.
    :raises NoGradientError: no weight gets a gradient.
    :raises OptionError: an option does not fit, or flatbuffers, which onnxruntime installs, is not there.
    :raises UnknownNameError: a name that does not exist, or nothing is trainable.
    :raises OutputFileError: the folder exists, or cannot be written.

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
    files = _artifacts(
        model,
        _ADAMW if optimizer is None else optimizer,
        trainable,
        (loss, output),
        (label, sample_weight, reduction, loss_settings, Conventions(**conventions)),
    )
    with new_folder(folder) as place:
        for name, content in files.items():
            Path(place, name).write_bytes(content)


@explained
def _artifacts(
    model: ModelProto | str | os.PathLike[str],
    optimizer: Optimizer,
    trainable: Sequence[str] | None,
    compared: tuple[Any, str | None],
    settings: tuple[Any, ...],
) -> dict[str, bytes]:
    """The files by name."""
    update = _optimizer_model(optimizer)
    model, values = trained(model, trainable)
    refuse_training_mode(model)
    if wrong := next((name for name, value in values.items() if value.dtype != np.float32), ""):
        raise OptionError(
            f"The optimizers of onnxruntime 1.19 train float32, and {wrong!r} is {values[wrong].dtype}. Leave it out of "
            "trainable."
        )
    loss, output = compared
    if output is not None or not isinstance(loss, ModelProto | os.PathLike):
        output = compared_output(read(model), output)
    made, loss_name = differentiated(model, list(values), loss, output, *settings)
    if newest := next((version for version in versions_of(made).values() if version > _OPSET), 0):
        raise OptionError(
            f"The model is of opset {newest}, and onnxruntime 1.19 reads {_OPSET} at most. Convert it with "
            "onnx.version_converter first."
        )
    gradients = names_in(made)[1]
    computed = {name for node in made.graph.node for name in node.output} - {loss_name}
    results = [value.name for value in read(model).graph.output if value.name in computed]
    evaluation = select_model_inputs_outputs(made, [loss_name, *results])
    training = _training_model(made, loss_name, values, gradients)
    for part in (training, evaluation, update):
        part.ir_version = min(part.ir_version, _IR)
    _with_weights_last(evaluation, values)
    parts = {TRAINING: training, EVAL: evaluation, OPTIMIZER: update}
    return {name: part.SerializeToString() for name, part in parts.items()} | {CHECKPOINT: _checkpoint(values)}


def _training_model(
    made: ModelProto, loss: str, values: Mapping[str, np.ndarray], gradients: Mapping[str, str]
) -> ModelProto:
    """Loss and gradients, which are added to buffers."""
    training = select_model_inputs_outputs(made, [loss, *dict.fromkeys(gradients[name] for name in values)])
    _with_weights_last(training, values)
    graph = training.graph
    del graph.output[1:]
    for name, value in values.items():
        buffer, out = f"{name}_grad.accumulation.buffer", f"{name}_grad.accumulation.out"
        graph.input.append(helper.make_tensor_value_info(buffer, TensorProto.FLOAT, value.shape))
        graph.output.append(helper.make_tensor_value_info(out, TensorProto.BOOL, [1]))
        graph.node.append(
            helper.make_node(
                "InPlaceAccumulatorV2", [buffer, gradients[name], _RESET], [out], f"{name}/accumulate", domain=MICROSOFT
            )
        )
    graph.input.append(helper.make_tensor_value_info(_RESET, TensorProto.BOOL, [1]))
    if MICROSOFT not in versions_of(training):
        training.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return training


def _with_weights_last(model: ModelProto, values: Mapping[str, np.ndarray]) -> None:
    """Data come first, then the weights, none of them as an initializer."""
    graph = model.graph
    inputs = [value for value in graph.input if value.name not in values]
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in values.items()]
    kept = [tensor for tensor in graph.initializer if tensor.name not in values]
    for field, entries in (("input", inputs), ("initializer", kept)):
        refill(getattr(graph, field), entries)


def _optimizer_model(optimizer: Optimizer) -> ModelProto:
    """One node that updates lists of weights in place."""
    value, sequence = helper.make_tensor_value_info, helper.make_tensor_sequence_value_info
    inputs: list[ValueInfoProto] = [
        value("learning_rate", TensorProto.FLOAT, [1]),
        value("step", TensorProto.INT64, [1]),
    ]
    lists = ["params", "gradients", "first_order_moments"]
    if type(optimizer) is AdamW:
        is_uncorrected = optimizer.epsilon == "uncorrected"
        if is_uncorrected and optimizer.weight_decay:
            raise OptionError(
                "With epsilon='uncorrected' AdamW of onnxruntime 1.19 decays a weight after its step, and AdamW of refgrad "
                "before it. Give weight_decay=0.0, or epsilon='corrected'."
            )
        lists.append("second_order_moments")
        node = _update(
            "AdamWOptimizer", ["learning_rate", "step", *lists],
            alpha=optimizer.beta1, beta=optimizer.beta2, epsilon=optimizer.eps, weight_decay=optimizer.weight_decay,
            adam_mode=int(is_uncorrected), correct_bias=1,
        )  # fmt: skip
    elif optimizer == SGD():
        node = _update("SGDOptimizerV2", ["learning_rate", *lists[:2]])
    else:
        raise OptionError(
            f"onnxruntime 1.19 has the optimizers SGD() without momentum and AdamW(), and not {optimizer!r}. Take one of them."
        )
    inputs += [sequence(name, TensorProto.FLOAT, None) for name in lists]
    graph = helper.make_graph([node], "optimizer", inputs, [value("updated", TensorProto.BOOL, [1])])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, producer_name="refgrad")


def _update(op_type: str, inputs: Sequence[str], **attributes: Any) -> NodeProto:
    return helper.make_node(op_type, inputs, ["updated"], "update", domain=MICROSOFT, **attributes)


def _checkpoint(values: Mapping[str, np.ndarray]) -> bytes:
    """The weights in the tables of ONNX Runtime's format.

    Tensor: name, doc_string, dims, data_type, raw_data. ModuleState: requires_grad_params, frozen_params, of which there
    are none: weights that are not trained are in the models. Checkpoint: version, module_state.
    """
    try:
        import flatbuffers
    except ImportError as error:
        raise OptionError(
            f"A checkpoint of onnxruntime is a flatbuffer. Install flatbuffers: {install('train')}."
        ) from error
    size = sum(value.nbytes for value in values.values())
    if size > _LARGEST:
        raise OptionError(f"The weights have {size:,} bytes, and a checkpoint holds 2 GB. Train fewer: give trainable.")
    builder = flatbuffers.Builder(size + 1024)

    def table(slots: Mapping[int, int], count: int, numbers: Mapping[int, int]) -> int:
        builder.StartObject(count)
        for slot, offset in slots.items():
            builder.PrependUOffsetTRelativeSlot(slot, offset, 0)
        for slot, number in numbers.items():
            builder.PrependInt32Slot(slot, number, 0)
        return int(builder.EndObject())

    tensors = []
    for name, value in values.items():
        parts = {
            0: builder.CreateString(name),
            2: builder.CreateNumpyVector(np.array(value.shape, np.int64)),
            4: builder.CreateByteVector(np.ascontiguousarray(value).astype("<f4", copy=False).tobytes()),
        }
        tensors.append(table(parts, 7, {3: int(TensorProto.FLOAT)}))
    vectors = []
    for members in (tensors, []):
        builder.StartVector(4, len(members), 4)
        for tensor in reversed(members):
            builder.PrependUOffsetTRelative(tensor)
        vectors.append(builder.EndVector())
    module = table(dict(enumerate(vectors)), 4, {})
    builder.Finish(table({1: module}, 4, {0: _VERSION}), file_identifier=b"ODTC")
    return bytes(builder.Output())
