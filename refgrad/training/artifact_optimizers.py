"""The optimizer model of onnxruntime 1.19's training API, which updates lists of weights and moments in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from refgrad.builder.function import FunctionEmitter
from refgrad.errors import OptionError, choices
from refgrad.protos.domains import MICROSOFT
from refgrad.training.assembly import states_of, updated
from refgrad.training.optimizers import SGD, Adam, AdamW, Optimizer

_MOMENTS = ("first_order_moments", "second_order_moments")  # the lists that the training API keeps, zeros at first
_OPSET, _IR = 17, 8
_COPIES: dict[str, Any] = {
    "alpha": 0.0,
    "beta": 1.0,
    "epsilon": 1.0,
    "weight_decay": 0.0,
    "adam_mode": 1,
    "correct_bias": 0,
}


def optimizer_model(
    optimizer: Optimizer, weights: Mapping[str, np.ndarray], clip_value: float | None, clip_norm: float | None
) -> ModelProto:
    """The model that updates the weights of the training API.

    `SGD()` and AdamW are the operators that onnxruntime has. Other optimizers are written in operators of ai.onnx, and an
    AdamWOptimizer writes each result into its list: with alpha=0 its first moment becomes the gradient that it is given.

    :raises OptionError: the optimizer has more than two states, or a state that does not start at 0.
    """
    names = ["learning_rate", "step", "params", "gradients"]
    op = FunctionEmitter.into_graph(_OPSET, "update", {*names, *_MOMENTS, "updated"})
    node = _of_onnxruntime(optimizer) if clip_value is None else None
    gradients = "gradients"
    if node is not None:
        if clip_norm is not None:
            [gradients] = _clipped(op, clip_norm)
        lists = list(_MOMENTS) if node.op_type == "AdamWOptimizer" else []
        read = ["learning_rate", "step"] if lists else ["learning_rate"]
        node.input[:] = [*read, "params", gradients, *lists]
        nodes = [*op.builder.take(), node]
    else:
        nodes = _written(op, optimizer, list(weights.values()), clip_value, clip_norm)
        lists = list(_MOMENTS)
    value, sequence = helper.make_tensor_value_info, helper.make_tensor_sequence_value_info
    inputs = [value("learning_rate", TensorProto.FLOAT, [1]), value("step", TensorProto.INT64, [1])]
    inputs += [
        sequence(name, TensorProto.FLOAT, None) for name in dict.fromkeys(("params", "gradients", _MOMENTS[0], *lists))
    ]
    constants = list(op.builder.constants.values())
    graph = helper.make_graph(nodes, "optimizer", inputs, [value("updated", TensorProto.BOOL, [1])], constants)
    imports = [helper.make_opsetid("", _OPSET), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=_IR, producer_name="refgrad")


def _of_onnxruntime(optimizer: Optimizer) -> NodeProto | None:
    """The operator that updates all weights as this optimizer does, if onnxruntime has one."""
    if optimizer == SGD():
        return helper.make_node("SGDOptimizerV2", [], ["updated"], "update", domain=MICROSOFT)
    is_adam = type(optimizer) in (Adam, AdamW)
    if not is_adam or not isinstance(optimizer, Adam):
        return None
    is_uncorrected = optimizer.epsilon == "uncorrected"
    if optimizer.weight_decay and (is_uncorrected or type(optimizer) is Adam):
        return None  # onnxruntime decays a weight after the step then
    return helper.make_node(
        "AdamWOptimizer", [], ["updated"], "update", domain=MICROSOFT,
        alpha=optimizer.beta1, beta=optimizer.beta2, epsilon=optimizer.eps, weight_decay=optimizer.weight_decay,
        adam_mode=int(is_uncorrected), correct_bias=1,
    )  # fmt: skip


def _clipped(op: FunctionEmitter, most: float) -> list[str]:
    """The list of all gradients, scaled so that their norm is `most` or less."""
    return [op.emit("InplaceClipGradNorm", MICROSOFT, ("gradients",), 1, {"max_norm": float(most)})]


def _written(
    op: FunctionEmitter,
    optimizer: Optimizer,
    weights: Sequence[np.ndarray],
    clip_value: float | None,
    clip_norm: float | None,
) -> list[NodeProto]:
    """The nodes of an update in operators of ai.onnx, and the nodes that write the results into the lists."""
    states = states_of(optimizer)
    if len(states) > len(_MOMENTS):
        raise OptionError(
            f"The training API of onnxruntime keeps two states per weight, and {optimizer!r} has {choices(states)}."
        )
    if began := next((name for name, number in states.items() if number), ""):
        raise OptionError(
            f"The training API of onnxruntime starts states at 0, and {began!r} of {type(optimizer).__name__} starts at "
            f"{states[began]:g}. Let it start at 0."
        )
    held = {
        "params": "params",
        **dict(zip(states, _MOMENTS, strict=False)),
    }  # the list of the weights, and of each state
    taps = {name: [_element(op, held[name], k, w) for k, w in enumerate(weights)] for name in held}
    gradients = [_element(op, "gradients", k, w) for k, w in enumerate(weights)]
    if clip_value is not None:
        gradients = [op.Max(op.Min(g, float(clip_value)), -float(clip_value)) for g in gradients]
    if clip_norm is not None:
        squares = [op.Cast(op.ReduceSum(op.Mul(g, g), keepdims=0), to=TensorProto.DOUBLE) for g in gradients]
        norm = op.Sqrt(op.Sum(*squares) if len(squares) > 1 else squares[0])
        factor = op.Min(op.Div(op.const(float(clip_norm), like=norm), op.Add(norm, 1e-6)), 1.0)
        gradients = [op.Mul(g, op.Cast(factor, to=TensorProto.FLOAT)) for g in gradients]
    scalar = op.const(np.zeros(0, np.int64))
    op.types |= {"learning_rate": (TensorProto.FLOAT, 1), "step": (TensorProto.INT64, 1)}
    rate, number = op.Reshape("learning_rate", scalar), op.Reshape("step", scalar)
    op.types |= {rate: (TensorProto.FLOAT, 0), number: (TensorProto.INT64, 0)}
    t = op.Cast(number, to=TensorProto.DOUBLE)
    decay = float(getattr(optimizer, "weight_decay", 0.0))
    results: dict[str, list[str]] = {name: [] for name in held}
    for k, g in enumerate(gradients):
        of_weight = {name: taps[name][k] for name in states}
        w = taps["params"][k]
        moved, new = updated(optimizer, op, w, of_weight, TensorProto.FLOAT, (g, rate, t, of_weight, decay))
        results["params"].append(moved)
        for name, value in new.items():
            results[name].append(value)
    scratch = op.SequenceConstruct(*taps["params"])  # copies, and so is each list below: nothing reads them afterwards
    done = ""
    for name, values in results.items():
        before = op.SequenceConstruct(*taps[name])  # so every element is read before the list is written
        read = ["learning_rate", "step", scratch, op.SequenceConstruct(*values), held[name], before]
        if done:
            done = op.emit("If", "", (done,), 1, {"then_branch": _writing(read, name), "else_branch": _nothing(name)})
        else:
            done = op.emit("AdamWOptimizer", MICROSOFT, read, 1, _COPIES)
    return op.builder.take({done: "updated"})


def _writing(read: Sequence[str], name: str) -> GraphProto:
    """A body that writes a list. The training API admits one AdamWOptimizer outside of bodies."""
    node = helper.make_node("AdamWOptimizer", read, [f"{name}/done"], f"{name}/write", domain=MICROSOFT, **_COPIES)
    return _body(node, name)


def _nothing(name: str) -> GraphProto:
    """A body that writes nothing: it does not run."""
    value = numpy_helper.from_array(np.array([False]))
    return _body(helper.make_node("Constant", [], [f"{name}/not_done"], f"{name}/not_done", value=value), name)


def _body(node: NodeProto, name: str) -> GraphProto:
    return helper.make_graph(
        [node], f"{name}/body", [], [helper.make_tensor_value_info(node.output[0], TensorProto.BOOL, [1])]
    )


def _element(op: FunctionEmitter, name: str, position: int, weight: np.ndarray) -> str:
    """A copy of an element of a list."""
    made: Any = op.SequenceAt(name, op.const(np.array(position, np.int64)))
    op.types[made] = (TensorProto.FLOAT, weight.ndim)
    return str(made)
