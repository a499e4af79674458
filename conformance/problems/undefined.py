"""Points at which the specification of an operator leaves its result open: executors differ there, and nobody is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from refgrad.backends.numpy.backend import NumpyModel
from refgrad.errors import BackendError
from refgrad.model.external import array_of
from refgrad.protos.traverse import attribute_value

Values = Mapping[str, Any]


def undefined(model: ModelProto, forward: NumpyModel, at: Mapping[str, Any]) -> str:
    """The first node without a defined result at a point, and why; "" if all have one. Bodies and functions are not searched.

    :param forward: the model in float64; `at` is the point, in float64.
    """
    suspects = [node for node in model.graph.node if node.domain in ("", "ai.onnx") and node.op_type in _OPEN]
    if not suspects:
        return ""
    try:
        known = {t.name: array_of(t) for t in model.graph.initializer} | dict(forward.run(at, trace=True))
    except BackendError:
        return ""
    for node in suspects:
        operands = [known.get(name) for name in node.input]
        if all(isinstance(operand, np.ndarray) for name, operand in zip(node.input, operands, strict=True) if name):
            settings = {attribute.name: attribute_value(attribute) for attribute in node.attribute}
            if why := _OPEN[node.op_type](operands, settings):
                return f"{_called(node)!r} ({node.op_type}) is not defined here: {why}"
    return ""


def _called(node: NodeProto) -> str:
    return node.name or next(filter(None, node.output), "")


_TWICE = "its indices name an element twice, and do not say which update it gets"


def _scatter_elements(operands: list[Any], settings: Mapping[str, Any]) -> str:
    data, indices = operands[:2]
    if settings.get("reduction", "none") != "none" or not indices.size:
        return ""
    axis = settings.get("axis", 0) % data.ndim
    places = list(np.indices(indices.shape))
    places[axis] = indices % data.shape[axis]
    return _repeated(np.stack(places, axis=-1).reshape(-1, data.ndim))


def _scatter_nd(operands: list[Any], settings: Mapping[str, Any]) -> str:
    data, indices = operands[:2]
    depth = indices.shape[-1]
    if settings.get("reduction", "none") != "none" or not indices.size or not all(data.shape[:depth]):
        return ""
    return _repeated(indices.reshape(-1, depth) % np.array(data.shape[:depth]))


def _max_unpool(operands: list[Any], settings: Mapping[str, Any]) -> str:
    return _repeated(operands[1].reshape(-1, 1)) if operands[1].size else ""


def _repeated(places: np.ndarray) -> str:
    return _TWICE if len(np.unique(places, axis=0)) < len(places) else ""


def _batch_normalization(operands: list[Any], settings: Mapping[str, Any]) -> str:
    if settings.get("training_mode", 0) or not operands[4].size:
        return ""
    least = float(operands[4].min())
    return f"its variance is {least:.3g}" if least + settings.get("epsilon", 1e-5) <= 0 else ""


_OPEN: dict[str, Callable[[list[Any], Mapping[str, Any]], str]] = {
    "BatchNormalization": _batch_normalization,
    "MaxUnpool": _max_unpool,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
}
