"""The gradient and the update of a step apart, and trainings of which each process takes a part of every batch."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper, numpy_helper

from refgrad.backends import available, get_backend
from refgrad.backends.onnxruntime import CpuBackend
from refgrad.errors import FeedError, OptionError, TrainingError
from refgrad.training import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LossTerm,
    PartGradient,
    RMSProp,
    StepModel,
    Training,
    batches,
    from_training_info,
    gradient_model,
    part_of,
    step_model,
    sum_of_losses,
    update_model,
    with_training_info,
    workers,
)

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((70, 4))
Y = np.tanh(X @ RNG.standard_normal((4, 3)))
CLASSES = Y.argmax(1)
WEIGHTS = {"w": RNG.normal(0, 0.5, (4, 8)), "b": RNG.normal(0, 0.5, 8), "v": RNG.normal(0, 0.5, (8, 3))}
EQUAL = 1e-6


def network(kind: str = "float", nodes: str = "h = Tanh(a)", **others: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> f ({kind}[N, 4] x) => ({kind}[N, 3] y) '
        f"{{ m = MatMul(x, w) a = Add(m, b) {nodes} y = MatMul(h, v) }}"
    )
    dtype = helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, kind.upper()))
    for name, value in (WEIGHTS | others).items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value).astype(dtype), name))
    return model


class Together:
    """Threads in the place of processes: what each gives is added up, and each gets the sums."""

    def __init__(self, count: int, is_mean: bool = False) -> None:
        self.count, self.is_mean = count, is_mean
        self.given: list[Any] = [None] * count
        self.barrier = threading.Barrier(count)

    def all_reduce(self, rank: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.given[rank] = arrays
        self.barrier.wait(20)
        sums = {name: sum(given[name] for given in self.given) for name in arrays}
        self.barrier.wait(20)
        return {name: value / self.count for name, value in sums.items()} if self.is_mean else sums

    def run(self, work: Any) -> list[Any]:
        """Run `work(rank)` for each rank, and return the results. If one raises, all end."""
        found: list[Any] = [None] * self.count

        def one(rank: int) -> None:
            try:
                found[rank] = work(rank)
            except BaseException as error:
                found[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(
            (e for e in found if isinstance(e, BaseException)), key=lambda e: "Barrier" in type(e).__name__
        ):
            raise error
        return found


def parted(data: dict[str, np.ndarray], size: int, rank: int, count: int) -> list[dict[str, np.ndarray]]:
    """This rank's part of each batch; the last batch may leave nothing for some."""
    return [part_of(batch, (rank, count)) for batch in batches(data, size)]


def alone_and_together(
    step: StepModel, data: dict[str, np.ndarray], rate: float, backend: str = "numpy", count: int = 3, **settings: Any
) -> tuple[Training, list[Training]]:
    alone = Training(step, rate, backend)
    for _ in range(3):
        alone.epoch(batches(data, 16))
    together = Together(count, **settings)

    def work(rank: int) -> Training:
        training = Training(
            step, rate, backend, all_reduce=lambda arrays: together.all_reduce(rank, arrays), place=(rank, count)
        )
        for _ in range(3):
            training.epoch(parted(data, 16, rank, count))
        return training

    return alone, together.run(work)


def check_equal(alone: Training, others: list[Training], tolerance: float = EQUAL) -> None:
    for training in others:
        np.testing.assert_allclose(training.losses, alone.losses, rtol=tolerance)
        assert training.progress[:5] == alone.progress[:5]
        assert training.state.keys() == alone.state.keys()
        for name, value in alone.state.items():
            np.testing.assert_allclose(training.state[name], value, rtol=0, atol=tolerance, err_msg=name)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flat": {"flat": True},
    "momentum": {"optimizer": SGD(momentum=0.9)},
    "adam": {"optimizer": Adam(), "flat": True},
    "adamw": {"optimizer": AdamW(weight_decay=0.1)},
    "adagrad": {"optimizer": Adagrad()},
    "rmsprop": {"optimizer": RMSProp()},
    "sum": {"reduction": "sum"},
    "penalty": {"penalty": {"w": (0.01, 0.02), "v": (0, 0.1)}},
    "penalty by sample": {"penalty": {"w": (0.1, 0.2)}, "penalty_by": "sample", "flat": False},
    "clipped": {"clip_norm": 0.3, "clip_value": 0.2},
    "accumulated": {"accumulate": 2},
    "scaled": {"loss_scale": 64.0},
    "dynamic": {"loss_scale": "dynamic"},
    "one weight": {"trainable": ["b"]},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_three_processes_train_as_one(name: str, backend: str) -> None:
    step = step_model(network(), "squared_error", **{"flat": False} | SETTINGS[name])
    data = {"x": X.astype(np.float32), "label": Y.astype(np.float32)}
    check_equal(*alone_and_together(step, data, 0.01, backend))


LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("half_squared_error", "absolute_error", "elastic", "huber", "cross_entropy")},
    "ignored": ("cross_entropy", {"ignore_index": 1}),
    "class weights": ("cross_entropy", {"class_weights": [1, 2.5, 0.25]}),
    "both": ("cross_entropy", {"class_weights": [1, 2.5, 0.25], "ignore_index": 0}),
    "smoothed": ("cross_entropy", {"label_smoothing": 0.2, "class_weights": [1, 2.5, 0.25]}),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_the_one_of_the_whole_batch(name: str, reduction: str) -> None:
    loss, settings = LOSSES[name]
    step = step_model(network("double"), loss, loss_settings=settings, reduction=reduction, optimizer=Adam())
    data = {"x": X, "label": CLASSES if loss == "cross_entropy" else Y}
    check_equal(*alone_and_together(step, data, 0.01), 1e-10)


def test_a_part_may_have_no_label_that_counts() -> None:
    step = step_model(network("double"), "cross_entropy", loss_settings={"ignore_index": -100})
    label = np.where(np.arange(len(X)) % 16 < 6, -100, CLASSES)
    check_equal(*alone_and_together(step, {"x": X, "label": label}, 0.1), 1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_samples_have_weights(reduction: str) -> None:
    step = step_model(network("double"), "cross_entropy", sample_weight="sample_weight", reduction=reduction)
    data = {"x": X, "label": CLASSES, "sample_weight": RNG.uniform(0, 2, len(X))}
    check_equal(*alone_and_together(step, data, 0.1), 1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_means_do_as_well_as_sums(reduction: str) -> None:
    step = step_model(network("double"), "squared_error", reduction=reduction)
    check_equal(*alone_and_together(step, {"x": X, "label": Y}, 0.01, is_mean=True), 1e-10)


def test_a_loss_of_the_model_is_a_mean_over_samples() -> None:
    model = network("double", "h = Tanh(a)  z = Mul(h, h)  mean = ReduceMean<keepdims = 0>(z)")
    model.graph.output.append(helper.make_tensor_value_info("mean", onnx.TensorProto.DOUBLE, []))
    step = step_model(model, None, output="mean", trainable=["w", "b"])
    check_equal(*alone_and_together(step, {"x": X}, 0.1), 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_16_bits_are_added_in_float32(backend: str) -> None:
    step = step_model(network("float16"), "cross_entropy", Adam())
    [slopes] = [v for v in gradient_model(step).graph.output if v.name == "weights_grad"]
    assert slopes.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    alone, others = alone_and_together(step, {"x": X.astype(np.float16), "label": CLASSES}, 1e-3, backend, count=2)
    check_equal(alone, others, 2e-3)  # a gradient in float16 is rounded in each part


def test_the_two_models_one_after_the_other_are_the_step() -> None:
    step = step_model(network("double"), "squared_error", Adam(), penalty={"*": (0.1, 0.1)}, clip_norm=1.0, flat=False)
    feeds = {"x": X, "label": Y}
    numpy = get_backend("numpy")
    rate = {"learning_rate": np.float64(0.1)}
    whole = numpy.prepare(step.model).run({**feeds, **step.state, **rate})
    first, second = gradient_model(step), update_model(step)
    for model in (first, second):
        onnx.checker.check_model(model, full_check=True)
    read = {value.name for value in first.graph.input}
    middle = numpy.prepare(first).run({k: v for k, v in {**feeds, **step.state}.items() if k in read})
    assert sorted(middle) == ["b_grad", "data_loss", "v_grad", "w_grad"]
    results = numpy.prepare(second).run({**middle, **step.state, **rate})
    assert results.keys() == whole.keys()
    for name, value in results.items():
        np.testing.assert_array_equal(value, whole[name])


def test_weights_may_share_a_gradient_or_have_the_data_as_theirs() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> f (double[4] x) => (double loss) '
        "<double[4] a = {1, 2, 3, 4}, double[4] b = {1, 2, 3, 5}> "
        "{ s = Add(a, b)  p = Mul(s, x)  loss = ReduceSum<keepdims = 0>(p) }"
    )
    for flat in (True, False):
        step = step_model(model, None, trainable=["a", "b"], flat=flat)
        state = dict(step.state)
        found = (
            get_backend("numpy")
            .prepare(gradient_model(step))
            .run(
                {"x": np.arange(4.0)}
                | {v.name: state[v.name] for v in gradient_model(step).graph.input if v.name in state}
            )
        )
        for name, value in found.items():
            if name != step.loss:
                np.testing.assert_array_equal(value, np.tile(np.arange(4.0), 2 if flat else 1))
        rate = {"learning_rate": np.array(0.5)}
        given = {v.name: found[v.name] for v in update_model(step).graph.input if v.name in found}
        moved = get_backend("numpy").prepare(update_model(step)).run({**given, **state, **rate})
        trained = step.weights_in({name: moved[following] for name, following in step.next.items()})
        np.testing.assert_array_equal(trained["b"], [1, 1.5, 2, 3.5])


def normalised() -> onnx.ModelProto:
    n = 8
    model = network(
        "float", "n = BatchNormalization(a, scale, shift, mean, var)  h = Tanh(n)",
        scale=np.ones(n), shift=np.zeros(n), mean=np.zeros(n), var=np.ones(n),
    )  # fmt: skip
    model.opset_import[0].version = 18
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_running_statistics_are_means_over_the_processes(backend: str) -> None:
    """A part is normalised by its own statistics, so this is not the training of one process."""
    step = step_model(normalised(), "squared_error", batch_norm="training")
    data = {"x": X[:18].astype(np.float32), "label": Y[:18].astype(np.float32)}
    together = Together(2)

    def work(rank: int) -> Training:
        training = Training(
            step, 0.1, backend, all_reduce=lambda arrays: together.all_reduce(rank, arrays), place=(rank, 2)
        )
        part = slice(0, 12) if rank == 0 else slice(12, 18)
        training.epoch([{name: array[part] for name, array in data.items()}])
        return training

    first, second = together.run(work)
    for name, value in first.state.items():
        np.testing.assert_array_equal(second.state[name], value)
    a = data["x"] @ WEIGHTS["w"].astype(np.float32) + WEIGHTS["b"].astype(np.float32)
    parts = (a[:12], a[12:])
    mean = sum(0.1 * len(part) * part.mean(0) for part in parts) / 18
    var = sum(len(part) * (0.9 + 0.1 * part.var(0, ddof=1)) for part in parts) / 18
    np.testing.assert_allclose(first.state["mean"], mean, atol=1e-6)
    np.testing.assert_allclose(first.state["var"], var, atol=1e-6)


def test_each_process_draws_its_own_masks() -> None:
    step = step_model(network("double", "d = Dropout(a)  h = Tanh(d)"), "squared_error", dropout="training")
    data = {"x": np.tile(X[:1], (8, 1)), "label": np.tile(Y[:1], (8, 1))}
    together, seen = Together(2), dict[int, list[np.ndarray]]()

    def work(rank: int) -> Training:
        def all_reduce(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            seen.setdefault(rank, []).append(arrays["weights_grad"].copy())
            return together.all_reduce(rank, arrays)

        training = Training(step, 1e-30, all_reduce=all_reduce, place=(rank, 2))
        training.epoch(parted(data, 4, rank, 2))
        return training

    trained = together.run(work)
    drawn = [seen[rank][number] for rank in (0, 1) for number in (0, 1)]
    assert all(not np.array_equal(one, other) for k, one in enumerate(drawn) for other in drawn[:k])
    assert [int(training.state["step"]) for training in trained] == [2, 2]


def test_evaluation_is_of_the_samples_that_are_given() -> None:
    for settings in ({}, {"penalty": {"*": (0, 0.1)}}):
        step = step_model(network("double"), "squared_error", Adam(), **settings)
        alone = Training(step)
        one = Training(step, all_reduce=dict)
        data = {"x": X, "label": Y}
        assert one.evaluate(batches(data, 16)) == pytest.approx(alone.evaluate(batches(data, 16)), rel=1e-12)


@pytest.mark.parametrize(("loss", "settings"), [("huber", {}), ("cross_entropy", {"ignore_index": 1})])
def test_a_loss_that_is_put_into_another_shape_has_its_name(loss: str, settings: dict[str, Any]) -> None:
    step = step_model(network("double"), loss, Adam(), loss_settings=settings)
    assert [value.name for value in gradient_model(step).graph.output] == ["loss", "weights_grad"]
    assert "loss" not in [value.name for value in update_model(step).graph.output]
    data = {"x": X, "label": CLASSES if loss == "cross_entropy" else Y}
    alone, one = Training(step), Training(step, all_reduce=dict)
    for training in (alone, one):
        training.epoch(batches(data, 16))
    check_equal(alone, [one], 1e-12)
    assert one.evaluate(batches(data, 16)) == pytest.approx(alone.evaluate(batches(data, 16)), rel=1e-12)


def test_a_loss_that_is_not_finite_ends_every_process() -> None:
    step = step_model(network("double"), "squared_error")
    data = {"x": X[:8].copy(), "label": Y[:8]}
    data["x"][0] = np.nan
    together = Together(2)

    def work(rank: int) -> str:
        training = Training(step, all_reduce=lambda arrays: together.all_reduce(rank, arrays), place=(rank, 2))
        with pytest.raises(TrainingError, match=r"The loss is nan in step 0 \(epoch 0\)") as raised:
            training.epoch(parted(data, 8, rank, 2))
        for name, value in training.state.items():
            np.testing.assert_array_equal(value, step.state[name])
        return str(raised.value)

    first, second = together.run(work)
    assert "is 'x'" in first
    assert "is 'x'" not in second


def test_what_all_reduce_returns_is_checked() -> None:
    step = step_model(network("double"), "squared_error")
    batch = {"x": X, "label": Y}

    def refused(change: Any, place: tuple[int, int] = (0, 1)) -> str:
        with pytest.raises(OptionError) as raised:
            Training(step, all_reduce=change, place=place).train_on(batch, 0.1)
        return str(raised.value)

    assert "Expected a dict, got list" in refused(list)
    assert "Expected 'weights_grad' as [64], got no 'weights_grad'" in refused(
        lambda arrays: {"counts": arrays["counts"]}
    )
    assert "Expected 'counts' as [4], got 'counts' as [1, 4]" in refused(lambda a: {**a, "counts": a["counts"][None]})
    assert "of 2 processes, and place=(0, 1) says that there are 1" in refused(
        lambda arrays: {name: array * 2 for name, array in arrays.items()}
    )
    for place in ((2, 2), (-1, 2), (0, 0), (0.0, 1), 3):
        assert "place" in refused(dict, place)
    with pytest.raises(FeedError, match="No process has a sample"):
        Training(step, all_reduce=dict).train_on({"x": X[:0], "label": Y[:0]}, 0.1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_may_come_from_elsewhere(backend: str) -> None:
    step = step_model(network(), "squared_error", Adam(), penalty={"*": (0, 0.1)})
    data = {"x": X.astype(np.float32), "label": Y.astype(np.float32)}
    parts = [PartGradient(step, backend, (rank, 3)) for rank in range(3)]

    def sums(batch: dict[str, np.ndarray], state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = [part.sums(part_of(batch, (rank, 3)), state) for rank, part in enumerate(parts)]
        return {name: sum(one[name] for one in found) for name in found[0]}

    alone, other = Training(step, 0.01, backend), Training(step, 0.01, backend, sums=sums)
    for training in (alone, other):
        for _ in range(3):
            training.epoch(batches(data, 16))
    check_equal(alone, [other])
    assert other.evaluate(batches(data, 16)) == pytest.approx(alone.evaluate(batches(data, 16)), rel=1e-5)
    with pytest.raises(OptionError, match="Give only one of all_reduce, sums and processes"):
        Training(step, sums=sums, all_reduce=dict)


def test_a_step_from_elsewhere_does_not_say_where_its_gradient_ends() -> None:
    model = network()
    step = from_training_info(with_training_info(model, step_model(model, "squared_error", flat=False)))
    for make in (gradient_model, update_model):
        with pytest.raises(OptionError, match="step_model"):
            make(step)


def test_samples_may_be_counted_on_another_axis() -> None:
    """A recurrent state has the batch on its second axis, and a factor has no samples."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> f (double[N, 4] x, double[2, N, 3] state, double[2] factor) => '
        "(double[N, 3] y) { m = MatMul(x, w)  s = ReduceSum<keepdims = 0>(state, axes)  t = Add(m, s)  "
        "f = ReduceProd<keepdims = 0>(factor)  y = Mul(t, f) }"
    )
    for name, value in (("w", RNG.standard_normal((4, 3))), ("axes", np.array([0]))):
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    step = step_model(model, "squared_error", trainable=["w"])
    batch = {"x": X, "state": RNG.standard_normal((2, len(X), 3)), "factor": np.array([2.0, 0.5]), "label": Y}
    parts = [part_of(batch, (rank, 3), step.sample_axes) for rank in range(3)]
    assert [(part["state"].shape[1], len(part["x"]), len(part["factor"])) for part in parts] == [
        (24, 24, 2),
        (23, 23, 2),
        (23, 23, 2),
    ]
    together = Together(3)

    def work(rank: int) -> Training:
        training = Training(step, 0.1, all_reduce=lambda a: together.all_reduce(rank, a), place=(rank, 3))
        training.epoch([parts[rank]])
        return training

    alone = Training(step, 0.1)
    alone.epoch([batch])
    check_equal(alone, together.run(work), 1e-10)


def classes(**settings: Any) -> StepModel:
    return step_model(network(), "cross_entropy", loss_settings=settings or None)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"label": CLASSES[:8]}, "lacks 'x'"),
        ({"x": np.float32(1), "label": CLASSES[:8]}, r"'x' has the shape \[\], and its axis 0"),
        (
            {"x": X[:8], "label": np.full(8, 5)},
            r"'label' has the class 5 at \[0\], but the classes of the model are 0 to 2",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_before_it_is_shared(batch: dict[str, Any], said: str) -> None:
    training = Training(classes(class_weights=[1.0, 2.0, 1.0]), processes=2)
    try:
        with pytest.raises(FeedError, match=said):
            training.train_on({n: np.asarray(x, np.float32) if n == "x" else x for n, x in batch.items()}, 0.1)
    finally:
        training.close()


def test_a_training_that_was_closed_has_no_processes() -> None:
    training = Training(classes(), processes=2)
    training.close()
    with pytest.raises(TrainingError, match="The processes of this training have ended"):
        training.train_on({"x": X[:8].astype(np.float32), "label": CLASSES[:8]}, 0.1)


def test_processes_have_no_place() -> None:
    with pytest.raises(OptionError, match="place is for all_reduce"):
        Training(classes(), processes=2, place=(1, 2))


def test_sums_of_no_process_are_refused() -> None:
    part = PartGradient(classes())

    def zeros(batch: Any, state: Any) -> Any:
        return {name: np.zeros_like(array) for name, array in part.sums(batch, state).items()}

    with pytest.raises(OptionError, match="The sums are of no process"):
        Training(classes(), sums=zeros).train_on({"x": X[:8].astype(np.float32), "label": CLASSES[:8]}, 0.1)


@pytest.mark.parametrize(
    ("terms", "fits"),
    [
        ([LossTerm("squared_error"), LossTerm("absolute_error", label="other")], True),
        (
            [LossTerm("squared_error", reduction="sum"), LossTerm("absolute_error", label="other", reduction="sum")],
            True,
        ),
        ([LossTerm("squared_error", reduction="sum"), LossTerm("absolute_error", label="other")], False),
        ([LossTerm("cross_entropy", settings={"ignore_index": 2})], False),
    ],
)
def test_a_sum_of_losses_is_shared_if_its_terms_are_divided_by_one_number(terms: list[LossTerm], fits: bool) -> None:
    step = step_model(network(), sum_of_losses(network(), terms), SGD())
    if not fits:
        with pytest.raises(OptionError, match="the losses of parts do not add up"):
            Training(step, processes=2)
        return
    batch = {"x": X[:9].astype(np.float32), "label": Y[:9].astype(np.float32), "other": Y[9:18].astype(np.float32)}
    reached = []
    for count in (1, 3):
        training = Training(step, 0.1, processes=count)
        for _ in range(3):
            training.train_on(batch, 0.1)
        training.close()
        reached.append(training.weights)
    for name, value in reached[0].items():
        np.testing.assert_allclose(reached[1][name], value, rtol=1e-5, atol=EQUAL)


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert workers.sharing(CpuBackend(), {}, 1) == {}
    assert workers.sharing("numpy", {"precision": "float64"}, 2) == {"precision": "float64"}
    spinning = "session.intra_op.allow_spinning"
    assert workers.sharing(CpuBackend(), {}, 4) == {"threads": 1, "config": {spinning: "0"}}
    given = {"threads": 2, "config": {spinning: "1"}, "optimization": "basic"}
    assert workers.sharing(CpuBackend(), given, 2) == given
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with contextlib.closing(Training(step_model(network(), "squared_error"), processes=2)) as training:
        assert training._workers is not None
        [worker] = training._workers._workers
        assert worker.call(os.getenv, "OPENBLAS_NUM_THREADS") == os.environ.get("OPENBLAS_NUM_THREADS", "3")
        assert worker.call(os.getenv, "OMP_NUM_THREADS") == "5"
