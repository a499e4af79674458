"""Every operator of ONNX has one verdict on its derivative, with a reason."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest

import refgrad
from refgrad.errors import UnknownNameError
from refgrad.protos.domains import NCHWC
from refgrad.show.explain import explain
from refgrad.tables import registry
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.operators import TAGS, against_tags, classify, operators

pytestmark = pytest.mark.interpreter

SCHEMAS = sorted((schema.domain, schema.name) for schema in onnx.defs.get_all_schemas())


@pytest.mark.parametrize("key", SCHEMAS, ids=".".join)
def test_every_operator_is_classified(key: tuple[str, str]) -> None:
    """An operator that a new onnx brings fails here until somebody says what its derivative is."""
    found = classify(*key)
    assert found.derivative in ("rule", "function", "zero", "none")
    assert found.text
    tables = (registry.RULES, registry.CONTROL_FLOW_RULES, registry.ZERO, registry.NO_DERIVATIVE, registry.BODY)
    assert sum(key in table for table in tables) == 1


def test_an_operator_that_nobody_classified_is_noticed() -> None:
    schema = onnx.defs.OpSchema("Unheard", "test.domain", 1)
    onnx.defs.register_schema(schema)
    try:
        [found] = [o for o in operators() if o.operator == "test.domain.Unheard"]
    finally:
        onnx.defs.deregister_schema("Unheard", 1, "test.domain")
    assert found.derivative == "missing"


@pytest.mark.parametrize("key", sorted(registry.BODY), ids=".".join)
def test_an_operator_differentiated_through_its_body_has_one(key: tuple[str, str]) -> None:
    if key in DEFINITIONS or key[0] == NCHWC:  # that is read back into plain operators
        return
    schema = onnx.defs.get_schema(key[1], key[0])
    assert schema.has_function or schema.has_context_dependent_function or schema.deprecated


def test_the_tags_of_the_schemas_are_followed_or_a_reason_is_written() -> None:
    found = against_tags()
    assert not set(found) - set(TAGS), "say why in refgrad.tables.operators.TAGS"
    assert not set(TAGS) - set(found), "these reasons are of no use any more"


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (
            "com.microsoft.BeamSearch(input_ids, ",
            "there is no derivative: it runs a decoder until it has found its tokens",
        ),
        ("com.microsoft.MurmurHash3(X) -> Y", "the derivative is zero: a hash"),
        ("com.microsoft.nchwc.Conv(X, W, B, Sum) -> Y", "read back as Conv"),
        ("com.ms.internal.nhwc.Conv\n", "save the model with the provider of the CPU"),
    ],
)
def test_an_operator_that_has_only_a_reason_is_explained_and_listed(shown: str, said: str) -> None:
    operator = shown.partition("(")[0].strip()
    text = str(explain(operator))
    assert text.startswith(shown)
    assert said in text
    assert operator in {one.operator for one in operators()}


def test_a_model_is_no_operator_to_explain() -> None:
    with pytest.raises(UnknownNameError, match=r"'m\.onnx' is a model, .* refgrad recipe saliency MODEL"):
        explain("m.onnx")


def test_a_report_has_the_whole_first_paragraph_of_a_formula() -> None:
    """The formula of LSTM has two lines."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[3, 1, 2] x, float[1, 8, 2] w, float[1, 8, 2] r) => '
        "(float[3, 1, 1, 2] y) { y = LSTM <hidden_size = 2> (x, w, r) }"
    )
    [row] = refgrad.preflight(model).rows
    assert "\n" not in row.reason
    assert row.reason == classify("", "LSTM").text
