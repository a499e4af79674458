"""Convolution, pooling and resizing."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.fuzzing.graphs.growing import (
    FLOAT,
    GraphScope,
    MisfitError,
)
from refgrad.conformance.fuzzing.graphs.templates import template


@template(2.5)
def _conv(s: GraphScope) -> None:
    rank = s.rng.choice((1, 2, 2, 3))
    x = (
        s.pick(2 + rank, 2 + rank)
        if s.chance(0.5)
        else s.like((s.rng.choice((1, 2)), s.rng.choice((1, 2, 4)), *(s.rng.choice((3, 4, 5)) for _ in range(rank))))
    )
    group = s.rng.choice([g for g in (1, 1, 2, 4) if x.shape[1] and x.shape[1] % g == 0])
    kernel = [s.rng.choice((1, 2, 3)) for _ in range(rank)]
    made = group * s.rng.choice((1, 2))
    w = s.like((made, x.shape[1] // group, *kernel))
    b = s.like((made,)) if s.chance(0.5) else None
    s.add(
        "Conv",
        x,
        w,
        b,
        group=group if group > 1 else None,
        kernel_shape=kernel if s.chance(0.5) else None,
        strides=[s.rng.choice((1, 2)) for _ in kernel] if s.chance(0.4) else None,
        dilations=[s.rng.choice((1, 2)) for _ in kernel] if s.chance(0.3) else None,
        **_padding(s, rank),
    )


def _padding(s: GraphScope, rank: int, most: int = 1) -> dict[str, Any]:
    match s.rng.randrange(4):
        case 0:
            return {"auto_pad": s.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))}
        case 1 | 2:
            return {"pads": [s.rng.randint(0, most) for _ in range(2 * rank)]}
    return {}


@template(1.2)
def _conv_transpose(s: GraphScope) -> None:
    rank = s.rng.choice((1, 2, 2))
    x = s.like((s.rng.choice((1, 2)), s.rng.choice((1, 2)), *(s.rng.choice((2, 3)) for _ in range(rank))))
    group = s.rng.choice([g for g in (1, 2) if x.shape[1] % g == 0])
    kernel = [s.rng.choice((1, 2, 3)) for _ in range(rank)]
    w = s.like((x.shape[1], s.rng.choice((1, 2)), *kernel))
    b = s.like((w.shape[1] * group,)) if s.chance(0.5) else None
    strides = [s.rng.choice((1, 2)) for _ in kernel]
    s.add(
        "ConvTranspose",
        x,
        w,
        b,
        group=group if group > 1 else None,
        strides=strides,
        output_padding=[stride - 1 for stride in strides] if s.chance(0.3) else None,
        dilations=[s.rng.choice((1, 2)) for _ in kernel] if s.chance(0.2) else None,
        pads=[s.rng.randint(0, 1) for _ in range(2 * rank)] if s.chance(0.4) else None,
    )


@template(2)
def _pool(s: GraphScope) -> None:
    rank = s.rng.choice((1, 2, 2))
    shape = (s.rng.choice((1, 2)), s.rng.choice((1, 2)), *(s.rng.choice((3, 4, 5)) for _ in range(rank)))
    x = s.pick(2 + rank, 2 + rank, lambda v: min(v.shape[2:]) > 1) if s.chance(0.5) else s.like(shape)
    op = s.rng.choice(("MaxPool", "AveragePool", "LpPool"))
    kernel = [s.rng.choice((1, 2, 3)) for _ in range(rank)]
    given: dict[str, Any] = {"kernel_shape": kernel} | _padding(s, rank)
    if s.chance(0.5):
        given["strides"] = [s.rng.choice((1, 2)) for _ in kernel]
    since = {"MaxPool": 1, "AveragePool": 19, "LpPool": 18}[op]
    if s.opset >= since and s.chance(0.2) and "auto_pad" not in given:
        given["dilations"] = [s.rng.choice((1, 2)) for _ in kernel]
    if op in ("MaxPool", "AveragePool") and s.chance(0.3) and "auto_pad" not in given:
        given["ceil_mode"] = int(s.opset >= 22)  # before, onnx counts windows that begin behind the input
    if op == "AveragePool" and s.chance(0.4):
        given["count_include_pad"] = 1
    if op == "LpPool":
        given["p"] = s.rng.choice((1, 2, 3))
        x = s.positive(x)
    if "pads" in given and any(p >= k for p, k in zip(given["pads"], kernel * 2, strict=True)):
        del given["pads"]
    s.add(op, x, **given)


@template()
def _global_pool(s: GraphScope) -> None:
    x = s.pick(3, 4, filled=True)
    op = s.rng.choice(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"))
    s.add(op, s.positive(x) if op == "GlobalLpPool" else x)


@template()
def _resize(s: GraphScope) -> None:
    x = s.pick(3, 4, filled=True)
    mode = s.rng.choice(("nearest", "linear", "linear", "cubic"))
    if mode == "cubic" and x.rank != 4:
        raise MisfitError("cubic")
    spatial = x.rank - 2
    where = s.rng.choice(("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"))
    given: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": where}
    if mode == "nearest":
        given |= {"nearest_mode": s.rng.choice(("round_prefer_floor", "floor", "ceil", "round_prefer_ceil"))}
    if s.opset >= 18 and s.chance(0.2):
        given["antialias"] = 1 if mode != "nearest" else None
    if s.chance(0.5):
        sizes = [s.rng.choice((1, 2, 3, 5)) for _ in range(spatial)]
        s.add("Resize", x, None, None, s.ints([*x.shape[:2], *sizes]), **given)
    else:
        scales = np.array([1.0, 1.0, *(s.rng.choice((0.5, 1.0, 2.0, 1.5)) for _ in range(spatial))], np.float32)
        s.add("Resize", x, None, s.leaf(scales, FLOAT, moves=False), **given)


@template(0.4, 18)
def _col2im(s: GraphScope) -> None:
    s.add("Col2Im", s.like((1, 4, 4)), s.ints([3, 3]), s.ints([2, 2]))
