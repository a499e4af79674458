"""The origins of NaN and infinities: six kinds, forward and backward, in bodies, and no alarm on masks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from planting import BACKENDS

from refgrad.cli import main
from refgrad.conformance import check, nonfinite
from refgrad.conformance.judge.nan.nonfinite import NonFinite
from refgrad.errors import FeedError
from refgrad.tables.registry import RULES

pytestmark = pytest.mark.interpreter

HEAD = '<ir_version: 8, opset_import: ["": 18]> g'


def origins_of(text: str, x: Any, executor: str = "numpy", **more: Any) -> NonFinite:
    return nonfinite(onnx.parser.parse_model(f"{HEAD} {text}"), {"x": np.float32(x)}, executor=executor, **more)


KINDS = {
    "log 0": ("(float[3] x) => (float[3] y) { [n] y = Log (x) }", [1, 0, 2], (1,), "log 0"),
    "log of a negative number": ("(float[2] x) => (float[2] y) { [n] y = Log (x) }", [1, -3], (1,), "log -3"),
    "0/0": ("(float[2] x) => (float[2] y) { [n] y = Div (x, x) }", [1, 0], (1,), "0/0"),
    "division by 0": ("(float[2] x) => (float[2] y) { [n] y = Reciprocal (x) }", [0, 2], (0,), "1/0"),
    "root of a negative number": ("(float[2] x) => (float[2] y) { [n] y = Sqrt (x) }", [4, -1], (1,), "√-1"),
    "0 · ∞": ("(float[2] x) => (float[2] y) <float big = {inf}> { [n] y = Mul (x, big) }", [1, 0], (1,), "0 · ∞"),
    "∞ − ∞": ("(float[2] x) => (float[2] y) <float b = {inf}> { a = Add (x, b)  [n] y = Sub (a, b) }", [1, 2], (0,), "∞ − ∞"),
    "overflow": ("(float[2] x) => (float[2] y) { [n] y = Exp (x) }", [1, 200], (1,), "float32 ends at"),
    "outside of the domain": ("(float[2] x) => (float[2] y) { [n] y = Acos (x) }", [0, 2], (1,), "[−1, 1]"),
    "a row of −∞": (
        "(float[2] x) => (float[2] y) <float m = {-inf}> { s = Add (x, m)  [n] y = Softmax (s) }", [1, 2], (0,), "−∞",
    ),
}  # fmt: skip


def test_elements_of_another_kind_are_not_said_to_have_the_value() -> None:
    found = origins_of("(float[4] x) => (float[4] y) { [n] y = Log (x) }", [0, -1, -2, 2], forward=True)
    said = "Log 'n': 'y' is -inf at [0], from 'x' = 0: log 0 = −∞ (2 more elements become NaN or infinite here)"
    assert [str(origin) for origin in found.origins] == [said]


@pytest.mark.parametrize("executor", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_origin_is_named_with_its_cause(kind: str, executor: str) -> None:
    text, x, at, said = KINDS[kind]
    model = text.replace("inf", "3.0")
    made = onnx.parser.parse_model(f"{HEAD} {model}")
    for tensor in made.graph.initializer:
        sign = -1 if "-inf" in text else 1
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.float32(sign * np.inf), tensor.name))
    found = nonfinite(made, {"x": np.float32(x)}, executor=executor, forward=True)
    [origin] = found.origins
    assert not found.ok
    assert (origin.node, origin.kind, origin.at) == ("n", kind, at)
    assert said in origin.cause
    assert origin.remedy
    assert not origin.is_backward


def test_a_root_of_zero_is_told_in_the_gradient() -> None:
    found = origins_of("(float[2] x) => (float[2] y) { [root] y = Sqrt (x) }", [4, 0])
    assert found.results == ("x_grad",)
    [origin] = found.roots
    assert (origin.forward, origin.kind, origin.at) == ("root", "division by 0", (1,))


def test_a_dead_branch_is_told() -> None:
    text = "(float[2] x) => (float[2] y) <float z = {0}> { c = Greater (x, z)  [log] l = Log (x)  [w] y = Where (c, l, x) }"
    found = origins_of(text, [2, 0])
    [origin] = found.roots
    assert (origin.forward, origin.kind) == ("log", "a dead branch")
    assert "'w' does not take this branch" in origin.cause
    assert "Where on its input" in origin.remedy


def test_an_underflow_is_told_from_a_zero() -> None:
    text = "(float[2] x) => (float[2] y) <float s = {1e-25}> { a = Mul (x, s)  b = Mul (a, a)  [n] y = Reciprocal (b) }"
    [origin] = origins_of(text, [1, 2], forward=True).roots
    assert origin.kind == "underflow"
    assert "in double and 0 here" in origin.cause
    [zero] = origins_of(text, [0, 2], forward=True).roots[:1] or [None]
    assert zero is not None


def test_an_infinity_of_a_mask_is_no_fault() -> None:
    text = "(float[2, 2] x) => (float[2, 2] y) <float[2, 2] m = {0, 1, 0, 0}> { s = Add (x, m)  y = Softmax (s) }"
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.float32([[0, -np.inf], [0, 0]]), "m"))
    found = nonfinite(model, {"x": np.float32([[1, 2], [3, 4]])}, wrt=["x"])
    assert found.ok
    assert not found.results
    log = origins_of("(float[2] x) => (float[2] y) { l = Log (x)  y = Exp (l) }", [1, 0], forward=True)
    assert log.ok


@pytest.mark.parametrize("executor", BACKENDS)
def test_the_round_of_a_loop_is_told(executor: str) -> None:
    text = """(float[1] x, float[6, 1] s) => (float[1] y) {
        [scan] y = Scan <num_scan_inputs = 1, body = b (float[1] c, float[1] e) => (float[1] n) {
            [log] l = Log (e)  [add] n = Add (c, l) }> (x, s) }"""
    steps = np.float32([[1], [2], [3], [0], [1], [1]])
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    found = nonfinite(model, {"x": np.float32([1]), "s": steps}, executor=executor, forward=True)
    [origin] = found.origins
    assert (origin.node, origin.within, origin.step, origin.kind) == ("log", "scan", 3, "log 0")


def test_what_follows_from_an_origin_is_no_root() -> None:
    found = origins_of("(float[2] x) => (float[2] y) { [log] l = Log (x)  [sub] y = Sub (l, l) }", [1, 0], forward=True)
    assert [origin.node for origin in found.origins] == ["log", "sub"]
    assert [origin.node for origin in found.roots] == ["log"]
    assert found.origins[1].of == (0,)


def test_float16_overflows_where_double_does_not() -> None:
    model = onnx.parser.parse_model(f"{HEAD} (float16[2] x) => (float16[2] y) {{ [sq] y = Mul (x, x) }}")
    [origin] = nonfinite(model, {"x": np.float16([1, 300])}, forward=True).origins
    assert (origin.kind, origin.at) == ("overflow", (1,))
    assert "float16 ends at 6.55e+04" in origin.cause
    assert "in double it is 90000" in origin.cause


def test_a_given_nan_is_nobodys_fault() -> None:
    found = origins_of("(float[2] x) => (float[2] y) { y = Neg (x) }", [np.nan, 1], forward=True)
    assert found.ok
    assert found.results == ("y",)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(f"{HEAD} (float[2] x) => (float[2] y) {{ [root] y = Sqrt (x) }}"), "m.onnx")
    np.savez("bad.npz", x=np.float32([4, 0]))
    np.savez("good.npz", x=np.float32([4, 1]))
    assert main(["nan", "m.onnx", "--feeds", "good.npz"]) == 0
    assert "every result is finite" in capsys.readouterr().out
    assert main(["nan", "m.onnx", "--feeds", "bad.npz"]) == 1
    said = capsys.readouterr().out
    assert "in the gradient of 'root'" in said
    assert "what helps" in said
    assert main(["nan", "m.onnx", "--feeds", "bad.npz", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["births"][0]["forward"] == "root"
    assert main(["nan", "m.onnx", "--feeds", "m.onnx"]) == 2
    with pytest.raises(FeedError):
        nonfinite("m.onnx", {"z": np.float32([1])})


# What `check` says


def test_check_names_the_branch_that_is_not_taken() -> None:
    text = (
        "(float[2] x) => (float[2] y) <float z = {0}> { c = Less (x, z)  [log] l = Log (x)  [w] y = Where (c, l, x) }"
    )
    model = onnx.parser.parse_model(
        f"{HEAD} {text}".replace("Log (x)", "Log (q)").replace("{ c", "{ q = Mul (x, z)  c")
    )
    found = check(model, {"x": np.float32([2, 3])}, backends=["numpy"])
    assert found.ok, [row.note for row in found.faults]
    notes = " ".join(row.note for row in found.rows)
    assert "it begins at" in notes
    assert "'w' does not take this branch" in notes


def test_check_names_an_underflow() -> None:
    text = "(float[2] x) => (float[2] y) <float s = {1e-25}> { a = Mul (x, s)  b = Mul (a, a)  [n] y = Reciprocal (b) }"
    found = check(onnx.parser.parse_model(f"{HEAD} {text}"), {"x": np.float32([1, 2])}, backends=["numpy"], wrt=["x"])
    assert found.ok, [row.note for row in found.faults]


def test_check_still_disagrees_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule whose formula divides by 0 where the derivative exists."""
    rule = RULES["", "Tanh"]
    wrong = replace(rule, function=lambda op, d, y: op.Div(op.Mul(d, y), op.Mul(y, y)))
    monkeypatch.setitem(RULES, ("", "Tanh"), wrong)
    model = onnx.parser.parse_model(f"{HEAD} (float[2] x) => (float[2] y) {{ [t] y = Tanh (x) }}")
    found = check(model, {"x": np.float32([0, 1])}, backends=["numpy"])
    assert not found.ok
