"""The point of a check of a gradient: the feeds, the model in float64 there, its gradient, and how rounding moves it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from refgrad.backends.base import Backend, Prepared, Value, describe, graph_inputs
from refgrad.backends.numpy import NumpyBackend
from refgrad.backends.numpy.backend import NumpyModel
from refgrad.conformance.problems.feeds import widened
from refgrad.conformance.problems.fitting import fitting_feeds
from refgrad.conformance.problems.ranges import OVERFLOW, OutOfRange, leaving
from refgrad.conformance.problems.rounding import DRAWS, Confined, Drawn, Perturbed, limits
from refgrad.conformance.problems.visible import visible
from refgrad.errors import BackendError, FeedError, choices
from refgrad.model.external import array_of, dtype_of
from refgrad.model.normalise import normalise
from refgrad.model.reading import skeleton_of
from refgrad.protos.traverse import subgraphs
from refgrad.protos.types import FLOATS
from refgrad.reverse.assembly import names_in
from refgrad.tables.randomness import ALWAYS, IN_TRAINING, operator_of

_ROUNDINGS = 16  # how many roundings of the result each node may cost
_NARROWER = 50  # bits: a rounding that can be told from float64
_STASHING = {"GroupNormalization", "LayerNormalization", "RMSNormalization"}  # compute in `stash_type`
_BESIDE = 1e-2  # relative to the size of an input: how far the neighbour of a point is


@dataclass
class Point:
    """The point of a check: the feeds and cotangents in the model's types and in float64, and the model there."""

    model: ModelProto
    forward: NumpyModel
    names: dict[str, str]  # wrt: its gradient's name
    seeds_of: dict[str, str]  # output: its cotangent's name
    feeds: dict[str, Any]
    cotangents: dict[str, np.ndarray]  # by the cotangent's name, in the model's types
    wide: dict[str, Any]
    described: str

    @classmethod
    def choose(
        cls,
        model: ModelProto,
        gradient: ModelProto,
        feeds: Mapping[str, Any] | None,
        seed: int,
        size: int,
        sizes: Mapping[str, int] | None,
        executors: Iterable[Backend] = (),
    ) -> Point:
        """Take the given feeds, or the first random ones at which every output is finite, and the executors run the model.

        At sizes that a model is not made for, its operators may happen to broadcast, and an executor may refuse it. Where
        rounding hides most gradients, smaller feeds are tried: a classifier may be sure of its answer.
        """
        seeds_of, names = names_in(gradient)
        weights = {t.name: array_of(t).astype(np.float64) for t in model.graph.initializer if t.name in names}
        prepared = in_float64(fed_alone(model, weights))
        inputs = graph_inputs(model.graph)
        undeclared = [v.name for v in inputs if v.dtype is not None and v.shape is None and not v.has_default]
        if feeds is None and undeclared:
            raise FeedError(
                f"Input {undeclared[0]!r} declares no shape, so that its value cannot be drawn at random: feed it "
                "with feeds={...}."
            )
        if feeds is not None:
            fed = dict(feeds)
            results, described = prepared.run(weights | widened(fed), seeds_of), "your own"
        else:
            others = _prepared(executors, model)
            fed, described, (results, _) = fitting_feeds(
                model,
                lambda drawn: (prepared.run(weights | widened(drawn), seeds_of), _all_run(others, drawn)),
                lambda ran: ran[1] and all(np.all(np.isfinite(value)) for value in ran[0].values()),
                seed=seed,
                size=size,
                sizes=sizes,
            )
            described = f"random ({described})"
        _require_finite(results, described)
        rng = np.random.default_rng([seed, 0])
        declared = {value.name: describe(value).dtype for value in gradient.graph.input}
        cotangents = {}
        for output, seed_name in seeds_of.items():
            if not isinstance(results[output], np.ndarray):
                raise FeedError(
                    f"The output {output!r} is a sequence or an optional, for which no cotangent is drawn. Give outputs that "
                    "are tensors, or a part of the model that ends in some: refgrad.select_model_inputs_outputs."
                )
            cotangent = np.asarray(rng.standard_normal(results[output].shape))
            cotangents[seed_name] = cotangent.astype(declared[seed_name] or np.float32)
        if feeds is None:
            smaller, scale = visible(gradient, names.values(), fed, cotangents)
            if (
                scale != 1
                and _results_alike(prepared, weights | widened(smaller), results)
                and _all_run(others, smaller)
            ):
                fed, described = smaller, f"{described[:-1]}, times {scale:g})"
        return cls(model, prepared, names, seeds_of, fed, cotangents, weights | widened(fed), described)

    def named_by(self, gradient: ModelProto) -> Point:
        """The same point by the names that another gradient of the model has for cotangents and gradients."""
        seeds_of, names = names_in(gradient)
        if (seeds_of, names) == (self.seeds_of, self.names):
            return self
        cotangents = {seeds_of[output]: self.cotangents[seed] for output, seed in self.seeds_of.items()}
        return replace(self, names=names, seeds_of=seeds_of, cotangents=cotangents)

    @property
    def seeds(self) -> dict[str, np.ndarray]:
        """The cotangents in float64, by their own names."""
        return widened(self.cotangents)

    @property
    def cotangent_of(self) -> dict[str, np.ndarray]:
        """The cotangents in float64, by the outputs that they belong to."""
        wide = self.seeds
        return {output: wide[name] for output, name in self.seeds_of.items()}

    @cached_property
    def draws(self) -> tuple[str, ...]:
        """The operators of the model that draw random numbers: no two executors draw the same."""
        graph = normalise(self.model)

        def draw(nodes: Iterable[NodeProto]) -> Iterator[str]:
            for node in nodes:
                operator = operator_of(node)
                place = IN_TRAINING.get(operator, len(node.input))
                if operator in ALWAYS:
                    yield node.op_type
                elif place < len(node.input) and node.input[place]:
                    training = graph.constant(node.input[place])
                    if training is None or training.any():
                        yield node.op_type
                for attribute in node.attribute:
                    for inner in subgraphs(attribute):
                        yield from draw(inner.node)

        return tuple(dict.fromkeys(draw(node.proto for node in graph.nodes)))

    @cached_property
    def epsilon(self) -> float:
        """The coarsest rounding among the float types of the model's values, and those that normalizations compute in."""
        return coarsest(self.model)

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type of an input or initializer."""
        if name in self.feeds:
            return np.asarray(self.feeds[name]).dtype
        tensor = next(t for t in self.model.graph.initializer if t.name == name)
        return dtype_of(tensor)

    def beside(self, names: Iterable[str], rng: np.random.Generator) -> Point:
        """A point near this one, further away than differences step. The inputs `names` differ: another may be an exponent."""
        moved = {
            name: self.wide[name] + rng.standard_normal(self.wide[name].shape) * _BESIDE * (rms(self.wide[name]) or 1)
            for name in names
        }
        return replace(self, wide=self.wide | moved)

    def evaluate(self, moved: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The differentiated outputs at another point; one whose shape changes on the way has no derivative there."""
        results = self.forward.run(moved, self.seeds_of)
        for output, value in self.cotangent_of.items():
            if results[output].shape != value.shape:
                raise ShapeMovedError(f"the shape of {output!r} changes along this direction")
        return results


def _results_alike(prepared: NumpyModel, feeds: Mapping[str, Any], results: Mapping[str, np.ndarray]) -> bool:
    """True if the model runs on other feeds, with finite results of the same shapes."""
    try:
        found = prepared.run(feeds, results)
    except BackendError:
        return False
    return all(np.shape(found[n]) == value.shape and np.all(np.isfinite(found[n])) for n, value in results.items())


def _prepared(executors: Iterable[Backend], model: ModelProto) -> list[Prepared]:
    """The model on each of the executors that take it."""
    found = []
    for executor in executors:
        with suppress(BackendError):
            found.append(executor.prepare(model))
    return found


def _all_run(prepared: Iterable[Prepared], feeds: Mapping[str, Any]) -> bool:
    try:
        for one in prepared:
            one.run(feeds)
    except BackendError:
        return False
    return True


@dataclass
class Truth:
    """The gradients in float64, and how far rounding moves them.

    Elements in `kinked` are left out: each is 0 in `gradients`, and nothing moves it.
    """

    point: Point
    model: ModelProto
    gradients: Mapping[str, np.ndarray]
    bits: int = 24
    kinked: Mapping[str, np.ndarray] = field(default_factory=dict)
    _moved: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    _spread: dict[int, Drawn] = field(default_factory=dict)
    _apart: Drawn | None = None

    def __post_init__(self) -> None:
        self.bits = 1 - round(np.log2(self.point.epsilon))

    @cached_property
    def _types(self) -> dict[str, np.dtype[Any]]:
        """The float types that the gradient model declares, by the value."""
        types = normalise(self.model).types
        return {name: helper.tensor_dtype_to_np_dtype(kind) for name, kind in types.items() if kind in FLOATS}

    @cached_property
    def out_of_range(self) -> str:
        """A text about an intermediate result that overflows its type, or underflows it in every element; "" if none does."""
        return next((one.brief for one in self._leaving if one.kind == OVERFLOW or one.is_all), "")

    @cached_property
    def element_out_of_range(self) -> str:
        """A text about an intermediate result with an element that overflows or underflows its type; "" if none has."""
        return next((one.brief for one in self._leaving), "")

    @cached_property
    def _leaving(self) -> tuple[OutOfRange, ...]:
        return tuple(leaving(self.model, self.point.wide | self.point.seeds))

    def confined(self, name: str) -> list[np.ndarray]:
        """The gradient of `name` where each intermediate result stays within the range of its type.

        Small numbers become 0 in one of the arrays, and lose digits gradually in the other: executors do either.
        """
        found = [gradients[name] for gradients in self._confined]
        return [self.rest(name, x) if x.shape == self.gradients[name].shape else x for x in found]

    @cached_property
    def _confined(self) -> list[dict[str, np.ndarray]]:
        ranges = {value: limits(kind) for value, kind in self._types.items()}
        feeds = self.point.wide | self.point.seeds
        prepared = (
            NumpyBackend().prepare(self.model, precision=Confined(ranges, gradual)) for gradual in (True, False)
        )
        return [by_name(one.run(feeds), self.point.names) for one in prepared]

    def moved(self, name: str, bits: int) -> np.ndarray:
        """By how much the gradient of `name` changes when every intermediate result is rounded to `bits` bits."""
        if bits not in self._moved:
            try:
                feeds = self.point.wide | self.point.seeds
                prepared = NumpyBackend().prepare(fed_alone(self.model, feeds), precision="float64", bits=max(bits, 2))
                rounded = by_name(prepared.run(feeds), self.point.names)
            except BackendError:
                rounded = {}
            with np.errstate(invalid="ignore", over="ignore"):  # where both are infinite
                self._moved[bits] = {
                    name: self.rest(name, (rounded[name] - value).astype(np.float32))
                    if name in rounded and rounded[name].shape == value.shape
                    else np.full(value.shape, np.inf, np.float32)
                    for name, value in self.gradients.items()
                }
        return self._moved[bits][name].astype(np.float64)

    def spread(self, name: str, bits: int, draws: int = DRAWS) -> np.ndarray:
        """How far each element of the gradient of `name` is off, as the root of the mean square over so many roundings.

        Each draw rounds every intermediate result to `bits` bits by chance (see `rounding.Perturbed`).
        """
        if bits not in self._spread:
            self._spread[bits] = self._drawn(bits)
        drawn = self._spread[bits]
        drawn.until(draws)
        return self.rest(name, drawn.spread(name))

    def spread_apart(self, name: str, bits: int, draws: int = DRAWS) -> np.ndarray:
        """As `spread`, where every node of the backward pass rounds for itself.

        The forward pass rounds equal values equally, so that ties stay ties.
        """
        if self._apart is None:
            forward = {output for node in self.point.model.graph.node for output in node.output}
            self._apart = self._drawn(bits, forward)
        self._apart.until(draws)
        return self.rest(name, self._apart.spread(name))

    def rest(self, name: str, array: np.ndarray) -> np.ndarray:
        """An array of the shape of `name` with 0 for its elements at a kink."""
        return without(array, self.kinked.get(name))

    def _drawn(self, bits: int, rounded_equally: Set[str] | None = None) -> Drawn:
        feeds = self.point.wide | self.point.seeds
        model = fed_alone(self.model, feeds)
        return Drawn(model, feeds, self.point.names, self.gradients, max(bits, 2), rounded_equally)

    @cached_property
    def noise(self) -> float:
        """How far rounding in float64 moves Σ <cotangent, output>, as the root of the mean square over `DRAWS` roundings."""
        point, cotangents = self.point, self.point.cotangent_of
        precision = Perturbed(_NARROWER)
        try:
            prepared = NumpyBackend().prepare(with_defaults(point.model, point.names), precision=precision)
            exact = point.evaluate(point.wide)
            squares = []
            for precision.draw in range(DRAWS):
                drawn = prepared.run(point.wide, point.seeds_of)
                squares.append(
                    sum(float(np.sum(v * (drawn[name] - exact[name]))) for name, v in cotangents.items()) ** 2
                )
        except (BackendError, ShapeMovedError, ValueError):
            return 0.0
        noise = float(np.sqrt(np.mean(squares))) * 2.0 ** (_NARROWER - 53)
        return noise if np.isfinite(noise) else 0.0


def without(array: np.ndarray, places: np.ndarray | None) -> np.ndarray:
    """A copy of the array with 0 in some places; the array itself where there are none."""
    if places is None:
        return array
    copy = np.array(array)
    copy[places] = 0
    return copy


class ShapeMovedError(Exception):
    """Differences cannot be taken."""


def _require_finite(results: Mapping[str, np.ndarray], described: str) -> None:
    bad = [name for name, value in results.items() if not np.all(np.isfinite(value))]
    if bad:
        raise FeedError(
            f"The outputs {choices(bad)} are not finite in float64, so they have no derivative at these feeds: {described}. "
            "Give feeds inside the model's domain: feeds={...}."
        )


def in_float64(model: ModelProto, names: Collection[str] = ()) -> NumpyModel:
    """The model on the interpreter in float64, the initializers among `names` as inputs too.

    :raises RefgradError: the interpreter does not know it.
    """
    return NumpyBackend().prepare(with_defaults(model, names), precision="float64")


def fed_alone(model: ModelProto, feeds: Collection[str]) -> ModelProto:
    """The model whose initializers among `feeds` are inputs and nothing else: an interpreter does not hold them twice."""
    fed = {t.name: t for t in model.graph.initializer if t.name in feeds}
    return skeleton_of(model, fed) if fed else model


def with_defaults(model: ModelProto, names: Collection[str]) -> ModelProto:
    """The model with the initializers among `names` as inputs too, so that they can be moved."""
    listed = {value.name for value in model.graph.input}
    tensors = [t for t in model.graph.initializer if t.name in names and t.name not in listed]
    if not tensors:
        return model
    model_with_defaults = ModelProto()
    model_with_defaults.CopyFrom(model)
    model_with_defaults.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in tensors
    )
    return model_with_defaults


def inputs_of(model: ModelProto) -> tuple[Value, ...]:
    """The values that may be fed to a check: the inputs, and the initializers."""
    inputs = graph_inputs(model.graph)
    listed = {value.name for value in inputs}
    return inputs + tuple(
        Value(t.name, dtype_of(t), tuple(t.dims), has_default=True)
        for t in model.graph.initializer
        if t.name not in listed
    )


def with_values(model: ModelProto, feeds: Mapping[str, Any]) -> tuple[ModelProto, dict[str, Any]]:
    """The model with the feeds of its initializers in their place, and the feeds that are left."""
    inputs = {value.name for value in model.graph.input}
    moved = {name: value for name, value in feeds.items() if name not in inputs}
    if not moved:
        return model, dict(feeds)
    changed = ModelProto()
    changed.CopyFrom(model)
    for tensor in changed.graph.initializer:
        if tensor.name in moved:
            tensor.CopyFrom(numpy_helper.from_array(moved[tensor.name], tensor.name))
    return changed, {name: value for name, value in feeds.items() if name in inputs}


def with_computed_sizes(gradient: ModelProto, point: Point) -> ModelProto:
    """The gradient; a cotangent's size that the model declares, and contradicts at the point, is unknown."""
    named = point.named_by(gradient)
    return without_wrong_sizes(gradient, {**named.feeds, **named.cotangents}, named.cotangents)


def without_wrong_sizes(model: ModelProto, arrays: Mapping[str, Any], among: Collection[str]) -> ModelProto:
    """The model; a declared size that arrays contradict is unknown, of the inputs and outputs `among` its own.

    Exporters write such sizes: an output of 2 elements is declared to have as many as there are samples.

    :param arrays: by the names of inputs and outputs.
    """
    sizes: dict[str, int] = {}
    wrong = []
    values = [("input", at, value) for at, value in enumerate(model.graph.input)]
    values += [("output", at, value) for at, value in enumerate(model.graph.output)]
    for kind, at, value in sorted(values, key=lambda one: one[2].name in among):
        dims = value.type.tensor_type.shape.dim
        for axis, (dim, size) in enumerate(zip(dims, np.shape(arrays.get(value.name, 0)), strict=False)):
            expected = sizes.setdefault(dim.dim_param, size) if dim.dim_param else dim.dim_value or size
            if size != expected and value.name in among:
                wrong.append((kind, at, axis))
    if not wrong:
        return model
    changed = ModelProto()
    changed.CopyFrom(model)
    for kind, at, axis in wrong:
        getattr(changed.graph, kind)[at].type.tensor_type.shape.dim[axis].Clear()
    return changed


def by_name(results: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The gradients in `results` by what they are gradients of."""
    return {name: np.asarray(results[gradient]) for name, gradient in names.items()}


def coarsest(model: ModelProto) -> float:
    """The coarsest rounding among the float types of the model's values, and among the types that normalizations compute in."""
    graph = normalise(model)
    types = set(graph.types.values())
    for node in graph.nodes:
        if node.op_type in _STASHING:
            types.add(node.attributes.get("stash_type", TensorProto.FLOAT))
    types &= FLOATS
    return max((limits(helper.tensor_dtype_to_np_dtype(kind))[0] for kind in types), default=1.2e-7)


def rounding(nodes: int, model: ModelProto | Point) -> float:
    """The relative error that the roundings of a gradient of `model`, of so many nodes, explain: they add up like √n."""
    epsilon = model.epsilon if isinstance(model, Point) else coarsest(model)
    return float(_ROUNDINGS * epsilon * np.sqrt(max(nodes, 1)))


def largest(array: np.ndarray) -> float:
    """The largest magnitude of an element, 0 where there is none."""
    return float(np.max(np.abs(array), initial=0.0))


def rms(array: np.ndarray) -> float:
    """The root of the mean square: the size of one element. One that is infinite or missing has none."""
    finite = array[np.isfinite(array)]
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
