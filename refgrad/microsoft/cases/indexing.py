"""Cases of ONNX Runtime's operators that take elements by their indices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from refgrad.conformance.case import SHAPES, Case, Feeds, Recipe
from refgrad.microsoft.cases import array, case, drawer

PLACES: tuple[list[Any], ...] = ([[0, 1], [-1, 2]], [[2], [0]], [[[1, 0]], [[0, 3]]], [1, 2], [[]])


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    floats = drawer()
    for shapes in SHAPES:
        for axis in (0, 1):
            yield case("ShrunkenGather", floats(4, 5), np.array([2, 0, 2]), shapes=shapes, axis=axis)
        yield case("ShrunkenGather", floats(2, 4, 3), np.array([2, 0, 2]), shapes=shapes, axis=1)
        indices = np.array([4, 0, 3])
        for width in (2, 0):
            yield case("PadAndUnflatten", floats(3, width), indices, np.array([2, 3]), shapes=shapes)
        yield case("FlattenAndUnpad", floats(2, 3, 2), indices, shapes=shapes, outputs=2)
        for places in PLACES:
            for kind in (np.int64, np.int32):
                yield case("GatherND", floats(3, 4, 2), np.array(places, kind), shapes=shapes)
        yield case("GatherND", floats(3, 4), np.array([[1], [1]]), shapes=shapes, constant=["indices"])
        yield case("GatherND", floats(3), np.zeros((0, 1), np.int64), shapes=shapes)
        yield case("Unique", array([2.0, 1.0, 0.5, 3.0]), shapes=shapes, outputs=3)
        yield case("Unique", floats(0), shapes=shapes, outputs=3)
        ids = np.array([[1, 0, 3, 1, 2], [4, 4, 4, 0, 2]])  # nothing is repeated: of −∞ there is no difference
        for tokens in (ids, ids[:, :2], ids[:, :0]):
            yield case("NGramRepeatBlock", tokens, floats(2, 5), shapes=shapes, ngram_size=3)
        yield case("NGramRepeatBlock", ids, floats(2, 5), shapes=shapes, ngram_size=2, constant=["input_ids"])
        yield from _embeddings(shapes)
        if shapes != "unknown":
            for repeated in ([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4]], [[1, 0, 1, 3, 1], [2, 4, 0, 0, 4]]):
                for size in (2, 3):
                    yield through_softmax(
                        case("NGramRepeatBlock", np.array(repeated), floats(2, 5), shapes=shapes, ngram_size=size)
                    )


def _embeddings(shapes: str) -> Iterator[Case]:
    floats, frequent = drawer(12), np.array(True)
    yield case("TorchEmbedding", floats(4, 3), np.array([[2, 0], [3, 1]]), shapes=shapes)
    yield case("TorchEmbedding", floats(4, 3), np.array([2, 0]), np.array(1), np.array(False), shapes=shapes)
    yield case("TorchEmbedding", floats(4, 3), np.array([3, 1]), None, frequent, shapes=shapes)
    yield case("TorchEmbedding", floats(4, 3), np.zeros((2, 0), np.int64), np.array(-1), shapes=shapes)
    constant = ["indices", "padding_idx", "scale_grad_by_freq"]
    yield case(
        "TorchEmbedding", floats(4, 3), np.array([3, 1]), np.array(2), frequent, shapes=shapes, constant=constant
    )
    words = np.array([[1, 2, 3, 4], [2, 5, 0, 0], [3, 0, 0, 0], [1, 0, 2, 3]], np.int32)
    name, weights = "WordConvEmbedding", (floats(2, 1, 3, 3), floats(2), floats(6, 3))
    yield case(name, words, *weights, shapes=shapes)
    yield case(name, words, *weights, shapes=shapes, constant=["Sequence"])
    settings = {"char_embedding_size": 3, "conv_window_size": 3, "embedding_size": 2}
    yield case(name, words[:, :3], *weights, shapes=shapes, **settings)
    yield case(name, words[:0], *weights, shapes=shapes)


def through_softmax(one: Case) -> Case:
    """The case with Softmax of its output: of −∞ that has a derivative."""
    feeds = "-".join("".join(map(str, row)) for row in one.feeds["input_ids"])
    recipe = Recipe(partial(_softmax_of, one), one.operator, one.opset, one.dtype, one.static)
    return recipe.case(f"{one.name}-{feeds}-Softmax", one.feeds, one.wrt)


def _softmax_of(one: Case) -> tuple[ModelProto, Feeds]:
    model = ModelProto()
    model.CopyFrom(one.model)
    [output] = model.graph.output
    model.graph.node.append(helper.make_node("Softmax", [output.name], ["shares"]))
    output.name = "shares"
    return model, one.feeds
