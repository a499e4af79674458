"""The command line: what each command prints, writes and returns."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from refgrad.backends import available, get_backend
from refgrad.cli import main
from refgrad.cli.options import names, sizes_of
from refgrad.cli.output import Bar
from refgrad.errors import OutputFileError
from refgrad.model import writing as files
from refgrad.show import demo
from refgrad.tables import registry


@pytest.fixture
def regression(tmp_path):
    path = tmp_path / "regression.onnx"
    onnx.save(demo.regression(), path)
    return path


@pytest.fixture
def feeds(tmp_path):
    path = tmp_path / "feeds.npz"
    np.savez(path, **{name: value for name, value in demo.feeds().items() if not name.startswith("init")})
    return path


@pytest.fixture
def refgrad_(capsys):
    """Run a command; its exit code, and what it printed, parsed where it is JSON."""

    def run(*words):
        code = main([str(word) for word in words])
        out = capsys.readouterr().out
        return code, json.loads(out) if "--json" in words else out

    return run


def test_grad_writes_a_gradient_that_runs(regression, tmp_path, refgrad_):
    output = tmp_path / "gradient.onnx"
    words = ["grad", regression, "-o", output, "--wrt", "x,init", "--outputs", "loss", "--cotangent", "ones"]
    code, summary = refgrad_(*words, "--keep-outputs", "--json")
    assert code == 0
    gradient = onnx.load(output)
    onnx.checker.check_model(gradient, full_check=True)
    assert summary["nodes"] == len(gradient.graph.node)
    assert summary["outputs"] == ["x_grad", "init_grad", "loss", "y"]
    results = get_backend("numpy").prepare(gradient).run({k: v for k, v in demo.feeds().items() if k in "x label"})
    assert results["loss"] == pytest.approx(0, abs=1e-9)
    code, text = refgrad_(*words)
    assert code == 0
    assert text.startswith(f"{output}: ")
    assert sorted(tmp_path.iterdir()) == [output, regression]
    assert stat.S_IMODE(output.stat().st_mode) == stat.S_IMODE(regression.stat().st_mode)


def test_a_conversion_of_the_opset_names_no_dimensions(regression, tmp_path, refgrad_):
    output = tmp_path / "gradient.onnx"
    assert refgrad_("grad", regression, "-o", output, "--keep-outputs")[0] == 0
    declared = {value.name: value for value in onnx.load(regression).graph.output}
    assert {v.name: v for v in onnx.load(output).graph.output}["y"].type == declared["y"].type


def test_a_folder_is_no_model(tmp_path, capsys):
    assert main(["grad", str(tmp_path), "-o", str(tmp_path / "gradient.onnx")]) == 2
    assert capsys.readouterr().err == f"refgrad: {tmp_path} is a folder: give the path of an .onnx file in it.\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (["a"], ["a"]),
        (["a,b", "c"], ["a", "b", "c"]),
        (["a, b"], ["a", "b"]),
        ([r"a\,b,c"], ["a,b", "c"]),
    ],
)
def test_names_are_separated_by_commas(given, expected):
    assert names(given) == expected


def test_sizes_have_a_symbol_or_are_for_all():
    assert sizes_of(["N=8,M=2", "3"]) == (3, {"N": 8, "M": 2})
    assert sizes_of(None) == (4, {})


def with_external_data(folder: Path) -> Path:
    folder.mkdir()
    value = helper.make_tensor_value_info
    weights = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Mul", ["m", "v"], ["y"])],
        "g",
        [value("x", TensorProto.FLOAT, ["N", 64])],
        [value("y", TensorProto.FLOAT, ["N", 32])],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(weights[:1] * 2, "v")],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def test_external_data_is_referenced_or_copied(tmp_path, refgrad_):
    path = with_external_data(tmp_path / "models")
    (tmp_path / "elsewhere").mkdir()
    beside, elsewhere = path.with_name("gradient.onnx"), tmp_path / "elsewhere" / "gradient.onnx"
    assert refgrad_("grad", path, "-o", beside, "--json")[1]["data"] is None
    code, summary = refgrad_("grad", path, "-o", elsewhere, "--json")
    assert code == 0
    assert summary["data"] == f"{elsewhere}.data"
    assert sorted(p.name for p in elsewhere.parent.iterdir()) == ["gradient.onnx", "gradient.onnx.data"]
    rng = np.random.default_rng(1)
    feeds = {name: rng.standard_normal((2, n)).astype(np.float32) for name, n in (("x", 64), ("y_grad", 32))}
    results = [get_backend("numpy").prepare(str(file)).run(feeds) for file in (beside, elsewhere)]
    for name, expected in results[0].items():
        np.testing.assert_array_equal(results[1][name], expected)


def test_the_weights_of_the_model_are_not_replaced(tmp_path, refgrad_):
    path = with_external_data(tmp_path / "models")
    weights = path.with_name("weights.bin")
    before = weights.read_bytes()
    assert refgrad_("grad", path, "-o", weights)[0] == 2
    path.with_name("gradient.onnx.data").symlink_to(weights)
    assert refgrad_("grad", path, "-o", path.with_name("gradient.onnx"))[0] == 2
    assert weights.read_bytes() == before


def test_weights_over_the_limit_of_protobuf_go_to_a_file_of_their_own(tmp_path, monkeypatch, refgrad_):
    monkeypatch.setattr(files, "LARGEST", 1000)
    value = helper.make_tensor_value_info
    w = np.arange(1000, dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"])],
        "g",
        [value("x", TensorProto.FLOAT, [1000])],
        [value("y", TensorProto.FLOAT, [1000])],
        [numpy_helper.from_array(w, "w")],
    )
    path, output = tmp_path / "model.onnx", tmp_path / "gradient.onnx"
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]), path)
    code, summary = refgrad_("grad", path, "-o", output, "--wrt", "x", "--json")
    assert code == 0
    assert summary["data"] == f"{output}.data"
    ones = np.ones(1000, np.float32)
    results = get_backend("numpy").prepare(str(output)).run({"x": ones, "y_grad": ones})
    np.testing.assert_array_equal(results["x_grad"], w)


def test_an_interrupted_write_leaves_nothing_behind(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")

    def interrupted():
        with files.replacing(target) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_special_file_is_not_replaced():
    with pytest.raises(OutputFileError, match="no regular file"), files.replacing(os.devnull):
        pass
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize("command", ["grad", "lower", "expand", "cut"])
@pytest.mark.parametrize("output", [".", "/", ".."])
def test_a_folder_is_no_result(command, output, regression, capsys):
    assert main([command, str(regression), "-o", output]) == 2
    assert capsys.readouterr().err.startswith(f"refgrad: '{output}' exists and is no regular file.")


def test_run_prints_and_writes_the_outputs(regression, feeds, tmp_path, refgrad_):
    output = tmp_path / "out.npz"
    code, result = refgrad_("run", regression, "--feeds", feeds, "-o", output, "--json")
    assert code == 0
    assert [(row["name"], row["dtype"], row["shape"]) for row in result["outputs"]] == [
        ("loss", "float32", [1, 1]),
        ("y", "float32", [5, 1]),
    ]
    with np.load(output) as arrays:
        assert sorted(arrays) == ["loss", "y"]
        np.testing.assert_allclose(arrays["y"], demo.feeds()["label"], rtol=1e-6)
    code, text = refgrad_("run", regression, "--feeds", feeds)
    assert code == 0
    assert "float32" in text


def test_run_traces_widens_and_limits_the_interpreter(regression, feeds, refgrad_, capsys):
    code, result = refgrad_("run", regression, "--feeds", feeds, "--trace", "--precision", "float64", "--json")
    assert code == 0
    rows = {row["name"]: row["dtype"] for row in result["outputs"]}
    assert set(rows) > {"x", "label", "loss", "y"}
    assert set(rows.values()) == {"float64"}
    assert refgrad_("run", regression, "--feeds", feeds, "--max-memory", "1M")[0] == 0
    for words, message in (
        (["--max-memory", "100"], "has 872 bytes, and --max-memory is 100"),
        (["--max-memory", "much"], "--max-memory 'much' is not a size"),
        (["--precision", "float8"], "--precision 'float8' is not known"),
        (["--trace", "--backend", "ort-cpu"], "does not return intermediate values"),
    ):
        if "ort-cpu" in words and "ort-cpu" not in available():
            continue
        assert main(["run", str(regression), "--feeds", str(feeds), *words]) == 2
        assert message in capsys.readouterr().err


def test_progress_is_shown_on_a_terminal_after_a_second(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Bar() as bar:
        bar(0, 3, "node 'a' (Neg)")
        assert capsys.readouterr().err == ""
        bar._start -= 1
        bar(1, 3, "node 'b' ([Neg])")
        bar(2, 3, "node 'c' (Neg)")
    assert "node 'c' (Neg)" in capsys.readouterr().err


def test_run_draws_feeds_from_the_declared_types(tmp_path, refgrad_):
    text = """<ir_version: 10, opset_import: ["" : 18]>
    g (float[N, 3] x, int64[N] i, bool[?] b, string s, bfloat16[N] f) => (float[N, 3] y, bfloat16[N] h, bool[M] c, string t)
    { y = Gather(x, i) h = Add(f, f) c = Not(b) t = Identity(s) }"""
    path, output = tmp_path / "m.onnx", tmp_path / "o.npz"
    onnx.save(onnx.parser.parse_model(text), path)
    code, result = refgrad_("run", path, "--dim", "N=7", "--json", "-o", output)
    assert code == 0
    assert {row["name"]: row["shape"] for row in result["outputs"]} == {"y": [7, 3], "h": [7], "c": [4], "t": []}
    assert refgrad_("run", path, "--dim", "N=7", "--json")[1] == result
    assert refgrad_("run", path, "--dim", "N=7", "--seed", "1", "--json")[1] != result


@pytest.mark.parametrize("backend", ["numpy", "ort-cpu"])
def test_run_finds_feeds_with_which_the_model_runs(tmp_path, refgrad_, backend):
    if backend not in available():
        pytest.skip("no ONNX Runtime")
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (int64[N] ids, float[N,C,H,W] x) => (float[N,2] e, float[N,C,K,L] y)
        <float[3,2] t = {1, 2, 3, 4, 5, 6}> { e = Gather(t, ids) y = MaxPool<kernel_shape = [7, 7]>(x) }"""
    )
    onnx.save(model, tmp_path / "m.onnx")
    code, result = refgrad_("run", tmp_path / "m.onnx", "--backend", backend, "--json")
    assert code == 0
    assert [one["name"] for one in result["outputs"]] == ["e", "y"]
    assert refgrad_("run", tmp_path / "m.onnx", "--backend", backend, "--dim", "H=9", "--dim", "W=7", "--json")[0] == 0


def test_reduce_finds_feeds_with_which_the_model_runs(tmp_path, capsys):
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N,C,H,W] x) => (float[N,C,K,L] y)'
        " { p = MaxPool<kernel_shape = [7, 7]>(x) y = Tanh(p) }"
    )
    onnx.save(model, tmp_path / "m.onnx")
    words = ["reduce", tmp_path / "m.onnx", "--side", "refgrad@numpy", "-o", tmp_path / "made"]
    assert main([str(word) for word in words]) == 2
    assert "refgrad@numpy is right for these feeds" in capsys.readouterr().err


def test_bfloat16_survives_a_file(tmp_path, refgrad_):
    text = '<ir_version: 10, opset_import: ["" : 18]> g (bfloat16[3] x) => (bfloat16[3] x2) { x2 = Identity(x) }'
    path, feeds, output = tmp_path / "m.onnx", tmp_path / "f.npz", tmp_path / "o.npz"
    onnx.save(onnx.parser.parse_model(text), path)
    np.savez(feeds, x=np.arange(3).astype(helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)))
    assert refgrad_("run", path, "--feeds", feeds, "-o", output)[0] == 0
    with np.load(output) as arrays:
        assert arrays["x2"].tobytes() == np.load(feeds)["x"].tobytes()


def test_check_agrees(regression, refgrad_):
    code, result = refgrad_("check", regression, "--wrt", "x,init", "--backends", "numpy", "--json")
    assert code == 0
    assert result["ok"]
    assert result["answer"].startswith("right: 2 gradients on 1 executor, largest error ")
    assert {row["verdict"] for row in result["rows"]} == {"right"}
    code, text = refgrad_("check", regression, "--wrt", "x", "--backends", "numpy", "--directions", "1")
    assert code == 0
    assert "4 comparisons: 4 right." in text


def test_check_disagrees_with_exit_code_1(regression, refgrad_, monkeypatch):
    right = registry.RULES["", "Sub"]
    wrong = registry.Rule("Sub", "", lambda op, d_C, A, B: (d_C, d_C), right.wrt, True, right.parameters)
    monkeypatch.setitem(registry.RULES, ("", "Sub"), wrong)
    code, text = refgrad_("check", regression, "--wrt", "label", "--backends", "numpy")
    assert code == 1
    assert text.startswith("wrong: 1 gradient: label\n")
    assert "differences give" in text


def test_preflight_lists_rules_and_refusals(regression, tmp_path, refgrad_):
    code, result = refgrad_("preflight", regression, "--json")
    assert code == 0
    assert {"operator": "Sub", "verdict": "rule"}.items() <= next(
        row for row in result["rows"] if row["operator"] == "Sub"
    ).items()
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Magic", ["x"], ["y"], name="wand", domain="my")],
        "g",
        [value("x", TensorProto.FLOAT, [2])],
        [value("y", TensorProto.FLOAT, [2])],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
    path = tmp_path / "magic.onnx"
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=imports), path)
    code, text = refgrad_("preflight", path)
    assert code == 2
    assert "my.Magic" in text
    assert "refused" in text
    assert "wand" in text


def test_preflight_of_rounding(tmp_path, refgrad_):
    path = tmp_path / "rounding.onnx"
    text = "g (float[2] x, float s) => (float[2] y) { q = QuantizeLinear(x, s) y = DequantizeLinear(q, s) }"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}'), path)
    for given, verdict in ((), "zero"), (("--quantization", "clipped"), "rule"):
        code, result = refgrad_("preflight", path, *given, "--json")
        assert code == 0
        assert {row["operator"]: row["verdict"] for row in result["rows"]}["QuantizeLinear"] == verdict


def test_backends_are_listed_with_reasons(refgrad_):
    code, rows = refgrad_("backends", "--json")
    assert code == 0
    assert {row["backend"] for row in rows} >= {"numpy", "ort-cpu", "ort-cuda"}
    assert all(row["what"] for row in rows)
    assert "numpy" in refgrad_("backends")[1]


@pytest.mark.parametrize(
    ("operator", "expected"),
    [("Mul", "dA = dC·B, dB = dC·A"), ("Floor", "piecewise constant"), ("Relu", "x = 0"), ("ai.onnx.Mul", "dA")],
)
def test_explain(operator, expected, refgrad_):
    code, text = refgrad_("explain", operator)
    assert code == 0
    assert expected in text
    assert refgrad_("explain", operator, "--json")[1]["verdict"] in ("rule", "zero")


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("Mull", "Did you mean 'Mul'"),
        ("Scaler", "Did you mean 'ai.onnx.ml.Scaler'"),
        ("BiasGelu", "Did you mean 'com.microsoft.BiasGelu'"),
        ("none.of.Them", "`refgrad ops` lists all of them"),
    ],
)
def test_explain_suggests_a_name(operator, expected, capsys):
    assert main(["explain", operator]) == 2
    assert expected in capsys.readouterr().err


def test_demo(refgrad_):
    code, text = refgrad_("demo")
    assert code == 0
    assert "532.5546" in text
    assert "193.33316 186.66649" in text
    code, result = refgrad_("demo", "--json")
    assert code == 0
    assert result["check"]["ok"]


def test_python_m_refgrad_is_the_command():
    done = subprocess.run([sys.executable, "-m", "refgrad", "--help"], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in ("grad", "run", "check", "preflight", "backends", "explain", "demo"))


@pytest.mark.skipif(sys.platform == "win32", reason="signals are not POSIX")
def test_being_terminated_leaves_no_temporary_file(tmp_path):
    program = (
        "import sys, time; from refgrad import cli; from refgrad.model import writing\n"
        "def save(gradient, path, source):\n"
        "    with writing.replacing(path) as file: file.write_text('half'); print('writing', flush=True); time.sleep(60)\n"
        "cli.output.save_gradient = save; sys.argv = ['refgrad', 'grad', 'm.onnx', '-o', 'g.onnx']; sys.exit(cli.main())\n"
    )
    onnx.save(demo.regression(), tmp_path / "m.onnx")
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_importing_refgrad_imports_no_backend_and_no_command_line():
    names = ("typer", "rich", "refgrad.cli", "refgrad.backends", "refgrad.conformance", "onnxruntime")
    program = f"import sys, refgrad; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_command_imports_nothing_that_only_the_conformance_suite_needs():
    names = ("onnx.reference", "onnx.backend", "refgrad.conformance.tools.parity", "hypothesis", "torch", "onnxruntime")
    program = f"import sys, refgrad.cli; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"refgrad {metadata.version('refgrad')}\n"
