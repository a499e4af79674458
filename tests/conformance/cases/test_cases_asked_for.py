"""Cases are made when they are asked for: an operator's alone, and a model when it is read."""

from __future__ import annotations

import inspect
import pickle
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto
from registering import forgetting

from refgrad.conformance.case import Case, node_case
from refgrad.conformance.cases import every_case, of_operators
from refgrad.conformance.judge.running.sources import select, tables
from refgrad.errors import PluginError, UnknownNameError
from refgrad.extend import case

pytestmark = pytest.mark.interpreter


def is_made(one: Case) -> bool:
    return "model" in vars(one)


def test_every_operator_has_the_same_cases_alone() -> None:
    whole: dict[str, list[str]] = defaultdict(list)
    for one in tables():
        whole[one.operator].append(one.name)
    alone = {operator: [one.name for one in tables([operator])] for operator in whole}
    assert alone == whole


def test_the_cases_of_an_operator_take_few_files() -> None:
    assert {family for family, _ in of_operators(["Div"])} <= {
        "arithmetic",
        "degenerate",
        "kinks",
        "opsets",
        "rare",
        "special",
    }


def test_what_is_said_of_a_case_before_it_is_made_is_true_of_what_is_made() -> None:
    for known in every_case()[::7]:
        unmade = pickle.loads(pickle.dumps(known))
        said = unmade.operator, unmade.opset, unmade.dtype, unmade.static
        made = Case(known.name, unmade.model, unmade.feeds)
        assert said == (made.operator, made.opset, made.dtype, made.static), known.name


def test_a_recipe_makes_one_model_for_all_its_cases() -> None:
    one = node_case("Relu", np.ones(2, np.float32))
    renamed = one.changed(name="other", values="kink")
    assert not is_made(one)
    assert (renamed.name, renamed.values, renamed.operator) == ("other", "kink", "Relu")
    assert renamed.model is one.model
    with_feeds = one.changed(feeds={"X": np.ones(2, np.float64)})
    assert (with_feeds.dtype, with_feeds.model) == ("float64", one.model)


def test_what_is_sent_to_a_process_is_the_recipe_or_the_model() -> None:
    one = node_case("Relu", np.ones(2, np.float32))
    assert not is_made(pickle.loads(pickle.dumps(one)))
    assert one.model == pickle.loads(pickle.dumps(one)).model
    assert is_made(pickle.loads(pickle.dumps(one)))
    one.model.doc_string = "changed"
    assert pickle.loads(pickle.dumps(one)).model.doc_string == "changed"


def test_a_selection_makes_no_model_that_it_does_not_take() -> None:
    given = list(tables(["Div", "com.microsoft.Gelu"]))
    unmade = [one.name for one in given if one.operator == "com.microsoft.Gelu" and not is_made(one)]
    taken = list(select(given, ["Div"]))
    assert len(taken) == 27
    assert [one.name for one in given if one.operator == "com.microsoft.Gelu" and not is_made(one)] == unmade != []


@pytest.mark.parametrize(
    ("typo", "meant"), [("Sofmax", "Softmax"), ("Gelu9", "Gelu"), ("com.microsoft.gelu", "com.microsoft.Gelu")]
)
def test_a_name_that_is_no_operator_is_refused_before_any_case_is_made(
    typo: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(ModelProto, "CopyFrom", lambda *given: made.append(given))
    with pytest.raises(UnknownNameError, match=f"Did you mean '{meant}'"):
        select(tables([typo]), [typo])
    assert not made


def test_a_case_that_cannot_be_made_names_the_line_of_its_author() -> None:
    def cases(make: Any) -> Iterator[Any]:
        yield make(np.ones(2, np.float32), wrong=object())  # this line

    with forgetting():
        case("Softsign")(cases)
        line = inspect.getsourcelines(cases)[1] + 1
        with pytest.raises(PluginError, match=rf"The cases of Softsign, .*test_cases_asked_for.*:{line}\)"):
            list(tables(["Softsign"]))
