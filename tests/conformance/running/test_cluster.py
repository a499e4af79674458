"""The same run on a Dask cluster: the same verdicts, and nothing lost when a worker is killed in mid-run."""

from __future__ import annotations

import logging
import os
import signal
from importlib.util import find_spec

import pytest

from refgrad.conformance.judge.running.cluster import _run_here, run_on_cluster
from refgrad.conformance.judge.running.runner import Plan
from refgrad.conformance.judge.running.sources import select, tables
from refgrad.conformance.judge.running.suite import run_suite
from refgrad.errors import OptionError
from refgrad.tables import plugins

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("distributed") is None, reason="Dask is not installed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # the collector closes sockets of the cluster
]

PLAN = Plan(("refgrad",))


@pytest.fixture(scope="module")
def cluster():
    import distributed

    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=logging.CRITICAL
    ) as started:
        yield started


def few():
    return list(select(tables(), ["Relu", "Softmax", "Concat"], values="smooth"))[:40:2]


def test_a_worker_that_is_killed_loses_nothing(cluster):
    here = run_suite(few(), PLAN, lanes=2)
    process = next(iter(cluster.workers.values())).process
    found = {}
    for number, (case, rows) in enumerate(run_on_cluster(cluster.scheduler_address, few(), PLAN)):
        assert case.name not in found
        found[case.name] = rows
        if number == 2:
            os.kill(process.pid, signal.SIGKILL)
    verdicts = {row.case: (row.verdict, row.witnesses, row.relative) for row in here.rows}
    assert {name: (row.verdict, row.witnesses, row.relative) for name, [row] in found.items()} == verdicts


def test_the_workers_import_what_the_caller_imports(monkeypatch):
    monkeypatch.setenv(plugins.VARIABLE, "")
    [case] = few()[:1]
    [row] = _run_here(case, PLAN, "nowhere")
    assert "The module 'nowhere', named by --import or REFGRAD_IMPORT, cannot be imported" in row.note
    [row] = _run_here(case, PLAN, "")
    assert row.verdict == "right"


def test_a_cluster_that_is_not_there_is_named():
    with pytest.raises(OptionError, match=r"No Dask scheduler answers at 'tcp://127\.0\.0\.1:1'"):
        list(run_on_cluster("tcp://127.0.0.1:1", few(), PLAN))
    with pytest.raises(OptionError, match="No Dask scheduler answers at 'nonsense://x'"):
        list(run_on_cluster("nonsense://x", few(), PLAN))
