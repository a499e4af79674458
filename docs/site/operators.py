"""A page for every operator that has a derivative: from its rule, its first case, and the results of the suite."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx.defs
import onnx.helper
import onnx.parser
import onnx.printer
from onnx import ModelProto, numpy_helper
from text import fence, front_matter, table

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance import Case, check
from refgrad.conformance.case import qualified
from refgrad.conformance.judge.running.limitations import Limitation, Limitations
from refgrad.conformance.judge.running.results import Pair
from refgrad.conformance.judge.running.sources import tables
from refgrad.conformance.reports.tally import MARKS, marked
from refgrad.escaping import markdown as escaped
from refgrad.protos.traverse import every_node
from refgrad.show.explain import explain
from refgrad.tables.operators import Operator, operators
from refgrad.tables.registry import RULES
from refgrad.tables.runtime_operators import runtime_operators
from refgrad.tables.schemas import find_schema

DIALECTS = ("onnx", "ort")
FEW = 100  # elements of feeds that a page can show
WITH_A_PAGE = ("rule", "function")
PARITY = ("right", "wrong", "refused", "fails", "kernel")  # columns of reports/parity.md


@dataclass(frozen=True)
class Page:
    """The Markdown of a page, and its pictures by file name."""

    text: str
    pictures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Records:
    """The sources of operator pages: the Markdown of the project's own pages, the counts of the suite, its limitations."""

    kinks: str
    known_bugs: str
    parity: Mapping[str, Mapping[str, int]]
    verdicts: Mapping[str, Mapping[Pair, Counter[str]]]
    limitations: Sequence[Limitation]


def with_pages() -> list[Operator]:
    """Return the operators that get a page, by name: those with a rule, and those differentiated through a body."""
    return [one for one in operators() if one.derivative in WITH_A_PAGE]


@cache
def _cases() -> dict[str, list[Case]]:
    """The cases of every operator; one of several nodes counts for every operator in it that has none of its own."""
    found: dict[str, list[Case]] = {}
    inner: dict[str, list[Case]] = {}
    for case in tables():
        if case.subject is not None:
            found.setdefault(case.operator, []).append(case)
        else:
            for name in {qualified(node) for node in every_node(case.model)}:
                inner.setdefault(name, []).append(case)
    return inner | found


def _elements(case: Case) -> int:
    return sum(np.asarray(value).size for value in case.feeds.values())


def first_case(operator: str) -> Case | None:
    """Return the first case that a page can show: static, not empty, of a few elements; else the smallest; None without one."""
    every = _cases().get(operator, [])
    shown = [
        case
        for case in every
        if case.values == "smooth" and case.static and all(np.asarray(value).size for value in case.feeds.values())
    ]
    few = (case for case in shown if 1 < _elements(case) <= FEW)
    return next(few, None) or min(shown or every, key=_elements, default=None)


def _literal(value: Any) -> str:
    """Python that makes `value` again."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    array = np.asarray(value)
    if array.dtype == object:
        return f"np.array({array.tolist()!r}, dtype=object)"
    known = hasattr(np, array.dtype.name)
    dtype = ("np." if known else "ml_dtypes.") + (array.dtype.name if array.dtype != bool else "bool_")
    plain = array if known else array.astype(np.float32)
    if plain.dtype.kind == "f":  # the fewest digits that give the number in its own type
        plain = np.array([float(str(number)) for number in plain.ravel()]).reshape(plain.shape)
    written = re.sub(r"\b(nan|inf)\b", r"np.\1", repr(plain.tolist()))
    shape = f".reshape({array.shape})" if array.size == 0 and array.ndim > 1 else ""
    return f"np.array({written}, dtype={dtype}){shape}"


def _rounded(value: Any) -> Any:
    """A float array with two digits after the point where that keeps its order, for a page: everything else as it is."""
    array = np.asarray(value)
    if isinstance(value, list) or array.dtype not in (np.float32, np.float64) or not np.isfinite(array).all():
        return value
    short = np.array([float(f"{number:.3g}") for number in array.ravel().tolist()], array.dtype).reshape(array.shape)
    return short if np.unique(short).size == np.unique(array).size else value


def _same(one: ModelProto, other: ModelProto) -> bool:
    """True if two models say the same, however their constants are stored."""

    def said(model: ModelProto) -> tuple[str, list[tuple[str, bytes]]]:
        held = [
            (t.name, str(t.data_type).encode() + numpy_helper.to_array(t).tobytes()) for t in model.graph.initializer
        ]
        return onnx.printer.to_text(model), held

    return said(one) == said(other)


@dataclass(frozen=True)
class Example:
    """Code that runs, what it printed, and the verdicts of the check on the same model and feeds."""

    code: str
    printed: str
    verdict: str


def example(case: Case) -> Example | None:
    """Return an example of the gradient of a case, executed and checked; None where the text of the model would differ.

    Floats have three digits, unless the check needs those of the case: another number may round to another integer.

    :raises ValueError: the check contradicts the gradient.
    """
    try:
        return _example(case, {name: _rounded(value) for name, value in case.feeds.items()})
    except ValueError:
        return _example(case, case.feeds)


def _example(case: Case, feeds: Mapping[str, Any]) -> Example | None:
    text = onnx.printer.to_text(case.model).strip()
    try:
        if not _same(onnx.parser.parse_model(text), case.model):
            return None
    except onnx.parser.ParseError:
        return None
    wanted = {"wrt": list(case.wrt) if case.wrt else None, "outputs": list(case.outputs) if case.outputs else None}
    gradient = _gradient(case, "onnx")[0]
    rng = np.random.default_rng(0)
    named = {value.name for value in gradient.graph.input}
    cotangents = {
        f"{name}_grad": np.round(rng.uniform(-1, 1, value.shape), 1).astype(value.dtype)
        for name, value in get_backend("numpy").prepare(case.model).run(feeds).items()
        if f"{name}_grad" in named and isinstance(value, np.ndarray)
    }
    if not cotangents.keys() | feeds.keys() >= named:
        return None  # the cotangent of a sequence
    fed = {name: value for name, value in (feeds | cotangents).items() if name in named}
    options = "".join(f", {key}={value!r}" for key, value in wanted.items() if value is not None)
    quotes = "'''" if '"""' in text else '"""'
    lines = "\n".join(f"    {name!r}: {_literal(value)}," for name, value in fed.items())
    types = "import ml_dtypes\n" if "ml_dtypes." in lines else ""
    code = (
        f"{types}import numpy as np\nimport onnx.parser\nimport refgrad\nfrom refgrad.backends import get_backend\n\n"
        f"model = onnx.parser.parse_model({quotes}\n{text}\n{quotes})\n"
        f"gradient = refgrad.gradient(model{options})\nfeeds = {{\n{lines}\n}}\n"
        'for name, value in get_backend("numpy").prepare(gradient).run(feeds).items():\n    print(name, value, sep="\\n")'
    )
    if "\\" in text:
        code = code.replace(f"({quotes}\n", f"(r{quotes}\n")
    return Example(code, executed(code), _checked(case, feeds, wanted))


def executed(code: str) -> str:
    """Run code of a page in a namespace of its own, and return what it printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), np.printoptions(precision=4, suppress=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        exec(code, {"__name__": "example"})
    return output.getvalue()


def _checked(case: Case, feeds: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The verdict of the oracles on the gradients of a case, as a sentence.

    :raises ValueError: one of them contradicts.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check(case.model, feeds, **wanted, backends=["numpy"], dialects=["onnx"])
    if not found.ok:
        raise ValueError(f"The example of {case.name} is contradicted: {found.faults[0]}.")
    counts = Counter(row.verdict for row in found.rows)
    oracles = " and ".join(dict.fromkeys(row.oracle for row in found.rows if row.verdict == "right"))
    others = "".join(f", {number} {verdict}" for verdict, number in counts.items() if verdict != "right")
    by = f" ({oracles})" if oracles else ""
    return f"`refgrad check` of this model at these feeds: {counts['right']} comparisons are right{by}{others}.\n"


def _signature(operator: str) -> str:
    """The inputs, outputs and attributes of an operator, from its schema or from what ONNX Runtime registers."""
    domain, _, op_type = operator.rpartition(".")
    schema, registered = find_schema(op_type, domain), runtime_operators().get((domain, op_type))
    if schema is not None:
        whence = f"From opset {schema.since_version} of {f'`{domain}`' if domain else 'ai.onnx'} on."
        values = [
            (kind, f"`{p.name}`", str(p.option).rpartition(".")[2].lower(), _types(schema, p.type_str))
            for kind, parameters in (("input", schema.inputs), ("output", schema.outputs))
            for p in parameters
        ]
        attributes = [
            (f"`{a.name}`", str(a.type).rpartition(".")[2].lower(), _default(a.default_value, a.required))
            for a in schema.attributes.values()
        ]
    elif registered is not None:
        whence = f"As ONNX Runtime registers it, version {registered.version} of `{domain}`."
        values = [
            (kind, f"`{name}`", option, _shortened(registered.types.get(variable, [variable])))
            for kind, parameters in (("input", registered.inputs), ("output", registered.outputs))
            for name, variable, option in parameters
        ]
        attributes = [
            (
                f"`{name}`",
                str(kind).lower(),
                "required" if required else escaped("" if default is None else str(default)),
            )
            for name, (kind, default, required) in registered.attributes.items()
        ]
    else:
        return "Nobody has published a schema of it.\n"
    parts = [f"{whence}\n", table(("", "name", "", "types"), values)]
    if attributes:
        parts.append(table(("attribute", "type", "default"), attributes))
    return "\n".join(parts)


def _types(schema: Any, variable: str) -> str:
    allowed = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == variable), [variable])
    return _shortened(list(allowed))


def _shortened(types: Sequence[str]) -> str:
    plain = [escaped(re.sub(r"^tensor\((\w+)\)$", r"\1", kind)) for kind in types]
    return ", ".join(plain) if len(plain) <= 6 else f"{', '.join(plain[:5])} and {len(plain) - 5} more"


def _default(default: Any, required: bool) -> str:
    if required:
        return "required"
    if not default.name:
        return ""
    value = onnx.helper.get_attribute_value(default)
    return escaped(
        value.decode(errors="replace")
        if isinstance(value, bytes)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _gradient(case: Case, dialect: str) -> tuple[ModelProto, list[str]]:
    """The gradient of a case, and what refgrad warns of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gradient = refgrad.gradient(case.model, case.wrt, case.outputs, dialect=dialect)
    return gradient, list(dict.fromkeys(str(one.message) for one in said))


def _pictures(case: Case, slug: str) -> tuple[str, dict[str, str]]:
    """The section of a page with both gradients of a case as pictures."""
    drawn, sizes, said = {}, {}, {}
    for dialect in DIALECTS:
        gradient, said[dialect] = _gradient(case, dialect)
        drawn[dialect] = refgrad.to_svg(gradient)
        sizes[dialect] = len(gradient.graph.node)
    same = drawn["onnx"] == drawn["ort"]
    parts = [
        f"Of the case `{case.name}`: forward nodes are blue, the nodes of the derivative orange, and dashed arrows are what "
        "the derivative reads of the forward pass.\n"
    ]
    pictures = {}
    for dialect in DIALECTS[:1] if same else DIALECTS:
        what = "ai.onnx operators alone" if dialect == "onnx" else "with the training operators of ONNX Runtime"
        name = f"{slug}.{dialect}.svg"
        pictures[name] = drawn[dialect]
        parts.append(
            f"### Dialect {dialect}\n\n{sizes[dialect]} {'node' if sizes[dialect] == 1 else 'nodes'}, {what}.\n\n"
            f"![The gradient of {escaped(case.operator)} in dialect {dialect}](pictures/{name})\n"
        )
    parts += [f"refgrad warns: {escaped(warning)}\n" for warning in said["onnx"]]
    if same:
        parts.append("In dialect ort it is the same graph.\n")
    return "\n".join(parts), pictures


def _rows(page: str, operator: str, column: int = 0) -> list[str]:
    """The rows of the tables of a page of which a cell names this operator."""
    cell = re.compile(rf"(?:^|, )(?:\[{re.escape(operator)}\]\([^)]*\)|{re.escape(operator)})(?:,|$)")
    rows = (line for line in page.splitlines() if line.startswith("| "))
    return [line for line in rows if cell.search(re.split(r"(?<!\\)\|", line)[1 + column].strip())]


def _kinks(records: Records, operator: str) -> str:
    tables = []
    for section in re.split(r"^## ", records.kinks, flags=re.MULTILINE):
        rows = _rows(section, operator)
        if rows:
            head = [line for line in section.splitlines() if line.startswith("| ")][:2]
            title = section.partition("\n")[0]
            named = "" if title.startswith("# ") else f"{title}:\n\n"
            tables.append(named + "\n".join("| " + line.split(" | ", 1)[1] for line in (*head, *rows)) + "\n")
    if not tables:
        return "None is recorded: the rule is the derivative wherever there is one.\n"
    return (
        "Where the derivative does not exist, the gradient of each input for a cotangent of 1 "
        "([all kinks](../kinks.md)).\n\n" + "\n".join(tables)
    )


def _parity(records: Records, operator: str) -> str:
    domain, _, op_type = operator.rpartition(".")
    counts = records.parity.get(op_type) if domain in ("", "com.microsoft") else None
    if counts is None:
        return "ONNX Runtime's gradient builder has no gradient for it ([parity](../parity.md)).\n"
    same = sum(number for name, number in counts.items() if name.startswith("isomorphic"))
    return (
        f"Of {counts['cases']} cases of operators called {op_type}, ONNX Runtime's gradient builder is right in "
        f"{counts.get('right', 0)}. Of these, {same} graphs in dialect ort are the same node by node, or but for the shape "
        "of a constant or an attribute ([parity](../reports/parity.md) explains the others).\n\n"
        + table(PARITY, [[str(counts.get(name, "")) for name in PARITY]])
    )


def _verdicts(records: Records, operator: str) -> str:
    counts = records.verdicts.get(operator)
    parts = []
    if counts:
        rows = [
            (escaped(builder), escaped(executor), str(sum(count.values())), marked(count))
            for (builder, executor), count in counts.items()
        ]
        legend = ", ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items())
        parts.append(
            "The gradients of each builder on each executor against independent oracles ([scoreboard](../scoreboard.md)). "
            f"{legend}.\n\n{table(('builder', 'executor', 'cases', 'verdicts'), rows)}"
        )
    else:
        parts.append("The scoreboard has no cases of it alone ([scoreboard](../scoreboard.md)).\n")
    known = [one for one in records.limitations if one.operator == operator]
    if known:
        parts.append(
            "Known to fail:\n\n" + "\n".join(f"- on {escaped(one.executor)}: {escaped(one.reason)}" for one in known)
        )
        parts[-1] += "\n"
    return "\n".join(parts)


def _findings(records: Records, operator: str) -> str:
    found, system = [], ""
    for line in records.known_bugs.splitlines():
        if line.startswith("## "):
            system = line.removeprefix("## ").partition(":")[0]
        elif line.startswith("| ") and _rows(line, operator):
            first, fault = re.split(r"(?<!\\) \| ", line.removeprefix("| "))[:2]
            link = next(target for name, target in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", first) if name == operator)
            found.append(f"- {system}: [it {fault.removesuffix(' |')}](../reports/{link})")
    if not found:
        return "Of no other system is a fault recorded ([findings](../findings.md)).\n"
    return "What other systems compute wrongly ([all findings](../reports/findings.md)):\n\n" + "\n".join(found) + "\n"


def page(one: Operator, records: Records, beside: Sequence[str]) -> Page:
    """Return the page of an operator. `beside` are links to the pages before and after it."""
    told = explain(one.operator)
    case = first_case(one.operator)
    way = "a rule" if one.derivative == "rule" else "the derivative of its function body"
    domain, _, op_type = one.operator.rpartition(".")
    wrt = RULES[domain, op_type].wrt if (domain, op_type) in RULES else ()
    parts = [
        front_matter(orphan=True),
        f"# {escaped(one.operator)}\n\n[All operators](index.md){''.join(f' · {link}' for link in beside)}\n",
        f"The derivative is {way}:\n\n{fence(told.text)}",
        f"It is differentiated with respect to {', '.join(f'`{name}`' for name in wrt)}.\n" if wrt else "",
        f"## Signature\n\n{_signature(one.operator)}",
    ]
    pictures: dict[str, str] = {}
    if case is None:
        parts.append("## Its gradient\n\nThe suite has no case of this operator, so there is no graph to show.\n")
    else:
        section, pictures = _pictures(case, one.operator)
        parts.append(f"## Its gradient\n\n{section}")
        shown = example(case)
        if shown is not None:
            parts.append(
                f"## Example\n\n{fence(shown.code, 'python')}\nIt prints:\n\n{fence(shown.printed)}\n{shown.verdict}"
            )
    parts += [
        f"## Kinks\n\n{_kinks(records, one.operator)}",
        f"## Verdicts\n\n{_verdicts(records, one.operator)}",
        f"## Parity\n\n{_parity(records, one.operator)}",
        f"## Findings\n\n{_findings(records, one.operator)}",
    ]
    return Page("\n".join(filter(None, parts)), pictures)


def pages(records: Records, names: Sequence[str] | None = None) -> dict[str, Page]:
    """Return the page of every operator that has one, by its path in the site; `names` chooses some."""
    chosen = [one for one in with_pages() if names is None or one.operator in names]
    made = {}
    for place, one in enumerate(chosen):
        beside = [
            f"[{sign}{chosen[other].operator}]({chosen[other].operator}.md)"
            for sign, other in (("← ", place - 1), ("→ ", place + 1))
            if 0 <= other < len(chosen)
        ]
        made[f"operators/{one.operator}.md"] = page(one, records, beside)
    return made


def index(table_page: str) -> str:
    """Return the page of all operators: docs/operators.md, where each operator that has a page leads to it."""
    known = {one.operator for one in with_pages()}

    def linked(match: re.Match[str]) -> str:
        shown = match[1].replace(".", ".\u200b")  # where a long name may break
        return f"| [{shown}]({match[1]}.md) |" if match[1] in known else f"| {shown} |"

    return re.sub(r"^\| (\S+) \|", linked, table_page, flags=re.MULTILINE)


def read(folder: Path) -> tuple[Limitation, ...]:
    """Return the known limitations of stock ONNX Runtime, of docs/limitations.toml in `folder`."""
    return Limitations.read(folder / "limitations.toml").entries
