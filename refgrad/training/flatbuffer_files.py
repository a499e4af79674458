"""The files of ONNX Runtime that are flatbuffers: the checkpoint of its training API, and the adapters of its sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx import helper

from refgrad.errors import OptionError
from refgrad.installing import install

_CHECKPOINT_VERSION, _ADAPTER_VERSION = 2, 1
_LARGEST = 2**31 - 2**16  # bytes of a file, whose offsets are signed


def checkpoint(trained: Mapping[str, np.ndarray], frozen: Mapping[str, np.ndarray], nominal: bool = False) -> bytes:
    """A checkpoint of the training API: the weights that are trained, and others that are not.

    Tensor: name, doc_string, dims, data_type, raw_data. ModuleState: requires_grad_params, frozen_params, is_nominal_state.
    Checkpoint: version, module_state.

    :param nominal: leave out the shapes and the numbers, which a device reads from another checkpoint.
    :raises OptionError: flatbuffers is not installed, or the weights are too large.
    """
    arrays = (*trained.values(), *frozen.values())
    file = _Tables(
        "A checkpoint",
        sum(value.nbytes for value in arrays),
        "Train fewer weights (trainable), or name fewer in frozen_params.",
    )
    slots = _Slots(name=0, dims=2, kind=3, content=4, fields=7)
    tensors = [[file.tensor(name, value, slots, nominal) for name, value in part.items()] for part in (trained, frozen)]
    module = file.table(dict(enumerate(map(file.vector, tensors))), 4, flags=(2,) if nominal else ())
    return file.finished(file.table({1: module}, 4, {0: _CHECKPOINT_VERSION}), b"ODTC")


def adapter(parameters: Mapping[str, np.ndarray], adapter_version: int, model_version: int) -> bytes:
    """An adapter of ONNX Runtime 1.20 and later.

    Parameter: name, dims, data_type, raw_data. Adapter: format_version, adapter_version, model_version, parameters.

    :raises OptionError: flatbuffers is not installed, or the parameters are too large.
    """
    size = sum(value.nbytes for value in parameters.values())
    file = _Tables("An adapter", size, "Take a smaller rank.")
    slots = _Slots(name=0, dims=1, kind=2, content=3, fields=4)
    tensors = file.vector([file.tensor(name, value, slots) for name, value in parameters.items()])
    versions = {0: _ADAPTER_VERSION, 1: adapter_version, 2: model_version}
    return file.finished(file.table({3: tensors}, 4, versions), b"TORT")


class _Slots(NamedTuple):
    """The positions of the fields of a tensor in its table."""

    name: int
    dims: int
    kind: int
    content: int
    fields: int


class _Tables:
    """The tables of a file in the making, the inner ones first."""

    def __init__(self, what: str, size: int, advice: str) -> None:
        try:
            import flatbuffers
        except ImportError as error:
            raise OptionError(
                f"{what} of onnxruntime is a flatbuffer. Install flatbuffers: {install('train')}."
            ) from error
        if size > _LARGEST:
            raise OptionError(f"The weights have {size:,} bytes. {what} of onnxruntime holds 2 GB. {advice}")
        self.builder: Any = flatbuffers.Builder(size + 1024)

    def table(
        self,
        offsets: Mapping[int, int],
        slots: int,
        numbers: Mapping[int, int] | None = None,
        flags: Sequence[int] = (),
    ) -> int:
        """A table of `slots` fields: other tables, int32 numbers, and bools that are true."""
        self.builder.StartObject(slots)
        for slot, offset in offsets.items():
            self.builder.PrependUOffsetTRelativeSlot(slot, offset, 0)
        for slot, number in (numbers or {}).items():
            self.builder.PrependInt32Slot(slot, number, 0)
        for slot in flags:
            self.builder.PrependBoolSlot(slot, True, False)
        return int(self.builder.EndObject())

    def tensor(self, name: str, value: np.ndarray, slots: _Slots, nominal: bool = False) -> int:
        """A tensor; a nominal one has a name and a type alone."""
        parts = {slots.name: self.builder.CreateString(name)}
        if not nominal:
            little = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
            parts[slots.dims] = self.builder.CreateNumpyVector(np.array(value.shape, np.int64))
            parts[slots.content] = self.builder.CreateByteVector(little.tobytes())
        return self.table(parts, slots.fields, {slots.kind: int(helper.np_dtype_to_tensor_dtype(value.dtype))})

    def vector(self, members: Sequence[int]) -> int:
        """A vector of tables."""
        self.builder.StartVector(4, len(members), 4)
        for member in reversed(members):
            self.builder.PrependUOffsetTRelative(member)
        return int(self.builder.EndVector())

    def finished(self, root: int, identifier: bytes) -> bytes:
        """The bytes of the file."""
        self.builder.Finish(root, file_identifier=identifier)
        return bytes(self.builder.Output())
