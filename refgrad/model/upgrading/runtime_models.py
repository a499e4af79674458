"""Models that ONNX Runtime wrote: what onnx refuses in them, or what ONNX Runtime would fail on again, is written otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from onnx import ModelProto

from refgrad.errors import InvalidModelError
from refgrad.model.inlining.defined import call, make_function
from refgrad.model.inlining.inline import inline_functions
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.traverse import graphs, import_domain, versions_of
from refgrad.protos.types import Type
from refgrad.tables.definitions import UnsupportedFormError

# ONNX Runtime's operators in the domain of ai.onnx, as it or its tests write them, and the opset from which on onnx knows them.
_MISPLACED = {
    "LayerNormalization": 17,
    "SimplifiedLayerNormalization": None,
    "SoftmaxCrossEntropy": None,
    "SparseSoftmaxCrossEntropy": None,
}
_AT_HOME = ("SoftmaxCrossEntropy",)  # ONNX Runtime has it in com.microsoft, the others of them nowhere else
_NEEDS_17 = ("SkipLayerNormalization", "EmbedLayerNormalization")  # their bodies have LayerNormalization
# What ONNX Runtime's fusion of MatMul and Add calls the constants that it makes. It does so again, without looking whether
# the names are taken, when it optimizes the gradient of a model that it has optimized before.
_CLASHING = ("gemm_input_shape", "gemm_output_shape")
# What its optimizer makes of LSTM and GRU before it differentiates them, and how many results those have.
_TRAINING_FORMS = {"LSTMTraining": ("LSTM", 3), "GRUTraining": ("GRU", 2)}


def mend_runtime_model(model: ModelProto, used: Set[str]) -> int:
    """Write in place what onnx would refuse, or ONNX Runtime fail on; the opset that the model needs at least.

    Operators in the domain of ai.onnx that onnx does not know there move to com.microsoft, most until `replace_misplaced`.
    LSTMTraining and GRUTraining become LSTM and GRU where nobody reads what they return besides. Constants get other names.

    :param used: the operators of the model.
    """
    if not used.isdisjoint(_TRAINING_FORMS):
        _leave_training_forms(model)
    _rename_clashing(model)
    if used.isdisjoint((*_MISPLACED, *_NEEDS_17)):
        return 1
    opset, moved, needed = versions_of(model).get("", 1), False, 1
    for node in (node for graph in graphs(model.graph) for node in graph.node):
        op_type = node.op_type
        if op_type in _MISPLACED and node.domain in ("", "ai.onnx"):
            since = _MISPLACED[op_type]
            if since is None or opset < since:
                node.domain, moved, needed = MICROSOFT, True, max(needed, since or 1)
        elif op_type in _NEEDS_17 and node.domain == MICROSOFT:
            needed = 17
    if moved:
        import_domain(model, MICROSOFT)
    return needed


def _rename_clashing(model: ModelProto) -> None:
    taken = {v.name for v in (*model.graph.input, *model.graph.output)}
    renamed = {}
    for tensor in model.graph.initializer:
        if tensor.name.startswith(_CLASHING) and tensor.name not in taken:
            renamed[tensor.name] = tensor.name = f"saved_{tensor.name}"
    if renamed:
        for node in (node for graph in graphs(model.graph) for node in graph.node):
            node.input[:] = [renamed.get(name, name) for name in node.input]


def _leave_training_forms(model: ModelProto) -> None:
    every = list(graphs(model.graph))
    read = {name for graph in every for node in graph.node for name in node.input}
    read |= {value.name for graph in every for value in graph.output}
    for node in (node for graph in every for node in graph.node):
        if node.domain != MICROSOFT or node.op_type not in _TRAINING_FORMS:
            continue
        op_type, count = _TRAINING_FORMS[node.op_type]
        if not read.isdisjoint(filter(None, node.output[count:])):
            continue
        node.domain, node.op_type = "", op_type
        kept = list(node.output[:count])
        while kept and not kept[-1]:
            kept.pop()
        node.output[:] = kept
        attributes = [a for a in node.attribute if a.name != "output_sequence"]  # of opset 1
        del node.attribute[:]
        node.attribute.extend(attributes)


def replace_misplaced(model: ModelProto, infer: Callable[[ModelProto], Mapping[str, Type]]) -> ModelProto:
    """`model` in ai.onnx operators where `mend_runtime_model` moved some out of that domain; it now has the opset for it.

    :param infer: gives the types of a model's values; asked where a body has to know them.
    :raises InvalidModelError: one of them has a form that its body does not cover.
    """
    if all(o.domain != MICROSOFT for o in model.opset_import):
        return model
    made, types = 0, None
    for node in (node for graph in graphs(model.graph) for node in graph.node):
        if node.domain != MICROSOFT or node.op_type not in _MISPLACED or node.op_type in _AT_HOME:
            continue
        if _MISPLACED[node.op_type] is not None:
            node.domain = ""
            continue
        types = infer(model) if types is None else types
        try:
            function = make_function(node, versions_of(model), types, f"{node.op_type}_{made}")
        except UnsupportedFormError as error:
            called = node.name or next(iter(node.output), "")
            raise InvalidModelError(f"Node {called!r} is no {node.op_type} of ONNX Runtime: {error}.") from error
        assert function is not None
        call(model, node, function)
        made += 1
    return inline_functions(model) if made else model
