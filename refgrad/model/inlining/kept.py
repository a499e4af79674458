"""The functions of a model that stay functions in its gradient; the others are written in the place of their calls.

A function stays if it is called more than once. Its attributes are bound and the inputs that a call leaves out are taken
away first: what is called with other attributes, or with other inputs, is another function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from refgrad.model.checks.recursion import refuse_recursion
from refgrad.model.inlining.inline import inline_functions
from refgrad.protos.traverse import attribute_value, every_node, fresh, nested, subgraphs, versions_of
from refgrad.tables.registry import RULES
from refgrad.tables.schemas import schemas

Key = tuple[str, str]  # the domain and the name of a function


class Functions:
    """Functions by domain and name: the functions of a model, and the functions that its gradient adds.

    A model and the bodies within it share them. What is derived from a function is kept in `derived`: it is made once.
    """

    def __init__(self, protos: Iterable[FunctionProto] = ()) -> None:
        self.protos = {(f.domain, f.name): f for f in protos}
        self.derived: dict[Any, Any] = {}
        self._more: dict[Key, FunctionProto] = {}

    def __bool__(self) -> bool:
        return bool(self.protos)

    def add(self, domain: str, name: str, graph: GraphProto, versions: Mapping[str, int]) -> str:
        """Write `graph` as a function called `name`, or by the next free name; its initializers become constants."""
        name = fresh(name, {known for of, known in (*self.protos, *self._more) if of == domain})
        constants = [helper.make_node("Constant", [], [t.name], name=t.name, value=t) for t in graph.initializer]
        self._more[domain, name] = helper.make_function(
            domain,
            name,
            [value.name for value in graph.input],
            [value.name for value in graph.output],
            [*constants, *graph.node],
            [helper.make_opsetid(of, version) for of, version in versions.items()],
        )
        return name

    def called_by(self, nodes: Iterable[NodeProto]) -> list[FunctionProto]:
        """The functions that `nodes` need, each behind those that it calls itself."""
        return _called(nodes, self.protos | self._more) if self.protos else []

    def inlined(self, model: ModelProto) -> ModelProto:
        """A copy of `model` with the bodies in the place of their calls; itself where it has none."""
        called = self.called_by(model.graph.node)
        if not called:
            return model
        whole = ModelProto()
        whole.CopyFrom(model)
        whole.functions.extend(called)
        return inline_functions(whole)


def keep_functions(model: ModelProto) -> tuple[ModelProto, Functions]:
    """`model` without functions, and those that its calls are left of. What `model` holds is changed on the way.

    Inlined are functions that are called once, of an opset that is not the model's, of a domain that operators are known
    of, and those that write numbers as text or bits, or that a graph is given to.

    :raises InvalidModelError: a function that calls itself, or that means something else in the opset of the model.
    """
    refuse_recursion(model.functions)
    if any(a.type in (a.GRAPH, a.GRAPHS) for f in model.functions for a in f.attribute_proto) or _gives_graphs(model):
        return inline_functions(model), Functions()
    variants = _specialise(model)
    sites = Counter((node.domain, node.op_type) for node in nested(model.graph.node))
    kept = []
    for function in reversed(_called(model.graph.node, variants)):
        key = function.domain, function.name
        stays = sites[key] > 1 and _can_stay(function, model)
        if stays:
            kept.append(key)
        for node in nested(function.node):
            sites[node.domain, node.op_type] += 1 if stays else sites[key]
    del model.functions[:]
    model.functions.extend(variants.values())
    made = inline_functions(model, None if not kept else [key for key in variants if key not in kept])
    functions = Functions(made.functions)
    for function in functions.protos.values():
        del function.opset_import[:]  # by now it has what others imported
        function.opset_import.extend(made.opset_import)
    del made.functions[:]
    return made, functions


def _called(nodes: Iterable[NodeProto], functions: Mapping[Key, FunctionProto]) -> list[FunctionProto]:
    """The functions that `nodes` need, each behind those that it calls itself."""
    found: dict[Key, FunctionProto] = {}
    entered: set[Key] = set()
    path: list[tuple[Key | None, Iterator[NodeProto]]] = [(None, nested(nodes))]
    while path:
        key, nodes = path[-1]
        for node in nodes:
            called = node.domain, node.op_type
            if called in functions and called not in entered:
                entered.add(called)
                path.append((called, nested(functions[called].node)))
                break
        else:
            path.pop()
            if key is not None:
                found[key] = functions[key]
    return list(found.values())


def _gives_graphs(model: ModelProto) -> bool:
    """True if a call gives a graph to a function."""
    functions = {(f.domain, f.name) for f in model.functions}
    return any((n.domain, n.op_type) in functions and any(map(subgraphs, n.attribute)) for n in every_node(model))


def _specialise(model: ModelProto) -> dict[Key, FunctionProto]:
    """The functions that are called, without attributes and optional inputs; the calls are changed into calls of them."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    made: dict[Any, FunctionProto] = {}
    names = {f.name for f in model.functions}
    calls = list(nested(model.graph.node))
    for node in calls:
        function = functions.get((node.domain, node.op_type, node.overload))
        if function is None:
            continue
        bound = {a.name: a for a in (*function.attribute_proto, *node.attribute)}
        given = tuple(k < len(node.input) and bool(node.input[k]) for k in range(len(function.input)))
        values = tuple((name, bound[name].SerializeToString(deterministic=True)) for name in sorted(bound))
        key = (node.domain, node.op_type, node.overload), given, values
        if key not in made:
            variant = made[key] = _variant(function, bound, given)
            if any(v is not variant and (v.domain, v.name) == (variant.domain, variant.name) for v in made.values()):
                variant.name = fresh(variant.name, names)
            calls += nested(variant.node)  # read next, now that its attributes are bound
        node.op_type, node.overload = made[key].name, ""
        node.input[:] = [name for name in node.input if name]
        node.output.extend([""] * (len(function.output) - len(node.output)))  # shape inference refuses fewer
        del node.attribute[:]
    return {(f.domain, f.name): f for f in made.values()}


def _variant(function: FunctionProto, bound: Mapping[str, AttributeProto], given: tuple[bool, ...]) -> FunctionProto:
    """A copy of `function` with these attributes, and of its inputs those that are given."""
    made = FunctionProto()
    made.CopyFrom(function)
    made.overload = ""
    del made.attribute[:], made.attribute_proto[:]
    absent = {name for name, there in zip(function.input, given, strict=True) if not there}
    made.input[:] = [name for name in function.input if name not in absent]
    for node in nested(made.node):
        if not absent.isdisjoint(node.input):
            node.input[:] = ["" if name in absent else name for name in node.input]
        for k in reversed(range(len(node.attribute))):
            name, reference = node.attribute[k].name, node.attribute[k].ref_attr_name
            if reference in bound:
                node.attribute[k].CopyFrom(bound[reference])
                node.attribute[k].name = name
            elif reference:
                del node.attribute[k]
    return made


@cache
def _operator_domains(count: int) -> frozenset[str]:
    """The domains of all known operators. The key is `count`, how many have rules: other packages register theirs later."""
    return frozenset(("ai.onnx", *(schema.domain for schema in schemas()), *(domain for domain, _ in RULES)))


def _can_stay(function: FunctionProto, model: ModelProto) -> bool:
    if function.domain in _operator_domains(len(RULES)):
        return False
    versions = versions_of(model)
    for imported in function.opset_import:
        if imported.version != versions.get("" if imported.domain == "ai.onnx" else imported.domain, imported.version):
            return False
    return not any(_hides_numbers(node) for node in nested(function.node))


def _hides_numbers(node: NodeProto) -> bool:
    """True if a node makes text or bits of floats: a derivative is looked for in what is made of them, in one graph."""
    to = {a.name: attribute_value(a) for a in node.attribute}.get("to") if node.op_type == "Cast" else None
    return node.op_type == "BitCast" or to == TensorProto.STRING
