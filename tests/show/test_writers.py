"""Every writer of pages, texts and programs gets names made to harm. Compared with harmless names, only text differs.

The tests at the end find every writer in the code, so that a new one cannot be forgotten.
"""

from __future__ import annotations

import ast
import csv
import io
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper
from reporting import RESULTS
from rich.console import Console

import refgrad
from refgrad.cli import main
from refgrad.conformance.case import Case
from refgrad.conformance.judge.check import check as checked
from refgrad.conformance.judge.nan.nonfinite import nonfinite
from refgrad.conformance.judge.running.results import About, Results
from refgrad.conformance.judge.running.sources import select
from refgrad.conformance.locating import paths, reducing, scripts
from refgrad.conformance.locating.comparing import compare as compared
from refgrad.conformance.problems.observation import Built
from refgrad.conformance.reports import (
    check_page,
    checks,
    comparison_page,
    comparisons,
    html,
    junit,
    markdown,
    terminal,
)
from refgrad.conformance.reports.advice import ModelCommand
from refgrad.escaping import printable
from refgrad.training.step import step_model
from refgrad.walks import text as walk_text
from refgrad.walks.page import answers, questions
from refgrad.walks.page import data_of as walk_data
from refgrad.walks.page import page as walk_page

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
Say = Callable[[str], str]
SEEDS = range(3)


def hostile_names(seed: int) -> Say:
    """Another hostile name for each place."""
    given = hostile.names(40, seed)[seed :: len(SEEDS)]
    rng = np.random.default_rng(seed)
    known: dict[str, str] = {}

    def say(place: str) -> str:
        return known.setdefault(place, f"{place}{given[int(rng.integers(len(given)))]}{hostile.drawn(rng)}")

    return say


def tame_names(like: Say) -> Say:
    """Names of letters, as long as those."""
    return lambda place: f"{place}{'q' * (len(like(place)) - len(place))}"


@pytest.fixture(scope="module", params=SEEDS)
def both(request: pytest.FixtureRequest) -> tuple[Say, Say]:
    harmful = hostile_names(request.param)
    return harmful, tame_names(harmful)


def plain_model(say: Say) -> ModelProto:
    """y = tanh(x·w), to be differentiated."""
    x, y, w, z = map(say, "xywz")
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Mul", [x, w], [z], say("first")), helper.make_node("Tanh", [z], [y], say("second"))],
        say("graph"),
        [value(x, 1, [2, 3])],
        [value(y, 1, [2, 3])],
        [numpy_helper.from_array(np.arange(1, 4, dtype=np.float32) / 4, w)],
        say("doc"),
    )
    made = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    made.producer_name = say("me")
    made.metadata_props.add(key=say("key"), value=say("value"))
    return made


def odd_model(say: Say) -> ModelProto:
    """Unknown operators with every kind of attribute, a function and bodies, to be listed and drawn."""
    value = helper.make_tensor_value_info
    inner = helper.make_graph(
        [helper.make_node("Neg", [say("x")], [say("b")], say("in"))], say("body"), [], [value(say("b"), 1, [say("d")])]
    )
    node = helper.make_node(say("op"), [say("x"), say("w")], [say("y")], say("node"), say("doc"), say("domain"))
    node.attribute.extend(
        helper.make_attribute(say(f"a{k}"), content)
        for k, content in enumerate((say("s"), [say("s"), say("t")], inner, 1.5))
    )
    strings = numpy_helper.from_array(np.array([say("element"), "b"], dtype=object), say("w"))
    graph = helper.make_graph(
        [node, helper.make_node("If", [say("c")], [say("z")], say("if"), then_branch=inner, else_branch=inner)],
        say("graph"), [value(say("x"), 1, [say("d"), 3]), value(say("c"), 9, [])],
        [value(say("y"), 1, None), value(say("z"), 1, [say("d")])], [strings], say("doc"),
    )  # fmt: skip
    made = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    made.opset_import.append(helper.make_opsetid(say("domain"), 1))
    body = [helper.make_node("Tanh", [say("fa")], [say("fb")], say("fn"))]
    made.functions.append(
        helper.make_function(
            say("domain"), say("f"), [say("fa")], [say("fb")], body, made.opset_import[:1], [say("fx")]
        )
    )
    return made


FEEDS = np.full((2, 3), 0.5, np.float32)


def console_text(show: Callable[[Console], object]) -> str:
    written = io.StringIO()
    show(Console(file=written, width=100_000))
    return written.getvalue()


def rows_of(text: str) -> list[int]:
    """The number of cells in each row of a .csv file."""
    return [len(row) for row in csv.reader(io.StringIO(text))]


def said_by(model: ModelProto, say: Say) -> dict[str, tuple[str, Callable[[str], object]]]:
    """Everything that is written about a model and its gradient, each with the function that removes its texts."""
    feeds = {say("x"): FEEDS}
    walk = refgrad.walk(model, feeds, of=f"{say('y')}[0, 0]", seed=1)
    comparison = compared(model, "refgrad@numpy", {f"{say('x')}_grad": np.zeros((2, 3), np.float32)}, feeds)
    graph = paths.TracedGraph(model, feeds)
    wrong = [paths.Wrong(say("x"), say("x"), 0.5)]
    traced = replace(
        comparison.b,
        paths=paths.of_rules(graph, [len(graph.nodes) - 1], wrong, {say("x"): 0.5}),
        around=(paths.around(graph, [0], refgrad.gradient(model)), paths.around(graph, [len(graph.nodes) - 1])),
    )
    assert traced.paths
    comparison = replace(comparison, b=traced)
    check = checked(model, backends=["numpy"])
    asked = ModelCommand(say("model"), {"--wrt": [say("x")]}, {say("version"): say("number")})
    step = step_model(model)
    tables = [
        refgrad.weights(model),
        refgrad.preflight(model),
        refgrad.cost(model),
        walk,
        walk.steps[0],
        check,
        comparison,
        step,
    ]
    made = {f"table of {type(one).__name__}": (one._repr_html_(), hostile.of_html) for one in tables}
    made |= {
        "page of a walk": (walk_page(walk, say("title")), hostile.of_html),
        "walk": (walk_text.text_of(walk), hostile.of_lines),
        "walk in a terminal": (console_text(lambda console: walk_text.show(walk, console)), hostile.of_lines),
        "answers": (answers({say("page"): (say("result"), questions(walk))}), rows_of),
        "page of a comparison": (comparison_page.page(comparison), hostile.of_html),
        "comparison": (console_text(lambda c: comparisons.show(comparison, c, verbose=True)), hostile.of_lines),
        "comparison as Markdown": (comparisons.markdown_of(comparison), hostile.of_markdown),
        "comparison as JSON": (comparisons.text_of(comparison), hostile.of_json),
        "check": (console_text(lambda c: checks.show(check, c, verbose=True)), hostile.of_lines),
        "page of a check": (check_page.page(check, asked), hostile.of_html),
        "check as Markdown": (checks.markdown_of(check, asked), hostile.of_markdown),
        "check as JSON": (checks.text_of(check, asked), hostile.of_json),
    }  # fmt: skip
    return made


def listed_of(model: ModelProto) -> dict[str, tuple[str, Callable[[str], object]]]:
    return {
        "listing": (refgrad.onnx_simple_text_plot(model), hostile.of_lines),
        "inputs and outputs": (refgrad.onnx_text_plot_io(model), hostile.of_lines),
        "DOT": (refgrad.to_dot(model), hostile.of_dot),
        "SVG": (refgrad.to_svg(model), hostile.of_xml),
    }


def assert_only_texts_differ(harmful: dict[str, Any], tame: dict[str, Any]) -> None:
    assert harmful.keys() == tame.keys()
    for name, (text, bare) in harmful.items():
        assert bare(text) == bare(tame[name][0]), name
        assert_harmless(text, name)


def assert_harmless(text: str, where: str) -> None:
    odd = {letter for letter in text if letter != "\n" and printable(letter) != letter}
    assert not odd, (where, sorted(map(ascii, odd)))
    assert "\nrefgrad: forged" not in text, where


def test_what_is_written_about_a_gradient(both: tuple[Say, Say]) -> None:
    harmful, tame = (said_by(plain_model(say), say) for say in both)
    assert_only_texts_differ(harmful, tame)


@pytest.mark.parametrize("make", [plain_model, odd_model, lambda say: refgrad.gradient(plain_model(say))])
def test_listings_and_pictures(both: tuple[Say, Say], make: Callable[[Say], ModelProto]) -> None:
    harmful, tame = (listed_of(make(say)) for say in both)
    assert_only_texts_differ(harmful, tame)


def test_where_nan_is_born(both: tuple[Say, Say]) -> None:
    def written(say: Say) -> dict[str, Any]:
        model = plain_model(say)
        model.graph.node[1].op_type = "Log"
        found = nonfinite(model, {say("x"): -FEEDS})
        assert found.origins
        return {"births": (console_text(lambda c: comparisons.show_origins(found, c, True)), hostile.of_lines)}

    assert_only_texts_differ(*map(written, both))


def test_the_page_of_a_walk_holds_names_as_data(both: tuple[Say, Say]) -> None:
    say = both[0]
    page = walk_page(refgrad.walk(plain_model(say), {say("x"): FEEDS}, of=f"{say('y')}[0, 0]"))
    assert walk_data(page)[0]["wrt"] == [say("x"), say("w")]


def test_a_figure_has_no_formulas_of_names(both: tuple[Say, Say]) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    model = plain_model(lambda place: f"{both[0](place)}$\\frac{{$x$")
    with warnings.catch_warnings(action="ignore"):  # of letters that the font lacks
        ax = refgrad.plot_onnxs(model)
        ax.figure.canvas.draw()
    assert not any(text.get_parse_math() for text in ax.texts if text.get_text())
    for text in ax.texts:
        assert_harmless(text.get_text(), "figure")
    matplotlib.pyplot.close(ax.figure)


# Results of a conformance run, which a stranger may have written


def results_with(say: Say) -> Results:
    """Results in which every text is a name: cases, operators, versions, settings, witnesses, notes, builders, executors."""
    builder, executor = say("builder"), say("executor")
    cases = {say(f"case{k}"): About(say(f"Op{k}"), 21, say("dtype"), say("values"), say("from")) for k in range(3)}
    rows = [
        replace(row, case=list(cases)[k % 3], builder=builder, executor=executor, witnesses=(say("w"),), against=(say("v"),),
                note=say(f"note{k}"))
        for k, row in enumerate({row.verdict: row for row in RESULTS.rows}.values())
    ]  # fmt: skip
    settings = {say("setting"): say("value"), "sources": [say("source")], "feeds": say("feeds"), "imports": [say("module")],
                "oracles": [say("oracle")], "seed": 3}  # fmt: skip
    return Results(
        settings, {builder: say("version"), executor: say("version2"), say("other"): say("v3")}, cases, tuple(rows)
    )


def test_reports_of_results(both: tuple[Say, Say]) -> None:
    def written(say: Say) -> dict[str, Any]:
        results = results_with(say)
        cases = [Case(name, plain_model(say), {say("x"): FEEDS}) for name in results.cases]
        return {
            "Markdown": (markdown.report(results, say("title")), hostile.of_markdown),
            "JUnit": (junit.report(results), hostile.of_xml),
            "page": (html.report(results, cases), hostile.of_html),
            "terminal": (console_text(lambda console: terminal.show(results, console, None)), hostile.of_lines),
            "JSON": (results.text(), hostile.of_json),
        }

    assert_only_texts_differ(*map(written, both))


def test_the_models_of_a_page_have_the_lines_of_tame_ones(both: tuple[Say, Say]) -> None:
    def lines(say: Say) -> list[int]:
        results = results_with(say)
        page = html.report(results, [Case(name, plain_model(say), {}) for name in results.cases])
        return [model.count("\n") for model in html.data_of(page)["models"]]

    assert lines(both[0]) == lines(both[1])


# `reduce`


def reduced_with(say: Say, kind: str, gradient: bool = False) -> reducing.Reduced:
    """A failure in which every text is a name, also the side, which a caller of the library may name as it likes."""
    model = plain_model(say)
    failure = reducing.Failure(
        kind,
        "refused",
        (say("Op"), say("Op2")),
        (say("first"), say("second")),
        say("message"),
        model,
        {say("x"): FEEDS},
    )
    due = {say("x"): FEEDS, say("w"): FEEDS[0]}
    return reducing.Reduced(
        failure, say("side:"), 3, wrt=(say("x"), say("w")), due=due, found={say("x"): FEEDS},
        built=Built.of(refgrad.gradient(model)) if gradient else None, fed={say("x"): FEEDS},
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "gradient"), [("rule", False), ("rule", True), ("kernel", False)])
@pytest.mark.parametrize("side", ["", "refgrad", "refgrad:ort", "onnx-ad", "onnxruntime:raw", "module:function"])
def test_a_failure_that_is_written(
    both: tuple[Say, Say], kind: str, gradient: bool, side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "_exact_text", lambda model: [])  # the number of lines depends on the names
    monkeypatch.setattr(scripts, "_WIDTH", 10**9)

    def written(say: Say) -> dict[str, Any]:
        monkeypatch.setattr(reducing, "_run", lambda file: (1, f"{say('line')}\n{say('line 2')}"))
        reduced = reduced_with(say, kind, gradient)
        if side:
            reduced.side = f"{side}@numpy"
        folder = tmp_path / str(say is both[0])
        reducing.write(reduced, folder)
        assert {tensor.name for tensor in map(onnx.load_tensor, folder.glob("test_data_set_0/input_*.pb"))} == {
            say("x")
        }
        return {
            "reproduce.py": ((folder / "reproduce.py").read_text(encoding="utf-8"), hostile.of_program),
            "REPORT.md": ((folder / "REPORT.md").read_text(encoding="utf-8"), hostile.of_markdown),
            "terminal": (reducing.report(reduced, printable), hostile.of_lines),
        }

    assert_only_texts_differ(*map(written, both))


@pytest.mark.parametrize(
    "side",
    ["ort-cpu", "ort-cuda", "onnx.reference", "numpy:float64", "module:Class", "unknown"],
)
@pytest.mark.parametrize("is_text", [True, False])
def test_a_program_has_names_in_its_data_alone(
    both: tuple[Say, Say], side: str, is_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "_exact_text", lambda model: [model.graph.name, "}"] if is_text else [])
    monkeypatch.setattr(scripts, "_WIDTH", 10**9)
    trees = set()
    for say in both:
        arrays = {say("x"): FEEDS, say("text"): np.array([say("first"), say("second")])}
        model = plain_model(say)
        model.graph.name = say("graph")
        shown = scripts.Shown(say("b"), side, False, True, True, model, arrays, arrays, {say("x"): 1.0}, [say("x")])
        text, beside = scripts.program(shown)
        assert not beside
        trees.add(hostile.of_program(text))
    assert len(trees) == 1


def literal_in(program: str) -> dict[str, Any]:
    [found] = [
        node.value
        for node in ast.parse(program).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "asked"
    ]
    return ast.literal_eval(found)


EVIL = "', __import__('os').system('touch RAN'), '"


@pytest.mark.parametrize(
    ("middle", "end"),
    [
        ("{outputs}", EVIL),
        ("{outputs}{wrt}", f"{{wrt}}{EVIL}"),
        ("'''", '"""\nimport os; os.system("touch RAN")\n"""'),
        ("{{runner}}\\", "\n\nimport os\nos.system('touch RAN')\n"),
    ],
    ids=range(4),
)
def test_no_name_runs(middle: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The names of a model were code in reproduce.py, which REPORT.md says to run."""
    monkeypatch.chdir(tmp_path)
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("Mul", ["x", "x"], [middle]), helper.make_node("Tanh", [middle], [end])]
    graph = helper.make_graph(nodes, "g", [value("x", 1, [2])], [value(end, 1, [2])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), "evil.onnx")
    Path("refuses_tanh.py").write_text(
        "import refgrad\n\n\ndef build(model, wrt=None, outputs=None, **options):\n"
        "    if any(node.op_type == 'Tanh' for node in model.graph.node):\n"
        "        raise RuntimeError(f'no rule for Tanh, of {model.graph.output[0].name}\\x1b[31m')\n"
        "    return refgrad.gradient(model, wrt, outputs)\n"
    )
    assert main(["reduce", "evil.onnx", "--side", "refuses_tanh:build@numpy", "-o", "out"]) == 0
    said = capsys.readouterr()
    assert_harmless(said.out + said.err, "reduce")
    program = Path("out/reproduce.py").read_text(encoding="utf-8")
    asked = literal_in(program)
    assert (asked["wrt"], asked["outputs"]) == ([middle], [end])
    assert (asked["module"], asked["builder"]) == ("refuses_tanh", "build")
    done = subprocess.run(
        [sys.executable, "out/reproduce.py"], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"},
    )  # fmt: skip
    assert "no rule for Tanh" in done.stderr
    assert "\x1b" not in done.stderr
    assert not list(tmp_path.rglob("RAN"))


def test_a_program_shows_no_name_as_it_is(both: tuple[Say, Say], tmp_path: Path) -> None:
    reducing.write(reduced_with(both[0], "kernel"), tmp_path / "made")
    done = subprocess.run(
        [sys.executable, "reproduce.py"], cwd=tmp_path / "made", capture_output=True, text=True, check=False
    )
    assert_harmless(done.stdout, "reproduce.py")
    assert not re.search(r"[^\n -~]", done.stderr.replace("\ufffd", ""))


# Commands that are printed


def test_a_path_survives_the_paste(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(hostile.names(10)[::7]):
        path = f"{number}{name}".replace("/", "").replace("\0", "")[:60] + ".py"
        assert main(["teach", "1", "--start", path]) == 0
        said = capsys.readouterr().out
        assert_harmless(said, path)
        command = (
            said.partition("; then: refgrad teach 1 ")[2].rstrip("\n")
            if ";" not in path
            else said.rpartition("teach 1 ")[2].rstrip("\n")
        )
        words = subprocess.run(
            ["bash", "-c", f"printf %s {command}"], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
        )
        assert words.stdout.decode() == path


def test_a_case_is_found_by_its_name() -> None:
    """The command that is printed for a fault has the name of the case, which is not a pattern."""
    cases = [Case(name, plain_model(lambda place: place), {"x": FEEDS}) for name in ("m[1]", "m1", "a*", "?[")]
    for case in cases:
        assert case.name in {found.name.partition("-opset")[0] for found in select(cases, names=case.name)}


def test_a_verbose_derivative(both: tuple[Say, Say], capsys: Any) -> None:
    refgrad.onnx_derivative(plain_model(both[0]), verbose=1)
    said = capsys.readouterr().out
    assert_harmless(said, "onnx_derivative")
    assert said.count("\n") == 1
