"""The emitted nodes of the model's opset, the constants, and the names that are taken."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
from onnx import GraphProto, TensorProto, helper, numpy_helper

from refgrad import traits
from refgrad.forward.misuse import no_such_setting, no_type, not_a_value, numbers, numbers_alone, refuse_parts
from refgrad.forward.operators import Argument
from refgrad.protos.reading import CONSTANT
from refgrad.protos.types import FLOATS
from refgrad.protos.walk import captured, fresh
from refgrad.reverse.emitted import NO_SETTINGS, AttributeSet, EmittedNode, needed_emitted, write
from refgrad.reverse.values import Values
from refgrad.tables.element_types import element_types

# The element type of a node's result where it is not that of its first operand.
_ARRAYS = np.ndarray, np.generic
_LONGEST = 1000  # characters of a node's name that its derivative repeats
_OTHER_TYPE = traits.BOOLEAN | traits.COUNTING | {"Cast", "ConstantOfShape", "Where", "CastLike", "OneHot"}


class Emission:
    """The nodes of a gradient graph in order. The same pure node is never added twice.

    `made` has the node of each value that they compute, `constants` the initializers that they read, `taken` every name that
    is not free.
    """

    def __init__(self, values: Values, taken: set[str]) -> None:
        self.values = values
        self.taken = taken
        self.nodes: list[EmittedNode] = []
        self.constants: dict[str, TensorProto] = {}
        self.made: dict[str, EmittedNode] = {}
        self.owner = "", ""
        self._reads: Sequence[str] = ()  # the inputs of the forward node
        self._types = values.types
        self._scope, self._count = "", 0
        self._seen: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._settings: dict[tuple[Any, ...], AttributeSet] = {}
        self._by_content: dict[tuple[Any, ...], str] = {}
        self._numbers: dict[tuple[str, int], str] = {}  # constants by how the rule wrote them

    def enter(self, rule: str, node: str, reads: Sequence[str] = ()) -> None:
        """Assign the nodes that follow to `rule` and to the forward node called `node`, whose inputs are `reads`."""
        if len(node) > _LONGEST:  # what is emitted repeats it many times
            node = f"{node[:_LONGEST]}..."
        self.owner, self._scope, self._count = (rule, node), f"{node}_Grad/", 0
        self._reads = reads

    @property
    def rule(self) -> str:
        """The operator whose rule emits."""
        return self.owner[0]

    @property
    def node(self) -> str:
        """The name of the forward node that what is emitted belongs to."""
        return self.owner[1]

    def fresh(self, name: str) -> str:
        """`name`, or the next free one."""
        return fresh(name, self.taken)

    def add(
        self,
        op_type: str,
        domain: str,
        inputs: Sequence[Argument],
        outputs: int,
        attributes: dict[str, Any],
        optional_outputs: bool = False,
    ) -> tuple[str, ...]:
        """Add a node, unless there is the same one; the names of its outputs. Attributes that are None are left out."""
        taken, types = self.taken, self._types
        try:
            named = taken.issuperset(inputs)
        except TypeError:  # a list, or an array
            named = False
        names = cast(tuple[str, ...], tuple(inputs)) if named else self._names(op_type, inputs)
        settings = self._settings_of(op_type, domain, attributes) if attributes else NO_SETTINGS
        key = op_type, domain, names, outputs, settings
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
        node = EmittedNode(op_type, domain, names, made, settings, name, self.owner, optional_outputs)
        for value in made:
            self.made[value] = node
        self.nodes.append(node)
        if op_type in _OTHER_TYPE:
            kind = self._result_type(op_type, names, attributes)
        else:
            kind = types.get(names[0]) if names else None
        if outputs > 1:
            given = [types.get(name, 0) for name in names]
            kinds = element_types(op_type, domain, None, given, settings.attributes, outputs)
            types.update({name: found for name, other in zip(made, kinds, strict=True) if (found := other or kind)})
        elif kind is not None:
            types[made[0]] = kind
        return made

    def _settings_of(self, op_type: str, domain: str, attributes: Mapping[str, Any]) -> AttributeSet:
        content = tuple([(name, v.__class__, _written(v)) for name, v in attributes.items() if v is not None])
        if not content:
            return NO_SETTINGS
        settings = self._settings.get(content)
        if settings is None:
            kept = {name: value for name, value in attributes.items() if value is not None}
            for name, value in kept.items():
                if (error := no_such_setting(self, op_type, domain, name, value)) is not None:
                    raise error
            read = tuple([n for g in kept.values() if isinstance(g, GraphProto) for n in captured(g)])
            settings = self._settings[content] = AttributeSet(kept, read)
        return settings

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
                names.append(self.written(argument))
        while names and not names[-1]:
            names.pop()
        return tuple(names)

    def _kind_beside(self, op_type: str, inputs: Sequence[Argument]) -> int:
        """The type of a Python number: the type of the last operand that is a value and not a bool.

        The numbers of a Where of two numbers have the type of the forward node's float inputs, if all have the same.
        """
        for argument in reversed(inputs):
            if isinstance(argument, str) and self._types.get(argument, TensorProto.BOOL) != TensorProto.BOOL:
                return self._types[argument]
        if op_type == "Where" and isinstance(inputs[0], str) and not any(isinstance(part, str) for part in inputs[1:]):
            floats = {kind for name in self._reads if (kind := self._types.get(name)) in FLOATS}
            if len(floats) == 1 and all(name in self._types for name in self._reads if name):
                return floats.pop()
        raise numbers_alone(self, op_type, inputs)

    def _result_type(self, op_type: str, names: tuple[str, ...], attributes: Mapping[str, Any]) -> int | None:
        if op_type in traits.BOOLEAN:
            return TensorProto.BOOL
        if op_type in traits.COUNTING:
            return TensorProto.INT64
        if op_type == "Cast":
            return int(attributes["to"])
        if op_type == "ConstantOfShape":
            return int(attributes["value"].data_type) if "value" in attributes else TensorProto.FLOAT
        if op_type in ("Where", "CastLike"):
            return self._types.get(names[1])
        return self._types.get(names[2])  # OneHot

    def forget(self, op_type: str, *inputs: str) -> None:
        """Let the next node of this operator with these inputs be another one, even where there is the same."""
        self._seen.pop((op_type, "", inputs, 1, NO_SETTINGS), None)

    def written(self, value: float | Sequence[int] | np.ndarray | np.generic) -> str:
        """The constant of a rule's literal that has a type of its own: an array, a NumPy scalar, a bool or integers (int64).

        :raises RuleError: it is a Python float, or a list with floats: they take their type from another value. Or a list
            has names of values.
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
        """A scalar, or a list along one axis, as a constant of element type `kind`."""
        key = repr(value), kind
        if key not in self._numbers:
            array, value = numbers(self, value, helper.tensor_dtype_to_np_dtype(kind)), np.asarray(value).tolist()
            exact = repr(value) if isinstance(value, float) and math.isfinite(value) and float(array) != value else ""
            self._numbers[key] = self.constant(array, exact)
        return self._numbers[key]

    def constant(self, array: np.ndarray, exact: str = "") -> str:
        """An array as a constant; `exact` is the number that it rounds."""
        key = array.dtype, array.shape, array.tobytes(), exact
        name = self._by_content.get(key)
        if name is None:
            text = "_".join(map(str, array.ravel()[:6])) + ("_etc" if array.size > 6 else "")
            name = self.fresh(f"{_type_name(array.dtype)}_{text}")
            self.constants[name] = numpy_helper.from_array(array, name)
            self.constants[name].metadata_props.add(key=CONSTANT, value=exact)
            self._by_content[key] = name
            self.values.arrays[name] = array
            self.values.record(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        return name

    def subgraph(self, function: Callable[..., Sequence[str]], *inputs: str) -> GraphProto:
        """The graph of what `function` adds: it gets a value for every one of `inputs` and returns the graph's outputs.

        :param inputs: values outside, each of the element type of the graph's input. Of its shape nothing is known: a
            scan input has one axis less, and a state may grow. What `function` assumes of its results is written down:
            ONNX Runtime runs no Scan without the rank of every output.
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


_type_name = cache(operator.attrgetter("name"))  # NumPy puts a type's name together each time


def _written(value: Any) -> Any:
    """A key that is equal for attributes with the same protobuf. Equal values may differ in it: 0.0 and −0.0, [0] and [0.0]."""
    kind = value.__class__
    if kind is int or kind is str:
        return value
    if isinstance(value, TensorProto | GraphProto):
        return value.SerializeToString()
    return repr(value.tolist() if isinstance(value, np.ndarray) else value)  # an array's text leaves out its middle
