"""Strategies of ONNX Runtime's operators of matrices of int8 in the orders of cublasLt, with numbers as in `qlinear`."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.microsoft.cases import scalar
from refgrad.microsoft.strategies.qlinear import case, some
from refgrad.protos.domains import MICROSOFT


@strategy("QOrderedMatMul", domain=MICROSOFT)
def qordered_matmul(d: Drawing) -> Case:
    """A scale for all columns or one for each; with and without a bias and an addend."""
    rows, inner, columns = (d.integer(1, 3) for _ in range(3))
    a, b = (d.integers(shape, -6, 6, np.int8) for shape in ((2, rows, inner), (inner, columns)))
    per_column = (columns,) if d.flag() else ()
    addend = d.optional(lambda: d.integers((d.pick(1, 2), rows, columns), -6, 6, np.int8))
    return case(
        d,
        *(a, scalar(9.0), b, np.full(per_column, 11.0, np.float32), scalar(297.0)),
        d.optional(lambda: np.full((columns,), 99.0, np.float32)),
        *((None, None) if addend is None else (addend, scalar(99.0))),
        quantize=some(d, "A", "B"),
        order_A=1,
        order_B=0,
        order_Y=1,
    )


@strategy("QOrderedGelu", domain=MICROSOFT)
def qordered_gelu(d: Drawing) -> Case:
    """Numbers so large that Gelu is the number itself, or 0."""
    x = (2 * d.integers(d.shape(), -4, 3) + 1).astype(np.int8)
    order = d.pick(None, 1, 2)
    return case(d, x, scalar(20.0), scalar(30.0), quantize=some(d, "X"), order_X=order, order_Y=order)


@strategy("QOrderedLayerNormalization", domain=MICROSOFT, ranked=True)
def qordered_layer_normalization(d: Drawing) -> Case:
    """Pairs of different numbers, which are normalized to 1 and −1; with and without an offset."""
    shape = (*d.shape(0, 2, size=3), 2)
    x = d.integers(shape, -5, 5, np.int8)
    x[..., 1] = -x[..., 0] + 12
    offset = d.optional(lambda: np.array([6.0, 9.0], np.float32))
    scale = np.array([9.0, 3.0], np.float32)
    return case(
        d,
        *(x, scalar(20.0), scale, offset, scalar(3.0)),
        quantize=some(d, "X"),
        axis=d.pick(None, -1),
        epsilon=d.pick(None, 0.0625),
    )


@strategy("QOrderedAttention", domain=MICROSOFT, ranked=True)
def qordered_attention(d: Drawing) -> Case:
    """Sequences of one token, which sees itself alone: nothing comes near a middle. With and without a mask."""
    heads, size, taken, batch = d.integer(1, 2), d.integer(1, 2), d.integer(1, 3), d.integer(1, 2)
    width = heads * size
    weights = [d.integers((taken, width), -6, 6, np.int8) for _ in range(3)]
    per_column = (width,) if d.flag() else ()
    quantized = d.flag()
    return case(
        d,
        *(d.integers((batch, 1, taken), -6, 6, np.int8), scalar(9.0)),
        *(scalar(value) for value in (27.0, 27.0, 297.0)),
        *weights,
        *(np.full(per_column, value, np.float32) for value in (1.0, 1.0, 11.0)),
        *[np.zeros(width, np.float32)] * 3,
        *((scalar(2187.0), scalar(0.8)) if quantized else (None, None)),
        *(scalar(297.0 * 4 / 3), d.optional(lambda: np.ones((batch, 1), np.int32))),
        quantize=some(d, "input", "V_weight"),
        order_input=1,
        order_output=1,
        order_weight=0,
        num_heads=heads,
        unidirectional=d.pick(None, 0, 1),
    )


@strategy("QOrderedLongformerAttention", domain=MICROSOFT, ranked=True)
def qordered_longformer_attention(d: Drawing) -> Case:
    """Two tokens, which see each other: what they see is a value or the mean of two, in sevenths of a step."""
    heads, batch = d.integer(1, 2), d.integer(1, 2)
    width = heads * d.integer(1, 2)
    per_column = (3 * width,) if d.flag() else ()
    weights = [d.integers((width, 3 * width), -6, 6, np.int8) for _ in range(2)]
    scale, zeros = np.full(per_column, 1.0, np.float32), np.zeros(3 * width, np.float32)
    return case(
        d,
        *(
            d.integers((batch, 2, width), -6, 6, np.int8),
            scalar(9.0),
            weights[0],
            scale,
            zeros,
            scalar(1.0),
            scalar(27.0),
        ),
        *(np.full((batch, 2), 0.25, np.float16), weights[1], scale, zeros, scalar(27.0)),
        *(d.integers((batch, 2), 0, 1, np.int32), scalar(94.5)),
        quantize=some(d, "input", "weight", "global_weight"),
        num_heads=heads,
        window=1,
        order_input=1,
        order_output=1,
        order_weight=0,
        order_global_weight=0,
    )
