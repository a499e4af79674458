"""Calls of builders, executors and oracles in worker processes, which may die without ending the run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

from refgrad import errors
from refgrad.conformance import verdicts
from refgrad.conformance.case import Case
from refgrad.conformance.judge.forward import forward_fault
from refgrad.conformance.judge.judge import Candidate, judge
from refgrad.conformance.judge.rows import BUILDER, EXECUTOR, ResultRow, says_unsupported
from refgrad.conformance.oracles import Built, NotApplicable, Observation, Property, get_oracle
from refgrad.conformance.problems.problem import Problem, ask
from refgrad.conformance.problems.systems.builders import attempt
from refgrad.conformance.problems.systems.executors import run
from refgrad.errors import AnswerError, BuilderError, WorkerError
from refgrad.worker import SECONDS, Worker

MEMORY = 8 << 30  # bytes that a worker may have
ORACLES = ("differences", "reference", "complex-step")  # the default: fast, and independent of each other

_ENDED = {"crashed": verdicts.CRASHED, "timed out": verdicts.TIMED_OUT, "out of memory": verdicts.OUT_OF_MEMORY}
ANSWER = "answer"  # in the place of an oracle: the answer is no gradient
INTERPRETER = "numpy"  # the executor that the others are compared with
_AHEAD = 4  # items handed to each lane before it asks for them

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Plan:
    """Who is asked, and the limits: `seconds` for each call, `memory` in bytes for each process."""

    builders: tuple[str, ...] = ("refgrad", "refgrad:ort")
    executors: tuple[str, ...] = ("numpy",)
    oracles: tuple[str, ...] = ORACLES
    seed: int = 0
    seconds: float = SECONDS
    memory: int = MEMORY


def run_case(case: Case, plan: Plan, worker: Worker) -> list[ResultRow]:
    """The verdicts on one case, a row for each builder and executor of the plan, in its order."""
    start = time.perf_counter()
    row = partial(ResultRow, case.name)
    try:
        problem: Problem = worker.call(ask, case, plan.seed)
    except WorkerError as error:
        note = f"the case could not be prepared: {error}"
        return [row(b, e, verdicts.UNDECIDED, note=note) for b in plan.builders for e in plan.executors]
    observations, examiners = _observations(problem, plan, worker)
    forwards = {executor: _forward(problem, executor, worker) for executor in plan.executors if executor != INTERPRETER}
    results: list[ResultRow | Candidate] = []
    models: list[Built | None] = []  # the gradient model of each of them
    answers: list[Callable[[], ResultRow | Candidate] | None] = []  # how to ask for each of them again
    for builder in plan.builders:
        try:
            built: Built = worker.call(attempt, builder, problem)
        except WorkerError as error:
            refused = verdicts.REFUSED if error.raised == BuilderError.__name__ else verdicts.CRASHED
            nothing = _no_answer(error) or (_ENDED.get(error.verdict, refused), (), (), None, None, str(error))
            results += [row(builder, executor, *nothing) for executor in plan.executors]
            answers += [None] * len(plan.executors)
            models += [None] * len(plan.executors)
            continue
        properties = [p for name in examiners for p in _properties(name, problem, built, worker)]
        for executor in plan.executors:
            of_model = forwards.get(executor)
            answer = partial(_answer, problem, builder, built, executor, worker, properties, of_model)
            answers.append(answer)
            models.append(built)
            results.append(answer())
    rows = _judged(problem, observations, results, worker)
    for place, answer_again in enumerate(answers):
        if answer_again is not None and rows[place].verdict in (verdicts.WRONG, verdicts.CRASHED):
            (second,) = _judged(problem, observations, [answer_again()], worker)
            rows[place] = _steady(rows[place], second)
    seconds = (time.perf_counter() - start) / len(rows)
    for place, verdict_row in enumerate(rows):
        forward_verdict, note = forwards.get(verdict_row.executor, ("", ""))
        verdict_row = replace(verdict_row, seconds=seconds, forward=forward_verdict, forward_note=note)
        if verdict_row.verdict in verdicts.FAULTS:
            verdict_row = replace(
                verdict_row, side=_side(verdict_row, models[place], rows, problem, observations, worker)
            )
        rows[place] = verdict_row
    return rows


def _forward(problem: Problem, executor: str, worker: Worker) -> tuple[str, str]:
    """The verdict on the executor's results of the model itself, and the reason; ("", "") if they are right."""
    try:
        results = worker.call(run, executor, problem.model, dict(problem.feeds))
    except WorkerError as error:
        if error.raised == AnswerError.__name__:
            return verdicts.WRONG, str(error)
        failed = verdicts.UNSUPPORTED if says_unsupported(str(error), error.classes) else verdicts.CRASHED
        return _ENDED.get(error.verdict, failed), _told(error)
    try:
        fault = worker.call(forward_fault, problem, results)
    except WorkerError as error:  # the executor is not to blame
        return "", f"the results of the model were not compared: {error}"
    if not fault:
        return "", ""
    try:
        second = worker.call(forward_fault, problem, worker.call(run, executor, problem.model, dict(problem.feeds)))
    except WorkerError:
        second = ""
    differ = f"not deterministic: two runs of {executor} on the same feeds differ"
    return verdicts.WRONG, fault if fault == second else differ


def _side(
    row: ResultRow,
    built: Built | None,
    rows: Sequence[ResultRow],
    problem: Problem,
    observations: list[Observation],
    worker: Worker,
) -> str:
    """The side at fault, or "" if unknown. The interpreter may run the gradient to tell."""
    if built is None or row.executor == INTERPRETER:
        return BUILDER
    answered = row.verdict == verdicts.WRONG
    if row.witnesses == (ANSWER,) or (row.forward and not answered):
        return EXECUTOR
    known = [other for other in rows if (other.builder, other.executor) == (row.builder, INTERPRETER)]
    if not known:
        answer = _answer(problem, row.builder, built, INTERPRETER, worker)
        known = _judged(problem, observations, [answer], worker)
    on_interpreter = known[0].verdict
    if on_interpreter in (verdicts.RIGHT, verdicts.CONVENTION):
        return EXECUTOR
    if on_interpreter == (verdicts.WRONG if answered else verdicts.CRASHED):
        return BUILDER
    return EXECUTOR if row.forward or (not answered and on_interpreter == verdicts.WRONG) else ""


def _judged(
    problem: Problem, observations: list[Observation], results: Sequence[ResultRow | Candidate], worker: Worker
) -> list[ResultRow]:
    """A row for each of `results`: the judge looks at the candidates."""
    candidates = [result for result in results if isinstance(result, Candidate)]
    try:
        judged: Iterator[ResultRow] = iter(worker.call(judge, problem, observations, candidates) if candidates else ())
    except WorkerError as error:
        row, note = partial(ResultRow, problem.case), f"the judge: {error}"
        judged = (row(c.builder, c.executor, verdicts.UNDECIDED, note=note) for c in candidates)
    return [result if isinstance(result, ResultRow) else next(judged) for result in results]


def _steady(first: ResultRow, second: ResultRow) -> ResultRow:
    """The verdict on a fault that was asked for twice; where the answers differ, it says so and has no numbers."""
    if repr(first) == repr(second):  # NaN is like NaN
        return first
    if first.verdict == second.verdict == verdicts.CRASHED:  # a message may have an address or a time
        return first
    other = "" if second.verdict == first.verdict else f"; the second time the verdict was: {second.verdict}"
    note = f"not deterministic: two runs of {first.executor} on the same feeds differ{other}"
    return ResultRow(
        first.case, first.builder, first.executor, first.verdict, first.witnesses, first.against, note=note
    )


def _observations(problem: Problem, plan: Plan, worker: Worker) -> tuple[list[Observation], list[str]]:
    """The observations of the oracles of the plan, and the names of the oracles that check gradient models instead."""
    observations: list[Observation] = []
    examiners = []
    for name in plan.oracles:
        if get_oracle(name).observe is None:
            examiners.append(name)
            continue
        try:
            observations += worker.call(observe, name, problem)
        except WorkerError as error:
            observations.append(NotApplicable(name, str(error)))
    return observations, examiners


def observe(oracle: str, problem: Problem) -> Sequence[Observation]:
    """The observations of an oracle on a problem."""
    known = get_oracle(oracle)
    if missing := known.missing():
        return [NotApplicable(oracle, missing)]
    return () if known.observe is None else known.observe(problem)


def examine(oracle: str, problem: Problem, built: Built) -> Sequence[Property | NotApplicable]:
    """The properties of a gradient model that an oracle checked."""
    known = get_oracle(oracle)
    return () if known.examine is None or known.missing() else known.examine(problem, built)


def _properties(oracle: str, problem: Problem, built: Built, worker: Worker) -> list[Property]:
    try:
        properties = worker.call(examine, oracle, problem, built)
    except WorkerError:
        return []
    return [prop for prop in properties if isinstance(prop, Property)]


def _answer(
    problem: Problem,
    builder: str,
    built: Built,
    executor: str,
    worker: Worker,
    properties: Sequence[Property] = (),
    of_model: tuple[str, str] | None = None,
) -> ResultRow | Candidate:
    """The executor's results of a gradient, or a row if it fails.

    :param of_model: what `_forward` returns; None where it was not called.
    """
    try:
        results = worker.call(run, executor, built.model, built.feeds(problem.feeds, problem.cotangents))
    except WorkerError as error:
        return ResultRow(problem.case, builder, executor, *_failed(problem, executor, error, worker, of_model))
    return Candidate(builder, executor, len(built.model.graph.node), built.named(results), tuple(properties))


def _failed(
    problem: Problem, executor: str, error: WorkerError, worker: Worker, of_model: tuple[str, str] | None
) -> tuple[Any, ...]:
    """The verdict and the rest of a row, if an executor fails: crashed, unless it says "not supported"."""
    rest: tuple[Any, ...] = ((), (), None, None)
    if no_answer := _no_answer(error):
        return no_answer
    if error.verdict in _ENDED:
        return _ENDED[error.verdict], *rest, str(error)
    if says_unsupported(str(error), error.classes):
        return verdicts.UNSUPPORTED, *rest, _told(error)
    verdict, note = of_model if of_model is not None else _forward(problem, executor, worker)
    if verdict == verdicts.UNSUPPORTED:
        return verdicts.UNSUPPORTED, *rest, f"the executor does not run the model itself: {note}"
    return verdicts.CRASHED, *rest, _told(error)


def _told(error: WorkerError) -> str:
    """The message of an error, after the name of its class unless it is one of refgrad's, whose messages say it all."""
    foreign = error.raised and not hasattr(errors, error.raised)
    return f"{error.raised}: {error}" if foreign and not str(error).startswith(error.raised) else str(error)


def _no_answer(error: WorkerError) -> tuple[Any, ...]:
    """The verdict on an answer that is not a gradient, which does not take an oracle. Empty where there was no answer."""
    return (verdicts.WRONG, (ANSWER,), (), None, None, str(error)) if error.raised == AnswerError.__name__ else ()


class Lanes:
    """Threads with a worker process each. The processes end with the block. A lane is one thread.

    :param seconds: the time limit of each call.
    :param memory: the bytes that a process may take, 0 for no limit.
    :param count: the number of lanes; by default one for each core.
    """

    def __init__(self, seconds: float = SECONDS, memory: int = 0, count: int | None = None) -> None:
        self._limits = seconds, memory
        self._count = count or os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self._count)
        self._own, self._workers, self._ended = threading.local(), list[Worker](), threading.Event()

    def each(self, task: Callable[[Item, Worker], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Every item with what `task` returns for it, as it comes."""
        left = iter(items)
        running: dict[Future[Result], Item] = {}
        while True:
            for item in islice(left, self._count * _AHEAD - len(running)):
                running[self._pool.submit(self._run, task, item)] = item
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()

    def _run(self, task: Callable[[Item, Worker], Result], item: Item) -> Result:
        if not hasattr(self._own, "worker"):
            self._own.worker = Worker(*self._limits)
            self._workers.append(self._own.worker)
            if self._ended.is_set():
                self._own.worker.stop()
        return task(item, self._own.worker)

    def __enter__(self) -> Lanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for worker in self._workers:
            worker.stop()
        self._pool.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()
