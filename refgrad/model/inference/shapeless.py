"""Inputs that declare no shape: onnx.checker takes no model with one, unless their number of axes can be told."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from onnx import ModelProto, TensorProto

from refgrad.model import native
from refgrad.protos.domains import ML
from refgrad.protos.traverse import lacks_shape, versions_of

_MOST_AXES = 5
_MOST_INPUTS = 2


def of_each_rank(model: ModelProto) -> Iterator[ModelProto]:
    """Copies of `model` whose inputs without a shape have 0 to 5 axes, as far as onnx infers the types of the copy strictly.

    They have 2 in a model that imports ai.onnx.ml, whose operators take a row per sample. There are no copies for more than
    two such inputs, and none of a model with external data, which lies beside the file.
    """
    bare = [k for k, value in enumerate(model.graph.input) if lacks_shape(value)]
    elsewhere = any(tensor.data_location == TensorProto.EXTERNAL for tensor in model.graph.initializer)
    if elsewhere or len(bare) > _MOST_INPUTS:
        return
    several = (2,) if ML in versions_of(model) else range(_MOST_AXES + 1)
    for ranks in product(several, repeat=len(bare)):
        copy = ModelProto()
        copy.CopyFrom(model)
        for place, rank in zip(bare, ranks, strict=True):
            value = copy.graph.input[place]
            value.type.tensor_type.shape.SetInParent()
            for axis in range(rank):
                value.type.tensor_type.shape.dim.add(dim_param=f"{value.name}_{axis}")
        try:
            native.infer_shapes(copy, check_type=True, strict_mode=True)
        except native.InferenceError:
            continue
        yield copy
