"""The result of a comparison of two gradients: the verdicts on every tensor, and the faulty nodes of each side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from refgrad.conformance.judge.nan.nonfinite import Origin
from refgrad.conformance.locating.bisection import Bisected
from refgrad.conformance.locating.location import Located
from refgrad.conformance.locating.paths import ErrorPath, Neighbourhood
from refgrad.conformance.locating.repeating import Unsteady
from refgrad.conformance.problems.ranges import OutOfRange
from refgrad.conformance.verdicts import CONVENTION, RIGHT, WRONG
from refgrad.markup import BAD, html_table

# The kinds of a tensor: a result of the model, and a gradient
OUTPUT, GRADIENT = "output", "gradient"


@dataclass(frozen=True)
class Element:
    """An element that is off: its place, the expected number and the actual one."""

    at: tuple[int, ...]
    expected: float
    found: float


@dataclass(frozen=True)
class Maps:
    """Pictures of a tensor as a matrix, made smaller: the expected numbers, the actual ones and the difference."""

    expected: tuple[tuple[float, ...], ...]
    found: tuple[tuple[float, ...], ...]
    difference: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Seen:
    """The verdict on a tensor of one side, such as `RIGHT`, and the reason. If it is wrong, `cause` is what made it so, if that
    is known, `elements` are those that are furthest off, and `maps` show all of them.
    """

    verdict: str
    reason: str = ""
    error: float | None = None
    allowed: float | None = None
    cause: str = ""
    elements: tuple[Element, ...] = ()
    maps: Maps | None = None


@dataclass(frozen=True)
class Tensor:
    """One tensor of a comparison.

    `kind` is "output" or "gradient"; `of` are the names in the model that it belongs to, and `how` a recorded one was found.
    `difference` is the largest one between the sides, relative to the largest element of the judge's.
    """

    name: str
    kind: str
    of: tuple[str, ...]
    how: str
    a: Seen
    b: Seen
    difference: float | None = None

    @property
    def verdict(self) -> str:
        """The verdict on both sides together, in words."""
        both = self.a.verdict, self.b.verdict
        if both[0] == both[1]:
            return {RIGHT: "they agree", WRONG: "both are wrong"}.get(both[0], both[0])
        for name, verdict in zip("ab", both, strict=True):
            if verdict == WRONG:
                return f"{name} is wrong"
        return next(f"{name}: {verdict}" for name, verdict in zip("ab", both, strict=True) if verdict != RIGHT)

    @property
    def ok(self) -> bool:
        """True if both sides are right, or follow a convention at a kink."""
        return {self.a.verdict, self.b.verdict} <= {RIGHT, CONVENTION}


def seen_of(tensor: Tensor, place: int) -> Seen:
    """The verdict on one side of a tensor: 0 is `a`, 1 is `b`."""
    return (tensor.a, tensor.b)[place]


@dataclass(frozen=True)
class Sided:
    """The findings about one side: its failure, wrong rules and kernels, values out of range, and runs that differ.

    `unsearched` is what the search for faults has not looked at to the end, with the reason, "" if the comparison was stopped.
    `paths` are the ways of the errors from the nodes at fault to wrong tensors, `around` the graphs around these nodes. A
    recording has none of these, and `between` are the nodes each of which explains its verdicts if it alone is at fault.
    """

    label: str
    failed: str = ""
    rules: Bisected | None = None
    kernels: Located | None = None
    origins: tuple[Origin, ...] = ()
    unmatched: Mapping[str, str] = field(default_factory=dict)
    matched: int = 0
    unsteady: Unsteady | None = None
    ranges: tuple[OutOfRange, ...] = ()
    unsearched: Mapping[str, str] = field(default_factory=dict)
    paths: tuple[ErrorPath, ...] = ()
    around: tuple[Neighbourhood, ...] = ()
    is_recorded: bool = False
    between: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison: every tensor, and each side. `judge` says who confirmed the judge's gradient.

    If the comparison was stopped once verdicts were known, `stopped` says why, and `unjudged` which part of them is missing.
    """

    tensors: tuple[Tensor, ...]
    a: Sided
    b: Sided
    feeds: str
    seed: int
    judge: str
    versions: Mapping[str, str] = field(default_factory=dict)
    stopped: str = ""
    unjudged: str = ""

    @property
    def ok(self) -> bool:
        """True if there is a gradient to compare, and both sides are right in every tensor."""
        is_any = any(tensor.kind == GRADIENT for tensor in self.tensors)
        return is_any and not self.is_different and not self.unjudged

    @property
    def is_different(self) -> bool:
        """True if a side has no gradient, or is not right in a tensor that was judged."""
        return bool(self.a.failed or self.b.failed) or not all(tensor.ok for tensor in self.tensors)

    def _repr_html_(self) -> str:
        """The tensors, those that differ first, and who is at fault, for a notebook."""
        rows = [
            {
                "tensor": one.name,
                "kind": one.kind,
                "a": one.a.verdict,
                "b": one.b.verdict,
                "difference": one.difference,
                "": one.verdict,
            }
            for one in sorted(self.tensors, key=lambda tensor: tensor.ok)
        ]
        notes = [f"{side.label}: {side.failed}" for side in (self.a, self.b) if side.failed]
        notes.append(f"Judge: {self.judge}. Feeds: {self.feeds}; seed {self.seed}.")
        title = f"{self.a.label} (a) and {self.b.label} (b): {'ok' if self.ok else 'DIFFERENT'}"
        return html_table(rows, title, notes, {WRONG: BAD})
