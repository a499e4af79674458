"""Many random graphs, each judged in a worker, and their faults by class, with the smallest graph that shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from refgrad.conformance.tools.fuzzing.campaign import Mutant, Tally
from refgrad.conformance.tools.fuzzing.graphs.samples import sample
from refgrad.conformance.tools.fuzzing.graphs.shrinking import described, shrink
from refgrad.conformance.tools.fuzzing.graphs.verdicts import FOREIGN, STEPS, GraphVerdict, judge, run_on_onnxruntime
from refgrad.conformance.tools.fuzzing.journey import Journey, JourneyFault
from refgrad.errors import WorkerError, counted
from refgrad.worker import Worker

_SHRINKING = 60.0  # seconds


@dataclass(frozen=True)
class JudgedGraph(Journey):
    """The journey of a graph: the steps that were compared, and the reason if none was."""

    compared: tuple[str, ...] = ()
    note: str = ""
    skipped: tuple[str, ...] = ()  # the steps that had nothing to compare, with the reason

    def joined(self, parts: Iterable[Journey]) -> JudgedGraph:
        """The journey, with what journeys of single steps compared and skipped."""
        done = [part for part in parts if isinstance(part, JudgedGraph)]
        compared = dict.fromkeys(step for part in done for step in part.compared)
        skipped = dict.fromkeys(reason for part in done for reason in part.skipped)
        return replace(self, compared=tuple(compared), skipped=tuple(skipped))


@dataclass
class Graphs(Tally):
    """The totals of random graphs: the steps that were compared or skipped, and their faults by class."""

    compared: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def take(self, name: str, written: bytes, journey: Journey) -> None:
        """Count what came of the graph of a seed."""
        super().take(name, written, replace(journey, faults=tuple(_blamed(written, one) for one in journey.faults)))
        if isinstance(journey, JudgedGraph):
            self.compared.update(journey.compared)
            self.skipped.update(journey.skipped)
            if journey.note:
                self.notes[journey.note] += 1

    @property
    def failed(self) -> bool:
        """True if a fault is one of refgrad."""
        return any(one.fault.kind != FOREIGN for one in self.classes.values())

    def lines(self) -> Iterator[str]:
        """The report: how many were compared, then each class of faults with a small graph."""
        faults = f"{counted(len(self.classes), 'class', 'classes')} of faults"
        yield f"{counted(self.mutants, 'graph')} in {self.seconds:.0f} s, {faults}"
        for step in STEPS:
            yield f"{self.compared[step]:7} {step}"
        for note, times in self.notes.most_common():
            yield f"{times:7} not compared: {note}"
        for skipped, times in sorted(self.skipped.items()):
            yield f"{times:7} without {skipped}"
        for one in sorted(self.classes.values(), key=lambda one: -one.count):
            fault = one.fault
            yield f"{one.count:5} {fault.kind} {fault.place} [{fault.step}] seed {one.name}: {fault.message}"
            yield from smallest(one.example, fault).splitlines()


def _blamed(written: bytes, fault: JourneyFault) -> JourneyFault:
    """The fault, as one of ONNX Runtime if the model alone ends its process."""
    if fault.step != "onnxruntime" or fault.kind not in ("crashed", "out of memory"):
        return fault
    with Worker(_SHRINKING) as worker:
        try:
            worker.call(_run_model, int(written))
        except WorkerError:
            return replace(fault, kind=FOREIGN)
    return fault


def _run_model(seed: int) -> None:
    if (made := sample(seed)) is not None:
        run_on_onnxruntime(made)


def seeds(first: int) -> Iterator[Mutant]:
    """Seeds without end."""
    for seed in count(first):
        yield str(seed), str(seed).encode(), STEPS


def travel(written: bytes, steps: tuple[str, ...]) -> JudgedGraph:
    """Make the graph of a seed, and judge it."""
    made = sample(int(written))
    if made is None:
        return JudgedGraph(False, (), note="nothing moves in the graph, or onnx refuses it")
    found = judge(made, steps)
    faults = tuple(JourneyFault(one.step, one.kind, one.place, one.message) for one in found.verdicts)
    return JudgedGraph(
        "gradient" in found.compared,
        faults,
        compared=tuple(found.compared),
        note=found.note,
        skipped=tuple(found.skipped),
    )


def smallest(written: bytes, fault: JourneyFault) -> str:
    """A small graph that shows a fault of the graph of a seed, as text."""
    with Worker(2 * _SHRINKING) as worker:
        try:
            found: str = worker.call(_shrunk, int(written), fault)
        except WorkerError as error:
            found = str(error)
    return found


def _shrunk(seed: int, fault: JourneyFault) -> str:
    made = sample(seed)
    if made is None:
        return ""
    return described(shrink(made, GraphVerdict(fault.step, fault.kind, fault.message, fault.place), _SHRINKING))
