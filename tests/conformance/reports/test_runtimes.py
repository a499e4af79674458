"""The runners of the exported suite, and what was measured with them."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest

from refgrad.conformance.case import node_case
from refgrad.conformance.judge.rows import PHRASES
from refgrad.conformance.tools.exporting import known
from refgrad.conformance.tools.exporting.export import export
from refgrad.conformance.tools.exporting.known import known_failures

pytestmark = [pytest.mark.browser, pytest.mark.stock, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
MODULES = os.environ.get("REFGRAD_NODE_MODULES", "")
INCLUDE = os.environ.get("REFGRAD_ORT_INCLUDE", "")
NUMBERS = np.array([[0.5, -1.5, 2.0], [1.25, -0.75, 0.3]], np.float32)
CASES = {
    "test_grad_exp": node_case("Exp", NUMBERS),
    "test_grad_mul": node_case("Mul", NUMBERS, NUMBERS[0]),
    "test_grad_exp_float16": node_case("Exp", NUMBERS.astype(np.float16)),
    "test_grad_neg": node_case("Neg", NUMBERS),
    "test_grad_exp_scalar": node_case("Exp", NUMBERS[0, 0]),
    "test_grad_exp_empty": node_case("Exp", NUMBERS[:0]),
}
VERDICTS = ("right", "wrong", "not supported", "crashed", "timed out")
EXPLAINED = (
    "onnxruntime",
    "onnxruntime-node",
    "onnxruntime-web",
)  # whose failures have a reason in docs/runtime_faults.toml
RESULTS = json.loads((ROOT / "reports" / "results" / "runtimes.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return export(tmp_path_factory.mktemp("export") / "suite", CASES).folder


def run(folder, *arguments, program=None):
    """The verdicts by test, the summary, and the exit code."""
    command = program or [sys.executable, str(folder / "runners" / "run.py")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, cwd=folder, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    *lines, summary = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["test"]: (line["verdict"], line["why"]) for line in lines}, summary, done.returncode


@pytest.mark.parametrize("folder", ["gradients", "forward"])
@pytest.mark.parametrize("runtime", ["onnx.reference", "onnxruntime"])
def test_everything_is_right(suite, runtime, folder):
    if runtime == "onnxruntime":
        pytest.importorskip("onnxruntime")
    found, summary, code = run(suite, runtime, folder)
    assert list(found) == list(CASES)
    assert all(verdict == "right" for verdict, _ in found.values()), found
    assert (summary["runtime"], summary["right"], code) == (runtime, len(CASES), 0)


def test_a_wrong_value_is_wrong(suite, tmp_path):
    shutil.copytree(suite, tmp_path / "suite")
    file = tmp_path / "suite" / "gradients" / "test_grad_exp" / "test_data_set_0" / "output_0.npy"
    np.save(file, np.load(file) * np.float32(1.001))
    found, summary, code = run(tmp_path / "suite", "onnx.reference", "gradients")
    assert found["test_grad_exp"][0] == "wrong"
    assert found["test_grad_exp"][1].startswith("input_grad is off by ")
    assert (summary["wrong"], code) == (1, 1)


RUNTIME = """
import os, time
def planted(path, inputs, outputs):
    name = path.parent.name
    if name == "test_grad_exp":
        os._exit(7)
    if name == "test_grad_mul":
        time.sleep(60)
    if name == "test_grad_exp_float16":
        raise ValueError("there is no such attribute")
    def run(arrays):
        print("words of the runtime", flush=True)
        if name == "test_grad_neg":
            raise ValueError("Neg is not implemented")
        if name == "test_grad_exp_scalar":
            raise ValueError("planted")
        return arrays
    return run
"""


def test_a_process_that_ends_or_hangs_fails_one_test(suite, tmp_path):
    shutil.copytree(suite, tmp_path / "suite")
    (tmp_path / "suite" / "mine.py").write_text(RUNTIME)
    found, summary, code = run(tmp_path / "suite", "mine:planted", "gradients", "--seconds", "5")
    assert found == {
        "test_grad_exp": ("crashed", "the process ended with code 7"),
        "test_grad_mul": ("timed out", "no answer in 5 s"),
        "test_grad_exp_float16": ("crashed", "ValueError: there is no such attribute"),
        "test_grad_neg": ("not supported", "ValueError: Neg is not implemented"),
        "test_grad_exp_scalar": ("crashed", "ValueError: planted"),
        "test_grad_exp_empty": ("wrong", "2 outputs instead of 1"),
    }
    counts = {"right": 0, "wrong": 1, "not supported": 1, "crashed": 3, "timed out": 1}
    assert {verdict: summary[verdict] for verdict in counts} == counts
    assert code == 1


PRINTING = """
import os
import numpy as np
from runtimes import onnx_reference
class Odd(NotImplementedError): pass
class Silent(Exception):
    def __str__(self): raise RuntimeError("no words")
class Base(BaseException): pass
def throwing(error):
    def act(right, arrays): raise error
    return act
def printing(text, answer):
    def act(right, arrays):
        print(text, end="", flush=True)
        os.write(1, text.encode())
        return answer(right, arrays)
    return act
print("words of a module")
right = lambda right, arrays: right(arrays)
zeros = lambda right, arrays: [array * 0 for array in right(arrays)]
ACTS = {
    "shape": printing("[2, 3]\\n", right),
    "answer": printing('["right", ""]\\n[0, "right", ""]\\n[1, "right", ""]\\n', zeros),
    "two": printing('{"a": 1, "b": 2}\\n', zeros),
    "dots": printing("...", right),
    "odd": throwing(Odd("nothing")),
    "silent": throwing(Silent()),
    "base": throwing(Base("not supported")),
    "exit": throwing(SystemExit(0)),
    "none": lambda right, arrays: None,
    "generator": lambda right, arrays: (value for value in right(arrays)),
    "nones": lambda right, arrays: [None],
    "ragged": lambda right, arrays: [[[1], [1, 2]]],
    "masked": lambda right, arrays: [np.ma.masked_array(value, mask=True) for value in right(arrays)],
    "unmasked": lambda right, arrays: [np.ma.masked_array(value) for value in right(arrays)],
}
def acting(act):
    def load(path, inputs, outputs):
        runs = onnx_reference(path, inputs, outputs)
        return lambda arrays: act(runs, arrays)
    return load
globals().update({name: acting(act) for name, act in ACTS.items()})
"""


@pytest.fixture(scope="module")
def printing(suite, tmp_path_factory):
    folder = shutil.copytree(suite, tmp_path_factory.mktemp("printing") / "suite")
    (folder / "mine.py").write_text(PRINTING)
    return folder


@pytest.mark.parametrize(
    ("runtime", "verdict", "why"),
    [
        ("shape", "right", ""),
        ("dots", "right", ""),
        ("answer", "wrong", "input_grad is off by "),
        ("two", "wrong", "input_grad is off by "),
        ("odd", "not supported", "Odd: nothing"),
        ("silent", "crashed", "Silent"),
        ("base", "crashed", "Base: not supported"),
        ("exit", "crashed", "SystemExit: 0"),
        ("none", "wrong", "it returned None, not a list of arrays"),
        ("generator", "wrong", "it returned a generator, not a list of arrays"),
        ("nones", "wrong", "input_grad is None, not an array"),
        ("ragged", "wrong", "input_grad is a list, not an array: ValueError: "),
        ("masked", "wrong", "input_grad has masked elements"),
        ("unmasked", "right", ""),
    ],
)
def test_whatever_a_runtime_prints_or_returns_has_its_verdict(printing, runtime, verdict, why):
    found, summary, _ = run(printing, f"mine:{runtime}", "gradients", "--only", "exp")
    empty = found.pop("test_grad_exp_empty")
    assert {what for what, _ in found.values()} == {verdict}, found
    assert all(said.startswith(why) for _, said in found.values()), found
    assert runtime not in ("answer", "two") or empty[0] == "right"
    assert sum(summary[what] for what in VERDICTS) == len(found) + 1


MODULE = """
console.log('[0,"right",""]');
class Tensor { constructor(type, data, dims) { Object.assign(this, { type, data, dims }); } }
const run = async () => {
  for (let k = 0; k < 9; k++) console.log(`[${k},"right",""]`);
  process.stdout.write('["right",""]');
  throw new Error('planted');
};
module.exports = { Tensor, env: {}, InferenceSession: { create: async () => ({ run }) } };
"""


@pytest.mark.skipif(not shutil.which("node"), reason="it needs node")
def test_what_a_runtime_prints_in_node_is_no_verdict(suite, tmp_path):
    module = tmp_path / "node_modules" / "onnxruntime-node"
    module.mkdir(parents=True)
    (module / "index.js").write_text(MODULE)
    (module / "package.json").write_text(json.dumps({"version": "1", "main": "index.js"}))
    program = ["node", str(suite / "runners" / "run.mjs"), "--modules", str(tmp_path)]
    found, summary, code = run(suite, "onnxruntime-node", "gradients", program=program)
    assert found == dict.fromkeys(CASES, ("crashed", "planted"))
    assert (summary["crashed"], code) == (len(CASES), 1)
    here = subprocess.run(
        [*program[:2], "onnxruntime-node", str(suite / "gradients")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert json.loads(here.stdout.splitlines()[-1])["crashed"] == len(CASES)  # found in the current folder


def _cut(path, letters):
    path.write_bytes(path.read_bytes()[:-letters])


DAMAGES = {  # of a copy of the tests of Exp: how, and what is said of it
    "an expected array without its last number": lambda at: _cut(at / "test_data_set_0" / "output_0.npy", 4),
    "an expected array without numbers": lambda at: _cut(at / "test_data_set_0" / "output_0.npy", 24),
    "no expected array": lambda at: (at / "test_data_set_0" / "output_0.npy").unlink(),
    "an input without its last number": lambda at: _cut(at / "test_data_set_0" / "input_0.npy", 4),
    "no input": lambda at: (at / "test_data_set_0" / "input_0.npy").unlink(),
    "no model": lambda at: (at / "model.onnx").unlink(),
    "another type": lambda at: np.save(at / "test_data_set_0" / "output_0.npy", NUMBERS.astype(np.float64)),
}


def damaged(suite, folder, program, runtime):
    """What becomes of the test of Exp, by each damage; every other one is right."""
    found = {}
    for k, (title, damage) in enumerate(DAMAGES.items()):
        copy = shutil.copytree(suite, folder / str(k))
        damage(copy / "gradients" / "test_grad_exp")
        verdicts, _, code = run(copy, runtime, "gradients", program=program)
        found[title] = verdicts.pop("test_grad_exp")
        assert {verdict for verdict, _ in verdicts.values()} == {"right"}
        assert code == 1, title
    return found


def test_a_damaged_test_has_crashed(suite, tmp_path):
    for title, (verdict, why) in damaged(suite, tmp_path, None, "onnx.reference").items():
        assert verdict == "crashed", title
        assert why.startswith("damaged file: "), title


LISTS = {  # what a damaged tests.tsv has, and what is said of it
    "": "line 1 is not a row",
    "output\ty\tfloat32\ty.npy\n": "line 1 is not a row",
    "test\tt\tt/model.onnx\n": "line 1 is not a row",
    "test\tt\tt/model.onnx\t0\ninptu\tx\tfloat32\tx.npy\n": "line 2 is not a row",
}


def misused(folder, command, runtime):
    """Every wrong use of a runner that is the same for both ends with 2 and says what is wrong."""
    wrong = [
        ([runtime, "schema"], "there is no tests.tsv in 'schema'"),
        ([runtime, "gradients", "--only", "no_such_test"], f"there is no test to run: {len(CASES)} are listed, 0 "),
        ([runtime, "gradients", "--skip", "6"], "there is no test to run"),
        ([runtime, "gradients", "--skip=-1"], "--skip"),
        ([runtime, "gradients", "--skip", "one"], "--skip"),
        ([runtime, "gradients", "--seconds", "0"], "--seconds"),
        ([runtime, "gradients", "--seconds", "one"], "--seconds"),
        ([runtime, "gradients", "more"], ""),
        ([runtime, "gradients", "--no-such"], "--no-such"),
        ([runtime], ""),
    ]
    for k, (text, told) in enumerate(LISTS.items()):
        (folder / str(k)).mkdir()
        (folder / str(k) / "tests.tsv").write_text(text)
        wrong.append(([runtime, str(folder / str(k))], told))
    for arguments, told in wrong:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, cwd=folder / "suite")
        assert done.returncode == 2, (arguments, done.stdout)
        assert told in done.stderr, arguments
        assert not done.stdout
        assert "Traceback" not in done.stderr
        assert "node:internal" not in done.stderr


def test_every_wrong_use_is_refused(suite, tmp_path):
    shutil.copytree(suite, tmp_path / "suite")
    misused(tmp_path, [sys.executable, "runners/run.py"], "onnx.reference")


def test_tests_can_be_chosen(suite):
    for text in ("exp", "test_grad_exp*", "*d_exp"):
        found, *_ = run(suite, "onnx.reference", "gradients", "--only", text, "--skip", "2")
        assert list(found) == ["test_grad_exp_scalar", "test_grad_exp_empty"]


OWN = """
from onnx.reference import ReferenceEvaluator
__version__ = "0.7"
def load(path, inputs, outputs):
    model = ReferenceEvaluator(str(path))
    return lambda arrays: model.run(outputs, dict(zip(inputs, arrays)))
"""


def test_a_function_of_the_current_folder_is_a_runtime(suite, tmp_path):
    """From any folder, with a version where the module has one; nothing of it is installed."""
    (tmp_path / "mine.py").write_text(OWN)
    command = [sys.executable, str(suite / "runners" / "run.py"), "mine:load", str(suite / "gradients")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["runtime"], summary["version"], summary["right"]) == ("mine:load", "0.7", len(CASES))


def test_no_name_of_a_distribution_is_asked_for(suite, tmp_path):
    """The module of a runtime may come from a distribution with another name, as that of onnxruntime-gpu does, or from none."""
    package = tmp_path / "tract"
    package.mkdir()
    (package / "__init__.py").write_text("def onnx(): raise NotImplementedError")
    command = [sys.executable, str(suite / "runners" / "run.py"), "tract", str(suite / "gradients")]
    for distribution, version in ((None, ""), ("tract-gpu", "1.5")):
        if distribution:
            about = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
            (about / "top_level.txt").write_text("tract\n")
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        summary = json.loads(done.stdout.splitlines()[-1])
        assert (summary["version"], summary["not supported"]) == (version, len(CASES))


def test_wrong_use_of_the_runner(suite):
    command = [sys.executable, str(suite / "runners" / "run.py")]
    for arguments, told in (
        (["no", "gradients"], "there is no runtime 'no': give one of "),
        (["no:load", "gradients"], "No module named 'no'"),
        (["json:load_it", "gradients"], "the module json has no function load_it"),
        (["json:", "gradients"], "there is no runtime 'json:'"),
        (["onnx.reference", "schema"], "there is no tests.tsv in 'schema'"),
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, cwd=suite)
        assert done.returncode == 2
        assert told in done.stderr
        assert "Traceback" not in done.stderr


IN_NODE = pytest.mark.skipif(
    not shutil.which("node") or not (Path(MODULES) / "onnxruntime-web").is_dir(),
    reason="it needs node, and REFGRAD_NODE_MODULES with onnxruntime-web (nox -s page)",
)


@IN_NODE
def test_a_damaged_test_has_crashed_in_node(suite, tmp_path):
    program = ["node", "runners/run.mjs", "--modules", str(Path(MODULES).resolve().parent)]
    for title, (verdict, why) in damaged(suite, tmp_path, program, "onnxruntime-web").items():
        assert verdict == "crashed", title
        assert why.startswith("damaged file: "), title


@IN_NODE
def test_every_wrong_use_is_refused_in_node(suite, tmp_path):
    shutil.copytree(suite, tmp_path / "suite")
    modules = str(Path(MODULES).resolve().parent)
    misused(tmp_path, ["node", "runners/run.mjs", "--modules", modules], "onnxruntime-web")


@IN_NODE
@pytest.mark.parametrize("folder", ["gradients", "forward"])
def test_onnxruntime_web_in_node(suite, tmp_path, folder):
    program = ["node", str(suite / "runners" / "run.mjs"), "--modules", str(Path(MODULES).resolve().parent)]
    found, summary, code = run(suite, "onnxruntime-web", folder, program=program)
    assert list(found) == list(CASES)
    assert all(verdict == "right" for verdict, _ in found.values()), found
    assert (summary["runtime"], code) == ("onnxruntime-web", 0)
    shutil.copytree(suite, tmp_path / "suite")
    for name, value in (("test_grad_exp", 1.001), ("test_grad_exp_float16", 1.1)):
        file = tmp_path / "suite" / "gradients" / name / "test_data_set_0" / "output_0.npy"
        np.save(file, (np.load(file) * value).astype(np.load(file).dtype))
    wrong, _, code = run(tmp_path / "suite", "onnxruntime-web", "gradients", program=program)
    assert {name for name, (verdict, _) in wrong.items() if verdict == "wrong"} == {
        "test_grad_exp",
        "test_grad_exp_float16",
    }
    assert code == 1


def test_node_says_what_is_not_installed(suite, tmp_path):
    if not shutil.which("node"):
        pytest.skip("it needs node")
    for arguments, told in (
        (["no", "gradients"], "RUNTIME is onnxruntime-node or onnxruntime-web"),
        (["onnxruntime-web", "gradients", "--modules", str(tmp_path)], "onnxruntime-web is not installed"),
    ):
        command = ["node", str(suite / "runners" / "run.mjs"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=suite)
        assert done.returncode == 2
        assert told in done.stderr


@pytest.mark.skipif(
    not INCLUDE or not shutil.which("cc"),
    reason="it needs cc, and REFGRAD_ORT_INCLUDE with onnxruntime_c_api.h (nox -s page)",
)
def test_onnxruntime_in_c(suite, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    [library] = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*")
    runner = str(tmp_path / "run")
    flags = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["cc", *flags, "-I", INCLUDE, suite / "runners" / "run.c", "-o", runner, "-ldl", "-lm"], check=True)
    for folder in ("gradients", "forward"):
        found, summary, code = run(suite, str(library), folder, program=[runner])
        assert list(found) == list(CASES)
        assert all(verdict == "right" for verdict, _ in found.values()), found
        assert (summary["runtime"], summary["right"], code) == ("onnxruntime-c", len(CASES), 0)
    found, *_ = run(suite, str(library), "gradients", "--only", "exp", "--skip", "2", program=[runner])
    assert list(found) == ["test_grad_exp_scalar", "test_grad_exp_empty"]
    shutil.copytree(suite, tmp_path / "suite")
    wrong = tmp_path / "suite" / "gradients"
    for name, value in (("test_grad_exp", 1.001), ("test_grad_exp_float16", 1.1)):
        file = wrong / name / "test_data_set_0" / "output_0.npy"
        np.save(file, (np.load(file) * value).astype(np.load(file).dtype))
    file = wrong / "test_grad_neg" / "test_data_set_0" / "input_0.npy"
    file.write_bytes(file.read_bytes()[:-1])
    (wrong / "test_grad_mul" / "model.onnx").write_bytes(b"no model")
    found, summary, code = run(tmp_path / "suite", str(library), "gradients", program=[runner])
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        "test_grad_exp": "wrong",
        "test_grad_mul": "crashed",
        "test_grad_exp_float16": "wrong",
        "test_grad_neg": "crashed",
        "test_grad_exp_scalar": "right",
        "test_grad_exp_empty": "right",
    }
    assert found["test_grad_exp"][1].startswith("input_grad is off by ")
    assert found["test_grad_neg"][1] == "damaged file: test_grad_neg/test_data_set_0/input_0.npy cannot be read"
    assert code == 1
    for arguments, told in (
        ([], "run LIBRARY FOLDER"),
        ([str(library), "schema"], "there is no tests.tsv in 'schema'"),
        ([str(library), "gradients", "--only", "nothing"], "there is no test to run"),
        ([runner, "gradients"], "is not a library of ONNX Runtime"),
        (["libonnxruntime.so", "gradients"], "Give its path."),
    ):
        done = subprocess.run([runner, *arguments], capture_output=True, text=True, check=False, cwd=suite)
        assert (done.returncode, told in done.stderr) == (2, True), done.stderr
    (tmp_path / "suite" / "libonnxruntime.so").symlink_to(library)
    _, summary, _ = run(tmp_path / "suite", "libonnxruntime.so", "forward", program=[runner])  # a file of this folder
    assert summary["right"] == len(CASES)


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [("run.py", "_UNSUPPORTED = (", "\n)"), ("run.mjs", "PHRASES = [", "\n]"), ("run.c", "PHRASES[] = {", "\n}")],
)
def test_the_runners_know_the_phrases_of_the_suite(file, before, after):
    text = (ROOT / "conformance" / "tools" / "exporting" / "runners" / file).read_text(encoding="utf-8")
    listed = text.partition(before)[2].partition(after)[0]
    assert tuple(re.findall(r"^ +[\"'](.*)[\"'],$", listed, re.MULTILINE)) == PHRASES


# What was measured


@pytest.fixture(scope="module")
def generate():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        yield importlib.import_module("generate")
    finally:
        sys.path.remove(str(ROOT / "docs"))


def test_the_results_have_the_verdicts_of_the_runners():
    known = json.loads((ROOT / "reports" / "known_failures.json").read_text(encoding="utf-8"))
    assert {reason.partition(": ")[0] for reason in known["reasons"]} < set(VERDICTS)
    for run in RESULTS["runs"]:
        counts = dict.fromkeys(VERDICTS, 0) | {"right": run["right"]}
        for group in run["groups"]:
            counts[group["verdict"]] += group["count"]
        assert {verdict: run[verdict] for verdict in VERDICTS} == counts


def test_the_failures_of_onnxruntime_are_explained(generate):
    unexplained = [
        (run["runtime"], test, group["why"])
        for run in RESULTS["runs"]
        if run["runtime"] in EXPLAINED and run["folder"] == "gradients"
        for group in run["groups"]
        if group["verdict"] != "not supported"
        for test in group["tests"]
        if not generate.reason_of(run["runtime"], test)
    ]
    assert not unexplained


def test_every_explanation_explains_something(generate):
    failed = [
        (run["runtime"], test)
        for run in RESULTS["runs"]
        for group in run["groups"]
        if group["verdict"] != "not supported"
        for test in group["tests"]
    ]
    for fault in generate.FAULTS:
        assert any(fnmatchcase(r, fault["runtime"]) and fnmatchcase(t, fault["test"]) for r, t in failed), fault


def test_a_known_failure_is_about_the_same_case(monkeypatch):
    reasons = ["crashed: planted", "not supported: no kernel"]
    tests = {"test_grad_exp": [f"{zlib.crc32(b'Exp-2x3'):08x}", [0, 1], [1, 0]]}
    monkeypatch.setattr(known, "_known", lambda: {"runtimes": ["one 1", "two 2"], "reasons": reasons, "tests": tests})
    assert known_failures("test_grad_exp", "Exp-2x3") == {"one 1": reasons[1], "two 2": reasons[0]}
    assert known_failures("test_grad_exp", "another case") == {}
    assert known_failures("test_grad_nothing", "Exp-2x3") == {}


def test_the_failures_of_gradients_are_known():
    names = json.loads((ROOT / "reports" / "known_failures.json").read_text(encoding="utf-8"))["tests"]
    failed = {t for r in RESULTS["runs"] if r["folder"].endswith("gradients") for g in r["groups"] for t in g["tests"]}
    assert failed <= names.keys()
