"""Windows that slide over an image: kernels, strides, dilations and pads that fit it, for convolutions and poolings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refgrad.conformance.strategies.drawing import Drawing, Shape


@dataclass(frozen=True)
class DrawnWindows:
    """The size of the image, and the windows over it: one number per axis.

    `begins` and `ends` are the pads; they apply where `auto_pad` is None.
    """

    image: Shape
    kernel: Shape
    strides: Shape
    dilations: Shape
    begins: Shape
    ends: Shape
    auto_pad: str | None

    @property
    def counts(self) -> Shape:
        """How many windows there are along each axis, without ceil_mode."""
        if (self.auto_pad or "").startswith("SAME"):
            return tuple(-(-n // s) for n, s in zip(self.image, self.strides, strict=True))
        axes = zip(self.image, self.begins, self.ends, self.kernel, self.dilations, self.strides, strict=True)
        return tuple((n + b + e - (k - 1) * d - 1) // s + 1 for n, b, e, k, d, s in axes)

    def attributes(self, d: Drawing, kernel: bool = True) -> dict[str, Any]:
        """The attributes of a node; one with its default value may be absent."""
        rank = len(self.image)
        pads = [*self.begins, *self.ends]
        return {
            "kernel_shape": list(self.kernel) if kernel else None,
            "strides": _or_absent(d, self.strides, 1),
            "dilations": _or_absent(d, self.dilations, 1),
            "pads": _or_absent(d, pads, 0) if self.auto_pad is None else None,
            "auto_pad": self.auto_pad if self.auto_pad or rank > 1 or not d.flag() else "NOTSET",
        }


def windows(
    d: Drawing, rank: int, *, dilated: bool = True, pooling: bool = False, padding: bool = True
) -> DrawnWindows:
    """Windows over `rank` axes, at least one along each.

    No window of a pooling lies in the pads alone: they are smaller than the kernel, and the image at least a dilation.
    """
    most, room = (3, 3) if rank < 3 else (2, 1)
    auto_pad = d.pick(None, None, None, "SAME_UPPER", "SAME_LOWER", "VALID") if padding else None
    axes = []
    for _ in range(rank):
        k, stride = d.integer(1, most), d.integer(1, 3)
        dilation = d.pick(1, 1, 2, 3) if dilated else 1
        reach = (k - 1) * dilation + 1
        begin, end = (d.integer(0, k - 1 if pooling else 2) if auto_pad is None else 0 for _ in range(2))
        least = 1 if (auto_pad or "").startswith("SAME") else max(1, reach - begin - end)
        n = max(least, dilation if pooling else 1) + d.integer(0, room)
        axes.append((n, k, stride, dilation, begin, end))
    image, kernel, strides, dilations, begins, ends = zip(*axes, strict=True)
    return DrawnWindows(image, kernel, strides, dilations, begins, ends, auto_pad)


def rank_of_image(d: Drawing) -> int:
    """Two axes most often; one, or three."""
    return d.pick(1, 2, 2, 3)


def batch(d: Drawing) -> int:
    """One image or two, rarely none."""
    return 0 if d.rarely() else d.integer(1, 2)


def _or_absent(d: Drawing, values: list[int] | Shape, default: int) -> list[int] | None:
    return None if set(values) == {default} and not d.flag() else list(values)
