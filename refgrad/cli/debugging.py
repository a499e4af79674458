"""The commands that find where a gradient goes wrong: `compare`, `nan`, `reduce` and `record`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from onnx import ModelProto

from refgrad.backends.base import load_model
from refgrad.backends.numpy import NumpyBackend
from refgrad.cli import conformance as suite
from refgrad.cli.commands import choice
from refgrad.cli.options import Backend, Dim, Feeds, Json, Model, Outputs, Reports, Seed, Verbose, Wrt, names, sizes_of
from refgrad.cli.output import (
    AGREES,
    DISAGREES,
    REFUSED,
    Bar,
    Files,
    ToldInterruption,
    print_json,
    refuse_overwriting,
    require_reports,
    say,
    say_lines,
    stdout,
    write_reports,
)
from refgrad.conformance.judge.nan.nonfinite import nonfinite
from refgrad.conformance.locating import comparing
from refgrad.conformance.locating.comparing import COTANGENTS
from refgrad.conformance.locating.sides import Live, side_of
from refgrad.conformance.problems.feeds import random_feeds, read_feeds, write_arrays
from refgrad.conformance.problems.fitting import fitting_feeds
from refgrad.conformance.problems.point import inputs_of
from refgrad.conformance.problems.problem import ask
from refgrad.conformance.problems.systems.executors import imported
from refgrad.conformance.reports import comparison_page, comparisons
from refgrad.conformance.reports.advice import ModelCommand, after_comparison
from refgrad.errors import OptionError, OutputFileError, RefgradError, counted, of_type
from refgrad.escaping import printable
from refgrad.interruption import INTERRUPTED
from refgrad.model.writing import replacing
from refgrad.show.tables import is_finite
from refgrad.tables import plugins

_SIDE = (
    "One of the gradients. Give builder@executor, such as refgrad@ort-cpu, onnx-ad@numpy:float64 or mine:function@mine:Class. "
    "Or give recorded tensors: a .npz, a .safetensors or a folder of .pb."
)

_REPORTS = {".html": comparison_page.page, ".md": comparisons.markdown_of, ".json": comparisons.text_of}


def compare(
    a: Annotated[str, typer.Option("--a", metavar="SIDE", help=_SIDE, show_default=False)],
    b: Annotated[
        str, typer.Option("--b", metavar="SIDE", help="The other gradient, written like --a.", show_default=False)
    ],
    model: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL", help="An .onnx file. Leave it out if you give --case.", show_default=False),
        Files.MODEL,
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A case of the conformance suite, instead of MODEL. `refgrad conformance cases` lists them. --opset, "
            "--dtype, --values and --source need --case.",
        ),
    ] = None,
    opset: suite.Opset = "newest",
    dtype: suite.Dtype = None,
    values: suite.Values = None,
    source: suite.From = None,
    feeds: Feeds = None,
    wrt: Wrt = None,
    outputs: Outputs = None,
    cotangent: Annotated[
        str | None,
        choice(
            COTANGENTS,
            help="The cotangent of each output.",
            show_default="random. With a recording: its cotangents, or ones if it has none",
        ),
    ] = None,
    seed: Seed = 0,
    dim: Dim = None,
    search: Annotated[bool, typer.Option(help="Look for the nodes at fault.")] = True,
    output: Reports = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Compare two gradients of MODEL, and find the node at fault. Gives a verdict for every tensor.

    To prove that an executor computes a node wrongly, the command gives the node the right values, and shows how far the
    error falls.

    With --case, it compares the gradients of a case of the conformance suite.

    The exit code is 0 if both sides are right in every tensor, or follow a convention at a kink, a point without a derivative.
    Otherwise it is 1. If --max-seconds stops the search, the command prints the results so far. If none of them is wrong, the
    exit code is 2.
    """
    require_reports(output or ())
    recordings = [(Files.READ, Path(side)) for side in (a, b) if Path(side).is_file()]
    refuse_overwriting([*recordings, *((Files.WRITTEN, path) for path in output or ())])
    size, sizes = sizes_of(dim)
    if (model is None) == (case is None):
        raise OptionError("Give either MODEL, an .onnx file, or --case, the name of a case of the conformance suite.")
    case_options = {"--opset": opset != "newest", "--dtype": dtype, "--values": values, "--source": source}
    if meaningless := [option for option, value in case_options.items() if value and model is not None]:
        raise OptionError(
            f"{meaningless[0]} needs --case, and you give MODEL. Leave {meaningless[0]} out: MODEL is compared as it is."
        )
    dtypes, kinds = suite.dtypes_of(dtype), suite.kinds_of(values)
    with Bar("making the case" if case else "comparing") as bar:
        suite_case = None if case is None else suite.one_case(case, source, feeds, seed, opset, dtypes, kinds)
        arrays: dict[str, Any] | None
        if suite_case is not None:
            proto, arrays = suite_case.model, dict(suite_case.feeds)
        else:
            proto = load_model(cast(Path, model))
            arrays = None if feeds is None else read_feeds(feeds, inputs_of(proto))
        # A case without a recording has the same cotangents as in a run of the suite.
        default_cotangent = "" if suite_case is None or recordings else ask(suite_case, seed).cotangents
        comparison = comparing.compare(
            proto,
            a,
            b,
            arrays,
            wrt=names(wrt) or (suite_case.wrt if suite_case else None),
            outputs=names(outputs) or (suite_case.outputs if suite_case else None),
            cotangent=cotangent or default_cotangent,
            seed=seed,
            size=size,
            sizes=sizes,
            search=search,
            progress=lambda what, done, total: bar(done, total, what),
        )
    if output:
        options = {"--feeds": feeds, "--seed": seed or None, "--dim": dim, "--wrt": wrt, "--outputs": outputs}
        asked = ModelCommand.of(model, options | {"--import": plugins.named()}, {}) if model else None
        write_reports(output, _REPORTS, comparison, after_comparison(comparison, asked, (a, b)) if asked else [])
    if as_json:
        print_json(comparisons.document(comparison))
    else:
        comparisons.show(comparison, stdout(), verbose)
        for path in output or ():
            say(f"{path}: written")
    if comparison.stopped == INTERRUPTED:
        raise KeyboardInterrupt
    if comparison.stopped and not comparison.is_different:
        raise typer.Exit(REFUSED)
    raise typer.Exit(AGREES if comparison.ok else DISAGREES)


def nan(
    model: Model,
    feeds: Feeds = None,
    backend: Backend = "numpy",
    wrt: Wrt = None,
    outputs: Outputs = None,
    forward: Annotated[bool, typer.Option("--forward", help="Look at the outputs only, not at the gradients.")] = False,
    seed: Seed = 0,
    dim: Dim = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Find the nodes at which NaN and infinities begin. Names the element, its operands and a remedy for each.

    The command looks in the outputs and in the gradients of MODEL.

    The exit code is 1 if the run makes a NaN or an infinity. Those in the inputs or the weights do not count. If --max-seconds
    stops the command, it prints what it has found, and says what it has not tried.
    """
    size, sizes = sizes_of(dim)
    proto = load_model(model)
    arrays = None if feeds is None else read_feeds(feeds, inputs_of(proto))
    with Bar("looking for NaN and infinities") as bar:
        origins = nonfinite(
            proto,
            arrays,
            executor=backend,
            wrt=names(wrt),
            outputs=names(outputs),
            forward=forward,
            seed=seed,
            size=size,
            sizes=sizes,
            progress=lambda what, done, total: bar(done, total, what),
        )
    if as_json:
        print_json(comparisons.document_of_origins(origins))
    else:
        comparisons.show_origins(origins, stdout(), verbose)
    if origins.stopped == INTERRUPTED:
        raise KeyboardInterrupt
    if origins.stopped and origins.ok:
        raise typer.Exit(REFUSED)
    raise typer.Exit(AGREES if origins.ok else DISAGREES)


def reduce(
    model: Model,
    side: Annotated[
        str,
        typer.Option(
            "--side",
            metavar="SIDE",
            help="The gradient that is wrong: builder@executor, as for `compare`.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="DIR", help="The folder to make. It must not exist yet.", show_default=False
        ),
        Files.NEW_FOLDER,
    ],
    feeds: Feeds = None,
    seed: Seed = 0,
    dim: Dim = None,
    as_json: Json = False,
) -> None:
    """Reduce a wrong gradient to the smallest model that shows it. Writes it as a test and a bug report.

    If the command is interrupted, or --max-seconds stops it, it writes the smallest model so far.
    """
    from refgrad.conformance.locating import reducing  # no other command needs it

    failing_side = side_of(side)
    if output.exists():
        raise OutputFileError(f"{str(output)!r} exists. Give a folder that does not exist: nothing is overwritten.")
    if not isinstance(failing_side, Live):
        raise OptionError(f"--side {side!r} is a recording, which cannot be run. Give builder@executor.")
    size, sizes = sizes_of(dim)
    proto = load_model(model)
    inputs = inputs_of(proto)
    arrays = _drawn(proto, seed, size, sizes) if feeds is None else read_feeds(feeds, inputs)
    with Bar() as bar:
        reduced = reducing.reduce(
            proto, failing_side, arrays, seed=seed, progress=lambda what, done, total: bar(done, total, what)
        )
    reducing.write(reduced, output)
    failure = reduced.failure
    if as_json:
        print_json(
            {
                "output": str(output),
                "kind": failure.kind,
                "how": failure.how,
                "operators": list(failure.operators),
                "original": list(failure.nodes),
                "message": failure.message,
                "tried": reduced.tried,
                "stopped": reduced.stopped,
                "exit_code": reduced.exit_code,
                "versions": dict(reduced.versions),
            }
        )
    else:
        say_lines(reducing.report(reduced, printable))
        say(f"{output}: written. {reducing.how_it_shows(reduced)}")
    if reduced.stopped == INTERRUPTED:
        say(f"refgrad: Interrupted. {output} has the smallest model that was reached.", file=sys.stderr)
        raise ToldInterruption


def record(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function that returns (module, inputs): a torch.nn.Module, and its inputs by name or in order.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="The .npz file to write.", show_default=False),
        Files.WRITTEN,
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="FILE",
            help="The .onnx file that was exported from the module. Inputs and outputs are recorded under its names.",
        ),
        Files.MODEL,
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Record the gradients of a torch module, for `compare`. Also writes its parameters, inputs, outputs and cotangents."""
    from refgrad.conformance.locating.recording_torch import recorded_by  # no other command needs it

    if ":" not in function:
        raise OptionError(f"{function!r} has no colon. Give MODULE:FUNCTION, such as mine:make for make() of mine.py.")
    proto = None if model is None else load_model(model)
    make_module = imported(function)
    if not callable(make_module):
        raise OptionError(f"{function!r} is {of_type(make_module)}. Give a function that returns (module, inputs).")
    with Bar("recording"):
        tensors = recorded_by(make_module, proto, seed)
    with replacing(output) as file:
        write_arrays(file, tensors)
    gradients = [name for name in tensors if name.endswith("_grad")]
    if as_json:
        print_json({"output": str(output), "tensors": len(tensors), "gradients": gradients})
    else:
        say(f"{output}: {counted(len(tensors), 'tensor')}, {len(gradients)} of them gradients or cotangents")


def _drawn(model: ModelProto, seed: int, size: int, sizes: Mapping[str, int] | None) -> dict[str, Any]:
    """Random feeds with which the interpreter runs the model, or any if it does not run it at all."""
    try:
        run = NumpyBackend().prepare(model).run
        found = fitting_feeds(
            model, run, lambda got: all(map(is_finite, got.values())), seed=seed, size=size, sizes=sizes
        )
    except RefgradError:
        return dict(random_feeds(inputs_of(model), seed=seed, size=size, sizes=sizes))
    return found.feeds
