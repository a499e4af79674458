"""The `refgrad` command. Exit codes: 0 agreed or done, 1 disagreed, 2 wrong use or refused."""

from __future__ import annotations

import io
import json
import math
import re
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from onnx import ModelProto
from onnx.external_data_helper import load_external_data_for_model
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

import refgrad
from refgrad import recipes
from refgrad.backends import available, backends, get_backend
from refgrad.backends.base import load_model
from refgrad.backends.numpy.backend import NumpyModel
from refgrad.cli import conformance
from refgrad.conformance.judging.check import Check, Row
from refgrad.conformance.judging.check import check as run_check
from refgrad.conformance.oracles.comparison import AGREED
from refgrad.conformance.oracles.differences import NAME as DIFFERENCES
from refgrad.conformance.questions.feeds import SIZE, random_feeds, read_feeds, write_arrays
from refgrad.conformance.questions.point import inputs_of
from refgrad.errors import OptionError, RefgradError
from refgrad.protos.files import replacing, save_gradient, spare
from refgrad.show import demo as notebook
from refgrad.show.explain import explain as explanation
from refgrad.tables.operators import operators

AGREES, DISAGREES, REFUSED, INTERRUPTED = 0, 1, 2, 130
_WIDTH = 160  # of a table that no terminal shows

app = typer.Typer(
    help="Reverse-mode differentiation of ONNX models: a model goes in, a model of its gradient comes out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(conformance.app, name="conformance")

recipe = typer.Typer(
    help="Write what a gradient is wanted for as a model: a saliency map, an adversarial input, forces, a ranking of weights.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(recipe, name="recipe")

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.", show_default=False)]
Wrt = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help="Names of inputs and initializers, separated by commas, or the option repeated; \\, is a comma inside a name. "
        "Default: every float input and every float initializer.",
    ),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option(metavar="NAMES", help="Names of outputs to differentiate, as for --wrt. Default: every float output."),
]
Feeds = Annotated[
    Path | None, typer.Option(help="Inputs by name, a .npz file. Default: random ones of the declared types.")
]
Dim = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZES",
        help=f"Sizes for random feeds: N=8 for the dimension N, 8 for every undeclared one. Default: {SIZE}.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Of everything random.")]
Quantization = Annotated[str, typer.Option(help="The derivative of quantization: zero, straight-through, clipped.")]
Keep = Annotated[bool, typer.Option("--keep-outputs", help="Also return the model's outputs.")]
Kinks = Annotated[
    str, typer.Option(help="Whose choice where a derivative does not exist: refgrad, torch, onnxruntime.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Result = Annotated[Path, typer.Option("--output", "-o", help="Where the result is written.", show_default=False)]
Of = Annotated[
    str | None,
    typer.Option(
        metavar="SELECTION",
        help="What is differentiated: an output, or the sum of some elements of one, as NumPy has them: 'logits[3]', "
        "'logits[:, 3]'. A name for an index, 'logits[:, target]', is an integer input. Default: the only float output.",
    ),
]
Input = Annotated[
    str | None, typer.Option("--wrt", metavar="NAME", help="The input, by name. Default: the only float one.")
]
Score = Annotated[
    str | None,
    typer.Option(
        help="Make the loss of the output and an input label: cross_entropy, squared_error, absolute_error, elastic, log. "
        "Default: the output is the loss."
    ),
]


@app.command()
def grad(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the gradient is written.", show_default=False)],
    wrt: Wrt = None,
    outputs: Outputs = None,
    of: Of = None,
    dialect: Annotated[
        str, typer.Option(help="onnx: ai.onnx operators only. ort: ONNX Runtime's training operators.")
    ] = "onnx",
    cotangent: Annotated[
        str | None,
        typer.Option(
            help="input: graph inputs <output>_grad. ones: 1 everywhere. yield: YieldOp (dialect ort). "
            "Default: input; ones with --of."
        ),
    ] = None,
    keep_outputs: Keep = False,
    kinks: Kinks = "refgrad",
    quantization: Quantization = "zero",
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="Compute the values of the forward pass again in segments instead of keeping them: less memory.",
        ),
    ] = False,
    recompute_nodes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Only those of these nodes, as for --wrt: names or patterns like '/layers.3/*', a segment each.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the gradient of MODEL as another ONNX model.

    External data is referenced where the gradient lies in the folder of MODEL, else copied beside it as <OUTPUT>.data.
    """
    if recompute and recompute_nodes:
        raise OptionError("--recompute and --recompute-nodes exclude each other: give one.")
    source: Path | ModelProto = model
    targets = _names(outputs)
    if of is not None:
        if targets is not None:
            raise OptionError("--of and --outputs exclude each other: --of names the output itself.")
        source = selected = recipes.select(model, of)
        targets = [selected.graph.output[0].name]
    made = refgrad.gradient(
        source,
        _names(wrt),
        targets,
        dialect=dialect,
        cotangent=cotangent or ("input" if of is None else "ones"),
        keep_outputs=keep_outputs,
        kinks=kinks,
        quantization=quantization,
        recompute=_names(recompute_nodes) or recompute,
    )
    _save(made, output, model, as_json, ("inputs", "outputs"))


def _save(made: ModelProto, output: Path, model: Path, as_json: bool, ends: Sequence[str]) -> None:
    """Write what was made of `model`, and say what it is: the names of `ends`, which are "inputs", "outputs" or both."""
    names = {"inputs": made.graph.input, "outputs": made.graph.output}
    listed = {end: [value.name for value in names[end]] for end in ends}
    data = save_gradient(made, output, model)
    if as_json:
        data_file = None if data is None else str(data)
        _print_json({"output": str(output), "nodes": len(made.graph.node), **listed, "data": data_file})
        return
    print(f"{output}: {len(made.graph.node)} nodes" + (f", its weights in {data}" if data else ""))
    for end, values in listed.items():
        print(f"{end:7} {', '.join(values)}")


@app.command()
def jvp(
    model: Model,
    output: Result,
    wrt: Wrt = None,
    outputs: Outputs = None,
    keep_outputs: Keep = False,
    kinks: Kinks = "refgrad",
    quantization: Quantization = "zero",
    as_json: Json = False,
) -> None:
    """Write how the outputs of MODEL move when its inputs do. Inputs NAME_tangent go in, outputs NAME_tangent come out."""
    made = refgrad.jvp(
        model, _names(wrt), _names(outputs), keep_outputs=keep_outputs, kinks=kinks, quantization=quantization
    )
    _save(made, output, model, as_json, ("inputs", "outputs"))


@app.command()
def hvp(
    model: Model,
    output: Result,
    wrt: Wrt = None,
    of: Of = None,
    keep_outputs: Keep = False,
    kinks: Kinks = "refgrad",
    quantization: Quantization = "zero",
    as_json: Json = False,
) -> None:
    """Write the Hessian of an output of MODEL times a vector. Inputs NAME_vector go in, outputs NAME_hvp come out."""
    source, target = _selected(model, of)
    made = refgrad.hvp(source, _names(wrt), target, keep_outputs=keep_outputs, kinks=kinks, quantization=quantization)
    _save(made, output, model, as_json, ("inputs", "outputs"))


@app.command()
def jacobian(
    model: Model,
    output: Result,
    wrt: Wrt = None,
    outputs: Outputs = None,
    keep_outputs: Keep = False,
    kinks: Kinks = "refgrad",
    quantization: Quantization = "zero",
    as_json: Json = False,
) -> None:
    """Write every derivative of the outputs of MODEL. Outputs OUTPUT_by_NAME have the shapes of both, one after the other."""
    made = refgrad.jacobian(
        model, _names(wrt), _names(outputs), keep_outputs=keep_outputs, kinks=kinks, quantization=quantization
    )
    _save(made, output, model, as_json, ("inputs", "outputs"))


@app.command()
def hessian(
    model: Model,
    output: Result,
    wrt: Wrt = None,
    of: Of = None,
    keep_outputs: Keep = False,
    kinks: Kinks = "refgrad",
    quantization: Quantization = "zero",
    as_json: Json = False,
) -> None:
    """Write every second derivative of an output of MODEL, as outputs OUTPUT_by_NAME_by_NAME."""
    source, target = _selected(model, of)
    made = refgrad.hessian(
        source, _names(wrt), target, keep_outputs=keep_outputs, kinks=kinks, quantization=quantization
    )
    _save(made, output, model, as_json, ("inputs", "outputs"))


def _selected(model: Path, of: str | None) -> tuple[Path | ModelProto, str | None]:
    """The model and its output to differentiate, which is a new one where `of` selects elements."""
    if of is None or "[" not in of:
        return model, of
    source = recipes.select(model, of)
    return source, source.graph.output[0].name


@app.command("lower")
def lower_model(
    model: Model,
    output: Result,
    as_json: Json = False,
) -> None:
    """Write MODEL in ai.onnx operators alone. ONNX Runtime's gradient and training operators become what they compute.

    External data is referenced where the result lies in the folder of MODEL, else copied beside it as <OUTPUT>.data.
    """
    _save(refgrad.lower(model), output, model, as_json, ("outputs",))


@recipe.command("saliency")
def write_saliency(
    model: Model,
    output: Result,
    wrt: Input = None,
    of: Of = None,
    axis: Annotated[
        int | None, typer.Option(help="Take the maximum over this axis of the input: 1 for the channels of an image.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a saliency map: |d of / d input|. Without --of it is that of the largest element of every sample."""
    _save(recipes.saliency(model, wrt, of, axis=axis), output, model, as_json, ("inputs", "outputs"))


@recipe.command("integrated-gradients")
def write_integrated_gradients(
    model: Model,
    output: Result,
    wrt: Input = None,
    of: Of = None,
    steps: Annotated[int, typer.Option(min=1, help="Points on the line, by the midpoint rule.")] = 64,
    as_json: Json = False,
) -> None:
    """Write the integrated gradients. They go from a baseline, an input that is 0 by default, to the input."""
    _save(recipes.integrated_gradients(model, wrt, of, steps=steps), output, model, as_json, ("inputs", "outputs"))


@recipe.command("fgsm")
def write_fgsm(
    model: Model,
    output: Result,
    wrt: Input = None,
    of: Of = None,
    score: Score = None,
    eps: Annotated[float, typer.Option(help="How far every element moves; the default of the input eps.")] = 0.007,
    clip: Annotated[
        tuple[float, float] | None, typer.Option(metavar="LOW HIGH", help="The range of the result, as in 0 1.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an adversarial input. It is input + eps * sign(d loss / d input), the fast gradient sign method."""
    made = recipes.fgsm(model, wrt, of, score=score, eps=eps, clip=clip)
    _save(made, output, model, as_json, ("inputs", "outputs"))


@recipe.command("forces")
def write_forces(model: Model, output: Result, wrt: Input = None, of: Of = None, as_json: Json = False) -> None:
    """Write the forces. They are -d energy / d positions; the outputs of MODEL come after them."""
    _save(recipes.forces(model, wrt, of), output, model, as_json, ("inputs", "outputs"))


@recipe.command("sensitivity")
def rank_weights(
    model: Model,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the model is written.", show_default=False)
    ] = None,
    feeds: Annotated[
        Path | None,
        typer.Option(
            help="Inputs by name, a .npz file: print every weight, the one of most effect first.", show_default=False
        ),
    ] = None,
    of: Of = None,
    score: Score = None,
    as_json: Json = False,
) -> None:
    """Say which weights matter to a loss. Write the model of it, or with --feeds run that and print a ranking.

    norm is the length of the gradient; effect is the mean of |weight * gradient|: how much, to first order, the loss changes
    where one element becomes 0.
    """
    if output is not None and feeds is not None:
        raise OptionError("--output and --feeds exclude each other: one writes the model, the other runs it.")
    made = recipes.sensitivity(model, of, score=score)
    if output is not None:
        _save(made, output, model, as_json, ("inputs", "outputs"))
    elif feeds is not None:
        load_external_data_for_model(made, str(model.parent))
        prepared = get_backend("numpy").prepare(made)
        results = prepared.run(read_feeds(feeds, prepared.inputs))
        rows = [
            {"weight": weight} | {key: float(results[name]) for key, name in names.items()}
            for weight, names in recipes.sensitivities_in(made).items()
        ]
        rows.sort(key=lambda row: row["effect"], reverse=True)
        if as_json:
            _print_json(rows)
        else:
            _print_table(rows)
    else:
        raise OptionError("Give --output to write the model, or --feeds to run it and print the ranking.")


@app.command()
def expand(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the result is written.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Write MODEL with the graph of a derivative in the place of every operator Gradient of ai.onnx.preview.training.

    External data is referenced where the result lies in the folder of MODEL, else copied beside it as <OUTPUT>.data.
    """
    _save(refgrad.expand_gradients(model), output, model, as_json, ("outputs",))


@app.command()
def run(
    model: Model,
    feeds: Feeds = None,
    backend: Annotated[str, typer.Option(help="numpy, ort-cpu, ort-cuda: see refgrad backends.")] = "numpy",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the outputs by name to this .npz file.")
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Every value between as well (backend numpy).")] = False,
    precision: Annotated[
        str | None, typer.Option(help="float64: every float is double (backend numpy). Default: the model's types.")
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Refuse what would hold more at once (backend numpy): bytes, or 500M, 8G."),
    ] = None,
    seed: Seed = 0,
    dim: Dim = None,
    as_json: Json = False,
) -> None:
    """Run MODEL and print what comes out."""
    options = {"precision": precision, "max_memory": None if max_memory is None else _bytes(max_memory)}
    prepared = get_backend(backend).prepare(
        model, **{key: given for key, given in options.items() if given is not None}
    )
    size, sizes = _sizes(dim)
    # In another precision the file still has the types that the model declares.
    declared = prepared.inputs if precision is None else inputs_of(load_model(model, external_data=False))
    given = (
        read_feeds(feeds, declared)
        if feeds is not None
        else random_feeds(prepared.inputs, seed=seed, size=size, sizes=sizes)
    )
    if isinstance(prepared, NumpyModel):
        with _Bar() as bar:
            results = prepared.run(given, trace=trace, progress=bar)
    elif trace:
        raise OptionError(f"Backend {backend!r} does not give the values between. Run it with --backend numpy.")
    else:
        results = prepared.run(given)
    if output is not None:
        with replacing(output) as file:
            write_arrays(file, results)
    rows = [_statistics(name, value) for name, value in results.items()]
    if as_json:
        _print_json({"backend": backend, "feeds": "random" if feeds is None else str(feeds), "outputs": rows})
        return
    _print_table(rows)


@app.command()
def check(
    model: Model,
    feeds: Feeds = None,
    backends: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="Names separated by commas. Default: every available one."),
    ] = None,
    wrt: Wrt = None,
    outputs: Outputs = None,
    seed: Seed = 0,
    dim: Dim = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Relative error that needs no explanation. Default: by the type and the number of nodes."),
    ] = None,
    directions: Annotated[
        int, typer.Option(min=1, help="Random directions of the differences, for each gradient.")
    ] = 2,
    random_weights: Annotated[
        int | None, typer.Option(min=0, help="A seed: weights that are constant fills become random numbers first.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say whether the gradient of MODEL is right. Both dialects on every backend, against differences and against float64.

    Exit code 1 where something disagrees. Not supported, a kink, inconclusive, or ONNX Runtime's own builder being wrong is no
    disagreement.
    """
    size, sizes = _sizes(dim)
    given = None if feeds is None else read_feeds(feeds, inputs_of(load_model(model, external_data=False)))
    found = run_check(
        model,
        given,
        wrt=_names(wrt),
        outputs=_names(outputs),
        backends=_names(backends),
        seed=seed,
        size=size,
        sizes=sizes,
        directions=directions,
        tolerance=tolerance,
        random_weights=random_weights,
    )
    _report(found, as_json)


@app.command()
def preflight(
    model: Model,
    wrt: Wrt = None,
    outputs: Outputs = None,
    quantization: Quantization = "zero",
    as_json: Json = False,
) -> None:
    """List the operators on the path. Each has its rule, a zero derivative, or why it is refused (exit code 2)."""
    report = refgrad.preflight(model, _names(wrt), _names(outputs), quantization=quantization)
    if as_json:
        _print_json({"ok": report.ok, **asdict(report)})
    else:
        words = {"rule": "rule", "zero": "zero", "none": "refused: no derivative", "missing": "refused: no rule"}
        _print_table(
            {
                "operator": row.operator,
                "nodes": len(row.nodes),
                "derivative": words[row.verdict],
                "formula or reason": row.reason,
                "": ", ".join(row.nodes[:3]) + (", ..." if len(row.nodes) > 3 else "") if row in report.refused else "",
            }
            for row in report.rows
        )
    raise typer.Exit(AGREES if report.ok else REFUSED)


@app.command("backends")
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
        _print_json(rows)
    else:
        _print_table(rows)


@app.command()
def explain(
    operator: Annotated[
        str,
        typer.Argument(metavar="OPERATOR", help="Mul, or with another domain ai.onnx.ml.Scaler.", show_default=False),
    ],
    as_json: Json = False,
) -> None:
    """Print the rule of an operator. Its formula, its inputs, and what is chosen where no derivative exists."""
    found = explanation(operator)
    if as_json:
        _print_json(asdict(found))
    else:
        print(found)


@app.command()
def ops(as_json: Json = False) -> None:
    """List every operator of ONNX. Its rule, its function body, a derivative of zero, or why there is none."""
    if as_json:
        _print_json([asdict(operator) for operator in operators()])
    else:
        _print_table(
            {"operator": o.operator, "derivative": o.derivative, "formula, body or reason": o.text} for o in operators()
        )


@app.command()
def show(
    model: Model,
    text: Annotated[bool, typer.Option("--text", help="An indented listing. This is the default.")] = False,
    dot: Annotated[bool, typer.Option("--dot", help="The DOT language of Graphviz.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="SVG, by Graphviz's program dot.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file. Default: print it.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Print MODEL. Its inputs, initializers, nodes and outputs as a listing or a picture."""
    if text + dot + svg > 1:
        raise OptionError("--text, --dot and --svg exclude each other: give one.")
    writer = refgrad.to_svg if svg else refgrad.to_dot if dot else refgrad.onnx_simple_text_plot
    shown = writer(model)
    if output is not None:
        spare(model, output)
        with replacing(output) as file:
            file.write_text(f"{shown}\n", encoding="utf-8")
    if as_json:
        _print_json({"format": "svg" if svg else "dot" if dot else "text", "shown": shown})
    elif output is None:
        print(shown)


@app.command("demo")
def show_demo(as_json: Json = False) -> None:
    """Show the gradient of a small regression. Both graphs as text, the numbers, and the cross-check."""
    model = notebook.regression()
    gradient = refgrad.gradient(model, outputs=["loss"], cotangent="ones", keep_outputs=True)
    listings = [refgrad.onnx_simple_text_plot(graph) for graph in (model, gradient)]
    numbers = {name: get_backend(name).prepare(gradient).run(notebook.feeds()) for name in available()}
    found = run_check(model, notebook.feeds(), outputs=["loss"])
    if as_json:
        rows = {name: {k: v.tolist() for k, v in results.items()} for name, results in numbers.items()}
        _print_json({"model": listings[0], "gradient": listings[1], "results": rows, "check": _as_dict(found)})
        raise typer.Exit(AGREES if found.ok else DISAGREES)
    print(f"The model, a regression with its loss:\n\n{listings[0]}\n")
    print(f"The gradient of its loss, another ONNX model:\n\n{listings[1]}\n")
    for name, results in numbers.items():
        print(f"On {name} ({get_backend(name).description()}):\n")
        for key, value in results.items():
            print(f"    {key} = {np.array2string(value, prefix='    ' + key + ' = ')}")
        print()
    print("Is it right?\n")
    _report(found, as_json=False)


# What the options mean


def _names(given: Sequence[str] | None) -> list[str] | None:
    """`--wrt a,b --wrt c` is a, b, c; a comma that belongs to a name is written with a backslash before it."""
    if not given:
        return None
    parts = [part for value in given for part in re.split(r"(?<!\\),", value)]
    return [part.replace("\\,", ",").strip() for part in parts if part.strip()]


def _sizes(given: Sequence[str] | None) -> tuple[int, dict[str, int]]:
    """`--dim N=8 --dim 3`: 8 elements along N, 3 along every other dimension that is not declared."""
    size, sizes = SIZE, {}
    for part in _names(given) or ():
        symbol, separator, number = part.rpartition("=")
        if not number.isdecimal():
            raise OptionError(f"--dim {part}: give a size, as in --dim 8, or one for a symbol, as in --dim N=8.")
        if separator:
            sizes[symbol] = int(number)
        else:
            size = int(number)
    return size, sizes


# What is printed


def _report(found: Check, as_json: bool) -> None:
    if as_json:
        _print_json(_as_dict(found))
        raise typer.Exit(AGREES if found.ok else DISAGREES)
    _print_table(
        {
            "gradient of": row.gradient,
            "dialect": row.dialect,
            "backend": row.backend,
            "against": row.oracle,
            "absolute": row.absolute,
            "relative": row.relative,
            "explained": row.allowed,
            "verdict": row.verdict,
        }
        for row in found.rows
    )
    notes: dict[tuple[str, str], list[Row]] = {}
    for row in found.rows:
        if row.note:
            notes.setdefault((row.verdict, row.note), []).append(row)
    for (verdict, note), rows in notes.items():
        names = ", ".join(dict.fromkeys(row.gradient for row in rows))
        witnesses = ", ".join(dict.fromkeys(f"{row.dialect} on {row.backend}" for row in rows))
        print(f"{verdict} ({names}; {witnesses}): {note}")
    counts = [row.verdict for row in found.rows]
    told = ", ".join(f"{counts.count(verdict)} {verdict}" for verdict in dict.fromkeys(counts))
    settled = {
        row.gradient
        for row in found.rows
        if row.oracle == DIFFERENCES and row.verdict == AGREED and (row.allowed or 0) < 1
    }
    print(f"{'ok' if found.ok else 'DISAGREED'}: {told}. Feeds: {found.feeds}; seed {found.seed}.")
    unsettled = [name for name in found.wrt if name not in settled]
    if found.ok and unsettled:
        print(f"Differences settled nothing for {', '.join(unsettled)}: give other --feeds, or --random-weights.")
    raise typer.Exit(AGREES if found.ok else DISAGREES)


def _as_dict(found: Check) -> dict[str, Any]:
    return {"ok": found.ok, **asdict(found)}


class _Bar:
    """Progress on stderr, from the first second on, where stderr is a terminal."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._progress: Progress | None = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, done: int, total: int, label: str) -> None:
        """Show that `done` of `total` nodes are computed and that `label` is next."""
        if self._progress is None:
            if not sys.stderr.isatty() or time.monotonic() - self._start < 1:
                return
            columns = (*Progress.get_default_columns(), TextColumn("{task.fields[label]}", markup=False))
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
            self._progress.add_task("nodes", total=total, label=label)
        self._progress.update(self._progress.task_ids[0], completed=done, label=label)


def _bytes(size: str) -> int:
    """`size` in bytes: a number, or one with K, M or G behind it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:i?B)?", size, re.IGNORECASE)
    if found is None:
        raise OptionError(f"--max-memory {size} is no size. Give a number of bytes, or one like 500M or 8G.")
    return int(float(found[1]) * 1024 ** " KMG".index(found[2].upper() or " "))


def _statistics(name: str, value: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "dtype": type(value).__name__, "shape": None}
    row |= dict.fromkeys(("min", "mean", "max", "norm"))
    if not isinstance(value, np.ndarray):
        return row
    row |= {"dtype": value.dtype.name, "shape": list(value.shape)}
    if value.size and value.dtype.kind not in "OUSc":
        wide = value.astype(np.float64)
        with np.errstate(all="ignore"):
            row |= {
                "min": float(wide.min()),
                "mean": float(wide.mean()),
                "max": float(wide.max()),
                "norm": float(np.linalg.norm(wide)),
            }
    return row


def _print_json(value: Any) -> None:
    print(json.dumps(_finite(value), indent=2))


def _finite(value: Any) -> Any:
    """JSON has no infinities and no NaN: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _print_table(rows: Iterable[Mapping[str, Any]]) -> None:
    console = Console(markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    table = Table(box=None, pad_edge=False)
    for position, row in enumerate(rows):
        if not position:
            for name, value in row.items():
                number = isinstance(value, float | int)
                table.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number)
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3g}"
        case _:
            return str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code. Whatever goes wrong is one message on stderr."""
    if arguments is None:
        # Output that nobody reads any more ends the process quietly; being terminated leaves no temporary files behind.
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        # Formulas are not ASCII; where the terminal's encoding has no such character, it shows a question mark.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        app(arguments, prog_name="refgrad")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else AGREES
    except KeyboardInterrupt:
        return INTERRUPTED
    except RefgradError as error:
        print(f"refgrad: {error}", file=sys.stderr)
    except Exception as error:  # a bug of ours or a failure of the system: no traceback, but all that is known
        print(f"refgrad: unexpected {type(error).__name__}: {error}", file=sys.stderr)
    return REFUSED
