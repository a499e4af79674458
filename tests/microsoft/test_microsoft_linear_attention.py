"""ONNX Runtime's operators with a recurrent state: what they refuse, and forms that the tables have no case of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from checking import assert_gradient, assert_second_derivative
from runtime import needs_runtime

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.errors import BackendError, NoGradientError
from refgrad.protos.domains import MICROSOFT

pytestmark = [pytest.mark.stock, pytest.mark.slow]

RANDOM = np.random.default_rng(0)


def f(*shape: int) -> np.ndarray:
    return (0.5 * RANDOM.standard_normal(shape)).astype(np.float32)


def made(op_type: str, *inputs: np.ndarray | None, **options: Any) -> Case:
    return node_case(op_type, *inputs, domain=MICROSOFT, opset=1, **options)


def linear(**changed: Any) -> Case:
    """LinearAttention with two heads and the rule "gated_delta", and what is changed of that."""
    inputs: dict[str, Any] = {"query": f(2, 3, 4), "key": f(2, 3, 4), "value": f(2, 3, 6), "past_state": f(2, 2, 2, 3)}
    inputs |= {"decay": -np.abs(f(2, 3, 2)), "beta": f(2, 3, 2)}
    settings: dict[str, Any] = {"q_num_heads": 2, "kv_num_heads": 2, "outputs": 2}
    settings |= {name: value for name, value in changed.items() if name not in inputs}
    given = [changed.get(name, value) for name, value in inputs.items()]
    while given[-1] is None:
        given.pop()
    return made("LinearAttention", *given, **settings)


def delta_net(**changed: Any) -> Case:
    """GatedDeltaNet with one head of the query and two of the value, and what is changed of that."""
    inputs: dict[str, Any] = {"query": f(6, 1, 2), "key": f(6, 1, 2), "value": f(6, 2, 3), "cu_seqlens": None}
    inputs |= {"decay": -np.abs(f(6, 2)), "beta": f(6, 2), "initial_state": f(2, 2, 3, 2), "a_log": None}
    inputs |= {"dt_bias": None, "capture_count": None, "state_update_active": None}
    settings: dict[str, Any] = {"outputs": 2}
    settings |= {name: value for name, value in changed.items() if name not in inputs}
    given = [changed.get(name, value) for name, value in inputs.items()]
    while given[-1] is None:
        given.pop()
    return made("GatedDeltaNet", *given, **settings)


def convolution(**changed: Any) -> Case:
    """CausalConvWithState of three taps, and what is changed of that."""
    inputs: dict[str, Any] = {"input": f(2, 3, 4), "weight": f(3, 1, 3), "bias": f(3), "past_state": f(2, 3, 2)}
    settings = {"outputs": 2} | {name: value for name, value in changed.items() if name not in inputs}
    given = [changed.get(name, value) for name, value in inputs.items()]
    while given[-1] is None:
        given.pop()
    return made("CausalConvWithState", *given, **settings)


INT = np.int32


@pytest.mark.parametrize(
    ("build", "changed", "said"),
    [
        (linear, {"update_rule": "fast"}, "its update_rule 'fast' is not known; there are linear, gated, delta"),
        (
            linear,
            {"q_num_heads": 3},
            "q_num_heads=3 and kv_num_heads=2 do not fit: one has to be a multiple of the other",
        ),
        (linear, {"q_num_heads": 0}, "q_num_heads=0 and kv_num_heads=2"),
        (linear, {"past_state": f(2, 2, 3, 2)}, r"past_state has the shape \[2, 2, 3, 2\]; it is \[2, 2, 2, 3\]"),
        (linear, {"state_window": 2}, r"past_state has the shape \[2, 2, 2, 3\]; it is \[2, 2, 2, 2, 3\]"),
        (linear, {"state_window": 9}, "state_window=9 is not known; there are 0 to 8"),
        (linear, {"decay": None}, "update_rule='gated_delta' needs decay, which is left out"),
        (linear, {"beta": f(2, 3, 3)}, r"beta has the shape \[2, 3, 3\]; it is \[2, 3, 1 or 2\]"),
        (linear, {"key": f(2, 3, 2)}, r"key has the shape \[2, 3, 2\]; it is \[2, 3, 4\]"),
        (linear, {"value": f(2, 3, 5)}, "kv_num_heads=2 does not divide value, which has 5 columns"),
        (delta_net, {"update_rule": "fast"}, "update_rule 'fast' is not known"),
        (delta_net, {"initial_state": None}, "it needs initial_state where cu_seqlens is left out"),
        (
            delta_net,
            {"initial_state": f(2, 2, 2, 3)},
            r"initial_state has the shape \[2, 2, 2, 3\]; it is \[2, 2, 3, 2\]",
        ),
        (delta_net, {"initial_state": f(4, 2, 3, 2)}, "6 tokens do not make 4 requests of one length"),
        (
            delta_net,
            {"cu_seqlens": np.array([0, 7, 6], INT)},
            r"cu_seqlens is \[0, 7, 6\]; it begins with 0, does not fall",
        ),
        (delta_net, {"cu_seqlens": np.array([0, 2, 5], INT)}, "ends with the number of tokens, 6"),
        (delta_net, {"query": f(6, 2, 2)}, r"key has the shape \[6, 1, 2\]; it is \[6, 2, 2\]"),
        (delta_net, {"update_rule": "delta"}, "update_rule='delta' reads no decay; leave it out"),
        (delta_net, {"gate_activation": "softplus"}, "gate_activation=softplus needs a_log and dt_bias"),
        (delta_net, {"a_log": f(2), "dt_bias": f(2)}, "a_log and dt_bias need gate_activation"),
        (
            delta_net,
            {"a_log": f(2), "dt_bias": f(3), "gate_activation": "kda"},
            r"dt_bias has the shape \[3\]; it is \[2\] or \[2, 1\]",
        ),
        (delta_net, {"beta_activation": "tanh"}, "beta_activation 'tanh' is not known; there are none, sigmoid"),
        (delta_net, {"state_update_capacity": 2, "outputs": 3}, "it needs capture_count exactly where"),
        (convolution, {"activation": "relu"}, "activation 'relu' is not known; there are none, silu, swish"),
        (convolution, {"past_state": f(2, 3, 3)}, r"past_state has the shape \[2, 3, 3\]; it is \[2, 3, 2\]"),
        (convolution, {"weight": f(4, 1, 3)}, r"weight has the shape \[4, 1, 3\]; it is \[3, 1, \?\]"),
        (convolution, {"dilation": 0}, "dilation=0 is not 1 or more"),
        (convolution, {"ndim": 2}, "it does not say how it pads|does not say how it pads"),
        (convolution, {"state_length": 4}, "need channels_last=1 and state_window=0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(build: Any, changed: Mapping[str, Any], said: str) -> None:
    case = build(**changed)
    with pytest.raises(BackendError, match=said):
        get_backend("numpy").prepare(case.model).run(case.feeds)


@pytest.mark.parametrize(
    ("build", "changed", "said"),
    [
        (linear, {"update_rule": "fast"}, "its update_rule 'fast' is not known; there are linear, gated, delta"),
        (linear, {"decay": None}, "update_rule='gated_delta' needs decay, which is left out"),
        (linear, {"q_num_heads": 3}, "one has to be a multiple of the other"),
        (linear, {"state_window": 9}, "state_window=9 is not known"),
        (delta_net, {"gate_activation": "relu"}, "its gate_activation 'relu' is not known; there are none, softplus"),
        (delta_net, {"initial_state": None}, "it needs initial_state where cu_seqlens is left out"),
        (
            delta_net,
            {"query": f(2, 3, 1, 2), "cu_seqlens": np.array([0, 6], INT)},
            "rank 3, or 4 without cu_seqlens",
        ),
        (delta_net, {"gate_activation": "softplus"}, "gate_activation=softplus needs a_log and dt_bias"),
        (delta_net, {"state_update_capacity": 2, "outputs": 3}, "it needs capture_count exactly where"),
        (delta_net, {"shapes": "unknown"}, "the rank of its input query is unknown; add it to value_info"),
        (convolution, {"ndim": 2}, "ndim=2 is not covered: the operator does not say how it pads"),
        (convolution, {"activation": "relu"}, "its activation 'relu' is not known; there are none, silu, swish"),
        (convolution, {"input_channels": 2}, "need channels_last=1 and state_window=0"),
    ],
)
def test_a_form_that_is_not_covered_is_refused_with_the_reason(
    build: Any, changed: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(build(**changed).model)


@pytest.mark.parametrize(
    "case",
    [
        linear(),
        linear(state_window=2, past_state=f(2, 2, 2, 2, 3)),
        delta_net(qk_l2_norm=1, cu_seqlens=np.array([0, 2, 6], INT)),
        convolution(activation="silu"),
    ],
    ids=str,
)
def test_second_derivatives_agree_with_differences(case: Case) -> None:
    assert_second_derivative(case, directions=1)


def test_a_request_without_tokens_leaves_the_state_as_it_is() -> None:
    before = f(2, 2, 3, 2)
    none = {
        "query": f(2, 0, 1, 2),
        "key": f(2, 0, 1, 2),
        "value": f(2, 0, 2, 3),
        "decay": f(2, 0, 2),
        "beta": f(2, 0, 2),
    }
    case = delta_net(**none, initial_state=before)
    [y, after] = get_backend("numpy").prepare(case.model).run(case.feeds).values()
    assert y.size == 0
    np.testing.assert_array_equal(after, before)


def test_the_norm_of_a_vector_of_zeros_has_a_gradient() -> None:
    """ε keeps the root away from 0."""
    case = delta_net(query=np.zeros((6, 1, 2), np.float32), qk_l2_norm=1)
    gradient = refgrad.gradient(case.model)
    seeds = {"output_grad": f(6, 2, 3), "final_state_grad": f(2, 2, 3, 2)}
    results = get_backend("numpy").prepare(gradient).run({**case.feeds, **seeds})
    assert all(np.isfinite(value).all() for value in results.values())


@needs_runtime
@pytest.mark.parametrize(
    "case",
    [
        delta_net(**{name: f(*shape).astype(np.float16) for name, shape in
                     {"query": (6, 1, 2), "key": (6, 1, 2), "value": (6, 2, 3), "decay": (6, 2), "beta": (6, 2)}.items()}),
        made("LinearAttentionGate", *(f(2, 3, 4).astype(np.float16), f(4), f(4), f(2, 3, 4).astype(np.float16)), outputs=2),
        made("VarlenCausalConvWithState", *(x.astype(np.float16) for x in (f(6, 3), f(3, 1, 3))), np.array([0, 2, 6], INT),
             *(x.astype(np.float16) for x in (f(3), f(2, 3, 2))), outputs=2, activation="silu"),
    ],
    ids=str,
)  # fmt: skip
def test_in_float16_the_interpreter_computes_what_onnx_runtime_does(case: Case) -> None:
    expected = get_backend("ort-cpu").prepare(case.model).run(case.feeds)
    for name, got in get_backend("numpy").prepare(case.model).run(case.feeds).items():
        assert got.dtype == expected[name].dtype
        np.testing.assert_allclose(got.astype(float), expected[name].astype(float), rtol=2e-3, atol=2e-3, err_msg=name)


def test_a_replay_gives_the_state_that_the_tokens_made() -> None:
    """What GatedDeltaNet says of its first tokens, put into the state before, is the state that it computes itself."""
    state, count = f(2, 2, 3, 2), np.array([3, 3], INT)
    case = delta_net(initial_state=state, capture_count=count, state_update_capacity=3, outputs=3)
    results = get_backend("numpy").prepare(case.model).run(case.feeds)
    for request in (0, 1):
        capsule = results["state_update"][request]
        metadata = np.array([request * 12, 0, 0, 3 * 2, 3 * 2 + 3 * 2, 2, 3, 2, 1, 3, 3])
        replay = made("GatedDeltaNetStateReplay", state.reshape(-1), capsule, np.zeros(12, np.float32), metadata)
        (replayed,) = get_backend("numpy").prepare(replay.model).run(replay.feeds).values()
        np.testing.assert_allclose(replayed.reshape(2, 3, 2), results["final_state"][request], rtol=1e-5, atol=1e-6)


def test_a_row_that_mamba_has_not_makes_every_result_of_a_token_no_number() -> None:
    inner, channels = 2, 8
    inputs = [
        f(1, inner + channels + 1),
        f(2, channels, 3),
        f(2, 1, 3, 2),
        f(channels, 4),
        f(channels),
        f(1),
        -np.abs(f(1)),
    ]
    inputs += [f(1), f(inner), np.array([2], INT)]
    case = made("Mamba2Verify", *inputs, heads=1, n_groups=1, head_dim=2, d_state=3, outputs=5)
    for model in (case.model, refgrad.lower(case.model)):
        results = get_backend("numpy").prepare(model).run(case.feeds)
        for name in ("Y", "xbc", "readout"):
            assert np.isnan(results[name]).all()
        for name, state in (("conv_snapshots", inputs[1]), ("ssm_snapshots", inputs[2])):
            assert np.isnan(results[name][0]).all()
            np.testing.assert_array_equal(results[name][1], state[1])


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_offsets_of_a_replayed_history_are_in_bytes(kind: type) -> None:
    size = np.dtype(kind).itemsize
    source, capture, destination = (f(n).astype(kind) for n in (9, 10, 10))
    metadata = np.array([2 * size, size, 3 * size, 1, 3, 2, 2, 1])
    case = made("ConvStateReplay", source, capture, destination, metadata)
    expected = destination.copy()
    expected[1:7] = np.stack((source[2:8].reshape(3, 2)[:, 1], capture[3:6]), 1).reshape(-1)
    for model in (case.model, refgrad.lower(case.model)):
        (got,) = get_backend("numpy").prepare(model).run(case.feeds).values()
        np.testing.assert_array_equal(got, expected)
    gradient = refgrad.gradient(case.model)
    given = np.arange(1, 11).astype(kind)
    results = get_backend("numpy").prepare(gradient).run({**case.feeds, "destination_out_grad": given})
    assert results["source_backing_grad"].tolist() == [0, 0, 0, 2, 0, 4, 0, 6, 0]
    assert results["capture_backing_grad"].tolist() == [0, 0, 0, 3, 5, 7, 0, 0, 0, 0]
    wide = {name: x if name == "metadata" else x.astype(np.float64) for name, x in case.feeds.items()}
    (got,) = get_backend("numpy").prepare(case.model, precision="float64").run(wide).values()
    np.testing.assert_array_equal(got, expected)
    unknown = made("ConvStateReplay", source, capture, destination, metadata, shapes="unknown")
    with pytest.raises(BackendError, match="offsets count bytes of the declared type"):
        get_backend("numpy").prepare(unknown.model, precision="float64").run(unknown.feeds)
    assert results["destination_backing_grad"].tolist() == [1, 0, 0, 0, 0, 0, 0, 8, 9, 10]


def test_many_tokens_in_one_scan() -> None:
    """The gradient does not grow with the number of tokens."""
    case = made("LinearAttention", f(1, 40, 4), f(1, 40, 4), f(1, 40, 4), None, -np.abs(f(1, 40, 2)), f(1, 40, 2),
                q_num_heads=2, kv_num_heads=2, outputs=2)  # fmt: skip
    assert_gradient(case, directions=1)
    nodes = [len(refgrad.gradient(one.model).graph.node) for one in (case, linear(past_state=None))]
    assert nodes[0] == nodes[1]
    assert sum(node.op_type == "Scan" for node in refgrad.gradient(case.model).graph.node) == 2
