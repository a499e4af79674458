"""What commands print of a model with many weights: a summary with the reasons, and everything where that is asked for."""

from __future__ import annotations

import io
import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from refgrad.cli import main
from refgrad.conformance.judge.found import Check, Row
from refgrad.conformance.reports import checks
from refgrad.errors import abridged, choices, did_you_mean, of_type, raised
from refgrad.tables import registry

WEIGHTS = 150


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A chain of residual layers, with weights w0 to w149."""
    rng = np.random.default_rng(0)
    value = helper.make_tensor_value_info
    nodes, weights = [], []
    for k in range(WEIGHTS):
        op = "Mul" if k % 2 else "Add"
        weights.append(numpy_helper.from_array(rng.uniform(0.5, 1.1, 4).astype(np.float32), f"w{k}"))
        nodes.append(helper.make_node(op, [f"h{k}", f"w{k}"], [f"h{k + 1}"], name=f"node{k}"))
    inputs, outputs = ([value(name, TensorProto.FLOAT, [2, 4])] for name in ("h0", f"h{WEIGHTS}"))
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    path = tmp_path_factory.mktemp("large") / "large.onnx"
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), path)
    return path


@pytest.fixture
def refgrad_(capsys):
    """Run a command; its exit code and the lines that it printed."""

    def run(*words):
        code = main([str(word) for word in words])
        return code, capsys.readouterr().out.splitlines()

    return run


def test_check_prints_a_summary(large, refgrad_):
    code, lines = refgrad_("check", large, "--backends", "numpy", "--directions", 1)
    assert code == 0
    assert len(lines) <= 25
    assert lines[0].startswith(f"right: {WEIGHTS + 1} gradients on 1 executor, largest error ")
    assert lines[1].split()[:5] == ["dialect", "executor", "compared", "with", "right"]
    assert lines[2].split()[:5] == ["onnx", "numpy", "float64", "differences", str(WEIGHTS + 1)]
    code, every = refgrad_("check", large, "--backends", "numpy", "--directions", 1, "--verbose")
    assert code == 0
    assert len(every) > 4 * WEIGHTS
    assert sum(line.startswith("w149 ") for line in every) == len([line for line in lines if "float64" in line])


def test_check_says_what_disagrees_and_why(large, refgrad_, monkeypatch):
    right = registry.RULES["", "Add"]
    wrong = registry.Rule("Add", "", lambda op, d_C: (d_C, op.Neg(d_C)), right.wrt, True, right.parameters)
    monkeypatch.setitem(registry.RULES, ("", "Add"), wrong)
    words = ("check", large, "--backends", "numpy", "--directions", 1)
    code, lines = refgrad_(*words)
    assert code == 1
    assert len(lines) <= 25
    assert any(line.startswith("wrong (w") and "differences give" in line for line in lines)
    [rest] = [line for line in lines if "more reasons, see --verbose" in line]
    assert rest.startswith("wrong (w")
    assert "more; onnx on numpy float64, ort on numpy float64)" in rest
    assert lines[0].startswith(f"wrong: {WEIGHTS // 2} of {WEIGHTS + 1} gradients: w0, w2, w4 and ")
    code, every = refgrad_(*words, "-v")
    assert code == 1
    assert {line.split()[0] for line in every if line.rstrip().endswith(" wrong")} == {
        f"w{k}" for k in range(0, WEIGHTS, 2)
    }


def shown(*rows, verbose=False):
    console = Console(record=True, width=200, file=io.StringIO())
    checks.show(Check(tuple({row.gradient for row in rows}), ("y",), 0, "random", rows), console, verbose)
    return console.export_text()


@pytest.mark.parametrize("verbose", [False, True])
def test_a_row_without_an_answer_gives_its_reason(verbose):
    text = shown(
        Row("a", "onnx", "ort-cpu", "float64", "undecided", note="rounding\nhides it"),
        Row("b", "onnx", "ort-cpu", "float64", "not supported", note="no kernel"),
        Row("c", "onnxruntime", "ort-cpu", "float64", "refused"),
        Row("d\x1b[31m", "onnx", "numpy", "float64", "wrong", 1.0, float("nan"), 1e-6),
        verbose=verbose,
    )
    assert "undecided (a; onnx on ort-cpu): rounding hides it" in text
    assert "not supported (b; onnx on ort-cpu): no kernel" in text
    assert "refused (c; onnxruntime on ort-cpu): no reason is given" in text
    assert "wrong (d\ufffd[31m; onnx on numpy): no reason is given" in text
    assert text.index("wrong (") < text.index("undecided (")
    assert "\x1b" not in text


def test_the_worst_gradient_is_the_one_with_the_largest_part_of_what_is_explained():
    text = shown(
        Row("a", "onnx", "numpy", "float64", "right", 1.0, 1e-3, 1e-2),
        Row("b", "onnx", "numpy", "float64", "right", 1.0, 1e-4, 2e-4),
        Row("c", "onnx", "numpy", "float64", "right"),
    )
    assert text.splitlines()[2].split() == ["onnx", "numpy", "float64", "3", "b", "0.0001", "0.0002"]


def test_what_is_written_is_told_with_few_names(large, tmp_path, refgrad_):
    output = tmp_path / "g.onnx"
    code, lines = refgrad_("grad", large, "-o", output)
    assert code == 0
    assert lines[1:] == [
        "inputs  h0, w0, w1, w2, w3 and 147 more",
        "outputs h0_grad, w0_grad, w1_grad, w2_grad, w3_grad and 146 more",
    ]
    assert len(refgrad_("grad", large, "-o", output, "-v")[1][1].split(", ")) == WEIGHTS + 2
    summary = json.loads("".join(refgrad_("grad", large, "-o", output, "--json")[1]))
    assert len(summary["outputs"]) == WEIGHTS + 1


def test_run_prints_the_first_outputs_and_names_what_is_not_finite(large, tmp_path, refgrad_):
    model = onnx.load(large)
    nan = numpy_helper.from_array(np.full(4, np.nan, np.float32), "w149")
    model.graph.initializer[149].CopyFrom(nan)
    model.graph.output.insert(0, helper.make_tensor_value_info("h149", TensorProto.FLOAT, [2, 4]))
    model.graph.output.extend(helper.make_tensor_value_info(f"h{k}", TensorProto.FLOAT, [2, 4]) for k in range(1, 30))
    path = tmp_path / "nan.onnx"
    onnx.save(model, path)
    code, lines = refgrad_("run", path)
    assert code == 0
    assert lines[-2:] == ["and 11 more: --verbose or --json prints all", "not finite: h150"]
    assert len(lines) == 23
    assert len(refgrad_("run", path, "--verbose")[1]) == 33


def test_preflight_lists_what_is_refused_first(large, tmp_path, refgrad_):
    model = onnx.load(large)
    model.opset_import.add(domain="my", version=1)
    for node in model.graph.node[100:]:
        node.domain, node.op_type = "my", f"Magic{min(int(node.name[4:]), 140)}"
    path = tmp_path / "magic.onnx"
    onnx.save(model, path)
    code, lines = refgrad_("preflight", path)
    assert code == 2
    assert len(lines) == 1 + 41 + 1  # the header, what is refused, and the number of the others
    assert lines[1].startswith("my.Magic100 ")
    assert "node140, node141, node142 and 7 more" in "\n".join(lines).replace("\n", " ")
    assert lines[-1] == "and 2 more: --verbose or --json prints all"


def test_an_unknown_name_lists_few_of_many(large, capsys):
    assert main(["check", str(large), "--wrt", "nowhere"]) == 2
    said = capsys.readouterr().err
    assert "and 139 more" in said
    assert len(said) < 300


@pytest.mark.parametrize(
    ("names", "limit", "expected"),
    [
        ([], 3, "none"),
        (["a"], 3, "a"),
        (["a", "b", "c"], 3, "a, b, c"),
        (["a", "b", "c", "d"], 3, "a, b, c and 1 more"),
        ("abcde", None, "a, b, c, d, e"),
    ],
)
def test_a_long_list_is_abridged(names, limit, expected):
    assert abridged(names, limit) == expected
    assert choices(["a", "b"], 1) == "'a' and 1 more"


def test_errors_say_types_and_exceptions_in_words():
    assert [of_type(value) for value in (1, 1.5, b"", None)] == ["an int", "a float", "bytes", "None"]
    assert raised(AssertionError()) == "AssertionError"
    assert raised(ValueError("not\n so.")) == "ValueError: not so"


def test_a_suggestion_is_equal_but_for_case_if_one_is():
    assert did_you_mean("relu", ["Selu", "Relu"]) == " Did you mean 'Relu'?"
    assert did_you_mean("ORT-CPU", ["numpy", "ort-cpu"]) == " Did you mean 'ort-cpu'?"
    assert did_you_mean("far off", ["numpy"]) == ""
