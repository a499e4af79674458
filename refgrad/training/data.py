"""The samples of a training: arrays in memory or mapped from files, or shards that are read one after the other."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import hashlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from refgrad.errors import FeedError, OptionError, choices, counted, did_you_mean
from refgrad.protos.arrays import described_arrays, read_arrays
from refgrad.ranges import checked
from refgrad.training.labels import first_of, kind_of, narrowed, type_name
from refgrad.training.steps import StepModel
from refgrad.training.training import batches, refuse_lengths

_INPUTS, _LABELS = ("x", "features", "inputs", "data"), ("y", "label", "labels", "target", "targets")
_AHEAD = 2  # batches
_ROWS = ""  # no array has this name
_LOOKED_AT = 1024  # samples, to tell data from other data
Item = TypeVar("Item")


class Data(ABC):
    """Samples by the names of the inputs of a step. `folder` is the folder of their files, None if they are not in files."""

    folder: Path | None = None

    @abstractmethod
    def batches(self, size: int, rng: np.random.Generator | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Batches of `size` samples, the last one with the rest; shuffled with `rng`.

        :raises FeedError: the samples do not fit the step.
        """

    @property
    def description(self) -> str:
        """The data in words that differ for other data, as far as a look at some of it tells."""
        return type(self).__name__


class Arrays(Data):
    """All samples in arrays, which may be mapped from files.

    :raises FeedError: the arrays do not fit the step, or each other.
    """

    def __init__(self, step: StepModel, arrays: Mapping[str, Any], label: str | None = None) -> None:
        named = {
            name: array if isinstance(array, np.ndarray) else _array(name, array)
            for name, array in _named(step, arrays, label).items()
        }
        self._step = step
        self._arrays, self._fixed = _apart(step, named)
        if next(batches(self._arrays, 1), None) is None:  # which refuses other lengths
            raise FeedError("There is no sample in the data. Give at least one.")
        self._fits = not any(isinstance(array, np.memmap) for array in named.values())  # else batch by batch
        if self._fits:
            fits = fitted(step, {name: np.asarray(array) for name, array in named.items()})
            self._arrays, self._fixed = _apart(step, fits)
        self._rows = np.arange(len(self))  # the places of the samples in the data

    def batches(self, size: int, rng: np.random.Generator | None = None) -> Iterator[dict[str, np.ndarray]]:
        """See the class."""
        for samples in batches(self._arrays | {_ROWS: self._rows}, size, rng):
            rows = samples.pop(_ROWS)
            batch = _together(self._step, samples, self._fixed)
            yield _sized(self._step, batch if self._fits else self._fitted(batch, samples, rows))

    def _fitted(
        self, batch: dict[str, np.ndarray], samples: Mapping[str, np.ndarray], rows: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The batch in the types of the step.

        :raises FeedError: as `fitted`, with the place of the sample in the data.
        """
        try:
            return fitted(self._step, batch)
        except FeedError:
            for k, row in enumerate(rows):
                one = {name: array[k : k + 1] for name, array in samples.items()}
                try:
                    fitted(self._step, _together(self._step, one, self._fixed))
                except FeedError as error:
                    raise FeedError(f"Sample {row}: {error}") from error
            raise

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    @property
    def description(self) -> str:
        """See the class."""
        digest = hashlib.sha256()
        for name, array in sorted(self._fixed.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        for name, array in sorted(self._arrays.items()):
            looked_at = np.linspace(0, len(array) - 1, min(len(array), _LOOKED_AT)).astype(int)
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array[looked_at]).tobytes())
        return f"{counted(len(self), 'sample')} ({digest.hexdigest()[:8]})"

    def split(self, part: float, seed: int) -> tuple[Arrays, Arrays]:
        """Two parts, the second one with `part` of the samples, chosen at random.

        :raises FeedError: one of them has no sample.
        """
        checked("validation", part, "part")
        count = len(self)
        held = round(count * part)
        if not 0 < held < count:
            raise FeedError(
                f"A part {part:g} of {count} samples leaves none for training or none for validation. "
                "Choose another part between 0 and 1."
            )
        order = np.random.default_rng(seed).permutation(count)
        made = []
        for chosen in (np.sort(order[held:]), np.sort(order[:held])):
            made_of = copy.copy(self)
            made_of._arrays = {name: array[chosen] for name, array in self._arrays.items()}
            made_of._rows = self._rows[chosen]
            made.append(made_of)
        return made[0], made[1]


class Chunk(ABC):
    """Samples that are read at once: a file, or a part of one.

    :param name: its name in errors, such as "'data/a.npz'", and `short` the same without a folder.
    """

    name: str
    short: str

    @abstractmethod
    def described(self) -> Mapping[str, tuple[np.dtype, tuple[int | None, ...]]]:
        """The type and shape of each array, without a look at the samples; None is a size that only they tell.

        :raises FeedError: the chunk cannot be read.
        """

    @abstractmethod
    def read(self) -> dict[str, np.ndarray]:
        """The arrays by name.

        :raises FeedError: the chunk cannot be read.
        """


class Chunks(Data):
    """Samples in chunks, of which two are in memory at a time. Shuffling changes their order, and the order within each.

    :raises FeedError: a chunk does not fit the step, or the chunks before.
    """

    unit = "chunk"  # what a chunk is, in words

    def __init__(self, step: StepModel, chunks: Iterable[Chunk], label: str | None = None) -> None:
        self._step, self._chunks, self._label = step, list(chunks), label
        self._axes: dict[
            str, tuple[Chunk, tuple[int, ...]]
        ] = {}  # the sizes of one sample, and the chunk that has them
        self._fixed: dict[str, np.ndarray] = {}  # the arrays without samples of the first chunk
        self._described = [chunk.described() for chunk in self._chunks]  # the type and shape of each array, by chunk
        self._for_all = self._of_all_samples()
        for chunk, described in zip(self._chunks, self._described, strict=True):
            self._look_at(chunk, described)
        self._known = set(self._axes)

    @property
    def description(self) -> str:
        """See the class."""
        shapes = [sorted((name, str(kind), shape) for name, (kind, shape) in one.items()) for one in self._described]
        return f"{counted(len(self._chunks), self.unit)} ({hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]})"

    def _of_all_samples(self) -> set[str]:
        """The arrays that have one sample in a chunk of several samples. In a chunk of one sample they are for all, too."""
        names: set[str] = set()
        for described in self._described:
            with contextlib.suppress(FeedError):  # which is raised again with the name of the chunk
                shapes = {name: shape for name, (_, shape) in _named(self._step, described, self._label).items()}
                names.update(name for name in shapes if name not in _sample_axes(self._step, shapes))
        return names

    def _look_at(self, chunk: Chunk, described: Mapping[str, Any]) -> None:
        """Compare the shapes in a chunk with the step, and with the chunks before: a batch may span two chunks.

        :raises FeedError: they differ.
        """
        try:
            named = _named(self._step, described, self._label)
            shapes = {name: shape for name, (_, shape) in named.items()}
            counting = _sample_axes(self._step, shapes, self._for_all)
            refuse_lengths({n: (shapes[n][axis] or 0) if axis < len(shapes[n]) else -1 for n, axis in counting.items()})
            for name, (dtype, shape) in named.items():
                if name == self._step.label and self._step.class_names is not None:
                    continue  # classes by name take the shape of the label
                if None in _sizes_of_one(shape, counting.get(name)):
                    continue  # the samples will tell
                dims = self._step.inputs[name][1]
                shape = _turned(shape, dims)
                _refuse_shape(self._step, name, shape, dtype)
                self._refuse_other_sizes(chunk, name, _sizes_of_one(shape, counting.get(name)))
        except FeedError as error:
            raise FeedError(f"{chunk.name}: {error}") from error

    def _refuse_other_sizes(self, chunk: Chunk, name: str, sizes: tuple[int, ...]) -> None:
        first, others = self._axes.setdefault(name, (chunk, sizes))
        if len(others) != len(sizes):
            raise FeedError(f"{name!r} has {len(sizes)} axes, and {len(others)} in {first.short}.")
        for axis, (here, there) in enumerate(zip(sizes, others, strict=True)):
            if here != there:
                raise FeedError(
                    f"{name!r} has the size {here} on axis {axis}, and {there} in {first.short}. A batch may have "
                    "samples of both. Give every part the same sizes except for the number of samples."
                )

    def batches(self, size: int, rng: np.random.Generator | None = None) -> Iterator[dict[str, np.ndarray]]:
        """See the class."""
        chunks = list(self._chunks)
        if rng is not None:
            rng.shuffle(chunks)
        left: dict[str, np.ndarray] = {}
        for arrays in ahead(map(self._read, chunks), 1):
            count = len(next(iter(arrays.values())))
            order = np.arange(count)
            if rng is not None:
                rng.shuffle(order)
            arrays = {name: array[order] for name, array in arrays.items()}
            if left:
                arrays = {name: np.concatenate([left[name], array]) for name, array in arrays.items()}
                count = len(next(iter(arrays.values())))
            whole = count // size * size
            for start in range(0, whole, size):
                yield self._batch({name: array[start : start + size] for name, array in arrays.items()})
            left = {name: array[whole:] for name, array in arrays.items()} if whole < count else {}
        if left:
            yield self._batch(left)

    def _batch(self, samples: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return _sized(self._step, _together(self._step, samples, self._fixed))

    def _read(self, chunk: Chunk) -> dict[str, np.ndarray]:
        arrays = _named(self._step, chunk.read(), self._label)
        try:
            samples, _ = _apart(self._step, arrays, self._for_all)
            if next(batches(samples, 1), None) is None:  # which refuses other lengths
                raise FeedError("There is no sample in it. Leave it out.")
            batch = fitted(self._step, arrays)
            counting = _sample_axes(self._step, {name: array.shape for name, array in batch.items()}, self._for_all)
            for name, array in batch.items():
                sizes = _sizes_of_one(array.shape, counting.get(name))
                if name not in self._known:
                    self._refuse_other_sizes(chunk, name, sizes)
                elif sizes != self._axes[name][1]:
                    raise FeedError("Its sizes changed while it was read. Begin again.")
            made, fixed = _apart(self._step, batch, self._for_all)
            for name, array in fixed.items():
                if not np.array_equal(array, self._fixed.setdefault(name, array)):
                    raise FeedError(f"{name!r} has no samples, and it differs from the one before. Give one for all.")
            return made
        except FeedError as error:
            raise FeedError(f"{chunk.name}: {error}") from error


class _Shard(Chunk):
    """An .npz file."""

    def __init__(self, file: Path) -> None:
        self._file, self.name, self.short = file, repr(str(file)), repr(file.name)

    def described(self) -> Mapping[str, tuple[np.dtype, tuple[int | None, ...]]]:
        return described_arrays(self._file)

    def read(self) -> dict[str, np.ndarray]:
        return read_arrays(self._file, "Samples")


class Shards(Chunks):
    """Samples in .npz files, of which two are in memory at a time. Shuffling changes their order, and the order within each.

    :raises FeedError: the headers of a file do not fit the step, or the files before.
    """

    unit = "file"

    def __init__(self, step: StepModel, files: Sequence[Path], label: str | None = None) -> None:
        super().__init__(step, map(_Shard, files), label)


class Batches(Data):
    """Batches from Python: any iterable of dicts, or of tuples of the inputs and the label, that starts anew for each epoch.

    Arrays may be tensors of torch. The size of batches is the iterable's.

    :param source: the iterable, such as a list or a `torch.utils.data.DataLoader`, or a function that returns one. The function
        gets a seed for each epoch, and None if the training does not shuffle. A DataLoader that shuffles gets the seed too. Any
        other iterable is taken in its order.
    :raises OptionError: `source` is neither, or an iterator, which would be at its end after one epoch.
    """

    def __init__(
        self, step: StepModel, source: Iterable[Any] | Callable[[int | None], Iterable[Any]], label: str | None = None
    ) -> None:
        if not callable(source) and not isinstance(source, Iterable):
            loader = " Put a Dataset of torch into a DataLoader." if hasattr(source, "__getitem__") else ""
            raise OptionError(
                f"Batches are an iterable, or a function that returns one, not {type(source).__name__}.{loader}"
            )
        if isinstance(source, Iterator):
            raise OptionError(
                f"{type(source).__name__} is at its end after one epoch. Give an iterable that starts anew, such as a list or "
                "a DataLoader, or a function of a seed that returns an iterator."
            )
        self._step, self._source, self._label = step, source, label

    def batches(self, size: int, rng: np.random.Generator | None = None) -> Iterator[dict[str, np.ndarray]]:
        """See the class; `size` has no effect."""
        seed = None if rng is None else int(rng.integers(2**63))
        source = self._source
        if isinstance(source, Iterable):
            if seed is not None:
                _seed_loader(source, seed)
        else:
            source = source(seed)
        for number, batch in enumerate(source):
            try:
                yield fitted(self._step, _named(self._step, self._by_name(batch), self._label))
            except FeedError as error:
                raise FeedError(f"Batch {number}: {error}") from error

    def _by_name(self, batch: Any) -> dict[str, np.ndarray]:
        """A batch as arrays by name."""
        names = [*self._step.data, *({self._step.label} & self._step.inputs.keys())]
        if isinstance(batch, Mapping):
            return {name: _array(name, value) for name, value in batch.items()}
        if not isinstance(batch, tuple | list):
            raise FeedError(f"A batch is a dict, or a tuple of {choices(names)}, not {type(batch).__name__}.")
        if len(batch) != len(names):
            raise FeedError(f"Expected a tuple of {counted(len(names), 'array')}, {choices(names)}, got {len(batch)}.")
        return {name: _array(name, value) for name, value in zip(names, batch, strict=True)}


def _array(name: str, value: Any) -> np.ndarray:
    """An array, or a tensor of torch on any device, as an array.

    :raises FeedError: it is something else, such as a ragged list.
    """
    if callable(detach := getattr(value, "detach", None)):
        value = detach().cpu()
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise FeedError(f"{name!r} cannot be made an array: {error}") from error


def _seed_loader(loader: Any, seed: int) -> None:
    """Let a DataLoader of torch that shuffles draw by this seed."""
    sampler: Any = getattr(loader, "sampler", None)
    if type(sampler).__name__ != "RandomSampler" or not hasattr(sampler, "generator"):
        return
    import torch

    loader.generator = sampler.generator = torch.Generator().manual_seed(seed)


def _named(step: StepModel, arrays: Mapping[str, Any], label: str | None) -> dict[str, Any]:
    """The arrays by the names of the step. Arrays called x and y, or the like, are taken for the only input and the label."""
    wanted = list(step.inputs)
    if label is not None and label not in arrays:
        raise FeedError(f"There is no array {label!r}; there are {choices(arrays)}.{did_you_mean(label, list(arrays))}")
    places = places_of(step, arrays, label)
    given = {places.get(name, name): array for name, array in arrays.items()}
    if set(given) != set(wanted):
        lacking = [name for name in wanted if name not in given]
        extra = [name for name in given if name not in wanted]
        said = (
            f"The data lacks {choices(lacking)}: it has {choices(given)}."
            if lacking
            else f"Leave out {choices(extra)}."
        )
        if step.label in lacking:
            said = f"{said} The expected values are the array {step.label!r}, or the one that label=NAME names."
        raise FeedError(f"Training needs the arrays {choices(wanted)}. {said}")
    return given


def places_of(step: StepModel, names: Iterable[str], label: str | None) -> dict[str, str]:
    """The input of the step that each of these arrays is for, by the name of the array. Other arrays are left out.

    The array `label` is for the label. Arrays called x and y, or the like, are for the only input and the label.
    """
    given, wanted = list(names), list(step.inputs)
    places = {name: name for name in given if name in wanted and (label is None or name != step.label)}
    if label in given:
        places[label] = step.label
    for place, usual in (
        ("" if label else step.label, _LABELS),
        (step.data[0] if len(step.data) == 1 else "", _INPUTS),
    ):
        alike = [name for name in given if name not in places and name.lower() in usual]
        if place in wanted and place not in places.values() and len(alike) == 1:
            places[alike[0]] = place
    return places


def _sample_axes(
    step: StepModel, shapes: Mapping[str, tuple[int | None, ...]], for_all: Collection[str] = ()
) -> dict[str, int]:
    """The axis that counts the samples, of each array that has samples; the others are the same in every batch.

    One sample beside several is for all of them: a state [2, 1, 128] that every sample begins with. So are the arrays
    `for_all`.
    """
    axes = {name: axis for name, axis in step.sample_axes.items() if axis is not None and name not in for_all}
    counts = {name: shapes[name][axis] for name, axis in axes.items() if axis and axis < len(shapes[name])}
    others = [shapes[name][0] for name, axis in axes.items() if not axis and shapes[name]]
    return {name: axis for name, axis in axes.items() if counts.get(name) != 1 or others[:1] in ([], [1])}


def _sizes_of_one(shape: tuple[int, ...], counting: int | None) -> tuple[int, ...]:
    """A shape without the number of samples, which is −1."""
    return tuple(-1 if axis == counting else size for axis, size in enumerate(shape))


def _apart(
    step: StepModel, arrays: Mapping[str, Any], for_all: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays that have samples, which the first axis counts, and those that are the same in every batch."""
    axes = _sample_axes(step, {name: np.shape(array) for name, array in arrays.items()}, for_all)
    samples = {
        name: np.moveaxis(arrays[name], axis, 0) if 0 < axis < np.ndim(arrays[name]) else arrays[name]
        for name, axis in axes.items()
    }
    return samples, {name: array for name, array in arrays.items() if name not in axes}


def _together(
    step: StepModel, samples: Mapping[str, np.ndarray], fixed: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """A batch for the step: the samples with their axis in its place, and the arrays that are the same in every batch."""
    count = len(next(iter(samples.values())))
    batch = {name: np.moveaxis(array, 0, step.sample_axes[name] or 0) for name, array in samples.items()}
    for name, array in fixed.items():
        axis = step.sample_axes[name]
        batch[name] = array if axis is None else np.repeat(array, count, axis)
    return {name: batch[name] for name in step.inputs}


def _sized(step: StepModel, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The batch, refused where the model takes batches of another size."""
    for name, array in batch.items():
        _, dims = step.inputs[name]
        if dims and step.sample_axes[name] == 0 and dims[0] is not None and len(array) != dims[0]:
            raise FeedError(
                f"The model takes batches of {dims[0]} samples, and one has {len(array)}. Give batches of that size, and a "
                "multiple of it in samples, or export the model with a dynamic first axis (dynamic_shapes of "
                "torch.onnx.export)."
            )
    return batch


def fitted(step: StepModel, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A batch in the types and ranks of the step's inputs.

    :raises FeedError: an array has another type or shape, or numbers that are not finite, or a class that does not exist.
    """
    made = {}
    for name, given in batch.items():
        array, (dtype, dims) = np.asarray(given), step.inputs[name]
        if name == step.label and step.class_names is not None:
            array = step.labels(array)
        array = array.reshape(_turned(array.shape, dims))
        _refuse_shape(step, name, array.shape, array.dtype)
        if array.dtype != dtype:
            array = _cast(step, name, array, dtype)
        if kind_of(array.dtype) == "f" and not np.isfinite(array).all():
            raise FeedError(f"{name!r} has numbers that are not finite: {first_of(~np.isfinite(array), array)}.")
        made[name] = step.in_range(step.in_classes(array)) if name == step.label else array
    return made


def _turned(shape: tuple[int, ...], dims: tuple[int | None, ...] | None) -> tuple[int, ...]:
    """The shape [N] as [N, 1], and the other way round, where the step takes that."""
    if len(shape) == 1 and dims is not None and len(dims) == 2 and dims[1] in (1, None):
        return (*shape, 1)
    return shape[:1] if len(shape) == 2 and shape[1] == 1 and dims is not None and len(dims) == 1 else shape


def _refuse_shape(step: StepModel, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Refuse samples of another rank or size than the step takes, except for the axis that counts them."""
    dims, counting = step.inputs[name][1], step.sample_axes[name]
    if dims is None:
        return
    if len(shape) != len(dims) or any(
        d not in (None, n) for axis, (d, n) in enumerate(zip(dims, shape, strict=True)) if axis != counting
    ):
        is_thinner = len(shape) == len(dims) - 1 or (len(shape) == len(dims) > 1 == shape[1] != dims[1])
        expected = ", ".join("N" if k == counting else "?" if d is None else str(d) for k, d in enumerate(dims))
        if name == step.label and step.class_loss and len(dims) > 1 and is_thinner:
            hint = f" {_other_loss(step)}"
        else:
            hint = _hint(step, shape, dims, dtype) if name == step.label else ""
        raise FeedError(f"Expected [{expected}], got {list(shape)} for {name!r}.{hint}")


def _other_loss(step: StepModel) -> str:
    """The message for class numbers, which the loss of the step does not take."""
    fits = "loss='log_loss'" if step.class_loss == "log_loss" else "loss='cross_entropy' (of logits)"
    return (
        f"{step.label!r} has fewer numbers than the output, and {step.settings['loss']} compares as many. For class numbers "
        f"use {fits}."
    )


def _hint(step: StepModel, shape: tuple[int, ...], dims: tuple[int | None, ...], dtype: np.dtype) -> str:
    """How to go on with a label of another shape, with a space before it."""
    if kind_of(dtype) not in "biuf":
        return ""
    if step.classes is not None and shape[1:2] == (step.classes,) and len(shape) == len(dims) + 1:
        return f" One-hot labels become class numbers by {step.label}.argmax(1)."
    return ""


def _cast(step: StepModel, name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    kinds = {"f": "biuf", "i": "biuf", "u": "biuf", "b": "b"}
    if kind_of(array.dtype) not in kinds.get(kind_of(dtype), ""):
        is_text = name == step.label and step.classes is not None and array.dtype.kind in "USO"
        hint = f" The model returns scores alone: number the classes 0 to {(step.classes or 1) - 1}." if is_text else ""
        raise FeedError(f"Expected {dtype}, got {type_name(array.dtype)} for {name!r}.{hint}")
    cast = narrowed(array, dtype, repr(name))
    if dtype.kind in "iu" and not (cast == array).all():
        raise FeedError(f"{name!r} has {first_of(cast != array, array)}, but it takes whole numbers ({dtype}).")
    return cast


def ahead(items: Iterable[Item], count: int = _AHEAD) -> Iterator[Item]:
    """The items, made in a thread, at most `count` of them before they are asked for. What raises there raises here."""
    waiting: queue.Queue[tuple[bool, Any]] = queue.Queue(count)
    over = threading.Event()

    def put(item: tuple[bool, Any]) -> bool:
        while not over.is_set():
            try:
                waiting.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put((True, item)):
                    return
            put((False, None))
        except BaseException as error:
            put((False, error))

    # The thread takes the memory limit of its caller: it has no limit of its own.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True)
    thread.start()
    try:
        while True:
            is_item, item = waiting.get()
            if is_item:
                yield item
            elif item is None:
                return
            else:
                raise item
    finally:
        over.set()


__all__ = ["Arrays", "Batches", "Chunk", "Chunks", "Data", "Shards", "ahead", "fitted", "places_of"]
