"""The smallest model that shows a failure: a test in onnx's layout, a script and a report."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper
from planting import BACKENDS, Planted, builder_with, network, scaled

from refgrad.cli import main
from refgrad.conformance.known.bugs.bug import ORT, VERSIONS, installed
from refgrad.conformance.locating import reducing
from refgrad.conformance.locating.scripts import DATA, Shown, of_error, program
from refgrad.conformance.locating.sides import Live
from refgrad.conformance.locating.values import kind_of
from refgrad.errors import BuilderError, FeedError

pytestmark = pytest.mark.interpreter


def test_a_wrong_kernel_is_reduced(tmp_path: Path) -> None:
    model, feeds = network()
    side = Live("refgrad", Planted("Tanh_1", lambda y: 1.01 * y))
    reduced = reducing.reduce(model, side, feeds)
    assert reduced.failure.operators == ("Tanh",)
    assert reduced.failure.nodes == ("Tanh_1",)
    assert [node.op_type for node in reduced.failure.model.graph.node] == ["Tanh"]
    assert all(value.size == 1 for value in reduced.failure.feeds.values())
    reducing.write(reduced, tmp_path / "made")
    onnx.checker.check_model(onnx.load(tmp_path / "made" / "model.onnx"), full_check=True)
    data = tmp_path / "made" / "test_data_set_0"
    due, came = (numpy_helper.to_array(onnx.load_tensor(data / f"{kind}_0.pb")) for kind in ("output", "actual"))
    np.testing.assert_allclose(came, 1.01 * due, rtol=1e-6)
    assert "Cut out of a larger model, in which it is node 'Tanh_1'." in (tmp_path / "made" / "REPORT.md").read_text(
        encoding="utf-8"
    )


def test_a_wrong_rule_is_reduced_and_reproduced_without_refgrad(tmp_path: Path) -> None:
    model, feeds = network()
    reduced = reducing.reduce(model, Live(builder_with(scaled("Tanh_1", 1.5)), "numpy"), feeds)
    assert reduced.failure.kind == "rule"
    assert reduced.failure.nodes == ("Tanh_1",)
    reducing.write(reduced, tmp_path / "made")
    script = (tmp_path / "made" / "reproduce.py").read_text(encoding="utf-8")
    assert "refgrad" not in script
    done = subprocess.run(
        [sys.executable, "reproduce.py"], cwd=tmp_path / "made", capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "largest error" in done.stdout
    assert "still there" in done.stdout
    assert not done.stderr


def test_a_wrong_builder_is_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program exits with 1 as long as the builder is wrong, and with 0 once it is mended."""
    monkeypatch.chdir(tmp_path)
    model, feeds = network()
    onnx.save(model, "m.onnx")
    np.savez("f.npz", **feeds)
    text = (
        "import os\nimport refgrad\n\n\ndef build(model, wrt, outputs):\n"
        "    made = refgrad.gradient(model, wrt, outputs)\n"
        "    for node in made.graph.node:\n"
        "        if node.name.startswith('Tanh_1_Grad/') and node.op_type == 'Sub' and 'MENDED' not in os.environ:\n"
        "            node.op_type = 'Add'\n"
        "    return made\n"
    )
    Path("wrong_tanh.py").write_text(text)
    words = ["reduce", "m.onnx", "--feeds", "f.npz", "-o", "made", "--side", "wrong_tanh:build@numpy"]
    assert main(words) == 0
    for environment, code in (({}, 1), ({"MENDED": "1"}, 0)):
        done = subprocess.run(
            [sys.executable, "made/reproduce.py"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])} | environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr


def test_a_fault_that_is_infinite_is_reported(tmp_path: Path) -> None:
    model, feeds = network()
    reduced = reducing.reduce(model, Live("refgrad", Planted("Tanh_1", lambda y: y * np.float32(np.nan))), feeds)
    reducing.write(reduced, tmp_path / "made")
    data = tmp_path / "made" / "test_data_set_0"
    assert np.isnan(numpy_helper.to_array(onnx.load_tensor(data / "actual_0.pb"))).any()
    assert "'inf'" in (tmp_path / "made" / "reproduce.py").read_text(encoding="utf-8")
    assert "does not show it here: it exits with 0" in (tmp_path / "made" / "REPORT.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("expected", "seen", "code"),
    [
        ([1.0, 0.0], np.inf, 1),  # what comes is NaN
        ([np.nan, 0.0], np.inf, 0),
        ([np.nan, 1.0], 1.0, 1),
        ([np.nan, 1e-7], 1.0, 0),  # it is mended, up to rounding
        ([np.nan, 1e-7], None, 0),  # another result was wrong
    ],
)
def test_a_program_tells_a_fault_from_rounding_and_nan_from_nan(
    expected: list[float], seen: float | None, code: int, tmp_path: Path
) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Log(x) }'
    )
    shown = Shown(
        "", "onnx.reference", False, True, False, model, {"x": np.float32([-1, 1])}, {"y": np.float32(expected)},
        {} if seen is None else {"y": seen},
    )  # fmt: skip
    text, beside = program(shown)
    assert not beside
    (tmp_path / "reproduce.py").write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, tmp_path / "reproduce.py"], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr


def test_a_refusal_keeps_its_message() -> None:
    model, feeds = network()

    def refuses(problem: Any) -> Any:
        if any(node.op_type == "LayerNormalization" for node in problem.model.graph.node):
            raise BuilderError("refused", "no rule for LayerNormalization")
        return builder_with(lambda made: None)(problem)

    reduced = reducing.reduce(model, Live(refuses, "numpy"), feeds)
    assert (reduced.failure.how, reduced.failure.operators) == ("refused", ("LayerNormalization",))
    assert "no rule for LayerNormalization" in reducing.report(reduced)
    assert reduced.built is None


def test_the_message_of_the_whole_is_kept_where_no_part_has_it() -> None:
    """The builder refuses sizes that are not known, which no part has, and it gets a rule wrong as well."""
    model, feeds = network()

    def build(problem: Any) -> Any:
        if problem.model.graph.input[0].type.tensor_type.shape.dim[0].dim_param:
            raise BuilderError("refused", "there is an unknown size")
        return builder_with(scaled("Tanh_1", 1.5))(problem)

    reduced = reducing.reduce(model, Live(build, "numpy"), feeds)
    assert reduced.failure.operators == ("Tanh",)
    assert "The whole model fails for another reason: there is an unknown size" in reducing.report(reduced)


@pytest.mark.skipif(find_spec("onnx_ad") is None, reason="onnx-ad is not installed")
@pytest.mark.parametrize("executor", ["onnx.reference", *(name for name in BACKENDS if name != "numpy")])
def test_a_report_has_a_program_that_needs_no_refgrad(executor: str, tmp_path: Path) -> None:
    """A weight is asked for, which onnx-ad takes for a constant, and onnx.reference makes its wrong gradient right."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[1,1,4] x) => (float[1,1,4] y)
        <float[1,1,4] w = {1, 2, 3, 4}>
        { c = Mul(x, w)  [pool] p = AveragePool <kernel_shape = [2], pads = [0, 1]> (c)  y = Tanh(p) }"""
    )
    reduced = reducing.reduce(
        model, Live("onnx-ad", executor), {"x": np.float32([[[1, -0.5, 2, 0.25]]])}, wrt=["x", "w"]
    )
    reducing.write(reduced, tmp_path / "made")
    report = (tmp_path / "made" / "REPORT.md").read_text(encoding="utf-8")
    program_text = report.partition("```python\n")[2].partition("```")[0]
    assert ("refgrad" in program_text) == ("ort-cpu" not in BACKENDS)
    (tmp_path / "pasted.py").write_text(program_text, encoding="utf-8")
    done = subprocess.run([sys.executable, tmp_path / "pasted.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "The fault is still there." in done.stdout
    assert "The fault is still there." in report
    assert f"onnx-ad=={version('onnx-ad')}" in report
    for name in ("forward.onnx", "model.onnx"):
        onnx.checker.check_model(onnx.load(tmp_path / "made" / name), full_check=True)


def test_a_weight_is_an_input_of_the_program_of_onnx_ad(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y)
        <float[2] w = {1, 2}> { y = Mul(x, w) }"""
    )
    arrays = {"x": np.float32([3, 4]), "w": np.float32([1, 2])}
    shown = Shown(
        "onnx-ad", "ort-cpu", True, True, False, model, {"x": arrays["x"]}, arrays, {}, ["x", "w"], {"y": arrays["x"]}
    )
    text, _ = program(shown)
    assert "g (float[2] x, float[2] w) => (float[2] y)" in text
    assert "'w': [1, [2], [1.0, 2.0]]" in text


def test_a_fault_that_ends_the_process_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os\nfrom refgrad.backends import Backend\n\n\nclass Deadly(Backend):\n    name = 'deadly'\n\n"
        "    def description(self):\n        return 'it dies'\n\n"
        "    def prepare(self, model, **options):\n        os.abort()\n"
    )
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Exp(x) }'
    )
    arrays = {"x": np.float32([0, 1])}
    shown = Shown("", "deadly:Deadly", False, True, True, model, arrays, {"y": np.float32([1, 2.7182817])}, {})
    (tmp_path / "reproduce.py").write_text(program(shown)[0], encoding="utf-8")
    done = subprocess.run([sys.executable, "reproduce.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"ended with {-signal.SIGABRT}" in done.stdout


@pytest.mark.parametrize("size", [3, 100, 40_000])
def test_what_is_in_a_program_is_what_was_given(size: int, tmp_path: Path) -> None:
    """Short lists, packed bytes and a file beside the program, for each kind of numbers."""
    rng = np.random.default_rng(size)
    numbers = rng.standard_normal((1, size))
    values: dict[str, np.ndarray] = {
        kind: numbers.astype(kind) for kind in ("float32", "float16", "float64", "int64", "bool")
    }
    for kind in ("float32", "float16", "float64"):
        values[kind][0, :2] = np.nan, -np.inf
    values["bfloat16"] = numbers.astype(ml_dtypes.bfloat16)
    values["ones"] = np.ones((1, size), np.float32)
    values["text"] = np.array([[f"a'{k}\u202e" for k in range(size)]], object)
    values["scalar"] = np.array(0.1, np.float32)
    values["nothing"] = np.zeros((0, 2), np.float32)
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", [name], [f"{name} out"]) for name in values],
        "g",
        [info(name, kind_of(value), value.shape) for name, value in values.items()],
        [info(f"{name} out", kind_of(value), value.shape) for name, value in values.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    expected = {f"{name} out": value for name, value in values.items()}
    text, beside = program(Shown("", "onnx.reference", False, True, False, model, values, expected, {}))
    assert bool(beside) == (size == 40_000)
    (tmp_path / "reproduce.py").write_text(text, encoding="utf-8")
    (tmp_path / DATA).write_text(beside, encoding="utf-8")
    done = subprocess.run([sys.executable, tmp_path / "reproduce.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("largest error: 0.0") == len(values) - 2  # a text has none, nor has an empty tensor


def test_a_model_in_a_program_has_no_remarks(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21], producer_name: "somebody">
        g (float[2] x) => (float[2] y) { [a] h = Exp(x) [b] y = Clip(h) }"""
    )
    model.graph.node[0].doc_string = "somewhere.py"
    model.graph.node[1].metadata_props.add(key="pkg.torch.onnx.stack_trace", value="File somewhere.py")
    arrays = {"x": np.float32([0, 1])}
    text, _ = program(Shown("", "ort-cpu", False, True, False, model, arrays, arrays, {}))
    assert "somewhere" not in text
    assert "somebody" not in text
    assert "'   [a] h = Exp (x)'," in text


def test_a_wrong_result_without_a_gradient_is_reduced() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (int64[3] x) => (int64[3] y) { [abs] h = Abs(x)  [neg] y = Neg(h) }'
    )
    reduced = reducing.reduce(model, Live("refgrad", Planted("abs", lambda y: y + 1)), {"x": np.array([1, -2, 3])})
    assert (reduced.failure.kind, reduced.failure.operators) == (reducing.KERNEL, ("Abs",))


def test_positive_numbers_stay_positive() -> None:
    """A quantization by a scale of 0 means nothing."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[3] x, float s) => (int8[3] y)
        <int8 z = {0}> { [quantize] y = QuantizeLinear(x, s, z) }"""
    )
    feeds = {"x": np.float32([-1, -2, 3]), "s": np.array(0.25, np.float32)}
    reduced = reducing.reduce(model, Live("refgrad", Planted("quantize", lambda y: y + 9)), feeds)
    assert reduced.failure.feeds["s"] == 1
    assert (reduced.failure.feeds["x"] == 1).all()


def refusing_reference(tmp_path: Path) -> str:
    """The report about a model on which onnx's reference implementation fails."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[1,4,5] x) => (float[1,2,6] y)
        { t = Softplus(x)  [deconv] d = ConvTranspose<group=2, kernel_shape=[2]>(t, w, b)  y = Mul(d, d) }"""
    )
    for name, shape in (("w", (4, 1, 2)), ("b", (2,))):
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    feeds = {"x": rng.standard_normal((1, 4, 5)).astype(np.float32)}
    reduced = reducing.reduce(model, Live("refgrad", "onnx.reference"), feeds)
    reducing.write(reduced, tmp_path / "made")
    return (tmp_path / "made" / "REPORT.md").read_text(encoding="utf-8")


def test_an_error_has_a_report_of_its_own(tmp_path: Path) -> None:
    """Its numbers are all different, so that a result that comes in place of the error can be judged."""
    text = refusing_reference(tmp_path)
    assert text.startswith(f"# ConvTranspose: an error in place of a result (onnx {onnx.__version__})\n")
    assert "- result d: expected float32[1, 2, 2] [8, 11, 45, 52], and it fails\n" in text
    assert "processor" not in text
    assert f"A known bug of onnx {onnx.__version__} in ConvTranspose: fails on groups\n" in text
    printed = text.partition("It prints:\n\n")[2]
    assert 'File "reproduce.py", line' in printed
    assert 'File "site-packages/onnx/reference/reference_evaluator.py", line' in printed
    assert not re.search('File "/', printed)
    assert printed.endswith("    The fault is still there.\n")
    assert text.count("exits with 1") == 1


@pytest.mark.skipif(installed().get(ORT) != VERSIONS[ORT], reason="another ONNX Runtime")
def test_a_dispute_is_no_contradiction(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[1,3] x) => (float[1,5] y)
        <float[2] s = {1, 1.9}> { t = Tanh(x)
        [up] y = Resize<mode="linear", coordinate_transformation_mode="align_corners">(t, , s) }"""
    )
    side = Live("refgrad", "ort-cpu")
    reduced = reducing.reduce(model, side, {"x": np.float32([[0.1, -0.5, 2]])})
    reducing.write(reduced, tmp_path / "made")
    report = (tmp_path / "made" / "REPORT.md").read_text(encoding="utf-8")
    one, another = f"onnxruntime {version('onnxruntime')}", "onnx's reference implementation"
    assert report.startswith(
        f"# Resize: {one} and {another} disagree\n\n{one} and {another} compute different results."
    )
    assert "A dispute about the specification: onnx's reference" in report
    assert "2462)." in report
    assert f": {another} computes float32" in report
    assert f", {one} float32" in report
    assert "It exits with 1 as long as they disagree, with 0 once they agree, and" in report
    for claim in ("formula of the operator", "wrong", "known bug"):
        assert claim not in report.partition("## To reproduce")[0]


def test_another_error_is_not_the_fault(tmp_path: Path) -> None:
    refusing_reference(tmp_path)
    program_text = (tmp_path / "made" / "reproduce.py").read_text(encoding="utf-8")
    assert "'raises': ('ValueError', '')," in program_text
    assert "The process ended" not in program_text
    for old, new, code, last in (
        ("", "", 1, "The fault is still there."),
        ("] d = ConvTranspose <", "] d = NoSuchOperator <", 2, "This error is not the reported fault."),
        ("] d = ConvTranspose <", "] d == ConvTranspose <", 2, "This error is not the reported fault."),
        ("('ValueError', '')", "('ValueError', 'cannot  reshape')", 2, "This error is not the reported fault."),
        ("('ValueError', '')", "('ValueError', 'cannot reshape')", 1, "The fault is still there."),
    ):
        assert old in program_text
        (tmp_path / "changed.py").write_text(program_text.replace(old, new), encoding="utf-8")
        done = subprocess.run([sys.executable, tmp_path / "changed.py"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.rstrip().rpartition("\n")[2]) == (code, last), done.stderr


@pytest.mark.parametrize(
    ("printed", "raises"),
    [
        ("ValueError: cannot\nThe fault is still there.", ("ValueError", "")),
        ("refgrad.errors.BuilderError: refused\nThe fault is still there.", ("BuilderError", "")),
        ("RuntimeError: no  kernel\nThe fault is still there.", ("RuntimeError", "no kernel")),
        ("AssertionError\nThe fault is still there.", ("AssertionError", "")),
        (
            "onnxruntime.capi.onnxruntime_pybind11_state.Fail: [ONNXRuntimeError] : 1 : FAIL : Type Error: no",
            ("Fail", "[ONNXRuntimeError] : 1 : FAIL : Type Error: no"),
        ),
    ],
)
def test_the_class_of_an_error_is_learned_from_its_traceback(printed: str, raises: tuple[str, str]) -> None:
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g (float x) => (float y) { y = Exp(x) }')
    shown = Shown("", "ort-cpu", False, True, True, model, {}, {}, {}, raises=("Exception", ""))
    head = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    run()\n'
    found = of_error(shown, head + printed)
    assert (found.raises, found.may_end) == (raises, False)
    ended = of_error(shown, "The process ended with -6\nThe fault is still there.")
    assert (ended.raises, ended.may_end) == (None, True)


@pytest.mark.parametrize(
    ("array", "simpler"),
    [
        ([0.3, -2.6], [[1, 1], [1, -3], [0, 0], [0.3, -2.6]]),
        ([0.25, 2.6], [[1, 1], [1, 3], [0.2, 2.6]]),  # they may be scales
        ([1, 1], []),
        ([3, -7], [[1, 1]]),
        ([0, 0], [[1, 1]]),
    ],
)
def test_ones_are_simpler_than_zeros(array: list[float], simpler: list[list[float]]) -> None:
    given = np.float32(array)
    found = [one.tolist() for one in reducing._simpler(given, False)]
    assert found == [np.float32(one).tolist() for one in simpler if not np.array_equal(np.float32(one), given)]
    assert next(reducing._simpler(np.float32([1, 3]), True)).tolist() == [1, 2]


def test_the_reference_implementation_is_asked_about_a_kernel() -> None:
    model, feeds = network()
    reduced = reducing.reduce(model, Live("refgrad", Planted("Tanh_1", lambda y: 1.5 * y)), feeds)
    assert "onnx's reference implementation computes the expected result." in reducing.report(reduced)


def test_an_interrupted_reduction_keeps_what_it_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    model, feeds = network()

    def progress(what: str, done: int, total: int | None) -> None:
        if what == "smaller models" and done == 3:
            raise KeyboardInterrupt

    reduced = reducing.reduce(model, Live("refgrad", Planted("Tanh_1", lambda y: 2 * y)), feeds, progress=progress)
    assert reduced.stopped == "interrupted"
    assert reduced.failure.operators == ("Tanh",)
    assert "interrupted" in reducing.report(reduced)


def test_what_does_not_fail_is_not_reduced() -> None:
    model, feeds = network()
    with pytest.raises(FeedError, match=r"is right for these feeds.*nothing to reduce"):
        reducing.reduce(model, Live("refgrad", "numpy"), feeds)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    model, feeds = network()
    onnx.save(model, "m.onnx")
    np.savez("f.npz", **feeds)
    Path("no_tanh.py").write_text(
        "import refgrad\n\n\ndef build(model, wrt, outputs):\n"
        "    if any(node.op_type == 'Tanh' for node in model.graph.node):\n"
        "        raise NotImplementedError('no rule for Tanh')\n"
        "    return refgrad.gradient(model, wrt, outputs)\n"
    )
    words = ["reduce", "m.onnx", "--feeds", "f.npz", "-o", "made"]
    assert main([*words, "--side", "no_tanh:build@numpy"]) == 0
    assert "no rule for Tanh" in capsys.readouterr().out
    assert {file.name for file in Path("made").iterdir()} == {
        "model.onnx", "forward.onnx", "reproduce.py", "REPORT.md", "test_data_set_0"
    }  # fmt: skip
    assert main([*words, "--side", "no_tanh:build@numpy"]) == 2  # the folder exists
    assert main(["reduce", "m.onnx", "--side", "f.npz", "-o", "other"]) == 2
    assert main(["reduce", "m.onnx", "--side", "refgrad@numpy", "-o", "other"]) == 2
    assert not Path("other").exists()


def test_a_program_that_cannot_run_exits_with_2_and_any_rest_of_the_fault_with_1(tmp_path: Path) -> None:
    model, feeds = network()
    reduced = reducing.reduce(model, Live(builder_with(scaled("Tanh_1", 1.5)), "numpy"), feeds)
    reducing.write(reduced, tmp_path / "made")
    text = (tmp_path / "made" / "reproduce.py").read_text(encoding="utf-8")
    assert reduced.exit_code == 1

    def exit_code(old: str, new: str) -> int:
        assert old in text
        file = tmp_path / "changed.py"
        file.write_text(text.replace(old, new), encoding="utf-8")
        return subprocess.run([sys.executable, str(file)], capture_output=True, check=False).returncode

    right = "[array(*asked['expected'][name]){} for name in names]"
    assert exit_code("import numpy as np", "import numpy as np\nimport no_such_package") == 2
    assert exit_code("found = run(model", "raise ValueError\nfound = run(model") == 2
    assert exit_code("map(np.asarray, found)", right.format(" * np.float32(1.001)")) == 1
    assert exit_code("map(np.asarray, found)", right.format("")) == 0
