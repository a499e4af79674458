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
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from refgrad.reverse import containers
from refgrad.reverse.basic import BasicEmitter


class Emitter(BasicEmitter):
    """The emitter of rules and lowerings: `BasicEmitter` with shorthands that are built from operators."""

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
        """Zeros of the shape and type of `value`; of an optional, of what it holds."""
        return self.full_like(value, 0.0)

    def full_like(self, value: str, number: float) -> str:
        """`number` wherever the adjoint of `value` has an element; the adjoint of an empty optional has no elements."""
        return containers.full_like(self, value, number)

    def sum(self, parts: Sequence[str], like: str) -> str:
        """The sum of adjoints of `like`; sequences are added element by element.

        Of two it is an Add, which ONNX Runtime computes with all threads; its builder writes a Sum.
        """
        if self.is_sequence(like):
            return containers.total(self, parts, like)
        return str(self.Add(*parts) if len(parts) == 2 and not self.dialect.follows_onnxruntime else self.Sum(*parts))
