"""Tests of gradients: a model, what to feed it, and values that more than one oracle confirms. For any runtime to run."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations
from math import ceil, log10
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from refgrad.conformance.case import Case
from refgrad.conformance.judging.judge import ENOUGH, Trial
from refgrad.conformance.oracles import Built, Evidence, Property, Silent, get_oracle
from refgrad.conformance.oracles.comparison import AGREED, FLOAT64_BITS, SENSITIVE
from refgrad.conformance.questions.kinked import kinks_of
from refgrad.conformance.questions.point import Truth, largest, limits, rounding
from refgrad.conformance.questions.question import Question, ask
from refgrad.conformance.running.runner import examine, testify
from refgrad.conformance.running.sources import tables
from refgrad.errors import UnconfirmedError, UnknownNameError, choices, did_you_mean
from refgrad.protos.external import array_of
from refgrad.tables.schemas import find_schema

ORACLES = ("differences", "reference", "complex-step", "adjoint")  # everybody has these
_TELLING = 0.1  # a test that allows an error of this part of a gradient tells little of it
_LONGEST = 80  # letters in the name of a test


@dataclass(frozen=True)
class Expected:
    """A gradient model, what to feed it and what comes out.

    `feeds` has the inputs of `model`, none with a default, in their order: those of `question.model`, initializers that are
    differentiated, and the cotangents. `gradients` has its outputs in their order, in the type of what each is the gradient of,
    rounded from float64; `outputs` has their names by those in `question.wrt`. An element may be off by `tolerance`, and
    `confirmed` has the oracles that confirm each gradient.
    """

    question: Question
    model: ModelProto
    feeds: dict[str, Any]
    gradients: dict[str, np.ndarray]
    outputs: dict[str, str]
    tolerance: float
    confirmed: dict[str, tuple[str, ...]]


def expect(case: Case, oracles: Sequence[str] = ORACLES) -> Expected:
    """The test that a case makes.

    The tolerance is what rounding explains: of the type over the nodes of the gradient, and by how much the gradient moves
    when intermediate results are rounded.

    :raises UnconfirmedError: there is no single right answer, fewer than two oracles confirm refgrad's, one of them contradicts
        it, or rounding hides it.
    :raises RefgradError: there is nothing to differentiate, or refgrad refuses.
    """
    question = ask(case)
    for name, kinked in question.kinked.items():
        at = f"{np.count_nonzero(kinked)} of {kinked.size} elements are at a kink of {choices(kinks_of(case.model))}"
        raise UnconfirmedError(f"{name}: {at}, where there is no single right answer.")
    trial = Trial(
        question, tuple(said for name in oracles if get_oracle(name).testify for said in _said(name, question))
    )
    truth = trial.truth
    if not truth.gradients:
        raise UnconfirmedError("refgrad builds no gradient of it.")
    if truth.point.draws:
        raise UnconfirmedError(f"{', '.join(truth.point.draws)} draws random numbers: no two executors draw the same.")
    built = Built(truth.model, dict(truth.point.seeds_of), dict(truth.point.names))
    tested = {name: examine(name, question, built) for name in oracles if get_oracle(name).examine}
    properties = [one for found in tested.values() for one in found if isinstance(one, Property)]
    if failed := [p for p in properties if not p.holds]:
        raise UnconfirmedError(f"{failed[0].oracle} contradicts it: {failed[0].note}")
    held = tuple(dict.fromkeys(p.oracle for p in properties))
    confirmed = {name: (*trial.confirmed(name), *held) for name in question.wrt}
    for name, witnesses in confirmed.items():
        if len(witnesses) < ENOUGH or not trial.confirmed(name):
            raise UnconfirmedError(_unconfirmed(trial, name, held, chain.from_iterable(tested.values())))
    model, feeds = _without_defaults(truth.model, question)
    feeds |= {truth.point.seeds_of[output]: value for output, value in question.cotangents.items()}
    gradients = {name: truth.gradients[name].astype(truth.point.dtype(name)) for name in question.wrt}
    allowed = question.tolerance or rounding(len(model.graph.node), question.model)
    return Expected(
        question,
        model,
        {value.name: np.asarray(feeds[value.name]) for value in model.graph.input},
        {truth.point.names[name]: gradient for name, gradient in gradients.items()},
        truth.point.names,
        _tolerance(truth, question, allowed),
        confirmed,
    )


def _said(oracle: str, question: Question) -> Sequence[Evidence]:
    try:
        return testify(oracle, question)
    except Exception as error:  # as in the runner: an oracle that fails, whatever it raises, is silent
        return [Silent(oracle, f"{type(error).__name__}: {error}")]


def _unconfirmed(trial: Trial, name: str, held: Sequence[str], silent: Iterable[Property | Silent]) -> str:
    """Who says what of the gradient by one input."""
    said = [f"{oracle} confirms it" for oracle in held]
    for oracle, judged in trial.of_refgrad.get(name, {}).items():
        note = f": {judged.note}" if judged.note else ""
        said.append(f"{oracle} confirms it" if judged.verdict == AGREED else f"{oracle} says {judged.verdict}{note}")
    for one in (*trial.evidence, *silent):
        if isinstance(one, Silent) and one.name in ("", name):
            said.append(f"{one.oracle} is silent: {one.why}")
    return f"{name}: {'; '.join(dict.fromkeys(said))}"


def _without_defaults(gradient: ModelProto, question: Question) -> tuple[ModelProto, dict[str, Any]]:
    """The gradient model with no input that has a default, and what to feed: the defaults too."""
    model = ModelProto()
    model.CopyFrom(gradient)
    listed = {value.name for value in model.graph.input}
    defaults = {t.name: array_of(t) for t in model.graph.initializer if t.name in listed}
    kept = [t for t in gradient.graph.initializer if t.name not in defaults]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model, defaults | dict(question.feeds)


def _tolerance(truth: Truth, question: Question, allowed: float) -> float:
    """How far an element of any gradient may be off.

    :raises UnconfirmedError: that is too far for one of them.
    """
    sizes = {name: largest(truth.gradients[name]) for name in question.wrt}
    explained = {
        name: max(
            allowed * size + SENSITIVE * largest(truth.moved(name, truth.bits)),
            limits(truth.point.dtype(name))[1] * max(truth.gradients[name].size, 1) ** 0.5,
        )
        for name, size in sizes.items()
    }
    tolerance = _rounded_up(max(explained.values()))
    if truth.out_of_range:
        raise UnconfirmedError(f"{truth.out_of_range}.")
    for name, size in sizes.items():
        zero = size <= SENSITIVE * largest(truth.moved(name, FLOAT64_BITS))
        if not zero and not tolerance <= _TELLING * size:
            raise UnconfirmedError(
                f"{name}: an error of {tolerance:.2g} is explained, where {size:.2g} is the gradient."
            )
    return tolerance


def _rounded_up(number: float) -> float:
    """The next number with two digits."""
    if not 0 < number < np.inf:
        return number
    digits = 1 - int(np.floor(log10(number)))
    return float(f"{ceil(number * 10.0**digits) / 10.0**digits:.1e}")


# Which cases


@cache
def curated() -> dict[str, Case]:
    """The cases that become tests, by the names of these: in plain ai.onnx operators, every size
    declared, at a point with a derivative.

    Of each operator, those that have something that none before has: a version, a type, a rank, an input or output that is
    optional, the value of an attribute, or two of these together.
    """
    smooth = (case for case in tables() if case.static and case.values == "smooth")
    plain = [case for case in smooth if all(node.domain == "" for node in case.model.graph.node)]
    named = named_tests(plain)
    seen: set[tuple[Any, ...]] = set()
    found = {}
    for name, case in named.items():
        operator, features = case.operator, sorted(map(repr, _features(case)))
        new = {(operator, *pair) for count in (1, 2) for pair in combinations(features, count)} - seen
        if new:
            seen |= new
            found[name] = case
    return found


def chosen(operators: Iterable[str] | None = None) -> dict[str, Case]:
    """The curated cases of these operators ("Conv", "Mul"), all by default.

    :raises UnknownNameError: no case is of such an operator.
    """
    if operators is None:
        return curated()
    wanted, known = list(operators), sorted({case.operator for case in curated().values()})
    for name in wanted:
        if name not in known:
            hint = did_you_mean(name, known)
            raise UnknownNameError(f"No curated case is of {name!r}.{hint} There are {choices(known)}.")
    return {name: case for name, case in curated().items() if case.operator in wanted}


def _features(case: Case) -> Iterator[tuple[Any, ...]]:
    for node in case.model.graph.node:
        schema = find_schema(node.op_type, node.domain, case.opset)
        yield "version", node.op_type, schema.since_version if schema else 0
        yield "inputs", node.op_type, tuple(map(bool, node.input))
        yield "outputs", node.op_type, tuple(map(bool, node.output))
        for attribute in node.attribute:
            value = helper.get_attribute_value(attribute)
            yield attribute.name, value if isinstance(value, int | float | bytes) else len(attribute.ints)
    yield "constants", *(t.name for t in case.model.graph.initializer)
    for name, feed in case.feeds.items():
        array = np.asarray(feed)
        yield "type", name, array.dtype.name
        yield "size", name, array.ndim, array.size == 0


def named_tests(cases: Iterable[Case]) -> dict[str, Case]:
    """The cases by a name for a test: `test_grad_conv_group_2`; with the shapes, the opset or a checksum where that is taken.

    A name depends on the cases before, so it stays when others are added behind.
    """
    found: dict[str, Case] = {}
    for case in cases:
        plain = f"test_grad_{'_'.join(_parts(case))}"
        shapes = "_".join("x".join(map(str, np.shape(v))) or "scalar" for v in case.feeds.values())
        longer = (
            f"{plain}{more}" for more in ("", f"_{shapes}", f"_opset{case.opset}", f"_{shapes}_opset{case.opset}")
        )
        last = f"{plain[: _LONGEST - 9]}_{zlib.crc32(case.name.encode()):08x}"
        found[next((name for name in longer if name not in found and len(name) <= _LONGEST), last)] = case
    return found


def _parts(case: Case) -> Iterator[str]:
    """What a name says of a case: the operator, the attributes that are not the default, the type."""
    node = case.subject
    if node is None:
        yield _safe(case.name)
        return
    yield _safe(case.operator)
    schema = find_schema(node.op_type, node.domain, case.opset)
    for attribute in sorted(node.attribute, key=lambda attribute: attribute.name):
        formal = schema.attributes.get(attribute.name) if schema else None
        value = helper.get_attribute_value(attribute)
        if formal and formal.default_value.name and value == helper.get_attribute_value(formal.default_value):
            continue
        if isinstance(value, bytes):
            yield _safe(value.decode())
        elif isinstance(value, int | float):
            yield f"{_safe(attribute.name)}_{_safe(f'{value:g}'.replace('-', 'minus_'))}"
        else:
            yield _safe(attribute.name)
    if case.dtype != "float32":
        yield case.dtype


def _safe(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
