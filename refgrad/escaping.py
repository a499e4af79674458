"""Text of a model for people to read: one function per medium, which every writer uses.

A name in a model is text from a stranger. It may have escape sequences, which a terminal obeys, characters that reverse the
direction of text, line breaks, letters that cannot be seen, and markup. The medium shows the result of a function as text,
which may differ from the name. A program that refgrad writes gets names as data: as one literal (`python`), or in a file
beside it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from html import escape
from typing import Any

REPLACEMENT = "\ufffd"  # what Unicode shows for a character that cannot be shown

# Default_Ignorable_Code_Point of Unicode, as far as str.isprintable() lets it pass: fillers and variation selectors.
_UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
_OF_MARKDOWN = re.compile(
    r"[\\`*{}\[\]<>|~#&$]"  # emphasis, code, links, images, HTML, tables, headings, entities, formulas
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis, except between letters
    r"|:(?=//)|(?<=[wW]{3})\.(?!\s)|@(?=[\w.-]+\.[^\W\d])",  # what GitHub makes a link of
)
_BEGINS_A_BLOCK = re.compile(r"^(\d{0,9})([-+=.)])(?=\s|$|[-=])")  # a list, a line, the underline of a heading
_IN_CODE = re.compile(r"[\w .,:;/+=()-]")
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # full-width letters count in spreadsheets, too
_NUMBER = re.compile(r"[-+]?(\d[\d.]*(e[-+]?\d+)?|inf|nan)")


def is_printable(text: str) -> bool:
    """True if every character of `text` can be seen (or is a space), and no terminal or editor obeys one."""
    return text.isprintable() and not _UNSEEN.search(text)


def printable(text: str) -> str:
    r"""Return `text` for a line in a terminal or a text file. A replacement character stands for each unprintable one.

    A line break is replaced, too, so that a name begins no line.

    >>> printable("a\x1b[31mb\n")
    'a�[31mb�'
    """
    if is_printable(text):
        return text
    return _UNSEEN.sub(REPLACEMENT, "".join(letter if letter.isprintable() else REPLACEMENT for letter in text))


def lines(text: str) -> str:
    """Return a text of several lines for a terminal or a text file. refgrad made the line breaks, not a name."""
    return "\n".join(map(printable, text.split("\n")))


def html(text: str) -> str:
    """Return `text` for an element or an attribute of HTML, SVG or other XML, in quotes of either kind.

    >>> html("<b a='&'>")
    '&lt;b a=&#x27;&amp;&#x27;&gt;'
    """
    return escape(printable(text), quote=True)


def markdown(text: str) -> str:
    r"""Return `text` for Markdown on one line: a paragraph, a heading, a cell of a table or an entry of a list.

    >>> markdown("# a_b <script>")
    '\\# a_b \\<script\\>'
    """
    plain = printable(" ".join(text.split()))
    return _BEGINS_A_BLOCK.sub(r"\1\\\2", _OF_MARKDOWN.sub(r"\\\g<0>", plain))


def code(text: str) -> str:
    r"""Return a name for a block of code in Markdown, with escapes for characters that could end the block or be markup.

    >>> code("layer.0/y"), code("```\n<b>")
    ('layer.0/y', '\\u0060\\u0060\\u0060\\u000a\\u003cb\\u003e')
    """
    return "".join(map(_code_letter, text))


def _code_letter(letter: str) -> str:
    if is_printable(letter) and _IN_CODE.match(letter):
        return letter
    return f"\\u{ord(letter):04x}" if letter < "\U00010000" else f"\\U{ord(letter):08x}"


def dot(text: str) -> str:
    r"""Return `text` for a quoted string in the DOT language, without the quotes.

    >>> dot('a"\\')
    'a\\"\\\\'
    """
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')


def csv_cell(value: object) -> str:
    """Return a cell for a .csv file that no spreadsheet takes for a formula.

    See https://owasp.org/www-community/attacks/CSV_Injection. The writer of the file adds quotes.
    """
    text = printable(str(value))
    return f"'{text}" if text.startswith(_FORMULA) and not _NUMBER.fullmatch(text) else text


def json_text(text: str) -> str:
    """Return the JSON `text` with an escape for each character that is not printable. Its meaning is the same."""
    if is_printable(text.replace("\n", "")):
        return text
    odd = (letter for letter in set(text) if letter != "\n" and not is_printable(letter))
    return text.translate({ord(letter): json.dumps(letter)[1:-1] for letter in odd})


def shell(word: str) -> str:
    r"""Return `word` quoted for a command that a reader pastes into a shell. There it is one word, whatever it contains.

    A word with characters that are not printable is quoted with `$'\033'`, which bash, zsh and POSIX 2024 have.

    >>> shell("a.onnx"), shell("a b; rm"), shell("a\x1b")
    ('a.onnx', "'a b; rm'", "$'a\\033'")
    """
    if is_printable(word):
        return shlex.quote(word)
    return f"$'{''.join(map(_shell_letter, word))}'"


def shell_line(command: str) -> str:
    """Return a command that `shlex` quoted, with each word quoted as by `shell`."""
    return " ".join(map(shell, shlex.split(command)))


def _shell_letter(letter: str) -> str:
    if letter in "\\'":
        return f"\\{letter}"
    if is_printable(letter):
        return letter
    return "".join(f"\\{byte:03o}" for byte in letter.encode(errors="surrogateescape"))


def shell_path(path: str | os.PathLike[str]) -> str:
    """Return a path quoted as by `shell`. A path that begins with a dash does not become an option."""
    text = os.fspath(path)
    return shell(os.path.join(os.curdir, text) if text.startswith("-") else text)


def python(value: Any) -> str:
    r"""Return a literal of Python: None, a number, text, or lists and dicts of these. A program has no other data.

    >>> python({"wrt": ["x\u202e"]})
    "{'wrt': ['x\\u202e']}"
    """
    return ascii(value)
