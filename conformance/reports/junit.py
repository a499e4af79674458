"""The results as JUnit's XML, which every CI server reads: a suite for each builder and executor, a test for each case."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.judge.running.results import Pair, Results
from refgrad.conformance.verdicts import CONVENTION, FAULTS, RIGHT, VERDICTS
from refgrad.escaping import printable, shell_line

_PASSED = (RIGHT, CONVENTION)


def report(results: Results) -> str:
    """Return the XML. A fault is a failure; a row that is neither right nor a fault is skipped, and says why."""
    root = ElementTree.Element("testsuites", name="refgrad conformance")
    by_pair: dict[Pair, list[ResultRow]] = {pair: [] for pair in results.pairs}
    for row in sorted(results.rows, key=lambda row: row.case):
        by_pair[row.builder, row.executor].append(row)
    for (builder, executor), rows in by_pair.items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": _text(f"{builder} on {executor}")} | _numbers(rows))
        for row in rows:
            operator = results.cases[row.case].operator
            test = ElementTree.SubElement(
                suite,
                "testcase",
                classname=_text(f"{builder}.{executor}.{operator}"),
                name=_text(row.case),
                time=f"{row.seconds:.3f}",
            )
            if row.verdict in _PASSED:
                continue
            message = _text(f"{row.verdict}: {row.note or VERDICTS[row.verdict]}")
            if row.verdict in FAULTS:
                failure = ElementTree.SubElement(test, "failure", message=message, type=row.verdict)
                failure.text = _details(results, row)
            else:
                ElementTree.SubElement(test, "skipped", message=message)
    for name, value in _numbers(results.rows).items():
        if name != "skipped":  # not an attribute of the root
            root.set(name, value)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _numbers(rows: Sequence[ResultRow]) -> dict[str, str]:
    verdicts = [row.verdict for row in rows]
    failures = sum(verdict in FAULTS for verdict in verdicts)
    return {
        "tests": str(len(verdicts)),
        "failures": str(failures),
        "errors": "0",
        "skipped": str(sum(verdict not in FAULTS and verdict not in _PASSED for verdict in verdicts)),
        "time": f"{sum(row.seconds for row in rows):.3f}",
    }


def _details(results: Results, row: ResultRow) -> str:
    told = [f"oracles: {', '.join(row.witnesses) or 'none'}", f"against: {', '.join(row.against) or 'none'}"]
    if row.relative is not None and row.allowed is not None:
        told.append(f"relative error {row.relative:.3g}, of which {row.allowed:.3g} is explained")
    if row.side:
        told.append(f"at fault: the {row.side} {getattr(row, row.side)}")
    if row.forward:
        told.append(f"the model itself on {row.executor}: {row.forward}: {row.forward_note}")
    return "\n".join(map(_text, [*told, f"once more: {shell_line(results.command(row))}"]))


def _text(text: str) -> str:
    """`text` on one line, without what XML cannot hold. ElementTree escapes its markup."""
    return printable(" ".join(text.split()))
