"""Adapters in files of their own, which sessions of ONNX Runtime 1.20 and later load beside one model."""

from __future__ import annotations

import os

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from refgrad.errors import OptionError
from refgrad.model.checks.malformed import explained
from refgrad.model.external import ExternalData, Opened, dtype_of, place_of, refuse_external, values_of
from refgrad.model.reading import opened, read
from refgrad.model.writing import refuse_replacing, replacing
from refgrad.protos.traverse import refill
from refgrad.training.adapters import adapters_of
from refgrad.training.flatbuffer_files import adapter

_INT32 = range(-(2**31), 2**31)


def save_adapter(
    path: str | os.PathLike[str],
    model: ModelProto | str | os.PathLike[str],
    *,
    adapter_version: int = 1,
    model_version: int = 1,
) -> None:
    """Write the adapters of `model`, which `lora` added, into an .onnx_adapter of ONNX Runtime.

    Its parameters are the tensors `w.lora_A` and `w.lora_B`. `with_adapter_inputs` makes the model for a session.

    :param model: after a training: `training.write_to(adapted)`.
    :param adapter_version: and `model_version`: numbers for the application, which ONNX Runtime does not read.
    :raises OptionError: the model has no adapters, a version is no 32-bit integer, or flatbuffers is not installed.
    :raises OutputFileError: the file cannot be written, or is the model.

    >>> import onnx.parser, os, tempfile
    >>> from refgrad.training import lora, save_adapter
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> m (float[N, 2] x) => (float[N, 2] y) '
    ...     '<float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }'
    ... )
    >>> with tempfile.TemporaryDirectory() as place:
    ...     save_adapter(f"{place}/a.onnx_adapter", lora(model, "w", rank=1))
    ...     os.listdir(place)
    ['a.onnx_adapter']
    """
    for name, version in (("adapter_version", adapter_version), ("model_version", model_version)):
        if type(version) is not int or version not in _INT32:
            raise OptionError(f"{name} is an integer of 32 bits, not {version!r}.")
    content = adapter(_parameters(model), adapter_version, model_version)
    refuse_replacing([path], models=[] if isinstance(model, ModelProto) else [model])
    with replacing(path) as file:
        file.write_bytes(content)


@explained
def _parameters(model: ModelProto | str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The values of the adapters by name."""
    source = opened(model)
    proto = read(source, lift=False)
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    held = {name: tensors[name] for name in _names(proto)}
    if not isinstance(source, Opened):
        for tensor in held.values():
            refuse_external(tensor)
    with ExternalData(place_of(source)) as data:
        return {name: values_of(tensor, data) for name, tensor in held.items()}


@explained
def with_adapter_inputs(model: ModelProto | str | os.PathLike[str]) -> ModelProto:
    """A copy of `model` whose adapters are inputs, as a session needs them that loads an .onnx_adapter.

    Without an adapter a session computes what the model computed before `lora`: the inputs have values, B zeros.

    :raises OptionError: the model has no adapters.
    """
    source = read(model, lift=False)
    names = _names(source)
    made = ModelProto()
    made.CopyFrom(source)
    tensors = {tensor.name: tensor for tensor in made.graph.initializer}
    zeros = {
        name: numpy_helper.from_array(np.zeros(tuple(tensors[name].dims), dtype_of(tensors[name])), name)
        for name in names[1::2]
    }
    refill(made.graph.initializer, [zeros.get(tensor.name, tensor) for tensor in made.graph.initializer])
    there = {value.name for value in made.graph.input}
    made.graph.input.extend(
        helper.make_tensor_value_info(name, tensors[name].data_type, list(tensors[name].dims))
        for name in names
        if name not in there
    )
    return made


def _names(model: ModelProto) -> list[str]:
    """The names of the adapters: A and B of each weight.

    :raises OptionError: there are none.
    """
    names = adapters_of(model)
    missing = set(names) - {tensor.name for tensor in model.graph.initializer}
    if not names or missing:
        raise OptionError("The model has no adapters; refgrad.training.lora adds them.")
    return names
