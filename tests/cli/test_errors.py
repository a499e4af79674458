"""Every bad input is one clear error, in Python and on the command line, and leaves no file behind."""

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
from refgrad.errors import (
    BackendError,
    FeedError,
    InvalidModelError,
    NoGradientError,
    OptionError,
    RefgradError,
    UnknownNameError,
)

GOOD = """<ir_version: 10, opset_import: ["" : 18]>
g (float[N, 3] x, int64[N] index, float[3] bias) => (float[M, 3] y, int64[2] shape) <float[3] w = {1, 2, 3}> {
    scaled = Mul(x, w)
    taken = Gather(scaled, index)
    y = Add(taken, bias)
    shape = Shape(y)
}"""


def parsed(text):
    return onnx.parser.parse_model(text)


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.onnx"
    onnx.save(parsed(GOOD), path)
    return path


def node_model(*nodes, opset=18, domain=None):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, [2, 2])], [value("y", TensorProto.FLOAT, [2, 2])]
    )
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(graph, ir_version=10, opset_imports=imports)


def external(path, size):
    """A model whose weights lie in a file of `size` bytes, None for no file; 4,096 bytes are needed."""
    model = node_model(helper.make_node("Mul", ["x", "w"], ["y"]))
    tensor = numpy_helper.from_array(np.zeros((512, 2), np.float32), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("location", "weights.bin"), ("offset", "0"), ("length", "4096")):
        tensor.external_data.add(key=key, value=text)
    model.graph.initializer.append(tensor)
    if size is not None:
        (path.parent / "weights.bin").write_bytes(bytes(size))
    path.write_bytes(model.SerializeToString())


NODE, ML = helper.make_node, "ai.onnx.ml"


def write_bad(kind, path):
    """The bad model called `kind` at `path`."""
    match kind:
        case "missing":
            return
        case "folder":
            path.mkdir()
        case "empty":
            path.write_bytes(b"")
        case "truncated":
            path.write_bytes(parsed(GOOD).SerializeToString()[:-40])
        case "text":
            path.write_text("no model at all")
        case "unchecked":
            onnx.save(node_model(NODE("Mul", ["x"], ["y"], name="half")), path)
        case "undefined":
            onnx.save(node_model(NODE("Mul", ["x", "nowhere"], ["y"])), path)
        case "cyclic":
            onnx.save(node_model(NODE("Add", ["x", "b"], ["y"]), NODE("Neg", ["y"], ["b"])), path)
        case "no shape":
            model = node_model(NODE("Reshape", ["x", "sizes"], ["y"]))
            model.graph.input.append(helper.make_tensor_value_info("sizes", TensorProto.INT64, ["K"]))
            model.graph.output[0].type.tensor_type.ClearField("shape")
            onnx.save(model, path)
        case "maps":
            model = node_model(NODE("ZipMap", ["x"], ["y"], classlabels_int64s=[0, 1], domain=ML), domain=ML)
            entry = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
            model.graph.output[0].type.CopyFrom(helper.make_sequence_type_proto(entry))
            onnx.save(model, path)
        case "newer opset":
            onnx.save(node_model(NODE("Neg", ["x"], ["y"]), opset=99), path)
        case "custom":
            onnx.save(node_model(NODE("Magic", ["x"], ["y"], name="wand", domain="my"), domain="my"), path)
        case "no derivative":
            onnx.save(
                node_model(NODE("Det", ["x"], ["d"]), NODE("Magic", ["d"], ["y"], domain="my"), domain="my"), path
            )
        case "no data":
            external(path, None)
        case "short data":
            external(path, 100)
        case "bad offset":
            external(path, 4096)
            model = onnx.load(path, load_external_data=False)
            model.graph.initializer[0].external_data[1].value = "nowhere"
            path.write_bytes(model.SerializeToString())


BAD_MODELS = {
    "missing": (InvalidModelError, ["bad.onnx", "There is no file"]),
    "folder": (InvalidModelError, ["bad.onnx", "folder", "give the path of an .onnx file"]),
    "empty": (InvalidModelError, ["bad.onnx", "empty or truncated"]),
    "truncated": (InvalidModelError, ["bad.onnx", "truncated"]),
    "text": (InvalidModelError, ["bad.onnx"]),
    "unchecked": (InvalidModelError, ["onnx.checker", "Mul"]),
    "undefined": (InvalidModelError, ["nowhere"]),
    "cyclic": (InvalidModelError, ["onnx.checker", "sorted"]),
    "no shape": (InvalidModelError, ["'y'", "declares no shape", "Declare its axes"]),
    "maps": (UnknownNameError, ["'y'", "ZipMap", "'x'", "Export the model without it"]),
    "newer opset": (InvalidModelError, ["99", "Upgrade onnx"]),
    "custom": (NoGradientError, ["my.Magic", "wand", "refgrad.extend.rule"]),
    "no derivative": (NoGradientError, ["my.Magic", "refgrad.extend.rule"]),
    "no data": (InvalidModelError, ["'w'", "weights.bin", "Put the data file back"]),
    "bad offset": (InvalidModelError, ["'w'", "offset", "nowhere"]),
    "short data": (InvalidModelError, ["'w'", "weights.bin", "100 bytes", "4096"]),
}

# Nodes that do not fit the graphs they hold or the functions they call, and what the message says.
MISFITS = {
    "Loop without a state": (
        """y = Loop (n, "", x)
            <body = b (int64 i, bool g) => (bool g2, float[2] p) { g2 = Identity (g) p = Exp (x) }>""",
        "2 inputs of the body; expected 3",
    ),
    "Loop without a result": (
        """y = Loop (n, "", x)
            <body = b (int64 i, bool g, float[2] p) => (bool g2) { g2 = Identity (g) }>""",
        "1 outputs of the body; expected at least 2",
    ),
    "Loop with two results": (
        """y, z = Loop (n, "", x)
            <body = b (int64 i, bool g, float[2] p) => (bool g2, float[2] r) { g2 = Identity (g) r = Exp (p) }>""",
        "2 outputs; expected at most 1",
    ),
    "Loop that casts": (
        """y = Loop (n, "", x)
            <body = b (int64 i, bool g, float[2] p)
                => (bool g2, double[2] r) { g2 = Identity (g) r = Cast <to = 11> (p) }>""",
        "float before a step and double after it",
    ),
    "If of branches": (
        """g = Cast <to = 9> (n) y = If (g)
            <then_branch = t () => (float[2] p, float[2] q) { p = Exp (x) q = Sin (x) },
             else_branch = e () => (float[2] r) { r = Exp (x) }>""",
        "return 2 and 1 values",
    ),
    "If without a result": (
        """g = Cast <to = 9> (n) y, z = If (g)
            <then_branch = t () => (float[2] p) { p = Exp (x) },
             else_branch = e () => (float[2] r) { r = Exp (x) }>""",
        "2 outputs; expected at most 1",
    ),
    "Scan of nothing": (
        """y = Scan
            <num_scan_inputs = 5, body = b (float p) => (float r) { r = Exp (p) }> (x)""",
        "1 inputs; expected at least 5",
    ),
    "Scan of a state": (
        """y = Scan
            <num_scan_inputs = 1, body = b (float p) => (float r) { r = Exp (p) }> (x, x)""",
        "1 inputs of the body; expected 2",
    ),
    "Scan along axes": (
        """y = Scan
            <num_scan_inputs = 1, scan_input_axes = [0, 0], body = b (float p) => (float r) { r = Exp (p) }> (x)""",
        "2 numbers in scan_input_axes; expected 1",
    ),
    "Scan along no axis": (
        """y = Scan
            <num_scan_inputs = 1, scan_input_axes = [7], body = b (float p) => (float r) { r = Exp (p) }> (x)""",
        "has 7 in scan_input_axes, and 'x' has 1 axes: -1 to 0 are valid",
    ),
    "SequenceMap": (
        """s = SequenceConstruct (x) t = SequenceMap
            <body = b (float[2] p)
                => (float[2] r) { r = Exp (p) }> (s, x)
        k = Constant <value_int = 0> () y = SequenceAt (t, k)""",
        "1 inputs of the body; expected 2",
    ),
    "inputs of a function": ("y = l.F (x, x)", "2 inputs; expected at most 1"),
    "outputs of a function": ("y, z = l.F (x)", "2 outputs; expected at most 1"),
    "nothing of a function": ("y = l.F ()", "leaves out the input 'a', which Exp within needs"),
    "nothing of a function within": ('y = l.G ("")', "leaves out the input 'c', which Exp within needs"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_bodies_that_do_not_fit(case, tmp_path, capsys):
    body, message = MISFITS[case]
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18, "l": 1]> g (int64 n, float[2] x) => (float[2] y) {{ {body} }}
        <domain: "l", opset_import: ["": 18]> F (a) => (b) {{ b = Exp (a) }}
        <domain: "l", opset_import: ["": 18, "l": 1]> G (c) => (d) {{ e = l.F (c) d = Neg (e) }}"""
    )
    for make in (refgrad.gradient, refgrad.preflight, refgrad.jvp):
        with pytest.raises(InvalidModelError, match=message):
            make(model)
    if "of a function" in case:
        with pytest.raises(InvalidModelError, match=message):
            get_backend("numpy").prepare(model)
    onnx.save(model, tmp_path / "bad.onnx")
    assert main(["grad", str(tmp_path / "bad.onnx"), "-o", str(tmp_path / "made.onnx")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["bad.onnx"]


# What the gradient is asked for: keywords, the command line's words, the error, and what its message says.
BAD_REQUESTS = {
    "unknown wrt": ({"wrt": ["bia"]}, ["--wrt", "bia"], UnknownNameError, ["'bia'", "Did you mean 'bias'", "'w'"]),
    "duplicate wrt": ({"wrt": ["x", "x"]}, ["--wrt", "x,x"], UnknownNameError, ["'x' twice"]),
    "integer wrt": ({"wrt": ["index"]}, ["--wrt", "index"], UnknownNameError, ["'index'", "int64", "'bias'"]),
    "value as wrt": ({"wrt": ["taken"]}, ["--wrt", "taken"], UnknownNameError, ["'taken'", "'x'"]),
    "unknown output": ({"outputs": ["z"]}, ["--outputs", "z"], UnknownNameError, ["'z'", "'y'"]),
    "duplicate output": ({"outputs": ["y", "y"]}, ["--outputs", "y,y"], UnknownNameError, ["'y' twice"]),
    "integer output": ({"outputs": ["shape"]}, ["--outputs", "shape"], UnknownNameError, ["'shape'", "int64", "'y'"]),
    "dialect": ({"dialect": "tf"}, ["--dialect", "tf"], OptionError, ["'tf'", "'onnx', 'ort'"]),
    "cotangent": ({"cotangent": "two"}, ["--cotangent", "two"], OptionError, ["'two'", "'input', 'ones', 'yield'"]),
    "yield": ({"cotangent": "yield"}, ["--cotangent", "yield"], OptionError, ["YieldOp", "ort"]),
}


def explains(text, words):
    assert not [word for word in words if word not in text], text
    assert "Traceback" not in text


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_bad_model(kind, tmp_path, capsys):
    error, words = BAD_MODELS[kind]
    path, output = tmp_path / "bad.onnx", tmp_path / "gradient.onnx"
    write_bad(kind, path)
    with pytest.raises(error) as raised:
        refgrad.gradient(path)
    explains(str(raised.value), words)
    before = sorted(tmp_path.iterdir())
    assert main(["grad", str(path), "-o", str(output)]) == 2
    explains(capsys.readouterr().err, words)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", [kind for kind in BAD_MODELS if BAD_MODELS[kind][0] is InvalidModelError])
@pytest.mark.parametrize("command", ["run", "check", "preflight"])
def test_bad_model_on_every_command(command, kind, tmp_path, capsys):
    path = tmp_path / "bad.onnx"
    write_bad(kind, path)
    if command == "run" and kind in ("unchecked", "no shape", "newer opset"):
        pytest.skip("the interpreter runs what it can")
    assert main([command, str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("refgrad: ")
    explains(error, [])


@pytest.mark.parametrize("kind", BAD_REQUESTS)
def test_bad_request(kind, good, tmp_path, capsys):
    keywords, words, error, expected = BAD_REQUESTS[kind]
    output = tmp_path / "gradient.onnx"
    with pytest.raises(error) as raised:
        refgrad.gradient(good, **keywords)
    explains(str(raised.value), expected)
    assert main(["grad", str(good), "-o", str(output), *words]) == 2
    explains(capsys.readouterr().err, expected)
    assert sorted(tmp_path.iterdir()) == [good]


FEEDS = {"x": np.ones((4, 3), np.float32), "index": np.zeros(4, np.int64), "bias": np.ones(3, np.float32)}
BAD_FEEDS = {
    "unknown": (FEEDS | {"bais": FEEDS["bias"]}, ["'bais'", "Did you mean 'bias'", "'index'"]),
    "missing": ({"x": FEEDS["x"]}, ["index: int64[N]", "bias"]),
    "rank": (FEEDS | {"x": np.ones(3, np.float32)}, ["x: float32[N, 3]", "rank"]),
    "size": (FEEDS | {"x": np.ones((4, 2), np.float32)}, ["x: float32[N, 3]", "(4, 2)"]),
    "symbol": (FEEDS | {"x": np.ones((5, 3), np.float32)}, ["'N'", "5", "4"]),
    "dtype": (FEEDS | {"x": np.ones((4, 3))}, ["'x'", "float32", "float64", ".astype("]),
}


@pytest.mark.parametrize("kind", BAD_FEEDS)
def test_bad_feeds(kind, good, tmp_path, capsys):
    feeds, words = BAD_FEEDS[kind]
    with pytest.raises(FeedError) as raised:
        get_backend("numpy").prepare(str(good)).run(feeds)
    explains(str(raised.value), words)
    np.savez(tmp_path / "feeds.npz", **feeds)
    for command in ("run", "check"):
        assert main([command, str(good), "--feeds", str(tmp_path / "feeds.npz")]) == 2
        explains(capsys.readouterr().err, words)


@pytest.mark.parametrize("content", [None, b"", b"no archive", b"PK\x03\x04 half an archive", "array"])
def test_bad_feeds_file(content, good, tmp_path, capsys):
    path = tmp_path / "feeds.npz"
    if content == "array":
        with path.open("wb") as file:
            np.save(file, np.ones(3))
    elif content is not None:
        path.write_bytes(content)
    assert main(["run", str(good), "--feeds", str(path)]) == 2
    explains(capsys.readouterr().err, ["feeds.npz", "numpy.savez"])


def test_unknown_backend(good, capsys):
    with pytest.raises(BackendError, match="Did you mean 'numpy'"):
        get_backend("nunpy")
    for words in (["run", str(good), "--backend", "nunpy"], ["check", str(good), "--backends", "numpy,nunpy"]):
        assert main(words) == 2
        explains(capsys.readouterr().err, ["'nunpy'", "'numpy'", "'ort-cpu'"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--dim", "N=x"], "give a size"),
        (["--dim", "M=3"], "No input has a dimension 'M'"),
        (["--tolerance", "-1"], "above 0"),
        (["--random-weights", "0"], "constant fills"),
    ],
)
def test_bad_options_of_check(words, expected, good, capsys):
    assert main(["check", str(good), *words]) == 2
    explains(capsys.readouterr().err, [expected])


@pytest.mark.parametrize(
    "words", [[], ["grad"], ["frobnicate"], ["grad", "m.onnx", "--what"], ["run", "m", "--seed", "a"]]
)
def test_wrong_use_is_exit_code_2(words, capsys):
    assert main(words) == 2
    explains(capsys.readouterr().err, [])


@pytest.mark.parametrize("target", ["no/such/folder/g.onnx", ".", "good.onnx"])
def test_output_that_cannot_be_written(target, good, tmp_path, capsys):
    content = good.read_bytes()
    assert main(["grad", str(good), "-o", str(tmp_path / target)]) == 2
    explains(capsys.readouterr().err, [])
    assert good.read_bytes() == content
    assert sorted(tmp_path.iterdir()) == [good]


def test_unexpected_failures_are_one_message_too(good, monkeypatch, capsys):
    def breaks(*arguments, **keywords):
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(refgrad, "preflight", breaks)
    assert main(["preflight", str(good)]) == 2
    assert capsys.readouterr().err == "refgrad: unexpected ZeroDivisionError: surprise.\n"


def test_interrupting_is_no_traceback(good, monkeypatch, capsys):
    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(refgrad, "preflight", interrupted)
    assert main(["preflight", str(good)]) == 130
    explains(capsys.readouterr().err, [])


def test_every_error_is_a_refgrad_error():
    errors = [value for name, value in vars(refgrad.errors).items() if name.endswith("Error")]
    assert len(errors) > 5
    assert all(issubclass(error, RefgradError) for error in errors)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes are not POSIX")
def test_a_broken_pipe_is_silent():
    command = f"{sys.executable} -m refgrad demo | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("The model, a regression with its loss:\n", "")
