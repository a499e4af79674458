"""The rows of results: the verdict on one builder's gradient of one case, as one executor computed it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# What executors say of something that they do not support. The runners of the exported suite have the same phrases.
PHRASES = (
    "not implemented",
    "not_implemented",  # ONNX Runtime's status code
    "notimplemented",  # Python's exception
    "unimplemented",
    "not supported",
    "not support ",  # "does not support", "do not support"
    "unsupported",
    "only support",
    "are supported",
    "is supported",
    "registered or supported",
    "no kernel",
    "could not find an implementation",
    "no implementation for",  # onnx.reference
    "no registered implementation",
    "not a registered",
    "no schema",
    "no opset",
    "guarantees* support for",  # ONNX Runtime of an opset that it does not know
    "ir version",
    "no conversion rule",  # OpenVINO
    "of input parameter (",  # ONNX Runtime of a type that its operator does not take
    "invalid tensor type",  # ONNX Runtime for JavaScript
    "cannot be fed",  # refgrad's own backends
    "_inlfunc_",  # the body of a function that ONNX Runtime has inlined
)
_EXCEPTIONS = ("NotImplementedError", "BackendIsNotSupposedToImplementIt")  # of Python, and of onnx.backend
# Of Python, whatever they say: "'<' not supported between instances of 'list' and 'int'".
_BUGS = ("AttributeError", "LookupError", "NameError", "RecursionError", "TypeError", "ZeroDivisionError")
BUILDER, EXECUTOR = "builder", "executor"  # the sides that can be at fault


def says_unsupported(message: str, classes: Iterable[str] = ()) -> bool:
    """True if an error says that something is not supported. Python's exceptions for bugs, such as TypeError, never do.

    :param classes: the names of the exception's class and of those that it derives from.
    """
    names = set(classes)
    if not names.isdisjoint(_BUGS):
        return False
    return not names.isdisjoint(_EXCEPTIONS) or any(phrase in message.lower() for phrase in PHRASES)


@dataclass(frozen=True)
class ResultRow:
    """The verdict on one case, builder and executor.

    `witnesses` are the oracles that say so, `against` those that say otherwise. `relative` is the largest error of an element
    relative to the largest element (or of a directional derivative, to the norm), and `allowed` the explained error; None where
    nothing was compared. `side` is the side at fault, "" where it is not known or nothing is a fault. `forward` is the verdict
    on the executor's results of the model itself, "" where they are right or nobody asked, and `forward_note` says why.
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
    side: str = ""
    forward: str = ""
    forward_note: str = ""
