"""ONNX Runtime's operators that move elements, beyond what all operators are asked."""

from __future__ import annotations

import numpy as np
import pytest
from checking import assert_gradient, assert_second_derivative
from onnx import ModelProto
from runtime import needs_runtime

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.errors import BackendError, NoGradientError
from refgrad.microsoft.cases import case, drawer, scalar

pytestmark = [pytest.mark.stock, pytest.mark.slow]

FLOATS = drawer(9)
NUMPY = get_backend("numpy")
PADS = np.array([1, -1, 2, 2])
WRAPPED = case("Pad", FLOATS(3, 4), PADS, mode="wrap")


def test_a_pad_that_wraps_has_a_derivative() -> None:
    """ONNX Runtime has this mode, of which its documentation says nothing."""
    assert_gradient(WRAPPED)


@needs_runtime
def test_a_pad_that_wraps_is_that_of_onnx_runtime() -> None:
    expected = get_backend("ort-cpu").prepare(WRAPPED.model).run(WRAPPED.feeds)["output"]
    np.testing.assert_array_equal(NUMPY.prepare(WRAPPED.model).run(WRAPPED.feeds)["output"], expected)


@pytest.mark.parametrize(
    ("mode", "opset", "said"),
    [
        ("wrap", 17, "its mode 'wrap' needs opset 19"),
        ("mirror", 21, "its mode 'mirror' is not known; there are constant"),
    ],
)
def test_a_mode_that_is_not_there_is_refused(mode: str, opset: int, said: str) -> None:
    model = ModelProto()
    model.CopyFrom(case("Pad", FLOATS(3, 4), PADS, mode=mode).model)
    next(o for o in model.opset_import if not o.domain).version = opset
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(model)


@pytest.mark.parametrize(
    "one", [case("Pad", FLOATS(2, 2), PADS, scalar(0.5)), case("Pad", FLOATS(3, 3), PADS, mode="edge")], ids=str
)
def test_second_derivative(one: Case) -> None:
    assert_second_derivative(one)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (case("ExpandDims", FLOATS(2), np.array(2, np.int32)), "axis 2 of a tensor of rank 2: an axis is in -2..1"),
        (case("ExpandDims", FLOATS(2), np.array([0, 1], np.int32)), r"axis has the shape \[2\]; it is one number"),
        (case("Pad", FLOATS(2), np.array([1])), r"pads has the shape \[1\]; 1 axes need 2 numbers"),
        (case("Pad", FLOATS(2), np.array([-2, -1])), "cut more of the data"),
        (case("Pad", FLOATS(2), np.array([2, 0]), mode="reflect"), "pads 2 elements by at most 1, not 2 and 0"),
        (case("Pad", FLOATS(2), np.array([2, 0]), FLOATS(2)), r"value has the shape \[2\]; it is one number"),
        (case("Range", scalar(1.0), scalar(2.0), scalar(0.0)), "delta is 0; the step must not be 0"),
        (case("Range", FLOATS(2), scalar(2.0)), r"start has the shape \[2\]; it is one number"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(one: Case, said: str) -> None:
    with pytest.raises(BackendError, match=said):
        NUMPY.prepare(one.model).run(one.feeds)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 70])
@pytest.mark.parametrize("op_type", ["BitmaskDropout", "BitmaskBiasDropout"])
def test_a_packed_mask_has_a_bit_for_each_element(op_type: str, count: int) -> None:
    """The gradient multiplies by the bits, and a lowered model keeps the same ones."""
    x, training = FLOATS(count), np.array(True)
    given = (
        [x, scalar(0.4), training] if op_type == "BitmaskDropout" else [x, FLOATS(count), None, scalar(0.4), training]
    )
    one = case(op_type, *given, outputs=2, seed=7)
    results = NUMPY.prepare(one.model).run(one.feeds)
    bits = [bool(word >> k & 1) for word in results["mask"].tolist() for k in range(32)][:count]
    assert len(results["mask"]) == -(-count // 32)
    assert bits == (results["output"] != 0).tolist()
    for name, value in NUMPY.prepare(refgrad.lower(one.model)).run(one.feeds).items():
        np.testing.assert_array_equal(value, results[name])
    model = refgrad.gradient(one.model, wrt=["data"], outputs=["output"])
    cotangent = FLOATS(count)
    gradient = NUMPY.prepare(model).run(dict(one.feeds) | {"output_grad": cotangent})
    np.testing.assert_allclose(gradient["data_grad"], np.where(bits, cotangent / np.float32(0.6), 0), rtol=1e-6)
