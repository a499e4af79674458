"""ONNX Runtime's packed sequences: bad inputs, and that they are the padded ones without the padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checking import assert_second_derivative
from numpy_graphs import undeclared

from refgrad.backends import get_backend
from refgrad.conformance.case import node_case
from refgrad.errors import BackendError
from refgrad.microsoft.cases import packed_attention
from refgrad.protos.domains import MICROSOFT

pytestmark = [pytest.mark.stock, pytest.mark.slow]

NUMPY = get_backend("numpy")
RNG = np.random.default_rng(0)
CASES = list(packed_attention.cases())
BATCH, LENGTH, HEADS = 3, 4, 2
COUNT, OFFSET, ENDS = packed_attention.COUNT, packed_attention.OFFSET, packed_attention.ENDS


def f(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def run(op_type: str, *inputs: np.ndarray | None, **options: Any) -> list[np.ndarray]:
    case = node_case(op_type, *inputs, domain=MICROSOFT, opset=1, **options)
    return list(NUMPY.prepare(case.model).run(case.feeds).values())


TOKENS = {"x": f(7, 4), "o": OFFSET, "e": ENDS}
BAD: list[tuple[str, dict[str, np.ndarray], str]] = [
    ("RemovePadding (x, n)", {"x": f(2, 3, 4), "n": np.array([1, 4], np.int32)}, "has 4; a sequence has 0 to 3 tokens"),
    ("RemovePadding (x, n)", {"x": f(2, 3, 4), "n": np.array([1], np.int32)}, r"has the shape \[1\]; \[2\] is needed"),
    (
        "RestorePadding (x, o)",
        {"x": f(7, 4), "o": OFFSET + 1},
        "token_offset contain 12, which is out of bounds for 12",
    ),
    ("RestorePadding (x, o)", {"x": f(13, 4), "o": OFFSET}, "of no more tokens than places"),
    ("PackedMultiHeadAttention <num_heads = 3> (x, x, x, , o, e)", TOKENS, "num_heads=3 does not divide"),
    (
        "PackedMultiHeadAttention <num_heads = 2> (x, , , , o, e)",
        TOKENS,
        r"query has the shape \[7, 4\]; it is \[\?, 2, 3, \?\]",
    ),
    (
        "PackedMultiHeadAttention <num_heads = 2> (x, x, x, , o, e)",
        TOKENS | {"e": ENDS[:3]},
        "cumulative_sequence_length has",
    ),
    (
        "PackedMultiHeadAttention <num_heads = 2> (x, x, x, , o, e)",
        TOKENS | {"e": np.array([0, 1, 3, 8], np.int32)},
        r"is \[0, 1, 3, 8\]; it goes from 0 to the 7 tokens in steps of 0 to 4",
    ),
    (
        "PackedMultiHeadAttention <num_heads = 2> (x, x, x, , o, e)",
        TOKENS | {"o": OFFSET[::-1].copy()},
        "token_offset begins with other places than",
    ),
]


@pytest.mark.parametrize(("body", "feeds", "said"), BAD, ids=[f"{body}-{said}"[:110] for body, _, said in BAD])
def test_a_bad_input_is_refused_by_name(body: str, feeds: dict[str, np.ndarray], said: str) -> None:
    outputs = ["y", "a", "b", "c"] if body.startswith("Remove") else ["y"]
    with pytest.raises(BackendError, match=said):
        NUMPY.prepare(undeclared(f"{', '.join(outputs)} = com.microsoft.{body}", feeds, outputs, 21)).run(feeds)


def test_restored_is_what_was_removed() -> None:
    x = f(BATCH, LENGTH, 3)
    tokens, offset, ends, longest = run("RemovePadding", x, COUNT, outputs=4)
    np.testing.assert_array_equal(offset, OFFSET)
    np.testing.assert_array_equal(ends, ENDS)
    np.testing.assert_array_equal(longest, [4])
    real = np.arange(LENGTH) < COUNT[:, None]
    np.testing.assert_array_equal(tokens, x[real])
    [padded] = run("RestorePadding", tokens, offset)
    np.testing.assert_array_equal(padded, np.where(real[..., None], x, 0))


def test_packed_attention_is_attention_without_the_padding() -> None:
    """A padded sequence whose padding is masked has the same results where its tokens are."""
    x, weights, bias, offset = f(BATCH, LENGTH, 5), f(5, 12), f(12), f(1, HEADS, LENGTH, LENGTH)
    real = np.arange(LENGTH) < COUNT[:, None]
    [padded] = run("Attention", x, weights, bias, COUNT, None, offset, num_heads=HEADS)
    [packed] = run("PackedAttention", x[real], weights, bias, OFFSET, ENDS, offset, num_heads=HEADS)
    np.testing.assert_allclose(packed, padded[real], rtol=1e-5, atol=1e-5)


def test_packed_multi_head_attention_is_multi_head_attention_without_the_padding() -> None:
    three, bias = [f(BATCH, LENGTH, 4) for _ in range(3)], f(12)
    real = np.arange(LENGTH) < COUNT[:, None]
    [padded] = run("MultiHeadAttention", *three, bias, COUNT, num_heads=HEADS)
    [packed] = run("PackedMultiHeadAttention", *(x[real] for x in three), bias, OFFSET, ENDS, num_heads=HEADS)
    np.testing.assert_allclose(packed, padded[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted({case.operator.removeprefix("com.microsoft.") for case in CASES}))
def test_the_second_derivative(name: str) -> None:
    assert_second_derivative(next(case for case in CASES if case.operator == f"com.microsoft.{name}"), directions=1)
