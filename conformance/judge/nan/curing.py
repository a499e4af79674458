"""A run with the option `strong_zero`, to see if it cures a gradient that is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.backends import Backend
from refgrad.backends.numpy import NumpyBackend
from refgrad.errors import RefgradError, abridged, counted
from refgrad.notices import quiet
from refgrad.reverse.assembly import names_in
from refgrad.reverse.gradient import gradient

OPTION = "strong_zero=True (--strong-zero)"
_TRIED = 8  # elements of a gradient
_STEP, _SLACK = 1e-7, 1e-3
_STEEP = 1e3  # √x has a difference quotient of 3e3 at 0


def cured(
    model: ModelProto,
    gradient_model: ModelProto,
    feeds: Mapping[str, Any],
    backend: Backend,
    wrt: Sequence[str],
    outputs: Sequence[str] | None,
) -> str:
    """A sentence that says what a run of the gradient with `strong_zero` gave.

    :param model: the model, and `gradient_model` its plain gradient, which is not finite at `feeds`.
    """
    try:
        with quiet():
            strong = gradient(model, wrt, outputs, keep_outputs=True, strong_zero=True)
        before, after = backend.prepare(gradient_model).run(feeds), backend.prepare(strong).run(feeds)
    except RefgradError as error:
        return f"{OPTION} could not be tried: {error}"
    names = [name for name in names_in(gradient_model)[1].values() if isinstance(before[name], np.ndarray | np.generic)]
    old, new = ({name: np.asarray(run[name]).astype(np.float64) for name in names} for run in (before, after))
    lost = {name: ~np.isfinite(old[name]) for name in names}
    bad = [name for name in names if lost[name].any()]
    left = [name for name in bad if not np.isfinite(new[name]).all()]
    elements = sum(int(lost[name].sum()) for name in bad)
    remaining = sum(int((~np.isfinite(new[name])).sum()) for name in left)
    if remaining >= elements:
        return (
            f"{OPTION} does not help. With the option, {abridged(left)} {_is(left)} as before, "
            "so the cause is not a cotangent of 0."
        )
    changed = max(float(np.max(np.abs(new[n][~lost[n]] - old[n][~lost[n]]), initial=0)) for n in names)
    lost_elements = counted(elements, "element that was not finite is", "elements that were not finite are")
    finite = lost_elements if elements > 1 else "the element that was not finite is"
    others = "the others are the same" if changed == 0 else f"the others differ by {changed:.2g} at most"
    if left:
        cured_part = f"{elements - remaining} of {counted(elements, 'element')} of {abridged(bad)}"
        return (
            f"{OPTION} cures a part. With the option, {cured_part} that were not finite are finite, and {others}; "
            f"{abridged(left)} {_is(left)} still not finite everywhere."
        )
    disputed = _disputed(model, gradient_model, feeds, {name: (lost[name], new[name]) for name in bad})
    if disputed:
        return (
            f"{OPTION} does not cure it, though with it {finite} finite: {disputed} The derivative is a limit that needs the "
            "infinity. Rewrite the function there; docs/nan_in_a_gradient.md says how."
        )
    return f"{OPTION} cures it. With the option, {finite} finite in {abridged(bad)}, and {others}."


def _disputed(
    model: ModelProto,
    gradient_model: ModelProto,
    feeds: Mapping[str, Any],
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> str:
    """A sentence that names an element which differences from both sides contradict, or "".

    :param pairs: by the gradient's name, which elements were not finite, and what they are now.
    """
    cotangents, gradients = names_in(gradient_model)
    primals = {gradient: name for name, gradient in gradients.items() if name in feeds}
    weighed = {output: np.asarray(feeds[name], np.float64) for output, name in cotangents.items() if name in feeds}
    prepared = NumpyBackend().prepare(model, precision="float64")
    at = {value.name: np.asarray(feeds[value.name]) for value in prepared.inputs if value.name in feeds}

    def weighed_sum(name: str, place: tuple[int, ...], step: float) -> float:
        moved = at[name].astype(np.float64)
        moved[place] += step
        results = prepared.run({**at, name: moved})
        return float(sum(np.sum(weight * np.asarray(results[output])) for output, weight in weighed.items()))

    for adjoint, (lost, values) in pairs.items():
        name = primals.get(adjoint, "")
        if name not in at or lost.shape != at[name].shape:
            continue
        for place in [tuple(map(int, index)) for index in np.argwhere(lost)[:_TRIED]]:
            step = _STEP * max(1.0, abs(float(at[name][place])))
            try:
                with np.errstate(all="ignore"):
                    here = weighed_sum(name, place, 0.0)
                    slopes = [(weighed_sum(name, place, side * step) - here) / (side * step) for side in (-1, 1)]
            except RefgradError:
                return ""
            slopes = [slope for slope in slopes if abs(slope) < _STEEP]  # beyond, there is no derivative
            value, slack = float(values[place]), _SLACK * max(1.0, *map(abs, slopes), abs(float(values[place])))
            if slopes and not min(slopes) - slack <= value <= max(slopes) + slack:
                told = " and ".join(f"{slope:.4g}" for slope in slopes)
                return f"{adjoint}{list(place)} is {value:.4g}, and the difference quotient is {told}."
    return ""


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
