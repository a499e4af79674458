"""The help of every command: it fits in a terminal, shows what an option takes, and one style of defaults."""

from __future__ import annotations

import re

import pytest
import typer

from refgrad.cli import app, main
from refgrad.cli.commands import OLD, choices_in
from refgrad.tables.dialects import DIALECTS

ROOT = typer.main.get_command(app)


def commands(command=ROOT, path=()):
    """Every command with its words, sub-commands included."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


EVERY = dict(commands())


@pytest.fixture
def help_of(capsys, monkeypatch):
    """The lines of a command's help in a terminal of 80 columns."""

    def read(*path):
        monkeypatch.setenv("COLUMNS", "80")
        assert main([*path, "--help"]) == 0
        return capsys.readouterr().out.splitlines()

    return read


@pytest.mark.parametrize("path", EVERY, ids=lambda path: " ".join(path) or "refgrad")
def test_help_fits_in_80_columns_and_is_not_cut(path, help_of):
    lines = help_of(*path)
    assert [line for line in lines if len(line) > 80] == []
    usage = [line for line in lines if line.startswith("Usage: ")]
    assert [line for line in lines if ("..." in line or "…" in line) and line not in usage] == []


@pytest.mark.parametrize("path", EVERY, ids=lambda path: " ".join(path) or "refgrad")
def test_help_shows_what_is_taken_and_the_default(path, help_of):
    text = "\n".join(help_of(*path))
    assert not re.search(r"<(str|int|float|path|bool|file|list\b.*)>", text)
    assert "Default:" not in text
    assert "default: (" not in text
    assert not any(flag in text for flag in OLD)


@pytest.mark.parametrize("path", [path for path in EVERY if path], ids=" ".join)
def test_a_summary_is_one_line(path, help_of):
    *group, name = path
    [line] = [line for line in help_of(*group) if re.match(rf"  {name}\s", line)]
    summary = line.split(maxsplit=1)[1]
    assert summary[0].isupper()
    assert summary[-1] != "."
    following = help_of(*group)[help_of(*group).index(line) + 1]
    assert following == "" or following[2] != " "


def test_the_doors_come_first(help_of):
    headings = [line for line in help_of() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [
        "Debug a gradient:",
        "Test a runtime:",
        "Teach:",
        "Train and explain:",
        "Derivatives:",
        "Options:",
    ]


def test_every_command_has_the_options_of_output():
    for path, command in EVERY.items():
        flags = {flag for param in command.params for flag in param.opts}
        if not getattr(command, "commands", {}):
            assert {"--quiet", "-q", "--json"} <= flags, path
            assert ("--output" in flags) == ("-o" in flags), path
            assert ("--verbose" in flags) == ("-v" in flags), path


@pytest.mark.parametrize(
    ("path", "option", "some"),
    [
        (("grad",), "dialect", {"onnx", "ort"}),
        (("grad",), "cotangent", {"input", "ones", "yield"}),
        (("grad",), "weights", {"constants", "overridable"}),
        (("grad",), "kinks", {"refgrad", "torch", "onnxruntime"}),
        (("grad",), "quantization", {"straight-through"}),
        (("compare",), "cotangent", {"ones", "random"}),
        (("run",), "backend", {"numpy", "ort-cpu", "onnx.reference"}),
        (("run",), "precision", {"float64"}),
        (("show",), "runtime", {"numpy", "onnxruntime"}),
        (("train",), "optimizer", {"sgd", "adamw"}),
        (("train",), "loss", {"cross_entropy", "none"}),
        (("train",), "schedule", {"cosine"}),
        (("train",), "batch_norm", {"frozen"}),
        (("recipe", "fgsm"), "score", {"cross_entropy"}),
        (("conformance", "run"), "oracle", {"differences", "adjoint"}),
        (("conformance", "run"), "builder", {"onnx-ad"}),
        (("conformance", "cases"), "values", {"kink"}),
        (("conformance", "cases"), "dtype", {"bfloat16"}),
    ],
)
def test_choices_are_shown(path, option, some, help_of):
    [param] = [param for param in EVERY[path].params if param.name == option]
    assert some <= set(choices_in(param))
    text = " ".join(" ".join(help_of(*path)).replace("-  ", "- ").split())
    shown = text[text.index(f"--{option.replace('_', '-')} ") :]
    for name in choices_in(param):
        assert name in shown.replace("- ", "-")


def test_a_choice_that_does_not_exist_is_refused_by_the_name_of_the_option(capsys):
    assert main(["grad", "m.onnx", "-o", "g.onnx", "--kinks", "torhc"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "refgrad: --kinks 'torhc' is not known. Did you mean 'torch'? There are 'refgrad', 'torch', 'onnxruntime'.\n"
    )
    assert main(["conformance", "cases", "--values", "smooth,kinky"]) == 2
    assert capsys.readouterr().err.startswith("refgrad: --values 'kinky' is not known.")


def test_a_dialect_of_a_plug_in_is_a_choice(help_of, monkeypatch):
    monkeypatch.setitem(DIALECTS, "mine", DIALECTS["onnx"])
    assert any("--dialect <onnx|ort|mine>" in line for line in help_of("grad"))


def test_old_names_of_options_are_read(tmp_path, capsys):
    assert main(["check", str(tmp_path / "none.onnx"), "--backends", "numpy"]) == 2
    assert "none.onnx" in capsys.readouterr().err
    words = ["grad", str(tmp_path / "none.onnx"), "-o", str(tmp_path / "g.onnx"), "--recompute-within", "2 GiB"]
    assert main(words) == 2
    assert "none.onnx" in capsys.readouterr().err
