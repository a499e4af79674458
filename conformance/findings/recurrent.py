"""Findings about recurrent operators. With weights of 0 a gate is sigmoid(0) = 1/2 and a new value tanh(0) = 0."""

from __future__ import annotations

import math

import numpy as np
from onnx import ModelProto

from refgrad.conformance.findings.finding import ORT, REFERENCE, TRAINING, Finding, model

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def _array(*values: float, shape: tuple[int, ...]) -> np.ndarray:
    return np.array(values, np.float32).reshape(shape)


def _one(op: str, attributes: str = "", time: int = 1, lengths: bool = False) -> ModelProto:
    """`op` with one sequence of numbers, and a hidden size of 1"""
    gates, states = _GATES[op], ["initial_h", "initial_c"] if op == "LSTM" else ["initial_h"]
    reads = f"X, W, R, B, {'sequence_lens' if lengths else ''}, {', '.join(states)}"
    results = ["Y_h", "Y_c"] if op == "LSTM" else ["Y_h"]
    return model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        network (float[{time}, 1, 1] X, float[1, {gates}, 1] W, float[1, {gates}, 1] R, float[1, {2 * gates}] B,
                 {"int32[1] sequence_lens," if lengths else ""} {", ".join(f"float[1, 1, 1] {name}" for name in states)})
        => (float[{time}, 1, 1, 1] Y, {", ".join(f"float[1, 1, 1] {name}" for name in results)}) {{
            Y, {", ".join(results)} = {op} <hidden_size = 1 {attributes}> ({reads})
        }}
    """)


def _feeds(op: str, X: list[float], W: list[float], B: list[float], state: float = 0.0) -> dict[str, np.ndarray]:
    """R and the bias of the recurrence are 0; `state` is the one that starts: of LSTM, the cell"""
    gates = len(W)
    feeds = {
        "X": _array(*X, shape=(len(X), 1, 1)),
        "W": _array(*W, shape=(1, gates, 1)),
        "R": np.zeros((1, gates, 1), np.float32),
        "B": _array(*B, *[0.0] * gates, shape=(1, 2 * gates)),
        "initial_h": _array(0.0 if op == "LSTM" else state, shape=(1, 1, 1)),
    }
    return feeds | ({"initial_c": _array(state, shape=(1, 1, 1))} if op == "LSTM" else {})


def _results(Y: list[float], C: float | None = None, last: float | None = None) -> dict[str, np.ndarray]:
    expected = {
        "Y": _array(*Y, shape=(len(Y), 1, 1, 1)),
        "Y_h": _array(Y[-1] if last is None else last, shape=(1, 1, 1)),
    }
    return expected if C is None else expected | {"Y_c": _array(C, shape=(1, 1, 1))}


_CLIP = "Clipping ... is applied to the input of activations"
_LENGTHS = "sequence_lens: the lengths of the sequences in a batch; what follows is padding"
_HALF_TANH_1 = math.tanh(1.0) / 2


def _empty(system: str, op: str, training: bool) -> Finding:
    gates, name = _GATES[op], f"{op}Training" if training else op
    domain = "com.microsoft." if training else ""
    results = {"GRU": ["Y", "Y_h", "zrh"], "LSTM": ["Y", "Y_h", "Y_c", "CAll", "iofc"]}[op]
    return Finding(
        system,
        name,
        "ends the process on an empty batch",
        model(f"""
            <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
            network (float[3, 0, 2] X, float[1, {gates}, 2] W, float[1, {gates}, 1] R) => (float[3, 1, 0, 1] Y) {{
                {", ".join(results) if training else "Y"} = {domain}{name} <hidden_size = 1> (X, W, R)
            }}
        """),
        {
            "X": np.zeros((3, 0, 2), np.float32),
            "W": np.ones((1, gates, 2), np.float32),
            "R": np.ones((1, gates, 1), np.float32),
        },
        {"Y": np.zeros((3, 1, 0, 1), np.float32)},
        proof="an empty batch has an empty result: Y has shape [seq_length, num_directions, batch_size, hidden_size]",
        crashes=True,
    )


def _unwanted(op: str, wanted: str) -> Finding:
    """Two steps of hidden size 1, every weight 0, so that all gates are 1/2 and new values 0."""
    gates = _GATES[op]
    results = {"GRU": "Y, Y_h, zrh", "LSTM": "Y, Y_h, Y_c, CAll, iofc"}[op]
    reads = {"GRU": "X, W, R, , , , Y, zrh, Y_grad", "LSTM": "X, W, R, , , , Y, CAll, iofc, Y_grad"}[op]
    makes = {"X": "X_grad", "W": ", W_grad"}[wanted]
    shape = {"X": "[2, 1, 1]", "W": f"[1, {gates}, 1]"}[wanted]
    signature = f"float[2, 1, 1] X, float[1, {gates}, 1] W, float[1, {gates}, 1] R"
    # The argument of the new value gets dH·(1 − z), dH = dY + dH₊₁·z, in GRU; dC·i, dC = dY·o + dC₊₁·f, in LSTM.
    feeds = {
        "X": _array(1, 2, shape=(2, 1, 1)),
        "W": np.zeros((1, gates, 1), np.float32),
        "R": np.zeros((1, gates, 1), np.float32),
        "Y_grad": _array(4, 8, shape=(2, 1, 1, 1)),
    }
    first, second = {"GRU": (4 / 2 + 8 / 4, 8 / 2), "LSTM": (4 / 4 + 8 / 8, 8 / 4)}[op]
    expected = np.zeros((2, 1, 1), np.float32) if wanted == "X" else np.zeros((1, gates, 1), np.float32)
    if wanted == "W":
        expected[0, -1, 0] = first * 1 + second * 2
    return Finding(
        TRAINING,
        f"{op}Grad",
        f"ends the process where only the gradient of {wanted} is asked for",
        model(f"""
            <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
            gradient ({signature}, float[2, 1, 1, 1] Y_grad) => (float{shape} {wanted}_grad) {{
                {results} = com.microsoft.{op}Training <hidden_size = 1> (X, W, R)
                {makes} = com.microsoft.{op}Grad <hidden_size = 1> ({reads})
            }}
        """),
        feeds,
        {f"{wanted}_grad": expected},
        forward=model(f"""
            <ir_version: 10, opset_import: ["" : 21]>
            network ({signature}) => (float[2, 1, 1, 1] Y) {{ Y = {op} <hidden_size = 1> (X, W, R) }}
        """),
        crashes=True,
    )


FINDINGS = (
    Finding(
        REFERENCE,
        "RNN",
        "does not read sequence_lens",
        _one("RNN", time=2, lengths=True),
        _feeds("RNN", [1, 1], [1], [0]) | {"sequence_lens": np.array([1], np.int32)},
        _results([math.tanh(1), 0], last=math.tanh(1)),
        proof=f"{_LENGTHS}: of tanh(1), tanh(1) the second is not part of the sequence",
    ),
    Finding(
        REFERENCE,
        "GRU",
        "does not read sequence_lens",
        _one("GRU", time=2, lengths=True),
        _feeds("GRU", [1, 1], [0, 0, 0], [0, 0, 0], 1.0) | {"sequence_lens": np.array([1], np.int32)},
        _results([0.5, 0], last=0.5),
        proof=f"{_LENGTHS}; H = z·1 = 1/2 after one step, and the second step is not part of the sequence",
    ),
    Finding(
        REFERENCE,
        "LSTM",
        "does not read sequence_lens",
        _one("LSTM", time=2, lengths=True),
        _feeds("LSTM", [1, 1], [0] * 4, [0] * 4, 2.0) | {"sequence_lens": np.array([1], np.int32)},
        _results([_HALF_TANH_1, 0], 1.0, _HALF_TANH_1),
        proof=f"{_LENGTHS}; C = 2/2, H = tanh(1)/2 after one step, and the second step is not part of the sequence",
    ),
    Finding(
        REFERENCE,
        "RNN",
        "does not read clip",
        _one("RNN", ", clip = 1.0"),
        _feeds("RNN", [2], [1], [0]),
        _results([math.tanh(1)]),
        proof=f"{_CLIP}: tanh of 2 clipped to 1",
    ),
    Finding(
        REFERENCE,
        "GRU",
        "does not read clip",
        _one("GRU", ", clip = 1.0"),
        _feeds("GRU", [2], [0, 0, 1], [0, 0, 0]),
        _results([_HALF_TANH_1]),
        proof=f"{_CLIP}: h is tanh of 2 clipped to 1, and H = (1 − 1/2)·h",
    ),
    Finding(
        REFERENCE,
        "LSTM",
        "does not read clip",
        _one("LSTM", ", clip = 1.0"),
        _feeds("LSTM", [2], [0, 0, 0, 2], [0] * 4),
        _results([math.tanh(math.tanh(1) / 2) / 2], math.tanh(1) / 2),
        proof=f"{_CLIP}: c is tanh of 4 clipped to 1, C = c/2, H = tanh(C)/2",
    ),
    Finding(
        REFERENCE,
        "RNN",
        "knows Tanh and Affine only",
        _one("RNN", ', activations = ["Relu"]'),
        _feeds("RNN", [2], [1], [0]),
        _results([2]),
        proof="Relu is one of the functions that activations may name; Relu(2) = 2",
    ),
    Finding(
        REFERENCE,
        "GRU",
        "does not read activations",
        _one("GRU", ', activations = ["Sigmoid", "Relu"]'),
        _feeds("GRU", [2], [0, 0, 1], [0, 0, 0]),
        _results([1]),
        proof="g is Relu: h = Relu(2), and H = (1 − 1/2)·h",
    ),
    Finding(
        REFERENCE,
        "LSTM",
        "does not read activations",
        _one("LSTM", ', activations = ["Sigmoid", "Relu", "Relu"]'),
        _feeds("LSTM", [2], [0, 0, 0, 1], [0] * 4),
        _results([0.5], 1.0),
        proof="g and h are Relu: c = Relu(2), C = c/2, H = Relu(C)/2",
    ),
    Finding(
        REFERENCE,
        "LSTM",
        "does not read input_forget",
        _one("LSTM", ", input_forget = 1"),
        _feeds("LSTM", [0], [0] * 4, [math.log(3), 0, 0, 0], 4.0),
        _results([_HALF_TANH_1], 1.0),
        proof="the gates are coupled: i = sigmoid(log 3) = 3/4, f = 1 − i = 1/4, C = 4/4, H = tanh(1)/2",
    ),
    *(
        Finding(
            REFERENCE,
            op,
            "fails on a sequence without steps",
            model(f"""
                <ir_version: 10, opset_import: ["" : 21]>
                network (float[0, 2, 1] X, float[1, {gates}, 1] W, float[1, {gates}, 1] R) => (float[0, 1, 2, 1] Y) {{
                    Y = {op} <hidden_size = 1> (X, W, R)
                }}
            """),
            {
                "X": np.zeros((0, 2, 1), np.float32),
                "W": np.ones((1, gates, 1), np.float32),
                "R": np.ones((1, gates, 1), np.float32),
            },
            {"Y": np.zeros((0, 1, 2, 1), np.float32)},
            proof="Y has shape [seq_length, num_directions, batch_size, hidden_size]",
        )
        for op, gates in _GATES.items()
    ),
    Finding(
        ORT,
        "LSTM",
        "clips the input of f and g, but not that of h",
        _one("LSTM", ", clip = 1.0"),
        _feeds("LSTM", [0], [0] * 4, [0] * 4, 4.0),
        _results([_HALF_TANH_1], 2.0),
        proof=f"{_CLIP}, and h is one: C = 4/2, H = h(C clipped to 1)/2 = tanh(1)/2",
    ),
    *(
        Finding(
            ORT,
            op,
            "takes 0 for the alpha of ThresholdedRelu that is not given",
            _one(op, f", activations = [{names}]"),
            _feeds(op, [0.5], [0.0] * (gates - 1) + [1.0], [0.0] * gates),
            _results([0], 0.0 if op == "LSTM" else None),
            proof="Default values are the same as of corresponding ONNX operators: alpha is 1, and 0.5 is below it",
        )
        for op, gates, names in (
            ("RNN", 1, '"ThresholdedRelu"'),
            ("GRU", 3, '"Sigmoid", "ThresholdedRelu"'),
            ("LSTM", 4, '"Sigmoid", "ThresholdedRelu", "Tanh"'),
        )
    ),
    *(
        Finding(
            ORT,
            op,
            "gives 0 for ThresholdedRelu where x is alpha",
            _one(op, f", activations = [{names}], activation_alpha = [2.0]"),
            _feeds(op, [2.0], [0.0] * (gates - 1) + [1.0], [0.0] * gates),
            _results(*results),
            proof="ThresholdedRelu(x): x if x >= alpha else 0, so it is 2 at 2 (the operator of that name has x > alpha)",
        )
        for op, gates, names, results in (
            ("RNN", 1, '"ThresholdedRelu"', ([2.0],)),
            ("GRU", 3, '"Sigmoid", "ThresholdedRelu"', ([1.0],)),
            ("LSTM", 4, '"Sigmoid", "ThresholdedRelu", "Tanh"', ([_HALF_TANH_1], 1.0)),
        )
    ),
    _empty(ORT, "GRU", False),
    _empty(ORT, "LSTM", False),
    _empty(TRAINING, "GRU", True),
    _empty(TRAINING, "LSTM", True),
    *(
        Finding(
            TRAINING,
            "RNN",
            f"takes 0 for the parameters of {name} that are not given",
            _one("RNN", f', activations = ["{name}"]'),
            _feeds("RNN", [x], [1], [0]),
            _results([y]),
            proof=f"Default values are the same as of corresponding ONNX operators: {default}",
        )
        for name, x, y, default in (
            ("LeakyRelu", -2.0, -0.02, "alpha is 0.01"),
            ("Elu", -math.log(2), -0.5, "alpha is 1, and e^(−log 2) − 1 = −1/2"),
            ("HardSigmoid", 1.0, 0.7, "alpha is 0.2 and beta 0.5"),
        )
    ),
    *(_unwanted(op, wanted) for op in ("GRU", "LSTM") for wanted in ("X", "W")),
)
