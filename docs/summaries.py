"""The pages of docs/ that say on one screen what a report in reports/ has at length."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from refgrad.conformance.reports.tally import MARKS, counts_in
from refgrad.conformance.verdicts import VERDICTS

Table = Callable[[Sequence[str], Iterable[Sequence[str]]], str]
Rows = Sequence[Mapping[str, Any]]

COLUMNS_OF_PARITY = {
    "right": "both gradients are right",
    "same operators": "of these, both graphs have the same training operators",
    "same names": "of these, both graphs have the same names of gradients",
    "isomorphic": "of these, both graphs are the same node by node",
}
COLUMNS_OF_RUNTIMES = {  # the verdicts of the runners
    "right": "every output is right",
    "wrong": "an output is off by more than is allowed, or has another shape or type",
    "not supported": "the runtime says that it does not support something in the model, or it does not load the model",
    "crashed": "an error while it ran, or a process that ended",
    "timed out": "no answer in a minute",
}
RIGHT_OF = (
    "right of a folder",
    "the right tests, in percent of the tests that ran; tests that are not supported did not run",
)
FIGURES = ("ratio", "of torch", "of refgrad's", "error", "growth", "worst ratio", "times as fast as scikit-learn")


def models(rows: Rows, table: Table) -> str:
    """docs/models.md: for each column of errors its median and its largest over all models."""
    lines = []
    for column in rows[0]:
        errors = [float(row[column]) for row in rows if ": " in column and row[column]]
        if errors:
            lines.append((column, f"{median(errors):.1e}", f"{max(errors):.1e}"))
    return (
        f"# Models\n\nAre the gradients of whole models right? {len(rows)} architectures, as torch's exporter writes them, "
        "are compared with\ntorch.autograd in float64 (`nox -s models`). An error is the largest of a tensor, relative to "
        "the largest entry of the tensor. The bound\nis 2e-5. [The report](../reports/models.md) has every model.\n\n"
        + table(("executor and gradients", "median of the models", "largest"), lines)
        + "\n- `input` is the gradient of a float input, `weights` of any weight.\n"
        "- `torch float32` is the error of autograd itself in float32.\n"
        "- A tensor counts as no smaller than a ten-thousandth of the largest gradient of the model.\n"
        "- Some gradients are 0 in exact arithmetic, such as the gradient of the bias of attention's keys. In float32 they "
        "show only\n  rounding, so they are compared with autograd's own rounding. `numpy float64: all` leaves nothing "
        "out.\n- In the report, seconds are the time to build the gradient, and to run it once on both executors.\n\nEvery "
        "change is tested with the models of the session `torch`.\n"
    )


def known_bugs(counts: Iterable[tuple[str, str, int, int]], table: Table) -> str:
    """docs/findings.md. `counts` has for each system its title, its page, and the numbers of findings and operators."""
    rows = [(f"[{title}](../reports/findings/{page})", str(n), str(about)) for title, page, n, about in counts]
    return (
        "# Findings\n\nThis page counts the models that another system computes wrongly or not at all, and that refgrad "
        "computes right.\n[All findings](../reports/findings.md) lists them by system and operator. Each leads to its "
        "model, its feeds and the right result.\n\n"
        + table(("system", "findings", "operators"), rows)
        + "\nThe last rows are about gradients: another builder writes the gradient of a model wrongly, and refgrad writes "
        "it right. Each\ngradient is worked out by hand. Two oracles confirm it and contradict the builder. The suite "
        "finds these faults by itself:\n`refgrad conformance run --source findings`.\n\nThe records are in "
        "`conformance/known/bugs/*.toml`, and `refgrad.conformance.known.bugs.known_bugs()` reads them. The tests "
        "are\n`test_known_bugs.py` and `test_builder_bugs.py` in `tests/conformance/cases`.\n"
    )


def parity(summary: str, columns: Iterable[Sequence[str]], table: Table) -> str:
    """docs/parity.md: the totals of the report's columns, each with its meaning."""
    return (
        "# Parity with ONNX Runtime's gradient builder\n\nThis page compares the graphs of dialect `ort` with the graphs "
        f"of ONNX Runtime's own gradient builder.\n\n{summary}\n"
        + table(("column", "cases", "what it counts"), columns)
        + "\n[The report](../reports/parity.md) has these counts for every operator, and the reason of every difference. "
        "It also has whole\nmodels, training artifacts, and the kernels that plain operators beat. `nox -s parity` "
        "measures it anew. [Findings](findings.md) shows\nwhat the builder writes wrongly, on models of a few elements.\n"
    )


def mutants(rules: str, bodies: str, tests: str, seeds: str) -> str:
    """docs/mutants.md, from sentences that docs/generate.py makes of the results."""
    return (
        "# Mutants\n\nDoes the suite notice a wrong rule? A program breaks every rule on purpose, one place at a time, and "
        "then asks the suite.\nA broken rule is a mutant: a result of the rule is changed, or one node that the rule emits "
        f"(`refgrad.conformance.tools.mutating`).\n\n{rules} Each is caught by one of the cases of its operator.\n\nThe "
        "other operators of ONNX Runtime are differentiated through their function body. A program breaks it in the same "
        f"way, and also\nin its arithmetic and its constants. {bodies}\n\n[The report](../reports/mutants.md) has the "
        "counts of every operator, and every survivor with the reason; `python benchmarks/mutants.py`\nmeasures it "
        f"anew.\n\n## What CI notices\n\n{tests}\n## Is a right rule ever called wrong?\n\n{seeds}"
    )


def benchmarks(listed: Iterable[tuple[str, Rows]], table: Table) -> str:
    """docs/benchmarks.md: a line for each table of the report, with its median and its range."""
    lines = []
    for title, rows in listed:
        figure = next((name for name in FIGURES if any(_is_number(row.get(name)) for row in rows)), "")
        values = [row[figure] for row in rows if _is_number(row.get(figure))]
        spread = f"{min(values):.3g} to {max(values):.3g}" if len(values) > 1 else ""
        middle = f"{median(values):.3g}" if values else ""
        lines.append((f"[{title}](../reports/benchmarks.md#{anchor(title)})", str(len(rows)), figure, middle, spread))
    return (
        "# Benchmarks\n\nHow fast are gradients, and how much memory do they take? Each figure is a ratio of two "
        "measurements in one run on 2 cores\n(`nox -s benchmarks benchmarks_training`). [The "
        "report](../reports/benchmarks.md) has every row. It says what was measured, and what\nthe goals are.\n\n"
        + table(("what was measured", "rows", "figure", "median", "range"), lines)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def anchor(title: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def scoreboard(results: Mapping[str, Any], table: Table) -> str:
    """docs/scoreboard.md: how often each builder and executor has each verdict."""
    totals: dict[tuple[str, str], Counter[str]] = {}
    for counts in counts_in(results).values():
        for pair, count in counts.items():
            totals.setdefault(pair, Counter()).update(count)
    verdicts = [verdict for verdict in MARKS if any(count[verdict] for count in totals.values())]
    rows = [
        (f"{builder} on {executor}", *(str(totals[builder, executor][v] or "") for v in verdicts))
        for builder, executor in results["pairs"]
    ]
    return (
        "# Scoreboard\n\nWho gets which operator right? The table counts the verdicts of the [suite](conformance.md) on the "
        f"gradients of each builder on each\nexecutor: {results['cases']} cases of {len(results['operators'])} operators, "
        "judged by [independent oracles](oracles.md). An empty entry is 0.\n\n"
        + table(("builder and executor", *verdicts), rows)
        + "\n"
        + table(("verdict", "what it means"), [(verdict, VERDICTS[verdict]) for verdict in verdicts])
        + "\n[The report](../reports/scoreboard.md) has every group of faults with its smallest case, and the verdicts "
        "of every operator.\n`nox -s scoreboard` measures it anew. It also writes `build/scoreboard/scoreboard.html`, a "
        "page with every case, its model and the command\nthat repeats it.\n"
    )


def runtimes(runs: Mapping[str, Rows], folders: Mapping[str, str], table: Table) -> str:
    """docs/runtimes.md: what each runtime gets right of each folder of the exported suite."""
    shares = {(folder, run["runtime"]): right(run) for folder, rows in runs.items() for run in rows}
    first, *others = (folder for folder in folders if folder in runs)
    rows = [
        (
            f"{run['runtime']} {run['version']}",
            *(str(run[verdict]) for verdict in COLUMNS_OF_RUNTIMES),
            *(shares.get((folder, run["runtime"]), "") for folder in (first, *others)),
        )
        for run in sorted(runs[first], key=lambda run: -run["right"])
    ]
    return (
        "# Runtimes\n\nWhich runtimes compute gradients right? Each runtime ran the [exported tests](export.md) with a runner "
        "in Python or\nJavaScript (`nox -s runtimes`). A gradient model is a hard test for a runtime: it has operators that no "
        f"exporter writes,\nempty tensors, and few elements. The counts are of the folder `{first}`:\n\n"
        + table(("runtime", *COLUMNS_OF_RUNTIMES, *(f"right of `{folder}`" for folder in (first, *others))), rows)
        + "\n"
        + table(("column ([verdicts](glossary.md#verdicts))", "meaning"), [*COLUMNS_OF_RUNTIMES.items(), RIGHT_OF])
        + "\nAn empty field means that the runtime did not run this folder. The runners have changed since: they now count\n"
        "a model that a runtime does not load as crashed, unless the error says that something is not supported\n"
        "([export](export.md)).\n"
        "\n[The report](../reports/runtimes.md) has the counts of every folder, and why "
        "tests fail or are not supported. `known_failures.json`\nbeside it, and the `manifest.json` of an export, name every "
        "gradient model that a runtime does not pass.\n"
    )


def right(run: Mapping[str, Any]) -> str:
    """The right tests as a fraction of the tests that ran."""
    ran = sum(run[verdict] for verdict in COLUMNS_OF_RUNTIMES if verdict != "not supported")
    return f"{run['right'] / max(ran, 1):.1%}"
