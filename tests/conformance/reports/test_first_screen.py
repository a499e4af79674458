"""Whose fault it is: the first screen of a run names the operator and the side of each of four planted faults."""

import json
import shlex
from pathlib import Path

import pytest
import toys

from refgrad.cli import main
from refgrad.conformance.reports.html import data_of

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

OPERATORS = (toys.WRONG, toys.MISSING, toys.RAISING, toys.LOST)
SCREEN = 40  # lines
SAID = (
    f"the executor toys:Runtime: the forward pass of {toys.WRONG} is wrong only in cases with negative axes, but not in all of "
    "them: ",
    f"the executor toys:Runtime: the forward pass of {toys.RAISING} crashes in every case with empty inputs and in no other: ",
    f"the builder toys:gradient: the gradient of {toys.LOST} is wrong",
    f"not supported: the executor toys:Runtime does not support {toys.MISSING} (",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the results and reports of a run of the toys."""
    made = tmp_path_factory.mktemp("toys")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(toys.__file__).parent)
        patch.chdir(made)
        words = ["--ops", ",".join(OPERATORS), "--every", "3", "--builder", "refgrad,toys:gradient"]
        outputs = [word for name in ("r.json", "r.md", "r.html", "r.xml") for word in ("-o", name)]
        assert main(["conformance", "run", *words, "--backend", "toys:Runtime", *outputs]) == 1
    return made


@pytest.fixture
def screen(folder, capsys, monkeypatch):
    """What the command prints of these results."""
    monkeypatch.chdir(folder)

    def printed(*words):
        assert main(["conformance", "report", "r.json", *words]) == 0
        return capsys.readouterr().out

    return printed


def test_the_first_screen_names_operator_and_side(screen):
    text = screen()
    for said in SAID:
        assert said in text, text
    assert "IndexError: index 0 is out of bounds" in text
    assert len(text.splitlines()) <= SCREEN


def test_verbose_prints_every_case(screen, folder):
    rows = [row for group in json.loads(screen("--json"))["groups"] for row in group["rows"]]
    text = screen("--verbose")
    assert len(rows) > len(OPERATORS)
    assert all(f"{case} ({builder} on {executor})" in text for case, builder, executor in rows)


def test_json_has_the_groups(screen):
    found = json.loads(screen("--json"))
    assert found["ok"] is False
    assert {
        (group["side"], group["name"], group["operator"], group["what"], group["verdict"]) for group in found["groups"]
    } == {
        ("executor", "toys:Runtime", toys.WRONG, "forward", "wrong"),
        ("executor", "toys:Runtime", toys.RAISING, "forward", "crashed"),
        ("builder", "toys:gradient", toys.LOST, "gradient", "wrong"),
    }
    [unanswered] = [group for group in found["without_answer"] if group["verdict"] == "not supported"]
    assert (unanswered["operator"], unanswered["what"], unanswered["cases"]) == (
        toys.MISSING,
        "forward",
        unanswered["asked"],
    )
    assert (
        sum(count["wrong"] for count in found["totals"]) + sum(count["crashed"] for count in found["totals"])
        == found["faults"]
    )


def test_an_operator_is_lacking_though_its_gradient_agrees(folder):
    data = json.loads((folder / "r.json").read_text())
    erf = [place for place, case in enumerate(data["cases"]) if case[1] == toys.MISSING]
    right = [data["pairs"][0]["verdicts"][place] for place in erf].count("a")
    assert right == len(erf) - 1  # the gradient of one case computes the operator again


def test_the_reports_name_them_too(folder):
    written = (folder / "r.html").read_text()
    executor, builder = f"toys:Runtime in {toys.WRONG}, {toys.RAISING}", f"toys:gradient in {toys.LOST}"
    told = f"16 faults in 70 verdicts (35 cases of 4 operators): the executor {executor}; the builder {builder}"
    assert f'class="verdict fault">{told}</p>' in written
    page = data_of(written)
    assert "differences" in page["groups"][2]["sure"]
    assert "from the interpreter&#x27;s result" in written
    titles = "\n".join(group["title"] for group in page["groups"])
    assert all(said in titles for said in SAID[:3])
    assert any(SAID[3] in line for line in page["without"])
    text = (folder / "r.md").read_text().replace("\\", "")
    for who, what in (
        ("the executor toys:Runtime", f"the forward pass of {toys.WRONG} is wrong"),
        ("the executor toys:Runtime", f"the forward pass of {toys.RAISING} crashes"),
        ("the builder toys:gradient", f"the gradient of {toys.LOST} is wrong"),
    ):
        assert f"| {who} | {what}" in text
    assert SAID[3] in text
    assert "at fault: the builder toys:gradient" in (folder / "r.xml").read_text()


@pytest.mark.parametrize(
    ("operator", "culprit"),
    [(toys.WRONG, "the kernel is at fault: Softmax"), (toys.LOST, "the rule is at fault: Tanh")],
)
def test_the_command_of_a_group_shows_the_fault(screen, folder, capsys, monkeypatch, operator, culprit):
    monkeypatch.syspath_prepend(Path(toys.__file__).parent)
    [group] = [group for group in json.loads(screen("--json"))["groups"] if group["operator"] == operator]
    command = shlex.split(group["command"])
    assert command[:2] == ["refgrad", "compare"]
    assert main(command[1:]) == 1
    assert culprit in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--a", "refgrad@numpy", "--b", "refgrad@numpy"], "Give either MODEL"),
        (["m.onnx", "--case", "x", "--a", "refgrad@numpy", "--b", "refgrad@numpy"], "Give either MODEL"),
        (["m.onnx", "--source", "tables", "--a", "refgrad@numpy", "--b", "refgrad@numpy"], "Leave --source out"),
        (["m.onnx", "--opset", "13", "--a", "refgrad@numpy", "--b", "refgrad@numpy"], "Leave --opset out"),
        (["--case", "nothing", "--a", "refgrad@numpy", "--b", "refgrad@numpy"], "No case matches"),
        (["--case", "Tanh-*", "--a", "refgrad@numpy", "--b", "refgrad@numpy"], "Several cases match"),
    ],
)
def test_wrong_use_of_a_case_is_a_message(capsys, words, message):
    assert main(["compare", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
