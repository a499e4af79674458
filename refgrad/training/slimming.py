"""What a step does not need: values that nothing reads, and copies."""

from __future__ import annotations

from collections import Counter

from onnx import GraphProto

from refgrad.protos.walk import captures_of, positions_needed, reads_of, refill, signatures


def uses(graph: GraphProto) -> Counter[str]:
    """How many nodes read each value, in inner graphs too."""
    return Counter(name for node in graph.node for name in set(reads_of(node)))


def slim(graph: GraphProto) -> None:
    """Remove copies, and the nodes and initializers that nothing reads. The names of inputs and outputs stay."""
    results = [value.name for value in graph.output]
    fixed = {*results, *(name for node in graph.node for name in captures_of(node))}
    copied: dict[str, str] = {}
    kept = []
    for node in graph.node:
        node.input[:] = [copied.get(name, name) for name in node.input]
        if node.op_type == "Identity" and not node.domain and node.output[0] not in fixed:
            copied[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    needed = [kept[position] for position in positions_needed(signatures(kept), results)]
    read = {*results, *(name for node in needed for name in reads_of(node))}
    refill(graph.node, needed)
    refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in read])
