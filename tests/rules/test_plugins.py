"""Operators of other packages: every command and every process that it starts knows them."""

import json
import os
import pickle
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import pytest
from registering import forgetting

import refgrad
from refgrad import checkout
from refgrad.cli import main
from refgrad.conformance import tables
from refgrad.errors import OptionError, PluginError
from refgrad.tables import plugins
from refgrad.tables.registry import RULES

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

OPERATORS = '''
"""Cubed, of my.domain."""
import numpy as np
from refgrad.extend import case, forward, kernel, rule


@rule("Cubed", domain="my.domain")
def cubed(op, d_y, x, *, scale=1.0):
    """dx = 3·scale·x²·dy"""
    return op.Mul(op.Mul(op.Mul(x, x), 3 * scale), d_y)


@kernel("Cubed", domain="my.domain")
def cubed_in_numpy(x, *, scale=1.0):
    return scale * x**3


@forward("Cubed", domain="my.domain", analytic=True)
def cubed_by_products(x, scale=1.0):
    return scale * (x * x) * x


@case("Cubed", domain="my.domain")
def cubed_cases(make):
    yield make(np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3))
    yield make(np.linspace(-2, 2, 6, dtype=np.float32), scale=2.0)
'''
TEXT = """<ir_version: 8, opset_import: ["": 18, "my.domain": 1]> m (float[N] x) => (float[N] y)
{ a = my.domain.Cubed <scale = 2.0> (x) y = Neg(a) }"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module `cubed_operators` and a model, in which the command runs."""
    (tmp_path / "cubed_operators.py").write_text(OPERATORS)
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "model.onnx")
    np.savez(tmp_path / "feeds.npz", x=np.array([1, 2, -3], np.float32))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    return tmp_path


def refgrad_command(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which knows nothing of what this one imported."""
    path = os.pathsep.join((str(Path(refgrad.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])))
    env = {**os.environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, "-m", "refgrad", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=env)


COMMANDS = {
    "grad": ("model.onnx", "-o", "gradient.onnx"),
    "check": ("model.onnx", "--backends", "numpy", "--feeds", "feeds.npz"),
    "run": ("model.onnx", "--feeds", "feeds.npz"),
    "preflight": ("model.onnx",),
    "explain": ("my.domain.Cubed",),
    "ops": (),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_knows_the_operators_of_a_module(folder: Path, command: str) -> None:
    done = refgrad_command(folder, command, *COMMANDS[command], "--import", "cubed_operators")
    assert done.returncode == 0, done.stderr
    if command in ("preflight", "explain", "ops"):
        assert "my.domain.Cubed" in done.stdout
        assert "dx = 3·scale·x²·dy" in done.stdout


@pytest.mark.parametrize(
    ("before", "after", "variables"),
    [
        (("--import", "cubed_operators"), (), {}),
        (("--import=cubed_operators",), (), {}),
        ((), ("--import=cubed_operators", "--import", "json"), {}),
        ((), (), {"REFGRAD_IMPORT": "json, cubed_operators"}),
    ],
)
def test_every_way_to_name_a_module(
    folder: Path, before: tuple[str, ...], after: tuple[str, ...], variables: dict[str, str]
) -> None:
    done = refgrad_command(folder, *before, "preflight", "model.onnx", *after, **variables)
    assert done.returncode == 0, done.stderr


def test_the_workers_of_the_suite_know_them(folder: Path) -> None:
    told = ("--ops", "my.domain.Cubed", "--workers", "1", "-o", "results.json")
    done = refgrad_command(folder, "conformance", "run", *told, "--import", "cubed_operators")
    assert done.returncode == 0, done.stderr + done.stdout
    results = json.loads((folder / "results.json").read_text())
    assert {case[1] for case in results["cases"]} == {"my.domain.Cubed"}
    assert {(pair["builder"], pair["verdicts"]) for pair in results["pairs"]} == {
        ("refgrad", "aa"),
        ("refgrad:ort", "aa"),
    }


def test_a_wrong_rule_is_found_by_the_workers(folder: Path) -> None:
    (folder / "cubed_operators.py").write_text(OPERATORS.replace("3 * scale", "3.01 * scale"))
    done = refgrad_command(
        folder, "conformance", "run", "--ops", "my.domain.Cubed", "--workers", "1", "--import", "cubed_operators"
    )
    assert done.returncode == 1
    assert "4 faults" in done.stdout


def test_without_the_module_the_operator_has_no_rule(folder: Path) -> None:
    done = refgrad_command(folder, "preflight", "model.onnx")
    assert done.returncode == 2
    assert "my.domain.Cubed" in done.stdout + done.stderr


BROKEN = {
    "nowhere": ("", "ModuleNotFoundError: No module named 'nowhere'."),
    "fails": ("1 / 0", "ZeroDivisionError: division by zero."),
    "leaves": ("raise SystemExit(0)", "SystemExit: 0."),
    "misspelt": (OPERATORS.replace("op, d_y, x, *, scale", "op, x, *, scale"), "names no output"),
    "second": (OPERATORS + OPERATORS.replace("def cubed(", "def other("), "my.domain.Cubed has a rule already"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_module_that_cannot_be_imported_is_one_message(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = BROKEN[name]
    if text:
        (folder / f"{name}.py").write_text(text)
    with forgetting():
        assert main(["--import", name, "ops"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"refgrad: The module {name!r}, named by --import or REFGRAD_IMPORT, cannot be imported: ")
    assert message in said
    assert "Traceback" not in said
    assert os.environ.get(plugins.VARIABLE) is None


@pytest.mark.parametrize("arguments", [["ops", "--import"], ["--import=", "ops"], ["--import", "--json", "ops"]])
def test_the_option_needs_a_module(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "--import takes the name of a module" in capsys.readouterr().err


def test_what_stands_behind_two_dashes_is_left_alone() -> None:
    split = plugins.split_arguments(["check", "--import", "a,b", "--", "--import", "c"])
    assert split == (["a", "b"], ["check", "--", "--import", "c"])
    with pytest.raises(OptionError):
        plugins.split_arguments(["--import"])


def test_help_shows_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "--import MODULE" in capsys.readouterr().out


class _Distribution:
    name, version = "my-operators", "1.2"


class _Point:
    name, value, dist = "cubed", "cubed_operators", _Distribution

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def load(self) -> None:
        if self.error is not None:
            raise self.error
        exec(compile(OPERATORS, "cubed_operators.py", "exec"), {"__name__": "cubed_operators"})


def test_an_entry_point_is_loaded_with_the_first_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_loaded", None)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [_Point()] if group == "refgrad.operators" else [])
    with forgetting():
        gradient = refgrad.gradient(onnx.parser.parse_model(TEXT))
        assert ("my.domain", "Cubed") in RULES
    assert "Mul" in {node.op_type for node in gradient.graph.node}


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("cubed.py", "'cubed.py' is a file: give the module's name: --import cubed."),
        (
            "else/where/cubed.py",
            "'else/where/cubed.py' is a file: give the module's name, in the folder 'else/where' or with that folder in "
            "PYTHONPATH: --import cubed.",
        ),
        ("no_such_module", "Give the name of an installed module, or of one in the current folder"),
    ],
)
def test_a_file_instead_of_a_module_is_said(folder: Path, given: str, advice: str) -> None:
    with pytest.raises(PluginError) as caught, plugins.importing([given]):
        pass
    assert f"The module {given!r}, named by --import or REFGRAD_IMPORT, cannot be imported" in str(caught.value)
    assert advice in str(caught.value)


def test_a_broken_entry_point_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_loaded", None)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [_Point(ImportError("no module named numba"))])
    message = (
        r"package my-operators 1\.2 .*'cubed' .* is 'cubed_operators', and that raised ImportError: no module .*numba\."
    )
    for _ in range(2):  # it is not forgotten
        with pytest.raises(PluginError, match=message):
            refgrad.gradient(onnx.parser.parse_model(TEXT))


def test_a_module_may_read_a_model_while_it_is_imported(folder: Path) -> None:
    reading = f"import onnx, refgrad\nrefgrad.gradient(onnx.parser.parse_model('''{TEXT}'''))\n"
    (folder / "reads.py").write_text(OPERATORS + reading)
    with forgetting(), plugins.importing(["reads"]):
        assert ("my.domain", "Cubed") in RULES


def test_importing_refgrad_looks_for_no_package() -> None:
    code = """import refgrad, sys
print([m for m in ('importlib.metadata', 'refgrad.backends', 'hypothesis') if m in sys.modules])"""
    env = {**os.environ, "PYTHONPATH": str(Path(refgrad.__file__).parents[1])}
    before = "import onnx, sys; print('importlib.metadata' in sys.modules)"
    there = subprocess.run([sys.executable, "-c", before], capture_output=True, text=True, check=True).stdout.strip()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == ("['importlib.metadata']" if there == "True" else "[]")


def test_the_author_imports_nothing_that_a_rule_does_not_need() -> None:
    code = """import sys; from refgrad.extend import case, forward, rule, strategy, zero
print([m for m in ('refgrad.backends', 'refgrad.conformance', 'hypothesis') if m in sys.modules])"""
    env = {**os.environ, "PYTHONPATH": str(Path(refgrad.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("x = 1\n1 / 0\n", "mend what {file}:2 does."),
        ("import no_such_dependency\n", "mend what {file}:1 does."),
        ("x = 1\ndef (\n", "mend {file}:2."),
        (
            "from refgrad.extend import rule\n"
            "rule('Bad', domain='a.b', refused={'zz': 'no'})(lambda op, d_y, x: d_y)\n",
            "mend what {file}:2 does.",
        ),
    ],
)
def test_a_module_that_is_found_and_fails_is_to_be_mended(text, advice, tmp_path, monkeypatch, capsys):
    name = f"found_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--import", name, "backends"]) == 2
    said = capsys.readouterr().err
    assert f"The module was found: {advice.format(file=tmp_path / f'{name}.py')}" in said
    assert "Give the name of an installed module" not in said


FRESH = {
    "threads that read a model and import what plug-ins import": """
import importlib, threading
import onnx.parser, refgrad
model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
    m (float[N] x) => (float[N] y) { y = com.microsoft.Gelu(x) }''')
threads = [threading.Thread(target=refgrad.gradient, args=(model,)) for _ in range(3)]
modules = ("refgrad.extend", "refgrad.microsoft") * 2
threads += [threading.Thread(target=importlib.import_module, args=(module,)) for module in modules]
for thread in reversed(threads):
    thread.start()
for thread in threads:
    thread.join()
""",
    "a case that another process made": """
import pickle, sys
case = pickle.loads(bytes.fromhex(sys.argv[1]))
assert case.model.graph.node[-1].op_type == "Gelu"
""",
}


@pytest.mark.parametrize("what", FRESH)
def test_the_own_plug_ins_are_there_in_a_fresh_process(what: str) -> None:
    case = next(case for case in tables(["com.microsoft.Gelu"]) if case.operator == "com.microsoft.Gelu")
    done = subprocess.run(
        [sys.executable, "-c", FRESH[what], pickle.dumps(case).hex()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_copy_without_metadata_has_the_plug_ins_that_it_contains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "project_file", lambda: None)
    monkeypatch.setattr(plugins, "_entry_points", tuple)
    assert plugins.own() == ["refgrad.microsoft"]


@pytest.mark.parametrize("text", ["[tool.ruff]\n", '[project]\nname = "app"\n', None])
def test_the_project_file_of_another_project_is_not_read(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "backends").mkdir()
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.setattr(checkout, "_ROOT", tmp_path)
    assert checkout.project_file() is None
