"""Pictures that Matplotlib draws: models side by side, and losses."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.errors import OptionError
from refgrad.installing import install
from refgrad.model.reading import read
from refgrad.show.text import shown

_INPUT, _OUTPUT, _NODE, _WEIGHT = "#f4b6b6", "#b9e3b9", "#fbd9a6", "#d9d9d9"


def plot_losses(
    losses: Sequence[float], validation: Sequence[float] | None = None, ax: Any = None, title: str = ""
) -> Any:
    """Draw the loss by epoch, and that on validation data: the axes.

    It needs Matplotlib (the extra `plot`).

    :raises OptionError: there is no loss, or no Matplotlib.
    """
    if not losses:
        raise OptionError("plot_losses draws the loss of each epoch, and there is none. Train first.")
    ax = _pyplot("plot_losses").subplots()[1] if ax is None else ax
    ax.plot(range(1, len(losses) + 1), losses, label="training")
    if validation:
        ax.plot(range(1, len(validation) + 1), validation, label="validation")
        ax.legend()
    ax.set_xlabel("epoch")
    ax.set_ylabel("loss")
    ax.set_title(title)
    return ax


def _pyplot(what: str) -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise OptionError(f"{what} draws with Matplotlib. Install it: {install('plot')}.") from error
    return plt


def plot_onnxs(*onx: ModelProto | str | os.PathLike[str], ax: Any = None, title: Any = None, show: bool = False) -> Any:
    """Draw models side by side: inputs (red), initializers (grey), nodes (orange) and outputs (green), from top to bottom.

    It needs Matplotlib (the extra `plot`). `refgrad.to_svg` draws larger models.

    :param onx: models, or their paths.
    :param ax: axes to draw on, one for each model; by default the axes of a new figure.
    :param title: a title, or one for each model.
    :param show: show the figure.
    :return: the axes; an array of them where there are several models.
    :raises OptionError: there is no model, not as many axes or titles as models, or no Matplotlib.
    :raises InvalidModelError: a model cannot be read.
    """
    if not onx:
        raise OptionError("plot_onnxs draws models, and none is given.")
    plt = _pyplot("plot_onnxs")
    if ax is None:
        _, ax = plt.subplots(1, len(onx), figsize=(6 * len(onx), 8), squeeze=False)
        ax = ax[0] if len(onx) > 1 else ax[0, 0]
    axes = list(np.ravel(ax))
    titles = [title] * len(onx) if title is None or isinstance(title, str) else list(title)
    for what, count in (("axes", len(axes)), ("titles", len(titles))):
        if count != len(onx):
            raise OptionError(f"Expected {len(onx)} {what}, one for each model, got {count}.")
    for one, model, text in zip(axes, onx, titles, strict=True):
        _draw(one, read(model))
        if text is not None:
            one.set_title(text)
    if show:
        plt.show()
    return ax


def _draw(ax: Any, model: ModelProto) -> None:
    graph = model.graph
    initializers = {tensor.name for tensor in graph.initializer}
    boxes: list[tuple[str, str, str]] = []  # the identifier, the text and the colour
    depth: dict[str, int] = {}
    made: dict[str, str] = {}  # a value: the box that makes it
    arrows: list[tuple[str, str]] = []

    def box(name: str, text: str, colour: str, level: int) -> None:
        boxes.append((name, text, colour))
        depth[name] = level

    for value in graph.input:
        if value.name not in initializers:
            box(f"input {value.name}", shown(value.name), _INPUT, 0)
            made[value.name] = f"input {value.name}"
    used = [name for node in graph.node for name in node.input]
    for name in dict.fromkeys(name for name in used if name in initializers):
        box(f"weight {name}", shown(name), _WEIGHT, 0)
        made[name] = f"weight {name}"
    for k, node in enumerate(graph.node):
        readers = [made[name] for name in node.input if name in made]
        box(f"node {k}", shown(node.op_type), _NODE, 1 + max((depth[name] for name in readers), default=0))
        arrows += [(name, f"node {k}") for name in readers]
        made.update(dict.fromkeys(node.output, f"node {k}"))
    for value in graph.output:
        maker = made.get(value.name)
        box(f"output {value.name}", shown(value.name), _OUTPUT, 1 + (depth[maker] if maker else 0))
        arrows += [(maker, f"output {value.name}")] if maker else []
    rows: dict[int, list[str]] = defaultdict(list)
    for name, _, _ in boxes:
        rows[depth[name]].append(name)
    places = {n: ((k + 1) / (len(row) + 1), -level) for level, row in rows.items() for k, n in enumerate(row)}
    for start, end in arrows:
        ax.annotate("", places[end], places[start], arrowprops={"arrowstyle": "->", "color": "#888888"})
    for name, text, colour in boxes:
        ax.text(
            *places[name],
            text,
            parse_math=False,
            ha="center",
            va="center",
            fontsize=8,
            bbox={"boxstyle": "round", "facecolor": colour},
        )
    ax.set_xlim(0, 1)
    ax.set_ylim(-max(rows, default=0) - 0.5, 0.5)
    ax.axis("off")
