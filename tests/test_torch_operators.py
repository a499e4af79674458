"""An independent autodiff agrees: torch.autograd on every operator that torch has, on every static case of the tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from checking import by_operator, names_of

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.conformance.feeds import is_float, widened
from refgrad.protos import attribute_value

torch = pytest.importorskip("torch")
from torch_table import TABLE  # noqa: E402  (it imports torch)

CASES = by_operator(lambda case: case.static and all(array.size for array in case.feeds.values() if is_float(array)))


def attributes(case: Case, result: np.ndarray) -> SimpleNamespace:
    """The attributes of the case's node, with the defaults of the schema; and what some functions need besides."""
    node = case.node
    schema = onnx.defs.get_schema(node.op_type, case.model.opset_import[0].version)
    values: dict[str, Any] = {
        name: attribute_value(a.default_value) if a.default_value.name else None
        for name, a in schema.attributes.items()
    }
    values |= {a.name: attribute_value(a) for a in node.attribute}
    return SimpleNamespace(**values, operator=node.op_type, outputs=len(node.output), result=result)


@pytest.mark.parametrize("operator", sorted(TABLE))
def test_gradient_equals_autograds(operator: str) -> None:
    judged = sum(agrees(case) for case in CASES.get(("", operator), ()))
    assert judged, f"no case of {operator} has a form that torch has"


def agrees(case: Case) -> bool:
    """Compare result and gradients with torch's; False where torch has no such form."""
    feeds = widened(case.feeds)
    forward = get_backend("numpy").prepare(case.model, precision="float64").run(feeds)
    node = case.node
    floats = [name for name, value in forward.items() if is_float(value)]
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in case.model.graph.initializer}
    known = widened(weights) | feeds
    wrt = case.wrt or tuple(name for name in feeds if is_float(feeds[name]))
    tensors = {name: torch.tensor(known[name], requires_grad=name in wrt) for name in node.input if name}
    made = TABLE[node.op_type](
        attributes(case, forward[floats[0]]), *(tensors[name] if name else None for name in node.input)
    )
    if made is None:
        return False
    results = [
        r.reshape(forward[n].shape) for n, r in zip(floats, made if isinstance(made, tuple) else (made,), strict=False)
    ]
    outputs = floats[: len(results)]
    rng = np.random.default_rng(5)
    cotangents = {name: rng.standard_normal(forward[name].shape) for name in outputs}
    for name, result in zip(outputs, results, strict=False):
        np.testing.assert_allclose(result.detach().numpy(), forward[name], rtol=1e-9, atol=1e-12, err_msg=str(case))
    total = sum((r * torch.tensor(cotangents[n])).sum() for n, r in zip(outputs, results, strict=False))
    expected = torch.autograd.grad(total, [tensors[name] for name in wrt], allow_unused=True)
    gradient = refgrad.gradient(case.model, wrt=wrt, outputs=outputs)
    seeds = {seed: cotangents[name] for name, seed in names_of(gradient, "cotangents").items()}
    got = get_backend("numpy").prepare(gradient, precision="float64").run(feeds | seeds)
    for name, value in zip(wrt, expected, strict=True):
        theirs = np.zeros_like(feeds[name]) if value is None else value.numpy()
        size = max(1.0, float(np.abs(theirs).max(initial=0.0)))
        np.testing.assert_allclose(got[f"{name}_grad"], theirs, rtol=0, atol=1e-9 * size, err_msg=f"{case}: {name}")
    return True
