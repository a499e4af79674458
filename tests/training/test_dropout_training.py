"""Dropout that draws anew in each step: the masks are random, the same on every executor, and go with the gradient."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.checker
import onnx.parser
import pytest
from onnx import TensorProto, helper

from refgrad.backends import available, get_backend
from refgrad.errors import OptionError, UnknownNameError
from refgrad.training import SGD, Training, batches, step_model
from refgrad.training.dropout import with_masks
from refgrad.training.normalization import in_inference_mode

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]


def dropping(ratio: str = "", opset: int = 18, outputs: str = "y", kind: str = "float") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": {opset}]>
        g ({kind}[N, M] x) => ({kind}[N, M] y) <float r = {{{ratio or 0.5}}}, bool on = {{1}}> {{
            {outputs} = Dropout ({"x, r, on" if ratio else "x"})
        }}""")


@pytest.mark.parametrize("ratio", ["0.1", "0.5", "0.9"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_are_random(backend: str, ratio: str) -> None:
    prepared = get_backend(backend).prepare(with_masks(dropping(ratio), "step", 3))
    x, part = np.ones((200, 300), np.float32), float(ratio)
    kept = []
    for step in (0, 1, 2, 10**6, 2**31 + 5):
        [y] = prepared.run({"x": x, "step": np.array(step)}).values()
        assert set(np.unique(y)) == {np.float32(0), np.float32(1 / (1 - part))}
        kept.append(y != 0)
    error = 5 * np.sqrt(part * (1 - part) / x.size)
    for k, mask in enumerate(kept):
        assert abs(mask.mean() - (1 - part)) < error
        assert abs(mask.mean(axis=0) - (1 - part)).max() < error * np.sqrt(200) * 1.2
        centred = mask - mask.mean()
        others = [np.roll(mask, n, axis) for n in (1, 2, 7) for axis in (0, 1)] + kept[:k]
        for other in others:  # neither neighbours nor steps know of each other
            assert abs((centred * (other - other.mean())).mean()) < 5 * part * (1 - part) / np.sqrt(x.size)


def test_every_executor_draws_the_same_from_a_seed() -> None:
    feed = {"x": np.ones((30, 40), np.float32), "step": np.array(7)}
    drawn = [
        [next(iter(get_backend(name).prepare(with_masks(dropping("0.3"), "step", seed)).run(feed).values())) for seed in (0, 1)]
        for name in BACKENDS
    ]  # fmt: skip
    for first, second in drawn:
        np.testing.assert_array_equal(first, drawn[0][0])
        assert (first != second).mean() > 0.3


def test_two_nodes_draw_for_themselves() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> g (float[N] x) => (float[N] y, bool[N] kept)
        { a, kept = Dropout (x)  b = Dropout (x)  y = Sub(a, b) }""")
    x = np.ones(1000, np.float32)
    y, kept = get_backend("numpy").prepare(with_masks(model, "step", 0)).run({"x": x, "step": np.array(0)}).values()
    assert kept.dtype == bool
    assert 0.4 < (y != 0).mean() < 0.6
    assert 0.4 < kept.mean() < 0.6


@pytest.mark.parametrize("shape", [(0, 3), (), (1, 1), (2, 0, 5)])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16])
def test_odd_sizes_and_types(shape: tuple[int, ...], kind: int) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Dropout", ["x"], ["y"], "d")], "g", [value("x", kind, shape)], [value("y", kind, shape)]
    )
    model = with_masks(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), "step", 0)
    onnx.checker.check_model(model, full_check=True)
    x = np.ones(shape, helper.tensor_dtype_to_np_dtype(kind))
    for backend in BACKENDS:
        [y] = get_backend(backend).prepare(model).run({"x": x, "step": np.array(1)}).values()
        assert (y.dtype, y.shape) == (x.dtype, shape)


NETWORK = """
    <ir_version: 8, opset_import: ["": 18]>
    network (float[N, 4] x) => (float[N, 2] y) <float[4, 6] w = {%s}, float[6, 2] v = {%s}, float r = {0.25}, bool on = {%d}>
    { a = MatMul(x, w)  h = Tanh(a)  d = Dropout(h, r, on)  y = MatMul(d, v) }"""
RNG = np.random.default_rng(0)
W, V = RNG.standard_normal((4, 6)).astype(np.float32), RNG.standard_normal((6, 2)).astype(np.float32)
X, Y = RNG.standard_normal((30, 4)).astype(np.float32), RNG.standard_normal((30, 2)).astype(np.float32)


def network(on: bool = False) -> onnx.ModelProto:
    rows = (", ".join(map(str, value.ravel())) for value in (W, V))
    return onnx.parser.parse_model(NETWORK % (*rows, on))


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_goes_along_what_it_drew(backend: str, on: bool) -> None:
    step = step_model(network(on), "squared_error", SGD(), dropout="training", seed=5)
    onnx.checker.check_model(step.model, full_check=True)
    assert "step" in step.state
    training, w, v = Training(step, 0.1, backend), W.astype(np.float64), V.astype(np.float64)
    for k in range(6):
        part = slice(5 * k, 5 * k + 5)
        x, y = X[part], Y[part]
        h = np.tanh(x @ w)
        mask = _mask(x, k)
        error = (h * mask) @ v - y
        slope = 2 * error / error.size
        loss = training.train_on({"x": x, "label": y}, 0.1)
        np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-5)
        slope_v, slope_w = (h * mask).T @ slope, x.T @ ((slope @ v.T) * mask * (1 - h**2))
        v, w = v - 0.1 * slope_v, w - 0.1 * slope_w
        np.testing.assert_allclose(training.weights["v"], v, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(training.weights["w"], w, rtol=1e-4, atol=1e-6)
    # what is evaluated and written drops nothing
    expected = ((np.tanh(X @ w) @ v - Y) ** 2).mean()
    np.testing.assert_allclose(training.evaluate(batches({"x": X, "label": Y}, 30)), expected, rtol=1e-5)


def _mask(x: np.ndarray, step: int) -> np.ndarray:
    """What the only Dropout of the network drops, by the formula in Python's integers."""
    p = 2**31 - 1
    key = int(np.random.SeedSequence([5, 0]).generate_state(1)[0]) % p
    start = pow((step + key) % p * 48271, 5, p)
    drawn = [pow(i * 16807 + start, 5, p) for i in range(len(x) * 6)]
    return np.reshape([0.0 if n < round(0.25 * p) else 1 / 0.75 for n in drawn], (len(x), 6))


def test_what_goes_on_draws_what_it_would_have_drawn() -> None:
    step = step_model(network(), "squared_error", SGD(momentum=0.9), dropout="training")
    whole = Training(step, 0.1)
    for _ in range(4):
        whole.epoch(batches({"x": X, "label": Y}, 10))
    first, second = Training(step, 0.1), Training(step, 0.1)
    for _ in range(2):
        first.epoch(batches({"x": X, "label": Y}, 10))
    second.go_on(first.state, first.progress)
    for _ in range(2):
        second.epoch(batches({"x": X, "label": Y}, 10))
    for name, value in whole.state.items():
        np.testing.assert_array_equal(second.state[name], value)


def test_without_dropout_nothing_is_dropped() -> None:
    model = in_inference_mode(dropping("0.5"))
    [y] = get_backend("numpy").prepare(model).run({"x": np.ones((3, 4), np.float32)}).values()
    assert y.all()


@pytest.mark.parametrize("on", [True, False])
def test_ratio_and_mode_may_be_nodes(on: bool) -> None:
    """torch.onnx.export writes both as Constant nodes."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {{1, 2, 3, 4}}> {{
            r = Constant <value = float {{0.25}}> () on = Constant <value = bool {{{int(on)}}}> ()
            d = Dropout (x, r, on) y = MatMul(d, w) }}""")
    if on:
        with pytest.raises(OptionError, match="may be in training mode"):
            step_model(model)
    else:
        step_model(model)
    training = Training(step_model(model, dropout="training"), 0.1)
    x = np.ones((500, 2), np.float32)
    training.epoch([{"x": x, "label": x}])
    drawn = get_backend("numpy").prepare(with_masks(model, "step", 0)).run({"x": x, "step": np.int64(1)})["y"]
    assert abs((drawn == 0).all(1).mean() - 0.25**2) < 0.04
    written = get_backend("numpy").prepare(training.write_to(model)).run({"x": x})["y"]
    np.testing.assert_allclose(written, x @ training.weights["w"], rtol=1e-6)


def test_what_cannot_be_drawn_is_named() -> None:
    plain = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[N] x) => (float[N] y) { y = Exp(x) }'
    )
    with pytest.raises(OptionError, match="no Dropout"):
        with_masks(plain, "step", 0)
    with pytest.raises(OptionError, match="opset 11"):
        with_masks(dropping(opset=10), "step", 0)
    with pytest.raises(UnknownNameError, match="'x', a name that the step needs"):
        with_masks(dropping(), "x", 0)
    with pytest.raises(OptionError, match="at least 0 and below 1, not 1"):
        with_masks(dropping("1.0"), "step", 0)
    fed = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[N] x, float r) => (float[N] y) { y = Dropout(x, r) }'
    )
    with pytest.raises(OptionError, match="Only the run tells the ratio"):
        with_masks(fed, "step", 0)
    inner = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> g (float[N] x, bool c) => (float[N] y)
        { y = If (c) <then_branch = a () => (float[N] u) { u = Dropout(x) },
                      else_branch = b () => (float[N] v) { v = Exp(x) }> }""")
    with pytest.raises(OptionError, match="body or a function"):
        with_masks(inner, "step", 0)
    for wrong in ("on", "frozen", None, 1):
        with pytest.raises(OptionError, match="dropout="):
            step_model(network(), dropout=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="seed is an integer"):
        step_model(network(), dropout="training", seed=-1)
    with pytest.raises(OptionError, match="dropout='training'"):
        step_model(network(on=True))
