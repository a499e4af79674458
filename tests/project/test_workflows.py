"""The workflows of GitHub run sessions of noxfile.py and nothing else, on every Python that pyproject.toml names."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.interpreter

ROOT = next(folder for folder in Path(__file__).parents if (folder / "noxfile.py").is_file())
WORKFLOWS = {
    file.stem: yaml.safe_load(file.read_text(encoding="utf-8"))
    for file in (ROOT / ".github" / "workflows").glob("*.yml")
}
JOBS = {f"{name}: {job}": what for name, text in WORKFLOWS.items() for job, what in text["jobs"].items()}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOXFILE = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
WRITES = {"release: publish": {"attestations", "id-token"}, "site: deploy": {"pages", "id-token"}}


def rows(job: dict[str, Any]) -> list[dict[str, str]]:
    """The inputs of the action that runs nox, for each row of the job's matrix."""
    given = [step["with"] for step in job.get("steps", ()) if step.get("uses") == "./.github/actions/nox"]
    found = []
    for one in given:
        matrix = job.get("strategy", {}).get("matrix", {})
        names = [name for name in ("sessions", "python") if one.get(name) == f"${{{{ matrix.{name} }}}}"]
        made = [dict(one)]
        for name in names:
            made = [{**row, name: value} for row in made for value in matrix[name]]
        found += made
    return found


def names(row: dict[str, str]) -> list[str]:
    return row["sessions"].partition(" -- ")[0].split()


def nox_sessions() -> dict[str, ast.FunctionDef]:
    functions = (node for node in NOXFILE.body if isinstance(node, ast.FunctionDef))
    return {f.name: f for f in functions if any("session" in ast.unparse(d) for d in f.decorator_list)}


@pytest.mark.parametrize("job", JOBS)
def test_a_job_runs_sessions_and_nothing_else(job):
    assert not any("run" in step for step in JOBS[job].get("steps", ()))
    assert {name for row in rows(JOBS[job]) for name in names(row)} <= nox_sessions().keys()


@pytest.mark.parametrize("job", JOBS)
def test_a_job_ends_and_may_write_only_what_it_publishes(job):
    assert "timeout-minutes" in JOBS[job] or "uses" in JOBS[job]
    granted = JOBS[job].get("permissions", {})
    assert {scope for scope, access in granted.items() if access == "write"} == WRITES.get(job, set())


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_only_read_unless_a_job_says_more(name):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    assert WORKFLOWS[name]["concurrency"]["group"].startswith(name)


def test_a_change_is_tested_by_the_sessions_of_ci():
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    [default] = [node.value for node in NOXFILE.body if "nox.options.sessions =" in ast.unparse(node)]
    named = " ".join(re.findall(r"/nox .*?-s ([a-z_ ]+)", run)).split()
    assert named
    wanted = {*ast.literal_eval(default), *named}
    found = {name for job in WORKFLOWS["tests"]["jobs"].values() for row in rows(job) for name in names(row)}
    assert wanted <= found


def test_the_tests_run_on_every_python_and_system():
    prefix = "Programming Language :: Python :: 3."
    supported = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if text.startswith(prefix)]
    matrix = WORKFLOWS["tests"]["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == supported
    assert {system.partition("-")[0] for system in matrix["system"]} == {"ubuntu", "macos", "windows"}
    assert PROJECT["requires-python"] == f">={supported[0]}"
    assert set(WORKFLOWS["nightly"]["jobs"]["newest"]["strategy"]["matrix"]["python"]) == {supported[0], supported[-1]}


def test_the_lowest_releases_run_on_the_lowest_python():
    for name in ("oldest", "oldest_frameworks"):
        [decorator] = nox_sessions()[name].decorator_list
        assert ast.unparse(decorator) == f"nox.session(python={PROJECT['requires-python'].removeprefix('>=')!r})"


def test_the_files_that_notice_a_release_exist():
    [value] = [node.value for node in NOXFILE.body if ast.unparse(node).startswith("RELEASES =")]
    for name in eval(compile(ast.Expression(value), "noxfile.py", "eval")):
        assert [*(ROOT / "tests").rglob(f"test_{name}.py")], name


def test_sessions_of_the_training_wheel_run_where_it_exists():
    default = yaml.safe_load((ROOT / ".github" / "actions" / "nox" / "action.yml").read_text())["inputs"]["python"][
        "default"
    ]
    [wheel] = PROJECT["optional-dependencies"]["ort-training"]
    bound = re.search(r"python_version < '3\.(\d+)'", wheel)
    pythons = {
        row.get("python", default)
        for job in JOBS.values()
        for row in rows(job)
        if {"training", "parity", "everything"} & {*names(row)}
    }
    assert pythons
    assert all(int(python.removeprefix("3.")) < int(bound[1]) for python in pythons)
