"""A journal: what is read back, after the process died too, and what is refused."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.judge.running.journal import Journal
from refgrad.errors import JournalError

pytestmark = pytest.mark.interpreter

SETTINGS = {"seed": 0, "builders": ("refgrad",)}
FIRST = [ResultRow("a", "refgrad", "numpy", "right", ("differences", "reference"), (), 1e-7, 1e-6, "", 0.5)]
SECOND = [
    ResultRow("b", "refgrad", "numpy", "wrong", ("differences",), (), math.inf, 1e-6, "x: off"),
    ResultRow("b", "refgrad", "ort-cpu", "refused"),
]


def begun(path):
    with Journal(path, SETTINGS) as journal:
        journal.append("a", FIRST)
        journal.append("b", SECOND)
    return path


def test_what_was_done_is_read_back(tmp_path):
    with Journal(begun(tmp_path / "j"), SETTINGS, resume=True) as journal:
        assert journal.done == {"a": FIRST, "b": SECOND}
        journal.append("c", FIRST)
    with Journal(tmp_path / "j", SETTINGS, resume=True) as journal:
        assert list(journal.done) == ["a", "b", "c"]


@pytest.mark.parametrize("number", [None, 0.0, -0.0, 1e-300, 0.1 + 0.2, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("note", ["", "x: off by \u2028 0.0\r\n\x00"])
def test_every_field_comes_back_as_it_was(tmp_path, number, note):
    rows = [ResultRow("a", "", "", "right", (), ("differences",), number, number, note, 0.0), *SECOND]
    with Journal(tmp_path / "j", SETTINGS) as journal:
        journal.append("a", rows)
    with Journal(tmp_path / "j", SETTINGS, resume=True) as journal:
        assert list(map(repr, journal.done["a"])) == list(
            map(repr, [*rows[:1], *(replace(r, case="a") for r in SECOND)])
        )


@pytest.mark.parametrize("missing", [1, 2, 30])
def test_a_last_line_that_was_cut_off_is_dropped(tmp_path, missing):
    path = begun(tmp_path / "j")
    path.write_bytes(path.read_bytes()[:-missing])
    with Journal(path, SETTINGS, resume=True) as journal:
        assert journal.done == {"a": FIRST}
        journal.append("b", SECOND)
    with Journal(path, SETTINGS, resume=True) as journal:
        assert journal.done == {"a": FIRST, "b": SECOND}


def test_a_first_line_that_was_cut_off_is_written_again(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b'{"format":')
    with Journal(path, SETTINGS, resume=True) as journal:
        assert not journal.done
    with Journal(path, SETTINGS, resume=True) as journal:
        assert not journal.done


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken\n", "line 3"),
        (b'{"rows":[]}\n', "line 3: 'case'"),
        (b"[1]\n", "line 3"),
        (b'{"case":"x","rows":[{"builder":"b","executor":"e","verdict":"fine"}]}\n', "no verdict 'fine'; there are"),
        (b'{"case":"x","rows":[{"builder":"b","executor":"e","verdict":"right","what":1}]}\n', "line 3.*what"),
    ],
)
def test_any_other_malformed_line_is_an_error_with_its_number(tmp_path, line, message):
    path = begun(tmp_path / "j")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join((*lines[:2], line, *lines[2:])))
    before = path.read_bytes()
    with pytest.raises(JournalError, match=message):
        Journal(path, SETTINGS, resume=True)
    assert path.read_bytes() == before


def test_other_settings_are_refused(tmp_path):
    with pytest.raises(JournalError, match="seed was 0, is 1"):
        Journal(begun(tmp_path / "j"), SETTINGS | {"seed": 1}, resume=True)


def test_a_journal_is_not_written_over(tmp_path):
    with pytest.raises(JournalError, match="resume=True"):
        Journal(begun(tmp_path / "j"), SETTINGS)


def test_what_is_no_journal_is_refused(tmp_path):
    (tmp_path / "k").write_bytes(b"a file of one line")
    with pytest.raises(JournalError, match="is no journal"):
        Journal(tmp_path / "k", SETTINGS, resume=True)
    assert (tmp_path / "k").read_bytes() == b"a file of one line"
    (tmp_path / "j").write_text('{"a": 1}\n')
    with pytest.raises(JournalError, match="no journal"):
        Journal(tmp_path / "j", SETTINGS, resume=True)
    with pytest.raises(JournalError, match="cannot be written"):
        Journal(tmp_path / "folder" / "j", SETTINGS)


def test_two_runs_do_not_share_a_journal(tmp_path):
    with Journal(tmp_path / "j", SETTINGS) as journal:
        journal.append("a", FIRST)
        with pytest.raises(JournalError, match="belongs to a run that goes on"):
            Journal(tmp_path / "j", SETTINGS, resume=True)
        journal.append("b", SECOND)
    with Journal(tmp_path / "j", SETTINGS, resume=True) as journal:
        assert journal.done == {"a": FIRST, "b": SECOND}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_and_what_was_written_is_kept(tmp_path):
    path = begun(tmp_path / "j")
    journal = Journal(path, SETTINGS, resume=True)
    os.dup2(os.open("/dev/full", os.O_WRONLY), journal._file.fileno())
    with pytest.raises(JournalError, match=r"No space left on device.*resume=True"):
        journal.append("c", FIRST)
    journal.close()
    with Journal(path, SETTINGS, resume=True) as journal:
        assert list(journal.done) == ["a", "b"]


@pytest.mark.parametrize("name", [".", "/dev/null"])
def test_what_is_no_file_is_refused(tmp_path, name):
    with pytest.raises(JournalError, match=r"no regular file|is a folder"):
        Journal(tmp_path / name, SETTINGS, resume=True)


def test_a_file_of_something_else_is_no_journal(tmp_path):
    for name, content in (("list", b"[1, 2]\n"), ("brace", b"{"), ("deep", b"[" * 100_000 + b"\n")):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(JournalError):
            Journal(path, {}, resume=True)
        assert path.read_bytes() == content
