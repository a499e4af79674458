"""A search that is stopped by Ctrl-C or for want of time keeps the verdicts and what it has found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from planting import Planted, builder_with, network, scaled

from refgrad import cli, interruption
from refgrad.conformance import compare, nonfinite
from refgrad.conformance.judge.nan import nonfinite as search
from refgrad.conformance.locating import tensors, work
from refgrad.conformance.locating.bisection import bisect
from refgrad.conformance.locating.location import locate
from refgrad.conformance.locating.sides import Live
from refgrad.conformance.problems.problem import Problem
from refgrad.conformance.reports import comparison_page, comparisons
from refgrad.errors import BackendError
from refgrad.interruption import INTERRUPTED, OUT_OF_TIME, OutOfTime

pytestmark = pytest.mark.interpreter

STOPS = [(KeyboardInterrupt, INTERRUPTED), (OutOfTime, OUT_OF_TIME)]


def stopping(stop: type[BaseException], after: int) -> Any:
    """A builder with a wrong rule that is stopped when it is called once more."""
    calls = 0

    def build(problem: Problem) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise stop
        return builder_with(scaled("Tanh_1", 1.1))(problem)

    return build


@pytest.mark.parametrize(("stop", "why"), STOPS)
def test_the_verdicts_are_kept_when_the_search_for_the_rule_is_stopped(stop: type[BaseException], why: str) -> None:
    model, feeds = network()
    whole = compare(model, "refgrad@numpy", Live(builder_with(scaled("Tanh_1", 1.1)), "numpy"), feeds)
    found = compare(model, "refgrad@numpy", Live(stopping(stop, 3), "numpy"), feeds)
    assert (found.stopped, found.unjudged, found.ok) == (why, "", False)
    assert [(one.name, one.verdict) for one in found.tensors] == [(one.name, one.verdict) for one in whole.tensors]
    assert found.b.rules is not None
    assert (found.b.rules.is_whole, found.b.rules.faults) == (False, ())
    assert "Tanh_1" in found.b.rules.within
    assert list(found.b.unsearched) == ["the rules", "the kernels of the gradient"]
    told = "the rules of build@numpy (b), the kernels of the gradient of build@numpy (b)"
    assert f"Stopped: {why}. Not done to the end: {told}." in comparison_page.page(found)
    assert not whole.stopped
    assert whole.b.unsearched == {}


def test_faults_that_were_found_before_the_stop_are_kept() -> None:
    model, feeds = network()
    seen: list[Any] = []
    whole = bisect(model, feeds, builder_with(scaled("Tanh_1", 1.1)), so_far=seen.append)
    assert seen[0].faults == ()
    assert seen[-1].faults == whole.faults
    assert [one.is_whole for one in seen] == [False] * whole.built
    assert whole.is_whole


@pytest.mark.parametrize(("stop", "why"), STOPS)
def test_nodes_that_were_seen_before_the_stop_are_kept(stop: type[BaseException], why: str) -> None:
    model, feeds = network()

    def progress(what: str, done: int, total: int | None) -> None:
        if "kernels" in what and total and done == total - 1:
            raise stop

    side = Live("refgrad", Planted("Tanh_1", lambda y: 1.01 * y))
    found = compare(model, "refgrad@numpy", side, feeds, progress=progress)
    assert found.stopped == why
    kernels = found.b.kernels
    assert kernels is not None
    assert not kernels.is_whole
    assert "Tanh_1" in [node.name for node in kernels.suspects]
    assert list(found.b.unsearched) == ["the kernels of the gradient", "the kernels of the model"]
    [line] = [line for line in comparisons.lines_of(found.b) if "'Tanh_1'" in line]
    assert line.startswith("wrong by itself, but not proved to be at fault: Tanh 'Tanh_1' is wrong")
    assert "right for its inputs" not in "".join(comparisons.lines_of(found.b))
    assert {one.verdict for one in found.tensors} >= {"b is wrong"}


def test_a_proof_before_the_stop_is_kept() -> None:
    model, feeds = network()
    seen = []
    locate(model, feeds, Planted("Tanh_1", lambda y: 1.01 * y), so_far=seen.append)
    assert [one.found.name for one in seen[-1].culprits] == ["Tanh_1"]
    assert seen[-1].suspects == ()


def test_tensors_that_are_not_judged_are_said_and_nothing_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    model, feeds = network()
    judged, count = tensors._row, 0

    def row(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count > 2:
            raise OutOfTime
        return judged(*arguments)

    monkeypatch.setattr(tensors, "_row", row)
    found = compare(model, "refgrad@numpy", "refgrad@numpy", feeds)
    assert [one.verdict for one in found.tensors] == ["they agree"] * 3
    assert not found.ok
    assert not found.is_different
    assert "not done to the end: the tensors that are not listed" in "".join(comparisons.stopped_lines(found)).lower()
    count = 2
    monkeypatch.setattr(tensors, "_output", row)
    with pytest.raises(OutOfTime):  # there is nothing to tell
        compare(model, "refgrad@numpy", "refgrad@numpy", feeds)


def test_a_search_that_cannot_be_done_leaves_the_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Any:
        raise BackendError("max_memory is 5")

    monkeypatch.setattr(work, "locate", fails)
    model, feeds = network()
    found = compare(model, "refgrad@numpy", Live("refgrad", Planted("Tanh_1", lambda y: 2 * y)), feeds)
    assert {one.verdict for one in found.tensors} >= {"b is wrong"}
    assert "the kernels of the gradient could not be searched: max_memory is 5" in list(comparisons.lines_of(found.b))


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt, 130), (OutOfTime, 1)])
def test_the_command_prints_and_writes_what_it_knows(
    stop: type[BaseException], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def stopped(*arguments: Any) -> Any:
        raise stop("over")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(work, "locate", stopped)
    asked: list[str] = []
    monkeypatch.setattr(interruption, "_finishing", [lambda: asked.append("more time")])
    model, feeds = network()
    onnx.save(model, "m.onnx")
    np.savez("f.npz", **feeds)
    Path("doubling.py").write_text(
        "import numpy as np\nfrom refgrad.backends.numpy import NumpyBackend\n\n\nclass Wrong(NumpyBackend):\n"
        "    name = 'wrong'\n\n    def prepare(self, model, **options):\n        made = super().prepare(model)\n"
        "        run = made.run\n        made.run = lambda *a, **k: {n: v * 2 for n, v in run(*a, **k).items()}\n"
        "        return made\n"
    )
    words = ["compare", "m.onnx", "--feeds", "f.npz", "--a", "refgrad@numpy", "--b", "refgrad@doubling:Wrong"]
    assert cli.main([*words, "-o", "r.json", "-o", "r.html"]) == code
    said, errors = capsys.readouterr()
    assert errors in ("", "refgrad: Interrupted. r.json, r.html were written.\n")
    why = interruption.why(stop())
    rest = "the kernels of the gradient of refgrad@doubling:Wrong (b), the kernels of the model of refgrad@doubling:Wrong (b)"
    assert f"Stopped: {why}. Not done to the end: {rest}." in said
    assert "refgrad@doubling:Wrong (b) is wrong in 6 of 6 tensors" in said
    written = json.loads(Path("r.json").read_text())
    assert written["stopped"] == why
    assert list(written["b"]["not_searched"]) == ["the kernels of the gradient", "the kernels of the model"]
    assert f"Stopped: {why}." in Path("r.html").read_text()
    assert asked == ["more time"]


def test_origins_that_are_known_are_kept(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    def stopped(*arguments: Any) -> Any:
        raise OutOfTime("over")

    monkeypatch.setattr(search, "cured", stopped)
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { [root] y = Sqrt(x) }'
    model = onnx.parser.parse_model(text)
    found = nonfinite(model, {"x": np.float32([4, 0])})
    assert [one.forward for one in found.origins] == ["root"]
    assert found.stopped == OUT_OF_TIME
    assert found.untried == ("a run with strong_zero=True (--strong-zero)", "values that leave their types")
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "f.npz", x=np.float32([4, 0]))
    assert cli.main(["nan", str(tmp_path / "m.onnx"), "--feeds", str(tmp_path / "f.npz")]) == 1
    said = capsys.readouterr().out
    assert "Stopped: out of time. Not done to the end: a run with strong_zero=True" in said
    assert "1. Div 'root_Grad" in said
