"""Differences that move many inputs at once: right gradients agree with them, and a single wrong one is found."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

from refgrad.conformance import check
from refgrad.conformance.judge import check as judging
from refgrad.conformance.oracles.central import directional
from refgrad.conformance.oracles.grouped import grouped_estimates
from refgrad.interruption import OUT_OF_TIME, OutOfTime
from refgrad.tables import registry

LAYERS = 12
RNG = np.random.default_rng(5)
AT = {
    "x": RNG.standard_normal((3, 4)),
    **{f"W{k}": 0.5 * RNG.standard_normal((4, 4)) for k in range(LAYERS)},
    **{f"b{k}": 10.0 ** -(k % 4) * RNG.standard_normal(4) for k in range(LAYERS)},
    "unused": np.ones(3),
    "flat": np.ones(2),
    "still": np.ones((2, 2)),
    "idle": np.ones(()),
    "none": np.ones((0, 4)),
}
COTANGENTS = {"y": RNG.standard_normal((3, 4))}


class Network:
    """A network of tanh layers, how often it was evaluated, and its gradients by backpropagation."""

    def __init__(self, activation=np.tanh):
        self.evaluated, self.activation = 0, activation

    def __call__(self, at):
        self.evaluated += 1
        h = at["x"]
        for k in range(LAYERS):
            h = self.activation(h @ at[f"W{k}"] + at[f"b{k}"])
        return {"y": h}

    def gradients(self):
        states = [AT["x"]]
        for k in range(LAYERS):
            states.append(np.tanh(states[-1] @ AT[f"W{k}"] + AT[f"b{k}"]))
        found = {name: np.zeros_like(x) for name, x in AT.items()}
        d = COTANGENTS["y"]
        for k in reversed(range(LAYERS)):
            d = d * (1 - states[k + 1] ** 2)
            found[f"W{k}"], found[f"b{k}"] = states[k].T @ d, d.sum(axis=0)
            d = d @ AT[f"W{k}"].T
        return found | {"x": d}


def observed(gradients, function=None, **options):
    options = {"tolerance": 1e-6} | options
    groups = grouped_estimates(function or Network(), AT, gradients, COTANGENTS, np.random.default_rng(1), **options)
    return [one for group in groups for one in group]


def test_right_gradients_agree_in_a_few_evaluations():
    network = Network()
    found = observed(network.gradients(), network)
    assert {one.name for one in found} == set(AT) - {"none"}
    assert network.evaluated < 4 * 2 * len(AT) / 2  # one by one, two differences of four evaluations each are the least
    assert [one.name for one in found].count("W0") == 2


def test_an_observation_is_the_derivative_along_its_own_direction():
    for one in observed(Network().gradients()):
        alone = directional(Network(), AT, {one.name: one.direction}, COTANGENTS, 1e-4)
        size = np.linalg.norm(one.direction) * np.linalg.norm(Network().gradients()[one.name])
        assert abs(one.value - alone.value) <= 2e-5 * size + 2 * one.error


@pytest.mark.parametrize("name", ["x", "W0", "b0", "b3", "W11", "b11"])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda g: g * 1.0001,
        lambda g: g + 1e-4 * np.abs(g).max() * np.sign(g),
        lambda g: g * 1e3,
        lambda g: g * 1e-3,
        lambda g: -g,
        np.zeros_like,
        lambda g: np.full_like(g, np.nan),
        lambda g: g[..., None],
    ],
    ids=["factor", "added", "too large", "too small", "sign", "zero", "not finite", "shape"],
)
def test_a_wrong_gradient_is_left_out(name, wrong):
    right = Network().gradients()
    found = {one.name for one in observed(right | {name: wrong(right[name])})}
    assert name not in found
    assert len(found) > len(AT) / 2  # the others of the smallest group with it are left to single differences, too


@pytest.mark.parametrize("pair", [("W3", "W4"), ("b0", "b4"), ("x", "b11")])
def test_two_errors_do_not_cancel(pair):
    right = Network().gradients()
    one, other = pair
    factor = np.linalg.norm(right[one]) / np.linalg.norm(right[other])
    wrong = right | {one: 1.001 * right[one], other: right[other] * (1 - 1e-3 * factor)}
    assert not {one.name for one in observed(wrong)} & set(pair)


def test_a_gradient_that_should_be_zero_is_left_out():
    right = Network().gradients()
    found = {one.name for one in observed(right | {"unused": np.full(3, 1e-9)})}
    assert "unused" not in found


def test_inputs_that_cannot_move_are_left_to_single_differences():
    at = {name: np.full(2, np.inf) for name in "abcd"}
    gradients = {name: np.ones(2) for name in at}
    found = grouped_estimates(
        lambda at: {"y": np.zeros(1)}, at, gradients, {"y": np.ones(1)}, np.random.default_rng(1), tolerance=1e-6
    )
    assert not list(found)


def test_halving_ends_at_the_smallest_group_that_is_asked_for():
    gradients = Network().gradients()
    wrong = gradients | {"W0": 1.1 * gradients["W0"]}
    told = {fewest: {one.name for one in observed(wrong, fewest=fewest)} for fewest in (4, len(AT))}
    assert "W1" in told[4]
    assert "W0" not in told[4]
    assert not told[len(AT)] & {"W0", "W1"}


def test_a_jump_is_left_to_single_differences():
    def stairs(x):
        return np.tanh(x) + 1e-3 * np.sign(np.sin(1e7 * x))

    assert not {one.name for one in observed(Network().gradients(), Network(stairs))} - {
        "unused",
        "flat",
        "still",
        "idle",
    }


DEEP = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> g (float[2,3] x, float[3,3] U, float[3,3] V, float[3] a, float[3] b, float[3] c)'
    " => (float[2,3] y) { p = MatMul(x, U) q = Add(p, a) r = Tanh(q) s = MatMul(r, V) t = Add(s, b) u = Sin(t)"
    " y = Mul(u, c) }"
)


def verdicts(found, oracle):
    return {row.gradient: row.verdict for row in found.rows if row.oracle == oracle and row.dialect == "onnx"}


def test_a_check_takes_the_groups_and_finds_the_wrong_one(monkeypatch):
    alone = []
    estimates = judging.estimates
    monkeypatch.setattr(
        judging, "estimates", lambda f, at, names, *a, **k: alone.append(names) or estimates(f, at, names, *a, **k)
    )
    found = check(DEEP, backends=["numpy"])
    assert found.ok
    assert set(verdicts(found, "differences").values()) == {"right"}
    assert alone == [[]]
    right = registry.RULES["", "Mul"]
    wrong = registry.Rule(
        "Mul",
        "",
        lambda op, d_C, A, B: (op.Mul(d_C, B), op.Mul(op.Mul(d_C, A), 1.001)),
        right.wrt,
        right.broadcast,
        right.parameters,
    )
    monkeypatch.setitem(registry.RULES, ("", "Mul"), wrong)
    found = check(DEEP, backends=["numpy"])
    assert {name for name, verdict in verdicts(found, "differences").items() if verdict == "wrong"} == {"c"}


def test_a_check_that_is_stopped_has_the_groups_and_the_executors(monkeypatch):
    def over(*arguments, **options):
        raise OutOfTime

    right = judging.grouped_estimates
    monkeypatch.setattr(
        judging,
        "grouped_estimates",
        lambda *a, **k: ([one for one in group if one.name != "x"] for group in right(*a, **k)),
    )
    monkeypatch.setattr(judging, "estimates", over)
    found = check(DEEP, backends=["numpy"])
    assert found.stopped == OUT_OF_TIME
    assert verdicts(found, "differences") == {"x": "undecided", **dict.fromkeys("UVabc", "right")}
    assert set(verdicts(found, "float64").values()) == {"right"}
    assert found.answer[0] == "right"
    assert found.answer[1].startswith("5 of 6 gradients on 1 executor")
    assert "undecided: x" in found.answer[1]
