"""Every case of an operator that ONNX Runtime's builder has a gradient for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache

import numpy as np
from onnx import ModelProto, NodeProto

from refgrad.conformance import cases
from refgrad.conformance.case import NODE, Case
from refgrad.conformance.judge.running.nodemodels import excluded, inputs_of, node_models
from refgrad.conformance.problems.systems.training_form import TRAINING_OUTPUTS
from refgrad.model.graph import MIN_OPSET
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.traverse import versions_of
from refgrad.protos.types import FLOATS
from refgrad.tables.registry import RULES

# The operators that ONNX Runtime 1.19.2 has a gradient for, without those for several processes or foreign code.
REGISTERED = frozenset(
    """Abs Add AveragePool BatchNormalization BatchNormInternal BiasGelu Cast Clip Concat ConcatTraining Conv ConvTranspose Cos
    Div Dropout Erf Exp Expand FakeQuant FastGelu Flatten FlattenAndUnpad GRU GRUTraining Gather GatherElements GatherND Gelu
    Gemm GlobalAveragePool Identity LSTM LSTMTraining LayerNormalization LeakyRelu Log LogSoftmax MatMul Max MaxPool Min Mul
    Neg Pad PadAndUnflatten Pow QuickGelu Reciprocal ReduceL2 ReduceLogSumExp ReduceMean ReduceSum Relu Reshape Resize
    ScaledSum ScatterElements ScatterND ShrunkenGather Sigmoid SimplifiedLayerNormalization Sin Slice Softmax
    SoftmaxCrossEntropy SoftmaxCrossEntropyLoss SoftmaxCrossEntropyLossInternal SparseSoftmaxCrossEntropy Split Sqrt Squeeze
    Sub Tanh Tile TopK Transpose Trilu Unsqueeze Where""".split()  # noqa: SIM905  (a list a screen long otherwise)
)
# How many outputs the builder requires of a node of these operators, although the last ones are optional.
WHOLE = {
    "Dropout": 2,
    "LayerNormalization": 3,
    "SimplifiedLayerNormalization": 2,
    "SoftmaxCrossEntropyLoss": 2,
    "SoftmaxCrossEntropyLossInternal": 2,
}
# Operators of which it differentiates only the first output, and only with respect to so many of the first inputs.
PART = {
    "BatchNormalization": 3,
    "BatchNormInternal": 3,
    "LayerNormalization": 3,
    "SoftmaxCrossEntropy": 1,
    "SoftmaxCrossEntropyLoss": 1,
    "SoftmaxCrossEntropyLossInternal": 1,
}
OTHERS = frozenset(("GatherND", "Pad"))  # of com.microsoft: of another form than the registered operators of this name
PARTLY = frozenset(("Clip", "Dropout", "FakeQuant", "Pad", "Pow"))  # it has no gradient for some of their float inputs
# Left to the conformance suite: conventions, limits, rare forms, and operators for which the builder has no gradient.
APART = ("control_flow", "kinks", "rare", "sequence", "special")


def _table() -> Iterator[tuple[str, Case]]:
    """Every case of a registered operator with the operator's name, and variants of the case.

    A case whose node leaves out an output that the builder requires comes again with the output (`-whole`). A static case
    comes again with its first size as a symbol in every input that has this size (`-batch`), as in most models. A case of
    an operator in `PART` comes again with only what the builder differentiates (`-part`). A static case with several inputs
    comes again for each of them (`-by-<input>`). GRU and LSTM have no variants. onnx's own node tests come last.
    """
    for name, file in cases.files():
        if name in APART:
            continue
        family = importlib.import_module(file)
        for case in (*getattr(family, "cases", tuple)(), *getattr(family, "in_double", tuple)()):
            operator = _operator(case)
            if operator not in REGISTERED or _by_settings(case):
                continue
            if versions_of(case.model)[""] < MIN_OPSET:  # refgrad converts it first
                continue
            yield operator, case
            if operator in TRAINING_OUTPUTS:  # the builder differentiates few forms of these, and no variant helps
                continue
            if len(case.node.output) < WHOLE.get(operator, 0):
                case = Case(f"{case.name}-whole", _whole(case.model), case.feeds, case.wrt, case.outputs)
                yield operator, case
            if case.static and (model := _batch(case.model)) is not None:
                yield operator, Case(f"{case.name}-batch", model, case.feeds, case.wrt, case.outputs)
            if operator in PART:
                yield operator, _part(case, operator)
            inputs = float_inputs(case.model) if case.wrt is None else case.wrt
            if len(inputs) > 1 and (case.static or operator in PARTLY):
                for name in inputs:
                    yield operator, Case(f"{case.name}-by-{name}", case.model, case.feeds, (name,), case.outputs)
    for test in node_models():
        if not all(isinstance(x, np.ndarray) for x in test.feeds.values()):
            continue  # sequences and optionals
        if test.operator in REGISTERED and len(test.model.graph.node) == 1 and excluded(test) is None:
            [node] = test.model.graph.node
            # The builder has no gradient for an input that nothing reads.
            read = {name for name, called in inputs_of(node).items() if called not in _settings(node)}
            if wrt := tuple(name for name in test.wrt if name in read):
                yield test.operator, Case(test.name, test.model, test.feeds, wrt, test.outputs)


@cache
def by_operator() -> dict[str, list[Case]]:
    """The table by the names of the operators. It takes seconds to make."""
    found: dict[str, list[Case]] = {}
    for operator, case in _table():
        found.setdefault(operator, []).append(case)
    return found


def _settings(node: NodeProto) -> tuple[str, ...]:
    """The inputs that steer an operator, like the roi of Resize; the builder has no gradient for them."""
    rule = RULES.get((node.domain, node.op_type))
    return () if rule is None else rule.settings


def _by_settings(case: Case) -> bool:
    return not set(_settings(case.node)).isdisjoint(case.wrt or ())


def _operator(case: Case) -> str:
    node = next((node for node in case.model.graph.node if node.name == NODE), None)
    if node is None or (node.domain == MICROSOFT and node.op_type in OTHERS):
        return ""
    return str(node.op_type)


def _whole(model: ModelProto) -> ModelProto:
    """`model` with as many outputs of each node as the builder requires."""
    made = ModelProto()
    made.CopyFrom(model)
    for node in made.graph.node:
        node.output.extend(f"{node.name}_{k}" for k in range(len(node.output), WHOLE.get(node.op_type, 0)))
    return made


def _part(case: Case, operator: str) -> Case:
    """`case` with respect to the inputs that `PART` counts, and of the first output only."""
    node = next(node for node in case.model.graph.node if node.op_type == operator)
    reads = node.input[: PART[operator]]
    wrt = tuple(value.name for value in case.model.graph.input if value.name in reads or f"{value.name}_" in reads)
    return Case(f"{case.name}-part", case.model, case.feeds, wrt, (case.model.graph.output[0].name,))


def _batch(model: ModelProto) -> ModelProto | None:
    """`model` with the first size of its first input as a symbol, in every input that begins with this size.

    None where the first input has no such size. Vectors of integers keep their size: they rather hold sizes or axes than
    a number per element of a batch.
    """
    made = ModelProto()
    made.CopyFrom(model)
    tensors = [value.type.tensor_type for value in made.graph.input]
    if not tensors or not tensors[0].shape.dim or not (size := tensors[0].shape.dim[0].dim_value):
        return None
    for tensor in tensors:
        dims = tensor.shape.dim
        if dims and dims[0].dim_value == size and (len(dims) > 1 or tensor.elem_type in FLOATS):
            dims[0].dim_param = "N"
    return made


def float_inputs(model: ModelProto) -> tuple[str, ...]:
    """The names of the float inputs."""
    return tuple(value.name for value in model.graph.input if value.type.tensor_type.elem_type in FLOATS)
