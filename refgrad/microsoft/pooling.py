"""The gradients of poolings, as ONNX Runtime has them."""

from __future__ import annotations

import re
from typing import Any

from refgrad.formulas.types import widened
from refgrad.forward.graph import Node
from refgrad.microsoft.forms import form
from refgrad.microsoft.results import typed
from refgrad.protos.domains import MICROSOFT
from refgrad.reverse.emit import Emitter
from refgrad.tables.definitions import REQUIRED

_POOL: dict[str, Any] = {
    "auto_pad": "NOTSET",
    "ceil_mode": 0,
    "dilations": None,
    "kernel_shape": REQUIRED,
    "pads": None,
    "strides": None,
}


def _pooled(op: Emitter, node: Node, op_type: str) -> str:
    """A value with the shape of what was pooled: builders call the gradient of x `x_grad`, and its nodes after the forward one.

    If there is none it is the result itself, whose shape has to be declared then.
    """
    named = re.fullmatch(r"(.+)_grad(_\d+)?", node.outputs[0])
    rank = op.rank(node.inputs[0])
    if named and named[1] in op.graph.types and op.rank(named[1]) == rank is not None:
        return named[1]
    forward = node.name.rpartition("_Grad/")[0]
    pools = (n for n in op.graph.nodes if n.name == forward and n.key == ("", op_type))
    return next((pool.inputs[0] for pool in pools), node.outputs[0])


@form("MaxPoolGrad", results=[typed("dY")], attributes=_POOL | {"storage_order": 0}, domains=("", MICROSOFT))
def max_pool_grad(op: Emitter, dY: str, Indices: str, *, _node: Node, **attributes: Any) -> str:
    """The shape of X is that of what the MaxPool read that made the indices; else it is found as for AveragePoolGrad"""
    pool = op.graph.producer.get(Indices)
    X = pool.inputs[0] if pool is not None and pool.key == ("", "MaxPool") else _pooled(op, _node, "MaxPool")
    (d,) = widened(op, dY)  # ONNX Runtime scatters no 16 bits on the CPU
    return op.as_type(op.grad.MaxPoolGrad(d, X, Indices, **attributes), op.type(dY))


@form("AveragePoolGrad", results=[typed("dY")], attributes=_POOL | {"count_include_pad": 0}, domains=("", MICROSOFT))
def average_pool_grad(op: Emitter, dY: str, *, _node: Node, **attributes: Any) -> str:
    """The shape of X is that of the value after which the result is named, or of the forward node's, or the declared one"""
    X = _pooled(op, _node, "AveragePool")
    sizes = op.static(X)
    if (
        _node.outputs[0] == X and sizes is not None and op.static(dY) is None
    ):  # the windows are counted where the model runs
        X = op.full(op.const(list(sizes)), 0.0, like=dY)
    return op.grad.AveragePoolGrad(dY, X, **attributes)
