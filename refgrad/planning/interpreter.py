"""Prediction of the memory that a run on the interpreter in NumPy takes.

The prediction runs the interpreter's own plan on arrays without data. The plan folds constants, overwrites dead inputs,
copies views and drops values as in a real run. Each kernel declares the memory that it takes: see `abstract` in
`backends/numpy/registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from onnx import helper

from refgrad import traits
from refgrad.backends.numpy import registry
from refgrad.backends.numpy.abstract import AbstractArray, without_data
from refgrad.backends.numpy.binding import bound_by
from refgrad.backends.numpy.memory import OBJECT, WATCH, TensorType, Watch, owner
from refgrad.backends.numpy.plan import PlannedGraph, PlanStep
from refgrad.backends.numpy.registry import Kernel, in_tuple, reuse
from refgrad.planning.program import CostStep, CostTensor, Program, fitting

# Operators whose results have the memory layout of their operands. The kernels of the other element-wise operators use
# `select` of `backends/numpy/kernels/arithmetic.py`, whose large results are contiguous.
_ELEMENTWISE = (traits.ELEMENTWISE | {"BatchNormalization", "LayerNormalization", "LogSoftmax", "Softmax"}) - {
    *("Elu", "PRelu", "Selu", "Shrink", "ThresholdedRelu", "Where")
}
_UNKNOWN = np.dtype("V0")  # stands for an unknown element type; a value of this type counts as 0 bytes


@dataclass(frozen=True, slots=True)
class InterpreterUsage:
    """The bytes that a run on the interpreter takes.

    `alive` has one number per node: the bytes that are alive while the node computes, or 0 if the node does not run. `peak`
    is the most that is alive at once. `held` is the bytes of the results.
    """

    alive: tuple[int, ...]
    peak: int
    held: int


def usage(program: Program) -> InterpreterUsage:
    """The bytes that a run of `program` takes, node by node. Weights and feeds are not counted."""
    constants = {name: _array(program.types.get(name)) for name in program.constants}
    steps = []
    for number, step in enumerate(program.steps):
        if step.key == ("", "Constant"):
            constants |= {name: _array(program.types.get(name)) for name in step.outputs}
        else:
            steps.append(_planned(number, step))
    plan = PlannedGraph(steps, tuple(program.inputs), program.outputs, constants, nested=True)
    feeds = {name: _array(program.types.get(name)) for name in (*plan.inputs, *plan.captures)}
    record = _Record(len(program.steps), [*plan.constants.values(), *feeds.values()])
    token = WATCH.set(record)
    try:
        results = plan.run(feeds)
    finally:
        WATCH.reset(token)
    foreign = {id(owner(array)) for array in (*plan.constants.values(), *feeds.values())}
    # A result that is a view of a feed or of a constant is copied for the caller.
    copied = [x for name, x in results.items() if name not in plan.constants.keys() | feeds and id(owner(x)) in foreign]
    end = record.held + sum(x.nbytes for x in copied)
    return InterpreterUsage(tuple(record.alive), max([*record.alive, end]), record.held)


def _planned(number: int, step: CostStep) -> PlanStep:
    """A step of the plan that computes on arrays without data."""
    kernel = registry.find(step.domain, step.op_type, step.opset)
    bodies = [usage(body) for body in step.bodies]
    call = partial(_call, number, step, kernel, bodies)
    captures = tuple(name for name in step.reads if name not in step.inputs)
    bound = bound_by(kernel, call, bool(step.inputs), bool(bodies), captures)
    bound.predict = partial(_predicted, step)
    return PlanStep(step.name, bound, step.inputs, step.outputs)


def _predicted(step: CostStep, _: Sequence[Any]) -> list[TensorType]:
    return [(_dtype(tensor), tensor.shape) for tensor in step.made if tensor is not None]


def _dtype(tensor: CostTensor) -> np.dtype[Any]:
    return helper.tensor_dtype_to_np_dtype(tensor.kind)


def _array(tensor: CostTensor | None, operands: Iterable[AbstractArray] = ()) -> AbstractArray:
    """A new array without data, of the type and shape of `tensor`, in the memory layout of `operands`."""
    return without_data((), _UNKNOWN) if tensor is None else without_data(tensor.shape, _dtype(tensor), operands)


class _Record(Watch):
    """The bytes that are alive while each step computes. The arrays `foreign`, which the run does not own, are not counted."""

    def __init__(self, steps: int, foreign: Iterable[Any]) -> None:
        super().__init__(0, foreign)
        self._foreign = self.total
        self._needed = 0
        self._number = 0
        self.alive = [0] * steps

    @property
    def held(self) -> int:
        """The bytes that are alive now."""
        return self.total - self._foreign

    def reserve(self, *_: Any) -> None:
        """Begin a step."""
        self._needed = 0

    def check(self, more: int = 0) -> None:
        """Note that the step in progress needs `more` bytes in addition to its results."""
        self._needed = max(self._needed, more)

    def made(self, number: int, size: int) -> None:
        """Note the number of the step in progress, and the bytes of its results."""
        self._number = number
        self._needed += size

    def replace(self, _: str, results: Iterable[Any], dead: Iterable[Any]) -> None:
        """End a step."""
        most = self.held + self._needed
        self.hold(results)
        self.alive[self._number] = max(self.held, most)
        super().release(dead)

    def release(self, values: Iterable[Any]) -> None:
        """Keep counting `values`: they are the results of the run, which are counted at its end."""

    def _hold(self, value: Any) -> None:
        super()._hold(value)
        self.total += OBJECT if value is not None else 0

    def _drop(self, value: Any) -> None:
        super()._drop(value)
        self.total -= OBJECT if value is not None else 0


def _call(
    number: int,
    step: CostStep,
    kernel: Kernel | None,
    bodies: Sequence[InterpreterUsage],
    *inputs: AbstractArray | None,
    _free: tuple[bool, ...] = (),
    _outer: Any = None,
) -> tuple[AbstractArray, ...]:
    """The results of a step. The memory that the step takes is noted in the record."""
    with fitting(step):
        if bodies:
            results = [_array(tensor) for tensor in step.made]
            size = _of_bodies(step, bodies, sum(x.nbytes for x in results))
        else:
            results = _results(step, kernel, inputs, _free)
            given = {id(owner(x)) for x in inputs if x is not None}
            new = {id(owner(x)): owner(x).nbytes for x in results}
            size = sum(nbytes for array, nbytes in new.items() if array not in given)
    watch = WATCH.get()
    if isinstance(watch, _Record):  # there is no record while constants are folded
        watch.made(number, size)
    return tuple(results)


def _results(
    step: CostStep, kernel: Kernel | None, inputs: Sequence[AbstractArray | None], free: tuple[bool, ...]
) -> list[AbstractArray]:
    """The results of a step from `kernel.abstract`. Without `abstract`, they are an overwritten input or new arrays."""
    operands: list[Any] = [x for x in inputs if x is not None]
    likes = operands if step.op_type in _ELEMENTWISE else ()
    found: Sequence[Any] = ()
    if kernel is not None and kernel.abstract is not None:
        try:
            found = in_tuple(_evaluated(step, kernel, kernel.abstract, inputs, free))
        except ValueError:
            if kernel.fresh:
                raise
            found = ()  # the shapes contradict each other: the real run raises the error
    elif free and step.made[0] is not None:
        found = (reuse(free, _dtype(step.made[0]), *operands),)
    results = []
    for place, tensor in enumerate(step.made):
        array = found[place] if place < len(found) else None
        if isinstance(array, AbstractArray) and tensor is not None and array.shape == tensor.shape:
            results.append(array)
        else:
            results.append(_array(tensor, () if place else likes))
    return results


def _evaluated(
    step: CostStep,
    kernel: Kernel,
    abstract: Callable[..., Any],
    inputs: Sequence[AbstractArray | None],
    free: tuple[bool, ...],
) -> Any:
    """The result of `abstract`. Inputs after the first are passed with their data if they are known constants."""
    given: list[Any] = [step.constants.get(place, x) if place else x for place, x in enumerate(inputs)]
    if not kernel.fresh and any(isinstance(x, AbstractArray) for x in given[1:]):
        if abstract is kernel.function:
            return tuple(_viewed(given[0], tensor) for tensor in step.made)
        if kernel.shape_input is not None and step.made[0] is not None:
            given[kernel.shape_input] = np.array(step.made[0].shape, np.int64)
    options = kernel.arguments(step.attributes)
    if "_wanted" in kernel.keywords:
        options["_wanted"] = tuple(map(bool, step.outputs))
    return abstract(*given, **options, **({"_free": free} if free else {}))


def _viewed(array: AbstractArray, tensor: CostTensor | None) -> AbstractArray | None:
    """A view of `array` with the shape of `tensor`. None if `array` has another rank and another number of elements."""
    if tensor is None:
        return None
    if tensor.size == array.size:
        return array.reshape(tensor.shape)
    return array[tuple(map(slice, tensor.shape))] if len(tensor.shape) == array.ndim else None


def _of_bodies(step: CostStep, bodies: Sequence[InterpreterUsage], size: int) -> int:
    """The peak of a node with bodies, whose results have `size` bytes.

    For a Loop or a Scan, this is the peak of the body plus the bytes that earlier iterations have left.
    """
    deepest = max(found.peak for found in bodies)
    if step.op_type == "If":
        return max(deepest, size)
    body = step.bodies[0]
    if step.op_type == "Scan":
        states = len(step.inputs) - int(step.attributes["num_scan_inputs"])
        rows = sum(tensor.nbytes for tensor in step.made[states:] if tensor is not None)
        # The results of the previous iteration are still alive.
        return rows + deepest + (bodies[0].held if (step.trips or 0) > 1 else 0)
    states = len(step.inputs) - 2
    rows = sum(tensor.nbytes for tensor in step.made[states:] if tensor is not None)
    ends = sum(body.types[name].nbytes for name in body.outputs[1 : 1 + states] if name in body.types)
    return max(rows + ends + deepest, 2 * rows + ends)
