"""Weights in a file beside the model: frozen ones stay there, and the trained model is the one that is trained in memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from refgrad.backends import available, get_backend, wrap
from refgrad.cli import main
from refgrad.errors import BackendError, FeedError, InvalidModelError, OptionError, TrainingError
from refgrad.model import external
from refgrad.model.external import ExternalData, Opened, is_external
from refgrad.model.reading import opened
from refgrad.parameters.weights import weights
from refgrad.protos.memory import at_most
from refgrad.training import (
    SGD,
    Adam,
    Arrays,
    LossTerm,
    Run,
    Training,
    adapters,
    batches,
    lora,
    merge_adapters,
    save_trained,
    step_model,
    sum_of_losses,
)
from refgrad.training.steps import StepModel

pytestmark = pytest.mark.filterwarnings("ignore:rank=8 is more than the weight")

SIZE, CLASSES = 160, 20  # vectors of more than 128 elements are not small
BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]


def network(dtype: np.dtype | type = np.float32) -> ModelProto:
    """Two layers and a head, whose weights are in memory."""
    rng = np.random.default_rng(0)
    shapes = {"body.0.w": (SIZE, SIZE), "body.1.w": (SIZE, SIZE), "head.w": (SIZE, CLASSES), "head.b": (CLASSES,)}
    tensors = [
        numpy_helper.from_array((rng.standard_normal(shape) / 12).astype(dtype), name) for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "body.0.w"], ["a"]),
        helper.make_node("Tanh", ["a"], ["h"]),
        helper.make_node("Gemm", ["h", "body.1.w"], ["z"], transB=1),
        helper.make_node("Tanh", ["z"], ["g"]),
        helper.make_node("MatMul", ["g", "head.w"], ["s"]),
        helper.make_node("Add", ["s", "head.b"], ["logits"]),
    ]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    values = [helper.make_tensor_value_info(n, kind, ["N", size]) for n, size in (("x", SIZE), ("logits", CLASSES))]
    graph = helper.make_graph(nodes, "network", values[:1], values[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def saved(model: ModelProto, path: Path, shift: int = 0) -> Path:
    """Write a model with all its initializers in `<path>.data`, behind `shift` bytes."""
    model = _copy(model)
    with path.with_name(f"{path.name}.data").open("wb") as file:
        file.write(b"\0" * shift)
        for tensor in model.graph.initializer:
            raw, offset = tensor.raw_data, file.tell()
            file.write(raw)
            set_external_data(tensor, f"{path.name}.data", offset, len(raw))
            tensor.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())
    return path


def _copy(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def data(count: int = 40, dtype: np.dtype | type = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((count, SIZE)).astype(dtype), "label": rng.integers(0, CLASSES, count)}


def in_files(model: ModelProto) -> list[str]:
    """The initializers whose values are in a file, and nowhere else."""
    names = [tensor.name for tensor in model.graph.initializer if is_external(tensor)]
    assert not any(t.raw_data or t.float_data for t in model.graph.initializer if is_external(t))
    return names


def values(model: ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def trained(step: StepModel, backend: str = "numpy") -> Training:
    training = Training(step, 0.05, backend)
    for _ in range(3):
        training.epoch(batches(data(), 10))
    return training


def onnxruntime_maps() -> bool:
    """True if this ONNX Runtime takes a folder of data: older ones get the data in the model."""
    import onnxruntime

    return tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 21)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the tensors that are read from a file into memory."""
    monkeypatch.setattr("refgrad.model.roles._LONGEST_PROGRESSION", 1000)  # larger weights are not looked at
    names = set[str]()
    for method in ("load", "array"):
        original = getattr(ExternalData, method)

        def noting(self, tensor, *rows, original=original):
            names.add(tensor.name)
            return original(self, tensor, *rows)

        monkeypatch.setattr(ExternalData, method, noting)
    return names


@pytest.mark.parametrize("declared", ["float", "float[]"])  # the second one says nothing about the shape
@pytest.mark.parametrize("composed", [False, True])
def test_a_loss_that_is_a_model_leaves_weights_in_their_file(
    composed: bool, declared: str, tmp_path: Path, read: set[str]
) -> None:
    path = saved(network(), tmp_path / "m.onnx")
    loss = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> loss (float[N, {CLASSES}] logits, int64[N] label) => ({declared} mean) {{
            mean = SoftmaxCrossEntropyLoss (logits, label)
        }}"""
    )
    if composed:
        loss = sum_of_losses(path, [LossTerm("cross_entropy", "logits")])
    step = step_model(path, loss, SGD(), trainable=["head.*"])
    assert in_files(step.model) == ["body.0.w", "body.1.w"]
    assert read == {"head.w", "head.b"}
    expected = trained(step_model(network(), "cross_entropy", SGD(), trainable=["head.*"]))
    training = trained(step)
    np.testing.assert_allclose(training.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(training.weights["head.w"], expected.weights["head.w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_are_trained_beside_weights_in_a_file(backend: str, tmp_path: Path, read: set[str]) -> None:
    path, model = saved(network(), tmp_path / "m.onnx"), network()
    adapted = lora(path, ["body.*"], rank=3)
    assert in_files(adapted) == ["body.0.w", "body.1.w", "head.w", "head.b"]
    step = step_model(adapted, "cross_entropy", Adam(), data_beside=path)
    assert step.data_beside == path
    assert in_files(step.model) == ["body.0.w", "body.1.w", "head.w"]
    assert len(step.model.SerializeToString()) < 20_000
    training = trained(step, backend)
    made = training.write_to(adapted)
    assert in_files(made) == in_files(adapted)
    if backend == "ort-cpu" and onnxruntime_maps():  # the interpreter copies less than 256 KiB
        assert not read & {"body.0.w", "body.1.w", "head.w"}
    merged = merge_adapters(made, data_beside=path)
    assert in_files(merged) == ["head.w"]  # a small tensor is loaded
    onnx.save(merged, tmp_path / "merged.onnx")
    in_memory = lora(model, ["body.*"], rank=3)
    due = values(merge_adapters(trained(step_model(in_memory, "cross_entropy", Adam()), backend).write_to(in_memory)))
    got = values(onnx.load(tmp_path / "merged.onnx"))
    assert got.keys() == due.keys()
    for name in due:
        (np.testing.assert_array_equal if backend == "numpy" else _near)(got[name], due[name])
        assert (got[name] == values(model)[name]).all() == name.startswith("head.")


def _near(got: np.ndarray, due: np.ndarray) -> None:
    np.testing.assert_allclose(got, due, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_head_is_trained_of_a_path(backend: str, tmp_path: Path, read: set[str]) -> None:
    path = saved(network(), tmp_path / "m.onnx")
    step = step_model(path, "cross_entropy", Adam(), trainable=["head.*"])
    assert read == {"head.w", "head.b"}
    assert in_files(step.model) == ["body.0.w", "body.1.w"]
    training = trained(step, backend)
    made = training.write_to(path)
    assert in_files(made) == ["body.0.w", "body.1.w"]
    due = trained(step_model(network(), "cross_entropy", Adam(), trainable=["head.*"]), backend).weights
    written = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer if not is_external(t)}
    for name, value in training.weights.items():
        np.testing.assert_array_equal(written[name], value)
        (np.testing.assert_array_equal if backend == "numpy" else _near)(value, due[name])


@pytest.mark.parametrize("folder", ["", "elsewhere"])
@pytest.mark.parametrize(
    "options", ["--lora body.* --trainable head.b", "--trainable head.*,body.1.w", "--lora body.1.w"]
)
def test_the_command_writes_what_is_trained_in_memory(
    options: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    saved(network(), Path("m.onnx"))
    onnx.save(network(), "inline.onnx")
    np.savez("data.npz", **data())
    before = Path("m.onnx.data").read_bytes()
    words = f"--data data.npz --loss cross_entropy --epochs 2 --rate 0.05 {options} -o".split()
    made = str(Path(folder, "made.onnx"))
    assert main(["train", "m.onnx", *words, made]) == 0
    assert main(["train", "inline.onnx", *words, "due.onnx"]) == 0
    got, due = onnx.load(made), onnx.load("due.onnx")
    assert values(got).keys() == values(due).keys()
    for name, value in values(due).items():
        np.testing.assert_array_equal(values(got)[name], value)
    assert [str(node) for node in got.graph.node] == [str(node) for node in due.graph.node]
    assert Path("m.onnx.data").read_bytes() == before
    locations = {
        t.name: {e.key: e.value for e in t.external_data}["location"]
        for t in onnx.load(made, load_external_data=False).graph.initializer
        if is_external(t)
    }
    changed = {name for name, value in values(network()).items() if not (values(due)[name] == value).all()}
    for name, location in locations.items():
        assert location == ("made.onnx.data" if folder or name in changed else "m.onnx.data"), name


def test_a_result_does_not_take_the_place_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    model = onnx.load(saved(network(), Path("m.onnx")), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = entry.value.replace("m.onnx.data", "out.onnx.data")
    os.rename("m.onnx.data", "out.onnx.data")
    Path("m.onnx").write_bytes(model.SerializeToString())
    np.savez("data.npz", **data())
    before = Path("out.onnx.data").read_bytes()
    command = "train m.onnx --data data.npz --loss cross_entropy --lora body.* --epochs 1 -o out.onnx"
    assert main(command.split()) == 2
    assert "holds the weights of the model" in " ".join(capsys.readouterr().err.split())
    assert Path("out.onnx.data").read_bytes() == before
    assert not Path("out.onnx").exists()


def test_a_checkpoint_is_of_the_values_and_not_of_the_name_of_their_file(tmp_path: Path) -> None:
    path = saved(network(), tmp_path / "m.onnx")
    other = saved(network(), tmp_path / "renamed.onnx", shift=64)
    changed = network()
    changed.graph.initializer[0].raw_data = changed.graph.initializer[0].raw_data[:-1] + b"\x3f"
    third = saved(changed, tmp_path / "changed.onnx")
    checkpoint = tmp_path / "c.safetensors"

    def run(model: Path, epochs: int, resume: bool = True) -> Run:
        step = step_model(model, "cross_entropy", Adam(), trainable=["head.*"])
        arrays = Arrays(step, data())
        return Run(Training(step, 0.05), arrays, epochs, 10, checkpoint=checkpoint, resume=resume)

    run(path, 2, resume=False).run()
    resumed = run(other, 4)
    resumed.run()
    checkpoint.unlink()
    whole = run(path, 4, resume=False)
    whole.run()
    for name, value in whole.training.weights.items():
        np.testing.assert_array_equal(resumed.training.weights[name], value)
    with pytest.raises(FeedError, match="checkpoint of another training"):
        run(third, 5)


def test_small_tensors_are_loaded_and_the_place_is_kept(tmp_path: Path) -> None:
    path = saved(network(), tmp_path / "m.onnx")
    found = opened(path)
    assert isinstance(found, Opened)
    assert in_files(found.proto) == ["body.0.w", "body.1.w", "head.w"]
    assert isinstance(opened(network()), ModelProto)
    whole = onnx.load(path)
    assert opened(whole) is whole or in_files(opened(whole)) == []  # type: ignore[arg-type]
    with pytest.raises(InvalidModelError, match="missing: there is no file"):
        step_model(onnx.load(path, load_external_data=False), "cross_entropy", data_beside=tmp_path / "a" / "m.onnx")


@pytest.mark.parametrize("location", ["/etc/passwd", "../m.onnx.data", "link"])
def test_data_outside_of_the_folder_is_not_read(location: str, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    path = saved(network(), tmp_path / "inner" / "m.onnx")
    shutil.copy(tmp_path / "inner" / "m.onnx.data", tmp_path / "m.onnx.data")
    (tmp_path / "inner" / "link").symlink_to(tmp_path / "m.onnx.data")
    adapted = lora(path, ["body.*"])
    for tensor in filter(is_external, adapted.graph.initializer):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    with pytest.raises(InvalidModelError, match="cannot be used"):
        step_model(adapted, "cross_entropy", data_beside=path)
    with pytest.raises(InvalidModelError, match="cannot be used"):
        merge_adapters(adapted, data_beside=path)
    step = step_model(lora(path, ["body.*"]), "cross_entropy", data_beside=path)
    for tensor in filter(is_external, step.model.graph.initializer):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    for backend in BACKENDS:
        with pytest.raises(InvalidModelError, match="cannot be used"):
            Training(step, 0.1, backend)


def test_a_model_in_memory_needs_the_place_of_its_data(tmp_path: Path) -> None:
    path = saved(network(), tmp_path / "m.onnx")
    adapted = lora(path, ["body.*"])
    with pytest.raises(InvalidModelError, match="data_beside"):
        merge_adapters(adapted)
    with pytest.raises(InvalidModelError, match="data_beside"):
        step_model(adapted, "cross_entropy")


def test_another_executor_gets_the_model_with_its_data(tmp_path: Path) -> None:
    path = saved(network(), tmp_path / "m.onnx")
    seen = []

    class Rep:
        def __init__(self, model: ModelProto) -> None:
            seen.append(model)
            self.prepared = get_backend("numpy").prepare(model)

        def run(self, inputs, **options):
            fed = dict(zip([value.name for value in self.prepared.inputs], inputs, strict=True))
            return list(self.prepared.run(fed).values())

    class Other:
        @staticmethod
        def prepare(model, device="CPU", **options):
            return Rep(model)

    step = step_model(path, "cross_entropy", SGD(), trainable=["head.*"])
    other = Training(step, 0.05, wrap(Other, "other"))
    own = Training(step, 0.05)
    for training in (other, own):
        training.epoch(batches(data(), 10))
    assert [in_files(model) for model in seen] == [[]]
    np.testing.assert_array_equal(other.weights["head.w"], own.weights["head.w"])


@pytest.mark.skipif("ort-cpu" not in BACKENDS, reason="onnxruntime is not installed")
def test_large_weights_have_no_copies_in_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime as runtime

    from refgrad.backends import onnxruntime

    path = saved(network(), tmp_path / "m.onnx")
    step = step_model(path, "cross_entropy", SGD(), trainable=["head.*"])
    due, entries = trained(step, "ort-cpu").weights, dict[str, str]()

    class Noting(runtime.SessionOptions):
        def add_session_config_entry(self, key: str, value: str) -> None:
            entries[key] = value
            super().add_session_config_entry(key, value)

    monkeypatch.setattr(runtime, "SessionOptions", Noting)
    trained(step, "ort-cpu")
    assert "session.disable_prepacking" not in entries
    monkeypatch.setattr(onnxruntime, "_LARGE", 1000)
    for name, value in trained(step, "ort-cpu").weights.items():
        _near(value, due[name])
    assert entries["session.disable_prepacking"] == "1"
    Training(step, 0.1, "ort-cpu", options={"config": {"session.disable_prepacking": "0"}})
    assert entries["session.disable_prepacking"] == "0"


@pytest.mark.skipif("ort-cpu" not in BACKENDS, reason="onnxruntime is not installed")
def test_an_older_onnxruntime_gets_the_model_with_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from refgrad.backends import onnxruntime

    path = saved(network(), tmp_path / "m.onnx")
    step = step_model(path, "cross_entropy", SGD(), trainable=["head.*"])
    due = trained(step, "ort-cpu").weights
    monkeypatch.setattr(onnxruntime, "_KNOWS_DATA_FOLDER", (99, 0))
    for name, value in trained(step, "ort-cpu").weights.items():
        _near(value, due[name])


def test_a_result_is_of_the_model_that_was_trained(tmp_path: Path) -> None:
    path = saved(network(), tmp_path / "m.onnx")
    training = trained(step_model(path, "cross_entropy", SGD(), trainable=["head.*"]))
    assert save_trained(training, path, tmp_path / "made.onnx", path) == tmp_path / "made.onnx.data"
    for name, value in values(onnx.load(tmp_path / "made.onnx")).items():
        np.testing.assert_array_equal(value, training.weights.get(name, values(network())[name]))
    other = onnx.load(path, load_external_data=False)
    other.graph.initializer[2].dims[:] = [CLASSES, SIZE]
    with pytest.raises(
        OptionError, match=r"has 'head.w' as float32\[160, 20\], and the model has it as float32\[20, 160\]"
    ):
        save_trained(training, other, tmp_path / "other.onnx", path)
    with pytest.raises(OptionError, match="has no adapters"):
        save_trained(training, path, tmp_path / "other.onnx", path, merge=True)
    assert not (tmp_path / "other.onnx").exists()


def test_a_weight_that_is_merged_in_parts_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_BLOCK", 1000)
    path = saved(network(), tmp_path / "m.onnx")
    adapted = lora(path, ["body.0.w"], rank=2)
    with at_most(3 * 4 * SIZE * SIZE + 10_000):
        merge_adapters(adapted, path)


def test_of_many_files_some_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "_MAPS", 1)
    monkeypatch.setattr(external, "_COPIED", 1)
    model, path = network(), tmp_path / "m.onnx"
    onnx.save(_copy(model), path, save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0)
    held = onnx.load(path, load_external_data=False).graph.initializer
    with ExternalData(path) as found:
        for tensor in held:
            np.testing.assert_array_equal(found.mapped(tensor), values(model)[tensor.name])


def test_weights_in_a_file_count_as_memory(tmp_path: Path) -> None:
    path = saved(network(), tmp_path / "m.onnx")
    with at_most(150_000), pytest.raises(InvalidModelError, match=r"takes 204800 bytes, and max_memory is 150000"):
        step_model(path, "cross_entropy", trainable=["head.*"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_links_that_may_be_followed_lead_to_weights(backend: str, tmp_path: Path) -> None:
    """The cache of the Hugging Face hub has links to files with other names."""
    snapshot, blobs = (tmp_path / "models--a--b" / part for part in ("snapshots/1/onnx", "blobs"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    path = saved(network(), tmp_path / "m.onnx")
    for file, blob in ((path, "12"), (tmp_path / "m.onnx.data", "34")):
        os.rename(file, blobs / blob)
        (snapshot / file.name).symlink_to(Path("../../../blobs", blob))
    step = step_model(snapshot / "m.onnx", "cross_entropy", Adam(), trainable=["head.*"])
    due = trained(step_model(network(), "cross_entropy", Adam(), trainable=["head.*"]), backend).weights
    for name, value in trained(step, backend).weights.items():
        (np.testing.assert_array_equal if backend == "numpy" else _near)(value, due[name])


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64], ids=lambda kind: kind.__name__
)
def test_mapped_values_are_those_of_the_file(dtype, shift: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    array = rng.standard_normal((300, 500)).astype(dtype)
    model = network()
    model.graph.initializer.append(numpy_helper.from_array(array, "large"))
    path = saved(model, tmp_path / "m.onnx", shift)
    tensor = next(t for t in onnx.load(path, load_external_data=False).graph.initializer if t.name == "large")
    with ExternalData(path) as held:
        mapped = held.mapped(tensor)
        part = held.array(tensor, slice(100, 103))
    os.replace(shutil.copy(path, tmp_path / "other"), tmp_path / "m.onnx.data")  # what is mapped stays
    np.testing.assert_array_equal(mapped.view(np.uint8), array.view(np.uint8))
    np.testing.assert_array_equal(part.view(np.uint8), array[100:103].view(np.uint8))
    assert not mapped.flags.writeable
    assert mapped.flags.owndata == bool(shift % array.itemsize)


def test_four_bits_are_read_and_not_mapped(tmp_path: Path) -> None:
    model = network()
    tensor = TensorProto(name="q", data_type=TensorProto.INT4, dims=[1000, 601], raw_data=bytes(range(250)) * 1202)
    model.graph.initializer.append(tensor)
    path = saved(model, tmp_path / "m.onnx")
    held = next(t for t in onnx.load(path, load_external_data=False).graph.initializer if t.name == "q")
    with ExternalData(path) as found:
        np.testing.assert_array_equal(found.mapped(held), numpy_helper.to_array(tensor))
        np.testing.assert_array_equal(found.array(held, slice(3, 5)), numpy_helper.to_array(tensor)[3:5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_of_more_than_2_gib_is_trained_beside(backend: str, tmp_path: Path) -> None:
    """An embedding in a sparse file: only its rows that are read take memory."""
    rows, width = 2**19, 1100
    path = tmp_path / "m.onnx"
    table = TensorProto(
        name="table", data_type=TensorProto.FLOAT, dims=[rows, width], data_location=TensorProto.EXTERNAL
    )
    for key, value in (("location", "m.data"), ("offset", 0), ("length", 4 * rows * width)):
        table.external_data.add(key=key, value=str(value))
    last = np.random.default_rng(0).standard_normal(width).astype(np.float32)
    with (tmp_path / "m.data").open("wb") as file:
        file.truncate(4 * rows * width)
        file.seek(4 * (rows - 1) * width)
        file.write(last.tobytes())
    head = numpy_helper.from_array(np.zeros((width, 3), np.float32), "head")
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["e"]), helper.make_node("MatMul", ["e", "head"], ["y"])],
        "embedding",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
        [table, head],
    )
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()
    )
    assert weights(path)["table"].kind == "parameter"
    step = step_model(path, "squared_error", SGD(), trainable=["head"], reduction="sum")
    if backend == "ort-cpu" and not onnxruntime_maps():
        with pytest.raises(BackendError, match="The model is over 2 GB"):
            Training(step, 0.01, backend)
        return
    training = Training(step, 0.01, backend)
    label = np.float32([[1, 2, 3], [4, 5, 6]])
    training.epoch([{"ids": np.array([rows - 1, 0]), "label": label}])
    np.testing.assert_allclose(training.weights["head"], 0.02 * np.outer(last, label[0]), rtol=1e-5, atol=1e-6)
    assert in_files(training.write_to(path)) == ["table"]


def test_running_statistics_in_a_file_are_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    model = network()
    names = ("scale", "shift", "mean", "var")
    model.graph.initializer.extend(
        numpy_helper.from_array(np.abs(rng.standard_normal(SIZE)).astype(np.float32) + 1, name) for name in names
    )
    bn = helper.make_node("BatchNormalization", ["x", *names], ["n"], momentum=0.5)
    model.graph.node.insert(0, bn)
    model.graph.node[1].input[0] = "n"
    saved(model, Path("m.onnx"))
    onnx.save(model, "inline.onnx")
    np.savez("data.npz", **data())
    options = "--data data.npz --loss cross_entropy --epochs 2 --trainable head.* --batch-norm training"
    words = [*options.split(), "-o"]
    assert main(["train", "m.onnx", *words, "made.onnx"]) == 0
    assert main(["train", "inline.onnx", *words, "due.onnx"]) == 0
    got, due = values(onnx.load("made.onnx")), values(onnx.load("due.onnx"))
    for name, value in due.items():
        np.testing.assert_array_equal(got[name], value)
    assert not np.array_equal(got["mean"], values(model)["mean"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_estimator_takes_the_path_of_a_model(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from refgrad.training.estimators import OnnxRegressor

    path = saved(network(), tmp_path / "m.onnx")
    fed = data()
    y = np.eye(CLASSES, dtype=np.float32)[fed["label"]]
    found, due = (
        OnnxRegressor(model, trainable=["head.*"], max_iter=3, random_state=0, backend=backend).fit(fed["x"], y)
        for model in (path, network())
    )
    _near(found.predict(fed["x"]), due.predict(fed["x"]))
    assert in_files(found.onnx_model_) == ["body.0.w", "body.1.w"]


def test_the_cause_of_a_loss_that_is_not_finite_is_found_beside_weights_in_a_file(tmp_path: Path) -> None:
    path = saved(network(), tmp_path / "m.onnx")
    step = step_model(path, "cross_entropy", SGD(), trainable=["head.*"], penalty={"head.w": (0, 1e-3)})
    training = Training(step, 0.05)
    fed = data()
    assert np.isfinite(training.evaluate(batches(fed, 10)))
    fed["x"][3, 4] = np.nan
    with pytest.raises(TrainingError, match="'x'"):
        training.epoch(batches(fed, 10))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_process_reads_frozen_weights_where_they_lie(backend: str, tmp_path: Path) -> None:
    step = step_model(saved(network(), tmp_path / "m.onnx"), "cross_entropy", trainable=["head.*"])
    assert step.data_beside is not None
    rng = np.random.default_rng(1)
    data = {"x": rng.standard_normal((30, SIZE)).astype(np.float32), "label": rng.integers(0, CLASSES, 30)}
    alone, two = Training(step, 0.1, backend), Training(step, 0.1, backend, processes=2)
    for training in (alone, two):
        training.epoch([data])
    two.close()
    for name, value in alone.weights.items():
        np.testing.assert_allclose(two.weights[name], value, atol=1e-6)
