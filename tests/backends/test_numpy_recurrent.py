"""RNN, GRU, LSTM, their training forms and gradients: against loops over numbers, ONNX Runtime, torch and differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from recurrent import (
    DEFAULT,
    DIFFERENTIATED,
    EVERY,
    FORWARD_ONLY,
    FUNCTIONS,
    GATES,
    GRADIENTS,
    INPUTS,
    PLAIN,
    SCALES,
    STATES,
    TRAINED,
    activations,
    arrays,
    gradient,
    make_model,
    name_of,
    run,
    supported,
    trained,
    with_cotangents,
    without,
)

from refgrad.backends import available, get_backend
from refgrad.conformance.oracles.central import directional
from refgrad.derivatives import ortbuilder
from refgrad.errors import BackendError

NUMPY = get_backend("numpy")
# The training build is of an older version, with other defaults in RNN and nothing written for a sequence of length 0.
RUNTIME = "ort-cpu" in available() and not ortbuilder.available()
OUTPUTS = {"RNN": ["Y", "Y_h"], "GRU": ["Y", "Y_h"], "LSTM": ["Y", "Y_h", "Y_c"]}
ORT_STATE = "h of LSTM reads C, which is not clipped"
ORT_THRESHOLD = "the alpha of ThresholdedRelu is 0 where it is not given"
ORT_EQUAL = "ThresholdedRelu of alpha is 0"
ORT_LAYOUT = "layout 1 is not supported"


def forward(
    op: str, feeds: dict[str, np.ndarray], attrs: dict[str, Any], opset: int = 14, outputs: list[str] | None = None
) -> onnx.ModelProto:
    reads = [name if name in feeds else "" for name in INPUTS[op]]
    node = helper.make_node(op, reads, outputs or OUTPUTS[op], name="n", hidden_size=feeds["R"].shape[2], **attrs)
    return make_model(feeds, [node], opset)


def assert_same(got: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        assert got[name].dtype == value.dtype, name
        wide, size = value.astype(np.float64), np.max(np.abs(value.astype(np.float64)), initial=1e-3)
        np.testing.assert_allclose(got[name].astype(np.float64), wide, tolerance, tolerance * size, err_msg=name)


USES_ALPHA = ("Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh", "HardSigmoid", "Elu")
USES_BETA = ("Affine", "ScaledTanh", "HardSigmoid")
DEFAULT_ALPHA = {"LeakyRelu": 0.01, "ThresholdedRelu": 1.0, "HardSigmoid": 0.2, "Elu": 1.0}
DEFAULT_BETA = {"HardSigmoid": 0.5}


def dot(a: Any, b: Any) -> float:
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def scaled_activations(op: str, directions: int, attrs: dict[str, Any]) -> list[Callable[[float], float]]:
    names = attrs.get("activations", DEFAULT[op] * directions)
    alphas, betas = list(attrs.get("activation_alpha", [])), list(attrs.get("activation_beta", []))
    clip, functions = attrs.get("clip", math.inf), []
    for name in names:
        a = (alphas.pop(0) if alphas else DEFAULT_ALPHA[name]) if name in USES_ALPHA else 0.0
        b = (betas.pop(0) if betas else DEFAULT_BETA[name]) if name in USES_BETA else 0.0
        functions.append(lambda x, f=FUNCTIONS[name], a=a, b=b: f(min(max(x, -clip), clip), a, b))
    return functions


def spec(op: str, feeds: dict[str, np.ndarray], attrs: dict[str, Any]) -> dict[str, np.ndarray]:
    """The equations of the operator, number by number: each sequence alone, cut to its length, reversed where asked."""
    layout = attrs.get("layout", 0)
    X, W, R = feeds["X"].swapaxes(0, 1) if layout else feeds["X"], feeds["W"], feeds["R"]
    time, batch, _ = X.shape
    directions, rows, n = R.shape
    B, P = feeds.get("B", np.zeros((directions, 2 * rows))), feeds.get("P", np.zeros((directions, 3 * n)))
    lengths = feeds.get("sequence_lens", np.full(batch, time))
    functions = scaled_activations(op, directions, attrs)
    Y = np.zeros((time, directions, batch, n))
    last = {name: np.zeros((directions, batch, n)) for name in ("Y_h", "Y_c")}
    for d in range(directions):
        f, g, out = (functions[d * len(DEFAULT[op]) :] * 3)[:3]
        for s in range(batch):
            steps = list(range(int(lengths[s])))
            if attrs.get("direction") == "reverse" or d == 1:
                steps.reverse()
            starts = [feeds.get(name, np.zeros(Y.shape[1:])) for name in ("initial_h", "initial_c")]
            h, c = ([float(v) for v in (x[s, d] if layout and x.any() else x[d, s])] for x in starts)
            for t in steps:
                x = [dot(X[t, s], row) + float(b) for row, b in zip(W[d], B[d, :rows], strict=True)]
                r = [dot(h, row) + float(b) for row, b in zip(R[d], B[d, rows:], strict=True)]
                if op == "RNN":
                    h = [f(x[j] + r[j]) for j in range(n)]
                elif op == "GRU":
                    update = [f(x[j] + r[j]) for j in range(n)]
                    reset = [f(x[n + j] + r[n + j]) for j in range(n)]
                    if attrs.get("linear_before_reset"):
                        inner = [reset[j] * r[2 * n + j] for j in range(n)]
                    else:
                        masked = [reset[j] * h[j] for j in range(n)]
                        inner = [dot(masked, R[d, 2 * n + j]) + float(B[d, 5 * n + j]) for j in range(n)]
                    new = [g(x[2 * n + j] + inner[j]) for j in range(n)]
                    h = [(1 - update[j]) * new[j] + update[j] * h[j] for j in range(n)]
                else:
                    i = [f(x[j] + r[j] + float(P[d, j]) * c[j]) for j in range(n)]
                    forget = [f(x[2 * n + j] + r[2 * n + j] + float(P[d, 2 * n + j]) * c[j]) for j in range(n)]
                    if attrs.get("input_forget"):
                        forget = [1 - value for value in i]
                    c = [forget[j] * c[j] + i[j] * g(x[3 * n + j] + r[3 * n + j]) for j in range(n)]
                    o = [f(x[n + j] + r[n + j] + float(P[d, n + j]) * c[j]) for j in range(n)]
                    h = [o[j] * out(c[j]) for j in range(n)]
                Y[t, d, s] = h
            if steps:
                last["Y_h"][d, s], last["Y_c"][d, s] = h, c
    results = {"Y": Y, **last}
    if layout:
        results = {"Y": Y.transpose(2, 0, 1, 3)} | {k: v.swapaxes(0, 1) for k, v in last.items()}
    return {name: results[name] for name in OUTPUTS[op]}


BOUNDED = ["Sigmoid", "Tanh", "HardSigmoid", "Softsign", "ScaledTanh"]


# Operator, (time, batch, inputs, hidden), inputs left out, attributes, what ONNX Runtime has otherwise.
CASES: list[tuple[str, tuple[int, int, int, int], tuple[str, ...], dict[str, Any], str]] = [
    *(
        case
        for op in GATES
        for case in (
            (op, (4, 3, 2, 3), PLAIN, {}, ""),
            (op, (4, 3, 2, 3), (), {}, ""),
            (op, (4, 3, 2, 3), ("sequence_lens",), {"direction": "reverse"}, ""),
            (op, (4, 3, 2, 3), (), {"direction": "reverse"}, ""),
            (op, (4, 3, 2, 3), ("initial_h",), {"direction": "bidirectional"}, ""),
            (op, (4, 3, 2, 3), (), {"direction": "bidirectional", "layout": 1}, ORT_LAYOUT),
            (op, (3, 4, 1, 2), ("B",), {"layout": 1}, ORT_LAYOUT),
            (op, (1, 1, 1, 1), (), {}, ""),
            (op, (1, 3, 2, 2), ("initial_c",), {"direction": "bidirectional"}, ""),
            (op, (6, 1, 3, 2), ("B", "P"), {"direction": "bidirectional"}, ""),
            (op, (3, 2, 2, 2), (), {"clip": 0.3, "direction": "bidirectional"}, ORT_STATE if op == "LSTM" else ""),
            (op, (3, 2, 2, 2), PLAIN, {"clip": 50.0}, ""),
            *((op, (3, 2, 2, 2), ("P",), attrs, "") for attrs in activations(op)),
            *(
                (op, (3, 2, 2, 2), (), {"activations": [*DEFAULT[op][:-1], name]}, "")
                for name in ("LeakyRelu", "HardSigmoid", "Elu")
            ),
            (op, (4, 4, 2, 3), (), {"activations": [*DEFAULT[op][:-1], "ThresholdedRelu"]}, ORT_THRESHOLD),
            (
                op,
                (4, 4, 2, 3),
                (),
                {"activations": [*DEFAULT[op][:-1], "ThresholdedRelu"], "activation_alpha": [0.25], "clip": 0.25},
                ORT_EQUAL,
            ),
            (
                op,
                (3, 2, 2, 2),
                (),
                {"direction": "bidirectional", "activations": (EVERY * 2)[2 : 2 + 2 * len(DEFAULT[op])], **SCALES},
                "",
            ),
        )
    ),
    ("GRU", (4, 3, 2, 3), (), {"linear_before_reset": 1}, ""),
    ("GRU", (4, 3, 2, 3), ("B",), {"linear_before_reset": 1, "direction": "bidirectional"}, ""),
    ("GRU", (4, 3, 2, 3), (), {"linear_before_reset": 1, "clip": 0.4, "direction": "reverse"}, ""),
    ("LSTM", (4, 3, 2, 3), (), {"input_forget": 1}, ""),
    ("LSTM", (4, 3, 2, 3), ("P",), {"input_forget": 1, "direction": "bidirectional"}, ""),
    ("LSTM", (4, 3, 2, 3), ("B", "initial_h"), {"direction": "bidirectional"}, ""),
]


@pytest.mark.parametrize(("op", "sizes", "left_out", "attrs", "ort"), CASES, ids=name_of)
def test_equations(op: str, sizes: Any, left_out: tuple[str, ...], attrs: dict[str, Any], ort: str) -> None:
    feeds = without(arrays(op, *sizes, **attrs), *left_out)
    model = forward(op, feeds, attrs)
    expected = spec(op, feeds, attrs)
    assert_same(run(model, feeds, precision="float64"), expected, 1e-7)  # attributes are float32
    single = run(model, feeds)
    assert_same(single, {name: value.astype(np.float32) for name, value in expected.items()}, 1e-5)
    if not RUNTIME:
        return
    try:
        actual = run(model, feeds, "ort-cpu")
    except BackendError:
        assert ort
        return
    same = all(np.allclose(actual[name], single[name], 1e-4, 1e-5) for name in single)
    assert same == (not ort)


@st.composite
def networks(draw: st.DrawFn, ops: tuple[str, ...] = ("RNN", "GRU", "LSTM")) -> Any:
    op = draw(st.sampled_from(ops))
    sizes = [draw(st.integers(1, 5)) for _ in range(4)]
    attrs: dict[str, Any] = {"direction": draw(st.sampled_from(["forward", "reverse", "bidirectional"]))}
    directions = 1 + (attrs["direction"] == "bidirectional")
    if draw(st.booleans()):
        # Gates without bounds grow, and what cancels in large numbers is lost.
        kinds = [EVERY if op == "RNN" else BOUNDED, EVERY, EVERY][: len(DEFAULT[op])] * directions
        attrs["activations"] = [draw(st.sampled_from(kind)) for kind in kinds]
        scales = st.lists(st.sampled_from([0.3, 0.55, 0.8]), min_size=len(kinds), max_size=len(kinds))
        attrs["activation_alpha"], attrs["activation_beta"] = draw(scales), draw(scales)
    if draw(st.integers(0, 3)) == 0:
        attrs["clip"] = draw(st.sampled_from([0.25, 0.5, 1.0, 2.0]))
    if op == "GRU":
        attrs["linear_before_reset"] = draw(st.integers(0, 1))
    if op == "LSTM":
        attrs["input_forget"] = draw(st.integers(0, 1))
    feeds = arrays(op, *sizes, draw(st.integers(0, 1000)), **attrs)
    feeds["sequence_lens"] = np.array([draw(st.integers(0, sizes[0])) for _ in range(sizes[1])], np.int32)
    feeds = {name: value for name, value in feeds.items() if name in ("X", "W", "R") or draw(st.booleans())}
    return op, feeds, attrs


@settings(max_examples=50, deadline=None, derandomize=True)
@given(networks())
def test_equations_anywhere(network: Any) -> None:
    op, feeds, attrs = network
    attrs = attrs | {"layout": 1}
    feeds = feeds | {name: np.swapaxes(feeds[name], 0, 1).copy() for name in ("X", *STATES[op]) if name in feeds}
    assert_same(run(forward(op, feeds, attrs), feeds, precision="float64"), spec(op, feeds, attrs), 1e-6)


@pytest.mark.skipif(not RUNTIME, reason="needs onnxruntime")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(networks())
def test_onnxruntime_agrees(network: Any) -> None:
    op, feeds, attrs = network
    if op == "LSTM":
        attrs = without(attrs, "clip")  # see ORT_STATE
    model = forward(op, feeds, attrs)
    assert_same(run(model, feeds), run(model, feeds, "ort-cpu"), 1e-4 if "activations" in attrs else 1e-5)


VERSIONS = [
    (schema.name, schema.since_version, dtype)
    for schema in onnx.defs.get_all_schemas_with_history()
    if schema.name in GATES and not schema.domain
    for dtype in (np.float16, np.float32, np.float64, *([ml_dtypes.bfloat16] if schema.since_version >= 22 else []))
]


@pytest.mark.parametrize(("op", "version", "dtype"), VERSIONS)
def test_versions_and_types(op: str, version: int, dtype: Any) -> None:
    feeds = {name: x if x.dtype == np.int32 else x.astype(dtype) for name, x in arrays(op, 3, 2, 2, 3).items()}
    attrs = {"output_sequence": 1} if version < 7 else {}
    got = run(forward(op, feeds, attrs, version), feeds)
    wide = {name: x if x.dtype == np.int32 else x.astype(np.float64) for name, x in feeds.items()}
    expected = spec(op, wide, attrs)
    if np.dtype(dtype).itemsize == 2:  # computed in float32, rounded once
        single = {name: x if x.dtype == np.int32 else x.astype(np.float32) for name, x in feeds.items()}
        rounded = run(forward(op, single, attrs, version), single)
        assert_same(got, {name: value.astype(dtype) for name, value in rounded.items()}, 0)
    tolerance = {2: 1e-3, 4: 1e-5, 8: 1e-13}[np.dtype(dtype).itemsize] * (8 if dtype is ml_dtypes.bfloat16 else 1)
    assert_same(got, {name: value.astype(dtype) for name, value in expected.items()}, tolerance)


@pytest.mark.skipif(not RUNTIME, reason="needs onnxruntime")
@pytest.mark.parametrize("op", GATES)
def test_half_as_onnxruntime(op: str) -> None:
    feeds = {k: x if x.dtype == np.int32 else x.astype(np.float16) for k, x in arrays(op, 5, 3, 4, 6).items()}
    model = forward(op, feeds, {})
    try:
        expected = run(model, feeds, "ort-cpu")
    except BackendError as error:
        pytest.skip(str(error))
    assert_same(run(model, feeds), expected, 1e-3)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in GATES for name in OUTPUTS[op]])
def test_one_output(op: str, name: str) -> None:
    feeds = arrays(op, 3, 2, 2, 3)
    outputs = [output if output == name else "" for output in OUTPUTS[op]]
    while not outputs[-1]:
        outputs.pop()
    got = run(forward(op, feeds, {}, outputs=outputs), feeds)
    assert_same(got, {name: run(forward(op, feeds, {}), feeds)[name]}, 0)


@pytest.mark.parametrize("op", GATES)
def test_defaults_written_otherwise(op: str) -> None:
    """Names in any case, a list that is longer for RNN only, and the direction that GRU-1 spells wrongly."""
    feeds = arrays(op, 3, 2, 2, 3)
    expected = run(forward(op, feeds, {}), feeds)
    lower = [name.lower() for name in DEFAULT[op]]
    for attrs in ({"activations": lower}, {"clip": 1e30}, {"direction": "forward"}):
        assert_same(run(forward(op, feeds, attrs), feeds), expected, 0)
    if op == "RNN":
        assert_same(run(forward(op, feeds, {"activations": ["Tanh", "Tanh"]}), feeds), expected, 0)
    both = arrays(op, 3, 2, 2, 3, direction="bidirectional")
    written = {"direction": "bidirectional", "activations": lower * 2}
    assert_same(run(forward(op, both, written), both), run(forward(op, both, {"direction": "bidirectional"}), both), 0)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_padding_is_not_read(op: str, direction: str) -> None:
    attrs = {"direction": direction}
    feeds = arrays(op, 4, 3, 2, 3, **attrs)
    expected = run(forward(op, feeds, attrs), feeds)
    for sequence, length in enumerate(feeds["sequence_lens"]):
        feeds["X"][length:, sequence] = np.nan
    assert_same(run(forward(op, feeds, attrs), feeds), expected, 0)


@pytest.mark.parametrize("op", GATES)
def test_nan_flows(op: str) -> None:
    feeds = without(arrays(op, 4, 3, 2, 3), "sequence_lens")
    feeds["X"][1, 0] = np.nan
    Y = run(forward(op, feeds, {"clip": 3.0}), feeds)["Y"]
    assert np.isnan(Y[1:, 0, 0]).all()
    assert np.isfinite(Y[0]).all()
    assert np.isfinite(Y[:, 0, 1:]).all()


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (3, 0, 3, 4), (3, 2, 0, 4)])
def test_nothing(op: str, sizes: tuple[int, int, int, int]) -> None:
    """No step has no last state, no sequence no results, and without inputs there is the rest."""
    feeds = without(arrays(op, max(sizes[0], 1), *sizes[1:]), "sequence_lens")
    feeds["X"] = feeds["X"][: sizes[0]]
    assert_same(run(forward(op, feeds, {}), feeds, precision="float64"), spec(op, feeds, {}), 1e-7)


REFUSED: list[tuple[str, dict[str, Any], dict[str, tuple[int, ...]], str]] = [
    ("RNN", {"direction": "sideways"}, {}, "direction is 'sideways'"),
    ("RNN", {"clip": -1.0}, {}, "clip is -1.0"),
    ("GRU", {"activations": ["Sigmoid"]}, {}, "activations has 1 names, expected 2"),
    ("GRU", {"activations": ["Sigmoid", "Mish"]}, {}, "activations has 'mish'"),
    ("RNN", {"activations": ["Affine"]}, {}, "affine has no default"),
    ("LSTM", {"layout": 2}, {}, "layout is 2"),
    ("LSTM", {}, {"W": (1, 8, 2)}, r"W has shape \(1, 8, 2\), expected \(1, 12, 2\)"),
    ("LSTM", {}, {"P": (1, 8)}, r"P has shape \(1, 8\), expected \(1, 9\)"),
    ("GRU", {}, {"initial_h": (2, 1, 3)}, r"initial_h has shape \(2, 1, 3\), expected \(1, 2, 3\)"),
    ("RNN", {}, {"B": (6,)}, r"B has shape \(6,\), expected \(1, 6\)"),
    ("RNN", {}, {"X": (3, 2)}, "expected three axes"),
]


@pytest.mark.parametrize(("op", "attrs", "shapes", "message"), REFUSED, ids=name_of)
def test_refused(op: str, attrs: dict[str, Any], shapes: dict[str, tuple[int, ...]], message: str) -> None:
    feeds = arrays(op, 3, 2, 2, 3) | {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(BackendError, match=message):
        run(forward(op, feeds, attrs), feeds)


@pytest.mark.parametrize(("op", "name"), [("GRU", "zrh"), ("GRU", "HAll_grad"), ("LSTM", "CAll"), ("LSTM", "Ct_grad")])
def test_gradients_are_refused(op: str, name: str) -> None:
    feeds = with_cotangents(op, arrays(op, 3, 2, 2, 3), {})
    feeds |= run(make_model(feeds, [trained(op, feeds, {})]), feeds)
    feeds[name] = feeds[name][..., :-1]
    node = gradient(op, feeds, {}).graph.node[1]
    reads = {key: feeds[key] for key in node.input if key}
    with pytest.raises(BackendError, match=f"{name.replace('_grad', '')} has shape .*, expected .*hidden_size 3"):
        run(make_model(reads, [node]), reads)


@pytest.mark.parametrize("lengths", [[4, 1], [-1, 1]])
def test_lengths_are_refused(lengths: list[int]) -> None:
    feeds = arrays("GRU", 3, 2, 2, 3) | {"sequence_lens": np.array(lengths, np.int32)}
    with pytest.raises(BackendError, match="expected lengths from 0 to 3"):
        run(forward("GRU", feeds, {}), feeds)


# torch puts the gates of LSTM as i, f, c, o and of GRU as r, z, h; its GRU is linear before the reset.
TORCH_GATES = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 2, 3, 1]}


def torch_network(op: str, feeds: dict[str, np.ndarray]) -> tuple[Any, dict[str, Any]]:
    """torch's module with the weights of `feeds`, and its parameters by the names of torch."""
    torch = pytest.importorskip("torch")
    hidden, directions = feeds["R"].shape[2], len(feeds["R"])
    module = getattr(torch.nn, op)(feeds["X"].shape[2], hidden, bidirectional=directions == 2, dtype=torch.float64)
    bias = dict(zip(("bias_ih_l0", "bias_hh_l0"), np.split(feeds["B"], 2, 1), strict=True))
    for name, value in {"weight_ih_l0": feeds["W"], "weight_hh_l0": feeds["R"], **bias}.items():
        for k, suffix in enumerate(("", "_reverse")[:directions]):
            gates = value[k].reshape(GATES[op], hidden, *value.shape[2:])[TORCH_GATES[op]]
            ordered = torch.tensor(gates.reshape(value[k].shape), dtype=torch.float64)
            getattr(module, name + suffix).data.copy_(ordered)
    return module, dict(module.named_parameters())


def torch_results(
    op: str, feeds: dict[str, np.ndarray], direction: str, cotangents: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The results of torch by ONNX's names, and its gradients."""
    torch = pytest.importorskip("torch")
    module, parameters = torch_network(op, feeds)
    time, batch, _ = feeds["X"].shape
    hidden, directions = feeds["R"].shape[2], len(feeds["R"])
    leaves = {k: torch.tensor(feeds[k], dtype=torch.float64, requires_grad=True) for k in ("X", *STATES[op])}
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        leaves["X"], torch.tensor(feeds["sequence_lens"], dtype=torch.int64), enforce_sorted=False
    )
    states = tuple(leaves[k] for k in STATES[op])
    output, last = module(packed, states if op == "LSTM" else states[0])
    padded, _ = torch.nn.utils.rnn.pad_packed_sequence(output, total_length=time)
    Y = padded.reshape(time, batch, directions, hidden).permute(0, 2, 1, 3)
    results = dict(zip(OUTPUTS[op], (Y, *(last if op == "LSTM" else (last,))), strict=True))
    if not cotangents:
        return {name: value.detach().numpy() for name, value in results.items()}, {}
    sum((results[name] * torch.tensor(v)).sum() for name, v in cotangents.items()).backward()
    gradients = {k: leaf.grad.numpy() for k, leaf in leaves.items()}
    for name, key in (("W", "weight_ih_l0"), ("R", "weight_hh_l0"), ("Wb", "bias_ih_l0"), ("Rb", "bias_hh_l0")):
        rows = []
        for suffix in ("", "_reverse")[:directions]:
            value = parameters[key + suffix].grad.numpy()
            gates = np.empty_like(value).reshape(GATES[op], hidden, *value.shape[1:])
            gates[TORCH_GATES[op]] = value.reshape(gates.shape)
            rows.append(gates.reshape(value.shape))
        gradients[name] = np.stack(rows)
    gradients["B"] = np.concatenate((gradients.pop("Wb"), gradients.pop("Rb")), 1)
    return {name: value.detach().numpy() for name, value in results.items()}, gradients


@pytest.mark.torch
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("op", GATES)
def test_torch_agrees(op: str, direction: str) -> None:
    attrs: dict[str, Any] = {"direction": direction} | ({"linear_before_reset": 1} if op == "GRU" else {})
    feeds = without(arrays(op, 5, 4, 3, 6, **attrs), "P")
    expected, _ = torch_results(op, feeds, direction, {})
    assert_same(run(forward(op, feeds, attrs), feeds, precision="float64"), expected, 1e-12)


@pytest.mark.torch
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("op", TRAINED)
def test_torch_has_the_gradients(op: str, direction: str) -> None:
    attrs: dict[str, Any] = {"direction": direction} | ({"linear_before_reset": 1} if op == "GRU" else {})
    feeds = without(arrays(op, 5, 4, 3, 6, **attrs), "P")
    primal = run(forward(op, feeds, attrs), feeds, precision="float64")
    rng = np.random.default_rng(1)
    cotangents = {name: rng.standard_normal(value.shape) for name, value in primal.items()}
    _, expected = torch_results(op, feeds, direction, cotangents)
    seeds = {f"{name}_grad": v for name, v in zip(TRAINED[op], cotangents.values(), strict=False)}
    wide = {name: x if x.dtype == np.int32 else x.astype(np.float64) for name, x in feeds.items()} | seeds
    got = run(gradient(op, wide, attrs), wide)
    assert_same({name: got[f"{name}_grad"] for name in expected}, expected, 1e-12)


@pytest.mark.parametrize(("op", "sizes", "left_out", "attrs"), GRADIENTS, ids=name_of)
def test_differences(op: str, sizes: Any, left_out: tuple[str, ...], attrs: dict[str, Any]) -> None:
    feeds = without(arrays(op, *sizes, seed=3, **attrs), *left_out)
    if "P=0" in left_out:
        feeds["P"][:] = 0
    feeds = without(with_cotangents(op, feeds, attrs), *left_out)
    wide = {name: x if x.dtype == np.int32 else x.astype(np.float64) for name, x in feeds.items()}
    gradients = run(gradient(op, wide, attrs), wide)
    inputs = {name: value for name, value in wide.items() if not name.endswith("_grad")}
    cotangents = {name[: -len("_grad")]: v for name, v in wide.items() if name.endswith("_grad")}
    prepared = NUMPY.prepare(make_model(inputs, [trained(op, inputs, attrs)]))
    rng = np.random.default_rng(2)
    for name in DIFFERENTIATED[op]:
        if name not in inputs:
            continue
        u = rng.standard_normal(inputs[name].shape)
        difference = directional(lambda point: prepared.run(dict(point)), inputs, {name: u}, cotangents, 1e-4)
        got = gradients[f"{name}_grad"]
        assert got.shape == inputs[name].shape
        size = np.linalg.norm(got)
        assert difference.error <= 1e-6 * max(size, 1), "the differences do not settle"
        assert abs(np.sum(got * u) - difference.value) <= 1e-6 * max(size, 1), name


@pytest.mark.parametrize("op", TRAINED)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_training_form(op: str, direction: str) -> None:
    """Its first results are those of the operator; the others satisfy the equation of the state."""
    attrs = {"direction": direction}
    feeds = arrays(op, 4, 3, 2, 3, **attrs)
    got = run(make_model(feeds, [trained(op, feeds, attrs)]), feeds, precision="float64")
    expected = run(forward(op, feeds, attrs), feeds, precision="float64")
    assert_same(dict(zip(OUTPUTS[op], got.values(), strict=False)), expected, 0)
    if op == "LSTM":
        i, o, f, c = np.split(got["iofc"], 4, -1)
        np.testing.assert_allclose(got["HAll"], o * np.tanh(got["CAll"]), rtol=1e-12)
        starts = [feeds["initial_c"][k] for k in range(len(feeds["R"]))]
        state, written = got["CAll"], i * c
    else:
        f, _, h = np.split(got["zrh"], 3, -1)
        starts = [feeds["initial_h"][k] for k in range(len(feeds["R"]))]
        state, written = got["HAll"], (1 - f) * h
    for k, start in enumerate(starts):
        for s, length in enumerate(feeds["sequence_lens"]):
            steps = list(range(length))
            if direction == "reverse" or k:
                steps.reverse()
            before = np.concatenate((start[s][None], state[steps[:-1], k, s]))
            np.testing.assert_allclose(state[steps, k, s], f[steps, k, s] * before + written[steps, k, s], rtol=1e-12)
            assert not any(value[length:, k, s].any() for value in got.values() if value.ndim == 4)


@pytest.mark.parametrize("op", TRAINED)
def test_only_some_gradients(op: str) -> None:
    feeds = with_cotangents(op, arrays(op, 3, 2, 2, 3), {})
    full = run(gradient(op, feeds, {}), feeds)
    for wanted in (["X"], ["R"], ["B"], ["initial_h"], ["W", "initial_h"]):
        got = run(gradient(op, feeds, {}, wanted), feeds)
        for name in wanted:
            np.testing.assert_array_equal(got[f"{name}_grad"], full[f"{name}_grad"])


@pytest.mark.parametrize("op", TRAINED)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_padding_has_no_gradient(op: str, direction: str) -> None:
    """Neither what is in the padding of X nor the cotangent of the padding of the result is read."""
    attrs = {"direction": direction}
    feeds = with_cotangents(op, arrays(op, 4, 3, 2, 3, **attrs), attrs)
    expected = run(gradient(op, feeds, attrs), feeds)
    for sequence, length in enumerate(feeds["sequence_lens"]):
        feeds["X"][length:, sequence] = np.nan
        feeds["HAll_grad"][length:, :, sequence] = np.nan
        assert not expected["X_grad"][length:, sequence].any()
    assert_same(run(gradient(op, feeds, attrs), feeds), expected, 0)


@pytest.mark.parametrize("op", TRAINED)
def test_no_step_has_no_gradient(op: str) -> None:
    """Without a step the last state is 0, whatever it starts from; it was an output of nothing."""
    feeds = arrays(op, 3, 2, 2, 3) | {"sequence_lens": np.array([0, 3], np.int32)}
    feeds = with_cotangents(op, feeds, {})
    got = run(gradient(op, feeds, {}), feeds)
    weights = ("W", "R", "B", "P", "sequence_lens")
    alone = {name: value if name in weights else value[..., 1:, :] for name, value in feeds.items()}
    alone["sequence_lens"] = feeds["sequence_lens"][1:]
    expected = run(gradient(op, alone, {}), alone)
    for name in ("X", *STATES[op]):
        assert not got[f"{name}_grad"][:, 0].any()
        np.testing.assert_allclose(got[f"{name}_grad"][:, 1:], expected[f"{name}_grad"], rtol=1e-6)
    np.testing.assert_allclose(got["R_grad"], expected["R_grad"], 1e-5, 1e-6)


def test_no_gradient_without_a_function_of_the_result() -> None:
    attrs = {"activations": ["Elu", "Tanh"], "activation_alpha": [-0.5]}
    feeds = with_cotangents("GRU", arrays("GRU", 3, 2, 2, 3), {})
    with pytest.raises(BackendError, match="two arguments of elu have the same result"):
        run(gradient("GRU", feeds, attrs), feeds)


@pytest.mark.parametrize("op", TRAINED)
def test_half_gradients(op: str) -> None:
    """Computed in float32, rounded once."""
    feeds = with_cotangents(op, arrays(op, 3, 2, 2, 3), {})
    feeds = {name: x if x.dtype == np.int32 else x.astype(np.float16) for name, x in feeds.items()}
    results = run(make_model(feeds, [trained(op, feeds, {})]), feeds)
    wide = {name: x if x.dtype == np.int32 else x.astype(np.float32) for name, x in (feeds | results).items()}
    node = gradient(op, feeds, {}).graph.node[1]
    reads = [name for name in node.input if name]
    got = run(make_model({k: (feeds | results)[k] for k in reads}, [node]), {k: (feeds | results)[k] for k in reads})
    expected = run(make_model({k: wide[k] for k in reads}, [node]), {k: wide[k] for k in reads})
    assert_same(got, {name: value.astype(np.float16) for name, value in expected.items()}, 0)


def assert_as_training(op: str, feeds: dict[str, np.ndarray], attrs: dict[str, Any]) -> None:
    model = gradient(op, feeds, attrs)
    assert_same(run(model, feeds), run(model, feeds, "ort-cpu"), 1e-5)


@pytest.mark.skipif(not ortbuilder.available(), reason="needs onnxruntime-training")
@pytest.mark.parametrize(("op", "sizes", "left_out", "attrs"), FORWARD_ONLY, ids=name_of)
def test_training_agrees(op: str, sizes: Any, left_out: tuple[str, ...], attrs: dict[str, Any]) -> None:
    feeds = supported(without(arrays(op, *sizes, seed=5), *left_out))
    assert_as_training(op, without(with_cotangents(op, feeds, attrs), *left_out), attrs)


@pytest.mark.skipif(not ortbuilder.available(), reason="needs onnxruntime-training")
@settings(max_examples=150, deadline=None, derandomize=True)
@given(networks(("GRU", "LSTM")), st.sets(st.sampled_from(["HAll_grad", "Ht_grad", "Ct_grad"]), max_size=2))
def test_training_agrees_anywhere(network: Any, left_out: set[str]) -> None:
    op, feeds, attrs = network
    attrs = {key: value for key, value in attrs.items() if key == "linear_before_reset"}
    feeds = {k: v[:1] if k in ("W", "R", "B", "P", "initial_h", "initial_c") else v for k, v in feeds.items()}
    feeds = supported(feeds)
    assert_as_training(op, without(with_cotangents(op, feeds, attrs), *left_out), attrs)
