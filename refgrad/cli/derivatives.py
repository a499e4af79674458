"""The commands that write a derivative of a model, and those that write operators of a model as other operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from onnx import ModelProto

import refgrad
from refgrad import recipes
from refgrad.cli.options import Json, Keep, Kinks, Model, Of, Outputs, Quantization, Result, Verbose, Wrt, names
from refgrad.cli.output import save
from refgrad.errors import OptionError

Command: TypeAlias = Callable[..., None]


def grad(
    model: Model,
    output: Result,
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
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Write the gradient of MODEL as another ONNX model.

    External data is referenced where the gradient lies in the folder of MODEL, else copied beside it as <OUTPUT>.data.
    """
    if recompute and recompute_nodes:
        raise OptionError("--recompute and --recompute-nodes exclude each other: give one.")
    source: Path | ModelProto = model
    targets = names(outputs)
    if of is not None:
        if targets is not None:
            raise OptionError("--of and --outputs exclude each other: --of names the output itself.")
        source = selected = recipes.select(model, of)
        targets = [selected.graph.output[0].name]
    made = refgrad.gradient(
        source,
        names(wrt),
        targets,
        dialect=dialect,
        cotangent=cotangent or ("input" if of is None else "ones"),
        keep_outputs=keep_outputs,
        kinks=kinks,
        quantization=quantization,
        recompute=names(recompute_nodes) or recompute,
    )
    save(made, output, model, as_json, verbose)


def _of_outputs(derivative: Callable[..., ModelProto], text: str) -> Command:
    """Return the command that writes this derivative of all outputs, or of some."""

    def command(
        model: Model,
        output: Result,
        wrt: Wrt = None,
        outputs: Outputs = None,
        keep_outputs: Keep = False,
        kinks: Kinks = "refgrad",
        quantization: Quantization = "zero",
        verbose: Verbose = False,
        as_json: Json = False,
    ) -> None:
        made = derivative(
            model, names(wrt), names(outputs), keep_outputs=keep_outputs, kinks=kinks, quantization=quantization
        )
        save(made, output, model, as_json, verbose)

    command.__doc__ = text
    return command


def _of_one_output(derivative: Callable[..., ModelProto], text: str) -> Command:
    """Return the command that writes this derivative of one output, or of elements of it."""

    def command(
        model: Model,
        output: Result,
        wrt: Wrt = None,
        of: Of = None,
        keep_outputs: Keep = False,
        kinks: Kinks = "refgrad",
        quantization: Quantization = "zero",
        verbose: Verbose = False,
        as_json: Json = False,
    ) -> None:
        source: Path | ModelProto = model
        target = of
        if of is not None and "[" in of:
            source = selected = recipes.select(model, of)
            target = selected.graph.output[0].name
        made = derivative(source, names(wrt), target, keep_outputs=keep_outputs, kinks=kinks, quantization=quantization)
        save(made, output, model, as_json, verbose)

    command.__doc__ = text
    return command


def _rewritten(rewrite: Callable[..., ModelProto], text: str) -> Command:
    """Return the command that writes a model with some of its operators as other operators."""

    def command(model: Model, output: Result, verbose: Verbose = False, as_json: Json = False) -> None:
        save(rewrite(model), output, model, as_json, verbose, ends=("outputs",))

    command.__doc__ = f"{text}\n\n{_DATA}"
    return command


_DATA = (
    "External data is referenced where the result lies in the folder of MODEL, else copied beside it as <OUTPUT>.data."
)

jvp = _of_outputs(
    refgrad.jvp,
    "Write how the outputs of MODEL move when its inputs do. Inputs NAME_tangent go in, outputs NAME_tangent come out.",
)
hvp = _of_one_output(
    refgrad.hvp,
    "Write the Hessian of an output of MODEL times a vector. Inputs NAME_vector go in, outputs NAME_hvp come out.",
)
jacobian = _of_outputs(
    refgrad.jacobian,
    "Write every derivative of the outputs of MODEL. Outputs OUTPUT_by_NAME have the shapes of both, one after the other.",
)
hessian = _of_one_output(
    refgrad.hessian, "Write every second derivative of an output of MODEL, as outputs OUTPUT_by_NAME_by_NAME."
)
lower = _rewritten(
    refgrad.lower,
    "Write MODEL in ai.onnx operators alone. ONNX Runtime's gradient and training operators become what they compute.",
)
expand = _rewritten(
    refgrad.expand_gradients,
    "Write MODEL with the graph of a derivative in the place of every operator Gradient of ai.onnx.preview.training.",
)
