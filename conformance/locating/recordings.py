"""Tensors that somebody recorded: values and gradients by the names of another framework, and which of ours they are.

A recording is matched by name first. Where it has the values of the weights as well, `refgrad.weights` says how each
initializer is made of them, and gradients go the same way. Where it has gradients alone, those are told by shape and values:
transposed, in blocks (the gates of an LSTM, q, k and v), flattened. A gradient left over that fits one place alone goes there.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto

from refgrad.conformance.case import is_float
from refgrad.errors import FeedError, OptionError, choices
from refgrad.model.external import array_of
from refgrad.model.values import array_in, read_value
from refgrad.parameters.origins import Computed, Copy, Folded, Rows, Source
from refgrad.parameters.states import read_state_dict
from refgrad.parameters.weights import weights
from refgrad.protos.arrays import read_arrays
from refgrad.protos.inputs import read_bytes
from refgrad.protos.memory import allowed

_SUFFIXES = ("_grad", ".grad", "/grad", ":grad", "_gradient", ".gradient")
_PREFIXES = ("grad/", "grad.", "grad:", "grad_", "gradient/", "g:", "d:", "d_", "∂")
_SHORT = ("d", "g")  # before a name that is known, as in dx
_ALIKE = 2e-2  # relative to the norm: two gradients that are closer than this are of the same tensor
_APART = 8.0  # times as far off is the next one, or nobody can tell
_BLOCKS = (1, 2, 3, 4, 6, 8)  # into which rows are cut: gates, q, k and v, two directions
_RANK = 5
_PARALLEL, _SPREAD = 0.9999, 1e-2  # cosines of rows, and how far their factors are apart, of a layer that is folded
_PAIRS = 1 << 23  # of elements with one norm: more are not followed
_ADDED = 0.05  # how far a factor of a sum may be from 0 or 1
_BETWEEN = re.compile(r"[./:]+")  # the words of a name
_NEARLY = 0.9  # the cosine of two gradients that belong together by their shape
NAME = "name"
_MERGED = "the model may have one initializer for several tensors of this size: record the values of the weights too"


@dataclass(frozen=True)
class Recording:
    """Tensors by name: `gradients`, by the name of what each is the gradient of, and `values`.

    A gradient is called `<name>_grad`, `<name>.grad`, `grad/<name>`, `g:<name>` or the like; `dx` is one where there is an `x`.
    Where no name says so, whatever is no output of the model is a gradient.
    """

    label: str
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    gradients: Mapping[str, np.ndarray] = field(default_factory=dict)
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)  # as they were recorded

    def __str__(self) -> str:
        return self.label

    @classmethod
    def of(cls, tensors: Mapping[str, np.ndarray], label: str, model: ModelProto | None = None) -> Recording:
        """A recording of these tensors, of a model whose names they may have.

        :raises FeedError: a gradient of whole or complex numbers or of texts, or two of one name that differ.
        """
        graph = ModelProto().graph if model is None else model.graph
        outputs = {value.name for value in graph.output}
        known = outputs | {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        stems = {name: _stem(name, known, tensors.keys()) for name in tensors}
        values: dict[str, np.ndarray] = {}
        gradients: dict[str, np.ndarray] = {}
        for name, value in tensors.items():
            stem = stems[name]
            if stem is None:
                values[name] = value
            elif not is_float(value):
                raise FeedError(
                    f"{label}: {name!r} has the type {value.dtype}. Gradients are real numbers with a fraction."
                )
            elif model is not None and stem in gradients and not np.array_equal(gradients[stem], value, equal_nan=True):
                raise FeedError(f"{label} has two gradients of {stem!r} that differ: {name!r} is one. Keep one.")
            else:
                gradients[stem] = value
        if gradients:
            return cls(label, values, gradients, tensors)
        unmarked = {name: value for name, value in values.items() if is_float(value) and name not in outputs}
        return cls(label, {n: v for n, v in values.items() if n not in unmarked}, unmarked, tensors)

    def for_model(self, model: ModelProto) -> Recording:
        """The recording for a model, whose names tell which tensors are gradients."""
        return Recording.of(self.tensors, self.label, model) if self.tensors else self


def _stem(name: str, known: Collection[str], recorded: Collection[str]) -> str | None:
    """The name of the tensor that a recorded one is the gradient of, None if it is a value."""
    if name in known:
        return None
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and name != suffix:
            return name.removesuffix(suffix)
    for prefix in _PREFIXES:
        if name.startswith(prefix) and name != prefix:
            return name.removeprefix(prefix)
    short = next((name[1:] for mark in _SHORT if name.startswith(mark) and name[1:] in {*known, *recorded}), None)
    return short or None


def read_recording(path: str | Path) -> Recording:
    """The tensors of a .npz or .safetensors file, or of the .pb files of a folder.

    :raises FeedError: there is no such file, it is malformed, or larger than the memory that is allowed.
    :raises OptionError: it is no such file.
    """
    file = Path(path)
    if file.is_dir():
        arrays = dict(_of_folder(file))
    elif file.suffix == ".safetensors":
        arrays = read_state_dict(file)
    else:
        arrays = read_arrays(file, "Recordings")
    if not arrays:
        raise FeedError(f"{str(file)!r} holds no tensors.")
    return Recording.of(arrays, str(file))


def _of_folder(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    files = sorted(folder.glob("*.pb"))
    if not files:
        raise FeedError(f"{str(folder)!r} has no .pb files: a recording has one for each tensor, with its name in it.")
    limit, held, seen = allowed(), 0, dict[str, Path]()
    for file in files:
        content = read_bytes(file, FeedError)
        held += len(content)
        if limit is not None and held > limit:
            raise FeedError(f"The tensors in {str(folder)!r} are larger than max_memory, {limit} bytes.")
        tensor = read_value(content, TensorProto, file)
        name = tensor.name or file.stem
        if name in seen:
            raise FeedError(f"{str(file)!r} and {seen[name].name!r} both have a tensor {name!r}. Keep one.")
        seen[name] = file
        yield name, array_in(tensor, file)


@dataclass(frozen=True)
class _Piece:
    """Elements of a recorded gradient and of ours that they add up: at = Σ factor·ours."""

    name: str
    ours: np.ndarray | slice
    at: np.ndarray | slice
    factor: np.ndarray | float = 1.0


@dataclass(frozen=True)
class Match:
    """How a recorded gradient is made of our gradients: "name", "transposed", "merged", ...

    `added` are further recorded gradients, which are added to the first: the model has one tensor for all of them.
    """

    recorded: str
    how: str
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]
    added: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The recorded gradients that are compared, in words."""
        if len(self.added) > 1:
            return f"{self.recorded} and {len(self.added)} more"
        return " + ".join((self.recorded, *self.added))

    def in_recording(self, gradients: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """The recorded gradient: the sum of all that belong to it. None if one of them is missing."""
        parts = [gradients.get(name) for name in (self.recorded, *self.added)]
        if len(parts) == 1:
            return parts[0]
        arrays = [np.asarray(part, np.float64) for part in parts if part is not None]
        if len(arrays) < len(parts):
            return None
        kind = max((part.dtype for part in parts if part is not None), key=lambda dtype: -dtype.itemsize)
        total: np.ndarray = np.sum([array.reshape(arrays[0].shape) for array in arrays], axis=0)
        return total.astype(kind)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what our gradients are of."""
        return tuple(dict.fromkeys(piece.name for piece in self.pieces))

    def made_of(self, arrays: Mapping[str, np.ndarray], sizes: bool = False) -> np.ndarray:
        """Our gradients in the form of the recorded one; with `sizes` what bounds of their elements amount to."""
        combined = np.zeros(math.prod(self.shape))
        for piece in self.pieces:
            factor = np.abs(piece.factor) if sizes else piece.factor
            ours = factor * arrays[piece.name].reshape(-1)[piece.ours]
            if isinstance(piece.at, slice):
                combined[piece.at] += ours
            else:
                np.add.at(combined, piece.at, ours)
        return combined.reshape(self.shape)


def identity(name: str, shape: tuple[int, ...]) -> Match:
    """The match of a tensor with the tensor of the same name."""
    return Match(name, NAME, shape, (_Piece(name, slice(None), slice(None)),))


def _is_folded(theirs: np.ndarray, ours: np.ndarray) -> bool:
    """True if two gradients differ by a factor for each row, and these factors differ."""
    if theirs.shape != ours.shape or theirs.ndim < 2 or len(theirs) < 2:
        return False
    left, right = (value.astype(np.float64).reshape(len(value), -1) for value in (theirs, ours))
    norms = np.linalg.norm(left, axis=1), np.linalg.norm(right, axis=1)
    told = (norms[0] > 0) & (norms[1] > 0)
    if np.count_nonzero(told) < 2:
        return False
    with np.errstate(all="ignore"):
        cosines = (left * right).sum(1)[told] / (norms[0] * norms[1])[told]
        factors = norms[0][told] / norms[1][told]
    return bool(np.all(cosines > _PARALLEL) and factors.max() > (1 + _SPREAD) * factors.min())


@dataclass
class Matched:
    """The matches, and why the other recorded gradients have none.

    `computed` are initializers that are not made of the recorded values: the exporter may have computed them of weights, which
    get no gradient through them here.
    """

    found: dict[str, Match]
    left: dict[str, str]
    computed: tuple[str, ...] = ()

    @property
    def known(self) -> set[str]:
        """The recorded gradients that are matched, alone or in a sum."""
        return {name for match in self.found.values() for name in (match.recorded, *match.added)}

    def of(self, names: Iterable[str]) -> set[str]:
        """The `names` that no recorded gradient is made of."""
        covered = {name for match in self.found.values() for name in match.names}
        return {name for name in names if name not in covered}


def match(model: ModelProto, recording: Recording, due: Mapping[str, np.ndarray]) -> Matched:
    """Say of each recorded gradient which of ours it is.

    :param due: our gradients, by what they are of.
    """
    matched = Matched({}, {})
    recorded = dict(recording.gradients)
    for name, value in recorded.items():
        if name not in due:
            continue
        is_alike = np.squeeze(value).shape == np.squeeze(due[name]).shape
        is_of_another = name in recording.values and recording.values[name].shape == value.shape
        if is_alike or (value.size != due[name].size and not is_of_another):  # then it has the wrong shape
            matched.found[name] = identity(name, value.shape if is_alike else due[name].shape)
    for name, ours in _renamed(recorded, {key: due[key] for key in matched.of(due)}).items():
        matched.found[name] = replace(identity(ours, due[ours].shape), recorded=name, how="its name has the same end")
    state = {name: value for name, value in recording.values.items() if value.dtype.kind == "f"}
    if recorded.keys() & state.keys():
        _by_values(model, state, due, matched, recorded.keys())
    held = {tensor.name for tensor in model.graph.initializer}
    for name in [name for name, known_match in matched.found.items() if known_match.how == NAME and name in held]:
        if _is_folded(recorded[name], due[name]):
            del matched.found[name]
            matched.left[name] = (
                "it differs by a factor for each row, as a folded layer does: record the values of the weights too"
            )
    open_ours = {name: value for name, value in due.items() if name in matched.of(due)}
    _by_sums(model, recording, due, matched)
    open_theirs = {
        name: value for name, value in recorded.items() if name not in matched.known and name not in matched.left
    }
    if open_theirs and open_ours:
        _by_content(open_theirs, open_ours, matched)
        if not recorded.keys() & state.keys():  # what has values and fits none is of another tensor
            weights_of = {t.name: array_of(t) for t in model.graph.initializer if t.name in open_ours}
            _by_elimination(open_theirs, open_ours, weights_of, matched)
    within = {name for node in model.graph.node for name in node.output}
    for name in recorded:
        if name not in matched.known:
            why = "it belongs to a value within the model: only gradients of inputs and initializers are compared"
            other = "no gradient of the model has its size and its values"
            matched.left.setdefault(name, why if name in within else other)
    return matched


def _renamed(theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray]) -> dict[str, str]:
    """The names of ours by recorded ones that end alike, such as module.fc.weight and fc.weight, if one fits one alone."""
    words = {name: tuple(filter(None, _BETWEEN.split(name))) for name in (*theirs, *ours)}

    def alike(one: str, another: str) -> bool:
        short, long = sorted((words[one], words[another]), key=len)
        return bool(short) and long[-len(short) :] == short

    fits = {
        name: [key for key in ours if alike(name, key) and np.squeeze(ours[key]).shape == np.squeeze(value).shape]
        for name, value in theirs.items()
        if name not in ours
    }
    counts = Counter(key for keys in fits.values() for key in keys)
    return {name: keys[0] for name, keys in fits.items() if len(keys) == 1 and counts[keys[0]] == 1}


# By sums: an exporter merges initializers that are equal, as the ones and zeros of fresh normalizations are


def _by_sums(model: ModelProto, recording: Recording, due: Mapping[str, np.ndarray], matched: Matched) -> None:
    """Match the sum of several recorded gradients with ours, if the model has one initializer for all of them."""
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    for name in [name for name in due if name in held]:
        theirs = [key for key, match in matched.found.items() if match.names == (name,)]
        own = name if name in theirs else None
        if own is not None and matched.found[own].how == NAME and _is_near(recording.gradients[own], due[name]):
            continue
        candidates = [key for key in _candidates(recording, held[name], due, matched) if key != own]
        parts = [key for key in dict.fromkeys((own, *theirs, *candidates)) if key is not None]
        values = [recording.gradients[key].astype(np.float64).reshape(-1) for key in parts]
        if len(parts) < 2 or all(np.array_equal(values[0], value) for value in values[1:]):
            continue  # what shares one tensor in torch has its gradient under each name
        if not (chosen := _summands(parts, values, due[name].reshape(-1))):
            has_values = all(key in recording.values for key in parts)
            chosen = parts if has_values else []
            if not has_values and own is not None and np.unique(array_of(held[name])).size == 1:
                del matched.found[own]
                matched.left[own] = _MERGED
        if len(chosen) > 1:
            for key in chosen:
                matched.found.pop(key, None)
                matched.left.pop(key, None)
            how = f"the sum of {len(chosen)}, which are equal in the model"
            whole = _Piece(name, slice(None), slice(None))
            matched.found[chosen[0]] = Match(chosen[0], how, due[name].shape, (whole,), tuple(chosen[1:]))


def _candidates(
    recording: Recording, tensor: TensorProto, due: Mapping[str, np.ndarray], matched: Matched
) -> list[str]:
    """The recorded gradients that may be a part of the gradient by an initializer: of its size, and its values if recorded."""
    gradient = due[tensor.name]
    weight = array_of(tensor)
    found = []
    for key, value in recording.gradients.items():
        if key in due or value.size != gradient.size or np.squeeze(value).shape != np.squeeze(gradient).shape:
            continue
        if key in matched.found and matched.found[key].names != (tensor.name,):
            continue
        known = recording.values.get(key)
        if known is None or _is_equal(known, weight):
            found.append(key)
    return found


def _is_equal(recorded: np.ndarray, weight: np.ndarray) -> bool:
    """True if a recorded value is an initializer, but for axes of size 1 and the type."""
    return np.array_equal(np.squeeze(recorded), np.squeeze(weight).astype(recorded.dtype))


def _summands(parts: Sequence[str], values: Sequence[np.ndarray], due: np.ndarray) -> list[str]:
    """The recorded gradients whose sum is ours: all of them, or the ones to which least squares give the factor 1."""
    if _is_near(np.sum(values, axis=0), due):
        return list(parts)
    if not all(np.isfinite(value).all() for value in (*values, due)):
        return []
    factors = np.linalg.lstsq(np.stack(values, axis=1), due, rcond=None)[0]
    if len(parts) > due.size or np.any(np.minimum(np.abs(factors), np.abs(factors - 1)) > _ADDED):
        return []
    chosen = [k for k, factor in enumerate(factors) if factor > 0.5]
    is_sum = bool(chosen) and _is_near(np.sum([values[k] for k in chosen], axis=0), due)
    return [parts[k] for k in chosen] if is_sum else []


def _is_near(theirs: np.ndarray, ours: np.ndarray) -> bool:
    """True if a recorded gradient is ours up to what a wrong digit may do."""
    left, right = theirs.astype(np.float64).reshape(-1), ours.reshape(-1)
    return left.shape == right.shape and bool(np.linalg.norm(left - right) <= _ALIKE * np.linalg.norm(right))


# By the values of the weights


def _by_values(
    model: ModelProto,
    state: Mapping[str, np.ndarray],
    due: Mapping[str, np.ndarray],
    matched: Matched,
    recorded: Collection[str],
) -> None:
    """Follow the way from the recorded weights to the initializers backwards: cotangents of equal elements add up."""
    try:
        sources = weights(model, state)
    except OptionError:  # nothing in the model is made of them
        return
    matched.computed = tuple(name for name, weight in sources.items() if weight.kind == "unexplained")
    held = {tensor.name: array_of(tensor) for tensor in model.graph.initializer if tensor.name in due}
    alike = {n for n, value in held.items() if any(_is_equal(state[key], value) for key in recorded if key in state)}
    pieces: dict[str, list[_Piece]] = {}
    hows: dict[str, list[str]] = {}
    for name, weight in sources.items():
        source = weight.source
        if source is None or name not in due or (isinstance(source, Computed) and name in alike):
            continue
        for key, piece in _adjoint(name, source, state):
            pieces.setdefault(key, []).append(piece)
            hows.setdefault(key, []).append(weight.how)
    for key, parts in pieces.items():
        if key not in recorded:
            continue
        matched.found[key] = Match(key, " and ".join(dict.fromkeys(hows[key])), state[key].shape, tuple(parts))


def _adjoint(name: str, source: Source, state: Mapping[str, np.ndarray]) -> Iterator[tuple[str, _Piece]]:
    """The elements of each tensor that an initializer is made of, with the derivative by each."""
    if isinstance(source, Copy | Rows):
        names = source.names if isinstance(source, Rows) else source.names[:1]
        numbers = np.cumsum([0, *(state[key].size for key in names)])
        ids = {
            key: np.arange(first, first + state[key].size, dtype=np.float64).reshape(state[key].shape)
            for key, first in zip(names, numbers, strict=False)
        }
        places = source.make(ids).reshape(-1).astype(np.int64)
        for key, first in zip(names, numbers, strict=False):
            ours = np.flatnonzero((places >= first) & (places < first + state[key].size))
            for tied in source.names if isinstance(source, Copy) else (key,):
                yield tied, _Piece(name, ours, places[ours] - first)
    elif isinstance(source, Computed) and len(source.names) == 1:
        [key] = source.names
        places, value = np.arange(state[key].size), state[key].astype(np.float64).reshape(-1)
        factor = {"x + 1": np.ones(value.size), "exp(x)": np.exp(value), "-exp(x)": -np.exp(value)}.get(source.how)
        if factor is not None:
            yield key, _Piece(name, places, places, factor)
    elif isinstance(source, Computed) and source.how == "weight_norm":
        yield from _of_weight_norm(name, source, state)
    elif isinstance(source, Folded):
        yield from _of_folded(name, source, state)


def _of_weight_norm(name: str, source: Computed, state: Mapping[str, np.ndarray]) -> Iterator[tuple[str, _Piece]]:
    """w = g·u with u = v/‖v‖: dg = <u, dw>, dv = g/‖v‖·(dw − u·<u, dw>), over the elements that have one norm."""
    size, direction = (state[key].astype(np.float64) for key in source.names)
    norms = np.broadcast_to(np.arange(size.size).reshape(size.shape), direction.shape).reshape(-1)
    v = direction.reshape(-1)
    lengths = np.sqrt(np.bincount(norms, v * v, size.size))
    unit, places = v / lengths[norms], np.arange(v.size)
    scale = (size.reshape(-1) / lengths)[norms]
    yield source.names[0], _Piece(name, places, norms, unit)
    if v.size**2 // max(size.size, 1) > _PAIRS:
        return
    yield source.names[1], _Piece(name, places, places, scale)
    for k in range(size.size):
        own = np.flatnonzero(norms == k)
        ours, at = (grid.reshape(-1) for grid in np.meshgrid(own, own))
        yield source.names[1], _Piece(name, ours, at, -scale[at] * unit[at] * unit[ours])


def _of_folded(name: str, source: Folded, state: Mapping[str, np.ndarray]) -> Iterator[tuple[str, _Piece]]:
    """w·f and (b − m)·f + B, with f = scale/√(variance + ε)."""
    *layer, gamma, beta, mean, variance = source.names
    root = 1 / np.sqrt(state[variance].astype(np.float64) + source.epsilon)
    f = state[gamma] * root
    if source.bias:
        places = np.arange(f.size)
        before = state[layer[0]].astype(np.float64) if layer else np.zeros(f.shape)
        yield beta, _Piece(name, places, places)
        yield gamma, _Piece(name, places, places, (before - state[mean]) * root)
        if layer:
            yield layer[0], _Piece(name, places, places, f)
        return
    value = state[layer[0]].astype(np.float64)
    channels = np.moveaxis(
        np.broadcast_to(np.arange(f.size), (*np.delete(value.shape, source.axis), f.size)), -1, source.axis
    )
    places, channel = np.arange(value.size), channels.reshape(-1)
    yield layer[0], _Piece(name, places, places, f[channel])
    yield gamma, _Piece(name, places, channel, value.reshape(-1) * root[channel])


# By the gradients themselves


@dataclass(frozen=True)
class _Block:
    """Rows of a tensor in one orientation: their values, and their places in it."""

    name: str
    value: np.ndarray
    places: np.ndarray
    norm: float


def _by_content(theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray], matched: Matched) -> None:
    """Equal up to what a wrong digit may do: whole first, transposed and reshaped, then in blocks of rows."""
    for whole in (True, False):
        left = {name: value for name, value in theirs.items() if name not in matched.known}
        free = {name: value for name, value in ours.items() if name in matched.of(ours)}
        pool: dict[tuple[int, ...], list[_Block]] = {}
        for name, value in free.items():
            for block in _blocks(name, value, whole):
                pool.setdefault(block.value.shape, []).append(block)
        for name, value in left.items():
            if (block_match := _made_of_blocks(name, value, pool, whole)) is not None:
                matched.found[name] = block_match


def _made_of_blocks(
    name: str, value: np.ndarray, pool: Mapping[tuple[int, ...], Sequence[_Block]], whole: bool
) -> Match | None:
    for held in _forms(np.squeeze(value).astype(np.float64), whole):
        for count in (1,) if whole else _BLOCKS:
            if held.shape[0] % count:
                continue
            parts: list[_Piece] = []
            offset = 0
            for row in np.split(held, count):
                best = _nearest(row, pool.get(row.shape, ()))
                if best is None:
                    break
                parts.append(_Piece(best.name, best.places.reshape(-1), np.arange(offset, offset + row.size)))
                offset += row.size
            else:
                how = "equal or transposed" if whole else "in blocks"
                return Match(name, how, value.shape, tuple(parts))
    return None


def _nearest(value: np.ndarray, blocks: Iterable[_Block]) -> _Block | None:
    """The one block that is as good as equal."""
    norm = float(np.linalg.norm(value))
    if not norm or not math.isfinite(norm):
        return None
    near = (block for block in blocks if abs(block.norm - norm) <= _ALIKE * norm)
    by_distance = sorted(
        ((float(np.linalg.norm(one.value - value)) / norm, one) for one in near), key=lambda pair: pair[0]
    )
    if not by_distance or by_distance[0][0] > _ALIKE:
        return None
    (distance, best), others = by_distance[0], by_distance[1:]
    for further, other in others:
        if further > _APART * max(distance, 1e-7):
            break
        if other.name != best.name or not np.array_equal(other.value, best.value):
            return None  # two fit: nobody can tell
    return best


def _blocks(name: str, value: np.ndarray, whole: bool) -> Iterator[_Block]:
    """The tensor in every order of its axes, whole or cut into blocks of rows."""
    squeezed = np.squeeze(value).astype(np.float64)
    if squeezed.ndim > _RANK:
        return
    places = np.arange(squeezed.size).reshape(squeezed.shape)
    for held, where in zip(_forms(squeezed, whole), _forms(places, whole), strict=True):
        for axes in itertools.permutations(range(held.ndim)):
            turned, at = held.transpose(axes), where.transpose(axes)
            for count in (1,) if whole else _BLOCKS:
                if turned.shape[0] % count == 0:
                    for part, places_of in zip(np.split(turned, count), np.split(at, count), strict=True):
                        yield _Block(name, part, places_of, float(np.linalg.norm(part)))


def _forms(squeezed: np.ndarray, folded: bool) -> list[np.ndarray]:
    """The tensor, and with `folded` as a matrix of its first axes by its last, and flat."""
    shapes = [squeezed.shape or (1,)]
    if folded:
        dims = squeezed.shape
        shapes += [(math.prod(dims[:at]), math.prod(dims[at:])) for at in range(1, len(dims))] + [(squeezed.size,)]
    return [squeezed.reshape(shape) for shape in dict.fromkeys(shapes)]


def _by_elimination(
    theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray], held: Mapping[str, np.ndarray], matched: Matched
) -> None:
    """Match a recorded gradient with ours, wrong or not, if only these two have their shape and they are about parallel.

    It may be the gradient of a logarithm whose exponential the exporter computed: then it is ours times the weight.
    """
    free = matched.of(ours)
    left = [name for name in theirs if name not in matched.found]
    for name in left:
        same = [key for key in left if _sizes(theirs[key]) == _sizes(theirs[name])]
        fits = [key for key in free if _sizes(ours[key]) == _sizes(theirs[name])]
        if len(same) == 1 and len(fits) == 1:
            forced = _by_force(name, theirs[name], fits[0], ours[fits[0]], held.get(fits[0]))
            if _is_parallel(theirs[name], forced.made_of(ours)):
                matched.found[name] = forced
        elif fits and not np.any(theirs[name]):
            matched.left[name] = f"it is zero throughout, and fits {choices(sorted(fits))}"


def _is_parallel(theirs: np.ndarray, ours: np.ndarray) -> bool:
    """True if two gradients point into the same or the opposite direction: more or less, for one of them may be wrong."""
    left, right = theirs.astype(np.float64).reshape(-1), ours.reshape(-1)
    size = float(np.linalg.norm(left) * np.linalg.norm(right))
    return bool(size > 0 and abs(float(left @ right)) > _NEARLY * size)


def _sizes(value: np.ndarray) -> list[int]:
    return sorted(size for size in value.shape if size != 1)


def _by_force(name: str, theirs: np.ndarray, key: str, ours: np.ndarray, weight: np.ndarray | None) -> Match:
    """The order of the axes in which the two are closest."""
    if weight is not None and theirs.shape == ours.shape == weight.shape:
        factor = weight.astype(np.float64).reshape(-1)
        if np.linalg.norm(ours.reshape(-1) * factor - theirs.reshape(-1)) <= _ALIKE * np.linalg.norm(theirs):
            flat = np.arange(ours.size)
            return Match(name, "exp(x)", theirs.shape, (_Piece(key, flat, flat, factor),))
    held = np.squeeze(ours).astype(np.float64)
    places = np.arange(held.size).reshape(held.shape)
    target = np.squeeze(theirs).astype(np.float64)
    orders = [axes for axes in itertools.permutations(range(held.ndim)) if held.transpose(axes).shape == target.shape]

    def distance(axes: Sequence[int]) -> float:
        with np.errstate(all="ignore"):
            off = float(np.linalg.norm(held.transpose(axes) - target))
        return math.inf if math.isnan(off) else off

    axes = min(orders, key=distance)
    pieces = (_Piece(key, places.transpose(axes).reshape(-1), np.arange(held.size)),)
    return Match(name, "nothing else has its shape", theirs.shape, pieces)
