"""The pytest plugin: verdicts as tests, known limitations as expected failures, mistakes told without a traceback."""

import pytest

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

pytest_plugins = ["pytester"]

PLANTED = """
from refgrad.backends.numpy import NumpyBackend
from refgrad.backends.base import Backend, Prepared
from refgrad.errors import BackendError

class Doubled(Backend):
    name = "doubled"
    def description(self): return "twice what is right"
    def prepare(self, model, **options):
        prepared = NumpyBackend().prepare(model)
        class Twice(Prepared):
            inputs, outputs = prepared.inputs, prepared.outputs
            def run(self, feeds, outputs=None):
                return {name: 2 * value for name, value in prepared.run(feeds, outputs).items()}
        return Twice()

class Refusing(Doubled):
    def prepare(self, model, **options):
        raise BackendError("no kernel for anything")
"""
COUNT = 4  # the tests of Neg


@pytest.fixture
def run(pytester):
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    pytester.makepyfile(planted=PLANTED)

    def go(*options):
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)

    return go


@pytest.fixture
def neg(run):
    def go(backend, *options):
        return run("--refgrad-backend", backend, "--refgrad-ops", "Neg", *options)

    return go


def limitations(pytester, *entries):
    lines = (f"[[limitation]]\n{entry}\n" for entry in entries)
    path = pytester.path / "known.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return "--refgrad-limitations", str(path)


def test_nothing_is_imported_where_the_plugin_is_not_used(run, pytester):
    pytester.makepyfile(
        test_it="def test_it():\n    import sys\n    assert not {'refgrad', 'onnx', 'numpy'} & set(sys.modules)\n"
    )
    run("--noconftest", "test_it.py").assert_outcomes(passed=1)


def test_what_is_right_passes_and_files_that_are_not_named_are_left_alone(neg, pytester):
    pytester.makepyfile(test_mine="def test_mine(): assert False")
    result = neg("numpy")
    result.assert_outcomes(passed=COUNT)
    result.stdout.fnmatch_lines([f"collected {COUNT} items"])


def test_what_is_wrong_fails_and_says_who_says_so(neg):
    result = neg("planted:Doubled", "-k", "test_grad_neg")
    assert result.parseoutcomes()["failed"] >= 3
    result.stdout.fnmatch_lines(
        ["wrong: the gradient by refgrad on planted:Doubled, case Neg-2x3-*", "X: *", "so say *differences*"]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*raise _FaultError*")


def test_what_the_executor_does_not_support_is_skipped(neg):
    result = neg("planted:Refusing", "-rs")
    result.assert_outcomes(skipped=COUNT)
    result.stdout.fnmatch_lines(["*not supported: the gradient by refgrad*"])


def test_known_limitations_are_expected_failures(neg, pytester):
    known = limitations(pytester, 'operator = "Neg"\nverdict = "wrong"\nexecutor = "planted:Doubled"\nreason = "twice"')
    result = neg("planted:Doubled", "-rx", *known)
    outcomes = result.parseoutcomes()
    assert outcomes["xfailed"] >= 3
    assert "failed" not in outcomes
    assert result.ret == 0
    result.stdout.fnmatch_lines(["XFAIL *wrong: twice"])


@pytest.mark.parametrize("lanes", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_a_stale_limitation_fails_the_run(neg, pytester, lanes):
    entries = 'operator = "Neg"\nreason = "was wrong"', 'operator = "Mul"\nreason = "not run here"'
    result = neg("numpy", *limitations(pytester, *entries), *lanes)
    assert result.parseoutcomes()["passed"] == COUNT
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*known failures that no longer hold*", "operator 'Neg': no longer holds: *'right'* (was wrong)"]
    )
    result.stdout.no_fnmatch_line("operator 'Mul'*")


def test_own_tests_run_where_they_are_named(neg, pytester):
    pytester.makepyfile(test_mine="def test_mine(): pass")
    neg("numpy", "test_mine.py").assert_outcomes(passed=COUNT + 1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--refgrad-ops", "Neg"), "--refgrad-ops needs --refgrad-backend NAME"),
        (("--refgrad-backend", "nunpy"), "There is no executor 'nunpy'. Did you mean 'numpy'?"),
        (("--refgrad-backend", "nowhere:Class"), "'nowhere:Class' cannot be imported"),
        (
            ("--refgrad-backend", "numpy", "--refgrad-ops", "Nge"),
            "There is no case of an operator 'Nge'. Did you mean 'Neg'?",
        ),
        (("--refgrad-backend", "numpy", "--refgrad-builder", "nobody"), "There is no builder 'nobody'."),
        (("--refgrad-backend", "numpy", "--refgrad-limitations", "none.toml"), "There is no file 'none.toml'"),
    ],
)
def test_mistakes_are_told_without_a_traceback(run, options, told):
    result = run(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert told in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


def test_a_malformed_limitation_is_told(neg, pytester):
    result = neg("numpy", *limitations(pytester, 'operator = "Neg"\nreasn = "x"'))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "entry 1 has the key 'reasn'. Did you mean 'reason'?" in result.stderr.str()
