"""`refgrad conformance`: run the suite, report its results, export it, test it with mutants."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from refgrad.backends.base import load_model
from refgrad.cli.numbers import number
from refgrad.cli.options import Seed, Verbose
from refgrad.cli.output import AGREES, DISAGREES, App, Files, say, say_lines, stdout
from refgrad.conformance import reporting as reports
from refgrad.conformance.case import Case
from refgrad.conformance.judging.verdicts import AGREED, CONVENTION, FAULTS, INCONCLUSIVE
from refgrad.conformance.questions.feeds import read_feeds
from refgrad.conformance.questions.point import inputs_of
from refgrad.conformance.reporting import terminal
from refgrad.conformance.running import sources
from refgrad.conformance.running.journal import Journal
from refgrad.conformance.running.limitations import Limitations
from refgrad.conformance.running.results import Results, load, merge
from refgrad.conformance.running.runner import MEMORY, ORACLES, Plan, in_lanes
from refgrad.conformance.running.suite import Progress as Report
from refgrad.conformance.running.suite import require, run_suite, settings_of
from refgrad.errors import OptionError, RefgradError, ResultsError, WorkerError, abridged, choices
from refgrad.escaping import printable
from refgrad.protos.files import fingerprint, refuse_replacing, replacing
from refgrad.show.text import onnx_simple_text_plot
from refgrad.tables import plugins
from refgrad.worker import SECONDS, Worker

SOURCES = ("tables", "node-tests", "findings")

app = App(
    help="Test gradient builders and executors, operator by operator, against independent oracles.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Ops = Annotated[
    str | None, typer.Option("--ops", metavar="NAMES", help="Operators, such as Conv,com.microsoft.Gelu. Default: all.")
]
Opset = Annotated[
    str,
    typer.Option(
        help="newest: the newest version of each operator. 21 or 13-28: every version in "
        "these opsets. all: every version."
    ),
]
Dtype = Annotated[
    str | None, typer.Option(metavar="TYPES", help="float16,bfloat16,float32,float64. Default: the type of each case.")
]
Name = Annotated[
    str | None,
    typer.Option("--case", metavar="PATTERN", help="Only cases with such a name; * stands for any characters."),
]
Values = Annotated[
    str,
    typer.Option(
        help="smooth, kink (points without a derivative), special (infinities, NaN, extremes), or several of them."
    ),
]
Every = Annotated[int, number("every", metavar="N", help="Take only every Nth case of each operator.")]
From = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="SOURCE",
        help="Where cases come from: tables, node-tests, findings, a folder laid out "
        "like ONNX's backend tests, or an .onnx file. Default: tables.",
    ),
    Files.MODEL,
]
Feeds = Annotated[
    Path | None,
    typer.Option(help="A .npz file with the inputs of the .onnx file by name. Default: random inputs."),
    Files.READ,
]


@app.command()
def run(
    builder: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="What writes gradients: refgrad, refgrad:ort, onnxruntime:raw, "
            "onnxruntime:module, onnx-ad, package.module:function.",
        ),
    ] = "refgrad,refgrad:ort",
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="What runs them: numpy, ort-cpu, ort-cuda, onnx.reference, package.module:Class."
        ),
    ] = "numpy",
    ops: Ops = None,
    opset: Opset = "newest",
    dtype: Dtype = None,
    case: Name = None,
    values: Values = "smooth",
    source: From = None,
    every: Every = 1,
    feeds: Feeds = None,
    oracle: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="What they are compared with: differences, reference, complex-step, "
            "adjoint, second-order, torch, onnxruntime, onnx-ad.",
        ),
    ] = ",".join(ORACLES),
    seed: Seed = 0,
    seconds: Annotated[
        float, number("seconds", said="A time limit of {:g} s is none. ", help="The time limit of each call.")
    ] = SECONDS,
    memory: Annotated[
        int,
        number(
            "memory",
            said="A memory limit of {} MiB is none. ",
            help="The memory limit of each process, in MiB; 0 is no limit.",
        ),
    ] = MEMORY >> 20,
    workers: Annotated[
        int | None, number("workers", help="How many processes to use. Default: one for each core.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on the Dask cluster with this scheduler, such as tcp://host:8786."),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(help="Append each verdict to this file, so that the run can be resumed."),
        Files.JOURNAL,
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run of the journal.")] = False,
    limitations: Annotated[
        Path | None, typer.Option(help="A TOML file of known failures, with reasons."), Files.READ
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", help="Write the results: .json, .xml (JUnit), .md or .html. May be repeated."),
        Files.WRITTEN,
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Ask builders for gradients, run them on executors, and judge the results.

    The exit code is 1 where something is wrong, crashes, or exceeds a limit and no limitation explains it, where every
    case is inconclusive, and where an independent forward is not that of its operator.
    """
    plan = Plan(_split(builder), _split(backend), _split(oracle), seed, seconds, memory << 20)
    require(plan)
    known = Limitations() if limitations is None else Limitations.read(limitations)
    listed = list(source or SOURCES[:1])
    for path in output or ():
        reports.writer(path)
    asked: dict[str, Any] = {
        "ops": ops,
        "opset": opset,
        "dtype": dtype,
        "case": case,
        "values": values,
        "sources": listed,
        "feeds": None if feeds is None else str(feeds),
        "every": every,
        **({"imports": plugins.named()} if plugins.named() else {}),
    }
    with _saying_what_is_kept(journal):
        cases = list(_cases(listed, feeds, seed, ops, opset, dtype, case, values, every))
        if contents := _contents(listed, feeds):
            asked["contents"] = contents
        if not cases:
            raise OptionError(
                "No case is left to run. Ask for more: --ops, --opset, --dtype, --case, --values, --source."
            )
        if resume and journal is None:
            raise OptionError("--resume needs a journal: --journal FILE.")
        kept = nullcontext() if journal is None else Journal(journal, settings_of(plan) | asked, resume)
        with kept as written, _bar() as progress:
            results = run_suite(
                cases, plan, lanes=workers, cluster=cluster, journal=written, settings=asked, progress=progress
            )
        for path in output or ():
            reports.write(results, path, cases)
    whole = not (ops or case) and every == 1
    code = _report(results, known, whole, verbose)
    raise typer.Exit(DISAGREES if _wrong_forwards(cases, plan) else code)


@contextmanager
def _saying_what_is_kept(journal: Path | None) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        kept = "Nothing is kept: with --journal FILE a run can be resumed."
        if journal is not None and not journal.exists():
            kept = "Nothing is kept: the journal begins with the first verdict."
        elif journal is not None:
            kept = f"The journal {str(journal)!r} has the verdicts so far: go on with --resume."
        say(f"refgrad: Interrupted. {kept}", file=sys.stderr)
        raise


def _wrong_forwards(cases: list[Case], plan: Plan) -> bool:
    """Say which independent forwards are not those of their operators; whether there are any.

    Their oracles are silent where they compute something else, so no verdict tells.
    """
    from refgrad.conformance.oracles import forwards

    if not {"complex-step", "reference"} & set(plan.oracles):
        return False
    said: dict[str, str] = {}
    for case, why in in_lanes(_of_forward, forwards.few(cases), plan.seconds, plan.memory):
        if why:
            said.setdefault(case.operator, why)
    for operator in sorted(said):
        say(said[operator])
    return bool(said)


def _of_forward(case: Case, worker: Worker) -> str:
    from refgrad.conformance.oracles import forwards

    try:
        return worker.call(forwards.fault, case) or ""
    except WorkerError as error:
        return f"{case.operator}: its independent forward cannot be compared in {case}: {error}"


def _report(results: Results, known: Limitations, whole: bool, verbose: bool) -> int:
    """Print the results and return the exit code."""
    operators = {name: about.operator for name, about in results.cases.items()}
    explained = [row for row in results.faults if known.covers(row, operators)]
    stale = known.stale(results.rows, operators, complete=whole)
    terminal.show(results, stdout(), None if verbose else terminal.FAULTS_SHOWN)
    if known.entries:
        say(f"{len(explained)} of {len(results.faults)} faults are known limitations.")
    for entry, why in stale:
        say(f"The limitation {entry} {why}. Remove it.")
    nothing = _unverified(results, operators)
    return DISAGREES if len(explained) < len(results.faults) or stale or nothing else AGREES


def _unverified(results: Results, operators: Mapping[str, str]) -> bool:
    """Name the operators of which no case came to a verdict; whether that is so of all that were asked."""
    doubtful = {operators[row.case] for row in results.rows if row.verdict == INCONCLUSIVE}
    decided = {
        operators[row.case] for row in results.rows if row.verdict in FAULTS or row.verdict in (AGREED, CONVENTION)
    }
    if unverified := sorted(doubtful - decided):
        say(f"No case of {abridged(unverified)} was verified: every one is inconclusive.")
    return bool(unverified) and not decided


@app.command()
def report(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS...", help="Files that `run --output` wrote (.json)."),
        Files.READ,
    ],
    output: Annotated[
        list[Path],
        typer.Option("--output", "-o", help="What to write: .json, .xml (JUnit), .md or .html. May be repeated."),
        Files.WRITTEN,
    ],
) -> None:
    """Write reports. The results of several runs become one report."""
    for path in output:
        reports.writer(path)
    found = [load(path) for path in results]
    refuse_replacing(output, models=chain.from_iterable(map(_files_read, found)))
    merged = found[0] if len(found) == 1 else merge(found)
    for path in output:
        reports.write(merged, path, _again(found) if path.suffix == ".html" else ())


@app.command("export")
def export_folder(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to make; with --zip the file."), Files.NEW_FOLDER
    ],
    ops: Ops = None,
    opset: Annotated[str | None, typer.Option(help="As for run. Default: the opset of each case.")] = None,
    dtype: Dtype = None,
    models: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Whole models to export too: a folder of .onnx files, or one; each is fed the .npz file of its name.",
        ),
        Files.READ,
    ] = None,
    archive: Annotated[
        bool, typer.Option("--zip", help="Write one .zip archive, whose bytes are the same in every run.")
    ] = False,
) -> None:
    """Write the suite as files (docs/export.md): gradient models with expected values, and models with expected gradients."""
    from refgrad.conformance.exporting.export import export_suite

    with _bar() as progress:
        operators = _split(ops) if ops is not None else None
        made = export_suite(folder, operators, opset, dtype, models=models, archive=archive, progress=progress)
    say(f"{folder}: {len(made.tests)} tests; {len(made.left_out)} cases are left out, see manifest.json")


@app.command()
def mutants(
    ops: Ops = None,
    seed: Seed = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the results to this .json file."), Files.WRITTEN
    ] = None,
) -> None:
    """Break rules on purpose, and see whether the suite notices. The exit code is 1 if it misses one."""
    from refgrad.conformance.mutating.mutants import summary, survey

    outcomes = survey(_split(ops) if ops is not None else None, seed)
    survivors = [one for one in outcomes if not one.caught]
    for one in survivors:
        say(f"survived: {one.mutant}")
    say(f"{len(outcomes) - len(survivors)} of {len(outcomes)} mutants are caught")
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
    found = {}
    for path in [*(Path(source) for source in listed if source not in SOURCES), *([feeds] if feeds else [])]:
        if path.exists():
            found[str(path)] = fingerprint(path)
    return found


def _again(found: list[Results]) -> Iterator[Case]:
    """Find the cases of these results again: those of files which are as they were, since anybody may name a file."""
    for asked in {json.dumps(one.settings, sort_keys=True): one.settings for one in found}.values():
        try:
            yield from _asked_again(asked)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ResultsError(
                f"The settings of these results are malformed ({error}). Run the suite again."
            ) from error


def _asked_again(asked: Mapping[str, Any]) -> Iterator[Case]:
    names = ("ops", "opset", "dtype", "case", "values")
    ops, opset, dtype, case, values = (asked.get(name) for name in names)
    contents = asked.get("contents", {})  # several, of results that were put together
    known = {item for one in (contents if isinstance(contents, list) else [contents]) for item in one.items()}
    same = {path for path, before in known if _is_still(Path(path), before)}
    listed = [source for source in asked.get("sources", ()) if source in SOURCES or str(Path(source)) in same]
    feeds = Path(asked["feeds"]) if asked.get("feeds") and str(Path(asked["feeds"])) in same else None
    yield from _cases(
        listed, feeds, int(asked["seed"]), ops, opset or "newest", dtype, case, values, asked.get("every", 1)
    )


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
    values: Values = "smooth",
    source: From = None,
    every: Every = 1,
    show: Annotated[bool, typer.Option("--show", help="Print each model too.")] = False,
) -> None:
    """List the cases that `run` would take."""
    for one in _cases(list(source or SOURCES[:1]), None, 0, ops, opset, dtype, case, values, every):
        say(f"{one.name}  {one.operator} opset {one.opset} {one.dtype} {one.values}")
        if show:
            say_lines(onnx_simple_text_plot(one.model))


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
            f"Several models are called {same[0]!r}, and so would their cases be. Give one of them another name."
        )
    found = chain.from_iterable(_source(source, feeds, seed, asked) for source in listed)
    seen: Counter[str] = Counter()
    for case in sources.select(found, asked, opset, dtype, name, values):
        if seen[case.operator] % every == 0:
            yield case
        seen[case.operator] += 1


def _source(source: str, feeds: Path | None, seed: int, operators: tuple[str, ...] | None) -> Iterator[Case]:
    if source == "tables":
        return sources.tables(operators)
    if source == "node-tests":
        return sources.node_tests()
    if source == "findings":
        return sources.of_findings()
    path = Path(source)
    if path.is_dir():
        return sources.folder(path)
    if path.is_file():
        given = None if feeds is None else read_feeds(feeds, inputs_of(load_model(path, external_data=False)))
        return iter([sources.one_model(path, given, seed)])
    raise OptionError(f"There is no source {source!r}. Give {choices(SOURCES)}, a folder of cases, or an .onnx file.")


def _split(names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))


@contextmanager
def _bar() -> Iterator[Report]:
    """Show progress on stderr, with rate and remaining time, if it is a terminal."""
    rate = TextColumn("{task.fields[rate]}")
    columns = (MofNCompleteColumn(), BarColumn(), rate, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(
        *columns,
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("", total=None, rate="")

        def report(done: int, total: int, name: str) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            rate = f"{done / elapsed:.0f} cases/s" if elapsed > 1 else ""
            bar.update(task, completed=done, total=total, description=printable(name), rate=rate)

        yield report
