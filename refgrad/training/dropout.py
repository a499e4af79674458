"""Dropout in a training: which elements are dropped follows from a seed, the node, the step and the place, by integers alone.

So a step draws anew, every executor draws the same, and a training that goes on draws what it would have drawn.
"""

from __future__ import annotations

import os

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from refgrad.builder.function import FunctionEmitter
from refgrad.errors import OptionError, UnknownNameError
from refgrad.model.external import array_of
from refgrad.model.graph import Graph
from refgrad.model.normalise import normalise
from refgrad.model.reading import read
from refgrad.protos.traverse import attribute_value, every_node, fresh, names_of, refill, versions_of
from refgrad.protos.types import FLOATS

_OPSET = 11  # since which Range is there
_HAS_MODE = 12  # since which the training mode is an input
_ALLOWS_ZERO = 14
_PRIME = 2**31 - 1  # x → x⁵ is a permutation of its residues, since 5 does not divide 2³¹ − 2
_STRIDES = 48271, 16807  # primitive roots of it: of the steps, and of the places


class Constants:
    """The values that a model has before a run: initializers, also those that a caller can override, and Constant nodes."""

    def __init__(self, model: ModelProto, graph: Graph | None = None) -> None:
        self._model, self._normalised = model, graph
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}

    def value(self, name: str) -> np.ndarray | None:
        """The value of a name, None if only the run tells it."""
        if name in self._tensors:
            return array_of(self._tensors[name])
        if self._normalised is None:
            self._normalised = normalise(self._model)
        return self._normalised.constant(name)


def holds_dropout(model: ModelProto) -> bool:
    """True if a Dropout of ai.onnx is in a model, in its graph, a body or a function."""
    return any(map(_is_dropout, every_node(model)))


def with_masks(model: ModelProto | str | os.PathLike[str], step: str, seed: int) -> ModelProto:
    """A copy in which each Dropout drops by a number in (0, 2³¹ − 1) for each element, with the input `step`, a count in int64.

    With p = 2³¹ − 1 it is (16807·i + k)⁵ mod p for the element i of the flattened tensor, where k = (48271·(step + c))⁵ mod p
    and c is drawn for the node from the seed: a power generator, whose products stay within int64.

    :raises OptionError: there is no Dropout, or one whose ratio only the run tells, or in a body or a function, or of another
        type than a float; or an opset below 11.
    """
    made = ModelProto()
    made.CopyFrom(read(model))
    nodes = _dropouts(made)
    if versions_of(made)[""] < _OPSET:
        raise OptionError(
            f"Masks of Dropout are written in operators of opset {_OPSET}, and the model has {versions_of(made)['']}. Convert "
            "it with onnx.version_converter, or leave dropout at 'off'."
        )
    taken = names_of(made.graph) | {node.name for node in made.graph.node}
    if step in taken:
        raise UnknownNameError(f"The model has a value {step!r}, a name that the step needs. Rename it.")
    graph = normalise(made)
    types, constants = graph.types, Constants(made, graph)
    taken.add(step)
    op = FunctionEmitter.into_graph(versions_of(made)[""], "dropout", taken)
    op.types[step] = (TensorProto.INT64, 0)
    written: dict[str, list[NodeProto]] = {}
    for index, node in enumerate(nodes):
        kind = types.get(node.input[0], 0)
        if kind not in FLOATS:
            raise OptionError(f"Dropout node {_called(node)} reads {node.input[0]!r}, of which no float type is known.")
        key = int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) % _PRIME
        op.types[node.input[0]] = (kind, None)
        written[node.output[0]] = _drop(op, node, step, _ratio(node, constants), key, kind)
    refill(made.graph.node, [n for node in made.graph.node for n in written.get(next(iter(node.output), ""), [node])])
    made.graph.initializer.extend(op.builder.constants.values())
    made.graph.input.append(helper.make_tensor_value_info(step, TensorProto.INT64, []))
    return made


def _dropouts(model: ModelProto) -> list[NodeProto]:
    """The Dropouts of the main graph.

    :raises OptionError: there is none, or one in a body or a function.
    """
    nodes = [node for node in model.graph.node if _is_dropout(node)]
    if len(nodes) < sum(map(_is_dropout, every_node(model))):
        raise OptionError("A body or a function has a Dropout. Take dropout='off', the default.")
    if not nodes:
        raise OptionError("The model has no Dropout. Take dropout='off', the default.")
    return nodes


def in_training_mode(model: ModelProto | str | os.PathLike[str]) -> ModelProto:
    """A copy in which each Dropout of the main graph drops, by masks that the runtime draws.

    :raises OptionError: there is no Dropout, or one in a body or a function, or an opset below 12.
    """
    made = ModelProto()
    made.CopyFrom(read(model))
    nodes = _dropouts(made)
    if versions_of(made)[""] < _HAS_MODE:
        raise OptionError(
            f"Dropout has a training mode from opset {_HAS_MODE} on, and the model has {versions_of(made)['']}. Convert it "
            "with onnx.version_converter, or leave dropout at 'off'."
        )
    mode = fresh("is_training", names_of(made.graph))
    made.graph.initializer.append(numpy_helper.from_array(np.array(True), mode))
    for node in nodes:
        ratio = node.input[1] if len(node.input) > 1 else ""
        node.input[:] = [node.input[0], ratio, mode]
    return made


def _drop(op: FunctionEmitter, node: NodeProto, step: str, ratio: float, key: int, kind: int) -> list[NodeProto]:
    """The nodes in place of a Dropout: y = x·keep / (1 − ratio), and the mask where it is read."""
    x = node.input[0]
    start = _fifth_power(op, op.Mul(op.Mod(op.Add(step, key), _PRIME), _STRIDES[0]))
    places = op.Range(op.const(np.int64(0)), op.Size(x), op.const(np.int64(1)))
    drawn = _fifth_power(op, op.Add(op.Mul(op.Mod(places, _PRIME), _STRIDES[1]), start))
    is_kept = op.Not(op.Less(drawn, round(ratio * _PRIME)))
    keep = op.emit("Reshape", "", (is_kept, op.Shape(x)), 1, {"allowzero": 1} if op.opset >= _ALLOWS_ZERO else {})
    op.types[keep] = (TensorProto.BOOL, None)
    scale = op.const(1 / (1 - ratio), like=x)
    made = op.Mul(x, op.Mul(op.Cast(keep, to=kind), scale))
    names = {made: node.output[0]} | ({keep: node.output[1]} if len(node.output) > 1 and node.output[1] else {})
    return op.builder.take(names)


def _fifth_power(op: FunctionEmitter, x: str) -> str:
    """x⁵ mod p, of an x that may be larger than p."""
    x = op.Mod(x, _PRIME)
    square = op.Mod(op.Mul(x, x), _PRIME)
    return op.Mod(op.Mul(op.Mod(op.Mul(square, square), _PRIME), x), _PRIME)


def _ratio(node: NodeProto, constants: Constants) -> float:
    """The part that is dropped: an input, or an attribute before opset 12."""
    given = float(str(np.float32(next((attribute_value(a) for a in node.attribute if a.name == "ratio"), 0.5))))
    if len(node.input) > 1 and node.input[1]:
        if (ratio := constants.value(node.input[1])) is None:
            raise OptionError(f"Only the run tells the ratio of Dropout node {_called(node)}. Make it an initializer.")
        given = float(str(ratio.reshape(-1)[0]))  # 0.9 and not 0.89999998, which is float32's
    if not 0 <= given < 1:
        raise OptionError(f"The ratio of Dropout node {_called(node)} is at least 0 and below 1, not {given:g}.")
    return given


def _is_dropout(node: NodeProto) -> bool:
    return node.op_type == "Dropout" and node.domain in ("", "ai.onnx")


def _called(node: NodeProto) -> str:
    return repr(node.name or next(iter(node.output), ""))
