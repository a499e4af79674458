"""Judge every special point: python -m refgrad.conformance.tools.jets [OPERATOR ...] [--write FILE]."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from refgrad.conformance.tools.jets.campaign import judge_all, results
from refgrad.conformance.tools.jets.planes import STATUSES
from refgrad.conformance.tools.jets.records import faults
from refgrad.errors import counted


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts per operator, the disagreements and the choices that no row records; 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m refgrad.conformance.tools.jets", description=main.__doc__)
    parser.add_argument("operators", nargs="*", help="the operators to judge; all by default")
    parser.add_argument("--write", type=Path, help="write the results to this file")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args(arguments)
    verdicts = judge_all(options.operators, options.jobs)
    wrong = faults(verdicts)
    for operator in sorted({v.operator for v in verdicts}):
        counts = Counter(v.status for v in verdicts if v.operator == operator)
        bad = sum(v.operator == operator for v in wrong)
        print(f"{operator:36}", *(f"{status} {counts[status]:4}" for status in STATUSES), f"faults {bad}")
    for verdict in wrong:
        print("WRONG" if verdict.says == "wrong" else "UNRECORDED", verdict)
    totals = Counter(v.status for v in verdicts)
    print(
        f"{counted(len(verdicts), 'verdict')}:",
        ", ".join(f"{totals[s]} {s}" for s in STATUSES),
        f"- {counted(len(wrong), 'fault')}",
    )
    if options.write:
        options.write.write_text(json.dumps(results(verdicts), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
