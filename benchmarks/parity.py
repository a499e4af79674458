"""Dialect "ort" against ONNX Runtime's own builder: every case of every registered operator, and whole models.

python benchmarks/parity.py [FOLDER]    # reports/results/parity.json; FOLDER has models of examples/torch_models.py

Needs the training wheel; minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from rich.progress import track
from timing import write

from refgrad.conformance.tools import parity
from refgrad.derivatives.ortbuilder import Builders
from refgrad.worker import Worker

WORKERS = 2


def models(folder: Path | None) -> list[parity.WholeModel]:
    with Builders() as builders, Worker() as runner:
        cases = parity.whole_models(folder).values()
        return [found for case in cases for found in parity.measure_model(case, builders, runner)]


def survey(operator: str) -> list[parity.ParityRow]:
    with Builders() as builders, Worker() as runner:
        return parity.survey(operator, parity.by_operator()[operator], builders, runner)


def main(arguments: Sequence[str]) -> None:
    """Measure, and write what came out."""
    operators = sorted(parity.by_operator())
    with ProcessPoolExecutor(WORKERS) as pool:
        measured = [row for found in track(pool.map(survey, operators), "operators", len(operators)) for row in found]
    whole = models(Path(arguments[0]) if arguments else None)
    every = [*measured, *(model.row for model in whole)]
    for row in parity.unexplained(every):
        print("no reason:", row.operator, row.case, row.kind, row.proof)
    results = {
        "operators": parity.counts(measured),
        "departures": parity.grounds(every),
        "models": [asdict(model) for model in whole],
    }
    write("parity.json", results, depth=2)


if __name__ == "__main__":
    main(sys.argv[1:])
