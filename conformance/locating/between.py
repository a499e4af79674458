"""The nodes that can be at fault for recorded gradients, which nobody can run: by which of them are wrong and which are right.

An error in the derivative of a node by one of its inputs goes back to each tensor before this input, and to no other. So if one
node alone is at fault, the tensors before some of its inputs are all that are wrong, and none that is right.
"""

from __future__ import annotations

from collections.abc import Collection

from refgrad.conformance.locating.paths import TracedGraph
from refgrad.protos.traverse import reads_of


def between(graph: TracedGraph, wrong: Collection[str], right: Collection[str]) -> tuple[str, ...]:
    """The nodes each of which explains the verdicts if it alone is at fault, in the order of the model.

    :param wrong: the inputs and initializers whose gradients are wrong.
    :param right: those whose gradients are right, and not 0.
    """
    none = frozenset[str]()
    before = {name: frozenset({name}) for name in (*wrong, *right)}
    for node in graph.nodes:
        reached = none.union(*(before.get(name, none) for name in reads_of(node)))
        before |= {
            name: reached if graph.sizes.get(name) else none for name in node.output
        }  # integers carry no cotangent
    needed = {value.name for value in graph.model.graph.output}
    found = []
    for k in reversed(range(len(graph.nodes))):
        if needed.isdisjoint(graph.nodes[k].output):
            continue
        reads = reads_of(graph.nodes[k])
        needed.update(reads)
        explained = none.union(*(before.get(name, none) for name in reads if before.get(name, none).isdisjoint(right)))
        if wrong and explained >= set(wrong):
            found.append(graph.title(k))
    return tuple(reversed(found))
