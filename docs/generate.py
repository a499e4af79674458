"""Write the tables that the project prints of itself: README.md, docs/operators.md and docs/kinks.md.

python docs/generate.py            # write them
python docs/generate.py --check    # fail where one is stale
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from refgrad.kinks import KINKS, Point
from refgrad.operators import operators as every_operator
from refgrad.registry import RULES, ZERO

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def operators() -> str:
    """Return docs/operators.md."""
    rows = [(o.operator, o.derivative, o.text) for o in every_operator()]
    return (
        "# Operators\n\nWhat the derivative of every operator of ONNX is: a rule, that of its function body, zero, or none, "
        "and why (`refgrad ops`).\n\n" + table(("operator", "derivative", "formula, body or reason"), rows)
    )


def kinks() -> str:
    """Return docs/kinks.md."""
    rows = [(k.operator, k.where, _point(k.ours), _point(k.torch), _point(k.ort), k.reason) for k in KINKS]
    return (
        "# Kinks\n\nWhere a derivative does not exist, somebody has to choose. These are the choices, as the gradient of each "
        "input for a\ncotangent of 1. A difference that this table explains is a convention, not a bug. No entry: no gradient "
        "there.\n\n" + table(("operator", "where", "refgrad", "torch", "ONNX Runtime", "why"), rows)
    )


def _point(point: Point | None) -> str:
    """Write the gradient of each input at a kink."""
    return "" if point is None else "; ".join("−" if value is None else _number(value) for value in point)


def _number(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_number, value)) + "]"
    return f"{value:g}"


def operators_summary() -> str:
    """Return the README's section on operators."""
    names = ", ".join(sorted({name for _, name in RULES}, key=str.lower))
    return (
        f"{len(RULES)} operators have a rule; {len(ZERO)} have a derivative that is zero. "
        "[docs/operators.md](docs/operators.md) has the formula or\nthe reason of each, [docs/kinks.md](docs/kinks.md) the "
        f"choices where a derivative does not exist.\n\nRules: {names}.\n"
    )


def benchmarks() -> str:
    """Return the README's section on speed, from the results that the benchmarks wrote."""
    parts = []
    for title, name, note in BENCHMARKS:
        file = RESULTS / f"{name}.json"
        if file.exists():
            rows = json.loads(file.read_text())
            header = list(dict.fromkeys(key for row in rows for key in row))
            body = [[str(row.get(key, "")) for key in header] for row in rows]
            parts.append(f"**{title}.** {note}\n\n{table(header, body)}")
    return (
        "Each figure is a ratio of two things measured in one run (`nox -s benchmarks benchmarks_training`, 2 cores).\n\n"
        + "\n".join(parts)
    )


BENCHMARKS = (
    (
        "Building the gradient",
        "build_time",
        "Chains of MatMul-Add-Relu-Add, against ONNX Runtime 1.19.2's builder. Goal: at most 0.5 from 1,000 nodes up, and the "
        "time per node at 100,000 within 2x of that at 1,000. refgrad spends nearly the same on every node, the builder more "
        'the larger the graph: the goal is missed at 1,000 nodes, and in dialect "ort", which writes two to three times as '
        "many nodes where the batch is unknown, as the builder does.",
    ),
    (
        "Forward and backward, against ONNX Runtime's own gradient graph",
        "run_time_builder",
        'On onnxruntime-training-cpu 1.19.2, for all weights. Goal: at most 1.02 in "ort", 1.15 in "onnx".',
    ),
    (
        "Forward and backward, against torch eager",
        "run_time_torch",
        "On stock onnxruntime, for the input and all weights. Goal: at most 1.0. ResNet-18 is bound by memory: its ratio "
        "depends on what else the machine does, and was between 0.8 and 1.2 in other runs.",
    ),
    (
        "Memory",
        "memory",
        "Peak of `gradient()` beyond what the caller holds. Goal: at most 1.2 of the weights; under 100 MiB for a path.",
    ),
    ("Import", "import_time", "Goal: at most 0.1 s over `import onnx`."),
)


def _title(domain: str, name: str) -> str:
    return f"{domain}.{name}" if domain else name


def _formula(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def fill(text: str, section: str, body: str) -> str:
    """Replace what stands between the markers of `section`."""
    return re.sub(
        rf"(<!-- {section} -->\n).*?(<!-- /{section} -->)", lambda m: f"{m[1]}\n{body}\n{m[2]}", text, flags=re.DOTALL
    )


def generated() -> dict[Path, str]:
    """Every generated file with its content."""
    readme = ROOT / "README.md"
    text = fill(readme.read_text(), "operators", operators_summary())
    return {
        readme: fill(text, "benchmarks", benchmarks()),
        ROOT / "docs" / "operators.md": operators(),
        ROOT / "docs" / "kinks.md": kinks(),
    }


def main() -> int:
    """Write the files, or with --check say which are stale."""
    stale = [path for path, text in generated().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run python docs/generate.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(generated()[path])
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
