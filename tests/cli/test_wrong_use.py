"""Wrong files, names, options and outputs: one message on stderr, exit code 2, and nothing is overwritten."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

import refgrad
from refgrad.backends import get_backend
from refgrad.cli import main
from refgrad.errors import OutputFileError, RefgradError
from refgrad.model.writing import new_folder
from refgrad.show import demo

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

WRITING = [
    ["grad"],
    ["jvp"],
    ["jacobian"],
    ["hvp", "--of", "loss"],
    ["hessian", "--of", "loss"],
    ["lower"],
    ["expand"],
    ["cut"],
    ["recipe", "saliency", "--of", "loss", "--wrt", "x"],
    ["recipe", "integrated-gradients", "--of", "loss", "--wrt", "x"],
    ["recipe", "fgsm", "--of", "loss", "--wrt", "x"],
    ["recipe", "forces", "--of", "loss", "--wrt", "x"],
    ["recipe", "sensitivity", "--of", "loss"],
    ["run"],
    ["show"],
]
READING = [*WRITING, ["check"], ["preflight"]]


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(demo.regression(), tmp_path / "m.onnx")
    np.savez(tmp_path / "feeds.npz", **demo.feeds())
    return tmp_path / "m.onnx"


@pytest.fixture
def refused(capsys):
    """Run a command that has to be refused; what it says."""

    def run(*words):
        assert main([str(word) for word in words]) == 2
        said = capsys.readouterr().err
        assert said.startswith(("refgrad: ", "Usage: "))
        assert "unexpected" not in said
        assert "Traceback" not in said
        return said

    return run


def command(words, model, *more):
    """The words of a command with `model` as its argument."""
    place = 2 if words[0] == "recipe" else 1
    return [*words[:place], model, *words[place:], *more]


@pytest.mark.parametrize("words", READING, ids=" ".join)
@pytest.mark.parametrize("path", ["nowhere.onnx", ".", "feeds.npz", "empty.onnx", "m.onnx/inside", "n" * 5000])
def test_a_model_that_cannot_be_read(words, path, model, refused):
    (model.parent / "empty.onnx").write_bytes(b"")
    refused(*command(words, path, *["-o", "made"] * (words in WRITING)))
    assert not (model.parent / "made").exists()


@pytest.mark.parametrize("words", WRITING, ids=" ".join)
@pytest.mark.parametrize("path", ["nowhere/made", ".", "m.onnx", "/dev/full", "n" * 300])
def test_an_output_that_cannot_be_written(words, path, model, refused):
    before, files = model.read_bytes(), sorted(model.parent.iterdir())
    refused(*command(words, "m.onnx", "-o", path))
    assert model.read_bytes() == before
    assert sorted(model.parent.iterdir()) == files


def test_the_feeds_of_a_run_are_not_replaced(model, refused):
    before = model.with_name("feeds.npz").read_bytes()
    assert "Write to another file" in refused("run", "m.onnx", "--feeds", "feeds.npz", "-o", "feeds.npz")
    assert model.with_name("feeds.npz").read_bytes() == before


def test_the_suite_replaces_nothing_that_it_reads(model, refused):
    results = model.with_name("r.json")
    assert main(["conformance", "run", "--ops", "Neg", "--every", "99", "--workers", "1", "-o", "r.json"]) == 0
    before = results.read_bytes()
    assert "Write to another file" in refused("conformance", "report", "r.json", "-o", "r.json")
    assert results.read_bytes() == before


@pytest.mark.parametrize("path", ["nowhere/r.json", f"{'n' * 300}.json"])
def test_a_report_that_cannot_be_written_is_refused_before_the_suite_runs(path, model, refused, monkeypatch):
    monkeypatch.setattr("refgrad.cli.conformance.run_suite", pytest.fail)
    refused("conformance", "run", "--ops", "Neg", "--workers", "1", "-o", path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "m.onnx", "--dim", "99999999999999999"], "too large to be drawn"),
        (["check", "m.onnx", "--dim", "9999999999999999"], "Choose smaller sizes: --dim N=8"),
        (["run", "m.onnx", "--dim", "9" * 5000], "give a size"),
        (["run", "m.onnx", "--max-memory", "9" * 5000], "is not a size"),
        (["grad", "m.onnx", "-o", "g", "--of", "y[99999999999999999999]"], "larger than any index"),
        (["grad", "m.onnx", "-o", "g", "--of", f"y[0:{'9' * 5000}]"], "larger than any index"),
        (
            ["recipe", "saliency", "m.onnx", "-o", "g"],
            "Choose an output: --of loss. The float outputs are: 'loss', 'y'.",
        ),
        (["conformance", "mutants", "--ops", "Neg", "-o", "nowhere/m.json"], "no folder 'nowhere'"),
        (["conformance", "run", "--ops", "Cnov"], "and "),
        (["conformance", "run", "--source", "n" * 5000], "name too long"),
        (["conformance", "run", "--every", "1.5"], "--every must be an integer above 0, not '1.5'."),
        (
            ["conformance", "run", "--ops", "ArgMax"],
            "'ArgMax' has no cases, because its derivative is 0: the result is",
        ),
        (["conformance", "export", "out", "--ops", "ArgMax"], "'ArgMax' has no cases, because its derivative is 0"),
        (["record", "mine", "-o", "r.npz"], "'mine' has no colon. Give MODULE:FUNCTION, such as mine:make"),
        (["record", "mine:", "-o", "r.npz"], "'mine:' lacks a module or a name. Give package.module:name"),
        (["recipe", "fgsm", "m.onnx", "--clip", "0", "-o", "g"], "--clip takes 2 numbers, LOW HIGH, not '0 -o'."),
        (["conformance", "run", "--seconds", "soon"], "--seconds must be a number of seconds above 0, not 'soon'."),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else None,
)
def test_an_option_that_makes_no_sense(words, expected, model, refused):
    said = refused(*words)
    assert expected.lower() in said.lower()
    assert len(said) < 600


def with_weight(tensor):
    value = helper.make_tensor_value_info
    node = helper.make_node("Mul", ["x", "w"], ["y"])
    graph = helper.make_graph(
        [node], "g", [value("x", TensorProto.FLOAT, [3])], [value("y", TensorProto.FLOAT, [3])], [tensor]
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def external(**entries):
    tensor = numpy_helper.from_array(np.ones(3, np.float32), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], raw_data=b"12"),
        external(location="weights.bin", length="12"),
        external(location="weights.bin", offset="-5"),
        external(location="weights.bin", length="9" * 30),
        external(location="n" * 300),
        external(location="nowhere.bin"),
    ],
    ids=["short", "short file", "offset", "length", "name", "no file"],
)
@pytest.mark.parametrize("words", [["grad", "-o", "elsewhere/g.onnx"], ["run"], ["check"]], ids=" ".join)
def test_a_weight_that_cannot_be_read(words, tensor, model, refused):
    model.with_name("weights.bin").write_bytes(b"1234")
    model.with_name("elsewhere").mkdir()
    model.with_name("w.onnx").write_bytes(with_weight(tensor).SerializeToString())
    refused(words[0], "w.onnx", *words[1:])


@pytest.mark.parametrize(
    "tensor",
    [external(location="weights.bin"), TensorProto(name="w", data_type=77, dims=[3], raw_data=b"1" * 12)],
    ids=["short file", "no type"],
)
@pytest.mark.parametrize("words", [["run"], ["check"]], ids=" ".join)
def test_a_weight_whose_numbers_cannot_be_read(words, tensor, model, refused):
    model.with_name("weights.bin").write_bytes(b"1234")
    model.with_name("w.onnx").write_bytes(with_weight(tensor).SerializeToString())
    refused(*words, "w.onnx")


def test_a_folder_whose_name_is_too_long_cannot_be_made():
    with pytest.raises(OutputFileError, match="cannot be written: File name too long"), new_folder("n" * 300):
        pass


def test_a_name_does_not_move_the_cursor(tmp_path, capsys):
    assert main(["run", str(tmp_path / "\x1b[31mred.onnx")]) == 2
    assert main(["conformance", "report", "\x1b[31mred.json", "-o", "r.md"]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="shells differ")
@pytest.mark.parametrize("rest", [">/dev/full", ">&-"])
def test_a_stdout_that_takes_nothing_is_no_traceback(rest):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m refgrad ops {rest}"], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr
    assert done.returncode == (0 if rest == ">&-" else 2)


LINE = '<ir_version: 8, opset_import: ["": 18]> m (float[N, 2] x) => (float s) { s = ReduceSum<keepdims = 0>(x) }'


@pytest.mark.parametrize(
    "call",
    [
        lambda m: refgrad.add_loss_output(m, penalty=-1),
        lambda m: refgrad.add_loss_output(m, loss_name="\ud800"),
        lambda m: refgrad.random_feed(None),
        lambda m: refgrad.recipes.fgsm(m, of=0),
        lambda m: refgrad.recipes.fgsm(m, eps=None),
        lambda m: refgrad.recipes.fgsm(m, clip="nope"),
        lambda m: refgrad.recipes.fgsm(m, clip=0),
        lambda m: refgrad.recipes.integrated_gradients(m, steps=None),
        lambda m: refgrad.recipes.saliency(m, of="s", axis=""),
        lambda m: refgrad.onnx_derivative(m, weights=np.array("x", dtype=object)),
        lambda m: get_backend(None),
        lambda m: get_backend("numpy").prepare(m).run(None),
        lambda m: get_backend("numpy").prepare(m).run({1: 2}),
    ],
)
def test_an_argument_of_another_kind_is_an_error_of_ours(call):
    with pytest.raises(RefgradError):
        call(onnx.parser.parse_model(LINE))
