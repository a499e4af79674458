"""A seed gives a random graph: a model, a point where it is smooth, and what to differentiate."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import ModelProto, helper

from refgrad.conformance.tools.fuzzing.graphs import drawing, families  # noqa: F401  (they register the templates)
from refgrad.conformance.tools.fuzzing.graphs.growing import IR, LOCAL, GraphScope, GraphValue, Sample, World, prune
from refgrad.conformance.tools.fuzzing.graphs.names import collide
from refgrad.conformance.tools.fuzzing.graphs.templates import TEMPLATES
from refgrad.conformance.tools.fuzzing.graphs.validity import invalid
from refgrad.protos.traverse import captures_of


def sample(seed: int) -> Sample | None:
    """The graph of a seed, None where nothing came of it."""
    world = World(seed, TEMPLATES)
    rng = world.rng
    scope = GraphScope(world, root=True)
    for _ in range(rng.randint(1, 3)):
        scope.uniform(world.sizes(rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))), moves=True)
    scope.grow(rng.choice((1, 2, 3, 4, 5, 6, 8, 10, 14)))
    if not (moving := _moving(scope)):
        scope.grow(4)
        moving = _moving(scope)
    if not moving:
        return None
    chosen = list(dict.fromkeys([moving[-1], *rng.choices(moving, k=rng.choice((0, 0, 1, 2)))]))
    leaves = [v for v in scope.values if v.moves and (v.name in world.feeds or v.name in world.weights)]
    feeds = {value.name: world.feeds[value.name] for value in scope.inputs if value.name in world.feeds}
    outputs = []
    for value in chosen:
        dims = rng.choice((list(value.shape), [None] * value.rank)) if world.symbolic == 0.0 else [None] * value.rank
        outputs.append(helper.make_tensor_value_info(value.name, value.kind, dims))
    graph = helper.make_graph(scope.nodes, f"seed_{seed}", scope.inputs, outputs, scope.initializers)
    if rng.random() < 0.15:
        graph.value_info.extend(
            helper.make_tensor_value_info(v.name, v.kind, v.shape)
            for v in scope.values
            if v.is_tensor and any(v.name in node.output for node in scope.nodes) and v not in chosen
        )
    imports = [helper.make_opsetid("", world.opset)]
    imports += [helper.make_opsetid(LOCAL, 1)] if world.functions else []
    model = helper.make_model(
        graph, opset_imports=imports, ir_version=max(IR[world.opset], 8), functions=[f for f, _ in world.functions]
    )
    prune(model)
    if rng.random() < 0.3:
        collide(model)
    if model.graph.input and rng.random() < 0.01:
        rng.choice(model.graph.input).type.tensor_type.ClearField("shape")
    elif invalid(model, strict=False):
        return None
    read = set(_read(model))
    wrt = [v.name for v in leaves if v.name in read]
    if rng.random() < 0.3:
        wrt = sorted(rng.sample(wrt, rng.randint(1, len(wrt))))
    inputs = {value.name for value in model.graph.input} | {tensor.name for tensor in model.graph.initializer}
    return Sample(
        seed,
        model,
        {name: array for name, array in feeds.items() if name in inputs},
        tuple(name for name in wrt if name in inputs and name in read),
        tuple(value.name for value in outputs),
        {name: array for name, array in world.weights.items() if name in inputs and name in wrt},
    )


def _moving(scope: GraphScope) -> list[GraphValue]:
    """The results of nodes that depend on what is differentiated by."""
    made = {name for node in scope.nodes for name in node.output} - scope.unread
    return [v for v in scope.values if v.name in made and v.moves and v.array.size]


def _read(model: ModelProto) -> Iterator[str]:
    for node in model.graph.node:
        yield from node.input
        yield from captures_of(node)
