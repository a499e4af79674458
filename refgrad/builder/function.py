"""The emitter of function bodies and of training steps: as `op` of rules, but it knows only types and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from onnx import GraphProto, TensorProto, ValueInfoProto, helper, numpy_helper

from refgrad.builder.misuse import numbers
from refgrad.builder.nodes import EmittedNode, NodeBuilder
from refgrad.builder.operators import Argument, Operators
from refgrad.protos.metadata import CONSTANT
from refgrad.protos.types import SIXTEEN_BIT, Shape, Type
from refgrad.tables.element_types import element_types, has_own_type


class FunctionEmitter(Operators):
    """Adds nodes of ai.onnx to `builder`: `op.Add(x, y)` adds one and returns the name of its result.

    An argument is a value's name, a number (of the type of the last operand that is not a condition), a list of integers, an
    array, or None. `types` has what is known of the operator's inputs. In a function the results are numbered and constants
    are nodes: it has no initializers.
    """

    def __init__(self, opset: int, operator: str, node: str, prefix: str = "v") -> None:
        """Emit the body of `operator` for the node called `node`, in ai.onnx operators of `opset`.

        :param prefix: what the names of its values begin with.
        """
        self.opset = opset
        self.builder = NodeBuilder(set())
        self._owner = operator, node
        self._prefix = prefix
        self._in_graph = False
        self.types: dict[str, Type] = {}
        self.shapes: dict[str, Shape] = {}  # of the inputs that have a known one
        self.arrays: dict[str, np.ndarray] = {}  # the inputs that are constants, as far as they are small

    @classmethod
    def into_graph(cls, opset: int, prefix: str, taken: set[str]) -> Self:
        """An emitter of nodes for a graph in which the names `taken` are not free. Constants are initializers.

        :param prefix: the beginning of the names of its values; messages call the emitter so.
        """
        op = cls(opset, prefix, prefix, prefix)
        op.builder, op._in_graph = NodeBuilder(taken), True
        return op

    @property
    def nodes(self) -> list[EmittedNode]:
        """The nodes so far."""
        return self.builder.nodes

    @property
    def rule(self) -> str:
        """The operator whose body it is: for messages."""
        return self._owner[0]

    @property
    def node(self) -> str:
        """The name of the node that the body stands for: for messages."""
        return self._owner[1]

    def emit(
        self,
        op_type: str,
        domain: str,
        inputs: Sequence[Argument],
        outputs: int,
        attributes: Mapping[str, Any],
        optional_outputs: bool = False,
    ) -> Any:
        """Add a node; its result's name, or a tuple of names where it has several. Attributes that are None are left out."""
        if op_type == "Constant" and self._in_graph:
            return self._initializer(attributes["value"])
        names = [self._name(x, inputs) for x in inputs]
        while names and not names[-1]:
            names.pop()
        if self._in_graph:
            made = tuple(self.builder.fresh(f"{self._prefix}/{op_type}") for _ in range(outputs))
        else:
            made = tuple(f"{self._prefix}_{len(self.nodes)}_{k}" for k in range(outputs))
        self.builder.append(
            op_type, names, made, made[0] if self._in_graph else "", domain=domain, attributes=attributes
        )
        given = [self.type(name) for name in names]
        settings = {name: value for name, value in attributes.items() if value is not None}
        first = given[0] if given and not has_own_type(op_type, domain) else 0
        kinds = element_types(op_type, domain, None, given, settings, outputs)
        self.types.update(
            {name: (kind or first, None) for name, kind in zip(made, kinds, strict=True) if kind or first}
        )
        return made[0] if outputs == 1 else made

    def _initializer(self, tensor: TensorProto) -> str:
        name = self.builder.initializer(tensor, f"{self._prefix}/constant")
        self.types[name] = tensor.data_type, len(tensor.dims)
        return name

    def _name(self, value: Argument, beside: Sequence[Argument]) -> str:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            operands = [x for x in beside if isinstance(x, str) and self.type(x) != TensorProto.BOOL]
            return self.const(value, like=operands[-1])
        return self.const(value)

    def const(self, value: float | Sequence[int] | np.ndarray | np.generic, like: str | None = None) -> str:
        """A constant: an array with its own type, else of the type of `like`, else of the NumPy scalar's, bool, or int64."""
        kind = TensorProto.INT64 if like is None else self.type(like) or TensorProto.FLOAT
        typed = isinstance(value, np.ndarray) or (like is None and isinstance(value, np.generic | bool))
        array = np.asarray(value) if typed else numbers(self, value, helper.tensor_dtype_to_np_dtype(kind))
        tensor = numpy_helper.from_array(array)
        if isinstance(value, int | float) and float(array) != value:
            tensor.metadata_props.add(key=CONSTANT, value=repr(float(value)))
        constant = self.emit("Constant", "", (), 1, {"value": tensor})
        return str(constant if like is None or self.type(like) else self.CastLike(constant, like))

    def rank(self, value: str) -> int | None:
        """The rank of an input, None where it is unknown."""
        return self.types.get(value, (0, None))[1]

    def type(self, value: str) -> int:
        """The element type of a value, 0 where it is unknown."""
        return self.types.get(value, (0, None))[0]

    def shape(self, value: str) -> Shape | None:
        """The shape of an input as far as the model says it, None where it does not."""
        return self.shapes.get(value)

    def constant(self, value: str | None) -> np.ndarray | None:
        """An input that is a constant, else None."""
        return None if value is None else self.arrays.get(value)

    def reduce(self, op_type: str, data: str, axes: Sequence[int]) -> str:
        """A reduction that keeps its axes, which are an attribute before opset 18, and for ReduceSum before opset 13."""
        if self.opset >= (13 if op_type == "ReduceSum" else 18):
            return str(self.emit(op_type, "", (data, axes), 1, {}))
        return str(self.emit(op_type, "", (data,), 1, {"axes": axes}))

    def scan(
        self,
        step: Callable[[FunctionEmitter, list[str], list[str]], Sequence[str]],
        states: Sequence[str],
        slices: Sequence[str],
        *,
        backward: bool = False,
    ) -> tuple[str, ...]:
        """The states after all steps, and what the steps stack along a new first axis: a Scan along the first axis of `slices`.

        :param step: emits a step into the emitter that it is given, from the states and the slices, and returns the new states,
            and after them what is stacked. It may read the values outside.
        :param backward: begin with the last slices; what is stacked has their order either way.
        """
        prefix = f"{self._prefix}_{len(self.nodes)}"
        inner = FunctionEmitter(self.opset, *self._owner, f"{prefix}_step")
        inner.types.update(self.types)
        read = [f"{prefix}_in_{k}" for k in range(len(states) + len(slices))]
        for position, (name, value) in enumerate(zip(read, (*states, *slices), strict=True)):
            kind, rank = self.types.get(value, (0, None))
            inner.types[name] = kind, rank if position < len(states) or rank is None else rank - 1
        made = [str(inner.Identity(value)) for value in step(inner, read[: len(states)], read[len(states) :])]
        stacked = made[len(states) :]
        known = [
            *(inner.types[state] for state in read[: len(states)]),
            *((inner.type(name), None) for name in stacked),
        ]
        graph = GraphProto(name="step", node=inner.builder.take())
        graph.input.extend(_formal(name, inner.types[name]) for name in read)
        graph.output.extend(_formal(name, of) for name, of in zip(made, known, strict=True))
        attributes: dict[str, Any] = {"body": graph, "num_scan_inputs": len(slices)}
        if backward:
            attributes["scan_input_directions"] = [1] * len(slices)
            attributes["scan_output_directions"] = [1] * len(stacked) or None
        results = self.emit("Scan", "", (*states, *slices), len(made), attributes)
        results = results if isinstance(results, tuple) else (results,)
        self.types.update(zip(results, known, strict=True))
        return results

    def wide(self, x: str) -> str:
        """`x`, as float where it has 16 bits: runtimes compute it so, and round once."""
        if self.type(x) not in SIXTEEN_BIT:
            return x
        cast = self.emit("Cast", "", (x,), 1, {"to": TensorProto.FLOAT})
        self.types[cast] = TensorProto.FLOAT, self.rank(x)
        return str(cast)

    def up_to(self, count: str) -> str:
        """0, 1, ..., count − 1 as int64; `count` has the shape (1)."""
        return str(self.Range(self.const(np.array(0)), self.Squeeze(count, [0]), self.const(np.array(1))))

    def ranked(self, value: str, rank: int) -> str:
        """`value`, of which it is known that it has `rank` axes."""
        self.types[value] = self.type(value), rank
        return value


def _formal(name: str, known: Type) -> ValueInfoProto:
    """An input or an output of the body of a Scan; ONNX Runtime needs the ranks of the outputs."""
    kind, rank = known
    if not kind:
        return ValueInfoProto(name=name)
    return helper.make_tensor_value_info(name, kind, None if rank is None else [None] * rank)
