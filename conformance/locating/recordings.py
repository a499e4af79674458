"""Tensors that somebody recorded: values and gradients by the names of another framework, and which of ours they are.

A recording is matched by name first. Where it has the values of the weights as well, `refgrad.weights` says how each
initializer is made of them, and gradients go the same way. Where it has gradients alone, those are told by shape and values:
transposed, in blocks (the gates of an LSTM, q, k and v), flattened. A gradient left over that fits one place alone goes there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto

from refgrad.conformance.case import is_float
from refgrad.errors import FeedError, OptionError, choices
from refgrad.protos.arrays import read_arrays
from refgrad.protos.external import array_of
from refgrad.protos.inputs import read_bytes
from refgrad.protos.memory import allowed
from refgrad.protos.values import array_in, read_value
from refgrad.transforms.origins import Computed, Copy, Folded, Rows, Source
from refgrad.transforms.states import read_state_dict
from refgrad.transforms.weights import weights

_SUFFIXES, _PREFIXES = ("_grad", ".grad", "/grad"), ("grad/", "grad.", "grad_", "d_")
_ALIKE = 2e-2  # relative to the norm: two gradients that are closer than this are of the same tensor
_APART = 8.0  # times as far off is the next one, or nobody can tell
_BLOCKS = (1, 2, 3, 4, 6, 8)  # into which rows are cut: gates, q, k and v, two directions
_RANK = 5
_PARALLEL, _SPREAD = 0.9999, 1e-2  # cosines of rows, and how far their factors are apart, of a layer that is folded
_PAIRS = 1 << 23  # of elements with one norm: more are not followed
_NEARLY = 0.9  # the cosine of two gradients that belong together by their shape
NAME = "name"


@dataclass(frozen=True)
class Recording:
    """Tensors by name: `gradients`, by the name of what each is the gradient of, and `values`.

    A gradient is called `<name>_grad`, `<name>.grad` or `grad/<name>`. Where no name says so, `unmarked` is true, and whatever
    is no output of the model is a gradient.
    """

    label: str
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    gradients: Mapping[str, np.ndarray] = field(default_factory=dict)
    unmarked: bool = False

    def __str__(self) -> str:
        return self.label

    @classmethod
    def of(cls, tensors: Mapping[str, np.ndarray], label: str) -> Recording:
        """A recording of these tensors.

        :raises FeedError: a gradient of whole or complex numbers or of texts, or two of one name that differ.
        """
        values: dict[str, np.ndarray] = {}
        gradients: dict[str, np.ndarray] = {}
        for name, value in tensors.items():
            stem = _stem(name)
            if stem is None:
                values[name] = value
            elif not is_float(value):
                raise FeedError(
                    f"{label}: {name!r} has the type {value.dtype}. Gradients are real numbers with a fraction."
                )
            elif stem in gradients and not np.array_equal(gradients[stem], value, equal_nan=True):
                raise FeedError(f"{label} has two gradients of {stem!r} that differ: {name!r} is one. Leave one.")
            else:
                gradients[stem] = value
        if gradients:
            return cls(label, values, gradients)
        floats = {name: value for name, value in values.items() if is_float(value)}
        return cls(label, {n: v for n, v in values.items() if n not in floats}, floats, unmarked=True)

    def for_model(self, model: ModelProto) -> Recording:
        """The recording, where what has the name of an output of the model is a value and no gradient."""
        if not self.unmarked:
            return self
        outputs = {value.name for value in model.graph.output}
        return Recording(
            self.label,
            {**self.values, **{name: value for name, value in self.gradients.items() if name in outputs}},
            {name: value for name, value in self.gradients.items() if name not in outputs},
        )


def _stem(name: str) -> str | None:
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and name != suffix:
            return name.removesuffix(suffix)
    for prefix in _PREFIXES:
        if name.startswith(prefix) and name != prefix:
            return name.removeprefix(prefix)
    return None


def read_recording(path: str | Path) -> Recording:
    """The tensors of a .npz or .safetensors file, or of the .pb files of a folder.

    :raises FeedError: there is no such file, it is malformed, or larger than the memory that is allowed.
    :raises OptionError: it is no such file.
    """
    file = Path(path)
    if file.is_dir():
        found = dict(_of_folder(file))
    elif file.suffix == ".safetensors":
        found = read_state_dict(file)
    else:
        found = read_arrays(file, "Recordings")
    if not found:
        raise FeedError(f"{str(file)!r} holds no tensors.")
    return Recording.of(found, str(file))


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
            raise FeedError(f"{str(file)!r} and {seen[name].name!r} both hold a tensor {name!r}. Leave one.")
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
    """Of which of our gradients a recorded one is made, and how: "name", "transposed", "merged", ..."""

    recorded: str
    how: str
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what our gradients are of."""
        return tuple(dict.fromkeys(piece.name for piece in self.pieces))

    def made_of(self, arrays: Mapping[str, np.ndarray], sizes: bool = False) -> np.ndarray:
        """Our gradients in the form of the recorded one; with `sizes` what bounds of their elements amount to."""
        made = np.zeros(math.prod(self.shape))
        for piece in self.pieces:
            factor = np.abs(piece.factor) if sizes else piece.factor
            ours = factor * arrays[piece.name].reshape(-1)[piece.ours]
            if isinstance(piece.at, slice):
                made[piece.at] += ours
            else:
                np.add.at(made, piece.at, ours)
        return made.reshape(self.shape)


def identity(name: str, shape: tuple[int, ...]) -> Match:
    """The match of a tensor with the one of the same name."""
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

    def of(self, names: Iterable[str]) -> set[str]:
        """The `names` that no recorded gradient is made of."""
        covered = {name for match in self.found.values() for name in match.names}
        return {name for name in names if name not in covered}


def match(model: ModelProto, recording: Recording, due: Mapping[str, np.ndarray]) -> Matched:
    """Say of each recorded gradient which of ours it is.

    :param due: our gradients, by what they are of.
    """
    made = Matched({}, {})
    recorded = dict(recording.gradients)
    for name, value in recorded.items():
        if name not in due:
            continue
        is_alike = np.squeeze(value).shape == np.squeeze(due[name]).shape
        is_of_another = name in recording.values and recording.values[name].shape == value.shape
        if is_alike or (value.size != due[name].size and not is_of_another):  # then it has the wrong shape
            made.found[name] = identity(name, value.shape if is_alike else due[name].shape)
    state = {name: value for name, value in recording.values.items() if value.dtype.kind == "f"}
    if recorded.keys() & state.keys():
        _by_values(model, state, due, made, recorded.keys())
    held = {tensor.name for tensor in model.graph.initializer}
    for name in [name for name, one in made.found.items() if one.how == NAME and name in held]:
        if _is_folded(recorded[name], due[name]):
            del made.found[name]
            made.left[name] = (
                "it differs by a factor for each row, as a folded layer does: record the values of the weights too"
            )
    open_ours = {name: value for name, value in due.items() if name in made.of(due)}
    open_theirs = {name: value for name, value in recorded.items() if name not in made.found and name not in made.left}
    if open_theirs and open_ours:
        _by_content(open_theirs, open_ours, made)
        if not recorded.keys() & state.keys():  # what has values and fits none is of another tensor
            weights_of = {t.name: array_of(t) for t in model.graph.initializer if t.name in open_ours}
            _by_elimination(open_theirs, open_ours, weights_of, made)
    for name, value in recorded.items():
        if name not in made.found:
            made.left.setdefault(name, f"no gradient of the model has its {value.size} elements and its values")
    return made


# By the values of the weights


def _by_values(
    model: ModelProto,
    state: Mapping[str, np.ndarray],
    due: Mapping[str, np.ndarray],
    made: Matched,
    recorded: Collection[str],
) -> None:
    """Follow the way from the recorded weights to the initializers backwards: adjoints of equal elements add up."""
    try:
        sources = weights(model, state)
    except OptionError:  # nothing in the model is made of them
        return
    made.computed = tuple(name for name, weight in sources.items() if weight.kind == "unexplained")
    pieces: dict[str, list[_Piece]] = {}
    hows: dict[str, list[str]] = {}
    for name, weight in sources.items():
        source = weight.source
        if source is None or name not in due:
            continue
        for key, piece in _adjoint(name, source, state):
            pieces.setdefault(key, []).append(piece)
            hows.setdefault(key, []).append(weight.how)
    for key, parts in pieces.items():
        if key not in recorded:
            continue
        made.found[key] = Match(key, " and ".join(dict.fromkeys(hows[key])), state[key].shape, tuple(parts))


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


def _by_content(theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray], made: Matched) -> None:
    """Equal up to what a wrong digit may do: whole first, transposed and reshaped, then in blocks of rows."""
    for whole in (True, False):
        left = {name: value for name, value in theirs.items() if name not in made.found}
        free = {name: value for name, value in ours.items() if name in made.of(ours)}
        pool: dict[tuple[int, ...], list[_Block]] = {}
        for name, value in free.items():
            for block in _blocks(name, value, whole):
                pool.setdefault(block.value.shape, []).append(block)
        for name, value in left.items():
            if (found := _made_of_blocks(name, value, pool, whole)) is not None:
                made.found[name] = found


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
    found = sorted(((float(np.linalg.norm(one.value - value)) / norm, one) for one in near), key=lambda pair: pair[0])
    if not found or found[0][0] > _ALIKE:
        return None
    (distance, best), others = found[0], found[1:]
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
    theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray], held: Mapping[str, np.ndarray], made: Matched
) -> None:
    """Match a recorded gradient with ours, wrong or not, if only these two have their shape and they are about parallel.

    It may be the gradient of a logarithm whose exponential the exporter computed: then it is ours times the weight.
    """
    free = made.of(ours)
    left = [name for name in theirs if name not in made.found]
    for name in left:
        same = [key for key in left if _sizes(theirs[key]) == _sizes(theirs[name])]
        fits = [key for key in free if _sizes(ours[key]) == _sizes(theirs[name])]
        if len(same) == 1 and len(fits) == 1:
            forced = _by_force(name, theirs[name], fits[0], ours[fits[0]], held.get(fits[0]))
            if _is_parallel(theirs[name], forced.made_of(ours)):
                made.found[name] = forced
        elif fits and not np.any(theirs[name]):
            made.left[name] = f"it is zero throughout, and fits {choices(sorted(fits))}"


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
