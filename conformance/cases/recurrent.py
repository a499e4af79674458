"""Cases of RNN, GRU and LSTM: directions, lengths, initial states, peepholes, clips, activations, layouts, absent inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULT = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
OUTPUTS = {"RNN": 2, "GRU": 2, "LSTM": 3}
OPTIONAL = ("B", "sequence_lens", "initial_h", "initial_c", "P")
ACTIVATIONS = (
    *("Relu", "Tanh", "Sigmoid", "Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh", "HardSigmoid", "Elu"),
    *("Softsign", "Softplus"),
)
# Each activation that has the parameter takes the next number in the list.
SCALES: dict[str, Any] = {
    "activation_alpha": [0.4, 0.3, 0.6, 0.7, 0.5, 0.8],
    "activation_beta": [0.2, 0.6, 0.9, 0.1, 0.4, 0.3],
}
NEGATIVE: dict[str, Any] = {"activation_alpha": [-0.4] * 6, "activation_beta": [-0.2] * 6}

# The forms of every operator: the optional inputs that are absent, and the attributes.
FORMS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (OPTIONAL, {}),
    (("sequence_lens", "P"), {}),
    ((), {}),
    (("sequence_lens",), {"direction": "reverse"}),
    ((), {"direction": "reverse"}),
    (("initial_h",), {"direction": "bidirectional"}),
    (("B", "initial_c"), {"direction": "bidirectional", "layout": 1}),
    (OPTIONAL, {"layout": 1}),
)
OF_ONE: dict[str, tuple[tuple[tuple[str, ...], dict[str, Any]], ...]] = {
    "RNN": (),
    "GRU": (
        (("sequence_lens",), {"linear_before_reset": 1}),
        (("B",), {"linear_before_reset": 1}),
        ((), {"linear_before_reset": 1, "direction": "bidirectional", "layout": 1}),
    ),
    "LSTM": (
        ((), {"input_forget": 1}),
        (("P", "sequence_lens"), {"input_forget": 1, "direction": "bidirectional"}),
        (("P", "initial_h"), {"direction": "bidirectional"}),
    ),
}


def cases() -> Iterator[Case]:
    """Cases that ONNX Runtime computes as specified, or refuses."""
    for op in GATES:
        for shapes in SHAPES:
            for absent, attributes in (*FORMS, *OF_ONE[op]):
                yield recurrent(op, absent=absent, shapes=shapes, **attributes)
        for absent in (("B",), ("sequence_lens", "initial_h"), ("sequence_lens", "initial_c"), ("P",)):
            yield recurrent(op, absent=absent, opset=22)
        yield recurrent(op, (1, 1, 1, 1))
        yield recurrent(op, (1, 3, 2, 2), direction="bidirectional")
        yield recurrent(op, (6, 1, 3, 2), ("sequence_lens",), opset=16)
        for places in range(len(DEFAULT[op])):
            for name in ACTIVATIONS:
                names = [*DEFAULT[op][:places], name, *DEFAULT[op][places + 1 :]]
                yield recurrent(op, (3, 2, 2, 2), activations=names, **SCALES)
        if op != "RNN":
            yield from _unscaled(op)
        for name in ("Affine", "LeakyRelu", "ScaledTanh", "Elu"):
            yield recurrent(op, (3, 2, 2, 2), activations=[*DEFAULT[op][:-1], name], **NEGATIVE)
        first = 3 if op == "RNN" else 2  # 1.19.2 counts RNN's parameters by direction, even where there are none
        several = list(ACTIVATIONS[first : first + 2 * len(DEFAULT[op])])
        yield recurrent(op, (3, 2, 2, 2), direction="bidirectional", activations=several, **SCALES)
        if op != "LSTM":
            yield from _clipped(op)


def apart() -> Iterator[Case]:
    """Cases in which ONNX Runtime is wrong (conformance/known/bugs/recurrent.toml) or ends the process."""
    yield from _clipped("LSTM")
    yield from _unscaled("RNN")  # wrong in 1.19.2 only
    for op in GATES:
        names = [*DEFAULT[op][:-1], "ThresholdedRelu"]
        yield recurrent(op, (4, 4, 2, 3), activations=names)
        yield recurrent(op, (4, 4, 2, 3), activations=names, **NEGATIVE)
        for form in FORMS[:3]:
            for shapes in SHAPES:
                yield recurrent(op, (3, 0, 2, 2), form[0], shapes=shapes)
                yield recurrent(op, (0, 3, 2, 2), form[0], shapes=shapes)
        yield recurrent(op, (0, 3, 2, 2), layout=1)
        yield recurrent(op, (3, 2, 0, 2), OPTIONAL)


def _clipped(op: str) -> Iterator[Case]:
    """Few elements, none of them near the clip: differences take steps of a thousandth."""
    few = (3, 2, 2, 2)
    yield recurrent(op, few, clip=0.3, direction="bidirectional")
    yield recurrent(op, few, OPTIONAL, clip=0.5)
    yield recurrent(op, few, OPTIONAL, clip=50.0)
    yield recurrent(op, few, activations=[*DEFAULT[op][:-1], "Affine"], clip=0.35, **SCALES)


def _unscaled(op: str) -> Iterator[Case]:
    for name in ("LeakyRelu", "HardSigmoid", "Elu"):
        yield recurrent(op, (3, 2, 2, 2), ("sequence_lens",), activations=[*DEFAULT[op][:-1], name])


def recurrent(
    op: str,
    sizes: tuple[int, int, int, int] = (4, 3, 2, 3),
    absent: tuple[str, ...] = (),
    opset: int = 21,
    shapes: str = "static",
    layout: int = 0,
    kind: Any = np.float32,
    **attributes: Any,
) -> Case:
    """`op` in `kind` over (time, batch, inputs, hidden); sequences as long as X, half as long, and empty."""
    time, batch, size, hidden = sizes
    rng = np.random.default_rng(len(attributes))
    directions, rows = 1 + (attributes.get("direction") == "bidirectional"), GATES[op] * hidden

    def numbers(*shape: int) -> np.ndarray:
        return (0.7 * rng.standard_normal(shape)).astype(kind)

    lengths = np.array([(time, time // 2, 0)[k % 3] for k in range(batch)], np.int32)
    inputs = {
        "X": numbers(*((batch, time) if layout else (time, batch)), size),
        "W": numbers(directions, rows, size),
        "R": numbers(directions, rows, hidden),
        "B": numbers(directions, 2 * rows),
        "sequence_lens": lengths,
    }
    for name in ("initial_h", "initial_c") if op == "LSTM" else ("initial_h",):
        inputs[name] = numbers(*((batch, directions) if layout else (directions, batch)), hidden)
    if op == "LSTM":
        inputs["P"] = numbers(directions, 3 * hidden)
    given = [None if name in absent else value for name, value in inputs.items()]
    settings = attributes | ({"layout": 1} if layout else {})
    return node_case(op, *given, outputs=OUTPUTS[op], opset=opset, shapes=shapes, hidden_size=hidden, **settings)
