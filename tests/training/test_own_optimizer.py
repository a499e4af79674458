"""An optimizer of another module: one class, and the commands and the estimators know it by its name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import pytest

from refgrad.cli import main
from refgrad.errors import OptionError
from refgrad.training import Adam, AdamW, Constant, Optimizer, Training, convention, step_model
from refgrad.training.optimizers import OPTIMIZERS

LINE = onnx.parser.parse_model(
    """<ir_version: 10, opset_import: ["": 21]>
    line (float[N, 2] X) => (float[N, 1] y) <float[2, 1] w = {0, 0}> { y = MatMul(X, w) }"""
)
X = np.tile(np.eye(2, dtype=np.float32), (3, 1))
FEEDS = {"X": X, "label": X @ np.array([[1.0], [-2.0]], np.float32)}


@pytest.fixture(autouse=True)
def signs() -> Iterator[None]:
    @dataclass(frozen=True)
    class Signs(Optimizer):
        """w ← w − η·sign(g)"""

        name = "signs"
        rate = 0.25

        @property
        def states(self) -> Mapping[str, float]:
            return {}

        def update(self, op, w, g, rate, t, states, decay):
            return op.Sub(w, op.Mul(rate, op.Sign(g))), {}

    yield
    del OPTIMIZERS["signs"]


def test_it_is_found_by_its_name_and_moves_the_weights():
    signs = convention("torch").optimizer("signs")
    training = Training(step_model(LINE, "squared_error", optimizer=signs), Constant(signs.rate))
    training.epoch([FEEDS])
    np.testing.assert_array_equal(np.sign(training.weights["w"]), [[1], [-1]])
    np.testing.assert_allclose(np.abs(training.weights["w"]), 0.25)


def test_the_commands_take_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(LINE, "line.onnx")
    np.savez("line.npz", X=X, y=FEEDS["label"])
    words = "train line.onnx --data line.npz -o t.onnx --epochs 1 --batch-size 6 --quiet --optimizer"
    assert main([*words.split(), "signs"]) == 0
    assert main([*words.split(), "sign"]) == 2
    assert "--optimizer 'sign' is not known. Did you mean 'signs'? There are 'sgd'" in capsys.readouterr().err
    assert main([*words.split(), "signs", "--momentum", "0.9"]) == 2
    assert "--momentum does not work with signs, only with sgd, nesterov and rmsprop" in capsys.readouterr().err


def made(update, states: Mapping[str, float] | None = None) -> Optimizer:
    """An optimizer without a name that updates so."""

    @dataclass(frozen=True)
    class Made(Optimizer):
        @property
        def states(self) -> Mapping[str, float]:
            return states or {}

        def update(self, op, w, g, rate, t, states, decay):
            return update(op, w, g, rate, t)

    return Made()


def test_an_update_sees_one_weight_unless_it_is_elementwise():
    def normalized(op, w, g, rate, t):
        return op.Sub(w, op.Mul(rate, op.Div(g, op.ReduceL2(g, keepdims=0)))), {}

    step = step_model(LINE, "squared_error", optimizer=made(normalized))
    assert not step.flat
    with pytest.raises(OptionError, match="Made is not elementwise"):
        step_model(LINE, "squared_error", optimizer=made(normalized), flat=True)


@pytest.mark.parametrize(
    ("update", "says"),
    [
        (lambda op, w, g, rate, t: op.Sub(w, op.Mul(rate, op.Div(g, t))), "returns the new weight and a dict"),
        (lambda op, w, g, rate, t: (op.Sub(w, op.Mul(rate, op.Div(g, t))), {}), "returns the states"),
        (lambda op, w, g, rate, t: (None, {"m": g}), "returns None, which is no value that a method of op returned"),
        (lambda op, w, g, rate, t: (w, {"m": "zzz"}), "returns 'zzz', which is no value"),
        (lambda op, w, g, rate, t: (op.Sub(w, op.Div(g, t)), {"m": g}), "mixes element types"),
        (lambda op, w, g, rate, t: (op.Cast(w, to=11), {"m": g}), "mixes element types, or returns another one"),
    ],
)
def test_an_update_that_returns_something_else_is_refused(update, says):
    with pytest.raises(OptionError, match=says):
        step_model(LINE, "squared_error", optimizer=made(update, {"m": 0.0}))


def test_an_update_of_its_own_is_elementwise_only_if_it_says_so():
    @dataclass(frozen=True)
    class Trust(Adam):
        def update(self, op, w, g, rate, t, states, decay):
            return super().update(op, w, op.Div(g, op.ReduceMax(op.Abs(g), keepdims=0)), rate, t, states, decay)

    assert Adam.elementwise
    assert AdamW.elementwise
    assert not step_model(LINE, "squared_error", optimizer=Trust()).flat


def test_a_name_is_taken_once():
    with pytest.raises(OptionError, match="Adam is the optimizer 'adam'"):
        type("Adam", (Optimizer,), {"name": "adam", "__qualname__": "Adam"})
    with pytest.raises(OptionError, match="SGD is the optimizer 'sgd': choose another name"):

        class Other(Optimizer):
            name = "sgd"
