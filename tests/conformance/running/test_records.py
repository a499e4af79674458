"""Records are data: a malformed file is told what to do, by its name, the record and the key."""

import ml_dtypes
import numpy as np
import pytest

from refgrad.conformance.known import bugs as known_bugs
from refgrad.conformance.known import differences as differences
from refgrad.conformance.known.bugs import builders
from refgrad.conformance.tools.mutating import survivors
from refgrad.errors import RecordsError

pytestmark = pytest.mark.interpreter

BUG = """
[[finding]]
system = "onnx.reference"
operator = "Add"
fault = "subtracts"
proof = "1 + 2"
model = '''
<ir_version: 10, opset_import: ["" : 21]>
add (float[N] A, float[N] B) => (float[N] C) { C = Add (A, B) }
'''
feeds.A = [1]
feeds.B = [2]
expected.C = [3]
"""
GRADIENT = """
[[finding]]
operator = "Neg"
builders = ["onnx-ad"]
fault = "forgets the sign"
graph = "Identity"
proof = "−1"
model = '''
<ir_version: 10, opset_import: ["" : 21]>
negate (float[1] X) => (float[1] Y) { Y = Neg (X) }
'''
feeds.X = [2]
cotangents.Y = [1]
expected.X = [-1]
given.X = [1]
"""
DIFFERENCE = '[[departure]]\noperators = ["Pad"]\nkind = "wrong"\nreason = "It forgets the axes."\n'
EQUIVALENT = """
[[equivalent]]
reason = "Its sign is dropped."
mutants = [{ operator = "Abs", place = "*", change = "swapped operands" }]
"""


def of_bugs(path):
    return list(known_bugs.read_bugs(path))


def of_builders(path):
    return list(builders.read_bugs(path))


def written(tmp_path, text):
    path = tmp_path / "family.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_finding_is_read_in_the_types_that_its_model_declares(tmp_path):
    [found] = of_bugs(written(tmp_path, BUG + "tolerance = 1e-3\noptimized = true\n"))
    assert (found.system, found.operator, found.fault) == ("onnx.reference", "Add", "subtracts")
    assert (found.tolerance, found.optimized, found.crashes) == (1e-3, True, False)
    assert found.feeds["A"].dtype == np.float32
    assert found.model.graph.node[0].op_type == "Add"
    assert found.wrong({"C": np.float32([4])})
    assert not found.wrong({"C": np.float32([3])})


def test_a_dispute_is_read(tmp_path):
    [found] = of_bugs(written(tmp_path, BUG + 'disputed = "one adds, another subtracts"\n'))
    assert found.disputed == "one adds, another subtracts"
    assert not of_bugs(written(tmp_path, BUG))[0].disputed


def test_a_release_that_the_findings_are_not_about_is_refused(tmp_path):
    with pytest.raises(RecordsError, match=r"until is '1\.2'\. The findings are about the releases '1\.23\.2'"):
        of_bugs(written(tmp_path, BUG + 'until = "1.2"\n'))


def test_a_gradient_is_read(tmp_path):
    [found] = of_builders(written(tmp_path, GRADIENT))
    assert (found.system, found.builders, found.executor) == ("family", ("onnx-ad",), "numpy")
    assert found.holds({"X": np.float32([1])})
    [said] = of_builders(written(tmp_path, GRADIENT.replace("given.X = [1]", 'given = "it failed"')))
    assert said.holds("Neg: it failed")


@pytest.mark.parametrize(
    ("kind", "literal", "expected"),
    [
        ("float[N]", "[-0.0, inf, nan]", np.float32([-0.0, np.inf, np.nan])),
        ("float", "2", np.array(2, np.float32)),
        ("float[N, 3]", "{ shape = [0, 3] }", np.zeros((0, 3), np.float32)),
        ("bool[N]", "[true]", np.array([True])),
        ("string[N]", '["a\\u0000"]', np.array(["a\0"], object)),
        ("float8e4m3fn[N]", "[1.125]", np.array([1.125], ml_dtypes.float8_e4m3fn)),
        ("seq(int64[N])", "[[1], [2, 3]]", [np.array([1]), np.array([2, 3])]),
        ("map(string, float)", "{ a = 4 }", {"a": 4.0}),
        ("map(int64, float)", "{ 3 = 4.5 }", {3: 4.5}),
    ],
)
def test_literals(tmp_path, kind, literal, expected):
    text = BUG.replace("float[N] A", f"{kind} A").replace("feeds.A = [1]", f"feeds.A = {literal}")
    [found] = of_bugs(written(tmp_path, text))
    got = found.feeds["A"]
    assert type(got) is type(expected)
    if isinstance(expected, dict):
        assert got == expected
    else:
        pairs = zip(got, expected, strict=True) if isinstance(expected, list) else [(got, expected)]
        for one, other in pairs:
            assert (one.dtype, one.shape, one.tolist().__repr__()) == (
                other.dtype,
                other.shape,
                other.tolist().__repr__(),
            )


@pytest.mark.parametrize(
    ("read", "text", "old", "new", "told"),
    [
        (of_bugs, BUG, 'fault = "subtracts"\n', "", "entry 1 (Add) has no fault. Give it a string"),
        (of_bugs, BUG, "proof", "prof", "(Add, subtracts) has the key 'prof'. Did you mean 'proof'? There are"),
        (of_bugs, BUG, 'proof = "1 + 2"', "", "Give it a proof, or the forward model"),
        (of_bugs, BUG, '"subtracts"', '" "', "fault is ' '. It has to be a string that is not empty."),
        (of_bugs, BUG, '"1 + 2"', '"1 + 2"\ncrashes = 1', "crashes is 1. It has to be true or false."),
        (of_bugs, BUG, '"onnx.reference"', '"onnx"', "system is 'onnx'. There are 'onnx.reference', "),
        (of_bugs, BUG, '"Add"', '"Sub"', "operator is 'Sub'. The model has nodes of 'Add'."),
        (of_bugs, BUG, "{ C =", "{ C", "model is no model in onnx's text format"),
        (of_bugs, BUG, "feeds.B = [2]", "", "feeds has no 'B'. Give every one of 'A', 'B' a value."),
        (of_bugs, BUG, "feeds.B", "feeds.D", "feeds has 'D'. The model has 'A', 'B' there."),
        (of_bugs, BUG, "expected.C", "expected.A", "expected has 'A'. The model has 'C' there."),
        (of_bugs, BUG, "[2]", '["2"]', "['2'] has strings, for float32"),
        (of_bugs, BUG, "[2]", "[[2], [2, 3]]", "feeds is not of the types that the model declares"),
        (of_bugs, BUG, "[2]", "{ shape = [1] }", "only where there are none"),
        (of_bugs, BUG.replace("float[N] B", "int64[N] B"), "[2]", "[2.5]", "[2.5] has fractions, for int64"),
        (of_builders, GRADIENT, "given.X = [1]", "", "has no given. Give it a table, or a string."),
        (of_builders, GRADIENT, "cotangents.Y", "cotangents.X", "cotangents has 'X'. The model has 'Y' there."),
        (differences.read_differences, DIFFERENCE, "wrong", "worng", "kind is 'worng'. There are 'refused', "),
        (differences.read_differences, DIFFERENCE, '["Pad"]', '"Pad"', "operators is 'Pad'. It has to be a list."),
        (survivors.read_equivalents, EQUIVALENT, "place", "plaec", "Write { ... } with 'operator', 'place', 'change'."),
        (
            survivors.read_equivalents,
            EQUIVALENT,
            "equivalent",
            "equal",
            "has 'equal'. It may have [[equivalent]] only.",
        ),
    ],
)
def test_a_malformed_record_is_told_what_to_do(tmp_path, read, text, old, new, told):
    assert old in text
    assert read(written(tmp_path, text))
    with pytest.raises(RecordsError) as error:
        read(written(tmp_path, text.replace(old, new)))
    assert "family.toml'" in str(error.value)
    assert told in str(error.value)
