"""Each operator of ai.onnx has one kind, and the tables that say the same of an operator agree."""

from collections import Counter

import onnx.defs
import pytest

from refgrad import traits
from refgrad.tables.kinks import KINKS
from refgrad.tables.randomness import RANDOM

pytestmark = pytest.mark.interpreter

OPERATORS = {schema.name: schema for schema in onnx.defs.get_all_schemas() if schema.domain == ""}


def test_every_operator_has_one_kind():
    counts = Counter(name for kind in traits.KINDS for name in kind)
    assert counts == dict.fromkeys(OPERATORS, 1)


def test_a_group_of_names_is_a_kind_or_a_trait():
    groups = {name: found for name, found in vars(traits).items() if isinstance(found, frozenset)}
    cutting = {"BOOLEAN", "COUNTING", "ELEMENTWISE", "MIXING", "MOVING", "OF_SIZES", "SEQUENCES", "SUMS"}
    assert {name for name, found in groups.items() if found not in traits.KINDS} == cutting
    assert all(found <= OPERATORS.keys() for found in groups.values())
    assert traits.MIXING.isdisjoint(traits.ELEMENTWISE)


@pytest.mark.parametrize(("names", "kind"), [(traits.BOOLEAN, "tensor(bool)"), (traits.COUNTING, "tensor(int64)")])
def test_the_type_of_a_result_is_that_of_the_schema(names, kind):
    found = set()
    for name, schema in OPERATORS.items():
        made = schema.outputs[0].type_str if schema.outputs else ""
        allowed = {one.type_param_str: list(one.allowed_type_strs) for one in schema.type_constraints}.get(made, [made])
        if allowed == [kind]:
            found.add(name)
    others = {"NonMaxSuppression"} if kind == "tensor(int64)" else {"RegexFullMatch"}
    assert names == found - others  # no gradient reads what these make


def test_sequences_are_those_of_the_schema():
    of_sequences = {
        name
        for name, schema in OPERATORS.items()
        if schema.outputs and all(text.startswith("seq(") for text in schema.outputs[0].types)
    }
    assert of_sequences == traits.SEQUENCES


def test_a_step_has_a_row_for_its_jumps():
    assert {row.operator for row in KINKS} >= traits.STEPS


def test_random_operators_are_those_that_draw():
    assert {name for domain, name in RANDOM if not domain} == traits.RANDOM
