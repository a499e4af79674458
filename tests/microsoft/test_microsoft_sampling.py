"""ONNX Runtime's readings of images, inverses, embeddings, transforms and windows: what they refuse, and special forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from checking import assert_second_derivative
from runtime import needs_runtime

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.errors import BackendError, NoGradientError
from refgrad.protos.domains import MICROSOFT

pytestmark = [pytest.mark.stock, pytest.mark.slow]

RANDOM = np.random.default_rng(0)
IMAGE, BOXES = (2, 2, 4, 5), np.array([[0.1, 0.2, 0.8, 0.9], [0.5, -0.3, 1.3, 0.4]], np.float32)
INDICES, SIZE, WORDS = (
    np.array([0, 1], np.int32),
    np.array([3, 2], np.int32),
    np.array([[1, 2, 3], [2, 0, 1]], np.int32),
)


def f(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def made(op_type: str, *inputs: np.ndarray | None, **options: Any) -> Case:
    return node_case(op_type, *inputs, domain=MICROSOFT, opset=1, **options)


def lstm(**changed: Any) -> Case:
    """AttnLSTM of two sequences, with what is changed."""
    inputs: dict[str, Any] = {"X": f(2, 2, 3), "W": f(1, 8, 5), "R": f(1, 8, 2), "B": None, "sequence_lens": None}
    inputs |= {"initial_h": None, "initial_c": None, "P": None, "QW": f(1, 2, 3), "MW": f(1, 2, 3), "V": f(1, 3)}
    inputs |= {"M": f(2, 3, 2)}
    settings = {"hidden_size": 2, "outputs": 3} | {name: value for name, value in changed.items() if name not in inputs}
    return made("AttnLSTM", *(changed.get(name, value) for name, value in inputs.items()), **settings)


def run(case: Case) -> Mapping[str, np.ndarray]:
    return get_backend("numpy").prepare(case.model).run(case.feeds)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (made("CropAndResize", f(*IMAGE), BOXES, INDICES, np.array([0, 2], np.int32)), r"crop_size is \[0, 2\]"),
        (made("CropAndResize", f(*IMAGE), BOXES, INDICES + 1, SIZE), "batch_indices contain 2"),
        (made("CropAndResize", f(*IMAGE), BOXES, INDICES[:1], SIZE), "batch_indices has the shape"),
        (made("CropAndResize", f(*IMAGE), BOXES[:, :3], INDICES, SIZE), "rois has the shape"),
        (made("CropAndResize", f(*IMAGE), BOXES, INDICES, SIZE, mode="cubic"), "mode 'cubic' is not known; there are"),
        (made("GridSample", f(2, 3, 4), f(2, 4, 1)), r"X has the shape \[2, 3, 4\]; it is \[\?, \?, \?, \?\]"),
        (made("GridSample", f(*IMAGE), f(2, 1, 1, 2), mode="cubic"), "mode 'cubic' is not known"),
        (made("GridSample", f(*IMAGE), f(2, 1, 1, 2), padding_mode="none"), "padding_mode 'none' is not known"),
        (made("Inverse", f(2, 3)), "it needs square matrices"),
        (made("Inverse", np.ones((2, 2), np.float32)), "a matrix of X is singular"),
        (made("CDist", f(2, 3), f(2, 4)), "matrices with as many columns"),
        (made("CDist", f(2, 3), f(2, 3), metric="cosine"), "metric 'cosine' is not known"),
        (made("UnfoldTensor", f(2, 3), size=4), "size=4 is not from 1 to 3, the size of axis -1"),
        (made("UnfoldTensor", f(2, 3), size=2, dim=2), "its dim is 2; a tensor of rank 2 has the axes -2 to 1"),
        (made("UnfoldTensor", f(2, 3), size=2, step=0), "step=0 is not 1 or more"),
        (made("TorchEmbedding", f(4, 3), np.array([4])), "indices contain 4"),
        (made("TorchEmbedding", f(4, 3), np.array([1]), np.array([1])), "padding_idx has the shape"),
        (made("WordConvEmbedding", WORDS, f(2, 1, 2, 3), f(2), f(3, 3)), "Sequence contain 3"),
        (made("WordConvEmbedding", WORDS, f(2, 1, 2, 3), f(2), f(4, 2)), "W has the shape"),
        (
            made("WordConvEmbedding", WORDS, f(2, 1, 4, 3), f(2), f(4, 3)),
            "windows of 4 characters do not fit words of 3",
        ),
        (made("WordConvEmbedding", WORDS, f(2, 1, 2, 3), f(2), f(4, 3), embedding_size=3), "embedding_size is 3"),
        (made("Rfft", f(4), onesided=0), "onesided=0 is not covered; there is onesided=1"),
        (made("Irfft", f(1, 2), signal_ndim=1), "two bins or more"),
        (made("Irfft", f(3, 2), signal_ndim=2), "signal_ndim=2 is not covered"),
        (made("ComplexMul", f(2, 3), f(2, 3)), "a complex number has 2 parts in the last axis"),
        (lstm(QW=None), "it needs its inputs QW, MW, V and M"),
        (lstm(W=f(1, 8, 3)), r"W has the shape \[1, 8, 3\]; it is \[1, 8, 5\]"),
        (lstm(sequence_lens=np.array([0, 2], np.int32)), "sequence_lens is .0, 2.; its numbers are from 1 to 2"),
        (lstm(direction="both"), "its direction 'both' is not known"),
        (lstm(activations=["Tanh"]), "it has 1 activations; direction=forward has three"),
        (lstm(hidden_size=3), "hidden_size is 3"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(case: Case, said: str) -> None:
    with pytest.raises(BackendError, match=said):
        run(case)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (made("CropAndResize", f(*IMAGE), BOXES, INDICES, SIZE, mode="cubic"), "its mode 'cubic' is not known"),
        (
            made("GridSample", f(*IMAGE), f(2, 1, 1, 2), mode="cubic"),
            "its mode 'cubic' is not known; there are bilinear",
        ),
        (made("GridSample", f(*IMAGE), f(2, 1, 1, 2), padding_mode="none"), "its padding_mode 'none' is not known"),
        (made("CDist", f(2, 3), f(2, 3), metric="cosine"), "its metric 'cosine' is not known; there are sqeuclidean"),
        (made("UnfoldTensor", f(2, 3), size=2, shapes="unknown"), "the rank of its input input is unknown"),
        (made("UnfoldTensor", f(2, 3), size=2, step=0), "step=0 is not 1 or more"),
        (made("WordConvEmbedding", WORDS[None], f(2, 1, 2, 3), f(2), f(4, 3)), "its Sequence is of rank 3"),
        (made("Rfft", f(4), normalized=1), "normalized=1 is not covered; there is normalized=0"),
        (lstm(QW=None), "it needs its inputs QW, MW, V and M"),
        (lstm(activations=["Softmax"] * 3), "its activation 'Softmax' is not known; there are affine"),
        (lstm(activations=["Affine", "Tanh", "Tanh"]), "its activation Affine needs an activation_alpha"),
        (lstm(direction="both"), "its direction 'both' is not known; there are forward"),
    ],
    ids=str,
)
def test_a_form_that_is_not_covered_is_refused_with_the_reason(case: Case, said: str) -> None:
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(case.model)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_embedding_keeps_its_padding_and_may_count_its_indices(scaled: bool) -> None:
    """As in torch: the row of the padding gets no gradient, and each of the others over how often it was read."""
    case = made("TorchEmbedding", f(4, 2), np.array([[1, 2, 1], [3, 2, 1]]), np.array(2), np.array(scaled))
    gradient = refgrad.gradient(case.model)
    d_Y = f(2, 3, 2)
    found = get_backend("numpy").prepare(gradient).run({**case.feeds, "Y_grad": d_Y})["weight_grad"]
    total = d_Y[0, 0] + d_Y[0, 2] + d_Y[1, 2]
    expected = np.stack([np.zeros(2), total / 3 if scaled else total, np.zeros(2), d_Y[1, 0]])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_the_distance_of_a_point_from_itself_has_the_gradient_0() -> None:
    case = made("CDist", np.ones((2, 3), np.float32), np.ones((1, 3), np.float32), metric="euclidean")
    results = get_backend("numpy").prepare(refgrad.gradient(case.model)).run({**case.feeds, "C_grad": f(2, 1)})
    assert all(not value.any() for value in results.values())


def test_a_word_that_begins_with_0_has_the_embedding_0() -> None:
    case = made("WordConvEmbedding", np.array([[0, 1, 2], [1, 0, 2]], np.int32), f(2, 1, 2, 3), f(2), f(3, 3))
    for model in (case.model, refgrad.lower(case.model)):
        (Y,) = get_backend("numpy").prepare(model).run(case.feeds).values()
        assert not Y[0].any()
        assert Y[1].all()


@needs_runtime
@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_an_inverse_of_another_type_is_that_of_onnx_runtime(kind: type) -> None:
    case = made("Inverse", (f(2, 3, 3) + 3 * np.eye(3)).astype(kind))
    expected = get_backend("ort-cpu").prepare(case.model).run(case.feeds)["Y"]
    for model in (case.model, refgrad.lower(case.model)):
        got = get_backend("numpy").prepare(model).run(case.feeds)["Y"]
        assert got.dtype == kind
        np.testing.assert_allclose(
            got.astype(float), expected.astype(float), rtol=20 * np.finfo(kind).eps, atol=np.finfo(kind).eps
        )


@pytest.mark.parametrize(
    "case",
    [
        made("Inverse", f(3, 3) + 3 * np.eye(3, dtype=np.float32)),
        made("CDist", f(2, 3), f(2, 3), metric="euclidean"),
        made("CropAndResize", f(*IMAGE), BOXES, INDICES, SIZE),
        made("WordConvEmbedding", WORDS, f(2, 1, 2, 3), f(2), f(4, 3)),
        made("Irfft", f(3, 2), signal_ndim=1),
        made("UnfoldTensor", f(2, 5), size=3, step=2),
        lstm(),
    ],
    ids=str,
)
def test_second_derivatives_agree_with_differences(case: Case) -> None:
    assert_second_derivative(case, directions=1)
