"""Builders: who makes a gradient model of a question. Each is called in a process of its own (`refgrad.conformance.runner`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import refgrad
from refgrad.conformance.oracles.evidence import Built
from refgrad.conformance.question import Question
from refgrad.errors import OptionError, choices, did_you_mean


@dataclass(frozen=True)
class Builder:
    """`build` makes a gradient model, or raises. `missing` says what has to be installed, "" where it is."""

    name: str
    about: str
    build: Callable[[Question], Built]
    missing: Callable[[], str] = lambda: ""


def _refgrad(dialect: str, question: Question) -> Built:
    made = refgrad.gradient(question.model, question.wrt, list(question.cotangents), dialect=dialect)
    metadata = {entry.key: entry.value for entry in made.metadata_props}
    return Built(made, json.loads(metadata["refgrad.cotangents"]), json.loads(metadata["refgrad.gradients"]))


BUILDERS = {
    builder.name: builder
    for builder in (
        Builder("refgrad", "refgrad in plain ai.onnx operators", partial(_refgrad, "onnx")),
        Builder("refgrad:ort", "refgrad with the training operators of ONNX Runtime", partial(_refgrad, "ort")),
    )
}


def get_builder(name: str) -> Builder:
    """The builder of that name.

    :raises OptionError: there is none.
    """
    if name not in BUILDERS:
        raise OptionError(f"There is no builder {name!r}.{did_you_mean(name, BUILDERS)} There are {choices(BUILDERS)}.")
    return BUILDERS[name]


def build(name: str, question: Question) -> Built:
    """The gradient that the builder makes.

    :raises Exception: whatever it raises: it refuses the question.
    """
    return get_builder(name).build(question)
