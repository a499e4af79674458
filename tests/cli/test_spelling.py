"""A message names the option of the command in a shell, and the parameter of the function in Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import onnx
import onnx.parser
import pytest

import refgrad
from refgrad.cli import main
from refgrad.cli.spelling import in_the_shell
from refgrad.errors import OptionError

ROOT = Path(refgrad.__file__).parents[1]
FLAGS = {"wrt": "--wrt", "of": "--of", "strong_zero": "--strong-zero", "max_memory": "--max-memory", "dim": "--dim"}
TWO = (
    """<ir_version: 10, opset_import: ["" : 18]> g (float[3] x) => (float[3] y, float[3] z) { y = Exp(x) z = Sin(x) }"""
)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Give wrt=['x', 'w'].", "Give --wrt x,w."),
        ("Give of='y[0, 1]'.", "Give --of 'y[0, 1]'."),
        ("Leave out strong_zero=True.", "Leave out --strong-zero."),
        ("Give max_memory more.", "Give --max-memory more."),
        ("Give sizes={'N': 32}.", "Give --dim N=32."),
        ("Give sizes={'*': 32}.", "Give --dim 32."),
        ("Give sizes={...}.", "Give --dim N=8."),
        ("the model's name is 'wrt=1' of='a'", "the model's name is 'wrt=1' --of a"),
        ("a node 'of=\"b\"' has max_memory_of", "a node 'of=\"b\"' has max_memory_of"),
        ("other=1 and x.wrt=2 stay", "other=1 and x.wrt=2 stay"),
        ("'w' in wrt is no float.", "'w' in --wrt is no float."),
        ("wrt is empty.", "--wrt is empty."),
        ("the sum in wrt and of it", "the sum in wrt and of it"),
        ("Give dim=None.", "Give --dim none."),
    ],
)
def test_parameters_become_options(message, expected):
    assert in_the_shell(message, FLAGS) == expected


def test_the_same_refusal_in_both(tmp_path, capsys):
    model = onnx.parser.parse_model(TWO)
    with pytest.raises(OptionError, match=r"Choose one: output='y'\.$"):
        refgrad.hvp(model)
    path = tmp_path / "two.onnx"
    onnx.save(model, path)
    assert main(["hvp", str(path), "-o", str(tmp_path / "h.onnx")]) == 2
    assert capsys.readouterr().err.endswith("Choose one: --of y.\n")
    with pytest.raises(OptionError, match=r"strong_zero=True .*dialect='onnx'"):
        refgrad.gradient(model, dialect="ort", strong_zero=True)
    assert main(["grad", str(path), "-o", str(tmp_path / "g.onnx"), "--dialect", "ort", "--strong-zero"]) == 2
    said = capsys.readouterr().err
    assert "--dialect onnx" in said
    assert "=" not in said


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("use refgrad.select_model_inputs_outputs.", "use refgrad cut."),
        (
            "refgrad.select_model_inputs_outputs(model, None, ['a b', \"c'd\"], keep_inputs=True) makes",
            "refgrad cut MODEL --inputs 'a b,c'\"'\"'d' -o PART.onnx makes",
        ),
        (
            "'refgrad.select_model_inputs_outputs(model, [a b])' is",
            "'refgrad.select_model_inputs_outputs(model, [a b])' is",
        ),
        (
            "'refgrad.select_model_inputs_outputs(model, [f()])' is",
            "'refgrad.select_model_inputs_outputs(model, [f()])' is",
        ),
    ],
)
def test_a_selection_is_the_command_cut_except_in_a_name(message, expected):
    assert in_the_shell(message, {}) == expected


OWN = ("refgrad/cli/", "refgrad/teaching/", "conformance/tools/", "conformance/reports/", "refgrad/tables/plugins.py")


def test_no_error_of_the_library_names_an_option_of_a_command():
    found = []
    for folder in ("refgrad", "backends", "conformance"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if (
                path.is_symlink()
                or name.startswith(OWN)
                or "refgrad/conformance/" in name
                or "refgrad/backends/" in name
            ):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Raise):
                    texts = [
                        n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                    ]
                    found += [f"{name}: {text}" for text in texts if re.search(r"(?<![\w-])--[a-z]", text)]
    assert found == []
