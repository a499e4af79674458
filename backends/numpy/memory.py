"""Count what a run holds, and predict what its next node needs: `max_memory` refuses before memory is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from sys import getsizeof
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

from refgrad.backends.numpy.abstract import AbstractArray
from refgrad.errors import BackendError, InvalidModelError
from refgrad.model import native
from refgrad.sizes import readable

TensorType: TypeAlias = "tuple[np.dtype[Any], tuple[int, ...]]"
Predict: TypeAlias = Callable[[Sequence[Any]], list[TensorType]]
Progress: TypeAlias = Callable[[int, int, str], None]

ARRAYS = (np.ndarray, AbstractArray)
OBJECT = 128  # bytes of an array without its elements
_SMALL = 64  # elements of an integer input that may say how large an output is


class Watch:
    """Counts the bytes that a run holds: each array once, however many views it has.

    :raises BackendError: from `reserve`, where a node needs more than `limit` leaves.
    """

    def __init__(self, limit: int, held: Iterable[Any]) -> None:
        self.limit = limit
        self.total = 0
        self._due = 0  # the bytes that the outputs of the node in progress need
        self._holders: dict[int, tuple[int, int]] = {}  # by id: how often it is held, and its size
        for value in held:
            self._hold(value)

    def reserve(self, label: str, predict: Predict, inputs: Sequence[Any]) -> None:
        """Refuse the node called `label` if the outputs that `predict` expects do not fit beside everything that is held."""
        needed = self._due = nbytes(predict(inputs))
        if self.total + needed > self.limit:
            raise BackendError(
                f"{label} needs {readable(needed)} for its outputs on inputs {', '.join(map(summary, inputs))}. "
                f"{readable(self.total)} are in use before it, together {readable(self.total + needed)}, and max_memory is "
                f"{readable(self.limit)}. Give it {self.total + needed} or more, or feed less at a time."
            )

    def replace(self, label: str, results: Iterable[Any], dead: Iterable[Any]) -> None:
        """Count the results of the node called `label`, and stop counting the values that are dead after it."""
        self._due = 0
        for value in results:
            self._hold(value)
        for value in dead:
            self._drop(value)
        if self.total > self.limit:
            raise BackendError(
                f"{label} left {readable(self.total)} in memory, and max_memory is {readable(self.limit)}. "
                f"Give it {self.total} or more, or feed less at a time."
            )

    def hold(self, values: Iterable[Any]) -> None:
        """Count `values`."""
        for value in values:
            self._hold(value)

    def check(self, more: int = 0) -> None:
        """Refuse to go on if `more` bytes do not fit beside the held values and the outputs of the node in progress.

        :raises MemoryError: they do not fit; the plan names the node.
        """
        if more:
            more += self._due
        if self.total + more > self.limit:
            raise MemoryError(
                f"it holds {readable(self.total + more)} before its end, and max_memory is {readable(self.limit)}"
            )

    def release(self, values: Iterable[Any]) -> None:
        """Stop counting `values`."""
        for value in values:
            self._drop(value)

    def _hold(self, value: Any) -> None:
        for part in _parts(value):
            holders, size = self._holders.get(id(part), (0, 0))
            if not holders:
                size = _size(part)
                self.total += size
            self._holders[id(part)] = holders + 1, size

    def _drop(self, value: Any) -> None:
        for part in _parts(value):
            holders, size = self._holders.get(id(part), (0, 0))
            if holders > 1:
                self._holders[id(part)] = holders - 1, size
            elif holders:
                del self._holders[id(part)]
                self.total -= size


# The watch of the run in progress in this thread, for the plans of subgraphs and function bodies within it.
WATCH: ContextVar[Watch | None] = ContextVar("WATCH", default=None)


def need(size: float) -> None:
    """Say that a kernel is about to take `size` bytes beside its inputs and its predicted outputs.

    A kernel says so of what may be larger than a few times these.

    :raises MemoryError: they do not fit beside what the run holds; the plan names the node.
    """
    watch = WATCH.get()
    if watch is not None:
        watch.check(math.ceil(size))


class Rounds:
    """The values that a loop keeps from round to round, counted by the watch of the run. Use it in a `with` statement."""

    def __init__(self, state: Sequence[Any] = ()) -> None:
        self._watch = WATCH.get()
        self._state: Sequence[Any] = ()
        self._kept: list[Any] = []
        self.turn(state)

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.release((*self._state, *self._kept))

    def turn(self, state: Sequence[Any], rows: Sequence[Any] = ()) -> None:
        """Hold `state` in place of the previous one, and `rows` until the end."""
        if self._watch is not None:
            self._watch.hold((*state, *rows))
            self._watch.release(self._state)
            self._state = tuple(state)
            self._kept += rows
            self._watch.check()

    def reserve(self, size: int) -> None:
        """Refuse an array of `size` bytes that does not fit."""
        if self._watch is not None:
            self._watch.check(size)


def owner(array: Any) -> Any:
    """Return the array whose memory `array` views; `array` itself if it is not a view."""
    while isinstance(array.base, ARRAYS):
        array = array.base
    return array


def _parts(value: Any) -> list[Any]:
    """The arrays that own the memory of a value, and the lists that hold them."""
    if isinstance(value, ARRAYS):
        return [owner(value)]
    return [value, *(part for item in value for part in _parts(item))] if isinstance(value, list) else []


def _size(part: Any) -> int:
    """The bytes of an array, with its strings, or of a list, with the objects in it that stand for arrays."""
    if isinstance(part, list):
        return OBJECT * len(part)
    size = int(part.nbytes)
    return size + sum(map(getsizeof, part.flat)) if part.dtype == object else size


def nbytes(types: Iterable[TensorType]) -> int:
    """Return the size of arrays of these dtypes and shapes."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in types)


def inferred(
    node: onnx.NodeProto, schema: Any, opsets: Mapping[str, int], inputs: Sequence[Any]
) -> list[TensorType] | None:
    """Return the dtype and shape of each output, as onnx infers them; None where it cannot, or where not all are tensors.

    :raises BackendError: an attribute has a value that onnx would not survive.
    """
    if schema is None or not all(x is None or isinstance(x, np.ndarray | np.generic) for x in inputs):
        return None
    given = {name: np.asarray(x) for name, x in zip(node.input, inputs, strict=False) if name and x is not None}
    types = {
        name: helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in given.items()
    }
    data = {name: numpy_helper.from_array(x) for name, x in given.items() if x.dtype.kind in "iuf" and x.size <= _SMALL}
    try:
        outputs = native.infer_node_outputs(schema, node, types, data, opsets)
    except InvalidModelError as error:  # a run could make outputs of any size
        raise BackendError(str(error)) from error
    except native.InferenceError:
        return None  # the run reports the fault of the node
    found = []
    for value in outputs.values():
        tensor = value.tensor_type
        if (
            not tensor.elem_type
            or not tensor.HasField("shape")
            or not all(dim.HasField("dim_value") for dim in tensor.shape.dim)
        ):
            return None
        shape = tuple(dim.dim_value for dim in tensor.shape.dim)
        found.append((helper.tensor_dtype_to_np_dtype(tensor.elem_type), shape))
    return found


def summary(value: Any) -> str:
    """Return what messages write for a value: its dtype and shape."""
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype}{list(value.shape)}"
    return "none" if value is None else type(value).__name__
