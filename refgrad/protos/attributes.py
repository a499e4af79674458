"""Attributes that onnx takes without a look: some of its inference reads memory that is not its own where they are absurd."""

from __future__ import annotations

from collections.abc import Set

from onnx import AttributeProto, ModelProto

from refgrad.errors import InvalidModelError
from refgrad.protos.walk import every_node

_HIGHEST = 1024  # rank: onnx infers no tensor of a higher one
_AXES = (-_HIGHEST, _HIGHEST)
BOUNDS = {
    **dict.fromkeys(("axis", "axes", "batch_axis", "new_axis", "time_axis"), _AXES),
    **dict.fromkeys(("scan_input_axes", "scan_output_axes"), _AXES),
    **dict.fromkeys(("batch_dims", "perm"), (0, _HIGHEST)),
}
# The operators that have one of these attributes in some version: models without them are not searched.
OPERATORS = frozenset(
    """
    Add And ArgMax ArgMin CenterCropPad Compress Concat ConcatFromSequence DFT DequantizeLinear Div Equal Flatten Gather
    GatherElements GatherND Greater Hardmax LayerNormalization Less LogSoftmax LpNormalization MeanVarianceNormalization
    Mul OneHot Or Pow QuantizeLinear RMSNormalization ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean
    ReduceMin ReduceProd ReduceSum ReduceSumSquare Resize ReverseSequence Scan Scatter ScatterElements Slice Softmax Split
    SplitToSequence Squeeze Sub TensorScatter TopK Transpose Unique Unsqueeze Xor
    """.split()  # noqa: SIM905  (a line per name is longer than the rest)
)
_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")


def refuse_absurd_attributes(model: ModelProto, used: Set[str]) -> None:
    """Refuse a node with an axis that no tensor has.

    :param used: the operators of the model's graphs.
    :raises InvalidModelError: there is one.
    """
    if not model.functions and used.isdisjoint(OPERATORS):
        return
    for node in every_node(model):
        for attribute in node.attribute:
            bounds = BOUNDS.get(attribute.name)
            if bounds is None or node.domain not in _DOMAINS:
                continue
            values = [attribute.i] if attribute.type == AttributeProto.INT else attribute.ints
            for value in values:
                if not bounds[0] <= value <= bounds[1]:
                    name = node.name or next(filter(None, node.output), "")
                    raise InvalidModelError(
                        f"Node {name!r} ({node.op_type}) has {attribute.name} {value}, and no tensor has such an axis: "
                        f"it is a number from {bounds[0]} to {bounds[1]}. Export the model again."
                    )
