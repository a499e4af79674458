"""Data as people have it: Parquet, Arrow, Dask, DataLoaders and iterables of Python; shuffled, and resumed at a batch."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from refgrad.cli import main
from refgrad.errors import FeedError, OptionError
from refgrad.protos.memory import at_most
from refgrad.training import SGD, Arrays, Batches, Data, Run, StepModel, Training, open_data, step_model

pytestmark = pytest.mark.torch

RNG = np.random.default_rng(0)
X = RNG.standard_normal((57, 4)).astype(np.float32)
LABEL = RNG.integers(0, 3, 57)


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


arrow, dask, torch = needs("pyarrow"), needs("dask"), needs("torch")


def network(shape: str = "N, 4", nodes: str = "y = MatMul(x, w)") -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> net (float[{shape}] x) => (float[N, 3] y) {{ {nodes} }}'
    )
    weight = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return model


@pytest.fixture(scope="module")
def step() -> StepModel:
    return step_model(network(), "cross_entropy", SGD(momentum=0.9))


def lists(array: np.ndarray) -> Any:
    """A column of lists of fixed sizes."""
    import pyarrow

    flat = pyarrow.array(array.ravel())
    for size in array.shape[:0:-1]:
        flat = pyarrow.FixedSizeListArray.from_arrays(flat, size)
    return flat


def table(**columns: Any) -> Any:
    import pyarrow

    return pyarrow.table({"x": lists(X), "label": pyarrow.array(LABEL)} | columns)


def write(path: Path, rows: Any, size: int = 10) -> Path:
    """A Parquet or Arrow file with so many rows in each part."""
    import pyarrow.parquet

    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(rows, path, row_group_size=size)
    else:
        with pyarrow.ipc.new_file(path, rows.schema) as file:
            file.write_table(rows, max_chunksize=size)
    return path


def parquet(step: StepModel, folder: Path) -> Data:
    return open_data(step, write(folder / "data.parquet", table(other=["a"] * 57)))


def ipc(step: StepModel, folder: Path) -> Data:
    return open_data(step, write(folder / "data.arrow", table()))


def files(step: StepModel, folder: Path) -> Data:
    place = folder / "parts"
    place.mkdir(exist_ok=True)
    for number, rows in enumerate((table()[:20], table()[20:])):
        write(place / f"{number}.parquet", rows)
    return open_data(step, place)


def in_memory(step: StepModel, folder: Path) -> Data:
    return open_data(step, table())


def blocks(step: StepModel, folder: Path) -> Data:
    import dask.array

    arrays = {"x": dask.array.from_array(X, chunks=(10, 2)), "label": dask.array.from_array(LABEL, chunks=25)}
    return open_data(step, arrays)


def loader(step: StepModel, folder: Path) -> Data:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    return open_data(step, DataLoader(TensorDataset(torch.tensor(X), torch.tensor(LABEL)), 8, shuffle=True))


def function(step: StepModel, folder: Path) -> Data:
    def batches(seed: int | None) -> Iterator[dict[str, np.ndarray]]:
        order = np.arange(57) if seed is None else np.random.default_rng(seed).permutation(57)
        for start in range(0, 57, 8):
            yield {"x": X[order[start : start + 8]], "label": LABEL[order[start : start + 8]]}

    return open_data(step, batches)


SOURCES = [
    *(pytest.param(one, marks=arrow, id=one.__name__) for one in (parquet, ipc, files, in_memory)),
    pytest.param(blocks, marks=dask, id="dask"),
    pytest.param(loader, marks=torch, id="torch"),
    pytest.param(function, id="function"),
]
Source = Callable[[StepModel, Path], Data]


def joined(batches: Iterator[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    found = list(batches)
    assert all(len(array) == 8 for batch in found[:-1] for array in batch.values())
    return {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}


@pytest.mark.parametrize("source", SOURCES)
def test_every_sample_comes_once_in_an_order_that_a_seed_decides(
    source: Source, step: StepModel, tmp_path: Path
) -> None:
    data = source(step, tmp_path)
    found = [joined(data.batches(8, np.random.default_rng(seed))) for seed in (0, 0, 1)]
    for one in found:
        order = np.lexsort(one["x"].T)
        np.testing.assert_array_equal(one["x"][order], X[np.lexsort(X.T)])
        np.testing.assert_array_equal(one["label"][order], LABEL[np.lexsort(X.T)])
        assert one["x"].dtype == np.float32
    np.testing.assert_array_equal(found[0]["x"], found[1]["x"])
    assert not np.array_equal(found[0]["x"], found[2]["x"]) or source is in_memory
    assert not np.array_equal(found[0]["x"], X)
    if source is not loader:
        plain = joined(data.batches(8))
        np.testing.assert_array_equal(plain["x"], X)
        np.testing.assert_array_equal(plain["label"], LABEL)


@pytest.mark.parametrize("source", SOURCES)
def test_a_training_goes_on_at_the_batch_where_it_stopped(source: Source, step: StepModel, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")

    def run(**settings: Any) -> Run:
        return Run(Training(step, 0.05), source(step, tmp_path), 3, 8, 5, **settings)

    whole = run()
    whole.run()

    def stop(run: Run) -> None:
        if run.training.progress.step == 13:  # within the second epoch
            raise KeyboardInterrupt

    path = tmp_path / "c.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=path, every=3, notify=stop).run()
    resumed = run(checkpoint=path, every=3, resume=True)
    assert resumed.training.progress.step == 12
    resumed.run()
    for name, value in whole.training.state.items():
        np.testing.assert_array_equal(resumed.training.state[name], value)
    assert resumed.training.losses == whole.training.losses


@arrow
def test_a_file_is_read_part_by_part(step: StepModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from refgrad.training import arrow as module

    data, read = parquet(step, tmp_path), list[int]()
    original = module._Part.read
    monkeypatch.setattr(module._Part, "read", lambda part: read.append(part._number) or original(part))
    batches = data.batches(8)
    next(batches)
    assert len(read) <= 3
    batches.close()


@arrow
def test_the_rows_of_lists_and_tensors(tmp_path: Path) -> None:
    import pyarrow

    cube = step_model(network("N, 2, 2", "z = Flatten(x)  y = MatMul(z, w)"), "cross_entropy")
    x = X.reshape(57, 2, 2)
    tensors = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(x))
    for column in (lists(x), pyarrow.array(x.tolist(), pyarrow.list_(pyarrow.list_(pyarrow.float64()))), tensors):
        for name in ("t.parquet", "t.arrow"):
            data = open_data(cube, write(tmp_path / name, table(x=column)))
            np.testing.assert_array_equal(joined(data.batches(8))["x"], x)


@arrow
def test_names_of_columns_and_classes_in_text(tmp_path: Path) -> None:
    import pyarrow
    from skl2onnx import to_onnx
    from sklearn.linear_model import LogisticRegression

    names = np.array(["low", "middle", "high"])[LABEL]
    model = to_onnx(LogisticRegression().fit(X, names), X, options={"zipmap": False})
    step = step_model(model, "log_loss")
    text = pyarrow.array(names.tolist())
    for column in (text, text.dictionary_encode()):
        rows = pyarrow.table({"X": lists(X), "kind": column, "id": pyarrow.array(range(57))})
        data = open_data(step, write(tmp_path / "t.parquet", rows), "kind")
        np.testing.assert_array_equal(joined(data.batches(8))["label"], np.unique(names, return_inverse=True)[1])
    with pytest.raises(FeedError, match="The data lacks 'label'"):
        open_data(step, tmp_path / "t.parquet")


@arrow
def test_columns_with_usual_names_are_found_beside_others(step: StepModel, tmp_path: Path) -> None:
    import pyarrow

    rows = pyarrow.table({"x": lists(X), "y": LABEL, "id": range(57)})
    data = open_data(step, write(tmp_path / "t.parquet", rows))
    np.testing.assert_array_equal(joined(data.batches(8))["label"], LABEL)


@arrow
def test_a_column_per_number_gets_advice_that_works(step: StepModel, tmp_path: Path) -> None:
    import pyarrow.feather
    import pyarrow.parquet

    rows = pyarrow.table({name: X[:, k] for k, name in enumerate("abcd")} | {"label": LABEL})
    for path in (tmp_path / "t.parquet", tmp_path / "t.arrow"):
        with pytest.raises(FeedError, match="If 'x' is the other columns side by side: ") as refused:
            open_data(step, write(path, rows))
        advice = str(refused.value).rpartition("side by side: ")[2].removesuffix(".")
        exec(advice.replace("data.npz", str(tmp_path / "data.npz")), {"numpy": np, "pyarrow": pyarrow})
        np.testing.assert_array_equal(joined(open_data(step, tmp_path / "data.npz").batches(8))["x"], X)
    with pytest.raises(FeedError, match=r"it has 'a', 'label'\.$"):  # which cannot be the four numbers of x
        open_data(step, write(tmp_path / "t.parquet", rows.select(["a", "label"])))


@arrow
def test_a_stream_of_arrow_gets_advice_that_works(step: StepModel, tmp_path: Path) -> None:
    import pyarrow.feather

    path = tmp_path / "stream.arrow"
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table().schema) as writer:
        writer.write_table(table())
    with pytest.raises(
        FeedError, match=r"stream\.arrow' is a stream of Arrow, which can be read only from its"
    ) as refused:
        open_data(step, path)
    advice = str(refused.value).partition("as a file: ")[2].removesuffix(".")
    exec(advice.replace("data.feather", str(tmp_path / "data.feather")), {"pyarrow": pyarrow})
    np.testing.assert_array_equal(joined(open_data(step, tmp_path / "data.feather").batches(8))["x"], X)


@arrow
def test_what_is_wrong_with_a_table_is_named(step: StepModel, tmp_path: Path) -> None:
    import pyarrow

    path = tmp_path / "t.parquet"

    def refused(rows: Any, says: str, label: str | None = None) -> None:
        with pytest.raises(FeedError, match=says):
            list(open_data(step, write(path, rows), label).batches(8))

    ragged = [[*row, *[0.0] * (k > 30)] for k, row in enumerate(X.tolist())]
    refused(table(x=ragged), r"row group 3: .*'x' has lists of 4 to 5 elements\. Pad or cut")
    refused(table(x=lists(X[:, :3].copy())), r"Expected \[N, 4\], got \[10, 3\] for 'x'")
    refused(
        table(label=[*LABEL.tolist()[:-1], None]),
        r"group 5: Column 'label' has no value in 1 row, the first in row 6",
    )
    refused(
        table(label=[{"a": 1}] * 57), r"Column 'label' has the type struct<a: int64>\. Give numbers, text, or lists"
    )
    refused(table(label=[7] * 57), r"row group 0: 'label' has the class 7 at")
    refused(table(), r"no array 'lable'; there are 'x', 'label'\. Did you mean 'label'", "lable")
    refused(table()[:0], r"t\.parquet' has no row\. Leave it out")
    with pytest.raises(FeedError, match=r"There is no file .*gone\.parquet"):
        open_data(step, tmp_path / "gone.parquet")
    for name in ("torn.parquet", "torn.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 and no more")
        with pytest.raises(FeedError, match=rf"{name}' cannot be read as a file of (Parquet|Arrow): "):
            open_data(step, tmp_path / name)
    write(tmp_path / "some" / "a.parquet", table()) if (tmp_path / "some").mkdir() else None
    for name in ("a.parquet", "b.arrow"):
        write(tmp_path / "some" / name, table())
    with pytest.raises(FeedError, match=r"has files of several kinds: \.parquet, \.arrow"):
        open_data(step, tmp_path / "some")
    assert isinstance(open_data(step, {"x": X, "label": LABEL}), Arrays)
    assert pyarrow.__version__


@arrow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFO")
@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
def test_a_fifo_is_not_opened(name: str, step: StepModel, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(FeedError, match="is a FIFO, and no regular file"):
        open_data(step, tmp_path / name)


@arrow
def test_a_row_group_is_not_read_that_is_larger_than_the_limit(step: StepModel, tmp_path: Path) -> None:
    data = open_data(step, write(tmp_path / "t.parquet", table()))
    with (
        at_most(100),
        pytest.raises(
            FeedError, match=r"row group 0: The row group has \d+ bytes, and max_memory is 100\. Raise max_memory"
        ),
    ):
        next(data.batches(8))
    with at_most(2**20):
        assert len(next(data.batches(8))["x"]) == 8


def test_without_pyarrow_the_error_says_what_to_install(step: StepModel, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(OptionError, match=r"\[arrow\]"):
        open_data(step, tmp_path / "t.parquet")


@dask
def test_what_is_wrong_with_arrays_of_dask_is_named(step: StepModel) -> None:
    import dask.array

    x, label = dask.array.from_array(X, chunks=10), dask.array.from_array(LABEL, chunks=25)
    with pytest.raises(FeedError, match=r"'x' has chunks of unknown sizes\. Call compute_chunk_sizes"):
        open_data(step, {"x": x[x[:, 0] > 0], "label": label})
    with pytest.raises(FeedError, match="All arrays need the same number of samples"):
        open_data(step, {"x": x, "label": label[:50]})
    with pytest.raises(FeedError, match=r"Samples 0 to 9: Expected \[N, 4\], got \[10, 3\] for 'x'"):
        open_data(step, {"x": x[:, :3], "label": label})
    mixed = open_data(step, {"x": x, "label": LABEL})
    np.testing.assert_array_equal(joined(mixed.batches(8))["label"], LABEL)


def test_batches_from_python(step: StepModel) -> None:
    pairs = [(X[:8], LABEL[:8]), (X[8:16], LABEL[8:16])]
    for source in (pairs, [dict(zip(("x", "label"), pair, strict=True)) for pair in pairs], lambda seed: iter(pairs)):
        for data in (open_data(step, source), Batches(step, source)):
            for _ in range(2):
                np.testing.assert_array_equal(joined(data.batches(8))["x"], X[:16])

    def refused(source: Any, says: str, kind: type[Exception] = FeedError) -> None:
        with pytest.raises(kind, match=says):
            list(open_data(step, source).batches(8))

    refused(
        iter(pairs), r"list_iterator is at its end after one epoch\. Give an iterable that starts anew", OptionError
    )
    refused((pair for pair in pairs), "generator is at its end after one epoch", OptionError)
    refused(7, "Batches are an iterable, or a function that returns one, not int", OptionError)
    dataset = type("Samples", (), {"__getitem__": None})()
    refused(dataset, r"returns one, not Samples\. Put a Dataset of torch into a DataLoader", OptionError)
    refused([*pairs, (X,)], r"Batch 2: Expected a tuple of 2 arrays, 'x', 'label', got 1")
    refused([X[:8]], "Batch 0: A batch is a dict, or a tuple of 'x', 'label', not ndarray")
    refused([(X[:8, :3], LABEL[:8])], r"Batch 0: Expected \[N, 4\], got \[8, 3\] for 'x'")
    refused([([[1, 2], [3]], LABEL[:2])], "Batch 0: 'x' cannot be made an array")


def test_a_run_takes_what_open_data_returns(step: StepModel) -> None:
    data = {"x": X, "label": LABEL}
    training = Training(step, 0.01)
    for arguments, says in (
        ((training, data), r"data is what open_data\(step, source\) returns, not a dict"),
        ((step, open_data(step, data)), r"training is a Training, such as Training\(step, 0\.01\), not a StepModel"),
    ):
        with pytest.raises(OptionError, match=says):
            Run(*arguments)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="validation is what open_data"):
        Run(training, open_data(step, data), validation=0.2)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="all_reduce is a function of arrays by name, not an int"):
        Training(step, 0.01, all_reduce=3)  # type: ignore[arg-type]


def test_arrays_may_be_lists_and_tensors(step: StepModel) -> None:
    class Tensor:
        """Like a tensor of torch that requires a gradient: an array only after `detach`."""

        def __array__(self, *arguments: Any, **options: Any) -> np.ndarray:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")

        def detach(self) -> Any:
            return type("Detached", (), {"cpu": lambda _: X})()

    for x in (X.tolist(), Tensor()):
        np.testing.assert_array_equal(joined(open_data(step, {"x": x, "label": LABEL}).batches(8))["x"], X)
    with pytest.raises(FeedError, match="'x' cannot be made an array: setting an array element"):
        open_data(step, {"x": [[1, 2], [3]], "label": [0, 1]})


@arrow
def test_the_command_reads_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(network(), "net.onnx")
    np.savez("data.npz", x=X, label=LABEL)
    write(tmp_path / "data.parquet", table(id=list(range(57))))
    for name in ("npz", "parquet"):
        words = f"train net.onnx --data data.{name} --loss cross_entropy --epochs 3 --no-shuffle -o {name}.onnx"
        assert main(words.split()) == 0
    assert Path("npz.onnx").read_bytes() == Path("parquet.onnx").read_bytes()
    assert main([*words.split(), "--validation", "0.1"]) == 2
    assert "keeps back a part of an .npz file" in capsys.readouterr().err


@arrow
def test_an_element_of_a_tensor_without_a_value_is_refused(step: StepModel) -> None:
    import pyarrow

    kind = pyarrow.fixed_shape_tensor(pyarrow.float32(), (4,))
    storage = pyarrow.array([[0.0, 1, None, 3]] + [[0.0] * 4] * 56, pyarrow.list_(pyarrow.float32(), 4))
    rows = pyarrow.table({"x": pyarrow.ExtensionArray.from_storage(kind, storage), "label": LABEL})
    with pytest.raises(FeedError, match="'x' has no value in 1 element of"):
        list(open_data(step, rows).batches(8))


@arrow
def test_the_axes_of_a_tensor_may_be_permuted() -> None:
    import pyarrow

    tensors = RNG.standard_normal((6, 2, 3)).astype(np.float32)
    kind = pyarrow.fixed_shape_tensor(pyarrow.float32(), (3, 2), permutation=[1, 0])
    storage = pyarrow.array(tensors.transpose(0, 2, 1).reshape(6, 6).tolist(), pyarrow.list_(pyarrow.float32(), 6))
    model = network("N, 2, 3", "s = Constant <value_ints = [-1, 6]> () f = Reshape(x, s) y = MatMul(f, w)")
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones((6, 3), np.float32), "w"))
    rows = {"x": pyarrow.ExtensionArray.from_storage(kind, storage), "label": LABEL[:6]}
    [batch] = open_data(step_model(model, "cross_entropy"), pyarrow.table(rows)).batches(6)
    np.testing.assert_array_equal(batch["x"], tensors)


@arrow
@pytest.mark.parametrize("end", [".parquet", ".arrow"])
def test_parts_without_rows_are_passed_over(end: str, step: StepModel, tmp_path: Path) -> None:
    import pyarrow.parquet

    rows, empty = table(), table().slice(0, 0)
    path = tmp_path / f"t{end}"
    if end == ".parquet":
        with pyarrow.parquet.ParquetWriter(path, rows.schema) as file:
            for part in (rows.slice(0, 30), empty, rows.slice(30)):
                file.write_table(part, row_group_size=30)
    else:
        with pyarrow.ipc.new_file(path, rows.schema) as file:
            for part in (rows.slice(0, 30), empty, rows.slice(30)):
                file.write_batch(pyarrow.RecordBatch.from_struct_array(part.to_struct_array().combine_chunks()))
    assert sum(len(batch["x"]) for batch in open_data(step, path).batches(8)) == 57


@arrow
def test_columns_of_one_name_are_refused(step: StepModel) -> None:
    import pyarrow

    with pytest.raises(FeedError, match="The table has several columns 'x'"):
        open_data(step, pyarrow.table([lists(X), lists(X), pyarrow.array(LABEL)], names=["x", "x", "label"]))


@arrow
def test_a_table_of_another_library_is_converted(step: StepModel) -> None:
    class Frame:
        schema, columns = None, ["x", "label"]

        def slice(self) -> None:
            """Return a part, as a frame of polars does."""

        def to_arrow(self) -> Any:
            return table()

    assert sum(len(batch["x"]) for batch in open_data(step, Frame()).batches(8)) == 57  # type: ignore[arg-type]
