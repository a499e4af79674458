"""Every known bug is there: the other system is wrong on its model, the interpreter is right, and the proof is one."""

import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from refgrad.backends import get_backend
from refgrad.conformance.known.bugs import known_bugs
from refgrad.conformance.known.bugs.bug import ORT, REFERENCE, RELEASES, RUN, TRAINING, KnownBug, installed
from refgrad.conformance.oracles.central import directional

pytestmark = pytest.mark.interpreter

# Runs a known bug that it is given, whatever the files say by then, and says before and after that it lives.
RUNNER = """
import pickle, sys
from refgrad.conformance.known.bugs.bug import RUN
bug = pickle.load(sys.stdin.buffer)
print("ready", flush=True)
try:
    RUN[bug.system](bug)
finally:
    print("alive", flush=True)
"""


def ends_the_process(bug):
    """True if running it ends the process, by whatever signal or code; an exception does not."""
    child = subprocess.run([sys.executable, "-c", RUNNER], input=pickle.dumps(bug), capture_output=True)
    said = child.stdout.split()
    assert said[:1] == [b"ready"], child.stderr.decode()
    return said == [b"ready"] and child.returncode != 0


def test_a_result_or_an_exception_is_no_end_of_the_process():
    harmless = [f for f in known_bugs() if f.system == REFERENCE]
    results, fails = (next(f for f in harmless if f.fault.startswith("fails") == wanted) for wanted in (False, True))
    assert not ends_the_process(results)
    assert not ends_the_process(fails)


@pytest.mark.parametrize("bug", known_bugs(), ids=str)
def test_the_interpreter_is_right(bug):
    if bug.operator == "ImageDecoder":
        pytest.importorskip("PIL", reason="pictures need Pillow")
    results = get_backend("numpy").prepare(bug.model).run(bug.feeds)
    assert not bug.wrong(results), results


@pytest.mark.parametrize("bug", known_bugs(), ids=str)
def test_the_other_system_is_wrong(bug):
    release = installed().get(bug.system)
    if release not in RELEASES[bug.system]:
        pytest.skip(f"{bug.system} {' or '.join(RELEASES[bug.system])} is not installed")
    if not bug.is_in(release):
        assert not bug.wrong(RUN[bug.system](bug)), f"{bug.system} {release} has the fault again"
        return
    if bug.crashes:
        assert ends_the_process(bug), f"{bug.system} lives: the bug is fixed"
        return
    with np.errstate(all="ignore"):
        try:
            results = RUN[bug.system](bug)
            if (
                not bug.wrong(results) and "memory that nobody wrote" in bug.fault
            ):  # what is left in it may be what was right
                moved = {name: np.asarray(feed) + 1 for name, feed in bug.feeds.items()}
                RUN[bug.system](replace(bug, feeds=moved))
                results = RUN[bug.system](bug)
        except Exception:  # whatever it raises, it does not give the result
            # The training release may refuse the forward node of a gradient that is wrong.
            assert bug.is_error or bug.system == TRAINING, "its fault has to begin with 'fails'"
            return
    assert not bug.is_error, "it does not fail"
    assert bug.wrong(results), f"{bug.system} is right: the bug is fixed"


def test_a_release_that_mended_the_fault_is_told_from_those_before():
    first, *_, last = RELEASES[ORT]
    about = ORT, "Add", "subtracts", known_bugs()[0].model, {}, {}
    always, mended = KnownBug(*about), KnownBug(*about, until=first)
    assert [always.is_in(first), always.is_in(last)] == [True, True]
    assert [mended.is_in(first), mended.is_in(last)] == [True, False]


@pytest.mark.parametrize("bug", known_bugs(), ids=str)
def test_the_proof_is_one(bug):
    if bug.forward is None:
        assert bug.proof
        return
    inputs = [value.name for value in bug.forward.graph.input]
    wrt = [name for name in inputs if f"{name}_grad" in bug.expected]
    assert wrt
    cotangents = {name[: -len("_grad")]: v for name, v in bug.feeds.items() if name.endswith("_grad")}
    run = get_backend("numpy").prepare(bug.forward, precision="float64").run
    rng = np.random.default_rng(0)
    point = {name: bug.feeds[name] for name in inputs}
    for name in wrt:
        u = rng.standard_normal(point[name].shape)
        difference = directional(
            lambda feeds: run(feeds),
            {key: x.astype(np.float64) if key in wrt else x for key, x in point.items()},
            {name: u},
            {key: v.astype(np.float64) for key, v in cotangents.items()},
        )
        gradient = bug.expected[f"{name}_grad"].astype(np.float64)
        assert abs(np.sum(gradient * u) - difference.value) <= 10 * bug.tolerance * np.abs(gradient * u).sum()
