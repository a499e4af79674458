"""Known limitations: which rows an entry explains, when it is stale, and what a malformed file is told."""

import json
from collections import Counter
from pathlib import Path

import pytest

from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.judge.running.limitations import Limitation, Limitations
from refgrad.conformance.verdicts import CRASHED, REFUSED, RIGHT, UNDECIDED, UNSUPPORTED, WRONG
from refgrad.errors import LimitationsError

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[3]

OPERATORS = {"Conv-1": "Conv", "Conv-2": "Conv", "Mul-1": "Mul"}
FILE = """
[[limitation]]
builder = "refgrad"
executor = "ort-cpu"
operator = "Conv"
verdict = "wrong"
reason = "the kernel forgets the group"

[[limitation]]
case = "Mul-?"
reason = "not looked at yet"
"""


def read(tmp_path, text):
    path = tmp_path / "known.toml"
    path.write_text(text, encoding="utf-8")
    return Limitations.read(path)


def row(case, verdict, builder="refgrad", executor="ort-cpu"):
    return ResultRow(case, builder, executor, verdict)


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        (row("Conv-1", WRONG), "the kernel forgets the group"),
        (row("Conv-1", REFUSED), None),  # another verdict than the entry names
        (row("Conv-1", RIGHT), None),
        (row("Conv-1", WRONG, executor="numpy"), None),
        (row("Conv-1", WRONG, builder="onnx-ad"), None),
        (row("Mul-1", WRONG, "onnx-ad", "numpy"), "not looked at yet"),
        (row("Mul-1", UNSUPPORTED), "not looked at yet"),
        (row("Mul-1", RIGHT), None),
        (row("Mul-12", WRONG), None),
    ],
)
def test_covers(tmp_path, about, reason):
    found = read(tmp_path, FILE).covers(about, OPERATORS)
    assert (found.reason if found else None) == reason


def test_an_entry_with_operator_and_case_needs_both():
    entry = Limitation("", operator="Conv", case="*-1")
    assert [entry.explains(row(case, WRONG), OPERATORS[case]) for case in OPERATORS] == [True, False, False]


@pytest.mark.parametrize(
    ("rows", "complete", "stale"),
    [
        ([row("Conv-1", WRONG), row("Conv-2", RIGHT), row("Mul-1", WRONG)], True, []),
        ([row("Conv-1", RIGHT), row("Conv-2", RIGHT), row("Mul-1", WRONG)], True, ["no longer holds: "]),
        ([row("Conv-1", UNDECIDED), row("Mul-1", WRONG)], True, ["no longer holds: "]),
        ([row("Conv-1", WRONG, executor="numpy"), row("Mul-1", WRONG)], True, ["matches nothing"]),
        ([row("Mul-1", RIGHT)], False, ["no longer holds: what it is about is 'right', rows: 1"]),
        ([], False, []),
        ([], True, ["matches nothing", "matches nothing"]),
    ],
)
def test_stale(tmp_path, rows, complete, stale):
    found = [why for _, why in read(tmp_path, FILE).stale(rows, OPERATORS, complete=complete)]
    assert len(found) == len(stale)
    assert all(why.startswith(start) for why, start in zip(found, stale, strict=True))


def test_an_entry_says_what_it_is_about():
    assert str(Limitation("why", executor="numpy", case="Conv-*")) == "executor 'numpy', case 'Conv-*'"


def test_an_empty_file_has_no_entries(tmp_path):
    assert read(tmp_path, "") == Limitations()


ENTRY = '[[limitation]]\noperator = "Conv"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[limitation]\n", ". Entries begin with [[limitation]]."),
        ('[[limitations]]\nreason = ""\n', "has 'limitations'. It may have [[limitation]] only."),
        ('[limitation]\nreason = "x"\n', "two brackets"),
        ('limitation = ["x"]\n', "two brackets"),
        (ENTRY, "entry 1 has no reason"),
        (f'{ENTRY}reason = " "\n', "entry 1: reason is ' '. It has to be a string"),
        (f"{ENTRY}reason = 1\n", "entry 1: reason is 1"),
        ('[[limitation]]\nreason = "x"\n', "neither operator nor case"),
        (
            f'{ENTRY}reason = "x"\nexecuter = "numpy"\n',
            "the key 'executer'. Did you mean 'executor'? There are 'reason', 'builder'",
        ),
        (f'{ENTRY}reason = "x"\nverdict = "wrnog"\n', "verdict is 'wrnog'. Did you mean 'wrong'? There are 'wrong'"),
        (
            f'{ENTRY}reason = "x"\nverdict = "right"\n',
            "verdict is 'right'. There are 'wrong'",
        ),
        (f'{ENTRY}reason = "x"\n[[limitation]]\ncase = "*"\n', "entry 2 has no reason"),
    ],
)
def test_a_malformed_file_is_told_what_to_do(tmp_path, text, told):
    with pytest.raises(LimitationsError) as error:
        read(tmp_path, text)
    assert "known.toml'" in str(error.value)
    assert told in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(LimitationsError, match=r"There is no file .*nowhere.toml'"):
        Limitations.read(tmp_path / "nowhere.toml")
    (tmp_path / "known.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(LimitationsError, match=r"is not a text file in UTF-8"):
        Limitations.read(tmp_path / "known.toml")


def test_what_failed_on_cuda_has_a_reason_and_every_reason_is_needed():
    """reports/results/conformance_cuda.json is what `nox -s cuda` saved on a machine with a GPU."""
    results = json.loads((ROOT / "reports" / "results" / "conformance_cuda.json").read_text(encoding="utf-8"))
    rows = [ResultRow(*row) for _, *row in results["rows"]]
    operators = {case: operator for operator, case, *_ in results["rows"]}
    counts = Counter(results["counts"])
    known = Limitations.read(ROOT / "docs" / "limitations_cuda.toml")
    failed = [row for row in rows if row.verdict in (CRASHED, WRONG)]
    assert [row.case for row in failed if known.covers(row, operators) is None] == []
    assert known.stale(rows, operators) == []
    said = " ".join((ROOT / "docs" / "executors.md").read_text(encoding="utf-8").split())
    assert f"got {counts[RIGHT]:,} of {counts.total():,} cases of the suite right and {counts[WRONG]} wrong" in said
    assert f"did not support {counts[UNSUPPORTED]}, and crashed in {counts[CRASHED]}" in said
