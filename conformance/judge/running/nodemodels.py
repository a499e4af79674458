"""The models of onnx's own node tests: the gradient of each, against central differences in float64.

Each is differentiated as it is, where axes, starts and indices are inputs that only the run knows, and once more with
everything that is not differentiated folded into constants. Sequences and contents of optionals are judged tensor by tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

import refgrad
from refgrad import traits
from refgrad.backends import get_backend
from refgrad.conformance.oracles.central import FiniteDifference, Function, directional
from refgrad.conformance.oracles.differences import tied
from refgrad.conformance.problems.feeds import widened
from refgrad.conformance.problems.point import in_float64
from refgrad.model.external import array_of
from refgrad.model.normalise import normalise
from refgrad.notices import quiet
from refgrad.protos.traverse import subgraphs
from refgrad.protos.types import FLOATS
from refgrad.reverse.assembly import names_in
from refgrad.reverse.path import find_requested_path
from refgrad.tables.registry import NO_DERIVATIVE

TOLERANCE = 1e-4  # of a directional derivative, relative to the size of the gradient
_SETTLED = 1e-5  # the error of differences that tell right from wrong, relative likewise
_STEPS = (1e-5, 1e-3)  # the first rarely meets a kink, the second resolves a small derivative of a large value
_SHIFTS = (1e-2, 3e-2, 1e-3, 1e-4, 0.0)  # away from the kinks that the tests' round numbers lie on

# Inputs that are not differentiated: (operator, input of its schema) and the reason.
FIXED = {
    ("Resize", "scales"): "the tests' scales times the sizes are whole: there the size of the result jumps",
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
            fixed.update(name for name, called in inputs_of(node).items() if (node.op_type, called) in FIXED)
        return tuple(v.name for v in self.model.graph.input if _is_float(v) and v.name not in fixed)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The float outputs."""
        return tuple(v.name for v in self.model.graph.output if _is_float(v))

    @property
    def structured(self) -> bool:
        """True if it has graphs within its nodes, a recurrence, sequences or optionals."""
        nodes = self.model.graph.node
        within = any(any(subgraphs(attribute)) for node in nodes for attribute in node.attribute)
        return within or not self.of_tensors or any(node.op_type in traits.RECURRENT for node in nodes)

    @property
    def tolerance(self) -> float:
        """The allowed error of a result in the model's own types, relative to its norm: `TOLERANCE`, or their largest eps."""
        kinds = {_element_type(v.type) for v in (*self.model.graph.input, *self.model.graph.output)}
        finfo: Any = ml_dtypes.finfo
        steps = (float(finfo(helper.tensor_dtype_to_np_dtype(kind)).eps) for kind in kinds & set(FLOATS))
        return max((TOLERANCE, *steps))

    @property
    def of_tensors(self) -> bool:
        """True if every input and output is a tensor: neither a sequence nor an optional."""
        graph = self.model.graph
        return all(value.type.HasField("tensor_type") for value in (*graph.input, *graph.output))

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


def inputs_of(node: Any) -> dict[str, str]:
    """The inputs of a node by what its operator's schema calls them."""
    if not onnx.defs.has(node.op_type, node.domain):
        return {}
    formal = onnx.defs.get_schema(node.op_type, node.domain).inputs
    return {name: formal[min(k, len(formal) - 1)].name for k, name in enumerate(node.input) if name and formal}


def _is_float(value: ValueInfoProto) -> bool:
    return _element_type(value.type) in FLOATS


def _element_type(kind: TypeProto) -> int:
    """The element type of a tensor, or of the tensors in a sequence or an optional."""
    match kind.WhichOneof("value"):
        case "sequence_type":
            return _element_type(kind.sequence_type.elem_type)
        case "optional_type":
            return _element_type(kind.optional_type.elem_type)
    return kind.tensor_type.elem_type


@cache
def node_models() -> tuple[NodeModel, ...]:
    """Every node test with a float input and a float output, as onnx generates them."""
    from onnx.backend.test import loader  # only here: it takes longer than all of refgrad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = loader.load_model_tests(kind="node")
    models = []
    for test in tests:
        if test.model is None or not test.data_sets:
            continue
        inputs = test.data_sets[0][0]
        feeds = {v.name: as_array(x) for v, x in zip(test.model.graph.input, inputs, strict=False)}
        operator = test.model.graph.node[0].op_type
        model = NodeModel(test.name, operator, test.model, feeds)
        if model.outputs and any(_is_float(v) for v in test.model.graph.input):
            models.append(model)
    return tuple(models)


def moved(test: NodeModel) -> tuple[list[str], list[str]]:
    """The float inputs that an output depends on, and those by which the gradient is zero."""
    path = find_requested_path(normalise(test.model), test.wrt, test.outputs)[2]
    needed = [name for name in test.wrt if name in path.needed]
    return needed, [name for name in test.wrt if name not in path.needed]


def as_array(feed: Any) -> Any:
    """A tensor or a NumPy scalar as an array, also in a sequence; anything else as it is."""
    if isinstance(feed, list):
        return [as_array(element) for element in feed]
    if isinstance(feed, TensorProto):
        return array_of(feed)
    return np.asarray(feed) if isinstance(feed, np.generic) else feed


def excluded(test: NodeModel) -> str | None:
    """Why a test is not judged; None where it is."""
    for node in test.model.graph.node:
        key = node.domain, node.op_type
        if key in NO_DERIVATIVE:
            return f"{node.op_type} {NO_DERIVATIVE[key]}"
    if not test.wrt:
        return "; ".join(
            sorted(
                {
                    FIXED[node.op_type, n]
                    for node in test.model.graph.node
                    for n in inputs_of(node).values()
                    if (node.op_type, n) in FIXED
                }
            )
        )
    return None


def wrong(test: NodeModel, dialect: str = "onnx", **options: Any) -> list[str]:
    """Describe the error in the gradient of a node test; return "" where it is right.

    :raises RefgradError: the gradient cannot be built or run.
    """
    prepared_forward = in_float64(test.model)
    with quiet():
        gradient = refgrad.gradient(test.model, wrt=test.wrt, outputs=test.outputs, dialect=dialect, **options)
    seeds_of, names = names_in(gradient)
    prepared = in_float64(gradient)
    feeds = widened(test.feeds)

    def forward(point: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return tensors(prepared_forward.run(_with(feeds, point)))

    wrt = tuple(tensors({name: feeds[name] for name in test.wrt}))
    complaints = dict.fromkeys(wrt, "no finite point")
    open_ = set(wrt)
    before = forward(tensors(feeds))
    for attempt, shift in enumerate(_SHIFTS):
        rng = np.random.default_rng((attempt, 7))
        point = _shifted(tensors(feeds), wrt, shift, rng)
        results = prepared_forward.run(_with(feeds, point))
        after = tensors({name: results[name] for name in test.outputs})
        if shift and not _as_finite(after, before):
            continue
        cotangents = {
            o: np.where(np.isfinite(value + before[o]), rng.standard_normal(value.shape), 0.0)
            for o, value in after.items()
        }
        seeds = {seeds_of[o]: value for o, value in _with(results, cotangents).items() if o in seeds_of}
        got = prepared.run(_with(feeds, point) | seeds)
        gradients = tensors({name: got[gradient_name] for name, gradient_name in names.items()})
        if gradients.keys() != set(wrt):
            return [f"there are gradients of {sorted(gradients)}, and there are inputs {sorted(wrt)}"]
        for name in sorted(open_):
            ties = test.operator in _TIED
            settled, complaints[name] = _judge(forward, point, name, gradients[name], cotangents, rng, ties)
            if settled:
                open_.discard(name)
        if not open_:
            break
    return [f"{name}: {complaint}" for name, complaint in complaints.items() if complaint]


def tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors among values, those in sequences numbered: "x[0]". Where an optional is empty there is none."""
    arrays: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list):
            arrays |= tensors({f"{name}[{k}]": element for k, element in enumerate(value)})
        elif value is not None:
            arrays[name] = value
    return arrays


def _with(values: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The values with other tensors in the places that `tensors` names."""

    def one(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [one(f"{name}[{k}]", element) for k, element in enumerate(value)]
        return changed.get(name, value)

    return {name: one(name, value) for name, value in values.items()}


def relative_error(test: NodeModel, backend: str) -> float:
    """How far the gradient that an executor computes in the model's own types is from that in float64: relative to its norm.

    :raises RefgradError: the gradient cannot be built or run.
    """
    with quiet():
        gradient = refgrad.gradient(test.model, wrt=test.wrt, outputs=test.outputs)
    seeds_of, names = names_in(gradient)
    results = in_float64(test.model).run(widened(test.feeds))
    rng = np.random.default_rng(7)
    cotangents = {o: rng.standard_normal(v.shape) for o, v in tensors({o: results[o] for o in test.outputs}).items()}
    seeds = {seeds_of[o]: value for o, value in _with(results, cotangents).items() if o in seeds_of}
    declared = {v.name: _element_type(v.type) for v in gradient.graph.input}
    seeds = {name: _cast(value, helper.tensor_dtype_to_np_dtype(declared[name])) for name, value in seeds.items()}
    wanted, got = (
        tensors({name: computed[gradient_name] for name, gradient_name in names.items()})
        for computed in (
            in_float64(gradient).run(widened(dict(test.feeds) | seeds)),
            get_backend(backend).prepare(gradient).run(dict(test.feeds) | seeds),
        )
    )
    if got.keys() != wanted.keys():
        return float("inf")
    size = max((float(np.linalg.norm(value)) for value in wanted.values()), default=0.0)
    error = max((float(np.linalg.norm(got[name] - value)) for name, value in wanted.items()), default=0.0)
    return error / max(size, 1.0)


def _cast(value: Any, kind: np.dtype[Any]) -> Any:
    """A tensor, or every tensor in a sequence, in another type; an empty optional as it is."""
    if isinstance(value, list):
        return [_cast(element, kind) for element in value]
    return None if value is None else value.astype(kind)


def _judge(
    forward: Function,
    point: Mapping[str, Any],
    name: str,
    gradient: np.ndarray,
    cotangents: Mapping[str, np.ndarray],
    rng: np.random.Generator,
    ties: bool,
) -> tuple[bool, str]:
    """True if the differences settle at this point, and the error in the gradient there, or ""."""
    x = point[name]
    if gradient.shape != x.shape:
        return True, f"shape {gradient.shape}, the input has {x.shape}"
    if not np.all(np.isfinite(gradient)):
        return True, "not finite"
    direction = np.where(np.isfinite(x), rng.standard_normal(x.shape), 0.0)
    if ties:
        direction = tied(x, direction)
    got = float(np.sum(gradient * direction))
    best: FiniteDifference | None = None
    for step in _STEPS:
        difference = directional(forward, point, {name: direction}, cotangents, step)
        if best is None or difference.error < best.error:
            best = difference
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


def _as_finite(results: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """True if the shift stayed in the domain of the operator."""
    return all(
        o in before and value.shape == before[o].shape and not np.any(np.isfinite(before[o]) & ~np.isfinite(value))
        for o, value in results.items()
    )
