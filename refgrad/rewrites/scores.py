"""Tell by its nodes whether the output that a loss compares is logits (between minus and plus infinity) or probabilities."""

from __future__ import annotations

import ml_dtypes
from onnx import ModelProto, NodeProto, helper

from refgrad import traits
from refgrad.errors import OptionError
from refgrad.notices import notice
from refgrad.protos.domains import ML
from refgrad.protos.traverse import attribute_value

_PASSING = traits.RESHAPES | {"Cast"}  # they change neither values nor their order
_PROBABILITIES = ("Softmax", "Sigmoid", "Normalizer")
_TRANSFORMS = ("SOFTMAX", "SOFTMAX_ZERO", "LOGISTIC", "PROBIT")  # post_transform of ai.onnx.ml
_LINEAR = traits.PRODUCTS | {"LinearRegressor"}


def makers_of(model: ModelProto, name: str) -> list[NodeProto]:
    """The nodes that make a value, the last first: those that pass values on, and the first that computes them."""
    makers = _makers(model)
    found: list[NodeProto] = []
    while (node := makers.get(name)) is not None and node not in found:
        found.append(node)
        if node.op_type not in _PASSING or not node.input:
            break
        name = node.input[0]
    return found


def maker_of_probabilities(model: ModelProto, name: str) -> str:
    """The operator that makes probabilities of `name`, or "" where the model does not show that it is one.

    Besides Softmax and Sigmoid these are a division by the sum of the same numbers, the exponential of what ReduceLogSumExp was
    taken off, 1 - p beside p, and what a classifier of ai.onnx.ml transforms.
    """
    found = makers_of(model, name)
    if not found:
        return ""
    node, makers = found[-1], _makers(model)
    if node.op_type in _PROBABILITIES:
        return str(node.op_type)
    if node.domain == ML:
        given = {one.name: attribute_value(one) for one in node.attribute}
        transform = given.get("post_transform", b"NONE")
        text = transform.decode() if isinstance(transform, bytes) else str(transform)
        return f"{node.op_type} ({text})" if text in _TRANSFORMS else ""
    if len(node.input) != 2 and node.op_type != "Exp":
        return ""
    before = [makers.get(one) for one in node.input]
    if node.op_type == "Div" and before[1] is not None and before[1].op_type == "ReduceSum":
        return "Div by the sum" if before[1].input[0] == node.input[0] else ""
    if node.op_type == "Exp" and before[0] is not None:
        taken = [makers.get(one) for one in before[0].input]
        if before[0].op_type == "LogSoftmax" or (
            before[0].op_type == "Sub" and any(one is not None and _passed(one, makers) for one in taken[1:])
        ):
            return "Exp of log-probabilities"
    if node.op_type == "Concat" and before[0] is not None and before[0].op_type == "Sub":
        return "1 - p beside p" if before[0].input[1] == node.input[1] else ""
    return ""


def refuse_probabilities(model: ModelProto, name: str) -> None:
    """Refuse to take probabilities for logits: their cross entropy has small derivatives, and does not end where it should.

    :raises OptionError: the model shows that `name` is a probability.
    """
    if by := maker_of_probabilities(model, name):
        raise OptionError(
            f"cross_entropy compares logits, and {name!r} is a probability, made by {by}: use loss='log_loss', or make the "
            f"logits, the input of {by}, an output (in skl2onnx options={{'raw_scores': True}})."
        )


def warn_of_logits(model: ModelProto, name: str, loss: str) -> None:
    """Warn where a loss of probabilities compares what a product of matrices makes, with a bias or without: any number."""
    found, makers = makers_of(model, name), _makers(model)
    node = found[-1] if found else None
    if node is not None and node.op_type == "Add":
        node = next((makers[one] for one in node.input if one in makers and makers[one].op_type in _LINEAR), None)
    if node is not None and node.op_type in _LINEAR:
        notice(
            f"The loss {loss} compares probabilities, and {name!r} is made by {node.op_type}, so it may be any number. Outside "
            "of 0 to 1 the loss is flat and its gradient 0. For logits of several classes use loss='cross_entropy'; for "
            "two classes, end the model with a Sigmoid or a Softmax."
        )


def _passed(node: NodeProto, makers: dict[str, NodeProto]) -> bool:
    """True if ReduceLogSumExp made a value, perhaps in another shape."""
    seen = 0
    while node.op_type in _PASSING and node.input and node.input[0] in makers and seen < len(makers):
        node, seen = makers[node.input[0]], seen + 1
    return bool(node.op_type == "ReduceLogSumExp")


def _makers(model: ModelProto) -> dict[str, NodeProto]:
    return {made: node for node in model.graph.node for made in node.output}


def smallest_step(kind: int) -> float:
    """The distance of 1 to the next number of an element type: of no smaller p is a logarithm taken."""
    return float(ml_dtypes.finfo(helper.tensor_dtype_to_np_dtype(kind)).eps)  # type: ignore[no-untyped-call]
