"""Write the tables that the project prints of itself: in reports/, the first screen of each in docs/, the numbers of README.md.

python docs/generate.py            # write them
python docs/generate.py --check    # fail where one is stale
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import gallery_page
import kink_pages
import numpy as np
import onnx
import onnx.printer
import pictures
import precision_page
import stubs
import summaries
from benchmark_tables import BENCHMARKS

from refgrad.conformance.case import Case
from refgrad.conformance.judge.running.nodemodels import FIXED, excluded, moved, node_models
from refgrad.conformance.judge.running.sources import of_bugs
from refgrad.conformance.known.bugs import known_bugs as every_known_bug
from refgrad.conformance.known.bugs.bug import RELEASES, TRAINING, VERSIONS, KnownBug
from refgrad.conformance.known.bugs.builders import builder_bugs
from refgrad.conformance.known.bugs.builders.bug import BUILDER_VERSIONS, BuilderBug
from refgrad.conformance.known.differences import KINDS as DIFFERENCES
from refgrad.conformance.reports import markdown
from refgrad.conformance.tools.coverage import read_reasons
from refgrad.conformance.tools.exporting.backendtests import KINDS, LEFT_OUT, backend_tests
from refgrad.conformance.tools.exporting.expected import curated, symbolic
from refgrad.conformance.tools.mutating.mutants import COLUMNS, WRONG_RESULT, Mutant
from refgrad.conformance.tools.mutating.survey import defined, family, ruled
from refgrad.conformance.tools.parity.structure import OVERLOOKED
from refgrad.model.upgrading.upgrade import FIXES
from refgrad.tables.operators import operators as every_operator
from refgrad.tables.registry import CONTROL_FLOW_RULES, RULES

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "reports"
RESULTS = REPORTS / "results"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def operators() -> str:
    """Return docs/operators.md."""
    rows = [(o.operator, o.derivative, o.text) for o in every_operator()]
    names = ", ".join(sorted({name for _, name in (*RULES, *CONTROL_FLOW_RULES)}, key=str.lower))
    return (
        "# Operators\n\nThis table has the derivative of every operator of ONNX, and of ONNX Runtime's own operators. "
        "`refgrad ops` prints it.\n`refgrad explain Softmax` prints one operator.\n\n| derivative | meaning |\n| --- | --- |\n"
        "| rule | refgrad has a rule; its formula is given |\n| function | the function body of the operator is differentiated "
        "|\n| zero | the derivative is zero |\n| none | no derivative exists, for the given reason |\n| missing | nobody has "
        "written it yet |\n\n"
        + table(("operator", "derivative", "formula, body or reason"), rows)
        + f"\nRules: {names}.\n"
    )


def opsets() -> str:
    """Return docs/opsets.md."""
    rows = [(f.op_type, f"{max(f.since, 7)} to {f.until}" if f.until > f.since else str(f.until), f.why) for f in FIXES]
    return (
        "# Older opsets\n\nrefgrad converts a model of opset 7 to 15 before it differentiates it. This page says to what, "
        "and what it corrects.\n\n| model | becomes |\n| --- | --- |\n| opset 7 to 15 | opset 16, by "
        "`onnx.version_converter`, with its subgraphs |\n| opset 7 to 15, with sequences | opset 17 |\n| opset 16 or later "
        "| the gradient has the opset of the model |\n\nLocal functions are inlined before. Other domains stay as they "
        "are. Every operator of those opsets was compared before and\nafter in ONNX Runtime, and its gradient with float64 "
        "differences (`tests/model/test_opsets.py`).\n\nrefgrad rewrites the nodes that the converter gets wrong "
        "(`refgrad/model/upgrading/upgrade.py`):\n\n"
        + table(("operator", "opsets", "why"), rows)
        + "\nThese are refused, with the name of the node:\n\n- Scan of opset 8 with `sequence_lens`;\n- "
        "BatchNormalization in "
        "training if its `saved_mean` or `saved_var` is read, or with `spatial=0`;\n- sparse constants and "
        "initializers.\n\nonnx refuses a model with a local function of another opset if an operator in it differs between "
        "the two. Models before opset 7\nare converted as far as onnx can, but nothing about them is tested. The mask of "
        "Dropout in inference, which these versions leave\nopen, is 1.\n"
    )


def models_of_nodes() -> str:
    """Return docs/node_models.md."""
    reasons: dict[str, list[str]] = {}
    models = node_models()
    for test in models:
        reason = excluded(test)
        if reason is not None:
            reasons.setdefault(reason, []).append(test.name)
    left_out = [(", ".join(names), reason) for reason, names in sorted(reasons.items())]
    structured = [
        (test.name, *(", ".join(names) or "none" for names in moved(test)))
        for test in models
        if test.structured and excluded(test) is None
    ]
    fixed = [(f"{name} of {operator}", reason) for (operator, name), reason in FIXED.items()]
    judged = len(models) - sum(map(len, reasons.values()))
    return (
        "# The node tests of onnx\n\nDoes refgrad differentiate the models of onnx's own tests? onnx "
        f"{onnx.__version__} ships {len(models)} models of one operator each\nwith a float input and a float output. refgrad "
        f"differentiates {judged} of them by every float input, as they are and with everything else\nfolded into "
        "constants.\n\nEach gradient runs on the interpreter in float64. It has to equal central differences within 1e-4, "
        "along a random direction and for a\nrandom cotangent (`tests/conformance/cases/test_node_models.py`). "
        + (f"These are left out:\n\n{table(('models', 'why'), left_out)}" if left_out else "None is left out.\n")
        + ("\nThese inputs are not differentiated:\n\n" + table(("input", "why"), fixed) if fixed else "")
        + "\n## Control flow, recurrences, sequences and optionals\n\n"
        + f"{len(structured)} of the models have graphs within their nodes, a recurrence, sequences or optionals. A sequence "
        "is judged tensor by tensor.\n\nONNX Runtime has to compute these gradients too, if it runs the model: within 1e-4 in "
        "the model's own types, or one unit in the\nlast place of float16 and bfloat16. A gradient is zero if no output "
        "depends on the values of an input.\n\n" + table(("model", "differentiated by", "zero by"), structured)
    )


def tests_of_onnx() -> str:
    """Return docs/backend_tests.md."""
    tests = backend_tests()
    reasons: dict[str, list[str]] = {}
    for name, reason in sorted(LEFT_OUT.items()):
        if "Pillow" not in reason:  # true of an environment, not of the interpreter
            reasons.setdefault(reason, []).append(name)
    left_out = {kind: sum(name in tests[kind] for names in reasons.values() for name in names) for kind in KINDS}
    rows = [
        (kind, str(len(tests[kind]) - left_out[kind]), str(left_out[kind]), str(len(tests[kind]))) for kind in KINDS
    ]
    return (
        "# The backend tests of onnx\n\nDoes the [interpreter](interpreter.md) pass onnx's own tests? "
        f"onnx {onnx.__version__} ships tests for programs that run its models, and the\ninterpreter passes all except those "
        "below (`tests/backends/test_onnx_backend.py`, through `refgrad.backends.onnx_backend`).\n\nThe tests of ImageDecoder "
        "need Pillow. Models with the operator Gradient go through `refgrad.expand_gradients` first.\n\n"
        + table(("kind", "passed", "left out", "in all"), rows)
        + "\nLeft out:\n\n"
        + table(("tests", "why"), ((", ".join(names), reason) for reason, names in sorted(reasons.items())))
    )


def known_bugs() -> dict[Path, str]:
    """Return reports/findings.md, which has a table for each system, the models in reports/findings/, and docs/findings.md."""
    pages = {}
    sections = []
    counts = []
    for system, releases in RELEASES.items():
        title = f"{system} {' or '.join(releases)}"
        groups: dict[tuple[str, ...], list[str]] = {}
        models = [f"# Models that {title} gets wrong\n\n[All findings](../findings.md)\n"]
        found = [f for f in every_known_bug() if f.system == system]
        for f, link, heading in _linked(found):
            fault = f.fault + (f" (until {f.until})" if f.until else "")
            proof = f.proof or "float64 differences of the forward model"
            disputed = f"disputed: {f.disputed}" if f.disputed else ""
            groups.setdefault((fault, "; ".join(filter(None, (disputed, proof)))), []).append(link)
            told = f"It {fault}." + (f" This is {disputed}." if disputed else "")
            models.append(f"{heading}\n\n{told}\n\n{_code(f.model)}\n{_data(f)}")
        rows = [(", ".join(links), *what) for what, links in groups.items()]
        sections.append(_section(title, found, ("operator", "what is wrong", "proof"), rows))
        counts.append((title, _page(system).name, *_counts_of(found)))
        pages[_page(system)] = "\n".join(models)
    cases = dict(zip(builder_bugs(), of_bugs(), strict=True))
    for system, version in BUILDER_VERSIONS.items():
        groups = {}
        models = [f"# Gradients that {system} {version} writes wrongly\n\n[All findings](../findings.md)\n"]
        gradients = [f for f in builder_bugs() if f.system == system]
        for g, link, heading in _linked(gradients):
            groups.setdefault((g.fault, g.graph), []).append(link)
            models.append(
                f"{heading}\n\n{' and '.join(g.builders)}: it {g.fault}.\nWhat is wrong in the graph: {g.graph}.\n"
                f"Who is right: {g.proof}.\n\n{_code(g.model)}\n{_gradients(g)}\n{_again(g, cases[g])}"
            )
        rows = [(", ".join(links), *what) for what, links in groups.items()]
        header, title = ("operator", "what is wrong", "in the graph that it writes"), f"Gradients by {system} {version}"
        sections.append(_section(title, gradients, header, rows))
        counts.append((title, _page(system).name, *_counts_of(gradients)))
        pages[_page(system)] = "\n".join(models)
    pages[REPORTS / "findings.md"] = (
        "# All findings\n\nEach operator leads to its model, its feeds and the right result. "
        "[Findings](../docs/findings.md) says how they are proved.\n\n" + "\n".join(sections)
    )
    pages[ROOT / "docs" / "findings.md"] = summaries.known_bugs(counts, table)
    return pages


AnyBug = TypeVar("AnyBug", KnownBug, BuilderBug)


def _linked(found: Iterable[AnyBug]) -> Iterator[tuple[AnyBug, str, str]]:
    """Each known bug with the link to its model and the heading there."""
    seen: Counter[str] = Counter()
    for f in found:
        seen[f.operator] += 1
        number = seen[f.operator]
        link = f"[{f.operator}](findings/{f.system}.md#{f.operator.lower()}-{number})"
        yield f, link, f"## {f.operator} {number}"


def _counts_of(found: Sequence[KnownBug | BuilderBug]) -> tuple[int, int]:
    """The number of known bugs, and of operators that they are about."""
    return len(found), len({f.operator for f in found})


def _section(
    title: str, found: Sequence[KnownBug | BuilderBug], header: Sequence[str], rows: Iterable[Sequence[str]]
) -> str:
    known_bugs, operators = _counts_of(found)
    return f"## {title}: {known_bugs} findings about {operators} operators\n\n{table(header, rows)}"


def _page(system: str) -> Path:
    return REPORTS / "findings" / f"{system}.md"


def _code(model: onnx.ModelProto) -> str:
    return f"```\n{onnx.printer.to_text(model).strip()}\n```\n"


def _data(bug: KnownBug) -> str:
    """List what is fed and what has to come out."""
    fed = [f"- {name}: `{_short(value)}`\n" for name, value in bug.feeds.items()]
    return "".join(fed + [f"- {name} has to be `{_short(value)}`\n" for name, value in bug.expected.items()])


def _gradients(bug: BuilderBug) -> str:
    """List what is fed, what the gradients have to be, and what they are."""
    lines = [f"- {name}: `{_short(value)}`\n" for name, value in bug.feeds.items()]
    lines += [f"- the cotangent of {name}: `{_short(value)}`\n" for name, value in bug.cotangents.items()]
    given = bug.given
    for name, value in bug.expected.items():
        but = "" if isinstance(given, str) else f", and is `{_short(given[name])}`"
        lines.append(f"- the gradient by {name} has to be `{_short(value)}`{but}\n")
    if isinstance(given, str):
        lines.append(f"- instead, {bug.executor} says: `{given}`\n")
    return "".join(lines)


def _again(bug: BuilderBug, case: Case) -> str:
    """The command that shows it."""
    return (
        f"```console\n$ refgrad conformance run --source findings --case {case.name} --opset {case.opset} "
        f"--builder {','.join(bug.builders)} --backend {bug.executor}\n```\n"
    )


def _short(value: Any) -> str:
    """Write an array on one line, a long or empty one by its shape."""
    if isinstance(value, np.ndarray) and not 0 < value.size <= 24:
        return f"{value.dtype}{list(value.shape)}"
    return (
        " ".join(np.array2string(np.asarray(value), separator=", ").split())
        if not isinstance(value, list)
        else str(value)
    )


def parity() -> dict[Path, str]:
    """Return reports/parity.md and docs/parity.md, from the results that `nox -s parity` wrote."""
    results = json.loads((RESULTS / "parity.json").read_text())
    per_operator: dict[str, dict[str, int]] = results["operators"]
    total = Counter[str]()
    for column in per_operator.values():
        total.update(column)
    apart = {verdict: words for name, words in OVERLOOKED.items() for verdict in [f"isomorphic apart from {name}"]}
    apart[f"isomorphic apart from {' and '.join(OVERLOOKED)}"] = "both of these"
    columns = ("cases", "right", "same operators", "same names", "isomorphic", *apart, *DIFFERENCES)
    rows = [[name, *(str(column.get(c) or "") for c in columns)] for name, column in per_operator.items()]
    rows.append(["all", *(str(total[c]) for c in columns)])
    same = total["isomorphic"] + sum(total[c] for c in apart)
    lines = [
        "# Parity with ONNX Runtime's gradient builder, operator by operator\n",
        f"Dialect `ort` against GradientGraphBuilder of onnxruntime-training-cpu {VERSIONS[TRAINING]}, over {total['cases']} "
        f"cases of the {len(per_operator)} operators that it has a\ngradient for. In {total['right']} of them its gradient "
        f"is right: {same} of these graphs are refgrad's ({same / total['right']:.0%}), {total['isomorphic']} of them node "
        "by node. [Parity](../docs/parity.md) says what the columns count.\nEvery graph of the last columns is explained "
        "below. What the builder writes wrongly is shown on models of a few elements in\n[findings.md](findings.md).\n",
        table(("operator", *columns), rows),
        "## Whole models\n",
        table(
            ("model", "builder", "nodes", "its nodes", "graph", "training operators", "names", "values"),
            [
                [
                    *map(str, (m["name"], m["builder"], *m["nodes"])),
                    m["row"]["verdict"],
                    *("the same" if m["row"][same] else "others" for same in ("same_operators", "same_names")),
                    m["row"]["values"],
                ]
                for m in results["models"]
            ],
        ),
    ]
    lines.append(training_artifacts())
    lines.append(beaten_kernels())
    for kind, words in DIFFERENCES.items():
        lines.append(f"## {kind.capitalize()}: {words}\n")
        for ground in (ground for ground in results["departures"] if ground["kind"] == kind):
            cases = ", ".join(f"{name} ({count})" for name, count in ground["cases"].items())
            lines += [f"**{cases}.** {ground['reason']}\n", f"`{ground['example']}`\n"]
            shown = "\n".join(part for part in (ground["detail"], ground["proof"]) if part)
            if shown:
                lines.append(f"```\n{shown}\n```\n")
    meanings = summaries.COLUMNS_OF_PARITY | apart | DIFFERENCES
    summary = summaries.parity(parity_summary(), [(c, str(total[c]), meanings[c]) for c in columns[1:]], table)
    return {REPORTS / "parity.md": "\n".join(lines), ROOT / "docs" / "parity.md": summary}


def without_mutants(measured: Collection[str]) -> tuple[list[str], list[str]]:
    """The operators that have no row: those that only have cases which round, and those that nobody measured yet."""
    rest = sorted((ruled().keys() | defined().keys()) - set(measured))
    rounding = read_reasons()["cases"]
    return [name for name in rest if name in rounding], [name for name in rest if name not in rounding]


def mutants() -> dict[Path, str]:
    """Return reports/mutants.md and docs/mutants.md, from the results that benchmarks/mutants.py wrote."""
    results = json.loads((RESULTS / "mutants.json").read_text())
    bodies = {name: family(key) for name, key in defined().items()}
    rows: dict[str, Counter[str]] = {}  # of each operator that has a rule
    families: dict[str, Counter[str]] = {}  # of those that have a body
    for name, column in results["operators"].items():
        if name in bodies:
            families.setdefault(bodies[name], Counter(operators=0)).update({"operators": 1, **column})
        else:
            rows[name] = Counter(column)
    reasons: dict[str, list[Mutant]] = {}
    for survivor in results["survivors"]:
        mutant = Mutant(**survivor)
        reasons.setdefault(mutant.reason, []).append(mutant)
    equivalent = [m for found in reasons.values() for m in found if m.row is not None and not m.row.limit]
    for mutant in equivalent:
        if mutant.operator in bodies:
            families[bodies[mutant.operator]][EQUIVALENT] += 1
    asleep, unmeasured = without_mutants(results["operators"])
    asleep = sorted({*asleep, *(name for name, column in rows.items() if not column["mutants"])})
    rows = {name: column for name, column in rows.items() if name not in asleep}
    columns = [name for name in COLUMNS if name != WRONG_RESULT]  # which only bodies have
    measured = sum(name in bodies for name in results["operators"])
    lines = [
        "# Mutants, operator by operator\n",
        "[Mutants](../docs/mutants.md) says what they are, and how many the suite catches. What the columns count:\n",
        *(f"- {column}: {words}" for column, words in COLUMNS.items()),
        f'\nThe rules of {", ".join(asleep)} only apply where `quantization` is not "zero", and their cases do not have a '
        "derivative.\n",
        *([f"{', '.join(unmeasured)} were not measured yet.\n"] if unmeasured else []),
        "## Rules\n",
        _counts("operator", rows, columns),
        "## Function bodies\n",
        "By family, the module in `refgrad/microsoft/bodies`. Of those that survived, some are equivalent.\n",
        _counts("family", dict(sorted(families.items())), ["operators", *COLUMNS, EQUIVALENT]),
        "## Who said wrong\n",
        table(("oracle", "mutants"), ((name, str(count)) for name, count in results["witnesses"].items())),
        "## Survivors\n",
        "Each of these changes the model but no gradient that a case asks for; the reason is given. Those marked * are not "
        "equivalent: the\nsuite does not ask for what they change.\n",
    ]
    for reason, found in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        beyond = "*" if found[0].row is not None and found[0].row.limit else ""
        lines.append(f"**{reason}**{beyond} {len(found)}:\n")
        places: dict[tuple[str, str], list[str]] = {}
        for mutant in found:
            places.setdefault((mutant.place, mutant.change), []).append(mutant.operator)
        lines.append(
            table(
                ("place", "change", "operators"),
                ((f"`{place}`", change, ", ".join(names)) for (place, change), names in sorted(places.items())),
            )
        )
    summary = summaries.mutants(
        _caught(rows, sum(m.operator not in bodies for m in equivalent), f"{len(rows)} rules"),
        _caught(families, sum(m.operator in bodies for m in equivalent), f"{measured} bodies"),
        _of_tests(),
        _of_seeds(),
    )
    return {REPORTS / "mutants.md": "\n".join(lines), ROOT / "docs" / "mutants.md": summary}


EQUIVALENT = "equivalent"


def _caught(rows: Mapping[str, Counter[str]], equal: int, what: str) -> str:
    """How many mutants are caught, in a sentence or two."""
    total = sum(rows.values(), Counter[str]())
    caught, rest = total["mutants"] - total["survived"], total["mutants"] - equal
    return (
        f"There are {total['mutants']} mutants of {what}. {equal} are equivalent: they do not change a gradient. Of the "
        f"other {rest}\nthe suite catches {caught}, {caught / rest:.1%}."
    )


def _counts(title: str, rows: Mapping[str, Counter[str]], columns: Sequence[str]) -> str:
    """A table of counts, with their sums in its last row."""
    total = sum(rows.values(), Counter[str]())
    shown = [[name, *(str(column[c] or "") for c in columns)] for name, column in rows.items()]
    return table((title, *columns), [*shown, ["all", *(str(total[c]) for c in columns)]])


def _of_tests() -> str:
    """Return what benchmarks/mutants.py --tests found of the tests that CI runs."""
    row, every = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("mutants_tests", "mutants"))
    rest = sum(count["mutants"] > 0 for count in every["operators"].values()) - row["operators"]
    of_all = "" if row["every"] == 1 else f"one of {row['every']} of each operator, that is "
    missed = [(f"`{one['place']}`", one["change"], one["operator"]) for one in row["missed"]]
    return (
        "CI samples the largest matrices of tests ([development](development.md#samples)). It always runs the tests that "
        "find a wrong rule in one\ncase: the gradient against differences, the body of an operator of ONNX Runtime against "
        "its kernel, and the judge on control flow and\nsequences.\n\nThese tests ran on mutants that the suite catches "
        f"(`python benchmarks/mutants.py --tests`): {of_all}{row['caught']} mutants of\n{row['operators']} operators. They "
        f"notice {row['noticed']}, "
        f"{row['noticed'] / row['caught']:.2%}.{f' No mutant of the other {rest} operators was tried.' if rest else ''}\n"
        + ("\n" + table(("not noticed", "change", "operator"), missed) if missed else "")
        + "\nCI also runs every test with a planted fault, without sampling: the wrong rules of `test_planted.py`, the wrong "
        "structures of\n`test_planted_structures.py`, the guards of `test_jets.py`, the faults in `test_locating.py` and "
        "`test_locating_known_bugs.py`.\n"
    )


def _of_seeds() -> str:
    """Return what benchmarks/seeds.py found of rules that are not broken."""
    rows = json.loads((RESULTS / "conformance_seeds.json").read_text())
    asked, wrong, unsettled = (sum(row.get(key, 0) for row in rows) for key in ("cases", "wrong", "undecided"))
    return (
        f"`python benchmarks/seeds.py` asks the suite about the unchanged rules, with {len(rows)} seeds. Each seed draws other "
        f"cotangents and directions.\nOf {asked} verdicts on these right rules {wrong} said wrong, and {unsettled} "
        "undecided.\n"
    )


def training_artifacts() -> str:
    """Return the section of reports/parity.md on training, from the results that benchmarks/artifacts.py wrote."""
    results = json.loads((RESULTS / "artifacts.json").read_text())
    kinds = {"losses": "losses", "weights": "weights", "norm": "norm of weights"}
    runs = {"ort-cpu": "stock onnxruntime", "numpy": "interpreter", "double": "in double"}
    settings = ("model", "loss", "optimizer")
    rows = [
        [*(row[name] for name in settings), *(" / ".join(row[f"{run}: {kind}"] for kind in kinds) for run in runs)]
        for row in results
    ]
    shares = [float(row["compared one by one"].rstrip("%")) for row in results if row["optimizer"] == "AdamW"]
    left = max(100 - share for share in shares)
    return (
        "## Training artifacts\n\nThree steps by the models of `generate_artifacts`, lowered by `refgrad.lower`, against the "
        f"training API of ONNX Runtime {VERSIONS[TRAINING]}.\nResNet-18 has BatchNormalization in training: its running "
        f"statistics are compared as its weights are. Three figures each,\n{' / '.join(kinds.values())}: the largest "
        "relative error of a loss; after the last step the largest error in a tensor,\nrelative to its largest entry; and "
        "the norm of a tensor's errors, relative to its own. Under AdamW the second leaves out weights\nwhose gradient is "
        f"nearly 0 but not 0, which rounding decides, at most {left:.1f}%. `in double` is the lowered model in double: what "
        "the\ntraining API itself loses. The shifts of BatchNormalization are set to ±2.5 and the batches chosen so that "
        "no Relu comes near its kink:\nelsewhere one argument that rounds to the other side makes two right gradients "
        "differ by 1e-3 to 1e-1. The weights of the last layer are\ndivided by 10, so that no loss is infinite in float32 "
        "(`benchmarks/artifacts.py`).\n\n" + table((*settings, *runs.values()), rows)
    )


def beaten_kernels() -> str:
    """The section of reports/parity.md on the kernels that plain operators beat, from `benchmarks/operators.py --ort`."""
    rows = [row for row in json.loads((RESULTS / "operators_ort.json").read_text()) if row["its kernels"]]
    rows.sort(key=lambda row: -row["ratio"])

    def listed(least: float, most: float) -> str:
        found = [f"{r['its kernels']} ({r['row']}: {r['ratio']})" for r in rows if least < r["ratio"] < most]
        return "; ".join(found) or "nowhere"

    return (
        "## Which of its kernels plain operators beat\n\nForward and backward in dialect `ort` against dialect `onnx`, "
        f"both on onnxruntime-training-cpu {VERSIONS[TRAINING]} with two threads. The number is the time in `ort` of that "
        "in `onnx`;\n[the table](benchmarks.md#operators-in-both-dialects) has them all.\n\n- Plain operators are faster: "
        f"{listed(1.1, float('inf'))}.\n- Its kernels are faster: {listed(0, 0.9)}.\n"
    )


def parity_summary() -> str:
    """Return the first paragraph of docs/parity.md."""
    results = json.loads((RESULTS / "parity.json").read_text())
    total = Counter[str]()
    for column in results["operators"].values():
        total.update(column)
    overlooked = sum(count for verdict, count in total.items() if verdict.startswith("isomorphic apart"))
    models = {model["name"] for model in results["models"]}
    same = models - {m["name"] for m in results["models"] if m["row"]["verdict"] != "isomorphic"}
    return (
        f"ONNX Runtime's builder has a gradient for {len(results['operators'])} operators, with {total['cases']} cases. It "
        f"is right in {total['right']} cases and wrong in {total['wrong']}.\n{total['fails']} of its graphs do not run, and "
        f"it refuses {total['refused']} cases.\n\nOf the cases in which it is right:\n\n- dialect `ort` has the same "
        f"training operators in {total['same operators']}, and the same names of gradients in {total['same names']};\n- "
        f"{total['isomorphic']} graphs are the same node by node;\n- {overlooked} more are the same except for an attribute "
        f"or the shape of a constant.\n\nThese whole models are the same node by node: {'; '.join(sorted(same))}.\n"
    )


def operators_summary() -> str:
    """Return the sentences of docs/README.md on operators."""
    count = Counter(o.derivative for o in every_operator())
    return (
        f"{count['rule']} operators have a rule, {count['function']} are differentiated through the smaller operators that "
        f"define them, and {count['zero']} have a\nderivative that is zero. {count['none']} have no derivative: refgrad "
        "refuses a model with one of them between `wrt` and the outputs. The\noperators of ai.onnx.ml, and the ones that "
        "ONNX Runtime's optimizer writes, are counted.\n"
    )


def speed() -> str:
    """Return the three figures of README.md."""
    on_gpu = json.loads((RESULTS / "run_time_cuda.json").read_text())
    exports = json.loads((RESULTS / "training_exports_time.json").read_text())
    [built] = [
        row
        for row in json.loads((RESULTS / "build_time.json").read_text())
        if (row["nodes"], row["dialect"]) == (1000, "onnx")
    ]
    of_torch = sorted(row["of torch"] for row in exports)
    ratios = sorted(row["ratio"] for row in on_gpu)
    link = "reports/benchmarks.md"
    return (
        f"- A training step on ONNX Runtime takes **{median(of_torch):.2g} of the time** of torch eager with two CPU cores: "
        f"the median of {len(of_torch)}\n  exports, from {of_torch[0]} to {of_torch[-1]} "
        f"([rows]({link}#training-of-torchs-exports-time-of-a-step)).\n"
        f"- Forward and backward on an H200 take **{median(ratios):.2g} of the time** of torch eager: the median of "
        f"{len(ratios)} models, from {ratios[0]}\n  to {ratios[-1]} ([rows]({link}#forward-and-backward-on-a-gpu)).\n"
        f"- Building the gradient of a model of {built['nodes']:,} nodes takes **{built['refgrad ms'] / 1e3:.2g} s**, "
        f"{built['ratio']} of the time of ONNX Runtime's\n  builder in C++ ([rows]({link}#building-the-gradient)).\n"
    )


def comparisons() -> str:
    """Return the table of docs/comparisons.md, from the results that benchmarks/comparisons.py wrote."""
    results = json.loads((RESULTS / "comparisons.json").read_text())
    tools = [name for name in results if name != "gradients"]
    rows = [[name, *(_answer(results[tool][name]) for tool in tools)] for name in results["gradients"]]
    return table(("model", *(f"{tool} {results[tool]['version']}" for tool in tools)), rows)


_SHOWN = 120  # characters of what a tool says


def _answer(answer: str) -> str:
    """An answer of a tool for a table: one word, or what it said when it did not answer."""
    if answer in ("right", "wrong"):
        return answer
    said = re.sub(r"([<>*_`\[\]])", r"\\\1", answer[:_SHOWN])
    return f"no: {said}{'…' if len(answer) > _SHOWN else ''}"


def models() -> dict[Path, str]:
    """Return reports/models.md and docs/models.md, from the results that `nox -s models` wrote."""
    rows = json.loads((RESULTS / "models.json").read_text())
    return {
        REPORTS / "models.md": "# Models, one by one\n\n[Models](../docs/models.md) says what the columns mean.\n\n"
        + table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]),
        ROOT / "docs" / "models.md": summaries.models(rows, table),
    }


def deployed() -> tuple[str, str]:
    """Return reports/deployed.md, and its summary in docs/deployed.md, from the results that benchmarks/deployed.py wrote."""
    rows = json.loads((RESULTS / "deployed.json").read_text())
    sections, summary = [], []
    for exported, title in ((True, "Exported models"), (False, "Language models by a model builder")):
        forms: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["model"].startswith("llm/") != exported:
                forms.setdefault(row["form"], []).append(row)
        lines = [(form, *_of_form(found)) for form, found in forms.items()]
        header = ("variant", "models", "refused", "check", "by torch: numpy float64", "by torch: ort-cpu")
        names = sorted({row["model"].removeprefix("llm/") for found in forms.values() for row in found})
        sections.append(f"## {title}\n\n{len(names)} models: {', '.join(names)}.\n\n{table(header, lines)}")
        compared = [line for line in lines if "float16" not in line[0]]
        largest = [max((line[at] for line in compared if line[at]), key=float) for at in (4, 5)]
        refused = sum(line[2] != "none" for line in lines)
        wrong = [f"{line[3].removeprefix('disagrees: ')} in {line[0]}" for line in lines if line[3] != "ok"]
        summary.append((title, str(len(names)), str(len(lines)), str(refused), "; ".join(wrong) or "none", *largest))
    header = ("", "models", "variants", "refused", "check disagrees", "largest error in float64", "on ort-cpu")
    return (
        "# Deployed models, variant by variant\n\n[Deployed models](../docs/deployed.md#what-was-measured) says what was "
        "measured. The errors are the largest of all models and tensors.\n\n" + "\n".join(sections),
        table(header, summary),
    )


def _of_form(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """How many models there are in a form, how many are refused or disagree, and the largest errors."""
    made = [row for row in rows if "tool" not in row]
    refused = [row["model"] for row in made if "refused" in row]
    wrong = [row["model"] for row in made if row.get("check", "ok") != "ok"]
    errors = []
    for backend in ("numpy float64", "ort-cpu"):
        keys = (
            f"{backend}: input",
            f"{backend}: weights",
            *(["straight-through: all"] if backend != "ort-cpu" else []),
        )
        found = [row[key] for row in made for key in keys if key in row]
        errors.append(f"{max(found):.1e}" if found else "")
    return (
        str(len(made)),
        ", ".join(refused) or "none",
        f"disagrees: {', '.join(wrong)}" if wrong else "ok",
        *errors,
    )


def gallery() -> dict[Path, str]:
    """Return reports/gallery.md and docs/gallery.md, from the results that `nox -s gallery` wrote."""
    rows = json.loads((RESULTS / "gallery.json").read_text())
    return {
        REPORTS / "gallery.md": gallery_page.report(rows, table),
        ROOT / "docs" / "gallery.md": gallery_page.page(rows, table),
    }


def special_points() -> dict[Path, str]:
    """Return reports/special_points.md and docs/special_points.md, from the results that `nox -s jets` compares with."""
    found = json.loads((RESULTS / "special_points.json").read_text())
    return {
        REPORTS / "special_points.md": kink_pages.report_of_special_points(found, table),
        ROOT / "docs" / "special_points.md": kink_pages.special_points(found, table),
    }


def precision() -> dict[Path, str]:
    """Return reports/precision.md and docs/precision.md, from the results that benchmarks/precision.py wrote."""
    rows = json.loads((RESULTS / "precision.json").read_text())
    return {
        REPORTS / "precision.md": precision_page.page(rows, table),
        ROOT / "docs" / "precision.md": precision_page.summary(rows, table),
    }


def rows_of(name: str) -> tuple[list[dict[str, Any]], str]:
    """Return the results of a benchmark, and the same as a table."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())
    # lists and tables inside of a row stay in the file
    header = list(
        dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], (list, dict)) and key != "place")
    )
    strange = ("sentence", "named")  # messages of other systems
    cells = [[(_plain if key in strange else str)(row.get(key, "")) for key in header] for row in rows]
    return rows, table(header, cells)


def _plain(text: str) -> str:
    """Return a message of another system as Markdown without markup."""
    return re.sub(r"([<>*_\\`\[\]])", r"\\\1", text)


def benchmarks() -> dict[Path, str]:
    """Return reports/benchmarks.md and docs/benchmarks.md, from the results that the benchmarks wrote."""
    parts, listed = [], []
    for title, name, note in BENCHMARKS:
        if (RESULTS / f"{name}.json").exists():
            rows, body = rows_of(name)
            if places := {row["place"] for row in rows if "place" in row}:
                note += f" Measured on {' and '.join(sorted(places))}."
            parts.append(f"## {title}\n\n{note}\n\n{body}")
            listed.append((title, rows))
    return {
        REPORTS / "benchmarks.md": "# Benchmarks, row by row\n\n[Benchmarks](../docs/benchmarks.md) has the means.\n\n"
        + "\n".join(parts),
        ROOT / "docs" / "benchmarks.md": summaries.benchmarks(listed, table),
    }


def scoreboard() -> dict[Path, str]:
    """Return docs/scoreboard.md, from the counts that benchmarks/scoreboard.py wrote; `nox -s scoreboard` writes the report."""
    results = json.loads((RESULTS / "scoreboard.json").read_text())
    return {ROOT / "docs" / "scoreboard.md": summaries.scoreboard(results, markdown.table)}


def runtimes() -> dict[Path, str]:
    """Return reports/runtimes.md and docs/runtimes.md, from the results that benchmarks/runtimes.py wrote."""
    results = json.loads((RESULTS / "runtimes.json").read_text())
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in results["runs"]:
        runs.setdefault(run["folder"], []).append(run)
    parts = [
        "# Runtimes, reason by reason\n\n[Runtimes](../docs/runtimes.md) says what was asked of them, and what the columns "
        "count.\n"
    ]
    for folder, title in FOLDERS.items():
        if folder in runs:
            rows = [
                (
                    *(str(run[key]) for key in ("runtime", "version", *summaries.COLUMNS_OF_RUNTIMES)),
                    summaries.right(run),
                    str(run["seconds"]),
                )
                for run in sorted(runs[folder], key=lambda run: -run["right"])
            ]
            header = ("runtime", "version", *summaries.COLUMNS_OF_RUNTIMES, "right of those that ran", "seconds")
            parts.append(f"## {title}\n\n{table(header, rows)}")
    for folder, title in FOLDERS.items():
        for run in runs.get(folder, ()):
            of = f"{title[0].lower()}{title[1:]}"
            groups = sorted(run["groups"], key=lambda group: -group["count"])
            if faults := [group for group in groups if group["verdict"] != "not supported"]:
                header = ("tests", "verdict", "what it says", "such as", "why")
                body = table(header, _explained(run["runtime"], faults))
                parts.append(f"## What {run['runtime']} fails: {of}\n\n{body}")
            if others := [group for group in groups if group["verdict"] == "not supported"]:
                rows = [(str(g["count"]), _plain(g["why"]), _case_of(g["tests"][0])) for g in others[:_GROUPS]]
                parts.append(
                    f"## What {run['runtime']} does not support: {of}\n\n"
                    + (f"The {_GROUPS} most frequent of {len(others)} reasons.\n\n" if len(others) > _GROUPS else "")
                    + table(("tests", "what it says", "such as"), rows)
                )
    return {
        REPORTS / "runtimes.md": "\n".join(parts),
        ROOT / "docs" / "runtimes.md": summaries.runtimes(runs, FOLDERS, table),
    }


def reason_of(runtime: str, test: str) -> str:
    """Why a runtime fails a test, as docs/runtime_faults.toml has it; empty where it has nothing."""
    for fault in FAULTS:
        if fnmatchcase(runtime, fault["runtime"]) and fnmatchcase(test, fault["test"]):
            return str(fault["reason"])
    return ""


FAULTS = tomllib.loads((ROOT / "docs" / "runtime_faults.toml").read_text(encoding="utf-8"))["fault"]
_GROUPS = 12  # reasons that are listed where a runtime has no support
FOLDERS = {
    "gradients": "Gradients of operators",
    "symbolic/gradients": "Gradients of operators, with symbolic sizes",
    "models/gradients": "Gradients of whole models",
    "forward": "The operators themselves",
    "symbolic/forward": "The operators themselves, with symbolic sizes",
    "models/forward": "The whole models themselves",
}


def _explained(runtime: str, groups: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str, str, str, str]]:
    """A row for the tests that fail in one way and for one reason of docs/runtime_faults.toml."""
    for group in groups:
        tests: dict[str, list[str]] = {}
        for test in group["tests"]:
            tests.setdefault(reason_of(runtime, test), []).append(test)
        for reason, names in tests.items():
            yield str(len(names)), group["verdict"], _plain(group["why"]), _case_of(names[0]), reason


def _case_of(test: str) -> str:
    return test.removeprefix("test_grad_")


def cost_of_strong_zero() -> str:
    """Return the paragraph of docs/nan_in_a_gradient.md on the time that the option takes."""
    rows, _ = rows_of("strong_zero")
    ratios = sorted(row["ratio"] for row in rows)
    return (
        f"On {len(rows)} models the gradient with the option takes {ratios[0]:.2f} to {ratios[-1]:.2f} times as long, on ONNX "
        "Runtime with two threads\n([the report](../reports/benchmarks.md#a-cotangent-of-0-that-stays-0)).\n"
    )


def exported() -> str:
    """Return the paragraph of docs/export.md on how many tests there are."""
    results = json.loads((RESULTS / "runtimes.json").read_text())
    numbers, symbols = len(curated()), len(symbolic())
    operators = len({case.operator for case in curated().values()})
    return (
        f"It makes a test of each of {numbers:,} cases of {operators} operators, and of {symbols:,} cases with symbolic sizes. "
        f"Cases with more than\none right answer are left out: {results['left_out'].get('', 0)} and "
        f"{results['left_out'].get('symbolic', 0)} when [runtimes](runtimes.md) were measured last. Each test is in two\n"
        "folders: the gradient as a model to run, and the model to differentiate.\n"
    )


def fill(text: str, section: str, body: str) -> str:
    """Replace what stands between the markers of `section`."""
    return re.sub(
        rf"(<!-- {section} -->\n).*?(<!-- /{section} -->)", lambda m: f"{m[1]}\n{body}\n{m[2]}", text, flags=re.DOTALL
    )


def generated() -> dict[Path, str]:
    """Every generated file with its content."""
    readme, deployed_page = ROOT / "README.md", ROOT / "docs" / "deployed.md"
    contents, compared = ROOT / "docs" / "README.md", ROOT / "docs" / "comparisons.md"
    export_page, nan_page = ROOT / "docs" / "export.md", ROOT / "docs" / "nan_in_a_gradient.md"
    return {
        readme: fill(readme.read_text(), "speed", speed()),
        ROOT / "docs" / "pictures" / "in_and_out.svg": pictures.in_and_out(),
        contents: fill(contents.read_text(), "operators", operators_summary()),
        compared: fill(compared.read_text(), "comparisons", comparisons()),
        **benchmarks(),
        ROOT / "docs" / "operators.md": operators(),
        ROOT / "refgrad" / "builder" / "operators.pyi": stubs.operators(),
        ROOT / "refgrad" / "builder" / "primitives.pyi": stubs.primitives(),
        ROOT / "docs" / "backend_tests.md": tests_of_onnx(),
        **known_bugs(),
        ROOT / "docs" / "kinks.md": kink_pages.kinks(table),
        export_page: fill(export_page.read_text(), "counts", exported()),
        **runtimes(),
        nan_page: fill(nan_page.read_text(), "strong_zero", cost_of_strong_zero()),
        REPORTS / "deployed.md": deployed()[0],
        deployed_page: fill(deployed_page.read_text(), "results", deployed()[1]),
        **models(),
        **gallery(),
        **mutants(),
        ROOT / "docs" / "node_models.md": models_of_nodes(),
        ROOT / "docs" / "opsets.md": opsets(),
        **parity(),
        **special_points(),
        **precision(),
        **scoreboard(),
    }


def fresh(path: Path, text: str) -> bool:
    """True if the file is there and says the same."""
    return path.exists() and path.read_text() == text


def main() -> int:
    """Write the files, or with --check say which are stale."""
    made = generated()
    stale = [path for path, text in made.items() if not fresh(path, text)]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run python docs/generate.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(made[path])
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
