r"""Patterns of RE2, which ONNX names, as patterns of Python's `re`.

The syntax is documented at https://github.com/google/re2/wiki/Syntax. Where both know a form, they differ in this: \d, \w, \s
and \b of RE2 match ASCII only, its $ is not before a last newline, {,2} are letters. A pattern that needs backtracking is
refused.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from itertools import pairwise

Ranges = list[tuple[int, int]]

_LAST = 0x10FFFF
_DIGIT: Ranges = [(0x30, 0x39)]
_UPPER: Ranges = [(0x41, 0x5A)]
_LOWER: Ranges = [(0x61, 0x7A)]
_LETTER = _UPPER + _LOWER
_WORD = [*_DIGIT, *_UPPER, (0x5F, 0x5F), *_LOWER]
_SHORTHANDS = {"d": _DIGIT, "w": _WORD, "s": [(9, 10), (12, 13), (32, 32)]}
_CLASSES: dict[str, Ranges] = {
    "alnum": _DIGIT + _LETTER,
    "alpha": _LETTER,
    "ascii": [(0, 0x7F)],
    "blank": [(9, 9), (32, 32)],
    "cntrl": [(0, 31), (127, 127)],
    "digit": _DIGIT,
    "graph": [(33, 126)],
    "lower": _LOWER,
    "print": [(32, 126)],
    "punct": [(33, 47), (58, 64), (91, 96), (123, 126)],
    "space": [(9, 13), (32, 32)],
    "upper": _UPPER,
    "word": _WORD,
    "xdigit": [*_DIGIT, (0x41, 0x46), (0x61, 0x66)],
}
_CONTROLS = {"a": 7, "f": 12, "t": 9, "n": 10, "r": 13, "v": 11}
_REPEAT = re.compile(r"([*+?]|\{(\d+)(?:,(\d*))?\})(\??)")
_GROUP = re.compile(r"\(\?(?:P?<(\w+)>|([imsU]*)(?:-([imsU]+))?([:)]))")
_POSIX = re.compile(r"\[:(\^?)(\w+):\]")
_PROPERTY = re.compile(r"\\([pP])(?:\{(\^?)(\w+)\}|(\w))")
_HEX = re.compile(r"\\x(?:\{([0-9A-Fa-f]+)\}|([0-9A-Fa-f]{2}))")
_OCTAL = re.compile(r"\\(0[0-7]{0,2}|[1-7][0-7]{1,2})")


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return `pattern` ready to match; ValueError where it is not a pattern of RE2."""
    try:
        return re.compile(_Reader(pattern).read())
    except (re.error, OverflowError) as error:
        raise ValueError(f"{pattern!r} is not a valid pattern of RE2: {error}") from error


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.flags = frozenset[str]()
        self.outer: list[tuple[frozenset[str], int]] = []  # of the groups around: their flags, their scopes
        self.scopes = 0  # scopes of Python opened by flags that hold up to the end of the group

    def fail(self, why: str) -> ValueError:
        return ValueError(f"{self.pattern!r} is not a valid pattern of RE2: {why} at {self.at}")

    def read(self) -> str:
        """Return the pattern in Python's syntax."""
        written = []
        while self.at < len(self.pattern):
            piece = self._piece()
            written.append(piece + self._repeat())
        if self.outer:
            raise self.fail("missing )")
        return "".join(written) + ")" * self.scopes

    def _piece(self) -> str:
        letter = self.pattern[self.at]
        if letter == "(":
            return self._open()
        if letter == "[":
            return self._class()
        if letter == "\\":
            return self._escape()
        self.at += 1
        match letter:
            case ")":
                if not self.outer:
                    raise self.fail("unexpected )")
                closed = ")" * (self.scopes + 1)
                self.flags, self.scopes = self.outer.pop()
                return closed
            case "|":
                return ")" * self.scopes + "|" + self._scope() * self.scopes
            case "^":
                return "(?m:^)" if "m" in self.flags else r"(?:\A)"
            case "$":
                return "(?m:$)" if "m" in self.flags else r"(?:\Z)"
            case ".":
                return "(?s:.)" if "s" in self.flags else "."
            case "*" | "+" | "?":
                raise self.fail(f"nothing before {letter}")
        return re.escape(letter)

    def _scope(self) -> str:
        return "(?i:" if "i" in self.flags else "(?-i:"

    def _open(self) -> str:
        if not self.pattern.startswith("(?", self.at):
            self.at += 1
            self.outer.append((self.flags, self.scopes))
            self.scopes = 0
            return "(?:"
        found = _GROUP.match(self.pattern, self.at)
        if found is None:
            raise self.fail("a group that needs backtracking, or that RE2 does not have")
        self.at = found.end()
        name, on, off, end = found.groups()
        flags = self.flags if name else self.flags.union(on) - frozenset(off or "")
        if end == ")":
            self.flags = flags
            self.scopes += 1
            return self._scope()
        self.outer.append((self.flags, self.scopes))
        self.flags, self.scopes = flags, 0
        return "(?:" if name else self._scope()

    def _repeat(self) -> str:
        found = _REPEAT.match(self.pattern, self.at)
        if found is None:
            return ""
        before = self.pattern[self.at - 1]
        if before in "(|" and not self.pattern[: self.at - 1].endswith("\\"):
            raise self.fail("nothing to repeat")
        self.at = found.end()
        times, low, high, lazy = found.groups()
        if max(int(low or 0), int(high or 0)) > 1000:
            raise self.fail("more than 1000 times")
        if _REPEAT.match(self.pattern, self.at):
            raise self.fail("a repetition of a repetition")
        return str(times) + ("?" if bool(lazy) != ("U" in self.flags) else "")

    def _escape(self) -> str:
        """Read what follows a backslash outside of brackets."""
        letter = self.pattern[self.at + 1 : self.at + 2]
        place = {"A": r"(?:\A)", "z": r"(?:\Z)", "b": r"(?a:\b)", "B": r"(?!(?a:\b))"}.get(letter)
        if place is not None:
            self.at += 2
            return place
        if letter == "Q":
            text, _, _ = self.pattern[self.at + 2 :].partition(r"\E")
            self.at = min(self.at + 4 + len(text), len(self.pattern))
            return "".join(f"(?:{re.escape(c)})" for c in text)
        ranges = self._set()
        return _written(ranges) if ranges is not None else _written([(self._letter(),) * 2])

    def _set(self) -> Ranges | None:
        r"""Read \d, \W, \pL and their like, which may stand in brackets; None where there is no such set."""
        letter = self.pattern[self.at + 1 : self.at + 2]
        if letter.lower() in _SHORTHANDS and letter:
            self.at += 2
            ranges = _SHORTHANDS[letter.lower()]
            return ranges if letter.islower() else _others(ranges)
        found = _PROPERTY.match(self.pattern, self.at)
        if found is None:
            return None
        sign, caret, name, short = found.groups()
        ranges = _category(name or short)
        if not ranges:
            raise self.fail(f"the set {name or short} of Unicode is not known here: only its general categories are")
        self.at = found.end()
        return _others(ranges) if (sign == "P") != bool(caret) else ranges

    def _letter(self) -> int:
        """Read one letter, escaped or not."""
        letter = self.pattern[self.at]
        if letter != "\\":
            self.at += 1
            return ord(letter)
        for number, base in ((_HEX, 16), (_OCTAL, 8)):
            found = number.match(self.pattern, self.at)
            if found is not None:
                self.at = found.end()
                return int(next(filter(None, found.groups())), base)
        escaped = self.pattern[self.at + 1 : self.at + 2]
        if escaped not in _CONTROLS and (not escaped.isascii() or escaped.isalnum() or not escaped):
            raise self.fail(f"unknown escape \\{escaped}")
        self.at += 2
        return _CONTROLS.get(escaped, ord(escaped))

    def _class(self) -> str:
        start = self.at
        self.at += 1
        negated = self.pattern.startswith("^", self.at)
        self.at += negated
        first, ranges = self.at, Ranges()
        while not (self.pattern.startswith("]", self.at) and self.at > first):
            if self.at >= len(self.pattern):
                self.at = start
                raise self.fail("missing ]")
            posix = _POSIX.match(self.pattern, self.at)
            if posix is not None:
                self.at = posix.end()
                if posix[2] not in _CLASSES:
                    raise self.fail(f"unknown class {posix[2]}")
                ranges += _others(_CLASSES[posix[2]]) if posix[1] else _CLASSES[posix[2]]
                continue
            members = self._set() if self.pattern[self.at] == "\\" else None
            if members is None:
                low = high = self._letter()
                if self.pattern.startswith("-", self.at) and self.pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                    self.at += 1
                    high = self._letter()
                if high < low:
                    raise self.fail("a range that ends before it starts")
                members = [(low, high)]
            ranges += members
        self.at += 1
        return _written(ranges, "^" if negated else "")


def _written(ranges: Ranges, sign: str = "") -> str:
    """Write a set of letters as a class of Python's."""
    return f"[{sign}{''.join(f'{_code(low)}-{_code(high)}' for low, high in ranges)}]"


def _code(letter: int) -> str:
    if letter > _LAST:
        raise OverflowError(f"{letter:x} is not a letter of Unicode")
    return f"\\U{letter:08x}"


def _others(ranges: Ranges) -> Ranges:
    """Return the letters that are not in `ranges`, which are sorted."""
    ends = [(-1, -1), *ranges, (_LAST + 1, _LAST + 1)]
    return [(a[1] + 1, b[0] - 1) for a, b in pairwise(ends) if a[1] + 1 < b[0]]


@cache
def _category(name: str) -> Ranges:
    """Return the letters of a general category of Unicode, or of several: L is Lu, Ll, Lt, Lm and Lo."""
    if name == "Any":
        return [(0, _LAST)]
    inside = [unicodedata.category(chr(letter)).startswith(name) for letter in range(_LAST + 1)]
    ranges, start = Ranges(), 0
    for letter in range(1, _LAST + 2):
        if letter > _LAST or inside[letter] != inside[start]:
            if inside[start]:
                ranges.append((start, letter - 1))
            start = letter
    return ranges
