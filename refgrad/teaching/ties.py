"""An answer at a tie, where the derivative by one input alone does not exist.

When both move at once, the operator has a derivative: what the answer shares out between them has to add up to it. Alone, each
gets something between its derivatives from the left and from the right.
"""

from __future__ import annotations

import numpy as np

from refgrad.conformance.oracles.central import directional, one_sided
from refgrad.conformance.oracles.differences import forward
from refgrad.teaching.trials import AnswerTrial, Gradients
from refgrad.teaching.verdict import Example

_STEP = 1e-3
_SLACK = 1e-4


def hint_at(trial: AnswerTrial, gradients: Gradients) -> tuple[str, Example | None]:
    """The hint on an answer that is wrong at a tie, and an input that shows it, or None; "" and None where it is right."""
    problem, point = trial.problem, trial.point
    function, at, cotangents = forward(problem), problem.at, problem.wide_cotangents
    together = {name: np.asarray(u, np.float64) for name, u in point.together.items()}
    due = directional(function, at, together, cotangents, _STEP).value
    shared = float(sum(np.sum(gradients[name] * u) for name, u in together.items()))
    size = _SLACK * sum(float(np.abs(v).sum()) for v in cotangents.values())
    inputs = " and ".join(together)
    if abs(shared - due) > size:
        nobody = (shared and "") or " Where they are equal, yours gives the cotangent to neither of them."
        both = (
            " Where they are equal, yours gives the whole cotangent to each of them." if _is_double(shared, due) else ""
        )
        return (
            f"Right, except at ties of {inputs}. When both move together by t, the output moves by t: their shares of the "
            f"cotangent have to add up to it.{both or nobody}",
            _example(trial, gradients, due - shared),
        )
    for name in together:
        for place in np.ndindex(at[name].shape):
            unit = np.zeros(at[name].shape)
            unit[place] = 1
            sides = [side.value for side in one_sided(function, at, {name: unit}, cotangents, _STEP)]
            if not min(sides) - size <= gradients[name][place] <= max(sides) + size:
                return (
                    f"Right, except at ties of {inputs}: the share of {name} lies between {min(sides):.4g} and "
                    f"{max(sides):.4g}, its derivatives from both sides, and yours is {gradients[name][place]:.4g}.",
                    None,
                )
    return "", None


def _is_double(shared: float, due: float) -> bool:
    return bool(abs(shared - 2 * due) < _SLACK * max(1.0, abs(due)))


def _example(trial: AnswerTrial, gradients: Gradients, missing: float) -> Example:
    """The tie, with the last input's derivative if it alone were changed."""
    name = list(trial.point.together)[-1]
    got = gradients[name].astype(np.float64)
    return Example({**trial.point.inputs, f"d{trial.chapter.output}": trial.point.cotangent}, name, got, got + missing)
