"""Plug-ins, which are modules that register operators: each is imported once, before the first model is read.

A package names its module by an entry point of the group `refgrad.operators`; a user names one in the environment variable
REFGRAD_IMPORT (several are separated by commas) or by `--import` on the command line, which sets that variable. Processes that
are started from here inherit it. refgrad's own plug-ins, the operators of ONNX Runtime, come before the others, which may
replace what they register.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from refgrad.checkout import project_file
from refgrad.errors import OptionError, PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "refgrad.operators"
VARIABLE = "REFGRAD_IMPORT"
OPTION = "--import"
_OWN = ("refgrad.microsoft",)

_turn = threading.RLock()
_loaded: str | None = None  # the value of VARIABLE whose modules are imported; None before the first time
_loading = False
_has_own = False  # refgrad's own plug-ins are imported


def load() -> None:
    """Import the modules that register operators, unless they are imported already.

    :raises PluginError: one cannot be imported.
    """
    global _loaded, _loading
    wanted = os.environ.get(VARIABLE, "")
    if wanted == _loaded:
        return
    _import_extend()
    with _turn:
        if _loading or wanted == _loaded:  # a module that reads a model while it is imported
            return
        _loading = True
        try:
            if _loaded is None:
                load_own()
                _load_entry_points()
            for module in _modules(wanted):
                _import(module)
            _loaded = wanted
        finally:
            _loading = False


def _import_extend() -> None:
    """Import what plug-ins import, before this thread takes the turn: a thread that imports it waits for the turn."""
    import_module("refgrad.extend")


def load_own() -> None:
    """Import refgrad's own plug-ins, unless they are imported already."""
    global _has_own
    if _has_own:
        return
    _import_extend()
    with _turn:
        for module in own():
            import_module(module)
        _has_own = True


def own() -> list[str]:
    """The modules of refgrad's own plug-ins: pyproject.toml names them in a checkout, an installed package has entry points.

    A bare checkout has no entry points, and an editable install may have older ones than its checkout. A copy of the package
    without its metadata, as in a frozen application, has neither: it gets those that it contains.
    """
    written = project_file()
    if written is not None:
        import tomllib

        groups = tomllib.loads(written.read_text(encoding="utf-8"))["project"]["entry-points"]
        return list(groups.get(GROUP, {}).values())
    points = [point.value for point in _entry_points() if point.dist is not None and point.dist.name == "refgrad"]
    return points or [module for module in _OWN if find_spec(module) is not None]


def _entry_points() -> Iterable[EntryPoint]:
    from importlib import metadata  # here, since `import refgrad` shall not pay for it

    return metadata.entry_points(group=GROUP)


def _load_entry_points() -> None:
    for point in _entry_points():
        try:
            point.load()
        except (Exception, SystemExit) as error:
            owner = f"the package {point.dist.name} {point.dist.version}" if point.dist else "a package"
            raise PluginError(
                f"The operators of {owner} cannot be loaded: its entry point {point.name!r} of the group {GROUP!r} is "
                f"{point.value!r}, and that raised {_said(error)} Mend or uninstall that package."
            ) from error


def _import(module: str) -> None:
    here = os.getcwd()  # as for `python -m`; processes that are started from here search it too
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        import_module(module)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"The module {module!r}, named by {OPTION} or {VARIABLE}, cannot be imported: {_said(error)} "
            f"{_advice(module, error)}"
        ) from error


def _advice(module: str, error: BaseException) -> str:
    """Advice: mend a module that was found, or give another name than `module`, which may be the name of a file."""
    missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
    if not missing and isinstance(error, SyntaxError):
        return f"The module was found: mend {error.filename}:{error.lineno}."
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen importlib")]
    own = [f for f in frames if f.filename not in (__file__, import_module.__code__.co_filename)]
    if not missing and own:
        last = [frame for frame in own if frame.filename == own[0].filename][-1]  # behind it lies what it calls
        return f"The module was found: mend what {last.filename}:{last.lineno} does."
    if not module.endswith(".py"):
        return "Give the name of an installed module, or of one in the current folder, as in my_package.operators."
    folder, file = os.path.split(module)
    where = f", in the folder {folder!r} or with that folder in PYTHONPATH" if folder else ""
    return f"{module!r} is a file: give the module's name{where}: {OPTION} {file.removesuffix('.py')}."


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(". ") + "."


def named() -> list[str]:
    """The modules that a user named: by `--import`, or in REFGRAD_IMPORT."""
    return _modules(os.environ.get(VARIABLE, ""))


def _modules(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The modules that `--import` names anywhere on a command line, and the other arguments.

    :raises OptionError: `--import` has no module behind it.
    """
    modules: list[str] = []
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            others += [argument, *rest]
        elif argument == OPTION or argument.startswith(f"{OPTION}="):
            module = argument.partition("=")[2] if "=" in argument else next(rest, "")
            if not module or module.startswith("-"):
                raise OptionError(f"{OPTION} takes the name of a module, as in {OPTION} my_package.operators.")
            modules += _modules(module)
        else:
            others.append(argument)
    return modules, others


@contextmanager
def importing(modules: Iterable[str]) -> Iterator[None]:
    """Import the modules, here and in every process that is started while this lasts.

    :raises PluginError: one cannot be imported.
    """
    before = os.environ.get(VARIABLE)
    every = _modules(",".join((before or "", *modules)))
    if every:
        os.environ[VARIABLE] = ",".join(every)
    try:
        if every:
            load()
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before
