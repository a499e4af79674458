"""Emission: `op.Mul(a, b)` adds a node of the model's opset and returns the name of its result.

An argument is the name of a value, a Python number (a scalar of the type of the other operands), a list of integers
(int64, one axis), a NumPy array, or None (absent). The same pure node is never emitted twice.

Two things are more than a node with its inputs. `op.subgraph(function, ...)` makes the graph of an attribute, such as the
body of Scan: what `function` emits goes into it, and it may read every value outside. `op.training_form(...)` is for a
lowering whose kernel needs more of the forward operator than that returns: the forward node becomes, in the gradient
model alone, an operator of ONNX Runtime's that returns more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    GraphProto,
    StringStringEntryProto,
    TensorProto,
    TypeProto,
    helper,
    numpy_helper,
)

from refgrad.errors import RuleError
from refgrad.forward.graph import Graph, Node
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.reading import CONSTANT
from refgrad.protos.types import Shape, adjoint_of, element_type, opened, unname
from refgrad.protos.walk import captured, fresh, subgraphs
from refgrad.reverse import containers
from refgrad.reverse.misuse import no_such_method, no_such_primitive, not_a_value, not_one_value
from refgrad.tables.registry import LOWERINGS
from refgrad.tables.schemas import find_schema

Argument = str | float | Sequence[int] | np.ndarray | None
IR_VERSION = 10  # the first with metadata_props on nodes, and the last that onnxruntime-training 1.19.2 reads

# The element type of a node's result where it is not that of its first operand.
_BOOL = frozenset(
    (
        *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor", "IsNaN", "IsInf"),
        "OptionalHasElement",
    )
)
_INT64 = frozenset(("Shape", "Size", "NonZero", "ArgMax", "ArgMin", "SequenceLength"))
_OTHER_TYPE = _BOOL | _INT64 | {"Cast", "ConstantOfShape", "Where", "CastLike", "OneHot"}


@dataclass(slots=True)
class Emitted:
    """A node of the gradient graph before its values have their final names."""

    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: list[str]
    attributes: dict[str, Any]
    settings: tuple[Any, ...]  # the attributes, hashable
    name: str
    metadata: tuple[StringStringEntryProto, StringStringEntryProto]
    optional_outputs: bool
    captured: tuple[str, ...]  # what its subgraphs read from outside


@dataclass(frozen=True, slots=True)
class TrainingForm:
    """What a forward node becomes where one of the outputs `more` is used: `op_type` of com.microsoft."""

    op_type: str
    more: tuple[str, ...]
    attributes: Mapping[str, Any] | None  # None: the forward node's


class Emitter:
    """Collects the nodes of a gradient graph.

    Rules and lowerings receive it as `op`. Besides one method per ONNX operator it has the primitives (`op.grad`), what is
    known of a value (`type`, `shape`, `rank`, `constant`), and a few shorthands that are built from operators. `kinks` and
    `quantization` are the options of `refgrad.gradient`, `needed` holds the values whose adjoint is asked for (None: any),
    `repeated` the names of the nodes with graphs that store their states alone.
    """

    def __init__(
        self,
        graph: Graph,
        dialect: str,
        taken: set[str],
        *,
        kinks: str = "refgrad",
        quantization: str = "zero",
        needed: Container[str] | None = None,
        repeated: Container[str] = (),
    ) -> None:
        self.graph = graph
        self.opset = graph.opset
        self.dialect = dialect
        self.kinks = kinks
        self.quantization = quantization
        self._needed = needed
        self.repeated = repeated
        self.nodes: list[Emitted] = []
        self.constants: dict[str, TensorProto] = {}
        self.grad = Primitives(self)
        self.declared: dict[str, str] = {}
        self.training_forms: dict[str, TrainingForm] = {}  # by the name of the forward node
        self.adjoint_of: dict[str, str] = {}  # results of kernels that write all of theirs: the primal of each
        self.taken = taken
        self._types: dict[str, int] = dict(graph.types)
        self._types.update((name, element_type(kind)) for name, kind in graph.containers.items())
        self._containers: dict[str, TypeProto] = dict(graph.containers)
        self.sparse = containers.Sparse()
        self.mapped = False  # within a SequenceMap; ONNX Runtime runs none in another
        self._shapes: dict[str, Shape] = dict(graph.shapes)
        self._arrays: dict[str, np.ndarray] = {}
        self._shape_of: dict[str, Shape] = {}
        self._constant_names: dict[tuple[Any, ...], str] = {}
        self._numbers: dict[tuple[str, int], str] = {}  # constants by how the rule wrote them
        self._seen: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self.made: set[str] = set()  # the values that nodes of the gradient graph compute
        self._rules: dict[str, StringStringEntryProto] = {}
        self.enter("", "")

    def enter(self, rule: str, node: str, forward: Node | None = None) -> None:
        """What is emitted from now on belongs to `rule` and to the node called `node`, which is `forward` if there is one."""
        self._rule, self._node, self._scope, self._count = rule, node, f"{node}_Grad/", 0
        self._forward = forward
        if rule not in self._rules:
            self._rules[rule] = StringStringEntryProto(key="refgrad.rule", value=rule)
        self._metadata = self._rules[rule], StringStringEntryProto(key="refgrad.node", value=node)

    @property
    def rule(self) -> str:
        """The operator whose rule emits."""
        return self._rule

    @property
    def node(self) -> str:
        """The name of the forward node that what is emitted belongs to: for messages."""
        return self._node

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper() or not onnx.defs.has(op_type):
            raise no_such_method(self, op_type)

        def emit(*inputs: Argument, outputs: int = 1, **attributes: Any) -> Any:
            return self.emit(op_type, "", inputs, outputs, attributes)

        setattr(self, op_type, emit)
        return emit

    def emit(
        self,
        op_type: str,
        domain: str,
        inputs: Sequence[Argument],
        outputs: int,
        attributes: dict[str, Any],
        optional_outputs: bool = False,
    ) -> Any:
        """Add a node as `emit_all` does; its output's name, or a tuple of names where it has several."""
        made = self.emit_all(op_type, domain, inputs, outputs, attributes, optional_outputs)
        return made[0] if outputs == 1 else made

    def emit_all(
        self,
        op_type: str,
        domain: str,
        inputs: Sequence[Argument],
        outputs: int,
        attributes: dict[str, Any],
        optional_outputs: bool = False,
    ) -> tuple[str, ...]:
        """Add a node, unless there is the same one; the names of its outputs. Attributes that are None are left out."""
        names = self._names(inputs)
        settings: tuple[Any, ...] = ()
        if attributes:
            if None in attributes.values():
                attributes = {key: value for key, value in attributes.items() if value is not None}
            settings = tuple([(key, value.__class__, _hashable(value)) for key, value in attributes.items()])
        key = (op_type, domain, names, outputs, settings)
        made = self._seen.get(key)
        if made is None:
            name = self.fresh(f"{self._scope}{op_type}_{self._count}")
            self._count += 1
            made = (name,) if outputs == 1 else tuple(self.fresh(f"{name}_{k}") for k in range(outputs))
            inner = (
                tuple(n for g in attributes.values() if isinstance(g, GraphProto) for n in captured(g))
                if attributes
                else ()
            )
            self.nodes.append(
                Emitted(
                    op_type,
                    domain,
                    names,
                    list(made),
                    attributes,
                    settings,
                    name,
                    self._metadata,
                    optional_outputs,
                    inner,
                )
            )
            self._seen[key] = made
            self.made.update(made)
            kind = self._types.get(names[0]) if names else None
            if op_type in _OTHER_TYPE:
                kind = self._result_type(op_type, names, attributes)
            if kind is not None:
                for result in made:
                    self._types[result] = kind
        return made

    def _names(self, inputs: Sequence[Argument]) -> tuple[str, ...]:
        names: list[str] = []
        for argument in inputs:
            if isinstance(argument, str):
                if argument not in self.taken and argument:
                    raise not_a_value(self, argument)
                names.append(argument)
            elif argument is None:
                names.append("")
            elif isinstance(argument, int | float):
                names.append(self.const(argument, like=self._sibling(inputs)))
            elif isinstance(argument, list | tuple) and any(isinstance(part, str) for part in argument):
                raise not_one_value(self, argument)
            else:
                names.append(self.const(argument))
        while names and not names[-1]:
            names.pop()
        return tuple(names)

    def _sibling(self, inputs: Sequence[Argument]) -> str:
        """The operand that gives a Python number its type: the last one that is not a condition."""
        for argument in reversed(inputs):
            if isinstance(argument, str) and self._types.get(argument, TensorProto.BOOL) != TensorProto.BOOL:
                return argument
        raise RuleError(
            f"The rule {self._rule!r} gives a number beside operands of unknown type {inputs}: use op.const."
        )

    def _result_type(self, op_type: str, names: tuple[str, ...], attributes: dict[str, Any]) -> int | None:
        if op_type in _BOOL:
            return TensorProto.BOOL
        if op_type in _INT64:
            return TensorProto.INT64
        if op_type == "Cast":
            return int(attributes["to"])
        if op_type == "ConstantOfShape":
            return int(attributes["value"].data_type) if "value" in attributes else TensorProto.FLOAT
        if op_type in ("Where", "CastLike"):
            return self._types.get(names[1])
        return self._types.get(names[2])  # OneHot

    def subgraph(self, function: Callable[..., Sequence[str]], *inputs: str) -> GraphProto:
        """The graph of what `function` emits: it gets a value for every one of `inputs` and returns the graph's outputs.

        :param inputs: values outside, each of the element type of the graph's input. Of its shape nothing is known: a
            scan input has one axis less, and a state may grow. What `function` assumes of its results is written down:
            ONNX Runtime runs no Scan without the rank of every output.
        """
        outer = self.nodes, self._seen
        self.nodes, self._seen = [], dict(self._seen)
        reads = [self.fresh(f"{self._scope}{self._rule}_in_{k}") for k in range(len(inputs))]
        for read, value in zip(reads, inputs, strict=True):
            self._types[read] = self.type(value)
        results = function(*reads)
        graph = GraphProto(name=self.fresh(f"{self._scope}{self._rule}_body"))
        graph.input.extend(helper.make_tensor_value_info(read, self.type(read), None) for read in reads)
        for value in results:
            graph.output.append(helper.make_value_info(value, self.adjoint_proto(value)))
        live, kept = set(results), []
        for node in reversed(self.nodes):
            if not live.isdisjoint(node.outputs):
                live.update(node.inputs, node.captured)
                kept.append(node)
        writer = Writer(graph, {})
        for node in reversed(kept):
            writer.add(node)
        self.nodes, self._seen = outer
        return graph

    def training_form(
        self, op_type: str, more: Sequence[str], attributes: Mapping[str, Any] | None = None
    ) -> tuple[str, ...]:
        """Let the forward node return more: it becomes `op_type` of com.microsoft if one of the results is used.

        :param more: what the outputs are called that `op_type` has after all those of the forward operator. Their element
            type is taken to be that of the first input.
        :param attributes: those of `op_type`, where they are not those that the forward node has.
        """
        node = self._forward
        if node is None:
            raise RuleError(f"{self._rule!r} belongs to no forward node that could become {op_type}.")
        schema = find_schema(node.op_type, node.domain, self.graph.opsets.get(node.domain, 1))
        made = tuple(self.fresh(f"{node.name}_{name}") for name in more)
        for position, name in enumerate(made, len(schema.outputs)):
            node.add_output(position, name)
            self._types[name] = self.type(node.inputs[0])
        self.training_forms[node.name] = TrainingForm(op_type, made, attributes)
        return made

    def beside(self, op_type: str, *inputs: str) -> str:
        """The result of a node put before the forward one: the backward pass of a body may have it stored."""
        if self._forward is None:
            raise RuleError(f"{self._rule!r} belongs to no forward node beside which {op_type} could stand.")
        name = self.fresh(f"{self._forward.name}_{op_type}")
        self.graph.insert(helper.make_node(op_type, inputs, [name], name=name), before=self._forward)
        self.learn(name, self.type(inputs[0]))
        return name

    # What is known of a value

    def is_needed(self, value: str) -> bool:
        """Whether the adjoint of `value` is asked for: for lowerings, a rule gives them all."""
        return self._needed is None or value in self._needed

    def type(self, value: str) -> int:
        """The element type of `value`."""
        kind = self._types.get(value)
        if kind is None:
            raise RuleError(
                f"The element type of {value!r} is unknown (read by node {self._node!r}); "
                "add it to the model's value_info."
            )
        return kind

    def adjoint_type(self, value: str) -> int:
        """The element type of the adjoint of `value`: its own, but a float for a quantised one."""
        return self.graph.adjoint_types.get(value) or self.type(value)

    def adjoint_proto(self, value: str) -> TypeProto:
        """The type of the adjoint of `value`, without the names of sizes: they hold in one graph."""
        if value in self._containers:
            return unname(adjoint_of(self._containers[value]))
        return tensor_type(self.adjoint_type(value), self.shape(value))

    def hold(self, value: str, kind: TypeProto) -> str:
        """Record that `value` is a container of this type."""
        self._types[value], self._containers[value] = element_type(kind), kind
        return value

    def container(self, value: str) -> TypeProto | None:
        """The type of `value` where it is a sequence or an optional."""
        return self._containers.get(value)

    def is_sequence(self, value: str) -> bool:
        """Whether the adjoint of `value` is a sequence."""
        return value in self._containers and opened(self._containers[value]).HasField("sequence_type")

    def shape(self, value: str) -> Shape | None:
        """The dimensions of `value` as far as they are known, or None where not even the rank is."""
        return self._shapes.get(value)

    def rank(self, value: str) -> int | None:
        """The number of axes of `value`, or None where it is unknown."""
        shape = self._shapes.get(value)
        return None if shape is None else len(shape)

    def static(self, value: str) -> tuple[int, ...] | None:
        """The shape of `value` where every dimension is known, else None."""
        shape = self._shapes.get(value)
        if shape is None or not all(isinstance(d, int) for d in shape):
            return None
        return tuple(d for d in shape if isinstance(d, int))

    def constant(self, value: str | None) -> np.ndarray | None:
        """The array behind `value` where it is known before the model runs, else None."""
        if value is None:
            return None
        if value in self._arrays:
            return self._arrays[value]
        return self.graph.constant(value)

    def dims(self, shape: str) -> Shape | None:
        """The dimensions that the shape tensor `shape` holds, as far as they are known."""
        known = self.constant(shape)
        if known is not None:
            return tuple(int(d) for d in known)
        node = self.graph.producer.get(shape)  # where the model measures a tensor itself
        if node is not None and node.key == ("", "Shape"):
            whole = self.shape(node.inputs[0])
            return whole if whole is None else whole[node.attributes.get("start") : node.attributes.get("end")]
        return self._shape_of.get(shape)

    def describe(self, value: str, like: str) -> None:
        """Record that `value` has the type and shape of `like`: an adjoint has those of its primal."""
        if like in self._types:
            self._types[value] = self.adjoint_type(like)
        if like in self._shapes:
            self._shapes[value] = self._shapes[like]
        if self.is_sequence(like):
            self._containers[value] = adjoint_of(self._containers[like])

    def learn(self, value: str, kind: int | TypeProto, shape: Shape | None = None) -> None:
        """Record what a forward value is that a node of the model got: of an element type, or a container."""
        if isinstance(kind, TypeProto):
            self._types[value] = element_type(kind)
            self._containers[value] = self.graph.containers[value] = kind
        else:
            self._types[value] = self.graph.types[value] = kind
        if shape is not None:
            self._shapes[value] = self.graph.shapes[value] = shape

    def know(self, value: str, other: Emitter) -> None:
        """Record what `other` knows of a value outside."""
        if value in other._types:
            self._types[value] = other._types[value]
        if value in other._shapes:
            self._shapes[value] = other._shapes[value]
        if value in other._containers:
            self._containers[value] = other._containers[value]

    def assume(self, value: str, shape: Shape) -> None:
        """Record the shape of an emitted value, so that what is emitted next may rely on it."""
        self._shapes[value] = shape

    def declare(self, value: str, like: str) -> str:
        """`value`, with the type of `like` and the sizes known of it written in the result: some kernels read them there."""
        self.describe(value, like)
        self.declared[value] = like
        return value

    def describe_output(self, node: Node, position: int, name: str) -> None:
        """Record the type of an optional output that was added to a forward node."""
        schema = find_schema(node.op_type, node.domain, self.graph.opsets.get(node.domain, 1))
        type_str = schema.outputs[position].type_str
        for parameter, value in zip(schema.inputs, node.inputs, strict=False):
            if parameter.type_str == type_str and value in self._types:
                self._types[name] = self._types[value]
                return
        if "stash_type" in node.attributes:  # the type of a normalization's statistics
            self._types[name] = int(node.attributes["stash_type"])
            return
        allowed = {type_str}.union(
            *(c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == type_str)
        )
        for kind in (TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL):
            if f"tensor({helper.tensor_dtype_to_string(kind).partition('.')[2].lower()})" in allowed:
                self._types[name] = kind
                return

    # Shorthands

    def copy(self, value: str) -> str:
        """`value` under a name of its own, even where another copy of it exists."""
        self._seen.pop(("Identity", "", (value,), 1, ()), None)
        result: str = self.Identity(value)
        return result

    def const(self, value: float | Sequence[int] | np.ndarray, like: str | None = None) -> str:
        """A constant: the type of `like`, or the array's own, or int64."""
        if isinstance(value, np.ndarray):
            return self._constant(value)
        key = repr(value), self.type(like) if like is not None else TensorProto.INT64
        if key not in self._numbers:
            array = np.asarray(value, dtype=helper.tensor_dtype_to_np_dtype(key[1]))
            exact = repr(value) if isinstance(value, float) and math.isfinite(value) and float(array) != value else ""
            self._numbers[key] = self._constant(array, exact)
        return self._numbers[key]

    def _constant(self, array: np.ndarray, exact: str = "") -> str:
        key = (array.dtype, array.shape, array.tobytes(), exact)
        name = self._constant_names.get(key)
        if name is None:
            text = "_".join(str(v) for v in array.ravel()[:6]) + ("_etc" if array.size > 6 else "")
            name = self.fresh(f"{array.dtype.name}_{text}")
            self.constants[name] = numpy_helper.from_array(array, name)
            self.constants[name].metadata_props.add(key=CONSTANT, value=exact)
            self._constant_names[key] = name
            self._arrays[name] = array
            self._types[name] = helper.np_dtype_to_tensor_dtype(array.dtype)
            self._shapes[name] = array.shape
        return name

    def as_type(self, value: str, kind: int) -> str:
        """`value` as elements of type `kind`; itself where it has that type."""
        return value if self.type(value) == kind else str(self.Cast(value, to=kind))

    def full(self, shape: Argument, value: float, like: str) -> str:
        """A tensor of the given shape filled with `value`, of the type of `like`, or of its adjoint where it is quantised."""
        kind = self.adjoint_type(like)
        if kind == TensorProto.BFLOAT16 and self.opset < 20:  # ConstantOfShape has no bfloat16 before
            return str(self.Expand(self.const(value, like=like), shape))
        filling = np.full(1, value, dtype=helper.tensor_dtype_to_np_dtype(kind))
        result: str = self.ConstantOfShape(shape, value=numpy_helper.from_array(filling))
        return result

    def shape_of(self, value: str) -> str:
        """The shape of `value` as a tensor."""
        name: str = self.grad.ShapeOf(value)
        return name

    def measure(self, value: str) -> str:
        """A Shape node of `value`; what is known of the sizes is recorded, so that what is emitted next may rely on it."""
        name: str = self.Shape(value)
        static = self.static(value)
        if static is not None:
            self._arrays[name] = np.array(static, np.int64)
        elif value in self._shapes:
            self._shape_of[name] = self._shapes[value]
        return name

    def reshape_like(self, value: str, like: str) -> str:
        """The elements of `value` in the shape of `like`."""
        name: str = self.grad.ReshapeLike(value, like)
        return name

    def share(self, whole: str, parts: str | None, like: str) -> str | float:
        """What one element weighs in a mean: the size of `parts` (the means; None is one) over that of `whole`.

        A number where the shapes are known, else a scalar of the type of `like`, divided in double: sizes overflow float16.
        """
        sizes = [(1,) if value is None else self.static(value) for value in (parts, whole)]
        counts = [max(math.prod(size), 1) for size in sizes if size is not None]
        if len(counts) == 2:
            return counts[0] / counts[1]
        one = self.const(np.ones((), np.int64))
        measured = (one if value is None else self.Max(self.Size(value), one) for value in (parts, whole))
        ratio = self.Div(*(self.Cast(size, to=TensorProto.DOUBLE) for size in measured))
        return str(self.Cast(ratio, to=self.type(like)))

    def keep_dims(self, reduced: str, axes: str | None, keepdims: int) -> str:
        """A reduction's result with the axes that it reduced put back as 1, so that it broadcasts against what was reduced.

        Where it was given no axes it does so already: it is as large, or a scalar.
        """
        known = self.constant(axes)
        if keepdims or axes is None or (known is not None and known.size == 0):
            return reduced
        return str(self.Unsqueeze(reduced, axes))

    def reduce(self, op_type: str, data: str, axes: str | None, noop_with_empty_axes: int = 0) -> str:
        """A reduction that keeps its axes. Before opset 18 they are an attribute, and so were those it is given."""
        known = self.constant(axes)
        if self.opset >= 18:
            return str(self.emit(op_type, "", (data, axes), 1, {"noop_with_empty_axes": noop_with_empty_axes or None}))
        return str(self.emit(op_type, "", (data,), 1, {"axes": None if known is None else known.tolist() or None}))

    def zeros_like(self, value: str) -> str:
        """Zeros of the shape and type of `value`; of an optional, of what it holds."""
        return self.full_like(value, 0.0)

    def full_like(self, value: str, number: float) -> str:
        """`number` wherever the adjoint of `value` has an element; that of an empty optional has none."""
        if value not in self._containers:
            filled, shape = self.full(self.shape_of(value), number, like=value), self.shape(value)
            if shape is not None:
                self.assume(filled, shape)
        else:
            filled = containers.full_like(self, value, number)
        self.describe(filled, like=value)
        return filled

    def sum(self, parts: Sequence[str], like: str) -> str:
        """The sum of adjoints of `like`; that of sequences goes element by element."""
        return containers.total(self, parts, like) if self.is_sequence(like) else str(self.Sum(*parts))

    def com_microsoft(self, op_type: str, *inputs: Argument, outputs: int = 1, **attributes: Any) -> Any:
        """A node of ONNX Runtime's domain whose unused outputs may be left empty."""
        return self.emit(op_type, MICROSOFT, inputs, outputs, attributes, optional_outputs=True)

    def every_adjoint(
        self, op_type: str, inputs: Sequence[Argument], primals: Sequence[str | None], **attributes: Any
    ) -> tuple[str, ...]:
        """A node of ONNX Runtime's domain that returns the adjoints of `primals` and writes to all of them: all have names."""
        made: tuple[str, ...] = self.emit(op_type, MICROSOFT, inputs, len(primals), attributes)
        self.adjoint_of.update((value, name) for value, name in zip(made, primals, strict=True) if name is not None)
        return made

    def fresh(self, name: str) -> str:
        """`name`, or the next free one."""
        return fresh(name, self.taken)


class Primitives:
    """`op.grad.SoftmaxGrad(...)`: a gradient primitive, lowered for the dialect in use."""

    def __init__(self, op: Emitter) -> None:
        self._op = op

    def __getattr__(self, name: str) -> Callable[..., Any]:
        default = LOWERINGS["onnx"].get(name)
        if default is None:
            raise no_such_primitive(self._op, name)
        override = LOWERINGS[self._op.dialect].get(name) if self._op.dialect != "onnx" else None

        def lower(*inputs: Any, **attributes: Any) -> Any:
            if override is not None:
                result = override(self._op, *inputs, **attributes)
                if result is not None:
                    return result
            return default(self._op, *inputs, **attributes)

        setattr(self, name, lower)
        return lower


def tensor_type(kind: int, shape: Shape | None) -> TypeProto:
    """A tensor of which only the sizes that are numbers are declared."""
    sizes = None if shape is None else [dim if isinstance(dim, int) else None for dim in shape]
    return helper.make_tensor_type_proto(kind, sizes)


def _hashable(value: Any) -> Any:
    if isinstance(value, TensorProto | GraphProto):
        return value.SerializeToString()
    return tuple(value) if isinstance(value, list) else value


class Writer:
    """Writes emitted nodes into a graph. The same attributes recur often, so each distinct set is made once."""

    def __init__(self, graph: GraphProto, rename: dict[str, str]) -> None:
        self._nodes = graph.node
        self._rename = rename
        self._attributes: dict[tuple[Any, ...], list[AttributeProto]] = {}

    def add(self, node: Emitted) -> None:
        """Append the node with final names; `metadata_props` tell the rule and the forward node that it comes from."""
        rename = self._rename
        proto = self._nodes.add(
            op_type=node.op_type,
            domain=node.domain,
            name=node.name,
            input=[rename.get(name, name) for name in node.inputs],
            output=[rename.get(name, name) for name in node.outputs],
        )
        if node.settings:
            attributes = self._attributes.get(node.settings)
            if attributes is None:
                attributes = [helper.make_attribute(name, value) for name, value in node.attributes.items()]
                if node.captured:
                    for attribute in attributes:
                        self._rename_captured(attribute)
                self._attributes[node.settings] = attributes
            proto.attribute.extend(attributes)
        proto.metadata_props.extend(node.metadata)

    def _rename_captured(self, attribute: AttributeProto) -> None:
        """Give what a subgraph reads from outside its final name; no name within is among those that are renamed."""
        pending = list(subgraphs(attribute))
        while pending:
            for node in pending.pop().node:
                node.input[:] = [self._rename.get(name, name) for name in node.input]
                pending += [graph for inner in node.attribute for graph in subgraphs(inner)]
