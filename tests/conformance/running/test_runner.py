"""The runner: every verdict, whatever the builder, the executor or the machine does, and the same ones each time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from killing import differing

from refgrad.conformance.case import Case, node_case
from refgrad.conformance.judge.running.journal import Journal
from refgrad.conformance.judge.running.runner import Lanes, Plan
from refgrad.conformance.judge.running.sources import select, tables
from refgrad.conformance.judge.running.suite import run_suite
from refgrad.errors import BackendError, OptionError
from refgrad.worker import Worker

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

HELPERS = Path(__file__).parents[2] / "helpers"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(HELPERS)


def relu() -> Case:
    return node_case("Relu", np.array([[1.0, -2.0, 3.0]], np.float32), opset=22)


def verdict(builder="refgrad", executor="numpy", case=None, **limits):
    plan = Plan((builder,), (executor,), **limits)
    [row] = run_suite([case or relu()], plan, lanes=1).rows
    return row


def test_right_gradients_agree_and_the_oracles_that_say_so_are_named():
    row = verdict()
    assert row.verdict == "right"
    assert {"differences", "reference"} <= set(row.witnesses)


@pytest.mark.parametrize(
    ("builder", "executor", "expected", "note"),
    [
        ("foreign:right", "numpy", "right", ""),
        ("foreign:doubled", "numpy", "wrong", "X"),
        ("foreign:refusing", "numpy", "refused", "I do not know this operator"),
        ("foreign:refusing_in_its_own_way", "numpy", "refused", "I do not know this operator"),
        ("foreign:silent", "numpy", "refused", "NotImplementedError"),
        ("foreign:asserting", "numpy", "crashed", "it raised AssertionError: never so many (foreign.py, line "),
        ("foreign:misspelling", "numpy", "crashed", "it raised AttributeError: grph (foreign.py, line "),
        ("foreign:undocumented", "numpy", "crashed", "it raised UnsupportedError: I do not know this operator"),
        ("foreign:aborting", "numpy", "crashed", "ended with -6"),
        ("refgrad", "foreign:Aborting", "crashed", "ended with -6"),
        ("refgrad", "foreign:Zeros", "wrong", "X"),
        ("refgrad", "foreign:More", "right", ""),
        ("refgrad", "foreign:Leaving", "crashed", "ended with 3"),
        ("refgrad", "foreign:OfOnnx", "crashed", "TypeError: unsupported operand"),
    ],
)
def test_whoever_fails_gets_the_verdict(builder, executor, expected, note):
    row = verdict(builder, executor)
    assert (row.verdict, note in row.note) == (expected, True), row
    if expected == "wrong":
        assert len(row.witnesses) >= 2


@pytest.mark.parametrize(
    ("builder", "executor", "note"),
    [
        ("foreign:nothing", "numpy", "it returned None instead of a ModelProto"),
        ("foreign:unfinished", "numpy", "its model has no gradient 'X_grad'"),
        ("refgrad", "foreign:Fewer", "returned no output 'X_grad'"),
        ("refgrad", "foreign:Listed", "returned no array for 'X_grad' but a list"),
        ("refgrad", "foreign:Unnamed", "returned a list and no outputs by name"),
        ("refgrad", "foreign:InPlace", "wrote into what it was fed: 'X', 'Y_grad'"),
        ("refgrad", "foreign:Emptying", "wrote into what it was fed: 'X', 'Y_grad'"),
        ("refgrad", "foreign:Wider", "returned 'X_grad' of float64; the model declares float32"),
        ("refgrad", "foreign:OfOnnxWithMore", "returned 2 results; the model has the outputs 'X_grad'"),
    ],
)
def test_what_is_no_answer_is_wrong_and_spoils_nobody_elses(builder, executor, note):
    plan = Plan((builder, "refgrad:ort"), (executor, "numpy"))
    rows = run_suite([relu()], plan, lanes=1).rows
    assert (rows[0].verdict, rows[0].witnesses, note in rows[0].note) == ("wrong", ("answer",), True), rows[0]
    assert rows[-1].verdict == "right"


def test_a_hang_is_a_row():
    assert verdict("foreign:hanging", seconds=8.0).verdict == "timed out"


def test_too_much_memory_is_a_row():
    assert verdict("foreign:greedy", memory=6 << 30).verdict == "out of memory"


def test_the_others_go_on_after_a_crash():
    plan = Plan(("foreign:aborting", "refgrad"), ("foreign:Aborting", "numpy"))
    rows = run_suite([relu()], plan, lanes=1).rows
    assert [row.verdict for row in rows] == ["crashed", "crashed", "crashed", "right"]


def test_a_kink_is_a_convention_with_its_name():
    case = node_case("Relu", np.array([[0.0, 0.0]], np.float32), opset=22)
    row = verdict(case=case)
    assert row.verdict == "convention"
    assert "refgrad" in row.witnesses
    assert "Relu" in row.note


def test_one_witness_alone_makes_nothing_wrong():
    row = verdict("foreign:doubled", oracles=("differences",))
    assert row.verdict == "wrong"  # refgrad's own gradient, which the differences confirm, is the other
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21, "nobody" : 1]> g (float[2] x) => (float[2] y) { y = Unknown(x) }'
    )
    row = verdict(case=Case("unknown", model, {"x": np.ones(2, np.float32)}))
    assert row.verdict == "undecided"


def few():
    return list(select(tables(), ["Relu", "Softmax", "Concat"]))[:40:2]


def as_rows(results):
    return [(row.case, row.builder, row.executor, row.verdict, row.witnesses, row.relative) for row in results.rows]


def test_verdicts_are_the_same_whatever_the_number_of_workers():
    plan = Plan(("refgrad", "refgrad:ort"))
    one, three = run_suite(few(), plan, lanes=1), run_suite(reversed(few()), plan, lanes=3)
    assert sorted(as_rows(one)) == sorted(as_rows(three))


def test_a_run_that_was_killed_goes_on_without_losing_or_repeating_a_case(tmp_path):
    journal, names = tmp_path / "journal.jsonl", "Relu,Softmax"
    command = [sys.executable, "-m", "refgrad", "conformance", "run", "--ops", names, "--journal", str(journal)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while (not journal.exists() or journal.read_bytes().count(b"\n") < 6) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = journal.read_bytes().count(b"\n") - 1
    journal.write_bytes(journal.read_bytes() + b'{"case":"cut o')
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    cases = [line["case"] for line in lines[1:]]
    whole = [case.name for case in select(tables(), names.split(","), values="smooth")]
    assert 5 <= before < len(whole)
    assert sorted(cases) == sorted(whole)


def test_a_journal_is_taken_over(tmp_path):
    plan, cases = Plan(("refgrad",)), few()[:6]
    with Journal(tmp_path / "j", {}) as journal:
        run_suite(cases[:3], plan, lanes=1, journal=journal)
    with Journal(tmp_path / "j", {}, resume=True) as journal:
        done = []
        results = run_suite(cases, plan, lanes=1, journal=journal, progress=lambda *call: done.append(call))
    assert [call[0] for call in done] == [4, 5, 6]
    assert [row.case for row in results.rows] == [case.name for case in cases]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(("refgrd",)), "no builder 'refgrd'. Did you mean 'refgrad'"),
        (Plan(("nowhere:build",)), "nowhere"),
        (Plan(executors=("nunpy",)), "no executor 'nunpy'. Did you mean 'numpy'"),
        (Plan(oracles=("diferences",)), "no oracle 'diferences'. Did you mean 'differences'"),
        (Plan(builders=()), "No builder is given"),
    ],
)
def test_whoever_does_not_exist_is_named(plan, message):
    with pytest.raises(OptionError, match=message):
        run_suite([relu()], plan)


@pytest.fixture
def used():
    """The workers that were given to `absolute`."""
    return {}


@pytest.fixture
def absolute(used):
    def task(number, worker):
        used[id(worker)] = worker
        return worker.call(abs, number)

    return task


def test_workers_end_with_the_run(absolute, used):
    with Lanes(count=2) as lanes:
        assert dict(lanes.each(absolute, range(-8, 0))) == {number: -number for number in range(-8, 0)}
    assert used
    assert all(isinstance(worker, Worker) and worker._process is None for worker in used.values())


def test_an_abandoned_run_ends_its_workers(absolute, used):
    with Lanes(count=2) as lanes:
        next(lanes.each(absolute, count()))
    assert all(worker._process is None for worker in used.values())


def test_an_interruption_while_a_verdict_is_kept_ends_the_workers_at_once():
    """They end even while the exception, and with it the run, is still referenced."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt) as caught:
        run_suite([relu()], Plan(("refgrad",)), lanes=2, progress=interrupt)
    assert caught.tb is not None  # it is still held
    for thread in set(threading.enumerate()) - before:  # a timer that was cancelled needs a moment to end
        thread.join(10)
    assert set(threading.enumerate()) <= before


def test_reports_of_a_run_that_was_killed_are_those_of_one_left_alone(tmp_path):
    assert differing(1, tmp_path)[0] == []


def test_a_fault_that_is_another_the_second_time_is_named_as_such():
    row = verdict(executor="foreign:Unsteady")
    assert row.verdict == "wrong"
    assert row.note == "not deterministic: two runs of foreign:Unsteady on the same feeds differ"
    assert row.relative is None
    assert "deterministic" not in verdict(executor="foreign:Zeros").note
    row = verdict(executor="foreign:Addressed")
    assert row.verdict == "crashed"
    assert "failed at" in row.note


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NeedingMore", "cannot be made: TypeError.*device.* called without an argument"),
        ("Absent", "cannot be used here: there is no such device"),
        ("Exiting", "cannot be made: SystemExit"),
    ],
)
def test_an_executor_that_cannot_be_made_is_refused_before_anything_runs(name, said):
    with pytest.raises((OptionError, BackendError), match=said):
        verdict(executor=f"foreign:{name}")


def test_an_operator_that_does_not_exist_is_the_fault_of_the_builder():
    row = verdict(builder="foreign:inventing")
    assert (row.verdict, row.side) == ("wrong", "builder")
    assert "ai.onnx has no operator 'Nonsense'" in row.note
