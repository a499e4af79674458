"""Sources of cases: every name is one problem's, every variant is legal and computes, every mistake is named."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from refgrad.conformance.case import Case, node_case
from refgrad.conformance.judge.running.sources import (
    DTYPES,
    NEWEST,
    at_opset,
    folder,
    in_dtype,
    node_tests,
    one_model,
    select,
    tables,
)
from refgrad.conformance.problems.problem import ask
from refgrad.errors import FeedError, InvalidModelError, OptionError, RefgradError, UnknownNameError

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

NAME = re.compile(r"[A-Za-z0-9_.,=x-]+")
X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


@cache
def every() -> tuple[Case, ...]:
    return tuple(tables())


def named(cases: list[Case], beginning: str) -> Case:
    return next(case for case in cases if case.name.startswith(beginning))


# Names


@pytest.mark.parametrize("source", [tables, node_tests], ids=["tables", "node tests"])
def test_a_name_is_plain_and_one_case_s_and_says_operator_opset_and_type(source: Callable[[], Iterable[Case]]) -> None:
    cases = list(source())
    assert len({case.name for case in cases}) == len(cases) > 1000
    for case in cases:
        assert NAME.fullmatch(case.name), case.name
        assert case.name.endswith(f"-opset{case.opset}-{case.dtype}"), case.name
        assert case.provenance


def test_the_name_of_a_case_of_the_tables_has_the_domain_of_its_operator() -> None:
    for case in every():
        domain = case.operator.rpartition(".")[0]
        assert not domain or case.name.startswith(f"{case.operator}-"), case.name


def test_names_are_the_same_in_every_run() -> None:
    assert [case.name for case in tables()] == [case.name for case in every()]


# Opsets


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "opset", "to", "legal"),
    [
        ("Relu", (X,), {}, 16, 22, True),
        ("Relu", (X,), {}, 16, 6, True),
        ("Softmax", (X,), {"axis": 1}, 21, 11, True),
        ("ReduceSum", (X,), {"keepdims": 0}, 13, 11, True),
        ("ReduceMean", (X,), {"axes": [1]}, 13, 18, False),  # the axes are an input from 18 on
        ("ReduceMean", (X, np.array([1])), {}, 18, 17, False),
        ("Clip", (X,), {"min": 0.5}, 7, 21, False),
        ("Clip", (X.astype(ml_dtypes.bfloat16),), {}, 13, 12, False),  # a type that it did not have
        ("Add", (X.astype(np.float16), X.astype(np.float16)), {}, 13, 7, True),
        ("LayerNormalization", (X, X[0]), {}, 17, 16, False),  # there was none
        ("Resize", (X, np.array([1, 2], np.float32)), {"wrt": ["X"]}, 10, 21, False),  # its second input is another
        ("Upsample", (X, np.array([1, 2], np.float32)), {"wrt": ["X"]}, 9, 10, False),  # deprecated
    ],
)
def test_another_opset(op_type: str, inputs: tuple, attributes: dict, opset: int, to: int, legal: bool) -> None:
    case = node_case(op_type, *inputs, opset=opset, **attributes)
    moved = at_opset(case, to)
    if not legal:
        assert moved is case
    else:
        assert moved.opset == to
        assert moved.name.endswith(f"-opset{to}-{case.dtype}")
        onnx.checker.check_model(moved.model, full_check=True)
        assert case.opset == opset
        ask(moved)


def test_the_newest_is_the_newest_version_of_every_operator() -> None:
    newest: defaultdict[tuple[str, str], int] = defaultdict(int)
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.deprecated:
            key = schema.domain, schema.name
            newest[key] = max(newest[key], schema.since_version)
    chosen = list(select(every()))
    assert {case.operator for case in chosen} == {case.operator for case in every()}
    for case in chosen:
        domain, _, op_type = case.operator.rpartition(".")
        if onnx.defs.has(op_type, domain):
            since = onnx.defs.get_schema(op_type, case.opset, domain).since_version
            assert since == newest[domain, op_type], case.name


def test_a_range_has_every_version_in_force_there_and_no_other() -> None:
    since = defaultdict(set)
    for case in select(every(), ["Clip", "Relu", "ReduceSum"], "11-13"):
        assert 11 <= case.opset <= 13
        since[case.operator].add(onnx.defs.get_schema(case.operator, case.opset, "").since_version)
    assert since == {"Clip": {11, 12, 13}, "Relu": {6, 13}, "ReduceSum": {11, 13}}
    assert {case.opset for case in select(every(), ["Relu"], "21")} == {21}
    assert {case.opset for case in select(every(), ["com.microsoft.Gelu"], "13-14")} == {1}


# Types


def test_a_type_is_that_of_every_float_of_the_case() -> None:
    case = node_case("Conv", X.reshape(1, 2, 3), X[:, :2].reshape(1, 2, 2), constant=["W"], wrt=["X", "W"])
    for dtype in DTYPES:
        made = in_dtype(case, dtype)
        assert made is not None
        [weight] = made.model.graph.initializer
        kinds = {v.type.tensor_type.elem_type for v in (*made.model.graph.input, *made.model.graph.output)}
        assert kinds == {weight.data_type} == {helper.np_dtype_to_tensor_dtype(made.feeds["X"].dtype)}
        assert made.dtype == dtype
        assert made is case or made.name.endswith(f"-{dtype}")
        ask(made)
    assert case.dtype == "float32"


@pytest.mark.parametrize(
    ("text", "feeds", "expected"),
    [
        ("(float[2] x) => (float[2] y) { y = Cast <to = 1> (x) }", {"x": X[0, :2]}, {"y": "FLOAT16"}),
        ("(float[2] x) => (double[2] y) { y = Cast <to = 11> (x) }", {"x": X[0, :2]}, {"y": "DOUBLE"}),
        (
            "(float[2] x) => (float[2] y) { c = Constant <value = float[1] {2.0}> () y = Mul(x, c) }",
            {"x": X[0, :2]},
            {"y": "FLOAT16"},
        ),
        (  # the scales of Resize are float32, and so is what they are made of
            "(float[1,2] x, float[2] s) => (float[n,m] y) { t = Identity(s) y = Resize(x, , t) }",
            {"x": X[:1, :2], "s": np.array([1, 2], np.float32)},
            {"y": "FLOAT16", "s": "FLOAT"},
        ),
        (  # the mean of a normalization has a type of its own
            "(float[2,3] x, float[3] s) => (float[2,3] y, float[2,1] m) { y, m = LayerNormalization(x, s) }",
            {"x": X, "s": X[0]},
            {"y": "FLOAT16", "m": "FLOAT"},
        ),
    ],
)
def test_a_type_where_the_schema_has_it(text: str, feeds: dict, expected: dict) -> None:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 21]> g {text}')
    made = in_dtype(one_model(model, feeds), "float16")
    assert made is not None
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*made.model.graph.input, *made.model.graph.output)}
    assert {name: TensorProto.DataType.Name(kinds[name]) for name in expected} == expected
    ask(made)


@pytest.mark.parametrize(
    "case",
    [
        node_case("Exp", np.array([1e5], np.float32)),  # overflows
        node_case("Exp", np.array([1e-30], np.float32)),  # becomes 0
        node_case("Add", X.astype(ml_dtypes.bfloat16), X.astype(ml_dtypes.bfloat16)),
        node_case("Normalizer", X, domain="ai.onnx.ml", opset=1),  # of any type, its result is float32
    ],
    ids=str,
)
def test_no_other_type(case: Case) -> None:
    made = in_dtype(case, "float16")
    if case.operator == "Add":
        assert in_dtype(at_opset(case, 13), "bfloat16") is not None
        assert made is not None
    else:
        assert made is None


def test_an_operator_without_a_type_has_no_case_of_it() -> None:
    assert in_dtype(at_opset(node_case("Relu", X), 12), "bfloat16") is None
    assert in_dtype(node_case("FastGelu", X, domain="com.microsoft", opset=1), "float16") is not None


def test_every_operator_is_asked_in_every_opset_and_type_that_it_has() -> None:
    """One case of each operator, opset and type: legal, and asked without complaint. Every case has a name of its own."""
    seen, wrong, names = set(), [], list[str]()
    for moved in select(every(), opset="all"):
        names.append(moved.name)
        for dtype in DTYPES if moved.values == "smooth" else ():
            key = moved.operator, moved.opset, dtype
            if key in seen or (case := in_dtype(moved, dtype)) is None:
                continue
            seen.add(key)
            try:
                ask(case)
            except RefgradError as error:
                wrong.append(f"{case.name}: {error}")
    assert wrong == []
    assert len(seen) > 2000
    assert len(set(names)) == len(names)
    assert set(names) > {case.name for case in select(every())}


# Selection


def test_selection() -> None:
    operators = ["Relu", "com.microsoft.Gelu"]
    chosen = list(select(every(), operators, dtype="float16, float64", names="*static*"))
    assert {case.operator for case in chosen} == set(operators)
    assert {case.dtype for case in chosen} == {"float16", "float64"}
    assert all("static" in case.name for case in chosen)
    assert {case.values for case in select(every(), values="kink")} == {"kink"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"operators": ["Convv"]},
            UnknownNameError,
            "There is no case of an operator 'Convv'. Did you mean 'Conv'? There are 'Abs', 'Acos'",
        ),
        ({"operators": ["Gelu", "FastGelu"]}, UnknownNameError, "Did you mean 'com.microsoft.FastGelu'?"),
        (
            {"opset": "13-"},
            OptionError,
            f"opset='13-' is not an opset. Give 'newest', 'all', one opset as '21', or a range as '13-{NEWEST}'",
        ),
        ({"opset": "28-13"}, OptionError, "opset='28-13' is not an opset"),
        ({"opset": "0"}, OptionError, "opset='0' is not an opset"),
        ({"opset": str(NEWEST + 1)}, OptionError, f"has 1 to {NEWEST}"),
        ({"dtype": "float32,float8"}, OptionError, "There is no float type 'float8'."),
        ({"values": "smoth"}, OptionError, "There is no kind of values 'smoth'. Did you mean 'smooth'?"),
    ],
)
def test_a_wrong_selection_is_refused_at_once(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        select(every(), **arguments)
    assert message in str(raised.value)


# Folders


def write_case(root: Path, name: str, sets: int = 1, external: bool = False) -> ModelProto:
    """A case y = a·x + b with the weight a; the data are written in another order than the inputs, by name."""
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 21]> '
        "g (float[2,3] x, float[3] b) => (float[2,3] y) { m = Mul(x, a) y = Add(m, b) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.full(3, 2, np.float32), "a"))
    case = root / name
    case.mkdir(parents=True)
    onnx.save_model(model, case / "model.onnx", save_as_external_data=external, location="weights", size_threshold=0)
    for k in range(sets):
        data = case / f"test_data_set_{k}"
        data.mkdir()
        for position, (called, value) in enumerate((("b", X[0]), ("x", X + k))):
            (data / f"input_{position}.pb").write_bytes(numpy_helper.from_array(value, called).SerializeToString())
        (data / "output_0.pb").write_bytes(numpy_helper.from_array((X + k) * 2 + X[0], "y").SerializeToString())
    return model


def test_a_folder(tmp_path: Path) -> None:
    write_case(tmp_path, "one")
    write_case(tmp_path, "two", sets=2, external=True)
    found = list(folder(tmp_path))
    assert [case.name for case in found] == [
        "one-opset21-float32",
        "two-test_data_set_0-opset21-float32",
        "two-test_data_set_1-opset21-float32",
    ]
    for case, k in zip(found, (0, 0, 1), strict=True):
        np.testing.assert_array_equal(case.feeds["x"], X + k)
        np.testing.assert_array_equal(case.feeds["b"], X[0])
        assert set(ask(case).wrt) == {"x", "b"}
    assert [case.name for case in folder(tmp_path / "one")] == ["one-opset21-float32"]


def test_data_without_names_are_in_the_order_of_the_inputs(tmp_path: Path) -> None:
    write_case(tmp_path, "one")
    data = tmp_path / "one" / "test_data_set_0"
    for k, value in enumerate((X, X[0])):
        (data / f"input_{k}.pb").write_bytes(numpy_helper.from_array(value).SerializeToString())
    [case] = folder(tmp_path)
    np.testing.assert_array_equal(case.feeds["b"], X[0])


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (lambda case: (case / "model.onnx").unlink(), InvalidModelError, "There is no file '{case}/model.onnx'"),
        (
            lambda case: (case / "model.onnx").write_bytes(b"no"),
            InvalidModelError,
            "{case}/model.onnx is not an ONNX model",
        ),
        (lambda case: (case / "test_data_set_0").rename(case / "data"), FeedError, "'{case}' has no test_data_set_0"),
        (
            lambda case: [f.unlink() for f in case.glob("*/input*")],
            FeedError,
            "'{case}' has no input_0.pb in test_data_set_0",
        ),
        (lambda case: [f.unlink() for f in case.glob("*/output*")], FeedError, "'{case}' has no output_0.pb in"),
        (lambda case: (case / "test_data_set_0/input_1.pb").unlink(), FeedError, "{case}/test_data_set_0' do not fit"),
        (lambda case: (case / "test_data_set_0/input_0.pb").unlink(), FeedError, "has 1 file input_*.pb"),
        (
            lambda case: (case / "test_data_set_0/input_0.pb").write_bytes(b"no"),
            FeedError,
            "input_0.pb' is no TensorProto",
        ),
        (
            lambda case: (case / "test_data_set_0/input_0.pb").write_bytes(
                numpy_helper.from_array(X, "b").SerializeToString()
            ),
            FeedError,
            "{case}/test_data_set_0' do not fit the model",
        ),
    ],
)
def test_a_broken_case_is_named(tmp_path: Path, broken, error: type[Exception], message: str) -> None:
    write_case(tmp_path, "whole")
    write_case(tmp_path, "wrong")
    broken(tmp_path / "wrong")
    with pytest.raises(error) as raised:
        list(folder(tmp_path))
    assert message.format(case=tmp_path / "wrong") in str(raised.value)


def test_a_case_without_its_external_data_is_named(tmp_path: Path) -> None:
    write_case(tmp_path, "one", external=True)
    (tmp_path / "one" / "weights").unlink()
    with pytest.raises(InvalidModelError, match=r"model\.onnx"):
        list(folder(tmp_path))


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FeedError, match="There is no folder"):
        list(folder(tmp_path / "none"))
    with pytest.raises(FeedError, match="has no case in it"):
        list(folder(tmp_path))


# One model


def test_one_model(tmp_path: Path) -> None:
    model = write_case(tmp_path, "my model")
    case = one_model(model, seed=3)
    assert case.name == "g-opset21-float32"
    np.testing.assert_array_equal(case.feeds["x"], one_model(model, seed=3).feeds["x"])
    assert not np.array_equal(case.feeds["x"], one_model(model, seed=4).feeds["x"])
    by_path = one_model(tmp_path / "my model" / "model.onnx", {"x": X, "b": X[0]}, wrt=["a"], outputs=["y"])
    assert by_path.name == "model-opset21-float32"
    assert ask(by_path).wrt == ("a",)
    with pytest.raises(FeedError, match="No feed for b"):
        one_model(model, {"x": X})
