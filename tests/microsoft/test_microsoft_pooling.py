"""ONNX Runtime's poolings beyond what all operators are asked: through integers, what is refused, second derivatives."""

from __future__ import annotations

import numpy as np
import pytest
from checking import assert_second_derivative
from onnx import ModelProto, NodeProto, helper

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import node_case
from refgrad.errors import BackendError, NoGradientError
from refgrad.microsoft.cases import case
from refgrad.microsoft.cases.pooling import POOLS, apart, between_floats

pytestmark = [pytest.mark.stock, pytest.mark.slow]

NUMPY = get_backend("numpy")


@pytest.mark.parametrize("quantization", ["straight-through", "clipped"])
@pytest.mark.parametrize(("image", "window"), POOLS, ids=str)
def test_where_rounding_has_a_derivative_so_has_a_maximum_of_integers(
    image: tuple[int, ...], window: dict[str, object], quantization: str
) -> None:
    """It is that of MaxPool: rounding keeps the order of numbers that are a step apart."""
    one = between_floats(image, np.uint8, "static", **window)
    rank = len(image) + 1
    plain = ModelProto()
    plain.CopyFrom(one.model)
    pool = plain.graph.node[1]
    pool.op_type, pool.domain = "MaxPool", ""
    pool.input[0], pool.output[0] = "first", "pooled"
    first = helper.make_node("Transpose", ["x"], ["first"], perm=[0, rank - 1, *range(1, rank - 1)])
    last = helper.make_node("Transpose", ["pooled"], ["y"], perm=[0, *range(2, rank), 1])
    nodes = [first, NodeProto.FromString(pool.SerializeToString()), last]
    del plain.graph.node[:]
    plain.graph.node.extend(nodes)
    shape = NUMPY.prepare(one.model).run(one.feeds)["y"].shape
    feeds = dict(one.feeds) | {"y_grad": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    found = NUMPY.prepare(refgrad.gradient(one.model, wrt=["x"], quantization=quantization)).run(feeds)
    expected = NUMPY.prepare(refgrad.gradient(plain, wrt=["x"])).run(feeds)
    np.testing.assert_allclose(found["x_grad"], expected["x_grad"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 2, 5), (1, 1, 3, 4), (1, 2, 2, 2, 3)])
def test_all_of_a_mask_leaves_a_plain_maximum(shape: tuple[int, ...]) -> None:
    x, rank = apart(*shape), len(shape) - 2
    mask = np.ones((1, 1, *shape[2:]), np.int32)
    one = case("MaxpoolWithMask", x, mask, kernel_shape=[2] * rank)
    plain = node_case("MaxPool", x, kernel_shape=[2] * rank)
    np.testing.assert_array_equal(*(NUMPY.prepare(c.model).run(c.feeds)["Y"] for c in (one, plain)))


def test_second_derivative() -> None:
    mask = np.array([[[1, 1, 0, 1, 1]]], np.int32)
    assert_second_derivative(case("MaxpoolWithMask", apart(2, 2, 5), mask, kernel_shape=[2], pads=[1, 0]))


@pytest.mark.parametrize("shape", [(1, 2, 3, 3), (2, 1, 3, 3), (1, 1, 3, 4)])
def test_a_mask_that_is_not_one_for_all_images_and_channels_is_refused(shape: tuple[int, ...]) -> None:
    """ONNX Runtime reads one of several planes at places that are not theirs."""
    one = case("MaxpoolWithMask", apart(2, 2, 3, 3), np.ones(shape, np.int32), kernel_shape=[2, 2])
    with pytest.raises(BackendError, match=r"M has the shape .*; \[1, 1, 3, 3\] is needed"):
        NUMPY.prepare(one.model).run(one.feeds)
    gradient = NUMPY.prepare(refgrad.gradient(one.model))
    with pytest.raises(BackendError, match="Reshape"):
        gradient.run(dict(one.feeds) | {"Y_grad": np.ones((2, 2, 2, 2), np.float32)})


def test_a_pool_without_a_kernel_is_refused() -> None:
    one = case("MaxpoolWithMask", apart(1, 1, 3), np.ones((1, 1, 3), np.int32), kernel_shape=[2])
    del one.node.attribute[:]
    with pytest.raises(NoGradientError, match="it has no kernel_shape: give it one"):
        refgrad.gradient(one.model)
