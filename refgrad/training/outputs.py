"""The output of a model that a training compares with the label."""

from __future__ import annotations

from onnx import ModelProto, ValueInfoProto, helper

from refgrad.errors import OptionError, UnknownNameError, choices, did_you_mean
from refgrad.protos.domains import ML
from refgrad.protos.types import FLOATS


def without_maps(model: ModelProto) -> ModelProto:
    """The model that returns the tensors which ZipMap makes maps of; the model itself where there are none."""
    maps = {node.output[0]: node.input[0] for node in model.graph.node if (node.domain, node.op_type) == (ML, "ZipMap")}
    if not any(value.name in maps for value in model.graph.output):
        return model
    made = ModelProto()
    made.CopyFrom(model)
    for value in made.graph.output:
        if value.name in maps:
            value.CopyFrom(helper.make_tensor_value_info(maps[value.name], 1, ["N", None]))
    return made


def compared_output(model: ModelProto, name: str | int | None) -> str:
    """The output that is trained: the one that is named, the only one, or the only one of floats.

    :raises OptionError: there are several of floats, or none.
    :raises UnknownNameError: no output has that name, or what ZipMap makes of one.
    """
    outputs = [value.name for value in model.graph.output]
    if isinstance(name, str):
        if name not in outputs:
            raise UnknownNameError(
                f"{name!r} is no output that can be compared.{did_you_mean(name, outputs)} There are: {choices(outputs)}."
            )
        return name
    if isinstance(name, int) and not isinstance(name, bool) and 0 <= name < len(outputs):
        return outputs[name]
    if name is not None:
        raise OptionError(f"output={name!r}: it is a name, or a position from 0 to {len(outputs) - 1}.")
    floats = [value.name for value in model.graph.output if _is_float(value)]
    found = outputs if len(outputs) == 1 else floats
    if len(found) != 1:
        raise OptionError(
            f"The model has {len(found)} outputs of floats. Name the one to train: output={(found or outputs)[0]!r}, of "
            f"{choices(found or outputs)}."
        )
    return found[0]


def _is_float(value: ValueInfoProto) -> bool:
    return value.type.HasField("tensor_type") and value.type.tensor_type.elem_type in FLOATS
