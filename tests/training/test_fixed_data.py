"""Inputs of a training that count samples on another axis than the first, or have none: recurrent states, sample rates."""

import json
from contextlib import closing

import numpy as np
import onnx
import onnx.parser
import pytest

from refgrad.cli import main
from refgrad.errors import FeedError
from refgrad.training import SGD, Training, part_of, step_model
from refgrad.training.data import Arrays, Batches, Shards
from refgrad.training.sources import open_data

pytestmark = pytest.mark.interpreter

COUNT = 6
RECURRENT = onnx.parser.parse_model("""
<ir_version: 8, opset_import: ["": 18]>
recurrent (float[N, 4] x, float[2, N, 4] state, int64 rate) => (float[N, 3] y)
<float[4, 3] w = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}>
{
  axes = Constant <value_ints = [0]> ()
  sum = ReduceSum <keepdims = 0> (state, axes)
  factor = Cast <to = 1> (rate)
  scaled = Mul (x, factor)
  h = Add (scaled, sum)
  y = MatMul (h, w)
}""")
MASKED = onnx.parser.parse_model("""
<ir_version: 8, opset_import: ["": 18]>
masked (float[N, T] x, float[1, T] mask) => (float[N, 1] y) <float[1, 1] w = {0}>
{ axes = Constant <value_ints = [1]> ()  z = Mul (x, mask)  s = ReduceSum <keepdims = 1> (z, axes)  y = MatMul (s, w) }""")


def arrays(**others):
    number = np.arange(COUNT, dtype=np.float32)
    x, state = np.tile(number[:, None], 4), np.tile(number[:, None], (2, 1, 4))
    return {"x": x, "state": state, "rate": np.int64(3), "label": np.tile(number[:, None], 3)} | others


@pytest.fixture(scope="module")
def step():
    return step_model(RECURRENT, optimizer=SGD())


def shuffled(data):
    return list(data.batches(4, np.random.default_rng(0)))


def same_samples(batches):
    """Assert that the arrays of a batch have the same samples, and that the batches have all samples."""
    seen = []
    for batch in batches:
        numbers = batch["x"][:, 0]
        np.testing.assert_array_equal(batch["state"], np.tile(numbers[:, None], (2, 1, 4)))
        np.testing.assert_array_equal(batch["label"][:, 2], numbers)
        assert batch["rate"] == 3
        seen += numbers.tolist()
    assert sorted(seen) == list(range(COUNT))
    assert seen != sorted(seen)


def test_the_axis_of_the_samples_is_found(step):
    assert step.sample_axes == {"x": 0, "state": 1, "rate": None, "label": 0}


def test_an_axis_of_another_name_has_no_samples():
    step = step_model(MASKED, optimizer=SGD())
    assert step.sample_axes == {"x": 0, "mask": None, "label": 0}
    square = {"x": np.ones((COUNT, COUNT)), "mask": np.arange(COUNT)[None], "label": np.ones((COUNT, 1))}
    for batch in Arrays(step, square).batches(4):
        np.testing.assert_array_equal(batch["mask"], square["mask"])


def test_samples_in_memory(step):
    same_samples(shuffled(Arrays(step, arrays())))


def test_samples_in_a_folder_of_arrays(step, tmp_path):
    for name, array in arrays().items():
        np.save(tmp_path / f"{name}.npy", array)
    same_samples(shuffled(open_data(step, tmp_path)))


def test_samples_in_shards(step, tmp_path):
    for number, part in enumerate((slice(0, 1), slice(1, 6))):
        whole = arrays()
        some = {name: whole[name][part] for name in ("x", "label")}
        np.savez(tmp_path / f"{number}.npz", state=whole["state"][:, part], rate=whole["rate"], **some)
    same_samples(shuffled(Shards(step, sorted(tmp_path.glob("*.npz")))))


def test_one_state_is_for_all_samples(step):
    state = np.arange(8, dtype=np.float32).reshape(2, 1, 4)
    for batch in Arrays(step, arrays(state=state)).batches(4):
        np.testing.assert_array_equal(batch["state"], np.repeat(state, len(batch["x"]), 1))


def test_other_data_has_another_description(step):
    assert Arrays(step, arrays()).description != Arrays(step, arrays(rate=np.int64(4))).description


def test_a_part_is_kept_back(step):
    train, held = Arrays(step, arrays()).split(0.5, 0)
    for part in (train, held):
        for batch in part.batches(2):
            np.testing.assert_array_equal(batch["state"][0, :, 0], batch["x"][:, 0])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"state": np.zeros((2, 5, 4), np.float32)}, "'state' 5"),
        ({"state": np.zeros((6, 2, 4), np.float32)}, "'state' 2"),
        ({"state": np.zeros((3, 6, 4), np.float32)}, r"Expected \[2, N, 4\], got \[3, 6, 4\] for 'state'"),
        ({"state": np.zeros(6, np.float32)}, "'state' is a scalar|Expected"),
        ({"rate": np.full(6, 3)}, r"Expected \[\], got \[6\] for 'rate'"),
    ],
)
def test_other_shapes_are_refused(changed, said, step):
    with pytest.raises(FeedError, match=said):
        Arrays(step, arrays(**changed))


def test_what_has_no_samples_is_the_same_in_all_files(step, tmp_path):
    for number in range(2):
        np.savez(tmp_path / f"{number}.npz", **arrays(rate=np.int64(number)))
    with pytest.raises(FeedError, match=r"'rate' has no samples, and it differs from the one before"):
        list(Shards(step, sorted(tmp_path.glob("*.npz"))).batches(4))


def test_batches_of_one_s_own_are_as_the_model_takes_them(step):
    [batch] = Batches(step, [arrays()]).batches(4)
    assert batch["state"].shape == (2, COUNT, 4)


def test_the_shell_trains_a_recurrent_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x, state, right = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 4), (2, 1, 4), (4, 3)))
    onnx.save(RECURRENT, "r.onnx")
    np.savez("d.npz", x=x, state=state, rate=np.int64(1), label=(x + state.sum(0)) @ right)
    words = "train r.onnx --data d.npz --optimizer sgd --rate 0.1 --epochs 600 --json -o t.onnx"
    assert main(words.split()) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1200  # 32 samples and 8: the state's 2 layers are no batch
    [w] = onnx.load("t.onnx").graph.initializer
    np.testing.assert_allclose(onnx.numpy_helper.to_array(w), right, atol=1e-2)


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_share_the_samples(processes, step):
    batch = arrays()
    parts = [part_of(batch, (rank, processes), step.sample_axes) for rank in range(processes)]
    assert sum(step.samples_in(part) for part in parts) == COUNT
    for part in parts:
        np.testing.assert_array_equal(part["state"][1, :, 0], part["x"][:, 0])
        assert part["rate"] == 3


def test_two_processes_train_as_one(step):
    curves = []
    for processes in (1, 2):
        with closing(Training(step, 1e-3, processes=processes)) as training:
            curves.append([training.train_on(arrays(), 1e-3) for _ in range(3)])
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-6)


def test_rows_of_a_table(step):
    pyarrow = pytest.importorskip("pyarrow")
    whole = arrays()
    columns = {"x": whole["x"], "label": whole["label"], "state": np.moveaxis(whole["state"], 1, 0)}
    table = pyarrow.table(
        {name: [row.tolist() for row in rows] for name, rows in columns.items()} | {"rate": [3] * COUNT}
    )
    same_samples(shuffled(open_data(step, table)))
    with pytest.raises(FeedError, match=r"'rate' has no samples, and its rows differ"):
        list(open_data(step, table.set_column(3, "rate", [[*range(COUNT)]])).batches(4))


@pytest.mark.parametrize("lazily", [["x", "state", "label"], ["state"], ["label"]], ids="+".join)
def test_arrays_of_dask(lazily, step):
    dask = pytest.importorskip("dask.array")
    whole = arrays()
    chunks = {"x": (4, 4), "state": (2, 4, 4), "label": (4, 3)}
    same_samples(shuffled(open_data(step, whole | {n: dask.from_array(whole[n], chunks[n]) for n in lazily})))
    one = np.arange(8, dtype=np.float32).reshape(2, 1, 4)
    for batch in open_data(
        step, whole | {"x": dask.from_array(whole["x"], (4, 4)), "state": dask.from_array(one)}
    ).batches(4):
        np.testing.assert_array_equal(batch["state"], np.repeat(one, len(batch["x"]), 1))
    with pytest.raises(FeedError, match="'state' 5"):
        open_data(step, whole | {"state": dask.from_array(np.zeros((2, 5, 4), np.float32))})


def test_a_file_of_one_sample_has_the_state_of_all(step, tmp_path):
    whole, state = arrays(), np.arange(8, dtype=np.float32).reshape(2, 1, 4)
    for number, part in enumerate((slice(0, 1), slice(1, 4), slice(4, 6))):
        some = {name: whole[name][part] for name in ("x", "label")}
        np.savez(tmp_path / f"{number}.npz", state=state, rate=whole["rate"], **some)
    batches = shuffled(Shards(step, sorted(tmp_path.glob("*.npz"))))
    assert sum(len(batch["x"]) for batch in batches) == COUNT
    for batch in batches:
        np.testing.assert_array_equal(batch["state"], np.repeat(state, len(batch["x"]), 1))
