"""A known difference: where dialect "ort" differs from the graph of ONNX Runtime's builder, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = {
    "refused": "the builder refuses, or writes an invalid graph",
    "fails": "its graph does not run, or ends the process",
    "wrong": "its graph runs, and the result is not the gradient",
    "kernel": "refgrad's graph does not run, because a kernel that it needs is at fault; the other graph may not run either",
    "form": "both graphs are right, with different nodes",
}


@dataclass(frozen=True)
class KnownDifference:
    """Why cases of some operators come out differently. docs/parity.md shows what was measured of each.

    :param kind: one of `KINDS`.
    :param reason: what ONNX Runtime's builder does and what refgrad does instead, in a sentence or two.
    :param operators: their names; by default every operator.
    :param cases: a regular expression that is searched for in the name of the case; by default every case.
    """

    kind: str
    reason: str
    operators: tuple[str, ...] = ()
    cases: str = ""

    def covers(self, operator: str, kind: str, case: str) -> bool:
        """True if this is the reason for what came of `case`."""
        named = not self.operators or operator in self.operators
        return kind == self.kind and named and bool(re.search(self.cases, case))
