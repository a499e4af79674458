"""The output of a model that a training compares with the label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import ModelProto, ValueInfoProto, helper

from refgrad.errors import NoGradientError, OptionError, UnknownNameError, choices, did_you_mean
from refgrad.notices import notice
from refgrad.protos.domains import ML
from refgrad.protos.traverse import reads_of
from refgrad.protos.types import FLOATS
from refgrad.training.arguments import listed


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


def reaching(
    model: ModelProto, weights: Mapping[str, np.ndarray], outputs: Sequence[str], trainable: Sequence[str] | None
) -> dict[str, np.ndarray]:
    """The weights on which the outputs depend. A notice names the others, such as the weights of another head.

    :raises NoGradientError: there are none, or `trainable` names another one.
    """
    makers = {name: node for node in model.graph.node for name in node.output if name}
    wanted, needed = [*outputs], {*outputs}
    while wanted:
        node = makers.pop(wanted.pop(), None)
        new = set() if node is None else set(reads_of(node)) - needed
        needed |= new
        wanted += new
    left = [name for name in weights if name not in needed]
    those = f"output {outputs[0]!r} does" if len(outputs) == 1 else f"outputs {choices(outputs)} do"
    asked = listed(trainable or (), "trainable")
    if named := [name for name in left if name in asked]:
        raise NoGradientError(
            f"trainable names weights on which the {those} not depend: {choices(named)}. Leave them out."
        )
    if left and len(left) == len(weights):
        raise NoGradientError(
            f"The {those} not depend on the weights {choices(left)}. Choose others, or another output."
        )
    if left:
        notice(f"Not trained, since the {those} not depend on them: {choices(left)}.")
    return {name: value for name, value in weights.items() if name in needed}


def _is_float(value: ValueInfoProto) -> bool:
    return value.type.HasField("tensor_type") and value.type.tensor_type.elem_type in FLOATS
