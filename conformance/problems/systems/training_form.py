"""A model in the form that ONNX Runtime's builder differentiates: its training operators, and one loss."""

from __future__ import annotations

from collections.abc import Collection

from onnx import ModelProto, NodeProto, TensorProto, helper

from refgrad.model.normalise import normalise
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.traverse import import_domain
from refgrad.protos.types import FLOATS, is_unnamed

LOSS = "weighed_loss"
TRAINING_OUTPUTS = {"GRU": 3, "LSTM": 5}  # how many outputs the training form of an operator has


def as_it_trains(model: ModelProto, inference: bool = True) -> ModelProto:
    """`model` with the operators that the builder knows, as ONNX Runtime's other tools write them before they call it.

    :param inference: also make a BatchNormalization in inference one in training, another function, as its module builder does.
    """
    made, known = ModelProto(), normalise(model)
    made.CopyFrom(model)
    for node in made.graph.node:
        if node.op_type == "SimplifiedLayerNormalization":  # it has the operator in the domain of ai.onnx
            node.domain = ""
        elif node.op_type == "BatchNormalization" and (inference or _trains(node)):
            node.op_type, node.domain = "BatchNormInternal", MICROSOFT
            others = [attribute for attribute in node.attribute if attribute.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend((*others, helper.make_attribute("training_mode", 1)))
            node.output.extend(f"{node.name}_{k}" for k in range(len(node.output), 5))
            import_domain(made, MICROSOFT)
        elif node.op_type in TRAINING_OUTPUTS:
            whole = TRAINING_OUTPUTS[node.op_type]
            node.op_type, node.domain = f"{node.op_type}Training", MICROSOFT
            others = [attribute for attribute in node.attribute if attribute.name != "layout" or attribute.i]
            del node.attribute[:]
            node.attribute.extend(others)  # it has no layout, and 0 is the only one
            for name in node.output:  # it infers nothing of the training form
                if name in known.types and name in known.shapes:
                    value = helper.make_tensor_value_info(name, known.types[name], known.shapes[name])
                    made.graph.value_info.append(value)
            outputs = [name or f"{node.name}_{k}" for k, name in enumerate(node.output)]
            del node.output[:]
            node.output.extend((*outputs, *(f"{node.name}_{k}" for k in range(len(outputs), whole))))
            import_domain(made, MICROSOFT)
    return made


def _trains(node: NodeProto) -> bool:
    return any(attribute.name == "training_mode" and attribute.i for attribute in node.attribute)


def with_loss(model: ModelProto, outputs: Collection[str] | None = None, plain: Collection[str] = ()) -> ModelProto:
    """`model` with one output, `weighed_loss`: the sum of the given outputs (all that are float), each weighed as it is fed.

    The cotangent of `y` is the input `y_weight`; an output in `plain` is only summed. The builder takes a loss in float
    alone, and no node whose last input is an empty name.
    """
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    for node in graph.node:
        while node.input and not node.input[-1]:
            node.input.pop()
    for value in graph.output:  # the declaration of an output may name other sizes than those that it has
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    known = normalise(made)
    terms = []
    for value in model.graph.output:
        if value.type.tensor_type.elem_type not in FLOATS or (outputs is not None and value.name not in outputs):
            continue
        kind, shape = value.type.tensor_type.elem_type, known.shapes.get(value.name)
        summed, term = value.name, f"{value.name}_term"
        if value.name not in plain:
            dims = None if shape is None else [None if is_unnamed(dim) else dim for dim in shape]
            graph.input.append(helper.make_tensor_value_info(f"{value.name}_weight", kind, dims))
            summed = f"{term}s"
            graph.node.append(helper.make_node("Mul", [value.name, f"{value.name}_weight"], [summed], name=summed))
        graph.node.append(helper.make_node("ReduceSum", [summed], [term], name=term, keepdims=0))
        if kind != TensorProto.FLOAT:
            node = helper.make_node("Cast", [term], [f"{term}_cast"], name=f"{term}_cast", to=TensorProto.FLOAT)
            graph.node.append(node)
            term = node.output[0]
        terms.append(term)
    total = terms[0]
    for k, term in enumerate(terms[1:]):
        graph.node.append(helper.make_node("Add", [total, term], [f"total_{k}"], name=f"total_{k}"))
        total = f"total_{k}"
    graph.node.append(helper.make_node("Identity", [total], [LOSS], name=LOSS))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(LOSS, TensorProto.FLOAT, []))
    return made
