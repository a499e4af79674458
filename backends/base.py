"""The interface of an executor: a `Backend` prepares a model once, a `Prepared` runs it many times."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import ml_dtypes
import numpy as np
import onnx
from onnx import helper

from refgrad.errors import BackendError, FeedError, InvalidModelError, choices, did_you_mean
from refgrad.links import Folders, with_data_in
from refgrad.model.external import Opened, external_tensors, load, loaded, refuse_external
from refgrad.model.places import lifted
from refgrad.model.reading import read
from refgrad.protos.types import dimension

ModelLike: TypeAlias = "onnx.ModelProto | str | os.PathLike[str]"
Dim: TypeAlias = "int | str | None"

_NARROWER_FLOATS = (np.float16, np.float32, ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Value:
    """A graph input or output.

    `dtype` is None where the value is not a tensor (`kind` says what it is) or has no declared type. In `shape` an int is
    a static dimension, a str a symbolic one, None an unknown one. A `shape` of None means that the rank is unknown.
    """

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[Dim, ...] | None
    kind: str = "tensor"
    has_default: bool = False

    def __str__(self) -> str:
        if self.kind != "tensor":
            return f"{self.name}: {self.kind}"
        dims = "" if self.shape is None else "[" + ", ".join("?" if d is None else str(d) for d in self.shape) + "]"
        return f"{self.name}: {'any type' if self.dtype is None else self.dtype}{dims}"


def describe(info: onnx.ValueInfoProto, has_default: bool = False) -> Value:
    """Return the `Value` that a ValueInfoProto declares.

    :raises InvalidModelError: its name is no text, or onnx does not know its element type.
    """
    name: object = info.name
    if isinstance(name, bytes):  # as protobuf returns it
        raise InvalidModelError(f"The model has the name {name[:40]!r}, which is not UTF-8. Export the model again.")
    kind = info.type.WhichOneof("value")
    if kind is None:
        return Value(info.name, None, None, has_default=has_default)
    if kind != "tensor_type":
        return Value(info.name, None, None, kind.removesuffix("_type"), has_default)
    tensor = info.type.tensor_type
    try:
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type) if tensor.elem_type else None
    except KeyError as error:
        raise InvalidModelError(
            f"{info.name!r} has the element type {tensor.elem_type}, which onnx does not know. Export the model again."
        ) from error
    shape: tuple[Dim, ...] | None = None
    if tensor.HasField("shape"):
        shape = tuple(map(dimension, tensor.shape.dim))
    return Value(info.name, dtype, shape, has_default=has_default)


def graph_inputs(graph: onnx.GraphProto) -> tuple[Value, ...]:
    """Describe the inputs of `graph`. An input that is an initializer too has a default."""
    defaults = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    return tuple(describe(info, info.name in defaults) for info in graph.input)


def graph_outputs(graph: onnx.GraphProto) -> tuple[Value, ...]:
    """Describe the outputs of `graph`."""
    return tuple(describe(info) for info in graph.output)


@with_data_in
def load_model(
    model: ModelLike, external_data: bool = True, *, lift: bool = False, data_folders: Folders | None = None
) -> onnx.ModelProto:
    """Return `model` itself, or read the model at that path.

    Without `external_data` the data of initializers is checked and not read. A model in memory may then refer to data files.

    :param lift: weights in Constant nodes and in bodies become initializers, as in gradients of the model.
    :param data_folders: folders that links to external data may lead into (docs/security.md).
    :raises InvalidModelError: there is no model, or its external data cannot be used.
    """
    if isinstance(model, onnx.ModelProto):
        for tensor in external_tensors(model) if external_data else ():
            refuse_external(tensor)
        return lifted(model) if lift else model
    path = Path(model)
    if not os.path.isfile(path):  # False too where no file can have this name
        what = "model at" if os.path.exists(path) else "file"
        raise InvalidModelError(f"There is no {what} {str(path)!r}. Give the path of an .onnx file.")
    proto = read(path, lift=False)
    if external_data:
        load(proto, path)
    return lifted(proto) if lift else proto


def check_outputs(
    names: Iterable[str] | None, declared: Sequence[Value], inner: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the outputs asked for, all of them where `names` is None. Those in `inner` can be asked for as well."""
    known = [value.name for value in declared]
    if names is None:
        return tuple(known)
    if isinstance(names, str):
        raise FeedError(f"outputs={names!r} is a string. Give a list of names: outputs=[{names!r}].")
    asked = tuple(names)
    for name in asked:
        if name not in known and name not in inner:
            raise FeedError(
                f"The model has no output {name!r}.{did_you_mean(name, [*known, *inner])} Its outputs are {choices(known)}."
            )
    return asked


def by_names(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the feeds, or raise a FeedError where they are no mapping."""
    if not isinstance(feeds, Mapping):
        raise FeedError(f"Feeds are arrays by the names of inputs, as in {{'x': array}}, not {type(feeds).__name__}.")
    return feeds


def check_feeds(feeds: Mapping[str, Any], inputs: Sequence[Value], widen: bool = False) -> dict[str, Any]:
    """Return the feeds as arrays of the declared dtypes and shapes, or raise a FeedError that says which is wrong.

    With `widen`, a feed of a narrower float is converted to a float64 input; nothing else is ever cast.
    """
    feeds = by_names(feeds)
    symbols: dict[str, tuple[int, str]] = {}
    if len(feeds) == len(inputs):  # the usual case, at a tenth of the cost of the others: everything as declared
        for value in inputs:
            feed = feeds.get(value.name)
            if type(feed) is not np.ndarray or feed.dtype is not value.dtype:
                break
            if feed.shape != value.shape:
                if value.shape is None or value.kind != "tensor":
                    break
                check_shape(feed.shape, value, symbols)
        else:
            return dict(feeds)
    declared = {value.name: value for value in inputs}
    for name in feeds:
        if name not in declared:
            hint = did_you_mean(name, declared)
            raise FeedError(
                f"The feeds have {name!r}, but the model has no such input.{hint} Its inputs are {choices(declared)}."
                f"{'' if hint else f' Leave {name!r} out.'}"
            )
    missing = [v for v in inputs if v.name not in feeds and not v.has_default and v.kind != "optional"]
    if missing:
        raise FeedError(
            f"No feed for {', '.join(str(value) for value in missing)}. Add "
            f"{'it' if len(missing) == 1 else 'them'} to the feeds; {choices(feeds)} given."
        )
    symbols.clear()
    return {name: _check_feed(feed, declared[name], symbols, widen) for name, feed in feeds.items()}


def _check_feed(feed: Any, value: Value, symbols: dict[str, tuple[int, str]], widen: bool) -> Any:
    if value.kind != "tensor":
        container = {"sequence": (list, tuple), "map": (dict,)}.get(value.kind)
        if container and not isinstance(feed, container):
            raise FeedError(
                f"Input {value.name!r} is a {value.kind}, the feed a {type(feed).__name__}. "
                f"Give a {container[0].__name__}."
            )
        return _widened(feed) if widen else feed
    if isinstance(feed, np.ma.MaskedArray):
        raise FeedError(f"The feed of input {value.name!r} is a masked array. Fill it: a tensor has no mask.")
    array = feed if type(feed) is np.ndarray else _as_array(feed, value)
    if value.dtype == np.dtype(object) and array.dtype.kind in "UST":
        array = (np.strings.decode(array) if array.dtype.kind == "S" else array).astype(object)
    if widen and value.dtype == np.float64 and array.dtype.type in _NARROWER_FLOATS:
        array = array.astype(np.float64)
    if value.dtype is not None and array.dtype != value.dtype:
        raise _wrong_dtype(feed, array, value.name, value.dtype)
    if value.shape is not None:
        check_shape(array.shape, value, symbols)
    return array


def _wrong_dtype(feed: Any, array: np.ndarray, name: str, due: np.dtype[Any]) -> FeedError:
    """The error for a feed of another dtype: what to write, where a conversion keeps its meaning."""
    if due == np.dtype(object):
        return FeedError(f"Input {name!r} takes strings, the feed has dtype {array.dtype}. Give an array of strings.")
    has = f"Input {name!r} has dtype {due}, the feed {array.dtype}."
    if array.dtype.kind in "USTO" or (array.dtype.kind == "c" and due.kind != "c"):
        kinds = {"c": "complex numbers", "O": "Python objects"}
        return FeedError(
            f"{has} Give an array of {due}: {kinds.get(array.dtype.kind, 'strings')} cannot stand for such numbers."
        )
    how = f"convert it with .astype({str(due)!r})" if hasattr(feed, "astype") else f"give np.asarray(..., {str(due)!r})"
    return FeedError(f"{has} Feeds are not cast: {how} if that is what you mean.")


def _widened(feed: Any) -> Any:
    """Convert every array of a narrower float to double, in lists and dicts too."""
    if isinstance(feed, list | tuple):
        return [_widened(item) for item in feed]
    if isinstance(feed, dict):
        return {key: _widened(item) for key, item in feed.items()}
    return feed.astype(np.float64) if getattr(feed, "dtype", None) in _NARROWER_FLOATS else feed


def _as_array(feed: Any, value: Value) -> np.ndarray:
    try:
        return np.asarray(feed)
    except (ValueError, TypeError) as error:
        raise FeedError(
            f"The feed of input {value.name!r}, a {type(feed).__name__}, cannot be made an array ({error}). "
            f"Give a numpy array of dtype {value.dtype}."
        ) from error


def check_shape(shape: tuple[int, ...], value: Value, symbols: dict[str, tuple[int, str]]) -> None:
    """Raise a FeedError if a feed of this shape does not have the shape that `value` declares.

    :param symbols: the sizes of named dimensions so far and where each was met; this feed's dimensions are added.
    """
    if shape == value.shape:
        return
    assert value.shape is not None
    if len(shape) != len(value.shape):
        raise FeedError(
            f"Input {value} has rank {len(value.shape)}, the feed has shape {shape} of rank {len(shape)}. "
            "Reshape the feed, or remove the declared shape from the model."
        )
    for axis, (size, dim) in enumerate(zip(shape, value.shape, strict=True)):
        if isinstance(dim, int) and dim != size:
            raise FeedError(
                f"Input {value} has {dim} elements on axis {axis}, the feed has shape {shape}. "
                "Reshape the feed, or make that dimension of the model symbolic."
            )
        if isinstance(dim, str):
            bound, where = symbols.setdefault(dim, (size, f"axis {axis} of {value.name!r}"))
            if bound != size:
                raise FeedError(
                    f"Dimension {dim!r} is {bound} on {where} and {size} on axis {axis} of {value.name!r}. "
                    "Feeds must agree on it."
                )


class Prepared(ABC):
    """A model ready to run. `inputs` and `outputs` describe what it takes and gives."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @abstractmethod
    def run(self, feeds: Mapping[str, Any], outputs: Iterable[str] | None = None) -> dict[str, Any]:
        """Compute the outputs (all, or those named) for `feeds`, both by name.

        Raises FeedError for feeds that do not fit the model, BackendError where the executor fails.
        """

    def held(self, value: Any) -> Any:
        """The array `value`, or what has `__dlpack__`, as `run_held` reads it: in the same memory where that can be."""
        return value if isinstance(value, np.ndarray) else np.from_dlpack(value)

    def run_held(self, names: Sequence[str], values: Sequence[Any], outputs: Sequence[str]) -> Sequence[Any]:
        """Compute `outputs` as `run` does, from values that are held, to values that are: without a copy where that can be.

        The values of the inputs `names` have to fit the model: they may not be checked.
        """
        results = self.run(dict(zip(names, values, strict=True)), outputs)
        return [results[name] for name in outputs]

    def lent(self, values: Sequence[Any], take: Callable[[Any], Any]) -> list[Any]:
        """Call `take` with each held value, as an array or a DLPack capsule of the same memory, and return the results."""
        return [take(value) for value in values]

    def recurrence(self, following: Mapping[str, str], values: Mapping[str, Any]) -> Recurrence:
        """Run the model again and again, with results fed to the next run.

        :param following: for each input that a run changes, the output that has what the next run is fed.
        :param values: what the first run is fed for these inputs.
        """
        return Recurrence(self, following, values)


class Recurrence:
    """Runs of a model, each of which is fed results of the one before."""

    def __init__(self, prepared: Prepared, following: Mapping[str, str], values: Mapping[str, Any]) -> None:
        if following.keys() != values.keys():
            raise FeedError(f"Expected values for {', '.join(following)}, got values for {', '.join(values)}.")
        self._prepared, self._following, self._values = prepared, dict(following), dict(values)
        self._before = self._values
        fed_back = set(following.values())
        self._others = [value.name for value in prepared.outputs if value.name not in fed_back]

    def step(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model once: the outputs that are not fed back.

        Raises FeedError and BackendError as `Prepared.run` does; then the values are those from before.
        """
        results = self._prepared.run({**feeds, **self._values})
        self._before = self._values
        self._values = {name: results[output] for name, output in self._following.items()}
        return {name: results[name] for name in self._others}

    def undo(self) -> None:
        """Take the values from before the last step, once."""
        self._values = self._before

    @property
    def values(self) -> dict[str, np.ndarray]:
        """The values that the next run is fed, by the names of the inputs."""
        return dict(self._values)


class Local(Prepared):
    """A prepared model of this process alone: it holds functions, memory and threads that no other process has."""

    def __reduce__(self) -> Any:
        """Raise BackendError instead of being pickled."""
        raise BackendError(
            "A prepared model cannot be pickled: it holds functions, memory and threads of this process. "
            "Pickle the model or its path instead, and prepare it where it runs."
        )

    def __copy__(self) -> Self:
        """Return the prepared model itself, which no run changes."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the prepared model itself, which no run changes."""
        return self


class Backend(ABC):
    """An executor. `name` is what `get_backend` knows it by."""

    name: str

    @classmethod
    def unavailable(cls) -> str | None:
        """Return the reason why this executor cannot be used here; None where it can be used."""
        return None

    @abstractmethod
    def description(self) -> str:
        """One line: what runs the model, its version and devices."""

    @abstractmethod
    def prepare(self, model: ModelLike, **options: Any) -> Prepared:
        """Make `model` ready to run: a ModelProto, which is not modified, or a path.

        Raises InvalidModelError if it is not a model and BackendError if this executor cannot run it.
        """

    def prepare_opened(self, model: Opened, **options: Any) -> Prepared:
        """Make a model ready to run whose external data lies beside a path. Here the data is loaded.

        Raises what `prepare` raises.
        """
        return self.prepare(loaded(model), **options)
