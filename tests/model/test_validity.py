"""What is wrong with a model, its file or its use is said in words: no raw exception, and nothing malformed passed on."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, parser

import refgrad
from refgrad.backends import get_backend
from refgrad.cli import main
from refgrad.errors import BackendError, InvalidModelError

ROOT = Path(__file__).parents[2]
BUILDERS = {
    "gradient": refgrad.gradient,
    "ort": lambda model: refgrad.gradient(model, dialect="ort"),
    "jvp": refgrad.jvp,
    "hvp": refgrad.hvp,
    "lower": refgrad.lower,
    "expand": refgrad.expand_gradients,
    "short names": refgrad.onnx_rename_names,
}
LONG = "n" * 300


def model_of(text: str, head: str = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>') -> ModelProto:
    return parser.parse_model(f"{head} {text}")


def small(name: str = "x") -> ModelProto:
    return model_of(f"m (float[2] {name}) => (float[2] y) {{ y = Tanh({name}) }}")


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize(
    ("imports", "version"),
    [
        ([("", 21), ("", 21)], 21),
        ([("", 18), ("", 21)], 21),  # the last one counts, as for ONNX Runtime
        ([("", 21), ("ai.onnx", 21)], 21),
        ([("", 21), ("x", 1), ("x", 2)], 21),
    ],
)
def test_a_domain_is_imported_once_by_what_is_made(build, imports, version):
    model = small()
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(*one) for one in imports)
    before = model.SerializeToString()
    made = build(model)
    found = [one.domain or "ai.onnx" for one in made.opset_import]
    assert len(found) == len(set(found))
    assert max(one.version for one in made.opset_import) == version
    assert model.SerializeToString() == before


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_names_of_300_characters_are_names(build):
    model = small(LONG)
    model.graph.node[0].name = LONG
    onnx.checker.check_model(build(model))


def test_files_may_have_the_longest_names(tmp_path):
    onnx.save(small(), tmp_path / "m.onnx")
    longest = str(tmp_path / ("o" * 250 + ".onnx"))
    assert main(["grad", str(tmp_path / "m.onnx"), "-o", longest]) == 0
    assert main(["grad", longest, "-o", str(tmp_path / "again.onnx"), "--wrt", "x"]) == 0
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "words", [("grad", LONG, "-o", "o.onnx"), ("grad", "m.onnx", "-o", LONG), ("run", LONG)], ids=str
)
def test_names_that_no_file_can_have_are_refused(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(small(), "m.onnx")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("refgrad: ")
    assert "unexpected" not in said
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize("name", [LONG, "a\0b", ""])
def test_no_name_of_a_model_raises_an_error_of_the_system(name):
    for read in (refgrad.gradient, refgrad.preflight, refgrad.to_dot, get_backend("numpy").prepare):
        with pytest.raises(InvalidModelError):
            read(name)


@pytest.mark.parametrize("location", ["w" * 256, "/".join(["w" * 250] * 20)])
def test_a_location_that_no_file_can_have_is_refused(location):
    model = model_of("m (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }")
    tensor = model.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    with pytest.raises(InvalidModelError, match="so long a name"):
        refgrad.gradient(model)


@pytest.mark.parametrize("module", ["onnx", "typer"])
def test_a_command_that_is_interrupted_while_it_imports_says_nothing(module, tmp_path):
    if os.name == "nt":
        pytest.skip("Windows has no SIGINT for one process")
    (tmp_path / f"{module}.py").write_text(
        "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    )
    done = subprocess.run(
        [sys.executable, "-m", "refgrad", "ops"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_library_leaves_interrupts_alone():
    code = "import signal, refgrad; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run(
        [sys.executable, "-c", f"import signal; signal.signal(2, signal.default_int_handler); {code}"],
        check=True,
        timeout=60,
        cwd=ROOT,
    )


@pytest.mark.parametrize("backend", ["numpy", "ort-cpu"])
def test_a_prepared_model_says_why_it_cannot_be_pickled(backend):
    if get_backend(backend).unavailable():
        pytest.skip("not installed")
    prepared = get_backend(backend).prepare(small())
    with pytest.raises(BackendError, match="prepare it where it runs"):
        pickle.dumps(prepared)
    x = np.array([0.5, 1], np.float32)
    for copied in (copy.copy(prepared), copy.deepcopy(prepared)):
        np.testing.assert_array_equal(copied.run({"x": x})["y"], prepared.run({"x": x})["y"])


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_two_versions_of_one_domain_by_two_names_are_refused(build):
    model = small()
    model.opset_import.append(helper.make_opsetid("ai.onnx", 9))
    with pytest.raises(InvalidModelError, match="version 21 by the name '', version 9"):
        build(model)


def test_an_attribute_has_the_type_that_the_function_takes():
    text = """m (float[2] x) => (float[2] y) {{ y = f.scaled<by = {}>(x) }}
        <domain: "f", opset_import: ["": 21]> scaled <by> (x) => (y) {{
            s = Constant<value_float: float = @by>() y = Mul(x, s) }}"""
    head = '<ir_version: 10, opset_import: ["": 21, "f": 1]>'
    onnx.checker.check_model(refgrad.gradient(model_of(text.format("2.0"), head)))
    with pytest.raises(
        InvalidModelError, match="gives 'by' as ints, and Constant within the function takes it as float"
    ):
        refgrad.gradient(model_of(text.format("[2]"), head))
