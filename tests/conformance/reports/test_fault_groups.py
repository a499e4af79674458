"""Groups of faults: who, which operator, in which cases, and what these have in common."""

from __future__ import annotations

import numpy as np
import pytest

from refgrad.conformance.case import node_case
from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.judge.running.limitations import Limitation, Limitations
from refgrad.conformance.judge.running.results import About, Results
from refgrad.conformance.reports import groups
from refgrad.conformance.reports.traits import common, traits
from refgrad.conformance.verdicts import (
    CRASHED,
    OUT_OF_MEMORY,
    REFUSED,
    RIGHT,
    TIMED_OUT,
    UNDECIDED,
    UNSUPPORTED,
    WRONG,
)

pytestmark = pytest.mark.interpreter

X = np.array([[0.5, 1.5, 2.0], [1.25, 0.75, 0.3]], np.float32)


def softmax(shape=(2, 3), dtype=np.float32, shapes="static", **attributes):
    return node_case("Softmax", np.full(shape, 0.5, dtype), opset=13, shapes=shapes, **attributes)


@pytest.mark.parametrize(
    ("some", "others", "expected"),
    [
        (
            [softmax(axis=-1), softmax()],
            [softmax(axis=0), softmax(axis=1)],
            "in every case with negative axes and in no other",
        ),  # -1 is the default
        (
            [softmax(axis=-1)],
            [softmax(axis=0), softmax(axis=-2), softmax(axis=1)],
            "in every case with axis=-1 and in no other",
        ),
        (
            [softmax((0, 3)), softmax((2, 0))],
            [softmax(), softmax(axis=-1)],
            "in every case with empty inputs and in no other",
        ),
        ([softmax(), softmax(axis=-1)], [softmax((0, 3))], "in every case with non-empty inputs and in no other"),
        (  # the shape of a scalar is an empty tensor, and no input of the operator
            [node_case("Tanh", X), node_case("Tanh", np.array(0.5, np.float32), shapes="unknown")],
            [node_case("Tanh", X[:0])],
            "in every case with non-empty inputs and in no other",
        ),
        ([softmax(dtype=np.float16)], [softmax(), softmax(axis=0)], "in every case with float16 and in no other"),
        (
            [softmax(shapes="unknown")],
            [softmax(), softmax(shapes="symbolic")],
            "in every case with unknown shapes and in no other",
        ),
        ([softmax((2, 3, 4))], [softmax(), softmax((4,))], "in every case with inputs of rank 3 and in no other"),
        (
            [softmax((2, 3), np.float16, axis=0)],
            [softmax((2, 3), np.float16), softmax(axis=0)],
            "in every case with axis=0 and float16 and in no other",
        ),
        (
            [softmax(axis=0), softmax(axis=1)],
            [softmax(axis=0, dtype=np.float16), softmax((4,), np.float16)],
            "in every case with float32 and in no other",
        ),
        ([softmax()], [], ""),
        ([], [softmax()], ""),
        ([softmax()], [softmax()], ""),
        (
            [node_case("ReduceSum", X, np.array([-1]), opset=13, constant=["axes"])],
            [
                node_case("ReduceSum", X, np.array([0]), opset=13, constant=["axes"]),
                node_case("ReduceSum", X, opset=13),
            ],
            "in every case with negative axes and in no other",
        ),
        (
            [node_case("Clip", X, None, np.float32(1))],
            [node_case("Clip", X, np.float32(0), np.float32(1)), node_case("Clip", X, np.float32(0))],
            "in every case with input 1 left out and in no other",
        ),
        ([node_case("Exp", -X)], [node_case("Exp", X)], "in every case with negative inputs and in no other"),
        ([node_case("Exp", X[0, 0])], [node_case("Exp", X)], "in every case with scalar inputs and in no other"),
        (
            [node_case("Mul", X, X[0])],
            [node_case("Mul", X, X)],
            "in every case with inputs of different shapes and in no other",
        ),
    ],
)
def test_what_some_cases_have_in_common_is_named(some, others, expected):
    assert common(some, others) == expected


def test_what_some_of_the_others_have_too_is_named_as_such():
    others = [softmax(axis=0), softmax(axis=1), softmax(axis=-1)]
    assert (
        common([softmax(axis=-1, dtype=np.float32), softmax(axis=-2)], others)
        == "only in cases with negative axes, but not in all of them"
    )


def test_every_case_has_traits():
    assert list(traits(node_case("Exp", X)))


def results(*rows, cases=("a", "bb", "ccc")):
    """Results on cases of Exp; a row is (case, builder, executor, verdict, side, forward)."""
    made = [
        ResultRow(case, builder, executor, verdict, side=side, forward=forward, note="n", forward_note="f")
        for case, builder, executor, verdict, side, forward in rows
    ]
    about = {name: About("Exp", 13, "float32") for name in cases}
    return Results({"seed": 0}, {}, about, tuple(made))


def test_a_wrong_model_is_one_group_whoever_wrote_the_gradient():
    found = groups.faults(
        results(
            ("bb", "one", "e", WRONG, "executor", WRONG),
            ("a", "one", "e", WRONG, "executor", WRONG),
            ("a", "two", "e", WRONG, "executor", WRONG),
            ("ccc", "one", "e", RIGHT, "", ""),
        )
    )
    [group] = found
    assert (group.side, group.name, group.what, group.cases, group.asked) == ("executor", "e", "forward", 2, 3)
    assert group.title == "the executor e: the forward pass of Exp is wrong: 2 of 3 cases"
    assert (group.smallest.case, group.note) == ("a", "f")
    assert group.command == "refgrad compare --case a --a refgrad@numpy --b one@e"


def test_a_builder_at_fault_is_one_group_whoever_ran_the_gradient():
    [group] = groups.faults(
        results(
            ("a", "b", "e", WRONG, "builder", ""),
            ("a", "b", "numpy", WRONG, "builder", ""),
            ("bb", "b", "e", RIGHT, "", ""),
        )
    )
    assert group.title == "the builder b: the gradient of Exp is wrong: 1 of 2 cases"
    assert group.command == "refgrad compare --case a --a refgrad@numpy --b b@numpy"


def test_both_sides_may_be_at_fault():
    found = groups.faults(results(("a", "b", "e", WRONG, "builder", CRASHED)))
    assert [(group.side, group.what, group.verdict) for group in found] == [
        ("executor", "forward", CRASHED),
        ("builder", "gradient", WRONG),
    ]


def test_a_wrong_model_with_a_right_gradient_is_told():
    [group] = groups.faults(results(("a", "b", "e", RIGHT, "", WRONG)))
    assert group.title == "the executor e: the forward pass of Exp is wrong, but no gradient is wrong: 1 case"
    assert not group.is_fault


def test_an_executor_at_fault_whose_model_is_right_is_told_apart():
    [group] = groups.faults(results(("a", "b", "e", CRASHED, "executor", "")))
    assert "the gradient of Exp crashes, though the operator itself is right" in group.title


def test_who_is_not_known_is_both():
    [group] = groups.faults(results(("a", "b", "e", WRONG, "", "")))
    assert group.title.startswith("b on e (builder or executor): the gradient of Exp is wrong")


def test_other_verdicts_on_the_case_tell_who_it_is():
    made = results(
        ("a", "one", "e", WRONG, "", ""),
        ("a", "one", "f", WRONG, "", ""),
        ("a", "two", "e", RIGHT, "", ""),
        ("bb", "one", "e", WRONG, "", ""),
        ("bb", "one", "f", RIGHT, "", ""),
        ("bb", "two", "e", WRONG, "", ""),
    )
    assert {(group.side, group.name, group.cases) for group in groups.faults(made)} == {
        ("builder", "one", 1),  # a
        ("executor", "e", 1),  # bb
    }
    assert not any("the operator itself is right" in group.title for group in groups.faults(made))  # nobody ran it


def test_the_result_is_one_sentence():
    made = results(
        ("a", "b", "e", WRONG, "builder", ""),
        ("bb", "b", "f", WRONG, "", ""),
        ("a", "c", "e", CRASHED, "executor", WRONG),
        ("ccc", "c", "e", RIGHT, "", ""),
    )
    told = "the executor e in Exp; the builder b in Exp; b on f (builder or executor) in Exp"
    expected = WRONG, f"3 faults in 4 verdicts (3 cases of 1 operator): {told}"
    assert groups.sentence(made, groups.faults(made)) == expected


def test_a_sentence_about_many_sides_is_cut():
    made = results(*(("a", f"b{k}", "e", WRONG, "builder", "") for k in range(7)))
    assert groups.sentence(made, groups.faults(made))[1].endswith("; the builder b3 in Exp; 3 more")


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ((RIGHT, UNDECIDED, UNSUPPORTED), "right: no fault in 3 {}: 1 right, 1 undecided, 1 not supported"),
        ((UNSUPPORTED, UNDECIDED), "undecided: no fault in 2 {}: 1 undecided, 1 not supported"),
        ((REFUSED, REFUSED), "refused: no fault in 2 {}: 2 refused"),
    ],
)
def test_a_result_without_faults_is_a_sentence(verdicts, expected):
    made = results(*(("a", f"b{k}", "e", one, "", "") for k, one in enumerate(verdicts)))
    told = expected.replace("{}", "verdicts (3 cases of 1 operator)")
    assert groups.sentence(made, groups.faults(made)) == (expected.partition(":")[0], told)


@pytest.mark.parametrize(
    ("verdict", "witnesses", "numbers", "expected"),
    [
        (
            WRONG,
            ("differences", "torch"),
            (0.5, 1e-6),
            "differences, torch say so; relative error 0.5, 1e-06 is allowed",
        ),
        (WRONG, ("differences",), (0.5, None), "differences say so; relative error 0.5"),
        (WRONG, (), (None, None), "the result is no gradient"),
        (CRASHED, (), (None, None), "it gives no result"),
    ],
)
def test_a_group_says_how_sure_it_is(verdict, witnesses, numbers, expected):
    row = ResultRow("a", "b", "e", verdict, witnesses, (), *numbers)
    [group] = groups.faults(Results({"seed": 0}, {}, {"a": About("Exp", 13, "float32")}, (row,)))
    assert group.certainty == expected


def test_what_a_limitation_explains_is_left_out():
    made = results(("a", "b", "e", WRONG, "", ""), ("bb", "b", "e", WRONG, "", ""))
    [group] = groups.faults(made, is_known=lambda row, what: (row.case, what) == ("a", "gradient"))
    assert [row.case for row in group.rows] == ["bb"]


def test_faults_come_before_what_no_gradient_shows():
    made = results(("a", "b", "e", RIGHT, "", WRONG), ("a", "b", "f", WRONG, "builder", ""))
    assert [group.name for group in groups.faults(made)] == ["b", "e"]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (Limitation("r", executor="e", operator="Exp"), True),
        (Limitation("r", executor="e", operator="Exp", verdict=WRONG), True),
        (Limitation("r", executor="e", operator="Exp", verdict=CRASHED), False),
        (Limitation("r", executor="f", operator="Exp"), False),
        (Limitation("r", executor="e", operator="Log"), False),
    ],
)
def test_a_limitation_is_about_the_model_itself_too(entry, expected):
    [row] = results(("a", "b", "e", RIGHT, "", WRONG)).rows
    assert Limitations((entry,)).covers_model(row, {"a": "Exp"}) is expected


def test_what_has_no_answer_is_a_line_for_each_side():
    made = results(
        ("a", "b", "e", RIGHT, "", UNSUPPORTED),
        ("bb", "b", "e", UNSUPPORTED, "", UNSUPPORTED),
        ("ccc", "c", "e", REFUSED, "", ""),
    )
    assert list(groups.without_answer(groups.not_answered(made))) == [
        "refused: the builder c refuses Exp (1), such as ccc: n",
        "not supported: the executor e does not support Exp (2), such as a: f",
    ]
    assert len(list(groups.without_answer(groups.not_answered(made), verbose=True))) == 2


@pytest.mark.parametrize(
    ("verdict", "words"), [(TIMED_OUT, "takes too long"), (OUT_OF_MEMORY, "runs out of memory"), (CRASHED, "crashes")]
)
def test_a_fault_is_a_sentence(verdict, words):
    [forward] = groups.faults(results(("a", "b", "e", verdict, "executor", verdict)))
    assert forward.fault == f"the forward pass of Exp {words}"
    [gradient] = groups.faults(results(("a", "b", "e", verdict, "builder", "")))
    assert gradient.fault == f"the gradient of Exp {words}"
