"""Many mutants, each in a worker with limits, and their faults by class."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from refgrad.conformance.fuzzing.journey import STEPS, Fault, journey
from refgrad.conformance.fuzzing.mutations import mutant
from refgrad.errors import WorkerError
from refgrad.worker import Worker

SECONDS = 20.0
ROOM = 512 << 20


@dataclass
class Class:
    """Faults of one kind at one place: how many, and the smallest model that shows it."""

    fault: Fault
    count: int = 0
    example: bytes = b""
    name: str = ""


@dataclass
class Tally:
    """What came of a campaign."""

    mutants: int = 0
    differentiated: int = 0
    classes: dict[tuple[str, str, str], Class] = field(default_factory=dict)

    def add(self, fault: Fault, example: bytes, name: str) -> None:
        """Count a fault and keep its model if none is smaller."""
        found = self.classes.setdefault((fault.kind, fault.place, "" if fault.place else fault.step), Class(fault))
        found.count += 1
        if not found.example or len(example) < len(found.example):
            found.fault, found.example, found.name = fault, example, name

    def lines(self) -> Iterator[str]:
        """The report: a line for the whole, then one for each class, the most frequent first."""
        yield f"{self.mutants} mutants, {self.differentiated} with a gradient, {len(self.classes)} classes of faults"
        for one in sorted(self.classes.values(), key=lambda one: -one.count):
            fault = one.fault
            yield f"{one.count:5} {fault.kind} {fault.place} [{fault.step}] {one.name}: {fault.message}"


@cache
def bases() -> tuple[tuple[str, bytes], ...]:
    """The models of onnx's node tests that are small, by name."""
    from onnx.backend.test import loader  # takes longer than all of refgrad

    tests = loader.load_model_tests(kind="node")
    found = ((test.name, test.model.SerializeToString()) for test in tests if test.model is not None)
    return tuple((name, model) for name, model in found if len(model) < 20_000)


def mutants(first: int, sources: Sequence[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Mutants without end: seed `first`, then the next."""
    seed = first
    while True:
        name, base = random.Random(seed).choice(sources)
        yield f"{seed}:{name}", mutant(seed, base)
        seed += 1


def campaign(models: Iterable[tuple[str, bytes]], seconds: float) -> Tally:
    """Take models through everything until the time is over."""
    tally, end = Tally(), time.monotonic() + seconds
    with Worker(SECONDS, room=ROOM) as worker:
        for name, written in models:
            if time.monotonic() > end:
                break
            tally.mutants += 1
            try:
                differentiated, faults = worker.call(journey, written)
                tally.differentiated += differentiated
            except WorkerError:
                faults = _one_by_one(written)
            for fault in faults:
                tally.add(fault, written, name)
    return tally


def _one_by_one(written: bytes) -> list[Fault]:
    """The faults of each step in a process of its own: one of them met a limit or ended its process."""
    found = []
    for step in STEPS:
        with Worker(SECONDS, room=ROOM) as worker:
            try:
                found += worker.call(journey, written, (step,))[1]
            except WorkerError as error:
                found.append(Fault(step, error.verdict, "", str(error)[:200]))
    return found
