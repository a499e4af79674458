"""The models of onnx's own node tests: the gradient of each, against central differences in float64.

Each is differentiated as it is, where axes, starts and indices are inputs that only the run knows, and once more with
everything that is not differentiated folded into constants.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto, numpy_helper

import refgrad
from refgrad.backends.base import Prepared
from refgrad.backward import names_in
from refgrad.conformance.differences import Difference, directional
from refgrad.conformance.feeds import widened
from refgrad.conformance.oracles.differences import tied
from refgrad.conformance.point import in_float64
from refgrad.graph import FLOATS
from refgrad.registry import NO_DERIVATIVE, PENDING

TOLERANCE = 1e-4  # of a directional derivative, relative to the size of the gradient
_SETTLED = 1e-5  # the error of differences that tell right from wrong, relative likewise
_STEPS = (1e-5, 1e-3)  # the first rarely meets a kink, the second resolves a small derivative of a large value
_SHIFTS = (1e-2, 3e-2, 1e-3, 1e-4, 0.0)  # away from the kinks that the tests' round numbers lie on

# Inputs that are not differentiated: (operator, input of its schema) and the reason.
FIXED = {
    ("Resize", "roi"): "refused: it moves the points at which X is read",
    ("Resize", "scales"): "refused: the shape of the result depends on it",
    ("Upsample", "scales"): "the shape of the result depends on it",
}

_TIED = ("Unique",)  # the shape of the result depends on which elements are equal: they stay so along every direction


@dataclass(frozen=True)
class NodeModel:
    """A node test: its model, one set of feeds, and the operator that it is about."""

    name: str
    operator: str
    model: ModelProto
    feeds: Mapping[str, Any]

    @property
    def wrt(self) -> tuple[str, ...]:
        """The float inputs, without those that are in `FIXED`."""
        fixed: set[str] = set()
        for node in self.model.graph.node:
            fixed.update(name for name, called in _inputs_of(node).items() if (node.op_type, called) in FIXED)
        return tuple(v.name for v in self.model.graph.input if _is_float(v) and v.name not in fixed)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The float outputs."""
        return tuple(v.name for v in self.model.graph.output if _is_float(v))

    def folded(self) -> NodeModel:
        """The same with everything that is not differentiated as a constant."""
        model = ModelProto()
        model.CopyFrom(self.model)
        kept, wrt = [], self.wrt
        for value in model.graph.input:
            if value.name in wrt or not isinstance(self.feeds.get(value.name), np.ndarray):
                kept.append(value)
            else:
                model.graph.initializer.append(numpy_helper.from_array(self.feeds[value.name], value.name))
        del model.graph.input[:]
        model.graph.input.extend(kept)
        names = {value.name for value in kept}
        return replace(self, model=model, feeds={n: v for n, v in self.feeds.items() if n in names})


def _inputs_of(node: Any) -> dict[str, str]:
    """The inputs of a node by what its operator's schema calls them."""
    if not onnx.defs.has(node.op_type, node.domain):
        return {}
    formal = onnx.defs.get_schema(node.op_type, node.domain).inputs
    return {name: formal[min(k, len(formal) - 1)].name for k, name in enumerate(node.input) if name and formal}


def _is_float(value: ValueInfoProto) -> bool:
    return value.type.HasField("tensor_type") and value.type.tensor_type.elem_type in FLOATS


@cache
def node_models() -> tuple[NodeModel, ...]:
    """Every node test with a float input and a float output, as onnx generates them."""
    from onnx.backend.test import loader  # only here: it takes longer than all of refgrad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = loader.load_model_tests(kind="node")
    found = []
    for test in tests:
        if test.model is None or not test.data_sets:
            continue
        inputs = test.data_sets[0][0]
        feeds = {v.name: as_array(x) for v, x in zip(test.model.graph.input, inputs, strict=False)}
        operator = test.model.graph.node[0].op_type
        made = NodeModel(test.name, operator, test.model, feeds)
        if made.outputs and any(_is_float(v) for v in test.model.graph.input):
            found.append(made)
    return tuple(found)


def as_array(feed: Any) -> Any:
    """A tensor or a NumPy scalar as an array; anything else as it is."""
    if isinstance(feed, TensorProto):
        return numpy_helper.to_array(feed)
    return np.asarray(feed) if isinstance(feed, np.generic) else feed


def excluded(test: NodeModel) -> str | None:
    """Why a test is not judged; None where it is."""
    for node in test.model.graph.node:
        key = node.domain, node.op_type
        if key in PENDING or key in NO_DERIVATIVE:
            return f"{node.op_type} {PENDING.get(key) or NO_DERIVATIVE[key]}"
    if any(not isinstance(x, np.ndarray) for x in test.feeds.values()):
        return "sequences and optionals are not differentiated yet"
    if not test.wrt:
        return "; ".join(
            sorted(
                {
                    FIXED[node.op_type, n]
                    for node in test.model.graph.node
                    for n in _inputs_of(node).values()
                    if (node.op_type, n) in FIXED
                }
            )
        )
    return None


def wrong(test: NodeModel, dialect: str = "onnx", **options: Any) -> list[str]:
    """What is wrong with the gradient of a node test: nothing, where it is right.

    :raises RefgradError: the gradient cannot be built or run.
    """
    forward = in_float64(test.model)
    gradient = refgrad.gradient(test.model, wrt=test.wrt, outputs=test.outputs, dialect=dialect, **options)
    seeds_of, names = names_in(gradient)
    prepared = in_float64(gradient)
    complaints = dict.fromkeys(test.wrt, "no finite point")
    open_ = set(test.wrt)
    before = forward.run(widened(test.feeds))
    for attempt, shift in enumerate(_SHIFTS):
        rng = np.random.default_rng((attempt, 7))
        point = _shifted(widened(test.feeds), test.wrt, shift, rng)
        results = forward.run(point)
        if shift and not _as_finite(results, before, test.outputs):
            continue
        cotangents = {
            o: np.where(np.isfinite(results[o] + before[o]), rng.standard_normal(results[o].shape), 0.0)
            for o in test.outputs
        }
        got = prepared.run(point | {seeds_of[o]: v for o, v in cotangents.items()})
        for name in sorted(open_):
            ties = test.operator in _TIED
            settled, complaints[name] = _judge(forward, point, name, got[names[name]], cotangents, rng, ties)
            if settled:
                open_.discard(name)
        if not open_:
            break
    return [f"{name}: {complaint}" for name, complaint in complaints.items() if complaint]


def _judge(
    forward: Prepared,
    point: Mapping[str, Any],
    name: str,
    gradient: np.ndarray,
    cotangents: Mapping[str, np.ndarray],
    rng: np.random.Generator,
    ties: bool,
) -> tuple[bool, str]:
    """Whether the differences settle at this point, and what is wrong with the gradient there: "" for nothing."""
    x = point[name]
    if gradient.shape != x.shape:
        return True, f"shape {gradient.shape}, the input has {x.shape}"
    if not np.all(np.isfinite(gradient)):
        return True, "not finite"
    direction = np.where(np.isfinite(x), rng.standard_normal(x.shape), 0.0)
    if ties:
        direction = tied(x, direction)
    got = float(np.sum(gradient * direction))
    best: Difference | None = None
    for step in _STEPS:
        found = directional(forward.run, point, {name: direction}, cotangents, step)
        if best is None or found.error < best.error:
            best = found
    assert best is not None
    size = max(float(np.linalg.norm(gradient)), abs(best.value))
    if not best.error <= _SETTLED * max(size, 1e-5 * best.scale, 1e-12):
        return False, f"differences do not settle: {best} against {got}"
    if not abs(got - best.value) <= TOLERANCE * size + best.error:
        return True, f"{got:.9g} along a direction, differences give {best.value:.9g} ± {best.error:.1g}"
    return True, ""


def _shifted(feeds: dict[str, Any], wrt: tuple[str, ...], shift: float, rng: np.random.Generator) -> dict[str, Any]:
    moved = dict(feeds)
    for name in wrt:
        x = feeds[name]
        moved[name] = np.where(
            np.isfinite(x),
            x * (1 + shift * rng.standard_normal(x.shape))
            + np.where(x == 0, 1.0, 0.1) * shift * rng.standard_normal(x.shape),
            x,
        )
    return moved


def _as_finite(results: Mapping[str, Any], before: Mapping[str, Any], outputs: tuple[str, ...]) -> bool:
    """Whether the shift left the domain of the operator."""
    return all(
        results[o].shape == before[o].shape and not np.any(np.isfinite(before[o]) & ~np.isfinite(results[o]))
        for o in outputs
    )
