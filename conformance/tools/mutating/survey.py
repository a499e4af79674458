"""The survey tests the suite: it breaks rules and function bodies on purpose, one place at a time. The suite has to notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.cases import every_case
from refgrad.conformance.tools.mutating.changes import (
    BODY_CHANGES,
    CHANGES,
    EXCHANGED,
    RETURNED,
    Change,
    Emits,
    has_axes,
)
from refgrad.conformance.tools.mutating.mutants import Mutant, Outcome
from refgrad.conformance.tools.mutating.planting import Breaking, Site, broken
from refgrad.conformance.tools.mutating.subjects import Subject
from refgrad.errors import BrokenRuleError, OptionError, RefgradError, counted, did_you_mean
from refgrad.protos.domains import MICROSOFT
from refgrad.tables import plugins
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.registry import RULES, ZERO

_PATIENCE = 3  # after so many cases that need the unbroken gradient to catch a mutant, stop looking for others


def survey(
    operators: Sequence[str] | None = None,
    seed: int = 0,
    tests: Sequence[Callable[[Case], None]] = (),
    progress: Callable[[int, int, str], None] | None = None,
    every: int = 1,
) -> list[Outcome]:
    """The outcome of every mutant of the rules and bodies of these operators, by default of all.

    :param operators: names like "Conv" or "com.microsoft.Gelu".
    :param tests: tests of a case, for which mutants that are caught are planted again: `Outcome.tested` has the result.
    :param progress: called with the number of operators that are done, the number of all, and a text about the next.
    :param every: take one of so many mutants of an operator, at least one.
    :raises OptionError: an operator has neither a rule nor a body.
    """
    known = ruled() | defined()
    for name in operators or ():
        if name not in known:
            raise OptionError(f"There is no rule for {name!r}, and no body.{did_you_mean(name, known)}")
    outcomes: list[Outcome] = []
    listed = list(operators or known)
    for done, name in enumerate(listed):
        if progress is not None:
            caught = sum(one.caught for one in outcomes)
            progress(done, len(listed), f"{name}; {caught} of {counted(len(outcomes), 'mutant')} caught")
        outcomes += _Operator(name, known[name], seed, tests).outcomes(every)
    return outcomes


def ruled() -> dict[str, tuple[str, str]]:
    """The operators that have a rule: the name with the domain, and the key of the rule in `RULES`."""
    plugins.load()
    return {f"{domain}.{name}" if domain else name: (domain, name) for domain, name in sorted(RULES)}


def defined() -> dict[str, tuple[str, str]]:
    """The operators of ONNX Runtime that are differentiated through their body: the name, and the key in `DEFINITIONS`."""
    plugins.load()
    keys = sorted(DEFINITIONS.keys() - RULES.keys() - ZERO.keys())
    return {f"{domain}.{name}": (domain, name) for domain, name in keys if domain == MICROSOFT}


def family(key: tuple[str, str]) -> str:
    """The name of the module with the body of an operator of `defined`: "activation"."""
    return DEFINITIONS[key].function.__module__.rpartition(".")[2]


def mutants_of(
    key: tuple[str, str], case: Case, seed: int = 0
) -> Iterator[tuple[Mutant, Callable[[], AbstractContextManager[None]]]]:
    """Each mutant of a rule in one case, with a context in which the rule is broken in this way.

    The place of a mutant is an input, "the cotangent of x", or an operator that the rule emits.
    Some leave the gradient as it is.

    :param key: of the rule in `RULES`, its domain and name.
    :raises RefgradError: the unbroken rule does not answer the case.
    """
    subject = Subject(case, key, seed)
    for entry, shape in sorted(subject.entries.items()):
        for change, (function, axes) in RETURNED.items():
            if has_axes(shape, axes):
                mutant = Mutant(case.operator, f"the cotangent of {entry}", change)
                yield mutant, partial(broken, key, Breaking(), partial(_with_one, entry, function))
    for site, ranks in sorted(subject.ranks.items()):
        for change, emission in CHANGES[site.op_type].items():
            yield Mutant(case.operator, site.op_type, change), partial(_broken_anew, key, site, emission, {site: ranks})


def _with_one(
    entry: str, function: Callable[[Any, str], str | None], op: Any, adjoints: dict[str, str | None]
) -> dict[str, str | None]:
    adjoint = adjoints.get(entry)
    return adjoints if adjoint is None else adjoints | {entry: function(op, adjoint)}


def _broken_anew(
    key: tuple[str, str], site: Site, change: Change, ranks: Mapping[Site, Sequence[Sequence[int | None]]]
) -> AbstractContextManager[None]:
    """The context of a changed emission. What a run has emitted is of that run alone."""
    return broken(key, Breaking((site, change), ranks))


@np.errstate(all="ignore")
def _passes(test: Callable[[Case], None], case: Case, context: AbstractContextManager[None]) -> bool:
    with context:
        try:
            test(case)
        except Exception:  # a broken rule may raise anything
            return False
    return True


class _Operator:
    """The mutants of one rule or body and the cases that try them; those that have caught most are tried first."""

    def __init__(
        self, operator: str, key: tuple[str, str], seed: int, tests: Sequence[Callable[[Case], None]] = ()
    ) -> None:
        self.operator, self.key, self.tests = operator, key, tests
        self.sound: dict[tuple[Any, str], bool] = {}  # by test and case: whether it passes with the unbroken rule
        self.subjects = []
        for case in every_case():
            if case.operator == operator and case.values == "smooth":
                try:
                    self.subjects.append(Subject(case, key, seed))
                except BrokenRuleError:  # the rule is not broken yet: it is this program
                    raise
                except RefgradError:  # without the unbroken gradient there is nothing to compare mutants with
                    continue

    def outcomes(self, every: int = 1) -> Iterator[Outcome]:
        """The outcome of each mutant, or of one of so many, in the order of the source."""
        listed = list(self._mutants())
        for mutant in listed[len(listed) // 2 % every :: every]:
            yield from self._try(*mutant)

    def _mutants(self) -> Iterator[tuple[Mutant, Sequence[Subject], Callable[[Subject], Any]]]:
        """Each mutant with the cases that may catch it and the way to break the rule or the body."""
        entries = sorted({name for subject in self.subjects for name in subject.entries})
        for k, entry in enumerate(entries):
            for change in RETURNED:
                if change == "zero" and self.key not in RULES:
                    continue  # a body that lacks a result does not apply
                yield Mutant(self.operator, entry, change), *self._returning(entry, change)
            if k + 1 < len(entries):
                yield Mutant(self.operator, entry, EXCHANGED), *self._exchanging(*entries[k : k + 2])
        seen = Counter[str]()
        for site in sorted({site for subject in self.subjects for site in subject.ranks}):
            seen[site.place] += 1
            place = site.place if seen[site.place] == 1 else f"{site.place} ({seen[site.place]})"
            changes = CHANGES if self.key in RULES else BODY_CHANGES
            for change, emission in changes[site.op_type].items():
                yield Mutant(self.operator, place, change), *self._emitting(site, emission)

    def _try(
        self, mutant: Mutant, concerned: Sequence[Subject], breaking: Callable[[Subject], Any]
    ) -> Iterator[Outcome]:
        """The outcome, or nothing where the change does not make a mutant."""
        tried, second, note = 0, [], ""
        for subject in sorted(concerned, key=lambda one: -one.catches):
            found = subject.try_on(partial(breaking, subject))
            if found is None:
                continue
            tried += 1
            if found.alone:
                subject.catches += 1
                tested = self._tested(subject, [one for one in concerned if one is not subject], breaking)
                yield replace(found, mutant=mutant, tried=tried, tested=tested)
                return
            if found.caught:
                second.append(found)
                if len(second) == _PATIENCE:
                    break
            note = note or found.note
        if second:
            tested = self._tested(concerned[0], concerned[1:], breaking)
            yield replace(second[0], mutant=mutant, tried=tried, tested=tested)
        elif tried:
            yield Outcome(mutant, tried=tried, note=note)

    def _tested(self, first: Subject, others: Sequence[Subject], breaking: Callable[[Subject], Any]) -> bool:
        """True if a test of the caller fails for a mutant in one of the cases, and passes without it."""
        for test in self.tests:
            for subject in (first, *others):
                key = test, subject.case.name
                if key not in self.sound:
                    self.sound[key] = _passes(test, subject.case, nullcontext())
                if self.sound[key] and not _passes(test, subject.case, breaking(subject)):
                    return True
        return False

    def _returning(self, entry: str, change: str) -> Any:
        function, axes = RETURNED[change]

        def returned(op: Emits, adjoints: dict[str, str | None]) -> dict[str, str | None]:
            adjoint = adjoints.get(entry)
            return adjoints if adjoint is None else adjoints | {entry: function(op, adjoint)}

        concerned = [one for one in self.subjects if entry in one.entries and has_axes(one.entries[entry], axes)]
        return concerned, lambda subject: broken(self.key, Breaking(), returned)

    def _exchanging(self, one: str, other: str) -> Any:
        def returned(op: Emits, adjoints: dict[str, str | None]) -> dict[str, str | None]:
            if one not in adjoints or other not in adjoints:
                return adjoints
            return adjoints | {one: adjoints[other], other: adjoints[one]}

        concerned = [subject for subject in self.subjects if {one, other} <= subject.entries.keys()]
        return concerned, lambda subject: broken(self.key, Breaking(), returned)

    def _emitting(self, site: Site, change: Change) -> Any:
        concerned = [subject for subject in self.subjects if site in subject.ranks]
        return concerned, lambda subject: broken(self.key, Breaking((site, change), subject.ranks))
