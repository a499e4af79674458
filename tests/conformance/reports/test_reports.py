"""Results on disk, merged, and in every report: what they say is what the rows say, counted here without them."""

import io
import json
import random
import re
import shlex
from collections import Counter
from dataclasses import replace
from html import unescape
from xml.etree import ElementTree

import numpy as np
import pytest
from reporting import HOSTILE, MODEL, PAIRS, RESULTS, VERSIONS
from rich.console import Console

from refgrad.conformance.case import Case
from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.judge.running.results import LETTERS, About, Results, load, merge
from refgrad.conformance.reports import WRITERS, groups, html, junit, markdown, terminal, write
from refgrad.conformance.reports.tally import MARKS, by_operator, counts_in, document_of, totals
from refgrad.conformance.reports.terminal import show
from refgrad.conformance.verdicts import (
    CONVENTION,
    FAULTS,
    REFUSED,
    RIGHT,
    TIMED_OUT,
    UNDECIDED,
    UNSUPPORTED,
    VERDICTS,
    WRONG,
)
from refgrad.errors import OptionError, OutputFileError, ResultsError
from refgrad.escaping import printable

pytestmark = pytest.mark.interpreter


def written(row):
    """What of a row is kept in the file."""
    if row.verdict == RIGHT and not row.note and not row.against:
        return replace(row, relative=None, allowed=None, seconds=0.0)
    three = {name: None if (x := getattr(row, name)) is None else float(f"{x:.3g}") for name in ("relative", "allowed")}
    return replace(row, seconds=0.0, **three)


# The file


def test_what_is_loaded_is_what_was_saved(tmp_path):
    RESULTS.save(tmp_path / "results.json")
    loaded = load(tmp_path / "results.json")
    assert set(loaded.rows) == {written(row) for row in RESULTS.rows}
    assert (loaded.settings, loaded.versions, loaded.cases) == (RESULTS.settings, RESULTS.versions, RESULTS.cases)
    assert loaded.text() == RESULTS.text()


def test_the_bytes_do_not_depend_on_the_order_of_the_run():
    rows, cases = list(RESULTS.rows), list(RESULTS.cases.items())
    random.Random(1).shuffle(rows)
    random.Random(2).shuffle(cases)
    settings = dict(reversed(RESULTS.settings.items()))
    assert replace(RESULTS, settings=settings, cases=dict(cases), rows=tuple(rows)).text() == RESULTS.text()


def test_the_bytes_do_not_depend_on_how_long_it_took():
    rows = tuple(replace(row, seconds=row.seconds + 1) for row in RESULTS.rows)
    assert replace(RESULTS, rows=rows).text() == RESULTS.text()


def test_a_nan_is_kept(tmp_path):
    row = ResultRow("Op0-0", "refgrad", "numpy", WRONG, relative=float("nan"), allowed=1e-6)
    replace(RESULTS, rows=(row,)).save(tmp_path / "results.json")
    assert np.isnan(load(tmp_path / "results.json").rows[0].relative)


def test_a_large_board_is_small():
    pairs = [(f"builder {k}", executor) for k in range(4) for executor in ("numpy", "ort-cpu", "onnx.reference")]
    name = "Conv-1x2x4x5x4,3x2x2x2x2,3-kernel_shape=2,2,2-strides=2,1,2-symbolic-opset21-float32-"
    cases = {
        f"{name}{k}": About("Conv", 21, "float32", "smooth", "refgrad.conformance.cases.convolution")
        for k in range(6500)
    }
    draw = random.Random(0)
    rows = []
    for case in cases:
        for builder, executor in pairs:
            verdict = draw.choices([RIGHT, REFUSED, WRONG], [70, 29, 1])[0]
            error = draw.random() if verdict == WRONG else None
            rows.append(
                ResultRow(case, builder, executor, verdict, ("differences", "reference"), (), error, error, verdict)
            )
    size = len(Results({}, {}, cases, tuple(rows)).text().encode())
    assert size < 3e6, f"{size / 1e6:.2f} MB"


def change(document, *path, to):
    *most, last = path
    for key in most:
        document = document[key]
    document[last] = to


@pytest.mark.parametrize(
    ("path", "to", "message"),
    [
        (("format",), "another", "\"format\" has to be 'refgrad conformance results 1'"),
        (("cases",), {}, "cases has to be a list"),
        (("settings",), [], "settings has to be an object"),
        (("versions", "numpy"), 2, "versions['numpy'] has to be a string"),
        (("cases", 2), ["a", "Conv"], "cases[2] has to be [name, operator, opset, dtype, values, provenance]"),
        (("cases", 2, 2), "13", "cases[2] has to be [name, operator, opset"),
        (("cases", 2, 0), "Op0-0", "cases[2] is 'Op0-0' again"),
        (("witnesses", 0), [["differences"]], "witnesses[0] has to be two lists"),
        (("witnesses", 0), [["differences"], [1]], "witnesses[0] has to be two lists"),
        (("notes", 0), None, "notes[0] has to be a string"),
        (("pairs", 0), [], "pairs[0] has to have 'builder', 'executor', 'verdicts', 'witnesses'"),
        (("pairs", 1, "verdicts"), "aa", "pairs[1].verdicts has 2 letters for 41 cases"),
        (("pairs", 1, "verdicts"), "z" * 41, "pairs[1].verdicts has the letter 'z'; there are 'a', "),
        (("pairs", 1, "witnesses"), [0], "pairs[1].witnesses has 1 number for 41 cases"),
        (("pairs", 1, "witnesses"), [99] * 41, "pairs[1].witnesses has 99, which there is not"),
        (("details", 0), [0], "details[0] has to be [case, [pair, ...], relative, allowed, note]"),
        (("details", 0, 0), 41, "details[0] is about case 41 of pair"),
        (("details", 0, 1), [9], "of pair 9, which has no verdict"),
        (("details", 0, 4), 77, "details[0] has the note 77, which there is not"),
        (("details", 0, 2), "many", "details[0] has 'many' for a number"),
    ],
    ids=str,
)
def test_an_error_names_what_is_malformed(tmp_path, path, to, message):
    document = json.loads(RESULTS.text())
    change(document, *path, to=to)
    file = tmp_path / "results.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ResultsError, match=re.escape(message)) as caught:
        load(file)
    assert str(caught.value).startswith(f"'{file}': ")
    assert "refgrad conformance run" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "There is no file"), (b"{", "is no JSON"), (b"\xff", "is not a text file in UTF-8"), (b"[]", '"format"')],
)
def test_an_error_says_that_a_file_is_none(tmp_path, content, message):
    file = tmp_path / "results.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ResultsError, match=message):
        load(file)


# Merging


def one(verdict, executor_version="onnxruntime 1.31.1", witnesses=("differences",), case="a", **settings):
    versions = {"refgrad": "refgrad 0.1.0", "ort-cpu": executor_version}
    rows = (ResultRow(case, "refgrad", "ort-cpu", verdict, witnesses),)
    return Results({"seed": 0} | settings, versions, {case: About("Add", 21, "float32")}, rows)


def test_cases_of_two_runs_are_side_by_side():
    merged = merge([one(RIGHT, case="a"), one(WRONG, case="b")])
    assert [(row.case, row.verdict) for row in merged.rows] == [("a", RIGHT), ("b", WRONG)]


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (one(RIGHT), one(WRONG), WRONG),
        (one(WRONG), one(RIGHT), WRONG),
        (one(UNDECIDED, witnesses=("a", "b")), one(RIGHT), RIGHT),
        (one(RIGHT), one(CONVENTION, witnesses=("a", "b")), CONVENTION),
        (one(RIGHT), one(CONVENTION), RIGHT),
    ],
)
def test_of_two_rows_the_graver_or_surer_stands(first, second, kept):
    assert [row.verdict for row in merge([first, second]).rows] == [kept]


def test_two_versions_of_one_executor_are_told_apart():
    runs = [one(RIGHT), one(WRONG, "onnxruntime 1.19.2"), one(RIGHT, "onnxruntime 1.30.0")]
    for merged in (merge(runs), merge([merge(runs[:2]), runs[2]]), merge([runs[0], merge(runs[1:])])):
        assert {row.executor: row.verdict for row in merged.rows} == {
            "ort-cpu@1.31.1": RIGHT,
            "ort-cpu@1.19.2": WRONG,
            "ort-cpu@1.30.0": RIGHT,
        }
        assert merged.versions["ort-cpu@1.19.2"] == "onnxruntime 1.19.2"
        assert merged.command(merged.rows[1]).endswith("--backend ort-cpu")


def test_settings_that_differ_are_both_named():
    both = one(RIGHT, sources=["tables"], opset="21"), one(RIGHT, sources=["tables", "node-tests"], opset="all")
    assert merge(both).settings == {"seed": 0, "sources": ["tables", "node-tests"], "opset": "21; all"}


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "no results to merge"),
        ([one(RIGHT), one(RIGHT, seed=1)], "different seeds, '0', '1'"),
        ([one(RIGHT, feeds="a.npz"), one(RIGHT, feeds="b.npz")], "different feeds, 'a.npz', 'b.npz'"),
        ([one(RIGHT), replace(one(RIGHT), cases={"a": About("Mul", 21, "float32")})], "The case 'a' is "),
    ],
)
def test_what_does_not_go_together_is_refused(results, message):
    with pytest.raises(ResultsError, match=message):
        merge(results)


# Counting


@pytest.mark.parametrize("pair", PAIRS)
def test_the_totals_are_those_of_the_rows(pair):
    rows = [row for row in RESULTS.rows if (row.builder, row.executor) == pair]
    assert totals(RESULTS)[pair] == Counter(row.verdict for row in rows)
    for operator, counts in by_operator(RESULTS).items():
        of_operator = (row.verdict for row in rows if RESULTS.cases[row.case].operator == operator)
        assert counts.get(pair, Counter()) == Counter(of_operator)


def test_pairs_come_in_the_order_of_the_versions():
    assert RESULTS.pairs == tuple(PAIRS)
    turned = replace(RESULTS, versions=dict(reversed(VERSIONS.items())))
    assert turned.pairs == tuple(reversed(PAIRS))


def test_every_verdict_has_a_letter_and_a_mark():
    assert set(MARKS) == set(LETTERS.values()) == set(VERDICTS)
    assert len(set(MARKS.values())) == len(VERDICTS)


@pytest.mark.parametrize(
    ("about", "settings", "selecting"),
    [
        (About("Add", 21, "float32"), {}, []),
        (About("Add", 21, "float32"), {"seed": 0, "opset": "newest", "dtype": None, "sources": ["tables"]}, []),
        (About("Add", 13, "float32"), {"opset": "13-21"}, ["--opset", "13"]),
        (About("Add", 13, "float16"), {"dtype": "float16,float32"}, ["--dtype", "float16"]),
        (About("Add", 13, ""), {"dtype": "float16"}, []),
        (About("Add", 13, "float32", "kink"), {"seed": 3}, ["--values", "kink", "--seed", "3"]),
        (About("Add", 13, "float32"), {"sources": ["tables", "my dir"]}, ["--source", "tables", "--source", "my dir"]),
        (
            About("Add", 13, "float32"),
            {"sources": ["my.onnx"], "feeds": "my feeds.npz"},
            ["--source", "my.onnx", "--feeds", "my feeds.npz"],
        ),
        (About("Add", 13, "float32"), {"oracles": ["torch", "adjoint"]}, ["--oracle", "torch,adjoint"]),
        (About("own.Add", 1, "float32"), {"imports": ["my.own", "b"]}, ["--import", "my.own", "--import", "b"]),
        (
            About("model", 13, "float32", provenance="my m.onnx, fed by the user"),
            {"sources": ["tables", "./my m.onnx", "other.onnx"], "feeds": "my feeds.npz"},
            ["--source", "./my m.onnx", "--feeds", "my feeds.npz"],
        ),
        (
            About("model", 13, "float32", provenance="m.onnx, fed random numbers of seed 0"),
            {"sources": ["m.onnx", "fed.onnx"], "feeds": "feeds.npz"},
            ["--source", "m.onnx"],
        ),
    ],
)
def test_the_command_reproduces_a_row(about, settings, selecting):
    row = ResultRow(HOSTILE, "my.module:function", "ort-cpu@1.19.2", WRONG)
    asked = ["--case", HOSTILE, *selecting, "--builder", "my.module:function", "--backend", "ort-cpu"]
    command = Results(settings, {}, {HOSTILE: about}, (row,)).command(row)
    assert shlex.split(command) == ["refgrad", "conformance", "run", *asked]


def test_the_command_has_the_limits_where_the_verdict_depends_on_them():
    settings = {"seconds": 2.5, "memory": 1 << 30}
    for verdict, expected in ((TIMED_OUT, ["--seconds", "2.5", "--memory", "1024"]), (WRONG, [])):
        row = ResultRow("a", "refgrad", "numpy", verdict)
        command = Results(settings, {}, {"a": About("Add", 21, "float32")}, (row,)).command(row)
        assert shlex.split(command.partition("--backend numpy")[2]) == expected


# JUnit

ATTRIBUTES = {  # of the schema that Jenkins validates against: those it requires, those it allows
    "testsuites": ({"tests"}, {"name", "time", "tests", "failures", "errors"}),
    "testsuite": ({"name", "tests", "failures", "errors"}, {"name", "tests", "failures", "errors", "skipped", "time"}),
    "testcase": ({"name"}, {"name", "classname", "time"}),
    "failure": (set(), {"type", "message"}),
    "skipped": (set(), {"type", "message"}),
}
CHILDREN = {"testsuites": {"testsuite"}, "testsuite": {"testcase"}, "testcase": {"failure", "skipped"}}


def test_the_xml_is_what_a_server_reads():
    root = ElementTree.fromstring(junit.report(RESULTS))
    assert root.tag == "testsuites"
    for element in root.iter():
        required, allowed = ATTRIBUTES[element.tag]
        assert required <= set(element.attrib) <= allowed
        assert {child.tag for child in element} <= CHILDREN.get(element.tag, set())
        assert re.fullmatch(r"\d+\.\d{3}", element.get("time", "0.000"))


@pytest.mark.parametrize("pair", PAIRS)
def test_a_suite_has_the_tests_of_its_pair(pair):
    root = ElementTree.fromstring(junit.report(RESULTS))
    (suite,) = (suite for suite in root if suite.get("name") == " on ".join(pair))
    rows = [row for row in RESULTS.rows if (row.builder, row.executor) == pair]
    failed = sum(row.verdict in FAULTS for row in rows)
    skipped = sum(row.verdict in (REFUSED, UNSUPPORTED, UNDECIDED) for row in rows)
    assert [suite.get(name) for name in ("tests", "failures", "skipped")] == [
        str(n) for n in (len(rows), failed, skipped)
    ]
    assert [len(suite.findall(f"testcase{path}")) for path in ("", "/failure", "/skipped")] == [
        len(rows),
        failed,
        skipped,
    ]


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_test_says_what_its_row_says(verdict):
    row = ResultRow("Op0-0", "refgrad", "numpy", verdict, ("differences",), ("torch",), 0.5, 1e-6, f"why {HOSTILE}")
    (test,) = ElementTree.fromstring(junit.report(replace(RESULTS, rows=(row,)))).iter("testcase")
    assert (test.get("name"), test.get("classname")) == ("Op0-0", "refgrad.numpy.Op0")
    if verdict in (RIGHT, CONVENTION):
        assert not len(test)
        return
    (child,) = test
    assert child.tag == ("failure" if verdict in FAULTS else "skipped")
    assert child.get("message").startswith(f"{verdict}: why <script>alert(1)</script>")
    if verdict in FAULTS:
        assert "against: torch" in child.text
        assert "relative error 0.5, of which 1e-06 is explained" in child.text
        selecting = "--case Op0-0 --source tables --source node-tests --seed 3"
        assert f"refgrad conformance run {selecting} --builder refgrad --backend numpy" in child.text


# Markdown


def tables_of(text):
    """The tables as lists of rows of cells, read by GitHub's rules for the backslash."""
    found, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            rows.append([re.sub(r"\\([^\w\s])|\\(_)", r"\1\2", cell.strip()) for cell in cells])
        elif rows:
            found.append([row for row in rows if set("".join(row)) != {"-"}])
            rows = []
    return found


def test_the_scoreboard_says_what_the_rows_say():
    all_of_them, meanings, faults, operators, versions, settings = tables_of(markdown.report(RESULTS))
    header, *lines = all_of_them
    for line in lines:
        count = Counter(row.verdict for row in RESULTS.rows if f"{row.builder} on {row.executor}" == line[0])
        assert {v: int(cell or 0) for v, cell in zip(header[1:], line[1:], strict=True)} == {
            v: count[v] for v in header[1:]
        }
        assert sum(count.values()) == sum(int(cell or 0) for cell in line[1:])
    assert {verdict: what for _, verdict, what in meanings[1:]} == VERDICTS
    assert sum(int(line[3]) for line in faults[1:]) == sum(row.verdict in FAULTS for row in RESULTS.rows)
    marks = {mark: verdict for verdict, mark in MARKS.items()}
    for name, *cells in operators[1:]:
        for pair, cell in zip(PAIRS, cells, strict=True):
            rows = [
                r for r in RESULTS.rows if (r.builder, r.executor) == pair and RESULTS.cases[r.case].operator == name
            ]
            count = Counter(row.verdict for row in rows)
            told = {RIGHT: count[RIGHT]} if cell == "✓" else {marks[part[0]]: int(part[1:]) for part in cell.split()}
            assert told == count
    assert dict(versions[1:]) == VERSIONS
    assert dict(settings[1:]) == {"seed": "3", "sources": "tables, node-tests"}


def test_no_name_is_taken_for_markup():
    text = markdown.report(RESULTS)
    assert "\\<script\\>" in text
    assert not re.search(r"(?<!\\)[<>`\[]", text)


def test_a_board_without_faults_says_so():
    assert "## What is wrong\n\nNothing.\n" in markdown.report(one(RIGHT))


# The terminal


def shown(results, verbose=False):
    console = Console(record=True, width=400, file=io.StringIO())
    show(results, console, verbose)
    return console.export_text()


def test_the_terminal_shows_counts_and_with_verbose_every_fault():
    text = shown(RESULTS, verbose=True)
    for (builder, executor), count in totals(RESULTS).items():
        (line,) = (ln.split() for ln in text.splitlines() if ln.split()[:2] == [builder, executor])
        assert sorted(map(int, line[2:])) == sorted(count.values())
    faults = [row for row in RESULTS.rows if row.verdict in FAULTS]
    for row in faults:
        assert f"   {printable(row.case)} ({row.builder} on {row.executor}): " in text
    assert f"{len(faults)} faults in {len(RESULTS.rows)} verdicts (41 cases of 8 operators)" in text
    assert "[bold]it's</bold>" in text
    assert "\x1b" not in text


def test_the_terminal_says_what_it_leaves_out():
    text = shown(RESULTS)
    found = groups.faults(RESULTS)
    assert f"and {len(found) - terminal.GROUPS_SHOWN} more groups of faults" in text
    assert f"To repeat the first fault: {RESULTS.command(found[0].smallest)}" in text
    assert len(text.splitlines()) <= 40


def test_every_fault_is_in_one_group():
    rows = [row for group in groups.faults(RESULTS) for row in group.rows]
    assert {(r.case, r.builder, r.executor) for r in rows} == {(r.case, r.builder, r.executor) for r in RESULTS.faults}
    assert len(rows) == len(RESULTS.faults)


# The page's data, and writing


def test_the_page_holds_the_results_models_and_feeds():
    feeds = {
        "x": np.array([1.5, -2], np.float32),
        "many": np.array([np.nan, -np.inf, *range(9)], np.float16),
        "nothing": np.full(9, np.nan),
        "words": np.array(["a"] * 9),
        "flag": np.array(True),
    }
    data = html.data_of(html.report(RESULTS, [Case(HOSTILE, MODEL, feeds), Case("unasked", MODEL, feeds)]))
    assert {key: data[key] for key in RESULTS.document()} == json.loads(json.dumps(RESULTS.document()))
    place = sorted(RESULTS.cases).index(HOSTILE)
    assert [k for k, model in enumerate(data["models"]) if model] == [place]
    assert "y = Relu (x)" in data["models"][place]
    assert data["feeds"][place] == [
        ["x", "float32", "2", "1.5, -2"],
        ["many", "float16", "11", "0 to 8, -inf, nan"],
        ["nothing", "float64", "9", "nan"],
        ["words", "str32", "9", ""],
        ["flag", "bool", "scalar", "True"],
    ]


def test_the_page_lists_the_faults_without_javascript():
    page = html.report(RESULTS)
    [listed] = re.findall("<noscript>.*?<ol>(.*?)</ol></noscript>", page, re.DOTALL)
    lines = [unescape(re.sub("<[^>]*>", " ", line)) for line in listed.split("<li>")[1:]]
    found = groups.faults(RESULTS)
    assert len(lines) == len(found) > 1
    for line, group in zip(lines, found, strict=True):
        parts = (group.title, printable(group.smallest.case), group.certainty, group.command)
        assert all(part in line for part in parts)
    assert set(re.findall("<[^>]*>", listed)) == {"<li>", "</li>", "<br>", "<code>", "</code>"}


def test_the_counts_are_read_as_they_were_written():
    document = json.loads(json.dumps(document_of(RESULTS)))
    assert counts_in(document) == by_operator(RESULTS)
    assert document["cases"] == len(RESULTS.cases)


def test_the_page_needs_nothing_else():
    page = html.report(RESULTS)
    page = re.sub("<noscript>.*?</noscript>", "", page, flags=re.DOTALL)  # it has texts, which are escaped
    assert not re.search(r"https?:|<link|<img|@import|\bsrc=", page)
    assert "alert(1)" not in page


def test_another_page_is_refused():
    with pytest.raises(ResultsError, match="no page of conformance results"):
        html.data_of("<html>")


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_report_is_written_by_its_suffix(tmp_path, suffix):
    path = tmp_path / f"report{suffix}"
    write(RESULTS, path)
    assert path.read_text(encoding="utf-8") == WRITERS[suffix](RESULTS, ())
    assert list(tmp_path.iterdir()) == [path]


def test_an_unknown_suffix_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"no report '\.pdf'\. There are '\.json', '\.xml', '\.md', '\.html'\."):
        write(RESULTS, tmp_path / "report.pdf")


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(OutputFileError):
        write(RESULTS, tmp_path / "absent" / "report.md")
    assert not list(tmp_path.iterdir())


def test_an_empty_run_has_every_report():
    empty = Results({}, {}, {}, ())
    for writer in WRITERS.values():
        assert writer(empty, ())
    assert junit.report(empty).count("<testsuite ") == 0
