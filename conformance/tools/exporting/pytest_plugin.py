"""The suite as tests of pytest: `pytest --refgrad-backend ort-cpu`. The options are in `pytest_refgrad`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pytest

from refgrad.conformance.case import Case
from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.judge.running.limitations import Limitation, Limitations
from refgrad.conformance.judge.running.runner import Plan, run_case
from refgrad.conformance.judge.running.suite import require
from refgrad.conformance.tools.exporting.expected import chosen
from refgrad.conformance.verdicts import CONVENTION, FAULTS, RIGHT
from refgrad.errors import RefgradError
from refgrad.escaping import printable
from refgrad.worker import Worker

_ROW = "refgrad"  # the property of a report that holds the verdict


class Suite:
    """Collects a test for each case, after the tests of named files, and fails the run on a stale limitation."""

    def __init__(
        self,
        config: pytest.Config,
        executor: str,
        builder: str,
        operators: Sequence[str] | None,
        limitations: str | os.PathLike[str] | None,
    ) -> None:
        self.plan = Plan((builder,), (executor,))
        try:
            require(self.plan)
            self.limitations = Limitations.read(limitations) if limitations else Limitations()
            self.cases = chosen(operators)
        except RefgradError as error:
            raise pytest.UsageError(str(error)) from error
        self.operators = {case.name: case.operator for case in self.cases.values()}
        self.whole = operators is None
        self.worker = Worker(self.plan.seconds, self.plan.memory)
        self.rows: list[ResultRow] = []
        self.stale: list[tuple[Limitation, str]] = []
        self._counts = not hasattr(config, "workerinput")  # a process of xdist sees only its own tests
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args = []  # no file is named: the suite alone

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Add the tests of the suite, before -k selects among them."""
        collector = _Collector.from_parent(session, name="refgrad", nodeid="refgrad", suite=self)
        report = collector.ihook.pytest_make_collect_report(collector=collector)
        session.ihook.pytest_collectreport(report=report)
        items += report.result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take down the verdict."""
        if report.when == "call" and (found := dict(report.user_properties).get(_ROW)):
            self.rows.append(ResultRow(**json.loads(str(found))))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail where a known failure no longer holds, or matches no row."""
        self.worker.close()
        if self._counts:
            complete = self.whole and len(self.rows) == len(self.cases)
            self.stale = self.limitations.stale(self.rows, self.operators, complete=complete)
            if self.stale and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List the known failures that no longer hold."""
        if self.stale:
            terminalreporter.section("known failures that no longer hold", red=True)
            for entry, why in self.stale:
                terminalreporter.line(printable(f"{entry}: {why} ({entry.reason})"))


class _Collector(pytest.Collector):
    def __init__(self, suite: Suite, **rest: Any) -> None:
        super().__init__(**rest)
        self.suite = suite

    def collect(self) -> Iterable[pytest.Item]:
        return list(self._items())

    def _items(self) -> Iterator[pytest.Item]:
        for name, case in self.suite.cases.items():
            yield _Gradient.from_parent(self, name=name, case=case, suite=self.suite)


class _FaultError(Exception):
    """A verdict that fails a test; the message is all there is to see."""


class _Gradient(pytest.Item):
    def __init__(self, case: Case, suite: Suite, **rest: Any) -> None:
        super().__init__(**rest)
        self.case, self.suite = case, suite

    def runtest(self) -> None:
        (row,) = run_case(self.case, self.suite.plan, self.suite.worker)
        self.user_properties.append((_ROW, json.dumps(asdict(row))))
        if known := self.suite.limitations.covers(row, self.suite.operators):
            pytest.xfail(printable(f"{row.verdict}: {known.reason}"))
        if row.verdict in FAULTS:
            raise _FaultError(_described(row))
        if row.verdict not in (RIGHT, CONVENTION):
            pytest.skip(_described(row))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, _FaultError) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[os.PathLike[str], None, str]:
        return self.path, None, self.name


def _described(row: ResultRow) -> str:
    who = ", ".join((*row.witnesses, *(f"not {name}" for name in row.against)))
    told = [f"{row.verdict}: the gradient by {row.builder} on {row.executor}, case {row.case}", row.note]
    told += [who and f"so say {who}", row.side and f"at fault: the {row.side}"]
    told += [row.forward and f"the model itself on {row.executor}: {row.forward}: {row.forward_note}"]
    return "\n".join(printable(line) for line in told if line)
