"""Malformed models, as a fuzzer makes them: a RefgradError or a valid result, and no name reaches the terminal as it is."""

import ast
from pathlib import Path

import onnx
import onnx.parser
import pytest

from refgrad.cli import main
from refgrad.cli.output import say
from refgrad.conformance.fuzzing.journey import STEPS, journey
from refgrad.conformance.fuzzing.mutations import mutant
from refgrad.errors import InvalidModelError
from refgrad.protos.malformed import explained

ROOT = Path(__file__).parent.parent
NAMES = ("\x1b]0;title\x07", "a\0b", "a\u202eb", "a\nb", "a\rb", "\x9b31m", "<b>&\"'")
UNPRINTABLE = ("\x1b", "\0", "\u202e", "\r", "\x9b", "\x07")


def small() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> small (float[2, 3] input) => (float[2, 3] result) '
        "{ middle = Softmax <axis = 1> (input) result = Mul(middle, input) }"
    )


def not_utf8(what: bytes) -> bytes:
    return small().SerializeToString().replace(what, b"\xff" * len(what))


def of_reference() -> bytes:
    model = small()
    model.graph.node[0].attribute[0].ref_attr_name = "axis"
    return model.SerializeToString()


def of_sparse(dims: list[int], index: int) -> bytes:
    model = small()
    values = onnx.helper.make_tensor("s", onnx.TensorProto.FLOAT, [1], [1.0])
    indices = onnx.helper.make_tensor("i", onnx.TensorProto.INT64, [1], [index])
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, dims))
    return model.SerializeToString()


def of_element_type() -> bytes:
    model = small()
    model.graph.input[0].type.tensor_type.elem_type = -1
    return model.SerializeToString()


PAST = {
    **{
        f"{what.decode()} is not UTF-8": not_utf8(what)
        for what in (b"input", b"middle", b"result", b"Softmax", b"axis")
    },
    "a reference attribute outside of functions": of_reference(),
    "a sparse index outside": of_sparse([3], 2**31),
    "a sparse tensor of 8 GiB": of_sparse([2**31], 0),
    "sparse dims that overflow": of_sparse([2**62, 2], 0),
    "an element type below 0": of_element_type(),
}


@pytest.mark.parametrize("name", PAST)
def test_what_once_raised_is_refused(name):
    assert journey(PAST[name])[1] == []


def test_a_text_that_is_not_utf8_is_named():
    model = onnx.ModelProto.FromString(not_utf8(b"middle"))
    with pytest.raises(InvalidModelError, match="not UTF-8"):
        STEPS["gradient"](model)


def test_a_bug_of_refgrad_stays_one():
    @explained
    def broken(model):
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        broken(small())


def test_a_mutant_depends_on_its_seed_alone():
    base = small().SerializeToString()
    made = [mutant(seed, base) for seed in range(100)]
    assert made == [mutant(seed, base) for seed in range(100)]
    assert len(set(made)) > 50


@pytest.mark.parametrize("seed", range(40))
def test_mutants_of_a_small_model(seed):
    assert journey(mutant(seed, small().SerializeToString()))[1] == []


COMMANDS = (
    ("grad", "MODEL", "-o", "OUT"),
    ("grad", "MODEL", "-o", "OUT", "--json"),
    ("grad", "MODEL", "-o", "OUT", "--wrt", "\x1b[31m\u202e"),
    ("lower", "MODEL", "-o", "OUT"),
    ("expand", "MODEL", "-o", "OUT"),
    ("jvp", "MODEL", "-o", "OUT"),
    ("hvp", "MODEL", "-o", "OUT"),
    ("preflight", "MODEL"),
    ("preflight", "MODEL", "--json"),
    ("show", "MODEL"),
    ("show", "MODEL", "--dot"),
    ("run", "MODEL", "--random"),
    ("check", "MODEL"),
    ("explain", "\x1b]0;\u202e"),
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(map(ascii, words)))
def test_no_command_prints_a_control_character(words, tmp_path, capsys):
    model = small()
    nodes = [model.graph.input[0], model.graph.output[0], *model.graph.node]
    names = dict(zip(("input", "result", "middle"), NAMES, strict=False))
    for value in nodes:
        value.name = names.get(value.name, NAMES[5])
    for node in model.graph.node:
        for part in (node.input, node.output):
            part[:] = [names.get(name, name) for name in part]
    onnx.save(model, tmp_path / "m.onnx")
    files = {"MODEL": str(tmp_path / "m.onnx"), "OUT": str(tmp_path / "out.onnx")}
    main([files.get(word, word) for word in words])
    printed = capsys.readouterr()
    for letter in UNPRINTABLE:
        assert letter not in printed.out + printed.err


def test_a_line_keeps_its_breaks_and_nothing_else_that_a_terminal_obeys(capsys):
    say("a\n  b", "\x1b[2J\u202e")
    assert capsys.readouterr().out == "a\n  b \ufffd[2J\ufffd\n"


def test_commands_print_in_one_place():
    found = {
        file.name
        for file in (ROOT / "refgrad" / "cli").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    }
    assert found == {"output.py"}
