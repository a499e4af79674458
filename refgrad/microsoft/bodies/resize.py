"""The gradient of Resize, as ONNX Runtime has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from refgrad.extend import Emitter, UnsupportedFormError, form
from refgrad.formulas.resize import resize_adjoints
from refgrad.formulas.types import widened
from refgrad.rewrites.results import like
from refgrad.tables.definitions import Ints


def _opset_of_resize(attributes: Mapping[str, Any]) -> int:
    """The first opset in which Resize has these attributes"""
    if attributes.get("coordinate_transformation_mode") == "half_pixel_symmetric":
        return 19
    stretches = attributes.get("keep_aspect_ratio_policy", "stretch") == "stretch"
    return 16 if stretches and "axes" not in attributes and not attributes.get("antialias") else 18


@form("ResizeGrad", results=[like("X")], opset=_opset_of_resize)
def resize_grad(
    op: Emitter,
    dY: str,
    X: str,
    roi: str | None = None,
    scales: str | None = None,
    *,
    antialias: int = 0,
    axes: Ints | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> str:
    """The gradient by X that the rule of Resize emits. Without scales the sizes come from dY"""
    sizes = None
    roi = roi and widened(op, roi)[0]
    if scales is None or op.static(scales) == (0,):
        scales, policy = None, keep_aspect_ratio_policy
        if policy == "stretch":
            sizes = op.shape_of(dY) if axes is None else op.Gather(op.shape_of(dY), list(axes))
        else:
            sizes = op.const(_deciding(op.static(X), op.static(dY), axes, policy))
    d_X, _, _ = resize_adjoints(
        op,
        dY,
        X,
        roi,
        scales,
        sizes,
        by_roi=False,
        by_scales=False,
        antialias=antialias,
        axes=axes,
        coordinate_transformation_mode=coordinate_transformation_mode,
        cubic_coeff_a=cubic_coeff_a,
        exclude_outside=exclude_outside,
        keep_aspect_ratio_policy=keep_aspect_ratio_policy,
        mode=mode,
        nearest_mode=nearest_mode,
    )
    return d_X


def _deciding(
    before: tuple[int, ...] | None, after: tuple[int, ...] | None, axes: Ints | None, policy: str
) -> list[int]:
    """Sizes from which Resize gets `after`: one axis decides the scale, the others are too long, or too short, to do so."""
    if before is None or after is None:
        raise UnsupportedFormError(f"the scale of keep_aspect_ratio_policy={policy!r} is not known before it runs")
    chosen = list(range(len(before)) if axes is None else axes)
    for axis in chosen:
        scale = after[axis] / before[axis]
        if all(math.floor(scale * before[k] + 0.5) == after[k] for k in chosen):
            if policy == "not_larger":
                return [after[k] if k == axis else math.ceil(scale * before[k]) + 1 for k in chosen]
            return [after[k] if k == axis else max(math.floor(scale * before[k]) - 1, 1) for k in chosen]
    raise UnsupportedFormError(f"the scale of keep_aspect_ratio_policy={policy!r} does not follow from its sizes")
