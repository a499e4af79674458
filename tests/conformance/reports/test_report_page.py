"""The page of conformance results in a browser: what it shows is what the rows say, and it can be walked through."""

import os
import shlex
import shutil
from collections import Counter
from urllib.parse import urlencode

import numpy as np
import pytest
from onnx.printer import to_text
from reporting import HOSTILE, LOW_CONTRAST, MODEL, PAIRS, RESULTS, made

from refgrad.conformance.case import Case
from refgrad.conformance.reports import groups, write
from refgrad.conformance.reports.tally import MARKS
from refgrad.conformance.verdicts import REFUSED, RIGHT, WRONG
from refgrad.escaping import printable, shell_line

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("REFGRAD_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")]

VERDICT_OF_MARK = {mark: verdict for verdict, mark in MARKS.items()}


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "board.html"
    feeds = {"x": np.array([1.5, -2], np.float32)}
    write(RESULTS, file, [Case(name, MODEL, feeds) for name in RESULTS.cases if name != "Op1-1"])
    return file.as_uri()


@pytest.fixture(params=["light"])
def opened(request, browser, address):
    """Open the page at a fragment; whatever it says on the console, or asks of a network, fails the test."""
    context = browser.new_context(color_scheme=request.param, viewport={"width": 1300, "height": 900})
    page = context.new_page()
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda asked: asked.url.startswith(address) or said.append(asked.url))

    def open_at(**state):
        page.goto(f"{address}#{urlencode(state)}")
        page.wait_for_function("document.documentElement.dataset.ready === location.hash")
        return page

    yield open_at
    context.close()
    assert not said


def rows_of(**wanted):
    """The rows with these values of their own or of their case."""
    return [row for row in RESULTS.rows if all(value_of(row, key) == value for key, value in wanted.items())]


def value_of(row, key):
    return getattr(row, key) if hasattr(row, key) else str(getattr(RESULTS.cases[row.case], key))


def texts(page, selector):
    """The text of every cell, row by row."""
    return page.evaluate(
        "rows => [...document.querySelectorAll(rows)].map(row => [...row.cells].map(cell => cell.innerText))", selector
    )


def counts_in_the_totals(page):
    """What the first table says, by builder, executor and verdict."""
    head, *rows = texts(page, "#totals tr")
    return Counter(
        {
            (builder, executor, verdict): int(number)
            for builder, executor, _, *numbers in rows
            for verdict, number in zip(head[3:], numbers, strict=True)
            if number
        }
    )


def counts_in_the_board(page):
    """What the second table says, added up by builder, executor and verdict, and by operator and opset."""
    spans = page.evaluate(
        "[...document.querySelectorAll('.board th[scope=colgroup]')].map(one => [one.innerText, one.colSpan])"
    )
    (executors,) = texts(page, ".board thead tr:nth-child(2)")
    pairs = list(zip([builder for builder, span in spans for _ in range(span)], executors, strict=True))
    by_pair, by_operator, operator = Counter(), Counter(), None
    for row in texts(page, ".board tbody tr"):
        if len(row) == len(pairs) + 2:  # else the operator is that of the row above
            operator = row.pop(0)
        opset, *cells = row
        for pair, cell in zip(pairs, cells, strict=True):
            words = cell.split()
            for mark, number in zip(words[::2], words[1::2], strict=True):
                by_pair[(*pair, VERDICT_OF_MARK[mark])] += int(number)
                by_operator[operator, opset] += int(number)
    return by_pair, by_operator


FILTERS = [
    {},
    {"builder": "onnx-ad"},
    {"executor": "numpy"},
    {"verdict": WRONG},
    {"opset": "14"},
    {"dtype": "float16"},
    {"values": "kink"},
    {"builder": "refgrad", "executor": "ort-cpu", "verdict": WRONG, "opset": "14"},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_counts_are_those_of_the_rows(opened, filters):
    page = opened(**filters)
    rows = rows_of(**filters)
    expected = Counter((row.builder, row.executor, row.verdict) for row in rows)
    assert counts_in_the_totals(page) == expected
    by_pair, by_operator = counts_in_the_board(page)
    assert by_pair == expected
    assert by_operator == Counter((value_of(row, "operator"), value_of(row, "opset")) for row in rows)
    assert page.locator("#count").inner_text() == f"{len(rows)} verdicts"


@pytest.mark.parametrize("filters", [one for one in FILTERS if len(one) == 1], ids=str)
def test_a_filter_that_is_chosen_counts_as_in_the_address(opened, filters):
    page = opened()
    ((name, value),) = filters.items()
    page.select_option(f"select[name={name}]", value)
    page.wait_for_url(f"**#{name}=*")
    rows = rows_of(**filters)
    assert counts_in_the_totals(page) == Counter((row.builder, row.executor, row.verdict) for row in rows)
    page.go_back()
    sync_api.expect(page.locator("#count")).to_have_text(f"{len(RESULTS.rows)} verdicts")
    assert page.locator(f"select[name={name}]").input_value() == ""


def test_the_result_comes_first(opened):
    page = opened()
    verdict, told = groups.sentence(RESULTS, groups.faults(RESULTS))
    assert verdict == WRONG
    assert page.locator("p.verdict.fault").inner_text() == told
    assert page.locator("h2").all_inner_texts() == ["What is wrong, and where", "In all", "By operator"]
    page = opened(view="cases")
    assert not page.locator("p.verdict").is_visible()


def test_the_faults_come_before_the_filters_on_a_phone(opened):
    page = opened(view="cases")
    page.set_viewport_size({"width": 375, "height": 700})
    page.reload()
    assert not page.locator("#filters").is_visible()
    page.get_by_text("Filters", exact=True).click()
    assert page.locator("#filters").is_visible()


def test_the_search_is_by_part_of_the_name(opened):
    page = opened()
    page.get_by_role("searchbox", name="Operator").fill("oP3")
    assert set(page.locator(".board tbody th").all_inner_texts()) == {"Op3"}
    assert page.locator("#count").inner_text() == f"{len(rows_of(operator='Op3'))} verdicts"
    page.get_by_role("searchbox", name="Operator").fill("none of them")
    assert page.get_by_text("Nothing fits these filters.").is_visible()
    page.get_by_role("button", name="Clear").click()
    sync_api.expect(page.locator("#count")).to_have_text(f"{len(RESULTS.rows)} verdicts")
    assert page.get_by_role("searchbox", name="Operator").input_value() == ""


def test_the_way_to_a_case_and_back(opened):
    page = opened()
    row = next(row for row in RESULTS.rows if row.verdict == WRONG and row.note and row.case != HOSTILE)
    about = RESULTS.cases[row.case]
    where = {"operator": about.operator, "opset": str(about.opset), "builder": row.builder, "executor": row.executor}
    page.get_by_label(f"{about.operator}, opset {about.opset}, {row.builder} on {row.executor}").click()
    listed = sorted(found.case for found in rows_of(**where))
    sync_api.expect(page.locator("#cases tbody th")).to_have_text(listed)
    assert page.evaluate("document.activeElement.tagName") == "H2"
    page.get_by_role("link", name=row.case, exact=True).click()
    sync_api.expect(page.locator("h2")).to_have_text(row.case)
    assert page.title() == f"{row.case} · Gradient conformance"
    assert not page.locator("#filters").is_visible()
    assert page.locator(".verdicts tbody.chosen").count() == 1
    page.get_by_role("link", name="← Cases").click()
    sync_api.expect(page.locator("#cases tbody th")).to_have_text(listed)
    page.get_by_role("link", name="← Board").click()
    sync_api.expect(page.locator("#count")).to_have_text(f"{len(RESULTS.rows)} verdicts")
    for _ in range(4):
        page.go_back()
    page.wait_for_selector("#totals")
    assert page.url.endswith("#")


@pytest.mark.parametrize("case", [*sorted(RESULTS.cases)[::8], HOSTILE], ids=lambda name: name[:8])
def test_a_case_shows_everything_that_is_known(opened, case):
    page = opened(case=case)
    rows = {(row.builder, row.executor): row for row in rows_of(case=case)}
    shown = page.locator(".verdicts tbody").all()
    assert len(shown) == len(rows)
    for body in shown:
        builder, executor, verdict, witnesses, against, error, allowed = (
            text.strip() for text in body.locator("tr:first-child > *").all_text_contents()
        )
        row = rows[builder, executor]
        assert verdict == f"{MARKS[row.verdict]} {row.verdict}"
        assert (witnesses, against) == (", ".join(row.witnesses), ", ".join(row.against))
        if row.verdict != RIGHT:
            assert [float(x) if x else None for x in (error, allowed)] == [
                None if x is None else float(f"{x:.3g}") for x in (row.relative, row.allowed)
            ]
            assert body.locator(".note").all_text_contents() == ([printable(row.note)] if row.note else [])
        assert body.locator("code").text_content() == shell_line(RESULTS.command(row))
        assert shlex.split(RESULTS.command(row))[4] == case
    known = case != "Op1-1"
    assert page.locator("pre").all_text_contents() == ([to_text(MODEL)] if known else [])
    feeds = page.get_by_role("region", name="Feeds").locator("td, th[scope=row]").all_text_contents()
    assert feeds == (["x", "float32", "2", "1.5, -2"] if known else [])


def test_a_case_without_its_model_says_so(opened):
    page = opened(case="Op1-1")
    assert page.get_by_text("This page was written without the models.").is_visible()


def test_a_case_that_there_is_not(opened):
    page = opened(case="<img src=x onerror=alert(2)>")
    assert page.get_by_text("These results have no case called <img src=x onerror=alert(2)>.").is_visible()


def test_a_hostile_name_is_only_text(opened):
    page = opened(view="cases", operator="com.microsoft.<b>")
    assert page.locator("#cases tbody th").all_text_contents() == [printable(HOSTILE)]
    page.locator("#cases tbody th a").click()
    sync_api.expect(page.locator("h2")).to_have_text(printable(HOSTILE))
    assert page.locator("script").count() == 2  # the data and the program
    assert page.locator("main b").count() == 0


def test_marks_that_do_not_fit_the_filter_are_dimmed(opened):
    page = opened(view="cases", verdict=REFUSED)
    cases = {row.case for row in rows_of(verdict=REFUSED)}
    assert set(page.locator("#cases tbody th").all_text_contents()) == set(map(printable, cases))
    clear = page.locator("#cases td.mark:not(.dim) .hidden").all_text_contents()
    assert clear == [REFUSED] * len(rows_of(verdict=REFUSED))


def test_a_long_list_is_cut_and_says_so(browser, tmp_path):
    long = made(count=600, pairs=PAIRS[:1])
    write(long, tmp_path / "long.html")
    page = browser.new_page()
    page.goto(f"{(tmp_path / 'long.html').as_uri()}#view=cases")
    fitting = len({row.case for row in long.rows})
    assert page.get_by_text(f"{fitting} cases", exact=True).is_visible()
    assert page.locator("#cases tbody tr").count() == 500
    page.get_by_role("link", name="List them all").click()
    page.wait_for_function(f"document.querySelectorAll('#cases tbody tr').length === {fitting}")
    page.close()


# For everybody


def test_it_can_be_walked_with_the_keyboard(opened):
    page = opened()
    page.get_by_role("searchbox", name="Operator").focus()
    page.keyboard.type("Op2")
    for _ in range(8):  # the other filters, "Clear", the groups
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Groups of faults"
    first = page.locator("#groups a").first.inner_text()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(".verdicts")
    assert page.locator("h2").inner_text() == first


def test_the_groups_of_faults_are_listed_and_filtered(opened):
    found = groups.faults(RESULTS)
    page = opened()
    shown = page.locator("#groups tbody tr")
    assert shown.count() == 10 < len(found)
    first = shown.nth(0).inner_text()
    assert found[0].who in first
    assert found[0].fault in first
    assert found[0].command in first
    assert f"How sure: {found[0].certainty}" in first
    assert page.locator("#without li").all_inner_texts() == [
        printable(line) for line in groups.without_answer(groups.not_answered(RESULTS))
    ]
    page = opened(q="Op2", all="yes")
    assert shown.count() == len([group for group in found if group.operator == "Op2"])
    page = opened(builder="onnx-ad", verdict=WRONG, all="yes")
    assert shown.count() == len(
        [one for one in found if one.verdict == WRONG and (one.side != "builder" or one.name == "onnx-ad")]
    )
    page.locator("#groups a").first.click()
    sync_api.expect(page.locator(".verdicts")).to_have_count(1)


BASICS = {
    "select, input": "one.labels.length === 1",
    "th": "one.scope",
    ".scroll, pre": "one.tabIndex === 0 && one.ariaLabel",
    "a, button": "(one.ariaLabel ?? one.textContent).trim()",
    "[id]": "document.querySelectorAll('#' + one.id).length === 1",
    "h3": "document.querySelector('h2') && document.querySelector('h1')",
}
VIEWS = [{}, {"view": "cases"}, {"case": "Op2-2"}]


@pytest.mark.parametrize("opened", ["light", "dark"], indirect=True)
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_basics_of_accessibility(opened, view):
    page = opened(**view)
    assert page.locator("html").get_attribute("lang") == "en"
    for every, has in BASICS.items():
        assert (
            page.evaluate(
                f"[...document.querySelectorAll('{every}')].filter(one => !({has})).map(one => one.outerHTML)"
            )
            == []
        )
    assert page.evaluate(LOW_CONTRAST) == []


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_it_fits_a_phone(opened, view):
    page = opened(**view)
    page.set_viewport_size({"width": 375, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_a_page_that_cannot_be_read_says_so(browser, tmp_path, address):
    page = browser.new_page()
    page.add_init_script("delete window.DecompressionStream")
    page.goto(address)
    page.wait_for_function("document.querySelector('#summary').textContent.startsWith('This page cannot be read here')")
    page.close()
