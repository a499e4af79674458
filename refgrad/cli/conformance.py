"""`refgrad conformance`: run the suite, report its results, export it, test it with mutants."""

from __future__ import annotations

import json
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from refgrad.backends.base import load_model
from refgrad.cli import reporting
from refgrad.cli.commands import choice
from refgrad.cli.numbers import number
from refgrad.cli.options import Json, Seed, Verbose
from refgrad.cli.output import AGREES, DISAGREES, App, Bar, Files, print_json, say, say_lines, saying_what_is_kept
from refgrad.conformance import reports
from refgrad.conformance.case import Case
from refgrad.conformance.cases import covered
from refgrad.conformance.judge.running import sources
from refgrad.conformance.judge.running.journal import Journal
from refgrad.conformance.judge.running.limitations import Limitations
from refgrad.conformance.judge.running.results import About, Results, load, merge
from refgrad.conformance.judge.running.runner import MEMORY, ORACLES, Lanes, Plan
from refgrad.conformance.judge.running.suite import require, run_suite, settings_of
from refgrad.conformance.oracles import oracles
from refgrad.conformance.problems.feeds import read_feeds
from refgrad.conformance.problems.point import inputs_of
from refgrad.conformance.problems.systems.builders import BUILDERS
from refgrad.conformance.problems.systems.executors import executor_names
from refgrad.conformance.verdicts import FAULTS
from refgrad.errors import OptionError, RefgradError, ResultsError, abridged, choices, counted
from refgrad.model.writing import fingerprint, refuse_replacing, replacing
from refgrad.ranges import checked
from refgrad.show.text import onnx_simple_text_plot
from refgrad.sizes import in_bytes
from refgrad.tables import plugins
from refgrad.worker import SECONDS

SOURCES = ("tables", "node-tests", "findings")

app = App(help="Test a runtime or a gradient builder, operator by operator.")


def _check_opset(value: str | None) -> str | None:
    if value is not None:
        sources.opsets(value, "--opset ")
    return value


Ops = Annotated[
    list[str] | None,
    typer.Option("--ops", metavar="NAMES", help="Operators, such as Conv,com.microsoft.Gelu.", show_default="all"),
]
Opset = Annotated[
    str,
    typer.Option(
        callback=_check_opset,
        metavar="<newest|N|N-M|all>",
        help="The versions of each operator. newest: the newest one. 21: those in this opset. 13-28: those in these "
        "opsets. all: every version.",
    ),
]
Dtype = Annotated[
    list[str] | None,
    choice(
        sources.DTYPES,
        several=True,
        help="Float types, separated by commas. May be repeated.",
        show_default="the type of each case",
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--case", metavar="PATTERN", help="Only cases whose name matches the pattern. * stands for any characters."
    ),
]
Values = Annotated[
    list[str] | None,
    choice(
        sources.VALUES,
        several=True,
        help="kink: points without a derivative. special: infinities, NaN, extremes. With commas or repeated.",
        show_default="smooth",
    ),
]
Every = Annotated[int, number("every", metavar="N", help="Take only every Nth case of each operator.")]
From = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="SOURCE",
        help="Where cases come from. tables: refgrad's own. node-tests: the onnx package. findings: models that builders "
        "differentiate wrongly. Or a folder in the layout of ONNX's backend tests, or an .onnx file.",
        autocompletion=lambda: list(SOURCES),
        show_default="tables",
    ),
    Files.MODEL,
]
Feeds = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A .npz file with the inputs by name, if --source is an .onnx file.",
        show_default="random inputs",
    ),
    Files.READ,
]


@app.command()
def run(
    builder: Annotated[
        list[str] | None,
        choice(
            BUILDERS,
            several=True,
            others="package.module:function",
            metavar="NAMES",
            help="Gradient builders, separated by commas. May be repeated.",
            show_default=",".join(Plan.builders),
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        choice(
            executor_names,
            "--backend",
            several=True,
            others="package.module:Class",
            metavar="NAMES",
            help="Executors, separated by commas. May be repeated.",
            show_default=",".join(Plan.executors),
        ),
    ] = None,
    ops: Ops = None,
    opset: Opset = "newest",
    dtype: Dtype = None,
    case: Name = None,
    values: Values = None,
    source: From = None,
    every: Every = 1,
    feeds: Feeds = None,
    oracle: Annotated[
        list[str] | None,
        choice(
            oracles,
            several=True,
            metavar="NAMES",
            help="Oracles, each an independent way to know a gradient, separated by commas. May be repeated.",
            show_default=",".join(ORACLES),
        ),
    ] = None,
    seed: Seed = 0,
    seconds: Annotated[float, number("seconds", help="The time limit of each call, in seconds.")] = SECONDS,
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="The memory limit of each worker process: a number of MiB, or 500M, 8G; 0 is no limit."
        ),
    ] = f"{MEMORY >> 30}G",
    workers: Annotated[
        int | None, number("workers", help="How many processes to use.", show_default="one for each core")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on the Dask cluster with this scheduler, such as tcp://host:8786."),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append each verdict to this file, so that the run can be resumed."),
        Files.JOURNAL,
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --journal.")] = False,
    limitations: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A TOML file of known failures, with reasons."), Files.READ
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the results: .json, .xml (JUnit), .md or .html. May be repeated.",
        ),
        Files.WRITTEN,
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Run the suite: build gradients, run them, and judge the results.

    The exit code is 1 if a fault is not in --limitations, an entry of --limitations no longer holds, or every case is
    undecided. It is also 1 if an oracle and refgrad's interpreter compute different outputs of an operator.
    """
    plan = Plan(
        _listed(builder, "--builder", "builder") or Plan.builders,
        _listed(backend, "--backend", "executor") or Plan.executors,
        _listed(oracle, "--oracle", "oracle") or Plan.oracles,
        seed,
        seconds,
        _bytes_of(memory),
    )
    require(plan)
    names, dtypes, kinds = ops_of(ops), dtypes_of(dtype), kinds_of(values)
    if resume and journal is None:
        raise OptionError("--resume needs a journal: --journal FILE.")
    known = Limitations() if limitations is None else Limitations.read(limitations)
    listed = list(source or SOURCES[:1])
    _require_model(listed, feeds)
    for path in output or ():
        reports.writer(path)
    asked: dict[str, Any] = {
        "ops": names,
        "opset": opset,
        "dtype": dtypes,
        "case": case,
        "values": kinds,
        "sources": listed,
        "feeds": None if feeds is None else str(feeds),
        "every": every,
        **({"imports": plugins.named()} if plugins.named() else {}),
    }
    with saying_what_is_kept(lambda: reporting.kept_in(journal)), Bar("making cases", after=0) as bar:
        cases = []
        for drawn_case in _cases(listed, feeds, seed, names, opset, dtypes, case, kinds, every):
            cases.append(drawn_case)
            bar(len(cases), None, f"making cases: {drawn_case.operator}")
        if contents := _contents(listed, feeds):
            asked["contents"] = contents
        if not cases:
            raise OptionError(_none_left(listed, names, opset, dtypes, case, kinds))
        if resume and journal is not None and not journal.exists():
            say(f"refgrad: notice: there is no journal {str(journal)!r} yet. A new run begins.", file=sys.stderr)
        kept = nullcontext() if journal is None else Journal(journal, settings_of(plan) | asked, resume)
        with kept as written, Lanes(plan.seconds, plan.memory, workers) as lanes:
            results = run_suite(
                cases,
                plan,
                lanes=lanes,
                cluster=cluster,
                journal=written,
                settings=asked,
                progress=reporting.RunProgress(cases, bar),
            )
            for path in output or ():
                bar(len(cases), len(cases), f"writing {path}")
                reports.write(results, path, cases)
            bar(len(cases), len(cases), "comparing independent forwards")
            fallen = reporting.wrong_forwards(cases, plan, lanes)
    operators = {name: about.operator for name, about in results.cases.items()}
    whole = not (names or case) and every == 1
    stale = known.stale(results.rows, operators, complete=whole)
    explained = [row for row in results.faults if known.covers(row, operators)]
    remarks = list(reporting.remarks(results, operators, known, explained, stale))
    remarks += [fallen[operator] for operator in sorted(fallen)]
    wrong = len(explained) < len(results.faults) or stale or reporting.undecided(results, operators) or fallen
    reporting.show(results, cases, known, remarks, verbose, as_json, ok=not wrong)
    raise typer.Exit(DISAGREES if wrong else AGREES)


@app.command()
def report(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS", help="Files that `run --output` wrote (.json)."),
        Files.READ,
    ],
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write a report: .json, .xml (JUnit), .md or .html. May be repeated."
        ),
        Files.WRITTEN,
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Print the results of one or more runs, or write reports of them. The results of several runs become one report."""
    for path in output or ():
        reports.writer(path)
    boards = [load(path) for path in results]
    refuse_replacing(output or (), models=chain.from_iterable(map(_files_read, boards)))
    merged = boards[0] if len(boards) == 1 else merge(boards)
    kept = "No report is written in part: call the command again."
    paged = any(path.suffix == ".html" for path in output or ())
    with saying_what_is_kept(lambda: kept), Bar("making cases", after=0) as bar:
        cases = []
        # Without a page, cases only explain the faults. If they cannot be made, print without them.
        with nullcontext() if paged else suppress(RefgradError):
            for asked_case in _again(boards, None if paged else _at_fault(merged)):
                cases.append(asked_case)
                bar(len(cases), None, f"making cases: {asked_case.operator}")
        for path in output or ():
            bar(len(cases), len(cases), f"writing {path}")
            reports.write(merged, path, cases)
    if not output or as_json:
        reporting.show(merged, cases, Limitations(), (), verbose, as_json, ok=not merged.faults)


@app.command("export")
def export_folder(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to write, or with --zip the archive."), Files.NEW_FOLDER
    ],
    ops: Ops = None,
    opset: Annotated[
        str | None,
        typer.Option(
            callback=_check_opset,
            metavar="<newest|N|N-M|all>",
            help="As for `conformance run`.",
            show_default="the opset of each case",
        ),
    ] = None,
    dtype: Dtype = None,
    models: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Also export this .onnx file, or all in this folder. If NAME.npz lies beside NAME.onnx, it has the inputs; "
            "otherwise they are random.",
        ),
        Files.READ,
    ] = None,
    archive: Annotated[
        bool, typer.Option("--zip", help="Write a .zip archive instead of a folder. Every run writes the same bytes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the suite as files, for runtimes without Python.

    Each case becomes a gradient model with its expected outputs, and a model with its expected gradients (docs/export.md).
    """
    from refgrad.conformance.tools.exporting.export import export_suite

    operators, dtypes = _operators(ops), dtypes_of(dtype)
    kept = f"Nothing is kept: {str(folder)!r} is written at the end. Export less with --ops."
    with saying_what_is_kept(lambda: kept), Bar("making cases", after=0) as bar:
        suite = export_suite(folder, operators, opset, dtypes, models=models, archive=archive, progress=bar)
    if as_json:
        print_json({"folder": str(folder), "tests": list(suite.tests), "left_out": suite.left_out})
    else:
        left_out = counted(len(suite.left_out), "case is", "cases are")
        say(
            f"{folder}: {counted(len(suite.tests), 'test')}, each as a gradient and as its model; {left_out} left out, "
            "see manifest.json"
        )


@app.command()
def mutants(
    ops: Ops = None,
    seed: Seed = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the results to this .json file."),
        Files.WRITTEN,
    ] = None,
    as_json: Json = False,
) -> None:
    """Break refgrad's rules on purpose, and see if the suite notices. The exit code is 1 if it misses one."""
    from refgrad.conformance.tools.mutating.mutants import summary
    from refgrad.conformance.tools.mutating.survey import survey

    operators = _operators(ops)
    kept = "Nothing is kept: ask for fewer operators with --ops."
    with saying_what_is_kept(lambda: kept), Bar("making cases", after=0) as bar:
        outcomes = survey(operators, seed, progress=bar)
    survivors = [outcome for outcome in outcomes if not outcome.caught]
    if as_json:
        print_json(summary(outcomes))
    else:
        for outcome in survivors:
            say(f"survived: {outcome.mutant}")
        caught = len(outcomes) - len(survivors)
        say(f"{caught} of {counted(len(outcomes), 'mutant')} {'is' if caught == 1 else 'are'} caught")
    if output is not None:
        with replacing(output) as file:
            file.write_text(json.dumps(summary(outcomes), indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(DISAGREES if survivors else AGREES)


def _files_read(results: Results) -> Iterator[Path]:
    """The files and folders that these results are about: a page reads them again."""
    sources, feeds = results.settings.get("sources", ()), results.settings.get("feeds")
    named = [source for source in sources if source not in SOURCES] if isinstance(sources, list) else []
    yield from (Path(name) for name in (*named, feeds) if name and isinstance(name, str))


def _contents(listed: list[str], feeds: Path | None) -> dict[str, str]:
    """The SHA-256 of each file, or of all files in a folder, that cases are read from."""
    contents = {}
    for path in [*(Path(source) for source in listed if source not in SOURCES), *([feeds] if feeds else [])]:
        if path.exists():
            contents[str(path)] = fingerprint(path)
    return contents


def _at_fault(results: Results) -> set[str]:
    """The operators with a fault of either side."""
    rows = (row for row in results.rows if row.verdict in FAULTS or row.forward in FAULTS)
    return {results.cases[row.case].operator for row in rows}


def _again(boards: list[Results], operators: set[str] | None = None) -> Iterator[Case]:
    """The cases of these results. Files are read only if they are unchanged: a results file may name any file.

    :param operators: the operators whose cases are found; None for all.
    """
    for asked in {json.dumps(board.settings, sort_keys=True): board.settings for board in boards}.values():
        try:
            yield from _asked_again(asked, operators)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ResultsError(
                f"The settings of these results are malformed ({error}). Run the suite again."
            ) from error


def _asked_again(asked: Mapping[str, Any], operators: set[str] | None) -> Iterator[Case]:
    names = ("ops", "opset", "dtype", "case", "values")
    ops, opset, dtype, case, values = (asked.get(name) for name in names)
    contents = asked.get("contents", {})  # several, of results that were put together
    known = {
        item
        for item_of_case in (contents if isinstance(contents, list) else [contents])
        for item in item_of_case.items()
    }
    same = {path for path, before in known if _is_still(Path(path), before)}
    listed = [source for source in asked.get("sources", ()) if source in SOURCES or str(Path(source)) in same]
    feeds = Path(asked["feeds"]) if asked.get("feeds") and str(Path(asked["feeds"])) in same else None
    if operators is not None and listed == [SOURCES[0]]:  # only these are made
        ops = ",".join(sorted(operators.intersection(_split(ops)) if ops is not None else operators))
    for item_of_case in _cases(
        listed, feeds, int(asked["seed"]), ops, opset or "newest", dtype, case, values, asked.get("every", 1)
    ):
        if operators is None or item_of_case.operator in operators:
            yield item_of_case


def _is_still(path: Path, known: str) -> bool:
    try:
        return (path.is_file() or path.is_dir()) and fingerprint(path) == known
    except (RefgradError, OSError):
        return False


@app.command()
def cases(
    ops: Ops = None,
    opset: Opset = "newest",
    dtype: Dtype = None,
    case: Name = None,
    values: Values = None,
    source: From = None,
    every: Every = 1,
    show: Annotated[bool, typer.Option("--show", help="Also print each model.")] = False,
    as_json: Json = False,
) -> None:
    """List the cases that `run` would run."""
    listed, names, dtypes, kinds = list(source or SOURCES[:1]), ops_of(ops), dtypes_of(dtype), kinds_of(values)
    listed_cases = _cases(listed, None, 0, names, opset, dtypes, case, kinds, every)
    first = next(listed_cases, None)
    if first is None:
        raise OptionError(_none_left(listed, names, opset, dtypes, case, kinds))
    listed_cases = chain([first], listed_cases)
    if as_json:
        print_json([{"name": listed_case.name, **asdict(About.of(listed_case))} for listed_case in listed_cases])
        return
    for listed_case in listed_cases:
        say(
            f"{listed_case.name}  {listed_case.operator} opset {listed_case.opset} {listed_case.dtype} {listed_case.values}"
        )
        if show:
            say_lines(onnx_simple_text_plot(listed_case.model))


def one_case(
    name: str, source: list[str] | None, feeds: Path | None, seed: int, opset: str, dtype: str | None, values: str
) -> Case:
    """The case of that name, or the only one that a pattern fits.

    :raises OptionError: there is none, or several.
    """
    listed = list(source or SOURCES[:1])
    _require_model(listed, feeds)
    matching = list(_cases(listed, feeds, seed, None, opset, dtype, name, values, 1))
    exact = [case for case in matching if case.name == name] or matching
    if not exact:
        raise OptionError(_none_left(listed, None, opset, dtype, name, values))
    if len(exact) > 1:
        raise OptionError(
            f"--case {name!r}: Several cases match: {abridged(case.name for case in exact)}. `refgrad conformance cases` "
            "lists them; give the name of one."
        )
    return exact[0]


def _cases(
    listed: list[str],
    feeds: Path | None,
    seed: int,
    ops: str | None,
    opset: str,
    dtype: str | None,
    name: str | None,
    values: str | None,
    every: int,
) -> Iterator[Case]:
    asked = _split(ops) if ops is not None else None
    files = Counter(Path(source).name for source in dict.fromkeys(listed) if Path(source).is_file())
    if same := [name for name, times in files.items() if times > 1]:
        raise OptionError(
            f"Several models are called {same[0]!r}, so their cases would have one name. Rename one of the models."
        )
    operator = (name or "").partition("-")[0]
    if (
        asked is None and listed == [*SOURCES[:1]] and operator in covered()
    ):  # the cases of one operator are made faster
        own = sources.select(sources.tables([operator]), None, opset, dtype, name, values)
        if exact := [case for case in own if case.name == name]:
            yield from exact
            return
    cases_of_sources = chain.from_iterable(_source(source, feeds, seed, asked) for source in listed)
    seen: Counter[str] = Counter()
    for case in sources.select(cases_of_sources, asked, opset, dtype, name, values):
        if seen[case.operator] % every == 0:
            yield case
        seen[case.operator] += 1


def _source(source: str, feeds: Path | None, seed: int, operators: tuple[str, ...] | None) -> Iterator[Case]:
    if source == "tables":
        return sources.tables(operators)
    if source == "node-tests":
        return sources.node_tests()
    if source == "findings":
        return sources.of_bugs()
    path = Path(source)
    if path.is_dir():
        return sources.folder(path)
    if path.is_file():
        arrays = None if feeds is None else read_feeds(feeds, inputs_of(load_model(path, external_data=False)))
        return iter([sources.one_model(path, arrays, seed)])
    raise OptionError(f"There is no source {source!r}. Give {choices(SOURCES)}, a folder of cases, or an .onnx file.")


def _require_model(listed: list[str], feeds: Path | None) -> None:
    if feeds is not None and all(source in SOURCES or Path(source).is_dir() for source in listed):
        raise OptionError(
            "--feeds has the inputs of one model. Give that model too, as --source MODEL.onnx, or leave --feeds out."
        )


def _none_left(
    listed: list[str], ops: str | None, opset: str, dtype: str | None, name: str | None, values: str | None
) -> str:
    """Say that no case is left, why, and which names are close."""
    if name is None:
        return "No case matches all of these options. Change --ops, --opset, --dtype, --case, --values or --source."
    sentence = f"No case matches --case {name!r}."
    listing = "`refgrad conformance cases` lists the names, and takes the same options."
    if SOURCES[0] not in listed:
        return f"{sentence} {listing}"
    operator, near = sources.near(name, opset, dtype, values)
    if not operator:
        return f"{sentence} A name begins with an operator, as in 'Tanh-*'. {listing}"
    own = list(sources.tables([operator]))
    if any(sources.select(own, None, opset, dtype, name, values)):
        other = f"--ops {ops}" if ops is not None else "--every"
        return f"{sentence} {operator} has one, but {other} leaves it out."
    option = _other_option(own, opset, dtype, name, values)
    other = f" There is one with {option}." if option else ""
    return f"{sentence}{other} The nearest are {choices(near)}. {listing}"


def _other_option(own: list[Case], opset: str, dtype: str | None, name: str, values: str | None) -> str:
    """The option with which `name` matches one of the cases of an operator; "" if there is none."""
    version, kind = re.search(r"-opset(\d{1,3})(?=-|$)", name), re.search(rf"-({'|'.join(sources.DTYPES)})$", name)
    number = version[1] if version and 1 <= int(version[1]) <= sources.NEWEST else "all"
    changes = [
        ("--values kink,special", opset, dtype, "kink,special"),
        (f"--dtype {kind[1]}" if kind else "another --dtype", opset, kind and kind[1], values),
        (f"--opset {number}", number, dtype, values),
    ]
    for option, opsets, types, kinds in changes:
        if any(sources.select(own, None, opsets, types, name, kinds)):
            return option
    return ""


_DIGITS = 18  # of a number of MiB


def _bytes_of(memory: str) -> int:
    """The bytes that `--memory` allows; 0 is no limit."""
    plain = memory.strip()
    is_number = plain.isdecimal() and len(plain) <= _DIGITS
    size = int(plain) << 20 if is_number else in_bytes(plain) if plain[-1:].isalpha() else None
    if size is None or 0 < size < 1 << 20:
        raise OptionError(
            f"--memory {reprlib.repr(memory)} is not a size. Give a number of MiB, or one like 500M or 8G, of at least 1 MiB; "
            "0 is no limit."
        )
    checked("memory", size >> 20, "--memory")
    return size


def _listed(texts: list[str] | None, flag: str, what: str) -> tuple[str, ...] | None:
    """The names a, b, c of `--ops a,b --ops c`, each once."""
    if texts is None:
        return None
    names = _split(",".join(texts))
    if not names:
        raise OptionError(f"{flag} {','.join(texts)!r} names no {what}. Name one, or leave {flag} out.")
    return names


def _operators(ops: list[str] | None) -> tuple[str, ...] | None:
    """The operators of `--ops`; the domain ai.onnx is never written."""
    names = _listed(ops, "--ops", "operator")
    return names and tuple(name.rpartition(".")[2] if _is_of_onnx(name) else name for name in names)


def _is_of_onnx(name: str) -> bool:
    return name.rpartition(".")[0] == "ai.onnx"


def ops_of(ops: list[str] | None) -> str | None:
    """The operators of `--ops`, separated by commas."""
    return _joined(_operators(ops))


def dtypes_of(dtype: list[str] | None) -> str | None:
    """The float types of `--dtype`, separated by commas."""
    return _joined(_listed(dtype, "--dtype", "float type"))


def kinds_of(values: list[str] | None) -> str:
    """The kinds of values of `--values`, separated by commas."""
    return _joined(_listed(values, "--values", "kind of values")) or "smooth"


def _joined(names: tuple[str, ...] | None) -> str | None:
    return None if names is None else ",".join(names)


def _split(names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
