"""Findings about the operators of ONNX Runtime's training. The expected gradients are worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import helper

from refgrad.conformance.findings.finding import TRAINING, Finding, model

Feeds = Mapping[str, np.ndarray]


def _declared(arrays: Feeds) -> str:
    """The types and names of `arrays`, in onnx's own language"""
    types = {
        name: helper.tensor_dtype_to_string(helper.np_dtype_to_tensor_dtype(a.dtype)) for name, a in arrays.items()
    }
    return ", ".join(
        f"{types[name].removeprefix('TensorProto.').lower()}{list(a.shape) if a.ndim else ''} {name}"
        for name, a in arrays.items()
    )


def _training(
    fault: str, nodes: str, feeds: Feeds, expected: Feeds, proof: str, opset: int = 17, crashes: bool = False
) -> Finding:
    """`nodes` make `expected` of `feeds`; the last one is wrong."""
    text = f"""<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>
    training ({_declared(feeds)}) => ({_declared(expected)}) {{ {nodes} }}"""
    made = model(text)
    return Finding(TRAINING, made.graph.node[-1].op_type, fault, made, feeds, expected, proof, crashes=crashes)


def _gradient(
    fault: str,
    forward: str,
    gradient: str,
    feeds: Feeds,
    expected: Feeds,
    opset: int = 17,
    crashes: bool = False,
) -> Finding:
    """`forward` makes Y of the inputs; `gradient` reads Y_grad and, of what `forward` makes, what it wants.

    What ends the process is alone in its model, and reads its inputs.
    """
    head = f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
    inputs = {name: array for name, array in feeds.items() if name != "Y_grad"}
    first = model(f"{head} forward ({_declared(inputs)}) => ({_declared({'Y': feeds['Y_grad']})}) {{ {forward} }}")
    nodes = gradient if crashes else f"{forward} {gradient}"
    made = model(f"{head} gradient ({_declared(feeds)}) => ({_declared(expected)}) {{ {nodes} }}")
    operator = made.graph.node[-1].op_type
    return Finding(TRAINING, operator, fault, made, feeds, expected, forward=first, crashes=crashes)


def _floats(*values: object) -> np.ndarray:
    return np.array(values, np.float32)


def _ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


_X3 = _floats(1, 3, 2).reshape(1, 1, 3)
_EMPTY = np.zeros((0, 3), np.float32)
_LAYER = {"X": _floats([0, 2]), "S": _floats(1, 1), "B": _floats(0, 0), "Y_grad": _floats([1, 0])}
_LAYER_GRAD = {"X_grad": _floats([0.1875, -0.1875]), "S_grad": _floats(-0.5, 0), "B_grad": _floats(1, 0)}
_LAYER_FORWARD = "Y, mean, r = LayerNormalization <axis = -1, epsilon = 3.0> (X, S, B)"
_LAYER_BACKWARD = (
    "X_grad, S_grad, B_grad = com.microsoft.LayerNormalizationGrad <axis = -1, epsilon = 3.0> (Y_grad, X, S, mean, r)"
)
_INVERTIBLE = (
    "X_grad, S_grad, B_grad = com.microsoft.InvertibleLayerNormalizationGrad <axis = -1, epsilon = 3.0>"
    " (Y_grad, Y, S, B, r)"
)
_SIMPLIFIED_FORWARD = "Y, r = SimplifiedLayerNormalization <axis = -1, epsilon = 5.0> (X, S)"
_SIMPLIFIED = (
    "X_grad, S_grad = com.microsoft.SimplifiedLayerNormalizationGrad <axis = -1, epsilon = 5.0> (Y_grad, X, S, r)"
)
_ONE = {"X": _floats([2]), "S": _floats(1), "B": _floats(0), "Y_grad": _floats([1])}
_ONE_GRAD = {"X_grad": _floats([0]), "S_grad": _floats(0), "B_grad": _floats(1)}
_SLICE = "(X, starts, ends, axes, steps)"
_LOSSES = (("SoftmaxCrossEntropyLoss", ""), ("SoftmaxCrossEntropyLossInternal", "com.microsoft."))
_LABELS = {"label": np.array([0, 1]), "Y_grad": _floats(1, 2)}


def _double(arrays: Feeds) -> dict[str, np.ndarray]:
    return {name: array.astype(np.float64) for name, array in arrays.items()}


def _half(arrays: Feeds) -> dict[str, np.ndarray]:
    return {name: a.astype(np.float16) if a.dtype == np.float32 else a for name, a in arrays.items()}


def _without(arrays: Feeds, *names: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in arrays.items() if name not in names}


FINDINGS = (
    _gradient(
        "takes auto_pad SAME for no pads",
        'Y = Conv <auto_pad = "SAME_UPPER"> (X, W)',
        'X_grad, W_grad = com.microsoft.ConvGrad <auto_pad = "SAME_UPPER"> (Y_grad, X, W)',
        {
            "X": _floats(1, 2, 3).reshape(1, 1, 3),
            "W": _floats(1, 10, 100).reshape(1, 1, 3),
            "Y_grad": _ones(1, 1, 3),
        },
        {"X_grad": _floats(11, 111, 110).reshape(1, 1, 3), "W_grad": _floats(3, 6, 5).reshape(1, 1, 3)},
    ),
    _gradient(
        "ends the process on an empty batch",
        "Y = Conv (X, W)",
        "X_grad, W_grad = com.microsoft.ConvGrad (Y_grad, X, W)",
        {"X": np.zeros((0, 1, 3), np.float32), "W": _ones(1, 1, 3), "Y_grad": np.zeros((0, 1, 1), np.float32)},
        {"X_grad": np.zeros((0, 1, 3), np.float32), "W_grad": np.zeros((1, 1, 3), np.float32)},
        crashes=True,
    ),
    _gradient(
        "takes auto_pad SAME for no pads",
        'Y = AveragePool <auto_pad = "SAME_LOWER", kernel_shape = [2]> (X)',
        'X_grad = AveragePoolGrad <auto_pad = "SAME_LOWER", kernel_shape = [2]> (Y_grad)',
        {"X": _X3, "Y_grad": _ones(1, 1, 3)},
        {"X_grad": _floats(1.5, 1, 0.5).reshape(1, 1, 3)},
        19,
    ),
    _gradient(
        "does not read dilations",
        "Y = AveragePool <dilations = [2], kernel_shape = [2]> (X)",
        "X_grad = AveragePoolGrad <dilations = [2], kernel_shape = [2]> (Y_grad)",
        {"X": _X3, "Y_grad": _ones(1, 1, 1)},
        {"X_grad": _floats(0.5, 0, 0.5).reshape(1, 1, 3)},
        19,
    ),
    _gradient(
        "counts what is beyond the pads, where ceil_mode lets a window reach, with count_include_pad",
        "Y = AveragePool <ceil_mode = 1, count_include_pad = 1, kernel_shape = [2], strides = [2]> (X)",
        "X_grad = AveragePoolGrad <ceil_mode = 1, count_include_pad = 1, kernel_shape = [2], strides = [2]> (Y_grad)",
        {"X": _X3, "Y_grad": _ones(1, 1, 2)},
        {"X_grad": _floats(0.5, 0.5, 1).reshape(1, 1, 3)},
        19,
    ),
    _gradient(
        "is wrong for three spatial axes",
        "Y = AveragePool <kernel_shape = [1, 2, 3]> (X)",
        "X_grad = AveragePoolGrad <kernel_shape = [1, 2, 3]> (Y_grad)",
        {"X": np.arange(24, dtype=np.float32).reshape(1, 1, 2, 3, 4), "Y_grad": _ones(1, 1, 2, 2, 2)},
        {"X_grad": _ones(1, 1, 2, 1, 1) * _floats([1], [2], [1]) * _floats(1, 2, 2, 1) / np.float32(6)},
        19,
    ),
    _gradient(
        "ends the process in float16",
        "Y = AveragePool <kernel_shape = [2]> (X)",
        "X_grad = AveragePoolGrad <kernel_shape = [2]> (Y_grad)",
        _half({"X": _X3, "Y_grad": _ones(1, 1, 2)}),
        _half({"X_grad": _floats(0.5, 1, 0.5).reshape(1, 1, 3)}),
        19,
        crashes=True,
    ),
    _gradient(
        "takes the indices for row major with storage_order = 1",
        "Y, I = MaxPool <kernel_shape = [1, 1], storage_order = 1> (X)",
        "X_grad = MaxPoolGrad <kernel_shape = [1, 1], storage_order = 1> (Y_grad, I)",
        {
            "X": np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3),
            "Y_grad": np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3),
        },
        {"X_grad": np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3)},
    ),
    _gradient(
        "ends the process in float16",
        "Y = MaxPool <kernel_shape = [2]> (X)",
        "X_grad = MaxPoolGrad <kernel_shape = [2]> (Y_grad, I)",
        _half({"X": _X3, "I": np.array([[[1, 1]]]), "Y_grad": _ones(1, 1, 2)}),
        _half({"X_grad": _floats(0, 2, 0).reshape(1, 1, 3)}),
        crashes=True,
    ),
    _gradient(
        "ends the process on empty input along an axis that is not the last",
        "Y = Softmax <axis = 0> (X)",
        "X_grad = com.microsoft.SoftmaxGrad_13 <axis = 0> (Y_grad, P)",
        {"X": _EMPTY, "P": _EMPTY, "Y_grad": _EMPTY},
        {"X_grad": _EMPTY},
        crashes=True,
    ),
    _gradient(
        "ends the process on empty input along an axis that is not the last",
        "Y = LogSoftmax <axis = 0> (X)",
        "X_grad = com.microsoft.LogSoftmaxGrad_13 <axis = 0> (Y_grad, P)",
        {"X": _EMPTY, "P": _EMPTY, "Y_grad": _EMPTY},
        {"X_grad": _EMPTY},
        crashes=True,
    ),
    _gradient(
        "fails in double before opset 13, whose Unsqueeze its body calls",
        "Y = Softmax <axis = 1> (X)",
        "X_grad = com.microsoft.SoftmaxGrad <axis = 1> (Y_grad, Y)",
        {"X": np.zeros((1, 2)), "Y_grad": np.array([[1.0, 0.0]])},
        {"X_grad": np.array([[0.25, -0.25]])},
        11,
    ),
    _gradient(
        "fails on empty operands",
        "Y = Div (A, B)",
        "A_grad, B_grad = com.microsoft.DivGrad (Y_grad, A, B)",
        {"A": _EMPTY, "B": _ones(1, 3), "Y_grad": _EMPTY},
        {"A_grad": _EMPTY, "B_grad": np.zeros((1, 3), np.float32)},
    ),
    _gradient(
        "gives an empty operand a gradient of one element",
        "Y = Div (A, B)",
        "A_grad, B_grad = com.microsoft.DivGrad (Y_grad, A, B)",
        {"A": _floats(), "B": np.array(2, np.float32), "Y_grad": _floats()},
        {"A_grad": _floats(), "B_grad": np.array(0, np.float32)},
    ),
    *(
        _gradient(
            fault,
            f"Y, mask = Dropout (X, ratio{mode})",
            f"X_grad = com.microsoft.DropoutGrad (Y_grad, mask, ratio{mode})",
            {"X": _floats(1, 2), "ratio": np.array(0.5, np.float32), **training, "Y_grad": _floats(3, 4)},
            {"X_grad": _floats(3, 4)},
        )
        for fault, mode, training in (
            ("scales in inference", ", training", {"training": np.array(False)}),
            ("takes a training_mode that is left out for true", "", {}),
        )
    ),
    _gradient(
        "fails on a negative step along the last axis",
        f"Y = Slice {_SLICE}",
        "size = Shape (X) X_grad = com.microsoft.SliceGrad (Y_grad, size, starts, ends, axes, steps)",
        {
            "X": _floats(1, 2, 3),
            "starts": np.array([-1]),
            "ends": np.array([-10]),
            "axes": np.array([0]),
            "steps": np.array([-1]),
            "Y_grad": _floats(1, 2, 3),
        },
        {"X_grad": _floats(3, 2, 1)},
    ),
    _gradient(
        "has no kernel for float16, which its schema allows",
        "Y = Slice (X, starts, ends)",
        "size = Shape (X) X_grad = com.microsoft.SliceGrad (Y_grad, size, starts, ends)",
        _half({"X": _floats(1, 2, 3), "starts": np.array([1]), "ends": np.array([3]), "Y_grad": _floats(4, 5)}),
        _half({"X_grad": _floats(0, 4, 5)}),
    ),
    _gradient(
        "ends the process on an empty batch",
        "Y = GatherND <batch_dims = 1> (X, i)",
        "size = Shape (X) X_grad = com.microsoft.GatherNDGrad <batch_dims = 1> (size, i, Y_grad)",
        {"X": _EMPTY, "i": np.zeros((0, 1), np.int64), "Y_grad": _floats()},
        {"X_grad": _EMPTY},
        crashes=True,
    ),
    _gradient(
        "fails where the mean is in double, which its schema allows",
        "Y = LayerNormalization <axis = -1, epsilon = 3.0> (X, S, B)",
        _LAYER_BACKWARD,
        _double(_LAYER | {"mean": _floats([1]), "r": _floats([0.5])}),
        _double(_LAYER_GRAD),
    ),
    _gradient("fails on rows of one element", _LAYER_FORWARD, _LAYER_BACKWARD, _ONE, _ONE_GRAD),
    _gradient(
        "reads beyond the end of a scale that is broadcast",
        _LAYER_FORWARD,
        _LAYER_BACKWARD,
        _LAYER | {"S": _floats(1), "B": _floats(0)},
        _LAYER_GRAD | {"S_grad": _floats(-0.5), "B_grad": _floats(1)},
    ),
    _gradient("fails in double", _LAYER_FORWARD, _INVERTIBLE, _double(_LAYER), _double(_LAYER_GRAD)),
    _gradient("fails on rows of one element", _LAYER_FORWARD, _INVERTIBLE, _ONE, _ONE_GRAD),
    *(
        _gradient(
            fault,
            _SIMPLIFIED_FORWARD,
            _SIMPLIFIED,
            change(_without(_ONE, "B")),
            change({"X_grad": _floats([5 / 27]), "S_grad": _floats(2 / 3)}),
        )
        for fault, change in (("fails on rows of one element", dict), ("fails in double", _double))
    ),
    _gradient(
        "reads beyond the end of a scale that is broadcast",
        _SIMPLIFIED_FORWARD,
        _SIMPLIFIED,
        {"X": _floats([2, 2]), "S": _floats(1), "Y_grad": _floats([1, 1])},
        {"X_grad": _floats([5 / 27, 5 / 27]), "S_grad": _floats(4 / 3)},
    ),
    *(
        _gradient(
            "ends the process on an empty batch",
            f'Y, log_prob = {domain}{op} <reduction = "sum"> (X, label)',
            f'X_grad = com.microsoft.{op}Grad <reduction = "sum"> (Y_grad, P, label)',
            {"X": _EMPTY, "P": _EMPTY, "label": np.zeros(0, np.int64), "Y_grad": np.array(1, np.float32)},
            {"X_grad": _EMPTY},
            crashes=True,
        )
        for op, domain in _LOSSES
    ),
    *(
        _training(
            "ends the process on an empty batch",
            f'Y, log_prob = {domain}{op} <reduction = "sum"> (X, label)',
            {"X": _EMPTY, "label": np.zeros(0, np.int64)},
            {"Y": np.array(0, np.float32), "log_prob": _EMPTY},
            "the sum of no losses is 0",
            crashes=True,
        )
        for op, domain in _LOSSES
    ),
    _gradient(
        "fails in double before opset 15, whose CastLike its body calls",
        'Y, log_prob = SoftmaxCrossEntropyLoss <reduction = "sum"> (X, label)',
        'X_grad = com.microsoft.SoftmaxCrossEntropyLossGrad <reduction = "sum"> (Y_grad, log_prob, label)',
        {"X": np.zeros((1, 2)), "label": np.array([0]), "Y_grad": np.array(1.0)},
        {"X_grad": np.array([[-0.5, 0.5]])},
        13,
    ),
    _gradient(
        "does not scale each row by its own cotangent without a reduction",
        'Y, log_prob = com.microsoft.SoftmaxCrossEntropy <reduction = "none"> (X, label)',
        'X_grad = com.microsoft.SoftmaxCrossEntropyGrad <reduction = "none"> (Y_grad, log_prob, label)',
        {"X": np.zeros((2, 2), np.float32), "label": np.eye(2, dtype=np.float32), "Y_grad": _floats(1, 2)},
        {"X_grad": _floats([-0.5, 0.5], [1, -1])},
    ),
    _gradient(
        "does not scale each row by its own cotangent without a reduction",
        'Y, log_prob = SparseSoftmaxCrossEntropy <reduction = "none"> (X, label)',
        'X_grad = SparseSoftmaxCrossEntropyGrad <reduction = "none"> (Y_grad, log_prob, label)',
        {"X": np.zeros((2, 2), np.float32), **_LABELS},
        {"X_grad": _floats([-0.5, 0.5], [1, -1])},
    ),
    *(
        _training(
            "adds the losses up where none is to be reduced",
            f'Y, log_prob = {op} <reduction = "none"> (X, label)',
            {"X": np.zeros((2, 2), np.float32), "label": label},
            {"Y": np.full(2, np.log(2), np.float32)},
            "'none': the output is the loss for each sample in the batch; −log(1/2) for both",
        )
        for op, label in (
            ("com.microsoft.SoftmaxCrossEntropy", np.eye(2, dtype=np.float32)),
            ("SparseSoftmaxCrossEntropy", np.array([0, 1])),
        )
    ),
    _training(
        "fails from opset 13 on, whose Unsqueeze its body does not call",
        'Y = com.microsoft.NegativeLogLikelihoodLossInternal <reduction = "sum"> (X, label)',
        {"X": _floats([-1, -2]), "label": np.array([1])},
        {"Y": np.array(2, np.float32)},
        "−X[0, label]",
    ),
    _training(
        "updates the weights where update_signal is false",
        "T_next, m_next, v_next, W_next = com.microsoft.AdamOptimizer (R, T, W, G, m, v, , , , update_signal)",
        {
            "R": np.array(0.5, np.float32),
            "T": np.array(3),
            "W": _floats(1, 2),
            "G": _floats(3, 4),
            "m": _floats(0, 0),
            "v": _floats(1, 1),
            "update_signal": np.array(False),
        },
        {"T_next": np.array(3), "m_next": _floats(0, 0), "v_next": _floats(1, 1), "W_next": _floats(1, 2)},
        "update_signal: this signal indicates if weight tensors should be updated",
    ),
    _training(
        "gives a vector where its shape inference says a scalar",
        "done = com.microsoft.Group (X)",
        {"X": _floats(1)},
        {"done": np.array(True)},
        "the schema infers the shape [] of the result",
    ),
    _training(
        "fails where an input's memory cannot become the output's, as with an input of the graph",
        "Y = com.microsoft.PassThrough (X)",
        {"X": _floats(1)},
        {"Y": _floats(1)},
        "barrier op with value pass through, outputs = inputs",
    ),
    _training(
        "fails where an empty split does not divide the axis",
        "Y, Z = com.microsoft.SplitTraining <axis = 0> (X, split)",
        {"X": _floats(1, 2, 3), "split": np.zeros(0, np.int64)},
        {"Y": _floats(1, 2), "Z": _floats(3)},
        "the schema infers equal lengths, the first ones longer by 1 until the rest is used up",
    ),
)
