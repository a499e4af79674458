"""The trained model as a file: what was in a data file is written into one, and never is in memory as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
from onnx import ModelProto

from refgrad.errors import OptionError
from refgrad.model.external import ExternalData, array_of, dtype_of, is_external
from refgrad.model.places import places
from refgrad.model.reading import read
from refgrad.model.writing import save_gradient
from refgrad.parameters.weights import write_back
from refgrad.training.adapters import without_adapters
from refgrad.training.training import Training, written_back


def save_trained(
    training: Training,
    model: ModelProto | str | os.PathLike[str],
    path: str | os.PathLike[str],
    source: str | os.PathLike[str],
    merge: bool = False,
) -> Path | None:
    """Write `model` with the weights that the training has reached. Return the data file that was written beside it, or None.

    The file has what `Training.write_to` returns, with `merge` after `merge_adapters`. New values of weights that lie in files
    are written into `<path>.data`. Other external data is referenced or copied, as by `save_gradient`.

    :param model: the model that is trained, with its adapters, or its path. It is not modified.
    :param path: the file to write.
    :param source: the path of the model beside which its external data lies (`data_beside` of `step_model`).
    :param merge: add the adapters to their weights.
    :raises OptionError: the model has no adapters to merge, or a trained weight has another type or shape in `model`.
    :raises OutputFileError: the result cannot be written, or would replace the model itself.
    """
    state = training.state
    weights, statistics = training.step.weights_in(state), training.step.statistics_in(state)
    model = read(model, lift=False)
    in_files = {tensor.name: tensor for tensor in model.graph.initializer if is_external(tensor)}
    values = {name: value for name, value in (weights | statistics).items() if name in in_files}
    for name, value in values.items():
        dtype, shape = dtype_of(in_files[name]), tuple(in_files[name].dims)
        if (value.dtype, value.shape) != (dtype, shape):
            raise OptionError(
                f"The training has {name!r} as {value.dtype}{list(value.shape)}, and the model has it as {dtype}{list(shape)}. "
                "Give the model that is trained."
            )
    made = written_back(model, *({n: v for n, v in held.items() if n not in values} for held in (weights, statistics)))
    new: dict[str, Iterable[np.ndarray]] = {name: [value] for name, value in values.items()}
    with ExternalData(source) as data:
        if merge:
            made, merged = without_adapters(made)
            for name in merged.keys() & in_files.keys():
                sums = merged.pop(name).sums
                new[name] = sums(weights[name].__getitem__ if name in weights else partial(data.array, in_files[name]))
            held = {place.name: place.tensor for place in places(made)}
            made = write_back(
                made, {n: np.concatenate([*m.sums(array_of(held[n]).__getitem__)]) for n, m in merged.items()}
            )
        return save_gradient(made, path, source, new)
