"""A run with the option `strong_zero`, to see if it cures a gradient that is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.backends import Backend
from refgrad.errors import RefgradError, abridged
from refgrad.notices import quiet
from refgrad.reverse.assembly import names_in
from refgrad.reverse.gradient import gradient

OPTION = "strong_zero=True (--strong-zero)"


def cured(
    model: ModelProto,
    made: ModelProto,
    feeds: Mapping[str, Any],
    backend: Backend,
    wrt: Sequence[str],
    outputs: Sequence[str] | None,
) -> str:
    """A sentence that says what a run of the gradient with `strong_zero` gave.

    :param model: the model, and `made` its plain gradient, which is not finite at `feeds`.
    """
    try:
        with quiet():
            strong = gradient(model, wrt, outputs, keep_outputs=True, strong_zero=True)
        before, after = backend.prepare(made).run(feeds), backend.prepare(strong).run(feeds)
    except RefgradError as error:
        return f"{OPTION} could not be tried: {error}"
    names = [name for name in names_in(made)[1].values() if isinstance(before[name], np.ndarray | np.generic)]
    old, new = ({name: np.asarray(run[name]).astype(np.float64) for name in names} for run in (before, after))
    lost = {name: ~np.isfinite(old[name]) for name in names}
    bad = [name for name in names if lost[name].any()]
    left = [name for name in bad if not np.isfinite(new[name]).all()]
    elements = sum(int(lost[name].sum()) for name in bad)
    remaining = sum(int((~np.isfinite(new[name])).sum()) for name in left)
    if remaining >= elements:
        return (
            f"{OPTION} does not help. Run with it, {abridged(left)} {_is(left)} as before: "
            "a cotangent of 0 is not the cause."
        )
    changed = max(float(np.max(np.abs(new[n][~lost[n]] - old[n][~lost[n]]), initial=0)) for n in names)
    finite = f"{elements} elements that were not finite are" if elements > 1 else "the element that was not finite is"
    others = "the others are the same" if changed == 0 else f"the others differ by {changed:.2g} at most"
    if left:
        return (
            f"{OPTION} cures a part. Run with it, {elements - remaining} of {elements} elements of {abridged(bad)} that were "
            f"not finite are finite, and {others}; {abridged(left)} {_is(left)} still not finite everywhere."
        )
    return f"{OPTION} cures it. Run with it, {finite} finite in {abridged(bad)}, and {others}."


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
