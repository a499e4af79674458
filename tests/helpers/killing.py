"""Runs with a journal that are killed with -9 at random moments and resumed: the reports are those of a run left alone.

    python tests/helpers/killing.py 20

kills twenty runs, every fourth of them twice, and prints what it found.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SUFFIXES = (".json", ".md", ".html")
ASKED = ("--ops", "Softmax,Conv,LayerNormalization", "--every", "10", "--values", "smooth,special")
_PATIENCE = 300  # seconds


def command(folder: Path, backends: str, *more: str) -> list[str]:
    """One run of the suite, whose journal and reports are in `folder`."""
    reports = [part for suffix in SUFFIXES for part in ("-o", str(folder / f"results{suffix}"))]
    asked = [*ASKED, "--backend", backends, "--workers", "2", "--journal", str(folder / "journal.jsonl")]
    return [sys.executable, "-m", "refgrad", "conformance", "run", *asked, *reports, *more]


def run(listed: list[str]) -> None:
    """Run to the end; the exit code says whether there are faults, which is no matter here."""
    done = subprocess.run(listed, capture_output=True, text=True, timeout=_PATIENCE)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout + done.stderr)


def lines(folder: Path) -> int:
    """How many whole lines the journal has."""
    journal = folder / "journal.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def kill(listed: list[str], folder: Path, least: int, within: float) -> int:
    """Kill a run when its journal has more than `least` lines, and a random time later. How many lines it has then."""
    process = subprocess.Popen(listed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + _PATIENCE
    while lines(folder) <= least and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.uniform(0, within))
    process.kill()
    process.wait()
    return lines(folder)


def reports(folder: Path) -> dict[str, bytes]:
    """The bytes of every report."""
    return {suffix: (folder / f"results{suffix}").read_bytes() for suffix in SUFFIXES}


def differing(count: int, folder: Path, backends: str = "numpy") -> tuple[list[str], list[int]]:
    """Which reports of which runs differ from those of a run left alone, and how many lines each kill left."""
    alone = folder / "alone"
    alone.mkdir()
    run(command(alone, backends))
    expected, whole = reports(alone), lines(alone)
    wrong, left = [], []
    for number in range(count):
        here = folder / str(number)
        here.mkdir()
        left.append(kill(command(here, backends), here, random.randrange(whole * 2 // 3), 0.3))
        if number % 4 == 0:
            left.append(kill(command(here, backends, "--resume"), here, left[-1], 0.3))
        run(command(here, backends, "--resume"))
        wrong += [f"{number}{suffix}" for suffix, text in reports(here).items() if text != expected[suffix]]
    return wrong, left


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        different, killed = differing(int(sys.argv[1]), Path(made), "numpy,ort-cpu")
    print(f"{sys.argv[1]} runs, {len(killed)} kills after {killed} lines; reports that differ: {different or 'none'}")
    sys.exit(bool(different))
