from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from checking import assert_gradient

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import Case
from refgrad.conformance.cases.activation import cases
from refgrad.derivatives import ortbuilder
from refgrad.tables.dialects import DIALECTS


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    assert_gradient(case, dialect, runtime=comparable(case))


def comparable(case: Case) -> bool:
    """Not where ONNX Runtime 1.19.2, the one with builders, sums an empty tensor over no axes to one element."""
    empty = any(value.size == 0 for value in case.feeds.values())
    return not (empty and ortbuilder.available())


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("condition", ["IsNaN (y)", "Identity (masked)"])
def test_a_row_that_is_discarded_has_the_gradient_0(op_type: str, condition: str) -> None:
    """All of it is −∞ and the softmax NaN, in whose place the model puts 0. What it already has is not computed again."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]> rows (float[2, 3] x, bool[2, 1] masked) => (float[2, 3] z)
        {{ y = {op_type} (x)  c = {condition}  zero = Constant <value_float = 0.0> ()  z = Where (c, zero, y) }}
    """)
    gradient = refgrad.gradient(model)
    feeds = {
        "x": np.array([[1, 2, 3], [-np.inf] * 3], np.float32),
        "masked": np.array([[False], [True]]),
        "z_grad": np.array([[1, 2, 4], [4, 5, 6]], np.float32),
    }
    for backend in available():
        [got] = get_backend(backend).prepare(gradient).run(feeds).values()
        assert got[0].any()
        assert not got[1].any()
    assert [node.op_type for node in gradient.graph.node].count("IsNaN") == 1
