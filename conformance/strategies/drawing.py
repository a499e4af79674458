"""The parts of a strategy: the decorator that registers one, and `Drawing`, which draws shapes, axes and values.

    @strategy("Softmax", "LogSoftmax")
    def softmax(d: Drawing) -> Case:
        shape = d.shape(least=1)
        return d.case(d.floats(shape), axis=d.axis(len(shape)))

A strategy is a function of a `Drawing` that returns `d.case(...)`. Counterexamples shrink to the
first of several choices and to the smallest number.
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
NEWEST = 21  # the last opset that every runtime under test knows
OLDEST = 13
STEP = 0.125  # between the numbers drawn: every float type holds them exactly
FLOATS = tuple(np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))


@dataclass
class Drawing:
    """One draw: the options of the strategy, and the helpers that draw parts of a case.

    `operator` has its domain in front, `op_type` does not. `opset` is the version that the case will have, `dtype` the
    type of `floats`, `values` "smooth" or "kink".
    """

    draw: DrawFn
    operator: str
    opset: int
    dtype: np.dtype[Any]
    shapes: str
    values: str = "smooth"
    _kinks: int = 0  # how many arrays have an element where there is no derivative

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
        drawn: int = self.draw(st.integers(low, high))
        return drawn

    def factor(self) -> float:
        """An attribute that multiplies: positive, negative or zero."""
        return self.pick(1.0, 2.0, 0.5, -0.5, 0.0)

    def shape(self, least: int = 0, most: int = 4, *, size: int = 4, elements: int = 48, empty: bool = True) -> Shape:
        """`least` to `most` axes of 1 to `size` elements, at most `elements` in all; if `empty`, rarely one axis has none."""
        sizes: list[int] = []
        room = elements
        for _ in range(self.integer(least, most)):
            sizes.append(self.integer(1, max(1, min(size, room))))
            room //= sizes[-1]
        if empty and sizes and self.rarely():
            sizes[self.integer(0, len(sizes) - 1)] = 0
        return tuple(sizes)

    def broadcast_to(self, shape: Shape) -> Shape:
        """A shape that broadcasts to `shape`: without some of the axes on the left, others of size 1."""
        kept = shape[self.integer(0, len(shape)) :]
        return tuple(1 if self.flag() else n for n in kept)

    def broadcasting(self, count: int = 2, most: int = 3) -> tuple[Shape, ...]:
        """Shapes that broadcast with one another. Usually one of them is the broadcast shape, sometimes none is."""
        result = self.shape(0, most)
        full = self.integer(-1, count - 1)
        return tuple(result if k == full else self.broadcast_to(result) for k in range(count))

    def axis(self, rank: int) -> int:
        """An axis of `rank` ≥ 1, counted from the left or, negative, from the right."""
        axes: list[int] = [*range(rank), *range(-rank, 0)]
        return self.pick(*axes)

    def axes(self, rank: int, least: int = 0, most: int | None = None) -> list[int]:
        """Different axes in any order, some counted from the right."""
        count = self.integer(min(least, rank), rank if most is None else min(rank, most))
        order = self.permutation(rank)[:count]
        return [axis - rank if self.flag() else axis for axis in order]

    def permutation(self, count: int) -> list[int]:
        """The numbers below `count` in any order."""
        return [int(k) for k in np.argsort(self._words(count), kind="stable")]

    def floats(self, shape: Shape, low: float = -2, high: float = 2, *, avoid: Iterable[float] = ()) -> np.ndarray:
        """Multiples of 1/8 from `low` to `high`, at least 1/8 away from each number in `avoid`, of the type `dtype`.

        `avoid` holds the points that have no derivative. Where `values` is "kink", at least one element is one of these.
        """
        kinks = list(avoid)
        options = _grid(low, high, tuple(kinks))
        array = self._array(shape, options if self.values == "smooth" else (*kinks, *options))
        if self.values == "kink" and kinks and array.size:
            array.flat[self.integer(0, array.size - 1)] = self.pick(*kinks)
            self._kinks += 1
        return array.astype(self.dtype)

    def apart(self, shape: Shape, *, below: float = 0.0) -> np.ndarray:
        """Different multiples of 1/8 around `below`, in any order: no two tie. Where `values` is "kink", two or more do."""
        count = int(np.prod(shape))
        order = np.array(self.permutation(count), np.float64).reshape(shape)
        if self.values == "kink" and count > 1:
            order //= 2
            self._kinks += 1
        return (below + STEP * (order - count // 2)).astype(self.dtype)

    def unlike(self, *shapes: Shape) -> list[np.ndarray]:
        """At most four arrays, no two of which share a number. Where `values` is "kink", their first elements tie."""
        arrays = [self.integers(shape, -3, 3).astype(self.dtype) + self.scalar(k / 4) for k, shape in enumerate(shapes)]
        if self.values == "kink" and len(arrays) > 1 and all(array.size for array in arrays):
            for array in arrays:
                array.flat[0] = arrays[0].flat[0]
            self._kinks += 1
        return [array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True)]

    def normal(self, shape: Shape, scale: float = 1.0) -> np.ndarray:
        """Normally distributed numbers times `scale`: for functions of many numbers, whose kinks no grid avoids."""
        rng = np.random.default_rng(self.integer(0, 999))
        return np.asarray(scale * rng.standard_normal(shape)).astype(self.dtype)

    def integers(self, shape: Shape, low: int, high: int, dtype: Any = np.int64) -> np.ndarray:
        """Numbers from `low` to `high`, both included."""
        return self._array(shape, tuple(range(low, high + 1)) if low >= 0 else _signed(low, high)).astype(dtype)

    def bools(self, shape: Shape) -> np.ndarray:
        """Truth values."""
        return self._array(shape, (False, True)).astype(np.bool_)

    def scalar(self, value: float, dtype: Any = None) -> np.ndarray:
        """A tensor without axes, of the draw's float type unless `dtype` is given."""
        return np.array(value, self.dtype if dtype is None else dtype)

    def optional(self, make: Callable[[], T]) -> T | None:
        """A value that `make` draws, or None for an absent input or attribute; None is the simplest."""
        return make() if self.flag() else None

    def case(
        self,
        *inputs: np.ndarray | None,
        fixed: Sequence[str] = (),
        wrt: Sequence[str] | None = None,
        outputs: int | Sequence[int] = 1,
        **attributes: Any,
    ) -> Case:
        """The case of a node of this operator; `inputs` as in `node_case`, an attribute that is None is absent.

        :param fixed: the names, as in the schema, of inputs that may be initializers; each is drawn as one or is fed.
        :param wrt: what to differentiate with respect to; by default every float input that is fed.
        """
        constant = [name for name in fixed if self.flag()]
        made = node_case(
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
        return self.finished(made)

    def finished(self, made: Case) -> Case:
        """A case made elsewhere, completed: its kind of values, its provenance, and a name that no other draw shares."""
        drawn = zlib.crc32(made.model.SerializeToString(deterministic=True))
        for name, array in made.feeds.items():
            drawn = zlib.crc32(f"{name}{array.dtype}{array.tolist()}".encode(), drawn)
        return dataclasses.replace(
            made,
            name=f"{made.name}-{self.dtype.name}-{drawn:08x}",
            values="kink" if self._kinks else "smooth",
            provenance="strategy",
        )

    def _array(self, shape: Shape, options: Sequence[Any]) -> np.ndarray:
        drawn: np.ndarray = np.array(options)[self._words(int(np.prod(shape))) % len(options)]
        return drawn.reshape(shape)

    def _words(self, count: int) -> np.ndarray:
        """16-bit numbers from a single draw, so that later draws stay the same when a counterexample shrinks to fewer."""
        return np.frombuffer(self.draw(st.binary(min_size=2 * count, max_size=2 * count)), ">u2")


Draw = Callable[[Drawing], Case]


@dataclass(frozen=True)
class StrategyEntry:
    """The strategy of one operator: the opsets it draws, whether it draws kinks, and how it declares its inputs."""

    operator: str
    function: Draw
    oldest: int
    newest: int
    kinks: bool
    declared: tuple[str, ...] = SHAPES

    def cases(self, opset: int | None, dtype: np.dtype[Any], shapes: str | None, values: str) -> SearchStrategy[Case]:
        """The strategy of cases; the arguments are as in `refgrad.conformance.strategies.node`.

        :raises OptionError: the strategy does not have the version, the type, kinks, or the shapes.
        """
        if opset is not None and not self.oldest <= opset <= self.newest:
            raise OptionError(
                f"The strategy of {self.operator} has no opset {opset}. It has {self.oldest} to {self.newest}."
            )
        asked = self.versions if opset is None else (opset,)
        versions = [version for version in asked if self._takes(version, dtype)]
        if not versions:
            valid = choices(kind.name for kind in FLOATS if self._takes(asked[0], kind))
            raise OptionError(f"{self.operator} of opset {asked[0]} takes no {dtype.name}. It takes {valid}.")
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
        """The versions drawn for opset None: `NEWEST` (or the operator's first, if that is newer), then the older ones."""
        domain, _, op_type = self.operator.rpartition(".")
        if domain:
            return (self.newest,)
        first = max(self.oldest, min(NEWEST, self.newest))
        return first, *(version for version in reversed(_versions(domain, op_type)) if self.oldest <= version < first)

    def _takes(self, version: int, dtype: np.dtype[Any]) -> bool:
        """True if every input that allows several float types allows this one.

        Where no input allows several, one has to be fixed to this type. An operator without float inputs takes any float
        type: its case rounds the floats first.
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
) -> Callable[[Draw], Draw]:
    """Register a function as the strategy of these operators; it tells them apart by `Drawing.op_type`.

    :param oldest: the first opset that it draws; by default 13, or the operator's first if that is newer.
    :param newest: the last opset that it draws; by default the last that onnx knows.
    :param kinks: it draws points without a derivative too: it calls `Drawing.floats` with `avoid`, `apart` or `unlike`.
    :param ranked: it draws no inputs of unknown rank, because refgrad refuses them for these operators.
    """

    def register(function: Draw) -> Draw:
        for operator in operators:
            domain, _, op_type = operator.rpartition(".")
            versions = _versions(domain, op_type)
            known = (
                (versions[-1], versions[-1]) if domain else (max(OLDEST, versions[0]), onnx.defs.onnx_opset_version())
            )
            first, last = known[0] if oldest is None else oldest, known[1] if newest is None else newest
            REGISTRY[operator] = StrategyEntry(operator, function, first, last, kinks, SHAPES[:2] if ranked else SHAPES)
        return function

    return register


def of_packages() -> dict[str, StrategyEntry]:
    """The strategies that other packages register, by the name of the operator with its domain."""
    found = {}
    for entry in extensions.STRATEGIES.values():
        ranked, kinks = bool(entry.options.get("ranked")), bool(entry.options.get("kinks"))
        newest = _versions(entry.domain, entry.op_type)[-1]
        declared = SHAPES[:2] if ranked else SHAPES
        found[entry.operator] = StrategyEntry(entry.operator, entry.function, newest, newest, kinks, declared)
    return found


@cache
def _schemas() -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        found.setdefault((schema.domain, schema.name), []).append(schema.since_version)
    return found


def _versions(domain: str, op_type: str) -> list[int]:
    """The versions in which an operator changed."""
    return sorted(_schemas().get((domain, op_type), [1]))  # operators that onnx does not know have version 1


@cache
def _grid(low: float, high: float, avoid: tuple[float, ...]) -> tuple[float, ...]:
    """The multiples of `STEP` from `low` to `high` that keep `STEP` away from `avoid`, the plainest first."""
    steps = range(int(np.ceil(low / STEP)), int(np.floor(high / STEP)) + 1)
    numbers = [k * STEP for k in steps if all(abs(k * STEP - kink) >= STEP for kink in avoid)]
    return tuple(sorted(numbers, key=lambda x: (x % 1 != 0, abs(x), x < 0)))


def _signed(low: int, high: int) -> tuple[int, ...]:
    return tuple(sorted(range(low, high + 1), key=lambda k: (abs(k), k < 0)))


def _trimmed(inputs: tuple[np.ndarray | None, ...]) -> tuple[np.ndarray | None, ...]:
    """Without the absent inputs at the end."""
    count = max((k + 1 for k, array in enumerate(inputs) if array is not None), default=0)
    return inputs[:count]
