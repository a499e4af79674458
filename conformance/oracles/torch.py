"""torch.autograd in float64, for models of operators that `refgrad.conformance.oracles.tables.torch_table` has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import util
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import NodeProto

from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.case import is_float
from refgrad.conformance.problems.feeds import widened
from refgrad.conformance.problems.observation import Elementwise, NotApplicable, Observation, Oracle
from refgrad.conformance.problems.point import largest, with_defaults
from refgrad.conformance.problems.problem import Problem
from refgrad.errors import BackendError
from refgrad.model.external import array_of
from refgrad.protos.traverse import (
    attribute_value,
    reads_of,
    versions_of,
)

if TYPE_CHECKING:
    from torch import Tensor

NAME = "torch"
_TRUSTED = 1e-9  # relative, of a gradient in float64
_SAME = 1e-9  # relative to the largest element of a result


class _NotApplicableError(Exception):
    """The oracle does not apply."""


def _observe(problem: Problem) -> Sequence[Observation]:
    try:
        return [Elementwise(NAME, name, gradient, _TRUSTED) for name, gradient in _gradients(problem).items()]
    except _NotApplicableError as error:
        return [NotApplicable(NAME, str(error))]


def _gradients(problem: Problem) -> dict[str, np.ndarray]:
    """The gradients of Σ <cotangent, output> by name."""
    import torch

    at = problem.at
    moved = {name: torch.tensor(at[name], requires_grad=True) for name in problem.wrt}
    values = _forward(problem, moved)
    total = torch.zeros((), dtype=torch.float64)
    for output, cotangent in problem.wide_cotangents.items():
        if output in values:
            total = total + (values[output] * torch.tensor(cotangent)).sum()
    gradients: Sequence[Any] = [None] * len(moved)
    if total.requires_grad:
        gradients = torch.autograd.grad(total, list(moved.values()), allow_unused=True)
    return {
        name: np.zeros_like(at[name]) if gradient is None else gradient.numpy()
        for name, gradient in zip(moved, gradients, strict=True)
    }


def _forward(problem: Problem, moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every value that depends on a moved value, node by node; the others are the interpreter's.

    Torch's results are compared with the interpreter's: torch may mean another function by the same name.
    """
    model = problem.model
    known = widened({t.name: array_of(t) for t in model.graph.initializer}) | problem.at
    try:
        prepared = NumpyBackend().prepare(with_defaults(model, problem.wrt), precision="float64")
        known |= prepared.run(problem.at, trace=True)
    except BackendError as error:
        raise _NotApplicableError(f"the interpreter does not run the model: {error}") from error
    values = dict(moved)
    opset = versions_of(model).get("", 1)
    for node in model.graph.node:
        if values.keys().isdisjoint(reads_of(node)):
            continue
        if any(is_float(known[name]) for name in node.output if name):  # else no derivative goes through it
            values.update(_results(node, opset, values, known))
    return values


def _results(
    node: NodeProto, opset: int, values: Mapping[str, Tensor], known: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The results of torch for the float outputs of a node."""
    import torch

    from refgrad.conformance.oracles.tables.torch_table import TABLE

    if node.domain not in ("", "ai.onnx") or node.op_type not in TABLE:
        raise _NotApplicableError(
            f"the table of torch functions has no {node.domain and node.domain + '.'}{node.op_type}"
        )
    inputs = [values[name] if name in values else torch.tensor(known[name]) if name else None for name in node.input]
    first = next(known[name] for name in node.output if name and is_float(known[name]))
    try:
        outputs = TABLE[node.op_type](_attributes(node, opset, first), *inputs)
    except Exception as error:  # torch raises anything for a form that it does not have
        why = " ".join(str(error).split())
        raise _NotApplicableError(
            f"torch fails on this form of {node.op_type}: {type(error).__name__}: {why}"
        ) from error
    if outputs is None:
        raise _NotApplicableError(f"torch has no such form of {node.op_type}")
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    for position, name in enumerate(node.output):
        if not name or not is_float(known[name]):
            continue
        if position >= len(results):
            raise _NotApplicableError(f"torch does not give the output {name!r} of {node.op_type}")
        result, expected = results[position], known[name]
        if result.numel() != expected.size:
            raise _NotApplicableError(f"torch computes another function: {node.op_type} gives {tuple(result.shape)}")
        result = result.reshape(expected.shape)
        got = result.detach().numpy()
        slack = _SAME * largest(expected[np.isfinite(expected)])
        if not np.allclose(got, expected, rtol=_SAME, atol=slack, equal_nan=True):
            off = largest(got - expected)
            raise _NotApplicableError(f"torch computes another function: {node.op_type} is off by {off:.3g}")
        yield name, result


def _attributes(node: NodeProto, opset: int, result: np.ndarray) -> SimpleNamespace:
    """The attributes of a node, with the defaults of the schema; and what some functions need besides."""
    schema = onnx.defs.get_schema(node.op_type, opset)
    values: dict[str, Any] = {
        name: attribute_value(a.default_value) if a.default_value.name else None
        for name, a in schema.attributes.items()
    }
    values |= {a.name: attribute_value(a) for a in node.attribute}
    return SimpleNamespace(**values, operator=node.op_type, outputs=len(node.output), result=result)


def _missing() -> str:
    return "" if util.find_spec("torch") else "torch is not installed (pip install torch)"


ORACLE = Oracle(
    NAME,
    "torch.autograd in float64, node by node, where torch has the operator and computes what the interpreter does; trusted up "
    "to rounding, and at a kink to torch's own convention",
    observe=_observe,
    missing=_missing,
)
