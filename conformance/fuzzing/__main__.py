"""`python -m refgrad.conformance.fuzzing`: fuzz, print the faults by class; the exit code is 1 where there are any."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from refgrad.conformance.fuzzing.campaign import bases, campaign, mutants


def main() -> int:
    """Run a campaign and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m refgrad.conformance.fuzzing", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="of the first mutant")
    parser.add_argument("--examples", type=Path, help="a folder for the smallest model of each class")
    chosen = parser.parse_args()
    tally = campaign(mutants(chosen.seed, bases()), chosen.seconds)
    for line in tally.lines():
        print(ascii(line)[1:-1])
    if chosen.examples is not None:
        chosen.examples.mkdir(parents=True, exist_ok=True)
        for number, one in enumerate(tally.classes.values()):
            (chosen.examples / f"{number}.onnx").write_bytes(one.example)
    return int(bool(tally.classes))


if __name__ == "__main__":
    sys.exit(main())
