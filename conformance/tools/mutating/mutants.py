"""A mutant is one change of a rule or of a function body. Its outcome says which case caught it, and with which verdict.

The change is in the cotangents that the rule returns (a factor, the sign, an order), or in one emission: `op.Sub(a, b)` becomes
`op.Sub(b, a)`. A change is only a mutant if it changes the gradient model of some case. A mutant is caught if the judge says
wrong, or if its gradient fails and the unbroken one does not. An undecided one does not count.

An operator without a rule is differentiated through its function body, and a mutant is a body with one change: in its results,
or in one emission. It is also caught if the body computes another result than the kernel of the operator, which does not use
the body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from refgrad.conformance import verdicts
from refgrad.conformance.tools.mutating.survivors import Equivalent, equivalents

FAILS = "fails"  # the verdict on a broken gradient that cannot be built or run
WITH_REFGRAD = "wrong beside refgrad"
WRONG_RESULT = "wrong result"  # the verdict on a body that differs from the kernel
KERNEL = "kernel"  # in the place of an oracle
COLUMNS = {
    "mutants": "in all",
    verdicts.WRONG: "the judge says wrong, although refgrad's own gradient, which it uses, is broken in the same way",
    WITH_REFGRAD: "it says wrong only with refgrad's unbroken gradient as an oracle, as it has when it judges another builder",
    WRONG_RESULT: "the judge does not say wrong, but a function body computes another result than the operator's kernel",
    FAILS: "the gradient cannot be built or run",
    "survived": "no case tells the mutant from the rule or the body",
}


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of one rule. `place` is the input whose cotangent is changed, or the emission with its source text."""

    operator: str
    place: str
    change: str

    def __str__(self) -> str:
        return f"{self.operator}: {self.place}: {self.change}"

    @property
    def reason(self) -> str:
        """The reason why it may survive, or "" where none is known."""
        return "" if self.row is None else self.row.reason

    @property
    def row(self) -> Equivalent | None:
        """The row of the table of survivors that covers it."""
        return next((row for row in equivalents() if row.matches(self.operator, self.place, self.change)), None)


@dataclass(frozen=True)
class Outcome:
    """The fate of a mutant: the case that caught it, the verdict and its oracles; "" and () if no case did.

    `alone`: it is caught although refgrad's own gradient, which the judge uses, is broken in the same way. Otherwise the judge
    needed the unbroken gradient as an oracle, as it has when it judges another builder. `tried` counts the cases whose
    gradient model the mutant changes. `tested`: a test of the caller notices it, too.
    """

    mutant: Mutant
    case: str = ""
    verdict: str = ""
    witnesses: tuple[str, ...] = ()
    alone: bool = False
    tried: int = 0
    note: str = ""
    tested: bool = False

    @property
    def caught(self) -> bool:
        """True if any case caught it."""
        return bool(self.case)

    @property
    def column(self) -> str:
        """The entry of `COLUMNS` that counts it."""
        if not self.caught:
            return "survived"
        return self.verdict if self.alone else WITH_REFGRAD


def summary(outcomes: Sequence[Outcome], operators: Sequence[str] = ()) -> dict[str, Any]:
    """The outcomes counted by operator and by oracle, and every survivor, for JSON.

    :param operators: those that were surveyed; of some there may be no mutant.
    """
    counts = {name: Counter(dict.fromkeys(COLUMNS, 0)) for name in operators}
    for one in outcomes:
        count = counts.setdefault(one.mutant.operator, Counter(dict.fromkeys(COLUMNS, 0)))
        count["mutants"] += 1
        count[one.column] += 1
    witnesses = Counter(witness for one in outcomes for witness in one.witnesses)
    survivors = [asdict(one.mutant) for one in outcomes if not one.caught]
    return {"operators": counts, "witnesses": dict(sorted(witnesses.items())), "survivors": survivors}
