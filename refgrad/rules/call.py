"""A call of a function that stays one: the derivative of its body, taken once for all calls of the same kind, is a function.

Calls are of one kind if their inputs have the same types and sizes (where a size is not known: the same ones agree), the
same integers where these are known before the model runs, the same inputs that vary and the same outputs with cotangents.
The function then returns what its derivative reads as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TypeVar

from onnx import FunctionProto, TypeProto, ValueInfoProto, helper

from refgrad.builder.op import Emitter
from refgrad.model.graph import Graph, Node
from refgrad.protos.traverse import names_of
from refgrad.protos.types import SIZE_OF, Dim, Shape, unname
from refgrad.reverse.bodies import Body, known_integers
from refgrad.reverse.path import ControlFlowRules
from refgrad.tables.registry import ControlFlowRule, Route, VaryingValues, control_flow_rule

Made = TypeVar("Made")


@dataclass(frozen=True)
class _Derivative:
    """The functions that a kind of calls needs: the one to call forward, which returns `stored` too, and the backward one.

    This reads `residuals`, each an input, an output or one of `stored`, then the cotangents, and returns the cotangents of
    the inputs in `adjoints`.
    """

    forward: str
    stored: dict[str, tuple[int | TypeProto | None, Shape | None]]  # the type and shape of each, where they are known
    backward: str
    residuals: list[str]
    adjoints: list[str]


class _Arguments:
    """The known types of the inputs of a call, and the integers that are known before the model runs."""

    def __init__(self, graph: Graph, function: FunctionProto, node: Node) -> None:
        self._graph = graph
        self.pairs = list(zip(function.input, node.inputs, strict=True))
        self.sizes: dict[str, Dim] = {}  # what a size of the body is here
        self.formal = [self._formal(name, value) for name, value in self.pairs]
        self.known = known_integers(graph, dict(self.pairs))
        arrays = tuple((name, str(a.dtype), a.shape, a.tobytes()) for name, a in self.known.items())
        types = tuple(value.SerializeToString(deterministic=True) for value in self.formal)
        self.kind: Hashable = (node.key, types, arrays)

    def _formal(self, name: str, value: str) -> ValueInfoProto:
        """An input of the body; sizes that are not known get names, those that agree the same one."""
        kind, shape = self._graph.types.get(value), self._graph.shapes.get(value)
        if kind is None:
            return ValueInfoProto(name=name, type=self._graph.type_of(value))
        if shape is None:
            return helper.make_tensor_value_info(name, kind, None)
        return helper.make_tensor_value_info(name, kind, [d if isinstance(d, int) else self._named(d) for d in shape])

    def _named(self, size: Dim) -> str:
        known = (name for name, here in self.sizes.items() if here == size and size is not None)
        name = next(known, f"{SIZE_OF}{len(self.sizes)}")
        self.sizes[name] = size
        return name


@control_flow_rule(None)
class Call(ControlFlowRule):
    """dy through the body of the function, whose derivative is a function too"""

    def __init__(
        self, control_flow: ControlFlowRules, node: Node, function: FunctionProto, arguments: _Arguments
    ) -> None:
        self.graph, self.node, self.function, self._arguments = control_flow.graph, node, function, arguments
        self.reads = arguments.pairs
        self.body = self._once(
            "body", lambda: Body.of_function(control_flow, function, arguments.formal, arguments.known)
        )
        self._inner = dict(zip(node.outputs, self.body.outputs, strict=False))

    @classmethod
    def read(cls, control_flow: ControlFlowRules, node: Node) -> Call:
        """The body of the function that `node` calls, with what is known of the arguments."""
        function = control_flow.graph.functions.protos[node.key]
        return cls(control_flow, node, function, _Arguments(control_flow.graph, function, node))

    def _once(self, what: Hashable, make: Callable[[], Made]) -> Made:
        """The result of `make`, computed once for all calls of this kind."""
        derived, key = self.graph.functions.derived, (self._arguments.kind, what)
        if key not in derived:
            derived[key] = make()
        made: Made = derived[key]
        return made

    def outputs_of(self, varying: VaryingValues) -> frozenset[str]:
        """The results that depend on an argument that varies."""
        path = self.body.path(varying, (name for name, value in self.reads if value in varying.names), ())
        return frozenset(n for n, inner in self._inner.items() if n and inner in path.varied and self.graph.is_float(n))

    def route(self, varying: VaryingValues, needed: Set[str]) -> Route:
        """The way from the arguments that vary to the results in `needed`."""
        path = self.body.path(
            varying,
            (name for name, value in self.reads if value in varying.names),
            (inner for name, inner in self._inner.items() if name in needed),
        )
        return Route(self, frozenset(value for name, value in self.reads if name in path.needed), (path,))

    def differentiate(
        self, op: Emitter, route: Route, cotangents: Mapping[str, str]
    ) -> Iterator[tuple[str, str | None]]:
        """Emit a call of the backward function, and let the forward call be one of the function that stores more."""
        node, edit = self.node, op.edits.of(self.node)
        wrt = frozenset(name for name, value in self.reads if value in route.reads)
        seeded = tuple(self._inner[name] for name in node.outputs if name in cotangents)
        made = self._once((wrt, seeded, op.conventions), lambda: self._derive(op, wrt, seeded))
        values = dict(self.reads)
        for k, inner in enumerate(self.body.outputs):
            if inner in made.residuals and not "".join(edit.outputs[k : k + 1]):
                result = op.edits.name_output(node, k, op.fresh(f"{node.name}_{inner}"))
                self._record(op, result, *_described(self.body.graph, inner))
        values.update(zip(self.body.outputs, edit.outputs, strict=False))
        if made.stored:
            edit.function = made.forward
            for k, (inner, known) in enumerate(made.stored.items(), len(self.body.outputs)):
                values[inner] = op.edits.name_output(node, k, op.fresh(f"{node.name}_{inner}"))
                self._record(op, values[inner], *known)
        reads = [values[name] for name in made.residuals]
        reads += [cotangents[name] for name in node.outputs if name in cotangents]
        results = op.emit_all(made.backward, node.domain, reads, len(made.adjoints), {})
        actual = dict(self.reads)
        for name, adjoint in zip(made.adjoints, results, strict=True):
            op.describe(adjoint, like=actual[name])
            yield actual[name], adjoint

    def _record(self, op: Emitter, value: str, kind: int | TypeProto | None, shape: Shape | None) -> None:
        """Record what a result more of the call is, by what it is in the body."""
        if kind is None:
            return
        known = self._arguments.sizes
        sizes = None if shape is None else tuple(d if isinstance(d, int) else known.get(d or "") for d in shape)
        op.values.add(value, kind, sizes)
        if isinstance(kind, int):
            op.declared[value] = value  # onnx cannot infer it where the function has operators that it does not know

    def _derive(self, op: Emitter, wrt: frozenset[str], seeded: tuple[str, ...]) -> _Derivative:
        """Sweep the body, and write both functions."""
        body, functions, name = self.body, self.graph.functions, self.function.name
        path = body.path(VaryingValues(set()), wrt, seeded)
        taken = names_of(path.graph.model.graph) | {node.name for node in path.graph.nodes}
        swept = body.swept(op, path, taken)
        sub = swept.op
        cotangents = [sub.fresh(f"{inner}_grad") for inner in seeded]
        for inner, cotangent in zip(seeded, cotangents, strict=True):
            swept.sweep.seed(inner, cotangent)
        swept.sweep.run()
        sub.enter(name, name)
        adjoints = {formal: swept.sweep.adjoint(formal) for formal in self.function.input if formal in path.needed}
        results = {formal: swept.result(adjoint) for formal, adjoint in adjoints.items() if adjoint is not None}
        swept.plan(stacked=False)
        stored = [value for value in swept.residuals if value not in body.inputs and value not in body.outputs]
        forward, versions = name, {"": path.graph.opset, **path.graph.opsets}
        if stored:
            graph = swept.forward([([], ValueInfoProto(name=value)) for value in stored])
            forward = functions.add(self.function.domain, f"{name}_fwd", graph, versions)
        untyped = TypeProto()
        graph = swept.backward(
            [(value, untyped) for value in (*swept.residuals, *cotangents)],
            [(value, untyped) for value in results.values()],
        )
        backward = functions.add(self.function.domain, f"{name}_grad", graph, versions)
        kinds = {value: _described(path.graph, value) for value in stored}
        return _Derivative(forward, kinds, backward, swept.residuals, list(results))


def _described(graph: Graph, name: str) -> tuple[int | TypeProto | None, Shape | None]:
    """The type and the shape of a value in the body of a function."""
    container = graph.containers.get(name)
    kind = graph.types.get(name) if container is None else unname(container)
    return kind, graph.shapes.get(name)
