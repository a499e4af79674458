"""Weights of 16 bits: float32 masters and states, loss scaling, and the causes that messages name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper, numpy_helper

from refgrad.backends import available
from refgrad.cli import main
from refgrad.errors import OptionError, TrainingError
from refgrad.training import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Arrays,
    Batches,
    LossTerm,
    Optimizer,
    RMSProp,
    Run,
    StepModel,
    Training,
    batches,
    from_training_info,
    step_model,
    sum_of_losses,
    with_training_info,
)

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
RNG = np.random.default_rng(0)
W, B, V = RNG.normal(0, 0.3, (4, 8)), RNG.normal(0, 0.3, 8), RNG.normal(0, 0.3, (8, 3))
X = RNG.standard_normal((96, 4))
Y = np.tanh(X @ RNG.standard_normal((4, 3)))
CLASSES = Y.argmax(1)
KINDS = {
    kind: helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, kind.upper()))
    for kind in ("float16", "bfloat16", "float", "double")
}


def network(kind: str) -> onnx.ModelProto:
    """A perceptron whose first weights are the same in all types."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> f ({kind}[N, 4] x) => ({kind}[N, 3] y) '
        "{ m = MatMul(x, w) a = Add(m, b) h = Tanh(a) y = MatMul(h, v) }"
    )
    for name, value in (("w", W), ("b", B), ("v", V)):
        rounded = value.astype(KINDS["bfloat16"]).astype(KINDS[kind])
        model.graph.initializer.append(numpy_helper.from_array(rounded, name))
    return model


def trained(kind: str, backend: str, loss: str, optimizer: Optimizer, rate: float, **settings: Any) -> Training:
    """Ten epochs."""
    step = step_model(network(kind), loss, optimizer, **settings)
    onnx.checker.check_model(step.model, full_check=True)
    training = Training(step, rate, backend)
    label = CLASSES if loss == "cross_entropy" else Y.astype(KINDS[kind])
    for epoch in range(10):
        training.epoch(batches({"x": X.astype(KINDS[kind]), "label": label}, 16, np.random.default_rng(epoch)))
    return training


OPTIMIZERS = {
    "SGD": (SGD(momentum=0.9), 0.02),
    "Adam": (Adam(), 0.01),
    "AdamW": (AdamW(), 0.01),
    "Adagrad": (Adagrad(), 0.05),
    "RMSProp": (RMSProp(centered=True, momentum=0.5), 0.002),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "flat": {},
    "apart": {"flat": False},
    "static": {"loss_scale": 64},
    "penalty": {"penalty": {"w": (1e-4, 1e-3)}, "penalty_by": "sample", "clip_norm": 0.5},
    "accumulate": {"accumulate": 3, "flat": False},
}
RUNS = [
    (kind, backend)
    for kind in ("float16", "bfloat16")
    for backend in BACKENDS
    if (kind, backend) != ("bfloat16", "ort-cpu")
]


def of_one(result: str, nodes: str, **numbers: float) -> onnx.ModelProto:
    """A model in float16 with scalars as initializers."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> f (float16[N] x) => ({result}) {{ {nodes} }}'
    )
    model.graph.initializer.extend(numpy_helper.from_array(np.float16(value), name) for name, value in numbers.items())
    return model


@pytest.mark.parametrize(("kind", "backend"), RUNS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
def test_all_types_end_at_the_loss_of_float32(kind: str, backend: str, loss: str, settings: str) -> None:
    expected = trained("float", "numpy", loss, *OPTIMIZERS["Adam"], **SETTINGS[settings])
    found = trained(kind, backend, loss, *OPTIMIZERS["Adam"], **SETTINGS[settings])
    assert found.losses[-1] == pytest.approx(expected.losses[-1], rel=0.02)
    assert expected.losses[-1] < 0.8 * expected.losses[0]
    assert {value.dtype for value in found.weights.values()} == {KINDS[kind]}
    state = {name: value for name, value in found.state.items() if value.dtype.kind != "i"}
    assert {value.dtype for value in state.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(("kind", "backend"), RUNS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_ends_at_the_loss_of_float32(kind: str, backend: str, optimizer: str) -> None:
    expected = trained("float", "numpy", "cross_entropy", *OPTIMIZERS[optimizer])
    found = trained(kind, backend, "cross_entropy", *OPTIMIZERS[optimizer])
    assert found.losses[-1] == pytest.approx(expected.losses[-1], rel=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", ["half_squared_error", "absolute_error", "elastic"])
def test_each_loss_begins_with_the_step_of_float32(loss: str, backend: str) -> None:
    feeds = {"x": X.astype(np.float16), "label": Y.astype(np.float16)}
    half = Training(step_model(network("float16"), loss, SGD(), flat=False, sample_weight="s"), 0.1, backend)
    full = Training(step_model(network("float"), loss, SGD(), flat=False, sample_weight="s"), 0.1, backend)
    feeds["s"] = np.linspace(0.5, 1.5, 96).astype(np.float16)
    first = half.train_on(feeds, 0.1)
    expected = full.train_on({name: array.astype(np.float32) for name, array in feeds.items()}, 0.1)
    assert first == pytest.approx(expected, rel=2e-3)
    for name, value in full.weights.items():
        np.testing.assert_allclose(half.state[half.step.masters[name]], value, atol=2e-4, err_msg=name)


def test_losses_of_a_sum_share_the_weights_of_samples() -> None:
    feeds = {"x": X, "classes": CLASSES, "numbers": Y, "s": np.linspace(0.5, 1.5, 96)}
    losses = []
    for kind in ("float16", "float"):
        terms = [LossTerm("cross_entropy", None, "classes", sample_weight="s")]
        terms += [LossTerm(loss, None, "numbers", sample_weight="s") for loss in ("huber", "squared_error")]
        training = Training(step_model(network(kind), sum_of_losses(network(kind), terms), SGD()), 0.1)
        fed = {name: array.astype(KINDS[kind]) if array.dtype.kind == "f" else array for name, array in feeds.items()}
        training.epoch(batches(fed, 32))
        losses += training.losses
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_the_mean_of_more_numbers_than_float16_holds() -> None:
    """The number of elements is above 65504, as it is for images."""
    model = of_one("float16[N] y", "y = Mul(x, a)", a=0.5)
    training = Training(step_model(model, "squared_error", SGD(), trainable=["a"]), 0.1)
    x = np.ones(70000, np.float16)
    assert training.train_on({"x": x, "label": x}, 0.1) == 0.25
    np.testing.assert_allclose(training.state["weights"], 0.5 + 0.1, rtol=1e-3)


def test_small_updates_are_not_lost() -> None:
    """In float16 the weight 1 stays 1 if 1e-4 is added to it."""
    model = of_one("float16[N] y", "y = Mul(x, a)", a=1)
    training = Training(step_model(model, "squared_error", SGD(), trainable=["a"]), 1e-4)
    for _ in range(100):
        training.train_on({"x": np.ones(4, np.float16), "label": np.full(4, 1.5, np.float16)}, 1e-4)
    np.testing.assert_allclose(training.state["weights"], 1 + 100 * 1e-4, rtol=1e-3)
    assert training.write_to(model).graph.initializer[0].data_type == onnx.TensorProto.FLOAT16


def steep(factor: float) -> onnx.ModelProto:
    """The model with the loss Σ a·x·factor, whose derivative by a is the sum of x·factor."""
    return of_one("float16 y", "p = Mul(x, a) q = Mul(p, c) y = ReduceSum<keepdims=0>(q)", a=1, c=factor)


ROOT = of_one("float16 y", "p = Mul(x, a) q = Sqrt(p) y = ReduceSum<keepdims=0>(q)", a=1)
SKIPPED = {  # by name: a model, data that give a gradient that is not finite, other data, and the derivative of these
    "overflow": (steep(8), 40, 1, 8),  # 8 · 40 times the first scale is beyond 65504
    "root": (ROOT, 0, 4, 1),  # whose derivative at 0 is infinite
}


@pytest.mark.parametrize(
    ("case", "backend"), [("overflow", "numpy"), *(("root", name) for name in BACKENDS)]
)  # ONNX Runtime may compute in float32 what is float16, and then nothing overflows
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("optimizer", [SGD(), Adam()], ids=["SGD", "Adam"])
def test_a_step_that_is_not_finite_is_skipped(optimizer: Optimizer, flat: bool, case: str, backend: str) -> None:
    model, bad, good, slope = SKIPPED[case]
    training = Training(step_model(model, None, optimizer, trainable=["a"], flat=flat), 0.01, backend)
    before = training.state
    training.train_on({"x": np.float16([bad])}, 0.01)
    after = training.state
    assert after["loss_scale"] == before["loss_scale"] / 2
    for name in before.keys() - {"loss_scale"}:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    training.train_on({"x": np.float16([good])}, 0.01)
    after = training.state
    assert after["loss_scale"] == before["loss_scale"] / 2
    assert (after["loss_scale.good_steps"], after["loss_scale.updates"]) == (1, 1)
    moved = (
        0.01 * slope if isinstance(optimizer, SGD) else 0.01
    )  # the first step of Adam: the skipped one does not count
    np.testing.assert_allclose(after["weights" if flat else "a.master"].item(), 1 - moved, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_overflow_skips_the_update_that_it_is_accumulated_for(backend: str) -> None:
    step = step_model(ROOT, None, SGD(), trainable=["a"], accumulate=2)
    training = Training(step, 0.01, backend)
    for x in (4, 0, 4, 4):
        training.train_on({"x": np.float16([x])}, 0.01)
        assert all(np.isfinite(value).all() for value in training.state.values())
    np.testing.assert_allclose(training.state["weights"], 1 - 0.01, rtol=1e-5)
    assert training.state["loss_scale.updates"] == 1


def test_the_scale_is_doubled_after_good_steps() -> None:
    step = step_model(steep(0.125), None, SGD(), trainable=["a"])
    state = dict(step.state) | {"loss_scale.good_steps": np.array(1998)}
    training = Training(step.beginning_with(state), 0.01)
    first = float(state["loss_scale"])
    scales = [training.train_on({"x": np.float16([1])}, 0.01) and float(training.state["loss_scale"]) for _ in range(3)]
    assert scales == [first, 2 * first, 2 * first]


@pytest.mark.parametrize(("case", "backend"), [("overflow", "numpy"), *(("root", name) for name in BACKENDS)])
def test_a_fixed_scale_ends_at_a_gradient_that_is_not_finite(case: str, backend: str) -> None:
    model, bad, *_ = SKIPPED[case]
    training = Training(step_model(model, None, SGD(), trainable=["a"], loss_scale=4096), 0.01, backend)
    said = (
        "Give a smaller loss_scale, or" if case == "overflow" else "It is no overflow, so a smaller loss scale does not"
    )
    said = f"not finite in step 0 .* with loss_scale=4096: the first value that .* {said}"
    with pytest.raises(TrainingError, match=said) as caught:
        training.train_on({"x": np.float16([bad])}, 0.01)
    assert ("float16 ends at 65504" in str(caught.value)) == (case == "overflow")
    assert training.weights["a"] == 1
    assert "loss_scale" not in training.state


def test_a_gradient_that_no_scale_makes_finite_ends_the_training() -> None:
    """The derivative of the root is infinite at 0: no overflow, so halving the scale does not help."""
    model = of_one("float16 y", "p = Mul(x, a) q = Sqrt(p) y = ReduceSum<keepdims=0>(q)", a=0)
    training = Training(step_model(model, None, SGD(), trainable=["a"]), 0.01)
    with pytest.raises(
        TrainingError, match=r"A gradient is not finite in step .* at a loss scale of 1: .* It is no overflow"
    ):
        training.epoch([{"x": np.float16([1])}] * 100)
    assert training.state["loss_scale"] == 1


def test_an_overflow_of_the_loss_names_the_type() -> None:
    training = Training(step_model(steep(2048), None, SGD(), trainable=["a"]), 0.01)
    with pytest.raises(
        TrainingError, match=r"The loss is inf in step 0 .* is 'q' of Mul, .*: float16 ends at 65504\. Scale"
    ):
        training.train_on({"x": np.float16([40])}, 0.01)


def test_an_overflow_after_a_large_step_names_the_rate() -> None:
    training = Training(step_model(network("float16"), "squared_error", SGD()), 1e6)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 4)).astype(np.float16), "label": np.ones((2, 3), np.float16)}
    with pytest.raises(
        TrainingError, match=r"65504\. Take a smaller learning rate than 1e\+06\. If that does not help, scale"
    ):
        training.epoch([feeds] * 3)


@pytest.mark.parametrize("kind", ["bfloat16", "float"])
def test_an_update_that_breaks_the_weights_is_named(kind: str) -> None:
    """Without ε, Adam divides 0 by 0 where a gradient is 0."""
    model = network(kind)
    training = Training(step_model(model, "squared_error", Adam(eps=0)), 0.01)
    feeds = {"x": np.zeros((2, 4), KINDS[kind]), "label": np.ones((2, 3), KINDS[kind])}
    with pytest.raises(
        TrainingError, match=r"'weights', .* since the update before\. Take .* larger number than eps=0"
    ):
        training.epoch([feeds] * 2)


def test_an_epsilon_that_is_0_is_refused() -> None:
    for kind in ("float16", "float"):
        with pytest.raises(OptionError, match=r"eps=1e-60 of Adam is 0 in float32, the type of its states"):
            step_model(network(kind), "squared_error", Adam(eps=1e-60))
    step_model(network("double"), "squared_error", Adam(eps=1e-60))


def test_what_does_not_fit_is_refused() -> None:
    for scale in ("fast", 0, -1, float("nan"), True):
        with pytest.raises(OptionError, match="loss_scale"):
            step_model(network("float16"), loss_scale=scale)


def test_float32_is_scaled_only_if_asked() -> None:
    """A scale that is a power of 2 changes no digit of a gradient in float32."""
    plain, scaled = (
        trained("float", "numpy", "squared_error", *OPTIMIZERS["Adam"], **settings)
        for settings in ({}, {"loss_scale": 1024})
    )
    assert not plain.step.finite
    assert "loss_scale" not in plain.step.settings
    for name, value in plain.weights.items():
        np.testing.assert_array_equal(scaled.weights[name], value)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_a_training_goes_on_with_the_same_bits(kind: str, flat: bool, tmp_path: Path) -> None:
    step = step_model(network(kind), "cross_entropy", Adam(), flat=flat)
    # The state of a training that met an overflow.
    if kind == "float16":
        step = step.beginning_with(dict(step.state) | {"loss_scale": np.array(3, np.float32)})
    data = Arrays(step, {"x": X.astype(KINDS[kind]), "label": CLASSES})
    runs = []
    for name, epochs in (("whole", (4,)), ("parts", (2, 4))):
        for count in epochs:
            run = Run(Training(step, 0.01), data, count, 16, checkpoint=tmp_path / name, resume=True)
            run.run()
        runs.append(run.training)
    assert runs[0].losses == runs[1].losses
    for name, value in runs[0].state.items():
        np.testing.assert_array_equal(runs[1].state[name], value, err_msg=name)


def test_a_run_counts_its_updates_and_refuses_to_have_none() -> None:
    step = step_model(steep(8), None, SGD(), trainable=["a"])
    run = Run(Training(step, 1e-4), Batches(step, [{"x": np.float16([x])} for x in (40, 40, 1, 1)]), 1, 1, None)
    run.run()
    assert (run.training.progress.step, run.updates) == (4, 2)
    run = Run(Training(step, 1e-4), Batches(step, [{"x": np.float16([1000])}] * 2), 1, 1, None)
    with pytest.raises(
        TrainingError, match="a gradient was not finite in each of 2 updates, and the loss scale fell to 256"
    ):
        run.run()


def with_norm(kind: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> f ({kind}[N, 4] x) => ({kind}[N, 4] y) '
        "{ h = MatMul(x, w) y = BatchNormalization(h, scale, shift, mean, var) }"
    )
    for name, value in (
        ("w", W[:, :4]),
        ("scale", np.ones(4)),
        ("shift", np.zeros(4)),
        ("mean", np.full(4, 100.0)),
        ("var", np.ones(4)),
    ):
        model.graph.initializer.append(numpy_helper.from_array(value.astype(KINDS[kind]), name))
    return model


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_running_statistics_are_kept_in_float32(kind: str, flat: bool) -> None:
    """In bfloat16 the mean 100 would stay where it is when it moves by less than 0.25."""
    found = {}
    for one in (kind, "float"):
        training = Training(step_model(with_norm(one), "squared_error", SGD(), batch_norm="training", flat=flat), 1e-3)
        data = {"x": X.astype(KINDS[one]), "label": np.zeros((96, 4), KINDS[one])}
        for _ in range(60):
            training.epoch(batches(data, 32))
        found[one] = {t.name: numpy_helper.to_array(t) for t in training.write_to(with_norm(one)).graph.initializer}
        assert np.isfinite(training.evaluate(batches(data, 96)))
    assert found[kind]["mean"].dtype == KINDS[kind]
    np.testing.assert_allclose(found[kind]["mean"].astype(float), found["float"]["mean"], atol=0.02)
    np.testing.assert_allclose(found[kind]["var"].astype(float), found["float"]["var"], rtol=0.03)


def test_training_info_holds_both_the_weight_and_its_master() -> None:
    model = network("float16")
    step = step_model(model, "cross_entropy", Adam(), flat=False)
    both = with_training_info(model, step)
    onnx.checker.check_model(both, full_check=True)
    bound = {entry.key: entry.value for entry in both.training_info[0].update_binding}
    assert {"w", "w.master", "w.first_moment", "loss_scale"} <= bound.keys()
    again = from_training_info(both)
    assert (again.masters, again.finite, set(again.state)) == (step.masters, step.finite, set(step.state))
    trainings = [Training(one, 0.01) for one in (step, again)]
    for training in trainings:
        training.epoch(batches({"x": X.astype(np.float16), "label": CLASSES}, 16))
    for name, value in trainings[0].weights.items():
        np.testing.assert_array_equal(trainings[1].weights[name], value)


@pytest.mark.parametrize("flat", [True, False])
def test_weights_begin_where_they_are_told(flat: bool) -> None:
    step: StepModel = step_model(network("float16"), "cross_entropy", flat=flat)
    weights = {name: value * 2 for name, value in step.weights.items()}
    state = step.state_with(weights)
    assert {name: value.dtype for name, value in state.items()} == {
        name: value.dtype for name, value in step.state.items()
    }
    for name, value in step.weights_in(state).items():
        np.testing.assert_array_equal(value, weights[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_the_shell_trains_half_precision(
    kind: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if (kind, backend) not in RUNS:
        pytest.skip("ONNX Runtime has no kernels of bfloat16 on the CPU")
    monkeypatch.chdir(tmp_path)
    onnx.save(network(kind), "half.onnx")
    np.savez("data.npz", x=X.astype(np.float32), y=CLASSES)
    words = f"train half.onnx --data data.npz --loss cross_entropy -o t.onnx --backend {backend} --rate 0.01".split()
    for more in ("", "--eps 1e-4 --loss-scale 128", "--epsilon 1e-4 --loss-scale dynamic"):
        assert main([*words, *more.split()]) == 0, capsys.readouterr().err
        onnx.checker.check_model("t.onnx", full_check=True)
        assert {t.data_type for t in onnx.load("t.onnx").graph.initializer} == {getattr(onnx.TensorProto, kind.upper())}
    capsys.readouterr()
    for more, message in (
        ("--loss-scale fast", "--loss-scale 'fast': give a number above 0, or dynamic."),
        ("--loss-scale -1", "--loss-scale must be a number above 0"),
        ("--optimizer sgd --eps 1", "--eps does not work with sgd, only with adam, adamw, adagrad and rmsprop."),
    ):
        assert main([*words, *more.split()]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
