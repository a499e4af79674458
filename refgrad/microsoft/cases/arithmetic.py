"""Cases of ONNX Runtime's sums."""

from __future__ import annotations

from collections.abc import Iterator

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import case, drawer


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    floats = drawer()
    for shapes in SHAPES:
        x = floats(2, 3)
        yield case("ScaledSum", x, floats(2, 3), shapes=shapes, scale_0=0.5, scale_1=-2.0)
        yield case("ScaledSum", x, floats(2, 3), floats(2, 3), shapes=shapes, scale_0=0.5, scale_1=-2.0, scale_2=3.0)
        yield case("ScaledSum", x, floats(2, 3), floats(2, 3), shapes=shapes, scale_0=0.5, scale_1=-2.0)
        x = floats(2, 3, 4)
        yield case("BiasAdd", x, floats(4), floats(2, 3, 4), shapes=shapes)
        yield case("BiasAdd", floats(0, 3, 4), floats(4), floats(0, 3, 4), shapes=shapes)
        yield case("GatedAdd", x, floats(2, 3, 4), floats(2, 3, 1), shapes=shapes)
        yield case("GatedAdd", x, floats(2, 3, 4), floats(2, 3, 5), floats(5, 1), shapes=shapes)
        yield case("GatedAdd", floats(4), floats(4), floats(1), shapes=shapes)
        yield case("GatedAdd", floats(0, 4), floats(0, 4), floats(0, 1), shapes=shapes)
        if shapes != "unknown":
            yield from _mixes(shapes)


def _mixes(shapes: str) -> Iterator[Case]:
    """Cases of hyper-connections: the streams grouped and flattened, with gates of every shape."""
    floats = drawer(1)
    pre, post = "HyperConnectionPreMix", "HyperConnectionPostMix"
    grouped, flattened, block = floats(2, 1, 3, 4), floats(2, 1, 12), floats(2, 1, 4)
    for gates in ((2, 1, 3), (2, 1, 3, 1), (2, 1, 3, 4)):
        yield case(pre, grouped, floats(*gates), shapes=shapes)
        yield case(pre, flattened, floats(*gates), shapes=shapes, num_branches=3, reduction_scale=0.5)
        yield case(post, grouped, block, floats(*gates), shapes=shapes)
        yield case(post, flattened, block, floats(*gates), floats(2, 1, 3, 3), shapes=shapes, num_branches=3)
    yield case(pre, flattened, floats(2, 1, 12), shapes=shapes, num_branches=3)
    yield case(pre, floats(6), floats(3), shapes=shapes, num_branches=3)
    yield case(pre, floats(0, 3, 4), floats(0, 3), shapes=shapes)
    yield case(post, floats(6), floats(2), floats(3), shapes=shapes, num_branches=3)
    yield case(post, grouped, block, floats(2, 1, 3), floats(2, 1, 3, 3), shapes=shapes)
    yield case(post, floats(0, 3, 4), floats(0, 4), floats(0, 3), floats(0, 3, 3), shapes=shapes)
