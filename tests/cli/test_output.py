"""The output of commands: quiet, values as JSON, colours and width, and the last words of one that is interrupted."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

from refgrad.cli import main, output, running, walking
from refgrad.show import demo

MODULE = """
from refgrad.backends.numpy import NumpyBackend


class Mine(NumpyBackend):
    name = "mine"
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(demo.regression(), tmp_path / "m.onnx")
    return "m.onnx"


@pytest.mark.parametrize(
    "words",
    [
        "grad m.onnx -o g.onnx",
        "run m.onnx",
        "check m.onnx --outputs loss --backend numpy",
        "preflight m.onnx",
        "show m.onnx",
        "explain Mul",
        "recipe sensitivity m.onnx -o s.onnx --of loss",
        "conformance cases --ops Tanh",
        "training-model m.onnx -o t.onnx --loss none --of loss",
    ],
)
def test_quiet_prints_nothing_and_does_the_same(words, model, capsys):
    code = main(words.split())
    assert capsys.readouterr().out
    assert main([*words.split(), "--quiet"]) == code == 0
    assert capsys.readouterr() == ("", "")


def test_quiet_prints_errors(model, capsys):
    assert main(["run", "none.onnx", "-q"]) == 2
    assert "none.onnx" in capsys.readouterr().err
    assert main(["run", model, "-q", "--json"]) == 2
    assert "exclude each other" in capsys.readouterr().err
    assert main(["run", model]) == 0
    assert capsys.readouterr().out  # quiet is over


def test_run_prints_values_as_json(tmp_path, monkeypatch, capsys):
    text = """<ir_version: 10, opset_import: ["" : 18]> g (float[2,2] x, string[2] s, bfloat16[2] b)
        => (float[2,2] y, string[2] t, bfloat16[2] c, seq(float[2,2]) q, bool[2,2] n)
        { y = Neg(x) t = Identity(s) c = Identity(b) q = SequenceConstruct(x, y) n = IsNaN(x) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    halves = np.array([1, 0.5]).astype(helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16))
    x = np.float32([[1, np.nan], [3, 4]])
    np.savez(tmp_path / "f.npz", x=x, s=np.array(["a", "b"]), b=halves)
    words = ["run", str(tmp_path / "m.onnx"), "--feeds", str(tmp_path / "f.npz"), "--json"]
    assert main(words) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["outputs"]}
    assert rows["y"]["shape"] == [2, 2]
    assert rows["y"]["values"] == [[-1, "nan"], [-3, -4]]
    assert rows["t"]["values"] == ["a", "b"]
    assert rows["c"]["values"] == [1, 0.5]
    assert rows["q"]["values"][0] == [[1, "nan"], [3, 4]]
    assert rows["n"]["values"] == [[False, True], [False, False]]
    monkeypatch.setattr(running, "_ELEMENTS", 3)
    assert main(words) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["outputs"]}
    assert rows["y"]["values"] is None
    assert rows["y"]["left_out"] == "it has more elements than 3: -o FILE.npz writes all"
    assert rows["t"]["values"] == ["a", "b"]


@pytest.mark.parametrize(
    "words", ["run m.onnx", "check m.onnx --outputs loss", "nan m.onnx", "train m.onnx --data d.npz -o t.onnx"]
)
def test_an_executor_is_a_class_too(words, model, tmp_path, capsys):
    (tmp_path / "own_executor.py").write_text(MODULE)
    np.savez("d.npz", x=np.zeros((5, 2), np.float32), label=np.zeros((5, 1), np.float32))
    more = ["--loss", "none", "--of", "loss", "--epochs", "1"] if words.startswith("train") else []
    code = main([*words.split(), *more, "--backend", "own_executor:Mine"])
    said = capsys.readouterr()
    assert code == 0, said.err


def test_a_dialect_that_an_executor_cannot_run_is_asked_for_by_name_alone(model, tmp_path, capsys):
    (tmp_path / "without_kernels.py").write_text(
        """
from refgrad.backends.numpy import NumpyBackend
from refgrad.errors import BackendError


class Mine(NumpyBackend):
    name = "mine"

    def prepare(self, model, **options):
        if any(node.domain for node in model.graph.node):
            raise BackendError("Fatal error: com.microsoft:Grad(-1) is not a registered function/op.")
        return super().prepare(model, **options)
"""
    )
    words = ["check", model, "--outputs", "loss", "--backend", "without_kernels:Mine"]
    assert main(words) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("right: 5 gradients on 1 executor, largest error ")
    assert first.endswith(", within rounding")
    why = "which has no kernel for com.microsoft:Grad"
    assert f"skipped: dialect ort on without_kernels:Mine, {why}" in others
    assert not any("Fatal" in line for line in others)
    assert main([*words, "--dialect", "ort"]) == 0
    said = capsys.readouterr().out
    assert "Fatal error" in said
    assert "not supported" in said
    assert "skipped" not in said
    assert main([*words, "--tolerance", "0.01"]) == 0
    assert ", within the tolerance 0.01\n" in capsys.readouterr().out


@pytest.mark.parametrize(("columns", "expected"), [("60", 60), ("100", 100), ("", 160), ("many", 160)])
def test_a_table_in_a_pipe_is_as_wide_as_columns_says(columns, expected, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert output.stdout().width == expected


@pytest.mark.parametrize(
    ("variable", "value", "coloured"), [("", "", True), ("NO_COLOR", "1", False), ("TERM", "dumb", False)]
)
def test_a_verdict_has_a_colour_where_the_terminal_has(variable, value, coloured, model, monkeypatch, capsys):
    words = ["check", model, "--outputs", "loss", "--backend", "numpy"]
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(words) == 0
    assert "\x1b" not in capsys.readouterr().out  # a pipe
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    if variable:
        monkeypatch.setenv(variable, value)
    assert main(words) == 0
    assert ("\x1b[32mright\x1b[0m: " in capsys.readouterr().out) is coloured


def test_an_interrupted_command_says_what_it_wrote(model, tmp_path, monkeypatch, capsys):
    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr("refgrad.gradient", interrupted)
    assert main(["grad", model, "-o", "g.onnx"]) == 130
    assert capsys.readouterr().err == "refgrad: Interrupted. Nothing was written.\n"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("refgrad.cli.running.print_table", interrupted)
    assert main(["run", model, "-o", "r.npz"]) == 130
    assert capsys.readouterr().err == "refgrad: Interrupted. r.npz was written.\n"


def test_an_interrupted_walk_says_how_many_pages_it_wrote(model, monkeypatch, capsys):
    def interrupted(path, text):
        if path.name == "p_02.html":
            raise KeyboardInterrupt
        path.write_text(text)

    monkeypatch.setattr(walking, "_write", interrupted)
    words = ["walk", model, "--of", "loss", "--seed", "1:3", "--no-differences", "-o", "p.html"]
    assert main(words) == 130
    assert capsys.readouterr().err == "refgrad: Interrupted. 1 of 3 pages were written.\n"
