"""Random valid graphs: a seed gives a model, a point where it is smooth, and what to differentiate.

Every node is evaluated as it is added, along a random direction: the generator knows the values that its graph has, and takes
back a node that is not finite, too large, near a kink, or unknown to the evaluator.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from refgrad.conformance.oracles.analytic import STEP
from refgrad.conformance.oracles.evaluator import substitute
from refgrad.conformance.tools.fuzzing.graphs.evaluation import UNKNOWN, Forward, wide
from refgrad.protos.traverse import captures_of

FLOAT, DOUBLE, HALF = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16
INT64, BOOL = TensorProto.INT64, TensorProto.BOOL
OPSETS = (13, 14, 15, 16, 17, 18, 18, 19, 20, 21, 21, 22, 23, 24, 25)
OPTIONAL = -1  # the kind of an optional
LOCAL = "local"
IR = {13: 7, 14: 7, 15: 8, 16: 8, 17: 8, 18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12, 25: 13}
_MOST = 600  # elements of a value
_LARGEST = 200.0
_MARGIN = 1e-3
_TRIES = 60


@cache
def schema_of(op_type: str, opset: int) -> tuple[frozenset[int], ...] | None:
    """The element types that each input of an operator takes; None where the opset does not have it."""
    if not onnx.defs.has(op_type, opset):
        return None
    schema = onnx.defs.get_schema(op_type, opset)
    if schema.deprecated:
        return None
    found = []
    for formal in schema.inputs:
        names = [text[7:-1] for text in formal.types if text.startswith("tensor(")]
        found.append(frozenset(getattr(TensorProto, name.upper()) for name in names if name.upper() != "FLOAT8E4M3FN"))
    return tuple(found) or (frozenset(),)


class MismatchError(Exception):
    """A node or template that was tried does not fit the graph here; it is taken back."""


@dataclass(frozen=True, eq=False)
class GraphValue:
    """A value of the graph: `array` is complex where it moves, a list for a sequence."""

    name: str
    array: Any
    kind: int  # the element type

    @property
    def real(self) -> np.ndarray:
        """Its real part."""
        return np.real(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.array.shape)

    @property
    def rank(self) -> int:
        """Its rank."""
        return len(self.array.shape)

    @property
    def is_tensor(self) -> bool:
        """True if it is no sequence or optional."""
        return self.kind != OPTIONAL and isinstance(self.array, np.ndarray)

    @property
    def is_float(self) -> bool:
        """True if it is a tensor of floats."""
        return self.is_tensor and self.array.dtype.kind in "cf"

    @property
    def moves(self) -> bool:
        """True if it depends on a value that is differentiated by."""
        return self.is_float and bool(np.any(np.imag(self.array)))


@dataclass(frozen=True)
class Sample:
    """A random graph: the model, a point, and what to differentiate."""

    seed: int
    model: ModelProto
    feeds: Mapping[str, np.ndarray]
    wrt: tuple[str, ...]
    outputs: tuple[str, ...]
    defaults: Mapping[str, np.ndarray] = field(default_factory=dict)  # initializers in `wrt`


class GraphScope:
    """A graph that grows: the main graph, the body of a node, or a function.

    :param outer: the scope around a body, whose values it may read; None for others.
    """

    def __init__(self, world: World, outer: GraphScope | None = None, root: bool = False) -> None:
        self.world, self.outer, self.is_root = world, outer, root
        self.nodes: list[NodeProto] = []
        self.values: list[GraphValue] = []
        self.inputs: list[ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.is_function = outer is None and not root
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.unread = set[str]()  # the values that only the next node may read
        self.parameters: dict[str, Any] = {}  # of a function: attributes that its nodes may refer to

    @property
    def rng(self) -> random.Random:
        """The source of every random choice."""
        return self.world.rng

    @property
    def opset(self) -> int:
        """The version of ai.onnx."""
        return self.world.opset

    @property
    def visible(self) -> list[GraphValue]:
        """Every value that a node here may read."""
        return [*(self.outer.visible if self.outer is not None else ()), *self.values]

    @property
    def scopes(self) -> Iterator[GraphScope]:
        """The scope and those around it."""
        yield self
        if self.outer is not None:
            yield from self.outer.scopes

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Take everything back where the block does not fit."""
        kept = [(scope, [len(part) for part in scope._parts()]) for scope in self.scopes]
        of_world = len(self.world.functions)
        try:
            yield
        except (MismatchError, *UNKNOWN, IndexError, ValueError) as error:
            for scope, lengths in kept:
                for part, length in zip(scope._parts(), lengths, strict=True):
                    del part[length:]
            del self.world.functions[of_world:]
            raise MismatchError(str(error)) from error

    def _parts(self) -> tuple[list[Any], ...]:
        return self.nodes, self.values, self.inputs, self.initializers

    # Nodes

    def add(self, op_type: str, *inputs: GraphValue | None, **given: Any) -> GraphValue:
        """A node and its one output, or the first: see `add_all`."""
        made: GraphValue = self.add_all(op_type, *inputs, **given)[0]
        return made

    def add_all(
        self,
        op_type: str,
        *inputs: GraphValue | None,
        outputs: int = 1,
        kind: int | None = None,
        domain: str = "",
        named: Sequence[bool] | None = None,
        literal: bool = False,
        hidden: bool = False,
        **attributes: Any,
    ) -> list[Any]:
        """A node and its outputs, None for one that is not `named`.

        :raises MismatchError: the result is not wanted here.
        """
        named = [True] * outputs if named is None else named
        names = [self.world.fresh() if one else "" for one in named]
        given = {name: value for name, value in attributes.items() if value is not None}
        read = [value.name if value is not None else "" for value in inputs]
        while read and not read[-1] and not (op_type == "Loop" and len(read) <= 2):
            read.pop()
        if not domain:
            self._check_types(op_type, inputs)
        node = helper.make_node(op_type, read, names, domain=domain, **given)
        if not literal:
            self._parametrise(node)
        found = self.evaluate(node)
        if kind is None:
            kind = next((v.kind for v in inputs if v is not None and (v.is_float or not v.is_tensor)), self.world.kind)
        self.nodes.append(node)
        made = [self._made(name, found[name], kind) if name else None for name in names]
        if hidden:
            self.unread.update(value.name for value in made if value is not None)
        self.values += [value for value in made if value is not None]
        return made

    def _check_types(self, op_type: str, inputs: Sequence[GraphValue | None]) -> None:
        schema = schema_of(op_type, self.opset)
        if schema is None:
            raise MismatchError(f"no {op_type} in opset {self.opset}")
        for k, value in enumerate(inputs):
            if value is None or not value.is_tensor:
                continue
            allowed = schema[min(k, len(schema) - 1)]
            if allowed and value.kind not in allowed:
                raise MismatchError(f"{op_type} does not take this type")

    def _parametrise(self, node: NodeProto) -> None:
        """In a function, let an attribute refer to one of the call, now and then."""
        home = list(self.scopes)[-1]
        if not home.is_function or self.rng.random() < 0.5:
            return
        for attribute in node.attribute:
            if attribute.type in (onnx.AttributeProto.FLOAT, onnx.AttributeProto.INT, onnx.AttributeProto.INTS):
                if attribute.name == "to":
                    continue
                name = f"p{self.world.fresh()}"
                home.parameters[name] = helper.get_attribute_value(attribute)
                kind = attribute.type
                attribute.CopyFrom(onnx.AttributeProto(name=attribute.name, ref_attr_name=name, type=kind))
                return

    def evaluate(self, node: NodeProto) -> dict[str, Any]:
        """The outputs of a node by name."""
        values: dict[str, Any] = {"": None}
        for value in self.visible:
            values[value.name] = value.array
        parameters = list(self.scopes)[-1].parameters
        if parameters:
            made = NodeProto()
            made.CopyFrom(node)
            substitute(made, {name: helper.make_attribute(name, value) for name, value in parameters.items()})
            node = made
        forward = Forward({"": self.opset, LOCAL: 1}, [function for function, _ in self.world.functions])
        with np.errstate(all="ignore"):
            forward.node(node, values)
        if forward.margin < self.world.margin:
            raise MismatchError("near a kink")
        return {name: values[name] for name in node.output if name}

    def _made(self, name: str, array: Any, kind: int) -> GraphValue:
        if isinstance(array, list) or array is None:
            for item in array or ():
                self._check(item)
            return GraphValue(name, array, kind)
        array = np.asarray(array)
        self._check(array)
        if array.dtype.kind not in "fc":
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        return GraphValue(name, array, kind)

    def _check(self, array: np.ndarray) -> None:
        if array.size > _MOST or array.ndim > 5:
            raise MismatchError("too large")
        if array.dtype.kind in "fc":
            real = np.real(array)
            if real.size and not (np.all(np.isfinite(array)) and np.max(np.abs(real)) <= self.world.largest):
                raise MismatchError("not finite, or too large")
            if real.size and np.max(np.abs(np.imag(array))) > 1e4 * STEP:
                raise MismatchError("too steep")

    # Leaves

    def leaf(self, array: np.ndarray, kind: int | None = None, moves: bool | None = None) -> GraphValue:
        """A new value: an input, an initializer, a Constant, here or further out.

        :param moves: whether it may be differentiated by; by default a float may.
        """
        array = np.asarray(array)
        is_float = array.dtype.kind == "f"
        kind = (
            kind if kind is not None else self.world.kind if is_float else helper.np_dtype_to_tensor_dtype(array.dtype)
        )
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        array = array.astype(dtype)
        moves = is_float if moves is None else moves
        form = self.rng.choice(
            ("input", "input", "initializer", "initializer", "constant")
            if moves
            else ("input", "initializer", "constant", "constant")
        )
        home = list(self.scopes)[-1]
        if home.is_function or (form == "constant"):
            return self._constant(array, kind)
        if self.outer is not None and form == "initializer" and self.rng.random() < 0.3:
            name = self.world.fresh()
            self.initializers.append(numpy_helper.from_array(array, name))
            return self._kept(GraphValue(name, wide(array), kind))
        name = self.world.fresh()
        value = GraphValue(name, wide(array), kind)
        if is_float and moves:
            u = self.world.numbers.standard_normal(array.shape)
            moved = np.empty(array.shape, np.complex128)
            moved.real, moved.imag = array, u * STEP
            value = GraphValue(name, moved, kind)
        if form == "input":
            home.inputs.append(helper.make_tensor_value_info(name, kind, self.world.declared(array.shape)))
            self.world.feeds[name] = array
        else:
            home.initializers.append(numpy_helper.from_array(array, name))
            self.world.weights[name] = array
            if self.opset >= 13 and self.rng.random() < 0.15:  # an input with a default
                home.inputs.append(helper.make_tensor_value_info(name, kind, list(array.shape)))
        return home._kept(value)

    def _kept(self, value: GraphValue) -> GraphValue:
        self.values.append(value)
        return value

    def _constant(self, array: np.ndarray, kind: int) -> GraphValue:
        if array.ndim == 0 and kind == FLOAT and self.rng.random() < 0.3:
            return self.add("Constant", kind=kind, value_float=float(array))
        if array.ndim == 1 and kind == INT64 and self.rng.random() < 0.3:
            return (
                self.add("Constant", kind=kind, value_ints=array.tolist()) if array.size else self._tensor(array, kind)
            )
        return self._tensor(array, kind)

    def _tensor(self, array: np.ndarray, kind: int) -> GraphValue:
        return self.add("Constant", kind=kind, value=numpy_helper.from_array(array))

    def uniform(
        self, shape: Sequence[int], low: float = -2.0, high: float = 2.0, moves: bool | None = None
    ) -> GraphValue:
        """A new float value."""
        array = self.world.numbers.uniform(low, high, tuple(shape)).astype(np.float16)
        return self.leaf(array, self.world.kind, moves)

    def ints(self, values: Any) -> GraphValue:
        """A value of int64: a constant, an input, or computed from shapes."""
        array = np.array(values, np.int64)
        if array.ndim == 1 and 0 < array.size <= 4 and self.rng.random() < 0.35 and np.all(array >= 0):
            return self._from_shapes(array)
        return self.leaf(array)

    def _from_shapes(self, wanted: np.ndarray) -> GraphValue:
        """A vector of sizes, read from the shapes of values where they have them."""
        pieces, found = [], [v for v in self.visible if v.is_tensor and v.rank]
        whole = [v for v in found if v.shape == tuple(wanted.tolist())]
        if whole and self.rng.random() < 0.5:
            return self.add("Shape", self.rng.choice(whole), kind=INT64)
        for size in wanted.tolist():
            matching = [(v, axis) for v in found for axis in range(v.rank) if v.shape[axis] == size]
            if matching and self.rng.random() < 0.8:
                value, axis = self.rng.choice(matching)
                if self.opset >= 15 and self.rng.random() < 0.4:
                    pieces.append(self.add("Shape", value, kind=INT64, start=axis, end=axis + 1))
                else:
                    shape = self.add("Shape", value, kind=INT64)
                    pieces.append(self.add("Gather", shape, self.leaf(np.array([axis]), moves=False), kind=INT64))
            else:
                pieces.append(self.leaf(np.array([size])))
        return self.add("Concat", *pieces, kind=INT64, axis=0) if len(pieces) > 1 else pieces[0]

    # Choices

    def chance(self, p: float) -> bool:
        """True with probability `p`."""
        return self.rng.random() < p

    def floats(self, fits: Callable[[GraphValue], bool] | None = None) -> list[GraphValue]:
        """The float values of the main type here that fit."""
        hidden = {name for scope in self.scopes for name in scope.unread}
        return [
            v
            for v in self.visible
            if v.name not in hidden and v.is_float and v.kind == self.world.kind and (fits is None or fits(v))
        ]

    def pick(
        self, low: int = 0, high: int = 5, fits: Callable[[GraphValue], bool] | None = None, filled: bool = False
    ) -> GraphValue:
        """A float value of a rank between `low` and `high`: one of the last for the most part, or a new one."""
        found = self.floats(
            lambda v: low <= v.rank <= high and (not filled or v.array.size > 0) and (fits is None or fits(v))
        )
        if found and not self.chance(0.12):
            moving = [v for v in found if v.moves]
            found = moving or found
            return found[-1 - min(int(self.rng.expovariate(0.35)), len(found) - 1)]
        made = self.uniform(self.world.sizes(self.rng.randint(low, min(high, max(low, 3)))))
        if (fits is not None and not fits(made)) or (filled and not made.array.size):
            raise MismatchError("a new value does not fit")
        return made

    def like(self, shape: Sequence[int], fits: Callable[[GraphValue], bool] | None = None) -> GraphValue:
        """A float value of a shape."""
        shape = tuple(shape)
        found = self.floats(lambda v: v.shape == shape and (fits is None or fits(v)))
        if found and not self.chance(0.3):
            return self.rng.choice(found)
        return self.uniform(shape)

    def shaped(self, shape: Sequence[int]) -> GraphValue:
        """A moving float value of a shape, made of another one where there is none."""
        shape = tuple(shape)
        found = self.floats(lambda v: v.shape == shape)
        here = [v for v in found if v in self.values]
        if here and not self.chance(0.2):
            return here[-1]
        if found and not self.chance(0.3):
            return self.rng.choice(found)
        size = math.prod(shape)
        matching = self.floats(lambda v: v.array.size == size and v.rank > 0)
        if matching and size and not self.chance(0.3):
            return self.add("Reshape", self.rng.choice(matching), self.ints(shape))
        scalars = self.floats(lambda v: v.array.size == 1 and v.rank <= len(shape))
        if scalars:
            return self.add("Expand", self.rng.choice(scalars), self.ints(shape))
        return self.uniform(shape)

    def calm(self, x: GraphValue, most: float = 3.0) -> GraphValue:
        """A value without large elements: `x`, or a function of it."""
        if not x.array.size or np.max(np.abs(x.real)) <= most:
            return x
        return self.add(self.rng.choice(("Tanh", "Sin", "Sigmoid", "Erf")), x)

    def positive(self, x: GraphValue, least: float = 0.2) -> GraphValue:
        """A value above `least`: `x`, or a function of it."""
        if not x.array.size or np.min(x.real) >= least:
            return x
        x = self.calm(x)
        match self.rng.randrange(4):
            case 0:
                return self.add("Exp", x) if np.min(np.exp(x.real)) >= least else self._squared(x, least)
            case 1:
                return self.add("Add", self.add("Softplus", x), self.number(least))
            case 2:
                return self.add("Add", self.add("Sigmoid", x), self.number(least))
        return self._squared(x, least)

    def _squared(self, x: GraphValue, least: float) -> GraphValue:
        return self.add("Add", self.add("Mul", x, x), self.number(least + 0.25))

    def number(self, value: float, shape: Sequence[int] = ()) -> GraphValue:
        """A constant of one number."""
        return self.leaf(np.full(tuple(shape), value, np.float32), self.world.kind, moves=False)

    def named(self, count: int) -> list[bool]:
        """True for each output of a node that gets a name. Now and then one gets none."""
        left = self.rng.randrange(count) if count > 1 and self.chance(0.08) else count
        return [k != left for k in range(count)]

    # Graphs

    def grow(self, count: int) -> None:
        """Add about `count` things, of which some do not fit."""
        done = 0
        for _ in range(4 * count + 8):
            if done >= count:
                return
            template = self.world.template(self)
            try:
                with self.trying():
                    before = len(self.values)
                    template(self)
                    if len(self.values) == before:
                        continue
                done += 1
            except MismatchError:
                continue

    def graph(self, outputs: Sequence[GraphValue], name: str = "body", hidden: float = 0.0) -> GraphProto:
        """The scope as a graph. A shape is hidden with a probability."""
        infos = []
        for value in outputs:
            infos.append(self.info(value, hidden))
        return helper.make_graph(self.nodes, name, self.inputs, infos, self.initializers)

    def info(self, value: GraphValue, hidden: float = 0.0, known: bool = True) -> ValueInfoProto:
        """How a value of a body is declared."""
        shape: list[Any] | None = list(value.shape)
        if self.chance(hidden):
            shape = self.rng.choice((None, [None] * value.rank, [d if self.chance(0.5) else None for d in value.shape]))
        return helper.make_tensor_value_info(value.name, value.kind, shape)


class World:
    """The state that all scopes of a model share."""

    def __init__(self, seed: int, templates: Sequence[tuple[Callable[[GraphScope], Any], float, int, int]]) -> None:
        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.opset = self.rng.choice(OPSETS)
        draw = self.rng.random()
        self.kind = FLOAT if draw < 0.8 else DOUBLE if draw < 0.95 else HALF
        self.largest = _LARGEST if self.kind != HALF else 50.0
        self.margin = _MARGIN if self.kind != HALF else 30 * _MARGIN
        self.empty = 0.08 if self.rng.random() < 0.06 else 0.0  # how often a size is 0
        self.symbolic = self.rng.choice((0.0, 0.0, 0.3, 1.0))  # how often a size is not declared
        self.feeds: dict[str, np.ndarray] = {}
        self.weights: dict[str, np.ndarray] = {}
        self.functions: list[tuple[FunctionProto, list[tuple[int, ...]]]] = []
        self.parameters: dict[str, dict[str, Any]] = {}  # of each function
        self._count = 0
        self._symbols: dict[int, list[str]] = {}
        self._templates = [t for t in templates if t[2] <= self.opset <= t[3]]
        self._weights = [t[1] for t in self._templates]
        favoured = self.rng.sample(range(len(self._templates)), min(8, len(self._templates)))
        for k in favoured:  # each graph has a taste of its own
            self._weights[k] *= 6

    def fresh(self) -> str:
        """A new name."""
        self._count += 1
        return f"v{self._count}"

    def sizes(self, rank: int) -> tuple[int, ...]:
        """A random shape."""
        return tuple(0 if self.rng.random() < self.empty else self.rng.choice((1, 2, 2, 3, 3, 4)) for _ in range(rank))

    def declared(self, shape: Sequence[int]) -> list[Any]:
        """How an input of a shape is declared: sizes, symbols (one may stand for 1), or nothing."""
        made: list[Any] = []
        for size in shape:
            if self.rng.random() >= self.symbolic:
                made.append(size)
                continue
            known = self._symbols.setdefault(size, [])
            if not known or self.rng.random() < 0.3:
                known.append(f"N{self._count}_{len(made)}")
            made.append(self.rng.choice((None, self.rng.choice(known))))
        return made

    def template(self, scope: GraphScope) -> Callable[[GraphScope], Any]:
        """A template, by its weight."""
        while True:
            [(function, _, _, _)] = self.rng.choices(self._templates, self._weights)
            if not getattr(function, "structure", False) or (scope.depth < 2 and self.rng.random() < 0.75**scope.depth):
                return function


def prune(model: ModelProto) -> None:
    """Drop nodes, inputs and initializers that no output needs, in place."""
    needed = {value.name for value in model.graph.output}
    kept = []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
            needed.update(captures_of(node))
    copies = [NodeProto.FromString(node.SerializeToString()) for node in reversed(kept)]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    inputs = [v for v in model.graph.input if v.name in needed]
    tensors = [t for t in model.graph.initializer if t.name in needed]
    made = {name for node in copies for name in node.output}
    infos = [v for v in model.graph.value_info if v.name in made]
    for part, items in (
        (model.graph.input, inputs),
        (model.graph.initializer, tensors),
        (model.graph.value_info, infos),
    ):
        copied: Any = [type(item).FromString(item.SerializeToString()) for item in items]
        del part[:]
        part.extend(copied)
    called, more = set(), list(model.graph.node)
    known = {(f.domain, f.name): f for f in model.functions}
    while more:
        node = more.pop()
        key = (node.domain, node.op_type)
        if key in known and key not in called:
            called.add(key)
            more.extend(known[key].node)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                more.extend(attribute.g.node)
    functions = [FunctionProto.FromString(f.SerializeToString()) for key, f in known.items() if key in called]
    del model.functions[:]
    model.functions.extend(functions)
