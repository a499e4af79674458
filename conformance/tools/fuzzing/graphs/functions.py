"""Local functions of a random graph: with attributes, called several times, and calling each other."""

from __future__ import annotations

from typing import Any

from onnx import AttributeProto, FunctionProto, helper

from refgrad import traits
from refgrad.conformance.tools.fuzzing.graphs.growing import LOCAL, GraphScope, GraphValue, MismatchError

_OF_ANY_SHAPE = traits.ELEMENTWISE | {"Constant"}
Defined = tuple[FunctionProto, list[tuple[int, ...]]]


def define(s: GraphScope) -> Defined:
    """A new function of some values, which are like values that are there."""
    inner = GraphScope(s.world)
    shapes = []
    for _ in range(s.rng.choice((1, 2, 2))):
        like = s.pick(0, 3)
        shapes.append(like.shape)
        inner.values.append(GraphValue(s.world.fresh(), like.array, like.kind))
    formals = [value.name for value in inner.values]
    inner.grow(s.rng.choice((1, 2, 3)))
    made = [v for v in inner.values if v.is_float and v.kind == s.world.kind and v.name not in formals]
    if not made:
        raise MismatchError("an empty function")
    results = list(dict.fromkeys([made[-1], *s.rng.choices(made, k=s.rng.choice((0, 0, 1)))]))
    if s.chance(0.04):
        results.append(s.rng.choice([value for value in inner.values if value.name in formals]))
    imports = [helper.make_opsetid("", s.opset)]
    called = {f.name for f, _ in s.world.functions}
    if any(node.op_type in called for node in _every(inner.nodes)):
        imports.append(helper.make_opsetid(LOCAL, 1))
    used = {a.ref_attr_name for node in _every(inner.nodes) for a in node.attribute if a.ref_attr_name}
    parameters = {name: value for name, value in inner.parameters.items() if name in used}
    defaults = {name for name in parameters if s.chance(0.4)}
    function = helper.make_function(
        LOCAL,
        f"f{len(s.world.functions)}_{s.world.fresh()}",
        formals,
        [value.name for value in results],
        inner.nodes,
        imports,
        [name for name in parameters if name not in defaults],
        [helper.make_attribute(name, parameters[name]) for name in sorted(defaults)],
    )
    s.world.parameters[function.name] = parameters
    found = function, shapes
    s.world.functions.append(found)
    return found


def _every(nodes: Any) -> Any:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _every(attribute.g.node)


def call(s: GraphScope, defined: Defined) -> None:
    """A call of a function, of values of the shapes it was made for, or now and then of others of these ranks."""
    function, shapes = defined
    fixed = any(node.op_type not in _OF_ANY_SHAPE for node in function.node)
    given = [s.shaped(shape) if fixed or s.chance(0.85) else s.pick(len(shape), len(shape)) for shape in shapes]
    parameters = s.world.parameters[function.name]
    attributes = {name: value for name, value in parameters.items() if name in function.attribute or s.chance(0.5)}
    count = len(function.output)
    s.add_all(
        function.name,
        *given,
        outputs=count,
        domain=LOCAL,
        kind=s.world.kind,
        named=s.named(count),
        literal=True,
        **attributes,
    )
