"""The page of a walk in a browser: every number is the walk's, and everything can be done with it that it says."""

import csv
import json
import os
import re
import shutil
from functools import cache, partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from walked_models import HOSTILE, MODELS, hostile, long, mlp

import refgrad
from refgrad.backends import get_backend
from refgrad.backends.numpy import NumpyBackend
from refgrad.cli import main
from refgrad.conformance.cases import every_case
from refgrad.show.lanes import lanes
from refgrad.walks.page import WHOLE, answers, data_of, page, questions

pytestmark = [pytest.mark.browser, pytest.mark.interpreter]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("REFGRAD_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
AXE = Path(os.environ.get("REFGRAD_NODE_MODULES", ".")) / "axe-core" / "axe.min.js"
EXPORTS = os.environ.get("REFGRAD_TORCH_MODELS", "")
EDITABLE = ("regression", "mlp", "attention", "convolution")


@cache
def walked(name, seed=0):
    return refgrad.walk(MODELS[name](), seed=seed)


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("there is no Chromium")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open the page of a walk; whatever it says on the console, or asks of a network, fails the test."""
    said, contexts = [], []

    def open_at(walk, hash="", width=1300, height=900, scheme="light", **options):
        file = tmp_path / f"page{len(contexts)}.html"
        file.write_text(page(walk, **options), encoding="utf-8")
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
        contexts.append(context)
        shown = context.new_page()
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        shown.on("request", lambda asked: asked.url.split("#")[0] == file.as_uri() or said.append(asked.url))
        shown.goto(f"{file.as_uri()}{hash}")
        shown.wait_for_selector("html[data-editable]")
        return shown

    yield open_at
    for context in contexts:
        context.close()
    assert not said


def parsed(graph):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {graph}')


def number(text):
    return float(text.replace("−", "-").replace("∞", "inf"))


# Without a browser


def test_the_page_loads_nothing():
    text = page(walked("mlp"))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:|//)", text)


@pytest.mark.parametrize("name", MODELS)
def test_the_data_are_the_walk(name):
    walk = walked(name)
    document, raw = data_of(page(walk))
    known = {value["name"]: value for value in document["values"]}
    types = {"f4": np.float32, "f8": np.float64, "i4": np.int32, "u1": np.uint8}
    for value, array in walk.values.items():
        if not isinstance(array, np.ndarray) or "at" not in known[value]:
            continue
        one = known[value]
        there = np.frombuffer(raw, types[one["code"]], one["count"], one["at"]).reshape(one["shape"])
        np.testing.assert_array_equal(there, array)
    assert [step["node"] for step in document["steps"]] == [step.node for step in walk.steps]
    assert document["cotangents"].keys() == walk.cotangents.keys()


def test_a_large_tensor_is_there_in_part():
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[3, 70, 80] x) => (float y) { y = ReduceSumSquare <keepdims=0>(x) }'
    )
    x = np.random.default_rng(0).normal(size=(3, 70, 80)).astype(np.float32)
    x[2, 60, 70] = -9
    assert x.size > WHOLE
    document, raw = data_of(page(refgrad.walk(model, {"x": x})))
    value = next(one for one in document["values"] if one["name"] == "x")
    assert value["statistics"]["largest"] == [2, 60, 70]
    assert value["statistics"]["least"] == -9
    assert value["statistics"]["most"] == x.max()
    np.testing.assert_allclose(value["statistics"]["mean"], x.astype(np.float64).mean())
    assert sum(value["histogram"]["counts"]) == x.size
    norms = np.linalg.norm(x, axis=-1)
    assert value["top"]["what"] == "row"
    assert value["top"]["index"] == [2, 60]
    np.testing.assert_allclose(
        [value["top"]["norm"], value["top"]["whole"]], [norms.max(), np.linalg.norm(x)], rtol=1e-6
    )
    overview = value["overview"]
    blocks = np.frombuffer(raw, np.float32, overview["count"], overview["at"]).reshape(overview["size"])
    assert (overview["lead"], blocks.min()) == ([2], -9)
    assert blocks.max() == x[2].max()
    for part in value["parts"]:
        (r, c), (rows, columns) = part["from"], part["size"]
        there = np.frombuffer(raw, np.float32, part["count"], part["at"]).reshape(rows, columns)
        np.testing.assert_array_equal(there, x[tuple(part["lead"])][r : r + rows, c : c + columns])
    assert value["parts"][0]["lead"] == [2]


def test_the_channel_with_the_largest_gradient_is_named():
    images = np.zeros((2, 5, 4, 4), np.float32)
    images[1, 3] = 1
    model = parsed("(float[2, 5, 4, 4] x) => (float y) { y = ReduceSumSquare <keepdims=0>(x) }")
    document, _ = data_of(page(refgrad.walk(model, {"x": images})))
    top = next(one for one in document["values"] if one["name"] == "x_grad")["top"]
    assert top == {"what": "channel", "index": [1, 3], "norm": 8.0, "whole": 8.0}


@pytest.mark.parametrize(
    ("graph", "text"),
    [
        ("(float[2] a) => (float[2] c) { c = Celu(a) }", "∂a = ∂c where a > 0, else ∂c·exp(a/α)"),
        (
            "(bool[2] q, float[2] a, float[2] b) => (float[2] c) { c = Where(q, a, b) }",
            "∂a = ∂c where the condition holds, else 0; ∂b = ∂c where it does not, else 0",
        ),
    ],
)
def test_a_formula_of_the_page_has_the_names_of_the_step(graph, text):
    document, _ = data_of(page(refgrad.walk(parsed(graph))))
    pieces = document["steps"][0]["formula"]
    assert {"name": "a", "isGradient": True} in pieces
    names = [f"{'∂' * one['isGradient']}{one['name']}" if isinstance(one, dict) else one for one in pieces]
    assert "".join(names).startswith(text)


def test_an_integer_that_javascript_lacks_is_text():
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[3] x) => (float y) '
        "<int64[1] a = {0}, int64[1] e = {9223372036854775807}> { s = Slice(x, a, e) y = ReduceSum <keepdims=0> (s) }"
    )
    document, _ = data_of(page(refgrad.walk(model)))
    assert next(one for one in document["values"] if one["name"] == "e")["whole"] == ["9223372036854775807"]


def test_numbers_that_are_none_are_in_the_page():
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float y) { l = Log(x) y = ReduceSum <keepdims=0> (l) }'
    )
    text = page(refgrad.walk(model, {"x": np.array([0, -1], np.float32)}, differences=False))
    json.dumps(data_of(text)[0], allow_nan=False)


@pytest.mark.parametrize("name", MODELS)
def test_a_question_is_answered_by_the_walk(name):
    walk = walked(name)
    asked = questions(walk)
    assert [one.step for one in asked] == [step.number for step in walk.steps]
    for one in asked:
        array = sum(walk.values[value].astype(np.float64) for value in one.values)
        assert one.number == array[one.element]
        assert abs(one.number) == np.abs(array).max()
        assert one.shape == array.shape
        if one.is_whole:
            np.testing.assert_allclose(array, walk.values[walk.cotangents[one.of].value], rtol=1e-6)


def test_the_sheet_of_answers():
    rows = list(
        csv.DictReader(
            answers(
                {"a.html": ("loss", questions(walked("mlp"))), "=b": ("loss", questions(walked("mlp", 1)))}
            ).splitlines()
        )
    )
    assert [row["page"] for row in rows] == ["a.html"] * 5 + ["'=b"] * 5  # no spreadsheet takes it for a formula
    assert [row["step"] for row in rows[:5]] == list("12345")
    for row, one in zip(rows, questions(walked("mlp")), strict=False):
        assert row["differentiated"] == "loss"
        if one.asks_shape:
            assert row["asked"] == f"shape of ∂{one.of}"
            assert row["answer"] == str(list(one.shape))
        else:
            assert row["asked"] == f"∂{one.of}{list(one.element)}"
            assert float(row["answer"]) == pytest.approx(one.number, rel=1e-5)


def test_lanes():
    assert lanes([[], [0], [1]]) == [0, 0, 0]
    assert lanes([[], [0], [0], [1, 2], [3]]) == [0, 0, 1, 0, 0]
    assert lanes([[], [], [0, 1]]) == [0, 1, 0]
    assert lanes([[], [0], []], held=[1]) == [0, 0, 1]
    assert max(lanes([[] for _ in range(30)])) == 11


# The command


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(), "m.onnx")
    return "m.onnx"


def test_the_command_writes_a_page(model, capsys):
    assert main(["walk", model, "--html", "p.html"]) == 0
    assert capsys.readouterr().out == (
        "note: 'x', 'label' were not fed: they are random, drawn with seed 0.\np.html: written\n"
    )
    document, _ = data_of(Path("p.html").read_text(encoding="utf-8"))
    assert document["title"] == "m"
    assert not document["quiz"]
    assert "random" in " ".join(document["notes"])


def test_a_page_for_each_student(model, capsys):
    assert main(["walk", model, "--html", "p.html", "--seed", "1:3", "--quiz", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"pages": ["p_01.html", "p_02.html", "p_03.html"], "answers": "p_answers.csv"}
    assert not Path("p.html").exists()
    numbers = {data_of(Path(file).read_text(encoding="utf-8"))[1] for file in said["pages"]}
    assert len(numbers) == 3
    rows = list(csv.DictReader(Path("p_answers.csv").read_text().splitlines()))
    for seed, file in enumerate(said["pages"], 1):
        expected = questions(refgrad.walk(mlp(), seed=seed))
        mine = [row for row in rows if row["page"] == file]
        assert [row["answer"] for row in mine] == [one.answer for one in expected]
        assert data_of(Path(file).read_text(encoding="utf-8"))[0]["quiz"]


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ("1:1", "p_01.html, p_answers.csv: written\n"),
        ("1:2", "p_01.html, p_02.html, p_answers.csv: written\n"),
        ("1:3", "p_01.html, …, p_03.html, p_answers.csv: written\n"),
    ],
)
def test_each_page_that_was_written_is_named_once(model, capsys, seeds, said):
    assert main(["walk", model, "--html", "p.html", "--seed", seeds]) == 0
    assert capsys.readouterr().out == said


def test_the_name_of_a_page_may_end_in_capitals(model, capsys):
    assert main(["walk", model, "--html", "p.HTML"]) == 0
    assert Path("p.HTML").exists()


def test_pages_that_differentiate_different_elements_say_so(model, capsys):
    assert main(["walk", model, "--html", "p.html", "--of", "a", "--seed", "1:3"]) == 0
    elements = list(dict.fromkeys(refgrad.walk(mlp(), of="a", seed=seed).of for seed in (1, 2, 3)))
    note = f"note: each page starts from the largest element of its output: {', '.join(elements)}. "
    assert capsys.readouterr().out.startswith(f"{note}To take the same on all pages: --of '{elements[0]}'\n")
    rows = list(csv.DictReader(Path("p_answers.csv").read_text(encoding="utf-8").splitlines()))
    assert list(dict.fromkeys(row["differentiated"] for row in rows)) == elements


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--html", "m.onnx"], "'m.onnx' is the model itself. Write to another file."),
        (["--html", "no/p.html"], "There is no folder 'no' to write 'p.html' into. Make it first."),
        (["--quiz"], "--quiz needs --html PAGE.html. Give it, too."),
        (["--seed", "1:3"], "--seed 1:3 needs --html PAGE.html. Give it, too."),
        (
            ["--seed", "x"],
            "--seed 'x': give a whole number from 0 on, or the first and the last of several, as in 1:30.",
        ),
        (["--html", "p.html", "--seed", "3:1"], "--seed 3:1: the last seed must be at least the first"),
        (["--html", "p.html", "--step", "0"], "--step prints one step, and a page has them all."),
        (["--html", "p.html", "--seed", "1:2", "--feeds", "f.npz"], "Every page would be the same"),
    ],
)
def test_what_the_command_refuses(model, capsys, options, said):
    np.savez("f.npz", x=np.ones((4, 3), np.float32), label=np.zeros(4, np.int64))
    assert main(["walk", model, *options]) == 2
    assert said in capsys.readouterr().err
    assert not list(Path().glob("*.html"))


def test_no_page_of_a_class_replaces_the_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(), "p_02.html")
    before = Path("p_02.html").read_bytes()
    assert main(["walk", "p_02.html", "--html", "p.html", "--seed", "1:3"]) == 2
    assert "is the model itself" in capsys.readouterr().err
    assert Path("p_02.html").read_bytes() == before
    assert not Path("p_01.html").exists()


# In a browser: what is shown


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_way_back_is_shown(opened, name):
    walk = walked(name)
    shown = opened(walk, "#step=0")
    for k, step in enumerate(walk.steps, 1):
        shown.keyboard.press("ArrowRight")
        assert step.number == k
        assert shown.locator("#position").inner_text() == f"step {k} of {len(walk.steps)}"
        assert shown.locator("#step h2").inner_text().startswith(f"Step {k}: {step.operator}")
        lines = shown.locator(".line").count()
        assert shown.locator(".formula").count() == (lines < len(step.outgoing))
        for one in step.outgoing:
            again = sum(other.of == one.of for other in step.outgoing) > 1
            by = f", {('first', 'second')[one.position]} input" if again else ""
            compare_card(shown, walk, f"∂{one.of}", f"contribution to ∂{one.of}{by}", one.value)
        for one in step.incoming:
            compare_card(shown, walk, f"∂{one.of}", f"∂{one.of}", one.value)
        assert shown.locator("#emitted").count() == bool(step.emitted)
        assert shown.locator("#list li.now").count() == 1
    shown.keyboard.press("ArrowRight")
    assert shown.locator("#step h2").inner_text() == "End: the gradients"
    for name in walk.wrt:
        compare_card(shown, walk, f"∂{name}", f"∂{name}", walk.cotangents[name].value)
    assert shown.locator("#list li.done").count() == len(walk.steps)


@pytest.mark.parametrize("name", ["regression", "mlp", "attention"])
def test_the_way_forward_is_shown_first(opened, name):
    walk = walked(name)
    shown = opened(walk)
    assert shown.locator("#step h2").inner_text().startswith(f"How does {walk.of} change")
    shown.get_by_role("button", name="Forward, node by node").click()
    known = {name for node in walk.model.graph.node for name in (*node.input, *node.output)}
    for k, node in enumerate(walk.forward, 1):
        assert shown.locator("#position").inner_text() == f"forward {k} of {len(walk.forward)}"
        assert shown.locator("#step h2").inner_text().startswith(f"Forward {k} of {len(walk.forward)}: {node.operator}")
        for value in {*node.inputs, *node.outputs} & known:
            compare_card(shown, walk, value, value)
        assert "InvStdDev" not in shown.locator("#step").inner_text()  # an output that the model itself has not
        assert shown.locator("#list li.now").count() == 1
        shown.keyboard.press("ArrowRight")
    assert shown.locator("#step h2").inner_text() == f"The way back starts at {walk.of}"


def test_the_name_of_a_value_leads_to_the_node_that_made_it(opened):
    shown = opened(walked("mlp"), "#step=2")
    shown.get_by_role("button", name="a", exact=True).click()
    assert shown.locator("#step h2").inner_text().startswith("Forward 3 of 5: Relu")
    assert shown.url.endswith("#forward=3")


def test_a_formula_has_the_names_of_the_tensors(opened):
    shown = opened(walked("mlp"), "#step=5")
    written = [line.text_content() for line in shown.locator(".line .symbols").all()]
    assert written == ["∂x=∂h·W1T", "∂W1=xT·∂h"]
    shown.locator(".card.out", has_text="∂W1").locator("td[data-row]").first.click()
    assert "∂h[0, 0]" in shown.locator("#inspector").inner_text()  # it equals ∂hb, which is not what this step reads
    shown.evaluate("walkPage.go(4)")
    assert shown.locator(".line .symbols").last.text_content() == "∂b1=∑axis\u00a00(∂hb)"
    model = parsed("(float[2] a, float[2] d) => (float y) { c = Celu(a) p = Mul(c, d) y = ReduceSum <keepdims=0> (p) }")
    shown = opened(refgrad.walk(model), "#step=3")
    assert shown.locator(".formula").inner_text() == "∂a = ∂c where a > 0, else ∂c·exp(a/α)"


def test_the_picture_shows_where_the_gradient_goes(opened):
    walk = walked("mlp")
    shown = opened(walk, "#step=5")
    picture = shown.locator(".picture > svg")
    assert picture.get_attribute("aria-label") == (
        "x, W1 into MatMul, which makes h. ∂h comes back and becomes ∂x, ∂W1."
    )
    assert picture.locator("path.gradient").count() == 3
    size = f"{np.abs(walk.values['W1_grad']).max():.2g}"
    assert picture.locator("text.gradient").nth(1).text_content() == f"∂W1, max {size}"
    assert shown.locator("#edges path.flow").count() == 4
    shown.keyboard.press("q")
    assert picture.locator("text.gradient").nth(1).text_content() == "∂W1"
    assert shown.locator("#edges path.flow").count() == 0
    shown.evaluate("walkPage.go(-1)")
    assert picture.locator("path.gradient").count() == 0


def test_a_part_of_a_gradient_is_called_so(opened):
    shown = opened(walked("attention"), "#step=12")
    assert shown.locator(".line .symbols").first.text_content() == "∂x+=∂q·QT"
    assert shown.locator(".picture text.gradient").first.text_content().startswith("part of ∂x, max")


@pytest.mark.parametrize("width", [1300, 390])
def test_a_large_gradient_with_one_large_element_is_seen(opened, width):
    x = np.full((3, 70, 80), 1e-3, np.float32)
    x[2, 60, 70] = -9
    model = parsed("(float[3, 70, 80] x) => (float y) { s = Mul(x, x) y = ReduceSum <keepdims=0>(s) }")
    shown = opened(refgrad.walk(model, {"x": x}), "#step=3", width=width)
    card = shown.locator(".card.out")
    coloured = """canvas => {
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return data.filter((x, k) => k % 4 === 3 && x > 12).length / (data.length / 4);
    }"""
    for canvas in card.locator("canvas").all():
        assert canvas.evaluate(coloured) > 0.9
        assert "log scale" in canvas.get_attribute("title")
    assert "−18" in card.locator("td[data-row]").all_inner_texts()
    assert "Largest row: [2, 60], with norm 18" in card.inner_text()
    assert card.locator(".histogram rect").count() == 24


def compare_card(shown, walk, *titles):
    """The numbers of the card with one of these titles are those of the walk, as far as they are in sight."""
    *names, value = titles
    array = np.asarray(walk.values[value])
    found = shown.evaluate(
        """names => [...document.querySelectorAll("#step .card")].filter(card => names.includes(card.firstChild.textContent))
        .map(card => [...card.querySelectorAll("td[data-row]")].map(cell => cell.getAttribute("aria-label")))""",
        names,
    )
    assert found
    for cells in found:
        assert cells
        for cell in cells:
            index = re.match(r"\[([\d, ]*)\] ", cell)
            place = tuple(map(int, index[1].split(","))) if index else ()
            if len(place) == array.ndim:
                seen = number(cell.split("] ")[-1])
                assert seen == pytest.approx(float(array[place]), rel=2e-2 if "e" in cell else 1e-3)


@pytest.mark.parametrize("name", EDITABLE)
def test_the_textbook_lines_are_the_numbers_of_the_model(opened, name):
    walk = walked(name)
    shown = opened(walk)
    lines = 0
    for k in range(1, len(walk.steps) + 1):
        shown.evaluate(f"walkPage.go({k})")
        lines += shown.locator(".line", has_text="it gives the model's numbers").count()
    assert lines >= {"regression": 6, "mlp": 5, "attention": 15, "convolution": 2}[name]


def test_softmax_with_cross_entropy_is_p_minus_onehot(opened):
    shown = opened(walked("mlp"), "#step=1")
    line = shown.locator(".line")
    assert line.locator("mfrac").first.text_content() == "softmax(s)−onehot(label)N"
    p, hot = (
        line.locator(".tile", has_text=name).locator("mn").all_text_contents()
        for name in ("softmax(s)", "onehot(label)")
    )
    s = walked("mlp").values["s"].astype(np.float64)
    softmax = np.exp(s) / np.exp(s).sum(1, keepdims=True)
    np.testing.assert_allclose([number(x) for x in p], softmax.ravel(), rtol=1e-2)
    np.testing.assert_array_equal(
        np.array([number(x) for x in hot]).reshape(4, 2), np.eye(2)[walked("mlp").feeds["label"]]
    )


def test_an_element_of_a_matrix_product_shows_its_products(opened):
    walk = walked("mlp")
    shown = opened(walk, "#step=5")
    card = shown.locator(".card.out").last
    assert card.locator("h4").inner_text() == "∂W1"
    card.locator("td[data-row='1'][data-column='3']").click()
    inspector = shown.locator("#inspector")
    assert inspector.locator("h2").inner_text() == "∂W1[1, 3]"
    rows = inspector.locator("table.terms tbody tr")
    x, d = walk.values["x"], walk.values["hb_grad"]
    assert rows.count() == 4
    for m in range(4):
        _, numbers, product = rows.nth(m).locator("td").all_inner_texts()
        assert [number(one) for one in numbers.split("·")] == pytest.approx([x[m, 1], d[m, 3]], rel=1e-3)
        assert number(product) == pytest.approx(x[m, 1] * d[m, 3], rel=2e-2)
    total = number(inspector.locator("tfoot td").last.inner_text())
    assert total == pytest.approx(walk.values["W1_grad"][1, 3], rel=1e-4, abs=1e-7)
    difference = number(inspector.locator(".difference").inner_text().split(":")[1].strip(" ✓\n"))
    assert difference == pytest.approx(walk.values["W1_grad"][1, 3], rel=1e-3, abs=1e-6)
    inspector.locator("table.terms button").first.click()
    assert inspector.locator("h2").inner_text() == "x[0, 1]"
    inspector.get_by_role("button", name="← back").click()
    assert inspector.locator("h2").inner_text() == "∂W1[1, 3]"
    shown.keyboard.press("Escape")
    assert not inspector.is_visible()


@pytest.mark.parametrize("name", EDITABLE)
def test_the_terms_add_up_and_the_differences_agree(opened, name):
    """Of every element of every cotangent, and against differences that are taken in the page."""
    walk = walked(name)
    shown = opened(walk)
    found = shown.evaluate(
        """() => Object.entries(walkPage.document().cotangents).flatMap(([of, one]) => {
          const value = walkPage.value(one.value);
          return value.data.map((number, flat) => {
            const made = walkPage.madeOf(one.value, flat, of);
            const at = ([name, k]) => walkPage.value(name).data[k];
            const product = term => term.from.reduce((x, from) => x * at(from), term.factor);
            const sum = made.sum && made.sum.reduce((all, term) => all + product(term), 0);
            return [of, flat, number, sum ?? null, walkPage.difference(of, flat) ?? null];
          });
        })"""
    )
    assert len([one for one in found if one[3] is not None]) > 10
    scale = {of: float(np.abs(walk.values[one.value]).max()) for of, one in walk.cotangents.items()}
    for of, flat, gradient, total, difference in found:
        if total is not None:
            assert total == pytest.approx(gradient, rel=1e-4, abs=1e-5 * scale[of]), (of, flat)
        assert difference == pytest.approx(gradient, rel=2e-3, abs=1e-4 * scale[of]), (of, flat)


def test_a_fan_out_shows_its_sum(opened):
    walk = walked("attention")
    one = walk.cotangents["x"]
    assert len(one.contributions) == 4
    shown = opened(walk, f"#step={len(walk.steps) + 1}")
    note = shown.locator(".card", has_text="∂x").locator(".more").inner_text()
    assert note.count("step") == 4
    shown.locator(".card", has_text="∂x").locator("td[data-row='1'][data-column='2']").click()
    rows = shown.locator("#inspector table.terms tbody tr")
    values = [number(rows.nth(k).locator("td").last.inner_text()) for k in range(4)]
    assert values == pytest.approx([float(walk.values[c.value][1, 2]) for c in one.contributions], rel=2e-2)


def test_a_broadcast_says_what_was_summed(opened):
    shown = opened(walked("mlp"), "#step=4")
    card = shown.locator(".card.out", has_text="∂b1")
    assert "summed over axis 0" in card.locator(".more").inner_text()
    card.locator("td[data-row]").nth(3).click()
    assert shown.locator("#inspector table.terms tbody tr").count() == 4


def test_a_kink_is_marked(opened):
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[3] x) => (float y) { r = Relu(x) y = ReduceSum <keepdims=0> (r) }'
    )
    shown = opened(refgrad.walk(model, {"x": np.array([-1, 0, 2], np.float32)}), "#step=2")
    assert "Relu" in shown.locator("#step .note").inner_text()
    assert shown.locator("#step td.kink").count() >= 1


def test_what_was_said_of_the_recorded_numbers_is_not_said_of_changed_ones(opened):
    model = parsed("(float[3] x) => (float y) { r = Relu(x) y = ReduceSum <keepdims=0> (r) }")
    shown = opened(refgrad.walk(model, {"x": np.array([-1, 0, -2], np.float32)}), "#step=2")
    assert "is 0 in every element" in shown.locator("#notes").inner_text()
    assert "before the change" not in shown.locator("#notes").inner_text()
    assert shown.evaluate("walkPage.change('x', 1, 3)") == ""
    assert shown.locator("#notes p").first.inner_text() == "With the numbers before the change:"
    assert "Kink" not in shown.locator("#step").inner_text()
    assert shown.locator("#step td.kink").count() == 0
    shown.get_by_role("button", name="Undo all").click()
    assert "before the change" not in shown.locator("#notes").inner_text()
    assert shown.locator("#step td.kink").count() >= 1


def difference_at(shown, step, card):
    shown.evaluate(f"walkPage.go({step})")
    shown.locator(".card.out", has_text=card).locator("td[data-row]").first.click()
    return shown.locator("#inspector .difference").inner_text()


@pytest.mark.parametrize("differences", [True, False])
def test_a_difference_is_compared_at_the_size_of_the_gradient(opened, differences):
    """At x = 1e-8, Relu(x) has a kink within the step of the page's difference, and all gradients are tiny."""
    model = parsed(
        "(float[2] x) => (float y) <float[1] w = {1e-8}> { r = Relu(x) p = Mul(r, w) y = ReduceSum <keepdims=0> (p) }"
    )
    shown = opened(refgrad.walk(model, {"x": np.array([1e-8, 2], np.float32)}, wrt=["x"], differences=False))
    assert "is there a kink nearby?" in difference_at(shown, 3, "∂x")
    shown = opened(refgrad.walk(model, {"x": np.array([1, 2], np.float32)}, wrt=["x"], differences=differences))
    assert difference_at(shown, 3, "∂x").endswith("✓")


def test_a_gradient_that_is_0_but_for_rounding_agrees_with_its_difference(opened):
    model = parsed("(float[1, 7] x) => (float y) { s = Softmax(x) y = ReduceSum <keepdims=0> (s) }")
    walk = refgrad.walk(model, seed=3)
    assert 0 < np.abs(walk.values[walk.cotangents["x"].value]).max() < 1e-6
    assert difference_at(opened(walk), 2, "∂x").endswith("✓")


def test_the_body_of_a_loop_is_told(opened):
    shown = opened(walked("loop"), "#step=2")
    shown.keyboard.press("e")
    assert "Loop(" in shown.locator("#emitted .nodes").inner_text()  # waits: the list follows the key
    shown.locator("#emitted details summary").first.click()
    assert "Mul(" in shown.locator("#emitted details").first.inner_text()


def test_a_hostile_name_is_only_text(opened):
    walk = refgrad.walk(hostile())
    shown = opened(walk, title=HOSTILE)
    for k in range(-len(walk.forward) - 1, len(walk.steps) + 2):
        shown.evaluate(f"walkPage.go({k})")
    assert shown.title().startswith(HOSTILE)
    assert shown.locator("h1").inner_text() == HOSTILE
    assert shown.locator("img").count() == 0
    assert shown.locator("script").count() == 2  # the data and the program


# In a browser: values that a node reads twice

TWICE = {  # a node that reads e twice
    "Mul": "s = Mul(e, e)",
    "MatMul": "s = MatMul(e, e)",
    "Add": "s = Add(e, e)",
    "Concat": "s = Concat <axis = 0> (e, e)",
}


@cache
def reading_twice(operator):
    body = f"e = Tanh(x) {TWICE[operator]} q = Exp(s) loss = ReduceSum <keepdims = 0> (q)"
    return refgrad.walk(parsed(f"(float[2, 2] x) => (float loss) {{ {body} }}"), seed=4)


@pytest.mark.parametrize("operator", TWICE)
def test_a_value_that_is_read_twice_is_asked_for_as_a_whole(opened, operator):
    walk = reading_twice(operator)
    asked = questions(walk)[2]
    whole = walk.values[walk.cotangents["e"].value]
    assert (asked.of, asked.is_whole, asked.asked) == ("e", True, f"∂e{list(asked.element)}")
    assert asked.number == pytest.approx(float(whole[asked.element]), rel=1e-5)
    shown = opened(walk, "#step=3", quiz=True)
    assert shown.locator(".guess label").inner_text().startswith(asked.asked)
    assert f"{operator} reads e 2 times: add what each gives." in shown.locator(".guess").inner_text()
    field = shown.locator(".guess input")
    field.fill(f"{asked.number:.5g}")
    field.press("Enter")
    assert shown.locator("#step > .feedback.right").inner_text().startswith("✓ Right")


@pytest.mark.parametrize("operator", TWICE)
def test_the_contributions_of_one_node_are_told_apart(opened, operator):
    walk = reading_twice(operator)
    shown = opened(walk, "#step=3")
    text = shown.locator("#step").inner_text()
    assert shown.get_by_text("By the first input").count() == shown.get_by_text("By the second input").count() == 1
    titles = shown.locator(".card.out h4").all_inner_texts()
    assert titles == ["contribution to ∂e, first input", "contribution to ∂e, second input", "∂e, the sum"]
    assert "One of 2 contributions to ∂e; the other comes from the second input." in text
    assert f"The sum of step 3 ({operator}, first input) + step 3 ({operator}, second input)" in text
    assert "gives ∂e." in text
    size = np.abs(walk.values[walk.cotangents["e"].value]).max()
    shown_size = shown.locator(".picture text.gradient").first.text_content()
    assert number(shown_size.removeprefix("∂e, max ")) == pytest.approx(float(size), rel=0.06)


def test_a_part_of_a_gradient_is_asked_for_as_a_part(opened):
    walk = walked("attention")
    asked = questions(walk)[9]
    assert (asked.of, asked.is_whole, asked.asked) == ("x", False, f"contribution to ∂x{list(asked.element)}")
    shown = opened(walk, "#step=10", quiz=True)
    assert shown.locator(".guess label").inner_text().startswith(f"Contribution to ∂x{list(asked.element)}")


def test_a_difference_stands_where_its_gradient_is_complete(opened):
    model = parsed(
        "(float[2] x) => (float y) <float c = {2}> "
        "{ p = Tanh(x) q = Mul(c, x) r = Add(p, q) y = ReduceSum <keepdims=0> (r) }"
    )
    walk = refgrad.walk(model, wrt=["x"])
    [part] = [step.number for step in walk.steps if step.operator == "Mul"]
    last = walk.cotangents["x"].complete
    shown = opened(walk, f"#step={part}")
    assert shown.locator(".check").inner_text() == f"∂x is complete at step {last}, after its last contribution."
    shown.locator(".check button").click()
    assert shown.locator("#position").inner_text().startswith(f"step {last} of")
    assert "Checked by a finite difference: moving x[" in shown.locator(".check").inner_text()


# In a browser: formulas with numbers


def numbers_of(shown):
    """The line of numbers under the first formula, with names in place of the matrices."""
    parts = shown.locator(".line").first.locator(".numbers .op, .numbers .tile > span").all_inner_texts()
    return " ".join(parts)


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ("Relu(a)", "y = max(0, a )"),
        ("Softmax <axis = 0> (a)", "y = softmax( a )"),
        ("Transpose <perm = [1, 0]> (a)", "y = ( a )ᵀ"),
        ("Tanh(a)", "y = tanh( a )"),
        ("Neg(a)", "y = − a"),
        ("MatMul(a, b)", "y = a · b"),
        ("Gemm <transB = 1> (a, b)", "y = a · bᵀ"),
        ("Gemm <alpha = 0.5, transA = 1> (a, b, b)", "y = 0.5 · aᵀ · b + b"),
        ("Add(a, b)", "y = a + b"),
        ("Flatten(a)", "y from a"),
    ],
)
def test_the_numbers_of_a_forward_formula_are_an_equation_or_named(opened, node, text):
    model = parsed(
        f"(float[2, 2] a, float[2, 2] b) => (float loss) {{ y = {node} k = Mul(y, b) loss = ReduceSum <keepdims=0> (k) }}"
    )
    assert numbers_of(opened(refgrad.walk(model), "#forward=1")) == text


def test_a_softmax_shows_its_sum_with_the_words_of_the_formula(opened):
    walk = walked("attention")
    shown = opened(walk, "#step=6")
    assert numbers_of(shown) == "∂scores = p ⊙ ( ∂p − ∑ ∂p ⊙ p )"
    total = shown.locator(".tile", has_text="∑ ∂p ⊙ p").locator("mn").all_text_contents()
    p, d = (walk.values[name].astype(np.float64) for name in ("p", "p_grad"))
    np.testing.assert_allclose([number(x) for x in total], (p * d).sum(1), rtol=1e-2)  # of three digits
    shown.locator(".card.out td[data-row]").first.click()
    assert "p[0, 0] · (∂p − ∑ ∂p ⊙ p)[0, 0] = " in shown.locator("#inspector").inner_text()
    shown.evaluate("walkPage.go(-6)")
    assert "∑last" in shown.locator(".line .symbols").text_content()
    shown.locator(".card.out td[data-row]").first.click()
    scores = walk.values["scores"].astype(np.float64)[0]
    assert f"÷ {np.exp(scores).sum():.4g}" in shown.locator("#inspector").inner_text()
    assert shown.locator("#inspector table.terms tbody tr").count() == 3


def test_a_click_on_a_number_of_a_formula_shows_its_terms(opened):
    shown = opened(walked("mlp"), "#step=2")
    inspector = shown.locator("#inspector h2")
    shown.locator(".line").first.locator(".tile", has_text="W2ᵀ").locator("mtd").nth(1).click()
    assert inspector.inner_text() == "W2[1, 0]"  # the formula has it transposed
    assert shown.evaluate("document.activeElement.matches('.edit input')")
    shown.locator(".line").first.locator(".tile", has_text="∂a").locator("mtd").nth(6).click()
    assert inspector.inner_text() == "∂a[1, 1]"
    assert shown.locator("#inspector table.terms").count() == 1


def test_a_contribution_is_called_so_where_it_is_inspected(opened):
    shown = opened(walked("attention"), "#step=12")
    shown.locator(".card.out td[data-row]").first.click()
    assert shown.locator("#inspector h2").inner_text() == "contribution to ∂x[0, 0]"
    assert "By step 12: MatMul." in shown.locator("#inspector").inner_text()


def test_what_passes_through_before_a_sum_is_not_said_to_need_no_node(opened):
    shown = opened(walked("mlp"), "#step=4")
    note = shown.locator(".card.out", has_text="∂b1").locator(".more").inner_text()
    assert note.startswith("∂hb passes through unchanged, before it is summed. b1 was repeated")
    assert "no node is written for it" in shown.locator(".card.out").first.inner_text()


def test_a_long_formula_breaks_into_lines_on_a_phone(opened):
    shown = opened(walked("attention"), "#step=6", width=390)
    assert shown.locator(".line").first.evaluate("one => one.scrollWidth <= one.clientWidth")
    assert shown.locator("#notes details").count() == 1
    assert not shown.locator("#notes .note").first.is_visible()
    shown.evaluate("walkPage.go(-100)")
    assert shown.locator("#notes .note").first.is_visible()


def test_what_the_formula_shows_is_folded_among_the_values_needed(opened):
    shown = opened(walked("mlp"), "#step=2")
    assert shown.locator("#read summary").inner_text() == "Values it needs: W2 and a, as in the formula"
    assert not shown.locator("#read .card").first.is_visible()
    shown.evaluate("walkPage.go(3)")
    assert shown.locator("#read").count() == 0
    assert shown.locator(".card", has_text="The result of Relu").count() == 1


def test_rounding_is_no_mean(opened):
    model = parsed("(float[4, 2] x) => (float y) { y = ReduceSum <keepdims=0> (x) }")
    x = np.full((4, 2), 0.1, np.float32) * np.float32([[1, -1]]) + np.float32(1e-8)
    assert 0 < abs(x.mean()) < 1e-7
    shown = opened(refgrad.walk(model, {"x": x}))
    assert shown.locator(".card .meta").first.inner_text().endswith("mean 0")


def test_a_constant_is_said_to_have_no_gradient(opened):
    shown = opened(walked("attention"))
    shown.keyboard.press("End")
    said = "Taken for constants, so they have no gradient here: scale. --wrt scale asks for one."
    assert said in shown.locator("#step").inner_text()


# In a browser: changed numbers


@pytest.mark.parametrize("name", EDITABLE)
def test_everything_follows_a_changed_number(opened, name):
    """What the page computes is what the interpreter computes in float64, of numbers that the walk did not have.

    To 1e-7: the model has 1/12 as a float32, which the interpreter in float64 takes for 1/12.
    """
    walk = walked(name)
    shown = opened(walk)
    assert shown.evaluate("walkPage.whyNot()") == ""
    rng = np.random.default_rng(7)
    feeds = {name: np.array(value) for name, value in walk.feeds.items()}
    changed = {}
    for value in ("x", "X", "W", "W1", "Q", "coefficient", "label"):
        if value not in walk.values:
            continue
        array = changed[value] = np.array(walk.values[value])
        for flat in rng.choice(array.size, min(3, array.size), replace=False):
            array.flat[flat] = new = (1 - array.flat[flat]) if array.dtype.kind == "i" else np.float32(rng.normal() * 2)
            assert shown.evaluate(f"walkPage.change({json.dumps(value)}, {flat}, {float(new)!r})") == ""
    seed = {f"{walk.of}_grad": np.ones((), np.float64)}
    inputs = {one.name for one in walk.gradient.graph.input}
    given = {key: value for key, value in (feeds | changed | seed).items() if key in inputs}
    expected = NumpyBackend().prepare(walk.gradient, precision="float64").run(given)
    compared = 0
    for value, array in expected.items():
        got = shown.evaluate(f"walkPage.value({json.dumps(value)})")
        np.testing.assert_allclose(
            np.reshape(got["data"], got["dims"]), array, rtol=1e-7, atol=1e-9 * max(1e-3, np.abs(array).max())
        )
        compared += 1
    assert compared >= 2
    assert "changed" in shown.locator("#step .note").first.inner_text()
    shown.locator("#step .note").get_by_role("button", name="Undo all").click()
    for value in expected:
        got = shown.evaluate(f"walkPage.value({json.dumps(value)})")
        np.testing.assert_array_equal(np.reshape(got["data"], got["dims"]).astype(np.float32), walk.values[value])


def test_a_changed_number_has_its_differences(opened):
    walk = walked("regression")
    shown = opened(walk, "#step=2")
    before = shown.locator(".check").inner_text()
    assert "it gives the model's numbers" in shown.locator("#step").inner_text()
    assert shown.evaluate("walkPage.change('X', 0, 1.5)") == ""
    after = shown.locator(".check").inner_text()
    assert after != before
    told = re.search(r"by (\S+) times as much; .* is (\S+) \(", after)
    assert number(told[1]) == pytest.approx(number(told[2]), rel=1e-4)
    assert "float64" in shown.locator(".card .meta").first.inner_text()
    assert "the model's numbers" not in shown.locator("#step").inner_text()


def test_a_number_is_changed_by_hand(opened):
    walk = walked("regression")
    shown = opened(walk)
    shown.locator(".card", has_text="coefficient").locator("td[data-row]").first.click()
    field = shown.get_by_label("Change coefficient[0, 0]")
    field.fill("much")
    field.press("Enter")
    assert "Write a number" in shown.locator(".edit [role=status]").inner_text()
    field.fill("2.5")
    field.press("Enter")
    assert shown.locator("#inspector .value").inner_text() == "2.5"
    before = dict(walk.values)
    w = before["coefficient"].astype(np.float64).copy()
    w[0, 0] = 2.5
    error = before["X"] @ w + before["intercepts"] - before["label"]
    shown.keyboard.press("Escape")
    shown.locator("h1").click()
    shown.keyboard.press("End")
    cells = shown.locator(".card", has_text="∂coefficient").locator("td[data-row]").all_inner_texts()
    np.testing.assert_allclose([number(x) for x in cells], (before["X"].T @ (2 * error)).ravel(), rtol=1e-3)


def test_a_click_on_a_number_puts_the_cursor_into_it(opened):
    """Nothing moves, and the arrows step again once the number is set."""
    shown = opened(walked("mlp"), height=500)
    cell = shown.locator(".card", has_text="W2").locator("td[data-row='1'][data-column='1']")
    cell.scroll_into_view_if_needed()
    before = cell.bounding_box()
    cell.click()
    assert cell.bounding_box() == before
    assert shown.evaluate("document.activeElement.matches('.edit input')")
    assert shown.locator(".edit input").input_value() == "-2.44"  # in float32
    shown.keyboard.type("0.5")  # the old number is selected, and replaced
    shown.keyboard.press("Enter")
    assert cell.inner_text() == "0.5"
    shown.keyboard.press("ArrowRight")
    assert shown.locator("#position").inner_text() == "forward 1 of 5"
    shown.evaluate("walkPage.go(5)")
    shown.locator(".card.out td[data-row]").first.click()  # a gradient follows, and cannot be set
    shown.keyboard.press("ArrowLeft")
    assert shown.locator("#position").inner_text() == "step 4 of 5"


def test_who_comes_by_the_keyboard_stays_in_the_tensor(opened):
    shown = opened(walked("regression"))
    shown.locator(".card", has_text="coefficient").locator("td[data-row]").first.focus()
    shown.keyboard.press("Enter")
    shown.keyboard.type("2.5")
    shown.keyboard.press("Enter")
    assert shown.evaluate("document.activeElement.getAttribute('aria-label')") == "[0, 0] 2.5"
    shown.keyboard.press("ArrowDown")
    assert shown.evaluate("document.activeElement.getAttribute('aria-label')").startswith("[1, 0]")


def test_a_label_that_there_is_not_is_refused(opened):
    shown = opened(walked("mlp"))
    assert "not one of 2 classes" in shown.evaluate("walkPage.change('label', 0, 7)")
    shown.evaluate("walkPage.go(1)")
    assert shown.locator("#step .note").count() == 0


@pytest.mark.parametrize("operator", ["Gather", "GatherElements"])
def test_an_index_that_there_is_not_is_refused_by_its_own_number(opened, operator):
    model = parsed(f"(float[3] x, int64[2] i) => (float y) {{ p = {operator}(x, i) y = ReduceSum <keepdims=0> (p) }}")
    shown = opened(refgrad.walk(model, {"x": np.ones(3, np.float32), "i": np.array([0, -3])}))
    assert "the index -4 is not one of 3" in shown.evaluate("walkPage.change('i', 0, -4)")
    assert "the index 3 is not one of 3" in shown.evaluate("walkPage.change('i', 0, 3)")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1,000", "Write a number such as 0.25."),
        ("0x10", "Write a number such as 0.25."),
        ("1e39", "float32 ends at 3.40e+38: write a smaller number."),
        ("", "Write a number such as 0.25."),
    ],
)
def test_a_number_that_may_mean_another_is_refused(opened, text, said):
    shown = opened(walked("regression"))
    shown.locator(".card", has_text="coefficient").locator("td[data-row]").first.click()
    field = shown.get_by_label("Change coefficient[0, 0]")
    field.fill(text)
    field.press("Enter")
    assert shown.locator(".edit [role=status]").inner_text() == said
    field.fill("−0,125")
    field.press("Enter")
    assert number(shown.locator("#inspector .value").inner_text()) == -0.125


def test_numbers_that_the_page_cannot_reproduce_are_not_offered(opened):
    """A wrong number in the walk: the page notices that it computes another one."""
    walk = refgrad.walk(mlp())
    walk.values["a_grad"] = walk.values["a_grad"] * np.float32(1.01)
    shown = opened(walk)
    assert "computes other numbers than were recorded" in shown.evaluate("walkPage.whyNot()")
    assert "Numbers cannot be changed" in shown.locator("#why-not").inner_text()


@pytest.mark.parametrize("name", ["lstm", "loop"])
def test_what_cannot_be_computed_says_so(opened, name):
    shown = opened(walked(name))
    assert "this page cannot compute" in shown.locator("#why-not").inner_text()


def test_a_long_model_says_so(opened):
    shown = opened(refgrad.walk(long(60), differences=False))
    assert "models of up to 50 nodes" in shown.locator("#why-not").inner_text()


def scalar(model, feeds):
    """A model of one number: the outputs of `model` in float32, times random numbers, summed."""
    found = get_backend("numpy").prepare(model).run(feeds)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    rng, parts = np.random.default_rng(0), []
    for name, value in found.items():
        if isinstance(value, np.ndarray) and value.dtype == np.float32:
            weight = numpy_helper.from_array(rng.normal(size=value.shape).astype(np.float32), f"{name}_weight")
            made.graph.initializer.append(weight)
            made.graph.node.append(helper.make_node("Mul", [name, weight.name], [f"{name}_times"]))
            made.graph.node.append(helper.make_node("ReduceSum", [f"{name}_times"], [f"{name}_sum"], keepdims=0))
            parts.append(f"{name}_sum")
    made.graph.node.append(helper.make_node("Sum", parts, ["total"]))
    del made.graph.output[:]
    made.graph.output.append(helper.make_tensor_value_info("total", onnx.TensorProto.FLOAT, []))
    return made if parts else None


COMPUTED = re.findall(
    r"\w+",
    """
    Abs Acos Acosh Add Asin Asinh Atan Atanh AveragePool BatchNormalization Cast CastLike Celu Clip Concat Conv
    ConvTranspose Cos Cosh CumSum Div Dropout Einsum Elu Erf Exp Flatten Gather GatherElements GatherND Gelu Gemm
    GlobalAveragePool GlobalMaxPool HardSigmoid HardSwish Identity LayerNormalization LeakyRelu Log LogSoftmax
    MatMul Max MaxPool Mean Min Mish Mod Mul Neg NegativeLogLikelihoodLoss PRelu Pad Pow Reciprocal ReduceL1
    ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu
    Reshape ScatterElements Selu Shrink Sigmoid Sin Sinh Slice Softmax SoftmaxCrossEntropyLoss Softplus Softsign
    Split Sqrt Squeeze Sub Sum Swish Tan Tanh ThresholdedRelu Tile Transpose Trilu Unsqueeze Where
    """,
)


@pytest.mark.parametrize("operator", COMPUTED)
def test_the_page_computes_what_the_interpreter_does(opened, operator):
    """Of the operator's first case: the page checks each node of the gradient model against the recorded values."""
    of_operator = (one for one in every_case() if one.operator == operator and "-at-" not in one.name)
    case, model = next((one, made) for one in of_operator if (made := scalar(one.model, one.feeds)) is not None)
    shown = opened(refgrad.walk(model, case.feeds, differences=False))
    assert shown.evaluate("walkPage.whyNot()") == ""
    for k in range(shown.evaluate("walkPage.document().steps.length") + 2):
        shown.evaluate(f"walkPage.go({k})")


# In a browser: the quiz


def guessed(shown, text):
    """What the page says of a guess."""
    field = shown.locator(".guess input")
    field.fill(text)
    field.press("Enter")
    return shown.locator(".guess .feedback").inner_text()


def test_the_quiz_hides_until_it_is_guessed(opened):
    walk = walked("mlp")
    shown = opened(walk, "#step=1", quiz=True)
    answer = questions(walk)[0]
    step = shown.locator("#step")
    assert step.locator(".card.out").count() == 0
    assert shown.locator("#step .line .tile").count() == 0
    says, field = partial(guessed, shown), shown.locator(".guess input")

    asked = shown.locator(".guess p").first.inner_text()
    assert asked == f"Guess first. What is ∂s{list(answer.element)}? Two per cent off is close enough."
    assert says("?") == "Write a number such as 0.25."
    assert says(str(-answer.number)) == "The size is right, the sign is not."
    assert says(str(answer.number * 2)) == "Off by a factor of 2: too large."
    assert says(str(answer.number / 10)) == "Off by a factor of 10: too small."
    assert "Too large" in says("55")
    others = [x for x in walk.values["s_grad"].ravel() if not 0.9 < abs(x / answer.number) < 1.1]
    assert "That is the element" in says(str(others[0]))
    field.fill(f"{answer.number * 1.005:.5f}")
    field.press("Enter")
    assert shown.locator("#step > .feedback.right").inner_text().startswith("✓ Right")
    assert step.locator(".card.out").count() == 1
    shown.keyboard.press("Escape")
    shown.locator("h1").click()
    shown.keyboard.press("ArrowRight")  # the second question is about a shape
    assert "Turned around" in says("5, 4")
    assert "A gradient has the shape of its value." in says("4")
    assert "a size is not" in says("4, 6")
    for text in ("", "abc", "1e999", "-1", "4.5"):
        assert says(text) == "Write a shape such as [4, 3]."
    assert "a size is not" in says("[4, 6]")
    field.fill("4 x 5")
    field.press("Enter")
    assert step.locator(".card.out").count() == 2


def test_the_quiz_leads_to_its_first_question_and_counts(opened):
    walk = walked("mlp")
    shown = opened(walk, quiz=True)
    assert "Quiz: 5 questions on the way back" in shown.locator("#step").inner_text()
    shown.get_by_role("button", name="To the first question").click()
    assert shown.locator("#position").inner_text().startswith("step 1 of")
    field = shown.locator(".guess input")
    field.fill(str(questions(walk)[0].number))
    field.press("Enter")
    shown.evaluate("walkPage.go(2)")
    shown.get_by_role("button", name="Show the answer").click()
    shown.keyboard.press("End")
    assert shown.locator(".score").inner_text() == "Quiz: 1 of 5 answered, 3 open: step 3, step 4 and step 5."
    shown.reload()
    shown.wait_for_selector("html[data-editable]")
    assert shown.locator(".score").inner_text().startswith("Quiz: 1 of 5 answered, 3 open")
    shown = opened(walked("mlp", 1), "#step=6", quiz=True)
    assert shown.locator(".score").inner_text().startswith("Quiz: 0 of 5 answered, 5 open")


def test_a_guess_is_judged_at_the_size_of_the_answer(opened):
    model = parsed("(float[1, 2] x) => (float[1, 1] y) <float[2, 1] w = {1e-9, 5e-9}> { y = MatMul(x, w) }")
    shown = opened(refgrad.walk(model, {"x": np.ones((1, 2), np.float32)}, wrt=["x"]), "#step=1", quiz=True)
    says, field = partial(guessed, shown), shown.locator(".guess input")

    assert says("0") == "Too small in size."
    assert says("1e-7") == "Too large in size."
    assert says("-5e-9") == "The size is right, the sign is not."
    assert says("1e-9").startswith("That is the element [0, 0]")
    field.fill("5e-9")
    field.press("Enter")
    assert shown.locator("#step > .feedback.right").inner_text().startswith("✓ Right")


def test_a_guess_stays_while_it_is_typed(opened):
    shown = opened(walked("mlp"), "#step=1", quiz=True)
    shown.clock.install()
    shown.get_by_role("button", name="Play").click()
    field = shown.locator(".guess input")
    field.fill("0.5")
    shown.clock.run_for(5000)
    assert shown.locator("#position").inner_text().startswith("step 1 of")
    shown.locator("#theme").click()
    assert shown.locator("html").get_attribute("data-theme") == "dark"
    assert field.input_value() == "0.5"


def test_the_quiz_gives_nothing_away(opened):
    """Neither the cards of later steps, nor the gradients at the end, nor the element that is inspected."""
    walk = walked("mlp")
    shown = opened(walk, "#step=2", quiz=True)
    assert shown.locator(".card", has_text="∂s").locator(".masked").count() == 1
    shown.evaluate(f"walkPage.go({len(walk.steps) + 1})")
    assert shown.locator(".card .masked").count() == len(walk.wrt)
    shown.evaluate("walkPage.go(1)")
    assert shown.locator("#emitted .masked").count() == 0
    shown.keyboard.press("e")
    shown.locator("#emitted .masked").wait_for()
    shown.get_by_role("button", name="Show the answer").click()
    assert shown.locator(".card.out").count() == 1
    shown.keyboard.press("q")
    shown.evaluate("walkPage.go(2)")
    assert shown.locator(".masked").count() == 0


# In a browser: finding one's way


def test_the_search(opened):
    shown = opened(walked("attention"))
    shown.keyboard.press("/")
    shown.keyboard.type("softMAX")
    assert shown.locator("#list li.hit").count() == 1
    assert shown.locator("#found").inner_text() == "1 step: Enter goes to the next"
    shown.keyboard.press("Enter")
    assert shown.locator("#step h2").inner_text().partition(": ")[2].startswith("Softmax")
    shown.locator("#search").fill("nothing like it")
    assert shown.locator("#found").inner_text() == "nothing is called so"
    shown.locator("#search").fill("MatMul")
    places = []
    for _ in range(5):
        shown.keyboard.press("Enter")
        places.append(shown.locator("#position").inner_text())
    assert len(set(places)) == 5


def test_keyboard_only(opened):
    walk = walked("mlp")
    shown = opened(walk)
    steps = len(walk.steps)
    for key, expected in (
        ("End", "end"),
        ("ArrowLeft", f"step {steps} of {steps}"),
        ("Home", "start"),
        ("ArrowRight", f"forward 1 of {steps}"),
        ("b", "output"),
        ("ArrowLeft", f"forward {steps} of {steps}"),
        ("ArrowRight", "output"),
        ("ArrowRight", f"step 1 of {steps}"),
    ):
        shown.keyboard.press(key)
        assert shown.locator("#position").inner_text() == expected
    shown.keyboard.press("?")
    assert shown.locator("#keys").is_visible()
    assert "Short for ∂loss/∂v." in shown.locator("#keys").inner_text()
    assert "orange is positive, blue negative" in shown.locator("#keys").inner_text()
    shown.keyboard.press("Escape")
    assert not shown.locator("#keys").is_visible()
    shown.keyboard.press("d")
    assert shown.locator("html").get_attribute("data-theme") == "dark"
    for _ in range(60):
        shown.keyboard.press("Tab")
        if shown.evaluate("document.activeElement.closest('.card.out') && document.activeElement.matches('td')"):
            break
    assert shown.evaluate("document.activeElement.getAttribute('aria-label')").startswith("[0, 0]")
    shown.keyboard.press("ArrowRight")
    shown.keyboard.press("ArrowDown")
    assert shown.evaluate("document.activeElement.getAttribute('aria-label')").startswith("[1, 1]")
    shown.keyboard.press("Enter")
    assert shown.locator("#inspector h2").inner_text() == "∂s[1, 1]"
    shown.keyboard.press("ArrowLeft")
    shown.keyboard.press("Enter")
    assert shown.locator("#inspector h2").inner_text() == "∂s[1, 0]"
    assert shown.locator("#position").inner_text() == f"step 1 of {steps}"  # the arrows moved in the tensor
    shown.keyboard.press("Escape")
    assert not shown.locator("#inspector").is_visible()
    assert shown.evaluate("document.activeElement.getAttribute('aria-label')").startswith("[1, 0]")


def test_a_hash_without_a_step_keeps_the_position(opened):
    shown = opened(walked("mlp"), "#step=3")
    shown.locator(".skip").focus()
    shown.keyboard.press("Enter")
    assert shown.evaluate("document.activeElement.id") == "step"
    assert shown.locator("#position").inner_text().startswith("step 3 of")
    shown.evaluate("location.hash = '#elsewhere'")
    shown.wait_for_function("location.hash === '#elsewhere'")
    shown.evaluate("() => new Promise(done => setTimeout(done, 50))")
    assert shown.locator("#position").inner_text().startswith("step 3 of")


def test_it_plays(opened):
    shown = opened(walked("regression"))
    shown.clock.install()
    shown.locator("h1").click()
    shown.keyboard.press(" ")
    shown.clock.run_for(3500)
    assert shown.locator("#position").inner_text().startswith("forward 2 of")
    shown.keyboard.press(" ")
    shown.clock.run_for(5000)
    assert shown.locator("#position").inner_text().startswith("forward 2 of")
    shown.get_by_role("button", name="Play").click()
    shown.clock.run_for(60000)
    assert shown.locator("#position").inner_text() == "end"


def test_the_slider_and_the_map(opened):
    walk = walked("mlp")
    shown = opened(walk)
    shown.locator("#list button", has_text="Relu").click()
    assert shown.locator("#step h2").inner_text().startswith("Forward 3 of 5: Relu")
    shown.locator("#slider").fill("3")
    assert shown.locator("#position").inner_text() == f"step 3 of {len(walk.steps)}"
    shown.locator("#list button", has_text="MatMul").click()
    assert shown.locator("#step h2").inner_text().partition(": ")[2].startswith("MatMul")
    assert shown.url.endswith(f"#step={len(walk.steps)}")


def test_repeated_blocks_are_folded(opened):
    walk = refgrad.walk(long(400), differences=False)
    shown = opened(walk)
    fold = shown.locator("#list li.fold button").first
    assert re.fullmatch(r"▸ block \d+ of \d+: \d+ nodes", fold.inner_text())
    few = shown.locator("#list li").count()
    assert few < 60
    shown.evaluate("walkPage.go(200)")
    assert shown.locator("#list li.now").count() == 1  # the block of the step is the one in sight
    fold.click()
    assert shown.locator("#list li").count() > 390
    shown.locator("#list li.fold button").first.press("Enter")
    assert shown.locator("#list li").count() == few


# For everybody


@pytest.mark.matrix
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", MODELS)
def test_rules_of_accessibility(opened, name, scheme):
    if not AXE.is_file():
        pytest.skip("axe-core is not installed")
    walk = walked(name)
    shown = opened(walk, scheme=scheme)
    assert shown.locator("html").get_attribute("data-theme") == scheme
    shown.evaluate(AXE.read_text(encoding="utf-8"))
    for k in (-len(walk.forward) - 1, -1, *range(len(walk.steps) + 2)):
        shown.evaluate(f"walkPage.go({k})")
        if k == 1:
            shown.keyboard.press("e")
            shown.locator("#step td[data-row]").last.click()
        assert violations(shown, "document" if k <= 1 else "'#step'") == [], k
    shown.keyboard.press("Escape")
    shown.evaluate("walkPage.go(1)")
    shown.keyboard.press("q")
    assert violations(shown) == []
    shown.keyboard.press("?")
    assert violations(shown) == []


def violations(shown, part="document"):
    found = shown.evaluate(f"axe.run({part})")["violations"]
    return [(one["id"], one["nodes"][0]["html"][:200]) for one in found]


@pytest.mark.parametrize("name", MODELS)
def test_it_fits_a_phone(opened, name):
    walk = walked(name)
    shown = opened(walk, width=375)
    for k in range(-len(walk.forward) - 1, len(walk.steps) + 2):
        shown.evaluate(f"walkPage.go({k})")
        assert shown.evaluate("document.documentElement.scrollWidth") <= 375, k
    assert shown.locator("#controls").bounding_box()["height"] < 60  # what stays in sight while the page scrolls
    shown.evaluate("walkPage.go(1)")
    shown.locator("#step td[data-row]").last.click()
    assert shown.locator("#inspector").is_visible()
    assert shown.evaluate("document.documentElement.scrollWidth") <= 375


def test_a_wide_tensor_is_turned_by_buttons(opened):
    shown = opened(walked("convolution"), "#forward=1", width=375)
    card = shown.locator("#step .card").first
    assert "columns 0 to 3 of 6" in card.inner_text()
    card.get_by_role("button", name="Next columns").press("Enter")
    assert "columns 2 to 5 of 6" in card.inner_text()
    assert card.locator("thead th").all_inner_texts() == ["2", "3", "4", "5"]
    assert shown.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Next columns")


@pytest.mark.parametrize(("width", "height"), [(375, 667), (1000, 700)])
def test_the_inspector_does_not_cover_what_it_is_about(opened, width, height):
    walk = walked("mlp")
    shown = opened(walk, f"#step={len(walk.steps)}", width=width, height=height)
    cells = shown.locator("#step td[data-row]:visible")
    for k in (0, cells.count() // 2, cells.count() - 1):
        cells.nth(k).click()
        cell, sheet = (shown.locator(one).first.bounding_box() for one in ("#step td.chosen", "#inspector"))
        below, beside = cell["y"] + cell["height"] <= sheet["y"], cell["x"] >= sheet["x"] + sheet["width"]
        assert below or beside
        assert cell["y"] >= 0
        shown.locator("#inspector .close").click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_printed(opened, scheme):
    shown = opened(walked("mlp"), "#step=1", scheme=scheme)
    shown.emulate_media(media="print")
    text, card = (
        shown.locator("#step .card").first.evaluate(f"one => getComputedStyle(one).{one}")
        for one in ("color", "backgroundColor")
    )
    assert (text, card) == ("rgb(35, 37, 42)", "rgb(255, 255, 255)")
    assert not shown.locator("#controls").is_visible()
    assert not shown.locator("#map").is_visible()
    assert shown.locator("#step .card").first.is_visible()


def test_a_page_that_cannot_be_read_says_so(browser, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page(walked("regression")), encoding="utf-8")
    shown = browser.new_page()
    shown.add_init_script("delete window.DecompressionStream")
    shown.goto(file.as_uri())
    shown.get_by_text("This page cannot be read here").wait_for()
    shown.close()


# Large models


def test_two_thousand_nodes_are_shown(opened):
    shown = opened(refgrad.walk(long(2000), differences=False), "#step=1000")
    assert shown.locator("#position").inner_text()


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "of"), [("resnet18", "output[0, 0]"), ("bert", "output[0, 0, 0]"), ("lstm", "output[0, 0]")]
)
def test_exported_models(opened, name, of):
    if not Path(EXPORTS, f"{name}.onnx").is_file() or not EXPORTS:
        pytest.skip("REFGRAD_TORCH_MODELS does not name a folder with exports")
    model = onnx.load(Path(EXPORTS, f"{name}.onnx"))
    saved = np.load(Path(EXPORTS, f"{name}.npz"))
    feeds = {one.name: saved[f"feed/{one.name}"] for one in model.graph.input if f"feed/{one.name}" in saved}
    walk = refgrad.walk(model, feeds, of=of, differences=False)
    assert len(page(walk)) < 5_000_000
    shown = opened(walk, "#step=1")
    for k in range(len(walk.steps) + 2):
        shown.evaluate(f"walkPage.go({k})")
        assert shown.locator("#step h2").count() == 1
    shown.evaluate("walkPage.go(1)")
    shown.locator("#step td[data-row]").last.click()
    assert shown.locator("#inspector h2").is_visible()
