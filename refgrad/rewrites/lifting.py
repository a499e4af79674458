"""`refgrad.lift_weights`: weights that ai.onnx.ml keeps in attributes become initializers, which can be trained."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from refgrad.builder.function import FunctionEmitter
from refgrad.builder.nodes import EmittedNode, written
from refgrad.errors import OptionError
from refgrad.model.checks.malformed import explained
from refgrad.model.normalise import normalise
from refgrad.model.reading import read
from refgrad.protos.domains import ML
from refgrad.protos.traverse import attribute_value, fresh, names_of, refill, versions_of
from refgrad.rules.ml import linear_classifier, linear_regressor
from refgrad.tables.definitions import UnsupportedFormError

_BODIES: Mapping[str, Callable[..., Any]] = {
    "LinearRegressor": linear_regressor,
    "LinearClassifier": linear_classifier,
}
_READERS = {"MatMul": "coefficients", "Add": "intercepts"}  # the first node that reads a constant says which it is
_SUMS_ALONG_INPUTS = 13  # from this opset on ReduceSum has its axes as an input
_LABELS = ("classlabels_ints", "classlabels_strings")


@explained
def lift_weights(model: ModelProto | str | os.PathLike[str]) -> ModelProto:
    """The model in which ai.onnx nodes replace each LinearRegressor and LinearClassifier of the main graph.

    Their coefficients are an initializer `<node>.coefficients` [features, rows], their intercepts `<node>.intercepts` [rows],
    both float32, where `<node>` is the name of the node, or its operator. Two rows with LOGISTIC of which one is the other's
    negative, as classifiers of two classes have them, become one: of its score s the results are 1 − σ(s) and σ(s). Results
    have the names, types and, to rounding, the values that they had. A classifier returns the label of its largest score,
    so it follows the weights. Other operators of ai.onnx.ml, such as Scaler and Normalizer, stay as they are. A model without
    such nodes is returned as a copy.

    :param model: a model, or the path of one. It is not modified.
    :raises InvalidModelError: the model cannot be read.
    :raises OptionError: a node has a form about which runtimes disagree, or SOFTMAX_ZERO in an opset before 13.

    >>> import onnx.parser, refgrad
    >>> line = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 15, "ai.onnx.ml": 1]>
    ... line (float[N, 2] x) => (float[N, 1] y) {
    ...     y = ai.onnx.ml.LinearRegressor <coefficients = [1.0, 2.0], intercepts = [3.0]> (x) }''')
    >>> lifted = refgrad.lift_weights(line)
    >>> {name: weight.shape for name, weight in refgrad.weights(lifted).items()}
    {'LinearRegressor.coefficients': (2, 1), 'LinearRegressor.intercepts': (1,)}
    """
    source = read(model, lift=False)
    made = ModelProto()
    made.CopyFrom(source)
    if not any(map(holds_weights, source.graph.node)):
        return made
    types = normalise(source).types
    taken = names_of(made.graph) | {node.name for node in made.graph.node}
    opset, nodes = versions_of(made)[""], list[NodeProto]()
    names = _names_of_weights(made)
    for k, node in enumerate(made.graph.node):
        if holds_weights(node):
            kept, constants = _Lifting(node, opset, types.get(node.input[0]) or TensorProto.FLOAT, taken).nodes(
                names[k]
            )
            nodes.extend(kept)
            made.graph.initializer.extend(constants)
        else:
            nodes.append(node)
    refill(made.graph.node, nodes)
    return made


def lower_weights(model: ModelProto, values: Mapping[str, np.ndarray]) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """A copy of a model that was lifted, with `values` in the attributes that they came from; and the values that are left."""
    made, left = ModelProto(), dict(values)
    made.CopyFrom(model)
    for k, names in _names_of_weights(made).items():
        node = made.graph.node[k]
        for attribute in node.attribute:
            value = left.pop(names.get(attribute.name, ""), None)
            if value is not None:
                row = np.ravel(np.asarray(value).T)
                is_mirrored = len(attribute.floats) == 2 * len(row)  # as two rows that are each other's negatives
                refill(attribute.floats, np.concatenate([-row, row] if is_mirrored else [row]).tolist())
    return made, left


def holds_weights(node: NodeProto) -> bool:
    """True if a node has weights in its attributes that `lift_weights` makes initializers of."""
    return node.domain == ML and node.op_type in _BODIES


def _names_of_weights(model: ModelProto) -> dict[int, dict[str, str]]:
    """For each node that is lifted, by its position: the initializers that its attributes become."""
    taken, found = names_of(model.graph), dict[int, dict[str, str]]()
    for k, node in enumerate(model.graph.node):
        if holds_weights(node):
            owner = node.name or node.op_type
            found[k] = {name: fresh(f"{owner}.{name}", taken) for name in _READERS.values()}
            taken.update(found[k].values())
    return found


class _Lifting:
    """One node, written in nodes of ai.onnx."""

    def __init__(self, node: NodeProto, opset: int, kind: int, taken: set[str]) -> None:
        self.node, self.taken = node, taken
        self.settings = {attribute.name: attribute_value(attribute) for attribute in node.attribute}
        self.settings = _of_one_row({name: _text(value) for name, value in self.settings.items()})
        self.op = FunctionEmitter(opset, node.op_type, node.name)
        self.op.types[node.input[0]] = (kind, 2)

    def nodes(self, names: Mapping[str, str]) -> tuple[list[NodeProto], list[TensorProto]]:
        """The nodes, and the initializers."""
        op, node = self.op, self.node
        if self.settings.get("post_transform") == "SOFTMAX_ZERO" and op.opset < _SUMS_ALONG_INPUTS:
            raise OptionError(
                f"The weights of node {node.name!r} ({node.op_type}) cannot be lifted: SOFTMAX_ZERO is written in operators of "
                f"opset {_SUMS_ALONG_INPUTS}. Convert the model first with onnx.version_converter."
            )
        try:
            results = _BODIES[node.op_type](op, node.input[0], **self.settings)
        except UnsupportedFormError as error:
            raise OptionError(
                f"The weights of node {node.name!r} ({node.op_type}) cannot be lifted: {error}."
            ) from error
        renamed = {}
        if node.op_type == "LinearClassifier":
            scores = results[1]
            if node.output[0]:
                renamed[self._label()] = node.output[0]
            op.nodes[:] = [one for one in op.nodes if one.domain != ML]
        else:
            scores = results
        if node.output[-1] and (node.op_type == "LinearRegressor" or len(node.output) > 1):
            renamed[scores] = node.output[-1]
        weights = self._weights()
        made, constants = list[EmittedNode](), list[TensorProto]()
        for one in op.nodes:
            for name in one.outputs:
                what = weights.get(name)
                if name not in renamed:
                    renamed[name] = (
                        names[what] if what else fresh(f"{node.name or node.op_type}/{one.op_type}", self.taken)
                    )
                    self.taken.add(renamed[name])
            if one.op_type == "Constant":
                tensor = TensorProto()
                tensor.CopyFrom(one.attributes["value"])
                tensor.name = renamed[one.outputs[0]]
                constants.append(tensor)
            else:
                made.append(one._replace(name=renamed[one.outputs[0]]))
        return written(made, renamed), constants

    def _weights(self) -> dict[str, str]:
        """The constants that are weights: the second operands of the MatMul, and of the Add behind it."""
        found, product = dict[str, str](), ""
        for one in self.op.nodes:
            if one.op_type == "MatMul":
                found[one.inputs[1]], product = "coefficients", one.outputs[0]
            elif one.op_type == "Add" and one.inputs[0] == product and self.settings.get("intercepts"):
                found[one.inputs[1]] = "intercepts"
                break
        return found

    def _label(self) -> str:
        """The label of the largest score. One score for two classes gives the label of the second class where it is above 0."""
        op = self.op
        weights = self._weights()
        scores = next(one.outputs[0] for one in reversed(op.nodes) if set(one.inputs) & weights.keys())
        labels = next((self.settings[name] for name in _LABELS if self.settings.get(name)), ())
        rows = len(self.settings.get("intercepts") or ()) or len(labels)
        if rows == 1 and len(labels) == 2:
            index = op.Reshape(op.Cast(op.Greater(scores, op.const(0.0, like=scores)), to=TensorProto.INT64), [-1])
        else:
            index = op.ArgMax(scores, axis=1, keepdims=0)
        is_text = bool(self.settings.get("classlabels_strings"))
        tensor = numpy_helper.from_array(np.array(labels, object if is_text else np.int64))
        held = op.emit("Constant", "", (), 1, {"value": tensor})
        return op.builder.add_as("Gather", [held, index], "label")


def _of_one_row(settings: dict[str, Any]) -> dict[str, Any]:
    """The second row alone, where LOGISTIC is asked of two rows of which each is the other's negative."""
    rows = {name: np.asarray(settings[name]) for name in _READERS.values() if settings.get(name)}
    labels = next((settings[name] for name in _LABELS if settings.get(name)), ())
    if settings.get("post_transform") != "LOGISTIC" or len(labels) != 2 or len(settings.get("intercepts") or ()) != 2:
        return settings
    halves = {name: np.split(row, 2) for name, row in rows.items() if len(row) % 2 == 0}
    if len(halves) < len(rows) or not all(np.array_equal(-first, second) for first, second in halves.values()):
        return settings
    return settings | {name: second.tolist() for name, (_, second) in halves.items()}


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Sequence) and value and isinstance(value[0], bytes):
        return [one.decode() for one in value]
    return value
