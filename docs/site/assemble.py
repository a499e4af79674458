"""Assemble the source of the documentation site from docs/, the code and the results of the suite.

python docs/site/assemble.py                # writes build/site_source; sphinx-build -W makes the site of it
python docs/site/assemble.py FOLDER         # writes FOLDER, which must not exist
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import posixpath
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import navigation
import notebooks
import operators
import scripts
import text

from refgrad.conformance.reports.tally import counts_in
from refgrad.errors import RefgradError
from refgrad.model.writing import new_folder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "build" / "site_source"
REPORTS = ROOT / "reports"
RESULTS = REPORTS / "results"
PAGES = {  # pages whose place in the site is not that in docs/
    "docs/README.md": "index.md",
    "docs/site/given_model.md": "given_model.md",
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/operators.md": "operators/index.md",
}
FOLDERS = {
    "examples/training": "examples/regression.md",
    "docs/course": "course/README.md",
}  # what a link to a folder leads to
EXECUTED = ("docs/site/given_model.md",)  # pages whose examples run here; tests run those of the others
MODULES = (  # whose public names have a page
    "refgrad",
    "refgrad.recipes",
    "refgrad.backends",
    "refgrad.training",
    "refgrad.conformance",
    "refgrad.extend",
    "refgrad.errors",
)
_EXTERNAL = re.compile(r"^(https?|mailto):")


class SiteError(RefgradError):
    """The site cannot be assembled: what is wrong, a line each."""


@dataclass
class Site:
    """Pages (Markdown and reStructuredText) and files, by their path from the root of the site."""

    pages: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    def faults(self) -> Sequence[str]:
        """Return a sentence for every link that leads nowhere."""
        return text.missing(self.pages, self.files)

    def write(self, folder: Path) -> None:
        """Write every page and file below `folder`."""
        for path, content in (self.files | {path: page.encode() for path, page in self.pages.items()}).items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)


def sources(root: Path = ROOT) -> dict[str, str]:
    """Return the place in the site of every page that the repository has, by its path in the repository."""
    found = {
        path.relative_to(root).as_posix(): path.relative_to(root / "docs").as_posix()
        for path in sorted((root / "docs").rglob("*.md"))
        if path.parent != root / "docs" / "site"
    }
    reports = (path.relative_to(root).as_posix() for path in sorted((root / "reports").rglob("*.md")))
    books = {f"docs/notebooks/{name}.ipynb": f"notebooks/{name}.md" for name in notebooks.names()}
    return found | {path: path for path in reports} | books | PAGES


def moved(page: str, source: str, places: Mapping[str, str], files: dict[str, bytes], root: Path = ROOT) -> str:
    """Return a page of the repository with its links as the site has them, and add the files that it links to.

    A link to a page leads to its place. A file of docs/ or examples/ is copied; of anything else the text of the link stays.
    """
    here = places[source]

    def target_of(target: str) -> str | None:
        if _EXTERNAL.match(target) or target.startswith("#"):
            return target
        path, hash_, anchor = target.partition("#")
        named = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if named in places:
            return text.relative(places[named], here) + hash_ + anchor
        if named in FOLDERS:
            return text.relative(FOLDERS[named], here) if FOLDERS[named] in known else None
        file = root / named
        if named.startswith(("docs/", "examples/")) and file.is_file():
            files[f"files/{named}"] = file.read_bytes()
            return text.relative(f"files/{named}", here)
        return None

    known = {*places.values(), *(f"examples/{name}.md" for name in scripts.EXAMPLES)}
    return text.redirected(page, target_of)


def executed(page: str, source: str) -> str:
    """Return a page with what each of its Python examples prints below it. The examples go on where the one before ended.

    :raises SiteError: an example fails.
    """
    names: dict[str, object] = {"__name__": source}

    def run(match: re.Match[str]) -> str:
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                exec(match[1], names)
        except Exception as error:  # whatever an example raises
            raise SiteError(f"An example of {source} fails: {type(error).__name__}: {error}") from error
        return match[0] + (f"\n{text.fence(output.getvalue())}" if output.getvalue() else "")

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return re.sub(r"^```python\n(.*?)^```\n", run, page, flags=re.DOTALL | re.MULTILINE)


def reference() -> dict[str, str]:
    """Return a page of autodoc's directives for the public names of each of `MODULES`, and their index."""
    made = {}
    seen: set[int] = set()
    for name in MODULES:
        module = import_module(name)
        lines = [name, "=" * len(name), "", f".. currentmodule:: {name}", ""]
        lines += [*(inspect.getdoc(module) or "").splitlines()[:1], ""]
        for public in _public(module):
            thing = getattr(module, public)
            if inspect.ismodule(thing) or id(thing) in seen:
                continue
            seen.add(id(thing))
            if inspect.isclass(thing):
                lines += [f".. autoclass:: {name}.{public}", "   :members:", ""]
            elif callable(thing):
                lines += [f".. autofunction:: {name}.{public}", ""]
        made[f"reference/{name}.rst"] = "\n".join(lines)
    title = "Functions and classes"
    listed = [f"   {name}" for name in MODULES]
    about = "What can be imported, from the docstrings. :doc:`../api` says which of it is for what."
    made["reference/index.rst"] = "\n".join(
        [title, "=" * len(title), "", about, "", ".. toctree::", "   :maxdepth: 2", "", *listed, ""]
    )
    return made


def _public(module: object) -> list[str]:
    """The public names of a module: its __all__, else the functions and classes that it defines."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    name = getattr(module, "__name__", "")
    return [
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", "") == name
    ]


def records() -> operators.Records:
    """Return what the pages of operators quote."""
    return operators.Records(
        kinks=(DOCS / "kinks.md").read_text(encoding="utf-8"),
        known_bugs=(REPORTS / "findings.md").read_text(encoding="utf-8"),
        parity=json.loads((RESULTS / "parity.json").read_text(encoding="utf-8"))["operators"],
        verdicts=counts_in(json.loads((RESULTS / "scoreboard.json").read_text(encoding="utf-8"))),
        limitations=operators.read(DOCS),
    )


def assemble(names: Iterable[str] | None = None) -> Site:
    """Return the whole site; `names` are operators, and then only theirs of the operators' pages are made.

    :raises SiteError: an example fails, or a link leads nowhere.
    """
    site = Site()
    places = sources()
    for source, place in places.items():
        if source.endswith(".ipynb"):
            page, drawn = notebooks.page(notebooks.read(Path(source).stem), Path(source).stem)
            site.files |= {f"notebooks/{path}": picture.encode() for path, picture in drawn.items()}
        else:
            page = (ROOT / source).read_text(encoding="utf-8")
        page = executed(page, source) if source in EXECUTED else page
        site.pages[place] = moved(page, source, places, site.files)
    site.files |= {"conf.py": (HERE / "conf.py").read_bytes(), "_static/site.css": (HERE / "site.css").read_bytes()}
    try:
        texts, pictures = scripts.pages()
        made = operators.pages(records(), None if names is None else list(names))
    except (RuntimeError, ValueError) as error:
        raise SiteError(str(error)) from error
    site.pages |= texts | {path: page.text for path, page in made.items()}
    site.files |= {path: picture.encode() for path, picture in pictures.items()}
    site.files |= {
        f"operators/pictures/{name}": svg.encode() for page in made.values() for name, svg in page.pictures.items()
    }
    if names is None:
        site.pages["operators/index.md"] = operators.index(site.pages["operators/index.md"])
    site.pages |= reference()
    listed = {path.rpartition(".")[0] for path in site.pages} - {"index"}
    listed = {path for path in listed if not path.startswith(("operators/", "reference/"))} | {
        "operators/index",
        "reference/index",
    }
    chapters = sorted(path for path in listed if path.startswith("course/"))
    chapters.sort(key=lambda path: not path.endswith("README"))
    orphans = {path for path in listed if path.startswith("reports/findings/")}
    for path in orphans:
        site.pages[f"{path}.md"] = text.front_matter(orphan=True) + site.pages[f"{path}.md"]
    site.pages["index.md"] += "\n" + navigation.trees(listed - orphans, chapters)
    faults = site.faults()
    if faults:
        raise SiteError("Links lead nowhere. Mend them in the page, or in docs/site:\n" + "\n".join(faults))
    return site


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the source of the site."""
    parser = argparse.ArgumentParser(description="Assemble the source of the documentation site.")
    parser.add_argument(
        "folder", nargs="?", type=Path, help=f"a folder that does not exist (default: {SOURCE}, written anew)"
    )
    chosen = parser.parse_args(arguments)
    start = time.monotonic()
    target = chosen.folder or SOURCE
    try:
        site = assemble()
        if chosen.folder is None:
            shutil.rmtree(SOURCE, ignore_errors=True)
            SOURCE.parent.mkdir(exist_ok=True)
        with new_folder(target) as folder:
            site.write(folder)
    except RefgradError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    linked = sum(len(text.links(page)) for page in site.pages.values())
    print(f"{target}: {len(site.pages)} pages, {linked} links, in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
