"""The commands that run a model or its gradient: `run`, `check` and `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import refgrad
from refgrad.backends import available, get_backend
from refgrad.backends.base import load_model
from refgrad.backends.numpy.backend import NumpyModel
from refgrad.cli.commands import choice
from refgrad.cli.numbers import number
from refgrad.cli.options import Backend, Dim, Feeds, Json, Model, Outputs, Reports, Seed, Verbose, Wrt, names, sizes_of
from refgrad.cli.output import (
    AGREES,
    DISAGREES,
    REFUSED,
    Bar,
    Files,
    print_json,
    print_names,
    print_table,
    require_reports,
    say,
    say_lines,
    stdout,
    write_reports,
)
from refgrad.conformance.judge.check import check as run_check
from refgrad.conformance.problems.feeds import read_feeds, write_arrays
from refgrad.conformance.problems.fitting import fitting_feeds
from refgrad.conformance.problems.point import inputs_of
from refgrad.conformance.problems.systems.executors import executor_names, get_executor
from refgrad.conformance.problems.systems.surroundings import surroundings
from refgrad.conformance.reports import check_page, checks
from refgrad.conformance.reports.advice import ModelCommand
from refgrad.errors import OptionError
from refgrad.interruption import INTERRUPTED
from refgrad.model.writing import replacing
from refgrad.show import demo as notebook
from refgrad.show.tables import is_finite, statistics
from refgrad.tables import plugins
from refgrad.tables.dialects import DIALECTS

_REPORTS = {".html": check_page.page, ".md": checks.markdown_of, ".json": checks.text_of}
_ELEMENTS = 10_000  # of an output, in JSON


def run(
    model: Model,
    feeds: Feeds = None,
    backend: Backend = "numpy",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the outputs by name to this .npz file."),
        Files.WRITTEN,
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also return every intermediate value (--backend numpy only).")
    ] = False,
    precision: Annotated[
        str | None,
        choice(
            ("float64",),
            help="Compute every float in float64 (--backend numpy only).",
            show_default="the model's types",
        ),
    ] = None,
    seed: Seed = 0,
    dim: Dim = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Run MODEL and print its outputs.

    --json also prints the values of each output that has at most 10,000 elements. -o writes all outputs, of any size.
    """
    with Bar("preparing"):
        prepared = get_executor(backend).prepare(model, **({} if precision is None else {"precision": precision}))
    size, sizes = sizes_of(dim)
    # In another precision the file still has the types that the model declares.
    declared = prepared.inputs if precision is None else inputs_of(load_model(model, external_data=False))
    if trace and not isinstance(prepared, NumpyModel):
        raise OptionError(f"--trace needs --backend numpy: {backend!r} does not return intermediate values.")
    if feeds is not None:
        given, results = read_feeds(feeds, declared), None
    else:
        with Bar("trying feeds"):
            given, _, results = fitting_feeds(
                load_model(model, external_data=False),
                prepared.run,
                lambda found: all(map(is_finite, found.values())),
                inputs=prepared.inputs,
                seed=seed,
                size=size,
                sizes=sizes,
            )
    if isinstance(prepared, NumpyModel) and (trace or results is None):
        with Bar() as bar:
            results = prepared.run(given, trace=trace, progress=bar)
    elif results is None:
        with Bar("running"):
            results = prepared.run(given)
    if output is not None:
        with replacing(output) as file:
            write_arrays(file, results)
    rows = [statistics(name, value) for name, value in results.items()]
    if as_json:
        rows = [row | _values(results[row["name"]]) for row in rows]
        print_json({"backend": backend, "feeds": "random" if feeds is None else str(feeds), "outputs": rows})
        return
    print_table(rows, verbose)
    odd = [name for name, value in results.items() if not is_finite(value)]
    if odd:
        print_names("not finite:", odd, verbose)


def _values(value: Any) -> dict[str, Any]:
    """The values of an output for JSON, as nested lists, or the reason why they are left out."""
    size = sum(np.size(one) for one in value) if isinstance(value, list) else np.size(value)
    if size > _ELEMENTS:
        return {"values": None, "left_out": f"it has more elements than {_ELEMENTS}: -o FILE.npz writes all"}
    return {"values": _plain(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind in "OSU":
        return value.astype(str).tolist()
    if value.dtype.kind == "c":
        return np.stack([value.real, value.imag], axis=-1).tolist()
    return value.astype(np.float64).tolist() if value.dtype.kind == "V" else value.tolist()


def check(
    model: Model,
    feeds: Feeds = None,
    backends: Annotated[
        list[str] | None,
        choice(
            executor_names,
            "--backend",
            "--backends",
            several=True,
            others="package.module:Class",
            metavar="NAMES",
            help="Executors, separated by commas. May be repeated.",
            show_default="every available one",
        ),
    ] = None,
    dialect: Annotated[
        list[str] | None,
        choice(
            DIALECTS,
            several=True,
            help="Dialects of the gradient, separated by commas. May be repeated.",
            show_default="all that the executor has kernels for",
        ),
    ] = None,
    wrt: Wrt = None,
    outputs: Outputs = None,
    seed: Seed = 0,
    dim: Dim = None,
    tolerance: Annotated[
        float | None,
        number(
            "tolerance",
            help="The relative error that is allowed.",
            show_default="depends on the type and the number of nodes",
        ),
    ] = None,
    directions: Annotated[
        int, number("directions", help="The number of random directions for the finite differences of each gradient.")
    ] = 2,
    random_weights: Annotated[
        int | None,
        number(
            "random_weights",
            help="First give random values to each weight whose elements are all equal. N is their seed.",
        ),
    ] = None,
    output: Reports = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Check that the gradient of MODEL is right, on every executor. Compares it with finite differences, and the result of each
    executor with the gradient in float64.

    The exit code is 1 only if a gradient is wrong, or an executor crashes or takes too long or too much memory. It is 2 for
    wrong use, and if --max-seconds stops the check before it finds anything wrong. Errors of ONNX Runtime's own builder do
    not count.
    """
    require_reports(output or ())
    size, sizes = sizes_of(dim)
    given = None if feeds is None else read_feeds(feeds, inputs_of(load_model(model, external_data=False)))
    with Bar("differentiating") as bar:
        found = run_check(
            model,
            given,
            wrt=names(wrt),
            outputs=names(outputs),
            backends=names(backends),
            dialects=names(dialect),
            seed=seed,
            size=size,
            sizes=sizes,
            directions=directions,
            tolerance=tolerance,
            random_weights=random_weights,
            progress=bar,
        )
    if output:
        asked: dict[str, Any] = {
            "--feeds": feeds,
            "--backend": backends,
            "--dialect": dialect,
            "--wrt": wrt,
            "--outputs": outputs,
            "--seed": seed or None,
            "--dim": dim,
            "--tolerance": tolerance,
            "--directions": None if directions == 2 else directions,
            "--random-weights": random_weights,
            "--import": plugins.named(),
        }
        versions = surroundings(dict.fromkeys(row.backend for row in found.rows))
        write_reports(output, _REPORTS, found, ModelCommand.of(model, asked, versions))
    if as_json:
        print_json(checks.document(found))
    else:
        checks.show(found, stdout(), verbose)
        for path in output or ():
            say(f"{path}: written")
    if found.stopped == INTERRUPTED:
        raise KeyboardInterrupt
    raise typer.Exit(REFUSED if found.stopped and found.ok else AGREES if found.ok else DISAGREES)


def demo(verbose: Verbose = False, as_json: Json = False) -> None:
    """Show the gradient of a small regression, and check it. Prints both graphs and the numbers."""
    model = notebook.regression()
    gradient = refgrad.gradient(model, outputs=["loss"], cotangent="ones", keep_outputs=True)
    listings = [refgrad.onnx_simple_text_plot(graph) for graph in (model, gradient)]
    numbers = {name: get_backend(name).prepare(gradient).run(notebook.feeds()) for name in available()}
    found = run_check(model, notebook.feeds(), outputs=["loss"])
    if as_json:
        rows = {name: {k: v.tolist() for k, v in results.items()} for name, results in numbers.items()}
        print_json({"model": listings[0], "gradient": listings[1], "results": rows, "check": checks.document(found)})
        raise typer.Exit(AGREES if found.ok else DISAGREES)
    say_lines(f"The model, a regression with its loss:\n\n{listings[0]}\n")
    say_lines(f"The gradient of its loss, another ONNX model:\n\n{listings[1]}\n")
    for name, results in numbers.items():
        say_lines(f"On {name} ({get_backend(name).description()}):\n")
        for key, value in results.items():
            say_lines(f"    {key} = {np.array2string(value, prefix='    ' + key + ' = ')}")
        say_lines("")
    say_lines("Is it right?\n")
    checks.show(found, stdout(), verbose)
    raise typer.Exit(AGREES if found.ok else DISAGREES)
