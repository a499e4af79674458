"""What a notebook shows of results: tables that are well-formed, escaped, of no fixed background, and load nothing."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, helper

import refgrad
from refgrad.conformance import check, compare
from refgrad.markup import html_table
from refgrad.training import Adam, step_model

HOSTILE = '<script>alert("1")</script>&\x1b[31m'


class _Page(HTMLParser):
    """The tags in order, whether they close, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.styles: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert {name for name, _ in attrs} <= {"style"}
        self.styles += [value or "" for _, value in attrs]
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def _shown(thing: object) -> _Page:
    page = _Page(thing._repr_html_())  # type: ignore[attr-defined]
    assert set(page.tags) <= {"div", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    assert not any("url(" in style or "http" in style for style in page.styles)
    backgrounds = {part for style in page.styles for part in style.split(";") if part.startswith("background")}
    assert backgrounds <= {"background:transparent"}
    return page


def _model(name: str = "x") -> ModelProto:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2, 3] x) => (float[2, 2] y) '
        "<float[3, 2] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}>"
        "{ m = MatMul(x, w)  y = Tanh(m) }"
    )
    model.graph.input[0].name = model.graph.node[0].input[0] = name
    return model


def test_a_preflight() -> None:
    page = _shown(refgrad.preflight(_model()))
    assert page.texts[0] == "y by x, w: has a gradient"
    assert {"operator", "MatMul", "Tanh", "rule"} <= set(page.texts)
    refused = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float[N] y) '
        "{ s = Cast <to = 8> (x)  y = Cast <to = 1> (s) }"
    )
    page = _shown(refgrad.preflight(refused))
    assert "has no gradient" in page.texts[0]
    assert "refused: no derivative" in page.texts
    flat = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float[N] y) { y = Floor(x) }'
    )
    assert any("is always 0" in text for text in _shown(refgrad.preflight(flat)).texts)


def test_weights() -> None:
    page = _shown(refgrad.weights(_model()))
    assert page.texts[0] == "Initializers: 1, trainable: 1"
    assert {"w", "parameter", "float[3, 2]"} <= {text.replace("float32", "float") for text in page.texts}


def test_a_step() -> None:
    page = _shown(step_model(_model(), optimizer=Adam()))
    assert page.texts[0] == "A step of training, weights: 1, of 6 numbers"
    assert {"x", "data", "label", "the expected values", "learning_rate", "every step"} <= set(page.texts)
    assert any(text.startswith("state; next: ") for text in page.texts)


def test_a_check_and_a_comparison() -> None:
    page = _shown(check(_model(), backends=["numpy"]))
    assert page.texts[0].startswith("The gradient of y by x, w is right: 2 gradients on 1 executor, largest error ")
    assert {"dialect", "numpy", "right"} <= set(page.texts)
    x = np.ones((2, 3), np.float32)
    page = _shown(compare(_model(), "refgrad@numpy", {"x_grad": np.zeros((2, 3), np.float32)}, {"x": x}, search=False))
    assert page.texts[0].endswith("DIFFERENT")
    assert "b is wrong" in page.texts
    assert any("#e5534b" in style for style in page.styles)


def test_names_are_text() -> None:
    page = _shown(refgrad.preflight(_model(HOSTILE)))
    assert "script" not in page.tags
    assert '<script>alert("1")</script>&\ufffd[31m' in "".join(page.texts)
    assert "\x1b" not in refgrad.preflight(_model(HOSTILE))._repr_html_()


def test_long_tables_say_how_many_rows_are_left_out() -> None:
    page = _Page(html_table([{"row": k, "value": k / 7} for k in range(100)], "many", ["a note"], most=10))
    assert page.tags.count("tr") == 11
    assert page.texts[-2:] == ["and 90 more", "a note"]
    assert _Page(html_table([], "none")).texts == ["none"]


@pytest.mark.parametrize(("value", "shown"), [(None, "-"), (True, "yes"), (1 / 3, "0.333"), (7, "7"), ("a", "a")])
def test_cells(value: object, shown: str) -> None:
    assert _Page(html_table([{"key": value}], "title")).texts == ["title", "key", shown]


def test_a_model_stays_a_model() -> None:
    assert type(refgrad.gradient(_model())) is ModelProto
    assert not hasattr(helper.make_model(_model().graph), "_repr_html_")
