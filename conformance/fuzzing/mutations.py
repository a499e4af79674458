"""Changes to the protobuf of a model: some leave it valid, most do not, and none may do more than that to refgrad."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

INTEGERS = (0, 1, -1, 2, 3, -2, 7, 255, -129, 1025, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63))
NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
SIZES = (0, 1, 2, 3, 17, -1, 2**31, 2**62, 2**63 - 1, -(2**63))
NAMES = ("", " ", "x", "\0", "a\nb", "\x1b]0;title\x07", "a\u202eb", "é", "\x9b31m", "n" * 300, "../../x", "<b>&\"'")
OPERATORS = (
    "Add",
    "Mul",
    "Relu",
    "MatMul",
    "If",
    "Loop",
    "Scan",
    "Constant",
    "Identity",
    "SequenceConstruct",
    "Gradient",
    "?",
)
MOST = 4  # mutations of one model

Mutation = Callable[[random.Random, ModelProto], None]


def mutant(seed: int, base: bytes) -> bytes:
    """Return the model `base` with one to four mutations. The same seed and model give the same bytes."""
    chance = random.Random(seed)
    model = ModelProto.FromString(base)
    for _ in range(chance.randint(1, MOST)):
        chance.choice(MUTATIONS)(chance, model)
    written = model.SerializePartialToString()
    return spoilt(chance, model, written) if chance.random() < 0.08 else written


def spoilt(chance: random.Random, model: ModelProto, written: bytes) -> bytes:
    """Return the file with a name that is not UTF-8: Python's protobuf does not write one."""
    names = [node.op_type for node in model.graph.node] + [v.name for node in model.graph.node for v in node.attribute]
    names += [name for node in model.graph.node for name in (*node.input, *node.output)]
    names = [name for name in names if name]
    if not names:
        return written
    name = chance.choice(names).encode()
    return written.replace(name, b"\xff" * len(name), chance.choice((1, -1)))


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _graphs(inner)


def _a_graph(chance: random.Random, model: ModelProto) -> GraphProto:
    return chance.choice(list(_graphs(model.graph)))


def _a_node(chance: random.Random, model: ModelProto) -> NodeProto | None:
    nodes = [node for graph in _graphs(model.graph) for node in graph.node]
    nodes += [node for function in model.functions for node in function.node]
    return chance.choice(nodes) if nodes else None


def _an_attribute(chance: random.Random, model: ModelProto) -> AttributeProto | None:
    nodes = [node for graph in _graphs(model.graph) for node in graph.node if node.attribute]
    return chance.choice(chance.choice(nodes).attribute) if nodes else None


def _a_value(chance: random.Random, model: ModelProto) -> ValueInfoProto | None:
    values = [v for graph in _graphs(model.graph) for v in (*graph.input, *graph.output, *graph.value_info)]
    return chance.choice(values) if values else None


def _a_tensor(chance: random.Random, model: ModelProto) -> TensorProto | None:
    tensors = [t for graph in _graphs(model.graph) for t in graph.initializer]
    for graph in _graphs(model.graph):
        for node in graph.node:
            tensors += [a.t for a in node.attribute if a.HasField("t")]
    return chance.choice(tensors) if tensors else None


def _a_name(chance: random.Random, model: ModelProto) -> str:
    known = [name for node in model.graph.node for name in (*node.input, *node.output)]
    return chance.choice([*known, *known, *NAMES])


def _reorder(chance: random.Random, repeated: Any) -> None:
    """Drop, repeat or swap an element of a repeated field."""
    if not len(repeated):
        return
    k, kind = chance.randrange(len(repeated)), chance.choice(("drop", "repeat", "swap"))
    elements = list(repeated)
    if kind == "drop":
        del elements[k]
    elif kind == "repeat":
        elements.insert(chance.randrange(len(elements) + 1), elements[k])
    else:
        other = chance.randrange(len(elements))
        elements[k], elements[other] = elements[other], elements[k]
    copies = [
        element
        if isinstance(element, str | int | float)
        else type(element).FromString(element.SerializePartialToString())
        for element in elements
    ]
    del repeated[:]
    repeated.extend(copies)


def lists(chance: random.Random, model: ModelProto) -> None:
    """Drop, repeat or swap a node, an input, an initializer, an import, …."""
    graph = _a_graph(chance, model)
    parts = [graph.node, graph.input, graph.output, graph.initializer, graph.value_info]
    _reorder(chance, chance.choice([*parts, model.opset_import, model.functions]))


def ends(chance: random.Random, model: ModelProto) -> None:
    """Drop, repeat, swap or rename what a node reads, returns or is set to."""
    if (node := _a_node(chance, model)) is None:
        return
    part: Any = chance.choice((node.input, node.output, node.attribute))
    if part is node.attribute or chance.random() < 0.4:
        _reorder(chance, part)
    elif len(part):
        part[chance.randrange(len(part))] = _a_name(chance, model)
    else:
        part.append(_a_name(chance, model))


def added_input(chance: random.Random, model: ModelProto) -> None:
    """Give a node one to three inputs more."""
    if (node := _a_node(chance, model)) is not None:
        node.input.extend(_a_name(chance, model) for _ in range(chance.randint(1, 3)))


def named(chance: random.Random, model: ModelProto) -> None:
    """Another name, operator or domain of a node."""
    if (node := _a_node(chance, model)) is None:
        return
    field = chance.choice(("name", "op_type", "op_type", "domain", "overload"))
    given = chance.choice(OPERATORS) if field == "op_type" and chance.random() < 0.7 else chance.choice(NAMES)
    if field == "domain" and chance.random() < 0.5:
        given = chance.choice(("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "com.microsoft", "op.grad", "refgrad"))
    setattr(node, field, given)


def renamed(chance: random.Random, model: ModelProto) -> None:
    """One value under another name, wherever it occurs."""
    names = [n for node in model.graph.node for n in (*node.input, *node.output) if n]
    names += [v.name for v in (*model.graph.input, *model.graph.output)]
    if not names:
        return
    old, new = chance.choice(names), chance.choice([*NAMES, *names])
    for graph in _graphs(model.graph):
        named: list[ValueInfoProto | TensorProto] = [*graph.input, *graph.output, *graph.value_info, *graph.initializer]
        for value in named:
            if value.name == old:
                value.name = new
        for node in graph.node:
            for part in (node.input, node.output):
                for k, name in enumerate(part):
                    if name == old:
                        part[k] = new


def attribute(chance: random.Random, model: ModelProto) -> None:
    """An attribute with another value, type or name."""
    found = _an_attribute(chance, model)
    if found is None:
        return
    match chance.randrange(8):
        case 0:
            found.name = chance.choice([*NAMES, "axis", "axes", "value", "body", "to", "then_branch"])
        case 1:
            found.type = chance.choice(list(AttributeProto.AttributeType.values()))  # type: ignore[assignment]  # of the stub
        case 2:
            found.ref_attr_name = chance.choice(NAMES)
        case 3:
            _replace(chance, found, chance.choice((1, 1.5, "s", [1], [1.5], ["s"])))
        case 4 if found.HasField("s"):
            found.s = chance.choice(
                (b"", b"\xff\xfe", b"SAME_UPPER", b"VALID", b"\0", b"ij,jk->ik", b"..,", b"x" * 1000)
            )
        case _:
            _extreme(chance, found)


def _replace(chance: random.Random, found: AttributeProto, value: Any) -> None:
    made = helper.make_attribute(found.name or "axis", value)
    found.CopyFrom(made)


def _extreme(chance: random.Random, found: AttributeProto) -> None:
    if found.type == AttributeProto.INT:
        found.i = chance.choice(INTEGERS)
    elif found.type == AttributeProto.FLOAT:
        found.f = chance.choice(NUMBERS)
    elif found.type == AttributeProto.INTS:
        if chance.random() < 0.4 or not found.ints:
            _reorder(chance, found.ints)
        else:
            found.ints[chance.randrange(len(found.ints))] = chance.choice(INTEGERS)
    elif found.type == AttributeProto.STRING:
        found.s = chance.choice((b"", b"\xff", b"Tanh", b"NOTSET", b"linear"))


def added_attribute(chance: random.Random, model: ModelProto) -> None:
    """An attribute that the node may lack."""
    if (node := _a_node(chance, model)) is None:
        return
    names = (
        "axis",
        "axes",
        "perm",
        "to",
        "keepdims",
        "pads",
        "strides",
        "value",
        "mode",
        "direction",
        "body",
        "equation",
    )
    values = (chance.choice(INTEGERS), [chance.choice(INTEGERS)], "x", 0.5, helper.make_graph([], "g", [], []))
    node.attribute.append(helper.make_attribute(chance.choice(names), chance.choice(values)))


def declared(chance: random.Random, model: ModelProto) -> None:
    """A declared type: another element type, rank, size or container, or none."""
    value = _a_value(chance, model)
    if value is None:
        return
    tensor = value.type.tensor_type
    match chance.randrange(8):
        case 0:
            tensor.elem_type = chance.choice((*range(28), 1000, -1))
        case 1:
            value.ClearField("type")
        case 2:
            tensor.ClearField("shape")
        case 3:
            inner = type(value.type).FromString(value.type.SerializePartialToString())
            value.type.Clear()
            chance.choice((value.type.sequence_type, value.type.optional_type)).elem_type.CopyFrom(inner)
        case 4:
            value.type.sparse_tensor_type.elem_type = 1
        case 5:
            value.name = chance.choice(NAMES)
        case 6:
            tensor.shape.dim.add().dim_value = chance.choice(SIZES)
        case _ if len(tensor.shape.dim):
            dim = chance.choice(tensor.shape.dim)
            if chance.random() < 0.5:
                dim.dim_value = chance.choice(SIZES)
            else:
                dim.dim_param = chance.choice(NAMES)


def stored(chance: random.Random, model: ModelProto) -> None:
    """A tensor with other dims, another type, or more or less data."""
    tensor = _a_tensor(chance, model)
    if tensor is None:
        return
    match chance.randrange(7):
        case 0:
            tensor.data_type = chance.choice((*range(28), 1000, -1))
        case 1:
            tensor.dims.append(chance.choice(SIZES))
        case 2 if len(tensor.dims):
            tensor.dims[chance.randrange(len(tensor.dims))] = chance.choice(SIZES)
        case 3:
            tensor.raw_data = tensor.raw_data[: chance.randrange(1 + len(tensor.raw_data))]
        case 4:
            tensor.raw_data = chance.choice((b"", b"\0", b"\xff" * 8, b"\xff" * 100))
        case 5:
            tensor.name = chance.choice(NAMES)
        case _:
            chance.choice((tensor.float_data, tensor.int64_data, tensor.int32_data)).append(1)


def imports(chance: random.Random, model: ModelProto) -> None:
    """Another opset, a second import of a domain, another IR version."""
    match chance.randrange(4):
        case 0 if model.opset_import:
            chance.choice(model.opset_import).version = chance.choice((*range(1, 28), 0, -1, 2**40))
        case 1:
            model.opset_import.add(
                domain=chance.choice(("", "ai.onnx", "x", "ai.onnx.ml")), version=chance.choice((1, 9, 17, 21))
            )
        case 2:
            model.ir_version = chance.choice((*range(14), -1, 2**40))
        case _:
            del model.opset_import[:]


def nested(chance: random.Random, model: ModelProto) -> None:
    """The whole graph as the body of one of its nodes."""
    if (node := _a_node(chance, model)) is not None:
        graph = GraphProto.FromString(model.graph.SerializePartialToString())
        node.attribute.append(helper.make_attribute(chance.choice(("body", "then_branch", "else_branch")), graph))


def function(chance: random.Random, model: ModelProto) -> None:
    """A function with the nodes of the graph; often it has the name of an operator, or calls itself."""
    graph = model.graph
    made = model.functions.add(name=chance.choice(("f", *OPERATORS)), domain=chance.choice(("", "x")))
    made.input.extend(v.name for v in graph.input)
    made.output.extend(v.name for v in graph.output)
    made.node.extend(graph.node)
    made.opset_import.extend(model.opset_import)
    if graph.node and chance.random() < 0.7:
        called = helper.make_node(made.name, made.input, made.output, domain=made.domain)
        del graph.node[:]
        graph.node.append(called)
        if chance.random() < 0.8 and made.domain:
            model.opset_import.add(domain=made.domain, version=1)


def cycled(chance: random.Random, model: ModelProto) -> None:
    """A node that reads what comes after it."""
    if (node := _a_node(chance, model)) is not None and node.input and model.graph.output:
        node.input[chance.randrange(len(node.input))] = chance.choice(model.graph.output).name


def sparse(chance: random.Random, model: ModelProto) -> None:
    """A sparse initializer, which may contradict itself."""
    made = model.graph.sparse_initializer.add()
    made.dims.extend(chance.choice(SIZES) for _ in range(chance.randint(0, 2)))
    made.values.name = _a_name(chance, model)
    made.values.data_type, made.indices.data_type = chance.choice((1, 7)), chance.choice((7, 1))
    made.values.dims.append(1)
    made.indices.dims.append(1)
    made.values.float_data.append(1.0)
    made.indices.int64_data.append(chance.choice(SIZES))


MUTATIONS: tuple[Mutation, ...] = (
    lists, ends, ends, added_input, named, renamed, attribute, attribute, attribute, added_attribute,
    declared, declared, stored, stored, imports, nested, function, cycled, sparse,
)  # fmt: skip
