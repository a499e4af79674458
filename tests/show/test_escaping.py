"""The output of `refgrad.escaping` is text in each medium: independent parsers find nothing but text in it."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import hostile
import pytest
from markdown_it import MarkdownIt

from refgrad import escaping

pytestmark = pytest.mark.interpreter

NAMES = [*hostile.names(150), "", " ", "\t", "a", "0", "-", "+1", "1.", "1.5", "-3e-5"]
ROOT = Path(__file__).parents[2]
MEDIA = {
    "printable": escaping.printable,
    "html": escaping.html,
    "markdown": escaping.markdown,
    "code": escaping.code,
    "dot": escaping.dot,
    "csv_cell": escaping.csv_cell,
    "shell": escaping.shell,
    "python": escaping.python,
}


def visible(text: str) -> str:
    """The characters of a text that a reader has to see."""
    return escaping.printable(" ".join(text.split()))


@pytest.mark.parametrize("medium", MEDIA)
def test_nothing_is_obeyed_or_hidden(medium: str) -> None:
    for name in NAMES:
        made = MEDIA[medium](name)
        assert made.isprintable(), (medium, name)
        assert not re.search("[\u034f\u3164\ufe00-\ufe0f\U000e0000-\U000e0fff]", made), (medium, name)


@pytest.mark.parametrize("letter", [chr(number) for number in range(0x20)], ids=ascii)
def test_every_control_character_is_replaced(letter: str) -> None:
    assert escaping.printable(f"a{letter}b") == escaping.printable(f"a{chr(ord(letter) + 0x80)}b") == "a\ufffdb"


def test_what_can_be_seen_stays() -> None:
    for name in ("größer", "数", "x/y.0:z", "∂y/∂x", "a b", "é"):
        assert escaping.printable(name) == name
        assert ascii(name) == escaping.python(name)


class _Texts(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts, self.title = "", ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.title = dict(attrs).get("title") or ""

    def handle_data(self, data: str) -> None:
        self.texts += data


@pytest.mark.parametrize("quote", ["'", '"'])
def test_html_and_xml(quote: str) -> None:
    for name in NAMES:
        element = f"<b title={quote}{escaping.html(name)}{quote}>{escaping.html(name)}</b>"
        page, document = _Texts(element), ElementTree.fromstring(element)
        shown = escaping.printable(name)
        assert (page.tags, page.title, page.texts) == (["b"], shown, shown)
        assert (document.attrib, document.text or "", list(document)) == ({"title": shown}, shown, [])


@pytest.mark.parametrize(
    "page",
    [
        "{}",
        "# {}",
        "text {} text",
        "- {}",
        "{}\ntext",
        "text\n{}",
        "> {}",
        "| h |\n|---|\n| {} |",
        "| {} |\n|---|\n| c |",
    ],
    ids=ascii,
)
def test_markdown(page: str) -> None:
    before, after = page.split("{}")
    for name in NAMES:
        if not visible(name):
            continue
        text = f"{before}{escaping.markdown(name)}{after}"
        assert hostile.of_markdown(text) == hostile.of_markdown(f"{before}tame{after}"), name
        reader = MarkdownIt("commonmark").enable("table")
        tokens = [child for token in reader.parse(text) for child in token.children or ()]
        texts = "".join(token.content if token.type == "text" else "\n" for token in tokens)
        assert visible(name) in texts, name


def test_markdown_has_no_links_of_github() -> None:
    """GitHub makes links of texts, which CommonMark does not: https://github.github.com/gfm/#autolinks-extension-."""
    for name in NAMES:
        assert not re.search(r"(?i)\b(https?|ftp):/|www\.\w|\w@[\w-]+\.[a-z]", escaping.markdown(name)), name


def test_a_block_of_code_ends_where_it_is_to() -> None:
    for name in NAMES:
        tokens = MarkdownIt("commonmark").parse(f"```\n{escaping.code(name)}\n```\n")
        assert [token.type for token in tokens] == ["fence"], name
        assert tokens[0].content == f"{escaping.code(name)}\n"
        assert not re.search("[`<>&]", tokens[0].content)


def test_code_leaves_usual_names_alone() -> None:
    for name in ("layer.0/MatMul_1", "aten::add", "x y", "größer", "a-b+c=(d)"):
        assert escaping.code(name) == name


def test_dot() -> None:
    for name in NAMES:
        assert re.fullmatch(r'(?:\\.|[^"\\])*', escaping.dot(name)), name


def test_csv() -> None:
    for name in NAMES:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow([escaping.csv_cell(name), "end"])
        [[cell, end]] = csv.reader(io.StringIO(text.getvalue()))
        assert end == "end"
        assert cell.removeprefix("'") == escaping.printable(name).removeprefix("'")
        assert cell[:1] not in tuple("=@＝＋－＠")
    assert list(map(escaping.csv_cell, ("-1.5e-3", "-x", "+1", "=1", -2))) == ["-1.5e-3", "'-x", "+1", "'=1", "-2"]


def test_json() -> None:
    document = {name: [name] for name in NAMES}
    text = escaping.json_text(json.dumps(document, ensure_ascii=False, indent=1))
    assert json.loads(text) == document
    assert text.replace("\n", "").isprintable()


def test_a_literal_of_python() -> None:
    for name in NAMES:
        value = {"names": [name, None], name: 1.5}
        text = escaping.python(value)
        assert text.isascii()
        assert ast.literal_eval(text) == value
        assert text.count("\n") == 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_shell_gets_the_word_that_was_meant() -> None:
    words = [name for name in NAMES if "\0" not in name]  # no word of a command has one
    script = f"printf '%s\\0' {' '.join(map(escaping.shell, words))}"
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    assert done.stdout.decode().split("\0")[:-1] == words
    assert escaping.shell_line(shlex.join(words)) == " ".join(map(escaping.shell, words))


def test_a_path_is_no_option() -> None:
    assert escaping.shell_path("-x.py") == "./-x.py"
    assert escaping.shell_path(Path("a b.py")) == "'a b.py'"
    assert escaping.shell_path(b"\xff.py".decode(errors="surrogateescape")) == r"$'\377.py'"


def test_the_pages_replace_the_same_characters() -> None:
    """Their scripts show names. What Python calls printable, and JavaScript's \\p{C}, differ in spaces alone."""
    odd = re.compile(r"const ODD = /\[\\p\{C\}\\p\{Zl\}\\p\{Zp\}(.*)\]/gu;")
    for file in ("refgrad/walks/page.js", "conformance/reports/page.html"):
        [found] = odd.findall((ROOT / file).read_text(encoding="utf-8"))
        written = re.sub(r"\\u\{([0-9a-f]+)\}|\\u([0-9a-f]{4})", lambda m: chr(int(m[1] or m[2], 16)), found)
        assert f"[{written}]" == escaping._UNSEEN.pattern, file
