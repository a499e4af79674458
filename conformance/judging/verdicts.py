"""The verdicts on one builder's gradient of one case, as one executor computed it."""

from __future__ import annotations

import re
from dataclasses import dataclass

AGREED = "agreed"
WRONG = "wrong"
CONVENTION = "convention"
REFUSED = "refused"
UNSUPPORTED = "not supported"
CRASHED = "crashed"
TIMED_OUT = "timed out"
OUT_OF_MEMORY = "out of memory"
INCONCLUSIVE = "inconclusive"

VERDICTS = {
    AGREED: "the oracles that apply say that it is right",
    WRONG: "two oracles or more say that it is wrong, and none that it is right; or it is no gradient at all",
    CONVENTION: "there is no derivative at this point, and the answer is one of the conventions",
    REFUSED: "the builder made no gradient and said so",
    UNSUPPORTED: "the executor does not run the gradient, or the model itself",
    CRASHED: "the process ended, the builder raised an exception that is not a refusal, or the executor runs the model "
    "and fails on the gradient",
    TIMED_OUT: "there was no answer within the time limit",
    OUT_OF_MEMORY: "there was no answer within the memory limit",
    INCONCLUSIVE: "the oracles disagree, or none applies",
}
NO_KERNEL = re.compile(  # what executors say of a model that they do not run
    "no kernel|not a registered|NOT_IMPLEMENTED|NotImplemented|no schema|opset|IR version|_inlfunc_|data type is not supported",
    re.I,
)
FAULTS = frozenset((WRONG, CRASHED, TIMED_OUT, OUT_OF_MEMORY))


@dataclass(frozen=True)
class ResultRow:
    """The verdict on one case, builder and executor.

    `witnesses` are the oracles that say so, `against` those that say otherwise. `relative` is the largest error of an element
    relative to the largest element (or of a directional derivative, to the norm), and `allowed` what is explained; None where
    nothing was compared.
    """

    case: str
    builder: str
    executor: str
    verdict: str
    witnesses: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    relative: float | None = None
    allowed: float | None = None
    note: str = ""
    seconds: float = 0.0
