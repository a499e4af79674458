"""The builder of gradient graphs. It adds each pure node and each constant once, and infers the types of their values."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
from onnx import GraphProto, TensorProto, helper

from refgrad.builder.misuse import no_such_setting, no_type, not_a_value, numbers, numbers_alone, refuse_parts
from refgrad.builder.nodes import (
    NO_ATTRIBUTES,
    AttributeSet,
    EmittedNode,
    NodeBuilder,
    constant_tensor,
    needed_emitted,
    write,
)
from refgrad.builder.operators import Argument
from refgrad.builder.values import Values
from refgrad.protos.traverse import fresh
from refgrad.protos.types import FLOATS
from refgrad.tables.element_types import element_types, has_own_type

_ARRAYS = np.ndarray, np.generic
_LONGEST = 1000  # the most characters of a forward node's name that the names of its gradient nodes repeat


class Emission(NodeBuilder):
    """The builder of a gradient graph. The same pure node is never added twice.

    `made` has the node that computes each value, by the value's name. `values` has the known types, shapes and contents.
    """

    def __init__(self, values: Values, taken: set[str]) -> None:
        super().__init__(taken)
        self.values = values
        self.made: dict[str, EmittedNode] = {}
        self.owner = "", ""
        self._reads: Sequence[str] = ()  # the inputs of the forward node
        self._types = values.types
        self._scope, self._count = "", 0
        self._seen: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._attribute_sets: dict[tuple[Any, ...], AttributeSet] = {}
        self._numbers: dict[tuple[str, int], str] = {}  # constants, by the repr of the literal and the element type

    def enter(self, rule: str, node: str, reads: Sequence[str] = ()) -> None:
        """Assign the nodes that follow to `rule` and to the forward node called `node`, whose inputs are `reads`."""
        if len(node) > _LONGEST:  # the name of each emitted node repeats this name
            node = f"{node[:_LONGEST]}..."
        self.owner, self._scope, self._count = (rule, node), f"{node}_Grad/", 0
        self._reads = reads

    @property
    def rule(self) -> str:
        """The operator whose rule adds nodes now."""
        return self.owner[0]

    @property
    def node(self) -> str:
        """The name of the forward node whose gradient is built now."""
        return self.owner[1]

    def emit(
        self,
        op_type: str,
        domain: str,
        inputs: Sequence[Argument],
        outputs: int,
        attributes: dict[str, Any],
        optional_outputs: bool = False,
    ) -> tuple[str, ...]:
        """Add a node, unless the graph has the same node already. Return the names of its outputs.

        Attributes that are None are left out.
        """
        taken, types = self.taken, self._types
        try:
            named = taken.issuperset(inputs)
        except TypeError:  # an input is a list or an array, which has no hash
            named = False
        names = cast(tuple[str, ...], tuple(inputs)) if named else self._names(op_type, inputs)
        attribute_set = self._attribute_set(op_type, domain, attributes) if attributes else NO_ATTRIBUTES
        key = op_type, domain, names, outputs, attribute_set
        made = self._seen.get(key)
        if made is not None:
            return made
        name = f"{self._scope}{op_type}_{self._count}"
        self._count += 1
        if name in taken:
            name = fresh(name, taken)
        else:
            taken.add(name)
        made = (name,) if outputs == 1 else tuple([fresh(f"{name}_{k}", taken) for k in range(outputs)])
        self._seen[key] = made
        node = EmittedNode(op_type, domain, names, made, attribute_set, name, self.owner, optional_outputs)
        for value in made:
            self.made[value] = node
        self.nodes.append(node)
        own = has_own_type(op_type, domain)
        kind = types.get(names[0]) if names and not own else None
        if outputs > 1 or own:
            given = [types.get(name, 0) for name in names]
            kinds = element_types(op_type, domain, None, given, attribute_set.by_name, outputs)
            types.update({name: found for name, other in zip(made, kinds, strict=True) if (found := other or kind)})
        elif kind is not None:
            types[made[0]] = kind
        return made

    def _attribute_set(self, op_type: str, domain: str, attributes: Mapping[str, Any]) -> AttributeSet:
        content = tuple([(name, v.__class__, _key(v)) for name, v in attributes.items() if v is not None])
        if not content:
            return NO_ATTRIBUTES
        attribute_set = self._attribute_sets.get(content)
        if attribute_set is None:
            present = {name: value for name, value in attributes.items() if value is not None}
            for name, value in present.items():
                if (error := no_such_setting(self, op_type, domain, name, value)) is not None:
                    raise error
            attribute_set = self._attribute_sets[content] = AttributeSet.of(present)
        return attribute_set

    def _names(self, op_type: str, inputs: Sequence[Argument]) -> tuple[str, ...]:
        names: list[str] = []
        for argument in inputs:
            if isinstance(argument, str):
                if argument not in self.taken and argument:
                    raise not_a_value(self, argument, self.taken)
                names.append(argument)
            elif argument is None:
                names.append("")
            elif isinstance(argument, int | float) and not isinstance(argument, bool):
                names.append(self.number(argument, self._kind_beside(op_type, inputs)))
            else:
                names.append(self.literal(argument))
        while names and not names[-1]:
            names.pop()
        return tuple(names)

    def _kind_beside(self, op_type: str, inputs: Sequence[Argument]) -> int:
        """The type for a Python number among `inputs`: the type of the last input that is a value, except booleans.

        If both branches of a Where are numbers, they get the type of the forward node's float inputs, which must all have
        one type.
        """
        for argument in reversed(inputs):
            if isinstance(argument, str) and self._types.get(argument, TensorProto.BOOL) != TensorProto.BOOL:
                return self._types[argument]
        if op_type == "Where" and isinstance(inputs[0], str) and not any(isinstance(part, str) for part in inputs[1:]):
            floats = {kind for name in self._reads if (kind := self._types.get(name)) in FLOATS}
            if len(floats) == 1 and all(name in self._types for name in self._reads if name):
                return floats.pop()
        raise numbers_alone(self, op_type, inputs)

    def forget(self, op_type: str, *inputs: str) -> None:
        """Make the next `emit` of this operator on `inputs` add a node, even if the graph has the same node already."""
        self._seen.pop((op_type, "", inputs, 1, NO_ATTRIBUTES), None)

    def literal(self, value: float | Sequence[int] | np.ndarray | np.generic) -> str:
        """The constant for a literal that has a type of its own: an array, a NumPy scalar, a bool or integers (int64).

        :raises RuleError: the literal is a Python float or a list with floats, which get their type from another value; or
            it is a list with names of values.
        """
        if isinstance(value, _ARRAYS):
            return self.constant(np.asarray(value))
        key = repr(value), int(TensorProto.UNDEFINED)
        if key not in self._numbers:
            if isinstance(value, list | tuple):
                refuse_parts(self, value)
            array = np.asarray(value)
            if array.dtype.kind == "f" and array.size:
                raise no_type(self, value)
            is_bool = array.dtype.kind == "b"
            self._numbers[key] = self.constant(array) if is_bool else self.number(value, TensorProto.INT64)
        return self._numbers[key]

    def number(self, value: float | Sequence[int] | np.generic, kind: int) -> str:
        """The constant of element type `kind` for a number, or for a list of numbers, which becomes a vector."""
        key = repr(value), kind
        if key not in self._numbers:
            array, value = numbers(self, value, helper.tensor_dtype_to_np_dtype(kind)), np.asarray(value).tolist()
            exact = repr(value) if isinstance(value, float) and math.isfinite(value) and float(array) != value else ""
            self._numbers[key] = self.constant(array, exact)
        return self._numbers[key]

    def constant(self, array: np.ndarray, exact: str = "") -> str:
        """The constant for an array. If the array is a rounded number, `exact` is the text of the number before rounding."""
        text = "_".join(map(str, array.ravel()[:6])) + ("_etc" if array.size > 6 else "")
        name = self.initializer(constant_tensor(array, exact), f"{_type_name(array.dtype)}_{text}")
        if name not in self.values.arrays:
            self.values.arrays[name] = array
            self.values.record(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        return name

    def subgraph(self, function: Callable[..., Sequence[str]], *inputs: str) -> GraphProto:
        """A graph of the nodes that `function` adds, for an attribute of a control-flow node.

        :param function: gets the names of the graph's inputs, one for each of `inputs`, and returns the names of its outputs.
            Shapes that it assumes for outputs are declared in the graph: ONNX Runtime runs a Scan only if the rank of every
            output is known.
        :param inputs: values outside the graph. Each input of the graph has the element type of one of them. Its shape is
            left open: an input that Scan slices has one axis less, and a state may grow.
        """
        rule = self.owner[0]
        outer = self.nodes, self._seen
        self.nodes, self._seen = [], dict(self._seen)
        values = self.values
        reads = [self.fresh(f"{self._scope}{rule}_in_{k}") for k in range(len(inputs))]
        for read, value in zip(reads, inputs, strict=True):
            values.record(read, values.type(value))
        results = function(*reads)
        graph = GraphProto(name=self.fresh(f"{self._scope}{rule}_body"))
        graph.input.extend(helper.make_tensor_value_info(read, values.type(read), None) for read in reads)
        for value in results:
            graph.output.append(helper.make_value_info(value, values.adjoint_proto(value)))
        write(graph, needed_emitted(self.nodes, set(results)))
        self.nodes, self._seen = outer
        return graph


_type_name = cache(operator.attrgetter("name"))  # cached, because NumPy builds the name of a type anew at each call


def _key(value: Any) -> Any:
    """A key that is equal for two attribute values if they have the same protobuf.

    Values that are equal in Python may have different protobufs, and then different keys: 0.0 and −0.0, [0] and [0.0].
    """
    kind = value.__class__
    if kind is int or kind is str:
        return value
    if isinstance(value, TensorProto | GraphProto):
        return value.SerializeToString()
    return repr(value.tolist() if isinstance(value, np.ndarray) else value)  # repr of an array leaves out its middle
