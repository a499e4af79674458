"""ONNX Runtime's operators that take elements by their indices, beyond what all operators are asked."""

from __future__ import annotations

import numpy as np
import pytest
from checking import assert_gradient
from onnx import parser
from runtime import needs_runtime

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.errors import BackendError, NoGradientError
from refgrad.microsoft.cases import case, drawer

pytestmark = [pytest.mark.stock, pytest.mark.slow]

FLOATS = drawer(11)
NUMPY = get_backend("numpy")


def blocked(ids: list[list[int]], ngram_size: int) -> Case:
    """Shares of the tokens that are left."""
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (int64[b,s] ids, float[b,v] scores) => (float[b,v] y) {{
            left = com.microsoft.NGramRepeatBlock <ngram_size = {ngram_size}> (ids, scores)  y = Softmax (left)
        }}"""
    )
    tokens = np.array(ids, np.int64).reshape(len(ids), -1)
    return Case("blocked", model, {"ids": tokens, "scores": FLOATS(len(ids), 5)})


REPEATED = [
    ([[1, 2, 1]], 2, [2]),
    ([[1, 2, 3, 1, 2]], 3, [3]),
    ([[1, 2]], 1, [1, 2]),
    ([[1, 1]], 2, [1]),
    ([[1, 2, 1, 3, 1]], 2, [2, 3]),
    ([[1, 9, 1]], 3, []),
    ([[]], 1, []),
    ([[1, 2]], 4, []),
]


@pytest.mark.parametrize(("ids", "ngram_size", "banned"), REPEATED, ids=str)
def test_a_token_that_would_repeat_has_no_share_and_no_gradient(
    ids: list[list[int]], ngram_size: int, banned: list[int]
) -> None:
    one = blocked(ids, ngram_size)
    y = NUMPY.prepare(one.model).run(one.feeds)["y"]
    assert np.flatnonzero(y[0] == 0).tolist() == banned
    assert_gradient(one)
    gradient = NUMPY.prepare(refgrad.gradient(one.model)).run(dict(one.feeds) | {"y_grad": FLOATS(1, 5)})
    assert np.flatnonzero(gradient["scores_grad"][0] == 0).tolist() == banned


@needs_runtime
@pytest.mark.parametrize(("ids", "ngram_size", "banned"), REPEATED, ids=str)
def test_tokens_are_blocked_as_by_onnx_runtime(ids: list[list[int]], ngram_size: int, banned: list[int]) -> None:
    one = blocked([*ids, *ids], ngram_size)
    expected = get_backend("ort-cpu").prepare(one.model).run(one.feeds)["y"]
    np.testing.assert_allclose(NUMPY.prepare(one.model).run(one.feeds)["y"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (blocked([[1, 9, 1]], 2), "input_ids contain 9, which is out of bounds for 5 elements"),
        (case("NGramRepeatBlock", np.array([[1]]), FLOATS(2, 5), ngram_size=1), "with a row for each sample"),
        (case("GatherND", FLOATS(2), np.array([[0, 0]])), r"indices \[1, 2\] do not fit data \[2\]"),
        (case("GatherND", FLOATS(2), np.array([[2]])), "2, which is out of bounds for 2 elements"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(one: Case, said: str) -> None:
    with pytest.raises(BackendError, match=said):
        NUMPY.prepare(one.model).run(one.feeds)


@pytest.mark.parametrize(("size", "said"), [(0, "is 0: it is at least 1"), (2**40, "1099511627776: up to 256 tokens")])
def test_ngrams_of_no_tokens_and_of_too_many_are_refused(size: int, said: str) -> None:
    with pytest.raises(NoGradientError, match=f"its ngram_size {said}" if not size else said):
        refgrad.gradient(blocked([[1]], size).model)


@pytest.mark.parametrize(("size", "index"), [(3, 3), (3, -4), (0, 0)])
def test_an_index_that_is_out_of_range_has_no_gradient_at_another_place(size: int, index: int) -> None:
    """A constant one too: the gradient fails when it runs, as the Gather does, or has no element at all."""
    feeds = {"data": FLOATS(size, 2)}
    one = node_case("Gather", feeds["data"], np.array(index), constant=("indices",), opset=21)
    gradient = NUMPY.prepare(refgrad.gradient(one.model))
    with pytest.raises(BackendError, match="out of bounds"):
        NUMPY.prepare(one.model).run(feeds)
    seeds = {"output_grad": FLOATS(2)}
    if not size:
        assert gradient.run(feeds | seeds)["data_grad"].shape == (0, 2)
        return
    with pytest.raises(BackendError, match="out of bounds"):
        gradient.run(feeds | seeds)


@pytest.mark.parametrize("numbers", [[2, 1, 1, 3, 4, 3], [1, 1, 1], []])
def test_the_gradient_of_unique_goes_to_the_first_of_equal_elements(numbers: list[float]) -> None:
    x = np.array(numbers, np.float32)
    one = case("Unique", x, outputs=3)
    results = NUMPY.prepare(one.model).run(one.feeds)
    first = [numbers.index(n) for n in dict.fromkeys(numbers)]
    np.testing.assert_array_equal(results["y"], x[first])
    np.testing.assert_array_equal(results["y"][results["idx"]], x)
    cotangent = FLOATS(len(first))
    gradient = NUMPY.prepare(refgrad.gradient(one.model)).run({"x": x, "y_grad": cotangent})
    expected = np.zeros(len(x), np.float32)
    expected[first] = cotangent
    np.testing.assert_array_equal(gradient["x_grad"], expected)
