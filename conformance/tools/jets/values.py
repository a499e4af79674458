"""The derivatives of order 1 to 3 by refgrad, as gradients of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.tools.jets.planes import Direction
from refgrad.notices import quiet
from refgrad.reverse.assembly import names_in


class Derivatives:
    """The derivatives of orders 1 to 3 of Σ <cotangent, output> by the inputs `wrt`, from gradients of gradients.

    :raises RefgradError: the model has no gradient.
    """

    def __init__(
        self, model: ModelProto, wrt: Sequence[str], at: Mapping[str, Any], cotangents: Mapping[str, np.ndarray]
    ) -> None:
        self._wrt, self._at, self._cotangents = tuple(wrt), dict(at), dict(cotangents)
        self._model = model
        self._prepared: dict[int, Any] = {}
        self._models: dict[int, tuple[ModelProto, list[dict[str, str]], dict[str, str]]] = {}
        self._known: dict[tuple[int, tuple[int, ...]], dict[str, np.ndarray]] = {}

    def _of_order(self, order: int) -> tuple[ModelProto, list[dict[str, str]], dict[str, str]]:
        """The model, its cotangents per order (by the input that a gradient is of), and its gradients by input."""
        if order not in self._models:
            if order == 1:
                made = refgrad.gradient(self._model, list(self._wrt), list(self._cotangents))
                seeds: list[dict[str, str]] = [names_in(made)[0]]
            else:
                below, seeds, gradients = self._of_order(order - 1)
                made = refgrad.gradient(below, list(self._wrt), list(gradients.values()))
                taken = names_in(made)[0]
                seeds = [*seeds, {name: taken[g] for name, g in gradients.items() if g in taken}]
            self._models[order] = made, seeds, names_in(made)[1]
            self._prepared[order] = get_backend("numpy").prepare(made, precision="float64")
        return self._models[order]

    def contracted(self, directions: Sequence[Direction]) -> float:
        """D[d₁, …, dₖ]: the model of order k with d₁ to dₖ₋₁ as cotangents, times dₖ."""
        order = len(directions)
        key = order, tuple(map(id, directions[:-1]))
        if key not in self._known:
            self._known[key] = self._run(order, directions[:-1])
        gradient = self._known[key]
        return float(sum(np.sum(np.where(d == 0, 0.0, gradient[n] * d)) for n, d in directions[-1].items()))

    def _run(self, order: int, directions: Sequence[Direction]) -> dict[str, np.ndarray]:
        with quiet(), np.errstate(all="ignore"):
            model, seeds, gradients = self._of_order(order)
            feeds = dict(self._at)
            feeds |= {seeds[0][name]: c for name, c in self._cotangents.items() if name in seeds[0]}
            for taken, direction in zip(seeds[1:], directions, strict=True):
                for name, seed in taken.items():
                    feeds[seed] = direction.get(name, np.zeros(np.shape(self._at[name])))
            inputs = {value.name for value in model.graph.input}
            results = self._prepared[order].run({n: x for n, x in feeds.items() if n in inputs})
        zeros = {name: np.zeros(np.shape(self._at[name])) for name in self._wrt}
        return zeros | {name: np.asarray(results[g], np.float64) for name, g in gradients.items()}

    def forms(self, order: int, u: Direction, v: Direction | None) -> dict[tuple[int, ...], float]:
        """D[d₁, …, dₖ] by the choice of each direction: 0 for u, 1 for v."""
        basis = [u] if v is None else [u, v]
        return {
            chosen: self.contracted([basis[k] for k in chosen])
            for chosen in itertools.product(range(len(basis)), repeat=order)
        }
