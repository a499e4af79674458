"""Check the site that was built: links and anchors lead somewhere, nothing comes from elsewhere, no page runs code of its own.

python docs/site/built.py build/site
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("embed", "src")}
LOADS |= {("object", "data"), ("link", "href")}
_ADDRESS = re.compile(r"url\(\s*[\"']?\s*(?:https?:)?//|@import", re.IGNORECASE)

_CODE = re.compile(r"<script|<foreignObject|<[^>]*\son\w+=|javascript:", re.IGNORECASE)


@dataclass
class _Page(HTMLParser):
    """What a page of HTML links to, loads, and has for anchors."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    handlers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Sort the attributes of one element."""
        for name, value in attrs:
            value = value or ""
            if (tag, name) in LOADS:
                self.loads.append(value)
            elif name == "href":
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.ids.add(value)
            elif name.startswith("on"):
                self.handlers.append(f"{name}={value}")
            if name == "style" and _ADDRESS.search(value):
                self.loads.append(value)


def _elsewhere(address: str) -> bool:
    return bool(re.match(r"^(?:[a-z][a-z0-9+.-]*:|//)", address, re.IGNORECASE)) and not address.startswith(
        "data:image/"
    )


def faults(root: Path) -> tuple[list[str], int]:
    """Return what is wrong with the site below `root`, a sentence each, and the number of links that were followed."""
    pages = {path.relative_to(root).as_posix(): _parsed(path) for path in sorted(root.rglob("*.html"))}
    found, count = [], 0
    for name, page in pages.items():
        found += [f"{name} loads {address} from elsewhere." for address in page.loads if _elsewhere(address)]
        found += [f"{name} runs code: {handler}." for handler in page.handlers]
        for address in (*page.links, *page.loads):
            parts = urlsplit(address)
            if address in page.loads and _elsewhere(address):
                continue  # said above
            if parts.scheme in ("http", "https", "mailto") or address.startswith("data:image/"):
                continue
            if parts.scheme or parts.netloc:
                found.append(f"{name} links to {address}.")
                continue
            count += 1
            place = (
                posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) if parts.path else name
            )
            if not (root / place).is_file():
                found.append(f"{name} links to {address}, and there is no {place}.")
            elif parts.fragment and place in pages and unquote(parts.fragment) not in pages[place].ids:
                found.append(f"{name} links to {address}, and {place} has no such anchor.")
    found += [f"{sheet} loads something from elsewhere." for sheet in _sheets(root)]
    return found, count


def _parsed(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _sheets(root: Path) -> Iterator[str]:
    for path in sorted([*root.rglob("*.css"), *root.rglob("*.svg")]):
        text = path.read_text(encoding="utf-8")
        hostile = path.suffix == ".svg" and re.search(
            r"<script|<foreignObject|<[^>]*\son\w+=[^>]*>|javascript:", text, re.IGNORECASE
        )
        if _ADDRESS.search(text) or hostile:
            yield path.relative_to(root).as_posix()


def main(arguments: Sequence[str]) -> int:
    """Print what is wrong with the site in a folder."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("Give the folder of a built site: python docs/site/built.py build/site", file=sys.stderr)
        return 2
    root = Path(arguments[0])
    found, count = faults(root)
    for sentence in found:
        print(sentence, file=sys.stderr)
    print(f"{root}: {len(list(root.rglob('*.html')))} pages, {count} links, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
