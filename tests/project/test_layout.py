"""The packages are a staircase: a module imports from its own package and from packages below, so no two need each other.

Every import counts, those within functions too; those for type checkers alone do not, for they do not run. Within a package no
module needs itself by way of others: there those for type checkers count as well.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
TOPS = ("refgrad", "backends", "conformance")

# From the lowest step up. Packages on one step may not import from each other either.
STAIRCASE = (
    # the differentiator
    ("refgrad.escaping", "refgrad.installing", "refgrad.traits"),
    ("refgrad.checkout", "refgrad.errors", "refgrad.interruption", "refgrad.markup"),
    ("refgrad.links", "refgrad.notices", "refgrad.ranges", "refgrad.sizes"),
    ("refgrad.protos", "refgrad.worker"),
    ("refgrad.tables",),
    ("refgrad.builder",),
    ("refgrad.model",),
    ("refgrad.parameters",),
    ("refgrad.reverse",),
    ("refgrad.formulas",),
    ("refgrad.lowering",),
    ("refgrad.rules",),
    ("refgrad.rewrites",),
    ("refgrad.derivatives",),
    ("refgrad.recipes", "refgrad.show"),
    ("refgrad.compat.derivative",),
    ("refgrad",),  # the public names: __init__.py
    # what runs graphs
    ("refgrad.backends",),
    # what tells the cost of a run
    ("refgrad.planning",),
    # what trains, and what calls gradients in other frameworks
    ("refgrad.training",),
    ("refgrad.compat",),  # the names of onnxcustom's modules
    ("refgrad.compat.plotting", "refgrad.compat.utils"),
    ("refgrad.compat.training",),
    ("refgrad.jax", "refgrad.torch"),
    # what judges gradients
    ("refgrad.conformance.case", "refgrad.conformance.verdicts"),
    ("refgrad.conformance.cases", "refgrad.conformance.problems"),
    ("refgrad.conformance.known", "refgrad.conformance.strategies"),
    ("refgrad.conformance.oracles",),
    ("refgrad.conformance.judge",),
    ("refgrad.conformance.locating",),
    ("refgrad.conformance.reports",),
    ("refgrad.conformance.tools",),  # they read what the packages below read
    ("refgrad.conformance",),  # its public names
    ("refgrad.extend",),
    ("refgrad.microsoft",),  # a plug-in
    # what explains gradients
    ("refgrad.teaching", "refgrad.walks"),
    # the command line
    ("refgrad.cli",),
    ("refgrad.__main__",),
)
STEPS = {package: step for step, packages in enumerate(STAIRCASE) for package in packages}
# backends know nothing of derivatives: of the differentiator they may import these alone
BELOW_BACKENDS = {
    f"refgrad.{package}" for package in ("errors", "links", "model", "protos", "sizes", "tables", "traits", "worker")
}


@cache
def modules() -> dict[str, Path]:
    """Every module by name, with its file."""
    found = {}
    for top in TOPS:
        for file in sorted((ROOT / top).rglob("*.py")):
            inner = file.relative_to(ROOT).with_suffix("").parts
            parts = inner if top == "refgrad" else ("refgrad", *inner)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imports() -> tuple[tuple[str, str], ...]:
    """Each import of one module by another: both names."""
    return tuple((module, other) for module, file in modules().items() for other in read_by(file.read_text()))


def read_by(code: str, nodes=None) -> set[str]:
    """The modules of the project that a module's code imports; `nodes` are those of its tree that count."""
    found = set()
    for node in (nodes or running)(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules() else node.module for name in inner]
        else:
            continue
        found.update(name for name in names if name in modules())
    return found


def running(tree: ast.AST):
    """Every node that runs: what stands under `if TYPE_CHECKING` does not."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
                waiting.append(child)


def package(module: str) -> str:
    """The package of a module: the longest name in the staircase that begins its name; "refgrad" is `__init__` alone."""
    parts = module.split(".")
    depth = {"compat": 3, "conformance": 3}.get(parts[1] if len(parts) > 1 else "", 2)
    return ".".join(parts[:depth])


def test_every_package_is_in_the_staircase():
    assert {package(module) for module in modules()} == set(STEPS)


@pytest.mark.parametrize("name", STEPS)
def test_a_package_imports_from_lower_packages_only(name):
    upwards = {(m, other) for m, other in imports() if package(m) == name and package(other) != name}
    upwards = {(m, other) for m, other in upwards if STEPS[package(other)] >= STEPS[name]}
    assert not upwards, "move what both need to a package below both (tests/project/test_layout.py has their order)"


def test_no_module_needs_itself_by_way_of_others():
    needs = {module: read_by(file.read_text(), ast.walk) - {module} for module, file in modules().items()}
    ends = set(needs)
    while ends:  # take away what needs nothing of the others, and what none of them needs
        read = set().union(*needs.values())
        ends = {module for module, others in needs.items() if module not in read or needs.keys().isdisjoint(others)}
        needs = {module: others - ends for module, others in needs.items() if module not in ends}
    assert not needs, "these modules import each other: move what both need to one below both"


def test_backends_know_nothing_of_derivatives():
    read = {(m, other) for m, other in imports() if m.startswith("refgrad.backends")}
    assert {package(other) for _, other in read} - {"refgrad.backends"} <= BELOW_BACKENDS, read


def test_no_module_imports_the_plug_in():
    read = {(m, other) for m, other in imports() if package(other) == "refgrad.microsoft" != package(m)}
    assert not read, "the operators of ONNX Runtime are a plug-in: what others need of them belongs elsewhere"


WITHOUT = """
import sys
import onnx.parser, refgrad
from refgrad.tables import plugins
plugins.GROUP, plugins.own = "another.group", lambda: []
model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
    m (float[N] x) => (float[N] y) { y = OPERATOR(x) }''')
try:
    print(*(node.op_type for node in refgrad.gradient(model).graph.node))
    refgrad.lower(model)
except refgrad.errors.RefgradError as error:
    print(error)
assert not [name for name in sys.modules if name.startswith("refgrad.microsoft")]
"""


@pytest.mark.parametrize(
    ("op_type", "words"),
    [
        ("Tanh", ["Tanh Mul Sub Mul"]),
        ("com.microsoft.Gelu", ["com.microsoft.Gelu has no rule", "or give a rule with refgrad.extend.rule"]),
    ],
)
def test_the_core_does_without_the_plug_in(op_type, words):
    code = WITHOUT.replace("OPERATOR", op_type)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words), done.stdout


def test_an_import_in_a_function_counts_and_one_for_types_does_not():
    code = """
from typing import TYPE_CHECKING
import refgrad.worker
if TYPE_CHECKING:
    from refgrad.cli import main
def late():
    from refgrad.show import dot
    from refgrad.errors import OptionError
"""
    assert read_by(code) == {"refgrad.worker", "refgrad.show.dot", "refgrad.errors"}


def test_no_two_public_classes_share_a_name():
    found: dict[str, list[str]] = {}
    for file in (file for top in TOPS for file in sorted((ROOT / top).rglob("*.py"))):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(file.relative_to(ROOT).as_posix())
    shared = {name: files for name, files in found.items() if len(files) > 1}
    assert shared == {}
