"""Does `refgrad check` ever call a right gradient wrong? Every case of the tables, as a model, on every executor there is.

Each case is checked at its own feeds and at random ones. What disagrees or fails is printed, to be looked at; what ends the
process (a kernel of an executor may) is skipped when the same command is run again with the same file.

python benchmarks/checks.py FILE [SEED]      # one line of JSON per check in FILE, begun with "started" before it runs
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

from refgrad.conformance import check
from refgrad.conformance.judge.running.sources import tables
from refgrad.errors import RefgradError


def main() -> None:
    path, seed = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    begun = set()
    if path.exists():
        begun = {json.loads(line)["started"] for line in path.read_text().splitlines() if '"started"' in line}
    with path.open("a", buffering=1) as written:
        for case in tables():
            for kind, feeds in (("own", dict(case.feeds)), ("random", None)):
                name = f"{case.name} {kind} {seed}"
                if name in begun:
                    continue
                written.write(json.dumps({"started": name}) + "\n")
                drawn = seed + zlib.crc32(case.name.encode()) % 1000
                try:
                    found = check(case.model, feeds, wrt=case.wrt, outputs=case.outputs, seed=drawn)
                except RefgradError as error:
                    written.write(json.dumps({"refused": name, "why": str(error)}) + "\n")
                    continue
                written.write(json.dumps({"checked": name, "faults": [str(row) for row in found.faults]}) + "\n")
                for row in found.faults:
                    print(name, row, sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
