"""Many damaged files, each read once. A file that is neither read, nor refused with its name, is a fault."""

from __future__ import annotations

import random
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from refgrad.conformance.tools.fuzzing.files.damage import damaged
from refgrad.conformance.tools.fuzzing.files.readers import READERS, Reader, place
from refgrad.errors import RefgradError, counted
from refgrad.protos.memory import at_most

SECONDS = 10.0  # for one file
MEMORY = 16 << 20  # bytes that a file may take


class SlowError(BaseException):
    """Raised for a file that takes too long. No handler of errors catches it by mistake."""


@dataclass
class FileTally:
    """The result of a campaign: the numbers of files that each reader read and refused, and each fault with an example."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)
    seconds: float = 0.0
    longest: tuple[float, str] = (0.0, "")

    def add(self, name: str, seed: int, outcome: str, why: str, seconds: float) -> None:
        """Count one file. `why` is empty unless it is a fault."""
        self.counts[name, outcome] += 1
        self.longest = max(self.longest, (seconds, f"{name}, seed {seed}"))
        if why:
            self.faults.setdefault((name, why.splitlines()[0]), (why, seed))

    def lines(self) -> Iterator[str]:
        """The report: the whole, a line for each reader, then the faults."""
        faults = f"{counted(len(self.faults), 'class', 'classes')} of faults"
        yield f"{counted(sum(self.counts.values()), 'file')} in {self.seconds:.0f} s, {faults}"
        yield f"the longest took {self.longest[0]:.2f} s: {self.longest[1]}"
        for name in READERS:
            found = ", ".join(
                f"{self.counts[name, k]} {k}" for k in ("read", "refused", "fault") if self.counts[name, k]
            )
            yield f"{name}: {found or 'none'}"
        for (name, _), (why, seed) in self.faults.items():
            yield f"fault: {name}, seed {seed}: {why}"


def campaign(seed: int, count: int | None, seconds: float, examples: Path | None = None) -> FileTally:
    """Damage files and read them, one after the other; each reader has its turn.

    :param count: the number of files; None: as many as there is time for.
    :param seconds: the time for all files.
    :param examples: a folder for the files of the faults.
    """
    tally, start, number = FileTally(), time.monotonic(), seed
    names = list(READERS)
    while (count is None or number < seed + count) and time.monotonic() - start < seconds:
        name = names[number % len(names)]
        begun = time.monotonic()
        outcome, why, content = taken(READERS[name], number)
        if why and examples is not None:
            examples.mkdir(parents=True, exist_ok=True)
            (examples / f"{number}_{READERS[name].file}").write_bytes(content)
        tally.add(name, number, outcome, why, time.monotonic() - begun)
        number += 1
    tally.seconds = time.monotonic() - start
    return tally


def taken(reader: Reader, seed: int) -> tuple[str, str, bytes]:
    """The result of one file ("read", "refused" or "fault"), the reason of a fault, and the file. A seed fixes all three."""
    content = damaged(reader.whole(), reader.kind, random.Random(seed))
    with tempfile.TemporaryDirectory(prefix="refgrad-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = place(reader, Path(folder))
        file.write_bytes(content)
        try:
            with _Within(SECONDS), at_most(MEMORY):
                found = reader.read(file)
                with suppress(RefgradError):  # it does not fit the model
                    reader.use(found)
            return "read", "", content
        except RefgradError as error:
            is_named = file.name in str(error) or str(file.parent) in str(error)
            return ("refused", "", content) if is_named else ("fault", f"no file is named: {error}", content)
        except SlowError:
            return "fault", f"it takes more than {SECONDS:g} s", content
        except Exception as error:
            place_of = traceback.extract_tb(error.__traceback__)[-1]
            why = (
                f"{type(error).__name__} at {Path(place_of.filename).name}:{place_of.lineno}\n{traceback.format_exc()}"
            )
            return "fault", why, content


class _Within:
    """Raise `SlowError` in a block that takes longer, where the system has timers."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        if hasattr(signal, "setitimer"):
            self._before = signal.signal(signal.SIGALRM, self._stop)
            signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        raise SlowError
