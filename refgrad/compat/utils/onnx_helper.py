"""Names of `onnxcustom.utils.onnx_helper`."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from refgrad.errors import OptionError, choices
from refgrad.protos.traverse import versions_of
from refgrad.rewrites.selection import onnx_rename_names, onnx_rename_weights, select_model_inputs_outputs

__all__ = [
    "dtype_to_var_type",
    "get_onnx_opset",
    "onnx_rename_names",
    "onnx_rename_weights",
    "proto_type_to_dtype",
    "select_model_inputs_outputs",
]

_KINDS = {"float": TensorProto.FLOAT, "double": TensorProto.DOUBLE, "int64": TensorProto.INT64}  # what skl2onnx reads


def get_onnx_opset(onx: ModelProto, domain: str = "") -> int:
    """The version of a domain that a model imports.

    :raises OptionError: the model does not import the domain.
    """
    versions = versions_of(onx)
    if domain not in versions:
        raise OptionError(f"The model does not import the domain {domain!r}; it imports {choices(versions)}.")
    return versions[domain]


def proto_type_to_dtype(proto_type: int | str) -> Any:
    """The NumPy type of a type that scikit-learn's models have: float32, float64 or int64.

    :param proto_type: the number of a TensorProto.DataType, or the type as ONNX Runtime writes it, "tensor(double)".
    :raises OptionError: it is another type.
    """
    for name, kind in _KINDS.items():
        if proto_type in (kind, f"tensor({name})"):
            return helper.tensor_dtype_to_np_dtype(kind).type
    raise OptionError(f"There is no {proto_type!r}; there are {choices(f'tensor({name})' for name in _KINDS)}.")


def dtype_to_var_type(dtype: Any) -> type:
    """The class of skl2onnx for the inputs of a NumPy type, float32, float64 or int64. It needs skl2onnx.

    :raises OptionError: it is another type.
    """
    from skl2onnx.common import data_types

    for name, kind in _KINDS.items():
        if np.dtype(dtype) == helper.tensor_dtype_to_np_dtype(kind):
            return getattr(data_types, f"{name.capitalize()}TensorType")  # type: ignore[no-any-return]
    raise OptionError(f"There is no class for {np.dtype(dtype).name}; there are float32, float64 and int64.")
