"""Known limitations: faults that are expected, as data with a reason. One that no longer holds fails the run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.known.records import read
from refgrad.conformance.verdicts import CONVENTION, RIGHT, VERDICTS
from refgrad.errors import LimitationsError, choices, did_you_mean

TABLE = "limitation"
EXPLAINABLE = tuple(verdict for verdict in VERDICTS if verdict not in (RIGHT, CONVENTION))


@dataclass(frozen=True)
class Limitation:
    """One entry: the rows that it is about, and why. A field that is empty is about every row.

    `case` is a pattern in which * stands for any characters, ? for one, [...] for one of several.
    """

    reason: str
    builder: str = ""
    executor: str = ""
    operator: str = ""
    case: str = ""
    verdict: str = ""

    def concerns(self, row: ResultRow, operator: str) -> bool:
        """True if it is about the case, builder and executor of `row`, whatever the verdict."""
        return (
            self.builder in ("", row.builder)
            and self.executor in ("", row.executor)
            and self.operator in ("", operator)
            and (not self.case or fnmatchcase(row.case, self.case))
        )

    def explains(self, row: ResultRow, operator: str) -> bool:
        """True if it is about `row`, and the verdict is the one that it names."""
        expected = (self.verdict,) if self.verdict else EXPLAINABLE
        return row.verdict in expected and self.concerns(row, operator)

    def __str__(self) -> str:
        texts = (f"{f.name} {getattr(self, f.name)!r}" for f in fields(self) if f.name != "reason")
        return ", ".join(entry for entry in texts if not entry.endswith("''"))


KEYS = tuple(field.name for field in fields(Limitation))


@dataclass(frozen=True)
class Limitations:
    """The entries of a file. `operators` of the methods has the operator of every case, by the case's name."""

    entries: tuple[Limitation, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Limitations:
        """Read a TOML file: an array of tables, each an entry.

            [[limitation]]
            executor = "ort-cpu"
            operator = "Resize"
            verdict = "not supported"
            reason = "no kernel for antialias with cubic interpolation"

        :raises LimitationsError: it cannot be read, is no TOML, or has an entry that is not as it has to be.
        """
        records = read(path, TABLE, dict.fromkeys(KEYS, str), optional=KEYS, error=LimitationsError)
        return cls(tuple(_entry(record.values, record.where) for record in records))

    def covers(self, row: ResultRow, operators: Mapping[str, str]) -> Limitation | None:
        """The first entry that explains `row`."""
        operator = operators.get(row.case, "")
        return next((entry for entry in self.entries if entry.explains(row, operator)), None)

    def covers_model(self, row: ResultRow, operators: Mapping[str, str]) -> bool:
        """True if an entry explains what the executor makes of the model itself: its field `verdict` is that one, or absent."""
        operator = operators.get(row.case, "")
        return any(entry.verdict in ("", row.forward) and entry.concerns(row, operator) for entry in self.entries)

    def stale(
        self, rows: Iterable[ResultRow], operators: Mapping[str, str], *, complete: bool = True
    ) -> list[tuple[Limitation, str]]:
        """The entries that no row needs, and why.

        :param complete: `rows` has every case. Otherwise, an entry that is about none of them may be about others.
        """
        known = list(rows)
        stale_entries = []
        for entry in self.entries:
            about = [row for row in known if entry.concerns(row, operators.get(row.case, ""))]
            if any(entry.explains(row, operators.get(row.case, "")) for row in about):
                continue
            if about:
                verdicts = sorted({row.verdict for row in about})
                stale_entries.append(
                    (entry, f"no longer holds: what it is about is {choices(verdicts)}, rows: {len(about)}")
                )
            elif complete:
                stale_entries.append((entry, "matches nothing that was run"))
        return stale_entries


def _entry(entry: Mapping[str, Any], where: str) -> Limitation:
    if "reason" not in entry:
        raise LimitationsError(f"{where} has no reason. Say in one sentence why this is so.")
    if not entry.keys() & {"operator", "case"}:
        raise LimitationsError(f"{where} has neither operator nor case. Give one of them, or both.")
    if entry.get("verdict", EXPLAINABLE[0]) not in EXPLAINABLE:
        raise LimitationsError(
            f"{where}: verdict is {entry['verdict']!r}.{did_you_mean(entry['verdict'], EXPLAINABLE)} "
            f"There are {choices(EXPLAINABLE)}."
        )
    return Limitation(**entry)
