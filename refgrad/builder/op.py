"""The emitter that rules and lowerings see: `op.Mul(a, b)` adds a node of the model's opset and returns the name of its result.

An argument is the name of a value, a Python number (a scalar of the type of the other operands), True or False (bool), a
list of integers (int64, one axis), a NumPy array or scalar with its own type, or None (absent). np.float64 is a Python number
too. In `op.Where(condition, 1.0, 0.0)` the numbers have the type of the forward node's float inputs. The same pure node is
never emitted twice.

Two things are more than a node with its inputs. `op.subgraph(function, ...)` makes the graph of an attribute, such as the
body of Scan: what `function` emits goes into it, and it may read every value outside. `op.training_form(...)` is for a
lowering whose kernel needs more of the forward operator than that returns: the forward node becomes, in the gradient
model alone, an operator of ONNX Runtime's that returns more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from onnx import GraphProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from refgrad.builder.edits import Edits
from refgrad.builder.emission import Emission
from refgrad.builder.misuse import numbers
from refgrad.builder.nodes import NodeBuilder
from refgrad.builder.operators import Argument, Operators
from refgrad.builder.primitives import Primitives
from refgrad.builder.values import Values, tensor_type
from refgrad.errors import RuleError
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.types import Shape, type_of
from refgrad.tables.conventions import DEFAULT, Conventions
from refgrad.tables.dialects import DIALECTS, Dialect
from refgrad.tables.schemas import find_schema
from refgrad.tables.torch_functions import exported_function

if TYPE_CHECKING:
    from refgrad.model.graph import Graph, Node
    from refgrad.reverse.record import SweepRecord


class Emitter(Operators):
    """One method per operator, the primitives (`op.grad`), and what is known of a value.

    `values` holds what is known of values, `emission` what is emitted, `edits` what forward nodes do besides. `conventions`
    are the options of `refgrad.gradient`, `repeated` the names of the nodes with graphs that store their states alone.
    `record` is the record of the sweep, if one is kept.
    """

    record: SweepRecord | None = None

    def __init__(
        self,
        values: Values,
        dialect: Dialect,
        taken: set[str],
        *,
        conventions: Conventions = DEFAULT,
        needed: Container[str] | None = None,
        repeated: Container[str] = (),
    ) -> None:
        """Emit for the graph of `values`, by names that are not in `taken`.

        :param needed: the values whose cotangent is asked for; None: any.
        """
        self.values = values
        self.emission = Emission(values, taken)
        self.edits = Edits()
        self.graph = values.graph
        self.opset = values.graph.opset
        self.dialect = dialect
        self.conventions = conventions
        self.repeated = repeated
        self.mapped = False  # within a SequenceMap; ONNX Runtime runs none in another
        self.declared: dict[str, str] = {}  # emitted value: the value whose type is declared for it
        self.adjoint_of: dict[str, str] = {}  # results of kernels that write all of theirs: the primal of each
        self._needed = needed
        self._forward: Node | None = None
        self._fillings: dict[tuple[int, str], TensorProto] = {}  # what `full` fills with

    @classmethod
    def over(cls, graph: Graph, taken: set[str]) -> Self:
        """An emitter of ai.onnx operators that stand behind the nodes of `graph`."""
        return cls(Values(graph), DIALECTS["onnx"], taken)

    def enter(self, rule: str, node: str, forward: Node | None = None) -> None:
        """Assign the nodes that follow to `rule` and to the node called `node`, which is `forward` if there is one."""
        self.emission.enter(rule, node, forward.inputs if forward is not None else ())
        self._forward = forward

    @property
    def kinks(self) -> str:
        """Whose choice is taken where a derivative does not exist."""
        return self.conventions.kinks

    @property
    def torch_function(self) -> str:
        """The function of torch that the forward node was exported for, with kinks="torch"; "" where nothing tells it."""
        node = self._forward if self.kinks == "torch" else None
        return "" if node is None else exported_function(node.proto)

    @property
    def quantization(self) -> str:
        """The derivative of quantization."""
        return self.conventions.quantization

    @property
    def strong_zero(self) -> bool:
        """True if an element whose cotangent is 0 contributes 0, even if its derivative is infinite or NaN."""
        return self.conventions.strong_zero

    @property
    def rule(self) -> str:
        """The operator whose rule emits."""
        return self.emission.owner[0]

    @property
    def node(self) -> str:
        """The name of the forward node that what is emitted belongs to: for messages."""
        return self.emission.owner[1]

    @property
    def preserves_finite(self) -> bool:
        """True if finite cotangents of the model's outputs imply finite ones of the forward node, except for overflow."""
        return self._forward is not None and all(map(self.graph.preserves_finite, filter(None, self._forward.outputs)))

    # Nodes

    @property
    def grad(self) -> Primitives:
        """The gradient primitives: `op.grad.SoftmaxGrad(...)`."""
        return Primitives(self)

    def emit(
        self,
        op_type: str,
        domain: str,
        inputs: Sequence[Argument],
        outputs: int,
        attributes: dict[str, Any],
        optional_outputs: bool = False,
    ) -> Any:
        """Add a node; its output's name, or a tuple of names where it has several."""
        made = self.emission.emit(op_type, domain, inputs, outputs, attributes, optional_outputs)
        return made[0] if outputs == 1 else made

    def emit_all(
        self, op_type: str, domain: str, inputs: Sequence[Argument], outputs: int, attributes: dict[str, Any]
    ) -> tuple[str, ...]:
        """Add a node; the names of its outputs."""
        return self.emission.emit(op_type, domain, inputs, outputs, attributes)

    def every_adjoint(
        self, op_type: str, inputs: Sequence[Argument], primals: Sequence[str | None], **attributes: Any
    ) -> tuple[str, ...]:
        """A node of ONNX Runtime's domain that returns the cotangents of `primals` and writes them all: all have names."""
        made: tuple[str, ...] = self.emit(op_type, MICROSOFT, inputs, len(primals), attributes)
        self.adjoint_of.update((value, name) for value, name in zip(made, primals, strict=True) if name is not None)
        return made

    def subgraph(self, function: Callable[..., Sequence[str]], *inputs: str) -> GraphProto:
        """The graph of what `function` emits: see `Emission.subgraph`."""
        return self.emission.subgraph(function, *inputs)

    def training_form(
        self, op_type: str, more: Sequence[str], attributes: Mapping[str, Any] | None = None
    ) -> tuple[str, ...]:
        """Let the forward node return more: it becomes `op_type` of com.microsoft if one of the results is used.

        :param more: the names of the outputs that `op_type` has after all outputs of the forward operator. They are taken to
            have the element type of the first input.
        :param attributes: the attributes of `op_type`, if they are not the attributes of the forward node.
        """
        node = self._forward
        if node is None:
            raise RuleError(f"{self.rule!r} belongs to no forward node that could become {op_type}.")
        schema = find_schema(node.op_type, node.domain, self.graph.opsets.get(node.domain, 1))
        made = tuple(self.fresh(f"{node.name}_{name}") for name in more)
        for position, name in enumerate(made, len(schema.outputs)):
            self.edits.name_output(node, position, name)
            self.values.record(name, self.type(node.inputs[0]))
        self.edits.become(node, op_type, made, attributes)
        return made

    def before(self, op_type: str, *inputs: str) -> str:
        """The result of a node put before the forward one: the backward pass of a body may have it stored."""
        if self._forward is None:
            raise RuleError(f"{self.rule!r} belongs to no forward node before which {op_type} could stand.")
        builder = NodeBuilder(self.emission.taken)
        name = builder.add(op_type, inputs, f"{self._forward.name}_{op_type}")
        self.edits.insert(builder.take(), before=self._forward)
        return self.values.add(name, self.type(inputs[0]))

    def fresh(self, name: str) -> str:
        """`name`, or the next free one."""
        return self.emission.fresh(name)

    # What is known of a value

    def is_needed(self, value: str) -> bool:
        """True if the cotangent of `value` is asked for: for lowerings, a rule gives them all."""
        return self._needed is None or value in self._needed

    def is_emitted(self, value: str) -> bool:
        """True if a node of the gradient graph computes `value`, and not the model."""
        return value in self.emission.made

    def type(self, value: str) -> int:
        """The element type of `value`."""
        kind = self.values.types.get(value)
        if kind is None:
            raise RuleError(
                f"The element type of {value!r} is unknown (read by node {self.node!r}); add it to the model's value_info."
            )
        return kind

    def shape(self, value: str) -> Shape | None:
        """The dimensions of `value` as far as they are known, or None where not even the rank is."""
        return self.values.shapes.get(value)

    def rank(self, value: str) -> int | None:
        """The number of axes of `value`, or None where it is unknown."""
        shape = self.values.shapes.get(value)
        return None if shape is None else len(shape)

    def static(self, value: str) -> tuple[int, ...] | None:
        """The shape of `value` where every dimension is known, else None."""
        return self.values.static(value)

    def constant(self, value: str | None) -> np.ndarray | None:
        """The array behind `value` where it is known before the model runs, else None."""
        return self.values.constant(value)

    def dims(self, shape: str) -> Shape | None:
        """The dimensions that the shape tensor `shape` holds, as far as they are known."""
        return self.values.dims(shape)

    def is_sequence(self, value: str) -> bool:
        """True if the cotangent of `value` is a sequence."""
        return self.values.is_sequence(value)

    def assume(self, value: str, shape: Shape) -> None:
        """Record the shape of an emitted value, so that what is emitted next may rely on it."""
        self.values.shapes[value] = shape

    def describe(self, value: str, like: str) -> None:
        """Record that `value` has the type and shape of `like`: a cotangent has the type and shape of its primal."""
        self.values.record_like(value, like)

    def declare(self, value: str, like: str) -> str:
        """`value`, with the type of `like` and the sizes known of it written in the result: some kernels read them there."""
        self.values.record_like(value, like)
        self.declared[value] = like
        return value

    def declarations(self, live: Set[str], names: Mapping[str, str]) -> Iterator[ValueInfoProto]:
        """The types to be written of those declared values that are `live`; `names` are names in the result."""
        for value, like in self.declared.items():
            if value in live:
                kind = tensor_type(self.type(like), self.shape(like))
                yield helper.make_value_info(names.get(value, value), kind)

    # Constants, types and shapes

    def copy(self, value: str) -> str:
        """`value` under a name of its own, even where another copy of it exists."""
        self.emission.forget("Identity", value)
        return self.Identity(value)

    def const(self, value: float | Sequence[int] | np.ndarray | np.generic, like: str | None = None) -> str:
        """A constant: an array with its own type, else of the type of `like`, else of the NumPy scalar's, bool, or int64."""
        if like is None or isinstance(value, np.ndarray):
            return self.emission.literal(value)
        return self.emission.number(value, self.type(like))

    def as_type(self, value: str, kind: int) -> str:
        """`value` as elements of type `kind`; itself where it has that type."""
        return value if self.type(value) == kind else self.Cast(value, to=kind)

    def full(self, shape: Argument, value: float, like: str) -> str:
        """A tensor of the given shape filled with `value`, of the type of `like`, or of its cotangent where it is quantised.

        :raises BrokenRuleError: `value` is no number of that type.
        """
        kind = self.values.adjoint_type(like)
        if kind == TensorProto.BFLOAT16 and self.opset < 20:  # ConstantOfShape has no bfloat16 before
            return self.Expand(self.const(value, like=like), shape)
        key = kind, repr(value)
        if key not in self._fillings:
            array = numbers(self, value, helper.tensor_dtype_to_np_dtype(kind))
            self._fillings[key] = numpy_helper.from_array(array.reshape(1))
        return self.ConstantOfShape(shape, value=self._fillings[key])

    def shape_of(self, value: str) -> str:
        """The shape of `value` as a tensor."""
        name: str = self.grad.ShapeOf(value)
        return name

    # Shorthands that are built from operators

    def measure(self, value: str) -> str:
        """A Shape node of `value`; what is known of the sizes is recorded, so that what is emitted next may rely on it."""
        name, values = self.Shape(value), self.values
        static = values.static(value)
        if static is not None:
            values.arrays[name] = np.array(static, np.int64)
        elif value in values.shapes:
            values.sizes[name] = values.shapes[value]
        return name

    def length(self, row: str) -> str:
        """The number of elements of `row`, which has one axis, as a scalar.

        Size would be wrong for a row that is a shape: ONNX Runtime infers the product of the numbers for it (a finding).
        """
        name: str = self.Squeeze(self.Shape(row), [0])
        return name

    def reshape_like(self, value: str, like: str) -> str:
        """The elements of `value` in the shape of `like`."""
        name: str = self.grad.ReshapeLike(value, like)
        return name

    def share(self, whole: str, parts: str | None, like: str) -> str | float:
        """The weight of one element in a mean: the size of `parts` (the means; None is one) over the size of `whole`.

        A number where the shapes are known, else a scalar of the type of `like`, divided in double: sizes overflow float16.
        """
        sizes = [(1,) if value is None else self.static(value) for value in (parts, whole)]
        counts = [max(math.prod(size), 1) for size in sizes if size is not None]
        if len(counts) == 2:
            return counts[0] / counts[1]
        one = self.const(np.ones((), np.int64))
        measured = (one if value is None else self.Max(self.Size(value), one) for value in (parts, whole))
        ratio = self.Div(*(self.Cast(size, to=TensorProto.DOUBLE) for size in measured))
        return self.Cast(ratio, to=self.type(like))

    def keep_dims(self, reduced: str, axes: str | None, keepdims: int) -> str:
        """A reduction's result with the axes that it reduced put back as 1, so that it broadcasts against what was reduced.

        Where it was given no axes it does so already: it is as large, or a scalar.
        """
        known = self.constant(axes)
        if keepdims or axes is None or (known is not None and known.size == 0):
            return reduced
        return self.Unsqueeze(reduced, axes)

    def reduce(self, op_type: str, data: str, axes: str | None, noop_with_empty_axes: int = 0) -> str:
        """A reduction that keeps its axes. Before opset 18 they are an attribute, and so were those it is given."""
        known = self.constant(axes)
        if self.opset >= 18:
            return str(self.emit(op_type, "", (data, axes), 1, {"noop_with_empty_axes": noop_with_empty_axes or None}))
        return str(self.emit(op_type, "", (data,), 1, {"axes": None if known is None else known.tolist() or None}))

    def zeros_like(self, value: str) -> str:
        """Zeros of the shape and type of `value`; for an optional, of its content."""
        return self.full_like(value, 0.0)

    def full_like(self, value: str, number: float) -> str:
        """`number` wherever the cotangent of `value` has an element; the cotangent of an empty optional has no elements."""
        return _full_like(self, value, number)

    def sum(self, parts: Sequence[str], like: str) -> str:
        """The sum of cotangents of `like`; sequences are added element by element.

        Of two it is an Add, which ONNX Runtime computes with all threads; its builder writes a Sum.
        """
        if self.is_sequence(like):
            return _total(self, parts, like)
        return str(self.Add(*parts) if len(parts) == 2 and not self.dialect.follows_onnxruntime else self.Sum(*parts))


# Sequences and optionals, element by element


def sequence_type(kind: int) -> TypeProto:
    """A sequence of tensors of any shape."""
    return helper.make_sequence_type_proto(helper.make_tensor_type_proto(kind, None))


def _full_like(op: Emitter, value: str, number: float) -> str:
    """`number` wherever the cotangent of `value` has an element; the cotangent of an empty optional has no elements."""
    kind = op.values.containers.get(value)
    if kind is None:
        filled, shape = op.full(op.shape_of(value), number, like=value), op.shape(value)
        if shape is not None:
            op.assume(filled, shape)
    elif kind.HasField("sequence_type"):
        filled = each(op, op.type(value), lambda element: op.full(op.Shape(element), number, like=element), value)
    else:
        then_branch = op.subgraph(lambda: [_full_like_held(op, value, number)])
        else_branch = op.subgraph(lambda: [nothing_like(op, value)])
        filled = op.If(op.OptionalHasElement(value), then_branch=then_branch, else_branch=else_branch)
    op.describe(filled, like=value)
    return filled


def _full_like_held(op: Emitter, value: str, number: float) -> str:
    element = op.OptionalGetElement(value)
    op.describe(element, like=value)
    return _full_like(op, element, number)


def nothing_like(op: Emitter, optional: str) -> str:
    """The cotangent of an empty optional: a sequence, or a tensor, without elements."""
    kind = op.type(optional)
    if op.is_sequence(optional):
        return op.values.record(op.SequenceEmpty(dtype=kind), sequence_type(kind))
    rank = len(type_of(ValueInfoProto(type=op.values.adjoint_proto(optional)))[1] or ())
    zero = numpy_helper.from_array(np.zeros(1, helper.tensor_dtype_to_np_dtype(kind)))
    return op.ConstantOfShape([0] * rank, value=zero)


def for_each(
    op: Emitter, sequences: Sequence[str], kinds: Sequence[int], function: Callable[..., Sequence[str]]
) -> tuple[str, ...]:
    """A sequence of each result that `function` has for the tensors at every place; its elements are of type `kinds`."""
    number = op.SequenceLength(sequences[0])
    going = op.const(np.array(True))
    empty = [op.values.record(op.SequenceEmpty(dtype=int(kind)), sequence_type(kind)) for kind in kinds]

    def body(place: str, again: str, *made: str) -> list[str]:
        results = function(*(op.SequenceAt(sequence, place) for sequence in sequences))
        longer = (op.SequenceInsert(m, r) for m, r in zip(made, results, strict=True))
        return [
            op.Identity(again),
            *(op.values.record(value, sequence_type(k)) for value, k in zip(longer, kinds, strict=True)),
        ]

    graph = op.subgraph(body, op.const(np.array(0)), going, *empty)
    for value_info in (*graph.input[:2], *graph.output[:1]):
        value_info.type.tensor_type.shape.SetInParent()  # scalars
    for value_info, kind in zip(graph.input[2:], kinds, strict=True):
        value_info.type.CopyFrom(sequence_type(kind))
    made = op.emit_all("Loop", "", (number, going, *empty), len(kinds), {"body": graph})
    return tuple(op.values.record(value, sequence_type(kind)) for value, kind in zip(made, kinds, strict=True))


def each(op: Emitter, kind: int, function: Callable[..., str], *inputs: str) -> str:
    """The sequence of the results of `function` on every element. All `inputs` are sequences of the same length."""
    if op.mapped:
        return for_each(op, inputs, [kind], lambda *elements: [function(*elements)])[0]
    body = op.subgraph(lambda *elements: [function(*elements)], *inputs)
    return op.values.record(op.SequenceMap(*inputs, body=body), sequence_type(kind))


def replace(op: Emitter, sequence: str, position: str, tensor: str) -> str:
    """`sequence` with `tensor` at `position`, which may be negative."""
    rest = op.SequenceErase(sequence, position)
    return op.SequenceInsert(rest, tensor, where_erased(op, rest, position))


def where_erased(op: Emitter, rest: str, position: str) -> str | None:
    """The position at which SequenceInsert puts back into `rest` the element that SequenceErase took; None is the end."""
    known = op.constant(position)
    if known is None:
        return shift(op, position, op.Add(op.SequenceLength(rest), 1), 0)
    return None if known == -1 else shift(op, position, 1, 0)


def shift(op: Emitter, position: str, negative: str | int, other: str | int) -> str:
    """A position in a sequence to which `negative` or `other` is added, by its sign."""
    known = op.constant(position)
    if known is not None and isinstance(added := negative if known < 0 else other, int):
        return op.const(np.asarray(known + added, np.int64))
    position = op.as_type(position, TensorProto.INT64)
    return op.Where(op.Less(position, 0), *(op.Add(position, added) for added in (negative, other)))


def _total(op: Emitter, parts: Sequence[str], like: str) -> str:
    """The sum of cotangents of the sequence `like`, element by element."""
    dense = [part for part in parts if part not in op.values.sparse.placed]
    placed = [op.values.sparse.placed[part] for part in parts if part in op.values.sparse.placed]
    if not dense:
        dense = [parts[0]]
        del placed[0]
    for k, part in enumerate(dense):
        place, rest, at = op.values.sparse.widened.get(part, ("", "", None))
        filling = next((one for one in placed if _is_same(op, one[0], place)), None)
        if filling is not None:
            placed.remove(filling)
            dense[k] = op.SequenceInsert(rest, filling[1], at)
    made = dense[0] if len(dense) == 1 else each(op, op.type(like), lambda *xs: op.Sum(*xs), *dense)
    for position, adjoint in placed:
        made = replace(op, made, position, op.Add(op.SequenceAt(made, position), adjoint))
    return made


def _is_same(op: Emitter, position: str, other: str) -> bool:
    """True if two positions are known to be one: the same value, or equal constants."""
    known, too = op.constant(position), op.constant(other)
    return position == other or (known is not None and too is not None and bool(known == too))
