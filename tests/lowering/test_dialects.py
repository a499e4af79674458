"""A dialect of another package: it registers one lowering from outside, and everything else falls through to ai.onnx."""

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from registering import forgetting

import refgrad
from refgrad.backends import get_backend
from refgrad.errors import OptionError, RuleError
from refgrad.extend import Dialect, kernel, lowering, register_dialect

pytestmark = pytest.mark.interpreter

MODEL = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 18]>
    m (float[2, 3] x, float[3, 4] w) => (float[2, 4] y, float[2, 3] z) { h = Tanh(x) y = MatMul(h, w) z = Max(x, h) }"""
)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with forgetting():
        register_dialect(Dialect("slopes"))

        @lowering("TanhGrad", dialect="slopes")
        def tanh_grad(op, dY, Y):
            return op.emit("Slope", "my.runtime", [dY, Y], 1, {})

        @kernel("Slope", domain="my.runtime")
        def slope(dY, Y):
            return dY * (1 - Y**2)

        yield


def gradients(dialect: str) -> tuple[set[tuple[str, str]], dict[str, np.ndarray]]:
    made = refgrad.gradient(MODEL, dialect=dialect)
    prepared = get_backend("numpy").prepare(made)
    rng = np.random.default_rng(0)
    feeds = {value.name: rng.normal(size=value.shape).astype(value.dtype) for value in prepared.inputs}
    return {(node.domain, node.op_type) for node in made.graph.node}, prepared.run(feeds)


def test_it_writes_its_own_operator_and_the_plain_ones_beside_it():
    plain, expected = gradients("onnx")
    written, found = gradients("slopes")
    assert {operator for operator in written if operator[0]} == {("my.runtime", "Slope")}
    assert ("", "Gemm") in written & plain
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)


def test_what_differs_between_dialects_is_asked_of_it():
    with pytest.raises(OptionError, match="strong_zero=True cannot guard the operators of dialect='slopes'"):
        refgrad.gradient(MODEL, dialect="slopes", strong_zero=True)
    with pytest.raises(OptionError, match="cotangent='yield' needs dialect='ort'"):
        refgrad.gradient(MODEL, dialect="slopes", cotangent="yield")
    register_dialect(Dialect("open", plain=True, yields=True))
    assert "YieldOp" in {node.op_type for node in refgrad.gradient(MODEL, dialect="open", cotangent="yield").graph.node}


def test_a_name_is_taken_once_and_a_wrong_one_lists_the_others():
    with pytest.raises(RuleError, match="There is a dialect 'slopes' already"):
        register_dialect(Dialect("slopes"))
    with pytest.raises(RuleError, match="The name of a dialect is an identifier, unlike 'two words'"):
        register_dialect(Dialect("two words"))
    with pytest.raises(OptionError, match="There is no dialect 'slope'; there are 'onnx', 'ort', 'slopes'"):
        refgrad.gradient(MODEL, dialect="slope")
