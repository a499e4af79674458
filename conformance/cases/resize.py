"""Cases of Resize and AffineGrid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case

NEWEST = 19  # the last opset in which Resize changed; ONNX Runtime knows it
COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
)
FILTERS: tuple[dict[str, Any], ...] = (
    *(
        {"mode": "nearest", "nearest_mode": mode}
        for mode in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    ),
    {"mode": "linear"},
    {"mode": "linear", "antialias": 1},
    {"mode": "linear", "antialias": 1, "exclude_outside": 1},
    {"mode": "cubic", "cubic_coeff_a": -0.5},
    {"mode": "cubic", "exclude_outside": 1},
    {"mode": "cubic", "antialias": 1},
    {"mode": "cubic", "antialias": 1, "exclude_outside": 1},
)
IMAGE = (1, 2, 4, 5)
CROP = (0, 0, 0.13, -0.3, 1, 1, 0.8, 0.9)
PATCH = (0.13, -0.31, 0.83, 1.23)
WHOLE = (0, 0, 0, 0, 1, 1, 1, 1)


def cases() -> Iterator[Case]:
    """Every filter at every kind of coordinates, every way to give the sizes, on static, symbolic and unknown shapes."""
    for coordinates in COORDINATES:
        for filter_ in FILTERS:
            yield _case(IMAGE, scales=(1, 1, 1.7, 0.7), coordinate_transformation_mode=coordinates, **filter_)
            yield _case(IMAGE, sizes=(1, 2, 3, 8), coordinate_transformation_mode=coordinates, **filter_)
        for policy in ("not_larger", "not_smaller"):
            for mode in ("nearest", "linear", "cubic"):
                yield _policy((2, 3, 4), (6, 7), coordinates, policy, mode=mode, axes=[1, 2])
    for shapes in SHAPES:
        yield from _forms(shapes)
        for size in ((2, 3, 2, 4), (2, 1, 2, 3, 2)):
            theta = _numbers(size[0], len(size) - 2, len(size) - 1)
            for align_corners in (0, 1):
                for constant in ((), ("size",)):
                    form: dict[str, Any] = {"constant": constant, "shapes": shapes, "align_corners": align_corners}
                    yield node_case("AffineGrid", theta, np.array(size), opset=20, **form)
    yield node_case("AffineGrid", _numbers(0, 2, 3), np.array((0, 3, 2, 4)), opset=20)
    yield from moved()


def moved() -> Iterator[Case]:
    """Cases with gradients of the scales and the roi. No scale times a size is whole: the size of the result jumps there."""
    for coordinates in COORDINATES:
        crop = coordinates == "tf_crop_and_resize"
        named: dict[str, Any] = {"roi": PATCH if crop else None, "coordinate_transformation_mode": coordinates}
        for filter_ in (FILTERS[0], *FILTERS[4:]):
            yield _moved((4, 5), scales=(1.7, 0.7), **named, **filter_)
        yield _moved((3, 4), scales=(1.3, 2.3), mode="linear", exclude_outside=1, **named)
    for shapes in SHAPES:
        crop_, form = {"coordinate_transformation_mode": "tf_crop_and_resize", "roi": PATCH}, {"shapes": shapes}
        yield _moved((2, 3, 4), scales=(1.3, 1.7, 0.7), mode="linear", **form)
        yield _moved((2, 3, 4), scales=(0.7, 1.3), axes=[2, -2], mode="cubic", **form)
        yield _moved((2, 4, 5), sizes=(3, 6), axes=[-1, 1], mode="linear", antialias=1, **crop_, **form)
        yield _moved((4, 5), sizes=(6, 1), mode="cubic", extrapolation_value=2.0, **crop_, **form)
        yield _moved(
            (4, 5), sizes=(2, 4), mode="linear", antialias=1, keep_aspect_ratio_policy="not_larger", **crop_, **form
        )
        yield _moved((0, 3), scales=(1.3, 1.3), mode="linear", **form)
        yield _moved((2, 3), scales=(0.3, 1.3), mode="linear", **form)  # an axis that becomes empty
    yield _moved((5,), scales=(0.27,), mode="linear", antialias=1)
    yield _moved((5,), scales=(1.7,), mode="linear", opset=16)
    single: dict[str, Any] = {
        "coordinate_transformation_mode": "pytorch_half_pixel",
        "antialias": 1,
    }  # one element is left
    yield _moved((5,), scales=(0.3,), mode="linear", **single)
    yield _moved((5,), scales=(0.3,), mode="cubic", **single)
    yield _moved((5,), scales=(1.7,), coordinate_transformation_mode="pytorch_half_pixel", mode="cubic", opset=13)


def _moved(x: tuple[int, ...], **given: Any) -> Case:
    wrt = ["X", *(name for name in ("roi", "scales") if given.get(name) is not None)]
    return _case(x, constant=False, wrt=wrt, **given)


def _forms(shapes: str) -> Iterator[Case]:
    for constant in (True, False):
        form: dict[str, Any] = {"constant": constant, "shapes": shapes}
        for opset in (16, 18, 22):
            yield _case(IMAGE, scales=(1, 1, 2, 0.6), opset=opset, mode="linear", **form)
            yield _case(IMAGE, sizes=(1, 2, 8, 3), opset=opset, **form)
        yield _case(IMAGE, sizes=(1, 2, 4, 5), mode="linear", **form)
        yield _case(IMAGE, scales=(1, 1, 1, 1), mode="linear", **form)
        for roi in (CROP, WHOLE):
            crop: dict[str, Any] = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 2.0}
            yield _case(IMAGE, sizes=(1, 2, 6, 3), roi=roi, mode="linear", **crop, **form)
        yield _case(IMAGE, scales=(2, 0.5), axes=[3, 2], mode="cubic", **form)
        yield _case(IMAGE, scales=(0.5, 2), axes=[-1, 2], mode="linear", **form)
        yield _case(IMAGE, sizes=(3, 7), axes=[-2, -1], mode="linear", **form)
        yield _policy(IMAGE, (6, 5), "half_pixel", "not_larger", mode="linear", axes=[2, 3], **form)
        yield _policy((2, 3, 4), (5, 7, 7), "half_pixel", "not_smaller", **form)
        for x in ((5,), (3, 4), (2, 3, 4), (1, 1, 2, 3, 2)):
            yield _case(x, scales=(*[1] * (len(x) - 1), 2), mode="linear", **form)
            yield _case(x, sizes=tuple(n + 1 for n in x), **form)
        # A scale that rounds down to the same size still resamples the axis.
        for mode in ("nearest", "linear", "cubic"):
            yield _case((4, 5), scales=(1.2, 2), mode=mode, **form)
        yield _policy((2, 10), (2, 9), "half_pixel", "not_larger", mode="linear", **form)
        yield _case((0, 2, 3, 4), scales=(1, 1, 2, 2), **form)
        yield _case((2, 3), scales=(0.3, 2), mode="linear", **form)  # an axis that becomes empty


def _policy(x: tuple[int, ...], sizes: tuple[int, ...], coordinates: str, policy: str, **attributes: Any) -> Case:
    named: dict[str, Any] = {"coordinate_transformation_mode": coordinates, "keep_aspect_ratio_policy": policy}
    return _case(x, sizes=sizes, **named, **attributes)


def _case(
    x: tuple[int, ...],
    *,
    scales: tuple[float, ...] | None = None,
    sizes: tuple[int, ...] | None = None,
    roi: tuple[float, ...] | None = None,
    constant: bool = True,
    opset: int = NEWEST,
    wrt: Sequence[str] = ("X",),
    **attributes: Any,
) -> Case:
    if attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize" and roi is None:
        axes = attributes.get("axes", range(len(x)))
        roi = tuple(CROP[axis] for axis in axes) + tuple(CROP[4 + axis] for axis in axes)
    kinds = {"roi": (roi, np.float32), "scales": (scales, np.float32), "sizes": (sizes, np.int64)}
    given = {name: np.array(value, kind) for name, (value, kind) in kinds.items() if value is not None}
    inputs = [given.get(name) for name in kinds]
    while inputs[-1] is None:
        inputs.pop()
    case = node_case(
        "Resize", _numbers(*x), *inputs, opset=opset, constant=tuple(given) if constant else (), wrt=wrt, **attributes
    )
    said = "-".join(f"{name}={','.join(map(str, value))}" for name, (value, _) in kinds.items() if value is not None)
    return case.changed(name=f"{case.name}-{said}")


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)
