"""`refgrad show`."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.parser
import pytest
from listings import BRANCHES, parse
from onnx import numpy_helper

import refgrad
from refgrad.cli import main


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(BRANCHES, path)
    return path


@pytest.mark.parametrize(
    ("options", "function"),
    [
        ([], refgrad.onnx_simple_text_plot),
        (["--text"], refgrad.onnx_simple_text_plot),
        (["--dot"], refgrad.to_dot),
        (["--svg"], refgrad.to_svg),
    ],
)
def test_show(options, function, saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")  # what a pipe gets is as long as it is
    assert main(["show", str(saved), *options]) == 0
    assert capsys.readouterr().out == function(BRANCHES) + "\n"
    written = tmp_path / "shown"
    assert main(["show", str(saved), *options, "-o", str(written)]) == 0
    assert capsys.readouterr().out == ""
    assert written.read_text(encoding="utf-8") == function(BRANCHES) + "\n"
    assert main(["show", str(saved), *options, "--json"]) == 0
    kind = options[0].strip("-") if options else "text"
    assert json.loads(capsys.readouterr().out) == {"format": kind, "shown": function(BRANCHES)}


def test_show_needs_no_weights_and_does_not_overwrite_them(tmp_path, capsys):
    model, path, data = parse("y = Add(x, w)"), tmp_path / "model.onnx", tmp_path / "w.bin"
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "w"))
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    before = data.read_bytes()
    assert main(["show", str(path), "-o", str(data)]) == 2
    assert "holds the weights of the model. Write to another file." in capsys.readouterr().err
    assert data.read_bytes() == before
    data.unlink()
    assert main(["show", str(path)]) == 0
    assert "init: name='w' type=dtype('float32') shape=(3,)\n" in capsys.readouterr().out


def test_show_reads_the_gradient_of_dialect_ort(tmp_path, capsys):
    """onnx.checker refuses it: MaxPoolGrad is in the domain of ai.onnx."""
    model = parse("y = MaxPool<kernel_shape = [2]>(x)", "float[1, 1, 4] x", "float[1, 1, 3] y")
    onnx.save(refgrad.gradient(model, dialect="ort"), tmp_path / "gradient.onnx")
    assert main(["show", str(tmp_path / "gradient.onnx")]) == 0
    assert "MaxPoolGrad(" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dot", "--svg"], "--text, --dot, --svg and --cost exclude each other: give one."),
        (["--text", "--dot"], "--text, --dot, --svg and --cost exclude each other: give one."),
        (["-o", "nowhere/shown"], "There is no folder"),
        (["-o", "model.onnx"], "'model.onnx' is the model itself. Write to another file."),
        (["-o", "."], "'.' exists and is no regular file."),
    ],
    ids=" ".join,
)
def test_show_says_what_is_wrong_and_writes_nothing(options, message, saved, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    before = saved.read_bytes()
    output = ["-o", "shown"] if "-o" not in options else []
    assert main(["show", "model.onnx", *options, *output]) == 2
    assert capsys.readouterr().err.startswith(f"refgrad: {message}")
    assert list(tmp_path.iterdir()) == [saved]
    assert saved.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "There is no file"), (b"\x08", "is not an ONNX model"), (b"", "holds no graph")],
    ids=["missing", "truncated", "empty"],
)
def test_show_refuses_what_is_no_model(content, message, tmp_path, capsys):
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    assert main(["show", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_show_has_no_other_options(saved, capsys):
    assert main(["show", str(saved), "--png"]) == 2
    assert "--png" in capsys.readouterr().err
