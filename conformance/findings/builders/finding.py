"""A finding about a builder: a model whose gradient it writes wrongly, with the right one and what proves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import ModelProto

from refgrad.conformance.case import NODE, Case
from refgrad.conformance.findings.finding import TRAINING, VERSIONS, Arrays, declared, equal, model
from refgrad.conformance.questions.question import Question
from refgrad.conformance.running.builders import build
from refgrad.conformance.running.executors import run
from refgrad.errors import WorkerError
from refgrad.worker import Worker

ONNX_AD = "onnx-ad"
ORT_BUILDER = "onnxruntime-builder"
RAW, MODULE = "onnxruntime:raw", "onnxruntime:module"

# The releases that the findings are about; another release is not held to them.
BUILDER_VERSIONS = {ONNX_AD: "0.3.0", ORT_BUILDER: VERSIONS[TRAINING]}

ENDS = "its process ended"  # what is said of a process that does not come back


@dataclass(frozen=True, eq=False)
class BuilderFinding:
    """`builders`, all of `system`, do not give the gradient of `model` by each input in `expected`.

    It is that of Σ <cotangent, output> where the model is fed `feeds`. Who is right follows from `proof`, which anybody can
    check by hand, and from the oracles. `graph` says what is wrong in what they write, `given` what `executor` makes of it:
    gradients by the same names, or, where there are none, a part of what is said then.
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
    def question(self) -> Question:
        """What the builders are asked."""
        return Question(str(self), self.model, tuple(self.expected), self.feeds, self.cotangents, seed=0)

    @property
    def case(self) -> Case:
        """A case of the suite that shows the fault, whatever its cotangents are."""
        about = f"refgrad.conformance.findings.builders, of {self.system} {BUILDER_VERSIONS[self.system]}"
        name = f"{self.operator}-{self.fault.replace(' ', '_')}"
        return Case(name, self.model, self.feeds, tuple(self.expected), tuple(self.cotangents), provenance=about)

    def outcome(self, builder: str, worker: Worker) -> Arrays | str:
        """What the builder gives now, as `given`."""
        try:
            built = worker.call(build, builder, self.question)
            results = worker.call(run, self.executor, built.model, built.feeds(self.feeds, self.cotangents))
        except WorkerError as error:
            return str(error)
        return {name: results[gradient] for name, gradient in built.gradients.items()}

    def holds(self, outcome: Arrays | str) -> bool:
        """Whether this is the wrong outcome that the finding tells of."""
        if isinstance(outcome, str) or isinstance(self.given, str):
            return isinstance(outcome, str) and isinstance(self.given, str) and self.given in outcome
        given = self.given
        return outcome.keys() == given.keys() and all(equal(outcome[n], value) for n, value in given.items())


def about(
    system: str,
    builders: Sequence[str],
    fault: str,
    graph: str,
    nodes: str,
    feeds: Arrays,
    cotangents: Arrays,
    expected: Arrays,
    given: Arrays | str,
    proof: str,
    *,
    opset: int = 21,
    constants: str = "",
    sizes: bool = True,
    executor: str = "numpy",
) -> BuilderFinding:
    """A finding about the first of `nodes`, in onnx's own language, which read `feeds` and make what has `cotangents`.

    :param constants: the initializers, as `int64[1] axes = {0}`.
    :param sizes: whether inputs and outputs are declared with theirs; without, every size is a symbol.
    """
    made = model(
        f'<ir_version: 10, opset_import: ["" : {opset}]> forward ({declared(feeds, sizes)}) => '
        f"({declared(cotangents, sizes)}) <{constants}> {{ {nodes} }}"
    )
    made.graph.node[0].name = NODE
    operator = made.graph.node[0].op_type
    return BuilderFinding(
        system, tuple(builders), operator, fault, graph, made, feeds, cotangents, expected, given, proof, executor
    )
