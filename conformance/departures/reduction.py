"""Departures of reductions."""

from __future__ import annotations

from refgrad.conformance.departures.departure import Departure

DEPARTURES: tuple[Departure, ...] = (
    Departure(
        "ReduceL2 ReduceLogSumExp",
        "refused",
        "Without keepdims it puts the reduced axes back from the input `axes`, which is absent or before opset 18 an "
        "attribute.",
        cases="keepdims=0",
    ),
    Departure(
        "ReduceL2",
        "wrong",
        "The constant of its formula has an axis, and so has the gradient of a scalar then. refgrad's constants have "
        "none.",
        cases="scalar",
    ),
    Departure(
        "ReduceL2 ReduceMean ReduceSum",
        "form",
        "It puts back reduced axes of which there are none; refgrad leaves that out.",
        cases=r"-\(\)-keepdims=0-.*-constant",
    ),
    Departure(
        "ReduceLogSumExp",
        "form",
        "It computes dY·exp(X − Y), which is NaN where all X are −∞; refgrad puts 0 in the place of such a Y, unless "
        "told to choose as ONNX Runtime does.",
    ),
    Departure(
        "ReduceMean",
        "form",
        "It divides the number of elements by that of the means as integers, which ends the process where there are "
        "no means. refgrad does so where the declared sizes rule it out, else it multiplies by a quotient of "
        "doubles, or a constant.",
        cases="batch|symbolic|unknown",
    ),
    Departure(
        "ReduceMean",
        "fails",
        "It divides the number of elements by that of the means as integers: where there are no means the process "
        "ends.",
        cases="2x0",
    ),
    Departure(
        "ReduceMean ReduceSum",
        "fails",
        "Its model runs the forward node too, whose kernel refuses noop_with_empty_axes without axes. refgrad leaves "
        "out what no gradient needs.",
        cases="None-.*noop=1",
    ),
    Departure(
        "ReduceL2 ReduceLogSumExp ReduceSum",
        "fails",
        "Its Reshape lacks allowzero: it takes the size 0 for that of the gradient, which has another.",
        cases="2x0",
    ),
    Departure(
        "ReduceL2 ReduceLogSumExp ReduceMean ReduceSum",
        "kernel",
        "The kernel of the operator itself refuses axes that are fed and empty.",
        cases=r"None-keepdims=\d-noop=1-fed",
    ),
)
