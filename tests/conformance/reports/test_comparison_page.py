"""The pages of a comparison and of a check in a browser: they fit, are accessible, and need no network and no script."""

import os
import shutil
from pathlib import Path

import pytest
from planting import Planted, builder_with, network, scaled
from reporting import LOW_CONTRAST

from refgrad.conformance import check, compare
from refgrad.conformance.judge.found import Check, Row
from refgrad.conformance.locating.sides import Live
from refgrad.conformance.reports import check_page
from refgrad.conformance.reports.advice import ModelCommand
from refgrad.conformance.reports.comparison_page import page
from refgrad.conformance.verdicts import VERDICTS

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("REFGRAD_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
AXE = Path(os.environ.get("REFGRAD_NODE_MODULES", ".")) / "axe-core" / "axe.min.js"
pytestmark = [pytest.mark.browser, pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")]


def compared_with(side):
    """The page of a comparison with this side."""
    model, feeds = network()
    return page(compare(model, "refgrad@numpy", side, feeds))


def checked():
    """The page of a check of the network."""
    return check_page.page(check(network()[0], backends=["numpy"]), ModelCommand("network.onnx"))


def every_verdict():
    """The page of a check with every verdict, and long names."""
    long = "module.layers.0.attention.projection.weight" * 4
    rows = [Row(long, "onnx", "ort-cpu", "float64", one, 1.0, 1.0, 1e-6, f"{long}: {one}") for one in VERDICTS]
    return check_page.page(Check((long,), (long,), 0, "given", tuple(rows)), ModelCommand(f"{long}.onnx"))


PAGES = {
    "kernel": lambda: compared_with(Live("refgrad", Planted("Tanh_1", lambda y: 1.01 * y))),
    "rule": lambda: compared_with(Live(builder_with(scaled("Tanh_1", 1.5)), "numpy")),
    "sound": lambda: compared_with("refgrad@numpy"),
    "check": checked,
    "every verdict": every_verdict,
}


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module", params=PAGES)
def address(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(PAGES[request.param](), encoding="utf-8")
    return file.as_uri()


@pytest.fixture(params=[True, False], ids=["scripts", "no scripts"])
def shown(request, browser, address):
    """The page as it is opened; whatever it says on the console, or asks of a network, fails the test."""
    context = browser.new_context(viewport={"width": 375, "height": 700}, java_script_enabled=request.param)
    opened = context.new_page()
    said = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda asked: asked.url == address or said.append(asked.url))
    opened.goto(address)
    yield opened
    context.close()
    assert not said


def test_it_is_read_without_scripts(shown, address):
    assert shown.locator("h1").inner_text().startswith(("The two ", "Is the gradient of "))
    assert shown.locator("p.verdict").is_visible()
    assert shown.locator("script").count() == 0
    if "differ" in shown.locator("h1").inner_text():
        assert shown.locator("svg g.m").first.is_visible()  # the node at fault
        assert shown.locator("details table").first.is_visible()
        assert shown.locator(".maps svg").first.is_visible()


def test_it_fits_a_phone(shown):
    if shown.evaluate("typeof window") == "object":
        assert shown.evaluate("document.documentElement.scrollWidth") <= 375


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(browser, address, scheme):
    context = browser.new_context(color_scheme=scheme)
    opened = context.new_page()
    opened.goto(address)
    low = opened.evaluate(LOW_CONTRAST)
    context.close()
    assert low == []


def test_rules_of_accessibility(browser, address):
    if not AXE.is_file():
        pytest.skip("axe-core is not installed")
    context = browser.new_context()
    opened = context.new_page()
    opened.goto(address)
    opened.evaluate(AXE.read_text(encoding="utf-8"))
    opened.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    found = opened.evaluate("axe.run()")["violations"]
    context.close()
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []
