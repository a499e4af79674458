"""Run the commands on the pages that a newcomer follows, and write what they print below them.

python docs/transcripts.py                # every page of PAGES
python docs/transcripts.py README.md      # one page
python docs/transcripts.py --check        # fail where a page says something else than the commands

A page runs from its first block to its last in an empty folder. A Python block whose first line is "# NAME.py" is a file that
the reader saves. In a console block bash runs each line behind "$ ", and the lines below are what it prints. Blocks that make
an environment or install something are left out (`INSTALLS`).

What a page says may have "..." for a part of a line, or as a line of its own for any number of lines. Numbers agree to 2 %, and
below 1e-4 in any case: rounding differs between machines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "docs/start/debug.md",
    "docs/start/test_a_runtime.md",
    "docs/start/teach.md",
    "docs/start/train.md",
    "docs/troubleshooting.md",
)
INSTALLS = re.compile(r"^\$ .*(pip install|git clone|-m venv)", re.MULTILINE)
SECONDS = 400  # that a command may take: machines that do other things as well are slow
VARIABLE = ((re.compile(r"^Versions: .*$", re.MULTILINE), "Versions: ..."),)  # what differs from machine to machine
_BLOCK = re.compile(r"^```(?P<kind>python|console)\n(?P<text>.*?)^```\n", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\w+\.py)\b.*\n")
_COMMAND = re.compile(r"^\$ (?P<command>(?:.*\\\n)*.*)\n(?P<printed>(?:(?!\$ ).*\n)*)", re.MULTILINE)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_SMALL = 1e-4  # errors: all of them are rounding


@dataclass
class Command:
    """A command of a page, what the page says that it prints, and what it printed."""

    text: str
    said: str
    printed: str = field(default="")

    @property
    def agrees(self) -> bool:
        """True if the page says what the command printed."""
        return agrees(self.said, self.printed)


def agrees(said: str, printed: str) -> bool:
    """True if a text with "..." stands for what was printed, numbers that rounding changes aside."""
    parts = [re.escape(_masked(part)) for part in re.split(r"^\.\.\.\n|\.\.\.", said, flags=re.MULTILINE)]
    if len(parts) > 1:
        return re.fullmatch(".*".join(parts), _masked(printed), re.DOTALL) is not None
    pairs = zip(_NUMBER.findall(said), _NUMBER.findall(printed), strict=False)
    return _masked(said) == _masked(printed) and all(_close(a, b) for a, b in pairs)


def _masked(text: str) -> str:
    """The text with a mark for each number, as columns are as wide as their numbers without runs of spaces."""
    return re.sub(r"[ ─]+", " ", re.sub(r" +$", "", _NUMBER.sub("#", text), flags=re.MULTILINE))


def _close(one: str, other: str) -> bool:
    a, b = float(one), float(other)
    return a == b or max(abs(a), abs(b)) < _SMALL or ("." in one + other and abs(a - b) <= 0.02 * max(abs(a), abs(b)))


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """The kind and the text of each block that is run: "file" and its text, or "console" and its lines."""
    for match in _BLOCK.finditer(page):
        if match["kind"] == "python":
            if _FILE.match(match["text"]):
                yield "file", match["text"]
        elif not INSTALLS.search(match["text"]):
            yield "console", match["text"]


def commands(text: str) -> list[Command]:
    """The commands of a console block."""
    return [Command(match["command"], match["printed"]) for match in _COMMAND.finditer(text)]


def run(page: str) -> list[Command]:
    """Run a page in an empty folder, and return its commands.

    :raises subprocess.TimeoutExpired: a command takes longer than `SECONDS`.
    """
    done = []
    programs = Path(sys.executable).parent
    path = os.pathsep.join((str(programs), os.environ.get("PATH", "")))
    env = os.environ | {"PATH": path, "NO_COLOR": "1", "COLUMNS": "120", "TERM": "dumb"}
    with tempfile.TemporaryDirectory() as folder:
        for kind, text in blocks(page):
            if kind == "file":
                match = _FILE.match(text)
                assert match is not None
                Path(folder, match[1]).write_text(text, encoding="utf-8")
                continue
            for command in commands(text):
                ended = subprocess.run(
                    ["bash", "-c", command.text],
                    cwd=folder,
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=SECONDS,
                    check=False,
                )
                command.printed = re.sub(r" +$", "", ended.stdout, flags=re.MULTILINE)
                done.append(command)
    return done


def filled(page: str, done: Sequence[Command]) -> str:
    """The page with what its commands printed, wherever it said something else."""
    rest = iter(done)

    def console(match: re.Match[str]) -> str:
        if match["kind"] == "python" or INSTALLS.search(match["text"]):
            return match[0]
        return f"```console\n{_COMMAND.sub(lambda one: _shown(next(rest)), match['text'])}```\n"

    return _BLOCK.sub(console, page)


def _shown(command: Command) -> str:
    printed = command.said
    if not command.agrees:
        printed = command.printed
        for pattern, text in VARIABLE:
            printed = pattern.sub(text, printed)
    return f"$ {command.text}\n{printed}"


def main() -> int:
    """Write the pages, or with --check say which commands print something else."""
    chosen = [name for name in sys.argv[1:] if not name.startswith("-")] or PAGES
    stale = 0
    for name in chosen:
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        done = run(page)
        for command in done:
            if not command.agrees:
                stale += 1
                print(f"{name}: $ {command.text}\n{command.printed}", end="")
        if "--check" not in sys.argv[1:]:
            path.write_text(filled(page, done), encoding="utf-8")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
