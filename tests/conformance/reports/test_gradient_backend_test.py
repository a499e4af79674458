"""GradientBackendTest is used as onnx's BackendTest is, and catches a backend that computes something else."""

import unittest

import numpy as np
import pytest
from onnx.backend.base import BackendRep
from onnx.backend.test import BackendTest

from refgrad.backends.onnx_backend import OnnxBackend
from refgrad.conformance import GradientBackendTest, node_case
from refgrad.conformance.tools.exporting import expected as expecting
from refgrad.conformance.tools.exporting.expected import curated

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

NUMBERS = np.array([[0.5, -1.5, 2.0], [1.25, -0.75, 0.3]], np.float32)
CASES = {
    "test_grad_exp": node_case("Exp", NUMBERS),
    "test_grad_neg": node_case("Neg", NUMBERS),
    "test_grad_matmul": node_case("MatMul", NUMBERS, NUMBERS.T.copy()),
}


class Changed(BackendRep):
    def __init__(self, prepared, change):
        self.prepared, self.change = prepared, change

    def run(self, inputs, **options):
        return [self.change(output) for output in self.prepared.run(inputs, **options)]


def changed(change):
    """The interpreter, with `change` of what it computes."""

    class Backend(OnnxBackend):
        @classmethod
        def prepare(cls, model, device="CPU", **options):
            return Changed(OnnxBackend.prepare(model, device, **options), change)

    return Backend


def run(suite):
    return suite.test_suite.run(unittest.TestResult())


def outcomes(result):
    return {
        "failed": len(result.failures) + len(result.errors),
        "skipped": len(result.skipped),
        "xfailed": len(result.expectedFailures),
        "unexpected": len(result.unexpectedSuccesses),
    }


NOTHING = {"failed": 0, "skipped": 3, "xfailed": 0, "unexpected": 0}  # the three for CUDA


def test_it_is_used_as_a_backend_test():
    for name in ("include", "exclude", "xfail", "enable_report", "test_cases", "tests", "test_suite"):
        assert hasattr(BackendTest, name)
        assert hasattr(GradientBackendTest, name)
    cases = GradientBackendTest(OnnxBackend, __name__, cases=CASES).test_cases
    assert list(cases) == ["OnnxBackendGradientModelTest"]
    (made,) = cases.values()
    assert made.__module__ == __name__
    assert issubclass(made, unittest.TestCase)
    names = {name for name in dir(made) if name.startswith("test_")}
    assert names == {f"{name}_{device}" for name in CASES for device in ("cpu", "cuda")}
    assert names <= set(dir(GradientBackendTest(OnnxBackend, cases=CASES).tests))


def test_every_curated_case_has_a_test():
    (made,) = GradientBackendTest(OnnxBackend).test_cases.values()
    assert {name for name in dir(made) if name.endswith("_cpu")} == {f"{name}_cpu" for name in curated()}


def test_the_interpreter_passes():
    assert outcomes(run(GradientBackendTest(OnnxBackend, cases=CASES))) == NOTHING


def test_a_sample_of_the_curated_cases_passes():
    sample = {name: case for place, (name, case) in enumerate(curated().items()) if place % 60 == 0}
    result = run(GradientBackendTest(OnnxBackend, cases=sample))
    assert result.wasSuccessful(), (result.failures + result.errors)[:3]
    confirmed = result.testsRun - len(result.skipped)
    assert confirmed > 0.8 * len(sample), "so many are confirmed"


@pytest.mark.parametrize(
    "change",
    [
        lambda x: (2.001 * x).astype(x.dtype),
        lambda x: (1.0001 * x).astype(x.dtype),
        lambda x: -x,
        np.zeros_like,
        lambda x: x.astype(np.float64),
        lambda x: x[..., None],
        lambda x: x.T[::-1].T,
        lambda x: np.full_like(x, np.nan),
    ],
    ids=["doubled", "off", "negative", "zero", "dtype", "shape", "reversed", "nan"],
)
def test_a_wrong_backend_fails(change):
    assert outcomes(run(GradientBackendTest(changed(change), cases=CASES))) == NOTHING | {"failed": 3}


def test_a_missing_output_fails():
    class Backend(OnnxBackend):
        @classmethod
        def prepare(cls, model, device="CPU", **options):
            prepared = OnnxBackend.prepare(model, device, **options)
            prepared.run = lambda inputs, **_: ()
            return prepared

    assert outcomes(run(GradientBackendTest(Backend, cases=CASES)))["failed"] == 3


def test_patterns_and_report(request):
    request.config.addinivalue_line("markers", "onnx_coverage(model, category): what onnx's report is made of")
    suite = GradientBackendTest(changed(lambda x: -x), cases=CASES)
    suite.include("exp|neg").exclude("neg").xfail("exp_cpu").enable_report()
    assert outcomes(run(suite)) == {"failed": 0, "skipped": 5, "xfailed": 1, "unexpected": 0}


def test_arguments_for_a_test_reach_the_backend_and_the_comparison():
    suite = GradientBackendTest(
        changed(lambda x: (1.01 * x).astype(x.dtype)), None, {"test_grad_exp": {"rtol": 0.02}}, CASES
    )
    assert outcomes(run(suite))["failed"] == 2


def test_a_backend_may_say_that_it_is_not_compatible():
    class Backend(OnnxBackend):
        @classmethod
        def is_compatible(cls, model, device="CPU", **options):
            return model.graph.node[0].op_type == "Neg"

    assert outcomes(run(GradientBackendTest(Backend, cases=CASES))) == NOTHING | {"skipped": 5}


def test_what_is_not_confirmed_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(expecting, "ENOUGH", 9)
    result = run(GradientBackendTest(OnnxBackend, cases=CASES))
    assert outcomes(result) == NOTHING | {"skipped": 6}
    assert any("differences confirms it" in reason for _, reason in result.skipped)
