"""The commands that list and show: operators, executors, rules, models."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import refgrad
from refgrad.backends import backends, get_backend
from refgrad.cli.commands import choice
from refgrad.cli.options import Json, Model, Outputs, Quantization, Verbose, Wrt, names, sizes_of
from refgrad.cli.output import AGREES, REFUSED, Files, print_json, print_names, print_table, say, say_lines
from refgrad.cli.spelling import in_the_shell
from refgrad.errors import OptionError
from refgrad.model.roles import KINDS
from refgrad.model.writing import replacing
from refgrad.parameters.states import read_state_dict
from refgrad.planning.cost import RUNTIMES
from refgrad.planning.program import ANY
from refgrad.show.explain import explain as explanation
from refgrad.tables.operators import operators

_FLAGS = {name: f"--{name}" for name in ("wrt", "outputs", "quantization")}
_NODES = 3  # of an operator that is refused, and tensors of a weight, in a summary


def preflight(
    model: Model,
    wrt: Wrt = None,
    outputs: Outputs = None,
    quantization: Quantization = "zero",
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """List the operators of MODEL, and how each is differentiated.

    Each has a rule, a derivative of zero, or a reason for refusal. Below the table are notices about gradients that are right
    but useless, with a remedy. Some are 0 for every input. Rounding blocks others, except for what flows
    through the scales of a quantization.

    The exit code is 2 if an operator is refused.
    """
    report = refgrad.preflight(model, names(wrt), names(outputs), quantization=quantization)
    if as_json:
        print_json({"ok": report.ok, **asdict(report)})
    else:
        print_table(report.table(None if verbose else _NODES), verbose, least=len(report.refused))
        for useless in (*report.zeros, *report.leaks):
            say(in_the_shell(str(useless), _FLAGS))
    raise typer.Exit(AGREES if report.ok else REFUSED)


def weights(
    model: Model,
    state_dict: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The state_dict of the module that MODEL was exported from: a .npz or .safetensors file.",
            show_default=False,
        ),
        Files.READ,
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """List the initializers of MODEL, and what each is for.

    Each is a parameter, a running statistic, a mask, a scalar, a shape or another constant. With --state-dict, the list also
    says where each initializer comes from: it names the tensors of the file, and says how they were changed.
    """
    found = refgrad.weights(model, None if state_dict is None else read_state_dict(state_dict))
    rows = found.table(None if verbose or as_json else _NODES)
    if as_json:
        listed = [
            row | ({"made of": list(found[str(row["initializer"])].names)} if "made of" in row else {}) for row in rows
        ]
        print_json({"trainable": found.trainable, "missing": found.missing, "initializers": listed})
        return
    if state_dict is None:
        rows = [{key: row[key] for key in ("initializer", "kind", "type", "read by")} for row in rows]
    print_table(sorted(rows, key=lambda row: list(KINDS).index(row["kind"])), verbose)
    counts = Counter(weight.kind for weight in found.values())
    say("By kind:", ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]) or "no initializers")
    if found.missing:
        print_names("Tensors of the state_dict that no initializer is made from:", found.missing, verbose)


def list_backends(as_json: Json = False) -> None:
    """List the executors, and why one is not available."""
    rows = [
        {
            "backend": name,
            "available": reason is None,
            "what": get_backend(name).description() if reason is None else reason,
        }
        for name, reason in backends().items()
    ]
    if as_json:
        print_json(rows)
    else:
        print_table(rows)


def explain(
    operator: Annotated[
        str,
        typer.Argument(
            metavar="OPERATOR",
            help="An operator, such as Mul. With a domain: ai.onnx.ml.Scaler.",
            show_default=False,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Print the derivative of an operator, as a formula. Also its inputs, and the value at points without a derivative."""
    found = explanation(operator)
    if as_json:
        print_json(asdict(found))
    else:
        say_lines(found)


def ops(as_json: Json = False) -> None:
    """List every operator of ONNX, and its derivative.

    Each has a rule, a function body, a derivative of zero, or a reason why it has none.
    """
    if as_json:
        print_json([asdict(operator) for operator in operators()])
    else:
        print_table(
            {"operator": o.operator, "derivative": o.derivative, "formula, body or reason": o.text} for o in operators()
        )


def show(
    model: Model,
    text: Annotated[bool, typer.Option("--text", help="Print an indented listing, the default.")] = False,
    dot: Annotated[bool, typer.Option("--dot", help="Print the DOT language of Graphviz.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Print SVG, a picture for browsers.")] = False,
    cost: Annotated[
        bool,
        typer.Option(
            "--cost",
            help="Print what a run costs: operations, bytes read and written, and the peak of memory. Nothing is run.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write to this file instead of printing.", show_default=False
        ),
        Files.WRITTEN,
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZES",
            help="For --cost: N=8 for the dimension N, x[0]=8 for the first axis of x, or 8 for all dimensions without a size.",
        ),
    ] = None,
    runtime: Annotated[str, choice(RUNTIMES, help="For --cost: the runtime whose memory is predicted.")] = "numpy",
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Print MODEL as a listing or a picture, or print its cost. Shows its inputs, initializers, nodes and outputs.

    With --cost, print what a run of it costs instead, the most expensive nodes first.
    """
    if text + dot + svg + cost > 1:
        raise OptionError("--text, --dot, --svg and --cost exclude each other: give one.")
    if cost:
        _show_cost(model, dim, runtime, output, verbose, as_json)
        return
    if dim:
        raise OptionError("--dim is for --cost: a listing shows the sizes that the model declares.")
    writer = refgrad.to_svg if svg else refgrad.to_dot if dot else refgrad.onnx_simple_text_plot
    shown = writer(model)
    if output is not None:
        with replacing(output) as file:
            file.write_text(f"{shown}\n", encoding="utf-8")
    if as_json:
        print_json({"format": "svg" if svg else "dot" if dot else "text", "shown": shown})
    elif output is None:
        say_lines(shown)


def _show_cost(
    model: Path, dim: list[str] | None, runtime: str, output: Path | None, verbose: bool, as_json: bool
) -> None:
    """Print the cost of a model as a table, or as JSON; or write it as JSON to a file."""
    size, sizes = sizes_of(dim, default=None)
    found = refgrad.cost(model, sizes if size is None else {**sizes, ANY: size}, runtime=runtime)
    document = {**asdict(found), "flops": found.flops, "read": found.read, "written": found.written}
    if output is not None:
        with replacing(output) as file:
            file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(document)
    elif output is None:
        rows = sorted(zip(found.nodes, found.table(), strict=True), key=lambda pair: -pair[0].flops)
        print_table([row for _, row in rows], verbose)
        for what, text in found.sums().items():
            say(f"{what}: {text}")
