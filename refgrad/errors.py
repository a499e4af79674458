"""Every error that refgrad raises. A message names the thing, lists what is valid, and says what to do next.

All errors derive from `RefgradError`: one `except` catches everything that refgrad refuses, and nothing else. The executors
raise the same classes, so this module imports nothing from the rest of refgrad.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RefgradError(Exception):
    """Base of every error below."""


class ModelWarning(UserWarning):
    """A warning beside a result: a model declares something untrue, or an answer is right and of no use."""


class InvalidModelError(RefgradError):
    """A model that cannot be read, that `onnx.checker` refuses, or that needs a newer version of onnx."""


class UnknownNameError(RefgradError, ValueError):
    """A name in `wrt`, `outputs` or a list of operators that does not exist, occurs twice, or is not a float."""


class OptionError(RefgradError, ValueError):
    """An argument with a value that is not allowed, or two arguments that exclude each other.

    `unknown_size` is the sentence about the size that is not known, if the message asks for one.
    """

    def __init__(self, message: str = "", unknown_size: str = "") -> None:
        super().__init__(message)
        self.unknown_size = unknown_size


class OptionTypeError(RefgradError, TypeError):
    """An argument of the wrong type."""


class NoGradientError(RefgradError, RuntimeError):
    """Operators between the inputs and the outputs have no gradient. `nodes` are the names of their nodes."""

    def __init__(self, message: str, nodes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.nodes = nodes


class LoweringError(RefgradError):
    """An operator, or one form of it, that cannot be written in ai.onnx operators. `node` is the name of its node."""

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message)
        self.node = node


class ExpansionError(RefgradError):
    """A node Gradient whose names, inputs and outputs do not fit together. `node` is its name."""

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message)
        self.node = node


class RuleError(RefgradError):
    """A rule or a lowering does not fit the schema of its operator, or returned something that is not a cotangent."""


class BrokenRuleError(RuleError):
    """A rule or a lowering raised, asks for something that does not exist, or returns something that is not a cotangent."""


class UnknownOperatorError(BrokenRuleError, AttributeError):
    """A rule or a lowering uses an operator, a primitive or a method of `op` that does not exist."""


class PluginError(RefgradError):
    """A module that brings operators of another package cannot be imported."""


class FeedError(RefgradError, ValueError):
    """Feeds with a wrong name, shape or dtype, or without an input that has no default."""


class BackendError(RefgradError):
    """An executor that does not exist, is not available here, or cannot run the model."""


class BuilderError(RefgradError):
    """ONNX Runtime's builder did not make a gradient. `verdict` is "missing", "refused", "crashed" or "timed out"."""

    def __init__(self, verdict: str, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


class WorkerError(RefgradError):
    """A call in another process did not return. `verdict` is "raised", "crashed", "timed out" or "out of memory".

    If it raised, `raised` names the exception's class, and `classes` also names the classes that this one derives from.
    """

    def __init__(self, verdict: str, message: str, raised: str = "", classes: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.verdict, self.raised, self.classes = verdict, raised, tuple(classes) or (raised,)


class AnswerError(RefgradError):
    """The builder did not return a gradient model, or the executor did not return the outputs."""


class JournalError(RefgradError):
    """A journal of a conformance run that cannot be written or resumed."""


class ResultsError(RefgradError):
    """A file of conformance results cannot be read or is malformed, or the results of several runs do not fit together."""


class RecordsError(RefgradError):
    """A file of records (`conformance/known/records.py`) cannot be read, is malformed, or has a record that says too little."""


class LimitationsError(RecordsError):
    """A file of known failures cannot be read, is malformed, or has an entry that says too little."""


class UnconfirmedError(RefgradError):
    """A case that cannot become a test: fewer than two oracles confirm its values, or several answers are right."""


class TrainingError(RefgradError):
    """A training that cannot go on: its loss is not finite, or one of its processes ended."""


class NotTrainedError(TrainingError, AttributeError):
    """A result of a training was asked for before the training. `hasattr` is False for it."""


class ConvergenceError(TrainingError):
    """A training of `OrtGradientOptimizer` or `OrtGradientForwardBackwardOptimizer` whose loss is not finite."""


class OutputFileError(RefgradError):
    """A file that cannot be written, or must not be: a command reads it."""


def choices(names: Iterable[str], limit: int = 12) -> str:
    """Return the names in quotes for an error that lists what is valid, the first `limit` of them if there are more."""
    return abridged(map(repr, names), limit)


def abridged(names: Iterable[str], limit: int | None = 3) -> str:
    """Return all names, or the first `limit` of them and the number of the others: `a, b, c and 145 more`."""
    listed = list(names)
    if limit is None or len(listed) <= limit:
        return ", ".join(listed) or "none"
    return f"{', '.join(listed[:limit])} and {len(listed) - limit} more"


def beginning(text: str, length: int) -> str:
    """Return `text`, or the beginning of a longer text and a mark. It ends after a word, unless the first word is longer.

    >>> beginning("its process ended with -6", 16)
    'its process …'
    """
    if len(text) <= length:
        return text
    words = text[: length + 1].rpartition(" ")[0].rstrip()
    return f"{words or text[:length]} …"


def counted(number: int, noun: str, several: str = "") -> str:
    """Return a number with its noun: `1 node`, `2 nodes`.

    :param several: what to say for another number than 1, by default the noun with an s: "element is", "elements are".
    """
    return f"{number} {noun if number == 1 else several or f'{noun}s'}"


def closest(name: object, names: Iterable[str]) -> str:
    """The name among `names` that differs only in upper and lower case, or else the closest name; "" if none is close."""
    listed = list(names)
    alike = [one for one in listed if one.casefold() == str(name).casefold()]
    return next(iter(alike or difflib.get_close_matches(str(name), listed, n=1)), "")


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """` Did you mean 'x'?` where one of `names` is close to `name`, else nothing."""
    close = closest(name, names)
    return f" Did you mean {close!r}?" if close else ""


def message_of(error: BaseException) -> str:
    """The message of a foreign error in one line; "" where it has none, or raises when it is asked for it."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return ""


def of_type(value: object) -> str:
    """The type of a value with its article: `an int`, `a list`, `bytes`, `None`."""
    name = type(value).__name__
    if value is None or name.endswith("s"):
        return "None" if value is None else name
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def raised(error: BaseException) -> str:
    """The class of an exception and what it says, if anything, on one line without a full stop."""
    said = message_of(error).rstrip(". ")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
