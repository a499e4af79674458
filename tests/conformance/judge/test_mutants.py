"""The judge notices what is wrong: a sample of the mutants, and the survivors of the whole survey."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest
from checking import assert_gradient

from refgrad.conformance import verdicts
from refgrad.conformance.case import Case
from refgrad.conformance.cases import every_case
from refgrad.conformance.judge.judge import Candidate, GradientCheck
from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.tools.mutating.mutants import FAILS, KERNEL, WRONG_RESULT, Mutant, Outcome
from refgrad.conformance.tools.mutating.survey import defined, family, ruled, survey
from refgrad.conformance.tools.mutating.survivors import Equivalent, equivalents
from refgrad.errors import OptionError
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.registry import RULES

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "refgrad"
RESULTS = ROOT / "reports" / "results" / "mutants.json"
RULED = ("MatMul", "Softmax", "CumSum", "Sub")
DEFINED = (
    *("BiasSplitGelu", "BiasAdd", "FusedConv", "SwiGLU", "ExpandDims", "GemmFastGelu"),
    *("SoftmaxCrossEntropy", "SkipLayerNormalization", "MaxpoolWithMask", "QLinearAdd", "GemmFloat8"),
    *("FlattenAndUnpad", "DequantizeWithOrder", "MoE", "MultiHeadAttention", "RestorePadding"),
    *("GemmaRotaryEmbedding", "GridSample", "Rfft", "LinearAttentionGate", "ConvStateReplay", "QOrderedMatMul"),
)
SLOW = {
    "grouped_attention",
    "indexer",
    "paged_attention",
    "recurrent",
    "sparse_attention",
}  # a body of these takes a minute


@pytest.mark.parametrize("operator", RULED)
def test_every_mutant_is_caught_or_has_a_reason_to_survive(operator: str) -> None:
    before = dict(RULES)
    outcomes = survey([operator])
    assert len(outcomes) >= 10
    check(outcomes)
    assert before == RULES


@pytest.mark.matrix
@pytest.mark.parametrize("operator", DEFINED)
def test_every_mutant_of_a_body_is_caught_or_has_a_reason_to_survive(operator: str) -> None:
    before = dict(DEFINITIONS)
    outcomes = survey([f"{MICROSOFT}.{operator}"])
    assert len(outcomes) >= 5
    check(outcomes)
    assert before == DEFINITIONS


def test_the_sample_has_a_body_of_every_family_that_was_surveyed() -> None:
    sampled = {*DEFINED}
    surveyed = json.loads(RESULTS.read_text())["operators"]
    families = {family(key) for name, key in defined().items() if name in surveyed} - SLOW
    assert families == {family(defined()[f"{MICROSOFT}.{name}"]) for name in sampled}


def test_a_body_that_only_computes_another_result_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong bias does not change a gradient."""

    def believe(check: GradientCheck, candidate: Candidate) -> ResultRow:
        return ResultRow(check.problem.case, candidate.builder, candidate.executor, verdicts.RIGHT)

    monkeypatch.setattr(GradientCheck, "verdict", believe)
    outcomes = survey(["com.microsoft.BiasAdd"])
    assert {one.verdict for one in outcomes if one.caught} <= {WRONG_RESULT, FAILS}
    [lost] = [one for one in outcomes if one.mutant.place.endswith("op.Add(X, bias)") and "first" in one.mutant.change]
    assert (lost.verdict, lost.witnesses) == (WRONG_RESULT, (KERNEL,))


def check(outcomes: list[Outcome]) -> None:
    """Check that no mutant is there twice, and that those which survive have a reason."""
    assert len({one.mutant for one in outcomes}) == len(outcomes)
    assert [str(one.mutant) for one in outcomes if not one.caught and not one.mutant.reason] == []
    assert all(one.witnesses for one in outcomes if one.verdict == verdicts.WRONG)


def test_mutants_survive_a_judge_that_believes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def believe(check: GradientCheck, candidate: Candidate) -> ResultRow:
        return ResultRow(check.problem.case, candidate.builder, candidate.executor, verdicts.RIGHT)

    monkeypatch.setattr(GradientCheck, "verdict", believe)
    survivors = {one.mutant for one in survey(["Tanh"]) if not one.caught}
    assert Mutant("Tanh", "input", "1% too large") in survivors
    assert Mutant("Tanh", "input", "zero") in survivors


def test_mutants_survive_cases_that_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    same = tuple(
        case
        for case in every_case()
        if case.operator == "Mul" and {case.feeds["A"].shape, case.feeds["B"].shape} == {(2, 3)}
    )
    monkeypatch.setattr("refgrad.conformance.tools.mutating.survey.every_case", lambda: same)
    outcomes = {one.mutant: one.caught for one in survey(["Mul"])}
    assert outcomes[Mutant("Mul", "A", "other sign")]
    assert [caught for mutant, caught in outcomes.items() if mutant.change == "ReduceMean"] == [False]


def test_a_test_is_given_the_mutants_that_are_caught() -> None:
    """One that compares with differences notices them, one that always passes or always fails notices none."""

    def differences(case: Case) -> None:
        assert_gradient(case, directions=1, runtime=False)

    def passes(case: Case) -> None:
        pass

    def fails(case: Case) -> None:
        raise AssertionError

    caught = [one for one in survey(["Neg"], tests=(passes, fails, differences)) if one.caught]
    assert len(caught) >= 5
    assert all(one.tested for one in caught)
    assert not any(one.tested for one in survey(["Neg"], tests=(passes, fails)))


def test_one_of_so_many_mutants():
    every = [one.mutant for one in survey(["Conv"])]
    some = [one.mutant for one in survey(["Conv"], every=8)]
    assert len(every) // 9 <= len(some) <= len(every) // 8 + 1
    assert set(some) < set(every)
    assert survey(["Neg"], every=1000)


def test_an_operator_without_a_rule_is_named() -> None:
    with pytest.raises(OptionError, match=r"no rule for 'Softmx'.*Softmax"):
        survey(["Softmx"])


def test_the_survey_is_of_the_rules_and_bodies_there_are() -> None:
    surveyed = json.loads(RESULTS.read_text())["operators"]
    assert sorted(surveyed) == sorted(surveyed.keys() & (ruled() | defined()).keys())


def test_every_survivor_has_a_reason() -> None:
    survivors = [Mutant(**one) for one in json.loads(RESULTS.read_text())["survivors"]]
    assert [str(one) for one in survivors if not one.reason] == []


@pytest.mark.parametrize("row", equivalents(), ids=lambda row: f"{row.operator}: {row.place}: {row.change}")
def test_every_reason_is_that_of_a_survivor(row: Equivalent) -> None:
    survivors = [Mutant(**one) for one in json.loads(RESULTS.read_text())["survivors"]]
    assert any(row.matches(one.operator, one.place, one.change) for one in survivors)


def test_every_reason_names_a_function_that_is_there() -> None:
    """A module that was moved, or a function that was renamed, would leave its survivors without a reason."""
    functions = {name for file in PACKAGE.rglob("*.py") for name in functions_of(file)}
    places = [row.place.partition(":")[0].partition(".<locals>")[0].removesuffix(".*") for row in equivalents()]
    named = [place for place in places if re.fullmatch(r"\w+/\w+(\.\w+)*", place)]
    assert len(named) > len(places) / 2
    assert sorted({*named} - functions) == []


def functions_of(file: Path) -> list[str]:
    """The module with each of its functions and methods, as a place names them."""
    module = "/".join(file.with_suffix("").parts[-2:])
    tree = ast.parse(file.read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    methods = [
        f"{cls.name}.{node.name}"
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if isinstance(node, ast.FunctionDef)
    ]
    return [module, *(f"{module}.{name}" for name in functions + methods)]


@pytest.mark.parametrize("operator", ["Softmax", "com.microsoft.Gelu", "Loop"])
def test_the_tests_of_the_benchmark_pass_where_nothing_is_broken(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a test that cannot be called would count as one that notices no mutant."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = importlib.import_module("mutants")
    cases = (one for one in every_case() if one.operator == operator and one.values == "smooth")
    case = next(one for one in cases if one.node.domain or one.opset >= 16)
    for test in (benchmark.differences, benchmark.body, benchmark.judged):
        test(case)
