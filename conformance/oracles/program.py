"""The model of a problem on onnx.reference in float64: the program that oracles run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from refgrad.conformance.case import qualified
from refgrad.conformance.oracles.evaluator import Call, Evaluator, execute, initializers
from refgrad.conformance.problems.point import ShapeMovedError, in_float64, largest, with_defaults
from refgrad.conformance.problems.problem import Problem
from refgrad.model.inference.infer import infer
from refgrad.model.inlining.defined import call_functions
from refgrad.model.inlining.inline import inline_functions
from refgrad.model.upgrading.upgrade import upgrade
from refgrad.protos.traverse import reads_of, versions_of
from refgrad.protos.types import type_of
from refgrad.tables.definitions import DEFINITIONS

SAME = 1e-9  # two forwards compute one function: by how much they may differ, relative to the largest element
ROUNDED = 1e-6  # the same with something in float32: a constant, or what an implementation works in
NOTHING = 1e-30  # no output is smaller
_UPGRADED = 21  # the opset that an older model is converted to where onnx.reference does not know its own

Outputs = Mapping[str, np.ndarray]


class ComplexProgram:
    """The model of a problem in double, node by node.

    :param kept: where given, the operators that keep their node; all others become their schema's body where they have one.
    :param call: computes a node of onnx.reference.
    :param upgraded: whether a model of an older opset is converted first.
    :raises BackendError: the model cannot be converted.
    """

    def __init__(
        self,
        problem: Problem,
        kept: Collection[str] | None = None,
        call: Call = execute,
        upgraded: bool = False,
    ) -> None:
        self.outputs = tuple(problem.cotangents)
        self._shapes = {name: cotangent.shape for name, cotangent in problem.cotangents.items()}
        model = with_defaults(problem.model, problem.wrt)
        if upgraded:
            model = upgrade(in_bodies(model), _UPGRADED)
        self.constants = initializers(model.graph)
        self._nodes = _needed(model, self.outputs)
        self._evaluator = Evaluator(versions_of(model), model.functions, call, kept)

    @property
    def length(self) -> int:
        """How many nodes were computed."""
        return len(self._evaluator.steps)

    @property
    def operators(self) -> set[str]:
        """The operators that were computed, with their domains."""
        return {qualified(step.onnx_node) for step in self._evaluator.steps}

    def step(self, node: NodeProto) -> Any:
        """The node of onnx.reference that computes the outputs of a node of the model.

        :raises BackendError: onnx.reference does not know the node.
        """
        [found] = [candidate for candidate in self._nodes if candidate.output == node.output]
        return self._evaluator.step(found)

    @np.errstate(all="ignore")
    def run(self, at: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The outputs of the problem where its model is fed `at`.

        :raises ShapeMovedError: an output has another shape there.
        :raises BackendError: onnx.reference does not know a node, fails, or leaves float64.
        """
        values = self._evaluator.compute(self._nodes, {**self.constants, **at})
        for name, shape in self._shapes.items():
            if values[name].shape != shape:
                raise ShapeMovedError(f"onnx.reference gives {name!r} the shape {values[name].shape}, not {shape}")
        return {name: values[name] for name in self.outputs}


def _needed(model: ModelProto, outputs: Collection[str]) -> list[NodeProto]:
    """The nodes that `outputs` depend on."""
    needed, kept = set(outputs), []
    for node in reversed(model.graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(reads_of(node))
            kept.append(node)
    return kept[::-1]


def distance_from_interpreter(problem: Problem, results: Outputs, truth: Outputs) -> tuple[float, str]:
    """How far `results` are from what the interpreter computes, relative to the largest element, and where."""
    worst, reason = 0.0, ""
    for name in problem.cotangents:
        result, expected = results[name], truth[name]
        if not np.array_equal(np.isfinite(result), np.isfinite(expected)):
            return np.inf, f"it computes another {name!r} than the interpreter: other elements of it are finite"
        finite = np.isfinite(expected)
        error, size = largest(result[finite] - expected[finite]), largest(expected[finite])
        distance = error / max(size, NOTHING)
        if distance > worst:
            worst, reason = (
                distance,
                f"it computes another {name!r} than the interpreter: the difference is {distance:.1e}",
            )
    return worst, reason


def truth_of(problem: Problem) -> Outputs:
    """The outputs of the problem as the interpreter computes them in float64.

    :raises BackendError: it does not run the model.
    """
    prepared = in_float64(problem.model, problem.wrt)
    return prepared.run(problem.at, tuple(problem.cotangents))


def in_bodies(model: ModelProto) -> ModelProto:
    """A copy of the model with bodies in the place of its functions and of the operators of ours."""
    inlined = ModelProto()
    inlined.CopyFrom(model)
    left: list[str] | None = None
    while True:
        if inlined.functions:
            inlined = inline_functions(inlined)
        ours = [qualified(node) for node in inlined.graph.node if (node.domain, node.op_type) in DEFINITIONS]
        if not ours or ours == left:
            return inlined
        left = ours
        graph = infer(inlined)
        functions = {}
        for value in (*graph.value_info, *graph.input, *graph.output):
            kind, shape = type_of(value)
            functions[value.name] = kind, None if shape is None else len(shape)
        call_functions(inlined, functions)
