"""Strategies of ONNX Runtime's convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.convolution import group_or_absent, groups, transposed_axis
from refgrad.conformance.strategies.drawing import Drawing
from refgrad.conformance.strategies.windows import batch, rank_of_image, windows
from refgrad.extend import strategy
from refgrad.microsoft.cases.activation import ACTIVATIONS
from refgrad.protos.domains import MICROSOFT


@strategy("FusedConv", domain=MICROSOFT)
def fused_conv(d: Drawing) -> Case:
    """As Conv of two axes, with and without an addend, with every activation."""
    over = windows(d, 2)
    group, channels, filters = groups(d)
    batch = d.integer(1, 2)
    activation, parameters = d.pick(*ACTIVATIONS)
    return d.case(
        d.normal((batch, group * channels, *over.image)),
        d.normal((group * filters, channels, *over.kernel)),
        d.optional(lambda: d.normal((group * filters,))),
        d.optional(lambda: d.normal((batch, group * filters, *over.counts))),
        group=group_or_absent(d, group),
        activation=activation,
        activation_params=parameters,
        **over.attributes(d, d.shapes == "unknown" or d.flag()),
    )


@strategy("NhwcConv", "NhwcFusedConv", domain=MICROSOFT)
def nhwc_conv(d: Drawing) -> Case:
    """Images of any rank, the channels last; the fused one as FusedConv."""
    over = windows(d, rank_of_image(d))
    group, channels, filters = groups(d)
    images = batch(d)
    x = d.normal((images, *over.image, group * channels))
    w = d.normal((group * filters, channels, *over.kernel))
    bias = d.optional(lambda: d.normal((group * filters,)))
    attributes = over.attributes(d, d.shapes == "unknown" or d.flag()) | {"group": group_or_absent(d, group)}
    if d.op_type == "NhwcConv":
        return d.case(x, np.moveaxis(w, 1, -1).copy(), bias, **attributes)
    addend = d.optional(lambda: d.normal((images, *over.counts, group * filters)))
    activation, parameters = d.pick(*ACTIVATIONS)
    return d.case(x, w, bias, addend, activation=activation, activation_params=parameters, **attributes)


@strategy("ConvTransposeWithDynamicPads", domain=MICROSOFT)
def conv_transpose_with_dynamic_pads(d: Drawing) -> Case:
    """As ConvTranspose; what auto_pad says goes before Pads."""
    how = d.pick(None, None, "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")
    axes = [transposed_axis(d, 2, how if how in ("SAME_UPPER", "SAME_LOWER") else "pads") for _ in range(2)]
    image, kernel, strides, dilations, output_padding, begins, ends, _ = (list(p) for p in zip(*axes, strict=True))
    group, channels, filters = groups(d)
    x, w = d.floats((batch(d), group * channels, *image)), d.floats((group * channels, filters, *kernel))
    sizes: dict[str, Any] = {
        "strides": strides,
        "dilations": dilations,
        "output_padding": output_padding,
        "auto_pad": how,
    }
    return d.case(
        *(x, w, np.array(begins + ends, np.int64)),
        d.optional(lambda: d.floats((group * filters,))),
        fixed=["Pads"],
        group=group_or_absent(d, group),
        kernel_shape=kernel if d.shapes == "unknown" or d.flag() else None,
        **sizes,
    )
