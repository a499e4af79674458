"""A training that stops anywhere goes on to the same bits, and files that are torn, foreign or too large for the disk."""

from __future__ import annotations

import errno
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from refgrad.backends import available
from refgrad.errors import FeedError, OptionError, OutputFileError, TrainingError
from refgrad.training import (
    SGD,
    Adam,
    Arrays,
    Batches,
    Constant,
    Cosine,
    Data,
    Run,
    StepModel,
    Training,
    Warmup,
    open_data,
    step_model,
)
from refgrad.training import checkpoints as module
from refgrad.training.data import ahead

pytest.importorskip("safetensors")
BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
LINE = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 18]> line (float[N, 2] x) => (float[N, 1] y) '
    "<float[2, 1] a = {0, 0}> { y = MatMul(x, a) }"
)
X = np.random.default_rng(0).standard_normal((103, 2))
Y = X @ [1, 2]


class StoppedError(Exception):
    pass


def make(step: StepModel, path: Path | None, backend: str = "numpy", stop: int = 0, **options) -> Run:
    def notify(run: Run) -> None:
        if run.training.progress.step == stop:
            raise StoppedError

    train, held = Arrays(step, {"X": X, "y": Y}).split(0.2, 0)
    return Run(
        Training(step, options.pop("schedule", 0.05), backend),
        train,
        **{"epochs": 6, "size": 10, "validation": held, "patience": 3, "checkpoint": path, "notify": notify, **options},
    )


@pytest.fixture(scope="module")
def step() -> StepModel:
    return step_model(LINE, optimizer=Adam())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stop", [1, 9, 10, 31, 54])
def test_a_training_that_stops_goes_on_as_if_it_had_not(stop, backend, step, tmp_path):
    """9 steps are an epoch, and a checkpoint is written every 4."""
    whole = make(step, None, backend)
    whole.run()
    path = tmp_path / "c.safetensors"
    with pytest.raises(StoppedError):
        make(step, path, backend, stop, every=4).run()
    going = make(step, path, backend, every=4, resume=True)
    assert going.training.progress.step == max(stop // 4 * 4, (stop - 1) // 9 * 9) or stop == 1
    going.run()
    assert going.training.losses == whole.training.losses
    assert going.validation_losses == whole.validation_losses
    for name, value in whole.training.state.items():
        np.testing.assert_array_equal(going.training.state[name], value)


def test_a_file_that_is_no_checkpoint_of_this_training(step, tmp_path):
    path = tmp_path / "c.safetensors"
    make(step, path).run()
    whole = path.read_bytes()
    for torn in (whole[:-1], whole[:40], b"", b"\xff" * 64, b"PK\x03\x04" + whole):
        path.write_bytes(torn)
        with pytest.raises(FeedError, match="is no whole checkpoint"):
            make(step, path, resume=True)
    import safetensors.numpy

    safetensors.numpy.save_file({"a": np.zeros(2)}, path)
    with pytest.raises(FeedError, match="no checkpoint of refgrad"):
        make(step, path, resume=True)
    path.write_bytes(whole)
    safetensors.numpy.save_file({"a": np.zeros(2)}, path, {"format": "refgrad.checkpoint.1"})
    with pytest.raises(FeedError, match="is a checkpoint of another version of refgrad"):
        make(step, path, resume=True)


OTHER_STEPS = {
    "optimizer Adam then, and optimizer SGD now.": lambda: step_model(LINE, optimizer=SGD()),
    "beta1=0.9 then, and beta1=0.8 now.": lambda: step_model(LINE, optimizer=Adam(beta1=0.8)),
    "loss='squared_error' then, and loss='absolute_error' now.": lambda: step_model(LINE, "absolute_error", Adam()),
    "clip_norm=None then, and clip_norm=5 now.": lambda: step_model(LINE, optimizer=Adam(), clip_norm=5),
    "penalty={} then, and penalty={'a': (0.0, 1.0)} now.": lambda: step_model(
        LINE, optimizer=Adam(), penalty={"a": (0, 1)}
    ),
    "the model has other nodes or other weights now.": lambda: step_model(_with_weights([0, 1]), optimizer=Adam()),
}
OTHER_RUNS = {
    "size=10 then, and size=11 now.": {"size": 11},
    "seed=0 then, and seed=1 now.": {"seed": 1},
    "seed=0 then, and samples in their order now.": {"seed": None},
    "no validation data now.": {"validation": None, "patience": None},
    "rate=0.05 then, and rate=0.5 now.": {"schedule": Constant(0.5)},
    "schedule Constant then, and schedule Cosine now.": {"schedule": Cosine(0.05)},
    "schedule Constant then, and schedule Warmup now.": {"schedule": Warmup(after=Constant(0.05))},
}


def _with_weights(values: list[float]) -> onnx.ModelProto:
    other = onnx.ModelProto()
    other.CopyFrom(LINE)
    other.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.float32(values)[:, None], "a"))
    return other


@pytest.mark.parametrize("said", [*OTHER_STEPS, *OTHER_RUNS])
def test_a_checkpoint_of_another_training_says_what_differs(said, step, tmp_path):
    path = tmp_path / "c.safetensors"
    make(step, path).run()
    unlike = OTHER_STEPS[said]() if said in OTHER_STEPS else step
    with pytest.raises(FeedError, match=re.escape(said) + " Give (what|the model that) was given then"):
        make(unlike, path, resume=True, **OTHER_RUNS.get(said, {}))


def test_a_longer_cosine_is_another_training(step, tmp_path):
    path = tmp_path / "c.safetensors"
    make(step, path, schedule=Cosine(0.05, period=6)).run()
    with pytest.raises(
        FeedError, match=r"period=6 then, and period=8 now\. A cosine falls to its minimum in its period"
    ):
        make(step, path, resume=True, schedule=Cosine(0.05, period=8), epochs=8)


def test_fewer_epochs_than_the_checkpoint_has_are_refused(step, tmp_path):
    path = tmp_path / "c.safetensors"
    make(step, path, patience=None).run()
    with pytest.raises(OptionError, match=r"has done 6 epochs\. Give epochs=6 to write its model, or more to go on"):
        make(step, path, patience=None, epochs=2, resume=True)


@pytest.mark.parametrize("kind", ["arrays", "mapped", "shards"])
def test_other_data_is_another_training(kind, step, tmp_path):
    def data(name: str, y: np.ndarray) -> Data:
        if kind == "arrays":
            return Arrays(step, {"x": X, "y": y})
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        if kind == "mapped":
            np.save(folder / "x.npy", X[: len(y)])
            np.save(folder / "label.npy", y)
        else:
            np.savez(folder / "0.npz", x=X[: len(y)], label=y)
        return open_data(step, folder)

    path = tmp_path / "c.safetensors"
    same, other = Y, (Y[:-1] if kind == "shards" else Y + 1)
    Run(Training(step, 0.05), data("a", same), 2, validation=data("a", same), checkpoint=path).run()
    Run(Training(step, 0.05), data("b", same), 3, validation=data("b", same), checkpoint=path, resume=True)
    for given, held, what in ((other, same, "training"), (same, other, "validation")):
        with pytest.raises(FeedError, match=f"{what} data of 1(03 sample| file).* then, and {what} data of"):
            Run(Training(step, 0.05), data("c", given), 3, validation=data("d", held), checkpoint=path, resume=True)


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 18), (4, 4), (18, 1)])
def test_updates_are_counted(accumulate, updates, tmp_path):
    run = make(step_model(LINE, accumulate=accumulate), None, epochs=2, patience=None)
    run.run()
    assert run.updates == updates


def test_a_training_without_an_update_is_refused(tmp_path):
    run = make(step_model(LINE, accumulate=19), None, epochs=2, patience=None)
    with pytest.raises(TrainingError, match=r"accumulate=19 updates once in so many steps, and there were 18\."):
        run.run()


def test_a_full_disk_leaves_the_checkpoint_before(step, tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    make(step, path, epochs=1).run()
    before = path.read_bytes()

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(OutputFileError, match=r"c\.safetensors' cannot be written: No space left on device"):
        make(step, path, resume=True).run()
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["c.safetensors"]


def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(step, tmp_path):
    path = tmp_path / "c.safetensors"
    make(step, path, epochs=1).run()
    before = path.read_bytes()
    run = make(step, path, resume=True, every=1)
    run.training.schedule = Constant(3e38)
    with pytest.raises(TrainingError, match="'weights' is not finite after step 10"):
        run.run()
    assert path.read_bytes() == before


TRAIN = """
import sys, time
sys.path[:0] = {tests!r}
from test_checkpoints import *
def slowly(run): time.sleep(0.002)
make(step_model(LINE, optimizer=Adam()), Path(sys.argv[1]), every=1, epochs=40, patience=None, notify=slowly, resume=True).run()
"""


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.models)])
def test_a_training_that_is_killed_goes_on_to_the_same_bits(kills, step, tmp_path):
    whole = make(step, None, epochs=40, patience=None)
    whole.run()
    path, rng = tmp_path / "c.safetensors", np.random.default_rng(0)
    words = [sys.executable, "-W", "ignore", "-c", TRAIN.format(tests=[str(Path(__file__).parent)]), str(path)]
    landed = 0
    while landed < kills:
        path.unlink(missing_ok=True)
        process = subprocess.Popen(words)
        while not path.exists() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.random() * 1.0)
        process.kill()
        if process.wait() != -signal.SIGKILL:
            continue
        landed += 1
        going = make(step, path, epochs=40, patience=None, resume=True)
        assert going.training.progress.step > 0
        going.run()
        assert going.training.losses == whole.training.losses
        for name, value in whole.training.state.items():
            np.testing.assert_array_equal(going.training.state[name], value)


# Data.


def collected(data, rng=None, size=4) -> np.ndarray:
    return np.concatenate([batch["label"] for batch in data.batches(size, rng)]).ravel()


@pytest.mark.parametrize("kind", ["npz", "npy", "shards"])
def test_every_sample_comes_once_in_an_epoch_from_files(kind, step, tmp_path):
    x, y = np.arange(46, dtype=np.float32).reshape(23, 2), np.arange(23, dtype=np.float32)
    place = tmp_path / "d"
    place.mkdir()
    if kind == "npz":
        place = place / "d.npz"
        np.savez(place, X=x, y=y)
    elif kind == "npy":
        np.save(place / "x.npy", x)
        np.save(place / "label.npy", y)
    else:
        for k, part in enumerate((slice(0, 9), slice(9, 10), slice(10, 23))):
            np.savez(place / f"{k}.npz", features=x[part], target=y[part])
    data = open_data(step, place)
    np.testing.assert_array_equal(collected(data), y)
    first, again = (collected(data, np.random.default_rng(1)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert (first != y).any()
    np.testing.assert_array_equal(np.sort(first), y)
    for batch in data.batches(4, np.random.default_rng(2)):
        np.testing.assert_array_equal(batch["x"][:, :1], batch["label"] * 2)
    assert [len(batch["x"]) for batch in data.batches(4)] == [4, 4, 4, 4, 4, 3]


CLASSES = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 18]> three (float[N, 2] x) => (float[N, 3] y) '
    "<float[2, 3] a = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, a) }"
)
GOOD = np.ones((4, 2), np.float32)
WRONG = {
    "lengths": ({"x": GOOD, "label": np.arange(3)}, "'x' 4, 'label' 3"),
    "NaN": ({"x": GOOD * [1, np.nan], "label": np.zeros(4, int)}, r"not finite: nan at \[0, 1\]"),
    "class": (
        {"x": GOOD, "label": np.array([0, 1, 3, 0])},
        r"the class 3 at \[2\], but the classes of the model are 0 to 2",
    ),
    "negative": ({"x": GOOD, "label": np.array([0, -1, 2, 0])}, r"-1 at \[1\]"),
    "half": ({"x": GOOD, "label": np.array([0, 0.5, 2, 0])}, r"has 0.5 at \[1\], but it takes whole numbers \(int64\)"),
    "text": (
        {"x": GOOD, "label": np.array(["a", "b", "c", "d"])},
        "Expected int64, got text for 'label'. The model returns scores alone: number the classes 0 to 2",
    ),
    "one-hot": (
        {"x": GOOD, "label": np.eye(4, 3)},
        r"Expected \[N\], got \[4, 3\] for 'label'. One-hot labels become class numbers by label\.argmax\(1\)",
    ),
    "large": (
        {"x": GOOD * [1, 1e300], "label": np.zeros(4, int)},
        r"has 1e\+300 at \[0, 1\], which is too large for float32",
    ),
    "empty": ({"x": GOOD[:0], "label": np.zeros(0, int)}, "no sample"),
    "shape": ({"x": np.ones((4, 5)), "label": np.zeros(4, int)}, r"Expected \[N, 2\], got \[4, 5\]"),
    "names": ({"z": GOOD, "label": np.zeros(4, int)}, "needs the arrays 'x', 'label'"),
    "missing": ({"x": GOOD}, "needs the arrays 'x', 'label'"),
    "objects": ({"x": GOOD, "label": np.array([None] * 4)}, "Expected int64, got"),
}


@pytest.mark.parametrize("name", WRONG)
def test_data_that_does_not_fit_is_refused(name):
    arrays, said = WRONG[name]
    with pytest.raises(FeedError, match=said):
        Arrays(step_model(CLASSES, "cross_entropy"), arrays)


@pytest.mark.parametrize("part", [None, 0.5])
@pytest.mark.parametrize(
    ("name", "place", "value", "said"),
    [
        ("x", (17, 1), np.inf, r"^Sample 17: 'x' has numbers that are not finite: inf at \[0, 1\]"),
        ("label", (29,), 3, r"^Sample 29: 'label' has the class 3 at \[0\]"),
    ],
)
def test_a_sample_in_mapped_arrays_is_named_by_its_place_in_the_data(name, place, value, said, part, tmp_path):
    """Not by its place in a shuffled batch."""
    arrays = {"x": np.tile(GOOD, (10, 1)), "label": np.tile([0, 1, 2, 0], 10)}
    arrays[name][place] = value
    for one, array in arrays.items():
        np.save(tmp_path / f"{one}.npy", array)
    data = open_data(step_model(CLASSES, "cross_entropy"), tmp_path)
    parts = [data] if part is None else data.split(part, 0)
    with pytest.raises(FeedError, match=said):
        [batch for one in parts for batch in one.batches(8, np.random.default_rng(1))]


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize("kind", [int, float, str])
def test_class_numbers_need_a_loss_of_classes(kind, shape):
    said = "has fewer numbers than the output, and loss='squared_error' compares as many. .* use loss='cross_entropy'"
    with pytest.raises(FeedError, match=said):
        Arrays(step_model(CLASSES), {"x": GOOD, "label": np.zeros(shape, kind)})
    probabilities = onnx.ModelProto.FromString(CLASSES.SerializeToString())
    [output] = probabilities.graph.output
    probabilities.graph.node.append(onnx.helper.make_node("Softmax", [output.name], ["p"]))
    output.name = "p"
    with pytest.raises(FeedError, match=r"For class numbers use loss='log_loss'\."):
        Arrays(step_model(probabilities), {"x": GOOD, "label": np.zeros(shape, kind)})


def test_labels_of_another_width_are_no_class_numbers():
    with pytest.raises(FeedError, match=r"Expected \[N, 3\], got \[4, 2\] for 'label'\.$"):
        Arrays(step_model(CLASSES), {"x": GOOD, "label": np.zeros((4, 2))})


def test_errors_in_validation_data_say_so(step, tmp_path):
    np.save(tmp_path / "x.npy", X[:3] * np.nan)
    np.save(tmp_path / "label.npy", Y[:3])
    run = Run(Training(step, 0.05), Arrays(step, {"x": X, "y": Y}), 1, validation=open_data(step, tmp_path))
    with pytest.raises(FeedError, match=r"^Validation data: Sample 0: 'x' has numbers that are not finite"):
        run.run()


def test_a_shard_that_does_not_fit_is_named(tmp_path):
    step = step_model(CLASSES, "cross_entropy")
    np.savez(tmp_path / "0.npz", x=GOOD, label=np.zeros(4, int))
    for bad, said in (((GOOD[:0], np.zeros(0, int)), "no sample"), ((GOOD, np.full(4, 3)), "3 at")):
        np.savez(tmp_path / "1.npz", x=bad[0], label=bad[1])
        with pytest.raises(FeedError, match=rf"1\.npz': .*{said}"):
            list(open_data(step, tmp_path).batches(2))
    (tmp_path / "1.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(FeedError, match=r"1\.npz' is no .npz file"):
        list(open_data(step, tmp_path).batches(2))


def test_what_a_thread_reads_ahead_raises_where_it_is_asked_for():
    def broken():
        yield 1
        raise FeedError("the second one")

    found = ahead(broken())
    assert next(found) == 1
    with pytest.raises(FeedError, match="the second one"):
        next(found)


def test_any_iterable_of_batches_trains(step):
    rows = [{"x": X[k : k + 10], "label": Y[k : k + 10]} for k in range(0, 100, 10)]
    run = Run(Training(step, 0.05), Batches(step, rows), epochs=2)
    run.run()
    assert run.training.progress.sample == 200
