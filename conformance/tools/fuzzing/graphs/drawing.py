"""Nodes that the strategies of the operators draw, of the shapes that values of the graph have, and of these values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from onnx import helper

from refgrad import traits
from refgrad.conformance.case import input_names
from refgrad.conformance.strategies import entries
from refgrad.conformance.strategies.drawing import Drawing, Shape, StrategyEntry
from refgrad.conformance.tools.fuzzing.graphs.growing import BOOL, GraphScope, GraphValue, MismatchError
from refgrad.conformance.tools.fuzzing.graphs.templates import TEMPLATES
from refgrad.tables.schemas import find_schema

T = TypeVar("T")
_JITTER = 1 / 32  # around the numbers that strategies draw, so that few are equal; kinks are farther away
_OWN = traits.CASTS | traits.RANDOM | {"BatchNormalization"}  # a family knows what may stand beside them
_COMMON = traits.ARITHMETIC | traits.PRODUCTS  # in every model
_WEIGHTS = (0.6, 1.2)
_TRIES = 3  # of an operator: some draws have no elements, or a form that nobody computes here


class GraphDrawing(Drawing):
    """One draw for a graph. `case` adds the node."""

    def __init__(self, scope: GraphScope, operator: str) -> None:
        refuse: Any = _refuse
        super().__init__(refuse, operator, scope.opset, helper.tensor_dtype_to_np_dtype(scope.world.kind), "static")
        self._scope = scope
        self._ranges: dict[
            int, tuple[np.ndarray, float, float]
        ] = {}  # by the identity of an array: the values that may replace it
        self._is_wired = False  # whether an input is a value of the graph

    def pick(self, *options: T) -> T:
        """One of the options."""
        return self._scope.rng.choice(options)

    def flag(self) -> bool:
        """True or False."""
        return self._scope.chance(0.5)

    def rarely(self) -> bool:
        """True once in sixteen draws, but in a graph without empty values where it would make one."""
        return self._scope.world.empty > 0 and self._scope.chance(1 / 16)

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        return self._scope.rng.randint(low, high)

    def shape(self, least: int = 0, most: int = 4, *, size: int = 4, elements: int = 48, empty: bool = True) -> Shape:
        """The shape of a value in the graph, or a new one."""
        fitting = self._scope.floats(lambda v: least <= v.rank <= most and (empty or v.array.size > 0))
        if fitting and self._scope.chance(0.85):
            return self._latest(fitting).shape
        return tuple(self.integer(1, size) for _ in range(self.integer(least, min(most, max(least, 3)))))

    def floats(
        self, shape: Shape, low: float = -math.inf, high: float = math.inf, *, avoid: Iterable[float] = ()
    ) -> np.ndarray:
        """New numbers from `low` to `high`, which a value of the graph in this range may replace."""
        bounds = (low, high) if math.isfinite(low) else (-2, 2)
        array = super().floats(shape, *bounds, avoid=avoid)
        jitter = self._scope.world.numbers.uniform(-_JITTER, _JITTER, shape)
        return self._replaceable((array + jitter).astype(np.float16).astype(self.dtype), low, high)

    def distinct(self, shape: Shape) -> np.ndarray:
        """Different numbers, which a value of the graph may replace."""
        return self._replaceable(super().distinct(shape))

    def disjoint(self, *shapes: Shape) -> list[np.ndarray]:
        """Arrays that share no number, which values of the graph may replace."""
        return [self._replaceable(array) for array in super().disjoint(*shapes)]

    def normal(self, shape: Shape, scale: float = 1.0) -> np.ndarray:
        """Normally distributed numbers, which a value of the graph may replace."""
        return self._replaceable(super().normal(shape, scale))

    def integers(self, shape: Shape, low: int, high: int, dtype: Any = np.int64) -> np.ndarray:
        """Numbers from `low` to `high`, which a value of the graph in this range may replace."""
        return self._replaceable(super().integers(shape, low, high, dtype), low, high)

    def bools(self, shape: Shape) -> np.ndarray:
        """Truth values, which a value of the graph or a comparison may replace."""
        return self._replaceable(super().bools(shape))

    def case(
        self,
        *inputs: np.ndarray | None,
        fixed: Sequence[str] = (),
        wrt: Sequence[str] | None = None,
        outputs: int | Sequence[int] = 1,
        **attributes: Any,
    ) -> Any:
        """Add the node to the graph.

        :raises MismatchError: its result is not wanted there.
        """
        names = input_names(find_schema(self.op_type, self.domain, self.opset), len(inputs))
        read = [
            None if array is None else self._value(array, name in fixed, wrt is None or name in wrt)
            for name, array in zip(names, inputs, strict=True)
        ]
        places = range(outputs) if isinstance(outputs, int) else outputs
        named = [k in places for k in range(max(places) + 1)]
        made = self._scope.add_all(self.op_type, *read, outputs=len(named), named=named, **attributes)
        if not self._scope.world.empty and any(value is not None and not np.size(value.array) for value in made):
            raise MismatchError("an empty result")

    def finished(self, made: Any) -> Any:
        """Refuse a case of several nodes."""
        raise MismatchError("a case of several nodes")

    def _replaceable(self, array: np.ndarray, low: float = -math.inf, high: float = math.inf) -> np.ndarray:
        self._ranges[id(array)] = array, low, high
        return array

    def _latest(self, values: list[GraphValue]) -> GraphValue:
        """One of the values, the last ones for the most part."""
        return values[-1 - min(int(self._scope.rng.expovariate(0.35)), len(values) - 1)]

    def _words(self, count: int) -> np.ndarray:
        return np.frombuffer(self._scope.rng.randbytes(2 * count), ">u2")

    def _value(self, array: np.ndarray, is_fixed: bool, is_differentiated: bool) -> GraphValue:
        """A value of the graph for an input: one that is there, one made of it, or a new one of the numbers in `array`."""
        s = self._scope
        _, low, high = self._ranges.get(id(array), (array, math.inf, -math.inf))
        if array.dtype != self.dtype:
            if low <= high and s.chance(0.5) and (found := self._others(array, low, high)):
                return s.rng.choice(found)
            if is_fixed and array.dtype == np.int64:
                return s.ints(array)
            return s.leaf(array, helper.np_dtype_to_tensor_dtype(array.dtype), moves=False)
        if low > high or not is_differentiated:
            return s.leaf(array, moves=is_differentiated and self.flag())
        found = s.floats(lambda v: v.shape == array.shape and _within(v, low, high))
        if found and s.chance(0.85):
            self._is_wired = True
            return self._latest([v for v in found if v.moves] or found)
        if self._is_wired or s.chance(0.15):
            return s.leaf(array)
        self._is_wired = True
        return self._bounded(s.shaped(array.shape), low, high)

    def _others(self, array: np.ndarray, low: float, high: float) -> list[GraphValue]:
        """The whole numbers or truth values of the graph that may replace an array."""
        s, kind = self._scope, helper.np_dtype_to_tensor_dtype(array.dtype)
        found = [v for v in s.visible if v.is_tensor and v.kind == kind and v.shape == array.shape]
        if kind == BOOL and not found and (like := s.floats(lambda v: v.shape == array.shape and v.moves)):
            comparison = self.pick("Greater", "Less", "GreaterOrEqual", "LessOrEqual")
            found = [s.add(comparison, self._latest(like), s.number(0.05), kind=BOOL)]
        return [v for v in found if _within(v, low, high)]

    def _bounded(self, value: GraphValue, low: float, high: float) -> GraphValue:
        """The value, or a function of it from `low` to `high`."""
        if _within(value, low, high):
            return value
        s = self._scope
        return s.add("Add", s.add("Mul", s.add("Sigmoid", value), s.number(high - low)), s.number(low))


def _within(value: GraphValue, low: float, high: float) -> bool:
    return not value.array.size or bool(low <= np.min(value.real) and np.max(value.real) <= high)


def _refuse(strategy: Any) -> Any:
    raise MismatchError("a strategy that draws by itself")


def draw(entry: StrategyEntry, scope: GraphScope) -> None:
    """Add a node of an operator.

    :raises MismatchError: nothing comes of it.
    """
    if not entry.takes(scope.opset, helper.tensor_dtype_to_np_dtype(scope.world.kind)):
        raise MismatchError("a type that the operator does not take")
    for left in reversed(range(_TRIES)):
        try:
            with scope.trying():
                entry.function(GraphDrawing(scope, entry.operator))
                return
        except MismatchError:
            if not left:
                raise


for _entry in entries():
    if "." not in _entry.operator and _entry.operator not in _OWN:
        _weight = _WEIGHTS[_entry.operator in _COMMON]
        TEMPLATES.append((partial(draw, _entry), _weight, _entry.oldest, _entry.newest))
