"""`refgrad.backends` and `refgrad.conformance` are found in a wheel, in an editable install and in a bare checkout."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT = "import refgrad.backends.numpy, refgrad.conformance, refgrad.rules.arithmetic; print(refgrad.__file__)"


def run(*command, cwd):
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module", params=["wheel", "editable", "none"])
def python(request, tmp_path_factory, make_environment):
    """An interpreter with refgrad installed in one of the three ways."""
    folder = tmp_path_factory.mktemp(request.param)
    make_environment(folder)
    executable = str(folder / "bin" / "python")
    if request.param == "wheel":
        run(executable, "-m", "pip", "install", "-q", ".", cwd=ROOT)
    elif request.param == "editable":
        run(executable, "-m", "pip", "install", "-q", "-e", ".", cwd=ROOT)
    return request.param, executable


def test_imports_from_the_root_of_a_checkout(python):
    _, executable = python
    assert str(ROOT) in run(executable, "-c", IMPORT, cwd=ROOT)


def test_imports_from_elsewhere(python, tmp_path):
    how, executable = python
    if how == "none":
        (tmp_path / "refgrad").symlink_to(ROOT / "refgrad")  # resolved, so the neighbours are found
    run(executable, "-c", IMPORT, cwd=tmp_path)


def test_modules_are_packaged(python):
    """A wheel has every module, and every file that a module reads."""
    how, executable = python
    if how != "wheel":
        pytest.skip("only a wheel leaves files out")
    places = {"backends": "refgrad.backends", "conformance": "refgrad.conformance", "refgrad/walks": "refgrad.walks"}
    for top, module in places.items():
        code = f"import {module} as t; print(t.__path__[0])"
        installed = Path(run(executable, "-c", code, cwd=Path(sys.prefix)).strip())
        for kind in ("*.py", "*.toml", "*.json", "*.html", "*.css", "*.js"):
            expected = {f.relative_to(ROOT / top) for f in (ROOT / top).rglob(kind)}
            assert {f.relative_to(installed) for f in installed.rglob(kind)} == expected


def test_of_the_reports_only_what_exports_quote_is_packaged(python):
    how, executable = python
    code = "import refgrad.reports as r; print(r.__path__[0])"
    installed = Path(run(executable, "-c", code, cwd=Path(sys.prefix)).strip()) if how != "none" else ROOT / "reports"
    assert (installed / "known_failures.json").is_file()
    if how == "wheel":
        assert {path.name for path in installed.iterdir()} - {"__pycache__"} == {"__init__.py", "known_failures.json"}
