"""What the kernels of other packages return is looked at: a wrong type never becomes a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.parser
import pytest
from registering import forgetting

from refgrad.backends import get_backend
from refgrad.errors import BackendError
from refgrad.extend import kernel, rule

pytestmark = pytest.mark.interpreter

MODEL = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["": 18, "my.domain": 1]>
    g (float[2] x) => (float[2] y) { [node] y = my.domain.Cubed(x) }""")


def _cubed(op: Any, d_y: str, x: str) -> Any:
    """dx = 3·x²·dy"""
    return op.Mul(op.Mul(op.Mul(x, x), 3.0), d_y)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda x: x.astype(np.float64) ** 3, r"float64 for its output 'y', which is float32"),
        (lambda x: x.astype(np.int64), r"int64 for its output 'y', which is float32"),
        (lambda x: None, r"None; expected an array for each output"),
        (lambda x: "hello", r"an object of type str; expected an array"),
        (lambda x: [x**3], r"an object of type list; expected an array"),
        (lambda x: (x**3, x), r"2 results; expected 1: 'y'"),
    ],
)
def test_what_is_no_result_is_told(returned: Callable[..., Any], said: str) -> None:
    with forgetting():
        rule("Cubed", domain="my.domain")(_cubed)
        kernel("Cubed", domain="my.domain")(returned)
        prepared = get_backend("numpy").prepare(MODEL)
        with pytest.raises(
            BackendError, match=rf"The kernel of my\.domain\.Cubed, .*, returned {said}.* \(node 'node'\)"
        ):
            prepared.run({"x": np.float32([1, 2])})


def test_a_right_result_passes() -> None:
    with forgetting():
        rule("Cubed", domain="my.domain")(_cubed)
        kernel("Cubed", domain="my.domain")(lambda x: x**3)
        result = get_backend("numpy").prepare(MODEL).run({"x": np.float32([1, 2])})
        np.testing.assert_array_equal(result["y"], np.float32([1, 8]))


def test_a_table_of_a_foreign_kernel_is_not_overwritten() -> None:
    """Its result lies in memory that the run does not own, though its input does."""
    table = np.arange(2000, dtype=np.float32)
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18, "my.domain": 1]>
        g (float[2000] x) => (float[2000] y) { n = Neg(x)  t = my.domain.Table(n)  y = Add(t, x) }""")
    with forgetting():
        kernel("Table", domain="my.domain")(lambda x: table)
        prepared, x = get_backend("numpy").prepare(model), np.ones(2000, np.float32)
        results = [prepared.run({"x": x})["y"] for _ in range(2)]
    for result in results:
        np.testing.assert_array_equal(result, np.arange(1, 2001))
    np.testing.assert_array_equal(table, np.arange(2000))
