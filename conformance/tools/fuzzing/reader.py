"""`python -m refgrad.conformance.tools.fuzzing.reader`: a coverage-guided fuzzer (atheris) on what reads a model.

It keeps the files that reach new lines of refgrad, and changes these. A file that raises, takes too long, takes too much
memory or ends the process is written to a folder; the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import refgrad
from refgrad.conformance.tools.fuzzing.journey import journey
from refgrad.conformance.tools.fuzzing.mutations import mutant
from refgrad.errors import counted

_CORPUS = Path(__file__).with_name("corpus")  # what covered the most after an hour, minimized
_SECONDS, _MEGABYTES = 20, 1024
_LONGEST = 20_000  # bytes of a file
_SMALL = 3000  # bytes of a file in a corpus that is kept
_ROOM = 150_000  # bytes of all of these
_OWN = str(Path(refgrad.__file__).parent)
_RAW = 0.3  # how often bytes are changed, and not fields
_STEPS = ("preflight", "gradient", "text", "dot")
_START = """
import sys, atheris
with atheris.instrument_imports(include=["refgrad"], exclude=["refgrad.conformance"]):
    from refgrad.conformance.tools.fuzzing.reader import fuzz
fuzz(sys.argv)
"""


def main() -> int:
    """Fuzz until the time is over, in a process that is started again when it dies. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m refgrad.conformance.tools.fuzzing.reader", description=__doc__)
    parser.add_argument("--seconds", type=int, default=3600, help="how long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--found", type=Path, default=Path("build/fuzzing"), help="the folder for what is found")
    parser.add_argument("--minimize", type=Path, metavar="FOLDER", help="only fill FOLDER with what little covers most")
    parser.add_argument("corpus", type=Path, nargs="*", default=[_CORPUS], help="folders of files to start with")
    chosen = parser.parse_args()
    if chosen.minimize is not None:
        files = [file for folder in (chosen.found / "corpus", *chosen.corpus) for file in sorted(folder.glob("*"))]
        chosen.minimize.mkdir(parents=True, exist_ok=True)
        for written in smallest([file.read_bytes() for file in files]):
            (chosen.minimize / f"{hashlib.sha256(written).hexdigest()[:16]}.onnx").write_bytes(written)
        return 0
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("atheris is not installed, so nothing was fuzzed: pip install atheris (Linux, Python 3.11 to 3.14).")
        return 0
    corpus, faults = chosen.found / "corpus", chosen.found / "faults"
    for folder in (corpus, faults):
        folder.mkdir(parents=True, exist_ok=True)
    end, seed = time.monotonic() + chosen.seconds, chosen.seed
    while (left := int(end - time.monotonic())) > 0:
        options = [f"-artifact_prefix={faults}/", f"-max_len={_LONGEST}", f"-timeout={_SECONDS}", f"-seed={seed}"]
        options += [f"-rss_limit_mb={_MEGABYTES}", f"-malloc_limit_mb={_MEGABYTES}", f"-max_total_time={left}"]
        folders = [corpus, *chosen.corpus]
        if subprocess.run([sys.executable, "-c", _START, str(faults), *options, *map(str, folders)]).returncode == 0:
            break
        seed += 1
    found = sorted(faults.iterdir())
    print(f"{counted(len(list(corpus.iterdir())), 'file')} in {corpus}, {counted(len(found), 'fault')} in {faults}")
    return int(bool(found))


def smallest(files: Sequence[bytes], room: int = _ROOM) -> Iterator[bytes]:
    """The files that together reach most lines of refgrad, first the one that reaches most new lines for its size."""
    reached = {written: _lines(written) for written in files if len(written) < _SMALL}
    known: set[tuple[str, int]] = set()
    waiting = [(-len(lines) / len(written), written) for written, lines in reached.items()]
    heapq.heapify(waiting)
    while waiting:
        before, written = heapq.heappop(waiting)
        gain = -len(reached[written] - known) / len(written)
        if gain > before:  # what was yielded since reaches some of its lines
            heapq.heappush(waiting, (gain, written))
            continue
        if not gain or len(written) > room:
            return
        room -= len(written)
        known |= reached[written]
        yield written


def _lines(written: bytes) -> set[tuple[str, int]]:
    """The lines of refgrad that the reader reaches with a file."""
    found: set[tuple[str, int]] = set()

    def visit(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        if _OWN not in file:
            return None
        found.add((file, frame.f_lineno))
        return visit

    journey(written, _STEPS)  # the first run fills the caches, and is not traced
    before = sys.gettrace()
    sys.settrace(visit)
    try:
        journey(written, _STEPS)
    finally:
        sys.settrace(before)
    return found


def fuzz(arguments: list[str]) -> None:
    """Let libFuzzer call the reader until it stops by itself. The first argument is the folder for what raises."""
    import atheris

    _, faults, *options = arguments
    known: dict[str, int] = {}
    warnings.simplefilter("ignore")

    def take(written: bytes) -> None:
        for fault in journey(written, _STEPS).faults:
            name = "".join(
                letter if letter.isalnum() else "_" for letter in f"{fault.kind} {fault.place or fault.step}"
            )
            if len(written) < known.get(name, sys.maxsize):
                known[name] = len(written)
                Path(faults, f"{name}.onnx").write_bytes(written)

    def change(written: bytes, longest: int, seed: int) -> bytes:
        if random.Random(seed).random() >= _RAW:
            try:
                return mutant(seed, written)[:longest]
            except Exception:  # it is no model any more, or one with names that Python's protobuf does not write
                pass
        made: bytes = atheris.Mutate(written, len(written) + 64)
        return made[:longest]

    atheris.Setup([arguments[0], *options], take, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
