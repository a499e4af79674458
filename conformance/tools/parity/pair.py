"""Both gradients of the loss of a case: the sum of its float outputs weighted by fed cotangents."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.conformance.problems.systems.training_form import LOSS, as_it_trains, with_loss
from refgrad.conformance.tools.parity.cases import float_inputs
from refgrad.derivatives.ortbuilder import Builders, readable
from refgrad.model.normalise import normalise
from refgrad.notices import quiet


@dataclass(frozen=True)
class Pair:
    """Two gradients of one case, with the same inputs and outputs. `model` is the model that they differentiate."""

    model: ModelProto
    ours: ModelProto
    theirs: ModelProto
    feeds: Mapping[str, np.ndarray]


def build(case: Case, builders: Builders) -> Pair:
    """Both gradients of the loss of `case`, and their feeds: the case's, random cotangents, and 1 for the loss.

    :raises BuilderError: ONNX Runtime's builder did not make a gradient.
    """
    source = readable(case.model)
    results = get_backend("numpy").prepare(source).run(case.feeds)
    # Neither builder's gradient of a broadcast product of empty tensors may run (see the known differences of Mul).
    model = with_loss(source, case.outputs, [name for name, y in results.items() if not y.size])
    known = normalise(model)
    wrt = [name for name in (float_inputs(case.model) if case.wrt is None else case.wrt) if name in known.types]
    # ONNX Runtime's gradient of FakeQuant is refgrad's with "clipped"; it has no other.
    with quiet():
        ours = refgrad.gradient(model, wrt=wrt, outputs=[LOSS], dialect="ort", quantization="clipped")
    theirs = builders.raw(as_it_trains(model), wrt, LOSS)
    made = {f"{name}_grad" for name in wrt}
    kept = [value for value in theirs.graph.output if value.name in made]
    del theirs.graph.output[:]
    theirs.graph.output.extend(kept)
    return Pair(model, ours, theirs, _feeds(case, model, results))


def _feeds(case: Case, model: ModelProto, results: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    feeds = dict(case.feeds)
    for value in model.graph.input:
        if value.name not in feeds:
            y = results[value.name.removesuffix("_weight")]
            feeds[value.name] = rng.standard_normal(y.shape).astype(y.dtype)
    return feeds | {f"{LOSS}_grad": np.ones((), np.float32)}
