"""The sessions of nox: tests, measurements, builds. Anyone can run each alone: `nox -s tests`.

ONNX Runtime and its training wheel own the same module, so each has an environment of its own.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "tests"]  # what vouches for an install and for a change
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
os.environ.setdefault("PIP_CONSTRAINT", (ROOT / "constraints.txt").as_uri())  # a URI: pip splits a path at its spaces
os.environ.setdefault("PIP_NO_COMPILE", "1")  # half of an installation would compile what nothing imports
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of thousands of processes would compile the package: a second
SAMPLE = "REFGRAD_SAMPLE"  # see tests/conftest.py
os.environ.setdefault(SAMPLE, "8")  # of so many tests of a matrix, the sessions of CI run one
STOCK = ("mypy", "pre-commit", "types-networkx", "types-protobuf", "-e", ".[ort,test]")
TORCH_MODELS = ROOT / "build" / "torch_models"  # whole models; `torch` and others write them, many sessions read them
PARITY = ROOT / "build" / "parity"  # written by the session `training`, read by `lowered`
ARTIFACTS = ROOT / "build" / "artifacts"  # written by `benchmarks_training`, read by `artifacts`
RUNTIMES = ROOT / "build" / "runtimes"  # written by the session of that name
SCOREBOARD = ROOT / "build" / "scoreboard"  # so too: all verdicts, which are too large for reports/
CI = (  # what .ci/run runs: the default sessions and then the first of these lines, and the second line beside them
    ("thorough", "jets"),
    ("torch", "training", "lowered", "jax", "page", "package", "conformance"),
)
ENVIRONMENTS = {  # what the session `runtimes` installs for each runtime
    "jaxonnxruntime": ("jaxonnxruntime", "absl-py", "onnx"),
    "onnx.reference": ("onnx",),
    "onnx2torch": ("torch", "onnx2torch", "onnx"),
    "onnxruntime": ("onnxruntime", "ml_dtypes"),
    "openvino": ("openvino", "ml_dtypes"),
    "tinygrad": ("tinygrad", "onnx"),
    "tract": ("tract", "numpy"),
}
PAIRED = {  # what the session `pairs` installs for each system that is compared with refgrad
    "onnx2torch": ENVIRONMENTS["onnx2torch"],
    "onnxruntime-1.17": ("onnxruntime==1.17.3", "numpy<2"),
    "openvino": ENVIRONMENTS["openvino"],
    "tinygrad": ENVIRONMENTS["tinygrad"],
    "training": ("-e", ".[ort-training,test]"),
}
NODE_RUNTIMES = {"onnxruntime-node": "1.30.0", "onnxruntime-web": "1.30.0"}
WORKERS = os.environ.get("REFGRAD_WORKERS", "2")
SLOW = {  # the session that runs the slow tests of these folders; `thorough` runs the others
    "conformance": ("tests/conformance/judge/", "tests/conformance/reports/", "tests/conformance/running/"),
    "lowered": ("tests/lowering/",),
}
QUICK = ("-n", WORKERS, "--dist", "worksteal", "-m", "not models")
Run = Callable[..., None]  # it runs a program of an environment; its keywords are variables
CUDA = (
    "tests/backends/test_cuda.py",
    "tests/backends/test_backends_onnxruntime.py",
    "tests/training/test_training.py",
    "tests/frameworks/test_torch_module.py",
)


def marked(mark: str) -> list[str]:
    """The test files whose `pytestmark` has this mark, or a test of which has it; pyproject.toml says what the marks mean."""
    named = re.compile(rf"^(pytestmark = (\[[^]]*)?|@)pytest\.mark\.{mark}\b", re.MULTILINE)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [file.relative_to(ROOT).as_posix() for file in files if named.search(file.read_text(encoding="utf-8"))]


def slow(name: str) -> list[str]:
    """The test files with the mark `slow` that the session of this name runs: those of its folders, or of no session's."""
    return [
        file
        for file in sorted({*marked("slow")} - {*marked("browser")})
        if name == next((one for one, folders in SLOW.items() if file.startswith(folders)), "thorough")
    ]


def without(*marks: str) -> list[str]:
    """The arguments with which pytest leaves these files out, and those of the session `package`."""
    return ["--ignore=tests/packaging", *(f"--ignore={file}" for mark in marks for file in marked(mark))]


def environment(session: nox.Session, name: str, *what: str) -> Run:
    """Install into the environment `.nox/NAME`, which sessions share, what is not there yet; return what runs its programs."""
    programs = ROOT / ".nox" / name / ("Scripts" if os.name == "nt" else "bin")
    files = [(ROOT / file).read_text(encoding="utf-8") for file in ("pyproject.toml", "constraints.txt")]
    asked, installed = repr((what, str(ROOT), os.environ["PIP_CONSTRAINT"], files)), programs.parent / "installed"
    if not programs.is_dir():
        session.run(sys.executable, "-m", "venv", str(programs.parent), external=True)
    if not (installed.is_file() and installed.read_text(encoding="utf-8") == asked):
        pip = (str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        session.run(*pip, *what, external=True)
        installed.write_text(asked, encoding="utf-8")
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"

    def run(program: str, *arguments: str, **env: str) -> None:
        session.run(str(programs / program), *arguments, env={"PATH": path, **env}, external=True)

    return run


def own(session: nox.Session) -> Run:
    """What runs the programs of the session's own environment."""
    return lambda *command, **env: session.run(*command, env=env)


def pytest(session: nox.Session, run: Run, *arguments: str, **env: str) -> None:
    """Run pytest with `arguments`: a sample of every matrix. With what stands behind `--` on the command line: all of it."""
    run(
        "python",
        "-m",
        "pytest",
        "-q",
        *arguments,
        *session.posargs,
        **({SAMPLE: "1"} if session.posargs else {}),
        **env,
    )


def onnxruntime_headers(session: nox.Session) -> dict[str, str]:
    """Where the header of ONNX Runtime's C API is, for the tests: what the caller set, else Debian's package, else nowhere."""
    if os.environ.get("REFGRAD_ORT_INCLUDE") or not shutil.which("apt-get"):
        return {}
    place = Path(session.create_tmp()).resolve() / "headers"
    (place / "lists").mkdir(parents=True, exist_ok=True)
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (place / "sources.list").write_text(f"deb [signed-by={keys}] http://deb.debian.org/debian trixie main\n")
    settings = {"Etc::sourcelist": "sources.list", "Etc::sourceparts": "none", "State::lists": "lists"}
    options = [word for key, name in settings.items() for word in ("-o", f"Dir::{key}={place / name}")]
    anyhow = {"external": True, "success_codes": range(256), "silent": True}
    with session.chdir(place):
        session.run("apt-get", *options, "update", **anyhow)
        session.run("apt-get", *options, "download", "libonnxruntime-dev", **anyhow)
        for file in place.glob("libonnxruntime-dev*.deb"):
            session.run("dpkg", "-x", file.name, "package", **anyhow)
    found = place / "package" / "usr" / "include" / "onnxruntime"
    return {"REFGRAD_ORT_INCLUDE": str(found)} if found.is_dir() else {}


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Every hook of pre-commit: ruff's rules and format, the workflows, and that the generated tables are fresh."""
    run = environment(session, "stock", *STOCK)
    run("pre-commit", "run", "--all-files", "--show-diff-on-failure")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """mypy --strict on the checkout."""
    environment(session, "stock", *STOCK)("mypy")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """The quick suite on the interpreter and on stock onnxruntime."""
    run = environment(session, "stock", *STOCK)
    pytest(session, run, *QUICK, *without("browser", "jax", "slow", "training"))


@nox.session(venv_backend="none")
def thorough(session: nox.Session) -> None:
    """The slow tests on the interpreter and stock onnxruntime: operators in every variant, type and size, onnx's node tests."""
    run = environment(session, "stock", *STOCK)
    pytest(session, run, *QUICK, *slow("thorough"))


@nox.session(venv_backend="none")
def conformance(session: nox.Session) -> None:
    """The suite's own tests, and one of twelve cases of every operator; the whole matrix: `REFGRAD_SAMPLE=1`."""
    run = environment(session, "stock", *STOCK)
    run("python", "-m", "pytest", "-q", *QUICK, *slow("conformance"))
    every = "1" if os.environ[SAMPLE] == "1" else "12"
    matrix = ("--dtype=float32", "--backend=numpy,ort-cpu", "--limitations=docs/limitations.toml", f"--every={every}")
    run("refgrad", "conformance", "run", *matrix, *session.posargs)


@nox.session(venv_backend="none")
def jets(session: nox.Session) -> None:
    """Compare derivatives of order 1 to 3 at special points with Taylor arithmetic; minutes."""
    environment(session, "stock", *STOCK)("python", "-m", "refgrad.conformance.tools.jets", *session.posargs)


@nox.session(venv_backend="none")
def lowered(session: nox.Session) -> None:
    """Every training operator lowered, and what the session `training` computed, on stock onnxruntime."""
    run = environment(session, "stock", *STOCK)
    pytest(session, run, *QUICK, *slow("lowered"), REFGRAD_PARITY=str(PARITY))


@nox.session(venv_backend="none")
def quick(session: nox.Session) -> None:
    """Everything that touches one operator, in seconds: `nox -s quick -- Softsign`."""
    environment(session, "stock", *STOCK)("python", "tests/one_operator.py", *session.posargs)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Mutated models for ten minutes, then random graphs for five. For graphs alone: `nox -s fuzz -- --graphs --jobs 2`."""
    run = environment(session, "stock", *STOCK)
    fuzzing = ("python", "-W", "ignore", "-m", "refgrad.conformance.tools.fuzzing")
    run(*fuzzing, *session.posargs)
    if not session.posargs:
        run(*fuzzing, "--graphs", "--seconds", "300")


@nox.session
def fuzz_reader(session: nox.Session) -> None:
    """The coverage-guided fuzzer (atheris) on what reads a model for an hour: `nox -s fuzz_reader -- --seconds 600`."""
    if not sys.platform.startswith("linux") or sys.version_info[:2] >= (3, 15):
        session.skip("atheris has no wheel for this Python and system: Linux, Python 3.11 to 3.14.")
    session.install("atheris", "-e", ".")
    session.run("python", "-m", "refgrad.conformance.tools.fuzzing.reader", *session.posargs)


@nox.session
def training(session: nox.Session) -> None:
    """What needs ONNX Runtime's training operators and its own builder (Python < 3.13)."""
    session.install("-e", ".[ort-training,test]")
    shutil.rmtree(PARITY, ignore_errors=True)
    env = {"REFGRAD_TORCH_MODELS": str(TORCH_MODELS), "REFGRAD_PARITY": str(PARITY), "REFGRAD_SAMPLE_ALL": "1"}
    pytest(session, own(session), *QUICK, *without("browser", "interpreter", "jax", "stock"), **env)


@nox.session
def parity(session: nox.Session) -> None:
    """reports/parity.md, measured anew: minutes; after `torch`, whose models it reads."""
    session.install("-e", ".[ort-training,test]")
    session.run("python", "benchmarks/parity.py", str(TORCH_MODELS))
    session.run("python", "docs/generate.py")


@nox.session(venv_backend="none")
def torch(session: nox.Session) -> None:
    """Models as torch's exporter writes them, every operator that torch has, and layers of torch, against torch.autograd."""
    mpi = () if os.name == "nt" else ("mpi4py", "openmpi")
    run = environment(session, "frameworks", "torch", *mpi, "-e", ".[ort,torch,exports,arrow,test]")
    shutil.rmtree(TORCH_MODELS, ignore_errors=True)
    run("python", "examples/torch_models.py", str(TORCH_MODELS))
    pytest(session, run, *QUICK, "-m", "torch and not models", *marked("torch"), REFGRAD_TORCH_MODELS=str(TORCH_MODELS))


@nox.session(venv_backend="none")
def jax(session: nox.Session) -> None:
    """Models as functions of JAX against the same networks in jax.numpy; after `torch`, its models against torch.autograd."""
    run = environment(session, "frameworks", "-e", ".[ort,jax,test]")
    pytest(session, run, *QUICK, *marked("jax"), REFGRAD_TORCH_MODELS=str(TORCH_MODELS))


@nox.session(venv_backend="none")
def page(session: nox.Session) -> None:
    """The pages in headless Chromium, which has to be installed, and the runners in JavaScript and C.

    REFGRAD_BROWSER may name the browser's program, and REFGRAD_ORT_INCLUDE the folder with the headers of ONNX Runtime.
    """
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    if not os.environ.get("REFGRAD_BROWSER") and not any(map(shutil.which, names)):
        session.error("There is no Chromium: install the package chromium, or set REFGRAD_BROWSER to its program.")
    run = environment(session, "frameworks", "playwright", "-e", ".[ort,test]")
    modules = onnxruntime_headers(session)
    if shutil.which("npm"):  # a step of training in JavaScript, and the rules of accessibility
        place = Path(session.create_tmp()) / "javascript"
        place.mkdir(exist_ok=True)
        session.run(
            "npm",
            "install",
            "--prefix",
            str(place),
            "--no-audit",
            "--no-fund",
            "onnxruntime-web",
            "axe-core",
            external=True,
        )
        modules["REFGRAD_NODE_MODULES"] = str(place / "node_modules")
    pytest(session, run, *QUICK, *marked("browser"), REFGRAD_TORCH_MODELS=str(TORCH_MODELS), **modules)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation site in build/site: pages are assembled, their examples run, links are checked; a warning fails it."""
    session.install("-e", ".[docs]")
    source, site = ROOT / "build" / "site_source", ROOT / "build" / "site"
    session.run("python", "docs/site/assemble.py")
    shutil.rmtree(site, ignore_errors=True)
    session.run("sphinx-build", "-q", "-W", "--keep-going", "-j", "2", "-b", "html", str(source), str(site))
    session.run("python", "docs/site/built.py", str(site))
    pytest(session, own(session), "tests/project/test_site.py", REFGRAD_SITE=str(site))


@nox.session
def package(session: nox.Session) -> None:
    """A wheel, an editable install and a bare checkout all find every package."""
    needed = nox.project.load_toml("pyproject.toml")["project"]["dependencies"]  # lent to the environments of the tests
    session.install("pytest", "hypothesis", *needed)
    pytest(session, own(session), "tests/packaging", "-p", "no:cacheprovider")


@nox.session
def distributions(session: nox.Session) -> None:
    """What a release publishes, in dist/, tried from an empty folder; with `-- v0.2.0` only for the tag of its version."""
    version = nox.project.load_toml(ROOT / "pyproject.toml")["project"]["version"]
    if session.posargs not in ([], [f"v{version}"]):
        session.error(
            f"The tag is {session.posargs}, and the version in pyproject.toml {version}: make the tag v{version}."
        )
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.install("build", "twine")
    session.run("python", "-m", "build")  # the wheel from the source distribution: both are whole
    [wheel], [archive] = (list((ROOT / "dist").glob(ending)) for ending in ("*.whl", "*.tar.gz"))
    session.run("twine", "check", "--strict", str(wheel), str(archive))
    session.install("--force-reinstall", f"refgrad[ort,test] @ {wheel.as_uri()}")
    empty = Path(session.create_tmp()).resolve() / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    empty.mkdir()
    shutil.unpack_archive(archive, empty)
    [source] = empty.iterdir()
    with session.chdir(empty):
        session.run("refgrad", "demo")
        written = "import onnx, refgrad.show.demo as demo; onnx.save(demo.regression(), 'model.onnx')"
        session.run("python", "-c", written)
        session.run("refgrad", "check", "model.onnx")
        session.run(
            "refgrad", "conformance", "run", "--ops", "Conv,Softmax", "--backend", "numpy,ort-cpu", "--every", "4"
        )
    with session.chdir(source):
        found = [str(file) for name in RELEASES for file in Path("tests").rglob(f"test_{name}.py")]
        session.run("pytest", "-q", *QUICK, *found)  # of the wheel
        session.run("python", "-m", "pytest", "-q", *QUICK, *found, "tests/project")  # of the source distribution


RELEASES = (  # the test files that fail first when a dependency changes
    *("cli", "ranges", "reports", "validity", "backends", "split", "backends_onnxruntime", "numpy_text", "state_dict"),
    *("written_artifacts", "estimators", "conformance_builders", "strategies", "cluster", "export", "pytest_plugin"),
)


def lowest(session: nox.Session, *but: str) -> dict[str, str]:
    """The environment in which pip installs the lowest release of everything that pyproject.toml names, `but` of these."""
    project = nox.project.load_toml(ROOT / "pyproject.toml")["project"]
    texts = [*project["dependencies"], *itertools.chain.from_iterable(project["optional-dependencies"].values())]
    bounds = dict(bound for text in texts for bound in re.findall(r"^([\w.-]+)>=([\w.]+)", text))
    file = Path(session.create_tmp()).resolve() / "lowest.txt"
    lines = [f"{name}=={release}\n" for name, release in bounds.items() if name not in but]
    file.write_text("".join(lines), encoding="utf-8")
    return {"PIP_CONSTRAINT": file.as_uri()}


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """The lowest releases that pyproject.toml admits, on the oldest Python: the tests that are most sensitive."""
    session.install("-e", ".[ort,test]", env=lowest(session))
    found = [str(file) for name in RELEASES for file in (ROOT / "tests").rglob(f"test_{name}.py")]
    session.run("python", "-m", "pytest", "-q", *QUICK, *(session.posargs or found))


@nox.session(python="3.11")
def oldest_frameworks(session: nox.Session) -> None:
    """The lowest releases of torch, JAX and the exporters, with a recent onnxruntime. It downloads gigabytes on Linux."""
    session.install("-e", ".[ort,torch,exports,jax,test]", env=lowest(session, "onnxruntime"))  # old ones lack kernels
    session.run("python", "examples/torch_models.py", str(TORCH_MODELS))
    found = session.posargs or [*marked("torch"), *marked("jax")]
    session.run("python", "-m", "pytest", "-q", *QUICK, *found, env={"REFGRAD_TORCH_MODELS": str(TORCH_MODELS)})


@nox.session
def newest(session: nox.Session) -> None:
    """The newest releases that pyproject.toml admits, instead of those in constraints.txt: the quick suite."""
    constraints = {"PIP_CONSTRAINT": ""}
    session.install("--upgrade", "--upgrade-strategy=eager", "-e", ".[ort,test]", env=constraints)
    files = session.posargs or without("browser", "jax", "slow", "training")
    session.run("python", "-m", "pytest", "-q", *QUICK, *files)


@nox.session
def models(session: nox.Session) -> None:
    """All architectures against torch.autograd (docs/models.md); `refgrad check` on the nine that onnx ships: minutes."""
    session.install("torch")
    session.install("-e", ".[ort,torch,exports,test]")
    results = ROOT / "reports" / "results" / "models.json"
    session.run("python", "examples/torch_models.py", str(TORCH_MODELS), "--all", "--save", str(results))
    session.run("python", "docs/generate.py")
    files = (
        "tests/frameworks/test_torch.py",
        "tests/conformance/judge/test_check.py",
        "tests/backends/test_numpy_models.py",
    )
    pytest(session, own(session), "-m", "models", *files, REFGRAD_TORCH_MODELS=str(TORCH_MODELS))


@nox.session(venv_backend="none")
def everything(session: nox.Session) -> None:
    """Every night: the sessions of CI with every test of every matrix, the site, and whole models. Hours."""
    os.environ[SAMPLE] = "1"
    for name in (*nox.options.sessions, *itertools.chain.from_iterable(CI), "docs", "models"):
        session.notify(name)


@nox.session
def deployed(session: nox.Session) -> None:
    """Models as deployment tools leave them against torch and differences (docs/deployed.md): an hour."""
    session.install("torch")
    session.install("-e", ".[ort,torch,exports,test]", "onnxruntime-genai")
    session.run("python", "benchmarks/deployed.py", str(ROOT / "build" / "deployed"), *session.posargs)
    session.run("python", "docs/generate.py")


@nox.session(venv_backend="none")
def gallery(session: nox.Session) -> None:
    """Ask refgrad about trained models that packages ship (docs/gallery.md); an hour. For one model: `-- MODEL`."""
    run = environment(session, "stock", *STOCK)
    run("python", "benchmarks/gallery.py", *session.posargs)
    run("python", "docs/generate.py")


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Every benchmark that stock onnxruntime can run, and reports/benchmarks.md."""
    session.install("torch")
    session.install("-e", ".[ort,torch,exports,sklearn]", "onnxsim")
    session.run("python", "examples/torch_models.py", str(TORCH_MODELS), "--all")
    for script in (
        "import_time",
        "memory",
        "training_memory",
        "qlora",
        "many_processes",
        "recompute",
        "quantized_weights",
        "depth",
        "loops",
        "node_tests",
        "training",
        "training_exports",
    ):
        session.run("python", f"benchmarks/{script}.py")
    for script in ("run_time", "split", "torch_module", "strong_zero"):
        session.run("python", f"benchmarks/{script}.py", str(TORCH_MODELS), env={"PYTHONPATH": "examples"})
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
def benchmarks_operators(session: nox.Session) -> None:
    """Each operator against torch eager: on ONNX Runtime, on the interpreter, and both dialects on its training wheel."""
    session.install("-e", ".[ort,torch]")
    session.run("python", "benchmarks/operators.py")
    session.run("python", "benchmarks/operator_alternatives.py")
    session.run("python", "benchmarks/operators.py", "--interpreter")
    wheel = Path(session.create_tmp()).resolve() / "wheel"
    session.run(sys.executable, "-m", "venv", str(wheel), external=True)
    python = str(wheel / ("Scripts" if os.name == "nt" else "bin") / "python")
    session.run(python, "-m", "pip", "install", "--quiet", "-e", ".[ort-training]", external=True)
    session.run(python, "benchmarks/operators.py", "--ort", external=True)
    session.run("python", "docs/generate.py")


@nox.session
def benchmarks_cuda(session: nox.Session) -> None:
    """On a machine with a GPU of NVIDIA: operators and models on ONNX Runtime, in torch eager and compiled."""
    session.install("torch")
    session.install("-e", ".[cuda,torch,exports]")
    session.run("python", "examples/torch_models.py", str(TORCH_MODELS), "--all")
    session.run("python", "benchmarks/operators.py", "--cuda")
    session.run("python", "benchmarks/run_time.py", str(TORCH_MODELS), "--cuda", env={"PYTHONPATH": "examples"})
    session.run("python", "docs/generate.py")


@nox.session
def cuda(session: nox.Session) -> None:
    """On a machine with a GPU of NVIDIA: the backend "ort-cuda", every operator and the models of torch."""
    session.install("torch")
    session.install("-e", ".[cuda,torch,exports,test]")
    session.run("python", "examples/torch_models.py", str(TORCH_MODELS))
    pytest(session, own(session), *CUDA, REFGRAD_TORCH_MODELS=str(TORCH_MODELS))
    results = ROOT / "build" / "conformance_cuda.json"
    results.parent.mkdir(exist_ok=True)
    matrix = ("--builder=refgrad", "--backend=ort-cuda", "--dtype=float32", "--memory=0", "--every=4")
    session.run(
        "refgrad", "conformance", "run", *matrix, "--limitations=docs/limitations_cuda.toml", "-o", str(results)
    )
    session.run("python", "benchmarks/scoreboard.py", "--cuda", str(results))


@nox.session
def benchmarks_jax(session: nox.Session) -> None:
    """What a call from JAX costs, and every architecture under jax.grad; after `models`, which writes them."""
    session.install("-e", ".[ort,jax]")
    session.run("python", "benchmarks/jax_calls.py")
    session.run("python", "benchmarks/jax_exports.py", str(TORCH_MODELS))
    session.run("python", "docs/generate.py")


@nox.session
def artifacts(session: nox.Session) -> None:
    """Three steps of training ResNet-18 by lowered artifacts (reports/parity.md), which `benchmarks_training` wrote."""
    session.install("-e", ".[ort]")
    session.run("python", "benchmarks/artifacts.py", "compare", str(TORCH_MODELS), str(ARTIFACTS))
    session.run("python", "docs/generate.py")


@nox.session
def scoreboard(session: nox.Session) -> None:
    """reports/scoreboard.md: every builder and executor on every case, on stock ONNX Runtime and its training wheel: hours."""
    session.install("-e", ".[ort-training,test]")
    stock = environment(session, "stock", *STOCK)
    SCOREBOARD.mkdir(parents=True, exist_ok=True)
    files = {name: str(SCOREBOARD / f"{name}.json") for name in ("onnxruntime", "onnxruntime-training")}
    run = ("conformance", "run", "--dtype=float32")
    training = (
        "--builder=refgrad,refgrad:ort,onnxruntime:raw,onnxruntime:module",
        "--backend=numpy,ort-cpu",
        "--opset=21",
    )
    anyhow = {"success_codes": [0, 1]}  # 1: there are faults
    session.run("refgrad", *run, *training, "-o", files["onnxruntime-training"], **anyhow)
    newest = ("--builder=refgrad,refgrad:ort,onnx-ad", "--backend=numpy,ort-cpu,onnx.reference")
    program = str(ROOT / ".nox" / "stock" / ("Scripts" if os.name == "nt" else "bin") / "refgrad")
    session.run(program, *run, *newest, "-o", files["onnxruntime"], external=True, **anyhow)
    pages = (ROOT / "reports" / "scoreboard.md", SCOREBOARD / "scoreboard.html")
    stock("refgrad", "conformance", "report", *files.values(), *(f"--output={page}" for page in pages))
    stock("python", "benchmarks/scoreboard.py", *files.values())
    stock("python", "docs/generate.py")


@nox.session(venv_backend="none")
def pairs(session: nox.Session) -> None:
    """Real systems beside refgrad on whole models of `torch` (reports/benchmarks.md): an hour. clang for tinygrad."""
    stock = environment(session, "stock", *STOCK)
    folder = Path(session.create_tmp()).resolve()
    for name, packages in PAIRED.items():
        python = str(folder / name / ("Scripts" if os.name == "nt" else "bin") / "python")
        session.run(sys.executable, "-m", "venv", str(folder / name), external=True)
        pins = {} if "onnxruntime" not in name else {"PIP_CONSTRAINT": ""}  # of the newest release
        session.run(python, "-m", "pip", "install", "--quiet", *packages, external=True, env=pins)
    stock("python", "benchmarks/pairs.py", str(TORCH_MODELS), str(folder), *session.posargs)
    stock("python", "docs/generate.py")


@nox.session
def runtimes(session: nox.Session) -> None:
    """reports/runtimes.md: the exported suite on every runtime, each in its own environment: an hour. `-- tract` runs one."""
    session.install("-e", ".")
    export = RUNTIMES / "suite"
    if not session.posargs:
        shutil.rmtree(RUNTIMES, ignore_errors=True)
    if not export.is_dir():
        RUNTIMES.mkdir(parents=True, exist_ok=True)
        models = ("--models", str(TORCH_MODELS)) if any(TORCH_MODELS.glob("*.onnx")) else ()
        session.run("refgrad", "conformance", "export", str(export), *models)
    parts = [path.parent.relative_to(export) for path in sorted(export.rglob("tests.tsv"))]
    for name in session.posargs or (*ENVIRONMENTS, *NODE_RUNTIMES):
        place = Path(session.create_tmp()) / name
        if name in NODE_RUNTIMES:
            install = ("npm", "install", "--prefix", str(place), "--no-audit", "--no-fund", "--ignore-scripts")
            session.run(*install, f"{name}@{NODE_RUNTIMES[name]}", external=True)
            program = ("node", str(export / "runners" / "run.mjs"), "--modules", str(place))
        else:
            session.run(sys.executable, "-m", "venv", str(place), external=True)
            python = str(place / ("Scripts" if os.name == "nt" else "bin") / "python")
            session.run(python, "-m", "pip", "install", "--quiet", *ENVIRONMENTS[name], external=True)
            program = (python, str(export / "runners" / "run.py"))
        for part in parts:
            with (RUNTIMES / f"{'~'.join((name, *part.parts))}.jsonl").open("w") as printed:
                session.run(*program, name, str(export / part), external=True, stdout=printed, success_codes=[0, 1])
    session.run("python", "benchmarks/runtimes.py", str(export), str(RUNTIMES))
    session.install("-e", ".[ort,test]")  # what docs/generate.py needs
    session.run("python", "docs/generate.py")
