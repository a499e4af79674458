"""Names made to harm, drawn at random from fragments, and functions that return the structure of a text without its texts."""

from __future__ import annotations

import ast
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
from markdown_it import MarkdownIt

FRAGMENTS = (
    # characters that a terminal or an editor obeys, or does not show
    "\x1b[31m", "\x1b]0;owned\x07", "\x9b2J", "\x00", "\x08\x7f", "\r", "\x85", "\u202e", "\u2066", "\u200b", "\ufeff",
    "\u2028", "\u2029", "\U000e0041", "\ufe0f\U000e0101", "\u3164", "\u034f",
    # lines
    "\nrefgrad: forged", "\n\n# Fake heading\n", "\n===\n", "\n---\n", "\n- item", "\n1. item", "\n    code",
    "\n| a | b |\n|---|---|\n",
    "\n```\n", "\n~~~\n", "\n> quote", "\nimport os\n", "\n</text></svg>\n", "\ntest\tname\tmodel\t0",
    # Markdown and HTML
    "<script>alert(1)</script>", "</script>", "<img src=x onerror=alert(1)>", "<!--", "-->", "]]>", "<![CDATA[", "<?xml?>",
    "&lt;",
    "&#x3c;", "[click](javascript:alert(1))", "![i](http://e.com/i)", "[a]: http://e.com", "<http://e.com>", "https://e.com",
    "www.e.com", "a@e.com", "`", "``", "````", "*b*", "__b__", "_i_", "~~s~~", "|", "\\", "\\|", "$x$", "#", "'", '"',
    "' onload='", '"/>',
    # programs and commands
    "{wrt}", "{outputs}", "{{runner}}", "{{data}}", "{tests}", "{0}", "{a.b}", "%s", "%(x)s",
    "', __import__('os').system('id'), '",
    '"""', "'''", "\\N{DIGIT ONE}", "${x}", "$(id)", "`id`", "; id", "&& id", "!!", "\\x1b", "*", "?", "[a-z]",
    "--help", "=1+1",
    # DOT
    '"];x[label="', "<b>", "\\N\\G\\L", "->", "//", "/*", "#",
    # harmless
    "plain", "größer", "数", " ", ".", "/",
)  # fmt: skip


def names(count: int, seed: int = 0) -> list[str]:
    """Every fragment, all of them in one name, and `count` names of some of them."""
    rng = np.random.default_rng(seed)
    return [*FRAGMENTS, "".join(FRAGMENTS), *(drawn(rng) for _ in range(count))]


def drawn(rng: np.random.Generator) -> str:
    """A name of a few fragments."""
    return "".join(FRAGMENTS[k] for k in rng.integers(len(FRAGMENTS), size=rng.integers(1, 9)))


def of_program(text: str) -> str:
    """The syntax tree of a program without the values of its literals."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.value = type(node.value).__name__
    return ast.dump(tree)


def of_markdown(text: str) -> list[object]:
    """The tokens of a page in Markdown, read as GitHub does, without texts."""
    return list(_tokens(MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)))


def _tokens(tokens):
    for token in tokens:
        yield ("text",) if token.type == "text" else (token.type, token.tag, str(token.attrs), token.markup, token.info)
        yield from _tokens(token.children or ())


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, *sorted(name for name, _ in attrs)))

    def handle_endtag(self, tag):
        self.found.append(f"/{tag}")

    def handle_comment(self, data):
        self.found.append("comment")

    def handle_decl(self, decl):
        self.found.append("declaration")

    def unknown_decl(self, data):
        self.found.append("unknown")

    def handle_pi(self, data):
        self.found.append("instruction")


def of_html(text: str) -> list[object]:
    """The elements of a page, with the names of their attributes."""
    page = _Page()
    page.feed(text)
    page.close()
    return page.found


def of_xml(text: str) -> list[object]:
    """The elements of a document, with the names of their attributes."""
    return [(one.tag, *sorted(one.attrib)) for one in ElementTree.fromstring(text).iter()]


def of_dot(text: str) -> str:
    """The statements of a picture without names and labels."""
    bare = re.sub(r'"(?:\\.|[^"\\])*"', "S", text)
    return re.sub(r"(?m)^(\s*)\w+(?= \[| ->)|(?<=-> )\w+", r"\1S", bare)


def of_json(text: str) -> object:
    """The structure of a document."""
    return _shape(json.loads(text))


def _shape(value: object) -> object:
    if isinstance(value, dict):
        return [_shape(item) for item in value.values()]
    return [_shape(item) for item in value] if isinstance(value, list) else type(value).__name__


def of_lines(text: str) -> int:
    """The number of lines."""
    return text.count("\n")
