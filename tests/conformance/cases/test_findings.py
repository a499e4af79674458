"""Every finding holds: the other system is wrong on its model, the interpreter is right, and the proof is one."""

import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from refgrad.backends import get_backend
from refgrad.conformance.findings import findings
from refgrad.conformance.findings.finding import ORT, REFERENCE, RELEASES, RUN, Finding, installed
from refgrad.conformance.oracles.central import directional

pytestmark = pytest.mark.interpreter

# Runs a finding that it is given, whatever the files say by then, and says before and after that it lives.
RUNNER = """
import pickle, sys
from refgrad.conformance.findings.finding import RUN
finding = pickle.load(sys.stdin.buffer)
print("ready", flush=True)
try:
    RUN[finding.system](finding)
finally:
    print("alive", flush=True)
"""


def ends_the_process(finding):
    """True if running it ends the process, by whatever signal or code; an exception does not."""
    child = subprocess.run([sys.executable, "-c", RUNNER], input=pickle.dumps(finding), capture_output=True)
    said = child.stdout.split()
    assert said[:1] == [b"ready"], child.stderr.decode()
    return said == [b"ready"] and child.returncode != 0


def test_a_result_or_an_exception_is_no_end_of_the_process():
    harmless = [f for f in findings() if f.system == REFERENCE]
    results, fails = (next(f for f in harmless if f.fault.startswith("fails") == wanted) for wanted in (False, True))
    assert not ends_the_process(results)
    assert not ends_the_process(fails)


@pytest.mark.parametrize("finding", findings(), ids=str)
def test_the_interpreter_is_right(finding):
    if finding.operator == "ImageDecoder":
        pytest.importorskip("PIL", reason="pictures need Pillow")
    results = get_backend("numpy").prepare(finding.model).run(finding.feeds)
    assert not finding.wrong(results), results


@pytest.mark.parametrize("finding", findings(), ids=str)
def test_the_other_system_is_wrong(finding):
    release = installed().get(finding.system)
    if release not in RELEASES[finding.system]:
        pytest.skip(f"{finding.system} {' or '.join(RELEASES[finding.system])} is not installed")
    if not finding.is_in(release):
        assert not finding.wrong(RUN[finding.system](finding)), f"{finding.system} {release} has the fault again"
        return
    if finding.crashes:
        assert ends_the_process(finding), f"{finding.system} lives: the finding no longer holds"
        return
    with np.errstate(all="ignore"):
        try:
            results = RUN[finding.system](finding)
            if (
                not finding.wrong(results) and "memory that nobody wrote" in finding.fault
            ):  # what is left in it may be what was right
                moved = {name: np.asarray(feed) + 1 for name, feed in finding.feeds.items()}
                RUN[finding.system](replace(finding, feeds=moved))
                results = RUN[finding.system](finding)
        except Exception:
            return  # whatever it raises, it does not give the result
    assert finding.wrong(results), f"{finding.system} is right: the finding no longer holds"


def test_a_release_that_mended_the_fault_is_told_from_those_before():
    first, *_, last = RELEASES[ORT]
    about = ORT, "Add", "subtracts", findings()[0].model, {}, {}
    always, mended = Finding(*about), Finding(*about, until=first)
    assert [always.is_in(first), always.is_in(last)] == [True, True]
    assert [mended.is_in(first), mended.is_in(last)] == [True, False]


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
