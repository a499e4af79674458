"""Every finding about a builder holds: it gives what the finding says, two oracles say otherwise, and so does the suite."""

import warnings
from dataclasses import replace
from functools import cache
from importlib import metadata

import numpy as np
import pytest

from refgrad.conformance.findings.builders import builder_findings
from refgrad.conformance.findings.builders.finding import BUILDER_VERSIONS, ENDS, ONNX_AD
from refgrad.conformance.findings.finding import TRAINING, equal, installed
from refgrad.conformance.judging.verdicts import FAULTS
from refgrad.conformance.oracles import Directional, Silent, get_oracle
from refgrad.conformance.running.runner import Plan, run_case
from refgrad.conformance.running.sources import of_findings
from refgrad.transforms import ortbuilder
from refgrad.worker import Worker

pytestmark = pytest.mark.slow

ORACLES = ("differences", "reference", "complex-step", "torch")
CASES = dict(zip(builder_findings(), of_findings(), strict=True))
EACH = pytest.mark.parametrize("finding", builder_findings(), ids=str)
BY_BUILDER = pytest.mark.parametrize(
    ("finding", "builder"), [(f, b) for f in builder_findings() for b in f.builders], ids=str
)


@pytest.fixture(scope="module")
def worker():
    with Worker() as one:
        yield one


def skip_without(system):
    """Skip where the release that the findings are about is not there."""
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
    spoken = [one for one in said if not isinstance(one, Silent)]
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
def said_of(finding):
    """What each oracle that is there says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and of onnx.reference
        return {n: get_oracle(n).testify(finding.question) for n in ORACLES if not get_oracle(n).missing()}


@EACH
def test_two_oracles_confirm_what_is_expected_and_contradict_what_is_given(finding):
    said = said_of(finding)
    of_expected = {n: confirmed(one, finding.expected) for n, one in said.items()}
    assert False not in of_expected.values(), of_expected
    witnesses = [n for n, one in of_expected.items() if one]
    if "torch" not in said and len(witnesses) < 2:
        pytest.skip("its second witness is torch")
    assert len(witnesses) >= 2, said
    if not isinstance(finding.given, str):
        assert not any(confirmed(said[n], finding.given) for n in witnesses)


@EACH
def test_a_wrong_expectation_is_noticed(finding):
    moved = {n: value * np.float32(1.01) + np.float32(0.003) for n, value in finding.expected.items()}
    if any(value.size for value in moved.values()):
        said = said_of(finding)
        assert True not in [confirmed(one, moved) for one in said.values()]


@EACH
def test_refgrad_gives_what_is_expected(finding, worker):
    got = replace(finding, executor="numpy").outcome("refgrad", worker)
    assert not isinstance(got, str), got
    assert all(equal(got[name], value) for name, value in finding.expected.items()), got
    assert not finding.holds(got)


@BY_BUILDER
def test_the_builder_gives_what_is_given(finding, builder, worker):
    skip_without(finding.system)
    got = finding.outcome(builder, worker)
    assert finding.holds(got), f"{builder} gives {got}: the finding no longer holds"


@BY_BUILDER
def test_the_suite_says_that_it_is_wrong(finding, builder, worker):
    skip_without(finding.system)
    (row,) = run_case(CASES[finding], Plan((builder,), (finding.executor,)), worker)
    assert row.verdict in FAULTS, row
    assert finding.given != ENDS or row.verdict == "crashed", row
