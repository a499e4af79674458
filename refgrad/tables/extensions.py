"""The registration of zero and missing derivatives, and of what the suite tests an operator with: cases, strategies, forwards.

The suite and its libraries are not imported for that. What is said here waits until the suite asks for it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from refgrad.errors import RuleError
from refgrad.tables.once import once, place, qualified
from refgrad.tables.registry import BODY, NO_DERIVATIVE, QUANTIZERS, RULES, ZERO
from refgrad.tables.runtime_operators import runtime_operators
from refgrad.tables.schemas import find_schema
from refgrad.tables.signatures import SIGNATURES, declare, declared_signature

Function = Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """A function that waits: of which operator it is, and the options that it was registered with."""

    domain: str
    op_type: str
    function: Function
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def operator(self) -> str:
        """The operator with its domain."""
        return qualified(self.domain, self.op_type)


CASES: list[Entry] = []
STRATEGIES: dict[tuple[str, str], Entry] = {}
FORWARDS: dict[tuple[str, str], Entry] = {}
PACKAGES: list[str] = []  # packages with folders of kernels, cases and strategies


def families(package: str) -> None:
    """Look for kernels, cases and strategies in the folders of these names in a package, a file per family.

    Their modules are imported when the interpreter or the suite needs them. A module in `kernels` or `strategies` uses the
    decorators. A module in `cases` has a function `cases()` that yields `refgrad.conformance.node_case(...)`, and may have
    `rare()`, for rare arguments, and `SPECIAL`, for special numbers.

    :param package: its `__name__`.
    """
    if package not in PACKAGES:
        PACKAGES.append(package)


def modules(folder: str) -> Iterator[tuple[str, str]]:
    """The name of each module in the folder `folder` of a registered package, behind the name of that package."""
    for package in PACKAGES:
        for path in import_module(package).__path__:
            for module in pkgutil.iter_modules([f"{path}/{folder}"]):
                yield package, f"{package}.{folder}.{module.name}"


def zero(
    op_type: str,
    reason: str,
    *,
    domain: str = "",
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    replace: bool = False,
) -> None:
    """Declare that the derivative of an operator is zero wherever it exists, and why.

    :param reason: the end of a sentence: "the result is piecewise constant".
    :param inputs: the names of the inputs of an operator without a schema; `x?` is optional, `*xs` variadic.
    :param outputs: the names of its outputs; `y:int64` has that element type, `y` has the element type of the first input.
    :param replace: also where the operator has a rule or another declaration already.
    :raises RuleError: it has one, or has neither a schema nor the names here.
    """
    _declare(ZERO, op_type, reason, domain, inputs, outputs, replace)


def no_derivative(
    op_type: str,
    reason: str,
    *,
    domain: str = "",
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    replace: bool = False,
) -> None:
    """Declare that an operator has no derivative, and why: a path through it is refused. The arguments are as in `zero`.

    :raises RuleError: as `zero` does.
    """
    _declare(NO_DERIVATIVE, op_type, reason, domain, inputs, outputs, replace)


def _declare(
    table: dict[tuple[str, str], str],
    op_type: str,
    reason: str,
    domain: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    replace: bool,
) -> None:
    key, named = (domain, op_type), qualified(domain, op_type)
    known = {kind: said for kind, of in (("zero", ZERO), ("no", NO_DERIVATIVE)) if (said := of.get(key))}
    known |= {"a rule": place(RULES[key].function)} if key in RULES else {}
    if known and not replace and known != {("zero" if table is ZERO else "no"): reason}:
        [kind, said] = next(iter(known.items()))
        already = f"a rule already: {said}" if kind == "a rule" else f"{kind} derivative already: {said}"
        raise RuleError(f"{named} has {already}. Say with replace=True that {reason!r} takes its place.")
    if (find_schema(op_type, domain) is None and key not in runtime_operators()) or key in SIGNATURES:
        if not inputs or not outputs:
            raise RuleError(
                f"{named} has no schema: name its inputs and outputs, as in "
                f'zero({op_type!r}, {reason!r}, domain={domain!r}, inputs=["x"], outputs=["y"]).'
            )
        declare(declared_signature(op_type, domain, inputs, outputs, "its declaration", reason))
    for other in (ZERO, NO_DERIVATIVE):
        other.pop(key, None)
    RULES.pop(key, None)
    BODY.pop(key, None)
    table[key] = reason


def rounds(*op_types: str, domain: str = "", to: Collection[int]) -> None:
    """Declare that operators round floats to numbers of the element types `to`.

    Their derivative is zero, unless `gradient(quantization=)` gives rounding one.
    """
    for op_type in op_types:
        QUANTIZERS[domain, op_type] = frozenset(to)


def case(op_type: str, *, domain: str = "") -> Callable[[Function], Function]:
    """Register the decorated function as one that makes cases of an operator, for the suite of conformance.

    It gets a function that makes a case of a node from arrays (None for an absent input) and attributes, and yields cases:

        @case("SquaredHinge", domain="my.domain")
        def squared_hinge_cases(make):
            yield make(scores, labels)
            yield make(scores, labels, margin=2.0, shapes="symbolic")

    `make` is `refgrad.conformance.node_case` without its first argument, in version 1 of the domain.
    """

    def register(function: Function) -> Function:
        entry = Entry(domain, op_type, function)
        CASES[:] = [
            known for known in CASES if (known.operator, place(known.function)) != (entry.operator, place(function))
        ]
        CASES.append(entry)
        return function

    return register


def strategy(*op_types: str, domain: str = "", replace: bool = False, **options: Any) -> Callable[[Function], Function]:
    """Register the decorated function as the one that draws cases of operators, by hypothesis.

    It gets a `refgrad.conformance.strategies.drawing.Drawing` and returns `d.case(...)`. The options `kinks` and `ranked`
    are explained there.
    """
    return _waiting("strategy", STRATEGIES, op_types, domain, replace, options)


def forward(
    op_type: str, *, domain: str = "", analytic: bool = False, replace: bool = False
) -> Callable[[Function], Function]:
    """Register the decorated function as an independent forward of an operator: an oracle for the suite beside the kernel.

    It gets NumPy arrays (None for an absent input) and the attributes that a node sets, by name. It returns an array, or a
    tuple of them. Write it in another way than the kernel, or two equal mistakes agree.

    :param analytic: it takes complex numbers too, and decides by the real part where it compares: then the suite has its
        derivative by complex step.
    """
    return _waiting("forward", FORWARDS, [op_type], domain, replace, {"analytic": analytic})


def _waiting(
    kind: str,
    table: dict[tuple[str, str], Entry],
    op_types: Sequence[str],
    domain: str,
    replace: bool,
    options: Mapping[str, Any],
) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        for op_type in op_types:
            before = table.get((domain, op_type))
            once(kind, qualified(domain, op_type), before and before.function, function, replace)
            table[domain, op_type] = Entry(domain, op_type, function, options)
        return function

    return register
