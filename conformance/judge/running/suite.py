"""One run of the suite: cases in, results out, with a journal in between."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from typing import Any

from refgrad.conformance.case import Case
from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.judge.running.cluster import run_on_cluster
from refgrad.conformance.judge.running.journal import Journal
from refgrad.conformance.judge.running.results import About, Results
from refgrad.conformance.judge.running.runner import Lanes, Plan, run_case
from refgrad.conformance.oracles import get_oracle
from refgrad.conformance.problems.systems import builders, executors
from refgrad.conformance.problems.systems.builders import usable_builder
from refgrad.conformance.problems.systems.executors import get_executor
from refgrad.errors import OptionError
from refgrad.ranges import checked

# How many cases are done, of how many, the last one's name, and its verdicts.
Progress = Callable[[int, int, str, Sequence[ResultRow]], None]


def run_suite(
    cases: Iterable[Case],
    plan: Plan,
    *,
    lanes: Lanes | int | None = None,
    cluster: str | None = None,
    journal: Journal | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Results:
    """The results of every builder and executor of `plan` on every case.

    :param lanes: the `Lanes` to use, or how many to start; by default one for each core.
    :param cluster: the address of a Dask scheduler, whose workers do it instead.
    :param journal: where verdicts are kept as they come; the cases in it are not asked again.
    :param settings: what the results say of the run besides the plan.
    :raises RefgradError: somebody in the plan does not exist, or cannot be used here.
    """
    require(plan)
    known = list(cases)
    done = dict(journal.done) if journal is not None else {}
    left = [case for case in known if case.name not in done]
    with closing(
        _asked(left, plan, lanes, cluster)
    ) as answers:  # an interruption ends it here, not when it is garbage-collected
        for case, rows in answers:
            done[case.name] = rows
            if journal is not None:
                journal.append(case.name, rows)
            if progress is not None:
                progress(len(done), len(known), case.name, rows)
    versions = {name: builders.version(name) for name in plan.builders}
    versions |= {name: executors.version(name) for name in plan.executors}
    ordered: list[ResultRow] = [row for case in known for row in done[case.name]]
    about = {case.name: About.of(case) for case in known}
    return Results({**settings_of(plan), **(settings or {})}, versions, about, ordered)


def settings_of(plan: Plan) -> dict[str, Any]:
    """The settings of a plan, for the journal and the results."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(plan).items()}


def require(plan: Plan) -> None:
    """Refuse a plan with somebody who does not exist or cannot be used here, or with limits that mean nothing.

    :raises RefgradError: the reason.
    """
    for what, names in (("builder", plan.builders), ("executor", plan.executors), ("oracle", plan.oracles)):
        if not names:
            raise OptionError(f"No {what} is given.")
    checked("seconds", plan.seconds)
    checked("memory", plan.memory >> 20)
    for name in plan.builders:
        usable_builder(name)
    for name in plan.executors:
        get_executor(name)
    for name in plan.oracles:
        if missing := get_oracle(name).missing():
            raise OptionError(f"The oracle {name!r} cannot be used here: {missing}")


def _asked(
    cases: list[Case], plan: Plan, lanes: Lanes | int | None, cluster: str | None
) -> Generator[tuple[Case, list[ResultRow]], None, None]:
    if cluster:
        yield from run_on_cluster(cluster, cases, plan)
        return
    given = nullcontext(lanes) if isinstance(lanes, Lanes) else Lanes(plan.seconds, plan.memory, lanes)
    with given as workers:
        yield from workers.each(lambda case, worker: run_case(case, plan, worker), cases)
