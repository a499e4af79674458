"""Results of a run: what was asked of whom, in which versions, and the verdicts. One JSON file holds them."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from refgrad.conformance.case import Case
from refgrad.conformance.judge.rows import BUILDER, EXECUTOR, ResultRow
from refgrad.conformance.judge.running.runner import MEMORY, ORACLES
from refgrad.conformance.verdicts import FAULTS, OUT_OF_MEMORY, RIGHT, TIMED_OUT, UNDECIDED, VERDICTS
from refgrad.errors import ResultsError, choices, counted
from refgrad.escaping import json_text
from refgrad.model.writing import replacing
from refgrad.protos.documents import parse_json, typed
from refgrad.protos.inputs import read_text
from refgrad.ranges import RANGES
from refgrad.worker import SECONDS

FORMAT = "refgrad conformance results 1"
LETTERS = dict(zip("awcruxtmi", VERDICTS, strict=True))  # what a verdict is in the file
_SOURCES = ["tables"]  # the default of the command
UNASKED = "."  # the letter where a builder and executor were not asked
VERSION_MARK = "@"  # "ort-cpu@1.19.2": one of several versions of the same builder or executor

Pair: TypeAlias = tuple[str, str]  # a builder and an executor


@dataclass(frozen=True)
class About:
    """The facts that the results keep of a case: see `Case`."""

    operator: str
    opset: int
    dtype: str
    values: str = "smooth"
    provenance: str = ""

    @classmethod
    def of(cls, case: Case) -> About:
        """The facts of `case` that the results keep."""
        return cls(case.operator, case.opset, case.dtype, case.values, case.provenance)


@dataclass(frozen=True)
class Results:
    """The verdicts of one run, or of several merged.

    `settings` are what the run was asked for, with what makes it repeatable (`seed`). `versions` has every builder and
    executor, in the order in which reports list them. `cases` has every case that a row is about, by its name.
    """

    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    cases: Mapping[str, About]
    rows: Sequence[ResultRow] = field(default_factory=tuple)

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Every builder and executor that has a row, in the order of `versions`."""
        place = {name: number for number, name in enumerate(self.versions)}

        def order(pair: Pair) -> tuple[tuple[int, str], ...]:
            return tuple((place.get(name, len(place)), name) for name in pair)

        return tuple(sorted({(row.builder, row.executor) for row in self.rows}, key=order))

    @cached_property
    def found(self) -> dict[tuple[str, str, str], ResultRow]:
        """The row of every case, builder and executor."""
        return {(row.case, row.builder, row.executor): row for row in self.rows}

    @property
    def faults(self) -> list[ResultRow]:
        """The rows that somebody has to mend, by builder, executor and case."""
        place = {pair: number for number, pair in enumerate(self.pairs)}
        faults = (row for row in self.rows if row.verdict in FAULTS)
        return sorted(faults, key=lambda row: (place[row.builder, row.executor], row.case))

    def command(self, row: ResultRow) -> str:
        """The command that repeats this verdict, quoted by `shlex`. `escaping.shell_line` makes it safe to show."""
        command = f"{self.command_of(row.case)} {options_of((row.builder, row.executor))}"
        return f"{command} {self._limits()}".rstrip() if row.verdict in (TIMED_OUT, OUT_OF_MEMORY) else command

    def _limits(self) -> str:
        """The limits of the run, as far as they are not the default: a verdict may depend on them."""
        seconds, memory = self.settings.get("seconds", SECONDS), self.settings.get("memory", MEMORY)
        options = [("seconds", f"{seconds:g}")] if seconds != SECONDS and not isinstance(seconds, str) else []
        options += [("memory", str(memory >> 20))] if memory != MEMORY and not isinstance(memory, str) else []
        return _options(options)

    def command_of(self, case: str) -> str:
        """The beginning of that command, which selects the case; `options_of` is the rest.

        An exact opset and type find a case that was made for another selection of them.
        """
        oracles = self.settings.get("oracles") or ORACLES
        options = [*self._selecting(case)]
        options += [("oracle", ",".join(oracles))] if tuple(oracles) != ORACLES else []
        return f"refgrad conformance run {_options([*options, *self._around()])}"

    def comparison(self, row: ResultRow, at_fault: str = "") -> str:
        """The command that looks inside one verdict: refgrad's gradient on the interpreter beside the row's, node by node.

        A builder that is at fault is shown on the interpreter, where nothing else is.
        """
        executor = "numpy" if at_fault == BUILDER else unversioned(row.executor)
        side = f"{unversioned(row.builder)}@{executor}"
        sides = [("a", "refgrad@numpy"), ("b", side)]
        return f"refgrad compare {_options([*self._selecting(row.case), *sides, *self._around()])}"

    def _selecting(self, case: str) -> list[tuple[str, str]]:
        """The options that select a case."""
        about, asked = self.cases[case], self.settings
        sources = asked.get("sources", _SOURCES)
        # A run of several sources, or results that were merged: only a model in a file was fed.
        sources = [source for source in sources if about.provenance.startswith(f"{Path(source)}, fed ")] or sources
        fed = asked.get("feeds") and "fed random numbers" not in about.provenance
        options = [("case", case)]
        options += [("opset", str(about.opset))] if asked.get("opset", "newest") != "newest" else []
        options += [("dtype", about.dtype)] if asked.get("dtype") and about.dtype else []
        options += [("values", about.values)] if about.values != "smooth" else []
        options += [("source", source) for source in sources] if sources != _SOURCES else []
        options += [("feeds", asked["feeds"])] if fed else []
        return options

    def _around(self) -> list[tuple[str, str]]:
        """The options of a command that do not select cases."""
        options = [("import", module) for module in self.settings.get("imports", ())]
        return options + ([("seed", str(self.settings["seed"]))] if self.settings.get("seed") else [])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, the same bytes for the same verdicts in whatever order they came.

        It holds no times. Of a row that agrees and has nothing to add, it holds the verdict and the oracles; of every other
        also the note, and the numbers with three digits.

        :raises OutputFileError: it cannot be written.
        """
        with replacing(path) as file:
            file.write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """The content of the file: JSON with a line for each case, builder and executor, and detail."""
        parts = []
        for key, value in self.document().items():
            if isinstance(value, list):
                lines = ",\n".join(_compact(entry) for entry in value)
                parts.append(f"{_compact(key)}: [\n{lines}\n]" if value else f"{_compact(key)}: []")
            else:
                parts.append(f"{_compact(key)}: {_compact(value)}")
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def document(self) -> dict[str, Any]:
        """The content of the file.

        `pairs` has the letter of each case's verdict in a string, and beside it the number of its oracles in `witnesses`, a
        list of those for and those against. A row of `details` is: the number of the case, the numbers of the pairs that it
        holds for, the relative error, the allowed one, and the number of the note. A row of `sides` is: the number of the
        case, the number of the pair, the side at fault, the letter of the verdict on the executor's results of the model
        itself, "" where they are right, and the number of the note about them. `sides` is left out if it has no rows.
        """
        names = sorted(self.cases)
        witnesses: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}
        notes: dict[str, int] = {}
        details: dict[tuple[int, Any, Any, int], list[int]] = {}
        sides: list[tuple[int, int, str, str, int]] = []
        pairs = []
        for number, (builder, executor) in enumerate(self.pairs):
            letters, seen = [], []
            for place, name in enumerate(names):
                row = self.found.get((name, builder, executor))
                if row is None:
                    letters.append(UNASKED)
                    seen.append(0)
                    continue
                letters.append(_LETTER_OF[row.verdict])
                seen.append(witnesses.setdefault((row.witnesses, row.against), len(witnesses)))
                if row.verdict != RIGHT or row.note or row.against:
                    note = notes.setdefault(row.note, len(notes))
                    key = (place, _written(row.relative), _written(row.allowed), note)
                    details.setdefault(key, []).append(number)
                if row.side or row.forward or row.forward_note:
                    note = notes.setdefault(row.forward_note, len(notes))
                    sides.append((place, number, row.side, _LETTER_OF.get(row.forward, ""), note))
            pairs.append({"builder": builder, "executor": executor, "verdicts": "".join(letters), "witnesses": seen})
        about = [self.cases[name] for name in names]
        return {
            "format": FORMAT,
            "settings": dict(sorted(self.settings.items())),
            "versions": dict(self.versions),
            "letters": LETTERS,
            "cases": [
                [name, a.operator, a.opset, a.dtype, a.values, a.provenance]
                for name, a in zip(names, about, strict=True)
            ],
            "witnesses": [[list(names) for names in both] for both in witnesses],
            "notes": list(notes),
            "pairs": pairs,
            "details": sorted([place, numbers, *rest] for (place, *rest), numbers in details.items()),
            **({"sides": sorted(map(list, sides))} if sides else {}),
        }


_LETTER_OF = {verdict: letter for letter, verdict in LETTERS.items()}


def options_of(pair: Pair) -> str:
    """The options of a command that ask this builder and executor."""
    builder, executor = pair
    return _options([("builder", unversioned(builder)), ("backend", unversioned(executor))])


def _options(options: Iterable[tuple[str, str]]) -> str:
    return " ".join(f"--{option} {shlex.quote(value)}" for option, value in options)


def unversioned(name: str) -> str:
    """The name of a builder or executor without the version that `merge` added."""
    return name.rpartition(VERSION_MARK)[0] or name


def _compact(value: Any) -> str:
    return json_text(json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


def _written(number: float | None) -> float | str | None:
    """Three digits; what JSON has no number for as a string."""
    if number is None:
        return None
    return float(f"{number:.3g}") if math.isfinite(number) else str(float(number))


def load(path: str | os.PathLike[str]) -> Results:
    """Read a file that `Results.save` wrote.

    :raises ResultsError: it cannot be read, or is no such file; says which part of it is not what it has to be.
    """
    text = read_text(path, ResultsError, "Results are a file that `refgrad conformance run -o results.json` wrote.")
    try:
        document = parse_json(text)
    except ValueError as error:
        raise ResultsError(f"{str(path)!r} is no JSON: {error}.") from error
    try:
        return _read(document)
    except ResultsError as error:
        raise ResultsError(f"{str(path)!r}: {error} Write it anew with `refgrad conformance run`.") from None


def _read(document: Any) -> Results:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ResultsError(f'"format" has to be {FORMAT!r}.')
    for key, kind in _PARTS.items():
        _require(isinstance(document.get(key), kind), key, f"has to be {_KINDS[kind]}")
    _require(isinstance(document.get("sides", []), list), "sides", "has to be a list")
    for key, kinds in _SETTINGS.items():
        if key in document["settings"]:
            _require(any(_is(document["settings"][key], kind) for kind in kinds), f"settings.{key}", _UNFIT)
    for key in ("seed", "every", "seconds"):
        if key in document["settings"] and not isinstance(document["settings"][key], str):
            due = RANGES[key].why_not(document["settings"][key])
            _require(not due, f"settings.{key}", f"has to be {due}")
    for name, version in document["versions"].items():
        _require(isinstance(version, str), f"versions[{name!r}]", "has to be a string")
    cases: dict[str, About] = {}
    for place, entry in enumerate(document["cases"]):
        where = f"cases[{place}]"
        _require(
            _are(entry, str, str, int, str, str, str),
            where,
            "has to be [name, operator, opset, dtype, values, provenance]",
        )
        _require(entry[0] not in cases, where, f"is {entry[0]!r} again")
        cases[entry[0]] = About(*entry[1:])
    names = list(cases)
    witnesses = []
    for place, both in enumerate(document["witnesses"]):
        fits = _are(both, list, list) and all(isinstance(name, str) for side in both for name in side)
        _require(fits, f"witnesses[{place}]", "has to be two lists of oracles, those for and those against")
        witnesses.append((tuple(both[0]), tuple(both[1])))
    for place, note in enumerate(document["notes"]):
        _require(isinstance(note, str), f"notes[{place}]", "has to be a string")
    rows: dict[tuple[int, int], ResultRow] = {}
    for number, pair in enumerate(document["pairs"]):
        for place, row in enumerate(_rows_of(pair, f"pairs[{number}]", names, witnesses)):
            if row is not None:
                rows[place, number] = row
    for place, entry in enumerate(document["details"]):
        where = f"details[{place}]"
        fits = isinstance(entry, list) and len(entry) == 5 and isinstance(entry[1], list)
        _require(fits, where, "has to be [case, [pair, ...], relative, allowed, note]")
        case, numbers, relative, allowed, note = entry
        _require(_is_index(note, document["notes"]), where, f"has the note {note!r}, which there is not")
        for number in numbers:
            known = type(case) is int and type(number) is int and (case, number) in rows
            _require(known, where, f"is about case {case!r} of pair {number!r}, which has no verdict")
            rows[case, number] = replace(
                rows[case, number],
                relative=_number(relative, where),
                allowed=_number(allowed, where),
                note=document["notes"][note],
            )
    for place, entry in enumerate(document.get("sides", ())):
        where = f"sides[{place}]"
        fits = _are(entry, int, int, str, str, int) and entry[2] in ("", BUILDER, EXECUTOR)
        _require(fits and entry[3] in ("", *LETTERS), where, "has to be [case, pair, side, letter, note]")
        case, number, side, letter, note = entry
        _require(_is_index(note, document["notes"]), where, f"has the note {note!r}, which there is not")
        _require((case, number) in rows, where, f"is about case {case!r} of pair {number!r}, which has no verdict")
        rows[case, number] = replace(
            rows[case, number],
            side=side,
            forward=LETTERS[letter] if letter else "",
            forward_note=document["notes"][note],
        )
    return Results(document["settings"], document["versions"], cases, tuple(rows.values()))


_PARTS = {
    "settings": dict,
    "versions": dict,
    "cases": list,
    "witnesses": list,
    "notes": list,
    "pairs": list,
    "details": list,
}
_KINDS = {dict: "an object", list: "a list"}
# The types of settings that are read again. If several runs differ in a setting, it is a text or a list.
_OPTIONAL: tuple[Any, ...] = (str, type(None))
_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("ops", "opset", "dtype", "case", "values", "feeds"), _OPTIONAL),
    **dict.fromkeys(("sources", "builders", "executors", "oracles", "imports"), (tuple[str, ...],)),
    **dict.fromkeys(("seed", "memory", "every"), (int, str)),
    "seconds": (float, str),
    "contents": (dict[str, str], tuple[dict[str, str], ...], str),
}
_UNFIT = "is of another type than a run writes"


def _rows_of(
    pair: Any, where: str, names: Sequence[str], witnesses: Sequence[tuple[tuple[str, ...], tuple[str, ...]]]
) -> Iterable[ResultRow | None]:
    """The row of each case, None where the builder and executor were not asked."""
    keys = ("builder", "executor", "verdicts", "witnesses")
    fits = isinstance(pair, dict) and _are([pair.get(key) for key in keys], str, str, str, list)
    _require(fits, where, f"has to have {choices(keys)}")
    builder, executor, letters, seen = (pair[key] for key in keys)
    cases = counted(len(names), "case")
    _require(len(letters) == len(names), f"{where}.verdicts", f"has {counted(len(letters), 'letter')} for {cases}")
    _require(len(seen) == len(names), f"{where}.witnesses", f"has {counted(len(seen), 'number')} for {cases}")
    for name, letter, number in zip(names, letters, seen, strict=True):
        if letter == UNASKED:
            yield None
            continue
        _require(letter in LETTERS, f"{where}.verdicts", f"has the letter {letter!r}; there are {choices(LETTERS)}")
        _require(_is_index(number, witnesses), f"{where}.witnesses", f"has {number!r}, which there is not")
        yield ResultRow(name, builder, executor, LETTERS[letter], *witnesses[number])


def _require(fits: bool, where: str, message: str) -> None:
    if not fits:
        raise ResultsError(f"{where} {message}.")


def _are(entry: Any, *kinds: type) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == len(kinds)
        and all(type(value) is kind for value, kind in zip(entry, kinds, strict=True))
    )


def _is(value: Any, kind: Any) -> bool:
    """True if JSON's `value` is of this type."""
    if kind is type(None):
        return value is None
    try:
        typed(value, kind, "")
    except ValueError:
        return False
    return True


def _is_index(number: Any, values: Sequence[Any]) -> bool:
    return type(number) is int and 0 <= number < len(values)


def _number(value: Any, where: str) -> float | None:
    fits = value is None or type(value) in (int, float) or value in ("inf", "-inf", "nan")
    _require(fits, where, f"has {value!r} for a number")
    return None if value is None else float(value)


def merge(results: Sequence[Results]) -> Results:
    """One board of several runs, for instance of environments that exclude each other.

    A builder or executor of which they had different versions is listed by version ("ort-cpu@1.19.2"). Of two rows about
    the same, a fault comes first, then a verdict that is decided, then the one with more oracles.

    :raises ResultsError: there is nothing to merge; a case of the same name is another one; the seeds or the feeds differ.
    """
    if not results:
        raise ResultsError("There are no results to merge: give one or more.")
    seeds = {str(board.settings.get("seed")) for board in results}
    if len(seeds) > 1:
        raise ResultsError(f"The results have different seeds, {choices(sorted(seeds))}: run them with the same one.")
    feeds = {board.settings["feeds"] for board in results if board.settings.get("feeds")}
    if len(feeds) > 1:
        raise ResultsError(f"The results have different feeds, {choices(sorted(feeds))}: run them with the same ones.")
    several = _in_several_versions(results)
    settings: dict[str, Any] = {}
    versions: dict[str, str] = {}
    cases: dict[str, About] = {}
    rows: dict[tuple[str, str, str], ResultRow] = {}
    for board in results:
        called = {name: _by_version(name, v) for name, v in board.versions.items() if unversioned(name) in several}
        versions |= {called.get(name, name): version for name, version in board.versions.items()}
        for key, value in board.settings.items():
            settings[key] = _together(settings[key], value) if key in settings else value
        for name, about in board.cases.items():
            if replace(cases.setdefault(name, about), provenance="") != replace(about, provenance=""):
                raise ResultsError(f"The case {name!r} is {cases[name]} in one of the results and {about} in another.")
        for row in board.rows:
            here = replace(
                row,
                builder=called.get(row.builder, row.builder),
                executor=called.get(row.executor, row.executor),
            )
            key_of = (here.case, here.builder, here.executor)
            rows[key_of] = max(rows.get(key_of, here), here, key=_weight)  # of equals the first
    if feeds:
        settings["feeds"] = feeds.pop()
    return Results(settings, versions, cases, tuple(rows.values()))


def _together(value: Any, other: Any) -> Any:
    """Two settings: of lists every entry, of others that differ both."""
    if isinstance(value, list) and isinstance(other, list):
        return [*value, *(entry for entry in other if entry not in value)]
    return value if value == other else f"{value}; {other}"


def _in_several_versions(results: Sequence[Results]) -> set[str]:
    seen: dict[str, set[str]] = {}
    for board in results:
        for name, version in board.versions.items():
            seen.setdefault(unversioned(name), set()).add(version)
    return {name for name, versions in seen.items() if len(versions) > 1}


def _by_version(name: str, version: str) -> str:
    return f"{unversioned(name)}{VERSION_MARK}{version.rpartition(' ')[2]}"


def _weight(row: ResultRow) -> tuple[bool, bool, int]:
    return row.verdict in FAULTS, row.verdict != UNDECIDED, len(row.witnesses)
