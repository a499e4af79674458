"""The verdicts on a gradient, in the words that `check`, `compare`, the suite and the exported tests share."""

from __future__ import annotations

RIGHT = "right"
WRONG = "wrong"
CONVENTION = "convention"
UNDECIDED = "undecided"
REFUSED = "refused"
UNSUPPORTED = "not supported"
CRASHED = "crashed"
TIMED_OUT = "timed out"
OUT_OF_MEMORY = "out of memory"

VERDICTS = {
    RIGHT: "rounding explains the difference from the true gradient",
    WRONG: "the difference from the true gradient is larger than rounding explains, or the result is no gradient at all",
    CONVENTION: "there is no derivative at this point, which is a kink, and the answer is a valid choice",
    UNDECIDED: "nobody can say: rounding or the range of the type hides the answer, the oracles disagree, or none applies",
    REFUSED: "the builder says that it does not make this gradient",
    UNSUPPORTED: "the executor says that it does not support an operator, a type or an opset, or the model itself",
    CRASHED: "the process ended, or there was an error that is neither a refusal nor a lack of support",
    TIMED_OUT: "there was no answer within the time limit",
    OUT_OF_MEMORY: "there was no answer within the memory limit",
}
FAULTS = frozenset((WRONG, CRASHED, TIMED_OUT, OUT_OF_MEMORY))

MISSING = "missing"
VARIES = "differs from run to run"
REMEMBERS = "depends on the run before"

OF_SIDES = {  # the words that only a comparison of two sides needs
    MISSING: "this side has no such tensor; the sentence below says why",
    VARIES: "two runs with the same inputs differ",
    REMEMBERS: "the result changes if the executor ran other inputs before",
}
