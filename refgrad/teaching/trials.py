"""An answer at a point: what its gradient is there, what the suite's oracles say, and what the right one is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

import refgrad
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance import verdicts
from refgrad.conformance.case import NODE, Case, node_case
from refgrad.conformance.judge.judge import Candidate, judge
from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.judge.running.runner import ORACLES, observe
from refgrad.conformance.oracles import Built, Observation
from refgrad.conformance.oracles.complex_step import Tangent
from refgrad.conformance.problems.problem import Problem, ask
from refgrad.notices import quiet
from refgrad.teaching.chapter import DOMAIN, Chapter, ExercisePoint

_OPSET = 22
_IR = 10
_CLOSE = 1e-4  # of the largest element: what float32 explains of these few operations
_NOTHING = 1e-6  # what rounding leaves of 0, where inputs are of the size of 1
Gradients = Mapping[str, np.ndarray]


@dataclass
class AnswerTrial:
    """A point, and how its tensors are declared: `shapes` is "static", "symbolic" or "unknown", `kind` a float type."""

    chapter: Chapter
    point: ExercisePoint
    shapes: str = "static"
    kind: str = "float32"
    random: bool = False

    @property
    def what(self) -> str:
        """The words that tell the trial from the plain ones; "" for a plain one."""
        sizes = {"static": "", "symbolic": "sizes are symbols", "unknown": "not even the ranks are known"}[self.shapes]
        kind = "" if self.kind == "float32" else f"the elements are {self.kind}"
        return " and ".join(filter(None, (sizes, kind)))

    @cached_property
    def case(self) -> Case:
        """The case of the suite: a model of one node, and what to feed it."""
        chapter = self.chapter
        inputs = {n: x.astype(self.kind) if n in chapter.floats else x for n, x in self.point.inputs.items()}
        if self.shapes == "unknown":
            options = {"domain": DOMAIN, "opset": 1, "shapes": "unknown", **self.point.attributes}
            return node_case(chapter.operator, *inputs.values(), **options)
        return Case("course", self._model(inputs), inputs, chapter.floats, (chapter.output,))

    @cached_property
    def problem(self) -> Problem:
        """The problem that the suite asks, with the cotangent of the point."""
        made = ask(self.case)
        if self.random:
            return made
        [output] = made.cotangents
        given = self.point.cotangent.astype(self.kind).reshape(made.cotangents[output].shape)
        return replace(made, cotangents={output: given})

    def _model(self, inputs: Mapping[str, np.ndarray]) -> ModelProto:
        def declared(name: str, kind: int, shape: tuple[int, ...]) -> Any:
            dims = list(shape) if self.shapes == "static" else [f"{name}_{axis}" for axis in range(len(shape))]
            return helper.make_tensor_value_info(name, kind, dims)

        chapter, kind = self.chapter, helper.np_dtype_to_tensor_dtype(np.dtype(self.kind))
        values = [declared(n, kind if n in chapter.floats else TensorProto.BOOL, x.shape) for n, x in inputs.items()]
        result = declared(chapter.output, kind, self.point.cotangent.shape)
        node = helper.make_node(
            chapter.operator, list(inputs), [chapter.output], name=NODE, domain=DOMAIN, **self.point.attributes
        )
        graph = helper.make_graph([node], chapter.operator, values, [result])
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR)

    @cached_property
    def built(self) -> Built:
        """The gradient model that the rule makes.

        :raises RefgradError: refgrad does not take the rule.
        """
        with quiet():
            model = refgrad.gradient(self.problem.model, self.problem.wrt, list(self.problem.cotangents))
        return Built.of(model)

    def gradients(self) -> Gradients:
        """The results of the gradient model on the interpreter, by input; zeros where the rule returns None.

        :raises RefgradError: refgrad does not take the rule, or the interpreter does not run the model.
        """
        problem, built = self.problem, self.built
        results = NumpyBackend().prepare(built.model).run(built.feeds(problem.feeds, problem.cotangents))
        named = built.named(results)
        return {name: named.get(name, np.zeros_like(problem.feeds[name])) for name in problem.wrt}

    @cached_property
    def observations(self) -> tuple[Observation, ...]:
        """The observations of the oracles on the problem."""
        return tuple(said for oracle in ORACLES for said in observe(oracle, self.problem))

    def verdict(self, gradients: Gradients) -> ResultRow:
        """The verdict of the suite's judge on the gradients."""
        candidate = Candidate("answer", "numpy", len(self.built.model.graph.node), gradients)
        [row] = judge(self.problem, self.observations, [candidate])
        return row

    def is_right(self, gradients: Gradients) -> tuple[bool, tuple[str, ...]]:
        """True if the gradients are right, and the oracles that say so."""
        if any(gradients[name].dtype != self.kind for name in self.problem.wrt):
            return False, ()
        row = self.verdict(gradients)
        if row.verdict == verdicts.UNDECIDED:  # the elements are few enough to look at each
            return all(close(gradients[name], right) for name, right in self.expected.items()), ()
        return row.verdict == verdicts.RIGHT, row.witnesses

    @cached_property
    def expected(self) -> dict[str, np.ndarray]:
        """The right gradient in float64, by complex steps along one element after the other."""
        return self.by_steps(self.problem.wide_cotangents)

    @cached_property
    def without_cotangent(self) -> dict[str, np.ndarray]:
        """The gradient for a cotangent of 1 everywhere."""
        return self.by_steps({name: np.ones_like(v) for name, v in self.problem.wide_cotangents.items()})

    def by_steps(self, cotangents: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The gradient for other cotangents, by complex steps."""
        tangent, made = Tangent(self.problem), {}
        for name in self.problem.wrt:
            gradient = np.zeros(self.problem.at[name].shape)
            for place in np.ndindex(gradient.shape):
                unit = np.zeros(gradient.shape)
                unit[place] = 1
                moved = tangent.along({name: unit})
                gradient[place] = sum(float(np.sum(v * moved[output])) for output, v in cotangents.items())
            made[name] = gradient
        return made


def close(got: np.ndarray, wanted: Any) -> bool:
    """True if two arrays of one shape are equal up to rounding in float32; NaN is like NaN."""
    wanted = np.asarray(wanted)
    if got.shape != wanted.shape:
        return False
    finite = np.abs(wanted[np.isfinite(wanted)])
    slack = _CLOSE * float(finite.max(initial=0.0)) + _NOTHING
    return bool(np.allclose(got, wanted, rtol=0, atol=slack, equal_nan=True))


def plain(chapter: Chapter) -> list[AnswerTrial]:
    """The trials at the points of the chapter that are no ties, the smallest first."""
    return [AnswerTrial(chapter, point) for point in chapter.points if not point.together]


def further(chapter: Chapter) -> Iterator[AnswerTrial]:
    """Trials with random numbers in both float types, where sizes are numbers, symbols or unknown; and of size 0."""
    points = [point for point in chapter.points if not point.together]
    largest = max(points, key=lambda point: point.size)
    rng = np.random.default_rng(chapter.number)
    for kind in ("float32", "float64"):
        for shapes in ("static", "symbolic", "unknown"):
            drawn = {
                n: np.asarray(rng.standard_normal(x.shape), np.float32) if n in chapter.floats else x
                for n, x in largest.inputs.items()
            }
            yield AnswerTrial(chapter, replace(largest, inputs=drawn), shapes, kind, random=True)
    for point in points:
        if point.is_empty:
            yield AnswerTrial(chapter, point, "symbolic", "float64")
