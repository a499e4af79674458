"""Data as people have it: files, arrays, tables, and iterables of batches."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from refgrad.errors import FeedError
from refgrad.protos.arrays import mapped_array, read_arrays
from refgrad.training.arrow import ARROW, PARQUET, ArrowRows
from refgrad.training.data import Arrays, Batches, Chunk, Chunks, Data, Shards
from refgrad.training.steps import StepModel
from refgrad.training.training import refuse_lengths


class DaskArrays(Chunks):
    """Arrays of Dask: the chunks of samples are computed one after the other, and two are in memory at a time.

    :param arrays: by the names of the inputs and the label. Arrays of NumPy may be among them.
    :raises FeedError: the arrays do not fit the step or each other, or the sizes of chunks are not known.
    """

    def __init__(self, step: StepModel, arrays: Mapping[str, Any], label: str | None = None) -> None:
        axes = {
            name: axis
            for name, array in arrays.items()
            if (axis := step.sample_axes.get(name, 0)) is not None
            and not (0 < axis < np.ndim(array) and np.shape(array)[axis] == 1)  # one sample is for all
        }
        counted = {name: arrays[name] for name, axis in axes.items() if axis < np.ndim(arrays[name])}
        refuse_lengths(
            {
                name: np.shape(array)[axes[name]] if name in counted and _is_known(name, array, axes[name]) else -1
                for name, array in arrays.items()
                if name in axes
            }
        )
        sizes = next((a.chunks[axes[name]] for name, a in counted.items() if is_dask(a)), None)
        if sizes is None:
            sizes = [np.shape(a)[axes[name]] for name, a in counted.items()][:1]
        ends = np.cumsum((0, *sizes)).tolist()
        parts = [slice(*ends[k : k + 2]) for k in range(len(sizes)) if sizes[k]]
        super().__init__(step, [_Block(arrays, part, axes) for part in parts], label)


class _Block(Chunk):
    """Consecutive samples of arrays of Dask."""

    def __init__(self, arrays: Mapping[str, Any], part: slice, axes: Mapping[str, int]) -> None:
        self._arrays = {
            name: array[(slice(None),) * axes[name] + (part,)] if name in axes else array
            for name, array in arrays.items()
        }
        self.short = f"samples {part.start} to {part.stop - 1}"
        self.name = self.short.capitalize()

    def described(self) -> Mapping[str, tuple[np.dtype, tuple[int | None, ...]]]:
        return {
            name: (array.dtype, tuple(None if math.isnan(size) else int(size) for size in array.shape))
            for name, array in self._arrays.items()
        }

    def read(self) -> dict[str, np.ndarray]:
        import dask

        return dict(zip(self._arrays, map(np.asarray, dask.compute(*self._arrays.values())), strict=True))


def is_dask(array: Any) -> bool:
    """True for an array of Dask, which is not imported for this."""
    return hasattr(array, "dask") and hasattr(array, "chunks")


def _is_known(name: str, array: Any, axis: int) -> bool:
    """True, or an error if the number of samples of an array of Dask is known only when it is computed.

    :raises FeedError: it is not known.
    """
    if is_dask(array) and any(map(math.isnan, array.chunks[axis])):
        raise FeedError(f"{name!r} has chunks of unknown sizes. Call compute_chunk_sizes() of the array first.")
    return True


def open_data(
    step: StepModel,
    source: str | os.PathLike[str] | Mapping[str, Any] | Iterable[Any] | Callable[[int | None], Iterable[Any]],
    label: str | None = None,
) -> Data:
    """The samples of a training.

    :param source: an .npz file; a Parquet or Arrow file; a folder of .npy files (one for each input, mapped into memory), or of
        .npz, Parquet or Arrow files with some samples each; arrays of NumPy or Dask by name; a `pyarrow.Table`; or batches, as
        `Batches` takes them, such as a DataLoader of torch.
    :param label: the array that is compared with, where it has another name than the step's input.
    :raises FeedError: there are none, or they do not fit the step.
    :raises OptionError: `source` is something else.
    """
    if isinstance(source, str | os.PathLike):
        return _of_path(step, Path(source), label)
    convert = getattr(source, "to_arrow", None)  # of polars
    table: Any = convert() if callable(convert) else source
    if hasattr(table, "schema") and hasattr(table, "num_rows"):
        return ArrowRows(step, table, label)
    if isinstance(source, Mapping):
        kind = DaskArrays if any(map(is_dask, source.values())) else Arrays
        return kind(step, source, label)
    return Batches(step, source, label)


def _of_path(step: StepModel, place: Path, label: str | None) -> Data:
    if place.is_dir():
        data = _of_folder(step, place, label)
        data.folder = place
        return data
    if place.suffix.lower() in (*PARQUET, *ARROW):
        return ArrowRows(step, [place], label)
    return Arrays(step, read_arrays(place, "Samples"), label)


def _of_folder(step: StepModel, place: Path, label: str | None) -> Data:
    kinds = {".npz": (".npz",), ".npy": (".npy",), ".parquet": PARQUET, ".arrow": ARROW}
    found = {
        kind: [file for file in sorted(place.iterdir()) if file.suffix.lower() in names]
        for kind, names in kinds.items()
    }
    held = [kind for kind, files in found.items() if files]
    if len(held) != 1:
        has = f"files of several kinds: {', '.join(held)}" if held else "no .npz, .npy, .parquet or .arrow file"
        raise FeedError(
            f"The folder {str(place)!r} has {has}. Give a folder with one kind: .npz, .parquet or .arrow files with some "
            "samples each, or one .npy file per array."
        )
    [kind], files = held, found[held[0]]
    if kind == ".npz":
        return Shards(step, files, label)
    if kind == ".npy":
        return Arrays(step, {file.stem: mapped_array(file) for file in files}, label)
    return ArrowRows(step, files, label)


__all__ = ["DaskArrays", "open_data"]
