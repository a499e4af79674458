"""Tests of gradients: a model, what to feed it, and values that more than one oracle confirms. For any runtime to run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations
from math import ceil, log10
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.case import Case
from refgrad.conformance.cases import covered
from refgrad.conformance.judge.judge import ENOUGH, GradientCheck
from refgrad.conformance.judge.running.runner import examine, observe
from refgrad.conformance.judge.running.sources import no_derivative, tables
from refgrad.conformance.oracles import Built, NotApplicable, Observation, Property, get_oracle
from refgrad.conformance.oracles.comparison import FLOAT64_BITS, SENSITIVE
from refgrad.conformance.problems.kinked import kinks_of
from refgrad.conformance.problems.point import Truth, largest, rounding, with_defaults
from refgrad.conformance.problems.problem import Problem, ask
from refgrad.conformance.problems.rounding import limits
from refgrad.conformance.tools.exporting.names import named_tests
from refgrad.conformance.tools.exporting.sizes import sized, types_in, with_sizes
from refgrad.conformance.verdicts import RIGHT
from refgrad.errors import UnconfirmedError, UnknownNameError, choices, counted, did_you_mean
from refgrad.model.external import array_of
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.schemas import find_schema

ORACLES = ("differences", "reference", "complex-step", "adjoint")  # everybody has these
_TELLING = 0.1  # a test that allows an error of this part of a gradient tells little of it


@dataclass(frozen=True)
class Expected:
    """A gradient model, what to feed it and what comes out.

    `feeds` has the inputs of `model`, none with a default, in their order: the inputs of `problem.model`, initializers that
    are differentiated, and the cotangents. `gradients` has its outputs in their order, in the type of the value that each is
    the gradient of, rounded from float64; `outputs` has their names by those in `problem.wrt`. `dtypes` are the types of the
    values in `model`. An element may be off by `tolerance`, for `reason`, and `confirmed` has the oracles that confirm each
    gradient. `results` has the outputs of `problem.model` itself that have a cotangent; an element of these may be off by
    `results_tolerance`.
    """

    problem: Problem
    model: ModelProto
    feeds: dict[str, Any]
    gradients: dict[str, np.ndarray]
    outputs: dict[str, str]
    dtypes: tuple[str, ...]
    tolerance: float
    reason: str
    confirmed: dict[str, tuple[str, ...]]
    results: dict[str, np.ndarray]
    results_tolerance: float


def expect(case: Case, oracles: Sequence[str] = ORACLES) -> Expected:
    """The test that a case makes.

    Where the inputs of the case have sizes, every size in the models is a number. The tolerance is what rounding explains: of
    the type over the nodes of the gradient, and by how much the gradient moves when intermediate results are rounded.

    :raises UnconfirmedError: there is no single right answer, fewer than two oracles confirm refgrad's, one of them contradicts
        it, or rounding hides it.
    :raises RefgradError: there is nothing to differentiate, or refgrad refuses.
    """
    problem = ask(sized(case) if case.static else case)
    for name, kinked in problem.kinked.items():
        at = f"{np.count_nonzero(kinked)} of {counted(kinked.size, 'element')} are at a kink of {choices(kinks_of(case.model))}"
        raise UnconfirmedError(f"{name}: {at}, where there is no single right answer.")
    check = GradientCheck(
        problem, tuple(said for name in oracles if get_oracle(name).observe for said in _said(name, problem))
    )
    truth = check.own_gradient
    if not truth.gradients:
        raise UnconfirmedError("refgrad builds no gradient of it.")
    if truth.point.draws:
        raise UnconfirmedError(f"{', '.join(truth.point.draws)} draws random numbers: no two executors draw the same.")
    built = Built(truth.model, dict(truth.point.seeds_of), dict(truth.point.names))
    tested = {name: examine(name, problem, built) for name in oracles if get_oracle(name).examine}
    properties = [one for found in tested.values() for one in found if isinstance(one, Property)]
    if failed := [p for p in properties if not p.holds]:
        raise UnconfirmedError(f"{failed[0].oracle} contradicts it: {failed[0].note}")
    held = tuple(dict.fromkeys(p.oracle for p in properties))
    confirmed = {name: (*check.confirmed(name), *held) for name in problem.wrt}
    for name, witnesses in confirmed.items():
        if len(witnesses) < ENOUGH or not check.confirmed(name):
            raise UnconfirmedError(_unconfirmed(check, name, held, chain.from_iterable(tested.values())))
    model, feeds = _without_defaults(truth.model, problem)
    feeds |= {truth.point.seeds_of[output]: value for output, value in problem.cotangents.items()}
    numbered = with_sizes(model, feeds)
    gradients = {name: truth.gradients[name].astype(truth.point.dtype(name)) for name in problem.wrt}
    tolerance, reason = _tolerance(truth, problem)
    results, results_tolerance = _results(truth, problem)
    return Expected(
        problem,
        numbered if case.static else model,
        {value.name: np.asarray(feeds[value.name]) for value in model.graph.input},
        {truth.point.names[name]: gradient for name, gradient in gradients.items()},
        truth.point.names,
        types_in(numbered),
        tolerance,
        reason,
        confirmed,
        results,
        results_tolerance,
    )


def _said(oracle: str, problem: Problem) -> Sequence[Observation]:
    try:
        return observe(oracle, problem)
    except Exception as error:  # as in the runner: an oracle that fails, whatever it raises, does not apply
        return [NotApplicable(oracle, f"{type(error).__name__}: {error}")]


def _unconfirmed(
    check: GradientCheck, name: str, held: Sequence[str], silent: Iterable[Property | NotApplicable]
) -> str:
    """Who says what of the gradient by one input."""
    said = [f"{oracle} confirms it" for oracle in held]
    for oracle, judged in check.own_comparisons.get(name, {}).items():
        note = f": {judged.note}" if judged.note else ""
        said.append(f"{oracle} confirms it" if judged.verdict == RIGHT else f"{oracle} says {judged.verdict}{note}")
    for one in (*check.observations, *silent):
        if isinstance(one, NotApplicable) and one.name in ("", name):
            said.append(f"{one.oracle} does not apply: {one.why}")
    return f"{name}: {'; '.join(dict.fromkeys(said))}"


def _without_defaults(gradient: ModelProto, problem: Problem) -> tuple[ModelProto, dict[str, Any]]:
    """The gradient model with no input that has a default, and what to feed: the defaults too."""
    model = ModelProto()
    model.CopyFrom(gradient)
    listed = {value.name for value in model.graph.input}
    defaults = {t.name: array_of(t) for t in model.graph.initializer if t.name in listed}
    kept = [t for t in gradient.graph.initializer if t.name not in defaults]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model, defaults | dict(problem.feeds)


def _tolerance(truth: Truth, problem: Problem) -> tuple[float, str]:
    """How far an element of any gradient may be off, and why.

    :raises UnconfirmedError: that is too far for one of them.
    """
    nodes = len(truth.model.graph.node)
    allowed = problem.tolerance or rounding(nodes, problem.model)
    sizes = {name: largest(truth.gradients[name]) for name in problem.wrt}
    explained = {}
    for name, size in sizes.items():
        moved = SENSITIVE * largest(truth.moved(name, truth.bits))
        least = limits(truth.point.dtype(name))[1] * max(truth.gradients[name].size, 1) ** 0.5
        why = (
            f"The gradient by {name} is as large as {size:.3g}. "
            f"Rounding in {counted(nodes, 'node')} explains {allowed * size:.1e}, and "
            f"{SENSITIVE:g} times as much as it moves when intermediate results are rounded is {moved:.1e}."
        )
        explained[name] = max((allowed * size + moved, why), (least, "The smallest normal number of the type."))
    most, reason = max(explained.values())
    tolerance = _rounded_up(most)
    if truth.out_of_range:
        raise UnconfirmedError(f"{truth.out_of_range}.")
    for name, size in sizes.items():
        zero = size <= SENSITIVE * largest(truth.moved(name, FLOAT64_BITS))
        if not zero and not tolerance <= _TELLING * size:
            raise UnconfirmedError(
                f"{name}: an error of {tolerance:.2g} is explained, where {size:.2g} is the gradient."
            )
    return tolerance, reason


def _results(truth: Truth, problem: Problem) -> tuple[dict[str, np.ndarray], float]:
    """The outputs of the model that have a cotangent, in their types, and how far an element may be off."""
    exact = truth.point.forward.run(problem.at, problem.cotangents)
    bits = {name: value.astype(problem.cotangents[name].dtype) for name, value in exact.items()}
    prepared = NumpyBackend().prepare(
        with_defaults(problem.model, problem.wrt), precision="float64", bits=max(truth.bits, 2)
    )
    rounded = prepared.run(problem.at, problem.cotangents)
    allowed = problem.tolerance or rounding(len(problem.model.graph.node), problem.model)
    explained = [
        allowed * largest(value) + SENSITIVE * largest(rounded[name] - value) + limits(bits[name].dtype)[1]
        for name, value in exact.items()
    ]
    return bits, _rounded_up(max(explained))


def _rounded_up(number: float) -> float:
    """The next number with two digits."""
    if not 1e-300 < number < np.inf:  # below, a power of ten overflows
        return number
    digits = 1 - int(np.floor(log10(number)))
    return float(f"{ceil(number * 10.0**digits) / 10.0**digits:.1e}")


# Which cases


@cache
def curated(operators: frozenset[str] | None = None) -> dict[str, Case]:
    """The cases that become tests, by the names of these: in plain ai.onnx operators, with sizes, where there is a derivative.

    Of each operator, those that have something that none before has: a version, a type, a rank, an input or output that is
    optional, the value of an attribute, or two of these together.
    """
    return _telling((case for case in _plain(operators) if case.static), together=2)


@cache
def symbolic(operators: frozenset[str] | None = None) -> dict[str, Case]:
    """The cases that become tests of models whose inputs have symbols for sizes, by the names of these.

    They are chosen as in `curated`, except that a new pair of features does not count.
    """
    named = (case for case in _plain(operators) if not case.static and "unknown" not in case.name.split("-"))
    return _telling(named, together=1)


def _plain(operators: frozenset[str] | None) -> Iterator[Case]:
    """The cases of these operators, all by default, in plain ai.onnx operators at a point with a derivative."""
    for case in tables(operators):
        if case.values != "smooth" or case.operator.startswith(MICROSOFT):
            continue
        if all(node.domain == "" for node in case.model.graph.node):
            yield case


def _telling(cases: Iterable[Case], together: int) -> dict[str, Case]:
    """The cases, by the name of a test, that have so many features together which none before of their operator has."""
    seen: set[tuple[Any, ...]] = set()
    found = {}
    for name, case in named_tests(cases).items():
        operator, features = case.operator, sorted(map(repr, _features(case)))
        counts = range(1, together + 1)
        new = {(operator, *some) for count in counts for some in combinations(features, count)} - seen
        if new:
            seen |= new
            found[name] = case
    return found


def chosen(operators: Iterable[str] | None = None) -> dict[str, Case]:
    """The curated cases of these operators ("Conv", "Mul"), all by default.

    :raises UnknownNameError: one of the operators has no case.
    """
    if operators is None:
        return curated()
    wanted = list(operators)
    found = curated(frozenset(wanted))
    for name in wanted:
        if all(case.operator != name for case in found.values()):
            known = sorted(covered() - {name})
            meant = did_you_mean(name, known)
            raise UnknownNameError(
                no_derivative(name) or f"There is no case of an operator {name!r}.{meant} There are {choices(known)}."
            )
    return found


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
