"""Markdown as the site needs it: cells, tables, fences, and links that lead to the page that a file has become."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^ *(```+|~~~+)")
_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")


def fence(text: str, language: str = "text") -> str:
    """Return `text` as a block of code that nothing within it can end."""
    longest = max([2, *(len(run) for run in re.findall(r"`+", text))])
    mark = "`" * (longest + 1)
    return f"{mark}{language}\n{text.rstrip()}\n{mark}\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Its cells are Markdown on one line: what is not ours goes through `escaped` first."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def front_matter(**entries: bool) -> str:
    """Return the lines before a page that tell the generator something."""
    return "---\n" + "".join(f"{key}: {str(value).lower()}\n" for key, value in entries.items()) + "---\n"


def _prose(text: str) -> Iterator[tuple[str, bool]]:
    """The lines of a page, each with whether it is prose and not code."""
    mark = ""
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if found and (not mark or (found[1].startswith(mark) and line.strip() == found[1])):
            mark = "" if mark else found[1]
            yield line, False
        else:
            yield line, not mark


def links(text: str) -> list[str]:
    """Return the targets of the links and pictures of a page, in their order."""
    found: list[str] = []
    redirected(text, lambda target: found.append(target) or target)
    return found


def redirected(text: str, target_of: Callable[[str], str | None]) -> str:
    """Return a page whose links lead to `target_of(target)`; where that is None, the text of the link stays.

    A link to HTML is marked as external: the generator does not make that file.
    """

    def replace(match: re.Match[str]) -> str:
        target = target_of(match[3])
        return (
            match[2] if target is None else f"{match[1]}[{match[2]}]({target})" + "{.external}" * made_elsewhere(target)
        )

    def outside_of_spans(line: str) -> str:
        spans = list(_SPAN.finditer(line))

        def unless_in_code(match: re.Match[str]) -> str:
            inside = any(span.start() < match.start() and match.end() < span.end() for span in spans)
            return match[0] if inside else replace(match)

        return _LINK.sub(unless_in_code, line)

    return "".join(outside_of_spans(line) if prose else line for line, prose in _prose(text))


def made_elsewhere(target: str) -> bool:
    """True if a link of the site leads to HTML that the generator only copies."""
    return target.endswith(".html") and "://" not in target


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub writes them."""
    found: dict[str, int] = {}
    names = set()
    for line, prose in _prose(text):
        heading = re.match(r"^#{1,6} +(.*?)\s*#*$", line) if prose else None
        if heading:
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
            slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
            number = found.get(slug, 0)
            found[slug] = number + 1
            names.add(f"{slug}-{number}" if number else slug)
    return names


def relative(target: str, page: str) -> str:
    """Return the path from the folder of `page` to `target`, both from the root of the site."""
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def missing(pages: Mapping[str, str], files: Iterable[str]) -> Sequence[str]:
    """Return a sentence for every link between `pages` that leads nowhere. `files` are there besides."""
    names = {page: anchors(text) for page, text in pages.items()}
    there = set(files)
    found = []
    for page, text in pages.items():
        for target in links(text):
            if re.match(r"^(https?|mailto):", target):
                continue
            path, _, anchor = target.partition("#")
            place = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
            if place not in names and place not in there:
                found.append(f"{page} links to {target}, and there is no {place}.")
            elif anchor and place in names and anchor not in names[place]:
                found.append(f"{page} links to {target}, and {place} has no heading of that name.")
    return found
