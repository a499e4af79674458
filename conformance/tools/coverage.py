"""The gaps in what an operator with a derivative has to have, and the file in which each belongs."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnx

from refgrad import traits
from refgrad.backends.numpy import registry as kernels
from refgrad.conformance import strategies
from refgrad.conformance.case import Case, is_float
from refgrad.conformance.cases.quantization import rounded
from refgrad.conformance.judge.running.sources import tables
from refgrad.conformance.known.records import read
from refgrad.conformance.oracles import analytic, evaluator, forwards
from refgrad.errors import UnknownNameError, choices, did_you_mean
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.traverse import versions_of
from refgrad.tables import extensions
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.operators import classify, operators
from refgrad.tables.registry import CONTROL_FLOW_RULES, RULES
from refgrad.tables.signatures import SIGNATURES

ASPECTS = (
    *("formula", "kernel", "cases", "types", "special values", "strategy", "independent forward"),
    *("special points", "traits", "docs"),
)
REASONS = Path(__file__).with_suffix(".toml")
_TORCH = Path(__file__).parents[1] / "oracles" / "tables" / "torch_table.py"
_DOCS = Path(__file__).parents[2] / "docs" / "operators.md"  # there is none beside an installed package
_ANY = "<family>"
_TRIED = 3  # cases of an operator that its forward is compared on


@dataclass(frozen=True)
class Gap:
    """A gap: `aspect` is one of ASPECTS, `what` says what is missing, `where` the file that it belongs in."""

    aspect: str
    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.aspect}: {self.what} ({self.where})"


def gaps(operator: str, reasons: Mapping[str, Mapping[str, str]] | None = None) -> tuple[Gap, ...]:
    """The aspects that every operator has and this one lacks, in the order of ASPECTS.

    :param operator: "Conv", "com.microsoft.Gelu"; one whose derivative is zero or does not exist lacks nothing.
    :param reasons: by aspect and operator, why there is nothing; by default the reasons in coverage.toml.
    :raises UnknownNameError: there is no such operator.
    """
    known = {one.operator: one for one in operators()}
    if operator not in known:
        raise UnknownNameError(f"There is no operator {operator!r}.{did_you_mean(operator, known)}")
    if known[operator].derivative in ("zero", "none"):
        return ()
    domain, _, op_type = operator.rpartition(".")
    gaps_by_aspect = (_CHECKS[aspect](domain, op_type, operator) for aspect in ASPECTS)
    with_reason = {aspect for aspect, of in (read_reasons() if reasons is None else reasons).items() if operator in of}
    return tuple(gap for gap in gaps_by_aspect if gap is not None and gap.aspect not in with_reason)


def report(operator: str) -> str:
    """One message that says all that an operator lacks; "" where it lacks nothing."""
    missing = gaps(operator)
    if not missing:
        return ""
    lines = "\n".join(f"- {gap}" for gap in missing)
    return f"{operator} lacks:\n{lines}\nWhere something does not apply, {_shown(REASONS)} has the reason."


def idle_reasons() -> list[str]:
    """The reasons that are not needed: the operator has what they say is missing, or it does not exist."""
    known = {one.operator for one in operators()}
    nothing: Mapping[str, Mapping[str, str]] = {}
    idle = []
    for aspect, of in read_reasons().items():
        for operator in of:
            if operator not in known or aspect not in {gap.aspect for gap in gaps(operator, nothing)}:
                idle.append(f"{aspect} of {operator}")
    return idle


@cache
def read_reasons(path: Path = REASONS) -> dict[str, dict[str, str]]:
    """The reasons of a file, by aspect and operator.

    :raises RecordsError: a record is malformed, or gives a second reason for the same.
    """
    found: dict[str, dict[str, str]] = {aspect: {} for aspect in ASPECTS}
    for record in read(path, "reason", {"aspect": str, "because": str, "operators": list}):
        aspect = record["aspect"]
        if aspect not in found:
            raise record.wrong(
                f"There is no aspect {aspect!r}.{did_you_mean(aspect, ASPECTS)} There are {choices(ASPECTS)}."
            )
        for operator in record["operators"]:
            if operator in found[aspect]:
                raise record.wrong(f"{operator} has a reason already: {found[aspect][operator]}")
            found[aspect][operator] = record["because"]
    return found


# The folders, each with a file for a family

_FOLDERS = {  # of the plug-in for ONNX Runtime's operators
    "refgrad/rules": "bodies",
    "backends/numpy/kernels": "kernels",
    "conformance/cases": "cases",
    "conformance/strategies": "strategies",
}


def family(domain: str, op_type: str) -> str:
    """The name of an operator's files, which is the same in every folder; `<family>` if the operator is not known."""
    key = domain, op_type
    if key in RULES:
        module = RULES[key].function.__module__
    elif key in CONTROL_FLOW_RULES:
        module = CONTROL_FLOW_RULES[key].__module__
    elif key in DEFINITIONS:
        module = DEFINITIONS[key].function.__module__
    else:
        kernel = kernels.find(domain, op_type, 10**6)
        module = kernel.function.__module__ if kernel is not None else _ANY
    return module.rpartition(".")[2]


def _in_folder(folder: str, domain: str, op_type: str) -> str:
    """The file of a folder; an operator of another package has a module of its own."""
    if (domain, op_type) in SIGNATURES and (domain, op_type) in RULES:
        return RULES[domain, op_type].function.__module__
    if domain == MICROSOFT:
        folder = f"refgrad/microsoft/{_FOLDERS[folder]}"
    return f"{folder}/{family(domain, op_type)}.py"


def _shown(path: Path) -> str:
    return str(path.relative_to(Path(__file__).parents[2]))


# What each one has


def _formula(domain: str, op_type: str, operator: str) -> Gap | None:
    found = classify(domain, op_type)
    if found.derivative != "missing" and found.text:
        return None
    what = "no rule" if found.derivative == "missing" else "its rule has no docstring, which is the formula"
    return Gap("formula", what, _in_folder("refgrad/rules", domain, op_type))


def _kernel(domain: str, op_type: str, operator: str) -> Gap | None:
    if any((k.domain, k.op_type) == (domain, op_type) for k in kernels.kernels()):
        return None
    what = "none, so the interpreter cannot run it"
    if _has_body(domain, op_type):
        since, oldest = _body_since(domain, op_type), _oldest(domain, op_type, operator)
        if oldest >= since:
            return None
        what = f"none, and its function body needs opset {since}, where the cases have {oldest}"
    return Gap("kernel", what, _in_folder("backends/numpy/kernels", domain, op_type))


def _cases(domain: str, op_type: str, operator: str) -> Gap | None:
    if _cases_of(operator):
        return None
    return Gap("cases", "none", _in_folder("conformance/cases", domain, op_type))


def _types(domain: str, op_type: str, operator: str) -> Gap | None:
    if _cases(domain, op_type, operator) is not None:
        return None
    if _has_floats(operator) or (onnx.defs.has(op_type, domain) and onnx.defs.get_schema(op_type, domain).deprecated):
        return None
    what = "no smooth case of floats that declares every size, of which tests/rules/test_types.py makes shorter types"
    return Gap("types", what, _in_folder("conformance/cases", domain, op_type))


def _special(domain: str, op_type: str, operator: str) -> Gap | None:
    through_body = classify(domain, op_type).derivative == "function"  # whose operators have some
    if through_body or (domain, op_type) in SIGNATURES or _cases_of(operator, "special"):
        return None
    what = "no row SPECIAL of numbers that are infinite, missing or extreme"
    return Gap("special values", what, _in_folder("conformance/cases", domain, op_type))


def _strategy(domain: str, op_type: str, operator: str) -> Gap | None:
    if operator in strategies.operators():
        return None
    return Gap("strategy", "none", _in_folder("conformance/strategies", domain, op_type))


def _forward(domain: str, op_type: str, operator: str) -> Gap | None:
    """A gap if the registered forward has a fault, or if every forward shares the kernel; else None."""
    registered = forwards.has_forward(domain, op_type)
    if registered and (wrong := _wrong_forward(operator)):
        return Gap("independent forward", wrong, _where_forwards_are(domain, op_type))
    if registered or any(operator in names for names in (analytic.KNOWN, evaluator.STRUCTURES, _rows_of_torch())):
        return None
    if _has_body(domain, op_type) and _oldest(domain, op_type, operator) >= _body_since(domain, op_type):
        return None  # onnx.reference computes it with kernels of its own
    what = "none that shares nothing with the kernel"
    return Gap("independent forward", what, _where_forwards_are(domain, op_type))


def _where_forwards_are(domain: str, op_type: str) -> str:
    if (domain, op_type) in extensions.FORWARDS:
        return extensions.FORWARDS[domain, op_type].function.__module__
    if (domain, op_type) in SIGNATURES:
        return f"{_in_folder('', domain, op_type)}, with refgrad.extend.forward"
    return f"{_shown(Path(analytic.__file__))}, or a row in {_shown(_TORCH)}"


def _wrong_forward(operator: str) -> str:
    """The fault of the forward on the first cases of the operator, or ""."""
    return next(filter(None, map(forwards.fault, forwards.few(_cases_of(operator)[:_TRIED]))), "")


def _points(domain: str, op_type: str, operator: str) -> Gap | None:
    if (domain, op_type) not in RULES or (domain, op_type) in SIGNATURES:
        return None
    from refgrad.conformance.tools.jets import points  # here, since it needs mpmath

    if operator in {*(point.operator for point in points.POINTS), *points.AT_ZERO, *points.REASONS}:
        return None
    what = "no point to check derivatives at; then run `python -m refgrad.conformance.tools.jets --write`"
    return Gap(
        "special points", what, f"{_shown(Path(points.__file__).parent)}/elementwise.py, tensors.py or points.py"
    )


def _traits(domain: str, op_type: str, operator: str) -> Gap | None:
    if domain or any(op_type in kind for kind in traits.KINDS):
        return None
    return Gap("traits", "it is of no kind", "refgrad/traits.py")


def _docs(domain: str, op_type: str, operator: str) -> Gap | None:
    if not _DOCS.is_file() or (domain, op_type) in SIGNATURES or f"| {operator} |" in _DOCS.read_text(encoding="utf-8"):
        return None
    return Gap("docs", "no row in docs/operators.md", "python docs/generate.py writes it")


_CHECKS = dict(
    zip(
        ASPECTS,
        (_formula, _kernel, _cases, _types, _special, _strategy, _forward, _points, _traits, _docs),
        strict=True,
    )
)


def _has_body(domain: str, op_type: str) -> bool:
    if (domain, op_type) in DEFINITIONS:
        return True
    schema: Any = (
        onnx.defs.get_schema(op_type, domain) if onnx.defs.has(op_type, domain) else None
    )  # the stub lacks bodies
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def _body_since(domain: str, op_type: str) -> int:
    """The first opset of which the operator has a function body."""
    if (domain, op_type) in DEFINITIONS:
        return 1
    schema: Any = onnx.defs.get_schema(op_type, domain)
    return min(schema.function_opset_versions, default=schema.since_version) if schema.has_function else 1


def _oldest(domain: str, op_type: str, operator: str) -> int:
    """The oldest opset among the first cases of the operator; the first with a body where there are none."""
    opsets = [versions_of(case.model).get(domain, 1) for case in _cases_of(operator)[:_TRIED]]
    return min(opsets, default=_body_since(domain, op_type))


def _cases_of(operator: str, values: str = "smooth") -> list[Case]:
    """The operator's cases of that kind of values."""
    return [
        case for case in _tables(operator, tuple(entry.function for entry in extensions.CASES)) if case.values == values
    ]


@cache
def _tables(operator: str, registered: tuple[Any, ...]) -> tuple[Case, ...]:
    """The operator's cases; `registered` are the functions of other packages that make cases."""
    return tuple(tables([operator]))


def _has_floats(operator: str) -> bool:
    """True if a smooth case of floats declares every size, or the operator is in the models that round."""
    cases = (case for case in _cases_of(operator) if case.static)
    return (
        any(is_float(array) and array.size for case in cases for array in case.feeds.values()) or operator in _rounded()
    )


@cache
def _rounded() -> frozenset[str]:
    return frozenset(node.op_type for case in rounded() for node in case.model.graph.node)


@cache
def _rows_of_torch() -> frozenset[str]:
    """The operators that torch's table has; the table cannot be imported where torch is not installed."""
    tree = ast.parse(_TORCH.read_text(encoding="utf-8"))
    return frozenset(n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
