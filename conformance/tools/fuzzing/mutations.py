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
    return chance.choice(SPOILINGS)(chance, model, written) if chance.random() < 0.12 else written


def spoilt(chance: random.Random, model: ModelProto, written: bytes) -> bytes:
    """Return the file with a name that is not UTF-8: Python's protobuf does not write one."""
    names: list[str | bytes] = [node.op_type for node in model.graph.node]
    names += [attribute.name for node in model.graph.node for attribute in node.attribute]
    names += [name for node in model.graph.node for name in (*node.input, *node.output)]
    names = [name for name in names if name]
    if not names:
        return written
    name = chance.choice(names)
    spelled = name if isinstance(name, bytes) else name.encode()
    return written.replace(spelled, b"\xff" * len(spelled), chance.choice((1, -1)))


def truncated(chance: random.Random, model: ModelProto, written: bytes) -> bytes:
    """Return a part of the file: its beginning, or all except a piece in the middle."""
    first = chance.randrange(len(written) + 1)
    return written[:first] + (b"" if chance.random() < 0.5 else written[first + chance.randint(1, 20) :])


def flipped(chance: random.Random, model: ModelProto, written: bytes) -> bytes:
    """Return the file with one to four other bytes."""
    flipped_bytes = bytearray(written)
    for _ in range(chance.randint(1, 4) if flipped_bytes else 0):
        flipped_bytes[chance.randrange(len(flipped_bytes))] = chance.choice(
            (0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256))
        )
    return bytes(flipped_bytes)


def unknown(chance: random.Random, model: ModelProto, written: bytes) -> bytes:
    """Return the file with fields that no version of ONNX has, or with a field twice."""
    text = bytes(chance.randrange(256) for _ in range(20))
    fields = (
        _field(1000, text),
        _tag(1001, 0) + b"\x05",
        _tag(1002, 1) + text[:8],
        _tag(1003, 3) * 50 + _tag(1003, 4) * 50,
        _field(7, b""),
        _field(7, _field(1, _field(1, b"input"))),
        _field(8, b""),
        _field(20, _field(1, b"")),
    )
    return written + chance.choice(fields) * chance.choice((1, 1, 100))


def deeper(chance: random.Random, model: ModelProto, written: bytes) -> bytes:
    """Return the file with a graph, a type or a function in itself, many times."""
    inner, depth = b"", chance.choice((5, 20, 30, 50, 100, 1000))
    kind = chance.randrange(3)
    for _ in range(depth):
        if kind < 2:  # an If in an If, in the attribute g or graphs
            attribute = _field(1, b"then_branch") + (_field(6, inner) if kind else _field(11, inner))
            attribute += _tag(20, 0) + (b"\x05" if kind else b"\x0a")
            inner = _field(1, _field(4, b"If") + _field(1, b"c") + _field(2, b"y") + _field(5, attribute)) + _field(
                2, b"g"
            )
        else:  # a sequence of sequences
            inner = _field(4, _field(1, inner))
    return written + _field(7, inner if kind < 2 else _field(11, _field(1, b"deep") + _field(2, inner)))


def _field(number: int, value: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(value)) + value


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


SPOILINGS: tuple[Callable[[random.Random, ModelProto, bytes], bytes], ...] = (
    spoilt, spoilt, truncated, flipped, flipped, unknown, deeper,
)  # fmt: skip


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
        if isinstance(element, str | bytes | int | float)
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
    name = chance.choice(OPERATORS) if field == "op_type" and chance.random() < 0.7 else chance.choice(NAMES)
    if field == "domain" and chance.random() < 0.5:
        name = chance.choice(("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "com.microsoft", "op.grad", "refgrad"))
    setattr(node, field, name)


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
    chosen = _an_attribute(chance, model)
    if chosen is None:
        return
    match chance.randrange(8):
        case 0:
            chosen.name = chance.choice([*NAMES, "axis", "axes", "value", "body", "to", "then_branch"])
        case 1:
            chosen.type = chance.choice(list(AttributeProto.AttributeType.values()))  # type: ignore[assignment]  # of the stub
        case 2:
            chosen.ref_attr_name = chance.choice(NAMES)
        case 3:
            _replace(chance, chosen, chance.choice((1, 1.5, "s", [1], [1.5], ["s"])))
        case 4 if chosen.HasField("s"):
            chosen.s = chance.choice(
                (b"", b"\xff\xfe", b"SAME_UPPER", b"VALID", b"\0", b"ij,jk->ik", b"..,", b"x" * 1000)
            )
        case _:
            _extreme(chance, chosen)


def _replace(chance: random.Random, old: AttributeProto, value: Any) -> None:
    new = helper.make_attribute(old.name or "axis", value)
    old.CopyFrom(new)


def _extreme(chance: random.Random, old: AttributeProto) -> None:
    if old.type == AttributeProto.INT:
        old.i = chance.choice(INTEGERS)
    elif old.type == AttributeProto.FLOAT:
        old.f = chance.choice(NUMBERS)
    elif old.type == AttributeProto.INTS:
        if chance.random() < 0.4 or not old.ints:
            _reorder(chance, old.ints)
        else:
            old.ints[chance.randrange(len(old.ints))] = chance.choice(INTEGERS)
    elif old.type == AttributeProto.STRING:
        old.s = chance.choice((b"", b"\xff", b"Tanh", b"NOTSET", b"linear"))


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
    added = model.functions.add(name=chance.choice(("f", *OPERATORS)), domain=chance.choice(("", "x")))
    added.input.extend(v.name for v in graph.input)
    added.output.extend(v.name for v in graph.output)
    added.node.extend(graph.node)
    added.opset_import.extend(model.opset_import)
    if graph.node and chance.random() < 0.7:
        called = helper.make_node(added.name, added.input, added.output, domain=added.domain)
        del graph.node[:]
        graph.node.append(called)
        if chance.random() < 0.8 and added.domain:
            model.opset_import.add(domain=added.domain, version=1)


def cycled(chance: random.Random, model: ModelProto) -> None:
    """A node that reads what comes after it."""
    if (node := _a_node(chance, model)) is not None and node.input and model.graph.output:
        node.input[chance.randrange(len(node.input))] = chance.choice(model.graph.output).name


def sparse(chance: random.Random, model: ModelProto) -> None:
    """A sparse initializer, which may contradict itself."""
    added = model.graph.sparse_initializer.add()
    added.dims.extend(chance.choice(SIZES) for _ in range(chance.randint(0, 2)))
    added.values.name = _a_name(chance, model)
    added.values.data_type, added.indices.data_type = chance.choice((1, 7)), chance.choice((7, 1))
    added.values.dims.append(1)
    added.indices.dims.append(1)
    added.values.float_data.append(1.0)
    added.indices.int64_data.append(chance.choice(SIZES))


def exchanged(chance: random.Random, model: ModelProto) -> None:
    """Two attributes with each other's values, or a node with the attributes of another."""
    first, other = _an_attribute(chance, model), _an_attribute(chance, model)
    if first is None or other is None or first is other:
        return
    kept = AttributeProto.FromString(first.SerializePartialToString())
    names = first.name, other.name
    first.CopyFrom(AttributeProto.FromString(other.SerializePartialToString()))
    other.CopyFrom(kept)
    if chance.random() < 0.7:
        first.name, other.name = names


def shadowed(chance: random.Random, model: ModelProto) -> None:
    """A value of a body, an initializer or a declaration that has the name of another one."""
    known = [name for graph in _graphs(model.graph) for node in graph.node for name in (*node.input, *node.output)]
    graph = _a_graph(chance, model)
    named: list[Any] = [*graph.input, *graph.output, *graph.initializer, *graph.value_info]
    if not known:
        return
    name = chance.choice(known)
    match chance.randrange(3):
        case 0 if named:
            chance.choice(named).name = name
        case 1:
            graph.initializer.append(helper.make_tensor(str(name), TensorProto.FLOAT, [1], [1.0]))
        case _:
            nodes = [node for node in graph.node if node.output]
            if nodes:
                outputs = chance.choice(nodes).output
                outputs[chance.randrange(len(outputs))] = name


def mutual(chance: random.Random, model: ModelProto) -> None:
    """Functions that call each other: in a circle, in a line, or each twice."""
    count, kind = chance.choice((2, 3, 10, 40)), chance.choice(("circle", "line", "double"))
    model.opset_import.add(domain="calls", version=1)
    for k in range(count):
        added = model.functions.add(name=f"f{k}", domain="calls", input=["a"], output=["c"])
        added.opset_import.add(domain="", version=max((opset.version for opset in model.opset_import), default=17))
        added.opset_import.add(domain="calls", version=1)
        last = k == count - 1
        name, domain = ("Neg", "") if last and kind != "circle" else (f"f{(k + 1) % count}", "calls")
        added.node.append(helper.make_node(name, ["a"], ["b"], domain=domain))
        second, domain = (name, domain) if kind == "double" else ("Identity", "")
        added.node.append(helper.make_node(second, ["b"], ["c"], domain=domain))
    if model.graph.output and model.graph.node and model.graph.node[-1].output:
        called = model.graph.node[-1].output[0]
        model.graph.node.append(helper.make_node("f0", [called], ["called"], domain="calls"))
        model.graph.output[0].name = "called"


def long(chance: random.Random, model: ModelProto) -> None:
    """A repeated field with thousands of elements."""
    graph, many = _a_graph(chance, model), chance.choice((200, 200, 1000))
    node, tensor, value = _a_node(chance, model), _a_tensor(chance, model), _a_value(chance, model)
    match chance.randrange(9):
        case 0 if node is not None:
            node.input.extend([_a_name(chance, model)] * many)
        case 1 if node is not None:
            node.output.extend(f"o{k}" for k in range(many))
        case 2 if node is not None and node.output and node.output[0]:
            name = node.output[0]
            for k in range(many):
                graph.node.append(helper.make_node("Tanh", [name if k == 0 else f"t{k}"], [f"t{k + 1}"]))
            if graph.output:
                graph.output[0].name = f"t{many}"
        case 3 if tensor is not None:
            tensor.dims.extend([chance.choice((0, 1, 1, 2))] * many)
        case 4 if value is not None:
            for _ in range(many):
                value.type.tensor_type.shape.dim.add(dim_value=1)
        case 5 if node is not None and node.attribute:
            attribute = chance.choice(node.attribute)
            chance.choice((attribute.ints, attribute.floats)).extend([chance.choice((0, 1, 2))] * many)
        case 6 if node is not None and node.attribute:
            for _ in range(many):
                node.attribute.add().CopyFrom(node.attribute[0])
        case 7 if node is not None:
            name = "n" * 100_000
            node.name = name
        case _:
            for k in range(many):
                graph.value_info.add(name=f"v{k}").type.tensor_type.elem_type = 1


def external(chance: random.Random, model: ModelProto) -> None:
    """A tensor that says that its values lie in a file."""
    tensor = _a_tensor(chance, model)
    if tensor is None:
        return
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    entries = (
        (
            "location",
            chance.choice(("", "w.bin", "../w.bin", "/etc/passwd", "/dev/zero", ".", "a\0b", "w" * 5000, "\x1b[2J")),
        ),
        ("offset", chance.choice(("", "0", "-1", "x", "9" * 30))),
        ("length", chance.choice(("", "0", "-1", "1.5", "9" * 5000))),
        (chance.choice(NAMES), chance.choice(NAMES)),
    )
    for key, value in chance.sample(entries, chance.randint(0, 4)):
        tensor.external_data.add(key=key, value=value)


def trained(chance: random.Random, model: ModelProto) -> None:
    """Training information: the graph itself, an empty one, or bindings of names that may not exist."""
    added = model.training_info.add()
    if chance.random() < 0.7:
        added.algorithm.CopyFrom(model.graph)
    if chance.random() < 0.3:
        added.initialization.CopyFrom(model.graph)
    added.update_binding.add(key=str(_a_name(chance, model)), value=str(_a_name(chance, model)))


def described(chance: random.Random, model: ModelProto) -> None:
    """Change descriptions: documentation, metadata, quantization, the producer, the name of a graph."""
    graph, text = _a_graph(chance, model), chance.choice([*NAMES, "d" * 100_000])
    match chance.randrange(6):
        case 0:
            model.doc_string = graph.doc_string = model.producer_name = text
        case 1:
            model.metadata_props.add(key=text, value=text)
        case 2:
            graph.metadata_props.add(key="refgrad.constant", value=text)
        case 3:
            added = graph.quantization_annotation.add(tensor_name=str(_a_name(chance, model)))
            added.quant_parameter_tensor_names.add(key=text, value=text)
        case 4 if (tensor := _a_tensor(chance, model)) is not None:
            tensor.metadata_props.add(key="refgrad.constant", value=text)
        case _:
            graph.name = text


MUTATIONS: tuple[Mutation, ...] = (
    lists, lists, ends, ends, ends, added_input, named, named, renamed, renamed, attribute, attribute, attribute, attribute,
    added_attribute, added_attribute, declared, declared, declared, stored, stored, stored, imports, imports, nested,
    function, cycled, cycled, sparse, exchanged, exchanged, shadowed, shadowed, mutual, long, external, trained, described,
)  # fmt: skip
