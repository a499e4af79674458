"""The verdict on whole models, compared with both of ONNX Runtime's builders."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto

import refgrad
from refgrad.backends.base import load_model
from refgrad.conformance.case import Case
from refgrad.conformance.tools.parity.cases import float_inputs
from refgrad.conformance.tools.parity.pair import build
from refgrad.conformance.tools.parity.structure import compare
from refgrad.conformance.tools.parity.verdicts import ParityRow, measure
from refgrad.derivatives.ortbuilder import Builders
from refgrad.model.external import array_of
from refgrad.notices import quiet
from refgrad.protos.arrays import read_arrays
from refgrad.protos.types import FLOATS
from refgrad.rewrites.selection import select_model_inputs_outputs
from refgrad.show import demo
from refgrad.worker import Worker


@dataclass(frozen=True)
class WholeModel:
    """The result of one model: how many nodes our graph and theirs have, and the row, as for a case."""

    name: str
    builder: str
    nodes: tuple[int, int]
    row: ParityRow


def whole_models(folder: Path | None = None) -> dict[str, Case]:
    """The notebook's regression, scikit-learn's MLP and, from `folder`, torch's export of a ResNet-18, an LSTM and a GRU.

    Each is optimised as the module builder does before it differentiates: fused, with operators in their training form,
    and with the trained weights among the inputs.
    """
    neural_network, skl2onnx = (importlib.import_module(name) for name in ("sklearn.neural_network", "skl2onnx"))
    x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    regressor = neural_network.MLPRegressor(hidden_layer_sizes=(5, 3), max_iter=2000, random_state=0).fit(
        x, x[:, :1].sum(axis=1)
    )
    found = {
        "regression": (demo.regression(loss=False), {"x": demo.feeds()["x"]}),
        "regression, the loss alone": (
            select_model_inputs_outputs(demo.regression(), ["loss"]),
            {name: demo.feeds()[name] for name in ("x", "label")},
        ),
        "MLP of scikit-learn": (skl2onnx.to_onnx(regressor, x[:1], target_opset=18), {"X": x[:5]}),
    }
    exported = {} if folder is None else {name: folder / f"{name}.onnx" for name in ("resnet18", "lstm", "gru")}
    for name, path in exported.items():
        feeds = read_arrays(path.with_suffix(".npz"), "Feeds")
        found[name] = (
            load_model(path),
            {key.removeprefix("feed/"): feeds[key] for key in feeds if key.startswith("feed/")},
        )
    with Builders() as builders:
        return {name: _optimized(name, model, feeds, builders) for name, (model, feeds) in found.items()}


def _optimized(name: str, model: ModelProto, feeds: Mapping[str, np.ndarray], builders: Builders) -> Case:
    weights = {t.name: array_of(t) for t in model.graph.initializer if t.data_type in FLOATS}
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":  # its statistics are not trained
            for statistic in node.input[3:5]:
                weights.pop(statistic, None)
    inputs = [name for name in float_inputs(model) if name not in weights]
    forward = builders.optimized(model, inputs, weights)
    used = {name for node in forward.graph.node for name in node.input}
    weights = {name: value for name, value in weights.items() if name in used}
    return Case(name, forward, {**feeds, **weights}, (*inputs, *weights))


def measure_model(case: Case, builders: Builders, runner: Worker) -> Iterator[WholeModel]:
    """Compare one of `whole_models` with both builders: the raw one on its loss, the module one with YieldOp."""
    row = measure(case.name, case, builders, runner)
    pair = build(case, builders)
    yield WholeModel(case.name, "GradientGraphBuilder", _sizes(pair.ours, pair.theirs), row)
    wrt = case.wrt or ()
    with quiet():
        ours = refgrad.gradient(case.model, wrt, dialect="ort", cotangent="yield")
    theirs = builders.module(case.model, wrt, [])
    found = compare(ours, theirs)
    verdict, detail = ("isomorphic", "") if found else ("different", str(found))
    same = found.same_names, found.same_operators
    row = replace(row, verdict=verdict, detail=detail, same_names=same[0], same_operators=same[1])
    yield WholeModel(case.name, "OrtModuleGraphBuilder", _sizes(ours, theirs), row)


def _sizes(ours: ModelProto, theirs: ModelProto) -> tuple[int, int]:
    return len(ours.graph.node), len(theirs.graph.node)
