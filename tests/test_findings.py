"""Every finding holds: the other system is wrong on its model, the interpreter is right, and the proof is one."""

import subprocess
import sys

import numpy as np
import pytest

from refgrad.backends import get_backend
from refgrad.conformance.differences import directional
from refgrad.conformance.findings import findings
from refgrad.conformance.findings.finding import RUN, VERSIONS, installed

CRASH = "from refgrad.conformance.findings import findings; from refgrad.conformance.findings.finding import RUN\n"


@pytest.mark.parametrize("finding", findings(), ids=str)
def test_the_interpreter_is_right(finding):
    if finding.operator == "ImageDecoder":
        pytest.importorskip("PIL", reason="pictures need Pillow")
    results = get_backend("numpy").prepare(finding.model).run(finding.feeds)
    assert not finding.wrong(results), results


@pytest.mark.parametrize("finding", findings(), ids=str)
def test_the_other_system_is_wrong(finding):
    if installed().get(finding.system) != VERSIONS[finding.system]:
        pytest.skip(f"{finding.system} {VERSIONS[finding.system]} is not installed")
    if finding.crashes:
        code = f"{CRASH}f = findings()[{findings().index(finding)}]; RUN[f.system](f)"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode < 0
        return
    with np.errstate(all="ignore"):
        try:
            results = RUN[finding.system](finding)
        except Exception:
            return  # whatever it raises, it does not give the result
    assert finding.wrong(results), f"{finding.system} is right: the finding no longer holds"


@pytest.mark.parametrize("finding", findings(), ids=str)
def test_the_proof_is_one(finding):
    if finding.forward is None:
        assert finding.proof
        return
    inputs = [value.name for value in finding.forward.graph.input]
    wrt = [name for name in inputs if f"{name}_grad" in finding.expected]
    assert wrt
    cotangents = {name[: -len("_grad")]: v for name, v in finding.feeds.items() if name.endswith("_grad")}
    run = get_backend("numpy").prepare(finding.forward, precision="float64").run
    rng = np.random.default_rng(0)
    point = {name: finding.feeds[name] for name in inputs}
    for name in wrt:
        u = rng.standard_normal(point[name].shape)
        difference = directional(
            lambda feeds: run(feeds),
            {key: x.astype(np.float64) if key in wrt else x for key, x in point.items()},
            {name: u},
            {key: v.astype(np.float64) for key, v in cotangents.items()},
        )
        gradient = finding.expected[f"{name}_grad"].astype(np.float64)
        assert abs(np.sum(gradient * u) - difference.value) <= 10 * finding.tolerance * np.abs(gradient * u).sum()
