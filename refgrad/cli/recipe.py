"""`refgrad recipe`: models that use a gradient, such as saliency maps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Unpack

import typer

from refgrad import recipes
from refgrad.backends import get_backend
from refgrad.cli.commands import choice
from refgrad.cli.numbers import number
from refgrad.cli.options import OF, Json, Model, Of, Result, Verbose, with_conventions
from refgrad.cli.output import App, Files, print_json, print_table, save
from refgrad.conformance.problems.feeds import read_feeds
from refgrad.errors import OptionError
from refgrad.model.external import load
from refgrad.tables.conventions import ConventionOptions

app = App(help="Write a model that uses a gradient, such as a saliency map.")

Input = Annotated[
    str | None,
    typer.Option(
        "--wrt",
        metavar="NAME",
        help="The input to differentiate with respect to.",
        show_default="the only float input",
    ),
]
Score = Annotated[
    str | None,
    choice(
        recipes.RECIPE_SCORES,
        help="First add a loss to the model. It compares the output with the expected values, which you feed as label. Use "
        "cross_entropy for logits, log_loss for probabilities, binary_cross_entropy_with_logits for one raw score.",
        show_default="the output is the loss",
    ),
]


@app.command("saliency")
@with_conventions
def write_saliency(
    model: Model,
    output: Result,
    wrt: Input = None,
    of: Annotated[
        str | None,
        typer.Option(metavar="SELECTION", help=OF, show_default="the largest element of each sample"),
    ] = None,
    axis: Annotated[
        int | None, number("axis", help="Take the maximum over this axis of the input: 1 for the channels of an image.")
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
    **conventions: Unpack[ConventionOptions],
) -> None:
    """Write a saliency map, |d output / d input|."""
    save(recipes.saliency(model, wrt, of, axis=axis, **conventions), output, model, as_json, verbose)


@app.command("integrated-gradients")
@with_conventions
def write_integrated_gradients(
    model: Model,
    output: Result,
    wrt: Input = None,
    of: Of = None,
    steps: Annotated[int, number("steps", help="The number of points on the line (midpoint rule).")] = 64,
    verbose: Verbose = False,
    as_json: Json = False,
    **conventions: Unpack[ConventionOptions],
) -> None:
    """Write the integrated gradients of an output.

    The gradients are averaged along the line from a baseline (a new input, 0 by default) to the input.
    """
    save(recipes.integrated_gradients(model, wrt, of, steps=steps, **conventions), output, model, as_json, verbose)


@app.command("fgsm")
@with_conventions
def write_fgsm(
    model: Model,
    output: Result,
    wrt: Input = None,
    of: Of = None,
    score: Score = None,
    eps: Annotated[
        float, number("eps", help="How far each element moves. To change it later, feed eps to the new model.")
    ] = 0.007,
    clip: Annotated[
        tuple[float, float] | None,
        number("clip", metavar="LOW HIGH", help="Clip the result to this range, such as 0 1."),
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
    **conventions: Unpack[ConventionOptions],
) -> None:
    """Write an adversarial input: x + eps * sign(gradient).

    This is the fast gradient sign method. The gradient is d loss / d x.
    """
    made = recipes.fgsm(model, wrt, of, score=score, eps=eps, clip=clip, **conventions)
    save(made, output, model, as_json, verbose)


@app.command("forces")
@with_conventions
def write_forces(
    model: Model,
    output: Result,
    wrt: Input = None,
    of: Of = None,
    verbose: Verbose = False,
    as_json: Json = False,
    **conventions: Unpack[ConventionOptions],
) -> None:
    """Write the forces, -d energy / d positions. The new model also returns the outputs of MODEL."""
    save(recipes.forces(model, wrt, of, **conventions), output, model, as_json, verbose)


@app.command("sensitivity")
@with_conventions
def rank_weights(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The file to write.", show_default=False),
        Files.WRITTEN_MODEL,
    ] = None,
    feeds: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Print the ranking for these inputs: a .npz file with the inputs by name.",
            show_default=False,
        ),
        Files.READ,
    ] = None,
    of: Of = None,
    score: Score = None,
    verbose: Verbose = False,
    as_json: Json = False,
    **conventions: Unpack[ConventionOptions],
) -> None:
    """Rank the weights by their effect on a loss. Give -o to write a model that computes the numbers, or --feeds to print them.

    Each weight has two numbers. norm is the norm of its gradient. effect is the mean of |weight * gradient|, roughly the
    change of the loss if one element is set to 0.
    """
    if output is not None and feeds is not None:
        raise OptionError("--output and --feeds exclude each other: one writes the model, the other runs it.")
    made = recipes.sensitivity(model, of, score=score, **conventions)
    if output is not None:
        save(made, output, model, as_json, verbose)
    elif feeds is not None:
        load(made, model)
        prepared = get_backend("numpy").prepare(made)
        results = prepared.run(read_feeds(feeds, prepared.inputs))
        rows = [
            {"weight": weight} | {key: float(results[name]) for key, name in names.items()}
            for weight, names in recipes.sensitivities_in(made).items()
        ]
        rows.sort(key=lambda row: row["effect"], reverse=True)
        if as_json:
            print_json(rows)
        else:
            print_table(rows, verbose)
    else:
        raise OptionError("Give --output to write the model, or --feeds to run it and print the ranking.")
