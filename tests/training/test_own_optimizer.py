"""An optimizer of another module: one class, and the commands and the estimators know it by its name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import pytest

from refgrad.backends import available
from refgrad.cli import main
from refgrad.errors import OptionError
from refgrad.training import Adam, AdamW, Constant, Optimizer, Training, convention, step_model, write_artifacts
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


@pytest.mark.parametrize("backend", [name for name in ("numpy", "ort-cpu") if name in available()])
@pytest.mark.parametrize("flat", [False, True])
def test_an_update_may_return_what_it_was_given(flat, backend, tmp_path):
    """The weight, its gradient, a state, and one value twice: each is an output of the step."""

    @dataclass(frozen=True)
    class Kept(Optimizer):
        elementwise = True

        @property
        def states(self) -> Mapping[str, float]:
            return dict.fromkeys(("still", "last", "twice", "again"), 2.0)

        def update(self, op, w, g, rate, t, states, decay):
            moved = op.Sub(w, op.Mul(rate, g))
            return w, {"still": states["still"], "last": g, "twice": moved, "again": moved}

    step = step_model(LINE, "squared_error", Kept(), flat=flat)
    assert len({*step.next.values()}) == len(step.next) == 5
    training = Training(step, 0.25, backend)
    training.epoch([FEEDS])
    np.testing.assert_array_equal(training.weights["w"], [[0], [0]])
    for name, expected in (("still", [2, 2]), ("last", [-1, 2]), ("twice", [0.25, -0.5]), ("again", [0.25, -0.5])):
        [value] = [value for state, value in training.state.items() if state.endswith(name)]
        np.testing.assert_allclose(value.ravel(), expected, rtol=1e-6)


def test_states_need_not_be_named():
    class Still(Optimizer):
        def update(self, op, w, g, rate, t, states, decay):
            return w, states

    assert [*step_model(LINE, "squared_error", Still()).state] == ["w"]


@pytest.mark.parametrize("states", [{"m": "zero"}, {"m": float("nan")}, {1: 0.0}, ["m"]])
def test_states_are_numbers(states, tmp_path):
    odd = made(lambda op, w, g, rate, t: (w, {}), states)
    with pytest.raises(OptionError, match=r"states of Made is a dict of numbers, such as \{'momentum': 0.0\}, not"):
        step_model(LINE, "squared_error", odd)
    with pytest.raises(OptionError, match="states of Made is a dict of numbers"):
        write_artifacts(tmp_path / "a", LINE, "squared_error", odd)


def test_an_exception_of_an_update_names_it():
    for update, says in (
        (lambda op, w, g, rate, t: 1 / 0, r"update of Made raises ZeroDivisionError: division by zero\.$"),
        (lambda op, w, g, rate, t: w - rate * g, r"raises TypeError: .*\. Values are names: op\.Sub\(w, g\) is their"),
    ):
        with pytest.raises(OptionError, match=says):
            step_model(LINE, "squared_error", made(update))


def test_an_update_that_mixes_elements_is_not_elementwise():
    class Normalized(Optimizer):
        elementwise = True

        def update(self, op, w, g, rate, t, states, decay):
            return op.Sub(w, op.Mul(rate, op.Div(g, op.ReduceL2(g, keepdims=0)))), {}

    with pytest.raises(OptionError, match=r"update of Normalized emits ReduceL2, .* Leave elementwise out"):
        step_model(LINE, "squared_error", Normalized())


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
