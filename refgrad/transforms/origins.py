"""The origin of the initializers of an export: tensors of a state_dict, rearranged, merged, folded or computed.

A `Source` says how an initializer is made of them, and makes it again from other values. A source is proved: it makes
the initializer's value bit for bit, or, where `exact` is false, up to rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

State: TypeAlias = Mapping[str, np.ndarray]
_Place: TypeAlias = tuple[str, int, int]  # a tensor, its axis, the row along it
_Piece: TypeAlias = tuple[str, int, int, int]  # the same, and where the rows end

_PLACES, _PIECES = 8, 1 << 16  # of one row, and of one tensor: more are not looked through
_RANK = 5  # of tensors that are transposed in every way
_ROUNDING = 1e-5  # relative
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Source:
    """How an initializer is made of tensors of a state_dict.

    `names` are their names; more than one where tensors are merged, folded or tied. `how` says in a word what happened to
    them. `exact`: `make` returns the initializer bit for bit; otherwise up to rounding.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    exact: bool = True

    @property
    def how(self) -> str:
        """The word for how the tensors were changed, such as "transposed"."""
        raise NotImplementedError

    def make(self, state: State) -> np.ndarray:
        """The initializer, made of the tensors `names` of `state`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Copy(Source):
    """One tensor, with its axes of size 1 left out, transposed by `axes` and reshaped. Tied tensors have several names."""

    axes: tuple[int, ...] = ()

    @property
    def how(self) -> str:
        """The word "equal" or "transposed", and "tied" with it."""
        word = "equal" if self.axes == tuple(range(len(self.axes))) else "transposed"
        return f"{word}, tied" if len(self.names) > 1 else word

    def make(self, state: State) -> np.ndarray:
        """The transposed tensor. Tied names hold one value."""
        return np.squeeze(state[self.names[0]]).transpose(self.axes).reshape(self.shape)


@dataclass(frozen=True)
class Ambiguous(Source):
    """One of several tensors that have the same values, or one tensor in one of several orders: they cannot be told apart."""

    @property
    def how(self) -> str:
        """The word "ambiguous"."""
        return "ambiguous"


@dataclass(frozen=True)
class Rows(Source):
    """Rows of tensors, one after the other: gates in another order, merged or split tensors, embeddings of constant ids.

    A piece (name, axis, start, stop) is rows of a tensor whose `axis` was moved to the front and whose other axes were
    flattened. `moved` is the shape of the result before its last axis went to the place `axis`; -1 leaves it.
    """

    pieces: tuple[_Piece, ...] = ()
    moved: tuple[int, ...] = ()
    axis: int = -1
    word: str = "merged"

    @property
    def how(self) -> str:
        """The word "merged", "reordered", "split" or "gathered" (rows are repeated)."""
        return self.word

    def make(self, state: State) -> np.ndarray:
        """The rows, laid one below the other."""
        rows = [_rows(state[name], axis)[start:stop] for name, axis, start, stop in self.pieces]
        laid = np.concatenate(rows).reshape(self.moved)
        return np.moveaxis(laid, -1, self.axis).reshape(self.shape)


@dataclass(frozen=True)
class Folded(Source):
    """A BatchNormalization in the layer before it. `names`: the layer's weight or bias, then scale, B, mean and variance.

    The weight is multiplied by scale/√(variance + epsilon) along `axis`. The bias b becomes B + (b − mean)·that.
    """

    epsilon: float = 1e-5
    axis: int = 0
    bias: bool = False

    @property
    def how(self) -> str:
        """The word "folded"."""
        return "folded"

    def make(self, state: State) -> np.ndarray:
        """The weight or the bias of the layer, with the BatchNormalization in it."""
        *layer, gamma, beta, mean, variance = (state[name] for name in self.names)
        factor = gamma / np.sqrt(variance + variance.dtype.type(self.epsilon))
        if self.bias:
            before = layer[0] if layer else np.zeros_like(mean)
            made = (before - mean) * factor + beta
        else:
            made = layer[0] * _along(factor, self.axis, layer[0].ndim)
        return np.asarray(made, mean.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Computed(Source):
    """A function of one tensor that the exporter computed: "x + 1", "exp(x)", "-exp(x)"; or the weight of weight_norm."""

    function: str = ""

    @property
    def how(self) -> str:
        """The function."""
        return self.function

    def make(self, state: State) -> np.ndarray:
        """The function of the tensors."""
        made = _FUNCTIONS[self.function](*(state[name] for name in self.names))
        return made.reshape(self.shape)


def _weight_norm(size: np.ndarray, direction: np.ndarray) -> np.ndarray:
    axes = tuple(k for k, count in enumerate(size.shape) if count == 1)
    return np.asarray(direction * (size / np.sqrt((direction * direction).sum(axes, keepdims=True))))


_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "x + 1": lambda x: np.asarray(x + x.dtype.type(1)),
    "exp(x)": lambda x: np.asarray(np.exp(x)),
    "-exp(x)": lambda x: np.asarray(-np.exp(x)),
    "weight_norm": _weight_norm,
}


@dataclass(frozen=True)
class Layer:
    """The initializers that a Conv, a ConvTranspose or a Gemm reads, and the axis of its outputs in the weight."""

    weight: str
    bias: str
    axis: int


def find_sources(
    initializers: State, state: State, layers: Sequence[Layer] = (), parameters: frozenset[str] = frozenset()
) -> dict[str, Source]:
    """The `Source` of each initializer that is made of tensors of `state`; other initializers are left out.

    :param initializers: floats.
    :param state: floats of the same types.
    :param layers: layers that a BatchNormalization may be folded into.
    :param parameters: the initializers of layers: tensors are looked for also where these have few values.
    """
    search = _Search(initializers, state)
    search.copies(parameters)
    search.folds(layers)
    search.computed()
    search.rows()
    return search.found


def reductions(state: State) -> np.ndarray:
    """The sum, the mean, the norm and the extreme values of each tensor, and their exponentials: numbers in float64."""
    found = []
    for one in state.values():
        if one.size > 1 and one.dtype.kind == "f" and not _is_constant(one):
            wide = one.astype(np.float64)
            square = (wide * wide).sum()
            found += [wide.sum(), wide.mean(), square, np.sqrt(square), wide.max(), wide.min(), np.abs(wide).max()]
    numbers = np.array(found, np.float64)
    with np.errstate(over="ignore"):
        return np.concatenate([numbers, np.exp(numbers)])


def is_among(value: np.ndarray, numbers: np.ndarray) -> bool:
    """True if a tensor of one element is one of `numbers`, up to rounding, and not 0."""
    number = float(value.reshape(-1)[0])
    return number != 0 and bool((np.abs(numbers - number) <= _ROUNDING / 10 * abs(number)).any())


class _Search:
    def __init__(self, initializers: State, state: State) -> None:
        self.initializers, self.state = initializers, state
        self.found: dict[str, Source] = {}

    def _left(self) -> dict[str, np.ndarray]:
        return {name: value for name, value in self.initializers.items() if name not in self.found and value.size}

    def _open(self, name: str) -> np.ndarray | None:
        return None if name in self.found else self.initializers.get(name)

    def _claimed(self) -> set[str]:
        return {name for source in self.found.values() for name in source.names}

    def _unclaimed(self) -> dict[str, np.ndarray]:
        claimed = self._claimed()
        return {name: value for name, value in self.state.items() if name not in claimed and value.size}

    def copies(self, parameters: frozenset[str]) -> None:
        """Equal tensors, by name first, then by value."""
        by_print: dict[tuple[str, int, int, int], list[str]] = {}
        for key, value in self.state.items():
            by_print.setdefault(_fingerprint(value), []).append(key)
        for name, value in self.initializers.items():
            own = self.state.get(name)
            if own is not None and own.shape == value.shape and _same(own, value):
                same = [key for key in by_print[_fingerprint(value)] if key != name and _same(self.state[key], value)]
                tied = tuple(key for key in same if key not in self.initializers and np.ndim(value) > 1)
                self.found[name] = Copy((name, *tied), value.shape, axes=tuple(range(np.squeeze(own).ndim)))
        claimed = self._claimed()
        chosen: dict[str, list[Copy]] = {}
        for name, value in self._left().items():
            few = value.size == 1 or _is_constant(value)  # then values alone tell nothing
            if few and name not in parameters:
                continue
            alike = by_print.get(_fingerprint(value), [])
            keys = [key for key in alike if key not in claimed] or ([] if few else alike)
            if copies := [copy for key in keys for copy in _copies(key, self.state[key], value)]:
                chosen[name] = copies
        for name, copies in chosen.items():
            shape = self.initializers[name].shape
            keys = list(dict.fromkeys(copy.names[0] for copy in copies))
            is_shared = sum(not {c.names[0] for c in other}.isdisjoint(keys) for other in chosen.values()) > 1
            orders = {copy.axes for copy in copies if copy.names[0] == keys[0]}
            if len(orders) > 1 or (is_shared and (len(keys) > 1 or _is_constant(self.initializers[name]))):
                self.found[name] = Ambiguous(tuple(keys), shape)
            else:
                self.found[name] = Copy(tuple(keys), shape, axes=copies[0].axes)

    def folds(self, layers: Sequence[Layer]) -> None:
        """Weights and biases of layers with a BatchNormalization in them."""
        norms: dict[int, list[str]] = {}
        for key, value in self.state.items():
            stem, _, last = key.rpartition(".")
            if last == "running_var" and all(
                f"{stem}.{one}" in self.state for one in ("weight", "bias", "running_mean")
            ):
                norms.setdefault(value.size, []).append(stem)
        for layer in layers:
            weight = self._open(layer.weight)
            if weight is None or layer.axis >= weight.ndim:
                continue
            for source in self._weights_of(layer, weight, norms.get(weight.shape[layer.axis], [])):
                bias = self._bias_of(layer, source)
                if bias is not None:
                    self.found[layer.weight], self.found[layer.bias] = source, bias
                    break

    def _weights_of(self, layer: Layer, value: np.ndarray, norms: list[str]) -> Iterator[Folded]:
        keys = [key for key, one in self.state.items() if one.shape == value.shape]
        for key in sorted(keys, key=lambda key: key != layer.weight):
            ratio = _ratio(value, self.state[key], layer.axis)
            if ratio is None:
                continue
            for stem in norms:
                names = (f"{stem}.weight", f"{stem}.bias", f"{stem}.running_mean", f"{stem}.running_var")
                epsilon = _epsilon(ratio, self.state[names[0]], self.state[names[3]])
                if epsilon is not None:
                    source = Folded((key, *names), value.shape, epsilon=epsilon, axis=layer.axis)
                    if (proved := self._proved(source, value)) is not None:
                        yield proved

    def _bias_of(self, layer: Layer, weight: Folded) -> Folded | None:
        value = self._open(layer.bias)
        if value is None:
            return None
        key, *norm = weight.names
        befores = [(f"{key.removesuffix('weight')}bias",)] if f"{key.removesuffix('weight')}bias" in self.state else []
        for before in (*befores, ()):
            source = Folded((*before, *norm), value.shape, epsilon=weight.epsilon, bias=True)
            if all(self.state[name].size == value.size for name in source.names) and self._proved(source, value):
                return self._proved(source, value)
        return None

    def _proved(self, source: Folded, value: np.ndarray) -> Folded | None:
        made = source.make(self.state)
        return (
            Folded(source.names, source.shape, _same(made, value), source.epsilon, source.axis, source.bias)
            if _close(made, value)
            else None
        )

    def computed(self) -> None:
        """Functions of tensors that no initializer is yet."""
        for name, value in self._left().items():
            for names, function in self._functions(value):
                with np.errstate(all="ignore"):
                    made = np.asarray(_FUNCTIONS[function](*(self.state[key] for key in names)))
                if made.size != value.size:
                    continue
                made = made.reshape(value.shape)
                if _same(made, value) or (function != "x + 1" and _close(made, value) and not _is_round(value)):
                    self.found[name] = Computed(names, value.shape, _same(made, value), function)
                    break

    def _functions(self, value: np.ndarray) -> Iterator[tuple[tuple[str, ...], str]]:
        """The functions that may give a tensor: their names have the sizes of its axes in the same order."""
        left = self._unclaimed()
        squeezed = _squeezed(value.shape)
        for key, one in left.items():
            if _squeezed(one.shape) == squeezed and one.dtype == value.dtype:
                yield from (((key,), function) for function in ("x + 1", "exp(x)", "-exp(x)"))
            for size, direction in (("original0", "original1"), ("weight_g", "weight_v")):
                other = key.removesuffix(size) + direction
                if key.endswith(size) and other in left and left[other].shape == value.shape and one.ndim == value.ndim:
                    yield (key, other), "weight_norm"

    def rows(self) -> None:
        """Tensors that are made of rows of others: of those that no initializer is yet, or of any."""
        pools = (_Pool(self._unclaimed()), _Pool(self.state))
        for name, value in self._left().items():
            if value.size > 1 and not _is_constant(value):
                sources = (self._of_rows(value, pool) for pool in pools)
                if (source := next(filter(None, sources), None)) is not None:
                    self.found[name] = source

    def _of_rows(self, value: np.ndarray, pool: _Pool) -> Source | None:
        for moved, axis, width in _views(value):
            found = pool.runs(moved.reshape(-1, width))
            if found is None:
                continue
            pieces = tuple(found)
            names = tuple(dict.fromkeys(name for name, *_ in pieces))
            repeated = any(one[:2] == two[:2] and one[3] > two[2] for one, two in itertools.pairwise(sorted(pieces)))
            is_whole = sum(self.state[name].size for name in names) == value.size
            word = "gathered" if repeated else "split" if not is_whole else "merged" if len(names) > 1 else "reordered"
            source = Rows(names, value.shape, True, pieces, moved.shape, axis, word)
            if _same(source.make(self.state), value):
                return source
        return None


class _Pool:
    """The rows of tensors, found by their values."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._places: dict[tuple[np.dtype[Any], int], dict[bytes, set[_Place]]] = {}

    def _of_width(self, dtype: np.dtype[Any], width: int) -> dict[bytes, set[_Place]]:
        if (dtype, width) not in self._places:
            places = self._places[dtype, width] = {}
            for key, one in self._state.items():
                if one.dtype != dtype or one.size < 2:
                    continue
                axes = [axis for axis, size in enumerate(one.shape) if size > 1 and one.size == size * width]
                for axis in (*axes, *((-1,) if one.size == width else ())):
                    for k, row in enumerate(_rows(one, axis)):
                        places.setdefault(row.tobytes(), set()).add((key, axis, k))
        return self._places[dtype, width]

    def runs(self, rows: np.ndarray) -> list[_Piece] | None:
        """The pieces that `rows` are, or None where a row is in no tensor, or it is not clear in which."""
        places = self._of_width(rows.dtype, rows.shape[1])
        wanted = []
        for row in rows:
            at = places.get(row.tobytes())
            if at is None or len(at) > _PLACES:
                return None
            wanted.append(at)
        pieces: list[_Piece] = []
        done = 0
        while done < len(wanted):
            if len(pieces) == _PIECES:
                return None
            lengths: dict[_Place, int] = {}
            for key, axis, start in wanted[done]:
                length = 1
                while done + length < len(wanted) and (key, axis, start + length) in wanted[done + length]:
                    length += 1
                lengths[key, axis, start] = length
            longest = max(lengths.values())
            best = [place for place, length in lengths.items() if length == longest]
            if len(best) > 1:
                return None
            key, axis, start = best[0]
            pieces.append((key, axis, start, start + longest))
            done += longest
        return pieces


def _copies(key: str, one: np.ndarray, value: np.ndarray) -> list[Copy]:
    """The ways in which a tensor is transposed and reshaped to `value`: several only where they cannot be told apart."""
    squeezed = np.squeeze(one)
    found = []
    if squeezed.ndim > _RANK:
        return [Copy((key,), value.shape, axes=tuple(range(squeezed.ndim)))] if _same(one, value) else []
    for axes in itertools.permutations(range(squeezed.ndim)):
        if _same(squeezed.transpose(axes), value):
            found.append(Copy((key,), value.shape, axes=axes))
            if len(found) > 1:
                break
    return found


def _views(value: np.ndarray) -> Iterator[tuple[np.ndarray, int, int]]:
    """The ways in which a tensor is rows: (the tensor with an axis at its end, that axis, the length of a row)."""
    yield value, -1, value.size
    if np.squeeze(value).ndim == 1:
        yield value, -1, 1
    seen = set[tuple[int, int]]()
    for k in range(1, value.ndim):
        width = int(np.prod(value.shape[k:]))
        if width > 1 and (width, -1) not in seen:
            seen.add((width, -1))
            yield value, -1, width
    for axis in range(value.ndim - 1):
        if value.shape[axis] > 1:
            yield np.moveaxis(value, axis, -1), axis, value.shape[axis]


def _rows(value: np.ndarray, axis: int) -> np.ndarray:
    """A tensor as a matrix whose rows lie along `axis`; as one row where it is -1."""
    if axis < 0:
        return value.reshape(1, -1)
    moved = np.moveaxis(value, axis, 0)
    return moved.reshape(moved.shape[0], -1)


def _fingerprint(value: np.ndarray) -> tuple[str, int, int, int]:
    """A number that does not depend on the order of the elements."""
    bits = np.ascontiguousarray(value).reshape(-1).view(f"u{value.dtype.itemsize}").astype(np.uint64)
    mixed = (bits + np.uint64(0x9E3779B9)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return value.dtype.str, value.size, int(bits.sum(dtype=np.uint64)), int((mixed * mixed).sum(dtype=np.uint64))


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """True if two tensors have the same bits, in the order of their elements."""
    return one.dtype == other.dtype and one.size == other.size and one.tobytes() == other.tobytes()


def _close(one: np.ndarray, other: np.ndarray) -> bool:
    wide, much = one.astype(np.float64).reshape(-1), other.astype(np.float64).reshape(-1)
    tolerance = max(_ROUNDING, 4 * float(np.finfo(other.dtype).eps)) if other.dtype.kind == "f" else 2e-2
    return bool(np.abs(wide - much).max() <= tolerance * np.abs(much).max())


def _is_constant(value: np.ndarray) -> bool:
    return bool((value == value.flat[0]).all())


def _is_round(value: np.ndarray) -> bool:
    """True if a number is one that a formula may have: a multiple of 1/8."""
    return value.size == 1 and bool(value.astype(np.float64) * 8 % 1 == 0)


def _squeezed(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _along(factor: np.ndarray, axis: int, rank: int) -> np.ndarray:
    return factor.reshape([-1 if k == axis else 1 for k in range(rank)])


def _ratio(value: np.ndarray, one: np.ndarray, axis: int) -> np.ndarray | None:
    """By what each output of a layer is multiplied in `value`, relative to `one`; None where it is not multiplied."""
    top, bottom = _rows(value, axis).astype(np.float64), _rows(one, axis).astype(np.float64)
    square = (bottom * bottom).sum(1)
    if not square.all():
        return None
    ratio = (top * bottom).sum(1) / square
    error = np.abs(top - ratio[:, None] * bottom).max()
    return ratio if np.isfinite(error) and error <= _ROUNDING * np.abs(top).max() and ratio.all() else None


def _epsilon(ratio: np.ndarray, gamma: np.ndarray, variance: np.ndarray) -> float | None:
    """The epsilon of a BatchNormalization that multiplies by `ratio`, or None."""
    with np.errstate(all="ignore"):
        found = (gamma.astype(np.float64) / ratio) ** 2 - variance.astype(np.float64)
    if not np.isfinite(found).all() or (np.sign(ratio) != np.sign(gamma)).any():
        return None
    middle = float(np.median(found))
    size = float(np.abs(variance).max())
    if np.abs(found - middle).max() > 1e-4 * size or not -1e-5 * size < middle < 1:
        return None
    known = (1e-5, 1e-3, 1e-6, 1e-12, 1e-8, 1e-7, 1e-4, 1e-2)
    return min(known, key=lambda one: abs(one - middle)) if middle < 2e-2 else middle
