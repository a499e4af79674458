"""The pads that auto_pad SAME stands for: ONNX Runtime's gradient kernels pad nothing for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from refgrad.builder.op import Emitter
from refgrad.formulas.windows import make_windows

SAME = ("SAME_UPPER", "SAME_LOWER")


def known_pads(
    op: Emitter, X: str, Y: str, kernel: Sequence[int], auto_pad: str, attributes: Mapping[str, Any]
) -> tuple[str, Sequence[int] | None] | None:
    """auto_pad and pads that say the same as this auto_pad SAME, of which the kernels pad nothing; None where unknown."""
    windows = make_windows(
        op, X, Y, kernel, attributes["strides"], attributes["dilations"], None, auto_pad, len(kernel)
    )
    if isinstance(windows.begin, str):
        return None
    return ("NOTSET", windows.pads) if any(windows.pads) else (auto_pad, None)
