"""Numbers of bytes as people write them: "2 GiB", "800 MB", "500M"."""

from __future__ import annotations

import re

_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(?:([KMGT])(I?)(B?)|B|BYTES)?\s*", re.IGNORECASE)
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def in_bytes(text: str) -> int | None:
    """The bytes in a number, or in a number and a unit. None where `text` is neither.

    >>> in_bytes("2 GiB"), in_bytes("500M"), in_bytes("800 MB"), in_bytes("much")
    (2147483648, 524288000, 800000000, None)
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    number, letter, binary, byte = found.groups()
    return int(float(number) * (1000 if byte and not binary else 1024) ** " KMGT".index((letter or " ").upper()))


def readable(size: float) -> str:
    """A number of bytes in words: "1.5 MiB"."""
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} {_UNITS[-1]}"
