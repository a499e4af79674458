"""The nodes between the inputs and the outputs of a derivative, and the verdict on each of them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import onnx
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper

from refgrad import traits
from refgrad.errors import NoGradientError, OptionError, UnknownNameError, abridged, choices, did_you_mean
from refgrad.forward.functions import factors_in_double, make_function
from refgrad.forward.graph import Graph, Node, view
from refgrad.protos import native
from refgrad.protos.domains import MICROSOFT, ML
from refgrad.protos.inlining import INLINED, inline_functions
from refgrad.protos.types import FLOATS
from refgrad.protos.walk import import_domain, names_of, nested, subgraphs
from refgrad.reverse.report import OperatorVerdict
from refgrad.tables.definitions import DEFINITIONS, UnsupportedFormError
from refgrad.tables.registry import NO_DERIVATIVE, QUANTIZED, QUANTIZERS, RULES, ZERO, Flow, Passage, Structure
from refgrad.tables.schemas import find_schema

_WILDCARDS = frozenset("*?[")  # of fnmatch
_CASTS = frozenset((("", "Cast"), ("", "CastLike")))
_BITWISE = frozenset(("", op_type) for op_type in traits.BITWISE)
_UNWRITTEN = "nobody has written its rule"
_NEVER = frozenset((None, TensorProto.BOOL, TensorProto.STRING))  # element types of values that carry no derivative


@dataclass(frozen=True, eq=False)
class Path:
    """The nodes that the reverse sweep visits.

    `active` are the nodes to differentiate, in topological order, `varied` the values that depend on `wrt`, `needed` those
    of them that an output depends on, `passages` the ways through nodes with graphs of their own, by name. `blocked` are the
    active nodes that have no derivative, `refusals` why not where it is not the operator alone that tells, `found` the nodes
    by operator and verdict. With a `quantization` other than "zero" what QuantizeLinear makes varies too, and whatever moves
    its elements: `adjoint_types` has these values, and the types of their adjoints. So does the text or the bits of a float,
    until something is made of it in which no derivative hides: a way back to a float is refused.
    """

    graph: Graph
    active: list[Node]
    varied: set[str]
    needed: set[str]
    passages: dict[str, Passage]
    adjoint_types: dict[str, int]
    blocked: list[Node]
    refusals: dict[tuple[str, str], str]
    found: dict[tuple[tuple[str, str], str], list[str]]

    @property
    def within(self) -> list[Path]:
        """The paths through the graphs of nodes."""
        return list(dict.fromkeys(path for passage in self.passages.values() for path in passage.paths))

    @property
    def blocked_within(self) -> list[Node]:
        """The nodes without a derivative in the graphs of active nodes."""
        return [node for path in self.within for node in (*path.blocked, *path.blocked_within)]

    @property
    def rows(self) -> tuple[OperatorVerdict, ...]:
        """The verdict on every operator, of the graphs of nodes too."""
        in_the_way = {node.name for node in self.blocked}
        rows = [
            OperatorVerdict(_title(*key), verdict, self._reason(key, verdict), tuple(names))
            for (key, verdict), names in self.found.items()
            if (names and verdict in ("rule", "zero")) or in_the_way.intersection(names)
        ]
        inner = self.within
        return joined([*rows, *(row for path in inner for row in path.rows)]) if inner else tuple(rows)

    def stop(self, node: Node, flat: Sequence[str]) -> OperatorVerdict:
        """The verdict on a node whose results `flat` have no derivative by what varies, although it may have a rule."""
        if node.name not in self.found.get((node.key, "rule"), ()):
            reason = self._reason(node.key, "zero") + _flat_within(node)
            return OperatorVerdict(_title(*node.key), "zero", reason, (node.name,))
        said = f"its result{'s' if len(flat) > 1 else ''} {choices(flat)}"
        reason = f"{said} {'are no floats' if len(flat) > 1 else 'is no float'}"
        if any(self.graph.is_float(name) for name in flat):
            reason = f"it has no derivative by {choices(name for name in node.reads if name in self.varied)}"
        return OperatorVerdict(_title(*node.key), "rule", reason, (node.name,))

    def _reason(self, key: tuple[str, str], verdict: str) -> str:
        refused = verdict in ("none", "missing") and self.refusals.get(key)
        return refused or _reason(key, verdict, self.graph)


def find_path(
    structures: Structures,
    wrt: Iterable[str],
    outputs: Iterable[str],
    *,
    carried: Mapping[str, int] | None = None,
    refusals: Mapping[tuple[str, str], str] | None = None,
) -> Path:
    """The path from `wrt` to `outputs` in the graph of `structures`, with the operators that stand in the way, if any.

    :param carried: quantised values outside that carry a derivative, and the types of their adjoints.
    :param refusals: operators whose function body does not cover a node, and why not.
    """
    graph, flow = structures.graph, Flow(set(wrt), dict(carried or {}))
    verdicts = _Verdicts(graph, flow, structures.quantization != "zero")
    varied = flow.varied
    found: dict[tuple[tuple[str, str], str], list[str]] = {}
    moved: list[tuple[Node, Sequence[str]]] = []
    blocked: set[str] = set()
    for node in graph.nodes:
        if varied.isdisjoint(node.reads):
            continue
        if node.key in graph.structures:
            if by := structures.of(node).outputs_of(flow):
                varied.update(by)
                moved.append((node, ()))
            found.setdefault((node.key, "rule" if by else "zero"), []).append(node.name)
            continue
        verdict, carrying, differentiable = verdicts.of(node)
        if verdict in ("none", "missing"):
            blocked.add(node.name)
        if carrying:
            varied.update(carrying)
            moved.append((node, differentiable))
        found.setdefault((node.key, verdict), []).append(node.name)
    needed, active = varied.intersection(outputs), []
    passages: dict[str, Passage] = {}
    refused = dict(refusals or {})
    for node, differentiable in reversed(moved):
        if needed.isdisjoint(node.outputs):
            continue
        active.append(node)
        if node.key in graph.structures:
            passage = structures.of(node).passage(flow, needed)
            passages[node.name], differentiable = passage, list(passage.reads)
            if passage.refusal:
                blocked.add(node.name)
                found[node.key, "rule"].remove(node.name)
                found.setdefault((node.key, "none"), []).append(node.name)
                refused[node.key] = passage.refusal
        for name in differentiable:
            if name in varied:
                needed.add(name)
    active.reverse()
    in_the_way = [node for node in active if node.name in blocked]
    return Path(graph, active, varied, needed, passages, flow.adjoint_types, in_the_way, refused, found)


def complete_path(
    structures: Structures, wrt: Sequence[str], outputs: Sequence[str], carried: Mapping[str, int] | None = None
) -> Path:
    """The path, with the nodes in the way replaced by the function bodies of their operators: its graph has these."""
    refusals: dict[tuple[str, str], str] = {}
    path = find_path(structures, wrt, outputs, carried=carried)
    while path.blocked:
        graph, more = expanded(path.graph, path.blocked)
        refusals |= more
        if graph is not None:
            structures = structures.over(graph)
        elif not more:
            break
        path = find_path(structures, wrt, outputs, carried=carried, refusals=refusals)
        if graph is None:
            break
    return path


class Structures:
    """The bodies of a graph, each read once: what If, Loop, Scan, SequenceMap and calls of functions hold.

    `names` are those that are taken in the whole model; whoever needs another one adds it.
    """

    def __init__(self, graph: Graph, quantization: str = "zero", model: Structures | None = None) -> None:
        """:param model: those of the model that `graph` is a part of."""
        self.graph, self.quantization = graph, quantization
        self._model = model
        self._read: dict[str, Structure] = {}

    @cached_property
    def names(self) -> set[str]:
        """The names that are taken in the model."""
        return set(self.graph.names) if self._model is None else self._model.names

    def over(self, graph: Graph) -> Structures:
        """Those of another graph of the same model."""
        return Structures(graph, self.quantization, self)

    def of(self, node: Node) -> Structure:
        """The structure of `node`."""
        if node.name not in self._read:
            self._read[node.name] = self.graph.structures[node.key].read(self, node)
        return self._read[node.name]


class _Verdicts:
    """The verdicts on the nodes of a graph, in topological order."""

    def __init__(self, graph: Graph, flow: Flow, rounds: bool) -> None:
        self._graph, self._flow, self._rounds = graph, flow, rounds
        self._encoded: set[str] = set()  # text and bits that depend on `wrt`

    def of(self, node: Node) -> tuple[str, list[str], Sequence[str]]:
        """The verdict on `node`, its outputs that vary, and the inputs that a derivative may flow to."""
        quantised = self._quantised(node) if self._rounds else {}
        is_float = self._graph.is_float
        carrying = [name for name in node.outputs if name and is_float(name)]
        if not carrying and not quantised:
            encoded = self._encoded_by(node)
            self._encoded.update(encoded)
            return "none" if encoded and self._is_encoder(node) else "zero", encoded, node.reads if encoded else ()
        verdict, differentiable = self._verdict(node)
        if verdict == "zero" or self._flow.varied.isdisjoint(differentiable):
            return verdict, [], ()
        self._flow.adjoint_types.update(quantised)
        return verdict, [*carrying, *quantised], differentiable

    def _quantised(self, node: Node) -> dict[str, int]:
        """The outputs of a quantised type that carry a derivative, and the element type of their adjoints.

        It is that of the quantised value that the node reads; of what a node rounds, that of its scale.
        """
        if node.key in ZERO:
            return {}
        types, carried = self._graph.types, self._flow.adjoint_types
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
        to_text = node.key in _CASTS and self._graph.types.get(node.outputs[0]) == TensorProto.STRING
        return to_text or node.key == ("", "BitCast")

    def _verdict(self, node: Node) -> tuple[str, Sequence[str]]:
        """The verdict on `node`, an output of which may carry a derivative, and the inputs that the derivative may flow to."""
        rule = RULES.get(node.key)
        if node.key in DEFINITIONS and DEFINITIONS[node.key].misfit(node.proto):
            return "missing", node.reads
        if rule is not None:
            opset = self._graph.opsets.get(rule.domain, 1)
            if rule.refused and any(
                k < len(node.inputs) and node.inputs[k] in self._flow.varied for k in rule.refuses(opset)
            ):
                return "none", node.reads
            if node.reads is not node.inputs and not self._flow.varied.isdisjoint(node.reads[len(node.inputs) :]):
                return "none", node.reads  # a rule gives no adjoint of what graphs capture
            names: list[str] = []
            for position, variadic in rule.bind(opset)[1]:
                names += node.inputs[position:] if variadic else node.inputs[position : position + 1]
            quantised = self._flow.adjoint_types
            if quantised and node.key not in QUANTIZED and not quantised.keys().isdisjoint(names):
                return "missing", node.reads
            return "rule", names
        if node.key in ZERO:
            return "zero", ()
        return ("none" if node.key in NO_DERIVATIVE else "missing"), node.reads


def joined(rows: Iterable[OperatorVerdict]) -> tuple[OperatorVerdict, ...]:
    """One row per operator and verdict, of the model and of the bodies in it."""
    found: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for row in rows:
        key = row.operator, row.verdict, row.reason
        found[key] = found.get(key, ()) + row.nodes
    return tuple(OperatorVerdict(*key, nodes) for key, nodes in found.items())


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
        why = "; ".join(f"by {name}: {why}" for name, why in RULES[key].refused.items())
        return why or "its graphs capture a value that varies, and its rule is for inputs: make that value an input"
    if key[0] == MICROSOFT and "Grad" in key[1]:
        return "it is the gradient of an operator; to differentiate again, make that gradient in dialect 'onnx'"
    return NO_DERIVATIVE.get(key) or _UNWRITTEN


def _flat_within(node: Node) -> str:
    """The operators with a zero derivative in the graphs of a node, as the rest of a sentence."""
    graphs = [graph for attribute in node.proto.attribute for graph in subgraphs(attribute)]
    inner = dict.fromkeys((one.domain, one.op_type) for one in nested(one for graph in graphs for one in graph.node))
    flat = [_title(*key) for key in inner if key in ZERO]
    return f"; in its graphs are {abridged(flat)}" if flat else ""


def _no_floats(key: tuple[str, str]) -> str:
    """Why a node without float outputs has the derivative zero."""
    if TensorProto.INT8 in QUANTIZERS.get(key, ()):
        return "rounding is piecewise constant; quantization='straight-through' or 'clipped' gives it a derivative"
    return "its outputs are not floats"


def prepare(
    graph: Graph, wrt: Sequence[str] | None, outputs: Sequence[str] | None, quantization: str = "zero"
) -> tuple[list[str], list[str], Path]:
    """The names to differentiate with respect to, the outputs to differentiate, and the path between them.

    In the graph of the path an operator without a rule whose schema has a function body is replaced by that body.

    :raises UnknownNameError: a name that the model does not have, that is given twice, or that is no float.
    """
    targets = _outputs(graph, outputs)
    sources = _wrt(graph, wrt)
    path = complete_path(Structures(graph, quantization), sources, targets)
    if wrt is None:
        sources = [name for name in sources if name in graph.inputs or name in path.needed]
        if not sources:
            raise UnknownNameError(
                "The model has no float input and no float initializer to differentiate with respect to."
            )
    return sources, targets, path


def refuse(path: Path) -> NoGradientError:
    """The error for a path with nodes that cannot be differentiated."""
    lines, ruled = [], True
    blocked = path.blocked + path.blocked_within
    for row in path.rows:
        if row.verdict not in ("none", "missing"):
            continue
        nodes = choices((n.name for n in blocked if n.name in row.nodes), limit=5)
        if row.verdict == "none":
            why = "has no derivative"
        elif row.reason == _UNWRITTEN:
            why = "has no rule"
        else:
            why = "cannot be differentiated"  # it has a rule or a body, which does not cover these nodes
        ruled = ruled and why == "cannot be differentiated"
        lines.append(f"{row.operator} {why}: {row.reason} (nodes {nodes}).")
    advice = "" if ruled else ", or give a rule with refgrad.extend.rule"
    lines.append(f"They lie between the requested inputs and outputs. Choose other names for wrt or outputs{advice}.")
    return NoGradientError("\n".join(lines), tuple(node.name for node in blocked))


def _outputs(graph: Graph, outputs: Sequence[str] | None) -> list[str]:
    floats = [name for name in graph.outputs if graph.element_type(name) in FLOATS]
    if outputs is None:
        if not floats:
            raise UnknownNameError(
                f"The model has no float output to differentiate; its outputs: {choices(graph.outputs)}.{of_maps(graph)}"
            )
        return floats
    return _checked("outputs", outputs, graph, floats, "output")


def of_maps(graph: Graph) -> str:
    """The end of a message: the scores of a classifier that a ZipMap makes maps of, and advice. "" if there is no ZipMap."""
    maps = [node.inputs[0] for node in graph.nodes if node.key == (ML, "ZipMap")]
    if not maps:
        return ""
    return (
        f" ZipMap made maps of the numbers {choices(maps)}, and maps have no derivative. Export the model without it, in "
        "skl2onnx with to_onnx(..., options={'zipmap': False})."
    )


def _wrt(graph: Graph, wrt: Sequence[str] | None) -> list[str]:
    known = [*graph.inputs, *(name for name in graph.initializers if name not in graph.inputs)]
    floats = [name for name in known if graph.element_type(name) in FLOATS]
    if wrt is None or _has_pattern(wrt, known):
        settings = _settings(graph)
        usual = [name for name in floats if name in graph.inputs or (graph.is_weight(name) and name not in settings)]
        if wrt is None:
            return usual
        wrt = matching(wrt, known, usual)
    return _checked("wrt", wrt, graph, floats, "input or initializer")


def _has_pattern(names: Any, known: Sequence[str]) -> bool:
    """True if some of the names are patterns: no input and no initializer is called so."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        return False
    return any(_WILDCARDS.intersection(name) and name not in known for name in names)


def matching(names: Sequence[str], known: Sequence[str], usual: Sequence[str], what: str = "wrt") -> list[str]:
    """The names, and those that a pattern matches in its place, each once.

    :param known: the names that the model has, which are no patterns.
    :param usual: those that a pattern may match.
    :param what: the argument that has the names.
    :raises UnknownNameError: a pattern matches nothing.
    """
    found: list[str] = []
    plain = {name for name in names if not _has_pattern([name], known)}
    for name in names:
        if name in plain:
            found.append(name)
            continue
        matched = [one for one in usual if fnmatchcase(one, name)]
        if not matched:
            raise UnknownNameError(
                f"The pattern {name!r} in {what} matches no float input and no float initializer of the model. "
                f"It has: {choices(usual)}."
            )
        found += [one for one in matched if one not in found and one not in plain]
    return found


def _settings(graph: Graph) -> set[str]:
    """The values that nodes read only as settings of their operators: the scales of Resize are floats, but no weights."""
    settings: set[str] = set()
    others: set[str] = set()
    for node in graph.nodes:
        known = RULES.get(node.key) or DEFINITIONS.get(node.key)
        if known is None or not known.settings:
            others.update(node.reads)
            continue
        schema = find_schema(node.op_type, node.domain, graph.opsets.get(node.domain, 1))
        for parameter, name in zip(schema.inputs, node.inputs, strict=False):
            (settings if parameter.name in known.settings else others).add(name)
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
            kinds = kind.replace(" or ", "s or ") + "s"
            has = f"the float {kinds} {choices(floats)}" if floats else f"no float {kinds}"
            raise UnknownNameError(
                f"{name!r} in {argument} {_what(graph, name)}: only floats have a derivative. The model has {has}."
                f"{of_maps(graph) if argument == 'outputs' else ''}"
            )
        raise UnknownNameError(
            f"{name!r} in {argument} is no {kind} of the model{_place(graph, name)}.{did_you_mean(name, floats)} "
            f"It has: {choices(floats)}."
        )
    return list(names)


def _place(graph: Graph, name: str) -> str:
    """The place of a value that is neither an input nor an output of the model, as the end of a sentence."""
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


def expanded(graph: Graph, nodes: Iterable[Node]) -> tuple[Graph | None, dict[tuple[str, str], str]]:
    """The graph with the bodies of operators in the place of `nodes`, None where none has one; and why a body does not fit."""
    refusals: dict[tuple[str, str], str] = {}
    bodies: dict[str, FunctionProto] = {}
    for node in nodes:
        try:
            body = _body(graph, node)
        except UnsupportedFormError as error:
            refusals[node.key] = str(error)
            continue
        if body is not None:
            body.domain, body.name = INLINED, f"{node.op_type}_{len(bodies)}"
            bodies[node.name] = body
    if not bodies:
        return None, refusals
    model = ModelProto()
    model.CopyFrom(graph.model)
    for proto in model.graph.node:
        if proto.name in bodies:
            _call(proto, bodies[proto.name], graph.opsets)
    model.functions.extend(bodies.values())
    import_domain(model, INLINED)
    if "" not in graph.opsets:
        model.opset_import.append(helper.make_opsetid("", graph.opset))
    large, functions = graph.large, graph.functions
    return view(graph.source, inline_functions(model), large, functions, graph.outer, graph.captures), refusals


def _call(proto: NodeProto, body: FunctionProto, opsets: Mapping[str, int]) -> None:
    """Make a node a call of the body of its operator, which reads every attribute."""
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    schema = find_schema(proto.op_type, domain, opsets.get(domain, 1))
    given = {a.name for a in proto.attribute}
    defaults = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}
    proto.attribute.extend(value for name, value in defaults.items() if name not in given)
    proto.domain, proto.op_type = body.domain, body.name


def _body(graph: Graph, node: Node) -> FunctionProto | None:
    """The function body of a node's operator, None where there is none that can be inlined.

    :raises UnsupportedFormError: an operator of ours has a body that does not cover the node.
    """
    opset = graph.opsets.get(node.domain, 1)
    if node.key in DEFINITIONS:
        if node.key in RULES and RULES[node.key].refused:
            return None  # the body would lose the derivative that the rule refuses
        ranks = {name: len(graph.shapes[name]) for name in node.inputs if name in graph.shapes}
        types = {name: (graph.types[name], ranks.get(name)) for name in node.inputs if name in graph.types}
        return make_function(
            node.proto,
            graph.opsets,
            types,
            node.op_type,
            graph.shapes,
            lambda name: None if name in graph.inputs else graph.constant(name),
        )
    if not onnx.defs.has(node.op_type, node.domain) or node.key in NO_DERIVATIVE:
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)  # whose stub lacks the function bodies
    body = FunctionProto()
    written = [version for version in schema.function_opset_versions if version <= graph.opset]
    if written:
        body.ParseFromString(schema.get_function_with_opset_version(max(written)))
    elif schema.has_context_dependent_function:
        declared = [
            helper.make_tensor_type_proto(graph.types[n], graph.shapes.get(n)) if n in graph.types else None
            for n in node.inputs
        ]
        body = native.function_of(schema, node.proto, declared, opset)
    else:
        return None
    versions = {o.domain: o.version for o in body.opset_import}
    if versions.get("", graph.opset) > graph.opset or len(node.inputs) > len(body.input):
        return None  # of a later opset, or for one operand of a variadic input only
    del body.opset_import[:]
    body.opset_import.append(helper.make_opsetid("", graph.opset))  # the inliner leaves another opset's body alone
    factors_in_double(body)
    return body
