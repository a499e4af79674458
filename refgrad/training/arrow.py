"""Samples in files of Parquet and Arrow, and in tables of pyarrow: a column per array, a row per sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refgrad.errors import FeedError, OptionError, choices, counted
from refgrad.installing import install
from refgrad.protos.inputs import open_regular
from refgrad.protos.memory import allowed
from refgrad.training.data import Chunk, Chunks, places_of
from refgrad.training.steps import StepModel

PARQUET, ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
_ROWS = 65536  # of a table in memory, at a time

Shape = tuple[int | None, ...]


class ArrowRows(Chunks):
    """Rows of Parquet or Arrow files: row groups or record batches, of which two are in memory at a time.

    A column of numbers is an array [N], a column of lists of k numbers an array [N, k]; fixed-size lists, lists of lists and
    fixed-shape tensors too. Columns that the step does not need are not read. An input that counts samples on another axis has
    one sample per row; one without samples has the same value in each row. Shuffling changes the order of the chunks, and the
    order within each.

    :param files: their paths, or a `pyarrow.Table`.
    :raises FeedError: a file cannot be read, or its columns do not fit the step.
    :raises OptionError: pyarrow is not installed.
    """

    def __init__(self, step: StepModel, files: Sequence[Path] | Any, label: str | None = None) -> None:
        tables = [_Rows(files)] if hasattr(files, "schema") else map(_file, files)
        chunks: list[Chunk] = []
        hint = ""
        for table in tables:
            names = table.schema.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise FeedError(f"{table.name} has several columns {choices(twice)}. Give each its own name.")
            places = places_of(step, names, label)
            columns = sorted(places) if {*places.values()} == {*step.inputs} else names
            hint = hint or _side_by_side(step, table, places)
            held = [number for number in range(table.count) if table.rows(number) != 0]
            chunks += [_Part(table, number, columns, step.sample_axes) for number in held]
            if not held:
                raise FeedError(f"{table.name} has no row. Leave it out.")
        try:
            super().__init__(step, chunks, label)
        except FeedError as error:
            raise FeedError(f"{error}{hint}") from error


class _Rows:
    """A table in memory, in parts of many rows."""

    short = ""  # its name within a sentence, if it is not a file
    again = ""  # Python that reads it, if it is a file

    def __init__(self, table: Any) -> None:
        self.name, self.schema, self._table = "The table", table.schema, table
        self.short = "the table"
        self.unit, self.count = "part", -(-table.num_rows // _ROWS)

    def rows(self, number: int) -> int:
        """The number of rows of a part."""
        return min(_ROWS, int(self._table.num_rows) - number * _ROWS)

    def read(self, number: int, columns: Sequence[str]) -> Any:
        """The columns of a part, as a table."""
        return self._table.slice(number * _ROWS, _ROWS).select(columns)


class _ParquetFile(_Rows):
    """A Parquet file, in row groups."""

    def __init__(self, path: Path) -> None:
        self._file = _pyarrow("parquet").ParquetFile(path)
        self.again = f"pyarrow.parquet.read_table({str(path)!r})"
        self.name, self.schema = repr(str(path)), self._file.schema_arrow
        self.unit, self.count = "row group", self._file.num_row_groups

    def rows(self, number: int) -> int:
        return int(self._file.metadata.row_group(number).num_rows)

    def read(self, number: int, columns: Sequence[str]) -> Any:
        limit, size = allowed(), self._file.metadata.row_group(number).total_byte_size
        if limit is not None and size > limit:
            raise FeedError(
                f"The row group has {size} bytes, and max_memory is {limit}. Raise max_memory, or write the file with smaller "
                "row groups."
            )
        return self._file.read_row_group(number, columns=list(columns))


class _ArrowFile(_Rows):
    """An Arrow file, in record batches. It is mapped into memory."""

    def __init__(self, path: Path) -> None:
        self._file = _pyarrow("ipc").open_file(_pyarrow().memory_map(str(path)))
        self.again = f"pyarrow.feather.read_table({str(path)!r})"
        self.name, self.schema = repr(str(path)), self._file.schema
        self.unit, self.count = "record batch", self._file.num_record_batches

    def rows(self, number: int) -> int:
        return int(self._file.get_batch(number).num_rows)

    def read(self, number: int, columns: Sequence[str]) -> Any:
        return _pyarrow().Table.from_batches([self._file.get_batch(number)]).select(columns)


class _Part(Chunk):
    """Some rows of a table, with some of its columns."""

    def __init__(
        self, table: _Rows, number: int, columns: Sequence[str], sample_axes: Mapping[str, int | None]
    ) -> None:
        self._table, self._number, self._columns, self._axes = table, number, columns, sample_axes
        of = f"{table.unit} {number}"
        self.name = table.name if table.count == 1 else f"{table.name}, {of}"
        self.short = (table.short or repr(Path(table.name.strip("'")).name)) if table.count == 1 else of

    def described(self) -> Mapping[str, tuple[np.dtype, Shape]]:
        rows, schema = self._table.rows(self._number), self._table.schema
        try:
            found = {name: _described(name, schema.field(name).type, rows) for name in self._columns}
        except FeedError as error:
            raise FeedError(f"{self._table.name}: {error}") from error
        return {name: (kind, self._laid(name, shape)) for name, (kind, shape) in found.items()}

    def _laid(self, name: str, shape: Shape) -> Shape:
        """A shape whose first axis counts the rows, as the step counts samples."""
        count, *others = shape
        axis = self._axes.get(name, 0)
        return tuple(others) if axis is None else (*others[:axis], count, *others[axis:])

    def read(self) -> dict[str, np.ndarray]:
        try:
            table = self._table.read(self._number, self._columns)
            return {name: self._of_rows(name, _array(name, table.column(name))) for name in self._columns}
        except FeedError as error:
            raise FeedError(f"{self.name}: {error}") from error
        except (OSError, ValueError, LookupError, _pyarrow().ArrowException) as error:
            raise FeedError(f"{self.name} cannot be read: {error}") from error

    def _of_rows(self, name: str, array: np.ndarray) -> np.ndarray:
        """An array whose first axis counts the rows, as the step takes it.

        :raises FeedError: the input has no samples, and the rows differ.
        """
        axis = self._axes.get(name, 0)
        if axis is not None:
            return np.moveaxis(array, 0, min(axis, array.ndim - 1))
        if len(array) and (array != array[0]).any():
            raise FeedError(f"{name!r} has no samples, and its rows differ. Give each row the same value.")
        return np.asarray(array[0] if len(array) else array)


def _pyarrow(part: str = "") -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise OptionError(f"Parquet and Arrow files are read by pyarrow. Install it: {install('arrow')}.") from error
    return getattr(pyarrow, part) if part else pyarrow


def _file(path: Path) -> _Rows:
    """A file, opened: its columns are known, and no row is read."""
    pyarrow = _pyarrow()
    open_regular(path, FeedError).close()  # which refuses a FIFO
    kind = _ParquetFile if path.suffix.lower() in PARQUET else _ArrowFile
    try:
        return kind(path)
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # a name may be no text
        if kind is _ArrowFile and _is_stream(path):
            raise FeedError(
                f"{str(path)!r} is a stream of Arrow, which can be read only from its start. Write it as a file: "
                f"pyarrow.feather.write_feather(pyarrow.ipc.open_stream({str(path)!r}).read_all(), 'data.feather')."
            ) from error
        what = "Parquet" if kind is _ParquetFile else "Arrow"
        raise FeedError(f"{str(path)!r} cannot be read as a file of {what}: {error}") from error


def _is_stream(path: Path) -> bool:
    """True if the file is a stream of record batches, as `datasets` caches them, and no file of Arrow."""
    pyarrow = _pyarrow()
    try:
        with pyarrow.OSFile(str(path)) as source:
            pyarrow.ipc.open_stream(source)
    except (OSError, ValueError, pyarrow.ArrowException):
        return False
    return True


def _side_by_side(step: StepModel, table: _Rows, places: Mapping[str, str]) -> str:
    """The advice for a table with a column per number of a sample, with a space before it; "" for another table."""
    label = next((name for name, place in places.items() if place == step.label), None)
    numbers = [field for field in table.schema if field.name != label]
    dims = step.inputs[step.data[0]][1] if len(step.data) == 1 else None
    types = _pyarrow("types")
    if not table.again or label is None or {*places.values()} != {step.label} or dims is None or len(dims) != 2:
        return ""
    if dims[1] not in (None, len(numbers)) or not all(
        types.is_integer(field.type) or types.is_floating(field.type) for field in numbers
    ):
        return ""
    columns = f"numpy.stack([t[k] for k in t.column_names if k != {label!r}], 1)"
    arrays = f"{{{step.data[0]!r}: {columns}, {step.label!r}: t[{label!r}]}}"
    return f" If {step.data[0]!r} is the other columns side by side: t = {table.again}; numpy.savez('data.npz', **{arrays})."


def _sizes(kind: Any) -> Iterator[tuple[Any, int | None]]:
    """A type, and the type of its elements as long as they are lists: each with the number of elements."""
    types = _pyarrow("types")
    while True:
        if types.is_fixed_size_list(kind):
            size = int(kind.list_size)
        elif types.is_list(kind) or types.is_large_list(kind):
            size = None
        else:
            return
        kind = kind.value_type
        yield kind, size


def _described(name: str, kind: Any, rows: int) -> tuple[np.dtype, Shape]:
    """The type and shape of the array that a column becomes.

    :raises FeedError: the column has neither numbers, nor text, nor lists of them.
    """
    if hasattr(kind, "shape"):  # a fixed-shape tensor
        order = kind.permutation or range(len(kind.shape))
        return np.dtype(kind.value_type.to_pandas_dtype()), (rows, *(kind.shape[axis] for axis in order))
    types, sizes = _pyarrow("types"), list(_sizes(kind))
    element = sizes[-1][0] if sizes else kind
    if types.is_dictionary(element):
        element = element.value_type
    if types.is_string(element) or types.is_large_string(element):
        return np.dtype("U"), (rows, *(size for _, size in sizes))
    if not (types.is_integer(element) or types.is_floating(element) or types.is_boolean(element)):
        raise FeedError(f"Column {name!r} has the type {kind}. Give numbers, text, or lists of them.")
    return np.dtype(element.to_pandas_dtype()), (rows, *(size for _, size in sizes))


def _array(name: str, column: Any) -> np.ndarray:
    """A column as an array.

    :raises FeedError: there are nulls, or lists of several lengths.
    """
    pyarrow, types = _pyarrow(), _pyarrow("types")
    if isinstance(column, pyarrow.ChunkedArray):
        column = pyarrow.concat_arrays(column.chunks) if column.num_chunks else pyarrow.array([], column.type)
    if hasattr(column.type, "shape") and (nulls := column.storage.flatten().null_count):
        raise FeedError(f"Column {name!r} has no value in {counted(nulls, 'element')} of its tensors. Fill them.")
    if column.null_count:
        row = _pyarrow("compute").index(column.is_null(), True).as_py()
        raise FeedError(
            f"Column {name!r} has no value in {counted(column.null_count, 'row')}, the first in row {row}. Fill them."
        )
    kind = column.type
    if hasattr(kind, "shape"):
        return np.asarray(column.to_numpy_ndarray())
    if types.is_dictionary(kind):
        return _array(name, column.dictionary_decode())
    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        lengths = np.unique(_pyarrow("compute").list_value_length(column).to_numpy(zero_copy_only=False))
        if len(lengths) > 1:
            raise FeedError(
                f"Column {name!r} has lists of {lengths[0]} to {lengths[-1]} elements. Pad or cut them to one length."
            )
        elements = _array(name, column.flatten())
        return elements.reshape(len(column), *lengths, *elements.shape[1:])
    if types.is_string(kind) or types.is_large_string(kind):
        return np.array(column.to_pylist(), np.str_)
    return np.asarray(column.to_numpy(zero_copy_only=False))


__all__ = ["ARROW", "PARQUET", "ArrowRows"]
