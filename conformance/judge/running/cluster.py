"""The same run on a Dask cluster: each case is a task, and a task whose worker dies is given to another."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Generator, Iterable, Sequence
from importlib import util
from typing import Any

from refgrad.conformance.case import Case
from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.judge.running.runner import Plan, run_case
from refgrad.conformance.verdicts import CRASHED
from refgrad.errors import OptionError
from refgrad.installing import install
from refgrad.tables import plugins
from refgrad.worker import Worker

_SECONDS = 10  # until a scheduler that does not answer is taken for absent
_own = threading.local()


def run_on_cluster(
    address: str, cases: Iterable[Case], plan: Plan
) -> Generator[tuple[Case, list[ResultRow]], None, None]:
    """The verdicts on every case, as they come from the workers of the scheduler at `address` ("tcp://host:8786").

    The workers need refgrad and what the plan asks, in the same versions. Foreign code runs in a process of its own there too.

    :raises OptionError: dask.distributed is not installed; no scheduler answers there, or it has no workers.
    """
    if util.find_spec("distributed") is None:
        raise OptionError(f"A cluster needs dask.distributed: {install('conformance')}.")
    from distributed import Client, KilledWorker, as_completed

    try:
        client = Client(address, timeout=_SECONDS)
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(
            f"No Dask scheduler answers at {address!r}: {error}. Start one (dask scheduler), or run without a cluster."
        ) from error
    with client:
        if not client.scheduler_info()["workers"]:
            raise OptionError(f"The Dask scheduler at {address!r} has no workers. Start some: dask worker {address}.")
        known = list(cases)
        modules = os.environ.get(plugins.VARIABLE, "")
        futures = client.map(_run_here, known, plan=plan, modules=modules, pure=False, retries=3)
        of = dict(zip((future.key for future in futures), known, strict=True))
        for future in as_completed(futures):
            case = of[future.key]
            try:
                yield case, future.result()
            except KilledWorker as error:  # every worker that had it died
                note = f"the cluster: {' '.join(str(error).split())}"
                yield (
                    case,
                    [ResultRow(case.name, b, e, CRASHED, note=note) for b in plan.builders for e in plan.executors],
                )


def _run_here(case: Case, plan: Plan, modules: str = "") -> Sequence[ResultRow]:
    """Run one case in a process that belongs to this thread of the Dask worker; `modules` register operators."""
    worker: Any = getattr(_own, "worker", None)
    if worker is None or _own.asked != (plan.seconds, plan.memory, modules):
        if worker is not None:
            worker.close()
        os.environ[plugins.VARIABLE] = modules  # which the process inherits
        _own.asked = plan.seconds, plan.memory, modules
        _own.worker = worker = Worker(plan.seconds, plan.memory)
        atexit.register(worker.close)
    return run_case(case, plan, worker)
