"""Tell by its nodes whether the output that a loss compares is logits (between minus and plus infinity) or probabilities."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto, NodeProto, helper

from refgrad import traits
from refgrad.errors import OptionError
from refgrad.notices import notice
from refgrad.protos.domains import ML
from refgrad.protos.traverse import attribute_value
from refgrad.protos.types import Shape, epsilon

OF_CLASSES = ("cross_entropy", "log_loss")  # the losses that compare scores with class numbers
BINARY_OF_LOGITS = "binary_cross_entropy_with_logits"
OF_CHANCES = ("log", BINARY_OF_LOGITS)  # the losses whose label is a probability, 0 to 1
_PASSING = (
    traits.RESHAPES | traits.CASTS | {"Clip"}
)  # they change neither the order of probabilities nor, rounding aside, them
_KEEPING = (
    _PASSING | traits.PERMUTATIONS | {"Dropout", "Expand", "Gather", "Slice"}
)  # their elements stay probabilities
_PROBABILITIES = ("Softmax", "Sigmoid")
_TRANSFORMS = ("SOFTMAX", "SOFTMAX_ZERO", "LOGISTIC", "PROBIT")  # post_transform of ai.onnx.ml
_LINEAR = traits.PRODUCTS | {"LinearRegressor"}
_BEYOND = traits.NORMALIZATIONS | {  # activations that are below 0, or above 1, somewhere
    "Celu", "Elu", "Gelu", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Selu", "Shrink", "Softplus", "Softsign", "Swish",
    "Tanh", "ThresholdedRelu",
}  # fmt: skip


@dataclass(frozen=True)
class ProbabilitySource:
    """The operator that makes a probability, and the value before it that is its logit, "" if there is none."""

    operator: str
    logits: str = ""


def makers_of(model: ModelProto, name: str, passing: Collection[str] = _PASSING) -> list[NodeProto]:
    """The nodes that make a value, the last first: those that pass values on, and the first that computes them."""
    makers = _makers(model)
    found: list[NodeProto] = []
    while (node := makers.get(name)) is not None and node not in found:
        found.append(node)
        if node.op_type not in passing or not node.input:
            break
        name = node.input[0]
    return found


def origin_of_probabilities(model: ModelProto, name: str) -> ProbabilitySource | None:
    """The operator that makes probabilities of `name`; None if the model does not show that it is one.

    Besides Softmax and Sigmoid these are a division by the sum of the same numbers, the exponential of logarithms of
    probabilities, 1 - p beside p, and transformed scores of a classifier of ai.onnx.ml.
    """
    found = makers_of(model, name, _KEEPING)
    if not found:
        return None
    node, makers = found[-1], _makers(model)
    if node.domain == ML:
        given = {one.name: attribute_value(one) for one in node.attribute}
        transform = given.get("post_transform", b"NONE")
        text = transform.decode() if isinstance(transform, bytes) else str(transform)
        if node.op_type == "Normalizer":
            return ProbabilitySource("Normalizer")
        return ProbabilitySource(f"{node.op_type} ({text})") if text in _TRANSFORMS else None
    if node.op_type in _PROBABILITIES:
        return ProbabilitySource(node.op_type, node.input[0])
    if node.op_type == "Div":
        return _origin_of_quotient(model, node)
    if node.op_type == "Exp" and _is_logarithm(model, node.input[0]):
        return ProbabilitySource("Exp of log-probabilities", node.input[0])
    if node.op_type == "Concat" and len(node.input) == 2:
        first = makers.get(node.input[0])
        if first is not None and first.op_type == "Sub" and first.input[1] == node.input[1]:
            return ProbabilitySource("1 - p beside p")
    return None


def _origin_of_quotient(model: ModelProto, node: NodeProto) -> ProbabilitySource | None:
    """The origin of numbers that are divided by their sum: Softmax in its parts, if the numbers are exponentials."""
    divisor = makers_of(model, node.input[1], _KEEPING)
    if not divisor or divisor[-1].op_type != "ReduceSum" or divisor[-1].input[0] != node.input[0]:
        return None
    numbers = makers_of(model, node.input[0], _KEEPING)
    return ProbabilitySource("Div by the sum", numbers[-1].input[0] if numbers and numbers[-1].op_type == "Exp" else "")


def _is_logarithm(model: ModelProto, name: str) -> bool:
    """True if a value is the logarithm of a probability: by LogSoftmax, Log, or minus ReduceLogSumExp."""
    found = makers_of(model, name, _KEEPING - {"Clip"})
    if not found:
        return False
    node = found[-1]
    if node.op_type == "Log":
        return origin_of_probabilities(model, node.input[0]) is not None
    if node.op_type == "Sub":
        taken = makers_of(model, node.input[1], _KEEPING)
        return bool(taken) and taken[-1].op_type == "ReduceLogSumExp"
    return node.op_type == "LogSoftmax"


def refuse_no_logits(model: ModelProto, name: str, shape: Shape, loss: str, option: str = "loss") -> None:
    """Refuse values that are no logits in a cross entropy.

    The cross entropy of probabilities has small derivatives, and does not end where it should. With one logit for several
    classes it is always 0.

    :param shape: of the value.
    :param loss: "cross_entropy" of several classes, or of two: "binary_cross_entropy_with_logits".
    :param option: the parameter that names the loss.
    :raises OptionError: there is one logit for several classes, or the model shows that `name` is a probability.
    """
    is_binary, columns = loss == BINARY_OF_LOGITS, shape[1] if len(shape) > 1 else 1
    otherwise = f"{option}={'log' if is_binary else 'log_loss'!r}"
    if origin := origin_of_probabilities(model, name):
        logits = f" at the logits, {origin.logits!r}" if origin.logits and (is_binary or columns != 1) else " before it"
        raise OptionError(
            f"{loss} compares logits, and {name!r} is a probability, made by {origin.operator}: use {otherwise}, or cut "
            f"the model{logits} (refgrad.select_model_inputs_outputs; in skl2onnx options={{'raw_scores': True}})."
        )
    if not is_binary and columns == 1:
        raise OptionError(
            f"{loss} needs a logit for each class, and {name!r} has 1 for each sample, as for two classes: use "
            f"{option}={BINARY_OF_LOGITS!r} with labels 0 and 1."
        )


def loss_of_classes(model: ModelProto, name: str, shape: Shape) -> str:
    """The name of the loss that compares the value with class numbers: of probabilities, of one logit, or of several.

    :param shape: of the value.
    """
    if origin_of_probabilities(model, name):
        return "log_loss"
    return "cross_entropy" if len(shape) > 1 and shape[1] != 1 else BINARY_OF_LOGITS


def check_probabilities(model: ModelProto, name: str, loss: str) -> None:
    """Warn if a loss of probabilities compares values that may lie outside of 0 to 1, such as a product of matrices.

    :raises OptionError: the model shows that `name` is the logarithm of a probability. The loss would be constant.
    """
    if _is_logarithm(model, name):
        raise OptionError(
            f"The loss {loss} compares probabilities, and {name!r} is the logarithm of one. Use cross_entropy: it takes "
            "logarithms of probabilities as well as logits."
        )
    found, makers = makers_of(model, name), _makers(model)
    if found and found[-1].op_type == "Concat":  # scores of two classes, side by side
        found = makers_of(model, found[-1].input[-1])
    node = found[-1] if found else None
    if node is not None and node.op_type == "Add":
        node = next((makers[one] for one in node.input if one in makers and makers[one].op_type in _LINEAR), None)
    if node is not None and node.op_type in _LINEAR | _BEYOND and not any(one.op_type == "Clip" for one in found):
        notice(
            f"The loss {loss} compares probabilities, and {name!r} is made by {node.op_type}, so it may be any number. Outside "
            f"of 0 to 1 the loss is flat and its gradient 0. For logits of several classes use cross_entropy; for one logit, "
            f"of two classes, {BINARY_OF_LOGITS}."
        )


def _makers(model: ModelProto) -> dict[str, NodeProto]:
    return {made: node for node in model.graph.node for made in node.output}


def logs_of_classes(op: Any, p: str, kind: int, shape: Shape) -> str:
    """The logarithms [N, C, ...] of the probabilities of classes; [N] and [N, 1] are the second of two classes.

    :param op: an emitter of nodes.
    """
    if len(shape) == 1:
        p = op.Reshape(p, [-1, 1])
    if len(shape) == 1 or shape[1] == 1:
        p = op.Concat(op.Sub(op.const(1.0, like=p), p), p, axis=1)
    return log_of_probability(op, p, kind)


def log_of_probability(op: Any, p: str, kind: int) -> str:
    """log p of a value of element type `kind`, with p clipped to [ε, 1], where ε is the distance of 1 to the next number.

    So a loss −log p is at least 0, and finite. Beyond the bounds its derivative is 0.

    :param op: an emitter of nodes.
    """
    step = epsilon(helper.tensor_dtype_to_np_dtype(kind))
    made: str = op.Log(op.Min(op.Max(p, op.const(step, like=p)), op.const(1.0, like=p)))
    return made
