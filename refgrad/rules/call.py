"""A call of a function that stays one: the derivative of its body, taken once for all calls of the same kind, is a function.

Calls are of one kind if their inputs have the same types and sizes (where a size is not known: the same ones agree), the
same integers where these are known before the model runs, the same inputs that vary and the same outputs with cotangents.
The function then returns what its derivative reads as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TypeVar

from onnx import TypeProto, ValueInfoProto, helper

from refgrad.forward.graph import Graph, Node
from refgrad.protos.types import Dim, Shape, unname
from refgrad.protos.walk import names_of
from refgrad.reverse.bodies import FunctionBody, known_integers
from refgrad.reverse.emit import Emitter
from refgrad.tables.registry import Passage, Structure, structure

Made = TypeVar("Made")


@dataclass(frozen=True)
class _Derivative:
    """The functions that a kind of calls needs: the one to call forward, which returns `stored` too, and the backward one.

    This reads `residuals`, each an input, an output or one of `stored`, then the cotangents, and returns the adjoints of
    the inputs in `adjoints`.
    """

    forward: str
    stored: dict[str, tuple[int | TypeProto | None, Shape | None]]  # the type and shape of each, where they are known
    backward: str
    residuals: list[str]
    adjoints: list[str]


@structure(None)
class Call(Structure):
    """dy through the body of the function, whose derivative is a function too"""

    def __init__(self, graph: Graph, node: Node, quantization: str) -> None:
        self.graph, self.node, self.quantization = graph, node, quantization
        self.function = graph.functions.protos[node.key]
        self.reads = list(zip(self.function.input, node.inputs, strict=True))
        self._sizes: dict[str, Dim] = {}  # what a size of the body is here
        self._inputs = [self._formal(name, value) for name, value in self.reads]
        self._known = known_integers(graph, dict(self.reads))
        arrays = tuple((name, str(a.dtype), a.shape, a.tobytes()) for name, a in self._known.items())
        self._kind = node.key, tuple(value.SerializeToString(deterministic=True) for value in self._inputs), arrays
        self.body = self._once("body", self._body)
        self._inner = dict(zip(node.outputs, self.body.outputs, strict=False))

    def _once(self, what: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, for all calls of this kind."""
        derived = self.graph.functions.derived
        if (self._kind, what) not in derived:
            derived[self._kind, what] = make()
        made: Made = derived[self._kind, what]
        return made

    def _body(self) -> FunctionBody:
        return FunctionBody(self.graph, self.function, self._inputs, self._known, self.quantization)

    def _formal(self, name: str, value: str) -> ValueInfoProto:
        """An input of the body; sizes that are not known get names, those that agree the same one."""
        kind, shape = self.graph.types.get(value), self.graph.shapes.get(value)
        if kind is None:
            return ValueInfoProto(name=name, type=self.graph.type_of(value))
        if shape is None:
            return helper.make_tensor_value_info(name, kind, None)
        return helper.make_tensor_value_info(name, kind, [d if isinstance(d, int) else self._named(d) for d in shape])

    def _named(self, size: Dim) -> str:
        known = (name for name, here in self._sizes.items() if here == size and size is not None)
        name = next(known, f"size_{len(self._sizes)}")
        self._sizes[name] = size
        return name

    def outputs_of(self, varied: Set[str]) -> frozenset[str]:
        """The results that depend on an argument in `varied`."""
        path = self.body.path((name for name, value in self.reads if value in varied), ())
        return frozenset(n for n, inner in self._inner.items() if n and inner in path.varied and self.graph.is_float(n))

    def passage(self, varied: Set[str], needed: Set[str]) -> Passage:
        """The way from the arguments in `varied` to the results in `needed`."""
        path = self.body.path(
            (name for name, value in self.reads if value in varied),
            (inner for name, inner in self._inner.items() if name in needed),
        )
        return Passage(self, frozenset(value for name, value in self.reads if name in path.needed), (path,))

    def differentiate(
        self, op: Emitter, passage: Passage, cotangents: Mapping[str, str]
    ) -> Iterator[tuple[str, str | None]]:
        """Emit a call of the backward function, and let the forward call be one of the function that stores more."""
        node = self.node
        wrt = frozenset(name for name, value in self.reads if value in passage.reads)
        seeded = tuple(self._inner[name] for name in node.outputs if name in cotangents)
        made = self._once((wrt, seeded, op.kinks), lambda: self._derive(op, wrt, seeded))
        values = dict(self.reads)
        for k, inner in enumerate(self.body.outputs):
            if inner in made.residuals and not "".join(node.outputs[k : k + 1]):
                node.add_output(k, op.fresh(f"{node.name}_{inner}"))
                self._learn(op, node.outputs[k], *self._described(self.body, inner))
        values.update(zip(self.body.outputs, node.outputs, strict=False))
        if made.stored:
            node.proto.op_type = made.forward
            for k, (inner, known) in enumerate(made.stored.items(), len(self.body.outputs)):
                values[inner] = op.fresh(f"{node.name}_{inner}")
                node.add_output(k, values[inner])
                self._learn(op, values[inner], *known)
        reads = [values[name] for name in made.residuals]
        reads += [cotangents[name] for name in node.outputs if name in cotangents]
        results = op.emit_all(made.backward, node.domain, reads, len(made.adjoints), {})
        actual = dict(self.reads)
        for name, adjoint in zip(made.adjoints, results, strict=True):
            op.describe(adjoint, like=actual[name])
            yield actual[name], adjoint

    def _learn(self, op: Emitter, value: str, kind: int | TypeProto | None, shape: Shape | None) -> None:
        """Record what a result more of the call is, by what it is in the body."""
        if kind is None:
            return
        sizes = None if shape is None else tuple(d if isinstance(d, int) else self._sizes.get(d or "") for d in shape)
        op.learn(value, kind, sizes)
        if isinstance(kind, int):
            op.declared[value] = value  # onnx cannot infer it where the function has operators that it does not know

    def _described(self, body: FunctionBody, name: str) -> tuple[int | TypeProto | None, Shape | None]:
        container = body.graph.containers.get(name)
        kind = body.graph.types.get(name) if container is None else unname(container)
        return kind, body.graph.shapes.get(name)

    def _derive(self, op: Emitter, wrt: frozenset[str], seeded: tuple[str, ...]) -> _Derivative:
        """Sweep the body, and write both functions."""
        body, functions, name = self._body(), self.graph.functions, self.function.name
        path = body.path(wrt, seeded)
        taken = names_of(body.graph.model.graph) | {node.name for node in body.graph.nodes}
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
        forward, versions = name, {"": body.graph.opset, **body.graph.opsets}
        if stored:
            graph = swept.forward([([], ValueInfoProto(name=value)) for value in stored])
            forward = functions.add(self.function.domain, f"{name}_fwd", graph, versions)
        untyped = TypeProto()
        graph = swept.backward(
            [(value, untyped) for value in (*swept.residuals, *cotangents)],
            [(value, untyped) for value in results.values()],
        )
        backward = functions.add(self.function.domain, f"{name}_grad", graph, versions)
        kinds = {value: self._described(body, value) for value in stored}
        return _Derivative(forward, kinds, backward, swept.residuals, list(results))
