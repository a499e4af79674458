"""Strategies of ONNX Runtime's operators that take elements by their indices."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.extend import strategy
from refgrad.protos.domains import MICROSOFT


@strategy("ShrunkenGather", domain=MICROSOFT)
def shrunken_gather(d: Drawing) -> Case:
    """A vector of indices, some of them more than once."""
    shape = d.shape(1, 3, size=3, empty=False)
    axis = d.integer(0, len(shape) - 1)
    indices = d.integers((d.integer(1, 3),), 0, shape[axis] - 1)
    return d.case(d.floats(shape), indices, axis=axis if axis or d.flag() else None)


@strategy("PadAndUnflatten", "FlattenAndUnpad", domain=MICROSOFT)
def padding(d: Drawing) -> Case:
    """Rows at different positions along two merged axes."""
    sizes = d.integer(1, 3), d.integer(1, 3)
    rest = d.shape(1, 2, size=2)
    places = np.array(d.permutation(sizes[0] * sizes[1])[: d.integer(1, sizes[0] * sizes[1])], np.int64)
    if d.op_type == "PadAndUnflatten":
        return d.case(d.floats((len(places), *rest)), places, np.array(sizes, np.int64))
    return d.case(d.floats((*sizes, *rest)), places, outputs=2)


@strategy("GatherND", domain=MICROSOFT)
def gather_nd(d: Drawing) -> Case:
    """Index tuples for some or all of the axes."""
    shape = d.shape(1, 3, size=3, empty=False)
    length = d.integer(1, len(shape))
    columns = [d.integers(d.shape(0, 2, size=2, empty=False), -n, n - 1) for n in shape[:length]]
    indices = np.stack([np.resize(column, columns[0].shape) for column in columns], -1)
    return d.case(d.floats(shape), indices.astype(d.pick(np.int64, np.int32)), fixed=["indices"])


@strategy("Unique", domain=MICROSOFT, kinks=True)
def unique(d: Drawing) -> Case:
    """Different elements in any order; with kinks, equal ones."""
    return d.case(d.distinct((d.integer(0, 6),)), outputs=3)


@strategy("NGramRepeatBlock", domain=MICROSOFT)
def ngram_repeat_block(d: Drawing) -> Case:
    """Different tokens, so that nothing is repeated: of −∞ there is no difference."""
    vocabulary = d.integer(1, 5)
    rows = [d.permutation(vocabulary)[: d.integer(0, vocabulary)] for _ in range(2)]
    ids = np.array([row[: min(map(len, rows))] for row in rows], np.int64)
    return d.case(ids, d.floats((2, vocabulary)), fixed=["input_ids"], ngram_size=d.integer(2, 4))


@strategy("TorchEmbedding", domain=MICROSOFT)
def torch_embedding(d: Drawing) -> Case:
    """Indices that differ, none of which is the padding: for others the gradient is no derivative."""
    rows, width = d.integer(2, 4), d.integer(1, 3)
    order = d.permutation(rows)
    indices = np.array(order[: d.integer(1, rows - 1)])
    padding = d.optional(lambda: np.array(d.pick(-1, order[-1])))
    scaled = d.optional(lambda: d.bools(()))
    return d.case(d.floats((rows, width)), indices, padding, scaled, fixed=("indices",))


@strategy("WordConvEmbedding", domain=MICROSOFT)
def word_conv_embedding(d: Drawing) -> Case:
    """Words that do not begin with 0."""
    words, width, size, filters, known = (d.integer(1, 3) for _ in range(5))
    sequence = d.integers((words, width + d.integer(0, 2)), 0, known, np.int32)
    sequence[:, 0] = 1
    weights = d.normal((filters, 1, width, size)), d.normal((filters,)), d.normal((known + 1, size))
    return d.case(sequence, *weights, fixed=("Sequence",), embedding_size=d.pick(None, filters))
