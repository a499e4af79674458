"""Which tests of the exported suite which runtime passes: collect what the runners printed.

    python benchmarks/runtimes.py EXPORT PRINTED

EXPORT is what `refgrad conformance export` wrote. PRINTED is a folder with a file for each runtime and folder of tests, which
holds what the runner printed: `<runtime>~gradients.jsonl`, `<runtime>~symbolic~gradients.jsonl`. Writes
reports/results/runtimes.json, with the names of the tests that a runtime fails, and reports/known_failures.json, with the
names of all gradient models that it does not get right. `nox -s runtimes` does all of it.
"""

from __future__ import annotations

import argparse
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from timing import RESULTS, write

KNOWN = RESULTS.parent / "known_failures.json"
VERDICTS = ("right", "wrong", "not supported", "crashed", "timed out")  # the words of the runners
_WORDS = 160  # letters of a reason that are kept
_BESIDE = re.compile(
    r"Stack backtrace.*|\[ONNXRuntimeError\] : \d+ : |failed to call OrtRun\(\)\. |\S*/(?=model\.onnx)|(?<!\S)/\S*/(?=\w)"
)
_PARTICULAR = re.compile(r"#\d+|\"[^\"]*\"|'[^']*'|\[[^]]*\]|\{[^}]*\}|\b\w+_grad\b|-?\d[\w.+-]*")


def main() -> None:
    """Read the command line, collect, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("printed", type=Path)
    arguments = parser.parse_args()
    manifest = json.loads((arguments.export / "manifest.json").read_text(encoding="utf-8"))
    rows = [collected(path) for path in sorted(arguments.printed.glob("*.jsonl"))]
    document = {
        "suite": manifest["suite"],
        "tests": dict(Counter(test["section"] for test in manifest["tests"])),
        "left_out": dict(Counter(case["section"] for case in manifest["left_out"])),
        "runs": [shortened(row) for row in rows],
    }
    write("runtimes.json", document, depth=4)
    cases = {test["name"]: test["case"] for test in manifest["tests"]}
    known = known_failures((row for row in rows if row["folder"].endswith("gradients")), cases)
    write(KNOWN, known, depth=2)


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the number of the tests in each group and their names: of those that are not supported, only the first."""
    groups = [
        {
            "verdict": group["verdict"],
            "why": group["why"],
            "count": len(group["tests"]),
            "tests": group["tests"][:1] if group["verdict"] == "not supported" else group["tests"],
        }
        for group in row["groups"]
    ]
    return row | {"groups": groups}


def known_failures(rows: Iterable[dict[str, Any]], cases: Mapping[str, str]) -> dict[str, Any]:
    """The tests that a runtime does not get right, each with a checksum of its case and the numbers of runtimes and reasons."""
    runtimes: dict[str, int] = {}
    reasons: dict[str, int] = {}
    found: dict[str, list[Any]] = {}
    for row in rows:
        runtime = runtimes.setdefault(f"{row['runtime']} {row['version']}", len(runtimes))
        for group in row["groups"]:
            reason = reasons.setdefault(f"{group['verdict']}: {group['why']}", len(reasons))
            for test in group["tests"]:
                sums = f"{zlib.crc32(cases[test].encode()):08x}"
                found.setdefault(test, [sums]).append([runtime, reason])
    return {"runtimes": list(runtimes), "reasons": list(reasons), "tests": dict(sorted(found.items()))}


def collected(path: Path) -> dict[str, Any]:
    """What one runner printed: how many tests have each verdict, and the others than right by their reason."""
    *lines, summary = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        if line["verdict"] != "right":
            why = " ".join(_BESIDE.sub("", line["why"]).split())[:_WORDS]
            key = line["verdict"], _PARTICULAR.sub("…", why)
            group = groups.setdefault(key, {"verdict": line["verdict"], "why": why, "tests": []})
            group["tests"].append(line["test"])
    counts = Counter(line["verdict"] for line in lines)
    runtime, *folder = path.stem.split("~")
    return {
        "runtime": runtime,
        "version": summary["version"],
        "folder": "/".join(folder),
        **{verdict: counts[verdict] for verdict in VERDICTS},
        "seconds": summary["seconds"],
        "groups": sorted(groups.values(), key=lambda group: (group["verdict"], -len(group["tests"]), group["why"])),
    }


if __name__ == "__main__":
    main()
