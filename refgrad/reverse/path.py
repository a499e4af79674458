"""Which nodes lie between the inputs and the outputs of a derivative, and what each of them does to it."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import FunctionProto, TensorProto, helper

from refgrad.errors import NoGradientError, OptionError, UnknownNameError, choices, did_you_mean
from refgrad.forward.functions import make_function
from refgrad.forward.graph import Graph, Node
from refgrad.protos.domains import MICROSOFT, ML
from refgrad.protos.inlining import INLINED, inline_functions
from refgrad.protos.types import FLOATS
from refgrad.protos.walk import import_domain, names_of, subgraphs
from refgrad.tables.definitions import DEFINITIONS, UnsupportedFormError
from refgrad.tables.registry import NO_DERIVATIVE, QUANTIZED, QUANTIZERS, RULES, ZERO, Passage
from refgrad.tables.schemas import find_schema

_CASTS = frozenset((("", "Cast"), ("", "CastLike")))
_BITWISE = frozenset(("", op_type) for op_type in ("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"))
_NEVER = frozenset((None, TensorProto.BOOL, TensorProto.STRING))  # element types of values that carry no derivative


@dataclass(frozen=True)
class Row:
    """What preflight says of one operator: "rule", "zero", "none" (no derivative exists) or "missing", and why."""

    operator: str
    verdict: str
    reason: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Every operator that reads a value which depends on `wrt`, on the way to `outputs` or not."""

    wrt: tuple[str, ...]
    outputs: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether `gradient` would succeed."""
        return not self.refused

    @property
    def refused(self) -> tuple[Row, ...]:
        """The operators that stand in the way."""
        return tuple(row for row in self.rows if row.verdict in ("none", "missing"))


class Path:
    """The nodes that the reverse sweep visits.

    `active` are the nodes to differentiate, in topological order, `varied` the values that depend on `wrt`, `needed` those
    of them that an output depends on, `rows` the verdict per operator. With a `quantization` other than "zero" what
    QuantizeLinear makes varies too, and whatever moves its elements: `graph.adjoint_types` has these values. So does the
    text or the bits of a float, until something is made of it in which no derivative hides: a way back to a float is refused.
    """

    def __init__(self, graph: Graph, wrt: Iterable[str], outputs: Iterable[str], quantization: str = "zero") -> None:
        self.graph = graph
        self.varied = set(wrt)
        self._rounds = quantization != "zero"
        self.passages: dict[str, Passage] = {}  # by the name of a node with graphs of its own
        self._encoded: set[str] = set()  # text and bits that depend on `wrt`
        found: dict[tuple[tuple[str, str], str], list[str]] = {}
        moved: list[tuple[Node, list[str]]] = []
        blocked: set[str] = set()
        for node in graph.nodes:
            if self.varied.isdisjoint(node.reads):
                continue
            if node.key in graph.structures:
                if by := graph.structure(node, quantization).outputs_of(self.varied):
                    self.varied.update(by)
                    moved.append((node, []))
                found.setdefault((node.key, "rule" if by else "zero"), []).append(node.name)
                continue
            quantised = self._quantised(node) if self._rounds else {}
            carrying = [name for name in node.outputs if name and graph.is_float(name)]
            carrying += quantised
            verdict, differentiable = self._verdict(node) if carrying else ("zero", [])
            if not carrying and (encoded := self._encoded_by(node)):
                verdict = "none" if self._is_encoder(node) else "zero"
                self._encoded.update(encoded)
                self.varied.update(encoded)
                moved.append((node, node.reads))
            if verdict in ("none", "missing"):
                blocked.add(node.name)
            if verdict != "zero" and not self.varied.isdisjoint(differentiable):
                self.varied.update(carrying)
                graph.adjoint_types.update(quantised)
                moved.append((node, differentiable))
            found.setdefault((node.key, verdict), []).append(node.name)
        self.needed = self.varied.intersection(outputs)
        self.active: list[Node] = []
        for node, differentiable in reversed(moved):
            if not self.needed.isdisjoint(node.outputs):
                self.active.append(node)
                if node.key in graph.structures:
                    passage = graph.structure(node, quantization).passage(self.varied, self.needed)
                    self.passages[node.name], differentiable = passage, list(passage.reads)
                    if passage.refusal:
                        blocked.add(node.name)
                        found[node.key, "rule"].remove(node.name)
                        found.setdefault((node.key, "none"), []).append(node.name)
                        graph.refusals[node.key] = passage.refusal
                self.needed.update(self.varied.intersection(differentiable))
        self.active.reverse()
        self.blocked = [node for node in self.active if node.name in blocked]
        in_the_way = {node.name for node in self.blocked}
        inner = list(dict.fromkeys(path for passage in self.passages.values() for path in passage.paths))
        self.blocked_within = [node for path in inner for node in (*path.blocked, *path.blocked_within)]
        rows = [
            Row(_title(*key), verdict, self._reason(key, verdict), tuple(names))
            for (key, verdict), names in found.items()
            if (names and verdict in ("rule", "zero")) or in_the_way.intersection(names)
        ]
        self.rows = _joined([*rows, *(row for path in inner for row in path.rows)]) if inner else tuple(rows)

    def _reason(self, key: tuple[str, str], verdict: str) -> str:
        refused = verdict in ("none", "missing") and self.graph.refusals.get(key)
        return refused or _reason(key, verdict, self.graph)

    def _quantised(self, node: Node) -> dict[str, int]:
        """The outputs of a quantised type that carry a derivative, and the element type of their adjoints.

        It is that of the quantised value that the node reads; of what a node rounds, that of its scale.
        """
        if node.key in ZERO:
            return {}
        types, carried = self.graph.types, self.graph.adjoint_types
        quantised = [carried[name] for name in node.reads if name in carried]
        rounded = [types[name] for name in reversed(node.inputs) if types.get(name) in FLOATS]
        found = {}
        for name in node.outputs:
            kind = types.get(name)
            if kind in _NEVER or kind in FLOATS:
                continue
            if quantised:
                found[name] = quantised[0]
            elif kind in QUANTIZERS.get(node.key, ()) and rounded:
                found[name] = rounded[0]
        return found

    def _encoded_by(self, node: Node) -> list[str]:
        """The outputs that are text or bits of what varies: they have no derivative, and a float can be had back from them."""
        if node.key in ZERO and node.key not in _BITWISE:
            return []
        if self._encoded.isdisjoint(node.reads) and not self._is_encoder(node):
            return []
        return [name for name in node.outputs if name]

    def _is_encoder(self, node: Node) -> bool:
        to_text = node.key in _CASTS and self.graph.types.get(node.outputs[0]) == TensorProto.STRING
        return to_text or node.key == ("", "BitCast")

    def _verdict(self, node: Node) -> tuple[str, list[str]]:
        """What `node`, an output of which may carry a derivative, does to it, and the inputs that it may flow to."""
        rule = RULES.get(node.key)
        if node.key in DEFINITIONS and DEFINITIONS[node.key].misfit(node.proto):
            return "missing", node.reads
        if rule is not None:
            opset = self.graph.opsets.get(rule.domain, 1)
            if rule.refused and any(
                k < len(node.inputs) and node.inputs[k] in self.varied for k in rule.refuses(opset)
            ):
                return "none", node.reads
            places = rule.bind(opset)[1]
            names: list[str] = []
            for position, variadic in places:
                names += node.inputs[position:] if variadic else node.inputs[position : position + 1]
            if node.key not in QUANTIZED and not self.graph.adjoint_types.keys().isdisjoint(names):
                return "missing", node.reads
            return "rule", names
        if node.key in ZERO:
            return "zero", []
        return ("none" if node.key in NO_DERIVATIVE else "missing"), node.reads


def _joined(rows: Iterable[Row]) -> tuple[Row, ...]:
    """One row per operator and verdict, of the model and of the bodies in it."""
    found: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for row in rows:
        key = row.operator, row.verdict, row.reason
        found[key] = found.get(key, ()) + row.nodes
    return tuple(Row(*key, nodes) for key, nodes in found.items())


def _title(domain: str, op_type: str) -> str:
    return f"{domain}.{op_type}" if domain else op_type


def _reason(key: tuple[str, str], verdict: str, graph: Graph) -> str:
    structure = graph.structures.get(key)
    if structure is not None:
        return structure.formula().partition("\n")[0] if verdict == "rule" else "no derivative passes"
    if verdict == "rule":
        return RULES[key].formula.partition("\n")[0]
    if verdict == "zero":
        return ZERO.get(key) or NO_DERIVATIVE.get(key) or _no_floats(key)
    if key in _CASTS and verdict == "none":
        return "it writes numbers as text"
    if key in RULES and verdict == "missing":
        return "its rule is for floats, not for quantised values: cast them, or choose quantization='zero'"
    if key in RULES:
        return "; ".join(f"by {name}: {why}" for name, why in RULES[key].refused.items())
    if key[0] == MICROSOFT and "Grad" in key[1]:
        return "it is the gradient of an operator; to differentiate again, make that gradient in dialect 'onnx'"
    return NO_DERIVATIVE.get(key) or "nobody has written its rule"


def _no_floats(key: tuple[str, str]) -> str:
    """Why a node without float outputs has the derivative zero."""
    if TensorProto.INT8 in QUANTIZERS.get(key, ()):
        return "rounding is piecewise constant; quantization='straight-through' or 'clipped' gives it a derivative"
    return "its outputs are no floats"


def prepare(
    graph: Graph, wrt: Sequence[str] | None, outputs: Sequence[str] | None, quantization: str = "zero"
) -> tuple[list[str], list[str], Path]:
    """The names to differentiate with respect to, the outputs to differentiate, and the path between them.

    An operator without a rule whose schema has a function body is replaced by that body in `graph`.

    :raises UnknownNameError: a name that the model does not have, that is given twice, or that is no float.
    """
    targets = _outputs(graph, outputs)
    sources = _wrt(graph, wrt)
    path = Path(graph, sources, targets, quantization)
    while path.blocked and expand(graph, path.blocked):
        path = Path(graph, sources, targets, quantization)
    if graph.refusals:
        path = Path(graph, sources, targets, quantization)  # whose rows now say why
    if wrt is None:
        sources = [name for name in sources if name in graph.inputs or name in path.needed]
        if not sources:
            raise UnknownNameError(
                "The model has no float input and no float initializer to differentiate with respect to."
            )
    graph.open(sources)
    return sources, targets, path


def refuse(path: Path) -> NoGradientError:
    """The error for a path with nodes that cannot be differentiated."""
    lines = []
    blocked = path.blocked + path.blocked_within
    for row in path.rows:
        if row.verdict not in ("none", "missing"):
            continue
        nodes = choices((n.name for n in blocked if n.name in row.nodes), limit=5)
        why = f"has no derivative: {row.reason}" if row.verdict == "none" else f"has no rule: {row.reason}"
        lines.append(f"{row.operator} {why} (nodes {nodes}).")
    lines.append(
        "They lie between the requested inputs and outputs. Choose other names for wrt or outputs, "
        "or give a rule with refgrad.extend.rule."
    )
    return NoGradientError("\n".join(lines), tuple(node.name for node in blocked))


def _outputs(graph: Graph, outputs: Sequence[str] | None) -> list[str]:
    floats = [name for name in graph.outputs if graph.element_type(name) in FLOATS]
    if outputs is None:
        if not floats:
            maps = [node.inputs[0] for node in graph.nodes if node.key == (ML, "ZipMap")]
            hint = f" ZipMap made maps of {choices(maps)}: save the model without it (in skl2onnx zipmap=False)."
            raise UnknownNameError(
                f"The model has no float output to differentiate; its outputs: {choices(graph.outputs)}.{hint if maps else ''}"
            )
        return floats
    return _checked("outputs", outputs, graph, floats, "output")


def _wrt(graph: Graph, wrt: Sequence[str] | None) -> list[str]:
    known = [*graph.inputs, *(name for name in graph.initializers if name not in graph.inputs)]
    floats = [name for name in known if graph.element_type(name) in FLOATS]
    if wrt is not None:
        return _checked("wrt", wrt, graph, floats, "input or initializer")
    settings = _settings(graph)
    return [name for name in floats if name in graph.inputs or (graph.is_weight(name) and name not in settings)]


def _settings(graph: Graph) -> set[str]:
    """The values that nodes read only as settings of their operators: the scales of Resize are floats, but no weights."""
    settings: set[str] = set()
    others: set[str] = set()
    for node in graph.nodes:
        rule = RULES.get(node.key)
        if rule is None or not rule.settings:
            others.update(node.reads)
            continue
        schema = find_schema(node.op_type, node.domain, graph.opsets.get(node.domain, 1))
        for parameter, name in zip(schema.inputs, node.inputs, strict=False):
            (settings if parameter.name in rule.settings else others).add(name)
    return settings - others


def _checked(argument: str, names: object, graph: Graph, floats: list[str], kind: str) -> list[str]:
    if isinstance(names, str):
        raise OptionError(f"{argument} is a list of names, not a string: [{names!r}].")
    if not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise OptionError(
            f"{argument} is a list of names (strings), not {reprlib.repr(names)}; the model has: {choices(floats)}."
        )
    if not names:
        raise OptionError(f"{argument} is empty; the model has: {choices(floats)}.")
    boundary = {*graph.outputs} if argument == "outputs" else {*graph.inputs, *graph.initializers}
    for position, name in enumerate(names):
        if name in names[:position]:
            raise UnknownNameError(f"{argument} has {name!r} twice.")
        if name in floats:
            continue
        if name in boundary:
            raise UnknownNameError(
                f"{name!r} in {argument} {_what(graph, name)}: only floats have a derivative. "
                f"The model has the float {kind.replace(' or ', 's or ')}s {choices(floats)}."
            )
        raise UnknownNameError(
            f"{name!r} in {argument} is no {kind} of the model{_place(graph, name)}.{did_you_mean(name, floats)} "
            f"It has: {choices(floats)}."
        )
    return list(names)


def _place(graph: Graph, name: str) -> str:
    """Where the model has a value that is neither its input nor its output, as the end of a sentence."""
    if name in graph.producer:
        return f", but a result of node {graph.producer[name].name!r} within"
    for node in graph.nodes:
        bodies = (body for attribute in node.proto.attribute for body in subgraphs(attribute))
        if any(name in names_of(body) for body in bodies):
            return f", but a value in the body of node {node.name!r}"
    return ""


def _what(graph: Graph, name: str) -> str:
    kind = graph.element_type(name)
    if not kind:
        return "is no tensor"
    has = "holds tensors of type " if name in graph.containers else "has type "
    return has + helper.tensor_dtype_to_string(kind).removeprefix("TensorProto.").lower()


def expand(graph: Graph, nodes: Iterable[Node]) -> bool:
    """Replace the nodes whose schema has a function body by that body; whether there was one."""
    functions: list[FunctionProto] = []
    for node in nodes:
        body = _body(graph, node)
        if body is None:
            continue
        schema = find_schema(node.op_type, node.domain, graph.opsets.get(node.domain, 1))
        given = {a.name for a in node.proto.attribute}
        defaults = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}
        node.proto.attribute.extend(value for name, value in defaults.items() if name not in given)
        body.domain, body.name = INLINED, f"{node.op_type}_{len(functions)}"
        node.proto.domain, node.proto.op_type = body.domain, body.name
        functions.append(body)
    if not functions:
        return False
    graph.model.functions.extend(functions)
    import_domain(graph.model, INLINED)
    if "" not in graph.opsets:
        graph.model.opset_import.append(helper.make_opsetid("", graph.opset))
    graph.model = inline_functions(graph.model)
    graph.index()
    return True


def _own_body(graph: Graph, node: Node) -> FunctionProto | None:
    """The body of an operator of ours; where it does not cover the node, the graph gets to know why."""
    ranks = {name: len(graph.shapes[name]) for name in node.inputs if name in graph.shapes}
    types = {name: (graph.types[name], ranks.get(name)) for name in node.inputs if name in graph.types}
    try:
        return make_function(node.proto, graph.opsets, types, node.op_type)
    except UnsupportedFormError as error:
        graph.refusals[node.key] = str(error)
        return None


def _body(graph: Graph, node: Node) -> FunctionProto | None:
    opset = graph.opsets.get(node.domain, 1)
    if node.key in DEFINITIONS:
        return _own_body(graph, node)
    if not onnx.defs.has(node.op_type, node.domain) or node.key in NO_DERIVATIVE:
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)  # whose stub lacks the function bodies
    body = FunctionProto()
    written = [version for version in schema.function_opset_versions if version <= graph.opset]
    if written:
        body.ParseFromString(schema.get_function_with_opset_version(max(written)))
    elif schema.has_context_dependent_function:
        types = [
            helper.make_tensor_type_proto(graph.types[n], graph.shapes.get(n)).SerializeToString()
            if n in graph.types
            else b""
            for n in node.inputs
        ]
        text = schema.get_context_dependent_function_with_opset_version(opset, node.proto.SerializeToString(), types)
        body.ParseFromString(text)
    else:
        return None
    versions = {o.domain: o.version for o in body.opset_import}
    if versions.get("", graph.opset) > graph.opset or len(node.inputs) > len(body.input):
        return None  # of a later opset, or for one operand of a variadic input only
    del body.opset_import[:]
    body.opset_import.append(helper.make_opsetid("", graph.opset))  # the inliner leaves another opset's body alone
    return body
