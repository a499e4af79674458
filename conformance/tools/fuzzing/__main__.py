"""`python -m refgrad.conformance.tools.fuzzing`: fuzz, print the faults by class; the exit code is 1 where there are any.

Ctrl-C ends it early, with the report.
"""

from __future__ import annotations

import argparse
import signal
import sys
from itertools import islice
from pathlib import Path

from refgrad.conformance.tools.fuzzing import commands
from refgrad.conformance.tools.fuzzing.campaign import SECONDS, campaign, mutants
from refgrad.conformance.tools.fuzzing.journey import TURNS, journey


def main() -> int:
    """Run a campaign and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m refgrad.conformance.tools.fuzzing", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long")
    parser.add_argument("--mutants", type=int, help="how many mutants or graphs at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first mutant or graph")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--commands", action="store_true", help="through the command line (Linux) and not the library")
    parser.add_argument("--graphs", action="store_true", help="random valid graphs, whose gradients are compared")
    parser.add_argument("--files", action="store_true", help="damaged files, and everything that reads one")
    parser.add_argument("--examples", type=Path, help="a folder for the smallest model of each class")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if chosen.files:
        from refgrad.conformance.tools.fuzzing.files import campaign as files  # they need the packages of training

        damaged = files.campaign(chosen.seed, chosen.mutants, chosen.seconds, chosen.examples)
        for line in damaged.lines():
            print(ascii(line)[1:-1])
        return int(bool(damaged.faults))
    if chosen.graphs:
        from refgrad.conformance.tools.fuzzing.graphs import campaign as graphs  # they need an executor

        found = graphs.Graphs()
        models = islice(graphs.seeds(chosen.seed), chosen.mutants)
        campaign(models, graphs.travel, chosen.seconds, chosen.jobs, tally=found)
        for line in found.lines():
            print(ascii(line)[1:-1])
        return int(found.failed)
    turns, travel = (TURNS, journey) if not chosen.commands else (commands.TURNS, commands.typed)
    tally = campaign(
        islice(mutants(chosen.seed, turns), chosen.mutants),
        travel,
        chosen.seconds,
        chosen.jobs,
        limit=SECONDS * (len(turns[0]) if chosen.commands else 1),
    )
    for line in tally.lines():
        print(ascii(line)[1:-1])
    if chosen.examples is not None:
        chosen.examples.mkdir(parents=True, exist_ok=True)
        for number, one in enumerate(tally.classes.values()):
            (chosen.examples / f"{number}.onnx").write_bytes(one.example)
    return int(bool(tally.classes))


if __name__ == "__main__":
    sys.exit(main())
