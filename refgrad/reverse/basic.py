"""Emission for one forward node after another: nodes, constants, and what is known of values."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from typing import Any, Self

import numpy as np
from onnx import GraphProto, TensorProto, ValueInfoProto, helper, numpy_helper

from refgrad.errors import RuleError
from refgrad.forward.graph import Graph, Node
from refgrad.forward.misuse import numbers
from refgrad.forward.operators import Argument, Operators
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.types import Shape
from refgrad.reverse.edits import Edits
from refgrad.reverse.emission import Emission
from refgrad.reverse.primitives import Primitives
from refgrad.reverse.values import Values, tensor_type
from refgrad.tables.conventions import DEFAULT, Conventions
from refgrad.tables.dialects import DIALECTS, Dialect
from refgrad.tables.schemas import find_schema
from refgrad.tables.torch_functions import exported_function


class BasicEmitter(Operators):
    """One method per operator, the primitives (`op.grad`), and what is known of a value.

    `values` holds what is known of values, `emission` what is emitted, `edits` what forward nodes do besides. `conventions`
    are the options of `refgrad.gradient`, `repeated` the names of the nodes with graphs that store their states alone.
    """

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

        :param needed: the values whose adjoint is asked for; None: any.
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
        self.declared: dict[str, str] = {}  # emitted values whose type is written down: that of another
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
        made = self.emission.add(op_type, domain, inputs, outputs, attributes, optional_outputs)
        return made[0] if outputs == 1 else made

    def emit_all(
        self, op_type: str, domain: str, inputs: Sequence[Argument], outputs: int, attributes: dict[str, Any]
    ) -> tuple[str, ...]:
        """Add a node; the names of its outputs."""
        return self.emission.add(op_type, domain, inputs, outputs, attributes)

    def every_adjoint(
        self, op_type: str, inputs: Sequence[Argument], primals: Sequence[str | None], **attributes: Any
    ) -> tuple[str, ...]:
        """A node of ONNX Runtime's domain that returns the adjoints of `primals` and writes to all of them: all have names."""
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
        name = self.fresh(f"{self._forward.name}_{op_type}")
        self.edits.insert(helper.make_node(op_type, inputs, [name], name=name), before=self._forward)
        return self.values.add(name, self.type(inputs[0]))

    def fresh(self, name: str) -> str:
        """`name`, or the next free one."""
        return self.emission.fresh(name)

    # What is known of a value

    def is_needed(self, value: str) -> bool:
        """True if the adjoint of `value` is asked for: for lowerings, a rule gives them all."""
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
        """True if the adjoint of `value` is a sequence."""
        return self.values.is_sequence(value)

    def assume(self, value: str, shape: Shape) -> None:
        """Record the shape of an emitted value, so that what is emitted next may rely on it."""
        self.values.shapes[value] = shape

    def describe(self, value: str, like: str) -> None:
        """Record that `value` has the type and shape of `like`: an adjoint has the type and shape of its primal."""
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
            return self.emission.written(value)
        return self.emission.number(value, self.type(like))

    def as_type(self, value: str, kind: int) -> str:
        """`value` as elements of type `kind`; itself where it has that type."""
        return value if self.type(value) == kind else self.Cast(value, to=kind)

    def full(self, shape: Argument, value: float, like: str) -> str:
        """A tensor of the given shape filled with `value`, of the type of `like`, or of its adjoint where it is quantised.

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
