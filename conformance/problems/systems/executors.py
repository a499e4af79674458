"""Executors run a model: refgrad's own, onnx's reference implementation, and any that its module names."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from refgrad.backends import Backend, Prepared, backends, get_backend, wrap
from refgrad.backends.base import ModelLike, check_feeds, check_outputs, graph_inputs, graph_outputs, load_model
from refgrad.backends.discovery import names
from refgrad.backends.onnxruntime import DISTRIBUTIONS
from refgrad.errors import AnswerError, BackendError, OptionError, RefgradError, choices, did_you_mean, of_type, raised
from refgrad.model import native

REFERENCE = "onnx.reference"
_INSTALLED_BY = {"numpy": ("refgrad",), "ort-cpu": DISTRIBUTIONS, "ort-cuda": DISTRIBUTIONS, REFERENCE: ("onnx",)}


def executors() -> dict[str, str | None]:
    """Every executor known here, with the reason why it cannot be used; None where it can."""
    return {**backends(), REFERENCE: None}


def executor_names() -> list[str]:
    """The names of all executors, available or not. None of them is imported."""
    return [*names(), REFERENCE]


def get_executor(name: str) -> Backend:
    """The executor of that name, or of "package.module:attribute": a `Backend`, or what `refgrad.backends.wrap` takes.

    The current folder is importable.

    :raises OptionError: there is none, or the attribute is no executor.
    :raises BackendError: it cannot be used here.
    """
    known = executors()
    if name == REFERENCE:
        return _Reference()
    if name in known:
        return get_backend(name)
    if ":" not in name:
        raise OptionError(
            f"There is no executor {name!r}.{did_you_mean(name, known)} There are {choices(known)}; one of your own is "
            "given as package.module:Class."
        )
    found = imported(name, known)
    try:
        made = found() if isinstance(found, type) and issubclass(found, Backend) else found
        backend = made if isinstance(made, Backend) else wrap(made, name)
        reason = backend.unavailable() if isinstance(made, Backend) else None
    except RefgradError:
        raise
    except (Exception, SystemExit) as error:  # a stranger's class raises anything when it is called
        raise OptionError(
            f"The executor {name!r} cannot be made: {raised(error)}. Its class is called without an argument."
        ) from error
    if reason:
        raise BackendError(f"The executor {name!r} cannot be used here: {reason}")
    return backend


def run(
    name: str, model: ModelProto, feeds: Mapping[str, Any], outputs: Iterable[str] | None = None, **options: Any
) -> dict[str, np.ndarray]:
    """The outputs that an executor computes of a model: all, or the named ones. `options` are the options of its `prepare`.

    :raises RefgradError: what `run_in_turn` raises.
    """
    return run_in_turn(name, model, [feeds], outputs, **options)[0]


def run_in_turn(
    name: str,
    model: ModelProto,
    feeds: Sequence[Mapping[str, Any]],
    outputs: Iterable[str] | None = None,
    **options: Any,
) -> list[dict[str, np.ndarray]]:
    """The outputs of several runs of a model that is prepared once.

    :raises OptionError: there is no such executor.
    :raises FeedError: feeds that do not fit the model.
    :raises BackendError: the executor cannot be used here, or does not run the model.
    :raises AnswerError: it returned something else than the outputs, or wrote into what it was fed.
    :raises Exception: whatever an executor of a stranger raises.
    """
    asked = None if outputs is None else list(outputs)
    prepared: Prepared | None = None
    found = []
    for fed in feeds:
        before = {key: value.tobytes() for key, value in fed.items() if isinstance(value, np.ndarray)}
        given = dict(fed)
        try:
            prepared = prepared or runnable(name, get_executor(name).prepare(model, **options))
            results = prepared.run(given, asked)
        except BackendError as error:
            cause = error.__cause__
            if ":" in name and cause is not None and not isinstance(cause, RefgradError):
                raise cause from None  # its class says whether it is a bug
            raise
        if changed := [key for key, value in before.items() if fed[key].tobytes() != value or key not in given]:
            raise AnswerError(f"{name} wrote into what it was fed: {choices(changed)}.")
        found.append(_checked(name, model, results, asked, is_of_types=not options))
    return found


def runnable(name: str, prepared: Any) -> Prepared:
    """The model that `prepare` of an executor returned, if it can be run.

    :raises AnswerError: it has no method `run`.
    """
    if not callable(getattr(prepared, "run", None)):
        raise AnswerError(
            f"the prepare of {name} returned {of_type(prepared)}; it must return an object whose run(feeds, outputs) returns "
            "the outputs by name."
        )
    made: Prepared = prepared
    return made


def answer(
    name: str, prepared: Prepared, model: ModelProto, feeds: Mapping[str, Any], outputs: Iterable[str] | None = None
) -> dict[str, Any]:
    """The outputs of one run of an executor that is given as an object.

    :raises BackendError: it raises anything.
    :raises AnswerError: it returned something else than the outputs, or wrote into what it was fed.
    """
    given = copy.deepcopy(dict(feeds))
    try:
        results = prepared.run(given, outputs)
    except RefgradError:
        raise
    except Exception as error:
        raise BackendError(f"{name} raised {raised(error)}.") from error
    changed = [
        key for key, value in feeds.items() if isinstance(value, np.ndarray) and given[key].tobytes() != value.tobytes()
    ]
    if changed:
        raise AnswerError(f"{name} wrote into what it was fed: {choices(changed)}.")
    return _checked(name, model, results, outputs, is_of_types=False)


def _checked(
    name: str, model: ModelProto, results: Any, outputs: Iterable[str] | None, is_of_types: bool
) -> dict[str, np.ndarray]:
    """The outputs that were asked for, which a stranger's executor may lack or have in another form.

    :raises AnswerError: it returned something else than the outputs.
    """
    if not isinstance(results, Mapping):
        raise AnswerError(
            f"{name} returned {of_type(results)} and no outputs by name: run must return a dict of arrays."
        )
    declared = graph_outputs(model.graph)
    asked = check_outputs(outputs, declared)
    if absent := [key for key in asked if key not in results]:
        raise AnswerError(f"{name} returned no output {choices(absent)}; it returned {choices(results)}.")
    tensors = {value.name for value in declared if value.kind == "tensor"}
    if bare := [key for key in asked if key in tensors and not hasattr(results[key], "__array__")]:
        raise AnswerError(
            f"{name} returned no array for {choices(bare)} but {of_type(results[bare[0]])}: run must return a dict of arrays."
        )
    if masked := [key for key in asked if key in tensors and np.ma.is_masked(results[key])]:
        raise AnswerError(f"{name} returned masked elements in {choices(masked)}.")
    found = {key: np.array(results[key]) if key in tensors else results[key] for key in asked}  # it may reuse its own
    for value in declared if is_of_types else ():  # with an option such as the precision, types may be others
        if value.name in found and value.kind == "tensor" and not _is_of(found[value.name].dtype, value.dtype):
            other = found[value.name].dtype
            raise AnswerError(f"{name} returned {value.name!r} of {other}; the model declares {value.dtype}.")
    return found


def _is_of(dtype: np.dtype[Any], declared: np.dtype[Any] | None) -> bool:
    """True if an array has the declared type. NumPy has several types for texts."""
    texts = "OUST"
    if declared is None or declared.kind in texts:
        return declared is None or dtype.kind in texts
    return dtype == declared


def version(name: str) -> str:
    """The distribution that an executor belongs to, with its version: "onnxruntime 1.31.1"; "" where there is none."""
    return installed(_INSTALLED_BY[name]) if name in _INSTALLED_BY else version_of_module(name)


class _Reference(Backend):
    """onnx's reference implementation."""

    name = REFERENCE

    def description(self) -> str:
        """Its version."""
        return f"the reference implementation of onnx {onnx.__version__}"

    def prepare(self, model: ModelLike, **options: Any) -> Prepared:
        """Find an implementation of every node.

        :raises InvalidModelError: no model. BackendError: there is no implementation of an operator. OptionError: any option.
        """
        if options:
            raise OptionError(f"The executor {self.name!r} has no option {choices(sorted(options))}. It has none.")
        return _PreparedReference(load_model(model))


class _PreparedReference(Prepared):
    def __init__(self, model: ModelProto) -> None:
        self.inputs, self.outputs = graph_inputs(model.graph), graph_outputs(model.graph)
        try:
            self._evaluator = native.reference(model)
        except Exception as error:  # it raises whatever an implementation does
            raise BackendError(f"{REFERENCE} does not read the model: {raised(error)}") from error

    def run(self, feeds: Mapping[str, Any], outputs: Iterable[str] | None = None) -> dict[str, Any]:
        asked = check_outputs(outputs, self.outputs)
        checked = check_feeds(feeds, self.inputs)
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")  # NumPy's, of infinities and casts
                results = self._evaluator.run(list(asked), checked)
        except Exception as error:  # it raises whatever an implementation does
            raise BackendError(f"{REFERENCE} fails on the model: {raised(error)}") from error
        return dict(zip(asked, results, strict=True))


# What people bring


def imported(name: str, known: Iterable[str] = ()) -> Any:
    """The attribute that "package.module:attribute" names. The current folder is importable.

    :raises OptionError: there is no such module or attribute, or it cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise OptionError(f"{name!r} lacks a module or a name. Give package.module:name, such as 'mine:make'.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a stranger's module raises anything when it is imported
        raise OptionError(
            f"{name!r} cannot be imported: {raised(error)}.{did_you_mean(name, known)} Give package.module:name, of a module "
            f"that is installed or lies in {here!r}."
        ) from error
    return found


def installed(distributions: Iterable[str]) -> str:
    """The first of these distributions that is installed, with its version; "" where none is."""
    for distribution in distributions:
        try:
            return f"{distribution} {metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            continue
    return ""


def version_of_module(name: str) -> str:
    """The distribution, with its version, that the module of "package.module:attribute" belongs to; "" where to none."""
    return installed(_distributions().get(name.partition(":")[0].partition(".")[0], ()))


@cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()
