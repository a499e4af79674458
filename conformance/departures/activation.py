"""Departures of activations, and of Dropout and FakeQuant."""

from __future__ import annotations

from refgrad.conformance.departures.departure import Departure

DEPARTURES: tuple[Departure, ...] = (
    Departure(
        "LeakyRelu",
        "wrong",
        "It asks for the sign of Y, which with alpha < 0 is not that of X. refgrad gives the same kernel X then.",
        cases="alpha=-",
    ),
    Departure(
        "LeakyRelu",
        "form",
        "It gives the kernel Y with alpha < 0 too; where X > 0, or there are no elements, that is right.",
        cases="alpha=-",
    ),
    Departure(
        "Gelu",
        "wrong",
        "For the tanh form it takes GeluGrad, the derivative of the form with erf. refgrad takes FastGeluGrad.",
        cases="tanh",
    ),
    Departure(
        "Gelu",
        "form",
        "As where it is wrong: GeluGrad for the tanh form. Here the two derivatives are too close to tell, or there "
        "is none.",
        cases="tanh",
    ),
    Departure(
        "Softmax LogSoftmax",
        "fails",
        "Along an axis that is not the last, the kernel divides by the number of elements: where that is 0 the "
        "process ends. refgrad takes the kernel only where the declared sizes rule it out.",
        cases="2x0",
    ),
    Departure(
        "Softmax LogSoftmax",
        "form",
        "The kernel, which ends the process where there are no elements. Where only the run tells how many there "
        "are, refgrad writes the formula in ai.onnx operators, unless the axis is the last.",
    ),
    Departure(
        "BiasGelu FastGelu",
        "form",
        "The kernel with a bias divides by its size: where that is 0 the process ends. Where only the run tells it, "
        "refgrad adds the bias and takes the kernel without. Of a tensor of no elements refgrad knows the axes of "
        "the sum.",
    ),
    Departure(
        "FastGelu",
        "fails",
        "Its model runs the forward node too, whose kernel refuses a scalar. refgrad leaves out what no gradient "
        "needs.",
        cases="scalar",
    ),
    Departure(
        "FakeQuant",
        "refused",
        "It has no gradient for scale and zero_point, and the operator must return its mask. refgrad has, and need "
        "not.",
    ),
    Departure(
        "Dropout",
        "refused",
        "The node must return its mask, and ratio has no gradient. refgrad adds the mask, and has the gradient.",
    ),
    Departure(
        "Dropout",
        "wrong",
        "DropoutGrad does not look at training_mode: in inference the gradient is scaled by 1/(1 − ratio). refgrad "
        "takes the kernel where it is known that the model trains.",
    ),
    Departure(
        "Dropout",
        "form",
        "As where it is wrong: DropoutGrad, whatever training_mode. Here the model trains, or ratio is 0.",
    ),
    Departure(
        "resnet18",
        "form",
        "Where nothing else that the backward pass runs reads the result of a Relu, here the one before MaxPool, it gives "
        "ReluGrad the input of the Relu in its place: both are positive in the same places.",
    ),
    Departure(
        "FastGelu",
        "kernel",
        "The kernel of FastGelu itself refuses a scalar, and the gradient of an unknown shape reads the shape of its result.",
        cases="scalar-unknown",
    ),
)
