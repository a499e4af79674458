"""Random weights for models whose weights are constant fills, such as the light models that onnx ships.

With one number everywhere every channel is the same, MaxPool ties, and a deep network overflows or its Softmax is uniform. Its
gradient is then zero or rounding noise, and a check cannot tell right from wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from refgrad import traits
from refgrad.backends import get_backend
from refgrad.backends.base import graph_inputs
from refgrad.conformance.problems.feeds import random_feeds
from refgrad.errors import OptionError
from refgrad.model.external import array_of, is_external
from refgrad.model.graph import Node
from refgrad.model.normalise import normalise
from refgrad.model.roles import formal_inputs

# The names of inputs in schemas: matrices and filters, inputs that must stay positive, biases and means.
_MATRIX = frozenset(("A", "B", "Inputs", "W", "weight"))
_POSITIVE = frozenset(("scale", "Scale", "input_var"))
_BIAS = frozenset(("B", "C", "bias", "input_mean"))


def randomize(model: ModelProto, seed: int) -> tuple[ModelProto, int]:
    """A copy of `model` with random numbers for its constant fills, and how many there were.

    A fill is a float initializer, or the ConstantOfShape of a constant shape, with many elements of one value. Matrices and
    filters are drawn from a normal distribution, scales between 0.5 and 1.5, biases with a standard deviation of 0.1. Then one
    random input passes through the model, node by node: each drawn matrix is scaled so that its result has unit variance
    (Mishkin and Matas 2016, "All you need is a good init"), and BatchNormalization gets the mean and variance of its input,
    scales about ½ and biases about 1. So nothing overflows, vanishes or saturates, however deep the model, and most of each
    Relu is on: a deep random network where half of it is off is chaotic, its gradient full of kinks.

    :raises OptionError: nothing in the model is a constant fill.
    """
    redrawn = ModelProto()
    redrawn.CopyFrom(model)
    graph = redrawn.graph
    rng = np.random.default_rng(seed)
    readers = _readers(graph)
    drawn: set[str] = set()
    for tensor in graph.initializer:
        if is_external(tensor) or tensor.name not in readers:
            continue
        array = array_of(tensor)
        if array.dtype.kind == "f" and array.size > 1 and np.all(array == array.flat[0]):
            values = _drawn(array, *readers[tensor.name], rng)
            if values is not None:
                tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
                drawn.add(tensor.name)
    shapes = {t.name: t for t in graph.initializer}
    kept: list[NodeProto] = []
    for node in graph.node:
        values = None
        if node.op_type == "ConstantOfShape" and node.attribute and node.input[0] in shapes:
            filling = array_of(node.attribute[0].t)
            if filling.dtype.kind == "f" and node.output[0] in readers:
                array = np.full(array_of(shapes[node.input[0]]), filling)
                values = _drawn(array, *readers[node.output[0]], rng)
        if values is None:
            kept.append(node)
        else:
            graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
            drawn.add(node.output[0])
    if not drawn:
        raise OptionError("The model has no weights that are constant fills: leave out random weights.")
    del graph.node[:]
    graph.node.extend(kept)
    _calibrate(redrawn, drawn, seed)
    return redrawn, len(drawn)


def _calibrate(model: ModelProto, drawn: set[str], seed: int) -> None:
    tensors = {t.name: t for t in model.graph.initializer}
    values: dict[str, Any] = dict(random_feeds(graph_inputs(model.graph), seed=seed))
    values |= {name: array_of(tensor) for name, tensor in tensors.items()}
    graph = normalise(model)
    nodes = graph.nodes
    last = {name: position for position, node in enumerate(nodes) for name in node.reads}

    def scale(name: str, array: np.ndarray) -> None:
        values[name] = array.astype(values[name].dtype).reshape(values[name].shape)
        tensors[name].CopyFrom(numpy_helper.from_array(values[name], name))

    for position, node in enumerate(nodes):
        if node.op_type == "BatchNormalization" and drawn.issuperset(node.inputs[3:5]):
            read = values[node.inputs[0]].astype(np.float64)
            axes = tuple(axis for axis in range(read.ndim) if axis != 1)
            scale(node.inputs[3], read.mean(axes))
            scale(node.inputs[4], read.var(axes) + 1e-3)
        values |= _run(graph.model, node, values)
        formals = formal_inputs(node.proto)
        weights = [
            name
            for name, formal in zip(node.inputs, formals, strict=False)
            if name in drawn and _is_matrix(node.proto, formal, values[name].ndim)
        ]
        spread = float(np.std(values[node.outputs[0]], dtype=np.float64)) if weights else 0.0
        if spread and drawn.issuperset(node.inputs[2:]):
            for name in (*weights, *node.inputs[2:]):
                scale(name, values[name].astype(np.float64) / spread)
            values[node.outputs[0]] = (values[node.outputs[0]] / spread).astype(values[node.outputs[0]].dtype)
        for name in node.reads:
            if last[name] == position:
                del values[name]
                last[name] = -1


def _run(model: ModelProto, node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs that one node computes from `values`."""
    names = dict.fromkeys(node.reads)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values[name].dtype), None) for name in names
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.outputs if name]
    alone = helper.make_model(
        helper.make_graph([node.proto], "node", inputs, outputs), opset_imports=model.opset_import
    )
    return get_backend("numpy").prepare(alone).run({name: values[name] for name in names})


def _readers(graph: onnx.GraphProto) -> dict[str, tuple[NodeProto, int]]:
    """The first node that reads a value, and as which input; seen through what only changes its shape."""
    readers: dict[str, tuple[NodeProto, int]] = {}
    for node in reversed(graph.node):
        for position, name in enumerate(node.input):
            readers[name] = node, position
        if node.op_type in traits.RESHAPES and node.output[0] in readers:
            readers[node.input[0]] = readers[node.output[0]]
    return readers


def _is_matrix(node: NodeProto, name: str, rank: int) -> bool:
    """True if a sum of products has a factor of that rank, and of that name in its schema."""
    return node.op_type in traits.PRODUCTS and name in _MATRIX and rank >= 2


def _drawn(array: np.ndarray, node: NodeProto, position: int, rng: np.random.Generator) -> np.ndarray | None:
    """Random numbers for the weights `array`, or None where `node` reads something else there."""
    name = next(iter(formal_inputs(node)[position:]), "")
    is_layer = node.op_type in traits.PRODUCTS | traits.NORMALIZATIONS
    if node.op_type == "BatchNormalization" and position in (1, 2):
        values = rng.uniform(0.25, 0.75, array.shape) if position == 1 else 1 + 0.1 * rng.standard_normal(array.shape)
    elif _is_matrix(node, name, array.ndim):
        values = rng.standard_normal(array.shape)
    elif node.op_type == "Mul" or name in _POSITIVE:
        values = rng.uniform(0.5, 1.5, array.shape)
    elif node.op_type == "Add" or (is_layer and name in _BIAS):
        values = 0.1 * rng.standard_normal(array.shape)
    else:
        return None
    return np.asarray(values).astype(array.dtype)
