"""External data: what lies outside of the model's folder, or does not fit its tensor, is never read, by no command."""

import os
import re
import socket
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer
from commands import Command, commands
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper

import refgrad
from refgrad import cli
from refgrad.backends import available, get_backend
from refgrad.backends.base import load_model
from refgrad.cli.output import Files
from refgrad.conformance.problems.systems.executors import REFERENCE, get_executor
from refgrad.errors import FeedError, InvalidModelError, RefgradError
from refgrad.escaping import printable
from refgrad.model import external
from refgrad.model import writing as files
from refgrad.model.reading import read
from refgrad.model.values import array_in

SECRET = b"key=hunter2!"  # 12 bytes: three floats
ELEMENTS = {t for t in TensorProto.DataType.values() if t not in (TensorProto.UNDEFINED, TensorProto.STRING)}


def outside(dims=(3,), kind=TensorProto.FLOAT, name="w", **entries: str | int) -> TensorProto:
    """A tensor whose data lies where `entries` say."""
    tensor = TensorProto(name=name, data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key.rstrip("_"), value=str(value))
    return tensor


def whole(dims=(3,), kind=np.float32, name="w") -> TensorProto:
    return numpy_helper.from_array(np.zeros(dims, kind), name)


# Where a model holds a tensor: the model y = f(x), of which the tensor is a part.


def model_of(nodes, initializers=(), functions=(), sparse=()) -> ModelProto:
    value = helper.make_tensor_value_info
    ends = [value("x", TensorProto.FLOAT, [3])], [value("y", TensorProto.FLOAT, [3])]
    graph = helper.make_graph(nodes, "g", *ends, list(initializers), sparse_initializer=list(sparse))
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=imports, functions=list(functions))


MUL = helper.make_node("Mul", ["x", "w"], ["y"])


def holds(value: TensorProto) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["w"], value=value)


def in_initializer(tensor: TensorProto) -> ModelProto:
    return model_of([MUL], [tensor])


def in_constant(tensor: TensorProto) -> ModelProto:
    return model_of([holds(tensor), MUL])


def in_body(tensor: TensorProto, nodes=(), sparse=()) -> ModelProto:
    value = helper.make_tensor_value_info
    results = [value("r", TensorProto.FLOAT, [3])]
    once = [*nodes, helper.make_node("Mul", ["x", "w"], ["r"])]
    then = helper.make_graph(once, "then", [], results, [tensor] if tensor is not None else [])
    then.sparse_initializer.extend(sparse)
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["r"])], "other", [], results)
    yes = helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True)))
    return model_of([yes, helper.make_node("If", ["yes"], ["y"], then_branch=then, else_branch=other)])


def in_node_of_body(tensor: TensorProto) -> ModelProto:
    return in_body(None, [holds(tensor)])


def in_function(tensor: TensorProto) -> ModelProto:
    body = [holds(tensor), MUL]
    twice = helper.make_function("own", "scaled", ["x"], ["y"], body, [helper.make_opsetid("", 18)])
    return model_of([helper.make_node("scaled", ["x"], ["y"], domain="own")], functions=[twice])


def in_default_of_function(tensor: TensorProto) -> ModelProto:
    body = [helper.make_node("Constant", [], ["w"]), MUL]
    body[0].attribute.add(name="value", ref_attr_name="w", type=onnx.AttributeProto.TENSOR)
    defaults = [helper.make_attribute("w", tensor)]
    imports = [helper.make_opsetid("", 18)]
    scaled = helper.make_function("own", "scaled", ["x"], ["y"], body, imports, attribute_protos=defaults)
    return model_of([helper.make_node("scaled", ["x"], ["y"], domain="own")], functions=[scaled])


def sparse_of(values: TensorProto | None = None, indices: TensorProto | None = None) -> onnx.SparseTensorProto:
    values, indices = values or whole(), indices or numpy_helper.from_array(np.arange(3), "i")
    return helper.make_sparse_tensor(values, indices, [3])


def as_indices(tensor: TensorProto) -> TensorProto:
    indices = TensorProto()
    indices.CopyFrom(tensor)
    indices.data_type = TensorProto.INT64 if tensor.data_type == TensorProto.FLOAT else tensor.data_type
    return indices


def in_sparse_values(tensor: TensorProto) -> ModelProto:
    return model_of([MUL], sparse=[sparse_of(tensor)])


def in_sparse_indices(tensor: TensorProto) -> ModelProto:
    return model_of([MUL], sparse=[sparse_of(indices=as_indices(tensor))])


def in_sparse_constant(tensor: TensorProto) -> ModelProto:
    return model_of([helper.make_node("Constant", [], ["w"], sparse_value=sparse_of(tensor)), MUL])


def in_sparse_of_body(tensor: TensorProto) -> ModelProto:
    return in_body(None, sparse=[sparse_of(tensor)])


def in_several(tensor: TensorProto) -> ModelProto:
    return model_of([helper.make_node("Odd", ["x"], ["y"], domain="own", tensors=[whole(), tensor])])


def under_a_wrong_type(tensor: TensorProto) -> ModelProto:
    model = in_constant(tensor)
    model.graph.node[0].attribute[0].type = onnx.AttributeProto.FLOAT
    return model


def in_training(tensor: TensorProto) -> ModelProto:
    model = in_initializer(whole())
    model.training_info.add().algorithm.CopyFrom(in_initializer(tensor).graph)
    return model


PLACES = (
    in_initializer,
    in_constant,
    in_body,
    in_node_of_body,
    in_function,
    in_default_of_function,
    in_sparse_values,
    in_sparse_indices,
    in_sparse_constant,
    in_sparse_of_body,
    in_several,
    under_a_wrong_type,
    in_training,
)

# Attacks: each prepares the model's folder `at`, and returns the tensor. `at.parent` has the secret.


def secret(at: Path) -> Path:
    return at.parent / "secret.bin"


def linked(at: Path) -> TensorProto:
    (at / "link.bin").symlink_to(secret(at))
    return outside(location="link.bin")


def linked_within(at: Path) -> TensorProto:
    (at / "within.bin").symlink_to(at / "w.bin")
    return outside(location="within.bin")


def linked_folder(at: Path) -> TensorProto:
    (at / "folder").symlink_to(at.parent)
    return outside(location="folder/secret.bin")


def linked_inner_folder(at: Path) -> TensorProto:
    (at / "inner").mkdir()
    (at / "inner" / "deep").symlink_to(at.parent)
    return outside(location="inner/deep/secret.bin")


def hard_linked(at: Path) -> TensorProto:
    os.link(secret(at), at / "hard.bin")
    return outside(location="hard.bin")


def dangling(at: Path) -> TensorProto:
    (at / "dangling.bin").symlink_to(at / "nowhere")
    return outside(location="dangling.bin")


def fifo(at: Path) -> TensorProto:
    os.mkfifo(at / "fifo")
    return outside(location="fifo")


def listening(at: Path) -> TensorProto:
    """A socket: made elsewhere, since its path must be short."""
    with tempfile.TemporaryDirectory() as short, closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(f"{short}/s")
        os.rename(f"{short}/s", at / "socket")
    return outside(location="socket")


def folder(at: Path) -> TensorProto:
    (at / "files").mkdir()
    return outside(location="files")


def twice(at: Path) -> TensorProto:
    tensor = outside(location="w.bin", length=12)
    tensor.external_data.add(key="location", value="../secret.bin")
    return tensor


def plain(**entries):
    return lambda at: outside(**entries)


ATTACKS = {
    "upwards": plain(location="../secret.bin"),
    "upwards from a folder": plain(location="inner/../../secret.bin"),
    "upwards and back": lambda at: outside(location=f"../{at.name}/w.bin"),
    "absolute": lambda at: outside(location=str(secret(at))),
    "device": plain(location="/dev/zero", length=12),
    "link": linked,
    "link within": linked_within,
    "linked folder": linked_folder,
    "linked inner folder": linked_inner_folder,
    "hard link": hard_linked,
    "dangling link": dangling,
    "fifo": fifo,
    "socket": listening,
    "folder": folder,
    "the folder itself": plain(location="."),
    "no location": plain(location=""),
    "the model itself": plain(location="model.onnx", length=12),
    "address": plain(location="*/_ORT_MEM_ADDR_/*", offset=4096, length=12),
    "location twice": twice,
    "NUL": plain(location="w.bin\0", length=12),
    "negative offset": plain(location="w.bin", offset=-4, length=12),
    "offset in words": plain(location="w.bin", offset="four", length=12),
    "offset after the end": plain(location="w.bin", offset=10**15),
    "offset beyond 64 bits": plain(location="w.bin", offset="9" * 5000),
    "negative length": plain(location="w.bin", length=-12),
    "length of other digits": plain(location="w.bin", length="١٢"),
    "length with a sign": plain(location="w.bin", length="+12"),
    "short length": plain(location="w.bin", length=8),
    "long length": plain(location="w.bin", length=13),
    "no length, a longer file": plain(location="w.bin"),
    "length after the end": plain(location="w.bin", offset=8, length=12),
    "negative size": plain(location="w.bin", dims=(-3,), length=12),
    "sizes beyond memory": plain(location="w.bin", dims=(2**40, 2**40), length=12),
    "strings": plain(location="w.bin", kind=TensorProto.STRING, length=12),
    "unknown type": plain(location="w.bin", kind=77, length=12),
    "no type": plain(location="w.bin", kind=0, length=12),
}


def folder_of_a_model(parent: Path) -> Path:
    """A folder for a model, with a data file of 16 bytes. There is a secret beside the folder."""
    made = parent / "models"
    made.mkdir(parents=True)
    (parent / "secret.bin").write_bytes(SECRET)
    (made / "w.bin").write_bytes(bytes(16))
    return made


@pytest.fixture
def at(tmp_path) -> Path:
    return folder_of_a_model(tmp_path)


def write(model: ModelProto, at: Path) -> Path:
    path = at / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def location_of(tensor: TensorProto) -> str:
    return external._shown(tensor.external_data[0].value)


@pytest.mark.parametrize("from_folder", [True, False], ids=["by descriptor", "by path"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_every_attack_at_every_place_is_refused(place, from_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(external, "_FROM_FOLDER", external._FROM_FOLDER and from_folder)
    for name, attack in ATTACKS.items():
        at = folder_of_a_model(tmp_path / name)
        tensor = attack(at)
        path = write(place(tensor), at)
        for weights in (True, False):
            with pytest.raises(InvalidModelError) as caught:
                read(path, weights=weights or name == "address")
            assert "tensor 'w'" in str(caught.value), name
            assert location_of(tensor) in str(caught.value), name
            assert len(str(caught.value)) < 1000


def test_every_field_that_holds_tensors_is_known():
    """A field that a later onnx adds has to be looked at (`tensors_without_initializers`), and gets a place above."""
    found, pending, seen = set(), [ModelProto.DESCRIPTOR], set()
    while pending:
        message = pending.pop()
        for field in message.fields:
            if field.message_type is TensorProto.DESCRIPTOR:
                found.add(field.full_name)
            elif field.message_type is not None and field.message_type not in seen:
                seen.add(field.message_type)
                pending.append(field.message_type)
    assert found == {
        "onnx.GraphProto.initializer",
        "onnx.AttributeProto.t",
        "onnx.AttributeProto.tensors",
        "onnx.SparseTensorProto.values",
        "onnx.SparseTensorProto.indices",
    }


PARTS = (
    "..",
    ".",
    "",
    "inner",
    "w.bin",
    "secret.bin",
    "link.bin",
    "up",
    "hard.bin",
    "models",
    "/",
    "\\",
    "\0",
    "model.onnx",
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The folder of a model with a file, a folder with a file, and links of every kind to the secret."""
    at = folder_of_a_model(tmp_path_factory.mktemp("tree"))
    (at / "w.bin").write_bytes(b"w" * 12)
    (at / "inner").mkdir()
    (at / "inner" / "w.bin").write_bytes(b"inner w.bin!")
    for folder in (at, at / "inner"):
        (folder / "link.bin").symlink_to(secret(at))
        (folder / "up").symlink_to(at.parent)
        os.link(secret(at), folder / "hard.bin")
    return at


@given(st.lists(st.sampled_from(PARTS), max_size=6), st.booleans())
@settings(max_examples=300, deadline=None)
def test_no_location_leads_to_the_secret(tree, parts, is_absolute):
    location = "/".join([str(tree), *parts] if is_absolute else parts)
    tensor = outside(location=location, length=12)
    path = tree / "model.onnx"
    path.touch()
    try:
        with external.ExternalData(path) as data:
            data.load(tensor)
    except InvalidModelError:
        return
    assert not is_absolute
    assert ".." not in parts
    assert tensor.raw_data in (b"w" * 12, b"inner w.bin!")


MODEL_COMMANDS = [command for command in commands() if command.of_role(Files.MODEL)]


@pytest.fixture
def refuses(capsys, monkeypatch):
    """Call a command on a model whose tensor "w" is an attack: exit code 2, its location named, nothing read or written."""
    monkeypatch.setattr(cli, "app", typer.main.get_command(cli.app))  # made once: it is most of the time of a call

    def check(command: Command, model: Path, tensor: TensorProto, variants=((),)) -> None:
        out = model.parent.parent / "out"
        out.mkdir(exist_ok=True)
        before = sorted(path.name for path in model.parent.iterdir())
        given = dict.fromkeys(command.of_role(Files.MODEL), model)
        ends = {"html": "html"}  # a page has to be called so
        written = command.of_role(Files.WRITTEN, Files.WRITTEN_MODEL)
        given |= {name: out / f"{name}.{ends.get(name, 'json')}" for name in written}
        given |= dict.fromkeys(command.of_role(Files.JOURNAL), out / "journal")
        for variant in variants:
            words = command.words(given, variant)
            code, said = cli.main(words), capsys.readouterr()
            assert code == 2, words
            assert "tensor 'w'" in said.err, (words, said.err)
            assert printable(location_of(tensor)) in said.err, (words, said.err)
            assert "hunter2" not in said.out + said.err
            assert list(out.iterdir()) == []
            assert sorted(path.name for path in model.parent.iterdir()) == before

    return check


def test_the_commands_that_read_models_are_found():
    names = {command.name for command in MODEL_COMMANDS}
    assert names > {"grad", "run", "check", "show", "preflight", "conformance run", "recipe fgsm"}
    assert {command.name for command in commands()} - names == {
        "backends",
        "explain",
        "ops",
        "demo",
        "teach",
        "conformance report",
        "conformance export",
        "conformance mutants",
    }


@pytest.mark.parametrize("command", MODEL_COMMANDS, ids=str)
def test_every_command_refuses_every_attack(command: Command, tmp_path, refuses):
    for name, attack in ATTACKS.items():
        if command.name == "show" and name == "address":
            continue  # there is no such file, and show needs none
        at = folder_of_a_model(tmp_path / name)
        tensor = attack(at)
        refuses(command, write(in_initializer(tensor), at), tensor)


@pytest.mark.parametrize("command", MODEL_COMMANDS, ids=str)
def test_every_command_looks_at_every_place(command: Command, at, refuses):
    tensor = outside(location="../secret.bin")
    for place in PLACES:
        refuses(command, write(place(tensor), at), tensor, command.variants)


@pytest.mark.parametrize("suffix", [".json", ".textproto", ".txtpb", ".pb", ".model"])
def test_models_of_every_format_are_looked_at(suffix, at, refuses):
    tensor = outside(location="../secret.bin", length=12)
    onnx.save(in_initializer(tensor), at / f"model{suffix}")
    for command in MODEL_COMMANDS:
        refuses(command, at / f"model{suffix}", tensor, command.variants)


@pytest.mark.parametrize("suffix", [".json", ".textproto"])
def test_every_backend_runs_the_model_that_was_checked(suffix, at, monkeypatch):
    """A file can be one model as text and another one in binary: the one that was checked is handed over."""
    path = at / f"model{suffix}"
    onnx.save(in_initializer(outside(location="w.bin", offset=4, length=12)), path)
    (at / "w.bin").write_bytes(np.float32([0, 1, 2, 3]).tobytes())
    for name in available():
        result = get_backend(name).prepare(path).run({"x": np.ones(3, np.float32)})["y"]
        np.testing.assert_array_equal(result, np.float32([1, 2, 3]))


@pytest.mark.parametrize("name", ["run", "cases"])
def test_a_folder_of_cases_is_looked_at_as_well(name, tmp_path, capsys):
    at = folder_of_a_model(tmp_path / "cases")
    write(in_constant(outside(location="../secret.bin")), at)
    assert cli.main(["conformance", name, "--source", str(at.parent)]) == 2
    assert "'../secret.bin'" in capsys.readouterr().err


def test_external_data_is_read_in_one_module():
    """Nothing else calls what opens files that a model names: onnx's readers do, to_array too."""
    root = Path(__file__).parents[2]
    opens = re.compile(r"\bonnx\.load\(|\bto_array\(|external_data_for_|\bonnx\.load_(model|tensor)\(")
    found = {
        str(file.relative_to(root))
        for top in ("refgrad", "backends", "conformance")
        for file in (root / top).rglob("*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if opens.search(line) and "load_external_data=False" not in line
    }
    assert found == {"refgrad/model/external.py", "conformance/locating/scripts.py"}  # the second is text of programs


# What a model in memory refers to.


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_model_in_memory_has_no_folder(place, at, monkeypatch):
    """Its weights may lie anywhere, since they are not read; what has to be read is refused, in the current folder too."""
    monkeypatch.chdir(at.parent)
    model = place(outside(location="secret.bin", length=12))
    for name in available():
        with pytest.raises(RefgradError, match="external data"):
            get_backend(name).prepare(model)
    with pytest.raises(InvalidModelError, match=r"'w' lie in a file, 'secret\.bin'"):
        get_executor(REFERENCE).prepare(model)
    with pytest.raises(InvalidModelError, match=r"'secret\.bin'"):
        refgrad.conformance.check(model)
    for function in (refgrad.gradient, refgrad.preflight, refgrad.lower, refgrad.to_dot, refgrad.onnx_simple_text_plot):
        with suppress(RefgradError):
            made = function(model)
            assert SECRET not in (made.SerializeToString() if isinstance(made, ModelProto) else repr(made).encode())


def test_the_weights_of_a_model_in_memory_are_read_in_the_current_folder(at, monkeypatch):
    monkeypatch.chdir(at)
    [(value, _)] = refgrad.get_train_initializer(in_initializer(outside(location="w.bin", length=12))).values()
    np.testing.assert_array_equal(value, np.zeros(3, np.float32))
    with pytest.raises(InvalidModelError, match=r"'w' at '\.\./secret\.bin' cannot be used: the path leads upwards"):
        refgrad.get_train_initializer(in_initializer(outside(location="../secret.bin")))


@pytest.mark.parametrize("container", [TensorProto, onnx.SequenceProto, onnx.OptionalProto], ids=lambda c: c.__name__)
def test_the_data_of_a_case_are_in_its_files(container, at, monkeypatch):
    monkeypatch.chdir(at.parent)
    tensor = outside(location="secret.bin", length=12)
    held = tensor
    if container is onnx.SequenceProto:
        held = container(elem_type=onnx.SequenceProto.TENSOR, tensor_values=[tensor])
    elif container is onnx.OptionalProto:
        held = container(elem_type=onnx.OptionalProto.TENSOR, tensor_value=tensor)
    with pytest.raises(FeedError, match=r"'input_0\.pb' is no .*'secret\.bin'"):
        array_in(held, Path("input_0.pb"))


# Tensors that hold their values.


@pytest.mark.filterwarnings("ignore::refgrad.errors.ModelWarning")
@pytest.mark.parametrize("from_file", [True, False], ids=["file", "memory"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_values_that_do_not_fit_their_tensor_are_refused_or_not_read(place, from_file, at):
    for kind, dims, data in [
        (77, [3], 12),
        (0, [3], 12),
        (1, [3], 11),
        (1, [-3], 12),
        (8, [3], 12),
        (1, [2**40, 2**40], 12),
    ]:
        model = place(TensorProto(name="w", data_type=kind, dims=dims, raw_data=bytes(data)))
        source = write(model, at) if from_file else model
        for function in (refgrad.gradient, refgrad.preflight, refgrad.jvp, refgrad.lower, refgrad.to_dot):
            with suppress(RefgradError):
                function(source)
        for name in available():
            with suppress(RefgradError):
                get_backend(name).prepare(source)


# What is as it should be.


@pytest.mark.parametrize("kind", sorted(ELEMENTS), ids=TensorProto.DataType.Name)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_every_type_has_its_size(kind, count, at):
    tensor = helper.make_tensor("w", kind, [count], np.arange(count) % 2)
    data = numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
    (at / "w.bin").write_bytes(b"\1" * 3 + data)
    model = in_constant(outside(kind=kind, dims=[count], location="w.bin", offset=3))
    loaded = read(write(model, at), lift=False).graph.node[0].attribute[0].t
    np.testing.assert_array_equal(numpy_helper.to_array(loaded), numpy_helper.to_array(tensor))


@pytest.mark.parametrize(
    "location", ["w.bin", "./w.bin", "inner//w.bin", "inner/./w.bin", "w in.bin", "..w", "w..", "Ω.bin"]
)
@pytest.mark.parametrize("from_folder", [True, False], ids=["by descriptor", "by path"])
def test_a_file_in_the_folder_is_read(location, from_folder, at, monkeypatch):
    monkeypatch.setattr(external, "_FROM_FOLDER", external._FROM_FOLDER and from_folder)
    (at / "inner").mkdir()
    (at / location).write_bytes(SECRET)
    path = write(in_initializer(outside(location=location)), at)
    link = at.parent / "a link to the folder"
    link.symlink_to(at)
    for model in (path, link / "model.onnx", os.path.relpath(path)):
        loaded = load_model(model)
        assert loaded.graph.initializer[0].raw_data == SECRET
        assert not loaded.graph.initializer[0].external_data


@pytest.mark.skipif(sys.platform == "win32", reason="limits differ")
def test_a_file_for_each_of_many_tensors(at):
    import resource

    for k in range(300):
        (at / f"{k}.bin").write_bytes(SECRET)
    model = in_initializer(whole())
    model.graph.initializer.extend(outside(name=f"w{k}", location=f"{k}.bin") for k in range(300))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        load_model(write(model, at))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def to_link(at: Path) -> None:
    (at / "w.bin").unlink()
    (at / "w.bin").symlink_to(secret(at))


def to_another_file(at: Path) -> None:
    os.replace(secret(at), at / "w.bin")


@pytest.mark.parametrize("swap", [to_link, to_another_file])
def test_a_file_that_is_replaced_between_the_look_and_the_opening(swap, at, monkeypatch):
    seen = external._Place._seen

    def replaced(*arguments):
        found = seen(*arguments)
        swap(at)
        return found

    monkeypatch.setattr(external._Place, "_seen", replaced)
    with pytest.raises(InvalidModelError, match=r"'w\.bin'"):
        load_model(write(in_initializer(outside(location="w.bin", length=12)), at))


def test_a_file_that_is_replaced_after_it_was_checked_is_checked_again_on_saving(at):
    path = write(in_initializer(outside(location="w.bin", length=12)), at)
    made = refgrad.gradient(path)
    to_link(at)
    with pytest.raises(InvalidModelError, match=r"'w\.bin' is a link"):
        files.save_gradient(made, at.parent / "made.onnx", path)
    assert not list(at.parent.glob("made*"))


def test_show_needs_no_data(at, capsys):
    for place in PLACES:
        assert cli.main(["show", str(write(place(outside(location="nowhere.bin")), at))]) == 0, place
