"""Cases of ONNX Runtime's convolution with an activation."""

from __future__ import annotations

from collections.abc import Iterator

from refgrad.conformance.case import SHAPES, Case
from refgrad.conformance.cases.microsoft import case, drawer
from refgrad.conformance.cases.microsoft.activation import ACTIVATIONS


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
