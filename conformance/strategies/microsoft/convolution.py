"""Strategies of ONNX Runtime's convolution with an activation."""

from __future__ import annotations

from refgrad.conformance.case import Case
from refgrad.conformance.cases.microsoft.activation import ACTIVATIONS
from refgrad.conformance.strategies.convolution import group_or_absent, groups
from refgrad.conformance.strategies.drawing import Drawing, strategy
from refgrad.conformance.strategies.microsoft import named
from refgrad.conformance.strategies.windows import windows


@strategy(*named("FusedConv"))
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
