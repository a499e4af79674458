"""Random weights for models whose weights are constant fills, as those of the light models that onnx ships.

With one number everywhere every channel is the same, MaxPool ties, a deep network overflows or its Softmax is uniform, and its
gradient is zero or rounding noise: nothing that a check could tell right from wrong.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from refgrad.errors import OptionError

# What reads weights: the input that is a matrix, those that must stay positive, those that are biases or means.
_MATRIX = {"Conv": (1,), "ConvTranspose": (1,), "Gemm": (1,), "MatMul": (0, 1)}
_POSITIVE = {"BatchNormalization": (1, 4), "InstanceNormalization": (1,), "LayerNormalization": (1,), "Mul": (0, 1)}
_BIAS = {
    "Conv": (2,),
    "ConvTranspose": (2,),
    "Gemm": (2,),
    "BatchNormalization": (2, 3),
    "InstanceNormalization": (2,),
    "LayerNormalization": (2,),
    "Add": (0, 1),
}
_MOVES = ("Unsqueeze", "Squeeze", "Reshape", "Identity")


def randomize(model: ModelProto, seed: int) -> tuple[ModelProto, int]:
    """A copy of `model` with random numbers for its constant fills, and how many there were.

    A fill is a float initializer, or the ConstantOfShape of a constant shape, with many elements of one value. Weights of
    n inputs per output are drawn from a normal distribution of variance 2/n (He et al. 2015), which keeps the size of what
    passes through them; scales and variances between 0.5 and 1.5; biases and means with a standard deviation of 0.1.

    :raises OptionError: nothing in the model is a constant fill.
    """
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    rng = np.random.default_rng(seed)
    readers = _readers(graph)
    count = 0
    for tensor in graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL or tensor.name not in readers:
            continue
        array = numpy_helper.to_array(tensor)
        if array.dtype.kind == "f" and array.size > 1 and np.all(array == array.flat[0]):
            values = _drawn(array, *readers[tensor.name], rng)
            if values is not None:
                tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
                count += 1
    shapes = {t.name: t for t in graph.initializer}
    kept: list[NodeProto] = []
    for node in graph.node:
        values = None
        if node.op_type == "ConstantOfShape" and node.attribute and node.input[0] in shapes:
            filling = numpy_helper.to_array(node.attribute[0].t)
            if filling.dtype.kind == "f" and node.output[0] in readers:
                array = np.full(numpy_helper.to_array(shapes[node.input[0]]), filling)
                values = _drawn(array, *readers[node.output[0]], rng)
        if values is None:
            kept.append(node)
        else:
            graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
            count += 1
    if not count:
        raise OptionError("The model has no weights that are constant fills: leave out random weights.")
    del graph.node[:]
    graph.node.extend(kept)
    return made, count


def _readers(graph: onnx.GraphProto) -> dict[str, tuple[NodeProto, int]]:
    """The first node that reads a value, and as which input; seen through what only changes its shape."""
    readers: dict[str, tuple[NodeProto, int]] = {}
    for node in reversed(graph.node):
        for position, name in enumerate(node.input):
            readers[name] = node, position
        if node.op_type in _MOVES and node.output[0] in readers:
            readers[node.input[0]] = readers[node.output[0]]
    return readers


def _drawn(array: np.ndarray, node: NodeProto, position: int, rng: np.random.Generator) -> np.ndarray | None:
    """Random numbers for the weights `array`, or None where `node` reads something else there."""
    if position in _MATRIX.get(node.op_type, ()) and array.ndim >= 2:
        values = rng.standard_normal(array.shape) * np.sqrt(2 / _fan_in(node, array))
    elif position in _POSITIVE.get(node.op_type, ()):
        values = rng.uniform(0.5, 1.5, array.shape)
    elif position in _BIAS.get(node.op_type, ()):
        values = 0.1 * rng.standard_normal(array.shape)
    else:
        return None
    return np.asarray(values).astype(array.dtype)


def _fan_in(node: NodeProto, array: np.ndarray) -> int:
    """Over how many inputs each output sums."""
    if node.op_type == "Conv":
        return int(np.prod(array.shape[1:]))
    transposed = any(a.name == "transB" and a.i for a in node.attribute)
    return int(array.shape[1] if transposed or node.op_type == "ConvTranspose" else array.shape[-2])
