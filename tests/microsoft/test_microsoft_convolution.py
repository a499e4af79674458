"""ONNX Runtime's convolutions beyond what all operators are asked: what is refused, no images, second derivatives."""

from __future__ import annotations

import numpy as np
import pytest
from checking import assert_gradient, assert_second_derivative
from onnx import helper

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.errors import BackendError, InvalidModelError, NoGradientError
from refgrad.microsoft.cases import case, drawer
from refgrad.protos.domains import MICROSOFT

pytestmark = [pytest.mark.stock, pytest.mark.slow]

FLOATS = drawer(5)
NUMPY = get_backend("numpy")
NHWC = case("NhwcFusedConv", FLOATS(1, 4, 4, 2), FLOATS(2, 2, 3, 2), FLOATS(2), FLOATS(1, 2, 3, 2), activation="Tanh")
PADS = np.array([1, 0, 0, 1])
DYNAMIC = case("ConvTransposeWithDynamicPads", FLOATS(1, 2, 3, 3), FLOATS(2, 2, 2, 2), PADS, FLOATS(2))


@pytest.mark.parametrize("one", [NHWC, DYNAMIC], ids=str)
def test_second_derivative(one: Case) -> None:
    assert_second_derivative(one)


@pytest.mark.parametrize("op_type", ["NhwcConv", "NhwcFusedConv", "ConvTransposeWithDynamicPads"])
def test_no_images_have_no_gradient_but_the_filters_have_zeros(op_type: str) -> None:
    pads = [PADS] if op_type.startswith("Conv") else []
    filters = (4, 2, 2, 4) if op_type == "NhwcConv" else (4, 4, 2, 2)
    one = case(op_type, FLOATS(0, 4, 4, 4), FLOATS(*filters), *pads)
    assert_gradient(one, runtime=False)


@pytest.mark.parametrize("op_type", ["NhwcConv", "ConvTransposeWithDynamicPads"])
def test_images_of_unknown_rank_are_refused_with_what_to_do(op_type: str) -> None:
    pads = [np.array([1, 0, 0, 1])] if op_type.startswith("Conv") else []
    one = case(op_type, FLOATS(1, 2, 3, 3), FLOATS(2, 2, 1, 1), *pads, shapes="unknown")
    with pytest.raises(NoGradientError, match="give it kernel_shape, or declare the shape of X"):
        refgrad.gradient(one.model)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (case("NhwcConv", FLOATS(1, 4, 4, 3), FLOATS(2, 2, 2, 2)), "do not fit 1 groups: the last axis of X has"),
        (
            case("NhwcConv", FLOATS(1, 4, 4, 2), FLOATS(2, 2, 2, 2), FLOATS(3)),
            r"B has the shape \[3\]; \[2\] is needed",
        ),
        (case("NhwcConv", FLOATS(1, 4, 4, 2), FLOATS(2, 2, 2, 2), kernel_shape=[2, 3]), "W has the shape"),
        (
            case("NhwcFusedConv", FLOATS(1, 4, 4, 2), FLOATS(2, 2, 2, 2), None, FLOATS(1, 2, 3, 3)),
            r"Z has the shape \[1, 2, 3, 3\]; \[1, 3, 3, 2\] is needed",
        ),
        (
            case("ConvTransposeWithDynamicPads", FLOATS(1, 2, 3, 3), FLOATS(2, 2, 2, 2), np.array([1, 0])),
            r"Pads has the shape \[2\]; \[4\] is needed",
        ),
        (
            case("ConvTransposeWithDynamicPads", FLOATS(1, 2, 3, 3), FLOATS(2, 2, 2, 2), np.array([1, 0, -1, 0])),
            r"Pads are \[1, 0, -1, 0\]; a pad is not negative",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(one: Case, said: str) -> None:
    with pytest.raises(BackendError, match=said):
        NUMPY.prepare(one.model).run(one.feeds)


@pytest.mark.parametrize("op_type", ["NhwcConv", "NhwcFusedConv", "FusedConv"])
@pytest.mark.parametrize("group", [0, -1, 2**62])
def test_groups_that_no_convolution_has_are_refused(op_type: str, group: int) -> None:
    images = (1, 2, 4, 4) if op_type == "FusedConv" else (1, 4, 4, 2)
    one = case(op_type, FLOATS(*images), FLOATS(2, 2, 2, 2))
    node = one.model.graph.node[-1]
    node.attribute.append(helper.make_attribute("group", group))
    with pytest.raises(InvalidModelError, match=f"has group {group}, and no convolution has as many"):
        refgrad.gradient(one.model)


@pytest.mark.parametrize(("domain", "op_type"), [("", "Conv"), ("", "MaxPool"), (MICROSOFT, "NhwcConv")])
def test_a_padding_that_does_not_exist_is_refused(domain: str, op_type: str) -> None:
    """The pads beside it would count for some, and not for others."""
    window = {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1]}
    filters = (2, 2, 2, 4) if op_type == "NhwcConv" else (2, 4, 2, 2)
    inputs = [FLOATS(1, 4, 4, 4), FLOATS(*filters)][: 1 if op_type == "MaxPool" else 2]
    model = node_case(op_type, *inputs, domain=domain, opset=1 if domain else 21, **window).model
    model.graph.node[-1].attribute.append(helper.make_attribute("auto_pad", "SAME"))
    said = "auto_pad.* 'SAME'; there are NOTSET, SAME_UPPER, SAME_LOWER, VALID"
    with pytest.raises(InvalidModelError, match=said):
        refgrad.gradient(model)
    with pytest.raises(BackendError, match=said):
        NUMPY.prepare(model).run(dict(zip(("X", "W"), inputs, strict=False)))


def test_the_filters_of_nhwc_conv_have_their_channels_last() -> None:
    """As ONNX Runtime's transformer optimizer writes them, which is where the operator comes from."""
    image, filters = FLOATS(2, 5, 6, 3), FLOATS(4, 3, 2, 3)
    plain = node_case("Conv", np.moveaxis(image, -1, 1).copy(), filters, kernel_shape=[2, 3]).model
    expected = NUMPY.prepare(plain).run({"X": np.moveaxis(image, -1, 1).copy(), "W": filters})
    one = case("NhwcConv", image, np.moveaxis(filters, 1, -1).copy(), kernel_shape=[2, 3])
    [wanted], [got] = expected.values(), NUMPY.prepare(one.model).run(one.feeds).values()
    np.testing.assert_allclose(np.moveaxis(got, -1, 1), wanted, rtol=1e-5, atol=1e-6)
