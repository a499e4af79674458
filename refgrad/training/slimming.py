"""Remove unread values, copies and Reshapes that change nothing from a step, and merge sums into the products before them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from refgrad.errors import RefgradError
from refgrad.model.external import array_of
from refgrad.model.inference.infer import infer
from refgrad.model.reading import is_large, skeleton_of
from refgrad.protos.traverse import captures_of, positions_needed, reads_of, refill, signatures
from refgrad.protos.types import Shape, type_of


def uses(graph: GraphProto) -> Counter[str]:
    """How many nodes read each value, in inner graphs too."""
    return Counter(name for node in graph.node for name in set(reads_of(node)))


def slim(model: ModelProto, cut: Collection[str] = ()) -> dict[str, str]:
    """Remove copies, Reshapes that change nothing, and what nothing reads, and make one node of a product and a row.

    The names of inputs and outputs stay.

    :param cut: values where the model may be cut in two. Each stays the result of a node, and no two become one value.
    :return: the value in place of each value in `cut`.
    """
    graph = model.graph
    results = [value.name for value in graph.output]
    fixed = {*results, *(name for node in graph.node for name in captures_of(node))}
    types, targets = _types(model), _targets(graph)
    shapes = {name: shape for name, (_, shape) in types.items()}
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    copied: dict[str, str] = {}
    computed = {name for node in graph.node for name in node.output}
    ends = set(cut)
    kept = []
    for node in graph.node:
        made = node.output[0] if node.output else ""
        is_copy = (
            not node.domain
            and made not in fixed
            and (node.op_type == "Identity" or _is_copy(node, shapes, targets, readers.get(made, [])))
        )
        node.input[:] = [copied.get(name, name) for name in node.input]
        if is_copy and made in ends:
            is_copy = node.input[0] in computed - ends
            ends.add(node.input[0])
        if is_copy:
            copied[made] = node.input[0]
        else:
            kept.append(node)
    kept = _with_rows_added(kept, types, fixed | ends)
    needed = [kept[position] for position in positions_needed(signatures(kept), results)]
    inputs = [value.name for value in graph.input]  # whose defaults stay
    read = {*results, *inputs, *(name for node in needed for name in reads_of(node))}
    refill(graph.node, needed)
    refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in read])
    return {name: copied.get(name, name) for name in cut}


def _is_copy(
    node: NodeProto, shapes: Mapping[str, Shape], targets: Mapping[str, list[int]], readers: list[NodeProto]
) -> bool:
    """True if a Reshape makes of its input the same again, or one row of a vector that is only added to matrices."""
    if node.op_type != "Reshape" or len(node.input) < 2:
        return False
    shape, target = shapes.get(node.input[0]), targets.get(node.input[1])
    if target is None or shape is None:
        return False
    if len(shape) == len(target):
        pairs = list(zip(shape, target, strict=True))
        return target.count(-1) < 2 and all(due == -1 or 0 < due == size for size, due in pairs)
    if len(shape) != 1 or len(target) != 2 or target[0] != 1 or target[1] != shape[0] or not readers:
        return False
    made = node.output[0]
    return all(
        reader.op_type == "Add"
        and not reader.domain
        and any(len(shapes.get(n, ())) > 1 for n in reader.input if n != made)
        for reader in readers
    )


def _with_rows_added(
    nodes: Sequence[NodeProto], types: Mapping[str, tuple[int, Shape]], fixed: Container[str]
) -> list[NodeProto]:
    """The nodes with a Gemm for each product of two matrices that is read by the addition of a row alone."""
    reads = Counter(name for node in nodes for name in node.input)
    products = {
        node.output[0]: node
        for node in nodes
        if node.op_type == "MatMul" and not node.domain and reads[node.output[0]] == 1 and node.output[0] not in fixed
    }
    made: list[NodeProto] = []
    for node in nodes:
        product = next((name for name in node.input if name in products), "")
        if node.op_type == "Add" and not node.domain and product:
            [row] = [name for name in node.input if name != product]
            operands = [*products[product].input, row]
            if _is_product_and_row([types.get(name) for name in operands]):
                made = [other for other in made if other is not products[product]]
                node = helper.make_node("Gemm", operands, node.output, name=node.name)
        made.append(node)
    return made


def _is_product_and_row(operands: Sequence[tuple[int, Shape] | None]) -> bool:
    """True if two matrices are multiplied that are not empty, in a type of Gemm, and a row is added to each row."""
    if None in operands:
        return False
    (kind, left), (_, right), (_, row) = [operand for operand in operands if operand is not None]
    if kind not in (TensorProto.FLOAT, TensorProto.DOUBLE) or len(left) != 2 or len(right) != 2:
        return False
    is_known = all(isinstance(size, int) and size > 0 for size in right)
    return is_known and row in (right[1:], (1, right[1]))


def _types(model: ModelProto) -> dict[str, tuple[int, Shape]]:
    """The known types and shapes of values; none where inference fails."""
    large = {tensor.name: tensor for tensor in model.graph.initializer if is_large(tensor)}
    try:
        inferred = infer(skeleton_of(model, large))
    except RefgradError:
        return {}
    found: dict[str, tuple[int, Shape]] = {
        tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in model.graph.initializer
    }
    for value in (*inferred.input, *inferred.output, *inferred.value_info):
        kind, shape = type_of(value) if value.type.HasField("tensor_type") else (0, None)
        if shape is not None:
            found[value.name] = (kind, shape)
    return found


def _targets(graph: GraphProto) -> dict[str, list[int]]:
    """The initializers that may say a shape."""
    small = [t for t in graph.initializer if t.data_type == TensorProto.INT64 and len(t.dims) == 1 and not is_large(t)]
    return {tensor.name: np.asarray(array_of(tensor)).tolist() for tensor in small}
