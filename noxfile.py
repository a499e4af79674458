"""Every check that CI runs, each a session that anyone can run alone: `nox -s tests`.

ONNX Runtime and its training wheel own the same module, so each has an environment of its own.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

nox.options.sessions = [
    *("lint", "types", "tests", "conformance", "page", "torch", "training", "lowered", "package"),
]
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
os.environ.setdefault("PIP_CONSTRAINT", (ROOT / "constraints.txt").as_uri())  # a URI: pip splits a path at its spaces
TORCH_MODELS = ROOT / "build" / "torch_models"  # written by the session `torch`, read by `training`
ELSEWHERE = ("--ignore=tests/packaging",)  # the session `package` runs them
WITHOUT_RUNTIME = [  # of the interpreter alone: the session `tests` runs them
    f"--ignore=tests/test_{name}.py"
    for name in (
        *("numpy_errors", "numpy_forms", "numpy_fresh", "numpy_memory", "numpy_ml", "numpy_plan", "numpy_precision"),
        *("numpy_qlinear", "numpy_quantization", "numpy_sequence", "numpy_special", "numpy_tensor", "numpy_text"),
        *("numpy_windows", "onnx_backend"),
        *("case_tables", "journal", "limitations", "reports", "sources", "strategies", "strategies_windows", "worker"),
        *("depth", "expand_gradients", "functions_kept", "higher", "planted_structures", "recipes", "recompute"),
    )
]
OF_THE_SUITE = [  # of its runs: the session `conformance` runs them
    f"tests/test_{name}.py"
    for name in (
        *(
            "cluster",
            "conformance_cli",
            "export",
            "gradient_backend_test",
            "judge",
            "mutants",
            "oracles",
            "pytest_plugin",
        ),
        "runner",
    )
]
WITHOUT_SUITE = [f"--ignore={file}" for file in OF_THE_SUITE]
STOCK_ONLY = "--ignore=tests/test_lowered.py"  # the session `lowered` runs it, on what the session `training` wrote
PARITY = ROOT / "build" / "parity"  # written by the session `training`, read by `lowered`
ARTIFACTS = ROOT / "build" / "artifacts"  # written by `benchmarks_training`, read by `artifacts`


def pytest(session: nox.Session, *arguments: str, **env: str) -> None:
    """Run pytest with `arguments` and what stands behind `--` on the command line, in the environment `env`."""
    session.run("python", "-m", "pytest", "-q", *arguments, *session.posargs, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Every hook of pre-commit: ruff's rules, ruff's format, and that the generated tables are fresh."""
    session.install("pre-commit", "-e", ".")
    session.run("pre-commit", "run", "--all-files", "--show-diff-on-failure")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict on the installed package: from the root it would not follow the mapping of the folders."""
    session.install("mypy", "hypothesis", "pytest", "types-protobuf")
    session.install(".")
    folder = session.create_tmp()
    with session.chdir(folder):
        session.run("mypy", "-p", "refgrad", "--config-file", str(ROOT / "pyproject.toml"))


@nox.session
def tests(session: nox.Session) -> None:
    """The quick suite on the interpreter and on stock onnxruntime."""
    session.install("-e", ".[ort,test]")
    pytest(session, "-n", "2", "-m", "not models", *ELSEWHERE, *WITHOUT_SUITE, "--ignore=tests/test_lower.py")


@nox.session
def training(session: nox.Session) -> None:
    """What needs ONNX Runtime's training operators and its own builder (Python < 3.13)."""
    session.install("-e", ".[ort-training,test]")
    shutil.rmtree(PARITY, ignore_errors=True)
    folders = {"REFGRAD_TORCH_MODELS": str(TORCH_MODELS), "REFGRAD_PARITY": str(PARITY)}
    pytest(session, "-n", "2", "-m", "not models", *ELSEWHERE, *WITHOUT_RUNTIME, *WITHOUT_SUITE, STOCK_ONLY, **folders)


@nox.session
def lowered(session: nox.Session) -> None:
    """Every operator lowered, and what those of training computed in the session `training`, on stock onnxruntime."""
    session.install("-e", ".[ort,test]")
    pytest(session, "-n", "2", "tests/test_lower.py", "tests/test_lowered.py", REFGRAD_PARITY=str(PARITY))


@nox.session
def parity(session: nox.Session) -> None:
    """docs/parity.md, measured anew: minutes; after `torch`, whose models it reads."""
    session.install("-e", ".[ort-training,test]")
    session.run("python", "benchmarks/parity.py", str(TORCH_MODELS))
    session.run("python", "docs/generate.py")


@nox.session
def torch(session: nox.Session) -> None:
    """Nine models as torch's exporter writes them, and every operator that torch has, against torch.autograd."""
    session.install("torch")
    session.install("-e", ".[ort,torch,test]")
    shutil.rmtree(TORCH_MODELS, ignore_errors=True)
    session.run("python", "examples/torch_models.py", str(TORCH_MODELS))
    names = ("torch", "oracles_foreign", "kinks", "losses", "numpy_recurrent", "recipes", "higher")
    exported = ("torch_operators", "torch_structure")
    rules = ("recurrent", "quantization", "sampling")
    files = [f"tests/test_{name}.py" for name in (*names, *exported, *(f"rules_{name}" for name in rules))]
    pytest(session, "-m", "not models", *files, REFGRAD_TORCH_MODELS=str(TORCH_MODELS))


@nox.session
def conformance(session: nox.Session) -> None:
    """The suite's own tests, and a part of it on every operator; the whole matrix: `nox -s conformance -- --every 1`."""
    session.install("-e", ".[ort,test]")
    session.run("python", "-m", "pytest", "-q", "-n", "2", *OF_THE_SUITE)
    matrix = ("--dtype=float32", "--backend=numpy,ort-cpu", "--limitations=docs/limitations.toml", "--every=12")
    session.run("refgrad", "conformance", "run", *matrix, *session.posargs)


@nox.session
def page(session: nox.Session) -> None:
    """The page of conformance results in headless Chromium, which has to be installed; REFGRAD_BROWSER may name its program."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    if not os.environ.get("REFGRAD_BROWSER") and not any(map(shutil.which, names)):
        session.error("There is no Chromium: install the package chromium, or set REFGRAD_BROWSER to its program.")
    session.install("playwright", "-e", ".[test]")
    pytest(session, "tests/test_report_page.py")


@nox.session
def package(session: nox.Session) -> None:
    """A wheel, an editable install and a bare checkout all find every package."""
    session.install("build", "pytest")
    pytest(session, "tests/packaging", "-p", "no:cacheprovider")


@nox.session
def models(session: nox.Session) -> None:
    """All architectures against torch.autograd (docs/models.md); `refgrad check` on the nine that onnx ships: minutes."""
    session.install("torch")
    session.install("-e", ".[ort,torch,test]")
    results = ROOT / "benchmarks" / "results" / "models.json"
    session.run("python", "examples/torch_models.py", str(TORCH_MODELS), "--all", "--save", str(results))
    session.run("python", "docs/generate.py")
    files = ("tests/test_torch.py", "tests/test_check.py", "tests/test_numpy_models.py")
    pytest(session, "-m", "models", *files, REFGRAD_TORCH_MODELS=str(TORCH_MODELS))


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Every benchmark that stock onnxruntime can run, and the README's table."""
    session.install("torch")
    session.install("-e", ".[ort,torch]")
    session.run("python", "examples/torch_models.py", str(TORCH_MODELS))
    for script in ("import_time", "memory", "recompute", "depth", "node_tests"):
        session.run("python", f"benchmarks/{script}.py")
    session.run("python", "benchmarks/run_time.py", str(TORCH_MODELS), env={"PYTHONPATH": "examples"})
    for script in ("interpreter", "interpreter_memory"):
        session.run("python", f"benchmarks/{script}.py", str(TORCH_MODELS))
    session.run("python", "docs/generate.py")


@nox.session
def benchmarks_training(session: nox.Session) -> None:
    """The benchmarks against ONNX Runtime's own gradient builder; after `benchmarks`, whose models it reads."""
    session.install("-e", ".[ort-training]")
    session.run("python", "benchmarks/build_time.py")
    session.run("python", "benchmarks/run_time.py", str(TORCH_MODELS))
    session.run("python", "benchmarks/artifacts.py", "write", str(TORCH_MODELS), str(ARTIFACTS))
    session.run("python", "docs/generate.py")


@nox.session
def artifacts(session: nox.Session) -> None:
    """Three steps of training ResNet-18 by lowered artifacts (docs/parity.md), which `benchmarks_training` wrote."""
    session.install("-e", ".[ort]")
    session.run("python", "benchmarks/artifacts.py", "compare", str(TORCH_MODELS), str(ARTIFACTS))
    session.run("python", "docs/generate.py")
