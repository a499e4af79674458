"""The source distribution is the whole checkout, and what the index shows of it is true."""

import email
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = {"refgrad/backends", "refgrad/conformance"}  # for static tools in a checkout; no archive has links
GENERATED = re.compile(r"PKG-INFO|setup\.cfg|refgrad\.egg-info/.*")
LEFT_BEHIND = (
    "tests/__pycache__/test_x.cpython-311.pyc",
    "build/lib/refgrad/x.py",
    "dist/x.whl",
    ".nox/x.py",
    "docs/x.pyc",
)
REPOSITORY = {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "group/refgrad"}


def files_of_the_checkout():
    """What git tracks; where these files came without git, what their distribution listed."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return {name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)}
    listed = (ROOT / "refgrad.egg-info" / "SOURCES.txt").read_text(encoding="utf-8")
    return {name for name in listed.splitlines() if not GENERATED.fullmatch(name)}


@pytest.fixture(scope="module")
def built(tmp_path_factory, make_environment):
    """The folder with both distributions of a copy of the checkout, in which runs have left files behind."""
    folder = tmp_path_factory.mktemp("distributions")
    for name in files_of_the_checkout():
        (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "copy" / name, follow_symlinks=False)
    for name in LEFT_BEHIND:
        (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "copy" / name).write_text("")
    make_environment(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "build"], check=True)
    environment = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    command = [python, "-m", "build", "--outdir", folder / "dist", folder / "copy"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment | REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def metadata(built):
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        [name] = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(file.read(name))


def test_the_source_distribution_has_every_file_of_the_checkout_and_no_other(built):
    [archive] = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        members = [member for member in file.getmembers() if not member.isdir()]
    assert all(member.isfile() for member in members)
    names = {member.name.partition("/")[2] for member in members}
    assert {name for name in names if not GENERATED.fullmatch(name)} == files_of_the_checkout() - LINKS


def test_a_wheel_of_the_source_distribution_has_every_module(built):
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        modules = {name for name in file.namelist() if name.endswith(".py")}
    tops = ("backends/", "conformance/", "reports/")
    expected = {
        name if name.startswith("refgrad/") else f"refgrad/{name}"
        for name in files_of_the_checkout()
        if name.endswith(".py") and name.startswith(("refgrad/", *tops))
    }
    assert modules == expected | {"pytest_refgrad.py"}


def test_the_addresses_are_those_of_the_repository_that_releases(metadata):
    urls = dict(value.split(", ") for value in metadata.get_all("Project-URL"))
    assert set(urls) == {"Source", "Documentation", "Issues", "Changelog"}
    assert all(url.startswith("https://example.org/group/refgrad") for url in urls.values())
    for url in urls.values():
        _, blob, path = url.partition("/blob/main/")
        assert not blob or (ROOT / path).is_file()
