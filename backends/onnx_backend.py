"""The interpreter behind `onnx.backend`: for programs that take an ONNX_BACKEND_MODULE, and for onnx's own backend tests.

The module has the functions of a backend. `OnnxBackend` is the class for `onnx.backend.test.BackendTest`:

>>> import numpy as np
>>> from onnx import helper
>>> from refgrad.backends import onnx_backend
>>> node = helper.make_node("Sub", ["a", "b"], ["c"])
>>> onnx_backend.run_node(node, [np.array([3.0, 5.0]), np.array([1.0])])
(array([2., 4.]),)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep

from refgrad.backends.base import ModelLike, Prepared
from refgrad.backends.numpy import NumpyBackend
from refgrad.errors import BackendError, FeedError, RefgradError

_TOLERANCES = ("rtol", "atol")  # BackendTest passes its tolerances to run()


class OnnxModel(BackendRep):
    """A prepared model that takes arrays by position."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def run(self, inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, ...]:
        """Compute all outputs for `inputs`, in the order of the graph's inputs: all of them, or those without a default.

        Raises FeedError, BackendError.
        """
        every = [value.name for value in self._prepared.inputs]
        names = [value.name for value in self._prepared.inputs if not value.has_default]
        if len(inputs) not in (len(names), len(every)):
            raise FeedError(f"The model has {len(names)} inputs without a default: {names}. {len(inputs)} are given.")
        feeds = dict(zip(names if len(inputs) == len(names) else every, inputs, strict=True))
        return tuple(self._prepared.run(feeds).values())


class OnnxBackend(Backend):
    """`refgrad.backends.numpy` as a backend of onnx, on the device "CPU"."""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """True if `device` is "CPU"."""
        return device == "CPU"

    @classmethod
    def is_compatible(cls, model: ModelLike, device: str = "CPU", **kwargs: Any) -> bool:
        """True if `model` can be prepared for `device`."""
        try:
            cls.prepare(model, device, **kwargs)
        except RefgradError:
            return False
        return True

    @classmethod
    def prepare(cls, model: ModelLike, device: str = "CPU", **kwargs: Any) -> OnnxModel:
        """Plan `model` with the options of `NumpyBackend.prepare`.

        Raises BackendError for another device and for what cannot be run, InvalidModelError, OptionError.
        """
        if not cls.supports_device(device):
            raise BackendError(f"The interpreter runs on 'CPU', not on {device!r}.")
        options = {name: value for name, value in kwargs.items() if name not in _TOLERANCES}
        return OnnxModel(NumpyBackend().prepare(model, **options))

    @classmethod
    def run_model(cls, model: ModelLike, inputs: Sequence[Any], device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Prepare `model` and run it once."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Sequence[Any],
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one operator: an array for each input that `node` names, a list of arrays for a sequence.

        `outputs_info` declares the dtype and shape of each output: some gradient operators need them. `opset_version` is
        the version of the node's domain, by default the newest.
        """
        names = [name for name in node.input if name]
        if len(inputs) != len(names):
            raise FeedError(f"The node has the inputs {names}. {len(inputs)} are given.")
        opsets = {"": onnx.defs.onnx_opset_version(), **_newest(node)}
        if "opset_version" in kwargs:
            opsets["" if node.domain == "ai.onnx" else node.domain] = kwargs.pop("opset_version")
        feeds = dict(zip(names, inputs, strict=True))
        outputs = [name for name in node.output if name]
        graph = helper.make_graph(
            [node],
            node.op_type,
            [helper.make_value_info(name, _type(value)) for name, value in feeds.items()],
            [helper.make_empty_tensor_value_info(name) for name in outputs]
            if outputs_info is None
            else [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
                for name, (dtype, shape) in zip(outputs, outputs_info, strict=True)
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid(*opset) for opset in opsets.items()])
        return cls.run_model(model, list(feeds.values()), device, **kwargs)


def _newest(node: onnx.NodeProto) -> dict[str, int]:
    if node.domain in ("", "ai.onnx"):
        return {}
    known = onnx.defs.has(node.op_type, node.domain)
    return {node.domain: onnx.defs.get_schema(node.op_type, node.domain).since_version if known else 1}


def _type(value: Any) -> onnx.TypeProto:
    if isinstance(value, list):
        return helper.make_sequence_type_proto(_type(value[0]) if value else onnx.TypeProto())
    array = np.asarray(value)
    dtype = np.dtype(object) if array.dtype.kind in "US" else array.dtype
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(dtype), array.shape)


supports_device = OnnxBackend.supports_device
is_compatible = OnnxBackend.is_compatible
prepare = OnnxBackend.prepare
run_model = OnnxBackend.run_model
run_node = OnnxBackend.run_node
