"""Operators that refgrad defines are inferred in models that import a version of ai.onnx older than their bodies need."""

from __future__ import annotations

import importlib
import pkgutil

import onnx
import pytest

from refgrad.microsoft import cases
from refgrad.model.inference.infer import infer, ranks

FAMILIES = [
    module.name for module in pkgutil.iter_modules(cases.__path__) if module.name != "qordered"
]  # of models of nodes


def of_opset(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """The model with another version of ai.onnx."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for imported in copy.opset_import:
        if not imported.domain:
            imported.version = version
    return copy


@pytest.mark.parametrize("version", [9, 12])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_results_are_inferred_as_in_a_newer_version(family: str, version: int) -> None:
    seen = set()
    for case in importlib.import_module(f"{cases.__name__}.{family}").cases():
        operators = {node.op_type for node in case.model.graph.node}
        if operators & seen or any(not node.domain for node in case.model.graph.node):
            continue
        seen |= operators
        found, due = (ranks(infer(of_opset(case.model, opset))) for opset in (version, 21))
        assert {name: found.get(name) for name in due} == due, case.name
    assert seen
