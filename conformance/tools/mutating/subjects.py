"""A subject is a case with its unbroken gradient. It tries a mutant: it breaks the rule or body and asks the judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, helper

from refgrad.backends.numpy import NumpyBackend
from refgrad.builder.function import FunctionEmitter
from refgrad.builder.nodes import written
from refgrad.conformance import verdicts
from refgrad.conformance.case import Case, is_float
from refgrad.conformance.judge.judge import Candidate, GradientCheck
from refgrad.conformance.judge.running.runner import ORACLES, observe
from refgrad.conformance.oracles import Built, Observation
from refgrad.conformance.problems.point import largest
from refgrad.conformance.problems.problem import ask
from refgrad.conformance.problems.systems.builders import build
from refgrad.conformance.tools.mutating.changes import Emits
from refgrad.conformance.tools.mutating.mutants import FAILS, KERNEL, WRONG_RESULT, Mutant, Outcome
from refgrad.conformance.tools.mutating.planting import Breaking, broken
from refgrad.model.external import array_of
from refgrad.model.inlining.defined import call_functions
from refgrad.model.inlining.inline import inline_functions
from refgrad.protos.traverse import reads_of
from refgrad.protos.types import Type
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.registry import RULES

_SAME = 1e-9  # a float64 gradient that changes less than this, relative to its largest element, is the same
_NOBODY = Mutant("", "", "")


@dataclass
class Subject:
    """A case with the gradient of the unbroken rule: its model, its values, its emissions, and the cotangents returned."""

    case: Case
    key: tuple[str, str]
    seed: int
    catches: int = 0

    def __post_init__(self) -> None:
        """Make the problem of the case, and solve it with the unbroken rule.

        :raises RefgradError: the case has no problem, or the gradient cannot be built or run.
        """
        self.problem = ask(self.case, self.seed)
        watched, entries = Breaking(), set[str]()

        def returned(op: Emits, adjoints: dict[str, str | None]) -> dict[str, str | None]:
            entries.update(name for name, adjoint in adjoints.items() if adjoint is not None)
            return adjoints

        with broken(self.key, watched, returned):
            built = build("refgrad", self.problem)
        self.form = _form(built.model.graph, {})
        values = self._run(built, trace=True)
        self.gradients = built.named(values)
        reads: dict[str, Sequence[str]] = {node.name: node.input for node in built.model.graph.node}
        shown = self.gradients
        if self.of_body:
            assert watched.body is not None
            self.body_form = _form(self.through_the_body().graph, {})
            values = self._trace_of_the_body(watched.body)
            reads = {name: node.inputs for node in watched.body.nodes for name in node.outputs}
            given = (self.results.get(name) for name in self.case.node.output)
            shown = {name: value for name, value in zip(self.outputs, given, strict=False) if value is not None}
            entries = {name for name in entries if is_float(shown.get(name))}

        def ranks(result: str) -> list[int | None]:
            operands = reads.get(result) or reads.get(result.removesuffix("_0"), ())
            return [np.ndim(values[name]) if name in values else None for name in operands]

        self.entries = {name: np.shape(shown[name]) if name in shown else None for name in entries}
        self.ranks = {site: [ranks(result) for result in results] for site, results in watched.emitted.items()}

    @property
    def of_body(self) -> bool:
        """True if the mutants break a body, not a rule."""
        return self.key not in RULES

    @property
    def outputs(self) -> list[str]:
        """The operator's outputs, by their names in its schema."""
        return [output.name for output in DEFINITIONS[self.key].schema.outputs]

    @cached_property
    def results(self) -> Mapping[str, Any]:
        """The values that the kernels compute: every value of the model."""
        weights = {t.name: array_of(t) for t in self.case.model.graph.initializer}
        prepared = NumpyBackend().prepare(self.case.model)
        return {**weights, **self.case.feeds, **prepared.run(self.case.feeds, trace=True)}

    def through_the_body(self) -> ModelProto:
        """The model of the case with the body in the place of the operator."""
        model = ModelProto()
        model.CopyFrom(self.case.model)
        types: dict[str, Type] = {
            name: (helper.np_dtype_to_tensor_dtype(value.dtype), value.ndim)
            for name, value in self.results.items()
            if isinstance(value, np.ndarray)
        }
        call_functions(model, types)
        model = inline_functions(model)
        needed = {value.name for value in model.graph.output}
        kept = []
        for node in reversed(model.graph.node):
            if needed.intersection(node.output):
                kept.append(node)
                needed.update(reads_of(node))
        del model.graph.node[:]
        model.graph.node.extend(reversed(kept))
        return model

    def _trace_of_the_body(self, body: FunctionEmitter) -> Mapping[str, Any]:
        """Every value that the nodes of the body compute in the case."""
        fed = {f"in_{k}": np.asarray(self.results[name]) for k, name in enumerate(self.case.node.input) if name}
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in fed.items()
        ]
        last = [onnx.ValueInfoProto(name=name) for name in body.nodes[-1].outputs]
        graph = helper.make_graph(written(body.nodes), "body", inputs, last)
        model = helper.make_model(graph, opset_imports=self.case.model.opset_import)
        return {**fed, **NumpyBackend().prepare(model).run(fed, trace=True)}

    def wrong_result(self, model: ModelProto) -> str:
        """A text about the first output of `model` that differs from the kernel's, or "", as in the tests of the bodies."""
        got = NumpyBackend().prepare(model).run(self.case.feeds)
        for value in model.graph.output:
            wanted = self.results[value.name]
            slack = 8 * float(np.finfo(wanted.dtype).eps) if wanted.dtype.kind == "f" else 0
            if got[value.name].shape != wanted.shape or not np.allclose(
                got[value.name], wanted, rtol=slack, atol=slack, equal_nan=True
            ):
                return f"{value.name} differs"
        return ""

    @cached_property
    def observations(self) -> tuple[Observation, ...]:
        """The observations of the oracles about the problem."""
        said: list[Observation] = []
        for oracle in ORACLES:
            with suppress(Exception):  # an oracle that fails does not apply, as in a run of the suite
                said += observe(oracle, self.problem)
        return tuple(said)

    @cached_property
    def check(self) -> GradientCheck:
        """The judge, with the unbroken gradient."""
        return GradientCheck(self.problem, self.observations)

    @cached_property
    def sound(self) -> bool:
        """True if the judge accepts the unbroken gradient."""
        nodes = len(self.form[0])
        return self.check.verdict(Candidate("refgrad", "numpy", nodes, self.gradients)).verdict != verdicts.WRONG

    def _run(self, built: Built, trace: bool = False) -> Mapping[str, Any]:
        prepared = NumpyBackend().prepare(built.model, precision="float64")
        return prepared.run(built.feeds(self.problem.at, self.problem.wide_cotangents), trace=trace)

    @np.errstate(all="ignore")
    def try_on(self, breaking: Callable[[], Any]) -> Outcome | None:
        """The outcome of the mutant that `breaking` makes, not named yet; None where the gradient model stays the same."""
        wrong = ""
        with breaking():
            try:
                if self.of_body:
                    model = self.through_the_body()
                    if _form(model.graph, {}) == self.body_form:
                        return None
                built = build("refgrad", self.problem)
                if not self.of_body and _form(built.model.graph, {}) == self.form:
                    return None
                gradients = built.named(self._run(built))
                wrong = self.wrong_result(model) if self.of_body else ""
            except Exception as error:  # a broken rule may raise anything
                return Outcome(_NOBODY, self.case.name, FAILS, (), True, note=" ".join(str(error).split())[:200])
        found = self._judged(gradients, len(built.model.graph.node), breaking)
        if wrong and not found.caught:
            return Outcome(_NOBODY, self.case.name, WRONG_RESULT, (KERNEL,), True, note=wrong)
        return found

    def _judged(self, gradients: Mapping[str, Any], nodes: int, breaking: Callable[[], Any]) -> Outcome:
        """The judge's verdict on the gradients of a mutant."""
        if all(_same(gradients.get(name), gradient) for name, gradient in self.gradients.items()):
            return Outcome(_NOBODY)
        candidate = Candidate("mutant", "numpy", nodes, gradients)
        observations, check = self.observations, self.check
        with breaking():
            row = GradientCheck(self.problem, observations).verdict(candidate)
        alone = row.verdict == verdicts.WRONG
        if not alone:
            row = check.verdict(candidate)
        if row.verdict != verdicts.WRONG or not self.sound:
            return Outcome(_NOBODY, note=f"{self.case.name}: {row.verdict}: {row.note}")
        return Outcome(_NOBODY, self.case.name, row.verdict, row.witnesses, alone, note=row.note)


def _form(graph: GraphProto, outside: Mapping[str, Any]) -> Any:
    """The computation of a graph, whatever its values are called: the names also count emissions that were not used."""
    names = dict(outside)
    names |= {value.name: ("input", len(names), k) for k, value in enumerate(graph.input)}
    names |= {tensor.name: (tensor.data_type, *tensor.dims, tensor.raw_data) for tensor in graph.initializer}
    nodes = []
    for k, node in enumerate(graph.node):
        attributes = [_form(a.g, names) if a.HasField("g") else a.SerializeToString() for a in node.attribute]
        nodes.append((node.op_type, node.domain, [names.get(name, name) for name in node.input], attributes))
        names |= {name: (len(outside), k, place) for place, name in enumerate(node.output)}
    return nodes, [names[value.name] for value in graph.output]


def _same(got: np.ndarray | None, wanted: np.ndarray) -> bool:
    if got is None or got.shape != wanted.shape:
        return False
    slack = _SAME * largest(wanted[np.isfinite(wanted)])
    return bool(np.allclose(got, wanted, rtol=0, atol=slack, equal_nan=True))
