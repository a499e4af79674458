"""The package that docs/add_an_operator.md spells out, installed in an environment of its own: every command knows it."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add_an_operator.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```\w+\n# ([\w.]+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
CONSOLES = [
    re.findall(r"^\$ (.*)$", block, re.MULTILINE) for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
]
NAME = "my.domain.SquaredHinge"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_environment):
    """The files of the page, and an environment with refgrad beside them."""
    made = tmp_path_factory.mktemp("squared_hinge")
    for name, text in FILES.items():
        (made / name).write_text(text, encoding="utf-8")
    make_environment(made / "venv")
    run("pip install -q " + f"{ROOT} hypothesis", made)
    return made


def run(command, folder, expected=0):
    """A line of the page, in the environment of the folder."""
    programs = folder / "venv" / "bin"
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "REFGRAD_IMPORT")}
    env["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == expected, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_page_spells_out_the_files():
    assert set(FILES) == {"pyproject.toml", "squared_hinge.py", "model.py"}
    assert [len(console) for console in CONSOLES] == [9, 3]


def test_one_module_is_enough(folder):
    """Before the package is installed."""
    run("python model.py", folder)
    assert "no rule" in run("refgrad preflight model.onnx --wrt w 2>&1", folder, expected=2)
    for command in CONSOLES[1]:
        assert run(command, folder)


def test_every_command_of_the_page(folder):
    said = {command: run(command, folder) for command in CONSOLES[0]}
    by_command = {command.split()[1]: text for command, text in said.items()}
    assert "dscores = −2·labels·g·dloss" in by_command["explain"]
    assert f"{NAME} " in by_command["ops"]
    assert re.search(rf"{re.escape(NAME)} +1 +rule", by_command["preflight"])
    assert "right: " in by_command["check"]
    assert "0 faults in 12 verdicts (6 cases" in by_command["conformance"]
    assert (folder / "gradient.onnx").is_file()


def test_workers_know_it_where_it_is_installed_alone(folder):
    run("mkdir -p elsewhere && mv squared_hinge.py elsewhere/", folder)  # so that the installed one is found
    try:
        run(f"refgrad conformance run --ops {NAME} --workers 2 -o results.json", folder)
    finally:
        run("mv elsewhere/squared_hinge.py .", folder)
    pairs = json.loads((folder / "results.json").read_text())["pairs"]
    assert {pair["verdicts"] for pair in pairs} == {"aaaaaa"}


def test_it_lacks_nothing(folder):
    code = f"from refgrad.conformance.tools.coverage import report; print(repr(report('{NAME}')))"
    assert run(f'python -c "{code}"', folder).strip() == "''"


def test_the_gradient_is_right(folder):
    (folder / "right.py").write_text(
        """
import numpy as np, refgrad
from refgrad.backends import get_backend
gradient = get_backend("numpy").prepare(refgrad.gradient("model.onnx", wrt=["w"]))
rng = np.random.default_rng(0)
x, w, t = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 3), (3, 1), (5, 1)))
found = gradient.run({"x": x, "w": w, "t": t, "loss_grad": np.array(1, np.float32)})["w_grad"]
gap = np.maximum(0, 2 - t * (x @ w))
np.testing.assert_allclose(found, x.T @ (-2 * t * gap) / 5, rtol=1e-5)
print("right")
""",
        encoding="utf-8",
    )
    assert run("python right.py", folder).strip() == "right"


def test_a_broken_module_names_the_package(folder):
    text = FILES["squared_hinge.py"]
    (folder / "squared_hinge.py").write_text(
        text.replace("def squared_hinge(op, d_loss", "def squared_hinge(op, dloss")
    )
    try:
        run("pip install -q --no-deps .", folder)
        said = run("refgrad ops 2>&1", folder, expected=2)
        assert "The operators of the package squared-hinge 0.1 cannot be loaded" in said
        assert "names no output" in said
        assert "Traceback" not in said
    finally:
        (folder / "squared_hinge.py").write_text(text)
        run("pip install -q --no-deps .", folder)
