"""Every node test of onnx with a float input and a float output: its gradient is right, or the reason why not holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
from onnx_tests import names

from refgrad.backends import available, get_backend
from refgrad.conformance.judge.running.nodemodels import NodeModel, excluded, node_models, relative_error, wrong
from refgrad.errors import BackendError, RefgradError
from refgrad.tables.registry import CONTROL_FLOW_RULES, RULES, rule

pytestmark = pytest.mark.slow


@cache
def models() -> Mapping[str, NodeModel]:
    return {test.name: test for test in node_models()}


@pytest.mark.matrix
@pytest.mark.parametrize("folded", [False, True], ids=["inputs", "constants"])
@pytest.mark.parametrize("name", names()["judged"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities and NaN are among the feeds
def test_gradient_agrees_with_differences(name: str, folded: bool) -> None:
    test = models()[name]
    assert not wrong(test.folded() if folded else test)


@pytest.mark.skipif("ort-cpu" not in available(), reason="ONNX Runtime is not installed")
@pytest.mark.parametrize("name", names()["structured"])
def test_onnxruntime_computes_the_gradient_of_control_flow(name: str) -> None:
    test = models()[name]
    try:
        assert relative_error(test, "ort-cpu") <= test.tolerance
    except BackendError:
        with pytest.raises(BackendError):  # it does not run the model itself
            get_backend("ort-cpu").prepare(test.model).run(test.feeds)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("test_linear_attention_fp16_expanded", 2**-10),
        ("test_range_bfloat16_type_positive_delta_expanded", 2**-7),
        ("test_range_float_type_positive_delta_expanded", 1e-4),
    ],
)
def test_cotangents_have_the_type_of_the_output(name: str, tolerance: float) -> None:
    test = models()[name]
    assert test.tolerance == tolerance
    assert relative_error(test, "numpy") <= tolerance


def test_nothing_is_left_out() -> None:
    judged = [name for name, test in models().items() if excluded(test) is None]
    assert judged == names()["judged"]
    assert [name for name in judged if models()[name].structured] == names()["structured"]
    assert len(models()) >= 1370
    assert len(names()["structured"]) >= 60
    assert len(models()) - len(judged) <= 5


@pytest.mark.parametrize("name", names()["excluded"])
def test_an_excluded_model_is_refused(name: str) -> None:
    """Once its gradient can be built, the exclusion has to go."""
    with pytest.raises(RefgradError):
        wrong(models()[name])


@pytest.mark.parametrize(
    ("operator", "name", "planted"),
    [
        ("Sigmoid", "test_sigmoid", lambda op, d_Y, Y: op.Mul(op.grad.SigmoidGrad(d_Y, Y), 1.001)),
        ("Softmax", "test_softmax_axis_1", lambda op, d_output, output: op.Mul(d_output, 0.0)),
        (
            "Transpose",
            "test_transpose_all_permutations_4",
            lambda op, d_transposed: op.Transpose(d_transposed, perm=[2, 0, 1]),
        ),
        ("Gather", "test_gather_0", lambda op, d_output, data: op.zeros_like(data)),
    ],
)
def test_a_wrong_rule_is_caught(operator: str, name: str, planted: Callable[..., str], monkeypatch: Any) -> None:
    test = models()[name]
    assert not wrong(test)
    monkeypatch.setitem(RULES, ("", operator), RULES["", operator])
    rule(operator, replace=True, wrt=RULES["", operator].wrt)(planted)
    assert wrong(test)
    assert wrong(test.folded())


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("Loop", "test_range_float_type_positive_delta_expanded"),
        ("Scan", "test_scan9_multi_state"),
        ("SequenceMap", "test_sequence_map_add_1_sequence_1_tensor"),
    ],
)
def test_a_wrong_control_flow_rule_is_caught(operator: str, name: str, monkeypatch: Any) -> None:
    """One whose last cotangent is zero."""
    test = models()[name]
    assert not wrong(test)
    right = CONTROL_FLOW_RULES["", operator].differentiate

    def planted(self: Any, op: Any, *arguments: Any) -> Any:
        *others, (last, _) = right(self, op, *arguments)
        return [*others, (last, None)]

    monkeypatch.setattr(CONTROL_FLOW_RULES["", operator], "differentiate", planted)
    assert wrong(test)
    assert wrong(test.folded())
