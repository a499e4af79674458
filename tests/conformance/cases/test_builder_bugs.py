"""Every known bug of a builder is there: it gives what the record says, two oracles say otherwise, and so does the suite."""

import warnings
from dataclasses import replace
from functools import cache
from importlib import metadata

import numpy as np
import pytest

from refgrad.conformance.judge.running.runner import Plan, run_case
from refgrad.conformance.judge.running.sources import of_bugs
from refgrad.conformance.known.bugs.bug import TRAINING, equal, installed
from refgrad.conformance.known.bugs.builders import builder_bugs
from refgrad.conformance.known.bugs.builders.bug import BUILDER_VERSIONS, ENDS, ONNX_AD
from refgrad.conformance.oracles import Directional, NotApplicable, get_oracle
from refgrad.conformance.verdicts import FAULTS
from refgrad.derivatives import ortbuilder
from refgrad.worker import Worker

pytestmark = pytest.mark.slow

ORACLES = ("differences", "reference", "complex-step", "torch")
CASES = dict(zip(builder_bugs(), of_bugs(), strict=True))
EACH = pytest.mark.parametrize("bug", builder_bugs(), ids=str)
BY_BUILDER = pytest.mark.parametrize(("bug", "builder"), [(f, b) for f in builder_bugs() for b in f.builders], ids=str)


@pytest.fixture(scope="module")
def worker():
    with Worker() as one:
        yield one


def skip_without(system):
    """Skip where the release that the records are about is not there."""
    if system == ONNX_AD:
        try:
            version = metadata.version(ONNX_AD)
        except metadata.PackageNotFoundError:
            version = None
    else:
        version = installed().get(TRAINING) if ortbuilder.available() else None
    if version != BUILDER_VERSIONS[system]:
        pytest.skip(f"{system} {BUILDER_VERSIONS[system]} is not installed")


def confirmed(said, gradients):
    """True if an oracle says of every one of these gradients that it is right; None where it does not speak of all."""
    spoken = [one for one in said if not isinstance(one, NotApplicable)]
    if {one.name for one in spoken} != gradients.keys():
        return None
    return all(_confirms(one, np.asarray(gradients[one.name], np.float64)) for one in spoken)


def _confirms(said, gradient):
    wanted = said.direction if isinstance(said, Directional) else said.gradient
    if gradient.shape != wanted.shape or not np.all(np.isfinite(gradient)):
        return False
    if isinstance(said, Directional):
        terms = gradient * said.direction
        return abs(np.sum(terms) - said.value) <= said.error + 1e-6 * np.sum(np.abs(terms))
    scale = np.max(np.abs(wanted), initial=0.0)
    return np.max(np.abs(gradient - wanted), initial=0.0) <= (said.error + 1e-6) * scale


@cache
def said_of(bug):
    """What each oracle that is there says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and of onnx.reference
        return {n: get_oracle(n).observe(bug.problem) for n in ORACLES if not get_oracle(n).missing()}


@EACH
def test_two_oracles_confirm_what_is_expected_and_contradict_what_is_given(bug):
    said = said_of(bug)
    of_expected = {n: confirmed(one, bug.expected) for n, one in said.items()}
    assert False not in of_expected.values(), of_expected
    witnesses = [n for n, one in of_expected.items() if one]
    if "torch" not in said and len(witnesses) < 2:
        pytest.skip("its second oracle is torch")
    assert len(witnesses) >= 2, said
    if not isinstance(bug.given, str):
        assert not any(confirmed(said[n], bug.given) for n in witnesses)


@EACH
def test_a_wrong_expectation_is_noticed(bug):
    moved = {n: value * np.float32(1.01) + np.float32(0.003) for n, value in bug.expected.items()}
    if any(value.size for value in moved.values()):
        said = said_of(bug)
        assert True not in [confirmed(one, moved) for one in said.values()]


@EACH
def test_refgrad_gives_what_is_expected(bug, worker):
    got = replace(bug, executor="numpy").outcome("refgrad", worker)
    assert not isinstance(got, str), got
    assert all(equal(got[name], value) for name, value in bug.expected.items()), got
    assert not bug.holds(got)


@BY_BUILDER
def test_the_builder_gives_what_is_given(bug, builder, worker):
    skip_without(bug.system)
    got = bug.outcome(builder, worker)
    assert bug.holds(got), f"{builder} gives {got}: the bug is fixed"


@BY_BUILDER
def test_the_suite_says_that_it_is_wrong(bug, builder, worker):
    skip_without(bug.system)
    (row,) = run_case(CASES[bug], Plan((builder,), (bug.executor,)), worker)
    assert row.verdict in FAULTS, row
    assert bug.given != ENDS or row.verdict == "crashed", row
