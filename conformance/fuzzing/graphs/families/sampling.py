"""Operators that read between elements."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.fuzzing.graphs.growing import (
    GraphScope,
)
from refgrad.conformance.fuzzing.graphs.templates import template


@template(0.5, 16)
def _grid_sample(s: GraphScope) -> None:
    x = s.like((1, s.rng.choice((1, 2)), 3, s.rng.choice((2, 4))))
    grid = s.leaf(s.world.numbers.uniform(-0.9, 0.9, (1, 2, 2, 2)).astype(np.float32), s.world.kind, moves=False)
    modes = ("linear", "nearest") if s.opset >= 20 else ("bilinear", "nearest")  # onnx.reference has cubic in float32
    s.add(
        "GridSample",
        x,
        grid,
        mode=s.rng.choice(modes),
        align_corners=s.rng.choice((0, 1)),
        padding_mode=s.rng.choice(("zeros", "border", "reflection")),
    )


@template(0.4, 20)
def _affine_grid(s: GraphScope) -> None:
    s.add("AffineGrid", s.like((2, 2, 3)), s.ints([2, 1, 2, 3]), align_corners=s.rng.choice((None, 1)))


@template(0.5, 16)
def _roi_align(s: GraphScope) -> None:
    x = s.like((1, 2, 4, 4))
    rois = s.leaf(np.array([[0.2, 0.3, 2.6, 3.1], [0.4, 0.1, 3.2, 2.7]], np.float32), s.world.kind, moves=False)
    s.add("RoiAlign", x, rois, s.leaf(np.array([0, 0])), output_height=2, output_width=2, sampling_ratio=2)
