"""Every error that refgrad raises. Each names the thing, lists what is valid, and says what to do next.

All of them derive from `RefgradError`, so one `except` catches what refgrad refuses and nothing else.
The executors raise the same classes: this module imports nothing of the differentiator.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RefgradError(Exception):
    """Base of every error below."""


class InvalidModelError(RefgradError):
    """The model cannot be read, is refused by `onnx.checker`, or uses what this version of onnx does not know."""


class UnknownNameError(RefgradError):
    """A name in `wrt`, `outputs` or a list of operators that the model does not have, has twice, or that is no float."""


class OptionError(RefgradError, ValueError):
    """An argument outside its list of values, or two arguments that exclude each other."""


class OptionTypeError(RefgradError, TypeError):
    """An argument of another type than it has to be."""


class NoGradientError(RefgradError):
    """Operators between the inputs and the outputs have no gradient here. `nodes` holds their names."""

    def __init__(self, message: str, nodes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.nodes = nodes


class LoweringError(RefgradError):
    """An operator that cannot be written in ai.onnx operators, or a form of one. `node` is the name of its node."""

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message)
        self.node = node


class ExpansionError(RefgradError):
    """A node Gradient that defines no derivative: its names, inputs and outputs do not go together. `node` is its name."""

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message)
        self.node = node


class RuleError(RefgradError):
    """A rule or a lowering does not fit the schema of its operator, or returned what cannot be an adjoint."""


class UnknownOperatorError(RuleError, AttributeError):
    """A rule or a lowering uses an operator, a primitive or a method of `op` that does not exist."""


class PluginError(RefgradError):
    """A module that brings operators of another package cannot be imported."""


class FeedError(RefgradError):
    """Feeds with a wrong name, shape or dtype, or without an input that has no default."""


class BackendError(RefgradError):
    """An executor that does not exist, is not available here, or cannot run the model."""


class BuilderError(RefgradError):
    """ONNX Runtime's builder made no gradient. `verdict` is "missing", "refused", "crashed" or "timed out"."""

    def __init__(self, verdict: str, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


class WorkerError(RefgradError):
    """A call in another process gave nothing. `verdict` is "raised", "crashed", "timed out" or "out of memory".

    `raised` is the name of the exception's class where it raised.
    """

    def __init__(self, verdict: str, message: str, raised: str = "") -> None:
        super().__init__(message)
        self.verdict, self.raised = verdict, raised


class AnswerError(RefgradError):
    """A builder returned what is no gradient model, or an executor what are not the outputs of the model."""


class GraphvizError(RefgradError):
    """The program `dot`, which lays out pictures, is not there or fails."""


class JournalError(RefgradError):
    """A journal of a conformance run that cannot be written, or gone on with."""


class ResultsError(RefgradError):
    """A file of conformance results cannot be read or is malformed, or results do not go together."""


class RecordsError(RefgradError):
    """A file of records (refgrad.conformance.records) cannot be read, is malformed, or has a record that says too little."""


class LimitationsError(RecordsError):
    """A file of known limitations cannot be read, is malformed, or has an entry that says too little."""


class UnconfirmedError(RefgradError):
    """A case makes no test with expected values: fewer than two oracles confirm them, or there is no single right answer."""


class OutputFileError(RefgradError):
    """A result cannot be written where it was asked for."""


def choices(names: Iterable[str], limit: int = 12) -> str:
    """Return `'a', 'b', 'c'`, abridged after `limit` names: what an error lists as valid."""
    return abridged(map(repr, names), limit)


def abridged(names: Iterable[str], limit: int | None = 3) -> str:
    """Return `a, b, c and 145 more`: the names, or the first `limit` of them and the number of the others."""
    listed = list(names)
    if limit is None or len(listed) <= limit:
        return ", ".join(listed) or "none"
    return f"{', '.join(listed[:limit])} and {len(listed) - limit} more"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` Did you mean 'x'?` where one of `names` is close to `name`, else nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
