"""The trained model as a file: what was in a data file is written into one, and never is in memory as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
from onnx import ModelProto

from refgrad.model.external import ExternalData, array_of, is_external
from refgrad.model.places import places
from refgrad.model.writing import save_gradient
from refgrad.parameters.weights import write_back
from refgrad.training.adapters import without_adapters
from refgrad.training.training import Training, written_back


def save_trained(
    training: Training,
    model: ModelProto,
    path: str | os.PathLike[str],
    source: str | os.PathLike[str],
    merge: bool = False,
) -> Path | None:
    """Write `model` with the weights that the training has reached. Return the data file that was written beside it, or None.

    The file has what `Training.write_to` returns, with `merge` after `merge_adapters`. New values of weights that lie in files
    are written into `<path>.data`. Other external data is referenced or copied, as by `save_gradient`.

    :param model: the model that is trained, made of the model at `source`, beside which its external data lies.
    :raises OptionError: the model has no adapters to merge.
    :raises OutputFileError: the result cannot be written, or would replace the model itself.
    """
    state = training.state
    weights, statistics = training.step.weights_in(state), training.step.statistics_in(state)
    in_files = {tensor.name: tensor for tensor in model.graph.initializer if is_external(tensor)}
    new: dict[str, Iterable[np.ndarray]] = {n: [v] for n, v in (weights | statistics).items() if n in in_files}
    made = written_back(model, *({n: v for n, v in held.items() if n not in new} for held in (weights, statistics)))
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
