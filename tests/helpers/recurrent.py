"""RNN, GRU, LSTM, their training forms and gradients: tables of models and their feeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper

from refgrad.backends import get_backend

MICROSOFT = "com.microsoft"
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
STATES = {"RNN": ["initial_h"], "GRU": ["initial_h"], "LSTM": ["initial_h", "initial_c"]}
INPUTS = {
    "RNN": ["X", "W", "R", "B", "sequence_lens", "initial_h"],
    "GRU": ["X", "W", "R", "B", "sequence_lens", "initial_h"],
    "LSTM": ["X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"],
}
TRAINED = {"GRU": ["HAll", "Ht", "zrh"], "LSTM": ["HAll", "Ht", "Ct", "CAll", "iofc"]}
GRADIENT_READS = {
    "GRU": ["X", "W", "R", "B", "sequence_lens", "initial_h", "HAll", "zrh", "HAll_grad", "Ht_grad"],
    "LSTM": [
        *("X", "W", "R", "sequence_lens", "initial_h", "initial_c"),
        *("HAll", "CAll", "iofc", "HAll_grad", "Ht_grad", "Ct_grad"),
    ],
}
DIFFERENTIATED = {
    "GRU": ["X", "W", "R", "B", "initial_h"],
    "LSTM": ["X", "W", "R", "B", "initial_h", "initial_c", "P"],
}


def arrays(
    op: str, time: int, batch: int, size: int, hidden: int, seed: int = 0, **attrs: Any
) -> dict[str, np.ndarray]:
    """Every input of the operator, in float32; the lengths go from 1 to `time`."""
    rng = np.random.default_rng(seed)
    directions, gates = 1 + (attrs.get("direction") == "bidirectional"), GATES[op]
    shapes: dict[str, tuple[int, ...]] = {
        "X": (time, batch, size),
        "W": (directions, gates * hidden, size),
        "R": (directions, gates * hidden, hidden),
        "B": (directions, 2 * gates * hidden),
        "initial_h": (directions, batch, hidden),
        "initial_c": (directions, batch, hidden),
        "P": (directions, 3 * hidden),
    }
    feeds = {name: rng.standard_normal(shapes[name]).astype(np.float32) for name in INPUTS[op] if name in shapes}
    feeds["sequence_lens"] = (np.arange(batch) % time + 1).astype(np.int32)
    if attrs.get("layout"):
        feeds |= {name: np.swapaxes(feeds[name], 0, 1).copy() for name in ("X", *STATES[op])}
    return feeds


def without(feeds: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    return {name: value for name, value in feeds.items() if name not in names}


def make_model(feeds: dict[str, np.ndarray], nodes: list[onnx.NodeProto], opset: int = 14) -> onnx.ModelProto:
    """A model whose outputs are all that `nodes` make."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for node in nodes for name in node.output if name]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def trained(op: str, feeds: dict[str, np.ndarray], attrs: dict[str, Any]) -> onnx.NodeProto:
    reads = [name if name in feeds else "" for name in INPUTS[op]]
    name = f"{op}Training"
    return helper.make_node(name, reads, TRAINED[op], "t", domain=MICROSOFT, hidden_size=feeds["R"].shape[2], **attrs)


def gradient(
    op: str, feeds: dict[str, np.ndarray], attrs: dict[str, Any], wanted: list[str] | None = None
) -> onnx.ModelProto:
    """The training form and its gradient in one model; cotangents that `feeds` lacks are left out."""
    reads = [name if name in feeds or name in TRAINED[op] else "" for name in GRADIENT_READS[op]]
    makes = [f"{name}_grad" if wanted is None or name in wanted else "" for name in DIFFERENTIATED[op]]
    while not makes[-1]:
        makes.pop()
    name = f"{op}Grad"
    node = helper.make_node(name, reads, makes, "g", domain=MICROSOFT, hidden_size=feeds["R"].shape[2], **attrs)
    return make_model(feeds, [trained(op, feeds, attrs), node])


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], backend: str = "numpy", **options: Any) -> dict[str, Any]:
    return get_backend(backend).prepare(model, **options).run(feeds)


# The activations as the operators' text has them; alpha and beta where they have one.
FUNCTIONS: dict[str, Callable[[float, float, float], float]] = {
    "Relu": lambda x, a, b: max(0.0, x),
    "Tanh": lambda x, a, b: math.tanh(x),
    "Sigmoid": lambda x, a, b: 1 / (1 + math.exp(-x)),
    "Affine": lambda x, a, b: a * x + b,
    "LeakyRelu": lambda x, a, b: x if x >= 0 else a * x,
    "ThresholdedRelu": lambda x, a, b: x if x >= a else 0.0,
    "ScaledTanh": lambda x, a, b: a * math.tanh(b * x),
    "HardSigmoid": lambda x, a, b: min(max(a * x + b, 0.0), 1.0),
    "Elu": lambda x, a, b: x if x >= 0 else a * (math.exp(x) - 1),
    "Softsign": lambda x, a, b: x / (1 + abs(x)),
    "Softplus": lambda x, a, b: math.log(1 + math.exp(x)),
}
DEFAULT = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


PLAIN: tuple[str, ...] = ("B", "sequence_lens", "initial_h", "initial_c", "P")
EVERY = list(FUNCTIONS)
SCALES = {"activation_alpha": [0.4, 0.3, 0.6, 0.7, 0.5, 0.8], "activation_beta": [0.2, 0.6, 0.9, 0.1, 0.4, 0.3]}


def activations(op: str) -> list[dict[str, Any]]:
    """Each function as that of the gates, and as each of the others"""
    lists = [[*DEFAULT[op][:k], name, *DEFAULT[op][k + 1 :]] for k in range(len(DEFAULT[op])) for name in EVERY]
    return [{"activations": names, **SCALES} for names in lists]


def name_of(value: Any) -> str | None:
    if isinstance(value, dict):
        return "-".join(f"{k}={v}" for k, v in value.items() if "alpha" not in k and "beta" not in k) or "default"
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


# Operator, (time, batch, inputs, hidden), inputs and cotangents left out, attributes.
GRADIENTS: list[tuple[str, tuple[int, int, int, int], tuple[str, ...], dict[str, Any]]] = [
    *(
        case
        for op in TRAINED
        for case in (
            (op, (4, 3, 2, 3), (*PLAIN,), {}),
            (op, (4, 3, 2, 3), ("P",), {}),
            (op, (4, 3, 2, 3), ("P", "sequence_lens", "Ht_grad"), {}),
            (op, (4, 3, 2, 3), ("P", "HAll_grad", "initial_h"), {}),
            (op, (4, 3, 2, 3), ("P", "sequence_lens", "Ct_grad", "B"), {}),
            (op, (1, 1, 1, 1), ("P",), {}),
            (op, (1, 3, 2, 2), ("P", "initial_c"), {}),
            (op, (5, 1, 2, 2), ("P", "HAll_grad"), {}),
            (op, (4, 3, 2, 3), ("P",), {"direction": "reverse"}),
            (op, (4, 3, 2, 3), ("P", "sequence_lens"), {"direction": "reverse"}),
            (op, (4, 3, 2, 3), ("P",), {"direction": "bidirectional"}),
            (op, (4, 3, 2, 3), ("P", "sequence_lens", "initial_h"), {"direction": "bidirectional"}),
            (op, (3, 3, 2, 2), ("P",), {"clip": 0.7}),
            *((op, (3, 2, 2, 2), ("P",), {**attrs, "direction": "reverse"}) for attrs in activations(op)),
        )
    ),
    *(
        ("GRU", sizes, left_out, {"linear_before_reset": 1, **attrs})
        for sizes, left_out, attrs in (
            ((4, 3, 2, 3), (), {}),
            ((4, 3, 2, 3), ("B",), {}),
            ((4, 3, 2, 3), ("initial_h", "sequence_lens"), {"direction": "bidirectional"}),
            ((1, 1, 2, 3), ("HAll_grad",), {}),
            ((3, 2, 2, 2), (), {"clip": 0.7, "direction": "reverse"}),
        )
    ),
    ("LSTM", (4, 3, 2, 3), ("P",), {"input_forget": 1}),
    ("LSTM", (4, 3, 2, 3), ("P",), {"input_forget": 1, "direction": "bidirectional"}),
    ("LSTM", (4, 3, 2, 3), ("P", "HAll_grad", "Ht_grad"), {}),
    ("LSTM", (4, 3, 2, 3), ("P", "HAll_grad", "Ct_grad"), {}),
    ("LSTM", (4, 3, 2, 3), ("Ht_grad", "P=0"), {}),
    ("LSTM", (4, 3, 2, 3), ("P=0",), {"direction": "bidirectional"}),
]


def with_cotangents(op: str, feeds: dict[str, np.ndarray], attrs: dict[str, Any]) -> dict[str, np.ndarray]:
    results = run(make_model(feeds, [trained(op, feeds, attrs)]), feeds)
    rng = np.random.default_rng(7)
    names = [name for name in TRAINED[op] if name in ("HAll", "Ht", "Ct")]
    return feeds | {f"{name}_grad": rng.standard_normal(results[name].shape).astype(np.float32) for name in names}


def supported(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What ONNX Runtime's training kernels take: one length; and LSTMGrad takes no peepholes into account."""
    feeds = without(feeds, "sequence_lens")
    if "P" in feeds:
        feeds["P"] = np.zeros_like(feeds["P"])
    return feeds


FORWARD_ONLY = [
    case
    for case in GRADIENTS
    if case[3].keys() <= {"linear_before_reset"} and "B" not in case[2]  # B_grad would be without a B
]
