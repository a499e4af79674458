"""Exports of torch whose gradient is NaN where a cotangent is 0: their true derivatives under `strong_zero`, by torch itself.

torch differentiates the function, or a way to write it that has no NaN, in double.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import refgrad
from refgrad.backends import get_backend

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

Function = Callable[..., Any]
ROWS = [[2, 2, 2, 2], [1, 2, 3, 5], [-1, 0, 2, 5]]
Q, K, V = (np.random.default_rng(seed).normal(size=(1, 1, 3, 4)) for seed in range(3))
CAUSAL = np.tril(np.ones((3, 3), bool))
WITHOUT_A_ROW = CAUSAL & np.array([[False], [True], [True]])


def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def written_out(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, -1)
    return torch.where(mask.any(-1, keepdim=True), weights, 0.0) @ v


def without_nan(scale: float) -> Function:
    """Attention whose rows that are masked altogether are 0."""

    def of(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = (scale * q @ k.transpose(-1, -2)).masked_fill(~mask, -1e30)
        return (torch.softmax(scores, -1) * mask) @ v

    return of


def root(x: Any) -> Any:
    return torch.where(x > 0, x.sqrt(), 0.0)


def quotient(a: Any, b: Any) -> Any:
    return torch.where(b != 0, a / b, 0.0)


def guarded(inner: Function, condition: Function) -> Function:
    """`inner` where the condition holds, of operands that are 1 elsewhere."""

    def of(*x: Any) -> Any:
        there = condition(*x)
        return torch.where(there, inner(*(torch.where(there, one, 1.0) for one in x)), 0.0)

    return of


def sinc(x: Any) -> Any:
    """sin(πx)/πx as the integral of cos(πxt) over t from 0 to 1."""
    places, weights = np.polynomial.legendre.leggauss(60)
    t, w = (torch.tensor(one / 2 + shift) for one, shift in ((places, 0.5), (weights, 0)))
    return (w * torch.cos(torch.pi * x[..., None] * t)).sum(-1)


def angle(a: Any, b: Any) -> Any:
    """The angle by half of it, which is smooth but for negative b and a = 0."""
    return 2 * torch.atan(a / (torch.sqrt(a * a + b * b) + b))


# The function that is exported, what torch differentiates, and the point.
FORMS: dict[str, tuple[Function, Function, list[Any]]] = {
    "atan2": (torch.atan2, angle, [[0, 2, -3, 1, -0.5], [2, 0, 0, 1, 2]]),
    "sinc": (torch.sinc, sinc, [[0, 1e-3, -0.3, 1, 2.7]]),
    "a root": (root, guarded(torch.sqrt, lambda x: x > 0), [[0, -1, 4]]),
    "a quotient": (quotient, guarded(lambda a, b: a / b, lambda a, b: b != 0), [[0, 3, 2], [0, 0, 4]]),
    "a logarithm": (
        lambda x: torch.where(x > 0, x * x.log(), 0.0),
        guarded(lambda x: x * x.log(), lambda x: x > 0),
        [[0, -1, 4]],
    ),
    "masked attention": (attention, without_nan(0.5), [Q, K, V, CAUSAL]),
    "attention with −∞ for a mask, and rows without keys hidden": (
        lambda q, k, v, mask: torch.where(mask.any(-1, keepdim=True), attention(q, k, v, mask.log()), 0.0),
        without_nan(0.5),
        [Q, K, V, WITHOUT_A_ROW],
    ),
    "attention written out, a row without keys": (written_out, without_nan(1), [Q, K, V, WITHOUT_A_ROW]),
}


def export(function: Function, arrays: list[np.ndarray]) -> Any:
    class Module(torch.nn.Module):
        def forward(self, *x: Any) -> Any:
            return function(*x)

    for logger in ("torch.onnx", "onnxscript"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.onnx.export(
            Module().eval(), tuple(map(torch.tensor, arrays)), dynamo=True, opset_version=18, verbose=False
        )
    return made.model_proto


@pytest.mark.parametrize("form", FORMS)
def test_exported_forms_have_their_true_derivatives(form: str) -> None:
    function, smooth, values = FORMS[form]
    given = [np.asarray(value, bool if np.asarray(value).dtype == bool else np.float32) for value in values]
    source = export(function, given)
    names = [value.name for value in source.graph.input]
    feeds = dict(zip(names, given, strict=True))
    wrt = [name for name, value in feeds.items() if value.dtype == np.float32]
    exact = [
        torch.tensor(value, dtype=torch.double) if value.dtype == np.float32 else torch.tensor(value) for value in given
    ]
    floats = [k for k, value in enumerate(exact) if value.dtype == torch.double]

    def total(*x: Any) -> Any:
        every = list(exact)
        for k, one in zip(floats, x, strict=True):
            every[k] = one
        return smooth(*every).sum()

    moving = tuple(exact[k] for k in floats)
    first = torch.autograd.functional.jacobian(total, moving)
    second = torch.autograd.functional.hessian(total, moving)
    gradient = refgrad.gradient(source, wrt, cotangent="ones", strong_zero=True)
    hessian = refgrad.hessian(source, wrt, strong_zero=True)
    [output] = [value.name for value in source.graph.output]
    for backend in ("numpy", "ort-cpu"):
        run = get_backend(backend).prepare(gradient).run(feeds)
        again = get_backend(backend).prepare(hessian).run(feeds)
        for j, name in enumerate(wrt):
            np.testing.assert_allclose(run[f"{name}_grad"], first[j], rtol=1e-5, atol=1e-6)
            for k, other in enumerate(wrt):
                np.testing.assert_allclose(again[f"{output}_by_{name}_by_{other}"], second[j][k], rtol=1e-4, atol=1e-5)


SPREADS: dict[str, Function] = {
    "std": lambda x: torch.std(x, dim=1),
    "std without correction": lambda x: torch.std(x, dim=1, correction=0),
    "the root of var": lambda x: x.var(dim=1).sqrt(),
    "norm": lambda x: torch.linalg.vector_norm(x - x.mean(1, keepdim=True), dim=1),
}


@pytest.mark.parametrize("name", SPREADS)
def test_a_constant_row_has_no_slope(name: str) -> None:
    """The other rows have torch's gradient, and that row the least subgradient."""
    given = np.array(ROWS, np.float32)
    source = export(SPREADS[name], [given])
    [x] = [value.name for value in source.graph.input]
    exact = torch.tensor(given, dtype=torch.double, requires_grad=True)
    SPREADS[name](exact[1:]).sum().backward()
    for backend in ("numpy", "ort-cpu"):
        made = refgrad.gradient(source, [x], cotangent="ones", strong_zero=True)
        [slope] = get_backend(backend).prepare(made).run({x: given}).values()
        np.testing.assert_array_equal(slope[0], 0)
        np.testing.assert_allclose(slope[1:], exact.grad[1:], rtol=1e-5, atol=1e-6)


def test_a_layer_takes_the_option() -> None:
    from refgrad.torch import Module

    source = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[3] x) => (float[3] y) <float[3] w = {1, 1, 1}, float zero = {0}> '
        "{ p = Mul(x, w) c = Greater(p, zero) s = Sqrt(p) y = Where(c, s, zero) }"
    )
    for strong in (False, True):
        x = torch.tensor([0.0, -1.0, 4.0], requires_grad=True)
        layer = Module(source, trainable=["w"], strong_zero=strong)
        [slope] = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        if not strong:
            assert slope[:2].isnan().all()
            continue
        assert slope.tolist() == [0, 0, 0.25]
        [bend] = torch.autograd.grad(slope.sum(), x)
        assert bend.tolist() == [0, 0, -1 / 32]
