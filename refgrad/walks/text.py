"""A walk in the terminal: each step with its numbers, legible on 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from refgrad.errors import OptionError, abridged
from refgrad.escaping import printable
from refgrad.walks.formulas import formula_text
from refgrad.walks.numbers import inline, lines, shape_of
from refgrad.walks.records import (
    Contribution,
    Cotangent,
    Emitted,
    Step,
    Walk,
    attributes_text,
    difference_text,
    emitted_text,
    origin_text,
    sum_text,
)

_NODES = 40  # emitted nodes of a step that are listed
_ELEMENTS = 6  # at a kink that are listed
_WIDTH = 80  # of lines that no terminal shows
_STEPS = 20  # that an error lists


def show(walk: Walk, console: Console, step: int | str | None = None) -> None:
    """Print a walk, or one step of it: a number, or the name of its node.

    :raises OptionError: there is no such step.
    """
    for text, style in _lines(walk, step, min(max(console.width, 40), 120)):
        console.print(Text(printable(text), style=style), soft_wrap=False, overflow="fold")


def text_of(walk: Walk, step: int | str | None = None, width: int = _WIDTH) -> str:
    """The lines that `show` prints, as text without styles."""
    return "\n".join(printable(line) for line, _ in _lines(walk, step, width))


def step_of(walk: Walk, which: int | str) -> Step:
    """The step with this number, or over the node with this name.

    :raises OptionError: there is none.
    """
    number = int(which) if isinstance(which, int) or (which.isdecimal() and len(which) < 10) else 0
    for step in walk.steps:
        if step.number == number or step.node == which:
            return step
    known = abridged((f"{step.number} {step.operator} {step.node}" for step in walk.steps), _STEPS)
    raise OptionError(
        f"There is no step {which}. The steps, the last forward node first: {known}."
        if walk.steps
        else f"There is no step {which}: no derivative passes through a node of the model."
    )


def _lines(walk: Walk, step: int | str | None, width: int) -> Iterator[tuple[str, str]]:
    shown = walk.steps if step is None else [step_of(walk, step)]
    yield f"{walk.of}, backwards through {len(walk.steps)} nodes", "bold"
    for note in walk.notes:
        yield f"note: {note}", "yellow"
    yield "", ""
    for one in shown:
        yield from _of_step(walk, one, width)
        yield "", ""
    if step is None:
        yield from _of_gradients(walk, width)


def _of_step(walk: Walk, step: Step, width: int) -> Iterator[tuple[str, str]]:
    title = f"{step.domain}.{step.operator}" if step.domain else step.operator
    yield f"step {step.number}  {title}  {step.node}", "bold"
    call = f"{', '.join(filter(None, step.outputs))} = {title}({', '.join(step.inputs)})"
    yield f"  {call}{attributes_text(step.operator, step.attributes)}", "dim"
    for line in formula_text(step).splitlines():
        yield f"  {line}", "cyan"
    for cotangent in step.incoming:
        yield from _of_cotangent(walk, cotangent, f"  in    cotangent of {cotangent.of}", width)
    for name in step.read:
        yield from _array(walk, f"  read  {name}", name, width)
    for part in step.outgoing:
        yield from _of_contribution(walk, part, width)
    for kink in step.kinks:
        listed = ", ".join(str(list(at)) for at in kink.elements[:_ELEMENTS])
        more = f" and {len(kink.elements) - _ELEMENTS} more" if len(kink.elements) > _ELEMENTS else ""
        yield f"  kink  {kink.input} at {listed}{more}: {kink.text}", "yellow"
    if step.difference is not None:
        yield f"  check {difference_text(step.difference)}{_checked_sum(walk, step)}", "green"
    yield from _of_nodes(step.emitted, "  emits ")


def _checked_sum(walk: Walk, step: Step) -> str:
    """The words for the sum that a difference is compared with, if the step makes only a part of it; else ""."""
    assert step.difference is not None
    cotangent = walk.cotangents[step.difference.of]
    if len(cotangent.contributions) < 2:
        return ""
    later = f", complete at step {cotangent.complete}" if cotangent.complete > step.number else ""
    return f" (the sum of all {len(cotangent.contributions)} contributions{later})"


def _of_cotangent(walk: Walk, cotangent: Cotangent, title: str, width: int) -> Iterator[tuple[str, str]]:
    said = origin_text(cotangent)
    named = "" if cotangent.value == f"{cotangent.of}_grad" else f" ({cotangent.value})"
    yield from _array(walk, title + named + (f", {said}" if said else ""), cotangent.value, width)
    if len(cotangent.contributions) > 1:
        for part in cotangent.contributions:
            yield f"        + {inline(walk.values.get(part.value))}  {part.value} ({_maker(walk, part)})", ""


def _maker(walk: Walk, part: Contribution) -> str:
    """The step that makes a contribution, and the input of its node, if it reads the value several times."""
    if part.step is None:
        return "the seed"
    step = walk.steps[part.step - 1]
    is_read_again = sum(other.of == part.of for other in step.outgoing) > 1 and part.position >= 0
    return f"step {part.step}, {step.operator}" + (f", its input {part.position}" if is_read_again else "")


def _of_contribution(walk: Walk, part: Contribution, width: int) -> Iterator[tuple[str, str]]:
    place = f", its input {part.position}" if part.position >= 0 else ""
    if part.before:
        yield from _array(walk, f"  sum   {part.before}, before it is summed for {part.of}", part.before, width)
    said = sum_text(part)
    cotangent = walk.cotangents.get(part.of)
    passes = next((name for name in _values(walk, walk.steps, part) if name), "")
    unchanged = f", unchanged: the cotangent of {passes}" if passes and not said else ""
    several = (
        f", 1 of {len(cotangent.contributions)}" if cotangent is not None and len(cotangent.contributions) > 1 else ""
    )
    yield from _array(
        walk, f"  out   to {part.of}{place}{several}{unchanged}{f', {said}' if said else ''}", part.value, width
    )


def _values(walk: Walk, steps: Sequence[Step], part: Contribution) -> Iterator[str]:
    """The outputs of the step's node whose cotangent goes out as it came in."""
    if part.step is not None:
        yield from (one.of for one in steps[part.step - 1].incoming if one.value == part.value)


def _of_nodes(nodes: Sequence[Emitted], title: str) -> Iterator[tuple[str, str]]:
    if not nodes:
        yield f"{title}nothing", "dim"
    for k, node in enumerate(nodes[:_NODES]):
        before = title if not k else " " * len(title)
        yield f"{before}{emitted_text(node)}{'  [sizes]' if node.is_shape else ''}", "dim"
        body = node.attributes.get("body")
        for line in str(body).splitlines()[:_NODES] if isinstance(body, str) else ():
            yield f"{' ' * len(title)}  | {line}", "dim"
    if len(nodes) > _NODES:
        yield f"{' ' * len(title)}and {len(nodes) - _NODES} more nodes", "dim"


def _of_gradients(walk: Walk, width: int) -> Iterator[tuple[str, str]]:
    yield "the gradients", "bold"
    for name in walk.wrt:
        if name in walk.cotangents:
            yield from _of_cotangent(walk, walk.cotangents[name], f"  d {walk.of} / d {name}", width)


def _array(walk: Walk, title: str, name: str, width: int) -> Iterator[tuple[str, str]]:
    value: Any = walk.values.get(name)
    shown = lines(value, width - 8)
    one_line = f"{title}: {shown[0]}"
    if len(shown) == 1 and len(one_line) <= width and shape_of(value).endswith("[]"):
        yield one_line, ""
        return
    yield f"{title}: {shape_of(value)}", ""
    for line in shown:
        yield f"        {line}", ""
