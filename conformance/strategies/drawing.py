"""Strategies: the decorator that registers one, and `Drawing`, with which it draws shapes, axes and values.

    @strategy("Softmax", "LogSoftmax")
    def softmax(d: Drawing) -> Case:
        shape = d.shape(least=1)
        return d.case(d.floats(shape), axis=d.axis(len(shape)))

A strategy takes a `Drawing` and returns `d.case(...)`. Counterexamples shrink to the first of several choices and to the
smallest number.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import onnx
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.errors import OptionError, choices
from refgrad.tables import extensions
from refgrad.tables.schemas import find_schema

T = TypeVar("T")
Shape = tuple[int, ...]
NEWEST = 21  # the newest opset that every runtime under test knows
OLDEST = 13
STEP = 0.125  # the distance between numbers: their multiples are exact in every float type
FLOATS = tuple(np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))


@dataclass
class Drawing:
    """Draws one case: its methods draw the parts."""

    draw: DrawFn  # hypothesis's function, which draws from a strategy
    operator: str  # with its domain in front
    opset: int  # of the case
    dtype: np.dtype[Any]  # of floats
    shapes: str  # how the case declares its inputs
    values: str = "smooth"  # or "kink": at a point without a derivative
    _kinks: int = 0  # the number of arrays with an element at a kink

    @property
    def op_type(self) -> str:
        """The operator without its domain."""
        return self.operator.rpartition(".")[2]

    @property
    def domain(self) -> str:
        """The operator's domain, "" for ai.onnx."""
        return self.operator.rpartition(".")[0]

    def pick(self, *options: T) -> T:
        """One of the options; the first is the simplest."""
        return self.draw(st.sampled_from(options))

    def flag(self) -> bool:
        """True or False; False is the simplest."""
        return self.draw(st.booleans())

    def rarely(self) -> bool:
        """True once in sixteen draws."""
        return self.draw(st.integers(0, 15)) == 15

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        number: int = self.draw(st.integers(low, high))
        return number

    def factor(self) -> float:
        """A factor for an attribute such as alpha: positive, negative or zero."""
        return self.pick(1.0, 2.0, 0.5, -0.5, 0.0)

    def shape(self, least: int = 0, most: int = 4, *, size: int = 4, elements: int = 48, empty: bool = True) -> Shape:
        """A shape of `least` to `most` axes.

        :param size: the largest size of an axis.
        :param elements: the largest number of elements.
        :param empty: rarely one axis has size 0.
        """
        sizes: list[int] = []
        remaining = elements
        for _ in range(self.integer(least, most)):
            sizes.append(self.integer(1, max(1, min(size, remaining))))
            remaining //= sizes[-1]
        if empty and sizes and self.rarely():
            sizes[self.integer(0, len(sizes) - 1)] = 0
        return tuple(sizes)

    def broadcast_to(self, shape: Shape) -> Shape:
        """A shape that broadcasts to `shape`. It lacks some axes on the left, and some others have size 1."""
        last_axes = shape[self.integer(0, len(shape)) :]
        return tuple(1 if self.flag() else n for n in last_axes)

    def broadcasting(self, count: int = 2, most: int = 3) -> tuple[Shape, ...]:
        """Shapes that broadcast with one another. Usually one of them is the broadcast shape, sometimes none is."""
        result = self.shape(0, most)
        full = self.integer(-1, count - 1)
        return tuple(result if k == full else self.broadcast_to(result) for k in range(count))

    def axis(self, rank: int) -> int:
        """An axis of a tensor of `rank` ≥ 1, which may be negative: counted from the right."""
        axes: list[int] = [*range(rank), *range(-rank, 0)]
        return self.pick(*axes)

    def axes(self, rank: int, least: int = 0, most: int | None = None) -> list[int]:
        """Different axes in any order. Some are negative."""
        count = self.integer(min(least, rank), rank if most is None else min(rank, most))
        order = self.permutation(rank)[:count]
        return [axis - rank if self.flag() else axis for axis in order]

    def permutation(self, count: int) -> list[int]:
        """The numbers from 0 to `count` - 1 in any order."""
        return [int(k) for k in np.argsort(self._words(count), kind="stable")]

    def floats(self, shape: Shape, low: float = -2, high: float = 2, *, avoid: Iterable[float] = ()) -> np.ndarray:
        """Multiples of 1/8 from `low` to `high`.

        :param avoid: the points without a derivative. No number is nearer than 1/8 to them, but if `values` is "kink", at least
            one element is one of them.
        """
        kinks = list(avoid)
        options = _grid(low, high, tuple(kinks))
        array = self._array(shape, options if self.values == "smooth" else (*kinks, *options))
        if self.values == "kink" and kinks and array.size:
            array.flat[self.integer(0, array.size - 1)] = self.pick(*kinks)
            self._kinks += 1
        return array.astype(self.dtype)

    def distinct(self, shape: Shape) -> np.ndarray:
        """Different multiples of 1/8 around 0, in any order. If `values` is "kink", two or more are equal."""
        count = int(np.prod(shape))
        order = np.array(self.permutation(count), np.float64).reshape(shape)
        if self.values == "kink" and count > 1:
            order //= 2
            self._kinks += 1
        return (STEP * (order - count // 2)).astype(self.dtype)

    def disjoint(self, *shapes: Shape) -> list[np.ndarray]:
        """Arrays without a common number, at most four. If `values` is "kink", their first elements are equal."""
        arrays = [self.integers(shape, -3, 3).astype(self.dtype) + self.scalar(k / 4) for k, shape in enumerate(shapes)]
        if self.values == "kink" and len(arrays) > 1 and all(array.size for array in arrays):
            for array in arrays:
                array.flat[0] = arrays[0].flat[0]
            self._kinks += 1
        return [array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True)]

    def normal(self, shape: Shape, scale: float = 1.0) -> np.ndarray:
        """Normally distributed numbers times `scale`. They avoid kinks of functions of many numbers, which a grid may hit."""
        rng = np.random.default_rng(self.integer(0, 999))
        return np.asarray(scale * rng.standard_normal(shape)).astype(self.dtype)

    def integers(self, shape: Shape, low: int, high: int, dtype: Any = np.int64) -> np.ndarray:
        """Numbers from `low` to `high`, both included."""
        return self._array(shape, tuple(range(low, high + 1)) if low >= 0 else _signed(low, high)).astype(dtype)

    def bools(self, shape: Shape) -> np.ndarray:
        """Truth values."""
        return self._array(shape, (False, True)).astype(np.bool_)

    def scalar(self, value: float, dtype: Any = None) -> np.ndarray:
        """A scalar tensor, by default of the float type of this case."""
        return np.array(value, self.dtype if dtype is None else dtype)

    def optional(self, make: Callable[[], T]) -> T | None:
        """A value that `make` draws, or None, for an absent input or attribute. None is the simplest."""
        return make() if self.flag() else None

    def case(
        self,
        *inputs: np.ndarray | None,
        fixed: Sequence[str] = (),
        wrt: Sequence[str] | None = None,
        outputs: int | Sequence[int] = 1,
        **attributes: Any,
    ) -> Case:
        """The case of a node of this operator.

        :param inputs: as in `node_case`.
        :param fixed: the names, as in the schema, of inputs that may be initializers. Each is an initializer or is fed.
        :param wrt: the inputs to differentiate with respect to, by default all float inputs that are fed.
        :param attributes: an attribute that is None is absent.
        """
        constant = [name for name in fixed if self.flag()]
        case = node_case(
            self.op_type,
            *_trimmed(inputs),
            domain=self.domain,
            opset=self.opset,
            outputs=outputs,
            constant=constant,
            wrt=None if wrt is None else [name for name in wrt if name not in constant],
            shapes=self.shapes,
            **{name: value for name, value in attributes.items() if value is not None},
        )
        return self.finished(case)

    def finished(self, case: Case) -> Case:
        """`case` with its kind of values, its provenance, and a unique name."""
        checksum = zlib.crc32(case.model.SerializeToString(deterministic=True))
        for name, array in case.feeds.items():
            checksum = zlib.crc32(f"{name}{array.dtype}{array.tolist()}".encode(), checksum)
        return dataclasses.replace(
            case,
            name=f"{case.name}-{self.dtype.name}-{checksum:08x}",
            values="kink" if self._kinks else "smooth",
            provenance="strategy",
        )

    def _array(self, shape: Shape, options: Sequence[Any]) -> np.ndarray:
        array: np.ndarray = np.array(options)[self._words(int(np.prod(shape))) % len(options)]
        return array.reshape(shape)

    def _words(self, count: int) -> np.ndarray:
        """`count` numbers of 16 bits, drawn at once: later draws do not change if a counterexample shrinks to fewer numbers."""
        return np.frombuffer(self.draw(st.binary(min_size=2 * count, max_size=2 * count)), ">u2")


StrategyFunction = Callable[[Drawing], Case]


@dataclass(frozen=True)
class StrategyEntry:
    """The strategy of one operator."""

    operator: str
    function: StrategyFunction
    oldest: int  # opset
    newest: int  # opset
    kinks: bool  # it can draw points without a derivative
    declared: tuple[str, ...] = SHAPES  # how it can declare its inputs

    def cases(self, opset: int | None, dtype: np.dtype[Any], shapes: str | None, values: str) -> SearchStrategy[Case]:
        """A strategy of hypothesis for cases. The arguments are the same as in `refgrad.conformance.strategies.node`.

        :raises OptionError: the strategy does not draw the opset, the type, kinks, or the shapes.
        """
        if opset is not None and not self.oldest <= opset <= self.newest:
            raise OptionError(
                f"The strategy of {self.operator} has no opset {opset}. It has {self.oldest} to {self.newest}."
            )
        requested = self.versions if opset is None else (opset,)
        versions = [version for version in requested if self.takes(version, dtype)]
        if not versions:
            valid = choices(kind.name for kind in FLOATS if self.takes(requested[0], kind))
            raise OptionError(f"{self.operator} of opset {requested[0]} takes no {dtype.name}. It takes {valid}.")
        if values == "kink" and not self.kinks:
            raise OptionError(f"The strategy of {self.operator} knows no kink. Ask for values 'smooth'.")
        if shapes not in (None, *self.declared):
            raise OptionError(
                f"The strategy of {self.operator} draws no {shapes} shapes. It has {choices(self.declared)}."
            )

        @st.composite
        def cases(draw: DrawFn) -> Case:
            version = draw(st.sampled_from(versions))
            declared = draw(st.sampled_from(self.declared)) if shapes is None else shapes
            return self.function(Drawing(draw, self.operator, version, dtype, declared, values))

        return cases()

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that are drawn if no opset is requested: `NEWEST` (or the first version, if newer), then older ones."""
        domain, _, op_type = self.operator.rpartition(".")
        if domain:
            return (self.newest,)
        first = max(self.oldest, min(NEWEST, self.newest))
        return first, *(version for version in reversed(_versions(domain, op_type)) if self.oldest <= version < first)

    def takes(self, version: int, dtype: np.dtype[Any]) -> bool:
        """True if the operator takes floats of type `dtype`.

        All inputs with several float types must allow this one. If no input has several, an input must have exactly this type.
        An operator without float inputs takes every float type: its case rounds the floats first.
        """
        if dtype not in FLOATS:
            return False
        domain, _, op_type = self.operator.rpartition(".")
        schema = find_schema(op_type, domain, version)
        allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
        several = [types for p in schema.inputs if "tensor(float)" in (types := allowed.get(p.type_str, ()))]
        fixed = [p.type_str for p in schema.inputs if p.type_str in map(_type_string, FLOATS)]
        return all(_type_string(dtype) in types for types in several or [fixed] if types)


def _type_string(dtype: np.dtype[Any]) -> str:
    """A schema's name for tensors of a float type."""
    return f"tensor({ {'float32': 'float', 'float64': 'double'}.get(dtype.name, dtype.name) })"


REGISTRY: dict[str, StrategyEntry] = {}


def strategy(
    *operators: str, oldest: int | None = None, newest: int | None = None, kinks: bool = False, ranked: bool = False
) -> Callable[[StrategyFunction], StrategyFunction]:
    """Register a function as the strategy of these operators. `Drawing.op_type` tells it which one to draw.

    :param oldest: the oldest opset to draw, by default 13, or the operator's first version if that is newer.
    :param newest: the newest opset to draw, by default the newest that onnx knows.
    :param kinks: it can draw points without a derivative: it calls `Drawing.floats` with `avoid`, `distinct` or `disjoint`.
    :param ranked: it only draws inputs of known rank, because refgrad refuses others for these operators.
    """

    def register(function: StrategyFunction) -> StrategyFunction:
        for operator in operators:
            domain, _, op_type = operator.rpartition(".")
            versions = _versions(domain, op_type)
            defaults = (
                (versions[-1], versions[-1]) if domain else (max(OLDEST, versions[0]), onnx.defs.onnx_opset_version())
            )
            first, last = defaults[0] if oldest is None else oldest, defaults[1] if newest is None else newest
            REGISTRY[operator] = StrategyEntry(operator, function, first, last, kinks, SHAPES[:2] if ranked else SHAPES)
        return function

    return register


def of_packages() -> dict[str, StrategyEntry]:
    """The strategies that other packages register, by the name of the operator with its domain."""
    entries = {}
    for entry in extensions.STRATEGIES.values():
        ranked, kinks = bool(entry.options.get("ranked")), bool(entry.options.get("kinks"))
        newest = _versions(entry.domain, entry.op_type)[-1]
        declared = SHAPES[:2] if ranked else SHAPES
        entries[entry.operator] = StrategyEntry(entry.operator, entry.function, newest, newest, kinks, declared)
    return entries


@cache
def _versions_by_operator() -> dict[tuple[str, str], list[int]]:
    versions: dict[tuple[str, str], list[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        versions.setdefault((schema.domain, schema.name), []).append(schema.since_version)
    return versions


def _versions(domain: str, op_type: str) -> list[int]:
    """The versions of an operator. An operator that onnx does not know has version 1."""
    return sorted(_versions_by_operator().get((domain, op_type), [1]))


@cache
def _grid(low: float, high: float, avoid: tuple[float, ...]) -> tuple[float, ...]:
    """The multiples of `STEP` from `low` to `high`, except numbers nearer than `STEP` to `avoid`. Simple numbers come first."""
    steps = range(int(np.ceil(low / STEP)), int(np.floor(high / STEP)) + 1)
    numbers = [k * STEP for k in steps if all(abs(k * STEP - kink) >= STEP for kink in avoid)]
    return tuple(sorted(numbers, key=lambda x: (x % 1 != 0, abs(x), x < 0)))


def _signed(low: int, high: int) -> tuple[int, ...]:
    return tuple(sorted(range(low, high + 1), key=lambda k: (abs(k), k < 0)))


def _trimmed(inputs: tuple[np.ndarray | None, ...]) -> tuple[np.ndarray | None, ...]:
    """The inputs without the absent ones at the end."""
    count = max((k + 1 for k, array in enumerate(inputs) if array is not None), default=0)
    return inputs[:count]
