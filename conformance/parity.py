"""Dialect "ort" against ONNX Runtime's own builder: the same graph, or where it differs and why.

GradientGraphBuilder differentiates a scalar. So every case is given a loss, the sum of its float outputs weighed by fed
cotangents, and both builders differentiate that. Only the training wheel has the builder.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx import ModelProto, TensorProto, helper

import refgrad
from refgrad.conformance import cases
from refgrad.conformance.case import Case
from refgrad.conformance.structure import EXCUSES, Comparison, compare
from refgrad.errors import BuilderError, InvalidModelError, RefgradError
from refgrad.functions import LOWEST
from refgrad.graph import Graph, is_unnamed
from refgrad.ortbuilder import Builders, readable
from refgrad.protos import versions_of

# The operators that ONNX Runtime 1.19.2 has a gradient for, but for those that serve several processes or foreign code.
REGISTERED = frozenset(
    """Abs Add AveragePool BatchNormalization BatchNormInternal BiasGelu Cast Clip Concat ConcatTraining Conv ConvTranspose Cos
    Div Dropout Erf Exp Expand FakeQuant FastGelu Flatten FlattenAndUnpad GRU GRUTraining Gather GatherElements GatherND Gelu
    Gemm GlobalAveragePool Identity LSTM LSTMTraining LayerNormalization LeakyRelu Log LogSoftmax MatMul Max MaxPool Min Mul
    Neg Pad PadAndUnflatten Pow QuickGelu Reciprocal ReduceL2 ReduceLogSumExp ReduceMean ReduceSum Relu Reshape Resize
    ScaledSum ScatterElements ScatterND ShrunkenGather Sigmoid SimplifiedLayerNormalization Sin Slice Softmax
    SoftmaxCrossEntropy SoftmaxCrossEntropyLoss SoftmaxCrossEntropyLossInternal SparseSoftmaxCrossEntropy Split Sqrt Squeeze
    Sub Tanh Tile TopK Transpose Trilu Unsqueeze Where""".split()  # noqa: SIM905  (a list a screen long otherwise)
)
LOSS = "loss"
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_OPERATOR = re.compile(r"= ([\w.]+)\(")


@dataclass(frozen=True)
class Row:
    """What came of one case.

    `verdict`: "isomorphic"; "isomorphic apart from ..." (names in `EXCUSES`); "different"; or "refused": the builder made no
    gradient, and `detail` is its message. `left` and `right` are the operators, ours and theirs, of the tensors that differ.
    """

    operator: str
    case: str
    verdict: str
    detail: str = ""
    left: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    comparison: Comparison | None = None

    @property
    def same_names(self) -> bool:
        """Whether both name the same gradient tensors."""
        return self.comparison is None or self.comparison.same_names

    @property
    def same_operators(self) -> bool:
        """Whether both have the same training operators, each equally often."""
        return self.comparison is None or self.comparison.same_operators


def table() -> Iterator[tuple[str, Case]]:
    """Every case of a registered operator, under the operator's name, and each with one input differentiated at a time."""
    for module in pkgutil.iter_modules(cases.__path__):
        family = importlib.import_module(f"{cases.__name__}.{module.name}")
        for case in getattr(family, "cases", tuple)():
            operator = _operator(case)
            if operator not in REGISTERED or versions_of(case.model)[""] < LOWEST:  # refgrad converts those first
                continue
            yield operator, case
            inputs = _floats(case.model) if case.wrt is None else case.wrt
            if len(inputs) > 1 and case.static:
                for name in inputs:
                    yield operator, Case(f"{case.name}-by-{name}", case.model, case.feeds, (name,), case.outputs)


def _operator(case: Case) -> str:
    return next((node.op_type for node in case.model.graph.node if node.name == "node"), "")


def _floats(model: ModelProto) -> tuple[str, ...]:
    return tuple(value.name for value in model.graph.input if value.type.tensor_type.elem_type in _FLOATS)


def with_loss(model: ModelProto, outputs: Sequence[str] | None = None) -> ModelProto:
    """`model` with one output, `loss`: the sum of the given outputs (all that are float), each weighed by a fed cotangent.

    The cotangent of `y` is the input `y_weight`.
    """
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    for value in graph.output:  # what is declared of an output may name other sizes than those that it has
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    known = Graph(made)
    terms = []
    for value in model.graph.output:
        if value.type.tensor_type.elem_type not in _FLOATS or (outputs is not None and value.name not in outputs):
            continue
        kind, shape = value.type.tensor_type.elem_type, known.shapes.get(value.name)
        dims = None if shape is None else [None if is_unnamed(dim) else dim for dim in shape]
        graph.input.append(helper.make_tensor_value_info(f"{value.name}_weight", kind, dims))
        term = f"{value.name}_term"
        graph.node.append(helper.make_node("Mul", [value.name, f"{value.name}_weight"], [f"{term}s"], name=f"{term}s"))
        graph.node.append(helper.make_node("ReduceSum", [f"{term}s"], [term], name=term, keepdims=0))
        terms.append(term)
    total = terms[0]
    for k, term in enumerate(terms[1:]):
        graph.node.append(helper.make_node("Add", [total, term], [f"total_{k}"], name=f"total_{k}"))
        total = f"total_{k}"
    graph.node.append(helper.make_node("Identity", [total], [LOSS], name=LOSS))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(LOSS, kind, []))
    return made


def gradients(case: Case, builders: Builders) -> tuple[ModelProto, ModelProto]:
    """Ours and ONNX Runtime's gradient of the loss of `case`, each a function of `loss_grad` with the same outputs.

    :raises BuilderError: ONNX Runtime's builder made none.
    """
    model = with_loss(readable(case.model), case.outputs)
    known = Graph(model)
    wrt = [name for name in (_floats(case.model) if case.wrt is None else case.wrt) if name in known.types]
    ours = refgrad.gradient(model, wrt=wrt, outputs=[LOSS], dialect="ort")
    theirs = builders.raw(model, wrt, LOSS)
    made = {f"{name}_grad" for name in wrt}
    kept = [value for value in theirs.graph.output if value.name in made]
    del theirs.graph.output[:]
    theirs.graph.output.extend(kept)
    return ours, theirs


def measure(operator: str, case: Case, builders: Builders) -> Row:
    """Compare the two builders on one case."""
    try:
        ours, theirs = gradients(case, builders)
    except BuilderError as error:
        return Row(operator, case.name, "refused", f"{error.verdict}: {error}")
    except RefgradError as error:
        return Row(operator, case.name, "refused by refgrad", str(error))
    try:
        found = compare(ours, theirs)
    except InvalidModelError as error:
        return Row(operator, case.name, "refused", f"its graph is broken: {error}")
    if found:
        return Row(operator, case.name, "isomorphic", comparison=found)
    for excuse in EXCUSES:
        if compare(ours, theirs, [excuse]):
            return Row(operator, case.name, f"isomorphic apart from {excuse}", comparison=found)
    found = compare(ours, theirs, EXCUSES)
    if found:
        return Row(operator, case.name, f"isomorphic apart from {' and '.join(EXCUSES)}", comparison=found)
    left, right = (
        tuple(sorted(name for d in found.differences for line in side(d) for name in _OPERATOR.findall(line)))
        for side in (lambda d: d.left, lambda d: d.right)
    )
    return Row(operator, case.name, "different", str(found), left, right, found)
