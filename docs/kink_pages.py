"""docs/kinks.md, docs/special_points.md and its report: what is chosen where a derivative does not exist.

In these functions `table` writes a table in Markdown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from refgrad.conformance.known.bugs.bug import TRAINING, VERSIONS
from refgrad.conformance.tools.jets.planes import ORDERS, STATUSES
from refgrad.tables.kink_choices import KINK_CHOICES
from refgrad.tables.kinks import KINKS, KinkRow, Point
from refgrad.tables.missing import MISSING
from refgrad.tables.torch_functions import ASKED, FOLLOWED, UNTOLD
from refgrad.tables.torch_functions import RELEASE as TORCH_RELEASE

Table = Callable[[Sequence[str], Iterable[Sequence[str]]], str]


def kinks(table: Table) -> str:
    """Return docs/kinks.md."""
    rows = [
        (k.operator, k.where, "1", _point(k.ours), _point(k.torch), _asked(k), _point(k.ort), k.reason) for k in KINKS
    ]
    higher = [
        (k.operator, "; ".join(k.where), ", ".join(map(str, k.orders)), ", ".join(k.choices), k.reason)
        for k in KINK_CHOICES
    ]
    followed = [
        (k.operator, k.where, f"`{name}`", f"`{question}`", _point(k.torch), _point(k.ours), k.reason)
        for name, question, k in FOLLOWED
    ]
    titles = ("operator", "where", "order", "refgrad", "torch", "torch's function", "ONNX Runtime", "why")
    of_followed = ("operator", "where", "exported for", "torch's function", "torch", "refgrad", "why")
    return f"""# Kinks

At a kink a function has no derivative, so somebody has to choose a value. These tables list the choices of refgrad, torch
and ONNX Runtime. `kinks="torch"` and `kinks="onnxruntime"` take the choice of that library:

```console
$ refgrad grad model.onnx -o gradient.onnx --kinks torch
```

A number is the gradient of an input for a cotangent of 1. A difference that the table explains is a convention, not a bug. An
empty entry means that there is no gradient.

- The torch column has the gradient that torch {TORCH_RELEASE} returns for the expression beside it. There x, y and z are the
  inputs of the operator.
- The ONNX Runtime column has the gradient of the builder in onnxruntime-training {VERSIONS[TRAINING]}, its last release.
- Other releases may choose differently. The sessions `torch` and `training` check both columns (`tests/rules/test_kinks.py`).

{table(titles, rows)}
## Second and third derivatives

At the points of the table above, the derivatives of order 2 and 3 are 0, because the chosen slope is constant. This table
lists the exceptions. [Special points](special_points.md) lists what refgrad returns, order by order.

{table(("operator", "where", "order", "refgrad", "why"), higher)}{_missing(table)}
## Functions of torch that share an operator

torch's exporter writes relu6, hardtanh and clamp as Clip, but their derivatives at the ends differ. With `kinks="torch"`
refgrad differentiates a node as the function that it was exported from, if the model identifies that function:

- in the metadata that the exporter writes (`pkg.torch.onnx.fx_node`, `pkg.torch.onnx.class_hierarchy`, `namespace`);
- without metadata, by the name of a result or a node, such as `relu6`, `hardtanh_2`, `node_max_1__0` or `/relu6/Clip`;
- by an ArgMax beside a ReduceMax of the same axis, which is how the TorchScript exporter writes `max(dim)` with its indices.

Every other node is differentiated as the function in the first table.

{table(of_followed, followed)}
The exported model does not identify these functions, so `kinks="torch"` does not follow them:

{table(("function", "exported as", "torch"), UNTOLD)}"""


def _asked(kink: KinkRow) -> str:
    question = ASKED.get((kink.operator, kink.where))
    return "" if question is None else f"`{question}`"


def special_points(found: Mapping[str, Any], table: Table) -> str:
    """Return docs/special_points.md from the content of reports/results/special_points.json."""
    totals = sum((Counter(by) for by in found["counts"].values()), Counter[str]())
    rows = [(order, *(str(totals[f"{order} {status}"]) for status in STATUSES)) for order in map(str, ORDERS)]
    return (
        "# Special points\n\nDoes refgrad return the derivative at points where a function turns, ends or grows without "
        "bound? `nox -s jets` checks the\nderivatives of order 1 to 3 there, for every operator. `nox -s jets -- Pow` "
        "checks one operator.\n\nTaylor arithmetic with 50 digits along random curves shows whether a derivative exists, "
        "without the rules. For each input, each pair\nof inputs and all inputs together, refgrad returned every "
        f"derivative that exists. {totals.total()} derivatives were checked:\n\n"
        + table(("order", *STATUSES), rows)
        + "\n| column | the derivative |\n| --- | --- |\n| exists | exists, and refgrad returned it |\n| kink | differs by "
        "side or direction |\n| infinite | is infinite |\n| undefined | is asked for where the function is undefined "
        "|\n\n[The report](../reports/special_points.md) has the counts of every operator, and what refgrad returns where "
        "no derivative exists. Every\nfinite number there has a row in [Kinks](kinks.md), except where the function itself "
        "is undefined.\n"
    )


def report_of_special_points(found: Mapping[str, Any], table: Table) -> str:
    """Return reports/special_points.md from the content of reports/results/special_points.json."""
    rows = [
        (operator, *("/".join(str(by.get(f"{order} {status}", 0)) for order in ORDERS) for status in STATUSES))
        for operator, by in found["counts"].items()
    ]
    lines = [(*key.split(" | ", 1), ", ".join(cells)) for key, cells in found["choices"].items()]
    return (
        "# Special points, operator by operator\n\n[Special points](../docs/special_points.md) says what was checked.\n\n"
        "## Counts\n\nThe three numbers of a cell are the orders 1, 2 and 3.\n\n"
        + table(("operator", *STATUSES), rows)
        + "\n## Where no derivative exists\n\nThe table lists what refgrad returns:\n\n| word | result |\n| --- | --- |\n| "
        "`nan`, `inf`, `zero` | this number |\n| `one side` | the derivative of one side |\n| `mean` | the mean of both "
        "sides |\n| `asymmetric` | it depends on the order in which the inputs are taken |\n| `finite` | another number "
        "|\n\n" + table(("operator", "point", "inputs and order"), lines)
    )


def _missing(table: Table) -> str:
    """Return the section of docs/kinks.md on NaN."""
    rows = [(k.operator, k.where, _point(k.ours), _point(k.torch), _point(k.ort), k.reason) for k in MISSING]
    return (
        "\n## Where an input is NaN\n\nIf an operator computes with its input, its gradient is NaN there. These operators "
        "compare their input,\nand have the gradients below for every value of `kinks`. The ONNX Runtime column is for "
        "dialect `ort`.\n\n" + table(("operator", "where", "refgrad", "torch", "ONNX Runtime", "why"), rows)
    )


def _point(point: Point | None) -> str:
    """Write the gradient of each input at a kink."""
    return "" if point is None else "; ".join("−" if value is None else _number(value) for value in point)


def _number(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_number, value)) + "]"
    return f"{value:g}"
