"""Whole models as cases of the exported suite: every `.onnx` file of a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from refgrad.backends.base import graph_inputs, load_model
from refgrad.conformance.case import Case
from refgrad.conformance.judge.running.sources import one_model
from refgrad.conformance.tools.exporting.names import safe
from refgrad.conformance.tools.exporting.sizes import sized
from refgrad.errors import OptionError
from refgrad.protos.arrays import read_arrays

_PREFIX = "feed/"  # before the name of an input in what examples/torch_models.py writes


def models_in(folder: str | os.PathLike[str]) -> dict[str, Case]:
    """The models in a folder, or the one at a path, by the names of their tests.

    Each is differentiated by its float inputs, with numbers for sizes.

    MODEL.onnx is fed the arrays of MODEL.npz that have the name of an input, or `feed/` and the name, as
    examples/torch_models.py writes them; without that file, random numbers.

    :raises OptionError: nothing is there, or no model in the folder.
    :raises RefgradError: a model or its feeds cannot be used.
    """
    place = Path(folder)
    if not place.exists():
        raise OptionError(f"There is nothing at {str(place)!r}. Give a folder with .onnx files, or one such file.")
    paths = sorted(place.glob("*.onnx")) if place.is_dir() else [place]
    if not paths:
        raise OptionError(f"There is no .onnx file in {str(place)!r}.")
    found: dict[str, Case] = {}
    for path in paths:
        name = f"test_grad_model_{safe(path.stem)}"
        found[name if name not in found else f"{name}_{len(found)}"] = _case(path)
    return found


def _case(path: Path) -> Case:
    model = load_model(path)
    inputs = {value.name for value in graph_inputs(model.graph)}
    return sized(one_model(path, _feeds(path.with_suffix(".npz"), inputs)))


def _feeds(path: Path, inputs: set[str]) -> dict[str, Any] | None:
    """The arrays of a .npz file that are inputs; None where there is no file."""
    if not path.exists():
        return None
    named = {name.removeprefix(_PREFIX): array for name, array in read_arrays(path, "Feeds").items()}
    return {name: array for name, array in named.items() if name in inputs}
