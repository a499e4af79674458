"""Cases of convolutions: one to three spatial axes, groups, strides, dilations, pads, with and without a bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case

NEWEST = 21  # the last opset that every runtime under test knows

Table = tuple[tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]], ...]

# shape of X, shape of W, length of B or 0, attributes
CONV: Table = (
    ((2, 3, 7), (4, 3, 3), 4, {}),
    ((2, 3, 8), (4, 3, 3), 4, {"strides": [2], "pads": [1, 1]}),
    ((2, 3, 8), (4, 3, 3), 0, {"strides": [2], "pads": [1, 0]}),
    ((2, 3, 8), (4, 3, 3), 0, {"strides": [3], "pads": [0, 2], "dilations": [2]}),
    ((2, 3, 9, 8), (4, 3, 3, 2), 4, {"strides": [3, 2], "pads": [0, 2, 1, 1], "dilations": [2, 1]}),
    ((2, 4, 9, 8), (6, 2, 3, 2), 6, {"strides": [3, 2], "pads": [0, 2, 1, 1], "dilations": [1, 3], "group": 2}),
    ((2, 4, 5, 5), (4, 1, 3, 3), 0, {"pads": [1, 1, 1, 1], "group": 4}),
    ((2, 4, 5, 5), (8, 1, 3, 3), 8, {"group": 4, "strides": [2, 2]}),
    ((2, 4, 5, 6), (4, 1, 3, 3), 0, {"auto_pad": "SAME_UPPER", "group": 4, "strides": [2, 2]}),
    ((2, 4, 5, 6), (4, 1, 3, 2), 0, {"auto_pad": "SAME_LOWER", "group": 4, "strides": [2, 2]}),
    ((2, 4, 5, 6), (4, 4, 3, 2), 0, {"auto_pad": "SAME_LOWER"}),
    ((2, 4, 5, 6), (3, 4, 3, 2), 0, {"auto_pad": "VALID", "strides": [2, 2]}),
    ((2, 4, 5, 6), (3, 4, 1, 1), 3, {}),
    ((2, 4, 5, 6), (3, 4, 1, 1), 0, {"strides": [3, 2]}),
    ((2, 4, 5, 6), (3, 4, 1, 1), 0, {"auto_pad": "SAME_UPPER", "strides": [3, 2]}),
    ((0, 4, 5, 6), (3, 4, 1, 1), 0, {"strides": [3, 2]}),
    ((0, 4, 5, 6), (6, 2, 1, 1), 0, {"group": 2}),
    ((1, 2, 4, 5, 4), (3, 2, 2, 2, 2), 3, {"strides": [2, 1, 2]}),
)
CONV_TRANSPOSE: Table = (
    ((2, 3, 7), (3, 4, 3), 4, {}),
    ((2, 3, 5), (3, 4, 3), 4, {"strides": [2], "pads": [1, 1]}),
    ((2, 3, 5), (3, 4, 3), 4, {"strides": [2], "pads": [1, 0], "output_padding": [1]}),
    ((2, 3, 5), (3, 4, 3), 0, {"strides": [1], "dilations": [3], "output_padding": [2]}),
    (
        (2, 3, 5, 4),
        (3, 4, 3, 2),
        0,
        {"strides": [3, 2], "dilations": [2, 1], "pads": [1, 0, 2, 1], "output_padding": [2, 1]},
    ),
    ((2, 4, 5, 4), (4, 3, 3, 2), 6, {"group": 2, "strides": [2, 2]}),
    ((2, 4, 5, 4), (4, 1, 3, 3), 0, {"group": 4}),
    ((2, 3, 5, 4), (3, 2, 3, 3), 0, {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((2, 3, 5, 4), (3, 2, 3, 3), 0, {"auto_pad": "SAME_LOWER", "strides": [2, 1]}),
    ((2, 3, 5, 4), (3, 2, 3, 3), 0, {"auto_pad": "VALID", "strides": [2, 1]}),
    ((1, 2, 3, 2, 3), (2, 2, 2, 2, 2), 2, {"strides": [2, 1, 2]}),
)
# shape of the input, image_shape, block_shape, attributes
COL2IM: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 12, 12), (4, 5), (2, 2), {}),
    ((1, 6, 4), (5, 4), (3, 2), {"strides": [2, 2], "pads": [0, 0, 1, 1]}),
    ((2, 8, 9), (5, 5), (2, 2), {"dilations": [2, 2]}),
    ((1, 8, 15), (4, 3), (2, 2), {"pads": [1, 0, 1, 1]}),
    ((0, 4, 9), (4, 4), (2, 2), {}),
)


def cases() -> Iterator[Case]:
    """Every attribute, on static, symbolic and unknown shapes."""
    for shapes in SHAPES:
        for op_type, table in (("Conv", CONV), ("ConvTranspose", CONV_TRANSPOSE)):
            for x, w, bias, attributes in table:
                given = attributes if shapes == "static" else {"kernel_shape": list(w[2:]), **attributes}
                yield _case(op_type, x, w, bias, shapes=shapes, **given)
    # Without kernel_shape the size of the kernel is known at run time only.
    yield _case("Conv", (2, 3, 8), (4, 3, 3), 0, shapes="symbolic", strides=[2], pads=[1, 0])
    yield _case("Conv", (2, 3, 8, 9), (4, 3, 3, 2), 0, shapes="symbolic", auto_pad="SAME_LOWER", strides=[2, 3])
    holes: dict[str, Any] = {"auto_pad": "SAME_UPPER", "strides": [2, 3], "dilations": [2, 1]}
    yield _case("Conv", (2, 3, 8, 9), (4, 3, 3, 2), 0, shapes="symbolic", **holes)
    yield _case(
        "ConvTranspose", (2, 3, 5, 4), (3, 2, 3, 3), 0, shapes="symbolic", auto_pad="SAME_UPPER", strides=[2, 2]
    )
    sparse: dict[str, Any] = {"strides": [2, 1], "dilations": [2, 3], "output_padding": [1, 0]}
    yield _case("ConvTranspose", (2, 3, 5, 4), (3, 2, 3, 2), 0, shapes="symbolic", auto_pad="SAME_LOWER", **sparse)
    # Pads by the size of the result, which may be smaller or larger than what the windows cover.
    for output_shape, auto_pad in (
        ([10, 8], "NOTSET"),
        ([10, 9], "SAME_UPPER"),
        ([9, 7], "SAME_LOWER"),
        ([15, 9], "VALID"),
    ):
        for shapes in SHAPES:
            asked: dict[str, Any] = {"output_shape": output_shape, "auto_pad": auto_pad, "output_padding": [0, 1]}
            yield _case("ConvTranspose", (2, 3, 5, 4), (3, 2, 3, 3), 2, shapes=shapes, strides=[2, 2], **asked)
    # The padding at the end covers some of the output_padding.
    yield _case("ConvTranspose", (1, 2, 3), (2, 1, 2), 0, pads=[2, 1], dilations=[2], output_padding=[1])
    yield _case("ConvTranspose", (1, 2, 3), (2, 1, 2), 0, pads=[0, 1], dilations=[3], output_padding=[2])
    yield _case("Conv", (2, 3, 5, 4), (4, 3, 3, 3), 4, opset=16, constant=("W", "B"), pads=[1, 1, 1, 1])
    # The weight is known, the sizes of the batch and of the image are not; and images with many windows.
    known: dict[str, Any] = {"constant": ("W",), "wrt": ("X", "W"), "pads": [0, 2, 1, 1], "dilations": [1, 3]}
    yield _case("Conv", (2, 3, 9, 8), (4, 3, 3, 2), 0, shapes="symbolic", strides=[3, 2], **known)
    yield _case("Conv", (2, 4, 9, 8), (6, 2, 3, 2), 0, shapes="symbolic", group=2, **known)
    yield _case("Conv", (2, 4, 9, 8), (6, 2, 3, 2), 0, group=2, auto_pad="SAME_UPPER", strides=[2, 3])
    yield _case("Conv", (1, 2, 11, 12), (3, 2, 3, 3), 3, pads=[1, 1, 1, 1])
    yield _case("Conv", (1, 4, 11, 12), (6, 2, 3, 3), 0, group=2)
    for x, image, block, attributes in COL2IM:
        arrays = np.random.default_rng(0).standard_normal(x).astype(np.float32), np.array(image), np.array(block)
        for shapes in ("static", "symbolic"):
            for constant in (("image_shape", "block_shape"), ("block_shape",), ()):
                yield node_case("Col2Im", *arrays, opset=NEWEST, constant=constant, shapes=shapes, **attributes)


def _case(
    op_type: str, x: tuple[int, ...], w: tuple[int, ...], bias: int, opset: int = NEWEST, **arguments: Any
) -> Case:
    rng = np.random.default_rng(0)
    shapes = (x, w, (bias,)) if bias else (x, w)
    arrays = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return node_case(op_type, *arrays, opset=opset, **arguments)
