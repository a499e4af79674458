"""A known bug about a builder: a model whose gradient it writes wrongly, with the right one and what proves it."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import ModelProto

from refgrad.conformance.case import Case
from refgrad.conformance.known.bugs.bug import TRAINING, VERSIONS, Arrays, equal
from refgrad.conformance.problems.problem import Problem
from refgrad.conformance.problems.systems.builders import build
from refgrad.conformance.problems.systems.executors import run
from refgrad.errors import WorkerError
from refgrad.worker import Worker

ONNX_AD = "onnx-ad"
ORT_BUILDER = "onnxruntime-builder"
RAW, MODULE = "onnxruntime:raw", "onnxruntime:module"

# The releases that the known bugs are about; another release is not held to them.
BUILDER_VERSIONS = {ONNX_AD: "0.3.0", ORT_BUILDER: VERSIONS[TRAINING]}

ENDS = "its process ended"  # in the message of a worker whose process ended


@dataclass(frozen=True, eq=False)
class BuilderBug:
    """`builders`, all of `system`, do not give the gradient of `model` by each input in `expected`.

    The gradient is taken of Σ <cotangent, output> where the model is fed `feeds`. `proof` says why `expected` is right, so
    that anybody can check it by hand; the oracles check it too. `graph` names the fault in the gradient graph. `given` are
    the gradients that `executor` computes with it, by the same names, or a part of the message where it fails.
    """

    system: str
    builders: tuple[str, ...]
    operator: str
    fault: str
    graph: str
    model: ModelProto
    feeds: Arrays
    cotangents: Arrays
    expected: Arrays
    given: Arrays | str
    proof: str
    executor: str = "numpy"

    def __str__(self) -> str:
        return f"{self.system}-{self.operator}-{self.fault[:40]}"

    @property
    def problem(self) -> Problem:
        """The problem that the builders are asked to solve."""
        return Problem(str(self), self.model, tuple(self.expected), self.feeds, self.cotangents, seed=0)

    @property
    def case(self) -> Case:
        """A case of the suite that shows the fault, whatever its cotangents are."""
        about = f"refgrad.conformance.known.bugs.builders, of {self.system} {BUILDER_VERSIONS[self.system]}"
        name = f"{self.operator}-{self.fault.replace(' ', '_')}"
        return Case(name, self.model, self.feeds, tuple(self.expected), tuple(self.cotangents), provenance=about)

    def outcome(self, builder: str, worker: Worker) -> Arrays | str:
        """The result that the builder gives now, in the form of `given`."""
        try:
            built = worker.call(build, builder, self.problem)
            results = worker.call(run, self.executor, built.model, built.feeds(self.feeds, self.cotangents))
        except WorkerError as error:
            return str(error)
        return {name: results[gradient] for name, gradient in built.gradients.items()}

    def holds(self, outcome: Arrays | str) -> bool:
        """True if this is the wrong outcome that the known bug describes."""
        if isinstance(outcome, str) or isinstance(self.given, str):
            return isinstance(outcome, str) and isinstance(self.given, str) and self.given in outcome
        given = self.given
        return outcome.keys() == given.keys() and all(equal(outcome[n], value) for n, value in given.items())
