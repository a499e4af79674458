"""Cases of ONNX Runtime's convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import case, drawer
from refgrad.microsoft.cases.activation import ACTIVATIONS


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    floats = drawer(1)
    for shapes in SHAPES:
        for activation, parameters in ACTIVATIONS if shapes == "static" else ACTIVATIONS[:2]:
            named = {} if activation is None else {"activation": activation}
            given = {} if parameters is None else {"activation_params": parameters}
            image, filters = floats(1, 2, 5, 5), floats(3, 2, 3, 3)
            size = {"kernel_shape": [3, 3]}  # without it the rank has to be known
            yield case("FusedConv", image, filters, floats(3), shapes=shapes, **size, **named, **given)
        window = {"strides": [2, 1], "pads": [1, 0, 1, 0], "group": 2, "activation": "Relu", "kernel_shape": [3, 2]}
        image, filters = floats(1, 4, 5, 4), floats(2, 2, 3, 2)
        yield case("FusedConv", image, filters, None, floats(1, 2, 3, 3), shapes=shapes, **window)
        for op_type in ("NhwcConv", "NhwcFusedConv"):
            yield from _channels_last(op_type, shapes)
        yield from _dynamic_pads(shapes)


def _channels_last(op_type: str, shapes: str) -> Iterator[Case]:
    floats = drawer(2)

    def weights(count: int, channels: int, *kernel: int) -> np.ndarray:
        made = floats(count, channels, *kernel)
        return np.ascontiguousarray(np.moveaxis(made, 1, -1)) if op_type == "NhwcConv" else made

    image, filters, size = floats(2, 4, 5, 3), weights(4, 3, 2, 3), {"kernel_shape": [2, 3]}
    yield case(op_type, image, filters, shapes=shapes, **size)
    yield case(op_type, image, filters, floats(4), shapes=shapes, **size, pads=[1, 0, 2, 1], strides=[2, 1])
    groups = floats(2, 5, 5, 4), weights(6, 2, 2, 2)
    yield case(op_type, *groups, floats(6), shapes=shapes, kernel_shape=[2, 2], group=2, dilations=[2, 1])
    for auto_pad in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield case(op_type, image, filters, shapes=shapes, **size, auto_pad=auto_pad, strides=[2, 2])
    yield case(op_type, floats(1, 5, 2), weights(3, 2, 2), shapes=shapes, kernel_shape=[2])
    images = floats(1, 2, 3, 2, 2), weights(3, 2, 1, 2, 2), floats(3)
    yield case(op_type, *images, shapes=shapes, kernel_shape=[1, 2, 2])
    yield case(op_type, floats(0, 4, 5, 3), filters, shapes=shapes, **size)
    if shapes != "unknown":
        yield case(op_type, image, filters, shapes=shapes)
    if op_type == "NhwcFusedConv":
        fused: dict[str, Any] = size | {"activation": "LeakyRelu", "activation_params": [0.2]}
        yield case(op_type, image, filters, floats(4), floats(2, 3, 3, 4), shapes=shapes, **fused)
        yield case(op_type, image, filters, None, floats(2, 3, 3, 4), shapes=shapes, **size, activation="Tanh")


def _dynamic_pads(shapes: str) -> Iterator[Case]:
    floats = drawer(3)
    op_type, image, filters, bias = "ConvTransposeWithDynamicPads", floats(2, 2, 3, 4), floats(2, 3, 2, 3), floats(3)
    pads, size = np.array([1, 0, 0, 2]), {"kernel_shape": [2, 3]}
    yield case(op_type, image, filters, pads, bias, shapes=shapes, **size)
    yield case(op_type, image, filters, pads, shapes=shapes, **size, strides=[2, 3], output_padding=[1, 2])
    yield case(op_type, image, filters, pads, shapes=shapes, **size, dilations=[2, 1], auto_pad="VALID")
    yield case(op_type, image, filters, pads, shapes=shapes, constant=["Pads"], **size)
    yield case(op_type, image, filters, None, bias, shapes=shapes, **size)
    yield case(op_type, floats(1, 4, 3), floats(4, 2, 2), np.array([1, 1]), shapes=shapes, kernel_shape=[2], group=2)
    for auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        yield case(op_type, image, filters, pads, bias, shapes=shapes, **size, auto_pad=auto_pad, strides=[2, 2])
    if shapes != "unknown":
        yield case(op_type, image, filters, pads, shapes=shapes)
