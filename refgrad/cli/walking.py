"""The command that explains a gradient with its numbers: `walk`."""

from __future__ import annotations

from typing import Annotated

import typer

from refgrad.backends.base import load_model
from refgrad.cli.options import Dim, Feeds, Json, Model, Seed, Wrt, names, sizes_of
from refgrad.cli.output import print_json, stdout
from refgrad.conformance.questions.feeds import read_feeds
from refgrad.conformance.questions.point import inputs_of
from refgrad.walks.text import show, step_of
from refgrad.walks.walk import walk as walked


def walk(
    model: Model,
    feeds: Feeds = None,
    of: Annotated[
        str | None,
        typer.Option(
            metavar="OUTPUT",
            help="What is differentiated: an output of one element, or one element of an output, 'logits[0, 3]'. "
            "Default: the only float output.",
        ),
    ] = None,
    wrt: Wrt = None,
    step: Annotated[
        int | None, typer.Option(metavar="K", help="Print one step alone: 0 is the last forward node.")
    ] = None,
    differences: Annotated[bool, typer.Option(help="Take a central difference beside each step, in float64.")] = True,
    seed: Seed = 0,
    dim: Dim = None,
    as_json: Json = False,
) -> None:
    """Walk the gradient of MODEL backwards: for each node the formula, what it reads, and what it adds to which cotangent.

    Inputs that --feeds does not have are random.
    """
    size, sizes = sizes_of(dim)
    proto = load_model(model)
    given = None if feeds is None else read_feeds(feeds, inputs_of(proto), some=True)
    found = walked(proto, given, wrt=names(wrt), of=of, seed=seed, differences=differences, size=size, sizes=sizes)
    if as_json:
        print_json(found.to_dict() if step is None else step_of(found, step).to_dict())
    else:
        show(found, stdout(), step)
