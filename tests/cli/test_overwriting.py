"""No command writes over a file that it reads, whatever the file is called; files count, not names."""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx
import pytest
import typer
from commands import OF_CASES, Command, commands
from onnx import TensorProto, helper, numpy_helper

import refgrad
from refgrad import cli
from refgrad.cli.output import App, Files
from refgrad.errors import OutputFileError
from refgrad.model import writing as files

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

WRITTEN = (Files.WRITTEN, Files.WRITTEN_MODEL, Files.JOURNAL, Files.NEW_FOLDER)
SUFFIXES = {
    "answers": ".py",
    "data": ".npz",
    "feeds": ".npz",
    "limitations": ".toml",
    "models": ".onnx",
    "results": ".json",
    "validation": ".npz",
}


def write_model(folder: Path) -> Path:
    """A model in `folder` whose weights lie in weights.bin."""
    folder.mkdir()
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"])],
        "g",
        [value("x", TensorProto.FLOAT, [3])],
        [value("y", TensorProto.FLOAT, [3])],
        [numpy_helper.from_array(np.ones(3, np.float32), "w")],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A folder with one of every input: nothing in it may change."""
    folder = tmp_path_factory.mktemp("inputs")
    model = write_model(folder / "models")
    for name in ("feeds.npz", "validation.npz", "data.npz"):
        np.savez(folder / name, x=np.ones(3, np.float32))
    (folder / "models.onnx").write_bytes(model.read_bytes())
    (folder / "limitations.toml").write_text("")
    (folder / "answers.py").write_text("")
    data = folder / "cases" / "mine" / "test_data_set_0"
    data.mkdir(parents=True)
    (data / "input_0.pb").write_bytes(numpy_helper.from_array(np.ones(3, np.float32), "x").SerializeToString())
    (data / "output_0.pb").write_bytes(numpy_helper.from_array(np.ones(3, np.float32), "y").SerializeToString())
    for name in ("model.onnx", "weights.bin"):
        (data.parent / name).write_bytes((model.parent / name).read_bytes())
    results = {"settings": {"sources": [str(model)], "feeds": str(folder / "feeds.npz")}}
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "plugin_of_mine.py").write_text("")
    return folder


@pytest.fixture
def run(prepared, monkeypatch):
    """Run a command in the folder of the inputs."""
    monkeypatch.chdir(prepared)
    monkeypatch.syspath_prepend(prepared)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # that of the module would lie among the inputs
    monkeypatch.setattr(cli, "app", typer.main.get_command(cli.app))  # made once: it is most of the time of a call
    return cli.main


def hashes(folder: Path) -> Mapping[str, str]:
    """The content of every file under `folder`."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def inputs_of(command: Command, folder: Path) -> dict[str, Path]:
    """The inputs of a command by parameter."""
    given = {name: folder / f"{name}{SUFFIXES[name]}" for name in command.of_role(Files.READ)}
    return given | dict.fromkeys(command.of_role(Files.MODEL), folder / "models" / "model.onnx")


def read_with(command: Command, given: Mapping[str, Path], folder: Path) -> set[Path]:
    """Every file that is read."""
    found = set(given.values())
    if command.of_role(Files.MODEL):
        found.add(folder / "models" / "weights.bin")
    return found | {folder / "plugin_of_mine.py"}


def spellings(path: Path, role: Files, folder: Path, at: Path) -> list[Path]:
    """What an output can be called so that it is the file at `path`; links are made in the folder `at`."""
    at.mkdir()
    (at / "link.json").symlink_to(path)
    os.link(path, at / "hard.json")
    (at / "folder").symlink_to(path.parent)
    roundabout = path.parent / ".." / path.parent.name / path.name
    links = [at / "link.json", at / "hard.json", at / "folder" / path.name]
    found = [path, Path(os.path.relpath(path, folder)), roundabout, *links]
    upper = path.with_name(path.name.upper())
    if upper.exists():  # the file system does not tell capital letters
        found.append(upper)
    if role is Files.WRITTEN_MODEL:
        (at / "made.onnx.data").symlink_to(path)
        found.append(at / "made.onnx")
    return found


def others(command: Command, output: str, folder: Path) -> dict[str, Path]:
    """Files for what a command writes besides `output`."""
    return {
        name: folder / f"other.{name}" for name in command.of_role(Files.WRITTEN, Files.WRITTEN_MODEL) if name != output
    }


WRITING = [command for command in commands() if command.of_role(*WRITTEN)]


@pytest.mark.parametrize("command", WRITING, ids=str)
def test_no_output_of_a_command_is_one_of_its_inputs(command: Command, prepared, run, tmp_path, capsys):
    before = hashes(prepared)
    given = inputs_of(command, prepared)
    count = 0
    for output in command.of_role(*WRITTEN):
        for path in read_with(command, given, prepared):
            for spelling in spellings(path, command.roles[output], prepared, tmp_path / str(count)):
                files = {**given, **others(command, output, tmp_path), output: spelling}
                words = [*command.words(files), "--import", "plugin_of_mine"]
                assert run(words) == 2, words
                said = capsys.readouterr().err
                assert "Write to another file" in said or command.roles[output] is Files.NEW_FOLDER, words
                assert str(spelling) in said
            count += 1
    assert hashes(prepared) == before
    assert count >= 1
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("command", [c for c in WRITING if c.of_role(Files.MODEL)], ids=str)
def test_what_the_folder_of_a_case_holds_is_an_input(command: Command, prepared, run, tmp_path, capsys):
    before = hashes(prepared)
    cases = dict.fromkeys(command.of_role(Files.MODEL), prepared / "cases")
    for output in command.of_role(*WRITTEN):
        for path in (p for p in (prepared / "cases").rglob("*") if p.is_file()):
            assert run(command.words({**cases, **others(command, output, tmp_path), output: path})) == 2
            assert "which is read. Write to another file" in capsys.readouterr().err
    assert hashes(prepared) == before


@pytest.mark.parametrize("command", WRITING, ids=str)
def test_two_outputs_of_a_command_are_two_files(command: Command, prepared, run, tmp_path, capsys):
    given = inputs_of(command, prepared)
    outputs = command.of_role(*WRITTEN)
    here, link = tmp_path / "o.json", tmp_path / "folder"
    link.symlink_to(tmp_path)
    for name in outputs[1:]:
        for other in (here, link / "o.json", tmp_path / "O.json"):  # the last is another file on some systems
            assert run(command.words({**given, outputs[0]: here, name: other})) == 2
            assert "would be written twice" in capsys.readouterr().err
            assert not here.exists()
        here.write_text("old")
        assert run(command.words({**given, outputs[0]: here, name: link / "o.json"})) == 2
        assert "would be written twice" in capsys.readouterr().err
        assert here.read_text() == "old"
        here.unlink()


def test_the_commands_that_write_are_found():
    names = {command.name for command in WRITING}
    assert names > {
        "grad",
        "run",
        "show",
        "conformance run",
        "conformance report",
        "conformance mutants",
        "recipe fgsm",
    }
    others = {command.name for command in commands()} - names
    assert others == {"backends", "explain", "ops", "demo", "nan", "preflight", "weights", "conformance cases"}


def test_a_folder_of_training_data_is_an_input(prepared, run, tmp_path, capsys):
    (tmp_path / "shards").mkdir()
    shard = tmp_path / "shards" / "0.npz"
    np.savez(shard, x=np.ones(3, np.float32))
    before = shard.read_bytes()
    for option in ("-o", "--checkpoint"):
        words = ["train", "models/model.onnx", "--data", str(shard.parent), "-o", str(tmp_path / "t.onnx")]
        assert run([*words, option, str(shard)]) == 2
        assert "which is read. Write to another file" in capsys.readouterr().err
    assert shard.read_bytes() == before


def test_one_output_twice(prepared, run, capsys):
    assert run(["conformance", "run", "--ops", "Neg", "-o", "r.json", "-o", "./r.json"]) == 2
    assert "would be written twice" in capsys.readouterr().err
    assert run(["conformance", "run", "--ops", "Neg", "-o", "r.json", "--journal", "r.json"]) == 2
    assert "would be written twice" in capsys.readouterr().err
    (prepared / "journal").symlink_to("r.json")
    assert run(["conformance", "run", "--ops", "Neg", "-o", "r.json", "--journal", "journal"]) == 2
    assert "would be written twice" in capsys.readouterr().err
    assert not (prepared / "r.json").exists()
    (prepared / "journal").unlink()


@pytest.mark.parametrize("name", ["models/model.onnx", "models/weights.bin", "feeds.npz"])
def test_a_page_does_not_replace_what_its_results_are_about(name, prepared, run, tmp_path, capsys):
    found = refgrad.conformance.Results(
        {"sources": [str(prepared / "models" / "model.onnx")], "feeds": "feeds.npz"}, {}, {}
    )
    found.save(tmp_path / "r.json")
    (tmp_path / "page.html").symlink_to(prepared / name)
    assert run(["conformance", "report", str(tmp_path / "r.json"), "-o", str(tmp_path / "page.html")]) == 2
    assert "Write to another file" in capsys.readouterr().err


def test_a_parameter_that_is_a_path_says_what_is_done_with_it():
    def command(kept: Annotated[list[Path] | None, typer.Option()] = None) -> None: ...

    with pytest.raises(TypeError, match=r"Parameter 'kept' of .* is a path: annotate it with 'READ', 'MODEL'"):
        App().command()(command)


def test_every_option_that_speaks_of_files_says_what_is_done_with_them():
    """A str may name a file as well, as --source does."""
    built = typer.main.get_command(cli.app)
    pending, found = [("", built)], set()
    named = {command.name: {*command.roles, OF_CASES.get(command.name)} for command in commands()}
    while pending:
        prefix, group = pending.pop()
        for name, one in group.commands.items():
            if hasattr(one, "commands"):
                pending.append((f"{name} ", one))
                continue
            for parameter in one.params:
                said = getattr(parameter, "help", None) or ""
                if "file" in said.lower() and parameter.name not in named[f"{prefix}{name}"]:
                    found.add(parameter.name)
    assert not found


# The functions that save.


def test_functions_that_save_do_not_replace_what_they_read(tmp_path):
    path = write_model(tmp_path / "models")
    before = hashes(path.parent)
    linked = tmp_path / "linked.onnx"
    linked.symlink_to(path)
    options = refgrad.DerivativeOptions.Loss
    for target in (path, linked, path.with_name("weights.bin")):
        with pytest.raises(OutputFileError, match="Write to another file"):
            files.save_gradient(refgrad.gradient(path), target, path)
        with pytest.raises(OutputFileError, match="Write to another file"):
            refgrad.onnx_derivative(path, options=options, loss="y", label="x", path_name=target)
    assert hashes(path.parent) == before


def test_a_folder_that_leads_to_itself_ends(tmp_path):
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "a").write_text("")
    assert sorted(path.name for path in files._files_within(tmp_path)) == ["a"]


def test_the_data_file_of_a_result_that_is_not_replaced_stays(tmp_path, monkeypatch):
    """The data file is renamed first: if the model cannot be, the old one would read the new data."""
    (tmp_path / "in").mkdir()
    weights = np.arange(4096, dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4096])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4096])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    source, target = tmp_path / "in" / "m.onnx", tmp_path / "g.onnx"
    onnx.save(model, source, save_as_external_data=True, location="m.data", size_threshold=0)
    (tmp_path / "g.onnx.data").write_bytes(b"before")
    target.write_bytes(b"model")
    replace = os.replace

    def refuse(old, new):
        if Path(new) == target:
            raise OSError(1, "Operation not permitted")
        replace(old, new)

    monkeypatch.setattr(files.os, "replace", refuse)
    with pytest.raises(OutputFileError, match="cannot be written"):
        files.save_gradient(refgrad.gradient(source), target, source)
    assert (target.read_bytes(), (tmp_path / "g.onnx.data").read_bytes()) == (b"model", b"before")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.onnx", "g.onnx.data", "in"]


def test_without_links_a_failure_removes_no_data_file(tmp_path, monkeypatch):
    """Some file systems have no hard links: what was there before is not taken for what was made."""
    data = tmp_path / "g.onnx.data"
    data.write_bytes(b"before")

    def refuse(*names):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files.os, "link", refuse)
    with pytest.raises(ValueError, match="failed"), files._kept_unless_both(data):
        raise ValueError("failed")
    assert data.read_bytes() == b"before"
