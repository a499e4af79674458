"""The releases that the sessions install are those that the records are about, and every direct dependency has one."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from refgrad.conformance.known.bugs.bug import ORT, REFERENCE, VERSIONS
from refgrad.conformance.known.bugs.builders.bug import BUILDER_VERSIONS, ONNX_AD
from refgrad.tables.torch_functions import RELEASE

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = {pin.name: pin for pin in map(Requirement, filter(None, (line.partition("#")[0].strip() for line in LINES)))}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = [
    requirement
    for texts in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for requirement in map(Requirement, texts)
    if requirement.name != PROJECT["name"]  # an extra that is part of another
]

# They run a device, or are pinned in pyproject.toml for the interpreters and systems that have them.
ELSEWHERE = ("onnxruntime-gpu", "onnxruntime-training", "onnxruntime-training-cpu")


def release(name: str) -> str:
    [specifier] = PINS[name].specifier
    assert specifier.operator == "=="
    return specifier.version


def test_the_table_of_kinks_is_about_the_release_of_torch_that_is_installed():
    assert release("torch").rpartition(".")[0] == RELEASE


def test_findings_are_about_the_releases_that_are_installed():
    assert release("onnx") == VERSIONS[REFERENCE]
    assert release("onnxruntime") == VERSIONS[ORT]
    assert release("onnx-ad") == BUILDER_VERSIONS[ONNX_AD]


def test_every_direct_dependency_has_one_in_its_range():
    for requirement in REQUIREMENTS:
        if requirement.name not in ELSEWHERE:
            assert release(requirement.name) in requirement.specifier, requirement


def test_every_direct_dependency_has_a_lowest_release_and_only_one():
    lowest = {}
    for requirement in REQUIREMENTS:
        [bound] = requirement.specifier
        assert bound.operator in (">=", "=="), requirement
        assert lowest.setdefault(requirement.name, bound.version) == bound.version


def test_what_is_said_to_install_is_an_extra():
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "refgrad").rglob("*.py")]
    texts += [*(ROOT / "backends").rglob("*.py"), *(ROOT / "conformance").rglob("*.py"), ROOT / "noxfile.py"]
    installed = r"(?:(?:pip install|-e)\b[^\n`]*?['\" ]|')(?:refgrad|\.)\[([a-z, -]+)\]"
    named = [
        (file, name.strip())
        for file in texts
        for text in re.findall(installed, file.read_text(encoding="utf-8"))
        for name in text.split(",")
    ]
    assert len(named) > 20
    assert not [one for one in named if one[1] not in PROJECT["optional-dependencies"]]


def installed_by_name(noxfile: str) -> set[str]:
    """The packages that sessions install by name alone: no options, no paths, and no releases that a program computes."""
    arguments: list[ast.expr] = []
    for node in ast.walk(ast.parse(noxfile)):
        if isinstance(node, ast.Call):
            skipped = {"session.install": 0, "environment": 2}.get(ast.unparse(node.func))
            arguments += node.args[skipped:] if skipped is not None else []
        elif (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "STOCK"
            and isinstance(node.value, ast.Tuple)
        ):
            arguments += node.value.elts
    names = (one.value for one in arguments if isinstance(one, ast.Constant))
    return {name for name in names if not name.startswith(("-", "."))}


def test_what_the_sessions_install_by_name_has_one():
    names = installed_by_name((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    assert {"mypy", "pytest", "twine"} <= names
    assert names <= PINS.keys()


def test_what_is_installed_by_name_is_read_of_calls_alone():
    noxfile = """
STOCK = ("mypy", "-e", ".[ort]")
environment(session, "own", "black")
session.install("build", *STOCK, f"a @ {wheel.as_uri()}", env=lowest(session, "onnx"))
session.run("pip", "install")
"""
    assert installed_by_name(noxfile) == {"mypy", "black", "build"}


def test_limitations_are_those_of_the_release_that_is_installed():
    first, *_ = (ROOT / "docs" / "limitations.toml").read_text(encoding="utf-8").splitlines()
    assert f"ONNX Runtime {release('onnxruntime')}, " in first
