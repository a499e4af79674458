"""The reports of `refgrad check -o`. They name the faults, the certainty of each, and the next steps."""

from __future__ import annotations

import errno
import html
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import onnx
import onnx.parser
import pytest

from refgrad.backends.numpy.backend import NumpyModel
from refgrad.cli import main
from refgrad.conformance.judge.found import Check, Row
from refgrad.conformance.reports import check_page, checks
from refgrad.conformance.reports.advice import ModelCommand, steps
from refgrad.conformance.verdicts import CONVENTION, CRASHED, RIGHT, UNDECIDED, UNSUPPORTED, VERDICTS, WRONG
from refgrad.errors import BackendError
from refgrad.escaping import is_printable
from refgrad.tables import registry

pytestmark = pytest.mark.interpreter

HEAD = '<ir_version: 10, opset_import: ["" : 18]> '
NETWORK = "network (float[N, 3] x) => (float[N, 3] y) <float[3] w = {1, -2, 3}> { a = Mul(x, w)  y = Mul(a, a) }"
RELU = "relu (float[N] x) => (float[N] y) { y = Relu(x) }"
NORM = "norm (float[2, 3] x) => (float[2] y) <int64[1] axes = {1}> { y = ReduceL2 <keepdims = 0> (x, axes) }"  # may overflow
SECTIONS = ["What is wrong, and where", "How sure it is", "What to do next", "Every gradient", "How it was checked"]
Report = Callable[..., str]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Check a model on the interpreter, and return the page as it is written."""
    monkeypatch.chdir(tmp_path)

    def made(text: str, code: int, feeds: dict[str, Any] | None = None, *words: str) -> str:
        onnx.save(onnx.parser.parse_model(HEAD + text), "m.onnx")
        if feeds is not None:
            np.savez("f.npz", **feeds)
            words = ("--feeds", "f.npz", *words)
        assert main(["check", "m.onnx", "--backend", "numpy", *words, "-o", "r.html", "-o", "r.md"]) == code
        return Path("r.html").read_text(encoding="utf-8")

    return made


@pytest.fixture
def wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of Mul is off by a factor."""
    right = registry.RULES["", "Mul"]
    rule = registry.Rule(
        "Mul",
        "",
        lambda op, d_C, A, B: (op.Mul(op.Mul(d_C, B), 1.0005), op.Mul(d_C, A)),
        right.wrt,
        right.broadcast,
        right.parameters,
    )
    monkeypatch.setitem(registry.RULES, ("", "Mul"), rule)


def verdict_of(page: str) -> tuple[str, str]:
    """The colour and the text of the verdict."""
    [found] = re.findall(r"<p class='verdict (\w+)'>(.*?)</p>", page)
    return found[0], html.unescape(found[1])


def commands_of(page: str) -> list[str]:
    """The commands of the steps, and the one that repeats the check."""
    return [html.unescape(one) for one in re.findall(r"<pre>(.*?)</pre>", page)]


def assert_whole(page: str) -> None:
    assert page.startswith("<!doctype html>")
    assert page.endswith("</html>\n")
    assert re.findall(r"<h2>(.*?)</h2>", page) == SECTIONS
    assert "<script" not in page
    assert "http" not in page
    assert "src=" not in page
    assert f"numpy {np.__version__}" in page


def test_right(report: Report) -> None:
    page = report(NETWORK, 0)
    assert_whole(page)
    kind, text = verdict_of(page)
    assert kind == "right"
    assert text.startswith("right: 2 gradients on 1 executor, largest error ")
    assert "No fault was found." in page
    assert html.escape(VERDICTS[RIGHT]) in page
    assert commands_of(page) == ["refgrad grad m.onnx -o gradient.onnx", "refgrad check m.onnx --backend numpy"]
    assert "Feeds: random (normal distribution); seed 0." in page


def test_a_wrong_rule(report: Report, wrong_rule: None) -> None:
    page = report(NETWORK, 1, {"x": np.float32([[1, 2, 3]])}, "--wrt", "x")
    assert_whole(page)
    assert verdict_of(page) == ("fault", "wrong: 1 gradient: x")
    assert "<b class='fault'>wrong</b>: the gradient of x; onnx on numpy float64, ort on numpy float64<br>" in page
    assert "along a direction, differences gives" in page
    assert html.escape(VERDICTS[WRONG]) in page
    assert page.count("<tr class='fault'>") == 2
    assert commands_of(page) == [
        "refgrad reduce m.onnx --side refgrad@numpy -o reduced --feeds f.npz",
        "refgrad check m.onnx --seed 1 --backend numpy --wrt x",
        "refgrad check m.onnx --feeds f.npz --backend numpy --wrt x",
    ]


def test_the_command_for_a_wrong_rule_finds_it(report: Report, wrong_rule: None, capsys: Any) -> None:
    command = commands_of(report(NETWORK, 1))[0]
    assert main(shlex.split(command)[1:]) == 0
    assert "Mul: a wrong gradient" in capsys.readouterr().out


def test_a_wrong_kernel(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    run = NumpyModel.run

    def off(self: NumpyModel, feeds: Any, outputs: Any = None, **options: Any) -> Any:
        found = run(self, feeds, outputs, **options)
        return {
            name: value * np.float32(1.001) if value.dtype == np.float32 else value for name, value in found.items()
        }

    monkeypatch.setattr(NumpyModel, "run", off)
    page = report(NETWORK, 1)
    assert verdict_of(page)[1].startswith("wrong: ")
    first, second, *_ = commands_of(page)
    assert first == "refgrad compare m.onnx --a refgrad@numpy:float64 --b refgrad@numpy"
    assert second == "refgrad reduce m.onnx --side refgrad@numpy -o reduced"
    assert "numpy computes another gradient than in float64. Find the node at fault:" in page


def test_crashed(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    run = NumpyModel.run

    def fails(self: NumpyModel, feeds: Any, outputs: Any = None, **options: Any) -> Any:
        found = run(self, feeds, outputs, **options)
        if any(name == "x_grad" and value.dtype == np.float32 for name, value in found.items()):
            raise BackendError("numpy failed: <b>no</b> memory")
        return found

    monkeypatch.setattr(NumpyModel, "run", fails)
    page = report(NETWORK, 1)
    assert_whole(page)
    assert verdict_of(page) == ("fault", "crashed: numpy did not run 2 gradients")
    assert "numpy failed: &lt;b&gt;no&lt;/b&gt; memory" in page
    assert "numpy does not run the gradient. Find the node at fault:" in page
    assert html.escape(VERDICTS[CRASHED]) in page
    assert any(command.startswith("refgrad compare m.onnx ") for command in commands_of(page))


def test_convention(report: Report) -> None:
    page = report(RELU, 0, {"x": np.zeros(3, np.float32)})
    assert_whole(page)
    assert verdict_of(page) == ("right", "convention: x, at a kink")
    assert "No fault was found." in page
    assert html.escape(VERDICTS[CONVENTION]) in page
    assert commands_of(page)[:2] == [
        "refgrad check m.onnx --seed 1 --backend numpy",
        "refgrad grad m.onnx --kinks torch -o gradient.onnx",
    ]


def test_undecided(report: Report) -> None:
    page = report(NORM, 0, {"x": np.full((2, 3), 1e25, np.float32)})
    assert_whole(page)
    assert "the gradient of x; " in page
    assert html.escape(VERDICTS[UNDECIDED]) in page
    assert commands_of(page)[:3] == [
        "refgrad check m.onnx --seed 1 --backend numpy",
        "refgrad check m.onnx --random-weights 0 --feeds f.npz --backend numpy",
        "refgrad nan m.onnx --feeds f.npz",
    ]


def found_with(*verdicts: str, note: str = "because") -> Check:
    rows = [Row("x", "onnx", "ort-cpu", "float64", verdict, 1e-3, 1e-3, 1e-6, note) for verdict in verdicts]
    return Check(("x",), ("y",), 4, "given", tuple(rows))


@pytest.mark.parametrize("verdict", VERDICTS)
def test_every_verdict_has_a_step_and_its_meaning(verdict: str) -> None:
    found = found_with(verdict)
    assert steps(found, ModelCommand("m.onnx"))
    page = check_page.page(found, ModelCommand("m.onnx"))
    assert html.escape(VERDICTS[verdict]) in page
    assert (f"<b class='none'>{UNSUPPORTED}</b>: the gradient of x; onnx on ort-cpu" in page) == (
        verdict == UNSUPPORTED
    )


def test_all_steps_of_several_verdicts() -> None:
    found = found_with(WRONG, CRASHED, UNDECIDED, CONVENTION)
    commands = [command for _, command in steps(found, ModelCommand("m.onnx", {"--seed": ["4"]}))]
    assert commands == [
        "refgrad compare m.onnx --a refgrad@numpy --b refgrad@ort-cpu --seed 4",
        "refgrad reduce m.onnx --side refgrad@ort-cpu -o reduced --seed 4",
        "refgrad check m.onnx --seed 5",
        "refgrad check m.onnx --random-weights 0 --seed 4",
        "refgrad nan m.onnx --seed 4",
        "refgrad grad m.onnx --kinks torch -o gradient.onnx",
    ]


def test_random_weights_are_not_those_of_the_other_commands() -> None:
    said = [
        text
        for text, command in steps(found_with(WRONG), ModelCommand("m.onnx", {"--random-weights": ["0"]}))
        if not command
    ]
    assert said == [
        "--random-weights changed the weights for this check alone. The other commands use the weights of the file."
    ]


def test_a_long_list_of_reasons_is_cut_and_the_table_has_all() -> None:
    rows = [Row(f"w{k}", "onnx", "numpy", "float64", WRONG, 1.0, 1.0, 1e-6, f"reason {k}") for k in range(40)]
    page = check_page.page(Check((), (), 0, "given", tuple(rows)), ModelCommand("m.onnx"))
    assert page.count("<li>") < 12
    assert "36 more reasons, see the table below" in page
    assert "reason 39</td>" in page


def test_markdown_can_be_pasted(report: Report, wrong_rule: None) -> None:
    report(NETWORK, 1)
    text = Path("r.md").read_text(encoding="utf-8")
    assert text.startswith("# Is the gradient of m.onnx right?\n\nwrong: ")
    assert "- **wrong** (x; onnx on numpy float64, ort on numpy float64): " in text
    assert "refgrad reduce m.onnx --side refgrad@numpy -o reduced" in text
    assert text.count("refgrad check m.onnx --backend numpy\n") == 1
    assert f"numpy {np.__version__}" in text


def test_json_is_that_of_the_command(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    report(NETWORK, 0)
    capsys.readouterr()
    assert main(["check", "m.onnx", "--backend", "numpy", "--json"]) == 0
    plain = capsys.readouterr().out
    assert main(["check", "m.onnx", "--backend", "numpy", "--json", "-o", "r.json"]) == 0
    assert capsys.readouterr().out == plain
    assert Path("r.json").read_text() == plain
    assert set(json.loads(plain)) == {
        "ok", "answer", "wrt", "outputs", "seed", "feeds", "rows", "skipped", "tolerance", "stopped",
    }  # fmt: skip


def test_a_report_is_named(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    report(NETWORK, 0)
    assert capsys.readouterr().out.endswith("r.html: written\nr.md: written\n")


@pytest.mark.parametrize("name", ["folder.html", "r.txt", "m.onnx", "none/r.html"])
def test_a_report_that_cannot_be_written_is_a_message(
    report: Report, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    report(NETWORK, 0)
    Path("folder.html").mkdir()
    before, model = sorted(Path.cwd().iterdir()), Path("m.onnx").read_bytes()
    assert main(["check", "m.onnx", "--backend", "numpy", "-o", name]) == 2
    assert capsys.readouterr().err.startswith("refgrad: ")
    assert sorted(Path.cwd().iterdir()) == before
    assert Path("m.onnx").read_bytes() == model


def test_a_report_is_not_half_written(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    report(NETWORK, 0)
    Path("r.html").write_text("before")
    monkeypatch.setattr(Path, "write_text", stopped_after(Path.write_text))
    assert main(["check", "m.onnx", "--backend", "numpy", "-o", "r.html"]) == 2
    assert Path("r.html").read_text() == "before"
    assert {path.name for path in Path.cwd().iterdir()} == {"m.onnx", "r.html", "r.md"}


def stopped_after(write_text: Callable[..., Any]) -> Callable[..., Any]:
    """A function that writes half of a text and stops."""

    def half(path: Path, text: str, **options: Any) -> None:
        write_text(path, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    return half


@pytest.mark.parametrize("seed", range(3))
def test_hostile_names_are_text(seed: int) -> None:
    for drawn in hostile.names(10, seed):
        name = f"n{drawn}"
        tame = "q" * len(name)
        pages = [written(one, check_page.page) for one in (name, tame)]
        assert hostile.of_html(pages[0]) == hostile.of_html(pages[1])
        texts = [written(one, checks.markdown_of) for one in (name, tame)]
        assert hostile.of_markdown(texts[0]) == hostile.of_markdown(texts[1])


def written(name: str, writer: Callable[[Check, ModelCommand], str]) -> str:
    """A report in which every text is a name."""
    rows = [
        Row(name, "onnx", name, "float64", verdict, 1.0, 1.0, 1e-6, name) for verdict in (WRONG, CRASHED, UNDECIDED)
    ]
    found = Check((name,), (name,), 0, name, tuple(rows), (name,))
    options = {option: [name] for option in ("--feeds", "--wrt", "--outputs", "--dim", "--import")}
    return writer(found, ModelCommand(f"{name}.onnx".replace("\0", ""), options, {name: name}))


def test_a_command_survives_the_paste() -> None:
    for name in hostile.names(0):
        request = ModelCommand(f"{name}.onnx", {"--feeds": [name], "--wrt": [name], "--tolerance": ["0.1"]})
        if is_printable(name):
            given = [f"--feeds={name}"] if name.startswith("-") else ["--feeds", name]
            assert shlex.split(request.command("compare"))[3 : 3 + len(given)] == given
        assert "--tolerance" not in request.command("compare")
        assert request.command().endswith("--tolerance 0.1")
