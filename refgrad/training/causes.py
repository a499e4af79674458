"""The first value of a step that is not finite, and its cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from refgrad.backends.numpy import NumpyBackend
from refgrad.protos.types import FLOAT_DTYPES, largest
from refgrad.training.steps import StepModel

# The operators that make an infinite value of finite ones only if it is too large for its type; Div if no divisor is 0.
_OVERFLOWING = frozenset(
    {"Add", "Sub", "Mul", "Div", "Sum", "MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Exp", "Cast", "CastLike"}
    | {"ReduceSum", "ReduceMean", "ReduceSumSquare"}
)


@dataclass(frozen=True)
class NotFinite:
    """The end of a sentence that names the first value that is not finite, and advice; both are "" if nothing is known.

    `overflows` is true if the value is too large for a type of 16 bits.
    """

    found: str = ""
    advice: str = ""
    overflows: bool = False


def first_not_finite(step: StepModel, feeds: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> NotFinite:
    """The cause of a loss or a gradient that is not finite, in the order of the graph.

    The interpreter computes every value anew.
    """
    given = {**feeds, **state}
    values = {**given, **NumpyBackend().prepare(step.opened(step.model)).run(given, trace=True)}
    makers = {name: node for node in step.model.graph.node for name in node.output}
    for name, value in values.items():
        if not _is_broken(value):
            continue
        count, node = int((~np.isfinite(value)).sum()), makers.get(name)
        made = "" if node is None else f" of {node.op_type}"
        found = f": the first value that is not finite is {name!r}{made}, in {count} of {value.size} elements"
        if name in state:
            eps = step.settings.get("optimizer.eps")
            larger = f", or give the optimizer a larger number than {eps}" if eps else ""
            return NotFinite(
                f"{found}, since the update before", f"Take a smaller learning rate, or clip the gradient{larger}."
            )
        if name in feeds:
            return NotFinite(found, "Look for values in the data that are not finite.")
        if node is not None and value.dtype.itemsize == 2 and _overflows(node, value, values):
            return NotFinite(
                f"{found}: {value.dtype} ends at {largest(value.dtype):g}",
                "Scale the data or the weights down, take the mean of the losses and not their sum, or train the model in "
                "float32 or bfloat16.",
                overflows=True,
            )
        return NotFinite(found)
    return NotFinite()


def _is_broken(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype in FLOAT_DTYPES and not np.isfinite(value).all()


def _overflows(node: NodeProto, value: np.ndarray, values: Mapping[str, np.ndarray]) -> bool:
    """True if the result of a node is too large for its type."""
    if node.op_type not in _OVERFLOWING or np.isnan(value).any():
        return False
    return node.op_type != "Div" or (node.input[1] in values and bool(np.all(values[node.input[1]])))
