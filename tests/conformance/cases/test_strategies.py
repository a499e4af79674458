"""Cases drawn by hypothesis are valid, run, and have the gradient that differences say."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings

from refgrad.backends import get_backend
from refgrad.builder.op import Emitter
from refgrad.conformance import Case, strategies
from refgrad.conformance.oracles import Directional, get_oracle
from refgrad.conformance.problems.problem import ask
from refgrad.conformance.problems.systems.builders import build
from refgrad.errors import OptionError, RefgradError
from refgrad.tables.registry import RULES, Rule

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

QUICK = settings(
    max_examples=4,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
KINKED = [name for name in strategies.operators() if strategies._registry()[name].kinks]
NOT_INFERRED = {
    "MeanVarianceNormalization": "onnx fails on the constants in its function body",
    "Resize": "onnx counts no elements in sizes where its declared length is a symbol",
    "ai.onnx.preview.FlexAttention": "onnx refuses inputs of unknown rank",
}
NARROW = [np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float64)]


def errors(case: Case) -> Iterator[float]:
    """By how much refgrad's gradient in float64 is off along each direction, relative to what is explained."""
    problem = ask(case)
    built = build("refgrad", problem)
    feeds = problem.at | {built.cotangents[name]: cotangent for name, cotangent in problem.wide_cotangents.items()}
    results = get_backend("numpy").prepare(built.model, precision="float64").run(feeds)
    for said in get_oracle("differences").observe(problem):
        if not isinstance(said, Directional):
            continue
        zero = np.zeros(said.direction.shape)
        gradient = results[built.gradients[said.name]] if said.name in built.gradients else zero
        size = np.linalg.norm(gradient) * np.linalg.norm(said.direction)
        allowed = said.error + 1e-7 * (size + abs(said.value)) + 1e-12
        yield abs(np.vdot(gradient, said.direction) - said.value) / allowed


def agrees(case: Case) -> bool:
    return max(errors(case), default=0) <= 1


@pytest.mark.matrix
@pytest.mark.parametrize("operator", strategies.operators())
def test_a_drawn_case_is_valid_and_has_the_gradient_that_differences_say(operator: str):
    @seed(1)
    @QUICK
    @given(strategies.node(operator, shapes=None))
    def check(case: Case) -> None:
        onnx.checker.check_model(case.model, full_check=operator not in NOT_INFERRED)
        assert case.operator == operator
        assert (case.values, case.provenance) == ("smooth", "strategy")
        assert agrees(case)

    check()


@pytest.mark.parametrize("operator", KINKED)
def test_a_kink_is_drawn_where_one_is_asked_for(operator: str):
    case = find(
        strategies.node(operator, values="kink"), lambda case: case.values == "kink", settings=QUICK, random=Random(0)
    )
    onnx.checker.check_model(case.model, full_check=True)
    ask(case)


@pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("operator", ["Add", "Gemm", "Pow", "ReduceMax", "ScatterND", "Clip", "Gather"])
def test_the_floats_have_the_type_that_is_asked_for(operator: str, dtype: np.dtype):
    @seed(2)
    @QUICK
    @given(strategies.node(operator, dtype=dtype))
    def check(case: Case) -> None:
        onnx.checker.check_model(case.model, full_check=True)
        assert case.dtype in (dtype.name, "")
        get_backend("numpy").prepare(case.model).run(case.feeds)

    check()


def test_every_opset_that_is_asked_for_is_that_of_the_model():
    for opset in (13, 17, 18, 24):
        case = find(strategies.node("ReduceMean", opset=opset), lambda case: True, settings=QUICK, random=Random(0))
        assert case.opset == opset


def test_a_name_tells_cases_apart_and_is_the_same_in_every_run():
    drawn: list[dict[str, bytes]] = []
    for _ in range(2):
        drawn.append({})

        @seed(3)
        @settings(QUICK, max_examples=50)
        @given(strategies.node("Add"))
        def record(case: Case) -> None:
            content = case.model.SerializeToString() + b"".join(a.tobytes() for a in case.feeds.values())
            assert drawn[-1].setdefault(case.name, content) == content

        record()
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) > 25


def reading(**instead: object) -> Callable[[Rule], Callable]:
    """Spoil a rule: it reads something else instead of these parameters."""

    def spoil(rule: Rule) -> Callable:
        names = list(inspect.signature(rule.function).parameters)[1:]

        def wrong(op: Emitter, *read: object) -> object:
            return rule.function(op, *(instead.get(name, value) for name, value in zip(names, read, strict=True)))

        return wrong

    return spoil


def scaled(rule: Rule) -> Callable:
    """Spoil a rule: what it returns is multiplied by almost 2."""
    return lambda op, *read: tuple(op.Mul(adjoint, 2.001) for adjoint in rule.function(op, *read))


WRONG = {  # the operator, its spoilt rule, how many elements its largest input has
    "a factor": ("Mul", scaled, 1),
    "an axis that is not read": ("Softmax", reading(axis=-1), 4),
    "a transposition that is not read": ("Gemm", reading(transB=0), 2),
    "steps that are not read": ("Slice", reading(steps=None), 4),
    "batches that are not read": ("GatherND", reading(batch_dims=0), 4),
}


@pytest.mark.parametrize("planted", WRONG)
def test_a_planted_wrong_rule_is_found_and_shrinks_to_a_few_elements(planted: str, monkeypatch: pytest.MonkeyPatch):
    operator, spoil, most = WRONG[planted]
    rule = RULES["", operator]
    monkeypatch.setitem(RULES, ("", operator), replace(rule, function=spoil(rule)))

    def wrong(case: Case) -> bool:
        try:
            return not agrees(case)
        except RefgradError:  # the wrong gradient does not even run
            return True

    thorough = settings(QUICK, max_examples=300)
    case = find(strategies.node(operator, opset=21), wrong, settings=thorough, random=Random(0))
    assert max(array.size for array in case.feeds.values()) <= most


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operator": "Convv"}, "'Convv'. Did you mean 'Conv'?"),
        ({"operator": "Add", "shapes": "dynamic"}, "'static', 'symbolic', 'unknown'"),
        ({"operator": "Add", "values": "nan"}, "'smooth', 'kink'"),
        ({"operator": "Add", "values": "kink"}, "knows no kink"),
        ({"operator": "Add", "opset": 6}, "It has 13 to "),
        ({"operator": "Add", "dtype": np.int32}, "takes no int32. It takes 'float16'"),
        ({"operator": "Pow", "dtype": ml_dtypes.bfloat16, "opset": 13}, "takes no bfloat16"),
        ({"operator": "Scatter", "opset": 11}, "It has 9 to 10"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_strategy_does_not_have_is_said_with_what_it_has(arguments: dict, message: str):
    with pytest.raises(OptionError) as raised:
        strategies.node(**arguments)
    assert message in str(raised.value)


def test_without_hypothesis_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("refgrad.conformance.strategies.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    strategies._import_families.cache_clear()
    with pytest.raises(OptionError, match=r"pip install '\.\[conformance\]'"):
        strategies.operators()
