"""The origin of the initializers of an export: tensors of a state_dict, rearranged, merged, folded or computed.

A `Source` describes how an exporter computed one initializer from tensors of the state_dict. It computes the initializer
again from other values of these tensors. Every source that `find_sources` returns is verified, except `Ambiguous` ones: it
computes the initializer's value bit for bit, or up to rounding if `exact` is False.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

State: TypeAlias = Mapping[str, np.ndarray]
_Place: TypeAlias = tuple[str, int, int]  # a tensor, its axis, the row along it
_Piece: TypeAlias = tuple[str, int, int, int]  # a tensor, its axis, the first row along it, the row after the last one

# Limits of the search: at most 8 places where one row occurs, at most 65536 pieces for one tensor.
_PLACES, _PIECES = 8, 1 << 16
_RANK = 5  # limit of the search: tensors of a higher rank are only compared untransposed
_ROUNDING = 1e-5  # the relative difference that rounding may make
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Source:
    """The way from tensors of a state_dict to an initializer.

    `names` are the names of the tensors: more than one if tensors are merged, folded or tied. `shape` is the shape of the
    initializer. If `exact` is True, `make` returns the initializer bit for bit, otherwise up to rounding.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    exact: bool = True

    @property
    def how(self) -> str:
        """The word for how the tensors were changed, such as "transposed"."""
        raise NotImplementedError

    def make(self, state: State) -> np.ndarray:
        """The initializer, computed from the tensors `names` of `state`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Copy(Source):
    """One tensor, without its axes of size 1, transposed by `axes` and reshaped to `shape`.

    A tensor that the state_dict has under several names (tied weights) has several `names`.
    """

    axes: tuple[int, ...] = ()

    @property
    def how(self) -> str:
        """The word "equal" or "transposed"; "equal, tied" or "transposed, tied" if the tensor has several names."""
        word = "equal" if self.axes == tuple(range(len(self.axes))) else "transposed"
        return f"{word}, tied" if len(self.names) > 1 else word

    def make(self, state: State) -> np.ndarray:
        """The transposed tensor. The value under the first name is used: the values of all tied names are equal."""
        return np.squeeze(state[self.names[0]]).transpose(self.axes).reshape(self.shape)


@dataclass(frozen=True)
class Ambiguous(Source):
    """An initializer whose source cannot be determined. It has no `make`.

    It is one of several tensors with the same values, or one tensor that several permutations of axes turn into the
    initializer.
    """

    @property
    def how(self) -> str:
        """The word "ambiguous"."""
        return "ambiguous"


@dataclass(frozen=True)
class Rows(Source):
    """Rows of tensors, one after the other: gates in another order, merged or split tensors, embeddings of constant ids.

    A piece (name, axis, start, stop) is the rows `start` to `stop` of a tensor as a matrix: the tensor's `axis` is moved to
    the front, and its other axes are flattened. If `axis` is -1, the whole tensor is one row. The rows of all pieces are
    reshaped to `moved`. Then the last axis is moved to the position `axis` of the source; if this is -1, it stays. `word` is
    the value of `how`.
    """

    pieces: tuple[_Piece, ...] = ()
    moved: tuple[int, ...] = ()
    axis: int = -1
    word: str = "merged"

    @property
    def how(self) -> str:
        """The word "merged", "reordered", "split", or "gathered" if a row occurs twice."""
        return self.word

    def make(self, state: State) -> np.ndarray:
        """The rows of all pieces, concatenated and reshaped."""
        rows = [_rows(state[name], axis)[start:stop] for name, axis, start, stop in self.pieces]
        laid = np.concatenate(rows).reshape(self.moved)
        return np.moveaxis(laid, -1, self.axis).reshape(self.shape)


@dataclass(frozen=True)
class Folded(Source):
    """The weight or the bias of a layer into which the BatchNormalization after it was folded.

    `names` are the layer's weight or bias, then scale, B, mean and variance of the BatchNormalization. If the layer has no
    bias of its own, the names for a folded bias start with scale. With f = scale/√(variance + epsilon), the weight is
    multiplied by f along `axis`, and the bias b becomes B + (b − mean)·f.
    """

    epsilon: float = 1e-5
    axis: int = 0
    bias: bool = False

    @property
    def how(self) -> str:
        """The word "folded"."""
        return "folded"

    def make(self, state: State) -> np.ndarray:
        """The weight of the layer after folding, or its bias if `bias` is True."""
        *layer, gamma, beta, mean, variance = (state[name] for name in self.names)
        factor = gamma / np.sqrt(variance + variance.dtype.type(self.epsilon))
        if self.bias:
            before = layer[0] if layer else np.zeros_like(mean)
            folded = (before - mean) * factor + beta
        else:
            folded = layer[0] * _along(factor, self.axis, layer[0].ndim)
        return np.asarray(folded, mean.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Computed(Source):
    """A function of tensors that the exporter computed.

    The functions of one tensor are "x + 1", "exp(x)" and "-exp(x)". "weight_norm" is the weight of torch's weight_norm, of
    its magnitude and its direction.
    """

    function: str = ""

    @property
    def how(self) -> str:
        """The name of the function."""
        return self.function

    def make(self, state: State) -> np.ndarray:
        """The result of the function on the tensors `names` of `state`."""
        computed = _FUNCTIONS[self.function](*(state[name] for name in self.names))
        return computed.reshape(self.shape)


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
    """The names of the weight and the bias of a Conv, ConvTranspose or Gemm, and the weight's axis of output channels."""

    weight: str
    bias: str
    axis: int


def find_sources(
    initializers: State, state: State, layers: Sequence[Layer] = (), parameters: frozenset[str] = frozenset()
) -> dict[str, Source]:
    """The `Source` of each initializer that was computed from tensors of `state`. Other initializers are left out.

    :param initializers: the float initializers of the export, by name.
    :param state: the float tensors of the state_dict, by name, in the types of the export.
    :param layers: the layers into which a BatchNormalization may have been folded.
    :param parameters: the names of the initializers that are parameters of layers. If an initializer has one element, or
        equal elements, equal values prove little: its source is searched for only if it is in `parameters`.
    """
    search = _Search(initializers, state)
    search.copies(parameters)
    search.folds(layers)
    search.computed()
    search.rows()
    return search.found


def reductions(state: State) -> np.ndarray:
    """The sum, mean, norm and extreme values of each tensor, and the exponentials of these numbers, in float64."""
    values = []
    for array in state.values():
        if array.size > 1 and array.dtype.kind == "f" and not _is_constant(array):
            wide = array.astype(np.float64)
            square = (wide * wide).sum()
            values += [wide.sum(), wide.mean(), square, np.sqrt(square), wide.max(), wide.min(), np.abs(wide).max()]
    numbers = np.array(values, np.float64)
    with np.errstate(over="ignore"):
        return np.concatenate([numbers, np.exp(numbers)])


def is_among(value: np.ndarray, numbers: np.ndarray) -> bool:
    """True if `value`, a tensor of one element, is not 0 and equals one of `numbers` up to rounding."""
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
        """Find the initializers that are copies of a tensor: first by name, then by value, also if axes are permuted."""
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
            few = value.size == 1 or _is_constant(value)  # then unrelated tensors may have equal values
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
        """Find the weights and biases of layers into which a BatchNormalization was folded."""
        norms: dict[int, list[str]] = {}
        for key, value in self.state.items():
            stem, _, last = key.rpartition(".")
            if last == "running_var" and all(
                f"{stem}.{name}" in self.state for name in ("weight", "bias", "running_mean")
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
        keys = [key for key, array in self.state.items() if array.shape == value.shape]
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
        weight = source.make(self.state)
        return (
            Folded(source.names, source.shape, _same(weight, value), source.epsilon, source.axis, source.bias)
            if _close(weight, value)
            else None
        )

    def computed(self) -> None:
        """Find the initializers that are a function of tensors. Only tensors that are not yet a source are searched."""
        for name, value in self._left().items():
            for names, function in self._functions(value):
                with np.errstate(all="ignore"):
                    array = np.asarray(_FUNCTIONS[function](*(self.state[key] for key in names)))
                if array.size != value.size:
                    continue
                array = array.reshape(value.shape)
                if _same(array, value) or (function != "x + 1" and _close(array, value) and not _is_round(value)):
                    self.found[name] = Computed(names, value.shape, _same(array, value), function)
                    break

    def _functions(self, value: np.ndarray) -> Iterator[tuple[tuple[str, ...], str]]:
        """The functions that may have `value` as their result, each with the names of the tensors that it takes.

        The tensors have the shape of `value`, up to axes of size 1. Only the magnitude of weight_norm has another shape.
        """
        left = self._unclaimed()
        squeezed = _squeezed(value.shape)
        for key, array in left.items():
            if _squeezed(array.shape) == squeezed and array.dtype == value.dtype:
                yield from (((key,), function) for function in ("x + 1", "exp(x)", "-exp(x)"))
            for size, direction in (("original0", "original1"), ("weight_g", "weight_v")):
                other = key.removesuffix(size) + direction
                if (
                    key.endswith(size)
                    and other in left
                    and left[other].shape == value.shape
                    and array.ndim == value.ndim
                ):
                    yield (key, other), "weight_norm"

    def rows(self) -> None:
        """Find the initializers that consist of rows of tensors.

        Tensors that are not yet the source of an initializer are searched first, then all tensors.
        """
        pools = (_Pool(self._unclaimed()), _Pool(self.state))
        for name, value in self._left().items():
            if value.size > 1 and not _is_constant(value):
                sources = (self._of_rows(value, pool) for pool in pools)
                if (source := next(filter(None, sources), None)) is not None:
                    self.found[name] = source

    def _of_rows(self, value: np.ndarray, pool: _Pool) -> Source | None:
        for moved, axis, width in _views(value):
            runs = pool.runs(moved.reshape(-1, width))
            if runs is None:
                continue
            pieces = tuple(runs)
            names = tuple(dict.fromkeys(name for name, *_ in pieces))
            repeated = any(
                piece[:2] == two[:2] and piece[3] > two[2] for piece, two in itertools.pairwise(sorted(pieces))
            )
            is_whole = sum(self.state[name].size for name in names) == value.size
            word = "gathered" if repeated else "split" if not is_whole else "merged" if len(names) > 1 else "reordered"
            source = Rows(names, value.shape, True, pieces, moved.shape, axis, word)
            if _same(source.make(self.state), value):
                return source
        return None


class _Pool:
    """An index of the rows of tensors by their values."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._places: dict[tuple[np.dtype[Any], int], dict[bytes, set[_Place]]] = {}

    def _of_width(self, dtype: np.dtype[Any], width: int) -> dict[bytes, set[_Place]]:
        if (dtype, width) not in self._places:
            places = self._places[dtype, width] = {}
            for key, array in self._state.items():
                if array.dtype != dtype or array.size < 2:
                    continue
                axes = [axis for axis, size in enumerate(array.shape) if size > 1 and array.size == size * width]
                for axis in (*axes, *((-1,) if array.size == width else ())):
                    for k, row in enumerate(_rows(array, axis)):
                        places.setdefault(row.tobytes(), set()).add((key, axis, k))
        return self._places[dtype, width]

    def runs(self, rows: np.ndarray) -> list[_Piece] | None:
        """The pieces of tensors that `rows` consist of. None if a row is in no tensor, or if several pieces are possible."""
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


def _copies(key: str, array: np.ndarray, value: np.ndarray) -> list[Copy]:
    """The ways to transpose and reshape the tensor `array` to `value`, at most two.

    Two ways mean that the order of the axes cannot be determined.
    """
    squeezed = np.squeeze(array)
    copies = []
    if squeezed.ndim > _RANK:
        return [Copy((key,), value.shape, axes=tuple(range(squeezed.ndim)))] if _same(array, value) else []
    for axes in itertools.permutations(range(squeezed.ndim)):
        if _same(squeezed.transpose(axes), value):
            copies.append(Copy((key,), value.shape, axes=axes))
            if len(copies) > 1:
                break
    return copies


def _views(value: np.ndarray) -> Iterator[tuple[np.ndarray, int, int]]:
    """The ways to split a tensor into rows: (the tensor with one axis moved to the end, this axis, the length of a row).

    The axis is -1 if no axis is moved.
    """
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
    """A tensor as a matrix with one row for each index along `axis`, or with a single row if `axis` is -1."""
    if axis < 0:
        return value.reshape(1, -1)
    moved = np.moveaxis(value, axis, 0)
    return moved.reshape(moved.shape[0], -1)


def _fingerprint(value: np.ndarray) -> tuple[str, int, int, int]:
    """A key that equal tensors share, in whatever order their elements are: type, size and two sums of the elements' bits."""
    bits = np.ascontiguousarray(value).reshape(-1).view(f"u{value.dtype.itemsize}").astype(np.uint64)
    mixed = (bits + np.uint64(0x9E3779B9)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return value.dtype.str, value.size, int(bits.sum(dtype=np.uint64)), int((mixed * mixed).sum(dtype=np.uint64))


def _same(first: np.ndarray, other: np.ndarray) -> bool:
    """True if two tensors have the same bits, in the order of their elements."""
    return first.dtype == other.dtype and first.size == other.size and first.tobytes() == other.tobytes()


def _close(first: np.ndarray, other: np.ndarray) -> bool:
    wide, much = first.astype(np.float64).reshape(-1), other.astype(np.float64).reshape(-1)
    tolerance = max(_ROUNDING, 4 * float(np.finfo(other.dtype).eps)) if other.dtype.kind == "f" else 2e-2
    return bool(np.abs(wide - much).max() <= tolerance * np.abs(much).max())


def _is_constant(value: np.ndarray) -> bool:
    return bool((value == value.flat[0]).all())


def _is_round(value: np.ndarray) -> bool:
    """True if a tensor is one number that may be a constant of a formula: a multiple of 1/8."""
    return value.size == 1 and bool(value.astype(np.float64) * 8 % 1 == 0)


def _squeezed(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _along(factor: np.ndarray, axis: int, rank: int) -> np.ndarray:
    return factor.reshape([-1 if k == axis else 1 for k in range(rank)])


def _ratio(value: np.ndarray, divisor: np.ndarray, axis: int) -> np.ndarray | None:
    """The factors f, one per index along `axis`, with `value` = f·`divisor` up to rounding. None if there are none.

    A factor of 0 does not count.
    """
    top, bottom = _rows(value, axis).astype(np.float64), _rows(divisor, axis).astype(np.float64)
    square = (bottom * bottom).sum(1)
    if not square.all():
        return None
    ratio = (top * bottom).sum(1) / square
    error = np.abs(top - ratio[:, None] * bottom).max()
    return ratio if np.isfinite(error) and error <= _ROUNDING * np.abs(top).max() and ratio.all() else None


def _epsilon(ratio: np.ndarray, gamma: np.ndarray, variance: np.ndarray) -> float | None:
    """The epsilon for which gamma/√(variance + epsilon) is `ratio`. None if there is none that fits all channels."""
    with np.errstate(all="ignore"):
        epsilons = (gamma.astype(np.float64) / ratio) ** 2 - variance.astype(np.float64)
    if not np.isfinite(epsilons).all() or (np.sign(ratio) != np.sign(gamma)).any():
        return None
    middle = float(np.median(epsilons))
    size = float(np.abs(variance).max())
    if np.abs(epsilons - middle).max() > 1e-4 * size or not -1e-5 * size < middle < 1:
        return None
    known = (1e-5, 1e-3, 1e-6, 1e-12, 1e-8, 1e-7, 1e-4, 1e-2)
    return min(known, key=lambda constant: abs(constant - middle)) if middle < 2e-2 else middle
