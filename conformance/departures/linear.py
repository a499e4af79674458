"""Departures of matrix products."""

from __future__ import annotations

from refgrad.conformance.departures.departure import Departure

DEPARTURES: tuple[Departure, ...] = (
    Departure(
        "MatMul",
        "refused",
        "An operand is a vector: it exchanges the last two axes of what has one axis or none. refgrad "
        "multiplies and sums.",
        cases=r"-\d,|,\d-|1d",
    ),
    Departure(
        "MatMul",
        "fails",
        "An operand is a vector: it exchanges the last two axes of what has one axis or none. refgrad "
        "multiplies and sums.",
        cases=r"-\d,|,\d-",
    ),
    Departure(
        "MatMul",
        "wrong",
        "An operand is a vector: the product of the wrong axes happens to have a shape that it can sum. "
        "refgrad multiplies and sums.",
        cases=r"-\d,|,\d-",
    ),
    Departure(
        "MatMul",
        "form",
        "The first operand is a vector: it finds at run time that there is nothing to sum, which refgrad knows.",
        cases=r"-3,3x4-(static|symbolic)",
    ),
    Departure(
        "MatMul",
        "fails",
        "There is no FusedMatMul for double on the CPU. refgrad takes Gemm and Einsum.",
        cases=r"double",
    ),
    Departure(
        "MatMul",
        "fails",
        "It takes an axis of size 0 for one of unknown size, and at run time its ReduceSum makes one element "
        "of no elements. refgrad knows that there is nothing to sum.",
        cases=r"0x|x0",
    ),
    Departure(
        "MatMul",
        "fails",
        "It takes a size that is a symbol for another than 1, along which an operand of size 1 was not "
        "broadcast. refgrad decides at run time.",
        cases=r"1x2x3,4x5x3x2.*batch",
    ),
    Departure(
        "MatMul",
        "form",
        "It reads sizes that are not known off the shape of B, for a Reshape that fails where one is 0. "
        "refgrad takes Flatten.",
        cases=r"x3,3x4-symbolic",
    ),
    Departure(
        "MatMul",
        "form",
        "It takes operands of unknown rank for matrices. refgrad gives a vector, at run time, the axis that it lacks.",
        cases=r"unknown",
    ),
    Departure(
        "MatMul Gemm",
        "kernel",
        "The Gemm of onnxruntime-training 1.19.2 refuses a product over no elements, and its ReduceSum over "
        "no axes makes one element of none. Both graphs need them.",
        cases=r"0x|x0",
    ),
    Departure(
        "Gemm",
        "refused",
        "With beta = 0 it asks for another beta. refgrad gives C the gradient 0.",
        cases=r"beta=0.0",
    ),
    Departure(
        "Gemm",
        "wrong",
        "The gradient of a scalar C gets an axis of size 1 from the constant beta that it is multiplied by. "
        "refgrad multiplies by a scalar.",
        cases=r",scalar-.*beta",
    ),
    Departure(
        "Gemm",
        "wrong",
        "It takes sizes of different names for sizes that do not broadcast, so that the gradient of C is not "
        "summed. refgrad decides at run time.",
        cases=r"symbolic",
    ),
    Departure(
        "Gemm",
        "fails",
        "It takes sizes of different names for sizes that do not broadcast, so that the gradient of C is not "
        "summed. refgrad decides at run time.",
        cases=r"symbolic",
    ),
    Departure(
        "Gemm",
        "form",
        "It takes sizes of different names for sizes that do not broadcast, which here they are not. refgrad "
        "decides at run time.",
        cases=r"symbolic",
    ),
    Departure(
        "Gemm",
        "form",
        "It takes an axis of size 0 for one of unknown size, and sums C at run time. refgrad knows the axes.",
        cases=r"0x|x0",
    ),
)
