"""Is an executor right of the model itself, and who is at fault: verdicts that a run gives beside those on gradients."""

from __future__ import annotations

import builtins
import re

import failing
import numpy as np
import pytest

from refgrad.cli.reporting import remarks
from refgrad.conformance.case import node_case
from refgrad.conformance.judge.rows import says_unsupported
from refgrad.conformance.judge.running.journal import Journal
from refgrad.conformance.judge.running.limitations import Limitations
from refgrad.conformance.judge.running.results import load
from refgrad.conformance.judge.running.runner import Plan
from refgrad.conformance.judge.running.suite import run_suite
from refgrad.errors import ResultsError

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

X = np.array([[0.5, -1.5, 2.0], [1.25, -0.75, 0.3]], np.float32)


def rows(executor, builder="refgrad", case=None, **plan):
    asked = Plan((builder,), (executor,), **plan)
    return run_suite([case or node_case("Exp", X)], asked, lanes=1).rows


def row(executor, builder="refgrad", case=None):
    [one] = rows(f"failing:{executor}" if ":" not in executor and executor != "numpy" else executor, builder, case)
    return one


@pytest.mark.parametrize(
    ("executor", "verdict", "forward", "note"),
    [
        ("Keyed", "crashed", "crashed", "KeyError: 'Exp'"),
        ("Refusing", "not supported", "not supported", "NotImplementedError: Exp"),
        ("Subclass", "not supported", "not supported", "OddError: Exp"),
        (
            "ForeignSubclass",
            "not supported",
            "not supported",
            "OddError: Exp",
        ),
        ("Silent", "crashed", "crashed", "SilentError"),
        (
            "ForeignSilent",
            "crashed",
            "crashed",
            "SilentError",
        ),
        ("Saying", "not supported", "not supported", "RuntimeError: There is no kernel for Exp"),
        ("Slowly", "crashed", "", "ZeroDivisionError: of a gradient"),
    ],
)
def test_only_what_says_so_is_not_supported(executor, verdict, forward, note):
    found = row(executor)
    assert (found.verdict, found.forward, found.note) == (verdict, forward, note)
    assert found.side == ("executor" if verdict == "crashed" else "")


@pytest.mark.parametrize(
    ("executor", "builder", "verdict", "side", "forward"),
    [
        ("Halved", "refgrad", "wrong", "executor", ""),
        ("Shifted", "refgrad", "right", "", "wrong"),
        ("foreign:Zeros", "refgrad", "wrong", "executor", "crashed"),  # it knows no other outputs
        ("foreign:More", "foreign:doubled", "wrong", "builder", ""),
        ("Shifted", "foreign:doubled", "wrong", "builder", "wrong"),
        ("Keyed", "foreign:doubled", "crashed", "executor", "crashed"),
        ("Slowly", "foreign:doubled", "crashed", "executor", ""),
        ("numpy", "foreign:doubled", "wrong", "builder", ""),
        ("numpy", "foreign:asserting", "crashed", "builder", ""),
        ("foreign:Fewer", "refgrad", "wrong", "executor", "wrong"),
        ("numpy", "foreign:nothing", "wrong", "builder", ""),
        ("numpy", "refgrad", "right", "", ""),
    ],
)
def test_the_side_at_fault_is_named(executor, builder, verdict, side, forward):
    found = row(executor, builder)
    assert (found.verdict, found.side, found.forward) == (verdict, side, forward), found


def test_masked_elements_are_no_answer():
    found = row("Masked")
    assert (found.verdict, found.witnesses, found.side) == ("wrong", ("answer",), "executor")
    assert found.note == "failing:Masked returned masked elements in 'input_grad'."


def test_a_wrong_result_is_named_with_its_element():
    said = re.fullmatch(r"element \((\d), (\d)\) of 'output' is (.+) instead of (.+)", row("Shifted").forward_note)
    place, got, due = (int(said[1]), int(said[2])), float(said[3]), float(said[4])
    assert got == pytest.approx(due + 1, rel=1e-5)
    assert due == pytest.approx(np.exp(np.float64(X[place])), rel=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        node_case("Exp", X.astype(np.float16)),
        node_case("Dropout", X, np.float32(0.5), np.array(True), opset=22),
        node_case("TopK", X, np.array([2]), opset=11, outputs=2),
        node_case("QuantizeLinear", X, np.float32(0.1), np.uint8(3), opset=21),
        node_case("ReduceMax", X[:, :0], np.array([0]), opset=20),
        node_case("Exp", np.float32(0.5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("executor", ["onnx.reference", "ort-cpu"])
def test_who_computes_the_model_is_right(executor, case):
    if executor == "ort-cpu":
        pytest.importorskip("onnxruntime")
    for found in rows(executor, case=case):
        assert found.forward in ("", "not supported"), found
        assert found.forward or not found.forward_note, found


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_a_wrong_result_of_any_shape_is_seen(shape):
    found = row("Shifted", case=node_case("Exp", np.full(shape, 0.5, np.float32)))
    assert (found.forward, bool(found.forward_note)) == ("wrong" if 0 not in shape else "", 0 not in shape), found


def test_an_error_of_the_comparison_blames_nobody(monkeypatch, tmp_path):
    monkeypatch.setattr("refgrad.conformance.judge.running.runner.forward_fault", failing.broken)
    plan = Plan(("refgrad",), ("failing:Shifted",))
    results = run_suite([node_case("Exp", X)], plan, lanes=1)
    results.save(tmp_path / "results.json")
    [found] = load(tmp_path / "results.json").rows
    assert (found.verdict, found.forward) == ("right", "")
    assert found.forward_note == "the results of the model were not compared: this always fails"
    assert list(remarks(results, {found.case: "Exp"}, Limitations(), [], [])) == [
        f"1 result of a model was not compared, such as the results of failing:Shifted in {found.case}: {found.forward_note}"
    ]


@pytest.mark.parametrize(
    ("message", "raised", "expected"),
    [
        ("Exp", "NotImplementedError", True),
        ("Exp", "KeyError", False),
        (
            "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for Exp(13)",
            "NotImplemented",
            True,
        ),
        ("com.microsoft:Foo(-1) is not a registered function/op", "Fail", True),
        ("No conversion rule found for operations: Scan-16", "OpConversionFailure", True),
        ("index 3 is out of bounds", "IndexError", False),
        ("Non-zero status code returned while running Pad node", "Fail", False),
        ("the model has opset 21", "ValueError", False),
        ("'numpy.float64' object does not support item assignment", "TypeError", False),
        ("'<' not supported between instances of 'list' and 'int'", "TypeError", False),
        ("a key that is not supported", "KeyError", False),
        ("the operator Exp is not supported", "ValueError", True),
    ],
)
def test_an_error_says_that_something_is_not_supported(message, raised, expected):
    found = getattr(builtins, raised, None)
    classes = [kind.__name__ for kind in found.__mro__] if isinstance(found, type) else [raised]
    assert says_unsupported(message, classes) is expected


def test_sides_and_forwards_are_kept_in_files(tmp_path):
    plan = Plan(("refgrad", "foreign:doubled"), ("failing:Shifted", "failing:Keyed"))
    with Journal(tmp_path / "journal", {}) as journal:
        results = run_suite([node_case("Exp", X)], plan, lanes=1, journal=journal)
    with Journal(tmp_path / "journal", {}, resume=True) as journal:
        assert journal.done == {results.rows[0].case: list(results.rows)}
    results.save(tmp_path / "results.json")
    loaded = load(tmp_path / "results.json")

    def told(found):
        return [(one.verdict, one.side, one.forward, one.forward_note) for one in found.rows]

    assert sorted(told(loaded)) == sorted(told(results))
    assert {one.side for one in results.rows} == {"", "builder", "executor"}
    text = (tmp_path / "results.json").read_text()
    (tmp_path / "results.json").write_text(text.replace('"builder",', '"nobody",'))
    with pytest.raises(ResultsError, match="sides"):
        load(tmp_path / "results.json")
