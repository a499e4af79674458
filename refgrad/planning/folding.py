"""Small values that follow from shapes and constants. Models compute shapes with them; the interpreter's kernels do so here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import NodeProto

from refgrad import traits
from refgrad.backends.numpy.binding import Scope, bind
from refgrad.backends.numpy.plan import constant, plan_function, plan_graph
from refgrad.backends.numpy.precision import Declared
from refgrad.errors import BackendError, InvalidModelError

_DECLARED = Declared()
_FOLDED = traits.ELEMENTWISE | traits.MOVING | traits.REDUCTIONS | traits.CUMULATIONS | {"ConstantOfShape", "Range"}


def folded(node: NodeProto, opsets: Mapping[str, int], values: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The value of a node's only output, None if it is not known. The caller knows that it is small.

    :param opsets: the opset version per domain.
    :param values: the values of the inputs, None if they are not known.
    """
    try:
        if node.op_type == "Constant":
            return np.asarray(constant(node, _DECLARED))
        known = all(value is not None for name, value in zip(node.input, values, strict=True) if name)
        if node.op_type not in _FOLDED or not known:
            return None
        return np.asarray(bind(node, Scope(opsets, _DECLARED, plan_graph, plan_function)).call(*values))
    except (BackendError, InvalidModelError, LookupError, ValueError, TypeError, ArithmeticError, MemoryError):
        return None  # the run reports the fault of the node
