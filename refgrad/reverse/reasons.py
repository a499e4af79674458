"""The reasons for the verdicts on operators, as reports and refusals word them."""

from __future__ import annotations

from onnx import TensorProto

from refgrad.errors import abridged
from refgrad.model.graph import Graph, Node
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.traverse import nested, subgraphs
from refgrad.tables.registry import NO_DERIVATIVE, QUANTIZERS, RULES, ZERO, in_one_line

CASTS = frozenset((("", "Cast"), ("", "CastLike")))
UNWRITTEN = "nobody has written its rule"


def title(domain: str, op_type: str) -> str:
    """The name of an operator in a message, with its domain unless that is ONNX's."""
    return f"{domain}.{op_type}" if domain else op_type


def reason_of(key: tuple[str, str], verdict: str, graph: Graph) -> str:
    """The reason for a verdict on an operator of `graph`; of a rule, the first paragraph of its formula."""
    rule = graph.control_flow.get(key)
    if rule is not None:
        return in_one_line(rule.formula()) if verdict == "rule" else "no derivative passes"
    if verdict == "rule":
        return in_one_line(RULES[key].formula)
    if verdict == "zero":
        return ZERO.get(key) or NO_DERIVATIVE.get(key) or _no_floats(key)
    if key in CASTS and verdict == "none":
        return "it writes numbers as text"
    if key in RULES and verdict == "missing":
        return "its rule is for floats, not for quantised values: cast them, or choose quantization='zero'"
    if key in RULES:
        why = "; ".join(f"by {name}: {why}" for name, why in RULES[key].refused.items())
        return why or "its graphs capture a value that varies, and its rule is for inputs: make that value an input"
    if key[0] == MICROSOFT and "Grad" in key[1]:
        return "it is the gradient of an operator; to differentiate again, make that gradient in dialect 'onnx'"
    return NO_DERIVATIVE.get(key) or UNWRITTEN


def flat_within(node: Node) -> str:
    """The operators with a zero derivative in the graphs of a node, as the rest of a sentence."""
    graphs = [graph for attribute in node.proto.attribute for graph in subgraphs(attribute)]
    inner = dict.fromkeys(
        (member.domain, member.op_type) for member in nested(member for graph in graphs for member in graph.node)
    )
    flat = [title(*key) for key in inner if key in ZERO]
    return f"; in its graphs are {abridged(flat)}" if flat else ""


def _no_floats(key: tuple[str, str]) -> str:
    """The reason why a node without float outputs has the derivative zero."""
    if TensorProto.INT8 in QUANTIZERS.get(key, ()):
        return "rounding is piecewise constant"
    return "its outputs are not floats"
