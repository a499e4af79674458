"""Which tests of the exported suite which runtime passes: collect what the runners printed.

    python benchmarks/runtimes.py EXPORT PRINTED

EXPORT is what `refgrad conformance export` wrote. PRINTED is a folder with a file for each runtime and folder of tests, which
holds what the runner printed: `<runtime>~gradients.jsonl`, `<runtime>~symbolic~gradients.jsonl`. Writes
benchmarks/results/runtimes.json; `nox -s runtimes` does all of it.
"""

from __future__ import annotations

import argparse
import json
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "runtimes.json"
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
    tests = {test["name"]: test for test in manifest["tests"]}
    rows = [collected(path) for path in sorted(arguments.printed.glob("*.jsonl"))]
    document = {
        "suite": manifest["suite"],
        "tests": dict(Counter(test["section"] for test in manifest["tests"])),
        "left_out": dict(Counter(case["section"] for case in manifest["left_out"])),
        "cases": {name: f"{zlib.crc32(test['case'].encode()):08x}" for name, test in tests.items()},
        "runs": rows,
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def collected(path: Path) -> dict[str, Any]:
    """What one runner printed: how many tests have each verdict, and the others than passed by their reason."""
    *lines, summary = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        if line["verdict"] != "passed":
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
        **{verdict: counts[verdict] for verdict in ("passed", "failed", "unsupported")},
        "seconds": summary["seconds"],
        "groups": sorted(groups.values(), key=lambda group: (group["verdict"], -len(group["tests"]), group["why"])),
    }


if __name__ == "__main__":
    main()
