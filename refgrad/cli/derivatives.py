"""The commands that write a model: a derivative of MODEL, or MODEL with other operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias, Unpack

import typer
from onnx import ModelProto

import refgrad
from refgrad import recipes
from refgrad.backends.base import load_model
from refgrad.cli.commands import choice
from refgrad.cli.options import Json, Keep, Model, Of, Outputs, Result, Verbose, Wrt, names, with_conventions
from refgrad.cli.output import Bar, save, say
from refgrad.errors import OptionError
from refgrad.protos.traverse import nested
from refgrad.reverse.request import COTANGENTS, WEIGHTS
from refgrad.tables.conventions import ConventionOptions
from refgrad.tables.dialects import DIALECTS

Command: TypeAlias = Callable[..., None]


@with_conventions
def grad(
    model: Model,
    output: Result,
    wrt: Wrt = None,
    outputs: Outputs = None,
    of: Of = None,
    dialect: Annotated[
        str,
        choice(DIALECTS, help="onnx: write ai.onnx operators only. ort: use ONNX Runtime's training operators."),
    ] = "onnx",
    cotangent: Annotated[
        str | None,
        choice(
            COTANGENTS,
            help="The cotangent of each output. input: you feed it, as <output>_grad. ones: 1 everywhere, for a loss. yield: "
            "the model stops at a node YieldOp, where ONNX Runtime hands you the outputs and takes cotangents. It needs "
            "--dialect ort.",
            show_default="input, or ones with --of",
        ),
    ] = None,
    keep_outputs: Keep = False,
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="Recompute forward values, segment by segment, instead of keeping them. This saves memory.",
        ),
    ] = False,
    recompute_nodes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Recompute only the values of these nodes: names, or patterns such as "
            "'/layers.3/*', written like --wrt. The nodes of a pattern are recomputed together.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            "--recompute-within",
            metavar="BUDGET",
            help="Recompute values to stay within this memory budget, and no more: '2 GiB', or '2 GiB for N=32' if the size N "
            "is symbolic. "
            "Weights and feeds are not counted.",
        ),
    ] = None,
    weights: Annotated[
        str,
        choice(
            WEIGHTS,
            help="What the weights in --wrt become. overridable: inputs that have a default. inputs: inputs that you have to "
            "feed. constants: initializers only, which ONNX Runtime runs faster.",
        ),
    ] = "overridable",
    verbose: Verbose = False,
    as_json: Json = False,
    **conventions: Unpack[ConventionOptions],
) -> None:
    """Write the gradient of MODEL as another ONNX model.

    External data: if the output is in the folder of MODEL, it refers to the same files. Otherwise they are copied to
    <OUTPUT>.data.
    """
    if sum(map(bool, (recompute, recompute_nodes, memory is not None))) > 1:
        raise OptionError("--recompute, --recompute-nodes and --memory exclude each other: give one.")
    source: Path | ModelProto = model
    targets = names(outputs)
    if of is not None:
        if targets is not None:
            raise OptionError("--of and --outputs exclude each other: --of names the output itself.")
        source = selected = recipes.select(model, of)
        targets = [selected.graph.output[0].name]
    with Bar("differentiating"):
        made = refgrad.gradient(
            source,
            names(wrt),
            targets,
            dialect=dialect,
            cotangent=cotangent or ("input" if of is None else "ones"),
            keep_outputs=keep_outputs,
            recompute=names(recompute_nodes) or recompute,
            memory=memory,
            weights=weights,
            **conventions,
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
        verbose: Verbose = False,
        as_json: Json = False,
        **conventions: Unpack[ConventionOptions],
    ) -> None:
        with Bar("differentiating"):
            made = derivative(model, names(wrt), names(outputs), keep_outputs=keep_outputs, **conventions)
        save(made, output, model, as_json, verbose)

    command.__doc__ = text
    return with_conventions(command)


def _of_one_output(derivative: Callable[..., ModelProto], text: str) -> Command:
    """Return the command that writes this derivative of one output, or of elements of it."""

    def command(
        model: Model,
        output: Result,
        wrt: Wrt = None,
        of: Of = None,
        keep_outputs: Keep = False,
        verbose: Verbose = False,
        as_json: Json = False,
        **conventions: Unpack[ConventionOptions],
    ) -> None:
        source: Path | ModelProto = model
        target = of
        if of is not None and "[" in of:
            source = selected = recipes.select(model, of)
            target = selected.graph.output[0].name
        with Bar("differentiating"):
            made = derivative(source, names(wrt), target, keep_outputs=keep_outputs, **conventions)
        save(made, output, model, as_json, verbose)

    command.__doc__ = text
    return with_conventions(command)


def _rewritten(rewrite: Callable[..., ModelProto], replaced: str, text: str) -> Command:
    """Return the command that writes a model with some of its operators, `replaced`, as other operators."""

    def command(model: Model, output: Result, verbose: Verbose = False, as_json: Json = False) -> None:
        with Bar("rewriting"):
            before = _operators(load_model(model))
            made = rewrite(model)
        save(made, output, model, as_json, verbose, ends=("outputs",))
        if not as_json and _operators(made) == before:
            say(f"Nothing was replaced: the model has no {replaced}.")

    command.__doc__ = f"{text}\n\n{_DATA}"
    return command


def cut(
    model: Model,
    output: Result,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Values that become inputs, such as the rows of an embedding: names separated by commas. Inputs of MODEL that "
            "are still needed stay.",
        ),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="Values that become the outputs, such as the scores before an ArgMax."),
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Write the part of MODEL between the values that you name.

    The other commands take this part as a model, for example to begin at embeddings instead of token ids.
    """
    with Bar("cutting"):
        made = refgrad.select_model_inputs_outputs(model, names(outputs), names(inputs), keep_inputs=True)
    save(made, output, model, as_json, verbose)


def _operators(model: ModelProto) -> Counter[tuple[str, str]]:
    return Counter((node.domain, node.op_type) for node in nested(model.graph.node))


_DATA = (
    "External data: if the output is in the folder of MODEL, it refers to the same files. Otherwise they are copied to "
    "<OUTPUT>.data."
)

jvp = _of_outputs(
    refgrad.jvp,
    "Write the forward-mode derivative of MODEL as a model.\n\n"
    "The new model reads NAME_tangent for each NAME in --wrt, and returns OUTPUT_tangent for each output.",
)
hvp = _of_one_output(
    refgrad.hvp,
    "Write the Hessian of an output of MODEL times a vector. For each NAME in --wrt, the new model reads NAME_vector "
    "and returns NAME_hvp.",
)
jacobian = _of_outputs(
    refgrad.jacobian,
    "Write the Jacobian of MODEL. The new model returns OUTPUT_by_NAME for each NAME in --wrt, with the shape of OUTPUT "
    "followed by the shape of NAME.",
)
hessian = _of_one_output(
    refgrad.hessian,
    "Write the Hessian of an output of MODEL. The new model returns OUTPUT_by_NAME_by_OTHER for each NAME and OTHER in --wrt.",
)
lower = _rewritten(
    refgrad.lower,
    "training operator of ONNX Runtime",
    "Replace ONNX Runtime's training operators by ai.onnx ones.",
)
expand = _rewritten(
    refgrad.expand_gradients,
    "operator Gradient",
    "Replace ONNX's operator Gradient by nodes that compute it.\n\n"
    "The operator is in the domain ai.onnx.preview.training.",
)
