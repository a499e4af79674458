"""Many mutants, each in a worker with limits, and their faults by class."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from refgrad.conformance.tools.fuzzing.bases import chosen
from refgrad.conformance.tools.fuzzing.journey import Journey, JourneyFault
from refgrad.conformance.tools.fuzzing.mutations import mutant
from refgrad.errors import WorkerError, counted
from refgrad.worker import Worker

SECONDS = 20.0
MEMORY = 512 << 20  # bytes that a model may take, with everything that is loaded
_PAUSE = 0.5  # seconds
_ENDED = "its process ended"
_ROOM = 4 * MEMORY  # what the process has: enough that nothing fails for the lack of it and goes unseen

Mutant = tuple[str, bytes, tuple[str, ...]]  # name, file, and the steps that it is taken through
Travel = Callable[[bytes, tuple[str, ...]], Journey]  # takes a mutant through its steps, over there


@dataclass
class Class:
    """Faults of one kind at one place: how many, and the smallest model that shows it."""

    fault: JourneyFault
    count: int = 0
    example: bytes = b""
    name: str = ""


@dataclass
class Tally:
    """The totals of a campaign, and its faults by class."""

    mutants: int = 0
    differentiated: int = 0
    seconds: float = 0.0
    longest: tuple[float, str] = (0.0, "")
    largest: tuple[int, str] = (0, "")
    classes: dict[tuple[str, str, str], Class] = field(default_factory=dict)

    def take(self, name: str, written: bytes, journey: Journey) -> None:
        """Count what came of the model `name`."""
        self.mutants += 1
        self.differentiated += journey.differentiated
        self.longest = max(self.longest, (journey.seconds, f"{journey.slowest} of {name}"))
        self.largest = max(self.largest, (journey.peak, f"{journey.largest} of {name}"))
        for fault in journey.faults:
            self.add(fault, written, name)

    def add(self, fault: JourneyFault, example: bytes, name: str) -> None:
        """Count a fault and keep its model if none is smaller."""
        found = self.classes.setdefault((fault.kind, fault.place, "" if fault.place else fault.step), Class(fault))
        found.count += 1
        if not found.example or len(example) < len(found.example):
            found.fault, found.example, found.name = fault, example, name

    def lines(self) -> Iterator[str]:
        """The report: the whole, the slowest and the largest model, then a line for each class, the most frequent first."""
        yield (
            f"{counted(self.mutants, 'mutant')} in {self.seconds:.0f} s, {self.differentiated} with a gradient, "
            f"{counted(len(self.classes), 'class', 'classes')} of faults"
        )
        yield f"the longest took {self.longest[0]:.2f} s: {self.longest[1]}"
        yield f"the largest took {self.largest[0] / 2**20:.0f} MiB, Python and libraries included: {self.largest[1]}"
        for one in sorted(self.classes.values(), key=lambda one: -one.count):
            fault = one.fault
            yield f"{one.count:5} {fault.kind} {fault.place} [{fault.step}] {one.name}: {fault.message}"


def mutants(first: int, turns: Sequence[tuple[str, ...]]) -> Iterator[Mutant]:
    """Mutants without end: seed `first`, then the next. They take turns in the steps that they are taken through."""
    for seed in count(first):
        name, base = chosen(seed)
        yield f"{seed}:{name}", mutant(seed, base), turns[seed % len(turns)]


def campaign(
    models: Iterable[Mutant],
    travel: Travel,
    seconds: float,
    jobs: int = 1,
    limit: float = SECONDS,
    tally: Tally | None = None,
) -> Tally:
    """Take models through their steps until there are no more, the time is over, or somebody presses Ctrl-C.

    :param jobs: how many processes share the models.
    :param limit: how many seconds one model may take.
    :param tally: what counts; by default a new one.
    """
    tally = tally or Tally()
    source, turn, over = iter(models), threading.Lock(), threading.Event()
    start = time.monotonic()
    end = start + seconds
    workers = [Worker(limit, room=_ROOM) for _ in range(jobs)]

    def work(worker: Worker) -> None:
        while not over.is_set() and time.monotonic() < end:
            with turn:
                name, written, steps = next(source, ("", b"", ()))
            if not name:
                return
            found = _journey(partial(_call, worker, travel, limit, end), written, steps)
            if found is not None:
                with turn:
                    tally.take(name, written, found)

    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(work, worker) for worker in workers]
        try:
            while wait(running, _PAUSE).not_done:  # for ever, Ctrl-C that another thread gets would not be noticed
                pass
            for one in running:
                one.result()
        except KeyboardInterrupt:
            pass
        finally:
            over.set()
            for worker in workers:
                worker.stop()
    for worker in workers:
        worker.close()
    tally.seconds = time.monotonic() - start
    return tally


def _call(
    worker: Worker, travel: Travel, limit: float, end: float, written: bytes, steps: tuple[str, ...]
) -> Journey | None:
    """The journey of the model; None if the time is over before."""
    worker.seconds = min(limit, max(end - time.monotonic(), 0.01))
    try:
        found: Journey = worker.call(travel, written, steps)
    except WorkerError as error:
        if time.monotonic() >= end or worker.is_stopped:
            return None
        fault = JourneyFault(" ".join(steps), error.verdict, "", str(error)[:200])
        return Journey(False, (fault,), seconds=limit if error.verdict == "timed out" else 0.0, slowest=_ENDED)
    if found.peak > MEMORY:
        fault = JourneyFault(found.largest, "too much memory", "", f"{found.peak >> 20} MiB")
        found = replace(found, faults=(*found.faults, fault))
    return found


def _journey(
    call: Callable[[bytes, tuple[str, ...]], Journey | None], written: bytes, steps: tuple[str, ...]
) -> Journey | None:
    """The journey of the model; if the process ended, the journeys of the single steps, joined."""
    found = call(written, steps)
    if found is None or found.slowest != _ENDED:
        return found
    parts = [call(written, (step,)) for step in steps]
    if None in parts:
        return None
    done = [part for part in parts if part is not None]
    faults = tuple(fault for part in done for fault in part.faults)
    whole = next((part for part in done if part.slowest != _ENDED), found)
    return replace(whole.joined(done), faults=faults or found.faults)
