"""Departures of elementwise arithmetic and of the operators that select."""

from __future__ import annotations

from refgrad.conformance.departures.departure import Departure

DEPARTURES: tuple[Departure, ...] = (
    Departure(
        "Cos Erf Sqrt",
        "wrong",
        "The constant of its formula has an axis, and so has the gradient of a scalar then. refgrad's constants have "
        "none.",
        cases="-scalar-",
    ),
    Departure(
        "Reciprocal",
        "form",
        "It computes dY·(−(Y·Y)), where Y² overflows first; refgrad −((dY·Y)·Y), which is finite more often.",
    ),
    Departure("Cast", "form", "It casts to the type that the cotangent has already.", cases="2x3-to=1-"),
    Departure(
        "Max Min",
        "form",
        "It multiplies the cotangent by a mask of zeros and ones, which makes NaN of an infinite one; refgrad "
        "selects with Where. Of what was broadcast it asks the sizes of the result, refgrad those of the operands.",
    ),
    Departure(
        "Add Mul Sub",
        "form",
        "Two sizes of different names it takes for equal, and asks only the run how a tensor of no elements was "
        "broadcast; refgrad asks the run in the first case and the declared sizes in the second.",
        cases="2x3,2x3-symbolic|0x3,1x3-.*-by-B",
    ),
    Departure(
        "Add Max Min Mul Sub",
        "wrong",
        "Two sizes of which one has no value it takes for equal: the gradient of the operand that was broadcast is "
        "not summed and has the shape of the other. refgrad finds the axes when the model runs.",
        cases="1x3,2x[13]-(static-opset21-batch|symbolic)",
    ),
    Departure(
        "Add Mul Sub",
        "refused",
        "It finds no shape of the gradient where the operands have different ranks and sizes without a common name.",
        cases="symbolic",
    ),
    Departure(
        "Add Div Max Min Mul Sub",
        "fails",
        "The axes along which a tensor of no elements was broadcast come from the run; where there are none, "
        "ReduceSum returns the wrong shape, and DivGrad does the same inside. refgrad takes them from the declared "
        "sizes.",
        cases="0x3,1x3-static",
    ),
    Departure(
        "Pow",
        "refused",
        "An exponent has no gradient there, and one whose type is not that of the base gives a graph of mixed types. "
        "refgrad has both.",
    ),
    Departure(
        "Pow",
        "form",
        "It subtracts 1 from the exponent when the model runs, constant or not, and has 0·X^−1 where the exponent is "
        "0, which is NaN at X = 0. refgrad needs no Pow for an exponent of 1 or 2 and none of its values is NaN.",
    ),
    Departure(
        "Pow Where",
        "wrong",
        "It forgets that an operand may have been broadcast: the gradient has the shape of the result. refgrad sums.",
        cases="static|symbolic|test_",
    ),
    Departure(
        "Pow Where",
        "fails",
        "It forgets that an operand may have been broadcast: the next node gets the shape of the result and fails.",
        cases="unknown",
    ),
    Departure(
        "Where",
        "form",
        "It forgets that an operand may have been broadcast, which here it was not. refgrad asks when the model runs.",
        cases="2x3,2x3,2x3-(symbolic|unknown)",
    ),
    Departure("Clip", "refused", "It has no gradient for min and max. refgrad has: that of the bound where it holds."),
    Departure(
        "Clip",
        "form",
        "It compares X with both bounds and multiplies by a mask of zeros and ones, which makes NaN of an infinite "
        "cotangent. refgrad compares X with Y and selects with Where, and asks for min ≤ max where that is not "
        "known.",
    ),
    Departure(
        "ScaledSum",
        "refused",
        "Three inputs with two scales: its shape inference wants as many scales as inputs. refgrad takes the third "
        "for 1.",
    ),
    Departure(
        "ScaledSum",
        "fails",
        "Neither ScaledSum nor BatchScale, its gradient there, has a kernel on the CPU. refgrad writes ScaledSum as "
        "Mul and Add.",
    ),
    Departure(
        "ScaledSum",
        "kernel",
        "There is no kernel on the CPU for the forward operator, which the gradient of an unknown shape reads the shape of.",
    ),
    Departure(
        "Cast",
        "kernel",
        "onnxruntime-training 1.19.2 has no kernels in bfloat16 on the CPU.",
        cases="BFLOAT16",
    ),
    Departure(
        "Add Clip Div Max Min Mul Pow Sub Where",
        "kernel",
        "Only the run tells that a tensor is empty and was not broadcast. Then ReduceSum of onnxruntime-training 1.19.2, "
        "which is given no axes, makes one element of none, and the Reshape behind it fails. The interpreter runs it.",
        cases=r"0x3.*(symbolic|unknown)",
    ),
)
